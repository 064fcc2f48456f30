"""Folders of extracted features: their settings, their parquet files, and the reading of single features."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..data.reading.files import joined
from ..data.reading.splits import SPLITS
from ..data.shards import ShardSettings, plan_shards
from ..outputs import RECORD, find_intact


@dataclass(frozen=True, kw_only=True)
class FeatureSettings(ShardSettings):
    """Settings that determine features.

    Args:
        features: Names of the features.
        dtype: Data type of the features.
        labels: Hash of the class names of all images.
    """

    content = "features"

    features: list[str]
    dtype: str
    labels: str = ""

    @classmethod
    def read(cls, folder: Path) -> "FeatureSettings":
        """Reads the settings file of a feature folder. Raises `OSError` if it is missing, `ValueError` if damaged."""
        file = folder / cls.file_name()
        if not file.is_file():
            raise OSError(f"{folder} contains no features: there is no {file}. Run hf-vit features extract first.")
        return cls(**cls.read_values(folder))


@dataclass(frozen=True)
class FeatureSplit:
    """Features of the images of a split.

    Args:
        folder: Output folder of `extract_features`.
        name: Name of the split.
        settings: Settings with which the features were extracted.
    """

    folder: Path
    name: str
    settings: FeatureSettings

    @cached_property
    def files(self) -> list[Path]:
        """Parquet files of the split, in order."""
        shards = plan_shards({self.name: self.settings.images[self.name]}, self.settings.rows_per_shard)
        return [self.folder / shard.name for shard in shards]

    def column(self, name: str) -> pa.ChunkedArray:
        """Returns a column of the files."""
        return pa.concat_tables(pq.read_table(file, columns=[name]) for file in self.files)[name]

    def read(self, feature: str) -> np.ndarray:
        """Returns one feature of all images, (N, D) float32."""
        column = self.column(feature)
        vectors = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
        return np.concatenate(vectors).reshape(-1, column.type.list_size).astype(np.float32)

    @cached_property
    def is_labeled(self) -> np.ndarray:
        """Whether each image has a label, (N,) bool."""
        return self.column("label").is_valid().to_numpy()

    @cached_property
    def labels(self) -> list[str]:
        """Class names of the labeled images."""
        return self.column("label").drop_null().to_pylist()

    def read_labeled(self, feature: str) -> Tensor:
        """Returns one feature of the labeled images, (M, D) float32."""
        return torch.from_numpy(self.read(feature)[self.is_labeled])


def open_split(folder: Path, names: Sequence[str]) -> FeatureSplit:
    """Opens the features of labeled images of the first split in `names` that exists, see `open_train_and_test`."""
    settings = FeatureSettings.read(folder)
    name = next((name for name in names if name in settings.images), None)
    if name is None:
        raise ValueError(
            f"{folder} contains the splits {joined(list(settings.images))}, but not {' or '.join(names)}. Give the "
            "feature folder of the training images, followed by the feature folder of the test images."
        )
    split = FeatureSplit(folder, name, settings)
    intact = find_intact(folder, [file.name for file in split.files])
    if missing := [file.name for file in split.files if file.name not in intact]:
        raise ValueError(
            f"{len(missing)} of {len(split.files)} files in {folder} are missing, or do not match their checksums in "
            f"{RECORD}: {joined(missing)}. Run hf-vit features extract again with the same options to compute them."
        )
    if "label" not in pq.read_schema(split.files[0]).names:
        raise ValueError(
            f"The features in {folder} have no class labels. Extract them from class folders, or with "
            "--label_column_name."
        )
    return split


def open_train_and_test(folders: Sequence[Path]) -> tuple[FeatureSplit, FeatureSplit]:
    """Opens the features of training and test images.

    Args:
        folders: One or two feature folders. If there is one, its split "train" is used for training, and "test" or
            else "validation" for evaluation. If there are two, the first one contains the training images, and the
            second one the test images, in a split of any name.

    Raises:
        OSError: if a folder contains no features.
        ValueError: if a split is missing or incomplete, the features come from different models, there are fewer than
            two training classes, or no test image is labeled.
    """
    train = open_split(folders[0], ["train"])
    others = SPLITS[::-1] if len(folders) == 2 else SPLITS[:0:-1]  # "test" is tried first
    test = open_split(folders[-1], others)
    for name in ("weights", "image_processor", "config"):
        if vars(train.settings)[name] != vars(test.settings)[name]:
            raise ValueError(
                f"Training and test features come from two models, {train.settings.model} and {test.settings.model}, "
                f"with different {name}. Extract both with the same model."
            )
    if len(set(train.labels)) < 2 or not test.labels:
        raise ValueError(
            f"The features have {len(set(train.labels))} training classes and {len(test.labels)} labeled test images. "
            "At least 2 training classes and 1 labeled test image are required."
        )
    return train, test
