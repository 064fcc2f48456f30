"""Legal values of the numbers among the arguments of trainings, evaluations and extractions of features, by name."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from inspect import signature
from typing import Any, NamedTuple

from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations


class Range(NamedTuple):
    """An interval of numbers, closed below and above unless it says otherwise."""

    least: float = -math.inf
    most: float = math.inf
    is_open_below: bool = False
    is_open_above: bool = False

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int | float)
        is_above = self.least < number if self.is_open_below else self.least <= number
        return is_above and (number < self.most if self.is_open_above else number <= self.most)

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"be {'more than' if self.is_open_below else 'at least'} {self.least:g}"
        opening, closing = "[("[self.is_open_below], "])"[self.is_open_above]
        return f"lie in {opening}{self.least:g}, {self.most:.10g}{closing}"


COUNT = Range(least=1)
NOT_NEGATIVE = Range(least=0)
POSITIVE = Range(least=0, is_open_below=True)
PROBABILITY = Range(0, 1)
HALF = Range(0, 0.5)
SHARE = Range(0, 1, is_open_below=True)
SHARE_LEFT_OUT = Range(0, 1, is_open_above=True)
SEED = Range(0, 2**32 - 1)

# Under one name they mean the same for all tasks. Those that their own dataclasses check are not here.
RANGES: dict[Range, tuple[str, ...]] = {
    COUNT: (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        *("eval_accumulation_steps", "torch_empty_cache_steps", "dataloader_prefetch_factor"),
        *(
            "early_stopping_patience",
            "ddp_timeout",
            "ddp_bucket_cap_mb",
            "image_size",
            "progressive_sizes",
            "multi_scale_sizes",
        ),
        *(
            "vocab_size",
            "max_text_length",
            "global_size",
            "local_size",
            "embedding_size",
            "eval_window_size",
            "randaugment_num_ops",
        ),
    ),
    NOT_NEGATIVE: (
        *("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "eval_delay", "dataloader_num_workers"),
        *("crop_padding", "neftune_noise_alpha", "min_eval_depth", "save_total_limit"),
    ),
    POSITIVE: (
        *("num_train_epochs", "adam_epsilon", "logging_steps", "save_steps", "eval_steps", "eval_scales"),
        *("min_scale", "max_scale", "box_padding", "depth_scale", "max_eval_depth", "pck_threshold", "canvas"),
    ),
    HALF: ("hue",),
    PROBABILITY: (
        "horizontal_flip",
        "photometric",
        "random_erasing",
        "iou_crop",
        "color_jitter",
        "grayscale",
        "brightness",
        "contrast",
        "saturation",
        "blur",
        "solarize",
    ),
    SHARE: ("min_crop_scale", "min_global_scale", "max_class_share"),
    SHARE_LEFT_OUT: ("adam_beta1", "adam_beta2", "label_smoothing_factor", "max_shift"),
    Range(0, 1, is_open_below=True, is_open_above=True): ("mask_ratio", "gaussian_weight"),
    Range(0, 180): ("max_rotation",),
    Range(0, 30): ("randaugment_magnitude",),
    SEED: ("seed", "data_seed"),
}
RANGE_OF = {name: legal for legal, names in RANGES.items() for name in names}
# Arguments of the library that are mappings, in JSON on a command line; some of them may be files instead
FILES = ("accelerator_config", "deepspeed", "fsdp_config")
MAPPINGS = (
    *FILES,
    *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
    *("liger_kernel_config", "lr_scheduler_kwargs"),
)
# Which of two must not be larger than the other
PAIRS = (("min_scale", "max_scale"), ("min_eval_depth", "max_eval_depth"))


def check_ranges(options: Any) -> None:
    """Raises `ValueError` for the first number of a dataclass of arguments that is out of range, infinite or NaN.

    Args:
        options: An instance of any dataclass of arguments. Where it is `None`, an argument is not given.
    """
    values = vars(options)
    for option in fields(options):
        legal = RANGE_OF.get(option.name, Range())
        for number in numbers_in(values.get(option.name)):
            if not math.isfinite(number) or number not in legal:
                must, value = legal if option.name in RANGE_OF else "be a finite number", values[option.name]
                default = "" if option.default in (MISSING, None, value) else f" The default is {option.default}."
                raise ValueError(f"{option.name}={value} must {must}.{default}")
    for low, high in PAIRS:
        if values.get(low) is not None and values.get(high) is not None and values[low] > values[high]:
            raise ValueError(f"{low}={values[low]} must not be more than {high}={values[high]}. Exchange them, say.")
    if isinstance(options, TrainingArguments):
        check_library(options)


def numbers_in(value: Any) -> Iterator[float]:
    """Yields a number, or those of a list."""
    for entry in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        if isinstance(entry, int | float) and not isinstance(entry, bool):
            yield entry


def check_library(args: TrainingArguments) -> None:
    """Raises `ValueError` for values that the library takes and stumbles over later."""
    if not args.output_dir:
        raise ValueError(f"output_dir={args.output_dir!r} is no folder. Name one, which need not exist.")
    if args.max_steps < 1 and args.max_steps != -1:
        raise ValueError(
            f"max_steps={args.max_steps} must be at least 1, or -1 for a training of num_train_epochs="
            f"{args.num_train_epochs}."
        )
    known = ["none", "all", *sorted(INTEGRATION_TO_CALLBACK)]
    given = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"report_to={','.join(given)} has {', '.join(unknown)}. Choose among {', '.join(known)}.")
    available = {*get_available_reporting_integrations(), "flyte"}  # which the library does not look for
    if missing := [name for name in given if name in INTEGRATION_TO_CALLBACK and name not in available]:
        raise ImportError(
            f"report_to={missing[0]} needs a package that is missing. Install it (pip install {missing[0]}), or leave "
            "it out: --report_to none."
        )
    if args.use_liger_kernel:
        raise ValueError("use_liger_kernel=True speeds up language models, and does nothing here. Leave it out.")
    for name in MAPPINGS:
        check_mapping(name, vars(args).get(name), may_be_file=name in FILES)
    options = vars(args).get("activation_checkpointing_kwargs") or vars(args)["gradient_checkpointing_kwargs"] or {}
    takes = signature(checkpoint).parameters.keys() - {"function", "args", "kwargs"}
    if unknown := [name for name in options if isinstance(options, dict) and name not in takes]:
        raise ValueError(
            f"activation_checkpointing_kwargs={options} has {', '.join(unknown)}. Choose among "
            f"{', '.join(sorted(takes))}, those of torch.utils.checkpoint."
        )


def check_mapping(name: str, value: Any, may_be_file: bool) -> None:
    """Raises `ValueError` if the text of an argument that is a mapping is no JSON, nor maybe the path of a file."""
    if not isinstance(value, str) or (may_be_file and not value.startswith("{")):
        return
    try:
        json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}={value!r} is no JSON ({error}). Write it like '{{\"name\": 1}}'.") from error
