"""Result of an audit: scores and flags of the images, their table, their page, and the cleaned dataset.

N is the number of images of all splits.
"""

import base64
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value, concatenate_datasets
from jinja2 import Environment, StrictUndefined
from PIL import Image

from ..data.loaders.unlabeled_images import CLASS, class_names_of
from ..outputs import write_atomically
from .image_checks import join_images, open_picture


REMOVED = ("wrong_label", "wrong_boxes", "wrong_mask", "duplicate", "near_duplicate")  # removed from "train" only
MAX_TILES = 60  # maximum number of pictures of each kind
TILE_SIDE = 180  # longer side of pictures in pixels
BAR_WIDTH = 300  # width of the longest bar in pixels
WIDE = ("wrong_boxes", "wrong_mask")  # kinds of issues with large pictures
# Title and explanation of each kind of issue, in the order of the page
TEXTS = {
    "wrong_label": (
        "Labels that may be wrong",
        "A linear probe that was trained without the image predicts another class: given → suggested.",
    ),
    "wrong_boxes": (
        "Boxes that the model contradicts",
        "Green: given boxes. Red: no box given. Magenta: another class. Cyan: the model finds no such object there.",
    ),
    "wrong_mask": ("Masks that the model contradicts", "Red: pixels whose given class is unlikely."),
    "duplicate": ("Identical images", "Each image has the same pixels as the image next to it."),
    "near_duplicate": (
        "Near duplicates",
        "Resized, compressed, mirrored, cropped or brighter copies, or frames of the same scene.",
    ),
    "outlier": ("Images unlike the rest", "Features far from those of all other images."),
    "broken": ("Images that cannot be read", ""),
    "dark": ("Dark images", ""),
    "blank": ("Images without content", "Nearly the same brightness everywhere."),
    "tiny": ("Tiny images", "The shorter side is below a quarter of the median."),
}


@dataclass
class AuditedImage:
    """An image of an audited dataset."""

    file: str
    split: str
    label: str | None  # class name, None if unknown
    suggestion: str = ""  # class name that is suggested instead; empty if the label was not checked
    text: str = ""  # explanation of the worst issue
    copy_of: int | None = None  # number of the most similar copy; None for images without copies


@dataclass
class Audit:
    """Result of an audit of N images."""

    data: str  # path or name of the dataset
    model: str  # model that computed features or predictions; empty without a model
    splits: DatasetDict  # images of each split, and their targets
    scores: dict[str, np.ndarray] = field(default_factory=dict)  # (N,) by kind of issue; higher is worse, NaN: unknown
    found: dict[str, np.ndarray] = field(default_factory=dict)  # (N,) by kind of issue, whether an image has it
    pictures: dict[int, Image.Image] = field(default_factory=dict)  # boxes and masks by number of the image
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # by class and split
    notes: list[str] = field(default_factory=list)  # sentences about missing checks and the meaning of results

    def __post_init__(self) -> None:
        self.encoded = join_images(self.splits)
        self.images = [
            AuditedImage(file, split, label)
            for split, rows in self.splits.items()
            for file, label in zip(rows["file"][:], class_names_of(rows), strict=True)
        ]

    def open(self, number: int) -> Image.Image | None:
        """Return an image, or None if it cannot be read."""
        return None if self.found["broken"][number] else open_picture(self.encoded[number]["image"])

    def table(self) -> Dataset:
        """Return the table of issues: a row for each image, with the kinds of its issues and a score for each kind."""
        kinds = [kind for kind in TEXTS if kind in self.scores]
        rows = [
            {
                "file": image.file,
                "split": image.split,
                "label": image.label,
                "issues": [kind for kind in kinds if self.found[kind][number]],
                "suggestion": image.suggestion,
                "copy_of": None if image.copy_of is None else self.images[image.copy_of].file,
                "text": image.text,
                **{kind: np.float32(self.scores[kind][number]) for kind in kinds},
            }
            for number, image in enumerate(self.images)
        ]
        types = {name: Value("float32" if name in kinds else "string") for name in rows[0]}
        return Dataset.from_list(rows, Features(types | {"issues": List(Value("string"))}))

    def kept(self) -> np.ndarray:
        """Return whether each image (N,) is kept in a cleaned dataset: broken images and bad training images are not.

        Evaluated images with suspicious labels are kept, because removing difficult images would raise the scores.
        """
        is_bad = np.any([self.found[kind] for kind in REMOVED if kind in self.found], axis=0)
        is_train = np.array([image.split == "train" for image in self.images])
        return ~(self.found["broken"] | (is_train & is_bad))


