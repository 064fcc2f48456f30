"""Test circular links and damaged archives: no file is read twice or skipped without a message."""

import gzip
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_vit.data import load_image_classification, load_unlabeled_images, stream_image_classification
from hf_vit.data.formats import tar as stored
from hf_vit.data.formats.tar import check_tars
from hf_vit.data.loaders.unlabeled_images import stream_images
from hf_vit.data.reading.files import files_below

from ..helpers.datasets import dataset_of, encoded, picture, truncate, write_class_folders, write_pictures, write_tar
from .errors import expect_error


def link(place: Path, target: Path) -> None:
    place.symlink_to(target, target_is_directory=True)


def test_circular_links_add_no_images(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "photos", ["bee", "cow"])
    before = load_image_classification(str(folder))
    link(folder / "train" / "cow" / "all", folder)
    link(folder / "train" / "cow" / "self", folder / "train" / "cow")
    link(folder / "train" / "loop", folder / "train")
    link(folder / "loop", folder)
    after = load_image_classification(str(folder))
    files = [{name: split["file"][:] for name, split in splits.items()} for splits in (before, after)]
    assert files[0] == files[1]
    assert after["train"].features["label"].names == ["bee", "cow"]
    assert load_unlabeled_images([str(folder)])["train"].num_rows == before["train"].num_rows


def test_links_to_folders_elsewhere_are_followed_once(tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "photos"
    write_pictures(store, "cats/1.png", "more/2.png", "more/deep/3.png")
    link(store / "more" / "up", store)
    folder.mkdir()
    link(folder / "cat", store / "cats")
    link(store / "cats" / "more", store / "more")
    link(store / "cats" / "again", store / "more")
    files = files_below(folder / "cat")
    places = sorted(os.path.relpath(file.resolve(), store) for file in files)
    assert places == ["cats/1.png", "more/2.png", "more/deep/3.png"]
    link(folder / "all", store)
    assert len(files_below(folder)) == 3
    # A linked folder raises an error if it belongs to two classes.
    write_pictures(tmp_path / "two", "photos/cat/1.png", "photos/dog/2.png")
    link(tmp_path / "two" / "photos" / "cat" / "more", tmp_path / "two" / "photos" / "dog")
    message = r"photos/dog belong to two classes, 'cat' and 'dog'"
    expect_error(message, load_image_classification, str(tmp_path / "two" / "photos"))


def members(file: Path) -> list[int]:
    """Return the byte offsets of the members of a tar file, and the offset at which the last member ends."""
    with tarfile.open(file) as tar:
        return [member.offset for member in tar.getmembers()] + [tar.offset]


def damaged(content: bytes, offset: int) -> bytes:
    return content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]


# Functions that damage the content of a tar file, given the offsets of its members
DAMAGES: dict[str, Callable[[bytes, list[int]], bytes]] = {
    "cut at a header": lambda content, offsets: content[: offsets[2]],
    "cut in a header": lambda content, offsets: content[: offsets[2] + 100],
    "cut in a member": lambda content, offsets: content[: offsets[2] - 600],
    "cut before the end": lambda content, offsets: content[: offsets[-1]],
    "damaged header": lambda content, offsets: damaged(content, offsets[2]),
    "joined": lambda content, offsets: content * 2,
}


def damage(file: Path, kind: str) -> None:
    file.write_bytes(DAMAGES[kind](file.read_bytes(), members(file)))


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("kind", DAMAGES)
def test_an_archive_that_is_not_whole_is_refused_by_name(kind, is_compressed, tmp_path):
    images = {f"{number:03}": encoded(picture(number)) for number in range(4)}
    labels = dict.fromkeys(images, 0) | {"001": 1}
    suffix = ".tar.gz" if is_compressed else ".tar"
    whole, bad = tmp_path / f"train-0{suffix}", tmp_path / f"train-1{suffix}"
    for file in (whole, bad):
        write_tar(file.with_suffix(""), images, labels, "cls")
        if file == bad:
            damage(file.with_suffix(""), kind)
        content = file.with_suffix("").read_bytes()
        file.with_suffix("").unlink()
        file.write_bytes(gzip.compress(content) if is_compressed else content)
    check_tars([str(whole)])
    source = str(tmp_path)
    for load in (
        lambda: load_image_classification(source),
        lambda: stream_image_classification(source, class_names=["cat", "dog"]),
        lambda: stream_images([source]),
        lambda: load_unlabeled_images([source]),
    ):
        with pytest.raises(OSError, match=rf"1 of 2 tar files are incomplete(.|\n)*train-1{suffix}: ") as caught:
            load()
        assert "train-0" not in str(caught.value)


def test_a_compressed_archive_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    images = {str(number): encoded(picture(number)) for number in range(4)}
    write_tar(tmp_path / "a.tar", images, dict.fromkeys(images, 1))
    content = gzip.compress((tmp_path / "a.tar").read_bytes())
    for share in (0.1, 0.5, 0.9, 0.999):
        (tmp_path / "b.tgz").write_bytes(content[: int(share * len(content))])
        expect_error(r"b\.tgz: it is truncated or damaged", check_tars, [str(tmp_path / "b.tgz")], error=OSError)


def test_truncated_parquet_files_raise_before_streaming(tmp_path: Path) -> None:
    for number in range(2):
        dataset_of(["cat", "dog"] * 5).to_parquet(tmp_path / f"train-{number}.parquet")
    assert len(list(stream_images([str(tmp_path)])["train"])) == 20
    truncate(tmp_path / "train-1.parquet", 0.99)
    for stream in (lambda: stream_image_classification(str(tmp_path)), lambda: stream_images([str(tmp_path)])):
        with pytest.raises(OSError, match=r"1 of 2 parquet files are truncated .*:\n.*train-1\.parquet\n") as caught:
            stream()
        assert "train-0" not in str(caught.value)


def test_archives_that_take_too_long_are_named_in_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(stored.logger, "warning", lambda text, *values: messages.append(text % values))
    file = tmp_path / "a.tar"
    write_tar(file, {"1": encoded(picture(0)), "2": encoded(picture(1))}, {"1": 0, "2": 1})
    check_tars([str(file)], max_seconds=0)
    assert messages == ["1 of 1 tar files could not be checked completely in 0 seconds, so they may be incomplete."]
    damage(file, "cut at a header")  # the truncation is detected by reading the end of the file
    expect_error(r"it does not end with the blocks of zeros", check_tars, [str(file)], error=OSError, max_seconds=0)
