"""Formats of data on disk: one file each, with `detect` and `read`, and a table of the formats of each target.

`detect` returns what it found in a folder or file and the evidence, and `read` reads it. No format knows another.
"""

from pathlib import Path
from typing import Any

from datasets import DatasetDict

from ..reading.columns import SourceOptions
from ..reading.files import warn_ignored
from ..reading.hub import load_from_hub
from ..reading.match import Format, Match, Target, recognize
from . import class_folders, coco, coco_panoptic, idx, images, layout, pairs, parquet, saved, tables, tar, voc, yolo


COLUMNS: dict[str, Format] = {"parquet": parquet, "saved": saved}
LABELED: dict[str, Format] = {"idx": idx, **COLUMNS, "tar": tar, "table": tables}
MASKS: dict[str, Format] = {**COLUMNS, "pairs": pairs, "layout": layout}
FORMATS: dict[Target, dict[str, Format]] = {
    "classes": {**LABELED, "class_folders": class_folders},
    "masks": MASKS,
    "instances": {"coco": coco, "coco_panoptic": coco_panoptic, **MASKS},
    "depth": MASKS,
    "boxes": {**COLUMNS, "coco": coco, "yolo": yolo, "voc": voc},
    "points": {**COLUMNS, "coco": coco, "table": tables},
    "captions": {**COLUMNS, "table": tables},
    "images": {**LABELED, "images": images},
}
HUB = "hub"
WITH_COLUMNS = {HUB, "idx", *COLUMNS, "tar"}  # formats that are read as datasets with columns of any name


def read_source(options: SourceOptions, target: Target, problem: str) -> tuple[Match, Any]:
    """Read the data of a target from a path in the format that fits, or from the Hub if the path does not exist.

    Args:
        options: Location of the data, and names of columns.
        target: Kind of targets to read.
        problem: Text that follows the path in the error message if no format fits.

    Returns:
        The match, whose `name` is the name of the format or `HUB`, and the content: for formats in `WITH_COLUMNS` the
        splits with all columns, and otherwise the output of the function `read` of the format.
    """
    match = recognize(options, target, FORMATS[target], problem)
    if match is None:
        return Match({}, options.source, name=HUB, target=target, options=options), load_from_hub(options)
    for ignored in match.ignored:
        warn_ignored(*ignored)
    return match, FORMATS[target][match.name].read(match)


def find_shards(path: Path) -> tuple[Any, dict[str, list[str]]]:
    """Find parquet files, or otherwise tar files; return the module of their format, and the files by split."""
    for module in (parquet, tar):
        if match := module.detect(path, "classes"):
            return module, match.files
    return parquet, {}


def open_streams(options: SourceOptions) -> DatasetDict:
    """Stream a dataset on the Hub, or parquet or tar files on disk; return an empty dictionary for other data."""
    if not options.path.exists():
        return load_from_hub(options, streaming=True)
    module, files = find_shards(options.path)
    if files:
        options.check_no_hub_options()
    return DatasetDict(module.stream(files))
