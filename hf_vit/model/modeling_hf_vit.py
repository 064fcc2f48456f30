"""The Vision Transformer, its backbone, and the feature extraction pipeline.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, P prefix tokens (CLS,
distillation, registers), L = P + N tokens, D hidden size, K kept patches, W windows of S patches, O non-patch tokens,
d head size.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ImageFeatureExtractionPipeline, Pipeline
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.output_capturing import capture_outputs, maybe_install_capturing_hooks

from .configuration_hf_vit import HfViTConfig
from .embeddings import Grid, HfViTEmbeddings, Rotary, is_symbolic
from .encoder import (
    HfViTAttentionPooling,
    HfViTEncoder,
    Windows,
    dense_window_mask,
    make_norm,
    make_window_mask,
    window_size,
)
from .layers import HfViTQueries
from .pipeline_hf_vit import BatchedImagePipeline, ModelInput
from .pretrained import HfViTPreTrainedModel
from .shared import to_float32_or_higher, to_maps


logger = logging.get_logger(__name__)


def check_images(pixel_values: Tensor | None) -> Tensor:
    """Returns `pixel_values`; raises `ValueError` if they are None, and `TypeError` if they are not a tensor."""
    if pixel_values is None:
        raise ValueError("pixel_values is missing: pass the images that the image processor returns.")
    if not isinstance(pixel_values, Tensor):
        raise TypeError(f'pixel_values must be a tensor, not {type(pixel_values).__name__}. Use return_tensors="pt".')
    return pixel_values


def select_hidden_states(
    states: tuple[Tensor, ...], wanted: bool | int | Sequence[int]
) -> tuple[Tensor | None, ...] | None:
    """Returns all hidden states, with None in place of those that `output_hidden_states` does not select."""
    # `wanted` is a flag or a list of indices, which may be negative, as in transformers 5.23 and later.
    if not wanted or wanted is True:
        return states if wanted else None
    numbers = [wanted] if isinstance(wanted, int) else wanted
    places = range(len(states))
    kept = {places[number] for number in numbers if -len(states) <= number < len(states)}
    return tuple(state if place in kept else None for place, state in enumerate(states))


def make_pooler(in_size: int, out_size: int) -> nn.Module:
    """Returns a pooler as in BERT: a linear layer followed by tanh."""
    return nn.Sequential(OrderedDict(dense=nn.Linear(in_size, out_size), activation=nn.Tanh()))


class HfViTModel(HfViTPreTrainedModel):
    """The plain Vision Transformer (https://arxiv.org/abs/2010.11929), which maps images to tokens and pooled vectors.

    Args:
        config: The configuration.
        add_pooling_layer: Whether the model has pooling layers and returns `pooler_output`. False removes the layers,
            regardless of the configuration.
    """

    def __init__(self, config: HfViTConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = HfViTEmbeddings(config)
        self.pre_norm = make_norm(config, config.hidden_size) if config.use_pre_layernorm else nn.Identity()
        self.encoder = HfViTEncoder(config)
        self.add_pooling_layer = add_pooling_layer
        has_norm = add_pooling_layer or not config.norm_after_pooling
        self.norm = make_norm(config, config.hidden_size) if has_norm else nn.Identity()
        has_attention_pooling = add_pooling_layer and config.pooling == "attention"
        self.attention_pooling = HfViTAttentionPooling(config) if has_attention_pooling else None
        pooled_size = config.hidden_size * (2 if config.pooling == "cls_mean" else 1)
        has_pooler = add_pooling_layer and config.use_pooler
        self.pooler = make_pooler(pooled_size, config.hidden_size) if has_pooler else None
        self.post_init()
        # Install recording hooks here, because torch.compile cannot trace their installation in a forward call.
        maybe_install_capturing_hooks(self)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        kept_patches: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Runs the model.

        Args:
            pixel_values: Images (B, C, H, W), H and W multiples of the patch size.
            bool_masked_pos: (B, N) bool, True for patches that the mask token replaces.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom. The model reads the
                values of the mask, which breaks the graph of `torch.compile`, so do not set `fullgraph=True`.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            kept_patches: (B, K) int64, indices (row by row from 0) of the patches that the blocks process; the other
                patches are dropped, so that N becomes K (PatchDropout, https://arxiv.org/abs/2208.07220).
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `last_hidden_state` (B, L, D) after the final norm, or before it with `config.norm_after_pooling`;
            `pooler_output` (B, D), or (B, 2·D) with `config.pooling="cls_mean"`; if requested, `hidden_states` before
            the first block and after each block, and `attentions` (B, heads, L, L).

        Raises:
            ValueError: if an input does not fit the model; the message names valid values.
        """
        hidden_states, blocks = self.start_blocks(pixel_values, patch_attention_mask, bool_masked_pos, **kwargs)
        if kept_patches is not None:
            hidden_states, blocks = blocks.select_patches(hidden_states, kept_patches)
        hidden_states = blocks.run(hidden_states, **blocks.masks(hidden_states))
        if not self.config.norm_after_pooling:
            hidden_states = self.norm(hidden_states)
        pooled = self.pool(hidden_states, blocks.patch_attention_mask) if self.add_pooling_layer else None
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def embed(
        self,
        pixel_values: Tensor | None,
        bool_masked_pos: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Rotary | None]:
        """Returns the input (B, L, D) of the first block and the rotary positions; see `forward`."""
        pixel_values = check_images(pixel_values)
        pixel_values = pixel_values.to(self.embeddings.patch_embeddings.projection.weight.dtype)
        hidden_states = self.pre_norm(self.embeddings(pixel_values, bool_masked_pos, patch_attention_mask))
        return hidden_states, self.embeddings.rotary(pixel_values, patch_attention_mask)

    def pool(self, hidden_states: Tensor, patch_attention_mask: Tensor | None = None) -> Tensor:
        """Pools tokens (B, L, D) to one vector per image, (B, D) or (B, 2·D)."""
        parts = []
        if self.config.pooling in ("cls", "cls_mean"):
            parts.append(hidden_states[:, 0])
        if self.config.pooling in ("mean", "cls_mean"):
            patches = hidden_states[:, self.config.num_prefix_tokens :]  # (B, N, D)
            if patch_attention_mask is None:
                parts.append(patches.mean(dim=1))
            else:
                real = patch_attention_mask.flatten(1)[..., None].bool()  # (B, N, 1)
                # Compute the sum in float32, because half precision overflows in sums over a thousand patches.
                total = to_float32_or_higher(torch.where(real, patches, 0)).sum(dim=1)
                parts.append((total / real.sum(dim=1)).to(patches.dtype))
        if self.attention_pooling is not None:
            mask = None if patch_attention_mask is None else patch_attention_mask.flatten(1).bool()  # (B, N)
            parts.append(self.attention_pooling(hidden_states[:, self.config.num_prefix_tokens :], mask))
        pooled = torch.cat(parts, dim=-1)
        if self.config.norm_after_pooling:
            pooled = self.norm(pooled)
        return pooled if self.pooler is None else self.pooler(pooled)

    def get_classifier(self) -> nn.Module:
        """Returns an identity layer, because this model has no classifier."""
        return nn.Identity()

    def start_blocks(
        self,
        pixel_values: Tensor | None,
        patch_attention_mask: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        encoder_outputs: BaseModelOutputWithPooling | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, "HfViTBlockRunner"]:
        """Returns the input (B, P + N, D) of the first block, and a `HfViTBlockRunner` for the blocks.

        `kwargs` may contain `output_attentions`, as in `forward`. If `encoder_outputs` are given (see `run_backbone`),
        the runner returns their hidden states instead of running the blocks.
        """
        grid = self.embeddings.patch_embeddings.grid(check_images(pixel_values))
        if encoder_outputs is None:
            hidden_states, rotary = self.embed(pixel_values, bool_masked_pos, patch_attention_mask)
            known: tuple[Tensor, ...] = ()
        else:
            known = encoder_outputs.hidden_states
            hidden_states = known[0]
            rotary = self.embeddings.rotary(check_images(pixel_values), patch_attention_mask)
        wants_attentions = self.wants_attentions(**kwargs)
        return hidden_states, HfViTBlockRunner(self, grid, rotary, patch_attention_mask, wants_attentions, known)


@dataclass(frozen=True)
class HfViTBlockRunner:
    """Runs the blocks of a model on the tokens of one batch; see `HfViTModel.start_blocks`."""

    model: HfViTModel
    grid: Grid
    rotary: Rotary | None
    patch_attention_mask: Tensor | None
    output_attentions: bool
    known: tuple[Tensor, ...] = ()  # tokens (B, P + N, D) before the first block and after each block that has run

    def append_queries(self, hidden_states: Tensor, queries: HfViTQueries, num_blocks: int) -> tuple[Tensor, int]:
        """Runs all but the last `num_blocks` blocks on tokens (B, P + N, D), then appends the queries.

        Returns the tokens (B, P + N + Q, D) and the index of the first remaining block.
        """
        start = self.model.config.num_hidden_layers - num_blocks
        return queries.append_to(self.run(hidden_states, stop=start, **self.masks(hidden_states))), start

    def select_patches(self, hidden_states: Tensor, kept_patches: Tensor) -> tuple[Tensor, "HfViTBlockRunner"]:
        """Selects prefix tokens and the patches with indices `kept_patches` (B, K) from tokens (B, P + N, D).

        Returns the selected tokens (B, P + K, D) and a runner with the rotary positions and mask of these tokens.

        Raises:
            ValueError: if `kept_patches` has the wrong shape, or the model has window attention.
        """
        config, num_prefix = self.model.config, self.model.config.num_prefix_tokens
        batch = hidden_states.shape[0]  # `len` would make the batch size a constant in traced programs
        if config.window_size is not None:
            raise ValueError(
                f"kept_patches leaves holes in the patch grid, which window_size={config.window_size} does not "
                "support. Keep all patches, or set window_size=None."
            )
        if kept_patches.ndim != 2 or kept_patches.shape[0] != batch:
            raise ValueError(f"kept_patches must be (batch, kept) = ({batch}, …), not {tuple(kept_patches.shape)}.")
        prefix = torch.arange(num_prefix, device=kept_patches.device).expand(batch, -1)
        kept = torch.cat((prefix, kept_patches + num_prefix), dim=1)[:, None, :, None]  # (B, 1, P + K, 1)

        def keep(tokens: Tensor) -> Tensor:  # (B or 1, 1, P + N, .) to (B, 1, P + K, .)
            return tokens.expand(batch, -1, -1, -1).gather(2, kept.expand(-1, -1, -1, tokens.shape[-1]))

        rotary = None if self.rotary is None else (keep(self.rotary[0]), keep(self.rotary[1]))
        visible = self.patch_attention_mask
        visible = None if visible is None else visible.flatten(1).gather(1, kept_patches)  # (B, K)
        return keep(hidden_states[:, None])[:, 0], replace(self, rotary=rotary, patch_attention_mask=visible)

    def visible_tokens(self, hidden_states: Tensor) -> Tensor | None:
        """Returns a mask (B, L) that is False for padding in tokens (B, L, D) with queries; None without padding."""
        if self.patch_attention_mask is None:
            return None
        visible = self.patch_attention_mask.flatten(1).bool()  # (B, N)
        num_prefix = self.model.config.num_prefix_tokens
        num_queries = hidden_states.shape[1] - num_prefix - visible.shape[1]
        return F.pad(visible, (num_prefix, num_queries), value=True)

    def attention_mask(self, hidden_states: Tensor) -> Any:
        """Returns the padding mask of tokens (B, L, D), including queries at the end; None without padding.

        The mask has the format of the attention implementation, which is eager attention with `output_attentions`.
        """
        visible = self.visible_tokens(hidden_states)
        if visible is None or self.output_attentions:
            return None if visible is None else visible[:, None, None]
        return create_bidirectional_mask(self.model.config, inputs_embeds=hidden_states, attention_mask=visible)

    def masks(self, hidden_states: Tensor) -> dict[str, Any]:
        """Returns the arguments `attention_mask` and `windows` of `run` for tokens (B, L, D)."""
        mask = self.attention_mask(hidden_states)
        return {"attention_mask": mask, "windows": self._windows(hidden_states, mask)}

    def _windows(self, hidden_states: Tensor, attention_mask: Any) -> Windows | Tensor | None:
        """Returns the windows for blocks with window attention, or None if no block has window attention.

        If attention weights are requested, a mask (B, 1, L, L) is returned instead, which is slower than windows.
        """
        config, grid = self.model.config, self.grid
        size = window_size(config, grid)
        if size is None:
            return None
        num_prefix, visible = config.num_prefix_tokens, self.patch_attention_mask
        num_others = hidden_states.shape[1] - grid[0] * grid[1]
        if self.output_attentions:
            mask = dense_window_mask(grid, size, num_prefix, num_others - num_prefix, hidden_states.device)
            return mask if attention_mask is None else mask & attention_mask
        seen = self.visible_tokens(hidden_states)
        others_mask = None if seen is None else seen[:, None, None]
        if visible is None:
            if not is_symbolic(*grid) and grid[0] % size[0] == grid[1] % size[1] == 0:
                return Windows(grid, size, num_prefix)
            visible = torch.ones(1, *grid, dtype=torch.bool, device=hidden_states.device)
        visible = visible.bool().expand(hidden_states.shape[0], -1, -1)
        seen = make_window_mask(visible, size, num_others)  # (B·W, O + S)
        mask = create_bidirectional_mask(
            config=config,
            inputs_embeds=hidden_states.new_empty(seen.shape[0], size[0] * size[1], 1),
            attention_mask=seen,
            encoder_hidden_states=hidden_states.new_empty(*seen.shape, 1),
        )
        return Windows(grid, size, num_prefix, mask, others_mask)

    def run(
        self,
        hidden_states: Tensor,
        start: int = 0,
        stop: int | None = None,
        encoder: HfViTEncoder | None = None,
        **masks: Any,
    ) -> Tensor:
        """Runs the blocks from `start` to `stop` - 1 on tokens (B, L, D) and returns the resulting tokens."""
        # `encoder` may contain additional blocks after those of the model. `masks` is the result of `self.masks`.
        last = self.model.config.num_hidden_layers if stop is None else stop
        if encoder is None and self.known and hidden_states is self.known[start]:
            return self.known[last]
        encoder = self.model.encoder if encoder is None else encoder
        options = {"rotary": self.rotary, "output_attentions": self.output_attentions}
        return encoder(hidden_states, start=start, stop=stop, **options, **masks)


class HfViTBackbone(BackboneMixin, HfViTPreTrainedModel):
    """A backbone that returns the feature maps of selected stages, for models built on top of it."""

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)
        self.post_init()

    def post_init(self) -> None:
        """Installs no hooks to record outputs, because those of the inner model already record all of them."""
        HfViTPreTrainedModel.post_init(self)

    @BackboneMixin.out_features.getter
    def out_features(self) -> list[str]:
        """Names of the returned stages."""
        return self.config.out_features

    @BackboneMixin.out_indices.getter
    def out_indices(self) -> list[int]:
        """Indices of the returned stages, 0 for the stem."""
        return self.config.out_indices

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: Tensor, **kwargs: Any) -> BackboneOutput:
        """Runs the backbone.

        Args:
            pixel_values: Images (B, C, H, W).
            **kwargs: Other arguments of `HfViTModel`.

        Returns:
            `feature_maps`, with one tensor per entry of `config.out_features`: a map (B, D, h, w), or tokens (B, L, D)
            if `config.reshape_hidden_states` is False. The final norm is applied if `config.apply_layernorm` is True.
        """
        outputs = self.model(pixel_values, return_dict=True, **kwargs)
        grid = self.model.embeddings.patch_embeddings.grid(pixel_values)
        feature_maps = []
        for index in self.out_indices:
            features = outputs.hidden_states[index]  # (B, L, D)
            if self.config.apply_layernorm:
                features = self.model.norm(features)
            if self.config.reshape_hidden_states:
                features = to_maps(features[:, self.config.num_prefix_tokens :], grid)  # (B, D, h, w)
            feature_maps.append(features)
        return BackboneOutput(
            feature_maps=tuple(feature_maps), hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class HfViTForDensePrediction(HfViTPreTrainedModel):
    """Base class of models with a head on the patch tokens of selected blocks."""

    def run_encoder(
        self, pixel_values: Tensor | None, out_indices: list[int], **kwargs: Any
    ) -> tuple[BaseModelOutputWithPooling, list[Tensor], list[Tensor]]:
        """Returns the outputs of the model and the tokens of the blocks `out_indices`; 0 is the encoder input."""
        # For each block, the tokens are split into patch maps (B, D, h, w) and prefix tokens (B, P, D). They are
        # normalized by the final norm if `config.apply_layernorm` is True.
        requested_hidden_states = self.requested_hidden_states(kwargs.pop("output_hidden_states", None))
        has_inner = out_indices != [self.config.num_hidden_layers] or not self.config.apply_layernorm
        kwargs["output_hidden_states"] = bool(requested_hidden_states) or has_inner
        outputs = self.run_backbone(pixel_values, **kwargs)
        levels, prefixes = [], []
        grid = self.model.embeddings.patch_embeddings.grid(pixel_values)
        for index in out_indices:
            tokens = outputs.hidden_states[index] if has_inner else outputs.last_hidden_state  # (B, L, D)
            if has_inner and self.config.apply_layernorm:
                tokens = self.model.norm(tokens)
            prefixes.append(tokens[:, : self.config.num_prefix_tokens])
            levels.append(to_maps(tokens[:, self.config.num_prefix_tokens :], grid))
        outputs.hidden_states = select_hidden_states(outputs.hidden_states, requested_hidden_states)
        return outputs, levels, prefixes


class HfViTImageFeatureExtractionPipeline(BatchedImagePipeline, ImageFeatureExtractionPipeline):
    """Image feature extraction pipeline with batched image processing; see `BatchedImagePipeline`."""

    stock: ClassVar[type[Pipeline] | None] = ImageFeatureExtractionPipeline
    needs_head: ClassVar[bool] = False

    def call_arguments(self, preprocess: dict[str, Any], forward: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Splits the arguments of a call into options of the image processor, the pipeline and the model."""
        own = {name: preprocess.pop(name) for name in ("on_error", "timeout") if name in preprocess}
        return self.image_processor.call_options(**preprocess), own, forward

    def decode(
        self, outputs: Any, parts: list[ModelInput], pool: bool | None = None, return_tensors: bool = False
    ) -> list[Any]:
        """Returns the features of each image, (1, L, D), or (1, D) with `pool`."""
        if pool and ("pooler_output" not in outputs or self.model.untrained_weights):
            raise ValueError("pool=True needs a pooled output, which this model does not have. Leave pool out.")
        features = (outputs["pooler_output"] if pool else outputs[0]).cpu().split(1)
        return list(features) if return_tensors else [own.tolist() for own in features]
