"""Writers of tiny datasets in the formats of real datasets."""

import functools
import gzip
import json
import tarfile
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage

from hf_vit.data import load_digits_dataset


SEEDS = {"train": 0, "val": 1000, "test": 2000}  # The seeds are far apart, so that splits share no images.
load_digits = functools.cache(load_digits_dataset)  # Cached, because reading the digits takes 0.25 seconds.


def picture(number: int, size: tuple[int, int] = (8, 6)) -> PILImage.Image:
    """Returns a small random color image, generated with the seed `number`."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return PILImage.fromarray(pixels)


def encoded(image: PILImage.Image, image_format: str = "PNG") -> bytes:
    buffer = BytesIO()
    image.save(buffer, format=image_format)
    return buffer.getvalue()


def write_pictures(folder: Path, *names: str, seed: int = 0) -> None:
    """Writes a different random image to each path of `names`, relative to `folder`."""
    for number, name in enumerate(names, start=seed):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)


def write_class_folders(folder: Path, names: list[str]) -> Path:
    """Writes four images per class to train/<class> and two to test/<class>; returns `folder`."""
    for split, count in (("train", 4), ("test", 2)):
        files = (f"{split}/{name}/{number}.png" for name in names for number in range(count))
        write_pictures(folder, *files, seed=SEEDS[split])
    return folder


def write_idx_file(file: Path, array: np.ndarray) -> None:
    """Writes an array in the IDX format of MNIST, compressed if the file name ends in .gz."""
    header = bytes((0, 0, 8, array.ndim)) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    content = header + array.astype(np.uint8).tobytes()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def write_idx(
    folder: Path, split: str, labels: list[int], prefix: str = "", spelling: str = "-", packed: bool = False
) -> np.ndarray:
    """Writes the image file and the label file of a split, with random 28x28 images; returns the images."""
    images = np.random.default_rng(len(labels)).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    suffix = ".gz" if packed else ""
    write_idx_file(folder / f"{prefix}{split}-images{spelling}idx3-ubyte{suffix}", images)
    write_idx_file(folder / f"{prefix}{split}-labels{spelling}idx1-ubyte{suffix}", np.array(labels))
    return images


def dataset_of(
    labels: list, names: list[str] | None = None, image_column: str = "image", label_column: str = "label"
) -> Dataset:
    """Returns a dataset in the format of the Hub: images as PNG bytes, and labels as class names or plain values."""
    kind = ClassLabel(names=names) if names else Value("int64" if isinstance(labels[0], int) else "string")
    features = Features({image_column: Image(), label_column: kind})
    content = [{"bytes": encoded(picture(number)), "path": None} for number in range(len(labels))]
    return Dataset.from_dict({image_column: content, label_column: labels}, features=features)


def write_tar(
    file: Path, images: Mapping[str, bytes], labels: Mapping[str, object], kind: str = "cls", suffix: str = "png"
) -> None:
    """Writes a tar file in WebDataset format, with an image file and a label file (text or JSON) per sample."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for key, image in images.items():
            label = labels[key]
            text = json.dumps(label) if isinstance(label, dict) else str(label)
            for name, content in ((f"{key}.{suffix}", image), (f"{key}.{kind}", text.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, BytesIO(content))


def write_tars(folder: Path, labels: Mapping[str, list], kind: str = "cls", num_files: int = 2) -> Path:
    """Writes images with the given labels, each split to several tar files; returns `folder`."""
    for split, values in labels.items():
        keys = [f"{split[:2]}/{number:03}" for number in range(len(values))]
        for part in range(num_files):
            own = dict(list(zip(keys, values, strict=True))[part::num_files])
            images = {key: encoded(picture(int(key[3:]) + 1000 * (split != "train"))) for key in own}
            write_tar(folder / f"{split}-{part:05}.tar", images, own, kind)
    return folder


def truncate(file: Path, share: float = 0.6) -> None:
    """Truncates a file to `share` (a fraction) of its bytes."""
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


SHAPE = (6, 8)  # height and width of the images returned by `picture`


def class_map(number: int, num_classes: int = 3) -> np.ndarray:
    """Returns a random class map of the size `SHAPE`. A few pixels have no class (255)."""
    draws = np.random.default_rng(number)
    return np.where(draws.random(SHAPE) < 0.1, 255, draws.integers(0, num_classes, SHAPE)).astype(np.uint8)


def write_image(file: Path, image: PILImage.Image | np.ndarray) -> None:
    """Writes an image or array in the format of the file extension."""
    file.parent.mkdir(parents=True, exist_ok=True)
    (PILImage.fromarray(image) if isinstance(image, np.ndarray) else image).save(file)


def write_masks(folder: Path, *names: str, num_classes: int = 3) -> None:
    """Writes a class map to each path of `names`. The class map at index i has the size of `picture(i)`."""
    for number, name in enumerate(names):
        write_image(folder / name, class_map(number, num_classes))


def write_mask_folders(folder: Path, names: Iterable[str] = ("sky", "road", "car")) -> Path:
    """Writes four images with masks to train/, two to val/, and classes.txt; returns `folder`."""
    for split, count in (("train", 4), ("val", 2)):
        write_pictures(folder, *(f"{split}/images/{number}.jpg" for number in range(count)), seed=SEEDS[split])
        write_masks(folder, *(f"{split}/masks/{number}.png" for number in range(count)))
    (folder / "classes.txt").write_text("\n".join(names))
    return folder


def depth_in_millimeters(number: int) -> np.ndarray:
    """Returns a random depth map of the size `SHAPE`: 0.5 to 10 meters. The first pixel has no depth (0)."""
    depth = np.random.default_rng(number).integers(500, 10000, SHAPE).astype(np.uint16)
    depth[0, 0] = 0
    return depth


def write_depth_folders(folder: Path) -> Path:
    """Writes four images with 16-bit depth in millimeters to train/ and two to val/; returns `folder`."""
    for split, count in (("train", 4), ("val", 2)):
        write_pictures(folder, *(f"{split}/images/{number}.jpg" for number in range(count)), seed=SEEDS[split])
        for number in range(count):
            write_image(folder / split / "depths" / f"{number}.png", depth_in_millimeters(number))
    return folder


COCO_CATEGORIES = [{"id": 7, "name": "sky", "isthing": 0}, {"id": 3, "name": "cat", "isthing": 1}]


def write_panoptic(folder: Path) -> np.ndarray:
    """Writes an image with sky, two cats and a crowd of cats in COCO panoptic format; returns the segment id map."""
    ids = np.zeros(SHAPE, np.int32)
    # Other pixels have the segment id 0, which means that they have no class.
    ids[:2], ids[3:5, :3], ids[3:5, 4:6], ids[5, 6:] = 70000, 300, 5, 9
    bands = np.stack([ids % 256, ids // 256 % 256, ids // 65536], axis=-1).astype(np.uint8)
    write_pictures(folder / "val2017", "12.jpg")
    write_image(folder / "annotations" / "panoptic_val2017" / "12.png", bands)
    segments = [(70000, 7, 0), (300, 3, 0), (5, 3, 0), (9, 3, 1)]
    info = [{"id": i, "category_id": c, "iscrowd": crowd, "area": 1} for i, c, crowd in segments]
    annotation = {"image_id": 12, "file_name": "12.png", "segments_info": info}
    write_coco(folder / "annotations" / "panoptic_val2017.json", [annotation])
    return ids


def write_instances(folder: Path, *annotations: dict) -> Path:
    """Writes one image with instance annotations to `folder/train`; returns the annotation file."""
    write_pictures(folder, "train/images/12.jpg")
    file = folder / "train" / "annotations.json"
    write_coco(file, [{"id": number, "image_id": 12, **annotation} for number, annotation in enumerate(annotations)])
    return file


def write_coco(file: Path, annotations: list[dict]) -> None:
    image = {"id": 12, "file_name": "12.jpg", "height": SHAPE[0], "width": SHAPE[1]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"images": [image], "annotations": annotations, "categories": COCO_CATEGORIES}))
