"""Test the contents, positions and colors of pictures of boxes and poses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.visualize import segmentation_palette
from hf_vit.visualize.objects import draw_boxes, draw_detections, draw_keypoints, draw_poses
from hf_vit.visualize.plots import draw_precision_recall

from .test_visualize import columns, texts


NAMES = ["cell", "$5_$", "unseen"]
PALETTE = segmentation_palette(3)
GRAY = np.full((480, 640, 3), 200, np.uint8)
BOXES, LABELS = [[100, 200, 300, 400], [350, 50, 600, 250]], [0, 1]


def is_like(picture: Image.Image, x: float, y: float, color: np.ndarray) -> bool:
    """Return whether a pixel near (x, y) has approximately the given color."""
    part = np.asarray(picture)[round(y) - 3 : round(y) + 4, round(x) - 3 : round(x) + 4].astype(int)
    return bool((np.abs(part - color) <= 8).all(axis=-1).any())


def has(picture: Image.Image, color: np.ndarray) -> bool:
    return bool((np.abs(np.asarray(picture).astype(int) - color) <= 8).all(axis=-1).any())


@pytest.mark.parametrize("size", [16, 480, 2000])
def test_boxes_have_their_place_and_color_in_images_of_any_size(size: int) -> None:
    image = np.full((size, size, 3), 200, np.uint8)
    picture = draw_boxes(image, np.array([[0.25, 0.25, 0.75, 0.75]]) * size, [1], NAMES)
    side = picture.width
    assert picture.size == (max(size, 480),) * 2
    for x, y in ((0.5, 0.75), (0.25, 0.5), (0.75, 0.5)):
        assert is_like(picture, x * side, y * side, PALETTE[1])
    for x, y in ((0.5, 0.5), (0.1, 0.5), (0.5, 0.9)):
        assert is_like(picture, x * side, y * side, np.full(3, 200))
    # The label is drawn above the box.
    label = np.asarray(picture)[int(0.15 * side) : int(0.25 * side) - 2]
    written = (np.abs(label.astype(int) - PALETTE[1]) <= 8).all(axis=-1)
    assert written.any(axis=1).sum() > side / 40


def test_boxes_are_drawn_with_the_highest_score_on_top() -> None:
    expected = np.asarray(draw_boxes(GRAY, BOXES, LABELS, NAMES, [0.5, 0.25]))
    boxes, labels, scores = (torch.tensor(values) for values in (BOXES, LABELS, [0.5, 0.25]))
    assert np.array_equal(draw_boxes(Image.fromarray(GRAY), boxes, labels, NAMES, scores), expected)
    assert not np.array_equal(draw_boxes(GRAY, BOXES, LABELS, NAMES), expected)  # without scores, the text is shorter
    assert np.array_equal(draw_boxes(GRAY, [], [], NAMES, []), GRAY)
    for scores in ([0.9, 0.1], [0.1, 0.9]):
        picture = draw_boxes(GRAY, [BOXES[0]] * 2, [0, 1], NAMES, scores)
        top = int(np.argmax(scores))
        assert is_like(picture, 200, 400, PALETTE[top])
        assert not is_like(picture, 200, 400, PALETTE[1 - top])
    small = np.asarray(draw_boxes(GRAY, [[320, 240, 332, 252]], [0], NAMES))
    assert (small[:236] == 200).all()
    assert (small[257:] == 200).all()


def test_confident_detections_are_drawn_next_to_ground_truth(tmp_path: Path) -> None:
    target = {"boxes": BOXES[:1], "class_labels": [0]}
    prediction = {"boxes": BOXES, "class_labels": [1, 2], "scores": [0.9, 0.2]}
    prediction = {name: torch.tensor(values) for name, values in prediction.items()}
    nothing = {name: values[:0] for name, values in prediction.items()}
    for name in ("picture.png", "picture.svg"):
        draw_detections([GRAY, GRAY], [prediction, nothing], [target, target], NAMES, tmp_path / name)
    assert texts(tmp_path / "picture.svg") == ["image", "truth", "prediction", *NAMES[:2]]
    with Image.open(tmp_path / "picture.png") as picture:
        image, truth, predicted = np.array_split(np.asarray(picture.convert("RGB"))[: picture.height // 2], 3, axis=1)
    for part, seen in ((image, []), (truth, [0]), (predicted, [1])):
        assert [label for label in range(3) if has(Image.fromarray(part), PALETTE[label])] == seen
    draw_detections([GRAY], [prediction], None, NAMES, tmp_path / "alone.svg", threshold=0.1)
    assert texts(tmp_path / "alone.svg") == ["image", "prediction", *NAMES[1:]]


POINTS = np.array([[100.0, 100], [300, 100], [200, 300]])


def test_keypoints_have_their_place_and_color_and_lines_join_them() -> None:
    picture = draw_keypoints(GRAY, POINTS, skeleton=[(0, 2)])
    for point, color in zip(POINTS, PALETTE, strict=True):
        assert is_like(picture, *point, color)
    assert is_like(picture, 150, 200, PALETTE[2])
    assert is_like(picture, 200, 100, np.full(3, 200))
    # The keypoint is drawn at the center of the corner pixel.
    tiny = draw_keypoints(np.full((20, 20, 3), 200, np.uint8), [[0, 19]] * 2)
    assert is_like(tiny, 0.5 * 24, 19.5 * 24, PALETTE[1])
    # Several objects can be drawn in one image.
    both = draw_keypoints(GRAY, torch.from_numpy(np.stack([POINTS, POINTS + 150])), scores=torch.ones(2, 3))
    for shift in (0, 150):
        assert all(is_like(both, *(point + shift), color) for point, color in zip(POINTS, PALETTE, strict=True))
    # Unlabeled keypoints are not drawn, and keypoints with a low score are faint.
    picture = draw_keypoints(GRAY, POINTS, visibility=[2, 1, 0], skeleton=[(0, 2)])
    assert not has(picture, PALETTE[2])
    assert is_like(picture, 300, 100, np.full(3, 255))
    assert not is_like(picture, 100, 100, np.full(3, 255))
    picture = draw_keypoints(GRAY, POINTS, scores=[1, 0.5, 0])
    assert [has(picture, color) for color in PALETTE] == [True, False, False]
    assert is_like(picture, *POINTS[2], 0.4 * PALETTE[2] + 0.6 * 200)


def test_poses_stand_beside_the_truth_and_small_ones_are_enlarged(tmp_path: Path) -> None:
    points = np.array([[300.0, 200, 2], [320, 200, 2], [310, 220, 0]])
    target = {"keypoints": torch.from_numpy(points), "box": torch.tensor([295, 195, 325, 225])}
    prediction = {"keypoints": points[:, :2], "scores": np.ones(3), "box": [295, 195, 325, 225]}
    draw_poses([GRAY], [prediction], [target], [(0, 1)], tmp_path / "picture.png")
    image, truth, predicted = columns(tmp_path / "picture.png", 3)
    assert not has(Image.fromarray(image), PALETTE[1])
    # The third keypoint is not labeled in the ground truth.
    for part in (truth, predicted):
        assert [has(Image.fromarray(part), color) for color in PALETTE] == [True, True, False]
        # Columns with changed pixels below the title
        found = (np.abs(part[40:].astype(int) - 200) > 60).any(axis=(0, 2))
        assert np.ptp(np.flatnonzero(found)) > 150  # in the original image, the line is 20 pixels long
    draw_poses([GRAY], [prediction], None, [], tmp_path / "alone.svg")
    assert texts(tmp_path / "alone.svg") == ["image", "prediction"]
    unsure = {**prediction, "scores": np.array([1.0, 0.2, 1.0])}
    draw_poses([GRAY], [unsure], None, [], tmp_path / "sure.png", threshold=0.5)
    (alone,) = columns(tmp_path / "sure.png", 2)[1:]
    assert [has(Image.fromarray(alone), color) for color in PALETTE[[0, 1]]] == [True, False]
    # A keypoint far outside the image is drawn inside the picture.
    target = {"keypoints": np.array([[300.0, 200, 2]]), "box": [290, 190, 310, 210]}
    prediction = {"keypoints": np.array([[30.0, 30]]), "scores": np.ones(1)}
    draw_poses([GRAY], [prediction], [target], [], tmp_path / "far.png")
    assert has(Image.fromarray(columns(tmp_path / "far.png", 3)[2]), PALETTE[0])


def test_precision_recall_shows_each_class_and_the_mean(tmp_path: Path) -> None:
    curves = {"cell": np.ones(101), "absent": np.full(101, np.nan), "$5_$": np.zeros(101)}
    draw_precision_recall(curves, tmp_path / "few.svg")
    written = texts(tmp_path / "few.svg")
    assert written[-3:] == ["cell 1.000", "$5_$ 0.000", "mean 0.500"]
    draw_precision_recall({str(number): np.ones(101) for number in range(11)}, tmp_path / "many.svg")
    assert texts(tmp_path / "many.svg")[-1] == "mean 1.000"
    assert "0 1.000" not in texts(tmp_path / "many.svg")
    with pytest.raises(ValueError, match="There is no class to draw"):
        draw_precision_recall({"absent": curves["absent"]}, tmp_path / "no.png")
