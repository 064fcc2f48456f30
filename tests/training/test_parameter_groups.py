"""Weight decay, layer-wise learning rates, and frozen parameters."""

import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer

from hf_vit import HfViTForImageClassification, HfViTForSemanticSegmentation
from hf_vit.model.pretrained import HfViTPreTrainedModel
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments, make_parameter_groups
from hf_vit.training.optimizer import freeze, may_lack_gradients

from ..helpers.models import DEFORMABLE, TRAINING_CASES, VARIANTS, small_config
from ..helpers.trainings import build, collate, examples_of, flatten, training_arguments


WITHOUT_DECAY = re.compile(
    r"bias$|norm\d?\.weight$|norms\.\d\.weight$|LayerNorm\.weight$|_token$|_tokens$|"
    r"position_embeddings?(\.weight)?$|\.scale$|logit_scale$|"
    r"queries\.weight$|query_boxes\.weight$|query_features\.weight$|\.probe$|"
    r"(token|word|token_type)_embeddings?\.weight$"
)
KINDS = ("", ", no decay")
# Options for which the last blocks do not contribute to the loss.
UNUSED: dict[str, list[dict[str, Any]]] = {
    "semantic": [{"segmentation_config": {"head": "simple", "out_indices": [1, 2]}}],
    "relative_depth": [{"depth_config": {"head": "conv", "out_indices": [2]}}],
    "deformable": [{"detection_config": {**DEFORMABLE, "out_indices": [1, 2]}}],
}


def models() -> Iterator[HfViTPreTrainedModel]:
    """Yield a model of every task and of every backbone variant."""
    for case in TRAINING_CASES.values():
        yield case.model_class(small_config(**case.overrides))
    for variant in VARIANTS:
        yield HfViTForImageClassification(small_config(variant))


