"""Metadata of the options that transformers.TrainingArguments declares, in one table."""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from transformers import TrainingArguments

from .field import COUNT, NOT_NEGATIVE, POSITIVE, SEED, SHARE_LEFT_OUT, described


LIBRARY_GROUP = "Options of the library's Trainer (transformers.TrainingArguments), some with other defaults"

# Fields whose only peculiarity is that a resumed run may change them: hardware, logging, evaluation, uploads
FREE = (
    *("ddp_backend", "ddp_broadcast_buffers", "ddp_find_unused_parameters", "ddp_static_graph", "debug"),
    *("dataloader_persistent_workers", "dataloader_pin_memory", "disable_tqdm", "local_rank", "project", "report_to"),
    *("do_eval", "do_predict", "do_train", "eval_do_concat_batches", "eval_on_start", "eval_strategy"),
    *("eval_use_gather_object", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy"),
    *("log_level", "log_level_replica", "log_on_each_node", "logging_first_step", "logging_nan_inf_filter"),
    *("logging_strategy", "push_to_hub", "run_name", "save_on_each_node", "save_only_model", "save_strategy"),
    *("trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
)

LIBRARY_OPTIONS: dict[str, Mapping[str, Any]] = {
    **{name: described(group=LIBRARY_GROUP, resume="free") for name in FREE},
    # The essential ones
    "num_train_epochs": described(
        brief="How often to go through the training images.",
        range=POSITIVE,
        group="Training",
        essential=True,
        synonyms="epochs num_epochs max_epochs",
    ),
    "max_steps": described(
        brief="How many steps to train, whatever the epochs are.",
        group="Training",
        essential=True,
        synonyms="steps iterations num_steps",
    ),
    "learning_rate": described(
        brief="Largest learning rate.",
        range=NOT_NEGATIVE,
        group="Training",
        essential=True,
        synonyms="lr lr0 base_lr",
    ),
    "per_device_train_batch_size": described(
        brief="Images of a step, on each process.",
        range=COUNT,
        group="Training",
        essential=True,
        synonyms="batch_size batch bs train_batch_size",
        resume="free",
    ),
    "bf16": described(
        brief="Compute in bfloat16 where that is precise enough.",
        group="Training",
        essential=True,
        synonyms="amp mixed_precision half",
    ),
    "seed": described(brief="Of all that is random.", range=SEED, group="Training", essential=True),
    "per_device_eval_batch_size": described(
        brief="Images of an evaluation's batch, on each process.",
        range=COUNT,
        group="Evaluation",
        essential=True,
        synonyms="eval_batch_size batch_size validation_batch_size",
        resume="free",
    ),
    "use_cpu": described(
        brief="Leave GPUs alone.", group="Hardware", essential=True, synonyms="cpu no_cuda", resume="free"
    ),
    "output_dir": described(
        brief="Folder for all that is written; by default a new one in outputs/.",
        group="Output",
        essential=True,
        synonyms="output out save_dir out_dir project_dir name",
        resume="free",
    ),
    # Optimizer and schedule
    "optim": described(group=LIBRARY_GROUP, synonyms="opt optimizer", resume="fixed"),
    "lr_scheduler_type": described(group=LIBRARY_GROUP, synonyms="sched scheduler lr_scheduler"),
    "warmup_steps": described(group=LIBRARY_GROUP, range=NOT_NEGATIVE, synonyms="warmup warmup_epochs warmup_ratio"),
    "weight_decay": described(group=LIBRARY_GROUP, range=NOT_NEGATIVE, synonyms="wd"),
    "adam_beta1": described(group=LIBRARY_GROUP, range=SHARE_LEFT_OUT),
    "adam_beta2": described(group=LIBRARY_GROUP, range=SHARE_LEFT_OUT),
    "adam_epsilon": described(group=LIBRARY_GROUP, range=POSITIVE),
    "max_grad_norm": described(
        group=LIBRARY_GROUP, range=NOT_NEGATIVE, synonyms="clip_grad grad_clip gradient_clip_val"
    ),
    "gradient_accumulation_steps": described(
        group=LIBRARY_GROUP, range=COUNT, synonyms="grad_accum_steps accumulate", resume="free"
    ),
    "label_smoothing_factor": described(
        group=LIBRARY_GROUP, range=SHARE_LEFT_OUT, synonyms="smoothing label_smoothing"
    ),
    "neftune_noise_alpha": described(group=LIBRARY_GROUP, range=NOT_NEGATIVE),
    "data_seed": described(group=LIBRARY_GROUP, range=SEED),
    # Intervals and resources
    "logging_steps": described(group=LIBRARY_GROUP, range=POSITIVE, resume="free"),
    "eval_steps": described(group=LIBRARY_GROUP, range=POSITIVE, resume="free"),
    "eval_delay": described(group=LIBRARY_GROUP, range=NOT_NEGATIVE, resume="free"),
    "eval_accumulation_steps": described(group=LIBRARY_GROUP, range=COUNT, resume="free"),
    "save_steps": described(group=LIBRARY_GROUP, range=POSITIVE, resume="free"),
    "save_total_limit": described(group=LIBRARY_GROUP, range=NOT_NEGATIVE, resume="free"),
    "torch_empty_cache_steps": described(group=LIBRARY_GROUP, range=COUNT),
    "dataloader_num_workers": described(
        group=LIBRARY_GROUP, range=NOT_NEGATIVE, synonyms="workers num_workers", resume="free"
    ),
    "dataloader_prefetch_factor": described(group=LIBRARY_GROUP, range=COUNT, resume="free"),
    "ddp_timeout": described(group=LIBRARY_GROUP, range=COUNT, resume="free"),
    "ddp_bucket_cap_mb": described(group=LIBRARY_GROUP, range=COUNT, resume="free"),
    # No part of a recipe
    "hub_token": described(group=LIBRARY_GROUP, resume="free", private=True),
    "resume_from_checkpoint": described(
        group="Output", essential=True, synonyms="resume", resume="free", private=True
    ),
}
LIBRARY_FIELDS = {item.name: item for item in fields(TrainingArguments)}


def metadata_of(item: Field[Any]) -> Mapping[str, Any]:
    """Return the metadata of an option, declared by us or by the library, with all keys of `described`."""
    inherited = LIBRARY_FIELDS.get(item.name)
    if inherited is None:
        return {**described(), **item.metadata}
    known = LIBRARY_OPTIONS.get(item.name) or described(group=LIBRARY_GROUP)
    library = {name: inherited.metadata[name] for name in ("help", "choices") if name in inherited.metadata}
    ours = {name: value for name, value in item.metadata.items() if name in known and value not in (None, "", False)}
    return {**known, **library, **ours}


def options_of(*kinds: type[Any]) -> dict[str, Mapping[str, Any]]:
    """Return the metadata of all options of dataclasses, by name, in the order of the fields."""
    return {item.name: metadata_of(item) for kind in kinds for item in fields(kind) if item.init}
