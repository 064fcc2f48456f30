"""Test the audit of datasets and the selection of images to label."""

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from sklearn.metrics import average_precision_score

import hf_vit
from hf_vit.auditing.audit_result import write_cleaned
from hf_vit.auditing.dense_audit import BOX_CUT, find_likelihoods
from hf_vit.auditing.image_checks import outlier_scores
from hf_vit.auditing.label_quality import (
    LABEL_CUT,
    find_label_issues,
    find_object_issues,
    mask_issue_score,
    out_of_sample_probabilities,
)
from hf_vit.auditing.selection import select_images
from hf_vit.data import load_image_classification, load_object_detection, load_semantic_segmentation
from hf_vit.features.near_duplicates import SIDE, find_near_duplicates

from ..helpers.datasets import encoded, truncate, write_instances, write_mask_folders
from ..helpers.features import save_encoder
from ..helpers.models import save_model, small_config
from ..helpers.object_trainings import CLASSES, write_objects
from ..helpers.options import call_command
from ..helpers.pretraining import NUM_TRAIN, write_colors


pytestmark = pytest.mark.usefixtures("one_thread")


def photo(number: int) -> Image.Image:
    """Returns a random image with large and small structures."""
    random = np.random.default_rng(number)
    layers = [Image.fromarray(random.integers(0, 256, (n, n, 3), dtype=np.uint8)) for n in (4, 9, 20)]
    large = [np.asarray(layer.resize((120, 90), Image.Resampling.BICUBIC), float) for layer in layers]
    return Image.fromarray(np.average(large, axis=0, weights=[3, 2, 1]).astype(np.uint8))


def thumbnail(image: Image.Image) -> torch.Tensor:
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    return torch.from_numpy(np.asarray(small, np.float32))


def test_copies_are_found_and_other_images_are_not() -> None:
    photos = [photo(number) for number in range(30)]
    copies = [
        photos[0].resize((60, 45)),
        ImageOps.mirror(photos[1]),
        ImageEnhance.Brightness(photos[2]).enhance(0.6),
        photos[3].crop((5, 2, 113, 83)),  # a crop of 90 %
        ImageOps.mirror(photos[4]).crop((8, 6, 116, 87)),
    ]
    thumbnails, same = torch.stack([thumbnail(image) for image in photos + copies]), [[n, 30 + n] for n in range(5)]
    pairs, scores = find_near_duplicates(thumbnails)
    assert pairs.tolist() == same
    assert ((scores > 0.8) & (scores <= 1.0001)).all()
    features = torch.eye(35)  # of different objects
    assert find_near_duplicates(thumbnails, features)[0].tolist() == []
    features[30:] = features[:5]
    assert find_near_duplicates(thumbnails, features)[0].tolist() == same
    assert find_near_duplicates(torch.stack([thumbnail(photos[0])]))[0].shape == (0, 2)


def test_wrong_labels_rank_first_and_copies_do_not_support_each_other() -> None:
    random = np.random.default_rng(0)
    truth = np.repeat(np.arange(3), 60)
    features = (random.normal(size=(180, 8)) + 4 * np.eye(3, 8)[truth]).astype(np.float32)
    labels = truth.copy()
    wrong = random.permutation(180)[:18]
    labels[wrong] = (truth[wrong] + 1) % 3
    scores, suggestions = find_label_issues(out_of_sample_probabilities(features, labels, np.arange(180)), labels)
    assert average_precision_score(labels != truth, scores) > 0.95
    assert (suggestions[wrong] == truth[wrong]).mean() > 0.95
    suspicious = scores > LABEL_CUT
    assert (labels != truth)[suspicious].mean() > 0.8
    assert suspicious[wrong].mean() > 0.6
    # Copies are held out together, so that they do not confirm the label of each other.
    labels, groups = truth.copy(), np.arange(180)
    features[wrong], labels[wrong], groups[wrong] = 6 * np.eye(8)[7], 0, wrong[0]
    apart = out_of_sample_probabilities(features, labels, np.arange(180))[wrong, labels[wrong]].mean()
    together = out_of_sample_probabilities(features, labels, groups)[wrong, labels[wrong]].mean()
    assert together < 0.7 * apart, (together, apart)


