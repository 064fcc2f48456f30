"""Several heads on one backbone: options, data and report of each head."""

import copy
import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from transformers import PreTrainedModel
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ...data.augmentation.multi_task import MultiTaskDataset
from ...evaluation.base import BaseEvaluator
from ...model.nested_options import HfViTMultiTaskConfig
from ...model.task_configurations import TASK_CONFIGS
from ...model.task_multi_task import HfViTForMultiTask
from ...options.field import option
from ...options.library import options_of
from ...options.resolve import build
from ...visualize.plots import draw_curves
from ..arguments import TaskArguments
from ..load_data import chooses_step
from ..models import read_config_of, without_load_report
from ..multi_task import LossWeights, MultiTaskCollator, MultiTaskTrainer
from ..planning.defaults import MIXED, MULTI_TASK, PROBED_RATE, TUNED_RATE, choose
from ..planning.gather import gather_facts
from ..publishing.model_card import TrainingInfo, Usage, write_model_card
from ..publishing.report import describe_training, describe_values
from ..training_arguments import check_training
from .base import CURVES, Task
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
JOINED = ("metrics", "units", "parts")  # fields of `TrainingInfo` with a value for each score or class
OF_HEADS = {"head", "loss", "input size", "augmentation", "score threshold", "evaluation"}  # rows of the card
# Options that `load_data` changes
SPLITTING = ("holds_out", "chooses_weights", "train_val_split", "validation_as_test")
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
        self.heads = {name.replace("-", "_"): read_head(name, head) for name, head in self.tasks.items()}
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
    if twice := sorted(given.keys() & {*SHARED}):
        raise ValueError(f"tasks: {name} has {twice[0]}, which all heads share. Set it outside of tasks.")
    head = {**OWN, **{key.replace("-", "_"): value for key, value in given.items()}}
    head["task"] = str(head["task"] or name).replace("_", "-")
    head["dataset_name"] = head.pop("data", head.get("dataset_name"))
    if head["task"] not in KINDS:
        raise ValueError(f"tasks: {name} has the task {head['task']!r}. Set task to one of {', '.join(KINDS)}.")
    if not head["dataset_name"]:
        raise ValueError(f"tasks: {name} has no data. Set data to a folder, or to a name on the Hub.")
    for key in ("weight", "share"):
        if not isinstance(head[key], int | float) or not head[key] > 0:
            raise ValueError(f"tasks: {name} has the {key} {head[key]!r}. Set it to a positive number.")
    return head


