"""Trainings, evaluations and predictions as one call each from Python, with the options of the command `hf-vit`."""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import Pipeline, PreTrainedModel, pipeline

from .inference.export import export_model
from .inference.predict import predict_files
from .options.names import nearest
from .training.publishing.report import evaluation_split
from .training.run import complete_evaluation, prepare_evaluation
from .training.run import train as run_training
from .training.tasks import TASKS


__all__ = ["TrainingResult", "evaluate", "export_model", "predict", "train"]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class TrainingResult:
    """What a training has come to.

    Args:
        scores: By the names that the training prints; empty after a dry run.
        output_dir: Folder of the saved model, its card, scores and pictures.
        model: As it was saved.
        task: Name of the stock pipeline.
        metric: Which of the scores chooses the best model.
        greater_is_better: Whether more of it is better.
        num_scored: How many examples the scores are of.
    """

    scores: dict[str, float]
    output_dir: Path
    model: PreTrainedModel
    task: str
    metric: str
    greater_is_better: bool
    num_scored: int

    @cached_property
    def pipeline(self) -> Pipeline:
        """The stock pipeline of the saved model, made at its first use: `result.pipeline("photo.jpg")`."""
        return pipeline(self.task, model=str(self.output_dir), device=self.model.device)


def train(
    task: str,
    data: Paths,
    model: str | os.PathLike[str] | None = None,
    *,
    report: Callable[[str], None] = print,
    **options: Any,
) -> TrainingResult:
    """Trains a model, evaluates it and saves it with its card, as `hf-vit train` does.

    Args:
        task: "image-classification", "semantic-segmentation", "universal-segmentation", "depth-estimation",
            "object-detection", "keypoint-detection", "zero-shot-image-classification", "masked-image-modeling" or
            "joint-embedding".
        data: Folder, file, or name on the Hub; several for pretraining.
        model: Saved or published model to start from; by default a new one.
        report: Called with lines of text on how it goes.
        **options: Any option of the command, by the name of its flag: `recipe="cifar10", learning_rate=1e-3`. None
            stands for its default.

    Returns:
        The scores, the folder, the model and its pipeline.

    Raises:
        ValueError: if the task, an option, the data or the model is bad. Nothing is written then.
        OSError: if a file is missing or cannot be written, or an example cannot be read.
        ImportError: if a package is missing.
        FloatingPointError: if the loss becomes infinite or NaN.
    """
    name = task.replace("_", "-")
    if name not in TASKS:
        raise ValueError(f"There is no task {task!r}.{nearest(task, TASKS)} Choose one of {', '.join(TASKS)}.")
    given = {**unguarded(), **with_places(options, model, data)}
    ended = run_training(TASKS[name], given, report, program=("train", name))
    args, splits = ended.task.args, ended.task.loaded.splits
    return TrainingResult(
        ended.scores,
        Path(args.output_dir),
        ended.trainer.model,
        TASKS[name].pipeline,
        metric=str(args.metric_for_best_model).removeprefix("eval_").removeprefix("ema_"),
        greater_is_better=bool(args.greater_is_better),
        num_scored=len(ended.task.loaded.examples(evaluation_split(splits))),
    )


def evaluate(
    model: str | os.PathLike[str], data: Paths, *, report: Callable[[str], None] = print, **options: Any
) -> dict[str, float]:
    """Evaluates a saved model on data of its task, as `hf-vit evaluate` does, and writes scores and pictures.

    Args:
        model: Saved or published model.
        data: Folder, file, or name on the Hub.
        report: Called with lines of text on how it goes.
        **options: Any option of the command, by the name of its flag: `split="validation", output_dir="scores"`.

    Returns:
        The scores by their names.

    Raises:
        ValueError: if an option, the data or the model is bad.
        OSError: if the model or a file is missing, or nothing can be written.
        ImportError: if a package is missing.
    """
    return complete_evaluation(*prepare_evaluation({**unguarded(), **with_places(options, model, data)}), report)


def predict(model: str | os.PathLike[str], images: Paths, **options: Any) -> list[dict[str, Any]]:
    """Predicts image files, as `hf-vit predict` does.

    Args:
        model: Folder of a saved model, or its name on the Hub.
        images: Image file, folder that is searched for them, or several of these.
        **options: Those of `hf_vit.inference.predict.predict_files`: `threshold`, `output_dir`, `picture` and so on.

    Returns:
        For each image a dict with its `file` and what is predicted, or the `error` of a file that cannot be read.

    Raises:
        OSError: if there is no such model or file.
        ValueError: if there is no image, or an option does not fit the model.
        TypeError: if there is no such option.
    """
    places = [Path(place) for place in as_list(images)]
    files = ("output_dir", "picture", "boxes")
    given: dict[str, Any] = {
        name: Path(value) if name in files and value is not None else value for name, value in options.items()
    }
    return list(predict_files(os.fspath(model), places, **given))


def as_list(paths: Paths) -> list[str]:
    """Returns one or several paths as a list of text."""
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    return [os.fspath(path) for path in several]


def with_places(options: Mapping[str, Any], model: str | os.PathLike[str] | None, data: Paths) -> dict[str, Any]:
    """Returns options with model and data; raises `ValueError` if one is given twice."""
    places = {"model_name_or_path": model, "dataset_name": data[0] if len(data := as_list(data)) == 1 else data}
    if twice := [name for name in places if name in options]:
        raise ValueError(f"{twice[0]} is given by model or data already. Leave it out.")
    return {**options, **places}


def unguarded() -> dict[str, Any]:
    """Returns options for a caller who may not have guarded the main module, as processes that are spawned need it."""
    default, *_ = multiprocessing.get_all_start_methods()
    method = multiprocessing.get_start_method(allow_none=True) or default
    return {} if method == "fork" else {"dataloader_num_workers": 0}
