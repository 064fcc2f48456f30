"""Images with their targets, read on access, and a share of them that is held out.

Shapes: H W pixels, M masks, N objects, K keypoints.
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
from .formats.orientation import TURN, turn_map
from .targets import encoded_bytes, target_of


READ_AHEAD = 16  # targets that are in memory at a time
# Targets that have a value for each pixel
PIXELWISE = ("segmentation_map", "masks", "depth_map")
# Never to be changed: scores on what is held out are comparable only if all hold out the same images.
SPLIT_SEED = 0
ReadTarget = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class DatasetInfo:
    """The name, origin and license of a dataset.

    Args:
        name: Its public name.
        identifier: Short name for the metadata of a model card, or the id on the Hub.
        license: License of the data.
        description: A few sentences with source and sizes.
        test: The images that are evaluated, in words.
        split: The split that they are: "test", "validation" or "train".
    """

    name: str
    identifier: str
    license: str
    description: str
    test: str
    split: str = "test"


class TargetDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Examples of an image and its target, from rows that name their files or hold their bytes.

    Args:
        rows: The columns `image` (`datasets.Image`), `file` (its name) and what `read_target` reads. Where there are
            `width` and `height`, the image must be so large.
        read_target: From a row to `segmentation_map` (H, W), `masks` (M, H, W) with `class_labels` (M,) and maybe
            `is_crowd` (M,), `depth_map` (H, W), a class number `label`, or what `detection_target` and
            `keypoint_target` return.
    """

    def __init__(self, rows: Dataset, read_target: ReadTarget) -> None:
        # Decoded here, so that errors name the file.
        self.rows = rows.cast_column("image", Image(decode=False))
        self.read_target = read_target

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `image` (PIL, upright), `file`, and the target, of the same size or in its pixels.

        Raises:
            OSError: if the image or the target cannot be read.
            ValueError: if the target is wrong, or of another size than the image.
        """
        return read_example(self.rows[index], self.read_target)

    def select(self, indices: Iterable[int]) -> "TargetDataset":
        """Returns some of the examples."""
        return TargetDataset(self.rows.select(indices), self.read_target)

    def read_targets(self, show_progress: bool = False) -> Iterator[Any]:
        """Reads the targets alone, a few at a time in threads, and leaves the images closed.

        Args:
            show_progress: Whether to draw a progress bar.

        Yields:
            What metrics take, see `target_of`.

        Raises:
            OSError: if a target cannot be read.
            ValueError: if it is wrong.
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
    return target | {name: turn_map(target[name], turn) for name in PIXELWISE if turn > 1 and name in target}


def read_example(row: dict[str, Any], read_target: ReadTarget) -> dict[str, Any]:
    """Reads a row of a `TargetDataset`, whose image is encoded."""
    image = decode_image(BytesIO(encoded_bytes(row["image"], row["file"])), row["file"])
    check_bits(image, row["file"])
    target = _read_target(row, read_target)
    maps = target.keys() & set(PIXELWISE)
    for name in maps:
        height, width = target[name].shape[-2:]
        if (height, width) != (image.height, image.width):
            raise ValueError(
                f"{row['file']} has {image.height} x {image.width} pixels, but its {name.replace('_', ' ')} {height} "
                f"x {width}. They must be of one size."
            )
    if not maps and "width" in row and (row["width"], row["height"]) != image.size:
        raise ValueError(
            f"{row['file']} is {image.width} wide and {image.height} high, but its annotations say {row['width']} and "
            f"{row['height']}, so their positions are wrong. Correct them."
        )
    return {"image": image, "file": row["file"], **target}


@dataclass(frozen=True)
class TargetData:
    """A dataset of images and targets.

    Args:
        splits: Those of "train", "validation" and "test" that exist, with the columns `image` (`datasets.Image`),
            `file` (its name) and those of the target, which are not opened. If the training images come as a stream,
            "train" is a sample of them.
        read_target: Reads the target of a row.
        names: Name of each class, or of each keypoint; none for depth.
        thing_ids: The classes whose masks are one instance each; the others are stuff, one mask an image.
        notes: What was found and changed when the data were opened, in sentences for the model card.
        stream: The training images, with the columns of `splits` but encoded, if they are read during the training.
    """

    splits: DatasetDict
    read_target: ReadTarget
    names: tuple[str, ...] = ()
    thing_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    stream: IterableDataset | None = field(default=None, kw_only=True)

    def examples(self, split: str) -> TargetDataset:
        """Returns the examples of a split, read on access."""
        return TargetDataset(self.splits[split], self.read_target)


@dataclass(frozen=True)
class KeypointData(TargetData):
    """A dataset of objects with keypoints, one example an object.

    Args:
        flip_pairs: Pairs of keypoints (numbers from 0) that a mirror image swaps.
        skeleton: Pairs of keypoints that a line joins in pictures.
        oks_sigmas: How exactly each keypoint can be placed, relative to the size of the object, where that is known.
    """

    flip_pairs: tuple[tuple[int, int], ...] = ()
    skeleton: tuple[tuple[int, int], ...] = ()
    oks_sigmas: tuple[float, ...] | None = None


def hold_out(train: Dataset, train_val_split: float = 0.1, seed: int = SPLIT_SEED) -> DatasetDict:
    """Splits the training images once more, for choices that must not be made on the test images.

    Args:
        train: A dataset. Where it has a column `label`, of type `datasets.ClassLabel`, every class has the same share
            of what is held out. Where it has a column `image_id`, all examples of an image stay together.
        train_val_split: Share that is held out, in (0, 1).
        seed: Another seed holds out other images.

    Returns:
        Splits "train" and "test", the latter being what is held out; always the same for the same seed.

    Raises:
        ValueError: if `train_val_split` is out of range, or there are too few images for every class to have some in
            both.
    """
    if not 0 < train_val_split < 1:
        raise ValueError(
            f"train_val_split={train_val_split} of the images cannot be held out. Give more than 0 and less than 1."
        )
    if "image_id" in train.column_names:
        numbers = np.array(train["image_id"][:])
        images = hold_out(Dataset.from_dict({"image": np.unique(numbers)}), train_val_split, seed)
        return DatasetDict(
            {split: train.select(np.flatnonzero(np.isin(numbers, kept["image"][:]))) for split, kept in images.items()}
        )
    if "label" not in train.column_names:
        if len(train) < 2:
            raise ValueError("A single image cannot be both trained on and held out. Add images.")
        return train.train_test_split(test_size=train_val_split, seed=seed)
    counts = Counter(train["label"][:])
    names = train.features["label"].names
    if few := [names[label] for label, count in sorted(counts.items()) if count < 2]:
        raise ValueError(
            f"These classes have a single image, which cannot be both trained on and held out: {', '.join(few)}. Add "
            "images of them, or leave the classes out."
        )
    num_held_out = math.ceil(train_val_split * len(train))  # as train_test_split rounds
    if min(num_held_out, len(train) - num_held_out) < len(counts):
        raise ValueError(
            f"Of {len(train)} images, train_val_split={train_val_split} holds out {num_held_out}, but each of the "
            f"{len(counts)} classes needs one on both sides. Choose another share, or add images."
        )
    return train.train_test_split(test_size=train_val_split, stratify_by_column="label", seed=seed)
