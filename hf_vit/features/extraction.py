"""Extraction of image features to files, on any number of processes. An interrupted extraction can be resumed.

Shapes: B batch, C channels, H W pixels, h w patch grid, N patches without padding, P prefix tokens, D hidden size.
"""

import json
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
from transformers import BaseImageProcessor, BatchFeature
from transformers.utils import logging

from ..convert import load_image_processor
from ..data import load_unlabeled_images
from ..data.checks import check_output_outside_data
from ..data.fingerprint import digest, digest_model, image_state
from ..data.loaders.unlabeled_images import CLASS, class_names_of
from ..data.shards import open_processes, write_shard
from ..data.targets import encoded_bytes
from ..model.image_inputs import decode_image
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import check_trained
from ..options.field import COUNT, NOT_NEGATIVE, Names, data_option, option, source_option, start_option
from ..options.recipe import with_recipe
from ..options.resolve import build
from ..outputs import check_writable
from ..tasks.common.arguments import UNLABELED_COLUMN, UNLABELED_SOURCES, SourceArguments
from ..tasks.common.models import load_with_info, without_load_report
from ..tasks.unlabeled import RAW_SIZE, raw_pixels
from .files import FeatureSettings, FeatureSplit


logger = logging.get_logger(__name__)
extraction_option = partial(option, group="Extraction", essential=True)

FEATURES = {
    "cls": "the CLS token",
    "mean": "the mean of the patch tokens",
    "patches": "all patch tokens",
    "pixels": f"raw pixels at {RAW_SIZE} x {RAW_SIZE}",
    "untrained_cls": "the CLS token of the same model with random weights",
    "untrained_mean": "the mean of the patch tokens of the same model with random weights",
}
UNTRAINED = "untrained_"
UNTRAINED_SEED = 0
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


class ImageEncoder:
    """Computes the features of images.

    Args:
        model: Model that computes the tokens.
        processor: Image processor of the model.
        features: Keys of `FEATURES`.

    Raises:
        ValueError: if a feature needs a CLS token and the model has none.
    """

    def __init__(self, model: HfViTModel, processor: BaseImageProcessor, features: Sequence[str]) -> None:
        if wanted := [name for name in features if name.endswith("cls") and not model.config.use_cls_token]:
            raise ValueError(f"The model has no CLS token, required for {' and '.join(wanted)}. Use --features mean.")
        self.model, self.processor, self.features = model.eval(), processor, tuple(features)
        self.untrained: HfViTModel | None = None
        if any(name.startswith(UNTRAINED) for name in features):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(UNTRAINED_SEED)
                untrained = HfViTModel(model.config, add_pooling_layer=False)
            self.untrained = untrained.to(model.device).eval()

    def columns(self, dtype: str) -> dict[str, Any]:
        """Returns the types of the columns of features in a table of images, for numbers of type `dtype`.

        A feature is a list of numbers for each image. "patches" is such a list for each patch, in row-major order,
        followed by a column "grid" with the numbers of patch rows and columns.
        """
        columns: dict[str, Any] = {}
        for name in self.features:
            width = self.model.config.num_channels * RAW_SIZE**2 if name == "pixels" else self.model.config.hidden_size
            vector = List(Value(dtype), length=width)
            if name == "patches":
                columns |= {"patches": List(vector), "grid": List(Value("int32"), length=2)}
            else:
                columns[name] = vector
        return columns

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor]) -> dict[str, Tensor | list[Tensor]]:
        """Computes the features of a batch of images.

        Args:
            images: B tensors (C, H_i, W_i). They are resized by the image processor.

        Returns:
            A dict with a tensor (B, D) for each feature. "patches" is a list with a tensor (N_i, D) per image, and is
            accompanied by "grid" (B, 2) int32, the numbers of patch rows and columns.
        """
        inputs = self.processor(images=list(images), input_data_format="channels_first", return_tensors="pt")
        inputs = inputs.to(self.model.device)
        grid = self.model.embeddings.patch_embeddings.grid(inputs["pixel_values"])
        real = inputs.get("patch_attention_mask")
        if real is None:
            real = torch.ones(len(images), *grid, dtype=torch.bool, device=self.model.device)
        found: dict[str, Tensor | list[Tensor]] = {"pixels": raw_pixels(inputs["pixel_values"])}
        if {"cls", "mean", "patches"} & {*self.features}:
            found |= _read(self.model, inputs, real)
        if self.untrained is not None:
            found |= {f"{UNTRAINED}{name}": value for name, value in _read(self.untrained, inputs, real).items()}
        grids = ["grid"] * ("patches" in self.features)
        return {name: found[name] for name in (*self.features, *grids)}


