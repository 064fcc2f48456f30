"""Fault injection: test that interrupted training runs end with the weights of an uninterrupted run.

Each case trains a tiny model of a task on synthetic images. The first run is undisturbed. The second run is killed
(SIGKILL) at random times, also while it saves a checkpoint, and resumed with the same command. The first case has
further runs. One simulates a full disk while a checkpoint is saved, by a limit on the file size (RLIMIT_FSIZE). Other
runs flip or zero bytes in every file of the newest checkpoint. The final weights of all runs must equal those of the
undisturbed run byte by byte. The script prints a Markdown table and exits with code 1 if weights differ or a
checkpoint is lost. It runs on Linux and macOS.

Examples:
    python scripts/fault_injection.py
    python scripts/fault_injection.py --subset classification deformable_detection --kills 3 --minutes 5
"""

import argparse
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from hf_vit import cli, training


FORK = multiprocessing.get_context("fork")  # forked processes do not import the libraries again
POLL = 0.005  # seconds between checks of the output folder
LONGEST = 600  # time limit of a training run in seconds
COLORS = {"cat": (220, 60, 40), "dog": (40, 60, 220)}
MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 8,
    "segmentation_config": {"hidden_size": 16},
    "universal_segmentation_config": {"num_queries": 4, "num_blocks": 1, "num_upscale_blocks": 1},
    "depth_config": {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "head_hidden_size": 8},
    "keypoint_config": {"hidden_size": 16},
    "text_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
}
QUERIES = {"decoder": "queries", "num_queries": 8, "num_layers": 0}
DEFORMABLE = {"decoder": "deformable", "num_queries": 8, "num_layers": 1, "num_points": 2, "num_groups": 2}


