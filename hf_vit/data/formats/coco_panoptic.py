"""Panoptic annotations of COCO: a JSON file of segments, and one image per mask."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, DatasetDict, Image, List, Value

from ..reading.coco_file import CocoFile, Entry, check_entries, find_files, has_segments, read_all
from ..reading.files import images_at, joined, parse_flag, warn_ignored
from ..reading.match import Match, Target


@dataclass(frozen=True)
class PanopticData:
    """Rows of images and panoptic masks by split, the names of all classes, and the numbers of thing classes."""

    splits: DatasetDict
    names: tuple[str, ...]
    thing_ids: tuple[int, ...]


def detect(path: Path, target: Target) -> Match | None:
    """Find files such as `annotations/panoptic_val2017.json` by split."""
    files, ignored = find_files(path, ["panoptic"])
    files = {split: file for split, file in files.items() if "panoptic" in file.name or has_segments(file)}
    return Match(files, joined([file.name for file in files.values()]), ignored=ignored) if files else None


def read(match: Match) -> PanopticData:
    """Read the annotations without decoding images.

    Masks are in a folder named like the annotation file, in `panoptic/`, or in `masks/`. The columns are `image`,
    `panoptic` (undecoded `datasets.Image`) and `segments` (lists of `id`, `label`, and `iscrowd`).
    """
    contents = read_all(match.files)
    categories = contents[0].categories
    numbers = {category["id"]: number for number, category in enumerate(categories)}
    rows = DatasetDict({content.split: _panoptic_rows(content, numbers) for content in contents})
    things = tuple(numbers[category["id"]] for category in categories if category["isthing"])
    return PanopticData(rows, tuple(category["name"] for category in categories), things)


def _panoptic_rows(content: CocoFile, numbers: dict[int, int]) -> Dataset:
    file, annotations = content.path, content.annotations
    content.check_annotations("file_name", "segments_info")
    all_segments = [segment for annotation in annotations for segment in annotation["segments_info"]]
    check_entries(all_segments, ("id", "category_id"), "segments_info", file)
    content.check_known(all_segments, "category_id")
    by_id = {image["id"]: path for image, path in zip(content.images, content.image_paths(), strict=True)}
    masks = content.paths_in(annotations, [file.with_suffix(""), file.parent / "panoptic", file.parent / "masks"])
    bare = by_id.keys() - {annotation["image_id"] for annotation in annotations}
    warn_ignored(f"images in {file}", "they have no annotation, by id", sorted(bare))
    segments = [
        [_labeled(segment, numbers, file) for segment in annotation["segments_info"]] for annotation in annotations
    ]
    kind = List({"id": Value("int64"), "label": Value("int64"), "iscrowd": Value("bool")})
    paths = [by_id[annotation["image_id"]] for annotation in annotations]
    return images_at(paths, content.split, panoptic=(masks, Image(decode=False)), segments=(segments, kind))


def _labeled(entry: Entry, numbers: Mapping[int, int], file: Path) -> Entry:
    number, label = entry.get("id"), numbers[entry["category_id"]]
    return {
        "id": number,
        "label": label,
        "iscrowd": parse_flag(entry.get("iscrowd"), f"iscrowd of {number} in {file}"),
    }
