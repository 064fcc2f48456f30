"""What a training would do, for those who ask before it does."""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch.utils.data import IterableDataset
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from .errors import in_words
from .trainer import HfViTTrainer


# Beside the weights, an optimizer keeps at most so many numbers for each that is trained: AdamW its two averages.
NUMBERS_OF_OPTIMIZER = 2
OUTPUT_FILES = "the model with its processor and code, scores, predictions, pictures, its card and recipe.yaml"


def describe_plan(trainer: HfViTTrainer, recipe: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Returns what a training would do, one idea a line.

    Args:
        trainer: Could start.
        recipe: The arguments that were given or chosen, see `given_arguments`.
        notes: Sentences on what the data lack.
    """
    args, config = trainer.args, trainer.model.config
    _, per_epoch, *_, steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    size = "x".join(map(str, config.image_size)) if isinstance(config.image_size, list | tuple) else config.image_size
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    epochs = "" if is_stream else f" ({steps / per_epoch:.3g} epochs of {per_epoch:,})"
    chosen = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf)
    return "\n".join(
        [
            *([f"Data: {' '.join(notes)}"] if notes else []),
            f"Model: {type(trainer.model).__name__}, {config.num_hidden_layers} layers of width {config.hidden_size}, "
            f"images of {size} pixels.",
            f"Steps: {steps:,}{epochs}, {batch} images each.",
            f"Options: {chosen.strip().strip('{}')}",
            f"Written to {args.output_dir}: {OUTPUT_FILES}.",
            describe_space(trainer, steps, per_epoch),
            "This was a dry run: nothing is written.",
        ]
    )


def describe_space(trainer: HfViTTrainer, steps: int, per_epoch: int) -> str:
    """Returns a sentence on the space that the model and its checkpoints take at most, and what is free."""
    args: TrainingArguments = trainer.args
    sizes = [
        (weights.numel() * weights.element_size(), weights.requires_grad) for weights in trainer.model.parameters()
    ]
    model = sum(size for size, _ in sizes)
    checkpoint = model + NUMBERS_OF_OPTIMIZER * sum(size for size, is_trained in sizes if is_trained)
    if trainer.average is not None:
        model, checkpoint = 2 * model, checkpoint + model
    kept = count_checkpoints(args, steps, per_epoch)
    needed = model + kept * checkpoint
    nearest = next(place for place in [*Path(args.output_dir).absolute().parents] if place.exists())
    free = shutil.disk_usage(nearest).free
    verdict = "" if free > needed else f" Make room for {in_words(needed - free)} more, or set save_total_limit lower."
    many = f" and {kept} of its checkpoints, {in_words(checkpoint)} each" if kept else ""
    return f"Space: about {in_words(needed)} for the model{many}; {in_words(free)} are free.{verdict}"


def count_checkpoints(args: TrainingArguments, steps: int, per_epoch: int) -> int:
    """Returns how many checkpoints are on the disk at the same time, at most."""
    if args.save_strategy == SaveStrategy.NO:
        return 0
    state = TrainerState()
    state.compute_steps(args, steps)
    made = math.ceil(steps / (per_epoch if args.save_strategy == SaveStrategy.EPOCH else state.save_steps))
    # A new one is written before an old one is deleted.
    return made if args.save_total_limit is None else min(made, args.save_total_limit + 1)
