"""Test the contents and colors of pictures of dense predictions."""

import math
import warnings
from io import BytesIO
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from hf_vit.visualize import segmentation_palette
from hf_vit.visualize.colors import apply_color_map
from hf_vit.visualize.dense import (
    DEPTH_COLORS,
    draw_depth,
    draw_panoptic,
    draw_segmentation,
    is_valid,
    overlay_segmentation,
    overlay_segments,
)
from hf_vit.visualize.figures import MAX_ROWS, MAX_SIDE, arrange_pages, fit_line
from hf_vit.visualize.objects import draw_boxes
from hf_vit.visualize.plots import draw_class_scores
from hf_vit.visualize.pretraining import draw_reconstructions

from ..data.errors import expect_error


GRAY = np.array([128, 128, 128])
NAMES = ["sky", "$5_$", "cat", "unseen"]
PALETTE = segmentation_palette(4)
BLACK, WIDE = np.zeros((60, 60, 3), np.uint8), np.zeros((40, 80, 3), np.uint8)


def texts(file: Path) -> list[str]:
    """Return the texts in an SVG file that matplotlib has written."""
    return [line.strip()[5:-4] for line in file.read_text().splitlines() if line.strip().startswith("<!-- ")]


def columns(file: Path, count: int) -> list[np.ndarray]:
    """Split a picture into `count` columns of equal width."""
    with Image.open(file) as picture:
        return np.array_split(np.asarray(picture.convert("RGB")), count, axis=1)


def holds(part: np.ndarray, color: np.ndarray) -> bool:
    return bool((np.abs(part.astype(int) - color) <= 1).all(axis=-1).mean() > 0.05)


def test_palettes_are_fixed_and_near_is_bright() -> None:
    palette = segmentation_palette(150)
    assert palette[:3].tolist() == [[0, 114, 178], [230, 159, 0], [0, 158, 115]]
    for num_labels in (0, 1, 6, 20):
        assert np.array_equal(segmentation_palette(num_labels), palette[:num_labels])
    assert len(np.unique(palette, axis=0)) == 150
    distances = np.linalg.norm(palette[:20, None].astype(float) - [*palette[:20], GRAY], axis=-1)
    assert np.sort(distances, axis=1)[:, 1].min() > 50
    # Near pixels are bright, and pixels with invalid depths are gray.
    depth = np.array([[1.0, 2.0, 3.0, 9.0], [0.0, math.nan, math.inf, -1.0]])
    colors = apply_color_map(depth, is_valid(depth), (1, 3), DEPTH_COLORS)
    assert colors.shape == (2, 4, 3)
    assert colors.dtype == np.uint8
    brightness = colors[0].astype(int).sum(axis=-1)
    assert brightness[0] > brightness[1] > brightness[2] == brightness[3]
    assert (colors[1] == GRAY).all()
    depth = np.array([[2.0, 3.0, 0.0]])
    with warnings.catch_warnings(action="error"):
        # A constant depth map has an empty value range, which must not cause a division by zero.
        flat = apply_color_map(depth, is_valid(depth), (2, 2), DEPTH_COLORS)[0]
    assert (flat[0] == flat[1]).all()
    assert (flat[2] == GRAY).all()


@pytest.mark.parametrize("opacity", [1.0, 0.25])
def test_overlay_gives_each_class_its_color_and_shows_the_image_through(opacity: float) -> None:
    image = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    labels = np.arange(54).reshape(6, 9) % 4
    labels[0, :2] = 255, -1
    expected = (1 - opacity) * image + opacity * PALETTE[labels % 4]
    expected[0, :2] = (1 - opacity) * image[0, :2] + opacity * GRAY
    picture = overlay_segmentation(image, torch.from_numpy(labels), PALETTE, opacity)
    assert picture.dtype == np.uint8
    assert np.abs(picture - expected).max() <= 0.5
    for same in (Image.fromarray(image), torch.from_numpy(image).permute(2, 0, 1)):
        assert np.array_equal(overlay_segmentation(same, labels, PALETTE, opacity), picture)


