"""Reports on training runs and evaluations: scores, pictures, predictions and facts for the model card."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..data.datasets import DatasetInfo, TargetDataset
from ..evaluation.base import BaseEvaluator
from ..evaluation.calibration import (
    LEAST_FITTED,
    confidences,
    cross_fitted,
    score_calibration,
    score_errors,
    score_sets,
)
from ..model.calibration import undo_calibration
from ..options.recipe import RECIPE_NAME
from ..options.resolve import values_of
from ..outputs import AVERAGE_FOLDER, write_atomically
from ..tasks.common.arguments import split_sources
from ..tasks.common.card import describe_values, public_name
from ..tasks.common.models import shorten
from ..training.evaluator_trainer import EvaluatorTrainer, draw_examples
from ..training.trainer import HfViTTrainer
from ..visualize.plots import draw_calibration, draw_class_scores, draw_curves
from .build import Run
from .model_card import TrainingInfo, write_model_card


logger = logging.get_logger(__name__)
CURVES = {"Loss, validation scores and learning rate": "curves.png"}


def describe_data(
    dataset_name: str,
    license: str,
    sizes: dict[str, int],
    split: str,
    names: Sequence[str] = (),
    *,
    examples: str = "images",
    parts: str = "in {} classes",
    notes: Sequence[str] = (),
) -> DatasetInfo:
    """Describe the sources, splits and class names of the data for the model card.

    `examples` is a noun for the examples, such as "images". `parts` is a noun phrase for the classes, such as
    "in {} classes", with a placeholder for their number. `notes` are sentences about missing data.
    """
    counts = ", ".join(f"{count:,} for {name}" for name, count in sizes.items())
    sources = split_sources(dataset_name)
    name = ", ".join(public_name(source) for source in sources)
    classes = f", {parts.format(len(names))} ({shorten(names)})" if names else ""
    return DatasetInfo(
        name=name,
        # Use the last part of a local path only, because a nested folder is not a repository on the Hub.
        identifier=", ".join(Path(source).resolve().name if Path(source).exists() else source for source in sources),
        license=license,
        description=" ".join([f"{name}: {counts}{classes}.", *notes]),
        test=f"the {sizes[split]:,} {split} {examples}",
        split=split,
    )


def describe_training(trainer: HfViTTrainer, split: str) -> dict[str, Any]:
    """Return the fields of `TrainingInfo` that do not depend on the task."""
    best = trainer.state.best_global_step if trainer.args.load_best_model_at_end else None
    return {
        "model_name": Path(trainer.args.output_dir).resolve().name,
        "selection": "after the last step" if best is None else f"at step {best}, the best on the validation images",
        "is_chosen_on_evaluated": best is not None and split == "validation",
        "arguments": RECIPE_NAME,
        "seconds": trainer.progress.seconds,
        "location": trainer.hub_model_id or TrainingInfo.location,
    }


def report_average(trainer: HfViTTrainer, split: str, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Write the last scores of the averaged weights as `ema/{split}_scores.json` in the output folder.

    Returns the scores in `names` as a column of the model card, by column title. The result is empty without EMA.
    """
    if trainer.average is None:
        return {}
    scores = {name: trainer.averaged_scores[name] for name in names if name in trainer.averaged_scores}
    folder = Path(trainer.args.output_dir) / AVERAGE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{split}_scores.json", scores)
    return {f"averaged weights (`{AVERAGE_FOLDER}/`)": scores}


def score_split(
    trainer: EvaluatorTrainer, split: str, examples: TargetDataset
) -> tuple[dict[str, float], dict[str, str]]:
    """Evaluate a model on a split, on all processes, and write scores and pictures to the output folder.

    Returns the scores, and the file names of the pictures by caption. The scores also remain in the evaluator's
    metric.
    """
    folder, evaluator = Path(trainer.args.output_dir), trainer.evaluator
    scores, lines = trainer.score(examples, split)
    pictures = {evaluator.caption: f"{split}_examples.png"} if evaluator.caption else {}
    for picture in pictures.values():
        draw_examples(trainer, examples, folder / picture)
    if trainer.is_world_process_zero():
        folder.mkdir(parents=True, exist_ok=True)
        if any(lines):
            named = ({"file": file, **line} for file, line in zip(examples.rows["file"], lines, strict=False))
            write_atomically(folder / f"{split}_predictions.jsonl", "".join(f"{json.dumps(line)}\n" for line in named))
        pictures |= write_metrics(folder, split, scores, evaluator) | evaluator.draw_scores(folder, split)
        pictures |= report_calibration(folder, split, evaluator)
    return scores, pictures


