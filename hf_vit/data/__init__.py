"""Datasets, augmentation and collators."""

from .augmentation import (
    cropped_example_augmentation,
    image_classification_augmentation,
    small_affine,
    three_augment,
)
from .augmented_dataset import AugmentedDataset
from .augmented_stream import AugmentedStream
from .batch_sizes import multi_scale_sizes
from .caption_sources import load_image_text
from .checks import unreadable_images, without_unreadable
from .class_list import ClassList
from .collators import ImageClassificationCollator
from .dense_augmentation import dense_augmentation
from .dense_checks import check_dense
from .dense_collator import DensePredictionCollator
from .dense_sources import load_depth_estimation, load_semantic_segmentation, load_universal_segmentation
from .detection_augmentation import detection_augmentation
from .detection_collator import ObjectDetectionCollator
from .detection_sources import load_object_detection
from .digits import DIGITS_RECORD, load_digits_dataset
from .hold_out import hold_out
from .image_stream import first_images, stream_images
from .image_text_batches import ImageTextCollator, draw_caption
from .keypoint_augmentation import keypoint_augmentation
from .keypoint_collator import KeypointDetectionCollator
from .keypoint_sources import load_keypoint_detection
from .labelled_stream import LabelledStream, held_out_of_stream, stream_image_classification
from .masked_images import MaskedImageModelingCollator, draw_mask_seed, masked_image_target
from .named_images import NamedImages
from .pretraining_sources import load_unlabelled_images
from .record import DataRecord
from .repeated_sampler import RepeatedSampler
from .sources import load_image_classification
from .target_dataset import KeypointData, TargetData, TargetDataset
from .target_files import read_depth, read_mask, read_segment_ids


__all__ = [
    "DIGITS_RECORD",
    "AugmentedDataset",
    "AugmentedStream",
    "ClassList",
    "DataRecord",
    "DensePredictionCollator",
    "ImageClassificationCollator",
    "ImageTextCollator",
    "KeypointData",
    "KeypointDetectionCollator",
    "LabelledStream",
    "MaskedImageModelingCollator",
    "NamedImages",
    "ObjectDetectionCollator",
    "RepeatedSampler",
    "TargetData",
    "TargetDataset",
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
    "load_unlabelled_images",
    "masked_image_target",
    "multi_scale_sizes",
    "read_depth",
    "read_mask",
    "read_segment_ids",
    "small_affine",
    "stream_image_classification",
    "stream_images",
    "three_augment",
    "unreadable_images",
    "without_unreadable",
]
