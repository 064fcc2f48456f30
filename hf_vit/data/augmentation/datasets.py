"""Reproducible datasets and streams of augmented images, and samplers for training."""

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
    """Protocol of map-style datasets, such as `datasets.Dataset` and `torch.utils.data.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def derive_seed(*numbers: int) -> int:
    """Hash numbers to a 64-bit seed, so that different numbers give different seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Context manager that seeds torch's default generator with a hash of numbers and restores its state on exit."""
    with torch.random.fork_rng(devices=[]):
        # Seed only the CPU generator: torch.manual_seed would also reset the GPU generators and change dropout masks.
        torch.default_generator.manual_seed(derive_seed(*numbers))
        yield


def _transformed(transform: Callable[[Any], Any], example: dict[str, Any], column: str | None) -> dict[str, Any]:
    return transform(example) if column is None else {**example, column: transform(example[column])}


@dataclass(eq=False, repr=False)
class AugmentedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Dataset that applies a random transform to the examples of another dataset.

    The example at an index depends only on the seed, the epoch and the index, not on the order in which examples are
    read or on the number of workers. Therefore, a resumed training run sees the same examples.

    Args:
        dataset: Dataset of dictionaries.
        transform: Random transform that uses torch's default generator, like those of `torchvision.transforms.v2`.
        seed: Seed of the random transform.
        column: Key of the value that is transformed; `None` passes the whole example to the transform, for targets
            that change together with the image.
        classes: Class number of each example, required by `BalancedSampler`.
    """

    dataset: Examples
    transform: Callable[[Any], Any]
    seed: int
    column: str | None = "image"
    classes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        # Shared memory makes the new epoch visible to persistent worker processes.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that random transforms depend on. The data loader of the Trainer calls this method."""
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        """Return the transformed example at an index, or for a pair (index, n), its n-th random augmentation."""
        numbers = index if isinstance(index, tuple) else (index, 0)
        example = self.dataset[numbers[0]]
        with seeded(self.seed, int(self.epoch), *(numbers if numbers[1] else numbers[:1])):
            return _transformed(self.transform, example, self.column)


@dataclass(eq=False, repr=False)
class AugmentedStream(torch.utils.data.IterableDataset[dict[str, Any] | None]):
    """Endless stream of images with a random transform, in a new random order in each epoch.

    The examples depend only on the seed, the number of processes, and the number of workers. Each worker reads its own
    shards (usually files), so that all workers together read each image once per epoch. If there are fewer shards than
    workers, several workers read a shard, and each of them uses a part of the rows.

    Args:
        stream: Stream with the columns `image` (encoded), `file`, and the columns that `read_target` reads.
        transform: Random transform that uses torch's default generator. Its argument is the value of `column` or, by
            default, an example with `image` (PIL, upright), `file` and its target.
        seed: Seed of the random order and the random transform.
        buffer_size: Size of the shuffle buffer in images.
        skip_unreadable: Whether to skip unreadable images with a warning.
        read_target: Function from a row to its target.
        column: Key of the value that is passed to the transform. By default, the whole example is passed.
        shard_by_process: Whether each process of `HfViTTrainer` reads its own shards. Otherwise, the first process
            reads all images and distributes them, which gives the same batches as a single process.
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
        """Restrict this process to its part of the stream. Without this call, each process reads the whole stream."""
        self.process_index, self.num_processes = process_index, num_processes

    def start_after(self, num_batches: int, batch_size: int) -> None:
        """Skip the first batches of this process: yield `None` instead of their examples, without reading them."""
        self.num_batches_done, self.batch_size = num_batches, batch_size

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        """Yield transformed examples without end, unless the stream is empty.

        Raises:
            OSError: if an image cannot be read and `skip_unreadable` is not set.
            ValueError: if a row is invalid, or if there are too few images to give each worker at least one.
        """
        worker = torch.utils.data.get_worker_info()
        index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        reader, readers = self.process_index * workers + index, self.num_processes * workers
        # Worker processes create batches in turn, so this worker created every `workers`-th finished batch.
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
                    f"The stream has too few images: one of {readers} workers ({self.num_processes} processes with "
                    f"{workers} workers each) gets none. Reduce --dataloader_num_workers."
                )
            if number < 0:
                return

    def _read(self, epoch: int, reader: int, readers: int, num_done: int) -> Iterator[dict[str, Any] | None]:
        """Yield the readable examples of an epoch. The first `num_done` are `None` unless `skip_unreadable` is set."""
        for row in self._rows(epoch, reader, readers):
            # If `skip_unreadable` is set, images must be read to find out which ones are skipped.
            if num_done > 0 and not self.skip_unreadable:
                num_done -= 1
                yield None
                continue
            try:
                example = read_example(row, self.read_target)
            except (OSError, ValueError) as error:
                if not self.skip_unreadable:
                    raise
                logger.warning("Skipped an unreadable image: %s", error)
                continue
            yield example

    def _rows(self, epoch: int, reader: int, readers: int) -> Iterator[dict[str, Any]]:
        places = min(self.stream.num_shards, readers)
        own = self.stream if places == 1 else self.stream.shard(places, reader % places, contiguous=False)
        shuffled = own.shuffle(seed=derive_seed(self.seed, epoch), buffer_size=self.buffer_size)
        # `shuffled.iter` does not split the stream among worker processes a second time, unlike `shuffled.__iter__`.
        rows = ({name: values[0] for name, values in batch.items()} for batch in shuffled.iter(batch_size=1))
        sharing = len(range(reader % places, readers, places))  # number of workers that read the same shards
        return islice(rows, reader // places, None, sharing)


@dataclass(eq=False, repr=False)
class RepeatedAugmentationSampler(torch.utils.data.Sampler[tuple[int, int]]):
    """Sampler for repeated augmentation: an optimizer step contains several augmentations of each of its images.

    See https://arxiv.org/abs/1901.09335. As in DeiT (https://arxiv.org/abs/2012.12877), an epoch has as many examples
    as the dataset, so it uses only a random fraction 1 / `repeats` of the images. The order depends only on the seed
    and the epoch of the dataset.

    Args:
        dataset: Dataset of augmented images.
        repeats: Number of augmentations per image.
        step_size: Number of images in an optimizer step, over all processes and accumulated batches.

    Raises:
        ValueError: if `step_size` is not a multiple of `repeats`.
    """

    dataset: AugmentedDataset
    repeats: int
    step_size: int

    def __post_init__(self) -> None:
        if self.step_size % self.repeats:
            raise ValueError(
                f"The {self.step_size} images of an optimizer step are not a multiple of repeated_augmentations="
                f"{self.repeats}. Set --per_device_train_batch_size to a multiple of {self.repeats}."
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        # Within a step, all images occur once before any is repeated, so that Mixup never mixes an image with itself.
        seed = derive_seed(self.dataset.seed, int(self.dataset.epoch))
        length = len(self.dataset)
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
        for start in range(0, length, self.step_size):
            size, first = min(self.step_size, length - start), start // self.repeats
            images = order[first : first + -(-size // self.repeats)]
            yield from [(image, repeat) for repeat in range(self.repeats) for image in images][:size]


@dataclass(eq=False, repr=False)
class BalancedSampler(torch.utils.data.Sampler[tuple[int, int]]):
    """Sampler that draws equally many images of each class; an epoch has as many examples as the dataset.

    All classes are drawn equally often, up to a difference of one, and so are all images of the same class. Images of
    rare classes are repeated with different augmentations. The order depends only on the seed and the epoch of the
    dataset.

    Args:
        dataset: Dataset of augmented images with `classes`.
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
