"""Pictures of trainings, scores and predictions, and of what models attend to.

Functions that draw to a file raise `ImportError` where matplotlib is not installed; outlines of segments need scipy.
"""

from .attention import (
    Attention,
    attention_distances,
    attention_maps,
    attention_rollout,
    draw_attention_distances,
    gradient_rollout,
    record_attention,
)
from .colors import segmentation_palette
from .depth import color_depth, draw_depth
from .detection import draw_boxes, draw_detections
from .features import draw_feature_colors, feature_colors, patch_features, patch_similarity
from .figures import MAX_ROWS
from .keypoints import draw_keypoints, draw_poses
from .mosaics import draw_attention, draw_patch_filters, draw_position_similarity, patch_filters, position_similarity
from .patches import draw_heat, overlay_heat, patch_at, patch_distances
from .plots import draw_class_scores, draw_confusion_matrix, draw_curves, draw_precision_recall
from .pretraining import draw_captions, draw_reconstructions, draw_views
from .segmentation import draw_panoptic, draw_segmentation, overlay_segmentation, overlay_segments


__all__ = [
    "MAX_ROWS",
    "Attention",
    "attention_distances",
    "attention_maps",
    "attention_rollout",
    "color_depth",
    "draw_attention",
    "draw_attention_distances",
    "draw_boxes",
    "draw_captions",
    "draw_class_scores",
    "draw_confusion_matrix",
    "draw_curves",
    "draw_depth",
    "draw_detections",
    "draw_feature_colors",
    "draw_heat",
    "draw_keypoints",
    "draw_panoptic",
    "draw_patch_filters",
    "draw_poses",
    "draw_position_similarity",
    "draw_precision_recall",
    "draw_reconstructions",
    "draw_segmentation",
    "draw_views",
    "feature_colors",
    "gradient_rollout",
    "overlay_heat",
    "overlay_segmentation",
    "overlay_segments",
    "patch_at",
    "patch_distances",
    "patch_features",
    "patch_filters",
    "patch_similarity",
    "position_similarity",
    "record_attention",
    "segmentation_palette",
]
