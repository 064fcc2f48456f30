"""A schedule whose length changes while a training runs, without the learning rate rising again after its peak."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def planned_step(step: int, lengths: Mapping[int, int]) -> float:
    """Returns the step of the planned schedule whose learning rate a step has, the same number without changes.

    Args:
        step: Of the training.
        lengths: All steps of the training by the step from which on there are so many; by 0 those that were planned.
            From a change on, what is left of the planned schedule is spread evenly over the steps that are left.
    """
    start, place, length = 0, 0.0, lengths[0]
    for changed, new_length in sorted(lengths.items()):
        if 0 < changed <= step:
            place += (changed - start) * (lengths[0] - place) / max(length - start, 1)
            start, length = changed, new_length
    return place + (step - start) * (lengths[0] - place) / max(length - start, 1) if start else step


def follow_lengths(scheduler: LRScheduler, lengths: Mapping[int, int]) -> None:
    """Lets a schedule follow `lengths`, see `planned_step`, also as they change; one that goes by scores does not."""

    def follow(factor: Callable[[Any], float], step: int) -> float:
        return factor(planned_step(step, lengths))

    if isinstance(scheduler, LambdaLR):
        scheduler.lr_lambdas = [partial(follow, factor) for factor in scheduler.lr_lambdas]
