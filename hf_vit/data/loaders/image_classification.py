"""Datasets for image classification, from wherever a user has them, as a list or a stream; scikit-learn's digits."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, IterableDataset, Value
from PIL import Image as PILImage
from transformers.utils import logging

from ...extras import check_packages
from ..datasets import SPLIT_SEED, DatasetInfo, hold_out
from ..formats.classes import (
    LABEL_TYPES,
    ClassNumbers,
    classes_among,
    has_labels,
    known_classes,
    names_beside,
    with_class_labels,
)
from ..formats.columns import (
    TABLE_SUFFIXES,
    USUAL_NAMES,
    Columns,
    SourceKeywords,
    SourceOptions,
    find_tables,
    list_tables,
    load_tables,
    read_columns,
    take_columns,
)
from ..formats.files import SPLITS, with_files
from ..formats.folders import has_class_folders, load_image_folder
from ..formats.idx import find_idx, load_idx
from ..formats.label_values import SINGLE, ProblemType, label_values
from ..formats.stored import (
    COLUMN_FORMATS,
    KEY,
    TAR_SUFFIXES,
    Formats,
    Take,
    class_folder,
    find_shards,
    find_tars,
    load_columns,
    load_shards,
    load_splits,
    open_streams,
    read_labels,
    take_from,
    tar_label,
)


logger = logging.get_logger(__name__)
ROWS = Features({"image": Image(decode=False), "file": Value("string"), "label": Value("int64")})
PEEKED = 10  # rows that tell whether a split on the Hub has labels
NUM_SHARDS = 64  # of files on disk: at most so many worker processes share them
NUM_TEST_DIGITS = 360
DIGITS_INFO = DatasetInfo(
    name="Optical Recognition of Handwritten Digits (UCI), as in scikit-learn",
    identifier="load_digits",
    license="CC BY 4.0",
    description=(
        "E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998 "
        "(https://doi.org/10.24432/C50P49); the 1797 images of its test set, by 13 writers, that are part of "
        "scikit-learn (`sklearn.datasets.load_digits`). They are 8x8 pixels, enlarged to 28x28, light on dark. 1437 "
        "are for training and 360 for testing, every digit with the same share of both; the split is random, so the "
        "same writers can be in both."
    ),
    test=f"the {NUM_TEST_DIGITS} test images",
)


def load_image_classification(
    source: str,
    *,
    label_column_name: str | None = None,
    problem_type: ProblemType | None = SINGLE,
    label_separator: str | None = None,
    class_names: Sequence[str] | None = None,
    **keywords: Unpack[SourceKeywords],
) -> DatasetDict:
    """Load images with labels, by default one each, whatever the form in which they lie on disk or on the Hub.

    `source` is, recognized by its content and in this order:

    - a folder with the idx files of MNIST, Fashion-MNIST, ..., packed or not, also in `MNIST/raw/`;
    - a parquet file, or a folder of them, also in `data/`; the split is a word of the file's name as in
      `train-00000-of-00001.parquet`, or of its folder's;
    - a folder written by `Dataset.save_to_disk`;
    - a tar file of WebDataset, or a folder of them and of no images, with `.cls`, `.json` or `.txt` by each image;
      numbers in `.cls` are named by a `classes.txt` or `id2label.json` that lies there;
    - a table (.csv, .tsv, .jsonl) of paths, relative to it, and labels, or a folder with `train.csv`, `test.csv`, ...,
      or with `metadata.csv`, there or in `train/`, `test/`, ...; a column `split` names the split, if there is one;
    - a folder with `train/`, `test/`, ... and therein one folder of images per class, or the class folders alone;
      a `test/` of images without a class is left out;
    - if no such path exists, the name of a dataset on the Hub.

    Splits are found under "train", "training", "validation", "valid", "val", "dev", "test" and "testing".

    Args:
        source: Path, or name on the Hub.
        label_column_name: Column of labels, or several with commas between them; by default found by type or name.
        problem_type: What labels are for. With None, lists and several columns of 0 and 1 are several labels, and
            numbers with fractions are values. A name is one label, whatever characters it has.
        label_separator: What separates several names in a cell. With several labels per image, "|", ";" and "," are
            found by default; without a `problem_type`, a separator says that there are several.
        class_names: All names of several labels; by default those that occur in the training images.
        **keywords: Configuration and revision on the Hub, and the column of images, see `SourceOptions`.

    Returns:
        Those of the splits "train", "validation" and "test" that exist, each with the columns `image`
        (`datasets.Image`), `label` (`datasets.ClassLabel`, the same for all splits) and `file` (the path of the image,
        or the one beside its bytes, else "image 17 of train"). Image files are not opened. Several labels are in
        `label_flags` instead, 0 or 1 by class, and values in `label_values`, a number by column; NaN is missing.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are wrong in any way that shows without opening the images.
    """
    options = SourceOptions(source, label_column_name, **keywords)
    rows, tables = load_columns(options, _formats(options)), find_tables(options.path)
    if rows is None and not tables:
        rows = _load_class_folders(options.path)
    if problem_type != SINGLE:
        images, columns = read_columns(tables, options) if rows is None else _split_columns(rows, options)
        found = label_values(images, columns, label_column_name, problem_type, label_separator, class_names or ())
        if found is not None:
            return with_files(found)
    single = load_labeled_tables(tables, options) if rows is None else take_from(rows, image_and_label, options)
    return with_files(with_class_labels(single))


def _split_columns(splits: DatasetDict, options: SourceOptions) -> tuple[DatasetDict, dict[str, Columns]]:
    """Return the images of splits, and their other columns with the types of these."""
    images = {name: options.choose_image(rows.features, f"The split {name!r}") for name, rows in splits.items()}
    others = (*images.values(), "split", "file", KEY)
    return DatasetDict({name: take_columns(rows, {images[name]: "image"}) for name, rows in splits.items()}), {
        split: {name: (rows[name], kind) for name, kind in rows.features.items() if name not in others}
        for split, rows in splits.items()
    }


def load_labeled(options: SourceOptions, take: Take, others: Formats, problem: str) -> DatasetDict:
    """Load images that may have labels; `load_splits` says more."""
    return load_splits(options, take, others, problem, _formats(options))


def _formats(options: SourceOptions) -> Formats:
    tars = find_tars, partial(load_shards, "webdataset", options=options)
    return ((find_idx, load_idx), *COLUMN_FORMATS, tars)


def load_labeled_tables(tables: Mapping[str, Path], options: SourceOptions) -> DatasetDict:
    """Read `image` (paths that are opened on access) and `label` (text) of tables by split."""
    return load_tables(tables, options, "label", _label_in, Value("string"))


def _load_class_folders(folder: Path) -> DatasetDict:
    if not folder.is_dir():
        known = ", ".join((".parquet", *TABLE_SUFFIXES, *TAR_SUFFIXES))
        raise ValueError(
            f"{folder} is a file of unknown kind. Give one of {known}, or a folder; unpack archives first."
        )
    if not has_class_folders(folder) and (loose := list_tables(folder)):
        names = " or ".join(repr(str(table)) for table in loose)
        raise ValueError(
            f"{folder} holds a table whose name says no split. Give the table rather than its folder: {names}."
        )
    return load_image_folder(folder)


def _label_in(cell: Any, where: str) -> str | None:
    if not (cell is None or isinstance(cell, str | int)):
        raise ValueError(f"{where} has the label {cell!r}, but a label is a word or a whole number.")
    return None if cell is None else str(cell).strip()


def image_and_label(
    dataset: Any, split: str, options: SourceOptions, *, column: str = "label", is_required: bool = True
) -> Any:
    """Reduce a `Dataset` or an `IterableDataset` to `image` and its label.

    Args:
        dataset: Data whose columns have any names.
        split: Name of the split.
        options: Which columns to take.
        column: The name that the column of labels gets.
        is_required: Whether there must be labels; otherwise they are left out if it is not clear which column it is.
    """
    where, features = f"The split {split!r}", dataset.features
    columns = {options.choose_image(features, where): "image"}
    found = _typed_labels(features)
    if not is_required and options.target_column is None:
        kinds = {name: features.get(name) for name in found or USUAL_NAMES["label"]}
        found = [name for name, kind in kinds.items() if isinstance(kind, ClassLabel) or kind in LABEL_TYPES]
        return take_columns(dataset, columns | ({found[0]: column} if len(found) == 1 else {}))
    label = options.choose("label", features, where, by_type=found)
    if is_required and not isinstance(features[label], ClassLabel) and features[label] not in LABEL_TYPES:
        raise ValueError(
            f"The labels of the split {split!r} are of type {features[label]}, but a label is a class number or a "
            "word. Name the right column with label_column_name."
        )
    return take_columns(dataset, columns | {label: column})


def _typed_labels(features: Mapping[str, Any]) -> list[str]:
    return [name for name, feature in features.items() if isinstance(feature, ClassLabel)] or tar_label(features)


@dataclass(frozen=True)
class LabeledStream:
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
        """Return `count` rows of a split, or all if there are fewer, with images that are in memory.

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
    label_column_name: str | None = None,
    class_names: Sequence[str] = (),
    train_val_split: float = 0.1,
    **keywords: Unpack[SourceKeywords],
) -> LabeledStream:
    """Open images with one label each, the training images as a stream.

    Parquet files, tar files and datasets on the Hub are read while they are used. Other sources of
    `load_image_classification` are listed as there, and their images are opened one by one.

    Args:
        source: As in `load_image_classification`.
        label_column_name: As there; of JSON in tar files, as "json.label".
        class_names: Names of the classes, if the data do not have them: numbers are places in it. A classes.txt or
            id2label.json that lies with the data does the same; otherwise the labels of data on disk are read, without
            the images.
        train_val_split: Share of the training images that is for validation if there is no such split.
        **keywords: As there.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if there are no training images, columns are not clear, or classes are not known.
    """
    options = SourceOptions(source, label_column_name, **keywords)
    streams = open_streams(options)
    splits = streams or load_image_classification(source, label_column_name=label_column_name, **keywords)
    if "train" not in splits:
        raise ValueError(f"{source} has no training images, only the splits {', '.join(splits)}.")
    if not streams:
        return _from_list(splits, class_names, train_val_split)
    found = take_from(streams, image_and_label, options)
    feature = found["train"].features["label"]
    if not class_names and not isinstance(feature, ClassLabel):
        class_names = names_beside([class_folder(options)])
    classes = known_classes(feature, class_names) or classes_among(_labels_on_disk(options, streams["train"].features))
    held_out = 0.0 if "validation" in streams else train_val_split
    rows = stream_rows(found.pop("train"), "label", classes.number, Value("int64"))
    if options.path.exists():
        return LabeledStream(classes.names, rows, held_out, listed=_other_splits(options, classes))
    labeled = {
        name: stream_rows(stream, "label", classes.number, Value("int64"))
        for name, stream in found.items()
        if has_labels(name, (row["label"] for row in stream.take(PEEKED)))
    }
    return LabeledStream(classes.names, rows, held_out, streamed=labeled)


