"""Load or stream unlabeled images from local files or the Hub."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Unpack

from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset, Value, concatenate_datasets

from ..formats import images, open_streams, read_source
from ..formats.images import FOLDER
from ..reading.classes import UNLABELED, sorted_names, with_class_column
from ..reading.columns import USUAL_NAMES, SourceKeywords, SourceOptions, TableRow, columns_of, take_from
from ..reading.files import add_file_column, joined
from ..reading.shards import TAR_SUFFIXES
from ..reading.splits import SPLITS
from .image_classification import as_stream, image_and_label, labels_in_tables, stream_rows


CLASS = "class_number"  # not named "label", because classes are optional and may be missing in some splits
NO_CLASS = -1
image_and_class = partial(image_and_label, column=CLASS, is_required=False)


def load_unlabeled_images(
    sources: Sequence[str], *, label_column_name: str | None = None, **keywords: Unpack[SourceKeywords]
) -> DatasetDict:
    """Load the images of one or more datasets as a single dataset.

    A source has any format of `load_image_classification`, with or without labels, or is a folder with images at any
    depth. Its subfolders `train/`, `validation/`, `test/`, or their usual aliases are the splits; if there is no
    `train/`, all images are "train". Folders of targets (`masks/`, `depths/`, ...) next to a folder of images
    (`images/`, ...) are ignored.

    Args:
        sources: Paths, or names of datasets on the Hub.
        label_column_name: Column of labels; by default found by type or name.
        **keywords: As in `load_image_classification`; options for the Hub are allowed only for a single source.

    Returns:
        The available splits among "train", "validation" and "test", with the columns `image` (`datasets.Image`),
        `file` (see `add_file_column`) and `number` (index of the image). A single source with labels, from a column or
        class folders, also has `class_number` (`datasets.ClassLabel`), which is -1 for images without a label.

    Raises:
        FileNotFoundError: if a source is neither a path nor a name on the Hub.
        ValueError: if a source has no images, or the choice of columns is ambiguous.
    """
    options = _options_of(sources, label_column_name, keywords)
    return _numbered(add_file_column(DatasetDict(_joined([_load(each) for each in options]))))


def _numbered(splits: DatasetDict) -> DatasetDict:
    return DatasetDict({name: split.add_column("number", list(range(len(split)))) for name, split in splits.items()})


def _options_of(sources: Sequence[str], label: str | None, keywords: SourceKeywords) -> list[SourceOptions]:
    config_name, revision = keywords.get("dataset_config_name"), keywords.get("dataset_revision")
    if len(sources) > 1 and (config_name or revision):
        raise ValueError(
            f"dataset_config_name={config_name!r} and dataset_revision={revision!r} require a single dataset, but "
            f"there are {len(sources)}: {joined(sources)}. Remove these options."
        )
    return [SourceOptions(source, label, **keywords) for source in sources]


def _joined(opened: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Concatenate datasets or streams by split. Classes are dropped because they differ between datasets."""
    if len(opened) == 1:
        return opened[0]
    parts = {name: [splits[name] for splits in opened if name in splits] for name in SPLITS}
    return {
        name: concatenate_datasets([part.select_columns("image") for part in found])
        for name, found in parts.items()
        if found
    }


def _load(options: SourceOptions) -> DatasetDict:
    tars = ", ".join(TAR_SUFFIXES)
    problem = f"is a file of an unknown format. Give a folder, a parquet, tar ({tars}) file, or a table of labels."
    match, content = read_source(options, "images", problem)
    if match.name == "table" and not all(_has_labels(rows, options) for rows in content) and options.path.is_dir():
        match, content = replace(match, name="images"), images.read(match)
    if match.name == "images":
        names = {FOLDER: CLASS}
        return with_class_numbers(content.rename_columns(names) if FOLDER in content["train"].features else content)
    if match.name == "table":
        return with_class_numbers(labels_in_tables(content, options).rename_column("label", CLASS))
    return with_class_numbers(take_from(content, image_and_class, options))


