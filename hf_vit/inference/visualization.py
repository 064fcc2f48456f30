"""Draw attention, saliency and patch features of a model on photos. Works with hf_vit models and published ViTs.

Writes <photo>_<kind>.png for each photo, and pca.png and predictions.png for all photos together. By default all kinds
are drawn that the model supports:

    <photo>_attention    attention to the patches, per layer and head
    <photo>_rollout      attention rollout: contribution of each patch to the output through all layers
    <photo>_saliency     relevance of each patch for a class (classifiers only)
    <photo>_similarity   cosine similarity of one patch to all other patches
    <photo>_positions    cosine similarity of the position embedding of one patch to those of all other patches
    <photo>_patches      patch grid, tokens, attention between two patches, and mean distance of attention per layer
    <photo>_words        patches that are relevant for each word of a text (image-text models only; needs --text)
    pca                  principal components of the patch features as colors, the same colors in all photos
    predictions          predictions as drawn by hf-vit predict (drawn by default only for multi-task models)

Photos are resized without cropping and keep their aspect ratio.

Examples:
    hf-vit visualize outputs/photos photo.jpg --output_dir outputs/maps
    hf-vit visualize outputs/photos photo.jpg --output_dir outputs/maps --kinds attention similarity --point 320,200
    hf-vit visualize outputs/photos photo.jpg --output_dir outputs/maps --kinds patches --point 320,200 --point 90,40
    hf-vit visualize outputs/captions photo.jpg --output_dir outputs/maps --kinds words --text "a dog on grass"
    hf-vit visualize facebook/dinov2-small photos --output_dir outputs/maps --kinds pca
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from ..model.pretrained import HfViTPreTrainedModel
from ..model.task_image_classification import HfViTForImageClassification
from ..model.task_multi_task import HfViTForMultiTask
from ..options.field import COUNT
from ..outputs import check_outputs, check_writable, record_outputs
from ..visualize import attention, patches, tokens
from ..visualize.inspection import Inspection, open_for_inspection
from .predict import predict_files
from .search import encode_texts, load_text_processor
from .sources import find_images, name_outputs, open_image


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
        raise ValueError(f"The model has no class {name!r}. Its classes include {', '.join(list(known)[:20])}.")
    (heat,) = attention.gradient_rollout(one.model, one.pixel_values, [number])
    patches.draw_heat(one.picture, heat, f"saliency for {name}", file)


def _draw_similarity(one: Inspection, file: Path) -> None:
    _draw_similarity_of(one, one.patch_features(), "similarity", file)


def _draw_positions(one: Inspection, file: Path) -> None:
    embeddings = one.model.base_model.embeddings
    grid = embeddings.check(one.pixel_values)
    table = embeddings.positions(grid)
    if table is None:
        raise ValueError("The model adds no position embeddings to its tokens. Remove positions from --kinds.")
    own = table[0, one.model.config.num_prefix_tokens :].detach().float().unflatten(0, grid)
    _draw_similarity_of(one, own, "similarity of positions", file)


def _draw_similarity_of(one: Inspection, features: Tensor, title: str, file: Path) -> None:
    rows, columns = features.shape[:2]
    patch = one.patch((rows, columns)) or (rows // 2, columns // 2)
    patches.draw_heat(one.picture, patches.patch_similarity(features, patch), title, file, patch)


def _draw_patches(one: Inspection, file: Path) -> None:
    recorded = one.record_attention()
    first = one.patch(recorded.grid) or (recorded.grid[0] // 2, recorded.grid[1] // 2)
    second = one.patch(recorded.grid, 1) or tokens.most_attended(recorded, first)
    tokens.draw_tokens(one.picture, recorded, one.model.config, first, second, file)


def _draw_words(one: Inspection, file: Path) -> None:
    if not one.text_features:
        raise ValueError('The kind words requires a text, such as --text "a dog on grass".')
    embeds = torch.stack(list(one.text_features.values()))  # (W, E)
    images = one.pixel_values.expand(len(embeds), -1, -1, -1)
    heat = attention.gradient_rollout(one.model, images, text_embeds=embeds)
    patches.draw_heats(one.picture, dict(zip(one.text_features, heat, strict=True)), file)


def encode_words(model: HfViTPreTrainedModel, name_or_path: str, text: str) -> dict[str, Tensor]:
    """Return a direction (E,) in the space of features for each word of a text, and for the whole text.

    The direction of a word is its feature minus the mean over all words, so that it shows what sets the word apart.
    """
    encoder = attention.check_image_text_model(model)
    words = list(dict.fromkeys(text.split()))
    features = encode_texts(encoder, load_text_processor(encoder, name_or_path), [*words, text])  # (W + 1, E)
    directions = features[:-1] - features[:-1].mean(dim=0) if len(words) > 1 else features[:-1]
    return {**dict(zip(words, directions, strict=True)), text: features[-1]}


def _draw_pca(every: Sequence[Inspection], file: Path) -> None:
    colors = patches.feature_colors([one.patch_features() for one in every])
    patches.draw_feature_colors([one.picture for one in every], colors, file)


Drawing = Callable[[Path], object]  # function that draws a picture to a file
# Maps each kind of picture to the function that draws it for one photo
PHOTO_DRAWINGS: Mapping[str, Callable[[Inspection, Path], None]] = {
    "attention": _draw_attention,
    "rollout": _draw_rollout,
    "saliency": _draw_saliency,
    "similarity": _draw_similarity,
    "positions": _draw_positions,
    "patches": _draw_patches,
    "words": _draw_words,
}
KINDS = (*PHOTO_DRAWINGS, "pca", "predictions")


def kinds_of(model: HfViTPreTrainedModel, text: str | None = None) -> list[str]:
    """Return the kinds of pictures that can be drawn for a model and a text."""
    missing = set() if isinstance(model, HfViTForImageClassification) else {"saliency"}
    missing |= set() if isinstance(model, HfViTForMultiTask) else {"predictions"}
    missing |= {"words"} if text is None else set()
    missing |= {"positions"} if model.base_model.embeddings.position_embeddings is None else set()
    return [kind for kind in KINDS if kind not in missing]


def visualize_model(
    model: str | Path,
    photos: Sequence[str | Path],
    *,
    output_dir: str | Path,
    kinds: Annotated[list[str] | None, KINDS] = None,
    image_size: Annotated[int | None, COUNT] = None,
    point: list[tuple[float, float]] | None = None,
    class_name: str | None = None,
    text: str | None = None,
    head: str | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> list[Path]:
    """Draw pictures of attention, saliency and features of a model on photos. Equivalent to `hf-vit visualize`.

    Args:
        model: Folder or weights file of a saved model, or name on the Hub; an hf_vit model or a published ViT.
        photos: Image files, and folders that are searched for images.
        output_dir: Folder for the pictures.
        kinds: Kinds of pictures to draw; by default all that the model supports.
        image_size: Shorter side of the resized photos, in pixels; by default the image size of the model.
        point: Position x,y in pixels of the photo. Attention and rollout are drawn for the patch at this position (by
            default for the pooled output, such as the CLS token), and similarity is computed to this patch (by default
            to the central patch). `patches` draws the attention between two points; by default between the first point
            and the patch that it attends to most.
        class_name: Class whose saliency is drawn; by default the most likely class.
        text: Text whose words are searched for in the photos, for image-text models.
        head: Head of a multi-task model; by default the backbone and the predictions of all heads are drawn.
        overwrite: Replace pictures of an earlier run.
        report: Function that receives the path of each file.

    Returns:
        The paths of the pictures.

    Raises:
        ValueError: if the model cannot be opened, does not support a kind, or an existing file may not be replaced.
        OSError: if the model or a photo does not exist, or the output cannot be written.
    """
    model, output_dir = str(model), Path(output_dir)
    check_writable(output_dir)
    files = find_images([Path(photo) for photo in photos])
    opened, processor = open_for_inspection(model, image_size, head)
    words = {} if text is None else encode_words(opened, model, text)
    inspections = [Inspection(opened, processor, open_image(file), point or (), class_name, words) for file in files]
    joint: dict[str, Drawing] = {"pca": partial(_draw_pca, inspections)}
    joint["predictions"] = lambda file: [*predict_files(model, files, picture=file, head=head, overwrite=True)]
    drawn: dict[Path, Drawing] = {}
    for kind in kinds or kinds_of(opened, text):
        if kind in joint:
            drawn[output_dir / f"{kind}.png"] = joint[kind]
        for inspection, name in zip(inspections, name_outputs(files), strict=True) if kind not in joint else ():
            drawn[output_dir / f"{name}_{kind}.png"] = partial(PHOTO_DRAWINGS[kind], inspection)
    check_outputs(drawn, files, overwrite)
    output_dir.mkdir(parents=True, exist_ok=True)
    for file, draw_file in drawn.items():
        draw_file(file)
        record_outputs([file])
        report(str(file))
    return list(drawn)
