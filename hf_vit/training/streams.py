"""Streams of training images: how they are opened and checked, read by several processes, and resumed."""

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
from ..data.formats.files import SPLITS
from ..data.formats.label_values import SINGLE
from ..data.loaders.unlabeled_images import CLASS, NO_CLASS, first_images, stream_images
from ..data.targets import label_target
from .arguments import ClassificationArguments, TaskArguments, UnlabeledArguments
from .load_data import HELD_OUT, at_most, load_targets, readable_images
from .training_arguments import HfViTTrainingArguments, check_steps


logger = logging.get_logger(__name__)
MAX_STREAMED = 1000  # images of a split of a stream that are evaluated, by default


def load_stream(args: ClassificationArguments, training_args: HfViTTrainingArguments) -> TargetData:
    """Opens the stream of a training, and checks the images that are evaluated; `ValueError` if it counts epochs."""
    check_steps(training_args)
    if args.train_val_split is None:  # which splits there are is seen when the stream is open
        args.train_val_split = HELD_OUT
    if args.problem_type not in (None, SINGLE) or args.label_separator is not None:
        raise ValueError(
            f"A stream has one label per image, not problem_type={args.problem_type}, label_separator="
            f"{args.label_separator}. Leave --streaming out."
        )
    with training_args.main_process_first(desc="opening the data"):
        opened = stream_image_classification(
            args.dataset_name,
            class_names=args.class_names or [],
            train_val_split=args.train_val_split,
            label_column_name=args.label_column_name,
            **{name: vars(args)[name] for name in TaskArguments.loader_options},
        )
    count, buffer_size = args.max_eval_samples or MAX_STREAMED, args.shuffle_buffer_size
    splits = {name: at_most(args.max_eval_samples, split, training_args.seed) for name, split in opened.joined.items()}
    streamed = [*opened.streamed, *(["validation"] if opened.held_out else [])]
    splits |= {name: opened.first(name, count, buffer_size) for name in streamed}
    batch_size = training_args.train_batch_size * training_args.world_size
    splits["train"] = opened.first("train", max(MAX_STREAMED, batch_size), buffer_size)
    if empty := [name for name, split in splits.items() if not len(split)]:
        raise ValueError(f"{args.dataset_name} has no images for {', '.join(empty)}. Set --train_val_split otherwise.")
    ordered = DatasetDict({name: splits[name] for name in SPLITS if name in splits})
    data = TargetData(ordered, label_target, opened.names, stream=opened.train)
    return replace(data, splits=readable_images(data, args, training_args, "cannot be evaluated"))


@dataclass(frozen=True, kw_only=True)
class UnlabeledImages(TargetData):
    """Images to train on without labels.

    Of a stream, `splits` has some images, always the same, "train" only where there is no other split, and `num_train`
    counts those that were read before the training. `known` are training images whose class is known and that are not
    evaluated, among which neighbors are looked for; may be empty.
    """

    known: Dataset
    num_train: int


def load_images(args: UnlabeledArguments, training_args: HfViTTrainingArguments) -> UnlabeledImages:
    """Opens the images of a training and, unless they are a stream, checks them and holds some out."""
    if args.streaming:
        return _load_stream(args, training_args)
    load = partial(load_unlabeled_images, args.sources, **args.source_options())
    data = load_targets(lambda: TargetData(load(), masked_image_target), args, training_args)
    train = data.splits["train"]
    known = _with_class(train, len(train) if len(data.splits) == 1 else 0, args, training_args.seed)
    return UnlabeledImages(data.splits, data.read_target, known=known, num_train=len(train))


def _load_stream(args: UnlabeledArguments, training_args: HfViTTrainingArguments) -> UnlabeledImages:
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
    first = TargetData(first_images(shuffled, counts), masked_image_target)
    splits = readable_images(first, args, training_args, "cannot be evaluated")
    sample = splits.pop("train")
    if not splits:
        splits["train"] = sample.select(range(min(num_scored, len(sample))))
    known = _with_class(sample, num_scored, args, training_args.seed)
    return UnlabeledImages(splits, masked_image_target, stream=streams["train"], known=known, num_train=len(sample))


def _with_class(rows: Dataset, num_scored: int, args: UnlabeledArguments, seed: int) -> Dataset:
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


def describe_layout(args: TrainingArguments) -> dict[str, int]:
    """Returns what decides which images of a stream are in which step."""
    layout = {
        "processes": args.world_size,
        "dataloader_num_workers": args.dataloader_num_workers,
        "images per process and step": args.train_batch_size * args.gradient_accumulation_steps,
    }
    # Worker processes make batches in turns.
    return layout if args.dataloader_num_workers < 2 else {**layout, "batch size": args.train_batch_size}


@dataclass
class LazyCollator:
    """Makes batches with `collate`, and an empty one, which is thrown away, of what a stream has skipped."""

    collate: Callable[[list[Any]], dict[str, Any]]

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """Returns a batch."""
        return {} if examples[0] is None else self.collate(examples)


def read_own_shards(loader: DataLoaderAdapter, args: TrainingArguments) -> DataLoader[Any]:
    """Turns a loader with which one process reads a stream for all into one with which each reads its own shards."""
    base: DataLoader[Any] = loader.base_dataloader
    stream = base.dataset
    assert isinstance(stream, AugmentedStream)
    stream.share(args.process_index, args.world_size)
    readers = args.world_size * max(args.dataloader_num_workers, 1)
    if stream.stream.num_shards < readers and args.process_index == 0:
        logger.warning(
            "The stream has %d shards for %d readers: several read the same and leave the images of others out, which "
            "takes longer than to read shards of their own. Write the data to more files.",
            stream.stream.num_shards,
            readers,
        )
    base.collate_fn = LazyCollator(base.collate_fn)
    return prepare_data_loader(
        base, args.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
    )


class StreamStart(TrainerCallback, ExportableState):
    """Tells an `AugmentedStream` which of its batches are done when a training resumes.

    They are then counted rather than decoded. Where the first process reads for all, they are decoded once more.
    """

    def __init__(self) -> None:
        self.layout: dict[str, int] | None = None

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"args": {}, "attributes": {"layout": self.layout}}

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, train_dataloader: DataLoader[Any], **kwargs: Any
    ) -> None:
        """Sets where the stream starts; `ValueError` if the training was started with other batches or processes."""
        stream = train_dataloader.dataset  # whose first image the loader has not read yet
        assert isinstance(stream, AugmentedStream)
        layout = describe_layout(args) if stream.shard_by_process else None
        if self.layout not in (None, layout) and state.global_step > 0:
            raise ValueError(
                f"The stream of this training was read with {self.layout}, and now with {layout}: images would be "
                "left out or come twice. Resume as it was started, or start another training from its weights with "
                "--model_name_or_path."
            )
        self.layout = layout
        is_skipped = stream.shard_by_process and not args.ignore_data_skip
        num_batches = state.global_step * args.gradient_accumulation_steps if is_skipped else 0
        stream.start_after(num_batches, args.train_batch_size)
