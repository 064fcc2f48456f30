"""Training arguments with options and defaults for Vision Transformers, and checks of their values."""

import json
import math
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    EarlyStoppingCallback,
    SchedulerType,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations import is_tensorboard_available
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames
from transformers.utils import is_torch_xla_available

from ..data.reading.files import split_names
from ..evaluation.base import LOWER_IS_BETTER
from ..extras import check_packages
from .field import (
    CHANGES_IMAGES,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_LEFT_OUT,
    Names,
    Range,
    augmentation_option,
    evaluation_option,
    option,
)
from .resolve import check_conflicts, convert_all


MAX_WORKERS = 8  # default limit of worker processes
MINUTES = Range(0.01)
ADAMW = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)
# Names of the linear layers of attention and of plain and gated MLPs in all models of this package
LORA_TARGETS = (*("attention.qkv", "attention.projection"), *("mlp.fc1", "mlp.fc2", "mlp.gate", "mlp.up", "mlp.down"))


training_option = partial(option, group="Training")
output_option = partial(option, group="Output")
sizes_option = partial(option, group="Sizes of training images")
optimizer_option = partial(option, group="Optimizer and frozen parts")
lora_option = partial(option, group="LoRA")
# Fields of `TrainingArguments` that are mappings, given as JSON text or, for FILES, as the path of a JSON file
FILES = ("accelerator_config", "deepspeed", "fsdp_config")
MAPPINGS = (
    *FILES,
    *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
    *("liger_kernel_config", "lr_scheduler_kwargs"),
)


