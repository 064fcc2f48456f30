"""Converted models of all families of transformers: outputs, sensitivity to each tensor, all our classes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from hf_vit import HfViTBackbone, HfViTConfig, HfViTForImageClassification, HfViTModel
from hf_vit.convert.families import FAMILIES
from hf_vit.convert.family import Family, round_to_patches
from hf_vit.convert.loading import convert_checkpoint, find_family_by_config
from hf_vit.convert.source import open_source

from ..helpers import references
from ..helpers.models import MODEL_CLASSES
from ..helpers.references import assert_close, draw_weights
from .comparisons import assert_all_matter, dtypes, reconfigure


# A large epsilon: converting it to another value would change the outputs visibly.
SHAPE = {**references.SHAPE, "layer_norm_eps": 1e-3}
DINOV2 = {name: value for name, value in SHAPE.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
SIGLIP_2 = {name: value for name, value in SHAPE.items() if name != "image_size"} | {"num_patches": 16}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 9}
TOWERS = {"vision_config": SHAPE, "text_config": TEXT}
TO_IMAGES = {**TEXT, "projection_size": 32}
DECODER = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
MASK = torch.zeros(2, 64, dtype=torch.bool).index_fill(1, torch.tensor([1, 5, 6]), True)
NATIVE, OTHER = (32, 32), (24, 48)


@dataclass(frozen=True)
class Case:
    """Options of a source model, and the outputs to compare.

    Args:
        options: Options of the configuration, in addition to its shape.
        outputs: Names of the compared outputs, in addition to hidden states.
        model_class: Our class of the same architecture.
        resizes: Whether the source needs an argument to support other image sizes.
        inputs: Builds the inputs of the source from images (B, C, H, W).
        sizes: Heights and widths that the source supports.
        part: Submodule of the source that our model corresponds to.
        unused: Regular expression of tensors that do not affect the outputs.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("last_hidden_state", "pooler_output")
    model_class: type[Any] = HfViTModel
    resizes: bool = True
    inputs: Callable[[Tensor], dict[str, Tensor]] = lambda images: {"pixel_values": images}
    sizes: tuple[tuple[int, int], ...] = (NATIVE, OTHER)
    part: str = ""
    unused: str = ""


def classifier(*others: str, settings: Mapping[str, Any] | None = None, **options: Any) -> Case:
    labeled = {"num_labels": 5, **options}
    return Case(labeled, ("logits", *others), HfViTForImageClassification, **(settings or {}))


