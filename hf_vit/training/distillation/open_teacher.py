"""Opens teachers of any library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedModel,
)
from transformers.utils import CONFIG_NAME

from ...convert import load_image_processor
from ...convert.image_processor import timm_image_processor_options
from ...convert.loading import find_configured
from ...convert.source import find_file, read_json
from ...model.configuration_hf_vit import HfViTConfig
from ...model.image_processing_hf_vit import HfViTImageProcessor
from ...model.modeling_hf_vit import HfViTModel
from ...model.pretrained import check_trained
from ...model.remote_code import RemoteCodeError, refusing_code
from ...model.task_image_classification import HfViTForImageClassification
from ..models import load_with_info, shorten, without_load_report
from .teacher import Teacher, TeacherView, check_colors


CONSENT = "Read it, and if you trust it say --teacher_trust_remote_code true."
FEATURES_INSTEAD = "It can teach its features all the same: --distillation_type features."
# How timm calls those of its models that our converter reads.
TIMM_VITS = ("vit_", "deit", "flexivit_")


def open_teacher(
    name: str, is_classifier: bool, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Opens any image classifier, or any encoder of images.

    Args:
        name: Folder, file of weights, or name on the Hub.
        is_classifier: Whether it must classify; else its tokens are enough.
        dtype: Its precision.
        trust_remote_code: Whether code that it brings may run.

    Raises:
        OSError: if there is no such model.
        ValueError: if it has learned nothing, or a weight is not finite, as all that is learned from it would be.
    """
    ours = HfViTForImageClassification if is_classifier else HfViTModel
    auto = AutoModelForImageClassification if is_classifier else AutoModel
    with without_load_report():
        if is_of_others(name):
            model, info = open_auto(auto, name, dtype, trust_remote_code)
        else:
            model, info = load_with_info(ours, name, {})
            model = model.to(dtype)
    check_trained(model, f"The teacher {name!r}")
    # The tokens of an encoder do not go through the pooling.
    if missing := sorted(weight for weight in info["missing_keys"] if is_classifier or "pool" not in weight):
        cure = "it would teach what is drawn at random. Give a model that was trained."
        if is_classifier:
            cure = f"it has not learned to classify. {FEATURES_INSTEAD}"
        raise ValueError(
            f"The teacher {name!r} holds no weights for {shorten(missing, 3)} of {type(model).__name__}: {cure}"
        )
    return model


def is_of_others(name: str) -> bool:
    """Returns whether only its own library opens a model."""
    if Path(name).is_file():
        return False
    try:
        file = find_file(name, CONFIG_NAME)
    except OSError:
        return False  # there is no such model: what opens ours tells
    config = {} if file is None else read_json(file)
    is_other_timm = not str(config.get("architecture", TIMM_VITS[0])).startswith(TIMM_VITS)
    is_known = config.get("model_type") == HfViTConfig.model_type or find_configured(config) is not None
    return bool(config) and (is_other_timm or not is_known)


def open_auto(auto_class: Any, name: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Opens a model by an Auto class; returns it with which weights were missing."""
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True}
    try:
        with refusing_code(name, CONSENT):
            return auto_class.from_pretrained(name, **options)
    except RemoteCodeError:
        raise
    except ValueError as error:
        cure = FEATURES_INSTEAD if auto_class is AutoModelForImageClassification else "Choose another one."
        reason = str(error).splitlines()[0]
        raise ValueError(f"The teacher {name!r} does not open as {auto_class.__name__} ({reason}). {cure}") from error


def with_view(
    name: str,
    model: PreTrainedModel,
    student: PreTrainedModel,
    processor: BaseImageProcessor,
    trust_remote_code: bool,
) -> Teacher:
    """Returns a teacher that sees the images of a student; `ValueError` if it takes other channels or colors."""
    wanted = student.config.num_channels
    channels = model.config.to_dict().get("num_channels", wanted)
    if channels != wanted:
        raise ValueError(
            f"The teacher {name!r} takes images of {channels} channels, the student of {wanted}. Give the student as "
            f"many: --config_overrides '{{\"num_channels\": {channels}}}'."
        )
    own_processor = open_image_processor(name, model, wanted, trust_remote_code)
    return Teacher(name, model, TeacherView(processor, own_processor, wanted))


def open_image_processor(
    name: str, model: PreTrainedModel, num_channels: int, trust_remote_code: bool
) -> BaseImageProcessor:
    """Returns the image processor that belongs to a teacher; `OSError` if there is none.

    Raises `ValueError` if it does to colors what its student's pixels cannot follow.
    """
    if isinstance(model.config, HfViTConfig):
        return load_image_processor(name, patch_size=model.config.patch_size)
    if model.config.model_type == "timm_wrapper":  # whose own is a function of timm
        return HfViTImageProcessor(**timm_image_processor_options(model.config.to_dict().get("pretrained_cfg", {})))
    try:
        with refusing_code(name, CONSENT):
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise OSError(
            f"The teacher {name!r} has no image processor, which tells how it sees images. Save one in its folder: "
            "image_processor.save_pretrained."
        ) from error
    check_colors(processor, num_channels)
    return processor


def names_of(model: PreTrainedModel) -> list[str]:
    """Returns the names of a model's classes."""
    return [model.config.id2label[index] for index in range(len(model.config.id2label))]


def match_classes(known: Sequence[str], names: Sequence[str], teacher: str) -> list[int]:
    """Returns the place of each of `names` among those that a teacher knows; `ValueError` unless they are the same."""
    if list(known) == list(names):  # among which there may be twins
        return list(range(len(names)))
    if len(set(known)) < len(known) or set(known) != set(names):
        extra, lacking = (shorten(sorted(alone), 6) or "none" for alone in ({*known} - {*names}, {*names} - {*known}))
        raise ValueError(
            f"The teacher {teacher!r} has other classes than the data. Of the teacher alone: {extra}; of the data "
            f"alone: {lacking}. {FEATURES_INSTEAD}"
        )
    return [list(known).index(name) for name in names]