def test_images_and_predictions_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"size 60x60 \(height x width\), but its segmentation has 40x80"):
        overlay_segmentation(BLACK, np.zeros((40, 80)), PALETTE)
    with pytest.raises(ValueError, match=r"uint8, not Tensor \(3, 4, 4\) of torch.float32"):
        overlay_segmentation(torch.rand(3, 4, 4), np.zeros((4, 4)), PALETTE)
    expect_error("There is no image to draw", draw_segmentation, [], [], [], NAMES, "no.png")
    segments, file = {"masks": np.zeros((1, 40, 80)), "class_labels": [0]}, tmp_path / "no.png"
    sizes = r"size 60x60 .* has 40x80\. Resize it to the image size"
    expect_error(sizes, draw_depth, [BLACK], [np.ones((40, 80))], None, file)
    expect_error(sizes, draw_segmentation, [BLACK], [np.ones((40, 80))], None, NAMES, file)
    expect_error(sizes, draw_panoptic, [BLACK], [segments], None, NAMES, file)


def test_segmentation_is_drawn_next_to_ground_truth_with_a_legend(tmp_path, monkeypatch):
    targets, predictions = [np.full((60, 60), 1), np.full((40, 80), 255)], [np.full((60, 60), 2), np.zeros((40, 80))]
    for name in ("picture.png", "picture.svg"):
        draw_segmentation([BLACK, WIDE], predictions, targets, NAMES, tmp_path / name)
    image, truth, prediction = columns(tmp_path / "picture.png", 3)
    assert holds(image, np.zeros(3))
    for part, seen, unseen in ((truth, [PALETTE[1], GRAY], PALETTE[2]), (prediction, PALETTE[[2, 0]], PALETTE[1])):
        assert all(holds(part, 0.7 * color) for color in seen)
        assert not holds(part, 0.7 * unseen)
    assert texts(tmp_path / "picture.svg") == ["image", "truth", "prediction", "sky", "$5_$", "cat", "ignored"]
    # A picture is rendered only once, even if it is written to memory.
    drawn, draw, file = [], Figure.draw, BytesIO()
    monkeypatch.setattr(Figure, "draw", lambda self, renderer: drawn.append(self) or draw(self, renderer))
    draw_segmentation([Image.new("RGB", (40, 30))], [np.zeros((30, 40), dtype=int)], None, ["sky"], file)
    assert len(drawn) == 1
    with Image.open(file) as picture:
        assert picture.format == "PNG"


def test_pictures_have_no_more_rows_and_tiles_than_can_be_seen(tmp_path: Path) -> None:
    for shape, rows in (((60, 60), 4), ((40, 80), 8), ((90, 30), 2)):
        sizes = []
        for count in (rows - 1, rows, rows + 1):
            images, maps = [np.zeros((*shape, 3), np.uint8)] * count, [np.zeros(shape)] * count
            draw_segmentation(images, maps, None, NAMES, tmp_path / "picture.png")
            with Image.open(tmp_path / "picture.png") as picture:
                sizes.append(picture.size)
        assert max(map(max, sizes)) <= 1600
        assert sizes[0][1] < sizes[1][1] == sizes[2][1]
        assert rows <= MAX_ROWS
    counts = (*range(1, 13), 19, 40, 77, 100)
    for size, count in product([(128, 168), (480, 380), (960, 500)], counts):
        pages = arrange_pages([Image.new("RGB", size, "blue")] * count)
        blue = sum(number for page in pages for number, color in page.getcolors() if color == (0, 0, 255))
        assert blue == count * size[0] * size[1]
        assert all(max(page.size) <= MAX_SIDE for page in pages)
    # If images do not fit in one sheet of screen size, they are distributed over several sheets.
    for size, count, pages in (((128, 168), 90, 1), ((480, 380), 20, 2), ((2000, 900), 3, 2)):
        colors = [(1 + number, 0, 0) for number in range(count)]
        sheets = arrange_pages([Image.new("RGB", size, color) for color in colors])
        assert len(sheets) == pages
        assert all(max(sheet.size) <= 1600 for sheet in sheets)
        seen = [color for sheet in sheets for _, color in sorted(sheet.getcolors(), key=lambda entry: entry[1])]
        assert [color for color in seen if color != (255, 255, 255)] == colors