def masked(images: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": images, "bool_masked_pos": MASK[:, : images.shape[2] * images.shape[3] // 64]}


def in_order(images: Tensor) -> dict[str, Tensor]:
    """Return noise in ascending order: without masked patches, MAE still shuffles them by the order of the noise."""
    return {"pixel_values": images, "noise": torch.arange(images.shape[2] * images.shape[3] // 64).expand(2, -1)}


def flattened(images: Tensor) -> dict[str, Tensor]:
    """Return the inputs of SigLIP 2: patches, flattened with the channels last."""
    rows, columns = (side // 8 for side in images.shape[2:])
    patches = images.unflatten(3, (columns, 8)).unflatten(2, (rows, 8)).permute(0, 2, 4, 3, 5, 1)
    return {
        "pixel_values": patches.flatten(3).flatten(1, 2),  # (B, N, 8 * 8 * C)
        "pixel_attention_mask": torch.ones(2, rows * columns, dtype=torch.long),
        "spatial_shapes": torch.tensor([[rows, columns]] * 2),
    }


FREE = {"resizes": False}
FLAT = {"inputs": flattened, **FREE}
POOLED, LAST, MAPS = ("pooler_output",), ("last_hidden_state",), ("feature_maps",)
NO_HEAD = {"unused": r"vision_model\.head\..*"}  # our model averages the tokens instead
OF_VISION = {"part": "vision_model"}
NO_BIASES = {"query_bias": False, "value_bias": False, "mlp_bias": False}
# Name of the source class, and variant -> case.
CASES: dict[str, Case] = {
    "ViTModel": Case(),
    "ViTForImageClassification": classifier(qkv_bias=False, hidden_act="relu"),
    "ViTForMaskedImageModeling": Case({"encoder_stride": 8}, LAST, inputs=masked, part="vit"),
    "DeiTModel": Case(),
    "DeiTForImageClassification": classifier(),
    "DeiTForImageClassificationWithTeacher": classifier("cls_logits", "distillation_logits"),
    "DeiTForMaskedImageModeling": Case({"encoder_stride": 8}, LAST, inputs=masked, part="deit"),
    "ViTMAEModel": Case({**DECODER, "mask_ratio": 0.0}, LAST, inputs=in_order),
    "ViTMAEForPreTraining": Case({**DECODER, "mask_ratio": 0.0}, LAST, inputs=in_order, part="vit"),
    "ViTMSNModel": Case({}, LAST),
    "ViTMSNForImageClassification": classifier(),
    "IJepaModel": Case({}, LAST),
    "IJepaForImageClassification": classifier(),
    "Dinov2Model": Case(inputs=masked, **FREE),
    "Dinov2Model, SwiGLU": Case({"use_swiglu_ffn": True, "use_mask_token": False}, **FREE),
    "Dinov2ForImageClassification": classifier(use_mask_token=False, settings=FREE),
    "Dinov2Backbone": Case({"out_indices": [1, 2], "use_mask_token": False}, MAPS, HfViTBackbone, **FREE),
    "Dinov2Backbone, sequences": Case(
        {"apply_layernorm": False, "reshape_hidden_states": False, "use_mask_token": False},
        MAPS,
        HfViTBackbone,
        unused="layernorm.*",
        **FREE,
    ),
    "Dinov2WithRegistersModel": Case(
        {"num_register_tokens": 3}, inputs=masked, sizes=(NATIVE, OTHER, (16, 24)), **FREE
    ),
    "Dinov2WithRegistersForImageClassification": classifier(settings={"unused": ".*mask_token", **FREE}),
    "DINOv3ViTModel": Case({"num_register_tokens": 2, "rope_theta": 30.0}, inputs=masked, **FREE),
    "DINOv3ViTModel, SwiGLU": Case(
        {"use_gated_mlp": True, "hidden_act": "silu", "key_bias": True, "proj_bias": False}, inputs=masked, **FREE
    ),
    "DINOv3ViTModel, no biases": Case(NO_BIASES, inputs=masked, **FREE),
    "DINOv3ViTBackbone": Case(
        {"out_indices": [1, 2], "num_register_tokens": 2}, MAPS, HfViTBackbone, unused=".*mask_token", **FREE
    ),
    "CLIPVisionModel": Case({}, POOLED),
    "CLIPVisionModelWithProjection": Case({}, POOLED, **OF_VISION),
    "CLIPModel": Case(TOWERS, POOLED, **OF_VISION),
    "CLIPForImageClassification": Case(TOWERS, POOLED, **OF_VISION),
    "SiglipVisionModel": Case(),
    "SiglipVisionModel, no head": Case({"vision_use_head": False}, LAST),
    "SiglipModel": Case({"vision_config": SHAPE, "text_config": TO_IMAGES}, **OF_VISION),
    "SiglipForImageClassification": classifier(**TOWERS, settings=NO_HEAD),
    "Siglip2VisionModel": Case(**FLAT),
    "Siglip2Model": Case({"vision_config": SIGLIP_2, "text_config": TO_IMAGES}, **OF_VISION, **FLAT),
    "Siglip2ForImageClassification": classifier(
        vision_config=SIGLIP_2, text_config=TEXT, settings={**NO_HEAD, **FLAT}
    ),
}
cases = pytest.mark.parametrize("name", CASES)
# Parts that test_convert_mim.py and test_convert_contrastive.py compare.
OTHER_PARTS = ("masked_image_modeling_head.", "text_model.", "contrastive_head.")


def flatten(outputs: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return hidden states and named outputs as single tensors."""
    flat = {}
    for name in ("hidden_states", *names):
        value = outputs[name]
        parts = {name: value} if isinstance(value, Tensor) else {f"{name}[{i}]": part for i, part in enumerate(value)}
        flat |= parts
    return flat


def draw_images(size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)


def interpolate_positions(positions: Tensor, spatial_shapes: Tensor, max_length: int) -> Tensor:
    """Resample as SigLIP 2 before transformers 5.24; newer versions differ in the last bits of float32."""
    (shape,) = spatial_shapes.unique(dim=0).tolist()
    target = {"size": shape, "mode": "bilinear", "align_corners": False, "antialias": True}
    resampled = F.interpolate(positions.float().permute(2, 0, 1)[None], **target)  # (1, D, h, w)
    return resampled.flatten(2).mT.expand(len(spatial_shapes), max_length, -1).to(positions.dtype)


def run_source(case: Case, source: nn.Module, size: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the outputs of the source, which in float64 resamples positions in float32, like our models."""
    source.to(dtype)
    if size != NATIVE:
        for name, parameter in source.named_parameters():
            if "position_embedding" in name:
                parameter.data = parameter.data.float()
        if dtype == torch.float64:
            for module in source.modules():
                if isinstance(module, Siglip2VisionEmbeddings):
                    module.resize_positional_embeddings = interpolate_positions
    resizing = {"interpolate_pos_encoding": True} if case.resizes else {}
    outputs = source.get_submodule(case.part)(
        **case.inputs(draw_images(size, dtype)), **resizing, output_hidden_states=True
    )
    return flatten(outputs, case.outputs)


@torch.no_grad()
def run_converted(case: Case, model: nn.Module, size: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    images = draw_images(size, dtype)
    inputs = masked(images) if case.inputs is masked else {"pixel_values": images}
    return flatten(model(**inputs, output_hidden_states=True), case.outputs)


def save_source(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    options, kind = {**CASES[name].options, **options}, getattr(hf, name.partition(",")[0])
    shape = DINOV2 if name.startswith("Dinov2") else SIGLIP_2 if name.startswith("Siglip2") else SHAPE
    source = kind(kind.config_class(**{**({} if "vision_config" in options else shape), **options})).eval()
    if "MAE" in name:  # requires a gradient so that it is drawn at random; a new table may be zero
        source.base_model.embeddings.position_embeddings.requires_grad_()
    draw_weights(source)
    source.to(dtype).save_pretrained(folder)
    return source


@cases
@dtypes
def test_equals_source(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case = CASES[name]
    source = save_source(name, tmp_path, dtype)
    model, info = case.model_class.from_pretrained(tmp_path, output_loading_info=True)
    info["unexpected_keys"] -= {key for key in info["unexpected_keys"] if key.startswith(OTHER_PARTS)}
    assert not any(info.values()), info
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for size in case.sizes:
        expected, actual = run_source(case, source, size, dtype), run_converted(case, model, size, dtype)
        if size == NATIVE and dtype == torch.float64:
            assert_all_matter(source.get_submodule(case.part), expected, case.unused)
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


@torch.no_grad()
@pytest.mark.parametrize("name", ["ViTModel", "Dinov2WithRegistersModel", "CLIPVisionModel", "SiglipVisionModel"])
def test_pixels_beyond_whole_patches_are_left_out(name: str, tmp_path: Path) -> None:
    """Patches of 8 pixels do not cover images of 36 pixels completely."""
    source = save_source(name, tmp_path, image_size=36)
    model = HfViTModel.from_pretrained(tmp_path)
    assert model.config.image_size == 32
    images = draw_images((36, 36), torch.float32)
    whole = images[:, :, :32, :32]
    options = {"interpolate_pos_encoding": True} if CASES[name].resizes else {}
    for seen, sizes in ((images, {}), (whole, options)):  # the source needs an argument to resample positions
        assert_close(model(whole).pooler_output, source(seen, **sizes).pooler_output, 1e-4, f"{seen.shape}")


@cases
@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.thinned(8)
def test_opens_under_every_class_with_only_the_head_new(name: str, model_class: type[Any], tmp_path: Path) -> None:
    save_source(name, tmp_path)
    weights = convert_checkpoint(open_source(tmp_path)).weights
    base = {key.removeprefix("model."): value for key, value in weights.items() if "classifier." not in key}
    # Head options that work with two blocks and without a CLS token.
    heads = {"universal_segmentation_config": {"num_blocks": 1}, "depth_config": {"readout_type": "ignore"}}
    is_classifier = model_class is HfViTForImageClassification
    options = {"num_labels": 7} if is_classifier else heads
    model, info = model_class.from_pretrained(tmp_path, output_loading_info=True, **options)
    own = {key for key in model.state_dict() if "classifier." in key or "_head." in key}
    assert info["missing_keys"] | {key for key, *_ in info["mismatched_keys"]} == own
    assert all(len(model.state_dict()[key]) == 7 for key in own if is_classifier)
    assert all(torch.equal(tensor, base[key]) for key, tensor in model.base_model.state_dict().items())
    known = {"classifier", "distillation_classifier", "pooler", "attention_pooling"}
    left = {key.removeprefix("model.").split(".")[0] for key in info["unexpected_keys"]}
    assert left <= known | {part[:-1] for part in OTHER_PARTS}


class Reads(dict[str, Any]):
    """A dictionary that records the keys that are read."""

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
    family = find_family_by_config(config)
    assert family is not None
    return family


MULTIMODAL = ("text_config", "projection_dim", "logit_scale_init_value", "initializer_factor", "tie_word_embeddings")
# Names of the options of matching and losses.
MATCHING = ("class_cost", "bbox_cost", "giou_cost", "eos_coefficient", "auxiliary_loss")
# Source fields without effect on our outputs: options of other parts, of training, or implied by the weights.
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
        *("projector_in_channels", "projector_out_channels", "num_feature_levels"),  # derived from other fields
    ),
    "vitpose": ("initializer_range",),
    "vitpose_backbone": ("num_experts", "part_features"),
    **dict.fromkeys(("clip", "clip_vision_model"), MULTIMODAL),
    **dict.fromkeys(("siglip", "siglip_vision_model", "siglip2", "siglip2_vision_model"), MULTIMODAL),
}
# ViTPose attaches its head to an intermediate block by default, which our models do not support.
NOT_BY_DEFAULT: dict[str, dict[str, Any]] = {"vitpose": {"backbone_config": hf.VitPoseBackboneConfig()}}
configs = pytest.mark.parametrize("model_type", sorted({t for family in FAMILIES for t in family.model_types}))


@configs
def test_every_field_of_the_source_is_decided(model_type: str) -> None:
    theirs = hf.CONFIG_MAPPING[model_type](**NOT_BY_DEFAULT.get(model_type, {}))
    config = Reads(json.loads(theirs.to_json_string(use_diff=False)))
    family = family_of(config)
    family.configure(config, {"pooler.dense.weight": (1, 1)})
    own = vars(theirs).keys() - vars(hf.PreTrainedConfig()).keys() - {"stage_names", "_attn_implementation"}
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
    assert round_to_patches(image_size, patch_size) == whole


@torch.no_grad()
def test_older_dictionary_of_clip_wins(tmp_path: Path) -> None:
    save_source("CLIPModel", tmp_path)
    # Fields missing in vision_config_dict use the defaults of the class, even if vision_config sets them.
    old = {name: value for name, value in SHAPE.items() if name != "layer_norm_eps"} | {"hidden_act": "gelu"}
    reconfigure(tmp_path, vision_config_dict=old)
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
