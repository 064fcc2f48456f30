"""Plain Vision Transformers for image classification, segmentation, depth, detection, keypoints and pretraining.

Importing the package registers its classes with the Auto classes of `transformers`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import transformers
from transformers import (
    AutoConfig,
    AutoModelForImageSegmentation,
    AutoModelForKeypointDetection,
    AutoModelForPreTraining,
    AutoProcessor,
)

# AutoImageProcessor is imported from its submodule: if torchvision is missing, older releases of `transformers` export
# a placeholder.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.utils import is_torchvision_available

from .convert.image_processor import read_image_processor_file
from .convert.loading import convert_pretrained, find_class
from .model.configuration_hf_vit import HfViTConfig, list_presets
from .model.image_processing_base import HfViTImageProcessorBase
from .model.image_processing_hf_vit import HfViTImageProcessor
from .model.image_processing_pil_hf_vit import HfViTImageProcessorPil
from .model.modeling_hf_vit import HfViTBackbone, HfViTModel
from .model.nested_options import HfViTMultiTaskConfig
from .model.pretrained import HfViTPreTrainedModel
from .model.processing_hf_vit import HfViTProcessor
from .model.remote_code import AUTO_MAP, PIPELINES, list_tasks
from .model.task_configurations import (
    HfViTCaptionConfig,
    HfViTContrastiveConfig,
    HfViTDepthConfig,
    HfViTDetectionConfig,
    HfViTJointEmbeddingConfig,
    HfViTKeypointConfig,
    HfViTMaskedImageModelingConfig,
    HfViTReconstructionConfig,
    HfViTSegmentationConfig,
    HfViTTextConfig,
    HfViTUniversalSegmentationConfig,
)
from .model.task_depth_estimation import HfViTForDepthEstimation
from .model.task_image_captioning import HfViTForImageTextToText
from .model.task_image_classification import HfViTForImageClassification
from .model.task_image_reconstruction import HfViTForImageReconstruction
from .model.task_joint_embedding import HfViTForJointEmbedding
from .model.task_keypoint_detection import HfViTForKeypointDetection, HfViTKeypointDetectionPipeline
from .model.task_masked_image_modeling import HfViTForMaskedImageModeling
from .model.task_multi_task import HfViTForMultiTask, HfViTMultiTaskPipeline
from .model.task_object_detection import HfViTForObjectDetection
from .model.task_semantic_segmentation import HfViTForSemanticSegmentation
from .model.task_universal_segmentation import HfViTForUniversalSegmentation
from .model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification


if TYPE_CHECKING:
    from .api import audit, calibrate, convert_model, evaluate, evaluate_features, export_model, extract_features

    # isort: split
    from .api import info, predict, push, search, select, serve, train, visualize_model

    # isort: split
    from .convert.families import list_families
    from .inference.optimize import optimize_for_inference
    from .options.names import list_recipes
    from .pretraining import pretrain

image_processors = {"torchvision": HfViTImageProcessor, "pil": HfViTImageProcessorPil}
if not is_torchvision_available():
    del image_processors["torchvision"]

AutoConfig.register("hf_vit", HfViTConfig, exist_ok=True)
for auto_class, path in AUTO_MAP.items():
    if auto_class != "AutoConfig":
        getattr(transformers, auto_class).register(HfViTConfig, find_class(path), exist_ok=True)
# The segmentation pipeline tries AutoModelForImageSegmentation first. config.json (`architectures`) names the class.
segmentation_models = (HfViTForSemanticSegmentation, HfViTForUniversalSegmentation)
AutoModelForImageSegmentation.register(HfViTConfig, segmentation_models, exist_ok=True)
AutoModelForPreTraining.register(HfViTConfig, (HfViTForJointEmbedding, HfViTForMultiTask), exist_ok=True)
# AutoProcessor finds HfViTProcessor by the class name in a checkpoint. The processor is registered for the text
# configuration only, because a processor registered for `HfViTConfig` would also be loaded for image models.
AutoProcessor.register(HfViTTextConfig, HfViTProcessor, exist_ok=True)
AutoImageProcessor.register(HfViTConfig, image_processor_classes=image_processors, exist_ok=True)

PIPELINE_REGISTRY.register_pipeline(
    "keypoint-detection", HfViTKeypointDetectionPipeline, pt_model=AutoModelForKeypointDetection, type="image"
)
PIPELINE_REGISTRY.register_pipeline(
    "multi-task", HfViTMultiTaskPipeline, pt_model=AutoModelForPreTraining, type="image"
)
# The pipeline classes of the supported tasks are replaced. For models of other libraries, the new classes return the
# original pipeline. `register_pipeline` is not used because it would remove the default model of each task.
for task, path in PIPELINES.values():
    PIPELINE_REGISTRY.supported_tasks[task]["impl"] = find_class(path)
HfViTConfig._has_pipelines = True

# These hooks open checkpoints of other libraries. They are set here because model files are saved with checkpoints as
# remote code and must not import the conversion.
HfViTPreTrainedModel._convert_pretrained = staticmethod(convert_pretrained)
HfViTImageProcessorBase._converter = staticmethod(read_image_processor_file)

__version__ = "0.1.0"

# Modules of the public functions that `api` does not contain. Functions are imported on first access, so that opening
# a model does not import training and export code.
CALLS = {
    "list_families": ".convert.families",
    "list_recipes": ".options.names",
    "optimize_for_inference": ".inference.optimize",
    "pretrain": ".pretraining",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(CALLS.get(name, ".api"), __name__))[name]


__all__ = [
    "HfViTBackbone",
    "HfViTCaptionConfig",
    "HfViTConfig",
    "HfViTContrastiveConfig",
    "HfViTDepthConfig",
    "HfViTDetectionConfig",
    "HfViTForDepthEstimation",
    "HfViTForImageClassification",
    "HfViTForImageReconstruction",
    "HfViTForImageTextToText",
    "HfViTForJointEmbedding",
    "HfViTForKeypointDetection",
    "HfViTForMaskedImageModeling",
    "HfViTForMultiTask",
    "HfViTForObjectDetection",
    "HfViTForSemanticSegmentation",
    "HfViTForUniversalSegmentation",
    "HfViTForZeroShotImageClassification",
    "HfViTImageProcessor",
    "HfViTImageProcessorPil",
    "HfViTJointEmbeddingConfig",
    "HfViTKeypointConfig",
    "HfViTMaskedImageModelingConfig",
    "HfViTModel",
    "HfViTMultiTaskConfig",
    "HfViTPreTrainedModel",
    "HfViTProcessor",
    "HfViTReconstructionConfig",
    "HfViTSegmentationConfig",
    "HfViTTextConfig",
    "HfViTUniversalSegmentationConfig",
    "audit",
    "calibrate",
    "convert_model",
    "evaluate",
    "evaluate_features",
    "export_model",
    "extract_features",
    "info",
    "list_families",
    "list_presets",
    "list_recipes",
    "list_tasks",
    "optimize_for_inference",
    "predict",
    "pretrain",
    "push",
    "search",
    "select",
    "serve",
    "train",
    "visualize_model",
]
