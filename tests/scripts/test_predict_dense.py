"""Test `hf-vit predict` with models for segmentation and depth: output, files and pictures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit.data.targets import read_depth
from hf_vit.inference.sources import name_outputs
from hf_vit.inference.writers import METRIC_DEPTH, RELATIVE_DEPTH, WRITERS
from hf_vit.model.pretrained import HfViTPreTrainedModel
from hf_vit.visualize import segmentation_palette

from ..helpers.models import small_config
from ..helpers.references import draw_weights
from .test_predict import lines_of


NAMES = ["sky", "road", "cat", "dog", "car"]
LABEL2ID = {name: number for number, name in enumerate(NAMES)}
SIZES = {"wide.png": (60, 40), "high.jpg": (30, 50)}  # (width, height) in pixels
# In pictures of predictions, images are enlarged until their longer side has at least this length in pixels.
PANEL_SIZE = 320
FEW_QUERIES = {"num_queries": 2, "num_blocks": 1}
MODELS: dict[str, tuple[type[HfViTPreTrainedModel], dict]] = {
    "semantic": (hf_vit.HfViTForSemanticSegmentation, {}),
    "universal": (hf_vit.HfViTForUniversalSegmentation, {"universal_segmentation_config": FEW_QUERIES}),
    "depth": (hf_vit.HfViTForDepthEstimation, {}),
    "relative": (hf_vit.HfViTForDepthEstimation, {"depth_config": {"depth_estimation_type": "relative"}}),
    "headless": (hf_vit.HfViTModel, {}),
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with saved models of each segmentation and depth task, and images of several sizes."""
    folder = tmp_path_factory.mktemp("workplace")
    size = {"size": {"shortest_edge": 32}, "do_center_crop": False, "do_pad": True, "ensure_multiple_of": 8}
    for name, (model_class, overrides) in MODELS.items():
        model = model_class(small_config(id2label=dict(enumerate(NAMES)), label2id=LABEL2ID, **overrides))
        draw_weights(model)
        model.save_pretrained(folder / name)
        hf_vit.HfViTImageProcessor(**size).save_pretrained(folder / name)
    write_noise(folder / "images", SIZES)
    return folder


def write_noise(folder: Path, sizes: dict[str, tuple[int, int]]) -> None:
    folder.mkdir()
    for seed, (name, (width, height)) in enumerate(sizes.items()):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)


def predict(workplace: Path, capsys: pytest.CaptureFixture[str], model: str, *options: str) -> list[dict]:
    """Run `hf-vit predict` on all images, and return the printed JSON lines."""
    images = [str(workplace / "images" / name) for name in SIZES]
    hf_vit.cli.main(["predict", str(workplace / model), *images, *options])
    lines = lines_of(capsys.readouterr().out)
    assert [line["file"] for line in lines] == images
    return lines


def run(workplace: Path, model: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict]:
    """Run `hf-vit predict` with an output folder, check its pictures, and return the printed JSON lines."""
    lines = predict(workplace, capsys, model, "--output_dir", str(folder), *options)
    for line, (name, (width, height)) in zip(lines, SIZES.items(), strict=True):
        assert sorted(line["written"]) == sorted(map(str, folder.glob(f"{Path(name).stem}_*")))
        with Image.open(line["written"][-1]) as picture:
            scale = PANEL_SIZE / max(width, height)
            assert picture.width > 2 * scale * width
            assert picture.height > scale * height
    return lines


def post_processed(workplace: Path, model: str, method: str, **options: Any) -> list:
    """Return the expected results: the output of a post-processing method of the image processor for each image."""
    opened = MODELS[model][0].from_pretrained(workplace / model)
    processor = hf_vit.HfViTImageProcessor.from_pretrained(workplace / model)
    results = []
    for name, (width, height) in SIZES.items():
        with torch.no_grad(), Image.open(workplace / "images" / name) as image:
            outputs = opened(**processor(images=image, return_tensors="pt"))
        results += getattr(processor, method)(outputs, target_sizes=[(height, width)], **options)
    return results


