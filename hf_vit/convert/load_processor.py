"""What prepares the inputs of a converted checkpoint."""

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, BaseImageProcessor, PreTrainedTokenizerBase

from ..modeling_contrastive_hf_vit import HfViTForZeroShotImageClassification
from ..pretrained_hf_vit import HfViTPreTrainedModel
from ..processing_hf_vit import HfViTProcessor
from .load_image_processor import load_image_processor
from .source import HUB_ARGUMENTS, find_file


def load_processor(
    model: HfViTPreTrainedModel, name_or_path: str | os.PathLike[str], **options: Any
) -> BaseImageProcessor | HfViTProcessor:
    """Returns the image processor that belongs to a checkpoint, with its tokenizer if the model takes texts.

    Args:
        model: What the checkpoint was opened as.
        name_or_path: Folder, file of weights, or name on the Hub.
        **options: Arguments of `load_image_processor`.
    """
    image_processor = load_image_processor(name_or_path, **options)
    if not isinstance(model, HfViTForZeroShotImageClassification) or Path(name_or_path).is_file():
        return image_processor
    hub = {name: options[name] for name in HUB_ARGUMENTS if name in options}
    if find_file(str(name_or_path), "tokenizer_config.json", **hub) is None:
        return image_processor
    return HfViTProcessor(image_processor, load_tokenizer(model, name_or_path, **hub))


def load_tokenizer(
    model: HfViTForZeroShotImageClassification, name_or_path: str | os.PathLike[str], **hub: Any
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a checkpoint, which cuts texts off where its text tower of our own ends.

    Args:
        model: What the checkpoint was opened as.
        name_or_path: Folder, or name on the Hub.
        **hub: `HUB_ARGUMENTS`.

    Raises:
        OSError: if it has none.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **hub)
    options = model.text_options
    if options.encoder_config is None:  # else the tokenizer alone knows
        tokenizer.model_max_length = min(tokenizer.model_max_length, options.max_position_embeddings)
    return tokenizer
