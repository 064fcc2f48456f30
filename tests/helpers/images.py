"""Helper functions for the tests of image processors."""

from io import BytesIO

import numpy as np
import torch

from hf_vit import HfViTImageProcessor, HfViTImageProcessorPil


BACKENDS = {"torchvision": HfViTImageProcessor, "pil": HfViTImageProcessorPil}
PLAIN = {"do_resize": False, "do_rescale": False, "do_normalize": False}


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def read(backend, image, **options):
    """Returns the pixels (C, H, W) of an image as an image processor reads them, before resizing and rescaling."""
    return backend(**{**PLAIN, **options})(image, return_tensors="pt").pixel_values[0]


def as_chw(array):
    return torch.tensor(np.atleast_3d(array)).movedim(-1, 0).float()


def png(image):
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
