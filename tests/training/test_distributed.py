"""Test that splitting batches does not change losses, gradients and metrics; test the launch configurations."""

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import Tensor

from hf_vit import HfViTForImageTextToText, HfViTForObjectDetection, HfViTModel
from hf_vit.model.encoder import HfViTLayer
from hf_vit.model.task_image_classification import classification_loss
from hf_vit.training import HfViTTrainingArguments

from ..helpers import distributed, trainings
from ..helpers.models import TRAINING_CASES, Comparing, small_config
from ..helpers.processes import ROOT
from ..helpers.references import assert_close
from ..helpers.regularization import train_regularized
from ..helpers.trainings import (
    DTYPES,
    GLOBAL_BATCH,
    NUM_TEST,
    NUM_TRAIN,
    TRAINERS,
    backward_of_parts,
    digits_trainer,
    loss_of_evaluation,
    step_of_case,
    train_augmented,
    train_case,
)


# Maximum differences, relative to the largest expected value
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
# Contains one dictionary of results per process.
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which two processes have written their results and output."""
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
def test_unequal_batches_of_a_step_count_by_their_objects_and_images(
    name: str, kind: str | None, tmp_path: Path
) -> None:
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
        ("regularized", train_regularized),  # trains on soft labels with repeated augmentation
        ("many_sizes", partial(train_augmented, trainer_class=trainings.AtManySizes)),
        ("adapter", trainings.train_adapter),
        # Two processes train on stored features. The single process trains on the images themselves.
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
            # A resumed training run gives the same losses and weights as an uninterrupted one.
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


# Maximum difference of float64 values, relative to the largest value
TOLERANCE = 1e-9
# Maps the name of a batch split to (images per forward pass, forward passes per step, number of processes).
SPLITS = {"1x8": (8, 1, 1), "2x4 accumulated": (4, 2, 1), "2 processes x4": (4, 1, 2)}

whole_or_parts = cache(backward_of_parts)


def distance(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """Return the gradients that each of two processes has computed."""
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
    # Accumulated batches are normalized separately with batch norm, with a contrastive loss, and if the
    # Trainer in transformers divides the loss by the number of objects or tokens in each batch.
    case = TRAINING_CASES[name]
    counts = case.model_class in (HfViTForObjectDetection, HfViTForImageTextToText)
    is_own = trainer == "transformers.Trainer" and counts
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
    # In evaluation, the Trainer computes the loss of image-text pairs only if the collator sets `return_loss`.
    if split == "1x8" and case.model_class is not Comparing:
        found, alone = loss_of_evaluation(tmp_path, name, trainer)
        assert found == pytest.approx(alone, rel=TOLERANCE)


FOLDER = ROOT / "scripts" / "accelerate"
# Maps the name of a configuration to (number of machines, number of processes, uses CPU, uses DDP, uses FSDP).
CONFIGS = {
    "one_cpu": (1, 1, True, False, False),
    "one_gpu": (1, 1, False, False, False),
    "eight_gpus": (1, 8, False, True, False),
    "eight_gpus_fsdp": (1, 8, False, False, True),
    "two_nodes": (2, 16, False, True, False),
}


def read(name: str, *options: str) -> Namespace:
    """Return the parsed configuration of an `accelerate launch` command line."""
    command = ["--config_file", str(FOLDER / f"{name}.yaml"), "--main_process_port", "0", *options, "train.py"]
    return _validate_launch_command(launch_command_parser().parse_args(command))[0]


def test_every_configuration_starts_what_its_name_says_and_says_how_it_is_used_and_whether_it_was_run() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == CONFIGS.keys()
    for name, expected in CONFIGS.items():
        header = re.match(r"(#.*\n)+", (FOLDER / f"{name}.yaml").read_text())[0]
        assert f"accelerate launch --config_file scripts/accelerate/{name}.yaml " in header
        assert re.search("^# (Run|Not run: needs .*)\\.", header, flags=re.MULTILINE)
        found = vars(read(name))
        names = ("num_machines", "num_processes", "use_cpu", "multi_gpu", "use_fsdp")
        assert tuple(found[name] for name in names) == expected
        assert found["mixed_precision"] == ("no" if name == "one_cpu" else "bf16")
    found = read("two_nodes", "--machine_rank", "1", "--main_process_ip", "10.0.0.1")
    assert (found.machine_rank, found.main_process_ip, found.num_machines) == (1, "10.0.0.1", 2)


def test_fsdp_spreads_the_blocks_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in prepare_multi_gpu_env(read("eight_gpus_fsdp")).items():
        if name.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(name, value)
    # The accelerator of the Trainer creates the FSDP plugin without arguments, too.
    plugin, model = FullyShardedDataParallelPlugin(), HfViTModel(small_config())
    plugin.set_auto_wrap_policy(model)
    is_wrapped = partial(plugin.auto_wrap_policy, recurse=False, nonwrapped_numel=0)
    assert {type(module) for module in model.modules() if is_wrapped(module=module)} == {HfViTLayer}
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
