"""Throughput of our classifier beside transformers' and timm's, in one process and in turns.

python scripts/benchmark.py
python scripts/benchmark.py --presets small --batch_sizes 8 --modes forward --rounds 9
python scripts/benchmark.py --device cuda --batch_sizes 64 256 --dtypes bfloat16 --compile

Every round times each library once, in turn, so that what else the machine does falls on all of them. The ratio of two
libraries is the median over the rounds of the ratio within a round; above 1 means that ours is faster.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any

import timm
import torch
import transformers
from benchmarking import DTYPES, describe_device, describe_versions, in_turns, save
from peer_models import MAKE_MODEL
from torch import nn
from transformers import HfArgumentParser

from hf_vit import HfViTConfig


@dataclass
class Arguments:
    """What to measure."""

    presets: list[str] = field(default_factory=lambda: ["base"], metadata={"help": "tiny, small, base, large, huge"})
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32], metadata={"help": "images per step"})
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"], metadata={"help": "also float16"})
    modes: list[str] = field(default_factory=lambda: ["forward", "train"], metadata={"help": "forward, train"})
    rounds: int = field(default=6, metadata={"help": "timed rounds; each runs every library"})
    min_seconds: float = field(default=0.5, metadata={"help": "least time per measurement; short steps are repeated"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    compile: bool = field(default=False, metadata={"help": "run all models under torch.compile"})
    output: str | None = field(default=None, metadata={"help": "write the table as JSON here too"})


def make_step(model: nn.Module, mode: str, dtype: torch.dtype, batch_size: int, device: str) -> Callable[[], object]:
    """Returns one forward pass, or one whole training step with AdamW, on fixed images of 224 pixels.

    Inference runs in weights of `dtype`; training keeps float32 weights and casts by autocast, as the Trainer does.
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


def measure(models: dict[str, nn.Module], mode: str, dtype: str, batch_size: int, args: Arguments) -> dict[str, Any]:
    """Times all models in turns and returns a row of the table."""
    steps = {name: make_step(model, mode, DTYPES[dtype], batch_size, args.device) for name, model in models.items()}
    rounds = in_turns(steps, args.rounds, args.min_seconds, args.device)
    row: dict[str, Any] = {"mode": mode, "dtype": dtype, "batch_size": batch_size}
    row |= {f"{name} images/s": batch_size / median(r[name] for r in rounds) for name in steps}
    row |= {f"ratio to {name}": median(r[name] / r["hf_vit"] for r in rounds) for name in steps if name != "hf_vit"}
    return row


def main(args: Arguments) -> None:
    """Measures every combination and prints a line as soon as it stands."""
    device, versions = describe_device(args.device), describe_versions(torch, transformers, timm)
    print(f"{device}; {versions}; {args.rounds} rounds; compile={args.compile}")
    rows = []
    for preset in args.presets:
        torch.manual_seed(0)
        config = HfViTConfig.from_preset(preset, num_labels=1000)
        models = {name: make(config) for name, make in MAKE_MODEL.items()}
        for model in models.values() if args.compile else ():
            model.compile()
        for mode, dtype, batch_size in product(args.modes, args.dtypes, args.batch_sizes):
            rows.append({"preset": preset} | measure(models, mode, dtype, batch_size, args))
            if len(rows) == 1:
                print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
            values = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in rows[-1].values())
            print(f"| {' | '.join(values)} |", flush=True)
    save({"device": device, "versions": versions, "rows": rows}, args.output)


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
