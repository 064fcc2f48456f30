"""The tasks that models are trained for and evaluated on, by name."""

from .base import Task
from .depth_estimation import DepthEstimation
from .image_classification import ImageClassification
from .image_text import ImageTextContrast
from .keypoint_detection import KeypointDetection
from .masked_image_modeling import MaskedImageModeling
from .object_detection import ObjectDetection
from .semantic_segmentation import SemanticSegmentation
from .universal_segmentation import UniversalSegmentation


TASKS: dict[str, type[Task]] = {
    "image_classification": ImageClassification,
    "semantic_segmentation": SemanticSegmentation,
    "universal_segmentation": UniversalSegmentation,
    "depth_estimation": DepthEstimation,
    "object_detection": ObjectDetection,
    "keypoint_detection": KeypointDetection,
    "masked_image_modeling": MaskedImageModeling,
    "image_text": ImageTextContrast,
}
