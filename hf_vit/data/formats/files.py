"""Files of datasets: how they are found, sorted by split, read as text, and listed in messages."""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset, DatasetDict, Features, Image, NamedSplit
from numpy.typing import ArrayLike
from transformers.utils import logging

from ...model.image_inputs import header


# Files of VOC have "Unspecified" for what nobody has decided.
FALSE, TRUE = {"", "0", "0.0", "false", "no", "none", "unspecified"}, {"1", "1.0", "true", "yes"}


def flag_of(value: object, name: str) -> bool:
    """Return whether a number, a truth value or a text ("0", "True", "yes") means true; errors begin with `name`."""
    text = str(value).strip().lower()
    if text not in FALSE | TRUE:
        raise ValueError(f"{name} is {value!r}, which is neither true nor false. Write 1 or 0.")
    return text in TRUE


def read_text(file: Path) -> str:
    """Return the content of a text file in UTF-8; raises `ValueError` for other encodings."""
    try:
        return file.read_text(encoding="utf-8-sig")  # spreadsheets put a mark in front
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error}. Save it as UTF-8.") from error


def parse_json(text: str) -> Any:
    """Parse JSON; raises `ValueError` if an object has a key twice, of which `json` keeps the last."""
    return json.loads(text, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(content := dict(pairs)) < len(pairs):
        ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} occurs {count} times in one object; keep one of them")
    return content


logger = logging.get_logger(__name__)
T = TypeVar("T")
Format = tuple[Callable[[Path], Any], Callable[..., T]]  # recognizes its files, and reads them
MAX_LISTED = 20
MAX_NAMED = 10  # of those whose lines are long
SPLITS = ("train", "validation", "test")
SPLIT_NAMES = (
    dict.fromkeys(("train", "training"), "train")
    | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
    | dict.fromkeys(("test", "testing"), "test")
)
IMAGE_SUFFIXES = {
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"
}  # fmt: skip
NPY_START = b"\x93NUMPY"
READ_AHEAD = 64  # images of which the bytes are in memory at a time
# Folders and files that macOS, Windows and network storage leave among the data, in lower case.
SYSTEM_NAMES = {"__macosx", "@eadir", "#recycle", "$recycle.bin", "thumbs.db", "ehthumbs.db", "desktop.ini"}
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+).*")


def listed(items: Collection[object]) -> str:
    """Return the first items, quoted, in one line, and how many more there are."""
    more = f", and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(map(repr, islice(items, MAX_LISTED))) + more


def in_lines(items: Collection[object], limit: int = MAX_LISTED) -> str:
    """Return the first items, each on a new line of its own, and how many more there are."""
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
    """Raise an error that counts the faults, lists the first ones and says what to do, if there are any faults."""
    if faults:
        raise error(f"{len(faults)} {finding}:{in_lines(faults, limit)}" + (f"\n{advice}" if advice else ""))


def check_exist(files: Collection[str | Path], finding: str = "do not exist", what: str = "files") -> None:
    """Raise `ValueError` if files do not exist; `finding` says who names them, `what` they are."""
    raise_faults([file for file in files if not os.path.isfile(file)], f"of {len(files)} {what} {finding}")


def first_format(path: Path, formats: Iterable[Format[T]], *options: Any) -> T | None:
    """Read the data at a path in the first format that is recognized; return `None` if none is.

    Args:
        path: An existing path.
        formats: Pairs of a function that finds the files of a format, falsy without any, and one that reads them.
        *options: Passed to the reader after the files.
    """
    return next((read(found, *options) for find, read in formats if (found := find(path))), None)


def find_folder(path: Path) -> Path | None:
    """Return a path if it is a folder."""
    return path if path.is_dir() else None


def report(count: int, finding: str) -> tuple[str, ...]:
    """Warn of a finding if its count is positive; returns it as sentences for the model card, none without any."""
    if count:
        logger.warning("%s.", finding)
    return (f"{finding}.",) if count else ()


def split_names(names: str | None) -> list[str]:
    """Split names at commas; names that contain commas are written as a JSON list."""
    given = json.loads(names) if names and names.startswith("[") else names.split(",") if names else []
    return [str(name).strip() for name in given]


def split_named(name: str) -> str | None:
    """Return the split that goes by a name, "validation" for "val", or `None` if there is none."""
    return SPLIT_NAMES.get(name.strip().lower())


def split_within(name: str) -> str | None:
    """Return the split that is a word of `name`, as in "train-00000-of-00001", or `None` if none is."""
    return next((SPLIT_NAMES[word] for word in re.split(r"[\W_]+", name.lower()) if word in SPLIT_NAMES), None)


