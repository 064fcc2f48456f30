"""Verify this package on a GPU: numerical accuracy, speed, training quality, distributed training and serving.

Each part runs commands of this project with a time limit and writes their output to the output folder. Parts that have
succeeded are skipped, so an interrupted run can be started again. `report.md` contains all tables and scores.

Examples:
    python scripts/prove_on_gpu.py
    python scripts/prove_on_gpu.py --dataset_name path/to/cifar10 --parts cifar10 mae
    python scripts/prove_on_gpu.py --device cpu --quick --parts kernels distributed
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.harness import make_photos  # This module does not import hf_vit, which may be missing.
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits


ROOT = Path(__file__).resolve().parent.parent
PART_SECONDS = 530  # time limit of a part, chosen to fit into a job of ten minutes
PYTHON = [sys.executable]
SCRIPTS = {name: [*PYTHON, str(ROOT / "scripts" / f"{name}.py")] for name in ("benchmark", "ablate")}
TRAIN = [*PYTHON, "-m", "hf_vit", "train"]
CLASSES = "image-classification"
NOT_RUN = "not run"
REPORTED = ("|", "Scores:", "Averaged weights:", "FAILED", "ERROR", "Equal:")
LOSS_TOLERANCE = 1e-3  # largest relative difference between float32 losses of distributed and plain training
# Environment for deterministic kernels. A resumed run must end with the same weights as an uninterrupted run.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass
class Result:
    """The result of a part; `error` is None if the part succeeded."""

    commands: list[str]
    seconds: float
    error: str | None
    lines: list[str]  # lines of the output that the report shows


@dataclass(frozen=True)
class Part:
    """A part of the verification: a sequence of commands.

    Args:
        title: Heading in the report.
        commands: Commands to run one after another.
        prepare: Function that writes the input of the commands; called before them.
        compare: Function called after the commands. It returns a line for the report or raises `ValueError`.
        needs: Required packages. The part is skipped if one of them is missing.
    """

    title: str
    commands: Sequence[Sequence[str]]
    prepare: Callable[[], None] = lambda: None
    compare: Callable[[], str] | None = None
    needs: tuple[str, ...] = ()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", help="parts to run; by default all whose data is given")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/gpu-proof"), help="folder for outputs and report"
    )
    parser.add_argument("--dataset_name", help="folder of CIFAR-10, for the parts cifar10, mae and regularization")
    for task in ("semantic_segmentation", "depth_estimation", "object_detection"):
        parser.add_argument(
            f"--{task}", help="folder of training data, for a model of this package and one of transformers"
        )
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="time limit; the next call runs the remaining parts"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tests that the commands run"
    )
    parser.add_argument("--quick", action="store_true", help="smallest sizes, to test that the commands run")
    return parser.parse_args(arguments)


def benchmarks(args: argparse.Namespace) -> dict[str, Part]:
    """Return the parts that compare speed with other libraries."""
    quick, rounds = args.quick, ["--rounds", "1" if args.quick else "5"]

    def run(subject: str, *options: str, device: bool = True) -> list[str]:
        return [*SCRIPTS["benchmark"], subject, *rounds, *options, *["--device", args.device] * device]

    sizes = ["--presets", "tiny"] if quick else ["--presets", "base", "large"]
    photos = args.output_dir.resolve() / "pipelines" / "photos"
    files = ["--photos", str(photos), *sizes, *([] if quick else ["--dtype", "bfloat16", "--max_images", "128"])]
    small = (
        ["--image_size", "128", "--num_queries", "20", "--min_seconds", "0.01"]
        if quick
        else ["--batch_size", "16", "--dtype", "bfloat16"]
    )
    clients = (
        ["--preset", "mnist", "--image_size", "28", "--num_requests", "16", "--num_clients", "4"] if quick else []
    )
    short = ["--min_seconds", "0.01"] if quick else []

    def classify(preset: str, patch: str, *batches: str) -> list[str]:
        words = ["--presets", "tiny" if quick else preset, "--patch_size", patch, "--dtypes", "bfloat16", *short]
        return run("classification", *words, "--batch_sizes", *(["2"] if quick else batches))

    return {
        "speed_base": Part("ViT-B/16, eager", [classify("base", "16", "1", "256")]),
        "speed_large": Part("ViT-L/14, eager", [classify("large", "14", "1", "64")]),
        # torch.compile compiles the model separately for each batch size.
        "compiled_base": Part("ViT-B/16, compiled", [[*classify("base", "16", "256"), "--compile"]]),
        "compiled_large": Part("ViT-L/14, compiled", [[*classify("large", "14", "64"), "--compile"]]),
        "dense": Part("Dense heads and detectors", [run("dense", *small), run("detection", *small)]),
        "pipelines": Part("From files to labels", [run("pipelines", *files)], prepare=lambda: write_photos(photos)),
        "serving": Part("Many clients", [run("serving", *clients)]),
    }


def write_photos(folder: Path) -> None:
    """Write 128 synthetic JPEG files of 640 x 427 pixels."""
    folder.mkdir(parents=True)
    for number, photo in enumerate(make_photos((640, 427), count=128)):
        (folder / f"{number}.jpg").write_bytes(photo)


def distributed(args: argparse.Namespace) -> Part:
    """Return the part that compares DDP, FSDP2 and resumed training runs with a plain run, on images of digits."""
    folder = args.output_dir.resolve() / "distributed"
    options = ["--max_steps", "20", "--save_strategy", "steps", "--save_steps", "10", "--eval_strategy", "no"]
    options += ["--logging_steps", "1", "--use_muon", "true", "--ema_decay", "0.9", "--full_determinism", "true"]
    options += [
        "--preset",
        "mnist",
        "--image_size",
        "28",
        "--bf16",
        "false",
        "--learning_rate",
        "0.003",
        "--seed",
        "0",
    ]
    options += ["--dataloader_num_workers", "0", *(["--use_cpu", "true"] if args.device == "cpu" else [])]

    def train(name: str, launcher: Sequence[str], *more: str) -> list[str]:
        words = ["train", CLASSES, str(folder / "digits"), "--output_dir", str(folder / name)]
        return [*launcher, "-m", "hf_vit", *words, *options, *more]

    torchrun = [*PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "1"]
    config = str(ROOT / "scripts" / "accelerate" / "eight_gpus_fsdp.yaml")
    fsdp = [*PYTHON, "-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "1"]
    launchers = {"ddp": torchrun}
    if args.device == "cuda":  # FSDP requires GPUs.
        launchers["fsdp"] = [*fsdp, "--mixed_precision", "no"]
    copy = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2])"
    return Part(
        f"One process with {' and '.join(launchers)}, and resumed",
        [
            train("plain", PYTHON),
            *(train(name, launcher) for name, launcher in launchers.items()),
            [*PYTHON, "-c", copy, str(folder / "plain" / "checkpoint-10"), str(folder / "resumed" / "checkpoint-10")],
            train("resumed", PYTHON, "--resume_from_checkpoint", "last"),
        ],
        prepare=lambda: write_digits(folder / "digits"),
        compare=lambda: compare_training_runs(folder, list(launchers)),
        needs=("datasets",),
    )


def write_digits(folder: Path) -> None:
    """Write the digits of scikit-learn as images, with one folder per class."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype("uint8")).save(place / f"{number}.png")


