"""Configuration of the Vision Transformer, with the options of all tasks beside the fields of the backbone."""

import copy
import os
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from huggingface_hub.dataclasses import strict
from transformers.backbone_utils import BackboneConfigMixin

from .nested_options import HfViTTaskConfig, check_activation, check_intervals, option
from .remote_code import AUTO_MAP, CUSTOM_PIPELINES, check_pipeline, copy_code
from .task_configurations import MODEL_OPTIONS, TASK_CONFIGS, HfViTTaskFields


# Fields that are a height and a width, and what these are counted in
SIZES = {"image_size": "pixel", "patch_size": "pixel", "rope_grid_size": "patch", "window_size": "patch"}
# What the constructor takes beside fields, and gives back as properties
PROPERTIES = ("num_labels", "out_features", "out_indices", "output_attentions", "encoder_stride")
# No package index offers hf-vit yet, so errors suggest an installation from a checkout.
INSTALL_COMMAND = "pip install . (in a checkout of hf-vit)"


def to_pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Returns `(height, width)` of a size given as one int for both or as a pair."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


@strict
class HfViTConfig(BackboneConfigMixin, HfViTTaskFields):
    """Configuration of a plain Vision Transformer backbone. The defaults are ViT-B/16 at 224 pixels.

    Fields that `transformers.ViTConfig` has keep its names and meaning; the others are off by default.

    Args:
        hidden_size: Width D of a token.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of attention heads; divides `hidden_size`.
        intermediate_size: Width of the hidden layer of the MLP (of each of its two branches with `use_gated_mlp`).
        hidden_act: Activation of the MLP, a name of `transformers.activations.ACT2FN`.
        hidden_dropout_prob: Dropout after the embeddings, the attention and the MLP, in [0, 1).
        attention_probs_dropout_prob: Dropout of the attention weights, in [0, 1).
        drop_path_rate: Stochastic depth of the last block, in [0, 1); grows linearly from 0 at the first one
            (https://arxiv.org/abs/1603.09382).
        initializer_range: Standard deviation of the truncated normal initialization.
        layer_norm_eps: Epsilon of every norm.
        image_size: Height and width in pixels of the images that the position table is made for. Other sizes work too.
        patch_size: Height and width in pixels of a patch.
        patch_padding: How many pixels before the image, up and left, the first patch starts; beyond the image is zero,
            and as many pixels at its end are cut off (ViTPose, https://arxiv.org/abs/2204.12484: 2).
        num_channels: Number of image channels.
        qkv_bias: Whether query, key and value have a bias.
        key_bias: Whether the key has one too where `qkv_bias` is set (DINOv3: no).
        proj_bias: Whether the output projection of the attention has a bias.
        mlp_bias: Whether the linear layers of the MLP have a bias.
        use_gated_mlp: SwiGLU (https://arxiv.org/abs/2002.05202) in place of the MLP; `hidden_act` acts on the gate, so
            set it to "silu".
        use_pre_layernorm: Normalizes the embedded tokens before the first block (CLIP,
            https://arxiv.org/abs/2103.00020).
        use_qk_norm: Normalizes query and key per head (https://arxiv.org/abs/2302.05442).
        norm_type: "layernorm" or "rmsnorm" (https://arxiv.org/abs/1910.07467).
        layerscale_value: Initial value of LayerScale (https://arxiv.org/abs/2103.17239); `None` leaves it out.
        use_cls_token: Whether the sequence starts with a CLS token.
        use_distillation_token: Whether DeiT's distillation token follows it (https://arxiv.org/abs/2012.12877).
        num_register_tokens: Number of register tokens before the patches (https://arxiv.org/abs/2309.16588).
        use_mask_token: Whether the model has a mask token for `bool_masked_pos`.
        position_embedding_type: "learned" (ViT), "sincos2d" (the fixed table of MAE, https://arxiv.org/abs/2111.06377),
            "rotary" (axial, DINOv3, https://arxiv.org/abs/2508.10104), "learned+rotary" or "none".
        prefix_has_position: Whether CLS and distillation token have a learned position of their own. Registers never
            have one: it would only shift a vector that is learned anyway.
        position_interpolation: How a position table is resampled to another grid, "bicubic" or "bilinear".
        position_antialias: Whether that resampling is antialiased (DINOv2 with registers, timm: yes; ViT: no).
        position_interpolation_offset: What is added to the rows and columns of the other grid for the scale of that
            resampling: 0.1 in the original code of DINO and of DINOv2 without registers, 0 everywhere else.
        rope_theta: Base period of the rotary positions.
        rope_coordinates: What is turned by: "centered", patch centers in [-1, 1] times 2·pi (DINOv3); "index", the
            numbers of row and column (RoPE-ViT, https://arxiv.org/abs/2403.13298); "scaled_index", these numbers
            stretched so that every image spans `rope_grid_size` (EVA-02, https://arxiv.org/abs/2303.11331).
        rope_grid_size: Rows and columns that "scaled_index" spans; `None` means those of `image_size`. EVA-02 at 336
            pixels keeps the 16 x 16 of its pretraining.
        window_size: Rows and columns of patches of the windows that attention is restricted to, see
            `global_attention_layers`; `None` lets every patch attend to all. Tokens that are no patches attend to
            all, and all to them. Where a grid has no whole number of windows, the last ones are smaller.
        global_attention_layers: Numbers of the blocks, from 0, that attend to the whole image all the same (ViTDet,
            https://arxiv.org/abs/2203.16527); none by default.
        pooling: What an image is pooled to: "cls", "mean" of the patches, "cls_mean", both side by side (the linear
            protocol of DINOv2), or "attention" of a learned query over the patches (SigLIP,
            https://arxiv.org/abs/2303.15343). Its projections have a bias and its MLP is the plain one, always.
        norm_after_pooling: Whether the final norm acts on the pooled vector in place of the tokens (timm's `fc_norm`,
            the fine-tuned classifiers of MAE). `last_hidden_state` and the maps of `HfViTBackbone` are then without.
        use_pooler: Whether the original's tanh layer follows the pooling.
        apply_layernorm: Whether `HfViTBackbone` normalizes its feature maps. With `norm_after_pooling` it has
            no norm and this has no effect; loading with `norm_after_pooling=False` lets that norm act on the maps.
        reshape_hidden_states: Whether `HfViTBackbone` gives maps (B, D, h, w) or token sequences (B, L, D).
        out_features: Stages that `HfViTBackbone` returns, among "stem", "stage1", …; the last one by default.
        out_indices: The same as numbers, 0 for the stem.
        …_config: Options of a task, see `HfViTTaskFields`.

    Raises:
        ValueError: if an unknown argument resembles a field, or the values do not fit together. The values are checked
            again when a model is built and at saving.
    """

    model_type = "hf_vit"
    # Whether the pipelines of our own are registered. The package sets it, and needs no code of a checkpoint for them.
    _has_pipelines: ClassVar[bool] = False
    # What the Trainer leaves out of the predictions it gathers.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *("hidden_states", "attentions", "cls_logits", "distillation_logits", "auxiliary_logits", "auxiliary_outputs"),
        *("logits_per_image", "logits_per_text", "text_model_output", "vision_model_output"),
    ]

    hidden_size: int = option(768, "[1, inf)")
    num_hidden_layers: int = option(12, "[1, inf)")
    num_attention_heads: int = option(12, "[1, inf)")
    intermediate_size: int = option(3072, "[1, inf)")
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = option(0.0, "[0, 1)", "0 switches it off")
    attention_probs_dropout_prob: float | int = option(0.0, "[0, 1)", "0 switches it off")
    drop_path_rate: float | int = option(0.0, "[0, 1)", "0 switches it off")
    initializer_range: float = option(0.02, "(0, inf)")
    layer_norm_eps: float = option(1e-6, "(0, inf)")
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    patch_padding: int = 0
    num_channels: int = option(3, "[1, inf)")
    qkv_bias: bool = True
    key_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    use_gated_mlp: bool = False
    use_pre_layernorm: bool = False
    use_qk_norm: bool = False
    norm_type: Literal["layernorm", "rmsnorm"] = "layernorm"
    layerscale_value: float | int | None = option(None, "(-inf, inf)", "None leaves LayerScale out")
    use_cls_token: bool = True
    use_distillation_token: bool = False
    num_register_tokens: int = option(0, "[0, inf)", "0 means none")
    use_mask_token: bool = False
    position_embedding_type: Literal["learned", "sincos2d", "rotary", "learned+rotary", "none"] = "learned"
    prefix_has_position: bool = True
    position_interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    position_antialias: bool = False
    position_interpolation_offset: float | int = option(0.0, "[0, 1)", "0 means none")
    rope_theta: float | int = option(100.0, "(0, inf)")
    rope_coordinates: Literal["centered", "index", "scaled_index"] = "centered"
    rope_grid_size: int | list[int] | tuple[int, int] | None = None
    window_size: int | list[int] | tuple[int, int] | None = None
    global_attention_layers: list[int] | tuple[int, ...] = ()
    pooling: Literal["cls", "mean", "cls_mean", "attention"] = "cls"
    norm_after_pooling: bool = False
    use_pooler: bool = False
    apply_layernorm: bool = True
    reshape_hidden_states: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in TASK_CONFIGS and isinstance(value, dict):
            value = TASK_CONFIGS[name].make(value)
        if name in ("id2label", "label2id") and isinstance(value, dict):
            value = number_labels(name, value)
        super().__setattr__(name, value)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON: all options of the model's own task, of others those that are no defaults."""
        values = super().to_dict()
        used = {name for model in self.architectures or () for name in MODEL_OPTIONS.get(model, ())}
        for name, task in TASK_CONFIGS.items():
            options = values.pop(name)
            if name in used:
                values[name] = task.of(options).to_full_dict()
            elif isinstance(options, HfViTTaskConfig):
                values[name] = options.to_dict()
        return values

    def __post_init__(self, **kwargs: Any) -> None:
        if not kwargs.pop("_is_saved", False):
            check_fields((name for name in kwargs if not name.startswith("_")), only_close=True)
        kwargs.pop("stage_names", None)  # derived from `num_hidden_layers`, which the caller may have changed
        out_features, out_indices = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        num_labels = kwargs.get("num_labels")
        if num_labels is None:
            kwargs.pop("num_labels", None)
        elif type(num_labels) is not int or num_labels < 0:
            raise ValueError(f"num_labels={num_labels!r} must be a whole number of at least 0.")
        elif self.id2label is not None and num_labels != len(self.id2label):
            raise ValueError(
                f"num_labels={num_labels} but id2label names {len(self.id2label)} labels. Give id2label alone."
            )
        super().__post_init__(**kwargs)
        if out_features is not None or out_indices is not None:
            self.set_output_features_output_indices(out_features=out_features, out_indices=out_indices)
        self.check()

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Returns the configuration of a published size.

        Args:
            name: "tiny", "small", "base", "large" (patch 16), "huge", "so400m" (patch 14) or "mnist".
            **overrides: Fields that differ from the preset.

        Raises:
            ValueError: if there is no such preset or field.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}. Choose one of {', '.join(PRESETS)}.")
        check_fields(overrides)
        preset = dict(PRESETS[name])
        if "id2label" in overrides:
            preset.pop("num_labels", None)
        return cls(**{**preset, **overrides})

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the fields in a config.json, and the arguments that are left; `OSError` if there is no such file."""
        fields, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not fields:  # which the library would take for the defaults of all
            raise OSError(f"There is no config.json in {str(pretrained_model_name_or_path)!r}. Give a saved model.")
        check_pipeline(str(pretrained_model_name_or_path), fields.get("architectures"), kwargs.get("_from_pipeline"))
        return fields, unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Builds the configuration from a dictionary, refusing one of another model type.

        Options of a task that are given as arguments replace those of the dictionary one by one, but those of another
        decoder of objects all at once.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"This is the configuration of a {model_type!r} model, not of {cls.model_type!r}. Convert the "
                "checkpoint with HfViTModel.from_pretrained(...) or a class for a task, where the package hf-vit is "
                "installed."
            )
        if cls._has_pipelines:  # the library would ask to trust the checkpoint's own
            config_dict = {key: config_dict[key] for key in config_dict if key != "custom_pipelines"}
        names = config_dict.get("id2label")
        if names is not None and kwargs.get("num_labels") not in (None, len(names)):
            # The caller has other labels: the names in the checkpoint are not theirs.
            config_dict = {key: config_dict[key] for key in config_dict if key not in ("id2label", "label2id")}
        for name in TASK_CONFIGS:
            if isinstance(kwargs.get(name), dict):
                kwargs[name] = TASK_CONFIGS[name].merge(config_dict.get(name) or {}, kwargs[name])
        return super().from_dict({**config_dict, "_is_saved": True}, **kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Self:
        """Returns the whole configuration: `text_config` holds options, which the library would take for one."""
        return self

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Saves config.json with the whole `auto_map` and pipelines of our own, and the code that these point to."""
        self.check()
        self.auto_map = dict(AUTO_MAP)
        if self.architectures == ["HfViTForUniversalSegmentation"]:
            self.auto_map["AutoModelForImageSegmentation"] = AUTO_MAP["AutoModelForUniversalSegmentation"]
        self.__dict__.pop("custom_pipelines", None)  # of the class that it was opened as
        for architecture in CUSTOM_PIPELINES.keys() & set(self.architectures or ()):
            self.custom_pipelines = copy.deepcopy(CUSTOM_PIPELINES[architecture])
        copy_code(save_directory)
        super().save_pretrained(save_directory)
        if push_to_hub:  # the library would upload only what it has written itself
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows and columns of patches at the native image size."""
        (height, width), (patch_height, patch_width) = to_pair(self.image_size), to_pair(self.patch_size)
        return height // patch_height, width // patch_width

    @property
    def rotary_grid_size(self) -> tuple[int, int]:
        """Rows and columns that the rotary positions with `rope_coordinates="scaled_index"` span on every image."""
        return self.grid_size if self.rope_grid_size is None else to_pair(self.rope_grid_size)

    @property
    def num_prefix_tokens(self) -> int:
        """Number P of tokens before the patches: CLS, distillation token and registers, in this order."""
        return int(self.use_cls_token) + int(self.use_distillation_token) + self.num_register_tokens

    @property
    def num_prefix_positions(self) -> int:
        """Number of leading tokens that have a row of their own in the learned position table."""
        return int(self.use_cls_token) + int(self.use_distillation_token) if self.prefix_has_position else 0

    @property
    def pooled_size(self) -> int:
        """Width of `pooler_output`, which the heads on the whole image take."""
        return 2 * self.hidden_size if self.pooling == "cls_mean" and not self.use_pooler else self.hidden_size

    @property
    def stage_names(self) -> list[str]:
        """Names of the stages that `HfViTBackbone` can return."""
        return ["stem", *(f"stage{i}" for i in range(1, self.num_hidden_layers + 1))]

    @BackboneConfigMixin.out_features.getter
    def out_features(self) -> list[str]:
        """Names of the stages that `HfViTBackbone` returns."""
        return [self.stage_names[-1]] if self._out_features is None else self._out_features

    @BackboneConfigMixin.out_indices.getter
    def out_indices(self) -> list[int]:
        """Numbers of the stages that `HfViTBackbone` returns, 0 for the stem."""
        return [self.num_hidden_layers] if self._out_indices is None else self._out_indices

    @property
    def output_attentions(self) -> bool:
        """Whether models return attention weights by default; works under every attention implementation."""
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    @property
    def encoder_stride(self) -> int | list[int] | tuple[int, int]:
        """What transformers' ViT calls the size of the patches that a decoder of masked images makes."""
        return self.patch_size

    @encoder_stride.setter
    def encoder_stride(self, value: int | list[int] | tuple[int, int]) -> None:
        if to_pair(value) != to_pair(self.patch_size):
            raise ValueError(f"encoder_stride={value} is not patch_size={self.patch_size}. Leave encoder_stride out.")

    def validate_output_attentions(self) -> None:
        """Replaces the library's refusal under other implementations than eager: our models fall back to it."""

    def check(self) -> None:
        """Raises `ValueError` where the values do not fit together."""
        check_intervals(self)
        check_activation(self.hidden_act)
        self._check_sizes()
        self._check_tokens()
        self._check_labels()
        for name in TASK_CONFIGS:
            options = vars(self)[name]
            if isinstance(options, HfViTTaskConfig):
                options.check()

    def _check_sizes(self) -> None:
        for name, unit in SIZES.items():
            size = vars(self)[name]
            if size is None:
                continue
            if (not isinstance(size, int) and len(size) != 2) or min(to_pair(size)) < 1:
                raise ValueError(f"{name}={size} must be one int or (height, width), at least 1 {unit} each way.")
        for side, image, patch in zip(
            ("height", "width"), to_pair(self.image_size), to_pair(self.patch_size), strict=True
        ):
            if image % patch:
                fitting = [size for size in (image // patch * patch, (image // patch + 1) * patch) if size]
                raise ValueError(
                    f"The image {side} {image} is not a multiple of the patch {side} {patch} (image_size="
                    f"{self.image_size}, patch_size={self.patch_size}). The nearest that fit: "
                    f"{' or '.join(map(str, fitting))}."
                )
        if not 0 <= 2 * self.patch_padding < min(to_pair(self.patch_size)):
            raise ValueError(
                f"patch_padding={self.patch_padding} must be less than half of patch_size={self.patch_size}."
            )
        head_size, remainder = divmod(self.hidden_size, self.num_attention_heads)
        if remainder:
            heads = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0]
            nearest = sorted(heads, key=lambda n: abs(n - self.num_attention_heads))[:3]
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}. "
                f"Heads that divide it: {', '.join(map(str, sorted(nearest)))}."
            )
        if "rotary" in self.position_embedding_type and head_size % 4:
            raise ValueError(
                f"Rotary positions turn pairs along two axes, so a head must be a multiple of 4 wide, but hidden_size="
                f"{self.hidden_size} over num_attention_heads={self.num_attention_heads} makes it {head_size}."
            )
        if self.position_embedding_type == "sincos2d" and self.hidden_size % 4:
            raise ValueError(f"sincos2d positions need a hidden_size that is a multiple of 4, not {self.hidden_size}.")

    def _check_tokens(self) -> None:
        if "cls" in self.pooling and not self.use_cls_token:
            raise ValueError(
                f"pooling={self.pooling!r} needs the CLS token, but use_cls_token=False. Set pooling='mean' or "
                "use_cls_token=True."
            )
        if self.use_distillation_token and not self.use_cls_token:
            raise ValueError("use_distillation_token=True needs the CLS token. use_cls_token=False; set it to True.")
        if self.norm_after_pooling and (self.pooling not in ("cls", "mean") or self.use_distillation_token):
            raise ValueError(
                "norm_after_pooling=True needs pooling 'cls' or 'mean' and no distillation token, but "
                f"pooling={self.pooling!r} and use_distillation_token={self.use_distillation_token}. Set "
                "norm_after_pooling=False."
            )
        if not self.out_indices:
            raise ValueError("out_indices=[] leaves the backbone nothing to return. Name at least one stage, or None.")
        if unknown := [name for name in self.out_features if name not in self.stage_names]:
            raise ValueError(
                f"out_features={self.out_features} names {', '.join(unknown)}, but num_hidden_layers="
                f"{self.num_hidden_layers} gives only stem to stage{self.num_hidden_layers}. Pass out_indices again."
            )

    def _check_labels(self) -> None:
        problems = ("regression", "single_label_classification", "multi_label_classification")
        if self.problem_type not in (None, *problems):
            raise ValueError(f"problem_type={self.problem_type!r} is unknown. Choose one of {', '.join(problems)}.")
        names = self.id2label or {}
        if sorted(names) != list(range(len(names))):
            raise ValueError(f"id2label={names} must name the labels 0 to {len(names) - 1}, one each.")


