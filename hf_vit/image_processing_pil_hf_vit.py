"""Image processor that resizes with PIL, for where torchvision is missing."""

from typing import Any

import numpy as np
import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_base import BatchFeature
from transformers.image_utils import PILImageResampling
from transformers.utils.import_utils import is_vision_available

from .image_processing_shared_hf_vit import HfViTImageProcessorBase, HfViTImageProcessorKwargs


if is_vision_available():
    import PIL.Image


class HfViTImageProcessorPil(HfViTImageProcessorBase, PilBackend):  # type: ignore[misc]
    """Image processor on PIL. `HfViTImageProcessorBase` describes the options."""

    valid_kwargs = HfViTImageProcessorKwargs

    def _prepare_image_like_inputs(
        self, images: Any, *args: Any, device: Any = None, **kwargs: Any
    ) -> list[torch.Tensor]:
        """The same on the CPU, whatever the device of the images."""
        if device not in (None, "cpu"):
            raise ValueError(
                f"device={device!r} needs torchvision, which is not installed or not chosen: PIL works on the CPU. "
                "Move the result with .to(device)."
            )
        return super()._prepare_image_like_inputs(images, *args, device="cpu", **kwargs)

    def _resize_smoothly(
        self,
        images: list[torch.Tensor],
        sizes: list[tuple[int, int]],
        resample: PILImageResampling,
        disable_grouping: bool | None,
    ) -> list[torch.Tensor]:
        return [resize_with_pil(image, *hw, resample) for image, hw in zip(images, sizes, strict=True)]

    def _to_batch_feature(self, data: dict[str, Any], return_tensors: str | None) -> BatchFeature:
        if return_tensors is None:
            return BatchFeature({name: [value.numpy() for value in values] for name, values in data.items()})
        return super()._to_batch_feature(data, return_tensors)


def resize_with_pil(image: torch.Tensor, height: int, width: int, resample: PILImageResampling) -> torch.Tensor:
    """Resizes an image (C, H, W), uint8 or float32, any number of channels, to (C, height, width)."""
    if image.shape[0] == 3 and image.dtype == torch.uint8:
        resized = PIL.Image.fromarray(image.movedim(0, -1).numpy()).resize((width, height), resample)
        return torch.from_numpy(np.array(resized)).movedim(-1, 0)
    # channel by channel: PIL has no mode for most numbers of channels or for floats, and weighs colours by alpha
    channels = [PIL.Image.fromarray(channel.numpy()).resize((width, height), resample) for channel in image]
    return torch.from_numpy(np.stack([np.array(channel) for channel in channels]))
