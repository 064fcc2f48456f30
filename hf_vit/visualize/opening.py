"""Opens a model that is to be looked into, and prepares photos for it as a whole."""

from collections.abc import Mapping
from typing import Any

from transformers import BaseImageProcessor

from ..configuration_hf_vit import to_pair
from ..convert import TASKS, load_image_processor, open_source
from ..modeling_hf_vit import HfViTModel
from ..pretrained_hf_vit import HfViTPreTrainedModel
from ..training.processors import whole_image_processor


def open_to_look(name_or_path: str, image_size: int | None = None) -> tuple[HfViTPreTrainedModel, BaseImageProcessor]:
    """Opens a model of any task, and an image processor that leaves nothing of a photo out.

    Args:
        name_or_path: Folder, file of weights, or name on the Hub, ours or published.
        image_size: Shorter side in pixels that photos get; None means that of the model.

    Returns:
        The model in evaluation mode, with eager attention, and the processor, which keeps the proportions of photos up
        to whole patches.

    Raises:
        OSError: if there is no such checkpoint.
        ValueError: if it cannot be opened, or the size is no positive number.
    """
    model_class = _class_of(open_source(name_or_path).config)
    model = model_class.from_pretrained(name_or_path, attn_implementation="eager").eval()
    config = model.config
    side = min(to_pair(config.image_size)) if image_size is None else image_size
    processor = load_image_processor(name_or_path, num_channels=config.num_channels, patch_size=config.patch_size)
    whole = {"size": {"shortest_edge": side}, "do_pad": False}
    return model, whole_image_processor(processor, config, keep_aspect_ratio=True, **whole)


def _class_of(config: Mapping[str, Any]) -> type[HfViTPreTrainedModel]:
    """Returns the class that was saved, by its configuration; those of timm say how many classes there are."""
    saved = (config.get("architectures") or ["ForImageClassification" if config.get("num_classes") else ""])[0]
    heads = (model for model in TASKS.values() if model is not HfViTModel)
    return next((model for model in heads if model.__name__.removeprefix("HfViT") in saved), HfViTModel)
