"""Image processor that resizes with torchvision, on the CPU or on a GPU."""

from typing import Any

import torch
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.utils.import_utils import is_torchvision_available

from .image_geometry import resize_with_pil
from .image_processing_base import HfViTImageProcessorBase, Images, Sizes
from .image_processing_options import HfViTImageProcessorKwargs


class HfViTImageProcessor(HfViTImageProcessorBase, TorchvisionBackend):
    """Image processor on torchvision. `HfViTImageProcessorBase` describes the options.

    Resized 8-bit pixels are within one gray level of the PIL processor's. The exception is bicubic resizing on a GPU,
    where about 4 in 10,000 pixels of a photo, at sharp edges, differ by more: PIL clips between its two passes.
    """

    valid_kwargs = HfViTImageProcessorKwargs

    def __init__(self, **kwargs: Any) -> None:
        if not is_torchvision_available():
            raise ImportError(
                "HfViTImageProcessor needs torchvision. Install it with `pip install torchvision`, or use "
                "HfViTImageProcessorPil."
            )
        super().__init__(**kwargs)

    def _resize_smoothly(self, images: Images, sizes: Sizes, options: dict[str, Any]) -> Images:
        """Images of one shape go through torchvision together, unless on a CPU, where one by one is faster."""
        ungrouped = options["disable_grouping"]
        is_grouped = images[0].device.type != "cpu" if ungrouped is None else not ungrouped
        groups: dict[Any, list[int]] = {}
        for index, image in enumerate(images):
            groups.setdefault((image.shape, image.dtype) if is_grouped else index, []).append(index)
        resized = list(images)
        for indices in groups.values():
            # PIL's pixels come as views with the channels last in memory; left so, they resize 5 times as fast
            batch = images[indices[0]][None] if len(indices) == 1 else torch.stack([images[i] for i in indices])
            height, width = sizes[indices[0]]  # the target depends on the shape alone
            outputs = self._resize_batch(batch, height, width, options["resample"])  # (B, C, height, width)
            for index, output in zip(indices, outputs, strict=True):
                resized[index] = output
        return resized

    def _resize_batch(
        self, images: torch.Tensor, height: int, width: int, resample: PILImageResampling
    ) -> torch.Tensor:
        """Resizes (B, C, H, W) by torchvision; by PIL on a CPU where that is closer, and for filters of PIL alone."""
        is_shrunk = height <= images.shape[-2] and width <= images.shape[-1]
        is_exact = resample == PILImageResampling.BILINEAR and is_shrunk
        is_on_gpu = images.device.type != "cpu"
        if is_exact or (is_on_gpu and resample in (PILImageResampling.BILINEAR, PILImageResampling.BICUBIC)):
            return self.resize(images, SizeDict(height=height, width=width), resample)
        return torch.stack([resize_with_pil(image, height, width, resample) for image in images.cpu()]).to(images)
