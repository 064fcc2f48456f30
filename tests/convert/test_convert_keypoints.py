"""Converted ViTPose of transformers: outputs, gradients, choice of an expert, image processor, command."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hf_vit import HfViTBackbone, HfViTForKeypointDetection, HfViTForSemanticSegmentation, HfViTModel, cli
from hf_vit.convert import parity
from hf_vit.convert.image_processor import image_processor_options

from ..helpers.references import assert_close, draw_weights
from .comparisons import assert_all_matter, dtypes, gradient, reconfigure


# A large epsilon: converting it to another value would change the outputs visibly.
BACKBONE: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2},
    **{"image_size": [48, 32], "patch_size": [8, 8], "layer_norm_eps": 1e-3, "out_indices": [2]},
}
NAMES = ["Nose", "L_Eye", "R_Eye"]
EXPERTS = {"num_experts": 3, "part_features": 12}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "classic": ({}, {"use_simple_decoder": False}),
    "simple": ({"qkv_bias": False}, {"scale_factor": 2}),
    "experts": (EXPERTS, {"use_simple_decoder": False}),
}


def save_source(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    backbone, options = CASES[name]
    config = hf.VitPoseConfig(
        backbone_config=hf.VitPoseBackboneConfig(**BACKBONE, **backbone),
        id2label=dict(enumerate(NAMES)),
        edges=[[0, 1], [0, 2]],
        **options,
    )
    source = hf.VitPoseForPoseEstimation(config).eval()
    draw_weights(source)
    generator = torch.Generator().manual_seed(3)
    for module in source.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    source.to(dtype).save_pretrained(folder)
    return source


def draw_images(dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 3, 48, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


@dtypes
@pytest.mark.parametrize(("name", "expert"), [("classic", None), ("simple", None), ("experts", None), ("experts", 2)])
def test_equals_source(name: str, expert: int | None, dtype: torch.dtype, tmp_path: Path) -> None:
    source = save_source(name, tmp_path, dtype)
    chosen = {} if expert is None else {"dataset_index": expert}
    model, info = HfViTForKeypointDetection.from_pretrained(tmp_path, output_loading_info=True, **chosen)
    assert not any(info.values()), info
    images = draw_images(dtype)
    expected = parity.run_vitpose(source, images, **chosen)
    actual = parity.run_plain(model, images)
    assert expected.keys() == actual.keys() >= {"hidden_states[2]", "heatmaps"}
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for output, value in expected.items():
        assert value.std() >= 0.1, f"{output} hardly varies"
        assert_close(actual[output], value, tolerance, output)
    assert_all_matter(source, {"heatmaps": expected["heatmaps"]}, rf".*experts\.[^{expert or 0}]\..*")
    ours, theirs = (gradient([outputs["heatmaps"]], images) for outputs in (actual, expected))
    assert_close(ours, theirs, tolerance, "gradient")


def test_keypoints_come_along_and_others_get_a_fresh_last_layer_of_the_same_head(tmp_path: Path) -> None:
    save_source("simple", tmp_path)
    config = HfViTForKeypointDetection.from_pretrained(tmp_path).config
    assert config.id2label == dict(enumerate(NAMES))
    assert (config.keypoint_config.skeleton, config.keypoint_config.flip_pairs) == ([[0, 1], [0, 2]], [[1, 2]])
    assert (config.keypoint_config.head, config.keypoint_config.scale_factor) == ("simple", 2)
    theirs = {"flip_pairs": [[0, 3]], "skeleton": []}
    model, info = HfViTForKeypointDetection.from_pretrained(
        tmp_path, num_labels=4, keypoint_config=theirs, output_loading_info=True
    )
    layer = "keypoint_head.simple.predictor"
    assert {key for key, *_ in info["mismatched_keys"]} == {f"{layer}.weight", f"{layer}.bias"}
    assert model.config.keypoint_config.to_dict() == {"head": "simple", "scale_factor": 2, "flip_pairs": [[0, 3]]}
    with pytest.raises(ValueError, match=r"flip_pairs has \[1, 2\], but num_labels=2 .* Change flip_pairs"):
        HfViTForKeypointDetection.from_pretrained(tmp_path, num_labels=2)


def test_opens_as_other_models_too_and_at_other_sizes(tmp_path: Path) -> None:
    source = save_source("classic", tmp_path)
    images = draw_images(torch.float32)
    expected = parity.run_vitpose(source, images)["hidden_states[2]"]
    for model_class in (HfViTModel, HfViTBackbone, HfViTForSemanticSegmentation):
        model = model_class.from_pretrained(tmp_path).eval()
        assert_close(model(images, output_hidden_states=True).hidden_states[2], expected, 1e-5, model_class.__name__)
    model = HfViTForKeypointDetection.from_pretrained(tmp_path, image_size=(64, 64), patch_size=16)
    assert model(torch.zeros(1, 3, 64, 64)).heatmaps.shape == (1, 3, 16, 16)
    assert model.config.patch_padding == 4


def test_backbone_alone_opens(tmp_path: Path) -> None:
    source = hf.VitPoseBackbone(hf.VitPoseBackboneConfig(**BACKBONE)).eval()
    draw_weights(source)
    source.save_pretrained(tmp_path)
    images = draw_images(torch.float32)
    (expected,) = source(images).feature_maps
    assert_close(HfViTModel.from_pretrained(tmp_path)(images).last_hidden_state, expected, 1e-5, "tokens")


@pytest.mark.parametrize(
    ("name", "changes", "chosen", "message"),
    [
        ("experts", {}, {"dataset_index": 3}, "dataset_index=3 is out of range: the checkpoint has 3 experts, 0 to 2"),
        ("simple", {}, {"dataset_index": 1}, "dataset_index=1 is out of range: the checkpoint has 1 experts, 0 to 0"),
        ("simple", {"out_indices": [1]}, {}, r"uses out_indices=\[1\], but only the last of num_hidden_layers=2"),
        ("simple", {"model_type": "swin"}, {}, "backbone_config has model_type='swin'"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(
    name: str, changes: dict[str, Any], chosen: dict[str, int], message: str, tmp_path: Path
) -> None:
    save_source(name, tmp_path)
    backbone = json.loads((tmp_path / "config.json").read_text())["backbone_config"]
    reconfigure(tmp_path, backbone_config={**backbone, **changes})
    with pytest.raises(ValueError, match=message):
        HfViTForKeypointDetection.from_pretrained(tmp_path, **chosen)


def test_a_choice_among_experts_is_refused_where_a_family_has_none(tmp_path: Path) -> None:
    hf.ViTModel(hf.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a ViT model, which has no experts. Remove dataset_index"):
        HfViTModel.from_pretrained(tmp_path, dataset_index=1)


def test_image_processor_of_vitpose_in_our_terms() -> None:
    theirs = hf.VitPoseImageProcessor(size={"height": 48, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    options = image_processor_options(json.loads(theirs.to_json_string()), model_type="vitpose")
    assert (options["size"], options["image_mean"]) == ({"height": 48, "width": 32}, [0.1, 0.2, 0.3])
    assert (options["do_affine_crop"], options["do_center_crop"]) == (True, False)
    left_out = image_processor_options({}, model_type="vitpose")
    assert left_out == image_processor_options(json.loads(hf.VitPoseImageProcessor().to_json_string()), model_type="")
    with pytest.raises(ValueError, match="normalize_factor"):
        image_processor_options({"normalize_factor": 100.0}, model_type="vitpose")


def test_script_converts_one_expert_and_compares_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "theirs", tmp_path / "ours"
    theirs = save_source("experts", source)
    hf.VitPoseImageProcessor(size={"height": 48, "width": 32}).save_pretrained(source)
    cli.main(["convert", str(source), str(output), "--dataset_index", "1"])
    assert re.search(r"48x32  heatmaps .* equal", capsys.readouterr().out)
    card = (output / "README.md").read_text()
    assert "pipeline_tag: keypoint-detection" in card
    assert "dataset_index = 1" in card
    images = draw_images(torch.float32)
    expected = parity.run_vitpose(theirs, images, dataset_index=1)["heatmaps"]
    assert_close(HfViTForKeypointDetection.from_pretrained(output)(images).heatmaps, expected, 1e-5, "heatmaps")
    assert json.loads((output / "preprocessor_config.json").read_text())["do_affine_crop"] is True
