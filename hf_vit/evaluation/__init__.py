"""Scores: of predictions image by image, and of classifiers as modules of `evaluate` that need no network.

A module of `evaluate` opens by its path too: `evaluate.load("hf_vit/metrics/macro_f1.py")`.
"""

from .base import StreamedMetric
from .confusion_matrix import ConfusionMatrix
from .depth import DepthMetric
from .detection import DetectionMetric, InstanceMetric
from .keypoints import KeypointMetric
from .macro_f1 import MacroF1
from .nearest_neighbors import NeighborAccuracy, classify_by_neighbors
from .panoptic import PanopticMetric
from .retrieval import RetrievalMetric, chance_of_retrieval, retrieval_average_precision, retrieval_ranks
from .segmentation import SemanticSegmentationMetric
from .top_k_accuracy import TopKAccuracy


__all__ = [
    "ConfusionMatrix",
    "DepthMetric",
    "DetectionMetric",
    "InstanceMetric",
    "KeypointMetric",
    "MacroF1",
    "NeighborAccuracy",
    "PanopticMetric",
    "RetrievalMetric",
    "SemanticSegmentationMetric",
    "StreamedMetric",
    "TopKAccuracy",
    "chance_of_retrieval",
    "classify_by_neighbors",
    "retrieval_average_precision",
    "retrieval_ranks",
]
