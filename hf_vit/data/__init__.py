"""Datasets, augmentation and collators."""

from .augmentation import image_classification_augmentation, small_affine
from .augmented_dataset import AugmentedDataset
from .checks import unreadable_images, without_unreadable
from .collators import ImageClassificationCollator
from .digits import DIGITS_RECORD, load_digits_dataset
from .hold_out import hold_out
from .record import DataRecord
from .sources import load_image_classification


__all__ = [
    "DIGITS_RECORD",
    "AugmentedDataset",
    "DataRecord",
    "ImageClassificationCollator",
    "hold_out",
    "image_classification_augmentation",
    "load_digits_dataset",
    "load_image_classification",
    "small_affine",
    "unreadable_images",
    "without_unreadable",
]
