"""The data of a training of a classifier whose training images come as a stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import DatasetDict, IterableDataset
from transformers.utils import logging

from ..data import AugmentedStream, stream_image_classification, unreadable_images
from ..data.augmented_stream import label_target
from ..data.splits import SPLITS
from .arguments import HfViTTrainingArguments, TrainingDataArguments
from .checks import check_steps
from .load_data import UNREADABLE, at_most, readable_images
from .scored_arguments import split_names


logger = logging.get_logger(__name__)

MAX_STREAMED = 1000  # images of a split of a stream that are scored, unless said otherwise


@dataclass(frozen=True)
class TrainingStream:
    """The training images of a classifier.

    Args:
        rows: The columns `image` (encoded), `file` and `label`.
        buffer_size: Among how many images the next one is drawn.
        skip_unreadable: Whether images that cannot be read are left out.
        shard_by_process: Whether each process reads its own shards.
    """

    rows: IterableDataset
    buffer_size: int
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


def load_stream(
    args: TrainingDataArguments, training_args: HfViTTrainingArguments
) -> tuple[DatasetDict, TrainingStream]:
    """Opens the images of a training, and checks those that are scored.

    Args:
        args: Which data, and what to do about images that cannot be read.
        training_args: Gives the seed and, on several processes, the share of each.

    Returns:
        The splits that are scored and, as "train", a sample of the training images, which stand for them; and the
        stream of these.

    Raises:
        OSError: if the data is missing.
        ValueError: if it is bad, or the training counts epochs.
    """
    check_steps(training_args)
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
    return ordered, TrainingStream(opened.train, buffer_size, args.skip_unreadable, args.shard_by_process)


def count_images(splits: DatasetDict, args: TrainingDataArguments) -> dict[str, int]:
    """Returns the number of images of each split, of a stream that of those that are scored."""
    return {
        name: len(images)
        for name, images in splits.items()
        if name != "train" or not args.streaming or len(splits) == 1
    }
