"""Test Muon, learning rate schedules, parameter groups and frozen parameters."""

import copy
import math
import re
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, get_scheduler

from hf_vit import HfViTForImageClassification, HfViTForSemanticSegmentation
from hf_vit.runs.model_card import describe_options
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments, make_parameter_groups
from hf_vit.training import optimizer as optimizer_module
from hf_vit.training.callbacks.progress import RunProgress
from hf_vit.training.optimizer import Muon, freeze, may_lack_gradients, orthogonalize

from ..helpers.models import DEFORMABLE, TRAINING_CASES, VARIANTS, small_config
from ..helpers.references import assert_identical
from ..helpers.trainings import build, collate, digits_trainer, examples_of, flatten, training_arguments


def arguments(folder: Path, **options: Any) -> HfViTTrainingArguments:
    return training_arguments(
        folder, HfViTTrainingArguments, **{"report_to": "none", "eval_strategy": "no", **options}
    )


def make_trainer(
    folder: Path, case: str = "class_numbers", trainer_class: type[Trainer] = HfViTTrainer, config: Any = None,
    **options: Any,
) -> Trainer:  # fmt: skip
    """Return a trainer of a small model: by default, a classifier with dropout that trains for 4 steps of 8 images."""
    training_case = TRAINING_CASES[case]
    small = small_config(**{**training_case.overrides, **(config or {"hidden_dropout_prob": 0.1})})
    model, examples = build(training_case.model_class, small), examples_of(training_case.make_batch(small, 16))
    options = {"num_train_epochs": 2, "learning_rate": 0.01, "per_device_train_batch_size": 8, **options}
    args = (arguments if trainer_class is HfViTTrainer else training_arguments)(folder, **options)
    return trainer_class(model=model, args=args, data_collator=collate, train_dataset=examples, eval_dataset=examples)


def train(folder: Path, **options: Any) -> Trainer:
    trainer = make_trainer(folder, **{"num_train_epochs": 1, "warmup_steps": 0, **options})
    trainer.train()
    return trainer


def weights(model: nn.Module) -> Tensor:
    return flatten(list(model.parameters()))


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator).to(parameter.dtype)


def by_singular_values(matrix: Tensor) -> Tensor:
    """Compute five Newton-Schulz steps by applying their polynomial to the singular values."""
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


def test_muon_steps_as_torchs_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "is_fast_in_bf16", lambda device: True)  # the reference uses bfloat16
    matrix = nn.Parameter(torch.randn(12, 48, generator=torch.Generator().manual_seed(0)))
    other = nn.Parameter(matrix.detach().clone())
    group = {"params": [matrix], "weight_decay": 0.1, "num_matrices": 1}
    optimizer = Muon([group, {"params": [nn.Parameter(torch.zeros(2))]}], lr=0.1)
    theirs = torch.optim.Muon([other], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        matrix.grad = torch.randn(12, 48, generator=torch.Generator().manual_seed(step))
        other.grad = matrix.grad.clone()
        optimizer.step()
        theirs.step()
    # The tolerance is large, because both compute in bfloat16. Each optimizer step has a size of 0.1.
    torch.testing.assert_close(matrix, other, rtol=0, atol=1e-3)


@pytest.mark.parametrize("is_fast", [False, True])
def test_muon_computes_in_bfloat16_only_where_it_is_fast(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "is_fast_in_bf16", lambda device: is_fast)
    matrices = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(0))
    error = (orthogonalize(matrices) - orthogonalize(matrices.double())).abs().max().item()
    assert (error > 1e-3) if is_fast else (error < 1e-4)


def test_a_scaler_skips_the_steps_of_muon_that_overflow() -> None:
    model = HfViTForImageClassification(small_config())
    optimizer = Muon(make_parameter_groups(model, 0.1, 0.1, use_muon=True), lr=0.1, fused=True)
    scaler, begun = torch.amp.GradScaler("cpu", init_scale=4.0), weights(model)
    for gradient, moves in ((float("inf"), False), (1.0, True)):
        before = scaler.get_scale()
        scaler.scale(torch.zeros(()))
        set_gradients(model, 0)
        model.classifier.bias.grad[0] = gradient
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weights(model), begun) is not moves
        assert (scaler.get_scale() < before) is not moves


