"""The idx files of MNIST and datasets in its format."""

import gzip
import re
import zlib
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, Features, Image, NamedSplit, Value

from .files import listed


PLACES = ("*", "raw/*", "*/raw/*")  # torchvision keeps them in MNIST/raw
FILE_NAME = re.compile(r"(.+-)?(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(?:\.gz)?")
UNSIGNED_BYTE = 8  # the type of number in the third byte of a file
NUM_DIMENSIONS = {"images": 3, "labels": 1}
IdxFiles = dict[str, dict[str, Path]]


def find_idx(path: Path) -> IdxFiles:
    """Find idx files in a folder or below, by split ("train", "test") and kind ("images", "labels")."""
    found: dict[str, IdxFiles] = {}  # by folder and prefix of the names
    # Unpacked files come first: they are read faster than packed ones in the same folder.
    files = [file for place in PLACES for file in path.glob(place)]
    for file in sorted(files, key=lambda file: (file.suffix == ".gz", file)):
        if (match := FILE_NAME.fullmatch(file.name)) and file.is_file():
            split = "train" if match[2] == "train" else "test"
            dataset = str(file.parent / (match[1] or ""))
            found.setdefault(dataset, {}).setdefault(split, {}).setdefault(match[3], file)
    if len(found) > 1:
        raise ValueError(
            f"{path} has idx files of several datasets: {listed(sorted(found))}. Give the folder of one of them."
        )
    return next(iter(found.values()), {})


def load_idx(files: IdxFiles) -> DatasetDict:
    """Read images (PIL, mode L) and labels."""
    return DatasetDict({split: _load_split(split, files[split]) for split in ("train", "test") if split in files})


def _load_split(split: str, files: dict[str, Path]) -> Dataset:
    for kind, other in (("images", "labels"), ("labels", "images")):
        if kind not in files:
            raise ValueError(f"There are no {kind} for {files[other]}: put their idx file beside it.")
    images, labels = (read_idx(files[kind], NUM_DIMENSIONS[kind]) for kind in ("images", "labels"))
    if len(images) != len(labels):
        raise ValueError(
            f"{files['images']} holds {len(images)} images, but {files['labels']} {len(labels)} labels. Get the two "
            "files that belong together."
        )
    # PGM is a header before the bare pixels: the format that is written and read fastest, by far.
    header = b"P5 %d %d 255\n" % (images.shape[2], images.shape[1])
    return Dataset.from_dict(
        {"image": [header + image.tobytes() for image in images], "label": labels.astype(np.int64)},
        features=Features({"image": Image(), "label": Value("int64")}),
        split=NamedSplit(split),
    )


def read_idx(file: Path, num_dimensions: int) -> np.ndarray:
    """Reads unsigned bytes, packed if the file ends in .gz: images (N, H, W), or labels (N,)."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be unpacked: {error}. Get it again.") from error
    magic, start = bytes((0, 0, UNSIGNED_BYTE, num_dimensions)), 4 + 4 * num_dimensions
    if content[:4] != magic:
        raise ValueError(
            f"{file} begins with the bytes {content[:4].hex(' ')} and not with {magic.hex(' ')}, so it is no idx file "
            f"with {num_dimensions} dimension(s). Get it again, unpacked if it does not end in .gz."
        )
    shape = tuple(int.from_bytes(content[index : index + 4], "big") for index in range(4, start, 4))
    expected = start + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        raise ValueError(
            f"{file} is truncated or damaged: it announces the shape {shape}, which makes {expected} bytes, but has "
            f"{len(content)} (unpacked). Get it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
