"""Extraction of image features to files, and evaluation of these features."""

from .evaluation import evaluate_features
from .extraction import ExtractionArguments, extract_features, open_encoder
from .files import open_train_and_test


__all__ = [
    "ExtractionArguments",
    "evaluate_features",
    "extract_features",
    "open_encoder",
    "open_train_and_test",
]
