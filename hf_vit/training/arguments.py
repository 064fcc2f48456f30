"""What the training scripts can be told, on the command line or in a YAML or JSON file."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations import is_tensorboard_available

from ..configuration_hf_vit import PRESETS


@dataclass
class ModelArguments:
    """Which model to train."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Saved model to start from: a folder or a name on the Hub."}
    )
    preset: str = field(
        default="small", metadata={"help": f"Size of a model that starts from scratch: {', '.join(PRESETS)}."}
    )
    image_size: int | None = field(
        default=None,
        metadata={"help": "Height and width of the images in pixels. A saved model resamples its positions to it."},
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": 'Fields of HfViTConfig that differ, as JSON: \'{"patch_size": 8, "pooling": "mean"}\'.'},
    )
    license: str = field(default="unknown", metadata={"help": "License of the trained weights, for the model card."})

    def overrides(self) -> dict[str, Any]:
        """Returns the fields of `config_overrides`.

        Raises:
            ValueError: if they are no JSON object.
        """
        try:
            fields = json.loads(self.config_overrides or "{}")
        except json.JSONDecodeError as error:
            fields = f"no JSON: {error}"
        if not isinstance(fields, dict):
            raise ValueError(
                f"config_overrides={self.config_overrides!r} is no JSON object ({fields}). Write it like "
                "'{\"patch_size\": 8}'."
            )
        return fields


@dataclass
class DataArguments:
    """Which images to score."""

    dataset_name: str = field(
        default="",
        metadata={
            "help": "Folder of <split>/<class>/<image>, idx or parquet files, CSV of paths and labels, or a Hub name."
        },
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of a dataset on the Hub."})
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of a dataset on the Hub."}
    )
    image_column_name: str | None = field(
        default=None, metadata={"help": "Column of the images, where it is not clear by itself."}
    )
    label_column_name: str | None = field(
        default=None, metadata={"help": "Column of the labels, where it is not clear by itself."}
    )
    skip_unreadable: bool = field(
        default=False, metadata={"help": "Leave images out that cannot be read, rather than stop."}
    )
    check_images: bool = field(
        default=True, metadata={"help": "Read all images once in advance; false if that has been done before."}
    )
    train_val_split: float = field(
        default=0.1,
        metadata={
            "help": "Share of the training images held out where the data has no validation split; 0 trains on all."
        },
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Score this many images of a split, drawn at random: for a trial."}
    )

    def __post_init__(self) -> None:
        """Checks what can be checked without the data."""
        if not self.dataset_name:
            raise ValueError("Say where the images are: --dataset_name path/to/data, or a name on the Hub.")
        if self.skip_unreadable and not self.check_images:
            raise ValueError("skip_unreadable finds nothing with check_images=False. Leave one of the two out.")
        if not 0 <= self.train_val_split < 1:
            raise ValueError(f"train_val_split={self.train_val_split} must lie in [0, 1). 0.1 holds out a tenth.")


@dataclass
class TrainingDataArguments(DataArguments):
    """Which images to train on."""

    max_train_samples: int | None = field(
        default=None, metadata={"help": "Train on this many images, drawn at random: for a trial."}
    )
    dataset_license: str = field(default="unknown", metadata={"help": "License of the data, for the model card."})


@dataclass
class AugmentationArguments:
    """How training images are changed at random, in this order."""

    min_crop_scale: float = field(
        default=0.35, metadata={"help": "Least share of the area that a random resized crop keeps; 1 takes all of it."}
    )
    horizontal_flip: float = field(default=0.5, metadata={"help": "Probability of a mirror image."})
    auto_augment: str = field(
        default="trivialaugment",
        metadata={"help": "none, trivialaugment, randaugment, or affine (slight, for digits)."},
    )
    random_erasing: float = field(default=0.25, metadata={"help": "Probability that a rectangle is blanked out."})


@dataclass
class HfViTTrainingArguments(TrainingArguments):
    """The library's arguments, with defaults that suit a Vision Transformer."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_steps: float = 0.1
    lr_scheduler_type: str = "cosine"
    per_device_train_batch_size: int = 64
    per_device_eval_batch_size: int = 64
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int | None = 2
    logging_steps: float = 0.01
    metric_for_best_model: str | None = "accuracy"
    early_stopping_patience: int | None = field(
        default=None,
        metadata={"help": "Stop after this many evaluations without a better score, and keep the best model."},
    )
    # An incomplete last batch would weigh its images more, and differ with the number of processes.
    dataloader_drop_last: bool = True
    dataloader_pin_memory: bool = torch.cuda.is_available()
    remove_unused_columns: bool = False
    report_to: str = "tensorboard" if is_tensorboard_available() else "none"

    def __post_init__(self) -> None:
        """Early stopping keeps the best model: the last ones are worse by definition."""
        if self.early_stopping_patience is not None:
            self.load_best_model_at_end = True
        super().__post_init__()


def parse_arguments(types: Sequence[type], arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parses a command line; if it starts with a YAML or JSON file, what follows overrides what the file says.

    Args:
        types: Dataclasses with the arguments.
        arguments: The command line without the program's name; by default the one of this process.

    Returns:
        One instance of each type.

    Raises:
        ValueError: if the file is no mapping, or an argument's own check fails.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and Path(arguments[0]).suffix in {".yaml", ".yml", ".json"}:
        arguments = file_to_arguments(Path(arguments[0])) + arguments[1:]
    return tuple(HfArgumentParser(types).parse_args_into_dataclasses(arguments))


def file_to_arguments(file: Path) -> list[str]:
    """Returns the content of a YAML or JSON file as the command line that says the same.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no mapping from names to values.
    """
    content = yaml.safe_load(file.read_text(encoding="utf-8"))  # JSON is YAML too
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a mapping, with lines like 'learning_rate: 0.001'.")
    arguments = []
    for name, value in content.items():
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        arguments += [f"--{name}", *map(str, values)] if value is not None else []
    return arguments
