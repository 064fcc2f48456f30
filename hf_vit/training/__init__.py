"""Model training with `transformers.Trainer`: arguments, checkpoints and uploads to the Hub."""

from ..convert import whole_image_processor
from ..evaluation.classification import image_classification_metrics
from ..options.training_arguments import HfViTTrainingArguments, TrainerArguments
from .checkpoints import last_checkpoint
from .errors import NotFiniteError, Preempted
from .evaluator_trainer import EvaluatorTrainer
from .hub import publish
from .optimizer import make_parameter_groups
from .trainer import HfViTTrainer


__all__ = [
    "EvaluatorTrainer",
    "HfViTTrainer",
    "HfViTTrainingArguments",
    "NotFiniteError",
    "Preempted",
    "TrainerArguments",
    "image_classification_metrics",
    "last_checkpoint",
    "make_parameter_groups",
    "publish",
    "whole_image_processor",
]
