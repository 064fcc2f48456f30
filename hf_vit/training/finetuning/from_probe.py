"""Fine-tuning that starts from a linear probe and ends with weights between the probe and the fine-tuned model.

In shapes, M is the number of images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.datasets import TargetData
from ...data.reading.label_values import SINGLE
from ...evaluation.base import CHOOSING
from ...evaluation.classification import ClassificationMetric
from ...features.probe import Probe, fit_probe
from ...model.task_image_classification import HfViTForImageClassification
from ...options.training_arguments import HfViTTrainingArguments
from ...processes import on_first_process
from ...tasks.base import Choice, plain_batches
from ...tasks.common.models import without_load_report
from ...tasks.image_classification import ImageClassification, find_problem_type
from ..lora import is_adapted
from .probe import MOST_IMAGES, encode, start_from_probe


# Positions between the weights of the linear probe (0) and of the fine-tuned model (1), and the default position
SHARES, USUAL_SHARE = (0.0, 0.25, 0.5, 0.75, 1.0), 0.75


@dataclass
class FromProbe:
    """A new classifier that starts as a linear probe.

    Args:
        task: Specification of the classifier.
        args: Training arguments.
        data: Images and labels.
    """

    task: ImageClassification
    args: HfViTTrainingArguments
    data: TargetData
    probe: Probe | None = None

    def start(self, model: HfViTForImageClassification, processor: Any) -> bool:
        """Initialize the classifier as a linear probe. Return False if this is not possible for these labels."""
        is_open = find_problem_type(self.data) == SINGLE and not model.config.use_distillation_token
        if not is_open or self.data.stream is not None:
            return False
        self.probe = on_first_process(self.args, lambda: self.fit(model, processor))
        start_from_probe(model.classifier, self.probe)
        return True

    def fit(self, model: HfViTForImageClassification, processor: Any) -> Probe:
        """Return a linear probe of a model on the training images."""
        size = self.args.per_device_eval_batch_size
        batches = plain_batches(self.task, model, processor, self.data, MOST_IMAGES, size)
        return fit_probe(*encode(model, batches), len(self.data.names), self.task.class_weights(self.data))

    def choose(self, trainer: Any) -> Choice:
        """Interpolate the weights between the linear probe and the fine-tuned model.

        The share of the fine-tuned model is `USUAL_SHARE`, unless another share in `SHARES` has a loss on held-out
        images that is lower by more than a standard error. EMA, adapter and sharded weights are not changed.

        Source: https://arxiv.org/abs/2109.01903
        """
        if trainer.average is not None or is_adapted(trainer.model) or trainer.is_fsdp_enabled:
            return Choice(rows={"linear probe": str(self.probe)})
        with without_load_report():
            model, _ = self.task.open_model(self.data, self.args)
        assert self.probe is not None
        start_from_probe(model.classifier, self.probe)
        start = model.state_dict()
        tuned = {name: value.clone() for name, value in trainer.plain_model.state_dict().items()}
        chosen, found = USUAL_SHARE, ""
        if count_compared_images(self.task, self.data):
            scores, losses, weights = (
                dict[float, float](),
                dict[float, np.ndarray](),
                self.task.class_weights(self.data),
            )
            for share in SHARES:
                trainer.plain_model.load_state_dict(interpolate(start, tuned, share))
                scored = trainer.predict(trainer.eval_dataset, metric_key_prefix=CHOOSING).metrics
                assert isinstance(trainer.evaluator.metric, ClassificationMetric)
                scores[share] = scored[f"{CHOOSING}_accuracy"]
                losses[share] = trainer.evaluator.metric.losses(weights)
            chosen = choose_share(losses)
            found = (
                f" Accuracy on held-out images: {scores[0.0]:.1%} of the linear probe, {scores[1.0]:.1%} of the "
                f"fine-tuned model, {scores[chosen]:.1%} as saved."
            )
        trainer.plain_model.load_state_dict(interpolate(start, tuned, chosen))
        text = f"Saved weights: {1 - chosen:.0%} linear probe, {chosen:.0%} fine-tuned model.{found}"
        return Choice(text, {"linear probe": f"{self.probe} {text}"})


def count_compared_images(task: Any, data: TargetData) -> int:
    """Return the number of held-out images that are evaluated to choose between probe and fine-tuned model."""
    if not isinstance(task, ImageClassification) or not task.options.probe_classifier:
        return 0
    # Reported scores need other images.
    is_open = "validation" in data.splits and (data.division.holds_out or "test" in data.splits)
    return len(SHARES) * data.count_evaluated("validation") if is_open else 0


def interpolate(start: dict[str, Tensor], end: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Interpolate linearly between the weights of two models of the same architecture; `share` 1 returns `end`."""
    if share == 0:  # avoid interpolation, which would return NaN if `end` is not finite
        return start
    return {
        name: torch.lerp(start[name].to(value), value, share) if value.is_floating_point() else value
        for name, value in end.items()
    }


def choose_share(losses: Mapping[float, np.ndarray]) -> float:
    """Return the share with the lowest mean loss if it is better by over a standard error, else `USUAL_SHARE`.

    Args:
        losses: Maps a share to the loss of each image, (M,).
    """
    finite = {share: np.nan_to_num(own, nan=1e9, posinf=1e9) for share, own in losses.items()}
    best = min(finite, key=lambda share: finite[share].mean())
    gains = finite[USUAL_SHARE] - finite[best]
    return best if gains.mean() > gains.std() / np.sqrt(len(gains)) else USUAL_SHARE
