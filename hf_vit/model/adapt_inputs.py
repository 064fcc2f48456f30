"""Functions that permanently change the image size, patch size, channels or prefix tokens of a loaded model."""

import copy
from collections.abc import Callable, Mapping
from typing import Literal, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .configuration_hf_vit import HfViTConfig, to_pair
from .embeddings import HfViTEmbeddings, resample_to_grid, sincos_position_embeddings
from .shared import to_float32_or_higher


Size = int | list[int] | tuple[int, int]


class Geometry(TypedDict, total=False):
    """New values for the fields of `HfViTConfig` that `apply_geometry` changes; `None` leaves a field unchanged."""

    image_size: Size | None
    patch_size: Size | None
    num_channels: int | None
    use_cls_token: bool | None
    use_distillation_token: bool | None
    num_register_tokens: int | None
    pooling: Literal["cls", "mean"] | None


class HfViTInputSized:
    """Base class of layers and models whose weights depend on image size, patch size, channels or prefix tokens."""

    def check_inputs(self, old: HfViTConfig, new: HfViTConfig) -> None:
        """Raises `ValueError` if the layer cannot adapt to the configuration `new`, before any weight is changed."""

    def adapt_inputs(self, old: HfViTConfig, new: HfViTConfig) -> None:
        """Resizes the weights of this layer, but not of its submodules, from configuration `old` to `new`."""


def resize_patch_kernels(kernels: Tensor, new_size: tuple[int, int]) -> Tensor:
    """Resizes patch kernels (D, C, p, q) so that their responses to resized patches stay the same."""
    # As in FlexiViT (https://arxiv.org/abs/2212.08013), section 3.4, the new kernel is the pseudo-inverse of Bᵀ times
    # the old kernel, where the matrix B resizes a patch. Larger patches give equal responses, and smaller patches give
    # the best approximation on white noise. B is bicubic and antialiased, as in timm; the code of the paper uses
    # bilinear resizing. The inverse amplifies rounding errors, so it is computed in float64 on the CPU.
    old_size = kernels.shape[2:]
    if tuple(old_size) == tuple(new_size):
        return kernels
    each_pixel = torch.eye(old_size.numel(), dtype=torch.float64).unflatten(1, (1, *old_size))  # (p·q, 1, p, q)
    resize = F.interpolate(each_pixel, size=new_size, mode="bicubic", antialias=True).flatten(1)  # (old p·q, new p·q)
    resized = kernels.detach().cpu().double().flatten(2) @ torch.linalg.pinv(resize).T  # (D, C, new p·q)
    return resized.unflatten(2, new_size).to(kernels)


def change_input_channels(kernels: Tensor, num_channels: int) -> Tensor:
    """Converts patch kernels (D, C, p, q) to a different number of channels and keeps the scale of their responses.

    A single new channel gets the sum of the old kernels, so a gray image gives the same response as its copy in all
    old channels gave. Otherwise, the old channels are repeated cyclically and scaled by C / `num_channels`, as in
    timm.
    """
    old = kernels.shape[1]
    if num_channels == old:
        return kernels
    precise = to_float32_or_higher(kernels.detach())
    if num_channels == 1:
        precise = precise.mean(dim=1, keepdim=True)
    in_turn = torch.arange(num_channels, device=kernels.device) % precise.shape[1]
    return (precise[:, in_turn] * (old / num_channels)).to(kernels.dtype)


def apply_geometry(model: PreTrainedModel, **geometry: Unpack[Geometry]) -> None:
    """Permanently changes the inputs that a model accepts, and its configuration; `None` leaves a field unchanged.

    All changes are checked before the first one is applied. Changed weights become new parameters, so build the
    optimizer afterwards; frozen weights stay frozen. If the patch grid changes, fixed sin-cos positions become learned
    ones, because their formula would not give the positions used in training. Rotary "scaled_index" positions keep
    the old grid as `config.rope_grid_size`.

    Args:
        model: Any model of this package.
        image_size: Native height and width in pixels; the position table is resampled to the new grid.
        patch_size: Height and width of a patch in pixels; the kernels are resized by `resize_patch_kernels`. Unless
            `image_size` is given too, the image size stays the same. Smaller patches then give a finer grid, and the
            positions are resampled to it. `config.patch_padding` is scaled by the same factor.
        num_channels: Number of image channels; see `change_input_channels`.
        use_cls_token: Whether the model has a CLS token. A new token and its position are initialized randomly.
        use_distillation_token: Whether the model has a distillation token. If so, a classifier has a second head that
            uses this token.
        num_register_tokens: Number of register tokens. New register tokens are initialized randomly and appended;
            surplus register tokens are removed from the end.
        pooling: New pooling, "cls" or "mean".

    Raises:
        ValueError: if the values are inconsistent or do not fit the model; the message lists valid values.
    """
    changed = {name: value for name, value in geometry.items() if value is not None}
    new = _changed_config(model.config, changed)
    adaptable = [module for module in model.modules() if isinstance(module, HfViTInputSized)]
    for layer in adaptable:
        layer.check_inputs(model.config, new)
    _resize_embeddings(model.base_model.embeddings, model.config, new)
    for layer in adaptable:
        layer.adapt_inputs(model.config, new)
    for name in (*changed, "patch_padding", "position_embedding_type", "rope_grid_size"):
        setattr(model.config, name, vars(new)[name])


