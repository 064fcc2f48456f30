"""Test loading object detection datasets from all sources, and errors for invalid datasets."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from PIL import Image as PILImage

from hf_vit.data import load_object_detection
from hf_vit.data.datasets import TargetData
from hf_vit.data.targets import target_of, without_crowds

from ..helpers import object_files as scenes
from ..helpers.datasets import encoded, picture, write_image
from .errors import expect_error
from .mac import pack_on_a_mac


SPLITS = {"train": "train", "val": "validation"}
VALID = {"train": "train", "val": "valid"}


def load(source: Path, **options: Any) -> TargetData:
    return load_object_detection(str(source), **options)


def check_scenes(data: TargetData, splits: tuple[str, ...] = ("train", "val")) -> None:
    """Assert that the loaded data equals `SCENES`."""
    assert (list(data.splits), data.names) == ([SPLITS[split] for split in splits], scenes.NAMES)
    for split in splits:
        examples = data.examples(SPLITS[split])
        assert len(examples) == len(scenes.SCENES[split])
        for index, (_, size, objects) in enumerate(scenes.SCENES[split]):
            example = examples[index]
            boxes = torch.tensor([box for _, box in objects]).reshape(-1, 4).float()
            sides = boxes[:, 2:] - boxes[:, :2]
            assert example["image"].size == size
            torch.testing.assert_close(example["boxes"], boxes, rtol=0, atol=1e-5)
            torch.testing.assert_close(example["areas"], sides.prod(dim=1), rtol=1e-5, atol=0)
            assert example["class_labels"].tolist() == [scenes.NAMES.index(name) for name, _ in objects]
            assert (example["class_labels"].dtype, example["is_crowd"].dtype) == (torch.int64, torch.bool)
            assert example["is_crowd"].tolist() == [False] * len(objects)


def coco_2017(folder: Path) -> None:
    for split in scenes.SCENES:
        scenes.write_scenes(folder, {split: f"{split}2017"})
        scenes.write_json(folder / "annotations" / f"instances_{split}2017.json", scenes.coco_content(split))
        scenes.write_json(folder / "annotations" / f"captions_{split}2017.json", {"annotations": []})


def coco_plain_names(folder: Path) -> None:
    for split in scenes.SCENES:
        scenes.write_scenes(folder, {split: f"images/{split}"})
        scenes.write_json(folder / "annotations" / f"{split}.json", scenes.coco_content(split))


def coco_of_roboflow(folder: Path, *others: dict[str, Any]) -> None:
    """Write COCO files in which, as in files of Roboflow, the first category is an unused supercategory."""
    heading = {"id": 0, "name": "pet", "supercategory": "none"}
    for split, place in VALID.items():
        scenes.write_scenes(folder, {split: place})
        content = {**scenes.coco_content(split), "categories": [heading, *scenes.CATEGORIES, *others]}
        scenes.write_json(folder / place / "_annotations.coco.json", content)


def voc_of_voc(folder: Path) -> None:
    year = folder / "VOCdevkit" / "VOC2007"
    for split in scenes.SCENES:
        scenes.write_scenes(year, {split: "JPEGImages"})
        scenes.write_voc_beside(year, {split: "Annotations"})
        (year / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
        stems = [f"{scene[0]}  1" for scene in scenes.SCENES[split]]
        (year / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(stems))
        (year / "ImageSets" / "Main" / f"dog_{split}.txt").write_text("a -1")


def voc_beside_images(folder: Path) -> None:
    scenes.write_scenes(folder, VALID)
    scenes.write_voc_beside(folder, VALID)


def voc_with_parts(folder: Path) -> None:
    voc_beside_images(folder)  # parts of objects are not loaded as objects
    part = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
    (folder / "train" / "c.xml").write_text(scenes.voc_xml(scenes.SCENES["train"][2], part))


def voc_in_folders(folder: Path) -> None:
    scenes.write_scenes(folder, {split: f"{split}/images" for split in scenes.SCENES})
    scenes.write_voc_beside(folder, {split: f"{split}/annotations" for split in scenes.SCENES})


def write_yolo(folder: Path, places: dict[str, str], file: str, text: str) -> None:
    """Write YOLO images and labels, and a dataset file with the given text. `places` maps each split to its path."""
    scenes.write_scenes(folder, {split: place.format("images") for split, place in places.items()})
    scenes.write_yolo_labels(folder, {split: place.format("labels") for split, place in places.items()})
    (folder / file).write_text(text)


def yolo_with_yaml(folder: Path) -> None:
    text = "path: ../datasets/pets\ntrain: images/train\nval: images/val\nnames: {0: cat, 1: dog}"
    write_yolo(folder, {"train": "{}/train", "val": "{}/val"}, "data.yaml", text)


def yolo_of_roboflow(folder: Path) -> None:
    text = "train: ../train/images\nval: ../valid/images\nnc: 2\nnames: ['cat', 'dog']"
    write_yolo(folder, {"train": "train/{}", "val": "valid/{}"}, "data.yaml", text)


def yolo_of_lists(folder: Path) -> None:
    text = "train: train.txt\nval: val.txt\nnames: [cat, dog]"
    write_yolo(folder, {"train": "{}", "val": "{}"}, "pets.yaml", text)
    for split in scenes.SCENES:
        (folder / f"{split}.txt").write_text("".join(f"./images/{scene[0]}.png\n" for scene in scenes.SCENES[split]))


def yolo_without_yaml(folder: Path) -> None:
    write_yolo(folder, {"train": "train/{}", "val": "val/{}"}, "classes.txt", "cat\ndog\n")


def yolo_of_polygons(folder: Path) -> None:
    yolo_with_yaml(folder)  # polygons in label files are converted to bounding boxes
    (folder / "labels" / "train" / "c.txt").write_text("0 0 0 1 0 0.5 0.5 0.25 0.25\n\n")


@pytest.mark.parametrize(
    "write",
    [
        scenes.write_coco_boxes, coco_2017, coco_plain_names, coco_of_roboflow, voc_of_voc, voc_beside_images,
        voc_in_folders, voc_with_parts, yolo_with_yaml, yolo_of_roboflow, yolo_of_lists, yolo_of_polygons,
        yolo_without_yaml
    ],
)  # fmt: skip
def test_every_layout_gives_the_same_targets(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path)
    data = load(tmp_path)
    check_scenes(data)
    assert Path(data.splits["train"]["file"][0]).is_absolute()
    pack_on_a_mac(tmp_path)
    check_scenes(load(tmp_path))


def as_structs(labels: Any, convert: Callable[..., list], names: Callable[[str], Any]) -> Callable[[str], Dataset]:
    """Return a function that creates the table of a split. The objects of each image are a list of structs."""
    kind = List({"bbox": List(Value("float32"), length=4), "category": labels})

    def table(split: str) -> Dataset:
        objects = []
        for _, size, found in scenes.SCENES[split]:
            objects.append([{"bbox": convert(box, size), "category": names(name)} for name, box in found])
        return scenes.boxes_table(split, kind, objects)

    return table


def coco_box(box: tuple[float, ...], size: tuple[int, int]) -> list[float]:
    return [*box[:2], box[2] - box[0], box[3] - box[1]]


def voc_box(box: tuple[float, ...], size: tuple[int, int]) -> list[float]:
    return list(box)


def yolo_box(box: tuple[float, ...], size: tuple[int, int]) -> list[float]:
    x1, y1, x2, y2 = box
    return [(x1 + x2) / 2 / size[0], (y1 + y2) / 2 / size[1], (x2 - x1) / size[0], (y2 - y1) / size[1]]


def write_tables(folder: Path, table: Callable[[str], Dataset]) -> Path:
    for split in scenes.SCENES:
        table(split).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


CLASSES = ClassLabel(names=list(scenes.NAMES))
STRUCTS = as_structs(CLASSES, coco_box, scenes.NAMES.index)


def struct_of_lists(split: str) -> Dataset:
    table = STRUCTS(split)
    columns = [{key: [entry[key] for entry in row] for key in ("bbox", "category")} for row in table["objects"]]
    return scenes.boxes_table(split, {"bbox": List(List(Value("float64"))), "category": List(CLASSES)}, columns)


def plain_columns(split: str) -> Dataset:
    return struct_of_lists(split).flatten().rename_columns({"objects.bbox": "bbox", "objects.category": "label"})


@pytest.mark.parametrize("table", [STRUCTS, struct_of_lists, plain_columns])
def test_columns_of_objects_are_read_in_all_their_forms(tmp_path: Path, table: Callable[[str], Dataset]) -> None:
    check_scenes(load(write_tables(tmp_path / "parquet", table)))
    DatasetDict({split: table(split) for split in scenes.SCENES}).save_to_disk(tmp_path / "saved")
    data = load(tmp_path / "saved")
    check_scenes(data)
    assert data.splits["train"]["file"][1] == "image 1 of train"


def test_classes_that_are_words_or_numbers_are_named(tmp_path: Path) -> None:
    check_scenes(load(write_tables(tmp_path / "words", as_structs(Value("string"), coco_box, str))))
    numbers = write_tables(tmp_path / "numbers", as_structs(Value("int64"), coco_box, scenes.NAMES.index))
    expect_error(r"classes are numbers.*as class_names, or in a file classes\.txt", load, numbers)
    check_scenes(load(numbers, class_names=scenes.NAMES))
    (numbers / "id2label.json").write_text('{"0": "cat", "1": "dog"}')
    check_scenes(load(numbers))
    message = r"1 of 3 objects of train have unknown classes; .* must be in \[0, 1\):\n  object 1"
    expect_error(message, load, numbers, class_names=["cat"])


def test_area_and_crowds_are_taken_from_columns_and_from_coco(tmp_path: Path) -> None:
    kind = {name: List(Value(of)) for name, of in (("area", "float32"), ("iscrowd", "bool"), ("category", "string"))}
    objects = {"bbox": [[0, 0, 9, 9], [20, 20, 5, 5]], "category": ["a"] * 2, "area": [7, 0], "iscrowd": [True, False]}
    features = Features({"image": Image(), "objects": {"bbox": List(List(Value("int64"))), **kind}})
    rows = Dataset.from_dict({"image": [encoded(picture(0, (32, 32)))], "objects": [objects]}, features)
    rows.to_parquet(tmp_path / "a.parquet")
    example = load(tmp_path, bbox_format="coco").examples("train")[0]
    assert (example["areas"].tolist(), example["is_crowd"].tolist()) == ([7, 25], [True, False])
    content = scenes.coco_content("train")
    content["annotations"][0] |= {"area": 50.5, "iscrowd": 1, "image_id": 0}
    scenes.write_coco_boxes(tmp_path / "coco", annotations=content["annotations"])
    example = load(tmp_path / "coco").examples("train")[0]
    assert sorted(example["areas"].tolist()) == [50.5, 200, 300]
    assert example["is_crowd"].sum() == 1
    learned = without_crowds(example)
    assert {len(learned[name]) for name in ("boxes", "class_labels", "areas")} == {2}
    assert 50.5 not in learned["areas"].tolist()
    assert set(target_of(example)) == {"boxes", "class_labels", "is_crowd", "areas", "size"}


@pytest.mark.parametrize(("convert", "name"), [(voc_box, "voc"), (yolo_box, "yolo")])
def test_boxes_in_another_format_are_refused_until_it_is_named(tmp_path: Path, convert: Any, name: str) -> None:
    source = write_tables(tmp_path, as_structs(CLASSES, convert, scenes.NAMES.index))
    expect_error(rf"The format of boxes is ambiguous.* 4 of 4 as '{name}'.*Set bbox_format", load, source)
    check_scenes(load(source, bbox_format=name))
    expect_error("bbox_format='xyxy' is unknown", load, source, bbox_format="xyxy")


def test_columns_that_make_no_objects_are_named(tmp_path: Path) -> None:
    source = write_tables(tmp_path, lambda split: plain_columns(split).rename_columns({"bbox": "rectangle"}))
    expect_error(r"no column with a usual name \(objects.*Set objects_column_name", load, source)
    source = write_tables(tmp_path, lambda split: plain_columns(split).rename_columns({"label": "sort"}))
    expect_error(r"objects of 'train' have no label\. Their fields are 'bbox', 'sort'", load, source)


def test_pixels_of_voc_are_counted_from_one_and_sizes_may_be_those_of_upright_images(tmp_path: Path) -> None:
    content = scenes.coco_content("train")
    for image in content["images"]:
        del image["width"], image["height"]
    scenes.write_coco_boxes(tmp_path, images=content["images"])
    turned = PILImage.Exif()
    turned[0x0112] = 6
    picture(0, (30, 40)).save(tmp_path / "train" / "images" / "a.png", exif=turned)
    check_scenes(load(tmp_path))
    scenes.write_scenes(tmp_path / "voc", {"train": "train"})
    for stem, size, objects in scenes.SCENES["train"]:
        shifted = [(name, (x1 + 1, y1 + 1, x2, y2)) for name, (x1, y1, x2, y2) in objects]
        source = "<source><database>The VOC2007 Database</database><annotation>PASCAL VOC2007</annotation></source>"
        text = scenes.voc_xml((stem, size, shifted)).replace("<size>", f"{source}<size>")
        (tmp_path / "voc" / "train" / f"{stem}.xml").write_text(text)
    check_scenes(load(tmp_path / "voc"), ("train",))


def test_classes_and_images_of_voc_are_those_of_its_files(tmp_path: Path, caplog) -> None:
    voc_beside_images(tmp_path)
    (tmp_path / "train" / "b.xml").unlink()
    assert len(load(tmp_path).splits["train"]) == 2
    assert "Ignored 1 images without an XML file" in caplog.text
    (tmp_path / "train" / "c.png").unlink()
    expect_error(r"1 of 2 XML files do not have exactly one image.*\n  .*c\.xml: none", load, tmp_path)
    # The order of given class names sets the class numbers.
    voc_beside_images(tmp_path / "given")
    example = load(tmp_path / "given", class_names=["dog", "cow", "cat"]).examples("train")[0]
    assert example["class_labels"].tolist() == [0, 2]
    message = "The split 'train' has classes that are not in 'class_names': 'cat'"
    expect_error(message, load, tmp_path / "given", class_names=["dog"])


UNKNOWN = r"1 of 4 objects of .* have unknown classes; class numbers must be in \[0, 2\):\n  line 2 of .*: class 2"


def test_bad_lines_and_descriptions_of_yolo_are_named(tmp_path: Path) -> None:
    for line, message in (
        ("0 0.5 0.5 0.5", r"1 lines are neither .class x_ce.*\n  line 2 of .*labels/train/c\.txt: '0 0\.5 0\.5 0\.5'"),
        ("0 0.5 0.5 0.5 0.5 0.9", r"1 lines are neither .class"),
        ("cat 0.5 0.5 0.5 0.5", r"1 lines are neither .class"),
        ("0.5 0.5 0.5 0.5 0.5", r"1 lines are neither .class"),
        ("0 0.5 0.5 nan 0.5", r"1 lines are neither .class"),
        ("2 0.5 0.5 0.5 0.5", UNKNOWN),
        (
            "0 0.5 0.5 1.5 0.5",
            r"1 of 5 boxes have no area or exceed their im.*\n  line 2 of .*x -6\.0 to 30\.0 of 24",
        ),
    ):
        yolo_with_yaml(tmp_path)
        with (tmp_path / "labels" / "train" / "c.txt").open("a") as file:
            file.write(line)
        expect_error(message, load, tmp_path)
    yolo_with_yaml(tmp_path)
    numbers = "Write class names as a list, or number"
    for text, message in {
        "train: nowhere\nnames: [cat, dog]": "'nowhere' of .*data.yaml was not found in:",
        "train: images/train\nnames: {1: cat, 2: dog}": f"names={{1: 'cat', 2: 'dog'}}. {numbers}",
        "train: images/train\nnames: [cat]\nkpt_shape: [17, 3]": r"contains keypoints \(kpt_shape\), .* Convert them",
        "train: images/train\nnames: [cat": "is not valid YAML",
    }.items():
        (tmp_path / "data.yaml").write_text(text)
        expect_error(message, load, tmp_path)


def with_annotation(folder: Path, **changes: Any) -> Path:
    """Write the scenes as COCO files. `changes` replaces fields of the first training annotation."""
    annotations = scenes.coco_content("train")["annotations"]
    return scenes.write_coco_boxes(folder, annotations=[{**annotations[0], **changes}, *annotations[1:]])


def test_bad_annotations_of_coco_are_named(tmp_path: Path) -> None:
    for changes, message in (
        ({"bbox": [0, 0, 26, 12]}, r"1 of 4 boxes have no area or e.*\n  annotation 3 of .*x 0\.0 to 26\.0 of 24"),
        ({"bbox": [-2, 0, 12, 12]}, r"annotation 3 of .*json: x -2\.0 to 10\.0 of 24, y 0\.0 to 12\.0 of 24"),
        ({"bbox": [3, 3, 5, 0]}, r"1 of 4 boxes have no area.*\n.*Repair them, or set box_errors to 'clip'"),
        ({"bbox": [3, 3, -2, 5]}, "1 of 4 boxes have no area"),
        ({"bbox": [0, math.nan, 5, 5]}, "1 boxes are not finite:\n  annotation 3"),
        ({"bbox": [0, 1, 5]}, r"1 of 3 annotations have no bbox of 4 numbers:\n  annotation 3 of .*: \[0, 1, 5\]"),
        ({"bbox": None}, "annotations have no bbox of 4 numbers:\n  annotation 3 .*: None"),
        ({"category_id": 8}, "has annotations of categories that the file does not define: 8"),
        ({"image_id": 7}, "has annotations of images that the file does not define: 7"),
        ({"id": 1}, "1 ids of annotations in .* occur more than once:\n  id 1: 2 times"),
    ):
        expect_error(f"(?s){message}", load, with_annotation(tmp_path, **changes))
    annotation = scenes.coco_content("train")["annotations"][0]
    many = [{**annotation, "id": number, "bbox": [0, 0, 5, 5 * (number >= 12)]} for number in range(40)]
    with pytest.raises(ValueError, match=r"(?s)12 of 41 boxes .*annotation 9 of .*\n  and 2 more\nRepair") as raised:
        load(scenes.write_coco_boxes(tmp_path, annotations=many))
    assert str(raised.value).count("annotation ") == 10


def test_images_of_coco_must_exist_and_have_the_size_that_annotations_say(tmp_path: Path) -> None:
    scenes.write_coco_boxes(tmp_path)
    file = tmp_path / "train" / "images" / "a.png"
    file.write_bytes(b"no image")
    assert len(load(tmp_path).splits["train"]) == 3  # images are decoded on access
    with pytest.raises(OSError, match=r"a\.png is not an image"):
        load(tmp_path).examples("train")[0]
    write_image(file, picture(0, (30, 40)))
    with pytest.raises(ValueError, match=r"a\.png is 30 pixels wide and 40 high, .* width of 40 and a height of 30"):
        load(tmp_path).examples("train")[0]
    images = scenes.coco_content("train")["images"]
    scenes.write_coco_boxes(tmp_path, images=[*images, images[0]])
    expect_error(r"1 ids of images in .* occur more than once:\n  id 0: 2 times", load, tmp_path)
    scenes.write_coco_boxes(tmp_path)
    for name in "ab":
        (tmp_path / "train" / "images" / f"{name}.png").unlink()
    expect_error(r"(?s)2 of 3 files of .* do not exist:\n.*a\.png\n.*b\.png", load, tmp_path)


def test_boxes_are_clipped_or_dropped_where_that_is_asked(tmp_path: Path, caplog) -> None:
    first = scenes.coco_content("train")["annotations"][0]
    boxes = [[-4, 6, 10, 30], [4, 4, 0, 9], [30, 2, 5, 5], [1, 2, 3, 4]]
    many = [{**first, "id": number, "bbox": box} for number, box in enumerate(boxes)]
    many[0] |= {"area": 300}
    source = scenes.write_coco_boxes(tmp_path, annotations=many)
    example = load(source, box_errors="clip").examples("train")[2]
    assert example["boxes"].tolist() == [[0, 6, 6, 24], [1, 2, 4, 6]]
    assert example["areas"].tolist() == [108, 12]
    assert "3 boxes have no area or exceed their image: 1 were clipped to the image, 2 were removed" in caplog.text
    assert load(source, box_errors="drop").examples("train")[2]["boxes"].tolist() == [[1, 2, 4, 6]]
    assert "0 were clipped to the image, 3 were removed" in caplog.text
    expect_error("box_errors='fix' is unknown", load, source, box_errors="fix")
    # A box that exceeds the image by a rounding error is clipped without a warning.
    caplog.clear()
    example = load(with_annotation(tmp_path, bbox=[-0.5, 0, 25, 12])).examples("train")[2]
    assert example["boxes"].tolist() == [[0, 0, 24, 12]]
    assert not caplog.records


@pytest.mark.parametrize("scale", [0.01, 3])
def test_boxes_in_another_unit_are_neither_clipped_nor_dropped(tmp_path: Path, scale: float) -> None:
    annotation = scenes.coco_content("train")["annotations"][0]
    boxes = [[scale * value for value in (6, 6, 12, 12)]] * 12
    many = [{**annotation, "id": number, "bbox": box} for number, box in enumerate(boxes)]
    source = scenes.write_coco_boxes(tmp_path, annotations=many)
    for choice in ("raise", "clip", "drop"):
        with pytest.raises(ValueError, match=r"boxes seem to have another format: of 13 boxes.* as they were read:"):
            load(source, box_errors=choice)


def test_splits_without_boxes_are_left_out_but_not_train(tmp_path: Path, caplog) -> None:
    scenes.write_coco_boxes(tmp_path)
    scenes.write_json(tmp_path / "val" / "annotations.json", {**scenes.coco_content("val"), "annotations": []})
    assert list(load(tmp_path).splits) == ["train"]
    assert "because they have no box: 'val" in caplog.text
    expect_error("has no box in 'train'", load, scenes.write_coco_boxes(tmp_path, annotations=[]))


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    scenes.write_coco_boxes(tmp_path)
    for options, message in (
        ({"class_names": scenes.NAMES}, "already contains class names. Remove class_names='cat', 'dog'"),
        ({"bbox_format": "voc"}, "bbox_format='voc' applies to dataset columns"),
        ({"dataset_revision": "v1"}, "dataset_revision='v1' applies to datasets on the Hub"),
    ):
        expect_error(message, load, tmp_path, **options)
    expect_error(r"contains no boxes in a known format: COCO", load, tmp_path / "train" / "images")
    expect_error("There is no file or folder", load, tmp_path / "elsewhere", error=FileNotFoundError)


def test_unused_headings_are_no_classes_but_unused_classes_are(tmp_path: Path) -> None:
    coco_of_roboflow(tmp_path, {"id": 11, "name": "cow", "supercategory": "pet"})
    assert load(tmp_path).names == ("cat", "dog", "cow")
