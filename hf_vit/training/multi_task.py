"""Trainer for several heads on one backbone. Each training step belongs to one head."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..model.task_multi_task import COUNTING
from ..outputs import write_atomically
from .callbacks.state import StatefulCallback
from .evaluator_trainer import EvaluatorTrainer
from .trainer import HfViTTrainer


NUM_MEASURED = 5  # number of steps of each head in which the gradient norm is measured
FILE = "loss_weights.json"
INPUTS = ("pixel_values", "patch_attention_mask")


@dataclass
class MultiTaskCollator:
    """Collator of examples of one head, see `MultiTaskDataset`, with the collator of its task."""

    collators: Mapping[str, Any]

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Create a batch of arguments of `HfViTForMultiTask.forward`."""
        name = examples[0]["head"]
        batch = self.collators[name]([example["example"] for example in examples])
        targets = {key: value for key, value in batch.items() if key not in INPUTS}
        return {**{key: batch[key] for key in INPUTS if key in batch}, "targets": {name: targets}, "heads": [name]}


class LossWeights(StatefulCallback):
    """Set the weights of the losses once, so that their gradients on the backbone have equal norms.

    The norms are means over the first `NUM_MEASURED` steps of each head, before clipping. They are scaled to their
    mean, multiplied by the given weights, and fixed for the rest of the run: https://arxiv.org/abs/2201.04122 and
    https://arxiv.org/abs/2505.10347 find that fixed weights are as good as weights that change in each step.

    Args:
        model: The model.
        given: Given weight of each head.
        is_scaled: Whether weights are scaled by gradient norms. Without it, the given weights are used.
    """

    def __init__(self, model: Any, given: Mapping[str, float], is_scaled: bool) -> None:
        self.model, self.given, self.is_scaled = model, given, is_scaled
        self.norms: dict[str, list[float]] = {name: [] for name in given}
        model.loss_weights = self.weights

    @property
    def weights(self) -> dict[str, float]:
        """The current weight of each loss."""
        if not self.is_scaled or any(len(norms) < NUM_MEASURED for norms in self.norms.values()):
            return dict(self.given)
        means = {name: sum(norms) / len(norms) for name, norms in self.norms.items()}
        if min(means.values()) <= 0:  # a frozen backbone has no gradients
            return dict(self.given)
        mean = sum(means.values()) / len(means)
        return {name: self.given[name] * mean / means[name] for name in means}

    def measure(self, name: str) -> None:
        """Measure the norm of the gradient of a step of a head, without the weight of its loss."""
        if not self.is_scaled or len(self.norms[name]) >= NUM_MEASURED:
            return
        gradients = [weight.grad for weight in self.model.model.parameters() if weight.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).norm().item() if gradients else 0.0
        self.norms[name].append(norm / self.given[name])
        self.model.loss_weights = self.weights

    def save_state(self, folder: Path, is_writer: bool) -> None:
        """Save the measured norms."""
        if is_writer:
            write_atomically(folder / FILE, json.dumps(self.norms))

    def load_state(self, folder: Path) -> None:
        """Load the measured norms."""
        self.norms = json.loads((folder / FILE).read_text(encoding="utf-8"))
        self.model.loss_weights = self.weights


class MultiTaskTrainer(HfViTTrainer):
    """Trainer of `HfViTForMultiTask`. The trainer of each single-task model evaluates its head.

    Args:
        *args: Arguments of `HfViTTrainer`.
        weights: Callback that sets the weights of the losses.
        **kwargs: Arguments of `HfViTTrainer`.
    """

    parts: dict[str, EvaluatorTrainer]  # trainer of each head by name

    def __init__(self, *args: Any, weights: LossWeights, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = weights
        self.losses: dict[str, list[torch.Tensor]] = {}  # unweighted losses of each head since the last log
        self.add_callback(weights)
        self.model_accepts_loss_kwargs = self.args.n_gpu <= 1
        self.accelerator.ddp_handler.find_unused_parameters = True  # a step uses the weights of one head

    def get_batch_samples(self, *args: Any) -> tuple[list[Any], Any]:
        """Return the batches of a step, and the divisor of their losses if the head has one."""
        batches, _ = super().get_batch_samples(*args)
        if not batches:
            return batches, None
        (name,) = batches[0]["heads"]
        head: Any = self.plain_model.heads[name]
        if not isinstance(head, COUNTING):
            return batches, None
        counts = [head.count_items(batch["targets"][name]["labels"]) for batch in batches]
        return batches, self._add_up(counts, args[-1])

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a training step, and measure the norm of its gradient in the first steps of each head."""
        (name,) = inputs["heads"]
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.losses.setdefault(name, []).append(loss / self.plain_model.loss_weights[name])
        if self.accelerator.sync_gradients:
            self.weights.measure(name)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values. Logs during training also contain the mean loss of each head, without its weight."""
        if "loss" in logs:
            for name, losses in self.losses.items():
                mean = self.accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
                logs[f"{name}_loss"] = mean * self.args.gradient_accumulation_steps
            self.losses.clear()
        super().log(logs, *args, **kwargs)

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Evaluate all heads. The score names contain the names of the heads; `loss` is the sum with given weights."""
        scores, loss = dict[str, float](), 0.0
        with self.throughput.paused():
            for name, part in self.parts.items():
                part.state.global_step, part.state.epoch = self.state.global_step, self.state.epoch
                if part.eval_dataset is not None:
                    scores |= part.evaluate(metric_key_prefix=f"{metric_key_prefix}_{name}")
                    loss += self.weights.given[name] * scores[f"{metric_key_prefix}_{name}_loss"]
        scores[f"{metric_key_prefix}_loss"] = loss
        self.log(scores)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, scores)
        return scores

    # Timing runs measure the evaluation of the first head.

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the data loader of the first head."""
        return next(iter(self.parts.values())).get_test_dataloader(test_dataset)

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Score a batch of the first head."""
        part = next(iter(self.parts.values()))
        return part.prediction_step(part.model, *args, **kwargs)
