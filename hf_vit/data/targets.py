"""Read the targets of dataset rows: masks, depth maps, boxes, keypoints, labels, and captions.

Shapes: H and W height and width in pixels, M masks, N objects, K keypoints.
"""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets.utils.file_utils import xopen
from huggingface_hub import constants
from torch import Tensor

from ..model.image_inputs import decode_image, download
from ..model.image_targets import IGNORED_LABEL, INDEX_MODES
from .reading.classes import ClassList, color_table, index_table
from .reading.files import NPY_START, joined


def encoded_bytes(encoded: Mapping[str, Any] | None, what: str) -> bytes:
    """Return the bytes of a cell of type `datasets.Image(decode=False)`. `what` names it in error messages."""
    path, content = (encoded["path"], encoded["bytes"]) if encoded is not None else (None, None)
    if content is not None:
        return bytes(content)
    if path is None:
        raise ValueError(f"{what} is missing. Add it, or remove its row.")
    # Files on the Hub may need an access token, which `xopen` sends.
    if path.startswith(("http://", "https://")) and not path.startswith(constants.ENDPOINT):
        return download(path)
    if "://" in path:  # In a streamed dataset, this is the path of a remote file.
        with xopen(path, "rb") as stream:
            return bytes(stream.read())
    return Path(path).read_bytes()


MILLIMETERS = 1000.0  # number of millimeters per meter
DEPTH_MODES = ("I", "I;16", "I;16B", "I;16L", "F")
Source = str | PathLike[str] | bytes


def read_mask(source: Source, classes: ClassList, name: str = "mask") -> Tensor:
    """Read a semantic segmentation mask.

    Args:
        source: Path or content of an image. It contains either class numbers in one channel, with 255 for unlabeled
            pixels (PIL modes 1, L, P, I;16, and I; the colors of P are ignored), or RGB colors of `classes.colors`.
        classes: Classes that the numbers or colors stand for.
        name: Name of the mask in error messages.

    Returns:
        (H, W) int64 class numbers, 255 for unlabeled pixels.

    Raises:
        OSError: if the source is not an image or is damaged.
        ValueError: if the mask contains unknown class numbers or colors.
    """
    pixels, mode = _read_pixels(source, name)
    if mode in INDEX_MODES:
        table, values = index_table(classes), pixels.astype(np.uint8) if mode == "1" else pixels
        if mode == "I" and not 0 <= values.min() <= values.max() < len(table):
            raise ValueError(
                f"{name} has values from {values.min()} to {values.max()}. Class numbers must be 0 to 254."
            )
    elif mode in ("RGB", "RGBA"):
        if not classes.colors:
            raise ValueError(
                f"{name} has colors (mode {mode}), but no palette is given. Put a file palette.txt with one line "
                "'name 255 0 128' per class next to the splits, or save class numbers in one channel."
            )
        table, values = color_table(classes), _pack(pixels, (16, 8, 0))
    else:
        raise ValueError(f"{name} has the mode {mode}. Save masks as class numbers in one channel, or as RGB colors.")
    labels = table[values]
    if not labels.all():
        unknown = np.unique(values[labels == 0]).tolist()
        raise ValueError(f"{name} has {_unknown_in_words(unknown, mode)}.")
    return torch.from_numpy(labels).long() - 1


def _unknown_in_words(unknown: list[int], mode: str) -> str:
    if mode in INDEX_MODES:
        return f"the labels {joined(unknown)}, which are outside the class list (255 marks unlabeled pixels)"
    colors = [(code >> 16, code >> 8 & 255, code & 255) for code in unknown]
    return f"the colors {joined(colors)}, which are not in the palette"


