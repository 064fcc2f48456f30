"""A thin layer on the library's Trainer: arguments, metrics, safe saving, tasks, publishing and model cards."""

from ..evaluation.classification import image_classification_metrics, majority_baseline
from .arguments import ClassificationDataArguments, HfViTTrainingArguments, ModelArguments
from .batch_transforms import Mixing
from .errors import CheckpointError, NotFiniteError, Preempted
from .evaluator_trainer import EvaluatorTrainer
from .optim.parameter_groups import make_parameter_groups
from .publishing.hub import check_upload, list_upload, publish
from .publishing.model_card import TrainingInfo, write_model_card
from .regularization import BinaryCrossEntropy, PatchDropout, RegularizationArguments, regularize
from .run import evaluate, run
from .saving.checkpoints import last_checkpoint
from .tasks import TASKS
from .tasks.base import Task
from .tasks.image_classification import AugmentationArguments, ImageClassification, load_classifier, make_trainer
from .tasks.zero_shot_image_classification import train_tokenizer
from .trainer import HfViTTrainer


__all__ = [
    "TASKS",
    "AugmentationArguments",
    "BinaryCrossEntropy",
    "CheckpointError",
    "ClassificationDataArguments",
    "EvaluatorTrainer",
    "HfViTTrainer",
    "HfViTTrainingArguments",
    "ImageClassification",
    "Mixing",
    "ModelArguments",
    "NotFiniteError",
    "PatchDropout",
    "Preempted",
    "RegularizationArguments",
    "Task",
    "TrainingInfo",
    "check_upload",
    "evaluate",
    "image_classification_metrics",
    "last_checkpoint",
    "list_upload",
    "load_classifier",
    "majority_baseline",
    "make_parameter_groups",
    "make_trainer",
    "publish",
    "regularize",
    "run",
    "train_tokenizer",
    "write_model_card",
]
