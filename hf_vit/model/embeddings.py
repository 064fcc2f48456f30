"""Embedding of images as tokens: patches, prefix tokens and positions.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, P prefix tokens (CLS,
distillation, registers), L = P + N, D hidden size, d head size.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .configuration_hf_vit import HfViTConfig, to_pair
from .layers import HfViTInitialized
from .shared import check_shape


Grid = tuple[int, int]
Rotary = tuple[Tensor, Tensor]


def is_symbolic(*sizes: int) -> bool:
    """Returns whether any of the sizes is a dynamic dimension of a program that is being exported."""
    return torch.compiler.is_exporting() and any(isinstance(size, torch.SymInt) for size in sizes)


def resample_to_grid(table: Tensor, config: HfViTConfig, grid: Grid, num_prefix: int) -> Tensor:
    """Resamples K position tables (K, P + N, D) from the native grid of `config` to another grid, in float32.

    The first `num_prefix` rows are not changed.
    """
    # The offset changes only the scale factor. The table is scaled to the size `grid` + offset and cropped to `grid`.
    old_grid, offset = config.grid_size, config.position_interpolation_offset
    mode, antialias = config.position_interpolation, config.position_antialias
    prefix, patches = table[:, :num_prefix], table[:, num_prefix:]
    if is_symbolic(*grid):
        return torch.cat((prefix, resample_by_products(patches, old_grid, grid, mode, antialias, offset)), dim=1)
    if old_grid == grid:
        return table
    patches = patches.float().unflatten(1, old_grid).permute(0, 3, 1, 2)  # (K, D, h, w)
    factors = [(new + offset) / old for new, old in zip(grid, old_grid, strict=True)]
    target: dict[str, Any] = {"scale_factor": factors} if offset else {"size": grid}
    patches = F.interpolate(patches, **target, mode=mode, antialias=antialias, align_corners=False)
    return torch.cat((prefix, patches.to(table.dtype).flatten(2).transpose(1, 2)), dim=1)


def resample_by_products(
    patches: Tensor, old_grid: Grid, new_grid: Grid, mode: str, antialias: bool, offset: float
) -> Tensor:
    """Resamples patches (K, N, D) as `F.interpolate` does, for exported programs whose new grid has a dynamic size."""
    # Resizing is linear, so it equals a product with a weight matrix along each side. `F.interpolate` is not used,
    # because some runtimes use different cubic weights than torch. One exported program must handle the native grid
    # and all other grids.
    new = [torch.scalar_tensor(side, dtype=torch.float32, device=patches.device) for side in new_grid]
    is_native = (new[0] == old_grid[0]) & (new[1] == old_grid[1])  # the native grid needs no offset
    rows, columns = (
        interpolation_weights(old, side, old / (length + offset * ~is_native), mode, antialias, patches.device)
        for old, side, length in zip(old_grid, new_grid, new, strict=True)
    )
    maps = patches.float().unflatten(1, old_grid)  # (K, old h, old w, D)
    maps = torch.einsum("hi,wj,kijd->khwd", rows, columns, maps)
    return maps.flatten(1, 2).to(patches.dtype)


def interpolation_weights(
    old: int, new: int, step: Tensor, mode: str, antialias: bool, device: torch.device
) -> Tensor:
    """Returns the matrix (new, old) that interpolates `old` values at `new` positions, which are `step` apart."""
    # The weights are those of torch: the cubic convolution of https://doi.org/10.1109/TASSP.1981.1163711 with
    # a = -0.75, or a = -0.5 with antialiasing. Positions beyond the border get the value at the border; with
    # antialiasing, they are ignored.
    centers = (torch.arange(new, dtype=torch.float32, device=device) + 0.5) * step - 0.5  # (new,)
    margin = 0 if antialias else 2
    places = torch.arange(-margin, old + margin, dtype=torch.float32, device=device)
    if mode == "bilinear" and not antialias:
        centers = centers.clamp(0, old - 1)
    distances = (places - centers[:, None]).abs() / (step.clamp_min(1) if antialias else 1)
    weights = (1 - distances).relu()
    if mode == "bicubic":
        a = -0.5 if antialias else -0.75
        near = ((a + 2) * distances - (a + 3)) * distances**2 + 1
        far = ((distances - 5) * distances + 8) * distances * a - 4 * a
        weights = torch.where(distances <= 1, near, torch.where(distances < 2, far, 0.0))
    if antialias:
        return weights / weights.sum(dim=1, keepdim=True)
    meant = places.clamp(0, old - 1)[:, None] == torch.arange(old, device=device)  # (old + 4, old)
    return weights @ meant.to(weights.dtype)


def sincos_position_embeddings(grid: Grid, hidden_size: int, num_prefix: int) -> Tensor:
    """Returns the fixed position table (1, P + N, D) of MAE: sines and cosines of columns, then those of rows."""
    # The rows of prefix tokens are zero. D must be a multiple of 4. Angles are computed in float64, as in the code of
    # MAE (https://arxiv.org/abs/2111.06377).
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")  # (h, w)
    frequencies = 10000.0 ** -(torch.arange(hidden_size // 4, dtype=torch.float64) / (hidden_size // 4))  # (D/4,)
    angles = [axis.flatten()[:, None] * frequencies for axis in (columns, rows)]  # two tensors (N, D/4)
    table = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)  # (N, D)
    return F.pad(table, (0, 0, num_prefix, 0))[None].float()


def rotary_position_embeddings(config: HfViTConfig, grid: Grid, like: Tensor) -> Tensor:
    """Returns cosines and sines (2, P + N, d) of axial rotary positions, with the dtype and device of `like`."""
    # The first half of the d angles of a head contains those of the row, then those of the column. The second half
    # repeats the first. Prefix tokens are not rotated. Angles are computed in float32 or higher. Source:
    # https://arxiv.org/abs/2508.10104; the field `rope_coordinates` of `HfViTConfig` lists the sources of the
    # coordinates.
    kind, device = config.rope_coordinates, like.device
    first = 0.5 if kind == "centered" else 0.0
    axes = [torch.arange(n, dtype=torch.float32, device=device) + first for n in grid]
    if kind == "centered":
        axes = [2 * math.pi * (2.0 * (axis / n) - 1.0) for axis, n in zip(axes, grid, strict=True)]
    elif kind == "scaled_index":
        sides = zip(axes, grid, config.rotary_grid_size, strict=True)
        axes = [axis / n * native for axis, n, native in sides]
    coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)  # (N, 2)
    head_size = config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, 1, 4 / head_size, dtype=torch.float32, device=device)  # (d/4,)
    frequencies = (1 / config.rope_theta**exponents).to(torch.promote_types(like.dtype, torch.float32))
    angles = (coordinates[:, :, None] * frequencies).flatten(1).tile(2)  # (N, d)
    angles = F.pad(angles, (0, 0, config.num_prefix_tokens, 0))  # (P + N, d)
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


class HfViTPatchEmbeddings(nn.Module):
    """Splits an image into patches and projects each patch linearly."""

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__()
        self.patch_size = size = to_pair(config.patch_size)
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, size, size, config.patch_padding)

    def set_kernels(self, kernels: nn.Parameter, padding: int) -> None:
        """Sets patch kernels (D, C, p, q) and padding in pixels, and updates patch size and number of channels."""
        self.projection.in_channels, *patch_size = kernels.shape[1:]
        self.patch_size = to_pair(patch_size)
        self.projection.weight = kernels
        self.projection.kernel_size = self.projection.stride = self.patch_size
        self.projection.padding = (padding, padding)

    def grid(self, pixel_values: Tensor) -> Grid:
        """Returns the patch grid (h, w) of images (B, C, H, W); raises `ValueError` for unsupported images."""
        if pixel_values.ndim != 4:
            raise ValueError(
                f"pixel_values must be (batch, channels, height, width), not {tuple(pixel_values.shape)}. "
                "Add the batch dimension of a single image with pixel_values[None]."
            )
        channels, height, width = pixel_values.shape[1:]
        if channels != (own := self.projection.in_channels):
            raise ValueError(
                f"Images have {channels} channels, but the model takes {own}. Set num_channels of the model or of the "
                "image processor."
            )
        for side, size, patch in zip(("height", "width"), (height, width), self.patch_size, strict=True):
            if size % patch or size == 0:
                below, above = size // patch * patch, (size // patch + 1) * patch
                raise ValueError(
                    f"The image {side} {size} is not a multiple of the patch {side} {patch}. Nearest valid values: "
                    f"{f'{below} or ' if below else ''}{above}. The image processor "
                    f"rounds image sizes with ensure_multiple_of={patch}."
                )
        return height // self.patch_size[0], width // self.patch_size[1]

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Maps images (B, C, H, W) to patch embeddings (B, N, D), row by row."""
        return self.projection(pixel_values).flatten(2).transpose(1, 2)  # (B, N, D)


