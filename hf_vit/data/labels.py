"""From numbers, words or names of any dataset to one list of classes for all its splits."""

from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Value
from transformers.utils import logging

from .wording import listed


logger = logging.get_logger(__name__)

# How data sets say that an example has no label: -1 on the Hub, an empty cell in a table.
UNLABELLED = (None, "", -1, "-1")
INTEGERS = [Value(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
LABEL_TYPES = [*INTEGERS, Value("string"), Value("large_string"), Value("bool")]


def with_class_labels(splits: DatasetDict) -> DatasetDict:
    """Gives the column `label` of all splits the same type, one `datasets.ClassLabel`.

    The classes are those of "train", or of the first split where there is none. Named classes keep their order; others
    are named by their values, in the order of numbers if all are numbers, else in that of the alphabet.

    Args:
        splits: Datasets with the column `label`: a `ClassLabel`, whole numbers or words.

    Returns:
        The splits, without those that have no label at all, as test sets are often published: these are left out with
        a warning.

    Raises:
        ValueError: if a split is empty, a label is missing or out of range, a class occurs in another split but not in
            "train", or there are fewer than two classes to train on.
    """
    labels: dict[str, list[str]] = {}
    for name, split in splits.items():
        values = split["label"][:]
        if not values:
            raise ValueError(f"The split {name!r} is empty. Fill it or leave it out.")
        if name != "train" and all(value in UNLABELLED for value in values):
            logger.warning("The split %r has no labels, all are -1 or empty; it is left out.", name)
        else:
            labels[name] = _names_of(values, split.features["label"], name)
    if not labels:
        raise ValueError(f"No split has labels: {', '.join(splits)}.")
    first = next(iter(labels))
    classes = _classes(splits[first].features["label"], labels[first], first)
    for name, names in labels.items():
        _check_known(names, classes, name, first)
    return DatasetDict({name: _relabelled(splits[name], names, classes) for name, names in labels.items()})


def _names_of(values: list[Any], feature: object, split: str) -> list[str]:
    """Returns the class of each example, by name."""
    names: list[str | None]
    if isinstance(feature, ClassLabel):
        known = dict(enumerate(feature.names))
        names = [known.get(value) for value in values]
        hint = f"They go from 0 to {len(known) - 1}, as there are {len(known)} classes."
    elif feature in LABEL_TYPES:
        names = [None if value in UNLABELLED else str(value) for value in values]
        hint = "Label these examples or leave them out."
    else:
        raise ValueError(
            f"The labels of the split {split!r} are of type {feature}, but a label is a class number or a word. Name "
            "the right column with label_column_name."
        )
    if wrong := [index for index, name in enumerate(names) if name is None]:
        raise ValueError(
            f"{len(wrong)} of {len(values)} labels of the split {split!r} are missing or out of range; the first is "
            f"{values[wrong[0]]!r} at index {wrong[0]}. {hint}"
        )
    return [name for name in names if name is not None]


def _classes(feature: object, names: list[str], split: str) -> list[str]:
    """Returns the names of all classes in order, and warns of those without an example."""
    occurring = set(names)
    if isinstance(feature, ClassLabel):
        classes = feature.names
        if missing := [name for name in classes if name not in occurring]:
            logger.warning("The split %r has no example of %s: a model cannot learn them.", split, listed(missing))
    else:
        classes = sorted(occurring, key=int if all(name.isdecimal() for name in occurring) else None)
    if split == "train" and len(occurring) < 2:
        raise ValueError(f"All labels of the split {split!r} are {names[0]!r}, but there must be at least 2 classes.")
    return classes


def _check_known(names: list[str], classes: list[str], split: str, first: str) -> None:
    occurring = set(names)
    if unknown := sorted(occurring - set(classes)):
        missing = [name for name in classes if name not in occurring]
        raise ValueError(
            f"The labels of the splits differ. Only in {split!r}: {listed(unknown)}. Only in {first!r}: "
            f"{listed(missing) if missing else 'none'}. A model can only name what it was trained on: spell them the "
            f"same, or give {first!r} examples of them."
        )


def _relabelled(dataset: Dataset, names: list[str], classes: list[str]) -> Dataset:
    feature = ClassLabel(names=classes)
    if dataset.features["label"] == feature:
        return dataset
    numbers = {name: number for number, name in enumerate(classes)}
    # A new column rather than a cast, which would copy all images.
    return dataset.remove_columns("label").add_column("label", [numbers[name] for name in names], feature=feature)
