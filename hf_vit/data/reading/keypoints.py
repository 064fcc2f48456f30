"""Keypoint names, and pairs of keypoints that a horizontal flip swaps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers.utils import logging

from .files import joined, split_names


logger = logging.get_logger(__name__)
Pairs = tuple[tuple[int, int], ...]
OTHER_SIDE = {"left": "right", "right": "left", "l": "r", "r": "l"}
SIDE = re.compile("^(left|right)|(left|right)$")
# Matches the words of a keypoint name, including those in "LeftEye" and "REar"
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# OKS sigmas of the COCO person keypoints (https://cocodataset.org/#keypoints-eval)
PERSON_PARTS = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
PART_SIGMAS = (0.025, 0.035, 0.079, 0.072, 0.062, 0.107, 0.087, 0.089)
COCO_SIGMAS = {"nose": 0.026} | {
    f"{side}_{part}": sigma
    for part, sigma in zip(PERSON_PARTS, PART_SIGMAS, strict=True)
    for side in ("left", "right")
}
# Indices of the 68 iBUG face landmarks (https://ibug.doc.ic.ac.uk/resources/facial-point-annotations/). A horizontal
# flip reverses each group; the point in the middle of a group of odd length is its own mirror image.
NUM_FACE_POINTS = 68
FACE_RUNS = (
    range(0, 17), range(17, 27), range(31, 36), (36, 37, 38, 39, 42, 43, 44, 45), (41, 40, 47, 46), range(48, 55),
    range(55, 60), range(60, 65), range(65, 68)
)  # fmt: skip


@dataclass(frozen=True)
class KeypointNames:
    """The names of K keypoints, and pairs of keypoint indices that are connected by a line in visualizations."""

    names: tuple[str, ...]
    skeleton: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"Several keypoints are named {', '.join(map(repr, twice))}. Rename them.")
        if wrong := [pair for pair in self.skeleton if not all(0 <= end < len(self.names) for end in pair)]:
            start, end = wrong[0]
            raise ValueError(
                f"The skeleton connects the keypoints {start + 1} and {end + 1}, but keypoint numbers are 1 to "
                f"{len(self.names)}. Correct the skeleton."
            )


def oks_sigmas_of(names: Sequence[str]) -> tuple[float, ...] | None:
    """Return the OKS sigmas of COCO if the names are its 17 person keypoints in any order, otherwise `None`."""
    if sorted(names) != sorted(COCO_SIGMAS):
        return None
    return tuple(COCO_SIGMAS[name] for name in names)


def flip_pairs_of(names: Sequence[str], given: Sequence[str | Sequence[str]] | None = None) -> Pairs:
    """Return the sorted pairs of keypoint indices that a horizontal flip swaps.

    Args:
        names: Names of the keypoints. By default, pairs are found by names such as "left_eye" and "right_eye",
            "Left Eye", "leftear", "L_ear", or "eyeR". The 68 iBUG face landmarks have predefined pairs.
        given: Pairs of names or indices, such as "left_eye,right_eye" or "1,2"; an empty list for no pairs.
    """
    if given is not None:
        return _given_pairs(names, given)
    places = {_words(name): number for number, name in enumerate(names)}
    mirrored = {number: places.get(_mirrored(name)) for number, name in enumerate(names)}
    pairs = tuple((number, other) for number, other in mirrored.items() if other is not None and number < other)
    numbered = [pair for pair in pairs if names[pair[0]][-1].isdecimal()]
    if len(names) == NUM_FACE_POINTS and numbered == list(pairs):
        logger.warning(
            "The 68 keypoints are assumed to be iBUG face landmarks when flipping images. If this is wrong, set "
            "flip_pairs."
        )
        runs = [tuple(run) for run in FACE_RUNS]
        opposite = {(*sorted(pair),) for run in runs for pair in zip(run, reversed(run), strict=True)}
        return tuple(sorted((start, end) for start, end in opposite if start < end))
    alone = [
        name for number, name in enumerate(names) if _mirrored(name) and not any(number in pair for pair in pairs)
    ]
    if alone:
        logger.warning(
            "No keypoint is the left or right counterpart of %s. Set flip_pairs, or disable flips.", joined(alone)
        )
    if numbered:
        examples = joined([f"{names[start]},{names[end]}" for start, end in numbered])
        logger.warning(
            "A horizontal flip swaps keypoints of equal numbers: %s. If this is wrong, set flip_pairs.", examples
        )
    if not pairs:
        logger.warning(
            "No keypoint name contains left or right, so horizontal flips swap no keypoints. If this is wrong, set "
            "flip_pairs."
        )
    return pairs


def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in WORDS.findall(name))


def _mirrored(name: str) -> tuple[str, ...]:
    """Return the words of a keypoint name with left and right swapped; empty if the name contains neither."""
    words = _words(name)
    swapped = tuple(OTHER_SIDE.get(word, word) for word in words)
    if swapped == words:
        # The side may be part of a word, as in "leftear".
        swapped = tuple(SIDE.sub(lambda side: OTHER_SIDE[side[0]], word) for word in words)
    return swapped if swapped != words else ()


def _given_pairs(names: Sequence[str], given: Sequence[str | Sequence[str]]) -> Pairs:
    numbers = {name: number for number, name in enumerate(names)}
    numbers |= {str(number): number for number in range(len(names)) if str(number) not in numbers}
    pairs = []
    for pair in given:
        ends = [numbers.get(word) for word in (split_names(pair) if isinstance(pair, str) else pair)]
        if len(ends) != 2 or None in ends or ends[0] == ends[1]:
            text = pair if isinstance(pair, str) else ",".join(pair)
            raise ValueError(
                f"flip_pairs contains {text!r}, which is not a pair of keypoints such as 'left_eye,right_eye' or "
                f"'1,2'. The keypoints are {joined(names)}."
            )
        pairs.append(tuple(sorted(number for number in ends if number is not None)))
    paired = [number for pair in pairs for number in pair]
    if twice := sorted({names[number] for number in paired if paired.count(number) > 1}):
        raise ValueError(f"flip_pairs contains {joined(twice)} more than once. Put each keypoint into one pair only.")
    return tuple(sorted((first, second) for first, second in pairs))
