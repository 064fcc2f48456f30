"""The text tower of image-text models.

Shapes: T texts, S tokens of a text, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import capture_outputs, maybe_install_capturing_hooks

from .configuration_hf_vit import HfViTConfig
from .encoder import HfViTAttention, HfViTEncoder, make_norm
from .pretrained import HfViTPreTrainedModel
from .task_configurations import HfViTTextConfig


def pool_tokens(
    hidden_states: Tensor, input_ids: Tensor, attention_mask: Tensor | None, pooling: str, eos_token_id: int | None
) -> Tensor:
    """Pools tokens (T, S, D) to one vector per text, (T, D), as `HfViTTextConfig.pooling` says."""
    # Ids and mask are (T, S), the latter 1 where a token is text; None if all are. "eos" needs `eos_token_id`.
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if pooling == "first":
        return hidden_states[:, 0]
    if pooling == "mean":
        shown = attention_mask.to(hidden_states.dtype)[..., None]  # (B, S, 1)
        return (hidden_states * shown).sum(dim=1) / shown.sum(dim=1).clamp_min(1)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    index = (positions * attention_mask).argmax(dim=1)  # (B,)
    if pooling == "eos":
        assert eos_token_id is not None  # refused by the configuration
        is_end = input_ids == eos_token_id
        index = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1), index)
    return hidden_states[torch.arange(index.shape[0], device=index.device), index]


class HfViTTextModel(HfViTPreTrainedModel):
    """A small transformer over the tokens of a text: learned positions, and the blocks of the image tower."""

    main_input_name = "input_ids"
    input_modalities = ("text",)
    _input_embed_layer = "token_embedding"

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        self.options = HfViTTextConfig.of(config.text_config)
        own = HfViTConfig(
            hidden_size=self.options.hidden_size,
            num_hidden_layers=self.options.num_hidden_layers,
            num_attention_heads=self.options.num_attention_heads,
            intermediate_size=self.options.intermediate_size,
            hidden_act=self.options.hidden_act,
            layer_norm_eps=self.options.layer_norm_eps,
            hidden_dropout_prob=config.hidden_dropout_prob,
        )
        self.token_embedding = nn.Embedding(self.options.vocab_size, own.hidden_size)
        self.position_embedding = nn.Embedding(self.options.max_position_embeddings, own.hidden_size)
        self.encoder = HfViTEncoder(own)
        for module in self.encoder.modules():
            if isinstance(module, HfViTAttention):
                module.config = config  # so that another attention implementation is that of this tower too
                module.is_causal = self.options.is_causal
        self.norm = make_norm(own, own.hidden_size)
        self.post_init()
        maybe_install_capturing_hooks(self)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Runs the tower.

        Args:
            input_ids: (T, S) int64.
            attention_mask: (T, S), 0 where a token is padding.
            position_ids: (T, S) int64, by default 0, 1, 2, …
            token_type_ids: Accepted because some tokenizers make them; it has no effect.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `last_hidden_state` (T, S, D) after the final norm; on request `hidden_states` and `attentions`.

        Raises:
            ValueError: if a text is longer than `max_position_embeddings`.
        """
        length, longest = input_ids.shape[1], self.options.max_position_embeddings
        if length > longest:
            raise ValueError(
                f"The texts have {length} tokens, but max_position_embeddings={longest}. Cut them off: "
                f"tokenizer(texts, truncation=True, max_length={longest})."
            )
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None]
        hidden_states = self.token_embedding(input_ids) + self.position_embedding(position_ids)  # (T, S, D)
        output_attentions = self.wants_attentions(**kwargs)
        hidden_states = self.encoder(
            hidden_states,
            attention_mask=self._attention_mask(hidden_states, attention_mask, output_attentions),
            output_attentions=output_attentions,
        )
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def _attention_mask(self, hidden_states: Tensor, attention_mask: Tensor | None, output_attentions: bool) -> Any:
        """Returns the mask of padding, and of later tokens if causal, as the attention implementation takes it."""
        given = (self.config, hidden_states, attention_mask)
        if not output_attentions:
            # The name of the fourth argument, the cache, depends on the version of transformers.
            return create_causal_mask(*given, None) if self.options.is_causal else create_bidirectional_mask(*given)
        texts, length = hidden_states.shape[:2]
        seen = torch.ones(length, length, dtype=torch.bool, device=hidden_states.device)
        seen = (seen.tril() if self.options.is_causal else seen).expand(texts, 1, -1, -1)  # (T, 1, S, S)
        return seen if attention_mask is None else seen & attention_mask.bool()[:, None, None, :]


def without_pooler(encoder: PreTrainedModel) -> PreTrainedModel:
    """Removes the pooler of a text encoder, and returns the encoder."""
    if "pooler" in dict(encoder.named_children()):
        encoder.pooler = None
    return encoder


def build_text_tower(config: HfViTConfig, options: HfViTTextConfig) -> PreTrainedModel:
    """Returns a text tower with fresh weights; `ValueError` if `encoder_config` is of no encoder of the library."""
    if options.encoder_config is None:
        return HfViTTextModel(config)
    # The precision is that of the whole model.
    fields = {name: value for name, value in options.encoder_config.items() if name != "dtype"}
    encoder_config = AutoConfig.for_model(**fields)
    if encoder_config.is_encoder_decoder:
        raise ValueError(f"encoder_config is of {encoder_config.model_type!r}, which is no encoder alone.")
    chosen = config._attn_implementation  # SDPA is the default, which not every encoder has
    given = {} if chosen in (None, "sdpa") else {"attn_implementation": chosen}
    return without_pooler(AutoModel.from_config(encoder_config, **given))
