"""Load and check streams of labeled and unlabeled training images."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from datasets import Dataset, DatasetDict
from transformers.utils import logging

from ...data import load_unlabeled_images, stream_image_classification
from ...data.collators import masked_image_target
from ...data.datasets import SPLIT_SEED, Division, TargetData
from ...data.loaders.unlabeled_images import CLASS, NO_CLASS, first_images, stream_images
from ...data.reading.label_values import SINGLE
from ...data.reading.splits import SPLITS
from ...data.targets import label_target
from ...options.training_arguments import HfViTTrainingArguments, check_steps
from .arguments import HELD_OUT, ClassificationArguments, TaskArguments, UnlabeledArguments
from .load_data import load_targets, readable_images, sample_images


logger = logging.get_logger(__name__)
MAX_STREAMED = 1000  # default number of evaluated images per split of a stream


def load_stream(args: ClassificationArguments, training_args: HfViTTrainingArguments) -> TargetData:
    """Open a stream of labeled training images and check the images to evaluate.

    Raises `ValueError` if the training arguments give epochs instead of steps, or if options or data are invalid.
    """
    check_steps(training_args)
    # The splits of a stream are unknown until it is opened.
    held_out = HELD_OUT if args.train_val_split is None else args.train_val_split
    if args.problem_type not in (None, SINGLE) or args.label_separator is not None:
        raise ValueError(
            f"Streamed data supports one label per image, not problem_type={args.problem_type}, label_separator="
            f"{args.label_separator}. Remove --streaming."
        )
    with training_args.main_process_first(desc="loading the data"):
        opened = stream_image_classification(
            args.dataset_name,
            class_names=args.class_names or [],
            train_val_split=held_out,
            label_column_name=args.label_column_name,
            **{name: vars(args)[name] for name in TaskArguments.loader_options},
        )
    count, buffer_size = args.max_eval_samples or MAX_STREAMED, args.shuffle_buffer_size
    splits = {
        name: sample_images(args.max_eval_samples, split, training_args.seed) for name, split in opened.joined.items()
    }
    streamed = [*opened.streamed, *(["validation"] if opened.held_out else [])]
    splits |= {name: opened.first(name, count, buffer_size) for name in streamed}
    batch_size = training_args.train_batch_size * training_args.world_size
    splits["train"] = opened.first("train", max(MAX_STREAMED, batch_size), buffer_size)
    if empty := [name for name, split in splits.items() if not len(split)]:
        raise ValueError(
            f"{args.dataset_name} has no images for {', '.join(empty)}. Choose another --train_val_split."
        )
    ordered = DatasetDict({name: splits[name] for name in SPLITS if name in splits})
    division = Division(train_val_split=held_out)
    data = TargetData(ordered, label_target, opened.names, stream=opened.train, division=division)
    return replace(data, splits=readable_images(data, args, training_args, "cannot be evaluated"))


@dataclass(frozen=True, kw_only=True)
class UnlabeledImages(TargetData):
    """Unlabeled training images.

    For a stream, `splits` holds a fixed sample of images to evaluate, with "train" only if there is no other split.

    Args:
        known: Training images with a class label, among which the nearest neighbors of evaluated images are searched.
            These images are not evaluated. May be empty.
        num_read: Number of training images; for a stream, the number of images that are read before training.
    """

    known: Dataset
    num_read: int

    @property
    def num_train(self) -> int:
        """Number of training images; for a stream, the number of images that are read in advance."""
        return self.num_read

    def count_evaluated(self, split: str) -> int:
        """Return the number of images that an evaluation reads: the split, and training images with a class."""
        return super().count_evaluated(split) + len(self.known)


def load_images(args: UnlabeledArguments, training_args: HfViTTrainingArguments) -> UnlabeledImages:
    """Load the images of a training run. Unless they are streamed, check them and hold out validation images."""
    if args.streaming:
        return _load_stream(args, training_args)
    load = partial(load_unlabeled_images, args.sources, **args.source_options())
    data = load_targets(lambda: TargetData(load(), masked_image_target), args, training_args)
    train = data.splits["train"]
    known = _with_class(train, len(train) if len(data.splits) == 1 else 0, args, training_args.seed)
    own = {"known": known, "num_read": len(train), "division": data.division}
    return UnlabeledImages(data.splits, data.read_target, **own)


def _load_stream(args: UnlabeledArguments, training_args: HfViTTrainingArguments) -> UnlabeledImages:
    check_steps(training_args)
    with training_args.main_process_first(desc="loading the data"):
        streams = stream_images(args.sources, **args.source_options())
    if "train" not in streams:
        raise ValueError(f"{args.dataset_name} has no training images, only the splits {', '.join(streams)}.")
    # The images may be sorted by class or source, so the first images are not a representative sample.
    shuffled = {
        name: stream.shuffle(seed=SPLIT_SEED, buffer_size=args.shuffle_buffer_size) for name, stream in streams.items()
    }
    batch_size = training_args.train_batch_size * training_args.world_size
    num_evaluated = args.max_eval_samples or MAX_STREAMED
    num_scored = num_evaluated if len(streams) == 1 else 0  # evaluated training images, if there is no other split
    num_known = args.max_knn_samples if all(CLASS in stream.features for stream in streams.values()) else 0
    counts = dict.fromkeys(streams, num_evaluated) | {"train": max(num_scored + num_known, batch_size)}
    first = TargetData(first_images(shuffled, counts), masked_image_target)
    splits = readable_images(first, args, training_args, "cannot be evaluated")
    sample = splits.pop("train")
    if not splits:
        splits["train"] = sample.select(range(min(num_scored, len(sample))))
    known = _with_class(sample, num_scored, args, training_args.seed)
    return UnlabeledImages(splits, masked_image_target, stream=streams["train"], known=known, num_read=len(sample))


def _with_class(rows: Dataset, num_scored: int, args: UnlabeledArguments, seed: int) -> Dataset:
    """Return a random sample of the images that have a class label, excluding the first `num_scored` images."""
    if CLASS not in rows.column_names or not args.max_knn_samples:
        return rows.select([])
    known = np.flatnonzero(np.array(rows[CLASS][:]) != NO_CLASS)
    apart = known[known >= num_scored]  # skip evaluated images, which would be their own nearest neighbors
    if len(known) and not len(apart):
        logger.warning(
            "The nearest-neighbor accuracy is not computed, because all %d training images that were read are "
            "evaluated. Hold out images (train_val_split) or, for a stream, evaluate fewer (max_eval_samples).",
            len(rows),
        )
    return sample_images(args.max_knn_samples, rows.select(apart), seed)
