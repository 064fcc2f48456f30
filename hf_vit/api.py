"""One Python function for each command of `hf-vit`, with its options; `hf_vit.pretraining` contains `pretrain`."""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import Pipeline, PreTrainedModel, pipeline

from .auditing.audit import audit
from .auditing.selection import select
from .convert.convert_model import convert_model
from .features.evaluation import evaluate_folders as evaluate_features
from .features.extraction import extract_from_options
from .inference.export import export_model
from .inference.predict import predict_files
from .inference.search import search_images as search
from .inference.serving import serve_models as serve
from .inference.visualization import visualize_model
from .options.names import nearest
from .runs.calibrate import calibrate
from .runs.evaluate import complete_evaluation, prepare_evaluation
from .runs.info import info
from .runs.push import push
from .runs.run import train as run_training
from .tasks import TASKS


__all__ = ["TrainingResult", "audit", "calibrate", "convert_model", "evaluate", "evaluate_features", "export_model"]
__all__ += ["extract_features", "info", "predict", "push", "search", "select", "serve", "train", "visualize_model"]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run.

    Args:
        scores: Evaluation scores by name; empty after a dry run.
        output_dir: Folder of the saved model, its card, scores and figures.
        model: The saved model.
        task: Name of the pipeline task.
        metric: Name of the score that selects the best checkpoint.
        greater_is_better: Whether higher values of `metric` are better.
        num_scored: Number of examples that were evaluated.
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
        """Pipeline of the saved model, created on first access: `result.pipeline("photo.jpg")`."""
        return pipeline(self.task, model=str(self.output_dir), device=self.model.device)


def train(
    task: str,
    data: Paths | Mapping[str, Any],
    model: str | os.PathLike[str] | None = None,
    *,
    report: Callable[[str], None] = print,
    **options: Any,
) -> TrainingResult:
    """Train a model, evaluate it and save it with its card. Equivalent to `hf-vit train`.

    Args:
        task: "image-classification", "semantic-segmentation", "universal-segmentation", "depth-estimation",
            "object-detection", "keypoint-detection", "zero-shot-image-classification", "masked-image-modeling",
            "joint-embedding" or "multi-task".
        data: Folder, file, or dataset name on the Hub; a list of these for pretraining. For "multi-task", the data or
            options of each head by its name.
        model: Saved or published model to start from; by default a new model.
        report: Function that receives progress messages.
        **options: Options of `hf-vit train` by name, such as `recipe="cifar10", learning_rate=1e-3`. None selects
            the default.

    Returns:
        The scores, the output folder, the model and its pipeline.

    Raises:
        ValueError: if the task, an option, the data or the model is invalid. Nothing is written in this case.
        OSError: if a file is missing or cannot be written, or an example cannot be read.
        ImportError: if a package is missing.
        FloatingPointError: if the loss becomes infinite or NaN.
    """
    name = task.replace("_", "-")
    if name not in TASKS:
        raise ValueError(f"There is no task {task!r}.{nearest(task, TASKS)} Choose one of {', '.join(TASKS)}.")
    if isinstance(data, Mapping):
        given = {**options, "tasks": dict(data), **({} if model is None else {"model_name_or_path": model})}
    else:
        given = with_model_and_data(options, model, data)
    given = {**options_without_workers(), **given}
    ended = run_training(TASKS[name], given, report, program=("train", name))
    args, used = ended.run.args, ended.run.data
    return TrainingResult(
        ended.scores,
        Path(args.output_dir),
        ended.run.trainer.model,
        TASKS[name].pipeline,
        metric=str(args.metric_for_best_model).removeprefix("eval_").removeprefix("ema_"),
        greater_is_better=bool(args.greater_is_better),
        num_scored=len(used.examples(used.evaluated_split)),
    )


def evaluate(
    model: str | os.PathLike[str], data: Paths, *, report: Callable[[str], None] = print, **options: Any
) -> dict[str, float]:
    """Evaluate a saved model and write scores and figures. Equivalent to `hf-vit evaluate`.

    Args:
        model: Folder of a saved model, or name of a model on the Hub.
        data: Folder, file, or dataset name on the Hub, with targets for the task of the model.
        report: Function that receives progress messages.
        **options: Options of `hf-vit evaluate` by name, such as `split="validation", output_dir="scores"`.

    Returns:
        The scores by name.

    Raises:
        ValueError: if an option, the data or the model is invalid.
        OSError: if the model or a file is missing, or results cannot be written.
        ImportError: if a package is missing.
    """
    evaluation = prepare_evaluation({**options_without_workers(), **with_model_and_data(options, model, data)})
    return complete_evaluation(evaluation, report)


def predict(model: str | os.PathLike[str], images: Paths, **options: Any) -> list[dict[str, Any]]:
    """Predict labels, segments, depth, objects or keypoints of image files. Equivalent to `hf-vit predict`.

    Args:
        model: Folder of a saved model, or its name on the Hub.
        images: Image, video, http(s) URL, folder that is searched for images, or a list of these.
        **options: Options of `hf_vit.inference.predict.predict_files`, such as `threshold`, `output_dir` or `picture`.

    Returns:
        A dict for each image or frame with its `file` and the prediction, or an `error` if the file cannot be read.

    Raises:
        OSError: if the model or a file does not exist.
        ValueError: if there is no image, or an option does not apply to the model.
        TypeError: if an option is unknown.
    """
    files = ("output_dir", "picture", "boxes")
    given: dict[str, Any] = {
        name: Path(value) if name in files and value is not None else value for name, value in options.items()
    }
    return list(predict_files(os.fspath(model), as_list(images), **given))


def extract_features(
    model: str | os.PathLike[str], data: Paths, *, report: Callable[[str], None] = print, **options: Any
) -> dict[str, int]:
    """Write the features of images to parquet files. Equivalent to `hf-vit features extract`.

    Args:
        model: Folder of a saved model, or name of a model on the Hub.
        data: Folder, file, or dataset name on the Hub, or a list of these.
        report: Function that receives progress messages.
        **options: Options of `hf-vit features extract` by name, such as `features=["cls"], output_dir="features"`.

    Returns:
        The number of images of each split.

    Raises:
        ValueError: if an option, the data or the model is invalid, or the folder has features with other settings.
        OSError: if the model or a file is missing, or an image cannot be read.
    """
    return extract_from_options(with_model_and_data(options, model, data), report)


def as_list(paths: Paths) -> list[str]:
    """Return a path, or a sequence of paths, as a list of strings."""
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    return [os.fspath(path) for path in several]


def with_model_and_data(
    options: Mapping[str, Any], model: str | os.PathLike[str] | None, data: Paths
) -> dict[str, Any]:
    """Return the options with `model` and `data` added; raise `ValueError` if the options already contain them."""
    places = {"model_name_or_path": model, "dataset_name": data[0] if len(data := as_list(data)) == 1 else data}
    if twice := [name for name in places if name in options]:
        raise ValueError(f"{twice[0]} is already set by the arguments model and data. Remove this option.")
    return {**options, **places}


def options_without_workers() -> dict[str, Any]:
    """Return options that disable data loader workers unless processes are forked.

    Spawned workers would require a `__main__` guard in the user's script.
    """
    default, *_ = multiprocessing.get_all_start_methods()
    method = multiprocessing.get_start_method(allow_none=True) or default
    return {} if method == "fork" else {"dataloader_num_workers": 0}
