"""Options of training runs of all tasks, in addition to those of the library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from transformers import SchedulerType, TrainingArguments
from transformers.training_args import OptimizerNames

from ..options.field import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_LEFT_OUT,
    Names,
    Range,
    augmentation_option,
    option,
)


MINUTES = Range(0.01)
ADAMW = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)
SCHEDULE_FREE = (
    OptimizerNames.SCHEDULE_FREE_ADAMW,
    OptimizerNames.SCHEDULE_FREE_RADAM,
    OptimizerNames.SCHEDULE_FREE_SGD,
)
# The linear layers of attention and MLP in every tower of this package, plain and gated.
LORA_TARGETS = (
    *("attention.qkv", "attention.projection"),
    *("mlp.fc1", "mlp.fc2", "mlp.gate", "mlp.up", "mlp.down"),
)


optimizer_option = partial(option, group="Optimizer and frozen parts")
lora_option = partial(option, group="LoRA")


@dataclass
class TrainingOptions:
    """Our options of training runs of all tasks."""

    minutes: float | None = option(
        None,
        "Time for all of it, report included: a few steps are timed, then size of model and images, batch "
        "and steps chosen to fit. 10 by default without a GPU, where neither steps, epochs nor a size is given.",
        MINUTES,
        group="Training",
        essential=True,
        synonyms="time time_budget max_time",
        resume="free",
    )
    choose_defaults: bool | None = option(
        None,
        "Choose what is not given by data and device; false takes the defaults listed here. True by "
        "default, but for a recipe, which stands as it is.",
        group="Training",
        resume="free",
    )
    resume_with_changes: bool = option(
        False,
        "Resume on other images or with other arguments than the training was started with; the card then "
        "tells from which step on.",
        group="Output",
        resume="free",
        private=True,
    )

    # Optimizer, learning rates and frozen parts
    layer_decay: float = optimizer_option(
        1.0,
        "Factor on the learning rate from each layer to the one before it, as in BEiT: heads, blocks, "
        "embeddings. 0.65 to 0.9 for a model that has learned before.",
        SHARE,
        resume="fixed",
    )
    head_lr_multiplier: float = optimizer_option(
        1.0, "Factor on the learning rate of heads.", POSITIVE, resume="fixed"
    )
    freeze: Names | None = optimizer_option(
        None,
        "Parts that keep their weights, separated by commas: model.embeddings,model.encoder.layers.0.",
        resume="fixed",
    )
    trainable_blocks: int | None = optimizer_option(
        None,
        "Train only the last blocks, so many, and the heads; 0 trains the heads alone.",
        NOT_NEGATIVE,
        resume="fixed",
    )
    use_muon: bool = optimizer_option(
        False, "Matrices of blocks learn by Muon, and only the others by AdamW.", resume="fixed"
    )
    decay_steps: float = optimizer_option(
        0.2,
        "Last steps, in which --lr_scheduler_type warmup_stable_decay falls to zero; a share if below 1.",
        NOT_NEGATIVE,
    )
    ema_decay: float | None = option(
        None,
        "Also keep, score and save an exponential moving average of the weights, of about the last "
        "1 / (1 - decay) steps: 0.9999 for long trainings, 0.99 for a few hundred steps.",
        Range(0, 1, is_open_below=True, is_open_above=True),
        group="Averaged weights",
        synonyms="ema model_ema model_ema_decay",
    )

    # Images of a step
    repeated_augmentations: int = augmentation_option(
        1,
        "How many augmentations of an image each step learns from (DeiT III: 3). An epoch keeps its "
        "length, with fewer images.",
        COUNT,
    )
    progressive_sizes: list[int] | None = option(
        None,
        "Heights in pixels that training images have over equal shares of the steps, the last one that of "
        "image_size: 16 24 32. Small images train several times as fast.",
        COUNT,
        group="Sizes of training images",
    )
    multi_scale_sizes: list[int] | None = option(
        None,
        "Heights in pixels of which one is drawn for every training batch: 24 32 40. Larger ones than "
        "image_size enlarge the images.",
        COUNT,
        group="Sizes of training images",
    )

    # Low-rank adaptation (https://arxiv.org/abs/2106.09685)
    lora_rank: int | None = lora_option(
        None,
        "Rank of the changes that the linear layers of attention and MLP learn, the head aside, which "
        "learns in full; 8 is usual. By default all weights are trained.",
        COUNT,
        resume="fixed",
    )
    lora_alpha: int | None = lora_option(None, "Changes count alpha / rank times; twice the rank by default.", COUNT)
    lora_dropout: float = lora_option(0.0, "Dropout rate of what the changes see.", SHARE_LEFT_OUT)
    lora_target_modules: list[str] = lora_option(
        list(LORA_TARGETS), "How the names of the linear layers end that learn them.", resume="fixed"
    )

    def frozen_prefixes(self) -> list[str]:
        """Returns the names in `freeze`."""
        return [name for name in self.freeze or () if name]

    def count_decay_steps(self, num_training_steps: int, num_warmup_steps: int) -> int:
        """Returns the number of last steps in which the learning rate falls, which the warm-up must not meet."""
        share = self.decay_steps if self.decay_steps >= 1 else math.ceil(num_training_steps * self.decay_steps)
        if share + num_warmup_steps > num_training_steps:
            raise ValueError(
                f"{num_warmup_steps} steps of warm-up and decay_steps={self.decay_steps} are more than the "
                f"{num_training_steps} steps of the training. Make one of them shorter."
            )
        return int(share)

    def describe(self) -> dict[str, str]:
        """Returns the rows of a card: what differs from a plain training."""
        heights = ", ".join(map(str, self.progressive_sizes or self.multi_scale_sizes or ()))
        change = "for equal shares of the steps" if self.progressive_sizes else "one drawn for each batch"
        rows = {
            "matrices of blocks": "Muon" if self.use_muon else None,
            "learning rate from layer to layer": f"x {self.layer_decay:g}" if self.layer_decay != 1 else None,
            "learning rate of heads": f"x {self.head_lr_multiplier:g}" if self.head_lr_multiplier != 1 else None,
            "frozen": ", ".join(self.frozen_prefixes()) or None,
            "blocks that learn": None if self.trainable_blocks is None else f"the last {self.trainable_blocks}",
            "average of the weights": None
            if self.ema_decay is None
            else f"exponential, decay {self.ema_decay}, in `ema/`",
            "image heights": f"{heights} pixels, {change}" if heights else None,
        }
        return {name: value for name, value in rows.items() if value is not None}


def training_options_of(args: object) -> TrainingOptions:
    """Returns the arguments of a training run if they have these options, or the defaults."""
    return args if isinstance(args, TrainingOptions) else TrainingOptions()


def check_optimization(args: TrainingArguments) -> None:
    """Raises `ValueError` if options of the optimizer do not go with the library's arguments."""
    options = training_options_of(args)
    if options.use_muon and args.optim not in ADAMW:
        raise ValueError(f"use_muon=True goes with AdamW, not with optim={args.optim.value}. Leave one of them out.")
    if args.optim in SCHEDULE_FREE and args.lr_scheduler_type != SchedulerType.CONSTANT:
        raise ValueError(
            f"optim={args.optim.value} needs no schedule and does its own warm-up, but lr_scheduler_type="
            f"{SchedulerType(args.lr_scheduler_type).value}. Say --lr_scheduler_type constant."
        )


def parse_changes(changes: Sequence[str] | None) -> dict[int, int]:
    """Returns all steps of a training from some step on, by that step.

    Args:
        changes: Like "143:812", by which a training has 812 steps from its 143rd on.

    Raises:
        ValueError: if one is something else.
    """
    found = dict[int, int]()
    for change in changes or ():
        step, _, length = change.partition(":")
        if not (step.isdecimal() and length.isdecimal() and 0 < int(step) < int(length)):
            raise ValueError(f"length_changes={change!r} must be like 143:812: a step, and the steps from it on.")
        found[int(step)] = int(length)
    return found
