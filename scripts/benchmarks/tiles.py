"""Compare object detection with and without tiles on large composites of a data set, by COCO average precision.

A composite of 2,000 x 1,500 pixels consists of images with annotations in COCO format. In every second image, objects
are reduced by `scale`, so that composites contain small and large objects.

A detector requires training images of the same kind. Instead of the comparison, `--write FOLDER` writes composites and
random windows of composites of one split as a data set in COCO format.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import transformers
from PIL import Image
from transformers import pipeline

import hf_vit  # noqa: F401 - registers the pipeline
from hf_vit.evaluation.detection import DetectionMetric
from hf_vit.model.pipeline_hf_vit import CORNERS

from .harness import print_header, print_row


WIDTH, HEIGHT, COLUMNS, ROWS = 2000, 1500, 3, 3
# Images per composite. COCO metrics use at most 100 detections per image and class, and an image has about 11 cells.
IMAGES_PER_COMPOSITE = 8
WINDOW_WIDTHS, MIN_VISIBLE, WRITTEN_WIDTH = (300, 640), 0.3, 700  # of images created by `--write`
SCORES = ("map", "map_50", "map_small", "map_medium", "map_large")


Boxes = list[tuple[list[float], int]]  # left, top, right and bottom in pixels, and the class number


@dataclass(kw_only=True)
class Arguments:
    """Options of the benchmark."""

    folder: str = field(metadata={"help": "folder with images/ and annotations.json"})
    model: str | None = field(default=None, metadata={"help": "folder of a detector"})
    scale: float = field(default=0.3, metadata={"help": "scale of every second image; 1 keeps its size"})
    tile_size: list[int] = field(default_factory=lambda: [300, 400], metadata={"help": "height and width of tiles"})
    overlap: float = field(default=0.2, metadata={"help": "overlap of neighboring tiles as a share of their size"})
    images: list[int] | None = field(
        default=None, metadata={"help": "index of the first image, and index after the last"}
    )
    write: str | None = field(default=None, metadata={"help": "folder of a data set to write, instead of comparing"})
    views: int = field(default=320, metadata={"help": "number of images to write"})


def compose(folder: Path, images: list[dict[str, Any]], content: dict[str, Any], scale: float) -> tuple[Any, Boxes]:
    """Return a composite of images, and its objects. Each image has a random position in its cell of a grid."""
    canvas, numbers = (
        Image.new("RGB", (WIDTH, HEIGHT), (225, 215, 205)),
        [own["id"] for own in content["categories"]],
    )
    objects, draw = Boxes(), random.Random(images[0]["file_name"])
    for place, entry in enumerate(images):
        factor = scale if place % 2 else 1.0
        with Image.open(folder / "images" / entry["file_name"]) as image:
            reduced = image.convert("RGB").resize((round(image.width * factor), round(image.height * factor)))
        left = place % COLUMNS * WIDTH // COLUMNS + draw.randint(0, max(0, WIDTH // COLUMNS - reduced.width))
        top = place // COLUMNS * HEIGHT // ROWS + draw.randint(0, max(0, HEIGHT // ROWS - reduced.height))
        canvas.paste(reduced, (left, top))
        for found in content["annotations"]:
            if found["image_id"] == entry["id"]:
                x, y, width, height = (side * factor for side in found["bbox"])
                box = [left + x, top + y, left + x + width, top + y + height]
                objects.append((box, numbers.index(found["category_id"])))
    return canvas, objects


def cut(canvas: Image.Image, objects: Boxes, draw: random.Random) -> tuple[Any, Boxes]:
    """Return a random window of a composite around an object, with the visible parts of its objects."""
    width = draw.randint(*WINDOW_WIDTHS)
    size = (width, width * HEIGHT // WIDTH)
    middle, _ = draw.choice(objects)
    corner = [
        min(max(0, round(middle[axis] - draw.random() * size[axis])), side - size[axis])
        for axis, side in enumerate(canvas.size)
    ]
    seen = Boxes()
    for box, label in objects:
        moved = [min(max(0, box[i] - corner[i % 2]), size[i % 2]) for i in range(4)]
        visible = (moved[2] - moved[0]) * (moved[3] - moved[1])
        if visible >= MIN_VISIBLE * (box[2] - box[0]) * (box[3] - box[1]):
            seen.append((moved, label))
    return canvas.crop((corner[0], corner[1], corner[0] + size[0], corner[1] + size[1])), seen


def write_views(args: Arguments, content: dict[str, Any], images: list[dict[str, Any]]) -> None:
    """Write views of random composites as a data set: every third is a composite, the others are windows."""
    target, draw = Path(str(args.write)), random.Random(0)
    (target / "images").mkdir(parents=True)
    result: dict[str, Any] = {"images": [], "annotations": [], "categories": content["categories"]}
    for number in range(args.views):
        if number % 3 == 0:
            chosen = draw.sample(images, IMAGES_PER_COMPOSITE)
            composite = compose(Path(args.folder), chosen, content, args.scale)
        view, objects = composite if number % 3 == 0 else cut(*composite, draw)
        factor, name = min(1.0, WRITTEN_WIDTH / view.width), f"{number:04}.jpg"
        view = view.resize((round(view.width * factor), round(view.height * factor)))
        view.save(target / "images" / name, quality=95)
        result["images"].append({"id": number, "file_name": name, "width": view.width, "height": view.height})
        for box, label in objects:
            left, top, right, bottom = (side * factor for side in box)
            sides = {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
            kind = content["categories"][label]["id"]
            found = {"id": len(result["annotations"]) + 1, "image_id": number, "category_id": kind, "iscrowd": 0}
            result["annotations"].append(found | sides)
    (target / "annotations.json").write_text(json.dumps(result), encoding="utf-8")


def main(args: Arguments) -> None:
    """Print the average precision and the time per composite, without and with tiles."""
    transformers.logging.set_verbosity_error()
    folder = Path(args.folder)
    content = json.loads((folder / "annotations.json").read_text(encoding="utf-8"))
    images = content["images"] if args.images is None else content["images"][slice(*args.images)]
    if args.write is not None:
        write_views(args, content, images)
        return
    names = [kind["name"] for kind in content["categories"]]
    pipe = pipeline("object-detection", model=args.model, threshold=0.0)
    runs: dict[str, dict[str, Any]] = {
        "whole image": {},
        "tiles": {"tile_size": tuple(args.tile_size), "overlap": args.overlap},
    }
    metrics, seconds = {name: DetectionMetric(names) for name in runs}, dict.fromkeys(runs, 0.0)
    groups = [images[start : start + IMAGES_PER_COMPOSITE] for start in range(0, len(images), IMAGES_PER_COMPOSITE)]
    for group in groups:
        canvas, objects = compose(folder, group, content, args.scale)
        target = {"boxes": [box for box, _ in objects], "class_labels": [label for _, label in objects]}
        for name, options in runs.items():
            start = perf_counter()
            found = pipe(canvas, **options)
            seconds[name] += perf_counter() - start
            prediction = {
                "boxes": [[own["box"][side] for side in CORNERS] for own in found],
                "class_labels": [names.index(own["label"]) for own in found],
                "scores": [own["score"] for own in found],
            }
            metrics[name].update([metrics[name].record(prediction, target)])
    print_header("run", *SCORES, "seconds")
    for name, metric in metrics.items():
        scores = metric.compute()
        print_row(name, *(f"{scores[key]:.3f}" for key in SCORES), f"{seconds[name] / len(groups):.2f}")
