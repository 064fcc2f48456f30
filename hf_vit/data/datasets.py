"""Datasets of images and targets that are read on access, and a function that holds out images for validation.

Shapes: H and W height and width in pixels, M masks, N objects, K keypoints.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Image, IterableDataset
from transformers.utils import logging

from ..model.image_inputs import check_bits, decode_image
from .reading.orientation import TURN, orient_map
from .targets import encoded_bytes, target_of


READ_AHEAD = 16  # Number of targets held in memory at the same time.
# Keys of an example that contain targets with one value per pixel.
PIXELWISE = ("segmentation_map", "masks", "depth_map")
# Do not change this seed: validation scores are comparable only if the same images are held out every time.
SPLIT_SEED = 0
ReadTarget = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class DatasetInfo:
    """The name, origin and license of a dataset.

    Args:
        name: Public name of the dataset.
        identifier: Short name for the metadata of a model card, or the id on the Hub.
        license: License of the data.
        description: A few sentences about the source and the size of the dataset.
        test: Description of the images that are used for evaluation, for example "the 360 test images".
        split: Name of the split that contains these images: "test", "validation" or "train".
    """

    name: str
    identifier: str
    license: str
    description: str
    test: str
    split: str = "test"


class TargetDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Dataset of images with targets, read from rows that contain file paths or encoded bytes.

    Args:
        rows: Rows with the columns `image` (`datasets.Image`) and `file` (name of the image), and the columns that
            `read_target` reads. If there are columns `width` and `height`, the decoded image must have this size.
        read_target: Function from a row to its target: `segmentation_map` (H, W), `masks` (M, H, W) with
            `class_labels` (M,) and optionally `is_crowd` (M,), `depth_map` (H, W), a class number `label`, or the
            output of `detection_target` or `keypoint_target`.
    """

    def __init__(self, rows: Dataset, read_target: ReadTarget) -> None:
        # Images are decoded in `read_example` instead of by `datasets`, so that error messages name the file.
        self.rows = rows.cast_column("image", Image(decode=False))
        self.read_target = read_target

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a dictionary of `image` (PIL, upright), `file`, and the target.

        Maps and masks have the size of the image; boxes and keypoints are in pixels of the image.

        Raises:
            OSError: if the image or the target cannot be read.
            ValueError: if the target is invalid or its size differs from that of the image.
        """
        return read_example(self.rows[index], self.read_target)

    def select(self, indices: Iterable[int]) -> "TargetDataset":
        """Return a dataset of the examples at the given indices."""
        return TargetDataset(self.rows.select(indices), self.read_target)

    def read_targets(self, show_progress: bool = False) -> Iterator[Any]:
        """Read only the targets, several in parallel threads, without opening the images.

        Args:
            show_progress: Whether to show a progress bar.

        Yields:
            The target of each example in the format that metrics expect, see `target_of`.

        Raises:
            OSError: if a target cannot be read.
            ValueError: if a target is invalid.
        """
        rows = self.rows.remove_columns("image")
        with (
            ThreadPoolExecutor() as threads,
            logging.tqdm(total=len(self), desc="Reading targets", disable=not show_progress) as bar,
        ):
            for chunk in rows.iter(READ_AHEAD):
                chunk_rows = [dict(zip(chunk, values, strict=True)) for values in zip(*chunk.values(), strict=True)]
                for target in threads.map(partial(_read_target, read_target=self.read_target), chunk_rows):
                    bar.update()
                    yield target_of(target)


def _read_target(row: dict[str, Any], read_target: ReadTarget) -> dict[str, Any]:
    target, turn = read_target(row), row.get(TURN, 1)
    return target | {name: orient_map(target[name], turn) for name in PIXELWISE if turn > 1 and name in target}


def read_example(row: dict[str, Any], read_target: ReadTarget) -> dict[str, Any]:
    """Decode the image of a row of a `TargetDataset`, read its target, and check that their sizes match."""
    image = decode_image(BytesIO(encoded_bytes(row["image"], row["file"])), row["file"])
    check_bits(image, row["file"])
    target = _read_target(row, read_target)
    maps = target.keys() & set(PIXELWISE)
    for name in maps:
        height, width = target[name].shape[-2:]
        if (height, width) != (image.height, image.width):
            raise ValueError(
                f"{row['file']} has {image.height} x {image.width} pixels, but its {name.replace('_', ' ')} has "
                f"{height} x {width}. Both must have the same size."
            )
    if not maps and "width" in row and (row["width"], row["height"]) != image.size:
        raise ValueError(
            f"{row['file']} is {image.width} pixels wide and {image.height} high, but its annotations give a width "
            f"of {row['width']} and a height of {row['height']}. Correct the annotations: their coordinates refer to "
            "an image of another size."
        )
    return {"image": image, "file": row["file"], **target}


@dataclass(frozen=True)
class Division:
    """Division of the images of a training run into images for training, for choices and for the reported scores.

    Args:
        train_val_split: Share of the training images that is held out if there is no validation split.
        validation_as_test: Whether the scores of the validation split are reported as those of the test split.
        holds_out: Whether the validation images were held out of the training images.
        chooses_weights: Whether scores on validation images choose the weights.
        calibrates: Whether scores are calibrated.
    """

    train_val_split: float | None = None
    validation_as_test: bool | None = None
    holds_out: bool = False
    chooses_weights: bool = False
    calibrates: bool = True


@dataclass(frozen=True)
class TargetData:
    """A dataset of images and targets, loaded from any supported format.

    Args:
        splits: The available splits among "train", "validation" and "test", with the columns `image`
            (`datasets.Image`), `file` (name of the image) and the undecoded target columns. If the training images
            are streamed, "train" contains a sample of the stream.
        read_target: Function that reads the target of a row.
        names: Name of each class, or of each keypoint; empty for depth.
        thing_ids: Numbers of the classes with one mask per instance ("things"). All other classes are "stuff", with
            one mask per image.
        notes: Sentences for the model card about problems that were found and corrected while loading the data.
        stream: Stream of the training images, if they are read during training. It has the same columns as
            `splits`, with encoded images.
        division: Division of the images into splits.
    """

    splits: DatasetDict
    read_target: ReadTarget
    names: tuple[str, ...] = ()
    thing_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    stream: IterableDataset | None = field(default=None, kw_only=True)
    division: Division = field(default=Division(), kw_only=True)

    @property
    def evaluated_split(self) -> str:
        """Split of the final evaluation: the first existing one of "test", "validation" and "train"."""
        return next(name for name in ("test", "validation", "train") if name in self.splits)

    @property
    def num_train(self) -> int:
        """Number of training images; for a stream, the number of images that are read in advance."""
        return len(self.splits["train"])

    def count_evaluated(self, split: str) -> int:
        """Return the number of images that an evaluation of a split reads."""
        return len(self.splits[split])

    def examples(self, split: str) -> TargetDataset:
        """Return the dataset of a split, whose images and targets are read on access."""
        return TargetDataset(self.splits[split], self.read_target)


@dataclass(frozen=True)
class KeypointData(TargetData):
    """A dataset of objects with keypoints, with one example per object.

    Args:
        flip_pairs: Pairs of keypoint indices that a horizontal flip swaps.
        skeleton: Pairs of keypoint indices that are connected by a line in visualizations.
        oks_sigmas: COCO's per-keypoint standard deviations for object keypoint similarity (OKS), or `None` if they
            are unknown.
    """

    flip_pairs: tuple[tuple[int, int], ...] = ()
    skeleton: tuple[tuple[int, int], ...] = ()
    oks_sigmas: tuple[float, ...] | None = None


def hold_out(train: Dataset, train_val_split: float = 0.1, seed: int = SPLIT_SEED) -> DatasetDict:
    """Hold out a part of the training images for validation.

    Args:
        train: Training examples. If they have a column `label` of type `datasets.ClassLabel`, the split is stratified
            by class. If they have a column `image_id`, all examples of an image are put into the same split.
        train_val_split: Fraction of the images to hold out, in (0, 1).
        seed: Seed of the random split. The same seed always gives the same split.

    Returns:
        The splits "train" and "test"; "test" contains the held-out examples.

    Raises:
        ValueError: if `train_val_split` is out of range, or there are too few images for both splits to contain every
            class.
    """
    if not 0 < train_val_split < 1:
        raise ValueError(
            f"train_val_split={train_val_split} is not a valid fraction of images to hold out. Use a value above 0 "
            "and below 1."
        )
    if "image_id" in train.column_names:
        numbers = np.array(train["image_id"][:])
        images = hold_out(Dataset.from_dict({"image": np.unique(numbers)}), train_val_split, seed)
        return DatasetDict(
            {split: train.select(np.flatnonzero(np.isin(numbers, kept["image"][:]))) for split, kept in images.items()}
        )
    if "label" not in train.column_names:
        if len(train) < 2:
            raise ValueError("A single image cannot be split into training and validation images. Add images.")
        return train.train_test_split(test_size=train_val_split, seed=seed)
    counts = Counter(train["label"][:])
    names = train.features["label"].names
    if few := [names[label] for label, count in sorted(counts.items()) if count < 2]:
        raise ValueError(
            "Each class needs at least 2 images, one to train on and one to hold out. These classes have only 1: "
            f"{', '.join(few)}. Add images of these classes, or remove them."
        )
    num_held_out = math.ceil(train_val_split * len(train))  # rounded up, as in `train_test_split`
    if min(num_held_out, len(train) - num_held_out) < len(counts):
        raise ValueError(
            f"train_val_split={train_val_split} holds out {num_held_out} of {len(train)} images, but training and "
            f"validation images must each contain all {len(counts)} classes. Choose another fraction, or add images."
        )
    return train.train_test_split(test_size=train_val_split, stratify_by_column="label", seed=seed)
