"""The data of a training for segmentation or depth: opened once for all processes, checked, and split."""

from collections.abc import Callable
from dataclasses import replace

from datasets import Dataset

from ..data import DenseData, DenseDataset, check_dense
from .arguments import HfViTTrainingArguments, TrainedImagesArguments
from .load_data import prepare_splits


def load_dense(
    load: Callable[[], DenseData], args: TrainedImagesArguments, training_args: HfViTTrainingArguments
) -> DenseData:
    """Opens the data of a training, checks it, and holds out images for validation if it has no such split.

    Args:
        load: Opens the data.
        args: Which data, and what to do about examples that are wrong.
        training_args: Gives the seed and, on several processes, the share of each.

    Raises:
        OSError: if the data is missing.
        ValueError: if it is bad.
    """
    with training_args.main_process_first(desc="opening the data"):
        data = load()

    def find_faults(dataset: Dataset, *, show_progress: bool) -> dict[int, str]:
        return check_dense(DenseDataset(dataset, data.read_target), show_progress=show_progress)

    return replace(data, splits=prepare_splits(data.splits, args, training_args, find_faults))
