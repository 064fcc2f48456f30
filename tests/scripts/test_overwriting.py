"""Test that commands never overwrite inputs or unrelated files, and replace earlier output only on request."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import hf_vit
from hf_vit.outputs import check_outputs, record_outputs

from ..helpers.dense_trainings import train, write_scenes
from ..helpers.models import save_model, small_config


CLASSES = {
    "classes": hf_vit.HfViTForImageClassification,
    "masks": hf_vit.HfViTForSemanticSegmentation,
    "depths": hf_vit.HfViTForDepthEstimation,
}


def save(model_class: type[hf_vit.HfViTPreTrainedModel], folder: Path, **options: object) -> None:
    save_model(model_class(small_config(image_size=16, patch_size=8, **options)), folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, model_class in CLASSES.items():
        save(model_class, folder / name)
    save(hf_vit.HfViTForDepthEstimation, folder / "relative", depth_config={"depth_estimation_type": "relative"})
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of photos with masks and depth maps next to them."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(1, 4):
        noise = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.jpg")
        Image.fromarray(noise[..., 0]).save(folder / f"{number}_mask.png")
        np.save(folder / f"{number}_depth.npy", noise[..., 0])
    return folder


def contents(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("masks", {"output_dir": "."}, r"1_mask\.png exists and was not written by this command"),
        ("depths", {"output_dir": "."}, r"1_depth\.npy exists and was not written by this command"),
        ("classes", {"picture": "1.jpg"}, r"1\.jpg is an input and would be overwritten"),
        ("classes", {"picture": "link.png"}, "is an input"),
        ("classes", {"picture": "2_mask.png"}, r"2_mask\.png exists and was not written by this command"),
        ("classes", {"output_dir": ".", "picture": "1_picture.png"}, r"1_picture\.png would be written twice"),
        *(("classes", {"picture": name}, r"Pictures cannot be saved as .* Use \.png") for name in ("a", "a.pdq")),
        ("classes", {"picture": "all.jsonl"}, r"Pictures cannot be saved as .* Use \.png or \.jpg"),
    ],
)
def test_predict_does_not_overwrite_unrelated_files(
    model: str, options: dict[str, str], message: str, models: Path, photos: Path
) -> None:
    (photos / "link.png").symlink_to(photos / "1.jpg")
    before = contents(photos)
    places = {name: photos / place for name, place in options.items()}
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=message):
            hf_vit.predict(models / model, sorted(photos.glob("*.jpg")), **places, overwrite=overwrite)
    assert contents(photos) == before


def test_an_earlier_run_is_replaced_on_request_alone(models: Path, photos: Path, tmp_path: Path) -> None:
    outputs = {"output_dir": tmp_path / "new", "picture": tmp_path / "all.png"}
    first = hf_vit.predict(models / "masks", photos / "1.jpg", **outputs)
    with pytest.raises(ValueError, match=r"exists from an earlier run\. Replace it with --overwrite"):
        hf_vit.predict(models / "masks", photos / "1.jpg", **outputs)
    assert hf_vit.predict(models / "masks", photos / "1.jpg", **outputs, overwrite=True) == first
    mask = Path(first[0]["written"][0])
    mask.write_bytes(mask.read_bytes() + b"edited by hand")
    with pytest.raises(ValueError, match=r"1_mask\.png exists and was not written by this command, or was changed"):
        hf_vit.predict(models / "masks", photos / "1.jpg", **outputs, overwrite=True)


def test_predictions_of_other_photos_are_not_overwritten(models: Path, photos: Path, tmp_path: Path) -> None:
    (written,) = hf_vit.predict(models / "depths", photos / "1.jpg", output_dir=tmp_path / "new")
    (tmp_path / "other").mkdir()
    Image.new("RGB", (30, 30)).save(tmp_path / "other" / "1.png")
    before = contents(tmp_path / "new")
    with pytest.raises(ValueError, match=r"exists from an earlier run"):
        hf_vit.predict(models / "depths", tmp_path / "other", output_dir=tmp_path / "new")
    assert contents(tmp_path / "new") == before
    assert all(Path(file).name in before for file in written["written"])
    (photos / "1_depth.npy").unlink()
    Image.new("I;16", (24, 20)).save(photos / "1_depth.png")
    (line,) = hf_vit.predict(models / "relative", photos / "1.jpg", output_dir=photos)
    assert [Path(file).name for file in line["written"]] == ["1_depth.npy", "1_picture.png"]


def test_evaluate_does_not_overwrite_scores_of_a_training_run(tmp_path: Path) -> None:
    data, model, scores = write_scenes(tmp_path / "scenes"), tmp_path / "model", tmp_path / "scores"
    train("semantic_segmentation", data, model, "--max_steps", "1", "--eval_strategy", "no")
    before = contents(model, "validation_*")
    options = {"report": lambda _: None, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    with pytest.raises(ValueError, match=r"validation_.* exists and was not written by this command"):
        hf_vit.evaluate(model, data, output_dir=model, overwrite=True, **options)
    assert contents(model, "validation_*") == before
    first = hf_vit.evaluate(model, data, output_dir=scores, **options)
    with pytest.raises(ValueError, match=r"validation_.* exists from an earlier run"):
        hf_vit.evaluate(model, data, output_dir=scores, **options)
    assert hf_vit.evaluate(model, data, output_dir=scores, overwrite=True, **options) == first
    # The scores of each split have their own files, so nothing is overwritten.
    hf_vit.evaluate(model, data, output_dir=scores, split="train", **options)


def test_visualize_does_not_overwrite_unrelated_files(models: Path, photos: Path) -> None:
    def visualize(photo: str, *options: str) -> None:
        words = [str(models / "classes"), str(photos / photo), "--output_dir", str(photos), "--kinds", "rollout"]
        hf_vit.cli.main(["visualize", *words, *options])

    (photos / "1_rollout.png").write_bytes(b"mine")
    with pytest.raises(SystemExit, match=r"1_rollout\.png exists and was not written by this command"):
        visualize("1.jpg", "--overwrite")
    assert (photos / "1_rollout.png").read_bytes() == b"mine"
    visualize("2.jpg")
    with pytest.raises(SystemExit, match="from an earlier run"):
        visualize("2.jpg")
    visualize("2.jpg", "--overwrite")


@pytest.mark.parametrize("name", ["a.png", "mit Leerzeichen  zwei.png", "ü.png"])
def test_files_are_recognized_by_their_content(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text("first")
    record_outputs([file])
    file.write_text("second")
    record_outputs([file])
    check_outputs([file], overwrite=True)
    copied = tmp_path / "copied"
    file.rename(copied)
    with pytest.raises(ValueError, match="was not written by this command"):
        check_outputs([copied], overwrite=True)
    check_outputs([file])  # no error is raised, because the file does not exist anymore
