"""Image-text models: text tower, image-text comparison, losses over the batch of all processes, model and pipeline.

Shapes: B images or texts of a process, N of all processes, b rows of a chunk, T texts, S tokens of a text,
C channels, H W pixels, h w patch grid, D hidden size, E embedding size.
"""

import os
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    BatchFeature,
    Pipeline,
    PreTrainedModel,
    ZeroShotImageClassificationPipeline,
)
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.output_capturing import capture_outputs, maybe_install_capturing_hooks

from .configuration_hf_vit import HfViTConfig
from .encoder import HfViTEncoder, make_norm, share_attention_implementation
from .layers import HfViTInitialized
from .modeling_hf_vit import HfViTModel, select_hidden_states
from .pipeline_hf_vit import BatchedImagePipeline, ModelInput
from .pretrained import HfViTPreTrainedModel
from .remote_code import raising_remote_code_error
from .shared import gather_rows, in_float32, sum_over_processes
from .task_configurations import HfViTContrastiveConfig, HfViTTextConfig


logger = logging.get_logger(__name__)
# Options of the text tower that configure its transformer blocks.
BLOCK_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "hidden_act", "layer_norm_eps"),
)
INITIAL_BIAS = -10.0  # low initial logits for the "sigmoid" loss, because most pairs do not match
# Maximum number of logits that the loss keeps in memory at once, 16 MiB in float32
MAX_LOGITS = 2**22


def pool_tokens(
    hidden_states: Tensor, input_ids: Tensor, attention_mask: Tensor | None, options: HfViTTextConfig
) -> Tensor:
    """Pools tokens (T, S, D) to one vector per text, (T, D), according to `HfViTTextConfig.pooling`."""
    # `input_ids` and `attention_mask` are (T, S). The mask is 0 for padding, or None if there is no padding.
    attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    pooling = options.effective_pooling
    if pooling == "first":
        return hidden_states[:, 0]
    if pooling == "mean":
        shown = attention_mask.to(hidden_states.dtype)[..., None]  # (B, S, 1)
        return (hidden_states * shown).sum(dim=1) / shown.sum(dim=1).clamp_min(1)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    index = (positions * attention_mask).argmax(dim=1)  # (B,)
    if pooling == "eos":
        assert options.eos_token_id is not None  # checked by `HfViTTextConfig`
        is_end = input_ids == options.eos_token_id
        index = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1), index)
    return hidden_states[torch.arange(index.shape[0], device=index.device), index]


class HfViTTextModel(HfViTPreTrainedModel):
    """A small text transformer with learned positions and the same type of blocks as the image tower."""

    main_input_name = "input_ids"
    input_modalities = ("text",)
    _input_embed_layer = "token_embedding"

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        self.options = HfViTTextConfig.of(config.text_config)
        options = {name: vars(self.options)[name] for name in BLOCK_FIELDS}
        own = HfViTConfig(**options, hidden_dropout_prob=config.hidden_dropout_prob)
        self.token_embedding = nn.Embedding(self.options.vocab_size, own.hidden_size)
        self.position_embedding = nn.Embedding(self.options.max_position_embeddings, own.hidden_size)
        self.encoder = HfViTEncoder(own)
        share_attention_implementation(config, self.encoder, self.options.is_causal)
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
        """Runs the text tower.

        Args:
            input_ids: Token ids (T, S) int64.
            attention_mask: (T, S), 0 for padding tokens.
            position_ids: (T, S) int64, by default 0, 1, 2, …
            token_type_ids: Accepted because some tokenizers return them; they have no effect.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `last_hidden_state` (T, S, D) after the final norm; if requested, `hidden_states` and `attentions`.

        Raises:
            ValueError: if a text is longer than `max_position_embeddings`.
        """
        length, longest = input_ids.shape[1], self.options.max_position_embeddings
        if length > longest:
            raise ValueError(f"The texts have {length} tokens, but max_position_embeddings={longest}. Truncate them.")
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
        """Returns the padding mask, causal if configured, in the format of the attention implementation."""
        given = (self.config, hidden_states, attention_mask)
        if not output_attentions:
            # Pass the cache (None) by position, because its argument name depends on the version of transformers.
            return create_causal_mask(*given, None) if self.options.is_causal else create_bidirectional_mask(*given)
        texts, length = hidden_states.shape[:2]
        seen = torch.ones(length, length, dtype=torch.bool, device=hidden_states.device)
        seen = (seen.tril() if self.options.is_causal else seen).expand(texts, 1, -1, -1)  # (T, 1, S, S)
        return seen if attention_mask is None else seen & attention_mask.bool()[:, None, None, :]


