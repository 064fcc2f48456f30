"""Checks shared by the tests of converted models."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..helpers.references import assert_close


dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
# Names of tensors that do not affect the outputs: key biases, which the softmax cancels, and batch counters.
WITHOUT_EFFECT = r".*(\.(key|k_proj)\.bias|num_batches_tracked)"


def random_sum(outputs: Iterable[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.stack([(value * torch.randn(value.shape, generator=generator)).sum() for value in outputs]).sum()


def gradient(outputs: Iterable[Tensor], images: Tensor) -> Tensor:
    """Return the gradient of a randomly weighted sum of outputs with respect to the images."""
    return torch.autograd.grad(random_sum(outputs), images, retain_graph=True)[0]


def assert_all_matter(source: nn.Module, outputs: Mapping[str, Tensor], unused: str = "") -> None:
    """Assert that each weight of a source model with random weights affects the outputs.

    If the converted model then has the same outputs, the conversion has used all weights. Weights whose names match
    the regular expression `unused` are not checked.
    """
    total = random_sum(value / value.detach().abs().max() for value in outputs.values())
    exempt = re.compile(f"{WITHOUT_EFFECT}|{unused}")
    weights = {
        name: weight for name, weight in source.named_parameters() if weight.numel() and not exempt.fullmatch(name)
    }
    gradients = torch.autograd.grad(total, [*weights.values()], retain_graph=True, allow_unused=True)
    for (name, weight), change in zip(weights.items(), gradients, strict=True):
        effect = 0.0 if change is None else float((change * weight.detach()).abs().max())
        assert effect > 1e-6, f"{name} hardly matters: {effect}"


def open_whole(model_class: type[Any], place: Path, **options: Any) -> Any:
    """Return the model of a checkpoint. Assert that no tensor is missing or unexpected."""
    model, info = model_class.from_pretrained(place, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


def assert_same_outputs(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Assert that each expected output is not constant and equals the actual output."""
    for name, value in expected.items():
        assert value.std() >= 0.1, f"{name} hardly varies"
        assert_close(actual[name], value, tolerance, name)


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def reconfigure(folder: Path, **changes: Any) -> None:
    """Change fields in the file config.json of a folder."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
