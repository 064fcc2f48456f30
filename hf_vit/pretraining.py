"""Pretraining on unlabeled images, and measurement of the gain for a task with labeled images."""

import gc
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from transformers import PreTrainedConfig

from .api import Paths, TrainingResult, as_list, train
from .options.resolve import convert
from .options.training_arguments import MINUTES
from .outputs import FolderState, file_name, find_folder_state, free_folder
from .tasks import TASKS
from .tasks.unlabeled import UnlabeledTask


__all__ = ["PretrainingResult", "pretrain"]
METHODS = ("joint-embedding", "masked-image-modeling")
LABELED_TASKS = tuple(name for name, task in TASKS.items() if not issubclass(task, UnlabeledTask))
PRETRAINING_SHARE = 0.6  # fraction of the time for pretraining; baseline and fine-tuning share the rest equally
GEOMETRY = ("image_size", "patch_size")  # configuration fields that the tuned model copies from the baseline
REFUSED = ("model_name_or_path", "preset", "whiten_patches")  # options that do not apply to all three training runs
PRETRAINING_ONLY = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")  # apply to pretraining only
CHANCE = 2.0  # number of standard errors; smaller differences between two models may be due to chance
DEFAULT_TASK = "image-classification"


@dataclass(frozen=True)
class PretrainingResult:
    """Results of pretraining and of the two fine-tuning runs that measure its gain.

    Args:
        encoder: Result of pretraining. Any task can start from its `output_dir`.
        tuned: Result of fine-tuning the encoder on labeled images; None without labels.
        baseline: Result of training for the same time without pretraining; None without labels.
    """

    encoder: TrainingResult
    tuned: TrainingResult | None = None
    baseline: TrainingResult | None = None

    @property
    def gain(self) -> float | None:
        """Improvement of the main score by pretraining in points (times 100); None without labels."""
        if self.tuned is None or self.baseline is None:
            return None
        tuned, baseline = (run.scores[run.metric] for run in (self.tuned, self.baseline))
        return 100 * (tuned - baseline) * (1 if self.tuned.greater_is_better else -1)

    @property
    def best(self) -> TrainingResult | None:
        """The better result of `tuned` and `baseline`; None without labels."""
        return None if self.gain is None else self.tuned if self.gain >= 0 else self.baseline


def pretrain(
    data: Paths,
    labels: str | os.PathLike[str] | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    task: Annotated[str | None, LABELED_TASKS] = None,
    method: Annotated[str, METHODS] = "joint-embedding",
    minutes: float = 60.0,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    seed: int = 42,
    report: Callable[[str], None] = print,
    **options: Any,
) -> PretrainingResult:
    """Pretrain on images, and compare fine-tuning with and without pretraining. Equivalent to `hf-vit pretrain`.

    Args:
        data: Folder, file, or dataset name on the Hub, or a list of these, whose images are combined.
        labels: Folder, file, or dataset name of labeled images; by default `data`, if it has labels.
        model: Saved or published model from which pretraining and the baseline start; by default a new model.
        task: Task of the labels; image-classification by default.
        method: "joint-embedding" (LeJEPA) or "masked-image-modeling" (MAE).
        minutes: Total time: 3/5 for pretraining, 1/5 for fine-tuning and 1/5 for the baseline.
        output_dir: Folder for `encoder`, `tuned` and `baseline`; by default a new folder in `outputs`.
        resume: Resume the training runs in `output_dir`.
        seed: Random seed of all three training runs.
        report: Function that receives progress messages.
        **options: Options of all three training runs, such as `bf16`; LoRA options apply to pretraining only.

    Returns:
        The results of the three training runs.

    Raises:
        ValueError: if an option, the data or the labels are invalid, before any training starts.
        OSError: if a file is missing or cannot be written, or an image cannot be read.
    """
    adapted = {name: options.pop(name) for name in PRETRAINING_ONLY if name in options}
    options["seed"] = seed
    check(task, method, minutes, options, [] if model else [*adapted])
    first = file_name(as_list(data)[0])
    folder = place(output_dir, first, resume)
    known = data if labels is None else labels
    dry_run = partial(train, **{"max_steps": 1, "model": model, **options})
    has_labels = find_labels(task, method, data, labels, dry_run, report)
    task = task or DEFAULT_TASK
    shared, longest = (1 - PRETRAINING_SHARE) / 2 * minutes, PRETRAINING_SHARE * minutes
    run: Callable[..., TrainingResult] = partial(train, report=report, **options)
    baseline = tuned = None
    if has_labels:
        report(f"Baseline without pretraining: {task} from {model or 'scratch'}, {shared:g} min.")
        baseline = run(task, known, minutes=shared, model=model, **outputs_of(folder / "baseline"))
    report(f"Pretraining: {method} on {first}, {longest:g} min.")
    encoder = run(method, data, minutes=longest, model=model, **adapted, **outputs_of(folder / "encoder"))
    if baseline is not None:
        report(f"Fine-tuning: {task} from the encoder, {shared:g} min.")
        start = {"model": encoder.output_dir, "config_overrides": with_geometry_of(options, baseline.model.config)}
        tuned = run(task, known, minutes=shared, **start, **outputs_of(folder / "tuned"))
    result = PretrainingResult(encoder, tuned, baseline)
    report(describe(result))
    return result


