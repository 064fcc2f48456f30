"""Select the columns of images and targets in datasets, and read tables of image paths (CSV, TSV, JSON lines)."""

import csv
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

from datasets import Dataset, DatasetDict, Image, Value

from .files import check_exist, images_at, joined, local_path, parse_json, read_text
from .splits import SPLIT_NAMES, order_splits, split_of


Columns = Mapping[str, tuple[Any, Any]]  # maps the name of a column to its cells and their feature type
LABEL_NAMES = ("label", "labels")
ANNOTATION_NAMES = ("annotation", "annotations")
USUAL_NAMES = {
    "image": ("image", "img", "image_path", "path", "file", "filename", "file_name"),
    "label": (*LABEL_NAMES, "class", "category", "target", "fine_label", "coarse_label"),
    "mask": ("mask", *LABEL_NAMES, *ANNOTATION_NAMES, "segmentation", "segmentation_mask", "semantic_mask"),
    "objects": ("objects", "object", *ANNOTATION_NAMES[::-1]),
    "depth": ("depth", "depth_map", "depths", *LABEL_NAMES),
    "caption": ("caption", "captions", "text", "texts", "sentence", "sentences", "description", "descriptions"),
}


class SourceKeywords(TypedDict, total=False):
    """Keyword arguments that all data loaders accept, see `SourceOptions`."""

    dataset_config_name: str | None
    dataset_revision: str | None
    image_column_name: str | None
    data_format: str | None


@dataclass(frozen=True)
class SourceOptions:
    """Location of a dataset and names of its columns.

    Args:
        source: Path, or name of a dataset on the Hub.
        target_column: Column of labels, masks, depth maps, objects or captions; by default found by type or name.
        dataset_config_name: Configuration of a dataset on the Hub.
        dataset_revision: Branch, tag or commit on the Hub.
        image_column_name: Column of images or of their paths; by default found by type or name.
        data_format: Name of the format, if several fit; a key of a table in `hf_vit/data/formats/__init__.py`.
    """

    source: str
    target_column: str | None = None
    dataset_config_name: str | None = None
    dataset_revision: str | None = None
    image_column_name: str | None = None
    data_format: str | None = None

    @property
    def path(self) -> Path:
        """The source as a path, which may not exist."""
        return Path(self.source).expanduser()

    @property
    def hub(self) -> dict[str, str | None]:
        """The configuration and the revision as arguments of `datasets.load_dataset`."""
        return {"name": self.dataset_config_name, "revision": self.dataset_revision}

    def check_no_hub_options(self) -> None:
        """Raise `ValueError` if an option for datasets on the Hub is given for data on disk."""
        for name in ("dataset_revision", "dataset_config_name"):
            if (value := vars(self)[name]) is not None:
                raise ValueError(
                    f"{name}={value!r} applies to datasets on the Hub only, but {self.path} is a local path. Remove "
                    "this option."
                )

    def choose(self, kind: str, columns: Collection[str], where: str, by_type: Collection[str] = ()) -> str:
        """Return the column given by the user, or else the only column of the right type or with a usual name.

        Args:
            kind: Content of the column, a key of `USUAL_NAMES`.
            columns: Names of all columns.
            where: Name of the data, at the start of error messages.
            by_type: Names of the columns of the right type.
        """
        given = self.image_column_name if kind == "image" else self.target_column
        option, known = f"{kind}_column_name", joined(columns)
        if given is not None:
            if given not in columns:
                raise ValueError(f"{where} has no column {given!r}, only {known}. Set {option} to one of them.")
            return given
        names = USUAL_NAMES[kind]
        found = list(by_type) or [column for column in columns if column.strip().lower() in names]
        if not found:
            raise ValueError(
                f"{where} has no column with a usual name ({', '.join(names)}), only {known}. Set {option} to one of "
                "these columns."
            )
        if len(found) > 1:
            raise ValueError(f"{where} has several possible columns: {joined(found)}. Set {option} to one of them.")
        return found[0]

    def choose_image(self, features: Mapping[str, object] | None, where: str) -> str:
        """Choose the column of encoded images by column types. `features` is `None` for streams without types."""
        if features is None:
            raise ValueError(
                f"{where} of the stream does not declare its columns, which is the case for CSV and JSON files. "
                "Disable streaming, or store the images as parquet files."
            )
        images = [name for name, feature in features.items() if isinstance(feature, Image)]
        image = self.choose("image", features, where, by_type=images)
        if not can_hold_images(features[image]):
            raise ValueError(
                f"{where} has no encoded images in the column {image!r}, which is of type {features[image]}. Set "
                f"image_column_name to the right column: {joined(features)}."
            )
        return image


def take_columns(dataset: Any, columns: Mapping[str, str]) -> Any:
    """Select and rename columns of a `Dataset` or `IterableDataset`, and cast "image" to `datasets.Image`.

    The argument `columns` maps old names to new names.
    """
    # Columns that keep their name are omitted, because streams do not allow renaming a column to its own name.
    new_names = {old: new for old, new in columns.items() if old != new}
    dataset = dataset.select_columns(list(columns)).rename_columns(new_names)
    return dataset if dataset.features["image"] == Image() else dataset.cast_column("image", Image())


def take_from(
    splits: Mapping[str, Any], take: Callable[[Any, str, SourceOptions], Any], options: SourceOptions
) -> DatasetDict:
    """Select columns of each split by a function, whose arguments are the split, its name, and `options`."""
    return DatasetDict({name: take(split, name, options) for name, split in splits.items()})


