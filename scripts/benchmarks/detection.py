"""Compare the throughput of object detectors with transformers.

All backbones are ViT-S/16. With deformable decoders, the backbones have 4 x 4 windows and 4 blocks with global
attention. The decoders have the same number of queries, layers and sampling points. A step is a forward pass and the
post-processing of the library, from image pixels to boxes. A ratio above 1 means that this package is faster.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

import hf_vit

from .harness import ModelArguments, compare_with_peer, describe_run, print_header, save


SHAPE = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "patch_size": 16}
GLOBAL_BLOCKS = [2, 5, 8, 11]
NUM_WINDOWS = 4  # number of windows along each side of the image
NUM_LAYERS, NUM_POINTS = 3, 2
PEERS = {"YOLOS": "queries", "LW-DETR": "deformable", "RF-DETR": "deformable"}


@dataclass(kw_only=True)
class Arguments(ModelArguments):
    """Options of the benchmark."""

    peers: list[str] = field(default_factory=lambda: [*PEERS], metadata={"help": ", ".join(PEERS)})
    image_size: int = field(default=640, metadata={"help": "height and width of the images in pixels"})
    num_labels: int = field(default=80, metadata={"help": "number of classes"})
    num_queries: int = field(default=300, metadata={"help": "number of queries"})


def make_ours(decoder: str, args: Arguments) -> nn.Module:
    """Return our model with the given decoder and random weights."""
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
    """Return the transformers model `name` with random weights, and its image processor."""
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


def main(args: Arguments) -> None:
    """Compare our model with all peers and print one row per peer."""
    run, rows = describe_run(args, transformers), list[list[Any]]()
    sizes = torch.tensor([(args.image_size, args.image_size)] * args.batch_size, device=args.device)
    print_header("decoder", "peer", "hf_vit images/s", "peer images/s", "ratio")
    for peer in args.peers:
        torch.manual_seed(0)
        models = {"hf_vit": (make_ours(PEERS[peer], args), hf_vit.HfViTImageProcessor()), peer: make_peer(peer, args)}
        decoding = {
            name: (model, partial(processor.post_process_object_detection, threshold=0.3, target_sizes=sizes))
            for name, (model, processor) in models.items()
        }
        rows.append(compare_with_peer(PEERS[peer], decoding, args))
    save({**run, "rows": rows}, args.output)