def shown(mask: Image.Image, number: int) -> tuple[int, int, int]:
    """Return the palette color of a class or segment number in an indexed mask."""
    return tuple(mask.getpalette()[3 * number : 3 * number + 3])


@pytest.mark.parametrize(("model", "options"), [("semantic", []), ("universal", ["--subtask", "semantic"])])
def test_predict_writes_semantic_maps(
    model: str, options: list[str], workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(workplace, model, tmp_path, capsys, *options)
    maps = post_processed(workplace, model, "post_process_semantic_segmentation")
    for line, expected in zip(lines, maps, strict=True):
        numbers, counts = expected.unique(return_counts=True)
        assert len(numbers) > 1 or model == "universal"
        found = {entry["id"]: entry for entry in line["classes"]}
        assert sorted(found) == numbers.tolist()
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            assert found[number]["label"] == NAMES[number]
            assert found[number]["share"] == pytest.approx(count / expected.numel(), abs=1e-6)
            assert model == "universal" or 1 / len(NAMES) < found[number]["score"] < 1
        with Image.open(line["written"][0]) as mask:
            assert mask.mode == "P"
            assert np.array_equal(np.asarray(mask), expected)
            for number in numbers.tolist():
                assert shown(mask, number) == tuple(segmentation_palette(len(NAMES))[number])


@pytest.mark.parametrize("subtask", ["panoptic", "instance"])
def test_predict_writes_segments(
    subtask: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(workplace, "universal", tmp_path, capsys, "--subtask", subtask, "--threshold", "0.1")
    method = f"post_process_{subtask}_segmentation"
    results = post_processed(workplace, "universal", method, threshold=0.1, overlap_mask_area_threshold=0.8)
    assert sum(len(line["segments"]) for line in lines) > 1
    for line, result in zip(lines, results, strict=True):
        info = {segment["id"]: segment for segment in result["segments_info"]}
        seen = [number for number in info if (result["segmentation"] == number).any()]
        assert len(line["segments"]) == len(seen)
        with Image.open(line["written"][0]) as mask:
            numbers = np.asarray(mask)
            for segment, number in zip(line["segments"], seen, strict=True):
                pixels = (result["segmentation"] == number).numpy()
                rows, columns = np.nonzero(pixels)
                assert segment["label"] == NAMES[info[number]["label_id"]]
                assert segment["score"] == pytest.approx(info[number]["score"], abs=1e-5)
                assert segment["area"] == pixels.sum()
                assert segment["box"] == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert np.array_equal(numbers == segment["id"], pixels)
                assert shown(mask, segment["id"]) == tuple(segmentation_palette(len(NAMES))[info[number]["label_id"]])
            assert np.array_equal(numbers == 255, result["segmentation"] == -1)


def test_predict_writes_metric_depth(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(workplace, "depth", tmp_path, capsys)
    results = post_processed(workplace, "depth", "post_process_depth_estimation")
    for line, expected in zip(lines, (result["predicted_depth"].numpy() for result in results), strict=True):
        assert line["unit"] == "meters"
        assert [line[name] for name in ("min", "median", "max")] == pytest.approx(
            [expected.min(), np.median(expected), expected.max()], abs=1e-4
        )
        depth = np.load(line["written"][0])
        assert depth.dtype == np.float32
        assert depth == pytest.approx(expected, abs=1e-4)
        assert read_depth(Path(line["written"][1])).numpy() == pytest.approx(expected, abs=6e-4)


def test_relative_depth_is_no_millimeters(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in run(workplace, "relative", tmp_path, capsys):
        assert line["unit"] == "relative inverse depth"
        assert [Path(file).suffix for file in line["written"]] == [".npy", ".png"]
        assert np.median(np.load(line["written"][0])) == pytest.approx(line["median"], abs=1e-3)


def test_depth_files_and_pictures_of_depth(tmp_path: Path) -> None:
    depth = torch.tensor([[65.535, 65.537], [0.0, 1.0]])
    files = {ending: tmp_path / f"x{ending}" for ending in METRIC_DEPTH.files}
    for ending, write in METRIC_DEPTH.files.items():
        write(Image.new("RGB", (2, 2)), {"predicted_depth": depth}, small_config(), files[ending])
    assert np.asarray(Image.open(files["_depth.png"])).tolist() == [[65535, 0], [0, 1000]]
    assert np.array_equal(np.load(files["_depth.npy"]), depth)

    depth = torch.tensor([[1.0, 5.0]]).repeat_interleave(20, dim=1).repeat(20, 1)  # the smallest depth is at the left
    for writer, is_left_near in ((METRIC_DEPTH, True), (RELATIVE_DEPTH, False)):
        picture = writer.draw(Image.new("RGB", (40, 20), "red"), {"predicted_depth": depth}, small_config(), "caption")
        pixels = np.asarray(picture, dtype=int)
        bright, dark = (
            np.median(np.nonzero(np.abs(pixels - color).max(axis=-1) < 3)[1])
            for color in ((253, 231, 36), (68, 1, 84))
        )
        assert abs(bright - dark) > 100
        assert (bright < dark) == is_left_near


def test_one_picture_of_all_images(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, key in (("semantic", "classes"), ("universal", "segments"), ("depth", "unit")):
        file = tmp_path / model / "all.png"
        options = ["--threshold", "0.1", "--picture", str(file)]
        hf_vit.cli.main(["predict", str(workplace / model), str(workplace / "images"), *options])
        lines = lines_of(capsys.readouterr().out)
        assert [set(line) & {"classes", "segments", "unit"} for line in lines] == [{key}] * 2
        with Image.open(file) as picture:
            # The picture shows two images, each next to its prediction.
            assert picture.width * picture.height > 4 * PANEL_SIZE**2 / 1.5


def test_a_model_without_a_head_is_refused(workplace: Path, tmp_path: Path) -> None:
    words = [str(workplace / "headless"), str(workplace / "images"), "--output_dir", str(tmp_path / "new")]
    with pytest.raises(SystemExit, match="was saved as HfViTModel, which is not supported"):
        hf_vit.cli.main(["predict", *words])
    assert not (tmp_path / "new").exists()


def test_files_of_one_name_do_not_overwrite_each_other() -> None:
    files = ["a/1.png", "b/1.png", "b/1.jpg", "1-2.png", "c/1.png", "2.png"]
    names = name_outputs([Path(file) for file in files])
    assert names == ["1", "1-2", "1-3", "1-2-2", "1-4", "2"]


def test_segments_are_laid_over_the_image_with_outlines() -> None:
    image, mask = Image.new("RGB", (400, 200), "black"), Image.new("L", (400, 200))
    mask.paste(255, (100, 50, 300, 150))
    answer = [{"label": "dog", "score": 0.9, "mask": mask}]
    config = small_config(id2label=dict(enumerate(NAMES)), label2id=LABEL2ID)
    for task, opacity, outside in (("ForSemanticSegmentation", 0.7, 90), ("Segmentation", 0.65, 0)):
        picture = np.asarray(WRITERS[task].draw(image, answer, config, "caption"), dtype=float)
        color = opacity * segmentation_palette(len(NAMES))[LABEL2ID["dog"]]
        is_inside = np.abs(picture - color).max(axis=-1) < 3
        rows, columns = np.nonzero(is_inside)
        assert np.ptp(columns) == pytest.approx(2 * np.ptp(rows), rel=0.1)
        segment = picture[rows.min() - 2 : rows.max() + 3, columns.min() - 2 : columns.max() + 3]
        assert is_inside.sum() > 0.8 * segment[..., 0].size
        has_edge = (segment > 200).all(axis=-1).sum() > 200
        assert has_edge == (task == "Segmentation")
        assert picture[rows.min() - 10, columns.min() - 10].tolist() == [outside] * 3
