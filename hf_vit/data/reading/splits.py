"""Decide what names say about splits, for folders, lists, tables, JSON files and values of all formats.

A name is compared with its siblings: `train` next to `test` is a split, but `bullet_train` next to `bus` is a class.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from .files import Ignored, has_image, joined, raise_faults, subfolders, warn_ignored


T = TypeVar("T")
SPLITS = ("train", "validation", "test")
SPLIT_NAMES = (
    dict.fromkeys(("train", "training"), "train")
    | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
    | dict.fromkeys(("test", "testing"), "test")
)
UNION = "trainval"  # name of training and validation data together
CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")
LIST_FOLDERS = {"imagesets", "image_sets", "splits", "split", "lists"}
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+).*")
# Matches words such as "trainset", "testimages" and "valannot"
GLUED = re.compile(rf"({'|'.join((*SPLIT_NAMES, UNION))})(sets?|data|images?|annot|labels|masks)")


@dataclass(frozen=True)
class SplitName:
    """A split in a name, and the other words of the name.

    Args:
        split: "train", "validation" or "test".
        rest: Words of the name other than the split, in lower case, without digits.
        is_union: Whether the name is "trainval", which contains the validation data, too.
    """

    split: str
    rest: tuple[str, ...]
    is_union: bool = False


def read_split(name: str) -> SplitName | None:
    """Return the first split in a name, or `None` if it has none. Case, digits and other words do not matter."""
    words = [word for part in re.findall(r"[^\W\d_]+", CASE.sub(" ", name)) for word in _unglued(part.lower())]
    place = next((place for place, word in enumerate(words) if word in SPLIT_NAMES or word == UNION), None)
    if place is None:
        return None
    split, rest = SPLIT_NAMES.get(words[place], "train"), (*words[:place], *words[place + 1 :])
    is_union = words[place] == UNION or (words[place] in ("train", "training") and rest[place : place + 1] == ("val",))
    return SplitName(split, rest[:place] + rest[place + 1 :] if is_union and words[place] != UNION else rest, is_union)


def _unglued(word: str) -> tuple[str, ...]:
    match = GLUED.fullmatch(word)
    return match.groups() if match else (word,)


def split_of(name: str) -> str | None:
    """Return the split in a name without comparing it with other names; `None` if it has none."""
    found = read_split(name)
    return found.split if found else None


def is_split(name: str) -> bool:
    """Return whether a name is that of a split, apart from case and digits, such as "Train" or "val2017"."""
    found = read_split(name)
    return found is not None and not found.rest


def order_splits(found: Mapping[str, T]) -> dict[str, T]:
    """Sort a dictionary in the order train, validation, test."""
    return {split: found[split] for split in SPLITS if split in found}


def by_split(items: Iterable[tuple[str, T]]) -> tuple[dict[str, T], list[T]]:
    """Find the splits among things in the same place, such as files, by their names.

    Names of splits without other words have priority, such as `train` and `val` next to `cat_train` and `cat_val`.
    Otherwise, all names must have the same other words, such as `instances_train2017` and `instances_val2017`.

    Args:
        items: Pairs of a name and a thing.

    Returns:
        The thing of each split in the order train, validation, test, and all things of other names.

    Raises:
        ValueError: if two names stand for the same split.
    """
    items = list(items)
    found = [read_split(name) for name, _ in items]
    rests = {split.rest for split in found if split}
    rest = () if () in rests else next(iter(rests)) if len(rests) == 1 else None
    is_chosen = [split is not None and split.rest == rest for split in found]
    named = [(name, split, thing) for (name, thing), split in zip(items, found, strict=True) if split]
    chosen = _unique([entry for entry in named if entry[1].rest == rest])
    return chosen, [thing for (_, thing), own in zip(items, is_chosen, strict=True) if not own]


def _unique(named: Iterable[tuple[str, SplitName, T]]) -> dict[str, T]:
    """Return the thing of each split. "trainval" is ignored next to "train", and otherwise replaces the validation."""
    named = list(named)
    if any(found.is_union for _, found, _ in named):
        has_train = any(found.split == "train" and not found.is_union for _, found, _ in named)
        named = [entry for entry in named if not (entry[1].is_union if has_train else entry[1].split == "validation")]
    names: dict[str, str] = {}
    things: dict[str, T] = {}
    for name, found, thing in named:
        split = found.split
        if split in names:
            raise ValueError(f"{names[split]!r} and {name!r} are both names of the split {split!r}. Keep one of them.")
        names[split], things[split] = name, thing
    return order_splits(things)


@dataclass(frozen=True)
class SplitFolders:
    """The folders of splits in a folder.

    Args:
        folders: Folder of each split; empty if the subfolders are no splits.
        others: Names of all other subfolders.
        doubt: Reason why it is unclear whether the subfolders are splits; empty if it is clear.
    """

    folders: dict[str, Path]
    others: tuple[str, ...] = ()
    doubt: str = ""

    def ignored(self, place: Path) -> Ignored:
        """Return the other subfolders of `place` as ignored folders."""
        return ((f"folders in {place}", "they are not named like a split", self.others),) if self.folders else ()


def find_split_folders(
    folder: Path,
    is_divided: Callable[[Path], object] = subfolders,
    is_data: Callable[[Path], object] = has_image,
) -> SplitFolders:
    """Decide whether the subfolders of a folder are splits, by their names and by what they contain.

    Subfolders are splits if all of their names contain a split, if several names differ only in the split, or if a
    name is exactly that of a split. In the last two cases, other subfolders are ignored, and the content of the splits
    must confirm it.

    Args:
        folder: Folder to search.
        is_divided: Function that returns whether the content of a subfolder shows that it is a split.
        is_data: Function that returns whether a subfolder that is not named like a split contains data.
    """
    places = {sub.name: sub for sub in subfolders(folder)}
    said = {name: found for name in places if (found := read_split(name))}
    groups: dict[tuple[str, ...], dict[str, SplitName]] = defaultdict(dict)
    for name, found in sorted(said.items(), key=lambda item: item[1].rest):  # names without other words come first
        groups[found.rest][name] = found
    several = [group for group in groups.values() if len({found.split for found in group.values()}) > 1]
    chosen = several[0] if several else groups.get((), {})
    if said and len(said) == len(places) and (chosen or any(is_divided(places[name]) for name in said)):
        has_repeats = len({found.split for found in said.values()}) < len(said)
        return _chosen(places, chosen if chosen and has_repeats else said)
    rest = [name for name in places if name not in chosen]
    if any(is_divided(places[name]) for name in chosen):
        data = [name for name in rest if is_data(places[name])]
        inside = {sub.name for name in chosen for sub in subfolders(places[name])}
        if several or not data or any(sub.name in inside for name in data for sub in subfolders(places[name])):
            return _chosen(places, chosen)
    elif not several:
        return SplitFolders({}, tuple(places))
    return SplitFolders({}, tuple(places), f"{joined(list(chosen))} may be splits, but {joined(rest)} are not")


def _chosen(places: Mapping[str, Path], chosen: Mapping[str, SplitName]) -> SplitFolders:
    try:
        folders = _unique((name, found, _inner(places[name])) for name, found in chosen.items())
    except ValueError as error:
        return SplitFolders({}, tuple(places), str(error).removesuffix("."))
    return SplitFolders(folders, tuple(name for name in places if name not in chosen))


def _inner(folder: Path) -> Path:
    """Return the only subfolder if it has the name of the folder, as in some archives, otherwise the folder."""
    inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
    is_doubled = len(inside) == 1 and inside[0].is_dir() and inside[0].name.lower() == folder.name.lower()
    return inside[0] if is_doubled else folder


def unread_lists(folder: Path) -> Ignored:
    """Return lists of splits such as `train.txt`, for formats that do not read them."""
    places = [folder, *(sub for sub in subfolders(folder) if sub.name.lower() in LIST_FOLDERS)]
    places += [sub for place in places[1:] for sub in subfolders(place)]
    lists = [str(file.relative_to(folder)) for place in places for file in sorted(place.glob("*.txt"))]
    found = [name for name in lists if split_of(Path(name).stem)]
    return ((f"lists in {folder}", "this format has no lists of splits, only folders of splits", found),)


def files_by_split(folder: Path, files: list[Path]) -> dict[str, list[str]]:
    """Group files by split. The split is part of the file name or of the name of a subfolder of `folder`.

    If no name contains a split, all files are "train". If only some do, the other files are ignored with a warning.
    """
    if files == [folder]:  # `folder` may be the path of a single file
        return {split_of(folder.stem) or "train": [str(folder)]}
    found: dict[str, list[str]] = defaultdict(list)
    for file in files:
        parent = "" if file.parent == folder else file.parent.name
        found[split_of(file.stem) or split_of(parent) or ""].append(str(file))
    _check_shards(chain.from_iterable(found.values()))
    others = found.pop("", [])
    if not found:
        return {"train": others} if others else {}
    warn_ignored("files", "their names do not contain a split", others)
    return order_splits(found)


def _check_shards(files: Iterable[str]) -> None:
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for match in filter(None, map(SHARD.fullmatch, files)):
        found[match[1], match[3]].add(int(match[2]))
    missing = []
    for (name, total), numbers in found.items():
        first = int(int(total) in numbers)  # some tools number shards from 1 instead of 0
        others = sorted(set(range(first, first + int(total))) - numbers)
        missing += [f"{name}-{number:0{len(total)}}-of-{total}" for number in others]
    advice = "Download them, or rename the existing files to use only these."
    raise_faults(missing, "shards of the data are missing", advice)
