"""Load the image processor and the tokenizer of a checkpoint."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers
from transformers import AutoTokenizer, BaseImageProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging

from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.image_processing_hf_vit import HfViTImageProcessor
from ..model.pretrained import HfViTPreTrainedModel
from ..model.processing_hf_vit import HfViTProcessor
from ..model.remote_code import raising_remote_code_error
from ..model.task_image_captioning import HfViTForImageTextToText
from ..model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification
from .family import Size
from .image_processor import (
    image_processor_options,
    open_clip_image_processor_options,
    original_image_processor_options,
    resize_image_processor,
    timm_image_processor_options,
)
from .loading import describe
from .source import HUB_ARGUMENTS, Source, find_file, open_source, read_json


logger = logging.get_logger(__name__)


def load_image_processor(
    name_or_path: str | os.PathLike[str],
    image_size: Size | None = None,
    num_channels: int | None = None,
    patch_size: Size | None = None,
    given: Mapping[str, Any] | None = None,
    **hub: Any,
) -> BaseImageProcessor:
    """Returns the image processor of a checkpoint that was saved by hf_vit or published by another library.

    Args:
        name_or_path: Folder, file of weights, or name on the Hub. If a published checkpoint has no image processor,
            the usual options of its model family are used.
        image_size: Height and width of the model input in pixels; None keeps the size of the checkpoint.
        num_channels: Number of image channels; None keeps the number of the checkpoint.
        patch_size: Height and width of a patch in pixels. An image size that is not a multiple of the patch size is
            rounded down, see `round_image_size_to_patches`. None keeps the image size unchanged.
        given: Further arguments of `from_pretrained`: fields of `HfViTConfig`, or the timm model name as
            `architecture`. They may be required for a weight file without configuration.
        **hub: Arguments that locate the checkpoint on the Hub, see `HUB_ARGUMENTS`.

    Raises:
        OSError: if the checkpoint does not exist, or a checkpoint saved by hf_vit has no image processor.
        ValueError: if `HfViTImageProcessor` does not support an option of the checkpoint's image processor.
    """
    path = Path(name_or_path)
    try:
        place = path.parent if path.is_file() else name_or_path
        options, _ = HfViTImageProcessor.get_image_processor_dict(place, **hub)
    except OSError:
        known = {"image_size": image_size, **(given or {})}
        source = open_source(name_or_path, known.pop("architecture", None), **hub)
        if source.config.get("model_type") == HfViTConfig.model_type:
            raise
        options = default_image_processor_options(source, **known)
    options = resize_image_processor(options, image_size, num_channels)
    if patch_size is not None:
        options = round_image_size_to_patches(options, patch_size)
    return HfViTImageProcessor(**options)


def default_image_processor_options(source: Source, **given: Any) -> dict[str, Any]:
    """Returns the image processor options for a checkpoint without image processor file, at the native image size."""
    family, native = describe(source, **given)
    if source.config.get("preprocess_cfg"):
        options = open_clip_image_processor_options(source.config["preprocess_cfg"], native.image_size)
    elif family.images:
        options = original_image_processor_options(family.images, native.image_size)
        if family.images == "torch":
            logger.warning(
                f"{source.name!r} does not contain the image transform. Images are scaled to [0, 1], as by ToTensor. "
                "If the model was trained with Normalize, set image_mean and image_std in preprocessor_config.json."
            )
    else:
        logger.warning(f"{source.name!r} has no image processor options. The defaults of its model family are used.")
        if "model_type" in source.config:
            options = image_processor_options({}, model_type=source.config["model_type"])
        else:  # Older timm config.json files have no `pretrained_cfg` and store its options at the top level.
            side = max(to_pair(native.image_size))
            options = timm_image_processor_options({"input_size": (3, side, side), **source.config})
    return resize_image_processor(options, native.image_size, native.num_channels)


def round_image_size_to_patches(options: dict[str, Any], patch_size: Size) -> dict[str, Any]:
    """Returns image processor options in which a fixed image size is rounded down to whole patches.

    hf_vit models require whole patches. For example, a published model with 14-pixel patches and 384-pixel images
    ignores the last 6 pixels on the right and at the bottom. Here, the whole image is resized to 378 pixels instead,
    which shifts the image content by up to 6 pixels compared with the published model.
    """
    size = options["crop_size"] if options.get("do_center_crop") else options["size"]
    if "height" not in size or options.get("ensure_multiple_of"):
        return options
    sides = size["height"], size["width"]
    whole = [max(side // patch, 1) * patch for side, patch in zip(sides, to_pair(patch_size), strict=True)]
    if tuple(whole) == sides:
        return options
    logger.warning(
        f"The image size {sides[0]}x{sides[1]} is not a multiple of patch_size={patch_size}. Images are resized to "
        f"{whole[0]}x{whole[1]} instead; the source model ignores the remaining pixels at the right and bottom."
    )
    return resize_image_processor(options, whole)


def load_processor(
    model: HfViTPreTrainedModel, name_or_path: str | os.PathLike[str], **options: Any
) -> BaseImageProcessor | HfViTProcessor:
    """Returns the image processor of a checkpoint, together with its tokenizer if the model has text inputs.

    Args:
        model: The model that was loaded from the checkpoint.
        name_or_path: Folder, file of weights, or name on the Hub.
        **options: Arguments of `load_image_processor`.
    """
    image_processor = load_image_processor(name_or_path, **options)
    has_texts = isinstance(model, HfViTForZeroShotImageClassification | HfViTForImageTextToText)
    if not has_texts or Path(name_or_path).is_file():
        return image_processor
    hub = {name: options[name] for name in HUB_ARGUMENTS if name in options}
    if find_file(str(name_or_path), "tokenizer_config.json", **hub) is None:
        return image_processor
    return HfViTProcessor(image_processor, load_tokenizer(model, name_or_path, **hub))


def load_tokenizer(
    model: HfViTForZeroShotImageClassification | HfViTForImageTextToText,
    name_or_path: str | os.PathLike[str],
    **hub: Any,
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a checkpoint.

    For an `HfViTTextConfig` text tower, texts are limited to the maximum length of the text tower.

    Raises:
        OSError: if the checkpoint has no tokenizer.
        ValueError: if the tokenizer needs custom code, or its padding token differs from that of the model.
    """
    with raising_remote_code_error(name_or_path, "Use a tokenizer class of transformers."):
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False, **hub)
    if isinstance(model, HfViTForImageTextToText):
        return tokenizer
    options = model.text_options
    if options.pad_token_id not in (None, tokenizer.pad_token_id):
        raise ValueError(
            f"The tokenizer of {str(name_or_path)!r} pads with token {tokenizer.pad_token_id}, but the text "
            f"tower was trained with padding token {options.pad_token_id}. Set tokenizer.pad_token, or pass "
            f"text_config={{'pad_token_id': {tokenizer.pad_token_id}}}."
        )
    if is_canonicalized(name_or_path, **hub):
        tokenizer = canonicalized(tokenizer)
    if options.encoder_config is None:  # Other tokenizers already limit the length.
        tokenizer.model_max_length = min(tokenizer.model_max_length, options.max_position_embeddings)
    return tokenizer


