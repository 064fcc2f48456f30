"""Scores: of dense predictions image by image, and of classifiers as modules of `evaluate` that need no network.

A module of `evaluate` opens by its path too: `evaluate.load("hf_vit/metrics/macro_f1.py")`.
"""

from .confusion_matrix import ConfusionMatrix
from .depth_estimation import DepthMetric
from .instance_segmentation import InstanceMetric
from .macro_f1 import MacroF1
from .panoptic_segmentation import PanopticMetric
from .semantic_segmentation import SemanticSegmentationMetric
from .streamed import StreamedMetric
from .top_k_accuracy import TopKAccuracy


__all__ = [
    "ConfusionMatrix",
    "DepthMetric",
    "InstanceMetric",
    "MacroF1",
    "PanopticMetric",
    "SemanticSegmentationMetric",
    "StreamedMetric",
    "TopKAccuracy",
]