def test_outliers_are_far_from_the_rest_and_copies_are_not_neighbors() -> None:
    random = np.random.default_rng(0)
    features = (random.normal(size=(100, 16)) * 0.1 + np.eye(4, 16)[np.arange(100) % 4]).astype(np.float32)
    features[10:18] = -3 * np.eye(1, 16, 9)
    groups = np.arange(100)
    groups[10:18] = 10
    features[50] = np.nan
    scores, found = outlier_scores(features, groups)
    assert np.flatnonzero(found).tolist() == list(range(10, 18))
    assert np.isnan(scores[50])


def test_each_kind_of_wrong_box_is_found() -> None:
    def boxes(*corners):
        return torch.tensor(corners, dtype=torch.float32)

    good, moved, swapped, missing = ([0, 0, 20, 20], [40, 0, 60, 20], [0, 40, 20, 60], [40, 40, 60, 60])
    target = {
        "boxes": boxes(good, [50, 0, 70, 20], swapped, [80, 80, 99, 99]),
        "class_labels": torch.tensor([0, 0, 1, 1]),
        "is_crowd": torch.zeros(4, dtype=torch.bool),
    }
    prediction = {
        "boxes": boxes(good, moved, swapped, missing),
        "labels": torch.tensor([0, 0, 0, 1]),
        "scores": torch.tensor([0.9, 0.9, 0.9, 0.9]),
    }
    issues = find_object_issues(target, prediction)
    given = {tuple(issue.box): issue for issue in issues if issue.kind != "overlooked"}
    assert given[0, 0, 20, 20].score == pytest.approx(0.1)
    assert given[50, 0, 70, 20].kind == "unconfirmed"
    assert given[50, 0, 70, 20].score == pytest.approx(0.7)
    found = given[0, 40, 20, 60]
    assert (found.kind, found.label, found.suggestion) == ("swapped", 1, 0)
    assert found.score == pytest.approx(0.9 / 0.95)
    assert given[80, 80, 99, 99].kind == "unconfirmed"
    assert given[80, 80, 99, 99].score == 1
    overlooked = {tuple(issue.box): issue.score for issue in issues if issue.kind == "overlooked"}
    assert overlooked == pytest.approx({tuple(good): 0, tuple(moved): 0.6, tuple(swapped): 0, tuple(missing): 0.9})
    target["is_crowd"][3] = True
    assert len(find_object_issues(target, prediction)) == 7
    none = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
    assert {issue.kind for issue in find_object_issues(target, none)} == {"unconfirmed"}


def test_several_errors_in_a_rare_class_are_reported_and_frequent_differences_are_not() -> None:
    swapped = pd.DataFrame({"kind": "swapped", "label": 1, "score": [0.9, 0.85, 0.8]})  # 3 of 10 objects of the class
    right = pd.DataFrame({"kind": "unconfirmed", "label": [0] * 290 + [1] * 7, "score": 0.6})
    likelihoods = find_likelihoods(pd.concat([swapped, right], ignore_index=True))
    assert (likelihoods[:3] > BOX_CUT).all()
    assert (likelihoods[3:] < 0.1).all()


def test_masks_with_a_wrong_region_rank_first() -> None:
    mask = torch.zeros(20, 20, dtype=torch.int64)
    mask[:10] = 1
    right = torch.nn.functional.one_hot(mask, 2).movedim(-1, 0) * 0.9 + 0.05
    wrong = mask.clone()
    wrong[12:15, 3:6] = 1
    assert mask_issue_score(mask, right) == pytest.approx(0.05, rel=1e-3)
    assert mask_issue_score(wrong, right) > 0.8
    wrong[wrong != mask] = 255
    assert mask_issue_score(wrong, right) == pytest.approx(0.05, rel=1e-3)
    assert mask_issue_score(torch.full_like(mask, 255), right) == 0


