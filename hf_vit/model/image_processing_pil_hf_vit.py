"""Image processor that resizes with PIL and does not require torchvision."""

from typing import Any

from transformers.image_processing_backends import PilBackend
from transformers.image_processing_base import BatchFeature

from .image_geometry import resize_with_pil
from .image_processing_base import HfViTImageProcessorBase, HfViTImageProcessorKwargs, Images, Sizes


class HfViTImageProcessorPil(HfViTImageProcessorBase, PilBackend):
    """Image processor that uses PIL. `HfViTImageProcessorBase` describes the options."""

    valid_kwargs = HfViTImageProcessorKwargs

    def _prepare_image_like_inputs(self, images: Any, *args: Any, device: Any = None, **kwargs: Any) -> Images:
        if device not in (None, "cpu"):
            raise ValueError(f"device={device!r} requires torchvision. Omit it, and move the result by .to(device).")
        return super()._prepare_image_like_inputs(images, *args, device="cpu", **kwargs)

    def _resize_smoothly(self, images: Images, sizes: Sizes, options: dict[str, Any]) -> Images:
        return [resize_with_pil(image, *hw, options["resample"]) for image, hw in zip(images, sizes, strict=True)]

    def _to_batch_feature(self, data: dict[str, Any], return_tensors: str | None) -> BatchFeature:
        if return_tensors is None:
            return BatchFeature({name: [value.numpy() for value in values] for name, values in data.items()})
        return super()._to_batch_feature(data, return_tensors)
