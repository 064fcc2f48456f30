"""Image captioning: text decoder with attention to image tokens, loss, generation and pipeline.

Shapes: B images, T texts (the same number for each image, in the order of the images), S tokens of a text,
V tokens of the vocabulary, C channels, H W pixels, h w patch grid, L image tokens, E width and K blocks of the
decoder.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, ImageTextToTextPipeline
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .configuration_hf_vit import HfViTConfig
from .encoder import HfViTEncoder, make_dropout, make_norm, share_attention_implementation
from .modeling_hf_vit import HfViTModel
from .pretrained import HfViTPreTrainedModel, check_trained
from .shared import count_processes, sum_over_processes, to_float32_or_higher
from .task_configurations import HfViTCaptionConfig


IGNORED_TOKEN = -100  # label of tokens that are excluded from the loss, as in transformers
GENERATION = {"num_beams": 3, "no_repeat_ngram_size": 3, "use_cache": False}  # arguments of `generate`


class HfViTCrossAttention(nn.Module):
    """Pre-norm cross-attention, in which the tokens of a text attend to the tokens of the image that it describes."""

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.norm = make_norm(config, config.hidden_size)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = make_dropout(config)

    def forward(self, hidden_states: Tensor, key_value: Tensor, mask: Tensor | None) -> Tensor:
        """Maps tokens (T, S, E), given keys and values (B, L, 2·E) and a mask (B, 1, 1, L) bool, to (T, S, E)."""
        # Join all texts of an image to one sequence of queries, so that keys and values of the image are not repeated.
        query = self.query(self.norm(hidden_states)).reshape(len(key_value), -1, hidden_states.shape[-1])
        query, key, value = (
            states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for states in (query, *key_value.chunk(2, -1))
        )
        # SDPA is always used: with few queries, the choice of attention implementation does not affect speed.
        attended = F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)
        return self.dropout(self.projection(attended.reshape(hidden_states.shape)))


class HfViTCaptionDecoder(nn.Module):
    """Text decoder that predicts the next token. Before each block, texts attend to their image."""

    def __init__(self, config: HfViTConfig, options: HfViTCaptionConfig) -> None:
        super().__init__()
        self.config, self.options = config, options
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        own = HfViTConfig(**{name: vars(options)[name] for name in names}, hidden_dropout_prob=options.dropout)
        self.token_embedding = nn.Embedding(options.vocab_size, own.hidden_size)
        self.position_embedding = nn.Embedding(options.max_position_embeddings, own.hidden_size)
        self.cross_attentions = nn.ModuleList(HfViTCrossAttention(own) for _ in range(own.num_hidden_layers))
        self.blocks = HfViTEncoder(own)
        share_attention_implementation(config, self.blocks, is_causal=True)
        self.norm = make_norm(own, own.hidden_size)

    def forward(
        self, input_ids: Tensor, image_states: Tensor, attention_mask: Tensor | None, image_mask: Tensor | None
    ) -> Tensor:
        """Returns logits (T, S, V) of the next tokens, given keys and values (B, L, 2·K·E) of image tokens."""
        shown = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        # Position numbers skip padding on the left of prompts. All tokens beyond the last position use the last
        # position.
        positions = (shown.cumsum(dim=1) - 1).clamp(0, self.options.max_position_embeddings - 1)
        hidden_states = self.token_embedding(input_ids) + self.position_embedding(positions)  # (T, S, E)
        # Pass the cache (None) by position, because its argument name depends on the version of transformers.
        mask = create_causal_mask(self.config, hidden_states, attention_mask, None)
        states = image_states.chunk(len(self.cross_attentions), dim=-1)
        for number, (attend, key_value) in enumerate(zip(self.cross_attentions, states, strict=True)):
            hidden_states = hidden_states + attend(hidden_states, key_value, image_mask)
            hidden_states = self.blocks(hidden_states, attention_mask=mask, start=number, stop=number + 1)
        return F.linear(self.norm(hidden_states), self.token_embedding.weight)


def token_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Returns the cross-entropy (T, S - 1) of labels (T, S), given logits (T, S, V); 0 for `IGNORED_TOKEN`."""
    logits, ignored = to_float32_or_higher(logits[:, :-1]).transpose(1, 2), IGNORED_TOKEN  # (T, V, S - 1)
    return F.cross_entropy(logits, labels[:, 1:], None, None, ignored, None, "none", label_smoothing)


