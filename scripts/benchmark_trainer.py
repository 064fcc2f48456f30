"""Throughput of training through our Trainer beside loops of PyTorch and timm and the library's Trainer.

python scripts/benchmark_trainer.py
python scripts/benchmark_trainer.py --preset small --batch_size 64 --image_size 224 --bf16
python scripts/benchmark_trainer.py --image_size 96 --options '{"progressive_sizes": [48, 64, 96]}'

Ours trains our model, as the bare loop of PyTorch does; timm's loop trains timm's model of the same shape, and the
library's Trainer that of transformers. All see the same images, digits enlarged to the size of the model, through the
same loader. Every round trains all ways for the same number of steps, in turns. The time counts from the first batch,
without start-up (0.3 s with the Trainer). Each ratio is the median over the rounds of the ratio within a round; above
1 means that ours is faster. The gain of options is how many times as fast as without them ours is.

On a machine that others use too, look at the fastest round of each way: what disturbs makes slower, never faster.
With a tiny model, such as --preset mnist --batch_size 2 --steps 500, what is left is what a step takes beside it.
"""

import json
import tempfile
from dataclasses import dataclass, field
from statistics import median

import timm
import torch
import transformers
from benchmarking import describe_device, describe_versions, save
from datasets import Dataset, DatasetDict
from training_loops import WAYS, Stopwatch, with_trainer
from transformers import HfArgumentParser

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, data, training


@dataclass
class Arguments:
    """What to measure."""

    preset: str = field(default="tiny", metadata={"help": "tiny, small, base, large, huge, mnist"})
    config_overrides: str = field(default="{}", metadata={"help": "fields of HfViTConfig that differ, as JSON"})
    image_size: int = field(default=64, metadata={"help": "height and width in pixels"})
    batch_size: int = field(default=32, metadata={"help": "images per step"})
    steps: int = field(default=100, metadata={"help": "steps per measurement"})
    rounds: int = field(default=7, metadata={"help": "timed rounds; each trains all ways"})
    num_workers: int = field(default=0, metadata={"help": "processes that read images"})
    bf16: bool = field(default=False, metadata={"help": "train under autocast in bfloat16"})
    options: list[str] = field(
        default_factory=list, metadata={"help": "arguments of ours to try too, as JSON; several sets one by one"}
    )
    output: str | None = field(default=None, metadata={"help": "write the result as JSON here too"})


def make_trainer(args: Arguments, images: Dataset, folder: str, options: str = "{}") -> training.HfViTTrainer:
    """Returns the trainer that scripts/train_image_classification.py would train with."""
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
    splits, augmentation = DatasetDict(train=images), training.AugmentationArguments()
    return training.make_trainer(model, processor, splits, augmentation, training_args)


def measure(args: Arguments, images: Dataset, way: str) -> float:
    """Returns the seconds of one training in a way, or with ours with options."""
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, images, folder, "{}" if way in WAYS else way)
        WAYS.get(way, with_trainer)(trainer, stopwatch)
    return stopwatch.seconds


def main(args: Arguments) -> None:
    """Measures in turns and prints a line for each way."""
    device = describe_device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{device}; {describe_versions(torch, transformers, timm)}; {args}")
    digits = data.load_digits_dataset(args.image_size)["train"]
    images = digits.select([*range(len(digits))] * -(-args.steps * args.batch_size // len(digits)))
    ways, rounds = [*WAYS, *args.options], []
    for turn in range(args.rounds + 1):  # who goes first changes; the first round warms up
        first = turn % len(ways)
        rounds.append({way: measure(args, images, way) for way in ways[first:] + ways[:first]})
        print(", ".join(f"{way} {args.steps / rounds[-1][way]:.2f} steps/s" for way in ways), flush=True)
    timed = rounds[1:]
    rates = {way: args.steps * args.batch_size / median(seconds[way] for seconds in timed) for way in ways}
    ratios = {way: median(seconds[way] / seconds["hf_vit"] for seconds in timed) for way in WAYS if way != "hf_vit"}
    gains = {way: median(seconds["hf_vit"] / seconds[way] for seconds in timed) for way in args.options}
    fastest = {way: args.steps * args.batch_size / min(seconds[way] for seconds in timed) for way in ways}
    for way, rate in rates.items():
        notes = [f"fastest round {fastest[way]:.1f}"]
        notes += [f"ratio to it {ratios[way]:.3f}"] if way in ratios else []
        notes += [f"gain {gains[way]:.3f}"] if way in gains else []
        print(", ".join([f"{way}: {rate:.1f} images/s", *notes]))
    result = {"images_per_second": rates, "fastest": fastest, "ratios": ratios, "gains": gains}
    save({"device": device, "arguments": vars(args), **result}, args.output)


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
