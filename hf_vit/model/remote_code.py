"""Auto classes, pipelines and source code that are saved with checkpoints, and checks before access to the Hub."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import get_session


HUB_TIMEOUT_SECONDS = 5  # time limit for testing the connection to the Hub
TASKS = (
    *("image-classification", "semantic-segmentation", "universal-segmentation", "depth-estimation"),
    *("keypoint-detection", "masked-image-modeling", "object-detection", "joint-embedding"),
    *("image-reconstruction", "zero-shot-image-classification", "image-captioning", "multi-task"),
)
CLASS_NAMES = {"image-captioning": "ImageTextToText"}  # class names that differ from the task name

# Maps a task to the name of its Auto class, if it differs from the task name.
OTHER_CLASSES = {
    **dict.fromkeys(("multi-task", "joint-embedding"), "AutoModelForPreTraining"),
    "image-reconstruction": "AutoModelForImageToImage",
}


def class_path(task: str, form: str = "HfViTFor{}") -> str:
    """Returns the file and class name of a task, joined by a dot; `form` is a template for the class name."""
    return f"task_{task.replace('-', '_')}.{form.format(camel_case(task))}"


def camel_case(task: str) -> str:
    """Returns a task name in camel case as used in class names, such as "DepthEstimation"."""
    return CLASS_NAMES.get(task) or task.title().replace("-", "")


# Auto classes that open a saved model if `hf_vit` is not installed
AUTO_MAP = {
    "AutoConfig": "configuration_hf_vit.HfViTConfig",
    "AutoModel": "modeling_hf_vit.HfViTModel",
    "AutoBackbone": "modeling_hf_vit.HfViTBackbone",
    **{f"AutoModelFor{camel_case(task)}": class_path(task) for task in TASKS if task not in OTHER_CLASSES},
    **{auto_class: class_path(task) for task, auto_class in OTHER_CLASSES.items()},
    # transformers' segmentation pipeline tries this Auto class first. `HfViTConfig.save_pretrained` replaces the entry
    # for universal segmentation models, and "AutoModelForPreTraining" for multi-task models.
    "AutoModelForImageSegmentation": class_path("semantic-segmentation"),
}
FEATURES = "image-feature-extraction"  # pipeline task for models with any head
SEGMENTATION = ("image-segmentation", "task_semantic_segmentation.HfViTImageSegmentationPipeline")
TASKS_WITH_PIPELINE = (
    *("image-classification", "depth-estimation", "keypoint-detection", "object-detection"),
    "zero-shot-image-classification",
)
# Maps the Auto class of a model to its pipeline task and to the file and class of the pipeline.
PIPELINES = {
    "AutoModel": (FEATURES, "modeling_hf_vit.HfViTImageFeatureExtractionPipeline"),
    **{f"AutoModelFor{camel_case(task)}": (task, class_path(task, "HfViT{}Pipeline")) for task in TASKS_WITH_PIPELINE},
    **{f"AutoModelFor{kind}Segmentation": SEGMENTATION for kind in ("Semantic", "Universal")},
    "AutoModelForImageTextToText": ("image-text-to-text", class_path("image-captioning", "HfViT{}Pipeline")),
}
# Pipeline of each model class in the format of config.json. Each class has one task, so its pipeline is unambiguous.
CUSTOM_PIPELINES: dict[str, dict[str, dict[str, Any]]] = {
    AUTO_MAP[auto_class].partition(".")[2]: {task: {"impl": impl, "pt": [auto_class], "type": "image"}}
    for auto_class, (task, impl) in PIPELINES.items()
}
for task in ("MaskedImageModeling", "JointEmbedding", "ImageReconstruction"):
    CUSTOM_PIPELINES[f"HfViTFor{task}"] = CUSTOM_PIPELINES["HfViTModel"]
MULTI_TASK = {"impl": class_path("multi-task", "HfViT{}Pipeline"), "pt": ["AutoModelForPreTraining"], "type": "image"}
CUSTOM_PIPELINES["HfViTForMultiTask"] = {"multi-task": MULTI_TASK}


def list_tasks() -> list[str]:
    """Returns the names of all tasks, as accepted by the command line and by `train`."""
    return list(TASKS)


def pipelines_of(architectures: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the entry of config.json that lists the pipelines of the given model classes."""
    return {task: entry for name in architectures for task, entry in CUSTOM_PIPELINES.get(name, {}).items()}