def write_page(audit: Audit, file: Path) -> None:
    """Write the page of an audit."""
    files = [image.file for image in audit.images]
    root = os.path.commonpath([*map(os.path.dirname, files)]) if all(map(os.path.isabs, files)) else os.curdir
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        Path(__file__).with_name("audit.html").read_text(encoding="utf-8")
    )
    page = template.render(
        audit=audit,
        sections=[_section(audit, kind, root) for kind in TEXTS if kind in audit.scores],
        balance=sorted(audit.counts.items(), key=lambda item: -item[1].total()),
        bar_width=BAR_WIDTH,
    )
    write_atomically(file, page)


def _section(audit: Audit, kind: str, root: str) -> dict[str, Any]:
    """Return the texts and pictures of a kind of issue. Names of files are relative to the folder `root`."""
    title, text = TEXTS[kind]
    (found,) = np.nonzero(audit.found[kind])
    shown = found[np.argsort(-audit.scores[kind][found], kind="stable")][:MAX_TILES].tolist()
    tiles = [_tile(audit, kind, number, root) for number in shown]
    return {"kind": kind, "title": title, "text": text, "count": len(found), "tiles": tiles, "is_wide": kind in WIDE}


def _tile(audit: Audit, kind: str, number: int, root: str) -> dict[str, Any]:
    image = audit.images[number]
    numbers = [number] if "duplicate" not in kind or image.copy_of is None else [number, image.copy_of]
    images = [audit.images[n] for n in numbers]
    if kind == "wrong_label":
        text = f"{image.label} → {image.suggestion}"
    elif kind in (*WIDE, "broken"):
        text = image.text
    else:
        text = " / ".join(dict.fromkeys(each.label or "" for each in images))
    pictures = [audit.pictures.get(number)] if kind in WIDE else [audit.open(n) for n in numbers]
    return {
        "pictures": [_as_url(picture) for picture in pictures if picture is not None],
        "text": text,
        "score": f"{audit.scores[kind][number]:.2f}",
        "files": [f"{each.split}: {os.path.relpath(each.file, root)}" for each in images],
    }


def _as_url(picture: Image.Image) -> str:
    """Return a small JPEG copy of a picture as a data URL."""
    small, stream = picture.convert("RGB"), BytesIO()
    small.thumbnail((2 * TILE_SIDE, 2 * TILE_SIDE))
    small.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def write_cleaned(splits: DatasetDict, kept: np.ndarray, folder: Path, names: Sequence[str]) -> None:
    """Write the images that are `kept` (N,) and their targets to a parquet file for each split in a new folder.

    Images that are files are stored as paths. `names` are the class names of boxes or masks.
    """
    folder.mkdir(parents=True)
    start = 0
    for name, rows in splits.items():
        own, start = kept[start : start + len(rows)], start + len(rows)
        columns = [column for column in rows.column_names if column not in ("file", "number")]
        rows = rows.select(np.flatnonzero(own)).select_columns(columns)
        if CLASS in columns:
            rows = rows.rename_column(CLASS, "label")
        if "boxes" in columns:
            rows = _with_objects(rows, names)
        rows.to_parquet(str(folder / f"{name}.parquet"))
    if any("mask" in rows.column_names for rows in splits.values()):
        (folder / "classes.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


def _with_objects(rows: Dataset, names: Sequence[str]) -> Dataset:
    """Return rows of images and their objects in the format of a dataset on the Hub."""
    objects = {"bbox": List(List(Value("float32"), length=4)), "category": List(ClassLabel(names=list(names)))}
    objects |= {"iscrowd": List(Value("bool"))}

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        boxes = np.array(row["boxes"], np.float32).reshape(-1, 4)
        boxes[:, 2:] -= boxes[:, :2]  # from corners to sizes
        return {"objects": {"bbox": boxes.tolist(), "category": row["class_labels"], "iscrowd": row["is_crowd"]}}

    targets = rows.remove_columns("image")
    targets = targets.map(convert, remove_columns=targets.column_names, features=Features({"objects": objects}))
    return concatenate_datasets([rows.select_columns("image"), targets], axis=1)
