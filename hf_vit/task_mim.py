"""Masked image modelling: masks, patches as pixels and back, decoders, loss.

A mask is True (1) where a patch is masked, that is hidden from the encoder, as `bool_masked_pos` of transformers is.

Shapes: B batch, C channels, H W pixels, p q patch height and width, h w patch grid, N = h·w patches, K visible ones, P
prefix tokens, D hidden size, E hidden size of the decoder.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from transformers import initialization as init

from .configuration_hf_vit import HfViTConfig, to_pair
from .configuration_tasks_hf_vit import HfViTMaskedImageModelingConfig
from .decoders_hf_vit import in_full_precision
from .embeddings_hf_vit import (
    Grid,
    lay_out,
    own_grids,
    resample_position_embeddings,
    sincos_position_embeddings,
)
from .encoder_hf_vit import HfViTLayer, make_norm
from .initialization_hf_vit import HfViTOwnStart


# Of blocks, as in https://arxiv.org/abs/2106.08254
SMALLEST_BLOCK = 16 / 196  # share of the image
LOWEST_ASPECT = 0.3  # height over width, at most the reciprocal
# Added to the variance of a patch, as in https://arxiv.org/abs/2111.06377
EPSILON = 1e-6


# Masks


def count_masked(num_patches: int, ratio: float) -> int:
    """Returns how many of so many patches are masked: `round(ratio * num_patches)`, but never none, nor all of them.

    A patch that is alone stays visible.
    """
    return min(max(round(ratio * num_patches), 1), num_patches - 1)


def draw_mask(
    batch: int,
    grid: Grid,
    options: HfViTMaskedImageModelingConfig,
    *,
    noise: Tensor | None = None,
    patch_attention_mask: Tensor | None = None,
    generator: Generator | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Draws a mask as the options say.

    Args:
        batch: Number B of images.
        grid: Rows and columns (h, w) of patches.
        options: How much is masked, and how.
        noise: (B, N) in the place of what `random_mask` draws.
        patch_attention_mask: (B, h, w) bool, False for padding, which is never masked and does not count.
        generator: Where the numbers come from, torch's global one by default.
        device: Where the mask lives.

    Returns:
        (B, N) bool, True (1) where a patch is masked: hidden from the encoder. In each image `count_masked` of its own
        patches are.

    Raises:
        ValueError: if noise is given for blocks, or is of another shape.
    """
    ratio = options.masked_share
    if options.mask_type == "blockwise":
        if noise is not None:
            raise ValueError("noise is for mask_type='random'. Give bool_masked_pos, from blockwise_mask, say.")
        return blockwise_mask(batch, grid, ratio, patch_attention_mask, generator).to(device)
    if noise is None:
        place = device if generator is None else generator.device
        noise = torch.rand(batch, grid[0] * grid[1], generator=generator, device=place).to(device)
    if noise.shape != (batch, grid[0] * grid[1]):
        expected = (batch, grid[0] * grid[1])
        raise ValueError(f"noise must be (batch, patches) = {expected}, not {tuple(noise.shape)}.")
    return random_mask(noise.unflatten(1, grid), ratio, options.mask_unit, patch_attention_mask)


def random_mask(noise: Tensor, ratio: float, unit: int = 1, patch_attention_mask: Tensor | None = None, /) -> Tensor:
    """Masks the patches with the most noise (MAE, https://arxiv.org/abs/2111.06377).

    Args:
        noise: (B, h, w), such as `torch.rand(batch, *grid, generator=generator)`.
        ratio: Share of the patches that is masked.
        unit: How many patches a side the squares have that are masked as one, by the noise of their first patch
            (SimMIM, https://arxiv.org/abs/2111.09886). Of the last square only as much as is missing is masked.
        patch_attention_mask: (B, h, w) bool, False for padding, which is never masked and does not count.

    Returns:
        (B, N) bool, True (1) where a patch is masked: hidden from the encoder. In each image `count_masked` of its own
        patches are.
    """
    height, width = noise.shape[1:]
    num_patches = height * width
    if unit > 1:
        noise = noise[:, ::unit, ::unit].repeat_interleave(unit, dim=1).repeat_interleave(unit, dim=2)
        noise = noise[:, :height, :width]
    first: Tensor | int = num_patches - count_masked(num_patches, ratio)
    if patch_attention_mask is not None:
        noise = noise.masked_fill(~patch_attention_mask.bool(), -math.inf)  # which comes first
        counts = [count_masked(rows * columns, ratio) for rows, columns in own_grids(patch_attention_mask)]
        first = num_patches - torch.tensor(counts, device=noise.device)[:, None]  # (B, 1)
    order = noise.flatten(1).argsort(dim=1, stable=True)  # (B, N)
    is_masked = (torch.arange(num_patches, device=noise.device) >= first).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter(1, order, is_masked)


