"""What a converted checkpoint can be saved for."""

from ..modeling_contrastive_hf_vit import HfViTForZeroShotImageClassification
from ..modeling_detection_hf_vit import HfViTForObjectDetection
from ..modeling_hf_vit import (
    HfViTForDepthEstimation,
    HfViTForImageClassification,
    HfViTForSemanticSegmentation,
    HfViTForUniversalSegmentation,
    HfViTModel,
)
from ..modeling_keypoints_hf_vit import HfViTForKeypointDetection
from ..modeling_mim_hf_vit import HfViTForMaskedImageModeling
from ..pretrained_hf_vit import HfViTPreTrainedModel


TASKS: dict[str, type[HfViTPreTrainedModel]] = {
    "features": HfViTModel,
    "image-classification": HfViTForImageClassification,
    "semantic-segmentation": HfViTForSemanticSegmentation,
    "universal-segmentation": HfViTForUniversalSegmentation,
    "depth-estimation": HfViTForDepthEstimation,
    "keypoint-detection": HfViTForKeypointDetection,
    "masked-image-modeling": HfViTForMaskedImageModeling,
    "object-detection": HfViTForObjectDetection,
    "zero-shot-image-classification": HfViTForZeroShotImageClassification,
}
