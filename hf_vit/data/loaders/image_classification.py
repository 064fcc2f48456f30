"""Load or stream datasets for image classification from local files or the Hub, and scikit-learn's digits dataset."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Unpack

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, IterableDataset, Value
from PIL import Image as PILImage
from transformers.utils import logging

from ...extras import check_packages
from ..datasets import SPLIT_SEED, DatasetInfo, hold_out
from ..formats import find_shards, open_streams, read_source
from ..reading.classes import (
    LABEL_TYPES,
    ClassNumbers,
    classes_from_labels,
    has_labels,
    known_classes,
    read_class_names,
    with_class_labels,
)
from ..reading.columns import (
    USUAL_NAMES,
    Columns,
    SourceKeywords,
    SourceOptions,
    TableRow,
    column_in_tables,
    columns_in_tables,
    take_columns,
    take_from,
)
from ..reading.files import NO_IMAGE, TABLE_SUFFIXES, add_file_column
from ..reading.hub import class_folder
from ..reading.label_values import SINGLE, ProblemType, label_values
from ..reading.match import Match
from ..reading.shards import KEY, TAR_SUFFIXES, tar_label
from ..reading.splits import SPLITS


logger = logging.get_logger(__name__)
ROWS = Features({"image": Image(decode=False), "file": Value("string"), "label": Value("int64")})
PEEKED = 10  # Number of rows that are read to check whether a streamed split has labels.
NUM_SHARDS = 64  # Number of shards for streaming files on disk, which is also the maximum number of workers.
NUM_TEST_DIGITS = 360
DIGITS_INFO = DatasetInfo(
    name="Optical Recognition of Handwritten Digits (UCI), as in scikit-learn",
    identifier="load_digits",
    license="CC BY 4.0",
    description=(
        "E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998 "
        "(https://doi.org/10.24432/C50P49). scikit-learn contains the 1797 images of its test set, by 13 writers "
        "(`sklearn.datasets.load_digits`). They have 8x8 pixels, enlarged to 28x28, light on dark. 1437 images are "
        "used for training and 360 for testing. The random split is stratified by digit, but not by writer: images of "
        "the same writer can be in both parts."
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
    """Load images with labels: one class (by default) or several classes per image, or regression targets.

    The format of `source` is detected in this order:

    - a folder with the idx files of MNIST, Fashion-MNIST, ..., compressed or not, also in `MNIST/raw/`;
    - a parquet file, or a folder of them, also in `data/`; the name of a file, such as `train-00000-of-00001.parquet`,
      or of its folder contains the split;
    - a folder written by `Dataset.save_to_disk`;
    - a tar file in WebDataset format with `.cls`, `.json` or `.txt` next to each image, or a folder of such files and
      no images; the class names of `.cls` numbers come from a `classes.txt` or `id2label.json` in the folder;
    - a table (.csv, .tsv, .jsonl) of labels and of image paths relative to the table, or a folder with `train.csv`,
      ..., or with `metadata.csv` at its top level or in `train/`, `test/`, ...; an optional column `split` gives the
      split;
    - a folder with one folder of images per class, also inside `train/`, `test/`, ...; a `test/` whose images are not
      in class folders is ignored;
    - if the path does not exist, the name of a dataset on the Hub.

    Names of splits are "train", "training", "validation", "valid", "val", "dev", "test" and "testing".

    Args:
        source: Path, or name of a dataset on the Hub.
        label_column_name: Column of labels, or comma-separated columns; by default found by type or name.
        problem_type: Problem type, or `None` to detect it: lists and several columns of 0 and 1 are multiple labels,
            non-integer numbers are regression targets, and other cells are single labels.
        label_separator: Separator of class names in a cell; by default "|", ";" or "," if `problem_type` is
            multi-label classification. If `problem_type` is `None`, a separator selects multi-label classification.
        class_names: Names of all classes for multi-label classification; by default those of the training images.
        **keywords: Configuration and revision on the Hub, and the column of images, see `SourceOptions`.

    Returns:
        The available splits among "train", "validation" and "test", with the columns `image` (`datasets.Image`, not
        opened), `label` (the same `datasets.ClassLabel` for all splits) and `file` (path of the image, or a name such
        as "image 17 of train"). Instead of `label`, multiple labels are in `label_flags` (0 or 1 by class), and
        regression targets in `label_values` (numbers by column), with NaN for missing values.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are invalid, as far as this can be detected without opening images.
    """
    options = SourceOptions(source, label_column_name, **keywords)
    known = ", ".join((".parquet", *TABLE_SUFFIXES, *TAR_SUFFIXES))
    unknown = f"is a file of an unknown format. Give one of {known}, or a folder. Extract archives first."
    match, content = read_source(options, "classes", unknown if options.path.is_file() else NO_IMAGE)
    is_table = match.name == "table"
    if problem_type != SINGLE:
        images, columns = columns_in_tables(content) if is_table else _split_columns(content, options)
        found = label_values(images, columns, label_column_name, problem_type, label_separator, class_names or ())
        if found is not None:
            return add_file_column(found)
    single = labels_in_tables(content, options) if is_table else take_from(content, image_and_label, options)
    return add_file_column(with_class_labels(single))


def _split_columns(splits: DatasetDict, options: SourceOptions) -> tuple[DatasetDict, dict[str, Columns]]:
    """Return the image column of each split, and the values and types of its other columns."""
    images = {name: options.choose_image(rows.features, f"The split {name!r}") for name, rows in splits.items()}
    others = (*images.values(), "split", "file", KEY)
    return DatasetDict({name: take_columns(rows, {images[name]: "image"}) for name, rows in splits.items()}), {
        split: {name: (rows[name], kind) for name, kind in rows.features.items() if name not in others}
        for split, rows in splits.items()
    }


def labels_in_tables(tables: Sequence[Sequence[TableRow]], options: SourceOptions) -> DatasetDict:
    """Return the images of tables, which are opened on access, and their labels as text."""
    return column_in_tables(tables, options, "label", _label_in, Value("string"))


def _label_in(cell: Any, where: str) -> str | None:
    if not (cell is None or isinstance(cell, str | int)):
        raise ValueError(f"{where} has the label {cell!r}, but a label must be a text or an integer.")
    return None if cell is None else str(cell).strip()


def image_and_label(
    dataset: Any, split: str, options: SourceOptions, *, column: str = "label", is_required: bool = True
) -> Any:
    """Select the columns of images and labels of a `Dataset` or an `IterableDataset`.

    Args:
        dataset: Dataset with arbitrary column names.
        split: Name of the split.
        options: Names of the columns.
        column: New name of the label column.
        is_required: Whether labels are required. Otherwise, they are ignored if several columns may contain them.
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
            f"The labels of the split {split!r} are of type {features[label]}, but a label must be a class number or "
            "a text. Set label_column_name to the right column."
        )
    return take_columns(dataset, columns | {label: column})