def without_pooler(encoder: PreTrainedModel) -> PreTrainedModel:
    """Removes the pooler of a text encoder and returns the encoder."""
    if "pooler" in dict(encoder.named_children()):
        encoder.pooler = None
    return encoder


def build_text_tower(config: HfViTConfig, options: HfViTTextConfig) -> PreTrainedModel:
    """Builds a text tower with new weights; raises `ValueError` if `encoder_config` is not a text encoder."""
    if options.encoder_config is None:
        return HfViTTextModel(config)
    # A dtype in `encoder_config` is ignored: the text tower gets the dtype of the whole model.
    fields = {name: value for name, value in options.encoder_config.items() if name != "dtype"}
    encoder_config = AutoConfig.for_model(**fields)
    if encoder_config.is_encoder_decoder:
        raise ValueError(f"encoder_config has model_type {encoder_config.model_type!r}, which is not encoder-only.")
    chosen = config._attn_implementation  # SDPA, the default, is omitted, because some encoders do not support it
    given = {} if chosen in (None, "sdpa") else {"attn_implementation": chosen}
    return without_pooler(AutoModel.from_config(encoder_config, **given))


class HfViTContrastiveHead(HfViTInitialized):
    """Projects pooled images and texts to the same width and computes their similarity."""

    def __init__(self, config: HfViTConfig, options: HfViTContrastiveConfig, text_size: int) -> None:
        super().__init__()
        self.options = options
        size = options.projection_dim
        self.image_projection = nn.Identity() if size is None else nn.Linear(config.pooled_size, size, bias=False)
        self.text_projection = nn.Linear(text_size, size or config.pooled_size, bias=size is None)
        # Scale and bias have one dimension, because FSDP2 does not support zero-dimensional parameters.
        self.logit_scale = nn.Parameter(torch.full((1,), options.initial_scale))
        has_bias = options.loss == "sigmoid"
        self.logit_bias = nn.Parameter(torch.full((1,), INITIAL_BIAS)) if has_bias else None

    def initialize(self, std: float) -> None:
        """Sets the initial scale and bias of the logits."""
        init.constant_(self.logit_scale, self.options.initial_scale)
        if self.logit_bias is not None:
            init.constant_(self.logit_bias, INITIAL_BIAS)

    def forward(self, image_embeds: Tensor, text_embeds: Tensor) -> Tensor:
        """Compares images (B, E) with texts (T, E), both normalized to length 1, and returns the logits (B, T)."""
        logits = image_embeds @ text_embeds.T * self.logit_scale.exp()
        return logits if self.logit_bias is None else logits + self.logit_bias


