"""Floating-point operations of a model, and peak throughput of GPUs."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .model.configuration_hf_vit import HfViTConfig
from .model.modeling_hf_vit import HfViTModel


# Peak throughput in 10^12 operations per second: bfloat16 and float16 with float32 accumulation, without sparsity.
# Source: NVIDIA's data sheets and architecture white papers. The first name contained in a device name applies.
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


def peak_flops(device_name: str) -> float | None:
    """Return the peak bfloat16 operations per second of a `torch.cuda` device name, or None if it is unknown."""
    return next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in device_name), None)


def forward_flops(config: HfViTConfig, height: int, width: int) -> int:
    """Return the number of floating-point operations of a forward pass of `HfViTModel` on one image.

    `HfViTModel` is the backbone of all tasks; heads are not included. A linear classifier of K labels adds 2 · D · K,
    where D is the hidden size. A multiply-add counts as two operations, and only matrix products and convolutions are
    counted. Forward and backward pass together take three times as many operations.

    Args:
        config: Configuration of the model.
        height: Height of the image in pixels.
        width: Width of the image in pixels.

    Raises:
        ValueError: if the model does not accept the image size.
    """
    with torch.device("meta"):
        model = HfViTModel(config).eval().requires_grad_(False)
    # transformers reads the values of window masks, which meta tensors do not have. The weights can be arbitrary.
    device = "meta" if config.window_size is None else "cpu"
    image = torch.zeros(1, config.num_channels, height, width, device=device)
    # Plain matrix products: fused attention kernels are not counted on all devices or by all torch versions.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.to_empty(device=device)(image)
    return int(counter.get_total_flops())