@dataclass
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

    heads: dict[str, Any] = field(init=False, default_factory=dict)  # task of each head, set by `make_trainer`
    # Loaded data and other attributes of the task of each head
    known: dict[str, dict[str, Any]] = field(init=False, default_factory=dict)

    def make_parts(self, chosen: Mapping[str, dict[str, Any]] | None = None) -> dict[str, Task]:
        """Return the task of each head, with `chosen` options, and with its data if it has been loaded."""
        shared = {name: vars(self.options)[name] for name in SHARED}
        parts = {}
        for name, head in self.options.heads.items():
            kinds = KINDS[head["task"]].fields()
            own = {key: value for key, value in head.items() if key not in OWN} | (chosen or {}).get(name, {})
            config = {**(self.options.config_overrides or {}), **(own.get("config_overrides") or {})}
            (options,) = build((kinds["options"],), {**shared, **own, "config_overrides": config or None})
            others = {key: kind() for key, kind in kinds.items() if key not in ("options", "args")}
            args = copy.copy(self.args)
            for key, value in {**EVALUATING, "output_dir": str(Path(self.args.output_dir) / name)}.items():
                setattr(args, key, value)
            options.chooses_weights = KINDS[head["task"]].has_scores and chooses_step(self.args)
            parts[name] = part = KINDS[head["task"]](options, args, **others)
            for key, value in self.known.get(name, {}).items():
                setattr(part.options if key in SPLITTING else part, key, value)
        return parts

    def load_data(self) -> list[str]:
        """Open and check the data of all heads. Raises the errors of `Task.load_data`."""
        path = self.options.model_name_or_path
        saved = HfViTMultiTaskConfig.of({} if path is None else read_config_of(path).get("multi_task_config"))
        for name, part in self.make_parts().items():
            task = self.options.heads[name]["task"]
            known = (saved.heads or {}).get(name, {}).get("task")
            if known == task and saved.find_head(task) != name:
                raise ValueError(
                    f"{path} opens the head {saved.find_head(task)!r} for {task}, not {name!r}. Mark {name!r} as "
                    "default in its config.json, or rename the head in the recipe."
                )
            part.load_data()
            self.data_notes += [f"{name}: {note}" for note in part.data_notes]
            choice = {key: vars(part.options)[key] for key in SPLITTING}
            own = {key: value for key, value in vars(part).items() if key not in part.fields()}
            self.known[name] = {**own, **choice}
        self.loaded = next(iter(self.known.values()))["loaded"]
        return []

    def choose_options(self) -> dict[str, dict[str, Any]]:
        """Choose the options of each head that the user did not give, with the defaults of its task."""
        if self.args.choose_defaults is False:
            return {}
        chosen, total = {}, sum(head["share"] for head in self.options.heads.values())
        for name, part in self.make_parts().items():
            head, overrides = self.options.heads[name], part.options.overrides()
            nested = [key for value in overrides.values() if isinstance(value, dict) for key in value]
            given, config = {*head, *overrides, *nested}, part.options.config_overrides or {}
            steps = max(1, round(self.args.max_steps * head["share"] / total)) if self.args.max_steps > 0 else None
            facts, batch = gather_facts(part), self.args.images_per_step
            options = choose(part.defaults, facts, given, config, steps=steps, batch=batch)
            config = options.pop("config_overrides", {})
            heads = {key: value for key, value in config.items() if isinstance(value, dict)}
            allowed = options_of(part.fields()["options"]).keys() - {*MIXED, *head}
            chosen[name] = {key: value for key, value in options.items() if key in allowed}
            chosen[name]["config_overrides"] = {**(head.get("config_overrides") or {}), **heads}
        return chosen

    def count_training_images(self) -> int:
        """Return the number of training images of all heads."""
        return self.count_evaluated_images("train")

    def count_evaluated_images(self, split: str) -> int:
        """Return the number of images of a split of all heads."""
        return sum(len(known["loaded"].splits.get(split, ())) for known in self.known.values())

    def count_examples(self) -> dict[str, int]:
        """Return the number of examples per head and split."""
        return {
            f"{split} of {name}": len(rows)
            for name, known in self.known.items()
            for split, rows in known["loaded"].splits.items()
        }

    def describe_held_out(self) -> str:
        """Return a description of the held-out training images of each head and their purpose."""
        return "; ".join(f"of {name}, {part.describe_held_out()}" for name, part in self.heads.items())

    def describe_targets(self, trainer: Any) -> str:
        """Return a description of values computed from the targets of each head."""
        texts = {name: part.describe_targets(trainer.parts[name]) for name, part in self.heads.items()}
        return "\n".join(f"{name}: {text}" for name, text in texts.items() if text)

    def make_trainer(self) -> Any:
        """Return the trainer of a new or saved model. Raises the same errors as `Task.make_trainer`."""
        self.heads, opened = self.make_parts(self.choose_options()), dict[str, tuple[Any, Any]]()
        for name, part in self.heads.items():
            with without_load_report(hides_warnings=False) if opened else nullcontext():
                model, processor = part.open_model()
            part.args.trainable_blocks = None  # `MultiTaskTrainer` freezes blocks
            part.start_weights(model, processor)
            if opened:  # the backbones of new models have different weights
                model.model.load_state_dict(next(iter(opened.values()))[0].model.state_dict(), strict=False)
            opened[name] = model, processor
        models, processors = ({name: pair[index] for name, pair in opened.items()} for index in (0, 1))
        learns = self.options.loss_weighting == "uncertainty"
        combined = HfViTForMultiTask.combine(next(iter(models.values())), models, processors, learns)
        trainers = {
            name: part.make_trainer_of(combined.heads[name], processors[name]) for name, part in self.heads.items()
        }
        for name, trainer in trainers.items():
            if trainer.batch_transforms.transforms or trainer.compute_loss_func is not None:
                raise ValueError(f"tasks: {name} has an option that changes batches or losses. Remove it.")
        heads = self.options.heads
        first = trainers[min(trainers)]
        trainer = MultiTaskTrainer(
            model=combined,
            args=self.args,
            train_dataset=MultiTaskDataset(
                dataset=[],
                transform=dict,
                seed=self.args.seed,
                parts={name: part.train_dataset for name, part in trainers.items()},
                shares={name: float(heads[name]["share"]) for name in trainers},
            ),
            eval_dataset=first.eval_dataset,
            data_collator=MultiTaskCollator({name: part.data_collator for name, part in trainers.items()}),
            processing_class=first.processing_class,
            callbacks=[
                *check_training(self.args, self.count_training_images(), first.eval_dataset is not None, {"loss"}),
                *(callback for part in self.heads.values() for callback in part.callbacks()),
            ],
            weights=LossWeights(
                {name: float(heads[name]["weight"]) for name in trainers}, self.options.loss_weighting == "scaled"
            ),
            parts=trainers,
        )
        if self.options.model_name_or_path is not None:
            # The steps of all heads together move a trained backbone about as far as the steps of one model.
            trainer.lr_factors["model."] = 1 / len(trainers)
        for name, part in self.heads.items():
            if isinstance(part, ImageClassification) and part.probe is not None:
                trainer.lr_factors[f"heads.{name}."] = PROBED_RATE / TUNED_RATE
        return trainer

    def make_evaluator(self, model: PreTrainedModel, processor: Any) -> BaseEvaluator:
        """Raise `ValueError`, because each head has its own evaluator."""
        raise ValueError("A multi-task model has one evaluator for each head. Set --head.")

    def choose_inference(self, trainer: Any) -> None:
        """Calibrate each head, choose its score threshold, and store the options of the heads in the model."""
        for name, part in self.heads.items():
            trainer.parts[name].state.global_step = trainer.state.global_step
            # Interpolating a probe would change the shared weights.
            choosing = Task if isinstance(part, ImageClassification) else type(part)
            choosing.choose_inference(part, trainer.parts[name])
        processors = {name: part.processing_class for name, part in trainer.parts.items()}
        trainer.plain_model.update_heads(processors)

    def write_report(self, trainer: Any, **facts: Any) -> dict[str, float]:
        """Evaluate all heads and write one card. The files of each head are in a folder with its name."""
        scores, infos = dict[str, float](), dict[str, TrainingInfo]()
        for name, part in self.heads.items():
            own, info = part.report(trainer.parts[name], **facts)
            scores |= {f"{name} {score}": value for score, value in own.items()}
            scores["loss"] = scores.get("loss", 0.0) + self.options.heads[name]["weight"] * own["loss"]
            if info is not None:
                infos[name] = info
        if infos:
            folder = Path(trainer.args.output_dir)
            (curves,) = CURVES.values()
            draw_curves(trainer.state.log_history, folder / curves)
            write_model_card(folder, self.join_cards(trainer, infos, **facts))
        return scores

    def join_cards(self, trainer: Any, infos: Mapping[str, TrainingInfo], **facts: Any) -> TrainingInfo:
        """Return the facts for the card of all heads, given those for the card of each head."""

        def join(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
            return {f"{name} {key}": value for name, own in values.items() for key, value in own.items()}

        purposes = (f"{name} ({head['task'].replace('-', ' ')})" for name, head in self.options.heads.items())
        shares = {name: f"{head['share']:g}" for name, head in self.options.heads.items()}
        weights = {name: f"{value:.3g}" for name, value in trainer.weights.weights.items()}
        baselines = {name: [*info.baselines.values()][-1] for name, info in infos.items()}
        data = [info.data for info in infos.values()]
        heads = [f"{name}: {info.limits} {info.calibration_note}".strip() for name, info in infos.items()]
        recipes = {
            name: {key: value for key, value in info.recipe.items() if key in OF_HEADS} for name, info in infos.items()
        }
        pictures = {
            f"{name}: {key}": f"{name}/{file}"
            for name, info in infos.items()
            for key, file in info.pictures.items()
            if key not in CURVES
        }
        return TrainingInfo.from_trainer(
            trainer,
            recipe={
                "shares of the steps": describe_values(shares),
                "learning rate of the backbone": f"x {trainer.lr_factors.get('model.', 1):.3g}",
                "loss weights": f"{self.options.loss_weighting}: {describe_values(weights)}",
                **join(recipes),
            },
            task=self.pipeline,
            purpose=f"several tasks: {', '.join(purposes)}",
            usage=self.usage,
            data=dataclasses.replace(
                data[0],
                name=", ".join(dict.fromkeys(own.name for own in data)),
                description=" ".join(f"{name}: {own.description}" for name, own in zip(infos, data, strict=True)),
                test=", ".join(f"{own.test} for {name}" for name, own in zip(infos, data, strict=True)),
            ),
            **{field: join({name: vars(info)[field] for name, info in infos.items()}) for field in JOINED},
            baselines={"baseline without images": join(baselines)},
            lower_is_better={f"{name} {score}" for name, info in infos.items() for score in info.lower_is_better},
            pictures=pictures | CURVES,
            limits=self.limits.format(heads=" ".join(heads)),
            **describe_training(trainer, data[0].split),
            **facts,
        )
