"""Measure the speed of masked image modeling (MAE): encoder time for several mask ratios, and training steps.

The first table lists the time of the encoder, which processes only visible patches, relative to the time without a
mask. The second table compares a training step (forward, backward, AdamW) with transformers' ViTMAEForPreTraining of
the same size; a ratio above 1 means that this package is faster. With bfloat16, the forward pass uses autocast.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import hf_vit
from hf_vit.model.task_masked_image_modeling import draw_mask

from .harness import (
    DTYPES,
    ModelArguments,
    describe_run,
    median_of,
    median_ratio,
    print_header,
    print_row,
    save,
    time_steps,
)


RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)
PARTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size", "patch_size")


@dataclass(kw_only=True)
class Arguments(ModelArguments):
    """Options of the benchmark."""

    preset: str = field(default="base", metadata={"help": "size of the encoder"})
    decoder_hidden_size: int = field(default=512, metadata={"help": "width of the decoder"})
    decoder_num_hidden_layers: int = field(default=8, metadata={"help": "number of blocks of the decoder"})
    batch_size: int = field(default=8, metadata={"help": "images per step"})


def make_models(args: Arguments) -> dict[str, nn.Module]:
    """Return our model and a transformers model of the same size, with random weights."""
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
    """Run one training step: forward pass, backward pass and optimizer step."""
    with torch.autocast(args.device, DTYPES[args.dtype], enabled=args.dtype != "float32"):
        loss = model(images).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.inference_mode()
def encode(model: Any, images: Tensor, mask: Tensor, args: Arguments) -> None:
    """Run the encoder on the visible patches."""
    with torch.autocast(args.device, DTYPES[args.dtype], enabled=args.dtype != "float32"):
        model.encode_visible(images, mask)


def measure_encoder(model: Any, images: Tensor, args: Arguments) -> list[list[float]]:
    """Return a row for each mask ratio: ratio, number and fraction of tokens, milliseconds, and relative time."""
    grid, steps = model.config.grid_size, {}
    for ratio in RATIOS:
        options = hf_vit.HfViTMaskedImageModelingConfig(mask_ratio=ratio or None)
        mask = draw_mask(len(images), grid, options, device=images.device) & bool(ratio)
        steps[str(ratio)] = partial(encode, model, images, mask, args)
    rounds = time_steps(steps, args)
    whole, rows = grid[0] * grid[1], []
    for ratio in RATIOS:
        tokens, name = 1 + whole - round(ratio * whole), str(ratio)
        share = median_ratio(rounds, name, to="0.0")
        rows.append([ratio, tokens, tokens / (1 + whole), 1000 * median_of(rounds, name), share])
    return rows


def main(args: Arguments) -> None:
    """Measure and print both tables."""
    run = describe_run(args, transformers)
    torch.manual_seed(0)
    models, images = make_models(args), args.random_images()
    encoder = measure_encoder(models["hf_vit"], images, args)
    print_header("mask ratio", "tokens", "share of tokens", "encoder ms", "relative time")
    for row in encoder:
        print_row(*row)
    steps = {
        name: partial(train, model, torch.optim.AdamW(model.parameters()), images, args)
        for name, model in models.items()
    }
    rounds = time_steps(steps, args)
    speeds = {name: args.batch_size / median_of(rounds, name) for name in steps}
    ratio = median_ratio(rounds, "transformers", to="hf_vit")
    print()
    print_header("training step", "images/s")
    for name, speed in speeds.items():
        print_row(name, speed)
    print(f"\nRatio: {ratio:.3f}")
    save({**run, "encoder": encoder, "step": speeds, "ratio": ratio}, args.output)
