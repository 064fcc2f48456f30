"""What a training writes into its output folder, by name, and how: whole or not at all."""

import os
from fnmatch import fnmatchcase
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

from ... import model as travelling
from ..callbacks.ema import AVERAGE_FOLDER


ADAPTER_FOLDER = "adapter"  # of the adapter alone, beside the model that it is merged into
CARD = "README.md"
RECIPE_NAME = "recipe.yaml"
RECIPE_HEADING = "# The arguments of a training, which hf_vit has written.\n"
TRAINING_ARGS_JSON = "training_args.json"

# Patterns of `fnmatch`. A saved model: configuration, weights, processors with tokenizers, and the code that travels.
WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, "model-?????-of-?????.safetensors")
TOKENIZER_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    ),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model"),
)
CODE_FILES = tuple(sorted(file.name for file in Path(travelling.__path__[0]).glob("*.py") if file.stem != "__init__"))
MODEL_FILES = (CONFIG_NAME, *WEIGHT_FILES, IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, *TOKENIZER_FILES, *CODE_FILES)
ADAPTER_FILES = (ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME)
# What stands beside it in the end: the card, its figures and pictures, and how the model was trained.
REPORT_FILES = (
    *(CARD, RECIPE_NAME, TRAINING_ARGS_JSON, TRAINER_STATE_NAME, "train_results.json", "all_results.json"),
    *("curves.png", "*_scores.json", "*_predictions.jsonl", "*_examples.png", "*_precision_recall.png"),
    *(f"*_{kind}.{ending}" for kind in ("confusion_matrix", "classes", "keypoints") for ending in ("json", "png")),
)
SPLITS = ("train", "validation", "test")  # one of which reports begin with in place of the star
OUTPUT_FILES = (*MODEL_FILES, *REPORT_FILES)
# Folders of a training that hold a model too, and what is in them.
SUBFOLDERS = {AVERAGE_FOLDER: OUTPUT_FILES, ADAPTER_FOLDER: (*ADAPTER_FILES, CARD)}


def is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether a file name is one of those that trainings write, given as `OUTPUT_FILES` or a part of it."""
    kinds = {pattern.removeprefix("*") for pattern in patterns if pattern.startswith("*")}
    is_of_split = any(name == f"{split}{kind}" for split in SPLITS for kind in kinds)
    return is_of_split or any(fnmatchcase(name, pattern) for pattern in patterns if not pattern.startswith("*"))


def output_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Lists the files of a folder that have names which a training writes, in `ema/` and `adapter/` too, sorted.

    Args:
        folder: Output folder of a training, which need not exist.

    Returns:
        Files and symbolic links; whoever uploads them has to refuse the latter.
    """
    places = {Path(folder): OUTPUT_FILES} | {Path(folder) / name: files for name, files in SUBFOLDERS.items()}
    return sorted(
        file
        for place, patterns in places.items()
        if place.is_dir()
        for file in place.iterdir()
        if is_named(file.name, patterns) and (file.is_symlink() or file.is_file())
    )


def evaluation_files(folder: str | os.PathLike[str], split: str) -> list[Path]:
    """Returns the files that an evaluation of a split may write into a folder."""
    kinds = [pattern.removeprefix("*") for pattern in REPORT_FILES if pattern.startswith("*")]
    return [Path(folder) / f"{name}{kind}" for name in (split, "zero_shot") for kind in kinds]


def write_whole(file: Path, text: str) -> None:
    """Writes a text file so that, whenever the machine fails, the old content or all of the new one stands there."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    flush_folder(file.parent)


def flush_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk, where the system can."""
    if os.name == "posix":  # elsewhere folders cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
