"""Writers of tiny data sets in the formats that real ones have."""

import gzip
from io import BytesIO
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage


def picture(number: int, size: tuple[int, int] = (8, 6)) -> PILImage.Image:
    """A small colour image that is another for every number."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return PILImage.fromarray(pixels)


def encoded(image: PILImage.Image, image_format: str = "PNG") -> bytes:
    buffer = BytesIO()
    image.save(buffer, format=image_format)
    return buffer.getvalue()


def write_pictures(folder: Path, *names: str, seed: int = 0) -> None:
    """Writes an image to each path below `folder`."""
    for number, name in enumerate(names, start=seed):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)


def write_class_folders(folder: Path, names: list[str]) -> Path:
    """Writes four images of each class to train/<class> and two to test/<class>; returns `folder`."""
    for split, count in (("train", 4), ("test", 2)):
        write_pictures(folder, *(f"{split}/{name}/{number}.png" for name in names for number in range(count)))
    return folder


def write_idx_file(file: Path, array: np.ndarray) -> None:
    """Writes an array as the authors of MNIST did, packed if the name ends in .gz."""
    header = bytes((0, 0, 8, array.ndim)) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    content = header + array.astype(np.uint8).tobytes()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def write_idx(
    folder: Path, split: str, labels: list[int], prefix: str = "", spelling: str = "-", packed: bool = False
) -> np.ndarray:
    """Writes the two files of a split, with random 28x28 images; returns these."""
    images = np.random.default_rng(len(labels)).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    suffix = ".gz" if packed else ""
    write_idx_file(folder / f"{prefix}{split}-images{spelling}idx3-ubyte{suffix}", images)
    write_idx_file(folder / f"{prefix}{split}-labels{spelling}idx1-ubyte{suffix}", np.array(labels))
    return images


def dataset_of(
    labels: list, names: list[str] | None = None, image_column: str = "image", label_column: str = "label"
) -> Dataset:
    """A dataset as it lies on the Hub: PNG bytes, and class names or plain values."""
    kind = ClassLabel(names=names) if names else Value("int64" if isinstance(labels[0], int) else "string")
    features = Features({image_column: Image(), label_column: kind})
    content = [{"bytes": encoded(picture(number)), "path": None} for number in range(len(labels))]
    return Dataset.from_dict({image_column: content, label_column: labels}, features=features)


def truncate(file: Path, share: float = 0.6) -> None:
    """Cuts off the end of a file."""
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
