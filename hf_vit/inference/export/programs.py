"""Helpers for export: inputs, outputs and dynamic sizes for tracing a model, and comparison of a program with a model.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, T texts, S tokens of a text,
Q queries.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim

from ...convert import TASKS
from ...model.configuration_hf_vit import to_pair
from ...model.embeddings import Grid
from ...model.modeling_hf_vit import HfViTModel
from ...model.pretrained import HfViTPreTrainedModel, check_trained, read_config
from ...model.shared import match
from ...model.task_image_reconstruction import HfViTForImageReconstruction
from ...model.task_masked_image_modeling import HfViTForMaskedImageModeling
from ...model.task_object_detection import HfViTForObjectDetection
from ...model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification


Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

# Model outputs that exported programs do not return: the loss requires labels, `bool_masked_pos` is an input, and
# `last_hidden_state` is returned only if it is the main output
LEFT_OUT = ("loss", "bool_masked_pos", "last_hidden_state")
TOLERANCE = 1e-4  # Largest accepted difference in float32, relative to the largest value of an output
TRACED_BATCH = 2
MAX_TEXT_TOKENS = 512  # maximum text length in tokens for text towers without a limit


class Bounds(NamedTuple):
    """The largest batch size and patch grid that a program accepts; None means no limit."""

    batch: int | None = None
    grid: Grid | None = None


class HfViTProgram(nn.Module):
    """Wraps a model for tracing: inputs are tensors, the output is a dictionary of tensors."""

    def __init__(self, model: HfViTPreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.outputs = output_names(model)
        # Programs do not compute a loss.
        has_loss = isinstance(model, HfViTForMaskedImageModeling | HfViTForImageReconstruction)
        self.options = {"return_loss": False} if has_loss else {}

    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Returns the outputs by name; see `example_inputs` for the shapes of the inputs."""
        given = {"bool_masked_pos": bool_masked_pos, "input_ids": input_ids, "attention_mask": attention_mask}
        given = {name: value for name, value in given.items() if value is not None}
        outputs = self.model(pixel_values=pixel_values, return_dict=True, **given, **self.options)
        return {name: outputs[name] for name in self.outputs}


@torch.no_grad()
def output_names(model: HfViTPreTrainedModel) -> tuple[str, ...]:
    """Returns the names of the outputs that the exported program of a model returns."""
    outputs = model(**example_inputs(model, 1, min_grid(model)), return_dict=True)
    left_out = LEFT_OUT[:-1] if isinstance(model, HfViTModel) else LEFT_OUT
    return tuple(name for name, value in outputs.items() if isinstance(value, Tensor) and name not in left_out)


def open_model(name_or_path: str, **kwargs: Any) -> HfViTPreTrainedModel:
    """Opens a saved model in float32, with the class and task that it was saved with.

    Args:
        name_or_path: Folder of a saved model, or its name on the Hub.
        **kwargs: Arguments of `from_pretrained`, such as `revision`.

    Raises:
        ValueError: if the model cannot be exported, or has missing or non-finite weights.
        OSError: if there is no such model.
    """
    config = read_config(name_or_path, **kwargs)
    name = (config.get("architectures") or ["a model of unknown class"])[0]
    # A program of one forward pass does not generate captions.
    classes = {known.__name__: known for task, known in TASKS.items() if task != "image-captioning"}
    if config.get("model_type") != "hf_vit" or name not in classes:
        raise ValueError(
            f"{name_or_path} is {name} of model_type {config.get('model_type')!r}, which cannot be exported. It must "
            f"be one of {', '.join(classes)}. Use hf-vit convert to convert other checkpoints."
        )
    model: HfViTPreTrainedModel = classes[name].from_pretrained(name_or_path, dtype=torch.float32, **kwargs).eval()
    check_trained(model, name_or_path, model.untrained_weights)
    return model