def losses(folder: Path) -> list[float]:
    """Return the logged losses of a training run."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def compare_training_runs(folder: Path, launched: Sequence[str]) -> str:
    """Return a line for the report if all training runs agree; raise `ValueError` otherwise."""
    expected = losses(folder / "plain")
    if "fsdp" in launched and not any((folder / "fsdp").glob("checkpoint-*/pytorch_model_fsdp*")):
        raise ValueError(f"{folder / 'fsdp'} has no FSDP checkpoint: the Trainer did not use FSDP.")
    for name in launched:
        found = losses(folder / name)
        error = max(abs(one - other) / other for one, other in zip(found, expected, strict=True))
        if not error <= LOSS_TOLERANCE:
            raise ValueError(f"The losses with {name} differ by {error:.1e}: {found} instead of {expected}.")
    for place in (".", "ema"):
        one, other = (load_file(folder / name / place / "model.safetensors") for name in ("plain", "resumed"))
        if different := [name for name, weight in one.items() if not torch.equal(weight, other[name])]:
            raise ValueError(f"Weights of the resumed run differ in {place}: {', '.join(different)}.")
    ways = " and ".join(("plain", *launched))
    return f"Equal: {len(expected)} losses of {ways} within {LOSS_TOLERANCE:g}; resumed weights are identical."


def training_parts(args: argparse.Namespace) -> dict[str, Part]:
    """Return the parts that train on the given data."""
    parts, folder = dict[str, Part](), args.output_dir.resolve()
    needs = ("datasets",)
    few = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--max_train_samples", "64"]
    steps = [*few, "--max_eval_samples", "64"] if args.quick else []
    if args.dataset_name:
        data = ["--dataset_name", args.dataset_name]

        def recipe(part: str, task: str, name: str, *options: str) -> list[str]:
            file, own = (
                ROOT / "scripts" / "recipes" / f"{name}.yaml",
                folder / part / name,
            )  # the folder is deleted before the part runs
            return [*TRAIN, task, str(file), *data, "--output_dir", str(own), *steps, *options]

        encoder = recipe("mae", "masked-image-modeling", "mae-cifar10")
        start = ["--model_name_or_path", str(folder / "mae" / "mae-cifar10")]
        tuned = recipe("mae", CLASSES, "mae-cifar10-finetune", *start)
        parts["cifar10"] = Part("ViT-S/4 on CIFAR-10", [recipe("cifar10", CLASSES, "cifar10-gpu")], needs=needs)
        parts["mae"] = Part("MAE, then labels", [encoder, tuned], needs=needs)
        table = str(ROOT / "scripts" / "ablations" / "cifar10-regularization.yaml")
        # The output folder is outside the folder of the part, which is deleted, so that finished runs can be skipped.
        ablation = [*SCRIPTS["ablate"], table, *data, "--output_dir", str(folder / "ablation")]
        parts["regularization"] = Part("Regularization", [ablation], needs=needs)
    for task in ("semantic_segmentation", "depth_estimation", "object_detection"):
        if data_folder := getattr(args, task):
            own = folder / task
            words = [task.replace("_", "-"), data_folder, "--output_dir", str(own)]
            limit = steps or ["--minutes", "1.9"]  # The peer trains 1.9 minutes for each of 3 rates.
            peer = ["learning", "--task", task, "--training", str(own)]
            commands = [[*TRAIN, *words, *limit], [*SCRIPTS["benchmark"], *peer]]
            parts[task] = Part(
                f"{task.replace('_', ' ').capitalize()} compared with transformers", commands, needs=needs
            )
    return parts


def all_parts(args: argparse.Namespace) -> dict[str, Part]:
    """Return the parts by name, in the order in which they run."""
    # The pytest options of the project are ignored, because they need plugins that may not be installed.
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(ROOT)]
    tests = [*PYTHON, "-m", "pytest", *options, str(ROOT / "tests" / "device")]
    kernels = Part("Kernels compared with float64 on the CPU", [tests], needs=("pytest",))
    return {"kernels": kernels, "distributed": distributed(args), **benchmarks(args), **training_parts(args)}


def run_command(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """Run a command and write its output to a log file; return the exit code, or None after a timeout."""
    places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **DETERMINISTIC, "PYTHONPATH": places}
    with log.open("a") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also kills child processes
            process.wait()
            return None


def run_part(name: str, part: Part, folder: Path, seconds: float) -> Result:
    """Run a part within a time limit. Its output is written to a new, empty folder."""
    start, log, error = time.monotonic(), folder / f"{name}.log", None
    shutil.rmtree(folder / name, ignore_errors=True)
    log.unlink(missing_ok=True)
    missing = [package for package in part.needs if find_spec(package) is None]
    if missing:
        return Result([], 0.0, f"{NOT_RUN}: needs {' and '.join(missing)}", [])
    part.prepare()
    for command in part.commands:
        status = run_command(command, log, start + seconds - time.monotonic())
        if status != 0:
            reason = "exceeded the time limit" if status is None else f"exited with code {status}"
            error = f"{shlex.join(command)} {reason}; see {log}"
            break
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(REPORTED)]
    if error is None and part.compare is not None:
        try:
            lines.append(part.compare())
        except (OSError, ValueError) as fault:
            error = str(fault)
    return Result([shlex.join(command) for command in part.commands], time.monotonic() - start, error, lines)


def write_report(folder: Path, parts: Mapping[str, Part], hardware: str) -> None:
    """Write the report with the results of all parts."""
    text = ["# Proof on a GPU", "", hardware]
    for name, part in parts.items():
        text += ["", f"## {part.title} (`{name}`)", ""]
        file = folder / f"{name}.json"
        if not file.exists():
            text.append("Not run.")
            continue
        result: dict[str, Any] = json.loads(file.read_text())
        text += [*result["lines"], "", result["error"] or f"Succeeded after {result['seconds']:.0f} s."]
    (folder / "report.md").write_text("\n".join(text) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the remaining parts and write the report; exit with code 1 if a part fails."""
    args = parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("prove_on_gpu.py: No GPU was found. --device cpu --quick tests that all commands run.")
    parts = all_parts(args)
    if unknown := sorted(set(args.parts or ()) - set(parts)):
        named = f"{', '.join(unknown)}. Choose from {', '.join(parts)}"
        sys.exit(f"prove_on_gpu.py: These parts are unknown or need data: {named}.")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    hardware = f"{device}; torch {torch.__version__}, transformers {transformers.__version__}"
    end, failed = time.monotonic() + 60 * args.minutes, []
    for name in args.parts or parts:
        file, left = args.output_dir / f"{name}.json", end - time.monotonic()
        if file.exists() and json.loads(file.read_text())["error"] is None:
            print(f"{name}: skipped, has succeeded before", flush=True)
            continue
        if left < 1:
            print(f"{name}: not run, {args.minutes:g} minutes have passed; call again to run it", flush=True)
            continue
        result = run_part(name, parts[name], args.output_dir, min(PART_SECONDS, left))
        file.write_text(json.dumps(asdict(result), indent=1) + "\n")
        print(f"{name}: {result.error or 'succeeded'} ({result.seconds:.0f} s)", flush=True)
        failed += [name] * (result.error is not None and not result.error.startswith(NOT_RUN))
    write_report(args.output_dir, parts, hardware)
    print(f"Report: {args.output_dir / 'report.md'}", flush=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
