"""Images and what is written about them, from wherever a user has them."""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Image, LargeList, List, NamedSplit, Value

from ..datasets import TargetData
from ..formats.columns import USUAL_NAMES, choose_column, choose_image_column
from ..formats.files import with_files
from ..formats.splits import SPLITS
from ..formats.stored import load_columns
from ..formats.tables import check_exist, find_tables, read_table, split_of
from ..targets import caption_target


TEXT = (Value("string"), Value("large_string"))
CAPTIONS = List(Value("string"))
CHUNK_SIZE = 64  # images that are in memory at a time


def load_image_text(
    source: str,
    *,
    dataset_config_name: str | None = None,
    dataset_revision: str | None = None,
    image_column_name: str | None = None,
    caption_column_name: str | None = None,
) -> TargetData:
    """Loads images with one or several captions each.

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
        dataset_config_name: Configuration of a dataset on the Hub.
        dataset_revision: Branch, tag or commit on the Hub.
        image_column_name: Column of images or of their paths, where neither type nor name say it.
        caption_column_name: Column of captions, where its name is not a usual one ("caption", "text", ...). Of two of
            these, lists of captions go before single ones.

    Returns:
        Splits with the columns `image`, `captions` (a list) and `file`. No image is opened.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are wrong in any way that shows without opening the images.
    """
    columns = image_column_name, caption_column_name
    stored = load_columns(source, dataset_config_name, dataset_revision)
    splits = _load_tables(Path(source).expanduser(), *columns) if stored is None else _merge_stored(stored, *columns)
    return TargetData(splits, caption_target)


def _load_tables(path: Path, image_column: str | None, caption_column: str | None) -> DatasetDict:
    tables = find_tables(path)
    if not tables:
        raise ValueError(
            f"{path} holds no captions. Put a metadata.jsonl with lines like "
            '{"file_name": "1.jpg", "text": "a dog runs"} beside the images, in train/, val/, ..., or give a table '
            "or a parquet file of images and captions."
        )
    captions: dict[str, dict[str, list[str]]] = {}
    for table_split, table in tables.items():
        for split, image, texts in _rows(table, table_split, image_column, caption_column):
            captions.setdefault(split, {}).setdefault(image, []).extend(texts)
    check_exist([image for images in captions.values() for image in images])
    features = Features({"image": Image(), "captions": CAPTIONS})
    return with_files(
        DatasetDict(
            {
                split: Dataset.from_dict(
                    {"image": list(captions[split]), "captions": list(captions[split].values())},
                    features=features,
                    split=NamedSplit(split),
                )
                for split in SPLITS
                if split in captions
            }
        )
    )


def _rows(
    table: Path, table_split: str, image_column: str | None, caption_column: str | None
) -> Iterator[tuple[str, str, list[str]]]:
    """Yields split, path and captions of each row."""
    rows = read_table(table)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    image_column = choose_column("image_column_name", image_column, columns, str(table))
    lists = _usual(column for column in columns if isinstance(rows[0].get(column), list))
    caption_column = choose_column("caption_column_name", caption_column, columns, str(table), by_type=lists)
    folder = table.parent.absolute()  # the dataset outlives the working directory
    for number, row in enumerate(rows, start=1):
        where = f"{table}, row {number},"
        image = str(folder / str(row.get(image_column) or ""))
        yield split_of(row, table_split, where), image, _as_list(row.get(caption_column), where)


def _usual(columns: Iterator[str]) -> list[str]:
    return [column for column in columns if column.strip().lower() in USUAL_NAMES["caption_column_name"]]


def _as_list(value: Any, where: str) -> list[str]:
    """Returns the captions of a row; one that is missing is empty."""
    captions = value if isinstance(value, list) else [value]
    if not all(caption is None or isinstance(caption, str) for caption in captions):
        raise ValueError(f"{where} has {value!r} for a caption. Give a text, or a list of texts.")
    return [caption or "" for caption in captions]


def _merge_stored(splits: DatasetDict, image_column: str | None, caption_column: str | None) -> DatasetDict:
    """Brings splits of any columns to one row for each image."""
    chosen = DatasetDict(
        {
            name: _two_columns(split, f"The split {name!r}", image_column, caption_column)
            for name, split in splits.items()
        }
    )
    return DatasetDict({name: _merge_rows(split, name) for name, split in with_files(chosen).items()})


def _two_columns(dataset: Dataset, where: str, image_column: str | None, caption_column: str | None) -> Dataset:
    features = dataset.features
    image = choose_image_column(features, image_column, where)
    lists = _usual(name for name, feature in features.items() if _is_list(feature))
    caption = choose_column("caption_column_name", caption_column, features, where, by_type=lists)
    if features[caption] not in TEXT and not _is_list(features[caption]):
        raise ValueError(
            f"{where} has no texts in the column {caption!r}, which is of type {features[caption]}. Name the right "
            f"one with caption_column_name; there are {_types(features)}."
        )
    dataset = dataset.select_columns([image, caption]).rename_columns({image: "image", caption: "caption"})
    return dataset if dataset.features["image"] == Image() else dataset.cast_column("image", Image())


def _is_list(feature: object) -> bool:
    return isinstance(feature, List | LargeList) and feature.feature in TEXT


def _types(features: Mapping[str, object]) -> str:
    return ", ".join(f"{name!r} ({type(feature).__name__})" for name, feature in features.items())


def _merge_rows(split: Dataset, name: str) -> Dataset:
    """Joins the captions of the rows that have one image."""
    first: dict[object, int] = {}
    captions: list[list[str]] = []
    for number, (key, value) in enumerate(zip(_keys(split), split["caption"], strict=True)):
        captions.append([])
        captions[first.setdefault(key, number)] += _as_list(value, f"Row {number} of {name}")
    # Before rows are left out: a column that is added later copies all images.
    merged = split.remove_columns("caption").add_column("captions", captions, feature=CAPTIONS)
    return merged if len(first) == len(merged) else merged.select(list(first.values()))


def _keys(split: Dataset) -> Iterator[object]:
    """Yields what tells the image of each row from others: a digest of its bytes, or its path."""
    for table in split.select_columns("image").with_format("arrow").iter(CHUNK_SIZE):
        columns = table.flatten()
        paths, contents = (columns[f"image.{part}"].to_pylist() for part in ("path", "bytes"))
        for path, content in zip(paths, contents, strict=True):
            yield path if content is None else blake2b(content).digest()
