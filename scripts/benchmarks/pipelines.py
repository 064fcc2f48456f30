"""Compare our image classification pipeline with the stock pipeline of transformers, in images per second.

Both pipelines run the same model and image processor, from files to labels: the stock pipeline with several batch
sizes, our pipeline with its defaults and with several numbers of threads. Reading (decoding and resizing) and the
forward pass are also measured alone. If a CPU uses all cores for reading or for the forward pass, the upper bound of
the speed is 1 / (1 / reading + 1 / forward). The last column is the measured speed divided by this bound.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import ImageClassificationPipeline, pipeline

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.model.pipeline_hf_vit import ReadAhead

from .harness import (
    DTYPES,
    RoundArguments,
    describe_run,
    in_rounds,
    median_of,
    median_ratio,
    print_header,
    print_row,
    save,
)


@dataclass(kw_only=True)
class Arguments(RoundArguments):
    """Options of the benchmark."""

    photos: str = field(metadata={"help": "folder of image files"})
    presets: list[str] = field(default_factory=lambda: ["tiny", "small"], metadata={"help": "sizes of the model"})
    dtype: str = field(default="float32", metadata={"help": ", ".join(DTYPES)})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    image_size: int = field(default=224, metadata={"help": "height and width of resized images in pixels"})
    batch_sizes: list[int] = field(
        default_factory=lambda: [1, 16], metadata={"help": "batch sizes of the stock pipeline"}
    )
    num_workers: list[int] = field(
        default_factory=lambda: [0, 2], metadata={"help": "additional numbers of threads of our pipeline"}
    )
    max_images: int = field(default=64, metadata={"help": "number of images per measurement"})
    optimize: bool = field(default=False, metadata={"help": "also measure pipeline(..., optimize=True)"})


def images_per_second(run: Callable[[], object], count: int) -> float:
    """Return the number of images per second that a function processes, given that a call processes `count` images."""
    start = perf_counter()
    run()
    return count / (perf_counter() - start)


def read_all(processor: HfViTImageProcessor, files: list[str], threads: int) -> list[Tensor]:
    """Read, decode and resize image files; return one tensor of shape (C, h, w) per file."""
    options = processor.call_options()

    def read(file: str) -> Tensor:
        return processor.to_model_size(processor.read_pixels(file, options), options)[0]

    return list(ReadAhead(files, read, threads, limit=len(files)))


def run_model(pipe: Any, batches: list[Tensor]) -> None:
    """Run the forward pass of a pipeline on batches and wait for the result."""
    with torch.inference_mode():
        for batch in batches:
            pipe.model(batch).logits.cpu()


def measurements(args: Arguments, preset: str, files: list[str]) -> dict[str, Callable[[], object]]:
    """Return the functions to measure, by name."""
    config = HfViTConfig.from_preset(preset, image_size=args.image_size, num_labels=1000)
    model = HfViTForImageClassification(config).to(args.device, DTYPES[args.dtype]).eval()
    processor = HfViTImageProcessor.for_model(config)
    options: dict[str, Any] = {"model": model, "image_processor": processor, "device": args.device}
    stock, ours = ImageClassificationPipeline(**options), pipeline("image-classification", **options)
    runs: dict[str, Callable[[], object]] = {
        **{f"stock, batch {size}": partial(stock, files, batch_size=size) for size in args.batch_sizes},
        "ours": partial(ours, files),
        **{f"ours, {count} threads": partial(ours, files, num_workers=count) for count in args.num_workers},
    }
    if args.optimize:
        fast = pipeline("image-classification", **options, optimize=True)
        print(fast.fast_model.report, flush=True)
        runs["ours, optimized"] = partial(fast, files)
    threads, size = ours.default_counts()
    threads = max(threads, torch.get_num_threads())
    seen, step = read_all(processor, files, threads), processor.call_options()
    batches = [
        processor.finish_batch(seen[start : start + size], step, args.device).pixel_values.to(DTYPES[args.dtype])
        for start in range(0, len(seen), size)
    ]
    runs["reading alone"] = partial(read_all, processor, files, threads)
    runs["forward alone"] = partial(run_model, ours, batches)
    return runs


def main(args: Arguments) -> None:
    """Measure all pipelines and print the table."""
    run = describe_run(args, transformers)
    files = sorted(str(file) for file in Path(args.photos).iterdir())[: args.max_images]
    print_header("preset and dtype", "", "images/s", "ratio to the fastest stock pipeline", "ratio to the bound")
    rows: list[list[Any]] = []
    for preset in args.presets:
        runs = measurements(args, preset, files)
        for warm in runs.values():
            warm()
        rounds = list(
            in_rounds({name: partial(images_per_second, each, len(files)) for name, each in runs.items()}, args.rounds)
        )
        better = max((name for name in runs if name.startswith("stock")), key=lambda name: median_of(rounds, name))
        for found in rounds:
            found["bound"] = 1 / (1 / found["reading alone"] + 1 / found["forward alone"])
        for name in runs:
            ratios = [median_ratio(rounds, name, to=other) for other in (better, "bound")]
            rows.append([f"{preset} {args.dtype}", name, median_of(rounds, name), *ratios])
            print_row(*rows[-1])
    save({**run, "rows": rows}, args.output)
