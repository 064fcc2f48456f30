"""Test that converted models of all transformers families have equal outputs and gradients and use every weight."""

import json

import pytest
import torch
import transformers as hf
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTModel
from hf_vit.convert.families import FAMILIES
from hf_vit.convert.family import round_to_patches
from hf_vit.convert.loading import convert_checkpoint, find_family_by_config
from hf_vit.convert.source import open_source

from ..helpers.models import MODEL_CLASSES
from ..helpers.references import assert_close
from .comparisons import assert_all_matter, assert_same_outputs, dtypes, gradient, reconfigure
from .sources import CASES, NATIVE, SHAPE, draw_images, interpolate_positions, run_source, save_source


# Parts of models that are not compared here but in test_convert_tasks.py and test_convert_contrastive.py.
OTHER_PARTS = ("masked_image_modeling_head.", "text_model.", "contrastive_head.")


@pytest.mark.parametrize("name", CASES)
@dtypes
def test_equals_source(name, dtype, tmp_path):
    case, source = CASES[name], save_source(name, tmp_path, dtype)
    model, info = case.our_class.from_pretrained(tmp_path, output_loading_info=True, **(case.chosen or {}))
    info["unexpected_keys"] -= {key for key in info["unexpected_keys"] if key.startswith(OTHER_PARTS)}
    assert not any(info.values()), info
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    is_exact = dtype == torch.float64
    for size in case.sizes:
        images = draw_images(size, dtype)
        inputs = {name: values for name, values in case.inputs(images).items() if name == "bool_masked_pos"}
        expected, actual = run_source(case, source, images), case.run_ours(model, images, **inputs)
        assert {name.partition("[")[0] for name in expected} == {"hidden_states", *case.outputs}
        assert_same_outputs(actual, expected, 1e-9 if is_exact else case.tolerance)
        if size == case.sizes[0] and is_exact:
            assert_all_matter(source.get_submodule(case.part), expected, case.unused)
        theirs, ours = (gradient((outputs[name] for name in expected), images) for outputs in (expected, actual))
        assert_close(ours, theirs, 1e-9 if is_exact else case.gradient_tolerance, f"gradient at {size}")


@pytest.mark.parametrize("grid", [(3, 6), (9, 7), (2, 2)])
def test_siglip_2_resamples_like_the_reference_up_to_float32(grid):
    positions, length = torch.randn(4, 4, 32, generator=torch.Generator().manual_seed(0)), grid[0] * grid[1]
    shapes = torch.tensor([grid] * 2)
    expected = Siglip2VisionEmbeddings.resize_positional_embeddings(positions, shapes, length)
    assert_close(interpolate_positions(positions, shapes, length), expected, 1e-6, "resampled positions")


@torch.no_grad()
@pytest.mark.parametrize("name", ["ViTModel", "Dinov2WithRegistersModel", "CLIPVisionModel", "SiglipVisionModel"])
def test_pixels_beyond_whole_patches_are_left_out(name, tmp_path):
    """Patches of 8 pixels do not cover images of 36 pixels completely."""
    source = save_source(name, tmp_path, image_size=36)
    model = HfViTModel.from_pretrained(tmp_path)
    assert model.config.image_size == 32
    images = draw_images((36, 36))
    whole = images[:, :, :32, :32]
    options = {"interpolate_pos_encoding": True} if "Dinov2" not in name else {}
    for seen, sizes in ((images, {}), (whole, options)):  # most source models resample positions only on request
        assert_close(model(whole).pooler_output, source(seen, **sizes).pooler_output, 1e-4, f"{seen.shape}")


