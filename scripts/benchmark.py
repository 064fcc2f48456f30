"""Compare throughput, time, memory and training quality of this package with other libraries.

Each round measures all candidates once, in random order and in one process, so that other load on the machine affects
all candidates equally. Times are medians over the rounds. Ratios are computed in each round; their median is reported.

Examples:
    python scripts/benchmark.py classification --presets small --batch_sizes 8 --modes forward --rounds 9
    python scripts/benchmark.py dense --device cuda --batch_size 16 --dtype bfloat16
    python scripts/benchmark.py training --help
"""

import argparse
import sys
from importlib import import_module

from transformers import HfArgumentParser


SUBJECTS = {
    "classification": "image classifiers, compared with transformers and timm",
    "inference": "image classifiers compiled, in 8 bits and in other runtimes, compared with transformers and timm",
    "dense": "segmentation and depth, from pixels to maps, compared with transformers",
    "detection": "object detection, from pixels to boxes, compared with transformers",
    "multi_task": "four heads on one backbone, compared with single-task models",
    "masked_image_modeling": "encoder time by mask ratio, and training steps, compared with transformers",
    "growth": "time and memory by image size, batch size, depth and queries, compared with a prediction",
    "loading": "time and memory to load a checkpoint, compared with transformers",
    "pipelines": "images per second from files to labels, compared with the stock pipeline",
    "tiles": "object detection in large images, with and without tiles",
    "serving": "images per second and latency with many clients, compared with the stock pipeline",
    "http_serving": "images per second and latency with many clients over HTTP, or a soak test",
    "reading": "images per second from folders, parquet and tar files, as datasets and as streams",
    "learning": "scores compared with transformers' models that train for the same time",
    "reconstruction": "quality of an autoencoder, compared with JPEG at equal bytes",
    "training": "training throughput compared with PyTorch, timm and transformers' Trainer",
}


def main(arguments: list[str]) -> None:
    """Run the benchmark of the subject named by the first argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described = "; ".join(f"{name}: {text}" for name, text in SUBJECTS.items())
    parser.add_argument("subject", choices=list(SUBJECTS), metavar="SUBJECT", help=described)
    parser.add_argument("options", nargs="*", help="options of the subject; SUBJECT --help lists them")
    subject = parser.parse_args(arguments[:1]).subject
    module = import_module(f"benchmarks.{subject}")
    options = HfArgumentParser(module.Arguments, prog=f"{parser.prog} {subject}", description=module.__doc__)
    module.main(options.parse_args_into_dataclasses(arguments[1:])[0])


if __name__ == "__main__":
    main(sys.argv[1:])
