"""A share of the training images that is set aside."""

import math
from collections import Counter

import numpy as np
from datasets import Dataset, DatasetDict


# One split for everybody and for ever: scores on it are comparable only as long as it does not move.
SPLIT_SEED = 0


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
        return _hold_out_images(train, train_val_split, seed)
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


def _hold_out_images(train: Dataset, train_val_split: float, seed: int) -> DatasetDict:
    """Holds out a share of the images, of which several examples may be."""
    numbers = np.array(train["image_id"][:])
    images = hold_out(Dataset.from_dict({"image": np.unique(numbers)}), train_val_split, seed)
    return DatasetDict(
        {split: train.select(np.flatnonzero(np.isin(numbers, kept["image"][:]))) for split, kept in images.items()}
    )
