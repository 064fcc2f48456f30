"""Test that classes and training commands raise errors for damaged models, archives and datasets."""

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_vit import HfViTForImageClassification, HfViTImageProcessor

from ..helpers.datasets import (
    dataset_of,
    depth_in_millimeters,
    picture,
    truncate,
    write_class_folders,
    write_depth_folders,
    write_idx,
    write_image,
    write_mask_folders,
    write_pictures,
)
from ..helpers.models import small_config
from ..helpers.object_files import SCENES, voc_xml, write_coco_boxes, write_scenes, write_yolo_labels
from .table import Row, assert_refused, parametrize, rows, script


Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("sound")
    HfViTForImageClassification(small_config()).save_pretrained(folder)
    HfViTImageProcessor(size=32).save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Attack:
    """Object whose pickle writes a file when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("attacked"),)


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"classifier.weight": Attack()}))


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def change_json(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def with_config(**fields: Any) -> Damage:
    return change_json("config.json", lambda config: config.update(fields))


def with_index(weight_map: dict[str, str] | str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        text = weight_map if isinstance(weight_map, str) else json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


def write(name: str, content: bytes | str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


WEIGHTS, DAMAGED = "model.safetensors", "model' | damaged: Error while deserializing header"
CHECKPOINTS: list[tuple[str, Damage, str]] = [
    ("weights-that-are-empty", write(WEIGHTS, b""), DAMAGED),
    ("weights-that-are-text", write(WEIGHTS, "version https://git-lfs.github.com/spec/v1"), DAMAGED),
    ("weights-that-are-cut", lambda folder: truncate(folder / WEIGHTS, 0.5), DAMAGED),
    ("weights-with-a-lying-header", write(WEIGHTS, struct.pack("<Q", 2**60) + b"{}"), DAMAGED),
    ("weights-that-are-missing", lambda folder: (folder / WEIGHTS).unlink(), "model.safetensors"),
    ("weights-that-are-a-pickle", only_pickle, "safetensors"),
    ("shard-that-is-missing", with_index({"classifier.weight": "model-00001-of-00001.safetensors"}), "model-00001"),
    ("index-that-is-no-json", with_index("{"), "index | damaged"),
    ("index-that-leads-out-of-the-folder", with_index({"classifier.weight": "../../secret.safetensors"}), "secret"),
    ("weights-of-other-widths", with_config(hidden_size=48), "(1, 1, 32) in the checkpoint and (1, 1, 48) in"),
    ("weights-of-more-blocks", with_config(num_hidden_layers=4), "layers.3"),
    ("weights-without-the-encoder", with_weights(lambda w: w.pop("model.encoder.layers.0.mlp.fc1.weight")), "fc1"),
    ("model-of-another-kind", with_config(model_type="bert"), "bert"),
    ("folder-of-nothing", lambda folder: [file.unlink() for file in folder.iterdir()], "config.json"),
]


@parametrize(rows(HfViTForImageClassification.from_pretrained, (OSError, ValueError), CHECKPOINTS))
def test_damaged_saved_model_raises(
    row: Row, sound: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def make(folder: Path) -> Path:
        (folder / "model").mkdir()
        for name, content in sound.items():
            (folder / "model" / name).write_bytes(content)
        row.make(folder / "model")
        return folder / "model"

    assert_refused(row._replace(make=make), tmp_path, may_list=True)


def data_rows(task: str, write_sound: Damage, *table: tuple[str, Damage, str]) -> list[Row]:
    """Return test cases for a training command with damaged data.

    `write_sound` writes valid data. Rows of `table` contain a name, a function that damages the data, and parts of the
    error message.
    """

    def make(damage: Damage) -> Callable[[Path], list[str]]:
        def write_damaged(folder: Path) -> list[str]:
            write_sound(folder / "data")
            damage(folder / "data")
            places = ("--dataset_name", str(folder / "data"), "--output_dir", str(folder / "output"))
            return [*places, *SMALL]

        return write_damaged

    return rows(script(f"train {task}"), SystemExit, [(name, make(damage), words) for name, damage, words in table])


def evaluate_training_images(folder: Path) -> None:
    shutil.rmtree(folder / "test")
    shutil.copytree(folder / "train", folder / "test", ignore=shutil.ignore_patterns("[23].png"))


SMALL = ["--preset", "tiny", "--image_size", "32", "--use_cpu", "--report_to", "none", "--disable_tqdm", "true"]
SMALL += ["--max_steps", "1", "--per_device_train_batch_size", "1"]


def with_annotation(**changes: Any) -> Damage:
    """Return a function that changes the first annotation of the training images in a COCO file."""
    return change_json("train/annotations.json", lambda content: content["annotations"][0].update(changes))


def masks(values: np.ndarray | Image.Image, name: str = "0.png") -> Damage:
    return lambda folder: write_image(folder / "train" / "masks" / name, values)


def depth(values: np.ndarray) -> Damage:
    return lambda folder: write_image(folder / "train" / "depths" / "0.png", values)


def write_captions(folder: Path) -> None:
    write_pictures(folder / "train", *(f"{number}.png" for number in range(4)))
    table = [{"file_name": f"{number}.png", "text": f"number {number}"} for number in range(4)]
    (folder / "train" / "metadata.jsonl").write_text("\n".join(map(json.dumps, table)))


def captions(value: Any) -> Damage:
    """Return a function that replaces the caption of the second image with `value`."""

    def damage(folder: Path) -> None:
        file = folder / "train" / "metadata.jsonl"
        table = [json.loads(line) for line in file.read_text().splitlines()]
        table[1]["text"] = value
        file.write_text("\n".join(map(json.dumps, table)))

    return damage


def write_xml(folder: Path) -> None:
    write_scenes(folder, {"train": "train", "val": "val"})
    for split, scenes in SCENES.items():
        for scene in scenes:
            (folder / split / f"{scene[0]}.xml").write_text(voc_xml(scene))


def keep(folder: Path) -> None:
    """Leave the data unchanged. Used for datasets that already contain an error when they are written."""


def rename_all(content: dict[str, Any]) -> None:
    for category in content["categories"]:
        category["name"] = "pet"


def repeat_image(content: dict[str, Any]) -> None:
    content["images"].append({**content["images"][0], "id": 77})


def repeat_key(folder: Path) -> None:
    file = folder / "train" / "annotations.json"
    file.write_text(file.read_text().replace('"iscrowd": 0', '"iscrowd": 1, "iscrowd": 0', 1))


def write_id2label(folder: Path) -> None:
    (folder / "classes.txt").unlink()
    (folder / "id2label.json").write_text('{"0": "sky", "0": "road", "1": "car"}')


def write_shares(folder: Path) -> None:
    """Write keypoints in coordinates relative to the image size, like MediaPipe."""
    write_pictures(folder, *(f"{number}.png" for number in range(4)))
    rows = [f"{number}.png,{0.1 + 0.2 * number:.1f},0.5,0.{number},0.9\n" for number in range(4)]
    (folder / "train.csv").write_text("file,nose_x,nose_y,tail_x,tail_y\n" + "".join(rows))


def write_first_shard(folder: Path) -> None:
    folder.mkdir()
    dataset_of(["cat", "dog"]).to_parquet(folder / "train-00000-of-00002.parquet")


def write_shards_of_other_orders(folder: Path) -> None:
    folder.mkdir()
    for number, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        dataset_of([0, 1, 1], names).to_parquet(folder / f"train-0000{number}-of-00002.parquet")


def no_depth(folder: Path) -> None:
    for file in folder.glob("*/depths/*.png"):
        write_image(file, np.zeros((6, 8), np.uint16))


def depth_floats_in_millimeters(folder: Path) -> None:
    values = np.full((6, 8), 4000, np.float32)
    values[0, 0] = 5
    for file in folder.glob("*/depths/*.png"):
        file.unlink()
        write_image(file.with_suffix(".tiff"), Image.fromarray(values))


def digits(change: Damage) -> Damage:
    """Return a function that writes digits in IDX format and changes the image file with `change`."""

    def damage(folder: Path) -> None:
        write_idx(folder, "train", [0, 1])
        change(min(folder.iterdir()))

    return damage


def add_label(file: Path) -> None:
    images = file.read_bytes()
    write_idx(file.parent, "train", [0, 1, 1])
    file.write_bytes(images)


ENTITIES = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10 if n else "ha" * 50}">' for n in range(10))
LAUGHS = f"<?xml version='1.0'?><!DOCTYPE x [{ENTITIES}]><annotation><filename>&l9;</filename></annotation>"
DIFFICULT = "<difficult>very</difficult>"
FIRST_XML = f"train/{SCENES['train'][0][0]}.xml"


def write_yolo(folder: Path) -> None:
    write_scenes(folder, {"train": "images/train", "val": "images/val"})
    write_yolo_labels(folder, {"train": "labels/train", "val": "labels/val"})
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat, dog]\n")


FIRST_YOLO = f"labels/train/{SCENES['train'][0][0]}.txt"
NAN = float("nan")
DATASETS = [
    *data_rows(
        "image_classification",
        lambda folder: write_class_folders(folder, ["cat", "dog"]),
        ("image-that-is-empty", write("train/cat/1.png", b""), "cat/1.png | not an image"),
        ("image-that-is-text", write("train/dog/2.png", "no image"), "dog/2.png | not an image"),
        ("image-that-is-cut", lambda folder: truncate(folder / "train/cat/0.png"), "cat/0.png | decoded"),
        ("class-of-the-test-images-alone", lambda f: write_pictures(f, "test/fox/0.png"), "fox"),
        ("table-of-two-columns-of-one-name", write("train.csv", "file,label,label\na.png,cat,dog\n"), "'label'"),
        ("test-images-of-the-training", evaluate_training_images, "4 of 4 test images | allow_duplicates"),
        ("table-of-images-that-are-missing", write("train.csv", "file,label\nnowhere.png,cat\n"), "nowhere.png"),
    ),
    *data_rows(
        "image_classification",
        lambda folder: folder.mkdir(),
        ("folder-without-images", keep, "data"),
        ("table-that-is-empty", write("train.csv", ""), "train.csv"),
        ("table-of-uneven-rows", write("train.csv", "file,label\na.png,cat,dog\n"), "train.csv | row"),
        ("table-that-is-no-text", write("train.csv", b"\xff\xfe\x00file,label"), "train.csv | UTF-8"),
        ("parquet-that-is-text", write("train.parquet", "PAR1 and nothing more"), "parquet"),
        ("idx-that-is-text", digits(lambda file: file.write_text("no digits here")), "idx3-ubyte"),
        ("idx-that-is-cut", digits(truncate), "truncated"),
        ("idx-of-fewer-labels", digits(add_label), "2 images | 3 labels"),
    ),
    *data_rows(
        "semantic_segmentation",
        write_mask_folders,
        ("mask-of-another-size", masks(np.zeros((9, 9), np.uint8)), "0.jpg | 9 x 9"),
        ("mask-of-unknown-classes", masks(np.full((6, 8), 7, np.uint8)), "0.jpg | labels 7"),
        ("mask-in-unknown-colors", masks(picture(3)), "0.jpg | palette.txt"),
        ("mask-of-floats", masks(Image.fromarray(np.zeros((6, 8), np.float32)), "0.tiff"), "0.tiff"),
        ("mask-that-is-empty", write("train/masks/0.png", b""), "0.jpg | not an image"),
        ("mask-that-is-missing", lambda folder: (folder / "train/masks/0.png").unlink(), "0"),
        ("class-list-that-is-empty", write("classes.txt", ""), "classes.txt"),
        ("class-list-numbered-from-1", write("classes.txt", "1 sky\n2 road\n3 car\n"), "1, 2, 3 | id2label.json"),
        ("class-numbers-that-are-there-twice", write_id2label, "id2label.json | '0' occurs 2 times"),
    ),
    *data_rows(
        "depth_estimation",
        write_depth_folders,
        ("depth-of-another-size", depth(depth_in_millimeters(0)[:3]), "0.jpg | 3 x 8"),
        ("depth-in-color", depth(np.asarray(picture(0))), "0.jpg | mode RGB"),
        ("depth-that-is-text", write("train/depths/0.png", "far away"), "0.jpg | not an image"),
        ("depth-that-is-missing-everywhere", no_depth, "depth"),
        ("depth-mostly-out-of-range", depth_floats_in_millimeters, "97.9% | 0.001 to 10 m | --depth_scale"),
    ),
    *data_rows(
        "object_detection",
        write_coco_boxes,
        ("box-of-negative-size", with_annotation(bbox=[5, 5, -3, 4]), "boxes | box_errors"),
        ("box-outside", with_annotation(bbox=[900, 900, 5, 5]), "exceed their image"),
        ("box-of-no-area", with_annotation(bbox=[3, 3, 0, 4]), "no area"),
        ("box-of-nan", with_annotation(bbox=[NAN, 3, 4, 4]), "not finite"),
        ("box-of-three-numbers", with_annotation(bbox=[1, 2, 3]), "bbox"),
        ("box-that-is-null", with_annotation(bbox=None), "bbox"),
        ("box-of-an-unknown-category", with_annotation(category_id=77), "77"),
        ("box-of-an-unknown-image", with_annotation(image_id=777), "777"),
        ("annotations-that-are-cut", lambda f: truncate(f / "train/annotations.json"), "annotations.json | JSON"),
        ("annotations-that-are-a-list", write("train/annotations.json", "[]"), "a JSON object"),
        ("image-that-is-missing", lambda f: min((f / "train/images").iterdir()).unlink(), "do not exist"),
        ("crowd-of-an-unknown-kind", with_annotation(iscrowd="some"), "'some' | neither true nor false"),
        ("two-images-of-one-file", change_json("train/annotations.json", repeat_image), "file_names | a.png"),
        ("key-that-is-there-twice", repeat_key, "annotations.json | 'iscrowd' occurs 2 times"),
        ("two-categories-of-one-name", change_json("train/annotations.json", rename_all), "the same name"),
    ),
    *data_rows(
        "object_detection",
        write_xml,
        ("xml-that-is-cut", lambda folder: truncate(folder / FIRST_XML), "malformed"),
        ("xml-very-difficult", write(FIRST_XML, voc_xml(SCENES["train"][0], DIFFICULT)), "'very' | neither"),
        ("xml-that-grows-without-end", write(FIRST_XML, LAUGHS), FIRST_XML),
    ),
    *data_rows(
        "object_detection",
        write_yolo,
        ("line-of-words", write(FIRST_YOLO, "cat in the middle\n"), FIRST_YOLO),
        ("line-of-an-unknown-class", write(FIRST_YOLO, "9 0.5 0.5 0.2 0.2\n"), "unknown classes"),
        ("line-of-nan", write(FIRST_YOLO, "0 nan 0.5 0.2 0.2\n"), "0 nan 0.5"),
        ("description-that-is-no-yaml", write("data.yaml", "names: [cat"), "data.yaml | not valid YAML"),
    ),
    *data_rows("keypoint_detection", write_shares, ("keypoints-in-shares", keep, "8 of 8 | Multiply x by the width")),
    *data_rows("universal_segmentation", write_mask_folders, ("things-or-stuff", keep, '_classes "car" | to ""')),
    *data_rows(
        "image_classification",
        write_shards_of_other_orders,
        ("classes-in-another-order", keep, "'label' | train-00001-of-00002 | train-00000-of-00002 | the same order"),
    ),
    *data_rows("image_classification", write_first_shard, ("missing-shard", keep, "1 shards | train-00001-of-00002")),
    *data_rows(
        "zero_shot_image_classification",
        write_captions,
        ("caption-that-is-empty", captions(""), "1.png"),
        ("caption-that-is-null", captions(None), "1.png"),
        ("caption-that-is-a-number", captions(7), "text"),
        ("caption-that-is-a-mapping", captions({"en": "cat"}), "text"),
        ("captions-of-no-image", lambda folder: (folder / "train/2.png").unlink(), "2.png"),
    ),
    *data_rows(
        "image_captioning",
        write_captions,
        ("caption-to-learn-that-is-empty", captions(""), "1.png"),
        ("caption-to-learn-that-is-a-number", captions(7), "text"),
    ),
    *data_rows(
        "image_reconstruction",
        lambda folder: write_pictures(folder, "1.png", "2.png"),
        ("photo-to-encode-that-is-cut", lambda folder: truncate(folder / "1.png", 0.5), "1.png"),
    ),
]


@parametrize(DATASETS)
def test_training_command_rejects_damaged_data(row: Row, tmp_path: Path) -> None:
    assert_refused(row, tmp_path, may_list=True)
