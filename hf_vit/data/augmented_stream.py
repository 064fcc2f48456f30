"""Augmentation of images that come as a stream."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from datasets import IterableDataset
from transformers.utils import logging

from .augmented_dataset import seeded
from .target_dataset import ReadTarget, read_example


logger = logging.get_logger(__name__)


class AugmentedStream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Images of a stream that are read and pass through a random transform.

    What is drawn for an image depends on the seed, the epoch, and its place in the stream. Of several worker processes
    each reads its own shards; of several processes that train, the first one reads for all, which is what accelerate
    does with streams. Only whole batches of all processes come out, so that no image comes twice where they end.
    """

    def __init__(
        self,
        stream: IterableDataset,
        read_target: ReadTarget,
        transform: Callable[[Any], Any],
        seed: int,
        batch_size: int,
        skip_unreadable: bool = False,
    ) -> None:
        """Wraps a stream.

        Args:
            stream: The columns of a `TargetDataset`, images encoded.
            read_target: As in `TargetDataset`.
            transform: From an example to an example; draws its randomness from torch's default generator.
            seed: Another seed draws other images.
            batch_size: Number of images in a batch of all processes.
            skip_unreadable: Whether images that cannot be read are left out, with a warning.
        """
        super().__init__()
        self.stream = stream
        self.read_target = read_target
        self.transform = transform
        self.seed = seed
        self.batch_size = batch_size
        self.skip_unreadable = skip_unreadable
        # In shared memory, as in `AugmentedDataset`.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the images, and the order, of another epoch. The Trainer's loader calls it."""
        self.epoch.fill_(epoch)
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields transformed examples.

        Raises:
            OSError: if an image cannot be read and `skip_unreadable` is not set.
            ValueError: if a row is wrong.
        """
        examples = self._examples()
        while len(batch := list(islice(examples, self.batch_size))) == self.batch_size:
            yield from batch

    def _examples(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        number = 0 if worker is None else worker.id
        for index, row in enumerate(self.stream):
            try:
                example = read_example(row, self.read_target)
            except (OSError, ValueError) as error:
                if not self.skip_unreadable:
                    raise
                logger.warning("Left out, as it cannot be read: %s", error)
                continue
            with seeded(self.seed, int(self.epoch), number, index):
                example = self.transform(example)
            yield example
