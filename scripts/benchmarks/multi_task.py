"""Compare the forward pass of a model with four heads with those of one and of four single-task models."""

import resource
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from hf_vit import (
    HfViTConfig,
    HfViTForDepthEstimation,
    HfViTForImageClassification,
    HfViTForKeypointDetection,
    HfViTForMultiTask,
    HfViTForSemanticSegmentation,
)

from .harness import StepArguments, describe_run, median_of, median_ratio, print_header, print_row, save, time_steps


LIGHT: dict[str, Any] = {"depth_config": {"head": "linear"}, "segmentation_config": {"head": "linear"}}
LIGHT["keypoint_config"] = {"head": "simple"}
KINDS = ("one", "four", "shared")
HEADS: dict[str, Any] = {
    "species": HfViTForImageClassification,
    "surfaces": HfViTForSemanticSegmentation,
    "rooms": HfViTForDepthEstimation,
    "pose": HfViTForKeypointDetection,
}


@dataclass(kw_only=True)
class Arguments(StepArguments):
    """Options of the comparison."""

    preset: str = field(default="small", metadata={"help": "size of the backbone"})
    batch_size: int = field(default=8, metadata={"help": "number of images"})
    only: str = field(default="", metadata={"help": "run only one, four or shared, and print the peak memory"})
    folder: str = field(default="", metadata={"help": "folder of saved models for --only"})


def save_models(preset: str, folder: Path) -> None:
    """Save four single-task models with the same backbone, and the model that combines them."""
    config = HfViTConfig.from_preset(preset, num_labels=10, **LIGHT)
    singles = {name: kind(config) for name, kind in HEADS.items()}
    first = singles["species"].model.state_dict()
    for name, model in singles.items():
        model.model.load_state_dict(first, strict=False)
        model.save_pretrained(folder / name)
    HfViTForMultiTask.combine(singles["species"], singles, {}).save_pretrained(folder / "shared")


def make_steps(folder: Path, batch_size: int, kinds: Collection[str] = KINDS) -> dict[str, Callable[[], object]]:
    """Return the forward passes of the models saved in a folder; only the models of the given kinds are opened."""
    images = torch.randn(batch_size, 3, 224, 224)
    names = {"one": ["surfaces"], "four": list(HEADS)}
    steps: dict[str, Callable[[], object]] = {}
    for kind in kinds:
        if kind == "shared":
            models: list[Any] = [HfViTForMultiTask.from_pretrained(folder / kind)]
        else:
            models = [HEADS[name].from_pretrained(folder / name) for name in names[kind]]
        steps[kind] = partial(lambda models: [model.eval()(images) for model in models], models)
    return steps


def measure_memory(folder: Path, batch_size: int, kind: str) -> float:
    """Return the peak memory in MiB of a new process that runs one forward pass."""
    command = [sys.executable, sys.argv[0], "multi_task", "--folder", str(folder), "--only", kind]
    command += ["--batch_size", str(batch_size)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


@torch.no_grad()
def main(args: Arguments) -> None:
    """Print time and memory of one model, four models, and one model with four heads."""
    if args.only:
        (step,) = make_steps(Path(args.folder), args.batch_size, [args.only]).values()
        step()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    run = describe_run(args, transformers)
    with TemporaryDirectory() as name:
        save_models(args.preset, Path(name))
        rounds = time_steps(make_steps(Path(name), args.batch_size), args)
        memory = {kind: measure_memory(Path(name), args.batch_size, kind) for kind in KINDS}
    print_header("models", "ms", "time relative to one", "peak MiB", "memory relative to one")
    for kind in KINDS:
        time = median_of(rounds, kind), median_ratio(rounds, kind, "one")
        print_row(kind, 1000 * time[0], time[1], memory[kind], memory[kind] / memory["one"])
    save({**run, "rounds": rounds, "memory": memory}, args.output)
