"""Every supported model family of transformers, loaded by ours: outputs, sensitivity, and all classes."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from hf_vit import HfViTBackbone, HfViTConfig, HfViTForImageClassification, HfViTModel
from hf_vit.convert.families import FAMILIES
from hf_vit.convert.family import Family, whole_patches
from hf_vit.convert.key_map import convert_weights, strip_prefix
from hf_vit.convert.loading import convert_checkpoint, find_configured
from hf_vit.convert.source import Weights, open_source

from ..helpers import references
from ..helpers.models import MODEL_CLASSES
from ..helpers.references import assert_close, draw_weights


# A large epsilon, so that a wrong one changes the outputs.
SHAPE = {**references.SHAPE, "layer_norm_eps": 1e-3}
DINOV2 = {name: value for name, value in SHAPE.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
SIGLIP_2 = {name: value for name, value in SHAPE.items() if name != "image_size"} | {"num_patches": 16}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 9}
TO_IMAGES = {**TEXT, "projection_size": 32}
LABELS = {"num_labels": 5}
MASK = torch.zeros(2, 64, dtype=torch.bool).index_fill(1, torch.tensor([1, 5, 6]), True)
NATIVE, OTHER = (32, 32), (24, 48)


@dataclass(frozen=True)
class Case:
    """A source model and the outputs to compare.

    Args:
        build: Creates the source model.
        outputs: Names of outputs to compare, in addition to the hidden states.
        model_class: Our class of the same architecture.
        arguments: Arguments of the source in addition to the images.
        inputs: Creates the inputs of the source from images (B, C, H, W).
        sizes: Heights and widths that the source accepts.
        part: The part of the source that corresponds to our model.
        unused: Regular expression of tensors that do not affect the outputs.
    """

    build: Callable[[], nn.Module]
    outputs: tuple[str, ...] = ("last_hidden_state", "pooler_output")
    model_class: type[Any] = HfViTModel
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"interpolate_pos_encoding": True})
    inputs: Callable[[Tensor], dict[str, Tensor]] = lambda images: {"pixel_values": images}
    sizes: tuple[tuple[int, int], ...] = (NATIVE, OTHER)
    part: Callable[[nn.Module], nn.Module] = lambda source: source
    unused: str = ""


def classifier(build: Callable[[], nn.Module], *others: str, **options: Any) -> Case:
    return Case(build, ("logits", *others), HfViTForImageClassification, **options)


def masked(images: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": images, "bool_masked_pos": MASK[:, : images.shape[2] * images.shape[3] // 64]}


def in_order(images: Tensor) -> dict[str, Tensor]:
    """Sorted noise: MAE shuffles the patches by their noise even if none is masked."""
    return {"pixel_values": images, "noise": torch.arange(images.shape[2] * images.shape[3] // 64).expand(2, -1)}


def flattened(images: Tensor) -> dict[str, Tensor]:
    """SigLIP 2 takes flattened patches with channels last."""
    rows, columns = (side // 8 for side in images.shape[2:])
    patches = images.unflatten(3, (columns, 8)).unflatten(2, (rows, 8)).permute(0, 2, 4, 3, 5, 1)
    return {
        "pixel_values": patches.flatten(3).flatten(1, 2),  # (B, N, 8 * 8 * C)
        "pixel_attention_mask": torch.ones(2, rows * columns, dtype=torch.long),
        "spatial_shapes": torch.tensor([[rows, columns]] * 2),
    }


def mae(model_class: type[nn.Module]) -> nn.Module:
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    model = model_class(hf.ViTMAEConfig(**SHAPE, **decoder, mask_ratio=0.0))
    model.base_model.embeddings.position_embeddings.requires_grad_()  # makes it random: a fresh table may be zero
    return model


FREE = {"arguments": {}}  # accepts any image size
CASES: dict[str, Case] = {
    "ViTModel": Case(lambda: hf.ViTModel(hf.ViTConfig(**SHAPE))),
    "ViTForImageClassification": classifier(
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**SHAPE, **LABELS, qkv_bias=False, hidden_act="relu"))
    ),
    "ViTForMaskedImageModeling": Case(
        lambda: hf.ViTForMaskedImageModeling(hf.ViTConfig(**SHAPE, encoder_stride=8)),
        ("last_hidden_state",),
        inputs=masked,
        part=lambda source: source.vit,
    ),
    "DeiTModel": Case(lambda: hf.DeiTModel(hf.DeiTConfig(**SHAPE))),
    "DeiTForImageClassification": classifier(lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**SHAPE, **LABELS))),
    "DeiTForImageClassificationWithTeacher": classifier(
        lambda: hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**SHAPE, **LABELS)),
        "cls_logits",
        "distillation_logits",
    ),
    "DeiTForMaskedImageModeling": Case(
        lambda: hf.DeiTForMaskedImageModeling(hf.DeiTConfig(**SHAPE, encoder_stride=8)),
        ("last_hidden_state",),
        inputs=masked,
        part=lambda source: source.deit,
    ),
    "ViTMAEModel": Case(lambda: mae(hf.ViTMAEModel), ("last_hidden_state",), inputs=in_order),
    "ViTMAEForPreTraining": Case(
        lambda: mae(hf.ViTMAEForPreTraining), ("last_hidden_state",), inputs=in_order, part=lambda source: source.vit
    ),
    "ViTMSNModel": Case(lambda: hf.ViTMSNModel(hf.ViTMSNConfig(**SHAPE)), ("last_hidden_state",)),
    "ViTMSNForImageClassification": classifier(
        lambda: hf.ViTMSNForImageClassification(hf.ViTMSNConfig(**SHAPE, **LABELS))
    ),
    "IJepaModel": Case(lambda: hf.IJepaModel(hf.IJepaConfig(**SHAPE)), ("last_hidden_state",)),
    "IJepaForImageClassification": classifier(
        lambda: hf.IJepaForImageClassification(hf.IJepaConfig(**SHAPE, **LABELS))
    ),
    "Dinov2Model": Case(lambda: hf.Dinov2Model(hf.Dinov2Config(**DINOV2)), inputs=masked, **FREE),
    "Dinov2Model, SwiGLU": Case(
        lambda: hf.Dinov2Model(hf.Dinov2Config(**DINOV2, use_swiglu_ffn=True, use_mask_token=False)), **FREE
    ),
    "Dinov2ForImageClassification": classifier(
        lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**DINOV2, **LABELS, use_mask_token=False)), **FREE
    ),
    "Dinov2Backbone": Case(
        lambda: hf.Dinov2Backbone(hf.Dinov2Config(**DINOV2, out_indices=[1, 2], use_mask_token=False)),
        ("feature_maps",),
        HfViTBackbone,
        **FREE,
    ),
    "Dinov2Backbone, sequences": Case(
        lambda: hf.Dinov2Backbone(
            hf.Dinov2Config(**DINOV2, apply_layernorm=False, reshape_hidden_states=False, use_mask_token=False)
        ),
        ("feature_maps",),
        HfViTBackbone,
        unused="layernorm.*",
        **FREE,
    ),
    "Dinov2WithRegistersModel": Case(
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**DINOV2, num_register_tokens=3)),
        inputs=masked,
        sizes=(NATIVE, OTHER, (16, 24)),
        **FREE,
    ),
    "Dinov2WithRegistersForImageClassification": classifier(
        lambda: hf.Dinov2WithRegistersForImageClassification(hf.Dinov2WithRegistersConfig(**DINOV2, **LABELS)),
        unused="embeddings.mask_token",
        **FREE,
    ),
    "DINOv3ViTModel": Case(
        lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SHAPE, num_register_tokens=2, rope_theta=30.0)),
        inputs=masked,
        **FREE,
    ),
    "DINOv3ViTModel, SwiGLU": Case(
        lambda: hf.DINOv3ViTModel(
            hf.DINOv3ViTConfig(**SHAPE, use_gated_mlp=True, hidden_act="silu", key_bias=True, proj_bias=False)
        ),
        inputs=masked,
        **FREE,
    ),
    "DINOv3ViTModel, no biases": Case(
        lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SHAPE, query_bias=False, value_bias=False, mlp_bias=False)),
        inputs=masked,
        **FREE,
    ),
    "DINOv3ViTBackbone": Case(
        lambda: hf.DINOv3ViTBackbone(hf.DINOv3ViTConfig(**SHAPE, out_indices=[1, 2], num_register_tokens=2)),
        ("feature_maps",),
        HfViTBackbone,
        unused="embeddings.mask_token",
        **FREE,
    ),
    "CLIPVisionModel": Case(lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**SHAPE)), ("pooler_output",)),
    "CLIPVisionModelWithProjection": Case(
        lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**SHAPE)),
        ("pooler_output",),
        part=lambda source: source.vision_model,
    ),
    "CLIPModel": Case(
        lambda: hf.CLIPModel(hf.CLIPConfig(vision_config=SHAPE, text_config=TEXT)),
        ("pooler_output",),
        part=lambda source: source.vision_model,
    ),
    "CLIPForImageClassification": Case(
        lambda: hf.CLIPForImageClassification(hf.CLIPConfig(vision_config=SHAPE, text_config=TEXT)),
        ("pooler_output",),
        part=lambda source: source.vision_model,
    ),
    "SiglipVisionModel": Case(lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SHAPE))),
    "SiglipVisionModel, no head": Case(
        lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SHAPE, vision_use_head=False)), ("last_hidden_state",)
    ),
    "SiglipModel": Case(
        lambda: hf.SiglipModel(hf.SiglipConfig(vision_config=SHAPE, text_config=TO_IMAGES)),
        part=lambda source: source.vision_model,
    ),
    "SiglipForImageClassification": classifier(
        lambda: hf.SiglipForImageClassification(hf.SiglipConfig(vision_config=SHAPE, text_config=TEXT, **LABELS))
    ),
    "Siglip2VisionModel": Case(
        lambda: hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**SIGLIP_2)), inputs=flattened, **FREE
    ),
    "Siglip2Model": Case(
        lambda: hf.Siglip2Model(hf.Siglip2Config(vision_config=SIGLIP_2, text_config=TO_IMAGES)),
        inputs=flattened,
        part=lambda source: source.vision_model,
        **FREE,
    ),
    "Siglip2ForImageClassification": classifier(
        lambda: hf.Siglip2ForImageClassification(hf.Siglip2Config(vision_config=SIGLIP_2, text_config=TEXT, **LABELS)),
        inputs=flattened,
        **FREE,
    ),
}
cases = pytest.mark.parametrize("name", CASES)
# Compared in test_convert_mim.py and test_convert_contrastive.py
OTHER_PARTS = ("masked_image_modeling_head.", "text_model.", "contrastive_head.")
OTHERS_THERE = {r"decoder\..*": "", r"(text_model|text_projection|visual_projection)\..*|logit_.*": ""}
# The softmax cancels a constant that is added to all keys.
WITHOUT_EFFECT = r".*\.(key|k_proj)\.bias"


def flatten(outputs: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the hidden states and the named outputs, with sequences split into tensors."""
    flat = {}
    for name in ("hidden_states", *names):
        value = outputs[name]
        parts = {name: value} if isinstance(value, Tensor) else {f"{name}[{i}]": part for i, part in enumerate(value)}
        flat |= parts
    return flat


