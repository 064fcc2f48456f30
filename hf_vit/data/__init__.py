"""Datasets, augmentation and collators."""

from .augmentation.classification import (
    cropped_example_augmentation,
    image_classification_augmentation,
    small_affine,
    three_augment,
)
from .augmentation.datasets import AugmentedDataset, AugmentedStream, RepeatedAugmentationSampler
from .augmentation.joint import dense_augmentation, detection_augmentation, keypoint_augmentation
from .augmentation.views import MultiCrop, ViewColors
from .checks import check_apart, check_dense, shows_transparency, unreadable_images, without_unreadable
from .collators import (
    DensePredictionCollator,
    ImageClassificationCollator,
    ImageTextCollator,
    KeypointDetectionCollator,
    MaskedImageModelingCollator,
    ObjectDetectionCollator,
    UnlabeledImageCollator,
    draw_caption,
    draw_mask_seed,
    masked_image_target,
    multi_scale_sizes,
)
from .datasets import DatasetInfo, KeypointData, TargetData, TargetDataset, hold_out
from .formats.classes import ClassList
from .loaders.dense import load_depth_estimation, load_semantic_segmentation, load_universal_segmentation
from .loaders.image_classification import (
    DIGITS_INFO,
    LabeledStream,
    held_out_of_stream,
    load_digits_dataset,
    load_image_classification,
    stream_image_classification,
)
from .loaders.objects import load_keypoint_detection, load_object_detection
from .loaders.unlabeled_images import first_images, load_unlabeled_images, stream_images
from .loaders.zero_shot_image_classification import load_image_text
from .targets import read_depth, read_mask


__all__ = [
    "DIGITS_INFO",
    "AugmentedDataset",
    "AugmentedStream",
    "ClassList",
    "DatasetInfo",
    "DensePredictionCollator",
    "ImageClassificationCollator",
    "ImageTextCollator",
    "KeypointData",
    "KeypointDetectionCollator",
    "LabeledStream",
    "MaskedImageModelingCollator",
    "MultiCrop",
    "ObjectDetectionCollator",
    "RepeatedAugmentationSampler",
    "TargetData",
    "TargetDataset",
    "UnlabeledImageCollator",
    "ViewColors",
    "check_apart",
    "check_dense",
    "cropped_example_augmentation",
    "dense_augmentation",
    "detection_augmentation",
    "draw_caption",
    "draw_mask_seed",
    "first_images",
    "held_out_of_stream",
    "hold_out",
    "image_classification_augmentation",
    "keypoint_augmentation",
    "load_depth_estimation",
    "load_digits_dataset",
    "load_image_classification",
    "load_image_text",
    "load_keypoint_detection",
    "load_object_detection",
    "load_semantic_segmentation",
    "load_universal_segmentation",
    "load_unlabeled_images",
    "masked_image_target",
    "multi_scale_sizes",
    "read_depth",
    "read_mask",
    "shows_transparency",
    "small_affine",
    "stream_image_classification",
    "stream_images",
    "three_augment",
    "unreadable_images",
    "without_unreadable",
]
