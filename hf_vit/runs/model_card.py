"""Model cards: description, usage, training settings and scores of a saved model."""

import math
import os
import platform
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import Trainer
from transformers.utils import logging

from ..convert.model_card import WARNINGS, escape_markdown
from ..data.datasets import DatasetInfo
from ..evaluation.base import LOWER_IS_BETTER
from ..options.training_arguments import training_options_of
from ..outputs import write_atomically
from ..tasks.common.card import Usage
from ..training.lora import count_parameters, describe_adapter
from ..training.output_folder import PLACE


logger = logging.get_logger(__name__)
CALIBRATION = "## Calibration"  # heading of a section
# The template is in this folder, so that it is part of the installed package. The folder model_cards/ links to it.
TEMPLATE = Path(__file__).with_name("model_card.md")


@dataclass(frozen=True)
class TrainingInfo:
    """Facts about a trained model for its card.

    Args:
        model_name: Title of the card.
        task: Name of the transformers pipeline, for example "image-classification".
        model_class: Class name of the model.
        purpose: Task of the model in words, for example "image classification".
        usage: Code that uses the model.
        num_parameters: Number of parameters.
        data: Description of the training and evaluation data.
        metrics: Scores on the test split.
        baselines: Scores of each baseline, with the same metric names, by name of the baseline.
        command: Command that repeats the run.
        seconds: Wall time of the run.
        hardware: Hardware of the run.
        seed: Seed of the run.
        recipe: Main training settings.
        limits: Limitations of the model.
        license: License of the weights.
        selection: Description of the training step whose weights were saved.
        is_chosen_on_evaluated: Whether that step was chosen by its score on the evaluated images.
        base_model: Saved model that the run started from, if any.
        units: Units of scores, by metric name.
        lower_is_better: Names of the metrics for which lower is better.
        parts: Scores of each class (or other part) by name, for each kind of part, such as "class".
        warnings: Sentences about classes with a score of 0, objects that are not found, and too few steps.
        pictures: File names of pictures next to the card, by caption.
        calibration: Scores before and after calibration on held-out images, by name; empty without calibration.
        calibration_note: Text about the calibration, or why there is none.
        arguments: File next to the card that contains all training arguments.
        location: Folder, or name on the Hub, from which users load the model.
        tags: Keywords in the metadata of the card.
    """

    model_name: str
    task: str
    model_class: str
    purpose: str
    usage: Usage
    num_parameters: int
    data: DatasetInfo
    metrics: dict[str, float]
    baselines: dict[str, dict[str, float]]
    command: str
    seconds: float
    hardware: str
    seed: int
    recipe: dict[str, str]
    limits: str
    license: str = "apache-2.0"
    selection: str = "after the last step"
    is_chosen_on_evaluated: bool = False
    base_model: str | None = None
    units: dict[str, str] = field(default_factory=dict)
    lower_is_better: Collection[str] = frozenset(LOWER_IS_BETTER)
    parts: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    pictures: dict[str, str] = field(default_factory=dict)
    calibration: dict[str, tuple[float, float]] = field(default_factory=dict)
    calibration_note: str = ""
    arguments: str = "training_args.json"
    location: str = PLACE
    tags: tuple[str, ...] = ("vision", "hf_vit")

    @classmethod
    def from_trainer(cls, trainer: Trainer, recipe: dict[str, str], **facts: Any) -> Self:
        """Create the facts from a trainer that has finished training.

        Args:
            trainer: Trainer that provides class and size of the model, seed, hardware and main settings.
            recipe: Additional settings.
            **facts: All other fields.
        """
        name = type(trainer.model).__name__
        facts.setdefault("purpose", " ".join(re.findall("[A-Z][a-z]+", name.partition("For")[2])).lower())
        return cls(
            model_class=name,
            num_parameters=count_parameters(trainer.model),
            hardware=describe_hardware(trainer.args.device),
            seed=trainer.args.seed,
            recipe=describe_recipe(trainer) | recipe,
            **facts,
        )


def score_rows(info: TrainingInfo) -> list[list[str]]:
    """Return rows of the score table: metric, score of the model, scores of the baselines. Best scores are bold."""
    rows = []
    for metric, score in info.metrics.items():
        scores = [score, *(baseline[metric] for baseline in info.baselines.values())]
        ranks = [rank(info, metric, value) for value in scores]
        known = [value for value in ranks if not math.isnan(value)]
        marks = ["**" if known and value == max(known) > min(known) else "" for value in ranks]
        unit = f" ({info.units[metric]})" if metric in info.units else ""
        cells = [f"{mark}{format_value(value)}{mark}" for mark, value in zip(marks, scores, strict=True)]
        rows.append([f"{metric}{unit}", *cells])
    return rows


def describe_calibration(scores: dict[str, tuple[float, float]], note: str) -> str:
    """Return the section of the card about the calibration: a note and, if there are any, scores before and after."""
    changed = {name: pair for name, pair in scores.items() if pair[0] != pair[1]}
    rows = [
        f"| {name} | {format_value(before)} | {format_value(after)} |" for name, (before, after) in changed.items()
    ]
    table = [
        "\nIn the table, lower is better. To disable the calibration, pass `calibration_config={'enabled': False}` to "
        "`from_pretrained`.\n",
        "| score | before | after |",
        "|---|---|---|",
        *rows,
    ]
    return "\n".join([f"{CALIBRATION}\n", note, *(table if rows else [])])


