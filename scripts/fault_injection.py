"""Kills trainings, fills their disk and damages their checkpoints, and compares what comes out with undisturbed ones.

Each case trains a tiny model of a task on drawn images, first undisturbed, then again while it is killed (SIGKILL) at
random moments of the training and its saving, and resumed by the same command. Then, in trainings of their own, the
disk is full in the middle of a checkpoint (files end at a size, RLIMIT_FSIZE), and bytes of every file of the newest
checkpoint are flipped or zeroed. All final weights must be those of the undisturbed training, byte by byte. Prints a
table in Markdown, and ends with exit code 1 where anything differs or is lost. For Linux and macOS.

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


FORK = multiprocessing.get_context("fork")  # whose processes need not import the libraries again
POLL = 0.005  # seconds
LONGEST = 600  # seconds that one training may take
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
    """A training: the name of its task, the kind of its data, options beside the common ones, and processes."""

    task: str
    data: str
    options: tuple[str, ...] = ()
    detection: dict[str, object] = field(default_factory=lambda: QUERIES)
    processes: int = 1

    def command(self, place: Path, output: Path, steps: int) -> list[str]:
        """Returns the arguments of its training, which resumes if it has begun."""
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
        if (output / "recipe.yaml").is_file():  # of a training that has begun
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
}


@dataclass
class Row:
    """What came of a case: of a fault, how often it struck, how often during saving, and what followed."""

    case: str
    fault: str
    faults: int = 0
    saving: int = 0
    resumed: int = 0
    lost: int = 0
    equal: bool = False

    @property
    def is_good(self) -> bool:
        """Whether all was as if nothing had happened."""
        return self.equal and not self.lost

    def __str__(self) -> str:
        """Returns it as a row of a table."""
        equal = "yes" if self.equal else "NO"
        cells = self.case, self.fault, self.faults, self.saving, self.resumed, equal, self.lost or "none"
        return f"| {' | '.join(map(str, cells))} |"


HEADING = (
    "| case | fault | times | while saving | resumed | final weights equal | lost |\n|---|---|---|---|---|---|---|"
)


def draw(place: Path) -> None:
    """Draws photos of classes with captions, and scenes of a floor with an animal in a box of its color, as files."""
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
    """Saves an image and the folders above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file)


def train(case: Case, arguments: list[str], log: Path, environment: dict[str, str], file_size: int | None) -> None:
    """Trains in a process of its own, as the script of the task does."""
    with log.open("ab") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.environ.update(environment)
    sys.argv[0] = f"scripts/train_{case.task}.py"
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then fails, as on a full disk
    cli.main(["train", case.task, *arguments])


@contextmanager
def started(case: Case, arguments: list[str], log: Path, file_size: int | None = None) -> Iterator[list[ForkProcess]]:
    """Starts the processes of a training, which have ended afterwards, with the environment that torchrun gives."""
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
    """Returns whether a training has ended well."""
    with started(case, arguments, log, file_size) as processes:
        for process in processes:
            process.join(LONGEST)
        return all(process.exitcode == 0 for process in processes)


def saved_steps(output: Path) -> list[int]:
    """Returns the steps of all checkpoints, whole or not."""
    return sorted(int(folder.name.rpartition("-")[2]) for folder in output.glob("checkpoint-*"))


def newest_whole(output: Path) -> int:
    """Returns the step of the checkpoint that a training resumes from, 0 without any."""
    logging.disable(logging.WARNING)  # of checkpoints that are skipped: there are many
    found = training.last_checkpoint(str(output))
    logging.disable(logging.NOTSET)
    return 0 if found is None else int(Path(found).name.rpartition("-")[2])


def weights(output: Path) -> dict[str, bytes]:
    """Returns the files of all final weights."""
    files = [*output.glob("*.safetensors"), *output.glob("ema/*.safetensors")]
    return {str(file.relative_to(output)): file.read_bytes() for file in files}


