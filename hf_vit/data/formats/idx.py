"""The idx files of MNIST and of the datasets made in its likeness."""

import gzip
import re
import zlib
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, Features, Image, NamedSplit, Value


PLACES = ("*", "raw/*", "*/raw/*")  # torchvision keeps them in MNIST/raw
FILE_NAME = re.compile(r"(?:(.+)-)?(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(?:\.gz)?")
UNSIGNED_BYTE = 8  # the type of number in the third byte of a file
NUM_DIMENSIONS = {"images": 3, "labels": 1}
TRANSPOSED = "emnist-"  # whose authors wrote the images column by column
IdxFiles = dict[str, dict[str, Path]]


def find_idx(path: Path, name: str | None = None) -> IdxFiles:
    """Finds idx files in a folder or below, by split ("train", "test") and kind ("images", "labels")."""
    # Of several sets, `name` chooses: "emnist-letters" for emnist-letters-train-images-idx3-ubyte.gz, "MNIST" for the
    # files in MNIST/raw.
    found: dict[str, IdxFiles] = {}
    files = [file for place in PLACES for file in path.glob(place)]
    # Unpacked files come first: they are read faster than the packed ones beside them.
    for file in sorted(files, key=lambda file: (file.suffix == ".gz", file)):
        if (match := FILE_NAME.fullmatch(file.name)) and file.is_file():
            dataset = match[1] or file.relative_to(path).parts[0].removesuffix(file.name)
            split = "train" if match[2] == "train" else "test"
            found.setdefault(dataset, {}).setdefault(split, {}).setdefault(match[3], file)
    if not found or (name is None and len(found) == 1):
        return next(iter(found.values()), {})
    if name not in found:
        names = ", ".join(map(repr, sorted(found)))
        raise ValueError(
            f"{path} holds idx files of {names}, but dataset_config_name={name!r}. Choose one of these with it."
        )
    return found[name]


def load_idx(files: IdxFiles) -> DatasetDict:
    """Reads images (PIL, mode L) and labels; files called `emnist-...` are turned upright."""
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
    if files["images"].name.startswith(TRANSPOSED):
        images = images.transpose(0, 2, 1)
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
