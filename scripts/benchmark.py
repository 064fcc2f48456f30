"""Measures throughput, time, memory and learning of this package beside other libraries.

Every round measures everything that is compared once, in random order, in one process, so that what else the machine
does falls on all alike. Results are medians over the rounds, and medians of the ratios within a round.

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
    "classification": "image classifiers beside transformers and timm",
    "inference": "image classifiers compiled, in 8 bits and in other runtimes, beside transformers and timm",
    "dense": "segmentation and depth, from pixels to maps, beside transformers",
    "detection": "object detection, from pixels to boxes, beside transformers",
    "masked_image_modeling": "the encoder by the share that is masked, and training steps beside transformers",
    "growth": "time and memory by image size, batch, depth and queries, beside what arithmetic predicts",
    "loading": "time and memory of opening a checkpoint beside transformers",
    "pipelines": "images per second from files to labels beside the stock pipeline",
    "serving": "images per second and latency under many clients beside the stock pipeline",
    "reading": "images per second from folders, parquet and tar files, as a list and as a stream",
    "learning": "scores of a training beside transformers' models that train for the same seconds",
    "training": "the Trainer beside loops of PyTorch and timm and the library's Trainer",
}


def main(arguments: list[str]) -> None:
    """Runs the benchmark of a subject with its own options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described = "; ".join(f"{name}: {text}" for name, text in SUBJECTS.items())
    parser.add_argument("subject", choices=list(SUBJECTS), metavar="SUBJECT", help=described)
    parser.add_argument("options", nargs="*", help="those of the subject: SUBJECT --help lists them")
    subject = parser.parse_args(arguments[:1]).subject
    module = import_module(f"benchmarks.{subject}")
    options = HfArgumentParser(module.Arguments, prog=f"{parser.prog} {subject}", description=module.__doc__)
    module.main(options.parse_args_into_dataclasses(arguments[1:])[0])


if __name__ == "__main__":
    main(sys.argv[1:])
