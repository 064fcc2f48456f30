"""Annotation files of COCO (JSON): find them, read their lists, and check the entries.

Shapes: N objects.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .files import (
    Ignored,
    check_exist,
    in_lines,
    joined,
    local_path,
    parse_flag,
    parse_json,
    raise_faults,
    read_text,
    subfolders,
    visible,
)
from .splits import by_split, is_split, split_of


Entry = dict[str, Any]
KINDS = ("instances", "keypoints", "panoptic", "captions")
# Lists that each annotation file must contain, with the required keys of their entries.
NEEDED = {"images": ("id", "file_name"), "annotations": ("image_id",), "categories": ("id", "name")}
# Usual file names that do not contain the kind of annotations, such as "keypoints".
USUAL_FILES = ("annotations.json", "_annotations.coco.json")
START = 16384  # number of bytes at the start of a file that are searched for `KEYS`
KEYS = re.compile(rf'"({"|".join(NEEDED)})"\s*:\s*\[')


def find_files(path: Path, kinds: Sequence[str]) -> tuple[dict[str, Path], Ignored]:
    """Find annotation files by split, and report files of the same kinds that belong to no split.

    The path is an annotation file, or a folder with `annotations/instances_train2017.json`, `annotations/train.json`,
    `train/annotations.json`, or `train/_annotations.coco.json`, ... Without any of them, files of other names are
    searched that have the keys of COCO.

    Args:
        path: File or folder.
        kinds: Accepted kinds of annotations: "instances", "keypoints", "panoptic" or "captions".
    """
    if path.is_file():
        return ({_split_in(path) or "train": path} if path.suffix.lower() == ".json" else {}), ()
    folders = [path, *subfolders(path)]
    files = [file for folder in folders for file in visible(folder.glob("*.json"))]
    usual = [file for file in files if _has_usual_name(file, kinds)]
    files = usual or [file for file in files if not any(kind in file.stem for kind in KINDS) and _has_keys(file)]
    if len(files) == 1:
        return {_split_in(files[0]) or "train": files[0]}, ()
    found, others = by_split((file.stem if split_of(file.stem) else file.parent.name, file) for file in files)
    names = [str(file.relative_to(path)) for file in others]
    return found, ((f"annotation files in {path}", "their names contain no split", names),)


def _has_usual_name(file: Path, kinds: Sequence[str]) -> bool:
    if file.name in USUAL_FILES or any(kind in file.stem for kind in kinds):
        return True
    return file.parent.name == "annotations" and is_split(file.stem)


def _has_keys(file: Path) -> bool:
    """Return whether a JSON file has the lists of COCO. Only the start of a long file is searched, for any of them."""
    with file.open("rb") as stream:
        start = stream.read(START).decode("utf-8", "replace")
    found = {*KEYS.findall(start)}
    return start.lstrip("\ufeff \r\n\t").startswith("{") and (
        found == {*NEEDED} or (bool(found) and len(start) == START)
    )


def has_segments(file: Path) -> bool:
    """Return whether a JSON file contains panoptic annotations."""
    return b'"segments_info"' in file.read_bytes()


def _split_in(file: Path) -> str | None:
    return split_of(file.stem) or split_of(file.parent.name)


@dataclass(frozen=True)
class CocoFile:
    """The annotation file of a split. Its categories are sorted by `id`, and all of them have the key `isthing`."""

    split: str
    path: Path
    images: list[Entry]
    annotations: list[Entry]
    categories: list[Entry]

    def check_annotations(self, *keys: str) -> None:
        """Raise `ValueError` if a given key is missing in an annotation, or if a given "category_id" is unknown."""
        check_entries(self.annotations, keys, "annotations", self.path)
        if "category_id" in keys:
            self.check_known(self.annotations, "category_id")

    def check_known(self, entries: Sequence[Entry], key: str) -> None:
        """Raise `ValueError` if the "image_id" or "category_id" of an entry does not exist in the file."""
        name, known = ("images", self.images) if key == "image_id" else ("categories", self.categories)
        if unknown := sorted({entry[key] for entry in entries} - {entry["id"] for entry in known}):
            raise ValueError(
                f"{self.path} has annotations of {name} that the file does not define: {joined(unknown)}. Define "
                "them, or remove their annotations."
            )

    def describe(self, place: int) -> str:
        """Return the name of an annotation, for error messages."""
        return f"annotation {self.annotations[place].get('id', f'at place {place}')} of {self.path}"

    def image_paths(self) -> list[str]:
        """Return the paths of images in `images/`, in the folder of the file, or in `../train2017/` as in COCO."""
        folder, word = self.path.parent, self.path.stem.split("_")[-1]
        above = folder.parent
        folders = [folder / "images", folder, folder / "data", above / word, above / "images", above / "images" / word]
        folders.append(above)
        return self.paths_in(self.images, folders)

    def paths_in(self, entries: list[Entry], folders: list[Path]) -> list[str]:
        """Return the paths of the files named in entries, in the first folder that contains any of them."""
        names = [entry["file_name"] for entry in entries]
        folder = next(
            (folder for folder in folders if any(local_path(folder, name).is_file() for name in names)), None
        )
        if folder is None:
            raise ValueError(
                f"{names[0]}, listed in {self.path}, is in none of the folders:{in_lines(folders)}\nMove the file to "
                "one of them."
            )
        # Absolute paths stay valid if the working directory changes.
        paths = [str(local_path(folder.absolute(), name)) for name in names]
        check_exist(paths, f"of {self.path} do not exist")
        return paths

    def numbers(self, key: str, count: int) -> np.ndarray:
        """Return the value of `key` in all annotations, each a list of `count` numbers, as (N, count) float64."""
        faults = []
        for place, annotation in enumerate(self.annotations):
            found: Any = annotation.get(key)
            is_list = isinstance(found, list) and len(found) == count
            if not (is_list and all(isinstance(value, int | float) for value in found)):
                short = f"{len(found)} numbers" if isinstance(found, list) and len(found) > 8 else repr(found)
                faults.append(f"{self.describe(place)}: {short}")
        raise_faults(faults, f"of {len(self.annotations)} annotations have no {key} of {count} numbers")
        return np.array([annotation[key] for annotation in self.annotations], float).reshape(-1, count)


def read_all(files: Mapping[str, Path]) -> list[CocoFile]:
    """Read the annotation file of each split; raise `ValueError` if their categories differ."""
    contents = [read_file(split, file) for split, file in files.items()]
    keys = ("id", "name", "isthing")
    check_same(contents, lambda content: [[entry[key] for key in keys] for entry in content.categories], "categories")
    return contents


def read_file(split: str, file: Path) -> CocoFile:
    """Read the images, categories and annotations of a file and check the keys that every kind of file needs."""
    try:
        content = parse_json(read_text(file))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}. Correct the file.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not contain a JSON object, so it is not a COCO annotation file.")
    missing = [key for key in NEEDED if not isinstance(content.get(key), list)]
    missing += [key for key in ("images", "categories") if content.get(key) == []]
    if missing:
        raise ValueError(f"{file} has no {' and no '.join(missing)}, which COCO annotation files need. Add them.")
    for name, keys in NEEDED.items():
        check_entries(content[name], keys, name, file)
    for key in NEEDED["images"]:
        check_unique(content["images"], key, "images", file)
    found = CocoFile(split, file, content["images"], content["annotations"], _categories(content["categories"], file))
    found.check_known(found.annotations, "image_id")
    return found


def check_entries(entries: Sequence[Any], keys: Iterable[str], what: str, file: Path) -> None:
    """Raise `ValueError` if entries of a list are no objects, or lack one of the keys; `what` names the list."""
    lacking = []
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            lacking.append(f"entry {place} is {entry!r} instead of an object")
        elif missing := [key for key in keys if key not in entry]:
            name = f"id {entry['id']}" if "id" in entry else f"entry {place}"
            lacking.append(f"{name} has no {', '.join(missing)}")
    raise_faults(lacking, f"of {len(entries)} {what} in {file} are incomplete")


def check_unique(entries: Sequence[Entry], key: str, what: str, file: Path) -> None:
    """Raise `ValueError` if several entries of a list have the same value of a key; `what` names the list."""
    counts = Counter(entry[key] for entry in entries if key in entry)
    raise_faults(
        [f"{key} {name}: {count} times" for name, count in counts.items() if count > 1],
        f"{key}s of {what} in {file} occur more than once",
        f"Give each entry a unique {key}, or merge duplicate entries.",
    )


def check_same(contents: Sequence[CocoFile], value_of: Callable[[CocoFile], Any], what: str) -> None:
    """Raise `ValueError` if a value differs between files; `what` names the value."""
    first = contents[0]
    for other in contents:
        if value_of(other) != value_of(first):
            raise ValueError(
                f"{first.path} and {other.path} differ in {what}, which must be equal. Correct one of the files."
            )


def _categories(entries: Sequence[Entry], file: Path) -> list[Entry]:
    categories = sorted(entries, key=lambda category: int(category["id"]))
    names = [str(category["name"]) for category in categories]
    if len(set(names)) < len(names):
        raise ValueError(f"{file} has categories with the same name: {joined(sorted(names))}. Rename them.")
    is_thing = [parse_flag(entry.get("isthing", 1), f"isthing of {entry['name']!r} in {file}") for entry in categories]
    return [
        {**entry, "name": name, "isthing": thing}
        for entry, name, thing in zip(categories, names, is_thing, strict=True)
    ]