@in_float32
def contrastive_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    max_logits: int = MAX_LOGITS,
    is_local: bool = False,
) -> Tensor:
    """Returns the contrastive loss of unit-length image and text embeddings (B, E), over pairs of all processes.

    With a bias, this is the loss of SigLIP (https://arxiv.org/abs/2303.15343): the binary cross-entropy of each of the
    N·N pairs, summed and divided by N. Without a bias, it is that of CLIP (https://arxiv.org/abs/2103.00020): the mean
    of the cross-entropies of images over all texts and of texts over all images. `logit_scale` (1,) is the logarithm
    of the scale; `logit_bias` is (1,).

    Every process must call this function with at least one pair; otherwise `ValueError` is raised. All processes get
    the same loss, and after DDP averages the gradients, they equal those of one process with all pairs. Logits are
    computed in chunks of rows, and again in the backward pass, so that at most `max_logits`, or one row, are in
    memory at once. With `is_local`, only the pairs of this process are compared.
    """
    if image_embeds.shape != text_embeds.shape:
        raise ValueError(
            f"The loss needs a text for each image, but there are {len(image_embeds)} images and {len(text_embeds)} "
            "texts. Pass equal numbers, or leave return_loss out."
        )
    images, texts = image_embeds, text_embeds.to(image_embeds.dtype)
    everything = ((images, texts), [len(images)], 0) if is_local else gather_rows(images, texts)
    (all_images, all_texts), shares, start = everything
    if min(shares) == 0:
        raise ValueError(f"The processes have {shares} pairs of image and text. Each process needs at least one.")
    scale = logit_scale.to(images.dtype).exp()
    partners = torch.arange(start, start + len(images), device=images.device)

    def sum_over_rows(loss_of: Callable[..., Tensor], own: Tensor, others: Tensor, *args: Tensor) -> Tensor:
        # Rows are processed in chunks with checkpointing, so that no logits are stored for the backward pass.
        size = max(1, max_logits // len(others))
        parts = [
            checkpoint(loss_of, rows, others, index, *args, use_reentrant=False, preserve_rng_state=False)
            for rows, index in zip((own * scale).split(size), partners.split(size), strict=True)
        ]
        return torch.stack(parts).sum()

    if logit_bias is None:
        total = (
            sum_over_rows(sum_softmax_losses, images, all_texts) + sum_over_rows(sum_softmax_losses, texts, all_images)
        ) / 2
    else:
        total = sum_over_rows(sum_sigmoid_losses, images, all_texts, logit_bias.to(images.dtype))
    return (total if is_local else sum_over_processes(total)) / sum(shares)


def sum_softmax_losses(own: Tensor, others: Tensor, partners: Tensor) -> Tensor:
    """Returns the summed cross-entropy of rows (b, E) over `others` (N, E); `partners` (b,) are target indices."""
    return F.cross_entropy(own @ others.T, partners, reduction="sum")


def sum_sigmoid_losses(own: Tensor, others: Tensor, partners: Tensor, bias: Tensor) -> Tensor:
    """Returns the summed binary cross-entropy of all pairs of `own` (b, E) and `others` (N, E)."""
    logits = own @ others.T + bias  # (b, N)
    signs = torch.full_like(logits, -1).scatter_(1, partners[:, None], 1)
    return -F.logsigmoid(signs * logits).sum()


class HfViTForZeroShotImageClassification(HfViTPreTrainedModel):
    """Compares images with texts, for retrieval and for classification by class names.

    With `return_loss=True`, it is trained on image-text pairs with the loss of SigLIP
    (https://arxiv.org/abs/2303.15343) or CLIP (https://arxiv.org/abs/2103.00020).
    """

    input_modalities = ("image", "text")
    _no_split_modules: ClassVar[list[str]] = ["HfViTEmbeddings", "HfViTLayer", "HfViTContrastiveHead"]

    def __init__(self, config: HfViTConfig) -> None:
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
        """Combines a pretrained image tower and a pretrained text encoder; the projections are newly initialized.

        Args:
            vision_model_name_or_path: Name or path for `from_pretrained`.
            text_model_name_or_path: Name or path of a text encoder of transformers, for `AutoModel`.
            **kwargs: Arguments of `from_pretrained`; in `text_config`, only `pooling` and `eos_token_id` are used.

        Raises:
            ValueError: for the reasons listed in `from_pretrained`, or if the text encoder needs custom code.
            OSError: if one of the two models does not exist.
        """
        with raising_remote_code_error(text_model_name_or_path, "Use a text encoder of transformers."):
            text_config = AutoConfig.from_pretrained(text_model_name_or_path, trust_remote_code=False)
        encoder_config = text_config.to_diff_dict()
        kwargs["text_config"] = {**kwargs.get("text_config", {}), "encoder_config": encoder_config}
        model = cls.from_pretrained(vision_model_name_or_path, **kwargs)
        model.load_text_weights(text_model_name_or_path)
        return model

    def load_text_weights(self, name_or_path: str | os.PathLike[str]) -> None:
        """Loads the weights of a text encoder of transformers into a text tower with the same configuration.

        Args:
            name_or_path: Name or path for `AutoModel`.

        Raises:
            OSError: if the model does not exist.
            ValueError: if the model needs custom code.
        """
        with raising_remote_code_error(name_or_path, "Use a text encoder of transformers."):
            trained = AutoModel.from_pretrained(name_or_path, dtype=self.dtype, trust_remote_code=False)
        self.text_model.load_state_dict(without_pooler(trained).state_dict())

    def freeze_vision(self) -> None:
        """Freezes the image tower, so that only the text tower is trained (LiT, https://arxiv.org/abs/2111.07991).

        The image projection, if there is one, is still trained. Call this method before the optimizer is built.
        Checkpoints do not store whether the image tower is frozen.
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
        """Returns the output of the image tower with `pooler_output` (B, E) projected but not normalized.

        Args:
            pixel_values: Images (B, C, H, W), H and W multiples of the patch size.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.
        """
        outputs = self.run_backbone(pixel_values, patch_attention_mask=patch_attention_mask, **kwargs)
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
        """Returns the output of the text tower with `pooler_output` (T, E) projected but not normalized.

        Args:
            input_ids: Token ids (T, S) int64.
            attention_mask: (T, S), 0 for padding tokens.
            position_ids: (T, S) int64.
            token_type_ids: (T, S) int64, for text encoders of transformers that accept them.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Raises:
            ValueError: if `input_ids` is None.
        """
        if input_ids is None:
            raise ValueError("input_ids is missing: pass the tokens of the texts that the tokenizer returns.")
        options = self.text_options
        input_ids, attention_mask = self.truncate_texts(input_ids, attention_mask)
        others = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        given = {name: ids[:, : input_ids.shape[1]] for name, ids in others.items() if ids is not None}
        if options.pad_token_id is not None:  # as in SigLIP, texts are padded and padding is not masked
            missing: Any = torch.sym_max(options.max_position_embeddings - input_ids.shape[1], 0)
            input_ids, attention_mask = F.pad(input_ids, (0, missing), value=options.pad_token_id), None
        if attention_mask is not None:
            given["attention_mask"] = attention_mask
        # Select hidden states here: transformers would assume that the text tower has as many blocks as the encoder.
        requested_hidden_states = self.requested_hidden_states(kwargs.pop("output_hidden_states", None))
        kwargs.update(output_hidden_states=bool(requested_hidden_states), return_dict=True)
        outputs = self.text_model(input_ids=input_ids, **given, **kwargs)
        pooled = pool_tokens(outputs.last_hidden_state, input_ids, attention_mask, options)
        return BaseModelOutputWithPooling(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=self.contrastive_head.text_projection(pooled),
            hidden_states=select_hidden_states(outputs.get("hidden_states", ()), requested_hidden_states),
            attentions=outputs.get("attentions"),
        )

    def truncate_texts(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Truncates token ids and attention mask (T, S), with a warning, to the maximum length of the text tower."""
        # The zero-shot pipeline of transformers does not truncate texts and has no option to do so.
        own = self.text_options.encoder_config is None
        limits = vars(self.text_options if own else self.text_model.config)
        length, longest = input_ids.shape[1], limits.get("max_position_embeddings")
        if longest is None or length <= longest:
            return input_ids, attention_mask
        if attention_mask is not None and not bool(attention_mask[:, 0].bool().all()):
            return input_ids, attention_mask  # the text tower raises an error for long texts with padding on the left
        logger.warning_once(
            f"Texts have up to {length} tokens, but the model reads only the first {longest}. The rest is cut off, as "
            f"with tokenizer(texts, truncation=True, max_length={longest})."
        )
        kept = input_ids[:, :longest]
        if self.text_options.effective_pooling == "eos":  # truncated texts also need an end token
            end = self.text_options.eos_token_id
            assert end is not None  # checked by `HfViTTextConfig`
            is_open = (kept != end).all(dim=1, keepdim=True)  # (T, 1)
            if attention_mask is not None:
                is_open = is_open & attention_mask[:, longest:].bool().any(dim=1, keepdim=True)
            kept = torch.cat((kept[:, :-1], kept[:, -1:].masked_fill(is_open, end)), dim=1)
        return kept, None if attention_mask is None else attention_mask[:, :longest]

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
        encoder_outputs: BaseModelOutputWithPooling | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CLIPOutput:
        """Compares each image with each text.

        Args:
            input_ids: Token ids (T, S) int64.
            pixel_values: Images (B, C, H, W), H and W multiples of the patch size.
            attention_mask: (T, S), 0 for padding tokens.
            position_ids: (T, S) int64.
            token_type_ids: (T, S) int64, for text encoders of transformers that accept them.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            return_loss: Whether to compute the loss; there must be one text per image.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            encoder_outputs: Outputs of the image tower for the same images, see `run_backbone`.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            A `CLIPOutput` with `image_embeds` (B, E) and `text_embeds` (T, E) of length 1, `logits_per_image` (B, T)
            and `logits_per_text` (T, B), the outputs of both towers, and `loss`, see `contrastive_loss`. In training
            mode with a loss, logits are omitted, because their number grows with the square of the batch size.

        Raises:
            ValueError: if an input does not fit the model; the message names valid values.
        """
        kwargs["return_dict"] = True
        given: Any = {"patch_attention_mask": patch_attention_mask, "encoder_outputs": encoder_outputs}
        images = self.get_image_features(pixel_values, **given, **kwargs)
        texts = self.get_text_features(input_ids, attention_mask, position_ids, token_type_ids, **kwargs)
        image_embeds, text_embeds = (F.normalize(part.pooler_output, dim=-1) for part in (images, texts))
        head = self.contrastive_head
        loss = None
        if return_loss:
            loss = contrastive_loss(image_embeds, text_embeds, head.logit_scale, head.logit_bias)
        logits = None if self.training and return_loss else self.calibrated(head(image_embeds, text_embeds))  # (B, T)
        return CLIPOutput(
            loss=loss,
            logits_per_image=logits,
            logits_per_text=None if logits is None else logits.T,
            text_embeds=text_embeds,
            image_embeds=image_embeds,
            text_model_output=texts,
            vision_model_output=images,
        )


class HfViTZeroShotImageClassificationPipeline(BatchedImagePipeline, ZeroShotImageClassificationPipeline):
    """Zero-shot image classification pipeline with batched image processing; see `BatchedImagePipeline`.

    The candidate labels of a call are encoded only once.
    """

    stock: ClassVar[type[Pipeline] | None] = ZeroShotImageClassificationPipeline

    def call_arguments(self, preprocess: dict[str, Any], forward: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Splits the arguments of a call into options of the image processor, the pipeline and `run_model`."""
        labels = preprocess.pop("candidate_labels")
        template = preprocess.pop("hypothesis_template", "This is a photo of {}.")
        if isinstance(labels, str) or len(labels) == 0:
            raise ValueError(f"candidate_labels={labels!r} must be a list of at least one label.")
        texts = self.tokenizer([template.format(label) for label in labels], return_tensors="pt", padding=True)
        forward = {"texts": texts.to(self.device), "candidate_labels": list(labels)}
        if self.fast_model is None:
            with self.device_placement(), self.get_inference_context()():
                features = self.model.get_text_features(**texts).pooler_output  # (T, E)
            forward["text_features"] = F.normalize(features, dim=-1)
        return self.image_processor.call_options(), preprocess, forward

    def run_model(
        self, inputs: BatchFeature, texts: Any, candidate_labels: list[str], text_features: Tensor | None = None
    ) -> dict[str, Any]:
        """Returns the logits (B, T) of all images and labels."""
        if text_features is None:
            logits = self.fast_model(**texts, **inputs).logits_per_image
        else:
            images = F.normalize(self.model.get_image_features(**inputs).pooler_output, dim=-1)  # (B, E)
            logits = self.model.calibrated(self.model.contrastive_head(images, text_features))
        return {"logits": logits, "candidate_labels": candidate_labels}

    def decode(self, outputs: Any, parts: list[ModelInput]) -> list[list[dict[str, Any]]]:
        """Returns the labels of each image with their scores, in descending order of score."""
        found = outputs["logits"].float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        return [
            [{"score": score, "label": outputs["candidate_labels"][label]} for score, label in zip(*pair, strict=True)]
            for pair in zip(found.values.tolist(), found.indices.tolist(), strict=True)
        ]
