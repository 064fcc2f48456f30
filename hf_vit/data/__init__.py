"""Datasets, augmentation and collators."""

from .collators import ImageClassificationCollator
from .digits import DIGITS_RECORD, hold_out, load_digits_dataset
from .record import DataRecord
from .transforms import AugmentedDataset, small_affine


__all__ = [
    "DIGITS_RECORD",
    "AugmentedDataset",
    "DataRecord",
    "ImageClassificationCollator",
    "hold_out",
    "load_digits_dataset",
    "small_affine",
]
