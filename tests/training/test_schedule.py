"""Schedules whose length changes during training: after its peak, the learning rate never increases."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import get_scheduler

from hf_vit.training.optimizer import follow_lengths, planned_step
from hf_vit.training.planning.keep_budget import change_length

from ..helpers.trainings import digits_trainer


KINDS = ("cosine", "linear", "polynomial", "inverse_sqrt", "warmup_stable_decay", "constant_with_warmup")


def rates_of(kind: str, warmup: float, lengths: dict[int, int]) -> list[float]:
    """Return the learning rates of all steps of a training run whose length changes."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    options = {"num_decay_steps": lengths[0] // 5} if kind == "warmup_stable_decay" else {}
    scheduler = get_scheduler(kind, optimizer, math.ceil(warmup * lengths[0]), lengths[0], options)
    follow_lengths(scheduler, lengths)
    rates = []
    for _ in range(list(lengths.values())[-1]):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    warmup=st.sampled_from([0.0, 0.1, 0.25, 0.5]),
    planned=st.integers(2, 60),
    changes=st.lists(st.tuples(st.floats(0.01, 0.99), st.floats(0.3, 4.0)), min_size=1, max_size=4),
)
def test_the_rate_never_rises_again_after_its_peak(
    kind: str, warmup: float, planned: int, changes: list[tuple[float, float]]
) -> None:
    lengths = {0: planned}
    for share, factor in changes:
        last, length = list(lengths.items())[-1]
        step = last + max(1, int(share * (length - last)))
        if step >= length:
            break
        lengths[step] = step + max(1, int(factor * (length - step)))
    rates = rates_of(kind, warmup, lengths)
    peak = max(range(len(rates)), key=rates.__getitem__)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if kind in ("cosine", "linear"):
        assert rates[-1] == pytest.approx(0, abs=1e-6)
    assert planned_step(list(lengths.values())[-1], lengths) == pytest.approx(planned)


def test_without_changes_steps_are_as_planned() -> None:
    assert [planned_step(step, {0: 7}) for step in range(8)] == list(range(8))


@pytest.mark.parametrize(("begun", "resumed", "done"), [(12, 24, 4), (12, 24, 11), (24, 12, 4), (6, 30, 3)])
def test_a_training_that_resumes_with_another_length_goes_on_from_its_rate(
    begun: int, resumed: int, done: int, tmp_path: Path
) -> None:
    options = {"warmup_steps": 0.25, "lr_scheduler_type": "cosine", "save_strategy": "steps", "logging_steps": 1}
    options |= {"save_steps": 1, "save_total_limit": None, "eval_strategy": "no"}
    first = digits_trainer(tmp_path, max_steps=begun, **options)
    first.train()
    rates = {entry["step"]: entry["learning_rate"] for entry in first.state.log_history if "loss" in entry}
    second = digits_trainer(tmp_path, max_steps=resumed, **options)
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{done}"))
    third = digits_trainer(tmp_path, max_steps=resumed, **options)
    third.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{done + 1}"))
    now = {entry["step"]: entry["learning_rate"] for entry in second.state.log_history if "loss" in entry}
    again = {entry["step"]: entry["learning_rate"] for entry in third.state.log_history if "loss" in entry}
    assert again == now
    assert len(now) == resumed
    assert now[done + 1] == pytest.approx(rates[done + 1])
    found = [now[step] for step in sorted(now)]
    peak = found.index(max(found))
    assert found[peak:] == sorted(found[peak:], reverse=True)


def test_a_change_in_mid_training_keeps_the_rate(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, max_steps=12, warmup_steps=0.25, lr_scheduler_type="cosine")
    trainer.create_optimizer_and_scheduler(12)
    trainer.optimizer.step()
    for _ in range(4):
        trainer.lr_scheduler.step()
    before = trainer.lr_scheduler.get_last_lr()
    trainer.state.global_step = 4
    change_length(trainer, 24)
    rates = [before[0]]
    for _ in range(20):
        trainer.lr_scheduler.step()
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
