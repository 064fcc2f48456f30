"""Training examples of several tasks, and the sampler that assigns each training step to a task."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .datasets import AugmentedDataset, derive_seed


Key = tuple[str, int, int]  # name of the task, index of the example, and number of its earlier augmentations


@dataclass(eq=False, repr=False)
class MultiTaskDataset(AugmentedDataset):
    """Augmented examples of several tasks, by the names of the tasks."""

    parts: Mapping[str, AugmentedDataset] = field(kw_only=True)
    shares: Mapping[str, float] = field(kw_only=True)  # shares of the training steps; only the ratios matter

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def __getitem__(self, key: Any) -> dict[str, Any]:
        """Return the name of the task (`head`) and the augmented example (`example`) for a key of `TaskSampler`."""
        name, index, repeat = key
        return {"head": name, "example": self.parts[name][(index, repeat)]}


@dataclass(eq=False, repr=False)
class TaskSampler(torch.utils.data.Sampler[Key]):
    """Sampler in which all examples of a training step belong to one task.

    Each step is assigned to the task that is furthest behind its share, so that tasks alternate evenly. Each task
    iterates over its examples repeatedly, in a new random order each time. The order depends only on the seed, the
    step size and the epoch, so that a run with several processes and a resumed run use the same examples.
    """

    dataset: MultiTaskDataset
    step_size: int  # number of examples in a training step, over all processes and accumulated batches

    @property
    def num_steps(self) -> int:
        """Number of training steps of an epoch: the number of examples of all tasks divided by the step size."""
        return max(1, len(self.dataset) // self.step_size)

    def __len__(self) -> int:
        return self.num_steps * self.step_size

    def __iter__(self) -> Iterator[Key]:
        first = int(self.dataset.epoch) * self.num_steps
        done = dict.fromkeys(self.dataset.parts, 0)
        for step in range(first + self.num_steps):
            name = self._next_task(step, done)
            if step >= first:
                yield from self._examples(name, done[name] * self.step_size)
            done[name] += 1

    def _next_task(self, step: int, done: Mapping[str, int]) -> str:
        shares, total = self.dataset.shares, sum(self.dataset.shares.values())
        return max(done, key=lambda name: (step + 1) * shares[name] / total - done[name])

    def _examples(self, name: str, start: int) -> Iterator[Key]:
        """Yield the keys of the examples of one step of a task, after `start` earlier examples of this task."""
        count, task = len(self.dataset.parts[name]), [*self.dataset.parts].index(name)
        orders: dict[int, list[int]] = {}
        for number in range(start, start + self.step_size):
            turn, place = divmod(number, count)
            if turn not in orders:
                generator = torch.Generator().manual_seed(derive_seed(self.dataset.seed, task, turn))
                orders[turn] = torch.randperm(count, generator=generator).tolist()
            yield name, orders[turn][place], turn
