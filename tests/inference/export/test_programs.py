"""Test exported programs of all heads at batch and image sizes for which the model was not traced."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

import hf_vit
from hf_vit.inference.export.formats import FORMATS, trace, write_onnx, write_program, write_torch
from hf_vit.inference.export.programs import (
    TRACED_BATCH,
    Difference,
    compare,
    comparison_sizes,
    in_order,
    output_names,
    traced_grid,
)
from hf_vit.model.embeddings import resample_by_products, resample_to_grid

from ...helpers.models import DEFORMABLE, SMALL, SMALL_DEPTH, small_config
from ...helpers.versions import needs_exporters


TINY = {
    "num_hidden_layers": 1,
    "universal_segmentation_config": {"num_queries": 5, "num_blocks": 1},
    "depth_config": {**SMALL_DEPTH, "neck_hidden_sizes": (8, 8), "reassemble_factors": (2, 0.5)},
    "detection_config": {"decoder": "queries", "num_queries": 5},
    "masked_image_modeling_config": {**SMALL["masked_image_modeling_config"], "decoder_num_hidden_layers": 1},
    "text_config": {**SMALL["text_config"], "num_hidden_layers": 1},
}


class Case(NamedTuple):
    model_class: type[hf_vit.HfViTPreTrainedModel]
    outputs: tuple[str, ...]
    overrides: Mapping[str, Any] = MappingProxyType({})
    variant: str = "plain"


BOXES = ("logits", "pred_boxes", "probabilities")
PAIRS = ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds")
QUERIES = {"num_queries": 5, "decoder": "queries", "use_mid_position_embeddings": True}
MASK_HEAD = {"head": "mask", "num_layers": 1}
# All heads, with the backbone options that affect tracing.
CASES = {
    "features": Case(hf_vit.HfViTModel, ("last_hidden_state", "pooler_output"), variant="siglip"),
    "depth": Case(hf_vit.HfViTForDepthEstimation, ("predicted_depth",)),
    "classification": Case(hf_vit.HfViTForImageClassification, ("logits",), {"position_interpolation_offset": 0.1}),
    "queries": Case(hf_vit.HfViTForObjectDetection, BOXES, {"num_hidden_layers": 2, "detection_config": QUERIES}),
    "semantic": Case(hf_vit.HfViTForSemanticSegmentation, ("logits",), variant="rotary"),
    "deformable": Case(
        hf_vit.HfViTForObjectDetection,
        BOXES,
        {"detection_config": {**DEFORMABLE, "num_layers": 1, "scale_factors": (0.5,)}},
    ),
    "universal": Case(hf_vit.HfViTForUniversalSegmentation, ("class_queries_logits", "masks_queries_logits")),
    "universal_mask": Case(
        hf_vit.HfViTForUniversalSegmentation,
        ("class_queries_logits", "masks_queries_logits"),
        {"universal_segmentation_config": {"head": "mask", "num_queries": 5, "num_blocks": 1}},
    ),
    "mae": Case(hf_vit.HfViTForMaskedImageModeling, ("logits", "reconstruction")),
    "keypoints": Case(hf_vit.HfViTForKeypointDetection, ("heatmaps",), variant="registers"),
    "zero_shot_image_classification": Case(hf_vit.HfViTForZeroShotImageClassification, PAIRS),
    "windows": Case(hf_vit.HfViTForSemanticSegmentation, ("logits",), {"global_attention_layers": []}, "windows"),
    "mask_head": Case(hf_vit.HfViTForSemanticSegmentation, ("logits",), {"segmentation_config": MASK_HEAD}),
}


# By default, cases are exported to torch; only the case with several inputs is exported to ONNX. `test_folder.py`
# exports classification, segmentation and keypoints to ONNX.
TO_ONNX = ("zero_shot_image_classification",)
TESTED_ELSEWHERE = ("classification", "keypoints")


def build(case: Case) -> hf_vit.HfViTPreTrainedModel:
    torch.manual_seed(0)
    config = small_config(case.variant, **{**TINY, **case.overrides})
    config.calibration_config = {"model_class": case.model_class.__name__, "temperature": 2.0, "offset": 0.5}
    return case.model_class(config).eval()


def differences(model: hf_vit.HfViTPreTrainedModel, name: str, file: Path) -> list[Difference]:
    chosen = FORMATS[name]
    return list(compare(model, chosen.open(file, output_names(model)), chosen.bounds(model)))


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        pytest.param(chosen, name, marks=[pytest.mark.nightly] * is_nightly)
        for name in CASES
        for chosen, is_nightly in (("torch", name in TO_ONNX + TESTED_ELSEWHERE), ("onnx", name not in TO_ONNX))
    ],
)
def test_programs_equal_the_model(chosen: str, name: str, tmp_path: Path) -> None:
    write = {"torch": write_torch, "onnx": write_onnx}[chosen]
    model, file = build(CASES[name]), tmp_path / FORMATS[chosen].file
    write(trace(model, FORMATS[chosen]), file, output_names(model))
    rows = differences(model, chosen, file)
    assert {row.output for row in rows} == set(CASES[name].outputs)
    assert all(row.is_equal for row in rows), rows


@pytest.mark.slow
@needs_exporters
def test_programs_of_openvino_equal_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Replaces the home directory, in which OpenVINO writes a file.
    monkeypatch.setenv("HOME", str(tmp_path))
    model, chosen = build(CASES["semantic"]), FORMATS["openvino"]
    write_program(model, chosen, tmp_path / chosen.file)
    rows = differences(model, "openvino", tmp_path / chosen.file)
    assert all(row.is_equal for row in rows), rows


@pytest.mark.parametrize("case", [CASES["features"], CASES["deformable"], CASES["windows"]])
def test_checked_sizes_are_none_of_the_traced_one(case: Case) -> None:
    model = build(case)
    sizes = comparison_sizes(model, FORMATS["torch"].bounds(model))
    batches, grids = zip(*sizes, strict=True)
    assert len({*batches}) == len({*grids}) == 3
    assert TRACED_BATCH not in batches
    assert traced_grid(model) not in grids
    assert any(rows != columns for rows, columns in grids)


def test_a_program_that_plans_its_memory_is_checked_within_its_bounds() -> None:
    model, chosen = build(CASES["features"]), FORMATS["executorch"]
    bounds = chosen.bounds(model)
    assert bounds.batch is not None
    assert bounds.grid is not None
    for batch, grid in [*comparison_sizes(model, bounds), (TRACED_BATCH, traced_grid(model))]:
        assert batch <= bounds.batch
        assert all(side <= most for side, most in zip(grid, bounds.grid, strict=True))


# No published model has an offset with antialiasing, and torch resizes by scale factors only without antialiasing.
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("antialias", "offset"), [(False, 0.0), (True, 0.0), (False, 0.1)])
def test_resizing_by_products_is_that_of_torch(mode: str, antialias: bool, offset: float) -> None:
    for old in ((4, 6), (1, 1), (2, 3), (7, 7)):
        for new in ((4, 6), (7, 7), (1, 1), (3, 9), (14, 5)):
            table = torch.randn(2, old[0] * old[1], 5, generator=torch.Generator().manual_seed(0))
            options = {"position_interpolation": mode, "position_antialias": antialias}
            size = (16 * old[0], 16 * old[1])
            config = hf_vit.HfViTConfig(image_size=size, position_interpolation_offset=offset, **options)
            expected = resample_to_grid(table, config, new, num_prefix=0)
            found = resample_by_products(table, old, new, mode, antialias, offset)
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_queries_are_compared_in_any_order_and_with_their_boxes() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = {
        "logits": torch.randn(2, 6, 3, generator=generator),
        "pred_boxes": torch.rand(2, 6, 4, generator=generator),
    }
    order = torch.stack([torch.randperm(6, generator=generator) for _ in range(2)])[..., None]
    found = {name: value.gather(1, order.expand_as(value)) for name, value in expected.items()}
    assert not torch.equal(found["logits"], expected["logits"])
    restored = in_order(found, expected)
    assert all(torch.equal(restored[name], value) for name, value in expected.items())
    # `in_order` does not hide that boxes are assigned to the wrong queries.
    swapped = {**expected, "pred_boxes": expected["pred_boxes"].flip(1)}
    assert not torch.allclose(in_order(swapped, expected)["pred_boxes"], expected["pred_boxes"])

    # A difference of NaN does not count as equal.
    equal = [Difference(1, 32, 32, "logits", largest).is_equal for largest in (1e-5, 2e-4, float("nan"))]
    assert equal == [True, False, False]
