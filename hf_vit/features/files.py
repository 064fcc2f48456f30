"""Folders of features: files of one size, what decides about their content, and reading them by column."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..data.formats.files import SPLITS, listed
from ..training.checkpoints import write_whole


SETTINGS_NAME = "features.json"
PLACES = ("model", "dataset")  # where things lay, which does not decide what the features are


@dataclass(frozen=True)
class FeatureSettings:
    """What decides about the features in a folder; a file beside them, so that it never holds those of two models.

    Args:
        model: Name or path of the model.
        dataset: Where the images were.
        weights: Digest of the model's weights.
        image_processor: Digest of the settings of its image processor.
        files: Digest of the names and contents of the images.
        images: Number of images of each split.
        features: Names of the features.
        dtype: Type of the numbers.
        rows_per_shard: Number of images of a full file.
    """

    model: str
    dataset: str
    weights: str
    image_processor: str
    files: str
    images: dict[str, int]
    features: list[str]
    dtype: str
    rows_per_shard: int

    @classmethod
    def read(cls, folder: Path) -> "FeatureSettings":
        """Reads the settings of a folder of features, or raises `OSError`."""
        file = folder / SETTINGS_NAME
        if not file.is_file():
            raise OSError(f"{folder} holds no features, as there is no {file}. Extract them: hf-vit features extract.")
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def start(self, folder: Path) -> None:
        """Writes the settings into a new folder; raises `ValueError` if it holds other features, or other files."""
        file = folder / SETTINGS_NAME
        if file.is_file():
            found = FeatureSettings.read(folder)
            then, now = asdict(found), asdict(self)
            if changed := [name for name in now if name not in PLACES and then[name] != now[name]]:
                differences = "; ".join(f"{name}: {then[name]} then, {now[name]} now" for name in changed)
                raise ValueError(
                    f"{folder} holds features of {found.model} on {found.dataset}, made with other settings "
                    f"({differences}). Resume with these, or give another --output_dir."
                )
            return
        if folder.exists() and (others := sorted(path.name for path in folder.iterdir())):
            raise ValueError(f"{folder} holds {listed(others)}, which are no features. Give another --output_dir.")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(asdict(self), indent=2) + "\n")

    def check_comparable(self, other: "FeatureSettings") -> None:
        """Raises `ValueError` if other features are of another model or another image processor."""
        for name in ("weights", "image_processor"):
            if vars(self)[name] != vars(other)[name]:
                raise ValueError(
                    f"The features are of two models: their {name} differ ({self.model} and {other.model}). Extract "
                    "both with the same one."
                )


@dataclass(frozen=True)
class Shard:
    """A range of the images of a split, from `start` to `stop`, whose features are in file `number` of `count`."""

    split: str
    number: int
    count: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The name of the file, as on the Hub."""
        return f"{self.split}-{self.number:05d}-of-{self.count:05d}.parquet"


def plan_shards(images: Mapping[str, int], rows_per_shard: int) -> list[Shard]:
    """Divides splits of so many images; neither processes nor restarts change it."""
    return [
        Shard(split, number, math.ceil(size / rows_per_shard), start, min(start + rows_per_shard, size))
        for split, size in images.items()
        for number, start in enumerate(range(0, size, rows_per_shard))
    ]


@dataclass(frozen=True)
class FeatureSplit:
    """The features of a split whose images have a class.

    Args:
        name: Name of the split.
        files: Parquet files, in order.
        labels: Name of the class of each image.
        is_labeled: (rows,) bool, False for images without a class, which are left out.
        settings: What they are of.
    """

    name: str
    files: tuple[Path, ...]
    labels: tuple[str, ...]
    is_labeled: np.ndarray
    settings: FeatureSettings

    @property
    def vectors(self) -> list[str]:
        """Names of the features that are one vector an image."""
        return [name for name in self.settings.features if name != "patches"]

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
            "the folder of the training images, and after it that of the test images."
        )
    shards = plan_shards({name: settings.images[name]}, settings.rows_per_shard)
    files = tuple(folder / shard.name for shard in shards)
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(
            f"{len(missing)} of {len(files)} files are missing in {folder}: {listed(missing)}. Run "
            "the same hf-vit features extract command again to complete them."
        )
    if "label" not in pq.read_schema(files[0]).names:
        raise ValueError(
            f"The features in {folder} are of images without classes. Extract them from folders of classes, or with "
            "--label_column_name."
        )
    labels = pa.concat_tables(pq.read_table(file, columns=["label"]) for file in files)["label"]
    is_labeled = labels.is_valid().to_numpy()
    return FeatureSplit(name, files, tuple(labels.drop_null().to_pylist()), is_labeled, settings)


def open_train_and_test(folders: Sequence[Path]) -> tuple[FeatureSplit, FeatureSplit]:
    """Opens features to train on, and others to evaluate.

    Args:
        folders: One folder with several splits, of which "test", else "validation" is evaluated, or two: that of the
            training images, and that of the test images, of whatever split.

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
            f"The training images are of {len(set(train.labels))} classes, and {len(test.labels)} test images "
            "have one. There must be at least 2 and 1."
        )
    return train, test
