"""What masked image modeling costs: the encoder of MAE by the share that is masked, its training step beside a peer.

python scripts/benchmark_masked_image_modeling.py
python scripts/benchmark_masked_image_modeling.py --preset small --batch_size 16 --rounds 9
python scripts/benchmark_masked_image_modeling.py --device cuda --batch_size 128 --dtype bfloat16

The first table has the forward pass of the encoder alone, which sees the visible patches; beside the time relative to
that of the whole image stands the number of tokens. The second one has a training step (forward, backward, AdamW) of
our model and of transformers' ViTMAEForPreTraining, of one size and in one process, in turns; above 1 means that ours
is faster. In bfloat16 the forward pass runs under autocast.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import transformers
from benchmarking import DTYPES, describe_device, describe_versions, in_turns, save
from torch import Tensor, nn
from transformers import HfArgumentParser

import hf_vit
from hf_vit.model.task_mim import draw_mask


RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)
PARTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size", "patch_size")


@dataclass
class Arguments:
    """What to measure."""

    preset: str = field(default="base", metadata={"help": "size of the encoder"})
    image_size: int = field(default=224, metadata={"help": "height and width of the images in pixels"})
    decoder_hidden_size: int = field(default=512, metadata={"help": "width of the decoder"})
    decoder_num_hidden_layers: int = field(default=8, metadata={"help": "blocks of the decoder"})
    batch_size: int = field(default=8, metadata={"help": "images per step"})
    dtype: str = field(default="float32", metadata={"help": "float32 or bfloat16"})
    rounds: int = field(default=7, metadata={"help": "timed rounds; each runs everything that is compared"})
    min_seconds: float = field(default=0.5, metadata={"help": "least time per measurement; short steps are repeated"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    output: str | None = field(default=None, metadata={"help": "write the tables as JSON here too"})


def make_models(args: Arguments) -> dict[str, nn.Module]:
    """Returns our model and transformers' of the same size, with fresh weights."""
    decoder = {
        "decoder_hidden_size": args.decoder_hidden_size,
        "decoder_num_hidden_layers": args.decoder_num_hidden_layers,
        "decoder_intermediate_size": 4 * args.decoder_hidden_size,
        "norm_pix_loss": True,
    }
    options = {"position_embedding_type": "sincos2d", "masked_image_modeling_config": decoder}
    config = hf_vit.HfViTConfig.from_preset(args.preset, image_size=args.image_size, **options)
    shape = {name: vars(config)[name] for name in PARTS}
    peer = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**shape, **decoder))
    models = {"hf_vit": hf_vit.HfViTForMaskedImageModeling(config), "transformers": peer}
    return {name: model.to(args.device).train() for name, model in models.items()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, args: Arguments) -> None:
    """Makes one step."""
    with torch.autocast(args.device, DTYPES[args.dtype], enabled=args.dtype != "float32"):
        loss = model(images).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.inference_mode()
def encode(model: Any, images: Tensor, mask: Tensor, args: Arguments) -> None:
    """Runs the encoder on what a mask leaves visible."""
    with torch.autocast(args.device, DTYPES[args.dtype], enabled=args.dtype != "float32"):
        model.encode_visible(images, mask)


def measure_encoder(model: Any, images: Tensor, args: Arguments) -> list[list[float]]:
    """Returns rows of ratio, tokens, their share, milliseconds, and the share of the time."""
    grid = model.config.grid_size
    steps: dict[str, Callable[[], object]] = {}
    for ratio in RATIOS:
        options = hf_vit.HfViTMaskedImageModelingConfig(mask_ratio=ratio or None)
        mask = draw_mask(len(images), grid, options, device=images.device) & bool(ratio)
        steps[str(ratio)] = partial(encode, model, images, mask, args)
    rounds = in_turns(steps, args.rounds, args.min_seconds, args.device)
    whole, rows = grid[0] * grid[1], []
    for ratio in RATIOS:
        tokens, name = 1 + whole - round(ratio * whole), str(ratio)
        milliseconds, share = 1000 * median(r[name] for r in rounds), median(r[name] / r["0.0"] for r in rounds)
        rows.append([ratio, tokens, tokens / (1 + whole), milliseconds, share])
    return rows


def main(args: Arguments) -> None:
    """Measures both and prints the tables."""
    device, versions = describe_device(args.device), describe_versions(torch, transformers)
    print(f"{device}; {versions}; {args.rounds} rounds; {args.dtype}; {args.image_size} px, batch {args.batch_size}")
    torch.manual_seed(0)
    models, images = make_models(args), torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    images = images.to(args.device)
    print("| masked | tokens | share | encoder ms | share |\n|---|---|---|---|---|")
    encoder = measure_encoder(models["hf_vit"], images, args)
    for share, tokens, *measured in encoder:
        print(f"| {share} | {tokens} | " + " | ".join(f"{value:.3f}" for value in measured) + " |", flush=True)
    steps: dict[str, Callable[[], object]] = {
        name: partial(train, model, torch.optim.AdamW(model.parameters()), images, args)
        for name, model in models.items()
    }
    rounds = in_turns(steps, args.rounds, args.min_seconds, args.device)
    speeds = {name: args.batch_size / median(r[name] for r in rounds) for name in steps}
    ratio = median(r["transformers"] / r["hf_vit"] for r in rounds)
    print("\n| training step | images/s |\n|---|---|")
    print("\n".join(f"| {name} | {speed:.2f} |" for name, speed in speeds.items()) + f"\n\nRatio: {ratio:.3f}")
    save({"device": device, "versions": versions, "encoder": encoder, "step": speeds, "ratio": ratio}, args.output)


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
