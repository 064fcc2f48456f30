"""Test the command `hf-vit` and the equivalent Python functions: output, errors and results."""

import json
import math
import os
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import transformers
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from packaging.specifiers import SpecifierSet
from PIL import Image
from transformers import TrainingArguments

import hf_vit
from hf_vit import cli
from hf_vit.commands import generate
from hf_vit.options import names
from hf_vit.options.names import unknown_option
from hf_vit.outputs import free_folder, last_folder
from hf_vit.runs import info
from hf_vit.runs.run import command_line, words_of
from hf_vit.tasks import TASKS
from hf_vit.training import HfViTTrainingArguments

from .helpers.datasets import write_class_folders
from .helpers.fresh import ROOT, run_with_package
from .helpers.models import encoder_shape
from .helpers.options import given_arguments, parse_arguments


SHAPE = {**encoder_shape(16, 2, 32), "patch_size": 8}
OPTIONS = {"preset": "tiny", "image_size": 16, "config_overrides": SHAPE, "max_steps": 2, "use_cpu": True}
# Training uses float32, like evaluation.
OPTIONS |= {"per_device_train_batch_size": 4, "report_to": "none", "bf16": False}


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-vit"])


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with photos, which is also the working directory."""
    write_class_folders(tmp_path / "photos", ["cat", "dog"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    cli.main(arguments)
    return capsys.readouterr().out


def listed(page: str) -> set[str]:
    return set(re.findall(r"^  --(\w+)", page, flags=re.MULTILINE))


@pytest.mark.parametrize("task", TASKS)
def test_short_and_long_help(task: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, long = (help_of(capsys, "train", task, "--help", *more) for more in ((), ("all",)))
    assert len(short.splitlines()) < 60
    assert max(map(len, short.splitlines())) <= 80
    data = "tasks" if task == "multi-task" else "dataset_name"
    assert {data, "model_name_or_path", "learning_rate", "output_dir", "dry_run"} <= listed(short)
    kinds = TASKS[task].argument_types()
    assert listed(long) == {option.name for kind in kinds for option in fields(kind) if option.init}
    assert long.count("\n  --") == len(listed(long))
    ours, of_library = long.split("Options of transformers.TrainingArguments")
    assert "--adam_epsilon" in of_library
    assert listed(short) <= listed(ours)
    assert listed(of_library) <= {option.name for option in fields(TrainingArguments)}
    assert "resume: free" not in help_of(capsys, "features", "extract", "--help", "all")
    entries = dict(re.findall(r"^  --(\w+)(.*\n(?: {34}.*\n)*)", long, flags=re.MULTILINE))
    for option in cli.load_page(f"train {task}")["options"].values():
        entry = " ".join(entries[option["name"]].split())
        assert "".join(option["help"].split()) in entry.replace(" ", "")  # a long URL has several lines
        assert f"\n{option['group']}:\n" in long
        assert all(str(choice) in entry for choice in option.get("choices", ()))
        assert all(f"{bound:.10g}" in entry for bound in option.get("range", ())[:2] if math.isfinite(bound))
        assert ("chosen)" in entry or "chosen;" in entry) == option.get("chosen", False)
        assert (f"resume: {option.get('resume')})" in entry) == ("resume" in option)
        if option.get("default") not in (None, "", [], False, -1) and not isinstance(option["default"], list):
            assert f"default: {option['default']}" in entry


def test_commands_and_tasks_are_listed_and_usages_name_them(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([])
    assert {f"    {name} " for name in cli.COMMANDS} <= set(re.findall(r"^    \w+ ", capsys.readouterr().out, re.M))
    assert "\n    zero-shot-image-classification\n" in help_of(capsys, "train")
    for page in cli.table()["pages"].values():
        module, _, name = page["call"].partition(":")
        assert callable(vars(import_module(module))[name])
    assert {name.split()[0] for name in cli.table()["pages"]} == set(cli.COMMANDS)
    pages = ("train image-classification", "features extract", "features evaluate")
    for command in (*cli.COMMANDS, *pages):
        with suppress(SystemExit):
            cli.main([*command.split(), "--help"])
        assert re.search(rf"^[Uu]sage: hf-vit {command} ", capsys.readouterr().out, flags=re.MULTILINE)


def test_usage_errors_are_one_line_and_training_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown_option("zzz", {"seed": "", "bf16": "amp"}) == "Unknown option --zzz."
    with pytest.raises(SystemExit, match=r"^hf-vit: There is no folder or file 'nothing/at/all'.*$"):
        cli.main(["info", "nothing/at/all"])

    def fail(**_: Any) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr("hf_vit.commands.models.train", fail)
    monkeypatch.setattr("hf_vit.runs.info.info", fail)
    with pytest.raises(ValueError, match="a fault"):
        cli.main(["train", "image-text", "photos"])
    with pytest.raises(SystemExit, match="hf-vit: a fault"):
        cli.main(["info"])


def test_help_and_version_of_the_command_need_no_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (source,) = [
        source
        for source, installed in project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items()
        if f"{Path(installed).stem}:main" == project["project"]["scripts"]["hf-vit"]
    ]
    code = (
        "import runpy, sys; main = runpy.run_path(sys.argv[1])['main']; sys.argv = ['hf-vit']; main(); "
        "sys.argv.append('--version'); main(); print(len({'hf_vit', 'torch'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", code, ROOT / source]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{cli.help_page()}\nhf-vit {hf_vit.__version__}\n0\n"


def test_command_line_values_are_converted_to_the_declared_types() -> None:
    words = (
        "--learning_rate 1 --max_steps 3 --bf16 --no_check_images --progressive_sizes 16 32 --use-cpu no --fsdp true"
    )
    words += ' --lr_scheduler_kwargs {"power":2} --fsdp_config file.json --label_names a b'
    values, unknown = cli.read(cli.load_page("train image-classification"), words.split())
    assert not unknown
    assert values == {
        **{"learning_rate": 1.0, "max_steps": 3, "bf16": True, "check_images": False, "progressive_sizes": [16, 32]},
        **{"use_cpu": False, "fsdp": True, "lr_scheduler_kwargs": {"power": 2}, "fsdp_config": "file.json"},
        "label_names": ["a", "b"],
    }
    words = "m a.png b.png --output_dir out --point 3,4.5 --point 1,2"
    values, _ = cli.read(cli.load_page("visualize"), words.split())
    photos, points = [Path("a.png"), Path("b.png")], [(3.0, 4.5), (1.0, 2.0)]
    assert values == {"model": Path("m"), "photos": photos, "output_dir": Path("out"), "point": points}
    # Positional arguments set options. An omitted positional argument does not set its option.
    values = {"model_name_or_path": "m", "dataset_name": "d", "seed": 1}
    assert cli.read(cli.merged(), ["m", "d", "--seed", "1", "x"]) == (values, ["x"])
    _, values = cli.prepare("evaluate", ["m", "d", "--task", "image-text"], None)
    assert values["task"] == "zero-shot-image-classification"
    values, _ = cli.read(cli.load_page("train depth-estimation"), ["r.yaml", "d", "--recipe", "r.yaml"])
    assert values == {"dataset_name": "d", "recipe": "r.yaml"}
    with pytest.raises(ValueError, match=r"Two recipes are given, .*r\.yaml and mnist"):
        cli.read(cli.load_page("train depth-estimation"), ["r.yaml", "--recipe", "mnist"])
    values = {"train": Path("features"), "overwrite": True}
    assert cli.read(cli.load_page("features evaluate"), ["features", "--overwrite"]) == (values, [])
    assert cli.read(cli.load_page("convert"), ["--list"]) == ({"list": True}, [])


def test_the_file_of_options_is_current_and_every_option_is_explained() -> None:
    saved = json.loads(generate.FILE.read_text(encoding="utf-8"))
    assert not [key for key, option in saved["options"].items() if not option.get("help")]
    if saved["versions"] != {"transformers": transformers.__version__}:
        pytest.skip("another release of transformers has other options")
    message = "An option has changed. Write options.json again: python -m hf_vit.commands.generate"
    assert generate.generate() == generate.FILE.read_text(encoding="utf-8"), message


NO_TORCH = """
import contextlib, io, json, os, runpy, sys
main = runpy.run_path(os.environ["START"])["main"]
for command in json.loads(sys.argv[1]):
    sys.argv[:] = ["hf-vit", *command.split()]
    said, code = io.StringIO(), None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
    print(json.dumps([command, said.getvalue(), code, len({"hf_vit", "torch", "transformers"} & {*sys.modules})]))
