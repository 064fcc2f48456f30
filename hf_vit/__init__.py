"""One plain Vision Transformer for every vision task, as a Hugging Face plugin.

Importing the package registers its classes with the Auto classes of `transformers`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import transformers
from transformers import AutoConfig, AutoModelForImageSegmentation, AutoModelForKeypointDetection, AutoProcessor

# `transformers` itself exports a placeholder where torchvision is missing, in its older releases
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
from .model.pretrained import HfViTPreTrainedModel
from .model.processing_hf_vit import HfViTProcessor
from .model.remote_code import AUTO_MAP, PIPELINES, list_tasks
from .model.task_configurations import (
    HfViTContrastiveConfig,
    HfViTDepthConfig,
    HfViTDetectionConfig,
    HfViTJointEmbeddingConfig,
    HfViTKeypointConfig,
    HfViTMaskedImageModelingConfig,
    HfViTSegmentationConfig,
    HfViTTextConfig,
    HfViTUniversalSegmentationConfig,
)
from .model.task_depth_estimation import HfViTForDepthEstimation
from .model.task_image_classification import HfViTForImageClassification
from .model.task_joint_embedding import HfViTForJointEmbedding
from .model.task_keypoint_detection import HfViTForKeypointDetection, HfViTKeypointDetectionPipeline
from .model.task_masked_image_modeling import HfViTForMaskedImageModeling
from .model.task_object_detection import HfViTForObjectDetection
from .model.task_semantic_segmentation import HfViTForSemanticSegmentation
from .model.task_universal_segmentation import HfViTForUniversalSegmentation
from .model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification


if TYPE_CHECKING:
    from .api import evaluate, export_model, predict, train
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
# The stock pipeline asks for this class first; the checkpoint says which of the two it is.
segmentation_models = (HfViTForSemanticSegmentation, HfViTForUniversalSegmentation)
AutoModelForImageSegmentation.register(HfViTConfig, segmentation_models, exist_ok=True)
# Found by its name. Registered for `HfViTConfig`, it would be asked for where there is no text either.
AutoProcessor.register(HfViTTextConfig, HfViTProcessor, exist_ok=True)
AutoImageProcessor.register(HfViTConfig, image_processor_classes=image_processors, exist_ok=True)

PIPELINE_REGISTRY.register_pipeline(
    "keypoint-detection", HfViTKeypointDetectionPipeline, pt_model=AutoModelForKeypointDetection, type="image"
)
# What `pipeline(...)` makes for these tasks; a model of others gets the stock class from it. Not by a registration:
# that would forget which model is the default of a task.
for task, path in PIPELINES.values():
    PIPELINE_REGISTRY.supported_tasks[task]["impl"] = find_class(path)
HfViTConfig._has_pipelines = True

# What opens checkpoints of other libraries stays here: the files that travel with a checkpoint do without.
HfViTPreTrainedModel._convert_pretrained = staticmethod(convert_pretrained)
HfViTImageProcessorBase._converter = staticmethod(read_image_processor_file)

__version__ = "0.1.0"

# Imported at their first use: not all who open a model train, compile or export.
CALLS = {
    **dict.fromkeys(("evaluate", "export_model", "predict", "train"), ".api"),
    "list_families": ".convert.families",
    "list_recipes": ".options.names",
    "optimize_for_inference": ".inference.optimize",
    "pretrain": ".pretraining",
}


def __getattr__(name: str) -> Any:
    if name not in CALLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(CALLS[name], __name__))[name]


__all__ = [
    "HfViTBackbone",
    "HfViTConfig",
    "HfViTContrastiveConfig",
    "HfViTDepthConfig",
    "HfViTDetectionConfig",
    "HfViTForDepthEstimation",
    "HfViTForImageClassification",
    "HfViTForJointEmbedding",
    "HfViTForKeypointDetection",
    "HfViTForMaskedImageModeling",
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
    "HfViTPreTrainedModel",
    "HfViTProcessor",
    "HfViTSegmentationConfig",
    "HfViTTextConfig",
    "HfViTUniversalSegmentationConfig",
    "evaluate",
    "export_model",
    "list_families",
    "list_presets",
    "list_recipes",
    "list_tasks",
    "optimize_for_inference",
    "predict",
    "pretrain",
    "train",
]
