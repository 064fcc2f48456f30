"""Image processor with the torchvision backend."""

from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import PILImageResampling

from .configuration_hf_vit import copy_code


class HfViTImageProcessor(TorchvisionBackend):
    """Placeholder."""

    resample = PILImageResampling.BILINEAR
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.5, 0.5, 0.5]
    size = {"height": 224, "width": 224}
    do_resize = True
    do_rescale = True
    do_normalize = True

    def save_pretrained(self, save_directory, **kwargs):
        """Saves."""
        copy_code(save_directory)
        return super().save_pretrained(save_directory, **kwargs)
