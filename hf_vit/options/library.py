"""Metadata of options that transformers.TrainingArguments declares."""

from collections.abc import Mapping
from dataclasses import Field, fields
from functools import partial
from typing import Any

from transformers import TrainingArguments

from .field import COUNT, NOT_NEGATIVE, POSITIVE, SEED, SHARE_LEFT_OUT, option


LIBRARY_GROUP = "Options of transformers.TrainingArguments, some with different defaults"

# Options for hardware, logging, evaluation and uploads. They may be changed when a run is resumed, and they have no
# other metadata.
FREE = (
    *("ddp_backend", "ddp_broadcast_buffers", "ddp_find_unused_parameters", "ddp_static_graph", "debug"),
    *("dataloader_persistent_workers", "dataloader_pin_memory", "disable_tqdm", "local_rank", "project", "report_to"),
    *("do_eval", "do_predict", "do_train", "eval_do_concat_batches", "eval_on_start", "eval_strategy"),
    *("eval_use_gather_object", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy"),
    *("log_level", "log_level_replica", "log_on_each_node", "logging_first_step", "logging_nan_inf_filter"),
    *("logging_strategy", "push_to_hub", "run_name", "save_on_each_node", "save_only_model", "save_strategy"),
    *("trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
)

COUNTS = ("eval_accumulation_steps", "dataloader_prefetch_factor", "ddp_timeout", "ddp_bucket_cap_mb")

library_option = partial(option, group=LIBRARY_GROUP)
training_option = partial(option, group="Training", essential=True)
essential_option = partial(option, essential=True, resume="free")
# Fields with the metadata of options for which `HfViTTrainingArguments` has none. transformers declares their types,
# default values and help texts.
LIBRARY_OPTIONS: dict[str, Any] = {
    **{name: library_option(resume="free") for name in FREE},
    # Options on the short help pages
    "num_train_epochs": training_option(
        brief="Number of passes over the training images.", range=POSITIVE, synonyms="epochs num_epochs max_epochs"
    ),
    "max_steps": training_option(
        brief="Number of training steps. Overrides the number of epochs.", synonyms="steps iterations num_steps"
    ),
    "bf16": training_option(brief="Compute in bfloat16 (mixed precision).", synonyms="amp mixed_precision half"),
    "seed": training_option(brief="Random seed of the run.", range=SEED),
    "use_cpu": essential_option(brief="Run on the CPU only.", group="Hardware", synonyms="cpu no_cuda"),
    "output_dir": essential_option(
        brief="Folder for all output files. Default: a new folder in outputs/.",
        group="Output",
        synonyms="output out save_dir out_dir project_dir name",
    ),
    # Options of the optimizer and the learning rate schedule
    "optim": library_option(synonyms="opt optimizer", resume="fixed"),
    "adam_beta1": library_option(range=SHARE_LEFT_OUT),
    "adam_beta2": library_option(range=SHARE_LEFT_OUT),
    "adam_epsilon": library_option(range=POSITIVE),
    "max_grad_norm": library_option(range=NOT_NEGATIVE, synonyms="clip_grad grad_clip gradient_clip_val"),
    "gradient_accumulation_steps": library_option(range=COUNT, synonyms="grad_accum_steps accumulate", resume="free"),
    "label_smoothing_factor": library_option(range=SHARE_LEFT_OUT, synonyms="smoothing label_smoothing"),
    "neftune_noise_alpha": library_option(range=NOT_NEGATIVE),
    "data_seed": library_option(range=SEED),
    "torch_empty_cache_steps": library_option(range=COUNT),
    # Intervals of logging and checkpoints, and hardware
    **{name: library_option(range=POSITIVE, resume="free") for name in ("eval_steps", "save_steps")},
    "eval_delay": library_option(range=NOT_NEGATIVE, resume="free"),
    **{name: library_option(range=COUNT, resume="free") for name in COUNTS},
    "torch_compile": library_option(conflicts={"cached_views": "a compiled model does not read stored features"}),
    **{
        name: library_option(conflicts={"cached_views": "the weights of the frozen part are sharded. Train with DDP"})
        for name in ("fsdp", "deepspeed")
    },
    # Options that are not saved in recipes
    "hub_token": library_option(resume="free", private=True),
}
LIBRARY_FIELDS = {item.name: item for item in fields(TrainingArguments)}


def metadata_of(item: Field[Any]) -> Mapping[str, Any]:
    """Return the complete metadata of an option declared by `hf_vit` or `transformers.TrainingArguments`."""
    sources = [item]
    if item.name in LIBRARY_FIELDS:
        sources = [LIBRARY_OPTIONS.get(item.name, library_option()), LIBRARY_FIELDS[item.name], item]
    found = dict(option().metadata.items())
    for source in sources:
        found |= {name: value for name, value in source.metadata.items() if name in found and value}
    return found


def options_of(*kinds: type[Any]) -> dict[str, Mapping[str, Any]]:
    """Return the metadata of all options of the given dataclasses by option name, in the order of the fields."""
    return {item.name: metadata_of(item) for kind in kinds for item in fields(kind) if item.init}


def conflicting_options(name: str, *kinds: type[Any]) -> set[str]:
    """Return the names of the options of the dataclasses that declare a conflict with the option `name`."""
    return {other for other, metadata in options_of(*kinds).items() if name in metadata["conflicts"]}
