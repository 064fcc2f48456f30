"""Which class a label means, where not all labels are there to be looked at together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from datasets import ClassLabel, Dataset

from .labels import INTEGERS, UNLABELLED
from .wording import listed


@dataclass(frozen=True)
class ClassNumbers:
    """The classes of a data set.

    Args:
        names: What the classes are called, in their order.
        numbers: The class of each label, by its text.
    """

    names: tuple[str, ...]
    numbers: Mapping[str, int]

    def __post_init__(self) -> None:
        """Raises `ValueError` if there are fewer than two classes, or one is there twice."""
        if len(self.names) < 2:
            raise ValueError(f"The classes are {listed(self.names)}, but there must be at least 2.")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"Of the classes {listed(self.names)} two have one name. Rename them.")

    def number(self, label: object, file: str) -> int:
        """Returns the class of a label.

        Raises:
            ValueError: if it is missing, or of no class, with `file`, what the label is of.
        """
        if label in UNLABELLED:
            raise ValueError(f"{file} has no label, but {label!r}. Label it, or leave it out of the data.")
        number = self.numbers.get(str(label).strip())
        if number is None:
            raise ValueError(
                f"{file} has the label {label!r}, which is of none of the {len(self.names)} classes "
                f"{listed(self.names)}. Correct it, or name all classes with class_names."
            )
        return number

    def relabelled(self, split: Dataset) -> Dataset:
        """Returns a split whose column `label` numbers these classes; its column `file` names the images.

        Raises:
            ValueError: if a label is missing, or of no class.
        """
        numbers = [self.number(label, file) for label, file in zip(split["label"][:], split["file"][:], strict=True)]
        # A new column rather than a cast, which would copy all images.
        return split.remove_columns("label").add_column("label", numbers, feature=ClassLabel(names=list(self.names)))


def known_classes(feature: object, names: Sequence[str]) -> ClassNumbers | None:
    """Returns the classes that the type of a column of labels tells, or that are given by name.

    Args:
        feature: The type. Whole numbers are places in `names`.
        names: Class names, if they are known.

    Returns:
        The classes; `None` where all labels must be looked at to know them.

    Raises:
        ValueError: if the names are not those of the type.
    """
    if isinstance(feature, ClassLabel):
        if names and list(names) != feature.names:
            raise ValueError(
                f"class_names says {listed(names)}, but the data call their classes {listed(feature.names)}. Leave "
                "class_names out."
            )
        return _in_order(feature.names)
    if not names:
        return None
    if feature in INTEGERS:
        return _in_order(names)
    return ClassNumbers(tuple(names), {name: number for number, name in enumerate(names)})


def classes_among(labels: Iterable[object]) -> ClassNumbers:
    """Returns the classes that occur, named by their labels, in the order of numbers or else of the alphabet."""
    found = {str(label).strip() for label in labels if label not in UNLABELLED}
    names = sorted(found, key=int if all(name.isdecimal() for name in found) else None)
    return ClassNumbers(tuple(names), {name: number for number, name in enumerate(names)})


def _in_order(names: Sequence[str]) -> ClassNumbers:
    return ClassNumbers(tuple(names), {str(number): number for number in range(len(names))})
