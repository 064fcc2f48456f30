"""Which trainings repeat augmentations."""

from typing import Any

from transformers import TrainingArguments

from ..data.augmented_dataset import AugmentedDataset
from ..data.repeated_sampler import RepeatedSampler
from .regularisation_arguments import RepeatedAugmentationArguments


def repeated_sampler(args: TrainingArguments, dataset: Any) -> RepeatedSampler | None:
    """Returns what draws the images of a training that repeats augmentations; None for others.

    Args:
        args: How to train.
        dataset: What it trains on.

    Raises:
        ValueError: if there is nothing to repeat, or not as often.
    """
    step_size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    if not isinstance(args, RepeatedAugmentationArguments) or args.repeated_augmentations == 1:
        return None
    if not isinstance(dataset, AugmentedDataset):
        raise ValueError(
            f"repeated_augmentations={args.repeated_augmentations} needs images with numbers that are augmented by an "
            f"AugmentedDataset, not {type(dataset).__name__}. Leave it out."
        )
    return RepeatedSampler(dataset, args.repeated_augmentations, step_size)
