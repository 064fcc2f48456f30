"""Pictures of trainings, of scores, and of what models say about images."""

from .depth import colour_depth, draw_depth
from .figures import MAX_ROWS
from .palette import segmentation_palette
from .panoptic import draw_panoptic, overlay_segments
from .plots import draw_class_scores, draw_confusion_matrix, draw_curves
from .segmentation import draw_segmentation, overlay_segmentation


__all__ = [
    "MAX_ROWS",
    "colour_depth",
    "draw_class_scores",
    "draw_confusion_matrix",
    "draw_curves",
    "draw_depth",
    "draw_panoptic",
    "draw_segmentation",
    "overlay_segmentation",
    "overlay_segments",
    "segmentation_palette",
]