def test_an_audit_writes_a_page_a_table_and_a_cleaned_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_colors(tmp_path / "colors")
    model = save_encoder(tmp_path / "encoder")
    train = data / "train"
    (train / "red" / "0.png").replace(train / "blue" / "moved.png")
    Image.open(data / "test" / "green" / "1.png").save(train / "green" / "leak.png")
    Image.new("RGB", (20, 20)).save(train / "green" / "black.png")
    truncate(train / "green" / "3.png")
    lines: list[str] = []
    places = {"output_dir": tmp_path / "out", "use_cpu": True, "report": lines.append}
    table = hf_vit.audit(data, model, write=tmp_path / "cleaned", **places)
    rows = {str(Path(row["file"]).relative_to(data)): row for row in table}
    assert len(rows) == 3 * NUM_TRAIN + 2 + 21
    moved = rows["train/blue/moved.png"]
    assert "wrong_label" in moved["issues"]
    assert moved["suggestion"] == "red"
    assert moved["wrong_label"] > LABEL_CUT
    leak = rows["train/green/leak.png"]
    assert "duplicate" in leak["issues"]
    assert leak["copy_of"] == str(data / "test" / "green" / "1.png")
    assert rows["test/green/1.png"]["issues"] == []
    assert rows["train/green/3.png"]["issues"] == ["broken"]
    assert rows["train/green/3.png"]["text"]
    assert {"dark", "blank"} <= {*rows["train/green/black.png"]["issues"]}
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "red" in page
    assert "train/blue/moved.png" in page
    assert "data:image/jpeg;base64," in page
    assert "http" not in page.replace("data:image", "")
    assert "{{" not in page
    kept = load_image_classification(str(tmp_path / "cleaned"))
    names = {Path(file).name for file in kept["train"]["file"]}
    assert not names & {"moved.png", "leak.png"}
    assert len(kept["test"]) == 21
    assert kept["train"].features["label"].names == ["blue", "green", "red"]
    assert kept["train"][0]["image"].size[0] >= 18
    with pytest.raises(ValueError, match="exists from an earlier run"):
        hf_vit.audit(data, model, **places)
    with pytest.raises(ValueError, match="cleaned exists"):
        hf_vit.audit(data, model, write=tmp_path / "cleaned", overwrite=True, **places)


def write_photos(file: Path, cells: list[dict[str, Any]], labels: list[int], names: list[str]) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features).to_parquet(file)


def test_labels_of_splits_with_other_class_numbers_stay(tmp_path: Path) -> None:
    for split, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        cells = [{"bytes": encoded(photo(10 * len(split) + number)), "path": None} for number in range(4)]
        write_photos(tmp_path / "pets" / f"{split}.parquet", cells, [0, 1, 1, 0], names)
    places = {"output_dir": tmp_path / "out", "write": tmp_path / "cleaned", "report": lambda _: None}
    table = hf_vit.audit(tmp_path / "pets", **places)
    given = {"train": ["cat", "dog", "dog", "cat"], "test": ["dog", "cat", "cat", "dog"]}
    assert {split: [row["label"] for row in table if row["split"] == split] for split in given} == given
    kept = load_image_classification(str(tmp_path / "cleaned"))["test"]
    assert [kept.features["label"].int2str(number) for number in kept["label"]] == given["test"]


def test_images_of_equal_names_have_their_own_features_and_corrected_labels_need_no_new_ones(tmp_path: Path) -> None:
    contents = [b"no image" if number == 3 else encoded(photo(number)) for number in range(12)]
    cells = [{"bytes": content, "path": "image.png"} for content in contents]
    write_photos(tmp_path / "train.parquet", cells, [0, 1] * 6, ["cat", "dog"])
    model, places = save_encoder(tmp_path / "encoder"), {"output_dir": tmp_path / "out", "report": lambda _: None}
    table = hf_vit.audit(tmp_path / "train.parquet", model, use_cpu=True, **places)
    assert [row["issues"] for row in table].index(["broken"]) == 3
    assert np.isnan([row["outlier"] for row in table]).nonzero()[0].tolist() == [3]
    features = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "features").glob("*.parquet")}
    write_photos(tmp_path / "train.parquet", cells, [1, 0] + [0, 1] * 5, ["cat", "dog"])
    hf_vit.audit(tmp_path / "train.parquet", model, use_cpu=True, overwrite=True, **places)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "features").glob("*.parquet")} == features


