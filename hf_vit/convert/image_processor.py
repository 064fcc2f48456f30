"""Convert image processors of other libraries to keyword arguments of `HfViTImageProcessor`."""

import math
import re
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import transformers
from transformers.image_utils import PILImageResampling

from ..model.configuration_hf_vit import to_pair
from ..model.image_geometry import EXACT_KEYS, to_size_dict
from .family import Size


Options = dict[str, Any]

BILINEAR, BICUBIC = PILImageResampling.BILINEAR, PILImageResampling.BICUBIC
HALF: Options = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
IMAGENET: Options = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
OPENAI: Options = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

# Values for keys that are missing from both a transformers image processor file and the defaults of its class
SHARED_DEFAULTS: Options = {
    "do_resize": True,
    "resample": BILINEAR,
    "do_center_crop": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}
# Options with the same name and meaning in transformers and hf_vit. Only files that hf_vit exported contain
# `num_channels`.
SHARED = (*SHARED_DEFAULTS, "size", "crop_size", "image_mean", "image_std", "num_channels")
# Keys of transformers files that are converted. `default_to_square` selects whether an integer `size` is the side of a
# square or the length of the shortest edge.
HONORED = {*SHARED, "default_to_square", "ensure_multiple_of", "keep_aspect_ratio", "do_convert_rgb", "do_affine_crop"}
# Pattern of keys that do not affect the pixels of an image
WITHOUT_EFFECT = re.compile(
    "image_processor_type|feature_extractor_type|_?processor_class|_valid_processor_keys|_valid_kwargs_names|"
    "(input_)?data_format|return_tensors|device|disable_grouping|(do_)?reduce_labels|ignore_index|format|"
    "do_convert_annotations"
)
ADVICE = (
    "Create an image processor with similar options instead: HfViTImageProcessor(size=..., image_mean=..., "
    "image_std=...)."
)
# Maps each supported image processor class (name without "ImageProcessor") to the model types that use this class
MODEL_TYPES = {
    "ViT": ("vit", "vit_mae", "vit_msn", "ijepa"),
    "DeiT": ("deit",),
    "Bit": ("dinov2", "dinov2_with_registers"),
    "DINOv3ViT": ("dinov3_vit",),
    "CLIP": ("clip", "clip_vision_model"),
    "Siglip": ("siglip", "siglip_vision_model"),
    "Siglip2": ("siglip2", "siglip2_vision_model"),
    "Beit": ("beit", "data2vec-vision"),
    "DPT": ("dpt", "depth_anything"),
    "VitPose": ("vitpose", "vitpose_backbone"),
    "Eomt": ("eomt", "eomt_dinov3"),
    "DeformableDetr": ("lw_detr",),
    "Yolos": ("yolos",),
}
# Maps image processor classes of detection models to the activation that converts class logits to probabilities
CLASS_SCORES = {"DeformableDetr": "sigmoid", "Yolos": "softmax"}
MODEL_CLASSES = {model_type: name for name, model_types in MODEL_TYPES.items() for model_type in model_types}

# Values that timm uses for keys that are missing from config.json
TIMM_DEFAULTS: Options = {
    "input_size": (3, 224, 224),
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
    "mean": IMAGENET["image_mean"],
    "std": IMAGENET["image_std"],
}

# Values that OpenCLIP uses for keys that are missing from open_clip_config.json
OPEN_CLIP_DEFAULTS: Options = {
    "mean": OPENAI["image_mean"],
    "std": OPENAI["image_std"],
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}

