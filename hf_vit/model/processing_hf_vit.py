"""Images and texts together: an image processor and a tokenizer."""

import os
from pathlib import Path
from typing import Any

from transformers import BaseImageProcessor, PreTrainedTokenizerBase
from transformers.processing_utils import ProcessingKwargs, ProcessorMixin

from .remote_code import copy_code


# The length of tokenizers without a limit is larger
LONGEST = 10**6


def text_options_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns the options of `HfViTTextConfig` for a text tower that reads the tokens of a tokenizer."""
    has_end, longest = tokenizer.eos_token_id is not None, tokenizer.model_max_length
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pooling": "eos" if has_end else "last",
        **({"max_position_embeddings": longest} if longest < LONGEST else {}),
    }


class HfViTProcessorKwargs(ProcessingKwargs, total=False):  # type: ignore[call-arg]
    """Options of a call. Texts of one call are padded to one length, and truncated where too long."""

    _defaults = {"text_kwargs": {"padding": True, "truncation": True}}  # noqa: RUF012 - as the library reads it


class HfViTProcessor(ProcessorMixin):
    """Prepares images and texts for `HfViTForZeroShotImageClassification`.

    `processor(images=images, text=texts, return_tensors="pt")` gives what the model takes; either may be left out. Any
    tokenizer of the library will do: a published one, or one that `hf_vit.training.train_tokenizer` has trained.
    """

    valid_processor_kwargs = HfViTProcessorKwargs

    def __init__(self, image_processor: BaseImageProcessor, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(image_processor, tokenizer)

    def text_options(self) -> dict[str, Any]:
        """Returns the options of `HfViTTextConfig` that fit the tokenizer."""
        return text_options_of(self.tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options, and which class reads them."""
        return {**super().to_dict(), "auto_map": {"AutoProcessor": "processing_hf_vit.HfViTProcessor"}}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Saves image processor, tokenizer and the code that opens them. Returns the paths of their options."""
        copy_code(save_directory)
        files = self.image_processor.save_pretrained(save_directory)
        files += super().save_pretrained(save_directory)
        if push_to_hub:  # the library would upload only what it has written itself
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)
        return files