def read_segment_ids(source: Source, name: str = "panoptic mask") -> np.ndarray:
    """Read a mask in COCO panoptic format, which encodes the segment id of a pixel as R + 256 G + 65536 B.

    Args:
        source: Path or content of an RGB image.
        name: Name of the mask in error messages.

    Returns:
        (H, W) int32 segment id of each pixel; 0 for pixels without a segment.

    Raises:
        OSError: if the source is not an image or is damaged.
        ValueError: if the image is not RGB.
    """
    pixels, mode = _read_pixels(source, name)
    if mode not in ("RGB", "RGBA"):
        raise ValueError(
            f"{name} has the mode {mode}. Save panoptic masks as RGB images with segment id = R + 256 G + 65536 B."
        )
    return _pack(pixels, (0, 8, 16))


def read_depth(source: Source, depth_scale: float | None = None, name: str = "depth map") -> Tensor:
    """Read a depth map.

    Args:
        source: Path or content of a PNG or TIFF file of 16- or 32-bit integers, or a TIFF or `.npy` file of floats.
        depth_scale: Units per meter, for example 256 for KITTI. By default, integers are millimeters and floats are
            meters.
        name: Name of the depth map in error messages.

    Returns:
        (H, W) float32 depth in meters. Invalid values, which are not finite or not positive, become 0.

    Raises:
        OSError: if the source is not an image or array, or is damaged.
        ValueError: if the dtype or shape is not that of a depth map.
    """
    content = _content(source)
    if content.startswith(NPY_START):
        values = _read_npy(content, name)
    else:
        values, mode = _read_pixels(content, name)
        if mode not in DEPTH_MODES:
            raise ValueError(
                f"{name} has the mode {mode}, but a depth map needs one channel of 16-bit or 32-bit numbers (modes "
                "I;16, I and F). Save it as 16-bit PNG."
            )
    if depth_scale is None:
        depth_scale = MILLIMETERS if values.dtype.kind in "iu" else 1.0
    depth = values.astype(np.float32) / np.float32(depth_scale)
    depth[~(np.isfinite(depth) & (depth > 0))] = 0
    return torch.from_numpy(depth)


def _read_npy(content: bytes, name: str) -> np.ndarray:
    try:
        values = np.load(BytesIO(content), allow_pickle=False)
    except (EOFError, ValueError) as error:
        raise OSError(
            f"{name} cannot be read: {error}. The file is truncated or damaged. Download or create it again."
        ) from error
    if values.ndim == 3 and 1 in (values.shape[0], values.shape[2]):
        values = values.squeeze(0 if values.shape[0] == 1 else 2)
    if values.ndim != 2 or values.dtype.kind not in "iuf" or values.dtype.itemsize == 1:
        raise ValueError(
            f"{name} is an array of shape {values.shape} and dtype {values.dtype}. A depth map must have the shape "
            "(H, W) and contain floats in meters, or integers of at least 16 bits."
        )
    return values


def _read_pixels(source: Source, name: str) -> tuple[np.ndarray, str]:
    """Return the pixels of an image, (H, W) or (H, W, C), in their original dtype, and its PIL mode."""
    image = decode_image(BytesIO(_content(source)), name)
    return np.array(image), image.mode


def _content(source: Source) -> bytes:
    return source if isinstance(source, bytes) else Path(source).read_bytes()


def _pack(colors: np.ndarray, shifts: tuple[int, int, int]) -> np.ndarray:
    """Encode RGB or RGBA colors (H, W, 3 or 4) as one int32 per pixel (H, W), ignoring alpha."""
    bands = colors.astype(np.int32)
    return bands[..., 0] << shifts[0] | bands[..., 1] << shifts[1] | bands[..., 2] << shifts[2]


Row = Mapping[str, Any]
# Keys of each kind of target that is stored as a dictionary.
TARGETS = (
    ("masks", "class_labels", "is_crowd"),
    ("boxes", "class_labels", "is_crowd", "areas", "size"),
    ("keypoints", "box", "area", "image_id"),
    ("captions",),
)
SINGLE_TARGETS = ("segmentation_map", "depth_map", "label", "class_number")
# Keys of target dictionaries whose values have one row per object.
PER_OBJECT_KEYS = ("masks", "boxes", "areas", "class_labels")


def image_only(row: Row) -> dict[str, Any]:
    """Return an empty dictionary as the target of an image without targets."""
    return {}


