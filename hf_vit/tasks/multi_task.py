"""Several heads on one backbone: options, data and report of each head."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from transformers import PreTrainedModel
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..data.datasets import TargetData
from ..evaluation.base import BaseEvaluator
from ..model.nested_options import HfViTMultiTaskConfig
from ..model.task_configurations import TASK_CONFIGS
from ..model.task_multi_task import HfViTForMultiTask
from ..options.field import option
from ..options.names import with_underscores
from ..options.resolve import build
from ..options.training_arguments import HfViTTrainingArguments
from .base import Task
from .common.arguments import TaskArguments
from .common.card import Usage
from .common.defaults import MULTI_TASK
from .common.load_data import chooses_step
from .common.models import read_config_of
from .depth_estimation import DepthEstimation
from .image_classification import ImageClassification
from .keypoint_detection import KeypointDetection
from .object_detection import ObjectDetection
from .semantic_segmentation import SemanticSegmentation
from .universal_segmentation import UniversalSegmentation


KINDS: dict[str, type[Task]] = {
    "image-classification": ImageClassification,
    "semantic-segmentation": SemanticSegmentation,
    "universal-segmentation": UniversalSegmentation,
    "depth-estimation": DepthEstimation,
    "object-detection": ObjectDetection,
    "keypoint-detection": KeypointDetection,
}
OWN = {"task": None, "weight": 1.0, "share": 1.0}  # options of a head that are not options of its task
SHARED = ("model_name_or_path", "preset", "image_size", "image_mean", "image_std", "check_images")
# Training arguments of the trainers that evaluate single heads
EVALUATING = {
    **dict.fromkeys(("freeze", "ema_decay", "lora_rank", "early_stopping_patience"), None),
    **{"eval_strategy": IntervalStrategy.NO, "save_strategy": SaveStrategy.NO, "load_best_model_at_end": False},
    **{"report_to": [], "push_to_hub": False, "repeated_augmentations": 1, "torch_compile": False},
    "cached_views": 0,  # `MultiTaskTrainer` sets it, once it knows the frozen parts
}


@dataclass
class MultiTaskArguments(TaskArguments):
    """Options of a multi-task model: heads and shared backbone."""

    dataset_name: str = field(init=False, default="")
    tasks: dict[str, Any] | None = option(
        None,
        "Data and options of each head by its name, in the recipe: task, data, weight (of the loss), share (of the "
        "steps), and options of the task. The task can be omitted if the name of the head is that of its task.",
        group="Data",
        essential=True,
    )
    loss_weighting: Literal["scaled", "fixed", "uncertainty"] = option(
        "scaled",
        "Weights of the losses in the gradients of the backbone: those given (fixed), multiplied once so that the "
        "norms of the first steps become equal (scaled), or learned (uncertainty).",
        group="Training",
    )

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(
                "Name the heads in a recipe, with at least the data of each: tasks: {depth-estimation: {data: "
                "path/to/data}}."
            )
        if nested := sorted(TASK_CONFIGS.keys() & (self.config_overrides or {}).keys()):
            raise ValueError(f"config_overrides contains {nested[0]}. Set it in the config_overrides of a head.")
        names = with_underscores({name: name for name in self.tasks})
        self.heads = {name: read_head(str(given), self.tasks[given]) for name, given in names.items()}
        self.dataset_name = ",".join(self.sources)
        super().__post_init__()

    @property
    def sources(self) -> list[str]:
        """Folders, files or names of the datasets of all heads."""
        return list(dict.fromkeys(head["dataset_name"] for head in self.heads.values()))


def read_head(name: str, given: Any) -> dict[str, Any]:
    """Return the options of a head in a recipe; raise `ValueError` if they are incomplete."""
    given = {"data": given} if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise ValueError(f"tasks: {name} is {given!r}, not a mapping of options. Set at least its data.")
    given = with_underscores(given)
    if twice := sorted(given.keys() & {*SHARED}):
        raise ValueError(f"tasks: {name} has {twice[0]}, which all heads share. Set it outside of tasks.")
    head = {**OWN, **given}
    head["task"] = str(head["task"] or name).replace("_", "-")
    head["dataset_name"] = head.pop("data", head.get("dataset_name"))
    if head["task"] not in KINDS:
        raise ValueError(f"tasks: {name} has the task {head['task']!r}. Set task to one of {', '.join(KINDS)}.")
    if not head["dataset_name"]:
        raise ValueError(f"tasks: {name} has no data. Set data to a folder, or to a name on the Hub.")
    for key in ("weight", "share"):
        value = head[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"tasks: {name} has the {key} {value!r}. Set it to a positive number.")
    return head


@dataclass(frozen=True)
class MultiTask(Task):
    """Several heads on one backbone, each with its own data. Each training step belongs to one head."""

    model_class = HfViTForMultiTask
    pipeline = "multi-task"
    usage = Usage(
        name="see",
        stock="""result = see("image.png")
