"""What is left of a trained or evaluated model beside its weights: scores, pictures, predictions and the card."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from transformers import EvalPrediction
from transformers.trainer_utils import PredictionOutput

from ...data import DatasetInfo, TargetData, TargetDataset
from ...evaluation import ConfusionMatrix
from ...evaluation.classification import image_classification_metrics
from ...evaluation.evaluator import BaseEvaluator, Evaluator
from ...visualize import draw_class_scores, draw_confusion_matrix, draw_curves
from ..callbacks.ema import AVERAGE_FOLDER
from ..evaluator_trainer import EvaluatorTrainer, draw_examples
from ..trainer import HfViTTrainer
from .model_card import TrainingInfo, write_model_card
from .record import describe_training, scored_split


def report_average(trainer: HfViTTrainer, split: str, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Writes the scores that averaged weights have just got as `ema/{split}_scores.json` of the output folder.

    Args:
        trainer: Has scored a split, at last.
        split: Name of the split.
        names: Of the scores.

    Returns:
        These scores as a column of a model card, by its title; nothing where no weights are averaged.
    """
    if trainer.average is None:
        return {}
    scores = {name: trainer.averaged_scores[name] for name in names}
    folder = Path(trainer.args.output_dir) / AVERAGE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    known = {name: None if math.isnan(score) else score for name, score in scores.items()}
    (folder / f"{split}_scores.json").write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    return {f"averaged weights (`{AVERAGE_FOLDER}/`)": scores}


def write_scores(
    folder: Path, split: str, output: PredictionOutput, names: list[str], files: Iterable[str]
) -> dict[str, float]:
    """Writes the scores of a classifier on a split, its confusion matrix, and its answers.

    Args:
        folder: Where to write `{split}_scores.json`, `{split}_confusion_matrix.json` and `.png`, and
            `{split}_predictions.jsonl` with a line per image.
        split: Name of the split.
        output: What `trainer.predict` returned: logits (N, K) and labels (N,).
        names: The K class names.
        files: What each of the N images is called.

    Returns:
        The scores, see `image_classification_metrics`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logits = np.asarray(output.predictions, dtype=np.float64)
    probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    answers, labels = logits.argmax(axis=1), np.asarray(output.label_ids)
    matrix = ConfusionMatrix(keep_in_memory=True).compute(
        predictions=answers, references=labels, num_labels=len(names)
    )["confusion_matrix"]
    lines = (
        {"file": file, "label": names[label], "prediction": names[answer], "score": round(scores[answer], 6)}
        for file, label, answer, scores in zip(files, labels, answers, probabilities.tolist(), strict=True)
    )
    scores = image_classification_metrics(EvalPrediction(output.predictions, output.label_ids))
    for name, text in {
        f"{split}_scores.json": json.dumps(scores, indent=2) + "\n",
        f"{split}_confusion_matrix.json": json.dumps({"labels": names, "confusion_matrix": matrix.tolist()}) + "\n",
        f"{split}_predictions.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    draw_confusion_matrix(matrix, names, folder / f"{split}_confusion_matrix.png")
    return scores


MAX_TRIVIAL = 5000


def write_scored_report(
    trainer: EvaluatorTrainer,
    data: TargetData,
    describe: Callable[[str], DatasetInfo],
    recipe: dict[str, str],
    **facts: Any,
) -> dict[str, float]:
    """Scores a trained model and writes the scores, pictures and model card into its output folder.

    The split that is scored is "test", else "validation", else "train".

    Args:
        trainer: Has finished its training.
        data: What it was trained on.
        describe: Says of the data what the card shall say, given the split that is scored.
        recipe: Settings to name in the card beside those that trainer and evaluator know.
        **facts: Fields of the card's `TrainingInfo` that the trainer does not tell.

    Returns:
        The scores.
    """
    split = scored_split(list(data.splits))
    folder, evaluator, examples = Path(trainer.args.output_dir), trainer.evaluator, data.examples(split)
    scores, pictures = score_split(trainer, split, examples)
    parts = {evaluator.parts: in_columns(evaluator.per_class())}
    name, baseline = score_naive_baseline(trainer, data.examples("train"), examples)
    if not trainer.is_world_process_zero():
        return scores
    draw_curves(trainer.state.log_history, folder / "curves.png")
    record = TrainingInfo.from_trainer(
        trainer,
        data=describe(split),
        metrics={name: scores[name] for name in baseline if not math.isnan(scores[name])},
        units=evaluator.metric.units,
        baselines={**report_average(trainer, split, scores), name: baseline},
        parts=parts,
        pictures={**pictures, "Loss, validation scores and learning rate": "curves.png"},
        limits=evaluator.describe_limits(),
        recipe={**recipe, "evaluation": evaluator.describe_evaluation()},
        **describe_training(trainer, split),
        **facts,
    )
    write_model_card(folder, record)
    return scores


def score_split(
    trainer: EvaluatorTrainer, split: str, examples: TargetDataset
) -> tuple[dict[str, float], dict[str, str]]:
    """Scores a model on a split, on all processes, and writes scores and pictures into the output folder.

    Args:
        trainer: Has the model and the evaluator, which has the scores afterwards.
        split: Name of the split.
        examples: Its images.

    Returns:
        The scores, and the file names of the pictures by their captions.
    """
    folder, evaluator = Path(trainer.args.output_dir), trainer.evaluator
    metrics = trainer.predict(examples, metric_key_prefix=split).metrics
    scores = {name: metrics[f"{split}_{name}"] for name in ("loss", *evaluator.metric.score_names)}
    draw_examples(trainer, examples, folder / f"{split}_examples.png")
    pictures = {evaluator.caption: f"{split}_examples.png"}
    if trainer.is_world_process_zero():
        pictures |= write_metrics(folder, split, scores, evaluator) | evaluator.draw_scores(folder, split)
    return scores, pictures


def write_metrics(folder: Path, split: str, scores: dict[str, float], evaluator: BaseEvaluator) -> dict[str, str]:
    """Writes `{split}_scores.json` and, where there are classes, their scores as JSON and as a picture.

    Returns:
        The file name of the picture by its caption.
    """
    write_json(folder / f"{split}_scores.json", {name: known(value) for name, value in scores.items()})
    classes = evaluator.per_class()
    if not classes:
        return {}
    write_json(
        folder / f"{split}_{evaluator.parts}.json",
        {name: {score: known(value) for score, value in values.items()} for name, values in classes.items()},
    )
    label, values = (
        evaluator.class_score,
        {name: values[evaluator.class_score.lower()] for name, values in classes.items()},
    )
    draw_class_scores(values, folder / f"{split}_{evaluator.parts}.png", label)
    return {f"{label} of the {evaluator.parts}": f"{split}_{evaluator.parts}.png"}


def in_columns(classes: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns scores of each class that are the same ones for all, NaN where a class has none."""
    columns = dict.fromkeys(score for scores in classes.values() for score in scores)
    return {name: {score: scores.get(score, math.nan) for score in columns} for name, scores in classes.items()}