def label_target(row: Row) -> dict[str, Any]:
    """Return the class number of an image as `label`."""
    return {"label": row["label"]}


def semantic_target(row: Row, classes: ClassList) -> dict[str, Tensor]:
    """Read the column `mask` as `segmentation_map` (H, W) int64: class numbers, and 255 for unlabeled pixels."""
    name = f"mask of {row['file']}"
    return {"segmentation_map": read_mask(encoded_bytes(row["mask"], name), classes, name)}


def region_target(row: Row, classes: ClassList, thing_ids: tuple[int, ...]) -> dict[str, Tensor]:
    """Read the column `mask` as `masks` (M, H, W) bool and `class_labels` (M,) int64, sorted by class.

    There is one mask per "stuff" class, and one per connected region of a "thing" class. Regions that touch, even
    diagonally or through unlabeled pixels, form one instance. Therefore, objects in the images must not touch each
    other; otherwise, instance masks are needed.
    """
    labels = semantic_target(row, classes)["segmentation_map"].numpy()
    found: list[tuple[int, np.ndarray]] = []
    for number in np.unique(labels[labels != IGNORED_LABEL]).tolist():
        mask = labels == number
        found += [
            (number, part) for part in (_regions(mask, labels == IGNORED_LABEL) if number in thing_ids else [mask])
        ]
    return _stacked([mask for _, mask in found], [number for number, _ in found], labels.shape)


def _regions(mask: np.ndarray, bridge: np.ndarray) -> list[np.ndarray]:
    """Return the connected regions of a mask; the pixels of `bridge` connect regions without being part of them."""
    from scipy import ndimage  # imported here because only training needs it

    numbers, _ = ndimage.label(mask | bridge, structure=np.ones((3, 3)))
    return [mask & (numbers == number) for number in np.unique(numbers[mask]).tolist()]


def panoptic_target(row: Row) -> dict[str, Tensor]:
    """Read the columns `panoptic` (an image in COCO panoptic format) and `segments`.

    The result has `masks` (M, H, W) bool, `class_labels` (M,) int64 and `is_crowd` (M,) bool, in the order of
    `segments`.
    """
    name = f"panoptic mask of {row['file']}"
    ids = read_segment_ids(encoded_bytes(row["panoptic"], name), name)
    segments = row["segments"]
    found, counts = np.unique(ids, return_counts=True)
    areas = dict(zip(found.tolist(), counts.tolist(), strict=True))
    if unlisted := sorted(areas.keys() - {0} - {segment["id"] for segment in segments}):
        raise ValueError(
            f"{name} has the segments {joined(unlisted)}, which are missing in its segments_info. Add them to "
            "segments_info."
        )
    if missing := [segment["id"] for segment in segments if segment["id"] not in areas]:
        raise ValueError(
            f"{name} has no pixel of the segments {joined(missing)} in its segments_info. Remove them from "
            "segments_info."
        )
    masks, labels = [ids == segment["id"] for segment in segments], [segment["label"] for segment in segments]
    return {**_stacked(masks, labels, ids.shape), **_crowds(segments)}


def instances_target(row: Row) -> dict[str, Tensor]:
    """Decode the column `objects`: polygons and run-length encoded masks in COCO format.

    The result has `masks` (M, H, W) bool, which may overlap, `class_labels` (M,) int64 and `is_crowd` (M,) bool.
    """
    size = (row["height"], row["width"])
    objects = json.loads(row["objects"])
    masks = [_draw(entry["segmentation"], size, f"{entry['name']} of {row['file']}") for entry in objects]
    return {**_stacked(masks, [entry["label"] for entry in objects], size), **_crowds(objects)}


