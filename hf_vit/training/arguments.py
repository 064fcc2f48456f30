"""The arguments of trainings that several tasks share: model, data, and those of the library."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import SchedulerType, TrainingArguments
from transformers.integrations import is_tensorboard_available
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.utils import is_torch_xla_available

from ..data.formats.files import split_names
from ..evaluation.base import LOWER_IS_BETTER
from ..extras import check_packages
from ..model.configuration_hf_vit import PRESETS
from ..options.field import (
    COUNT,
    NOT_NEGATIVE,
    SHARE_LEFT_OUT,
    Names,
    data_option,
    model_option,
    option,
    source_option,
    start_option,
    training_images_option,
)
from ..options.resolve import Options, check_numbers, convert_all, values_of
from .library_checks import check_library
from .training_options import SCHEDULE_FREE, TrainingOptions, check_optimization, parse_changes


MAX_WORKERS = 8  # by default
FROM_DATA = {"id2label", "label2id", "num_labels", "problem_type"}  # fields of HfViTConfig that no user need give


@dataclass
class ModelArguments(Options):
    """Which model to train."""

    task_config: ClassVar[str] = ""  # the field of HfViTConfig that holds the options of the head
    task_options: ClassVar[tuple[str, ...]] = ()  # those of them that are fields here

    model_name_or_path: str | None = start_option(
        None,
        "Model to start from, saved by this package or published for another library: a folder, a name on "
        "the Hub, or a file of published weights.",
        group="Model",
    )
    preset: str | None = model_option(
        None,
        f"Size of a model that starts from scratch: {', '.join(PRESETS)}. By default it is chosen, or "
        "small with --choose_defaults false.",
        essential=True,
        synonyms="arch architecture model_size",
    )
    image_size: int | tuple[int, int] | None = model_option(
        None,
        "Side of images in pixels, or height,width. A saved model resamples its positions.",
        COUNT,
        essential=True,
        synonyms="imgsz img_size input_size resolution size",
    )
    config_overrides: dict[str, Any] | None = model_option(
        None, 'Fields of HfViTConfig that differ, as JSON: \'{"patch_size": 8, "pooling": "mean"}\'.'
    )
    whiten_patches: bool = model_option(
        False,
        "Let the patch embedding of a model from scratch start as a whitening of the training patches, "
        "which learns faster.",
    )
    license: str = model_option("unknown", "License of the trained weights, for the model card.", resume="free")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_name_or_path is not None and self.whiten_patches:
            raise ValueError(
                f"--whiten_patches is for models from scratch, and --model_name_or_path {self.model_name_or_path} has "
                "learned its patches. Leave one of the two out."
            )
        if self.model_name_or_path is not None and self.preset is not None:
            raise ValueError(
                f"--preset {self.preset} is the size of a new model, and --model_name_or_path "
                f"{self.model_name_or_path} a saved one, which has its size. Give one of the two."
            )

    def overrides(self) -> dict[str, Any]:
        """Returns the fields of `config_overrides`, and with them `image_size` and the head's options.

        Raises:
            ValueError: if they name what the data tell, or an option once more.
        """
        fields = dict(self.config_overrides or {})
        if from_data := sorted(FROM_DATA & fields.keys()):
            raise ValueError(
                f"config_overrides has {', '.join(from_data)}: the classes are those of the data, one of each image. "
                "Leave it out."
            )
        if self.image_size is not None:
            if "image_size" in fields:
                raise ValueError("--image_size is given twice: leave it out of --config_overrides.")
            fields["image_size"] = self.image_size
        options = fields.get(self.task_config) or {}
        given = {name: vars(self)[name] for name in self.task_options if vars(self)[name] is not None}
        if twice := sorted(given.keys() & options.keys()):
            raise ValueError(f"--{twice[0]} is given twice: leave it out of --config_overrides.")
        return {**fields, self.task_config: {**options, **given}} if given else fields

    def given_options(self) -> dict[str, Any]:
        """Returns the options of the head that are given; raises as `overrides`."""
        return self.overrides().get(self.task_config) or {}


@dataclass
class SourceArguments(Options):
    """Where images are."""

    # Fields that the loaders of `hf_vit.data` take by the same names
    loader_options: ClassVar[tuple[str, ...]] = ("dataset_config_name", "dataset_revision", "image_column_name")
    takes_several: ClassVar[bool] = False  # sources, with commas between them

    dataset_name: str = source_option("Folder, or name on the Hub.")
    dataset_config_name: str | None = data_option(None, "Configuration of a dataset on the Hub.")
    dataset_revision: str | None = data_option(None, "Branch, tag or commit of a dataset on the Hub.")
    image_column_name: str | None = data_option(None, "Column of the images, where it is not clear by itself.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dataset_name:
            raise ValueError("Say where the images are: --dataset_name path/to/data, or a name on the Hub.")
        if not all(self.sources):
            raise ValueError(
                f"dataset_name={self.dataset_name!r} has a comma with no name before or after it. Leave it out."
            )

    @property
    def sources(self) -> list[str]:
        """The folders, files or names of the datasets."""
        return split_sources(self.dataset_name) if self.takes_several else [self.dataset_name]

    def source_options(self) -> dict[str, Any]:
        """Returns what the loaders of `hf_vit.data` take in addition to `dataset_name`."""
        return {name: vars(self)[name] for name in self.loader_options}


@dataclass
class ImageDataArguments(SourceArguments):
    """Images to train or to evaluate on, whatever their targets are."""

    skip_unreadable: bool = data_option(
        False, "Leave images out that cannot be read, rather than stop.", essential=True, resume="free"
    )
    check_images: bool = data_option(
        True, "Read all images once in advance; false if that has been done before.", resume="free"
    )
    allow_duplicates: bool = training_images_option(
        False, "Train even if most of the evaluated images are training images, too.", resume="free"
    )
    train_val_split: float | None = data_option(
        None,
        "Share of the training images held out where the data has no validation split; 0 trains on all. "
        "By default a tenth where it chooses something (the best step, a threshold) or there is no test split.",
        SHARE_LEFT_OUT,
        synonyms="val_split validation_split holdout",
    )
    validation_as_test: bool | None = data_option(
        None,
        "Report the scores of the validation split, and hold images for choices out of the training ones. "
        "By default where something is chosen (the best step, a threshold) and there is no test split.",
    )
    max_train_samples: int | None = training_images_option(
        None, "Train on this many images, drawn at random: for a trial.", COUNT
    )
    max_eval_samples: int | None = data_option(
        None, "Evaluate this many images of a split, drawn at random: for a trial.", COUNT
    )
    dataset_license: str = training_images_option("unknown", "License of the data, for the model card.", resume="free")
    holds_out: bool = field(init=False, default=False)  # whether images are held out, once the data are open

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skip_unreadable and not self.check_images:
            raise ValueError("skip_unreadable finds nothing with check_images=False. Leave one of the two out.")

    def refuse_training_options(self) -> None:
        """Raises `ValueError` if an option is given that has a meaning in trainings alone."""
        defaults = {item.name: item.default for item in fields(self)}
        for name, value in values_of(self, "Training images").items():
            if value != defaults[name]:
                raise ValueError(f"{name}={value!r} is an option of trainings. Leave it out.")


@dataclass
class StreamArguments(Options):
    """Whether and how images are read while a training runs."""

    streaming: bool = training_images_option(
        False,
        "Read images while training; needs --max_steps, --save_strategy steps and --eval_strategy "
        "steps, or no. Of what is not on disk, or is held out, --max_eval_samples (1000) images are evaluated.",
    )
    shuffle_buffer_size: int = training_images_option(
        1000, "Among how many images of a stream the next one is drawn, on each process.", COUNT
    )
    shard_by_process: bool = training_images_option(
        True,
        "Let each process read its own shards of a stream; false lets the first one read for all, which "
        "is slower, but several processes then train as one would.",
    )

    def check_stream(self, max_train_samples: int | None) -> None:
        """Raises `ValueError` if the options of a stream do not go with each other or with the others."""
        if self.streaming and max_train_samples is not None:
            raise ValueError(
                f"max_train_samples={max_train_samples} are drawn from all images, which a stream does not know. "
                "Leave it out, or --streaming."
            )


@dataclass
class ClassificationArguments(ModelArguments, ImageDataArguments, StreamArguments):
    """Which classifier to train, and on which images."""

    loader_options = (*ImageDataArguments.loader_options, "label_column_name")

    dataset_name: str = source_option(
        "Folder of <split>/<class>/<image>, idx or parquet files, CSV of paths and labels, or a Hub name."
    )
    label_column_name: str | None = data_option(None, "Column of the labels, where it is not clear by itself.")
    class_names: Names | None = training_images_option(
        None, 'Names of the classes of a stream, "cat,dog", where the data do not have them.', essential=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_stream(self.max_train_samples)
        if self.class_names is not None and not self.streaming:
            raise ValueError(
                f"class_names={self.class_names!r} is for --streaming: all labels are known without. Leave it out."
            )


UNLABELED_SOURCES = (
    "Folder of images at any depth, whatever classifiers train on, or a Hub name; several, separated by commas, are "
    "taken together."
)
UNLABELED_COLUMN = "Column of labels, where there is one and it is not clear by itself."


@dataclass
class UnlabeledArguments(ModelArguments, ImageDataArguments, StreamArguments):
    """Which model to train without labels, and on which images."""

    loader_options = (*ImageDataArguments.loader_options, "label_column_name")
    takes_several = True

    dataset_name: str | Names = source_option(UNLABELED_SOURCES)  # type: ignore[assignment]
    label_column_name: str | None = data_option(None, UNLABELED_COLUMN)
    max_knn_samples: int = data_option(
        5000, "Training images among which neighbors are looked for, where labels are known; 0 for none.", NOT_NEGATIVE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_stream(self.max_train_samples)


def split_sources(names: str | Sequence[str]) -> list[str]:
    """Returns paths or names on the Hub, given as a list or with commas between them; a path may have some."""
    if not isinstance(names, str):
        return list(names)
    return [names] if Path(names).expanduser().exists() else split_names(names)


@dataclass
class HfViTTrainingArguments(TrainingOptions, TrainingArguments):
    """The library's arguments, with defaults that suit a Vision Transformer."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_steps: float = 0.1
    lr_scheduler_type: SchedulerType | str = "cosine"
    per_device_train_batch_size: int = 64
    per_device_eval_batch_size: int = 64
    eval_strategy: IntervalStrategy | str = "epoch"
    save_strategy: SaveStrategy | str = "epoch"
    save_total_limit: int | None = 2
    logging_steps: float = 0.01
    metric_for_best_model: str | None = option(
        "accuracy", "Score that chooses the best model: a name that evaluations print.", group="Training"
    )
    early_stopping_patience: int | None = option(
        None,
        "Stop after this many evaluations without a better score, and keep the best model.",
        COUNT,
        group="Training",
        essential=True,
        synonyms="patience",
    )
    resume_from_checkpoint: str | None = option(
        None,
        'Resume a training: "last" for the newest checkpoint in output_dir, or its folder.',
        group="Output",
        essential=True,
        synonyms="resume",
        resume="free",
        private=True,
    )
    dry_run: bool = option(
        False,
        "Check data, model and options, say what would be done, and write nothing.",
        group="Output",
        essential=True,
        resume="free",
        private=True,
    )
    length_changes: list[str] | None = option(
        None,
        "Numbers of steps by the step from which on they counted, like 143:812, as recipe.yaml notes them "
        "where a budget in minutes was kept.",
        resume="free",
    )
    # Early stopping counts on where it stood, and the wall time adds up.
    restore_callback_states_from_checkpoint: bool = True
    # An incomplete last batch would weigh its images more, and differ with the number of processes.
    dataloader_drop_last: bool = True
    dataloader_pin_memory: bool = torch.cuda.is_available()
    dataloader_num_workers: int | None = option(
        None,
        "Processes that read images, for each that trains. By default its share of the cores "
        "beside a GPU, at most 8; without one none, as the model takes all cores.",
        NOT_NEGATIVE,
        synonyms="workers num_workers",
        resume="free",
    )
    # Where there are worker processes, they stay from epoch to epoch.
    dataloader_persistent_workers: bool = True
    remove_unused_columns: bool = False
    report_to: Names | str = "tensorboard" if is_tensorboard_available() else "none"
    fsdp: bool | str | None = field(default=None, metadata={"const": True})
    optim_target_modules: list[str] | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.report_to, str):
            self.report_to = Names(split_names(self.report_to))
        convert_all(self)
        check_numbers(self)
        check_library(self)
        parse_changes(self.length_changes)
        # The library refuses bfloat16 and several processes on a CPU unless it is asked for.
        if not torch.accelerator.is_available() and not is_torch_xla_available():
            self.use_cpu = True
        name = str(self.metric_for_best_model).removeprefix("eval_").removeprefix("ema_")
        if name in LOWER_IS_BETTER and vars(self)["greater_is_better"] is None:
            self.greater_is_better = False
        if self.early_stopping_patience is not None:
            self.load_best_model_at_end = True  # as the last ones are worse
        if self.dataloader_num_workers is None:
            has_gpu = torch.cuda.is_available() and not self.use_cpu
            self.dataloader_num_workers = min(MAX_WORKERS, usable_cores()) if has_gpu else 0
        if self.dataloader_num_workers == 0:
            self.dataloader_persistent_workers = False  # torch refuses it
        if isinstance(self.optim_target_modules, list) and len(self.optim_target_modules) == 1:
            self.optim_target_modules = self.optim_target_modules[0]  # a pattern, or "all-linear"
        try:
            super().__post_init__()
        except TypeError as error:  # about an unknown name in a mapping
            raise ValueError(
                f"An argument of the library does not fit: {error}. Correct it, or leave it out."
            ) from error
        if os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_ADDR" in os.environ and self.world_size == 1:
            raise ValueError(
                "accelerate launch starts one process on CPUs (MULTI_CPU, --cpu), where several are asked for. Use "
                "torchrun --nproc_per_node N in its place."
            )
        check_optimization(self)
        self.check_combinations()

    def check_combinations(self) -> None:
        """Raises `ValueError` for options that exclude each other, `ImportError` if peft is missing."""
        if self.minutes is not None and self.choose_defaults is False:
            raise ValueError(
                f"minutes={self.minutes:g} leaves the number of steps to be chosen, and choose_defaults=False chooses "
                "nothing. Give one of the two."
            )
        if self.progressive_sizes and self.multi_scale_sizes:
            raise ValueError(
                f"progressive_sizes={self.progressive_sizes} and multi_scale_sizes={self.multi_scale_sizes} both say "
                "how large training images are. Give one of the two."
            )
        if self.ema_decay is not None and self.optim in SCHEDULE_FREE:
            raise ValueError(
                f"The weights of optim={self.optim.value} are an average already, so that ema_decay={self.ema_decay} "
                "would average twice. Leave one of the two out."
            )
        if self.lora_rank is not None:
            check_packages("lora_rank", "peft", extra="peft")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Returns the number of warm-up steps; a single step has none, as its learning rate would be 0."""
        return 0 if num_training_steps == 1 else int(super().get_warmup_steps(num_training_steps))


def usable_cores() -> int:
    """Returns how many cores this process may use: of those of a job, its part among the processes that train there.

    A launcher may have bound it to cores that are its part already: then it has fewer than the launcher.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if sys.platform != "linux":  # which alone tells
        return max(1, (os.cpu_count() or 1) // processes)
    own, launchers = (len(os.sched_getaffinity(process)) for process in (0, os.getppid()))
    return own if own < launchers else max(1, own // processes)
