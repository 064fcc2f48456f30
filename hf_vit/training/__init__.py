"""A thin layer on the library's Trainer: metrics, safe saving, exact resuming and model cards."""

from .checkpoints import last_checkpoint
from .metrics import accuracy, majority_accuracy
from .model_card import TrainingRecord, write_model_card
from .trainer import HfViTTrainer


__all__ = [
    "HfViTTrainer",
    "TrainingRecord",
    "accuracy",
    "last_checkpoint",
    "majority_accuracy",
    "write_model_card",
]
