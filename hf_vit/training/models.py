"""The model that a training starts from: a new one, or a saved or published one that learns the classes at hand."""

from collections.abc import Sequence
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from transformers import BaseImageProcessor
from transformers.utils import logging

from ..configuration_hf_vit import HfViTConfig, check_fields
from ..convert import load_image_processor
from ..image_processing_hf_vit import HfViTImageProcessor
from ..modeling_hf_vit import HfViTPreTrainedModel
from .arguments import ModelArguments


logger = logging.get_logger(__name__)
Model = TypeVar("Model", bound=HfViTPreTrainedModel)

# What in the head of any task has a number for each class. The rest of a head is of use for other classes too.
CLASS_WEIGHTS = ("classifier.", ".class_tokens", ".mask_norm.")


def load_model(
    model_class: type[Model], args: ModelArguments, names: Sequence[str] = ()
) -> tuple[Model, BaseImageProcessor]:
    """Returns the model to train and its image processor.

    Args:
        model_class: Class of the model.
        args: A saved model, of this class or any other, or the size of a new one.
        names: The class names of the data, if it has classes. A saved model that knows others gets fresh weights for
            them.

    Raises:
        OSError: if there is no such saved model.
        ValueError: if it is of another kind, or an option does not fit.
    """
    try:
        return (new_model if args.model_name_or_path is None else tune)(model_class, args, list(names))
    except StrictDataclassError as error:
        raise ValueError(f"The configuration does not fit: {error}") from error


def new_model(model_class: type[Model], args: ModelArguments, names: list[str]) -> tuple[Model, BaseImageProcessor]:
    """Returns a model with fresh weights and its image processor."""
    config = HfViTConfig.from_preset(args.preset or "small", **(args.overrides() | name_labels(names)))
    return model_class(config), HfViTImageProcessor.for_model(config)


def tune(model_class: type[Model], args: ModelArguments, names: list[str]) -> tuple[Model, BaseImageProcessor]:
    """Returns a saved model, with fresh weights for the classes if it knows others, and its image processor."""
    assert args.model_name_or_path is not None
    overrides = args.overrides()
    model = open_model(model_class, args.model_name_or_path, **overrides)
    known = list(model.config.id2label.values())
    if names and known != names:
        logger.warning(
            f"The saved model knows the classes {shorten(known)}. It gets a fresh classifier for {shorten(names)}."
        )
        config = HfViTConfig.from_dict({**model.config.to_dict(), **name_labels(names)})
        weights = {
            name: weight
            for name, weight in model.state_dict().items()
            if not any(part in name for part in CLASS_WEIGHTS)
        }
        model = model_class.from_pretrained(None, config=config, state_dict=weights)
    channels, patch = model.config.num_channels, model.config.patch_size
    size = overrides.get("image_size")
    return model, load_image_processor(args.model_name_or_path, size, channels, patch, given=overrides)


def open_model(model_class: type[Model], name_or_path: str, **overrides: Any) -> Model:
    """Opens a saved or published model.

    Args:
        model_class: Class to open it with.
        name_or_path: Folder, file of published weights, or name on the Hub.
        **overrides: Fields of the configuration that differ.

    Raises:
        OSError: if there is no such saved model.
        ValueError: if it is of another kind, or an override changes the shape of its weights.
    """
    check_fields(overrides)
    return _load(model_class, name_or_path, overrides)[0]


def open_trained(model_class: type[Model], name_or_path: str) -> Model:
    """Opens a saved or published model that has learned what it shall do.

    Raises:
        OSError: if there is no such saved model.
        ValueError: if it is of another kind, or has no trained head.
    """
    model, info = _load(model_class, name_or_path, {})
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{name_or_path} holds no weights for {shorten(missing, 3)} of {model_class.__name__}: it was trained for "
            "something else. Train it for this first, or give a model that was."
        )
    return model


def _load(model_class: type[Model], name_or_path: str, overrides: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
    try:
        return model_class.from_pretrained(name_or_path, output_loading_info=True, **overrides)
    except OSError as error:
        raise OSError(
            f"No model can be read from {name_or_path!r}, be it a folder, a file or a name on the Hub: {error}"
        ) from error


def name_labels(names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a configuration that name the classes; none where there are no classes."""
    if not names:
        return {}
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def shorten(names: Sequence[str], count: int = 20) -> str:
    """Lists the first names."""
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def input_size(processor: BaseImageProcessor) -> tuple[int, int]:
    """Returns the height and width in pixels that a processor brings all images to.

    Raises:
        ValueError: if it leaves them at different sizes.
    """
    size = processor.crop_size if processor.do_center_crop else processor.size
    if not size.height or not size.width:
        raise ValueError(
            f"The image processor keeps the aspect ratio ({dict(size)}), and images of several sizes make no batch. "
            "Give the height and width to train at: --image_size 224."
        )
    return size.height, size.width
