"""Trainer for several heads on one backbone. Each training step belongs to one head."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..model.task_multi_task import COUNTING
from ..outputs import write_atomically
from .callbacks.state import StatefulCallback
from .finetuning.frozen_features import MODEL_INPUTS, STATES
from .optimizer import find_backbone
from .trainer import HfViTTrainer


NUM_MEASURED = 5  # number of steps of each head in which the gradient norm is measured
MIN_NORM = 1e-12  # minimum gradient norm by which a weight is divided
FILE = "loss_weights.json"
INPUTS = (*MODEL_INPUTS, STATES)


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
    """Weight the losses of the heads in the gradients of the backbone, after clipping. Heads do not need weights.

    After `NUM_MEASURED` steps of each head, weights are set so that the measured gradients have equal norms, and fixed
    for the rest of the run: https://arxiv.org/abs/2201.04122 and https://arxiv.org/abs/2505.10347 find that fixed
    weights are as good as weights that change in each step. The given weights of the heads are factors of these
    weights or, without `is_scaled`, the weights.
    """

    def __init__(self, given: Mapping[str, float], is_scaled: bool) -> None:
        self.given, self.is_scaled = given, is_scaled
        self.head = ""  # head of the current step
        self.norms: dict[str, list[float]] = {name: [] for name in given}

    @property
    def weights(self) -> dict[str, float]:
        """The current weight of each loss."""
        if not self.is_scaled or any(len(norms) < NUM_MEASURED for norms in self.norms.values()):
            return dict(self.given)
        means = {name: sum(norms) / len(norms) for name, norms in self.norms.items()}
        mean = sum(means.values()) / len(means)
        return {name: weight * mean / max(means[name], MIN_NORM) for name, weight in self.given.items()}

    def start_step(self, head: str) -> None:
        """Record the head of the current step."""
        self.head = head

    def on_pre_optimizer_step(self, *_: Any, model: Any, **kwargs: Any) -> None:
        """Weight the gradients of the backbone, and measure their norm in the first steps of each head."""
        backbone = find_backbone(model)
        assert backbone is not None
        gradients = [weight.grad for weight in backbone.parameters() if weight.grad is not None]
        if not gradients:  # the backbone is frozen
            return
        norms, weight = self.norms[self.head], self.weights[self.head]
        if self.is_scaled and len(norms) < NUM_MEASURED:
            norms.append(torch.stack(torch._foreach_norm(gradients)).norm().item())
        torch._foreach_mul_(gradients, weight)

    def save_state(self, folder: Path, is_writer: bool) -> None:
        """Save the measured norms."""
        if is_writer:
            write_atomically(folder / FILE, json.dumps(self.norms))

    def load_state(self, folder: Path) -> None:
        """Load the measured norms."""
        self.norms = json.loads((folder / FILE).read_text(encoding="utf-8"))


class MultiTaskTrainer(HfViTTrainer):
    """Trainer of `HfViTForMultiTask`, with a callback that sets the weights of the losses.

    `parts` are the trainers of the single-task models, by the names of their heads, which they evaluate.
    """

    train_dataset: Any  # a `MultiTaskDataset`

    def __init__(self, *args: Any, weights: LossWeights, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = weights
        self.losses: dict[str, list[torch.Tensor]] = {}  # losses of each head since the last log
        self.add_callback(weights)
        self.model_accepts_loss_kwargs = self.args.n_gpu <= 1
        self.accelerator.ddp_handler.find_unused_parameters = True  # a step uses the weights of one head

    def feature_sources(self) -> dict[str, tuple[Any, Any, Any, Any]]:
        """Return model, training images, collator and loss function of each head, by name."""
        own = {name: (part.plain_model, part.train_dataset, part.data_collator) for name, part in self.parts.items()}
        return {name: (*each, partial(self.head_loss, each[0])) for name, each in own.items()}

    def open_features(self, most_images: int | None = None, **options: Any) -> None:
        """Compute the features of the training images of each head, or open those that are already stored."""
        super().open_features(most_images, **options)
        datasets = {name: features.dataset for name, features in self.stored.items()}
        self.train_dataset = replace(self.train_dataset, parts=datasets)
        self.data_collator = MultiTaskCollator({name: features.collator for name, features in self.stored.items()})

    def head_loss(self, head: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of a head, with frozen parts in evaluation mode."""
        for module in self.frozen:
            module.eval()
        loss: torch.Tensor = head(**batch).loss
        return loss

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
        """Run a training step, and record its head and loss."""
        (head,) = inputs["heads"]
        self.weights.start_step(head)
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.losses.setdefault(head, []).append(loss)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values. Logs during training also contain the mean loss of each head."""
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
                part.follow(self.state)
                if part.eval_dataset is not None:
                    scores |= part.evaluate(metric_key_prefix=f"{metric_key_prefix}_{name}")
                    loss += self.weights.given[name] * scores[f"{metric_key_prefix}_{name}_loss"]
        scores[f"{metric_key_prefix}_loss"] = loss
        self.log(scores)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, scores)
        return scores
