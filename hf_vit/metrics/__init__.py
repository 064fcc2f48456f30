"""Scores: of predictions image by image, and of classifiers as modules of `evaluate` that need no network.

A module of `evaluate` opens by its path too: `evaluate.load("hf_vit/metrics/macro_f1.py")`.
"""

from .confusion_matrix import ConfusionMatrix
from .depth_estimation import DepthMetric
from .image_text_retrieval import RetrievalMetric, chance_of_retrieval, retrieval_ranks
from .instance_segmentation import InstanceMetric
from .keypoint_detection import KeypointMetric
from .macro_f1 import MacroF1
from .nearest_neighbours import NeighbourAccuracy, classify_by_neighbours
from .object_detection import DetectionMetric
from .panoptic_segmentation import PanopticMetric
from .retrieval import retrieval_average_precision
from .semantic_segmentation import SemanticSegmentationMetric
from .streamed import StreamedMetric
from .top_k_accuracy import TopKAccuracy


__all__ = [
    "ConfusionMatrix",
    "DepthMetric",
    "DetectionMetric",
    "InstanceMetric",
    "KeypointMetric",
    "MacroF1",
    "NeighbourAccuracy",
    "PanopticMetric",
    "RetrievalMetric",
    "SemanticSegmentationMetric",
    "StreamedMetric",
    "TopKAccuracy",
    "chance_of_retrieval",
    "classify_by_neighbours",
    "retrieval_average_precision",
    "retrieval_ranks",
]
