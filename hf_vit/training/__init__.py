"""A thin layer on the library's Trainer: arguments, metrics, safe saving, publishing and model cards."""

from ..evaluation.classification import image_classification_metrics, majority_baseline
from ..evaluation.evaluator import BaseEvaluator, Evaluator, ImageResult
from ..evaluation.universal import UniversalMetric
from .arguments import (
    AugmentationArguments,
    DataArguments,
    HfViTTrainingArguments,
    ModelArguments,
    TrainingDataArguments,
    parse_arguments,
)
from .batch_transforms import Mixing, MultiScaleSizes, ProgressiveSizes
from .callbacks.throughput import forward_flops
from .checkpoints import check_labels, checkpoint_to_resume, last_checkpoint
from .distillation.arguments import DistillationArguments, make_distillation
from .distillation.base import Distillation
from .distillation.methods import FeatureDistillation, TokenDistillation
from .distillation.teacher import Teacher
from .errors import CheckpointError, ExampleError, NotFiniteError, Preempted
from .evaluator_trainer import EvaluatorTrainer
from .load_data import load_scored_split, load_splits
from .optim.arguments import OptimizationArguments
from .optim.muon import Muon
from .optim.parameter_groups import freeze, make_parameter_groups
from .publishing.hub import check_upload, list_upload, publish
from .publishing.model_card import TrainingInfo, write_model_card
from .publishing.report import write_scores
from .recipe import begin_recipe, without_secrets
from .regularization import BinaryCrossEntropy, PatchDropout, RegularizationArguments, regularize
from .tasks.base import TrainingTask, run
from .tasks.depth_estimation import DepthEstimation, DepthEvaluation, DepthEvaluator
from .tasks.evaluation import evaluate
from .tasks.image_classification import (
    ImageClassification,
    ImageClassificationEvaluation,
    load_classifier,
    make_trainer,
    write_report,
)
from .tasks.image_text import ImageTextContrast, ImageTextEvaluation, ImageTextEvaluator, ImageTextTrainer
from .tasks.keypoint_detection import KeypointDetection, KeypointEvaluation, KeypointEvaluator
from .tasks.masked_image_modeling import MaskedImageEvaluator, MaskedImageModeling, NeighborTrainer
from .tasks.object_detection import DetectionEvaluation, DetectionEvaluator, ObjectDetection
from .tasks.semantic_segmentation import SemanticEvaluation, SemanticEvaluator, SemanticSegmentation
from .tasks.tokenizer import train_tokenizer
from .tasks.universal_segmentation import MaskAnnealing, UniversalEvaluation, UniversalEvaluator, UniversalSegmentation
from .trainer import HfViTTrainer


__all__ = [
    "AugmentationArguments",
    "BaseEvaluator",
    "BinaryCrossEntropy",
    "CheckpointError",
    "DataArguments",
    "DepthEstimation",
    "DepthEvaluation",
    "DepthEvaluator",
    "DetectionEvaluation",
    "DetectionEvaluator",
    "Distillation",
    "DistillationArguments",
    "Evaluator",
    "EvaluatorTrainer",
    "ExampleError",
    "FeatureDistillation",
    "HfViTTrainer",
    "HfViTTrainingArguments",
    "ImageClassification",
    "ImageClassificationEvaluation",
    "ImageResult",
    "ImageTextContrast",
    "ImageTextEvaluation",
    "ImageTextEvaluator",
    "ImageTextTrainer",
    "KeypointDetection",
    "KeypointEvaluation",
    "KeypointEvaluator",
    "MaskAnnealing",
    "MaskedImageEvaluator",
    "MaskedImageModeling",
    "Mixing",
    "ModelArguments",
    "MultiScaleSizes",
    "Muon",
    "NeighborTrainer",
    "NotFiniteError",
    "ObjectDetection",
    "OptimizationArguments",
    "PatchDropout",
    "Preempted",
    "ProgressiveSizes",
    "RegularizationArguments",
    "SemanticEvaluation",
    "SemanticEvaluator",
    "SemanticSegmentation",
    "Teacher",
    "TokenDistillation",
    "TrainingDataArguments",
    "TrainingInfo",
    "TrainingTask",
    "UniversalEvaluation",
    "UniversalEvaluator",
    "UniversalMetric",
    "UniversalSegmentation",
    "begin_recipe",
    "check_labels",
    "check_upload",
    "checkpoint_to_resume",
    "evaluate",
    "forward_flops",
    "freeze",
    "image_classification_metrics",
    "last_checkpoint",
    "list_upload",
    "load_classifier",
    "load_scored_split",
    "load_splits",
    "majority_baseline",
    "make_distillation",
    "make_parameter_groups",
    "make_trainer",
    "parse_arguments",
    "publish",
    "regularize",
    "run",
    "train_tokenizer",
    "without_secrets",
    "write_model_card",
    "write_report",
    "write_scores",
]
