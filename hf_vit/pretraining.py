"""Pretrains an encoder on one's own images, and measures what that is worth with the labels they have."""

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
from .outputs import FolderState, free_folder, judge_folder
from .training.tasks import TASKS
from .training.tasks.base import file_name
from .training.tasks.unlabeled import UnlabeledTask
from .training.training_arguments import MINUTES


__all__ = ["PretrainingResult", "pretrain"]
METHODS = tuple(name for name, task in TASKS.items() if issubclass(task, UnlabeledTask))
LABELED_TASKS = tuple(name for name in TASKS if name not in METHODS)
PRETRAINING_SHARE = 0.6  # of the time; with and without it, models are fine-tuned for equal shares of the rest
GEOMETRY = ("image_size", "patch_size")  # which an encoder takes over from the model that it is compared with
REFUSED = ("model_name_or_path", "preset", "whiten_patches")  # which do not apply to all three trainings
ADAPTED = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")  # only for the pretraining
CHANCE = 2.0  # standard errors that two equally good models may lie apart
DEFAULT_TASK = "image-classification"


@dataclass(frozen=True)
class PretrainingResult:
    """An encoder, and what it is worth.

    Args:
        encoder: The pretraining; its `output_dir` is what any task starts from.
        tuned: A training with labels that started from the encoder; None without labels.
        baseline: One of the same time without the pretraining; None without labels.
    """

    encoder: TrainingResult
    tuned: TrainingResult | None = None
    baseline: TrainingResult | None = None

    @property
    def gain(self) -> float | None:
        """By how much pretraining made the main score better, in points of it times 100; None without labels."""
        return None if self.tuned is None or self.baseline is None else gain_of(self.tuned, self.baseline)

    @property
    def best(self) -> TrainingResult | None:
        """The better one of the two models that were trained with labels; None without them."""
        return None if self.gain is None else self.tuned if self.gain >= 0 else self.baseline


def gain_of(tuned: TrainingResult, baseline: TrainingResult) -> float:
    """Return by how much one training has a better main score than another, in points of it times 100."""
    difference = 100 * (tuned.scores[tuned.metric] - baseline.scores[tuned.metric])
    return difference if tuned.greater_is_better else -difference


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
    """Trains with labels, pretrains on images, trains with labels from there, as `hf-vit pretrain` does.

    Args:
        data: Folder, file, or name on the Hub; several for more images.
        labels: The same of the images with labels; by default `data`, if labels are found there.
        model: Saved or published model to start from, in the first training too; by default a new one.
        task: What to train with them; classes of images by default.
        method: "joint-embedding" (LeJEPA) or "masked-image-modeling" (MAE).
        minutes: Time for all of it: 3/5 of it for pretraining, 1/5 for each of the other two.
        output_dir: Folder for `encoder`, `tuned` and `baseline`; by default a new one below `outputs`.
        resume: Go on with what has begun in `output_dir`.
        seed: Of all three trainings.
        report: Called with lines of text on how it goes.
        **options: Of all three trainings, by the names of their flags: `bf16`, `use_cpu`; `lora_rank` of one.

    Returns:
        The three trainings.

    Raises:
        ValueError: if an option, the data or the labels are bad, before anything is trained.
        OSError: if a file is missing or cannot be written, or an image cannot be read.
    """
    adapted = {name: options.pop(name) for name in ADAPTED if name in options}
    options["seed"] = seed
    check(task, method, minutes, options, [] if model else [*adapted])
    first = file_name(as_list(data)[0])
    folder = place(output_dir, first, resume)
    known = data if labels is None else labels
    dry_run = partial(train, **{"max_steps": 1, "model": model, **options})
    has_labels = find_labels(task, method, data, labels, dry_run, report)
    task = task or DEFAULT_TASK
    shared = (1 - PRETRAINING_SHARE) / 2 * minutes
    run = partial(train_part, partial(train, report=report, **options), folder)
    if has_labels:
        report(f"With labels, for comparison: {task} from {model or 'scratch'}, {shared:g} min.")
    baseline = run("baseline", task, known, shared, model=model) if has_labels else None
    report(f"Pretraining: {method} on {first}, {PRETRAINING_SHARE * minutes:g} min.")
    encoder = run("encoder", method, data, PRETRAINING_SHARE * minutes, model=model, **adapted)
    if baseline is None:
        report(f"The encoder, for the --model_name_or_path of any task: {encoder.output_dir}")
        return PretrainingResult(encoder)
    report(f"With labels: {task} from the encoder, {shared:g} min.")
    fields = keep_geometry(options, baseline.model.config)
    tuned = run("tuned", task, known, shared, model=encoder.output_dir, config_overrides=fields)
    report(describe_gain(encoder, tuned, baseline))
    return PretrainingResult(encoder, tuned, baseline)


