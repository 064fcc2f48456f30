"""Reports on training runs and evaluations: scores, pictures, predictions and facts for the model card."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from ...data.datasets import DatasetInfo, TargetDataset
from ...evaluation.base import BaseEvaluator, Evaluator
from ...evaluation.calibration import (
    LEAST_FITTED,
    confidences,
    cross_fitted,
    score_calibration,
    score_errors,
    score_sets,
)
from ...model.calibration import undo_calibration
from ...options.recipe import RECIPE_NAME
from ...outputs import write_atomically
from ...visualize.plots import draw_calibration, draw_class_scores
from ..arguments import split_sources
from ..evaluator_trainer import EvaluatorTrainer, draw_examples
from ..models import shorten
from ..output_folder import AVERAGE_FOLDER
from ..trainer import HfViTTrainer
from .model_card import TrainingInfo


PARTS_OF_DATA = {
    "train",
    "training",
    "val",
    "validation",
    "test",
    "images",
    "data",
}  # generic names of dataset folders
MAX_BASELINE_IMAGES = 5000  # maximum number of training images for the naive baseline


def evaluation_split(splits: Iterable[str]) -> str:
    """Return the split of the final evaluation: the first existing one of "test", "validation" and "train"."""
    return next(name for name in ("test", "validation", "train") if name in splits)


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


def public_name(source: str) -> str:
    """Return the public name of a dataset: its name on the Hub, or the name of its file or folder without the path.

    Generic names such as `train/images` are prefixed with the parent folder, unless the parent is the home folder or
    the working directory, whose names are private.
    """
    if not Path(source).exists():
        return source
    place = Path(source).resolve()
    private = {above for folder in (Path.home(), Path.cwd()) for above in (folder, *folder.parents)}
    above = place
    while above.name.lower() in PARTS_OF_DATA and above.parent not in private:
        above = above.parent
    return place.relative_to(above.parent).as_posix()


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


def describe_weights(weights: Mapping[str, float]) -> str:
    """Return the nonzero weights of the terms of a loss as one line of text."""
    return ", ".join(f"{name} x {weight:g}" for name, weight in weights.items() if weight)


def describe_values(values: Mapping[str, Any]) -> str:
    """Return the values of options as one line of text."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


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


def score_naive_baseline(
    trainer: EvaluatorTrainer, train: TargetDataset, evaluated: TargetDataset, most: int = MAX_BASELINE_IMAGES
) -> tuple[str, dict[str, float]]:
    """Evaluate the best constant predictor, which ignores images. Return its name and scores.

    The predictor is computed from at most `most` evenly spaced training images. All processes share the work. The
    scores also remain in the metric.
    """
    evaluator, args = trainer.evaluator, trainer.args
    assert isinstance(evaluator, Evaluator)
    shows = args.local_process_index == 0 and not args.disable_tqdm
    count = len(train)
    if count > most:
        train = train.select(np.linspace(0, count - 1, most).round().astype(int).tolist())
    name, predict = evaluator.naive_baseline(train.read_targets(shows))
    share = evaluated.select(range(args.process_index, len(evaluated), args.world_size))
    records = [evaluator.metric.record(predict(target), target) for target in share.read_targets(shows)]
    evaluator.metric.reset()
    evaluator.metric.update(gather_object(records))
    return f"{name} (of {most:,} training images)" if count > most else name, evaluator.metric.compute()
