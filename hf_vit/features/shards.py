"""Files of features: which images each of them holds, and that it is there as a whole or not at all."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


GROUP_BYTES = 2**24  # of rows that are written, and read, at a time


@dataclass(frozen=True)
class Shard:
    """A range of the images of a split, whose features are in one file.

    Args:
        split: Name of the split.
        number: From 0.
        count: How many there are of the split.
        start: First image.
        stop: End of the range, as in a slice.
    """

    split: str
    number: int
    count: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Name of the file, as on the Hub."""
        return f"{self.split}-{self.number:05d}-of-{self.count:05d}.parquet"


def plan_shards(images: Mapping[str, int], rows_per_shard: int) -> list[Shard]:
    """Divides splits of so many images; neither processes nor restarts change it."""
    return [
        Shard(split, number, count, number * rows_per_shard, min((number + 1) * rows_per_shard, size))
        for split, size in images.items()
        for count in [math.ceil(size / rows_per_shard)]
        for number in range(count)
    ]


class ShardWriter:
    """Writes batches of rows of any size as groups of about the same size, which is all that it keeps in memory."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        """Begins with an open file."""
        self._writer = writer
        self._batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Takes in the next rows."""
        self._batches.append(batch)
        if sum(held.nbytes for held in self._batches) >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is left."""
        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches))
            self._batches = []


@contextmanager
def new_shard(file: Path, schema: pa.Schema) -> Iterator[ShardWriter]:
    """Yields what writes a file, which gets its name once it is complete."""
    unfinished = file.with_suffix(".part")
    with pq.ParquetWriter(unfinished, schema, use_dictionary=["label"]) as writer:
        rows = ShardWriter(writer)
        yield rows
        rows.flush()
    unfinished.replace(file)
