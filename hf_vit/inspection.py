"""Pictures of what a model attends to, by kind, from photos to files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import BaseImageProcessor

from .convert import TASKS, load_image_processor, open_source
from .model.configuration_hf_vit import to_pair
from .model.modeling_hf_vit import HfViTModel
from .model.pretrained import HfViTPreTrainedModel
from .model.task_image_classification import HfViTForImageClassification
from .training.models import whole_image_processor
from .visualize import attention, features, mosaics, patches


MAX_SIDE = 1200  # pixels: more of a photo is not seen in a picture


def open_for_inspection(
    name_or_path: str, image_size: int | None = None
) -> tuple[HfViTPreTrainedModel, BaseImageProcessor]:
    """Opens a model of any task, and an image processor that leaves nothing of a photo out.

    Args:
        name_or_path: Folder, file of weights, or name on the Hub, ours or published.
        image_size: Shorter side in pixels that photos get; None means that of the model.

    Returns:
        The model in evaluation mode, with eager attention, and the processor, which keeps the proportions of photos up
        to whole patches.

    Raises:
        OSError: if there is no such checkpoint.
        ValueError: if it cannot be opened, or the size is no positive number.
    """
    model_class = _class_of(open_source(name_or_path).config)
    model = model_class.from_pretrained(name_or_path, attn_implementation="eager").eval()
    config = model.config
    side = min(to_pair(config.image_size)) if image_size is None else image_size
    processor = load_image_processor(name_or_path, num_channels=config.num_channels, patch_size=config.patch_size)
    whole = {"size": {"shortest_edge": side}, "do_pad": False}
    return model, whole_image_processor(processor, config, keep_aspect_ratio=True, **whole)


def _class_of(config: Mapping[str, Any]) -> type[HfViTPreTrainedModel]:
    """Returns the class that was saved, by its configuration; those of timm hold the number of classes."""
    saved = (config.get("architectures") or ["ForImageClassification" if config.get("num_classes") else ""])[0]
    heads = (model for model in TASKS.values() if model is not HfViTModel)
    return next((model for model in heads if model.__name__.removeprefix("HfViT") in saved), HfViTModel)


@dataclass(frozen=True)
class Inspection:
    """A photo as a model sees it; for model and processor see `open_for_inspection`."""

    model: HfViTPreTrainedModel
    processor: BaseImageProcessor
    photo: Image.Image
    # x and y in pixels of the photo: what attends or is compared; None means the image's summary, or the middle
    point: tuple[float, float] | None = None
    class_name: str | None = None  # that saliency explains; None means the likeliest
    foreground_threshold: float | None = None  # see `feature_colors`

    @cached_property
    def pixel_values(self) -> Tensor:
        """The model's input, (1, C, H, W)."""
        pixel_values: Tensor = self.processor(self.photo, return_tensors="pt").pixel_values
        return pixel_values.to(self.model.device)

    @cached_property
    def picture(self) -> Image.Image:
        """The photo to draw on."""
        fits = max(self.photo.size) <= MAX_SIDE
        return self.photo if fits else ImageOps.contain(self.photo, (MAX_SIDE, MAX_SIDE))

    def record_attention(self) -> attention.Attention:
        """Returns the attention within the photo."""
        return attention.record_attention(self.model, self.pixel_values)[0]

    def patch_features(self) -> Tensor:
        """Returns the features of its patches, (h, w, D)."""
        return features.patch_features(self.model, self.pixel_values)[0]

    def patch(self, grid: tuple[int, int]) -> patches.Patch | None:
        """Returns row and column of the patch under the point, None where there is no point."""
        return (
            None if self.point is None else patches.patch_at(self.point, (self.photo.height, self.photo.width), grid)
        )

    def class_number(self) -> int:
        """Returns the number of the class; raises `ValueError` if the model does not know it."""
        known = self.model.config.label2id
        if self.class_name is None:
            with torch.no_grad():
                return int(self.model(self.pixel_values, return_dict=True).logits.argmax())
        if self.class_name not in known:
            raise ValueError(f"The model knows no class {self.class_name!r}, but {', '.join(list(known)[:20])}.")
        return int(known[self.class_name])


def _draw_attention(one: Inspection, file: Path) -> None:
    recorded = one.record_attention()
    patch = one.patch(recorded.grid)
    mosaics.draw_attention(one.picture, attention.attention_maps(recorded, patch), file, patch)


def _draw_rollout(one: Inspection, file: Path) -> None:
    recorded = one.record_attention()
    patch = one.patch(recorded.grid)
    patches.draw_heat(one.picture, attention.attention_rollout(recorded, patch), "rollout", file, patch)


def _draw_saliency(one: Inspection, file: Path) -> None:
    attention.check_classifier(one.model)
    number = one.class_number()
    (heat,) = attention.gradient_rollout(one.model, one.pixel_values, [number])
    patches.draw_heat(one.picture, heat, f"saliency for {one.model.config.id2label[number]}", file)


def _draw_similarity(one: Inspection, file: Path) -> None:
    own = one.patch_features()
    rows, columns = own.shape[:2]
    patch = one.patch((rows, columns)) or (rows // 2, columns // 2)
    patches.draw_heat(one.picture, features.patch_similarity(own, patch), "similarity", file, patch)


def _draw_distance(every: Sequence[Inspection], file: Path) -> None:
    recorded = [one.record_attention() for one in every]
    uniform = torch.stack([patches.patch_distances(own.grid, own.patch_size).mean() for own in recorded])
    distances = torch.stack([attention.attention_distances(own) for own in recorded]).mean(dim=0)
    attention.draw_attention_distances(distances, float(uniform.mean()), file)


def _draw_pca(every: Sequence[Inspection], file: Path) -> None:
    colors = features.feature_colors([one.patch_features() for one in every], every[0].foreground_threshold)
    features.draw_feature_colors([one.picture for one in every], colors, file)


# A picture of each photo
OF_EACH: Mapping[str, Callable[[Inspection, Path], None]] = {
    "attention": _draw_attention,
    "rollout": _draw_rollout,
    "saliency": _draw_saliency,
    "similarity": _draw_similarity,
}
# A picture of all photos together, or of none
OF_ALL: Mapping[str, Callable[[Sequence[Inspection], Path], None]] = {
    "distance": _draw_distance,
    "pca": _draw_pca,
    "positions": lambda every, file: mosaics.draw_position_similarity(
        mosaics.position_similarity(every[0].model), file
    ),
    "filters": lambda every, file: mosaics.draw_patch_filters(mosaics.patch_filters(every[0].model), file),
}


def kinds_of(model: HfViTPreTrainedModel) -> list[str]:
    """Returns the kinds of pictures that a model has: saliency needs a classifier, positions a table of them."""
    missing = set() if isinstance(model, HfViTForImageClassification) else {"saliency"}
    if model.get_position_embeddings() is None:
        missing.add("positions")
    return [kind for kind in (*OF_EACH, *OF_ALL) if kind not in missing]
