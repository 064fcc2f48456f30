"""Test averaged weights: their values, their evaluation, and how they are saved and resumed."""

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.tasks import ImageClassification
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments, last_checkpoint
from hf_vit.training.callbacks.ema import WeightAverage
from hf_vit.training.checkpoints import find_resume_error
from hf_vit.training.hub import check_upload, list_upload

from ..helpers import distributed
from ..helpers.averaged_shards import EMA_DECAY, EMA_STEPS, small_model, train_by_hand, train_with_muon
from ..helpers.dense_trainings import A_FEW_STEPS, run_task, write_scenes
from ..helpers.fresh import run_without_package
from ..helpers.hub import serve
from ..helpers.options import evaluate, run
from ..helpers.references import assert_close, assert_identical
from ..helpers.teachers import small_distillation
from ..helpers.trainings import (
    GLOBAL_BATCH,
    KILL_STEP,
    SAVE_STEPS,
    averages,
    averaging_trainer,
    collate,
    examples_of,
    flatten,
    logged,
    model_and_batch,
    training_arguments,
)
from ..scripts.test_end_to_end import write_photos


class WeightRecorder(TrainerCallback):
    """Record the initial weights and the weights after each step."""

    def __init__(self) -> None:
        self.weights: list[list[float]] = []

    def on_train_begin(self, *_: Any, model: nn.Module, **kwargs: Any) -> None:
        self.weights.append(flatten(list(model.parameters())).double().tolist())

    on_optimizer_step = on_train_begin


def averaged_by_hand(steps: list[list[float]], decay: float) -> Tensor:
    """Return the averaged weights after all steps, computed element by element."""
    average, *later = steps
    for number, weights in enumerate(later, start=1):
        kept = min((1 + number) / (10 + number), decay)
        average = [kept * old + (1 - kept) * new for old, new in zip(average, weights, strict=True)]
    return torch.tensor(average, dtype=torch.float64)


