"""Masked image modeling: masks, decoders, loss and model.

Shapes: B batch, C channels, H W pixels, p q patch height and width, h w patch grid, N = h·w patches, K
visible patches, P prefix tokens, L = P + N tokens, D hidden size, E hidden size of the decoder.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from transformers.modeling_outputs import MaskedImageModelingOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vit import HfViTConfig
from .embeddings import Grid, image_grids
from .layers import HfViTNamedHead
from .modeling_hf_vit import HfViTBlockRunner, HfViTModel, check_images
from .patch_decoder import HfViTMaeDecoder, HfViTPixelPredictor, patchify, unpatchify
from .pretrained import HfViTPreTrainedModel
from .shared import check_shape, in_float32, to_float32_or_higher
from .task_configurations import HfViTMaskedImageModelingConfig


# Size limits of the blocks of a blockwise mask, as in BEiT (https://arxiv.org/abs/2106.08254)
SMALLEST_BLOCK = 16 / 196  # minimum fraction of the image that a block covers
LOWEST_ASPECT = 0.3  # minimum height-to-width ratio of a block; the maximum ratio is the reciprocal
# Constant added to the pixel variance of a patch, as in MAE (https://arxiv.org/abs/2111.06377)
EPSILON = 1e-6


def make_simmim_decoder(config: HfViTConfig, options: HfViTMaskedImageModelingConfig) -> nn.Module:
    """Returns the decoder of SimMIM (https://arxiv.org/abs/2111.09886): a linear layer from tokens to pixels."""
    return nn.Sequential(OrderedDict(predictor=HfViTPixelPredictor(config.hidden_size, config)))


DECODERS = {"mae": HfViTMaeDecoder, "simmim": make_simmim_decoder}


class HfViTMaskedImageModelingHead(HfViTNamedHead):
    """Head of masked image modeling, which holds the decoder of the selected objective."""

    def __init__(self, config: HfViTConfig, options: HfViTMaskedImageModelingConfig) -> None:
        if options.objective == "simmim" and not config.use_mask_token:
            raise ValueError(
                "objective='simmim' needs a mask token, but use_mask_token=False. Set use_mask_token=True."
            )
        if options.objective == "mae" and config.window_size is not None:
            raise ValueError(
                f"objective='mae' leaves holes in the patch grid, which window_size={config.window_size} does not "
                "support. Set window_size=None, or objective='simmim'."
            )
        super().__init__(options.objective, DECODERS[options.objective](config, options))


def count_masked(num_patches: int, ratio: float) -> int:
    """Returns the number of masked patches, `round(ratio * num_patches)`, at least 1 and at most all but one."""
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
    """Draws a mask (B, N) bool, True for patches hidden from the encoder.

    The function `count_masked` computes the number of masked patches of each image. Padding, which is False in
    `patch_attention_mask` (B, h, w), is never masked. `noise` (B, N) replaces the random numbers of `random_mask`.
    Raises `ValueError` if `noise` has the wrong shape or is given for a blockwise mask.
    """
    ratio = options.masked_share
    if options.mask_type == "blockwise":
        if noise is not None:
            raise ValueError(
                "noise is only for mask_type='random'. Pass bool_masked_pos instead, for example from blockwise_mask."
            )
        return blockwise_mask(batch, grid, ratio, patch_attention_mask, generator).to(device)
    if noise is None:
        place = device if generator is None else generator.device
        noise = torch.rand(batch, grid[0] * grid[1], generator=generator, device=place).to(device)
    check_shape("noise", noise, "batch, patches", batch, grid[0] * grid[1])
    return random_mask(noise.unflatten(1, grid), ratio, options.mask_unit, patch_attention_mask)


def random_mask(noise: Tensor, ratio: float, unit: int = 1, patch_attention_mask: Tensor | None = None, /) -> Tensor:
    """Masks the patches with the largest `noise` (B, h, w), as in MAE (https://arxiv.org/abs/2111.06377)."""
    # Squares with a side of `unit` patches are masked as a whole, according to the noise of their first patch (SimMIM,
    # https://arxiv.org/abs/2111.09886). The last square may be masked in part, to reach the exact number of patches.
    height, width = noise.shape[1:]
    num_patches = height * width
    if unit > 1:
        noise = noise[:, ::unit, ::unit].repeat_interleave(unit, dim=1).repeat_interleave(unit, dim=2)
        noise = noise[:, :height, :width]
    first: Tensor | int = num_patches - count_masked(num_patches, ratio)
    if patch_attention_mask is not None:
        noise = noise.masked_fill(~patch_attention_mask.bool(), -math.inf)  # padding sorts first and is never masked
        counts = [count_masked(rows * columns, ratio) for rows, columns in image_grids(patch_attention_mask)]
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
    """Masks rectangles of random size, aspect ratio and position until enough patches are masked; see `draw_mask`."""
    # As in BEiT (https://arxiv.org/abs/2106.08254), blocks may overlap. Only a part of the last block is masked,
    # starting at its top left corner, to reach the exact number of patches. Mask and generator are on the CPU.
    grids = [grid] * batch if patch_attention_mask is None else image_grids(patch_attention_mask)
    mask = torch.zeros(batch, *grid, dtype=torch.bool)
    for own, (rows, columns) in zip(mask, grids, strict=True):
        own[:rows, :columns] = draw_block_mask((rows, columns), count_masked(rows * columns, ratio), generator)
    return mask.flatten(1)


def draw_block_mask(grid: Grid, count: int, generator: Generator | None = None, least: int | None = None) -> Tensor:
    """Returns a mask (h, w) bool of `count` patches in blocks of at least `least` patches, by default as in BEiT."""
    rows, columns = grid
    mask = torch.zeros(grid, dtype=torch.bool)
    smallest = max(1.0, SMALLEST_BLOCK * rows * columns) if least is None else least
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


def visible_patches(
    mask: Tensor, patch_attention_mask: Tensor | None = None, num_visible: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns the indices (B, K) of the visible patches, in image order, and a mask of the valid indices.

    K is `num_visible`, or the largest number of visible patches of an image in `mask` (B, N). For images with fewer
    visible patches, the indices are padded at the end. The second result, (B, K) bool, is False for padded indices,
    or None if there are none. Patches that are False in `patch_attention_mask` (B, h, w) are not visible. Raises
    `ValueError` if an image has no visible patch.
    """
    hidden = mask if patch_attention_mask is None else mask | ~patch_attention_mask.flatten(1).bool()
    if torch.compiler.is_exporting():  # exported programs have fixed sizes, so masked patches are used as padding
        return torch.arange(hidden.shape[1], device=hidden.device).expand_as(hidden), ~hidden
    has_fillers = False
    if num_visible is None:
        counts = (~hidden).sum(dim=1).tolist()
        num_visible, least = max(counts), min(counts)
        if least == 0:
            raise ValueError(f"The mask hides every patch of image {counts.index(0)}. Leave at least one visible.")
        has_fillers = least < num_visible
    index = hidden.byte().argsort(dim=1, stable=True)[:, :num_visible]
    return index, ~hidden.gather(1, index) if has_fillers else None


class PatchScale:
    """Mean and standard deviation of the pixels of each target patch (B, N, p·q·C), for `norm_pix_loss`."""

    def __init__(self, patches: Tensor) -> None:
        self.mean = patches.mean(dim=-1, keepdim=True)  # (B, N, 1)
        # torch.var would give the same result, but takes ten times as long on a CPU.
        squares = (patches - self.mean).square().sum(dim=-1, keepdim=True)
        self.deviation = (squares / max(patches.shape[-1] - 1, 1) + EPSILON).sqrt()

    def normalize(self, patches: Tensor) -> Tensor:
        """Normalizes patches (B, N, p·q·C) by the mean and standard deviation of the target patches."""
        return (patches - self.mean) / self.deviation

    def restore(self, patches: Tensor) -> Tensor:
        """Inverts `normalize` for patches (B, N, p·q·C) and keeps their dtype."""
        return (patches * self.deviation + self.mean).to(patches.dtype)


@in_float32
def masked_image_modeling_loss(
    logits: Tensor, targets: Tensor, mask: Tensor, objective: Literal["mae", "simmim"]
) -> Tensor:
    """Returns the mean error of the masked patches of each image, averaged over images, in float32 or float64.

    Predicted and target pixels are (B, N, p·q·C), as returned by `patchify`, and normalized with `PatchScale` if
    `norm_pix_loss` is set. Errors are squared for "mae" and absolute for "simmim". If all images have the same number
    of masked patches, the result equals, up to rounding, the loss of transformers' `ViTMAEForPreTraining` and
    `ViTForMaskedImageModeling`. Otherwise it differs: transformers weights images by their number of masked patches,
    so that the weight of an image depends on the other images of the batch. An image without masked patches has a
    loss of 0.
    """
    difference = F.mse_loss if objective == "mae" else F.l1_loss
    errors = difference(logits, targets.to(logits.dtype), reduction="none").mean(dim=-1)  # (B, N)
    totals = errors.where(mask, 0).sum(dim=1)  # (B,)
    return (totals / mask.sum(dim=1).clamp_min(1)).mean()


class HfViTMaeEncoder(HfViTModel):
    """`HfViTModel` with the weight initialization of MAE."""

    _has_mae_initialization = True


@dataclass
class HfViTMaskedImageModelingOutput(MaskedImageModelingOutput):
    """Output of masked image modeling: loss, predicted pixels and mask.

    Args:
        loss: Scalar loss, if requested; see `masked_image_modeling_loss`.
        reconstruction: Predicted images (B, C, H, W), in the units of `pixel_values`. If the model predicts normalized
            patches (`norm_pix_loss`), mean and standard deviation of the target patches are used.
        logits: Predicted pixels (B, N, p·q·C) of each patch, row by row, channels last.
        bool_masked_pos: (B, N) bool, True for masked patches, which are hidden from the encoder.
        hidden_states: If requested, tokens before the first block and after each block: (B, L, D), or (B, P + K, D)
            for "mae", with the K visible patches in image order. Images with fewer visible patches are padded at the
            end.
        attentions: If requested, attention weights of each block: (B, heads, L, L), or (B, heads, P + K, P + K) for
            "mae".
    """

    logits: Tensor | None = None
    bool_masked_pos: Tensor | None = None


class HfViTForMaskedImageModeling(HfViTPreTrainedModel):
    """Predicts the pixels of masked patches, to pretrain an encoder that all task models can load.

    With the objective "mae" (https://arxiv.org/abs/2111.06377), the encoder processes only the visible patches, which
    saves time and memory; with "simmim" (https://arxiv.org/abs/2111.09886), a mask token replaces the masked patches.
    """

    supports_stored_features = False  # each step draws new masks

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        self.options = HfViTMaskedImageModelingConfig.of(config.masked_image_modeling_config)
        self._has_mae_initialization = self.options.objective == "mae"
        encoder_class = HfViTMaeEncoder if self._has_mae_initialization else HfViTModel
        self.model = encoder_class(config, add_pooling_layer=False)
        self.masked_image_modeling_head = HfViTMaskedImageModelingHead(config, self.options)
        self.post_init()
        self._output_capturing_hooks_installed = True  # outputs are recorded by the hooks of `self.model`

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        noise: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        return_loss: bool = True,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTMaskedImageModelingOutput:
        """Runs the model.

        Args:
            pixel_values: Images (B, C, H, W), H and W multiples of the patch size.
            bool_masked_pos: (B, N) bool, True (1) for masked patches, which are hidden from the encoder. By default, a
                mask is drawn with the global random generator of torch and the options of the configuration.
            noise: (B, N) floats, an alternative to `bool_masked_pos`: the patches with the largest noise are masked.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom, which is never
                masked. Both masks break the graph of `torch.compile`: do not set `fullgraph=True`.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            return_loss: Whether to compute the loss. `transformers.Trainer` checks for this argument to decide
                whether it can evaluate the loss of a model without labels.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            A `HfViTMaskedImageModelingOutput`.

        Raises:
            ValueError: if an input does not fit the model; the message names valid values.
        """
        pixel_values = check_images(pixel_values)
        grid = self.model.embeddings.check(pixel_values, patch_attention_mask)
        mask = self._mask(pixel_values, grid, bool_masked_pos, noise, patch_attention_mask)
        is_drawn = bool_masked_pos is None and patch_attention_mask is None
        logits = self._predict(pixel_values, grid, mask, patch_attention_mask, is_drawn, **kwargs)
        patch_size = self.model.embeddings.patch_embeddings.patch_size
        patches = patchify(to_float32_or_higher(pixel_values), patch_size)
        scale = PatchScale(patches) if self.options.normalizes_patches else None
        targets = patches if scale is None else scale.normalize(patches)  # (B, N, p·q·C)
        pixels = logits if scale is None else scale.restore(logits)
        loss = masked_image_modeling_loss(logits, targets, mask, self.options.objective) if return_loss else None
        return HfViTMaskedImageModelingOutput(
            loss=loss, reconstruction=unpatchify(pixels, grid, patch_size), logits=logits, bool_masked_pos=mask
        )

    def _mask(
        self,
        pixel_values: Tensor,
        grid: Grid,
        bool_masked_pos: Tensor | None,
        noise: Tensor | None,
        patch_attention_mask: Tensor | None,
    ) -> Tensor:
        """Returns the given mask (B, N) bool, set to False for padding, or draws a mask."""
        batch, device = pixel_values.shape[0], pixel_values.device
        if bool_masked_pos is None:
            visible = patch_attention_mask
            return draw_mask(batch, grid, self.options, noise=noise, patch_attention_mask=visible, device=device)
        if noise is not None:
            raise ValueError("bool_masked_pos and noise both define the mask. Pass only one of them.")
        check_shape("bool_masked_pos", bool_masked_pos, "batch, patches", batch, grid[0] * grid[1])
        mask = bool_masked_pos.bool()
        return mask if patch_attention_mask is None else mask & patch_attention_mask.flatten(1).bool()

    def encode_visible(
        self,
        pixel_values: Tensor,
        mask: Tensor,
        patch_attention_mask: Tensor | None = None,
        num_visible: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Runs the encoder only on the patches that `mask` (B, N) bool does not hide.

        Returns tokens (B, P + K, D) after the final norm, and the two results of `visible_patches`. `kwargs` may
        contain `output_attentions`, which uses eager attention.
        """
        index, seen = visible_patches(mask, patch_attention_mask, num_visible)
        hidden_states, blocks = self.model.start_blocks(pixel_values, patch_attention_mask, **kwargs)  # (B, L, D)
        hidden_states, blocks = blocks.select_patches(hidden_states, index)  # (B, P + K, D)
        blocks = replace(blocks, patch_attention_mask=seen)
        hidden_states = blocks.run(hidden_states, attention_mask=blocks.attention_mask(hidden_states))
        return self.model.norm(hidden_states), index, seen

    def _predict(
        self, pixel_values: Tensor, grid: Grid, mask: Tensor, padding: Tensor | None, is_drawn: bool, **kwargs: Any
    ) -> Tensor:
        """Runs encoder and decoder and returns the logits (B, N, p·q·C); `padding` (B, h, w) is False for padding."""
        model, num_prefix = self.model, self.config.num_prefix_tokens
        decoder: Any = self.masked_image_modeling_head.decoder
        if self.options.objective == "mae":
            num_patches = mask.shape[1]
            num_visible = num_patches - count_masked(num_patches, self.options.masked_share) if is_drawn else None
            hidden_states, index, seen = self.encode_visible(pixel_values, mask, padding, num_visible, **kwargs)
            tokens = hidden_states.new_empty(mask.shape[0], num_prefix + num_patches, 1)
            attention_mask = HfViTBlockRunner(model, grid, None, padding, False).attention_mask(tokens)
            return decoder(hidden_states, grid, index, seen, padding, attention_mask)
        hidden_states, blocks = model.start_blocks(pixel_values, padding, mask, **kwargs)
        hidden_states = blocks.run(hidden_states, **blocks.masks(hidden_states))  # (B, L, D)
        return decoder(model.norm(hidden_states)[:, num_prefix:])