def test_text_is_shortened_to_the_available_width() -> None:
    lines = ("cat (97 %)", "Staffordshire bullterrier (97 %)", "a very long name of a class that nobody reads (97 %)")
    for line in lines:
        fitted, font = fit_line(line, 128, 14)
        assert font.getlength(fitted) <= 128
        assert (fitted == line) == (len(line) < 40)
        assert (fitted[:3], fitted[-5:]) == (line[:3], line[-5:])
    boxes = draw_boxes(np.zeros((480, 60, 3), np.uint8), [[20, 100, 55, 300]], [0], ["Staffordshire bullterrier"])
    letters = (np.asarray(boxes) > 180).all(axis=-1)  # white letters on a blue label
    assert letters.any()
    assert not letters[:, -1].any()


MASKS = np.zeros((3, 60, 60), dtype=bool)
MASKS[0, :, :30] = MASKS[1, 10:50, 32:58] = MASKS[2, 0:2, 40:42] = True


def test_segments_have_their_color_outline_class_and_score(tmp_path: Path) -> None:
    picture = overlay_segments(BLACK, MASKS[:2], [0, 2], PALETTE, opacity=0.5)
    assert np.abs(picture[30, 10] - PALETTE[0] / 2).max() <= 0.5
    assert np.abs(picture[30, 45] - PALETTE[2] / 2).max() <= 0.5
    for y, x in ((30, 29), (10, 40), (30, 32)):
        assert (picture[y, x] == 255).all()
    for y, x in ((30, 31), (5, 45), (0, 45)):
        assert (picture[y, x] == 0).all()  # no object covers this pixel
    # No outline is drawn along the border of the image.
    assert np.abs(picture[0, 10] - PALETTE[0] / 2).max() <= 0.5
    # A segment is labeled with its class and score if there is enough space.
    ids = np.full((60, 60), -1)
    for number, mask in enumerate(MASKS):
        ids[mask] = number
    labels, scores = [0, 1, 2], [0.75, 0.5, 0.9]
    info = [{"id": i, "label_id": labels[i], "score": scores[i]} for i in range(3)]
    target = {"masks": MASKS[:1], "class_labels": [3]}
    predictions = {
        "panoptic": {"segmentation": torch.from_numpy(ids), "segments_info": info},
        "instances": {"masks": torch.from_numpy(MASKS), "class_labels": labels, "scores": scores},
    }
    for name, prediction in predictions.items():
        draw_panoptic([BLACK], [prediction], [target], NAMES, tmp_path / f"{name}.svg")
        written = ["image", "truth", "prediction", "unseen", "sky 0.75", "$5_$ 0.50", *NAMES]
        assert sorted(texts(tmp_path / f"{name}.svg")) == sorted(written)
        draw_panoptic([BLACK], [prediction], [target], NAMES, tmp_path / f"{name}.png")
    panoptic, instances = (columns(tmp_path / f"{name}.png", 1)[0] for name in predictions)
    assert np.array_equal(panoptic, instances)
    empty = {"masks": MASKS[:0], "class_labels": [], "scores": []}
    draw_panoptic([BLACK], [empty], None, NAMES, tmp_path / "empty.svg")
    assert texts(tmp_path / "empty.svg") == ["image", "prediction"]