# Evaluation transforms of the original repositories, for weights without image processor options. Each entry contains
# the ratio of the center crop to the resized edge, the resampling filter, and the mean and standard deviation. The
# ratio is `None` if the image is resized to the exact size without a crop. All crops are computed as in torchvision.
# DINOv2: https://github.com/facebookresearch/dinov2, dinov2/data/transforms.py. The same entry is used for DeiT
# (datasets.py), DINO (eval_linear.py) and MAE (util/datasets.py), because their tensor names are equal to those of
# DINOv2, and their transforms are equal at 224 pixels.
# CLIP: https://github.com/openai/CLIP, clip/clip.py
# JAX: https://github.com/google-research/vision_transformer, vit_jax/input_pipeline.py. timm evaluates these weights
# with a different transform (bicubic, crop ratio 0.9).
ORIGINALS: dict[str, tuple[float | None, PILImageResampling, Options]] = {
    "dinov2": (0.875, BICUBIC, IMAGENET),
    "vit_jax": (None, BILINEAR, HALF),
    "clip": (1.0, BICUBIC, OPENAI),
    "torch": (None, BILINEAR, {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}),  # torchvision's Resize and ToTensor
}


def read_image_processor_file(content: Mapping[str, Any], model_type: str = "vit") -> Options:
    """Returns the options of `HfViTImageProcessor` for an image processor file of another library.

    Args:
        content: Content of a transformers preprocessor_config.json or a timm config.json.
        model_type: `model_type` of the checkpoint. It selects the image processor class if preprocessor_config.json
            does not name one.

    Raises:
        ValueError: if the image processor is not supported.
    """
    if "pretrained_cfg" in content:
        return timm_image_processor_options(content["pretrained_cfg"])
    return image_processor_options(content, model_type=model_type)


def image_processor_options(preprocessor_config: Mapping[str, Any], *, model_type: str) -> Options:
    """Returns the options of `HfViTImageProcessor` for a transformers preprocessor_config.json.

    Pixels differ from those of transformers by at most one gray level. The exception is fewer than 0.2 % of the
    pixels, where bicubic resampling overshoots and transformers resizes in a different order. Three model families
    have further differences. For DINOv3, transformers resizes float images without rounding to gray levels. For
    SigLIP 2 with variable aspect ratio, transformers only limits the number of patches, whereas hf_vit resizes images
    to a square with this number of patches. For YOLOS, only transformers attends to the padding of a batch.

    Args:
        preprocessor_config: Content of preprocessor_config.json.
        model_type: `model_type` of the checkpoint. It selects the image processor class if the file does not name one.

    Raises:
        ValueError: if the class is unknown, or an option is not supported.
    """
    name = _class_name(preprocessor_config, model_type)
    options = {**class_defaults(name), **_drop_ignored_keys(preprocessor_config)}
    if name == "Siglip2":
        side = math.isqrt(options.pop("max_num_patches")) * options.pop("patch_size")
        options["size"] = {"height": side, "width": side}
    if name == "VitPose":
        options["do_affine_crop"] = options.pop("do_affine_transform")
        if options["normalize_factor"] == 200:  # the default, without effect on pixels
            del options["normalize_factor"]
    is_padded = name == "Eomt" and options.pop("do_pad", False)
    padding = _take_padding(options) if name in ("DeformableDetr", "Yolos") else {}
    if name == "Yolos" and padding:
        padding["multiple_rounding"] = "down"
    foreign = {key: value for key, value in options.items() if key not in HONORED and value is not False}
    if foreign:
        raise ValueError(
            f"The image processor {name}ImageProcessor of this checkpoint has options that HfViTImageProcessor does "
            f"not support: {foreign}. {ADVICE}"
        )
    is_square, crop_size = options.pop("default_to_square"), options.pop("crop_size", None)
    options["size"] = dict(to_size_dict(options["size"], "size", default_to_square=is_square) or {})
    if options["do_center_crop"] and crop_size is not None:
        options["crop_size"] = dict(to_size_dict(crop_size, "crop_size", forms=EXACT_KEYS) or {})
    # Values that equal the default behavior are omitted. With num_channels=3, images are always converted to RGB.
    neutral = {"keep_aspect_ratio": False, "ensure_multiple_of": 1, "do_convert_rgb": True}
    honored = {key: options[key] for key in options if key in HONORED and options[key] != neutral.get(key)}
    scores = {"class_scores": CLASS_SCORES[name]} if name in CLASS_SCORES else {}
    return honored | padding | scores | (_padded(options["size"]) if is_padded else {})


