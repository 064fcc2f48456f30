"""Test that exported models produce equal outputs in other libraries, and that importing them restores the weights."""

import json

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from hf_vit import HfViTBackbone, HfViTForImageClassification, HfViTImageProcessor, HfViTModel
from hf_vit.convert import LAYOUTS, export_checkpoint

from ..helpers.models import pixels, small_config
from ..helpers.references import draw_weights
from .comparisons import assert_same_weights


NAMES = {"id2label": dict(enumerate(["ant", "bee", "cat", "dog", "elk"]))}
CLASSIFIER = HfViTForImageClassification
# The intermediate size 88 is 2/3 of 4 * 32, rounded up to a multiple of 8.
GATED = {"use_gated_mlp": True, "hidden_act": "silu", "intermediate_size": 88, "position_antialias": True}
MEAN = {"pooling": "mean", "use_cls_token": False}
NO_BIASES = {"qkv_bias": False, "proj_bias": False, "mlp_bias": False}
# Model configurations, and the layouts that can represent them.
CASES = [
    ("vit", HfViTModel, {"use_pooler": True}),
    ("vit", CLASSIFIER, {"layer_norm_eps": 1e-12, "hidden_act": "relu", "qkv_bias": False, **NAMES}),
    ("vit", CLASSIFIER, {"num_channels": 1, "image_size": (16, 32)}),
    ("deit", CLASSIFIER, {"use_distillation_token": True, **NAMES}),
    ("dinov2", HfViTModel, {"layerscale_value": 0.3, "use_mask_token": True, "intermediate_size": 64}),
    ("dinov2", CLASSIFIER, {"layerscale_value": 1.0, "pooling": "cls_mean", "intermediate_size": 64}),
    (
        "dinov2_with_registers",
        HfViTModel,
        {"layerscale_value": 1.0, "use_mask_token": True, "num_register_tokens": 3, **GATED},
    ),
    ("timm", CLASSIFIER, {"position_antialias": True, **NAMES}),
    ("timm", CLASSIFIER, {"pooling": "mean", "norm_after_pooling": True, "num_channels": 1}),
    ("timm", CLASSIFIER, {"use_qk_norm": True, **MEAN}),
    ("timm", CLASSIFIER, {"use_distillation_token": True}),
    ("timm", CLASSIFIER, {"pooling": "attention", "hidden_act": "quick_gelu"}),
    ("timm", HfViTModel, {"num_register_tokens": 2, "prefix_has_position": False, "layerscale_value": 0.5}),
    ("timm", CLASSIFIER, {"num_register_tokens": 4}),
    ("timm", HfViTModel, {"num_register_tokens": 4, "pooling": "attention", "image_size": (16, 32)}),
    ("timm", CLASSIFIER, {"num_register_tokens": 3, "image_size": (16, 32), **MEAN}),
    ("timm", HfViTModel, {"norm_type": "rmsnorm", **NO_BIASES}),
]


def build(model_class, **options):
    model = model_class(small_config(**options)).eval()
    draw_weights(model)
    return model


def run_theirs(layout, folder, images):
    """Open an exported folder with the library of the layout. Assert that no weight is missing or unexpected."""
    if layout == "timm":
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        name = "logits" if model.num_classes else "pooler_output"
        return {name: model(images)}
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    outputs = model.eval()(images)
    names = ("logits", "cls_logits", "distillation_logits", "last_hidden_state")
    return {name: outputs[name] for name in names if name in outputs}