def _draw(segmentation: Any, size: tuple[int, int], name: str) -> np.ndarray:
    from faster_coco_eval import mask  # imported here because only training needs it

    if isinstance(segmentation, dict) and tuple(segmentation["size"]) != size:
        raise ValueError(
            f"{name} has a mask of {' x '.join(map(str, segmentation['size']))} pixels, but the image size in its "
            f"JSON file is {size[0]} x {size[1]}. Correct the mask or the image size."
        )
    try:
        if isinstance(segmentation, list):
            runs = mask.merge(mask.frPyObjects(segmentation, *size))
        elif isinstance(segmentation["counts"], list):
            runs = mask.frPyObjects(segmentation, *size)
        else:
            runs = segmentation
        return mask.decode(runs).astype(bool)
    except (RuntimeError, ValueError) as error:  # raised if the run lengths do not add up to the mask size
        raise ValueError(f"{name} has a damaged mask: {error}") from error


def _crowds(entries: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    return {"is_crowd": torch.tensor([entry["iscrowd"] for entry in entries], dtype=torch.bool)}


def detection_target(row: Row) -> dict[str, Tensor]:
    """Convert the columns that `detection_rows` creates to tensors of N objects.

    The result has `boxes` (N, 4) float32 as x1, y1, x2, y2 in pixels, `class_labels` (N,) int64, `is_crowd` (N,)
    bool, `areas` (N,) float32 in square pixels, and `size` (2,) int64, the height and width of the image.
    """
    dtypes = {"boxes": torch.float32, "class_labels": torch.int64, "is_crowd": torch.bool, "areas": torch.float32}
    target = {name: torch.tensor(row[name], dtype=dtype) for name, dtype in dtypes.items()}
    return target | {"boxes": target["boxes"].reshape(-1, 4), "size": torch.tensor([row["height"], row["width"]])}


def keypoint_target(row: Row) -> dict[str, Any]:
    """Convert the columns that `keypoint_rows` creates to tensors of K keypoints.

    The result has `keypoints` (K, 3) float32 as x and y in pixels and visibility, `box` (4,) float32 as x1, y1, x2,
    y2 in pixels, `area` () float32 in square pixels, and `image_id`, the number of the image.
    """
    target = {name: torch.tensor(row[name], dtype=torch.float32) for name in ("keypoints", "box", "area")}
    return {**target, "image_id": row["image_id"]}


def target_of(example: Mapping[str, Any]) -> Any:
    """Return the target of an example in the format that metrics expect.

    The target is a dictionary with the keys of one entry of `TARGETS`, or the value of one key of `SINGLE_TARGETS`: a
    map (H, W) or a class number.
    """
    for names in TARGETS:
        if names[0] in example:
            return {name: example[name] for name in names if name in example}
    return next(example[name] for name in SINGLE_TARGETS if name in example)


def without_crowds(example: dict[str, Any]) -> dict[str, Any]:
    """Remove crowd objects, which are not used for training, from an example that has the key `is_crowd`."""
    if "is_crowd" not in example:
        return example
    kept = ~example["is_crowd"]
    return {
        name: value[kept] if name in PER_OBJECT_KEYS else value
        for name, value in example.items()
        if name != "is_crowd"
    }


def caption_target(row: Row) -> dict[str, list[str]]:
    """Return the `captions` of an image; raise `ValueError` if there are none or one is empty."""
    captions: list[str] = row["captions"]
    if not captions:
        raise ValueError(f"{row['file']} has no caption. Add one, or remove the image.")
    if empty := [number for number, caption in enumerate(captions, start=1) if not caption.strip()]:
        raise ValueError(
            f"{row['file']} has {len(captions)} captions, but caption {empty[0]} is empty. Fill it in or remove it."
        )
    return {"captions": captions}


def depth_target(row: Row, depth_scale: float | None) -> dict[str, Tensor]:
    """Read the column `depth` as `depth_map` (H, W) float32 in meters, 0 for pixels without a valid depth."""
    name = f"depth map of {row['file']}"
    return {"depth_map": read_depth(encoded_bytes(row["depth"], name), depth_scale, name)}


def _stacked(masks: list[np.ndarray], labels: list[int], size: tuple[int, ...]) -> dict[str, Tensor]:
    stacked = np.stack(masks) if masks else np.zeros((0, *size), bool)  # (M, H, W)
    return {"masks": torch.from_numpy(stacked), "class_labels": torch.tensor(labels, dtype=torch.int64)}
