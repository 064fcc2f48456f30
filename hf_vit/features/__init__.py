"""Extraction of image features to files, and evaluation of these features."""

from .encoder import open_encoder
from .evaluation import evaluate_features, report
from .extraction import ExtractionArguments, extract, extract_features
from .files import open_train_and_test


__all__ = [
    "ExtractionArguments",
    "evaluate_features",
    "extract",
    "extract_features",
    "open_encoder",
    "open_train_and_test",
    "report",
]
