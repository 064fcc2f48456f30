"""Test loading segmentation and depth datasets from all sources, and errors for invalid datasets."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Image
from PIL import Image as PILImage

from hf_vit.data import hold_out, load_depth_estimation, load_semantic_segmentation, load_universal_segmentation
from hf_vit.data.datasets import TargetData

from ..helpers import datasets as samples
from .errors import expect_error


NAMES = ("sky", "road", "car")


def load_masks(source: Path, **options) -> TargetData:
    """Load a dataset with masks of class numbers, and check properties that do not depend on the source."""
    data = load_semantic_segmentation(str(source), **{"class_names": NAMES, **options})
    assert data.names == NAMES
    for split in data.splits.values():
        assert list(split.features) == ["image", "mask", "file"]
        assert split.features["image"] == Image()
    return data


def maps(data: TargetData, split: str = "train") -> list[list]:
    examples = data.examples(split)
    return [examples[index]["segmentation_map"].tolist() for index in range(len(examples))]


def expected_maps(count: int) -> list[list]:
    return [samples.class_map(number).tolist() for number in range(count)]


def write_pairs(folder: Path, image: str, mask: str, count: int = 2) -> Path:
    """Write `count` pairs of image and mask. The placeholder {} in a path is replaced with the number of the pair."""
    samples.write_pictures(folder, *(image.replace("{}", str(number)) for number in range(count)))
    samples.write_masks(folder, *(mask.replace("{}", str(number)) for number in range(count)))
    return folder


def test_folders_give_images_masks_files_and_names_and_a_palette_reads_colors(tmp_path):
    folder = samples.write_mask_folders(tmp_path)
    data = load_semantic_segmentation(str(folder))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 4, "validation": 2}
    assert (data.names, data.thing_ids) == (NAMES, ())
    example = data.examples("validation")[1]
    assert example["file"] == f"{folder}/val/images/1.jpg"
    assert (example["image"].mode, example["image"].size) == ("RGB", samples.SHAPE[::-1])
    assert torch.equal(example["segmentation_map"], torch.from_numpy(samples.class_map(1)).long())
    assert maps(data) == expected_maps(4)
    # The file palette.txt next to the image folders defines the class of each mask color.
    samples.write_pictures(tmp_path / "colors", "images/0.jpg")
    colors = np.array([[9, 8, 7], [0, 0, 255], [128, 0, 0]], np.uint8)
    labels = np.random.default_rng(0).integers(0, 3, samples.SHAPE)
    samples.write_image(tmp_path / "colors" / "masks" / "0.png", colors[labels])
    (tmp_path / "colors" / "palette.txt").write_text("sky 9 8 7\nroad 0 0 255\ncar 128 0 0")
    assert maps(load_semantic_segmentation(str(tmp_path / "colors"))) == [labels.tolist()]


def test_layouts_and_stems_are_recognized(tmp_path):
    for images, masks, split in (
        ("train/images", "train/masks", "train"), ("training/Images", "training/annotations", "train"),
        ("images/train", "annotations/train", "train"), ("rgb/val", "labels/val", "validation"),
        ("images", "masks", "train"), ("test/img/night/a b", "test/mask/night/a b", "test")
    ):  # fmt: skip
        folder = write_pairs(
            tmp_path / f"layout {images.replace('/', ' ')}", f"{images}/{{}}.0.jpg", f"{masks}/{{}}.0.png"
        )
        (folder / images / "Thumbs.db").touch()
        data = load_masks(folder)
        assert (list(data.splits), maps(data, split)) == ([split], expected_maps(2))
    # An image and its mask are matched even if all image or all mask names have a common suffix.
    for image, mask in (("{}", "{}_L"), ("{}_0{}_leftImg8bit", "{}_0{}_gtFine_labelIds"), ("rgb_{}", "rgb_{}_mask")):
        folder = write_pairs(tmp_path / image, f"images/{image}.jpg", f"masks/{mask}.png", 3)
        assert maps(load_masks(folder)) == expected_maps(3)


def test_files_without_a_partner_are_listed_for_both_sides_of_all_splits(tmp_path):
    samples.write_mask_folders(tmp_path)
    samples.write_pictures(tmp_path, "train/images/a.jpg", "val/images/0.png")
    samples.write_masks(tmp_path, "val/masks/b.png")
    lines = (
        r"(?s)^3 files in .* do not form pairs:", r".*train/images/a\.jpg: no mask in .*train/masks",
        r".*val/images/0\.jpg', '.*val/images/0\.png' have the same stem",
        r".*val/masks/b\.png: no image in .*val/images", ".*Add or remove files"
    )  # fmt: skip
    expect_error(r"\n".join(lines), load_masks, tmp_path)


def test_folders_without_pairs_are_refused_and_splits_without_masks_left_out(tmp_path, caplog):
    folder = tmp_path / "bad"
    samples.write_pictures(folder, "train/cat/0.jpg")
    expect_error(r"needs folders of images and masks, but has 'train'\. Save pairs as train/im", load_masks, folder)
    samples.write_pictures(folder, "train/images/0.jpg")
    (folder / "train" / "masks").mkdir()
    expect_error(r"train/masks has no file that ends in \.bmp", load_masks, folder)
    samples.write_mask_folders(tmp_path / "masks")
    samples.write_pictures(tmp_path / "masks", "test/images/0.jpg")
    assert list(load_masks(tmp_path / "masks").splits) == ["train", "validation"]
    assert "because they have no folder of images or of masks: 'test'" in caplog.text


def test_depth_lies_beside_masks_and_has_a_scale(tmp_path):
    for name, suffix in (("depths", ".png"), ("depth", ".tif"), ("depth_maps", ".npy"), ("depths", ".npy")):
        folder = samples.write_mask_folders(tmp_path / f"{name}{suffix}")
        for split, number in (*product(("train",), range(4)), ("val", 0), ("val", 1)):
            file, depth = folder / split / name / f"{number}{suffix}", samples.depth_in_millimeters(number)
            file.parent.mkdir(exist_ok=True)
            np.save(file, depth / 1000) if suffix == ".npy" else samples.write_image(file, depth)
        data = load_depth_estimation(str(folder))
        assert list(data.splits["train"].features) == ["image", "depth", "file"]
        expected = torch.from_numpy(samples.depth_in_millimeters(1).astype(np.float32) / 1000)
        assert torch.allclose(data.examples("validation")[1]["depth_map"], expected)
    source = str(samples.write_depth_folders(tmp_path / "scaled"))
    near, far = (load_depth_estimation(source, depth_scale=s).examples("train")[0]["depth_map"] for s in (1000, 250))
    assert torch.equal(4 * near, far)
    expect_error("depth_scale=0 must be positive", load_depth_estimation, source, depth_scale=0)


def pairs_table(count: int = 2, image: str = "image", mask: str = "label") -> Dataset:
    """Return a table in the format of the Hub, with images and masks as encoded bytes."""
    pixels = {image: samples.picture, mask: lambda number: PILImage.fromarray(samples.class_map(number))}
    content = {name: [samples.encoded(make(number)) for number in range(count)] for name, make in pixels.items()}
    return Dataset.from_dict(content, Features({image: Image(), mask: Image()})).add_column("id", list(range(count)))


@pytest.mark.parametrize("mask", ["label", "annotation", "segmentation_mask"])
def test_two_columns_of_images_are_images_and_masks(tmp_path, mask):
    pairs_table(image="pixel_values", mask=mask).to_parquet(tmp_path / "a" / "train-00000-of-00001.parquet")
    DatasetDict({"train": pairs_table(mask=mask), "val": pairs_table(1, mask=mask)}).save_to_disk(tmp_path / "b")
    for source in ("a", "b"):
        data = load_masks(tmp_path / source)
        assert maps(data) == expected_maps(2)
        assert data.splits["train"]["file"][:] == ["image 0 of train", "image 1 of train"]
    assert list(data.splits) == ["train", "validation"]


def test_columns_of_other_names_are_named_and_options_must_apply(tmp_path):
    pairs_table(image="left", mask="right").to_parquet(tmp_path / "train.parquet")
    expect_error(r"no column with a usual name \(mask, label.*only 'left', 'right'\. Set m", load_masks, tmp_path)
    assert maps(load_masks(tmp_path, mask_column_name="right")) == expected_maps(2)
    pairs_table().remove_columns("label").to_parquet(tmp_path / "train.parquet")
    expect_error("has 1 columns of encoded images, but needs one of images and one of m", load_masks, tmp_path)
    samples.write_mask_folders(tmp_path / "folders")
    for option in ("dataset_revision", "dataset_config_name"):
        expect_error(
            f"{option}='v1' applies to datasets on the Hub", load_masks, tmp_path / "folders", **{option: "v1"}
        )
    expect_error(r"classes\.txt is a file of an unknown format", load_masks, tmp_path / "folders" / "classes.txt")
    expect_error("There is no file or folder", load_masks, tmp_path / "folders" / "elsewhere", error=FileNotFoundError)


def regions(labels: list[list[int]], folder: Path, *things: str) -> tuple[list[int], list[list]]:
    samples.write_pictures(folder, "images/0.jpg")
    samples.write_image(folder / "masks" / "0.png", np.array(labels, np.uint8))
    data = load_universal_segmentation(str(folder), class_names=NAMES, thing_names=things)
    assert data.thing_ids == tuple(sorted(NAMES.index(name) for name in things))
    target = data.read_target(data.splits["train"][0])
    return target["class_labels"].tolist(), target["masks"].int().tolist()


def test_semantic_masks_are_split_by_class_and_things_by_region(tmp_path):
    labels = [[2, 255, 2, 0], [0, 0, 0, 0], [2, 0, 0, 2], [0, 2, 0, 1]]
    classes, masks = regions(labels, tmp_path)
    assert classes == [0, 1, 2]
    assert masks == [(np.array(labels) == number).astype(int).tolist() for number in classes]
    classes, masks = regions(labels, tmp_path, "car", "road")
    assert classes == [0, 1, 2, 2, 2]
    # Regions that are separated by unlabeled pixels or touch at a corner belong to one segment.
    segments = [["1010", "0000", "0000", "0000"], ["0000", "0000", "1000", "0100"], ["0000", "0000", "0001", "0000"]]
    assert masks[2:] == [[list(map(int, row)) for row in segment] for segment in segments]
    with pytest.raises(ValueError, match=r"thing_names has unknown classes 'dog'\. Choose from 'sky', 'road', 'car'"):
        regions(labels, tmp_path, "dog")


def test_things_must_be_named_and_an_image_without_any_class_has_no_masks(tmp_path):
    samples.write_mask_folders(tmp_path)
    message = (
        r"masks of .* contain classes but no instances\. Set --thing_classes \(thing_names in Python\) to the classes "
        r'whose connected regions are instances, .* --thing_classes "car", or to "" if all classes are stuff\.'
    )
    expect_error(message, load_universal_segmentation, str(tmp_path))
    assert load_universal_segmentation(str(tmp_path), thing_names=[]).thing_ids == ()
    assert load_universal_segmentation(str(tmp_path), thing_names=["car", "sky"]).thing_ids == (0, 2)
    # An image without labeled pixels has no masks.
    samples.write_pictures(tmp_path / "empty", "images/0.jpg")
    samples.write_image(tmp_path / "empty" / "masks" / "0.png", np.full(samples.SHAPE, 255, np.uint8))
    data = load_universal_segmentation(str(tmp_path / "empty"), class_names=NAMES, thing_names=["car"])
    example = data.examples("train")[0]
    assert (example["masks"].shape, example["masks"].dtype) == ((0, *samples.SHAPE), torch.bool)
    assert (example["class_labels"].shape, example["class_labels"].dtype) == ((0,), torch.int64)


def test_panoptic_annotations_of_coco_are_read(tmp_path):
    ids = samples.write_panoptic(tmp_path)
    data = load_universal_segmentation(str(tmp_path))
    assert (list(data.splits), data.names, data.thing_ids) == (["validation"], ("cat", "sky"), (0,))
    example = data.examples("validation")[0]
    assert example["file"] == f"{tmp_path}/val2017/12.jpg"
    assert example["class_labels"].tolist() == [1, 0, 0, 0]
    assert example["is_crowd"].tolist() == [False, False, False, True]
    assert np.array_equal(example["masks"].numpy(), np.stack([ids == number for number in (70000, 300, 5, 9)]))
    # Every segment of a panoptic mask must be listed in its annotation.
    file = tmp_path / "annotations" / "panoptic_val2017.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["segments_info"][1]["id"] = 301
    file.write_text(json.dumps(content))
    data = load_universal_segmentation(str(tmp_path))
    message = r"^panoptic mask of .*12\.jpg has the segments 300, which are missing in its seg"
    expect_error(message, data.examples("validation").__getitem__, 0)


SQUARE = {"category_id": 3, "segmentation": [[1, 1, 5, 1, 5, 4, 1, 4]]}
MASKLESS = r"1 of 1 annotations in .*annotations\.json have no valid mask:\n  annotation 0 has no segmentat"


def test_instances_of_coco_are_drawn_from_polygons_and_run_lengths(tmp_path):
    # This mask covers the second and third column of pixels.
    run_lengths = {"size": list(samples.SHAPE), "counts": [6, 12, 30]}
    samples.write_instances(
        tmp_path,
        SQUARE,
        {"category_id": 7, "segmentation": run_lengths},
        {"category_id": 7, "segmentation": [*SQUARE["segmentation"], [6, 0, 8, 0, 8, 2, 6, 2]]},
        {"category_id": 3, "segmentation": run_lengths, "iscrowd": 1},
    )
    data = load_universal_segmentation(str(tmp_path))
    assert (list(data.splits), data.names) == (["train"], ("cat", "sky"))
    example = data.examples("train")[0]
    square, columns, parts = (np.zeros(samples.SHAPE, bool) for _ in range(3))
    square[1:4, 1:5] = columns[:, 1:3] = parts[1:4, 1:5] = parts[:2, 6:8] = True
    assert example["class_labels"].tolist() == [0, 1, 1, 0]
    assert example["is_crowd"].tolist() == [False, False, False, True]
    assert np.array_equal(example["masks"].numpy(), np.stack([square, columns, parts, columns]))
    file = samples.write_instances(tmp_path / "other", SQUARE)
    content = json.loads(file.read_text())
    content["images"].append({**content["images"][0], "id": 13, "file_name": "13.jpg"})
    file.write_text(json.dumps(content))
    samples.write_pictures(tmp_path / "other", "train/images/13.jpg")
    assert load_universal_segmentation(str(file)).examples("train")[1]["masks"].shape == (0, *samples.SHAPE)
    samples.write_instances(tmp_path / "other", SQUARE)
    (tmp_path / "other" / "train" / "images" / "12.jpg").unlink()
    message = r"(?s)12\.jpg, listed in .*annotations\.json, is in none of the folders:\n  .*train/im"
    expect_error(message, load_universal_segmentation, str(tmp_path / "other"))


def test_bad_annotations_are_named(tmp_path):
    for annotation, message in (
        ({"segmentation": None}, MASKLESS),
        ({"segmentation": [[1, 1, 5, 5]]}, "annotation 0 has no polygons of at least three points"),
        ({"segmentation": [[1, 1, 5, "4", 5, 5]]}, "0 has a polygon with values that are not finite"),
        ({"segmentation": [[1, 1, 5, math.nan, 5, 5]]}, "with values that are not finite numbers"),
        ({"segmentation": [[1, 1, 5, 1e12, 5, 5]]}, "has a polygon far outside the image of 6 x 8"),
        ({"segmentation": [[9, 1, 9, 3, 12, 3]]}, "0 lies completely outside the image of 6 x 8"),
        ({"category_id": None}, r"1 annotations in .*json are incomplete:\n  id 0 has no categor"),
        ({"category_id": 8}, "has annotations of categories that the file does not define: 8"),
        ({"image_id": 99}, "has annotations of images that the file does not define: 99"),
    ):
        # A value of None in `annotation` removes the key.
        written = SQUARE | annotation
        samples.write_instances(tmp_path, {key: value for key, value in written.items() if value is not None})
        expect_error(message, load_universal_segmentation, str(tmp_path))


def test_one_of_two_kinds_of_annotations_is_chosen(tmp_path):
    samples.write_panoptic(tmp_path)
    samples.write_coco(tmp_path / "annotations" / "instances_val2017.json", [{"id": 1, "image_id": 12, **SQUARE}])
    message = r"annotation files of panoptic and instances\. Choose one kind, as in annotations='panoptic'"
    expect_error(message, load_universal_segmentation, str(tmp_path))
    expect_error("annotations='boxes' is unknown", load_universal_segmentation, str(tmp_path), annotations="boxes")
    for kind, count in (("panoptic", 4), ("instances", 1)):
        data = load_universal_segmentation(str(tmp_path), annotations=kind)
        assert len(data.examples("validation")[0]["masks"]) == count
    with pytest.raises(ValueError, match="already contain class names and things"):
        load_universal_segmentation(str(tmp_path), annotations="panoptic", thing_names=["cat"])


def test_images_without_labels_are_held_out_at_random(tmp_path):
    train = load_masks(write_pairs(tmp_path, "images/{}.jpg", "masks/{}.png", 20)).splits["train"]
    held_out = [hold_out(train, 0.2, seed)["test"]["file"][:] for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]
    assert len(held_out[0]) == 4
    assert set(hold_out(train, 0.2)["train"]["file"]) == set(train["file"]) - set(held_out[0])
    expect_error("A single image cannot be split", hold_out, train.select([0]))