def test_depth_stands_beside_the_truth_in_the_same_colors(tmp_path: Path) -> None:
    truth = np.linspace(1, 5, 60)[:, None].repeat(60, axis=1)
    truth[:, 40:] = np.nan
    wrong = np.where(np.arange(60) < 20, 2 * truth, truth)
    pictures = {}
    flat = np.ones((40, 80))
    for name, prediction in {"right": np.nan_to_num(truth), "wrong": wrong}.items():
        draw_depth([BLACK, WIDE], [prediction, flat], [truth, flat], tmp_path / f"{name}.png")
        pictures[name] = columns(tmp_path / f"{name}.png", 1)[0]
    draw_depth([BLACK, WIDE], [wrong, flat], [truth, flat], tmp_path / "wrong.svg")
    written = texts(tmp_path / "wrong.svg")
    words = [text for text in written if text.isalpha()]
    assert words == ["image", "truth", "prediction", "meters", "error", "meters"]
    assert written.count("share of the truth") == 2
    changed = (pictures["right"] != pictures["wrong"]).any(axis=(0, 2))
    width = len(changed)
    assert not changed[: width * 2 // 5].any()  # the panels of the image and the ground truth do not differ
    assert changed[width // 2 : width * 3 // 5].any()
    assert holds(pictures["right"][:, : width // 2], GRAY)
    assert holds(pictures["right"][:, -width // 3 :], np.array([0, 0, 4]))  # an error of zero is black


def test_depth_without_a_common_scale_or_truth_has_no_error(tmp_path: Path) -> None:
    values, picture = np.linspace(1, 5, 3600).reshape(60, 60), tmp_path / "picture.png"
    for relative, scale, nothing in ((False, ["meters"], math.nan), (True, ["far", "near", "relative"], 0.0)):
        draw_depth([BLACK], [values], None, tmp_path / "alone.svg", relative=relative)
        words = [text for text in texts(tmp_path / "alone.svg") if text.isalpha()]
        assert words == ["image", "prediction", *scale]
        # A depth map without valid pixels is gray.
        draw_depth([BLACK], [np.zeros((60, 60))], [np.full((60, 60), nothing)], picture, relative=relative)
        assert holds(columns(picture, 1)[0], GRAY)
    draw_depth([BLACK], [1 / values], [values], picture, relative=True)
    for part in columns(picture, 3)[1:]:
        assert np.unique(part.reshape(-1, 3), axis=0).shape[0] > 50


def test_class_scores_are_ranked_with_their_mean(tmp_path: Path) -> None:
    scores = {"sky": 0.25, "$5_$": math.nan, "cat": 0.75}
    draw_class_scores(scores, tmp_path / "scores.svg", label="Dice")
    written = texts(tmp_path / "scores.svg")
    assert [text for text in written if text in scores] == ["cat", "sky", "$5_$"]
    for text in ("0.250", "0.750", "does not occur", "mean 0.500", "Dice"):
        assert text in written
    draw_class_scores({"cat": math.nan}, tmp_path / "absent.png")
    expect_error("There is no class to draw", draw_class_scores, {}, tmp_path / "no.png")


def test_reconstruction_shows_visible_patches_and_predicted_masked_patches(tmp_path: Path) -> None:
    # The picture shows a white image and a black prediction.
    image, predicted = torch.full((3, 40, 80), 0.5), torch.full((3, 40, 80), -1.0)
    mask = torch.tensor([[True, False], [True, False]])
    file = tmp_path / "reconstruction.png"
    draw_reconstructions([image], [mask], [predicted], [0.75] * 3, 0.5, file)
    seen, left, filled = columns(file, 3)
    middle, quarter = seen.shape[0] // 2, seen.shape[1] // 4
    for picture, expected in ((seen, (255, 255)), (left, (128, 255)), (filled, (64, 255))):
        found = [picture[middle, place] for place in (quarter, 3 * quarter)]
        np.testing.assert_allclose(found, [[level] * 3 for level in expected], atol=1)
    image, mask = torch.zeros(4, 16, 16), torch.zeros(2, 2, dtype=torch.bool)  # only the first channel is shown
    draw_reconstructions([image], [mask], [image], [0.5] * 4, [0.5] * 4, tmp_path / "bands.png")
    draw_reconstructions([image[:1]], [mask], [image[:1]], 0.5, 0.5, tmp_path / "gray.png")
    assert (tmp_path / "bands.png").read_bytes() == (tmp_path / "gray.png").read_bytes()