# LW-DETR and ViTPose are excluded because their heads replace the final norm or its output.
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("LW-DETR", "ViTPose"))])
@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.thinned(6)
def test_opens_under_every_class_with_only_the_head_new(name, model_class, tmp_path):
    save_source(name, tmp_path)
    weights = convert_checkpoint(open_source(tmp_path)).weights
    base = {key.removeprefix("model."): value for key, value in weights.items() if "classifier." not in key}
    # These head options are valid for an encoder with two blocks and without a CLS token.
    heads = {"universal_segmentation_config": {"num_blocks": 1}, "depth_config": {"readout_type": "ignore"}}
    is_classifier = model_class is HfViTForImageClassification
    is_same = not is_classifier and model_class is CASES[name].our_class
    options = {"num_labels": 7} if is_classifier else {} if is_same else heads
    model, info = model_class.from_pretrained(tmp_path, output_loading_info=True, **options)
    own = {key for key in model.state_dict() if not is_same and ("classifier." in key or "_head." in key)}
    assert info["missing_keys"] | {key for key, *_ in info["mismatched_keys"]} == own
    assert all(len(model.state_dict()[key]) == 7 for key in own if is_classifier)
    assert all(torch.equal(tensor, base[key]) for key, tensor in model.base_model.state_dict().items())
    known = {"classifier", "distillation_classifier", "pooler", "attention_pooling"}
    known |= {"universal_segmentation_head", "depth_head", "detection_head"}
    left = {key.removeprefix("model.").split(".")[0] for key in info["unexpected_keys"]}
    assert left <= known | {part[:-1] for part in OTHER_PARTS}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ViTModel", {"pooler_act": "gelu"}, r"pooler_act='gelu'.*only 'tanh'"),
        ("ViTModel", {"pooler_output_size": 8}, r"output_size=8.*hidden_size=32"),
        ("ViTModel", {"dataset_index": 1}, r"is a ViT model, which has no experts. Remove dataset_index"),
        ("DINOv3ViTModel", {"value_bias": False}, "'value_bias': False"),
        ("DINOv3ViTModel", {"apply_layernorm": False}, "apply_layernorm=False.*only apply_layernorm=True"),
        ("DPT", {"is_hybrid": True}, "is_hybrid=True"),
        ("DPT", {"backbone_config": {"model_type": "swinv2"}}, "backbone_config=.*swinv2"),
        ("DPT", {"backbone_config": {"model_type": "dinov2"}}, "backbone_config=.*dinov2"),
        ("DPT", {"add_projection": True}, "add_projection=True"),
        ("DPT", {"use_batch_norm_in_fusion_residual": True}, "use_batch_norm_in_fusion_residual=True"),
        ("DPT", {"readout_type": "mean"}, "readout_type"),
        ("Depth Anything", {"backbone_config": {"model_type": "swin"}}, "model_type='swin'"),
        ("Depth Anything", {"max_depth": 3}, "max_depth=3 is not supported for relative depth"),
        ("Depth Anything", {"depth_estimation_type": "log"}, "depth_estimation_type"),
        ("EoMT", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("EoMT", {"num_queries": 9}, r"queries.weight of shape \(5, 32\)"),
        ("LW-DETR", {"backbone_config": {"model_type": "dinov2"}}, "backbone_config has model_type='dinov2'"),
        ("LW-DETR", {"decoder_ffn_dim": 64}, "decoder_ffn_dim=64 .* it must be 128"),
        ("LW-DETR", {"decoder_cross_attention_heads": 2}, "decoder_cross_attention_heads=2 .* it must be 4"),
        ("LW-DETR", {"activation_function": "relu"}, "activation_function='relu'"),
        ("LW-DETR", {"dropout": 0.1}, "dropout=0.1"),
        ("LW-DETR", {"projector_scale_factors": [4.0]}, r"scale_factors=\[4.0\]"),
        ("LW-DETR", {"group_detr": 3}, r"Missing: .*enc_out_bbox_embed\.2"),
        ("ViTPose+", {"dataset_index": 3}, "dataset_index=3 is out of range: the checkpoint has 3 experts, 0 to 2"),
        ("ViTPose", {"dataset_index": 1}, "dataset_index=1 is out of range: the checkpoint has 1 experts, 0 to 0"),
        ("ViTPose", {"out_indices": [1]}, r"out_indices=\[1\], but only the output of the last of .*=2 blocks"),
        ("ViTPose", {"model_type": "swin"}, "backbone_config has model_type='swin'"),
    ],
)
def test_unsupported_configuration_fields_raise(name, changes, message, tmp_path):
    """`changes` replaces fields of the configuration (for ViTPose, of the backbone) or selects an expert."""
    save_source(name, tmp_path)
    chosen = changes if "dataset_index" in changes else {}
    if "ViTPose" in name:
        backbone = json.loads((tmp_path / "config.json").read_text())["backbone_config"]
        changes = {"backbone_config": {**backbone, **changes}}
    reconfigure(tmp_path, **({} if chosen else changes))
    with pytest.raises(ValueError, match=message):
        CASES[name].our_class.from_pretrained(tmp_path, **chosen)


class Reads(dict):
    """A dictionary that records which keys are read."""

    def __init__(self, content):
        super().__init__(content)
        self.names = set()

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)


