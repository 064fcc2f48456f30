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

from ..convert import TASKS, load_image_processor, open_source
from ..model.configuration_hf_vit import to_pair
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import HfViTPreTrainedModel
from ..model.task_classification import HfViTForImageClassification
from ..training.models import whole_image_processor
from .attention import (
    Attention,
    attention_distances,
    attention_maps,
    attention_rollout,
    check_classifier,
    draw_attention_distances,
    gradient_rollout,
    record_attention,
)
from .features import draw_feature_colors, feature_colors, patch_features, patch_similarity
from .mosaics import draw_attention, draw_patch_filters, draw_position_similarity, patch_filters, position_similarity
from .patches import Patch, draw_heat, patch_at, patch_distances


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
    """Returns the class that was saved, by its configuration; those of timm say how many classes there are."""
    saved = (config.get("architectures") or ["ForImageClassification" if config.get("num_classes") else ""])[0]
    heads = (model for model in TASKS.values() if model is not HfViTModel)
    return next((model for model in heads if model.__name__.removeprefix("HfViT") in saved), HfViTModel)


MAX_SIDE = 1200  # pixels: more of a photo is not seen in a picture


@dataclass(frozen=True)
class InspectionOptions:
    """What to look for.

    Args:
        point: x and y in pixels of the photo, what looks or is compared; None means what sums the photo up, or the
            middle of it.
        class_name: What the photo is searched for; None means the likeliest class.
        foreground_threshold: See `feature_colors`.
    """

    point: tuple[float, float] | None = None
    class_name: str | None = None
    foreground_threshold: float | None = None


@dataclass(frozen=True)
class Inspection:
    """A model that looks at a photo.

    Args:
        model: A model in evaluation mode.
        processor: Prepares photos without cutting anything off, see `open_for_inspection`.
        photo: The photo.
        options: What to look for.
    """

    model: HfViTPreTrainedModel
    processor: BaseImageProcessor
    photo: Image.Image
    options: InspectionOptions

    @cached_property
    def pixel_values(self) -> Tensor:
        """What the model sees, (1, C, H, W)."""
        pixel_values: Tensor = self.processor(self.photo, return_tensors="pt").pixel_values
        return pixel_values.to(self.model.device)

    @cached_property
    def picture(self) -> Image.Image:
        """The photo to draw on."""
        fits = max(self.photo.size) <= MAX_SIDE
        return self.photo if fits else ImageOps.contain(self.photo, (MAX_SIDE, MAX_SIDE))

    def attention(self) -> Attention:
        """Returns who looks at whom."""
        return record_attention(self.model, self.pixel_values)[0]

    def features(self) -> Tensor:
        """Returns what patches are to the model, (h, w, D)."""
        return patch_features(self.model, self.pixel_values)[0]

    def patch(self, grid: tuple[int, int]) -> Patch | None:
        """Returns row and column of the patch under the point, None where there is no point."""
        point = self.options.point
        return None if point is None else patch_at(point, (self.photo.height, self.photo.width), grid)

    def class_number(self) -> int:
        """Returns the number of the class.

        Raises:
            ValueError: if the model does not know it.
        """
        name, known = self.options.class_name, self.model.config.label2id
        if name is None:
            with torch.no_grad():
                return int(self.model(self.pixel_values, return_dict=True).logits.argmax())
        if name not in known:
            raise ValueError(f"The model knows no class {name!r}, but {', '.join(list(known)[:20])}.")
        return int(known[name])


def _draw_attention(look: Inspection, file: Path) -> None:
    attention = look.attention()
    patch = look.patch(attention.grid)
    draw_attention(look.picture, attention_maps(attention, patch), file, patch)


def _draw_rollout(look: Inspection, file: Path) -> None:
    attention = look.attention()
    patch = look.patch(attention.grid)
    draw_heat(look.picture, attention_rollout(attention, patch), "rollout", file, patch)


def _draw_saliency(look: Inspection, file: Path) -> None:
    check_classifier(look.model)
    number = look.class_number()
    (heat,) = gradient_rollout(look.model, look.pixel_values, [number])
    draw_heat(look.picture, heat, f"saliency for {look.model.config.id2label[number]}", file)


def _draw_similarity(look: Inspection, file: Path) -> None:
    features = look.features()
    rows, columns = features.shape[:2]
    patch = look.patch((rows, columns)) or (rows // 2, columns // 2)
    draw_heat(look.picture, patch_similarity(features, patch), "similarity", file, patch)


def _draw_distance(looks: Sequence[Inspection], file: Path) -> None:
    seen = [look.attention() for look in looks]
    everywhere = [patch_distances(own.grid, own.patch_size).mean() for own in seen]
    distances = torch.stack([attention_distances(own) for own in seen]).mean(dim=0)
    draw_attention_distances(distances, float(torch.stack(everywhere).mean()), file)


def _draw_pca(looks: Sequence[Inspection], file: Path) -> None:
    colors = feature_colors([look.features() for look in looks], looks[0].options.foreground_threshold)
    draw_feature_colors([look.picture for look in looks], colors, file)


def _draw_positions(looks: Sequence[Inspection], file: Path) -> None:
    draw_position_similarity(position_similarity(looks[0].model), file)


def _draw_filters(looks: Sequence[Inspection], file: Path) -> None:
    draw_patch_filters(patch_filters(looks[0].model), file)


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
    "positions": _draw_positions,
    "filters": _draw_filters,
}


def kinds_of(model: HfViTPreTrainedModel) -> list[str]:
    """Returns the kinds of pictures that a model has: saliency is of classifiers, positions of those with a table."""
    missing = set() if isinstance(model, HfViTForImageClassification) else {"saliency"}
    if model.get_position_embeddings() is None:
        missing.add("positions")
    return [kind for kind in (*OF_EACH, *OF_ALL) if kind not in missing]
