"""The Trainer of tasks with an `Evaluator`, whose evaluations keep no outputs of the model."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ..data.datasets import TargetDataset
from ..evaluation.base import BaseEvaluator, Threshold
from ..model.task_configurations import TASK_CONFIGS
from .lora import unwrap_peft
from .output_folder import AVERAGE_FOLDER
from .trainer import HfViTTrainer, replaced


MAX_PICTURED = 6
CHOOSING = "choosing"  # how the names of scores begin that choose a threshold and are written nowhere


class EvaluatorTrainer(HfViTTrainer):
    """`HfViTTrainer` with an evaluator, which scores predictions in the pixels of the images.

    Every process makes a small record of each image it has predicted, and the records of all are brought together
    batch by batch. So the scores depend on neither processes nor batches, and memory does not grow with the images.

    Where scores decide which predictions are answers, validation images choose the threshold, see `choose_threshold`.

    The collator must have `keeps_targets`, and the data be a `TargetDataset`, for training in an `AugmentedDataset`.

    Args:
        *args: Those of `transformers.Trainer`.
        evaluator: Predicts and scores the images of an evaluation.
        **kwargs: Those of `HfViTTrainer`.

    Raises:
        ValueError: if one process has several GPUs, between which the library would divide tensors alone.
    """

    def __init__(self, *args: Any, evaluator: BaseEvaluator, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1 and not evaluator.can_split_batch:
            raise ValueError(
                f"This process has {self.args.n_gpu} GPUs, and targets are not divided between them. Start a process "
                f"for each, torchrun --nproc_per_node {self.args.n_gpu}, or show it one: CUDA_VISIBLE_DEVICES=0."
            )
        self.evaluator = evaluator
        self._losses: list[tuple[float | tuple[float, ...], float | tuple[float, ...]]] = []
        self.predictions: list[dict[str, Any]] | None = None  # described image by image, if a list is put here
        # Those of the last evaluation of a training and the chosen ones, of the averaged weights (True) and the model
        self._found: dict[bool, Threshold | None] = {}
        self.thresholds: dict[bool, Threshold | None] = {}
        self._found_at_step = -1

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, None, None]:
        """Scores a batch; returns nothing that the library would collect."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            results = self.evaluator.predict(unwrap_peft(model), inputs)
        metric = self.evaluator.metric
        describe = self.evaluator.describe if self.predictions is not None else lambda *_: {}
        records = [
            (metric.record(result.prediction, target), result.loss, result.weight, describe(result.prediction, target))
            for result, target in zip(results, inputs["targets"], strict=True)
        ]
        # Without those images that several processes see twice to fill their last batch.
        gathered = self.accelerator.gather_for_metrics(records, use_gather_object=True)
        metric.update([record for record, *_ in gathered])
        self._losses += [(loss, weight) for _, loss, weight, _ in gathered]
        if self.predictions is not None:
            self.predictions += [line for *_, line in gathered]
        return None, None, None

    def score_weights(self, *args: Any, metric_key_prefix: str, **kwargs: Any) -> EvalLoopOutput:
        """Scores all images: the scores of the metric, and `loss`, sums over images by the sums of their weights."""
        is_average = metric_key_prefix.endswith(f"_{AVERAGE_FOLDER}")
        self.evaluator.prepare(self)
        self.evaluator.metric.reset()
        self._losses = []
        predictions = None if is_average else self.predictions
        with self.options_of_average() if is_average else nullcontext(), replaced(self, predictions=predictions):
            output = super().score_weights(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        scores = {"loss": self.mean_loss(), **self.evaluator.compute(self.plain_model)}
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
        if self.is_in_train or metric_key_prefix.startswith(CHOOSING):  # on validation images, and no others
            self._found[is_average] = found = self.evaluator.metric.best_threshold()
            self._found_at_step = self.state.global_step
            self.evaluator.threshold = None if found is None else found.value
        return output

    def scoring_by(self, evaluator: BaseEvaluator, collator: Any = None) -> AbstractContextManager[None]:
        """Scores by another evaluator, and without averaged weights, as long as this lasts."""
        return replaced(self, evaluator=evaluator, data_collator=collator or self.data_collator, averaging=None)

    def choose_threshold(self) -> None:
        """Chooses by the validation images above which score the trained model gives its predictions as answers.

        It is that of the best F1, see `StreamedMetric.best_threshold`, and becomes the `score_threshold` of the model.
        Averaged weights have one of their own. Without validation images there is none.
        """
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        if self.eval_dataset is None:
            self._found = {}
        elif self.evaluator.tries or self._found_at_step != (self.state.global_step if best is None else best):
            self.evaluator.is_choosing = True
            self.predict(self.eval_dataset, metric_key_prefix=CHOOSING)
            self.evaluator.is_choosing = False
        self.thresholds = {False: None, **self._found}
        self.evaluator.threshold = self._set_threshold(self.thresholds[False])

    def _set_threshold(self, threshold: Threshold | None) -> float | None:
        """Gives the model and its image processor a threshold, or none, and returns its score."""
        processor = self.evaluator.processor
        processor.nms_threshold = None if threshold is None else threshold.nms
        processor.class_agnostic_nms = True if threshold is not None and threshold.is_class_agnostic else None
        model, score = self.plain_model, None if threshold is None else threshold.value
        field = next(name for name, task in TASK_CONFIGS.items() if isinstance(model.options, task))
        model.options.score_threshold = score
        setattr(model.config, field, model.options)
        return score

    @contextmanager
    def options_of_average(self) -> Iterator[None]:
        """Gives the model the threshold of its averaged weights, if one is chosen, as long as this lasts."""
        if True not in self.thresholds:
            yield
            return
        self._set_threshold(self.thresholds[True])
        try:
            yield
        finally:
            self._set_threshold(self.thresholds[False])

    def mean_loss(self) -> float:
        """Returns the loss of all images that have been evaluated."""
        losses, weights = (np.array(values).reshape(len(values), -1).T for values in zip(*self._losses, strict=True))
        return sum(math.fsum(own) / (math.fsum(weight) or 1.0) for own, weight in zip(losses, weights, strict=True))

    def evaluation_collator(self) -> Any:
        """Returns a collator that also gives the targets at their own size."""
        return self.evaluator.adapt_collator(replace(self.data_collator, keeps_targets=True))


def draw_examples(trainer: EvaluatorTrainer, examples: TargetDataset, file: Path) -> None:
    """Predicts a few images, spread evenly over a dataset, and draws them beside their targets.

    All processes predict, as a model may be spread over them; the first one draws.
    """
    evaluator, model = trainer.evaluator, trainer.plain_model
    indices = np.linspace(0, len(examples) - 1, min(MAX_PICTURED, len(examples))).round().astype(int).tolist()
    chosen = [examples[index] for index in indices]
    batch = trainer.evaluation_collator()(chosen)
    with torch.no_grad():
        results = evaluator.predict(model.eval(), send_to_device(batch, model.device))
    if trainer.is_world_process_zero():
        file.parent.mkdir(parents=True, exist_ok=True)
        images, predictions = [example["image"] for example in chosen], [result.prediction for result in results]
        evaluator.draw(images, predictions, batch["targets"], file)


class EvaluationPictures(TrainerCallback):
    """Draws the same few validation images at every evaluation, as `pictures/step-000100.png` of the output folder."""

    def __init__(self, trainer: EvaluatorTrainer) -> None:
        self.trainer = trainer

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Draws the images."""
        file = Path(args.output_dir) / "pictures" / f"step-{state.global_step:06d}.png"
        draw_examples(self.trainer, self.trainer.eval_dataset, file)