def check_pipeline(name: str, architectures: list[str], task: str | None) -> None:
    """Raises `ValueError` if a checkpoint has no head for `task`, given the classes `architectures` of its heads."""
    # Without this check, transformers would use its own pipeline with an untrained head if hf_vit is not installed.
    if task not in {known for known, _ in PIPELINES.values()} - {FEATURES} or not architectures:
        return
    own = pipelines_of(architectures) or CUSTOM_PIPELINES["HfViTModel"]
    if task not in own:
        raise ValueError(
            f"{name} was saved as {architectures[0]} and has no trained head for {task!r}. Use the pipeline task "
            f"{' or '.join(map(repr, dict.fromkeys([*own, FEATURES])))}, or a model trained for {task!r}."
        )


def copy_code(save_directory: str | os.PathLike[str]) -> None:
    """Copies the source files of this folder into `save_directory`, so that checkpoints open without the package."""
    # The copy function of transformers finds files by the class of the saved object, but FSDP2 replaces that class.
    target = Path(save_directory)
    target.mkdir(parents=True, exist_ok=True)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        if source.name != "__init__.py" and source.parent.resolve() != target.resolve():
            shutil.copyfile(source, target / source.name)


@lru_cache
def is_hub_reachable(endpoint: str) -> bool:
    """Returns whether the Hub at `endpoint` responds. The result is cached to avoid a timeout for every file."""
    try:
        get_session().head(endpoint, timeout=HUB_TIMEOUT_SECONDS)
    except Exception:  # the exception classes depend on the HTTP client
        return False
    return True


def is_repository_available(
    name: str, kind: str = "model", cache_dir: Any = None, local_files_only: bool = False
) -> bool:
    """Returns whether a repository can be opened, because it is in the cache or the Hub responds."""
    cached = Path(cache_dir or constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind))
    is_offline = local_files_only or constants.HF_HUB_OFFLINE
    return cached.is_dir() or (not is_offline and is_hub_reachable(constants.ENDPOINT))


def check_reachable(
    name_or_path: str | os.PathLike[str], cache_dir: Any = None, local_files_only: bool = False, **_: Any
) -> None:
    """Raises `OSError` unless a path exists or a repository is in the cache or on a Hub that can be reached."""
    name, path = str(name_or_path), Path(name_or_path)
    if path.exists():
        return
    if path.is_absolute() or len(path.parts) > 2:  # names on the Hub have at most two parts
        raise OSError(f"There is no folder or file {name!r}, and it is not a valid name on the Hub.")
    if not is_repository_available(name, "model", cache_dir, local_files_only):
        raise OSError(
            f"There is no folder or file {name!r}, it is not in the cache, and the Hub cannot be reached. Check the "
            "path, the network connection and HF_HUB_OFFLINE."
        )


class RemoteCodeError(ValueError):
    """Raised if a repository can only be loaded by running its own Python code, which the user has not allowed."""


@contextmanager
def raising_remote_code_error(name: Any, cure: str) -> Iterator[None]:
    """Context manager that raises `RemoteCodeError` if transformers refuses to run code of the repository `name`."""
    try:
        yield
    except ValueError as error:
        # The message of transformers varies, but always contains the argument `trust_remote_code=True`.
        if "`trust_remote_code=True`" not in str(error):
            raise
        raise RemoteCodeError(f"{str(name)!r} has custom code and can be loaded only by running it. {cure}") from error


def _import_saved_files() -> None:
    """Imports all files that a checkpoint needs. It is never called: transformers only parses the imports."""
    from .image_processing_hf_vit import HfViTImageProcessor  # noqa: F401
    from .image_processing_pil_hf_vit import HfViTImageProcessorPil  # noqa: F401
    from .modeling_hf_vit import HfViTModel  # noqa: F401
    from .processing_hf_vit import HfViTProcessor  # noqa: F401
    from .task_depth_estimation import HfViTForDepthEstimation  # noqa: F401
    from .task_image_captioning import HfViTForImageTextToText  # noqa: F401
    from .task_image_classification import HfViTForImageClassification  # noqa: F401
    from .task_image_reconstruction import HfViTForImageReconstruction  # noqa: F401
    from .task_joint_embedding import HfViTForJointEmbedding  # noqa: F401
    from .task_keypoint_detection import HfViTForKeypointDetection  # noqa: F401
    from .task_masked_image_modeling import HfViTForMaskedImageModeling  # noqa: F401
    from .task_multi_task import HfViTForMultiTask  # noqa: F401
    from .task_object_detection import HfViTForObjectDetection  # noqa: F401
    from .task_semantic_segmentation import HfViTForSemanticSegmentation  # noqa: F401
    from .task_universal_segmentation import HfViTForUniversalSegmentation  # noqa: F401
    from .task_zero_shot_image_classification import HfViTForZeroShotImageClassification  # noqa: F401
