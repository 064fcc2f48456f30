"""Readers of boxes in YOLO text files and Pascal VOC XML files."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import yaml
from transformers.utils import logging

from .files import (
    MAX_NAMED,
    SPLITS,
    by_unique_split,
    check_exist,
    files_below,
    images_at,
    in_lines,
    is_image,
    joined,
    raise_faults,
    split_from_alias,
    splits_in,
    subfolders,
    visible,
)
from .objects import (
    ObjectTable,
    check_no_class_names,
    check_numbers,
    class_names_or_file,
    corners,
    number_class_names,
    table_of,
)


YAML_SUFFIXES = (".yaml", ".yml")
IMAGES, LABELS = "images", "labels"


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


def find_yolo(path: Path) -> YoloFiles | None:
    """Find the files of a YOLO dataset; return `None` if the path is not a YOLO dataset.

    The path is a file data.yaml, a folder with such a file, or a folder with `images/` and `labels/`. `images/`
    and `labels/` may contain a subfolder per split, or each split may have its own folder with both of them.
    """
    if path.is_file():
        return _from_yaml(path) if path.suffix.lower() in YAML_SUFFIXES else None
    files = list(filter(_read_description, visible(f for f in path.iterdir() if f.suffix.lower() in YAML_SUFFIXES)))
    if len(files) > 1:
        raise ValueError(
            f"{path} has several YAML files of YOLO datasets: {joined(list(map(str, files)))}. Give the path of one."
        )
    return _from_yaml(files[0]) if files else _from_folders(path)


def _read_description(file: Path) -> dict[Any, Any] | None:
    """Return the content of a YAML file, or `None` if it does not describe a YOLO dataset."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}. Correct the file.") from error
    names_data = (
        isinstance(content, dict) and "names" in content and any(split_from_alias(str(key)) for key in content)
    )
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
    images: dict[str, list[Path]] = {}
    for key, place in content.items():
        if place and (split := split_from_alias(str(key))):
            entries = [place] if isinstance(place, str) else place
            images[split] = [image for entry in entries for image in _images_at(entry, content, file)]
    return YoloFiles(images, _names(content["names"], file), (), file)


def _names(names: Any, file: Path) -> tuple[str, ...]:
    found = dict(enumerate(names)) if isinstance(names, list) else names
    if not isinstance(found, dict) or sorted(found) != list(range(len(found))):
        raise ValueError(f"{file} has names={names!r}. Write class names as a list, or number them from 0.")
    return tuple(str(found[number]) for number in range(len(found)))


def _images_at(entry: str, content: Mapping[str, Any], file: Path) -> list[Path]:
    """Return the images of an entry of data.yaml, which is a folder or a text file of image paths.

    The entry is relative to the `path` in data.yaml or to the folder of data.yaml.
    """
    folder = file.parent
    # Roboflow writes "../train/images" for a folder that is next to data.yaml.
    places = [folder / str(content.get("path") or "") / entry, folder / entry, folder / entry.removeprefix("../")]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        raise ValueError(f"{entry!r} of {file} was not found in:{in_lines(places)}\nCorrect the path in the file.")
    if place.is_dir():
        return _images_below(place)
    lines = [line.strip() for line in place.read_text(encoding="utf-8").splitlines() if line.strip()]
    paths = [place.parent / line for line in lines]
    check_exist(paths, f"listed in {place} do not exist", "images")
    return paths


def _images_below(folder: Path) -> list[Path]:
    if images := [file for file in files_below(folder) if is_image(file)]:
        return images
    raise ValueError(f"{folder} has no image. Add images.")


def _from_folders(path: Path) -> YoloFiles | None:
    folders = {folder.name.lower(): folder for folder in subfolders(path)}
    if IMAGES in folders and LABELS in folders:
        roots = splits_in(folders[IMAGES]) or {"train": folders[IMAGES]}
        labels = [folders[LABELS]]
    else:
        splits = {split: folder for split, folder in splits_in(path).items() if (folder / LABELS).is_dir()}
        roots = {split: folder / IMAGES for split, folder in splits.items() if (folder / IMAGES).is_dir()}
        labels = [folder / LABELS for folder in splits.values()]
    if not roots or not any(file.suffix == ".txt" for folder in labels for file in files_below(folder)):
        return None
    return YoloFiles({split: _images_below(folder) for split, folder in roots.items()}, (), (path, *labels), path)