def held_out_of_stream(images: Dataset, source: str, train_val_split: float) -> Dataset:
    """Return the training images that a training on a stream of them holds out.

    Args:
        images: The split "train" of `load_image_classification`.
        source: Where it is from.
        train_val_split: The share that is held out.
    """
    options = SourceOptions(source)
    if options.path.exists() and not open_streams(options):
        return hold_out(images, train_val_split)["test"]  # their list was at hand
    rows = images.select_columns("image").cast_column("image", Image(decode=False))
    return images.select([number for number, row in enumerate(rows) if not _is_trained_on(row, train_val_split)])


def _is_trained_on(row: dict[str, Any], share: float) -> bool:
    """Return whether a row is not among those that are held out: equal images are all on one side."""
    image = row["image"] or {}
    content = image.get("bytes") or (image.get("path") or "").encode()
    return zlib.crc32(content) >= share * 2**32


def _from_list(splits: DatasetDict, class_names: Sequence[str], train_val_split: float) -> LabeledStream:
    feature = splits["train"].features["label"]
    known_classes(feature, class_names)
    if "validation" not in splits and train_val_split > 0:
        held_out = hold_out(splits["train"], train_val_split)
        splits |= {"train": held_out["train"], "validation": held_out["test"]}
    rows = as_stream(splits["train"].cast_column("image", Image(decode=False)))
    others = DatasetDict({name: splits[name] for name in SPLITS if name in splits and name != "train"})
    return LabeledStream(tuple(feature.names), rows, listed=others)


