"""Options of optimizer and schedule beside those of the library."""

import math
from dataclasses import dataclass

from transformers import SchedulerType, TrainingArguments
from transformers.training_args import OptimizerNames

from ...data.formats.files import split_names
from ...options.field import NOT_NEGATIVE, POSITIVE, SHARE, option


ADAMW = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)
SCHEDULE_FREE = (
    OptimizerNames.SCHEDULE_FREE_ADAMW,
    OptimizerNames.SCHEDULE_FREE_RADAM,
    OptimizerNames.SCHEDULE_FREE_SGD,
)


@dataclass
class OptimizationArguments:
    """Options of optimizer, learning rates and frozen parts."""

    layer_decay: float = option(
        default=1.0,
        help="Factor on the learning rate from each layer to the one before it, as in BEiT: heads, blocks, "
        "embeddings. 0.65 to 0.9 for a model that has learned before.",
        range=SHARE,
        group="Optimizer and frozen parts",
        resume="fixed",
    )
    head_lr_multiplier: float = option(
        default=1.0,
        help="Factor on the learning rate of heads.",
        range=POSITIVE,
        group="Optimizer and frozen parts",
        resume="fixed",
    )
    freeze: str | None = option(
        default=None,
        help="Parts that keep their weights, separated by commas: model.embeddings,model.encoder.layers.0.",
        group="Optimizer and frozen parts",
        resume="fixed",
    )
    trainable_blocks: int | None = option(
        default=None,
        help="Train only the last blocks, so many, and the heads; 0 trains the heads alone.",
        range=NOT_NEGATIVE,
        group="Optimizer and frozen parts",
        resume="fixed",
    )
    use_muon: bool = option(
        default=False,
        help="Matrices of blocks learn by Muon, and only the others by AdamW.",
        group="Optimizer and frozen parts",
        resume="fixed",
    )
    decay_steps: float = option(
        default=0.2,
        help="Last steps, in which --lr_scheduler_type warmup_stable_decay falls to zero; a share if below 1.",
        range=NOT_NEGATIVE,
        group="Optimizer and frozen parts",
    )

    def frozen_prefixes(self) -> list[str]:
        """Returns the names in `freeze`."""
        return [name for name in split_names(self.freeze) if name]

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
        rows = {
            "matrices of blocks": "Muon" if self.use_muon else None,
            "learning rate from layer to layer": f"x {self.layer_decay:g}" if self.layer_decay != 1 else None,
            "learning rate of heads": f"x {self.head_lr_multiplier:g}" if self.head_lr_multiplier != 1 else None,
            "frozen": ", ".join(self.frozen_prefixes()) or None,
            "blocks that learn": None if self.trainable_blocks is None else f"the last {self.trainable_blocks}",
        }
        return {name: value for name, value in rows.items() if value is not None}


def optimization_of(args: TrainingArguments) -> OptimizationArguments:
    """Returns the arguments of a training if they have these options, or the defaults."""
    return args if isinstance(args, OptimizationArguments) else OptimizationArguments()


def check_optimization(args: TrainingArguments) -> None:
    """Raises `ValueError` if a value is out of range or does not go with the library's arguments."""
    options = optimization_of(args)
    if not 0 < options.layer_decay <= 1:
        raise ValueError(f"layer_decay={options.layer_decay} must lie in (0, 1]. 0.75 is common; 1 leaves it out.")
    if not 0 < options.head_lr_multiplier < math.inf:
        raise ValueError(f"head_lr_multiplier={options.head_lr_multiplier} must be positive. 1 leaves it out.")
    if options.trainable_blocks is not None and options.trainable_blocks < 0:
        raise ValueError(f"trainable_blocks={options.trainable_blocks} must be 0, for heads alone, or more.")
    if not 0 <= options.decay_steps < math.inf:
        raise ValueError(f"decay_steps={options.decay_steps} must be a share below 1, or a number of steps.")
    if options.use_muon and args.optim not in ADAMW:
        raise ValueError(f"use_muon=True goes with AdamW, not with optim={args.optim.value}. Leave one of them out.")
    if args.optim in SCHEDULE_FREE and args.lr_scheduler_type != SchedulerType.CONSTANT:
        raise ValueError(
            f"optim={args.optim.value} needs no schedule and does its own warm-up, but lr_scheduler_type="
            f"{SchedulerType(args.lr_scheduler_type).value}. Say --lr_scheduler_type constant."
        )