@pytest.mark.parametrize(("name", "value"), [("use_muon", True), ("ema_decay", 0.9)])
def test_options_that_access_weights_raise_under_deepspeed(name: str, value: object, tmp_path: Path) -> None:
    class UnderDeepSpeed(HfViTTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.is_deepspeed_enabled = True

    model = HfViTForImageClassification(small_config())
    with pytest.raises(ValueError, match=f"{name}={value} supports DDP and FSDP2, but not DeepSpeed"):
        UnderDeepSpeed(model=model, args=arguments(tmp_path, **{name: value}))


def test_a_training_with_muon_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    results = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=3, layer_decay=0.7, use_muon=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 4
        results.append([each.state_dict() for each in (trainer.model, trainer.optimizer, trainer.lr_scheduler)])
    assert_identical(results[1], results[0])


# Maps a schedule to its options and the expected relative learning rates of ten steps. The first two are warmup steps.
CURVES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear": ({}, [0, 1 / 2, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    "cosine": ({}, [0, 1 / 2, *((1 + math.cos(math.pi * step / 8)) / 2 for step in range(8))]),
    "constant_with_warmup": ({}, [0, 1 / 2, *[1] * 8]),
    "constant": ({}, [1] * 10),
    # In the last fifth of the steps, the learning rate decays along a cosine.
    "warmup_stable_decay": ({}, [0, 1 / 2, *[1] * 7, 1 / 2]),
    "warmup_stable_decay in steps": (
        {"decay_steps": 4, "lr_scheduler_kwargs": {"decay_type": "linear"}},
        [0, 1 / 2, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4],
    ),
    "warmup_stable_decay of the library": (
        {"lr_scheduler_kwargs": {"num_decay_steps": 2, "min_lr_ratio": 0.5}},
        [1 / 2, 3 / 4, *[1] * 7, 3 / 4],
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_learning_rates_follow_their_curve(name: str, tmp_path: Path) -> None:
    options, curve = CURVES[name]
    options = {"lr_scheduler_type": name.split()[0], "warmup_steps": 0.2, **options}
    trainer = make_trainer(tmp_path, learning_rate=0.1, layer_decay=0.5, **options)
    trainer.create_optimizer_and_scheduler(10)
    rates = []
    for _ in range(10):
        rates.append([group["lr"] / group["lr_scale"] for group in trainer.optimizer.param_groups])
        logs = {"learning_rate": trainer._get_learning_rate()}  # the Trainer logs the same learning rate
        trainer.log(logs)
        assert logs["learning_rate"] == pytest.approx(rates[-1][-1])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    torch.testing.assert_close(torch.tensor(rates) / 0.1, torch.tensor(curve)[:, None].expand(10, 10).float())
    if "decay_steps" in options:
        trainer = make_trainer(tmp_path, **{**options, "warmup_steps": 5, "decay_steps": 0.6})
        with pytest.raises(ValueError, match=r"5 warm-up steps and decay_steps=0\.6 exceed the 10 steps"):
            trainer.create_optimizer_and_scheduler(10)


def test_a_card_says_what_was_optimized_how(tmp_path: Path) -> None:
    args = arguments(tmp_path, use_muon=True, layer_decay=0.75, trainable_blocks=2)
    expected = {"matrices of blocks": "Muon", "learning rate decay per layer": "x 0.75"}
    assert describe_options(args) == {**expected, "trained blocks": "the last 2"}
    assert describe_options(arguments(tmp_path)) == {}


KINDS = ("cosine", "linear", "polynomial", "inverse_sqrt", "warmup_stable_decay", "constant_with_warmup")


def rates_of(kind: str, warmup: float, lengths: dict[int, int]) -> list[float]:
    """Return the learning rate of each step. `lengths` maps a step to the total number of steps planned then."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    options = {"num_decay_steps": lengths[0] // 5} if kind == "warmup_stable_decay" else {}
    scheduler = get_scheduler(kind, optimizer, math.ceil(warmup * lengths[0]), lengths[0], options)
    progress = RunProgress()
    progress.follow(scheduler)
    rates = []
    for step in range(list(lengths.values())[-1]):
        if step in lengths:
            assert progress.plan(lengths[step], step) == lengths[0]
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    warmup=st.sampled_from([0.0, 0.1, 0.25, 0.5]),
    planned=st.integers(2, 60),
    changes=st.lists(st.tuples(st.floats(0.01, 0.99), st.floats(0.3, 4.0)), min_size=1, max_size=4),
)
def test_no_rate_rises_after_the_peak(kind: str, warmup: float, planned: int, changes: list[Any]) -> None:
    lengths = {0: planned}
    for share, factor in changes:
        last, length = list(lengths.items())[-1]
        step = last + max(1, int(share * (length - last)))
        if step >= length:
            break
        lengths[step] = step + max(1, int(factor * (length - step)))
    rates = rates_of(kind, warmup, lengths)
    peak = max(range(len(rates)), key=rates.__getitem__)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if kind in ("cosine", "linear"):
        assert rates[-1] == pytest.approx(0, abs=1e-6)
    unchanged = RunProgress()
    unchanged.plan(planned, 0)
    assert [unchanged.share(step) for step in range(planned + 1)] == [step / planned for step in range(planned + 1)]


@pytest.mark.parametrize(("begun", "resumed", "done"), [(4, 8, 3), (8, 4, 1), (3, 9, 2)])
def test_changed_length_continues_from_the_current_learning_rate(
    begun: int, resumed: int, done: int, tmp_path: Path
) -> None:
    def train(length: int, checkpoint: int | None) -> list[float]:
        trainer = digits_trainer(
            tmp_path, max_steps=length, warmup_steps=0.25, lr_scheduler_type="cosine", save_strategy="steps",
            save_steps=1, save_total_limit=None, per_device_train_batch_size=4,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / f"checkpoint-{checkpoint}"))
        return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]

    rates, now = train(begun, None), train(resumed, done)
    assert train(resumed, done + 1) == now
    assert len(now) == resumed
    assert now[done] == pytest.approx(rates[done])
    peak = now.index(max(now))
    assert now[peak:] == sorted(now[peak:], reverse=True)


WITHOUT_DECAY = re.compile(
    r"bias$|norm\d?\.weight$|laterals\.\d\.0\.weight$|norms\.\d\.weight$|LayerNorm\.weight$|_token$|_tokens$|"
    r"position_embeddings?(\.weight)?$|\.scale$|logit_scale$|"
    r"queries\.weight$|query_boxes\.weight$|query_features\.weight$|\.probe$|"
    r"(token|word|token_type)_embeddings?\.weight$"
)
# Options of heads that do not use the last encoder blocks, so that these blocks do not contribute to the loss.
UNUSED: dict[str, list[dict[str, Any]]] = {
    "semantic": [{"segmentation_config": {"head": "simple", "out_indices": [1, 2]}}],
    "relative_depth": [{"depth_config": {"head": "conv", "out_indices": [2]}}],
    "deformable": [{"detection_config": {**DEFORMABLE, "out_indices": [1, 2]}}],
}


def rates(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, float]:
    """Return the learning rate of each parameter, keyed by parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: group["lr"] for group in groups for parameter in group["params"]}


def test_all_parameters_are_in_one_group_and_matrices_alone_have_weight_decay() -> None:
    models = [case.model_class(small_config(**case.overrides)) for case in TRAINING_CASES.values()]
    for model in (*models, *(HfViTForImageClassification(small_config(variant)) for variant in VARIANTS)):
        groups = make_parameter_groups(model, 1e-3, 0.05)
        assert [group["name"] for group in groups if group["weight_decay"]] == ["embeddings to head"]
        assert len(groups) == 2
        names = {parameter: name for name, parameter in model.named_parameters()}
        grouped = [(names[parameter], group) for group in groups for parameter in group["params"]]
        assert sorted(name for name, _ in grouped) == sorted(names.values())
        for name, group in grouped:
            assert (group["weight_decay"] == 0) == bool(WITHOUT_DECAY.search(name)), name


def test_each_layer_learns_more_slowly_than_the_one_after_it() -> None:
    # The encoder has three blocks.
    model = HfViTForImageClassification(small_config("registers", use_pre_layernorm=True))
    rate = rates(model, make_parameter_groups(model, 0.1, 0.05, layer_decay=0.5, head_lr_multiplier=3.0))
    expected = {
        "model.embeddings.cls_token": 0.1 / 16,
        "model.embeddings.patch_embeddings.projection.weight": 0.1 / 16,
        "model.pre_norm.weight": 0.1 / 16,
        "model.encoder.layers.0.attention.qkv.weight": 0.1 / 8,
        "model.encoder.layers.1.layer_scale1.scale": 0.1 / 4,
        "model.encoder.layers.2.mlp.fc2.bias": 0.1 / 2,
        "model.norm.weight": 0.1 / 2,
        "model.pooler.dense.weight": 0.3,
        "classifier.weight": 0.3,
        "distillation_classifier.bias": 0.3,
    }
    assert {name: rate[name] for name in expected} == pytest.approx(expected)
    factors = {"classifier.": 0.5, "model.": 0.2}
    groups = make_parameter_groups(model, 0.1, 0.05, layer_decay=0.5, head_lr_multiplier=3.0, lr_factors=factors)
    rate = rates(model, groups)
    assert rate["classifier.weight"] == pytest.approx(0.05)
    assert rate["model.norm.weight"] == pytest.approx(0.2 * expected["model.norm.weight"])
    assert rate["distillation_classifier.bias"] == pytest.approx(0.3)


def test_blocks_of_heads_learn_as_heads() -> None:
    for case in ("mae", "deformable", "queries", "universal", "sigmoid"):
        model = TRAINING_CASES[case].model_class(small_config(**TRAINING_CASES[case].overrides))
        groups = make_parameter_groups(model, 0.1, 0.05, layer_decay=0.5)
        for name, rate in rates(model, groups).items():
            assert (rate == 0.1) == (not name.startswith("model.")), name
        layers = {group["name"].removesuffix(", no decay") for group in groups}
        assert layers <= {"embeddings", "block 0", "block 1", "block 2", "head"}


def test_groups_keep_their_factor_in_checkpoints_and_schedules() -> None:
    model = HfViTForImageClassification(small_config())
    optimizer, other = (
        torch.optim.AdamW(make_parameter_groups(model, 0.1, 0.05, layer_decay=decay)) for decay in (0.5, 0.9)
    )
    other.load_state_dict(optimizer.state_dict())
    schedule = LambdaLR(other, lambda step: 1 / (1 + step))
    other.step()
    schedule.step()
    assert len(other.param_groups) == 10
    for group in other.param_groups:
        assert (group["initial_lr"], group["lr"]) == pytest.approx((0.1 * group["lr_scale"], 0.05 * group["lr_scale"]))
    assert min(group["lr_scale"] for group in other.param_groups) == 0.5**4


def test_layers_of_a_model_without_a_backbone_cannot_differ() -> None:
    model = nn.Linear(2, 2)
    assert len(make_parameter_groups(model, 0.1, 0.05)) == 2
    with pytest.raises(ValueError, match=r"layer_decay=0\.5 .* an HfViTModel as backbone, which Linear does not have"):
        make_parameter_groups(model, 0.1, 0.05, layer_decay=0.5)
    with pytest.raises(ValueError, match=r"Linear has none\. Remove use_muon"):
        make_parameter_groups(model, 0.1, 0.1, use_muon=True)


def test_training_equals_transformers_if_parameter_groups_are_equal(tmp_path: Path) -> None:
    config = {"position_embedding_type": "rotary", "use_cls_token": False, "pooling": "mean"}
    options = {"weight_decay": 0.5, "lr_scheduler_type": "linear", "config": config}
    ours, theirs = (train(tmp_path, trainer_class=kind, **options).model for kind in (HfViTTrainer, Trainer))
    assert torch.equal(weights(ours), weights(theirs))


@pytest.mark.parametrize(("name", "num_layers"), [*zip(TRAINING_CASES, cycle([3, 5]), strict=False)])
def test_parameters_without_gradients_are_predicted(name: str, num_layers: int) -> None:
    case = TRAINING_CASES[name]
    for overrides in ({}, *UNUSED.get(name, ()), {"use_mask_token": True}):
        config = small_config(**{**case.overrides, "num_hidden_layers": num_layers, **overrides})
        model = build(case.model_class, config).train()
        model(**case.make_batch(config, 2)).loss.backward()
        lacks = [key for key, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
        assert may_lack_gradients(model) == bool(lacks), (overrides, lacks)


def test_prefixes_are_whole_words_of_the_model() -> None:
    model = HfViTForImageClassification(small_config(num_hidden_layers=11))
    freeze(model, ["model.encoder.layers.1", "model.embeddings"])
    names = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {name.split(".")[3] for name in names if "layers" in name} == {"1"}
    assert {name.split(".")[1] for name in names} == {"encoder", "embeddings"}
    assert "model.embeddings.cls_token" in names
    for prefixes, blocks, message in (
        (["model.embed"], None, r"freeze='model\.embed' matches no .* with model\.embeddings, model\.encoder, "),
        ([], 12, "trainable_blocks=12 exceeds the 11 blocks"),
        (["model", "classifier"], None, r"are frozen\. Freeze fewer"),
    ):
        with pytest.raises(ValueError, match=message):
            freeze(model, prefixes, trainable_blocks=blocks)


def test_the_last_blocks_learn_with_the_heads() -> None:
    for number, expected in {0: set(), 1: {"2"}, 3: {"0", "1", "2"}}.items():
        model = HfViTForImageClassification(small_config("clip"))
        freeze(model, trainable_blocks=number)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert {name.split(".")[3] for name in names if "layers" in name} == expected
        final = {"model.norm.weight", "model.norm.bias"} if number else set()
        assert {name for name in names if "layers" not in name} == {"classifier.weight", "classifier.bias"} | final
        groups = make_parameter_groups(model, 0.1, 0.05, layer_decay=0.5)
        assert sorted(rates(model, groups)) == sorted(names)


def test_frozen_parts_are_as_in_an_evaluation(tmp_path: Path) -> None:
    """Test that dropout, stochastic depth and batch norm of frozen parts run in evaluation mode."""
    noisy = {"hidden_dropout_prob": 0.2, "drop_path_rate": 0.2}
    begun = build(HfViTForSemanticSegmentation, small_config(**TRAINING_CASES["batch_norm"].overrides, **noisy))
    options = {"freeze": "segmentation_head.linear.norm", "trainable_blocks": 0, "config": noisy}
    model, state = train(tmp_path, case="batch_norm", **options).model, begun.state_dict()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    assert moved == {"segmentation_head.linear.classifier.weight", "segmentation_head.linear.classifier.bias"}
    assert not model.model.training
    assert model.segmentation_head.linear.training


def test_a_frozen_model_trains_under_ddp() -> None:
    """Train a frozen model with DDP, which fails at the second step if an expected gradient is missing."""
    model = HfViTForImageClassification(small_config())
    freeze(model, ["model.encoder.layers.2"], trainable_blocks=2)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        batch = TRAINING_CASES["class_numbers"].make_batch(model.config, 2)
        for _ in range(3):
            parallel(**batch).loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", ["semantic", "class_numbers"])
def test_batches_of_one_that_add_up_train_like_one_batch(case: str, tmp_path: Path) -> None:
    # The exact gradients of key biases are zero. Adam would scale up their rounding errors to full steps.
    options = {"layer_decay": 0.7, "max_grad_norm": 0.1, "adam_epsilon": 1e-4, "config": {"key_bias": False}}
    at_once, in_parts = (
        train(tmp_path, case=case, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, **options)
        for size in (8, 1)
    )
    assert at_once.state.global_step == in_parts.state.global_step == 2
    assert (weights(in_parts.model) - weights(at_once.model)).abs().max() < 1e-6
