"""Test the evaluation of features: agreement with scikit-learn, and the printed table."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score

from hf_vit.evaluation.features import classify_by_neighbors, retrieval_average_precision
from hf_vit.features import evaluate_features, open_train_and_test

from ..helpers.datasets import write_pictures
from ..helpers.features import extract_to, rows_of, save_encoder
from ..helpers.options import call_command
from ..helpers.pretraining import write_colors


def test_average_precision_is_that_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, gallery = (torch.randn(count, 5, generator=generator) for count in (12, 40))
    gallery[20:30] = gallery[:10]  # duplicate features have equal similarities
    classes, others = (torch.randint(3, (count,), generator=generator) for count in (12, 40))
    found = retrieval_average_precision(queries, classes, gallery, others)
    similarity = F.normalize(queries, dim=1) @ F.normalize(gallery, dim=1).T
    expected = [average_precision_score(others == c, s) for c, s in zip(classes, similarity, strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert np.ptp(expected) > 0.1
    # A query image is excluded from its own retrieval results.
    images, classes = torch.randn(10, 5, generator=generator), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3])
    own = torch.arange(10)
    found = retrieval_average_precision(images, classes, images, classes, own=own)
    for number, precision in enumerate(found[:-1].tolist()):
        rest = own != number
        alone = retrieval_average_precision(images[[number]], classes[[number]], images[rest], classes[rest])
        assert precision == pytest.approx(float(alone), abs=1e-6)
    assert found[-1].isnan()  # no other image has the class of the last image


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workplace")
    write_colors(folder / "colors")
    save_encoder(folder / "encoder")
    extract_to(folder / "encoder", folder / "colors", folder / "features", features=["patches", "mean", "pixels"])
    return folder


def test_the_script_tells_the_scores_of_each_feature(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("features evaluate", [str(workplace / "features")])
    printed = capsys.readouterr().out.splitlines()
    found = json.loads((workplace / "features" / "evaluation.json").read_text())
    assert (found["images"], found["splits"], found["classes"]) == ([36, 21], ["train", "test"], 3)
    scores = found["scores"]
    # Patch features are not evaluated, because they have several vectors per image.
    assert list(scores) == ["mean", "pixels", "most frequent class"]
    assert scores["most frequent class"] == {"knn_accuracy": 1 / 3, "linear_probe_accuracy": 1 / 3}
    known, features = (rows_of(workplace / "features", split) for split in ("train", "test"))
    tensors = [torch.tensor(table["pixels"].to_pylist()) for table in (features, known)]
    numbers = {"blue": 0, "green": 1, "red": 2}
    truth, classes = (torch.tensor([numbers[label.as_py()] for label in t["label"]]) for t in (features, known))
    accuracy = (classify_by_neighbors(*tensors, classes) == truth).double().mean()
    assert scores["pixels"]["knn_accuracy"] == float(accuracy)
    # Each image has a single color, so the images are easy to classify.
    assert min(scores["pixels"][name] for name in ("linear_probe_accuracy", "retrieval_map")) > 0.8
    assert printed[0] == "21 test images and 36 train images of 3 classes"
    assert printed[3].split()[:2] == ["pixels", f"{float(accuracy):.2%}"]


def test_two_folders_score_as_one_with_both_splits(workplace: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        extract_to(workplace / "encoder", workplace / "colors" / split, tmp_path / split, features=["mean", "pixels"])
    # The second run does not overwrite the output of the first one.
    for _ in range(2):
        call_command("features evaluate", [str(tmp_path / "train"), str(tmp_path / "test")])
    files = [tmp_path / "test" / f"evaluation-beside-train{end}" / "evaluation.json" for end in ("", "-2")]
    apart, again = (json.loads(file.read_text()) for file in files)
    assert apart == again
    together = evaluate_features(*open_train_and_test([workplace / "features"]))
    for feature in ("mean", "pixels"):
        # The tolerance covers rounding errors of features, which depend on the batch size.
        assert apart["scores"][feature] == pytest.approx(together["scores"][feature], abs=1e-3)


def test_what_cannot_be_evaluated_is_reported(workplace: Path, tmp_path: Path) -> None:
    encoder, other = workplace / "encoder", save_encoder(tmp_path / "model", seed=1)
    write_pictures(tmp_path / "photos", "1.png", "2.png")
    write_pictures(tmp_path / "pets", "cat/1.png", "dog/2.png")
    cut = extract_to(encoder, workplace / "colors", tmp_path / "cut")
    (cut / "test-00001-of-00003.parquet").unlink()
    photos = extract_to(encoder, tmp_path / "photos", tmp_path / "of_photos")
    pets, of_other = (extract_to(own, tmp_path / "pets", tmp_path / f"by_{own.name}") for own in (encoder, other))
    for folders, message in (
        ([cut], r"1 of 3 files in .* are missing, or .*: 'test-00001-of-00003\.parquet'"),
        ([photos, photos], "have no class labels"),
        ([pets], "contains the splits 'train', but not test or validation"),
        ([pets, of_other], "come from two models, .* with different weights"),
        ([tmp_path], "contains no features"),
    ):
        with pytest.raises(SystemExit, match=message):
            call_command("features evaluate", list(map(str, folders)))
