"""Compare the outputs of a converted checkpoint with those of its source implementation."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.pretrained import HfViTPreTrainedModel
from ..model.task_masked_image_modeling import HfViTForMaskedImageModeling
from ..model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification
from .families.torch_encoder import MARK
from .loading import Converted
from .source import Source


# transformers models with an image tower and a text tower
TWO_TOWERS = (transformers.CLIPModel, transformers.SiglipModel, transformers.Siglip2Model)
# Fraction of masked patches when masked image modeling decoders are compared
MASK_RATIO = 0.75
Outputs = dict[str, Tensor]
Run = Callable[[Tensor], Outputs]
# Largest accepted difference in float32, relative to the largest value of an output
TOLERANCE = 1e-4
# Outputs that are not compared, by model type. For CLIP, transformers applies the final norm only to the CLS token;
# hf_vit applies it to all tokens. The hidden states before the final norm are compared instead.
NOT_COMPARED = {"clip": {"last_hidden_state"}, "clip_vision_model": {"last_hidden_state"}}
# Model types for which the source implementation supports only the native image size or only square images
NATIVE_ONLY = {"nn.TransformerEncoder", "eomt", "eomt_dinov3", "lw_detr", "vitpose", "vitpose_backbone"}
SQUARE_ONLY = {"dpt"}


def named(outputs: Mapping[str, Any]) -> Outputs:
    """Returns the tensors of a model output by name, with one entry for each hidden state."""
    tensors = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
    states = outputs.get("hidden_states") or ()
    return {**{f"hidden_states[{index}]": state for index, state in enumerate(states)}, **tensors}


class NoReferenceError(ImportError):
    """Raised if the source implementation is unknown or not installed."""


def open_reference(source: Source, config: HfViTConfig) -> Run:
    """Loads a checkpoint with its source library and returns a function that computes the outputs for images.

    `config` is the converted configuration. Raises `NoReferenceError` if no source library can load the checkpoint.
    """
    if MARK in source.weights.shapes:
        return _open_torch_encoder(source, config)
    if "architecture" in source.config and not Path(source.name).is_file():
        return _open_timm(source)
    if "model_type" in source.config and not Path(source.name).is_file():
        name = (source.config.get("architectures") or ["AutoModel"])[0]
        if name not in dir(transformers):
            raise NoReferenceError(
                f"{source.name!r} has the architecture {name}, which is not a class in transformers."
            )
        options = {"dtype": torch.float32, "trust_remote_code": False, **source.hub}
        model = getattr(transformers, name).from_pretrained(source.name, **options).eval()
        run: Callable[..., Outputs] = RUNNERS.get(source.config["model_type"], run_plain)
        chosen = {name: source.config[name] for name in ("dataset_index",) if name in source.config}
        return lambda images: run(model, images, **chosen)
    raise NoReferenceError(f"{source.name!r} is a file of weights, which no installed library can load by itself.")


def run_plain(model: Any, images: Tensor, **kwargs: Any) -> Outputs:
    """Runs a transformers model on images and returns its output tensors by name."""
    if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        kwargs["interpolate_pos_encoding"] = True
    return named(model(pixel_values=images, output_hidden_states=True, **kwargs))


def mask_most_patches(images: Tensor, patch_size: Any) -> Tensor:
    """Returns a bool mask of patches, (B, N), that is True for the last three quarters of the patches."""
    side = to_pair(patch_size)
    num_patches = (images.shape[-2] // side[0]) * (images.shape[-1] // side[1])
    return (torch.arange(num_patches) >= int(num_patches * (1 - MASK_RATIO))).expand(len(images), -1)


def run_vit(model: Any, images: Tensor) -> Outputs:
    """Runs a ViT. If it has a pixel decoder and images have the native size, it also runs with masked patches."""
    if not isinstance(model, transformers.ViTForMaskedImageModeling):
        return run_plain(model, images)
    outputs = run_plain(model.base_model, images)
    if images.shape[-2:] == to_pair(model.config.image_size):
        mask = mask_most_patches(images, model.config.patch_size)
        outputs["reconstruction"] = model(images, bool_masked_pos=mask).reconstruction
    return outputs


def run_vit_mae(model: Any, images: Tensor) -> Outputs:
    """Runs the encoder of ViTMAE without a mask. Ascending noise keeps the patches in their original order.

    The decoder runs only at the native image size. At other sizes, unlike hf_vit, transformers interpolates the
    position embeddings of the decoder as a one-dimensional sequence.
    """
    encoder = model.base_model
    mask = mask_most_patches(images, encoder.config.patch_size)
    noise = torch.arange(mask.shape[1], dtype=images.dtype).expand_as(mask)

    def run(part: Any, ratio: float) -> Outputs:
        encoder.config.mask_ratio = encoder.embeddings.config.mask_ratio = ratio
        return run_plain(part, images, noise=noise)

    outputs = run(encoder, 0.0)
    if model is not encoder and images.shape[-2:] == to_pair(encoder.config.image_size):
        outputs["logits"] = run(model, MASK_RATIO)["logits"]
    return outputs


def run_towers(model: Any, images: Tensor, run_tower: Callable[..., Outputs] = run_plain) -> Outputs:
    """Runs an image tower. A text tower, if present, is run on random texts, which are returned as `input_ids`."""
    if not isinstance(model, TWO_TOWERS):
        return run_tower(model, images)
    texts = draw_texts(model.config.text_config)
    compared = run_tower(model, images, input_ids=texts)
    return {**run_tower(model.vision_model, images), **compared, "input_ids": texts}


def draw_texts(config: Any) -> Tensor:
    """Returns the token ids, (3, S), of random texts that have the maximum length S and an end token."""
    shape, known = (3, config.max_position_embeddings), config.vocab_size
    texts = torch.randint(known, shape, generator=torch.Generator().manual_seed(0))
    # CLIP configurations with eos_token_id=2 use the largest token id as end token.
    texts[:, -1] = config.eos_token_id if 2 < (config.eos_token_id or 0) < known else known - 1
    return texts


def run_patches(model: Any, images: Tensor, **kwargs: Any) -> Outputs:
    """Runs a model, such as SigLIP 2, whose inputs are flattened patches (B, N, p·p·C) with channels last."""
    config = model.config.vision_config if isinstance(model, TWO_TOWERS) else model.config
    side = config.patch_size
    patches = images.unfold(2, side, side).unfold(3, side, side)  # (B, C, h, w, p, p)
    shape = torch.tensor([patches.shape[2:4]] * len(images))
    patches = patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)  # (B, N, p·p·C)
    mask = torch.ones(patches.shape[:2], dtype=torch.long)
    inputs = {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shape}
    return named(model(**inputs, output_hidden_states=True, **kwargs))


def run_eomt(model: Any, images: Tensor) -> Outputs:
    """Runs EoMT and moves the query tokens from the start of each sequence to the end, as in hf_vit.

    EoMT returns a duplicate of the last hidden state, which is removed.
    """
    outputs = run_plain(model, images)
    del outputs[f"hidden_states[{model.config.num_hidden_layers}]"]
    length, num_queries = outputs["last_hidden_state"].shape[1], model.config.num_queries
    return {
        name: value.roll(-num_queries, dims=1) if "hidden_state" in name and value.shape[1] == length else value
        for name, value in outputs.items()
    }


def run_vitpose(model: Any, images: Tensor, dataset_index: int = 0) -> Outputs:
    """Runs ViTPose. For ViTPose+, `dataset_index` selects one expert for all images."""
    return run_plain(model, images, dataset_index=torch.full((len(images),), dataset_index))


def run_lw_detr(model: Any, images: Tensor) -> Outputs:
    """Runs LW-DETR and reorders the tokens of its hidden states from window order to row-major order."""
    backbone = model.model.backbone.backbone
    side, patch = backbone.config.num_windows_side, to_pair(backbone.config.patch_size)
    grid = [length // part // side for length, part in zip(images.shape[-2:], patch, strict=True)]
    outputs = {
        name: state.reshape(len(images), side, side, *grid, -1).transpose(2, 3).flatten(1, 4)  # (B, N, D)
        for name, state in named(backbone(images, output_hidden_states=True)).items()
        if name.startswith("hidden_states")
    }
    predicted = model(images)
    return {**outputs, "logits": predicted.logits, "pred_boxes": predicted.pred_boxes}


RUNNERS: Mapping[str, Callable[..., Outputs]] = {
    "vit": run_vit,
    "vit_mae": run_vit_mae,
    **dict.fromkeys(("clip", "siglip"), run_towers),
    **dict.fromkeys(("siglip2", "siglip2_vision_model"), partial(run_towers, run_tower=run_patches)),
    **dict.fromkeys(("eomt", "eomt_dinov3"), run_eomt),
    **dict.fromkeys(("vitpose", "vitpose_backbone"), run_vitpose),
    "lw_detr": run_lw_detr,
}


def _open_timm(source: Source) -> Run:
    if find_spec("timm") is None:
        raise NoReferenceError("timm is not installed. Install it to compare: pip install timm")
    if "pretrained_cfg" not in source.config:
        raise NoReferenceError(
            f"config.json of {source.name!r} has no pretrained_cfg, which timm requires to load it."
        )
    import timm

    revision = f"@{source.hub['revision']}" if "revision" in source.hub else ""
    place = f"local-dir:{source.name}" if Path(source.name).is_dir() else f"hf-hub:{source.name}{revision}"
    model: Any = timm.create_model(place, pretrained=True, dynamic_img_size=True).float().eval()

    def run(images: Tensor) -> Outputs:
        summary = "logits" if model.num_classes else "pooler_output"
        tokens = model.forward_features(images)
        return {"last_hidden_state": tokens, summary: model(images)}

    return run


def _open_torch_encoder(source: Source, config: HfViTConfig) -> Run:
    """Builds the source model with `nn.TransformerEncoder` and returns a function that runs the model on images."""
    weights = {name: source.weights.read(name).float() for name in source.weights.shapes}
    sizes = (config.hidden_size, config.num_attention_heads, config.intermediate_size)
    options: Any = {"activation": ACT2FN[config.hidden_act], "layer_norm_eps": config.layer_norm_eps}
    layer = nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=True, **options)
    encoder = nn.TransformerEncoder(layer, config.num_hidden_layers, enable_nested_tensor=False).eval()
    encoder.layers.load_state_dict(
        {name.removeprefix("torch_encoder."): value for name, value in weights.items() if "torch_encoder" in name}
    )

    def run(images: Tensor) -> Outputs:
        patches = functional.unfold(images, to_pair(config.patch_size), stride=to_pair(config.patch_size))
        tokens = patches.mT @ weights["patches.weight"].flatten(1).T + weights.get("patches.bias", 0)
        if "cls_token" in weights:
            tokens = torch.cat((weights["cls_token"].flatten()[None, None].expand(len(images), -1, -1), tokens), dim=1)
        if "positions" in weights:
            tokens[:, -weights["positions"].shape[-2] :] += weights["positions"]
        norm = (weights["norm.weight"], weights["norm.bias"], config.layer_norm_eps)
        tokens = functional.layer_norm(encoder(tokens), tokens.shape[-1:], *norm)
        outputs = {"last_hidden_state": tokens}
        if "classifier.weight" in weights:
            pooled = tokens[:, 0] if config.pooling == "cls" else tokens.mean(1)
            outputs["logits"] = functional.linear(pooled, weights["classifier.weight"], weights["classifier.bias"])
        return outputs

    return run


@dataclass(frozen=True)
class OutputParity:
    """Difference between the source and the converted model in one output.

    Args:
        size: Height and width of the images in pixels.
        output: Name of the output.
        absolute: Largest absolute difference.
        relative: Largest absolute difference, divided by the largest value of the source output.
    """

    size: tuple[int, int]
    output: str
    absolute: float
    relative: float

    @property
    def is_equal(self) -> bool:
        """Whether the relative difference is within the float32 tolerance. False if the difference is NaN."""
        return self.relative <= TOLERANCE


def compare_with_source(source: Source, converted: Converted) -> Iterator[OutputParity]:
    """Runs a converted checkpoint and its source implementation on the same random images, in float32.

    Args:
        source: The published checkpoint.
        converted: The converted checkpoint.

    Yields:
        The largest difference of each output that both models have (hidden states, logits, …), at the native image
        size and, if the source supports it, at a non-square size.

    Raises:
        NoReferenceError: if the source implementation is not installed, or cannot be identified.
        ValueError: if the models have no output in common.
    """
    run_source = open_reference(source, converted.config)
    model = converted.model_class.from_pretrained(
        None, config=converted.config, state_dict=converted.weights, dtype=torch.float32
    ).eval()
    model_type = source.config.get("model_type", "")
    skipped = NOT_COMPARED.get(model_type, set())
    for size in sizes(converted.config, "nn.TransformerEncoder" if MARK in source.weights.shapes else model_type):
        images = torch.randn(1, converted.config.num_channels, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = run_source(images)
            actual = run_converted(model, images, expected.get("input_ids"))
        names = [name for name in expected if name in actual and name not in skipped]
        if not names:
            raise ValueError(f"{source.name!r} and {type(model).__name__} have no output in common to compare.")
        rows = [compare(size, name, actual[name], expected[name]) for name in names]
        for _, same in groupby(rows, key=lambda row: row.output):
            yield max(same, key=lambda row: (row.relative != row.relative, row.relative))


def compare(size: tuple[int, int], name: str, actual: Tensor, expected: Tensor) -> OutputParity:
    """Returns the largest difference between two versions of an output, or infinity if their shapes differ.

    Hidden states are named "hidden_states" in the result, without their index.
    """
    output = name.partition("[")[0]
    if actual.shape != expected.shape:
        return OutputParity(size, output, torch.inf, torch.inf)
    absolute = float((actual - expected).abs().max())
    return OutputParity(size, output, absolute, absolute / max(float(expected.abs().max()), 1e-30))


def sizes(config: HfViTConfig, model_type: str = "") -> list[tuple[int, int]]:
    """Returns the native image size in pixels and, if the source supports it, a size with a different aspect ratio."""
    rows, columns = config.grid_size
    other = (max(1, rows * 3 // 4), columns * 5 // 4)
    if model_type in SQUARE_ONLY:
        other = (max(2, rows // 4 * 2),) * 2
    grids = [(rows, columns)] if model_type in NATIVE_ONLY else [(rows, columns), other]
    height, width = to_pair(config.patch_size)
    return [(rows * height, columns * width) for rows, columns in grids]


def run_converted(model: HfViTPreTrainedModel, images: Tensor, texts: Tensor | None = None) -> Outputs:
    """Returns all outputs of an hf_vit model and of its base model for images and texts."""
    outputs = named(model.base_model(images, output_hidden_states=True))
    # Hidden states are computed without a mask, because masked ones contain only the visible patches.
    if isinstance(model, HfViTForMaskedImageModeling):
        masked = model(images, bool_masked_pos=mask_most_patches(images, model.config.patch_size))
        return {**outputs, "logits": masked.logits, "reconstruction": masked.reconstruction}
    if isinstance(model, HfViTForZeroShotImageClassification):
        return {**outputs, **named(model(texts, images))}
    return outputs if model.base_model is model else {**outputs, **named(model(images, output_hidden_states=True))}
