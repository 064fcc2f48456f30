"""Muon, schedule-free optimizers and schedules: formulas, and resumed runs."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from hf_vit import HfViTForImageClassification
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments, make_parameter_groups
from hf_vit.training.optimizer import Muon
from hf_vit.training.publishing.model_card import describe_options

from ..helpers.models import TRAINING_CASES, small_config
from ..helpers.references import assert_identical
from ..helpers.trainings import build, collate, examples_of, flatten


def arguments(folder: Path, **options: Any) -> HfViTTrainingArguments:
    fixed = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "eval_strategy": "no", "save_strategy": "no"}
    return HfViTTrainingArguments(str(folder), per_device_train_batch_size=8, **{**fixed, **options})


def make_trainer(folder: Path, **options: Any) -> HfViTTrainer:
    """Return the trainer of a small classifier with dropout, for 4 steps by default."""
    config = small_config(hidden_dropout_prob=0.1)
    batch = TRAINING_CASES["class_numbers"].make_batch(config, 16)
    model, examples = build(HfViTForImageClassification, config), examples_of(batch)
    args = arguments(folder, **{"num_train_epochs": 2, "learning_rate": 0.01, **options})
    datasets = {"train_dataset": examples, "eval_dataset": examples}
    return HfViTTrainer(model=model, args=args, data_collator=collate, **datasets)


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator).to(parameter.dtype)


def by_singular_values(matrix: Tensor) -> Tensor:
    """Compute five Newton-Schulz steps as a polynomial of the singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


def test_muon_is_its_formula_for_matrices_of_blocks_and_adamw_for_the_rest() -> None:
    model = HfViTForImageClassification(small_config("registers")).double()
    other = copy.deepcopy(model)
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6}
    optimizer = Muon(make_parameter_groups(model, 0.1, 0.3, layer_decay=0.5, use_muon=True), **options)
    adamw = torch.optim.AdamW(make_parameter_groups(other, 0.1, 0.3, layer_decay=0.5), **options)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 2}
    expected = {name: matrix.detach().clone() for name, matrix in matrices.items() if "encoder.layers" in name}
    assert len(expected) == 3 * 4
    momenta = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for step in range(3):
        for part in (model, other):
            set_gradients(part, step)
        optimizer.step()
        adamw.step()
        for name in momenta:
            parameter = model.get_parameter(name)
            momenta[name] = 0.95 * momenta[name] + 0.05 * parameter.grad
            direction = 0.05 * parameter.grad + 0.95 * momenta[name]
            parts = direction.chunk(3) if "qkv" in name else (direction,)
            scale = 0.2 * math.sqrt(max(parts[0].shape))
            direction = torch.cat([by_singular_values(part) for part in parts]) * scale
            expected[name] = expected[name] * (1 - rates[parameter] * 0.3) - rates[parameter] * direction
    for name, parameter in model.named_parameters():
        truth = expected.get(name, other.get_parameter(name))
        torch.testing.assert_close(parameter, truth, rtol=0, atol=1e-12, msg=name)