class HfViTEmbeddings(HfViTInitialized):
    """Computes the input tokens of the encoder: prefix tokens, patches and their positions."""

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embeddings = HfViTPatchEmbeddings(config)

        def tokens(wanted: int) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(1, wanted, config.hidden_size)) if wanted else None

        self.cls_token = tokens(int(config.use_cls_token))
        self.distillation_token = tokens(int(config.use_distillation_token))
        self.register_tokens = tokens(config.num_register_tokens)
        self.mask_token = tokens(int(config.use_mask_token))
        num_positions = config.num_prefix_positions + math.prod(config.grid_size)
        self.position_embeddings: Tensor | None
        if config.position_embedding_type == "sincos2d":
            self.register_buffer("position_embeddings", self.sincos_table(), persistent=False)
        else:
            learned = config.position_embedding_type in ("learned", "learned+rotary")
            self.position_embeddings = tokens(num_positions if learned else 0)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialize(self, std: float) -> None:
        """Draws tokens and learned positions at random; sets the mask token to zero and computes fixed positions."""
        for tokens in (self.cls_token, self.distillation_token, self.register_tokens, self.position_embeddings):
            if isinstance(tokens, nn.Parameter):
                init.trunc_normal_(tokens, mean=0.0, std=std)
        if self.mask_token is not None:
            init.zeros_(self.mask_token)
        if self.config.position_embedding_type == "sincos2d":
            init.copy_(self.position_embeddings, self.sincos_table())

    def sincos_table(self) -> Tensor:
        """Returns the fixed position table at the native grid, (1, P + N, D)."""
        return sincos_position_embeddings(
            self.config.grid_size, self.config.hidden_size, self.config.num_prefix_positions
        )

    def forward(
        self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None, patch_attention_mask: Tensor | None = None
    ) -> Tensor:
        """Embeds images (B, C, H, W) as tokens (B, L, D).

        Args:
            pixel_values: Images (B, C, H, W).
            bool_masked_pos: (B, N) bool, True for patches that the mask token replaces.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom. The positions of
                each image are resampled to its grid without padding.
        """
        grid = self.check(pixel_values, patch_attention_mask)
        patches = self.patch_embeddings(pixel_values)  # (B, N, D)
        if bool_masked_pos is not None:
            if self.mask_token is None:
                raise ValueError("bool_masked_pos needs a mask token. Load the model with use_mask_token=True.")
            check_shape("bool_masked_pos", bool_masked_pos, "batch, patches", *patches.shape[:2])
            patches = torch.where(bool_masked_pos[..., None].bool(), self.mask_token.to(patches.dtype), patches)
        learned = (self.cls_token, self.distillation_token, self.register_tokens)
        prefix = [tokens.expand(patches.shape[0], -1, -1) for tokens in learned if tokens is not None]
        tokens = torch.cat((*prefix, patches), dim=1)  # (B, L, D)
        positions = self.positions(grid, patch_attention_mask)
        return self.dropout(tokens if positions is None else tokens + positions)

    def check(self, pixel_values: Tensor, patch_attention_mask: Tensor | None = None) -> Grid:
        """Returns the patch grid (h, w) of images (B, C, H, W); raises `ValueError` if images or mask are invalid."""
        grid = self.patch_embeddings.grid(pixel_values)
        if patch_attention_mask is not None:
            expected = (pixel_values.shape[0], *grid)
            check_shape("patch_attention_mask", patch_attention_mask, "batch, rows, columns of patches", *expected)
        return grid

    def positions(self, grid: Grid, patch_attention_mask: Tensor | None = None) -> Tensor | None:
        """Returns token positions, (1, L, D), or (B, L, D) with a mask; returns None without a position table."""
        table, dtype = self.position_embeddings, self.patch_embeddings.projection.weight.dtype
        if table is None:
            return None
        num_prefix = self.config.num_prefix_positions
        num_without = self.config.num_prefix_tokens - num_prefix

        def resample(own_grid: Grid) -> Tensor:
            # The fixed table stays in float32 if the model is loaded in half precision.
            positions = resample_to_grid(table, self.config, own_grid, num_prefix).to(dtype)
            if not num_without:
                return positions
            before, after = positions.tensor_split((num_prefix,), dim=1)
            return torch.cat((before, F.pad(after, (0, 0, num_without, 0))), dim=1)

        return positions_of_batch(resample, grid, patch_attention_mask, self.config.num_prefix_tokens).flatten(0, -3)

    def rotary(self, pixel_values: Tensor, patch_attention_mask: Tensor | None = None) -> Rotary | None:
        """Returns the cosines and sines of rotary positions, or None if the model does not use rotary positions.

        Their shape is (1, L, d). With a mask, it is (B, 1, L, d).
        """
        if "rotary" not in self.config.position_embedding_type:
            return None

        grid, num_prefix = self.patch_embeddings.grid(pixel_values), self.config.num_prefix_tokens
        turn = partial(rotary_position_embeddings, self.config, like=pixel_values)
        turns = positions_of_batch(turn, grid, patch_attention_mask, num_prefix)  # (2, L, d) or (B, 2, L, d)
        cosine, sine = turns.unsqueeze(-3).unbind(-4)
        return cosine, sine


