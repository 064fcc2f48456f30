"""Compute the number of floating-point operations (FLOPs) of a model and the peak throughput of GPUs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .model.configuration_hf_vit import HfViTConfig, to_pair
from .model.modeling_hf_vit import HfViTModel
from .model.pretrained import HfViTPreTrainedModel


# Peak throughput of GPUs in 10^12 operations per second, for bfloat16 and float16 with float32 accumulation, without
# sparsity. Source: NVIDIA data sheets and architecture white papers. The first key that a device name contains
# applies.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090 Ti": 80.0,
    "RTX 3090": 71.0,
}

# Models whose inputs include texts, several views or random masks in addition to an image
OTHER_INPUTS = ("HfViTForZeroShotImageClassification", "HfViTForJointEmbedding", "HfViTForMaskedImageModeling")
# Outputs whose shapes are printed in the table of stages
OUTPUTS = {
    *("pooler_output", "logits", "predicted_depth", "pred_boxes", "heatmaps", "masks_queries_logits"),
    *("class_queries_logits", "latents", "reconstruction"),
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak bfloat16 operations per second of a GPU, given its `torch.cuda` name; None for unknown GPUs."""
    return next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in device_name), None)


def forward_flops(config: HfViTConfig, height: int, width: int) -> int:
    """Return the number of floating-point operations of a forward pass of `HfViTModel` on one image.

    `HfViTModel` is the backbone of all tasks, so heads are not included. A linear classifier for K labels adds
    2 · D · K operations, where D is the hidden size. Only matrix products and convolutions are counted, and a
    multiply-add counts as two operations. Forward and backward pass together require three times as many operations.

    Args:
        config: Configuration of the model.
        height: Height of the image in pixels.
        width: Width of the image in pixels.

    Raises:
        ValueError: if the model does not accept the image size.
    """
    with torch.device("meta"):
        model = HfViTModel(config)
    return count_flops(model, height, width)[0].get("Global", 0)


def count_flops(model: HfViTPreTrainedModel, height: int, width: int) -> tuple[dict[str, int], Any]:
    """Return the number of operations of each module for one image, by module name, and the output of the model.

    The number of operations of the whole model has the key "Global".

    Args:
        model: A model whose only inputs are images, with weights on the meta device. The model cannot be used
            afterwards.
        height: Height of the image in pixels.
        width: Width of the image in pixels.
    """
    # Models with window attention run on the CPU, because transformers reads the values of attention masks, and meta
    # tensors have no values. Weights stay uninitialized, because they do not affect the number of operations.
    device = "meta" if model.config.window_size is None else "cpu"
    image = torch.zeros(1, model.config.num_channels, height, width, device=device)
    # The MATH backend computes attention with matrix products, which are always counted. Fused attention kernels are
    # counted only on some devices and by some torch versions.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        outputs = model.eval().requires_grad_(False).to_empty(device=device)(image)
    return {name: int(sum(counts.values())) for name, counts in counter.get_flop_counts().items()}, outputs


class Stage(NamedTuple):
    """A stage of a model, such as a block: name, output shape, number of parameters and number of operations."""

    name: str
    shape: str
    parameters: int
    operations: int


def describe_stages(model: HfViTPreTrainedModel, height: int, width: int) -> list[Stage]:
    """Return the stages of a model for one image.

    Args:
        model: A model with weights on the meta device. The model cannot be used afterwards. The head is omitted if the
            model requires inputs other than one image, such as texts.
        height: Height of the image in pixels, a multiple of the patch height.
        width: Width of the image in pixels, a multiple of the patch width.
    """
    if type(model).__name__ in OTHER_INPUTS:
        model = model.base_model
    config, backbone = model.config, model.base_model
    counts, outputs = count_flops(model, height, width)
    prefix = type(model).__name__ + ("" if backbone is model else f".{model.base_model_prefix}")

    def size(part: nn.Module) -> int:
        return sum(weight.numel() for weight in part.parameters())

    rows, columns = (side // patch for side, patch in zip((height, width), to_pair(config.patch_size), strict=True))
    patches = backbone.embeddings.patch_embeddings
    tokens = f"({rows * columns + config.num_prefix_tokens}, {config.hidden_size})"
    shape = f"({rows * columns}, {config.hidden_size})"
    stages = [
        Stage("image", f"({config.num_channels}, {height}, {width})", 0, 0),
        Stage(
            f"patches, {rows} x {columns}",
            shape,
            size(patches),
            counts.get(f"{prefix}.embeddings.patch_embeddings", 0),
        ),
        Stage("prefix tokens and positions", tokens, size(backbone.embeddings) - size(patches), 0),
    ]
    for number, block in enumerate(backbone.encoder.layers):
        operations = counts.get(f"{prefix}.encoder.layers.{number}", 0)
        stages.append(Stage(f"block {number + 1}", tokens, size(block), operations))
    tensors = {name: value for name, value in outputs.items() if isinstance(value, Tensor) and name in OUTPUTS}
    shapes = ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in tensors.items())
    parameters = size(model) - sum(stage.parameters for stage in stages)
    operations = counts["Global"] - sum(stage.operations for stage in stages)
    name = "norm and pooling" if backbone is model else "norm, pooling and head"
    return [*stages, Stage(name, shapes, parameters, operations)]
