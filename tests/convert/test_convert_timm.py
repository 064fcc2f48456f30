"""Test that all plain ViT architectures of timm are recognized by name and that small models give equal outputs."""

import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import nn
from transformers.activations import ACT2FN

from hf_vit import HfViTForImageClassification, HfViTModel
from hf_vit.convert.families.meta import ALWAYS_THERE, AMBIGUOUS_TENSORS, META_FILE
from hf_vit.convert.families.timm_vit import COLUMNS_FIRST, REFUSED, TIMM
from hf_vit.convert.loading import convert_checkpoint
from hf_vit.convert.source import Source
from hf_vit.model.configuration_hf_vit import to_pair

from ..helpers.references import draw_weights
from ..helpers.timm_models import SMALL, assert_equals_timm
from .comparisons import reconfigure


NAMES = ("vit_*", "deit*", "flexivit_*", "test_vit*", "eva_large_*")
ARCHITECTURES = sorted({name for pattern in NAMES for name in timm.list_models(pattern)})


def published_config(model):
    """Return the content of the config.json that timm publishes with a model."""
    names = {name: getattr(model, name) for name in ("num_classes", "global_pool")}
    published = {"input_size": model.pretrained_cfg["input_size"]}
    return {"architecture": model.pretrained_cfg["architecture"], **names, "pretrained_cfg": published}


def without_data(architecture, **options):
    """Return a timm model on the meta device, and an object that represents its weight file."""
    with torch.device("meta"):
        model = timm.create_model(architecture, **options)
    return model, Shapes(model)


class Shapes:
    """A weight file whose tensors have shapes but no data, because published files are as large as 27 GB."""

    def __init__(self, model):
        self.files = (Path("model.safetensors"),)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def file_of(self, name):
        return self.files[0]

    def read(self, name):
        return torch.empty(self.shapes[name], device="meta")

    def read_temporary(self, names):
        return [self.read(name) for name in names]

    def release(self):
        """Do nothing: there is no memory-mapped file to close."""


def refusal(architecture):
    """Return the reason why an architecture is not supported, or None if it is supported."""
    return next((reason for pattern, reason in REFUSED.items() if re.fullmatch(pattern, architecture)), None)


CONVERTED = [name for name in ARCHITECTURES if refusal(name) is None]


def test_no_architecture_is_left_out():
    # Architectures in timm 1.0.31. This test fails if a release adds architectures that are not yet classified.
    assert (len(CONVERTED), len(ARCHITECTURES) - len(CONVERTED)) == (171, 69)


def test_what_is_no_plain_vit_is_refused():
    for architecture in set(ARCHITECTURES) - set(CONVERTED):
        reason = re.escape(refusal(architecture) or "")
        with pytest.raises(ValueError, match=f"'{architecture}' is not a plain ViT: {reason}"):
            TIMM.configure({"architecture": architecture}, {})


@pytest.mark.thinned(3)
@pytest.mark.parametrize("architecture", CONVERTED)
def test_architecture_is_the_same(architecture):
    theirs, weights = without_data(architecture, depth=2)
    converted = convert_checkpoint(Source(architecture, published_config(theirs), weights))
    config = converted.config
    lone = convert_checkpoint(Source(architecture, {"architecture": architecture}, weights)).config
    if "learned" not in config.position_embedding_type:  # only a learned position table determines the image size
        lone.image_size = config.image_size
    assert (lone.pooling, lone.to_dict()) == (config.pooling, config.to_dict())
    assert converted.model_class is (HfViTForImageClassification if theirs.num_classes else HfViTModel)
    assert_same_blocks(config, theirs)
    assert_same_tokens(config, theirs)
    assert_same_rotation(config, theirs, architecture)


def assert_same_blocks(config, theirs):
    block = theirs.blocks[0]
    assert config.num_attention_heads == block.attn.num_heads
    values = torch.linspace(-4, 4, 100)
    mlps = [block.mlp, *([theirs.attn_pool.mlp] if theirs.attn_pool is not None else [])]
    for mlp in mlps:
        assert torch.equal(ACT2FN[config.hidden_act](values), mlp.act(values))
    norms = [module for module in theirs.modules() if isinstance(module, timm.layers.LayerNorm | timm.layers.RmsNorm)]
    assert {norm.eps for norm in norms} == {config.layer_norm_eps}
    kind = timm.layers.LayerNorm if config.norm_type == "layernorm" else timm.layers.RmsNorm
    assert {type(norm) for norm in norms} == {kind}
    assert type(block) in (timm.models.vision_transformer.Block, timm.models.eva.EvaBlock)


