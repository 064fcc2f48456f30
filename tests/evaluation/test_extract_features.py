"""Test feature extraction to files: correct values, resuming after a killed run, two processes, and bounded memory."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_dataset
from PIL import Image
from transformers import ViTConfig, ViTModel

from hf_vit import HfViTForImageClassification, HfViTImageProcessor, HfViTModel

from ..helpers.datasets import dataset_of, picture, truncate, write_image, write_pictures
from ..helpers.features import arguments_of, command_line, content_of, extract_to, rows_of, save_encoder
from ..helpers.fresh import run_command, run_with_package, start_python
from ..helpers.models import small_config
from ..helpers.options import call_command
from ..helpers.pretraining import NUM_TRAIN, write_colors


ALL = ["cls", "mean", "patches", "pixels", "untrained_mean"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images, a model and the features of the images."""
    folder = tmp_path_factory.mktemp("workplace")
    write_colors(folder / "colors")
    save_encoder(folder / "encoder")
    extract_to(folder / "encoder", folder / "colors", folder / "features", features=ALL)
    return folder


def test_features_are_what_the_model_says_of_each_image(workplace: Path, tmp_path: Path) -> None:
    files = sorted((workplace / "colors" / "train").rglob("*.png"))
    rows = rows_of(workplace / "features", "train").to_pylist()
    assert [row["file"] for row in rows] == [str(file) for file in files]
    assert [row["label"] for row in rows] == ["blue"] * NUM_TRAIN + ["green"] * NUM_TRAIN + ["red"] * NUM_TRAIN
    model = HfViTModel.from_pretrained(workplace / "encoder").eval()
    processor = HfViTImageProcessor.from_pretrained(workplace / "encoder")
    for row, file in list(zip(rows, files, strict=True))[::7]:
        pixel_values = processor(images=Image.open(file), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            tokens = model(pixel_values).last_hidden_state[0].numpy()
        expected = {"cls": tokens[0], "mean": tokens[1:].mean(axis=0), "patches": tokens[1:]}
        for name, value in expected.items():
            np.testing.assert_allclose(np.array(row[name]), value, rtol=1e-4, atol=1e-5)
        assert row["grid"] == [4, 4]
        # The feature "pixels" contains all 32 x 32 pixels.
        np.testing.assert_allclose(row["pixels"], pixel_values.flatten(), atol=1e-6)
        assert len(row["untrained_mean"]) == len(row["mean"])
        assert np.abs(np.array(row["untrained_mean"]) - row["mean"]).max() > 0.1
    splits = load_dataset(str(workplace / "features"), cache_dir=str(tmp_path))
    assert {name: len(split) for name, split in splits.items()} == {"train": 3 * NUM_TRAIN, "test": 21}
    assert np.shape(splits["test"][:2]["patches"]) == (2, 16, 32)


def test_half_precision_is_the_same_rounded_and_patches_of_padding_do_not_count(workplace, tmp_path):
    names = ["mean", "patches"]
    half = extract_to(workplace / "encoder", workplace / "colors", tmp_path / "half", features=names, dtype="float16")
    rounded, exact = rows_of(half, "test"), rows_of(workplace / "features", "test")
    assert rounded.column_names == ["number", "file", "label", "mean", "patches", "grid"]
    for name in names:
        values = [np.array(table[name].to_pylist(), np.float32) for table in (rounded, exact)]
        assert np.array_equal(values[0], values[1].astype(np.float16).astype(np.float32))
        assert not np.array_equal(*values)
    save_encoder(tmp_path / "encoder", position_embedding_type="rotary")
    options = {"size": {"shortest_edge": 16}, "do_pad": True, "ensure_multiple_of": 8}
    HfViTImageProcessor.from_pretrained(tmp_path / "encoder", **options).save_pretrained(tmp_path / "encoder")
    for number, size in enumerate([(16, 16), (32, 16), (16, 24)]):
        write_image(tmp_path / "photos" / f"{number}.png", picture(number, size))
    for name, batch_size in (("together", 3), ("alone", 1)):
        options = {"features": ["mean", "patches"], "batch_size": batch_size}
        extract_to(tmp_path / "encoder", tmp_path / "photos", tmp_path / name, **options)
    together, alone = (rows_of(tmp_path / folder, "train").to_pylist() for folder in ("together", "alone"))
    assert [row["grid"] for row in together] == [[2, 2], [2, 4], [3, 2]]
    for row, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(row["patches"], other["patches"], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(row["mean"], np.mean(row["patches"], axis=0), rtol=1e-4, atol=1e-5)


STUCK = """
import sys, time
from hf_vit import cli
from hf_vit.features.extraction import ImageReader

read = ImageReader.__getitem__
def read_or_wait(self, index):
    image = read(self, index)
    if image.file.endswith("red/3.png"):
        time.sleep(600)
    return image

ImageReader.__getitem__ = read_or_wait
cli.main(["features", "extract", *sys.argv[1:]])
"""


def test_a_killed_extraction_goes_on_to_the_same_files(workplace: Path, tmp_path: Path) -> None:
    output_dir, script = tmp_path / "features", tmp_path / "stuck.py"
    script.write_text(STUCK)
    command = command_line(arguments_of(workplace / "encoder", workplace / "colors", output_dir, features=ALL))
    process = start_python(str(script), *command, workdir=tmp_path)
    deadline = time.monotonic() + 120
    while not [*output_dir.glob(".train-00002-of-00004.parquet.*.part")]:
        assert process.poll() is None, "The extraction ended before it could be killed."
        assert time.monotonic() < deadline, "The extraction wrote nothing."
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = {file.name: file.stat().st_mtime_ns for file in output_dir.glob("*.parquet")}
    assert sorted(before) == [f"train-0000{number}-of-00004.parquet" for number in range(2)]
    extract_to(workplace / "encoder", workplace / "colors", output_dir, features=ALL)
    assert content_of(output_dir) == content_of(workplace / "features")
    # A resumed extraction does not write complete files again.
    assert {name: (output_dir / name).stat().st_mtime_ns for name in before} == before


def test_two_processes_write_the_files_of_one(workplace: Path, tmp_path: Path) -> None:
    command = command_line(arguments_of("encoder", "colors", tmp_path / "features", features=ALL))
    finished = run_command("features extract", workplace, *command, processes=2)
    assert finished.returncode == 0, finished.stderr
    said = [line for line in finished.stdout.splitlines() if "Gloo" not in line]
    kinds, place = ", ".join(ALL), tmp_path / "features"
    assert said == [f"Saved features ({kinds}) of images (36 of train, 21 of test) to {place}"]
    found, expected = content_of(tmp_path / "features"), content_of(workplace / "features")
    del found["features.json"], expected["features.json"]  # features.json contains the image paths, which differ
    assert found == expected


def test_the_head_of_a_classifier_is_left_out_without_a_report(workplace: Path, tmp_path: Path) -> None:
    config, folder = small_config(), tmp_path / "classifier"
    HfViTForImageClassification(config).save_pretrained(folder)
    HfViTImageProcessor.for_model(config).save_pretrained(folder)
    command = command_line(arguments_of(folder, workplace / "colors", tmp_path / "features"))
    finished = run_command("features extract", tmp_path, *command)
    assert finished.returncode == 0, finished.stderr
    assert "LOAD REPORT" not in finished.stderr


MEMORY = """
import resource, sys
from pathlib import Path
from hf_vit.features import ExtractionArguments, extract_features

peaks = []
for name in ("few", "many"):
    extract_features(ExtractionArguments(
        model_name_or_path="encoder", dataset_name=name, output_dir=f"of_{name}", features=["patches"],
        batch_size=50, rows_per_shard=10_000, use_cpu=True,
    ))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(peaks[1] - peaks[0], sum(file.stat().st_size for file in Path("of_many").iterdir()) / 2**20)
"""


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    options = {"image_size": 64, "patch_size": 2, "window_size": 4, "hidden_size": 64, "intermediate_size": 8}
    save_encoder(tmp_path / "encoder", **options, num_hidden_layers=1)
    for number in range(50):  # distinct images, because repeated features compress too well
        picture(number).save(tmp_path / f"{number}.png")
    for name, count in (("few", 100), ("many", 900)):
        (tmp_path / name).mkdir()
        for number in range(count):
            os.link(tmp_path / f"{number % 50}.png", tmp_path / name / f"{number}.png")
    growth, written = map(float, run_with_package(MEMORY, tmp_path).stdout.split()[-2:])
    assert written > 200  # number of MiB that the second extraction has written
    assert growth < 100  # growth in MiB of memory, which varies by up to 50 MiB between runs


def test_published_models_classes_of_the_hub_and_images_that_cannot_be_read(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(**shape, image_size=32, patch_size=8)).save_pretrained(tmp_path / "vit")
    dataset_of([1, 0, -1], ["zebra", "ape"]).to_parquet(tmp_path / "train.parquet")
    named = extract_to(tmp_path / "vit", tmp_path / "train.parquet", tmp_path / "named", features=["cls"])
    rows = rows_of(named, "train").to_pylist()
    found = [(row["file"], row["label"], len(row["cls"])) for row in rows]
    assert found == [(f"image {number} of train", label, 16) for number, label in enumerate(("ape", "zebra", None))]
    # Unreadable images raise an error with their names, unless an option skips them.
    encoder = save_encoder(tmp_path / "encoder")
    write_pictures(tmp_path / "photos", "a.png", "b.png", "c.png")
    truncate(tmp_path / "photos" / "b.png")
    command = command_line(arguments_of(encoder, tmp_path / "photos", tmp_path / "features"))
    with pytest.raises(SystemExit, match=r"photos/b\.png cannot be read: .*truncated"):
        call_command("features extract", command)
    extract_to(encoder, tmp_path / "photos", tmp_path / "features", skip_unreadable=True)
    files = rows_of(tmp_path / "features", "train")["file"].to_pylist()
    assert [Path(file).name for file in files] == ["a.png", "c.png"]


def test_a_folder_holds_features_of_one_kind_and_of_unchanged_images(workplace: Path, tmp_path: Path) -> None:
    places = workplace / "colors", workplace / "features"
    with pytest.raises(ValueError, match=r"other settings \(features: .*; dtype: float32 then, float16 now\)"):
        extract_to(workplace / "encoder", *places, dtype="float16")
    with pytest.raises(ValueError, match=r"features of .*/encoder on .*/colors with .* \(weights: \w+ then"):
        extract_to(save_encoder(tmp_path / "other", seed=1), *places, features=ALL)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"notes contains 'notes\.txt', which are not features"):
        extract_to(workplace / "encoder", workplace / "colors", tmp_path / "notes")
    photos = tmp_path / "photos"
    write_pictures(photos, "0.png", "1.png")
    # The second run finds all features on disk.
    for _ in range(2):
        extract_to(workplace / "encoder", photos, tmp_path / "features")
    Image.new("RGB", (20, 20), "green").save(photos / "1.png")
    with pytest.raises(ValueError, match=r"with other settings \(files: \w+ then, \w+ now\)"):
        extract_to(workplace / "encoder", photos, tmp_path / "features")


def test_invalid_extraction_options_raise(workplace: Path, tmp_path: Path) -> None:
    save_encoder(tmp_path / "bare", use_cls_token=False, pooling="mean")
    for options, message in (
        ({"features": ["cls"]}, "no CLS token, required for cls. Use --features mean"),
        ({"features": ["pooled"]}, r"features=\['pooled'\] must be one or more of cls, mean"),
        ({"dtype": "int8"}, "dtype='int8' must be float32 or float16"),
        ({"rows_per_shard": 0}, "rows_per_shard=0 must be at least 1"),
        ({"model_name_or_path": "no/such/folder"}, "'no/such/folder' is not a model"),
        ({"dataset_name": "colors,"}, "has a comma with no name"),
    ):
        arguments = {**arguments_of(tmp_path / "bare", workplace / "colors", tmp_path / "features"), **options}
        with pytest.raises(SystemExit, match=message):
            call_command("features extract", command_line(arguments))
