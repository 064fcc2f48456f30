"""Streams in a training: each process reads its own shards, and one that resumes continues where it was."""

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
