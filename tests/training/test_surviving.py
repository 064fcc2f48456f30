"""Signals, full disks and non-finite numbers: the run ends safely without losing checkpoints."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_vit.training import HfViTTrainer, ImageClassification, NotFiniteError, Preempted, last_checkpoint
from hf_vit.training.errors import CheckpointError

from ..helpers import distributed
from ..helpers.datasets import truncate, write_class_folders, write_pictures
from ..helpers.options import run
from ..helpers.references import assert_identical
from ..helpers.trainings import SAVE_STEPS, STOP_STEP, digits_trainer, logged, resumable_trainer


Runs = tuple[Path, list[dict[str, Any]]]  # folder of the training runs, and results of each process
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 16}


class AtStep(TrainerCallback):
    """Callback that runs an action in a given step. Steps are counted from 1."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            self.act()


def send(number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to this process and its worker processes, as a cluster does to stop a job."""
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
    assert time.monotonic() - began < 4  # hanging worker processes would be terminated only after 5 seconds


def test_a_signal_in_the_last_step_leaves_its_checkpoint_and_nothing_to_train(tmp_path: Path) -> None:
    # A higher loss counts as better, so that the first evaluation is the best.
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
    """Return the folder and results of runs in two processes. Each run stops in a different way."""
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
    # The launcher was told to stop while the long training ran.
    checkpoint = last_checkpoint(folder / "long")
    assert checkpoint is not None
    # Only one of the two processes prints this message.
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
    # The batch of step 5 is already loaded when step 4 begins.
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
    """Limit the size of files, to simulate a full disk."""
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
                truncate(Path(output_dir) / "scheduler.pt")  # no other error would reveal this damage
                if error is KeyboardInterrupt:
                    raise error
            super()._save_rng_state(output_dir)

    trainer = digits_trainer(tmp_path, Interrupted, save_total_limit=1, **EVERY_STEP)
    with pytest.raises(error, match=message):
        trainer.train()
    assert (tmp_path / "checkpoint-2").is_dir() == (error is KeyboardInterrupt)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


def test_older_checkpoints_go_by_their_step_once_the_next_one_has_its_checksums(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def checkpoints() -> set[str]:
        return {folder.name.removeprefix("checkpoint-") for folder in tmp_path.glob("checkpoint-*")}

    class ClockThatJumps(HfViTTrainer):
        def _seal(self, checkpoint: Path) -> None:
            seen.append(checkpoints())
            super()._seal(checkpoint)
            os.utime(checkpoint, (10**9 - 1000 * self.state.global_step,) * 2)

    # A damaged checkpoint of a later step must not be removed.
    (tmp_path / "checkpoint-9").mkdir()
    digits_trainer(tmp_path, ClockThatJumps, save_total_limit=2, max_steps=4, **EVERY_STEP).train()
    assert (seen[3], checkpoints()) == ({"2", "3", "4", "9"}, {"3", "4", "9"})
    arguments = json.loads((tmp_path / "checkpoint-4" / "training_args.json").read_text())
    assert arguments["save_total_limit"] == 2


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "accuracy"}


def test_the_best_model_is_that_of_a_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # With a learning rate of 0, no step is better than the first.
    options = {**EVERY_STEP, **BEST, "learning_rate": 0.0, "save_total_limit": 2}
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
    """Return eight images of two classes: two steps per epoch."""
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "photos", "validation/cat/0.png", "validation/dog/0.png", seed=100)
    return write_class_folders(tmp_path / "photos", ["cat", "dog"])


def run_until(step: int, act: Callable[[], None], *options: str) -> Any:
    """Run the command, and an action at a given step of its training; return the exit code or message."""

    class TaskWithAction(ImageClassification):
        def make_trainer(self) -> HfViTTrainer:
            trainer = super().make_trainer()
            trainer.add_callback(AtStep(step, act))
            return trainer

    with pytest.raises(SystemExit) as stopped:
        run(TaskWithAction, [*SCRIPT, *options], None, lambda line: None)
    return stopped.value.code


@pytest.mark.usefixtures("photos")
def test_a_script_exits_at_a_signal_without_a_report_and_goes_on() -> None:
    said: list[str] = []
    assert run_until(3, send) == 143
    assert not {"README.md", "model.safetensors"} & {path.name for path in Path("output").iterdir()}
    run(ImageClassification, [*SCRIPT, "--resume_from_checkpoint", "last"], None, said.append)
    assert Path("output/README.md").is_file()
    assert Path("output/checkpoint-8").is_dir()
    assert said[-1] == "The model, its scores and its card: output"


@pytest.mark.parametrize(("split", "workers", "checkpoint"), [("train", 0, 6), ("validation", 1, 4)])
def test_a_script_names_a_lost_image(split: str, workers: int, checkpoint: int, photos: Path) -> None:
    files = sorted(photos.glob(f"{split}/*/*.png"))
    # When step 5 begins, the training images of epoch 3 are already loaded.
    message = run_until(5, lambda: [*map(truncate, files)], "--dataloader_num_workers", str(workers))
    assert "\n" not in message
    assert sum(f"{file} cannot be decoded: " in message for file in files) == 1
    assert "truncated. " in message
    assert f"The last complete checkpoint is output/checkpoint-{checkpoint}. Resume" in message
