"""Tiles of large images, and maps of the size of an image, which are computed in bands of rows.

Shapes: C channels or classes, h w map of a model, H W pixels of an image or tile, r rows of a band.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .configuration_hf_vit import to_pair


# Number of elements of a band of rows. Results are computed band by band. On a CPU, a band of 4 MB of float32 fits
# into the cache. On other devices, bands are larger, because each band starts several kernels.
BAND_NUMEL, DEVICE_BAND_NUMEL = 2**20, 2**26
DEFAULT_OVERLAP = 0.2  # default overlap of neighboring tiles, as a share of the tile size
TILED = ("HfViTForObjectDetection", "HfViTForSemanticSegmentation", "HfViTForDepth")  # starts of class names
Pair = tuple[int, int]  # height and width, or row and column, in pixels


def check_tiles(tile_size: Any, overlap: Any, model_class: str) -> dict[str, Any]:
    """Returns the given options of tiles; raises `ValueError` if they are invalid or the model has another task."""
    given = {name: value for name, value in (("tile_size", tile_size), ("overlap", overlap)) if value is not None}
    if given and not model_class.startswith(TILED):
        settings = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"{settings} requires a model of hf_vit for object detection, semantic segmentation or depth estimation, "
            f"not {model_class}. Omit it."
        )
    sides = tile_size if isinstance(tile_size, list | tuple) else (tile_size, tile_size)
    if tile_size is not None and (len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides)):
        raise ValueError(f"tile_size={tile_size!r} must be a positive integer in pixels, or (height, width).")
    if overlap is not None and (isinstance(overlap, str | bool) or not 0 <= overlap < 1):
        raise ValueError(f"overlap={overlap!r} must lie in [0, 1): it is a share of the tile size.")
    return given


def place_tiles(size: Pair, tile_size: int | Pair, overlap: float) -> tuple[list[Pair], Pair]:
    """Returns the top left pixels of the tiles of an image, row by row, and the size of the tiles.

    Tiles are not larger than the image. The last tiles are shifted back to end at the image border.
    """
    height, width = (min(side, tile) for side, tile in zip(size, to_pair(tile_size), strict=True))
    steps = [max(1, round(side * (1 - overlap))) for side in (height, width)]
    lefts = window_starts(size[1], width, steps[1])
    return [(top, left) for top in window_starts(size[0], height, steps[0]) for left in lefts], (height, width)


def window_starts(size: int, window: int, stride: int) -> list[int]:
    """Returns the start positions of windows along one side; the last window ends at the image border."""
    return [*range(0, size - window, stride), size - window]


def blended_bands(maps: Sequence[Tensor], places: Sequence[Pair], tile_size: Pair) -> Iterator[Tensor]:
    """Blends the maps (C, h, w) of all tiles of an image and yields bands (C, r, W) from top to bottom.

    Maps are resized to the tile. Where tiles overlap, their weights decrease smoothly toward the border of the tile.

    Args:
        maps: Map of each tile, of any resolution.
        places: Top left pixel of each tile, from `place_tiles`.
        tile_size: Height and width of the tiles in pixels.
    """
    device, size = maps[0].device, (places[-1][0] + tile_size[0], places[-1][1] + tile_size[1])
    down, across = (
        _blending_weights({place[axis] for place in places}, tile_size[axis], size[axis], device) for axis in (0, 1)
    )
    for start, stop in _row_ranges(len(maps[0]), size, device):
        band = torch.zeros(len(maps[0]), stop - start, size[1], device=device)  # (C, r, W)
        for own, (top, left) in zip(maps, places, strict=True):
            first, last = max(start, top), min(stop, top + tile_size[0])
            if first < last:
                rows = _resized_rows(own, tile_size, first - top, last - top)
                weights = down[top][first - top : last - top, None] * across[left]
                band[:, first - start : last - start, left : left + tile_size[1]] += rows * weights
        yield band


def _blending_weights(starts: Iterable[int], window: int, size: int, device: torch.device) -> dict[int, Tensor]:
    """Returns the weights (window,) of the pixels of each window along one side. They add up to 1 at each pixel."""
    weights = (torch.pi * (torch.arange(window, device=device) + 0.5) / window).sin().square()
    total = torch.zeros(size, device=device)
    for start in starts:
        total[start : start + window] += weights
    return {start: weights / total[start : start + window] for start in starts}


def fit_scale_and_shift(values: Tensor, target: Tensor) -> Tensor:
    """Scales and shifts values (H, W) to the least squared distance to `target` (H, W). The scale is at least 0."""
    offsets, mean = values - values.mean(), target.mean()
    scale = (offsets * (target - mean)).sum() / offsets.square().sum().clamp_min(torch.finfo(values.dtype).tiny)
    return scale.clamp_min(0) * offsets + mean


def resized_bands(maps: Tensor, size: Pair) -> Iterator[Tensor]:
    """Resizes maps (C, h, w) bilinearly in float32 and yields the result as bands (C, r, W) from top to bottom."""
    for start, stop in _row_ranges(len(maps), size, maps.device):
        yield _resized_rows(maps, size, start, stop)


def _row_ranges(channels: int, size: Pair, device: torch.device) -> Iterator[Pair]:
    """Yields the first row of each band, and the first row after it."""
    numel = BAND_NUMEL if device.type == "cpu" else DEVICE_BAND_NUMEL
    rows = max(1, numel // (max(1, channels) * size[1]))
    yield from ((start, min(start + rows, size[0])) for start in range(0, size[0], rows))


def _resized_rows(maps: Tensor, size: Pair, start: int, stop: int) -> Tensor:
    """Returns the rows from `start` to `stop` (C, r, W) of maps (C, h, w) that are resized to `size`."""
    # Interpolate between rows manually, because F.interpolate cannot compute only a part of the result.
    centers = (torch.arange(start, stop, device=maps.device) + 0.5) * (maps.shape[-2] / size[0]) - 0.5
    centers = centers.clamp(0, maps.shape[-2] - 1)
    above = centers.long()  # (r,)
    below = (above + 1).clamp(max=maps.shape[-2] - 1)
    mixed = torch.lerp(maps[:, above].float(), maps[:, below].float(), (centers - above)[:, None])  # (C, r, w)
    return F.interpolate(mixed[None], size=(stop - start, size[1]), mode="bilinear")[0]  # (C, r, W)


def class_segments(bands: Iterable[Tensor]) -> dict[str, Any]:
    """Converts bands (K, r, W) of semantic segmentation logits to segments, one for each class of any pixel."""
    best = [(*band.softmax(dim=0).max(dim=0), len(band)) for band in bands]  # (r, W)
    scores, classes = torch.cat([own for own, _, _ in best]), torch.cat([own for _, own, _ in best])  # (H, W)
    counts = classes.flatten().bincount(minlength=best[0][2])  # (K,)
    totals = classes.flatten().bincount(scores.flatten().double(), minlength=len(counts))  # (K,)
    labels = counts.nonzero().flatten()
    means = (totals / counts)[labels].tolist()
    ids = torch.zeros_like(counts)
    ids[labels] = torch.arange(len(labels), device=ids.device)
    segments = [
        {"id": number, "label_id": label, "score": round(mean, 6)}
        for number, (label, mean) in enumerate(zip(labels.tolist(), means, strict=True))
    ]
    return {"segmentation": ids[classes], "segments_info": segments}