def _changed_config(config: HfViTConfig, changed: Mapping[str, object]) -> HfViTConfig:
    new = copy.deepcopy(config)
    for name, value in changed.items():
        setattr(new, name, value)
    new.patch_padding = 0  # The old padding may be invalid for the new patch size.
    new.check()
    sides = zip(to_pair(new.patch_size), to_pair(config.patch_size), strict=True)
    new.patch_padding = min(config.patch_padding * new_side // side for new_side, side in sides)
    if new.pooling != config.pooling and not {new.pooling, config.pooling} <= {"cls", "mean"}:
        raise ValueError(
            f"pooling={config.pooling!r} of an existing model cannot be changed to {new.pooling!r}, which has "
            f"different weights. from_pretrained(..., pooling={new.pooling!r}, ignore_mismatched_sizes=True) "
            "initializes new weights."
        )
    if new.grid_size != config.grid_size and new.rope_coordinates == "scaled_index":
        new.rope_grid_size = config.rotary_grid_size
    if new.grid_size != config.grid_size and new.position_embedding_type == "sincos2d":
        new.position_embedding_type = "learned"
    return new


@torch.no_grad()
def _resize_embeddings(embeddings: HfViTEmbeddings, old: HfViTConfig, new: HfViTConfig) -> None:
    kernels = embeddings.patch_embeddings.projection.weight
    resized = change_input_channels(kernels, new.num_channels)
    resized = resize_patch_kernels(resized, to_pair(new.patch_size))

    def draw(count: int) -> Tensor:
        tokens = torch.empty(1, count, new.hidden_size)
        return nn.init.trunc_normal_(tokens, std=new.initializer_range).to(kernels)  # (1, count, D)

    def tokens(existing: nn.Parameter | None, count: int) -> nn.Parameter | None:
        return as_parameter(_resized_tokens(existing, count, draw), existing) if count else None

    embeddings.patch_embeddings.set_kernels(as_parameter(resized, kernels), new.patch_padding)
    embeddings.cls_token = tokens(embeddings.cls_token, int(new.use_cls_token))
    embeddings.distillation_token = tokens(embeddings.distillation_token, int(new.use_distillation_token))
    embeddings.register_tokens = tokens(embeddings.register_tokens, new.num_register_tokens)
    table = embeddings.position_embeddings
    if new.position_embedding_type == "sincos2d":
        table = sincos_position_embeddings(new.grid_size, new.hidden_size, new.num_prefix_positions).to(kernels)
    elif table is not None:
        # The fixed table may have a different dtype than the learned table that replaces it.
        table = as_parameter(_resized_table(table, old, new, draw).to(kernels.dtype), table)
    embeddings.position_embeddings = table


def _resized_tokens(tokens: Tensor | None, count: int, draw: Callable[[int], Tensor]) -> Tensor:
    """Returns the first `count` tokens of a sequence (1, ., D). If it is shorter, `draw` adds random tokens."""
    if tokens is None:
        return draw(count)
    missing = count - tokens.shape[1]
    if missing > 0:
        return torch.cat((tokens, draw(missing)), dim=1)
    return tokens[:, :count] if missing else tokens


def _resized_table(table: Tensor, old: HfViTConfig, new: HfViTConfig, draw: Callable[[int], Tensor]) -> Tensor:
    """Resamples a position table (1, P + N, D) to a new grid and adds random positions for new prefix tokens."""
    table = resample_to_grid(table, old, new.grid_size, old.num_prefix_positions)
    tokens = ("use_cls_token", "use_distillation_token")
    had, has = ([name for name in tokens if vars(config)[name]] for config in (old, new))
    if had == has or not new.prefix_has_position:
        return table
    rows = {name: table[:, index : index + 1] for index, name in enumerate(had)}
    prefix = [rows[name] if name in rows else draw(1) for name in has]
    return torch.cat((*prefix, table[:, len(had) :]), dim=1)


def as_parameter(values: Tensor, old: Tensor | None) -> nn.Parameter:
    """Returns `values` as a parameter that is frozen if `old` is frozen; returns `old` itself if `values` is `old`."""
    if not isinstance(old, nn.Parameter):
        return nn.Parameter(values.clone())
    return old if values is old else nn.Parameter(values.clone(), requires_grad=old.requires_grad)
