"""Measure how many images per second the training data loader reads from folders, parquet and tar files.

Photos in class folders are also written to parquet and tar shards. The data loader of `HfViTTrainer` reads each format
as a dataset and as a stream, and decodes, crops, flips and normalizes the images. No model is trained. The benchmark
also measures how long a resumed training run waits for its first batch after skipping --resume_batches, compared with
reading these batches.
"""

import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import islice, product
from pathlib import Path
from typing import Any

import datasets
from torch.utils.data import DataLoader

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, data, runs, training
from hf_vit.data.augmentation.datasets import AugmentedStream
from hf_vit.tasks.common.arguments import ClassificationArguments

from .harness import RoundArguments, describe_run, in_rounds, median_of, print_header, print_row, save


@dataclass(kw_only=True)
class Arguments(RoundArguments):
    """Options of the benchmark."""

    photos: str = field(metadata={"help": "folder of train/<class>/<image>, or of <class>/<image>"})
    image_size: int = field(default=224, metadata={"help": "height and width in pixels"})
    batch_size: int = field(default=64, metadata={"help": "images per batch"})
    num_workers: list[int] = field(
        default_factory=lambda: [0, 2], metadata={"help": "worker processes that read images"}
    )
    shards: int = field(default=8, metadata={"help": "number of parquet and tar files"})
    max_images: int = field(default=1000, metadata={"help": "number of images to read"})
    rounds: int = field(default=3, metadata={"help": "number of rounds, in random order"})
    resume_batches: int = field(default=10, metadata={"help": "number of batches to skip"})


def write_shards(args: Arguments, folder: Path) -> dict[str, str]:
    """Write the photos to parquet and tar files; return the path to the files of each format."""
    train = data.load_image_classification(args.photos)["train"].cast_column("image", datasets.Image(decode=False))
    train = train.shuffle(seed=0).select(range(min(args.max_images, len(train))))
    for number in range(args.shards):
        shard = train.shard(args.shards, number)
        name = f"train-{number:05}"
        (folder / "parquet").mkdir(exist_ok=True)
        (folder / "tar").mkdir(exist_ok=True)
        embedded = shard.map(lambda row: {"image": {"bytes": Path(row["file"]).read_bytes(), "path": None}})
        embedded.remove_columns("file").to_parquet(folder / "parquet" / f"{name}.parquet")
        with tarfile.open(folder / "tar" / f"{name}.tar", "w") as tar:
            for index, row in enumerate(shard):
                key = f"{number:03}{index:06}"
                contents = {Path(row["file"]).suffix: Path(row["file"]).read_bytes(), ".cls": b"%d" % row["label"]}
                for suffix, content in contents.items():
                    member = tarfile.TarInfo(key + suffix)
                    member.size = len(content)
                    tar.addfile(member, BytesIO(content))
    return {"folders": args.photos, **{kind: str(folder / kind) for kind in ("parquet", "tar")}}


def make_loader(args: Arguments, path: str, streaming: bool, workers: int, done: int = 0) -> DataLoader[Any]:
    """Return the training data loader, positioned after the first `done` batches."""
    config = HfViTConfig.from_preset("tiny", image_size=args.image_size, num_hidden_layers=1, num_labels=2)
    trainer_args = training.HfViTTrainingArguments(
        output_dir="unused", max_steps=10**6, per_device_train_batch_size=args.batch_size,
        dataloader_num_workers=workers, save_strategy="no", report_to="none",
    )  # fmt: skip
    splits, stream = data.load_image_classification(path), None
    if streaming:
        stream = data.stream_image_classification(path, train_val_split=0).train
    options = ClassificationArguments("data", auto_augment="none", random_erasing=0.0)
    trainer = runs.make_trainer(
        HfViTForImageClassification(config), HfViTImageProcessor.for_model(config), splits, options,
        trainer_args, stream=stream,
    )  # fmt: skip
    if isinstance(trainer.train_dataset, AugmentedStream):
        trainer.train_dataset.start_after(done, args.batch_size)
    return trainer.get_train_dataloader()


def images_per_second(args: Arguments, path: str, mode: str, workers: int) -> float:
    """Return the images per second in about one epoch. The time of the first batch is not included."""
    iterator = iter(make_loader(args, path, mode == "stream", workers))
    next(iterator)
    start = time.perf_counter()
    sizes = [len(batch["labels"]) for batch in islice(iterator, args.max_images // args.batch_size - 2)]
    return sum(sizes) / (time.perf_counter() - start)


def seconds_to_resume(args: Arguments, path: str, is_skipped: bool) -> float:
    """Return the seconds until a resumed run has its first batch, after skipping or reading earlier batches."""
    loader = make_loader(args, path, streaming=True, workers=0, done=args.resume_batches if is_skipped else 0)
    start = time.perf_counter()
    next(islice(loader, args.resume_batches, None))
    return time.perf_counter() - start


def main(args: Arguments) -> None:
    """Measure and print the tables."""
    run = describe_run(args, datasets)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(args, Path(folder))
        ways = {
            f"{kind} {mode} {workers}": partial(images_per_second, args, paths[kind], mode, workers)
            for kind, mode, workers in product(paths, ("list", "stream"), args.num_workers)
        }
        rounds = list(in_rounds(ways, args.rounds))
        resume = {
            kind: [seconds_to_resume(args, path, skip) for skip in (True, False)] for kind, path in paths.items()
        }
    rates = {way: round(median_of(rounds, way)) for way in ways}
    print_header("kind, mode and workers", "images/s")
    for way, rate in rates.items():
        print_row(way, rate)
    print()
    print_header("kind", "seconds to resume, skipping", "reading")
    for kind, seconds in resume.items():
        print_row(kind, *seconds)
    save({**run, "images_per_second": rates, "resume_seconds": resume}, args.output)