@dataclass(frozen=True)
class Case:
    """A kind of training run into which faults are injected.

    Args:
        task: Task of `hf-vit train`, with underscores instead of hyphens.
        data: Folder of the synthetic data: "photos", "scenes", "objects" or "captions".
        options: Additional command line options.
        detection: `detection_config` of the model.
        processes: Number of processes.
    """

    task: str
    data: str
    options: tuple[str, ...] = ()
    detection: dict[str, object] = field(default_factory=lambda: QUERIES)
    processes: int = 1

    def command(self, place: Path, output: Path, steps: int) -> list[str]:
        """Return the command line arguments. If the run has been started before, they resume it."""
        model = (
            MODEL
            if self.task == "zero_shot_image_classification"
            else {k: v for k, v in MODEL.items() if k != "text_config"}
        )
        arguments = [
            "--choose_defaults",
            "false",
            "--preset",
            "tiny",
            "--image_size",
            "32",
            "--use_cpu",
            "true",
            "--disable_tqdm",
            "true",
        ]
        arguments += ["--config_overrides", json.dumps({**model, "detection_config": self.detection})]
        arguments += ["--dataset_name", str(place / self.data), "--output_dir", str(output), "--max_steps", str(steps)]
        arguments += ["--save_strategy", "steps", "--save_steps", "4", "--save_total_limit", "3"]
        arguments += ["--report_to", "none", "--eval_strategy", "no"]
        if (output / "recipe.yaml").is_file():  # This file exists once a run has started.
            arguments += ["--resume_from_checkpoint", "last"]
        arguments += ["--per_device_train_batch_size", str(8 // self.processes)]
        return [*arguments, "--per_device_eval_batch_size", "4", *self.options]


CASES = {
    "classification": Case("image_classification", "photos"),
    "streaming": Case("image_classification", "photos", ("--streaming", "true", "--shuffle_buffer_size", "16")),
    "ema_muon": Case("image_classification", "photos", ("--ema_decay", "0.9", "--use_muon", "true")),
    "two_processes": Case("image_classification", "photos", processes=2),
    "semantic": Case("semantic_segmentation", "scenes"),
    "universal": Case("universal_segmentation", "scenes", ("--thing_classes", "cat,dog")),
    "depth": Case("depth_estimation", "scenes"),
    "detection": Case("object_detection", "objects"),
    "deformable_detection": Case("object_detection", "objects", detection=DEFORMABLE),
    "keypoints": Case("keypoint_detection", "objects"),
    "masked_images": Case("masked_image_modeling", "photos"),
    "zero_shot_image_classification": Case(
        "zero_shot_image_classification", "captions", ("--vocab_size", "300", "--max_text_length", "16")
    ),
    "image_captioning": Case("image_captioning", "captions", ("--vocab_size", "300", "--max_text_length", "16")),
}


@dataclass
class Row:
    """Table row: the result of one kind of fault in one case.

    Args:
        case: Name of the case.
        fault: Kind of fault.
        faults: Number of injected faults.
        saving: Number of faults that were injected while a checkpoint was saved.
        resumed: Number of times the run resumed successfully.
        lost: Number of complete checkpoints that were lost, plus damaged checkpoints that were not skipped.
        equal: Whether the final weights equal those of the undisturbed run.
    """

    case: str
    fault: str
    faults: int = 0
    saving: int = 0
    resumed: int = 0
    lost: int = 0
    equal: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the run survived all faults: no checkpoint is lost, and the final weights are unchanged."""
        return self.equal and not self.lost

    def __str__(self) -> str:
        """Return a row of the Markdown table."""
        equal = "yes" if self.equal else "NO"
        cells = self.case, self.fault, self.faults, self.saving, self.resumed, equal, self.lost or "none"
        return f"| {' | '.join(map(str, cells))} |"


HEADING = (
    "| case | fault | faults | while saving | resumed | final weights equal | lost |\n|---|---|---|---|---|---|---|"
)


def draw(place: Path) -> None:
    """Write images of colored rectangles with classes, captions, masks, depth maps, boxes and keypoints."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4)):
        captions, images, annotations = [], [], []
        for number in range(count):
            name, (top, left) = ("cat", "dog")[number % 2], generator.integers(2, 12, 2).tolist()
            mask = np.zeros((32, 36), dtype=np.uint8)
            mask[top : top + 14, left : left + 16] = 1 + number % 2
            pixels = np.where(mask[..., None] > 0, COLORS[name], 120) + generator.normal(0, 9, (32, 36, 3))
            image, file = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), f"{number}.png"
            depth = np.where(mask > 0, 2000, 5000).astype(np.uint16)
            parts = {"images": image, "masks": Image.fromarray(mask), "depths": Image.fromarray(depth)}
            for kind, part in parts.items():
                save(part, place / "scenes" / split / kind / file)
            save(image, place / "objects" / split / "images" / file)
            save(image, place / "photos" / split / name / file)
            save(image, place / "captions" / split / file)
            captions.append({"file_name": file, "text": f"a {name} number {number}"})
            images.append({"id": number, "file_name": file, "height": 32, "width": 36})
            points = [left + 8, top + 2, 2, left + 2, top + 12, 2]
            box = {"bbox": [left, top, 16, 14], "area": 224, "iscrowd": 0, "keypoints": points, "num_keypoints": 2}
            annotations.append({"id": number + 1, "image_id": number, "category_id": 1, **box})
        categories = [{"id": 1, "name": "animal", "keypoints": ["head", "foot"], "skeleton": [[1, 2]]}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (place / "objects" / split / "annotations.json").write_text(json.dumps(content))
        lines = "".join(json.dumps(caption) + "\n" for caption in captions)
        (place / "captions" / split / "metadata.jsonl").write_text(lines)
    (place / "scenes" / "classes.txt").write_text("floor\ncat\ndog")


def save(image: Image.Image, file: Path) -> None:
    """Save an image; create the folder of the file if necessary."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file)


def train(case: Case, arguments: list[str], log: Path, environment: dict[str, str], file_size: int | None) -> None:
    """Run `hf-vit train` in the current (forked) process, and write the output to a log file."""
    with log.open("ab") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.environ.update(environment)
    sys.argv[0] = "hf-vit"
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Writes beyond the limit fail, as on a full disk.
    cli.main(["train", case.task, *arguments])


@contextmanager
def started(case: Case, arguments: list[str], log: Path, file_size: int | None = None) -> Iterator[list[ForkProcess]]:
    """Start the processes of a run with the environment variables of torchrun; kill them on exit."""
    processes = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(case.processes):
        sizes = {"WORLD_SIZE": case.processes, "LOCAL_WORLD_SIZE": case.processes, "MASTER_PORT": port}
        numbers = {"RANK": rank, "LOCAL_RANK": rank, **sizes} if case.processes > 1 else {}
        environment = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
        process = FORK.Process(target=train, args=(case, arguments, log, environment, file_size))
        process.start()
        processes.append(process)
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def train_to_the_end(case: Case, arguments: list[str], log: Path, file_size: int | None = None) -> bool:
    """Run a training run to its end; return whether all processes exited with code 0."""
    with started(case, arguments, log, file_size) as processes:
        for process in processes:
            process.join(LONGEST)
        return all(process.exitcode == 0 for process in processes)


def saved_steps(output: Path) -> list[int]:
    """Return the training steps of all checkpoints, including incomplete checkpoints."""
    return sorted(int(folder.name.rpartition("-")[2]) for folder in output.glob("checkpoint-*"))


def newest_whole(output: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0 if there is none."""
    logging.disable(logging.WARNING)  # Skipped checkpoints would log warnings.
    found = training.last_checkpoint(str(output))
    logging.disable(logging.NOTSET)
    return 0 if found is None else int(Path(found).name.rpartition("-")[2])


def weights(output: Path) -> dict[str, bytes]:
    """Return the contents of all files with final weights, by file name."""
    files = [*output.glob("*.safetensors"), *output.glob("ema/*.safetensors")]
    return {str(file.relative_to(output)): file.read_bytes() for file in files}


@dataclass
class Bench:
    """A case with its undisturbed run and the folders of its disturbed runs.

    Args:
        name: Name of the case.
        place: Folder for data and outputs.
        steps: Number of training steps.
        generator: Random number generator for the times of the faults.
        seconds_of_a_save: Mean time between two checkpoints in seconds, measured in the undisturbed run.
    """

    name: str
    place: Path
    steps: int
    generator: random.Random
    seconds_of_a_save: float = 0.0

    def __post_init__(self) -> None:
        """Run the undisturbed training; raise `RuntimeError` if it fails."""
        self.case = CASES[self.name]
        start = time.monotonic()
        if not train_to_the_end(self.case, self.command("whole"), self.log):
            raise RuntimeError(f"The undisturbed run of {self.name} failed: {self.log.read_text()[-2000:]}")
        times = [folder.stat().st_mtime for folder in (self.place / "whole" / self.name).glob("checkpoint-*")]
        span = max(times) - min(times)
        self.seconds_of_a_save = span / max(len(times) - 1, 1) if span else time.monotonic() - start

    @property
    def log(self) -> Path:
        """The log file of all runs of the case."""
        return self.place / f"{self.name}.log"

    def output(self, kind: str) -> Path:
        """Return the output folder of a kind of run."""
        return self.place / kind / self.name

    def command(self, kind: str) -> list[str]:
        """Return the command line arguments of a kind of run."""
        return self.case.command(self.place, self.output(kind), self.steps)

    def finish(self, kind: str, row: Row) -> Row:
        """Resume a run to its end and compare its weights with those of the undisturbed run."""
        row.resumed += train_to_the_end(self.case, self.command(kind), self.log)
        row.equal = weights(self.output(kind)) == weights(self.output("whole"))
        return row


def kill(bench: Bench, kills: int) -> Row:
    """Kill a run repeatedly, at a random time within two checkpoint intervals after each new checkpoint."""
    row, output, steps = Row(bench.name, "kill"), bench.output("killed"), [0]
    while row.faults < kills and steps[-1] < bench.steps:
        with started(bench.case, bench.command("killed"), bench.log) as processes:
            # The first kill happens before the first checkpoint.
            while row.faults and saved_steps(output)[-1:] <= steps[-1:] and all(p.is_alive() for p in processes):
                time.sleep(POLL)
            time.sleep(bench.generator.uniform(0, 2) * bench.seconds_of_a_save)
            if not all(process.is_alive() for process in processes):
                break
        row.faults += 1
        row.resumed += 1
        before, steps = steps, [*saved_steps(output), 0][:-1] or [0]
        row.saving += newest_whole(output) < steps[-1]
        # Only the newest checkpoint may be incomplete: it is started when all others are complete.
        row.lost += newest_whole(output) < max([*steps[:-1], *before[:-1], 0])
    row.resumed -= 1  # The last resumption is counted by `finish`.
    return bench.finish("killed", row)


def fill_disk(bench: Bench) -> Row:
    """Limit the file size while a checkpoint is saved. The run must fail, and resume when the limit is removed."""
    row, output = Row(bench.name, "disk full"), bench.output("full")
    largest = max(file.stat().st_size for file in bench.output("whole").glob("checkpoint-*/*.pt"))
    with started(bench.case, bench.command("full"), bench.log) as processes:
        while len(saved_steps(output)) < 2 and all(process.is_alive() for process in processes):
            time.sleep(POLL)
    before = newest_whole(output)
    row.faults = int(not train_to_the_end(bench.case, bench.command("full"), bench.log, largest // 2))
    row.saving, row.lost = row.faults, int(newest_whole(output) < before)
    return bench.finish("full", row)


def flip(content: bytes) -> bytes:
    """Return a copy of `content` with all bits of the middle byte flipped."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


def zero(content: bytes) -> bytes:
    """Return a copy of `content` with the second half set to zero, as after a power failure."""
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


def damage(bench: Bench, change: Callable[[bytes], bytes], fault: str) -> Row:
    """Damage each file of the newest checkpoint in turn, and check that the previous checkpoint is selected.

    Finally, resume the run from the previous checkpoint.
    """
    row, output = Row(bench.name, fault), bench.output(fault.replace(" ", "_"))
    with started(bench.case, bench.command(output.parent.name), bench.log) as processes:
        while len(saved_steps(output)) < 3 and all(process.is_alive() for process in processes):
            time.sleep(POLL)
    newest, undamaged = newest_whole(output), None
    for file in sorted((output / f"checkpoint-{newest}").rglob("*")):
        if file.is_file() and file.stat().st_size:
            if undamaged is not None:
                undamaged[0].write_bytes(undamaged[1])
            undamaged = file, file.read_bytes()
            file.write_bytes(change(undamaged[1]))
            row.faults += 1
            row.resumed += 0 < newest_whole(output) < newest
    row.lost = row.faults - row.resumed
    row.resumed -= 1  # The last resumption is counted by `finish`.
    return bench.finish(output.parent.name, row)


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subset", nargs="+", choices=CASES, default=list(CASES), help="cases to run (default: all)")
    parser.add_argument("--kills", type=int, default=6, help="number of kills per case (default: 6)")
    parser.add_argument("--steps", type=int, default=80, help="training steps per run (default: 80)")
    parser.add_argument("--minutes", type=float, default=30, help="start no fault after this time (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the faults (default: 0)")
    args = parser.parse_args(arguments)
    end, good = time.monotonic() + 60 * args.minutes, True
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    print(HEADING, flush=True)
    with TemporaryDirectory() as folder:
        place = Path(folder)
        draw(place)
        for number, name in enumerate(args.subset):
            faults: list[Callable[[Bench], Row]] = [lambda bench: kill(bench, args.kills)]
            if number == 0:  # One case is enough: these faults do not depend on the task.
                faults += [fill_disk, lambda bench: damage(bench, flip, "byte flipped")]
                faults += [lambda bench: damage(bench, zero, "half zeroed")]
            bench = Bench(name, place, args.steps, random.Random(f"{args.seed} {name}"))
            for fault in faults:
                if time.monotonic() > end:
                    sys.exit(
                        f"{parser.prog}: stopped after {args.minutes:g} minutes. {name} and later cases were not run."
                    )
                row = fault(bench)
                print(row, flush=True)
                if not row.is_good:
                    good = False
                    print(bench.log.read_text()[-2000:], file=sys.stderr)
            for kind in place.glob(f"*/{name}"):
                shutil.rmtree(kind)
    if not good:
        sys.exit(f"{parser.prog}: at least one fault changed the weights or lost a checkpoint.")


if __name__ == "__main__":
    main()