def positions_of_batch(
    table_of: Callable[[Grid], Tensor], grid: Grid, patch_attention_mask: Tensor | None, num_prefix: int
) -> Tensor:
    """Returns K position tables of a batch, (K, P + N, D), or with a mask those of each image, (B, K, P + N, D)."""
    # The function `table_of` computes the tables (K, P + h·w, D) of a grid. The argument `grid` is the grid of the
    # batch, including padding. Padding patches have a position of zero.
    if patch_attention_mask is None:
        return table_of(grid)
    grids = image_grids(patch_attention_mask)
    tables = {}
    for rows, columns in set(grids):
        prefix, patches = table_of((rows, columns)).tensor_split((num_prefix,), dim=1)
        patches = patches.unflatten(1, (rows, columns))  # (K, own h, own w, D)
        patches = F.pad(patches, (0, 0, 0, grid[1] - columns, 0, grid[0] - rows))  # (K, h, w, D)
        tables[rows, columns] = torch.cat((prefix, patches.flatten(1, 2)), dim=1)
    return torch.stack([tables[own_grid] for own_grid in grids])


def image_grids(patch_attention_mask: Tensor) -> list[Grid]:
    """Returns the patch grid of each image in a mask (B, h, w); raises `ValueError` if a mask is not rectangular."""
    mask = patch_attention_mask.bool()
    rows, columns = mask.any(2).sum(1), mask.any(1).sum(1)  # (B,)
    row_inside = torch.arange(mask.shape[1], device=mask.device) < rows[:, None]  # (B, h)
    column_inside = torch.arange(mask.shape[2], device=mask.device) < columns[:, None]  # (B, w)
    rectangle = row_inside[:, :, None] & column_inside[:, None, :]  # (B, h, w)
    wrong = ((mask != rectangle).flatten(1).any(1) | (rows == 0)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"patch_attention_mask of image {wrong[0]} is not a filled rectangle at the top left. Pad images only on "
            "the right and at the bottom."
        )
    return list(zip(rows.tolist(), columns.tolist(), strict=True))
