"""Pictures of trainings, scores and predictions, and of what models attend to.

Functions that draw to a file raise `ImportError` where matplotlib is not installed; outlines of segments need scipy.
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
