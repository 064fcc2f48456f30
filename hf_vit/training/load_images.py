"""Images without targets for a training: all of them listed and checked, or a stream."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from datasets import Dataset, DatasetDict, IterableDataset
from transformers.utils import logging

from ..data import (
    TargetData,
    TargetDataset,
    first_images,
    load_unlabelled_images,
    masked_image_target,
    stream_images,
)
from ..data.hold_out import SPLIT_SEED
from ..data.pretraining_sources import CLASS, NO_CLASS
from .arguments import HfViTTrainingArguments
from .checks import check_steps
from .load_data import UNREADABLE, at_most, readable_images
from .load_stream import MAX_STREAMED
from .load_targets import fault_finder, load_targets
from .masked_image_arguments import UnlabelledDataArguments


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class UnlabelledImages:
    """Images to learn from.

    Args:
        splits: Rows that can be scored: "train", and "validation" and "test" where there are such. Of a stream these
            are some images, always the same, and "train" is there only if there is no other.
        known: Training images whose class is known and that are not scored, among which neighbours are looked for; may
            be empty.
        num_train: Number of training images, of a stream that of those that were looked at before the training.
        stream: The training images, if they are a stream.
    """

    splits: DatasetDict
    known: Dataset
    num_train: int
    stream: IterableDataset | None = None

    def examples(self, split: str) -> TargetDataset:
        """Returns the images of a split, read on access."""
        return TargetDataset(self.splits[split], masked_image_target)


def load_images(args: UnlabelledDataArguments, training_args: HfViTTrainingArguments) -> UnlabelledImages:
    """Opens the images of a training and, unless they are a stream, checks them and holds some out.

    Args:
        args: Which data, and what to do about images that cannot be read.
        training_args: Gives the seed and, on several processes, the share of each.

    Raises:
        OSError: if the data is missing.
        ValueError: if it is bad, or a training on a stream counts epochs.
    """
    if args.streaming:
        return _load_stream(args, training_args)
    load = partial(load_unlabelled_images, args.sources, **args.source_options())
    splits = load_targets(lambda: TargetData(load(), masked_image_target), args, training_args).splits
    train = splits["train"]
    num_scored = len(train) if len(splits) == 1 else 0
    return UnlabelledImages(splits, _with_class(train, num_scored, args, training_args.seed), len(train))


def _load_stream(args: UnlabelledDataArguments, training_args: HfViTTrainingArguments) -> UnlabelledImages:
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
    scored = args.max_eval_samples or MAX_STREAMED
    num_scored = scored if len(streams) == 1 else 0  # of the training images
    num_known = args.max_knn_samples if all(CLASS in stream.features for stream in streams.values()) else 0
    counts = dict.fromkeys(streams, scored) | {"train": max(num_scored + num_known, batch_size)}
    find_faults = fault_finder(TargetData(DatasetDict(), masked_image_target))
    splits = readable_images(first_images(shuffled, counts), args, training_args, find_faults, UNREADABLE)
    sample = splits.pop("train")
    if not splits:
        splits["train"] = sample.select(range(min(num_scored, len(sample))))
    known = _with_class(sample, num_scored, args, training_args.seed)
    return UnlabelledImages(splits, known, len(sample), streams["train"])


def _with_class(rows: Dataset, num_scored: int, args: UnlabelledDataArguments, seed: int) -> Dataset:
    """Returns images whose class is known, drawn at random from those after the first ones, which are scored."""
    if CLASS not in rows.column_names or not args.max_knn_samples:
        return rows.select([])
    known = np.flatnonzero(np.array(rows[CLASS][:]) != NO_CLASS)
    apart = known[known >= num_scored]  # an image would be its own nearest neighbour
    if len(known) and not len(apart):
        logger.warning(
            "No accuracy of nearest neighbours: all %d training images that were read are scored themselves. Hold "
            "some out (train_val_split), or score fewer of a stream (max_eval_samples).",
            len(rows),
        )
    return at_most(args.max_knn_samples, rows.select(apart), seed)