def rates(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, float]:
    """Return the learning rate of each parameter by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: group["lr"] for group in groups for parameter in group["params"]}


def train(
    folder: Path, case: str, trainer_class: type[Trainer] = HfViTTrainer, config: Any = None, **options: Any
) -> Trainer:
    """Train for two steps on two batches of 8 images by default."""
    training_case = TRAINING_CASES[case]
    config = small_config(**{**training_case.overrides, **(config or {})})
    examples, model = examples_of(training_case.make_batch(config, 16)), build(training_case.model_class, config)
    options = {"learning_rate": 0.01, "num_train_epochs": 1, "per_device_train_batch_size": 8, **options}
    if trainer_class is HfViTTrainer:
        options |= {"report_to": "none", "warmup_steps": 0, "eval_strategy": "no"}
        options |= {"arguments_class": HfViTTrainingArguments}
    args = training_arguments(folder, **options)
    trainer = trainer_class(model=model, args=args, train_dataset=examples, data_collator=collate)
    trainer.train()
    return trainer


def test_all_parameters_are_in_one_group_and_matrices_alone_have_weight_decay() -> None:
    for model in models():
        groups = make_parameter_groups(model, 1e-3, 0.05)
        assert [group["name"] for group in groups if group["weight_decay"]] == ["embeddings to head"]
        assert len(groups) == 2
        names = {parameter: name for name, parameter in model.named_parameters()}
        grouped = [names[parameter] for group in groups for parameter in group["params"]]
        assert sorted(grouped) == sorted(names.values())
        for group in groups:
            for parameter in group["params"]:
                assert (group["weight_decay"] == 0) == bool(WITHOUT_DECAY.search(names[parameter])), names[parameter]


def test_each_layer_learns_more_slowly_than_the_one_after_it() -> None:
    # This model has three blocks.
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


def test_blocks_of_heads_learn_as_heads() -> None:
    for case in ("mae", "deformable", "queries", "universal", "sigmoid"):
        model = TRAINING_CASES[case].model_class(small_config(**TRAINING_CASES[case].overrides))
        groups = make_parameter_groups(model, 0.1, 0.05, layer_decay=0.5)
        for name, rate in rates(model, groups).items():
            assert (rate == 0.1) == (not name.startswith("model.")), name
        layers = ["embeddings", "block 0", "block 1", "block 2", "head"]
        assert {group["name"] for group in groups} <= {f"{layer}{kind}" for layer in layers for kind in KINDS}


def test_groups_keep_their_factor_in_checkpoints_and_schedules() -> None:
    model = HfViTForImageClassification(small_config())
    optimizer, other = (
        torch.optim.AdamW(make_parameter_groups(model, 0.1, 0.05, layer_decay=layer_decay))
        for layer_decay in (0.5, 0.9)
    )
    other.load_state_dict(optimizer.state_dict())
    schedule = LambdaLR(other, lambda step: 1 / (1 + step))
    other.step()
    schedule.step()
    assert len(other.param_groups) == 10
    for group in other.param_groups:
        assert group["initial_lr"] == pytest.approx(0.1 * group["lr_scale"])
        assert group["lr"] == pytest.approx(0.05 * group["lr_scale"])
    assert min(group["lr_scale"] for group in other.param_groups) == 0.5**4


def test_layers_of_a_model_without_a_backbone_cannot_differ() -> None:
    model = nn.Linear(2, 2)
    assert len(make_parameter_groups(model, 0.1, 0.05)) == 2
    with pytest.raises(ValueError, match=r"layer_decay=0\.5 .* Linear has no HfViTModel"):
        make_parameter_groups(model, 0.1, 0.05, layer_decay=0.5)
    with pytest.raises(ValueError, match="Linear has none to train"):
        make_parameter_groups(model, 0.1, 0.1, use_muon=True)


def test_training_is_the_librarys_where_its_groups_are_right(tmp_path: Path) -> None:
    config = {"position_embedding_type": "rotary", "use_cls_token": False, "pooling": "mean"}
    options = {"weight_decay": 0.5, "lr_scheduler_type": "linear", "config": config}
    ours, theirs = (train(tmp_path, "class_numbers", kind, **options) for kind in (HfViTTrainer, Trainer))
    assert torch.equal(flatten(list(ours.model.parameters())), flatten(list(theirs.model.parameters())))


@pytest.mark.parametrize(("name", "num_layers"), zip(TRAINING_CASES, cycle([3, 5]), strict=False))
def test_parameters_without_a_gradient_are_foreseen(name: str, num_layers: int) -> None:
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
    with pytest.raises(ValueError, match=r"starts with 'model\.embed'\. It has model\.embeddings, model\.encoder, "):
        freeze(model, ["model.embed"])
    with pytest.raises(ValueError, match="trainable_blocks=12, but the model has 11 blocks"):
        freeze(model, trainable_blocks=12)
    with pytest.raises(ValueError, match="is left to learn"):
        freeze(model, ["model", "classifier"])


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
    """Tests a linear probe and a model with dropout, stochastic depth and batch norm."""
    noisy = {"hidden_dropout_prob": 0.2, "drop_path_rate": 0.2}
    begun = build(HfViTForSemanticSegmentation, small_config(**TRAINING_CASES["batch_norm"].overrides, **noisy))
    options = {"freeze": "segmentation_head.linear.norm", "trainable_blocks": 0, "config": noisy}
    model = train(tmp_path, "batch_norm", **options).model
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, begun.state_dict()[name])}
    assert moved == {"segmentation_head.linear.classifier.weight", "segmentation_head.linear.classifier.bias"}
    assert not model.model.training
    assert model.segmentation_head.linear.training


def test_a_frozen_model_trains_under_ddp() -> None:
    """DDP would fail at the second step if an expected gradient were missing."""
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
    # Rounding errors are the only gradients of key biases. Adam would turn them into full steps.
    options = {"layer_decay": 0.7, "max_grad_norm": 0.1, "adam_epsilon": 1e-4, "config": {"key_bias": False}}
    at_once = train(tmp_path, case, **options)
    in_parts = train(tmp_path, case, per_device_train_batch_size=1, gradient_accumulation_steps=8, **options)
    assert at_once.state.global_step == in_parts.state.global_step == 2
    weights, expected = (flatten(list(trainer.model.parameters())) for trainer in (in_parts, at_once))
    assert (weights - expected).abs().max() < 1e-6
