"""Figures of training curves, scores, predictions, attention and features.

Functions that draw to a file raise `ImportError` if matplotlib is not installed. Segment outlines need scipy.
"""

from .attention import attention_maps, attention_rollout, gradient_rollout, record_attention
from .colors import segmentation_palette
from .patches import feature_colors, patch_features, patch_similarity


__all__ = [
    "attention_maps",
    "attention_rollout",
    "feature_colors",
    "gradient_rollout",
    "patch_features",
    "patch_similarity",
    "record_attention",
    "segmentation_palette",
]