def outputs_of(folder: Path) -> dict[str, Any]:
    """Return the option of the output folder of a training run and, if it has checkpoints, the option to resume it."""
    gc.collect()  # ends data loader workers of the previous run, which would slow this run down
    resumed = {"resume_from_checkpoint": "last"} if any(folder.glob("checkpoint-*")) else {}
    return {"output_dir": folder, **resumed}


def check(task: str | None, method: str, minutes: float, options: Mapping[str, Any], without_model: list[str]) -> None:
    """Raise `ValueError` for invalid arguments, and for options that do not apply to all three training runs."""
    if without_model:
        raise ValueError(f"{without_model[0]} adapts a trained model, but none is given. Set model to a trained one.")
    if method not in METHODS:
        raise ValueError(f"There is no method {method!r}. Choose one of {', '.join(METHODS)}.")
    if task is not None and task.replace("_", "-") in METHODS:
        raise ValueError(f"{task} uses no labels, so it cannot measure the gain of pretraining. Choose another task.")
    if minutes not in MINUTES:
        raise ValueError(f"minutes={minutes} must {MINUTES}. A usual value is 60.")
    if refused := [name for name in REFUSED if options.get(name)]:
        raise ValueError(
            f"{refused[0]} does not apply to all three training runs. Remove it, and use model and config_overrides "
            f"to choose the model; or call hf_vit.train for {method!r} and then for a task."
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"The three training runs need a single process. To use several processes, run torchrun … -m hf_vit "
            f"train {method} DATA, and then train with labels in the same way."
        )


def place(output_dir: str | os.PathLike[str] | None, name: str, resume: bool) -> Path:
    """Return the output folder of all three training runs.

    Raises:
        ValueError: if the folder is empty with `resume`, or not empty without `resume`.
        OSError: if the folder is not writable.
    """
    folder = Path(output_dir) if output_dir is not None else free_folder(Path("outputs") / f"{name}-pretraining")
    state, reason = find_folder_state(folder)
    if state is FolderState.UNWRITABLE:
        raise OSError(reason)
    if resume == (state is FolderState.FREE):
        fault = "has nothing to resume: leave out resume" if resume else "is not empty: choose another, or set resume"
        raise ValueError(f"output_dir={folder} {fault}.")
    return folder


def find_labels(
    task: str | None, method: str, data: Paths, labels: Any, run: Callable[..., object], report: Callable[[str], None]
) -> bool:
    """Return whether labeled images are available; raise the errors of `train` if an argument is invalid."""
    dry_run = partial(run, dry_run=True, report=lambda _: None)
    if labels is not None:  # Checks `data` before the baseline starts, because pretraining opens it only afterwards.
        dry_run(method, data)
    try:
        dry_run(task or DEFAULT_TASK, data if labels is None else labels)
    except ValueError as error:
        if task is not None or labels is not None:
            raise
        report(f"No labels found, so only the encoder is trained. {error}")
        return False
    return True


def with_geometry_of(options: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Return the `config_overrides` in `options`. If image or patch size are not given, add those of `config`."""
    fields = convert("config_overrides", options.get("config_overrides") or {}, dict)
    settled = {*fields, *(name for name, value in options.items() if value is not None)}
    return {**{name: vars(config)[name] for name in GEOMETRY if name not in settled}, **fields}


def describe(result: PretrainingResult) -> str:
    """Return a message with the encoder and, if known, the gain, its uncertainty and the recommended model."""
    encoder = f"Encoder, usable as --model_name_or_path of any task: {result.encoder.output_dir}"
    if result.tuned is None or result.baseline is None or result.gain is None or result.best is None:
        return encoder
    name, count = result.tuned.metric, result.tuned.num_scored
    one, other = result.tuned.scores[name], result.baseline.scores[name]
    chance = ""
    if name == "accuracy":  # Accuracy is a mean over images, so its standard error can be computed.
        deviation = math.sqrt((one * (1 - one) + other * (1 - other)) / count)
        chance = f", on {count:,} images (differences below {100 * CHANCE * deviation:.1f} points may be chance)"
    verdict = "helped by" if result.gain >= 0 else "cost"
    return (
        f"Pretraining on your images {verdict} {abs(result.gain):.1f} points: {name} {one:.4f} with it, {other:.4f} "
        f"without{chance}.\nRecommended model: {result.best.output_dir}\n{encoder}"
    )
