"""Throughput of our detection models beside transformers', from pixels to boxes in the image.

python scripts/benchmark_detection.py
python scripts/benchmark_detection.py --peers RF-DETR --rounds 9
python scripts/benchmark_detection.py --device cuda --batch_size 16 --dtype bfloat16

Backbones are alike, ViT-S/16, for the deformable decoder in 4 x 4 windows with 4 global blocks; so are queries, layers
and points of the decoders. Each step is a forward pass and the post-processing of each library; measured as in
benchmark.py. Above 1 means that ours is faster.
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


SHAPE = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "patch_size": 16}
GLOBAL_BLOCKS = [2, 5, 8, 11]
NUM_WINDOWS = 4  # on each side
NUM_LAYERS, NUM_POINTS = 3, 2
PEERS = {"YOLOS": "queries", "LW-DETR": "deformable", "RF-DETR": "deformable"}


@dataclass
class Arguments:
    """What to measure."""

    peers: list[str] = field(default_factory=lambda: [*PEERS], metadata={"help": ", ".join(PEERS)})
    image_size: int = field(default=640, metadata={"help": "height and width of the images in pixels"})
    batch_size: int = field(default=1, metadata={"help": "images per step"})
    num_labels: int = field(default=80, metadata={"help": "number of classes"})
    num_queries: int = field(default=300, metadata={"help": "number of objects that an image can have"})
    dtype: str = field(default="float32", metadata={"help": ", ".join(DTYPES)})
    rounds: int = field(default=7, metadata={"help": "timed rounds; each runs both libraries"})
    min_seconds: float = field(default=0.5, metadata={"help": "least time per measurement; short steps are repeated"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    output: str | None = field(default=None, metadata={"help": "write the table as JSON here too"})


def make_ours(decoder: str, args: Arguments) -> nn.Module:
    """Returns our model with fresh weights."""
    fields: dict[str, Any] = {"image_size": args.image_size, "num_labels": args.num_labels}
    options: dict[str, Any] = {"decoder": decoder, "num_queries": args.num_queries}
    if decoder == "queries":
        options |= {"num_layers": 0, "use_mid_position_embeddings": True}
    else:
        options |= {"num_layers": NUM_LAYERS, "num_points": NUM_POINTS, "out_indices": [b + 1 for b in GLOBAL_BLOCKS]}
        fields |= {"window_size": args.image_size // 16 // NUM_WINDOWS, "global_attention_layers": GLOBAL_BLOCKS}
    config = hf_vit.HfViTConfig.from_preset("small", **fields, detection_config=options)
    return hf_vit.HfViTForObjectDetection(config)


def make_peer(name: str, args: Arguments) -> tuple[nn.Module, Any]:
    """Returns the model of transformers with fresh weights, and its image processor."""
    shape: dict[str, Any] = {**SHAPE, "image_size": args.image_size}
    if name == "YOLOS":
        shape = {**shape, "image_size": [args.image_size, args.image_size], "intermediate_size": 1536}
        sizes = {"num_labels": args.num_labels, "num_detection_tokens": args.num_queries}
        config = transformers.YolosConfig(**shape, **sizes)
        return transformers.YolosForObjectDetection(config), transformers.YolosImageProcessor()
    common = {
        "num_labels": args.num_labels,
        "num_queries": args.num_queries,
        "decoder_layers": NUM_LAYERS,
        "decoder_n_points": NUM_POINTS,
    }
    if name == "LW-DETR":
        windowed = [block for block in range(12) if block not in GLOBAL_BLOCKS]
        backbone = transformers.LwDetrViTConfig(
            **shape, num_windows=NUM_WINDOWS**2, window_block_indices=windowed, out_indices=GLOBAL_BLOCKS
        )
        config = transformers.LwDetrConfig(backbone_config=backbone, projector_scale_factors=[1.0], **common)
        return transformers.LwDetrForObjectDetection(config), transformers.DeformableDetrImageProcessor()
    backbone = transformers.RfDetrDinov2Config(**shape, num_windows=NUM_WINDOWS, out_indices=GLOBAL_BLOCKS)
    config = transformers.RfDetrConfig(backbone_config=backbone, **common)
    return transformers.RfDetrForObjectDetection(config), transformers.RfDetrImageProcessor()


def make_step(model: nn.Module, processor: Any, args: Arguments) -> Callable[[], object]:
    """Returns a forward pass with post-processing to boxes in pixels, on fixed images."""
    model.to(args.device, DTYPES[args.dtype]).eval()
    size = args.image_size
    images = torch.randn(args.batch_size, 3, size, size).to(args.device, DTYPES[args.dtype])
    sizes = torch.tensor([(size, size)] * args.batch_size, device=args.device)
    post_process = processor.post_process_object_detection
    return torch.inference_mode()(lambda: post_process(model(pixel_values=images), 0.3, target_sizes=sizes))


def main(args: Arguments) -> None:
    """Measures beside every peer and prints a line as soon as it stands."""
    device, versions = describe_device(args.device), describe_versions(torch, transformers)
    print(f"{device}; {versions}; {args.rounds} rounds; {args.dtype}; {args.image_size} px, batch {args.batch_size}")
    print("| decoder | peer | hf_vit images/s | peer images/s | ratio |\n|---|---|---|---|---|")
    rows: list[list[Any]] = []
    for peer in args.peers:
        torch.manual_seed(0)
        models = {"hf_vit": (make_ours(PEERS[peer], args), hf_vit.HfViTImageProcessor()), peer: make_peer(peer, args)}
        steps = {name: make_step(*pair, args) for name, pair in models.items()}
        rounds = in_turns(steps, args.rounds, args.min_seconds, args.device)
        speeds = [args.batch_size / median(r[name] for r in rounds) for name in ("hf_vit", peer)]
        rows.append([PEERS[peer], peer, *speeds, median(r[peer] / r["hf_vit"] for r in rounds)])
        print("| " + " | ".join(f"{x:.3f}" if isinstance(x, float) else x for x in rows[-1]) + " |", flush=True)
    save({"device": device, "versions": versions, "rows": rows}, args.output)


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
