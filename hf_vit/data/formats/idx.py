"""Reader of idx files, the format of MNIST and similar datasets."""

import gzip
import re
import zlib
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, Features, Image, NamedSplit, Value

from ..reading.files import joined
from ..reading.match import Match, Target


PLACES = ("*", "raw/*", "*/raw/*")  # includes `raw`, because torchvision stores the files in MNIST/raw
FILE_NAME = re.compile(r"(.+-)?(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(?:\.gz)?")
UNSIGNED_BYTE = 8  # code of the data type uint8, stored in the third byte of a file
NUM_DIMENSIONS = {"images": 3, "labels": 1}
IdxFiles = dict[str, dict[str, Path]]


def detect(path: Path, target: Target) -> Match | None:
    """Find idx files in a folder and its subfolders, by split ("train", "test") and kind ("images", "labels")."""
    found: dict[str, IdxFiles] = {}
    # Uncompressed files are preferred over compressed ones in the same folder because they are read faster.
    files = [file for place in PLACES for file in path.glob(place)]
    for file in sorted(files, key=lambda file: (file.suffix == ".gz", file)):
        if (match := FILE_NAME.fullmatch(file.name)) and file.is_file():
            split = "train" if match[2] == "train" else "test"
            dataset = str(file.parent / (match[1] or ""))
            found.setdefault(dataset, {}).setdefault(split, {}).setdefault(match[3], file)
    if len(found) > 1:
        raise ValueError(
            f"{path} contains idx files of several datasets: {joined(sorted(found))}. Give the folder of one of them."
        )
    return Match(next(iter(found.values())), f"idx files in {next(iter(found))}") if found else None


def read(match: Match) -> DatasetDict:
    """Read the images (PIL, mode L) and labels of all splits."""
    files: IdxFiles = match.files
    return DatasetDict({split: _load_split(split, files[split]) for split in ("train", "test") if split in files})


def _load_split(split: str, files: dict[str, Path]) -> Dataset:
    for kind, other in (("images", "labels"), ("labels", "images")):
        if kind not in files:
            raise ValueError(f"{files[other]} has no matching idx file of {kind}. Put both into the same folder.")
    images, labels = (read_idx(files[kind], NUM_DIMENSIONS[kind]) for kind in ("images", "labels"))
    if len(images) != len(labels):
        raise ValueError(
            f"{files['images']} contains {len(images)} images, but {files['labels']} contains {len(labels)} labels. "
            "Use two files of the same dataset and split."
        )
    # Images are stored as PGM, a header followed by raw pixels, which is by far the fastest format to write and read.
    header = b"P5 %d %d 255\n" % (images.shape[2], images.shape[1])
    return Dataset.from_dict(
        {"image": [header + image.tobytes() for image in images], "label": labels.astype(np.int64)},
        features=Features({"image": Image(), "label": Value("int64")}),
        split=NamedSplit(split),
    )


def read_idx(file: Path, num_dimensions: int) -> np.ndarray:
    """Read images (N, H, W) or labels (N,) as uint8 from an idx file, which is compressed if its name ends in .gz."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be decompressed: {error}. Download it again.") from error
    magic, start = bytes((0, 0, UNSIGNED_BYTE, num_dimensions)), 4 + 4 * num_dimensions
    if content[:4] != magic:
        raise ValueError(
            f"{file} starts with the bytes {content[:4].hex(' ')} instead of {magic.hex(' ')}, so it is not an idx "
            f"file with {num_dimensions} dimension(s). Download it again. Compressed files must end in .gz."
        )
    shape = tuple(int.from_bytes(content[index : index + 4], "big") for index in range(4, start, 4))
    expected = start + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        raise ValueError(
            f"{file} is truncated or damaged: its header gives the shape {shape}, which takes {expected} bytes, but "
            f"the uncompressed file has {len(content)} bytes. Download it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
