"""Writes the features of images to files, or scores them by the classes of the images.

Usage: hf-vit features {extract,evaluate} ...

Examples:
    hf-vit features extract facebook/dinov2-base photos --features cls mean --output_dir outputs/features
    hf-vit features evaluate outputs/features
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import features
from ..extras import check_packages
from ..features.evaluation import FILE_NAME
from ..outputs import check_outputs, check_writable, free_folder, record_outputs


def extract(*, report: Callable[[str], None], **options: Any) -> None:
    """Writes the features of images to parquet files.

    Usage: hf-vit features extract MODEL DATA [options]

    Args:
        report: Prints a line.
        **options: Those of `ExtractionArguments`, by name.
    """
    features.extract(options, report)


def evaluate(
    train: Path,
    test: Path | None = None,
    *,
    output_dir: Path | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> None:
    """Scores features by the classes of their images: nearest neighbors, a linear probe, retrieval.

    Args:
        train: Folder of features to learn from, the split train of it.
        test: Folder of those to score; by default the same one.
        output_dir: Folder for evaluation.json; by default that of the features, for two folders a new one in the
            second.
        overwrite: Replace evaluation.json of an earlier run.
        report: Prints a line.

    Raises:
        ValueError: if the features do not fit each other, or a file must stay.
        OSError: if a folder holds no features, or nothing can be written.
        ImportError: if scikit-learn is missing.
    """
    check_packages("The evaluation of features", "sklearn")
    folders, folder = [train], output_dir or train
    if test is not None:
        folders.append(test)
        folder = output_dir or free_folder(test / f"evaluation-beside-{train.resolve().name}")
    check_writable(folder)
    check_outputs([folder / FILE_NAME], overwrite=overwrite)
    features.report(*features.open_train_and_test(folders), folder, report)
    record_outputs([folder / FILE_NAME])
