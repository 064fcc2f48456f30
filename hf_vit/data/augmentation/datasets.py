"""Augmented images, drawn again every epoch and the same again under the same seed, as a list or a stream."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

import numpy as np
import torch
from datasets import IterableDataset
from transformers.utils import logging

from ..datasets import ReadTarget, read_example
from ..targets import image_only


logger = logging.get_logger(__name__)


class Examples(Protocol):
    """What has examples at whole numbers, as `datasets.Dataset` and datasets of torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def derive_seed(*numbers: int) -> int:
    """Return a seed that differs for any other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed torch's default generator by some numbers, and restores its state in the end."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would reset the generators of all GPUs too, and with them the dropout.
        torch.default_generator.manual_seed(derive_seed(*numbers))
        yield


def _transformed(transform: Callable[[Any], Any], example: dict[str, Any], column: str | None) -> dict[str, Any]:
    return transform(example) if column is None else {**example, column: transform(example[column])}


@dataclass(eq=False, repr=False)
class AugmentedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset whose examples pass through a random transform.

    The example at an index depends on the seed, the epoch and the index alone: neither on the order in which examples
    are read nor on the number of workers, so that a training that is resumed sees what it would have seen.

    Args:
        dataset: Examples, whatever is in them.
        transform: Draws its randomness from torch's default generator, as those of `torchvision.transforms.v2` do.
        seed: Another seed draws other images.
        column: What of an example the transform changes; `None` gives it the whole example, for targets that move
            with their image.
        classes: The class of each example, if all classes are to be drawn as often, see `BalancedSampler`.
    """

    dataset: Examples
    transform: Callable[[Any], Any]
    seed: int
    column: str | None = "image"
    classes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        # In shared memory, so that worker processes that outlive an epoch know the next one.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Draw the images of an epoch from now on. The Trainer's loader calls it."""
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        """Return the transformed example; with a pair of numbers, the second one tells its augmentations apart."""
        numbers = index if isinstance(index, tuple) else (index, 0)
        example = self.dataset[numbers[0]]
        with seeded(self.seed, int(self.epoch), *(numbers if numbers[1] else numbers[:1])):
            return _transformed(self.transform, example, self.column)


