"""Several augmentations of an image in one step."""

from collections.abc import Iterator

import torch

from .augmented_dataset import AugmentedDataset, derive_seed


class RepeatedSampler(torch.utils.data.Sampler[tuple[int, int]]):
    """Draws so many augmentations of each image of a step (https://arxiv.org/abs/1901.09335).

    An epoch is as long as the dataset, and so has but one in so many of its images, others in each epoch, as in DeiT
    (https://arxiv.org/abs/2012.12877). What comes depends on the seed and the epoch of the dataset alone.
    """

    def __init__(self, dataset: AugmentedDataset, repeats: int, step_size: int) -> None:
        """Begins.

        Args:
            dataset: The images.
            repeats: How many augmentations of each.
            step_size: Images of a step, on all processes and in all batches that are accumulated.

        Raises:
            ValueError: if a step is not made of whole groups of augmentations.
        """
        if step_size % repeats:
            raise ValueError(
                f"repeated_augmentations={repeats} does not divide the {step_size} images of a step. Set "
                f"--per_device_train_batch_size to a multiple of {repeats}."
            )
        self.dataset = dataset
        self.repeats = repeats
        self.step_size = step_size

    def __len__(self) -> int:
        """Returns the number of examples of an epoch."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields the numbers of an image and of its augmentation, of each step one augmentation of all images first.

        So neighbours, which are mixed, are never the same image.
        """
        seed = derive_seed(self.dataset.seed, int(self.dataset.epoch))
        length = len(self.dataset)
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
        for start in range(0, length, self.step_size):
            size, first = min(self.step_size, length - start), start // self.repeats
            images = order[first : first + -(-size // self.repeats)]
            yield from [(image, repeat) for repeat in range(self.repeats) for image in images][:size]
