"""Published datasets of images with masks or depth maps, whose files a row of layouts.yaml describes by patterns."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, DatasetDict, Image

from ..layouts import find_layout
from ..reading.files import images_at, raise_faults, read_text, walk_files, warn_ignored
from ..reading.match import Match, Target
from ..reading.splits import SPLIT_NAMES, UNION, by_split


COLUMNS = {"masks": "mask", "instances": "mask", "depth": "depth"}  # column of each kind of target
NAME = re.compile(r"\{(\w+)\}")
# Regular expressions of names in patterns; the text of other names has no slash
GROUPS = {"split": f"(?i:{'|'.join((*SPLIT_NAMES, UNION))})", "key": ".+"}


def detect(path: Path, target: Target) -> Match | None:
    """Find a layout with patterns of images and of masks or depth maps."""
    layout = find_layout(path, COLUMNS[target]) if path.is_dir() else None
    return Match(path.absolute(), layout.name, layout=layout, rank=-1) if layout else None


def read(match: Match) -> DatasetDict:
    """List pairs of an image and its target, sorted by path, without opening them.

    The names that both patterns contain have equal values in the paths of a pair. The split is the name `split` in a
    pattern, or it is given by lists of the values of `key`. Images without a target are ignored with a warning.
    """
    layout, column, folder = match.layout, COLUMNS[match.target], match.files
    assert layout is not None
    names = sorted({*NAME.findall(layout.files["image"])} & {*NAME.findall(layout.files[column])})
    images, targets = (
        {tuple(found[name] for name in names): (found, str(file)) for found, file in _files(folder, pattern)}
        for pattern in (layout.files["image"], layout.files[column])
    )
    raise_faults([targets[key][1] for key in sorted(targets.keys() - images.keys())], f"{column} files have no image")
    bare = [images[key][1] for key in sorted(images.keys() - targets.keys())]
    warn_ignored(f"{len(bare)} images in {folder}", f"they have no {column}", bare)
    lists = defaultdict[str, set[str]](set)  # splits of each value of `key`
    for found, file in _files(folder, layout.lists) if layout.lists else ():
        for line in read_text(file).splitlines():
            lists[line.strip()].add(found["split"])
    pairs = defaultdict[str, list[tuple[str, str]]](list)
    for key in sorted(targets):
        found = images[key][0] | targets[key][0]
        for split in lists[found["key"]] if lists else {found.get("split", "train")}:
            pairs[split].append((images[key][1], targets[key][1]))
    splits, _ = by_split(pairs.items())
    return DatasetDict({split: _rows(own, split, column) for split, own in splits.items()})


def _rows(pairs: list[tuple[str, str]], split: str, column: str) -> Dataset:
    images, targets = zip(*pairs, strict=True)
    return images_at(images, split, **{column: (targets, Image(decode=False))})


def _files(folder: Path, pattern: str) -> Iterator[tuple[dict[str, str], Path]]:
    """Yield the values of the names in a path pattern, and the path, of all files that match it."""
    regex, start = "", pattern.partition("{")[0].rpartition("/")[0]
    for number, part in enumerate(NAME.split(pattern)):
        if number % 2 == 0:
            regex += re.escape(part)
        else:  # a name that occurs again has the same text
            regex += f"(?P={part})" if f"(?P<{part}>" in regex else f"(?P<{part}>{GROUPS.get(part, '[^/]+')})"
    for file in walk_files(folder / start):
        if match := re.fullmatch(regex, str(file)[len(str(folder)) + 1 :]):
            yield match.groupdict(), file
