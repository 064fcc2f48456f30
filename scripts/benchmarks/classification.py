"""Compare the throughput of image classifiers with transformers and timm.

A ratio above 1 means that this package is faster.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import timm
import torch
import transformers
from timm.layers.attention import Attention
from timm.models import VisionTransformer
from torch import nn
from transformers import PreTrainedModel

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.flops import forward_flops, peak_flops
from hf_vit.model.configuration_hf_vit import to_pair

from .harness import (
    DTYPES,
    StepArguments,
    describe_run,
    median_of,
    median_ratio,
    print_header,
    print_row,
    save,
    time_steps,
)


@dataclass(kw_only=True)
class Arguments(StepArguments):
    """Options of the benchmark."""

    presets: list[str] = field(default_factory=lambda: ["base"], metadata={"help": "tiny, small, base, large, huge"})
    patch_size: int | None = field(
        default=None, metadata={"help": "height and width in pixels; by default the size of the preset"}
    )
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32], metadata={"help": "images per step"})
    dtypes: list[str] = field(
        default_factory=lambda: ["float32", "bfloat16"], metadata={"help": "float32, bfloat16, float16"}
    )
    modes: list[str] = field(default_factory=lambda: ["forward", "train"], metadata={"help": "forward, train"})
    rounds: int = field(default=6, metadata={"help": "number of rounds; each runs every library in random order"})
    attention: str = field(default="sdpa", metadata={"help": "attention implementation of all models: sdpa or eager"})
    compile: bool = field(default=False, metadata={"help": "run all models under torch.compile"})


def make_transformers_model(config: HfViTConfig) -> nn.Module:
    """Return a transformers model with the architecture in `config` and random weights."""
    names = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "layer_norm_eps"}
    names |= {"image_size", "patch_size", "num_channels"}
    shape = {name: value for name, value in config.to_dict().items() if name in names}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**shape, num_labels=config.num_labels))


def make_timm_model(config: HfViTConfig) -> nn.Module:
    """Return a timm model with the architecture in `config` and random weights."""
    return VisionTransformer(
        img_size=to_pair(config.image_size),
        patch_size=to_pair(config.patch_size),
        in_chans=config.num_channels,
        num_classes=config.num_labels,
        embed_dim=config.hidden_size,
        depth=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        mlp_ratio=config.intermediate_size / config.hidden_size,
    )


MAKE_MODEL: dict[str, Callable[[HfViTConfig], nn.Module]] = {
    "hf_vit": HfViTForImageClassification,
    "transformers": make_transformers_model,
    "timm": make_timm_model,
}


def set_attention(model: nn.Module, attention: str) -> None:
    """Set the attention implementation of a model."""
    if isinstance(model, PreTrainedModel):
        model.set_attn_implementation(attention)
    elif isinstance(model, VisionTransformer):
        for part in model.modules():
            if isinstance(part, Attention):
                vars(part)["fused_attn"] = attention == "sdpa"  # timm has no method that sets it


def make_step(model: nn.Module, mode: str, dtype: torch.dtype, batch_size: int, device: str) -> Callable[[], object]:
    """Return a function that runs a forward pass or a training step with AdamW on fixed images of 224 pixels.

    Inference uses weights in `dtype`. Training uses float32 weights and autocast, as in the Trainer of transformers.
    """
    training = mode == "train"
    model.to(device, torch.float32 if training else dtype).train(training)
    images = torch.randn(batch_size, 3, 224, 224, device=device, dtype=next(model.parameters()).dtype)
    labels = torch.randint(1000, (batch_size,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if training else None

    def forward() -> torch.Tensor:
        outputs = model(images)
        return outputs if isinstance(outputs, torch.Tensor) else outputs.logits

    if optimizer is None:
        return torch.inference_mode()(forward)

    def train() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = nn.functional.cross_entropy(forward(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def measure_gpu(
    steps: dict[str, Callable[[], object]], rounds: list[dict[str, float]], flops: int, batch_size: int
) -> dict[str, float]:
    """Return the peak memory in MiB and the model FLOPs utilization of each step, given the FLOPs per image."""
    peak, found = peak_flops(torch.cuda.get_device_name()), dict[str, float]()
    for name, step in steps.items():
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        step()
        found[f"{name} MiB"] = (torch.cuda.max_memory_allocated() - start) / 2**20  # excludes weights and optimizer
        if peak is not None:
            found[f"{name} mfu"] = batch_size * flops / median_of(rounds, name) / peak
    return found


def main(args: Arguments) -> None:
    """Measure all combinations of options and print one row per combination."""
    run, rows = describe_run(args, transformers, timm), list[dict[str, Any]]()
    for preset in args.presets:
        torch.manual_seed(0)
        patches = {} if args.patch_size is None else {"patch_size": args.patch_size}
        config = HfViTConfig.from_preset(preset, num_labels=1000, **patches)
        models = {name: make(config) for name, make in MAKE_MODEL.items()}
        for model in models.values():
            set_attention(model, args.attention)
            if args.compile:
                model.compile()
        for mode, dtype, batch_size in product(args.modes, args.dtypes, args.batch_sizes):
            steps = {name: make_step(m, mode, DTYPES[dtype], batch_size, args.device) for name, m in models.items()}
            rounds = time_steps(steps, args)
            row: dict[str, Any] = {"preset": preset, "patch_size": config.patch_size, "mode": mode, "dtype": dtype}
            row["batch_size"] = batch_size
            row |= {f"{name} images/s": batch_size / median_of(rounds, name) for name in steps}
            row |= {f"ratio to {name}": median_ratio(rounds, name, to="hf_vit") for name in steps if name != "hf_vit"}
            if args.device == "cuda":
                flops = forward_flops(config, 224, 224) * (3 if mode == "train" else 1)
                row |= measure_gpu(steps, rounds, flops, batch_size)
            if not rows:
                print_header(*row)
            print_row(*row.values())
            rows.append(row)
    save({**run, "rows": rows}, args.output)
