"""Compare the training throughput of `HfViTTrainer` with PyTorch and timm loops and the transformers Trainer.

`HfViTTrainer` and the PyTorch loop train our model, the timm loop trains a timm model, and the transformers Trainer
trains a transformers model, all of the same shape. All use the same images (digits enlarged to the input size of the
model), the same data loader and the same number of steps. Time is measured from the first batch and excludes start-up
(0.3 s with the Trainer). A ratio above 1 means that `HfViTTrainer` is faster. With --options, such as --options
'{"progressive_sizes": [48, 64, 96]}', the gain is the speed with these options relative to that without them.

On a shared machine, compare the fastest rounds, because other load can only slow a round down. With a tiny model, such
as --preset mnist --batch_size 2 --steps 500, the overhead of a step dominates.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
import transformers
from datasets import Dataset, DatasetDict
from timm.optim._optim_factory import create_optimizer_v2
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, get_cosine_schedule_with_warmup

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, data, runs, training
from hf_vit.tasks.common.arguments import ClassificationArguments
from hf_vit.training import HfViTTrainer

from .classification import MAKE_MODEL
from .harness import RoundArguments, describe_run, in_rounds, median_of, median_ratio, print_header, print_row, save


@dataclass(kw_only=True)
class Arguments(RoundArguments):
    """Options of the benchmark."""

    preset: str = field(default="tiny", metadata={"help": "tiny, small, base, large, huge, mnist"})
    config_overrides: str = field(
        default="{}", metadata={"help": "fields of HfViTConfig that differ from the preset, as JSON"}
    )
    image_size: int = field(default=64, metadata={"help": "height and width in pixels"})
    batch_size: int = field(default=32, metadata={"help": "images per step"})
    steps: int = field(default=100, metadata={"help": "steps per measurement"})
    num_workers: int = field(default=0, metadata={"help": "worker processes that read images"})
    bf16: bool = field(default=False, metadata={"help": "train with autocast in bfloat16"})
    options: list[str] = field(
        default_factory=list, metadata={"help": "training arguments to measure in addition, as JSON objects"}
    )


def make_trainer(args: Arguments, images: Dataset, folder: str, options: str = "{}") -> training.HfViTTrainer:
    """Return the trainer of `hf-vit train image-classification`."""
    torch.manual_seed(0)
    overrides = {**json.loads(args.config_overrides), "image_size": args.image_size, "num_labels": 10}
    config = HfViTConfig.from_preset(args.preset, **overrides)
    training_args = training.HfViTTrainingArguments(
        output_dir=folder,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        dataloader_num_workers=args.num_workers,
        bf16=args.bf16,
        save_strategy="no",
        log_level="error",
        **json.loads(options),
    )
    model, processor = HfViTForImageClassification(config), HfViTImageProcessor.for_model(config)
    splits = DatasetDict(train=images)
    return runs.make_trainer(model, processor, splits, ClassificationArguments("data"), training_args)


class Stopwatch(TrainerCallback):
    """Measures the seconds from the first batch to the end of training."""

    start: float | None = None
    seconds = 0.0

    def on_step_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
        """Start the stopwatch at the first step."""
        if self.start is None:
            self.start = time.perf_counter()

    def on_train_end(self, args: Any, *_: Any, **kwargs: Any) -> None:
        """Stop the stopwatch when all GPU work is finished."""
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - (self.start or 0.0)


def with_trainer(trainer: HfViTTrainer, stopwatch: Stopwatch) -> None:
    """Train with `HfViTTrainer`."""
    trainer.add_callback(stopwatch)
    trainer.train()


def with_library(trainer: HfViTTrainer, stopwatch: Stopwatch) -> None:
    """Train a transformers model with the transformers Trainer."""
    how = {"train_dataset": trainer.train_dataset, "data_collator": trainer.data_collator}
    Trainer(MAKE_MODEL["transformers"](trainer.model.config), trainer.args, callbacks=[stopwatch], **how).train()


def with_loop(trainer: HfViTTrainer, stopwatch: Stopwatch) -> None:
    """Train our model in a PyTorch loop."""
    args, model = trainer.args, trainer.model
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.max_steps // 10, args.max_steps)
    loop(trainer, stopwatch, model, lambda batch: model(**batch).loss, optimizer, lambda step: schedule.step())


def with_timm(trainer: HfViTTrainer, stopwatch: Stopwatch) -> None:
    """Train a timm model with the optimizer and schedule of timm."""
    args, model = trainer.args, MAKE_MODEL["timm"](trainer.model.config).to(trainer.args.device)
    optimizer = create_optimizer_v2(model, "adamw", args.learning_rate, args.weight_decay, fused=True)
    schedule = CosineLRScheduler(optimizer, args.max_steps, warmup_t=args.max_steps // 10, t_in_epochs=False)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    loop(trainer, stopwatch, model, loss_of, optimizer, schedule.step_update)


def loop(
    trainer: HfViTTrainer,
    stopwatch: Stopwatch,
    model: nn.Module,
    loss_of: Callable[[dict[str, Tensor]], Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: Callable[[int], None],
) -> None:
    """Train a model in a PyTorch loop on the data of a trainer."""
    args = trainer.args
    how = {"collate_fn": trainer.data_collator, "num_workers": args.dataloader_num_workers}
    how |= {"pin_memory": args.dataloader_pin_memory}
    loader = DataLoader(trainer.train_dataset, args.train_batch_size, shuffle=True, drop_last=True, **how)
    model.train()
    for step, batch in zip(range(args.max_steps), loader, strict=False):
        stopwatch.on_step_begin(args)
        batch = {name: value.to(args.device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
            loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule(step + 1)
        optimizer.zero_grad()
    stopwatch.on_train_end(args)


WAYS = {"hf_vit": with_trainer, "bare loop": with_loop, "timm": with_timm, "transformers": with_library}


def measure(args: Arguments, images: Dataset, way: str) -> float:
    """Return the seconds that a loop, or `HfViTTrainer` with options, takes for a training run."""
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, images, folder, "{}" if way in WAYS else way)
        WAYS.get(way, with_trainer)(trainer, stopwatch)
    return stopwatch.seconds


def main(args: Arguments) -> None:
    """Measure and print a row for each loop."""
    run = describe_run(args, transformers, timm)
    digits = data.load_digits_dataset(args.image_size)["train"]
    images = digits.select([*range(len(digits))] * -(-args.steps * args.batch_size // len(digits)))
    ways, rounds = [*WAYS, *args.options], []
    for seconds in in_rounds({way: partial(measure, args, images, way) for way in ways}, args.rounds + 1):
        print(", ".join(f"{way} {args.steps / seconds[way]:.2f} steps/s" for way in ways), flush=True)
        rounds.append(seconds)
    timed, count = rounds[1:], args.steps * args.batch_size  # The first round is a warm-up.
    rates = {way: count / median_of(timed, way) for way in ways}
    fastest = {way: count / min(seconds[way] for seconds in timed) for way in ways}
    ratios = {way: median_ratio(timed, way, to="hf_vit") for way in WAYS if way != "hf_vit"}
    gains = {way: median_ratio(timed, "hf_vit", to=way) for way in args.options}
    print_header("loop", "images/s", "fastest round", "ratio of ours", "gain")
    for way in ways:
        print_row(way, rates[way], fastest[way], ratios.get(way, ""), gains.get(way, ""))
    result = {"images_per_second": rates, "fastest": fastest, "ratios": ratios, "gains": gains}
    save({**run, **result}, args.output)
