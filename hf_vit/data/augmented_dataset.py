"""Augmentation: images that are drawn anew every epoch, and the same again under the same seed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL.Image import Image
from torch import Tensor


class AugmentedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset whose images pass through a random transform.

    The image at an index depends on the seed, the epoch and the index alone: neither on the order in which images are
    read nor on the number of workers, so that a training that is taken up again sees what it would have seen.
    """

    def __init__(self, dataset: Dataset, transform: Callable[[Image], Image | Tensor], seed: int) -> None:
        """Wraps a dataset.

        Args:
            dataset: Examples with the column `image` (PIL).
            transform: Draws its randomness from torch's default generator, as those of `torchvision.transforms.v2` do.
            seed: Another seed draws other images.
        """
        self.dataset = dataset
        self.transform = transform
        self.seed = seed
        # In shared memory, so that worker processes that outlive an epoch learn of the next one.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the images of another epoch. The Trainer's loader calls it."""
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the example with its image transformed."""
        example = self.dataset[index]
        state = np.random.SeedSequence((self.seed, int(self.epoch), index)).generate_state(1, np.uint64)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed: it would reset the generators of all GPUs too, and with them the dropout.
            torch.default_generator.manual_seed(int(state[0]))
            return {**example, "image": self.transform(example["image"])}
