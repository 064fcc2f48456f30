"""For any split of a batch, gradients of all models equal those of the whole batch, with both Trainer classes.

`pytest -v` lists all combinations; `-s` prints the relative error of each.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_vit import HfViTForObjectDetection

from ..helpers import distributed
from ..helpers.models import TRAINING_CASES, small_config
from ..helpers.trainings import GLOBAL_BATCH, TRAINERS, backward_of_parts, loss_of_evaluation, step_of_case


TOLERANCE = 1e-9  # relative to the largest value, in float64
# Maps the name of a split to images per forward pass, forward passes per step, and number of processes.
SPLITS = {"1x8": (8, 1, 1), "2x4 accumulated": (4, 2, 1), "2 processes x4": (4, 1, 2)}

whole_or_parts = cache(backward_of_parts)


def distance(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """Return the gradients computed in two processes."""
    folder = tmp_path_factory.mktemp("processes")
    distributed.finish(distributed.start("compare_trainers", folder, processes=2), folder)
    return [torch.load(folder / f"process_{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", TRAINING_CASES)
def test_gradient(name: str, trainer: str, split: str, processes: list[dict[Any, Any]], tmp_path: Path) -> None:
    size, accumulate, num_processes = SPLITS[split]
    if num_processes == 1:
        results = [step_of_case(tmp_path, name, trainer, size, accumulate)]
    else:
        results = [process[name, trainer] for process in processes]
    # Losses of accumulated batches are normalized separately for batch norm, for a contrastive loss, and if the
    # Trainer of transformers divides by the number of objects in each batch.
    case = TRAINING_CASES[name]
    is_own = trainer == "transformers.Trainer" and case.model_class is HfViTForObjectDetection
    is_split = accumulate > 1 and (is_own or not case.accumulates)
    whole = whole_or_parts(name, GLOBAL_BATCH)
    expected = whole_or_parts(name, size, counts_all=trainer == "HfViTTrainer") if is_split else whole
    for result in results:
        assert result["world_size"] == num_processes
        loss, gradient = (distance(result[key], expected[key]) for key in ("losses", "gradients"))
        from_whole = distance(result["gradients"], whole["gradients"])
        note = f" (parts computed separately; difference from the whole batch: {from_whole:.2f})" if is_split else ""
        sys.stdout.write(f"{name:24}{trainer:22}{split:17}loss {loss:.0e} gradient {gradient:.0e}{note}\n")
        assert max(loss, gradient) <= TOLERANCE
        assert (from_whole > TOLERANCE) is is_split
    # In evaluation, transformers computes the loss of image-text pairs only if the collator requests it, as for CLIP.
    if split == "1x8" and "input_ids" not in case.make_batch(small_config(**case.overrides), 2):
        found, alone = loss_of_evaluation(tmp_path, name, trainer)
        assert found == pytest.approx(alone, rel=TOLERANCE)
