"""Draws what a model attends to on photos: any model of ours, or a published ViT.

Writes <photo>_<kind>.png for each photo and <kind>.png for all together, by default all kinds that the model has:

    <photo>_attention    the attention of each head of each layer to the patches
    <photo>_rollout      the share of each patch that reaches the end: attention followed through all layers
    <photo>_saliency     the relevance of each patch for a class (of classifiers)
    <photo>_similarity   the similarity of one patch to all others
    pca                  patches in the colors of their principal components, the same in all photos

Photos are seen as a whole, in their proportions.

Examples:
    hf-vit visualize outputs/photos photo.jpg --output_dir outputs/maps
    hf-vit visualize outputs/photos photo.jpg --output_dir outputs/maps --kinds attention similarity --point 320,200
    hf-vit visualize facebook/dinov2-small photos --output_dir outputs/maps --kinds pca
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import BaseImageProcessor

from ..convert import TASKS, load_image_processor, open_source
from ..inference.predict import find_images, name_outputs, open_image
from ..model.configuration_hf_vit import to_pair
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import HfViTPreTrainedModel
from ..model.task_image_classification import HfViTForImageClassification
from ..options.field import COUNT
from ..outputs import check_outputs, check_writable, record_outputs
from ..training.models import whole_image_processor
from ..visualize import attention, patches


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
        ValueError: if it cannot be opened.
    """
    saved = open_source(name_or_path).config
    # configurations of timm hold the number of classes instead of the name of a class
    name = (saved.get("architectures") or ["ForImageClassification" if saved.get("num_classes") else ""])[0]
    heads = (known for known in TASKS.values() if known is not HfViTModel)
    model_class = next((head for head in heads if head.__name__.removeprefix("HfViT") in name), HfViTModel)
    model = model_class.from_pretrained(name_or_path, attn_implementation="eager").eval()
    config = model.config
    size = {"shortest_edge": image_size or min(to_pair(config.image_size))}
    processor = load_image_processor(name_or_path, num_channels=config.num_channels, patch_size=config.patch_size)
    return model, whole_image_processor(processor, config, keep_aspect_ratio=True, size=size, do_pad=False)


@dataclass(frozen=True)
class Inspection:
    """A photo as a model sees it; for model and processor see `open_for_inspection`."""

    model: HfViTPreTrainedModel
    processor: BaseImageProcessor
    photo: Image.Image
    # x and y in pixels of the photo: what attends or is compared; None means the image's summary, or the middle
    point: tuple[float, float] | None = None
    class_name: str | None = None  # that saliency explains; None means the likeliest

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
        return patches.patch_features(self.model, self.pixel_values)[0]

    def patch(self, grid: tuple[int, int]) -> patches.Patch | None:
        """Returns row and column of the patch under the point, None if there is no point."""
        size = self.photo.height, self.photo.width
        return None if self.point is None else patches.patch_at(self.point, size, grid)


def _draw_attention(one: Inspection, file: Path) -> None:
    recorded = one.record_attention()
    patch = one.patch(recorded.grid)
    patches.draw_attention(one.picture, attention.attention_maps(recorded, patch), file, patch)


def _draw_rollout(one: Inspection, file: Path) -> None:
    recorded = one.record_attention()
    patch = one.patch(recorded.grid)
    patches.draw_heat(one.picture, attention.attention_rollout(recorded, patch), "rollout", file, patch)


def _draw_saliency(one: Inspection, file: Path) -> None:
    attention.check_classifier(one.model)
    known, name = one.model.config.label2id, one.class_name
    if name is None:
        with torch.no_grad():
            number = int(one.model(one.pixel_values, return_dict=True).logits.argmax())
        name = one.model.config.id2label[number]
    elif name in known:
        number = known[name]
    else:
        raise ValueError(f"The model knows no class {name!r}, but {', '.join(list(known)[:20])}.")
    (heat,) = attention.gradient_rollout(one.model, one.pixel_values, [number])
    patches.draw_heat(one.picture, heat, f"saliency for {name}", file)


def _draw_similarity(one: Inspection, file: Path) -> None:
    own = one.patch_features()
    rows, columns = own.shape[:2]
    patch = one.patch((rows, columns)) or (rows // 2, columns // 2)
    patches.draw_heat(one.picture, patches.patch_similarity(own, patch), "similarity", file, patch)


def _draw_pca(every: Sequence[Inspection], file: Path) -> None:
    colors = patches.feature_colors([one.patch_features() for one in every])
    patches.draw_feature_colors([one.picture for one in every], colors, file)


# A picture of each photo
OF_EACH: Mapping[str, Callable[[Inspection, Path], None]] = {
    "attention": _draw_attention,
    "rollout": _draw_rollout,
    "saliency": _draw_saliency,
    "similarity": _draw_similarity,
}
# A picture of all photos together
OF_ALL: Mapping[str, Callable[[Sequence[Inspection], Path], None]] = {"pca": _draw_pca}


def kinds_of(model: HfViTPreTrainedModel) -> list[str]:
    """Return the kinds of pictures that a model has: saliency needs a classifier."""
    is_classifier = isinstance(model, HfViTForImageClassification)
    return [kind for kind in (*OF_EACH, *OF_ALL) if is_classifier or kind != "saliency"]


def visualize(
    model: str,
    photos: list[Path],
    *,
    output_dir: Path,
    kinds: Annotated[list[str] | None, (*OF_EACH, *OF_ALL)] = None,
    image_size: Annotated[int | None, COUNT] = None,
    point: tuple[float, float] | None = None,
    class_name: str | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> None:
    """Draws what a model attends to, and reports which files were written.

    Args:
        model: Folder or file of a saved model, or its name on the Hub, ours or published.
        photos: Image files, and folders that are searched for them.
        output_dir: Where to write the pictures.
        kinds: What to draw; all by default.
        image_size: Shorter side of the model's input, in pixels.
        point: x,y in pixels of the photo: the patch whose attention and rollout are drawn (by default those of the CLS
            token or the mean of the patches), and which is compared (by default that in the middle).
        class_name: The class that saliency explains; the likeliest by default.
        overwrite: Replace pictures of an earlier run.
        report: Prints a line.

    Raises:
        ValueError: if the model cannot be opened or lacks what a picture needs, or a file must stay.
        OSError: if there is no such model or photo, or nothing can be written.
    """
    check_writable(output_dir)
    files = find_images(photos)
    opened, processor = open_for_inspection(model, image_size)
    inspections = [Inspection(opened, processor, open_image(file), point, class_name) for file in files]
    drawn: dict[Path, Callable[[Path], None]] = {}
    for kind in kinds or kinds_of(opened):
        if kind in OF_ALL:
            drawn[output_dir / f"{kind}.png"] = partial(OF_ALL[kind], inspections)
            continue
        for inspection, name in zip(inspections, name_outputs(files), strict=True):
            drawn[output_dir / f"{name}_{kind}.png"] = partial(OF_EACH[kind], inspection)
    check_outputs(drawn, files, overwrite)
    output_dir.mkdir(parents=True, exist_ok=True)
    for file, draw_file in drawn.items():
        draw_file(file)
        record_outputs([file])
        report(str(file))
