"""Load and check streams of training images, distribute them over processes, and resume them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from accelerate.data_loader import DataLoaderAdapter, prepare_data_loader
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from ..data import load_unlabeled_images, stream_image_classification
from ..data.augmentation.datasets import AugmentedStream
from ..data.collators import masked_image_target
from ..data.datasets import SPLIT_SEED, TargetData
from ..data.loaders.unlabeled_images import CLASS, NO_CLASS, first_images, stream_images
from ..data.reading.label_values import SINGLE
from ..data.reading.splits import SPLITS
from ..data.targets import label_target
from .arguments import ClassificationArguments, TaskArguments, UnlabeledArguments
from .load_data import HELD_OUT, load_targets, readable_images, sample_images
from .training_arguments import HfViTTrainingArguments, check_steps


logger = logging.get_logger(__name__)
MAX_STREAMED = 1000  # default number of evaluated images per split of a stream


def load_stream(args: ClassificationArguments, training_args: HfViTTrainingArguments) -> TargetData:
    """Open a stream of labeled training images and check the images to evaluate.

    Raises `ValueError` if the training arguments give epochs instead of steps, or if options or data are invalid.
    """
    check_steps(training_args)
    if args.train_val_split is None:  # use the default, because the splits of a stream are unknown until it is opened
        args.train_val_split = HELD_OUT
    if args.problem_type not in (None, SINGLE) or args.label_separator is not None:
        raise ValueError(
            f"Streamed data supports one label per image, not problem_type={args.problem_type}, label_separator="
            f"{args.label_separator}. Remove --streaming."
        )
    with training_args.main_process_first(desc="loading the data"):
        opened = stream_image_classification(
            args.dataset_name,
            class_names=args.class_names or [],
            train_val_split=args.train_val_split,
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
    data = TargetData(ordered, label_target, opened.names, stream=opened.train)
    return replace(data, splits=readable_images(data, args, training_args, "cannot be evaluated"))


@dataclass(frozen=True, kw_only=True)
class UnlabeledImages(TargetData):
    """Unlabeled training images.

    For a stream, `splits` holds a fixed sample of images to evaluate, with "train" only if there is no other split.

    Args:
        known: Training images with a class label, among which the nearest neighbors of evaluated images are searched.
            These images are not evaluated. May be empty.
        num_train: Number of training images; for a stream, the number of images that are read before training.
    """

    known: Dataset
    num_train: int


def load_images(args: UnlabeledArguments, training_args: HfViTTrainingArguments) -> UnlabeledImages:
    """Load the images of a training run. Unless they are streamed, check them and hold out validation images."""
    if args.streaming:
        return _load_stream(args, training_args)
    load = partial(load_unlabeled_images, args.sources, **args.source_options())
    data = load_targets(lambda: TargetData(load(), masked_image_target), args, training_args)
    train = data.splits["train"]
    known = _with_class(train, len(train) if len(data.splits) == 1 else 0, args, training_args.seed)
    return UnlabeledImages(data.splits, data.read_target, known=known, num_train=len(train))


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
    return UnlabeledImages(splits, masked_image_target, stream=streams["train"], known=known, num_train=len(sample))


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


def describe_layout(args: TrainingArguments) -> dict[str, int]:
    """Return the settings that determine which images of a stream each training step uses."""
    layout = {
        "processes": args.world_size,
        "dataloader_num_workers": args.dataloader_num_workers,
        "images per process and step": args.train_batch_size * args.gradient_accumulation_steps,
    }
    # Worker processes prepare batches in turns, so the order of images depends on the batch size.
    return layout if args.dataloader_num_workers < 2 else {**layout, "batch size": args.train_batch_size}


@dataclass
class SkippingCollator:
    """Collator that calls `collate`, but returns an empty batch if the examples are skipped."""

    collate: Callable[[list[Any]], dict[str, Any]]

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """Return the batch of `examples`, or an empty batch if the examples are skipped, that is, None."""
        return {} if examples[0] is None else self.collate(examples)


def read_own_shards(loader: DataLoaderAdapter, args: TrainingArguments) -> DataLoader[Any]:
    """Return a loader that reads the shards of this process, given a loader that reads on the main process only."""
    base: DataLoader[Any] = loader.base_dataloader
    stream = base.dataset
    assert isinstance(stream, AugmentedStream)
    stream.share(args.process_index, args.world_size)
    readers = args.world_size * max(args.dataloader_num_workers, 1)
    if stream.stream.num_shards < readers and args.process_index == 0:
        logger.warning(
            "The stream has %d shards for %d readers. Readers that share a shard read all its images and skip those "
            "of the other readers, which is slow. Split the data into more files.",
            stream.stream.num_shards,
            readers,
        )
    base.collate_fn = SkippingCollator(base.collate_fn)
    return prepare_data_loader(
        base, args.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
    )


class StreamPosition(TrainerCallback, ExportableState):
    """Skip the completed batches of an `AugmentedStream` when a training run resumes.

    Skipped images are not decoded, unless the main process reads the stream for all processes.
    """

    def __init__(self) -> None:
        self.layout: dict[str, int] | None = None

    def state(self) -> dict[str, Any]:
        """Return the state to save in checkpoints."""
        return {"args": {}, "attributes": {"layout": self.layout}}

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, train_dataloader: DataLoader[Any], **kwargs: Any
    ) -> None:
        """Set the start position of the stream; raise `ValueError` if the batch size or process count has changed."""
        stream = train_dataloader.dataset  # changed before the loader reads its first image
        assert isinstance(stream, AugmentedStream)
        layout = describe_layout(args) if stream.shard_by_process else None
        if self.layout not in (None, layout) and state.global_step > 0:
            raise ValueError(
                f"The stream of this training run was read with {self.layout}, but now with {layout}: images would be "
                "skipped or repeated. Resume with the original settings, or start a new run from the trained weights "
                "with --model_name_or_path."
            )
        self.layout = layout
        is_skipped = stream.shard_by_process and not args.ignore_data_skip
        num_batches = state.global_step * args.gradient_accumulation_steps if is_skipped else 0
        stream.start_after(num_batches, args.train_batch_size)
