"""Test tiles of large images: merged boxes, blended maps, batches, options of the pipeline and the command."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import ViTImageProcessor, pipeline
from transformers.modeling_outputs import DepthEstimatorOutput, SemanticSegmenterOutput

import hf_vit
from hf_vit import HfViTImageProcessor
from hf_vit.cli import main
from hf_vit.model import large_images
from hf_vit.model.large_images import blended_bands, fit_scale_and_shift, place_tiles
from hf_vit.model.task_object_detection import merge_tiles

from ..helpers.images import noise
from ..helpers.models import save_model, small_config
from ..helpers.references import draw_weights


DETECTION = {"detection_config": {"decoder": "queries", "num_queries": 6}}
TASKS = {
    "object-detection": ("ForObjectDetection", DETECTION, {"threshold": 0.05}),
    "image-segmentation": ("ForSemanticSegmentation", {}, {"subtask": "semantic"}),
    "depth-estimation": ("ForDepthEstimation", {"depth_config": {"depth_estimation_type": "relative"}}, {}),
}


def make_model(task: str) -> Any:
    name, options, _ = TASKS[task]
    model = getattr(hf_vit, f"HfViT{name}")(small_config(**options))
    draw_weights(model)
    return model.eval()


def make_pipeline(task: str, model: Any = None, **options: Any) -> Any:
    model = make_model(task) if model is None else model
    return pipeline(task, model=model, image_processor=HfViTImageProcessor.for_model(model), **options)


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(noise(height, width, 3, seed=1))


def plain(answer: Any) -> Any:
    """Return a pipeline result with images and tensors as lists."""
    if isinstance(answer, dict):
        return {name: plain(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [plain(value) for value in answer]
    return np.asarray(answer).tolist() if isinstance(answer, Image.Image | Tensor) else answer


def test_tiles_cover_the_image_and_overlap() -> None:
    assert place_tiles((60, 100), 40, 0.25) == ([(0, 0), (0, 30), (0, 60), (20, 0), (20, 30), (20, 60)], (40, 40))
    assert place_tiles((30, 100), (40, 50), 0) == ([(0, 0), (0, 50)], (30, 50))
    assert place_tiles((30, 50), 50, 0.99) == ([(0, 0)], (30, 50))


def objects(*rows: tuple[float, int, list[float]]) -> dict[str, Tensor]:
    scores, labels, boxes = zip(*rows, strict=True) if rows else ((), (), ())
    return {
        "scores": torch.tensor(scores, dtype=torch.float32),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
    }


def merged(*tiles: dict[str, Tensor], nms_threshold: float | None = None) -> list[tuple[float, int, list[float]]]:
    """Merge the objects of an image of 100 x 180 pixels and of its two tiles, which overlap by 20 pixels."""
    found = merge_tiles(tiles, [(0, 0), (0, 0), (0, 80)], [(100, 180), (100, 100), (100, 100)], nms_threshold)
    rows = zip(found["scores"].tolist(), found["labels"].tolist(), found["boxes"].tolist(), strict=True)
    return [(round(score, 4), label, box) for score, label, box in rows]


def test_boxes_are_shifted_and_merged_by_class() -> None:
    whole = objects((0.5, 0, [0, 0, 178, 90]))
    left = objects((0.9, 1, [10, 10, 30, 30]), (0.7, 0, [82, 10, 98, 30]))
    right = objects((0.8, 0, [2, 10, 18, 30]), (0.6, 1, [2, 10, 18, 30]))
    large, small, first, second = (
        (0.5, 0, [0, 0, 178, 90]),
        (0.9, 1, [10, 10, 30, 30]),
        (0.8, 0, [82, 10, 98, 30]),
        (0.6, 1, [82, 10, 98, 30]),
    )
    assert merged(whole, left, right) == [small, first, second, large]
    assert merged(objects(), objects(), objects()) == []
    # Boxes with an IoU of 0.6 are duplicates only for a lower threshold.
    left, right = objects((0.9, 0, [80, 0, 96, 40])), objects((0.8, 0, [4, 0, 20, 40]))
    assert len(merged(objects(), left, right)) == 1
    assert len(merged(objects(), left, right, nms_threshold=0.7)) == 2


def test_whole_objects_replace_their_parts() -> None:
    # The box in the left tile ends at the border. The complete box in the right tile has an IoU of 0.38 with it.
    cut, complete = objects((0.3, 0, [75, 40, 100, 60])), objects((0.9, 0, [3, 40, 40, 60]))
    assert merged(objects(), cut, complete) == [(0.9, 0, [83, 40, 120, 60])]
    assert merged(objects(), cut, objects()) == [(0.3, 0, [75, 40, 100, 60])]
    complete["labels"] += 1
    assert len(merged(objects(), cut, complete)) == 2
    # The box of an object in the whole image replaces two boxes of its parts.
    parts = objects((0.6, 0, [40, 0, 100, 30])), objects((0.5, 0, [0, 0, 50, 30]))
    assert merged(objects((0.7, 0, [40, 0, 160, 30])), *parts) == [(0.7, 0, [40, 0, 160, 30])]
    # Boxes at the border of the image are complete.
    small = objects((0.6, 0, [0, 0, 10, 10]))
    assert len(merged(objects((0.7, 0, [0, 0, 30, 10])), small, objects())) == 2


@pytest.mark.parametrize("numel", [1, 100, 2**20])
@pytest.mark.parametrize("overlap", [0, 0.2, 0.7])
def test_blended_maps_are_exact(overlap: float, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_images, "BAND_NUMEL", numel)
    image = torch.from_numpy(noise(37, 53, 2, seed=0)).movedim(-1, 0).float()  # (2, 37, 53)
    places, (height, width) = place_tiles((37, 53), (16, 20), overlap)
    maps = [image[:, top : top + height, left : left + width] for top, left in places]
    blended = torch.cat([*blended_bands(maps, places, (height, width))], dim=1)
    torch.testing.assert_close(blended, image, rtol=1e-5, atol=0)
    constant = [torch.full((2, 1, 1), 3.0)] * len(places)
    blended = torch.cat([*blended_bands(constant, places, (height, width))], dim=1)
    torch.testing.assert_close(blended, torch.full((2, 37, 53), 3.0))


def test_relative_depth_is_fitted_to_the_whole_image() -> None:
    target = torch.rand(8, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fit_scale_and_shift(target * 3 + 5, target), target)
    assert fit_scale_and_shift(torch.ones(8, 9), target).unique().numel() == 1
    torch.testing.assert_close(fit_scale_and_shift(-target, target), target.mean().expand(8, 9))


def depth_of_pixels(kind: str, pixel_values: Tensor, **_: Any) -> DepthEstimatorOutput:
    """Return the first channel of the image; relative depth has a different scale and shift in each image."""
    depth = pixel_values[:, 0] + 3  # (B, h, w)
    factors = torch.arange(1, len(depth) + 1)[:, None, None]
    return DepthEstimatorOutput(predicted_depth=depth * factors + factors if kind == "relative" else depth)


@pytest.mark.parametrize("kind", ["metric", "relative"])
def test_depth_of_each_pixel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_vit.HfViTForDepthEstimation(small_config(depth_config={"depth_estimation_type": kind})).eval()
    monkeypatch.setattr(model, "forward", partial(depth_of_pixels, kind))
    ramp = np.arange(64, dtype=np.uint8)[None].repeat(48, axis=0)  # linear: resizing does not change it
    pipe = make_pipeline("depth-estimation", model)
    options: tuple[dict[str, Any], ...] = ({"tile_size": 32}, {})
    image = Image.fromarray(ramp).convert("RGB")
    depth, expected = (pipe(image, **own)["predicted_depth"] for own in options)
    assert depth.shape == expected.shape == (48, 64)
    torch.testing.assert_close(depth[:, 4:-4], expected[:, 4:-4], rtol=0.01, atol=0.02)


def classes_of_pixels(pixel_values: Tensor, **_: Any) -> SemanticSegmenterOutput:
    """Return the logits of class 1 for bright pixels, and of class 0 for dark pixels."""
    bright = pixel_values[:, :1]
    return SemanticSegmenterOutput(logits=torch.cat((-bright, bright), dim=1))


@pytest.mark.parametrize("subtask", [None, "semantic"])
def test_classes_of_each_pixel(subtask: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_vit.HfViTForSemanticSegmentation(small_config()).eval()
    monkeypatch.setattr(model, "forward", classes_of_pixels)
    pixels = np.zeros((64, 96, 3), dtype=np.uint8)
    pixels[:, 40:] = 255
    pipe = make_pipeline("image-segmentation", model, tile_size=32, overlap=0.5)
    dark, bright = pipe(Image.fromarray(pixels), subtask=subtask)
    assert (np.asarray(bright["mask"]) > 0).tolist() == (pixels[..., 0] > 0).tolist()
    assert (np.asarray(dark["mask"]) > 0).tolist() == (pixels[..., 0] == 0).tolist()
    assert (dark["score"] is None) == (subtask == "semantic")
    with pytest.raises(ValueError, match="subtask='instance' must be panoptic or semantic"):
        pipe(Image.fromarray(pixels), subtask="instance")


@pytest.mark.parametrize("task", TASKS)
def test_images_that_fit_into_a_tile_have_the_same_result(task: str) -> None:
    pipe, options = make_pipeline(task), TASKS[task][2]
    for size in ((40, 50), (20, 50)):
        image = photo(*size)
        assert plain(pipe(image, tile_size=(40, 50), overlap=0.3, **options)) == plain(pipe(image, **options))
    large, small = photo(60, 90), photo(40, 50)
    together = pipe([large, small, large], tile_size=50, batch_size=3, **options)
    assert plain(together[1]) == plain(pipe([small], **options)[0])
    assert plain(together[0]) == plain(together[2])


@pytest.mark.parametrize(("task", "count"), [("object-detection", 9), ("image-segmentation", 8)])
def test_tiles_are_batched(task: str, count: int) -> None:
    model, sizes = make_model(task), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    options: dict[str, Any] = {"tile_size": 32, "overlap": 0.1, **TASKS[task][2]}
    make_pipeline(task, model)(photo(60, 110), **options)
    make_pipeline(task, model, batch_size=4)(photo(60, 110), **options)
    assert sizes == [count, 4, 4, *[1] * (count - 8)]  # 8 tiles and, for objects, the whole image


INVALID = {
    "tile_size=0 must be a positive integer": {"tile_size": 0},
    "tile_size=True must be": {"tile_size": True},
    r"tile_size=\(5,\) must be": {"tile_size": (5,)},
    "tile_size='5' must be": {"tile_size": "5"},
    r"overlap=1 must lie in \[0, 1\)": {"tile_size": 5, "overlap": 1},
    "overlap=nan must lie": {"tile_size": 5, "overlap": float("nan")},
    "overlap=0.1 requires tiles. Set tile_size": {"overlap": 0.1},
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_options_raise(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pipeline("object-detection")(photo(40, 50), **INVALID[message])


def test_other_models_do_not_support_tiles() -> None:
    for task, name in (
        ("image-classification", "HfViTForImageClassification"),
        ("keypoint-detection", "HfViTForKeypointDetection"),
        ("image-segmentation", "HfViTForUniversalSegmentation"),
    ):
        model = getattr(hf_vit, name)(small_config())
        draw_weights(model)
        with pytest.raises(ValueError, match=f"requires a model of hf_vit for object detection, .*, not {name}"):
            make_pipeline(task, model)(photo(40, 50), tile_size=32)
    pipe = pipeline(
        "object-detection", model=make_model("object-detection"), image_processor=ViTImageProcessor(size=32)
    )
    with pytest.raises(ValueError, match="tile_size=32 requires an image processor of hf_vit"):
        pipe(photo(40, 50), tile_size=32)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = save_model(make_model("object-detection"), tmp_path / "model"), tmp_path / "photo.png"
    photo(60, 90).save(file)
    main(["predict", str(model), str(file), "--tile_size", "40", "--overlap", "0.3", "--threshold", "0.05"])
    found = json.loads(capsys.readouterr().out)["objects"]
    pipe = pipeline("object-detection", model=str(model))
    assert found == plain(pipe(str(file), tile_size=40, overlap=0.3, threshold=0.05))
    assert found != plain(pipe(str(file), threshold=0.05))
    for words, message in ((["--tile_size", "0"], "tile_size"), (["--tile_size", "40", "--overlap", "1"], "overlap")):
        with pytest.raises(SystemExit, match=f"{message}.* must"):
            main(["predict", str(model), str(file), *words])
    draw_weights(classifier := hf_vit.HfViTForImageClassification(small_config()))
    classifier = save_model(classifier, tmp_path / "classifier")
    with pytest.raises(SystemExit, match=r"tile_size=40 requires .*, not HfViTForImageClassification"):
        main(["predict", str(classifier), str(file), "--tile_size", "40"])