@dataclass
class Bench:
    """The undisturbed training of a case, and where others of it are disturbed."""

    name: str
    place: Path
    steps: int
    dice: random.Random
    seconds_of_a_save: float = 0.0

    def __post_init__(self) -> None:
        """Trains undisturbed; raises `RuntimeError` if that fails already."""
        self.case = CASES[self.name]
        start = time.monotonic()
        if not train_to_the_end(self.case, self.command("whole"), self.log):
            raise RuntimeError(f"The undisturbed training of {self.name} failed: {self.log.read_text()[-2000:]}")
        times = [folder.stat().st_mtime for folder in (self.place / "whole" / self.name).glob("checkpoint-*")]
        span = max(times) - min(times)
        self.seconds_of_a_save = span / max(len(times) - 1, 1) if span else time.monotonic() - start

    @property
    def log(self) -> Path:
        """What the trainings have printed."""
        return self.place / f"{self.name}.log"

    def output(self, kind: str) -> Path:
        """Returns the output folder of a training."""
        return self.place / kind / self.name

    def command(self, kind: str) -> list[str]:
        """Returns the arguments of a training."""
        return self.case.command(self.place, self.output(kind), self.steps)

    def finish(self, kind: str, row: Row) -> Row:
        """Resumes a training to its end, and compares it with the undisturbed one."""
        row.resumed += train_to_the_end(self.case, self.command(kind), self.log)
        row.equal = weights(self.output(kind)) == weights(self.output("whole"))
        return row


def kill(bench: Bench, kills: int) -> Row:
    """Kills a training again and again: within two checkpoints of when the next one begins, so also while it saves."""
    row, output, steps = Row(bench.name, "kill"), bench.output("killed"), [0]
    while row.faults < kills and steps[-1] < bench.steps:
        with started(bench.case, bench.command("killed"), bench.log) as processes:
            # The first kill comes before there is any checkpoint.
            while row.faults and saved_steps(output)[-1:] <= steps[-1:] and all(p.is_alive() for p in processes):
                time.sleep(POLL)
            time.sleep(bench.dice.uniform(0, 2) * bench.seconds_of_a_save)
            if not all(process.is_alive() for process in processes):
                break
        row.faults += 1
        row.resumed += 1
        before, steps = steps, [*saved_steps(output), 0][:-1] or [0]
        row.saving += newest_whole(output) < steps[-1]
        # Of two checkpoints, the older one was whole before the newer one began.
        row.lost += newest_whole(output) < max([*steps[:-1], *before[:-1], 0])
    row.resumed -= 1  # the last time is counted by its end
    return bench.finish("killed", row)


def fill_disk(bench: Bench) -> Row:
    """Lets files end at a size while checkpoints are saved; the training says so, and goes on when there is space."""
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
    """Returns a content of which a byte in the middle is another one."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


def zero(content: bytes) -> bytes:
    """Returns a content whose second half is zero, as after a loss of power."""
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


def damage(bench: Bench, change: Callable[[bytes], bytes], fault: str) -> Row:
    """Changes every file of the newest checkpoint in turn; each time it is left out, and the one before resumed from.

    After the last file the training is resumed to its end.
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
    row.resumed -= 1  # the last time is counted by its end
    return bench.finish(output.parent.name, row)


def main(arguments: list[str] | None = None) -> None:
    """Disturbs trainings and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subset", nargs="+", choices=CASES, default=list(CASES), help="cases (default: all)")
    parser.add_argument("--kills", type=int, default=6, help="of each case (default: 6)")
    parser.add_argument("--steps", type=int, default=80, help="of each training (default: 80)")
    parser.add_argument("--minutes", type=float, default=30, help="after which no further fault begins (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    args = parser.parse_args(arguments)
    end, good = time.monotonic() + 60 * args.minutes, True
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    print(HEADING, flush=True)
    with TemporaryDirectory() as folder:
        place = Path(folder)
        draw(place)
        for number, name in enumerate(args.subset):
            faults: list[Callable[[Bench], Row]] = [lambda bench: kill(bench, args.kills)]
            if number == 0:  # what follows depends on files, and not on the task
                faults += [fill_disk, lambda bench: damage(bench, flip, "byte flipped")]
                faults += [lambda bench: damage(bench, zero, "half zeroed")]
            bench = Bench(name, place, args.steps, random.Random(f"{args.seed} {name}"))
            for fault in faults:
                if time.monotonic() > end:
                    sys.exit(f"{parser.prog}: {args.minutes:g} minutes have passed; {name} and what follows are left.")
                row = fault(bench)
                print(row, flush=True)
                if not row.is_good:
                    good = False
                    print(bench.log.read_text()[-2000:], file=sys.stderr)
            for kind in place.glob(f"*/{name}"):
                shutil.rmtree(kind)
    if not good:
        sys.exit(f"{parser.prog}: a training was changed by what disturbed it.")


if __name__ == "__main__":
    main()
