"""The Vision Transformer and its task models.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, P prefix tokens (CLS, distillation,
registers), L = P + N, D hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    DepthEstimatorOutput,
    SemanticSegmenterOutput,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_SEGMENTATION_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.output_capturing import capture_outputs, maybe_install_capturing_hooks

from .configuration_hf_vit import HfViTConfig, to_pair
from .configuration_tasks_hf_vit import HfViTDepthConfig, HfViTSegmentationConfig, HfViTUniversalSegmentationConfig
from .decoders_hf_vit import check_blocks, each_image_alone, to_maps
from .embeddings_hf_vit import Grid, HfViTEmbeddings, Rotary
from .encoder_hf_vit import HfViTAttentionPooling, HfViTEncoder, make_norm
from .outputs_hf_vit import (
    HfViTForUniversalSegmentationOutput,
    HfViTImageClassifierOutput,
    HfViTSemanticSegmenterOutput,
)
from .pretrained_hf_vit import HfViTPreTrainedModel
from .task_classification import HfViTClassifier, classification_loss
from .task_depth import HfViTDepthHead, depth_loss
from .task_segmentation import (
    HfViTSegmentationHead,
    HfViTSimpleSegmentationHead,
    overlapping_stride,
    segment_copies,
    segmentation_loss,
    slide,
    window_of,
)
from .task_universal_segmentation import HfViTUniversalSegmentationHead, check_targets, universal_segmentation_loss
from .windows_hf_vit import Windows, dense_window_mask, visible_in_windows, window_size


logger = logging.get_logger(__name__)


def check_images(pixel_values: Tensor | None) -> Tensor:
    """Returns the images.

    Raises:
        ValueError: if there are none.
        TypeError: if they are no tensor.
    """
    if pixel_values is None:
        raise ValueError("pixel_values is missing: pass the images that the image processor returns.")
    if not isinstance(pixel_values, Tensor):
        raise TypeError(
            f"pixel_values must be a tensor, not {type(pixel_values).__name__}. Call the image processor with "
            'return_tensors="pt".'
        )
    return pixel_values


class HfViTPooler(nn.Module):
    """The original's extra layer after the pooling."""

    def __init__(self, in_size: int, out_size: int) -> None:
        """Maps width `in_size` to `out_size`."""
        super().__init__()
        self.dense = nn.Linear(in_size, out_size)

    def forward(self, pooled: Tensor) -> Tensor:
        """(B, in_size) to (B, out_size)."""
        return self.dense(pooled).tanh()


