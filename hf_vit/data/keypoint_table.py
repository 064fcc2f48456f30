"""Objects with keypoints, the same from every source. Shapes: I images, N objects, K keypoints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from datasets import Dataset
from transformers.utils import logging

from .box_checks import ROUNDING, object_sizes
from .object_table import ObjectTable, beside, known_areas, list_of_four
from .wording import MAX_NAMED, in_lines


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class KeypointNames:
    """What a data set says of its K keypoints.

    Args:
        names: One each.
        skeleton: Pairs of numbers from 0, that a line joins in pictures.

    Raises:
        ValueError: if two have one name, or the skeleton has numbers of no keypoint.
    """

    names: tuple[str, ...]
    skeleton: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Checks names and numbers."""
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"Several keypoints are called {', '.join(map(repr, twice))}. Rename them.")
        if wrong := [pair for pair in self.skeleton if not all(0 <= end < len(self.names) for end in pair)]:
            start, end = wrong[0]
            raise ValueError(
                f"The skeleton joins the keypoints {start + 1} and {end + 1}, but they go from 1 to {len(self.names)}."
            )


@dataclass(frozen=True)
class KeypointTable:
    """The images of a split, and its objects with keypoints one after the other.

    Args:
        objects: Their images, boxes and areas.
        keypoints: (N, K, 3) float64, x, y in pixels and visibility: 0 (not labelled; x and y are 0), 1 (hidden) or 2.
    """

    objects: ObjectTable
    keypoints: np.ndarray

    @classmethod
    def of(cls, objects: ObjectTable, keypoints: np.ndarray) -> "KeypointTable":
        """Returns a table from keypoints (N, K, 3) in the order that objects had before they were sorted.

        Raises:
            ValueError: if a labelled keypoint is not finite, or a visibility is none of 0, 1 and 2.
        """
        keypoints = keypoints[objects.ids]
        visibility = keypoints[..., 2]
        is_labelled = visibility > 0
        wrong = ~np.isin(visibility, (0, 1, 2)) | (is_labelled & ~np.isfinite(keypoints).all(axis=2))
        if faults := _faults(objects, keypoints, wrong):
            raise ValueError(
                f"{len(faults)} keypoints are no numbers x, y and visibility 0 (not labelled), 1 (hidden) or 2:"
                f"{in_lines(faults, MAX_NAMED)}"
            )
        return cls(objects, np.where(is_labelled[..., None], keypoints, 0))

    def select(self, kept: np.ndarray) -> "KeypointTable":
        """Returns a table of some of the objects, (N,) bool."""
        return KeypointTable(self.objects.select(kept), self.keypoints[kept])


def _faults(objects: ObjectTable, keypoints: np.ndarray, wrong: np.ndarray) -> list[str]:
    return [
        f"keypoint {number + 1} of {objects.name_of(place)}: {keypoints[place, number].tolist()}"
        for place, number in np.argwhere(wrong).tolist()
    ]


def labelled_only(tables: Mapping[str, KeypointTable]) -> dict[str, KeypointTable]:
    """Leaves out objects without any labelled keypoint, and says how many."""
    kept = {split: np.any(table.keypoints[..., 2] > 0, axis=1) for split, table in tables.items()}
    if num_dropped := sum(int((~mask).sum()) for mask in kept.values()):
        total = sum(map(len, kept.values()))
        logger.warning("%d of %d objects have no labelled keypoint; they are left out.", num_dropped, total)
    return {split: table.select(kept[split]) for split, table in tables.items()}


def checked_keypoints(tables: Mapping[str, KeypointTable], box_errors: str) -> dict[str, KeypointTable]:
    """Returns tables whose labelled keypoints lie within their images, but for a pixel.

    Args:
        tables: Objects by split.
        box_errors: "raise" names those outside in an error, else they count as not labelled.

    Raises:
        ValueError: if some are outside and `box_errors` is "raise".
    """
    outside = {split: _outside(table) for split, table in tables.items()}
    faults = [
        fault for split, table in tables.items() for fault in _faults(table.objects, table.keypoints, outside[split])
    ]
    if faults and box_errors == "raise":
        raise ValueError(
            f"{len(faults)} labelled keypoints lie outside of their image:{in_lines(faults, MAX_NAMED)}\nRepair them, "
            "or set box_errors to 'clip' or 'drop', with which they count as not labelled."
        )
    if faults:
        logger.warning("%d keypoints lie outside of their image and count as not labelled.", len(faults))
    return {
        split: replace(table, keypoints=np.where(outside[split][..., None], 0, table.keypoints))
        for split, table in tables.items()
    }


def _outside(table: KeypointTable) -> np.ndarray:
    """Returns (N, K) bool."""
    places, sizes = table.keypoints[..., :2], object_sizes(table.objects)[:, None]
    # A pixel's centre is at its number, so an image goes from -0.5 to its length - 0.5.
    is_outside = ((places < -0.5 - ROUNDING) | (places > sizes - 0.5 + ROUNDING)).any(axis=2)
    return is_outside & (table.keypoints[..., 2] > 0)


def keypoint_rows(table: KeypointTable, images: Dataset) -> Dataset:
    """Returns one row an object: its image, `keypoints`, `box`, `area`, `image_id`, `width` and `height`.

    Args:
        table: N objects.
        images: The images of the table (I rows), with whatever columns.
    """
    objects, num_keypoints = table.objects, table.keypoints.shape[1]
    triples = pa.FixedSizeListArray.from_arrays(pa.array(table.keypoints.ravel(), pa.float32()), 3)
    offsets = np.arange(0, (len(objects) + 1) * num_keypoints, num_keypoints, dtype=np.int32)
    sizes = object_sizes(objects)
    return beside(
        _repeated(images, objects.image_numbers),
        {
            "keypoints": pa.ListArray.from_arrays(offsets, triples),
            "box": list_of_four(objects.boxes),
            "area": pa.array(known_areas(objects), pa.float32()),
            "image_id": objects.image_numbers,
            "width": sizes[:, 0],
            "height": sizes[:, 1],
        },
    )


def _repeated(images: Dataset, numbers: np.ndarray) -> Dataset:
    """Returns the rows of these numbers, of which some may be there several times."""
    encoded = images.select_columns("image").with_format("arrow")[:].flatten()["image.bytes"]
    if encoded.null_count < len(encoded):
        return images.select(numbers)  # what lies on disk stays there
    return Dataset(images.with_format("arrow")[:].take(numbers), info=images.info)
