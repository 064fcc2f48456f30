"""Read images once to find those that are broken, dark, without content, tiny, or copies of others.

Shapes: N images, S side of thumbnails, D features.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, Image
from PIL import Image as PILImage
from torch import Tensor
from torch.nn.functional import normalize
from transformers.utils import logging

from ..data.formats.files import READ_AHEAD
from ..data.targets import encoded_bytes
from ..model.image_inputs import read_image
from .near_duplicates import SIDE


LEAST_WHITE = 64  # 99th percentile of the brightness below which an image is dark, of 255
LEAST_CONTRAST = 6.0  # standard deviation of the brightness below which an image has no content
LEAST_SIDE = 0.25  # minimum shorter side relative to the median of all images
NUM_NEIGHBORS = 5  # number of neighbors whose mean distance shows how unusual an image is
CUT = 5.0  # number of robust standard deviations above the median at which an image is unusual
CHUNK_SIZE = 1024  # number of images that are compared with all others at a time


class ImageFacts(NamedTuple):
    """Properties of an image file.

    Args:
        fault: Reason why the image cannot be read; empty if it can.
        shorter_side: Shorter side in pixels.
        white: 99th percentile of the brightness, from 0 to 255.
        contrast: Standard deviation of the brightness.
        checksum: Hash of the pixels.
        thumbnail: (S, S) uint8 brightness, resized to a square.
    """

    fault: str = ""
    shorter_side: int = 0
    white: float = 0.0
    contrast: float = 0.0
    checksum: str = ""
    thumbnail: np.ndarray = np.zeros((SIDE, SIDE), np.uint8)


def read_facts(rows: Dataset) -> list[ImageFacts]:
    """Return the properties of the images of a split, read in parallel, with a progress bar."""
    encoded = rows.select_columns("image").cast_column("image", Image(decode=False))
    found: list[ImageFacts] = []
    with (
        ThreadPoolExecutor() as threads,
        logging.tqdm(total=len(rows), desc="Reading images", unit=" images") as bar,
    ):
        for chunk in encoded.iter(READ_AHEAD):
            found += threads.map(_facts_of, chunk["image"])
            bar.update(len(chunk["image"]))
    return found


def _facts_of(encoded: Mapping[str, Any]) -> ImageFacts:
    try:
        pixels = read_image(encoded_bytes(encoded, "image"), "it", num_channels=3)  # (3, H, W)
    except (OSError, TypeError, ValueError) as error:
        return ImageFacts(str(error))
    array = pixels.round().byte().movedim(0, -1).numpy()
    gray = PILImage.fromarray(array).convert("L")
    checksum = hashlib.sha256(str(array.shape).encode() + array.tobytes()).hexdigest()
    values, thumbnail = np.asarray(gray), np.asarray(gray.resize((SIDE, SIDE), PILImage.Resampling.BOX))
    return ImageFacts("", min(gray.size), float(np.percentile(values, 99)), float(values.std()), checksum, thumbnail)


def quality_scores(facts: list[ImageFacts]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return scores (N,) in [0, 1] and flags (N,) of broken, dark, blank and tiny images. Higher scores are worse."""
    is_broken = np.array([bool(own.fault) for own in facts])
    sides, whites, contrasts = np.array([(own.shorter_side, own.white, own.contrast) for own in facts]).T
    median = np.median(sides[~is_broken]) if not is_broken.all() else 1.0
    values = {
        "dark": (1 - whites / 255, whites < LEAST_WHITE),
        "blank": (1 - contrasts / 128, contrasts < LEAST_CONTRAST),
        "tiny": (1 - np.minimum(sides / median, 1), sides < LEAST_SIDE * median),
    }
    readable = {kind: (np.where(is_broken, np.nan, s), f & ~is_broken) for kind, (s, f) in values.items()}
    return {"broken": (is_broken.astype(float), is_broken), **readable}


def outlier_scores(features: np.ndarray, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean cosine distance (N,) to the nearest other images, and whether it is unusually large (N,).

    Args:
        features: (N, D) features; NaN for images that cannot be read.
        copies: (N,) group numbers. Images of the same group are not counted as neighbors.
    """
    is_known = ~np.isnan(features).any(axis=1)
    vectors = normalize(torch.from_numpy(features[is_known]).float(), dim=1)
    vectors = normalize(vectors - vectors.mean(dim=0), dim=1)
    groups, score = torch.from_numpy(copies[is_known]), np.full(len(features), np.nan)
    if len(vectors) <= NUM_NEIGHBORS:
        return score, np.zeros(len(features), bool)
    distances: list[Tensor] = []
    for rows in torch.arange(len(vectors)).split(CHUNK_SIZE):
        distance = 1 - vectors[rows] @ vectors.T
        distance[groups[rows, None] == groups] = 2.0
        distances.append(distance.topk(NUM_NEIGHBORS, largest=False).values.mean(dim=1) / 2)
    score[is_known] = torch.cat(distances).numpy()
    median = np.nanmedian(score)
    deviation = 1.4826 * np.nanmedian(np.abs(score - median))  # standard deviation of a normal distribution
    return score, np.nan_to_num(score, nan=-np.inf) > median + CUT * max(float(deviation), 1e-6)
