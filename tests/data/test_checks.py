"""Test the checks before training: detection of unreadable images, and the choice of held-out images."""

from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value, concatenate_datasets
from PIL import Image as PILImage

from hf_vit.data import hold_out, load_image_classification, unreadable_images
from hf_vit.data.checks import check_output_outside_data, drop_unreadable
from hf_vit.features import ExtractionArguments
from hf_vit.model.image_inputs import read_image

from ..helpers.datasets import dataset_of, encoded, picture, truncate, write_pictures
from .errors import expect_error


@pytest.fixture
def damaged(tmp_path: Path) -> Dataset:
    """Write six images in two classes: a/1.jpg is truncated, b/1.jpg contains text and b/2.jpg is empty."""
    write_pictures(tmp_path, *(f"{label}/{number}.jpg" for label in "ab" for number in range(3)))
    # This image is large enough to be decoded partially after truncation.
    picture(0, (200, 200)).save(tmp_path / "a" / "1.jpg")
    truncate(tmp_path / "a" / "1.jpg", 0.9)
    (tmp_path / "b" / "1.jpg").write_text("<html>not found</html>")
    (tmp_path / "b" / "2.jpg").write_bytes(b"")
    return load_image_classification(str(tmp_path))["train"]


def test_images_are_decoded_to_their_last_byte_in_any_number_of_threads(damaged, tmp_path):
    PILImage.open(tmp_path / "a" / "1.jpg").verify()  # `verify` of PIL does not detect the truncation
    unreadable = unreadable_images(damaged)
    assert list(unreadable) == [1, 4, 5]
    assert unreadable[1].startswith(f"{tmp_path}/a/1.jpg cannot be decoded: image file is truncated")
    assert unreadable[4].startswith(f"{tmp_path}/b/1.jpg is not an image that PIL can read")
    assert unreadable[5].startswith(f"{tmp_path}/b/2.jpg is not an image")
    assert "BytesIO" not in "".join(unreadable.values())
    many = concatenate_datasets([damaged] * 30)
    expected = [6 * repeat + index for repeat in range(30) for index in (1, 4, 5)]
    for num_threads in (1, 8):
        assert list(unreadable_images(many, num_threads)) == expected
    (tmp_path / "a" / "0.jpg").unlink()
    assert "No such file" in unreadable_images(damaged)[0]


def named(images: list, files: list[str] | None = None) -> Dataset:
    """Return a dataset of encoded images or paths, and the names of the images."""
    files = files or [f"image {number} of train" for number in range(len(images))]
    return Dataset.from_dict({"image": images, "file": files}, Features({"image": Image(), "file": Value("string")}))


def test_images_that_are_no_files_are_named_too(monkeypatch):
    content = [encoded(picture(number)) for number in range(3)]
    content[1] = content[1][:-30]
    unreadable = unreadable_images(named([*content, None]))
    assert list(unreadable) == [1, 3]
    assert unreadable[1].startswith("image 1 of train cannot be decoded")
    assert unreadable[3] == "image 3 of train is missing. Add it, or remove its row."
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 20)  # limits the number of pixels of images that PIL decodes
    assert "too large" in unreadable_images(named([encoded(picture(0))]))[0]


def odd_images() -> dict[str, bytes]:
    """Return encoded images whose pixels depend on the decoder, such as images with transparency."""
    color, gray = picture(0, (12, 8)), picture(1, (12, 8)).convert("L")
    alpha = color.copy()
    alpha.putalpha(gray)
    turned = PILImage.Exif()
    turned[0x0112] = 6
    animated = BytesIO()
    color.quantize(8).save(animated, "GIF", save_all=True, append_images=[gray.quantize(8)])
    exif = BytesIO()
    color.save(exif, "JPEG", exif=turned)
    deep = PILImage.fromarray(np.linspace(0, 255, 96).reshape(8, 12).astype(np.uint16))
    return {
        "16 bits": encoded(deep), "alpha": encoded(alpha), "CMYK": encoded(color.convert("CMYK"), "JPEG"),
        "palette": encoded(color.quantize(8)), "1 bit": encoded(gray.convert("1")), "animated": animated.getvalue(),
        "turned": exif.getvalue()
    }  # fmt: skip


def test_image_columns_decode_like_the_image_reader(tmp_path):
    # The pixels of an image must be equal in training and inference.
    kinds = odd_images()
    for name, content in kinds.items():
        (tmp_path / name).write_bytes(content)
    for images in ([str(tmp_path / name) for name in kinds], list(kinds.values())):
        split = named(images)
        assert unreadable_images(split) == {}
        for name, image in zip(kinds, split["image"], strict=True):
            for num_channels in (1, 3):
                expected = read_image(tmp_path / name, num_channels=num_channels)
                assert read_image(image, num_channels=num_channels).equal(expected), name
    assert split["image"][list(kinds).index("turned")].size == (8, 12)


