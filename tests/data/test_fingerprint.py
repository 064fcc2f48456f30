"""Test that the fingerprint of a dataset depends on the content of its files, not on their location."""

import shutil
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value

from hf_vit.data import fingerprint as module
from hf_vit.data.fingerprint import digest_files, fingerprint
from hf_vit.data.loaders.image_classification import load_image_classification

from ..helpers.datasets import write_class_folders


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "photos", ["cat", "dog"])


def rows_of(folder: Path) -> Dataset:
    return load_image_classification(str(folder))["train"]


def flip_last_bit(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def differing(first: dict[str, object], second: dict[str, object]) -> set[str]:
    return {name for name in first if first[name] != second[name]}


def test_fingerprint_ignores_moved_files_and_detects_other_changes(photos: Path, tmp_path: Path) -> None:
    begun = fingerprint(rows_of(photos))
    moved = Path(shutil.move(photos, tmp_path / "other"))
    rows = rows_of(moved)
    assert fingerprint(rows) == begun
    assert differing(begun, fingerprint(rows.select(range(len(rows) - 1)))) == set(begun)
    reverse = rows.select(range(len(rows) - 1, -1, -1))
    assert differing(begun, fingerprint(reverse)) == set(begun) - {"number"}
    relabeled = rows.remove_columns("label").add_column("label", [0] * len(rows), feature=rows.features["label"])
    assert differing(begun, fingerprint(relabeled)) == {"targets"}
    flip_last_bit(sorted(moved.glob("train/*/*.png"))[0])
    assert differing(begun, fingerprint(rows)) == {"contents"}


def test_embedded_images_are_identified_by_their_bytes() -> None:
    labels = ClassLabel(names=["cat", "dog"])
    features = Features({"image": Image(decode=False), "label": labels, "box": Value("int64")})

    def rows(*contents: bytes, box: int = 0) -> Dataset:
        images = [{"bytes": content, "path": None} for content in contents]
        columns = {"image": images, "label": [0] * len(images), "box": [box] * len(images)}
        return Dataset.from_dict(columns, features=features)

    begun = fingerprint(rows(b"one", b"two"))
    assert fingerprint(rows(b"zero", b"one", b"two").select([1, 2])) == begun
    assert differing(begun, fingerprint(rows(b"one", b"Two"))) == {"contents"}
    assert differing(begun, fingerprint(rows(b"one", b"two", box=1))) == {"targets"}


def test_of_too_many_images_some_are_read_evenly_spread(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(photos)
    sizes = [Path(image["path"]).stat().st_size for image in rows.cast_column("image", Image(decode=False))["image"]]
    monkeypatch.setattr(module, "MAX_HASHED_BYTES", sum(sizes))
    whole = fingerprint(rows)
    monkeypatch.setattr(module, "MAX_HASHED_BYTES", sum(sizes) // 2 + 1)
    begun = fingerprint(rows)
    assert differing(begun, whole) == {"contents"}
    files = [Path(file) for file in rows["file"]]
    for file, is_told in ((files[1], False), (files[2], True)):
        flip_last_bit(file)
        assert differing(begun, fingerprint(rows)) == ({"contents"} if is_told else set())


def test_shards_are_told_by_names_and_sizes(photos: Path, tmp_path: Path) -> None:
    begun = digest_files([str(photos)])
    moved = Path(shutil.move(photos, tmp_path / "other"))
    assert digest_files([str(moved)]) == begun
    (moved / "train" / "new.tar").write_bytes(b"shard")
    longer = digest_files([str(moved)])
    assert longer != begun
    (moved / "train" / "new.tar").write_bytes(b"shards")
    assert digest_files([str(moved)]) != longer
