"""A killed run resumes with identical results from a complete checkpoint, without running pickled code."""

import copy
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from safetensors.torch import save_file

from hf_vit.training import HfViTTrainer, last_checkpoint
from hf_vit.training.checkpoints import find_resume_error, write_checksums
from hf_vit.training.optimizer import whole

from ..helpers import distributed
from ..helpers.averaged_shards import small_model, spread, train_with_muon
from ..helpers.references import assert_identical
from ..helpers.trainings import KILL_STEP, SAVE_STEPS, digits_trainer


# Maps the name of a run to how it is killed, its number of worker processes, and the step from which it resumes.
KILLED = {
    "in_epoch_0": ("in_epoch", 0, 2 * SAVE_STEPS),
    "in_epoch_2": ("in_epoch", 2, 2 * SAVE_STEPS),
    "while_saving_0": ("while_saving", 0, SAVE_STEPS),
}


STATE = "trainer_state.json"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of killed and resumed runs by name, and those of an uninterrupted run ("whole")."""
    folder, processes = tmp_path_factory.mktemp("killed"), {}
    for name, (how, workers, _) in KILLED.items():
        processes[name] = distributed.start("train_and_die", folder / name, how, workers)
    for name, process in processes.items():
        distributed.finish(process, folder / name, returncode=-signal.SIGKILL)
    trainings = ["whole=0", *(f"{name}={workers}" for name, (_, workers, _) in KILLED.items())]
    distributed.finish(distributed.start("train_to_the_end", folder, *trainings), folder)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_training_ends_like_one_that_went_through(name: str, results: dict[str, dict[str, Any]]) -> None:
    whole, resumed = ({**results[key]} for key in ("whole", name))
    assert (whole.pop("checkpoint"), resumed.pop("checkpoint")) == (None, f"checkpoint-{KILLED[name][2]}")
    assert len(whole["losses"]) == 18
    assert KILL_STEP % 6
    assert len(whole["optimizer"]["state"]) == len(whole["weights"])
    assert whole.keys() == {"losses", "eval_losses", "weights", "optimizer", "scheduler"}
    assert_identical(resumed, whole)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an output folder with two complete checkpoints. The step number of the newer one has more digits."""
    for step in (8, 12):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        save_file({"weight": torch.ones(2)}, checkpoint / "model.safetensors")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({}, checkpoint / name)
        for name in ("config.json", STATE):
            (checkpoint / name).write_text("{}")
        write_checksums(checkpoint)
    return tmp_path


def test_last_checkpoint_is_the_newest(folder: Path) -> None:
    assert last_checkpoint(folder / "does_not_exist") is None
    assert last_checkpoint(folder) == str(folder / "checkpoint-12")
    (folder / "checkpoint-99").touch()
    (folder / "checkpoint-best").mkdir()
    assert last_checkpoint(str(folder)) == str(folder / "checkpoint-12")
    for step in (8, 12):
        shutil.rmtree(folder / f"checkpoint-{step}")
        (folder / f"checkpoint-{step}").mkdir()
    assert last_checkpoint(folder) is None


def test_an_incomplete_checkpoint_is_skipped_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = folder / "checkpoint-12"

    def check_skipped(reason: str) -> None:
        caplog.clear()
        assert last_checkpoint(folder) == str(folder / "checkpoint-8"), reason
        assert [record.levelname for record in caplog.records] == ["WARNING"], reason
        assert f"{checkpoint}: {reason}" in caplog.text

    for name in ("model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", STATE):
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        check_skipped(f"it has no {name}")
        (checkpoint / name).write_bytes(content)
    (checkpoint / STATE).write_text('{"epoch": 1.')
    check_skipped(f"the checksums in SHA256SUMS do not match {STATE}")
    (checkpoint / STATE).write_text("{}")
    # A large model needs all its shards.
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    second = checkpoint / "model-00002-of-00002.safetensors"
    save_file({"weight_2": torch.ones(2)}, second)
    write_checksums(checkpoint)
    assert last_checkpoint(folder) == str(checkpoint)
    second.unlink()
    check_skipped(f"it has no {second.name}")
    # A checkpoint that was saved with save_only_model has no optimizer.
    (checkpoint / "model-00001-of-00002.safetensors").rename(checkpoint / "model.safetensors")
    (checkpoint / "optimizer.pt").unlink()
    write_checksums(checkpoint)
    check_skipped("it has no optimizer.pt")


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("FULL_STATE_DICT", "pytorch_model_fsdp.bin"), ("SHARDED_STATE_DICT", "pytorch_model_fsdp_0/.metadata")],
)
def test_what_fsdp_saves_is_complete_and_can_be_taken_up(kind: str, weights: str, folder: Path) -> None:
    checkpoint = folder / "checkpoint-12"
    for name in ("model.safetensors", "optimizer.pt"):
        (checkpoint / name).unlink()
    assert find_resume_error(checkpoint) == "it has no model.safetensors and no optimizer.pt"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    alone = Mock(process_index=0, num_processes=1)
    PartialState(cpu=True)  # the logger of accelerate requires a PartialState
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = small_model().double()
        optimizer = train_with_muon(model, spread(model))
        save_fsdp_model(plugin, alone, model, str(checkpoint))
        save_fsdp_optimizer(plugin, alone, optimizer, model, str(checkpoint))
        write_checksums(checkpoint)
        assert find_resume_error(checkpoint) is None
        saved = copy.deepcopy(optimizer.state_dict()["state"])
        for state in optimizer.state.values():
            state.get("momentum_buffer", state.get("exp_avg")).zero_()
        load_fsdp_optimizer(plugin, alone, optimizer, model, str(checkpoint))
        for number, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                assert torch.equal(whole(value), whole(saved[number][name])), (number, name)
    finally:
        torch.distributed.destroy_process_group()
    (checkpoint / weights).unlink()
    assert find_resume_error(checkpoint) == f"it has no {weights}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint saved by the Trainer."""
    digits_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    return tmp_path / "checkpoint-2"


def test_a_checkpoint_written_over_an_older_one_is_incomplete_until_all_is_there(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint.parent
    assert last_checkpoint(folder) == str(checkpoint)
    # Stop before the checksums of the checkpoint are written.
    monkeypatch.setattr(HfViTTrainer, "_seal", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        digits_trainer(folder, max_steps=2, save_strategy="steps", save_steps=2).train()
    assert (checkpoint / STATE).is_file()
    assert find_resume_error(checkpoint) == "it has no SHA256SUMS"
    assert last_checkpoint(folder) is None


class Malicious:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    ("new_format", "kind", "message"),
    [(True, pickle.UnpicklingError, "Weights only load failed"), (False, ValueError, "truncated files")],
    ids=["zip", "pickle"],
)
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_resuming_refuses_a_pickle_that_runs_code(
    name: str, new_format: bool, kind: type[Exception], message: str, checkpoint: Path
) -> None:
    proof = checkpoint.parent / "code_was_run"
    torch.save(Malicious(proof), checkpoint / name, _use_new_zipfile_serialization=new_format)
    torch.load(checkpoint / name, weights_only=False).close()
    proof.unlink()
    write_checksums(checkpoint)  # as an attacker would
    trainer = digits_trainer(checkpoint.parent, max_steps=4)
    with pytest.raises(kind, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert not proof.exists()