@dataclass
class HfViTTrainingArguments(TrainingArguments):
    """Training arguments with options and defaults for Vision Transformers."""

    minutes: float | None = training_option(
        None,
        "Time budget in minutes, including the report; model size, image size and number of steps are chosen to fit. "
        "10 by default without a GPU.",
        MINUTES,
        essential=True,
        synonyms="time time_budget max_time",
        resume="free",
    )
    choose_defaults: bool | None = training_option(
        None,
        "Choose the options that are not given, depending on data and device; false uses the defaults listed here. "
        "True by default, except for recipes.",
        resume="free",
    )
    resume_with_changes: bool = output_option(
        False,
        "Resume although images or arguments have changed; the model card states the step of the change.",
        resume="free",
        private=True,
    )

    # Options for optimizer, learning rates and frozen parts
    layer_decay: float = optimizer_option(
        1.0,
        "Factor by which the learning rate decreases per layer, from the heads through the blocks to the embeddings, "
        "as in BEiT. Common values for a pretrained model are 0.65 to 0.9.",
        SHARE,
        resume="fixed",
    )
    head_lr_multiplier: float = optimizer_option(
        1.0, "Factor that multiplies the learning rate of heads.", POSITIVE, resume="fixed"
    )
    freeze: Names | None = optimizer_option(
        None,
        "Parameters to freeze, as name prefixes separated by commas, such as model.embeddings,model.encoder.layers.0.",
        resume="fixed",
    )
    trainable_blocks: int | None = optimizer_option(
        None,
        "Number of last blocks to train in addition to the heads; 0 trains only the heads.",
        NOT_NEGATIVE,
        resume="fixed",
    )
    cached_views: int = optimizer_option(
        0,
        "Store features of frozen blocks for this number of random views of each training image, and train on "
        "them, one view per epoch; 0 stores none.",
        NOT_NEGATIVE,
    )
    cache_dtype: Literal["float32", "float16"] = optimizer_option("float32", "Data type of stored features.")
    cache_gigabytes: float = optimizer_option(
        20.0, "Maximum size of stored features in GB; larger features raise an error.", POSITIVE, resume="free"
    )
    use_muon: bool = optimizer_option(
        False, "Train matrices of blocks with Muon, and other weights with AdamW.", resume="fixed"
    )
    decay_steps: float = optimizer_option(
        0.2,
        "Number of steps, at the end of training, in which the learning rate falls to zero with --lr_scheduler_type "
        "warmup_stable_decay; a value below 1 is a share of all steps.",
        NOT_NEGATIVE,
    )
    ema_decay: float | None = option(
        None,
        "Also train, evaluate and save an exponential moving average (EMA) of the weights over about the last 1 "
        "/ (1 - decay) steps: 0.9999 for long runs, 0.99 for a few hundred steps.",
        Range(0, 1, is_open_below=True, is_open_above=True),
        group="Averaged weights",
        synonyms="ema model_ema model_ema_decay",
    )

    # Options for the composition of batches
    repeated_augmentations: int = augmentation_option(
        1,
        "Number of augmentations of each image per step (DeiT III: 3). The number of steps per epoch does not "
        "change, so an epoch has fewer images.",
        COUNT,
        conflicts={"cached_views": "a step needs several views of each image"},
    )
    progressive_sizes: list[int] | None = sizes_option(
        None,
        "Heights in pixels of training images, such as 16 24 32, each for an equal share of the steps. The last "
        "height must equal that of image_size. Training steps with small images are several times as fast.",
        COUNT,
        conflicts=CHANGES_IMAGES,
    )

    # Low-rank adaptation (https://arxiv.org/abs/2106.09685)
    lora_rank: int | None = lora_option(
        None,
        "Rank of the LoRA updates of attention and MLP layers; the head is trained in full. 8 is usual. By "
        "default, all weights are trained.",
        COUNT,
        resume="fixed",
    )
    lora_alpha: int | None = lora_option(
        None, "Value alpha in the scale alpha / rank of the LoRA updates; twice the rank by default.", COUNT
    )
    lora_dropout: float = lora_option(0.0, "Dropout rate of the inputs of LoRA updates.", SHARE_LEFT_OUT)
    lora_target_modules: list[str] = lora_option(
        list(LORA_TARGETS),
        "Name endings of the linear layers with LoRA updates. Query, key and value are one layer, attention.qkv.",
        resume="fixed",
    )

    # Defaults for Vision Transformers. Values in tasks/common/defaults.yaml replace them, depending on task and data.
    learning_rate: float = training_option(
        1e-3, brief="Maximum learning rate.", range=POSITIVE, essential=True, synonyms="lr lr0 base_lr"
    )
    weight_decay: float = option(0.05, range=NOT_NEGATIVE, synonyms="wd")
    warmup_steps: float = option(0.1, range=NOT_NEGATIVE, synonyms="warmup warmup_epochs warmup_ratio")
    lr_scheduler_type: SchedulerType | str = option("cosine", synonyms="sched scheduler lr_scheduler")
    per_device_train_batch_size: int = training_option(
        64,
        brief="Training batch size per process.",
        range=COUNT,
        essential=True,
        synonyms="batch_size batch bs train_batch_size",
        resume="free",
    )
    per_device_eval_batch_size: int = evaluation_option(
        64,
        brief="Evaluation batch size per process.",
        range=COUNT,
        synonyms="eval_batch_size batch_size validation_batch_size",
        resume="free",
    )
    eval_strategy: IntervalStrategy | str = "epoch"
    save_strategy: SaveStrategy | str = "epoch"
    save_total_limit: int | None = option(2, range=NOT_NEGATIVE, resume="free")
    logging_steps: float = option(0.01, range=POSITIVE, resume="free")
    metric_for_best_model: str | None = training_option(
        "accuracy", "Name of the evaluation score that selects the best model."
    )
    early_stopping_patience: int | None = training_option(
        None,
        "Stop after this many evaluations without a better score, and keep the best model.",
        COUNT,
        essential=True,
        synonyms="patience",
    )
    resume_from_checkpoint: str | None = output_option(
        None,
        'Checkpoint to resume from: its folder, or "last" for the newest checkpoint in output_dir.',
        essential=True,
        synonyms="resume",
        resume="free",
        private=True,
    )
    dry_run: bool = output_option(
        False,
        "Check data, model and options, print the plan, and write nothing.",
        essential=True,
        resume="free",
        private=True,
    )
    recorded_schedule: str | None = option(
        None,
        "File schedule.json of a run with a time budget, whose steps and learning rates are repeated; a path in a "
        "recipe is relative to the recipe.",
        resume="free",
    )
    # After a resume, early stopping and the measurement of the wall time continue from their saved states.
    restore_callback_states_from_checkpoint: bool = True
    # An incomplete last batch would give its images more weight, depending on the number of processes.
    dataloader_drop_last: bool = True
    dataloader_pin_memory: bool = torch.cuda.is_available()
    dataloader_num_workers: int | None = option(
        None,
        "Number of worker processes per training process that read images. By default, with a GPU, the number of "
        "CPU cores, at most 8; without a GPU, 0, because the model uses all cores.",
        NOT_NEGATIVE,
        synonyms="workers num_workers",
        resume="free",
    )
    # Worker processes, if any, persist between epochs.
    dataloader_persistent_workers: bool = True
    remove_unused_columns: bool = False
    report_to: Names | str = "tensorboard" if is_tensorboard_available() else "none"
    fsdp: bool | None = field(default=None, metadata={"const": True})
    optim_target_modules: list[str] | str | None = None

    def __post_init__(self) -> None:
        convert_all(self)
        if isinstance(self.report_to, str):
            self.report_to = Names(split_names(self.report_to))
        check_library(self)
        # On a CPU, transformers allows bfloat16 and several processes only on request.
        if not torch.accelerator.is_available() and not is_torch_xla_available():
            self.use_cpu = True
        name = str(self.metric_for_best_model).removeprefix("eval_").removeprefix("ema_")
        if name in LOWER_IS_BETTER and vars(self)["greater_is_better"] is None:
            self.greater_is_better = False
        if self.early_stopping_patience is not None:
            self.load_best_model_at_end = True  # after early stopping, the last weights are worse than the best ones
        if self.dataloader_num_workers is None:
            has_gpu = torch.cuda.is_available() and not self.use_cpu
            self.dataloader_num_workers = min(MAX_WORKERS, usable_cores()) if has_gpu else 0
        if self.dataloader_num_workers == 0:
            self.dataloader_persistent_workers = False  # torch allows this option only with workers
        if isinstance(self.optim_target_modules, list) and len(self.optim_target_modules) == 1:
            self.optim_target_modules = self.optim_target_modules[0]  # a single value may be a pattern or "all-linear"
        try:
            super().__post_init__()
        except TypeError as error:  # raised if a mapping contains an unknown name
            raise ValueError(f"A training argument is invalid: {error}. Correct or remove it.") from error
        if os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_ADDR" in os.environ and self.world_size == 1:
            raise ValueError(
                "accelerate launch starts only one process on CPUs (MULTI_CPU, --cpu), but several are requested. "
                "Use torchrun --nproc_per_node N instead."
            )
        wants_fsdp = self.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        if wants_fsdp and self.device.type == "cpu":  # accelerate would use DDP instead, without a warning
            raise ValueError(
                "FSDP requires GPUs, but this process uses the CPU. Remove --fsdp, or choose an accelerate "
                "configuration without FSDP; several processes on CPUs then train with DDP."
            )
        check_optimization(self)
        self.check_combinations()

    @property
    def images_per_step(self) -> int:
        """Number of images in a training step, over all processes and accumulated batches."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.world_size

    def check_combinations(self) -> None:
        """Raise `ValueError` for options that exclude each other, `ImportError` if peft is required but missing."""
        check_conflicts(self)  # again, because transformers sets some options, such as torch_compile
        if self.minutes is not None and self.choose_defaults is False:
            raise ValueError(
                f"minutes={self.minutes:g} determines the number of steps, which choose_defaults=False disables. "
                "Remove one of the two options."
            )
        if self.lora_rank is not None:
            check_packages("lora_rank", "peft", extra="peft")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warm-up steps: 0 for a run of one step, because its learning rate would be 0."""
        return 0 if num_training_steps == 1 else int(super().get_warmup_steps(num_training_steps))