def load_yolo(files: YoloFiles, class_names: Sequence[str] | None) -> tuple[list[ObjectTable], tuple[str, ...]]:
    """Read objects from YOLO text files; return one table per split and the class names.

    The objects of `images/train/1.jpg` are in `labels/train/1.txt`; an image without such a file has no objects.
    Polygons are converted to their bounding boxes. Class names come from data.yaml, `class_names`, or classes.txt.
    """
    if files.names:
        check_no_class_names(class_names, files.source)
    names = files.names or class_names_or_file(files.folders, class_names)
    splits = [split for split in SPLITS if split in files.images]
    return [_table(files.images[split], split, len(names), files.source) for split in splits], names


def _table(paths: list[Path], split: str, num_classes: int, source: Path) -> ObjectTable:
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
    check_numbers(labels, num_classes, names, source)
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


logger = logging.get_logger(__name__)
SUFFIX = ".xml"
ANNOTATIONS = ("annotations", "annotation", "xmls", "labels")
CORNERS = ("xmin", "ymin", "xmax", "ymax")
SPLIT_LISTS = ("train", "val", "test")


@dataclass(frozen=True)
class _Object:
    word: str
    box: tuple[float, ...]
    difficult: str | None
    name: str


def find_voc(path: Path) -> dict[str, list[Path]]:
    """Find VOC XML files by split.

    Supported layouts are `Annotations/` with optional `ImageSets/Main/train.txt`, ..., also in `VOCdevkit/VOC2012/`,
    and XML files next to their images or in a sibling folder, optionally inside `train/`, `valid/`, ...
    """
    if not path.is_dir():
        return {}
    root = _year(path)
    if lists := _split_lists(root):
        return {split: _listed_files(root, file) for split, file in lists.items()}
    found = {split: files_below(folder) for split, folder in (splits_in(root) or {"train": root}).items()}
    xml = {split: [file for file in files if file.suffix.lower() == SUFFIX] for split, files in found.items()}
    return {split: files for split, files in xml.items() if files}


def _year(path: Path) -> Path:
    """Return the year folder, such as VOC2012, in the path or its `VOCdevkit/`. Without any, return the path."""
    years = [year for kit in (path, path / "VOCdevkit") if kit.is_dir() for year in kit.glob("VOC[0-9]*")]
    if len(years) > 1:
        raise ValueError(
            f"{path} has several VOC years: {joined(sorted(year.name for year in years))}. Give the path of one."
        )
    return years[0] if years else path


def _split_lists(root: Path) -> dict[str, Path]:
    folder = root / "ImageSets" / "Main"
    found = [(name, folder / f"{name}.txt") for name in SPLIT_LISTS if (folder / f"{name}.txt").is_file()]
    if not any(name == "train" for name, _ in found) and (folder / "trainval.txt").is_file():
        found = [("train", folder / "trainval.txt"), *(entry for entry in found if entry[0] == "test")]
    return by_unique_split(found)


def _listed_files(root: Path, file: Path) -> list[Path]:
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    files = [root / "Annotations" / f"{words[0]}{SUFFIX}" for words in lines if words]
    check_exist(files, f"listed in {file} do not exist")
    return files


