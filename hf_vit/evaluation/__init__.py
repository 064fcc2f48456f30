"""Metrics of predictions image by image, on any number of processes, and of classifiers as `evaluate.Metric`."""

from .base import StreamedMetric
from .classification import ConfusionMatrix, MacroF1, TopKAccuracy
from .depth import DepthMetric
from .detection import DetectionMetric, InstanceMetric
from .features import NeighborAccuracy, classify_by_neighbors
from .keypoints import KeypointMetric
from .retrieval import RetrievalMetric, chance_of_retrieval, retrieval_average_precision, retrieval_ranks
from .segmentation import SemanticSegmentationMetric
from .universal import PanopticMetric


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
