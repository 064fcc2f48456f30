"""Checks of a training before its first step: that it will not fail, and can choose its best model."""

from collections.abc import Collection

from torch import nn
from transformers import (
    EarlyStoppingCallback,
    SchedulerType,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from .arguments import HfViTTrainingArguments


def check_optimizer(args: TrainingArguments) -> None:
    """Raises `ValueError` or `ImportError` if optimizer or schedule cannot be made, by making those of a layer."""
    layer, options = nn.Linear(1, 1), dict(args.lr_scheduler_kwargs or {})
    if args.optim_target_modules is not None:
        return  # which are of the model
    try:
        optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args, layer)
        optimizer = optimizer_class(layer.parameters(), **settings)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"There is no optimizer optim={args.optim.value} with optim_args={args.optim_args!r}: {error}. Write "
            "options like momentum=0.9,nesterov=True."
        ) from error
    if args.lr_scheduler_type == SchedulerType.WARMUP_STABLE_DECAY:
        options = {"num_decay_steps": 1, **options}
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, 0, 2, options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"There is no schedule lr_scheduler_type={args.lr_scheduler_type.value} with lr_scheduler_kwargs="
            f"{args.lr_scheduler_kwargs} at learning_rate={args.learning_rate:g}: {error}."
        ) from error


def check_training(
    args: HfViTTrainingArguments, num_images: int, has_validation: bool, scores: Collection[str]
) -> list[TrainerCallback]:
    """Checks that a training can start, or raises `ValueError`; returns the callback that stops early, if it shall.

    Without validation images it sets `args.eval_strategy` to "no". `scores` are the names that an evaluation gives.
    """
    batch_size = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and num_images < batch_size:
        raise ValueError(
            f"{num_images} training images do not fill a batch of {batch_size}. Set "
            "--per_device_train_batch_size lower."
        )
    is_best_wanted = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
    # The Trainer looks it up at every evaluation, whether the best model is wanted or not.
    is_looked_up = is_best_wanted or (has_validation and args.eval_strategy != IntervalStrategy.NO)
    if args.ema_decay is not None:
        scores = {*scores, *(f"ema_{name}" for name in scores)}
    metric = args.metric_for_best_model and args.metric_for_best_model.removeprefix("eval_")
    if is_looked_up and metric and metric not in scores:
        raise ValueError(
            f"There is no score {metric!r} to choose the best model by. Choose {', '.join(sorted(scores))}."
        )
    if not has_validation:
        if is_best_wanted:
            raise ValueError(
                "Early stopping and the choice of the best model need validation images. Set --train_val_split 0.1."
            )
        args.eval_strategy = IntervalStrategy.NO
    patience = args.early_stopping_patience
    return [] if patience is None else [EarlyStoppingCallback(patience)]


def check_steps(args: HfViTTrainingArguments) -> None:
    """Raises `ValueError` if anything counts epochs: their only end is that of the training."""
    is_missing = {
        "--max_steps": args.max_steps < 1,
        "--save_strategy steps": args.save_strategy == SaveStrategy.EPOCH,
        "--eval_strategy steps": args.eval_strategy == IntervalStrategy.EPOCH,
    }
    if missing := [option for option, missing in is_missing.items() if missing]:
        raise ValueError(
            "A stream does not say how many images it has, and so no epochs, but "
            f"max_steps={args.max_steps}, save_strategy={SaveStrategy(args.save_strategy).value!r}, "
            f"eval_strategy={IntervalStrategy(args.eval_strategy).value!r}. Give {', '.join(missing)}."
        )
