"""The model that learns from images alone, by saying what is behind a mask.

Shapes: B batch, C channels, H W pixels, p q patch height and width, h w patch grid, N = h·w patches, K visible ones, P
prefix tokens (CLS, distillation, registers), L = P + N, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vit import HfViTConfig
from .configuration_tasks_hf_vit import HfViTMaskedImageModelingConfig
from .embeddings_hf_vit import Grid
from .modeling_hf_vit import HfViTModel, check_images
from .outputs_hf_vit import HfViTMaskedImageModelingOutput
from .pretrained_hf_vit import HfViTPreTrainedModel
from .task_mim import (
    HfViTMaskedImageModelingHead,
    PatchScale,
    count_masked,
    draw_mask,
    masked_image_modeling_loss,
    patchify,
    place_visible,
    unpatchify,
)


class HfViTMaeEncoder(HfViTModel):
    """The same model with the initialisation of MAE."""

    _starts_as_mae = True


class HfViTForMaskedImageModeling(HfViTPreTrainedModel):
    """Says the pixels of masked patches, and so learns an encoder that opens as every other task.

    With the objective "mae" (https://arxiv.org/abs/2111.06377) the encoder sees the other patches alone, which costs
    as little as they are few; with "simmim" (https://arxiv.org/abs/2111.09886) it sees a mask token in their place.
    """

    def __init__(self, config: HfViTConfig) -> None:
        """Builds a model with fresh weights."""
        super().__init__(config)
        self.options = HfViTMaskedImageModelingConfig.of(config.masked_image_modeling_config)
        self._starts_as_mae = self.options.objective == "mae"
        encoder_class = HfViTMaeEncoder if self._starts_as_mae else HfViTModel
        self.model = encoder_class(config, add_pooling_layer=False)
        self.masked_image_modeling_head = HfViTMaskedImageModelingHead(config, self.options)
        self.post_init()
        self._output_capturing_hooks_installed = True  # those of the model inside record for this one too

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        noise: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTMaskedImageModelingOutput:
        """Runs the model.

        Args:
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            bool_masked_pos: (B, N) bool, True (1) where a patch is masked: hidden from the encoder. Without it a mask
                is drawn as the options say, from torch's global generator.
            noise: (B, N) floats; the patches with the most are masked. In the place of `bool_masked_pos`.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom, which is never
                masked. It and `bool_masked_pos` break the graph of `torch.compile`: leave out fullgraph.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            See `HfViTMaskedImageModelingOutput`; the loss, which is always there, is `masked_image_modeling_loss`.

        Raises:
            ValueError: if an input does not fit the model, saying what would.
        """
        pixel_values = check_images(pixel_values)
        grid = self.model.embeddings.check(pixel_values, patch_attention_mask)
        mask = self._mask(pixel_values, grid, bool_masked_pos, noise, patch_attention_mask)
        if self.options.objective == "mae":
            is_drawn = bool_masked_pos is None and patch_attention_mask is None
            num_visible = mask.shape[1] - count_masked(mask.shape[1], self.options.masked_share) if is_drawn else None
            logits = self._predict_from_visible(
                pixel_values, grid, mask, patch_attention_mask, num_visible=num_visible, **kwargs
            )
        else:
            logits = self._predict_from_all(pixel_values, grid, mask, patch_attention_mask, **kwargs)
        patch_size = self.model.embeddings.patch_embeddings.patch_size
        patches = patchify(pixel_values.to(torch.promote_types(pixel_values.dtype, torch.float32)), patch_size)
        scale = PatchScale(patches) if self.options.normalizes_patches else None
        targets = patches if scale is None else scale.normalize(patches)  # (B, N, p·q·C)
        pixels = logits if scale is None else scale.restore(logits)
        return HfViTMaskedImageModelingOutput(
            loss=masked_image_modeling_loss(logits, targets, mask, self.options.objective),
            reconstruction=unpatchify(pixels, grid, patch_size),
            logits=logits,
            bool_masked_pos=mask,
        )

    def _mask(
        self,
        pixel_values: Tensor,
        grid: Grid,
        bool_masked_pos: Tensor | None,
        noise: Tensor | None,
        patch_attention_mask: Tensor | None,
    ) -> Tensor:
        """Returns the mask (B, N) bool that was given, without padding, or a drawn one."""
        batch, device = len(pixel_values), pixel_values.device
        if bool_masked_pos is None:
            visible = patch_attention_mask
            return draw_mask(batch, grid, self.options, noise=noise, patch_attention_mask=visible, device=device)
        if noise is not None:
            raise ValueError("bool_masked_pos and noise both say what is masked. Give one of them.")
        if bool_masked_pos.shape != (batch, grid[0] * grid[1]):
            raise ValueError(
                f"bool_masked_pos must be (batch, patches) = {(batch, grid[0] * grid[1])}, not "
                f"{tuple(bool_masked_pos.shape)}."
            )
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
        """Runs the encoder on the patches that are not masked, and on no others.

        Args:
            pixel_values: (B, C, H, W).
            mask: (B, N) bool, True where a patch is masked.
            patch_attention_mask: (B, h, w) bool, False for padding.
            num_visible: Number K of visible patches where it is known, which spares a look at the mask.
            **kwargs: `output_attentions`, which runs eager attention.

        Returns:
            (B, P + K, D) after the final norm; and which patches they are of, see `place_visible`.

        Raises:
            ValueError: if an input does not fit the model, or an image has no visible patch.
        """
        model = self.model
        index, seen = place_visible(mask, patch_attention_mask, num_visible)
        hidden_states, rotary = model.embed(pixel_values, None, patch_attention_mask)  # (B, L, D)
        hidden_states, rotary = model.keep(hidden_states, rotary, index)  # (B, P + K, D)
        output_attentions = model.wants_attentions(**kwargs)
        hidden_states = model.encoder(
            hidden_states,
            rotary=rotary,
            attention_mask=model.attention_mask(hidden_states, seen, output_attentions),
            output_attentions=output_attentions,
        )
        return model.norm(hidden_states), index, seen

    def _predict_from_visible(
        self, pixel_values: Tensor, grid: Grid, mask: Tensor, patch_attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """Runs encoder and decoder of "mae" and returns the logits (B, N, p·q·C)."""
        hidden_states, index, seen = self.encode_visible(pixel_values, mask, patch_attention_mask, **kwargs)
        length = self.config.num_prefix_tokens + mask.shape[1]
        attention_mask = self.model.attention_mask(hidden_states.new_empty(len(mask), length, 1), patch_attention_mask)
        decoder = self.masked_image_modeling_head.decoder
        logits: Tensor = decoder(hidden_states, grid, index, seen, patch_attention_mask, attention_mask)
        return logits

    def _predict_from_all(
        self,
        pixel_values: Tensor,
        grid: Grid,
        mask: Tensor,
        patch_attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """Runs encoder and decoder of "simmim" and returns the logits (B, N, p·q·C)."""
        model = self.model
        hidden_states, rotary = model.embed(pixel_values, mask, patch_attention_mask)  # (B, L, D)
        output_attentions = model.wants_attentions(**kwargs)
        hidden_states = model.encoder(
            hidden_states,
            rotary=rotary,
            attention_mask=model.attention_mask(hidden_states, patch_attention_mask, output_attentions),
            windows=model.windows(hidden_states, grid, patch_attention_mask, output_attentions),
            output_attentions=output_attentions,
        )
        patches = model.norm(hidden_states)[:, self.config.num_prefix_tokens :]  # (B, N, D)
        logits: Tensor = self.masked_image_modeling_head.decoder(patches)
        return logits