"""
HELPS = [
    *("train", "train object-detection --help", "train depth-estimation --help all", "features extract --help"),
    *("evaluate --help", "evaluate saved --help", "predict --help", "convert --help all", "info --help"),
]
MISTAKES = {
    "train image-classification photos --epochs 3": "Unknown option --epochs. Did you mean --num_train_epochs?",
    "train image-classification photos --lr=1": "Unknown option --lr. Did you mean --learning_rate?",
    "train image-classification photos --learning-rat 1": "Did you mean --learning_rate",
    "train image-classification photos --batch_size 8": "--per_device_train_batch_size",
    "train object-detection photos --imgsz 8": "Did you mean --image_size?",
    "train zero-shot-image-classification --data photos": "Did you mean --dataset_name?",
    "train depth-estimation photos --weights x": "Did you mean --model_name_or_path?",
    "train image-classification photos --do_train": "do_train is not needed",
    "train image-classification photos --do-eval true": "do_eval is not needed",
    "train image-classification photos --seed 1 more": "Unexpected arguments: 'more'",
    "train image-classification photos --recipe cifar-10": "Unknown recipe 'cifar-10'. Did you mean cifar10",
    "train image-clasification photos": "no task 'image-clasification'. Did you mean image-classification",
    "train image-classification photos --help me": "--help me is not valid. Use --help for the most important options",
    "train image-classification photos --learning_rate -1": "learning_rate=-1.0 must be more than 0",
    "train image-classification photos --auto_augment wild": "invalid choice: 'wild'",
    "train image-classification photos --max_steps many": "invalid int value: 'many'",
    "evaluate saved photos --task x --lr 1": "Unknown option --lr",
    "predict model": "the following arguments are required: inputs",
    "predict model photo.jpg --top_k 0": "top_k=0 must be at least 1",
    "predict model photos --treshold 1": "Unknown option --treshold. Did you mean --threshold",
    "features list": "There is no command hf-vit features list. Choose extract or evaluate",
    "pretrain photos --task juggling": "invalid choice: 'juggling'",
    "trian photos": "There is no command 'trian'. Did you mean train or pretrain?",
}


def test_help_and_one_line_answers_to_mistakes_do_not_import_torch(workplace: Path) -> None:
    (workplace / "saved").mkdir()
    config = {"architectures": ["HfViTForSemanticSegmentation"]}
    (workplace / "saved" / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "START": str(ROOT / "hf_vit" / "start.py")}
    words = [sys.executable, "-c", NO_TORCH, json.dumps([*HELPS, *MISTAKES])]
    done = subprocess.run(words, cwd=workplace, env=environment, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [command for command, *_ in answers] == [*HELPS, *MISTAKES]
    for command, said, code, count in answers:
        assert count == 0, command
        if command in HELPS:
            assert (code in (None, 0), bool(said)) == (True, True), command
        else:
            assert (code.startswith("hf-vit: "), "\n" in code, said) == (True, False, ""), command
            assert MISTAKES[command] in code
        assert command != "evaluate saved --help" or "--eval_scales" in said
        if command == "evaluate --help":  # texts and defaults of a single task would be wrong for all others
            text = re.search(r"--dataset_name TEXT +(.*?)\n  --", said, flags=re.DOTALL)[1]
            assert "Data for the task of the model." in text
            assert "captions" not in text
            assert "Evaluation batch size per process.\n" in said
    assert {place.name for place in workplace.iterdir()} == {"photos", "saved"}


def test_recipes_are_in_the_package_and_equal_by_name_as_file_and_as_mapping() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    installed, checkout = names.FOLDERS
    assert wheel["force-include"][checkout.relative_to(ROOT).as_posix()] == installed.relative_to(ROOT).as_posix()
    files = list((ROOT / "scripts" / "recipes").glob("*.yaml"))
    assert set(names.named_recipes().values()) == set(files)
    assert sum(len(names.recipes_of(task)) for task in TASKS) == len(files)

    file = str(ROOT / "scripts" / "recipes" / "bccd.yaml")
    types, rest = TASKS["object-detection"].argument_types(), ["--dataset_name", "cells", "--seed", "3"]
    by_file = given_arguments(types, [file, *rest])
    assert by_file["seed"] == 3
    assert by_file == given_arguments(types, [*rest, "--recipe", "bccd"])
    assert by_file == given_arguments(types, [{"recipe": file, "dataset_name": "cells", "seed": 3}])
    assert by_file == given_arguments(types, [by_file])
    assert by_file == given_arguments(types, [word for name in by_file for word in words_of(name, by_file[name])])


def test_a_card_names_the_command_that_trains_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TASKS["semantic-segmentation"]
    values = {"seed": 1, "hub_token": "hf_secret", "eval_scales": [1, 2], "bf16": True, "output_dir": Path("out")}
    words = ["--seed", "1", "--eval_scales", "1.0", "2.0", "--bf16", "true", "--output_dir", "out"]
    program = ("train", "semantic-segmentation")
    assert command_line(task, values, program, world_size=1) == ["hf-vit", *program, *words]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    launcher = ["torchrun", "--nnodes", "2", "--nproc_per_node", "2", "-m", "hf_vit"]
    assert command_line(task, values, program, world_size=4) == [*launcher, *program, *words]


def test_the_folder_to_resume_in_is_the_last_one_that_was_given_out(tmp_path: Path) -> None:
    for _ in range(3):
        folder = free_folder(tmp_path / "photos-task")
        assert last_folder(tmp_path / "photos-task") != folder or folder.name == "photos-task"
        folder.mkdir()
        (folder / "recipe.yaml").touch()
        assert last_folder(tmp_path / "photos-task") == folder
    assert folder.name == "photos-task-3"


@pytest.mark.slow
def test_a_dry_run_checks_all_and_writes_nothing(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(workplace.rglob("*"))
    given = {**OPTIONS, "max_steps": 7, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    words = [word for name, value in given.items() for word in words_of(name, value)]
    cli.main(["train", "image-classification", "photos", *words, "--dry_run", "--push_to_hub"])
    said = capsys.readouterr().out
    assert re.search(r"Model: ([\d,]+) parameters\. Output: outputs/photos-image-classification", said)
    assert "Steps: 7 (" in said
    assert "max_steps: 7" in said
    assert "and 3 of its checkpoints" in said
    assert sorted(workplace.rglob("*")) == before
    (workplace / "photos" / "train" / "cat" / "0.png").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"0\.png"):
        cli.main(["train", "image-classification", "photos", *words, "--dry_run"])


@pytest.mark.slow
def test_a_call_trains_like_the_command(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    result = hf_vit.train("image_classification", workplace / "photos", report=said.append, **OPTIONS)
    assert result.output_dir == Path("outputs/photos-image-classification")
    assert set(result.scores) >= {"accuracy", "loss"}
    assert any(line.startswith("Scores: ") for line in said)
    photo = Image.open("photos/test/cat/0.png")
    (answer, _) = result.pipeline(photo, top_k=2)
    assert answer["label"] in ("cat", "dog")
    assert result.pipeline is result.pipeline
    answers = hf_vit.predict(result.output_dir, ["photos/test/cat", Path("photos/test/dog/1.png")])
    files = ["photos/test/cat/0.png", "photos/test/cat/1.png", "photos/test/dog/1.png"]
    assert [Path(line["file"]).as_posix() for line in answers] == files
    assert answers[0]["label"] == answer["label"]
    assert answers[0]["score"] == pytest.approx(answer["score"], abs=1e-5)
    scores = hf_vit.evaluate(result.output_dir, "photos", report=lambda _: None, use_cpu=True, output_dir="scores")
    assert scores == pytest.approx(result.scores, abs=1e-5)
    assert "hf-vit train image-classification --preset tiny" in (result.output_dir / "README.md").read_text()

    types = TASKS["image-classification"].argument_types()
    recipe = given_arguments(types, [str(result.output_dir / "recipe.yaml")])
    assert SHAPE.items() <= recipe.pop("config_overrides").items()
    assert all(recipe.get(name) == OPTIONS[name] for name in OPTIONS if name not in ("config_overrides", "report_to"))
    assert Path(recipe["dataset_name"]).name == "photos"
    assert parse_arguments(types, [recipe])[1].max_steps == 2
    # By default, a second training run gets a new output folder.
    plan: list[str] = []
    hf_vit.train("image-classification", "photos", report=plan.append, dry_run=True, **OPTIONS)
    assert any("Output: outputs/photos-image-classification-2" in line for line in plan)
    assert not Path("outputs/photos-image-classification-2").exists()

    capsys.readouterr()
    cli.main(["info", str(result.output_dir)])
    said = capsys.readouterr().out
    count = sum(weights.numel() for weights in result.model.parameters())
    for part in ("Task: image-classification", f"{count:,} parameters", "16x16 pixels", "Classes: 2: cat, dog"):
        assert part in said
    assert f"accuracy {result.scores['accuracy']:.4g}" in said
    cli.main(["info"])
    assert f"hf-vit {hf_vit.__version__}" in capsys.readouterr().out


def test_info_lists_versions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cli.main(["info"])
    said = capsys.readouterr().out
    for extra in project["optional-dependencies"]:
        assert f"Extra {extra}: " in said
    for name in ("torch", "torchvision", "scikit-learn", "torchcodec", "peft", "onnxruntime", "ruff"):
        assert f" {name} {version(name)}" in said

    constraints = tmp_path / "constraints.txt"
    constraints.write_text("# Tested\ntorch==2.14.1\nJinja2==3.1.6\n")
    monkeypatch.setattr(info, "CONSTRAINTS", (tmp_path / "none.txt", constraints))
    ranges = {"torch": SpecifierSet(">=2.9"), "jinja2": SpecifierSet(">=3.1")}
    text = f"Outside of the tested versions (>=2.9, up to 2.14.1, see {constraints}): torch"
    for found in ("2.14.1", "2.14.9", "2.9.0+cpu", "2.15.0", "2.8.1", "3.0"):
        monkeypatch.setattr(info.metadata, "version", {"torch": found, "jinja2": "3.1.6"}.__getitem__)
        shown = [f"{text} {found}"] if found in ("2.15.0", "2.8.1", "3.0") else []
        assert list(info.untested_versions(ranges)) == shown


def test_a_locale_of_ascii_prints_all_that_a_model_says(tmp_path: Path) -> None:
    names = {"label2id": {"café": 0, "狗": 1}, "id2label": {0: "café", 1: "狗"}}
    config = hf_vit.HfViTConfig(**SHAPE, image_size=16, **names)
    hf_vit.HfViTForImageClassification(config).save_pretrained(tmp_path / "model")
    hf_vit.HfViTImageProcessor.for_model(config).save_pretrained(tmp_path / "model")
    Image.new("RGB", (16, 16)).save(tmp_path / "bär.png")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    code = "import sys; from hf_vit import cli; cli.main(['info', 'model']); cli.main(sys.argv[1:])"
    words = [sys.executable, "-c", code, "predict", "model", "bär.png"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, check=True)
    *told, answer = done.stdout.decode("ascii").splitlines()
    assert r"caf\xe9, \u72d7" in "\n".join(told)
    assert {label["label"] for label in json.loads(answer)["top_k"]} == {"café", "狗"}


def test_invalid_python_calls_raise_exceptions(workplace: Path) -> None:
    for options, message in (
        ({"task": "classify"}, "no task 'classify'"),
        ({"epochs": 3}, r"Unknown option epochs\. Did you mean num_train_epochs\?"),
        ({"do_train": True}, "do_train is not needed"),
        ({"learning_rate": "fast"}, "learning_rate='fast' must be a number"),
        ({"model_name_or_path": "x"}, "model_name_or_path is already set by the arguments model and data"),
        ({"recipe": "mnits"}, r"Unknown recipe 'mnits'\. Did you mean mnist"),
        ({"data": "nowhere/at/all"}, "nowhere/at/all"),
    ):
        call = {"task": "image-classification", "data": "photos", "model": None, "use_cpu": True, **options}
        with pytest.raises((ValueError, OSError), match=message):
            hf_vit.train(**call)
        assert [place.name for place in workplace.iterdir()] == ["photos"]


@pytest.mark.slow
def test_models_open_without_the_training_dependencies(tmp_path: Path) -> None:
    code = """
        import sys, hf_vit
        assert not [name for name in sys.modules if name.startswith(("hf_vit.training", "hf_vit.api"))]
        import hf_vit.inference.predict
        assert callable(hf_vit.predict) and callable(hf_vit.train) and callable(hf_vit.evaluate)
        try:
            hf_vit.trian
        except AttributeError:
            sys.argv = ["hf-vit", "--version"]
            import runpy
            runpy.run_module("hf_vit", run_name="__main__")
    """
    assert run_with_package(code, tmp_path, fresh=True).stdout == f"hf-vit {hf_vit.__version__}\n"


GONE = """
import os, sys
os.chdir("gone")
os.rmdir(os.getcwd())
import cli
for command in cli.COMMANDS:
    try:
        cli.main([command])
    except SystemExit as stopped:
        print(stopped.code)
cli.main(["info"])
"""


def test_a_working_directory_that_is_gone_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    # Like the installed command, Python starts here without importing the package first.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "hf_vit")}
    words = [sys.executable, "-c", GONE]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    message = "hf-vit: The working directory no longer exists. Change to another one: cd ~\n"
    assert (done.returncode, done.stderr, done.stdout) == (1, message, message * len(cli.COMMANDS))


def test_a_launcher_that_starts_one_process_in_place_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = launch_command_parser().parse_args(["--cpu", "--num_processes", "2", "train.py"])
    _, environment = prepare_simple_launcher_cmd_env(_validate_launch_command(args)[0])
    for name in ("ACCELERATE_USE_CPU", "MASTER_ADDR"):
        monkeypatch.setenv(name, environment[name])
    with pytest.raises(ValueError, match=r"MULTI_CPU.*torchrun --nproc_per_node N"):
        HfViTTrainingArguments("out", use_cpu=True)
    monkeypatch.delenv("MASTER_ADDR")
    HfViTTrainingArguments("out", use_cpu=True)
