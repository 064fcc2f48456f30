"""A thin layer on the library's Trainer: arguments, metrics, safe saving, publishing and model cards."""

from ..evaluation.classification import image_classification_metrics, majority_baseline
from ..evaluation.evaluator import ImageScorer, Scored, Scorer
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
from .distillation.features import FeatureDistillation
from .distillation.teacher import Teacher
from .distillation.tokens import TokenDistillation
from .errors import CheckpointError, ExampleError, NotFiniteError, Preempted
from .load_data import load_scored_split, load_splits
from .optim.arguments import OptimizationArguments
from .optim.muon import Muon
from .optim.parameter_groups import freeze, make_parameter_groups
from .publishing.hub import check_upload, list_upload, publish
from .publishing.model_card import TrainingRecord, write_model_card
from .publishing.report import write_scores
from .recipe import begin_recipe, without_secrets
from .regularization import BinaryCrossEntropy, DropTokens, RegularisationArguments, regularise
from .scoring_trainer import ScoringTrainer
from .tasks.base import TrainingTask, run
from .tasks.depth_estimation import DepthEstimation, DepthEvaluation, DepthScorer
from .tasks.evaluation import evaluate
from .tasks.image_classification import (
    ImageClassification,
    ImageClassificationEvaluation,
    load_classifier,
    make_trainer,
    write_report,
)
from .tasks.image_text import ImageTextContrast, ImageTextEvaluation, ImageTextScorer, ImageTextTrainer
from .tasks.keypoint_detection import KeypointDetection, KeypointEvaluation, KeypointScorer
from .tasks.masked_image_modeling import MaskedImageModeling, MaskedImageScorer, NeighbourTrainer
from .tasks.object_detection import DetectionEvaluation, DetectionScorer, ObjectDetection
from .tasks.semantic_segmentation import SemanticEvaluation, SemanticScorer, SemanticSegmentation
from .tasks.tokenizer import train_tokenizer
from .tasks.universal_segmentation import MaskAnnealing, UniversalEvaluation, UniversalScorer, UniversalSegmentation
from .trainer import HfViTTrainer


__all__ = [
    "AugmentationArguments",
    "BinaryCrossEntropy",
    "CheckpointError",
    "DataArguments",
    "DepthEstimation",
    "DepthEvaluation",
    "DepthScorer",
    "DetectionEvaluation",
    "DetectionScorer",
    "Distillation",
    "DistillationArguments",
    "DropTokens",
    "ExampleError",
    "FeatureDistillation",
    "HfViTTrainer",
    "HfViTTrainingArguments",
    "ImageClassification",
    "ImageClassificationEvaluation",
    "ImageScorer",
    "ImageTextContrast",
    "ImageTextEvaluation",
    "ImageTextScorer",
    "ImageTextTrainer",
    "KeypointDetection",
    "KeypointEvaluation",
    "KeypointScorer",
    "MaskAnnealing",
    "MaskedImageModeling",
    "MaskedImageScorer",
    "Mixing",
    "ModelArguments",
    "MultiScaleSizes",
    "Muon",
    "NeighbourTrainer",
    "NotFiniteError",
    "ObjectDetection",
    "OptimizationArguments",
    "Preempted",
    "ProgressiveSizes",
    "RegularisationArguments",
    "Scored",
    "Scorer",
    "ScoringTrainer",
    "SemanticEvaluation",
    "SemanticScorer",
    "SemanticSegmentation",
    "Teacher",
    "TokenDistillation",
    "TrainingDataArguments",
    "TrainingRecord",
    "TrainingTask",
    "UniversalEvaluation",
    "UniversalMetric",
    "UniversalScorer",
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
    "regularise",
    "run",
    "train_tokenizer",
    "without_secrets",
    "write_model_card",
    "write_report",
    "write_scores",
]
