"""Folders of extracted features: the settings file, the division into parquet files, and reading single features."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..data.formats.files import SPLITS, joined
from ..data.shards import ShardSettings, plan_shards


@dataclass(frozen=True)
class FeatureSettings(ShardSettings):
    """Settings that determine features.

    Args:
        features: Names of the features.
        dtype: Data type of the features.
    """

    content = "features"

    features: list[str]
    dtype: str

    @classmethod
    def read(cls, folder: Path) -> "FeatureSettings":
        """Reads the settings file of a feature folder. Raises `OSError` if there is no such file."""
        file = folder / cls.file_name()
        if not file.is_file():
            raise OSError(f"{folder} contains no features: there is no {file}. Run hf-vit features extract first.")
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def check_comparable(self, other: "FeatureSettings") -> None:
        """Raises `ValueError` if `other` belongs to features of another model or another image processor."""
        for name in ("weights", "image_processor"):
            if vars(self)[name] != vars(other)[name]:
                raise ValueError(
                    f"Training and test features come from two models, {self.model} and {other.model}, with "
                    f"different {name}. Extract both with the same model."
                )


@dataclass(frozen=True)
class FeatureSplit:
    """Features of the labeled images of a split.

    Args:
        name: Name of the split.
        files: Parquet files of the split, in order.
        labels: Class name of each labeled image.
        is_labeled: (rows,) bool, one value per image in the files. Unlabeled images (False) are skipped.
        settings: Settings with which the features were extracted.
    """

    name: str
    files: tuple[Path, ...]
    labels: tuple[str, ...]
    is_labeled: np.ndarray
    settings: FeatureSettings

    @property
    def vectors(self) -> list[str]:
        """Names of the features that consist of one vector per image."""
        return [name for name in self.settings.features if name != "patches"]

    def read(self, feature: str) -> Tensor:
        """Returns one feature of all labeled images, (M, D) float32."""
        table = pa.concat_tables(pq.read_table(file, columns=[feature]) for file in self.files)
        width = table.schema.field(feature).type.list_size
        chunks = [chunk.flatten().to_numpy(zero_copy_only=False).reshape(-1, width) for chunk in table[feature].chunks]
        return torch.from_numpy(np.concatenate(chunks)[self.is_labeled].astype(np.float32))


def open_split(folder: Path, names: Sequence[str]) -> FeatureSplit:
    """Opens the features of the first split in `names` that exists.

    Args:
        folder: Output folder of `extract_features`.
        names: Names of splits, in order of preference.

    Raises:
        OSError: if the folder contains no features.
        ValueError: if none of the splits exists, files are missing, or the images have no labels.
    """
    settings = FeatureSettings.read(folder)
    name = next((name for name in names if name in settings.images), None)
    if name is None:
        raise ValueError(
            f"{folder} contains the splits {joined(list(settings.images))}, but not {' or '.join(names)}. Give the "
            "feature folder of the training images, followed by the feature folder of the test images."
        )
    shards = plan_shards({name: settings.images[name]}, settings.rows_per_shard)
    files = tuple(folder / shard.name for shard in shards)
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(
            f"{len(missing)} of {len(files)} files are missing in {folder}: {joined(missing)}. Run "
            "hf-vit features extract again with the same options to complete them."
        )
    if "label" not in pq.read_schema(files[0]).names:
        raise ValueError(
            f"The features in {folder} have no class labels. Extract them from class folders, or with "
            "--label_column_name."
        )
    labels = pa.concat_tables(pq.read_table(file, columns=["label"]) for file in files)["label"]
    is_labeled = labels.is_valid().to_numpy()
    return FeatureSplit(name, files, tuple(labels.drop_null().to_pylist()), is_labeled, settings)


def read_features(folder: Path, split: str, feature: str) -> tuple[list[str], np.ndarray]:
    """Return the file names and a feature (N, D) float32 of all images of a split, labeled or not."""
    settings = FeatureSettings.read(folder)
    shards = plan_shards({split: settings.images[split]}, settings.rows_per_shard)
    files = tuple(folder / shard.name for shard in shards)
    names: list[str] = pa.concat_tables(pq.read_table(file, columns=["file"]) for file in files)["file"].to_pylist()
    every = FeatureSplit(split, files, (), np.ones(len(names), bool), settings)
    return names, every.read(feature).numpy()


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
    train.settings.check_comparable(test.settings)
    if len(set(train.labels)) < 2 or not test.labels:
        raise ValueError(
            f"The features have {len(set(train.labels))} training classes and {len(test.labels)} labeled test images. "
            "At least 2 training classes and 1 labeled test image are required."
        )
    return train, test