def _read(model: HfViTModel, inputs: BatchFeature, real: Tensor) -> dict[str, Tensor | list[Tensor]]:
    """Runs a model and returns its features by name; `real` (B, h, w) is False for padding patches."""
    hidden_states = model(**inputs).last_hidden_state  # (B, P + h·w, D)
    seen = real.flatten(1).bool()  # (B, h·w)
    patches = hidden_states[:, model.config.num_prefix_tokens :]  # (B, h·w, D)
    mean = torch.where(seen[..., None], patches, 0).sum(dim=1) / seen.sum(dim=1, keepdim=True)  # (B, D)
    grids = torch.stack([real.any(dim=2).sum(dim=1), real.any(dim=1).sum(dim=1)], dim=1)  # (B, 2)
    shown = [image[kept] for image, kept in zip(patches, seen, strict=True)]
    return {"cls": hidden_states[:, 0], "mean": mean, "patches": shown, "grid": grids.int()}


def open_encoder(name_or_path: str, features: Sequence[str], device: torch.device) -> ImageEncoder:
    """Opens a saved or published model.

    Args:
        name_or_path: Model folder, weights file, or name on the Hub.
        features: Keys of `FEATURES`.
        device: Device to run the model on.

    Raises:
        OSError: if there is no such model, or it has no image processor.
        ValueError: if the type of model is not supported, or the model does not provide the features.
    """
    with without_load_report():  # The weights of the head are ignored on purpose and need not be reported as unused.
        # Features do not use pooling layers, whose weights are missing in models of dense tasks.
        model, info = load_with_info(HfViTModel, name_or_path, {"add_pooling_layer": False})
    check_trained(model, name_or_path, info["missing_keys"])
    processor = load_image_processor(name_or_path, patch_size=model.config.patch_size)
    return ImageEncoder(model.float().to(device), processor, features)


class ReadImage(NamedTuple):
    """A decoded image, or the reason why it cannot be read."""

    number: int  # number of the image in its split
    file: str
    label: str | None  # class name, None if unknown
    pixels: Tensor | None  # (C, H, W) uint8 or float32; None if the image cannot be read
    fault: str = ""  # reason why the image cannot be read


class ImageReader(torch.utils.data.Dataset[ReadImage]):
    """Dataset of decoded images of a split, with the number of channels that the image processor expects."""

    def __init__(self, rows: Dataset, numbers: range, processor: BaseImageProcessor) -> None:
        self.rows, self.numbers = rows.cast_column("image", Image(decode=False)), numbers
        self.processor, self.labels = processor, class_names_of(rows.select(numbers))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> ReadImage:
        number = self.numbers[index]
        row = self.rows[number]
        known = number, row["file"], self.labels[index]
        try:
            image = decode_image(BytesIO(encoded_bytes(row["image"], "image")), "it")
            return ReadImage(*known, self.processor.process_image(image))
        except (OSError, TypeError, ValueError) as error:
            return ReadImage(*known, None, str(error))


def extract_from_options(values: Mapping[str, Any], report: Callable[[str], None]) -> dict[str, int]:
    """Calls `extract_features` with option values by name, and reports the result on the first process."""
    (args,) = build((ExtractionArguments,), with_recipe(values))
    images = extract_features(args)
    if PartialState().is_main_process:
        sizes = ", ".join(f"{count:,} of {name}" for name, count in images.items())
        report(f"Saved features ({', '.join(args.features)}) of images ({sizes}) to {args.output_dir}")
    PartialState().destroy_process_group()  # Without this call, processes can abort at exit.
    return images


