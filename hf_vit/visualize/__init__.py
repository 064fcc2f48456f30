"""Pictures of trainings, of scores, and of what models say about images."""

from .depth import colour_depth, draw_depth
from .detection import draw_boxes, draw_detections
from .figures import MAX_ROWS
from .keypoints import draw_keypoints, draw_poses
from .palette import segmentation_palette
from .panoptic import draw_panoptic, overlay_segments
from .plots import draw_class_scores, draw_confusion_matrix, draw_curves, draw_precision_recall
from .reconstruction import draw_reconstructions
from .segmentation import draw_segmentation, overlay_segmentation


__all__ = [
    "MAX_ROWS",
    "colour_depth",
    "draw_boxes",
    "draw_class_scores",
    "draw_confusion_matrix",
    "draw_curves",
    "draw_depth",
    "draw_detections",
    "draw_keypoints",
    "draw_panoptic",
    "draw_poses",
    "draw_precision_recall",
    "draw_reconstructions",
    "draw_segmentation",
    "overlay_segmentation",
    "overlay_segments",
    "segmentation_palette",
]
