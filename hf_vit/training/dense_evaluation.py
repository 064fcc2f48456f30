"""Scoring of saved models for segmentation and depth by scripts."""

from .dense_arguments import (
    DepthEvaluationArguments,
    DepthImagesArguments,
    SemanticEvaluationArguments,
    SemanticImagesArguments,
    UniversalImagesArguments,
)
from .depth_estimation import DepthEstimation
from .evaluation import ScoredModel
from .scored_evaluation import ScoredEvaluation, ScoredEvaluationArguments
from .semantic_segmentation import SemanticSegmentation
from .universal_segmentation import UniversalSegmentation


class SemanticEvaluation(ScoredEvaluation):
    """Scoring of semantic segmentation."""

    task_class = SemanticSegmentation
    argument_types = (ScoredModel, SemanticImagesArguments, ScoredEvaluationArguments, SemanticEvaluationArguments)


class UniversalEvaluation(ScoredEvaluation):
    """Scoring of universal segmentation."""

    task_class = UniversalSegmentation
    argument_types = (ScoredModel, UniversalImagesArguments, ScoredEvaluationArguments)


class DepthEvaluation(ScoredEvaluation):
    """Scoring of depth."""

    task_class = DepthEstimation
    argument_types = (ScoredModel, DepthImagesArguments, ScoredEvaluationArguments, DepthEvaluationArguments)
