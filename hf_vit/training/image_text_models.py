"""The model that a training on images and texts starts from, and its tokenizer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from ..convert import load_tokenizer
from ..convert.source import find_file
from ..modeling_contrastive_hf_vit import HfViTForZeroShotImageClassification
from ..processing_hf_vit import HfViTProcessor, text_options_of
from .image_text_arguments import ImageTextModelArguments
from .models import load_model
from .tokenizer import train_tokenizer


VOCAB_SIZE, MAX_TEXT_LENGTH = 8192, 64


def load_image_text_model(
    args: ImageTextModelArguments, captions: Iterable[str]
) -> tuple[HfViTForZeroShotImageClassification, HfViTProcessor]:
    """Returns the model to train and its processor.

    Args:
        args: What it starts from.
        captions: What a tokenizer is trained on, if it is.

    Raises:
        OSError: if there is no such model or tokenizer.
        ValueError: if one is of another kind, or an option does not fit.
    """
    name, text_name = args.model_name_or_path, args.text_model_name_or_path
    if name is not None and text_name is None and has_tokenizer(name):
        args.refuse_beside("model_name_or_path", "tokenizer_name", "vocab_size", "text_preset", "max_text_length")
        model, image_processor = load_model(HfViTForZeroShotImageClassification, args)
        tokenizer = load_tokenizer(model, name)
    else:
        tokenizer = make_tokenizer(args, captions)
        options = {**args.text_size(), **text_options_of(tokenizer)}
        if text_name is not None:
            options = encoder_options(text_name, tokenizer)
        model, image_processor = load_model(HfViTForZeroShotImageClassification, args.with_text(options))
        if text_name is not None:
            model.load_text_weights(text_name)
    if args.freeze_vision:
        model.freeze_vision()
    return model, HfViTProcessor(image_processor, tokenizer)


def has_fresh_text(args: ImageTextModelArguments) -> bool:
    """Returns whether the text tower starts from scratch."""
    has_text = args.model_name_or_path is not None and has_tokenizer(args.model_name_or_path)
    return args.text_model_name_or_path is None and not has_text


def has_tokenizer(name_or_path: str) -> bool:
    """Returns whether a saved or published model has one, and so a text tower."""
    return not Path(name_or_path).is_file() and find_file(name_or_path, "tokenizer_config.json") is not None


def make_tokenizer(args: ImageTextModelArguments, captions: Iterable[str]) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a fresh text tower, or of a text encoder of the library.

    Raises:
        OSError: if there is none of its name.
        ValueError: if it cannot bring texts to one length, or the encoder cannot read as long texts as are wanted.
    """
    name = args.text_model_name_or_path or args.tokenizer_name
    if name is None:
        return train_tokenizer(captions, args.vocab_size or VOCAB_SIZE, args.max_text_length or MAX_TEXT_LENGTH)
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        raise ValueError(f"The tokenizer {name} has no token for padding, so that texts make no batch. Take another.")
    longest = tokenizer.model_max_length
    if args.text_model_name_or_path is not None and (args.max_text_length or 0) > longest:
        raise ValueError(
            f"max_text_length={args.max_text_length} is more than the {longest} tokens that {name} reads."
        )
    tokenizer.model_max_length = args.max_text_length or min(MAX_TEXT_LENGTH, longest)
    return tokenizer


def encoder_options(name: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns the options of a text tower that is a text encoder of the library.

    What sums up a text is its first token, or the last one where the tokenizer puts nothing before it.

    Raises:
        OSError: if there is no such model.
        ValueError: if it reads no texts.
    """
    config = AutoConfig.from_pretrained(name)
    if "vocab_size" not in config.to_dict():
        raise ValueError(f"{name} is of the kind {config.model_type!r}, which reads no texts. Give a text encoder.")
    options: dict[str, Any] = {"encoder_config": config.to_diff_dict()}
    return options if tokenizer.cls_token_id is not None else {**options, "pooling": "last"}
