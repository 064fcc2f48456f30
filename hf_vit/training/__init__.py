"""Model training with `transformers.Trainer`: arguments, tasks, checkpoints, model cards and uploads to the Hub."""

from ..convert import whole_image_processor
from ..evaluation.classification import image_classification_metrics
from .checkpoints import last_checkpoint
from .errors import NotFiniteError, Preempted
from .evaluator_trainer import EvaluatorTrainer
from .optimizer import make_parameter_groups
from .hub import publish
from ..runs.model_card import TrainingInfo, write_model_card
from ..tasks import TASKS
from ..tasks.base import Task
from ..tasks.image_classification import ImageClassification, make_trainer
from ..tasks.zero_shot_image_classification import train_tokenizer
from .trainer import HfViTTrainer
from .training_arguments import HfViTTrainingArguments, TrainerArguments


__all__ = [
    "TASKS",
    "EvaluatorTrainer",
    "HfViTTrainer",
    "HfViTTrainingArguments",
    "ImageClassification",
    "NotFiniteError",
    "Preempted",
    "Task",
    "TrainerArguments",
    "TrainingInfo",
    "image_classification_metrics",
    "last_checkpoint",
    "make_parameter_groups",
    "make_trainer",
    "publish",
    "train_tokenizer",
    "whole_image_processor",
    "write_model_card",
]
