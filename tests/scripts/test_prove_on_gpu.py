"""Test the script of GPU checks: commands, timeouts, skipping of finished parts, and comparison of results."""

import json
import subprocess
import sys
from pathlib import Path

import prove_on_gpu
import pytest
import torch
from prove_on_gpu import Part, compare_training_runs, run_part
from safetensors.torch import save_file


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_part_reports_its_tables_errors_and_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carried.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # commands must inherit this import path
    table = python("import carried; print('| a | 1 |'); print('else'); print('Scores: accuracy 1')")
    part = Part("Table", [table, python("raise SystemExit(3)"), python("print('| never |')")])
    result = run_part("table", part, tmp_path, seconds=60)
    assert result.lines == ["| a | 1 |", "Scores: accuracy 1"]
    assert result.error is not None
    assert "exited with code 3" in result.error
    assert run_part("table", Part("Table", [table]), tmp_path, seconds=60).error is None

    sleeper = "import time, pathlib; time.sleep(4); pathlib.Path('late').write_text('')"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeper!r}])"
    result = run_part("slow", Part("Slow", [python(nested)]), tmp_path, seconds=1.5)
    assert result.error is not None
    assert "time limit" in result.error
    assert result.seconds < 3.5


def test_a_part_without_its_packages_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("Bare", [python("")], needs=("torch", "no_such_package"))
    assert run_part("bare", part, tmp_path, seconds=60).error == "not run: needs no_such_package"
    monkeypatch.setattr(prove_on_gpu, "all_parts", lambda args: {"bare": part})
    prove_on_gpu.main(["--device", "cpu", "--output_dir", str(tmp_path / "proof")])
    assert "not run: needs no_such_package" in (tmp_path / "proof" / "report.md").read_text()


def test_benchmarks_do_not_import_data_evaluation_and_training() -> None:
    subjects = ("classification", "dense", "detection", "pipelines", "serving")
    code = "; ".join(["import sys", *(f"import benchmarks.{subject}" for subject in subjects)])
    code += "; sys.exit(str({'hf_vit.data', 'hf_vit.evaluation', 'hf_vit.training'} & set(sys.modules) or '') or 0)"
    scripts = str(prove_on_gpu.ROOT / "scripts")
    result = subprocess.run([sys.executable, "-c", code], cwd=scripts, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0, result.stderr


def write_training(folder: Path, values: list[float], weight: float) -> None:
    for place in (folder, folder / "ema"):
        place.mkdir(parents=True)
        save_file({"weight": torch.tensor([weight])}, place / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"loss": value} for value in values]}))


def test_trainings_are_compared_by_losses_and_weights(tmp_path: Path) -> None:
    for name, values, weight in (("plain", [2.0, 1.0], 1.0), ("ddp", [2.0, 1.0005], 1.0), ("resumed", [1.0], 1.0)):
        write_training(tmp_path / name, values, weight)
    write_training(tmp_path / "fsdp", [2.0, 1.01], 1.0)
    with pytest.raises(ValueError, match="no FSDP checkpoint"):
        compare_training_runs(tmp_path, ["ddp", "fsdp"])
    (tmp_path / "fsdp" / "checkpoint-10").mkdir()
    (tmp_path / "fsdp" / "checkpoint-10" / "pytorch_model_fsdp.bin").touch()
    with pytest.raises(ValueError, match=r"losses with fsdp differ by 1\.0e-02"):
        compare_training_runs(tmp_path, ["ddp", "fsdp"])
    (tmp_path / "fsdp" / "trainer_state.json").write_text((tmp_path / "ddp" / "trainer_state.json").read_text())
    assert compare_training_runs(tmp_path, ["ddp", "fsdp"]).startswith("Equal: 2 losses of plain and ddp and fsdp")
    assert "fsdp" not in compare_training_runs(tmp_path, ["ddp"])
    save_file({"weight": torch.tensor([1.0 + 1e-6])}, tmp_path / "resumed" / "ema" / "model.safetensors")
    with pytest.raises(ValueError, match="Weights of the resumed run differ in ema: weight"):
        compare_training_runs(tmp_path, ["ddp"])


@pytest.mark.slow
def test_interrupted_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--quick", "--parts", "serving", "--output_dir", str(tmp_path / "proof")]
    prove_on_gpu.main([*words, "--minutes", "0"])
    assert "serving: not run" in capsys.readouterr().out
    prove_on_gpu.main(words)
    assert "serving: succeeded" in capsys.readouterr().out
    prove_on_gpu.main(words)
    assert "serving: skipped" in capsys.readouterr().out
    report = (tmp_path / "proof" / "report.md").read_text()
    assert "| ours, dynamic batches |" in report
    assert "## ViT-B/16, eager (`speed_base`)\n\nNot run." in report


def test_parts_have_the_given_folders_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--dataset_name", "cifar", "--depth_estimation", "rooms", "--output_dir", str(tmp_path)]
    parts = prove_on_gpu.all_parts(prove_on_gpu.parse(words))
    assert {"kernels", "speed_base", "cifar10", "mae", "regularization", "depth_estimation"} <= set(parts)
    assert "object_detection" not in parts
    # The training output is inside the folder of the part, which is deleted before the part runs again.
    for name in ("cifar10", "mae"):
        folders = [command[command.index("--output_dir") + 1] for command in parts[name].commands]
        assert all(Path(folder).parent == tmp_path / name for folder in folders)
    assert parts["depth_estimation"].commands[0][3:6] == ["train", "depth-estimation", "rooms"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="unknown or need data: cifar10"):
        prove_on_gpu.main(["--device", "cpu", "--parts", "cifar10"])
    with pytest.raises(SystemExit, match="No GPU"):
        prove_on_gpu.main([])
