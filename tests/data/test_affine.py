"""Test affine crops around boxes: the positions of points and pixels in the crop."""

import numpy as np
import pytest
import torch

from hf_vit.data.augmentation.operations import apply_matrix, crop_keypoints, crop_matrix, invert_matrix, warp
from hf_vit.model.image_geometry import crop_region, crop_regions


HEIGHT, WIDTH = 90, 120
BOXES = torch.tensor([[30.5, 20.0, 70.0, 65.25], [-20.0, 40.0, 50.0, 60.0], [60.0, -10.0, 130.0, 110.0]])
# The red channel is the column and the green channel is the row, so each pixel encodes its origin.
ROWS, COLUMNS = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
PLACES = torch.stack([COLUMNS, ROWS, 0 * ROWS + 200]).to(torch.uint8)


def test_boxes_of_the_proportions_of_the_crop_span_it_and_others_grow_around_their_center() -> None:
    matrix = crop_matrix(torch.tensor([10.0, 20.0, 40.0, 60.0]), (64, 48), 1.0)
    moved = apply_matrix(torch.tensor([[10.0, 20.0], [40.0, 60.0], [25.0, 40.0]]), matrix)
    assert torch.allclose(moved, torch.tensor([[0.0, 0.0], [47.0, 63.0], [23.5, 31.5]]))
    # The first box has a larger aspect ratio (width / height) than the crop, the second box a smaller one.
    for box in ([10.0, 35.0, 40.0, 45.0], [20.0, 20.0, 30.0, 60.0]):
        matrix = crop_matrix(torch.tensor(box), (64, 48), padding=1.25)
        corners = apply_matrix(torch.tensor([[0.0, 0.0], [47.0, 63.0]]), invert_matrix(matrix))
        half = torch.tensor([1.25 * 15, 1.25 * 20])
        assert torch.allclose(corners, torch.tensor([25.0, 40.0]) + torch.stack((-half, half)), atol=1e-5)


def test_points_map_back_and_outside_keypoints_are_unlabeled() -> None:
    points = torch.tensor(np.random.default_rng(0).uniform(0, 90, (7, 2)))
    matrix = crop_matrix(BOXES[0], (64, 48), 1.25)
    assert torch.allclose(apply_matrix(apply_matrix(points, matrix), invert_matrix(matrix)), points, atol=1e-12)
    for box in ([5.0, 5.0, 5.0, 5.0], [0.0, 0.0, float("nan"), 4.0]):
        with pytest.raises(ValueError, match=r"The box \[.*\] has no area"):
            crop_matrix(torch.tensor(box), (8, 8), 1.25)
    # Keypoints that are not labeled or lie outside the crop become (0, 0, 0).
    matrix = crop_matrix(torch.tensor([10.0, 20.0, 40.0, 60.0]), (64, 48), 1.0)
    given = [[10.0, 20.0, 2.0], [40.2, 60.0, 1.0], [40.5, 60.0, 2.0], [25.0, 19.0, 2.0], [25.0, 40.0, 0.0]]
    expected = [[0.0, 0.0, 2.0], [47 + 0.2 * 47 / 30, 63.0, 1.0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    found = crop_keypoints(torch.tensor(given), matrix, (64, 48))
    assert torch.allclose(found, torch.tensor(expected), atol=1e-5)


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_pixels_go_where_points_go(box: torch.Tensor, dtype: torch.dtype) -> None:
    turn = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
    matrix = crop_matrix(box, (64, 48), 1.25)
    for turned in (matrix, torch.cat((turn @ matrix[:, :2], matrix[:, 2:] + 5), dim=1)):
        crop = warp(PLACES.to(dtype), turned, (64, 48))
        assert (crop.shape, crop.dtype) == ((3, 64, 48), dtype)
        rows, columns = torch.meshgrid(torch.arange(64), torch.arange(48), indexing="ij")
        # Position (x, y) in the image of each crop pixel, of shape (h, w, 2)
        places = apply_matrix(torch.stack((columns, rows), dim=-1).double(), invert_matrix(turned))
        last = torch.tensor([WIDTH - 1, HEIGHT - 1])
        is_inside = ((places >= 0) & (places <= last)).all(dim=-1)
        assert is_inside.float().mean() > 0.1
        assert torch.equal(crop[2] > 0, is_inside)
        tolerance = 0.5001 if dtype == torch.uint8 else 0.001
        assert ((crop[:2].movedim(0, -1) - places)[is_inside].abs() <= tolerance).all()


def test_full_square_crop_is_the_image_and_outside_crop_is_black() -> None:
    image = PLACES[..., :HEIGHT]
    matrix = crop_matrix(torch.tensor([0.0, 0.0, HEIGHT - 1, HEIGHT - 1]), (HEIGHT, HEIGHT), 1.0)
    assert torch.equal(warp(image, matrix, (HEIGHT, HEIGHT)), image)
    assert not warp(PLACES, crop_matrix(torch.tensor([500.0, 500.0, 540.0, 540.0]), (8, 8), 1.0), (8, 8)).any()


@pytest.mark.parametrize("box", BOXES)
def test_crops_are_those_of_the_image_processor(box: torch.Tensor) -> None:
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, HEIGHT, WIDTH), dtype=np.uint8))
    [region] = crop_regions(box[None], (64, 48), 1.25)
    expected = crop_region(noise.float(), region, (64, 48))
    assert (warp(noise.float(), crop_matrix(box, (64, 48), 1.25), (64, 48)) - expected).abs().max() < 0.05
