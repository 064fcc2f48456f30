"""What a model computes for an image, and what a GPU can compute in a second."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .model.configuration_hf_vit import HfViTConfig
from .model.modeling_hf_vit import HfViTModel


# 10^12 operations per second in bfloat16 and float16, summed up in float32, without sparsity, as NVIDIA's data sheets
# and architecture white papers of the products say. The first name that occurs in a device's own counts.
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
    """Returns the operations per second in bfloat16 of a device, by its name in `torch.cuda`; None if not known."""
    return next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in device_name), None)


def forward_flops(config: HfViTConfig, height: int, width: int) -> int:
    """Counts the floating-point operations of `HfViTModel` on one image, on which the heads of all tasks stand.

    A product that is added counts as two. Only matrix products and convolutions count, as is usual; heads come on top
    (that of a classifier takes 2 · D · number of labels, D the hidden size). Forward and backward together take three
    times as many.

    Args:
        config: The model.
        height: Of the image in pixels.
        width: Of the image in pixels.

    Raises:
        ValueError: if the image does not fit the model.
    """
    with torch.device("meta"):
        model = HfViTModel(config).eval().requires_grad_(False)
    # The library looks at the values of the masks of windows. Which weights the model has, does not matter.
    device = "meta" if config.window_size is None else "cpu"
    image = torch.zeros(1, config.num_channels, height, width, device=device)
    # Attention as plain products: what is one kernel is not counted on all devices and by all versions.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.to_empty(device=device)(image)
    return int(counter.get_total_flops())
