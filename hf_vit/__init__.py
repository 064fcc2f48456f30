"""One plain Vision Transformer for every vision task, as a Hugging Face plugin.

Importing the package registers its classes with the Auto classes of `transformers`.
"""

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForImageSegmentation,
    AutoModelForKeypointDetection,
    AutoModelForMaskedImageModeling,
    AutoModelForObjectDetection,
    AutoModelForSemanticSegmentation,
    AutoModelForUniversalSegmentation,
    AutoModelForZeroShotImageClassification,
    AutoProcessor,
)

# `transformers` itself exports a placeholder where torchvision is missing, in its older releases
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.utils import is_torchvision_available

from .configuration_hf_vit import HfViTConfig
from .configuration_objects_hf_vit import HfViTDetectionConfig, HfViTKeypointConfig
from .configuration_tasks_hf_vit import (
    HfViTDepthConfig,
    HfViTMaskedImageModelingConfig,
    HfViTSegmentationConfig,
    HfViTUniversalSegmentationConfig,
)
from .configuration_text_hf_vit import HfViTContrastiveConfig, HfViTTextConfig
from .convert import read_image_processor_file, read_published
from .image_processing_hf_vit import HfViTImageProcessor
from .image_processing_pil_hf_vit import HfViTImageProcessorPil
from .image_processing_shared_hf_vit import HfViTImageProcessorBase
from .modeling_contrastive_hf_vit import HfViTForZeroShotImageClassification
from .modeling_detection_hf_vit import HfViTForObjectDetection
from .modeling_hf_vit import (
    HfViTBackbone,
    HfViTForDepthEstimation,
    HfViTForImageClassification,
    HfViTForSemanticSegmentation,
    HfViTForUniversalSegmentation,
    HfViTModel,
)
from .modeling_keypoints_hf_vit import HfViTForKeypointDetection
from .modeling_mim_hf_vit import HfViTForMaskedImageModeling
from .outputs_hf_vit import (
    HfViTForUniversalSegmentationOutput,
    HfViTImageClassifierOutput,
    HfViTKeypointDetectionOutput,
    HfViTMaskedImageModelingOutput,
    HfViTObjectDetectionOutput,
    HfViTSemanticSegmenterOutput,
)
from .pipeline_hf_vit import HfViTKeypointDetectionPipeline
from .pretrained_hf_vit import HfViTPreTrainedModel
from .processing_hf_vit import HfViTProcessor
from .task_classification import soften_labels


image_processors = {"torchvision": HfViTImageProcessor, "pil": HfViTImageProcessorPil}
if not is_torchvision_available():
    del image_processors["torchvision"]

AutoConfig.register("hf_vit", HfViTConfig, exist_ok=True)
AutoModel.register(HfViTConfig, HfViTModel, exist_ok=True)
AutoBackbone.register(HfViTConfig, HfViTBackbone, exist_ok=True)
AutoModelForImageClassification.register(HfViTConfig, HfViTForImageClassification, exist_ok=True)
AutoModelForSemanticSegmentation.register(HfViTConfig, HfViTForSemanticSegmentation, exist_ok=True)
AutoModelForUniversalSegmentation.register(HfViTConfig, HfViTForUniversalSegmentation, exist_ok=True)
# The stock pipeline asks for this class first; the checkpoint says which of the two it is.
segmentation_models = (HfViTForSemanticSegmentation, HfViTForUniversalSegmentation)
AutoModelForImageSegmentation.register(HfViTConfig, segmentation_models, exist_ok=True)
AutoModelForDepthEstimation.register(HfViTConfig, HfViTForDepthEstimation, exist_ok=True)
AutoModelForKeypointDetection.register(HfViTConfig, HfViTForKeypointDetection, exist_ok=True)
AutoModelForMaskedImageModeling.register(HfViTConfig, HfViTForMaskedImageModeling, exist_ok=True)
AutoModelForObjectDetection.register(HfViTConfig, HfViTForObjectDetection, exist_ok=True)
AutoModelForZeroShotImageClassification.register(HfViTConfig, HfViTForZeroShotImageClassification, exist_ok=True)
# Found by its name. Registered for `HfViTConfig`, it would be asked for where there is no text either.
AutoProcessor.register(HfViTTextConfig, HfViTProcessor, exist_ok=True)
AutoImageProcessor.register(HfViTConfig, image_processor_classes=image_processors, exist_ok=True)

PIPELINE_REGISTRY.register_pipeline(
    "keypoint-detection", HfViTKeypointDetectionPipeline, pt_model=AutoModelForKeypointDetection, type="image"
)
HfViTConfig._has_pipelines = True

# What opens checkpoints of other libraries stays here: the files that travel with a checkpoint do without.
HfViTPreTrainedModel._read_published = staticmethod(read_published)
HfViTImageProcessorBase._converter = staticmethod(read_image_processor_file)

__version__ = "0.1.0"

__all__ = [
    "HfViTBackbone",
    "HfViTConfig",
    "HfViTContrastiveConfig",
    "HfViTDepthConfig",
    "HfViTDetectionConfig",
    "HfViTForDepthEstimation",
    "HfViTForImageClassification",
    "HfViTForKeypointDetection",
    "HfViTForMaskedImageModeling",
    "HfViTForObjectDetection",
    "HfViTForSemanticSegmentation",
    "HfViTForUniversalSegmentation",
    "HfViTForUniversalSegmentationOutput",
    "HfViTForZeroShotImageClassification",
    "HfViTImageClassifierOutput",
    "HfViTImageProcessor",
    "HfViTImageProcessorPil",
    "HfViTKeypointConfig",
    "HfViTKeypointDetectionOutput",
    "HfViTKeypointDetectionPipeline",
    "HfViTMaskedImageModelingConfig",
    "HfViTMaskedImageModelingOutput",
    "HfViTModel",
    "HfViTObjectDetectionOutput",
    "HfViTPreTrainedModel",
    "HfViTProcessor",
    "HfViTSegmentationConfig",
    "HfViTSemanticSegmenterOutput",
    "HfViTTextConfig",
    "HfViTUniversalSegmentationConfig",
    "soften_labels",
]
