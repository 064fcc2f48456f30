"""Open models and photos to draw attention, saliency and patch features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from PIL import Image, ImageOps
from torch import Tensor
from transformers import BaseImageProcessor

from ..convert import TASKS, load_image_processor, open_source, whole_image_processor
from ..model.configuration_hf_vit import to_pair
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import HfViTPreTrainedModel, read_config
from . import attention, patches


MAX_SIDE = 1200  # Maximum side of a drawn photo in pixels


def open_for_inspection(
    name_or_path: str, image_size: int | None = None, head: str | None = None
) -> tuple[HfViTPreTrainedModel, BaseImageProcessor]:
    """Open a model of any task, and an image processor that resizes photos without cropping.

    The model is in evaluation mode with eager attention. The processor resizes the shorter side to `image_size`, by
    default the image size of the model, and keeps the aspect ratio, except for rounding to whole patches.

    Raises:
        OSError: if the checkpoint does not exist.
        ValueError: if the checkpoint cannot be opened.
    """
    saved = open_source(name_or_path).config if head is None else read_config(name_or_path, head=head)
    given: dict[str, Any] = {} if head is None else {"head": head}
    # A timm configuration has no `architectures`; if it has `num_classes`, the model is a classifier.
    name = (saved.get("architectures") or ["ForImageClassification" if saved.get("num_classes") else ""])[0]
    heads = (known for known in TASKS.values() if known is not HfViTModel)
    model_class = next((head for head in heads if head.__name__.removeprefix("HfViT") in name), HfViTModel)
    model = model_class.from_pretrained(name_or_path, attn_implementation="eager", **given).eval()
    config = model.config
    size = {"shortest_edge": image_size or min(to_pair(config.image_size))}
    given |= {"num_channels": config.num_channels, "patch_size": config.patch_size}
    processor = load_image_processor(name_or_path, **given)
    return model, whole_image_processor(processor, config, keep_aspect_ratio=True, size=size, do_pad=False)


@dataclass(frozen=True)
class Inspection:
    """A photo to draw pictures of, with the model and image processor returned by `open_for_inspection`."""

    model: HfViTPreTrainedModel
    processor: BaseImageProcessor
    photo: Image.Image
    # Positions (x, y) in pixels of the photo. Without a position, attention is drawn for the pooled output, and
    # similarity is computed to the central patch.
    points: Sequence[tuple[float, float]] = ()
    class_name: str | None = None  # class for which saliency is drawn; None means the most likely class
    text_features: Mapping[str, Tensor] = field(default_factory=dict)  # features (E,) of each word to draw

    @cached_property
    def pixel_values(self) -> Tensor:
        """Model input computed from the photo, (1, C, H, W)."""
        pixel_values: Tensor = self.processor(self.photo, return_tensors="pt").pixel_values
        return pixel_values.to(self.model.device)

    @cached_property
    def picture(self) -> Image.Image:
        """Copy of the photo to draw on, scaled down to at most `MAX_SIDE` pixels per side."""
        fits = max(self.photo.size) <= MAX_SIDE
        return self.photo if fits else ImageOps.contain(self.photo, (MAX_SIDE, MAX_SIDE))

    def record_attention(self) -> attention.Attention:
        """Return the attention of the model for the photo."""
        return attention.record_attention(self.model, self.pixel_values)[0]

    def patch_features(self) -> Tensor:
        """Return the features of the photo's patches, (h, w, D)."""
        return patches.patch_features(self.model, self.pixel_values)[0]

    def patch(self, grid: tuple[int, int], number: int = 0) -> patches.Patch | None:
        """Return row and column of the patch that contains point `number`, or None if there are fewer points."""
        size = self.photo.height, self.photo.width
        return patches.patch_at(self.points[number], size, grid) if number < len(self.points) else None
