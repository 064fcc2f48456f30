"""Arguments that the scripts of several tasks share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..arguments import LIBRARY, HfViTTrainingArguments, ImageDataArguments, ModelArguments


LOWER_IS_BETTER = {"loss", "abs_rel", "rmse", "log10", "rmse_log", "silog", "nme"}


@dataclass
class TaskModelArguments(ModelArguments):
    """Which model to train, with options of its head that have a name of their own."""

    task_config: ClassVar[str]  # the field of HfViTConfig that holds the options of the head
    task_options: ClassVar[tuple[str, ...]] = ("head",)  # those of them that are fields here

    def overrides(self) -> dict[str, Any]:
        """Returns the fields of `config_overrides`, and with them `image_size` and the options of the head.

        Raises:
            ValueError: if one of these is given twice, or the fields are no JSON object.
        """
        fields = super().overrides()
        options = fields.get(self.task_config) or {}
        given = {name: vars(self)[name] for name in self.task_options if vars(self)[name] is not None}
        if twice := sorted(given.keys() & options.keys()):
            raise ValueError(f"--{twice[0]} is given twice: leave it out of --config_overrides.")
        return {**fields, self.task_config: {**options, **given}} if given else fields


def split_names(names: str | None) -> list[str]:
    """Returns names that are written with commas between them."""
    return [name.strip() for name in names.split(",")] if names else []


def split_sources(names: str) -> list[str]:
    """Returns paths or names on the Hub that are written with commas between them; a single path may have some."""
    return [names] if Path(names).expanduser().exists() else split_names(names)


def best_by(default: str) -> Any:
    """Returns the field of training arguments that says which score chooses the best model."""
    metadata = HfViTTrainingArguments.__dataclass_fields__["metric_for_best_model"].metadata
    return field(default=default, metadata=metadata)


@dataclass
class ScoredTrainingArguments(HfViTTrainingArguments):
    """The library's arguments, with defaults that suit targets of more than a class."""

    per_device_train_batch_size: int = field(default=16, metadata=LIBRARY["per_device_train_batch_size"].metadata)
    per_device_eval_batch_size: int = field(default=16, metadata=LIBRARY["per_device_eval_batch_size"].metadata)

    def __post_init__(self) -> None:
        """Of errors, the least is the best."""
        if str(self.metric_for_best_model).removeprefix("eval_").removeprefix("ema_") in LOWER_IS_BETTER:
            self.greater_is_better = False
        super().__post_init__()


@dataclass
class ObjectImagesArguments(ImageDataArguments):
    """Which images with boxes, whatever else is known of the objects."""

    objects_column_name: str | None = field(
        default=None, metadata={"help": "Column of the objects, where it is not clear by itself."}
    )
    box_errors: Literal["raise", "clip", "drop"] = field(
        default="raise",
        metadata={
            "help": "What is done about boxes that reach out of their image or have no area: they are listed and the "
            "script stops (raise), what is outside is cut off (clip), or they are left out (drop)."
        },
    )

    def source_options(self) -> dict[str, Any]:
        """Returns the same, with where objects are and what is done about wrong boxes."""
        return {
            **super().source_options(),
            "objects_column_name": self.objects_column_name,
            "box_errors": self.box_errors,
        }
