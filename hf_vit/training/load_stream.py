"""Opens training images that come as a stream, checks some of them, and holds the first ones out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, IterableDataset
from transformers.utils import logging

from ..data import (
    AugmentedStream,
    NamedImages,
    TargetData,
    TargetDataset,
    first_images,
    load_unlabeled_images,
    masked_image_target,
    stream_image_classification,
    stream_images,
    unreadable_images,
)
from ..data.augmentation.datasets import label_target
from ..data.datasets import SPLIT_SEED
from ..data.formats.files import SPLITS, split_names
from ..data.loaders.unlabeled_images import CLASS, NO_CLASS
from .arguments import ClassificationDataArguments, HfViTTrainingArguments, UnlabeledDataArguments
from .checks import check_steps
from .load_data import HELD_OUT, UNREADABLE, at_most, fault_finder, load_targets, readable_images


logger = logging.get_logger(__name__)
MAX_STREAMED = 1000  # images of a split of a stream that are evaluated, by default


@dataclass(frozen=True)
class TrainingStream:
    """Streams the training images of a classifier, rows with the columns `image` (encoded), `file` and `label`."""

    rows: IterableDataset
    buffer_size: int  # among how many images the next one is drawn
    skip_unreadable: bool = False
    shard_by_process: bool = True

    def augmented(self, transform: Callable[[Any], Any], seed: int) -> AugmentedStream:
        """Returns the images as they are trained on."""
        return AugmentedStream(
            self.rows,
            transform,
            seed,
            self.buffer_size,
            self.skip_unreadable,
            label_target,
            column="image",
            shard_by_process=self.shard_by_process,
        )


@dataclass(frozen=True)
class LabeledImages:
    """The images of a classifier, by split, in the columns `image`, `file` and `label`.

    Of a stream, `splits` has the images that are evaluated and, as "train", a sample of the training images.
    """

    splits: DatasetDict
    stream: TrainingStream | None = None

    @property
    def names(self) -> list[str]:
        """The names of the classes."""
        names: list[str] = next(iter(self.splits.values())).features["label"].names
        return names

    def examples(self, split: str) -> NamedImages:
        """Returns the images of a split, read on access."""
        return NamedImages(self.splits[split])


def load_stream(args: ClassificationDataArguments, training_args: HfViTTrainingArguments) -> LabeledImages:
    """Opens the images of a training, and checks those that are evaluated; `ValueError` if it counts epochs."""
    check_steps(training_args)
    if args.train_val_split is None:  # which splits there are is seen when the stream is open
        args.train_val_split = HELD_OUT
    with training_args.main_process_first(desc="opening the data"):
        opened = stream_image_classification(
            args.dataset_name,
            label_column_name=args.label_column_name,
            class_names=split_names(args.class_names),
            train_val_split=args.train_val_split,
            **args.source_options(),
        )
    count, buffer_size = args.max_eval_samples or MAX_STREAMED, args.shuffle_buffer_size
    splits = {name: at_most(args.max_eval_samples, split, training_args.seed) for name, split in opened.listed.items()}
    streamed = [*opened.streamed, *(["validation"] if opened.held_out else [])]
    splits |= {name: opened.first(name, count, buffer_size) for name in streamed}
    batch_size = training_args.train_batch_size * training_args.world_size
    splits["train"] = opened.first("train", max(MAX_STREAMED, batch_size), buffer_size)
    if empty := [name for name, split in splits.items() if not len(split)]:
        raise ValueError(f"{args.dataset_name} has no images for {', '.join(empty)}. Set --train_val_split otherwise.")
    checked = readable_images(DatasetDict(splits), args, training_args, unreadable_images, UNREADABLE)
    ordered = DatasetDict({name: checked[name] for name in SPLITS if name in checked})
    return LabeledImages(
        ordered, TrainingStream(opened.train, buffer_size, args.skip_unreadable, args.shard_by_process)
    )


@dataclass(frozen=True)
class UnlabeledImages:
    """Images to train on without labels.

    Of a stream, `splits` has some images, always the same, "train" only where there is no other split, and `num_train`
    counts those that were read before the training. `known` are training images whose class is known and that are not
    evaluated, among which neighbors are looked for; may be empty.
    """

    splits: DatasetDict
    known: Dataset
    num_train: int
    stream: IterableDataset | None = None
    names: tuple[str, ...] = ()  # no classes are trained on

    def examples(self, split: str) -> TargetDataset:
        """Returns the images of a split, read on access."""
        return TargetDataset(self.splits[split], masked_image_target)


def load_images(args: UnlabeledDataArguments, training_args: HfViTTrainingArguments) -> UnlabeledImages:
    """Opens the images of a training and, unless they are a stream, checks them and holds some out."""
    if args.streaming:
        return _load_stream(args, training_args)
    load = partial(load_unlabeled_images, args.sources, **args.source_options())
    splits = load_targets(lambda: TargetData(load(), masked_image_target), args, training_args).splits
    train = splits["train"]
    num_scored = len(train) if len(splits) == 1 else 0
    return UnlabeledImages(splits, _with_class(train, num_scored, args, training_args.seed), len(train))


def _load_stream(args: UnlabeledDataArguments, training_args: HfViTTrainingArguments) -> UnlabeledImages:
    check_steps(training_args)
    with training_args.main_process_first(desc="opening the data"):
        streams = stream_images(args.sources, **args.source_options())
    if "train" not in streams:
        raise ValueError(f"{args.dataset_name} has no training images, only the splits {', '.join(streams)}.")
    # Of images that are sorted by class or by source, the first ones would stand for few.
    shuffled = {
        name: stream.shuffle(seed=SPLIT_SEED, buffer_size=args.shuffle_buffer_size) for name, stream in streams.items()
    }
    batch_size = training_args.train_batch_size * training_args.world_size
    num_evaluated = args.max_eval_samples or MAX_STREAMED
    num_scored = num_evaluated if len(streams) == 1 else 0  # of the training images
    num_known = args.max_knn_samples if all(CLASS in stream.features for stream in streams.values()) else 0
    counts = dict.fromkeys(streams, num_evaluated) | {"train": max(num_scored + num_known, batch_size)}
    find_faults = fault_finder(TargetData(DatasetDict(), masked_image_target))
    splits = readable_images(first_images(shuffled, counts), args, training_args, find_faults, UNREADABLE)
    sample = splits.pop("train")
    if not splits:
        splits["train"] = sample.select(range(min(num_scored, len(sample))))
    known = _with_class(sample, num_scored, args, training_args.seed)
    return UnlabeledImages(splits, known, len(sample), streams["train"])


def _with_class(rows: Dataset, num_scored: int, args: UnlabeledDataArguments, seed: int) -> Dataset:
    """Returns images whose class is known, drawn at random from those after the first ones, which are evaluated."""
    if CLASS not in rows.column_names or not args.max_knn_samples:
        return rows.select([])
    known = np.flatnonzero(np.array(rows[CLASS][:]) != NO_CLASS)
    apart = known[known >= num_scored]  # an image would be its own nearest neighbor
    if len(known) and not len(apart):
        logger.warning(
            "No accuracy of nearest neighbors: all %d training images that were read are evaluated themselves. Hold "
            "some out (train_val_split), or evaluate fewer of a stream (max_eval_samples).",
            len(rows),
        )
    return at_most(args.max_knn_samples, rows.select(apart), seed)
