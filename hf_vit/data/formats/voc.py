"""Boxes in the XML files of Pascal VOC, as VOC lays them out and as other tools do. Shapes: N objects."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from transformers.utils import logging

from .files import (
    MAX_NAMED,
    files_below,
    images_at,
    in_lines,
    is_image,
    listed,
    one_per_split,
    raise_faults,
    splits_in,
    subfolders,
)
from .objects import ObjectTable, numbered_words, table_of


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
    """Finds XML files by split."""
    # In a folder with `Annotations/` and maybe `ImageSets/Main/train.txt`, ..., also as `VOCdevkit/VOC2012/`; or in
    # one with `train/`, `valid/`, ... therein XML files beside their images, or in a folder beside that of the images;
    # or in just such a folder.
    if not path.is_dir():
        return {}
    root = _year(path)
    if lists := _split_lists(root):
        return {split: _listed_files(root, file) for split, file in lists.items()}
    found = {split: files_below(folder) for split, folder in (splits_in(root) or {"train": root}).items()}
    xml = {split: [file for file in files if file.suffix.lower() == SUFFIX] for split, files in found.items()}
    return {split: files for split, files in xml.items() if files}


def _year(path: Path) -> Path:
    """Returns the folder of a year of VOC in a `VOCdevkit`, or the path itself."""
    years = [year for kit in (path, path / "VOCdevkit") if kit.is_dir() for year in kit.glob("VOC[0-9]*")]
    if len(years) > 1:
        raise ValueError(f"{path} has several years of VOC: {listed(sorted(year.name for year in years))}. Give one.")
    return years[0] if years else path


def _split_lists(root: Path) -> dict[str, Path]:
    folder = root / "ImageSets" / "Main"
    found = [(name, folder / f"{name}.txt") for name in SPLIT_LISTS if (folder / f"{name}.txt").is_file()]
    if not any(name == "train" for name, _ in found) and (folder / "trainval.txt").is_file():
        found = [("train", folder / "trainval.txt"), *(entry for entry in found if entry[0] == "test")]
    return one_per_split(found)


def _listed_files(root: Path, file: Path) -> list[Path]:
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    files = [root / "Annotations" / f"{words[0]}{SUFFIX}" for words in lines if words]
    raise_faults(
        [path for path in files if not path.is_file()], f"of {len(files)} files that {file} lists do not exist"
    )
    return files


def load_voc(
    files: Mapping[str, list[Path]], class_names: Sequence[str] | None
) -> tuple[list[ObjectTable], tuple[str, ...]]:
    """Read objects and the names of classes from XML files by split, without opening images whose size they give.

    An image has the name of its file but for the suffix, and lies beside it or in the folder beside its folder.
    Objects marked as difficult need not be found: they count as crowds. Files of VOC itself number pixels from 1 and
    name the last one of a box, those of other tools the edges. Unless given, the classes are those of "train", sorted.
    """
    found = {split: (_images_of(paths), *_read_all(paths)) for split, paths in files.items()}
    words = {split: [entry.word for entry in objects] for split, (_, _, _, objects) in found.items()}
    labels, names = numbered_words(words, class_names)
    tables = [
        table_of(
            split,
            images_at(images, split),
            sizes,
            image_numbers,
            np.array([entry.box for entry in objects]),
            [entry.name for entry in objects].__getitem__,
            labels=labels[split],
            is_crowd=[entry.difficult for entry in objects],
        )
        for split, (images, sizes, image_numbers, objects) in found.items()
    ]
    return tables, names


def _images_of(files: list[Path]) -> list[str]:
    folders = {file.parent: _image_folders(file.parent) for file in files}
    by_stem: dict[Path, dict[str, list[Path]]] = {}
    for folder in {image_folder for found in folders.values() for image_folder in found}:
        by_stem[folder] = defaultdict(list)
        for image in sorted(filter(is_image, folder.iterdir())):
            by_stem[folder][image.stem].append(image)
    found = [
        [image for folder in folders[file.parent] for image in by_stem[folder].get(file.stem, [])] for file in files
    ]
    raise_faults(
        [
            f"{file}: {listed(list(map(str, images))) if images else 'none'}"
            for file, images in zip(files, found, strict=True)
            if len(images) != 1
        ],
        f"of {len(files)} XML files have not one image each, of the same name but for the suffix, beside them or in "
        "JPEGImages/ or images/",
    )
    stems = {file.stem for folder in folders for file in folder.iterdir() if file.suffix == SUFFIX}
    bare = sorted(str(file) for images in by_stem.values() for stem in images.keys() - stems for file in images[stem])
    if bare:
        logger.warning("Left out %d images without an XML file:%s", len(bare), in_lines(bare, MAX_NAMED))
    return [str(images[0].absolute()) for images in found]  # the dataset outlives the working directory


def _image_folders(folder: Path) -> list[Path]:
    """Return the folders in which the images of XML files in a folder may lie."""
    if folder.name.lower() not in ANNOTATIONS:
        return [folder]
    return [folder, *(other for other in subfolders(folder.parent) if other.name.lower() in ("jpegimages", "images"))]


def _read_all(files: list[Path]) -> tuple[np.ndarray, np.ndarray, list[_Object]]:
    """Return (I, 2) width and height as given, else 0, the image number of each object, and the objects."""
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
        raise ValueError(f"object {place + 1} has no name, or no bndbox with {', '.join(CORNERS)}")
    x1, y1, x2, y2 = (float(text or "") for text in texts)
    counts_from_one = (root.findtext("source/annotation") or "").startswith("PASCAL")
    box = (x1 - counts_from_one, y1 - counts_from_one, x2, y2)
    return _Object(word.strip(), box, entry.findtext("difficult"), f"object {place + 1} of {file}")
