"""Golden values: saved outputs and gradients of models whose weights are computed by a formula.

`python -m tests.helpers.golden` regenerates them.
"""

import json
from pathlib import Path

import torch

from hf_vit import HfViTForImageClassification
from hf_vit.model.configuration_hf_vit import to_pair

from .models import VARIANTS, small_config


PATH = Path(__file__).with_suffix(".json")
GOLDEN: dict[str, list[float]] = json.loads(PATH.read_text()) if PATH.exists() else {}


def wave(shape: torch.Size, frequency: float) -> torch.Tensor:
    """Returns distinct numbers in [-1, 1], computed by a formula and not by a random generator."""
    steps = torch.arange(shape.numel(), dtype=torch.float64)
    return torch.sin(frequency * steps + 0.1 * frequency).reshape(shape)


def golden_values() -> dict[str, list[float]]:
    """Returns the float64 logits and the mean absolute gradient of each weight of every model variant."""
    results = {}
    for variant in VARIANTS:
        model = HfViTForImageClassification(small_config(variant, drop_path_rate=0.0)).double().eval()
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.copy_(0.3 * wave(parameter.shape, 1.3 + 0.1 * index))
        patch = to_pair(model.config.patch_size)
        images = wave(torch.Size((2, model.config.num_channels, 3 * patch[0], 5 * patch[1])), 0.7)
        logits = model(images).logits
        (logits * wave(logits.shape, 0.9)).sum().backward()
        results[f"{variant}/logits"] = logits.flatten().tolist()
        results[f"{variant}/gradients"] = [
            float(parameter.grad.abs().mean()) for parameter in model.parameters() if parameter.grad is not None
        ]
    return results


if __name__ == "__main__":
    PATH.write_text(json.dumps(golden_values(), indent=1) + "\n")
