"""Test that splitting batches does not change losses, gradients and metrics. Test the launch configurations."""

import re
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

from hf_vit import HfViTForImageTextToText, HfViTForObjectDetection, HfViTModel
from hf_vit.model.encoder import HfViTLayer
from hf_vit.model.task_image_classification import classification_loss
from hf_vit.training import HfViTTrainingArguments

from ..helpers import distributed, trainings
from ..helpers.datasets import write_class_folders
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
    train_augmented,
    train_case,
)


# Maximum difference from the expected values per dtype, relative to the largest one
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
# Type of results: one dictionary per process
Results = list[dict[str, Any]]

plain_backward = cache(backward_of_parts)


def run_job(name: str, processes: int, request: pytest.FixtureRequest) -> tuple[Results, str]:
    """Run a job with the selected cases of `test_gradients_are_those_of_one_batch`. Return its results and output."""
    folder = request.getfixturevalue("tmp_path_factory").mktemp(name)
    parameters = [item.callspec.params for item in request.session.items if "processes" in item.fixturenames]
    cases = [f"{chosen['name']}={chosen['dtype']}" for chosen in parameters if chosen["processes"] == processes]
    distributed.finish(distributed.start(name, folder, *cases, processes=processes), folder)
    results = [torch.load(folder / f"process_{rank}.pt") for rank in range(processes)]
    return results, (folder / "output.txt").read_text()


@pytest.fixture(scope="module")
def job_of_two(request: pytest.FixtureRequest) -> tuple[Results, str]:
    return run_job("compare_processes", 2, request)


@pytest.fixture(scope="module")
def two_processes(job_of_two: tuple[Results, str]) -> Results:
    return job_of_two[0]


@pytest.fixture(scope="module")
def four_processes(request: pytest.FixtureRequest) -> Results:
    return run_job("compare_four_processes", 4, request)[0]


def assert_same_training(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert len(expected["losses"]) == len(expected["gradients"]) == 2
    for name in ("losses", "gradients", "weights", "buffers"):
        assert_close(result[name], expected[name], tolerance, name)


@pytest.mark.parametrize(
    ("processes", "dtype"),
    [
        (1, "float64"),
        (2, "float64"),
        pytest.param(2, "float32", marks=pytest.mark.thinned(6)),
        pytest.param(4, "float64", marks=pytest.mark.thinned(5)),
    ],
)
@pytest.mark.parametrize("name", TRAINING_CASES)
def test_gradients_are_those_of_one_batch(
    name: str, processes: int, dtype: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    at_once = train_case(tmp_path, name, dtype, GLOBAL_BATCH, 1)
    assert (at_once["gradients"].dtype, at_once["world_size"]) == (DTYPES[dtype], 1)
    if processes == 1:
        for key, expected in plain_backward(name, GLOBAL_BATCH).items():
            assert_close(at_once[key][:1], expected, TOLERANCES[dtype], key)
        results = [train_case(tmp_path, name, dtype, *split) for split in trainings.splits(name, 1)[1:]]
    else:
        found = request.getfixturevalue({2: "two_processes", 4: "four_processes"}[processes])
        results = [process["gradients"][name, dtype] for process in found]
    for result in results:
        assert result["world_size"] == processes
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
        ("regularized", train_regularized),  # trains with soft labels and repeated augmentation
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


def test_two_processes_print_no_warning(job_of_two: tuple[Results, str]) -> None:
    assert "warn" not in job_of_two[1].lower()


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


@pytest.mark.parametrize(
    ("trainer", "name"),
    [
        *(("transformers.Trainer", name) for name in TRAINING_CASES),
        *(("HfViTTrainer", name) for name, case in TRAINING_CASES.items() if not case.accumulates),
    ],
)
def test_gradient(trainer: str, name: str, two_processes: Results, tmp_path: Path) -> None:
    # Accumulated batches give a different result with batch norm, with a contrastive loss, and if the Trainer in
    # transformers divides each loss by the number of objects or tokens in its batch.
    case, half = TRAINING_CASES[name], GLOBAL_BATCH // 2
    is_split = not case.accumulates or case.model_class in (HfViTForObjectDetection, HfViTForImageTextToText)
    whole = plain_backward(name, GLOBAL_BATCH)
    parts = plain_backward(name, half, counts_all=trainer == "HfViTTrainer") if is_split else whole
    options = {"max_steps": 1, "trainer_class": TRAINERS[trainer]}
    pairs = [(train_case(tmp_path, name, "float64", half, 2, **options), parts)]
    if trainer == "transformers.Trainer":
        pairs += [(process["transformers"][name], whole) for process in two_processes]
    for result, expected in pairs:
        for key, value in expected.items():
            assert_close(result[key], value, TOLERANCES["float64"], key)
        from_whole = (result["gradients"] - whole["gradients"]).abs().max() / whole["gradients"].abs().max()
        assert (from_whole > TOLERANCES["float64"]) == (expected is not whole)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", [name for name, case in TRAINING_CASES.items() if case.model_class is not Comparing])
def test_loss_of_evaluation_is_that_of_the_model(name: str, trainer: str, tmp_path: Path) -> None:
    # `Comparing` is excluded: evaluation computes the loss of image-text pairs only if the collator sets
    # `return_loss`.
    found, alone = loss_of_evaluation(tmp_path, name, trainer)
    assert found == pytest.approx(alone, rel=TOLERANCES["float64"])


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


@pytest.mark.parametrize("way", ["option", "launcher"])
def test_fsdp_on_cpus_is_refused_because_the_trainer_would_ignore_it(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers sets this variable
    if way == "launcher":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"FSDP requires GPUs, .* train with DDP"):
        HfViTTrainingArguments("out", use_cpu=True, fsdp=way == "option")


def test_two_processes_with_fsdp_on_a_cpu_end_at_once_with_the_reason(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "photos", ["cat", "dog"])
    words = ["image-classification", str(tmp_path / "photos"), "--output_dir", str(tmp_path / "out"), "--fsdp", "true"]
    launcher = distributed.launch("--nproc_per_node", "2", "-m", "hf_vit", "train", *words, folder=tmp_path)
    distributed.finish(launcher, tmp_path, returncode=1)
    said = (tmp_path / "output.txt").read_text()
    assert re.search(r"^\S+: FSDP requires GPUs, but this process uses the CPU\. Remove --fsdp", said, re.MULTILINE)
    assert not (tmp_path / "out").exists()


def test_fsdp_spreads_the_blocks_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in prepare_multi_gpu_env(read("eight_gpus_fsdp")).items():
        if name.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(name, value)
    # The plugin is created without arguments, in the same way as by the Trainer.
    plugin, model = FullyShardedDataParallelPlugin(), HfViTModel(small_config())
    plugin.set_auto_wrap_policy(model)
    is_wrapped = partial(plugin.auto_wrap_policy, recurse=False, nonwrapped_numel=0)
    assert {type(module) for module in model.modules() if is_wrapped(module=module)} == {HfViTLayer}
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