def number_labels(name: str, labels: dict[Any, Any]) -> dict[Any, Any]:
    """Returns `id2label` or `label2id` with whole numbers, which JSON and the library's tutorials write as text."""
    try:
        if name == "id2label":
            return {int(number): label for number, label in labels.items()}
        return {label: int(number) for label, number in labels.items()}
    except (TypeError, ValueError) as error:
        form = "{0: 'cat', 1: 'dog'}" if name == "id2label" else "{'cat': 0, 'dog': 1}"
        raise ValueError(f"{name}={labels} must number the labels, as {form} does.") from error


def check_fields(names: Iterable[str], only_close: bool = False) -> None:
    """Raises `ValueError` if a name is no field of `HfViTConfig`, nor one of what else its constructor takes.

    With `only_close`, names that resemble no field pass: the library's own options, or those of other models.
    """
    known = {field.name for field in fields(HfViTConfig)} | {*PROPERTIES, "attn_implementation"}
    public = sorted(name for name in known if not name.startswith("_"))
    closest = {name: get_close_matches(name, public, n=1, cutoff=0.75) for name in sorted(set(names) - known)}
    unknown = [name for name in closest if closest[name] or not only_close]
    if unknown:
        meant = ", ".join(dict.fromkeys(field for name in unknown for field in closest[name]))
        hint = f"Did you mean {meant}? " if meant else ""
        raise ValueError(f"HfViTConfig has no field {', '.join(unknown)}. {hint}help(HfViTConfig) lists them.")