@dataclass
class TrainerArguments(HfViTTrainingArguments):
    """Options of `HfViTTrainer` for `HfArgumentParser`, without the options that only `hf-vit train` uses."""

    minutes: float | None = field(default=None, init=False)
    choose_defaults: bool | None = field(default=None, init=False)
    early_stopping_patience: int | None = field(default=None, init=False)
    dry_run: bool = field(default=False, init=False)
    recorded_schedule: str | None = field(default=None, init=False)
    report_to: str = "tensorboard" if is_tensorboard_available() else "none"
    fsdp: bool | None = field(default=None, metadata={"nargs": "?", "const": True})


def usable_cores() -> int:
    """Return the number of CPU cores per process: the cores of the job divided by the number of local processes.

    If a launcher has bound the process to a share of the cores, the number of these cores is returned.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if sys.platform != "linux":  # only Linux reports the cores of a process
        return max(1, (os.cpu_count() or 1) // processes)
    own, launchers = (len(os.sched_getaffinity(process)) for process in (0, os.getppid()))
    return own if own < launchers else max(1, own // processes)


def training_options_of(args: TrainingArguments) -> Any:
    """Return `args` if it has the options of hf_vit, otherwise `HfViTTrainingArguments`, which has their defaults."""
    return args if isinstance(args, HfViTTrainingArguments) else HfViTTrainingArguments


def check_optimization(args: TrainingArguments) -> None:
    """Raise `ValueError` if options of optimizer and learning rate schedule are incompatible."""
    if training_options_of(args).use_muon and args.optim not in ADAMW:
        raise ValueError(
            f"use_muon=True requires AdamW for the other weights, not optim={args.optim.value}. Remove one of the two "
            "options."
        )
    if args.optim.value.startswith("schedule_free"):  # checkpoints would contain weights that are not averaged
        raise ValueError(
            f"optim={args.optim.value} is not supported. Use the default optimizer with --ema_decay 0.999."
        )


def count_decay_steps(wanted: float, num_training_steps: int, num_warmup_steps: int) -> int:
    """Return the number of final steps with a decreasing learning rate. They must not overlap with the warm-up."""
    steps = wanted if wanted >= 1 else math.ceil(num_training_steps * wanted)
    if steps + num_warmup_steps > num_training_steps:
        raise ValueError(
            f"{num_warmup_steps} warm-up steps and decay_steps={wanted} exceed the {num_training_steps} steps of "
            "the run. Reduce one of them."
        )
    return int(steps)


def check_library(args: TrainingArguments) -> None:
    """Raise `ValueError` for argument values that transformers accepts, but that make it fail later."""
    if not args.output_dir:
        raise ValueError(f"output_dir={args.output_dir!r} is not a folder. Give the path of a new or existing folder.")
    if args.max_steps < 1 and args.max_steps != -1:
        raise ValueError(
            f"max_steps={args.max_steps} must be at least 1, or -1 to train for "
            f"num_train_epochs={args.num_train_epochs}."
        )
    known = ["none", "all", *sorted(INTEGRATION_TO_CALLBACK)]
    given = args.report_to or []
    if unknown := [name for name in given if name not in known]:
        raise ValueError(
            f"report_to={','.join(given)} contains unknown names: {', '.join(unknown)}. Use {', '.join(known)}."
        )
    available = {*get_available_reporting_integrations(), "flyte"}  # transformers does not list flyte
    if missing := [name for name in given if name in INTEGRATION_TO_CALLBACK and name not in available]:
        raise ImportError(
            f"report_to={missing[0]} requires a package that is not installed. Run pip install {missing[0]}, or set "
            "--report_to none."
        )
    if args.use_liger_kernel:
        raise ValueError("use_liger_kernel=True supports only language models. Remove it.")
    for name in (name for name in MAPPINGS if isinstance(vars(args).get(name), str)):
        text = vars(args)[name]
        if name in FILES and not text.startswith("{"):
            continue
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{name}={text!r} is not valid JSON ({error}). Write it like '{{\"name\": 1}}'."
            ) from error
    options = vars(args).get("activation_checkpointing_kwargs") or vars(args)["gradient_checkpointing_kwargs"] or {}
    takes = signature(checkpoint).parameters.keys() - {"function", "args", "kwargs"}
    if unknown := [name for name in options if isinstance(options, dict) and name not in takes]:
        raise ValueError(
            f"activation_checkpointing_kwargs={options} contains unknown arguments: {', '.join(unknown)}. Choose from "
            f"{', '.join(sorted(takes))}, the arguments of torch.utils.checkpoint."
        )


def check_optimizer(args: TrainingArguments) -> None:
    """Create optimizer and schedule for a small layer; raise `ValueError` or `ImportError` if that fails."""
    layer, options = nn.Linear(1, 1), dict(args.lr_scheduler_kwargs or {})
    if args.optim_target_modules is not None:
        return  # optimizers with targets need the whole model
    try:
        optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args, layer)
        optimizer = optimizer_class(layer.parameters(), **settings)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optim={args.optim.value} does not accept optim_args={args.optim_args!r}: {error}. Write options like "
            "momentum=0.9,nesterov=True."
        ) from error
    if args.lr_scheduler_type == SchedulerType.WARMUP_STABLE_DECAY:
        options = {"num_decay_steps": 1, **options}
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, 0, 2, options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_type={args.lr_scheduler_type.value} does not accept "
            f"lr_scheduler_kwargs={args.lr_scheduler_kwargs} with learning_rate={args.learning_rate:g}: {error}."
        ) from error


def check_training(
    args: HfViTTrainingArguments, num_images: int, has_validation: bool, scores: Collection[str]
) -> list[TrainerCallback]:
    """Check that training can start, or raise `ValueError`; return the early stopping callback, if any.

    Without validation images, `args.eval_strategy` is set to "no". `scores` are the names of the evaluation scores.
    """
    batch_size = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and num_images < batch_size:
        raise ValueError(
            f"{num_images} training images do not fill a batch of {batch_size}. Reduce --per_device_train_batch_size."
        )
    is_best_wanted = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
    # The Trainer reads the score `metric_for_best_model` at every evaluation, even if it does not save the best model.
    is_looked_up = is_best_wanted or (has_validation and args.eval_strategy != IntervalStrategy.NO)
    if args.ema_decay is not None:
        scores = {*scores, *(f"ema_{name}" for name in scores)}
    metric = args.metric_for_best_model and args.metric_for_best_model.removeprefix("eval_")
    if is_looked_up and metric and metric not in scores:
        raise ValueError(
            f"metric_for_best_model={metric!r} is not a score of this task. Choose from {', '.join(sorted(scores))}."
        )
    if not has_validation:
        if is_best_wanted:
            raise ValueError(
                "Early stopping and choosing the best model require validation images. Set --train_val_split 0.1."
            )
        args.eval_strategy = IntervalStrategy.NO
    patience = args.early_stopping_patience
    return [] if patience is None else [EarlyStoppingCallback(patience)]


def check_steps(args: HfViTTrainingArguments) -> None:
    """Raise `ValueError` if an argument is in epochs, because the length of a stream is unknown."""
    is_missing = {
        "--max_steps": args.max_steps < 1,
        "--save_strategy steps": args.save_strategy == SaveStrategy.EPOCH,
        "--eval_strategy steps": args.eval_strategy == IntervalStrategy.EPOCH,
    }
    if missing := [option for option, missing in is_missing.items() if missing]:
        raise ValueError(
            f"A stream has no known length and therefore no epochs, but max_steps={args.max_steps}, "
            f"save_strategy={SaveStrategy(args.save_strategy).value!r}, "
            f"eval_strategy={IntervalStrategy(args.eval_strategy).value!r}. Set {', '.join(missing)}."
        )
