"""Image-text models: text tower, comparison with images, losses over the batch of all processes, model and pipeline.

Shapes: B images or texts of a process, N of all processes, b those of some rows, T texts, S tokens of a text, C
channels, H W pixels, h w patch grid, D hidden size, E width of the compared vectors.
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
from .encoder import HfViTEncoder, make_norm, use_attention_of
from .layers import HfViTInitialized
from .modeling_hf_vit import HfViTModel, keep_states
from .pipeline_hf_vit import BatchedImagePipeline, Part
from .pretrained import HfViTPreTrainedModel
from .remote_code import refusing_code
from .shared import gather_rows, in_float32, sum_over_processes
from .task_configurations import HfViTContrastiveConfig, HfViTTextConfig


logger = logging.get_logger(__name__)
# Options of the tower that are those of its blocks
BLOCK_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "hidden_act", "layer_norm_eps"),
)
INITIAL_BIAS = -10.0  # of the logits of "sigmoid": most pairs are wrong
# How many logits of a loss are there at once: 16 MiB in float32
MAX_LOGITS = 2**22


def pool_tokens(
    hidden_states: Tensor, input_ids: Tensor, attention_mask: Tensor | None, options: HfViTTextConfig
) -> Tensor:
    """Pools tokens (T, S, D) to one vector per text, (T, D), as `HfViTTextConfig.pooling` says."""
    # Ids and mask are (T, S), the latter 1 where a token is text; None if all are.
    attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    pooling = options.pooled_by
    if pooling == "first":
        return hidden_states[:, 0]
    if pooling == "mean":
        shown = attention_mask.to(hidden_states.dtype)[..., None]  # (B, S, 1)
        return (hidden_states * shown).sum(dim=1) / shown.sum(dim=1).clamp_min(1)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    index = (positions * attention_mask).argmax(dim=1)  # (B,)
    if pooling == "eos":
        assert options.eos_token_id is not None  # refused by the configuration
        is_end = input_ids == options.eos_token_id
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
        options = {name: vars(self.options)[name] for name in BLOCK_FIELDS}
        own = HfViTConfig(**options, hidden_dropout_prob=config.hidden_dropout_prob)
        self.token_embedding = nn.Embedding(self.options.vocab_size, own.hidden_size)
        self.position_embedding = nn.Embedding(self.options.max_position_embeddings, own.hidden_size)
        self.encoder = HfViTEncoder(own)
        use_attention_of(config, self.encoder, self.options.is_causal)
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


class HfViTContrastiveHead(HfViTInitialized):
    """Projects pooled images and texts to one width, and compares them."""

    def __init__(self, config: HfViTConfig, options: HfViTContrastiveConfig, text_size: int) -> None:
        super().__init__()
        self.options = options
        size = options.projection_dim
        self.image_projection = nn.Identity() if size is None else nn.Linear(config.pooled_size, size, bias=False)
        self.text_projection = nn.Linear(text_size, size or config.pooled_size, bias=size is None)
        # Of one dimension: FSDP2 takes no parameter without.
        self.logit_scale = nn.Parameter(torch.full((1,), options.initial_scale))
        has_bias = options.loss == "sigmoid"
        self.logit_bias = nn.Parameter(torch.full((1,), INITIAL_BIAS)) if has_bias else None

    def initialize(self, std: float) -> None:
        """Sets the initial scale and bias of the comparison."""
        init.constant_(self.logit_scale, self.options.initial_scale)
        if self.logit_bias is not None:
            init.constant_(self.logit_bias, INITIAL_BIAS)

    def forward(self, image_embeds: Tensor, text_embeds: Tensor) -> Tensor:
        """Compares each image (B, E) with each text (B', E), both of length 1; returns the logits (B, B')."""
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
    """Return the loss of the similarities of images and texts, (B, E) of length 1, over the pairs of all processes.

    With a bias it is the loss of SigLIP (https://arxiv.org/abs/2303.15343): the cross-entropy of each of the N·N
    pairs, summed and divided by N. Without, it is that of CLIP (https://arxiv.org/abs/2103.00020): the mean
    cross-entropy of the text of an image among all texts, and of the image of a text among all images. Scale, a
    logarithm, and bias are (1,).

    It is the same on all processes, which must all call it, with one pair at least, else `ValueError`. DDP, which
    takes the mean of gradients over the processes, then has those of one process with all pairs. At no time are there
    more logits than `max_logits`, or those of one row: they are computed in rows, and once more in the backward pass.
    With `is_local`, the loss is that of the pairs of this process alone.
    """
    if image_embeds.shape != text_embeds.shape:
        raise ValueError(
            f"The loss needs a text for each image, but there are {len(image_embeds)} images and {len(text_embeds)} "
            "texts. Give as many, or leave return_loss out."
        )
    images, texts = image_embeds, text_embeds.to(image_embeds.dtype)
    everything = ((images, texts), [len(images)], 0) if is_local else gather_rows(images, texts)
    (all_images, all_texts), shares, start = everything
    if min(shares) == 0:
        raise ValueError(f"The processes have {shares} pairs of image and text. Give each of them one at least.")
    scale = logit_scale.to(images.dtype).exp()
    partners = torch.arange(start, start + len(images), device=images.device)

    def sum_over_rows(loss_of: Callable[..., Tensor], own: Tensor, others: Tensor, *args: Tensor) -> Tensor:
        # A few rows at a time, of which nothing is kept for the backward pass.
        size = max(1, max_logits // len(others))
        parts = [
            checkpoint(loss_of, rows, others, index, *args, use_reentrant=False, preserve_rng_state=False)
            for rows, index in zip((own * scale).split(size), partners.split(size), strict=True)
        ]
        return torch.stack(parts).sum()

    if logit_bias is None:
        total = (sum_over_rows(softmax_rows, images, all_texts) + sum_over_rows(softmax_rows, texts, all_images)) / 2
    else:
        total = sum_over_rows(sigmoid_rows, images, all_texts, logit_bias.to(images.dtype))
    return (total if is_local else sum_over_processes(total)) / sum(shares)


def softmax_rows(own: Tensor, others: Tensor, partners: Tensor) -> Tensor:
    """Returns the sum over rows (b, E) of the cross-entropy of their partner, a number (b,), among others (N, E)."""
    return F.cross_entropy(own @ others.T, partners, reduction="sum")


def sigmoid_rows(own: Tensor, others: Tensor, partners: Tensor, bias: Tensor) -> Tensor:
    """Returns the cross-entropy of all pairs of rows (b, E) and others (N, E), summed; `partners` (b,) match."""
    logits = own @ others.T + bias  # (b, N)
    signs = torch.full_like(logits, -1).scatter_(1, partners[:, None], 1)
    return -F.logsigmoid(signs * logits).sum()


class HfViTForZeroShotImageClassification(HfViTPreTrainedModel):
    """Compares images with texts: it finds texts for images, images for texts, and classes by their names.

    It trains on pairs of an image and a text, with `return_loss=True`, by the loss of SigLIP
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
        """Joins an image tower and a text encoder that have been trained apart; the comparison is initialized afresh.

        Args:
            vision_model_name_or_path: What `from_pretrained` opens.
            text_model_name_or_path: What `AutoModel` opens: a text encoder of the library.
            **kwargs: Arguments of `from_pretrained`; of `text_config` only `pooling` and `eos_token_id` make sense.

        Raises:
            ValueError: as `from_pretrained`, or if the text encoder brings code of its own.
            OSError: if one of them is not there.
        """
        with refusing_code(text_model_name_or_path, "Give a text encoder of the library."):
            text_config = AutoConfig.from_pretrained(text_model_name_or_path, trust_remote_code=False)
        encoder_config = text_config.to_diff_dict()
        kwargs["text_config"] = {**kwargs.get("text_config", {}), "encoder_config": encoder_config}
        model = cls.from_pretrained(vision_model_name_or_path, **kwargs)
        model.load_text_weights(text_model_name_or_path)
        return model

    def load_text_weights(self, name_or_path: str | os.PathLike[str]) -> None:
        """Loads the weights of a text encoder of the library, which has the same configuration, into the text tower.

        Args:
            name_or_path: What `AutoModel` opens.

        Raises:
            OSError: if there is no such model.
            ValueError: if it brings code of its own.
        """
        with refusing_code(name_or_path, "Give a text encoder of the library."):
            trained = AutoModel.from_pretrained(name_or_path, dtype=self.dtype, trust_remote_code=False)
        self.text_model.load_state_dict(without_pooler(trained).state_dict())

    def freeze_vision(self) -> None:
        """Freezes the image tower, so that only the text is trained to fit it (https://arxiv.org/abs/2111.07991).

        Its projection, if there is one, still trains. Call it before the optimizer is built; it is not saved.
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
            ValueError: if there are no texts.
        """
        if input_ids is None:
            raise ValueError("input_ids is missing: pass the tokens of the texts that the tokenizer returns.")
        options = self.text_options
        input_ids, attention_mask = self.cut_texts(input_ids, attention_mask)
        others = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        given = {name: ids[:, : input_ids.shape[1]] for name, ids in others.items() if ids is not None}
        if options.pad_token_id is not None:  # padding is attended to
            missing: Any = torch.sym_max(options.max_position_embeddings - input_ids.shape[1], 0)
            input_ids, attention_mask = F.pad(input_ids, (0, missing), value=options.pad_token_id), None
        if attention_mask is not None:
            given["attention_mask"] = attention_mask
        # The library would count the states from the end of the image tower's.
        wants_states = self.wants_states(kwargs.pop("output_hidden_states", None))
        kwargs.update(output_hidden_states=bool(wants_states), return_dict=True)
        outputs = self.text_model(input_ids=input_ids, **given, **kwargs)
        pooled = pool_tokens(outputs.last_hidden_state, input_ids, attention_mask, options)
        return BaseModelOutputWithPooling(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=self.contrastive_head.text_projection(pooled),
            hidden_states=keep_states(outputs.get("hidden_states", ()), wants_states),
            attentions=outputs.get("attentions"),
        )

    def cut_texts(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns tokens and their mask (T, S) cut off, with a warning, where there are more than the tower reads."""
        # The stock pipeline does not truncate texts and takes no option that would.
        own = self.text_options.encoder_config is None
        limits = vars(self.text_options if own else self.text_model.config)
        length, longest = input_ids.shape[1], limits.get("max_position_embeddings")
        if longest is None or length <= longest:
            return input_ids, attention_mask
        if attention_mask is not None and not bool(attention_mask[:, 0].bool().all()):
            return input_ids, attention_mask  # the tower refuses texts that are padded on the left
        logger.warning_once(
            f"Texts have up to {length} tokens, of which the model reads the first {longest}: the rest is cut off, as "
            f"tokenizer(texts, truncation=True, max_length={longest}) does."
        )
        kept = input_ids[:, :longest]
        if self.text_options.pooled_by == "eos":  # a text that is cut ends as well
            end = self.text_options.eos_token_id
            assert end is not None  # refused by the configuration
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
        kwargs["return_dict"] = True
        images = self.get_image_features(pixel_values, patch_attention_mask=patch_attention_mask, **kwargs)
        texts = self.get_text_features(input_ids, attention_mask, position_ids, token_type_ids, **kwargs)
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


class HfViTZeroShotImageClassificationPipeline(BatchedImagePipeline, ZeroShotImageClassificationPipeline):
    """The stock pipeline of labels in words in batches, which reads the texts of a call once.

    See `BatchedImagePipeline`.
    """

    stock: ClassVar[type[Pipeline] | None] = ZeroShotImageClassificationPipeline

    def begin_call(self, preprocess: dict[str, Any], forward: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Returns the options of the image processor and of the pipeline, and the features of the labels."""
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
        """Returns how well each image fits each label, (B, T)."""
        if text_features is None:
            logits = self.fast_model(**texts, **inputs).logits_per_image
        else:
            images = F.normalize(self.model.get_image_features(**inputs).pooler_output, dim=-1)  # (B, E)
            logits = self.model.contrastive_head(images, text_features)
        return {"logits": logits, "candidate_labels": candidate_labels}

    def decode(self, outputs: Any, parts: list[Part]) -> list[list[dict[str, Any]]]:
        """Returns the labels of each image, the likeliest first."""
        found = outputs["logits"].float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        return [
            [{"score": score, "label": outputs["candidate_labels"][label]} for score, label in zip(*pair, strict=True)]
            for pair in zip(found.values.tolist(), found.indices.tolist(), strict=True)
        ]