def compare(info: TrainingInfo) -> list[str]:
    """Return a sentence for each baseline that the model does not surpass, with the names of the metrics."""
    sentences = []
    for name, baseline in info.baselines.items():
        behind, level = [], []
        for metric, score in info.metrics.items():
            own, other = rank(info, metric, score), rank(info, metric, baseline[metric])
            if own < other:
                behind.append(f"{metric} ({format_value(score)} against {format_value(baseline[metric])})")
            elif own == other:
                level.append(f"{metric} ({format_value(score)})")
        if behind:
            sentences.append(f"This model is behind {name} in {', '.join(behind)}.")
        if level:
            sentences.append(f"This model is no better than {name} in {', '.join(level)}.")
    return sentences


def rank(info: TrainingInfo, metric: str, score: float) -> float:
    """Return a number that is higher for better scores. Scores with the same rounded text have equal numbers."""
    return round(-score if metric in info.lower_is_better else score, 4)


def format_value(score: float) -> str:
    """Format a score for the card."""
    return "-" if math.isnan(score) else f"{score:.4f}"


def describe_hardware(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line.partition(":")[2] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = models[0].strip() if models else name
    count = torch.get_num_threads()
    return f"{name}, {count} thread{'s' if count > 1 else ''}"


def describe_recipe(trainer: Trainer) -> dict[str, str]:
    """Return the main settings of a finished run for the table of its model card."""
    args, values = trainer.args, trainer.args.to_dict()
    batch_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    warmup = f"{args.warmup_steps:.0%} of the" if args.warmup_steps < 1 else str(args.warmup_steps)
    return {
        "steps": f"{trainer.state.global_step} of {batch_size} images",
        "optimizer": f"{values['optim']}, learning rate {args.learning_rate}, weight decay {args.weight_decay}",
        "schedule": f"{values['lr_scheduler_type']}, {warmup} steps of warm-up",
        "precision": "bfloat16" if args.bf16 else "float16 mixed" if args.fp16 else "float32",
        **describe_options(training_options_of(args)),
        **describe_adapter(trainer.model),
    }


def describe_options(options: Any) -> dict[str, str]:
    """Return table rows for the options whose values differ from their defaults."""
    heights = ", ".join(map(str, options.progressive_sizes or ()))
    rows = (
        ("matrices of blocks", options.use_muon, "Muon"),
        ("learning rate decay per layer", options.layer_decay != 1, f"x {options.layer_decay:g}"),
        ("learning rate of heads", options.head_lr_multiplier != 1, f"x {options.head_lr_multiplier:g}"),
        ("frozen", options.freeze, ", ".join(options.freeze or ())),
        ("trained blocks", options.trainable_blocks is not None, f"the last {options.trainable_blocks}"),
        ("average of the weights", options.ema_decay, f"exponential, decay {options.ema_decay}, in `ema/`"),
        ("image heights", heights, f"{heights} pixels, for equal shares of the steps"),
    )
    return {name: text for name, differs, text in rows if differs}


def write_model_card(folder: str | os.PathLike[str], info: TrainingInfo) -> Path:
    """Write the card of a trained model, with metadata for the Hub, and log its warnings.

    Warnings are the `warnings` of `info`, and the metrics that do not surpass the baseline without images.

    Args:
        folder: Folder of the saved model.
        info: Facts about the model.

    Returns:
        The path of the card, README.md in `folder`.

    Raises:
        ValueError: If a metric of a baseline is missing.
    """
    for name, scores in info.baselines.items():
        if missing := sorted(set(info.metrics) - set(scores)):
            raise ValueError(f"The baseline {name!r} has no score for {', '.join(missing)}. Add these scores.")
    # The Hub ranks models by these scores. Omit scores on images used for training or for choosing the best step.
    is_comparable = info.data.split != "train" and not info.is_chosen_on_evaluated
    results = [
        EvalResult(
            task_type=info.task,
            dataset_type=info.data.identifier,
            dataset_name=info.data.name,
            dataset_split=info.data.split,
            metric_type=metric,
            metric_value=score,
        )
        for metric, score in info.metrics.items()
    ]
    is_on_hub = info.base_model is not None and not Path(info.base_model).exists()
    # The last baseline ignores the images.
    warnings = [*compare(replace(info, baselines=dict([*info.baselines.items()][-1:]))), *info.warnings]
    card_data = ModelCardData(
        model_name=info.model_name,
        license=info.license,
        library_name="transformers",
        pipeline_tag=info.task,
        tags=list(info.tags),
        metrics=list(info.metrics),
        base_model=info.base_model if is_on_hub else None,
        base_model_relation="finetune" if is_on_hub else None,
        eval_results=results if is_comparable else None,
        **{WARNINGS: warnings or None},  # shown where the model is used
    )
    fence = "`" * (1 + max([2, *map(len, re.findall("`+", info.command))]))
    lower = ", ".join(metric for metric in info.metrics if metric in info.lower_is_better)
    functions = {"escape": escape_markdown, "score_rows": score_rows, "compare": compare, "shown": format_value}
    functions |= {"calibration": describe_calibration}
    options = {"info": info, "fence": fence, "lower": lower, **functions}
    card = ModelCard.from_template(card_data, template_path=str(TEMPLATE), **options)
    path = Path(folder) / "README.md"
    write_atomically(path, str(card))
    for sentence in warnings:
        logger.warning(sentence)
    return path
