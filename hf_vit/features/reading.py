"""Features that have been written, one column at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..data.formats.files import SPLITS, listed
from .extraction import plan_shards
from .settings import FeatureSettings


@dataclass(frozen=True)
class FeatureSplit:
    """The features of a split whose images have a class.

    Args:
        folder: Where they are.
        name: Name of the split.
        files: Parquet files, in order.
        labels: Name of the class of each image.
        is_labeled: (rows,) bool, False for images without a class, which are left out.
        settings: What they are of.
    """

    folder: Path
    name: str
    files: tuple[Path, ...]
    labels: tuple[str, ...]
    is_labeled: np.ndarray
    settings: FeatureSettings

    @property
    def vectors(self) -> list[str]:
        """Names of the features that are one vector an image."""
        schema = pq.read_schema(self.files[0])
        return [
            field.name
            for field in schema
            if pa.types.is_fixed_size_list(field.type) and pa.types.is_floating(field.type.value_type)
        ]

    def read(self, feature: str) -> Tensor:
        """Returns the vectors (M, D) float32 of the images that have a class."""
        table = pa.concat_tables(pq.read_table(file, columns=[feature]) for file in self.files)
        width = table.schema.field(feature).type.list_size
        chunks = [chunk.flatten().to_numpy(zero_copy_only=False).reshape(-1, width) for chunk in table[feature].chunks]
        return torch.from_numpy(np.concatenate(chunks)[self.is_labeled].astype(np.float32))


def open_split(folder: Path, names: Sequence[str]) -> FeatureSplit:
    """Opens the features of a split.

    Args:
        folder: As `extract_features` has left it.
        names: The first of these splits that it has is taken.

    Raises:
        OSError: if the folder holds no features.
        ValueError: if it has none of the splits, they are not complete, or no classes are known.
    """
    settings = FeatureSettings.read(folder)
    name = next((name for name in names if name in settings.images), None)
    if name is None:
        raise ValueError(
            f"{folder} holds features of {listed(list(settings.images))}, and not of {' or '.join(names)}. Give "
            "the folder of the training images, and behind it that of those to score."
        )
    shards = plan_shards({name: settings.images[name]}, settings.rows_per_shard)
    files = tuple(folder / shard.name for shard in shards)
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(
            f"{len(missing)} of {len(files)} files are missing in {folder}: {listed(missing)}. Let "
            "extract_features.py finish them, by the same command."
        )
    if "label" not in pq.read_schema(files[0]).names:
        raise ValueError(
            f"The features in {folder} are of images without classes. Extract them from folders of classes, or with "
            "--label_column_name."
        )
    tables = pa.concat_tables(pq.read_table(file, columns=["label"]) for file in files)
    labels = tables["label"].to_pylist()
    return FeatureSplit(
        folder=folder,
        name=name,
        files=files,
        labels=tuple(label for label in labels if label is not None),
        is_labeled=np.array([label is not None for label in labels], dtype=bool),
        settings=settings,
    )


def open_train_and_test(folders: Sequence[Path]) -> tuple[FeatureSplit, FeatureSplit]:
    """Opens features to learn from, and others to score.

    Args:
        folders: One folder with several splits, of which "test", else "validation" is scored, or two: that of the
            training images, and that of those to score, of whatever split.

    Raises:
        OSError: if a folder holds no features.
        ValueError: if a split is missing or not complete, has fewer than two classes, or they are of two models.
    """
    train = open_split(folders[0], ["train"])
    others = SPLITS[::-1] if len(folders) == 2 else SPLITS[:0:-1]  # "test" first
    test = open_split(folders[-1], others)
    train.settings.check_comparable(test.settings)
    if len(set(train.labels)) < 2 or not test.labels:
        raise ValueError(
            f"The training images are of {len(set(train.labels))} classes, and {len(test.labels)} images to score "
            "have one. There must be at least 2 and 1."
        )
    return train, test
