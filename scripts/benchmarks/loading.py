"""Compare the time and memory that transformers and this package need to load a transformers checkpoint.

Each measurement runs in a new process. Time and peak memory are measured when `from_pretrained` returns. They
are measured again when every weight has been read once, because memory-mapped files are read on first access. Peak
memory includes imports. A ratio below 1 means that this package is better.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import transformers

from hf_vit import HfViTConfig, HfViTModel
from hf_vit.convert.loading import peak_memory
from hf_vit.model.configuration_hf_vit import PRESETS

from .harness import RoundArguments, describe_run, in_rounds, median_of, median_ratio, print_header, print_row, save


LIBRARIES = {"transformers": transformers.ViTModel, "hf_vit": HfViTModel}
MEASURES = ("load_s", "load_and_read_s", "peak_after_load_mib", "peak_after_read_mib")
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size", "patch_size")


@dataclass(kw_only=True)
class Arguments(RoundArguments):
    """Options of the benchmark."""

    preset: str = field(default="large", metadata={"help": "size of the model", "choices": list(PRESETS)})
    measure: list[str] = field(
        default_factory=list, metadata={"help": "library and folder of a single measurement in this process"}
    )


def measure(library: str, folder: str) -> dict[str, float]:
    """Load the checkpoint in this process; return seconds and peak memory in MiB."""
    start = time.perf_counter()
    model = LIBRARIES[library].from_pretrained(folder)
    load, peak = time.perf_counter() - start, peak_memory()
    sum(float(parameter.detach().sum()) for parameter in model.parameters())
    return dict(zip(MEASURES, (load, time.perf_counter() - start, peak, peak_memory()), strict=True))


def measure_fresh(library: str, folder: str) -> dict[str, float]:
    """Load the checkpoint in a new process; return seconds and peak memory in MiB."""
    script = Path(__file__).parents[1] / "benchmark.py"
    command = [sys.executable, str(script), "loading", "--measure", library, folder]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(finished.stdout)
    print(library, result, flush=True)
    return result


def main(args: Arguments) -> None:
    """Measure time and memory in all rounds and print the medians."""
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    run = describe_run(args, transformers)
    with tempfile.TemporaryDirectory() as folder:
        config = HfViTConfig.from_preset(args.preset).to_dict()
        transformers.ViTModel(transformers.ViTConfig(**{name: config[name] for name in SHAPE})).save_pretrained(folder)
        # The checkpoint has just been written, so it is in the page cache.
        opened = {library: partial(measure_fresh, library, folder) for library in LIBRARIES}
        rounds = list(in_rounds(opened, args.rounds))
    summary = {}
    print_header("measure", *LIBRARIES, "ratio")
    for name in MEASURES:
        values = [{library: found[library][name] for library in LIBRARIES} for found in rounds]
        medians = {library: median_of(values, library) for library in LIBRARIES}
        summary[name] = {**medians, "ratio": median_ratio(values, "hf_vit", to="transformers")}
        print_row(name, *summary[name].values())
    save({**run, **summary}, args.output)