def report_calibration(folder: Path, split: str, evaluator: BaseEvaluator, is_fitted: bool = False) -> dict[str, str]:
    """Write calibration scores of a model on a split as JSON and as a picture. Return its file name by its caption.

    The scores are also stored in `evaluator.calibration_scores`. If `is_fitted` is true, the calibration was fitted on
    this split, and its scores are computed by cross-fitting.
    """
    options, data = evaluator.calibration, evaluator.calibration_data()
    evaluator.calibration_scores = {}
    is_scored = not (evaluator.predicts_errors and is_fitted)  # a fitted scale equalizes the means
    if not (options.num_images and is_scored) or data is None or len(data[1]) < LEAST_FITTED:
        return {}
    if evaluator.predicts_errors:
        both = score_errors(data[0] / (options.applied_error_scale or 1), data[1]), score_errors(*data)
    else:
        logits, labels = undo_calibration(data[0], options), data[1]
        after = cross_fitted(logits, labels, evaluator.has_offset) if is_fitted else data[0]
        both = score_calibration(logits, labels), score_calibration(after, labels)
    evaluator.calibration_scores = {name: (both[0][name], both[1][name]) for name in both[0]}
    if evaluator.predicts_errors:
        return {}
    sets = score_sets(logits, labels, options) if logits.ndim == 2 and not is_fitted else {}
    content = {"before": both[0], "after": both[1], "fitted on the same images": is_fitted, "sets": sets}
    name, caption = f"{split}_calibration", "Reliability before and after calibration"
    write_json(folder / f"{name}.json", content)
    pairs = confidences(logits, labels), confidences(after, labels)
    draw_calibration(*pairs, folder / f"{name}.png", evaluator.has_sets)
    return {f"{caption}, and error rate of answered images" if evaluator.has_sets else caption: f"{name}.png"}


def write_metrics(folder: Path, split: str, scores: dict[str, float], evaluator: BaseEvaluator) -> dict[str, str]:
    """Write `{split}_scores.json` and, if there are classes, the scores of each class as JSON and as a picture.

    Returns the file name of the picture by its caption.
    """
    write_json(folder / f"{split}_scores.json", scores)
    classes = evaluator.metric.per_class()
    if not classes:
        return {}
    write_json(folder / f"{split}_{evaluator.parts}.json", classes)
    label = evaluator.class_score
    values = {name: found[label.lower()] for name, found in classes.items()}
    draw_class_scores(values, folder / f"{split}_{evaluator.parts}.png", label)
    return {f"{label} of the {evaluator.parts}": f"{split}_{evaluator.parts}.png"}