def test_an_audit_without_model_names_the_missing_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(6):
        (tmp_path / "photos").mkdir(exist_ok=True)
        photo(number).save(tmp_path / "photos" / f"{number}.png")
    ImageOps.mirror(photo(2)).save(tmp_path / "photos" / "copy.png")
    call_command("audit", [str(tmp_path / "photos"), "--output_dir", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "Near duplicates: 1" in said
    assert "Not checked without --model: wrong labels" in said
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="contains no image"):
        hf_vit.audit(tmp_path / "empty", output_dir=tmp_path / "other")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="None of the 1 images"):
        hf_vit.audit(tmp_path / "bad", output_dir=tmp_path / "other")


def test_images_with_wrong_boxes_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_objects(tmp_path / "objects")
    files = {split: data / split / "annotations.json" for split in ("train", "val")}
    truth = [json.loads(file.read_text()) for file in files.values()]
    other = save_model(hf_vit.HfViTForObjectDetection(small_config(num_labels=2)), tmp_path / "other")
    with pytest.raises(ValueError, match="The model has no classes brick, leaf"):
        hf_vit.audit(data, other, output_dir=tmp_path / "out")
    names = dict(enumerate(CLASSES))
    labels = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    # In the presets for training from scratch, the final norm belongs to the pooling, which detectors do not have.
    config = small_config(num_labels=2, **labels, pooling="mean", norm_after_pooling=True)
    model = save_model(hf_vit.HfViTForObjectDetection(config), tmp_path / "model")
    answers = []  # the right boxes of each image, as a perfect detector predicts them
    for content in truth:
        for image in content["images"]:
            own = [each for each in content["annotations"] if each["image_id"] == image["id"] and not each["iscrowd"]]
            boxes = torch.tensor([each["bbox"] for each in own], dtype=torch.float32).reshape(-1, 4)
            labels = torch.tensor([each["category_id"] - 1 for each in own], dtype=torch.int64)
            boxes[:, 2:] += boxes[:, :2]
            answers.append({"boxes": boxes, "labels": labels, "scores": torch.full((len(own),), 0.9)})
    remaining = iter(answers)
    monkeypatch.setattr(
        hf_vit.HfViTImageProcessor, "post_process_object_detection", lambda *args, **options: [next(remaining)]
    )
    first = truth[0]["annotations"][0]
    first["category_id"] = 3 - first["category_id"]
    removed = truth[1]["annotations"].pop(0)
    for file, content in zip(files.values(), truth, strict=True):
        file.write_text(json.dumps(content))
    table = hf_vit.audit(data, model, output_dir=tmp_path / "out", use_cpu=True, report=lambda _: None)
    found = {(row["split"], Path(row["file"]).stem): row["text"] for row in table if "wrong_boxes" in row["issues"]}
    given, right = CLASSES[first["category_id"] - 1], CLASSES[2 - first["category_id"]]
    assert found == {
        ("train", str(first["image_id"])): f"swapped: {given} → {right}",
        ("validation", str(removed["image_id"])): f"overlooked: {CLASSES[removed['category_id'] - 1]}",
    }
    assert "swapped: " in (tmp_path / "out" / "audit.html").read_text()


