"""Test `hf-vit predict`: inputs, candidate texts, output, pictures and error messages."""

import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
import pytest
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline

import hf_vit
from hf_vit import HfViTForImageClassification, cli
from hf_vit.inference.predict import predict_files
from hf_vit.inference.sources import find_images, open_image
from hf_vit.model import image_inputs
from hf_vit.model.image_inputs import read_image
from hf_vit.visualize.figures import TILE_SIZE

from ..helpers.image_text_models import build_model, build_processor
from ..helpers.models import save_model, small_config
from ..helpers.references import draw_weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = HfViTForImageClassification(small_config())
    draw_weights(model)
    return save_model(model, tmp_path_factory.mktemp("saved"))


def write_images(folder: Path, number: int) -> list[str]:
    """Write images of different colors and return their sorted paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{index}.png" for index in range(number)]
    for index, file in enumerate(files):
        Image.new("RGB", (20, 30), (20 * index, 40, 255 - 20 * index)).save(file)
    return list(map(str, files))


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_lines_and_a_picture(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, picture = write_images(tmp_path / "images", 10), tmp_path / "new" / "labeled.png"
    arguments = ["--top_k", "2", "--batch_size", "4", "--picture", str(picture)]
    cli.main(["predict", str(saved), files[7], str(tmp_path / "images"), *arguments])
    lines = lines_of(capsys.readouterr().out)
    assert [line["file"] for line in lines] == [files[7], *files]
    for line in lines:
        assert len(line["top_k"]) == 2
        assert line["top_k"][0] == {"label": line["label"], "score": line["score"]}
        assert line["top_k"][0]["score"] >= line["top_k"][1]["score"]
    alone, in_batch = lines[0], lines[8]
    assert alone["label"] == in_batch["label"]
    assert alone["score"] == pytest.approx(in_batch["score"], abs=1e-5)
    with Image.open(picture) as drawn:
        assert drawn.width > 5 * TILE_SIZE
        assert drawn.height > 3 * TILE_SIZE


def test_parquet_tar_and_tables_are_read_as_by_trainings(saved: Path, tmp_path: Path) -> None:
    files = list(map(Path, write_images(tmp_path / "images", 3)))
    expected = [(line["label"], line["score"]) for line in hf_vit.predict(saved, files)]
    cells = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    stored = datasets.Dataset.from_dict({"image": cells}, datasets.Features({"image": datasets.Image()}))
    (tmp_path / "parquet").mkdir()
    stored.to_parquet(tmp_path / "parquet" / "test-00000-of-00001.parquet")
    stored.to_parquet(tmp_path / "parquet" / "train-00000-of-00001.parquet")
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for file in files:
            tar.add(file, f"{file.stem}.png")
    rows = [f"images/{file.name},cat\n" for file in files]
    (tmp_path / "train.csv").write_text("".join(["image,label\n", *rows]))
    places = ("parquet/test-00000-of-00001.parquet", "shard.tar", "train.csv")
    for place in places:
        lines = hf_vit.predict(saved, tmp_path / place, output_dir=tmp_path / "out" / place)
        assert [(line["label"], pytest.approx(line["score"], abs=1e-5)) for line in lines] == expected
        assert {Path(line["file"]).stem for line in lines} == {"0", "1", "2"}
        assert all(Path(line["written"][0]).is_file() for line in lines)
    both = hf_vit.predict(saved, [tmp_path / "parquet", files[0]], output_dir=tmp_path / "both")
    assert len({line["file"] for line in both}) == len({line["written"][0] for line in both}) == 7


def test_bad_files_are_named(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, picture = tmp_path / "images", tmp_path / "labeled.png"
    files = write_images(folder, 6)
    cli.main(["predict", str(saved), str(folder), "--batch_size", "2"])
    expected = {line["file"]: line for line in lines_of(capsys.readouterr().out)}
    Path(files[3]).write_bytes(Path(files[3]).read_bytes()[:60])
    (folder / "0-first.png").write_text("no image")
    (folder / "9-last.gif").touch()
    with pytest.raises(SystemExit) as stopped:
        cli.main(["predict", str(saved), str(folder), "--batch_size", "2", "--picture", str(picture)])
    # SystemExit with a string gives the exit code 1.
    assert str(stopped.value.code).endswith(": 3 of 8 files cannot be read as images.")
    output = capsys.readouterr()
    lines = lines_of(output.out)
    assert [line["file"] for line in lines] == [file for file in files if file != files[3]]
    for line in lines:
        assert line["label"] == expected[line["file"]]["label"]
        assert line["score"] == pytest.approx(expected[line["file"]]["score"], abs=1e-5)
    named = [line for line in output.err.splitlines() if "cannot be read as an image: " in line]
    assert [Path(line.split(" cannot")[0]).name for line in named] == ["0-first.png", "3.png", "9-last.gif"]
    with Image.open(picture) as drawn:
        assert drawn.width // TILE_SIZE == 5
        assert drawn.height < 2 * TILE_SIZE
    with pytest.raises(SystemExit, match=r"1 of 1 files cannot be read as images\."):
        cli.main(["predict", str(saved), str(folder / "0-first.png"), "--picture", str(tmp_path / "alone.jpg")])
    assert "0-first.png cannot be read as an image" in capsys.readouterr().err
    assert not (tmp_path / "alone.jpg").exists()


def test_images_are_found_in_order_and_opened_upright_with_their_stored_colors_or_refused(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    for name in ("b.PNG", "a.jpg", "notes.txt", "deeper/c.webp"):
        (tmp_path / name).touch()
    assert [path.name for path in find_images([tmp_path])] == ["a.jpg", "b.PNG", "c.webp"]
    exif = Image.Exif()
    exif[0x0112] = 6  # this EXIF orientation rotates the image by 90 degrees
    Image.new("RGB", (40, 20)).save(tmp_path / "photo.jpg", exif=exif)
    assert open_image(tmp_path / "photo.jpg").size == (20, 40)
    Image.new("RGBA", (4, 4), (7, 8, 9, 0)).save(tmp_path / "clear.png")
    # Transparent pixels have the same color as in training.
    assert open_image(tmp_path / "clear.png").getpixel((0, 0)) == (7, 8, 9)

    for dtype, value in ((np.float32, 256), (np.float32, 0.5), (np.float32, np.nan), (np.int32, 256), (np.int32, -1)):
        pixels = np.zeros((2, 2), dtype)
        pixels[1, 0] = value
        Image.fromarray(pixels).save(tmp_path / "image.tiff")
        with pytest.raises(ValueError, match="Scale"):
            read_image(tmp_path / "image.tiff", num_channels=3)
        with pytest.raises(ValueError, match=r"image.tiff cannot be read as an image: it .* has mode .* 8 bits"):
            open_image(tmp_path / "image.tiff")


RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)
COLORS = np.stack([RAMP, RAMP.T, 255 - RAMP, RAMP[::-1]], axis=-1)
IMAGES: dict[str, tuple[str, Callable[[], Image.Image]]] = {
    "1": ("png", lambda: Image.fromarray(RAMP).convert("1")),
    "L": ("png", lambda: Image.fromarray(RAMP)),
    "LA": ("png", lambda: Image.fromarray(COLORS).convert("LA")),
    "P": ("png", lambda: Image.fromarray(COLORS[..., :3]).quantize(16)),
    "RGB": ("png", lambda: Image.fromarray(COLORS[..., :3])),
    "RGBA": ("png", lambda: Image.fromarray(COLORS)),
    "CMYK": ("tiff", lambda: Image.merge("CMYK", Image.fromarray(COLORS).split())),
    "I;16": ("png", lambda: Image.fromarray(RAMP.astype(np.uint16))),
    "I": ("tiff", lambda: Image.fromarray(RAMP.astype(np.int32))),
    "F": ("tiff", lambda: Image.fromarray(RAMP.astype(np.float32) * 0.99)),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_opened_images_have_the_pixels_of_the_image_processor(kind: str, tmp_path: Path) -> None:
    suffix, make = IMAGES[kind]
    file = tmp_path / f"image.{suffix}"
    make().save(file)
    with Image.open(file) as image:
        assert image.mode == kind
    ours = np.asarray(open_image(file)).astype(np.float32)
    theirs = read_image(file, num_channels=3).movedim(0, -1).numpy().astype(np.float32)
    assert ours.std() > 40
    assert np.array_equal(ours, theirs)


def test_files_are_opened_once_and_keep_order(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [Path(file) for file in write_images(tmp_path / "photos", 12)]
    broken = [files[index] for index in (0, 4, 5, 11)]
    for file in broken:
        file.write_bytes(b"no photo")
    lines = list(predict_files(str(saved), files, batch_size=3))
    assert [line["file"] for line in lines] == list(map(str, files))
    assert [Path(line["file"]) for line in lines if "error" in line] == broken

    files, opened = write_images(tmp_path / "photos", 3), list[str]()
    open_stream = image_inputs._open_stream

    def record(source: str, *others: Any) -> BinaryIO:
        opened.append(source)
        return open_stream(source, *others)

    monkeypatch.setattr(image_inputs, "_open_stream", record)
    lines = list(predict_files(str(saved), list(map(Path, files)), top_k=5))
    assert sorted(opened) == files
    assert [line["top_k"] for line in lines] == pipeline("image-classification", model=str(saved))(files, batch_size=8)


def test_foreign_models_skip_broken_files_and_are_not_optimized(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8)).save_pretrained(tmp_path / "other")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "other")
    files = list(map(Path, write_images(tmp_path / "photos", 4)))
    for index in (0, 2):
        files[index].write_bytes(b"no photo")
    lines = list(predict_files(str(tmp_path / "other"), files))
    assert [("error" in line, line["file"]) for line in lines] == [
        (index in (0, 2), str(file)) for index, file in enumerate(files)
    ]
    answers = pipeline("image-classification", model=str(tmp_path / "other"), top_k=3)(list(map(str, files[1::2])))
    assert [line["top_k"] for line in lines[1::2]] == answers
    with pytest.raises(ValueError, match="optimize supports only hf_vit models, not ViTForImageClassification"):
        list(predict_files(str(tmp_path / "other"), files[1:2], optimize=True))


def test_the_report_of_an_optimization_is_logged(
    saved: Path, tmp_path: Path, capsys: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hide the C++ compiler, which would slow down this test. Compilation is tested in test_optimize.py.
    monkeypatch.setenv("PATH", "")
    cli.main(["predict", str(saved), *write_images(tmp_path, 2), "--optimize"])
    assert len(lines_of(capsys.readouterr().out)) == 2
    (report,) = [record.getMessage() for record in caplog.records if record.name == "hf_vit.inference.predict"]
    assert "| tried | milliseconds | times as fast | difference | verdict |" in report
    assert "| as given, float32 |" in report
    assert "| bfloat16 |" in report
    assert "no C++ compiler found" in report
    assert re.search(r"Kept: .*, [0-9.]+ times as fast as the original model\.", report)


LABELS = ["cat", "a red car", "dog"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an image-text model, a classifier and two photos."""
    folder = tmp_path_factory.mktemp("place")
    processor = build_processor(LABELS)
    model = build_model(processor)
    model.save_pretrained(folder / "texts")
    processor.save_pretrained(folder / "texts")
    save_model(HfViTForImageClassification(small_config()), folder / "classes")
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_lines_have_the_scores_of_the_pipeline_and_a_picture_is_drawn(place: Path, tmp_path: Path) -> None:
    photos = [place / "0.png", place / "1.png"]
    lines = list(predict_files(str(place / "texts"), photos, labels=LABELS, picture=tmp_path / "labeled.png"))
    classify = pipeline("zero-shot-image-classification", model=str(place / "texts"))
    for line, answer in zip(lines, classify([str(photo) for photo in photos], candidate_labels=LABELS), strict=True):
        assert line["label"] == answer[0]["label"]
        assert [entry["label"] for entry in line["labels"]] == [entry["label"] for entry in answer]
        assert line["score"] == pytest.approx(answer[0]["score"], abs=1e-6)
    assert (tmp_path / "labeled.png").is_file()


def test_labels_are_given_to_image_text_models_only(place: Path) -> None:
    missing = "texts is a model of images and texts: give the texts to choose from, --labels cat dog"
    unused = "classes is not a model of images and texts. Remove --labels"
    for model, labels, message in (("texts", None, missing), ("classes", LABELS, unused)):
        with pytest.raises(ValueError, match=message):
            next(predict_files(str(place / model), [place / "0.png"], labels=labels))
