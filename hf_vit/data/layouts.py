"""Layouts of published datasets and of the exports of annotation tools, as data: one row each.

A row describes where the files are and what they mean. The format that it names reads them, see `formats/`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path


START = 4096  # number of bytes at the start of a file that are searched for the text of a layout
NUM_FILES = 3  # number of files that are searched


@dataclass(frozen=True)
class Layout:
    """A published dataset or an export of an annotation tool.

    Args:
        name: Name of the dataset, or of the tool and its export.
        globs: Patterns of paths relative to the folder of the data. Each must match a file or folder.
        text: Regular expression that occurs in the first `START` bytes of a file of the first pattern.
        advice: Way to get data that are supported, if the layout is not read; empty if it is read.
    """

    name: str
    globs: tuple[str, ...]
    text: str = ""
    advice: str = ""


COCO_ADVICE = "It is not read in this form. Export it as COCO."
LAYOUTS = (
    Layout(
        "CVAT for images 1.1", ("*.xml",), r"<annotations>\s*<version>", "It is not read. Export COCO 1.0 from CVAT."
    ),
    Layout(
        "a YOLO 1.1 export of CVAT (darknet)",
        ("obj.data", "obj.names"),
        advice="It is not read. Export Ultralytics YOLO Detection 1.0 or COCO 1.0 from CVAT.",
    ),
    Layout(
        "a JSON export of Label Studio",
        ("*.json",),
        r'(?s)^\s*\[.*"(annotations|data|file_upload)"\s*:',
        "It is not read. Export COCO or YOLO with images from Label Studio.",
    ),
    Layout("a project of VIA", ("*.json",), r'"_via_\w+"|"regions"\s*:', COCO_ADVICE),
    Layout("a folder of LabelMe", ("*.json",), r'"shapes"\s*:', "It is not read. Convert it with labelme2coco."),
    Layout("a dataset of Datumaro", ("annotations/*.json",), r'"dm_format_version"|"media_type"', COCO_ADVICE),
    Layout("a project of Supervisely", ("meta.json", "*/ann"), advice=COCO_ADVICE),
    Layout("an export of Labelbox", ("*.ndjson",), advice=COCO_ADVICE),
    Layout("a dataset of FiftyOne", ("samples.json", "metadata.json"), advice="Export it as COCODetectionDataset."),
    Layout("a TFRecord export", ("*.tfrecord*",), advice="It is not read. Export COCO instead."),
)


def find_layout(path: Path) -> Layout | None:
    """Return the first layout that fits a folder or a file, or `None`."""
    return next((layout for layout in LAYOUTS if _fits(layout, path)), None)


def _fits(layout: Layout, path: Path) -> bool:
    if path.is_file():
        return len(layout.globs) == 1 and path.match(layout.globs[0]) and (not layout.text or _has_text(layout, path))
    if not all(any(path.glob(glob)) for glob in layout.globs):
        return False
    return not layout.text or any(_has_text(layout, file) for file in _first_files(layout, path))


def _first_files(layout: Layout, folder: Path) -> Iterator[Path]:
    return islice((file for file in folder.glob(layout.globs[0]) if file.is_file()), NUM_FILES)


def _has_text(layout: Layout, file: Path) -> bool:
    with file.open("rb") as stream:
        return re.search(layout.text, stream.read(START).decode("utf-8", "replace")) is not None
