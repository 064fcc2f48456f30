"""The data of a training or a scoring: opened once for all processes, checked, and split."""

from accelerate.utils import broadcast_object_list
from datasets import ClassLabel, Dataset, DatasetDict

from ..data import hold_out, load_image_classification, unreadable_images, without_unreadable
from .arguments import DataArguments, HfViTTrainingArguments, TrainingDataArguments


def open_splits(args: DataArguments, training_args: HfViTTrainingArguments) -> DatasetDict:
    """Opens the data; on several processes the first one fills the cache for all.

    Raises:
        OSError: if the data is missing.
        ValueError: if it is bad.
    """
    with training_args.main_process_first(desc="opening the data"):
        return load_image_classification(
            args.dataset_name,
            config_name=args.dataset_config_name,
            revision=args.dataset_revision,
            image_column=args.image_column_name,
            label_column=args.label_column_name,
        )


def load_splits(args: TrainingDataArguments, training_args: HfViTTrainingArguments) -> DatasetDict:
    """Opens the data of a training, checks it, and holds out images for validation if it has no such split.

    Args:
        args: Which data, and what to do about unreadable images.
        training_args: Gives the seed and, on several processes, the order of the work.

    Returns:
        Splits "train" and, where there are such, "validation" and "test".

    Raises:
        OSError: if the data is missing.
        ValueError: if it is bad.
    """
    splits = open_splits(args, training_args)
    if "train" not in splits:
        raise ValueError(f"{args.dataset_name} has no training images, only the splits {', '.join(splits)}.")
    if "validation" not in splits and args.train_val_split > 0:
        held_out = hold_out(splits["train"], args.train_val_split)
        splits |= {"train": held_out["train"], "validation": held_out["test"]}
    limits = {"train": args.max_train_samples}
    return DatasetDict(
        {
            name: usable(splits[name], limits.get(name, args.max_eval_samples), args.skip_unreadable, training_args)
            for name in ("train", "validation", "test")
            if name in splits
        }
    )


def load_scored_split(
    args: DataArguments, split: str, label2id: dict[str, int], training_args: HfViTTrainingArguments
) -> Dataset:
    """Opens one split of the data and numbers its labels as a model does.

    Args:
        args: Which data, and what to do about unreadable images.
        split: Name of the split.
        label2id: The model's number of each class name.
        training_args: As in `load_splits`.

    Raises:
        OSError: if the data is missing.
        ValueError: if it is bad, or has no such split, or a class that the model does not know.
    """
    splits = open_splits(args, training_args)
    if split not in splits:
        raise ValueError(f"{args.dataset_name} has no split {split!r}. Choose --split {' or '.join(splits)}.")
    images = splits[split]
    names = images.features["label"].names
    used = sorted({names[label] for label in images["label"]})
    if unknown := [name for name in used if name not in label2id]:
        raise ValueError(
            f"The model does not know {', '.join(unknown)}; it knows {', '.join(label2id)}. Score it on data with its "
            "classes, or train it on these."
        )
    numbers = [label2id[names[label]] for label in images["label"]]
    feature = ClassLabel(names=sorted(label2id, key=label2id.__getitem__))
    images = images.remove_columns("label").add_column("label", numbers, feature=feature)
    return usable(images, args.max_eval_samples, args.skip_unreadable, training_args)


def usable(split: Dataset, limit: int | None, skip: bool, training_args: HfViTTrainingArguments) -> Dataset:
    """Returns at most `limit` images of a split, all of which can be read; only the first process reads them.

    Raises:
        ValueError: if an image cannot be read and `skip` is False.
    """
    if limit is not None and limit < len(split):
        split = split.shuffle(seed=training_args.seed).select(range(limit))
    unreadable = [unreadable_images(split) if training_args.process_index == 0 else {}]
    if training_args.world_size > 1:
        broadcast_object_list(unreadable)
    return without_unreadable(split, unreadable[0], skip)
