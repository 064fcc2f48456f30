"""The library's Trainer with parameter groups, frozen parts, Muon, and schedule-free optimizers done right."""

from typing import Any

import torch
from torch import nn
from transformers import SchedulerType

from .optim.arguments import SCHEDULE_FREE, check_optimization, optimization_of
from .optim.muon import Muon
from .optim.parameter_groups import decayed_parameter_names, freeze, make_parameter_groups
from .safe_trainer import SafeTrainer


class OptimizedTrainer(SafeTrainer):
    """`transformers.Trainer`, safe to open, that reads `OptimizationArguments` where its arguments have them.

    Only matrices of linear layers and convolutions have weight decay. The learning rate in the logs is that of layers
    without a factor of their own.

    What is frozen is as in an evaluation: without dropout and stochastic depth, and with the statistics of batch norms
    as they are, so that what stands on it learns from the features that it will see.

    A schedule-free optimizer trains other weights than those it averages. These are the ones that are evaluated, saved
    and left behind.
    """

    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `transformers.Trainer`.

        Raises:
            ValueError: if an option is out of range, does not fit the model, or does not go with another.
        """
        super().__init__(*args, **kwargs)
        check_optimization(self.args)
        self.optimization = optimization_of(self.args)
        if self.optimization.use_muon:
            self.check_weights_are_open("use_muon=True")
        self.frozen: list[nn.Module] = []
        prefixes, trainable_blocks = self.optimization.frozen_prefixes(), self.optimization.trainable_blocks
        if prefixes or trainable_blocks is not None:
            if self.model_init is not None:
                raise ValueError("A model of model_init is built anew, and nothing of it stays frozen. Give a model.")
            self.frozen = freeze(self.model, prefixes, trainable_blocks)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Lists the parameters that have weight decay."""
        return decayed_parameter_names(model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Builds the optimizer that the arguments name, with `make_parameter_groups`."""
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            return super().create_optimizer(model)
        trained = self.model if model is None else model
        optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
        groups = make_parameter_groups(
            trained,
            self.args.learning_rate,
            self.args.weight_decay,
            layer_decay=self.optimization.layer_decay,
            head_lr_multiplier=self.optimization.head_lr_multiplier,
            use_muon=self.optimization.use_muon,
        )
        optimizer_class = Muon if self.optimization.use_muon else optimizer_class
        # Where the library takes groups from. Some optimizers bring their own.
        self.optimizer_cls_and_kwargs = optimizer_class, {"params": groups, **options}
        try:
            return super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = None

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Builds the schedule, which may be told shares of the training in place of steps."""
        num_warmup_steps = self.args.get_warmup_steps(num_training_steps)
        if self.args.optim in SCHEDULE_FREE and self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["warmup_steps"] = num_warmup_steps  # the library takes a share for a number
        given = self.args.lr_scheduler_kwargs
        if self.args.lr_scheduler_type == SchedulerType.WARMUP_STABLE_DECAY and "num_decay_steps" not in (given or {}):
            num_decay_steps = self.optimization.count_decay_steps(num_training_steps, num_warmup_steps)
            self.args.lr_scheduler_kwargs = {**(given or {}), "num_decay_steps": num_decay_steps}
        try:
            return super().create_scheduler(num_training_steps, optimizer)
        finally:
            self.args.lr_scheduler_kwargs = given

    def _get_learning_rate(self) -> float:
        """Returns the learning rate of layers without a factor of their own."""
        return super()._get_learning_rate() / self.optimizer.param_groups[0].get("lr_scale", 1.0)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss of a batch, with what is frozen as in an evaluation."""
        for module in self.frozen:
            module.eval()
        return super().compute_loss(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, and leaves the weights in the model that are meant to be used."""
        result = super().train(*args, **kwargs)
        self._take_averages()
        return result

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves the model with the weights that are meant to be used."""
        self._take_averages()
        super().save_model(*args, **kwargs)

    def _load_best_model(self) -> None:
        """Loads the best model, whose weights are already those that are meant to be used."""
        self._take_averages()
        super()._load_best_model()

    def _take_averages(self) -> None:
        """Puts the weights in place that a schedule-free optimizer averages, until its next step."""
        if self.args.optim in SCHEDULE_FREE and self.optimizer is not None:
            self.optimizer.eval()