def assert_same_tokens(config, theirs):
    assert config.grid_size == theirs.patch_embed.grid_size
    assert to_pair(config.patch_size) == theirs.patch_embed.patch_size
    assert config.num_prefix_tokens == theirs.num_prefix_tokens
    assert ("learned" in config.position_embedding_type) == (theirs.pos_embed is not None)
    assert {"cls": "token", "mean": "avg", "attention": "map"}[config.pooling] == theirs.global_pool
    assert config.norm_after_pooling == (not isinstance(theirs.fc_norm, nn.Identity))


def assert_same_rotation(config, theirs, architecture):
    rope = getattr(theirs, "rope", None)
    assert ("rotary" in config.position_embedding_type) == (rope is not None)
    if rope is None:
        return
    assert config.rope_theta == rope.temperature
    assert rope.grid_offset == 0
    if config.rope_coordinates == "centered":
        assert rope.rotate_half
        assert (rope.normalize_coords, rope.grid_indexing) == ("separate", "ij")
    else:
        assert not rope.rotate_half
        assert (rope.grid_indexing == "xy") == (re.fullmatch(COLUMNS_FIRST, architecture) is not None)
        assert (rope.ref_feat_shape is not None) == (config.rope_coordinates == "scaled_index")
        assert rope.ref_feat_shape in (None, config.rotary_grid_size)


# "test_vit" is excluded: its attention heads have the width 32, which cannot be derived from the file.
@pytest.mark.thinned(4)
@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES} - {"test_vit"}))
def test_weight_file_without_config_is_recognized_or_raises(architecture):
    options = {} if architecture.endswith("sapiens2") else {"depth": 2}  # Sapiens 2 models need more than 2 blocks
    theirs, weights = without_data(architecture, **options)
    names = theirs.state_dict().keys()
    lone = Source(architecture, {}, weights)
    if names & {*AMBIGUOUS_TENSORS} or not names >= {*META_FILE.marks, *ALWAYS_THERE}:
        with pytest.raises(ValueError, match=r"timm.*architecture="):
            convert_checkpoint(lone)
    elif architecture not in CONVERTED:
        with pytest.raises(ValueError, match="do not match"):
            convert_checkpoint(lone)
    else:
        named = Source(architecture, published_config(theirs), weights)
        configs = [convert_checkpoint(source).config for source in (lone, named)]
        for config in configs:
            config.position_antialias = False  # timm and the original code may differ in the antialiasing of positions
        assert configs[0].to_dict() == configs[1].to_dict()