def test_images_with_a_wrong_mask_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_mask_folders(tmp_path / "masks")
    loaded = load_semantic_segmentation(str(data))
    names = dict(enumerate(loaded.names))
    config = small_config(num_labels=3, id2label=names, label2id={name: number for number, name in names.items()})
    model = save_model(hf_vit.HfViTForSemanticSegmentation(config), tmp_path / "model")
    masks = [each["segmentation_map"].long() for split in loaded.splits for each in loaded.examples(split)]
    scores = [torch.nn.functional.one_hot(mask % 255 % 3, 3).movedim(-1, 0) * 0.97 + 0.01 for mask in masks]
    answers = iter([{"segmentation_scores": each} for each in scores])  # a nearly perfect segmenter
    monkeypatch.setattr(
        hf_vit.HfViTImageProcessor, "post_process_semantic_segmentation", lambda *args, **options: [next(answers)]
    )
    file = data / "train" / "masks" / "1.png"
    mask = np.asarray(Image.open(file)).copy()
    mask[:4, :4] = (mask[:4, :4] % 255 + 1) % 3
    Image.fromarray(mask).save(file)
    table = hf_vit.audit(data, model, output_dir=tmp_path / "out", use_cpu=True, report=lambda _: None)
    found = {Path(row["file"]).stem: row["text"] for row in table if "wrong_mask" in row["issues"]}
    assert [*found] == ["1"]
    assert "of the pixels: " in found["1"]
    assert "of the pixels: " in (tmp_path / "out" / "audit.html").read_text()


def test_cleaned_boxes_and_masks_can_be_loaded(tmp_path: Path) -> None:
    boxes = ({"category_id": 3, "bbox": [1, 1, 4, 3]}, {"category_id": 7, "bbox": [5, 4, 3, 2], "iscrowd": 1})
    data = load_object_detection(str(write_instances(tmp_path / "boxes", *boxes)))
    write_cleaned(data.splits, np.ones(1, bool), tmp_path / "cleaned", data.names)
    again = load_object_detection(str(tmp_path / "cleaned"))
    assert again.names == data.names
    columns = ["boxes", "class_labels", "is_crowd", "width", "height"]
    assert again.splits["train"].select_columns(columns)[:] == data.splits["train"].select_columns(columns)[:]
    masks = load_semantic_segmentation(str(write_mask_folders(tmp_path / "masks")))
    total = sum(map(len, masks.splits.values()))
    write_cleaned(masks.splits, np.ones(total, bool), tmp_path / "kept", masks.names)
    again = load_semantic_segmentation(str(tmp_path / "kept"))
    assert again.names == masks.names
    first, second = (each.examples("train")[0]["segmentation_map"] for each in (masks, again))
    assert torch.equal(first, second)


def test_selected_images_cover_the_pool_and_then_the_boundary() -> None:
    random = np.random.default_rng(0)
    centers = 4 * np.eye(5, 12)
    kinds = np.repeat(np.arange(5), [100, 50, 20, 10, 6])
    features = (centers[kinds] + 0.1 * random.normal(size=(len(kinds), 12))).astype(np.float32)
    assert sorted(kinds[select_images(features, 5)]) == [0, 1, 2, 3, 4]
    labeled = features[kinds < 2]
    assert sorted(kinds[select_images(features, 3, labeled, kinds[kinds < 2])]) != [0, 0, 1]
    # Two classes with many labels: images between them are selected.
    known = random.normal(size=(100, 12)).astype(np.float32)
    labels = (known.sum(axis=1) > 0).astype(int)
    pool = random.normal(size=(400, 12)).astype(np.float32)
    chosen = select_images(pool, 20, known, labels)
    assert len({*chosen}) == 20
    distance = np.abs(pool.sum(axis=1))
    assert distance[chosen].mean() < 0.8 * distance.mean()


def test_selection_writes_a_list_and_a_sheet(tmp_path: Path) -> None:
    data, model = write_colors(tmp_path / "colors"), save_encoder(tmp_path / "encoder")
    out = tmp_path / "out"
    files = hf_vit.select(data / "train", model, budget=6, output_dir=out, use_cpu=True, report=lambda _: None)
    with (out / "selected.csv").open() as stream:
        assert [row["file_name"] for row in csv.DictReader(stream)] == files
    assert {Path(file).parent.name for file in files} == {"blue", "green", "red"}
    assert Image.open(out / "selected.png").width > 300
    options = {"output_dir": tmp_path / "next", "use_cpu": True, "report": lambda _: None}
    assert len(hf_vit.select(data / "train", model, budget=4, labeled=data / "test", **options)) == 4
    with pytest.raises(ValueError, match="budget=1000 exceeds"):
        hf_vit.select(data / "train", model, budget=1000, overwrite=True, **options)