def _typed_labels(features: Mapping[str, Any]) -> list[str]:
    return [name for name, feature in features.items() if isinstance(feature, ClassLabel)] or tar_label(features)


@dataclass(frozen=True)
class LabeledStream:
    """An image classification dataset with streamed training images.

    Args:
        names: Names of the classes, in the order of class numbers.
        rows: Stream of the training images: `image` (encoded), `file` and `label` (class number).
        held_out: Fraction of `rows` that is used for validation, selected by a hash of the image content.
        listed: Other splits that are on disk, in the format of `load_image_classification`.
        streamed: Other splits that are on the Hub, in the format of `rows`.
    """

    names: tuple[str, ...]
    rows: IterableDataset
    held_out: float = 0.0
    joined: DatasetDict = field(default_factory=DatasetDict)
    streamed: dict[str, IterableDataset] = field(default_factory=dict)

    @property
    def train(self) -> IterableDataset:
        """Stream of the training images without those held out for validation."""
        return self.rows.filter(partial(_is_training_row, share=self.held_out)) if self.held_out else self.rows

    def first(self, split: str, count: int, buffer_size: int) -> Dataset:
        """Load up to `count` rows of a split into memory.

        Args:
            split: "train", "validation", or another key of `streamed`.
            count: Number of rows.
            buffer_size: Size of the shuffle buffer in rows. Rows are shuffled because they may be sorted by class.
        """
        rows = self.streamed.get(split, self.rows).shuffle(seed=SPLIT_SEED, buffer_size=buffer_size)
        chosen: Iterable[dict[str, Any]] = rows
        if split not in self.streamed:
            wanted = split == "train"
            chosen = (row for row in rows if _is_training_row(row, self.held_out) == wanted)
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
    """Stream images with one label each.

    Parquet files, tar files and datasets on the Hub are streamed. For other formats of `load_image_classification`,
    the files are listed, and their images are opened one by one.

    Args:
        source: As in `load_image_classification`.
        label_column_name: As in `load_image_classification`; "json.label" for JSON in tar files.
        class_names: Class names, if the data contain none, in the order of class numbers. By default, they are read
            from a classes.txt or id2label.json next to the data, or collected from all labels of data on disk.
        train_val_split: Fraction of the training images to use for validation if there is no validation split.
        **keywords: As in `load_image_classification`.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if there are no training images, the choice of columns is ambiguous, or the classes are unknown.
    """
    options = SourceOptions(source, label_column_name, **keywords)
    streams = open_streams(options)
    splits = streams or load_image_classification(source, label_column_name=label_column_name, **keywords)
    if "train" not in splits:
        raise ValueError(f"{source} has no training images, only the splits {', '.join(splits)}. Add a split train.")
    if not streams:
        return _from_list(splits, class_names, train_val_split)
    found = take_from(streams, image_and_label, options)
    feature = found["train"].features["label"]
    if not class_names and not isinstance(feature, ClassLabel):
        class_names = read_class_names([class_folder(options)])
    classes = known_classes(feature, class_names) or classes_from_labels(
        _labels_on_disk(options, streams["train"].features)
    )
    held_out = 0.0 if "validation" in streams else train_val_split
    rows = stream_rows(found.pop("train"), "label", classes.number, Value("int64"))
    if options.path.exists():
        return LabeledStream(classes.names, rows, held_out, joined=_other_splits(options, classes))
    labeled = {
        name: stream_rows(stream, "label", classes.number, Value("int64"))
        for name, stream in found.items()
        if has_labels(name, (row["label"] for row in stream.take(PEEKED)))
    }
    return LabeledStream(classes.names, rows, held_out, streamed=labeled)


