"""Test that interrupted training runs keep complete checkpoints and resume exactly, without executing pickled code."""

import copy
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from hf_vit.tasks import ImageClassification
from hf_vit.training import HfViTTrainer, NotFiniteError, Preempted, last_checkpoint
from hf_vit.training.checkpoints import find_resume_error, write_checksums
from hf_vit.training.errors import CheckpointError
from hf_vit.training.optimizer import whole as whole_tensor

from ..helpers import distributed
from ..helpers.averaged_shards import small_model, spread, train_with_muon
from ..helpers.datasets import truncate, write_class_folders, write_pictures
from ..helpers.options import run
from ..helpers.references import assert_identical
from ..helpers.regularization import regularized_trainer
from ..helpers.trainings import KILL_STEP, SAVE_STEPS, STOP_STEP, digits_trainer, logged, resumable_trainer


# Maps the name of a training run to the moment at which it is killed, its number of worker processes, and the step
# from which it resumes.
KILLED = {
    "in_epoch_0": ("in_epoch", 0, 2 * SAVE_STEPS),
    "in_epoch_2": ("in_epoch", 2, 2 * SAVE_STEPS),
    "while_saving_0": ("while_saving", 0, SAVE_STEPS),
}
STATE = "trainer_state.json"
LAST_STEP = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of all killed and resumed runs, and of an uninterrupted run named "whole"."""
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
    """Return an output folder with the complete checkpoints of steps 8 and 12."""
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
    # The checkpoint of a sharded model is complete only if it contains all shards.
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    second = checkpoint / "model-00002-of-00002.safetensors"
    save_file({"weight_2": torch.ones(2)}, second)
    write_checksums(checkpoint)
    assert last_checkpoint(folder) == str(checkpoint)
    second.unlink()
    check_skipped(f"it has no {second.name}")
    # A checkpoint that was saved with save_only_model=True does not contain the optimizer.
    (checkpoint / "model-00001-of-00002.safetensors").rename(checkpoint / "model.safetensors")
    (checkpoint / "optimizer.pt").unlink()
    write_checksums(checkpoint)
    check_skipped("it has no optimizer.pt")


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("FULL_STATE_DICT", "pytorch_model_fsdp.bin"), ("SHARDED_STATE_DICT", "pytorch_model_fsdp_0/.metadata")],
)
def test_fsdp_checkpoints_are_complete_and_resumable(kind: str, weights: str, folder: Path) -> None:
    checkpoint = folder / "checkpoint-12"
    for name in ("model.safetensors", "optimizer.pt"):
        (checkpoint / name).unlink()
    assert find_resume_error(checkpoint) == "it has no model.safetensors and no optimizer.pt"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    alone = Mock(process_index=0, num_processes=1)
    PartialState(cpu=True)  # the logger of accelerate requires this object
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
                assert torch.equal(whole_tensor(value), whole_tensor(saved[number][name])), (number, name)
    finally:
        torch.distributed.destroy_process_group()
    (checkpoint / weights).unlink()
    assert find_resume_error(checkpoint) == f"it has no {weights}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return the folder of a checkpoint saved by the Trainer."""
    digits_trainer(tmp_path, **LAST_STEP).train()
    return tmp_path / "checkpoint-2"


