"""Models with random weights, and checks that apply to the models of every task."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vit import HfViTModel

from ..helpers.models import small_config
from ..helpers.references import assert_close, draw_weights


def build(model_class: type[Any] = HfViTModel, variant: str = "plain", **overrides: Any) -> Any:
    model = model_class(small_config(variant, **overrides))
    draw_weights(model)
    return model.eval()


def values(outputs: Any) -> list[Tensor]:
    """Return all tensors of an output."""
    if isinstance(outputs, Tensor):
        return [outputs]
    parts = outputs.values() if isinstance(outputs, dict) else outputs
    return [value for part in parts for value in values(part)]


def assert_same(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    actual, expected = values(actual), values(expected)
    assert len(actual) == len(expected)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a.dtype == torch.bool:
            assert torch.equal(a, e), f"output {index}"
        else:
            assert_close(a, e, tolerance, f"output {index}")


def training_gradients(model: nn.Module, pixel_values: Tensor, **given: Any) -> dict[str, Tensor]:
    """Return the gradients of the loss if there are targets, else the gradients of all outputs."""
    model.zero_grad()
    outputs = model(pixel_values, **given)
    losses = [outputs.loss] if given else [value.float().square().mean() for value in values(outputs)]
    torch.stack(losses).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def replace_flash_attention(monkeypatch: pytest.MonkeyPatch, drops_padding: bool = False) -> list[tuple[Any, Any]]:
    """Let PyTorch compute flash attention, whose kernel runs on GPUs only; return the shapes of queries and masks.

    A mask (B, L) applies to keys. Fewer queries use the end of the mask. Padded queries may have no result.
    """
    seen = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        seen.append((tuple(query.shape), None if mask is None else tuple(mask.shape)))
        allowed = None if mask is None else mask[:, None, None, :].bool()
        attended = nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=kwargs["scaling"])
        if mask is not None and drops_padding:
            attended = attended.where(mask[:, None, -query.shape[2] :, None].bool(), 0)
        return attended.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", attend)
    return seen


def check_saved(model: Any, given: dict[str, Any], folder: Path) -> None:
    """Assert that a saved model has the same weights and outputs."""
    model.save_pretrained(folder)
    reloaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    weights = reloaded.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert_same(reloaded(**given), model(**given))


def check_tuple_output(model: Any, given: dict[str, Any]) -> None:
    """Assert that a tuple holds the same outputs, whether the call or the configuration requests it."""
    expected, kept = model(**given), model.config.return_dict
    as_tuple = model(**given, return_dict=False)
    model.config.return_dict = False
    for outputs in (as_tuple, model(**given)):
        assert isinstance(outputs, tuple)
        assert_same(outputs, expected)
    model.config.return_dict = kept


def check_checkpointing(model: Any, given: dict[str, Any], reentrant: bool) -> None:
    """Assert that gradients are the same with gradient checkpointing."""
    expected = training_gradients(model.train(), **given)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    model.enable_input_require_grads()
    actual = training_gradients(model, **given)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        # Gradients of several levels may be summed in another order.
        assert_close(actual[name], gradient, 2e-6, name)


def check_compiled(model: Any, sizes: list[dict[str, Any]], tolerance: float = 1e-6, **options: Any) -> None:
    """Assert that a model compiles as a whole, once per size, with the same outputs."""
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        expected = [model(**given, **options) for given in sizes]
        for given in sizes:
            compiled(**given, **options)
        with torch.compiler.set_stance("fail_on_recompile"):
            for given, outputs in zip(sizes, expected, strict=True):
                assert_same(compiled(**given, **options), outputs, tolerance)


def check_spread(model: Any, given: dict[str, Any], folder: Path) -> None:
    """Assert that outputs are the same if parts of the model are offloaded to disk."""
    model.save_pretrained(folder)
    expected = model(**given)
    assert_same(type(model).from_pretrained(folder, device_map="auto")(**given), expected)
    prefix = "" if model.base_model is model else "model."
    places = {name: "disk" for name, _ in model.named_children() if name not in ("model", "encoder")}
    places |= {f"{prefix}{name}": "cpu" for name, _ in model.base_model.named_children() if name != "encoder"}
    places |= {f"{prefix}encoder.layers.{index}": "disk" if index == 1 else "cpu" for index in range(3)}
    options = {"main_device": "cpu", "offload_dir": folder / "offload", "force_hooks": True}
    assert_same(dispatch_model(copy.deepcopy(model), device_map=places, **options)(**given), expected)
