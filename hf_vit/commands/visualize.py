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

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..flags.parser import OneLineParser, exit_in_one_line
from ..inference.predict import find_images, name_outputs, open_image
from ..inspection import OF_ALL, OF_EACH, Inspection, kinds_of, open_for_inspection
from ..outputs import check_outputs, check_writable, record_outputs


def to_point(text: str) -> tuple[float, float]:
    """Returns x and y of "x,y"."""
    x, y = map(float, text.split(","))
    if not (math.isfinite(x) and math.isfinite(y)):
        raise ValueError(f"{text} is no point.")
    return x, y


def check(args: argparse.Namespace) -> None:
    """Raises `ValueError` or `OSError` for what can be wrong whatever model and photos are."""
    if args.image_size is not None and args.image_size < 1:
        raise ValueError(f"image_size={args.image_size} must be at least 1. Leave it out for that of the model.")
    if args.foreground_threshold is not None and not 0 <= args.foreground_threshold <= 1:
        raise ValueError(f"foreground_threshold={args.foreground_threshold} must lie in [0, 1]. 0.5 is usual.")
    check_writable(args.output_dir)


def make_parser(description: str | None) -> OneLineParser:
    """Returns the parser of the command line."""
    parser = OneLineParser(description, "visualize")
    parser.add_argument("model", help="folder or file of a saved model, or its name on the Hub, ours or published")
    parser.add_argument("photos", nargs="+", type=Path, help="image files, and folders that are searched for them")
    parser.add_argument("--output_dir", type=Path, required=True, help="where to write the pictures")
    parser.add_argument("--kinds", nargs="+", choices=[*OF_EACH, *OF_ALL], help="what to draw (default: all)")
    parser.add_argument("--image_size", type=int, help="shorter side of what the model sees, in pixels")
    parser.add_argument(
        "--point",
        type=to_point,
        help="x,y in pixels of the photo: the patch whose attention and rollout are drawn (default: those of the CLS "
        "token or the mean of the patches), and which is compared (default: that in the middle)",
    )
    parser.add_argument("--class_name", help="the class that saliency explains (default: the likeliest)")
    parser.add_argument("--foreground_threshold", type=float, help="leave patches below out of pca, from 0 to 1")
    parser.add_argument("--overwrite", action="store_true", help="replace pictures of an earlier run")
    return parser


def draw(args: argparse.Namespace, report: Callable[[str], None]) -> None:
    """Draws and names what was written."""
    check(args)
    files = find_images(args.photos)
    model, processor = open_for_inspection(args.model, args.image_size)
    options = {name: vars(args)[name] for name in ("point", "class_name", "foreground_threshold")}
    photos = [Inspection(model, processor, open_image(file), **options) for file in files]
    drawn: dict[Path, Callable[[Path], None]] = {}
    for kind in args.kinds or kinds_of(model):
        if kind in OF_ALL:
            drawn[args.output_dir / f"{kind}.png"] = partial(OF_ALL[kind], photos)
            continue
        for photo, name in zip(photos, name_outputs(files), strict=True):
            drawn[args.output_dir / f"{name}_{kind}.png"] = partial(OF_EACH[kind], photo)
    check_outputs(drawn, files, args.overwrite)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for file, draw_file in drawn.items():
        draw_file(file)
        record_outputs([file])
        report(str(file))


def main(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Draws, and exits with one line about what is wrong.

    Args:
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Prints a line.
    """
    with exit_in_one_line(ValueError, OSError):
        draw(make_parser(description).parse_args(arguments), report)
