"""Test that resumed commands refuse changed inputs, and compute damaged outputs again."""

import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from safetensors.torch import load_file, save_file

import hf_vit
from hf_vit import HfViTForObjectDetection
from hf_vit.data.fingerprint import FEATURE_FOLDER, digest_model
from hf_vit.data.shards import write_shard
from hf_vit.features.files import open_split
from hf_vit.inference.search import search_images
from hf_vit.outputs import RECORD

from ..helpers.datasets import encoded, picture, truncate, write_pictures
from ..helpers.features import content_of, save_encoder
from ..helpers.image_text_models import build_model, build_processor
from ..helpers.models import save_model, small_config
from ..helpers.options import call_command
from .table import Row, assert_refused, parametrize, rows, script


pytestmark = pytest.mark.usefixtures("one_thread")
Change = Callable[[Path], object]


def write_table(folder: Path, first: int = 0, names: tuple[str, ...] = ("a.png", "b.png", "c.png")) -> None:
    """Write a parquet file with images as bytes."""
    folder.mkdir(exist_ok=True)
    cells = [{"bytes": encoded(picture(first + number)), "path": name} for number, name in enumerate(names)]
    Dataset.from_dict({"image": cells}, features=Features({"image": Image()})).to_parquet(folder / "train.parquet")


def write_labels(folder: Path, first: str = "cat") -> None:
    """Write images, and a table with two label columns."""
    write_pictures(folder, "a.png", "b.png", "c.png")
    (folder / "train.csv").write_text(f"file,label,sex\na.png,{first},m\nb.png,dog,f\nc.png,cat,m\n")


def change_config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def change_weight(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.bias"] += 1e-3
    save_file(weights, file, metadata={"format": "pt"})


def change_processor(folder: Path) -> None:
    file = folder / "model" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.1, 0.2, 0.3]}))


def touch(folder: Path) -> None:
    """Give an image another modification time, as a file of equal size that replaces it would have."""
    os.utime(folder / "data" / "b.png", ns=(1, 1))


def keep(folder: Path) -> None:
    """Change nothing."""


def save_detector(folder: Path) -> None:
    save_model(HfViTForObjectDetection(small_config(num_labels=2)), folder)


# Name, data, change before the second run, other options of the second run, parts of the error message
PREDICTED: list[tuple[Any, ...]] = [
    ("images-in-a-table", write_table, lambda f: write_table(f / "data", first=7), (), "(files: "),
    ("names-in-a-table", write_table, lambda f: write_table(f / "data", names=("a", "b", "c")), (), "(files: "),
    ("image-file", lambda f: write_pictures(f, "a.png", "b.png"), touch, (), "(files: "),
    ("fewer-images", write_table, lambda f: write_table(f / "data", names=("a.png",)), (), "files: | images: "),
    ("image-file-of-a-table", write_labels, touch, (), "(files: "),
    ("class-names", write_table, change_config(id2label={"0": "cat", "1": "dog"}), (), "(config: "),
    ("activation", write_table, change_config(hidden_act="relu"), (), "(config: "),
    ("weights", write_table, change_weight, (), "(weights: "),
    ("image-processor", write_table, change_processor, (), "(image_processor: "),
    ("option", write_table, keep, ("--nms_threshold", "0.4"), "(options: "),
]
EXTRACTED: list[tuple[Any, ...]] = [
    ("images-of-features", write_table, lambda f: write_table(f / "data", first=7), (), "(files: "),
    ("activation-of-features", write_table, change_config(hidden_act="relu"), (), "(config: "),
]
LABELED: list[tuple[Any, ...]] = [
    ("corrected-label", write_labels, lambda f: write_labels(f / "data", "dog"), (), "(labels: "),
    ("another-label-column", write_labels, keep, ("--label_column_name", "sex"), "(labels: "),
    ("image-file-of-features", write_labels, touch, (), "(files: "),
]


def resumed(
    command: str, save: Change, *options: str
) -> Callable[[Change, Change, tuple[str, ...]], Callable[[Path], list[str]]]:
    """Return a function of data and a change that prepares a second run; see `PREDICTED` for its arguments."""

    def prepare(write: Change, change: Change, others: tuple[str, ...]) -> Callable[[Path], list[str]]:
        def make(folder: Path) -> list[str]:
            save(folder / "model")
            write(folder / "data")
            times = {file: file.stat().st_mtime_ns for file in folder.rglob("*.png")}
            words = [str(folder / "model"), str(folder / "data"), "--output_dir", str(folder / "output"), *options]
            words += ["--rows_per_shard", "2"]
            with redirect_stdout(io.StringIO()):
                call_command(command, words)
            change(folder)
            for file, time in times.items() if change is not touch else ():
                os.utime(file, ns=(time, time))  # images that are written again are the same ones
            return [*words, *others]

        return make

    return prepare


def rows_of(table: list[tuple[Any, ...]], command: str, save: Change, *options: str) -> list[Row]:
    make = resumed(command, save, *options)
    return rows(
        script(command),
        SystemExit,
        [(name, make(*arguments), f"output contains | {words}") for name, *arguments, words in table],
    )


@parametrize(
    [
        *rows_of(PREDICTED, "predict", save_detector),
        *rows_of(EXTRACTED, "features extract", save_encoder, "--use_cpu"),
        *rows_of(LABELED, "features extract", save_encoder, "--use_cpu", "--label_column_name", "label"),
    ]
)
def test_changed_inputs_are_not_mixed_with_earlier_rows(row: Row, tmp_path: Path) -> None:
    assert_refused(row, tmp_path)


