"""Trains a recipe and variants of it that differ in one thing, and measures what each difference is worth.

python scripts/ablate.py scripts/ablations/cifar10.yaml --dataset_name path/to/cifar10
python scripts/ablate.py scripts/ablations/cifar10.yaml --dataset_name path/to/cifar10 --seeds 0 1 2

The file names a training script, a recipe, the score to compare and the variants: arguments that take the place of the
recipe's, null for those left out. The first variant is the one that others are compared with. Each training is one of
the script's, in a folder of its own; those that have ended are not run again, so that a killed run resumes.
The table, in Markdown, is printed and written beside them.
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
FIELDS = {"script", "recipe", "score", "variants"}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as it is written."""


@dataclass
class Arguments:
    """Where the data are, and how often to train."""

    dataset_name: str = field(metadata={"help": "Folder, or name on the Hub, as the training script takes it."})
    output_dir: str | None = field(
        default=None,
        metadata={"help": "Where all trainings and the table go; by default outputs/ablation/ and the file's name."},
    )
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Train every variant with each of them."})


def read(file: Path) -> dict[str, Any]:
    """Reads a mapping; exits with what is wrong with the file."""
    try:
        return read_recipe(file)
    except (OSError, ValueError) as error:
        sys.exit(f"{file} can't be read: {error}")


def read_ablation(file: Path) -> dict[str, Any]:
    """Reads what to compare, and checks that all of it is there."""
    ablation = read(file)
    if ablation.keys() != FIELDS or not ablation["variants"]:
        sys.exit(f"{file} must hold {', '.join(sorted(FIELDS))}, and holds {', '.join(map(str, ablation))}.")
    return ablation


def variant_of(ablation: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the recipe of a variant."""
    return {**read(SCRIPTS / "recipes" / ablation["recipe"]), **ablation["variants"][name]}


def train(ablation: dict[str, Any], name: str, seed: int, output_dir: Path, dataset_name: str) -> dict[str, float]:
    """Trains a variant with a seed, unless that has been done, and returns what it came to."""
    folder = output_dir / re.sub(r"\W+", "-", name.lower()).strip("-") / f"seed-{seed}"
    file = folder / "variant.yaml"
    variant = {**variant_of(ablation, name), "dataset_name": dataset_name}
    if not any(folder.glob("*_scores.json")):
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(variant, sort_keys=False), encoding="utf-8")
        options = ["--output_dir", str(folder), "--seed", str(seed)]
        print(f"{name}, seed {seed}: {folder}", flush=True)
        command = [sys.executable, str(SCRIPTS / ablation["script"]), str(file), *options]
        if subprocess.run(command).returncode:
            sys.exit(f"The training of {name!r} failed. Mend it and start again: those that have ended stay.")
    elif changed := changed_since(file, variant):
        sys.exit(f"{folder} holds a training with another {', '.join(changed)}. Choose another --output_dir.")
    return result_of(folder, ablation["score"])


def changed_since(file: Path, variant: dict[str, Any]) -> list[str]:
    """Returns the names of the arguments by which a variant differs from that in a file."""
    then = read(file)
    return sorted(key for key in then.keys() | variant.keys() if then.get(key) != variant.get(key))


def result_of(folder: Path, score: str) -> dict[str, float]:
    """Returns the score of a training, its seconds, and how fast it was."""
    (scores,) = (json.loads(file.read_text()) for file in folder.glob("*_scores.json"))
    if score not in scores:
        sys.exit(f"{folder} has no score {score!r}: it has {', '.join(scores)}.")
    ran = json.loads((folder / "train_results.json").read_text())
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    utilization = [entry["mfu"] for entry in history if "mfu" in entry]
    result = {"score": scores[score], "seconds": ran["train_runtime"], "rate": ran["train_samples_per_second"]}
    return {**result, "mfu": mean(utilization)} if utilization else result


def table(score: str, results: dict[str, list[dict[str, float]]]) -> str:
    """Returns a line for each variant: the mean over seeds, their range, the difference to the first variant."""
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
    """Trains all variants, seed by seed, so that a table of all of them is there early."""
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
        parser.parse_args([*sys.argv[1:], "--dataset_name", ""])  # for --help
        parser.error("the first argument is the file that names what to compare: scripts/ablations/cifar10.yaml")
    main(Path(sys.argv[1]), parser.parse_args_into_dataclasses(sys.argv[2:])[0])
