"""Utilities for dataset files: find them, sort them by split, read text, and list them in messages."""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, Image, NamedSplit
from numpy.typing import ArrayLike
from transformers.utils import logging

from ...model.image_inputs import header


# VOC files contain "Unspecified" for flags that the annotators did not set.
FALSE, TRUE = {"", "0", "0.0", "false", "no", "none", "unspecified"}, {"1", "1.0", "true", "yes"}


def parse_flag(value: object, name: str) -> bool:
    """Convert a number, a bool or a text ("0", "True", "yes") to bool; error messages start with `name`."""
    text = str(value).strip().lower()
    if text not in FALSE | TRUE:
        raise ValueError(f"{name} is {value!r}, which is neither true nor false. Use 1 or 0.")
    return text in TRUE


def read_text(file: Path) -> str:
    """Return the content of a UTF-8 text file; raise `ValueError` for other encodings."""
    try:
        return file.read_text(encoding="utf-8-sig")  # spreadsheet programs write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not valid UTF-8 text: {error}. Save it as UTF-8.") from error


def parse_json(text: str) -> Any:
    """Parse JSON; raise `ValueError` if an object has a duplicate key, which `json` would accept."""
    return json.loads(text, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(content := dict(pairs)) < len(pairs):
        ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} occurs {count} times in the same object. Keep one of them")
    return content


logger = logging.get_logger(__name__)
MAX_LISTED = 20
MAX_NAMED = 10  # maximum number of items to list if their descriptions are long
IMAGE_SUFFIXES = {
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"
}  # fmt: skip
NO_IMAGE = f"contains no image: no file ends in {', '.join(sorted(IMAGE_SUFFIXES))}."
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
VIDEO_SUFFIXES = {".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv"}
# Usual names of folders of images, and of folders of targets that are stored as images, next to each other
IMAGE_FOLDERS = ("images", "image", "imgs", "img", "rgb")
TARGET_FOLDERS = {
    "mask": ("masks", "mask", "labels", "annotations", "segmentations"),
    "depth": ("depths", "depth", "depth_maps", "labels", "annotations"),
}
TARGETS = {name for names in TARGET_FOLDERS.values() for name in names}
NPY_START = b"\x93NUMPY"
READ_AHEAD = 64  # Number of encoded images held in memory at the same time.
# Files and folders that macOS, Windows and network storage create, in lower case.
SYSTEM_NAMES = {"__macosx", "@eadir", "#recycle", "$recycle.bin", "thumbs.db", "ehthumbs.db", "desktop.ini"}


def joined(items: Collection[object]) -> str:
    """Return the first `MAX_LISTED` items, quoted and separated by commas, and the number of remaining items."""
    more = f", and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(map(repr, islice(items, MAX_LISTED))) + more


def in_lines(items: Collection[object], limit: int = MAX_LISTED) -> str:
    """Return the first `limit` items, each on a new line, and the number of remaining items."""
    more = f"\n  and {len(items) - limit} more" if len(items) > limit else ""
    return "".join(f"\n  {item}" for item in islice(items, limit)) + more


def raise_faults(
    faults: Collection[object],
    finding: str,
    advice: str = "",
    *,
    limit: int = MAX_NAMED,
    error: type[Exception] = ValueError,
) -> None:
    """Raise an error if there are faults. The message has their number, `finding`, the first `limit`, and `advice`."""
    if faults:
        raise error(f"{len(faults)} {finding}:{in_lines(faults, limit)}" + (f"\n{advice}" if advice else ""))


def check_exist(files: Collection[str | Path], finding: str = "do not exist", what: str = "files") -> None:
    """Raise `ValueError` if any of the files does not exist; `what` and `finding` are parts of the error message."""
    raise_faults([file for file in files if not os.path.isfile(file)], f"of {len(files)} {what} {finding}")


Ignored = tuple[tuple[str, str, Collection[object]], ...]  # arguments of several calls of `warn_ignored`


def warn_ignored(what: str, reason: str, names: Collection[object]) -> None:
    """Log one warning that names ignored files, folders or splits, if there are any."""
    if names:
        logger.warning("Ignored %s because %s: %s.", what, reason, joined(names))


def report(count: int, finding: str) -> tuple[str, ...]:
    """Log a finding as a warning and return it as a note for the model card; do nothing if `count` is 0."""
    if count:
        logger.warning("%s.", finding)
    return (f"{finding}.",) if count else ()


def split_names(names: str | None) -> list[str]:
    """Split a comma-separated list of names, or a JSON list, which also allows names that contain commas."""
    given = json.loads(names) if names and names.startswith("[") else names.split(",") if names else []
    return [str(name).strip() for name in given]


def is_system(name: str) -> bool:
    """Return whether a name is that of a hidden or system file or folder, such as ".git" or "Thumbs.db"."""
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def visible(paths: Iterable[Path]) -> list[Path]:
    """Return the sorted paths without hidden and system files, see `is_system`."""
    return sorted(path for path in paths if not is_system(path.name))


def is_image(file: Path) -> bool:
    """Return whether a file has an image suffix and is not hidden or a system file."""
    return file.suffix.lower() in IMAGE_SUFFIXES and not is_system(file.name)


def has_image(folder: Path) -> bool:
    """Return whether a folder contains an image at any depth."""
    return any(map(is_image, walk_files(folder)))


