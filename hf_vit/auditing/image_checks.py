"""Read images once to find those that are broken, dark, without content, tiny, or copies of others.

Shapes: N images, S side of thumbnails, D features.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset, DatasetDict, Image, concatenate_datasets
from PIL import Image as PILImage
from torch import Tensor
from torch.nn.functional import normalize
from transformers.utils import logging

from ..data.reading.files import READ_AHEAD
from ..data.targets import encoded_bytes
from ..features.near_duplicates import CHUNK_SIZE, SIDE
from ..model.image_inputs import read_image


LEAST_WHITE = 64  # 99th percentile of the brightness below which an image is dark, of 255
LEAST_CONTRAST = 6.0  # standard deviation of the brightness below which an image has no content
LEAST_SIDE = 0.25  # minimum shorter side relative to the median of all images
NUM_NEIGHBORS = 5  # number of neighbors whose mean distance shows how unusual an image is
CUT = 5.0  # number of robust standard deviations above the median at which an image is unusual


def join_images(splits: DatasetDict) -> Dataset:
    """Return the images of all splits as a dataset with the columns `image` (encoded) and `file`."""
    images = [rows.select_columns(["image", "file"]) for rows in splits.values()]
    return concatenate_datasets([rows.cast_column("image", Image(decode=False)) for rows in images])


def open_picture(encoded: Mapping[str, Any]) -> PILImage.Image:
    """Decode a cell of type `datasets.Image(decode=False)` as an RGB image. Raises the errors of `read_image`."""
    pixels = read_image(encoded_bytes(encoded, "image"), "it", num_channels=3)  # (3, H, W)
    return PILImage.fromarray(pixels.round().byte().movedim(0, -1).numpy())


def read_facts(images: Dataset) -> pd.DataFrame:
    """Read images in parallel, with a progress bar. Return a table with a row for each image.

    The columns are `fault` (reason why the image cannot be read, or ""), `shorter_side` in pixels, `white` and
    `contrast` (99th percentile and standard deviation of the brightness, which is in [0, 255]), `checksum` (of the
    pixels), and `thumbnail` (brightness, resized to a square, (S, S) uint8). They are NaN if there is a fault.
    """
    with ThreadPoolExecutor() as threads:
        facts = (own for chunk in images.iter(READ_AHEAD) for own in threads.map(_facts_of, chunk["image"]))
        return pd.DataFrame(list(logging.tqdm(facts, total=len(images), desc="Reading images", unit=" images")))


def _facts_of(encoded: Mapping[str, Any]) -> dict[str, Any]:
    try:
        picture = open_picture(encoded)
    except (OSError, TypeError, ValueError) as error:
        return {"fault": str(error) or repr(error)}
    gray = picture.convert("L")
    brightness, size = np.asarray(gray), (picture.height, picture.width, 3)
    return {
        "fault": "",
        "shorter_side": min(gray.size),
        "white": np.percentile(brightness, 99),
        "contrast": brightness.std(),
        "checksum": hashlib.sha256(str(size).encode() + picture.tobytes()).hexdigest(),
        "thumbnail": np.asarray(gray.resize((SIDE, SIDE), PILImage.Resampling.BOX)),
    }


def quality_scores(facts: pd.DataFrame) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return scores (N,) in [0, 1] and flags (N,) of broken, dark, blank and tiny images. Higher scores are worse.

    Except for "broken", the scores of images that cannot be read are NaN.
    """
    is_broken, side = facts["fault"] != "", facts["shorter_side"] / facts["shorter_side"].median()
    found = {
        "broken": (is_broken.astype(float), is_broken),
        "dark": (1 - facts["white"] / 255, facts["white"] < LEAST_WHITE),
        "blank": (1 - facts["contrast"] / 128, facts["contrast"] < LEAST_CONTRAST),
        "tiny": (1 - side.clip(upper=1), side < LEAST_SIDE),
    }
    return {kind: (score.to_numpy(), flag.to_numpy()) for kind, (score, flag) in found.items()}


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
