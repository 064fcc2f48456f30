"""Legal values of the numbers among the arguments of trainings, evaluations and extractions of features, by name."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from inspect import signature
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from ..options.library import metadata_of


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
        legal = metadata_of(option)["range"]
        for number in numbers_in(values.get(option.name)):
            if not math.isfinite(number) or (legal is not None and number not in legal):
                must, value = "be a finite number" if legal is None else legal, values[option.name]
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
