"""The model that compares images with texts, and its own text tower.

Shapes: B images, T texts, S tokens of a text, D hidden size, C channels, H W pixels, h w patch grid, E width of what
is compared.
"""

import os
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import capture_outputs, maybe_install_capturing_hooks

from .configuration_hf_vit import HfViTConfig
from .configuration_text_hf_vit import HfViTContrastiveConfig, HfViTTextConfig
from .encoder_hf_vit import HfViTAttention, HfViTEncoder, make_norm
from .modeling_hf_vit import HfViTModel
from .pretrained_hf_vit import HfViTPreTrainedModel
from .task_contrastive import HfViTContrastiveHead, contrastive_loss, pool_tokens


class HfViTTextModel(HfViTPreTrainedModel):
    """A small transformer over the tokens of a text: learned positions, and the blocks of the image tower."""

    main_input_name = "input_ids"
    input_modalities = ("text",)
    _input_embed_layer = "token_embedding"

    def __init__(self, config: HfViTConfig) -> None:
        """Builds a tower with fresh weights, by `config.text_config`."""
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
        """Hides padding, and of a causal tower what follows, in the form that the attention implementation takes."""
        given = {"config": self.config, "inputs_embeds": hidden_states, "attention_mask": attention_mask}
        if not output_attentions:
            if self.options.is_causal:
                return create_causal_mask(**given, past_key_values=None)
            return create_bidirectional_mask(**given)
        texts, length = hidden_states.shape[:2]
        seen = torch.ones(length, length, dtype=torch.bool, device=hidden_states.device)
        seen = (seen.tril() if self.options.is_causal else seen).expand(texts, 1, -1, -1)  # (T, 1, S, S)
        return seen if attention_mask is None else seen & attention_mask.bool()[:, None, None, :]


def without_pooler(encoder: PreTrainedModel) -> PreTrainedModel:
    """Takes off a text encoder what only its own summary needs; returns it."""
    if "pooler" in dict(encoder.named_children()):
        encoder.pooler = None
    return encoder


def build_text_tower(config: HfViTConfig, options: HfViTTextConfig) -> PreTrainedModel:
    """Returns a text tower with fresh weights.

    Raises:
        ValueError: if `encoder_config` is of no model of the library, or of one that writes texts too.
    """
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


