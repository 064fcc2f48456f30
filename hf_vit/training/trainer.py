"""The library's Trainer, made exact: on several processes, in evaluations, and when taken up again."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.utils import logging

from ..data.augmentation.datasets import AugmentedStream
from ..model.task_detection import HfViTForObjectDetection
from ..model.task_keypoints import HfViTForKeypointDetection
from .adapter_trainer import AdapterTrainer
from .averaging_trainer import AveragingTrainer
from .batch_transforms import BatchTransform, BatchTransforms, Mixing, SizeArguments, size_transforms
from .callbacks.clock import DatasetEpoch, FreshDropout, TrainingClock
from .checkpoints import stopped_early_at
from .distillation.base import Distillation
from .optimized_trainer import OptimizedTrainer
from .regularization import repeated_augmentation_sampler
from .stream_loader import StreamStart, read_own_shards
from .surviving_trainer import SurvivingTrainer


logger = logging.get_logger(__name__)


class HfViTTrainer(AveragingTrainer, AdapterTrainer, OptimizedTrainer, SurvivingTrainer):
    """`transformers.Trainer`, safe, measured, hard to break, with the recipes of the field, and exact in four ways.

    For the first three see `SafeTrainer`, `MeasuredTrainer` and `SurvivingTrainer`; for what its arguments can ask
    for, `OptimizedTrainer`, `AveragingTrainer` and `AdapterTrainer`.

    Several processes draw those images of an `AugmentedDataset` that one process would, see `DatasetEpoch`. Of an
    `AugmentedStream` each reads its own shards.

    Losses of object detection and of keypoints are divided by the number of objects, or of images, of all batches of a
    step on all processes.

    An evaluation sees all images, even with `dataloader_drop_last`.

    A training that was killed goes on from `last_checkpoint` as if it had not been, bit for bit, even with worker
    processes that outlive an epoch.

    With a `Distillation`, the model learns from a teacher too. Scores are those of the model alone.

    `BatchTransform`s change the batches of a training on the device, first of all to the sizes that the arguments say.
    """

    def __init__(
        self,
        *args: Any,
        distillation: Distillation | None = None,
        batch_transforms: Sequence[BatchTransform] = (),
        **kwargs: Any,
    ) -> None:
        """Takes the arguments of `transformers.Trainer`.

        Args:
            *args: Passed on.
            distillation: Teacher, and what to learn from it.
            batch_transforms: What changes training batches, in this order, after their size.
            **kwargs: Passed on.

        Raises:
            ValueError: if there is a teacher, and the training spreads the model or changes its labels, if
                augmentations cannot be repeated, or if the model cannot train on images of other sizes that the
                arguments ask for.
        """
        super().__init__(*args, **kwargs)
        self.distillation = distillation
        sizes = size_transforms(self.args, self.model) if isinstance(self.args, SizeArguments) else []
        self.batch_transforms = BatchTransforms([*sizes, *batch_transforms], self.args.seed)
        has_soft_labels = any(isinstance(change, Mixing) for change in batch_transforms)
        if has_soft_labels:
            self.label_smoother = None  # which takes class numbers; they are smoothed already
        if distillation is not None:
            check_distillation(self.args, has_soft_labels)
            check_own_loss(self.compute_loss_func)
        repeated_augmentation_sampler(self.args, self.train_dataset)  # now, as it may not fit
        self.add_callback(DatasetEpoch())
        self.add_callback(TrainingClock())
        self.add_callback(FreshDropout())
        if isinstance(self.train_dataset, AugmentedStream):
            self.add_callback(StreamStart())

    @property
    def seconds(self) -> float:
        """The wall time of the training so far, with what came before it was taken up again."""
        clock = next(callback for callback in self.callback_handler.callbacks if isinstance(callback, TrainingClock))
        return clock.seconds

    def describe_teacher(self) -> dict[str, str]:
        """Says of the teacher, if there is one, what a card shall say."""
        return {} if self.distillation is None else self.distillation.facts()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains; a training that early stopping has ended stays ended when it is taken up again."""
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            step = stopped_early_at(resume_from_checkpoint)
            if step is not None:
                logger.warning(f"Early stopping has ended this training at step {step}: no more steps are made.")
                self.args.max_steps = step
        with nullcontext() if self.distillation is None else self.distillation.attached(self.model):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Makes a step of a training on a batch, which the batch changes have changed."""
        inputs = self.batch_transforms(self._prepare_inputs(inputs), self.state.global_step, self.state.max_steps)
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs; beside the loss of a training also the teacher's, by name."""
        if self.distillation is not None and "loss" in logs:
            parts = self.accelerator.reduce(self.distillation.take_parts(), reduction="mean")
            logs.update({name: part.item() for name, part in parts.items()})
        super().log(logs, *args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Counts what the loss of a step is divided by, at least 1, as the model counts its labels."""
        counts = isinstance(self.model, HfViTForObjectDetection | HfViTForKeypointDetection)
        if not counts or not all("labels" in batch for batch in batch_samples):
            return super()._get_num_items_in_batch(batch_samples, device)
        if self.distillation is not None:
            images = [len(batch["pixel_values"]) for batch in batch_samples]
            self.distillation.num_images = self._add_up(images, device)
        count = self._add_up([self.model.count_items(batch["labels"]) for batch in batch_samples], device)
        return None if count is None else count.clamp_min(1)

    def _add_up(self, counts: list[int], device: torch.device) -> Any:
        """Returns the sum of what is counted in the batches of a step, on all processes."""
        # The library adds up numbers of entries.
        return super()._get_num_items_in_batch([{"labels": torch.zeros(count)} for count in counts], device)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Returns what draws training images."""
        sampler = repeated_augmentation_sampler(
            self.args, self.train_dataset if train_dataset is None else train_dataset
        )
        return super()._get_train_sampler(train_dataset) if sampler is None else sampler

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader[Any]:
        """Returns a loader that drops images in training only, with a random generator of its own.

        A loader that starts worker processes draws a seed. It does so once if they stay, and again when the training
        is taken up: from the global generator, the dropout would no longer be that of the training that went through.
        """
        drop_last = self.args.dataloader_drop_last
        # The library applies it to evaluations too, whose scores would then depend on the batch size.
        self.args.dataloader_drop_last = drop_last and is_training
        try:
            loader = super()._get_dataloader(*args, is_training=is_training, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop_last
        loader.base_dataloader.generator = torch.Generator().manual_seed(self.args.seed)
        stream = self.train_dataset
        is_shared = is_training and isinstance(stream, AugmentedStream) and stream.shard_by_process
        return read_own_shards(loader, self.args) if is_shared else loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Returns the loader of an evaluation.

        Where worker processes stay, the library keeps the first one and gives it for any other images, too.
        """
        if eval_dataset is None or isinstance(eval_dataset, str) or eval_dataset is self.eval_dataset:
            return super().get_eval_dataloader(eval_dataset)
        return self.get_test_dataloader(eval_dataset)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves what a checkpoint has beside the model."""
        super()._save_optimizer_and_scheduler(output_dir)
        if self.distillation is not None and self.args.should_save:
            self.distillation.save(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads it."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.distillation is not None and checkpoint is not None:
            self.distillation.load(Path(checkpoint))


def check_distillation(args: TrainingArguments, has_soft_labels: bool = False) -> None:
    """Raises `ValueError` if a teacher does not go with the arguments of a training.

    Args:
        args: The arguments.
        has_soft_labels: Whether labels are smoothed before the student gets them.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"This process has {args.n_gpu} GPUs, and a teacher is on one alone. Start a process for each, torchrun "
            f"--nproc_per_node {args.n_gpu}, or show it one: CUDA_VISIBLE_DEVICES=0."
        )
    if args.fsdp or args.deepspeed:
        raise ValueError("A teacher needs the whole student on each device. Leave out --fsdp and --deepspeed.")
    if args.label_smoothing_factor and not has_soft_labels:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} takes the labels from the student, which learns "
            "from them beside the teacher. Leave it out; --distillation_type soft smooths too."
        )


def check_own_loss(loss: Any) -> None:
    """Raises `ValueError` if a student with a teacher shall learn by a loss that is not its own."""
    if loss is not None:
        raise ValueError(
            "A loss beside that of the model takes the labels from the student, which learns from them beside the "
            "teacher. Leave out compute_loss_func (--classification_loss bce)."
        )
