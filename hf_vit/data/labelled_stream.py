"""Labelled images that are read while a training goes on, from the Hub or from disk."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, IterableDataset, Value, load_dataset
from transformers.utils import logging

from .class_list import read_class_file
from .class_numbers import ClassNumbers, classes_among, known_classes
from .columns import check_columns_known, choose_column, choose_image_column, image_and_label
from .files import with_files
from .hold_out import SPLIT_SEED, hold_out
from .image_stream import NUM_SHARDS
from .labels import LABEL_TYPES, UNLABELLED
from .parquet import find_parquet, load_parquet
from .sources import load_image_classification
from .splits import SPLITS
from .stored import check_on_disk, id2label_on_hub, stream_from_disk, stream_from_hub
from .tar_shards import class_names_at, find_tars, from_tars, label_column_of, load_tars, read_tar_labels


logger = logging.get_logger(__name__)

ROWS = Features({"image": Image(decode=False), "file": Value("string"), "label": Value("int64")})
PEEKED = 10  # rows that tell whether a split on the Hub has labels


@dataclass(frozen=True)
class LabelledStream:
    """Images and labels of which those to train on come as a stream.

    Args:
        names: What the classes are called, in their order.
        rows: The training images: `image` (encoded), `file` and `label`, the number of the class.
        held_out: Share of `rows` that is for validation, chosen by what is in the image files.
        listed: The other splits, as far as they lie on disk, as `load_image_classification` gives them.
        streamed: The other splits that do not, as `rows`.
    """

    names: tuple[str, ...]
    rows: IterableDataset
    held_out: float = 0.0
    listed: DatasetDict = field(default_factory=DatasetDict)
    streamed: dict[str, IterableDataset] = field(default_factory=dict)

    @property
    def train(self) -> IterableDataset:
        """The rows to train on."""
        return self.rows.filter(partial(_is_trained_on, share=self.held_out)) if self.held_out else self.rows

    def first(self, split: str, count: int, buffer_size: int) -> Dataset:
        """Returns `count` rows of a split, or all if there are fewer, with images that are in memory.

        Args:
            split: "train", "validation", or another one of `streamed`.
            count: How many.
            buffer_size: Among how many rows the next one is drawn, of data that are sorted by class.
        """
        rows = self.streamed.get(split, self.rows).shuffle(seed=SPLIT_SEED, buffer_size=buffer_size)
        chosen: Iterable[dict[str, Any]] = rows
        if split not in self.streamed:
            wanted = split == "train"
            chosen = (row for row in rows if _is_trained_on(row, self.held_out) == wanted)
        features = Features({**ROWS, "label": ClassLabel(names=list(self.names))})
        return Dataset.from_list(list(islice(chosen, count)), features=features).cast_column("image", Image())


def stream_image_classification(
    source: str,
    *,
    dataset_config_name: str | None = None,
    dataset_revision: str | None = None,
    image_column_name: str | None = None,
    label_column_name: str | None = None,
    class_names: Sequence[str] = (),
    train_val_split: float = 0.1,
) -> LabelledStream:
    """Opens images with one label each, the training images as a stream.

    Parquet files, tar files and datasets on the Hub are read while they are used. What else
    `load_image_classification` takes is listed as there, and its images are opened one by one.

    Args:
        source: As in `load_image_classification`.
        dataset_config_name: As there.
        dataset_revision: As there.
        image_column_name: As there.
        label_column_name: As there; of tar files see `from_tars`.
        class_names: What the classes are called, where the data do not say it: numbers are places in it. A
            classes.txt or id2label.json that lies with the data does the same; else data on disk are searched for all
            their labels.
        train_val_split: Share of the training images that is for validation if there is no such split.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if there are no training images, columns are not clear, or classes are not known.
    """
    path, columns = Path(source).expanduser(), (image_column_name, label_column_name)
    if not path.exists():
        raw = stream_from_hub(source, dataset_config_name, dataset_revision)
    elif raw := stream_from_disk(path):
        check_on_disk(path, dataset_config_name, dataset_revision)
    else:
        options = {"dataset_config_name": dataset_config_name, "dataset_revision": dataset_revision}
        names = {"image_column_name": image_column_name, "label_column_name": label_column_name}
        return _from_list(load_image_classification(source, **options, **names), class_names, source, train_val_split)
    if "train" not in raw:
        raise ValueError(f"{source} has no training images, only the splits {', '.join(raw)}.")
    found = {name: _two_columns(stream, f"The split {name!r}", *columns) for name, stream in raw.items()}
    feature = found["train"].features["label"]
    if not class_names and not isinstance(feature, ClassLabel):
        class_names = _names_beside(source, path, dataset_revision)
    classes = known_classes(feature, class_names)
    if classes is None:
        classes = classes_among(_labels_on_disk(path, raw["train"], label_column_name))
    held_out = 0.0 if "validation" in raw else train_val_split
    rows = _as_rows(found.pop("train"), classes)
    if path.exists():
        return LabelledStream(classes.names, rows, held_out, listed=_listed(path, columns, classes))
    labelled = {
        name: _as_rows(stream, classes)
        for name, stream in found.items()
        if _has_labels(name, (row["label"] for row in stream.take(PEEKED)))
    }
    return LabelledStream(classes.names, rows, held_out, streamed=labelled)


def held_out_of_stream(images: Dataset, source: str, train_val_split: float) -> Dataset:
    """Returns the training images that a training on a stream of them holds out.

    Args:
        images: The split "train" of `load_image_classification`.
        source: Where it is from.
        train_val_split: The share that is held out.
    """
    path = Path(source).expanduser()
    if path.exists() and not stream_from_disk(path):
        return hold_out(images, train_val_split)["test"]  # their list was at hand
    rows = images.select_columns("image").cast_column("image", Image(decode=False))
    return images.select([number for number, row in enumerate(rows) if not _is_trained_on(row, train_val_split)])


def _is_trained_on(row: dict[str, Any], share: float) -> bool:
    """Returns whether a row is not among those that are held out: equal images are all on one side."""
    image = row["image"] or {}
    content = image.get("bytes") or (image.get("path") or "").encode()
    return zlib.crc32(content) >= share * 2**32


def _from_list(splits: DatasetDict, class_names: Sequence[str], source: str, train_val_split: float) -> LabelledStream:
    if "train" not in splits:
        raise ValueError(f"{source} has no training images, only the splits {', '.join(splits)}.")
    feature = splits["train"].features["label"]
    known_classes(feature, class_names)
    if "validation" not in splits and train_val_split > 0:
        held_out = hold_out(splits["train"], train_val_split)
        splits |= {"train": held_out["train"], "validation": held_out["test"]}
    train = splits["train"].cast_column("image", Image(decode=False)).shuffle(seed=SPLIT_SEED)
    # Files are listed class by class, and a buffer would mix few of the classes.
    rows = train.to_iterable_dataset(min(NUM_SHARDS, len(train)))
    others = DatasetDict({name: splits[name] for name in SPLITS if name in splits and name != "train"})
    return LabelledStream(tuple(feature.names), rows, listed=others)


def _two_columns(
    stream: IterableDataset, where: str, image_column: str | None, label_column: str | None
) -> IterableDataset:
    """Reduces a stream to `image`, encoded, and `label`."""
    check_columns_known(stream.features, where)
    stream = from_tars(stream, label_column)
    features = stream.features
    typed = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    image = choose_image_column(features, image_column, where)
    label = choose_column("label_column_name", label_column, features, where, by_type=typed)
    if not isinstance(features[label], ClassLabel) and features[label] not in LABEL_TYPES:
        raise ValueError(
            f"{where} has labels of type {features[label]}, but a label is a class number or a word. "
            "Name the right column with label_column_name."
        )
    new_names = {old: new for old, new in {image: "image", label: "label"}.items() if old != new}
    return stream.select_columns([image, label]).rename_columns(new_names).cast_column("image", Image(decode=False))


def _as_rows(stream: IterableDataset, classes: ClassNumbers) -> IterableDataset:
    return stream.map(partial(_as_row, classes=classes), remove_columns=list(stream.features), features=ROWS)


def _as_row(row: dict[str, Any], classes: ClassNumbers) -> dict[str, Any]:
    file = (row["image"] or {}).get("path") or "an image"
    return {"image": row["image"], "file": file, "label": classes.number(row["label"], file)}


def _names_beside(source: str, path: Path, revision: str | None) -> list[str]:
    """Returns the class names in a file that lies with the data, if there is one."""
    if path.exists():
        return class_names_at(path)
    file = id2label_on_hub(source, revision)
    return [] if file is None else read_class_file(Path(file))[0]


def _labels_on_disk(path: Path, train: IterableDataset, label_column: str | None) -> Iterable[object]:
    """Returns the labels of the training images, without the images.

    Raises:
        ValueError: if they are not on disk.
    """
    if not path.exists():
        raise ValueError(
            f"{path} does not say what its classes are called, and all of it would have to be fetched to know. Give "
            "class_names."
        )
    if tars := find_tars(path):
        return read_tar_labels(tars["train"], label_column_of(train, label_column))
    label = choose_column("label_column_name", label_column, train.features, "The split 'train'")
    files = find_parquet(path)["train"]
    batches = load_dataset("parquet", data_files=files, split="train", streaming=True, columns=[label]).iter(1000)
    return chain.from_iterable(batch[label] for batch in batches)


def _listed(path: Path, columns: tuple[str | None, str | None], classes: ClassNumbers) -> DatasetDict:
    """Opens the other splits of parquet and tar files, with labels."""
    parquet, tars = find_parquet(path), find_tars(path)
    files = {name: found for name, found in (parquet or tars).items() if name != "train"}
    splits = load_parquet(files) if parquet else load_tars(path, files)
    splits = DatasetDict({name: from_tars(split, columns[1]) for name, split in splits.items()})
    reduced = with_files(image_and_label(splits, *columns))
    return DatasetDict(
        {name: classes.relabelled(split) for name, split in reduced.items() if _has_labels(name, split["label"][:])}
    )


def _has_labels(name: str, labels: Iterable[object]) -> bool:
    """Returns whether a split has labels, which test sets often have not that are published."""
    if any(label not in UNLABELLED for label in labels):
        return True
    logger.warning("The split %r has no labels, all are -1 or empty; it is left out.", name)
    return False
