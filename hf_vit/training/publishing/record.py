"""What a model card says of a finished training and of its data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...data import DatasetInfo
from ..models import shorten
from ..recipe import RECIPE_NAME
from ..stream_loader import StreamArguments
from ..tasks.arguments import split_sources
from ..trainer import HfViTTrainer
from .model_card import TrainingInfo


def scored_split(splits: Sequence[str]) -> str:
    """Returns which split is scored at the end of a training: "test", else "validation", else "train"."""
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
) -> DatasetInfo:
    """Says of the data what its place and its splits tell.

    Args:
        dataset_name: Path, or name on the Hub; of a pool, several with commas between them.
        license: License of the data.
        sizes: Number of examples by split.
        split: The split that is scored.
        names: Names of the classes, if there are classes.
        examples: What an example is.
        parts: What has the names, with a place for their number.
    """
    counts = ", ".join(f"{count:,} for {name}" for name, count in sizes.items())
    name = ", ".join(public_name(source) for source in split_sources(dataset_name))
    classes = f", {parts.format(len(names))} ({shorten(names)})" if names else ""
    return DatasetInfo(
        name=name,
        identifier=name,
        license=license,
        description=f"{name}: {counts}{classes}.",
        test=f"the {sizes[split]:,} {split} {examples}",
        split=split,
    )


def public_name(source: str) -> str:
    """Returns what to call a data set: its name on the Hub, or that of its file or folder without where it lies."""
    place = Path(source)
    return place.resolve().name if place.exists() else source


def describe_training(trainer: HfViTTrainer, split: str) -> dict[str, Any]:
    """Returns the fields of a `TrainingInfo` that a training by a script tells, whatever its task.

    Args:
        trainer: Has finished its training.
        split: The split that is scored.
    """
    best = trainer.state.best_global_step if trainer.args.load_best_model_at_end else None
    return {
        "model_name": Path(trainer.args.output_dir).resolve().name,
        "selection": "after the last step" if best is None else f"at step {best}, the best on the validation images",
        "is_chosen_on_scored": best is not None and split == "validation",
        "arguments": RECIPE_NAME,
        "seconds": trainer.seconds,
        "location": trainer.hub_model_id or TrainingInfo.location,
    }


def describe_weights(weights: Mapping[str, float]) -> str:
    """Returns the parts of a loss in one line, but for those that weigh nothing."""
    return ", ".join(f"{name} x {weight:g}" for name, weight in weights.items() if weight)


def describe_stream(args: StreamArguments) -> dict[str, str]:
    """Says how training images were read, if that was while the training went on."""
    if not args.streaming:
        return {}
    return {"training images": f"a stream, each drawn among {args.shuffle_buffer_size:,}"}


def describe_options(options: Any) -> str:
    """Returns a dataclass of options in one line."""
    return ", ".join(f"{name} {value}" for name, value in asdict(options).items())
