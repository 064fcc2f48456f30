"""Trainer that scores a model with an evaluator, without storing model outputs."""

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
from transformers.utils import logging

from ..data.datasets import TargetData, TargetDataset
from ..evaluation.base import CHOOSING, BaseEvaluator, Threshold
from ..evaluation.calibration import LEAST_FITTED, CalibrationError, fit_scores, fit_sets
from ..model.calibration import HfViTCalibrationConfig
from ..model.task_configurations import TASK_CONFIGS
from ..outputs import AVERAGE_FOLDER
from ..tasks.common.load_data import CALIBRATION_SPLIT, describe_images
from .lora import unwrap_peft
from .optimizer import find_backbone
from .streams import replaced
from .trainer import HfViTTrainer


logger = logging.get_logger(__name__)
MAX_PICTURED = 6


class EvaluatorTrainer(HfViTTrainer):
    """`HfViTTrainer` with an evaluator, which computes scores at the original image size.

    Each process reduces its predictions to small records, which are gathered from all processes after each batch.
    Model outputs are not kept. Scores do not depend on the number of processes or the batch size.

    If the metric only counts predictions above a score threshold, the threshold is chosen on validation images, see
    `choose_threshold`.

    The data collator must have an attribute `keeps_targets`. Evaluation data must be a `TargetDataset`, and training
    data an `AugmentedDataset`.

    Args:
        *args: Positional arguments of `transformers.Trainer`.
        evaluator: Evaluator that predicts and scores images.
        **kwargs: Keyword arguments of `HfViTTrainer`.

    Raises:
        ValueError: if one process has several GPUs and the evaluator does not support that.
    """

    def __init__(self, *args: Any, evaluator: BaseEvaluator, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1 and not evaluator.can_split_batch:
            raise ValueError(
                f"This process has {self.args.n_gpu} GPUs, but the targets of a batch cannot be split between GPUs. "
                f"Start one process per GPU with torchrun --nproc_per_node {self.args.n_gpu}, or set "
                "CUDA_VISIBLE_DEVICES=0."
            )
        self.evaluator = evaluator
        self._losses: list[tuple[float | tuple[float, ...], float | tuple[float, ...]]] = []
        self.predictions: list[dict[str, Any]] | None = None  # list that collects predictions, None to discard them
        # Thresholds found in the last evaluation, and chosen thresholds. The key is True for the averaged weights.
        self._found: dict[bool, Threshold | None] = {}
        self.thresholds: dict[bool, Threshold | None] = {}
        self._found_at_step = -1

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, None, None]:
        """Score a batch. The returned values are None, so that `transformers.Trainer` collects no outputs."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            results = self.evaluator.predict(unwrap_peft(model), inputs)
        metric = self.evaluator.metric
        describe = self.evaluator.describe if self.predictions is not None else lambda *_: {}
        records = [
            (metric.record(result.prediction, target), result.loss, result.weight, describe(result.prediction, target))
            for result, target in zip(results, inputs["targets"], strict=True)
        ]
        # Gather with `gather_for_metrics`, because it removes images that were repeated to fill the last batch.
        gathered = self.accelerator.gather_for_metrics(records, use_gather_object=True)
        metric.update([record for record, *_ in gathered])
        self._losses += [(loss, weight) for _, loss, weight, _ in gathered]
        if self.predictions is not None:
            self.predictions += [line for *_, line in gathered]
        return None, None, None

    def score_weights(self, *args: Any, metric_key_prefix: str, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate all images and return the scores of the metric and `loss`, the weighted mean loss of the images."""
        is_average = metric_key_prefix.endswith(f"_{AVERAGE_FOLDER}")
        (find_backbone(self.plain_model) or self.plain_model).eval()  # heads of one backbone do not register it
        self.evaluator.prepare(self)
        self.evaluator.metric.reset()
        # Models of other libraries have no calibration.
        self.evaluator.calibration = getattr(self.plain_model, "calibration", HfViTCalibrationConfig())
        self._losses = []
        predictions = None if is_average else self.predictions
        with self.averaged_threshold() if is_average else nullcontext(), replaced(self, predictions=predictions):
            output = super().score_weights(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        scores = {"loss": self.mean_loss(), **self.evaluator.compute(self.plain_model)}
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
        if self.is_in_train or metric_key_prefix.startswith(CHOOSING):  # the evaluated images are validation images
            self._found[is_average] = found = self.evaluator.metric.best_threshold()
            self._found_at_step = self.state.global_step
            self.evaluator.threshold = None if found is None else found.value
        return output

    def follow(self, state: TrainerState) -> None:
        """Log and choose as at the current step of another trainer, which trains this model."""
        self.state.global_step, self.state.epoch = state.global_step, state.epoch

    def score(self, examples: TargetDataset, split: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Evaluate a split, and return the scores and a description of each prediction."""
        self.predictions = []
        metrics = self.predict(examples, metric_key_prefix=split).metrics
        lines, self.predictions = self.predictions, None
        return {name: metrics[f"{split}_{name}"] for name in ("loss", *self.evaluator.metric.score_names)}, lines

    def evaluating_with(self, evaluator: BaseEvaluator, collator: Any = None) -> AbstractContextManager[None]:
        """Context manager within which evaluations use the given evaluator, and skip the averaged weights."""
        return replaced(self, evaluator=evaluator, data_collator=collator or self.data_collator, averaging=None)

    def calibrate(self, examples: TargetDataset, images: str) -> bool:
        """Fit the calibration of the model on held-out images, and return whether the task has scores to calibrate.

        The calibration does not affect training, losses and averaged weights.

        Args:
            examples: Images that did not choose the weights.
            images: Description of the images for the model card, such as "validation images".

        Raises:
            CalibrationError: if there are too few or invalid scores. The model then has no calibration.
        """
        config, evaluator, old = self.plain_model.config, self.evaluator, self.plain_model.calibration
        config.calibration_config, self._found_at_step = None, -1  # discard thresholds of earlier scores
        with self.evaluating_with(evaluator):
            self.predict(examples, metric_key_prefix=CHOOSING)
        data, self._found_at_step = evaluator.calibration_data(), -1
        if data is None:
            return False
        if len(data[1]) < LEAST_FITTED:
            raise CalibrationError(f"The {len(examples):,} {images} have {len(data[1])} scores, not {LEAST_FITTED}.")
        used = f"{len(examples):,} {images}"
        if evaluator.predicts_errors:
            fitted: dict[str, Any] = {"error_scale": (data[1].mean() / data[0].mean()).item()}
            evaluator.calibration_note = f"The expected errors were scaled on {used}."
        else:
            fitted, evaluator.calibration_note = fit_scores(*data, evaluator.has_offset, old, used)
        fitted |= {"num_images": len(examples), **(fit_sets(*data) if evaluator.has_sets else {})}
        config.calibration_config = HfViTCalibrationConfig(model_class=type(self.plain_model).__name__, **fitted)
        return True

    def calibrate_if_possible(self, data: TargetData) -> bool:
        """Calibrate a trained model on images that did not choose its weights; return whether it was calibrated.

        If there are no such images, or their scores are invalid, a warning and the model card contain the reason.
        """
        split = CALIBRATION_SPLIT if CALIBRATION_SPLIT in data.splits else "validation"
        try:
            if data.division.chooses_weights and split == "validation":
                raise CalibrationError(f"All {len(data.splits[split]):,} validation images chose the weights.")
            return self.calibrate(data.examples(split), describe_images(data.division, split))
        except CalibrationError as error:
            self.evaluator.calibration_note = f"The scores are not calibrated. {error}"
            logger.warning(self.evaluator.calibration_note)
            return False

    def choose_threshold(self, examples: TargetDataset | None = None) -> None:
        """Choose the threshold of prediction scores on validation images, and set `score_threshold` of the model.

        The images are `examples`, by default `eval_dataset`. The chosen threshold maximizes F1, see `best_threshold`.
        Averaged weights have a separate threshold. Without validation images, no threshold is set.
        """
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        examples = examples or self.eval_dataset
        if examples is None:
            self._found = {}
        elif self.evaluator.tries or self._found_at_step != (self.state.global_step if best is None else best):
            self.evaluator.is_choosing = True
            self.predict(examples, metric_key_prefix=CHOOSING)
            self.evaluator.is_choosing = False
        self.thresholds = {False: None, **self._found}
        self.evaluator.threshold = self._set_threshold(self.thresholds[False])

    def _set_threshold(self, threshold: Threshold | None) -> float | None:
        """Set the score threshold of the model and its image processor (None removes it), and return its value."""
        processor = self.evaluator.processor
        processor.nms_threshold = None if threshold is None else threshold.nms
        processor.class_agnostic_nms = True if threshold is not None and threshold.is_class_agnostic else None
        model, score = self.plain_model, None if threshold is None else threshold.value
        field = next(name for name, task in TASK_CONFIGS.items() if isinstance(model.options, task))
        model.options.score_threshold = score
        setattr(model.config, field, model.options)
        return score

    @contextmanager
    def averaged_threshold(self) -> Iterator[None]:
        """Context manager that sets the threshold of the averaged weights, if any, and disables the calibration."""
        with replaced(self.plain_model.config, calibration_config=None):
            if True not in self.thresholds:
                yield
                return
            self._set_threshold(self.thresholds[True])
            try:
                yield
            finally:
                self._set_threshold(self.thresholds[False])

    def mean_loss(self) -> float:
        """Return the weighted mean loss of all evaluated images."""
        losses, weights = (np.array(values).reshape(len(values), -1).T for values in zip(*self._losses, strict=True))
        return sum(math.fsum(own) / (math.fsum(weight) or 1.0) for own, weight in zip(losses, weights, strict=True))

    def evaluation_collator(self) -> Any:
        """Return a collator that also returns the targets at their original size."""
        return self.evaluator.adapt_collator(replace(self.data_collator, keeps_targets=True))


def draw_examples(trainer: EvaluatorTrainer, examples: TargetDataset, file: Path) -> None:
    """Predict a few evenly spaced images of a dataset, and draw the predictions next to the targets.

    All processes predict, because the model may be distributed over the processes. The main process draws.
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
    """Draw the same few validation images at every evaluation, to `pictures/step-000100.png` in the output folder."""

    def __init__(self, trainer: EvaluatorTrainer) -> None:
        self.trainer = trainer

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Draw the images to the file of the current step."""
        file = Path(args.output_dir) / "pictures" / f"step-{state.global_step:06d}.png"
        draw_examples(self.trainer, self.trainer.eval_dataset, file)