def blockwise_mask(
    batch: int,
    grid: Grid,
    ratio: float,
    patch_attention_mask: Tensor | None = None,
    generator: Generator | None = None,
) -> Tensor:
    """Masks rectangles of random size, aspect and place until there are enough (BEiT, https://arxiv.org/abs/2106.08254).

    Blocks may overlap. Of the last one only as much as is missing is masked, from its upper left corner on.

    Args:
        batch: Number B of images.
        grid: Rows and columns (h, w) of patches.
        ratio: Share of the patches that is masked.
        patch_attention_mask: (B, h, w) bool, False for padding, which is never masked and does not count.
        generator: Where the numbers come from, torch's global one by default; of the CPU.

    Returns:
        (B, N) bool on the CPU, True (1) where a patch is masked: hidden from the encoder. In each image `count_masked`
        of its own patches are.
    """
    grids = [grid] * batch if patch_attention_mask is None else own_grids(patch_attention_mask)
    mask = torch.zeros(batch, *grid, dtype=torch.bool)
    for own, (rows, columns) in zip(mask, grids, strict=True):
        own[:rows, :columns] = mask_of_blocks((rows, columns), count_masked(rows * columns, ratio), generator)
    return mask.flatten(1)


def mask_of_blocks(grid: Grid, count: int, generator: Generator | None = None) -> Tensor:
    """Returns the mask (h, w) bool of one image, with `count` masked patches; see `blockwise_mask`."""
    rows, columns = grid
    mask = torch.zeros(grid, dtype=torch.bool)
    smallest = max(1.0, SMALLEST_BLOCK * rows * columns)
    while (missing := count - int(mask.sum())) > 0:
        size, aspect, y, x = torch.rand(4, generator=generator).tolist()
        area = smallest + size * max(0.0, missing - smallest)
        ratio = math.exp((2 * aspect - 1) * math.log(LOWEST_ASPECT))
        height, width = (
            min(max(1, round(math.sqrt(area * part))), side) for part, side in ((ratio, rows), (1 / ratio, columns))
        )
        top, left = int(y * (rows - height + 1)), int(x * (columns - width + 1))
        block = mask[top : top + height, left : left + width]
        new = (~block).nonzero()[:missing]
        block[new[:, 0], new[:, 1]] = True
    return mask


