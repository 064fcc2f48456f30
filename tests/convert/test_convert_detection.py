"""Converted LW-DETR of transformers: outputs, gradients, sensitivity to each tensor, image processing."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn
from transformers.models.yolos.modeling_yolos import YolosObjectDetectionOutput

from hf_vit import (
    HfViTBackbone,
    HfViTForObjectDetection,
    HfViTForSemanticSegmentation,
    HfViTImageProcessor,
    HfViTModel,
    cli,
)
from hf_vit.convert.loading import convert_checkpoint
from hf_vit.convert.parity import run_lw_detr
from hf_vit.convert.source import open_source

from ..helpers.references import assert_close, draw_weights
from .comparisons import assert_all_matter, dtypes, gradient, reconfigure


BACKBONE: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "mlp_ratio": 2},
    **{"pretrain_image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-3, "image_size": 64},
    **{"window_block_indices": [0, 2], "num_windows": 4, "out_indices": [1, 3]},
}
DECODER: dict[str, Any] = {
    **{"d_model": 16, "decoder_ffn_dim": 128, "decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 4},
    **{"decoder_n_points": 2, "decoder_layers": 2, "num_queries": 6, "group_detr": 2, "num_labels": 5},
    "projector_scale_factors": [1.0],
}
# Name -> options of the decoder, options of the backbone, and (height, width) of the images.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "one level": ({}, {}, (32, 32)),
    "two levels, positions of another size": ({"projector_scale_factors": [2.0, 0.5]}, {}, (48, 80)),
    "wide, narrowed": (
        {"projector_scale_factors": [2.0]},
        {"hidden_size": 520, "num_hidden_layers": 1, "window_block_indices": [0], "out_indices": [1]},
        (32, 32),
    ),
}
cases = pytest.mark.parametrize("name", CASES)
# Outside of training, the decoder uses only one query group.
OTHER_GROUP = r"model\.enc_out.*\.1\..*"


def save_source(name: str, folder: Path, dtype: torch.dtype = torch.float64) -> hf.LwDetrForObjectDetection:
    decoder, backbone, (height, width) = CASES[name]
    torch.manual_seed(0)
    config = hf.LwDetrConfig(**{**DECODER, **decoder}, backbone_config=hf.LwDetrViTConfig(**{**BACKBONE, **backbone}))
    source = hf.LwDetrForObjectDetection(config).eval()
    draw_weights(source)
    for name, parameter in source.named_parameters():
        if "gamma_" in name:  # scale factors of the blocks; the last block is not followed by a norm
            parameter.data.mul_(0.5)
        # The decoder takes the exponential of these outputs.
        elif "reference_point" in name or "bbox_embed.layers.2" in name:
            parameter.data.mul_(0.3)
    for module in source.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    source.to(dtype).save_pretrained(folder)
    hf.DeformableDetrImageProcessor(size={"height": height, "width": width}).save_pretrained(folder)
    return source


def draw_images(name: str, dtype: torch.dtype) -> Tensor:
    images = torch.randn(2, 3, *CASES[name][2], generator=torch.Generator().manual_seed(1)).to(dtype)
    return images.requires_grad_()


def run_source(source: hf.LwDetrForObjectDetection, images: Tensor) -> dict[str, Tensor]:
    """Return all outputs of all layers of the source model."""
    outputs = source.model(images)
    states, (start,) = outputs.intermediate_hidden_states, outputs.intermediate_reference_points
    offsets = source.bbox_embed(states)
    boxes = torch.cat(
        (start[..., :2] + offsets[..., :2] * start[..., 2:], offsets[..., 2:].exp() * start[..., 2:]), -1
    )
    proposals = source(images)
    return {
        **run_lw_detr(source, images),
        "logits 0": proposals.enc_outputs_class,
        "boxes 0": proposals.enc_outputs_coord_logits,
        **{f"logits {number}": logits for number, logits in enumerate(source.class_embed(states), 1)},
        **{f"boxes {number}": own for number, own in enumerate(boxes, 1)},
    }


def run_converted(model: HfViTForObjectDetection, images: Tensor) -> dict[str, Tensor]:
    predictions: list[Any] = []
    hook = model.detection_head.register_forward_hook(lambda *call: predictions.extend(call[-1]))
    outputs = model(images, output_hidden_states=True)
    hook.remove()
    return {
        **{f"hidden_states[{number}]": state for number, state in enumerate(outputs.hidden_states)},
        "logits": outputs.logits,
        "pred_boxes": outputs.pred_boxes,
        **{f"logits {number}": prediction.logits for number, prediction in enumerate(predictions)},
        **{f"boxes {number}": prediction.boxes for number, prediction in enumerate(predictions)},
    }


@cases
@dtypes
def test_equals_source(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = save_source(name, tmp_path, dtype)
    model, info = HfViTForObjectDetection.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    images, tolerance = draw_images(name, dtype), 1e-9 if dtype == torch.float64 else 1e-4
    expected, actual = run_source(source, images), run_converted(model, images)
    assert expected.keys() == actual.keys()
    for output, value in expected.items():
        assert value.std() >= 0.1, f"{output} hardly varies"
        assert_close(actual[output], value, tolerance, output)
    assert_all_matter(source, expected, OTHER_GROUP)
    theirs, ours = (gradient((outputs[key] for key in expected), images) for outputs in (expected, actual))
    # The gradient is discontinuous where a sampling point crosses a pixel border, so float32 rounding can change it.
    assert_close(ours, theirs, tolerance if dtype == torch.float64 else 1e-3, "gradient")


def test_groups_of_training_come_along(tmp_path: Path) -> None:
    source = save_source("one level", tmp_path).train()
    model = HfViTForObjectDetection.from_pretrained(tmp_path).train()
    for module in (*source.modules(), *model.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    images = draw_images("one level", torch.float64)
    outputs = source(images)
    assert outputs.logits.shape == (2, 12, 5)
    ours = model(images)
    assert_close(ours.logits, outputs.logits, 1e-9, "logits")
    assert_close(ours.pred_boxes, outputs.pred_boxes, 1e-9, "boxes")


def test_backbone_opens_under_other_classes(tmp_path: Path) -> None:
    save_source("one level", tmp_path)
    weights = convert_checkpoint(open_source(tmp_path)).weights
    for model_class in (HfViTModel, HfViTBackbone, HfViTForSemanticSegmentation):
        model, info = model_class.from_pretrained(tmp_path, output_loading_info=True, num_labels=7)
        state = model.base_model.state_dict()
        assert all(torch.equal(tensor, weights[f"model.{key}"]) for key, tensor in state.items() if key[:5] != "norm.")
        assert not any("encoder." in name or "embeddings." in name for name in info["missing_keys"])
    model, info = HfViTForObjectDetection.from_pretrained(tmp_path, output_loading_info=True, num_labels=7)
    assert not info["missing_keys"]
    assert all(".class_head." in name for name, *_ in info["mismatched_keys"])
    assert model(torch.zeros(1, 3, 32, 32, dtype=torch.float64)).logits.shape == (1, 6, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_config": {"model_type": "dinov2"}}, "backbone_config has model_type='dinov2'"),
        ({"decoder_ffn_dim": 64}, "decoder_ffn_dim=64 .* it must be 128"),
        ({"decoder_cross_attention_heads": 2}, "decoder_cross_attention_heads=2 .* it must be 4"),
        ({"activation_function": "relu"}, "activation_function='relu'"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"projector_scale_factors": [4.0]}, r"scale_factors=\[4.0\]"),
        ({"group_detr": 3}, r"Missing: .*enc_out_bbox_embed\.2"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_source("one level", tmp_path)
    reconfigure(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        HfViTForObjectDetection.from_pretrained(tmp_path)


def test_windows_are_those_of_the_images_that_the_processor_makes(tmp_path: Path) -> None:
    save_source("one level", tmp_path)
    config = HfViTForObjectDetection.from_pretrained(tmp_path).config
    assert (config.image_size, list(config.window_size), list(config.global_attention_layers)) == (32, [2, 2], [1])
    file = tmp_path / "preprocessor_config.json"
    file.write_text(file.read_text().replace("32", "24"))
    with pytest.raises(ValueError, match="24x24 pixels cannot be divided into 2 windows per side"):
        HfViTForObjectDetection.from_pretrained(tmp_path)
    file.unlink()
    config = HfViTForObjectDetection.from_pretrained(tmp_path).config
    assert (config.image_size, list(config.window_size)) == (64, [4, 4])


def test_images_are_those_of_the_source(tmp_path: Path) -> None:
    theirs = hf.DeformableDetrImageProcessor(size={"height": 48, "width": 64})
    theirs.save_pretrained(tmp_path)
    ours = HfViTImageProcessor.from_pretrained(tmp_path)
    image = Image.effect_noise((90, 70), 80).convert("RGB")
    expected, actual = (processor(image, return_tensors="pt")["pixel_values"] for processor in (theirs, ours))
    assert actual.shape == (1, 3, 48, 64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("source", [hf.DeformableDetrImageProcessor, hf.YolosImageProcessor])
def test_logits_are_read_as_by_the_source(source: type[Any], tmp_path: Path) -> None:
    theirs = source()
    theirs.save_pretrained(tmp_path)
    ours = HfViTImageProcessor.from_pretrained(tmp_path, do_pad=False, size={"height": 48, "width": 64})
    outputs = YolosObjectDetectionOutput(logits=torch.randn(1, 4, 3), pred_boxes=torch.rand(1, 4, 4))
    ((expected,), (actual,)) = (
        processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=[(48, 64)])
        for processor in (theirs, ours)
    )
    likeliest = expected["scores"].max()
    torch.testing.assert_close(actual["scores"][0], likeliest)
    torch.testing.assert_close(actual["boxes"][0], expected["boxes"][expected["scores"].argmax()])


def test_script_converts_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_source("one level", tmp_path / "theirs", torch.float32)
    cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    said = capsys.readouterr().out
    for output in ("hidden_states", "logits", "pred_boxes"):
        assert re.search(rf"32x32  {output} .* equal", said)
    model = HfViTForObjectDetection.from_pretrained(tmp_path / "ours")
    processor = HfViTImageProcessor.from_pretrained(tmp_path / "ours")
    image = Image.effect_noise((60, 30), 80).convert("RGB")
    source = hf.LwDetrForObjectDetection.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        images = processor(image, return_tensors="pt")["pixel_values"]
        assert_close(model(images).pred_boxes, source(images).pred_boxes, 1e-4, "boxes")
