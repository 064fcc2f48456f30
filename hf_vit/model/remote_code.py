"""What travels with every checkpoint, where in it the Auto classes find ours, other code, and a Hub out of reach."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import LocalEntryNotFoundError
from transformers.utils import CONFIG_NAME, cached_file


# Every Auto class a saved folder opens under when `hf_vit` is not installed.
AUTO_MAP = {
    "AutoConfig": "configuration_hf_vit.HfViTConfig",
    "AutoModel": "modeling_hf_vit.HfViTModel",
    "AutoBackbone": "modeling_hf_vit.HfViTBackbone",
    "AutoModelForImageClassification": "task_classification.HfViTForImageClassification",
    # The stock pipeline asks for this class first; `HfViTConfig.save_pretrained` says where it is a universal one.
    "AutoModelForImageSegmentation": "task_segmentation.HfViTForSemanticSegmentation",
    "AutoModelForSemanticSegmentation": "task_segmentation.HfViTForSemanticSegmentation",
    "AutoModelForUniversalSegmentation": "task_universal_segmentation.HfViTForUniversalSegmentation",
    "AutoModelForDepthEstimation": "task_depth.HfViTForDepthEstimation",
    "AutoModelForKeypointDetection": "task_keypoints.HfViTForKeypointDetection",
    "AutoModelForMaskedImageModeling": "task_mim.HfViTForMaskedImageModeling",
    "AutoModelForObjectDetection": "task_detection.HfViTForObjectDetection",
    "AutoModelForPreTraining": "task_joint_embedding.HfViTForJointEmbedding",
    "AutoModelForZeroShotImageClassification": "task_contrastive.HfViTForZeroShotImageClassification",
}
# By the Auto class of a model, the task that it opens for by its name, and the class of its pipeline
PIPELINES = {
    "AutoModel": ("image-feature-extraction", "modeling_hf_vit.HfViTImageFeatureExtractionPipeline"),
    "AutoModelForImageClassification": (
        "image-classification",
        "task_classification.HfViTImageClassificationPipeline",
    ),
    "AutoModelForSemanticSegmentation": ("image-segmentation", "task_segmentation.HfViTImageSegmentationPipeline"),
    "AutoModelForUniversalSegmentation": ("image-segmentation", "task_segmentation.HfViTImageSegmentationPipeline"),
    "AutoModelForDepthEstimation": ("depth-estimation", "task_depth.HfViTDepthEstimationPipeline"),
    "AutoModelForKeypointDetection": ("keypoint-detection", "task_keypoints.HfViTKeypointDetectionPipeline"),
    "AutoModelForObjectDetection": ("object-detection", "task_detection.HfViTObjectDetectionPipeline"),
    "AutoModelForZeroShotImageClassification": (
        "zero-shot-image-classification",
        "task_contrastive.HfViTZeroShotImageClassificationPipeline",
    ),
}
# The same as config.json has it, one task for each model: among several the library would not know which one is meant
CUSTOM_PIPELINES: dict[str, dict[str, dict[str, Any]]] = {
    AUTO_MAP[auto_class].partition(".")[2]: {task: {"impl": impl, "pt": [auto_class], "type": "image"}}
    for auto_class, (task, impl) in PIPELINES.items()
}
CUSTOM_PIPELINES["HfViTForMaskedImageModeling"] = CUSTOM_PIPELINES["HfViTModel"]
CUSTOM_PIPELINES["HfViTForJointEmbedding"] = CUSTOM_PIPELINES["HfViTModel"]


def copy_code(save_directory: str | os.PathLike[str]) -> None:
    """Copies the flat source files beside this one into `save_directory`, so that the folder opens anywhere."""
    # The library's own copier goes by the class of the saved object, which FSDP2 replaces by one of torch's.
    target = Path(save_directory)
    target.mkdir(parents=True, exist_ok=True)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        if source.name != "__init__.py" and source.parent.resolve() != target.resolve():
            shutil.copyfile(source, target / source.name)


def check_reachable(name_or_path: str | os.PathLike[str], **hub: Any) -> None:
    """Raises `OSError` if something that is no folder or file is not in the cache either, and the Hub out of reach."""
    # Otherwise a file that is missing and a Hub that does not answer look the same. `hub` is for `cached_file`.
    if os.path.exists(name_or_path):
        return
    try:
        cached_file(str(name_or_path), CONFIG_NAME, **hub)
    except OSError as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            raise OSError(
                f"The Hub cannot be reached, and {str(name_or_path)!r} is neither a folder here nor in the cache. "
                "Check the network (and HF_HUB_OFFLINE), or give the folder of a saved model."
            ) from error


class RemoteCodeError(ValueError):
    """A repository opens only with Python code of its own, which nobody has let run."""


@contextmanager
def refusing_code(name: Any, cure: str) -> Iterator[None]:
    """Turns the library's refusal to run code of the repository `name` into a `RemoteCodeError`, with its `cure`."""
    try:
        yield
    except ValueError as error:
        # It refuses in several places and words, that of a model among the traces of all classes that were tried.
        if "`trust_remote_code=True`" not in str(error):
            raise
        raise RemoteCodeError(f"{str(name)!r} brings code of its own, and opens only by running it. {cure}") from error


def _travel_together() -> tuple[Any, ...]:
    """Never called. The library finds the files of a checkpoint by the text of its imports; here it finds them all."""
    from .fast_inference import optimize_for_inference
    from .image_processing_hf_vit import HfViTImageProcessor
    from .image_processing_pil_hf_vit import HfViTImageProcessorPil
    from .modeling_hf_vit import HfViTModel
    from .processing_hf_vit import HfViTProcessor
    from .task_classification import HfViTForImageClassification
    from .task_contrastive import HfViTForZeroShotImageClassification
    from .task_depth import HfViTForDepthEstimation
    from .task_detection import HfViTForObjectDetection
    from .task_joint_embedding import HfViTForJointEmbedding
    from .task_keypoints import HfViTForKeypointDetection
    from .task_mim import HfViTForMaskedImageModeling
    from .task_segmentation import HfViTForSemanticSegmentation
    from .task_universal_segmentation import HfViTForUniversalSegmentation

    processors = (HfViTProcessor, HfViTImageProcessor, HfViTImageProcessorPil)
    models = (
        HfViTModel,
        HfViTForDepthEstimation,
        HfViTForUniversalSegmentation,
        HfViTForSemanticSegmentation,
        HfViTForImageClassification,
        HfViTForObjectDetection,
        HfViTForKeypointDetection,
        HfViTForMaskedImageModeling,
        HfViTForJointEmbedding,
        HfViTForZeroShotImageClassification,
    )
    return *models, *processors, optimize_for_inference
