"""Test reading masks and depth maps from files, and the class names of masks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from hf_vit.data.reading.classes import ClassList, choose_classes
from hf_vit.data.targets import read_depth, read_mask

from ..helpers.datasets import class_map, encoded, truncate, write_image
from .errors import expect_error


NAMES = ("sky", "road", "car")
COLORS = (((0, 0, 0), 255), ((128, 64, 0), 0), ((0, 0, 255), 1), ((1, 2, 3), 2), ((1, 2, 4), 2))
CLASSES = ClassList(NAMES, COLORS)


def mask_of(image: PILImage.Image, classes: ClassList = CLASSES) -> torch.Tensor:
    labels = read_mask(encoded(image), classes)
    assert labels.dtype == torch.int64
    return labels


@pytest.mark.parametrize("mode", ["L", "P", "I;16", "I"])
def test_masks_of_numbers_are_read_as_they_are(mode: str) -> None:
    numbers = class_map(0)
    dtype = {"I;16": np.uint16, "I": np.int32}.get(mode, np.uint8)
    image = PILImage.fromarray(numbers.astype(dtype))
    if mode == "P":
        image.putpalette([9, 9, 9] * 256)  # the palette colors do not affect the class numbers
    assert image.mode == mode
    file = "TIFF" if mode == "I" else "PNG"
    assert read_mask(encoded(image, file), CLASSES).tolist() == numbers.tolist()


def test_masks_of_bits_and_colors_are_read_and_unknown_labels_are_named() -> None:
    assert mask_of(PILImage.fromarray(np.eye(3, dtype=bool))).tolist() == np.eye(3, dtype=int).tolist()
    numbers = np.array([[0, 1, 2, 3, 255]], np.uint8)
    classes = ClassList(NAMES, reduce_labels=True)
    assert mask_of(PILImage.fromarray(numbers), classes).tolist() == [[255, 0, 1, 2, 255]]
    colors = np.array([[[0, 0, 0], [128, 64, 0], [0, 0, 255]], [[1, 2, 3], [1, 2, 4], [0, 0, 0]]], np.uint8)
    for mode in ("RGB", "RGBA"):
        assert mask_of(PILImage.fromarray(colors).convert(mode)).tolist() == [[255, 0, 1], [2, 2, 255]]
    message = r"has colors \(mode RGB\), but no palette is given\. Put a file pal"
    expect_error(message, mask_of, PILImage.new("RGB", (2, 2)), ClassList(NAMES))
    for pixels, message in (
        (np.array([[0, 7, 3]], np.uint8), r"^mask has the labels 3, 7, which are outside the class list \(255 marks"),
        (np.array([[0, 700]], np.uint16), r"has the labels 700, which"),
        (np.array([[-1, 0]], np.int32), r"values from -1 to 0\. Class numbers must be 0 to 254"),
        (np.array([[[0, 0, 0], [9, 8, 7]]], np.uint8), r"has the colors \(9, 8, 7\), which are not in the palette"),
        (np.array([[0.5]], np.float32), "has the mode F. Save masks as class numbers in one channel"),
    ):
        expect_error(message, read_mask, encoded(PILImage.fromarray(pixels), "TIFF"), CLASSES)


def choose(folder: Path, **options: object) -> ClassList:
    return choose_classes(folder, **{"class_names": None, "classes_file": None, "reduce_labels": False, **options})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("classes.txt", "sky\nroad\ncar\n\n"),
        ("id2label.json", json.dumps({"1": "road", "0": "sky", "2": "car", "255": "nothing"})),
        ("palette.txt", "void 0 0 0\nsky 128 64 0\nroad 0 0 255\ncar 1 2 3\ncar 1 2 4"),
        ("label_colors.txt", "0 0 0\tVoid\n128 64 0\tsky\n0 0 255\troad\n1 2 3\tcar\n1 2 4\tcar"),
        ("class_dict.csv", "name,r,g,b\nvoid,0,0,0\nsky,128,64,0\nroad,0,0,255\ncar,1,2,3\ncar,1,2,4\n"),
    ],
)
def test_files_of_classes_are_found(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert choose(tmp_path) == ClassList(NAMES, () if "0 0 0" not in text.replace(",", " ") else COLORS)
    assert choose(tmp_path / "elsewhere", classes_file=str(tmp_path / name)) == choose(tmp_path)


def test_given_names_say_the_order_and_a_palette_the_colors(tmp_path: Path) -> None:
    (tmp_path / "palette.txt").write_text("traffic light 1 2 3\nsky 4 5 6")
    names = ["sky", "traffic light"]
    assert choose(tmp_path, class_names=names) == ClassList(tuple(names), (((1, 2, 3), 1), ((4, 5, 6), 0)))
    message = r"colors for 'traffic light', but the classes are 'sky', 'car'\. Use the same"
    expect_error(message, choose, tmp_path, class_names=["sky", "car"])


def test_bad_files_of_classes_are_refused(tmp_path: Path) -> None:
    numbers = r"numbers its classes 1, 2\. Number these 2 classes from 0 to 1\. If class"
    twice = "Class names must not be empty or occur more than once, but 'sky' occurs twice"
    for name, text, message in (
        (
            "README.md",
            "",
            r"of the classes are unknown\. Give them as class_names, in a file classes\.txt or",
        ),
        ("classes.txt", "1 sky\n2 road\n", r"es\.txt numbers its classes 1, 2\. Number .* classes from 0 to 1\."),
        ("classes.txt", "sky\nroad\nsky", twice),
        ("classes.txt", "\n".join(map(str, range(256))), "There are 256 class names, but masks support 1 to 255"),
        ("id2label.json", '{"1": "sky", "2": "car"}', numbers),
        ("id2label.json", '["sky"]', "is not a JSON object of class numbers and names"),
        ("palette.txt", "sky 0 0 1\nroad 0 1", "its line 'road 0 1' has no color"),
        ("palette.txt", "sky 0 0 1\nroad 0 0 1", r"uses the color \(0, 0, 1\) for both 'sky' and 'road'"),
    ):
        (tmp_path / name).write_text(text)
        expect_error(message, choose, tmp_path)
        (tmp_path / name).unlink()


METERS = np.array([[0.5, 2.25, 0], [40.0, 0, 0]], np.float32)


def depth_of(file: Path, array: np.ndarray, **options: float) -> torch.Tensor:
    if file.suffix == ".npy":
        np.save(file, array)
    else:
        write_image(file, array)
    depth = read_depth(file, **options)
    assert depth.dtype == torch.float32
    return depth


def test_numbers_are_scaled_to_meters_and_what_is_no_depth_is_zero(tmp_path: Path) -> None:
    for name, dtype, scale in (
        ("a.png", np.uint16, 1000), ("a.tif", np.uint16, 256), ("a.tif", np.int32, 1000), ("a.npy", np.int64, 256)
    ):  # fmt: skip
        units = (METERS * scale).astype(dtype)
        assert torch.equal(depth_of(tmp_path / name, units, depth_scale=scale), torch.from_numpy(METERS))
        # The value 40001 needs 16 bits. Decoding the image with 8 bits would truncate it.
        assert depth_of(tmp_path / name, np.array([[40001]], dtype), depth_scale=1).item() == 40001
    wild = METERS.copy()
    wild[0, 2], wild[1, 1], wild[1, 2] = np.nan, np.inf, -3
    for name, values, options in (
        ("a.tif", wild, {}),
        ("a.npy", wild, {}),
        ("a.npy", wild[None].astype(">f8"), {}),
        ("a.npy", 256 * METERS, {"depth_scale": 256}),
    ):
        assert torch.equal(depth_of(tmp_path / name, values, **options), torch.from_numpy(METERS))


def test_what_cannot_be_depth_is_refused(tmp_path: Path) -> None:
    array = r"is an array of shape \(2, 2\) and dtype uint8\. A depth map must have"
    for name, values, message in (
        ("a.png", np.ones((2, 2), np.uint8), "has the mode L, but a depth map needs one channel of 16-bit"),
        ("a.png", np.ones((2, 2, 3), np.uint8), "has the mode RGB, but a depth map"),
        ("a.npy", np.ones((2, 2), np.uint8), array),
        ("a.npy", np.ones((2, 2, 3)), r"is an array of shape \(2, 2, 3\) and dtype float64"),
    ):
        expect_error(message, depth_of, tmp_path / name, values)
    damaged = r"^depth map cannot be (read|decoded): .* truncated or damaged"
    for name in ("a.png", "a.npy"):
        depth_of(tmp_path / name, np.random.default_rng(0).integers(1, 9999, (40, 40)).astype(np.uint16))
        truncate(tmp_path / name)
        expect_error(damaged, read_depth, tmp_path / name, error=OSError)
