"""Opens the data of a training or an evaluation, once for all processes, checks it, and splits it."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import ClassLabel, Dataset, DatasetDict
from torch import Tensor
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from ..data import check_dense, hold_out
from ..data.checks import without_unreadable
from ..data.datasets import KeypointData, ReadTarget, TargetData, TargetDataset
from ..data.formats.files import SPLITS
from ..data.formats.label_values import SINGLE, problem_type_of, values_target
from ..data.loaders.image_classification import held_out_of_stream
from ..model.image_targets import IGNORED_LABEL
from .arguments import TaskArguments
from .training_arguments import HfViTTrainingArguments


logger = logging.get_logger(__name__)
LABEL, MODEL_LABEL = "label", "model_label"  # columns of the class of a whole image
HELD_OUT = 0.1  # share of the training images, where images to evaluate are needed and there are none


def load_targets(
    load: Callable[[], TargetData],
    args: TaskArguments,
    training_args: HfViTTrainingArguments,
    *,
    needs_validation: int | None = None,
) -> TargetData:
    """Opens the data of a training, checks it, and holds out images for validation if it has no such split.

    If `args.train_val_split` leaves it open, a tenth is held out if something is chosen by its scores or nothing else
    is there to evaluate. `needs_validation` is the number of training images from which on the task chooses something;
    nothing is chosen by images that are
    reported, see `args.validation_as_test`. These two and `holds_out` then say what was done. Of the splits "train",
    "validation" and "test", those that exist are returned.

    Raises:
        OSError: if the data is missing.
        ValueError: if it is bad.
    """
    data = open_data(load, training_args)
    if "train" not in data.splits:
        raise ValueError(f"{args.dataset_name} has no training images, only the splits {', '.join(data.splits)}.")
    splits = readable_images(data, args, training_args, "cannot be trained on")
    if args.train_val_split is None:
        is_chosen = chooses_step(training_args)
        is_chosen |= needs_validation is not None and len(splits["train"]) >= needs_validation
        if args.validation_as_test is None:
            args.validation_as_test = is_chosen and "validation" in splits and "test" not in splits
        is_needed = is_chosen or "test" not in splits
        is_open = args.validation_as_test or "validation" not in splits
        args.train_val_split = HELD_OUT if is_needed and is_open else 0.0
    splits = named_splits(splits, args)
    args.holds_out = "validation" not in splits and args.train_val_split > 0
    if args.holds_out:
        held_out = hold_out(splits["train"], args.train_val_split)
        splits |= {"train": held_out["train"], "validation": held_out["test"]}
    limits = {"train": args.max_train_samples}
    if args.holds_out and args.max_train_samples is not None and args.max_eval_samples is None:
        limits["validation"] = math.ceil(args.train_val_split * args.max_train_samples)
    chosen = {
        name: at_most(limits.get(name, args.max_eval_samples), splits[name], training_args.seed)
        for name in SPLITS
        if name in splits
    }
    return replace(data, splits=DatasetDict(chosen))


def chooses_step(args: HfViTTrainingArguments) -> bool:
    """Returns whether the best step of a training is chosen by the scores of validation images."""
    return bool(args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST)


def named_splits(splits: DatasetDict, args: TaskArguments) -> DatasetDict:
    """Returns the splits of a training by what they are for; see `args.validation_as_test`."""
    if not args.validation_as_test:
        return splits
    if "validation" not in splits or "test" in splits:
        raise ValueError(
            f"validation_as_test=True takes a validation split for the test split, but {args.dataset_name} has "
            f"{', '.join(splits)}. Leave it out."
        )
    return DatasetDict({"test" if name == "validation" else name: images for name, images in splits.items()})


def choose_split(splits: DatasetDict, args: TaskArguments, split: str | None) -> tuple[str, str]:
    """Returns which split to evaluate, and the one that its images are in; see `load_evaluation_targets`."""
    sources = {name: name for name in ("test", "validation", "train") if name in splits}
    if args.validation_as_test and "validation" in sources:
        sources.setdefault("test", sources.pop("validation"))
    if args.train_val_split is None:  # and what the model was trained on does not tell
        args.train_val_split = 0.0 if "test" in sources else HELD_OUT
    if "train" in sources and args.train_val_split > 0:
        sources.setdefault("validation", "train")
    if split is None:
        split = next(name for name in ("test", "validation", "train") if name in sources)
    if split not in sources:
        held_out = " If a tenth of train was held out in training, add --train_val_split 0.1."
        advice = held_out if split == "validation" and "train" in splits else ""
        raise ValueError(f"{args.dataset_name} has no split {split!r}. Choose {' or '.join(sorted(sources))}.{advice}")
    if split == "train":
        logger.warning("These are training images: their scores say little about images that a model has not seen.")
    return split, sources[split]


def evaluation_images(
    data: TargetData,
    split: str,
    source: str,
    args: TaskArguments,
    training_args: HfViTTrainingArguments,
    was_streamed: bool = False,
) -> Dataset:
    """Returns the images to evaluate of those of the split `source`, out of which "validation" may be held.

    `was_streamed` tells that `source` came as a stream when "validation" was held out of it.
    """
    data = replace(data, splits=DatasetDict({source: data.splits[source]}))
    images = readable_images(data, args, training_args, "cannot be evaluated")[source]
    if source == "train" != split:
        assert args.train_val_split is not None  # `choose_split` has seen to it
        if was_streamed:
            images = held_out_of_stream(images, args.dataset_name, args.train_val_split)
        else:
            images = hold_out(images, args.train_val_split)["test"]
    return at_most(args.max_eval_samples, images, training_args.seed)


def with_model_labels(data: TargetData, split: str, label2id: Mapping[str, int], dataset_name: str) -> TargetData:
    """Adds the column `model_label` to a split, which numbers the classes as a model does; `ValueError` if it cannot.

    A second column, because what is held out depends on the numbers in `label`; and before any image is left out,
    because adding one later would copy all images. Classes without an image in the split need not be known.
    """
    images = data.splits[split]
    names = images.features[LABEL].names
    check_known(sorted({names[label] for label in images[LABEL][:]}), label2id, dataset_name)
    known = tuple(sorted(label2id, key=label2id.__getitem__))
    numbers = [label2id[names[label]] for label in images[LABEL][:]]
    images = images.add_column(MODEL_LABEL, numbers, feature=ClassLabel(names=list(known)))
    return replace(data, splits=DatasetDict({split: images}), names=known)


def check_known(names: Iterable[str], label2id: Mapping[str, int], dataset_name: str) -> None:
    """Raises `ValueError` if data have a class that a model does not know."""
    if unknown := [name for name in names if name not in label2id]:
        raise ValueError(
            f"The model does not know {', '.join(unknown)} of {dataset_name}; it knows {', '.join(label2id)}. Score "
            "it on data with its classes, or train it on these."
        )


def readable_images(
    data: TargetData, args: TaskArguments, training_args: HfViTTrainingArguments, fault: str
) -> DatasetDict:
    """Returns the splits with examples that can be read; on several processes each of them reads a share.

    Raises `ValueError` if an example cannot be read and `skip_unreadable` is not set, or too few are left. `fault`
    tells what such examples are of no use for.
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
    return without_unreadable(data.splits, ordered, args.skip_unreadable, fault)


