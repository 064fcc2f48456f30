"""How fast GPUs multiply matrices at best."""

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
    """Returns the operations per second of a device in bfloat16, or None where they are not known.

    Args:
        device_name: As `torch.cuda.get_device_name` says it.
    """
    return next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in device_name), None)
