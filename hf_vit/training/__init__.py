"""A thin layer on the library's Trainer: arguments, metrics, safe saving, publishing and model cards."""

from .arguments import (
    AugmentationArguments,
    DataArguments,
    HfViTTrainingArguments,
    ModelArguments,
    TrainingDataArguments,
    parse_arguments,
)
from .binary_cross_entropy import BinaryCrossEntropy
from .checkpoints import check_labels, checkpoint_to_resume, last_checkpoint
from .classification_evaluation import ImageClassificationEvaluation
from .dense_evaluation import DepthEvaluation, SemanticEvaluation, UniversalEvaluation
from .depth_estimation import DepthEstimation, DepthScorer
from .distillation import DistillationArguments, make_distillation
from .distilled_loss import Distillation
from .evaluation import evaluate
from .feature_distillation import FeatureDistillation
from .flops import forward_flops
from .freezing import freeze
from .hub import check_upload, list_upload, publish
from .image_classification import (
    ImageClassification,
    load_classifier,
    make_trainer,
    write_report,
)
from .image_text import ImageTextContrast
from .image_text_evaluation import ImageTextEvaluation
from .image_text_scorer import ImageTextScorer, ImageTextTrainer
from .keypoint_detection import KeypointDetection, KeypointScorer
from .load_data import load_scored_split, load_splits
from .masked_image_modeling import MaskedImageModeling
from .masked_image_scorer import MaskedImageScorer
from .metrics import image_classification_metrics, majority_baseline
from .mixing import Mixing
from .model_card import TrainingRecord, write_model_card
from .muon import Muon
from .neighbour_trainer import NeighbourTrainer
from .object_detection import DetectionScorer, ObjectDetection
from .object_evaluation import DetectionEvaluation, KeypointEvaluation
from .optimization_arguments import OptimizationArguments
from .parameter_groups import make_parameter_groups
from .recipe import begin_recipe, without_secrets
from .regularisation import regularise
from .regularisation_arguments import RegularisationArguments
from .report import write_scores
from .scorer import ImageScorer, Scored, Scorer
from .scoring_trainer import ScoringTrainer
from .semantic_segmentation import SemanticScorer, SemanticSegmentation
from .sizes import MultiScaleSizes, ProgressiveSizes
from .stops import CheckpointError, ExampleError, NotFiniteError, Preempted
from .task import TrainingTask, run
from .teacher import Teacher
from .token_distillation import TokenDistillation
from .token_dropping import DropTokens
from .tokenizer import train_tokenizer
from .trainer import HfViTTrainer
from .universal_metric import UniversalMetric
from .universal_segmentation import MaskAnnealing, UniversalScorer, UniversalSegmentation


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
