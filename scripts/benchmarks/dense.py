"""Compare the throughput of segmentation and depth models with transformers.

All backbones are ViT-S/16, except for SegFormer-b2, which has a similar number of parameters. A step is a forward pass
and the post-processing of the library, from image pixels to maps of the image size. A ratio above 1 means that this
package is faster.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

import hf_vit

from .harness import ModelArguments, compare_with_peer, describe_run, print_header, save


SHAPE = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
NECK = {"neck_hidden_sizes": [48, 96, 192, 384], "fusion_hidden_size": 64}
# Models with random weights, and their post-processing functions, by name
Models = dict[str, tuple[nn.Module, Callable[..., object]]]


@dataclass(kw_only=True)
class Arguments(ModelArguments):
    """Options of the benchmark."""

    tasks: list[str] = field(default_factory=lambda: [*MAKE_MODELS], metadata={"help": "semantic, panoptic, depth"})
    image_size: int = field(default=512, metadata={"help": "height and width of the images in pixels"})
    num_labels: int = field(default=150, metadata={"help": "number of classes"})
    num_queries: int = field(default=200, metadata={"help": "number of queries of the panoptic models"})


def make_semantic(args: Arguments) -> Models:
    """Return our model and SegFormer-b2 for semantic segmentation."""
    config = hf_vit.HfViTConfig.from_preset("small", image_size=args.image_size, num_labels=args.num_labels)
    ours = hf_vit.HfViTForSemanticSegmentation(config)
    peer = transformers.SegformerConfig(
        depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768, num_labels=args.num_labels
    )
    decode = transformers.SegformerImageProcessor().post_process_semantic_segmentation
    return {
        "hf_vit": (ours, hf_vit.HfViTImageProcessor().post_process_semantic_segmentation),
        "SegFormer-b2": (transformers.SegformerForSemanticSegmentation(peer), decode),
    }


def make_panoptic(args: Arguments) -> Models:
    """Return our model and EoMT for panoptic segmentation."""
    sizes = {"image_size": args.image_size, "num_labels": args.num_labels}
    options = {"num_queries": args.num_queries}
    config = hf_vit.HfViTConfig.from_preset(
        "small", **sizes, num_register_tokens=4, layerscale_value=1.0, universal_segmentation_config=options
    )
    ours = hf_vit.HfViTForUniversalSegmentation(config)
    ours.anneal_masks(1.0)
    peer = transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**SHAPE, **sizes, **options))
    peer.attn_mask_probs.zero_()
    return {
        "hf_vit": (ours, hf_vit.HfViTImageProcessor().post_process_panoptic_segmentation),
        "EoMT": (peer, transformers.EomtImageProcessor().post_process_panoptic_segmentation),
    }


def make_depth(args: Arguments) -> Models:
    """Return our model and DPT for depth estimation."""
    options = {**NECK, "depth_estimation_type": "relative"}
    config = hf_vit.HfViTConfig.from_preset("small", image_size=args.image_size, depth_config=options)
    shape = {**SHAPE, "intermediate_size": 1536, "image_size": args.image_size}
    peer = transformers.DPTForDepthEstimation(transformers.DPTConfig(**shape, **NECK))
    return {
        "hf_vit": (hf_vit.HfViTForDepthEstimation(config), hf_vit.HfViTImageProcessor().post_process_depth_estimation),
        "DPT": (peer, transformers.DPTImageProcessor().post_process_depth_estimation),
    }


MAKE_MODELS: dict[str, Callable[[Arguments], Models]] = {
    "semantic": make_semantic,
    "panoptic": make_panoptic,
    "depth": make_depth,
}


def main(args: Arguments) -> None:
    """Measure all tasks and print one row per task."""
    run, rows = describe_run(args, transformers), list[list[Any]]()
    sizes = [(args.image_size, args.image_size)] * args.batch_size
    print_header("task", "peer", "hf_vit images/s", "peer images/s", "ratio")
    for task in args.tasks:
        torch.manual_seed(0)
        models = MAKE_MODELS[task](args)
        decoding = {name: (model, partial(decode, target_sizes=sizes)) for name, (model, decode) in models.items()}
        rows.append(compare_with_peer(task, decoding, args))
    save({**run, "rows": rows}, args.output)