def shape(*numbers: int) -> dict[str, Any]:
    """Returns width, blocks, heads, width of the MLP and, if it is not that of the defaults, patch size by name."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size")
    return dict(zip(names, numbers, strict=False))


PRESETS: dict[str, dict[str, Any]] = {
    # ViT-Ti/16 and ViT-S/16 (DeiT, https://arxiv.org/abs/2012.12877)
    "tiny": shape(192, 12, 3, 768),
    "small": shape(384, 12, 6, 1536),
    # ViT-B/16, ViT-L/16 and ViT-H/14 (ViT, https://arxiv.org/abs/2010.11929)
    "base": {},
    "large": shape(1024, 24, 16, 4096),
    "huge": shape(1280, 32, 16, 5120, 14),
    # ViT-So400m/14 (Getting ViT in Shape, https://arxiv.org/abs/2305.13035)
    "so400m": shape(1152, 27, 16, 4304, 14),
    # Handwritten digits. The usual 0.02 is made for tokens 768 wide; at 64 it leaves the attention even for long.
    "mnist": {
        **shape(64, 4, 4, 256, 4),
        **{"initializer_range": 0.1, "image_size": 28, "num_channels": 1, "num_labels": 10},
    },
}


def list_presets() -> list[str]:
    """Returns the names of the presets, as `HfViTConfig.from_preset` takes them."""
    return list(PRESETS)