MULTIMODAL = ("text_config", "projection_dim", "logit_scale_init_value", "initializer_factor", "tie_word_embeddings")
# Names of configuration fields for the matching of predictions to targets and for losses.
MATCHING = ("class_cost", "bbox_cost", "giou_cost", "eos_coefficient", "auxiliary_loss")
# Fields of transformers configurations that do not affect our outputs: they concern training or other parts of the
# model, or they can be derived from the weights.
FIELDS_WITHOUT_EFFECT = {
    "vit": ("encoder_stride",),
    "deit": ("encoder_stride",),
    "ijepa": ("pooler_output_size", "pooler_act"),
    "dinov2": ("use_mask_token",),
    "eomt_dinov3": ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"),
    "dpt": (
        *("backbone_featmap_shape", "neck_ignore_stages", "use_bias_in_fusion_residual", "use_auxiliary_head"),
        *("auxiliary_loss_weight", "semantic_loss_ignore_index", "semantic_classifier_dropout"),
    ),
    "depth_anything": ("patch_size", "reassemble_hidden_size", "initializer_range"),
    "dinov3_vit": ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"),
    "yolos": ("use_mid_position_embeddings", *MATCHING),
    "lw_detr": (
        *(*MATCHING, "class_loss_coefficient", "dice_loss_coefficient", "focal_alpha", "init_std"),
        "disable_custom_kernels",
        # Fields that are derived from other fields.
        *("projector_in_channels", "projector_out_channels", "num_feature_levels"),
    ),
    "vitpose": ("initializer_range",),
    "vitpose_backbone": ("num_experts", "part_features"),
    **dict.fromkeys(("clip", "clip_vision_model"), MULTIMODAL),
    **dict.fromkeys(("siglip", "siglip_vision_model", "siglip2", "siglip2_vision_model"), MULTIMODAL),
}
# ViTPose attaches its head to an intermediate block by default, which our models do not support.
NOT_BY_DEFAULT = {"vitpose": {"backbone_config": hf.VitPoseBackboneConfig()}}


@pytest.mark.parametrize("model_type", sorted({t for family in FAMILIES for t in family.model_types}))
def test_every_field_of_the_source_is_decided_and_has_its_default(model_type):
    theirs = hf.CONFIG_MAPPING[model_type](**NOT_BY_DEFAULT.get(model_type, {}))
    full = Reads(json.loads(theirs.to_json_string(use_diff=False)))
    family = find_family_by_config(full)
    family.configure(full, {"pooler.dense.weight": (1, 1)})
    own = vars(theirs).keys() - vars(hf.PreTrainedConfig()).keys() - {"stage_names", "_attn_implementation"}
    decided = {*full.names, *family.fixed, *FIELDS_WITHOUT_EFFECT.get(model_type, ())}
    assert {name.removeprefix("_") for name in own} <= decided
    ours = [HfViTConfig(**family.configure(config, {})).to_dict() for config in (full, {"model_type": model_type})]
    assert ours[0] == ours[1]


def test_image_size_is_in_whole_patches():
    cases = ((384, 14, 378), (224, 16, 224), ([30, 50], 8, [24, 48]), (20, [4, 8], [20, 16]), (32, 0, 32))
    for image_size, patch_size, whole in cases:
        assert round_to_patches(image_size, patch_size) == whole


@torch.no_grad()
def test_older_dictionary_of_clip_wins(tmp_path):
    save_source("CLIPModel", tmp_path)
    # Fields missing in vision_config_dict use the defaults of the class, even if vision_config sets them.
    old = {name: value for name, value in SHAPE.items() if name != "layer_norm_eps"} | {"hidden_act": "gelu"}
    reconfigure(tmp_path, vision_config_dict=old)
    source = hf.CLIPModel.from_pretrained(tmp_path).eval().vision_model
    assert (source.config.hidden_act, source.config.layer_norm_eps) == ("gelu", 1e-5)
    images = draw_images(NATIVE)
    expected = source(images).pooler_output
    assert_close(HfViTModel.from_pretrained(tmp_path)(images).pooler_output, expected, 1e-4, "pooled")


@torch.no_grad()
def test_mae_with_a_mask_is_its_encoder_on_the_visible_patches(tmp_path):
    source = save_source("ViTMAEModel", tmp_path)
    model = HfViTModel.from_pretrained(tmp_path)
    source.config.mask_ratio = 0.75
    images, noise = draw_images(NATIVE), torch.rand(2, 16, generator=torch.Generator().manual_seed(0))
    expected = source(images, noise=noise)
    kept = noise.argsort(dim=1)[:, :4]
    tokens = model.embeddings(images)
    places = torch.cat((torch.zeros(2, 1, dtype=torch.long), 1 + kept), dim=1)
    visible = tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))
    assert_close(model.norm(model.encoder(visible)), expected.last_hidden_state, 1e-4, "visible patches")
    assert expected.mask.sum() == 24
