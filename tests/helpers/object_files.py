"""Writers of tiny object detection datasets in all supported formats."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image

from .datasets import encoded, picture, write_image


NAMES = ("cat", "dog")
# An image: file name, size (width, height), and a list of objects, each with a class and a box (x1, y1, x2, y2).
Scene = tuple[str, tuple[int, int], list[tuple[str, tuple[float, float, float, float]]]]
SCENES: dict[str, list[Scene]] = {
    "train": [
        ("a", (40, 30), [("dog", (4, 3, 24, 18)), ("cat", (30, 10, 40, 30))]),
        ("b", (32, 48), []),
        ("c", (24, 24), [("cat", (0, 0, 24, 12))]),
    ],
    "val": [("d", (20, 36), [("dog", (5, 6, 15, 33))])],
}
CATEGORIES = [{"id": 9, "name": "dog", "supercategory": "pet"}, {"id": 4, "name": "cat", "supercategory": "pet"}]


def write_scenes(folder: Path, places: dict[str, str]) -> None:
    """Write the images of each split to its subfolder of `folder`."""
    for split, place in places.items():
        for number, (stem, size, _) in enumerate(SCENES[split]):
            write_image(folder / place / f"{stem}.png", picture(number, size))


def coco_content(split: str) -> dict[str, Any]:
    """Return the COCO annotations of the scenes of a split."""
    ids = {category["name"]: category["id"] for category in CATEGORIES}
    images, annotations = [], []
    for number, (stem, (width, height), objects) in enumerate(SCENES[split]):
        images.append({"id": 10 * number, "file_name": f"{stem}.png", "width": width, "height": height})
        for name, (x1, y1, x2, y2) in objects:
            annotation = {"id": len(annotations) + 1, "image_id": 10 * number, "category_id": ids[name]}
            annotations.append({**annotation, "bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": 0})
    annotations.sort(key=lambda annotation: -annotation["image_id"])  # real COCO files are not sorted by image
    return {"images": images, "annotations": annotations, "categories": CATEGORIES}


def write_json(file: Path, content: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def write_coco_boxes(folder: Path, **changes: Any) -> Path:
    """Write a folder per split with images and annotations.json. `changes` replaces lists in the train file."""
    for split in SCENES:
        write_scenes(folder, {split: f"{split}/images"})
        write_json(folder / split / "annotations.json", coco_content(split) | (changes if split == "train" else {}))
    return folder


def voc_xml(scene: Scene, extra: str = "") -> str:
    """Return the VOC annotation (XML) of a scene. The text `extra` is inserted into each object."""
    _, (width, height), objects = scene
    boxes = "".join(
        f"<object><name>{name}</name>{extra}<bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax>"
        f"<ymax>{y2}</ymax></bndbox></object>"
        for name, (x1, y1, x2, y2) in objects
    )
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><filename>other.jpg</filename>{size}{boxes}</annotation>"


def write_voc_beside(folder: Path, places: dict[str, str]) -> Path:
    """Write the VOC file (XML) of each scene to the folder of its split."""
    for split, place in places.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        for scene in SCENES[split]:
            (folder / place / f"{scene[0]}.xml").write_text(voc_xml(scene))
    return folder


def write_yolo_labels(folder: Path, places: dict[str, str]) -> Path:
    """Write a YOLO label file for each scene with objects to the folder of its split."""
    for split, place in places.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        for stem, (width, height), objects in SCENES[split]:
            lines = [
                f"{NAMES.index(name)} {(x1 + x2) / 2 / width:.8f} {(y1 + y2) / 2 / height:.8f} "
                f"{(x2 - x1) / width:.8f} {(y2 - y1) / height:.8f}"
                for name, (x1, y1, x2, y2) in objects
            ]
            if lines:
                (folder / place / f"{stem}.txt").write_text("\n".join(lines) + "\n")
    return folder


def boxes_table(split: str, objects: Any, columns: list[Any]) -> Dataset:
    """Return the images of a split as a dataset. Its column `objects` has the given type and content."""
    images = [encoded(picture(number, size)) for number, (_, size, _) in enumerate(SCENES[split])]
    return Dataset.from_dict({"image": images, "objects": columns}, Features({"image": Image(), "objects": objects}))
