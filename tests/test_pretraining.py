"""Test `hf-vit pretrain`, which trains three models in sequence and compares the two trained with labels."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers import AutoModelForImageClassification

import hf_vit
from hf_vit import cli, pretrain, pretraining
from hf_vit.pretraining import PretrainingResult
from hf_vit.runs.plan import budget, plan
from hf_vit.training.callbacks import progress

from .helpers.datasets import write_class_folders


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 8}
OPTIONS = {"image_size": 16, "config_overrides": SMALL, "per_device_train_batch_size": 4, "dataloader_num_workers": 0}
OPTIONS |= {"use_cpu": True, "report_to": "none"}


@dataclass
class Trainings:
    """Replacement for `train` that records its calls and returns fixed scores for each output folder."""

    scores: dict[str, float] = field(default_factory=lambda: {"tuned": 0.5, "baseline": 0.25, "encoder": 0.0})
    metric: str = "accuracy"
    greater_is_better: bool = True
    missing: bool = False  # whether labels are missing
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, *words: Any, report: Any, model: Any = None, **options: Any) -> Any:
        if options.get("dry_run"):
            if self.missing:
                raise ValueError("No classes are there.")
            return None
        self.calls.append(((*words, model), options))
        folder = options["output_dir"]
        return SimpleNamespace(
            scores={self.metric: self.scores[folder.name]},
            output_dir=folder,
            metric=self.metric,
            greater_is_better=self.greater_is_better,
            num_scored=100,
            model=SimpleNamespace(config=SimpleNamespace(image_size=[128, 128], patch_size=16, hidden_size=64)),
        )


def call(monkeypatch: pytest.MonkeyPatch, trainings: Trainings, *words: Any, **options: Any) -> tuple[Any, list[str]]:
    monkeypatch.setattr(pretraining, "train", trainings)
    said: list[str] = []
    return pretrain(*words, report=said.append, **options), said


def test_labeled_training_starts_from_the_pretrained_encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainings = Trainings()
    result, said = call(monkeypatch, trainings, "photos", "labeled", minutes=50, output_dir=tmp_path / "out", seed=3)
    words = [called[0] for called in trainings.calls]
    encoder, task = tmp_path / "out" / "encoder", "image-classification"
    assert words == [(task, "labeled", None), ("joint-embedding", "photos", None), (task, "labeled", encoder)]
    assert [called[1]["minutes"] for called in trainings.calls] == pytest.approx([10, 30, 10])
    # Both models trained with labels use this image size and patch size.
    seen = {"image_size": [128, 128], "patch_size": 16}
    assert [called[1].get("config_overrides") for called in trainings.calls] == [None, None, seen]
    assert {called[1]["seed"] for called in trainings.calls} == {3}
    assert result.gain == pytest.approx(25)
    assert result.best is result.tuned
    # For 100 images, two standard errors of the difference of the accuracies are
    # 2 · √((0.5² + 0.25 · 0.75) / 100) = 0.132.
    assert "helped by 25.0 points: accuracy 0.5000 with it, 0.2500 without, on 100 images (" in said[-1]
    assert "differences below 13.2 points may be chance" in said[-1]


def test_a_saved_model_or_geometry_is_that_of_all_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainings = Trainings()
    _, said = call(monkeypatch, trainings, "photos", model="saved", output_dir=tmp_path / "out", lora_rank=4)
    assert [called[0][-1] for called in trainings.calls] == ["saved", "saved", tmp_path / "out" / "encoder"]
    assert [called[1].get("lora_rank") for called in trainings.calls] == [None, 4, None]
    assert "Baseline without pretraining: image-classification from saved, 12 min." in said
    cases = (
        ({"image_size": 96}, {"patch_size": 16}),
        ({"image_size": None, "config_overrides": None}, {"image_size": [128, 128], "patch_size": 16}),
        ({"config_overrides": {"patch_size": 8}}, {"image_size": [128, 128], "patch_size": 8}),
        ({"config_overrides": '{"patch_size": 8}'}, {"image_size": [128, 128], "patch_size": 8}),
    )
    for number, (options, expected) in enumerate(cases):
        trainings = Trainings()
        call(monkeypatch, trainings, "photos", output_dir=tmp_path / str(number), **options)
        assert trainings.calls[-1][1]["config_overrides"] == expected


def test_a_loss_and_missing_labels_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = Trainings(metric="abs_rel", greater_is_better=False)
    result, said = call(monkeypatch, errors, "rooms", task="depth-estimation", output_dir=tmp_path / "out")
    assert result.gain == pytest.approx(-25)
    assert "cost 25.0 points: abs_rel 0.5000 with it, 0.2500 without." in said[-1]
    assert f"Recommended model: {tmp_path / 'out' / 'baseline'}" in said[-1]
    result, said = call(monkeypatch, Trainings(missing=True), ["a", "b"], output_dir=tmp_path / "unlabeled")
    assert (result.gain, result.best) == (None, None)
    assert any("No labels" in line and "No classes are there." in line for line in said)
    # If the labeled dataset was passed explicitly, missing classes raise an error.
    with pytest.raises(ValueError, match="No classes are there"):
        call(monkeypatch, Trainings(missing=True), "a", "b", output_dir=tmp_path / "other")


def test_invalid_data_and_several_processes_raise_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class_folders(tmp_path / "labeled", ["cat", "dog"])
    with pytest.raises((OSError, ValueError), match="missing"):
        pretrain(tmp_path / "missing", tmp_path / "labeled", output_dir=tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="need a single process"):
        pretrain("photos")


def test_pretraining_resumes_an_existing_output_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "out" / "encoder" / "checkpoint-7").mkdir(parents=True)
    with pytest.raises(ValueError, match="not empty: choose another, or set resume"):
        call(monkeypatch, Trainings(), "photos", output_dir=tmp_path / "out")
    trainings = Trainings()
    call(monkeypatch, trainings, "photos", output_dir=tmp_path / "out", resume=True)
    assert [called[1].get("resume_from_checkpoint") for called in trainings.calls] == [None, "last", None]
    with pytest.raises(ValueError, match="nothing to resume"):
        call(monkeypatch, Trainings(), "photos", output_dir=tmp_path / "new", resume=True)


def test_bad_options_are_refused() -> None:
    for options, message in (
        ({"method": "dinosaur"}, "no method 'dinosaur'.*joint-embedding"),
        ({"task": "joint-embedding"}, "joint-embedding uses no labels"),
        ({"minutes": 1e-9}, "minutes=1e-09 must be at least 0.01"),
        ({"minutes": float("nan")}, "minutes=nan must be at least"),
        ({"output_dir": "/dev/null/out"}, "Nothing can be written to /dev/null/out"),
        ({"preset": "tiny"}, "preset does not apply to all three training runs.*config_overrides"),
        ({"model_name_or_path": "saved"}, "model_name_or_path does not apply"),
        ({"lora_rank": 4}, "lora_rank adapts a trained model, but none is given. Set model"),
    ):
        with pytest.raises((OSError, ValueError), match=message):
            pretrain("photos", **options)


def test_the_command_has_the_options_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("hf_vit.commands.models.pretrain", lambda **options: given.update(options))
    cli.main(["pretrain", "a", "b", "--labels", "c", "--minutes", "5", "--task", "depth-estimation"])
    assert given.pop("report")
    assert given == {"data": ["a", "b"], "labels": "c", "task": "depth-estimation", "minutes": 5.0}


@pytest.mark.slow
def test_pretraining_writes_models_and_a_recommendation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_class_folders(tmp_path / "photos", ["cat", "dog"])
    monkeypatch.chdir(tmp_path)
    # The time budget is too short for 20 steps of each training run.
    for module in (plan, progress):
        monkeypatch.setattr(module, "LEAST_STEPS", 1)
    monkeypatch.setattr(budget, "LEAST_TIMED", 1)
    said: list[str] = []
    result: PretrainingResult = hf_vit.pretrain("photos", minutes=0.3, report=said.append, **OPTIONS)
    assert result.encoder.output_dir == Path("outputs/photos-pretraining/encoder")
    assert result.tuned is not None
    assert result.baseline is not None
    assert result.tuned.model.config.hidden_size == result.baseline.model.config.hidden_size == 16
    assert result.best in (result.tuned, result.baseline)
    recipes = [yaml.safe_load((folder / "recipe.yaml").read_text()) for folder in Path().glob("outputs/*/*")]
    assert [(recipe["use_muon"], recipe["learning_rate"]) for recipe in recipes] == [(True, 4e-3)] * 3
    assert said[-1].startswith("Pretraining on your images")
    opened = AutoModelForImageClassification.from_pretrained(result.best.output_dir)
    assert opened.config.id2label == {0: "cat", 1: "dog"}
    assert result.best.pipeline(Image.open(next(Path("photos").rglob("*.png"))))[0]["label"] in ("cat", "dog")