def write_json(file: Path, content: Any) -> None:
    """Writes what JSON can hold."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def known(value: float) -> float | None:
    """Returns a score as JSON has it: there is no NaN."""
    return None if math.isnan(value) else value


def score_naive_baseline(
    trainer: EvaluatorTrainer, train: TargetDataset, scored: TargetDataset, most: int = MAX_TRIVIAL
) -> tuple[str, dict[str, float]]:
    """Scores the best predictor that does not look at images; the evaluator's metric has its scores afterwards.

    Every process reads the same training targets and its share of those that are scored: none waits long for another.

    Args:
        trainer: Has the evaluator.
        train: What the predictor learns from.
        scored: What it is scored on.
        most: Of how many training images it learns at most, spread evenly.

    Returns:
        What to call the predictor, and its scores.
    """
    evaluator, args = trainer.evaluator, trainer.args
    assert isinstance(evaluator, Evaluator)
    shows = args.local_process_index == 0 and not args.disable_tqdm
    count = len(train)
    if count > most:
        train = train.select(np.linspace(0, count - 1, most).round().astype(int).tolist())
    name, predict = evaluator.naive_baseline(train.read_targets(shows))
    share = scored.select(range(args.process_index, len(scored), args.world_size))
    records = [evaluator.metric.record(predict(target), target) for target in share.read_targets(shows)]
    evaluator.metric.reset()
    evaluator.metric.update(gather_object(records))
    return f"{name} (of {most:,} training images)" if count > most else name, evaluator.metric.compute()
