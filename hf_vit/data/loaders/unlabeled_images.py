"""Images without labels, from wherever a user has them, as a list or a stream."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset, Value, concatenate_datasets
from transformers.utils import logging

from ..formats.classes import UNLABELED, with_class_column
from ..formats.columns import USUAL_NAMES, SourceKeywords, SourceOptions, find_tables, read_table
from ..formats.files import (
    IMAGE_SUFFIXES,
    SPLITS,
    files_below,
    find_folder,
    images_at,
    is_image,
    listed,
    splits_in,
    subfolders,
    with_files,
)
from ..formats.folders import IMAGE_FOLDERS, TARGET_FOLDERS, report_other_folders
from ..formats.stored import TAR_SUFFIXES, open_streams, take_from
from .image_classification import as_stream, image_and_label, load_labeled, load_labeled_tables, stream_rows


logger = logging.get_logger(__name__)
CLASS = "class_number"  # not "label": classes are of use here, but none must have images in every split
NO_CLASS = -1
image_and_class = partial(image_and_label, column=CLASS, is_required=False)
TARGETS = {name for names in TARGET_FOLDERS.values() for name in names}


def load_unlabeled_images(
    sources: Sequence[str], *, label_column_name: str | None = None, **keywords: Unpack[SourceKeywords]
) -> DatasetDict:
    """Load the images of one or several datasets as one, whatever the form in which they lie.

    A source is any of those of `load_image_classification`, with labels or without, or a folder with images at any
    depth. Folders `train/`, `validation/`, `test/`, ... in it, by any of their usual names, are its splits; without a
    `train/` all images are "train". Folders of targets (`masks/`, `depths/`, ...) beside one of images (`images/`,
    ...) are left out.

    Args:
        sources: Paths, or names on the Hub.
        label_column_name: Column of labels; by default found by type or name.
        **keywords: As in `load_image_classification`; options for the Hub only with a single source.

    Returns:
        Those of the splits "train", "validation" and "test" that any source has, each with the columns `image`
        (`datasets.Image`), `file` (see `with_files`) and `number` (from 0). A single source whose labels are known, by
        a column or by folders of classes, also has `class_number` (`datasets.ClassLabel`), -1 where an image has none.

    Raises:
        FileNotFoundError: if a source is neither a path nor a name on the Hub.
        ValueError: if a source has no images, or columns are not clear.
    """
    options = _options_of(sources, label_column_name, keywords)
    return _numbered(with_files(DatasetDict(_joined([_load(each) for each in options]))))


def _numbered(splits: DatasetDict) -> DatasetDict:
    return DatasetDict({name: split.add_column("number", list(range(len(split)))) for name, split in splits.items()})


def _options_of(sources: Sequence[str], label: str | None, keywords: SourceKeywords) -> list[SourceOptions]:
    config_name, revision = keywords.get("dataset_config_name"), keywords.get("dataset_revision")
    if len(sources) > 1 and (config_name or revision):
        raise ValueError(
            f"dataset_config_name={config_name!r} and dataset_revision={revision!r} are of one dataset, but there "
            f"are {len(sources)}: {listed(sources)}. Leave them out."
        )
    return [SourceOptions(source, label, **keywords) for source in sources]


def _joined(opened: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Join datasets or streams split by split; the classes of several are not the same ones, and are left out."""
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
    problem = f"is a file of unknown kind. Give a folder, a parquet file, a tar file ({tars}) or a table with labels."
    return with_class_numbers(load_labeled(options, image_and_class, others, problem))


def _find_labeled_tables(path: Path, target_column: str | None) -> dict[str, Path]:
    """Return the tables of a dataset if all of them have labels; others say nothing that the folder does not."""
    names = USUAL_NAMES["label"] if target_column is None else (target_column,)
    tables = find_tables(path)
    return tables if all(any(name in names for name in read_table(table)[0]) for table in tables.values()) else {}


def with_class_numbers(splits: DatasetDict) -> DatasetDict:
    """Make the column `class_number`, where all splits have it, of whole numbers, the same ones in all."""
    if not all(CLASS in split.column_names for split in splits.values()):
        others = {name: [column for column in split.column_names if column != CLASS] for name, split in splits.items()}
        return DatasetDict({name: split.select_columns(others[name]) for name, split in splits.items()})
    values = {name: split[CLASS][:] for name, split in splits.items()}
    known = sorted({str(value) for column in values.values() for value in column if value not in UNLABELED})
    numbers = {value: number for number, value in enumerate(known)}
    feature = next(iter(splits.values())).features[CLASS]
    names = [feature.int2str(int(value)) for value in known] if isinstance(feature, ClassLabel) else known
    return DatasetDict(
        {
            name: with_class_column(split, CLASS, [numbers.get(str(value), NO_CLASS) for value in values[name]], names)
            for name, split in splits.items()
        }
    )


