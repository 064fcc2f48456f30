"""`transformers.Trainer` with exact resume, EMA, distillation, layer-wise learning rates and safe uploads."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import SchedulerType, TrainerControl
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from ..data.augmentation.datasets import AugmentedStream
from ..data.collators import CaptionCollator, Collator, ImageTextCollator
from ..model.task_image_captioning import HfViTForImageTextToText
from ..model.task_keypoint_detection import HfViTForKeypointDetection
from ..model.task_object_detection import HfViTForObjectDetection
from ..options.training_arguments import check_optimization, count_decay_steps, training_options_of
from ..outputs import AVERAGE_FOLDER
from ..processes import on_first_process
from ..tasks.common.regularization import Attached, BatchTransform, Mixing
from .callbacks.ema import AverageWeights, WeightAverage
from .callbacks.preemption import SafeStop
from .callbacks.progress import RunProgress
from .callbacks.state import Conditions, DatasetEpoch, LoadStates, NewOptions, StatefulCallback
from .callbacks.throughput import Throughput, TrainingProgress, best_flops, training_flops
from .checkpoints import (
    delete_older,
    read_state,
    resolve_checkpoint,
    stopped_early_at,
)
from .distillation import Distillation, check_distillation
from .errors import ExampleError, as_sentence, how_to_resume
from .lora import as_peft_model, check_adapter, is_adapted, merge, prepare_adapter, save_adapter, unwrap_peft
from .optimizer import Muon, decayed_parameter_names, freeze, make_parameter_groups, may_lack_gradients
from .output_folder import ADAPTER_FOLDER, TRAINING_ARGS_JSON
from .regularization import BatchTransforms, size_transforms, training_sampler
from .streams import ExactLoaders, StreamPosition, replaced
from .uploads import DRAFT, SafeUploads


logger = logging.get_logger(__name__)


class HfViTTrainer(SafeUploads, ExactLoaders):
    """`transformers.Trainer` with recipes for Vision Transformers, exact resume and safe uploads.

    *Exact.* Several processes draw the same images of an `AugmentedDataset` as a single process, and read separate
    shards of an `AugmentedStream`. Losses of object detection and keypoint detection are normalized over all batches
    of a step on all processes. An evaluation uses all images, even with `dataloader_drop_last`. An interrupted run
    resumes from `last_checkpoint` with identical results, even with persistent workers. With batch norm in the head,
    accumulated batches are not equal to one large batch, because each batch is normalized separately.

    *Robust.* Signals and errors stop a run safely, see `SafeStop`. The error for an unreadable image names the image.

    *Measured.* Throughput and memory are logged with the loss, see `Throughput.measures`, and displayed in the
    progress bar.

    *Optimizers*, configured by `HfViTTrainingArguments`. Weight decay only applies to matrices of linear layers and
    convolutions. The logged learning rate does not include the factors of single layers. Frozen parts run in
    evaluation mode: without dropout and stochastic depth, and with fixed batch norm statistics.

    *Averaged weights* (EMA), if `ema_decay` is set. Each evaluation scores both the model and the averaged weights.
    The scores of the averaged weights have names such as `eval_ema_accuracy`. The folder `ema` in the folder of a
    saved model contains the averaged weights in float32. The best model is saved with the average of the same step.

    *Adapters*, if `lora_rank` is set or the model already has an adapter. Checkpoints contain only the adapter, in
    peft format. The adapter is merged into the final model, and also saved separately in `adapter/`.

    *Teachers.* With a `Distillation`, the model also learns from a teacher. Evaluation scores only the model.

    *Stored features*, if `cached_views` is set. Training reads the features of frozen blocks from disk, see
    `FrozenFeatures`. Evaluations use the images.

    *Batch transforms* change training batches on the device. Transforms of the image size come first.

    *Safe to publish.* The arguments are saved as training_args.json instead of the pickle training_args.bin, because
    loading a pickle can run any code. Uploads are described in `SafeUploads`.
    """

    model: Any  # any model; options that require a model of this package check its class
    model_wrapped: Any
    data_collator: Any
    control: TrainerControl
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None

    def __init__(
        self,
        *args: Any,
        distillation: Distillation | None = None,
        batch_transforms: Sequence[BatchTransform] = (),
        parts: Mapping[str, Any] = MappingProxyType({}),
        lr_factors: Mapping[str, float] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        """Initialize the trainer with the arguments of `transformers.Trainer`.

        Args:
            *args: Arguments of `transformers.Trainer`.
            distillation: Teacher and distillation loss, if any.
            batch_transforms: Transforms of training batches, applied in this order after transforms of the image size.
            parts: Trainers that evaluate the heads of a multi-task model, by name.
            lr_factors: Learning rate factors by prefix of parameter names, see `make_parameter_groups`.
            **kwargs: Arguments of `transformers.Trainer`.

        Raises:
            ValueError: If an option is out of range, does not match the model, or excludes another option.
        """
        super().__init__(*args, **kwargs)
        # Do not normalize losses over a step if a process has several GPUs: each GPU would need a part of the divisor.
        counting = HfViTForObjectDetection | HfViTForKeypointDetection | HfViTForImageTextToText
        counts = isinstance(self.plain_model, counting)
        self.model_accepts_loss_kwargs = counts and self.args.n_gpu <= 1
        # This filter for NaN and infinity would hide non-finite losses, and wait for the GPU in every batch.
        self.args.logging_nan_inf_filter = False
        # These collators read columns that are not arguments of the model, such as `image`.
        if isinstance(self.data_collator, Collator | ImageTextCollator | CaptionCollator):
            self.args.remove_unused_columns = False
        self._prepare_optimization()
        self.model = self.model_wrapped = prepare_adapter(self.model, self.args)
        if self.args.ddp_find_unused_parameters is None:  # the search for unused parameters slows down every step
            self.accelerator.ddp_handler.find_unused_parameters &= may_lack_gradients(self.model)
        self.peft_model: Any = None  # wrapper of an adapted model while transformers trains and evaluates it
        self.distillation = distillation
        sizes = size_transforms(self.options, self.model)
        self.batch_transforms = BatchTransforms([*sizes, *batch_transforms], self.args.seed)
        has_soft_labels = any(isinstance(transform, Mixing) for transform in batch_transforms)
        if has_soft_labels:
            self.label_smoother = None  # a smoother does not support soft labels
        if distillation is not None:
            check_distillation(self.args, has_soft_labels, self.compute_loss_func)
        training_sampler(self.args, self.train_dataset)  # raises an error early if options do not match the dataset
        self._hidden: dict[str, Any] = {}  # original values of arguments that are temporarily replaced
        self.averaged_scores: dict[str, float] = {}  # scores of the averaged weights in the last evaluation
        self._resumed_step = 0
        self.stored = {}
        self.parts, self.lr_factors = parts, lr_factors
        if self.options.cached_views:
            self.check_features()
        self._add_callbacks()
        for part in (*batch_transforms, *self.callback_handler.callbacks):
            if isinstance(part, Attached):
                part.attach(self)

    def _prepare_optimization(self) -> None:
        """Check the optimizer options and freeze the requested parts."""
        check_optimization(self.args)
        self.options = training_options_of(self.args)
        if self.options.use_muon:
            self.check_weights_are_open("use_muon=True")
        self.frozen: list[nn.Module] = []
        prefixes, trainable_blocks = self.options.freeze or (), self.options.trainable_blocks
        if prefixes or trainable_blocks is not None:
            if self.model_init is not None:
                raise ValueError(
                    "freeze and trainable_blocks do not support model_init, which rebuilds the model. Pass a model "
                    "instead."
                )
            self.frozen = freeze(self.model, prefixes, trainable_blocks)

    def _add_callbacks(self) -> None:
        self.averaging: AverageWeights | None = None
        if self.options.ema_decay is not None:
            self.check_weights_are_open(f"ema_decay={self.options.ema_decay}")
            self.averaging = AverageWeights(self.options.ema_decay, self.is_fsdp_enabled)
            self.add_callback(self.averaging)
        self.safe_stop, self.throughput, self.bars = SafeStop(), Throughput(), TrainingProgress()
        if self.pop_callback(ProgressCallback) is not None:  # missing in notebooks or with disable_tqdm
            self.add_callback(self.bars)
        self.progress = RunProgress(self.options.recorded_schedule, self.args.max_steps)
        for callback in (self.progress, DatasetEpoch(), self.throughput):
            self.add_callback(callback)
        if self.distillation is not None:
            self.add_callback(self.distillation)
        if isinstance(self.train_dataset, AugmentedStream):
            self.add_callback(StreamPosition())
        self.new_options = NewOptions()
        if self.options.resume_with_changes:
            self.add_callback(self.new_options)
        self.load_states = LoadStates()
        self.add_callback(self.load_states)
        self.add_callback(self.safe_stop)  # called last, after all other callbacks have decided about saving

    @property
    def stateful_callbacks(self) -> list[StatefulCallback]:
        """Callbacks with a state that is saved in checkpoints."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, StatefulCallback)]

    def check_weights_are_open(self, option: str) -> None:
        """Raise `ValueError` if an option needs weights that are not accessible, for example with DeepSpeed."""
        is_fsdp1 = self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.fsdp_version == 1
        if self.is_deepspeed_enabled or is_fsdp1:
            raise ValueError(
                f"{option} supports DDP and FSDP2, but not DeepSpeed or FSDP version 1. Remove it, or use "
                "--fsdp with --fsdp_config '{\"version\": 2}'."
            )

    @property
    def conditions(self) -> dict[str, Any]:
        """Training conditions, which are saved in checkpoints; empty without a callback `Conditions`."""
        found = (one.values for one in self.callback_handler.callbacks if isinstance(one, Conditions))
        return next(found, {})

    @property
    def average(self) -> WeightAverage | None:
        """Averaged weights during and after training, None without EMA."""
        return None if self.averaging is None else self.averaging.average

    @property
    def plain_model(self) -> Any:
        """The model without the `PeftModel` wrapper, if any."""
        return unwrap_peft(self.model)

    def _as_peft_model(self) -> AbstractContextManager[None]:
        """Context manager that wraps an adapted model in a `PeftModel`, so that only the adapter is saved."""
        if not is_adapted(self.model):
            return nullcontext()
        self.peft_model = self.peft_model or as_peft_model(self.model)
        return replaced(self, model=self.peft_model, model_wrapped=self.peft_model)

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train the model. A resumed run does not continue training if early stopping has ended it before.

        Args:
            resume_from_checkpoint: Folder of a checkpoint, or True for the newest complete checkpoint in `output_dir`.
            *args: Arguments of `transformers.Trainer.train`.
            **kwargs: Arguments of `transformers.Trainer.train`.

        Raises:
            CheckpointError: If a checkpoint cannot be written.
            ExampleError: If an example cannot be read.
            NotFiniteError: If the loss or the weights are not finite.
            Preempted: If a signal ends the run early.
            ValueError: If there is no checkpoint to resume from, or it is damaged.
        """
        checkpoint = self._choose_checkpoint(resume_from_checkpoint)
        self.load_states.start(checkpoint, self.stateful_callbacks)
        if self.options.cached_views:
            self.open_features()
        teaching = nullcontext() if self.distillation is None else self.distillation.attached(self.model)
        try:
            with teaching, self.safe_stop.guarding(self.args), self._as_peft_model():
                planned = self.args.max_steps
                output = super().train(None if checkpoint is None else str(checkpoint), *args, **kwargs)
                self._check_numbers()
                if planned > 0:  # transformers computes the throughput from the planned number of steps
                    output.metrics["train_samples_per_second"] *= self.args.max_steps / planned
        finally:
            self.bars.close()
        return output

    def _choose_checkpoint(self, wanted: str | bool | None) -> Path | None:
        """Return the checkpoint to resume from, and record its step."""
        self._resumed_step = 0
        checkpoint = on_first_process(self.args, lambda: resolve_checkpoint(wanted, self.args.output_dir))
        self.progress.restore(checkpoint)
        if checkpoint is None:
            return None
        check_adapter(self.model, checkpoint)
        state = read_state(checkpoint)
        if (step := stopped_early_at(state)) is not None:
            logger.warning(f"Early stopping has ended this run at step {step}. Training does not continue.")
            self.progress.finish(step)
        self._resumed_step = int(state["global_step"])
        return checkpoint

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the numbers of epochs, steps and examples, without remaining epochs if a finished run is resumed."""
        num_epochs, steps_per_epoch, *others, given = super().set_initial_training_values(*args, **kwargs)
        num_steps = self.progress.count_steps(given, self._resumed_step)
        if self._resumed_step >= num_steps:  # the run had reached its total number of steps
            num_epochs = self._resumed_step // steps_per_epoch
        elif self.progress.is_timed:  # the run ends after its time, and not after a number of epochs
            num_epochs = sys.maxsize
        return num_epochs, steps_per_epoch, *others, num_steps

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the batches of a step, and the divisor of their losses, which is computed by the model."""
        try:
            batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        except (OSError, ValueError) as error:
            raise ExampleError(
                f"After step {self.state.global_step} an example cannot be read: {as_sentence(error)} Restore this "
                "example. Without it, the order of the other examples would change. "
                f"{how_to_resume(self.args.output_dir)}"
            ) from error
        if self.model_accepts_loss_kwargs and batches and all("labels" in batch for batch in batches):
            if self.distillation is not None:
                images = [torch.tensor(float(len(batch["pixel_values"]))) for batch in batches]
                self.distillation.start_step(self._add_up(images, device))
            count = self._add_up([self.plain_model.count_items(batch["labels"]) for batch in batches], device)
        return batches, count

    def _add_up(self, counts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the sum of the loss divisors of all batches of a step on all processes."""
        total = torch.stack(counts).sum(dim=0)
        total = total.to(device, torch.float32 if device.type == "mps" else total.dtype)  # no float64 on MPS
        return self.accelerator.reduce(total) if self.args.average_tokens_across_devices else total

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a training step on a batch after applying the batch transforms."""
        step = self.state.global_step
        inputs = self.batch_transforms(self._prepare_inputs(inputs), step, self.progress.share(step))
        if "pixel_values" in inputs:
            images = inputs["pixel_values"]  # (B, C, H, W), or several views per image (B, G, C, H, W)
            count, (height, width) = len(images), images.shape[-2:]
            is_counted = best_flops(self.args) is not None and not self.stored
            flops = training_flops(self.plain_model, height, width) if is_counted else 0
            self.throughput.count(count, count * flops)
        features = self.stored.get(next(iter(inputs.get("heads", [""]))))
        with nullcontext() if features is None else features.serving(inputs):
            loss = super().training_step(model, inputs, *args, **kwargs)
        self.safe_stop.add_loss(loss)
        return loss

    def compute_loss(
        self, model: nn.Module, *args: Any, num_items_in_batch: torch.Tensor | int | None = None, **kwargs: Any
    ) -> Any:
        """Compute the loss of a batch, with frozen parts in evaluation mode."""
        for module in self.frozen:
            module.eval()
        count = (
            num_items_in_batch if model.training else None
        )  # in evaluations, transformers counts label entries, which is only correct for classification
        return super().compute_loss(model, *args, num_items_in_batch=count, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values. Logs during training also contain throughput, memory and the losses of the teacher."""
        if "learning_rate" in logs:  # transformers logs the learning rate of the first parameter group
            logs["learning_rate"] /= self.optimizer.param_groups[0].get("lr_scale", 1.0)
        if "loss" in logs:
            if self.distillation is not None:
                parts = self.accelerator.reduce(self.distillation.take_parts(), reduction="mean")
                logs.update({name: part.item() for name, part in parts.items()})
            logs.update(self.throughput.measures(self.args))
        super().log(logs, *args, **kwargs)

    # Optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay."""
        return decayed_parameter_names(model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer that the arguments select, with the groups of `make_parameter_groups`."""
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            return super().create_optimizer(model)
        trained = unwrap_peft(self.model if model is None else model)
        optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
        groups = make_parameter_groups(
            trained,
            self.args.learning_rate,
            self.args.weight_decay,
            layer_decay=self.options.layer_decay,
            head_lr_multiplier=self.options.head_lr_multiplier,
            use_muon=self.options.use_muon,
            lr_factors=self.lr_factors,
        )
        optimizer_class = Muon if self.options.use_muon else optimizer_class
        self.new_options.record([{**options, **group} for group in groups])
        # transformers reads the parameter groups from this attribute; some optimizers replace them.
        with replaced(self, optimizer_cls_and_kwargs=(optimizer_class, {"params": groups, **options})):
            return super().create_optimizer(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the schedule, which follows the progress of the run."""
        num_training_steps = self.progress.plan(num_training_steps, self._resumed_step)
        num_warmup_steps = self.args.get_warmup_steps(num_training_steps)
        options = self.args.lr_scheduler_kwargs or {}
        if self.args.lr_scheduler_type == SchedulerType.WARMUP_STABLE_DECAY and "num_decay_steps" not in options:
            num_decay_steps = count_decay_steps(self.options.decay_steps, num_training_steps, num_warmup_steps)
            options = {**options, "num_decay_steps": num_decay_steps}
        with replaced(self.args, lr_scheduler_kwargs=options):
            scheduler = super().create_scheduler(num_training_steps, optimizer)
        self.progress.follow(scheduler)
        return scheduler

    # Evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate the model."""
        with self.throughput.paused():
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Evaluate the model and, if EMA is enabled, the averaged weights; return the predictions of the model."""
        if self.average is None:
            with self._as_peft_model():
                return self.score_weights(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        # The model is evaluated last, so that the evaluator keeps the results of the model.
        prefix = f"{metric_key_prefix}_{AVERAGE_FOLDER}"
        with self.average.applied():
            averaged = self.score_weights(*args, metric_key_prefix=prefix, **kwargs)
        self.averaged_scores = {name.removeprefix(f"{prefix}_"): value for name, value in averaged.metrics.items()}
        output = self.score_weights(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        return output._replace(
            metrics={**output.metrics, **averaged.metrics}, num_samples=averaged.num_samples + output.num_samples
        )

    def score_weights(self, *args: Any, metric_key_prefix: str, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate the current weights of the model."""
        return super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and in subfolders of its folder the averaged weights and the adapter, if any."""
        folder = Path(output_dir or self.args.output_dir)
        is_checkpoint = _internal_call and output_dir is not None and self.is_in_train
        if is_checkpoint:
            self._start_checkpoint(folder)
        with self.averaged_threshold():
            for callback in self.stateful_callbacks:
                if is_checkpoint or callback.is_published:
                    callback.save_state(folder, self.args.should_save)
        plain_model = self.plain_model
        merges = self.args.should_save and is_adapted(plain_model) and not is_checkpoint
        with replaced(self, model=merge(plain_model) if merges else self.model):
            super().save_model(str(folder), _internal_call=True)
        if self.args.should_save:
            if merges:
                save_adapter(plain_model, folder / ADAPTER_FOLDER)
            elif is_adapted(plain_model):
                plain_model.config.architectures = [
                    type(plain_model).__name__
                ]  # the loaded configuration may name the class of another task
                plain_model.config.save_pretrained(folder)  # save the configuration, which peft does not save
            (folder / TRAINING_ARGS_NAME).unlink()
            arguments = json.dumps(self.args.to_dict() | self._hidden, indent=2) + "\n"
            for place in [folder, *([] if self.average is None else [folder / AVERAGE_FOLDER])]:
                (place / TRAINING_ARGS_JSON).write_text(arguments, encoding="utf-8")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message=DRAFT, revision=self.args.hub_revision)

    def averaged_threshold(self) -> AbstractContextManager[None]:
        """Context manager that sets model options specific to the averaged weights, such as a score threshold."""
        return nullcontext()

    def _start_checkpoint(self, folder: Path) -> None:
        """Prepare to save a checkpoint: remove an incomplete checkpoint of the same step."""
        self._check_numbers()
        self.throughput.pause()
        self.safe_stop.start_saving(folder)
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self.accelerator.wait_for_everyone()  # other processes must not write to the folder earlier

    def _check_numbers(self) -> None:
        self.safe_stop.check_numbers(self.args, self.state.global_step, self.model, self.optimizer)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint and its checksums, and then delete older checkpoints in order of step.

        transformers would delete checkpoints earlier and by time stamp, before it calls any public method or event.
        """
        hidden = {"save_total_limit": self.args.save_total_limit}
        with replaced(self, _hidden=hidden), replaced(self.args, save_total_limit=None):
            super()._save_checkpoint(*args, **kwargs)
        checkpoint = self.safe_stop.saving
        assert checkpoint is not None
        if not self.args.push_to_hub:  # otherwise, the upload has already written the checksums
            self.seal_checkpoint(checkpoint)
        if self.args.should_save:
            delete_older(checkpoint, self.args.save_total_limit, self.state.best_model_checkpoint)
