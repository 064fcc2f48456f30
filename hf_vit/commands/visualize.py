"""Draws what a model attends to, on photos and in its own weights: any model of ours, or a published ViT.

Writes <photo>_<kind>.png for each photo and <kind>.png for all together, by default all kinds that the model has:

    <photo>_attention    the attention of each head of each layer to the patches
    <photo>_rollout      the share of each patch that reaches the end: attention followed through all layers
    <photo>_saliency     the relevance of each patch for a class (of classifiers)
    <photo>_similarity   the similarity of one patch to all others
    distance             how far the heads of each layer attend
    pca                  patches in the colors of their principal components, the same in all photos
    positions            the similarity of the position embeddings (of models that have a table of them)
    filters              the principal components of the patch embedding

Photos are seen as a whole, in their proportions.

Examples:
    hf-vit visualize outputs/photos photo.jpg --output_dir outputs/maps
    hf-vit visualize outputs/photos photo.jpg --output_dir outputs/maps --kinds attention similarity --point 320,200
    hf-vit visualize facebook/dinov2-small photos --output_dir outputs/maps --kinds pca --foreground_threshold 0.5
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from ..inference.predict import find_images, name_outputs, open_image
from ..inspection import OF_ALL, OF_EACH, Inspection, kinds_of, open_for_inspection
from ..options.field import COUNT, PROBABILITY
from ..outputs import check_outputs, check_writable, record_outputs


def visualize(
    model: str,
    photos: list[Path],
    *,
    output_dir: Path,
    kinds: Annotated[list[str] | None, (*OF_EACH, *OF_ALL)] = None,
    image_size: Annotated[int | None, COUNT] = None,
    point: tuple[float, float] | None = None,
    class_name: str | None = None,
    foreground_threshold: Annotated[float | None, PROBABILITY] = None,
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
        foreground_threshold: Leave patches below out of pca, from 0 to 1.
        overwrite: Replace pictures of an earlier run.
        report: Prints a line.

    Raises:
        ValueError: if the model cannot be opened or lacks what a picture needs, or a file must stay.
        OSError: if there is no such model or photo, or nothing can be written.
    """
    check_writable(output_dir)
    files = find_images(photos)
    opened, processor = open_for_inspection(model, image_size)
    options = (point, class_name, foreground_threshold)
    inspections = [Inspection(opened, processor, open_image(file), *options) for file in files]
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
