"""Test that image processors and pipelines raise errors for invalid image files, arrays and tensors."""

import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import pipeline

from hf_vit import HfViTForImageClassification, HfViTForKeypointDetection, HfViTImageProcessor, HfViTImageProcessorPil
from hf_vit.inference.predict import predict_files

from ..helpers.datasets import encoded, picture
from ..helpers.models import small_config
from .table import Row, assert_refused, content_of, parametrize, rows


OPTIONS = {"size": 16}
IMAGE = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    """Return a function that writes a file to a folder and returns the file path."""

    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def png_of_size(width: int, height: int) -> bytes:
    """Return a small PNG file with a header that claims the given width and height."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b"x\x9c"), (b"IEND", b"")]
    parts = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def spoiled(value: float) -> np.ndarray:
    pixels = IMAGE.astype(np.float32)
    pixels[2, 3, 1] = value
    return pixels


JPEG, PNG = encoded(picture(0, (64, 48)), "JPEG"), encoded(picture(0, (64, 48)))
FILES = [
    ("empty-file", written("a.jpg", b""), "a.jpg | not an image"),
    ("text-called-jpg", written("a.jpg", b"Dear reader, this is no photo."), "a.jpg | not an image"),
    ("html-called-png", written("a.png", b"<html><body>404 Not Found</body></html>"), "a.png | not an image"),
    ("cut-jpeg", written("a.jpg", JPEG[: len(JPEG) // 2]), "a.jpg | truncated"),
    ("cut-png", written("a.png", PNG[: len(PNG) // 2]), "a.png | cannot be decoded"),
    ("png-header-alone", written("a.png", PNG[:20]), "a.png | header"),
    ("zeroed-middle-of-png", written("a.png", PNG[:60] + bytes(2000) + PNG[2060:]), "a.png | cannot be decoded"),
    ("no-such-file", "nowhere/photo.jpg", "nowhere/photo.jpg | no such file"),
    ("empty-path", "", "no such file"),
    ("folder-as-image", lambda folder: folder, "cannot be opened"),
    ("path-with-a-zero-byte", "photo\0.jpg", "cannot be opened"),
    ("bytes-of-no-image", b"\x89PNG", "images | not an image"),
]
BOMBS = [
    ("decompression-bomb", written("a.png", png_of_size(60_000, 60_000)), "a.png | too large | MAX_IMAGE_PIXELS"),
    ("header-of-many-pixels", written("a.png", png_of_size(14_000, 14_000)), "a.png | pixels | MAX_IMAGE_PIXELS"),
    ("base64-that-is-none", "data:image/png;base64,@@@@", "base64"),
    ("data-url-without-base64", "data:image/png,abc", "base64"),
]
VALUES = [
    ("no-rows", np.zeros((0, 5, 3), np.uint8), "no pixels"),
    ("no-columns", np.zeros((5, 0, 3), np.uint8), "no pixels"),
    ("nan-floats", spoiled(np.nan), "NaN or infinite"),
    ("infinite-floats", spoiled(np.inf), "NaN or infinite"),
    ("floats-in-minus-one-to-one", (IMAGE / np.float32(127.5) - 1), "from -1 to | must lie in 0..255"),
    ("normalized-tensor", torch.linspace(-2.1, 2.6, 144).reshape(3, 6, 8), "from -2.1 to 2.6 | 0..255"),
    ("floats-of-sixteen-bits", IMAGE.astype(np.float32) * 257, "must lie in 0..255"),
    ("integers-beyond-255", IMAGE.astype(np.int64) * 300, "8-bit pixels range from 0 to 255"),
    ("negative-integers", IMAGE.astype(np.int32) - 20, "from -20 to"),
    ("five-channels", np.zeros((6, 8, 5), np.uint8), "(6, 8, 5) | channels"),
    ("two-channels", np.zeros((2, 6, 8), np.uint8), "channels"),
    ("one-dimension", np.zeros(48, np.uint8), "1 dimensions"),
    ("no-dimension", np.array(3, np.uint8), "0 dimensions"),
    ("five-dimensions", np.zeros((1, 1, 3, 6, 8), np.uint8), "5 dimensions"),
    ("empty-list", [], "images is empty"),
    ("batch-of-none", np.zeros((0, 3, 6, 8), np.uint8), "images is empty"),
    ("negative-float-image", Image.fromarray(np.full((4, 4), -3, np.float32)), "mode 'F' | -3"),
    ("negative-int-image", Image.fromarray(np.full((4, 4), -3, np.int32)), "mode 'I' | -3"),
]
KINDS = [
    ("none", None, "NoneType"),
    ("number", 3, "of type int"),
    ("dictionary", {"image": "a.png"}, "of type dict"),
    ("mixed-list", [IMAGE, 3.5], "images[1] | of type float"),
    ("nested-none", [[IMAGE], [None]], "images[1][0] | NoneType"),
    ("object-array", np.array([[None, 1], [2, 3]], dtype=object), "dtype object"),
    ("array-of-images", np.array([IMAGE, IMAGE[:3]], dtype=object), "dtype object"),
    ("complex-numbers", IMAGE.astype(np.complex64), "dtype complex64"),
    ("array-of-texts", np.array([["a", "b"], ["c", "d"]]), "which is not supported"),
    ("dates", np.zeros((4, 4), "datetime64[s]"), "dtype datetime64"),
    ("complex-tensor", torch.zeros(3, 4, 4, dtype=torch.complex64), "complex64"),
]


PROCESSOR, INVALID = HfViTImageProcessor(**OPTIONS), [*BOMBS, *VALUES]
UNSCALED = [
    ("floats-in-minus-one-to-one-that-are-not-rescaled", IMAGE / np.float32(127.5) - 1, "must lie in 0..1"),
    ("floats-up-to-255-that-are-not-rescaled", IMAGE.astype(np.float32), "must lie in 0..1 | do_rescale=True"),
]
UNEVEN = [("sizes-that-do-not-stack", [IMAGE, IMAGE[:4]], "2 sizes | cannot be stacked")]
GRAY = [("gray-that-must-not-be-converted", IMAGE[..., 0], "1 channels | do_convert_rgb=False")]
OTHERS = [
    *rows(HfViTImageProcessor(do_rescale=False, **OPTIONS), ValueError, UNSCALED),
    *rows(partial(HfViTImageProcessor(do_resize=False), return_tensors="pt"), ValueError, UNEVEN),
    *rows(HfViTImageProcessor(**OPTIONS, do_convert_rgb=False), ValueError, GRAY),
]


@parametrize(
    [*rows(PROCESSOR, OSError, FILES), *rows(PROCESSOR, ValueError, INVALID), *rows(PROCESSOR, TypeError, KINDS)]
)
def test_both_image_processor_backends_reject_invalid_images(row: Row, tmp_path: Path) -> None:
    assert_refused(row, tmp_path)
    assert_refused(row._replace(call=HfViTImageProcessorPil(**OPTIONS)), tmp_path)


@parametrize(OTHERS)
def test_image_processors_with_options_reject_invalid_images(row: Row, tmp_path: Path) -> None:
    assert_refused(row, tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {task: tmp_path_factory.mktemp(task) for task in MODELS}
    for task, folder in folders.items():
        MODELS[task](small_config()).save_pretrained(folder)
        HfViTImageProcessor(size=32, do_affine_crop=task == "keypoint-detection").save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def pipelines(saved: dict[str, Path]) -> dict[str, Any]:
    return {task: pipeline(task, model=str(folder)) for task, folder in saved.items()}


MODELS = {"image-classification": HfViTForImageClassification, "keypoint-detection": HfViTForKeypointDetection}
BROKEN = FILES[:7]


@parametrize(rows(None, OSError, BROKEN))
def test_predict_skips_broken_images_and_pipelines_raise(
    row: Row, saved: dict[str, Path], tmp_path: Path, pipelines: dict[str, Any]
) -> None:
    broken, whole = row.make(tmp_path), tmp_path / "whole.png"
    picture(1).save(whole)
    before = content_of(tmp_path)
    lines = predict_files(str(saved["image-classification"]), [tmp_path])
    found = {Path(line.pop("file")).name: line for line in lines}
    assert broken.name in found[broken.name]["error"]
    assert "error" not in found[whole.name]
    assert content_of(tmp_path) == before
    for pipe in pipelines.values():
        assert_refused(row._replace(call=pipe), tmp_path)
        assert_refused(row._replace(call=lambda file, pipe=pipe: pipe([file])), tmp_path)
