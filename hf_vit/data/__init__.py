"""Datasets, augmentation and collators."""

from .checks import unreadable_images, without_unreadable
from .collators import ImageClassificationCollator
from .digits import DIGITS_RECORD, load_digits_dataset
from .hold_out import hold_out
from .record import DataRecord
from .sources import load_image_classification
from .transforms import AugmentedDataset, small_affine


__all__ = [
    "DIGITS_RECORD",
    "AugmentedDataset",
    "DataRecord",
    "ImageClassificationCollator",
    "hold_out",
    "load_digits_dataset",
    "load_image_classification",
    "small_affine",
    "unreadable_images",
    "without_unreadable",
]
