"""Test that a new head with default options gets equal gradients from a batch and from its accumulated parts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ..helpers.dense_trainings import A_FEW_STEPS, ALL_TASKS, arguments_of, make_trainer
from ..helpers.options import run_of
from ..helpers.references import assert_close
from ..helpers.trainings import GradientRecorder


# Universal segmentation is excluded, because its loss draws random points. For the heads of other model classes, tests
# with `TRAINING_CASES` check the same property.
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("semantic_segmentation", []),
        ("semantic_segmentation", ["--head", "linear"]),
        ("depth_estimation", []),
        ("keypoint_detection", []),
        ("keypoint_detection", ["--head", "simple"]),
    ],
)
def test_parts_of_a_batch_have_the_gradients_of_the_whole(
    task: str, options: list[str], tmp_path: Path, scenes: Path, figures: Path
) -> None:
    data = figures if task == "keypoint_detection" else scenes

    def gradients(batch_size: int, parts: int) -> Tensor:
        split = ["--per_device_train_batch_size", str(batch_size), "--gradient_accumulation_steps", str(parts)]
        steps = [*A_FEW_STEPS, "--max_steps", "1", "--max_grad_norm", "0"]
        trainer = make_trainer(task, data, tmp_path / "out", *options, *steps, *split)
        recorder = GradientRecorder()
        trainer.add_callback(recorder)
        trainer.train()
        (gradient,) = recorder.gradients
        return gradient

    whole = gradients(8, 1)
    assert whole.dtype == torch.float64
    assert_close(gradients(1, 8), whole, 1e-9, "8 parts")


def test_parts_of_a_batch_hold_out_the_same_images(tmp_path: Path, scenes: Path) -> None:
    def find_purpose(batch_size: int, parts: int) -> str:
        split = ["--per_device_train_batch_size", str(batch_size), "--gradient_accumulation_steps", str(parts)]
        options = arguments_of("semantic_segmentation", scenes, tmp_path / "out", "--max_steps", "18", *split)
        run = run_of(ALL_TASKS["semantic_segmentation"], options)
        return run.task.held_out_for(run.args)

    assert [find_purpose(4, 1), find_purpose(2, 2), find_purpose(2, 1)] == ["choose the scale"] * 2 + [""]