def _has_labels(rows: Sequence[TableRow], options: SourceOptions) -> bool:
    names = USUAL_NAMES["label"] if options.target_column is None else (options.target_column,)
    return any(name in names for name in columns_of(rows))


def with_class_numbers(splits: DatasetDict) -> DatasetDict:
    """Convert the column `class_number` to one `ClassLabel` type; drop it if it is missing in any split.

    Labels of different splits are the same class if their names are equal. Classes of a `ClassLabel` column keep their
    order. Other classes are named by their values and sorted as in `sorted_names`.
    """
    if not all(CLASS in split.column_names for split in splits.values()):
        others = {name: [column for column in split.column_names if column != CLASS] for name, split in splits.items()}
        return DatasetDict({name: split.select_columns(others[name]) for name, split in splits.items()})
    labels = {name: class_names_of(split) for name, split in splits.items()}
    kinds = [split.features[CLASS] for split in splits.values()]
    given = [name for kind in kinds if isinstance(kind, ClassLabel) for name in kind.names]
    occurring = {label for own in labels.values() for label in own if label is not None}
    names = list(dict.fromkeys([*given, *sorted_names(occurring)]))
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    return DatasetDict(
        {
            name: with_class_column(split, CLASS, [numbers.get(label, NO_CLASS) for label in labels[name]], names)
            for name, split in splits.items()
        }
    )


def class_names_of(rows: Dataset) -> list[str | None]:
    """Return the class name of each image in a split of `load_unlabeled_images`, or None if it is unknown."""
    if CLASS not in rows.column_names:
        return [None] * len(rows)
    kind = rows.features[CLASS]
    return [_as_name(value, "", kind) for value in rows[CLASS][:]]


def stream_images(
    sources: Sequence[str], *, label_column_name: str | None = None, **keywords: Unpack[SourceKeywords]
) -> dict[str, IterableDataset]:
    """Stream the images of one or more datasets as a single dataset.

    Args:
        sources: Names of datasets on the Hub, parquet files, tar files, folders of these files, or folders of images.
        label_column_name: As in `load_unlabeled_images`.
        **keywords: As in `load_unlabeled_images`.

    Returns:
        The available splits among "train", "validation" and "test", with the columns `image` (encoded) and `file`. A
        single source with labels also has the column `class_number`. This column contains class names as text,
        because numbering the classes would require reading the whole stream; see `first_images`.

    Raises:
        FileNotFoundError: if a source is neither a path nor a name on the Hub.
        ValueError: if a source has no images, or the choice of columns is ambiguous.
    """
    options = _options_of(sources, label_column_name, keywords)
    joined = _joined([_open(each) for each in options])
    return {
        name: stream_rows(stream, CLASS, partial(_as_name, kind=stream.features.get(CLASS)), Value("string"))
        for name, stream in joined.items()
    }


def _as_name(value: Any, file: str, kind: object) -> str | None:
    """Return the class name of a label, given the feature type of its column, or None if the label is missing."""
    if value in UNLABELED:
        return None
    return str(kind.int2str(value)) if isinstance(kind, ClassLabel) else str(value).strip() or None


def first_images(streams: Mapping[str, IterableDataset], counts: Mapping[str, int]) -> DatasetDict:
    """Load the first rows of each split of a stream into memory.

    Args:
        streams: Output of `stream_images`.
        counts: Number of rows to load by split.

    Returns:
        The splits named in `counts`, in the format of `load_unlabeled_images`, except that images are encoded.
    """
    first = {
        name: Dataset.from_list(list(islice(streams[name], count)), features=streams[name].features)
        for name, count in counts.items()
    }
    return with_class_numbers(_numbered(DatasetDict(first)))


def _open(options: SourceOptions) -> dict[str, IterableDataset]:
    """Stream the splits of a source, with the columns `image` and, if there are labels, `class_number`."""
    if streams := open_streams(options):
        return take_from(streams, image_and_class, options)
    return {name: as_stream(split) for name, split in add_file_column(_load(options)).items()}
