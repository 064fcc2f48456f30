"""Test semantic segmentation with sliding windows, several scales and flipping."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit import HfViTForSemanticSegmentation, HfViTImageProcessor
from hf_vit.model.large_images import window_starts
from hf_vit.model.task_semantic_segmentation import overlapping_stride, segment_copies, slide

from ..helpers.images import noise
from ..helpers.models import pixels
from ..helpers.references import assert_close
from .checks import build, pad_images


@pytest.fixture(scope="module")
def model() -> Any:
    return build(HfViTForSemanticSegmentation)


def probabilities(logits: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(logits, size=size, mode="bilinear", align_corners=False).softmax(dim=1)


def test_windows_leave_no_gap_and_end_with_the_image() -> None:
    for size, window, stride in ((40, 16, 8), (40, 16, 16), (16, 16, 8), (72, 24, 16)):
        starts = window_starts(size, window, stride)
        assert (starts[0], starts[-1]) == (0, size - window)
        assert set().union(*(range(start, start + window) for start in starts)) == set(range(size))
        assert len(starts) == len(set(starts))
    # The default stride is two thirds of a window.
    assert overlapping_stride((48, 64), (8, 16)) == (32, 32)
    assert overlapping_stride((8, 8), (8, 8)) == (8, 8)


def test_overlapping_windows_are_averaged() -> None:
    seen = []

    def forward(images: Tensor) -> Tensor:
        seen.append(images)
        return images.amax(dim=(2, 3), keepdim=True)  # the logit of a window is its largest pixel

    images = torch.arange(24.0).reshape(1, 1, 4, 6)
    logits = slide(forward, images, (4, 4), (2, 2))
    assert [tuple(window.shape[2:]) for window in seen] == [(4, 4), (4, 4)]
    assert logits[0, 0, 0].tolist() == [21, 21, 22, 22, 23, 23]


def test_windows_of_images(model: Any) -> None:
    """A window that covers the image gives the plain forward pass. Larger images use overlapping windows."""
    images = pixels(model.config, grid=(4, 5))
    expected = probabilities(model(images).logits, (32, 40))
    for window in (None, 48, (32, 40), (64, 64)):
        logits = model.segment(images, window_size=window).logits
        assert logits.shape == (2, 5, 32, 40)
        assert_close(logits.exp(), expected, 1e-5, f"probabilities with windows of {window}")
    images = pixels(model.config, grid=(6, 7))
    windows = model.segment(images, window_size=32, window_stride=(16, 24)).logits
    assert windows.shape == (2, 5, 48, 56)
    corner = model(images[:, :, :32, :32]).logits
    expected = probabilities(corner, (32, 32))[:, :, :16, :24]  # only one window covers this corner
    assert_close(windows[:, :, :16, :24].exp(), expected, 1e-5, "corner")
    assert_close(windows.exp().sum(dim=1), torch.ones(2, 48, 56), 1e-5, "sum")


def test_scaled_and_mirrored_copies_by_hand(model: Any) -> None:
    images = pixels(model.config, grid=(4, 4))
    large = F.interpolate(images, size=(48, 48), mode="bilinear", align_corners=False, antialias=True)
    logits = [own for copy in (images, large) for own in (model(copy).logits, model(copy.flip(-1)).logits.flip(-1))]
    expected = sum(probabilities(own, (32, 32)) for own in logits)
    actual = model.segment(images, scales=(1.0, 1.5), flip=True).logits.exp()
    assert_close(actual, expected / 4, 1e-5, "probabilities")


def test_copies_have_whole_patches() -> None:
    sizes = []

    def forward(images: Tensor) -> Tensor:
        sizes.append(tuple(images.shape[2:]))
        return images

    for scale in (0.5, 1.0, 1.2, 0.01):
        logits = segment_copies(forward, torch.rand(1, 3, 35, 43), (8, 8), [scale], flip=False)
        assert logits.shape == (1, 3, 35, 43)
    assert sizes == [(16, 24), (32, 40), (40, 48), (8, 8)]


def test_double_precision_and_impossible_classes_stay() -> None:
    own = torch.tensor([0.0, -1000.0], dtype=torch.float64)[:, None, None].expand(1, 2, 2, 2)
    logits = segment_copies(lambda images: own, torch.zeros(1, 3, 8, 8), (8, 8), [1.0], flip=True)
    assert logits.dtype == torch.float64
    assert logits.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"window_size": 16, "scales": (0.5, 1.0), "flip": True}])
def test_images_of_a_padded_batch_are_seen_alone(model: Any, options: dict[str, Any]) -> None:
    grids = [(4, 3), (2, 6), (4, 6)]
    images = [pixels(model.config, batch=1, grid=grid) for grid in grids]
    batch, mask = pad_images(images, value=9.0)
    logits = model.segment(pixel_values=batch, patch_attention_mask=mask, **options).logits
    assert logits.shape == (3, 5, 32, 48)
    for own, image, (rows, columns) in zip(logits, images, grids, strict=True):
        alone = model.segment(image, **options).logits[0]
        padding = (0, 48 - 8 * columns, 0, 32 - 8 * rows)
        assert_close(own, F.pad(alone[None], padding, mode="replicate")[0], 1e-5, "logits")


def test_segment_accepts_the_output_of_the_image_processor(model: Any) -> None:
    processor = HfViTImageProcessor(size={"shortest_edge": 16}, do_pad=True, ensure_multiple_of=8)
    images, sizes = [noise(20, 40, 3), noise(40, 20, 3)], [(20, 40), (40, 20)]
    outputs = model.segment(**processor(images, return_tensors="pt"))
    maps = processor.post_process_semantic_segmentation(outputs, sizes)
    for image, size, found in zip(images, sizes, maps, strict=True):
        alone = model.segment(**processor(image, return_tensors="pt"))
        assert torch.equal(processor.post_process_semantic_segmentation(alone, [size])[0], found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_copies_of_half_precision(dtype: torch.dtype) -> None:
    model = build(HfViTForSemanticSegmentation)
    images = pixels(model.config)
    options = {"scales": (0.5, 1.5), "flip": True, "window_size": 32}
    expected = model.segment(images, **options).logits.exp()
    logits = model.to(dtype).segment(images.to(dtype), **options).logits
    assert logits.dtype == torch.float32
    assert_close(logits.exp(), expected, 0.1, "probabilities")
    with pytest.raises(ValueError, match=r"In training mode, results are random .* Call model\.eval\(\)"):
        model.train().segment(images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": 20}, r"window_size=20 must be a positive multiple of the patch size \(8, 8\)"),
        ({"window_size": (16, 0)}, r"window_size=\(16, 0\) must be"),
        ({"window_size": 16, "window_stride": 12}, "window_stride=12 must be a positive multiple"),
        ({"window_size": 16, "window_stride": 24}, r"window_stride=\(24, 24\) .* at most window_size=\(16, 16\)"),
        ({"scales": ()}, r"scales=\[\] must be positive"),
        ({"scales": (1.0, -2.0)}, r"scales=\[1.0, -2.0\]"),
    ],
)
def test_bad_options_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.segment(pixels(model.config), **options)
