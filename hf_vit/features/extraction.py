"""From images to files of their features: on any number of processes, and taken up where it was interrupted."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader
from transformers.utils import logging

from ..data import load_unlabelled_images
from ..data.pretraining_sources import CLASS
from ..training.arguments import parse_arguments
from .arguments import ExtractionArguments
from .columns import make_batch, make_schema
from .encoder import ImageEncoder, open_encoder
from .images import ImageReader, ReadImage
from .settings import FeatureSettings, digest, digest_processor, digest_weights
from .shards import Shard, new_shard, plan_shards


logger = logging.get_logger(__name__)

FILES_AT_A_TIME = 10_000


def extract_features(args: ExtractionArguments) -> dict[str, int]:
    """Writes the features of images to parquet files, `rows_per_shard` images each.

    Each process does a share of the files that are not there yet, whole ones, so that neither processes nor
    interruptions change what is in them. The columns are `file`, `label` where classes are known, and the features,
    lists of numbers: of "patches" one for each patch, row by row, with the rows and columns in `grid`.

    Args:
        args: Which features of which images.

    Returns:
        The number of images of each split, on every process, which may be done before the others are.

    Raises:
        OSError: if model or images are missing, or an image cannot be read.
        ValueError: if the data are wrong, or the folder holds other features.
    """
    state = PartialState(cpu=args.use_cpu)
    with state.main_process_first():
        splits = load_unlabelled_images(args.sources, **args.source_options())
    encoder = open_encoder(args.model_name_or_path, args.features, state.device)
    settings, folder = describe(args, splits, encoder), Path(args.output_dir)
    with state.main_process_first():
        settings.begin(folder)
    shards = plan_shards(settings.images, args.rows_per_shard)
    missing = [shard for shard in shards if not (folder / shard.name).is_file()]
    state.wait_for_everyone()  # from now on there are more and more
    own = missing[state.process_index :: state.num_processes]
    with logging.tqdm(
        total=sum(shard.stop - shard.start for shard in own),
        desc="Extracting",
        unit=" images",
        disable=not state.is_main_process,
    ) as bar:
        for shard in own:
            write_shard(folder, shard, splits[shard.split], encoder, args, bar.update)
    return settings.images


def describe(args: ExtractionArguments, splits: DatasetDict, encoder: ImageEncoder) -> FeatureSettings:
    """Returns what the features are of."""
    return FeatureSettings(
        model=args.model_name_or_path,
        dataset=args.dataset_name,
        weights=digest_weights(encoder.model),
        image_processor=digest_processor(encoder.processor),
        files=digest(f"{file}\n" for split in splits.values() for file in _files(split)),
        images={name: len(split) for name, split in splits.items()},
        features=list(args.features),
        dtype=args.dtype,
        rows_per_shard=args.rows_per_shard,
    )


def _files(split: Dataset) -> Iterator[str]:
    for rows in split.select_columns("file").iter(FILES_AT_A_TIME):  # of millions, not all at once
        yield from rows["file"]


def write_shard(
    folder: Path,
    shard: Shard,
    split: Dataset,
    encoder: ImageEncoder,
    args: ExtractionArguments,
    count: Callable[[int], object],
) -> None:
    """Writes the features of a range of images.

    Args:
        folder: Where to.
        shard: Which range.
        split: All images of the split.
        encoder: Describes them.
        args: How to.
        count: Told of every batch how many images it had.

    Raises:
        OSError: if an image cannot be read and `skip_unreadable` is not set.
    """
    images = ImageReader(split.select(range(shard.start, shard.stop)), encoder.processor)
    schema = make_schema(encoder.widths, args.dtype, has_labels=CLASS in split.column_names)
    batches = DataLoader(images, args.batch_size, num_workers=args.num_workers, collate_fn=list)
    with new_shard(folder / shard.name, schema) as writer:
        for batch in batches:
            if readable := _readable(batch, args.skip_unreadable):
                files, labels, pixels, _ = zip(*readable, strict=True)
                writer.write(make_batch(schema, files, labels, encoder(pixels), args.dtype))
            count(len(batch))


def _readable(batch: Sequence[ReadImage], skip_unreadable: bool) -> list[ReadImage]:
    for image in batch:
        if image.pixels is None and not skip_unreadable:
            raise OSError(
                f"{image.file} cannot be read: {image.fault}. Repair it and go on by the same command, or leave such "
                "images out with --skip_unreadable true."
            )
        if image.pixels is None:
            logger.warning("Left out, as it cannot be read: %s: %s", image.file, image.fault)
    return [image for image in batch if image.pixels is not None]


def extract(arguments: Sequence[str], description: str | None, say: Callable[[str], None]) -> None:
    """Does what a script is told to; exits with one line that says what is wrong.

    Args:
        arguments: The command line without the program's name.
        description: What `--help` says first.
        say: Tells the user how it went; called on the first process.
    """
    try:
        (args,) = parse_arguments((ExtractionArguments,), arguments, description=description)
        images = extract_features(args)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
    if PartialState().is_main_process:
        sizes = ", ".join(f"{count:,} of {name}" for name, count in images.items())
        say(f"Features ({', '.join(args.features)}) of images, {sizes}: {args.output_dir}")
    PartialState().destroy_process_group()  # else several processes can abort while they exit
