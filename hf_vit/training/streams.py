"""Data loaders that resume exactly and read stored features, and streams divided among processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderAdapter, prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from ..data.augmentation.datasets import AugmentedStream
from .callbacks.preemption import SafeStop, WorkerStart
from .finetuning.frozen_features import FrozenFeatures, check_cache
from .lora import unwrap_peft
from .regularization import BatchTransforms, training_sampler


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


@contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Context manager that temporarily replaces attributes of an object."""
    before = {name: vars(target)[name] for name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        vars(target).update(before)


class ExactLoaders(Trainer):
    """`transformers.Trainer` with data loaders that draw the same images after a resume and in several processes.

    Evaluation loaders use all images, even with `dataloader_drop_last`.
    """

    model: Any
    stored: dict[str, FrozenFeatures]  # stored features that replace training images, by name of the head
    frozen: list[nn.Module]
    distillation: Any
    batch_transforms: BatchTransforms
    safe_stop: SafeStop

    def feature_sources(self) -> dict[str, tuple[Any, Any, Any, Any]]:
        """Return model, training images, collator and loss function of each head, by name; "" for a single head."""
        loss = partial(self.compute_loss, self.model)
        return {"": (unwrap_peft(self.model), self.train_dataset, self.data_collator, loss)}

    def check_features(self) -> None:
        """Raise `ValueError` if training cannot read stored features."""
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        changes = self.batch_transforms.transforms, self.distillation is not None, is_sharded
        for model, dataset, collator, _ in self.feature_sources().values():
            check_cache(model, dataset, collator, self.frozen, self.args, *changes)

    def open_features(self, most_images: int | None = None, **options: Any) -> None:
        """Compute the features of the training images, or open those that are already stored, unless they are open.

        Args:
            most_images: Maximum number of training images, None for all.
            **options: The arguments `report` and `folder` of `FrozenFeatures`.
        """
        sources = {} if self.stored else self.feature_sources()
        for name, (model, dataset, collator, loss) in sources.items():
            if most_images is not None:
                dataset = replace(dataset, dataset=dataset.dataset.select(range(min(most_images, len(dataset)))))
            own = model, dataset, collator, loss, self.frozen, self.args, self.accelerator
            self.stored[name] = FrozenFeatures(*own, **options)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the training data loader, with repeated augmentation or separate shards of a stream."""
        features = self.stored.get("")
        read = {} if features is None else {"train_dataset": features.dataset, "data_collator": features.collator}
        with replaced(self, **read):
            loader = self._guard(super().get_train_dataloader())
            sampler = training_sampler(self.args, self.train_dataset)
        if sampler is not None:
            loader.set_sampler(sampler)
        stream = self.train_dataset
        is_shared = isinstance(stream, AugmentedStream) and stream.shard_by_process
        return read_own_shards(loader, self.args) if is_shared else loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the evaluation data loader.

        With persistent workers, transformers would reuse the loader of the first dataset for other datasets.
        """
        if eval_dataset is None or isinstance(eval_dataset, str) or eval_dataset is self.eval_dataset:
            with self._evaluating_all_images():
                return self._guard(super().get_eval_dataloader(eval_dataset))
        return self.get_test_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the data loader for an evaluation of `test_dataset`."""
        with self._evaluating_all_images():
            return self._guard(super().get_test_dataloader(test_dataset))

    def evaluation_collator(self) -> Any:
        """Return the collator for evaluations."""
        return self.data_collator

    @contextmanager
    def _evaluating_all_images(self) -> Iterator[None]:
        """Context manager within which evaluation loaders are created, so that they do not drop the last batch."""
        with replaced(self.args, dataloader_drop_last=False), replaced(self, data_collator=self.evaluation_collator()):
            yield

    def _guard(self, loader: Any) -> Any:
        """Set a separate random generator for a new loader, and make its workers ignore signals.

        A loader with workers draws a random seed: with persistent workers once, and again after a resume. If the seed
        were drawn from the global generator, dropout would differ in a resumed run.
        """
        base = loader.base_dataloader
        if not isinstance(base.worker_init_fn, WorkerStart):
            base.generator = torch.Generator().manual_seed(self.args.seed)
            base.worker_init_fn = WorkerStart(self.safe_stop.signals.is_training, base.worker_init_fn)
        return loader
