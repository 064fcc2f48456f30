"""Images with targets for a training or a scoring: opened once for all processes, checked, and split."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor

from ..data import KeypointData, TargetData, TargetDataset, check_dense
from ..data.target_dataset import ReadTarget
from ..image_targets_hf_vit import IGNORED_LABEL
from .arguments import HfViTTrainingArguments, ImageDataArguments, TrainedImagesArguments
from .load_data import FindFaults, check_known, choose_split, prepare_splits, scored_images


def load_targets(
    load: Callable[[], TargetData], args: TrainedImagesArguments, training_args: HfViTTrainingArguments
) -> TargetData:
    """Opens the data of a training, checks it, and holds out images for validation if it has no such split.

    Args:
        load: Opens the data.
        args: Which data, and what to do about examples that are wrong.
        training_args: Gives the seed and, on several processes, the share of each.

    Raises:
        OSError: if the data is missing.
        ValueError: if it is bad.
    """
    data = _open(load, training_args)
    return replace(
        data, splits=prepare_splits(data.splits, args, training_args, fault_finder(data), "cannot be trained on")
    )


def load_scored_targets(
    load: Callable[[], TargetData],
    args: ImageDataArguments,
    split: str | None,
    label2id: Mapping[str, int],
    training_args: HfViTTrainingArguments,
) -> tuple[str, TargetData]:
    """Opens one split of the data and numbers its classes as a model does; see `load_scored_split`.

    Args:
        load: Opens the data.
        args: Which data, and what to do about examples that are wrong.
        split: Name of the split; by default "test", else "validation", else, with a warning, "train".
        label2id: The model's number of each class name.
        training_args: As in `load_targets`.

    Returns:
        The name of the split, and data with this split alone.

    Raises:
        OSError: if the data is missing.
        ValueError: if it is bad, or has no such split, or a class that the model does not know.
    """
    data = _open(load, training_args)
    split, source = choose_split(data.splits, args, split)
    check_known(data.names, label2id, args.dataset_name)
    images = scored_images(
        data.splits[source], split, source, args, training_args, fault_finder(data), "cannot be scored"
    )
    return split, with_model_classes(replace(data, splits=DatasetDict({split: images})), label2id)


def with_model_classes(data: TargetData, label2id: Mapping[str, int]) -> TargetData:
    """Returns data whose targets number the classes or keypoints as a model does, which knows them all."""
    if not data.names:
        return data
    known = torch.tensor([label2id[name] for name in data.names])
    names = tuple(sorted(label2id, key=label2id.__getitem__))
    if isinstance(data, KeypointData):
        read_target = partial(_reordered, read_target=data.read_target, numbers=known, count=len(names))
        return replace(data, read_target=read_target, names=names, flip_pairs=(), skeleton=(), oks_sigmas=None)
    numbers = torch.full((max(IGNORED_LABEL + 1, len(known)),), IGNORED_LABEL)
    numbers[: len(known)] = known
    return replace(
        data,
        read_target=partial(_renumbered, read_target=data.read_target, numbers=numbers),
        names=names,
        thing_ids=tuple(known[list(data.thing_ids)].tolist()),
    )


def _renumbered(row: dict[str, Any], read_target: ReadTarget, numbers: Tensor) -> dict[str, Tensor]:
    """Reads a target and replaces its class numbers."""
    return {
        name: numbers[values] if name in ("segmentation_map", "class_labels") else values
        for name, values in read_target(row).items()
    }


def _reordered(row: dict[str, Any], read_target: ReadTarget, numbers: Tensor, count: int) -> dict[str, Any]:
    """Reads a target and puts its keypoints at their numbers among those of a model; the others are not labelled."""
    target = read_target(row)
    keypoints = torch.zeros(count, 3)
    keypoints[numbers] = target["keypoints"]
    return {**target, "keypoints": keypoints}


def _open(load: Callable[[], TargetData], training_args: HfViTTrainingArguments) -> TargetData:
    with training_args.main_process_first(desc="opening the data"):
        return load()


def fault_finder(data: TargetData) -> FindFaults:
    """Returns what finds examples that cannot be read, by how the data reads them."""

    def find_faults(dataset: Dataset, *, show_progress: bool) -> dict[int, str]:
        return check_dense(TargetDataset(dataset, data.read_target), show_progress=show_progress)

    return find_faults
