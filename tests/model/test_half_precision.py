"""Test that half precision is close to float32 in inference and training, for all position types."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_vit import (
    HfViTBackbone,
    HfViTForImageClassification,
    HfViTForMaskedImageModeling,
    HfViTForUniversalSegmentation,
    HfViTForZeroShotImageClassification,
    HfViTModel,
    HfViTPreTrainedModel,
)
from hf_vit.inference import optimize
from hf_vit.inference.optimize import optimize_for_inference

from ..helpers.models import TRAINING_CASES, VARIANTS, pixels, small_config
from ..helpers.references import assert_close, draw_weights
from .checks import DENSE, HEADS, draw_statistics, inputs_of, partial_mask


DTYPES = (torch.bfloat16, torch.float16)
TOLERANCES = {torch.bfloat16: 0.1, torch.float16: 0.02}
POSITIONS = ("learned", "sincos2d", "rotary", "learned+rotary", "none")
# Detection with a single query, because rounding errors may change the order of several queries.
ONE_QUERY = {"detection_config": {"num_queries": 1, "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
                                  "num_groups": 1}}  # fmt: skip
# Ways to load a model in half precision: the dtype, the checkpoint (`whole` is saved in float32, `half` in half
# precision), and arguments of from_pretrained.
OPENINGS: dict[str, tuple[torch.dtype, str, dict[str, Any]]] = {
    "dtype": (torch.bfloat16, "whole", {"dtype": torch.bfloat16}),
    "device_map": (torch.float16, "whole", {"dtype": torch.float16, "device_map": "auto"}),
    "saved": (torch.float16, "half", {}),
    "saved, device_map": (torch.bfloat16, "half", {"device_map": "auto"}),
    "cast": (torch.float16, "whole", {}),
}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawing_the_same(model: Any, batch: dict[str, Any], context: Any = None) -> dict[str, Tensor]:
    """Return the floating-point outputs of a model, which draws the same random numbers in each call."""
    torch.manual_seed(0)
    with context or nullcontext():
        return floats_of(model(**batch))


def floats_of(outputs: Any) -> dict[str, Tensor]:
    return {name: value for name, value in outputs.items() if isinstance(value, Tensor) and value.is_floating_point()}


def check_opening(
    opening: str, kind: Any, batch: dict[str, Any], folder: Path, tolerance: float | None = None, **overrides: Any
) -> tuple[HfViTPreTrainedModel, dict[str, Tensor]]:
    """Compare the outputs of a saved model in half precision and under autocast with those in float32.

    If the model returns a loss, a training step is also run. Return the half-precision model and its outputs.
    """
    dtype, saved, options = OPENINGS[opening]
    model = kind(small_config(**overrides))
    draw_weights(model)
    if isinstance(model, HfViTForUniversalSegmentation):
        model.anneal_masks(1.0)  # a mask pixel that differs would change all later blocks
    draw_statistics(model).eval().save_pretrained(folder / "whole")
    expected, autocast = drawing_the_same(model, batch), drawing_the_same(model, batch, torch.autocast("cpu", dtype))
    model.to(dtype).save_pretrained(folder / "half")
    half = kind.from_pretrained(folder / saved, **options)
    if opening == "cast":
        half.to(dtype)
    assert half.dtype == dtype
    actual = drawing_the_same(half, batch)
    for outputs in (actual, autocast):
        assert outputs.keys() == expected.keys()
        assert "loss" not in outputs or outputs["loss"].dtype == torch.float32
        for output, value in outputs.items():
            assert torch.isfinite(value).all(), output
            assert_close(value.float(), expected[output], tolerance or TOLERANCES[dtype], output)
    if "loss" in actual:
        half.train()(**batch).loss.backward()
        gradients = [weight.grad for weight in half.parameters() if weight.grad is not None]
        assert all(gradient.dtype == dtype and torch.isfinite(gradient).all() for gradient in gradients)
    return half, actual


# Training cases come first, so that a new head does not change the way in which they are loaded
CASES = {**TRAINING_CASES, **{name: head for name, head in HEADS.items() if name not in TRAINING_CASES}}


@pytest.mark.parametrize(("name", "opening"), zip(CASES, itertools.cycle(OPENINGS)))
def test_every_task_and_head_with_fixed_positions(name: str, opening: str, tmp_path: Path) -> None:
    case = CASES[name]
    kind, options = case if isinstance(case, tuple) else (case.model_class, case.overrides)
    options = {**options, "position_embedding_type": "sincos2d"}
    is_deformable = name.startswith("deformable") or name == "in_windows"
    if is_deformable:
        options["detection_config"] = {**options["detection_config"], **ONE_QUERY["detection_config"]}
    kind = next(parent for parent in kind.__mro__ if parent.__module__.startswith("hf_vit."))
    config = small_config(**options)
    batch = inputs_of(kind(config)) if isinstance(case, tuple) else case.make_batch(config, 2)
    if kind is HfViTForZeroShotImageClassification:
        batch["return_loss"] = True
    half, outputs = check_opening(opening, kind, batch, tmp_path, 0.2 if name in DENSE else None, **options)
    if is_deformable:
        assert outputs["pred_boxes"].dtype == torch.float32
    if isinstance(case, tuple) and name in DENSE:
        assert {value.dtype for output, value in outputs.items() if output != "loss"} == {half.dtype}
        padded = half.eval()(batch["pixel_values"], patch_attention_mask=partial_mask())
        assert all(value.isfinite().all() for value in floats_of(padded).values())


@pytest.mark.parametrize(("variant", "opening"), zip(VARIANTS, itertools.cycle(OPENINGS)))
def test_every_variant_of_the_backbone(variant: str, opening: str, tmp_path: Path) -> None:
    config = small_config(variant)
    batch = {"pixel_values": pixels(config, grid=(3, 5)), "labels": torch.tensor([0, 3])}
    half, outputs = check_opening(opening, HfViTForImageClassification, batch, tmp_path, variant=variant)
    assert outputs["logits"].dtype == half.dtype


@pytest.mark.thinned(5)
@pytest.mark.parametrize("kind", [HfViTModel, HfViTForMaskedImageModeling])
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("opening", OPENINGS)
def test_every_type_of_positions(
    grid: tuple[int, int], kind: Any, positions: str, opening: str, tmp_path: Path
) -> None:
    batch = {"pixel_values": pixels(small_config(), 2, grid)}
    check_opening(opening, kind, batch, tmp_path, position_embedding_type=positions)


@both_dtypes
def test_backbone_and_positions_that_become_learned(dtype: torch.dtype, tmp_path: Path) -> None:
    model = HfViTModel(small_config(position_embedding_type="sincos2d"))
    draw_weights(model)
    model.eval().save_pretrained(tmp_path)
    images = pixels(model.config)
    expected = HfViTBackbone.from_pretrained(tmp_path)(images).feature_maps[0]
    (actual,) = HfViTBackbone.from_pretrained(tmp_path, dtype=dtype)(images).feature_maps
    assert_close(actual.float(), expected, TOLERANCES[dtype], "maps")
    learned = HfViTModel.from_pretrained(tmp_path, dtype=dtype, image_size=(24, 40))
    assert {weight.dtype for weight in learned.parameters()} == {dtype}
    images = pixels(model.config, grid=(3, 5))
    assert_close(learned(images)[0].float(), model(images)[0], TOLERANCES[dtype], "tokens")


@pytest.mark.thinned(2)
@both_dtypes
@pytest.mark.parametrize("kind", [HfViTForMaskedImageModeling, HfViTForImageClassification])
def test_a_checkpoint_without_the_tables_of_the_head(kind: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    HfViTModel(small_config(position_embedding_type="sincos2d")).save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path, dtype=dtype)
    assert all(torch.isfinite(value).all() for value in floats_of(model(pixels(model.config))).values())


@pytest.mark.thinned(2)
@both_dtypes
@pytest.mark.parametrize("kind", [HfViTForImageClassification, HfViTForZeroShotImageClassification])
def test_a_half_precision_model_is_optimized(
    kind: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimize, "race", lambda *_: (0.5, 2.0))  # makes every candidate appear twice as fast
    whole = kind(small_config(position_embedding_type="sincos2d")).eval()
    whole.save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path, dtype=dtype)
    fast = optimize_for_inference(model, compile=False)
    assert fast.report.best.name != f"as given, {str(dtype).removeprefix('torch.')}", fast.report
    images = pixels(model.config)
    given = {} if kind is HfViTForImageClassification else {"input_ids": torch.arange(9)[None]}
    actual, expected = fast(pixel_values=images, **given)[0], whole(pixel_values=images, **given)[0]
    assert actual.dtype == dtype
    assert_close(actual.float(), expected, TOLERANCES[dtype], "outputs")


@pytest.mark.parametrize("positions", POSITIONS)
def test_float32_under_autocast_keeps_its_tokens_in_float32(positions: str) -> None:
    config = small_config(position_embedding_type=positions, use_cls_token=False, pooling="mean")
    model = HfViTModel(config)
    with torch.autocast("cpu", torch.bfloat16):
        tokens = model.embed(pixels(config))[0]
    has_table = positions not in ("rotary", "none")
    assert tokens.dtype == (torch.float32 if has_table else torch.bfloat16)