class HfViTModel(HfViTPreTrainedModel):
    """The plain Vision Transformer (https://arxiv.org/abs/2010.11929): images to tokens and one vector per image."""

    def __init__(self, config: HfViTConfig, add_pooling_layer: bool = True) -> None:
        """Builds a model with fresh weights.

        Args:
            config: The configuration.
            add_pooling_layer: Without it the model has none of the weights that only the pooled output needs, whatever
                `config` says, and returns no `pooler_output`.
        """
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
        self.pooler = HfViTPooler(pooled_size, config.hidden_size) if has_pooler else None
        self.post_init()
        # Now rather than at the first call that asks for them, which torch.compile could not trace.
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
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            bool_masked_pos: (B, N) bool, True where the mask token replaces a patch.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom. The sizes of the
                images are read back from it, so under `torch.compile` it breaks the graph: leave out fullgraph.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            kept_patches: (B, K) int64, numbers of the patches, row by row from 0, that the blocks see; N becomes K.
                For trainings that drop the others (PatchDropout, https://arxiv.org/abs/2208.07220).
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `last_hidden_state` (B, L, D) after the final norm, without it under `config.norm_after_pooling`;
            `pooler_output` (B, D), (B, 2·D) with `config.pooling="cls_mean"`; on request `hidden_states`, before the
            first block and after each one, and `attentions` (B, heads, L, L).

        Raises:
            ValueError: if an input does not fit the model, saying what would.
        """
        hidden_states, rotary = self.embed(pixel_values, bool_masked_pos, patch_attention_mask)
        assert pixel_values is not None  # refused above
        grid = self.embeddings.patch_embeddings.grid(pixel_values)
        if kept_patches is not None:
            hidden_states, rotary = self.keep(hidden_states, rotary, kept_patches)
            if patch_attention_mask is not None:
                patch_attention_mask = patch_attention_mask.flatten(1).gather(1, kept_patches)  # (B, K)
        output_attentions = self.wants_attentions(**kwargs)
        hidden_states = self.encoder(
            hidden_states,
            rotary=rotary,
            attention_mask=self.attention_mask(hidden_states, patch_attention_mask, output_attentions),
            windows=self.windows(hidden_states, grid, patch_attention_mask, output_attentions),
            output_attentions=output_attentions,
        )
        if not self.config.norm_after_pooling:
            hidden_states = self.norm(hidden_states)
        pooled = self.pool(hidden_states, patch_attention_mask) if self.add_pooling_layer else None
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def embed(
        self,
        pixel_values: Tensor | None,
        bool_masked_pos: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Rotary | None]:
        """Returns what goes into the first block, (B, L, D), and the rotary positions; see `forward`."""
        pixel_values = check_images(pixel_values)
        pixel_values = pixel_values.to(self.embeddings.patch_embeddings.projection.weight.dtype)
        hidden_states = self.pre_norm(self.embeddings(pixel_values, bool_masked_pos, patch_attention_mask))
        return hidden_states, self.embeddings.rotary(pixel_values, patch_attention_mask)

    def keep(self, hidden_states: Tensor, rotary: Rotary | None, kept_patches: Tensor) -> tuple[Tensor, Rotary | None]:
        """Leaves the prefix and some of the patches, each with its position.

        Args:
            hidden_states: (B, P + N, D).
            rotary: Their rotary positions, if there are any.
            kept_patches: (B, K) int64, see `forward`.

        Returns:
            (B, P + K, D), and the rotary positions of these.

        Raises:
            ValueError: if the numbers are not of this batch, or blocks look within windows.
        """
        if self.config.window_size is not None:
            raise ValueError(
                f"kept_patches leaves holes in the grid, where window_size={self.config.window_size} finds no "
                "windows. Keep all patches, or set window_size=None."
            )
        if kept_patches.ndim != 2 or len(kept_patches) != len(hidden_states):
            raise ValueError(
                f"kept_patches must be (batch, kept) = ({len(hidden_states)}, …), not {tuple(kept_patches.shape)}."
            )
        num_prefix = self.config.num_prefix_tokens
        prefix = torch.arange(num_prefix, device=kept_patches.device).expand(len(kept_patches), -1)
        kept = torch.cat((prefix, kept_patches + num_prefix), dim=1)  # (B, P + K)
        hidden_states = hidden_states.gather(1, kept[..., None].expand(-1, -1, hidden_states.shape[-1]))
        if rotary is None:
            return hidden_states, None
        cosine, sine = (
            table.expand(len(kept), 1, -1, -1).gather(2, kept[:, None, :, None].expand(-1, -1, -1, table.shape[-1]))
            for table in rotary
        )  # (B, 1, P + K, d)
        return hidden_states, (cosine, sine)

    def attention_mask(
        self, hidden_states: Tensor, patch_attention_mask: Tensor | None, output_attentions: bool = False
    ) -> Any:
        """Hides padded patches, in the form that the attention implementation takes; None if there are none.

        Args:
            hidden_states: (B, L, D), L counting queries at the end too.
            patch_attention_mask: (B, h, w) bool or None.
            output_attentions: Whether eager attention will run, whatever the configuration says.
        """
        if patch_attention_mask is None:
            return None
        visible = patch_attention_mask.flatten(1).bool()  # (B, N)
        num_prefix = self.config.num_prefix_tokens
        num_queries = hidden_states.shape[1] - num_prefix - visible.shape[1]
        visible = F.pad(visible, (num_prefix, num_queries), value=True)  # (B, L)
        if output_attentions:
            return visible[:, None, None, :]
        return create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=visible)

    def windows(
        self,
        hidden_states: Tensor,
        grid: Grid,
        patch_attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Windows | Tensor | None:
        """What the blocks that look within windows take in the place of the mask; None where none does.

        Args:
            hidden_states: (B, L, D), L counting queries at the end too.
            grid: Rows and columns (h, w) of patches.
            patch_attention_mask: (B, h, w) bool or None.
            output_attentions: Whether the weights (B, heads, L, L) are wanted, which attention under a mask (B, 1, L,
                L) gives; it takes longer than windows do.
        """
        size = window_size(self.config, grid)
        if size is None:
            return None
        num_prefix, visible = self.config.num_prefix_tokens, patch_attention_mask
        num_others = hidden_states.shape[1] - grid[0] * grid[1]
        if output_attentions:
            mask = dense_window_mask(grid, size, num_prefix, num_others - num_prefix, hidden_states.device)
            seen = self.attention_mask(hidden_states, visible, output_attentions)
            return mask if seen is None else mask & seen
        others_mask = self.attention_mask(hidden_states, visible, output_attentions=True)
        if visible is None:
            if grid[0] % size[0] == grid[1] % size[1] == 0:
                return Windows(grid, size, num_prefix)
            visible = torch.ones(1, *grid, dtype=torch.bool, device=hidden_states.device)
        seen = visible_in_windows(visible.bool().expand(len(hidden_states), -1, -1), size, num_others)  # (B·W, O + S)
        mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=hidden_states.new_empty(len(seen), size[0] * size[1], 1),
            attention_mask=seen,
            encoder_hidden_states=hidden_states.new_empty(*seen.shape, 1),
        )
        return Windows(grid, size, num_prefix, mask, others_mask)

    def pool(self, hidden_states: Tensor, patch_attention_mask: Tensor | None = None) -> Tensor:
        """Sums up tokens (B, L, D) as one vector per image, (B, D) or (B, 2·D)."""
        parts = []
        if self.config.pooling in ("cls", "cls_mean"):
            parts.append(hidden_states[:, 0])
        if self.config.pooling in ("mean", "cls_mean"):
            patches = hidden_states[:, self.config.num_prefix_tokens :]  # (B, N, D)
            if patch_attention_mask is None:
                parts.append(patches.mean(dim=1))
            else:
                real = patch_attention_mask.flatten(1)[..., None].bool()  # (B, N, 1)
                # In float32: half precision overflows where a thousand patches are summed.
                total = torch.where(real, patches, 0).sum(
                    dim=1, dtype=torch.promote_types(patches.dtype, torch.float32)
                )
                parts.append((total / real.sum(dim=1)).to(patches.dtype))
        if self.attention_pooling is not None:
            mask = None if patch_attention_mask is None else patch_attention_mask.flatten(1).bool()  # (B, N)
            parts.append(self.attention_pooling(hidden_states[:, self.config.num_prefix_tokens :], mask))
        pooled = torch.cat(parts, dim=-1)
        if self.config.norm_after_pooling:
            pooled = self.norm(pooled)
        return pooled if self.pooler is None else self.pooler(pooled)

    def begin(
        self, pixel_values: Tensor | None, patch_attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, "HfViTBlockRunner"]:
        """Begins a run range by range, for heads that need what is between blocks, or change it.

        Args:
            pixel_values: (B, C, H, W).
            patch_attention_mask: (B, h, w) bool or None.
            **kwargs: `output_attentions`, as in `forward`.

        Returns:
            What goes into the first block, (B, P + N, D), and what runs the blocks.
        """
        hidden_states, rotary = self.embed(pixel_values, None, patch_attention_mask)
        assert pixel_values is not None  # refused above
        grid = self.embeddings.patch_embeddings.grid(pixel_values)
        return hidden_states, HfViTBlockRunner(
            self, grid, rotary, patch_attention_mask, self.wants_attentions(**kwargs)
        )


@dataclass(frozen=True)
class HfViTBlockRunner:
    """Runs blocks of a model on the tokens of one batch; see `HfViTModel.begin`.

    Args:
        model: The model.
        grid: Rows and columns (h, w) of patches.
        rotary: Rotary positions of prefix and patches.
        patch_attention_mask: (B, h, w) bool or None.
        output_attentions: Whether attention weights are recorded.
    """

    model: HfViTModel
    grid: Grid
    rotary: Rotary | None
    patch_attention_mask: Tensor | None
    output_attentions: bool

    def attention_mask(self, hidden_states: Tensor) -> Any:
        """Hides padded patches from tokens (B, L, D), L counting queries at the end too."""
        return self.model.attention_mask(hidden_states, self.patch_attention_mask, self.output_attentions)

    def masks(self, hidden_states: Tensor) -> dict[str, Any]:
        """Returns the mask of tokens (B, L, D) and that of blocks within windows, as `run` takes them."""
        visible = self.patch_attention_mask, self.output_attentions
        return {
            "attention_mask": self.attention_mask(hidden_states),
            "windows": self.model.windows(hidden_states, self.grid, *visible),
        }

    def run(
        self,
        hidden_states: Tensor,
        start: int = 0,
        stop: int | None = None,
        encoder: HfViTEncoder | None = None,
        **masks: Any,
    ) -> Tensor:
        """Runs the blocks from `start` up to but without `stop` of the model, or of another `encoder` behind it.

        Args:
            hidden_states: (B, L, D).
            start: First block.
            stop: End of the range, as in a slice.
            encoder: Other blocks.
            **masks: What `masks` returns.

        Returns:
            (B, L, D).
        """
        encoder = self.model.encoder if encoder is None else encoder
        tokens: Tensor = encoder(
            hidden_states,
            rotary=self.rotary,
            start=start,
            stop=stop,
            output_attentions=self.output_attentions,
            **masks,
        )
        return tokens


class HfViTBackbone(BackboneMixin, HfViTPreTrainedModel):
    """Feature maps of chosen stages, for models that are built on a backbone."""

    def __init__(self, config: HfViTConfig) -> None:
        """Builds a backbone with fresh weights."""
        super().__init__(config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)
        self.post_init()

    def post_init(self) -> None:
        """Leaves out the mixin's hooks: the model inside has its own, and two would record everything twice."""
        HfViTPreTrainedModel.post_init(self)

    @property
    def out_features(self) -> list[str]:
        """Names of the stages returned."""
        return self.config.out_features

    @out_features.setter
    def out_features(self, out_features: list[str]) -> None:
        self.config.out_features = out_features

    @property
    def out_indices(self) -> list[int]:
        """Numbers of the stages returned, 0 for the stem."""
        return self.config.out_indices

    @out_indices.setter
    def out_indices(self, out_indices: list[int]) -> None:
        self.config.out_indices = out_indices

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: Tensor, **kwargs: Any) -> BackboneOutput:
        """Runs the backbone.

        Args:
            pixel_values: (B, C, H, W).
            **kwargs: What `HfViTModel` takes.

        Returns:
            `feature_maps`, one per entry of `config.out_features`: (B, D, h, w), or (B, L, D) with the prefix tokens
            where `config.reshape_hidden_states` is False; normalised by the final norm if `config.apply_layernorm`.
        """
        outputs = self.model(pixel_values, return_dict=True, **kwargs)
        grid = self.model.embeddings.patch_embeddings.grid(pixel_values)
        feature_maps = []
        for index in self.out_indices:
            features = outputs.hidden_states[index]  # (B, L, D)
            if self.config.apply_layernorm:
                features = self.model.norm(features)
            if self.config.reshape_hidden_states:
                patches = features[:, self.config.num_prefix_tokens :]  # (B, N, D)
                features = patches.transpose(1, 2).unflatten(2, grid).contiguous()  # (B, D, h, w)
            feature_maps.append(features)
        return BackboneOutput(
            feature_maps=tuple(feature_maps), hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class HfViTForImageClassification(HfViTPreTrainedModel):
    """Names what is on an image: one label, several, or values."""

    def __init__(self, config: HfViTConfig) -> None:
        """Builds a model with fresh weights."""
        super().__init__(config)
        if not config.num_labels:
            raise ValueError(
                "num_labels=0 leaves nothing to classify. Set num_labels, or use HfViTModel for features."
            )
        self.model = HfViTModel(config)
        self.classifier = HfViTClassifier(config.pooled_size, config.num_labels)
        self.distillation_classifier = (
            HfViTClassifier(config.hidden_size, config.num_labels) if config.use_distillation_token else None
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTImageClassifierOutput:
        """Runs the model.

        Args:
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            labels: (B,) int64, or (B, num_labels) floats; `config.problem_type` says what they mean (several labels,
                soft labels or values), see `classification_loss`.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            **kwargs: `kept_patches`, see `HfViTModel`; `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            See `HfViTImageClassifierOutput`.

        Raises:
            ValueError: if an input does not fit the model, saying what would.
        """
        outputs = self.model(
            pixel_values,
            patch_attention_mask=patch_attention_mask,
            interpolate_pos_encoding=interpolate_pos_encoding,
            return_dict=True,
            **kwargs,
        )
        logits = self.classifier(outputs.pooler_output)
        cls_logits = distillation_logits = None
        if self.distillation_classifier is not None:
            cls_logits, distillation_logits = logits, self.distillation_classifier(outputs.last_hidden_state[:, 1])
            logits = (cls_logits + distillation_logits) / 2
        return HfViTImageClassifierOutput(
            loss=None if labels is None else classification_loss(logits, labels, self.config.problem_type),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cls_logits=cls_logits,
            distillation_logits=distillation_logits,
        )


class HfViTForDensePrediction(HfViTPreTrainedModel):
    """What models with a head on the patches of chosen blocks share."""

    def run_encoder(
        self, pixel_values: Tensor | None, out_indices: list[int], **kwargs: Any
    ) -> tuple[BaseModelOutputWithPooling, list[Tensor], list[Tensor]]:
        """Runs the model and takes the tokens of some blocks apart.

        Args:
            pixel_values: (B, C, H, W).
            out_indices: Numbers of the blocks, 0 for the tokens before the first.
            **kwargs: What `HfViTModel` takes.

        Returns:
            The model's outputs; of each block the patches as maps (B, D, h, w), normalised by the final norm if
            `config.apply_layernorm` says so; and its prefix tokens (B, P, D).
        """
        wants_states = kwargs.pop("output_hidden_states", None)
        wants_states = self.config.output_hidden_states if wants_states is None else wants_states
        has_inner = out_indices != [self.config.num_hidden_layers] or not self.config.apply_layernorm
        outputs = self.model(
            pixel_values, return_dict=True, output_hidden_states=bool(wants_states) or has_inner, **kwargs
        )
        levels, prefixes = [], []
        grid = self.model.embeddings.patch_embeddings.grid(pixel_values)
        for index in out_indices:
            tokens = outputs.hidden_states[index] if has_inner else outputs.last_hidden_state  # (B, L, D)
            if has_inner and self.config.apply_layernorm:
                tokens = self.model.norm(tokens)
            prefixes.append(tokens[:, : self.config.num_prefix_tokens])
            levels.append(to_maps(tokens[:, self.config.num_prefix_tokens :], grid))
        if not wants_states:
            outputs.hidden_states = None
        return outputs, levels, prefixes


class HfViTForSemanticSegmentation(HfViTForDensePrediction):
    """Gives every pixel a class."""

    def __init__(self, config: HfViTConfig) -> None:
        """Builds a model with fresh weights."""
        super().__init__(config)
        self.options = HfViTSegmentationConfig.of(config.segmentation_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.segmentation_head = HfViTSegmentationHead(config, self.options)
        if config.num_labels < 2:
            raise ValueError(
                f"num_labels={config.num_labels} leaves nothing to tell apart. Set num_labels to 2 at least: what is "
                "none of your classes is one too, unless it is ignored."
            )
        layer = self.options.auxiliary_layer
        self.auxiliary_layer = max(1, config.num_hidden_layers * 2 // 3) if layer is None else layer
        check_blocks("auxiliary_layer", [self.auxiliary_layer], config)
        self.auxiliary_head = (
            HfViTSimpleSegmentationHead(config, self.options, config.hidden_size)
            if self.options.use_auxiliary_head
            else None
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTSemanticSegmenterOutput:
        """Runs the model.

        Args:
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            labels: (B, H, W) int64, `semantic_loss_ignore_index` (255) for pixels that do not count.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            See `HfViTSemanticSegmenterOutput`; for the loss `segmentation_loss`.

        Raises:
            ValueError: if an input does not fit the model, saying what would.
        """
        indices = self.segmentation_head.out_indices
        auxiliary_head = self.auxiliary_head if self.training else None
        outputs, levels, _ = self.run_encoder(
            pixel_values,
            indices if auxiliary_head is None else [*indices, self.auxiliary_layer],
            patch_attention_mask=patch_attention_mask,
            **kwargs,
        )
        logits = self.segmentation_head(levels[: len(indices)], patch_attention_mask)
        auxiliary_logits = None
        if auxiliary_head is not None:
            auxiliary_logits = each_image_alone(
                lambda own, _: auxiliary_head(own[0]), levels[-1:], [], patch_attention_mask
            )
        loss = None
        if labels is not None:
            loss = segmentation_loss(logits, labels, self.options)
            if auxiliary_logits is not None:
                auxiliary_loss = segmentation_loss(auxiliary_logits, labels, self.options)
                loss = loss + self.options.auxiliary_loss_weight * auxiliary_loss
        return HfViTSemanticSegmenterOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            auxiliary_logits=auxiliary_logits,
        )

    @torch.no_grad()
    def segment(
        self,
        pixel_values: Tensor,
        window_size: int | tuple[int, int] | None = None,
        window_stride: int | tuple[int, int] | None = None,
        scales: tuple[float, ...] = (1.0,),
        flip: bool = False,
        patch_attention_mask: Tensor | None = None,
    ) -> SemanticSegmenterOutput:
        """Segments images in ways that take longer and get more right; `forward` is one look at the whole image.

        Args:
            pixel_values: (B, C, H, W).
            window_size: Height and width in pixels of windows that slide over images larger than the model was
                trained on; None looks at the whole image.
            window_stride: How far apart the windows are, two thirds of their size by default.
            scales: Sizes, relative to the image, of copies whose probabilities are averaged.
            flip: Whether the mirror image of each copy counts too.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom. Each image is then
                segmented alone.

        Returns:
            `logits` (B, num_labels, H, W), which `post_process_semantic_segmentation` takes.

        Raises:
            ValueError: if a size does not fit, or the model is in training mode.
        """
        if self.training:
            raise ValueError("In training mode chance has a part in the result (dropout). Call model.eval() before.")
        patch = to_pair(self.config.patch_size)

        def forward(images: Tensor) -> Tensor:
            return self(images, return_dict=True).logits

        look = forward
        if window_size is not None:
            window = window_of(window_size, patch, "window_size")
            stride = (
                overlapping_stride(window, patch)
                if window_stride is None
                else window_of(window_stride, patch, "window_stride")
            )

            def look(images: Tensor) -> Tensor:
                return slide(forward, images, window, stride)

        mask = patch_attention_mask
        if mask is not None:
            mask = mask.repeat_interleave(patch[0], dim=1).repeat_interleave(patch[1], dim=2)  # (B, H, W)
        logits = each_image_alone(
            lambda own, _: segment_copies(look, own[0], patch, scales, flip), [pixel_values], [], mask
        )
        return SemanticSegmenterOutput(logits=logits)


class HfViTForUniversalSegmentation(HfViTPreTrainedModel):
    """Finds masks with a class: one model for semantic, instance and panoptic segmentation.

    The design is that of EoMT, https://arxiv.org/abs/2503.19108. Blocks that queries pass through look at the whole
    image, whatever `window_size` says: each query has a mask of its own there. Chance has a part in its training, and
    none outside: it decides which queries attend to their own mask alone, and where masks are compared.
    """

    def __init__(self, config: HfViTConfig) -> None:
        """Builds a model with fresh weights."""
        super().__init__(config)
        if not config.num_labels:
            raise ValueError("num_labels=0 leaves the masks no class. Set num_labels.")
        self.options = HfViTUniversalSegmentationConfig.of(config.universal_segmentation_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.universal_segmentation_head = HfViTUniversalSegmentationHead(config, self.options)
        self.post_init()
        self._output_capturing_hooks_installed = True  # those of the model inside record for this one too

    def anneal_masks(self, progress: float) -> None:
        """Sets how likely masked attention is at a point of the training, from 0 to 1; see `mask_probabilities`."""
        self.universal_segmentation_head.anneal_masks(progress)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        mask_labels: list[Tensor] | None = None,
        class_labels: list[Tensor] | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTForUniversalSegmentationOutput:
        """Runs the model.

        Args:
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            mask_labels: For each image its masks (M, H, W), 0 or 1.
            class_labels: For each image the class numbers (M,) of its masks.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            See `HfViTForUniversalSegmentationOutput`; for the loss `universal_segmentation_loss`. In training it is
            the sum of the losses of what is predicted before each block with queries and after the last one; otherwise
            that of the result alone, so that it can be compared at all times of the training.

        Raises:
            ValueError: if an input does not fit the model, saying what would.
        """
        has_targets = mask_labels is not None or class_labels is not None
        if has_targets and pixel_values is not None:
            check_targets(len(pixel_values), self.config.num_labels, mask_labels, class_labels)
        predictions, last_hidden_state = self._predict(pixel_values, patch_attention_mask, **kwargs)
        loss = None
        if mask_labels is not None and class_labels is not None:
            losses = [
                universal_segmentation_loss(
                    masks, classes, mask_labels, class_labels, self.options, self.training, patch_attention_mask
                )
                for masks, classes in (predictions if self.training else predictions[-1:])
            ]
            loss = torch.stack(losses).sum()
        masks, classes = predictions[-1]
        return HfViTForUniversalSegmentationOutput(
            loss=loss,
            class_queries_logits=classes,
            masks_queries_logits=masks,
            last_hidden_state=last_hidden_state,
        )

    def _predict(
        self, pixel_values: Tensor | None, patch_attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Returns masks and classes after the last block, before that those that are needed, and the last tokens."""
        head, model, num_blocks = self.universal_segmentation_head, self.model, self.options.num_blocks
        hidden_states, blocks = model.begin(pixel_values, patch_attention_mask, **kwargs)
        start = self.config.num_hidden_layers - num_blocks
        hidden_states = blocks.run(hidden_states, stop=start, **blocks.masks(hidden_states))  # (B, P + N, D)
        hidden_states = head.join_queries(hidden_states)  # (B, L, D)
        unmasked = blocks.attention_mask(hidden_states)
        predictions = []
        for block, is_masked in enumerate(head.masked_blocks):
            attention_mask = unmasked
            if is_masked or self.training:
                predictions.append(head(model.norm(hidden_states), blocks.grid, patch_attention_mask))
            if is_masked:
                self._check_attention(blocks.output_attentions)
                attention_mask = head.attention_mask(
                    predictions[-1][0], block, blocks.grid, self.config.num_prefix_tokens, patch_attention_mask
                )
            number = start + block
            hidden_states = blocks.run(hidden_states, number, number + 1, attention_mask=attention_mask)
        hidden_states = model.norm(hidden_states)
        return [*predictions, head(hidden_states, blocks.grid, patch_attention_mask)], hidden_states

    def _check_attention(self, output_attentions: bool) -> None:
        """Raises `ValueError` if the attention implementation takes no mask for each query."""
        implementation = self.config._attn_implementation
        if implementation not in ("eager", "sdpa") and not output_attentions:  # for which eager attention runs
            raise ValueError(
                f"Masked attention needs attn_implementation='sdpa' or 'eager', not {implementation!r}. A model whose "
                "training has annealed it away runs with any."
            )


class HfViTForDepthEstimation(HfViTForDensePrediction):
    """Says how far away every pixel is."""

    def __init__(self, config: HfViTConfig) -> None:
        """Builds a model with fresh weights."""
        super().__init__(config)
        self.options = HfViTDepthConfig.of(config.depth_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.depth_head = HfViTDepthHead(config, self.options)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> DepthEstimatorOutput:
        """Runs the model.

        Args:
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            labels: (B, H, W) floats in metres; 0, NaN and more than `max_depth` mean that a pixel is not valid.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `predicted_depth` (B, s·h, s·w), metres or relative inverse depth; `post_process_depth_estimation` resizes
            it. `loss` if labels were given, see `depth_loss`.

        Raises:
            ValueError: if an input does not fit the model, saying what would.
        """
        outputs, levels, prefixes = self.run_encoder(
            pixel_values, self.depth_head.out_indices, patch_attention_mask=patch_attention_mask, **kwargs
        )
        predicted = self.depth_head(levels, prefixes, patch_attention_mask)
        return DepthEstimatorOutput(
            loss=None if labels is None else depth_loss(predicted, labels, self.options),
            predicted_depth=predicted,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# The stock pipeline reads this list, not what is registered, and calls models that are not in it unsupported.
MODEL_FOR_IMAGE_SEGMENTATION_MAPPING_NAMES["hf_vit"] = (
    HfViTForSemanticSegmentation.__name__,
    HfViTForUniversalSegmentation.__name__,
)
