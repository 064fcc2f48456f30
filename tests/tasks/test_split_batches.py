"""New heads trained by the scripts learn the same from one batch and from its accumulated parts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ..helpers.dense_trainings import A_FEW_STEPS, make_trainer, write_scenes
from ..helpers.object_trainings import write_figures
from ..helpers.references import assert_close
from ..helpers.trainings import GradientRecorder


# Universal segmentation is excluded, because its loss samples random points in each part. Other classes use the
# heads of `TRAINING_CASES`.
WRITE = {
    "semantic_segmentation": write_scenes,
    "depth_estimation": write_scenes,
    "keypoint_detection": write_figures,
}


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
def test_parts_of_a_batch_have_the_gradients_of_the_whole(task: str, options: list[str], tmp_path: Path) -> None:
    data = WRITE[task](tmp_path / "data")

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
    for batch_size, parts in ((4, 2), (1, 8)):
        assert_close(gradients(batch_size, parts), whole, 1e-9, f"{parts} parts")
