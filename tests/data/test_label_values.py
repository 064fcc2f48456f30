"""Test reading multi-label and regression targets: detection of the problem type, values of labels, and errors."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value

from hf_vit.data import load_image_classification
from hf_vit.data.reading.label_values import FLAGS, MULTI, REGRESSION, SINGLE, VALUES, value_table
from hf_vit.tasks.image_classification import open_labeled

from ..helpers.datasets import picture, write_class_folders, write_pictures
from .errors import expect_error


NAMES = ("1.png", "2.png", "3.png", "4.png")
NAN = math.nan


def write_table(folder: Path, *rows: str, name: str = "train.csv") -> Path:
    write_pictures(folder, *NAMES[: len(rows) - 1])
    lines = [rows[0], *(f"{image},{row}" for image, row in zip(NAMES, rows[1:], strict=False))]
    (folder / name).write_text("\n".join(lines))
    return folder / name


def read(source: Path, problem_type: Any = None, **options: Any) -> tuple[str, list[str], np.ndarray]:
    """Return the name of the label column, the label names, and the label values of the first split."""
    rows = next(iter(load_image_classification(str(source), problem_type=problem_type, **options).values()))
    column = FLAGS if FLAGS in rows.column_names else VALUES
    return column, list(rows.features[column]), value_table(rows).to_numpy()


def expect(found: tuple[str, list[str], np.ndarray], column: str, names: list[str], rows: list[list[float]]) -> None:
    assert found[:2] == (column, names)
    np.testing.assert_array_equal(found[2], rows)


def test_columns_of_0_and_1_are_labels_and_empty_cells_are_missing(tmp_path: Path) -> None:
    table = write_table(tmp_path, "file,id,cat,dog", "a,0,1", "b,true,", "c,NaN,False")
    expected = [[0, 1], [1, NAN], [NAN, 0]]
    expect(read(table), FLAGS, ["cat", "dog"], expected)
    expect(read(table, label_column_name="dog, cat"), FLAGS, ["dog", "cat"], [row[::-1] for row in expected])
    expect(read(table, REGRESSION, label_column_name="cat,dog"), VALUES, ["cat", "dog"], expected)
    data = open_labeled(str(table), problem_type=None)
    assert data.names == ("cat", "dog")
    assert str(data.examples("train")[1]["label"]) == "[1.0, nan]"


@pytest.mark.parametrize("separator", ["|", ";", ",", " + "])
def test_names_in_a_cell_are_separated(separator: str, tmp_path: Path) -> None:
    cells = ["label", *('"' + separator.join(names) + '"' for names in (["dog", "cat"], ["cat"], [], ["fox", "dog"]))]
    table = write_table(tmp_path, "file," + cells[0], *cells[1:])
    expected = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 1, 1]]
    expect(read(table, label_separator=separator), FLAGS, ["cat", "dog", "fox"], expected)
    if separator in "|;,":
        expect(read(table, MULTI), FLAGS, ["cat", "dog", "fox"], expected)
    for problem_type in (SINGLE, None):  # for single-label problems, an empty label is a missing label
        expect_error("missing", load_image_classification, str(table), problem_type=problem_type)


@pytest.mark.parametrize("mark", ["|", ",", ";"])
def test_names_are_one_label_each_unless_several_are_asked_for(mark: str, tmp_path: Path) -> None:
    # The names a{mark}b and b{mark}c both contain the part b.
    names = [f"a{mark}b", f"b{mark}c", "c"]
    table = write_table(tmp_path, "file,label", *(f'"{name}"' for name in (*names, "c")))
    assert load_image_classification(str(table), problem_type=None)["train"].features["label"].names == names
    expected = [[1, 1, 0], [0, 1, 1], [0, 0, 1], [0, 0, 1]]
    expect(read(table, MULTI), FLAGS, ["a", "b", "c"], expected)
    expect(read(table, label_separator=mark), FLAGS, ["a", "b", "c"], expected)
    images = [picture(number) for number in range(4)]
    for number, feature in enumerate((ClassLabel(names=names), Value("string"))):
        labels = [0, 1, 2, 2] if number == 0 else [*names, "c"]
        features = Features({"image": Image(), "label": feature})
        saved = Dataset.from_dict({"image": images, "label": labels}, features=features)
        DatasetDict({"train": saved}).save_to_disk(tmp_path / f"saved_{number}")
        rows = load_image_classification(str(tmp_path / f"saved_{number}"), problem_type=None)["train"]
        assert (rows.features["label"].names, rows["label"][:]) == (names, [0, 1, 2, 2])


def test_lists_in_json_lines_and_null_is_missing(tmp_path: Path) -> None:
    write_pictures(tmp_path, *NAMES)
    cells = [["b", "a"], [], None, "a"]
    lines = [json.dumps({"file_name": name, "labels": cell}) for name, cell in zip(NAMES, cells, strict=True)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    expect(read(tmp_path), FLAGS, ["a", "b"], [[1, 1], [0, 0], [NAN, NAN], [1, 0]])


@pytest.mark.parametrize("kind", ["class numbers", "names", "flags", "vectors"])
def test_columns_of_a_dataset(kind: str, tmp_path: Path) -> None:
    images, nothing = [picture(number) for number in range(3)], None
    types = {
        "class numbers": (List(ClassLabel(names=["b", "a", "c"])), [[0, 1], [], nothing], ["b", "a", "c"]),
        "names": (List(Value("string")), [["b", "a"], [], nothing], ["a", "b"]),
        "vectors": (List(Value("float32")), [[1.0, 1.0], [0.0, 0.0], nothing], ["labels_0", "labels_1"]),
        "flags": (Value("bool"), [True, False, nothing], ["b", "a"]),
    }
    feature, values, names = types[kind]
    features, columns = {"labels": feature}, {"labels": values}
    if kind == "flags":
        features, columns = {"b": feature, "a": Value("int64")}, {"b": values, "a": [1, 0, nothing]}
    rows = Dataset.from_dict({"image": images, **columns}, features=Features({"image": Image(), **features}))
    # The only row of the test split has no label, so the split is excluded.
    tests = {"test": rows.select([2])} if kind == "names" else {}
    DatasetDict({"train": rows, **tests}).save_to_disk(tmp_path / "saved")
    expected = [[1, 1, 0][: len(names)], [0] * len(names), [NAN] * len(names)]
    expect(read(tmp_path / "saved"), FLAGS, names, expected)
    assert list(load_image_classification(str(tmp_path / "saved"), problem_type=None)) == ["train"]


def test_numbers_with_fractions_and_class_folders_are_values_or_labels(tmp_path: Path) -> None:
    table = write_table(tmp_path, "file,age,label", "3,1.5", "4,", "5,-2")
    expect(read(table), VALUES, ["label"], [[1.5], [NAN], [-2]])
    expect(read(table, REGRESSION, label_column_name="age"), VALUES, ["age"], [[3], [4], [5]])
    expect(read(table, label_column_name="label,age"), VALUES, ["label", "age"], [[1.5, 3], [NAN, 4], [-2, 5]])
    write_class_folders(tmp_path / "photos", ["cat", "cat+dog"])
    column, names, labels = read(tmp_path / "photos", MULTI, label_separator="+")
    assert (column, names, labels.sum(axis=0).tolist()) == (FLAGS, ["cat", "dog"], [len(labels), len(labels) / 2])
    assert read(tmp_path / "photos", MULTI)[1] == ["cat", "cat+dog"]
    expect_error(r"'label' are not numbers.*the first is 'cat' in row 1", read, tmp_path / "photos", REGRESSION)


def test_wrong_labels_are_named(tmp_path: Path) -> None:
    flags, text = r"1 of 2 labels .*'cat' are not 0 or 1.*is '2' in row 2", "are not numbers.*'young' in row 1"
    missing = r"All labels of the split 'train' are missing \('cat', 'dog'\)"
    for rows, problem_type, columns, message in (
        (["file,cat,dog", "0,1", "2,1"], MULTI, "cat,dog", flags),
        (["file,age", "young", "7"], REGRESSION, "age", text),
        (["file,cat,dog", ",", ","], None, None, missing),
        (["file,cat,dog", "1,0", "0,1"], None, "cat,cow", "no column 'cat,cow'"),
    ):
        table = write_table(tmp_path, *rows)
        expect_error(message, read, table, problem_type, label_column_name=columns)
    write_table(tmp_path, "file,label", "a|b", "a")
    write_table(tmp_path, "file,label", "a|c", "b", name="test.csv")
    expect_error("The split 'test' has the labels 'c', but the classes are 'a', 'b'", read, tmp_path, MULTI)
    lines = [json.dumps({"file": name, "label": cell}) for name, cell in zip(NAMES, ([1, 2], [3]), strict=False)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    message = r"'label' has lists of 1, 2 numbers\. All lists must have the same length"
    expect_error(message, read, tmp_path / "train.jsonl", REGRESSION)
