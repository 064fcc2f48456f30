"""Augmentation of images that come as a stream."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from datasets import IterableDataset
from transformers.utils import logging

from .augmented_dataset import derive_seed, seeded
from .target_dataset import read_example


logger = logging.get_logger(__name__)


class AugmentedStream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Images of a stream that are read, pass through a random transform, and come again in another order, without end.

    What comes depends on the seed alone: a training that is taken up again sees what it would have seen. Of several
    worker processes each reads its own shards; of several processes that train, the first one reads for all, which is
    what accelerate does with streams.
    """

    def __init__(
        self,
        stream: IterableDataset,
        transform: Callable[[Any], Any],
        seed: int,
        buffer_size: int,
        skip_unreadable: bool = False,
    ) -> None:
        """Wraps a stream.

        Args:
            stream: The columns `image`, encoded, and `file`.
            transform: From `image` (PIL, upright) and `file` to an example; draws its randomness from torch's default
                generator.
            seed: Another seed draws other images, in another order.
            buffer_size: Among how many images the next one is drawn.
            skip_unreadable: Whether images that cannot be read are left out, with a warning.
        """
        super().__init__()
        self.stream = stream
        self.transform = transform
        self.seed = seed
        self.buffer_size = buffer_size
        self.skip_unreadable = skip_unreadable

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields transformed examples; ends only where there are none, as in a worker process without a shard.

        Raises:
            OSError: if an image cannot be read and `skip_unreadable` is not set.
            ValueError: if a row is wrong.
        """
        for epoch in count():
            number = -1
            for number, example in enumerate(self._read(epoch)):
                yield self._transformed(example, epoch, number)
            if number < 0:
                return

    def _read(self, epoch: int) -> Iterator[dict[str, Any]]:
        for row in self.stream.shuffle(seed=derive_seed(self.seed, epoch), buffer_size=self.buffer_size):
            try:
                yield read_example(row, lambda _: {})
            except (OSError, ValueError) as error:
                if not self.skip_unreadable:
                    raise
                logger.warning("Left out, as it cannot be read: %s", error)

    def _transformed(self, example: dict[str, Any], epoch: int, number: int) -> dict[str, Any]:
        worker = torch.utils.data.get_worker_info()
        with seeded(self.seed, epoch, 0 if worker is None else worker.id, number):
            transformed: dict[str, Any] = self.transform(example)
        return transformed
