"""Data sets for image classification, from wherever a user has them."""

from pathlib import Path

from datasets import DatasetDict

from .columns import image_and_label
from .files import with_files
from .idx import find_idx, load_idx
from .image_folder import has_class_folders, load_image_folder
from .labels import with_class_labels
from .parquet import find_parquet, load_parquet
from .stored import check_revision, is_saved, load_from_hub, load_saved
from .table import TABLE_SUFFIXES, find_tables, list_tables, load_tables
from .tar_shards import TAR_SUFFIXES, find_tars, from_tars, load_tars


def load_image_classification(
    source: str,
    *,
    dataset_config_name: str | None = None,
    dataset_revision: str | None = None,
    image_column_name: str | None = None,
    label_column_name: str | None = None,
) -> DatasetDict:
    """Loads images with one label each, whatever the form in which they lie on disk or on the Hub.

    `source` is, recognised by what is there and in this order:

    - a folder with the idx files of MNIST, Fashion-MNIST, EMNIST, ..., packed or not, also in `MNIST/raw/`; files
      called `emnist-...` hold their images transposed, and are turned upright;
    - a parquet file, or a folder of them, also in `data/`; the split is a word of the file's name as in
      `train-00000-of-00001.parquet`, or of its folder's;
    - a folder written by `Dataset.save_to_disk`;
    - a tar file of WebDataset, or a folder of them and of no images, with `.cls`, `.json` or `.txt` beside each image;
      numbers in `.cls` are named by a `classes.txt` or `id2label.json` that lies there;
    - a table (.csv, .tsv, .jsonl) of paths, relative to it, and labels, or a folder with `train.csv`, `test.csv`, ...,
      or with `metadata.csv`, there or in `train/`, `test/`, ...; a column `split` says the split, where there is one;
    - a folder with `train/`, `test/`, ... and therein one folder of images per class, or the class folders alone;
      a `test/` of images without a class is left out;
    - if no such path exists, the name of a dataset on the Hub.

    Splits are found under "train", "training", "validation", "valid", "val", "dev", "test" and "testing".

    Args:
        source: Path, or name on the Hub.
        dataset_config_name: Configuration of a dataset on the Hub, or which of several sets of idx files.
        dataset_revision: Branch, tag or commit on the Hub.
        image_column_name: Column of images or of their paths, where neither type nor name say it.
        label_column_name: Column of labels, where neither type nor name say it.

    Returns:
        Those of the splits "train", "validation" and "test" that exist, each with the columns `image`
        (`datasets.Image`), `label` (`datasets.ClassLabel`, the same for all splits) and `file` (the path of the image,
        or the one beside its bytes, else "image 17 of train"). Image files are not opened.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are wrong in any way that shows without opening the images.
    """
    path = Path(source).expanduser()
    if not path.exists():
        found = load_from_hub(source, dataset_config_name, dataset_revision)
        splits = _two_columns(found, image_column_name, label_column_name)
    else:
        check_revision(path, dataset_revision)
        splits = _load_path(path, dataset_config_name, image_column_name, label_column_name)
    return with_files(with_class_labels(splits))


def load_stored(path: Path, config_name: str | None) -> DatasetDict | None:
    """Opens idx files, parquet files, a saved data set or tar shards; None where there are none.

    Raises:
        ValueError: if `config_name` chooses among idx files that are not there.
    """
    if idx_files := find_idx(path, config_name):
        return load_idx(idx_files)
    if config_name is not None:
        raise ValueError(
            f"dataset_config_name={config_name!r} chooses on the Hub or among idx files; {path} is neither."
        )
    if parquet_files := find_parquet(path):
        return load_parquet(parquet_files)
    if is_saved(path):
        return load_saved(path)
    tar_files = find_tars(path)
    return load_tars(path, tar_files) if tar_files else None


def _load_path(path: Path, config_name: str | None, image_column: str | None, label_column: str | None) -> DatasetDict:
    if stored := load_stored(path, config_name):
        splits = stored
    elif tables := find_tables(path):
        return load_tables(tables, image_column, label_column)
    elif path.is_file():
        known = ", ".join((".parquet", *TABLE_SUFFIXES, *TAR_SUFFIXES))
        raise ValueError(f"{path} is a file of unknown kind. Give one of {known}, or a folder; unpack archives first.")
    elif not has_class_folders(path) and (loose := list_tables(path)):
        names = " or ".join(repr(str(table)) for table in loose)
        raise ValueError(
            f"{path} holds a table whose name says no split. Give the table rather than its folder: {names}."
        )
    else:
        splits = load_image_folder(path)
    return _two_columns(splits, image_column, label_column)


def _two_columns(splits: DatasetDict, image_column: str | None, label_column: str | None) -> DatasetDict:
    reduced = DatasetDict({name: from_tars(split, label_column) for name, split in splits.items()})
    return image_and_label(reduced, image_column, label_column)