def one_per_split(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return what goes by names of splits, by split, in the order train, validation, test."""
    names: dict[str, str] = {}
    things: dict[str, T] = {}
    for name, thing in named:
        split = SPLIT_NAMES[name.strip().lower()]
        if split in names:
            raise ValueError(f"{names[split]!r} and {name!r} both mean the split {split!r}. Keep one of them.")
        names[split], things[split] = name, thing
    return {split: things[split] for split in SPLITS if split in things}


def splits_in(folder: Path) -> dict[str, Path]:
    """Return the folders in a folder that are called like splits, by split; see `one_per_split`."""
    return one_per_split((sub.name, sub) for sub in subfolders(folder) if split_named(sub.name))


def files_by_split(folder: Path, files: list[Path]) -> dict[str, list[str]]:
    """Sort files by the split that is a word of their name, or else of that of their folder, below `folder`."""
    if files == [folder]:  # a single file
        return {split_within(folder.stem) or "train": [str(folder)]}
    # If none has such a name, all are "train"; if some have, the others are left out with a warning.
    found: dict[str | None, list[str]] = defaultdict(list)
    for file in files:
        parent = "" if file.parent == folder else file.parent.name
        found[split_within(file.stem) or split_within(parent)].append(str(file))
    _check_shards(chain.from_iterable(found.values()))
    others = found.pop(None, [])
    if not found:
        return {"train": others} if others else {}
    if others:
        logger.warning("Left out, as their names say no split: %s.", listed(others))
    return {split: found[split] for split in SPLITS if split in found}


def _check_shards(files: Iterable[str]) -> None:
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for match in filter(None, map(SHARD.fullmatch, files)):
        found[match[1], match[3]].add(int(match[2]))
    missing = []
    for (name, total), numbers in found.items():
        first = int(int(total) in numbers)  # some tools number shards from 1
        others = sorted(set(range(first, first + int(total))) - numbers)
        missing += [f"{name}-{number:0{len(total)}}-of-{total}" for number in others]
    advice = "Download them, or rename the files that are present to use these alone."
    raise_faults(missing, "shards of the data are missing", advice)


def is_system(name: str) -> bool:
    """Return whether a file or folder of this name is hidden, or created by an operating system."""
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def visible(paths: Iterable[Path]) -> list[Path]:
    """Return sorted paths without those that `is_system` finds."""
    return sorted(path for path in paths if not is_system(path.name))


def is_image(file: Path) -> bool:
    """Return whether a visible file ends like an image that PIL reads."""
    return file.suffix.lower() in IMAGE_SUFFIXES and not is_system(file.name)


def subfolders(folder: Path) -> list[Path]:
    """List the visible folders in a folder, sorted, without links that lead back to it or above."""
    place = folder.resolve()
    found = [path for path in visible(folder.iterdir()) if path.is_dir()]
    loops = [path for path in found if path.is_symlink() and place.is_relative_to(path.resolve())]
    for path in loops:
        logger.warning_once(f"Left out, as the link leads back to where it lies: {path}.")
    return [path for path in found if path not in loops]


def files_below(folder: Path) -> list[Path]:
    """List the visible files at any depth, sorted; links to folders elsewhere are followed once."""
    root, seen, found = folder.resolve(), set[Path](), list[Path]()
    for name, folders, files in os.walk(folder, followlinks=True):
        place, real = Path(name), Path(name).resolve()
        is_linked = real != root / place.relative_to(folder)
        if real in seen or (is_linked and (real.is_relative_to(root) or root.is_relative_to(real))):
            logger.warning_once(f"Left out, as the folder is listed by another name already: {place}.")
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(sub for sub in folders if not is_system(sub))  # of two links, the first one counts
        found += [place / file for file in files if not is_system(file)]
    return sorted(found)


def images_at(paths: Iterable[str], split: str, **others: tuple[Iterable[Any], Any]) -> Dataset:
    """Return a split with the column `image`, which opens its file on access, and others: their values and type."""
    columns = {"image": (paths, Image()), **others}
    features = Features({name: feature for name, (_, feature) in columns.items()})
    values = {name: list(found) for name, (found, _) in columns.items()}
    return Dataset.from_dict(values, features=features, split=NamedSplit(split))


def with_files(splits: DatasetDict) -> DatasetDict:
    """Add the column `file`: the path of each image, or the one beside its bytes, else "image 17 of train"."""
    named = {}
    for name, split in splits.items():
        # As Arrow, which leaves the bytes of the images where they are.
        paths = split.select_columns("image").with_format("arrow")[:].flatten()["image.path"].to_pylist()
        files = [path or f"image {number} of {name}" for number, path in enumerate(paths)]
        named[name] = split.add_column("file", files)
    return DatasetDict(named)


def image_headers(rows: Dataset, column: str = "image", is_needed: ArrayLike = False) -> np.ndarray:
    """Return (I, 3) int64, width, height and EXIF orientation of encoded images, or arrays of NumPy, as stored.

    Raises `OSError` if images that are needed, (I,) bool, cannot be opened; others then get zeros.
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
    except (OSError, TypeError, ValueError) as error:  # also that a cell is empty
        return str(error)
