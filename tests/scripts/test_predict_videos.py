"""Test `hf-vit predict` with videos, URLs, folders of many files, and parquet files written by several processes."""

import json
import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset
from PIL import Image

import hf_vit
from hf_vit import HfViTForImageClassification, HfViTForSemanticSegmentation, cli
from hf_vit.inference import sources
from hf_vit.inference.sources import Source, find_sources
from hf_vit.model import image_inputs

from ..helpers.datasets import truncate, write_pictures
from ..helpers.features import content_of
from ..helpers.fresh import run_command
from ..helpers.models import save_model, small_config
from ..helpers.references import draw_weights


HEIGHT, WIDTH, RATE = 48, 81, 12.5


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a classifier and of a model for semantic segmentation."""
    folder, found = tmp_path_factory.mktemp("saved"), {}
    for name, kind in (("classes", HfViTForImageClassification), ("masks", HfViTForSemanticSegmentation)):
        model = kind(small_config(num_labels=3))
        draw_weights(model)
        found[name] = save_model(model, folder / name)
    return found


def write_video(file: Path, num_frames: int) -> Path:
    """Write a video whose brightness increases; skip the test if torchcodec or FFmpeg is missing."""
    encoders = pytest.importorskip("torchcodec.encoders", reason="videos need torchcodec", exc_type=Exception)
    frames = torch.arange(num_frames, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, HEIGHT, WIDTH + 1) * 10
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        encoders.VideoEncoder(frames.contiguous(), frame_rate=RATE).to_file(file, pixel_format="yuv420p")
    except RuntimeError as error:
        pytest.skip(f"videos need the libraries of FFmpeg: {str(error)[:40]}")
    return file


def test_each_frame_has_a_line_and_labeled_videos_have_the_frame_rate(
    saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_FRAMES", 4)
    first, second = write_video(tmp_path / "films" / "a.mp4", 10), write_video(tmp_path / "films" / "c.mkv", 3)
    Image.new("RGB", (30, 20), "red").save(tmp_path / "films" / "b.png")
    (tmp_path / "films" / "d.mp4").write_bytes(b"no video" * 100)
    out, picture = tmp_path / "out", tmp_path / "labeled.mp4"
    words = [str(saved["masks"]), str(tmp_path / "films"), "--picture", str(picture), "--output_dir", str(out)]
    with pytest.raises(SystemExit, match=r"1 of 4 files cannot be read as images"):
        cli.main(["predict", *words])
    output = capsys.readouterr()
    assert "d.mp4 cannot be read as a video: Could not open input file" in output.err
    lines = [json.loads(line) for line in output.out.splitlines()]
    found = [(Path(line["file"]).name, line.get("frame")) for line in lines]
    assert found == [*(("a.mp4", n) for n in range(10)), ("b.png", None), *(("c.mkv", n) for n in range(3))]
    assert [line["seconds"] for line in lines[:3]] == pytest.approx([0, 1 / RATE, 2 / RATE])
    assert lines[9]["written"] == [str(out / "a" / f"000009{name}") for name in ("_mask.png", "_picture.png")]
    assert all(Path(file).is_file() for line in lines for file in line["written"])
    from torchcodec.decoders import VideoDecoder

    decoded = VideoDecoder(str(first))
    for number in (0, 9):  # the prediction of a frame is that of an image with the same pixels
        Image.fromarray(decoded[number].movedim(0, -1).numpy()).save(tmp_path / "frame.png")
        (line,) = hf_vit.predict(saved["masks"], tmp_path / "frame.png")
        assert line["classes"] == lines[number]["classes"]
    for file, count in ((picture, 10), (tmp_path / "labeled-2.mp4", 3)):
        labeled = VideoDecoder(str(file))
        assert (len(labeled), labeled.metadata.average_fps) == (count, RATE)
    brightness = [float(frame.float().mean()) for frame in VideoDecoder(str(picture))]
    assert brightness == sorted(brightness)
    with pytest.raises(ValueError, match=r"labeled\.mp4 exists from an earlier run"):
        hf_vit.predict(saved["masks"], second, picture=picture)


def test_a_classified_video_fills_tiles_and_a_labeled_video_needs_a_video(saved: dict[str, Path], tmp_path: Path):
    video = write_video(tmp_path / "film.mp4", 3)
    for name in ("tiles.png", "labeled.mp4"):
        assert len(hf_vit.predict(saved["classes"], video, picture=tmp_path / name)) == 3
        assert (tmp_path / name).stat().st_size > 1000
    Image.new("RGB", (30, 20)).save(tmp_path / "photo.png")
    with pytest.raises(ValueError, match=r"labeled\.mp4 is a video, but no input is a video"):
        hf_vit.predict(saved["classes"], tmp_path / "photo.png", picture=tmp_path / "other-labeled.mp4")


def test_missing_torchcodec_raises_an_error(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "film.mp4").touch()
    monkeypatch.setattr("hf_vit.extras.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"Reading the video .*film\.mp4 needs torchcodec. Install: .*\[fast\]"):
        hf_vit.predict(saved["classes"], tmp_path / "film.mp4")
    (line,) = hf_vit.predict(saved["classes"], tmp_path)
    assert "film.mp4 cannot be read as a video: Reading a video needs torchcodec. Install: " in line["error"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serve `tmp_path` on this machine and return the URL."""
    handler = partial(type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": print}), directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_urls_are_downloaded_or_named_in_errors(
    saved: dict[str, Path], server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (30, 20), "green").save(tmp_path / "photo.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).save(tmp_path / "large.png")
    (tmp_path / "text.png").write_text("no image")
    monkeypatch.setattr(image_inputs, "MAX_DOWNLOAD_BYTES", 1000)
    names = ("photo.png", "large.png", "text.png", "none.png")
    urls = [f"{server}/{name}" for name in names]
    local, *lines = hf_vit.predict(saved["classes"], [tmp_path / "photo.png", *urls], output_dir=tmp_path / "out")
    assert [line["file"] for line in lines] == urls
    assert (lines[0]["label"], lines[0]["top_k"]) == (local["label"], local["top_k"])
    assert Path(lines[0]["written"][0]).name == "photo-2_picture.png"
    for line, fault in zip(lines[1:], ("more than 1000 bytes", "not an image that PIL can read", "404"), strict=True):
        assert line["error"].startswith(f"{line['file']} cannot be read as an image: ")
        assert fault in line["error"]


def test_folders_are_listed_lazily_in_the_order_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/2.png", "b/1.png", "a.png", "b.x/4.png", "b/c/3.png", "z/5.png", "z/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    opened, scandir = list[Path](), os.scandir
    monkeypatch.setattr(os, "scandir", lambda place: opened.append(place) or scandir(place))
    found = find_sources([tmp_path])
    assert next(found).file == str(tmp_path / "a.png")
    assert set(opened) == {tmp_path}
    rest = [source.file for source in found]
    assert rest == sorted(rest, key=lambda name: Path(name).parts)
    assert len(rest) == 5
    assert len(set(opened)) == 5


@pytest.fixture(scope="module")
def place(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 11 images, one of them unreadable, and predictions in 3 shards."""
    folder = tmp_path_factory.mktemp("place")
    write_pictures(folder / "photos", *(f"{number % 3}/{number:02}.png" for number in range(11)))
    truncate(folder / "photos" / "1" / "04.png")
    done = hf_vit.predict(saved["masks"], folder / "photos", output_dir=folder / "one", rows_per_shard=4, batch_size=2)
    assert [(line["rows"], line["errors"]) for line in done] == [(4, 0), (4, 1), (3, 0)]
    return folder


def test_shards_hold_the_lines_and_files_of_predictions(saved: dict[str, Path], place: Path, tmp_path: Path) -> None:
    lines = hf_vit.predict(saved["masks"], place / "photos", output_dir=tmp_path / "files")
    rows = load_dataset(str(place / "one"), cache_dir=str(tmp_path / "cache"), split="train")
    for row, line in zip(rows, lines, strict=True):
        assert (row["file"], row["error"]) == (line["file"], line.get("error"))
        if "error" not in line:
            assert row["classes"] == line["classes"]
            with Image.open(line["written"][0]) as mask:
                assert np.array_equal(np.asarray(row["mask_png"]), np.asarray(mask))
    classes = hf_vit.predict(saved["classes"], place / "photos", output_dir=tmp_path / "classes", rows_per_shard=20)
    (row, *_) = pq.read_table(classes[0]["written"]).to_pylist()
    assert row["top_k"][0] == {"label": row["label"], "score": row["score"], "similarity": None}


def test_interrupted_and_resumed_shards_equal_those_of_one_run(
    saved: dict[str, Path], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"output_dir": tmp_path / "out", "rows_per_shard": 4, "batch_size": 2}
    with monkeypatch.context() as patched:
        decode = Source.decode

        def stop(self: Source) -> Image.Image:
            if self.file.endswith("10.png"):
                raise KeyboardInterrupt
            return decode(self)

        patched.setattr(Source, "decode", stop)
        with pytest.raises(KeyboardInterrupt):
            hf_vit.predict(saved["masks"], place / "photos", **options)
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.parquet")}
    assert 1 <= len(before) <= 2
    assert len(hf_vit.predict(saved["masks"], place / "photos", **options)) == 3 - len(before)
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before} == before
    found, expected = content_of(tmp_path / "out"), content_of(place / "one")
    assert found == expected
    with pytest.raises(ValueError, match=r"contains predictions of .* other settings \(rows_per_shard: 4 then, 5 now"):
        hf_vit.predict(saved["masks"], place / "photos", **{**options, "rows_per_shard": 5})
    with pytest.raises(ValueError, match=r"--rows_per_shard 3 write parquet files. Set --output_dir"):
        hf_vit.predict(saved["masks"], place / "photos", rows_per_shard=3)


def test_two_processes_write_the_shards_of_one(saved: dict[str, Path], place: Path, tmp_path: Path) -> None:
    words = (str(saved["masks"]), str(place / "photos"), "--output_dir", str(tmp_path / "out"))
    finished = run_command("predict", tmp_path, *words, "--rows_per_shard", "4", "--batch_size", "2", processes=2)
    assert finished.returncode == 0, finished.stderr
    assert sorted(re.findall(r"predictions-\d+", finished.stdout)) == [
        f"predictions-0000{number}" for number in range(3)
    ]
    assert "04.png cannot be read as an image" in finished.stderr
    assert content_of(tmp_path / "out") == content_of(place / "one")
