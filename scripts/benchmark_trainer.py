"""Throughput of training through our Trainer beside a bare PyTorch loop with the same model and the same loader.

python scripts/benchmark_trainer.py
python scripts/benchmark_trainer.py --preset small --batch_size 64 --image_size 224 --bf16

Every round trains both ways for the same number of steps, in turns, on digits enlarged to the size of the model. The
time counts from the first batch, without start-up (0.3 s with the Trainer). The ratio is the median over the rounds of
the ratio within a round; above 1 means that ours is faster.
"""

import tempfile
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import transformers
from benchmarking import describe_device, describe_versions, save
from datasets import DatasetDict
from torch.utils.data import DataLoader
from transformers import HfArgumentParser, TrainerCallback, get_cosine_schedule_with_warmup

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, data, training


@dataclass
class Arguments:
    """What to measure."""

    preset: str = field(default="tiny", metadata={"help": "tiny, small, base, large, huge, mnist"})
    image_size: int = field(default=64, metadata={"help": "height and width in pixels"})
    batch_size: int = field(default=32, metadata={"help": "images per step"})
    steps: int = field(default=100, metadata={"help": "steps per measurement"})
    rounds: int = field(default=7, metadata={"help": "timed rounds; each trains both ways"})
    num_workers: int = field(default=0, metadata={"help": "processes that read images"})
    bf16: bool = field(default=False, metadata={"help": "train under autocast in bfloat16"})
    output: str | None = field(default=None, metadata={"help": "write the result as JSON here too"})


def make_trainer(args: Arguments, folder: str) -> training.HfViTTrainer:
    """Returns the trainer that scripts/train_image_classification.py would train with."""
    torch.manual_seed(0)
    config = HfViTConfig.from_preset(args.preset, image_size=args.image_size, num_labels=10)
    digits = data.load_digits_dataset(args.image_size)
    copies = -(-args.steps * args.batch_size // len(digits["train"]))
    images = digits["train"].select([*range(len(digits["train"]))] * copies)
    training_args = training.HfViTTrainingArguments(
        output_dir=folder,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        dataloader_num_workers=args.num_workers,
        bf16=args.bf16,
        save_strategy="no",
        log_level="error",
    )
    model, processor = HfViTForImageClassification(config), HfViTImageProcessor.for_model(config)
    splits, augmentation = DatasetDict(train=images), training.AugmentationArguments()
    return training.make_trainer(model, processor, splits, augmentation, training_args)


class Stopwatch(TrainerCallback):
    """Counts the seconds from the first batch to the end of a training."""

    start: float | None = None
    seconds = 0.0

    def on_step_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
        """Starts once."""
        if self.start is None:
            self.start = time.perf_counter()

    def on_train_end(self, args: Any, *_: Any, **kwargs: Any) -> None:
        """Stops when all work is done."""
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - (self.start or 0.0)


def train_bare(trainer: training.HfViTTrainer, stopwatch: Stopwatch) -> None:
    """Trains the same model on the same examples with the same optimizer, by hand."""
    args, model = trainer.args, trainer.model.to(trainer.args.device).train()
    how = {"collate_fn": trainer.data_collator, "num_workers": args.dataloader_num_workers}
    how |= {"pin_memory": args.dataloader_pin_memory}
    loader = DataLoader(trainer.train_dataset, args.train_batch_size, shuffle=True, drop_last=True, **how)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.max_steps // 10, args.max_steps)
    for _, batch in zip(range(args.max_steps), loader, strict=False):
        stopwatch.on_step_begin(args)
        batch = {name: value.to(args.device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    stopwatch.on_train_end(args)


def measure(args: Arguments, way: str, folder: str) -> float:
    """Returns the seconds of one training."""
    trainer, stopwatch = make_trainer(args, folder), Stopwatch()
    if way == "hf_vit":
        trainer.add_callback(stopwatch)
        trainer.train()
    else:
        train_bare(trainer, stopwatch)
    return stopwatch.seconds


def main(args: Arguments) -> None:
    """Measures in turns and prints the ratio."""
    device = describe_device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{device}; {describe_versions(torch, transformers)}; {args}")
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds + 1):  # who goes first changes; the first round warms up
            ways = ["hf_vit", "bare loop"][:: 1 if turn % 2 else -1]
            rounds.append({way: measure(args, way, folder) for way in ways})
            print(", ".join(f"{way} {args.steps / rounds[-1][way]:.2f} steps/s" for way in sorted(ways)))
    timed = rounds[1:]
    ratio = median(seconds["bare loop"] / seconds["hf_vit"] for seconds in timed)
    rates = {way: args.steps * args.batch_size / median(seconds[way] for seconds in timed) for way in timed[0]}
    print(", ".join(f"{way} {rate:.1f} images/s" for way, rate in sorted(rates.items())) + f"; ratio {ratio:.3f}")
    save({"device": device, "arguments": vars(args), "images_per_second": rates, "ratio": ratio}, args.output)


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