def load_voc(
    files: Mapping[str, list[Path]], class_names: Sequence[str] | None
) -> tuple[list[ObjectTable], tuple[str, ...]]:
    """Read objects from VOC XML files without opening the images; return one table per split and the class names.

    An XML file and its image have the same stem. The image is in the folder of the XML file or in a sibling folder.
    Objects marked as difficult are treated like crowds. In the files of the VOC challenges, coordinates are pixel
    indices that start at 1 and include the last pixel. In files of other tools, they are the edges of the box. By
    default, the class names are the sorted names that occur in "train".
    """
    found = {split: (_images_of(paths), *_read_all(paths)) for split, paths in files.items()}
    words = {split: [entry.word for entry in objects] for split, (_, _, _, objects) in found.items()}
    labels, names = number_class_names(words, class_names)
    tables = [
        table_of(
            split,
            images_at(images, split),
            sizes,
            image_numbers,
            np.array([entry.box for entry in objects]),
            [entry.name for entry in objects],
            labels=labels[split],
            is_crowd=[entry.difficult for entry in objects],
        )
        for split, (images, sizes, image_numbers, objects) in found.items()
    ]
    return tables, names


def _images_of(files: list[Path]) -> list[str]:
    folders = {file.parent: _image_folders(file.parent) for file in files}
    by_stem = defaultdict[tuple[Path, str], list[Path]](list)
    for folder in {image_folder for found in folders.values() for image_folder in found}:
        for image in sorted(filter(is_image, folder.iterdir())):
            by_stem[folder, image.stem].append(image)
    found = [[image for folder in folders[file.parent] for image in by_stem[folder, file.stem]] for file in files]
    raise_faults(
        [
            f"{file}: {joined(list(map(str, images))) if images else 'none'}"
            for file, images in zip(files, found, strict=True)
            if len(images) != 1
        ],
        f"of {len(files)} XML files do not have exactly one image with the same stem, in their folder, JPEGImages/ or "
        "images/",
    )
    stems = {file.stem for folder in folders for file in folder.iterdir() if file.suffix == SUFFIX}
    bare = sorted(str(image) for (_, stem), images in by_stem.items() if stem not in stems for image in images)
    if bare:
        logger.warning("Ignored %d images without an XML file:%s", len(bare), in_lines(bare, MAX_NAMED))
    # Absolute paths stay valid if the working directory changes.
    return [str(images[0].absolute()) for images in found]


def _image_folders(folder: Path) -> list[Path]:
    """Return the folders that may contain the images of the XML files in a folder."""
    if folder.name.lower() not in ANNOTATIONS:
        return [folder]
    return [folder, *(other for other in subfolders(folder.parent) if other.name.lower() in ("jpegimages", "images"))]


def _read_all(files: list[Path]) -> tuple[np.ndarray, np.ndarray, list[_Object]]:
    """Read XML files.

    Returns:
        The width and height of each image (I, 2), or 0 if not given; the image index of each object; the objects.
    """
    faults: list[str] = []
    sizes, image_numbers, objects = np.zeros((len(files), 2), np.int64), [], []
    for number, file in enumerate(files):
        try:
            root = ElementTree.parse(file).getroot()
            sizes[number] = [int(float(root.findtext(f"size/{side}") or 0)) for side in ("width", "height")]
            found = [_read_object(entry, root, file, place) for place, entry in enumerate(root.iter("object"))]
        except (ElementTree.ParseError, ValueError) as error:
            faults.append(f"{file}: {error}")
        else:
            image_numbers += [number] * len(found)
            objects += found
    raise_faults(faults, f"of {len(files)} XML files are malformed")
    return sizes, np.array(image_numbers, np.int64), objects


def _read_object(entry: ElementTree.Element, root: ElementTree.Element, file: Path, place: int) -> _Object:
    word, texts = entry.findtext("name"), [entry.findtext(f"bndbox/{corner}") for corner in CORNERS]
    if not word or None in texts:
        raise ValueError(f"object {place + 1} has no name or no bndbox with {', '.join(CORNERS)}")
    x1, y1, x2, y2 = (float(text or "") for text in texts)
    counts_from_one = (root.findtext("source/annotation") or "").startswith("PASCAL")
    box = (x1 - counts_from_one, y1 - counts_from_one, x2, y2)
    return _Object(word.strip(), box, entry.findtext("difficult"), f"object {place + 1} of {file}")
