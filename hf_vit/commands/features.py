"""Extract image features to files, or evaluate extracted features by the classes of the images.

Usage: hf-vit features {extract,evaluate} ...

Examples:
    hf-vit features extract facebook/dinov2-base photos --features cls mean --output_dir outputs/features
    hf-vit features evaluate outputs/features
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ..features import ExtractionArguments, evaluate_features, extract_features, open_train_and_test
from ..features.evaluation import format_table
from ..options.recipe import with_recipe
from ..options.resolve import build
from ..outputs import check_outputs, check_writable, free_folder, record_outputs, write_atomically


FILE_NAME = "evaluation.json"


def extract(*, report: Callable[[str], None], **options: Any) -> None:
    """Extract features of images with a model and write them to parquet files.

    Usage: hf-vit features extract MODEL DATA [options]
    """
    try:
        (args,) = build((ExtractionArguments,), with_recipe(options))
        images = extract_features(args)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
    if PartialState().is_main_process:
        sizes = ", ".join(f"{count:,} of {name}" for name, count in images.items())
        report(f"Saved features ({', '.join(args.features)}) of images ({sizes}) to {args.output_dir}")
    PartialState().destroy_process_group()  # Without this call, processes can abort at exit.


def evaluate(
    train: Path,
    test: Path | None = None,
    *,
    output_dir: Path | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> None:
    """Evaluate image features by k-nearest neighbors, a linear probe and retrieval of images of the same class.

    Args:
        train: Folder of features. The features of its split "train" are used for training and as references.
        test: Folder of the features to evaluate; by default the folder of the training images.
        output_dir: Folder for evaluation.json; by default the feature folder or, if two folders are given, a new
            subfolder of the second one.
        overwrite: Replace evaluation.json of an earlier run.
        report: Function that receives progress messages.

    Raises:
        ValueError: if the features come from different models, or an existing file may not be replaced.
        OSError: if a folder has no features, or the output cannot be written.
    """
    folders, folder = [train], output_dir or train
    if test is not None:
        folders.append(test)
        folder = output_dir or free_folder(test / f"evaluation-beside-{train.resolve().name}")
    check_writable(folder)
    check_outputs([folder / FILE_NAME], overwrite=overwrite)
    train_split, test_split = open_train_and_test(folders)
    found = evaluate_features(train_split, test_split)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FILE_NAME, json.dumps(found, indent=2) + "\n")
    (num_train, num_test), classes = found["images"], found["classes"]
    report(f"{num_test:,} {test_split.name} images and {num_train:,} train images of {classes} classes")
    report(format_table(found["scores"]))
    report(f"Scores written to {folder / FILE_NAME}")
    record_outputs([folder / FILE_NAME])