print(result.keys())  # the names of the heads; each entry is the result of the pipeline of its task""",
        own="""print(outputs.answers.keys())  # the outputs of each head""",
    )
    limits = "The heads share the backbone. The pipeline of a single task opens its head alone. {heads}"
    defaults = MULTI_TASK
    argument_defaults: ClassVar[dict[str, Any]] = {
        **{"per_device_train_batch_size": 16, "learning_rate": 5e-4},
        "metric_for_best_model": "loss",
    }

    options: MultiTaskArguments

    def make_heads(
        self, args: HfViTTrainingArguments, chosen: Mapping[str, dict[str, Any]] | None = None
    ) -> dict[str, Task]:
        """Return the specification of each head, with `chosen` options."""
        shared, heads = {name: vars(self.options)[name] for name in SHARED}, {}
        for name, head in self.options.heads.items():
            own = {key: value for key, value in head.items() if key not in OWN} | (chosen or {}).get(name, {})
            config = {**(self.options.config_overrides or {}), **(own.get("config_overrides") or {})}
            kind, _, *others = KINDS[head["task"]].argument_types()
            (options,) = build((kind,), {**shared, **own, "config_overrides": config or None})
            options.chooses_weights = chooses_step(args)
            heads[name] = KINDS[head["task"]](options, *(other() for other in others))
        return heads

    def arguments_of_head(self, name: str, args: HfViTTrainingArguments) -> HfViTTrainingArguments:
        """Return the training arguments of the trainer that evaluates a head."""
        own = copy.copy(args)
        for key, value in {**EVALUATING, "output_dir": str(Path(args.output_dir) / name)}.items():
            setattr(own, key, value)
        return own

    def check_saved_head(self, name: str) -> None:
        """Raise `ValueError` if another head of the saved model has the task of a head, and is its default."""
        path, task = self.options.model_name_or_path, self.options.heads[name]["task"]
        saved = HfViTMultiTaskConfig.of({} if path is None else read_config_of(path).get("multi_task_config"))
        known = (saved.heads or {}).get(name, {}).get("task")
        if known == task and saved.find_head(task) != name:
            raise ValueError(
                f"{path} opens the head {saved.find_head(task)!r} for {task}, not {name!r}. Mark {name!r} as "
                "default in its config.json, or rename the head in the recipe."
            )

    def make_evaluator(self, model: PreTrainedModel, processor: Any, data: TargetData) -> BaseEvaluator:
        """Raise `ValueError`, because each head has its own evaluator."""
        raise ValueError("A multi-task model has one evaluator for each head. Set --head.")


@dataclass(frozen=True, kw_only=True)
class MultiTaskData(TargetData):
    """Data of several heads, by name. The splits are those of the first head."""

    parts: Mapping[str, TargetData]

    @classmethod
    def join(cls, parts: Mapping[str, TargetData]) -> Self:
        """Return the data of all heads."""
        first = next(iter(parts.values()))
        return cls(splits=first.splits, read_target=first.read_target, stream=first.stream, parts=parts)

    @property
    def num_train(self) -> int:
        """Number of training images of all heads."""
        return self.count_evaluated("train")

    def count_evaluated(self, split: str) -> int:
        """Return the number of images of a split of all heads."""
        return sum(len(data.splits.get(split, ())) for data in self.parts.values())