def test_unreadable_images_of_all_splits_are_listed_unless_they_may_be_skipped(damaged, tmp_path, caplog):
    splits = DatasetDict({"train": damaged, "test": damaged.select(range(2))})
    unreadable = {"train": {1: "a/1.jpg: truncated", 4: "b/1.jpg: no image"}, "test": {0: "a/0.jpg: truncated"}}
    message = r"(?s)^3 of 8 images cannot be read:\n.*a/1.jpg: trunc.*b/1.jpg: no.*a/0.jpg: .* set skip_unreadable"
    expect_error(message, drop_unreadable, splits, unreadable, skip_unreadable=False)
    assert not caplog.records
    kept = drop_unreadable(splits, unreadable, skip_unreadable=True)
    assert [Path(file).name for file in kept["train"]["file"]] == ["0.jpg", "2.jpg", "0.jpg", "2.jpg"]
    assert kept["test"]["file"][:] == [f"{tmp_path}/a/1.jpg"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Ignored: 3 of 8 images cannot be read" in caplog.text
    # The error lists only the first unreadable images.
    splits = DatasetDict({"train": dataset_of([0, 1] * 100, ["a", "b"])})
    unreadable = {"train": {index: f"image {index} of train: truncated" for index in range(110)}}
    message = r"(?s)^110 of 200 .*image 99 of train: truncated\n  and 10 more\n"
    expect_error(message, drop_unreadable, splits, unreadable, skip_unreadable=False)
    assert drop_unreadable(splits, {"train": {}}, skip_unreadable=False) is splits


def test_no_class_of_train_and_no_split_is_skipped_as_a_whole():
    split = dataset_of([0, 1, 1], ["a", "b", "never"])
    splits = DatasetDict({"train": split, "test": split})
    for train, test, message in (
        ([1, 2], [], r"no training image: b\. Repair"),
        ([], [0, 1, 2], r"splits are empty: 'test'\. Repair"),
    ):
        unreadable = {"train": dict.fromkeys(train, "truncated"), "test": dict.fromkeys(test, "truncated")}
        expect_error(message, drop_unreadable, splits, unreadable, skip_unreadable=True)
    kept = drop_unreadable(splits, {"train": {}, "test": {0: "truncated"}}, skip_unreadable=True)
    assert kept["test"]["label"][:] == [1, 1]


def labeled(*counts: int) -> Dataset:
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    names = [f"class {index}" for index in range(len(counts))]
    return Dataset.from_dict({"label": labels}, Features({"label": ClassLabel(names=names)}))


def test_another_seed_holds_out_other_images_and_splits_need_all_classes():
    train = labeled(50, 50).add_column("number", list(range(100)))
    held_out = [hold_out(train, 0.2, seed)["test"]["number"][:] for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]
    assert Counter(hold_out(train, 0.2, seed=1)["test"]["label"]) == {0: 10, 1: 10}
    assert len(hold_out(labeled(10, 0, 10))["test"]) == 2  # classes without images are ignored
    for fraction in (0, 1, -0.1, 5):
        expect_error(f"train_val_split={fraction} is not a valid fraction", hold_out, labeled(10, 10), fraction)
    for counts, fraction, message in (
        ((10, 1, 5, 1), 0.5, "These classes have only 1: class 1, class 3"),
        ((5, 5, 5), 0.1, "train_val_split=0.1 holds out 2 of 15 images, but .* must each contain all 3 classes"),
        ((5, 5, 5), 0.9, "train_val_split=0.9 holds out 14 of 15 images, but .* all 3 classes"),
    ):
        expect_error(message, hold_out, labeled(*counts), fraction)


def test_output_folder_must_be_separate_from_the_data(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "out" / "data").mkdir(parents=True)
    (tmp_path / "out" / "table.csv").touch()
    monkeypatch.chdir(tmp_path)
    for root in ("", f"{tmp_path}/"):
        check_output_outside_data(["data"], f"{root}data-out")
        check_output_outside_data(["user/name-on-the-hub"], f"{root}user")
        for source, output in (("data", "data/out"), ("data", "data"), ("out/data", "out"), ("out/table.csv", "out")):
            message = f"must neither contain the data '{source}'.*Choose another output"
            expect_error(message, check_output_outside_data, ["elsewhere", source], root + output)
        for output in ("data/out", "data"):
            options = {"model_name_or_path": "model", "dataset_name": "elsewhere,data", "output_dir": root + output}
            expect_error("must neither contain the data", ExtractionArguments, **options)
