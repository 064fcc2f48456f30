"""Run an ablation: train variants of a recipe and compare their scores.

python scripts/ablate.py scripts/ablations/cifar10.yaml --dataset_name path/to/cifar10
python scripts/ablate.py scripts/ablations/cifar10.yaml --dataset_name path/to/cifar10 --seeds 0 1 2

The YAML file contains a task of `hf-vit train`, a recipe, the score to compare, and the variants. A variant lists
options that override those of the recipe; the value null removes an option. All variants are compared with the first
variant. Each training run has its own output folder. Finished runs are skipped, so an interrupted ablation can be
started again. The table of results is printed and written to `table.md` in the output folder.
"""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from transformers import HfArgumentParser

from hf_vit.convert.model_card import escape_markdown
from hf_vit.options.recipe import read_recipe


SCRIPTS = Path(__file__).parent
FIELDS = {"task", "recipe", "score", "variants"}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows defaults and keeps line breaks."""


@dataclass
class Arguments:
    """Command-line arguments: data, output folder and seeds."""

    dataset_name: str = field(metadata={"help": "Folder, or name of a dataset on the Hub."})
    output_dir: str | None = field(
        default=None,
        metadata={"help": "Folder for runs and table. By default outputs/ablation/ and the name of the file."},
    )
    seeds: list[int] = field(
        default_factory=lambda: [0], metadata={"help": "Seeds with which every variant is trained."}
    )


def read(file: Path) -> dict[str, Any]:
    """Read a YAML file that contains a mapping; exit with an error message if the file is invalid."""
    try:
        return read_recipe(file)
    except (OSError, ValueError) as error:
        sys.exit(f"{file} cannot be read: {error}")


def read_ablation(file: Path) -> dict[str, Any]:
    """Read an ablation file; exit with an error message if a field is missing or unknown."""
    ablation = read(file)
    if ablation.keys() != FIELDS or not ablation["variants"]:
        sys.exit(f"{file} must have the fields {', '.join(sorted(FIELDS))}. It has {', '.join(map(str, ablation))}.")
    return ablation


def variant_of(ablation: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the options of the variant `name` in an ablation."""
    return {**read(SCRIPTS / "recipes" / ablation["recipe"]), **ablation["variants"][name]}


def train(ablation: dict[str, Any], name: str, seed: int, output_dir: Path, dataset_name: str) -> dict[str, float]:
    """Train a variant with a seed, unless this run is finished; return the score, time and speed of the run."""
    folder = output_dir / re.sub(r"\W+", "-", name.lower()).strip("-") / f"seed-{seed}"
    file = folder / "variant.yaml"
    variant = {**variant_of(ablation, name), "dataset_name": dataset_name}
    if not any(folder.glob("*_scores.json")):
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(variant, sort_keys=False), encoding="utf-8")
        options = ["--output_dir", str(folder), "--seed", str(seed)]
        print(f"{name}, seed {seed}: {folder}", flush=True)
        command = [sys.executable, "-m", "hf_vit", "train", ablation["task"], str(file), *options]
        if subprocess.run(command).returncode:
            sys.exit(f"Training of {name!r} failed. Fix the error and start again; finished runs are skipped.")
    elif changed := changed_since(file, variant):
        sys.exit(f"{folder} has a training run with a different {', '.join(changed)}. Use another --output_dir.")
    return result_of(folder, ablation["score"])


def changed_since(file: Path, variant: dict[str, Any]) -> list[str]:
    """Return the names of the options of a variant that have changed since an earlier run saved them to `file`."""
    then = read(file)
    return sorted(key for key in then.keys() | variant.keys() if then.get(key) != variant.get(key))


def result_of(folder: Path, score: str) -> dict[str, float]:
    """Return the score, seconds, images per second and, if measured, model FLOPs utilization of a training run."""
    (scores,) = (json.loads(file.read_text()) for file in folder.glob("*_scores.json"))
    if score not in scores:
        sys.exit(f"{folder} has no score {score!r}. It has {', '.join(scores)}.")
    ran = json.loads((folder / "train_results.json").read_text())
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    utilization = [entry["mfu"] for entry in history if "mfu" in entry]
    result = {"score": scores[score], "seconds": ran["train_runtime"], "rate": ran["train_samples_per_second"]}
    return {**result, "mfu": mean(utilization)} if utilization else result


def table(score: str, results: dict[str, list[dict[str, float]]]) -> str:
    """Return a Markdown table with a row per variant: mean and range over seeds, and difference from the first."""
    means = {name: mean(run["score"] for run in runs) for name, runs in results.items()}
    first = next(iter(means.values()))
    lines = [f"| variant | {score} | seeds | difference | seconds | images/s | MFU |", "|---|---|---|---|---|---|---|"]
    for name, runs in results.items():
        scores = [run["score"] for run in runs]
        utilization = [run["mfu"] for run in runs if "mfu" in run]
        seeds = f"{len(runs)}: {min(scores):.4f} to {max(scores):.4f}"
        cells = [escape_markdown(name), f"{means[name]:.4f}", seeds, f"{means[name] - first:+.4f}"]
        cells += [f"{mean(run[key] for run in runs):.0f}" for key in ("seconds", "rate")]
        lines.append("| " + " | ".join([*cells, f"{mean(utilization):.3f}" if utilization else ""]) + " |")
    return "\n".join(lines)


def main(file: Path, args: Arguments) -> None:
    """Train all variants with the first seed, then with the next seed, and so on; print the table after each seed."""
    ablation = read_ablation(file)
    output_dir = Path(args.output_dir or Path("outputs", "ablation", file.stem))
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ablation["variants"]}
    for seed in args.seeds:
        for name, runs in results.items():
            runs.append(train(ablation, name, seed, output_dir, args.dataset_name))
        text = table(ablation["score"], results)
        (output_dir / "table.md").write_text(text + "\n", encoding="utf-8")
        print(text, flush=True)


if __name__ == "__main__":
    usage = "%(prog)s FILE --dataset_name DATASET_NAME [--output_dir OUTPUT_DIR] [--seeds SEEDS ...]"
    parser = HfArgumentParser(Arguments, usage=usage, description=__doc__, formatter_class=HelpFormatter)
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        parser.parse_args([*sys.argv[1:], "--dataset_name", ""])  # handles --help
        parser.error("the first argument is the file of the ablation, such as scripts/ablations/cifar10.yaml")
    main(Path(sys.argv[1]), parser.parse_args_into_dataclasses(sys.argv[2:])[0])
