"""Pictures of trainings, scores and of what a model looks at."""

from .plots import draw_confusion_matrix, draw_curves


__all__ = ["draw_confusion_matrix", "draw_curves"]
