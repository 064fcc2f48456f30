"""Readers of target files: class masks, panoptic masks and depth maps.

None of them goes the way of images, which ends in 8 bits and three colours. Shapes: H W pixels.
"""

from io import BytesIO
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..image_inputs_hf_vit import decode_image
from ..image_targets_hf_vit import INDEX_MODES
from .class_list import ClassList
from .wording import listed


NPY_START = b"\x93NUMPY"
MILLIMETRES = 1000.0  # in a metre
DEPTH_MODES = ("I", "I;16", "I;16B", "I;16L", "F")

Source = str | PathLike[str] | bytes


def read_mask(source: Source, classes: ClassList, name: str = "mask") -> Tensor:
    """Reads a mask that says the class of every pixel.

    Args:
        source: Path or content of an image. Its pixels are class numbers in one band, with 255 where there is no class
            (PIL modes 1, L, P, I;16, I; the colours of P do not matter), or colours of `classes.colors` in RGB.
        classes: What its numbers or colours mean.
        name: What to call it in errors.

    Returns:
        (H, W) int64, class numbers and 255.

    Raises:
        OSError: if it is no image, or is damaged.
        ValueError: if it holds other numbers or colours.
    """
    pixels, mode = _read_pixels(source, name)
    if mode in INDEX_MODES:
        table, values = classes.index_table, pixels.astype(np.uint8) if mode == "1" else pixels
        if mode == "I" and not 0 <= values.min() <= values.max() < len(table):
            raise ValueError(f"{name} has values from {values.min()} to {values.max()}. Class numbers lie in 0..254.")
    elif mode in ("RGB", "RGBA"):
        if not classes.colors:
            raise ValueError(
                f"{name} has colours (mode {mode}) and no palette says what they mean. Put a file palette.txt beside "
                "the splits with a line 'name 255 0 128' for each class, or write class numbers in one band."
            )
        table, values = classes.color_table, _pack(pixels, (16, 8, 0))
    else:
        raise ValueError(f"{name} has the mode {mode}. Masks have class numbers in one band, or colours in RGB.")
    labels = table[values]
    if not labels.all():
        unknown = np.unique(values[labels == 0]).tolist()
        raise ValueError(f"{name} has {_in_words(unknown, mode)}.")
    return torch.from_numpy(labels).long() - 1


def _in_words(unknown: list[int], mode: str) -> str:
    if mode in INDEX_MODES:
        return f"the labels {listed(unknown)}, which are outside the class list (255 is for pixels of no class)"
    colors = [(code >> 16, code >> 8 & 255, code & 255) for code in unknown]
    return f"the colours {listed(colors)}, which are not in the palette"


def read_segment_ids(source: Source, name: str = "panoptic mask") -> np.ndarray:
    """Reads a mask in the format of COCO panoptic, whose pixels are R + 256 G + 65536 B.

    Args:
        source: Path or content of an RGB image.
        name: What to call it in errors.

    Returns:
        (H, W) int32, the number of each pixel's segment; 0 where there is none.

    Raises:
        OSError: if it is no image, or is damaged.
        ValueError: if it is not RGB.
    """
    pixels, mode = _read_pixels(source, name)
    if mode not in ("RGB", "RGBA"):
        raise ValueError(f"{name} has the mode {mode}, but a panoptic mask is RGB: R + 256 G + 65536 B.")
    return _pack(pixels, (0, 8, 16))


def read_depth(source: Source, depth_scale: float | None = None, name: str = "depth map") -> Tensor:
    """Reads a depth map.

    Args:
        source: Path or content of a 16- or 32-bit PNG or TIFF of whole numbers, or a TIFF or `.npy` file of floats.
        depth_scale: Units per metre: 256 for KITTI. Unless given, whole numbers are millimetres and floats metres.
        name: What to call it in errors.

    Returns:
        (H, W) float32 in metres, 0 where there is no valid depth: not finite, or not above 0.

    Raises:
        OSError: if it is no image or array, or is damaged.
        ValueError: if its type or shape is not that of a depth map.
    """
    content = _content(source)
    values = _read_npy(content, name) if content.startswith(NPY_START) else _read_depth_image(content, name)
    if depth_scale is None:
        depth_scale = MILLIMETRES if values.dtype.kind in "iu" else 1.0
    depth = values.astype(np.float32) / np.float32(depth_scale)
    depth[~(np.isfinite(depth) & (depth > 0))] = 0
    return torch.from_numpy(depth)


def _read_npy(content: bytes, name: str) -> np.ndarray:
    try:
        values = np.load(BytesIO(content), allow_pickle=False)
    except (EOFError, ValueError) as error:
        raise OSError(f"{name} cannot be read: {error}. The file is truncated or damaged; get it anew.") from error
    if values.ndim == 3 and 1 in (values.shape[0], values.shape[2]):
        values = values.squeeze(0 if values.shape[0] == 1 else 2)
    if values.ndim != 2 or values.dtype.kind not in "iuf" or values.dtype.itemsize == 1:
        raise ValueError(
            f"{name} is an array {values.shape} of {values.dtype}. Depth is (H, W), floats in metres or whole numbers "
            "of at least 16 bits."
        )
    return values


def _read_depth_image(content: bytes, name: str) -> np.ndarray:
    values, mode = _read_pixels(content, name)
    if mode not in DEPTH_MODES:
        raise ValueError(
            f"{name} has the mode {mode}, but depth has one band of 16-bit or 32-bit numbers (modes I;16, I and F): "
            "8 bits and colours do not hold metres. Write 16-bit PNG."
        )
    return values


def _read_pixels(source: Source, name: str) -> tuple[np.ndarray, str]:
    """Returns the bands of an image, (H, W) or (H, W, C), in their own type, and its PIL mode."""
    image = decode_image(BytesIO(_content(source)), name)
    return np.array(image), image.mode


def _content(source: Source) -> bytes:
    return source if isinstance(source, bytes) else Path(source).read_bytes()


def _pack(colors: np.ndarray, shifts: tuple[int, int, int]) -> np.ndarray:
    """Returns one int32 for each colour (H, W, 3 or 4); what there is of alpha does not matter."""
    bands = colors.astype(np.int32)
    return bands[..., 0] << shifts[0] | bands[..., 1] << shifts[1] | bands[..., 2] << shifts[2]