def class_defaults(name: str) -> Options:
    """Returns the default options of an image processor class in transformers."""
    if name == "DINOv3ViT":  # The defaults are copied because the transformers class requires torchvision.
        return {**SHARED_DEFAULTS, "default_to_square": True, "size": 224, **IMAGENET}
    original = getattr(transformers, f"{name}ImageProcessorPil")
    options = _drop_ignored_keys(original().to_dict())
    known = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    return {**SHARED_DEFAULTS, "default_to_square": original.default_to_square, **known}


def _drop_ignored_keys(options: Mapping[str, Any]) -> Options:
    return {key: value for key, value in options.items() if value is not None and not WITHOUT_EFFECT.fullmatch(key)}


def timm_image_processor_options(pretrained_cfg: Mapping[str, Any]) -> Options:
    """Returns the options of `HfViTImageProcessor` that reproduce timm's evaluation transform.

    Source: timm.data.resolve_data_config and create_transform.

    Args:
        pretrained_cfg: `pretrained_cfg` of timm's config.json.

    Raises:
        ValueError: if the crop mode or the interpolation of the transform is not supported.
    """
    config = TIMM_DEFAULTS | {name: value for name, value in pretrained_cfg.items() if value is not None}
    (num_channels, height, width), crop_mode = config["input_size"], config["crop_mode"]
    scaled = {"height": math.floor(height / config["crop_pct"]), "width": math.floor(width / config["crop_pct"])}
    if crop_mode == "center" and height == width:
        scaled = {"shortest_edge": scaled["height"]}
    elif crop_mode != "squash":
        raise ValueError(
            f"crop_mode={crop_mode!r} with input_size={(num_channels, height, width)} is not supported. Supported are "
            f"'squash', and 'center' for square images. {ADVICE}"
        )
    interpolation = config["interpolation"].upper()
    if interpolation not in PILImageResampling.__members__:
        known = ", ".join(name.lower() for name in PILImageResampling.__members__)
        raise ValueError(f"interpolation={config['interpolation']!r} is unknown. It must be one of {known}.")
    return {
        "num_channels": num_channels,
        **_cropped(scaled, height, width),
        "resample": PILImageResampling[interpolation],
        "image_mean": list(config["mean"]),
        "image_std": list(config["std"]),
    }


def open_clip_image_processor_options(preprocess_cfg: Mapping[str, Any], image_size: Size) -> Options:
    """Returns the options of `HfViTImageProcessor` that reproduce OpenCLIP's evaluation transform.

    Source: https://github.com/mlfoundations/open_clip, src/open_clip/transform.py.

    Args:
        preprocess_cfg: `preprocess_cfg` of open_clip_config.json.
        image_size: Height and width of the model's input in pixels.

    Raises:
        ValueError: if the resize mode of the transform is not supported.
    """
    config = OPEN_CLIP_DEFAULTS | {name: value for name, value in preprocess_cfg.items() if value is not None}
    if config["resize_mode"] not in ("shortest", "squash"):
        raise ValueError(
            f"resize_mode={config['resize_mode']!r} is not supported, only 'shortest' and 'squash' are. {ADVICE}"
        )
    options = original_image_processor_options("clip", image_size) | {
        "resample": BILINEAR if config["interpolation"] == "bilinear" else BICUBIC,
        "image_mean": list(config["mean"]),
        "image_std": list(config["std"]),
    }
    return options | ({"size": dict(options["crop_size"])} if config["resize_mode"] == "squash" else {})


def original_image_processor_options(family: str, image_size: Size = 224) -> Options:
    """Returns the options of `HfViTImageProcessor` that reproduce the evaluation transform of an original repository.

    Args:
        family: Key of `ORIGINALS`.
        image_size: Height and width of the model's input in pixels.
    """
    crop_ratio, resample, colors = ORIGINALS[family]
    height, width = to_pair(image_size)
    options: Options = {"resample": resample, **{name: list(values) for name, values in colors.items()}}
    if crop_ratio is None:
        return options | {"size": {"height": height, "width": width}}
    return options | _cropped({"shortest_edge": int(max(height, width) / crop_ratio)}, height, width)


