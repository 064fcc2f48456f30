"""What each image is called, so that answers and errors lead back to it."""

from collections.abc import Sequence

from datasets import Dataset, DatasetDict, Features, Image, NamedSplit


def images_at(paths: Sequence[str], split: str) -> Dataset:
    """Returns a split with the column `image`, which opens its file on access."""
    return Dataset.from_dict({"image": list(paths)}, features=Features({"image": Image()}), split=NamedSplit(split))


def with_files(splits: DatasetDict) -> DatasetDict:
    """Adds the column `file`: the path of each image, or the one beside its bytes, else "image 17 of train".

    Args:
        splits: Datasets with the column `image` of type `datasets.Image`, numbered as their source is.
    """
    return DatasetDict({name: split.add_column("file", _files(split, name)) for name, split in splits.items()})


def _files(split: Dataset, name: str) -> list[str]:
    # As Arrow, which leaves the bytes of the images where they are.
    paths = split.select_columns("image").with_format("arrow")[:].flatten()["image.path"].to_pylist()
    return [path or f"image {number} of {name}" for number, path in enumerate(paths)]
