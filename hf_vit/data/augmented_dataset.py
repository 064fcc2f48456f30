"""Augmentation: images that are drawn anew every epoch, and the same again under the same seed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch


class Examples(Protocol):
    """What has examples at whole numbers, as `datasets.Dataset` and datasets of torch."""

    def __len__(self) -> int:
        """Returns how many there are."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns one of them."""


def derive_seed(*numbers: int) -> int:
    """Returns a seed that is another for any other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Lets torch's default generator draw what these numbers say, and then go on as if nothing had happened."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would reset the generators of all GPUs too, and with them the dropout.
        torch.default_generator.manual_seed(derive_seed(*numbers))
        yield


class AugmentedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset whose examples pass through a random transform.

    The example at an index depends on the seed, the epoch and the index alone: neither on the order in which examples
    are read nor on the number of workers, so that a training that is taken up again sees what it would have seen.
    """

    def __init__(
        self,
        dataset: Examples,
        transform: Callable[[Any], Any],
        seed: int,
        column: str | None = "image",
    ) -> None:
        """Wraps a dataset.

        Args:
            dataset: Examples, whatever is in them.
            transform: Draws its randomness from torch's default generator, as those of `torchvision.transforms.v2` do.
            seed: Another seed draws other images.
            column: What of an example the transform changes; `None` gives it the whole example, for targets that move
                with their image.
        """
        self.dataset = dataset
        self.transform = transform
        self.seed = seed
        self.column = column
        # In shared memory, so that worker processes that outlive an epoch learn of the next one.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the images of another epoch. The Trainer's loader calls it."""
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self.dataset)

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        """Returns the transformed example; with a pair of numbers, the second one tells its augmentations apart."""
        numbers = index if isinstance(index, tuple) else (index, 0)
        example = self.dataset[numbers[0]]
        with seeded(self.seed, int(self.epoch), *(numbers if numbers[1] else numbers[:1])):
            if self.column is None:
                return self.transform(example)
            return {**example, self.column: self.transform(example[self.column])}