def test_unchanged_inputs_and_a_moved_model_resume(tmp_path: Path) -> None:
    make = resumed("predict", save_detector)(write_table, keep, ())
    words = make(tmp_path)
    before = content_of(tmp_path / "output")
    (tmp_path / "output" / "predictions-00001-of-00002.parquet").unlink()
    (tmp_path / "model").rename(tmp_path / "moved")
    call_command("predict", [str(tmp_path / "moved"), *words[1:]])
    assert content_of(tmp_path / "output") == before


def test_the_tokenizer_is_part_of_a_model(tmp_path: Path) -> None:
    processor = build_processor(["cat", "dog"])
    save_model(build_model(processor), tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    write_table(tmp_path / "data")
    options = {"labels": ["cat", "dog"], "output_dir": tmp_path / "output", "rows_per_shard": 2}
    hf_vit.predict(tmp_path / "model", tmp_path / "data", **options)
    file = tmp_path / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"\(image_processor: \w+ then, \w+ now\)"):
        hf_vit.predict(tmp_path / "model", tmp_path / "data", **options)


def test_code_loaded_with_a_model_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for version in range(2):
        file = tmp_path / str(version) / "remote_model.py"
        file.parent.mkdir()
        file.write_text(f"from hf_vit import HfViTModel\nclass Remote(HfViTModel):\n    version = {version}\n")
        specification = importlib.util.spec_from_file_location(f"remote_model_{version}", file)
        module = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        specification.loader.exec_module(module)
        torch.manual_seed(0)
        digests.append(digest_model(module.Remote(small_config())))
    first, second = digests
    assert [name for name in first if first[name] != second[name]] == ["code"]


def flip(file: Path) -> None:
    """Change a number in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)


DAMAGES = {
    "a-number": flip,
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "truncated": truncate,
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("command", ["predict", "features extract"])
def test_damaged_rows_are_computed_again(
    command: str, damage: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save, options = (save_detector, ()) if command == "predict" else (save_encoder, ("--use_cpu",))
    words = resumed(command, save, *options)(write_labels, keep, ())(tmp_path)
    before = content_of(tmp_path / "output")
    file = max(tmp_path.glob("output/*.parquet"))
    damage(file)
    if command != "predict":
        with pytest.raises(ValueError, match=rf"1 of 2 files in .* do not match their checksums.*{file.name}"):
            open_split(tmp_path / "output", ["train"])
    call_command(command, words)
    assert content_of(tmp_path / "output") == before
    assert f"{file} does not match its checksum" in caplog.text
    assert len([record for record in caplog.records if "checksum" in record.getMessage()]) == 1


@pytest.mark.parametrize("damage", [*DAMAGES.values()][1:], ids=[*DAMAGES][1:])
def test_damaged_settings_are_named(damage: Change, tmp_path: Path) -> None:
    words = resumed("features extract", save_encoder, "--use_cpu")(write_labels, keep, ())(tmp_path)
    damage(tmp_path / "output" / "features.json")
    with pytest.raises(SystemExit, match=r"output/features\.json is damaged: .*Remove the folder, or set a different"):
        call_command("features extract", words)
    with pytest.raises(ValueError, match=r"output/features\.json is damaged"):
        open_split(tmp_path / "output", ["train"])


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_search_index_is_computed_again(
    damage: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    processor = build_processor(["cat", "dog"])
    save_model(build_model(processor), tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    write_table(tmp_path / "data")
    expected = search_images(str(tmp_path / "model"), tmp_path / "data", "cat")
    (index,) = (tmp_path / "cache" / FEATURE_FOLDER).glob("*.safetensors")
    content = load_file(index)
    damage(index)
    assert search_images(str(tmp_path / "model"), tmp_path / "data", "cat") == expected
    assert f"{index} does not match its checksum" in caplog.text
    assert load_file(index).keys() == content.keys()


def test_a_damaged_list_of_checksums_only_costs_time(tmp_path: Path) -> None:
    words = resumed("features extract", save_encoder, "--use_cpu")(write_labels, keep, ())(tmp_path)
    before = content_of(tmp_path / "output")
    (tmp_path / "output" / RECORD).write_bytes(b"\xff\xfe\x00\n" * 20)
    call_command("features extract", words)
    assert content_of(tmp_path / "output") == before
    assert open_split(tmp_path / "output", ["train"]).labels == ["cat", "dog", "cat"]


def test_two_writers_of_one_file_do_not_write_into_each_other(tmp_path: Path) -> None:
    file, columns = tmp_path / "rows.parquet", Features({"number": Value("int64")})

    def interrupted() -> Any:
        for number in range(200):
            if number == 150:  # a second process starts and ends meanwhile
                write_shard(file, ({"number": other} for other in range(200)), columns, 10)
                assert pq.read_table(file)["number"].to_pylist() == [*range(200)]
            yield {"number": number}

    write_shard(file, interrupted(), columns, 10)
    assert pq.read_table(file)["number"].to_pylist() == [*range(200)]
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".part"] == []


def test_files_left_by_killed_processes_are_removed_after_a_day(tmp_path: Path) -> None:
    words = resumed("features extract", save_encoder, "--use_cpu")(write_labels, keep, ())(tmp_path)
    old, new = (tmp_path / "output" / f".train-00000-of-00002.parquet.{name}.part" for name in ("old", "new"))
    for part in (old, new):
        part.touch()
    os.utime(old, (1, 1))
    call_command("features extract", words)
    assert not old.exists()
    assert new.exists()
