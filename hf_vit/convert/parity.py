"""Numeric parity: a converted checkpoint beside the implementation that it was published for."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..configuration_hf_vit import HfViTConfig, to_pair
from ..modeling_contrastive_hf_vit import HfViTForZeroShotImageClassification
from ..modeling_mim_hf_vit import HfViTForMaskedImageModeling
from ..pretrained_hf_vit import HfViTPreTrainedModel
from .loading import Converted
from .reference import Outputs, hide_most, named, open_reference
from .source import Source


# Of the largest value of an output, in float32
TOLERANCE = 1e-4
# CLIP's norm acts on the CLS token alone, ours on all tokens; its output is among the hidden states.
NOT_COMPARED = {"clip": {"last_hidden_state"}, "clip_vision_model": {"last_hidden_state"}}
# Whose code takes images of the native size only, or square ones only
NATIVE_ONLY = {"eomt", "eomt_dinov3", "lw_detr", "vitpose", "vitpose_backbone"}
SQUARE_ONLY = {"dpt"}


@dataclass(frozen=True)
class OutputParity:
    """How one output of both implementations compares.

    Args:
        size: Height and width of the images in pixels.
        output: Name of the output.
        absolute: Largest difference.
        relative: The same as a fraction of the largest value of the source.
    """

    size: tuple[int, int]
    output: str
    absolute: float
    relative: float

    @property
    def is_equal(self) -> bool:
        """Whether the difference is no more than rounding in float32; false for NaN."""
        return self.relative <= TOLERANCE


def compare_with_source(source: Source, converted: Converted) -> Iterator[OutputParity]:
    """Runs a converted checkpoint and its source implementation on the same noise, in float32.

    Args:
        source: The published checkpoint.
        converted: What became of it.

    Yields:
        The worst of every output that both have (of all hidden states, of the logits, …), at the native image size and
        at another one that is not square, where the source takes such.

    Raises:
        NoReferenceError: if the source implementation is not installed, or the checkpoint does not say which it is.
        ValueError: if nothing can be compared.
    """
    run_source = open_reference(source)
    model = converted.model_class.from_pretrained(
        None, config=converted.config, state_dict=converted.weights, dtype=torch.float32
    ).eval()
    model_type = source.config.get("model_type", "")
    skipped = NOT_COMPARED.get(model_type, set())
    for size in sizes(converted.config, model_type):
        images = torch.randn(1, converted.config.num_channels, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = run_source(images)
            actual = run_ours(model, images, expected.get("input_ids"))
        names = [name for name in expected if name in actual and name not in skipped]
        if not names:
            raise ValueError(f"{source.name!r} has no output in common with {type(model).__name__} to compare.")
        rows = [compare(size, name, actual[name], expected[name]) for name in names]
        for _, same in groupby(rows, key=lambda row: row.output):
            yield max(same, key=lambda row: (row.relative != row.relative, row.relative))


def compare(size: tuple[int, int], name: str, actual: Tensor, expected: Tensor) -> OutputParity:
    """Measures the largest difference; infinite where the shapes differ. `hidden_states[3]` is of `hidden_states`."""
    output = name.partition("[")[0]
    if actual.shape != expected.shape:
        return OutputParity(size, output, torch.inf, torch.inf)
    absolute = float((actual - expected).abs().max())
    return OutputParity(size, output, absolute, absolute / max(float(expected.abs().max()), 1e-30))


def sizes(config: HfViTConfig, model_type: str = "") -> list[tuple[int, int]]:
    """Returns the native image size and one of another shape, in pixels; other sources have less choice."""
    rows, columns = config.grid_size
    other = (max(1, rows * 3 // 4), columns * 5 // 4)
    if model_type in SQUARE_ONLY:
        other = (max(2, rows // 4 * 2),) * 2
    grids = [(rows, columns)] if model_type in NATIVE_ONLY else [(rows, columns), other]
    height, width = to_pair(config.patch_size)
    return [(rows * height, columns * width) for rows, columns in grids]


def run_ours(model: HfViTPreTrainedModel, images: Tensor, texts: Tensor | None = None) -> Outputs:
    """Returns all outputs of one of our models for images and texts, those of its base model included."""
    outputs = named(model.base_model(images, output_hidden_states=True))
    if isinstance(model, HfViTForMaskedImageModeling):  # whose hidden states are those of visible patches
        masked = model(images, bool_masked_pos=hide_most(images, model.config.patch_size))
        return {**outputs, "logits": masked.logits, "reconstruction": masked.reconstruction}
    if isinstance(model, HfViTForZeroShotImageClassification):
        return {**outputs, **named(model(texts, images))}
    return outputs if model.base_model is model else {**outputs, **named(model(images, output_hidden_states=True))}
