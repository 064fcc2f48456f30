"""Ways to train an image classifier that `benchmark_trainer.py` compares, from the first batch to the last."""

import time
from collections.abc import Callable
from typing import Any

import torch
from peer_models import MAKE_MODEL
from timm.optim._optim_factory import create_optimizer_v2
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, get_cosine_schedule_with_warmup

from hf_vit.training import HfViTTrainer


class Stopwatch(TrainerCallback):
    """Counts the seconds from the first batch to the end of a training."""

    start: float | None = None
    seconds = 0.0

    def on_step_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
        """Starts once."""
        if self.start is None:
            self.start = time.perf_counter()

    def on_train_end(self, args: Any, *_: Any, **kwargs: Any) -> None:
        """Stops when all work is done."""
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - (self.start or 0.0)


def with_trainer(trainer: HfViTTrainer, stopwatch: Stopwatch) -> None:
    """Trains with our Trainer."""
    trainer.add_callback(stopwatch)
    trainer.train()


def with_library(trainer: HfViTTrainer, stopwatch: Stopwatch) -> None:
    """Trains the model of transformers with the library's Trainer."""
    how = {"train_dataset": trainer.train_dataset, "data_collator": trainer.data_collator}
    Trainer(MAKE_MODEL["transformers"](trainer.model.config), trainer.args, callbacks=[stopwatch], **how).train()


def with_loop(trainer: HfViTTrainer, stopwatch: Stopwatch) -> None:
    """Trains our model in a loop of PyTorch."""
    args, model = trainer.args, trainer.model
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.max_steps // 10, args.max_steps)
    loop(trainer, stopwatch, model, lambda batch: model(**batch).loss, optimizer, lambda step: schedule.step())


def with_timm(trainer: HfViTTrainer, stopwatch: Stopwatch) -> None:
    """Trains timm's model in a loop as timm's, with its optimizer and schedule."""
    args, model = trainer.args, MAKE_MODEL["timm"](trainer.model.config).to(trainer.args.device)
    optimizer = create_optimizer_v2(model, "adamw", args.learning_rate, args.weight_decay, fused=True)
    schedule = CosineLRScheduler(optimizer, args.max_steps, warmup_t=args.max_steps // 10, t_in_epochs=False)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    loop(trainer, stopwatch, model, loss_of, optimizer, schedule.step_update)


def loop(
    trainer: HfViTTrainer,
    stopwatch: Stopwatch,
    model: nn.Module,
    loss_of: Callable[[dict[str, Tensor]], Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: Callable[[int], None],
) -> None:
    """Trains a model by hand on what a trainer would train on."""
    args = trainer.args
    how = {"collate_fn": trainer.data_collator, "num_workers": args.dataloader_num_workers}
    how |= {"pin_memory": args.dataloader_pin_memory}
    loader = DataLoader(trainer.train_dataset, args.train_batch_size, shuffle=True, drop_last=True, **how)
    model.train()
    for step, batch in zip(range(args.max_steps), loader, strict=False):
        stopwatch.on_step_begin(args)
        batch = {name: value.to(args.device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
            loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule(step + 1)
        optimizer.zero_grad()
    stopwatch.on_train_end(args)


WAYS = {"hf_vit": with_trainer, "bare loop": with_loop, "timm": with_timm, "transformers": with_library}
