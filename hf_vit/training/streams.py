"""Load and check streams of training images, distribute them over processes, and resume them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate.data_loader import DataLoaderAdapter, prepare_data_loader
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from ..data.augmentation.datasets import AugmentedStream


logger = logging.get_logger(__name__)
MAX_STREAMED = 1000  # default number of evaluated images per split of a stream


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
