"""XML files of Pascal VOC, one per image."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from transformers.utils import logging

from ..reading.classes import read_class_file
from ..reading.files import (
    MAX_NAMED,
    check_exist,
    files_below,
    in_lines,
    is_image,
    joined,
    raise_faults,
    read_text,
    subfolders,
    visible,
    walk_files,
)
from ..reading.match import Match, Target
from ..reading.objects import AnnotatedImage, AnnotatedObject, ObjectData, table_of_images
from ..reading.splits import by_split, find_split_folders, order_splits, read_split


logger = logging.get_logger(__name__)
SUFFIX = ".xml"
ANNOTATIONS = ("annotations", "annotation", "xmls", "labels")
IMAGES = ("jpegimages", "images", "data")
CORNERS = ("xmin", "ymin", "xmax", "ymax")
LABEL_MAP = "labelmap.txt"  # class names and colors in exports of CVAT and Datumaro
BACKGROUND = "background"


def detect(path: Path, target: Target) -> Match | None:
    """Find XML files by split.

    Supported layouts are `Annotations/` with optional `ImageSets/Main/train.txt`, ..., also in `VOCdevkit/VOC2012/`,
    and XML files next to their images or in a sibling folder, optionally inside `train/`, `valid/`, ...
    """
    if not path.is_dir():
        return None
    root = _year(path)
    lists, others = _split_lists(root)
    ignored = ((f"lists in {root}", "their names contain no split", others),)
    if lists:
        files = {split: _listed_files(root, file) for split, file in lists.items()}
        return Match((root, files), f"lists in ImageSets/Main and {ANNOTATIONS[0]}/", ignored=ignored)
    inner = find_split_folders(root, *[_has_xml] * 2)
    found = {split: files_below(folder, SUFFIX) for split, folder in (inner.folders or {"train": root}).items()}
    files = {split: own for split, own in found.items() if own}
    if not files or not _is_voc(next(iter(files.values()))[0]):
        return None
    count = sum(map(len, files.values()))
    return Match((root, files), f"{count} XML files", ignored=(*ignored, *inner.ignored(root)))


def _has_xml(folder: Path) -> bool:
    return any(walk_files(folder, SUFFIX))


def _is_voc(file: Path) -> bool:
    """Return whether the first element of an XML file is that of VOC. A malformed file may be one, too."""
    try:
        return next(ElementTree.iterparse(file, ["start"]))[1].tag == "annotation"
    except ElementTree.ParseError:
        return True


def _year(path: Path) -> Path:
    """Return the year folder, such as VOC2012, in the path or its `VOCdevkit/`. Without any, return the path."""
    years = [year for kit in (path, path / "VOCdevkit") if kit.is_dir() for year in kit.glob("VOC[0-9]*")]
    if len(years) > 1:
        raise ValueError(
            f"{path} has several VOC years: {joined(sorted(year.name for year in years))}. Give the path of one."
        )
    return years[0] if years else path


def _split_lists(root: Path) -> tuple[dict[str, Path], list[str]]:
    """Find the list of images of each split, and the names of other lists, except those of single classes."""
    folder = root / "ImageSets" / "Main"
    lists = [] if not folder.is_dir() else [file for file in visible(folder.iterdir()) if file.suffix == ".txt"]
    found, others = by_split((file.stem, file) for file in lists)
    unread = [file for file in others if read_split(file.stem) is None]
    if not found and len(unread) == 1:  # CVAT writes `default.txt` for data without splits
        return {"train": unread[0]}, []
    return found, [file.name for file in unread]


def _listed_files(root: Path, file: Path) -> list[Path]:
    """Return the XML files of a list. A line contains a name, which may have spaces, and optionally a number."""
    folder, files = root / "Annotations", []
    for line in filter(None, map(str.strip, read_text(file).splitlines())):
        whole = folder / f"{line}{SUFFIX}"
        files.append(whole if whole.is_file() else folder / f"{_name_in(line)}{SUFFIX}")
    check_exist(files, f"listed in {file} do not exist")
    return files


def _name_in(line: str) -> str:
    name, _, number = line.rpartition(" ")
    return name.strip() if number in ("-1", "0", "1") and name else line


def read(match: Match) -> ObjectData:
    """Read objects without opening the images.

    An XML file and its image have the same stem. The image is in the folder of the XML file or in a sibling folder.
    Objects marked as difficult are treated like crowds. In the files of the VOC challenges, coordinates are pixel
    indices that start at 1 and include the last pixel. In files of other tools, they are the edges of the box. Class
    names come from `labelmap.txt`, or are the sorted names that occur in "train".
    """
    root, files = match.files
    images = {split: _read_all(own) for split, own in order_splits(files).items()}
    tables = [table_of_images(split, found) for split, found in images.items()]
    listed = read_class_file(root / LABEL_MAP)[0] if (root / LABEL_MAP).is_file() else ()
    return ObjectData(tables, match.path, tuple(name for name in listed if name.lower() != BACKGROUND))


def _images_of(files: Sequence[Path]) -> list[str]:
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
    return [
        folder,
        *(other for other in subfolders(folder.parent) if other.name.lower() in ("jpegimages", "images", "data")),
    ]


def _read_all(files: Sequence[Path]) -> list[AnnotatedImage]:
    """Read XML files. The size of an image is 0 if it is not given."""
    faults: list[str] = []
    found = []
    for file, image in zip(files, _images_of(files), strict=True):
        try:
            root = ElementTree.parse(file).getroot()
            if root.tag != "annotation":
                raise ValueError(f"it contains <{root.tag}> instead of <annotation>")
            width, height = (int(float(root.findtext(f"size/{side}") or 0)) for side in ("width", "height"))
            objects = [_read_object(entry, root, file, place) for place, entry in enumerate(root.iter("object"))]
        except (ElementTree.ParseError, ValueError) as error:
            faults.append(f"{file}: {error}")
        else:
            found.append(AnnotatedImage(image, (width, height), objects))
    raise_faults(faults, f"of {len(files)} XML files are malformed")
    return found


def _read_object(entry: ElementTree.Element, root: ElementTree.Element, file: Path, place: int) -> AnnotatedObject:
    word, texts = entry.findtext("name"), [entry.findtext(f"bndbox/{corner}") for corner in CORNERS]
    if not word or None in texts:
        raise ValueError(f"object {place + 1} has no name or no bndbox with {', '.join(CORNERS)}")
    x1, y1, x2, y2 = (float(text or "") for text in texts)
    counts_from_one = (root.findtext("source/annotation") or "").startswith("PASCAL")
    box = (x1 - counts_from_one, y1 - counts_from_one, x2, y2)
    return AnnotatedObject(word.strip(), box, f"object {place + 1} of {file}", entry.findtext("difficult"))
