"""Names of keypoints, and the pairs of them that a mirror image swaps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers.utils import logging

from .files import listed, split_names


logger = logging.get_logger(__name__)
Pairs = tuple[tuple[int, int], ...]
OTHER_SIDE = {"left": "right", "right": "left", "l": "r", "r": "l"}
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # also of "LeftEye" and "REar"
# Of the keypoints of COCO's persons (https://cocodataset.org/#keypoints-eval)
PERSON_PARTS = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
PART_SIGMAS = (0.025, 0.035, 0.079, 0.072, 0.062, 0.107, 0.087, 0.089)
COCO_SIGMAS = {"nose": 0.026} | {
    f"{side}_{part}": sigma
    for part, sigma in zip(PERSON_PARTS, PART_SIGMAS, strict=True)
    for side in ("left", "right")
}
# The 68 points of a face as iBUG numbers them, from 0 (https://ibug.doc.ic.ac.uk/resources/facial-point-annotations/):
# runs of points whose mirror images run the other way. Those that are their own are in the middle.
NUM_FACE_POINTS = 68
FACE_RUNS = (
    range(0, 17), range(17, 27), range(31, 36), (36, 37, 38, 39, 42, 43, 44, 45), (41, 40, 47, 46), range(48, 55),
    range(55, 60), range(60, 65), range(65, 68)
)  # fmt: skip


@dataclass(frozen=True)
class KeypointNames:
    """The names of K keypoints, and pairs of numbers from 0 that a line joins in pictures."""

    names: tuple[str, ...]
    skeleton: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"Several keypoints are called {', '.join(map(repr, twice))}. Rename them.")
        if wrong := [pair for pair in self.skeleton if not all(0 <= end < len(self.names) for end in pair)]:
            start, end = wrong[0]
            raise ValueError(
                f"The skeleton joins the keypoints {start + 1} and {end + 1}, but they go from 1 to {len(self.names)}."
            )


def oks_sigmas_of(names: Sequence[str]) -> tuple[float, ...] | None:
    """Returns COCO's sigmas if the names are those of its 17 keypoints, in any order."""
    if sorted(names) != sorted(COCO_SIGMAS):
        return None
    return tuple(COCO_SIGMAS[name] for name in names)


def flip_pairs_of(names: Sequence[str], given: Sequence[str | Sequence[str]] | None = None) -> Pairs:
    """Finds the pairs of keypoints that a mirror image swaps, numbers from 0, ascending."""
    # Pairs are given by names or numbers from 0, as "left_eye,right_eye" or "1,2", an empty list for none. Else names
    # say it: "left_eye" and "right_eye", "Left Eye", "leftear", "L_ear", "eyeR", ... The 68 points of iBUG on a face
    # are known, as their numbers on the one side run against those on the other.
    if given is not None:
        return _given_pairs(names, given)
    places = {_words(name): number for number, name in enumerate(names)}
    mirrored = {number: places.get(_mirrored(name)) for number, name in enumerate(names)}
    pairs = tuple((number, other) for number, other in mirrored.items() if other is not None and number < other)
    numbered = [pair for pair in pairs if names[pair[0]][-1].isdecimal()]
    if len(names) == NUM_FACE_POINTS and numbered == list(pairs):
        logger.warning(
            "68 keypoints are taken for those of iBUG on a face, mirrored accordingly. Else give flip_pairs."
        )
        runs = [tuple(run) for run in FACE_RUNS]
        opposite = {(*sorted(pair),) for run in runs for pair in zip(run, reversed(run), strict=True)}
        return tuple(sorted((start, end) for start, end in opposite if start < end))
    alone = [
        name for number, name in enumerate(names) if _mirrored(name) and not any(number in pair for pair in pairs)
    ]
    if alone:
        logger.warning("No keypoint is the other side of %s. Give flip_pairs, or train without flips.", listed(alone))
    if numbered:
        examples = listed([f"{names[start]},{names[end]}" for start, end in numbered])
        logger.warning("Taken for mirror images by their numbers: %s. Give flip_pairs if they are not.", examples)
    if not pairs:
        logger.warning(
            "No keypoints are called left and right: a mirror image swaps none. Give flip_pairs if it does."
        )
    return pairs


def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in WORDS.findall(name))


def _mirrored(name: str) -> tuple[str, ...]:
    """Returns the words of what is on the other side; none if the name says no side."""
    words = _words(name)
    swapped = tuple(OTHER_SIDE.get(word, word) for word in words)
    if swapped == words:
        swapped = tuple(_with_other_side(word) for word in words)
    return swapped if swapped != words else ()


def _with_other_side(word: str) -> str:
    """Swaps the side that a word begins or ends with, as "leftear"."""
    for side, other in (("left", "right"), ("right", "left")):
        if word.startswith(side):
            return other + word.removeprefix(side)
        if word.endswith(side):
            return word.removesuffix(side) + other
    return word


def _given_pairs(names: Sequence[str], given: Sequence[str | Sequence[str]]) -> Pairs:
    numbers = {name: number for number, name in enumerate(names)}
    numbers |= {str(number): number for number in range(len(names)) if str(number) not in numbers}
    pairs = []
    for pair in given:
        ends = [numbers.get(word) for word in (split_names(pair) if isinstance(pair, str) else pair)]
        if len(ends) != 2 or None in ends or ends[0] == ends[1]:
            text = pair if isinstance(pair, str) else ",".join(pair)
            raise ValueError(
                f"flip_pairs has {text!r}, which is no pair as 'left_eye,right_eye' or '1,2' of the keypoints "
                f"{listed(names)}."
            )
        pairs.append(tuple(sorted(number for number in ends if number is not None)))
    paired = [number for pair in pairs for number in pair]
    if twice := sorted({names[number] for number in paired if paired.count(number) > 1}):
        raise ValueError(f"flip_pairs names {listed(twice)} more than once. A keypoint has one mirror image.")
    return tuple(sorted((first, second) for first, second in pairs))
