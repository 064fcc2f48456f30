"""Test heatmap encoding and decoding, mirrored images, losses and heads of keypoint detection."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor
from transformers.models.vitpose.image_processing_vitpose import (
    get_keypoint_predictions,
    post_dark_unbiased_data_processing,
)

from hf_vit import HfViTConfig, HfViTForKeypointDetection, HfViTKeypointConfig, HfViTModel
from hf_vit.model.adapt_inputs import apply_geometry
from hf_vit.model.task_keypoint_detection import (
    decode_heatmaps,
    encode_keypoints,
    expected_distances,
    flip_heatmaps,
    keypoint_loss,
)

from ..helpers.models import pixels, small_config
from ..helpers.references import assert_close
from .checks import KEYPOINTS, build, train


IMAGE, HEATMAP = (256, 192), (64, 48)
PAIRS = [[0, 1], [2, 3]]


def draw_keypoints(count: int, margin: float = 0.0, image_size: tuple[int, int] = IMAGE) -> Tensor:
    """Return random visible keypoints (1, count, 3) in float64, at least `margin` pixels inside the image."""
    size = torch.tensor([image_size[1], image_size[0]], dtype=torch.float64)
    places = torch.rand(1, count, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat((margin + places * (size - 1 - 2 * margin), torch.full((1, count, 1), 2.0)), dim=2)


def to_image(places: Tensor) -> Tensor:
    """Convert heatmap positions to image positions."""
    return places * torch.tensor([(IMAGE[1] - 1) / (HEATMAP[1] - 1), (IMAGE[0] - 1) / (HEATMAP[0] - 1)])


def noisy(heatmaps: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    strength = 0.3 + 0.7 * torch.rand(*heatmaps.shape[:2], 1, 1, generator=generator)
    return strength * heatmaps + 0.01 * torch.randn(heatmaps.shape, generator=generator)


@pytest.mark.parametrize(("sigma", "dtype"), [(1, torch.float32), (2.0, torch.float64), (3.0, torch.float32)])
def test_decoded_keypoints_are_those_encoded_also_at_the_border(sigma: float, dtype: torch.dtype) -> None:
    keypoints = draw_keypoints(300)
    keypoints[0, :100, 0] /= 20
    keypoints[0, 100:200, 1] = IMAGE[0] - 1 - keypoints[0, 100:200, 1] / 20
    keypoints[0, 200:204, :2] = torch.tensor([[0, 0], [191, 0], [0, 255], [191, 255]])
    heatmaps, counts = encode_keypoints(keypoints.to(dtype), IMAGE, HEATMAP, sigma)
    assert (heatmaps.dtype, heatmaps.shape) == (dtype, (1, 300, *HEATMAP))
    assert counts.all()
    places, scores = decode_heatmaps(heatmaps)
    assert (to_image(places) - keypoints[..., :2]).abs().max() < 0.05
    assert torch.equal(scores, heatmaps.amax(dim=(2, 3)))


def test_heatmaps_are_gaussians_around_the_place_between_pixels() -> None:
    keypoints = torch.tensor([[[10.0, 20.0, 2.0], [30.3, 5.1, 1.0]]], dtype=torch.float64)
    heatmaps, _ = encode_keypoints(keypoints, (33, 65), (9, 17), 1.5)
    rows, columns = np.mgrid[:9, :17]
    for heatmap, (x, y, _) in zip(heatmaps[0], keypoints[0].tolist(), strict=True):
        square = (columns - x * 16 / 64) ** 2 + (rows - y * 8 / 32) ** 2
        assert heatmap.numpy() == pytest.approx(np.exp(-square / (2 * 1.5**2)), rel=1e-12)


def test_keypoints_that_are_not_labeled_or_out_of_reach_do_not_count() -> None:
    keypoints = torch.tensor([[[3.0, 3, 0], [-7, 5, 2], [-5, 5, 2], [5, 22, 1], [5, 20, 1], [torch.nan, 0, 0]]])
    heatmaps, counts = encode_keypoints(keypoints, (16, 16), (16, 16), 2.0)
    assert counts.tolist() == [[False, False, True, False, True, False]]
    assert (heatmaps.amax(dim=(2, 3)) > 0).tolist() == counts.tolist()


def test_decoding_is_that_of_vitpose_away_from_the_border() -> None:
    heatmaps = noisy(encode_keypoints(draw_keypoints(200, margin=16), IMAGE, HEATMAP, 2.0)[0])
    places, scores = decode_heatmaps(heatmaps)
    coordinates, largest = get_keypoint_predictions(heatmaps.numpy())
    expected = post_dark_unbiased_data_processing(coordinates, heatmaps.numpy(), kernel=11)
    assert (places - torch.from_numpy(expected)).abs().max() < 1e-5  # the reference rounds to float32
    assert torch.equal(scores, torch.from_numpy(largest[..., 0]))
    exact, _ = encode_keypoints(draw_keypoints(50), IMAGE, HEATMAP, 2.0)
    places, scores = decode_heatmaps(exact.bfloat16())
    assert places.dtype == scores.dtype == torch.float32
    assert (places - decode_heatmaps(exact)[0]).abs().max() < 0.5


def decode_one(heatmap: np.ndarray) -> np.ndarray:
    """Return the keypoint position in a heatmap: the peak of a parabola fitted to the logarithm around the maximum."""
    largest, sizes = np.array(np.unravel_index(heatmap.argmax(), heatmap.shape)), np.array(heatmap.shape)
    inside = ((largest >= 3) & (largest < sizes - 3)).all()
    surface = gaussian_filter(heatmap, 0.8, radius=5, mode="nearest") if inside else heatmap
    y, x = np.clip(largest, 1, sizes - 2)
    near = np.log(np.clip(surface[y - 1 : y + 2, x - 1 : x + 2], 0.001, 50))  # (3, 3)
    slope = [(near[1, 2] - near[1, 0]) / 2, (near[2, 1] - near[0, 1]) / 2]
    across, down = near[1, 2] + near[1, 0] - 2 * near[1, 1], near[2, 1] + near[0, 1] - 2 * near[1, 1]
    both = (near[2, 2] + near[0, 0] - 2 * near[1, 1] - across - down) / 2
    bend = np.array([[across, both], [both, down]]) + np.finfo(np.float32).eps * np.eye(2)
    place = np.array([x, y]) - np.linalg.solve(bend, slope)
    is_peak = np.linalg.eigvalsh(bend).max() < 0 and np.abs(place - largest[::-1]).max() <= 2
    return place if is_peak else largest[::-1]


def test_decoding_equals_its_derivation_in_float64() -> None:
    keypoints = draw_keypoints(150)
    keypoints[0, ::3, 0] /= 15
    heatmaps = noisy(encode_keypoints(keypoints, IMAGE, HEATMAP, 2.0)[0])
    places, _ = decode_heatmaps(heatmaps)
    expected = np.stack([decode_one(heatmap) for heatmap in heatmaps[0].numpy()])
    assert_close(places[0], torch.from_numpy(expected), 1e-9, "places")


def test_without_a_peak_decoding_returns_the_maximum() -> None:
    heatmaps = torch.zeros(1, 3, 12, 12)
    heatmaps[0, 1, :, 6] = 1.0  # a ridge: all values of one column are equal
    # The vertex of the fitted parabola is far outside the heatmap.
    heatmaps[0, 2] = torch.arange(144.0).reshape(12, 12)
    places, scores = decode_heatmaps(heatmaps)
    assert places.tolist() == [[[0, 0], [6, 0], [11, 11]]]
    assert scores.tolist() == [[0, 1, 143]]
    assert decode_heatmaps(torch.randn(2, 5, 32, 32))[0].isfinite().all()


def test_expected_distances_equal_those_of_squared_gaussians() -> None:
    heatmaps, _ = encode_keypoints(torch.tensor([[[20.0, 30.0, 2.0]]]).double(), (61, 41), (61, 41), sigma=4.0)
    here, there = (torch.tensor([[place]]).double() for place in ((20.0, 30.0), (20.0, 430.0)))
    # The square has the standard deviation 4 / sqrt(2); the mean distance of a 2D Gaussian is sqrt(pi / 2) times it.
    assert expected_distances(heatmaps, here).item() == pytest.approx(4 * (np.pi / 4) ** 0.5, rel=3e-3)
    assert expected_distances(heatmaps, there).item() == pytest.approx(400, rel=1e-3)
    assert expected_distances(0 * heatmaps, here).item() == 0


def test_heatmaps_of_a_mirror_image_flip_back_without_a_shift() -> None:
    keypoints = draw_keypoints(5)
    mirrored = keypoints[:, [1, 0, 3, 2, 4]].clone()
    mirrored[..., 0] = IMAGE[1] - 1 - mirrored[..., 0]
    expected, actual = (encode_keypoints(points, IMAGE, HEATMAP, 2.0)[0] for points in (keypoints, mirrored))
    assert_close(flip_heatmaps(actual, PAIRS), expected, 1e-12, "heatmaps")


def test_prediction_with_the_mirror_image_is_symmetric_and_leaves_padding_out() -> None:
    model = build("classic_keypoints")
    model.options.flip_pairs = PAIRS
    images = pixels(model.config, grid=(3, 5))
    expected = (model(images).heatmaps + flip_heatmaps(model(images.flip(-1)).heatmaps, PAIRS)) / 2
    heatmaps = model.predict_flipped(images).heatmaps
    assert torch.equal(heatmaps, expected.detach())
    assert_close(flip_heatmaps(model.predict_flipped(images.flip(-1)).heatmaps, PAIRS), heatmaps, 1e-6, "mirrored")
    with pytest.raises(ValueError, match=r"Call model\.eval"):
        model.train().predict_flipped(images)
    model = build("simple_keypoints")
    images, mask = pixels(model.config, grid=(4, 5)), torch.ones(2, 4, 5, dtype=torch.bool)
    mask[0, 3:], mask[0, :, 2:] = False, False
    heatmaps = model.predict_flipped(images, mask).heatmaps
    assert heatmaps.shape == (2, 5, 8, 10)
    alone = model.predict_flipped(images[:1, :, :24, :16]).heatmaps
    assert_close(heatmaps[:1, :, :6, :4], alone, 1e-6, "the padded one")
    assert_close(heatmaps[1:], model.predict_flipped(images[1:]).heatmaps, 1e-6, "the whole one")


def test_loss_is_the_mean_of_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    heatmaps = torch.rand(2, 3, 8, 12, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[[5, 9, 2], [40, 3, 1], [0, 0, 0]], [[20, 20, 1], [9, 7, 0], [-90, 4, 2]]]).double()
    options = HfViTKeypointConfig(sigma=1.5)
    targets, _ = encode_keypoints(labels, (32, 48), (8, 12), 1.5)
    weights = torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = (weights * (heatmaps - targets).square().mean(dim=(2, 3))).mean()
    assert float(keypoint_loss(heatmaps, labels, (32, 48), options)) == pytest.approx(float(expected), rel=1e-12)
    assert keypoint_loss(targets, labels, (32, 48), options) == 0
    labels[..., 2] = 0
    assert keypoint_loss(heatmaps, labels, (32, 48), options) == 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("head", KEYPOINTS)
def test_heads_overfit_one_batch(head: str) -> None:
    torch.manual_seed(0)
    options = {name: value for name, value in KEYPOINTS[head].items() if name in ("head", "norm")}
    model = HfViTForKeypointDetection(small_config(keypoint_config={**options, "hidden_size": 32}))
    images = pixels(model.config, batch=3)
    labels = draw_keypoints(15, image_size=(32, 32)).float().reshape(3, 5, 3)
    first = model(images, labels=labels).loss
    train(model, {"pixel_values": images, "labels": labels}, steps=300)
    with torch.no_grad():
        outputs = model(images, labels=labels)
    assert outputs.loss < first / 20
    places, scores = decode_heatmaps(outputs.heatmaps)
    places *= 31 / (outputs.heatmaps.shape[-1] - 1)
    assert (places - labels[..., :2]).abs().max() < 1
    assert scores.min() > 0.5


def test_patch_padding_shifts_patches_beyond_the_image_border() -> None:
    model, plain = build(patch_padding=2), build()
    images = pixels(model.config, grid=(3, 5))
    shifted = torch.nn.functional.pad(images, (2, -2, 2, -2))
    assert_close(model(images).last_hidden_state, plain(shifted).last_hidden_state, 1e-6, "tokens")
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    mask[0, :, 3:] = False
    padded = model(images, patch_attention_mask=mask).last_hidden_state[0, 1:].unflatten(0, (3, 5))[:, :3]
    alone = model(images[:1, :, :, :24]).last_hidden_state[0, 1:].unflatten(0, (3, 3))
    assert_close(padded, alone, 1e-5, "tokens of the padded image")


def test_patch_padding_is_scaled_with_the_patch_size() -> None:
    for patch_size, padding in ((16, 4), (8, 2), (4, 1), (2, 0)):
        model = build(HfViTModel, patch_padding=2)
        apply_geometry(model, patch_size=patch_size)
        assert model.config.patch_padding == padding
        for one in (model, HfViTModel(HfViTConfig.from_dict(model.config.to_dict()))):
            assert one.embeddings.patch_embeddings.projection.padding == (padding, padding)
