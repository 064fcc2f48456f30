"""Training logs its throughput and peak memory and shows them in the progress bar."""

import time
from pathlib import Path

import pytest
from transformers import EvalPrediction

from hf_vit.flops import forward_flops, peak_flops
from hf_vit.training import last_checkpoint
from hf_vit.training.callbacks.throughput import Throughput, training_flops

from ..helpers.trainings import digits_trainer, logged


STEPS = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 8}


def test_a_log_has_speed_and_memory_beside_the_loss(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, gradient_accumulation_steps=2, **STEPS)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [2, 4]
    for entry in entries:
        # Two steps of two batches of 8 images take less than the total time.
        assert entry["images_per_second"] > 32 / seconds
        assert 50 < entry["peak_memory_mib"] < 100_000
        assert "grad_norm" in entry
        assert "mfu" not in entry  # no MFU on a CPU


def test_evaluations_do_not_count_as_training(tmp_path: Path) -> None:
    seconds = 1.0

    def slow_metrics(prediction: EvalPrediction) -> dict[str, float]:
        time.sleep(seconds)
        return {"accuracy": 1.0}

    trainer = digits_trainer(tmp_path, eval_strategy="steps", eval_steps=1, **STEPS)
    trainer.compute_metrics = slow_metrics
    began = time.perf_counter()
    trainer.train()
    in_training = sum(16 / speed for speed in logged(trainer, "images_per_second"))
    assert in_training < time.perf_counter() - began - 4 * seconds


def test_pauses_do_not_count() -> None:
    throughput = Throughput()
    throughput.count(3, 5)
    with throughput.paused():
        time.sleep(0.3)
    throughput.count(4, 6)
    *work, seconds = throughput.take()
    assert work == [7, 11]
    assert 0 < seconds < 0.3
    throughput.count(1, 1)
    time.sleep(0.01)
    *work, seconds = throughput.take()
    assert work == [1, 1]
    assert 0.01 <= seconds < 10


def test_the_bar_shows_what_is_logged_and_starts_where_a_training_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**STEPS, "disable_tqdm": False, "save_strategy": "steps", "save_steps": 2}
    digits_trainer(tmp_path, **{**options, "max_steps": 2}).train()
    capsys.readouterr()
    trainer = digits_trainer(tmp_path, **options)
    trainer.train(resume_from_checkpoint=last_checkpoint(tmp_path))
    bar = capsys.readouterr().err
    speed, memory = logged(trainer, "images_per_second")[-1], logged(trainer, "peak_memory_mib")[-1]
    assert "1/4 [" not in bar
    assert "2/4 [" in bar
    last = bar.splitlines()[-1]
    assert f"img/s={speed:.4g}, " in last
    assert f"memory={memory} MiB" in last
    assert "step/s" in bar or "s/step" in bar


def test_the_work_of_a_classifier_is_three_times_its_forward_pass_if_all_of_it_is_trained(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, **STEPS)
    assert training_flops(trainer.plain_model, 32, 32) == 3 * forward_flops(trainer.model.config, 32, 32)
    trainer.model.classifier.requires_grad_(False)
    assert training_flops(trainer.plain_model, 32, 64) == 0


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("Tesla T4", None),
    ],
)
def test_peaks_of_devices_are_known_or_left_out(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)
