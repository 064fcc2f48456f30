"""Extraction of image features to files, on any number of processes. An interrupted extraction can be resumed.

Shapes: C channels, H W pixels.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict, Features, Image, List, Value
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BaseImageProcessor
from transformers.utils import logging

from ..data import load_unlabeled_images
from ..data.checks import check_output_outside_data
from ..data.fingerprint import digest, digest_weights, fingerprint
from ..data.loaders.unlabeled_images import CLASS, NO_CLASS
from ..data.shards import open_processes, write_shard
from ..data.targets import encoded_bytes
from ..model.image_inputs import decode_image
from ..options.field import COUNT, NOT_NEGATIVE, Names, data_option, option, source_option, start_option
from ..options.recipe import with_recipe
from ..options.resolve import build
from ..outputs import check_writable
from ..training.arguments import UNLABELED_COLUMN, UNLABELED_SOURCES, SourceArguments
from .encoder import FEATURES, ImageEncoder, open_encoder
from .files import FeatureSettings


logger = logging.get_logger(__name__)
extraction_option = partial(option, group="Extraction", essential=True)

DTYPES = {"float32": torch.float32, "float16": torch.float16}


@dataclass
class ExtractionArguments(SourceArguments):
    """Options of a feature extraction: images, model, features and output."""

    loader_options = (*SourceArguments.loader_options, "label_column_name")
    takes_several = True

    dataset_name: str | Names = source_option(UNLABELED_SOURCES)  # type: ignore[assignment]
    label_column_name: str | None = data_option(None, UNLABELED_COLUMN)

    model_name_or_path: str = start_option(
        "", "Saved or published model: a folder, a file or a name on the Hub.", group="Extraction"
    )
    output_dir: str = option(
        "outputs/features",
        "Folder for the parquet files.",
        group="Output",
        essential=True,
        synonyms="output out save_dir out_dir project_dir name",
        resume="free",
    )
    features: list[str] = extraction_option(
        ["mean"], "Some of: " + "; ".join(f"{name}, {what}" for name, what in FEATURES.items()) + "."
    )
    dtype: str = extraction_option("float32", "Data type of the written features: float32 or float16.")
    batch_size: int = extraction_option(32, "Number of images per forward pass of the model.", COUNT)
    rows_per_shard: int = extraction_option(
        4096, "Number of images per file. A process that is killed loses at most the images of one file.", COUNT
    )
    num_workers: int = extraction_option(
        0, "Number of processes that read images, per process that runs the model.", NOT_NEGATIVE, synonyms="workers"
    )
    skip_unreadable: bool = extraction_option(
        False, "Skip images that cannot be read instead of stopping with an error.", resume="free"
    )
    use_cpu: bool = extraction_option(
        False, "Run on the CPU.", brief="Run on the CPU.", synonyms="cpu no_cuda", resume="free"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model_name_or_path:
            raise ValueError("No model is given. Set --model_name_or_path to a path or a name on the Hub.")
        if not self.features or {*self.features} - {*FEATURES}:
            raise ValueError(f"features={self.features} must be one or more of {', '.join(FEATURES)}.")
        if len({*self.features}) < len(self.features):
            raise ValueError(f"features={self.features} contains duplicates. Give each feature once.")
        check_output_outside_data(self.sources, self.output_dir)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be {' or '.join(DTYPES)}.")


def columns_of(widths: Mapping[str, int], dtype: str, has_labels: bool) -> Features:
    """Returns the names and types of the columns of a feature file. `widths` maps a feature to its vector length."""
    columns = Features({"file": Value("string"), **({"label": Value("string")} if has_labels else {})})
    for name, width in widths.items():
        vector = List(Value(dtype), length=width)
        columns[name] = List(vector) if name == "patches" else vector
        if name == "patches":
            columns["grid"] = List(Value("int32"), length=2)
    return columns


def round_vectors(vectors: Tensor, name: str, dtype: str) -> np.ndarray:
    """Converts a feature of one image to an array of type `dtype`.

    Raises `ValueError` if a value exceeds the range of `dtype`.
    """
    rounded = vectors if name == "grid" else vectors.to(DTYPES[dtype])
    if rounded.isfinite().all() or not vectors.isfinite().all():
        return rounded.numpy(force=True)
    raise ValueError(
        f"The feature {name!r} has values up to {float(vectors.abs().max()):g}, but the largest value of {dtype} is "
        f"{torch.finfo(rounded.dtype).max:g}. Use --dtype float32 and another --output_dir."
    )


class ReadImage(NamedTuple):
    """A decoded image, or the reason why it cannot be read."""

    file: str
    label: str | None  # Class name, None if unknown
    pixels: Tensor | None  # (C, H, W) uint8 or float32; None if the image cannot be read
    fault: str = ""  # Reason why the image cannot be read


class ImageReader(torch.utils.data.Dataset[ReadImage]):
    """Dataset of the decoded images of a split, with the number of channels that the image processor expects."""

    def __init__(self, rows: Dataset, processor: BaseImageProcessor) -> None:
        self.rows = rows.cast_column("image", Image(decode=False))
        self.processor = processor
        self.names = rows.features[CLASS].names if CLASS in rows.features else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ReadImage:
        row = self.rows[index]
        number = row.get(CLASS, NO_CLASS)
        label = None if self.names is None or number == NO_CLASS else self.names[number]
        try:
            image = decode_image(BytesIO(encoded_bytes(row["image"], "image")), "it")
            return ReadImage(row["file"], label, self.processor.process_image(image))
        except (OSError, TypeError, ValueError) as error:
            return ReadImage(row["file"], label, None, str(error))


def extract_features(args: ExtractionArguments, splits: DatasetDict | None = None) -> dict[str, int]:
    """Writes the features of images to parquet files with `rows_per_shard` images each.

    Files that do not exist yet are distributed among processes, see `hf_vit/data/shards.py`. The columns are `file`,
    `label` (if classes are known), and one column per feature with a list of numbers for each image. The column
    "patches" contains a list of numbers for each patch of an image, in row-major order. The column `grid` contains the
    numbers of patch rows and columns.

    Args:
        args: Options of the extraction.
        splits: Images with the columns `image` and `file`; by default loaded from `args.sources`.

    Returns:
        The number of images of each split. Processes do not wait for each other before they return.

    Raises:
        OSError: if the model or images are missing, or an image cannot be read.
        ValueError: if the data are invalid, or the output folder contains features with other settings.
    """
    check_writable(Path(args.output_dir))
    state = open_processes(args.use_cpu)
    with state.main_process_first():
        splits = splits or load_unlabeled_images(args.sources, **args.source_options())
    encoder = open_encoder(args.model_name_or_path, args.features, state.device)
    settings = FeatureSettings(
        model=args.model_name_or_path,
        dataset=",".join(args.sources),
        weights=digest_weights(encoder.model),
        image_processor=digest([encoder.processor.to_json_string()]),
        files=digest(json.dumps(fingerprint(split.select_columns(["image", "file"]))) for split in splits.values()),
        images={name: len(split) for name, split in splits.items()},
        features=list(args.features),
        dtype=args.dtype,
        rows_per_shard=args.rows_per_shard,
    )
    folder = Path(args.output_dir)
    own = settings.start(folder, state)
    total = sum(shard.stop - shard.start for shard in own)
    with logging.tqdm(total=total, desc="Extracting", unit=" images", disable=not state.is_main_process) as bar:
        for shard in own:
            split = splits[shard.split]
            columns = columns_of(encoder.widths, args.dtype, has_labels=CLASS in split.column_names)
            images = ImageReader(split.select(range(shard.start, shard.stop)), encoder.processor)
            rows = _feature_rows(images, encoder, args, bar.update)
            write_shard(folder / shard.name, rows, columns, args.batch_size)
    return settings.images


def _feature_rows(
    images: ImageReader, encoder: ImageEncoder, args: ExtractionArguments, count: Callable[[int], object]
) -> Iterator[dict[str, Any]]:
    """Yields the row of each readable image, and calls `count` after each batch with its number of images."""
    for batch in DataLoader(images, args.batch_size, num_workers=args.num_workers, collate_fn=list):
        readable = _readable(batch, args.skip_unreadable)
        features = encoder([image.pixels for image in readable if image.pixels is not None]) if readable else {}
        for number, image in enumerate(readable):
            vectors = {name: round_vectors(of[number], name, args.dtype) for name, of in features.items()}
            yield {"file": image.file, "label": image.label, **vectors}
        count(len(batch))


def _readable(batch: Sequence[ReadImage], skip_unreadable: bool) -> list[ReadImage]:
    for image in (image for image in batch if image.pixels is None):
        if not skip_unreadable:
            raise OSError(
                f"{image.file} cannot be read: {image.fault}. Repair it and resume with the same command, or skip "
                "unreadable images with --skip_unreadable true."
            )
        logger.warning("Skipping unreadable image %s: %s", image.file, image.fault)
    return [image for image in batch if image.pixels is not None]


def extract(values: Mapping[str, Any], echo: Callable[[str], None]) -> None:
    """Runs a feature extraction. Errors end the program with a one-line message.

    Args:
        values: Values of the options of `ExtractionArguments` by name, and optionally a `recipe`.
        echo: Function that prints a line of text for the user; called on the first process only.
    """
    try:
        (args,) = build((ExtractionArguments,), with_recipe(values))
        images = extract_features(args)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
    if PartialState().is_main_process:
        sizes = ", ".join(f"{count:,} of {name}" for name, count in images.items())
        echo(f"Saved features ({', '.join(args.features)}) of images ({sizes}) to {args.output_dir}")
    PartialState().destroy_process_group()  # Without this call, processes can abort at exit.