def extract_features(args: ExtractionArguments, splits: DatasetDict | None = None) -> dict[str, int]:
    """Writes the features of images to parquet files with `rows_per_shard` images each.

    Missing and damaged files are distributed among processes, see `hf_vit/data/shards.py`. The columns are `number`
    (of the image in its split), `file`, `label` (if classes are known), and one per feature, see
    `ImageEncoder.columns`.

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
        **digest_model(encoder.model, encoder.processor),
        files=digest(_image_states(splits)),
        labels=digest(json.dumps(class_names_of(split)) for split in splits.values()),
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
            columns = {"number": Value("int64"), "file": Value("string")}
            columns |= {"label": Value("string")} if CLASS in split.features else {}
            images = ImageReader(split, range(shard.start, shard.stop), encoder.processor)
            rows = _feature_rows(images, encoder, args, bar.update)
            write_shard(folder / shard.name, rows, Features(columns | encoder.columns(args.dtype)), args.batch_size)
    return settings.images


def _image_states(splits: DatasetDict) -> Iterator[str]:
    """Yields the name of each image and what identifies it, see `image_state`."""
    for split in splits.values():
        for batch in split.select_columns(["image", "file"]).cast_column("image", Image(decode=False)).iter(1000):
            yield from (f"{file} {image_state(image)}\n" for image, file in zip(*batch.values(), strict=True))


def _feature_rows(
    images: ImageReader, encoder: ImageEncoder, args: ExtractionArguments, count: Callable[[int], object]
) -> Iterator[dict[str, Any]]:
    """Yields the row of each readable image, and calls `count` after each batch with its number of images."""
    for batch in DataLoader(images, args.batch_size, num_workers=args.num_workers, collate_fn=list):
        readable, pixels = list[ReadImage](), list[Tensor]()
        for image in batch:
            if image.pixels is not None:
                readable.append(image)
                pixels.append(image.pixels)
            elif args.skip_unreadable:
                logger.warning("Skipping unreadable image %s: %s", image.file, image.fault)
            else:
                raise OSError(
                    f"{image.file} cannot be read: {image.fault}. Repair it and resume with the same command, or skip "
                    "unreadable images with --skip_unreadable true."
                )
        features = encoder(pixels) if pixels else {}
        for place, image in enumerate(readable):
            vectors = {name: _rounded(of[place], name, args.dtype) for name, of in features.items()}
            yield {"number": image.number, "file": image.file, "label": image.label, **vectors}
        count(len(batch))


def _rounded(vectors: Tensor, name: str, dtype: str) -> np.ndarray:
    """Converts a feature of one image to `dtype`; raises `ValueError` if a value exceeds the range of this type."""
    rounded = vectors if name == "grid" else vectors.to(DTYPES[dtype])
    if rounded.isfinite().all() or not vectors.isfinite().all():
        return rounded.numpy(force=True)
    raise ValueError(
        f"The feature {name!r} has values up to {float(vectors.abs().max()):g}, but the largest value of {dtype} is "
        f"{torch.finfo(rounded.dtype).max:g}. Use --dtype float32 and another --output_dir."
    )


def extract_all(splits: DatasetDict, data: str, model: str, folder: Path, **options: Any) -> np.ndarray:
    """Extract features of the images of all splits, or resume. Return them (N, D), with NaN for unreadable images."""
    arguments = ExtractionArguments(
        dataset_name=[data],  # type: ignore[arg-type]
        model_name_or_path=model,
        output_dir=str(folder),
        rows_per_shard=256,  # an interrupted extraction loses at most the features of this many images
        skip_unreadable=True,
        **options,
    )
    # Without labels, the features are still valid after a label was corrected.
    extract_features(arguments, splits.select_columns(["image", "file"]))
    vectors = []
    for name, rows in splits.items():
        split = FeatureSplit(folder, name, FeatureSettings.read(folder))
        known = split.read("mean")
        own = np.full((len(rows), known.shape[1]), np.nan, np.float32)
        own[split.column("number").to_numpy()] = known  # unreadable images have no features
        vectors.append(own)
    return np.concatenate(vectors)
