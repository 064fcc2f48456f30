"""Throughput of our dense models beside transformers', from pixels to maps of the image's size.

python scripts/benchmark_dense.py
python scripts/benchmark_dense.py --tasks panoptic --rounds 9
python scripts/benchmark_dense.py --device cuda --batch_size 16 --dtype bfloat16

Backbones are alike: ViT-S/16 in all but SegFormer, whose b2 has as many weights. Each step is a forward pass and the
post-processing of each library; measured as in benchmark.py. Above 1 means that ours is faster.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import transformers
from benchmarking import DTYPES, describe_device, describe_versions, in_turns, save
from torch import nn
from transformers import HfArgumentParser

import hf_vit


SHAPE = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
NECK = {"neck_hidden_sizes": [48, 96, 192, 384], "fusion_hidden_size": 64}
POST_PROCESS = {
    "semantic": "post_process_semantic_segmentation",
    "panoptic": "post_process_panoptic_segmentation",
    "depth": "post_process_depth_estimation",
}


@dataclass
class Arguments:
    """What to measure."""

    tasks: list[str] = field(default_factory=lambda: [*POST_PROCESS], metadata={"help": "semantic, panoptic, depth"})
    image_size: int = field(default=512, metadata={"help": "height and width of the images in pixels"})
    batch_size: int = field(default=1, metadata={"help": "images per step"})
    num_labels: int = field(default=150, metadata={"help": "number of classes"})
    num_queries: int = field(default=200, metadata={"help": "number of queries of the panoptic models"})
    dtype: str = field(default="float32", metadata={"help": ", ".join(DTYPES)})
    rounds: int = field(default=7, metadata={"help": "timed rounds; each runs both libraries"})
    min_seconds: float = field(default=0.5, metadata={"help": "least time per measurement; short steps are repeated"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    output: str | None = field(default=None, metadata={"help": "write the table as JSON here too"})


def make_models(task: str, args: Arguments) -> dict[str, tuple[nn.Module, Any]]:
    """Returns the model of each library with fresh weights, and the image processor that post-processes."""
    sizes = {"image_size": args.image_size, "num_labels": args.num_labels}
    processor = hf_vit.HfViTImageProcessor()
    if task == "semantic":
        config = hf_vit.HfViTConfig.from_preset("small", **sizes)
        peer = transformers.SegformerConfig(
            depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768, num_labels=args.num_labels
        )
        return {
            "hf_vit": (hf_vit.HfViTForSemanticSegmentation(config), processor),
            "SegFormer-b2": (
                transformers.SegformerForSemanticSegmentation(peer),
                transformers.SegformerImageProcessor(),
            ),
        }
    if task == "panoptic":
        options = {"num_queries": args.num_queries}
        config = hf_vit.HfViTConfig.from_preset(
            "small", **sizes, num_register_tokens=4, layerscale_value=1.0, universal_segmentation_config=options
        )
        ours = hf_vit.HfViTForUniversalSegmentation(config)
        ours.anneal_masks(1.0)
        peer = transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**SHAPE, **sizes, **options))
        peer.attn_mask_probs.zero_()
        return {"hf_vit": (ours, processor), "EoMT": (peer, transformers.EomtImageProcessor())}
    config = hf_vit.HfViTConfig.from_preset(
        "small", image_size=args.image_size, depth_config={**NECK, "depth_estimation_type": "relative"}
    )
    shape = {**SHAPE, "intermediate_size": 1536, "image_size": args.image_size}
    peer = transformers.DPTForDepthEstimation(transformers.DPTConfig(**shape, **NECK))
    return {
        "hf_vit": (hf_vit.HfViTForDepthEstimation(config), processor),
        "DPT": (peer, transformers.DPTImageProcessor()),
    }


def make_step(task: str, model: nn.Module, processor: Any, args: Arguments) -> Callable[[], object]:
    """Returns a forward pass with post-processing to the size of the images, on fixed images."""
    model.to(args.device, DTYPES[args.dtype]).eval()
    size = args.image_size
    images = torch.randn(args.batch_size, 3, size, size).to(args.device, DTYPES[args.dtype])
    sizes = [(size, size)] * args.batch_size
    post_process = getattr(processor, POST_PROCESS[task])
    return torch.inference_mode()(lambda: post_process(model(pixel_values=images), target_sizes=sizes))


def main(args: Arguments) -> None:
    """Measures every task and prints a line as soon as it stands."""
    device, versions = describe_device(args.device), describe_versions(torch, transformers)
    print(f"{device}; {versions}; {args.rounds} rounds; {args.dtype}; {args.image_size} px, batch {args.batch_size}")
    print("| task | peer | hf_vit images/s | peer images/s | ratio |\n|---|---|---|---|---|")
    rows: list[list[Any]] = []
    for task in args.tasks:
        torch.manual_seed(0)
        models = make_models(task, args)
        steps = {name: make_step(task, *pair, args) for name, pair in models.items()}
        rounds = in_turns(steps, args.rounds, args.min_seconds, args.device)
        peer = next(name for name in models if name != "hf_vit")
        speeds = [args.batch_size / median(r[name] for r in rounds) for name in ("hf_vit", peer)]
        rows.append([task, peer, *speeds, median(r[peer] / r["hf_vit"] for r in rounds)])
        print("| " + " | ".join(f"{x:.3f}" if isinstance(x, float) else x for x in rows[-1]) + " |", flush=True)
    save({"device": device, "versions": versions, "rows": rows}, args.output)


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
