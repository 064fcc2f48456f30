"""Test the ablation script, which trains each variant of a recipe and writes a table of the scores."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from hf_vit.tasks import TASKS
from hf_vit.training import HfViTTrainingArguments

from ..helpers.datasets import write_class_folders
from ..helpers.fresh import ROOT, run_python
from ..helpers.options import parse_arguments
from .test_demo import load_script


ABLATIONS = sorted((ROOT / "scripts" / "ablations").glob("*.yaml"))
HEADER = re.compile(
    r"# Command: python scripts/ablate\.py scripts/ablations/(?P<name>\S+)\.yaml --dataset_name path/to/\S+\n"
    r"# Hardware: .+\n# Result: (?P<result>.+)\n"
)
RECIPE = {
    **{"preset": "mnist", "image_size": 28, "max_steps": 1, "per_device_train_batch_size": 2, "ema_decay": 0.5},
    **{"train_val_split": 0.0, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
}


def write_ablation(folder: Path, **changes: object) -> Path:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    content = {"task": "image-classification", "recipe": str(folder / "recipe.yaml"), "score": "accuracy"}
    content["variants"] = {"the recipe": {}, "no averages, two steps": {"ema_decay": None, "max_steps": 2}}
    (folder / "ablation.yaml").write_text(yaml.safe_dump({**content, **changes}, sort_keys=False))
    return folder / "ablation.yaml"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the ablation script. In tests, each training run is a fork of this process, to avoid repeated imports."""
    loaded = load_script("ablate")

    def start(command: list[str]) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        finished = run_python(*command[1:], workdir=tmp_path, PYTHONPATH=str(ROOT))
        sys.stderr.write(finished.stderr)
        return finished

    monkeypatch.setattr(loaded.subprocess, "run", start)
    return loaded


def test_variants_are_compared(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, photos = write_ablation(tmp_path), write_class_folders(tmp_path / "photos", ["cats", "dogs"])
    args = script.Arguments(dataset_name=str(photos), output_dir=str(tmp_path / "out"))
    script.main(file, args)
    assert "no averages, two steps, seed 0" in capsys.readouterr().out
    whole, changed = (tmp_path / "out" / name / "seed-0" for name in ("the-recipe", "no-averages-two-steps"))
    assert (whole / "ema").is_dir()
    assert not (changed / "ema").exists()
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (whole, changed)]
    assert [state["global_step"] for state in states] == [1, 2]
    scores = [json.loads((folder / "test_scores.json").read_text())["accuracy"] for folder in (whole, changed)]

    script.main(file, args)
    table = (tmp_path / "out" / "table.md").read_text()
    assert capsys.readouterr().out == table
    _, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    names = ("the recipe", "no averages, two steps")
    assert [row[:2] for row in rows] == [[name, f"{score:.4f}"] for name, score in zip(names, scores, strict=True)]
    assert [row[3] for row in rows] == ["+0.0000", f"{scores[1] - scores[0]:+.4f}"]

    changed_file = write_ablation(tmp_path, variants={"the recipe": {"max_steps": 3, "ema_decay": None}})
    with pytest.raises(SystemExit, match=r"the-recipe.seed-0 has a training run with a different ema_decay, max_st"):
        script.main(changed_file, args)
    with pytest.raises(SystemExit, match=r"a different dataset_name\. Use another --output_dir"):
        script.main(write_ablation(tmp_path), script.Arguments(dataset_name="others", output_dir=args.output_dir))


def test_a_training_that_fails_is_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_ablation(tmp_path, task="nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"'the recipe' failed.*finished runs are skipped"):
        script.main(file, script.Arguments(dataset_name="photos"))
    assert "There is no task 'nowhere'" in capsys.readouterr().err
    # The path of the output folder contains the name of the ablation file.
    assert Path("outputs/ablation/ablation/the-recipe/seed-0/variant.yaml").is_file()


def test_tables_have_means_and_ranges_of_seeds_or_are_refused(script: ModuleType, tmp_path: Path) -> None:
    runs = [{"score": score, "seconds": 10.0, "rate": 128.0} for score in (0.5, 0.75)]
    worse = {"score": 0.25, "seconds": 12.4, "rate": 100.0}
    *_, first, second = script.table("accuracy", {"all": runs, "less": [{**worse, "mfu": 0.4}]}).split("\n")
    assert first == "| all | 0.6250 | 2: 0.5000 to 0.7500 | +0.0000 | 10 | 128 |  |"
    assert second == "| less | 0.2500 | 1: 0.2500 to 0.2500 | -0.3750 | 12 | 100 | 0.400 |"
    for changes, message in (
        ({"variants": {}}, "must have the fields recipe, score, task, variants"),
        ({"seeds": [0]}, "must have the fields recipe, score, task, variants. It has .*seeds"),
        ({"recipe": "nowhere.yaml"}, r"nowhere\.yaml cannot be read"),
    ):
        file = write_ablation(tmp_path, **changes)
        with pytest.raises(SystemExit, match=message):
            script.main(file, script.Arguments(dataset_name="photos", output_dir=str(tmp_path / "out")))


@pytest.mark.parametrize("file", ABLATIONS, ids=lambda file: file.stem)
def test_variants_of_all_ablation_files_are_valid(script: ModuleType, file: Path, tmp_path: Path) -> None:
    (header,) = HEADER.finditer(file.read_text())
    assert header["name"] == file.stem
    assert header["result"].startswith("not run: needs ") or (ROOT / header["result"]).is_file()
    ablation = script.read_ablation(file)
    for variant in ablation["variants"]:
        (tmp_path / "variant.yaml").write_text(yaml.safe_dump(script.variant_of(ablation, variant)))
        command = [str(tmp_path / "variant.yaml"), "--dataset_name", "photos", "--output_dir", str(tmp_path)]
        parts = parse_arguments(TASKS[ablation["task"]].argument_types(), command)
        assert [part.seed for part in parts if isinstance(part, HfViTTrainingArguments)] == [0]