def at_most(limit: int | None, split: Dataset, seed: int) -> Dataset:
    """Returns `limit` images drawn at random, or all if there is no limit or there are fewer."""
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
) -> tuple[str, TargetData]:
    """Opens one split of the data and numbers its classes as a model does.

    Data without a split "validation" has the one that a training with the same `train_val_split` held out of "train".

    Args:
        load: Opens the data.
        args: Which data, and what to do about those that cannot be read.
        split: Name of the split; by default "test", else "validation", else, with a warning, "train".
        label2id: The model's number of each class name.
        training_args: Gives the seed and, on several processes, the share of each.
        was_streamed: Whether the model has trained on a stream, which holds out other images.

    Returns:
        The name of the split, and data with this split alone.

    Raises:
        OSError: if the data is missing.
        ValueError: if it is bad, or has no such split, or a class that the model does not know.
    """
    data = open_data(load, training_args)
    split, source = choose_split(data.splits, args, split)
    if LABEL in data.splits[source].column_names:
        data = with_model_labels(data, source, label2id, args.dataset_name)
    check_known(data.names, label2id, args.dataset_name)
    images = evaluation_images(data, split, source, args, training_args, was_streamed)
    return split, with_model_classes(replace(data, splits=DatasetDict({split: images})), label2id)


def with_model_classes(data: TargetData, label2id: Mapping[str, int]) -> TargetData:
    """Returns data whose targets number the classes or keypoints as a model does, which knows them all."""
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
    # Keypoints of the model that the data do not have are not labeled.
    target = read_target(row)
    keypoints = torch.zeros(count, 3)
    keypoints[numbers] = target["keypoints"]
    return {**target, "keypoints": keypoints}


def open_data(load: Callable[[], TargetData], training_args: HfViTTrainingArguments) -> TargetData:
    """Opens data; on several processes the first one fills the cache for all."""
    with training_args.main_process_first(desc="opening the data"):
        return load()
