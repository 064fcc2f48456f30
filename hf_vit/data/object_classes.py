"""From the words or numbers that boxes are labelled with to the numbers of classes. Shapes: N objects."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from .class_list import NAME_FILES, read_class_file
from .wording import MAX_NAMED, in_lines, listed


def class_names_beside(folders: Sequence[Path], class_names: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of classes that are numbers.

    Args:
        folders: Where classes.txt or id2label.json may lie.
        class_names: The names, if not those of a file.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if there are no names, or a file is malformed.
    """
    files = [folder / name for folder in folders for name in NAME_FILES if (folder / name).is_file()]
    names = tuple(class_names or ()) or (tuple(read_class_file(files[0])[0]) if files else ())
    if not names:
        raise ValueError(
            "Classes are numbers, and their names are unknown. Give them as class_names, or in a file "
            f"{' or '.join(NAME_FILES)} beside the data."
        )
    return names


def without_class_names(class_names: Sequence[str] | None, source: object) -> None:
    """Raises `ValueError` if names of classes are given to data that name them."""
    if class_names:
        raise ValueError(f"{source} names its classes itself. Leave class_names={listed(class_names)} out.")


def check_numbers(numbers: np.ndarray, num_classes: int, describe: Callable[[int], str], source: object) -> None:
    """Raises `ValueError` if some objects are of no class.

    Args:
        numbers: (N,) whole numbers.
        num_classes: How many there are.
        describe: Says which object stands at a place.
        source: Where they are from.
    """
    wrong = np.flatnonzero((numbers < 0) | (numbers >= num_classes)).tolist()
    if wrong:
        faults = [f"{describe(place)}: class {numbers[place]}" for place in wrong]
        raise ValueError(
            f"{len(wrong)} of {len(numbers)} objects of {source} are of unknown classes; there are {num_classes}, "
            f"from 0:{in_lines(faults, MAX_NAMED)}"
        )


def numbered_words(
    words: Mapping[str, Sequence[str]], class_names: Sequence[str] | None
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Numbers classes that are words.

    Args:
        words: The class of each object, by split.
        class_names: All classes in order; by default those of "train", or else of the first split, sorted.

    Returns:
        Numbers (N,) by split, and the names.

    Raises:
        ValueError: if there are words that are no class.
    """
    first = "class_names" if class_names else next(iter(words))
    names = tuple(class_names or sorted(set(words[first])))
    numbers = {name: number for number, name in enumerate(names)}
    for split, found in words.items():
        if unknown := sorted(set(found) - set(names)):
            raise ValueError(
                f"The split {split!r} has objects of classes that {first!r} has not: {listed(unknown)}. Spell them "
                f"as there ({listed(names)}), or give all classes as class_names."
            )
    return {split: np.array([numbers[word] for word in found], np.int64) for split, found in words.items()}, names