def local_path(folder: Path, name: str) -> Path:
    """Return the path of a file that is named in a data file, also if the name has backslashes as on Windows."""
    place = folder / name
    return place if "\\" not in name or place.exists() else folder / name.replace("\\", "/")


def list_tables(folder: Path) -> list[Path]:
    """List the paths of all tables (.csv, .tsv, .jsonl) in a folder."""
    return [table for suffix in TABLE_SUFFIXES for table in visible(folder.glob(f"*{suffix}"))]


def subfolders(folder: Path) -> list[Path]:
    """List the visible subfolders of a folder, sorted, without links to the folder itself or its parents."""
    place = folder.resolve()
    with os.scandir(folder) as entries:  # `Path.is_dir` would read the state of every file
        names = sorted(entry.name for entry in entries if entry.is_dir() and not is_system(entry.name))
    found = [folder / name for name in names]
    loops = [path for path in found if path.is_symlink() and place.is_relative_to(path.resolve())]
    for path in loops:
        logger.warning_once(f"Ignored a symbolic link to its own folder or a parent of it: {path}.")
    return [path for path in found if path not in loops]


def files_below(folder: Path, suffix: str = "") -> list[Path]:
    """List the files that `walk_files` yields."""
    return list(walk_files(folder, suffix))


def walk_files(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Yield the visible files at any depth, sorted. Each link to a folder outside of `folder` is followed once.

    Only the names in one folder and in its parents are held in memory.

    Args:
        folder: Folder to search.
        suffix: End of the names to yield, in lower case; by default, all files are yielded.
    """
    return _walk(folder, folder, folder.resolve(), set(), suffix)


def _walk(place: Path, folder: Path, root: Path, seen: set[Path], suffix: str) -> Iterator[Path]:
    real = place.resolve()
    is_linked = real != root / place.relative_to(folder)
    if real in seen or (is_linked and (real.is_relative_to(root) or root.is_relative_to(real))):
        logger.warning_once(f"Ignored a folder that is already listed under another name: {place}.")
        return
    seen.add(real)
    folders, names = set[str](), list[str]()
    with suppress(OSError), os.scandir(place) as entries:  # skip folders that cannot be opened
        for entry in entries:
            if not is_system(entry.name):
                names.append(entry.name)
                folders |= {entry.name} if entry.is_dir() else set()
    # Sorting determines which of several links to the same folder is followed: the first one.
    for name in sorted(names):
        if name in folders:
            yield from _walk(place / name, folder, root, seen, suffix)
        elif name.lower().endswith(suffix):
            yield place / name


def images_at(paths: Iterable[str], split: str, **others: tuple[Iterable[Any], Any]) -> Dataset:
    """Create a split with the column `image`, whose files are opened on access.

    Args:
        paths: Paths of the images.
        split: Name of the split.
        **others: Values and feature type of each further column.
    """
    columns = {"image": (paths, Image()), **others}
    features = Features({name: feature for name, (_, feature) in columns.items()})
    values = {name: list(found) for name, (found, _) in columns.items()}
    return Dataset.from_dict(values, features=features, split=NamedSplit(split))


def add_file_column(splits: DatasetDict) -> DatasetDict:
    """Add the column `file`: the path that is stored with each image, or a name such as "image 17 of train"."""
    named = {}
    for name, split in splits.items():
        # The Arrow format avoids copying the bytes of the images.
        paths = split.select_columns("image").with_format("arrow")[:].flatten()["image.path"].to_pylist()
        files = [path or f"image {number} of {name}" for number, path in enumerate(paths)]
        named[name] = split.add_column("file", files)
    return DatasetDict(named)


def image_headers(rows: Dataset, column: str = "image", is_needed: ArrayLike = False) -> np.ndarray:
    """Read the headers of images, or of `.npy` arrays.

    Args:
        rows: Rows with I images.
        column: Name of the image column.
        is_needed: Whether each header is required, (I,) bool or one bool for all.

    Returns:
        (I, 3) int64: width and height before the EXIF orientation is applied, and the EXIF orientation. Headers that
        are not required and cannot be read are zeros.

    Raises:
        OSError: if a required header cannot be read.
    """
    encoded = rows.select_columns(column).cast_column(column, Image(decode=False))
    found: list[tuple[int, int, int] | str] = []
    with ThreadPoolExecutor() as threads:
        for chunk in encoded.iter(READ_AHEAD):
            found += threads.map(_header_or_fault, chunk[column])
    needed = np.broadcast_to(is_needed, len(found))
    faults = [own for own, counts in zip(found, needed, strict=True) if counts and isinstance(own, str)]
    raise_faults(faults, f"of {len(found)} images cannot be opened", error=OSError)
    return np.array([(0, 0, 0) if isinstance(own, str) else own for own in found], np.int64).reshape(-1, 3)


def _header_or_fault(encoded: Mapping[str, Any]) -> tuple[int, int, int] | str:
    try:
        content, name = encoded["bytes"], str(encoded["path"] or "an image")
        with Path(name).open("rb") if content is None else BytesIO(content) as stream:
            is_array = stream.read(len(NPY_START)) == NPY_START
            stream.seek(0)
            return (*np.load(stream).squeeze().shape[::-1], 1) if is_array else header(stream, name)
    except (OSError, TypeError, ValueError) as error:  # TypeError is raised for an empty cell
        return str(error)
