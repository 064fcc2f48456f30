"""Compare object detection with and without tiles on large composites of a data set, by COCO average precision.

A composite of 2,000 x 1,500 pixels is a mosaic of images with annotations in COCO format. In every second image,
objects are reduced by `scale`, so that composites contain small and large objects.
"""

import json
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
SCORES = ("map", "map_50", "map_small", "map_medium", "map_large")


@dataclass(kw_only=True)
class Arguments:
    """Options of the benchmark."""

    model: str = field(metadata={"help": "folder of a detector"})
    folder: str = field(metadata={"help": "folder with images/ and annotations.json"})
    scale: float = field(default=0.3, metadata={"help": "scale of every second image; 1 keeps all at their size"})
    tile_size: int = field(default=480, metadata={"help": "height and width of tiles in pixels"})
    overlap: float = field(default=0.2, metadata={"help": "overlap of tiles"})
    max_composites: int = field(default=100, metadata={"help": "maximum number of composites"})


def compose(folder: Path, images: list[dict[str, Any]], content: dict[str, Any], scale: float) -> tuple[Any, Any]:
    """Return a mosaic of images, and its boxes and class numbers."""
    canvas, numbers = (
        Image.new("RGB", (WIDTH, HEIGHT), (225, 215, 205)),
        [kind["id"] for kind in content["categories"]],
    )
    boxes, labels = [], []
    for place, entry in enumerate(images):
        left, top = place % COLUMNS * WIDTH // COLUMNS, place // COLUMNS * HEIGHT // ROWS
        factor = scale if place % 2 else 1.0
        with Image.open(folder / "images" / entry["file_name"]) as image:
            size = round(image.width * factor), round(image.height * factor)
            canvas.paste(image.convert("RGB").resize(size), (left, top))
        for found in content["annotations"]:
            if found["image_id"] == entry["id"]:
                x, y, width, height = (side * factor for side in found["bbox"])
                boxes.append([left + x, top + y, left + x + width, top + y + height])
                labels.append(numbers.index(found["category_id"]))
    return canvas, {"boxes": boxes, "class_labels": labels}


def main(args: Arguments) -> None:
    """Print the average precision and the time per composite, without and with tiles."""
    transformers.logging.set_verbosity_error()
    folder = Path(args.folder)
    content = json.loads((folder / "annotations.json").read_text(encoding="utf-8"))
    names = [kind["name"] for kind in content["categories"]]
    pipe = pipeline("object-detection", model=args.model, threshold=0.0)
    runs: dict[str, dict[str, Any]] = {
        "whole image": {},
        "tiles": {"tile_size": args.tile_size, "overlap": args.overlap},
    }
    metrics, seconds = {name: DetectionMetric(names) for name in runs}, dict.fromkeys(runs, 0.0)
    images, count = content["images"], COLUMNS * ROWS
    groups = [images[start : start + count] for start in range(0, len(images), count)][: args.max_composites]
    for group in groups:
        canvas, target = compose(folder, group, content, args.scale)
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