def held_out_images_of_stream(images: Dataset, source: str, train_val_split: float) -> Dataset:
    """Return the images that are held out for validation if the training images are streamed.

    Args:
        images: The split "train" of `load_image_classification`.
        source: Path or name of the dataset.
        train_val_split: Fraction of the training images that is held out.
    """
    options = SourceOptions(source)
    if options.path.exists() and not open_streams(options):
        return hold_out(images, train_val_split)["test"]  # files listed from disk are split as without streaming
    rows = images.select_columns("image").cast_column("image", Image(decode=False))
    return images.select([number for number, row in enumerate(rows) if not _is_training_row(row, train_val_split)])


def _is_training_row(row: dict[str, Any], share: float) -> bool:
    """Decide by a hash of the image whether a row is used for training. Equal images get the same decision."""
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
    return LabeledStream(tuple(feature.names), rows, joined=others)


def as_stream(images: Dataset) -> IterableDataset:
    """Return a stream of listed images in random order, because they may be sorted by class."""
    return images.shuffle(seed=SPLIT_SEED).to_iterable_dataset(min(NUM_SHARDS, len(images)))


def stream_rows(
    stream: IterableDataset, column: str, convert: Callable[[Any, str], Any], feature: Value
) -> IterableDataset:
    """Reduce a stream to `image` (encoded), `file` (name of the image) and, if it exists, one converted column.

    Args:
        stream: Stream with the column `image`.
        column: Name of the column to convert.
        convert: Function from a value of this column and the name of the image to the new value.
        feature: Feature type of the new values.
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
    """Read the labels of training images on disk; raise `ValueError` if this requires reading the images as well."""
    module, files = find_shards(options.path)
    if not files or any(file.endswith(TAR_SUFFIXES[1:]) for file in files["train"]):
        raise ValueError(
            f"{options.source} has no class names, and finding all classes requires reading the whole dataset. Set "
            "class_names."
        )
    label = options.choose("label", features, "The split 'train'", by_type=_typed_labels(features))
    return module.read_labels(files["train"], label)


def _other_splits(options: SourceOptions, classes: ClassNumbers) -> DatasetDict:
    module, files = find_shards(options.path)
    others = {name: found for name, found in files.items() if name != "train"}
    splits = module.read(Match(others, options.source, options=options))
    found = add_file_column(take_from(splits, image_and_label, options))
    labeled = {name: split for name, split in found.items() if has_labels(name, split["label"][:])}
    return DatasetDict({name: classes.relabeled(split) for name, split in labeled.items()})


def load_digits_dataset(image_size: int = 28) -> DatasetDict:
    """Load the 1797 digits of `sklearn.datasets.load_digits`, with 1437 training and 360 test images.

    The original images have 8x8 pixels and 17 gray levels, light on dark. The split is fixed and stratified by digit.

    Args:
        image_size: Height and width in pixels that images are enlarged to.

    Returns:
        Splits "train" and "test" with the columns `image` (PIL, mode L) and `label` (class number, names "0" to "9").

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if `image_size` is less than 8, the size of the original images.
    """
    if image_size < 8:
        raise ValueError(f"image_size={image_size} is smaller than the digits, which have 8x8 pixels. Use at least 8.")
    check_packages("The digits dataset", "sklearn")
    from sklearn.datasets import load_digits

    digits = load_digits()
    gray = np.round(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8)
    size = (image_size, image_size)
    images = [PILImage.fromarray(image).resize(size, PILImage.Resampling.BICUBIC) for image in gray]
    dataset = Dataset.from_dict(
        {"image": images, "label": digits.target.tolist()},
        features=Features({"image": Image(), "label": ClassLabel(names=list("0123456789"))}),
    )
    return dataset.train_test_split(test_size=NUM_TEST_DIGITS, stratify_by_column="label", seed=SPLIT_SEED)
