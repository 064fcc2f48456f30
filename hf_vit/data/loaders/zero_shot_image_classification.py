"""Load images with captions from local files or the Hub."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Unpack

from datasets import Dataset, DatasetDict, LargeList, List, Value

from ..datasets import TargetData
from ..formats import read_source
from ..reading.columns import USUAL_NAMES, SourceKeywords, SourceOptions, column_in_tables, take_columns, take_from
from ..reading.files import add_file_column, joined
from ..targets import caption_target


TEXT = (Value("string"), Value("large_string"))
CAPTIONS = List(Value("string"))
CHUNK_SIZE = 64  # number of images held in memory at the same time


def load_image_text(
    source: str,
    *,
    caption_column_name: str | None = None,
    **keywords: Unpack[SourceKeywords],
) -> TargetData:
    """Load images with one or more captions each.

    The format of `source` is detected in this order:

    - a parquet file, or a folder of them as in `load_image_classification`, with a column of images and a
      column of captions;
    - a folder written by `Dataset.save_to_disk`;
    - a table (.jsonl, .csv, .tsv) of image paths (relative to the table) and captions, or a folder with `train.jsonl`,
      ..., or with `metadata.jsonl` at its top level or in `train/`, `val/`, ...; an optional column `split` gives the
      split;
    - if the path does not exist, the name of a dataset on the Hub.

    A row contains a caption or a list of captions. Rows with the same image (equal bytes, or equal paths if images are
    files) are merged to one example.

    Args:
        source: Path, or name of a dataset on the Hub.
        caption_column_name: Column of captions, if it has no usual name ("caption", "text", ...). If there are several
            columns of usual names, a column of lists is preferred.
        **keywords: Configuration and revision on the Hub, and the column of images, see `SourceOptions`.

    Returns:
        Splits with the columns `image`, `captions` (a list) and `file`. Images are not opened.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are invalid, as far as this can be detected without opening images.
    """
    options = SourceOptions(source, caption_column_name, **keywords)
    problem = (
        'contains no captions. Put a metadata.jsonl with lines like {"file_name": "1.jpg", "text": "a dog runs"} next '
        "to the images, in train/, val/, ..., or give a table or a parquet file of images and captions."
    )
    match, content = read_source(options, "captions", problem)
    if match.name == "table":
        splits = column_in_tables(content, options, "caption", _as_list, CAPTIONS, prefers_lists=True)
    else:
        splits = take_from(content, _image_and_caption, options)
    merged = DatasetDict({name: _merge_rows(split, name) for name, split in add_file_column(splits).items()})
    return TargetData(merged, caption_target)


def _as_list(value: Any, where: str) -> list[str]:
    """Return the captions of a row as a list; a missing caption becomes an empty string."""
    captions = value if isinstance(value, list) else [value]
    if not all(caption is None or isinstance(caption, str) for caption in captions):
        raise ValueError(
            f"{where} has the caption {value!r}, which is not a text or a list of texts. Correct the caption."
        )
    return [caption or "" for caption in captions]


def _image_and_caption(dataset: Dataset, name: str, options: SourceOptions) -> Dataset:
    where, features = f"The split {name!r}", dataset.features
    image = options.choose_image(features, where)
    usual = [column for column in features if column.strip().lower() in USUAL_NAMES["caption"]]
    lists = [column for column in usual if _is_list(features[column])]
    caption = options.choose("caption", features, where, by_type=lists)
    if features[caption] not in TEXT and not _is_list(features[caption]):
        raise ValueError(
            f"{where} has no texts in the column {caption!r}, which is of type {features[caption]}. Set "
            f"caption_column_name to the right column: {joined(features)}."
        )
    return take_columns(dataset, {image: "image", caption: "caption"})


def _is_list(feature: object) -> bool:
    return isinstance(feature, List | LargeList) and feature.feature in TEXT


def _merge_rows(split: Dataset, name: str) -> Dataset:
    """Merge the captions of rows with the same image."""
    first: dict[object, int] = {}
    captions: list[list[str]] = []
    for number, (key, value) in enumerate(zip(_keys(split), split["caption"], strict=True)):
        captions.append([])
        captions[first.setdefault(key, number)] += _as_list(value, f"Row {number} of {name}")
    # The column of captions is added before rows are selected: adding it to a selection would copy all images.
    merged = split.remove_columns("caption").add_column("captions", captions, feature=CAPTIONS)
    return merged if len(first) == len(merged) else merged.select(list(first.values()))


def _keys(split: Dataset) -> Iterator[object]:
    """Yield a key that identifies the image of each row: the hash of its bytes, or its path."""
    for table in split.select_columns("image").with_format("arrow").iter(CHUNK_SIZE):
        columns = table.flatten()
        paths, contents = (columns[f"image.{part}"].to_pylist() for part in ("path", "bytes"))
        for path, content in zip(paths, contents, strict=True):
            yield path if content is None else blake2b(content).digest()
