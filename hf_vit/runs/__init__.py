"""Training runs and evaluations from start to end: planning, report, model card and upload."""

from .assemble import build_run, open_run
from .build import Run, make_trainer
from .evaluate import prepare_evaluation
from .model_card import TrainingInfo, write_model_card
from .run import train


__all__ = [
    "Run",
    "TrainingInfo",
    "build_run",
    "make_trainer",
    "open_run",
    "prepare_evaluation",
    "train",
    "write_model_card",
]
