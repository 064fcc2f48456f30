"""A thin layer on the library's Trainer: arguments, metrics, safe saving, tasks, publishing and model cards."""

from ..evaluation.classification import image_classification_metrics, majority_baseline
from ..evaluation.evaluator import BaseEvaluator, Evaluator, ImageResult
from ..evaluation.universal import UniversalMetric
from .arguments import ClassificationDataArguments, HfViTTrainingArguments, ModelArguments
from .batch_transforms import Mixing
from .distillation.arguments import DistillationArguments, make_distillation
from .distillation.base import Distillation
from .distillation.methods import FeatureDistillation, TokenDistillation
from .distillation.teacher import Teacher
from .errors import CheckpointError, NotFiniteError, Preempted
from .evaluator_trainer import EvaluatorTrainer
from .optim.muon import Muon
from .optim.parameter_groups import freeze, make_parameter_groups
from .publishing.hub import check_upload, list_upload, publish
from .publishing.model_card import TrainingInfo, write_model_card
from .regularization import BinaryCrossEntropy, PatchDropout, RegularizationArguments, regularize
from .run import evaluate, run
from .saving.checkpoints import last_checkpoint
from .saving.output_folder import checkpoint_to_resume
from .tasks import TASKS
from .tasks.base import Task
from .tasks.image_classification import AugmentationArguments, ImageClassification, load_classifier, make_trainer
from .tasks.zero_shot_image_classification import train_tokenizer
from .trainer import HfViTTrainer


__all__ = [
    "TASKS",
    "AugmentationArguments",
    "BaseEvaluator",
    "BinaryCrossEntropy",
    "CheckpointError",
    "ClassificationDataArguments",
    "Distillation",
    "DistillationArguments",
    "Evaluator",
    "EvaluatorTrainer",
    "FeatureDistillation",
    "HfViTTrainer",
    "HfViTTrainingArguments",
    "ImageClassification",
    "ImageResult",
    "Mixing",
    "ModelArguments",
    "Muon",
    "NotFiniteError",
    "PatchDropout",
    "Preempted",
    "RegularizationArguments",
    "Task",
    "Teacher",
    "TokenDistillation",
    "TrainingInfo",
    "UniversalMetric",
    "check_upload",
    "checkpoint_to_resume",
    "evaluate",
    "freeze",
    "image_classification_metrics",
    "last_checkpoint",
    "list_upload",
    "load_classifier",
    "majority_baseline",
    "make_distillation",
    "make_parameter_groups",
    "make_trainer",
    "publish",
    "regularize",
    "run",
    "train_tokenizer",
    "write_model_card",
]
