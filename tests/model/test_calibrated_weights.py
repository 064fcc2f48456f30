"""Test that a calibration is dropped if weights or label names change, and survives conversions of the model."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hf_vit import (
    HfViTForImageClassification,
    HfViTForMultiTask,
    HfViTForObjectDetection,
    HfViTForSemanticSegmentation,
    HfViTForZeroShotImageClassification,
)
from hf_vit.inference.int8_linear import Int8Linear
from hf_vit.training.callbacks.ema import WeightAverage

from ..helpers.models import pixels, with_texts
from .checks import build


Model = Any
WORDS = "changed, so HfViTForImageClassification is not calibrated any more"


def calibrate(model: Model) -> Model:
    model.config.calibration_config = {"model_class": type(model).__name__, "temperature": 2.0, "num_images": 30}
    return model


@contextmanager
def without_calibration(model: Model) -> Iterator[None]:
    given, model.config.calibration_config = model.config.calibration_config, None
    yield
    model.config.calibration_config = given


@torch.no_grad()
def temperature_of(model: Model) -> float:
    """Return the number by which the model divides its logits."""
    name = "logits_per_image" if isinstance(model, HfViTForZeroShotImageClassification) else "logits"
    inputs = with_texts(model.config, 2) if name != "logits" else {"pixel_values": pixels(model.config)}
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    found = model(**inputs)[name].double()
    with without_calibration(model):
        plain = model(**inputs)[name].double()
    return round((plain / found).median().item(), 1)


def train(model: Model, make_optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    images = pixels(model.config)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = make_optimizer(trained, **options)
    model(images, labels=torch.arange(len(images))).loss.backward()
    optimizer.step()


def train_backbone(model: Model) -> None:
    model.classifier.requires_grad_(False)
    train(model, torch.optim.AdamW, lr=1e-4, fused=True)  # a fused optimizer does not increase version counters


def replace_head(model: Model) -> None:
    model.classifier = nn.Linear(model.config.hidden_size, model.config.num_labels)


def rename_labels(model: Model) -> None:
    model.config.id2label = {**model.config.id2label, 0: "cat"}


CHANGES: dict[str, Callable[[Model], Any]] = {
    "backbone under a frozen head": train_backbone,
    "all weights": lambda model: train(model, torch.optim.SGD, lr=1e-2),
    "head": replace_head,
    "block": lambda model: model.model.encoder.layers.__setitem__(1, copy.deepcopy(model.model.encoder.layers[0])),
    "loaded weights": lambda model: model.load_state_dict(
        {name: 1.05 * weight for name, weight in model.state_dict().items()}
    ),
    "loaded head": lambda model: model.classifier.load_state_dict(
        {name: 2 * weight for name, weight in model.classifier.state_dict().items()}
    ),
    "label names": rename_labels,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_in_evaluation_mode_drops_the_calibration(
    change: Callable[[Model], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = calibrate(build(HfViTForImageClassification))
    model.save_pretrained(tmp_path / "before")
    assert temperature_of(model) == 2
    change(model)
    assert WORDS not in caplog.text
    assert temperature_of(model) == 1
    assert caplog.text.count(WORDS) == 1
    assert model.calibration.temperature == 1
    model.save_pretrained(tmp_path / "after")
    opened = [HfViTForImageClassification.from_pretrained(tmp_path / name) for name in ("before", "after")]
    assert [temperature_of(one) for one in opened] == [2, 1]


def test_loading_drops_a_calibration_of_other_weights_or_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = calibrate(build(HfViTForImageClassification))
    model.save_pretrained(tmp_path)
    names = {number: f"class {number}" for number in range(5)}
    for options in ({"num_labels": 3}, {"id2label": names}):
        other = HfViTForImageClassification.from_pretrained(tmp_path, **options)
        assert temperature_of(other.eval()) == 1
        assert other.config.calibration_config is None
        assert caplog.text.count(WORDS) == 1
        caplog.clear()
    # A model saved by an earlier version has no fingerprint.
    config = json.loads((tmp_path / "config.json").read_text())
    config["calibration_config"] = {"model_class": "HfViTForImageClassification", "temperature": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert temperature_of(HfViTForImageClassification.from_pretrained(tmp_path)) == 2
    assert temperature_of(HfViTForImageClassification.from_pretrained(tmp_path, num_labels=3)) == 1
    model.save_pretrained(tmp_path)
    weights = {name: 1.05 * weight for name, weight in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    caplog.clear()
    assert temperature_of(HfViTForImageClassification.from_pretrained(tmp_path)) == 1
    assert caplog.text.count(WORDS) == 1


def test_training_of_combined_heads_drops_their_calibrations(tmp_path: Path) -> None:
    backbone = build(HfViTForImageClassification).model
    heads = {
        "classes": calibrate(build(HfViTForImageClassification)),
        "masks": calibrate(build(HfViTForSemanticSegmentation)),
        "boxes": calibrate(build(HfViTForObjectDetection)),
    }
    for head in heads.values():
        head.model.load_state_dict(backbone.state_dict(), strict=False)
    combined = HfViTForMultiTask.from_heads(**heads)
    combined.half().float().save_pretrained(tmp_path / "kept")
    opened = [type(head).from_pretrained(tmp_path / "kept") for head in heads.values()]
    assert [temperature_of(head) for head in opened] == [2, 2, 2]
    combined.train().eval().save_pretrained(tmp_path / "trained")
    opened = [type(head).from_pretrained(tmp_path / "trained") for head in heads.values()]
    assert [temperature_of(head) for head in opened] == [1, 1, 1]
    # Training the shared backbone in evaluation mode changes the scores of all heads.
    combined = HfViTForMultiTask.from_pretrained(tmp_path / "kept").eval()
    assert [temperature_of(head) for head in combined.heads.values()] == [2, 2, 2]
    with torch.no_grad():
        combined.model.encoder.layers[0].mlp.fc1.weight.mul_(1.5)
    assert [temperature_of(head) for head in combined.heads.values()] == [1, 1, 1]
    combined.save_pretrained(tmp_path / "changed")
    assert temperature_of(HfViTForObjectDetection.from_pretrained(tmp_path / "changed")) == 1


def average(model: Model) -> Model:
    """Use averaged weights for a while, as training does."""
    averages = WeightAverage(model, 0.9)
    with without_calibration(model):
        for value in averages.averages.values():
            value.mul_(0.5)
        with averages.applied():
            assert temperature_of(model) == 1
    return model


def quantize(model: Model) -> Model:
    """Quantize the blocks to int8, without the inputs that measure ranges."""
    for layer in model.model.encoder.layers:
        layer.mlp.fc1 = Int8Linear(layer.mlp.fc1, -torch.ones(32), torch.ones(32))
    return model


class Packed(nn.Parameter):
    """Rounded weights, as in libraries that quantize weights."""


def pack(model: Model) -> Model:
    layer = model.model.encoder.layers[0].mlp.fc1
    layer.weight = Packed((layer.weight.data * 100).round() / 100)
    return model


def save_and_load(folder: Path, model: Model, **options: Any) -> Model:
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return type(model).from_pretrained(folder, **options).eval()


CONVERSIONS: dict[str, Callable[[Model, Path], Model]] = {
    "half": lambda model, _: model.half(),
    "bfloat16 and back": lambda model, _: model.bfloat16().float(),
    "float64": lambda model, _: model.double(),
    "copy": lambda model, _: copy.deepcopy(model),
    "shards": lambda model, folder: save_and_load(folder, model),
    "loading in bfloat16": lambda model, folder: save_and_load(folder, model, dtype=torch.bfloat16),
    "bfloat16 shards in float32": lambda model, folder: save_and_load(folder, model.bfloat16(), dtype=torch.float32),
    "averaged weights": lambda model, _: average(model),
    "wrapped": lambda model, _: nn.Sequential(model).half()[0],
    "int8": lambda model, _: quantize(model),
    "packed": lambda model, _: pack(model),
    "compiled": lambda model, _: torch.compile(model, backend="eager")._orig_mod,
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("is_used", [True, False], ids=["used", "new"])
@pytest.mark.parametrize(
    "model_class", [HfViTForImageClassification, HfViTForObjectDetection, HfViTForZeroShotImageClassification]
)
def test_a_conversion_keeps_the_calibration(
    model_class: type[Any], is_used: bool, convert: Callable[[Model, Path], Model], tmp_path: Path
) -> None:
    model = calibrate(build(model_class))
    if is_used:
        assert temperature_of(model) == 2
    converted = convert(model, tmp_path)
    assert temperature_of(converted) == 2
