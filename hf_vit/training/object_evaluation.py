"""Scoring of saved models for objects and keypoints by scripts."""

from .evaluation import ScoredModel
from .keypoint_detection import KeypointDetection
from .object_arguments import DetectionImagesArguments, KeypointEvaluationArguments, KeypointImagesArguments
from .object_detection import ObjectDetection
from .scored_evaluation import ScoredEvaluation, ScoredEvaluationArguments


class DetectionEvaluation(ScoredEvaluation):
    """Scoring of object detection."""

    task_class = ObjectDetection
    argument_types = (ScoredModel, DetectionImagesArguments, ScoredEvaluationArguments)


class KeypointEvaluation(ScoredEvaluation):
    """Scoring of keypoints."""

    task_class = KeypointDetection
    examples = KeypointDetection.examples
    argument_types = (ScoredModel, KeypointImagesArguments, ScoredEvaluationArguments, KeypointEvaluationArguments)
