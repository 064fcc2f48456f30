"""Images and what is written about them, from wherever a user has them."""

from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from typing import Any, Unpack

from datasets import Dataset, DatasetDict, LargeList, List, Value

from ..datasets import TargetData
from ..formats.columns import USUAL_NAMES, SourceKeywords, SourceOptions, find_tables, load_tables, take_columns
from ..formats.files import with_files
from ..formats.stored import load_splits
from ..targets import caption_target


TEXT = (Value("string"), Value("large_string"))
CAPTIONS = List(Value("string"))
CHUNK_SIZE = 64  # images that are in memory at a time


def load_image_text(
    source: str,
    *,
    caption_column_name: str | None = None,
    **keywords: Unpack[SourceKeywords],
) -> TargetData:
    """Load images with one or several captions each.

    `source` is, recognized by what is there and in this order:

    - a parquet file, or a folder of them, with a column of images and one of captions, as `load_image_classification`
      takes them;
    - a folder written by `Dataset.save_to_disk`;
    - a table (.jsonl, .csv, .tsv) of paths, relative to it, and captions, or a folder with `train.jsonl`, ..., or with
      `metadata.jsonl`, there or in `train/`, `val/`, ...; a column `split` says the split, where there is one;
    - if no such path exists, the name of a dataset on the Hub.

    A row holds a caption or a list of them. Rows of one image, by its path or else by its bytes, become one example.

    Args:
        source: Path, or name on the Hub.
        caption_column_name: Column of captions, if its name is not a usual one ("caption", "text", ...). Of two of
            these, lists of captions go before single ones.
        **keywords: Configuration and revision on the Hub, and the column of images, see `SourceOptions`.

    Returns:
        Splits with the columns `image`, `captions` (a list) and `file`. No image is opened.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are wrong in any way that shows without opening the images.
    """
    options = SourceOptions(source, caption_column_name, **keywords)
    read = partial(
        load_tables, options=options, kind="caption", read_cell=_as_list, feature=CAPTIONS, prefers_lists=True
    )
    problem = (
        'holds no captions. Put a metadata.jsonl with lines like {"file_name": "1.jpg", "text": "a dog runs"} next to '
        "the images, in train/, val/, ..., or give a table or a parquet file of images and captions."
    )
    splits = load_splits(options, _image_and_caption, ((find_tables, read),), problem)
    merged = DatasetDict({name: _merge_rows(split, name) for name, split in with_files(splits).items()})
    return TargetData(merged, caption_target)


def _as_list(value: Any, where: str) -> list[str]:
    """Return the captions of a row; one that is missing is empty."""
    captions = value if isinstance(value, list) else [value]
    if not all(caption is None or isinstance(caption, str) for caption in captions):
        raise ValueError(f"{where} has {value!r} for a caption. Give a text, or a list of texts.")
    return [caption or "" for caption in captions]


def _image_and_caption(dataset: Dataset, name: str, options: SourceOptions) -> Dataset:
    where, features = f"The split {name!r}", dataset.features
    image = options.choose_image(features, where)
    usual = [column for column in features if column.strip().lower() in USUAL_NAMES["caption"]]
    lists = [column for column in usual if _is_list(features[column])]
    caption = options.choose("caption", features, where, by_type=lists)
    if features[caption] not in TEXT and not _is_list(features[caption]):
        types = ", ".join(f"{column!r} ({type(feature).__name__})" for column, feature in features.items())
        raise ValueError(
            f"{where} has no texts in the column {caption!r}, which is of type {features[caption]}. Name the right "
            f"one with caption_column_name; there are {types}."
        )
    return take_columns(dataset, {image: "image", caption: "caption"})


def _is_list(feature: object) -> bool:
    return isinstance(feature, List | LargeList) and feature.feature in TEXT


def _merge_rows(split: Dataset, name: str) -> Dataset:
    """Join the captions of the rows that have one image."""
    first: dict[object, int] = {}
    captions: list[list[str]] = []
    for number, (key, value) in enumerate(zip(_keys(split), split["caption"], strict=True)):
        captions.append([])
        captions[first.setdefault(key, number)] += _as_list(value, f"Row {number} of {name}")
    # Before rows are left out: a column that is added later copies all images.
    merged = split.remove_columns("caption").add_column("captions", captions, feature=CAPTIONS)
    return merged if len(first) == len(merged) else merged.select(list(first.values()))


def _keys(split: Dataset) -> Iterator[object]:
    """Yield what tells the image of each row from others: a digest of its bytes, or its path."""
    for table in split.select_columns("image").with_format("arrow").iter(CHUNK_SIZE):
        columns = table.flatten()
        paths, contents = (columns[f"image.{part}"].to_pylist() for part in ("path", "bytes"))
        for path, content in zip(paths, contents, strict=True):
            yield path if content is None else blake2b(content).digest()