def test_a_checkpoint_written_over_an_older_one_is_incomplete_until_all_is_there(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint.parent
    assert last_checkpoint(folder) == str(checkpoint)
    # Interrupt training before the checksums of the checkpoint are written.
    monkeypatch.setattr(HfViTTrainer, "seal_checkpoint", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        digits_trainer(folder, **LAST_STEP).train()
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
    write_checksums(checkpoint)  # an attacker can also write valid checksums
    trainer = digits_trainer(checkpoint.parent, max_steps=4)
    with pytest.raises(kind, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert not proof.exists()


# Type of training results: the output folder, and the results of each process
Runs = tuple[Path, list[dict[str, Any]]]
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 16}


class AtStep(TrainerCallback):
    """Callback that calls a function at the beginning of a given step, counted from 1."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            self.act()


def send(number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to this process and its worker processes, as a cluster scheduler does to stop a job."""
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, number)
    os.kill(os.getpid(), number)


def results_of(trainer: HfViTTrainer) -> list[Any]:
    losses = [logged(trainer, name) for name in ("loss", "eval_loss")]
    return [*losses, *(each.state_dict() for each in (trainer.model, trainer.optimizer, trainer.lr_scheduler))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the results of an uninterrupted run of 3 epochs with 6 steps."""
    trainer = resumable_trainer(tmp_path_factory.mktemp("whole"), 0)
    trainer.train()
    return results_of(trainer)


@pytest.mark.parametrize(
    ("number", "step", "workers", "evaluations"),
    [(signal.SIGTERM, 9, 1, 1), (signal.SIGUSR1, 12, 0, 2)],
    ids=["in_an_epoch", "at_its_end"],
)
def test_a_signal_ends_a_training_that_goes_on_exactly(
    number: signal.Signals, step: int, workers: int, evaluations: int, whole: list[Any], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    trainer = resumable_trainer(tmp_path, workers)
    trainer.add_callback(AtStep(step, lambda: send(number)))
    before = signal.getsignal(number)
    with pytest.raises(Preempted) as stopped:
        trainer.train()
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) == before
    checkpoint = str(tmp_path / f"checkpoint-{step}")
    assert last_checkpoint(tmp_path) == checkpoint
    assert f"{number.name} has ended the training after step {step} of 18. " in caplog.text
    assert f"{checkpoint}. Resume from it with --resume_from_checkpoint last" in caplog.text
    assert len(logged(trainer, "eval_loss")) == evaluations
    resumed = resumable_trainer(tmp_path, workers)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_identical(results_of(resumed), whole)


def test_worker_processes_end_with_their_trainer_and_a_late_signal_counts_after_the_training(tmp_path: Path) -> None:
    class TooLate(TrainerCallback):
        def on_train_end(self, *_: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    received: list[int] = []
    trainer = resumable_trainer(tmp_path, 1)
    trainer.args.max_steps = 1
    trainer.add_callback(TooLate())
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    workers = multiprocessing.active_children()
    assert workers
    began = time.monotonic()
    del trainer
    assert not any(worker.is_alive() for worker in workers)
    assert time.monotonic() - began < 4  # torch terminates a worker that does not end after 5 seconds


def test_a_signal_in_the_last_step_leaves_its_checkpoint_and_nothing_to_train(tmp_path: Path) -> None:
    # With greater_is_better=True, the first evaluation is the best, because the loss falls during training.
    options = {"save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": True}
    options |= {"eval_strategy": "epoch", "max_steps": 4, "per_device_train_batch_size": 22, "learning_rate": 0.01}
    trainer = digits_trainer(tmp_path, **options)
    trainer.add_callback(AtStep(4, send))
    with pytest.raises(Preempted):
        trainer.train()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    assert len(logged(trainer, "eval_loss")) == 2
    assert (trainer.state.best_global_step, trainer.args.save_strategy) == (2, "best")
    resumed = digits_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=last_checkpoint(tmp_path))
    assert resumed.state.global_step == 4
    torch.testing.assert_close(resumed.model.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the folder and the results of training runs in two processes, each interrupted in a different way."""
    folder = tmp_path_factory.mktemp("two_processes")
    job = ("-m", "tests.helpers.trainings", "stop_one_of_two", str(folder))
    launcher = distributed.launch("--standalone", "--nproc_per_node", "2", *job, folder=folder)
    give_up = time.monotonic() + distributed.TIMEOUT
    while last_checkpoint(folder / "long") is None and launcher.poll() is None and time.monotonic() < give_up:
        time.sleep(0.2)
    launcher.terminate()
    distributed.finish(launcher, folder, returncode=1)
    assert last_checkpoint(folder / "long") is not None, (folder / "output.txt").read_text()
    return folder, [torch.load(folder / f"process_{rank}.pt") for rank in range(2)]


def test_two_processes_stop_at_one_step_for_a_signal_or_a_loss_of_one(two_processes: Runs) -> None:
    folder, results = two_processes
    assert (folder / "stopped" / f"checkpoint-{STOP_STEP + 1}").is_dir()
    for result in results:
        assert result["stopped"] == str(128 + signal.SIGTERM)
        assert len(result["whole_losses"]) == 9
        for part in ("losses", "weights"):
            assert_identical(result[f"stopped_{part}"], result[f"whole_{part}"])
        assert f"The loss is infinite or NaN after step {STOP_STEP + 1}" in result["spoiled"]
    assert last_checkpoint(folder / "spoiled") == str(folder / "spoiled" / f"checkpoint-{SAVE_STEPS}")
    # During the run "long", the launcher received a stop signal.
    checkpoint = last_checkpoint(folder / "long")
    assert checkpoint is not None
    # Only one of the two processes prints the path of the last checkpoint.
    assert (folder / "output.txt").read_text().count(f"The last complete checkpoint is {checkpoint}") == 1
    assert sorted(path.name for path in Path(checkpoint).glob("rng_state*")) == ["rng_state_0.pth", "rng_state_1.pth"]


def test_a_loss_that_is_no_number_stops_the_training_and_is_not_saved(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, learning_rate=0.125, lr_scheduler_type="constant", **EVERY_STEP)
    collate = trainer.data_collator
    factors = [1.0]

    def collate_and_spoil(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collate(examples)
        return {**batch, "pixel_values": batch["pixel_values"] * factors[-1]}

    trainer.data_collator = collate_and_spoil
    # The data loader prefetches: the batch of step 5 is already loaded when step 4 begins.
    trainer.add_callback(AtStep(4, lambda: factors.append(float("inf"))))
    message = r"The loss is infinite or NaN after step 6, at a learning rate of 0\.125.*"
    message += f"The last complete checkpoint is {tmp_path}/checkpoint-5\\."
    with pytest.raises(NotFiniteError, match=message):
        trainer.train()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    assert not (tmp_path / "checkpoint-6").exists()
    assert len(logged(trainer, "loss")) == 5


@pytest.mark.parametrize("saves", [True, False])
def test_weights_that_are_no_numbers_are_not_saved(saves: bool, tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, **(EVERY_STEP if saves else {}), max_steps=3)
    factors = [1.0]
    trainer.model.classifier.weight.register_hook(lambda gradient: gradient * factors[-1])
    trainer.add_callback(AtStep(3, lambda: factors.append(float("nan"))))
    with pytest.raises(NotFiniteError, match="The weights are infinite or NaN after step 3"):
        trainer.train()
    assert last_checkpoint(tmp_path) == (str(tmp_path / "checkpoint-2") if saves else None)
    assert not (tmp_path / "checkpoint-3").exists()


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Limit the size of written files to `size` bytes, to simulate a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_full_disk_leaves_the_last_checkpoint_and_says_what_is_missing(file: str, tmp_path: Path) -> None:
    class FullDisk(HfViTTrainer):
        def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
            last = tmp_path / "checkpoint-1" / file
            with files_end_at(last.stat().st_size - 10 if last.is_file() else resource.RLIM_INFINITY):
                super()._save_checkpoint(model, trial)

    trainer = digits_trainer(tmp_path, FullDisk, save_total_limit=1, **EVERY_STEP)
    first, second = (tmp_path / f"checkpoint-{step}" for step in (1, 2))
    message = rf"^[^\n]*{second} could not be written \(.* kB, and .*The last complete checkpoint is {first}\. Resume"
    with pytest.raises(CheckpointError, match=message) as stopped:
        trainer.train()
    assert "\n" not in str(stopped.value)
    assert not second.exists()
    digits_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=last_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("error", "message"),
    [(CheckpointError, r"could not be written \(truncated files: scheduler\.pt\)"), (KeyboardInterrupt, None)],
)
def test_a_checkpoint_stays_until_the_next_is_whole(
    error: type[BaseException], message: str | None, tmp_path: Path
) -> None:
    class Interrupted(HfViTTrainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if self.state.global_step == 2:
                # A truncated scheduler.pt must not raise an error other than `error`.
                truncate(Path(output_dir) / "scheduler.pt")
                if error is KeyboardInterrupt:
                    raise error
            super()._save_rng_state(output_dir)

    trainer = digits_trainer(tmp_path, Interrupted, save_total_limit=1, **EVERY_STEP)
    with pytest.raises(error, match=message):
        trainer.train()
    assert (tmp_path / "checkpoint-2").is_dir() == (error is KeyboardInterrupt)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


def test_old_checkpoints_are_deleted_by_step_after_the_new_checksums(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def checkpoints() -> set[str]:
        return {folder.name.removeprefix("checkpoint-") for folder in tmp_path.glob("checkpoint-*")}

    class ClockThatJumps(HfViTTrainer):
        def seal_checkpoint(self, checkpoint: Path) -> None:
            seen.append(checkpoints())
            super().seal_checkpoint(checkpoint)
            os.utime(checkpoint, (10**9 - 1000 * self.state.global_step,) * 2)

    # A damaged checkpoint with a higher step number must not be removed.
    (tmp_path / "checkpoint-9").mkdir()
    digits_trainer(tmp_path, ClockThatJumps, save_total_limit=2, max_steps=4, **EVERY_STEP).train()
    assert (seen[3], checkpoints()) == ({"2", "3", "4", "9"}, {"3", "4", "9"})
    arguments = json.loads((tmp_path / "checkpoint-4" / "training_args.json").read_text())
    assert arguments["save_total_limit"] == 2


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "accuracy"}


def test_the_best_model_is_that_of_a_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # With a negligible learning rate, the weights never change, so no evaluation is better than the first.
    options = {**EVERY_STEP, **BEST, "learning_rate": 1e-30, "save_total_limit": 2}
    folder = tmp_path / "after"
    digits_trainer(tmp_path / "before", max_steps=3, **options).train()
    (tmp_path / "before").rename(folder)
    assert {checkpoint.name for checkpoint in folder.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-3"}
    shutil.copytree(folder, tmp_path / "copy")
    for is_lost in (False, True):
        best = folder / "checkpoint-1"
        if is_lost:
            shutil.rmtree(folder)
            (tmp_path / "copy").rename(folder)
            (best / "model.safetensors").write_bytes(bytes((best / "model.safetensors").stat().st_size))
        trainer = digits_trainer(folder, max_steps=4, **options)
        trainer.train(resume_from_checkpoint=True)
        expected = folder / "checkpoint-4" if is_lost else best
        assert trainer.state.best_model_checkpoint == str(expected)
        assert (f"The best checkpoint so far, {best}, cannot be used: the checksums" in caplog.text) == is_lost
    truncate(expected / "config.json")
    with pytest.raises(CheckpointError, match=r"The best checkpoint, .*, cannot be used: the checksums in SHA"):
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)


MODEL = '{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "patch_size": 8}'
SCRIPT = (
    *("--dataset_name", "photos", "--output_dir", "output", "--image_size", "16", "--config_overrides", MODEL),
    *("--per_device_train_batch_size", "4", "--use_cpu", "--report_to", "none", "--num_train_epochs", "4"),
)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with eight images of two classes, which give two training steps per epoch."""
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "photos", "validation/cat/0.png", "validation/dog/0.png", seed=100)
    return write_class_folders(tmp_path / "photos", ["cat", "dog"])


def run_until(step: int, act: Callable[[], None], *options: str) -> Any:
    """Run the training command and call `act` at the given step. Return the exit code or the error message."""

    class TaskWithAction(ImageClassification):
        def trainer_arguments(self, *args: Any) -> dict[str, Any]:
            return {**super().trainer_arguments(*args), "callbacks": [AtStep(step, act)]}

    with pytest.raises(SystemExit) as stopped:
        run(TaskWithAction, [*SCRIPT, *options], None, lambda line: None)
    return stopped.value.code


@pytest.mark.usefixtures("photos")
def test_command_stopped_by_a_signal_saves_a_checkpoint_and_resumes() -> None:
    said: list[str] = []
    assert run_until(3, send) == 143
    assert not {"README.md", "model.safetensors"} & {path.name for path in Path("output").iterdir()}
    run(ImageClassification, [*SCRIPT, "--resume_from_checkpoint", "last"], None, said.append)
    assert Path("output/README.md").is_file()
    assert Path("output/checkpoint-8").is_dir()
    assert said[-1] == "The model, its scores and its card: output"


@pytest.mark.parametrize(("split", "workers", "checkpoint"), [("train", 0, 6), ("validation", 1, 4)])
def test_command_names_an_image_that_becomes_unreadable(
    split: str, workers: int, checkpoint: int, photos: Path
) -> None:
    files = sorted(photos.glob(f"{split}/*/*.png"))
    # The data loader prefetches: the training images of epoch 3 are already loaded when step 5 begins.
    message = run_until(5, lambda: [*map(truncate, files)], "--dataloader_num_workers", str(workers))
    assert "\n" not in message
    assert sum(f"{file} cannot be decoded: " in message for file in files) == 1
    assert "truncated. " in message
    assert f"The last complete checkpoint is output/checkpoint-{checkpoint}. Resume" in message


def trainer_in(folder: Path, **options: Any) -> HfViTTrainer:
    """Return a trainer with a negligible learning rate, so that no evaluation is better than the first."""
    epochs = {"num_train_epochs": 9, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": None}
    return regularized_trainer(folder, 8, **{"learning_rate": 1e-30, **epochs, **options})


def test_resuming_restores_patience_and_early_stopping(tmp_path: Path) -> None:
    # An epoch has five steps. The first epoch is the best, so training stops after three more epochs.
    for checkpoint in (None, "checkpoint-15", "checkpoint-20"):
        trainer = trainer_in(tmp_path, early_stopping_patience=3)
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))
        assert (trainer.state.global_step, trainer.state.best_global_step) == (20, 5), checkpoint
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-20"), checkpoint


def test_resuming_adds_training_time_and_allows_more_epochs(tmp_path: Path) -> None:
    first = trainer_in(tmp_path, num_train_epochs=1)
    start = time.monotonic()
    first.train()
    assert 0 < first.progress.seconds <= time.monotonic() - start
    saved = json.loads((Path(last_checkpoint(tmp_path)) / "schedule.json").read_text())["seconds"]
    assert 0 < saved <= first.progress.seconds
    time.sleep(0.1)
    again = trainer_in(tmp_path, num_train_epochs=3)
    start = time.monotonic()
    again.train(resume_from_checkpoint=last_checkpoint(tmp_path))
    assert again.state.global_step == 15
    assert saved < again.progress.seconds <= first.progress.seconds + time.monotonic() - start