def draw_images(size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)


def interpolate_positions(positions: Tensor, spatial_shapes: Tensor, max_length: int) -> Tensor:
    """Resample positions as SigLIP 2 did before transformers 5.24, which differs in the last bits of float32."""
    (shape,) = spatial_shapes.unique(dim=0).tolist()
    target = {"size": shape, "mode": "bilinear", "align_corners": False, "antialias": True}
    resampled = F.interpolate(positions.float().permute(2, 0, 1)[None], **target)  # (1, D, h, w)
    return resampled.flatten(2).mT.expand(len(spatial_shapes), max_length, -1).to(positions.dtype)


@torch.no_grad()
def run_source(case: Case, source: nn.Module, size: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the outputs of the source. In float64, it resamples positions in float32 here, as ours does by design."""
    source.to(dtype)
    if size != NATIVE:
        for name, parameter in source.named_parameters():
            if "position_embedding" in name:
                parameter.data = parameter.data.float()
        if dtype == torch.float64:
            for module in source.modules():
                if isinstance(module, Siglip2VisionEmbeddings):
                    module.resize_positional_embeddings = interpolate_positions
    inputs = case.inputs(draw_images(size, dtype))
    return flatten(case.part(source)(**inputs, **case.arguments, output_hidden_states=True), case.outputs)


@torch.no_grad()
def run_ours(case: Case, model: nn.Module, size: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    images = draw_images(size, dtype)
    inputs = masked(images) if case.inputs is masked else {"pixel_values": images}
    return flatten(model(**inputs, output_hidden_states=True), case.outputs)


def save_source(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    source = CASES[name].build().eval()
    draw_weights(source)
    source.to(dtype).save_pretrained(folder)
    return source


@cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_equals_source(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case = CASES[name]
    source = save_source(name, tmp_path, dtype)
    model, info = case.model_class.from_pretrained(tmp_path, output_loading_info=True)
    info["unexpected_keys"] -= {key for key in info["unexpected_keys"] if key.startswith(OTHER_PARTS)}
    assert not any(info.values()), info
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for size in case.sizes:
        expected, actual = run_source(case, source, size, dtype), run_ours(case, model, size, dtype)
        assert actual.keys() == expected.keys()
        for output, value in expected.items():
            assert value.std() >= 0.1, f"{output} hardly varies"
            assert_close(actual[output], value, 1e-9 if dtype == torch.float64 else 1e-4, f"{output} at {size}")


@pytest.mark.parametrize("grid", [(3, 6), (9, 7), (2, 2)])
def test_siglip_2_resamples_like_the_reference_up_to_float32(grid: tuple[int, int]) -> None:
    positions, length = torch.randn(4, 4, 32, generator=torch.Generator().manual_seed(0)), grid[0] * grid[1]
    shapes = torch.tensor([grid] * 2)
    expected = Siglip2VisionEmbeddings.resize_positional_embeddings(positions, shapes, length)
    assert_close(interpolate_positions(positions, shapes, length), expected, 1e-6, "resampled positions")


# Models for images of 36 pixels, which patches of 8 pixels do not divide.
WITH_REST: dict[str, Callable[[], nn.Module]] = {
    "ViT": lambda: hf.ViTModel(hf.ViTConfig(**SHAPE | {"image_size": 36})),
    "DINOv2 with registers": lambda: hf.Dinov2WithRegistersModel(
        hf.Dinov2WithRegistersConfig(**DINOV2 | {"image_size": 36})
    ),
    "CLIP": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**SHAPE | {"image_size": 36})),
    "SigLIP": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SHAPE | {"image_size": 36})),
}


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_REST)
def test_pixels_beyond_whole_patches_are_left_out(name: str, tmp_path: Path) -> None:
    source = WITH_REST[name]().eval()
    draw_weights(source)
    source.save_pretrained(tmp_path)
    model = HfViTModel.from_pretrained(tmp_path)
    assert model.config.image_size == 32
    images = draw_images((36, 36), torch.float32)
    whole = images[:, :, :32, :32]
    options = {} if "DINO" in name else {"interpolate_pos_encoding": True}
    for seen, sizes in ((images, {}), (whole, options)):  # the source needs an option for other sizes
        assert_close(model(whole).pooler_output, source(seen, **sizes).pooler_output, 1e-4, f"{seen.shape}")


@cases
@pytest.mark.slow
def test_every_tensor_of_the_source_matters(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save_source(name, tmp_path, torch.float64)
    model = case.model_class.from_pretrained(tmp_path)
    before = run_ours(case, model, NATIVE, torch.float64)
    converted = convert_checkpoint(open_source(tmp_path))
    family, file = converted.family, tmp_path / "model.safetensors"
    names = {name.removeprefix("model."): name for name in converted.weights if not name.startswith(OTHER_PARTS)}
    dropped = {**family.dropped, **OTHERS_THERE}
    expected = {name: tuple(converted.weights[ours].shape) for name, ours in names.items()}
    exempt = "|".join((*dropped, WITHOUT_EFFECT, case.unused))
    tensors = load_file(file)
    for key, tensor in tensors.items():
        if re.fullmatch(exempt, strip_prefix(key, family.prefixes)) or not tensor.numel():
            continue
        save_file({**tensors, key: 1.1 * tensor}, file)
        weights = convert_weights(Weights([file]), family.keys, expected, prefixes=family.prefixes, dropped=dropped)
        with torch.no_grad():
            for name in names:
                (model.base_model if "classifier" not in name else model).get_parameter(name).copy_(weights[name])
        after = run_ours(case, model, NATIVE, torch.float64)
        change = max(float((after[key] - before[key]).abs().max() / before[key].abs().max()) for key in before)
        assert change > 1e-7, f"{key} hardly matters: {change}"


@cases
def test_opens_under_every_class_with_only_the_head_new(name: str, tmp_path: Path) -> None:
    save_source(name, tmp_path)
    weights = convert_checkpoint(open_source(tmp_path)).weights
    base = {key.removeprefix("model."): value for key, value in weights.items() if "classifier." not in key}
    # Fits two blocks and a model without a CLS token.
    heads = {"universal_segmentation_config": {"num_blocks": 1}, "depth_config": {"readout_type": "ignore"}}
    for model_class in MODEL_CLASSES:
        is_classifier = model_class is HfViTForImageClassification
        options = {"num_labels": 7} if is_classifier else heads
        model, info = model_class.from_pretrained(tmp_path, output_loading_info=True, **options)
        own = {key for key in model.state_dict() if "classifier." in key or "_head." in key}
        assert info["missing_keys"] | {key for key, *_ in info["mismatched_keys"]} == own
        assert all(len(model.state_dict()[key]) == 7 for key in own if is_classifier)
        state = model.base_model.state_dict()
        assert all(torch.equal(state[key], base[key]) for key in state)
        assert {key.removeprefix("model.").split(".")[0] for key in info["unexpected_keys"]} <= {
            "classifier", "distillation_classifier",
            "pooler", "attention_pooling", *(part[:-1] for part in OTHER_PARTS)
        }  # fmt: skip


class Reads(dict[str, Any]):
    """A dictionary that records the keys that were read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def family_of(config: Mapping[str, Any]) -> Family:
    family = find_configured(config)
    assert family is not None
    return family


MULTIMODAL = (
    "text_config",
    "projection_dim",
    "logit_scale_init_value",
    "initializer_factor",
    "tie_word_embeddings",
)
# Matching and losses
MATCHING = ("class_cost", "bbox_cost", "giou_cost", "eos_coefficient", "auxiliary_loss")
# Fields of the source that do not affect our outputs: they belong to other parts, affect training only, or follow
# from the weights.
FIELDS_WITHOUT_EFFECT = {
    "vit": ("encoder_stride",),
    "deit": ("encoder_stride",),
    "ijepa": ("pooler_output_size", "pooler_act"),
    "dinov2": ("use_mask_token",),
    "eomt_dinov3": ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"),
    "dpt": (
        "backbone_featmap_shape",
        "neck_ignore_stages",
        "use_bias_in_fusion_residual",
        "use_auxiliary_head",
        "auxiliary_loss_weight",
        "semantic_loss_ignore_index",
        "semantic_classifier_dropout",
    ),
    "depth_anything": ("patch_size", "reassemble_hidden_size", "initializer_range"),
    "dinov3_vit": ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"),
    "yolos": ("use_mid_position_embeddings", *MATCHING),
    "lw_detr": (
        *MATCHING,
        "class_loss_coefficient",
        "dice_loss_coefficient",
        "focal_alpha",
        "init_std",
        "disable_custom_kernels",
        # derived from other fields
        "projector_in_channels",
        "projector_out_channels",
        "num_feature_levels",
    ),
    "vitpose": ("initializer_range",),
    "vitpose_backbone": ("num_experts", "part_features"),
    **dict.fromkeys(("clip", "clip_vision_model"), MULTIMODAL),
    **dict.fromkeys(("siglip", "siglip_vision_model", "siglip2", "siglip2_vision_model"), MULTIMODAL),
}
# The default head of ViTPose uses an intermediate block, which ours does not support.
NOT_BY_DEFAULT: dict[str, dict[str, Any]] = {"vitpose": {"backbone_config": hf.VitPoseBackboneConfig()}}
configs = pytest.mark.parametrize("model_type", sorted({t for family in FAMILIES for t in family.model_types}))


@configs
def test_every_field_of_the_source_is_decided(model_type: str) -> None:
    theirs = hf.CONFIG_MAPPING[model_type](**NOT_BY_DEFAULT.get(model_type, {}))
    config = Reads(json.loads(theirs.to_json_string(use_diff=False)))
    family = family_of(config)
    family.configure(config, {"pooler.dense.weight": (1, 1)})
    own = {name for name in vars(theirs) if name not in vars(hf.PreTrainedConfig())} - {
        "stage_names",
        "_attn_implementation",
    }
    decided = {*config.names, *family.fixed, *FIELDS_WITHOUT_EFFECT.get(model_type, ())}
    assert {name.removeprefix("_") for name in own} <= decided


@configs
def test_defaults_are_those_of_the_source(model_type: str) -> None:
    theirs = hf.CONFIG_MAPPING[model_type](**NOT_BY_DEFAULT.get(model_type, {}))
    full = json.loads(theirs.to_json_string(use_diff=False))
    family = family_of(full)
    ours = [HfViTConfig(**family.configure(config, {})).to_dict() for config in (full, {"model_type": model_type})]
    assert ours[0] == ours[1]


@pytest.mark.parametrize(
    ("image_size", "patch_size", "whole"),
    [(384, 14, 378), (224, 16, 224), ([30, 50], 8, [24, 48]), (20, [4, 8], [20, 16]), (32, 0, 32)],
)
def test_image_size_is_in_whole_patches(image_size: Any, patch_size: Any, whole: Any) -> None:
    assert whole_patches(image_size, patch_size) == whole


@torch.no_grad()
def test_older_dictionary_of_clip_wins(tmp_path: Path) -> None:
    save_source("CLIPModel", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # Fields missing at the top level have the defaults of the class, even if vision_config contains other values.
    old = {name: value for name, value in SHAPE.items() if name != "layer_norm_eps"} | {"hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config_dict": old}))
    source = hf.CLIPModel.from_pretrained(tmp_path).eval().vision_model
    assert (source.config.hidden_act, source.config.layer_norm_eps) == ("gelu", 1e-5)
    images = draw_images(NATIVE, torch.float32)
    expected = source(images).pooler_output
    assert_close(HfViTModel.from_pretrained(tmp_path)(images).pooler_output, expected, 1e-4, "pooled")


@torch.no_grad()
def test_mae_with_a_mask_is_its_encoder_on_the_visible_patches(tmp_path: Path) -> None:
    source = save_source("ViTMAEModel", tmp_path)
    model = HfViTModel.from_pretrained(tmp_path)
    source.config.mask_ratio = 0.75
    images, noise = draw_images(NATIVE, torch.float32), torch.rand(2, 16, generator=torch.Generator().manual_seed(0))
    expected = source(images, noise=noise)
    kept = noise.argsort(dim=1)[:, :4]
    tokens = model.embeddings(images)
    visible = torch.stack(
        [own[torch.cat((torch.tensor([0]), 1 + index))] for own, index in zip(tokens, kept, strict=True)]
    )
    assert_close(model.norm(model.encoder(visible)), expected.last_hidden_state, 1e-4, "visible patches")
    assert expected.mask.sum() == 24