def list_images(folder: Path) -> DatasetDict:
    """List the images in a folder at any depth, without opening them, and their classes if it has folders of them."""
    folder = folder.absolute()  # the dataset outlives the working directory
    roots = _split_roots(folder)
    found = {name: _images_below(root) for name, root in roots.items()}
    if not found.get("train"):
        raise ValueError(f"{folder} holds no image: no file ends in {', '.join(sorted(IMAGE_SUFFIXES))}.")
    splits = DatasetDict(
        {name: images_at([str(file) for file in files], name) for name, files in found.items() if files}
    )
    # By the first folder, empty for an image in none. A folder of its own around all images is no class.
    classes = {name: [(*file.relative_to(roots[name]).parts[:-1], "")[0] for file in found[name]] for name in splits}
    if "" in classes["train"] or len(set(classes["train"])) < 2:
        return splits
    return DatasetDict({name: split.add_column(CLASS, classes[name]) for name, split in splits.items()})


def _split_roots(folder: Path) -> dict[str, Path]:
    """Return the folders of the splits, which may be in one of images: `train/`, or `images/train/`."""
    for place in (folder, *(sub for sub in subfolders(folder) if sub.name.lower() in IMAGE_FOLDERS)):
        if "train" in (named := splits_in(place)):
            report_other_folders(place, named)
            return named
    return {"train": folder}


def _images_below(root: Path) -> list[Path]:
    """List the images below a folder, without those that are targets of the others."""
    images = [file for file in files_below(root) if is_image(file)]
    folders = {parent for file in images for parent in file.relative_to(root).parents}
    places = {inside.parent for inside in folders if inside.name.lower() in IMAGE_FOLDERS}
    targets = {inside for inside in folders if inside.name.lower() in TARGETS and inside.parent in places}
    if targets:
        found = listed(sorted(map(str, targets)))
        logger.warning("Left out of %s, as they hold targets of the images beside them: %s.", root, found)
    return [file for file in images if not targets & set(file.relative_to(root).parents)]


def stream_images(
    sources: Sequence[str], *, label_column_name: str | None = None, **keywords: Unpack[SourceKeywords]
) -> dict[str, IterableDataset]:
    """Open the images of one or several datasets as one stream.

    Args:
        sources: Names on the Hub, parquet files or tar files or folders of them, or folders of images.
        label_column_name: As in `load_unlabeled_images`.
        **keywords: As there.

    Returns:
        Those of the splits "train", "validation" and "test" that any source has, with the columns `image` (encoded),
        `file`, and, of a single source whose labels are known, `class_number`, as text: only who has seen all classes
        can number them, see `first_images`.

    Raises:
        FileNotFoundError: if a source is neither a path nor a name on the Hub.
        ValueError: if it has no images, or columns are not clear.
    """
    options = _options_of(sources, label_column_name, keywords)
    joined = _joined([_open(each) for each in options])
    return {name: stream_rows(stream, CLASS, _as_text, Value("string")) for name, stream in joined.items()}


def _as_text(value: object, file: str) -> str | None:
    return None if value is None else str(value)


def first_images(streams: Mapping[str, IterableDataset], counts: Mapping[str, int]) -> DatasetDict:
    """Keep the first rows of the splits of a stream in memory.

    Args:
        streams: As `stream_images` gives them.
        counts: How many rows to keep of each split.

    Returns:
        These splits as `load_unlabeled_images` gives them, but for images, which are encoded.
    """
    first = {
        name: Dataset.from_list(list(islice(streams[name], count)), features=streams[name].features)
        for name, count in counts.items()
    }
    return with_class_numbers(_numbered(DatasetDict(first)))


def _open(options: SourceOptions) -> dict[str, IterableDataset]:
    """Return the splits with the columns `image` and, if labels are known, `class_number`."""
    if streams := open_streams(options):
        return take_from(streams, image_and_class, options)
    return {name: as_stream(split) for name, split in with_files(_load(options)).items()}
