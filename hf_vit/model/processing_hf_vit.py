"""Processor for images and texts, which combines an image processor and a tokenizer."""

import os
from pathlib import Path
from typing import Any

from transformers import BaseImageProcessor, PreTrainedTokenizerBase
from transformers.processing_utils import ProcessingKwargs, ProcessorMixin

from .remote_code import copy_code


# Tokenizers with a larger `model_max_length` are treated as having no length limit.
LONGEST = 10**6


def text_options_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns the options of `HfViTTextConfig` for a text encoder that matches a tokenizer."""
    has_end, longest = tokenizer.eos_token_id is not None, tokenizer.model_max_length
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pooling": "eos" if has_end else "last",
        **({"max_position_embeddings": longest} if longest < LONGEST else {}),
    }


class HfViTProcessorKwargs(ProcessingKwargs, total=False):  # type: ignore[call-arg]
    """Options of a processor call. By default, texts are padded to equal length and truncated to the maximum."""

    _defaults = {"text_kwargs": {"padding": True, "truncation": True}}  # noqa: RUF012 - required by transformers


class HfViTProcessor(ProcessorMixin):
    """Prepares images and texts for `HfViTForZeroShotImageClassification`.

    `processor(images=images, text=texts, return_tensors="pt")` returns the inputs of the model; images or texts can be
    omitted. Any tokenizer of transformers is supported, including those of `hf_vit.training.train_tokenizer`.
    """

    valid_processor_kwargs = HfViTProcessorKwargs

    def __init__(self, image_processor: BaseImageProcessor, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(image_processor, tokenizer)

    def text_options(self) -> dict[str, Any]:
        """Returns the options of `HfViTTextConfig` that match the tokenizer."""
        return text_options_of(self.tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options, and the entry `auto_map` with the processor class."""
        return {**super().to_dict(), "auto_map": {"AutoProcessor": "processing_hf_vit.HfViTProcessor"}}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Saves image processor, tokenizer and their code; returns the paths of the saved configuration files."""
        copy_code(save_directory)
        files = self.image_processor.save_pretrained(save_directory)
        files += super().save_pretrained(save_directory)
        if push_to_hub:  # upload here, because transformers would omit the code
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)
        return files