def image_and_target(split: Dataset, name: str, options: SourceOptions, target: str) -> Dataset:
    """Select the column `image` and the column of the encoded targets, "mask" or "depth", of a split."""
    where = f"The split {name!r}"
    candidates = [column for column, feature in split.features.items() if can_hold_images(feature)]
    if len(candidates) < 2:
        raise ValueError(
            f"{where} has {len(candidates)} columns of encoded images, but needs one of images and one of {target}s. "
            f"Its columns are {joined(split.features)}."
        )
    of_targets = options.choose(target, candidates, where)
    others = [column for column in candidates if column != of_targets]
    image = options.choose("image", others, where, by_type=others)
    return take_columns(split, {image: "image", of_targets: target}).cast_column(target, Image(decode=False))


def can_hold_images(feature: object) -> bool:
    """Return whether a column of this type can hold encoded images."""
    # Files written without the metadata of `datasets` contain plain bytes, or structs of bytes and a path.
    if isinstance(feature, dict):
        return "bytes" in feature
    return isinstance(feature, Image) or feature in (Value("binary"), Value("large_binary"))


MISSING = "do not exist. Paths must be relative to the folder of their table. Missing images"
DELIMITERS = ",;\t"


@dataclass(frozen=True)
class TableRow:
    """A row of a table: its table, split, image path, values by column, and its name in error messages (`where`)."""

    table: Path
    split: str
    image: str
    cells: Mapping[str, Any]
    where: str


def read_rows(table: Path, table_split: str, options: SourceOptions) -> list[TableRow]:
    """Read the rows of a table that contains image paths, relative to its folder, and optionally a column `split`."""
    rows = read_table(table)
    column = options.choose("image", list(dict.fromkeys(chain.from_iterable(rows))), str(table))
    folder = table.parent.absolute()  # absolute paths stay valid if the working directory changes
    found = []
    for number, cells in enumerate(rows, start=1):
        where, split = f"{table}, row {number}", table_split
        if "split" in cells:
            named = split_of(str(cells["split"]))
            if named is None:
                raise ValueError(f"{where}, has the split {cells['split']!r}. Use one of {', '.join(SPLIT_NAMES)}.")
            split = named
        found.append(TableRow(table, split, str(local_path(folder, str(cells.get(column) or ""))), cells, where))
    return found


def columns_of(rows: Iterable[TableRow]) -> list[str]:
    """Return the names of the columns of all rows, without duplicates."""
    return list(dict.fromkeys(column for row in rows for column in row.cells))


def column_in_tables(
    tables: Sequence[Sequence[TableRow]],
    options: SourceOptions,
    kind: str,
    read_cell: Callable[[Any, str], Any],
    feature: Any,
    *,
    prefers_lists: bool = False,
) -> DatasetDict:
    """Return the images (opened on access) and one target column of tables.

    Args:
        tables: Rows of each table.
        options: Names of the columns.
        kind: Content and new name of the target column, a key of `USUAL_NAMES`.
        read_cell: Function that converts a cell to its value. Its second argument is the start of error messages.
        feature: Feature type of the values.
        prefers_lists: Whether a column of lists is preferred over other columns with usual names.
    """
    images, values = defaultdict[str, list[str]](list), defaultdict[str, list[Any]](list)
    for rows in tables:
        columns = columns_of(rows)
        usual = [column for column in columns if column.strip().lower() in USUAL_NAMES[kind]]
        lists = [column for column in usual if prefers_lists and isinstance(rows[0].cells.get(column), list)]
        column = options.choose(kind, columns, str(rows[0].table), by_type=lists)
        for row in rows:
            images[row.split].append(row.image)
            values[row.split].append(read_cell(row.cells.get(column), f"{row.where},"))
    check_exist([image for own in images.values() for image in own], MISSING, "images")
    return DatasetDict(
        {name: images_at(own, name, **{kind: (values[name], feature)}) for name, own in order_splits(images).items()}
    )


def columns_in_tables(tables: Iterable[Sequence[TableRow]]) -> tuple[DatasetDict, dict[str, Columns]]:
    """Return the images (opened on access) and all columns of tables, by split."""
    rows = defaultdict[str, list[TableRow]](list)
    for row in chain.from_iterable(tables):
        rows[row.split].append(row)
    check_exist([row.image for own in rows.values() for row in own], MISSING, "images")
    splits = order_splits(rows)
    return DatasetDict({split: images_at([row.image for row in own], split) for split, own in splits.items()}), {
        split: {name: ([row.cells.get(name) for row in own], Value("string")) for name in columns_of(own)}
        for split, own in splits.items()
    }


def read_table(table: Path) -> list[dict[str, Any]]:
    """Read the rows of a table; raise `ValueError` if it has none."""
    text = read_text(table)
    rows = list(_parse_jsonl(text, table)) if table.suffix.lower() == ".jsonl" else _parse_csv(text, table)
    if not rows:
        raise ValueError(f"{table} has no rows. Add rows or remove the file.")
    return rows


def _parse_csv(text: str, file: Path) -> list[dict[str, Any]]:
    """Parse text with the delimiter (comma, semicolon or tab) that is most frequent in the header."""
    lines = text.splitlines(keepends=True)
    delimiter = max(DELIMITERS, key=lines[0].count) if lines else ","
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    header = list(filter(None, reader.fieldnames or ()))
    if several := sorted({name for name in header if header.count(name) > 1}):
        raise ValueError(f"{file} has several columns named {joined(several)}. Rename or remove duplicate columns.")
    rows = list(reader)
    # The CSV reader stores surplus cells under the key None and fills missing cells with None.
    if ragged := [number for number, row in enumerate(rows, start=1) if None in row or None in row.values()]:
        raise ValueError(
            f"{file} has {len(ragged)} rows with more or fewer cells than its header; the first is row {ragged[0]}. "
            "Quote cells that contain the delimiter."
        )
    return rows


def _parse_jsonl(text: str, file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield dict(parse_json(line))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{file}, line {number} is not a JSON object: {error}. Correct the line.") from error
