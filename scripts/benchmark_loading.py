"""Opens a checkpoint of transformers with transformers and with ours, in fresh processes by turns.

Two moments count: when `from_pretrained` returns, and when every weight has been read once, as the pages of the files
wait for that. Prints the medians of time and peak memory (imports included) and their ratio; below 1 ours is better.

Example:
    python scripts/benchmark_loading.py --preset large --rounds 7
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import ViTConfig, ViTModel

from hf_vit import HfViTConfig, HfViTModel, convert
from hf_vit.model.configuration_hf_vit import PRESETS


LIBRARIES = {"transformers": ViTModel, "hf_vit": HfViTModel}
MEASURES = ("load_s", "load_and_read_s", "peak_after_load_mib", "peak_after_read_mib")


def measure(library: str, folder: str) -> dict[str, float]:
    """Opens the checkpoint in this process."""
    start = time.perf_counter()
    model = LIBRARIES[library].from_pretrained(folder)
    load, peak = time.perf_counter() - start, convert.peak_memory()
    sum(float(parameter.detach().sum()) for parameter in model.parameters())
    return dict(zip(MEASURES, (load, time.perf_counter() - start, peak, convert.peak_memory()), strict=True))


def measure_fresh(library: str, folder: str) -> dict[str, float]:
    """Opens the checkpoint in a process of its own."""
    command = [sys.executable, __file__, "--measure", library, folder]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(finished.stdout)
    return result


def save_checkpoint(preset: str, folder: str) -> None:
    """Saves a ViT of transformers with fresh weights."""
    config = HfViTConfig.from_preset(preset)
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "image_size",
        "patch_size",
    )
    ViTModel(ViTConfig(**{name: config.to_dict()[name] for name in names})).save_pretrained(folder)


def main() -> None:
    """Measures by turns and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="large")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="JSON file for the medians")
    parser.add_argument("--measure", nargs=2, metavar=("LIBRARY", "FOLDER"), help="one measurement in this process")
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(*args.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(args.preset, folder)
        results: dict[str, list[dict[str, float]]] = {library: [] for library in LIBRARIES}
        for round_number in range(args.rounds):  # the file is in the system's cache, as it has just been written
            for library in LIBRARIES if round_number % 2 else reversed(LIBRARIES):
                results[library].append(measure_fresh(library, folder))
                print(library, results[library][-1], flush=True)
    print(f"ViT {args.preset}, torch {torch.__version__}, median of {args.rounds} rounds; ratio: median of the rounds")
    summary = {name: summarize(name, results) for name in MEASURES}
    for name, row in summary.items():
        print(f"{name:<20} " + "  ".join(f"{column} {value:.2f}" for column, value in row.items()))
    if args.output is not None:
        args.output.write_text(json.dumps(summary, indent=2) + "\n")


def summarize(name: str, results: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Returns the median of each library and the median ratio of ours to theirs."""
    values = {library: [result[name] for result in results[library]] for library in LIBRARIES}
    ratios = [ours / theirs for ours, theirs in zip(values["hf_vit"], values["transformers"], strict=True)]
    return {library: statistics.median(values[library]) for library in LIBRARIES} | {
        "ratio": statistics.median(ratios)
    }


if __name__ == "__main__":
    main()