def test_the_average_moves_once_at_each_step_of_the_optimizer(tmp_path: Path) -> None:
    recorder, accumulated = WeightRecorder(), {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = averaging_trainer(tmp_path, max_steps=EMA_STEPS, **accumulated)
    trainer.add_callback(recorder)
    trainer.train()
    assert len(recorder.weights) == 1 + EMA_STEPS
    expected = averaged_by_hand(recorder.weights, EMA_DECAY)
    result = averages(trainer)
    assert_close(result["average"].double(), expected, 1e-6, "average")
    for other in averaged_by_hand(recorder.weights, 1.0), averaged_by_hand(recorder.weights[:-1], EMA_DECAY):
        assert (other - expected).abs().max() > 1e-3
    assert torch.equal(result["weights"].double(), torch.tensor(recorder.weights[-1], dtype=torch.float64))


def test_small_steps_of_half_precision_weights_add_up(tmp_path: Path) -> None:
    model = small_model().bfloat16()
    weight = model.classifier.bias
    with torch.no_grad():
        weight.fill_(1.0)
        average = WeightAverage(model, decay=0.999)
        weight.fill_(2.0)
    for step in range(10_000, 10_010):
        average.update(step)
    expected = torch.full_like(weight, 2 - 0.999**10, dtype=torch.float32)
    assert_close(average.averages[weight], expected, 1e-5, "average")
    model.save_pretrained(tmp_path, state_dict=dict(average.whole_weights()))
    again = WeightAverage(model, decay=0.999)
    again.load(tmp_path)
    assert_identical([*again.averages.values()], [*average.averages.values()])


def test_frozen_weights_and_buffers_are_those_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    average = WeightAverage(model, decay=0.5)
    model(torch.randn(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.update(100)
    whole, state = dict(average.whole_weights()), model.state_dict()
    assert whole.keys() == state.keys()
    assert len(average.averages) == 4
    for name, value in state.items():
        trains = name.startswith("2.") or name in ("1.weight", "1.bias")
        assert torch.equal(whole[name], value - 0.5 if trains else value), name


def test_distillation_projection_is_not_averaged(tmp_path: Path) -> None:
    model, batch = model_and_batch("class_numbers", GLOBAL_BATCH)
    options = {"ema_decay": 0.5, "eval_strategy": "no", "report_to": "none", "max_steps": 1}
    trainer = HfViTTrainer(
        model=model,
        distillation=small_distillation("features", model),
        args=training_arguments(tmp_path, HfViTTrainingArguments, **options),
        train_dataset=examples_of(batch),
        data_collator=collate,
    )
    trainer.train()
    trainer.save_model()
    assert trainer.distillation.weights()
    assert load_file(tmp_path / "ema" / "model.safetensors").keys() == model.state_dict().keys()


# Type of training results: the output folder, and the results of each process
Runs = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("two_processes")
    distributed.finish(distributed.start("average_on_processes", folder, processes=2), folder)
    return folder, [torch.load(folder / f"process_{rank}.pt") for rank in range(2)]


def test_two_processes_have_the_average_of_one(two_processes: Runs, tmp_path: Path) -> None:
    _, (first, second) = two_processes
    trainer = averaging_trainer(tmp_path, max_steps=EMA_STEPS)
    trainer.train()
    for name, value in averages(trainer).items():
        assert torch.equal(first["ddp"][name], second["ddp"][name])
        assert_close(first["ddp"][name], value, 1e-5, name)
    scores = trainer.evaluate()
    for name in ("eval_loss", "eval_ema_loss", "eval_accuracy", "eval_ema_accuracy"):
        assert first["metrics"][name] == second["metrics"][name]
        assert first["metrics"][name] == pytest.approx(scores[name], abs=1e-4)
    assert abs(scores["eval_loss"] - scores["eval_ema_loss"]) > 1e-3


def test_average_of_sharded_weights_equals_the_unsharded_average(two_processes: Runs) -> None:
    folder, results = two_processes
    model = small_model()
    average, said = train_by_hand(model)
    assert (said["raw"] - said["averaged"]).abs().max() > 0.01
    whole = {"raw": model.state_dict(), "averaged": dict(average.whole_weights())}
    for name, weights in whole.items():
        opened = HfViTForImageClassification.from_pretrained(folder / name)
        for key, weight in opened.state_dict().items():
            assert_close(weight, weights[key], 1e-5, f"{name} {key}")
        assert (folder / name / "modeling_hf_vit.py").is_file()
    for result in (process["fsdp"] for process in results):
        for name, logits in said.items():
            assert_close(result["said"][name], logits, 1e-5, name)
        first, again = result["parts"]
        assert sum(part.numel() for part in first) < result["whole"]
        assert_identical(again, first)


def test_muon_with_sharded_weights_equals_unsharded_muon(two_processes: Runs) -> None:
    _, results = two_processes
    begun, model = small_model().double().state_dict(), small_model().double()
    train_with_muon(model)
    for name, weight in model.state_dict().items():
        assert_close(results[0]["muon"][name], weight, 1e-9, name)
    moved = {name for name, weight in model.state_dict().items() if (weight - begun[name]).abs().max() > 0.01}
    assert moved >= {name for name, _ in model.model.encoder.named_parameters(prefix="model.encoder")}


def test_a_killed_training_ends_in_the_average_of_one_that_went_through(two_processes: Runs) -> None:
    results = torch.load(two_processes[0] / "alone.pt")
    assert results["killed_by"] == signal.SIGKILL
    assert Path(results["checkpoint"]).name == f"checkpoint-{KILL_STEP // SAVE_STEPS * SAVE_STEPS}"
    assert_identical(results["killed"], results["whole"])


def test_a_checkpoint_without_the_average_is_not_complete(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    averaging_trainer(tmp_path, **options).train()
    (tmp_path / "checkpoint-4" / "ema" / "model.safetensors").unlink()
    assert find_resume_error(tmp_path / "checkpoint-4") == "it has no ema/model.safetensors"
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    averaging_trainer(tmp_path / "raw", ema_decay=None, **options).train()
    assert not (tmp_path / "raw" / "checkpoint-4" / "ema").exists()
    with pytest.raises(ValueError, match=r"has no average of .* If the run was started without --ema_decay"):
        averaging_trainer(tmp_path / "raw", **options).train(str(tmp_path / "raw" / "checkpoint-2"))


def test_an_evaluation_leaves_the_weights_alone_even_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = averaging_trainer(tmp_path, max_steps=EMA_STEPS)
    trainer.train()
    before = averages(trainer)
    monkeypatch.setattr(HfViTTrainer, "prediction_step", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        trainer.evaluate()
    assert_identical(averages(trainer), before)


CONFIG = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
RECIPE = {
    **{"preset": "tiny", "per_device_train_batch_size": 8, "num_train_epochs": 3, "learning_rate": 3e-3},
    "config_overrides": CONFIG,
    **{"use_cpu": True, "report_to": "none", "disable_tqdm": True, "ema_decay": 0.7, "choose_defaults": False},
    **{"metric_for_best_model": "ema_loss", "load_best_model_at_end": True},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains photos, and the output of a training run in the subfolder user/model."""
    folder = tmp_path_factory.mktemp("root")
    write_photos(folder / "photos" / "train", 16, seed=0)
    write_photos(folder / "photos" / "test", 5, seed=1)
    paths = {"dataset_name": str(folder / "photos"), "output_dir": str(folder / "user" / "model")}
    said: list[str] = []
    run(ImageClassification, [{**RECIPE, **paths}], None, report=said.append)
    (folder / "said.txt").write_text("\n".join(said))
    return folder


def test_every_evaluation_scores_both_and_either_chooses_the_best(root: Path) -> None:
    folder = root / "user" / "model"
    state = json.loads((folder / "trainer_state.json").read_text())
    evaluations = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert len(evaluations) == 3
    assert all(entry.keys() >= {"eval_ema_loss", "eval_ema_accuracy", "eval_ema_macro_f1"} for entry in evaluations)
    best = min(evaluations, key=lambda entry: entry["eval_ema_loss"])
    assert (state["best_global_step"], state["best_metric"]) == (best["step"], best["eval_ema_loss"])
    for place in ("model.safetensors", "ema/model.safetensors"):
        assert_identical(load_file(folder / place), load_file(folder / f"checkpoint-{best['step']}" / place))


def test_the_card_has_both_scores(root: Path) -> None:
    folder = root / "user" / "model"
    raw, averaged = (json.loads((folder / place / "test_scores.json").read_text()) for place in (".", "ema"))
    assert raw["loss"] != averaged["loss"]
    card = ModelCard.load(folder / "README.md")
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == raw
    assert "| metric | this model | averaged weights (`ema/`) | most frequent class |" in card.content
    cells = [f"{scores['loss']:.4f}" for scores in (raw, averaged)]
    cells = [f"**{cell}**" if cell == min(cells) else cell for cell in cells]
    assert f"| loss | {' | '.join(cells)} | " in card.content
    is_behind = "This model is behind averaged weights (`ema/`) in loss" in card.content
    assert is_behind is (averaged["loss"] < raw["loss"])
    assert "| average of the weights | exponential, decay 0.7, in `ema/` |" in card.content
    assert f"Averaged weights: loss {averaged['loss']:.4f}, accuracy" in (root / "said.txt").read_text()


def test_the_saved_average_has_the_scores_of_the_report(root: Path) -> None:
    folder = root / "user" / "model" / "ema"
    model, processor = HfViTForImageClassification.from_pretrained(folder), HfViTImageProcessor.from_pretrained(folder)
    scores, losses = json.loads((folder / "test_scores.json").read_text()), []
    for file in sorted((root / "photos" / "test").glob("*/*.png")):
        inputs = processor(Image.open(file), return_tensors="pt")
        labels = torch.tensor([model.config.label2id[file.parent.name]])
        with torch.no_grad():
            losses.append(float(model.eval()(**inputs, labels=labels).loss))
    assert math.fsum(losses) / len(losses) == pytest.approx(scores["loss"], abs=1e-4)


OPEN = """
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
local, saved = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
pipe = pipeline("image-classification", model=local, trust_remote_code=True)
options = {"subfolder": "ema", "trust_remote_code": True}
piped = pipeline(
    "image-classification", model="user/model", model_kwargs={"subfolder": "ema"}, trust_remote_code=True
)
model = AutoModelForImageClassification.from_pretrained("user/model", **options)
processor = AutoImageProcessor.from_pretrained("user/model", **options)
for opened in pipe.model, piped.model, model:
    assert type(opened).__module__.startswith("transformers_modules"), type(opened)
    with torch.no_grad():
        assert torch.equal(opened.eval()(saved["images"]).logits, saved["logits"])
assert type(processor).__name__ == type(pipe.image_processor).__name__
print(pipe(__import__("PIL.Image").Image.new("RGB", (20, 20)), top_k=1)[0]["label"])
"""


def test_the_saved_average_opens_without_the_package_and_from_the_hub(root: Path, tmp_path: Path) -> None:
    folder = root / "user" / "model"
    model = HfViTForImageClassification.from_pretrained(str(folder), subfolder="ema").eval()
    assert model.config.label2id.keys() == {"blue", "green", "red"}
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.save({"images": images, "logits": model(images).logits}, tmp_path / "data.pt")
    with serve(root) as hub:
        arguments = (str(folder / "ema"), str(tmp_path / "data.pt"))
        process = run_without_package(OPEN, tmp_path / "work", *arguments, **hub.client)
    assert process.stdout.split()[-1] in model.config.label2id


def test_average_is_uploaded_with_the_model(root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "user" / "model", tmp_path / "model")
    check_upload(folder)
    names = {path.relative_to(folder).as_posix() for path in list_upload(folder)}
    assert {"model.safetensors", "ema/model.safetensors", "ema/config.json", "ema/modeling_hf_vit.py"} <= names
    assert {name.split("/")[0] for name in names if "/" in name} == {"ema"}
    (folder / "ema" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"The weights model\.safetensors are missing in .*ema"):
        check_upload(folder)


def test_tasks_with_an_evaluator_evaluate_both(tmp_path: Path) -> None:
    data, folder = write_scenes(tmp_path / "scenes"), tmp_path / "model"
    evaluated = ("--eval_strategy", "steps", "--eval_steps", "1", "--ema_decay", "0.7")
    best = ("--metric_for_best_model", "ema_mean_iou")
    run_task("semantic_segmentation", data, folder, *A_FEW_STEPS, *evaluated, *best)
    raw, averaged = (json.loads((folder / place / "validation_scores.json").read_text()) for place in (".", "ema"))
    assert raw["loss"] != averaged["loss"]
    state = json.loads((folder / "trainer_state.json").read_text())
    *_, last = (entry for entry in state["log_history"] if "eval_loss" in entry)
    assert {name: last[f"eval_{name}"] for name in raw} == pytest.approx(raw)
    assert {name: last[f"eval_ema_{name}"] for name in averaged} == pytest.approx(averaged)
    arguments = ["--model_name_or_path", folder / "ema", "--dataset_name", data, "--output_dir", tmp_path / "scored"]
    evaluate([*map(str, arguments), "--use_cpu"], report=lambda _: None)
    again = json.loads((tmp_path / "scored" / "validation_scores.json").read_text())
    assert again == pytest.approx(averaged, abs=1e-5)
    assert "averaged weights (`ema/`)" in (folder / "README.md").read_text()


def test_averaging_an_unsupported_model_raises(tmp_path: Path) -> None:
    class NoModelOfTheLibrary(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            return self.model(**inputs)

    trainer = averaging_trainer(tmp_path)
    trainer.model = trainer.model_wrapped = NoModelOfTheLibrary(trainer.model)
    with pytest.raises(ValueError, match="nor models of the class NoModelOfTheLibrary"):
        trainer.train()
    assert not logged(trainer, "loss")
