"""A thin layer on the library's Trainer: metrics, safe saving and publishing, and model cards."""

from .hub import check_upload, list_upload, publish
from .metrics import accuracy, majority_accuracy
from .model_card import TrainingRecord, write_model_card
from .trainer import HfViTTrainer


__all__ = [
    "HfViTTrainer",
    "TrainingRecord",
    "accuracy",
    "check_upload",
    "list_upload",
    "majority_accuracy",
    "publish",
    "write_model_card",
]