class HfViTForZeroShotImageClassification(HfViTPreTrainedModel):
    """Says how alike images and texts are: it finds texts for images, images for texts, and classes by their names.

    It learns from pairs of an image and a text, with `return_loss=True`, by the loss of SigLIP
    (https://arxiv.org/abs/2303.15343) or CLIP (https://arxiv.org/abs/2103.00020).
    """

    input_modalities = ("image", "text")
    _no_split_modules: ClassVar[list[str]] = ["HfViTEmbeddings", "HfViTLayer", "HfViTContrastiveHead"]

    def __init__(self, config: HfViTConfig) -> None:
        """Builds a model with fresh weights."""
        super().__init__(config)
        self.text_options = HfViTTextConfig.of(config.text_config)
        self.options = HfViTContrastiveConfig.of(config.contrastive_config)
        self.model = HfViTModel(config)
        self.text_model = build_text_tower(config, self.text_options)
        own = self.text_options.encoder_config is None
        text_size = self.text_options.hidden_size if own else self.text_model.config.hidden_size
        self.contrastive_head = HfViTContrastiveHead(config, self.options, text_size)
        self.post_init()

    @classmethod
    def from_vision_text_pretrained(
        cls,
        vision_model_name_or_path: str | os.PathLike[str],
        text_model_name_or_path: str | os.PathLike[str],
        **kwargs: Any,
    ) -> Self:
        """Joins an image tower and a text encoder that have been trained apart; what compares them starts fresh.

        Args:
            vision_model_name_or_path: What `from_pretrained` opens.
            text_model_name_or_path: What `AutoModel` opens: a text encoder of the library.
            **kwargs: Arguments of `from_pretrained`; of `text_config` only `pooling` and `eos_token_id` make sense.

        Raises:
            ValueError: as `from_pretrained`.
            OSError: if one of them is not there.
        """
        encoder_config = AutoConfig.from_pretrained(text_model_name_or_path).to_diff_dict()
        kwargs["text_config"] = {**kwargs.get("text_config", {}), "encoder_config": encoder_config}
        model = cls.from_pretrained(vision_model_name_or_path, **kwargs)
        model.load_text_weights(text_model_name_or_path)
        return model

    def load_text_weights(self, name_or_path: str | os.PathLike[str]) -> None:
        """Gives the text tower the weights of a text encoder of the library whose configuration it has.

        Args:
            name_or_path: What `AutoModel` opens.

        Raises:
            OSError: if there is no such model.
        """
        trained = AutoModel.from_pretrained(name_or_path, dtype=self.dtype)
        self.text_model.load_state_dict(without_pooler(trained).state_dict())

    def freeze_vision(self) -> None:
        """Keeps the image tower as it is, so that only the text learns to fit it (https://arxiv.org/abs/2111.07991).

        Its projection, if there is one, still learns. Call it before the optimizer is built; it is not saved.
        """
        self.model.requires_grad_(False)

    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Returns the outputs of the image tower, of which `pooler_output` (B, E) is projected, of any length.

        Args:
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.
        """
        outputs = self.model(pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True, **kwargs)
        outputs.pooler_output = self.contrastive_head.image_projection(outputs.pooler_output)
        return outputs

    @can_return_tuple
    def get_text_features(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Returns the outputs of the text tower, of which `pooler_output` (T, E) is projected, of any length.

        Args:
            input_ids: (T, S) int64.
            attention_mask: (T, S), 0 where a token is padding.
            position_ids: (T, S) int64.
            token_type_ids: (T, S) int64, for text encoders of the library that take them.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Raises:
            ValueError: if there are no texts, or one is too long.
        """
        if input_ids is None:
            raise ValueError("input_ids is missing: pass the tokens of the texts that the tokenizer returns.")
        options = self.text_options
        if options.pad_token_id is not None:  # padding is seen
            missing = options.max_position_embeddings - input_ids.shape[1]
            input_ids, attention_mask = F.pad(input_ids, (0, max(missing, 0)), value=options.pad_token_id), None
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "token_type_ids": token_type_ids}
        given = {name: value for name, value in given.items() if value is not None}
        outputs = self.text_model(input_ids=input_ids, return_dict=True, **given, **kwargs)
        pooled = pool_tokens(
            outputs.last_hidden_state, input_ids, attention_mask, options.pooled_by, options.eos_token_id
        )
        return BaseModelOutputWithPooling(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=self.contrastive_head.text_projection(pooled),
            hidden_states=outputs.get("hidden_states"),
            attentions=outputs.get("attentions"),
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        return_loss: bool | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CLIPOutput:
        """Compares each image with each text.

        Args:
            input_ids: (T, S) int64.
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            attention_mask: (T, S), 0 where a token is padding.
            position_ids: (T, S) int64.
            token_type_ids: (T, S) int64, for text encoders of the library that take them.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            return_loss: Whether the texts belong to the images, one to each, and the loss is wanted.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            The library's output: `image_embeds` (B, E) and `text_embeds` (T, E) of length 1, `logits_per_image` (B, T)
            and `logits_per_text` (T, B), the outputs of both towers, and `loss`, see `contrastive_loss`. In training
            with a loss there are no logits, whose number grows with the square of the batch.

        Raises:
            ValueError: if an input does not fit the model, saying what would.
        """
        images = self.get_image_features(
            pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True, **kwargs
        )
        texts = self.get_text_features(
            input_ids, attention_mask, position_ids, token_type_ids, return_dict=True, **kwargs
        )
        image_embeds, text_embeds = (F.normalize(part.pooler_output, dim=-1) for part in (images, texts))
        head = self.contrastive_head
        loss = None
        if return_loss:
            loss = contrastive_loss(image_embeds, text_embeds, head.logit_scale, head.logit_bias)
        logits = None if self.training and return_loss else head(image_embeds, text_embeds)  # (B, T)
        return CLIPOutput(
            loss=loss,
            logits_per_image=logits,
            logits_per_text=None if logits is None else logits.T,
            text_embeds=text_embeds,
            image_embeds=image_embeds,
            text_model_output=texts,
            vision_model_output=images,
        )