class HfViTForImageTextToText(HfViTPreTrainedModel, GenerationMixin):
    """Image captioning model, whose text decoder attends to the tokens of the image encoder by cross-attention.

    `generate` encodes the images only once. It continues a prompt or, without a prompt, describes the image.

    Source: https://arxiv.org/abs/1411.4555, with the decoder of https://arxiv.org/abs/1706.03762.
    """

    main_input_name = "input_ids"  # `generate` appends tokens to this input.
    input_modalities = ("image", "text")
    _no_split_modules: ClassVar[list[str]] = ["HfViTEmbeddings", "HfViTLayer", "HfViTCaptionDecoder"]

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        self.options = options = HfViTCaptionConfig.of(config.caption_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        connector = nn.Linear(config.hidden_size, 2 * options.num_hidden_layers * options.hidden_size)
        self.caption_head = nn.ModuleDict({"connector": connector, "decoder": HfViTCaptionDecoder(config, options)})
        tokens = {name: vars(options)[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        self.generation_config = GenerationConfig(
            **{**tokens, **GENERATION}, max_new_tokens=options.max_position_embeddings - 1
        )
        self.post_init()

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """Loads the options of `generate` from a checkpoint; encoder checkpoints have none, so defaults apply."""
        own = self.generation_config
        super().adjust_generation_fn(*args, **kwargs)
        self.generation_config = own if self.generation_config.eos_token_id is None else self.generation_config

    def count_items(self, labels: Tensor) -> Tensor:
        """Returns the number of predicted tokens in a batch, by which the loss of the batch is divided."""
        return (labels[:, 1:] != IGNORED_TOKEN).sum().float()

    def encode_images(
        self, pixel_values: Tensor | None, patch_attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Returns the decoder input `image_states` for images (B, C, H, W), and the output of the encoder."""
        outputs = self.model(pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True, **kwargs)
        return self.caption_head["connector"](outputs.last_hidden_state), outputs

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        image_states: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutput:
        """Predicts the next token at each position of texts.

        Args:
            pixel_values: Images (B, C, H, W), H and W multiples of the patch size.
            input_ids: Token ids (T, S) int64; by default only the start token, once for each image.
            attention_mask: (T, S), 0 for padding tokens on the left.
            labels: Target token ids (T, S); -100 for tokens that are excluded from the loss, such as padding.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            image_states: (B, L, 2·K·E), the first result of `encode_images`, instead of `pixel_values`.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            num_items_in_batch: Number of tokens by which the loss is divided: the sum of `count_items` over all
                batches of a step on all processes; by default that of this batch, averaged over processes in training.
            **kwargs: `output_hidden_states`, `output_attentions` (both of the encoder), `return_dict`.

        Returns:
            `logits` (T, S, V) and, if labels are given, `loss`, the cross-entropy of the next token. Label smoothing
            is applied only in training mode.

        Raises:
            ValueError: if an input does not fit the model; the message names valid values.
        """
        outputs: Any = {}
        if image_states is None:
            image_states, outputs = self.encode_images(pixel_values, patch_attention_mask, **kwargs)
        if input_ids is None:
            input_ids = torch.full((len(image_states), 1), self.options.bos_token_id, device=image_states.device)
        if len(input_ids) % len(image_states):
            raise ValueError(
                f"{len(input_ids)} texts cannot be divided among {len(image_states)} images. Pass the same number of "
                "texts for each image."
            )
        image_mask = patch_attention_mask
        if image_mask is not None:
            image_mask = F.pad(image_mask.flatten(1).bool(), (self.config.num_prefix_tokens, 0), value=True)
            image_mask = image_mask[:, None, None]  # (B, 1, 1, L)
        logits = self.caption_head["decoder"](input_ids, image_states, attention_mask, image_mask)
        loss = None
        if labels is not None:
            losses = token_losses(logits, labels, self.options.label_smoothing if self.training else 0.0)
            count = num_items_in_batch
            if count is None:
                count = self.count_items(labels).to(losses)
                # DDP averages gradients, so the loss is divided by the mean count per process.
                count = sum_over_processes(count) / count_processes() if self.training else count
            loss = losses.sum() / torch.as_tensor(count).to(losses).clamp_min(1)
        return CausalLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.get("hidden_states"), attentions=outputs.get("attentions")
        )

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Returns the inputs of the next step of `generate`."""
        names = ("attention_mask", "image_states", "patch_attention_mask")
        return {"input_ids": input_ids, **{name: kwargs.get(name) for name in names}}

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        pixel_values: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        image_states: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generates a text for each image and returns its tokens (B, S), as in transformers.

        Args:
            inputs: Tokens (B, S) of prompts, padded on the left; by default only the start token.
            pixel_values: See `forward`.
            patch_attention_mask: See `forward`.
            image_states: See `forward`.
            **kwargs: Other arguments of `GenerationMixin.generate`.
        """
        if image_states is None:
            image_states, _ = self.encode_images(pixel_values, patch_attention_mask)
        given = {"image_states": image_states, "patch_attention_mask": patch_attention_mask}
        return super().generate(inputs, **given, **kwargs)


class HfViTImageTextToTextPipeline(ImageTextToTextPipeline):
    """Image-text-to-text pipeline that raises an error if the model has untrained weights."""

    def __new__(cls, *args: Any, model: Any = None, **kwargs: Any) -> Any:
        """Creates a pipeline. For models of other packages, this is the original pipeline of transformers."""
        if model is not None and model.config.model_type != "hf_vit":
            return ImageTextToTextPipeline(*args, model=model, **kwargs)
        return super().__new__(cls)

    def __init__(self, *args: Any, optimize: Any = None, **kwargs: Any) -> None:
        if optimize:
            raise ValueError(f"optimize={optimize} does not support image captioning. Omit it.")
        super().__init__(*args, **kwargs)
        check_trained(self.model, self.model.name_or_path, self.model.untrained_weights)

    def check_model_type(self, supported_models: Any) -> None:
        """Accepts models of this package, which are not in the list of supported models in transformers."""
