"""Image processor that resizes with torchvision, on the CPU or on a GPU."""

from typing import Any

import torch
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_transforms import group_images_by_shape, reorder_images
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.utils.import_utils import is_torchvision_available

from .image_geometry import resize_with_pil
from .image_processing_base import HfViTImageProcessorBase, HfViTImageProcessorKwargs, Images, Sizes


class HfViTImageProcessor(HfViTImageProcessorBase, TorchvisionBackend):
    """Image processor that uses torchvision. `HfViTImageProcessorBase` describes the options.

    Resized 8-bit pixels differ from those of the PIL image processor by at most one gray level. The exception is
    bicubic resizing on a GPU: about 4 in 10,000 pixels of a photo, at sharp edges, differ by more, because PIL clips
    values between the horizontal and the vertical pass.
    """

    valid_kwargs = HfViTImageProcessorKwargs

    def __init__(self, **kwargs: Any) -> None:
        if not is_torchvision_available():
            raise ImportError("torchvision is not installed. Use HfViTImageProcessorPil or pip install torchvision.")
        super().__init__(**kwargs)

    def _resize_smoothly(self, images: Images, sizes: Sizes, options: dict[str, Any]) -> Images:
        """Resizes images of equal shape together on a GPU, but one by one on a CPU, where this is faster."""
        is_mixed = len({image.dtype for image in images}) > 1  # stacking would convert all images to float
        groups, places = group_images_by_shape(images, disable_grouping=is_mixed or options["disable_grouping"])
        targets = {places[index][0]: size for index, size in enumerate(sizes)}  # equal for all images of a group
        resized = {key: self._resize_batch(batch, *targets[key], options["resample"]) for key, batch in groups.items()}
        return list(reorder_images(resized, places))

    def _resize_batch(
        self, images: torch.Tensor, height: int, width: int, resample: PILImageResampling
    ) -> torch.Tensor:
        """Resizes images (B, C, H, W) by torchvision if the result is close to that of PIL, otherwise by PIL."""
        is_shrunk = height <= images.shape[-2] and width <= images.shape[-1]
        is_exact = resample == PILImageResampling.BILINEAR and is_shrunk
        is_on_gpu = images.device.type != "cpu"
        if is_exact or (is_on_gpu and resample in (PILImageResampling.BILINEAR, PILImageResampling.BICUBIC)):
            return self.resize(images, SizeDict(height=height, width=width), resample)
        return torch.stack([resize_with_pil(image, height, width, resample) for image in images.cpu()]).to(images)
