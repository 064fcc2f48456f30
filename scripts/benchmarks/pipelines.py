"""Images per second of our pipeline of image classification, from files to labels, beside the stock one.

Both run the same model and image processor: the stock class one by one and in batches, ours with what it chooses and
with other numbers of threads. Beside them stand its parts: reading (decoding and resizing) alone, on all cores, and
the forward pass alone. 1 / (1 / reading + 1 / forward) is what a CPU can reach that does either with all cores; the
last column is the share of that.
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
    """What to measure."""

    photos: str = field(metadata={"help": "folder of image files"})
    presets: list[str] = field(default_factory=lambda: ["tiny", "small"], metadata={"help": "sizes of the model"})
    dtype: str = field(default="float32", metadata={"help": ", ".join(DTYPES)})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    image_size: int = field(default=224, metadata={"help": "height and width that images are resized to in pixels"})
    batch_sizes: list[int] = field(default_factory=lambda: [1, 16], metadata={"help": "of the stock pipeline"})
    num_workers: list[int] = field(default_factory=lambda: [0, 2], metadata={"help": "further numbers of our threads"})
    max_images: int = field(default=64, metadata={"help": "images of a measurement"})
    optimize: bool = field(default=False, metadata={"help": "measure pipeline(..., optimize=True) too"})


def images_per_second(run: Callable[[], object], count: int) -> float:
    """Runs once."""
    start = perf_counter()
    run()
    return count / (perf_counter() - start)


def read_all(processor: HfViTImageProcessor, files: list[str], threads: int) -> list[Tensor]:
    """Decodes and resizes, (C, h, w) each."""
    options = processor.call_options()

    def read(file: str) -> Tensor:
        return processor.to_model_size(processor.read_pixels(file, options), options)[0]

    return list(ReadAhead(files, read, threads, limit=len(files)))


def run_model(pipe: Any, batches: list[Tensor]) -> None:
    """Runs the forward pass, and waits for its end."""
    with torch.inference_mode():
        for batch in batches:
            pipe.model(batch).logits.cpu()


def measurements(args: Arguments, preset: str, files: list[str]) -> dict[str, Callable[[], object]]:
    """Returns what is measured of a model, by name."""
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
    threads, size = ours.suited_counts()
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
    """Measures and prints."""
    run = describe_run(args, transformers)
    files = sorted(str(file) for file in Path(args.photos).iterdir())[: args.max_images]
    print_header("preset and dtype", "", "images/s", "to the better stock", "share of the bound")
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