def test_muon_steps_as_torchs_own_does() -> None:
    matrix = torch.nn.Parameter(torch.randn(12, 48, generator=torch.Generator().manual_seed(0)))
    other, bias = torch.nn.Parameter(matrix.detach().clone()), torch.nn.Parameter(torch.zeros(2))
    group = {"params": [matrix], "weight_decay": 0.1, "num_matrices": 1}
    optimizer = Muon([group, {"params": [bias]}], lr=0.1)
    theirs = torch.optim.Muon([other], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        matrix.grad = torch.randn(12, 48, generator=torch.Generator().manual_seed(step))
        other.grad = matrix.grad.clone()
        optimizer.step()
        theirs.step()
    torch.testing.assert_close(matrix, other, rtol=0, atol=1e-3)  # the reference takes steps of 0.1 in bfloat16


def test_a_scaler_skips_the_steps_of_muon_that_overflow() -> None:
    model = HfViTForImageClassification(small_config())
    optimizer = Muon(make_parameter_groups(model, 0.1, 0.1, use_muon=True), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    begun = flatten(list(model.parameters()))
    for gradient in (float("inf"), 1.0):
        before = scaler.get_scale()
        scaler.scale(torch.zeros(()))
        set_gradients(model, 0)
        model.classifier.bias.grad[0] = gradient
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(flatten(list(model.parameters())), begun)
        assert moved == math.isfinite(gradient)
        assert (scaler.get_scale() < before) == (not moved)


class UnderDeepSpeed(HfViTTrainer):
    """A trainer that behaves as if DeepSpeed held the weights."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.is_deepspeed_enabled = True


@pytest.mark.parametrize(("name", "value"), [("use_muon", True), ("ema_decay", 0.9)])
def test_what_needs_the_weights_is_refused_under_deepspeed(name: str, value: object, tmp_path: Path) -> None:
    model = HfViTForImageClassification(small_config())
    with pytest.raises(ValueError, match=f"{name}={value} works under DDP and FSDP2, not under DeepSpeed"):
        UnderDeepSpeed(model=model, args=arguments(tmp_path, **{name: value}))


SCHEDULE_FREE = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "warmup_steps": 0.5}
OPTIMIZERS = {"muon": {"use_muon": True, "layer_decay": 0.7}, "schedule_free": {**SCHEDULE_FREE, "layer_decay": 0.7}}


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_training_goes_on_from_a_checkpoint_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=3, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 4
        results.append((trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()))
    assert_identical(results[1], results[0])


class StepRecorder(TrainerCallback):
    """Record the averaged weights x of a schedule-free optimizer from the trained ones: y = 0.1 z + 0.9 x."""

    def __init__(self) -> None:
        self.averages: dict[int, Tensor] = {}
        self.trained: dict[int, Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        parameters = list(model.parameters())
        trained = flatten(parameters)
        steps = flatten([optimizer.optimizer.state[parameter]["z"] for parameter in parameters])
        self.trained[state.global_step] = trained
        self.averages[state.global_step] = (trained - 0.1 * steps) / 0.9


def test_schedule_free_averages_are_saved_evaluated_and_left_behind(tmp_path: Path) -> None:
    recorder = StepRecorder()
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2, **SCHEDULE_FREE)
    trainer.add_callback(recorder)
    trainer.train()
    assert {group["warmup_steps"] for group in trainer.optimizer.param_groups} == {2}
    names = [name for name, _ in trainer.model.named_parameters()]
    for step in (2, 4):
        assert (recorder.averages[step] - recorder.trained[step]).abs().max() > 1e-4
        saved = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        saved_weights = flatten([saved[name] for name in names])
        torch.testing.assert_close(saved_weights, recorder.averages[step], rtol=0, atol=1e-6)
    left = flatten(list(trainer.model.parameters()))
    assert torch.equal(left, saved_weights)
    trainer.evaluate()
    assert torch.equal(flatten(list(trainer.model.parameters())), left)


def test_the_best_model_of_a_schedule_free_training_stays_as_it_was_saved(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1, "max_steps": 3}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    # The learning rate is high, so that the last model is not the best.
    trainer = make_trainer(tmp_path, **options, **{**SCHEDULE_FREE, "learning_rate": 1.0})
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-3"
    trainer.evaluate()
    saved = load_file(best / "model.safetensors")
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, saved[name]), name


def cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


STABLE = "warmup_stable_decay"
# Learning rates of ten steps, two of them warmup.
CURVES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear": ({"lr_scheduler_type": "linear"}, [0, 1 / 2, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    "cosine": ({}, [0, 1 / 2, *(cosine(step / 8) for step in range(8))]),
    "constant_with_warmup": ({"lr_scheduler_type": "constant_with_warmup"}, [0, 1 / 2, *[1] * 8]),
    "constant": ({"lr_scheduler_type": "constant"}, [1] * 10),
    # The last fifth is a cosine decay.
    "warmup_stable_decay": ({"lr_scheduler_type": STABLE}, [0, 1 / 2, *[1] * 7, 1 / 2]),
    "decay_in_steps": (
        {"lr_scheduler_type": STABLE, "decay_steps": 4, "lr_scheduler_kwargs": {"decay_type": "linear"}},
        [0, 1 / 2, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4],
    ),
    "decay_of_the_library": (
        {"lr_scheduler_type": STABLE, "lr_scheduler_kwargs": {"num_decay_steps": 2, "min_lr_ratio": 0.5}},
        [1 / 2, 3 / 4, *[1] * 7, 3 / 4],
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_learning_rates_follow_their_curve(name: str, tmp_path: Path) -> None:
    options, curve = CURVES[name]
    trainer = make_trainer(tmp_path, learning_rate=0.1, warmup_steps=0.2, layer_decay=0.5, **options)
    trainer.create_optimizer_and_scheduler(10)
    rates = []
    for _ in range(10):
        rates.append([group["lr"] / group["lr_scale"] for group in trainer.optimizer.param_groups])
        logs = {"learning_rate": trainer._get_learning_rate()}  # the Trainer logs the same value
        trainer.log(logs)
        assert logs["learning_rate"] == pytest.approx(rates[-1][-1])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    torch.testing.assert_close(torch.tensor(rates) / 0.1, torch.tensor(curve)[:, None].expand(10, 10).float())


def test_a_decay_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lr_scheduler_type="warmup_stable_decay", warmup_steps=5, decay_steps=0.6)
    with pytest.raises(ValueError, match=r"5 warm-up steps and decay_steps=0\.6 exceed the 10 steps"):
        trainer.create_optimizer_and_scheduler(10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_decay": 1.5}, r"layer_decay=1\.5 must lie in \(0, 1\]"),
        ({"head_lr_multiplier": 0.0}, r"head_lr_multiplier=0\.0 must be more than 0"),
        ({"trainable_blocks": -1}, "trainable_blocks=-1 must be at least 0"),
        ({"decay_steps": -0.5}, r"decay_steps=-0\.5 must be at least 0"),
        ({"use_muon": True, "optim": "sgd"}, "use_muon=True requires AdamW for the other weights, not optim=sgd"),
        ({"optim": "schedule_free_adamw"}, r"lr_scheduler_type=cosine\. Say --lr_scheduler_type constant"),
    ],
)
def test_values_that_do_not_fit_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


def test_a_card_says_what_was_optimized_how(tmp_path: Path) -> None:
    args = arguments(tmp_path, use_muon=True, layer_decay=0.75, trainable_blocks=2)
    assert describe_options(args) == {
        "matrices of blocks": "Muon",
        "learning rate from layer to layer": "x 0.75",
        "blocks that learn": "the last 2",
    }
    assert describe_options(arguments(tmp_path)) == {}