@pytest.mark.parametrize(("layout", "model_class", "options"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_export_has_equal_outputs_and_can_be_imported_again(layout, model_class, options, tmp_path):
    model, folder = build(model_class, **options), tmp_path / "exported"
    export_checkpoint(model, folder, layout)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "exported", "model.safetensors"]
    images = pixels(model.config)
    with torch.no_grad():
        expected, actual = model(images), run_theirs(layout, folder, images)
    assert actual
    for name, value in actual.items():
        assert value.std() > 0.1
        torch.testing.assert_close(value, expected[name], atol=1e-5 * float(value.abs().max()), rtol=0)
    back = model_class.from_pretrained(folder)
    assert_same_weights(back, model)
    if "id2label" in options:
        assert back.config.id2label == options["id2label"]


@pytest.mark.parametrize(
    ("layout", "options", "reason"),
    [
        ("vit", {"num_register_tokens": 2}, "no tensor for embeddings.register_tokens"),
        ("vit", {"pooling": "mean"}, "does not support pooling='mean'"),
        ("vit", {"position_embedding_type": "sincos2d"}, "type='sincos2d' \\(read back as 'learned'"),
        ("vit", {"key_bias": False}, "no tensor for .*query_bias"),
        ("deit", {}, "does not support use_distillation_token=False|no tensor"),
        ("dinov2", {"intermediate_size": 64, "pooling": "cls_mean"}, r"layerscale_value=None \(read back as 1.0\)"),
        ("dinov2", {"image_size": (16, 32)}, r"support image_size=\(16, 32\), .*load the model with image_size=32"),
        ("dinov2_with_registers", {"patch_size": (8, 16)}, r"not support patch_size=\(8, 16\)"),
        ("dinov2", {"layerscale_value": 1.0}, "does not support intermediate_size=48"),
        ("timm", {"layer_norm_eps": 1e-12}, "does not support layer_norm_eps"),
        ("timm", {"use_pre_layernorm": True}, "does not support use_pre_layernorm=True"),
        ("timm", {"position_embedding_type": "rotary"}, "does not support position_embedding_type='rotary'"),
        ("timm", {"position_embedding_type": "none"}, "does not support position_embedding_type='none'"),
        ("timm", {"key_bias": False}, "does not support key_bias=False"),
        ("timm", {"mlp_bias": False}, "does not support"),
        ("timm", {"pooling": "cls_mean"}, "cls_mean"),
        ("timm", {"use_distillation_token": True, "num_register_tokens": 2}, "num_register_tokens=2 with use_distill"),
        ("timm", {"use_distillation_token": True, "pooling": "mean"}, "does not support pooling='mean' with use_dist"),
        ("timm", {"use_distillation_token": True, "prefix_has_position": False}, "not support prefix_has_position"),
        ("timm", {"hidden_act": "relu"}, "does not support hidden_act='relu'"),
        ("swin", {}, "Unknown export layout 'swin'.* vit, deit"),
    ],
)
def test_options_unsupported_by_the_layout_raise(layout, options, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        export_checkpoint(build(HfViTForImageClassification, **options), tmp_path / "exported", layout)
    assert not list(tmp_path.iterdir())


def test_unexportable_models_raise_with_a_suggestion(tmp_path):
    folder = tmp_path / "exported"
    with pytest.raises(ValueError, match=r"mean of the CLS token and .*Export an HfViTForImageClassification"):
        export_checkpoint(build(HfViTModel, use_distillation_token=True), folder, "timm")
    with pytest.raises(ValueError, match=r"HfViTBackbone cannot be exported.*base_model"):
        export_checkpoint(build(HfViTBackbone), folder, "vit")
    processor = HfViTImageProcessor(do_pad=True, ensure_multiple_of=8, size={"longest_edge": 64})
    with pytest.raises(ValueError, match=r"layout 'vit' does not support these image processor options.*do_pad"):
        export_checkpoint(build(HfViTModel), folder, "vit", processor)
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        export_checkpoint(build(HfViTModel), tmp_path, "vit")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("layout", ["vit", "deit", "timm"])
def test_a_mask_token_is_left_out_where_there_is_no_place_for_it(layout, tmp_path, caplog):
    options = {**[case for case in CASES if case[0] == layout][-1][2], "use_distillation_token": layout == "deit"}
    model, folder = build(HfViTForImageClassification, use_mask_token=True, **options), tmp_path / "exported"
    with caplog.at_level("WARNING", "hf_vit"):
        export_checkpoint(model, folder, layout)
    assert "has no mask token, so it is dropped" in caplog.text
    images = pixels(model.config)
    with torch.no_grad():
        logits = run_theirs(layout, folder, images)["logits"]
        torch.testing.assert_close(logits, model(images).logits, atol=1e-5 * float(logits.abs().max()), rtol=0)
    assert not HfViTForImageClassification.from_pretrained(folder).config.use_mask_token


PROCESSORS = [
    {"size": {"height": 32, "width": 32}},
    {"size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": 32, "resample": 3, "image_mean": 0.4},
]


@pytest.mark.parametrize("options", PROCESSORS, ids=["exact", "crop"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_image_processor_goes_along(layout, options, tmp_path):
    _, model_class, config = next(case for case in CASES if case[0] == layout)
    processor, folder = HfViTImageProcessor(**options), tmp_path / "exported"
    export_checkpoint(build(model_class, **config), folder, layout, processor)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 48, 3), np.uint8)).resize((90, 72))
    if layout == "timm":
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        theirs = create_transform(**resolve_model_data_config(model), is_training=False)(photo)[None]
    else:
        theirs = transformers.AutoImageProcessor.from_pretrained(folder)(photo, return_tensors="pt").pixel_values
    ours = processor(photo, return_tensors="pt").pixel_values
    assert float((ours - theirs).abs().max()) <= 2.01 / 255 / min(processor.image_std)
    again = HfViTImageProcessor.from_pretrained(folder)(photo, return_tensors="pt").pixel_values
    assert torch.equal(again, ours)
