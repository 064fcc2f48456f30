"""What a model says of images, as files, and what that is good for."""

from .arguments import ExtractionArguments
from .encoder import FEATURES, ImageEncoder, open_encoder
from .evaluation import evaluate_features, report
from .extraction import extract, extract_features
from .reading import FeatureSplit, open_split, open_train_and_test
from .settings import FeatureSettings


__all__ = [
    "FEATURES",
    "ExtractionArguments",
    "FeatureSettings",
    "FeatureSplit",
    "ImageEncoder",
    "evaluate_features",
    "extract",
    "extract_features",
    "open_encoder",
    "open_split",
    "open_train_and_test",
    "report",
]
