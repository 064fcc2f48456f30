"""Test loading keypoint detection datasets from all sources, and errors for invalid datasets."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, List, Value

from hf_vit.data import hold_out, load_keypoint_detection
from hf_vit.data.datasets import KeypointData
from hf_vit.data.reading.keypoints import COCO_SIGMAS, flip_pairs_of
from hf_vit.data.targets import target_of

from ..helpers.datasets import encoded, picture, write_image
from ..helpers.object_files import write_json
from .errors import expect_error


NAMES = ("nose", "left_ear", "right_ear")
CATEGORY = {"id": 5, "name": "pet", "keypoints": list(NAMES), "skeleton": [[1, 2], [1, 3]]}
WIDTH, HEIGHT = SIZE = (40, 30)
# COCO annotations. The first image has two labeled objects and an unlabeled one; the second image has one object.
FIRST = [12, 8, 2, 20, 6, 1, 0, 0, 0]
SECOND = [1, 2, 2, 3, 4, 2, 39, 29, 2]
THIRD = [0, 0, 2, 5, 5.5, 2, 7, 7, 2]
ANNOTATIONS = [
    {"id": 1, "image_id": 3, "category_id": 5, "bbox": [10, 5, 15, 10], "area": 99, "keypoints": FIRST, "iscrowd": 0},
    {"id": 2, "image_id": 4, "category_id": 5, "bbox": [0, 0, 10, 10], "area": 0, "keypoints": THIRD},
    {"id": 3, "image_id": 3, "category_id": 5, "bbox": [0, 0, 40, 30], "keypoints": [7, 7, 0] * 3, "num_keypoints": 0},
    {"id": 4, "image_id": 3, "category_id": 5, "bbox": [0, 2, 40, 28], "keypoints": SECOND},
]


def load(source: Path, **options: Any) -> KeypointData:
    return load_keypoint_detection(str(source), **options)


def write_coco(
    folder: Path, file: str = "train/annotations.json", images: str = "train/images", **changes: Any
) -> Path:
    """Write two images and a COCO file of their objects. `changes` replaces lists in the COCO file."""
    for number, name in ((3, "a.png"), (4, "b.png")):
        write_image(folder / images / name, picture(number, SIZE))
    entries = [
        {"id": i, "file_name": name, "width": WIDTH, "height": HEIGHT} for i, name in ((4, "b.png"), (3, "a.png"))
    ]
    categories = [CATEGORY, {"id": 6, "name": "toy"}]
    write_json(folder / file, {"images": entries, "annotations": ANNOTATIONS, "categories": categories, **changes})
    return folder


def with_annotation(folder: Path, **changes: Any) -> Path:
    return write_coco(folder, annotations=[{**ANNOTATIONS[0], **changes}, *ANNOTATIONS[1:]])


def table(data: KeypointData, split: str = "train") -> list[tuple[str, list, list, float]]:
    """Return the file name, keypoints, box and area of every example."""
    examples = data.examples(split)
    found = [examples[index] for index in range(len(examples))]
    return [(Path(e["file"]).name, e["keypoints"].tolist(), e["box"].tolist(), e["area"].item()) for e in found]


def triples(values: list[float]) -> list[list[float]]:
    return np.reshape(values, (-1, 3)).tolist()


@pytest.mark.parametrize("is_official", [False, True])
def test_objects_of_coco_with_a_labeled_keypoint_are_one_example_each(tmp_path, caplog, is_official) -> None:
    places = ("annotations/person_keypoints_val2017.json", "val2017") if is_official else ()
    data, split = load(write_coco(tmp_path, *places)), "validation" if is_official else "train"
    assert (list(data.splits), data.names) == ([split], NAMES)
    assert (data.flip_pairs, data.skeleton, data.oks_sigmas) == (((1, 2),), ((0, 1), (0, 2)), None)
    assert table(data, split) == [
        ("b.png", triples(THIRD), [0, 0, 10, 10], 100),
        ("a.png", triples(FIRST), [10, 5, 25, 15], 99),
        ("a.png", triples(SECOND), [0, 2, 40, 30], 1120),
    ]
    assert "Removed 1 of 4 objects because they have no labeled keypoint" in caplog.text
    example = data.examples(split)[1]
    assert example["keypoints"].dtype == example["box"].dtype == torch.float32
    assert example["image"].size == SIZE
    assert set(target_of(example)) == {"keypoints", "box", "area", "image_id"}
    numbers = [example["image_id"] for example in data.examples(split).read_targets()]
    assert numbers[0] != numbers[1] == numbers[2]


def test_boxes_may_be_whole_images_and_annotations_without_keypoints_are_left_out(tmp_path: Path, caplog) -> None:
    source = with_annotation(tmp_path, bbox=[0, 0, 400, 1])
    whole = [0, 0, 40, 30]
    found = [(box, area) for _, _, box, area in table(load(source, whole_image=True))]
    assert found == [(whole, 100), (whole, 99), (whole, 1120)]
    source = write_coco(tmp_path, annotations=[{**ANNOTATIONS[0], "bbox": 0, "area": 0}])
    expect_error("have no bbox of 4 numbers", load, source)
    bare = {key: value for key, value in ANNOTATIONS[0].items() if key not in ("bbox", "area")}
    assert table(load(write_coco(tmp_path, annotations=[bare])))[0][2:] == (whole, 1200)
    crowd = {"id": 8, "image_id": 3, "category_id": 5, "bbox": [0, 0, 40, 30], "iscrowd": 1}
    toy = {"id": 9, "image_id": 3, "category_id": 6, "bbox": [0, 0, 40, 30]}
    assert len(load(write_coco(tmp_path, annotations=[*ANNOTATIONS, crowd, toy])).splits["train"]) == 3
    assert "1 annotations of categories without keypoints" in caplog.text
    assert "2 of 5 objects because they have no labeled keypoint" in caplog.text


def test_bad_annotations_are_named(tmp_path: Path) -> None:
    for changes, message in (
        ({"keypoints": FIRST[:6]}, r"1 of 4 annotations have no keypoints of 9 numbers:\n  annotation 1 of .*: \[12"),
        ({"keypoints": [*FIRST, 1, 2, 2]}, "annotation 1 of .*: 12 numbers"),
        ({"keypoints": [math.nan, *FIRST[1:]]}, r"1 keypoints are not finite.* x, y.*\n  keypoint 1 of annotation 1"),
        ({"keypoints": [12, 8, 3, *FIRST[3:]]}, r"1 keypoints are not finite numbers.*\n  .*: \[12\.0, 8\.0, 3\.0\]"),
        ({"keypoints": [42, 8, 2, *FIRST[3:]]}, r"1 labeled keypoints lie outside.*\n  keypoint 1 of .*\n.*Repair"),
        ({"bbox": [10, 5, 40, 10]}, "1 of 3 boxes have no area or exceed their image"),
        ({"bbox": [10, 5, 0, 10]}, "1 of 3 boxes have no area or exceed their image"),
        ({"id": 2}, "1 ids of annotations in .* occur more than once"),
        ({"category_id": 7}, "has annotations of categories that the file does not define: 7"),
    ):
        expect_error(f"(?s){message}", load, with_annotation(tmp_path, **changes))


def test_what_is_outside_counts_as_not_labeled_where_that_is_asked(tmp_path: Path, caplog) -> None:
    source = with_annotation(tmp_path, keypoints=[12, 8, 2, 20, 60, 1, 0, 0, 0], bbox=[10, 5, 40, 10])
    _, keypoints, box, area = table(load(source, box_errors="clip"))[1]
    assert (keypoints, box, area) == (triples([12, 8, 2, 0, 0, 0, 0, 0, 0]), [10, 5, 40, 15], 99)
    assert "1 keypoints lie outside their image and are treated as not labeled" in caplog.text
    assert [row[1] for row in table(load(source, box_errors="drop"))] == [triples(THIRD), triples(SECOND)]


def test_files_without_keypoints_or_with_those_of_two_kinds_are_refused(tmp_path: Path) -> None:
    bird = {"id": 6, "name": "bird", "keypoints": ["beak"]}
    for changes, message in (
        ([{"id": 5, "name": "pet"}], "must have one category with a list of keypoints, but has none"),
        ([CATEGORY, bird], "must have one category with a list of keypoints, but has 'pet', 'bird'"),
        ([{**CATEGORY, "skeleton": [[1, 4]]}], "connects the keypoints 1 and 4, but keypoint numbers are 1 to 3"),
        ([{**CATEGORY, "keypoints": ["nose", "nose", "ear"]}], "Several keypoints are named 'nose'"),
    ):
        expect_error(message, load, write_coco(tmp_path, categories=changes))
    unlabeled = write_coco(tmp_path, annotations=ANNOTATIONS[2:3])
    expect_error("has no object with a labeled keypoint in 'train'", load, unlabeled)
    write_coco(tmp_path)
    write_coco(tmp_path, "val/annotations.json", "val/images", categories=[{**CATEGORY, "keypoints": ["a", "b", "c"]}])
    expect_error(r"differ in keypoints, which must be equal", load, tmp_path)


def test_objects_of_an_image_are_held_out_together(tmp_path: Path) -> None:
    for number in range(10):
        write_image(tmp_path / f"{number}.png", picture(number, SIZE))
    rows = [(f"{number % 10}.png", number, 1) for number in range(30)]
    train = load(write_csv(tmp_path / "all.csv", ["file", "x1", "y1"], *rows)).splits["train"]
    held_out = hold_out(train, 0.2)
    files = {split: set(part["file"][:]) for split, part in held_out.items()}
    assert (len(held_out["test"]), len(files["test"])) == (6, 2)
    assert not files["train"] & files["test"]
    assert hold_out(train, 0.2)["test"]["file"][:] == held_out["test"]["file"][:]


def write_csv(file: Path, columns: list[str], *rows: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])
    return file


def write_landmarks(folder: Path, columns: list[str], *rows: Any) -> Path:
    for number, name in enumerate("ab"):
        write_image(folder / "images" / f"{name}.png", picture(number, SIZE))
    return write_csv(folder / "landmarks.csv", ["file", *columns], *rows)


def test_tables_name_keypoints_in_columns_and_may_have_boxes_and_splits(tmp_path: Path) -> None:
    columns = ["nose_x", "nose_y", "nose_v", "Left Ear_x", "Left Ear_y", "Right Ear_x", "Right Ear_y"]
    rows = [("images/a.png", 12, 8, 1, 20, 6.5, "", ""), ("images/a.png", 3, 4, 0, 5, 6, 7, 8)]
    file = write_landmarks(tmp_path, columns, *rows)
    for source in (file, tmp_path):
        data = load(source)
        assert (data.names, data.flip_pairs, data.skeleton) == (("nose", "Left Ear", "Right Ear"), ((1, 2),), ())
        whole = ([0, 0, 40, 30], 1200)
        assert table(data) == [
            ("a.png", triples([12, 8, 1, 20, 6.5, 2, 0, 0, 0]), *whole),
            ("a.png", triples([0, 0, 0, 5, 6, 2, 7, 8, 2]), *whole),
        ]
        assert [target["image_id"] for target in data.examples("train").read_targets()] == [0, 0]
    for columns, cells in (
        (["x_min", "y_min", "x_max", "y_max"], (1, 2, 30, 20)),
        (["xmin", "ymin", "xmax", "ymax"], (1, 2, 30, 20)),
        (["bbox"], ("[1, 2, 29, 18]",)),
        (["bbox"], ("1 2 29 18",)),
    ):
        rows = [("images/a.png", 3, 4, "val", *cells), ("images/b.png", 5, 6, "train", *("" for _ in cells))]
        data = load(write_landmarks(tmp_path / "boxes", ["x1", "y1", "split", *columns], *rows))
        assert data.names == ("1",)
        assert table(data, "validation") == [("a.png", [[3, 4, 2]], [1, 2, 30, 20], 522)]
        assert table(data, "train") == [("b.png", [[5, 6, 2]], [0, 0, 40, 30], 1200)]


def test_bad_tables_are_named(tmp_path: Path) -> None:
    for columns, cells, message in (
        ("x1,y1", ("a", 3, ""), r"1 of 1 rows are malformed:\n  .*csv, row 1: only one of x1 and y1 is"),
        ("x1,y1", ("a", "3,5", 2), "x1 is '3,5', which is not a number"),
        ("x1,y1,bbox", ("a", 3, 2, "1 2 3"), "bbox is '1 2 3', which is not x, y, width and height"),
        ("x1,y1", ("a", 41, 2), r"1 labeled keypoints lie outside.*\n  keypoint 1 of .*csv, row 1: \[41"),
        ("x1,y1", ("c", 3, 2), r"1 of 1 images do not exist\. Paths must be relative to the folder of their"),
        ("x1,y1,x2", ("a", 3, 2, 1), "has no x or no y column for the keypoints '2'"),
        ("label", ("a", 3), "has no keypoint columns, only 'file', 'label'. Name these columns nose_x"),
        ("x1,y1,v1", ("a", 3, 2, 5), r"1 keypoints are not finite.*: \[3\.0, 2\.0, 5\.0\]"),
    ):
        row = (f"images/{cells[0]}.png", *cells[1:])
        expect_error(f"(?s){message}", load, write_landmarks(tmp_path, columns.split(","), row))
    for split, columns in (("train", ["x1", "y1"]), ("val", ["x2", "y2"])):
        file = write_landmarks(tmp_path / "splits", columns, ("images/a.png", 1, 1))
        file.rename(file.with_name(f"{split}.csv"))
    expect_error(r"have different keypoints\. Use the same columns", load, tmp_path / "splits")
    expect_error(r"contains no keypoints in a known format: COCO", load, tmp_path / "splits" / "images")


def test_a_keypoint_at_minus_one_is_not_labeled(tmp_path: Path, caplog) -> None:
    columns = ["x1", "y1", "x2", "y2"]
    rows = [("images/a.png", 12, 8, -1, -1), ("images/b.png", -1, -1, -1.0, -1), ("images/b.png", 5, -1, 6, 7)]
    data = load(write_landmarks(tmp_path / "table", columns, *rows))
    assert [row[1] for row in table(data)] == [triples([12, 8, 2, 0, 0, 0]), triples([5, -1, 2, 6, 7, 2])]
    assert data.notes == ("3 keypoints at -1, -1 are treated as not labeled.",)
    assert "3 keypoints at -1, -1 are treated as not labeled." in caplog.text
    assert "1 of 3 objects because they have no labeled keypoint" in caplog.text
    coco = load(with_annotation(tmp_path / "coco", keypoints=[12, 8, 2, -1, -1, 2, -1, -1, 0]))
    assert table(coco)[1][1] == triples([12, 8, 2, 0, 0, 0, 0, 0, 0])
    assert coco.notes == ("1 keypoints at -1, -1 are treated as not labeled.",)
    assert load(write_coco(tmp_path / "sound")).notes == ()


@pytest.mark.parametrize("offset", [0.0, -0.04])
def test_keypoints_in_shares_of_the_image_are_refused(tmp_path: Path, offset: float) -> None:
    shares = [round(0.1 * number + offset, 2) for number in range(8)]
    rows = [("images/a.png", *shares[:4]), ("images/b.png", *shares[4:])]
    message = r"4 of 4 labeled keypoints have x and y between 0 and 1, .* Multiply x by the width of the image and y"
    expect_error(message, load, write_landmarks(tmp_path / "table", ["x1", "y1", "x2", "y2"], *rows))
    keypoints = [np.divide(own["keypoints"], [100, 100, 1] * 3).tolist() for own in ANNOTATIONS]
    relative = [{**own, "keypoints": values} for own, values in zip(ANNOTATIONS, keypoints, strict=True)]
    source = write_coco(tmp_path / "coco", annotations=relative)
    expect_error("8 of 8 labeled keypoints have x and y between 0 and 1", load, source, box_errors="clip")
    # A missing keypoint is stored as (0, 0). It is not mistaken for normalized coordinates.
    rows = [("images/a.png", 0, 0, 5, 6), ("images/b.png", 1, 0, 9, 9)]
    assert len(load(write_landmarks(tmp_path, ["x1", "y1", "x2", "y2"], *rows)).splits["train"]) == 2


@pytest.mark.parametrize("form", ["triples", "flat", "pairs"])
def test_columns_of_objects_may_have_keypoints(tmp_path: Path, form: str) -> None:
    def written(values: list[float]) -> list:
        return values if form == "flat" else [point[: 2 if form == "pairs" else 3] for point in triples(values)]

    kind = List(Value("float32")) if form == "flat" else List(List(Value("float32")))
    features = Features({"image": Image(), "objects": List({"keypoints": kind, "bbox": List(Value("float32"))})})
    of_images: list[list[list[float]]] = [[FIRST, SECOND], [], [THIRD]]
    objects = [[{"keypoints": written(values), "bbox": [0, 0, 9, 9]} for values in found] for found in of_images]
    content = {"image": [encoded(picture(number, SIZE)) for number in range(3)], "objects": objects}
    Dataset.from_dict(content, features).to_parquet(tmp_path / "train.parquet")
    data = load(tmp_path, flip_pairs=["1,2"])
    assert (data.names, data.flip_pairs) == (("0", "1", "2"), ((1, 2),))
    expected = [triples(values) for values in (FIRST, SECOND, THIRD)]
    if form == "pairs":
        expected = [[[x, y, 2] for x, y, _ in keypoints] for keypoints in expected]
    assert [row[1:3] for row in table(data)] == [(keypoints, [0, 0, 9, 9]) for keypoints in expected]
    assert data.splits["train"]["file"][:] == ["image 0 of train", "image 0 of train", "image 2 of train"]


def test_flip_pairs_are_derived_from_keypoint_names(caplog) -> None:
    for pair in (
        "left_eye right_eye", "Left-Eye Right-Eye", "leftear rightear", "L_Ear R_Ear", "LEar REar", "eye.l eye.r",
        "earL earR", "LeftEye RightEye", "hand_left_thumb1 hand_right_thumb1", "earleft earright",
    ):  # fmt: skip
        first, second = pair.split()
        assert flip_pairs_of([second, "nose", "upright", first]) == ((0, 3),)
    assert flip_pairs_of(["nose", "left_ear", "left_brow_1", "right_brow_1"]) == ((2, 3),)
    assert "No keypoint is the left or right counterpart of 'left_ear'" in caplog.text
    assert "A horizontal flip swaps keypoints of equal numbers: 'left_brow_1,right_brow_1'" in caplog.text
    assert flip_pairs_of(["a", "b"]) == ()
    assert "horizontal flips swap no keypoints" in caplog.text
    # For the 68 iBUG landmarks, the flip pairs follow from the positions in the face, not from the names.
    counts = {"jaw": 17, "right_brow": 5, "left_brow": 5, "nose": 9, "right_eye": 6, "left_eye": 6, "mouth": 20}
    pairs = flip_pairs_of([f"{part}_{number}" for part, count in counts.items() for number in range(count)])
    assert {(0, 16), (17, 26), (21, 22), (36, 45), (40, 47), (41, 46), (48, 54), (60, 64), (65, 67)} <= set(pairs)
    assert len(pairs) == 29
    assert not {8, 27, 30, 33, 51, 57, 62, 66} & {number for pair in pairs for number in pair}
    assert "68 keypoints are assumed to be iBUG face landmarks" in caplog.text


def test_pairs_and_sigmas_of_keypoints(tmp_path: Path) -> None:
    assert flip_pairs_of(NAMES, ["right_ear, left_ear"]) == flip_pairs_of(NAMES, ["1,2"]) == ((1, 2),)
    assert flip_pairs_of(NAMES, []) == ()
    for given, message in (
        (["left_ear,tail"], "flip_pairs contains 'left_ear,tail', which is not a pair of keypoints such as"),
        (["nose"], "flip_pairs contains 'nose', which is not a pair"),
        (["0,1", "1,2"], "flip_pairs contains 'left_ear' more than once"),
    ):
        expect_error(message, flip_pairs_of, NAMES, given)
    # COCO keypoints in any order get the COCO sigmas of their names.
    names = list(COCO_SIGMAS)[::-1]
    annotation = {**ANNOTATIONS[0], "keypoints": [5, 5, 2] * 17}
    person = {"id": 5, "name": "person", "keypoints": names, "skeleton": []}
    data = load(write_coco(tmp_path, categories=[person], annotations=[annotation]))
    assert data.oks_sigmas == tuple(COCO_SIGMAS[name] for name in names)
    assert data.oks_sigmas[-1] == 0.026
    assert len(data.flip_pairs) == 8
