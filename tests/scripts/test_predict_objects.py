"""Test `hf-vit predict` with models for object and keypoint detection: output, files and pictures."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import pipeline

from hf_vit import HfViTConfig, HfViTForKeypointDetection, HfViTForObjectDetection, cli
from hf_vit.inference.writers import CORNERS, WRITERS
from hf_vit.model import task_keypoint_detection
from hf_vit.visualize import segmentation_palette
from hf_vit.visualize.colors import IGNORED

from ..helpers.models import save_model, small_config
from ..helpers.references import draw_weights
from ..processing.test_keypoint_pipeline import DETECTION, NAMES, POSE
from .test_predict import lines_of
from .test_predict_dense import SIZES, predict, write_noise


BLACK = Image.new("RGB", (40, 20))
SCALE = 480 / BLACK.width  # the image is enlarged by this factor
COLORS = [tuple(color) for color in segmentation_palette(4).tolist()]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with saved models `objects` and `pose`, images, and boxes of objects in these images."""
    folder = tmp_path_factory.mktemp("workplace")
    models = {
        "objects": HfViTForObjectDetection(small_config(**DETECTION)),
        "pose": HfViTForKeypointDetection(small_config(**POSE)),
    }
    for name, model in models.items():
        draw_weights(model)
        save_model(model, folder / name, do_affine_crop=name == "pose")
    write_noise(folder / "images", SIZES)
    boxes = {"wide.png": [[1, 2, 30, 40], [5, 5, 25, 15.5]], "high.jpg": []}
    objects = {
        name: [{"label": "x", "box": dict(zip(CORNERS, box, strict=True))} for box in boxes[name]] for name in boxes
    }
    lines = [{"file": str(folder / "images" / name), "objects": objects[name]} for name in boxes]
    (folder / "boxes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def rows_of(file: str) -> list[list[str]]:
    with open(file, newline="") as stream:
        return list(csv.reader(stream))


def test_predict_returns_boxes(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = predict(workplace, capsys, "objects", "--threshold", "0.2", "--output_dir", str(tmp_path))
    assert not any("best_score" in line for line in lines)
    detect = pipeline("object-detection", model=str(workplace / "objects"))
    assert sum(len(line["objects"]) for line in lines) > 1
    for line in lines:
        assert line["objects"] == detect(line["file"], threshold=0.2)
        table, picture = line["written"]
        header, *rows = rows_of(table)
        assert header == ["label", "score", "xmin", "ymin", "xmax", "ymax"]
        wanted = [[one["label"], one["score"], *one["box"].values()] for one in line["objects"]]
        assert rows == [[str(value) for value in row] for row in wanted]
        assert Path(picture).name == f"{Path(line['file']).stem}_picture.png"


def test_predict_returns_keypoints_of_whole_images_above_the_threshold(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(task_keypoint_detection.logger, "warning_once", warned.append)
    lines = predict(workplace, capsys, "pose")
    assert len(warned) == len(lines)
    assert "this model was trained on crops of objects. Pass the boxes" in warned[0]
    for line, (width, height) in zip(lines, SIZES.values(), strict=True):
        (pose,) = line["poses"]
        assert pose["labels"] == NAMES
        assert list(pose["box"].values()) == [0, 0, width, height]
    least = min(lines[0]["poses"][0]["scores"])
    (pose,) = predict(workplace, capsys, "pose", "--threshold", str(least))[0]["poses"]
    assert len(pose["keypoints"]) == len(pose["labels"]) == len(NAMES) - 1


def test_keypoints_in_boxes(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--boxes", str(workplace / "boxes.jsonl"), "--output_dir", str(tmp_path), "--batch_size", "2"]
    wide, high = predict(workplace, capsys, "pose", *options)
    found = pipeline("keypoint-detection", model=str(workplace / "pose"))
    expected = found(wide["file"], boxes=[[1, 2, 30, 40], [5, 5, 25, 15.5]])
    assert len(wide["poses"]) == 2
    for mine, other in zip(wide["poses"], expected, strict=True):
        assert mine["box"] == other["box"]
        assert np.allclose(mine["keypoints"], other["keypoints"], atol=1e-2)
    assert high["poses"] == []
    header, *rows = rows_of(wide["written"][0])
    assert header == ["object", "label", "x", "y", "score"]
    assert [row[:2] for row in rows] == [[str(number), name] for number in range(2) for name in NAMES]
    assert [float(row[2]) for row in rows[:3]] == [x for x, _ in wide["poses"][0]["keypoints"]]
    assert rows_of(high["written"][0]) == [header]


def test_predicted_boxes_are_inputs_of_keypoint_prediction(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    image, pictures = str(workplace / "images" / "wide.png"), [tmp_path / "new" / f"{name}.png" for name in "ab"]
    cli.main(["predict", str(workplace / "objects"), image, "--threshold", "0.9", "--picture", str(pictures[0])])
    (found,) = lines_of(capsys.readouterr().out)
    assert {"file", "objects", "best_score"} == set(found)
    objects = pipeline("object-detection", model=str(workplace / "objects"))(image, threshold=0.0)
    assert found["best_score"] == objects[0]["score"] < 0.9
    assert f"the best score of all images is {found['best_score']:.3g}" in caplog.text
    boxes = (workplace / "boxes.jsonl").read_text().splitlines()[0]
    found["objects"] += json.loads(boxes)["objects"]
    (tmp_path / "found.jsonl").write_text(json.dumps(found))
    boxes = ["--boxes", str(tmp_path / "found.jsonl")]
    cli.main(["predict", str(workplace / "pose"), image, *boxes, "--picture", str(pictures[1])])
    (line,) = lines_of(capsys.readouterr().out)
    assert len(line["poses"]) == len(found["objects"]) >= 2
    assert all(picture.is_file() for picture in pictures)


def test_boxes_of_another_kind_are_refused(workplace: Path, tmp_path: Path) -> None:
    images = [str(workplace / "images" / name) for name in SIZES]
    of_objects = r"requires a model for keypoint detection, but .*objects has another task"
    for model, content, message in (
        ("pose", None, "No such file"),
        ("pose", "{}", 'Line 1 of .*boxes.* is not in the format {"file": ..., "objects"'),
        ("pose", "\n", "Line 1 of .* is not in .*, which hf-vit predict prints for an object detection model"),
        ("pose", '{"file": "other.png", "objects": []}', "has no line for .*wide.png \\(2 of 2 images"),
        ("objects", "{}", of_objects),
    ):
        if content is not None:
            (tmp_path / "boxes.jsonl").write_text(content)
        with pytest.raises(SystemExit, match=message):
            cli.main(["predict", str(workplace / model), *images, "--boxes", str(tmp_path / "boxes.jsonl")])


def test_boxes_and_keypoints_are_drawn_with_names_scores_and_skeleton(workplace: Path) -> None:
    config = HfViTConfig.from_pretrained(workplace / "objects")
    box = dict(zip(CORNERS, (10, 8, 30, 18), strict=True))
    answer = [{"label": "LABEL_3", "score": 0.5, "box": box}]
    picture = WRITERS["ForObjectDetection"].draw(BLACK, answer, config, "caption")
    color = COLORS[3]
    assert picture.getpixel((10 * SCALE, 15 * SCALE)) == color
    assert picture.getpixel((30 * SCALE, 12 * SCALE)) == color
    assert picture.getpixel((20 * SCALE, 13 * SCALE)) == (0, 0, 0)
    above = picture.crop((10 * SCALE, 8 * SCALE - 18, 10 * SCALE + 60, 8 * SCALE - 1)).getcolors()
    assert max(above)[1] == color  # background color of the class name
    assert len(above) > 2

    config = HfViTConfig.from_pretrained(workplace / "pose")
    places = {"nose": [10, 10], "left eye": [30, 10], "right eye": [10, 3]}
    pose = {"keypoints": list(places.values()), "labels": list(places), "scores": [1.0, 1.0, 0.0]}
    pose["box"] = dict(zip(CORNERS, (2, 2, 38, 18), strict=True))
    picture = WRITERS["ForKeypointDetection"].draw(BLACK, [pose], config, "caption")
    at = {name: picture.getpixel(((x + 0.5) * SCALE, (y + 0.5) * SCALE)) for name, (x, y) in places.items()}
    assert at["nose"] == pytest.approx(COLORS[0], abs=3)
    assert at["left eye"] == pytest.approx(COLORS[1], abs=3)
    assert 0 < sum(at["right eye"]) < sum(COLORS[2]) / 2  # keypoints with a low score are drawn faintly
    # A line connects the nose and the left eye, but not the two eyes.
    assert picture.getpixel((20.5 * SCALE, 10.5 * SCALE)) == pytest.approx(COLORS[1], abs=25)
    assert picture.getpixel((20.5 * SCALE, 6.5 * SCALE)) == (0, 0, 0)
    assert picture.getpixel((2 * SCALE, 12 * SCALE)) == IGNORED
