"""Data checks before a run: missing classes, empty masks, transparency, duplicates. The model card reports them too.

In shapes, C is the number of classes or keypoints, and (H, W) the image size.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset, Image
from torch import Tensor
from transformers.utils import logging

from ...data.checks import has_transparency
from ...data.datasets import TargetDataset
from ...data.fingerprint import image_checksums
from ...data.reading.files import in_lines, joined, report
from ...model.image_targets import IGNORED_LABEL
from ...options.training_arguments import HfViTTrainingArguments


logger = logging.get_logger(__name__)
MAX_SECONDS = 30.0  # time limit in seconds for each data check of a split
DUPLICATES_SECONDS = 30.0  # time limit of the duplicate check for all splits together
MAX_NAMED = 10
CHUNK_SIZE = 64  # number of images that are checked at a time


@dataclass(frozen=True)
class SplitClasses:
    """Classes that occur in the examples of a split.

    Args:
        is_seen: Whether each class occurs in the examples that were read, (C,) bool.
        empty: Files of examples without any class.
        ignored_share: Mean share of mask pixels without a class.
        num_read: Number of examples that were read: a random sample if the time limit was reached.
        count: Number of examples of the split, or None for a stream.
    """

    is_seen: Tensor
    empty: Sequence[str]
    ignored_share: float
    num_read: int
    count: int | None

    def describe_reading(self) -> str:
        """Return the number of examples read as a text in parentheses, or "" if all examples were read."""
        if self.num_read == self.count:
            return ""
        total = "" if self.count is None else f" of {self.count:,}"
        return f" (among the {self.num_read:,}{total} that were read)"


def find_seen_classes(examples: TargetDataset, num_classes: int, args: HfViTTrainingArguments) -> SplitClasses:
    """Read targets and return the classes that occur in them. Each process reads a part of the targets."""
    count = len(examples)
    own = np.random.default_rng(0).permutation(count)[args.process_index :: args.world_size]
    is_seen, empty, ignored = torch.zeros(num_classes, dtype=torch.bool), [], []
    shows = args.local_process_index == 0 and not args.disable_tqdm
    targets, end = examples.select(own.tolist()).read_targets(shows), time.monotonic() + MAX_SECONDS
    for index, target in zip(own.tolist(), targets, strict=False):
        classes, share = classes_in(target)
        is_seen[classes[classes < num_classes]] = True
        ignored.append(share)
        if not len(classes):
            empty.append(index)
        if time.monotonic() > end:
            break
    found = gather_object([(is_seen, empty, ignored)])
    files = examples.rows.select_columns("file")
    shares = [share for _, _, part in found for share in part]
    return SplitClasses(
        torch.stack([part for part, _, _ in found]).any(dim=0),
        [files[index]["file"] for index in sorted(index for _, part, _ in found for index in part)],
        float(np.mean(shares)) if shares else 0.0,
        len(shares),
        count,
    )


def classes_in(target: Any) -> tuple[Tensor, float]:
    """Return the indices of the classes or visible keypoints in a target, and the share of pixels without a class."""
    if isinstance(target, Tensor):  # (H, W)
        counts = target.flatten().bincount(minlength=IGNORED_LABEL + 1)
        ignored = float(counts[IGNORED_LABEL]) / target.numel()
        return counts[:IGNORED_LABEL].nonzero().flatten(), ignored
    if isinstance(target, list):  # the target is a list of C binary labels or values, NaN if missing
        return torch.tensor(target).nan_to_num().nonzero().flatten(), 0.0
    if "keypoints" in target:
        return (target["keypoints"][:, 2] > 0).nonzero().flatten(), 0.0
    labels, ignored = target["class_labels"], 0.0
    is_learned = ~target.get("is_crowd", torch.zeros(len(labels), dtype=torch.bool))
    if "masks" in target:
        is_learned = is_learned & target["masks"].flatten(1).any(dim=1)
        ignored = 1 - float(target["masks"].any(dim=0).float().mean())
    return labels[is_learned].unique(), ignored


def describe_missing_classes(
    splits: Mapping[str, SplitClasses], names: Sequence[str], num_needed: int, *, examples: str, is_pixelwise: bool
) -> list[str]:
    """Warn about classes without training examples and masks without classes; return sentences for the model card.

    Args:
        splits: Classes found in each split, by split name. An evaluation run has no split "train".
        names: Names of the C classes.
        num_needed: Minimum number of classes that training needs.
        examples: Plural noun for the examples in messages, such as "images".
        is_pixelwise: Whether targets are masks with at most one class per pixel.

    Raises:
        ValueError: if all training examples have the same class but two are needed, or if all pixels to evaluate are
            ignored or of the same class.
    """
    for split, seen in splits.items():
        is_decisive = split == "train" or ("train" not in splits and is_pixelwise and seen.ignored_share > 0)
        if is_decisive and seen.num_read == seen.count and int(seen.is_seen.sum()) == 1 < num_needed:
            raise ValueError(
                _one_class_only(split, names[int(seen.is_seen.int().argmax())], seen, is_pixelwise, examples)
            )
    notes = _note_alike(names)
    if is_pixelwise:
        notes += [note for split, seen in splits.items() for note in _note_empty(split, seen)]
    if "train" in splits and not splits["train"].is_seen.all():
        notes.append(_note_unseen(splits, names, examples))
    return notes


def _one_class_only(split: str, name: str, seen: SplitClasses, is_pixelwise: bool, examples: str) -> str:
    if not is_pixelwise:
        return f"All {seen.num_read:,} {split} {examples} have the class {name!r}. At least two classes are required."
    return (
        f"All labeled pixels of the {seen.num_read:,} {split} masks have the class {name!r}; {seen.ignored_share:.0%} "
        f"of the pixels are ignored ({IGNORED_LABEL}). At least two classes are required. If the masks hold 0 "
        "and 255, set --binary_masks true. If classes start at 1, set --reduce_labels true. Otherwise, label more "
        "pixels."
    )


def _note_alike(names: Sequence[str]) -> list[str]:
    spelled = defaultdict(list)
    for name in names:
        spelled[" ".join(normalize("NFKC", name).casefold().split())].append(name)
    alike = " and ".join(joined(found) for found in spelled.values() if len(found) > 1)
    return list(report(len(alike), f"Names that differ only in case, spaces or Unicode form: {alike}"))


def _note_empty(split: str, seen: SplitClasses) -> list[str]:
    if not 0 < len(seen.empty) < seen.num_read:  # no warning if all masks are empty, because an error is raised
        return []
    note = f"{len(seen.empty):,} of {seen.num_read:,} {split} masks have no pixel of any class"
    logger.warning("%s and are not used:%s", note, in_lines(seen.empty, MAX_NAMED))
    return [f"{note}."]


def _note_unseen(splits: Mapping[str, SplitClasses], names: Sequence[str], examples: str) -> str:
    train = splits["train"]
    unseen = [name for name, is_seen in zip(names, train.is_seen.tolist(), strict=True) if not is_seen]
    elsewhere = {
        split: [name for name, is_seen in zip(names, seen.is_seen.tolist(), strict=True) if is_seen and name in unseen]
        for split, seen in splits.items()
    }
    others = "".join(f" But {split} has {joined(found)}." for split, found in elsewhere.items() if found)
    logger.warning(
        "No training %s%s have %s: a model cannot learn them.%s",
        examples,
        train.describe_reading(),
        joined(unseen),
        others,
    )
    return f"Never seen in training{train.describe_reading()}: {joined(unseen)}."


def find_label_classes(labels: Sequence[int], num_classes: int, is_stream: bool = False) -> SplitClasses:
    """Return the classes that occur in the labels of a split, or of the first images of a stream."""
    is_seen = torch.tensor(labels, dtype=torch.int64).bincount(minlength=num_classes) > 0
    return SplitClasses(is_seen, [], 0.0, len(labels), None if is_stream else len(labels))


def check_transparency(split: str, rows: Dataset, args: HfViTTrainingArguments) -> list[str]:
    """Warn about transparent images; return sentences for the model card. Each process reads a part of the images."""
    encoded = rows.select_columns(["image", "file"]).cast_column("image", Image(decode=False))
    own = np.random.default_rng(0).permutation(len(rows))[args.process_index :: args.world_size].tolist()
    found, num_read, end = [], 0, time.monotonic() + MAX_SECONDS
    with ThreadPoolExecutor() as threads:
        for start in range(0, len(own), CHUNK_SIZE):
            chunk = encoded[own[start : start + CHUNK_SIZE]]
            answers = threads.map(has_transparency, chunk["image"])
            found += [file for file, answer in zip(chunk["file"], answers, strict=True) if answer]
            num_read += len(chunk["file"])
            if time.monotonic() > end:
                break
    shares = gather_object([(found, num_read)])
    # Keypoint data has one row per object, so an image can occur several times.
    files = sorted({file for part, _ in shares for file in part})
    if not files:
        return []
    count = sum(part for _, part in shares)
    reading = "" if count == len(rows) else f" of {count:,} that were read"
    note = (
        f"{len(files):,} {split} images{reading} have transparent pixels. They are read with the color stored for "
        "these pixels, as in transformers pipelines"
    )
    logger.warning("%s. If this is not intended, put the images on a background:%s", note, in_lines(files, MAX_NAMED))
    return [f"{note}."]


def check_duplicates(splits: Mapping[str, Dataset], evaluated: str, allow_duplicates: bool) -> list[str]:
    """Warn about identical images in two splits or with different labels; return sentences for the model card.

    Raises `ValueError` if more than half of the evaluated images occur in "train" and `allow_duplicates` is not set.
    """
    found = {split: image_checksums(rows, DUPLICATES_SECONDS / len(splits)) for split, rows in splits.items()}
    read = {split: {index: own for index, own in checksums.items() if own} for split, checksums in found.items()}
    share = sum(map(len, read.values())) / sum(map(len, found.values()))
    notes = (
        [] if share == 1 else [f"The search for duplicates covered {share:.1%} of the images within its time limit."]
    )
    for first, second in combinations(splits, 2):
        seen = {*read[first].values()}
        if twice := sorted(index for index, own in read[second].items() if own in seen):
            notes.append(f"{len(twice):,} of {len(read[second]):,} {second} images occur in {first} as well.")
            names = in_lines(splits[second].select_columns("file")[twice]["file"], MAX_NAMED)
            # Only some training images may have been read: extrapolate the number of duplicates to all training
            # images.
            is_half = 2 * len(twice) * len(found[first]) > len(read[second]) * len(read[first])
            if is_half and (first, second) == ("train", evaluated) and not allow_duplicates:
                advice = "Remove them from one of the splits, or set allow_duplicates to accept biased scores."
                raise ValueError(f"{notes[-1]} {advice} They are:{names}")
            logger.warning("%s They are:%s", notes[-1], names)
    copies: dict[str, list[tuple[str, int]]] = defaultdict(list)  # files and labels of the images by checksum
    for split, rows in splits.items():
        if "label" in rows.column_names:
            names, labels = rows["file"][:], rows["label"][:]
            for index, own in read[split].items():
                copies[own].append((names[index], labels[index]))
    groups = [group for group in copies.values() if len({label for _, label in group}) > 1]
    if differing := [file for group in groups for file, _ in group]:
        notes.append(f"{len(differing):,} images occur more than once, with different labels.")
        logger.warning("%s They are:%s", notes[-1], in_lines(differing, MAX_NAMED))
    return notes