@dataclass(eq=False, repr=False)
class AugmentedStream(torch.utils.data.IterableDataset[dict[str, Any] | None]):
    """Images of a stream that are read, pass through a random transform, and come again in another order, without end.

    What comes depends on the seed and on the number of processes and worker processes alone. Each of these reads its
    own shards, mostly files, so that every image comes once in an epoch of all. Where there are fewer shards than
    processes, several read the same and each keeps its own rows.

    Args:
        stream: The columns `image`, encoded, `file`, and what `read_target` reads.
        transform: From an example, `image` (PIL, upright), `file` and its target, to another, or see `column`;
            draws its randomness from torch's default generator.
        seed: Another seed draws other images, in another order.
        buffer_size: Among how many images the next one is drawn.
        skip_unreadable: Whether images that cannot be read are left out, with a warning.
        read_target: From a row to what an example has beside the image and its file.
        column: What of an example the transform changes, if not the whole of it.
        shard_by_process: Whether, of several processes that train by `HfViTTrainer`, each reads its own shards;
            else the first one reads for all, and they train as one would.
    """

    stream: IterableDataset
    transform: Callable[[Any], Any]
    seed: int
    buffer_size: int
    skip_unreadable: bool = False
    read_target: ReadTarget = image_only
    column: str | None = None
    shard_by_process: bool = True

    def __post_init__(self) -> None:
        self.process_index, self.num_processes = 0, 1
        self.num_batches_done, self.batch_size = 0, 0

    def share(self, process_index: int, num_processes: int) -> None:
        """Lets each of several processes read a part; unless this is called, each reads all."""
        self.process_index, self.num_processes = process_index, num_processes

    def start_after(self, num_batches: int, batch_size: int) -> None:
        """Leave `None` in the place of the examples of the first batches of this process, without reading them."""
        self.num_batches_done, self.batch_size = num_batches, batch_size

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        """Yield transformed examples; ends only if there are none at all.

        Raises:
            OSError: if an image cannot be read and `skip_unreadable` is not set.
            ValueError: if a row is wrong, or this is one of several processes and none is left for it.
        """
        worker = torch.utils.data.get_worker_info()
        index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        reader, readers = self.process_index * workers + index, self.num_processes * workers
        # Worker processes make batches in turns.
        done = len(range(index, self.num_batches_done, workers)) * self.batch_size
        place = 0
        for epoch in count():
            number = -1
            for number, example in enumerate(self._read(epoch, reader, readers, done - place)):
                if place < done or example is None:
                    yield None
                else:
                    with seeded(self.seed, epoch, reader, number):
                        transformed = _transformed(self.transform, example, self.column)
                    yield transformed
                place += 1
            if number < 0 and readers > 1:
                raise ValueError(
                    f"The stream has no image for one of {readers} readers ({self.num_processes} processes with "
                    f"{workers} workers each). Set --dataloader_num_workers lower."
                )
            if number < 0:
                return

    def _read(self, epoch: int, reader: int, readers: int, num_done: int) -> Iterator[dict[str, Any] | None]:
        """Yield the examples of an epoch that can be read, and `None` for the first ones, which are done."""
        for row in self._rows(epoch, reader, readers):
            if num_done > 0 and not self.skip_unreadable:  # else they must be read to be counted
                num_done -= 1
                yield None
                continue
            try:
                example = read_example(row, self.read_target)
            except (OSError, ValueError) as error:
                if not self.skip_unreadable:
                    raise
                logger.warning("Left out, as it cannot be read: %s", error)
                continue
            yield example

    def _rows(self, epoch: int, reader: int, readers: int) -> Iterator[dict[str, Any]]:
        places = min(self.stream.num_shards, readers)
        own = self.stream if places == 1 else self.stream.shard(places, reader % places, contiguous=False)
        shuffled = own.shuffle(seed=derive_seed(self.seed, epoch), buffer_size=self.buffer_size)
        # Its __iter__ would give each worker process a part once more.
        rows = ({name: values[0] for name, values in batch.items()} for batch in shuffled.iter(batch_size=1))
        sharing = len(range(reader % places, readers, places))  # readers of the same shards
        return islice(rows, reader // places, None, sharing)


@dataclass(eq=False, repr=False)
class RepeatedAugmentationSampler(torch.utils.data.Sampler[tuple[int, int]]):
    """Draws several augmentations of each image of a step (https://arxiv.org/abs/1901.09335).

    An epoch is as long as the dataset, and so has but one in so many of its images, others in each epoch, as in DeiT
    (https://arxiv.org/abs/2012.12877). What comes depends on the seed and the epoch of the dataset alone.

    Args:
        dataset: The images.
        repeats: How many augmentations of each.
        step_size: Images of a step, on all processes and in all batches that are accumulated.

    Raises:
        ValueError: if a step is not made of whole groups of augmentations.
    """

    dataset: AugmentedDataset
    repeats: int
    step_size: int

    def __post_init__(self) -> None:
        if self.step_size % self.repeats:
            raise ValueError(
                f"repeated_augmentations={self.repeats} does not divide the {self.step_size} images of a step. Set "
                f"--per_device_train_batch_size to a multiple of {self.repeats}."
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        # Of each step one augmentation of all images first: neighbors, which are mixed, are never the same image.
        seed = derive_seed(self.dataset.seed, int(self.dataset.epoch))
        length = len(self.dataset)
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
        for start in range(0, length, self.step_size):
            size, first = min(self.step_size, length - start), start // self.repeats
            images = order[first : first + -(-size // self.repeats)]
            yield from [(image, repeat) for repeat in range(self.repeats) for image in images][:size]


@dataclass(eq=False, repr=False)
class BalancedSampler(torch.utils.data.Sampler[tuple[int, int]]):
    """Draws as many images of each class, to within one, in an epoch that is as long as the dataset.

    Images of a class are drawn as often, to within one; those of rare classes repeat, each time augmented anew. What
    comes depends on the seed and the epoch of the dataset alone.

    Args:
        dataset: The images, with their `classes`.
    """

    dataset: AugmentedDataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        generator = np.random.default_rng((self.dataset.seed, int(self.dataset.epoch)))
        classes = np.asarray(self.dataset.classes)
        numbers = generator.permutation(np.unique(classes))
        groups = [generator.permutation(np.flatnonzero(classes == number)).tolist() for number in numbers]
        for place in generator.permutation(len(self)).tolist():
            turn, group = place // len(groups), groups[place % len(groups)]
            yield group[turn % len(group)], turn // len(group)
