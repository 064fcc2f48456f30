"""Images that are read while a training goes on, from the Hub or from disk, and of which none need fit on the disk."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Image, IterableDataset, Value, concatenate_datasets

from .hold_out import SPLIT_SEED
from .pretraining_sources import (
    CLASS,
    check_single,
    load_unlabelled_images,
    select_image_and_class,
    with_class_numbers,
)
from .splits import SPLITS
from .stored import check_on_disk, stream_from_disk, stream_from_hub


NUM_SHARDS = 64  # of files on disk: at most so many worker processes share them
ROWS = Features({"image": Image(decode=False), "file": Value("string"), CLASS: Value("string")})


def stream_images(
    sources: Sequence[str],
    *,
    dataset_config_name: str | None = None,
    dataset_revision: str | None = None,
    image_column_name: str | None = None,
    label_column_name: str | None = None,
) -> dict[str, IterableDataset]:
    """Opens the images of one or several data sets as one stream.

    Args:
        sources: Names on the Hub, parquet files or tar shards or folders of them, or folders of images as in
            `load_unlabelled_images`.
        dataset_config_name: Configuration of a dataset on the Hub, of a single source.
        dataset_revision: Branch, tag or commit on the Hub, of a single source.
        image_column_name: Column of images, where neither type nor name say it.
        label_column_name: Column of labels, where neither type nor name say it.

    Returns:
        Those of the splits "train", "validation" and "test" that any source has, with the columns `image` (encoded),
        `file`, and, of a single source whose labels are known, `class_number`, as text: only who has seen all classes
        can number them, see `first_images`.

    Raises:
        FileNotFoundError: if a source is neither a path nor a name on the Hub.
        ValueError: if it has no images, or columns are not clear.
    """
    check_single(sources, dataset_config_name, dataset_revision)
    columns = image_column_name, label_column_name
    opened = [_open(source, dataset_config_name, dataset_revision, *columns) for source in sources]
    if len(opened) > 1:  # whose classes are not the same ones
        opened = [{name: stream.select_columns("image") for name, stream in splits.items()} for splits in opened]
    return {
        name: concatenate_datasets([_as_rows(splits[name]) for splits in opened if name in splits])
        for name in SPLITS
        if any(name in splits for splits in opened)
    }


def first_images(streams: Mapping[str, IterableDataset], counts: Mapping[str, int]) -> DatasetDict:
    """Keeps the first rows of the splits of a stream in memory.

    Args:
        streams: As `stream_images` gives them.
        counts: How many rows to keep of each split.

    Returns:
        These splits as `load_unlabelled_images` gives them, but for images, which are encoded.
    """
    first = {
        name: Dataset.from_list(list(islice(streams[name], count)), features=streams[name].features)
        for name, count in counts.items()
    }
    return with_class_numbers(
        DatasetDict({name: rows.add_column("number", list(range(len(rows)))) for name, rows in first.items()})
    )


def _open(
    source: str, config_name: str | None, revision: str | None, image_column: str | None, label_column: str | None
) -> dict[str, IterableDataset]:
    """Returns the splits with the columns `image` and, where labels are known, `class_number`."""
    path = Path(source).expanduser()
    if not path.exists():
        splits = stream_from_hub(source, config_name, revision)
    else:
        check_on_disk(path, config_name, revision)
        splits = stream_from_disk(path)
        if not splits:
            listed = load_unlabelled_images([source], image_column_name=image_column, label_column_name=label_column)
            # Files are listed class by class, and a buffer would mix few of the classes.
            return {
                name: split.shuffle(seed=SPLIT_SEED).to_iterable_dataset(min(NUM_SHARDS, len(split)))
                for name, split in listed.items()
            }
    return {
        name: select_image_and_class(split, f"The split {name!r}", image_column, label_column)
        for name, split in splits.items()
    }


def _as_rows(stream: IterableDataset) -> IterableDataset:
    names = {"image", "file", *stream.features}
    features = Features({name: feature for name, feature in ROWS.items() if name in names})
    stream = stream.cast_column("image", Image(decode=False))
    return stream.map(_as_row, remove_columns=list(stream.features), features=features)


def _as_row(row: dict[str, Any]) -> dict[str, Any]:
    known = {CLASS: None if row[CLASS] is None else str(row[CLASS])} if CLASS in row else {}
    return {"image": row["image"], "file": (row["image"] or {}).get("path") or "an image", **known}
