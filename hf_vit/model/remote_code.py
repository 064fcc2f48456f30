"""What travels with every checkpoint, where in it the Auto classes find ours, other code, and a Hub out of reach."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import get_session


REACH_SECONDS = 5  # that the Hub may take to answer
TASKS = (
    *("image-classification", "semantic-segmentation", "universal-segmentation", "depth-estimation"),
    *("keypoint-detection", "masked-image-modeling", "object-detection", "joint-embedding"),
    "zero-shot-image-classification",
)


def class_path(task: str, form: str = "HfViTFor{}") -> str:
    """Return the file and name of the class of a task, whose name in camel case fills `form`."""
    return f"task_{task.replace('-', '_')}.{form.format(camel_case(task))}"


def camel_case(task: str) -> str:
    """Return the name of a task as in names of classes, such as "DepthEstimation"."""
    return task.title().replace("-", "")


# Every Auto class a saved folder opens under when `hf_vit` is not installed.
AUTO_MAP = {
    "AutoConfig": "configuration_hf_vit.HfViTConfig",
    "AutoModel": "modeling_hf_vit.HfViTModel",
    "AutoBackbone": "modeling_hf_vit.HfViTBackbone",
    **{f"AutoModelFor{camel_case(task)}": class_path(task) for task in TASKS if task != "joint-embedding"},
    # The stock pipeline asks for this class first; `HfViTConfig.save_pretrained` says where it is a universal one.
    "AutoModelForImageSegmentation": class_path("semantic-segmentation"),
    "AutoModelForPreTraining": class_path("joint-embedding"),
}
FEATURES = "image-feature-extraction"  # of models with any head
SEGMENTATION = ("image-segmentation", "task_semantic_segmentation.HfViTImageSegmentationPipeline")
WITH_PIPELINES = (
    *("image-classification", "depth-estimation", "keypoint-detection", "object-detection"),
    "zero-shot-image-classification",
)
# By the Auto class of a model, the task that it opens for by its name, and the class of its pipeline
PIPELINES = {
    "AutoModel": (FEATURES, "modeling_hf_vit.HfViTImageFeatureExtractionPipeline"),
    **{f"AutoModelFor{camel_case(task)}": (task, class_path(task, "HfViT{}Pipeline")) for task in WITH_PIPELINES},
    **{f"AutoModelFor{kind}Segmentation": SEGMENTATION for kind in ("Semantic", "Universal")},
}
# The same as config.json has it, one task for each model: among several the library would not know which one is meant
CUSTOM_PIPELINES: dict[str, dict[str, dict[str, Any]]] = {
    AUTO_MAP[auto_class].partition(".")[2]: {task: {"impl": impl, "pt": [auto_class], "type": "image"}}
    for auto_class, (task, impl) in PIPELINES.items()
}
CUSTOM_PIPELINES["HfViTForMaskedImageModeling"] = CUSTOM_PIPELINES["HfViTModel"]
CUSTOM_PIPELINES["HfViTForJointEmbedding"] = CUSTOM_PIPELINES["HfViTModel"]


def list_tasks() -> list[str]:
    """Returns the names of the tasks, as the command and `train` take them."""
    return list(TASKS)


def check_pipeline(name: str, architectures: list[str] | None, task: str | None) -> None:
    """Raises `ValueError` if a checkpoint saved as `architectures` has no head for the pipeline `task`."""
    # Where this package is not installed, the library opens other tasks with its own pipelines, which check nothing.
    if task not in {known for known, _ in PIPELINES.values()} - {FEATURES} or not architectures:
        return
    own = CUSTOM_PIPELINES.get(architectures[0], CUSTOM_PIPELINES["HfViTModel"])
    if task not in own:
        raise ValueError(
            f"{name} was saved as {architectures[0]} and has no trained head for {task!r}. Give the pipeline "
            f"{' or '.join(map(repr, dict.fromkeys([*own, FEATURES])))}, or a model that was trained for {task!r}."
        )


def copy_code(save_directory: str | os.PathLike[str]) -> None:
    """Copies the flat source files beside this one into `save_directory`, so that the folder opens anywhere."""
    # The library's own copier goes by the class of the saved object, which FSDP2 replaces by one of torch's.
    target = Path(save_directory)
    target.mkdir(parents=True, exist_ok=True)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        if source.name != "__init__.py" and source.parent.resolve() != target.resolve():
            shutil.copyfile(source, target / source.name)


@lru_cache
def can_reach(endpoint: str) -> bool:
    """Returns whether a Hub answers; asked once, as the library tries again and again for every file."""
    try:
        get_session().head(endpoint, timeout=REACH_SECONDS)
    except Exception:  # those of the HTTP client, whichever it is
        return False
    return True


def is_within_reach(name: str, kind: str = "model", cache_dir: Any = None, local_files_only: bool = False) -> bool:
    """Returns whether a repository may be opened: it is in the cache, or the Hub answers."""
    cached = Path(cache_dir or constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind))
    is_offline = local_files_only or constants.HF_HUB_OFFLINE
    return cached.is_dir() or (not is_offline and can_reach(constants.ENDPOINT))


def check_reachable(
    name_or_path: str | os.PathLike[str], cache_dir: Any = None, local_files_only: bool = False, **_: Any
) -> None:
    """Raises `OSError` unless something is a folder or file, in the cache, or on a Hub that can be reached."""
    name, path = str(name_or_path), Path(name_or_path)
    if path.exists():
        return
    if path.is_absolute() or len(path.parts) > 2:  # names on the Hub have two parts at most
        raise OSError(f"There is no folder or file {name!r}, and it is no name on the Hub.")
    if not is_within_reach(name, "model", cache_dir, local_files_only):
        raise OSError(
            f"There is no folder or file {name!r}, it is not in the cache, and the Hub cannot be reached. Check the "
            "path, or the network (and HF_HUB_OFFLINE)."
        )


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


def _travel_together() -> None:
    """Never called. The library finds the files of a checkpoint by the text of its imports; here it finds them all."""
    from .image_processing_hf_vit import HfViTImageProcessor  # noqa: F401
    from .image_processing_pil_hf_vit import HfViTImageProcessorPil  # noqa: F401
    from .modeling_hf_vit import HfViTModel  # noqa: F401
    from .processing_hf_vit import HfViTProcessor  # noqa: F401
    from .task_depth_estimation import HfViTForDepthEstimation  # noqa: F401
    from .task_image_classification import HfViTForImageClassification  # noqa: F401
    from .task_joint_embedding import HfViTForJointEmbedding  # noqa: F401
    from .task_keypoint_detection import HfViTForKeypointDetection  # noqa: F401
    from .task_masked_image_modeling import HfViTForMaskedImageModeling  # noqa: F401
    from .task_object_detection import HfViTForObjectDetection  # noqa: F401
    from .task_semantic_segmentation import HfViTForSemanticSegmentation  # noqa: F401
    from .task_universal_segmentation import HfViTForUniversalSegmentation  # noqa: F401
    from .task_zero_shot_image_classification import HfViTForZeroShotImageClassification  # noqa: F401
