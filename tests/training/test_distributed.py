"""Losses, gradients and metrics do not depend on the number of processes and on gradient accumulation."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vit.model.task_image_classification import classification_loss
from hf_vit.training import HfViTTrainingArguments

from ..helpers import distributed
from ..helpers.models import TRAINING_CASES
from ..helpers.references import assert_close
from ..helpers.regularization import train_regularized
from ..helpers.trainings import (
    DTYPES,
    EVAL_BATCHES,
    GLOBAL_BATCH,
    NUM_TEST,
    NUM_TRAIN,
    AtManySizes,
    digits_trainer,
    evaluate,
    splits,
    train_adapter,
    train_augmented,
    train_case,
)


TOLERANCES = {"float64": 1e-9, "float32": 1e-5}  # relative to the largest expected value


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for results and output of two processes."""
    return tmp_path_factory.mktemp("two_processes")


@pytest.fixture(scope="module")
def two_processes(folder_of_two: Path) -> list[dict[str, Any]]:
    """Return the results of the runs in two processes."""
    folder = folder_of_two
    distributed.finish(distributed.start("compare_processes", folder, processes=2), folder)
    return [torch.load(folder / f"process_{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of the runs in four processes."""
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
    name: str,
    dtype: str,
    two_processes: list[dict[str, Any]],
    four_processes: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    at_once, *accumulated = (train_case(tmp_path, name, dtype, *split) for split in splits(name, 1))
    assert at_once["gradients"].dtype == DTYPES[dtype]
    assert at_once["world_size"] == 1
    for result in accumulated:
        assert_same_training(result, at_once, TOLERANCES[dtype])
    for processes in (two_processes, four_processes) if dtype == "float64" else (two_processes,):
        for process in processes:
            for split in splits(name, len(processes)):
                result = process["gradients"][name, dtype, split]
                assert result["world_size"] == len(processes)
                assert_same_training(result, at_once, TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["queries", "deformable", "keypoints"])
def test_unequal_batches_of_a_step_count_by_what_is_in_them(name: str, tmp_path: Path) -> None:
    at_once, in_parts = (train_case(tmp_path, name, "float64", *split, num_images=5) for split in ((5, 1), (2, 3)))
    assert len(at_once["gradients"]) == len(in_parts["gradients"]) == 1
    for key in ("losses", "gradients"):
        assert_close(in_parts[key], at_once[key], TOLERANCES["float64"], key)


def test_two_processes_train_on_the_augmented_images_of_one(
    two_processes: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = train_augmented(tmp_path, GLOBAL_BATCH)
    assert len(alone["losses"]) == 3 * (NUM_TRAIN // GLOBAL_BATCH)
    for process in two_processes:
        assert_close(process["augmented"]["losses"], alone["losses"], 1e-5, "losses")
        assert_close(process["augmented"]["weights"], alone["weights"], 1e-5, "weights")
        assert process["augmented"]["metrics"] == pytest.approx(alone["metrics"], abs=1e-4)


def test_two_processes_learn_soft_labels_of_repeated_augmentations_as_one(
    two_processes: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = train_regularized(tmp_path, GLOBAL_BATCH)
    for process in two_processes:
        for part in ("losses", "weights"):
            assert_close(process["regularized"][part], alone[part], 1e-5, part)


def test_two_processes_train_at_the_sizes_of_one(two_processes: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = train_augmented(tmp_path, GLOBAL_BATCH, trainer_class=AtManySizes)
    for process in two_processes:
        assert_close(process["many_sizes"]["losses"], alone["losses"], 1e-5, "losses")
        assert_close(process["many_sizes"]["weights"], alone["weights"], 1e-5, "weights")


def test_two_processes_learn_the_adapter_of_one(two_processes: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = train_adapter(tmp_path, GLOBAL_BATCH)
    for process in two_processes:
        assert_close(process["adapter"]["losses"], alone["losses"], 1e-5, "losses")
        assert_close(process["adapter"]["weights"], alone["weights"], 1e-5, "weights")


def test_two_processes_learn_from_stored_features_as_one_from_images(
    two_processes: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = train_augmented(tmp_path, GLOBAL_BATCH, arguments_class=HfViTTrainingArguments, trainable_blocks=0)
    for process in two_processes:
        assert_close(process["stored"]["losses"], alone["losses"], 1e-5, "losses")
        assert_close(process["stored"]["weights"], alone["weights"], 1e-5, "weights")


@pytest.mark.usefixtures("two_processes")
def test_two_processes_print_no_warning(folder_of_two: Path) -> None:
    lines = (folder_of_two / "output.txt").read_text().splitlines()
    assert not [line for line in lines if "warn" in line.lower()]


def test_two_processes_take_a_training_up_where_it_was(two_processes: list[dict[str, Any]]) -> None:
    for process in two_processes:
        for part in ("losses", "weights"):
            assert torch.equal(process["resumed"][part], process["augmented"][part])


def test_metrics_are_the_same_in_any_batches_on_any_number_of_processes(
    two_processes: list[dict[str, Any]], four_processes: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = {batch_size: evaluate(tmp_path, batch_size) for batch_size in EVAL_BATCHES[1]}
    expected = alone[NUM_TEST]
    for results in (alone, *(process["metrics"] for process in two_processes + four_processes)):
        for batch_size, metrics in results.items():
            assert batch_size == NUM_TEST or NUM_TEST % batch_size
            assert metrics == pytest.approx(expected, rel=1e-9, abs=0)


def test_evaluation_loss_is_the_loss_of_all_images_at_once(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, per_device_eval_batch_size=5)
    scores = trainer.evaluate()
    batch = trainer.data_collator(list(trainer.eval_dataset))
    with torch.no_grad():
        logits = trainer.model.eval()(pixel_values=batch["pixel_values"]).logits
    loss = float(classification_loss(logits.double(), batch["labels"], None))
    assert scores["eval_loss"] == pytest.approx(loss, rel=1e-6)


def test_dropping_the_last_training_batch_drops_no_image_of_an_evaluation(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, per_device_eval_batch_size=8, dataloader_drop_last=True)
    assert len(trainer.predict(trainer.eval_dataset).predictions) == NUM_TEST
    assert sum(len(batch["labels"]) for batch in trainer.get_eval_dataloader()) == NUM_TEST
    assert len(trainer.get_train_dataloader()) == NUM_TRAIN // GLOBAL_BATCH
    assert trainer.args.dataloader_drop_last
