"""Small transformers models of all supported families, and functions that run them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

import hf_vit
from hf_vit.convert import parity

from ..helpers import references
from ..helpers.references import draw_weights


Outputs = dict[str, Tensor]
# The epsilon is large, so that a wrong epsilon in the converted model would change the outputs visibly.
SHAPE = {**references.SHAPE, "layer_norm_eps": 1e-3}
RATIO = {name: value for name, value in SHAPE.items() if name != "intermediate_size"}
DINOV2 = {**RATIO, "mlp_ratio": 2}
SIGLIP_2 = {name: value for name, value in SHAPE.items() if name != "image_size"} | {"num_patches": 16}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 9}
TOWERS = {"vision_config": SHAPE, "text_config": TEXT}
TO_IMAGES = {**TEXT, "projection_size": 32}
DECODER = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
DEEP = {**SHAPE, "num_hidden_layers": 4}
EOMT = {**RATIO, "num_hidden_layers": 4, "num_queries": 5, "num_blocks": 2, "num_labels": 3, "num_register_tokens": 2}
NECK = {"neck_hidden_sizes": [8, 12, 16, 20], "fusion_hidden_size": 16}
LW_DETR_VIT: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "mlp_ratio": 2},
    **{"pretrain_image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-3, "image_size": 64},
    **{"window_block_indices": [0, 2], "num_windows": 4, "out_indices": [1, 3]},
}
LW_DETR: dict[str, Any] = {
    **{"d_model": 16, "decoder_ffn_dim": 128, "decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 4},
    **{"decoder_n_points": 2, "decoder_layers": 2, "num_queries": 6, "group_detr": 2, "num_labels": 5},
    "projector_scale_factors": [1.0],
}
VITPOSE: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2},
    **{"image_size": [48, 32], "patch_size": [8, 8], "layer_norm_eps": 1e-3, "out_indices": [2]},
}
KEYPOINTS = ["Nose", "L_Eye", "R_Eye"]
EXPERTS = {"num_experts": 3, "part_features": 12}
NATIVE, OTHER = (32, 32), (24, 48)


def by_name(name: str, **options: Any) -> nn.Module:
    """Build a model from the name of its class, which may be followed by a comma and a variant."""
    kind = getattr(hf, name.partition(",")[0])
    shape = DINOV2 if name.startswith("Dinov2") else SIGLIP_2 if name.startswith("Siglip2") else SHAPE
    return kind(kind.config_class(**{**({} if "vision_config" in options else shape), **options}))


def eomt(mask_probability: float, is_dinov3: bool = False, **options: Any) -> nn.Module:
    if is_dinov3:
        config = hf.EomtDinov3Config(**EOMT, intermediate_size=64, **options)
        model: Any = hf.EomtDinov3ForUniversalSegmentation(config)
    else:
        model = hf.EomtForUniversalSegmentation(hf.EomtConfig(**EOMT, mlp_ratio=2, **options))
    model.attn_mask_probs.fill_(mask_probability)
    # The attention masks are float32. torch does not accept them in a float64 model.
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda _, inputs: tuple(value if value is None else value.to(inputs[0].dtype) for value in inputs)
        )
    return model


def dpt(kind: str, **options: Any) -> nn.Module:
    return getattr(hf, kind)(hf.DPTConfig(**DEEP, **NECK, backbone_out_indices=[0, 1, 2, 3], **options))


def depth_anything(backbone: Mapping[str, Any] | None = None, **options: Any) -> nn.Module:
    shape = {**DINOV2, "num_hidden_layers": 4, "image_size": 40, "out_indices": [1, 2, 3, 4]}
    config = hf.DepthAnythingConfig(
        backbone_config=hf.Dinov2Config(**{**shape, "reshape_hidden_states": False, **(backbone or {})}),
        **{"patch_size": 8, "reassemble_hidden_size": 32, "head_hidden_size": 12, **NECK, **options},
    )
    return hf.DepthAnythingForDepthEstimation(config)


def yolos(**options: Any) -> nn.Module:
    shape = {**DEEP, "image_size": [32, 48], "num_detection_tokens": 5, "num_labels": 3}
    return hf.YolosForObjectDetection(hf.YolosConfig(**shape, **options))


def lw_detr(backbone: Mapping[str, Any] | None = None, **options: Any) -> nn.Module:
    vit = hf.LwDetrViTConfig(**{**LW_DETR_VIT, **(backbone or {})})
    return hf.LwDetrForObjectDetection(hf.LwDetrConfig(**{**LW_DETR, **options}, backbone_config=vit))


def vitpose(backbone: Mapping[str, Any] | None = None, **options: Any) -> nn.Module:
    labels = {"id2label": dict(enumerate(KEYPOINTS)), "edges": [[0, 1], [0, 2]]}
    vit = hf.VitPoseBackboneConfig(**VITPOSE, **(backbone or {}))
    return hf.VitPoseForPoseEstimation(hf.VitPoseConfig(backbone_config=vit, **labels, **options))


def masked(images: Tensor) -> dict[str, Tensor]:
    mask = torch.zeros(2, 64, dtype=torch.bool).index_fill(1, torch.tensor([1, 5, 6]), True)
    return {"bool_masked_pos": mask[:, : images.shape[2] * images.shape[3] // 64]}


def in_order(images: Tensor) -> dict[str, Tensor]:
    """Return noise in ascending order, so that MAE does not shuffle the patches."""
    return {"noise": torch.arange(images.shape[2] * images.shape[3] // 64).expand(2, -1)}


def flattened(images: Tensor) -> dict[str, Tensor]:
    """Return the inputs of SigLIP 2: patches of 8x8 pixels, flattened with the channels last."""
    rows, columns = (side // 8 for side in images.shape[2:])
    patches = images.unflatten(3, (columns, 8)).unflatten(2, (rows, 8)).permute(0, 2, 4, 3, 5, 1)
    return {
        "pixel_values": patches.flatten(3).flatten(1, 2),  # (B, N, 8 * 8 * C)
        "pixel_attention_mask": torch.ones(len(images), rows * columns, dtype=torch.long),
        "spatial_shapes": torch.tensor([[rows, columns]] * len(images)),
    }


def run(model: nn.Module, images: Tensor, **inputs: Any) -> Outputs:
    """Return the outputs of a model by name. Outputs with several parts are split into one entry per part."""
    if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        inputs["interpolate_pos_encoding"] = True
    flat = {}
    for name, value in model(**{"pixel_values": images, **inputs}, output_hidden_states=True).items():
        parts = {name: value} if isinstance(value, Tensor) else {f"{name}[{i}]": part for i, part in enumerate(value)}
        flat |= parts
    return flat


def run_lw_detr(source: Any, images: Tensor) -> Outputs:
    """Return the outputs of all decoder layers of the source model (LW-DETR)."""
    outputs = source.model(images)
    states, (start,) = outputs.intermediate_hidden_states, outputs.intermediate_reference_points
    offsets = source.bbox_embed(states)
    centers = start[..., :2] + offsets[..., :2] * start[..., 2:]
    boxes = torch.cat((centers, offsets[..., 2:].exp() * start[..., 2:]), -1)
    proposals = source(images)
    return {
        **parity.run_lw_detr(source, images),
        "layers[0]": proposals.enc_outputs_class,
        "boxes[0]": proposals.enc_outputs_coord_logits,
        **{f"layers[{number}]": logits for number, logits in enumerate(source.class_embed(states), 1)},
        **{f"boxes[{number}]": own for number, own in enumerate(boxes, 1)},
    }


def run_detector(model: Any, images: Tensor) -> Outputs:
    """Return the outputs of all decoder layers of our detection model."""
    predictions: list[Any] = []
    hook = model.detection_head.register_forward_hook(lambda *call: predictions.extend(call[-1]))
    outputs = run(model, images)
    hook.remove()
    layers = {f"layers[{number}]": prediction.logits for number, prediction in enumerate(predictions)}
    return {**outputs, **layers, **{f"boxes[{number}]": own.boxes for number, own in enumerate(predictions)}}


@dataclass(frozen=True)
class Case:
    """A transformers model (the source), and the settings for comparing it with our model.

    Args:
        build: Builds the source from configuration options; by default, from the name of the case.
        options: Configuration options that are passed to `build`.
        outputs: Names of the outputs that are compared in addition to the hidden states.
        model_class: Name of our class with the same architecture, without the prefix `HfViT`.
        run: Function that returns the outputs of the source.
        run_ours: Function that returns the outputs of our model.
        inputs: Function that returns additional inputs of the source.
        sizes: Image sizes (height, width) that the source supports. The first one is its native size.
        chosen: Arguments for `from_pretrained` and for `run_ours`.
        part: Submodule of the source that our model corresponds to.
        unused: Regular expression of tensors that do not affect the outputs.
        tolerance: Tolerance of the outputs in float32.
        gradient_tolerance: Tolerance of the gradient in float32.
    """

    options: Mapping[str, Any]
    outputs: tuple[str, ...] = ("last_hidden_state", "pooler_output")
    model_class: str = "Model"
    build: Callable[..., nn.Module] | None = None
    run: Callable[..., Outputs] = run
    run_ours: Callable[..., Outputs] = run
    inputs: Callable[[Tensor], dict[str, Tensor]] = lambda images: {}
    sizes: tuple[tuple[int, int], ...] = (NATIVE, OTHER)
    chosen: Mapping[str, int] | None = None
    part: str = ""
    unused: str = ""
    tolerance: float = 1e-5
    gradient_tolerance: float = 1e-5

    @property
    def our_class(self) -> Any:
        return getattr(hf_vit, f"HfViT{self.model_class}")


def classifier(*others: str, settings: Mapping[str, Any] | None = None, **options: Any) -> Case:
    return Case({"num_labels": 5, **options}, ("logits", *others), "ForImageClassification", **(settings or {}))


def universal(mask_probability: float, **options: Any) -> Case:
    outputs = ("class_queries_logits", "masks_queries_logits", "last_hidden_state")
    build, run_source = partial(eomt, mask_probability), parity.run_eomt
    return Case(options, outputs, "ForUniversalSegmentation", build, run_source, sizes=(NATIVE,))


def depth(build: Callable[..., nn.Module], sizes: Any, unused: str, **options: Any) -> Case:
    return Case(options, ("predicted_depth",), "ForDepthEstimation", build, sizes=sizes, unused=unused)


def detector(build: Callable[..., nn.Module], **options: Any) -> Case:
    names = ("logits", "pred_boxes", "last_hidden_state")
    return Case(options, names, "ForObjectDetection", build, sizes=((32, 48), (40, 24)))


def deformable(size: tuple[int, int], **options: Any) -> Case:
    """Return a case of LW-DETR. Outside of training, its decoder uses only one query group."""
    # The gradient is discontinuous where a sampling point crosses a pixel border, so float32 rounding can change it.
    names, precision = ("logits", "pred_boxes", "layers", "boxes"), {"tolerance": 1e-4, "gradient_tolerance": 1e-3}
    runners, unused = (run_lw_detr, run_detector), r"model\.enc_out.*\.1\..*"
    return Case(options, names, "ForObjectDetection", lw_detr, *runners, sizes=(size,), unused=unused, **precision)


def pose(expert: int | None = None, **options: Any) -> Case:
    chosen = {} if expert is None else {"dataset_index": expert}
    runner, unused = partial(parity.run_vitpose, **chosen), rf".*experts\.[^{expert or 0}]\..*"
    parts = (options, ("heatmaps",), "ForKeypointDetection", vitpose, runner)
    return Case(*parts, sizes=((48, 32),), chosen=chosen, unused=unused)


FLAT = {"inputs": flattened}
MASKED = {"inputs": masked}
POOLED, LAST, MAPS = ("pooler_output",), ("last_hidden_state",), ("feature_maps",)
NO_HEAD = {"unused": r"vision_model\.head\..*"}  # our model uses mean pooling instead of this attention head
OF_VISION = {"part": "vision_model"}
NO_BIASES = {"query_bias": False, "value_bias": False, "mlp_bias": False}
# Weights that the first fusion layer of DPT does not use.
FIRST_RESIDUAL = r".*fusion_stage\.layers\.0\.residual_layer1\..*"
DPT_UNUSED = rf".*layernorm\..*|{FIRST_RESIDUAL}"
SQUARES, SHAPES = (NATIVE, (24, 24)), ((40, 40), (24, 48))
# Maps the name of a source class, optionally followed by a variant, to its case.
ENCODERS: dict[str, Case] = {
    "ViTModel": Case({}),
    "ViTForImageClassification": classifier(qkv_bias=False, hidden_act="relu"),
    "ViTForMaskedImageModeling": Case({"encoder_stride": 8}, LAST, **MASKED, part="vit"),
    "DeiTModel": Case({}),
    "DeiTForImageClassification": classifier(),
    "DeiTForImageClassificationWithTeacher": classifier("cls_logits", "distillation_logits"),
    "DeiTForMaskedImageModeling": Case({"encoder_stride": 8}, LAST, **MASKED, part="deit"),
    "ViTMAEModel": Case({**DECODER, "mask_ratio": 0.0}, LAST, inputs=in_order),
    "ViTMAEForPreTraining": Case({**DECODER, "mask_ratio": 0.0}, LAST, inputs=in_order, part="vit"),
    "ViTMSNModel": Case({}, LAST),
    "ViTMSNForImageClassification": classifier(),
    "IJepaModel": Case({}, LAST),
    "IJepaForImageClassification": classifier(),
    "Dinov2Model": Case({}, **MASKED),
    "Dinov2Model, SwiGLU": Case({"use_swiglu_ffn": True, "use_mask_token": False}),
    "Dinov2ForImageClassification": classifier(use_mask_token=False),
    "Dinov2Backbone": Case({"out_indices": [1, 2], "use_mask_token": False}, MAPS, "Backbone"),
    "Dinov2Backbone, sequences": Case(
        {"apply_layernorm": False, "reshape_hidden_states": False, "use_mask_token": False},
        MAPS,
        "Backbone",
        unused="layernorm.*",
    ),
    "Dinov2WithRegistersModel": Case({"num_register_tokens": 3}, **MASKED, sizes=(NATIVE, OTHER, (16, 24))),
    "Dinov2WithRegistersForImageClassification": classifier(settings={"unused": ".*mask_token"}),
    "DINOv3ViTModel": Case({"num_register_tokens": 2, "rope_theta": 30.0}, **MASKED),
    "DINOv3ViTModel, SwiGLU": Case(
        {"use_gated_mlp": True, "hidden_act": "silu", "key_bias": True, "proj_bias": False}, **MASKED
    ),
    "DINOv3ViTModel, no biases": Case(NO_BIASES, **MASKED),
    "DINOv3ViTBackbone": Case(
        {"out_indices": [1, 2], "num_register_tokens": 2}, MAPS, "Backbone", unused=".*mask_token"
    ),
    "CLIPVisionModel": Case({}, POOLED),
    "CLIPVisionModelWithProjection": Case({}, POOLED, **OF_VISION),
    "CLIPModel": Case(TOWERS, POOLED, **OF_VISION),
    "CLIPForImageClassification": Case(TOWERS, POOLED, **OF_VISION),
    "SiglipVisionModel": Case({}),
    "SiglipVisionModel, no head": Case({"vision_use_head": False}, LAST),
    "SiglipModel": Case({"vision_config": SHAPE, "text_config": TO_IMAGES}, **OF_VISION),
    "SiglipForImageClassification": classifier(**TOWERS, settings=NO_HEAD),
    "Siglip2VisionModel": Case({}, **FLAT),
    "Siglip2Model": Case({"vision_config": SIGLIP_2, "text_config": TO_IMAGES}, **OF_VISION, **FLAT),
    "Siglip2ForImageClassification": classifier(
        vision_config=SIGLIP_2, text_config=TEXT, settings={**NO_HEAD, **FLAT}
    ),
}
CASES: dict[str, Case] = {
    **ENCODERS,
    "EoMT": universal(1.0),
    "EoMT, annealed": universal(0.0),
    "EoMT, SwiGLU": universal(1.0, use_swiglu_ffn=True, num_upscale_blocks=1),
    "EoMT on DINOv3": universal(1.0, is_dinov3=True),
    "EoMT on DINOv3, SwiGLU": universal(
        0.0, is_dinov3=True, use_gated_mlp=True, key_bias=True, rope_parameters={"rope_theta": 30.0}
    ),
    "YOLOS": detector(yolos),
    "YOLOS, positions once": detector(yolos, use_mid_position_embeddings=False, qkv_bias=False),
    "DPT": depth(partial(dpt, "DPTForDepthEstimation"), SQUARES, DPT_UNUSED),
    "DPT, CLS token added": depth(
        partial(dpt, "DPTForDepthEstimation"),
        SQUARES,
        DPT_UNUSED,
        **{"readout_type": "add", "reassemble_factors": [2, 1, 1, 0.5]},
    ),
    "DPTModel": Case({}, build=partial(dpt, "DPTModel"), sizes=SQUARES),
    "DPTForSemanticSegmentation": Case(
        {"num_labels": 3},
        (),
        build=partial(dpt, "DPTForSemanticSegmentation"),
        sizes=SQUARES,
        unused=r".*layernorm\..*|(neck|head|auxiliary_head)\..*",
    ),
    "Depth Anything": depth(depth_anything, SHAPES, rf".*mask_token|{FIRST_RESIDUAL}"),
    "Depth Anything, metric": depth(
        depth_anything,
        SHAPES,
        DPT_UNUSED,
        backbone={"out_indices": [1, 3, 4], "apply_layernorm": False, "use_mask_token": False},
        **{"depth_estimation_type": "metric", "max_depth": 20},
        **{"neck_hidden_sizes": [12, 16, 20], "reassemble_factors": [2, 1, 0.5]},
    ),
    "LW-DETR": deformable((32, 32)),
    # At this image size, the position table is resampled to another grid.
    "LW-DETR, two levels": deformable((48, 80), projector_scale_factors=[2.0, 0.5]),
    "LW-DETR, wide, narrowed": deformable(
        (32, 32),
        projector_scale_factors=[2.0],
        backbone={"hidden_size": 520, "num_hidden_layers": 1, "window_block_indices": [0], "out_indices": [1]},
    ),
    "ViTPose": pose(use_simple_decoder=False),
    "ViTPose, simple": pose(backbone={"qkv_bias": False}, scale_factor=2),
    "ViTPose+": pose(backbone=EXPERTS, use_simple_decoder=False),
    "ViTPose+, third expert": pose(2, backbone=EXPERTS, use_simple_decoder=False),
}


def draw_images(size: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def draw_source(source: nn.Module) -> nn.Module:
    """Draw random values for the weights, fixed position tables and batch norm statistics of a model."""
    for name, parameter in source.named_parameters():
        if name.endswith("embeddings.position_embeddings"):  # MAE does not train its position tables
            parameter.requires_grad_()
    draw_weights(source)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in source.named_parameters():
        is_lw_detr = isinstance(source, hf.LwDetrForObjectDetection)
        if is_lw_detr and "gamma_" in name:  # layer scale of LW-DETR, whose last block has no norm after it
            parameter.data.mul_(0.5)
        elif is_lw_detr and ("reference_point" in name or "bbox_embed.layers.2" in name):
            parameter.data.mul_(0.3)  # these outputs are kept small, because the decoder takes their exponential
        elif name == "logit_scale":  # the logit scale is small, so that the loss is not zero
            parameter.data.fill_(1.0)
        elif name == "decoder.decoder_pos_embed":  # only the position embedding of the CLS token is zero
            parameter.data[:, 1:] = torch.randn(parameter[:, 1:].shape, generator=generator)
    for module in source.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    return source.eval().requires_grad_()


def save_source(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    case = CASES[name]
    source = draw_source((case.build or partial(by_name, name))(**{**case.options, **options})).to(dtype)
    source.save_pretrained(folder)
    if isinstance(source, hf.LwDetrForObjectDetection):  # LW-DETR derives the window size from the image size
        height, width = case.sizes[0]
        hf.DeformableDetrImageProcessor(size={"height": height, "width": width}).save_pretrained(folder)
    return source


def interpolate_positions(positions: Tensor, spatial_shapes: Tensor, max_length: int) -> Tensor:
    """Resample positions like SigLIP 2 in transformers before 5.24. Newer versions differ in the last float32 bits."""
    (shape,) = spatial_shapes.unique(dim=0).tolist()
    target = {"size": shape, "mode": "bilinear", "align_corners": False, "antialias": True}
    resampled = F.interpolate(positions.float().permute(2, 0, 1)[None], **target)  # (1, D, h, w)
    return resampled.flatten(2).mT.expand(len(spatial_shapes), max_length, -1).to(positions.dtype)


def run_source(case: Case, source: nn.Module, images: Tensor) -> Outputs:
    """Return the compared outputs of the source. Positions are always resampled in float32, as in our models."""
    if images.shape[-2:] != case.sizes[0]:
        for name, parameter in source.named_parameters():
            if "position_embedding" in name:
                parameter.data = parameter.data.float()
        for module in source.modules():
            if images.dtype == torch.float64 and isinstance(module, Siglip2VisionEmbeddings):
                module.resize_positional_embeddings = interpolate_positions
    outputs = case.run(source.get_submodule(case.part), images, **case.inputs(images))
    names = ("hidden_states", *case.outputs)
    return {name: value for name, value in outputs.items() if name.partition("[")[0] in names}
