"""Load the data of a training or evaluation run, check the images, and hold out images for validation."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import ClassLabel, Dataset, DatasetDict
from torch import Tensor
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from ...data import check_dense, hold_out
from ...data.checks import drop_unreadable
from ...data.datasets import Division, KeypointData, ReadTarget, TargetData, TargetDataset
from ...data.loaders.image_classification import held_out_images_of_stream
from ...data.reading.label_values import SINGLE, problem_type_of, values_target
from ...data.reading.splits import SPLITS
from ...evaluation.calibration import LEAST_FITTED, CalibrationError
from ...model.image_targets import IGNORED_LABEL
from ...options.training_arguments import HfViTTrainingArguments
from .arguments import HELD_OUT, TaskArguments


logger = logging.get_logger(__name__)
LABEL, MODEL_LABEL = "label", "model_label"  # columns with the class index in the data and in the model
UNDIVIDED = Division()
CALIBRATION_SPLIT = "calibration"  # split of the held-out images that do not choose the weights


class NotHeldOutError(CalibrationError):
    """No images are left for a calibration, because all were trained on, chose the weights, or are reported.

    Args:
        message: The reason.
        num_images: Number of training images of which a training run can hold out some; 0 if this does not help.
        options: Other options of this training run.
    """

    def __init__(self, message: str, num_images: int = 0, options: str = "") -> None:
        super().__init__(message)
        share = max(HELD_OUT, math.ceil(100 * 2 * LEAST_FITTED / num_images) / 100) if num_images else 0
        self.options = f"--train_val_split {share:g}{options}" if share else ""


def load_targets(
    load: Callable[[], TargetData],
    args: TaskArguments,
    training_args: HfViTTrainingArguments,
    *,
    needs_validation: int | None = None,
    weights_are_chosen: bool = False,
) -> TargetData:
    """Load and check the data of a training run, and hold out validation images if necessary.

    If `args.train_val_split` is None, 10% of the training images are held out if two conditions hold. First, the
    validation split is missing or used as the test split. Second, validation scores are needed to choose the best step
    or another value, or the data has no test split.

    Args:
        load: Function that loads the data.
        args: Options of the data.
        training_args: Training arguments.
        needs_validation: Minimum number of training images with which the task uses validation scores to choose a
            value, such as a score threshold. None if the task chooses no value.
        weights_are_chosen: Whether validation scores choose the weights, so that other images must calibrate scores.

    Returns:
        The data with its division. Its splits are "train", "validation" and "test", or some of these, and
        "calibration" if validation images choose the weights, see `separate_calibration`.

    Raises:
        OSError: if the data is missing.
        ValueError: if the data is invalid.
    """
    data = open_data(load, training_args)
    if "train" not in data.splits:
        raise ValueError(f"{args.dataset_name} has no training images, only the splits {', '.join(data.splits)}.")
    splits = readable_images(data, args, training_args, "cannot be trained on")
    share, as_test = args.train_val_split, args.validation_as_test
    if share is None:
        is_chosen = chooses_step(training_args)
        is_chosen |= needs_validation is not None and len(splits["train"]) >= needs_validation
        if as_test is None:
            as_test = is_chosen and "validation" in splits and "test" not in splits
        is_needed = is_chosen or "test" not in splits
        is_open = as_test or "validation" not in splits
        share = HELD_OUT if is_needed and is_open else 0.0
    splits = rename_validation_split(splits, args.dataset_name) if as_test else splits
    holds_out = "validation" not in splits and share > 0
    if holds_out:
        held_out = hold_out(splits["train"], share)
        splits |= {"train": held_out["train"], "validation": held_out["test"]}
    division = Division(share, as_test, holds_out, weights_are_chosen)
    if {"validation", "test"} <= splits.keys() and args.calibrate:
        splits |= separate_calibration(splits["validation"], division)
    limits = {"train": args.max_train_samples}
    if holds_out and args.max_train_samples is not None and args.max_eval_samples is None:
        limits["validation"] = limits[CALIBRATION_SPLIT] = math.ceil(share * args.max_train_samples)
    chosen = {
        name: sample_images(limits.get(name, args.max_eval_samples), splits[name], training_args.seed)
        for name in (*SPLITS, CALIBRATION_SPLIT)
        if name in splits
    }
    return replace(data, splits=DatasetDict(chosen), division=division)


def chooses_step(args: HfViTTrainingArguments) -> bool:
    """Return whether a training run uses validation scores to choose the best step."""
    return bool(args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST)


def chooses_weights(values: Mapping[str, Any]) -> bool:
    """Return whether a training run with these options uses validation scores to choose a step or other weights."""
    names = ("load_best_model_at_end", "early_stopping_patience", "probe_classifier")
    return any(values.get(name) for name in names) or values.get("save_strategy") == SaveStrategy.BEST


def separate_calibration(images: Dataset, division: Division) -> dict[str, Dataset]:
    """Return validation images by their use: half for "calibration", if the others choose the weights and suffice."""
    numbers = np.arange(len(images))
    if "image_id" in images.column_names:  # the rows of an image belong together
        numbers = np.unique(images["image_id"][:], return_inverse=True)[1]
    is_divided = division.chooses_weights and max(numbers) + 1 >= 2 * LEAST_FITTED
    uses = ("validation", CALIBRATION_SPLIT) if is_divided else ()
    halves = {use: images.select(np.flatnonzero(numbers % 2 == number)) for number, use in enumerate(uses)}
    return halves or {"validation": images}


def describe_images(division: Division, split: str) -> str:
    """Return a description of the images that a calibration is fitted on."""
    name = "held-out training" if division.holds_out else split.replace(CALIBRATION_SPLIT, "validation")
    is_apart = split == CALIBRATION_SPLIT and division.chooses_weights
    return f"{name} images that did not choose the weights" if is_apart else f"{name} images"


def rename_validation_split(splits: DatasetDict, dataset_name: str) -> DatasetDict:
    """Rename the validation split to "test"; raise `ValueError` without a validation split or with a test split."""
    if "validation" not in splits or "test" in splits:
        raise ValueError(
            f"validation_as_test=True requires a validation split and no test split, but {dataset_name} has the "
            f"splits {', '.join(splits)}. Remove validation_as_test."
        )
    return DatasetDict({"test" if name == "validation" else name: images for name, images in splits.items()})


def choose_split(
    splits: DatasetDict, args: TaskArguments, split: str | None, known: Division
) -> tuple[str, str, Division]:
    """Return the split to evaluate, the split that contains its images, and the division of the images.

    `known` is the division of the training run as far as it is known, see `load_evaluation_targets`.
    """
    sources = {name: name for name in ("test", "validation", "train") if name in splits}
    is_chosen = known.chooses_weights
    if args.validation_as_test and "validation" in sources and "test" in sources:
        is_chosen = False  # images that training held out chose the weights
    elif args.validation_as_test and "validation" in sources:
        sources["test"] = sources.pop("validation")
    share = args.train_val_split
    if share is None:  # use the default, because a saved model does not store this fraction
        share = 0.0 if "test" in sources else HELD_OUT
    if "train" in sources and share > 0:
        sources.setdefault("validation", "train")
    if split == CALIBRATION_SPLIT:
        sources[split], count = sources.get("validation", ""), len(splits.get("train", ()))
        as_test = " --validation_as_test true" if sources[split] == "validation" and "test" not in sources else ""
        if as_test or not sources[split] or (sources[split] == "train" and not known.holds_out):
            others = ", except for the reported ones" if as_test else ""
            message = f"No images of {args.dataset_name} are known to be held out of training{others}."
            raise NotHeldOutError(message, count, as_test)
    if split is None:
        split = next(name for name in ("test", "validation", "train") if name in sources)
    if split not in sources:
        held_out = " If training held out a tenth of the training images, add --train_val_split 0.1."
        advice = held_out if split == "validation" and "train" in splits and not known.holds_out else ""
        message = f"{args.dataset_name} has no split {split!r}. Choose {' or '.join(sorted(sources))}.{advice}"
        raise NotHeldOutError(message, len(splits.get("train", ())) if split == "validation" else 0)
    if split == "train":
        logger.warning("Evaluating on training images: the scores do not measure performance on new images.")
    source, calibrates = sources[split], known.calibrates and "test" in sources
    return split, source, Division(share, args.validation_as_test, source == "train" != split, is_chosen, calibrates)


def evaluation_images(
    data: TargetData,
    split: str,
    source: str,
    args: TaskArguments,
    training_args: HfViTTrainingArguments,
    division: Division = UNDIVIDED,
    was_streamed: bool = False,
) -> Dataset:
    """Return the images to evaluate.

    Args:
        data: The data.
        split: Split to evaluate. "validation" may consist of images held out of the source "train".
        source: Split of `data` that the images are taken from.
        args: Options of the data.
        training_args: Training arguments.
        division: Division of the images.
        was_streamed: Whether the training run held out its validation images from a stream.
    """
    data = replace(data, splits=DatasetDict({source: data.splits[source]}))
    images = readable_images(data, args, training_args, "cannot be evaluated")[source]
    if source == "train" != split:
        assert division.train_val_split is not None
        if was_streamed:
            images = held_out_images_of_stream(images, args.dataset_name, division.train_val_split)
        else:
            images = hold_out(images, division.train_val_split)["test"]
    is_of_both = split in ("validation", CALIBRATION_SPLIT) and division.calibrates
    parts = separate_calibration(images, division) if is_of_both else {}
    if split == CALIBRATION_SPLIT and split not in parts and division.chooses_weights:
        count = len(data.splits[source]) if source == "train" and division.calibrates else 0
        raise NotHeldOutError(f"All {len(images):,} held-out images of {args.dataset_name} chose the weights.", count)
    return sample_images(args.max_eval_samples, parts.get(split, images), training_args.seed)


def with_model_labels(data: TargetData, split: str, label2id: Mapping[str, int], dataset_name: str) -> TargetData:
    """Add the column `model_label` with the class indices of the model to a split.

    The column `label` is kept, because holding out images depends on its values. The new column is added before images
    are removed, since adding it later would copy all images.

    Raises `ValueError` if the class of an image is unknown to the model.
    """
    images = data.splits[split]
    names = images.features[LABEL].names
    check_known(sorted({names[label] for label in images[LABEL][:]}), label2id, dataset_name)
    known = tuple(sorted(label2id, key=label2id.__getitem__))
    numbers = [label2id[names[label]] for label in images[LABEL][:]]
    images = images.add_column(MODEL_LABEL, numbers, feature=ClassLabel(names=list(known)))
    return replace(data, splits=DatasetDict({split: images}), names=known)


def check_known(names: Iterable[str], label2id: Mapping[str, int], dataset_name: str) -> None:
    """Raise `ValueError` if the model does not have a class of the data."""
    if unknown := [name for name in names if name not in label2id]:
        raise ValueError(
            f"The model has no classes {', '.join(unknown)} of {dataset_name}; its classes are {', '.join(label2id)}. "
            "Evaluate it on data with its classes, or train it on this data."
        )


def readable_images(
    data: TargetData, args: TaskArguments, training_args: HfViTTrainingArguments, fault: str
) -> DatasetDict:
    """Return the splits without unreadable examples. Each process checks a part of the examples.

    Args:
        data: The data.
        args: Options of the data.
        training_args: Training arguments.
        fault: Consequence of an unreadable example, used in messages, such as "cannot be evaluated".

    Raises:
        ValueError: if an example is unreadable and `skip_unreadable` is not set, or if too few examples remain.
    """
    if not args.check_images:
        return data.splits
    rank, world_size = training_args.process_index, training_args.world_size
    share = {
        name: check_dense(
            TargetDataset(split.shard(world_size, rank, contiguous=False), data.read_target),
            show_progress=training_args.local_process_index == 0 and not training_args.disable_tqdm,
        )
        for name, split in data.splits.items()
    }
    unreadable: dict[str, dict[int, str]] = {name: {} for name in data.splits}
    for first, found in gather_object([(rank, share)]):
        for name, reasons in found.items():
            unreadable[name] |= {first + world_size * index: reason for index, reason in reasons.items()}
    ordered = {name: dict(sorted(reasons.items())) for name, reasons in unreadable.items()}
    return drop_unreadable(data.splits, ordered, args.skip_unreadable, fault)


def sample_images(limit: int | None, split: Dataset, seed: int) -> Dataset:
    """Return a random sample of `limit` images, or all images if there are at most that many or `limit` is None."""
    if limit is None or limit >= len(split):
        return split
    return split.shuffle(seed=seed).select(range(limit))


def load_evaluation_targets(
    load: Callable[[], TargetData],
    args: TaskArguments,
    split: str | None,
    label2id: Mapping[str, int],
    training_args: HfViTTrainingArguments,
    was_streamed: bool = False,
    known: Division = UNDIVIDED,
) -> tuple[str, TargetData]:
    """Load one split of the data, with classes numbered as in a model.

    If the data has no validation split, "validation" selects the images that a training run with the same
    `train_val_split` held out of "train".

    Args:
        load: Function that loads the data.
        args: Options of the data.
        split: Name of the split. By default, the first existing one of "test", "validation" and, with a warning,
            "train". "calibration" selects the validation images that training neither reported nor used to choose the
            weights.
        label2id: Class index of the model by class name.
        training_args: Arguments with the seed and the number of processes.
        was_streamed: Whether the model was trained on a stream, which holds out different images.
        known: Division of the training run, as far as it is known from its recipe.

    Returns:
        The name of the split, and data with this split only.

    Raises:
        OSError: if the data is missing.
        ValueError: if the data is invalid, has no such split, or has a class that the model does not have.
        CalibrationError: if no images are left for the split "calibration".
    """
    data = open_data(load, training_args)
    split, source, division = choose_split(data.splits, args, split, known)
    if LABEL in data.splits[source].column_names:
        data = with_model_labels(data, source, label2id, args.dataset_name)
    check_known(data.names, label2id, args.dataset_name)
    images = evaluation_images(data, split, source, args, training_args, division, was_streamed)
    evaluated = replace(data, splits=DatasetDict({split: images}), division=division)
    return split, with_model_classes(evaluated, label2id)


def with_model_classes(data: TargetData, label2id: Mapping[str, int]) -> TargetData:
    """Return data with class or keypoint indices of a model, which must have all classes or keypoints of the data."""
    if not data.names:
        return data
    if any(MODEL_LABEL in images.column_names for images in data.splits.values()):
        return replace(data, splits=data.splits.remove_columns(LABEL).rename_column(MODEL_LABEL, LABEL))
    known = torch.tensor([label2id[name] for name in data.names])
    names = tuple(sorted(label2id, key=label2id.__getitem__))
    if any(problem_type_of(rows) != SINGLE for rows in data.splits.values()):
        return replace(data, read_target=partial(values_target, names=names), names=names)
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
    return {
        name: numbers[values] if name in ("segmentation_map", "class_labels") else values
        for name, values in read_target(row).items()
    }


def _reordered(row: dict[str, Any], read_target: ReadTarget, numbers: Tensor, count: int) -> dict[str, Any]:
    # Keypoints of the model that are missing in the data get visibility 0, which marks them as unlabeled.
    target = read_target(row)
    keypoints = torch.zeros(count, 3)
    keypoints[numbers] = target["keypoints"]
    return {**target, "keypoints": keypoints}


def open_data(load: Callable[[], TargetData], training_args: HfViTTrainingArguments) -> TargetData:
    """Load the data. The first process fills the cache of `datasets` before the other processes load."""
    with training_args.main_process_first(desc="loading the data"):
        return load()
