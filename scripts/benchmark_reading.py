"""Images per second that reach a training from folders, parquet and tar files, as a list and as a stream.

python scripts/benchmark_reading.py --photos path/to/photos
python scripts/benchmark_reading.py --photos path/to/photos --image_size 224 --num_workers 0 8 --max_images 20000

Photos in class folders are written once more as parquet and tar shards. Each is then read by the loader of
HfViTTrainer, decoded, cropped, flipped and normalized, once to warm up and then by turns; no model is trained. Also
says how long a training that is taken up again waits for the first batch after --resume_batches, beside how long it
takes to read these.
"""

import json
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarking import describe_device, save
from datasets import Image
from torch.utils.data import DataLoader
from transformers import HfArgumentParser

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, data, training
from hf_vit.training.load_stream import TrainingStream


@dataclass
class Arguments:
    """What to measure."""

    photos: str = field(metadata={"help": "folder of train/<class>/<image>, or of <class>/<image>"})
    image_size: int = field(default=224, metadata={"help": "height and width in pixels"})
    batch_size: int = field(default=64, metadata={"help": "images per batch"})
    num_workers: list[int] = field(default_factory=lambda: [0, 2], metadata={"help": "processes that read images"})
    shards: int = field(default=8, metadata={"help": "parquet and tar files"})
    max_images: int = field(default=1000, metadata={"help": "read so many"})
    rounds: int = field(default=3, metadata={"help": "timed rounds"})
    resume_batches: int = field(default=10, metadata={"help": "batches that are passed over"})
    output: str | None = field(default=None, metadata={"help": "write the result as JSON here too"})


def write_shards(args: Arguments, folder: Path) -> dict[str, str]:
    """Writes the photos as parquet and tar files, and returns the path of each way that they lie."""
    train = data.load_image_classification(args.photos)["train"].cast_column("image", Image(decode=False))
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
    """Returns the loader of a training that is at a batch."""
    config = HfViTConfig.from_preset("tiny", image_size=args.image_size, num_hidden_layers=1, num_labels=2)
    trainer_args = training.HfViTTrainingArguments(
        output_dir="unused", max_steps=10**6, per_device_train_batch_size=args.batch_size,
        dataloader_num_workers=workers, save_strategy="no", report_to="none",
    )  # fmt: skip
    splits, stream = data.load_image_classification(path), None
    if streaming:
        rows = data.stream_image_classification(path, train_val_split=0).train
        stream = TrainingStream(rows, buffer_size=1000)
    augmentation = training.AugmentationArguments(auto_augment="none", random_erasing=0.0)
    trainer = training.make_trainer(
        HfViTForImageClassification(config), HfViTImageProcessor.for_model(config), splits, augmentation,
        trainer_args, stream=stream,
    )  # fmt: skip
    if isinstance(trainer.train_dataset, data.AugmentedStream):
        trainer.train_dataset.start_after(done, args.batch_size)
    return trainer.get_train_dataloader()


def images_per_second(loader: DataLoader[Any], batches: int) -> float:
    """Reads for an epoch of a list, or as many images of a stream; the first batch is not timed."""
    iterator = iter(loader)
    next(iterator)
    start = time.perf_counter()
    sizes = [len(batch["labels"]) for batch in islice(iterator, batches)]
    return sum(sizes) / (time.perf_counter() - start)


def seconds_to_resume(args: Arguments, path: str, is_skipped: bool) -> float:
    """Returns how long the first batch takes after those that are done."""
    loader = make_loader(args, path, streaming=True, workers=0, done=args.resume_batches if is_skipped else 0)
    start = time.perf_counter()
    next(islice(loader, args.resume_batches, None))
    return time.perf_counter() - start


def main(args: Arguments) -> None:
    """Measures and prints."""
    print(describe_device("cuda" if torch.cuda.is_available() else "cpu"), vars(args))
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(args, Path(folder))
        ways = [(kind, mode, workers) for kind in paths for mode in ("list", "stream") for workers in args.num_workers]
        rates: dict[Any, list[float]] = {way: [] for way in ways}
        batches = args.max_images // args.batch_size - 2
        for _ in range(args.rounds):
            for kind, mode, workers in ways:
                loader = make_loader(args, paths[kind], mode == "stream", workers)
                rates[kind, mode, workers].append(images_per_second(loader, batches))
        resume = {
            kind: [seconds_to_resume(args, path, skip) for skip in (True, False)] for kind, path in paths.items()
        }
    result = {" ".join(map(str, way)): round(median(found)) for way, found in rates.items()}
    print("images/s by kind, mode and workers:", json.dumps(result, indent=1))
    print("seconds to resume, passed over and read:", json.dumps(resume))
    save({"arguments": vars(args), "images_per_second": result, "resume_seconds": resume}, args.output)


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