def train_part(
    run: Callable[..., TrainingResult], folder: Path, name: str, task: str, data: Paths, minutes: float, **given: Any
) -> TrainingResult:
    """Run one of the three trainings, or resume it.

    Args:
        run: Trains with the options of all three.
        folder: Output folder of all three.
        name: Its own folder in that of all.
        task: What to train.
        data: On which images.
        minutes: Its time.
        **given: Further options of this one.
    """
    gc.collect()  # waits for what has read images for the training before, outside of the time of this one
    resumed = {"resume_from_checkpoint": "last"} if any((folder / name).glob("checkpoint-*")) else {}
    return run(task, data, output_dir=folder / name, minutes=minutes, **given, **resumed)


def check(task: str | None, method: str, minutes: float, options: Mapping[str, Any], without_model: list[str]) -> None:
    """Raises `ValueError` if something is asked for that there is not, or that not all three trainings can do."""
    if without_model:
        raise ValueError(f"{without_model[0]} changes a model that has learned already. Give it as model.")
    if method not in METHODS:
        raise ValueError(f"There is no method {method!r}. Choose one of {', '.join(METHODS)}.")
    if task is not None and task.replace("_", "-") in METHODS:
        raise ValueError(f"{task} has no labels that could tell what pretraining is worth: give another task.")
    if minutes not in MINUTES:
        raise ValueError(f"minutes={minutes} must {MINUTES}. 60 is usual.")
    if refused := [name for name in REFUSED if options.get(name)]:
        raise ValueError(
            f"{refused[0]} does not apply to all three trainings. Leave it out; give a saved or published model as "
            f"model and sizes as config_overrides, or call hf_vit.train for {method!r} and for a task."
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"Three trainings in a row run in one process. On several: torchrun … -m hf_vit train {method} DATA, and "
            "the trainings with labels after it."
        )


def place(output_dir: str | os.PathLike[str] | None, name: str, resume: bool) -> Path:
    """Returns the folder to write to; `ValueError` if it is not new, or if it is and the training is to go on."""
    folder = Path(output_dir) if output_dir is not None else free_folder(Path("outputs") / f"{name}-pretraining")
    state, reason = judge_folder(folder)
    if state is FolderState.UNWRITABLE:
        raise OSError(reason)
    if resume == (state is FolderState.FREE):
        fault = "has nothing to resume: leave resume out" if resume else "is not empty: give another, or set resume"
        raise ValueError(f"output_dir={folder} {fault}.")
    return folder


def find_labels(
    task: str | None, method: str, data: Paths, labels: Any, run: Callable[..., object], report: Callable[[str], None]
) -> bool:
    """Return whether there are labels to compare by; raise as `train` if `task`, `data` or `labels` is bad."""
    dry_run = partial(run, dry_run=True, report=lambda _: None)
    if labels is not None:  # which are trained on before these images would be opened
        dry_run(method, data)
    try:
        dry_run(task or DEFAULT_TASK, data if labels is None else labels)
    except ValueError as error:
        if task is not None or labels is not None:
            raise
        report(f"No labels to compare by, so that the encoder alone is trained. {error}")
        return False
    return True


def keep_geometry(options: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the `config_overrides` that are given, and with them the geometry of a model unless that is given."""
    fields = convert("config_overrides", options.get("config_overrides") or {}, dict)
    settled = {*fields, *(name for name, value in options.items() if value is not None)}
    return {**{name: vars(config)[name] for name in GEOMETRY if name not in settled}, **fields}


def describe_gain(encoder: TrainingResult, tuned: TrainingResult, baseline: TrainingResult) -> str:
    """Return how much pretraining changed the main score, its random error, and the model to use."""
    gain = gain_of(tuned, baseline)
    name, count = tuned.metric, tuned.num_scored
    one, other = tuned.scores[name], baseline.scores[name]
    chance = ""
    if name == "accuracy":  # a mean over images, whose error is known
        deviation = math.sqrt((one * (1 - one) + other * (1 - other)) / count)
        chance = f", on {count:,} images, where less than {100 * CHANCE * deviation:.1f} points may be chance"
    verdict = "helped by" if gain >= 0 else "cost"
    return (
        f"Pretraining on your images {verdict} {abs(gain):.1f} points: {name} {one:.4f} with it, {other:.4f} without"
        f"{chance}.\nThe model to use: {(tuned if gain >= 0 else baseline).output_dir}\n"
        f"The encoder, for the --model_name_or_path of any task: {encoder.output_dir}"
    )
