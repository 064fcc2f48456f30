"""Checks of the library's options: values that it takes and stumbles over later."""

import json
from inspect import signature
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations


# Arguments of the library that are mappings, in JSON on a command line; some of them may be files instead
FILES = ("accelerator_config", "deepspeed", "fsdp_config")
MAPPINGS = (
    *FILES,
    *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
    *("liger_kernel_config", "lr_scheduler_kwargs"),
)


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
    given = args.report_to or []
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