def is_canonicalized(name_or_path: str | os.PathLike[str], **hub: Any) -> bool:
    """Returns whether an OpenCLIP configuration requires lowercase texts without punctuation before tokenization."""
    names = ("config.json", "open_clip_config.json")
    of_transformers, of_open_clip = (find_file(str(name_or_path), name, **hub) for name in names)
    if of_transformers is not None or of_open_clip is None:
        return False
    text = read_json(of_open_clip).get("model_cfg", {}).get("text_cfg", {})
    return bool((text.get("tokenizer_kwargs") or {}).get("clean") == "canonicalize")


def canonicalized(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Returns a copy of a tokenizer that lowercases texts and removes punctuation and repeated spaces.

    These steps are saved with the tokenizer.
    Source: canonicalize_text of https://github.com/google-research/big_vision (evaluators/proj/image_text).
    """
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    clean = [
        normalizers.Replace("_", " "),
        normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), ""),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Strip(),
    ]
    backend.normalizer = normalizers.Sequence([*clean, *filter(None, [backend.normalizer])])
    # The generic class is used because model-specific tokenizer classes replace the normalizer when loaded.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **tokenizer.special_tokens_map,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
    )


def whole_image_processor(
    processor: BaseImageProcessor, config: HfViTConfig, keep_aspect_ratio: bool, **more: Any
) -> BaseImageProcessor:
    """Return an image processor that does not crop images. Color options are taken from `processor`.

    If `keep_aspect_ratio` is true, the shorter side is resized to the shorter side of `config.image_size`, otherwise
    the image is resized to `config.image_size`.
    """
    height, width = to_pair(config.image_size)
    patch = to_pair(config.patch_size)
    size = {"shortest_edge": min(height, width)} if keep_aspect_ratio else {"height": height, "width": width}
    options = {
        **processor.to_dict(),
        "size": size,
        "keep_aspect_ratio": False,  # If true, DPT image processors require height and width.
        "do_resize": True,
        "do_center_crop": False,
        "do_affine_crop": False,
        "do_pad": keep_aspect_ratio,
        "pad_size": None,
        "hide_padding": True,
        "ensure_multiple_of": patch[0] if patch[0] == patch[1] else patch,
        "window_scale": None,  # Training chooses the scale of sliding windows at its end.
        **more,
    }
    return HfViTImageProcessor.from_dict(options)
