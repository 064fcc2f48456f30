"""Datasets, augmentation and collators."""

from .augmentation.classification import image_classification_augmentation
from .augmentation.datasets import AugmentedDataset
from .augmentation.joint import DenseAugmentation, DetectionAugmentation, KeypointAugmentation
from .checks import check_dense, unreadable_images
from .collators import (
    DensePredictionCollator,
    ImageClassificationCollator,
    KeypointDetectionCollator,
    ObjectDetectionCollator,
)
from .datasets import TargetDataset, hold_out
from .loaders.dense import load_depth_estimation, load_semantic_segmentation, load_universal_segmentation
from .loaders.image_classification import (
    DIGITS_INFO,
    load_digits_dataset,
    load_image_classification,
    stream_image_classification,
)
from .loaders.objects import load_keypoint_detection, load_object_detection
from .loaders.unlabeled_images import load_unlabeled_images
from .loaders.zero_shot_image_classification import load_image_text


__all__ = [
    "DIGITS_INFO",
    "AugmentedDataset",
    "DenseAugmentation",
    "DensePredictionCollator",
    "DetectionAugmentation",
    "ImageClassificationCollator",
    "KeypointAugmentation",
    "KeypointDetectionCollator",
    "ObjectDetectionCollator",
    "TargetDataset",
    "check_dense",
    "hold_out",
    "image_classification_augmentation",
    "load_depth_estimation",
    "load_digits_dataset",
    "load_image_classification",
    "load_image_text",
    "load_keypoint_detection",
    "load_object_detection",
    "load_semantic_segmentation",
    "load_universal_segmentation",
    "load_unlabeled_images",
    "stream_image_classification",
    "unreadable_images",
]
