"""Image processor that resizes with torchvision, on the CPU or on a GPU."""

from typing import Any

import torch
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_transforms import group_images_by_shape, reorder_images
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.utils.import_utils import is_torchvision_available

from .image_processing_shared_hf_vit import HfViTImageProcessorBase, HfViTImageProcessorKwargs


TORCHVISION_FILTERS = (PILImageResampling.BILINEAR, PILImageResampling.BICUBIC, PILImageResampling.LANCZOS)


class HfViTImageProcessor(HfViTImageProcessorBase, TorchvisionBackend):  # type: ignore[misc]
    """Image processor on torchvision. `HfViTImageProcessorBase` describes the options."""

    valid_kwargs = HfViTImageProcessorKwargs

    def __init__(self, **kwargs: Any) -> None:
        """Sets the options that differ from the defaults."""
        if not is_torchvision_available():
            raise ImportError(
                "HfViTImageProcessor needs torchvision. Install it with `pip install torchvision`, or use "
                "HfViTImageProcessorPil."
            )
        super().__init__(**kwargs)

    def _resize(
        self,
        images: list[torch.Tensor],
        sizes: list[tuple[int, int]],
        resample: PILImageResampling,
        disable_grouping: bool | None,
    ) -> list[torch.Tensor]:
        """Images of one shape go through torchvision together, unless on a CPU, where one by one is faster."""
        if resample not in TORCHVISION_FILTERS:
            raise ValueError(
                f"torchvision has no {resample.name} filter for tensors. Choose NEAREST, BILINEAR, BICUBIC or LANCZOS, "
                'or load the processor with backend="pil".'
            )
        # images of one shape have one target: it depends on the shape alone
        targets = {tuple(image.shape[-2:]): target for image, target in zip(images, sizes, strict=True)}
        groups, order = group_images_by_shape(images, disable_grouping=disable_grouping)
        for key, batch in groups.items():
            height, width = targets[tuple(batch.shape[-2:])]
            # PIL's pixels come as views with the channels last in memory; left so, they resize 5 times as fast
            groups[key] = self.resize(batch, SizeDict(height=height, width=width), resample)  # (B, C, height, width)
        return list(reorder_images(groups, order))