# Kind of model -> timm architecture, and model arguments in addition to `SMALL`.
KINDS = {
    "plain": ("vit_base_patch16_224", {}),
    "without head": ("vit_base_patch16_224", {"num_classes": 0}),
    "not square": ("vit_base_patch16_224", {"img_size": (32, 48), "patch_size": (8, 16)}),
    "mean": ("vit_medium_patch16_gap_256", {}),
    "norm after pooling": ("vit_base_patch16_224", {"global_pool": "avg"}),
    "registers": ("vit_medium_patch16_reg4_gap_256", {}),
    "registers with positions": ("vit_so150m2_patch16_reg1_gap_256", {}),
    "class token and registers with positions": ("vit_base_patch16_224", {"reg_tokens": 2}),
    "query and key norm": ("vit_base_patch16_224", {"qk_norm": True}),
    "root mean square norm": ("test_vit4", {}),
    "CLIP": ("vit_base_patch32_clip_224", {}),
    "CLIP quick": ("vit_base_patch32_clip_quickgelu_224", {}),
    "activation by argument": ("vit_base_patch16_224", {"act_layer": "quick_gelu"}),
    "norm by argument": ("vit_base_patch32_clip_224", {"norm_layer": "layernorm"}),
    "SigLIP": ("vit_base_patch16_siglip_224", {}),
    "SigLIP 2": ("vit_so400m_patch16_siglip_256", {}),
    "SigLIP mean": ("vit_base_patch16_siglip_gap_224", {}),
    "registers that are not pooled": ("vit_so150m_patch16_reg4_map_256", {}),
    "DeiT III": ("deit3_small_patch16_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "DINOv2": ("vit_small_patch14_dinov2", {}),
    "DINOv2 giant": ("vit_giant_patch14_reg4_dinov2", {}),
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "DINOv3 with biases": ("vit_small_patch16_dinov3_qkvb", {}),
    "DINOv3 gated": ("vit_small_plus_patch16_dinov3_qkvb", {}),
    "rotary scaled": ("vit_medium_patch16_rope_reg1_gap_256", {}),
    "rotary without biases": ("vit_mediumd_patch16_rope_reg1_gap_256", {}),
    "rotary": ("vit_small_patch16_rope_224", {}),
    "rotary and learned": ("vit_small_patch16_rope_ape_224", {}),
}


def small_model(kind, **options):
    architecture, more = KINDS[kind]
    model = timm.create_model(architecture, **{**SMALL, **more, **options}).eval()
    draw_weights(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_equals_timm(kind, tmp_path):
    theirs = small_model(kind).double()
    save_for_hf(theirs, tmp_path, safe_serialization=True)
    model_class = HfViTForImageClassification if theirs.num_classes else HfViTModel
    assert_equals_timm(theirs, lambda dtype: model_class.from_pretrained(tmp_path, dtype=dtype))


def saved(folder, **changes):
    """Save a small plain ViT in the format of timm, with changes to config.json."""
    folder.mkdir(exist_ok=True)
    save_for_hf(small_model("plain"), folder, safe_serialization=True)
    reconfigure(folder, **changes)
    return folder


def test_labels_carry_their_descriptions(tmp_path):
    names = ["n01", "n02", "n03", "n04", "n05"]
    saved(tmp_path, label_names=names, label_descriptions={"n02": "goldfish"})
    config = HfViTForImageClassification.from_pretrained(tmp_path).config
    assert config.id2label == {0: "n01", 1: "goldfish", 2: "n03", 3: "n04", 4: "n05"}
    assert config.label2id["goldfish"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "vit_base_patch16_xyz_224"}, "'vit_base_patch16_xyz_224' is not supported"),
        ({"architecture": "convnext_tiny"}, "'convnext_tiny' is not supported"),
        ({"num_classes": 1000}, "num_classes=1000, but the weights have 5"),
        ({"model_args": {"depth": 3}}, "depth=3, but the weights have 2"),
        ({"model_args": {"global_pool": "max"}}, "global_pool='max'"),
        ({"model_args": {"block_fn": "ResPostBlock"}}, "of which block_fn is not supported"),
        ({"model_args": {"act_layer": "relu6"}}, "act_layer='relu6'"),
        ({"model_args": {"embed_dim": 32}}, "Add num_heads to model_args"),
    ],
)
def test_unknown_timm_configurations_raise(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        HfViTModel.from_pretrained(saved(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "today"),
    [
        ("vit_base_patch16_224.augreg_in21k", "vit_base_patch16_224"),
        ("vit_huge_patch14_224_in21k", "vit_huge_patch14_224"),
        ("vit_small_patch8_224_dino", "vit_small_patch8_224"),
        ("vit_base_patch16_224_miil_in21k", "vit_base_patch16_224_miil"),
        ("vit_huge_patch14_224_clip_laion2b", "vit_huge_patch14_clip_224"),
    ],
)
def test_old_architecture_names_equal_current_names(name, today):
    theirs, weights = without_data(today, depth=1)
    config = published_config(theirs)
    assert TIMM.configure({**config, "architecture": name}, weights.shapes) == TIMM.configure(config, weights.shapes)


def test_attention_pooling_that_the_mean_replaces_is_left_out(tmp_path):
    theirs = small_model("SigLIP mean")
    save_for_hf(theirs, tmp_path, safe_serialization=True)
    pooled = small_model("SigLIP", num_classes=5).state_dict()
    save_file(pooled, tmp_path / "model.safetensors")
    theirs.load_state_dict({name: tensor for name, tensor in pooled.items() if not name.startswith("attn_pool.")})
    assert_equals_timm(theirs, lambda dtype: HfViTForImageClassification.from_pretrained(tmp_path, dtype=dtype))