def as_stream(images: Dataset) -> IterableDataset:
    """Return a stream of images that are listed, in an order that mixes what is listed class by class."""
    return images.shuffle(seed=SPLIT_SEED).to_iterable_dataset(min(NUM_SHARDS, len(images)))


def stream_rows(
    stream: IterableDataset, column: str, convert: Callable[[Any, str], Any], feature: Value
) -> IterableDataset:
    """Return a stream of `image` (encoded), `file` (its name) and, if the stream has it, another column.

    Args:
        stream: A stream with the column `image`.
        column: Name of the other column.
        convert: From a value of this column and the name of the image to the new value.
        feature: Type of the new values.
    """
    features = {"image": Image(decode=False), "file": Value("string")}
    if column in stream.features:
        features[column] = feature
    return stream.cast_column("image", Image(decode=False)).map(
        partial(_as_row, column=column, convert=convert),
        remove_columns=list(stream.features),
        features=Features(features),
    )


def _as_row(row: dict[str, Any], column: str, convert: Callable[[Any, str], Any]) -> dict[str, Any]:
    file = (row["image"] or {}).get("path") or "an image"
    return {"image": row["image"], "file": file} | ({column: convert(row[column], file)} if column in row else {})


def _labels_on_disk(options: SourceOptions, features: Features) -> Iterable[object]:
    """Return the labels of the training images; raise `ValueError` if this would read the images as well."""
    kind, files = find_shards(options.path) if options.path.exists() else ("hub", {})
    if not files or any(file.endswith(TAR_SUFFIXES[1:]) for file in files["train"]):
        raise ValueError(
            f"{options.source} does not name its classes, and finding them would take reading all of it. Give "
            "class_names."
        )
    label = options.choose("label", features, "The split 'train'", by_type=_typed_labels(features))
    return read_labels(kind, files["train"], label)


