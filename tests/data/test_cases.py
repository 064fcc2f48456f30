"""Test downloads and exports of tools as they arrive: they are read as meant, or refused with the cause."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage
from transformers import TrainingArguments

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.data import (
    ImageClassificationCollator,
    check_dense,
    load_depth_estimation,
    load_image_classification,
    load_object_detection,
    load_semantic_segmentation,
    load_universal_segmentation,
    load_unlabeled_images,
    unreadable_images,
)
from hf_vit.data.reading.splits import by_split, is_split, split_of
from hf_vit.training import HfViTTrainer

from ..helpers import datasets as samples
from ..helpers.trainings import DIGITS_CONFIG
from .errors import expect_error


SIZE = (40, 30)
CATEGORIES = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]


def classes(folder: Path, **options: Any) -> dict[str, list[str]]:
    """Return the class name of each image by split."""
    splits = load_image_classification(str(folder), **options)
    return {name: [rows.features["label"].names[label] for label in rows["label"]] for name, rows in splits.items()}


def coco(image: str, **annotation: Any) -> dict[str, Any]:
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 10, 10], "area": 100, "iscrowd": 0}
    images = [{"id": 1, "width": SIZE[0], "height": SIZE[1], "file_name": image}]
    return {"images": images, "annotations": [box | annotation], "categories": CATEGORIES}


def write(folder: Path, **files: Any) -> Path:
    """Write images (value `None`), text files (text) and JSON files; `__` stands for a slash, `_dot_` for a dot."""
    for name, content in files.items():
        file = folder / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            samples.picture(0, SIZE).save(file)
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


VOC = (
    "<annotation><size><width>40</width><height>30</height></size><object><name>cat</name><bndbox><xmin>1</xmin>"
    "<ymin>2</ymin><xmax>10</xmax><ymax>12</ymax></bndbox></object></annotation>"
)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *(
            (name, "train")
            for name in ("train", "Training_Set", "seg_train", "train2017", "asl_alphabet_train", "TRAIN")
        ),
        *((name, "validation") for name in ("Validation", "valid", "dev", "val-set", "valannot", "valImages")),
        *((name, "test") for name in ("test1", "my_test_labels", "Testing", "testset")),
        *((name, None) for name in ("bus", "invalid", "latest", "trainer", "testimony", "device", "value", "fold 3")),
    ],
)
def test_a_split_is_found_in_a_name(name: str, split: str | None) -> None:
    assert split_of(name) == split


def test_names_of_files_are_compared_with_each_other() -> None:
    def found(*names: str) -> tuple[dict[str, str], list[str]]:
        return by_split((name, name) for name in names)

    assert found("train", "val", "cat_train", "cat_val") == (
        {"train": "train", "validation": "val"},
        ["cat_train", "cat_val"],
    )
    named = {"train": "instances_train2017", "validation": "instances_val2017"}
    assert found(*named.values(), "instances_default") == (named, ["instances_default"])
    assert found("train", "val", "trainval")[0] == {"train": "train", "validation": "val"}
    assert found("trainval", "val", "test")[0] == {"train": "trainval", "test": "test"}
    assert found("boxes_train", "labels_test") == ({}, ["boxes_train", "labels_test"])
    with pytest.raises(ValueError, match="'val' and 'Validation' are both names of the split 'validation'"):
        found("val", "Validation")
    assert is_split("val2017")
    assert not is_split("bullet_train")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("seg_train", "seg_test"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("Training_Set", "Test_Set"),
        ("train2017", "test1"),
        ("train", "Validation"),
    ],
)
def test_folders_named_like_splits_contain_the_classes(tmp_path: Path, train: str, test: str, caplog: Any) -> None:
    samples.write_pictures(tmp_path, *(f"{split}/{name}/0.jpg" for split in (train, test) for name in ("cat", "dog")))
    second = "validation" if test == "Validation" else "test"
    assert classes(tmp_path) == {"train": ["cat", "dog"], second: ["cat", "dog"]}
    assert not caplog.records
    samples.write_pictures(tmp_path, "pred/1.jpg")
    assert classes(tmp_path) == {"train": ["cat", "dog"], second: ["cat", "dog"]}
    assert "because they are not named like a split: 'pred'" in caplog.text


@pytest.mark.parametrize(
    "names", [("bus", "car", "train"), ("bullet_train", "bus"), ("valid", "invalid"), ("train_station", "test_tube")]
)
def test_a_class_may_have_the_name_of_a_split(tmp_path: Path, names: tuple[str, ...]) -> None:
    samples.write_pictures(tmp_path, *(f"{name}/0.jpg" for name in names))
    assert classes(tmp_path) == {"train": sorted(names)}
    assert load_unlabeled_images([str(tmp_path)])["train"].features["class_number"].names == sorted(names)
    # Folders of splits around these classes do not change that.
    samples.write_pictures(
        tmp_path / "split", *(f"{split}/{name}/0.jpg" for split in ("train", "val") for name in names)
    )
    assert classes(tmp_path / "split") == {"train": sorted(names), "validation": sorted(names)}


def test_images_in_folders_of_splits_without_classes_are_refused(tmp_path: Path) -> None:
    samples.write_pictures(tmp_path, *(f"train/{name}.{n}.jpg" for name in ("cat", "dog") for n in range(4)))
    samples.write_pictures(tmp_path, "test1/1.jpg", "test1/2.jpg")
    message = (
        r"has no class folders: 'test1', 'train' are names of splits\. Labels may be in the names of the files, such "
        r"as 'cat\.0\.jpg', 'dog\.0\.jpg'\. If all of these folders are classes, set data_format \(--data_format\) to "
    )
    expect_error(message, load_image_classification, str(tmp_path))
    expect_error(message, load_image_classification, str(tmp_path), problem_type=None)
    assert set(classes(tmp_path, data_format="class_folders")["train"]) == {"test1", "train"}
    (tmp_path / "train" / "_annotations.csv").write_text("filename,class\n")
    expect_error("Labels may be in the tables 'train/_annotations.csv'", load_image_classification, str(tmp_path))
    samples.write_pictures(tmp_path / "more", "train/1.jpg", "test/2.jpg", "extra/3.jpg")
    message = r"'t\w+', 't\w+' may be splits, but 'extra' are not\. If all"
    expect_error(message, load_image_classification, str(tmp_path / "more"))
    samples.write_pictures(
        tmp_path / "twice", *(f"{split}/{name}/1.jpg" for split in ("val", "valid") for name in "ab")
    )
    message = "'val' and 'valid' are both names of the split 'validation'. Keep one of them"
    expect_error(message, load_image_classification, str(tmp_path / "twice"))
    samples.write_pictures(tmp_path / "one", "train/steam/1.jpg", "bus/2.jpg")
    expect_error("'train' may be splits, but 'bus' are not", load_image_classification, str(tmp_path / "one"))
    samples.write_class_folders(tmp_path / "archive" / "pets", ["cat", "dog"])
    message = r"All labels of the split 'train' are 'pets', .* It contains 'test', 'train': give its path if these"
    expect_error(message, load_image_classification, str(tmp_path / "archive"))
    samples.write_pictures(tmp_path / "roles", "images/1.jpg", "masks/1.png")
    expect_error("usual names for images and targets", load_image_classification, str(tmp_path / "roles"))


def test_deeper_class_folders_and_files_next_to_them_are_reported(tmp_path: Path, caplog: Any) -> None:
    samples.write_pictures(
        tmp_path, *(f"{name}/{n}.jpg" for name in ("animals/cat", "animals/dog", "plants/rose") for n in "12")
    )
    (tmp_path / "plants.csv").write_text("file,kind\n")
    (tmp_path / "train.txt").write_text("animals/cat/1.jpg\n")
    assert classes(tmp_path) == {"train": ["animals"] * 4 + ["plants"] * 2}
    assert "Images in 3 folders inside of class folders" in caplog.text
    assert "'animals/cat', 'animals/dog', 'plants/rose'" in caplog.text
    assert "Ignored 1 files next to class folders" in caplog.text
    assert "plants.csv" in caplog.text
    assert "Ignored lists in" in caplog.text
    assert "'train.txt'" in caplog.text


def test_formats_that_both_fit_are_named_and_chosen(tmp_path: Path, caplog: Any) -> None:
    write(tmp_path, images__train__1_dot_png=None, labels__train__1_dot_txt="1 0.5 0.5 0.25 0.2\n")
    write(tmp_path, data_dot_yaml="train: images/train\nnames: [cow, hen]", annotations__train_dot_json=coco("1.png"))
    message = r"(?s)fits 2 formats:\n  coco: 'train\.json'\n  yolo: data\.yaml\nSet data_format \(--data_format\) to"
    expect_error(message, load_object_detection, str(tmp_path))
    assert boxes(tmp_path, data_format="coco")[1] == ("cat", "dog")
    assert boxes(tmp_path, data_format="yolo")[1] == ("cow", "hen")
    message = r"data_format='zip' is unknown for this task\. Use one of parquet, saved, coco, yolo, voc"
    expect_error(message, load_object_detection, str(tmp_path), data_format="zip")
    expect_error("contains no boxes", load_object_detection, str(tmp_path), data_format="voc")
    # A table of labels has priority over class folders.
    samples.write_pictures(tmp_path / "table", "cat/1.jpg", "dog/2.jpg")
    (tmp_path / "table" / "train.csv").write_text("file,label\ncat/1.jpg,a\ndog/2.jpg,b\n")
    assert classes(tmp_path / "table") == {"train": ["a", "b"]}
    message = "Read: tables 'train.csv'. Ignored: class folders 'cat', 'dog'. To read these instead, set data_format"
    assert message in caplog.text
    assert classes(tmp_path / "table", data_format="class_folders") == {"train": ["cat", "dog"]}


def test_the_multi_label_export_of_roboflow(tmp_path: Path) -> None:
    for split, numbers in (("train", (1, 2, 3)), ("valid", (4, 5)), ("test", (6, 7))):
        samples.write_pictures(tmp_path / split, *(f"{number}_jpg.rf.jpg" for number in numbers))
        rows = [f"{number}_jpg.rf.jpg, {number % 2}, {number // 2 % 2}" for number in numbers]
        (tmp_path / split / "_classes.csv").write_text("\n".join(["filename, cat, dog", *rows]))
    splits = load_image_classification(str(tmp_path), problem_type=None)
    assert list(splits) == ["train", "validation", "test"]
    flags = [{"cat": 1.0, "dog": 0.0}, {"cat": 0.0, "dog": 1.0}, {"cat": 1.0, "dog": 1.0}]
    assert splits["train"]["label_flags"][:] == flags
    expect_error("no column with a usual name", load_image_classification, str(tmp_path))


def test_tables_of_windows_and_tables_named_after_a_split(tmp_path: Path) -> None:
    samples.write_pictures(tmp_path, "0.jpg", "sub/1.jpg")
    (tmp_path / "x.csv").write_text("file_name,label\n.\\0.jpg,a\nsub\\1.jpg,b\n")
    assert classes(tmp_path / "x.csv") == {"train": ["a", "b"]}
    (tmp_path / "x.csv").rename(tmp_path / "my_test_labels.csv")
    assert classes(tmp_path) == {"test": ["a", "b"]}


def test_columns_are_named_in_part_if_there_are_many(tmp_path: Path) -> None:
    samples.write_pictures(tmp_path, "0.jpg")
    names = [f"pixel{number}" for number in range(784)]
    (tmp_path / "train.csv").write_text(",".join(["label", *names]) + "\n" + ",".join(["0"] * 785))
    with pytest.raises(ValueError, match=r"'pixel18', and 765 more") as caught:
        load_image_classification(str(tmp_path))
    assert "pixel19" not in str(caught.value)


# Boxes and masks


def boxes(folder: Path, **options: Any) -> tuple[dict[str, list], tuple[str, ...]]:
    data = load_object_detection(str(folder), **options)
    return {split: [Path(file).name for file in rows["file"]] for split, rows in data.splits.items()}, data.names


def test_annotation_files_of_coco_have_any_name(tmp_path: Path, caplog: Any) -> None:
    write(tmp_path / "a", data__a_dot_jpg=None, labels_dot_json=coco("a.jpg"))
    write(tmp_path / "b", images__a_dot_jpg=None, result_dot_json=coco("images\\a.jpg"))
    for source in (tmp_path / "a", tmp_path / "a" / "labels.json", tmp_path / "b", tmp_path / "b" / "result.json"):
        assert boxes(source) == ({"train": ["a.jpg"]}, ("cat", "dog"))
    assert not caplog.records
    folder = write(
        tmp_path / "cvat",
        annotations__instances_Train_dot_json=coco("a.jpg"),
        annotations__instances_Validation_dot_json=coco("b.jpg"),
        annotations__instances_default_dot_json=coco("c.jpg"),
        images__Train__a_dot_jpg=None,
        images__Validation__b_dot_jpg=None,
    )
    assert boxes(folder)[0] == {"train": ["a.jpg"], "validation": ["b.jpg"]}
    assert "because their names contain no split: 'annotations/instances_default.json'" in caplog.text
    # Only files with the lists of COCO are annotation files.
    write(tmp_path / "b", notes_dot_json={"categories": CATEGORIES, "info": {}})
    assert boxes(tmp_path / "b")[0] == {"train": ["a.jpg"]}
    # A single file without a split in its name contains the training data.
    write(tmp_path / "one", annotations__instances_default_dot_json=coco("c.jpg"), images__default__c_dot_jpg=None)
    assert boxes(tmp_path / "one")[0] == {"train": ["c.jpg"]}


def test_the_group_of_roboflow_is_no_class_of_masks(tmp_path: Path) -> None:
    polygon = {"category_id": 1, "segmentation": [[5, 5, 15, 5, 15, 15, 5, 15]]}
    content = coco("a.jpg", **polygon)
    content["categories"] = [
        {"id": 0, "name": "pets", "supercategory": "none"},
        {"id": 1, "name": "cat", "supercategory": "pets"},
    ]
    write(tmp_path, train__a_dot_jpg=None, train___annotations_dot_coco_dot_json=content)
    data = load_universal_segmentation(str(tmp_path))
    assert (data.names, data.thing_ids) == (("cat",), (0,))
    assert data.examples("train")[0]["masks"].sum() == 100
    content["annotations"][0]["segmentation"] = [[5, 5, 10, 10, 15, 15]]
    write(tmp_path, train___annotations_dot_coco_dot_json=content)
    expect_error("annotation 1 has a polygon without area", load_universal_segmentation, str(tmp_path))


def test_split_lists_of_voc_have_any_alias_and_names_with_spaces(tmp_path: Path, caplog: Any) -> None:
    write(
        tmp_path,
        ImageSets__Main__Train_dot_txt="a b\n",
        ImageSets__Main__Validation_dot_txt="1  1\n",
        ImageSets__Main__cat_Train_dot_txt="a b 1\n",
        ImageSets__Main__others_dot_txt="2\n",
        Annotations__1_dot_xml=VOC,
        JPEGImages__1_dot_png=None,
        labelmap_dot_txt="# label:color_rgb:parts:actions\nbackground:0,0,0::\ndog:0,128,0::\ncat:128,0,0::\n",
    )
    (tmp_path / "Annotations" / "a b.xml").write_text(VOC)
    samples.picture(1, SIZE).save(tmp_path / "JPEGImages" / "a b.png")
    assert boxes(tmp_path) == ({"train": ["a b.png"], "validation": ["1.png"]}, ("dog", "cat"))
    assert "Ignored lists in" in caplog.text
    assert "'others.txt'" in caplog.text
    (tmp_path / "ImageSets" / "Main" / "Train.txt").write_text("c d\n")
    expect_error(r"Annotations/c d\.xml", boxes, tmp_path)


def yolo(folder: Path, names: str, train: str = "images/train", **files: Any) -> Path:
    text = {"labels__train__1_dot_txt": "1 0.5 0.5 0.25 0.2\n", "data_dot_yaml": f"train: {train}\n{names}\n"}
    return write(folder, images__train__1_dot_png=None, **(text | files))


def test_names_in_yaml_are_those_that_are_written(tmp_path: Path) -> None:
    for names, expected in {
        "names: [yes, no]": ("yes", "no"),
        "names: [on, off]": ("on", "off"),
        "names: [1, 010]": ("1", "010"),
        "names: {0: 1.5, 1: null}\nnc: 2": ("1.5", "null"),
        "names:\n  0: cat\n  1: 'dog'": ("cat", "dog"),
    }.items():
        assert boxes(yolo(tmp_path, names))[1] == expected
    message = r"has nc: 3, but 2 names: 'cat', 'dog'\. Correct the number or the names"
    expect_error(message, boxes, yolo(tmp_path, "names: [cat, dog]\nnc: 3"))
    expect_error(r"names='cat,dog'\. Write class names as a list", boxes, yolo(tmp_path, "names: cat,dog"))
    expect_error("which are not all texts", boxes, yolo(tmp_path, "names: [[cat], dog]"))


def test_paths_of_yolo_on_windows_and_of_cvat(tmp_path: Path, caplog: Any) -> None:
    assert boxes(yolo(tmp_path / "a", "names: [cat, dog]", "images\\train"))[0] == {"train": ["1.png"]}
    for line in ("data/images/train/1.png", ".\\images\\train\\1.png", "./images/train/1.png"):
        folder = yolo(tmp_path / "b", "names: [cat, dog]\npath: .", "train.txt", train_dot_txt=f"{line}\n")
        assert boxes(folder)[0] == {"train": ["1.png"]}
    assert not caplog.records
    yolo(tmp_path / "a", "names: [cat, dog]", labels__train__2_dot_txt="0 0.5 0.5 0.25 0.2\n")
    boxes(tmp_path / "a")
    assert "Ignored 1 label files because they have no image of the same name" in caplog.text
    assert "labels/train/2.txt" in caplog.text
    yolo(tmp_path / "a", "names: [cat, dog]\nextra: images/train\npath: .")
    boxes(tmp_path / "a")
    assert "data.yaml because they contain no split: 'extra'" in caplog.text
    # A folder of images without labels is no split.
    write(
        tmp_path / "c",
        train__images__1_dot_png=None,
        train__labels__1_dot_txt="0 0.5 0.5 0.25 0.2",
        test__images__1_dot_png=None,
    )
    (tmp_path / "c" / "classes.txt").write_text("cat")
    assert boxes(tmp_path / "c")[0] == {"train": ["1.png"]}
    assert "because they have no images/ or no labels/: 'test'" in caplog.text


CVAT = '<annotations><version>1.1</version><image name="1.jpg" width="40" height="30"/></annotations>'


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"annotations_dot_xml": CVAT}, r"is CVAT for images 1\.1\. It is not read\. Export COCO 1\.0"),
        ({"obj_dot_data": "train = 1", "obj_dot_names": "cat"}, r"is a YOLO 1\.1 export of CVAT \(darknet\)"),
        ({"a_dot_json": [{"id": 1, "annotations": [], "data": {}}]}, "is a JSON export of Label Studio"),
        ({"a_dot_json": {"shapes": [], "imagePath": "1.jpg"}}, "is a folder of LabelMe"),
        ({"a_dot_json": {"_via_settings": {}}}, "is a project of VIA"),
        ({"annotations__a_dot_json": {"dm_format_version": "1.0", "categories": []}}, "is a dataset of Datumaro"),
        ({"a_dot_json": {"other": 1}}, "contains no boxes in a known format"),
    ],
)
def test_exports_that_are_not_read_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    write(tmp_path, images__1_dot_jpg=None, **files)
    expect_error(message, load_object_detection, str(tmp_path))
    write(tmp_path, images__annotations_dot_jpg=None)
    expect_error(message, load_object_detection, str(tmp_path))


def mask_folder(folder: Path, pixels: np.ndarray, name: str = "1.png", **files: str) -> Path:
    samples.write_pictures(folder, "train/images/1.jpg")
    samples.write_image(folder / "train" / "masks" / name, pixels)
    return write(folder, **files)


def test_lists_of_classes_are_read_without_comments(tmp_path: Path) -> None:
    labels = np.zeros(samples.SHAPE, np.uint8)
    folder = mask_folder(tmp_path, labels, classes_dot_txt="# classes\nbg\n\ncat\n")
    assert load_semantic_segmentation(str(folder)).names == ("bg", "cat")
    write(folder, classes_dot_txt="bg,cat")
    message = r"classes\.txt has a single line with commas, 'bg,cat'\. Write one class name per line"
    expect_error(message, load_semantic_segmentation, str(folder))


@pytest.mark.parametrize("lists", ["palette_dot_txt", "labelmap_dot_txt"])
@pytest.mark.parametrize("names", [{}, {"classes_dot_txt": "background\ncat\n"}])
def test_the_palette_of_cvat_is_read(tmp_path: Path, lists: str, names: dict[str, str]) -> None:
    labels = np.random.default_rng(0).integers(0, 2, samples.SHAPE)
    colors = np.array([[0, 0, 0], [250, 50, 83]], np.uint8)
    palette = "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncat:250,50,83::\n"
    data = load_semantic_segmentation(str(mask_folder(tmp_path, colors[labels], **{lists: palette}, **names)))
    assert data.names == ("background", "cat")
    assert data.examples("train")[0]["segmentation_map"].tolist() == labels.tolist()


def test_a_palette_without_colors_is_refused(tmp_path: Path) -> None:
    folder = mask_folder(tmp_path, np.zeros((*samples.SHAPE, 3), np.uint8), palette_dot_txt="background\ncat\n")
    expect_error(r"palette\.txt has no line like 'name 255 0 128'", load_semantic_segmentation, str(folder))


def test_masks_may_have_the_full_name_of_their_image(tmp_path: Path) -> None:
    labels = samples.class_map(0)
    data = load_semantic_segmentation(str(mask_folder(tmp_path, labels, "1.jpg.png")), class_names=["a", "b", "c"])
    assert data.examples("train")[0]["segmentation_map"].tolist() == labels.tolist()
    samples.write_image(tmp_path / "train" / "masks" / "1.png", labels)
    expect_error(r"1\.jpg\.png: no image in", load_semantic_segmentation, str(tmp_path), class_names=["a", "b", "c"])


def write_pair(folder: Path, image: str, mask: str, values: np.ndarray) -> None:
    samples.write_pictures(folder, image)
    samples.write_image(folder / mask, values)


def semantic(folder: Path, split: str = "train", **options: Any) -> tuple[tuple[str, ...], list[list]]:
    data = load_semantic_segmentation(str(folder), **options)
    examples = data.examples(split)
    return data.names, [examples[index]["segmentation_map"].tolist() for index in range(len(examples))]


def test_cityscapes_is_read_as_published(tmp_path: Path, caplog: Any) -> None:
    ids = np.array([[7, 8, 0], [33, 255, 26]], np.uint8).repeat(3, 0).repeat(3, 1)[:6, :8]
    expected = np.array([[0, 1, 255], [18, 255, 13]]).repeat(3, 0).repeat(3, 1)[:6, :8].tolist()
    for split, city in (("train", "aachen"), ("val", "ulm")):
        name = f"{split}/{city}/{city}_000000"
        write_pair(tmp_path, f"leftImg8bit/{name}_leftImg8bit.png", f"gtFine/{name}_gtFine_labelIds.png", ids)
        samples.write_masks(tmp_path, f"gtFine/{name}_gtFine_instanceIds.png")
    names, maps = semantic(tmp_path)
    assert (len(names), names[13], maps) == (19, "car", [expected])
    assert semantic(tmp_path, "validation")[1] == [expected]
    assert not caplog.records
    samples.write_pictures(tmp_path, "leftImg8bit/train/ulm/ulm_1_leftImg8bit.png")
    assert len(semantic(tmp_path)[1]) == 1
    assert "Ignored 1 images in" in caplog.text
    samples.write_masks(tmp_path, "gtFine/train/ulm/ulm_2_gtFine_labelIds.png")
    expect_error(r"1 mask files have no image:\n.*ulm_2", semantic, tmp_path)


def test_masks_of_voc_camvid_and_mmsegmentation_are_read_as_published(tmp_path: Path) -> None:
    labels, voc = samples.class_map(0), tmp_path / "voc"
    for name in ("2007_000032", "2007_000033"):
        write_pair(voc, f"JPEGImages/{name}.jpg", f"SegmentationClass/{name}.png", labels)
    write(
        voc, ImageSets__Segmentation__train_dot_txt="2007_000032", ImageSets__Segmentation__val_dot_txt="2007_000033"
    )
    write(voc, ImageSets__Segmentation__trainval_dot_txt="2007_000032\n2007_000033\n")
    names, maps = semantic(voc)
    assert (len(names), names[15], maps) == (21, "person", [labels.tolist()])
    assert len(semantic(voc, "validation")[1]) == 1
    assert semantic(voc, class_names=["a", "b", "c"])[0] == ("a", "b", "c")
    write_pair(tmp_path / "camvid", "train/0001TP_1.png", "trainannot/0001TP_1.png", labels)
    write_pair(tmp_path / "camvid", "val/0016E5_1.png", "valannot/0016E5_1.png", labels)
    assert semantic(tmp_path / "camvid", "validation") == (semantic(tmp_path / "camvid")[0], [labels.tolist()])
    assert semantic(tmp_path / "camvid")[0][3] == "road"
    write_pair(tmp_path / "mm", "img_dir/train/1.jpg", "ann_dir/train/1.png", labels)
    assert semantic(tmp_path / "mm", class_names=["a", "b", "c"])[1] == [labels.tolist()]
    expect_error("The names of the classes are unknown", semantic, tmp_path / "mm")
    colors = np.array([[0, 0, 0], [250, 50, 83]], np.uint8)
    write_pair(tmp_path / "cvat", "JPEGImages/1.png", "SegmentationClass/1.png", colors[labels % 2])
    palette = "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncat:250,50,83::\n"
    write(tmp_path / "cvat", labelmap_dot_txt=palette, ImageSets__Segmentation__Test_dot_txt="1\n")
    assert semantic(tmp_path / "cvat", "test") == (("background", "cat"), [(labels % 2).tolist()])


def test_splits_of_parallel_folders_are_those_of_both_sides(tmp_path: Path, caplog: Any) -> None:
    for split in ("train2017", "Validation", "extra"):
        samples.write_pictures(tmp_path, f"images/{split}/1.jpg")
        samples.write_masks(tmp_path, f"masks/{split}/1.png")
    (tmp_path / "val.txt").write_text("1\n")
    data = load_semantic_segmentation(str(tmp_path), class_names=["a", "b", "c"])
    assert list(data.splits) == ["train", "validation"]
    assert "because they are not named like a split: 'extra'" in caplog.text
    assert "this format has no lists of splits, only folders of splits: 'val.txt'" in caplog.text
    expect_error("needs folders of images and depths", load_depth_estimation, str(tmp_path))


def test_further_pages_of_an_image_are_reported(tmp_path: Path, caplog: Any) -> None:
    samples.write_pictures(tmp_path, "a/1.tif", "b/2.png")
    pages = [samples.picture(number) for number in range(3)]
    pages[0].save(tmp_path / "a" / "3.tif", save_all=True, append_images=pages[1:])
    train = load_image_classification(str(tmp_path))["train"]
    assert unreadable_images(train, show_progress=False) == {}
    assert "1 of 3 images have further pages, which are ignored:\n" in caplog.text
    assert "3.tif: 3 pages" in caplog.text


def test_an_image_that_is_turned_has_no_pages(tmp_path: Path, caplog: Any) -> None:
    turned = PILImage.Exif()
    turned[0x0112] = 6
    folder = mask_folder(tmp_path, np.zeros(samples.SHAPE, np.uint8), classes_dot_txt="a\nb")
    samples.picture(0).save(folder / "train" / "images" / "1.jpg", exif=turned)
    assert check_dense(load_semantic_segmentation(str(folder)).examples("train"), show_progress=False) == {}
    assert "pages" not in caplog.text


def test_a_trainer_keeps_the_columns_of_images(tmp_path: Path) -> None:
    config = HfViTConfig.from_preset("mnist", **DIGITS_CONFIG)
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to="none", save_strategy="no")
    trainer = HfViTTrainer(
        model=HfViTForImageClassification(config),
        args=args,
        train_dataset=samples.load_digits()["train"].select(range(8)),
        data_collator=ImageClassificationCollator(HfViTImageProcessor.for_model(config)),
    )
    assert trainer.train().global_step == 1
