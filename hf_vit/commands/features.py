"""Extract image features to files, or evaluate extracted features by the classes of the images.

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
    """Extract features of images with a model and write them to parquet files.

    Usage: hf-vit features extract MODEL DATA [options]
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
