"""Permanent changes of what a model takes in: image size, patch size, channels, prefix tokens.

Shapes: C channels, p q patch height and width, h w patch grid, N = h·w patches, P prefix tokens with a position, D
hidden size.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .configuration_hf_vit import HfViTConfig, to_pair
from .embeddings_hf_vit import HfViTEmbeddings, resample_position_embeddings, sincos_position_embeddings
from .task_depth import HfViTDepthHead
from .task_detection import HfViTQueryDecoder
from .task_mim import HfViTMaeDecoder, HfViTPixelPredictor


Size = int | list[int] | tuple[int, int]
ChannelMode = Literal["repeat", "mean"]


def resize_patch_kernels(kernels: Tensor, new_size: tuple[int, int]) -> Tensor:
    """Resizes patch kernels so that they answer to resized patches as the old ones do to the old patches.

    With B the matrix that resizes a patch, the new kernel is the pseudo-inverse of B's transpose times the old one:
    the answers are equal where patches grow, and as close as can be on white noise where they shrink. B is bicubic and
    antialiased as in timm, which is how images are resized before they come in; the reference code of the paper has it
    bilinear. An inverse magnifies rounding, so it is computed in float64, on the CPU, which all machines have.

    Args:
        kernels: (D, C, p, q).
        new_size: Height and width in pixels wanted.

    Returns:
        (D, C, *new_size) in dtype and device of `kernels`; `kernels` itself if they have that size.

    Source: FlexiViT (https://arxiv.org/abs/2212.08013), section 3.4.
    """
    old_size = kernels.shape[2:]
    if tuple(old_size) == tuple(new_size):
        return kernels
    each_pixel = torch.eye(old_size.numel(), dtype=torch.float64).unflatten(1, (1, *old_size))  # (p·q, 1, p, q)
    resize = F.interpolate(each_pixel, size=new_size, mode="bicubic", antialias=True).flatten(1)  # (old p·q, new p·q)
    resized = kernels.detach().cpu().double().flatten(2) @ torch.linalg.pinv(resize).T  # (D, C, new p·q)
    return resized.unflatten(2, new_size).to(kernels)


def change_input_channels(kernels: Tensor, num_channels: int, mode: ChannelMode = "repeat") -> Tensor:
    """Gives patch kernels another number of image channels.

    Both modes keep the size of the answer, and one channel always gets the sum of the old ones, so that a grey image
    is answered to as its repetition in all channels was.

    Args:
        kernels: (D, C, p, q).
        num_channels: Number of channels wanted.
        mode: "repeat" takes the old channels in turn, times C / `num_channels`, as timm does: the first three of five
            can be red, green and blue again. "mean" gives each channel the mean of the old ones, times the same, which
            is exact on images with equal channels, and blind to colour.

    Returns:
        (D, num_channels, p, q) in dtype and device of `kernels`; `kernels` itself if they have so many channels.

    Raises:
        ValueError: if there is no such mode.
    """
    if mode not in ("repeat", "mean"):
        raise ValueError(f"mode={mode!r} is unknown. Choose 'repeat' or 'mean'.")
    old = kernels.shape[1]
    if num_channels == old:
        return kernels
    precise = kernels.detach().to(torch.promote_types(kernels.dtype, torch.float32))
    if mode == "mean" or num_channels == 1:
        precise = precise.mean(dim=1, keepdim=True)
    in_turn = torch.arange(num_channels, device=kernels.device) % precise.shape[1]
    return (precise[:, in_turn] * (old / num_channels)).to(kernels.dtype)


def apply_geometry(
    model: PreTrainedModel,
    *,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    num_channels: int | None = None,
    use_cls_token: bool | None = None,
    num_register_tokens: int | None = None,
    pooling: Literal["cls", "mean"] | None = None,
    channel_mode: ChannelMode = "repeat",
) -> None:
    """Changes a built model and its configuration for good; `None` leaves a field as it is.

    All changes are checked before the first one is made. Changed weights are new parameters, which train if the old
    ones did: build the optimizer afterwards. Fixed sin-cos positions turn into learned ones where the grid changes,
    because their formula would not give what the model has seen; rotary "scaled_index" positions keep their scale in
    `config.rope_grid_size`.

    Args:
        model: Any of our models.
        image_size: Height and width in pixels that the position table is for; it is resampled to the new grid.
        patch_size: Height and width in pixels of a patch; the kernels are resized by `resize_patch_kernels`. The image
            size stays unless it is given too, so smaller patches make a finer grid, whose positions are resampled.
            `config.patch_padding` is scaled along.
        num_channels: Number of image channels; see `change_input_channels`.
        use_cls_token: Whether there is a CLS token. A new one, and its position, are drawn at random.
        num_register_tokens: Number of registers. New ones are drawn at random and come last; the last are dropped.
        pooling: "cls" or "mean", which can take each other's place.
        channel_mode: "repeat" or "mean", see `change_input_channels`.

    Raises:
        ValueError: if the values do not fit together or the model, saying what would.
    """
    wanted = {
        "image_size": image_size,
        "patch_size": patch_size,
        "num_channels": num_channels,
        "use_cls_token": use_cls_token,
        "num_register_tokens": num_register_tokens,
        "pooling": pooling,
    }
    changed = {name: value for name, value in wanted.items() if value is not None}
    new = _changed_config(model.config, changed)
    _check_heads(model, new)
    _resize_embeddings(model.base_model.embeddings, model.config, new, channel_mode)
    for module in model.modules():
        if isinstance(module, HfViTQueryDecoder):
            _resize_mid_positions(module, model.config, new)
        elif isinstance(module, HfViTMaeDecoder):
            module.position_embeddings = _resampled(module.position_embeddings, model.config, new, num_prefix=0)
        elif isinstance(module, HfViTPixelPredictor):
            _resize_predictor(module, model.config, new, channel_mode)
    for name in (*changed, "patch_padding", "position_embedding_type", "rope_grid_size"):
        setattr(model.config, name, vars(new)[name])


def _changed_config(config: HfViTConfig, changed: Mapping[str, object]) -> HfViTConfig:
    """A checked copy of `config` with other fields."""
    new = copy.deepcopy(config)
    for name, value in changed.items():
        setattr(new, name, value)
    new.patch_padding = 0  # of which nobody knows yet whether it fits
    new.check()
    sides = zip(to_pair(new.patch_size), to_pair(config.patch_size), strict=True)
    new.patch_padding = min(config.patch_padding * new_side // side for new_side, side in sides)
    if new.pooling != config.pooling and not {new.pooling, config.pooling} <= {"cls", "mean"}:
        raise ValueError(
            f"pooling={config.pooling!r} cannot become {new.pooling!r} in a built model: other weights follow it. "
            f"from_pretrained(..., pooling={new.pooling!r}, ignore_mismatched_sizes=True) draws them anew."
        )
    if new.grid_size != config.grid_size and new.rope_coordinates == "scaled_index":
        new.rope_grid_size = config.rotary_grid_size
    if new.grid_size != config.grid_size and new.position_embedding_type == "sincos2d":
        new.position_embedding_type = "learned"
    return new


def _check_heads(model: PreTrainedModel, new: HfViTConfig) -> None:
    """Raises `ValueError` if a head has weights for a CLS token that comes or goes."""
    has_such_head = any(isinstance(module, HfViTDepthHead) and module.reads_cls_token for module in model.modules())
    if has_such_head and new.use_cls_token != model.config.use_cls_token:
        raise ValueError(
            f"use_cls_token={new.use_cls_token} does not fit the depth head, which was built for use_cls_token="
            f"{model.config.use_cls_token}. Change the backbone (HfViTModel), save it, and open it as HfViTForDepth"
            "Estimation: it gets a new head."
        )
    has_mid_positions = any(
        isinstance(module, HfViTQueryDecoder) and module.mid_position_embeddings is not None
        for module in model.modules()
    )
    if has_mid_positions and new.num_prefix_tokens != model.config.num_prefix_tokens:
        raise ValueError(
            f"use_cls_token={new.use_cls_token} and num_register_tokens={new.num_register_tokens} do not fit the "
            f"positions between the blocks, which were built for {model.config.num_prefix_tokens} tokens before the "
            "patches. Change the backbone (HfViTModel), save it, and open it as HfViTForObjectDetection."
        )


@torch.no_grad()
def _resize_embeddings(embeddings: HfViTEmbeddings, old: HfViTConfig, new: HfViTConfig, mode: ChannelMode) -> None:
    """Brings the weights of `embeddings` from the shapes of one configuration into those of another."""
    kernels = embeddings.patch_embeddings.projection.weight
    resized = change_input_channels(kernels, new.num_channels, mode)
    resized = resize_patch_kernels(resized, to_pair(new.patch_size))

    def draw(count: int) -> Tensor:
        tokens = torch.empty(1, count, new.hidden_size)
        return nn.init.trunc_normal_(tokens, std=new.initializer_range).to(kernels)  # (1, count, D)

    def tokens(existing: nn.Parameter | None, count: int) -> nn.Parameter | None:
        return _parameter(_resized_tokens(existing, count, draw), existing) if count else None

    embeddings.patch_embeddings.set_kernels(_parameter(resized, kernels), new.patch_padding)
    embeddings.cls_token = tokens(embeddings.cls_token, int(new.use_cls_token))
    embeddings.register_tokens = tokens(embeddings.register_tokens, new.num_register_tokens)
    table = embeddings.position_embeddings
    if new.position_embedding_type == "sincos2d":
        table = sincos_position_embeddings(new.grid_size, new.hidden_size, new.num_prefix_positions).to(kernels)
    elif table is not None:
        table = _parameter(_resized_table(table, old, new, draw), table)
    embeddings.position_embeddings = table


@torch.no_grad()
def _resize_mid_positions(decoder: HfViTQueryDecoder, old: HfViTConfig, new: HfViTConfig) -> None:
    """Brings the positions that queries and patches get between blocks to another grid."""
    table = decoder.mid_position_embeddings
    if table is None:
        return
    resampled = _resampled(table, old, new, num_prefix=old.num_prefix_tokens)
    decoder.mid_position_embeddings = _parameter(resampled, table)


@torch.no_grad()
def _resize_predictor(
    predictor: HfViTPixelPredictor, old: HfViTConfig, new: HfViTConfig, channel_mode: ChannelMode
) -> None:
    """Makes a layer that says the pixels of patches say those of patches resized, or of other channels."""
    sizes = to_pair(old.patch_size), to_pair(new.patch_size)
    if (sizes[0], old.num_channels) == (sizes[1], new.num_channels):
        return

    def resize(rows: Tensor) -> Tensor:
        pixels = rows.unflatten(0, (*sizes[0], old.num_channels)).permute(3, 2, 0, 1)  # (E, C, p, q)
        pixels = F.interpolate(pixels.float(), size=sizes[1], mode="bicubic", antialias=True)
        if channel_mode == "mean" or new.num_channels == 1:
            pixels = pixels.mean(dim=1, keepdim=True)
        in_turn = torch.arange(new.num_channels, device=rows.device) % pixels.shape[1]
        return pixels[:, in_turn].permute(2, 3, 1, 0).flatten(0, 2).to(rows.dtype)  # (p·q·C, E)

    weight, bias = predictor.weight, predictor.bias
    predictor.weight = _parameter(resize(weight), weight)
    predictor.bias = _parameter(resize(bias[:, None])[:, 0], bias)
    predictor.out_features = len(predictor.bias)


def _resampled(table: Tensor, old: HfViTConfig, new: HfViTConfig, num_prefix: int) -> Tensor:
    """A position table (K, num_prefix + N, D) at the grid of another configuration."""
    return resample_position_embeddings(
        table,
        old.grid_size,
        new.grid_size,
        num_prefix=num_prefix,
        mode=new.position_interpolation,
        antialias=new.position_antialias,
    )


def _resized_tokens(tokens: Tensor | None, count: int, draw: Callable[[int], Tensor]) -> Tensor:
    """The first `count` of tokens (1, any number, D), completed by drawn ones."""
    if tokens is None:
        return draw(count)
    missing = count - tokens.shape[1]
    if missing > 0:
        return torch.cat((tokens, draw(missing)), dim=1)
    return tokens[:, :count] if missing else tokens


def _resized_table(table: Tensor, old: HfViTConfig, new: HfViTConfig, draw: Callable[[int], Tensor]) -> Tensor:
    """A position table (1, P + N, D) for another grid, with or without the row of the CLS token, the first one."""
    table = _resampled(table, old, new, num_prefix=old.num_prefix_positions)
    more = new.num_prefix_positions - old.num_prefix_positions
    if more > 0:
        return torch.cat((draw(more), table), dim=1)
    return table[:, -more:] if more else table


def _parameter(values: Tensor, old: Tensor | None) -> nn.Parameter:
    """`values` as a parameter that trains unless `old` is a frozen one; `old` itself where it is nothing new."""
    if not isinstance(old, nn.Parameter):
        return nn.Parameter(values.clone())
    return old if values is old else nn.Parameter(values.clone(), requires_grad=old.requires_grad)