def place_visible(
    mask: Tensor, patch_attention_mask: Tensor | None = None, num_visible: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Says where the patches are that the encoder sees, in the order of the image.

    Args:
        mask: (B, N) bool, True where a patch is masked.
        patch_attention_mask: (B, h, w) bool, False for padding, which is not visible.
        num_visible: Number K of visible patches where it is known, which spares a look at the mask.

    Returns:
        Their numbers (B, K), K being that of the image with the most; and (B, K) bool, False for the fillers behind
        those of other images, which are none of their visible patches; None where there are no fillers.

    Raises:
        ValueError: if an image has no visible patch.
    """
    hidden = mask if patch_attention_mask is None else mask | ~patch_attention_mask.flatten(1).bool()
    has_fillers = False
    if num_visible is None:
        counts = (~hidden).sum(dim=1).tolist()
        num_visible, least = max(counts), min(counts)
        if least == 0:
            raise ValueError(f"The mask hides every patch of image {counts.index(0)}. Leave one visible at least.")
        has_fillers = least < num_visible
    index = hidden.byte().argsort(dim=1, stable=True)[:, :num_visible]
    return index, ~hidden.gather(1, index) if has_fillers else None


# Pixels


def patchify(images: Tensor, patch_size: Grid) -> Tensor:
    """Images (B, C, H, W) as patches (B, N, p·q·C): row by row, and in each patch too, channels last."""
    height, width = patch_size
    cut = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, C, h, p, w, q)
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, grid: Grid, patch_size: Grid) -> Tensor:
    """The way back: patches (B, N, p·q·C) of a grid (h, w) as images (B, C, H, W)."""
    cut = patches.unflatten(2, (*patch_size, -1)).unflatten(1, grid)  # (B, h, w, p, q, C)
    return cut.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


class PatchScale:
    """Mean and deviation of the pixels of each patch, which `norm_pix_loss` takes out of them."""

    def __init__(self, patches: Tensor) -> None:
        """Takes the true patches (B, N, p·q·C)."""
        self.mean = patches.mean(dim=-1, keepdim=True)  # (B, N, 1)
        # torch.var gives the same, ten times as slowly on a CPU.
        squares = (patches - self.mean).square().sum(dim=-1, keepdim=True)
        self.deviation = (squares / max(patches.shape[-1] - 1, 1) + EPSILON).sqrt()

    def normalize(self, patches: Tensor) -> Tensor:
        """(B, N, p·q·C) without mean and deviation."""
        return (patches - self.mean) / self.deviation

    def restore(self, patches: Tensor) -> Tensor:
        """The way back, in the dtype of `patches`."""
        return (patches * self.deviation + self.mean).to(patches.dtype)


# Decoders


class HfViTPixelPredictor(nn.Linear):
    """The last layer: from tokens to the pixels of their patches."""

    def __init__(self, size: int, config: HfViTConfig) -> None:
        """Builds the layer for tokens of width `size`."""
        super().__init__(size, math.prod(to_pair(config.patch_size)) * config.num_channels)


class HfViTMaeDecoder(HfViTOwnStart):
    """A small ViT with a mask token in the place of each patch that the encoder has not seen.

    Its blocks are plain ones, its positions fixed, whatever those of the encoder are; tokens of the prefix have none.

    Source: https://arxiv.org/abs/2111.06377.
    """

    position_embeddings: Tensor

    def __init__(self, config: HfViTConfig, options: HfViTMaskedImageModelingConfig) -> None:
        """Builds the layers."""
        super().__init__()
        self.config = config
        own = HfViTConfig(
            hidden_size=options.decoder_hidden_size,
            num_hidden_layers=options.decoder_num_hidden_layers,
            num_attention_heads=options.decoder_num_attention_heads,
            intermediate_size=options.decoder_intermediate_size,
            hidden_act=config.hidden_act,
            hidden_dropout_prob=config.hidden_dropout_prob,
            layer_norm_eps=config.layer_norm_eps,
            qkv_bias=config.qkv_bias,
        )
        self.hidden_size = own.hidden_size
        self.embedding = nn.Linear(config.hidden_size, own.hidden_size)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, own.hidden_size))
        # Saved, as what it was trained with stays where the grid changes.
        self.register_buffer("position_embeddings", self.sincos_table())
        layers = [HfViTLayer(own, index) for index in range(own.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        for layer in layers:
            layer.attention.config = config  # so that another attention implementation is that of the decoder too
        self.norm = make_norm(own, own.hidden_size)
        self.predictor = HfViTPixelPredictor(own.hidden_size, config)

    def initialize(self, std: float) -> None:
        """Draws the mask token; positions follow their formula."""
        init.normal_(self.mask_token, mean=0.0, std=std)
        init.copy_(self.position_embeddings, self.sincos_table())

    def sincos_table(self) -> Tensor:
        """The fixed position table at the native grid, (1, N, E)."""
        return sincos_position_embeddings(self.config.grid_size, self.hidden_size, 0)

    def forward(
        self,
        hidden_states: Tensor,
        grid: Grid,
        index: Tensor,
        seen: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        attention_mask: Any = None,
    ) -> Tensor:
        """Says the pixels of all patches.

        Args:
            hidden_states: (B, P + K, D), what the encoder says of prefix and visible patches.
            grid: Rows and columns (h, w) of patches.
            index: (B, K), see `place_visible`.
            seen: (B, K) bool or None, see `place_visible`.
            patch_attention_mask: (B, h, w) bool, False for padding, or None.
            attention_mask: The same for prefix and patches, in the form that the attention implementation takes.

        Returns:
            (B, N, p·q·C).
        """
        num_prefix = self.config.num_prefix_tokens
        hidden_states = self.embedding(hidden_states)  # (B, P + K, E)
        prefix, visible = hidden_states.tensor_split((num_prefix,), dim=1)
        mask_token = self.mask_token.to(hidden_states.dtype)
        if seen is not None:
            visible = torch.where(seen[..., None], visible, mask_token)
        patches = mask_token.expand(len(index), grid[0] * grid[1], -1)
        patches = patches.scatter(1, index[..., None].expand_as(visible), visible)  # (B, N, E)
        patches = patches + self.positions(grid, patch_attention_mask)
        hidden_states = torch.cat((prefix, patches), dim=1)  # (B, P + N, E)
        for layer in self.layers:
            hidden_states = layer(hidden_states, None, attention_mask)
        return self.predictor(self.norm(hidden_states[:, num_prefix:]))

    def positions(self, grid: Grid, patch_attention_mask: Tensor | None = None) -> Tensor:
        """What is added to the patches: (1, N, E), or (B, N, E) with a mask."""

        def resample(own_grid: Grid) -> Tensor:
            return resample_position_embeddings(
                self.position_embeddings,
                self.config.grid_size,
                own_grid,
                num_prefix=0,
                mode=self.config.position_interpolation,
                antialias=self.config.position_antialias,
            )

        return lay_out(resample, grid, patch_attention_mask, 0).flatten(0, -3)


class HfViTSimMimDecoder(nn.Module):
    """One linear layer a patch (https://arxiv.org/abs/2111.09886)."""

    def __init__(self, config: HfViTConfig, options: HfViTMaskedImageModelingConfig) -> None:
        """Builds the layer."""
        super().__init__()
        self.predictor = HfViTPixelPredictor(config.hidden_size, config)

    def forward(self, patches: Tensor) -> Tensor:
        """(B, N, D) to (B, N, p·q·C)."""
        return self.predictor(patches)


DECODERS = {"mae": HfViTMaeDecoder, "simmim": HfViTSimMimDecoder}


class HfViTMaskedImageModelingHead(nn.Module):
    """The decoder of the objective."""

    def __init__(self, config: HfViTConfig, options: HfViTMaskedImageModelingConfig) -> None:
        """Builds the decoder.

        Raises:
            ValueError: if the encoder lacks what the objective needs, or has what does not go with it.
        """
        super().__init__()
        if options.objective == "simmim" and not config.use_mask_token:
            raise ValueError(
                "objective='simmim' puts a mask token in the place of masked patches, but use_mask_token=False. Set "
                "use_mask_token=True."
            )
        if options.objective == "mae" and config.window_size is not None:
            raise ValueError(
                f"objective='mae' leaves holes in the patch grid, where window_size={config.window_size} finds no "
                "windows. Set window_size=None, or objective='simmim'."
            )
        # By its name, so that the weights of one decoder are never taken for those of another.
        self.name = options.objective
        self.add_module(self.name, DECODERS[self.name](config, options))

    @property
    def decoder(self) -> nn.Module:
        """The decoder itself."""
        return self.get_submodule(self.name)


# Loss


@in_full_precision
def masked_image_modeling_loss(
    logits: Tensor, targets: Tensor, mask: Tensor, objective: Literal["mae", "simmim"]
) -> Tensor:
    """Mean over images of what is wrong with their masked patches, on average.

    Of "mae" this is the mean squared difference, of "simmim" the mean absolute one. Where all images have as many
    masked patches it is the loss of transformers' `ViTMAEForPreTraining` and `ViTForMaskedImageModeling` (whose 1e-5
    beside the number of masked pixels is less than its rounding). Otherwise those weigh images by their masked
    patches, so that an image would count for more or less by what else is in its batch.

    Args:
        logits: (B, N, p·q·C), see `HfViTMaskedImageModelingOutput`.
        targets: (B, N, p·q·C), the true pixels as `patchify` gives them, normalised by their `PatchScale` under
            `norm_pix_loss`.
        mask: (B, N) bool, True where a patch is masked.
        objective: What differences are.

    Returns:
        Scalar in float32 at least; an image without masked patches adds nothing.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    difference = F.mse_loss if objective == "mae" else F.l1_loss
    errors = difference(logits, targets.to(logits.dtype), reduction="none").mean(dim=-1)  # (B, N)
    totals = errors.where(mask, 0).sum(dim=1)  # (B,)
    return (totals / mask.sum(dim=1).clamp_min(1)).mean()