def in_columns(classes: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return scores per class, with NaN for missing scores, so that all classes have the same score names."""
    columns = dict.fromkeys(score for scores in classes.values() for score in scores)
    return {name: {score: scores.get(score, math.nan) for score in columns} for name, scores in classes.items()}


def write_json(file: Path, scores: Mapping[str, Any]) -> None:
    """Write scores as JSON, with null in place of NaN."""
    write_atomically(file, json.dumps(null_for_nan(scores), indent=2, allow_nan=False) + "\n")


def null_for_nan(value: Any) -> Any:
    """Return a score, or a mapping of scores, with None in place of NaN."""
    if isinstance(value, Mapping):
        return {name: null_for_nan(score) for name, score in value.items()}
    return None if math.isnan(value) else value


def count_examples(run: Run) -> dict[str, int]:
    """Return the number of examples per split; for a stream, only of the evaluated splits."""
    if run.heads:
        heads = {name: count_examples(head) for name, head in run.heads.items()}
        return {f"{split} of {name}": count for name, own in heads.items() for split, count in own.items()}
    counts = {name: len(rows) for name, rows in run.data.splits.items()}
    if run.data.stream is not None and len(counts) > 1:
        counts.pop("train", None)
    return counts


def describe_targets(run: Run) -> str:
    """Return a description of the linear probe and of values computed from the targets; empty for most tasks."""
    if run.heads:
        texts = {name: describe_targets(head) for name, head in run.heads.items()}
        return "\n".join(f"{name}: {text}" for name, text in texts.items() if text)
    probe = "" if run.probe is None else str(run.probe.probe)
    return "\n".join(filter(None, [probe, run.task.describe_targets(run.trainer, run.data)]))


def describe_threshold(run: Run) -> str:
    """Return a description of the score threshold and how it was chosen."""
    if "validation" not in run.data.splits:
        return "none, because there are no validation images; the caller chooses it"
    chosen = run.trainer.thresholds.get(False)
    if chosen is None:
        return "none, because no score separates correct from wrong predictions on the validation images"
    same = " (see above)" if run.data.evaluated_split == "validation" else ""
    best = f"the best {chosen.measure} ({chosen.quality:.3f})"
    return f"{chosen.value:g}, that of {best} on the validation images{same}"


def describe_recipe(run: Run) -> dict[str, str]:
    """Return the table rows of the model card about settings that are not part of the trainer."""
    task, trainer = run.task, run.trainer
    changes = trainer.conditions.get("changes")
    drawn = None if run.data.stream is None else vars(task.options)["shuffle_buffer_size"]
    return {
        **task.describe_model(trainer.model, trainer.processing_class, run.data, run.args),
        **run.rows,
        "augmentation": describe_values(values_of(task.options, "Augmentation", "Views")),
        **({"score threshold": describe_threshold(run)} if task.chooses_threshold else {}),
        **({} if trainer.distillation is None else trainer.distillation.facts()),
        **({"resumed with changes": " / ".join(changes)} if changes else {}),
        "evaluation": trainer.evaluator.describe_evaluation(),
        **({"training images": f"a stream, each drawn among {drawn:,}"} if drawn else {}),
    }


def evaluate_run(run: Run, split: str) -> tuple[dict[str, float], dict[str, str], dict[str, str]]:
    """Evaluate a model on a split, on all processes, and write scores and pictures to the output folder.

    Returns:
        The scores, the file names of the pictures by caption, and table rows of the model card.
    """
    trainer, rows = run.trainer, {}
    scores, pictures = score_split(trainer, split, run.data.examples(split))
    for name, more in run.task.more_evaluations(trainer, run.data).items():
        with trainer.evaluating_with(more.evaluator, more.collator):
            found, _ = score_split(trainer, name, more.examples)
        scores[f"{name}_{more.score}"] = found[more.score]
        rows[name.replace("_", "-")] = more.description.format(found[more.score])
    return scores, pictures, rows


def write_report(run: Run, warnings: Sequence[str] = (), **facts: Any) -> dict[str, float]:
    """Evaluate a trained model and write scores, pictures and the model card to its output folder.

    The evaluated split is the first existing one of "test", "validation" and "train".

    Args:
        run: A run that has finished training.
        warnings: Sentences about the run for the model card.
        **facts: Fields of `TrainingInfo` that the run does not provide.

    Returns:
        The scores.
    """
    scores, info = report_run(run, warnings, **facts)
    if info is not None:
        write_model_card(Path(run.args.output_dir), info)
    return scores


def report_run(run: Run, warnings: Sequence[str] = (), **facts: Any) -> tuple[dict[str, float], TrainingInfo | None]:
    """Evaluate a trained model and write scores and pictures. Return the scores and the content of the model card.

    The content of the model card is None on all processes except the first.
    """
    task, data, trainer = run.task, run.data, run.trainer
    split, folder = data.evaluated_split, Path(run.args.output_dir)
    scores, pictures, rows = evaluate_run(run, split)
    evaluator = trainer.evaluator
    # computed before the baseline overwrites the metric
    classes, failures = in_columns(evaluator.metric.per_class()), evaluator.find_failures()
    calibration = evaluator.calibration_scores
    baselines = task.evaluate_baselines(trainer, data, split)
    if not trainer.is_world_process_zero():
        return scores, None
    usage, limits, parts = task.card_texts(data)
    (curves,) = CURVES.values()
    draw_curves(trainer.state.log_history, folder / curves)
    described = describe_data(
        task.options.dataset_name,
        task.options.dataset_license,
        count_examples(run),
        split,
        data.names,
        examples=task.examples,
        parts=parts,
        notes=run.notes,
    )
    reference = [*baselines.values()][-1]
    info = TrainingInfo.from_trainer(
        trainer,
        recipe=describe_recipe(replace(run, rows={**run.rows, **rows})),
        task=task.pipeline,
        usage=usage,
        data=described,
        metrics={name: scores[name] for name in reference if not math.isnan(scores[name])},
        baselines={**report_average(trainer, split, scores), **baselines},
        warnings=[*failures, *warnings],
        pictures={**pictures, **CURVES},
        units=evaluator.metric.units,
        parts={evaluator.parts: classes},
        calibration=calibration,
        calibration_note=evaluator.calibration_note,
        limits=limits.format(num_classes=len(data.names), model=trainer.plain_model),
        **describe_training(trainer, split),
        **facts,
    )
    return scores, info