def example_inputs(model: HfViTPreTrainedModel, batch: int, grid: Grid, seed: int = 0) -> dict[str, Tensor]:
    """Returns random inputs of a model.

    Args:
        model: Model of any task.
        batch: Number B of images.
        grid: Rows and columns (h, w) of patches.
        seed: Seed of the random numbers.

    Returns:
        `pixel_values` (B, C, H, W); for masked image modeling also `bool_masked_pos` (B, N); for image-text models
        also `input_ids` and `attention_mask` (T, S), with T = B + 1.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    height, width = (side * patch for side, patch in zip(grid, to_pair(config.patch_size), strict=True))
    inputs = {"pixel_values": torch.randn(batch, config.num_channels, height, width, generator=generator)}
    if isinstance(model, HfViTForMaskedImageModeling):
        inputs["bool_masked_pos"] = torch.rand(batch, grid[0] * grid[1], generator=generator) > 0.5
    if isinstance(model, HfViTForZeroShotImageClassification):
        vocabulary, longest = text_limits(model)
        length = 2 + (batch + seed) % max(1, longest - 2)
        inputs["input_ids"] = torch.randint(vocabulary, (batch + 1, length), generator=generator)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, 2:] = 0
    return inputs


def text_limits(model: HfViTForZeroShotImageClassification) -> tuple[int, int]:
    """Returns the vocabulary size and the maximum number of tokens per text."""
    own = model.text_options.encoder_config is None
    limits = vars(model.text_options if own else model.text_model.config)
    return limits["vocab_size"], limits.get("max_position_embeddings") or MAX_TEXT_TOKENS


def open_sizes(model: HfViTPreTrainedModel, bounds: Bounds) -> dict[str, dict[int, Any]]:
    """Returns the dynamic dimensions of each input by name, in the format of `torch.export`."""
    least, most = min_grid(model), bounds.grid or (None, None)
    batch = Dim("batch", min=1, max=bounds.batch)
    sides = [Dim(name, min=least[i], max=most[i]) for i, name in enumerate(("rows", "columns"))]
    height, width = (patch * side for patch, side in zip(to_pair(model.config.patch_size), sides, strict=True))
    sizes: dict[str, dict[int, Any]] = {"pixel_values": {0: batch, 2: height, 3: width}}
    if isinstance(model, HfViTForMaskedImageModeling):
        sizes["bool_masked_pos"] = {0: batch, 1: Dim.AUTO}  # Dim cannot express the product of rows and columns.
    if isinstance(model, HfViTForZeroShotImageClassification):
        longest = text_limits(model)[1]
        texts = {0: Dim("texts", min=1, max=bounds.batch), 1: Dim("tokens", min=1, max=longest)}
        sizes |= {"input_ids": texts, "attention_mask": texts}
    return sizes


def min_grid(model: HfViTPreTrainedModel) -> Grid:
    """Returns the minimum patch grid (h, w) for a program.

    The coarsest feature map and the grid of windows need at least two rows and columns, because `torch.export` treats
    dimensions of size 1 as constants.
    """
    options = vars(model.options) if "options" in vars(model) else {}  # options of the model's head
    factors = [*options.get("scale_factors", ()), *options.get("reassemble_factors", ())]
    least = math.ceil(2 / min([1.0, *factors]))
    rows, columns = (max(least, side + 1) for side in to_pair(model.config.window_size or 1))
    return rows, columns


def traced_grid(model: HfViTPreTrainedModel) -> Grid:
    """Returns a small, non-square patch grid (h, w) for tracing. It differs from the native grid of the model."""
    rows, columns = min_grid(model)
    is_native = (rows + 1, columns + 3) == model.config.grid_size
    return rows + 1, columns + 3 + is_native


def comparison_sizes(model: HfViTPreTrainedModel, bounds: Bounds) -> list[tuple[int, Grid]]:
    """Returns three pairs of batch size and patch grid (native, tall, wide), none of which was used for tracing."""
    least, traced = min_grid(model), traced_grid(model)
    rows, columns = (max(own, side) for own, side in zip(model.config.grid_size, least, strict=True))
    wanted = [(rows, columns), (rows + 3, columns), (max(least[0], rows - 1), columns + 5)]
    if bounds.grid is not None:
        wanted = [(min(grid[0], bounds.grid[0]), min(grid[1], bounds.grid[1])) for grid in wanted]
    grids = [grid if grid != traced else (grid[0], grid[1] - 1) for grid in wanted]
    return list(zip((1, 3, 4), grids, strict=True))


class Difference(NamedTuple):
    """Difference between an output of a program and the corresponding output of the model."""

    batch: int
    height: int  # height and width of the images in pixels
    width: int
    output: str
    largest: float  # largest absolute difference, divided by the largest absolute value of the output

    @property
    def is_equal(self) -> bool:
        """Whether the difference is within the tolerance; false for NaN."""
        return self.largest <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.batch} x {self.height}x{self.width}  {self.output:<22}{self.largest:.1e} of its largest value"


@torch.no_grad()
def compare(model: HfViTPreTrainedModel, run: Run, bounds: Bounds) -> Iterator[Difference]:
    """Compares an exported program with its model at three batch sizes and three image sizes.

    Args:
        model: Model in evaluation mode, in float32 on the CPU.
        run: Function that runs the program.
        bounds: Largest batch size and patch grid of the program.

    Yields:
        The difference of each output at each size.

    Raises:
        ValueError: if the program fails at one of the sizes, or its output shapes differ from those of the model.
    """
    program = HfViTProgram(model).eval()
    for seed, (batch, grid) in enumerate(comparison_sizes(model, bounds), start=1):
        inputs = example_inputs(model, batch, grid, seed)
        height, width = inputs["pixel_values"].shape[2:]
        expected: dict[str, Tensor] = program(**inputs)
        try:
            found = run(inputs)
        except Exception as error:  # Runtimes raise errors of different types.
            raise ValueError(f"The program fails for {batch} images of {height}x{width} pixels: {error}") from error
        shapes = {name: tuple(value.shape) for name, value in expected.items()}
        if {name: tuple(value.shape) for name, value in found.items()} != shapes:
            raise ValueError(
                f"For {batch} images of {height}x{width} pixels, the program returns other shapes than those of the "
                f"model, {shapes}."
            )
        if isinstance(model, HfViTForObjectDetection):
            found = in_order(found, expected)
        for name, value in expected.items():
            largest = float((found[name] - value).abs().max() / value.abs().max())
            yield Difference(batch, height, width, name, largest)


def in_order(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reorders queries (B, Q, .) in the order of the most similar expected queries.

    The program may return queries with equal scores in another order than the model.
    """
    queries, wanted = (torch.cat([part[name] for name in expected], dim=-1) for part in (found, expected))  # (B, Q, .)
    orders = [match(torch.cdist(own, other))[1] for own, other in zip(wanted, queries, strict=True)]
    index = torch.stack(orders)[..., None]  # (B, Q, 1)
    return {name: value.gather(1, index.expand_as(value)) for name, value in found.items()}
