"""Text files of YOLO, one per image with a line per object, and the description data.yaml.

Shapes: N objects.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ..reading.files import (
    check_exist,
    files_below,
    images_at,
    in_lines,
    is_image,
    joined,
    local_path,
    raise_faults,
    read_text,
    subfolders,
    visible,
    walk_files,
    warn_ignored,
)
from ..reading.match import Match, Target
from ..reading.objects import ObjectData, ObjectTable, corners, table_of
from ..reading.splits import by_split, find_split_folders, is_split, order_splits, unread_lists


YAML_SUFFIXES = (".yaml", ".yml")
IMAGES, LABELS = "images", "labels"
OTHER_TEXTS = ("classes.txt", "notes.txt", "README.txt", "train.txt", "val.txt", "test.txt")


@dataclass(frozen=True)
class YoloFiles:
    """The files of a YOLO dataset.

    Args:
        images: Image paths by split.
        names: Class names from data.yaml; empty if there is no such file.
        folders: Folders that may contain a file of class names.
            source: Path of data.yaml, or of the dataset folder if there is no such file.
    """

    images: dict[str, list[Path]]
    names: tuple[str, ...]
    folders: tuple[Path, ...]
    source: Path


def detect(path: Path, target: Target) -> Match | None:
    """Find a file data.yaml, or a folder with such a file, or a folder with `images/` and `labels/`.

    `images/` and `labels/` may contain a subfolder per split, or each split may have its own folder with both of them.
    """
    if path.is_file():
        return Match(path, path.name) if path.suffix.lower() in YAML_SUFFIXES else None
    files = list(filter(_read_description, visible(f for f in path.iterdir() if f.suffix.lower() in YAML_SUFFIXES)))
    if len(files) > 1:
        raise ValueError(
            f"{path} has several YAML files of YOLO datasets: {joined(list(map(str, files)))}. Give the path of one."
        )
    if files:
        return Match(files[0], files[0].name)
    return _from_folders(path)


def _read_description(file: Path) -> dict[str, Any] | None:
    """Return the content of a YAML file with all values as text, or `None` if it does not describe a YOLO dataset."""
    try:
        # YAML has no quotes around most names. Other loaders read the names yes and 010 as True and 8.
        content = yaml.load(read_text(file), yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}. Correct the file.") from error
    names_data = isinstance(content, dict) and "names" in content and any(map(is_split, content))
    return content if names_data else None


def _from_yaml(file: Path) -> YoloFiles:
    content = _read_description(file)
    if content is None:
        raise ValueError(f"{file} does not describe a YOLO dataset. Add the keys names, and train, val or test.")
    if "kpt_shape" in content:
        raise ValueError(
            f"{file} contains keypoints (kpt_shape), which are not read in this format. Convert them to COCO JSON or "
            "to a CSV file."
        )
    places, _ = by_split((key, place) for key, place in content.items() if place and is_split(key))
    others = [key for key, place in content.items() if _is_path(place, file) and key != "path" and not is_split(key)]
    warn_ignored(f"keys of {file}", "they contain no split", others)
    entries = {split: [place] if isinstance(place, str) else place for split, place in places.items()}
    images = {
        split: [image for entry in own for image in _images_at(entry, content, file)] for split, own in entries.items()
    }
    return YoloFiles(images, _names(content["names"], content.get("nc"), file), (), file)


def _is_path(place: Any, file: Path) -> bool:
    return isinstance(place, str) and place != "" and local_path(file.parent, place).exists()


def _names(names: Any, count: str | None, file: Path) -> tuple[str, ...]:
    found: Any = dict(enumerate(names)) if isinstance(names, list) else names
    if isinstance(names, dict) and all(map(str.isdecimal, names)):
        found = {int(number): name for number, name in names.items()}
    if not isinstance(found, dict) or {*found} != {*range(len(found))}:
        raise ValueError(f"{file} has names={found!r}. Write class names as a list, or number them from 0.")
    ordered = tuple(found[number] for number in range(len(found)))
    if not all(isinstance(name, str) and name for name in ordered):
        raise ValueError(f"{file} has names={names!r}, which are not all texts. Write one text per class.")
    if count is not None and count != str(len(ordered)):
        raise ValueError(
            f"{file} has nc: {count}, but {len(ordered)} names: {joined(ordered)}. Correct the number or the names."
        )
    return ordered


def _images_at(entry: str, content: Mapping[str, Any], file: Path) -> list[Path]:
    """Return the images of an entry of data.yaml, which is a folder or a text file of image paths.

    The entry is relative to the `path` in data.yaml or to the folder of data.yaml.
    """
    folder = file.parent
    # Roboflow writes "../train/images" for a folder that is next to data.yaml.
    names = [str(Path(content.get("path") or "", entry)), entry, entry.removeprefix("../")]
    places = [local_path(folder, name) for name in names]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        raise ValueError(f"{entry!r} of {file} was not found in:{in_lines(places)}\nCorrect the path in the file.")
    if place.is_dir():
        return _images_below(place)
    lines = [line.strip() for line in read_text(place).splitlines() if line.strip()]
    paths = [local_path(place.parent, line) for line in lines]
    if paths and not paths[0].exists():  # CVAT and Datumaro write paths that start with `data/`
        paths = [local_path(place.parent, line.removeprefix("data/")) for line in lines]
    check_exist(paths, f"listed in {place} do not exist", "images")
    return paths


def _images_below(folder: Path) -> list[Path]:
    if images := [file for file in files_below(folder) if is_image(file)]:
        return images
    raise ValueError(f"{folder} has no image. Add images.")


def _from_folders(path: Path) -> Match | None:
    folders, bare = {folder.name.lower(): folder for folder in subfolders(path)}, list[str]()
    if IMAGES in folders and LABELS in folders:
        found = find_split_folders(folders[IMAGES], is_divided=lambda sub: True)
        roots, labels = found.folders or {"train": folders[IMAGES]}, [folders[LABELS]]
    else:
        found = find_split_folders(path, *[lambda sub: (sub / LABELS).is_dir()] * 2)
        pairs = {split: (sub / IMAGES, sub / LABELS) for split, sub in found.folders.items()}
        roots = {split: pair[0] for split, pair in pairs.items() if all(folder.is_dir() for folder in pair)}
        labels = [pairs[split][1] for split in roots]
        bare = sorted(pairs.keys() - roots.keys())
    if not any(any(walk_files(folder, ".txt")) for folder in labels):
        return None
    images = {split: _images_below(folder) for split, folder in roots.items()}
    ignored = (
        *found.ignored(path),
        *unread_lists(path),
        (f"splits in {path}", f"they have no {IMAGES}/ or no {LABELS}/", bare),
    )
    return Match(YoloFiles(images, (), (path, *labels), path), "images/ and labels/ with text files", ignored=ignored)


def read(match: Match) -> ObjectData:
    """Read objects and class names.

    The objects of `images/train/1.jpg` are in `labels/train/1.txt`; an image without such a file has no objects.
    Polygons are converted to their bounding boxes. Class names come from data.yaml, or from classes.txt.
    """
    files = match.files if isinstance(match.files, YoloFiles) else _from_yaml(match.files)
    tables = [_table(images, split, files.source) for split, images in order_splits(files.images).items()]
    _report_bare_texts(files)
    return ObjectData(tables, files.source, files.names, files.folders)


def _report_bare_texts(files: YoloFiles) -> None:
    """Log a warning about text files of objects without an image."""
    texts = {_text_of(image) for images in files.images.values() for image in images}
    folders = {text.parent for text in texts}
    bare = [
        str(file)
        for folder in sorted(folders)
        if folder.is_dir()
        for file in visible(folder.iterdir())
        if file.suffix == ".txt" and file not in texts and file.name not in OTHER_TEXTS
    ]
    warn_ignored(f"{len(bare)} label files", "they have no image of the same name", bare)


def _table(paths: list[Path], split: str, source: Path) -> ObjectTable:
    texts = [_text_of(path) for path in paths]
    if not any(text.is_file() for text in texts):
        raise ValueError(
            f"None of the {len(texts)} images of {split!r} in {source} has a text file of objects. Add text files, "
            f"for example {texts[0]}."
        )
    objects, names, faults = list[tuple[float, ...]](), list[str](), list[str]()
    for number, text in enumerate(texts):
        for line_number, line in enumerate(text.read_text().splitlines() if text.is_file() else (), start=1):
            if words := line.split():
                values, name = _read_line(words), f"line {line_number} of {text}"
                if values is None:
                    faults.append(f"{name}: {line[:80]!r}")
                else:
                    objects.append((number, *values))
                    names.append(name)
    raise_faults(faults, "lines are neither 'class x_center y_center width height' nor 'class x1 y1 x2 y2 x3 y3 ...'")
    table = np.array(objects, float).reshape(-1, 6)
    image_numbers, labels = table[:, :2].astype(np.int64).T
    # Absolute paths stay valid if the working directory changes.
    images = images_at([str(path.absolute()) for path in paths], split)
    boxes, sizes = corners(table[:, 2:], "yolo"), np.zeros((len(images), 2))
    return table_of(split, images, sizes, image_numbers, boxes, names, is_share=True, labels=labels)


def _text_of(image: Path) -> Path:
    """Return the path of an image's text file, in which `labels/` replaces the last `images/`, if any."""
    parts = list(image.parts)
    for place in range(len(parts) - 2, -1, -1):
        if parts[place].lower() == IMAGES:
            parts[place] = LABELS
            break
    return Path(*parts).with_suffix(".txt")


def _read_line(words: list[str]) -> tuple[float, ...] | None:
    """Return the class and the center x, y, width and height of an object; `None` if the line is malformed."""
    try:
        label, *values = map(float, words)
    except ValueError:
        return None
    if not label.is_integer() or not all(map(math.isfinite, values)):
        return None
    if len(values) >= 6 and len(values) % 2 == 0:
        (x1, x2), (y1, y2) = ((min(side), max(side)) for side in (values[::2], values[1::2]))
        values = [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]
    return (label, *values) if len(values) == 4 else None
