"""Test that the checks before training find invalid images and invalid targets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import DatasetDict, concatenate_datasets

from hf_vit.data import check_dense, load_depth_estimation, load_semantic_segmentation, load_universal_segmentation
from hf_vit.data.checks import drop_unreadable
from hf_vit.data.datasets import TargetData, TargetDataset

from ..helpers import datasets as samples


@pytest.fixture
def masks(tmp_path: Path) -> TargetData:
    return load_semantic_segmentation(str(samples.write_mask_folders(tmp_path / "masks")))


def faults(data: TargetData, split: str = "train") -> dict[int, str]:
    return check_dense(data.examples(split), show_progress=False)


def test_good_data_have_no_faults(masks: TargetData, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples.write_panoptic(tmp_path / "panoptic")
    samples.write_instances(tmp_path / "instances", {"category_id": 3, "segmentation": [[1, 1, 5, 1, 5, 4]]})
    assert faults(masks) == faults(masks, "validation") == {}
    assert faults(load_depth_estimation(str(samples.write_depth_folders(tmp_path / "depth")))) == {}
    assert faults(load_universal_segmentation(str(tmp_path / "panoptic")), "validation") == {}
    assert faults(load_universal_segmentation(str(tmp_path / "instances"))) == {}
    assert not caplog.records


def test_every_fault_is_found_with_its_file_and_reason(masks: TargetData, tmp_path: Path) -> None:
    folder = tmp_path / "masks" / "train"
    samples.picture(0, (200, 200)).save(folder / "images" / "0.jpg")
    samples.truncate(folder / "images" / "0.jpg", 0.9)
    samples.write_image(folder / "masks" / "1.png", np.full(samples.SHAPE, 3, np.uint8))
    samples.write_image(folder / "masks" / "2.png", np.zeros((5, 9), np.uint8))
    (folder / "masks" / "3.png").unlink()
    found = faults(masks)
    assert list(found) == [0, 1, 2, 3]
    assert found[0].startswith(f"{folder}/images/0.jpg cannot be decoded: image file is truncated")
    assert found[1].startswith(f"mask of {folder}/images/1.jpg has the labels 3, which are outside the class list")
    sizes = "has 6 x 8 pixels, but its segmentation map has 5 x 9. Both must have the same size."
    assert found[2] == f"{folder}/images/2.jpg {sizes}"
    assert "No such file" in found[3]
    assert f"{folder}/masks/3.png" in found[3]


def test_shards_and_threads_change_nothing(masks: TargetData, tmp_path: Path) -> None:
    samples.write_image(tmp_path / "masks" / "train" / "masks" / "1.png", np.full(samples.SHAPE, 3, np.uint8))
    many = concatenate_datasets([masks.splits["train"]] * 40)
    whole = [check_dense(TargetDataset(many, masks.read_target), num_threads=threads) for threads in (1, 8)]
    assert list(whole[0]) == list(whole[1]) == [4 * repeat + 1 for repeat in range(40)]
    shards = [many.shard(3, rank, contiguous=False) for rank in range(3)]
    found = [check_dense(TargetDataset(shard, masks.read_target)) for shard in shards]
    merged = {rank + 3 * index: reason for rank, reasons in enumerate(found) for index, reason in reasons.items()}
    assert dict(sorted(merged.items())) == whole[0]


def test_wrong_run_lengths_are_named(tmp_path: Path) -> None:
    def reason(**segmentation: Any) -> str:
        samples.write_instances(tmp_path, {"category_id": 3, "segmentation": segmentation})
        [found] = faults(load_universal_segmentation(str(tmp_path))).values()
        assert found.startswith("annotation 0 of ")
        return found

    sizes = (
        "has a mask of 3 x 4 pixels, but the image size in its JSON file is 6 x 8. Correct the mask or the image size."
    )
    assert reason(size=[3, 4], counts=[6, 6]).endswith(f"12.jpg {sizes}")
    for counts in ([6, 12, 3], [6, 12, 31], [6, -12, 54], "6<", "abc"):
        assert "12.jpg has a damaged mask: " in reason(size=list(samples.SHAPE), counts=counts)


def test_depth_without_a_valid_pixel_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = samples.write_depth_folders(tmp_path)
    samples.write_image(folder / "train" / "depths" / "2.png", np.zeros(samples.SHAPE, np.uint16))
    samples.write_image(folder / "train" / "depths" / "3.png", np.ones(samples.SHAPE, np.uint8))
    [reason] = faults(load_depth_estimation(str(folder))).values()
    assert reason.startswith(f"depth map of {folder}/train/images/3.jpg has the mode L")
    assert f"1 of 4 depth maps have no valid pixel and do not contribute to training:\n  {folder}" in caplog.text
    assert "2.jpg" in caplog.text


def test_invalid_examples_are_listed_or_skipped(masks: TargetData, tmp_path: Path) -> None:
    samples.write_image(tmp_path / "masks" / "train" / "masks" / "1.png", np.full(samples.SHAPE, 3, np.uint8))
    found = {"train": faults(masks), "validation": {}}
    with pytest.raises(ValueError, match=r"^1 of 6 images cannot be trained on:\n  mask of .*1\.jpg has the labels 3"):
        drop_unreadable(masks.splits, found, skip_unreadable=False, fault="cannot be trained on")
    kept = drop_unreadable(masks.splits, found, skip_unreadable=True, fault="cannot be trained on")
    assert isinstance(kept, DatasetDict)
    assert [Path(file).name for file in kept["train"]["file"]] == ["0.jpg", "2.jpg", "3.jpg"]