def _other_splits(options: SourceOptions, classes: ClassNumbers) -> DatasetDict:
    kind, files = find_shards(options.path)
    splits = load_shards(kind, {name: found for name, found in files.items() if name != "train"}, options)
    found = with_files(take_from(splits, image_and_label, options))
    labeled = {name: split for name, split in found.items() if has_labels(name, split["label"][:])}
    return DatasetDict({name: classes.relabeled(split) for name, split in labeled.items()})


def load_digits_dataset(image_size: int = 28) -> DatasetDict:
    """Load the 1797 digits of `sklearn.datasets.load_digits`, 1437 to train and 360 to test.

    The originals are 8x8 pixels of 17 gray levels, light on dark. Every digit has the same share of both splits, which
    are always the same.

    Args:
        image_size: Height and width in pixels that the images are enlarged to.

    Returns:
        Splits "train" and "test" with the columns `image` (PIL, mode L) and `label` (class number, names "0" to "9").

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if `image_size` is below 8, which would throw pixels away.
    """
    if image_size < 8:
        raise ValueError(f"image_size={image_size} is smaller than the digits, which are 8x8 pixels. Use 8 or more.")
    check_packages("The digits data set", "sklearn")
    from sklearn.datasets import load_digits

    digits = load_digits()
    gray = np.round(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0 to 16
    size = (image_size, image_size)
    images = [PILImage.fromarray(image).resize(size, PILImage.Resampling.BICUBIC) for image in gray]
    dataset = Dataset.from_dict(
        {"image": images, "label": digits.target.tolist()},
        features=Features({"image": Image(), "label": ClassLabel(names=list("0123456789"))}),
    )
    return dataset.train_test_split(test_size=NUM_TEST_DIGITS, stratify_by_column="label", seed=SPLIT_SEED)