def _cropped(size: dict[str, int], height: int, width: int) -> Options:
    crop_size = {"height": height, "width": width}
    return {"size": size, "do_center_crop": True, "crop_size": crop_size, "crop_rounding": "half_to_even"}


def resize_image_processor(
    processor_options: Mapping[str, Any], image_size: Size | None = None, num_channels: int | None = None
) -> Options:
    """Returns image processor options adapted to a new image size in pixels or a new number of channels.

    If images are cropped, the size before the crop is scaled by the same factor as the crop size. For a new number of
    channels, the means and standard deviations are averaged over the channels if there is one channel, and repeated
    cyclically otherwise.
    """
    options = dict(processor_options)
    if image_size is not None:
        options |= _resized(options, *to_pair(image_size))
    if num_channels not in (None, options.get("num_channels", 3)):
        options["num_channels"] = num_channels
        options |= {name: _for_channels(options[name], num_channels) for name in ("image_mean", "image_std")}
    return options


def _class_name(preprocessor_config: Mapping[str, Any], model_type: str) -> str:
    """Returns the name of the image processor class without suffix, such as "ViT" for ViTImageProcessor."""
    named = preprocessor_config.get("image_processor_type") or preprocessor_config.get("feature_extractor_type")
    if named is None and model_type not in MODEL_CLASSES:
        raise ValueError(
            f"The file does not name its image processor class, and model_type={model_type!r} is unknown. Known model "
            f"types are {', '.join(MODEL_CLASSES)}."
        )
    name = MODEL_CLASSES[model_type] if named is None else re.sub("(FeatureExtractor|ImageProcessor).*", "", named)
    if name not in MODEL_TYPES:
        known = ", ".join(f"{known}ImageProcessor" for known in MODEL_TYPES)
        raise ValueError(f"Unknown image processor {named!r}. Known image processors are {known}. {ADVICE}")
    return name


def _take_padding(options: Options) -> Options:
    """Removes the padding options of DETR-like models from `options` and converts them for `HfViTImageProcessor`."""
    size, longest, do_pad = options["size"], options.pop("max_size", 1333), options.pop("do_pad")
    if isinstance(size, int):  # Early transformers releases saved an integer.
        options["size"] = {"shortest_edge": size, "longest_edge": longest}
    has_one_size = not isinstance(size, int) and "height" in size
    return {} if has_one_size else {"ensure_multiple_of": 16, "do_pad": do_pad}


def _padded(size: dict[str, int]) -> Options:
    """Returns the padding options of EoMT, in which the padding is black and not masked in attention.

    Images are padded to the height `shortest_edge` and the width `longest_edge`.
    """
    height = size["shortest_edge"]
    pad_size = {"height": height, "width": size.get("longest_edge", height)}
    return {"do_pad": True, "hide_padding": False, "pad_size": pad_size}


def _resized(options: Options, height: int, width: int) -> Options:
    size, target = options["size"], {"height": height, "width": width}
    if options.get("pad_size"):
        return {"size": {"max_height": height, "max_width": width}, "pad_size": target}
    if not options.get("do_center_crop"):
        return {"size": target, **({"keep_aspect_ratio": False} if options.get("keep_aspect_ratio") else {})}
    ratios = {side: target[side] / options["crop_size"][side] for side in target}
    if {*size} != {*target}:  # The larger ratio scales all edges, so the resized image covers the crop.
        ratios = dict.fromkeys(size, max(ratios.values()))
    return {"size": {side: round(pixels * ratios[side]) for side, pixels in size.items()}, "crop_size": target}


def _for_channels(values: float | list[float], num_channels: int) -> float | list[float]:
    if isinstance(values, int | float):
        return values
    if num_channels == 1:
        return [fmean(values)]
    return [values[channel % len(values)] for channel in range(num_channels)]
