"""Folders of parquet files that several processes write together. An interrupted run can be resumed.

Rows are divided into shards. Each shard is one file, which one process writes, so the content of files does not depend
on the number of processes or on interruptions.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import PartialState
from datasets import Features
from datasets.arrow_writer import ParquetWriter

from ..outputs import find_intact, recorded_file, remove_unfinished, write_atomically
from .reading.files import joined


PLACES = ("model", "dataset")  # Settings that are paths. Rows do not depend on them.


@dataclass(frozen=True)
class Shard:
    """The images `start` to `stop` - 1 of a split, and the file for their rows."""

    split: str
    number: int  # number of the file, from 0
    count: int  # number of files of the split
    start: int
    stop: int

    @property
    def name(self) -> str:
        """File name of the shard, in the naming scheme of the Hub."""
        return f"{self.split}-{self.number:05d}-of-{self.count:05d}.parquet"


def open_processes(use_cpu: bool = False) -> PartialState:
    """Returns the state of the processes that torchrun or accelerate has started, on accelerators if there are any."""
    # Without `cpu`, accelerate does not connect processes on a machine without accelerators.
    return PartialState(cpu=use_cpu or not torch.accelerator.is_available())


def plan_shards(images: Mapping[str, int], rows_per_shard: int) -> list[Shard]:
    """Divides the images of each split into shards. `images` maps a split to its number of images."""
    return [
        Shard(split, number, math.ceil(size / rows_per_shard), start, min(start + rows_per_shard, size))
        for split, size in images.items()
        for number, start in enumerate(range(0, size, rows_per_shard))
    ]


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Settings that determine the rows of a folder.

    They are saved with the rows, so that rows with different settings are not mixed.
    """

    content: ClassVar[str]  # Plural noun for the rows, in error messages and in the name of the settings file

    model: str  # name or path of the model
    dataset: str  # names or paths of the images
    weights: str  # hash of the model weights
    image_processor: str  # hash of the settings of image processor and tokenizer
    config: str = ""  # hash of the model configuration
    code: str = ""  # hash of the source files of model, image processor and tokenizer
    files: str  # hash of the paths, sizes and modification times of image files, and of images in tables
    images: dict[str, int]  # number of images of each split
    rows_per_shard: int  # number of images per file; the last file of a split may have fewer

    @classmethod
    def file_name(cls) -> str:
        """Returns the name of the settings file."""
        return f"{cls.content}.json"

    @classmethod
    def read_values(cls, folder: Path) -> dict[str, Any]:
        """Returns the content of the settings file of a folder. Raises `ValueError` if it is damaged."""
        file = folder / cls.file_name()
        try:
            return dict(json.loads(file.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{file} is damaged: {error}. Remove the folder, or set a different --output_dir."
            ) from error

    def start(self, folder: Path, state: PartialState) -> list[Shard]:
        """Writes the settings to a folder, and returns the missing and damaged shards that this process must write.

        Raises `ValueError` if the folder contains rows with other settings, or files that are not rows.
        """
        with state.main_process_first():
            self._check_or_save(folder)
        remove_unfinished(folder)
        shards = plan_shards(self.images, self.rows_per_shard)
        intact = find_intact(folder, [shard.name for shard in shards])
        missing = [shard for shard in shards if shard.name not in intact]
        state.wait_for_everyone()  # No process may write files before all processes have listed the missing files.
        return missing[state.process_index :: state.num_processes]

    def _check_or_save(self, folder: Path) -> None:
        file = folder / self.file_name()
        if file.is_file():
            then, now = self.read_values(folder), asdict(self)
            if changed := [name for name in now if name not in PLACES and then.get(name) != now[name]]:
                differences = "; ".join(f"{name}: {then.get(name)} then, {now[name]} now" for name in changed)
                raise ValueError(
                    f"{folder} contains {self.content} of {then['model']} on {then['dataset']} with other settings "
                    f"({differences}). Resume with the same settings, or set a different --output_dir."
                )
            return
        if folder.exists() and (others := sorted(path.name for path in folder.iterdir())):
            raise ValueError(
                f"{folder} contains {joined(others)}, which are not {self.content}. Set a different --output_dir."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(asdict(self), indent=2) + "\n")


def write_shard(file: Path, rows: Iterable[Mapping[str, Any]], columns: Features, batch_size: int) -> None:
    """Writes rows, with a value or None for each column, to a parquet file, and records its checksum.

    The file has a temporary name until it is complete. Rows are written while they are read, and at most `batch_size`
    rows are held in memory.
    """
    with (
        recorded_file(file) as unfinished,
        ParquetWriter(path=str(unfinished), features=columns, writer_batch_size=batch_size) as writer,
    ):
        for row in rows:
            writer.write({name: row[name] for name in columns})
        writer.finalize()
