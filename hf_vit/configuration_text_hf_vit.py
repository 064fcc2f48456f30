"""Options of the comparison of images with texts, and of the tower that reads texts.

Annotations stay real objects in this file (no postponed evaluation): the strict field checks read them.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN

from .configuration_options_hf_vit import HfViTTaskConfig, check_positive


@strict
@dataclass
class HfViTTextConfig(HfViTTaskConfig):
    """The tower that reads texts: a small transformer of our own, or any text encoder of the library.

    Fields that `transformers.CLIPTextConfig` has keep its names, and but for the activation its defaults.

    Args:
        encoder_config: Configuration of a text encoder that `AutoModel` builds, as a dictionary with its `model_type`:
            `{"model_type": "bert", "num_hidden_layers": 4}`. With it, only `pooling` and `eos_token_id` count beside.
        vocab_size: Number of tokens that the tokenizer knows.
        hidden_size: Width of a token.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of attention heads; divides `hidden_size`.
        intermediate_size: Width of the hidden layer of the MLP.
        hidden_act: Activation of the MLP, a name of `transformers.activations.ACT2FN`.
        layer_norm_eps: Epsilon of the norms.
        max_position_embeddings: Number of tokens that a text can have.
        is_causal: Whether a token sees only those before it (CLIP, https://arxiv.org/abs/2103.00020), or all (SigLIP,
            https://arxiv.org/abs/2303.15343).
        pooling: The token that sums up a text: "eos", the first `eos_token_id`, or the last token where there is none;
            "last", the last one that is not hidden by the attention mask; "first"; or the "mean" of those that are not
            hidden. By default "eos", and "first" for an encoder of the library, whose own pooler is left out.
        eos_token_id: Number of the token that ends a text.
        pad_token_id: Token that fills texts up to `max_position_embeddings`, and is seen like all others, whatever the
            attention mask says (SigLIP). `None` leaves texts as they are.
    """

    encoder_config: dict[str, Any] | None = None
    vocab_size: int = 49408
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = 77
    is_causal: bool = True
    pooling: Literal["eos", "last", "first", "mean"] | None = None
    eos_token_id: int | None = 49407
    pad_token_id: int | None = None

    @property
    def pooled_by(self) -> str:
        """What sums up a text: `pooling`, or the default of the tower."""
        return self.pooling or ("eos" if self.encoder_config is None else "first")

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Returns saved options with given ones in their places; those of another tower are left behind."""
        return super().merge({} if "encoder_config" in given else saved, given)

    def check(self) -> None:
        """Raises `ValueError` where the values do not fit together."""
        if self.encoder_config is not None:
            self._check_encoder(self.encoder_config)
            return
        counts = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        check_positive({name: vars(self)[name] for name in (*counts, "max_position_embeddings", "layer_norm_eps")})
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} of the text tower is not divisible by num_attention_heads="
                f"{self.num_attention_heads}."
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is unknown. Choose one of {', '.join(sorted(ACT2FN))}.")
        numbers = {"eos_token_id": self.eos_token_id} if self.pooled_by == "eos" else {}
        for name, number in {**numbers, "pad_token_id": self.pad_token_id}.items():
            if name in numbers and number is None:
                raise ValueError("pooling='eos' needs an eos_token_id. Set that of the tokenizer, or pooling='last'.")
            if number is not None and not 0 <= number < self.vocab_size:
                raise ValueError(
                    f"{name}={number} is none of the vocab_size={self.vocab_size} tokens. Set both to those of the "
                    "tokenizer: text_config=processor.text_options()."
                )

    def _check_encoder(self, encoder_config: dict[str, Any]) -> None:
        if not isinstance(encoder_config.get("model_type"), str):
            raise ValueError(
                f"encoder_config={encoder_config} does not say which model it is of. Add its model_type, such as "
                '"bert", or give AutoConfig.from_pretrained(...).to_diff_dict().'
            )
        if self.pooling == "eos" and self.eos_token_id is None:
            raise ValueError("pooling='eos' needs an eos_token_id. Set that of the tokenizer, or pooling='last'.")
        for option in fields(self):
            value = vars(self)[option.name]
            if option.name not in ("encoder_config", "pooling", "eos_token_id") and value != option.default:
                raise ValueError(
                    f"{option.name}={value} is an option of our own text tower and does nothing for the "
                    f"{encoder_config['model_type']!r} of encoder_config. Set it in there."
                )


@strict
@dataclass
class HfViTContrastiveConfig(HfViTTaskConfig):
    """How images and texts are compared.

    Args:
        loss: "sigmoid": each pair of an image and a text is right or wrong by itself (SigLIP,
            https://arxiv.org/abs/2303.15343); "softmax": of all texts in the batch one is that of an image, and the
            other way round (CLIP, https://arxiv.org/abs/2103.00020).
        projection_dim: Width of what is compared. Both towers get a linear layer without bias to it (CLIP); `None`
            takes the image as its tower sums it up, and the text by a linear layer with bias to that width (SigLIP).
        logit_scale_init_value: Logarithm of the initial factor of the cosine similarity, the inverse temperature; by
            default log(10) for "sigmoid", log(1 / 0.07) for "softmax".
        logit_bias_init_value: What "sigmoid" adds to it at first, by default -10: most pairs are wrong.
    """

    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    projection_dim: int | None = 512
    logit_scale_init_value: float | int | None = None
    logit_bias_init_value: float | int | None = None

    @property
    def initial_scale(self) -> float:
        """The initial logarithm of the factor: `logit_scale_init_value`, or the default of the loss."""
        if self.logit_scale_init_value is not None:
            return float(self.logit_scale_init_value)
        return math.log(10 if self.loss == "sigmoid" else 1 / 0.07)

    @property
    def initial_bias(self) -> float:
        """What is added at first: `logit_bias_init_value`, or its default."""
        return -10.0 if self.logit_bias_init_value is None else float(self.logit_bias_init_value)

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Returns saved options with given ones in their places; what another loss started from is left behind."""
        if given.get("loss", saved.get("loss", cls.loss)) != saved.get("loss", cls.loss):
            saved = {name: value for name, value in saved.items() if not name.endswith("_init_value")}
        return super().merge(saved, given)

    def check(self) -> None:
        """Raises `ValueError` where the values do not fit together."""
        if self.projection_dim is not None:
            check_positive({"projection_dim": self.projection_dim})
        if self.loss == "softmax" and self.logit_bias_init_value is not None:
            raise ValueError(
                f"logit_bias_init_value={self.logit_bias_init_value} is an option of loss='sigmoid': what is added to "
                "all logits changes no softmax. Leave it out."
            )
        for name in ("logit_scale_init_value", "logit_bias_init_value"):
            if vars(self)[name] is not None and not math.isfinite(vars(self)[name]):
                raise ValueError(f"{name}={vars(self)[name]} must be finite.")
