"""Load or stream unlabeled images from local files or the Hub."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset, Value, concatenate_datasets
from transformers.utils import logging

from ..formats.classes import UNLABELED, sorted_names, with_class_column
from ..formats.columns import USUAL_NAMES, SourceKeywords, SourceOptions, find_tables, read_table
from ..formats.files import (
    IMAGE_SUFFIXES,
    SPLITS,
    add_file_column,
    files_below,
    find_folder,
    images_at,
    is_image,
    joined,
    splits_in,
    subfolders,
)
from ..formats.folders import IMAGE_FOLDERS, TARGET_FOLDERS, report_other_folders
from ..formats.stored import TAR_SUFFIXES, open_streams, take_from
from .image_classification import as_stream, image_and_label, load_labeled, load_labeled_tables, stream_rows


logger = logging.get_logger(__name__)
CLASS = "class_number"  # not named "label", because classes are optional and may be missing in some splits
NO_CLASS = -1
image_and_class = partial(image_and_label, column=CLASS, is_required=False)
TARGETS = {name for names in TARGET_FOLDERS.values() for name in names}


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
    others = (
        (
            partial(_find_labeled_tables, target_column=options.target_column),
            lambda tables: load_labeled_tables(tables, options).rename_column("label", CLASS),
        ),
        (find_folder, list_images),
    )
    tars = ", ".join(TAR_SUFFIXES)
    problem = f"is a file of an unknown format. Give a folder, a parquet, tar ({tars}) file, or a table of labels."
    return with_class_numbers(load_labeled(options, image_and_class, others, problem))


def _find_labeled_tables(path: Path, target_column: str | None) -> dict[str, Path]:
    """Return the tables of a dataset if all of them have a label column, otherwise an empty dictionary."""
    names = USUAL_NAMES["label"] if target_column is None else (target_column,)
    tables = find_tables(path)
    return tables if all(any(name in names for name in read_table(table)[0]) for table in tables.values()) else {}


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


def list_images(folder: Path) -> DatasetDict:
    """List the images in a folder at any depth without opening them, with classes if they are in class folders."""
    folder = folder.absolute()  # absolute paths stay valid if the working directory changes
    roots = _split_roots(folder)
    found = {name: _images_below(root) for name, root in roots.items()}
    if not found.get("train"):
        raise ValueError(f"{folder} contains no image: no file ends in {', '.join(sorted(IMAGE_SUFFIXES))}.")
    splits = DatasetDict(
        {name: images_at([str(file) for file in files], name) for name, files in found.items() if files}
    )
    # The class is the first subfolder in the path of an image. A single subfolder for all images is not a class.
    classes = {name: [(*file.relative_to(roots[name]).parts[:-1], "")[0] for file in found[name]] for name in splits}
    if "" in classes["train"] or len(set(classes["train"])) < 2:
        return splits
    return DatasetDict({name: split.add_column(CLASS, classes[name]) for name, split in splits.items()})


def _split_roots(folder: Path) -> dict[str, Path]:
    """Return the folders of the splits, such as `train/` or `images/train/`."""
    for place in (folder, *(sub for sub in subfolders(folder) if sub.name.lower() in IMAGE_FOLDERS)):
        if "train" in (named := splits_in(place)):
            report_other_folders(place, named)
            return named
    return {"train": folder}


def _images_below(root: Path) -> list[Path]:
    """List the images below a folder, without masks and other targets stored as images."""
    images = [file for file in files_below(root) if is_image(file)]
    folders = {parent for file in images for parent in file.relative_to(root).parents}
    places = {inside.parent for inside in folders if inside.name.lower() in IMAGE_FOLDERS}
    targets = {inside for inside in folders if inside.name.lower() in TARGETS and inside.parent in places}
    if targets:
        found = joined(sorted(map(str, targets)))
        logger.warning("Ignored folders in %s because they contain targets of images: %s.", root, found)
    return [file for file in images if not targets & set(file.relative_to(root).parents)]


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
