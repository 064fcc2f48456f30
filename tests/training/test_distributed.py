"""Losses, gradients and metrics do not depend on the number of processes and on gradient accumulation."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vit.model.task_image_classification import classification_loss
from hf_vit.training import HfViTTrainingArguments

from ..helpers import distributed, trainings
from ..helpers.models import TRAINING_CASES
from ..helpers.references import assert_close
from ..helpers.regularization import train_regularized
from ..helpers.trainings import DTYPES, GLOBAL_BATCH, NUM_TEST, NUM_TRAIN, digits_trainer, train_augmented, train_case


TOLERANCES = {"float64": 1e-9, "float32": 1e-5}  # relative to the largest expected value
Results = list[dict[str, Any]]  # results of each process


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with results and output of two processes."""
    folder = tmp_path_factory.mktemp("two_processes")
    distributed.finish(distributed.start("compare_processes", folder, processes=2), folder)
    return folder


@pytest.fixture(scope="module")
def two_processes(folder_of_two: Path) -> Results:
    return [torch.load(folder_of_two / f"process_{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("four_processes")
    distributed.finish(distributed.start("compare_four_processes", folder, processes=4), folder)
    return [torch.load(folder / f"process_{rank}.pt") for rank in range(4)]


def assert_same_training(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert len(expected["losses"]) == len(expected["gradients"]) == 2
    for name in ("losses", "gradients", "weights", "buffers"):
        assert_close(result[name], expected[name], tolerance, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TRAINING_CASES)
def test_gradients_are_those_of_one_batch(
    name: str, dtype: str, two_processes: Results, four_processes: Results, tmp_path: Path
) -> None:
    at_once, *accumulated = (train_case(tmp_path, name, dtype, *split) for split in trainings.splits(name, 1))
    assert (at_once["gradients"].dtype, at_once["world_size"]) == (DTYPES[dtype], 1)
    for result in accumulated:
        assert_same_training(result, at_once, TOLERANCES[dtype])
    for processes in (two_processes, four_processes) if dtype == "float64" else (two_processes,):
        for process in processes:
            for split in trainings.splits(name, len(processes)):
                result = process["gradients"][name, dtype, split]
                assert result["world_size"] == len(processes)
                assert_same_training(result, at_once, TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("queries", None), ("deformable", None), ("keypoints", None), ("queries", "features"), ("keypoints", "features")],
)
def test_unequal_batches_of_a_step_count_by_their_objects_and_images(name: str, kind: str | None, tmp_path: Path) -> None:
    at_once, in_parts = (
        train_case(tmp_path, name, "float64", *split, num_images=5, kind=kind) for split in ((5, 1), (2, 3))
    )
    assert len(at_once["gradients"]) == len(in_parts["gradients"]) == 1
    for key in ("losses", "gradients"):
        assert_close(in_parts[key], at_once[key], TOLERANCES["float64"], key)


@pytest.mark.parametrize(
    ("part", "train"),
    [
        ("augmented", train_augmented),
        ("regularized", train_regularized),  # soft labels of repeated augmentations
        ("many_sizes", partial(train_augmented, trainer_class=trainings.AtManySizes)),
        ("adapter", trainings.train_adapter),
        # The single process trains on images instead of stored features.
        ("stored", partial(train_augmented, arguments_class=HfViTTrainingArguments, trainable_blocks=0)),
    ],
)
def test_two_processes_train_as_one(
    part: str, train: Callable[..., dict[str, Any]], two_processes: Results, tmp_path: Path
) -> None:
    alone = train(tmp_path, GLOBAL_BATCH)
    for process in two_processes:
        for key in ("losses", "weights"):
            assert_close(process[part][key], alone[key], 1e-5, key)
        if part == "augmented":
            assert len(alone["losses"]) == 3 * (NUM_TRAIN // GLOBAL_BATCH)
            assert process[part]["metrics"] == pytest.approx(alone["metrics"], abs=1e-4)
            # A resumed training continues exactly where it was.
            for key in ("losses", "weights"):
                assert torch.equal(process["resumed"][key], process[part][key])


@pytest.mark.usefixtures("two_processes")
def test_two_processes_print_no_warning(folder_of_two: Path) -> None:
    assert "warn" not in (folder_of_two / "output.txt").read_text().lower()


def test_metrics_are_the_same_in_any_batches_on_any_number_of_processes(
    two_processes: Results, four_processes: Results, tmp_path: Path
) -> None:
    alone = {batch_size: trainings.evaluate(tmp_path, batch_size) for batch_size in trainings.EVAL_BATCHES[1]}
    for results in (alone, *(process["metrics"] for process in two_processes + four_processes)):
        for batch_size, metrics in results.items():
            assert batch_size == NUM_TEST or NUM_TEST % batch_size
            assert metrics == pytest.approx(alone[NUM_TEST], rel=1e-9, abs=0)


def test_an_evaluation_is_of_all_images_at_once_even_if_training_drops_the_last_batch(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, per_device_eval_batch_size=5, dataloader_drop_last=True)
    scores = trainer.evaluate()
    batch = trainer.data_collator(list(trainer.eval_dataset))
    with torch.no_grad():
        logits = trainer.model.eval()(pixel_values=batch["pixel_values"]).logits
    loss = float(classification_loss(logits.double(), batch["labels"], None))
    assert scores["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert len(trainer.predict(trainer.eval_dataset).predictions) == NUM_TEST
    assert sum(len(batch["labels"]) for batch in trainer.get_eval_dataloader()) == NUM_TEST
    assert len(trainer.get_train_dataloader()) == NUM_TRAIN // GLOBAL_BATCH
    assert trainer.args.dataloader_drop_last
