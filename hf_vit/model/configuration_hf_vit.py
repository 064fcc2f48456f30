"""Configuration of the Vision Transformer: fields of the backbone and options of all tasks."""

import copy
import os
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from huggingface_hub.dataclasses import strict
from transformers.backbone_utils import BackboneConfigMixin

from .nested_options import (
    HEAD_TASKS,
    HfViTMultiTaskConfig,
    HfViTTaskConfig,
    check_activation,
    check_intervals,
    option,
)
from .remote_code import AUTO_MAP, camel_case, check_pipeline, class_path, copy_code, pipelines_of
from .task_configurations import MODEL_TASK_CONFIGS, TASK_CONFIGS, HfViTTaskFields


# Fields that accept an int or a pair (height, width), and the units of their values.
SIZES = {"image_size": "pixel", "patch_size": "pixel", "rope_grid_size": "patch", "window_size": "patch"}
SEGMENTERS = ["HfViTForSemanticSegmentation", "HfViTForUniversalSegmentation"]
# Constructor arguments that are stored as properties rather than fields.
PROPERTIES = ("num_labels", "out_features", "out_indices", "output_attentions", "encoder_stride")
# Constructor arguments of all configurations of transformers that are neither fields nor properties of ours.
LIBRARY_ARGUMENTS = ("attn_implementation", "name_or_path", "torch_dtype")
# hf-vit is not yet on any package index, so error messages suggest an installation from a repository checkout.
INSTALL_COMMAND = "pip install . (in a checkout of hf-vit)"


def to_pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Converts a size, given as one int for both sides or as a pair, to `(height, width)`."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


@strict
class HfViTConfig(BackboneConfigMixin, HfViTTaskFields):
    """Configuration of a plain Vision Transformer backbone. The defaults are ViT-B/16 at 224 pixels.

    Fields that also exist in `transformers.ViTConfig` have the same name and meaning. The features of all other fields
    are disabled by default.

    Args:
        hidden_size: Width D of a token.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of attention heads; divides `hidden_size`.
        intermediate_size: Width of the hidden layer of the MLP. With `use_gated_mlp`, width of each of the two
            branches of the MLP.
        hidden_act: Activation of the MLP, a name of `transformers.activations.ACT2FN`.
        hidden_dropout_prob: Dropout after the embeddings, the attention and the MLP, in [0, 1).
        attention_probs_dropout_prob: Dropout of the attention weights, in [0, 1).
        drop_path_rate: Stochastic depth rate of the last block, in [0, 1). The rate grows linearly from 0 at the first
            block (https://arxiv.org/abs/1603.09382).
        initializer_range: Standard deviation of the truncated normal initialization.
        layer_norm_eps: Epsilon of every norm.
        image_size: Native height and width of images in pixels, for the position table. Models accept other sizes too.
        patch_size: Height and width in pixels of a patch.
        patch_padding: Zero padding in pixels at the top and left of the image; the same number of pixels is cut off at
            the bottom and right. ViTPose (https://arxiv.org/abs/2204.12484) uses 2.
        num_channels: Number of image channels.
        qkv_bias: Whether query, key and value have a bias.
        key_bias: Whether `qkv_bias` also adds a bias to the key. False in DINOv3.
        proj_bias: Whether the output projection of the attention has a bias.
        mlp_bias: Whether the linear layers of the MLP have a bias.
        use_gated_mlp: Whether SwiGLU (https://arxiv.org/abs/2002.05202) replaces the MLP. `hidden_act` is the
            activation of the gate; set it to "silu".
        use_pre_layernorm: Whether the embedded tokens are normalized before the first block (CLIP,
            https://arxiv.org/abs/2103.00020).
        use_qk_norm: Whether query and key are normalized per head (https://arxiv.org/abs/2302.05442).
        norm_type: "layernorm" or "rmsnorm" (https://arxiv.org/abs/1910.07467).
        layerscale_value: Initial value of LayerScale (https://arxiv.org/abs/2103.17239); `None` disables it.
        use_cls_token: Whether the sequence starts with a CLS token.
        use_distillation_token: Whether a distillation token follows the CLS token (DeiT,
            https://arxiv.org/abs/2012.12877).
        num_register_tokens: Number of register tokens before the patch tokens (https://arxiv.org/abs/2309.16588).
        use_mask_token: Whether the model has a mask token for `bool_masked_pos`.
        position_embedding_type: "learned" (ViT), "sincos2d" (the fixed table of MAE, https://arxiv.org/abs/2111.06377),
            "rotary" (axial, DINOv3, https://arxiv.org/abs/2508.10104), "learned+rotary" or "none".
        prefix_has_position: Whether the position table has rows for the CLS and distillation tokens. Register tokens
            have no position, because a position would only shift a vector that is learned anyway.
        position_interpolation: Method for resampling the position table to another grid, "bicubic" or "bilinear".
        position_antialias: Whether the resampling of the position table is antialiased. True in timm and in DINOv2
            with registers, False in ViT.
        position_interpolation_offset: Number added to the rows and columns of the new grid to compute the scale factor
            of the resampling: 0.1 in the original code of DINO and of DINOv2 without registers, otherwise 0.
        rope_theta: Base period of the rotary positions.
        rope_coordinates: Coordinates of the rotary positions: "centered", patch centers in [-1, 1], multiplied by 2·pi
            (DINOv3); "index", row and column numbers (RoPE-ViT, https://arxiv.org/abs/2403.13298); "scaled_index",
            row and column numbers scaled so that every image spans `rope_grid_size` (EVA-02,
            https://arxiv.org/abs/2303.11331).
        rope_grid_size: Rows and columns of the grid to which "scaled_index" scales positions; `None` means the grid of
            `image_size`. EVA-02 at 336 pixels keeps the 16 x 16 grid of its pretraining.
        window_size: Rows and columns of patches of an attention window; `None` lets every patch attend to the whole
            image. Non-patch tokens attend to all tokens, and all tokens attend to them. If the grid is not a multiple
            of the window size, the last windows are smaller.
        global_attention_layers: Indices, from 0, of the blocks that attend to the whole image despite `window_size`
            (ViTDet, https://arxiv.org/abs/2203.16527); none by default.
        pooling: Pooling of an image: "cls", the CLS token; "mean", the mean of the patch tokens; "cls_mean", the
            concatenation of both (the linear protocol of DINOv2); or "attention", attention of a learned query to the
            patch tokens (SigLIP, https://arxiv.org/abs/2303.15343). The projections of attention pooling always have a
            bias, and its MLP is never gated.
        norm_after_pooling: Whether the final norm is applied to the pooled vector instead of the tokens, as in timm
            with `fc_norm` and in fine-tuned MAE classifiers. `last_hidden_state` and the feature maps of
            `HfViTBackbone` are then not normalized.
        use_pooler: Whether a linear layer with tanh, as in the original ViT, follows the pooling.
        apply_layernorm: Whether `HfViTBackbone` normalizes its feature maps. It has no effect with
            `norm_after_pooling`. To normalize the feature maps of a model that was trained with `norm_after_pooling`,
            load it with `norm_after_pooling=False`.
        reshape_hidden_states: Whether `HfViTBackbone` returns maps (B, D, h, w) instead of token sequences (B, L, D).
        out_features: Names of the stages ("stem", "stage1", …) that `HfViTBackbone` returns; the last one by default.
        out_indices: Indices of the stages in `out_features`, 0 for the stem.
        …_config: Options of one task. There is one such field per task; see `HfViTTaskFields`.

    Raises:
        ValueError: if an argument is unknown, or values are inconsistent. Values are checked again when a model is
            built and when it is saved. Unknown fields of a saved configuration are kept.
    """

    model_type = "hf_vit"
    # True if the pipelines of the hf_vit package are registered. Pipeline code in checkpoints is then ignored.
    _has_pipelines: ClassVar[bool] = False
    # Outputs that the Trainer does not gather as predictions.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *("hidden_states", "attentions", "cls_logits", "distillation_logits", "auxiliary_logits", "auxiliary_outputs"),
        *("logits_per_image", "logits_per_text", "text_model_output", "vision_model_output"),
    ]

    hidden_size: int = option(768, "[1, inf)")
    num_hidden_layers: int = option(12, "[1, inf)")
    num_attention_heads: int = option(12, "[1, inf)")
    intermediate_size: int = option(3072, "[1, inf)")
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = option(0.0, "[0, 1)", "0 disables it")
    attention_probs_dropout_prob: float | int = option(0.0, "[0, 1)", "0 disables it")
    drop_path_rate: float | int = option(0.0, "[0, 1)", "0 disables it")
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
    layerscale_value: float | int | None = option(None, "(-inf, inf)", "None disables LayerScale")
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
            value = parse_label_numbers(name, value)
        super().__setattr__(name, value)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for config.json: all options of the model's task, and changed options of other tasks."""
        values = super().to_dict()
        used = {name for model in (self.architectures or ())[:1] for name in MODEL_TASK_CONFIGS.get(model, ())}
        for name, task in TASK_CONFIGS.items():
            options = values.pop(name)
            if name in used:
                values[name] = task.of(options).to_full_dict()
            elif isinstance(options, HfViTTaskConfig):
                values[name] = options.to_dict()
        return values

    def __post_init__(self, **kwargs: Any) -> None:
        # Composite models of transformers pass all fields of a saved configuration, in 5.17 without `model_type`.
        is_whole = kwargs.get("model_type") == self.model_type or {"out_features", "out_indices"} <= kwargs.keys()
        if not kwargs.pop("_is_saved", is_whole):
            check_fields(name for name in kwargs if not name.startswith("_") and name not in self.attribute_map)
        kwargs.pop("stage_names", None)  # stage names are recomputed from `num_hidden_layers`
        out_features, out_indices = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        num_labels = kwargs.get("num_labels")
        if num_labels is None:
            kwargs.pop("num_labels", None)
        elif type(num_labels) is not int or num_labels < 0:
            raise ValueError(f"num_labels={num_labels!r} must be a whole number of at least 0.")
        elif self.id2label is not None and num_labels != len(self.id2label):
            raise ValueError(
                f"num_labels={num_labels} but id2label names {len(self.id2label)} labels. Pass only id2label."
            )
        super().__post_init__(**kwargs)
        if out_features is not None or out_indices is not None:
            self.set_output_features_output_indices(out_features=out_features, out_indices=out_indices)
        self.check()

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Returns the configuration of a standard model size.

        Args:
            name: "tiny", "small", "base", "large" (patch 16), "huge", "so400m" (patch 14) or "mnist".
            **overrides: Fields that differ from the preset.

        Raises:
            ValueError: if the preset or a field does not exist.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}. Choose one of {', '.join(PRESETS)}.")
        preset = dict(PRESETS[name])
        if "id2label" in overrides:
            preset.pop("num_labels", None)
        return cls(**{**preset, **overrides})

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads config.json and returns its fields and unused arguments; raises `OSError` if there is no such file."""
        fields, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not fields:  # without an error, transformers would silently use default values
            raise OSError(f"There is no config.json in {str(pretrained_model_name_or_path)!r}. Pass a saved model.")
        check_pipeline(str(pretrained_model_name_or_path), model_classes(fields), kwargs.get("_from_pipeline"))
        return fields, unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Builds the configuration from a dictionary; raises `ValueError` if it belongs to another model type.

        Task options given as arguments override single options in the dictionary. If the arguments select a different
        object detection decoder, all detection options in the dictionary are dropped.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"This is the configuration of a {model_type!r} model, not of {cls.model_type!r}. Convert the "
                "checkpoint with HfViTModel.from_pretrained(...) or a task class. This requires the package hf-vit to "
                "be installed."
            )
        if cls._has_pipelines:  # otherwise, transformers would ask the user to trust the code in the checkpoint
            config_dict = {key: config_dict[key] for key in config_dict if key != "custom_pipelines"}
        names = config_dict.get("id2label")
        if names is not None and kwargs.get("num_labels") not in (None, len(names)):
            # The label names in the checkpoint do not apply to a different number of labels.
            config_dict = {key: config_dict[key] for key in config_dict if key not in ("id2label", "label2id")}
        for name in TASK_CONFIGS:
            if isinstance(kwargs.get(name), dict):
                kwargs[name] = TASK_CONFIGS[name].merge(config_dict.get(name) or {}, kwargs[name])
        return super().from_dict({**config_dict, "_is_saved": True}, **kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Self:
        """Returns this configuration, because `text_config` is a dictionary of options, not a `PreTrainedConfig`."""
        return self

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Saves config.json, which names the Auto classes and pipelines, and the source files of these classes."""
        self.check()
        self.auto_map = dict(AUTO_MAP)
        classes = model_classes(self.to_dict())
        segmenters = [name for name in classes if name in SEGMENTERS][:1]
        if segmenters == SEGMENTERS[1:]:
            self.auto_map["AutoModelForImageSegmentation"] = AUTO_MAP["AutoModelForUniversalSegmentation"]
        if "HfViTForMultiTask" in classes:
            self.auto_map["AutoModelForPreTraining"] = class_path("multi-task")
            self.architectures = ["HfViTForMultiTask", *segmenters]  # segmentation pipelines open the second class
        self.__dict__.pop("custom_pipelines", None)  # the saved pipelines are outdated if the model class has changed
        if pipelines := pipelines_of(classes):
            self.custom_pipelines = copy.deepcopy(pipelines)
        copy_code(save_directory)
        super().save_pretrained(save_directory)
        if push_to_hub:  # transformers would upload only config.json
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @property
    def heads(self) -> dict[str, dict[str, Any]]:
        """Options of each head of `HfViTForMultiTask` by name (see `HfViTMultiTaskConfig`); empty for other models."""
        return HfViTMultiTaskConfig.of(self.multi_task_config).heads or {}

    def for_head(self, name: str) -> Self:
        """Returns the configuration of the single-task model that consists of the backbone and the head `name`."""
        config, head = copy.deepcopy(self), HfViTMultiTaskConfig.of(self.multi_task_config).head(name)
        config.multi_task_config = None
        for field, value in head["config"].items():
            setattr(config, field, copy.deepcopy(value))
        config.architectures = [f"HfViTFor{camel_case(head['task'])}"]
        return config

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows and columns of patches of an image of the native size."""
        (height, width), (patch_height, patch_width) = to_pair(self.image_size), to_pair(self.patch_size)
        return height // patch_height, width // patch_width

    @property
    def num_patches(self) -> int:
        """Number of patches of an image of the native size, without CLS and other prefix tokens."""
        return self.grid_size[0] * self.grid_size[1]

    @property
    def rotary_grid_size(self) -> tuple[int, int]:
        """Rows and columns of the grid to which `rope_coordinates="scaled_index"` scales positions."""
        return self.grid_size if self.rope_grid_size is None else to_pair(self.rope_grid_size)

    @property
    def num_prefix_tokens(self) -> int:
        """Number P of tokens before the patches: CLS token, distillation token and registers, in this order."""
        return int(self.use_cls_token) + int(self.use_distillation_token) + self.num_register_tokens

    @property
    def num_prefix_positions(self) -> int:
        """Number of prefix tokens that have a row in the learned position table."""
        return int(self.use_cls_token) + int(self.use_distillation_token) if self.prefix_has_position else 0

    @property
    def pooled_size(self) -> int:
        """Width of `pooler_output`, which is the input of image-level heads such as the classifier."""
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
        """Indices of the stages that `HfViTBackbone` returns, 0 for the stem."""
        return [self.num_hidden_layers] if self._out_indices is None else self._out_indices

    @property
    def output_attentions(self) -> bool:
        """Whether models return attention weights by default, for any attention implementation."""
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    @property
    def encoder_stride(self) -> int | list[int] | tuple[int, int]:
        """Alias of the patch size; ViT in transformers uses this name for masked image modeling."""
        return self.patch_size

    @encoder_stride.setter
    def encoder_stride(self, value: int | list[int] | tuple[int, int]) -> None:
        if to_pair(value) != to_pair(self.patch_size):
            raise ValueError(
                f"encoder_stride={value} must equal patch_size={self.patch_size}. Leave encoder_stride out."
            )

    def validate_output_attentions(self) -> None:
        """Skips a check in transformers that requires eager attention; hf_vit models switch to it automatically."""

    def check(self) -> None:
        """Raises `ValueError` if values are invalid or inconsistent."""
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
                raise ValueError(f"{name}={size} must be an int or (height, width), each at least 1 {unit}.")
        for side, image, patch in zip(
            ("height", "width"), to_pair(self.image_size), to_pair(self.patch_size), strict=True
        ):
            if image % patch:
                fitting = [size for size in (image // patch * patch, (image // patch + 1) * patch) if size]
                raise ValueError(
                    f"The image {side} {image} is not a multiple of the patch {side} {patch} (image_size="
                    f"{self.image_size}, patch_size={self.patch_size}). Nearest valid values: "
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
                f"Nearest valid values: {', '.join(map(str, sorted(nearest)))}."
            )
        if "rotary" in self.position_embedding_type and head_size % 4:
            raise ValueError(
                f"Rotary positions need a head size that is a multiple of 4, but hidden_size={self.hidden_size} and "
                f"num_attention_heads={self.num_attention_heads} give a head size of {head_size}."
            )
        if self.position_embedding_type == "sincos2d" and self.hidden_size % 4:
            raise ValueError(f"hidden_size={self.hidden_size} must be a multiple of 4 for sincos2d positions.")

    def _check_tokens(self) -> None:
        if "cls" in self.pooling and not self.use_cls_token:
            raise ValueError(
                f"pooling={self.pooling!r} needs the CLS token, but use_cls_token=False. Set pooling='mean' or "
                "use_cls_token=True."
            )
        if self.use_distillation_token and not self.use_cls_token:
            raise ValueError(
                "use_distillation_token=True needs the CLS token, but use_cls_token=False. Set use_cls_token=True."
            )
        if self.norm_after_pooling and (self.pooling not in ("cls", "mean") or self.use_distillation_token):
            raise ValueError(
                "norm_after_pooling=True needs pooling 'cls' or 'mean' and no distillation token, but "
                f"pooling={self.pooling!r} and use_distillation_token={self.use_distillation_token}. Set "
                "norm_after_pooling=False."
            )
        if not self.out_indices:
            raise ValueError("out_indices=[] selects no stage. Pass at least one stage, or None.")
        if unknown := [name for name in self.out_features if name not in self.stage_names]:
            raise ValueError(
                f"out_features={self.out_features} contains {', '.join(unknown)}, but with "
                f"num_hidden_layers={self.num_hidden_layers} the stages are stem to stage{self.num_hidden_layers}. "
                "Choose among them, or pass out_indices."
            )

    def _check_labels(self) -> None:
        problems = ("regression", "single_label_classification", "multi_label_classification")
        if self.problem_type not in (None, *problems):
            raise ValueError(f"problem_type={self.problem_type!r} is unknown. Choose one of {', '.join(problems)}.")
        names = self.id2label or {}
        if sorted(names) != list(range(len(names))):
            raise ValueError(f"id2label={names} must have the keys 0 to {len(names) - 1}, one per label.")


def model_classes(fields: dict[str, Any]) -> list[str]:
    """Returns the model class named in config.json, followed by those of the heads of a multi-task model."""
    classes = fields.get("architectures") or []
    heads = HfViTMultiTaskConfig.of(fields.get("multi_task_config")).heads if "HfViTForMultiTask" in classes else {}
    return [*classes, *(f"HfViTFor{camel_case(head['task'])}" for head in (heads or {}).values())]


def find_processor(fields: dict[str, Any], head: str | None, pipeline_task: str | None) -> dict[str, Any] | None:
    """Returns the image processor options of a head of a multi-task model, or None if it has none.

    Args:
        fields: Content of config.json.
        head: Name of the head.
        pipeline_task: Task of the pipeline that opens the model, which selects the head if `head` is None.
    """
    options = HfViTMultiTaskConfig.of(fields.get("multi_task_config"))
    heads, kinds = options.heads or {}, [pipeline_task]
    if pipeline_task == "image-segmentation":
        kinds = ["semantic-segmentation", "universal-segmentation"]
    own = [options.find_head(task) for task in HEAD_TASKS if task in kinds]
    chosen = next((name for name in heads if name in own), None) if head is None else head
    return None if chosen is None else options.head(chosen).get("processor")


def parse_label_numbers(name: str, labels: dict[Any, Any]) -> dict[Any, Any]:
    """Converts the class numbers in `id2label` or `label2id` to int, because JSON files store them as strings."""
    try:
        if name == "id2label":
            return {int(number): label for number, label in labels.items()}
        return {label: int(number) for label, number in labels.items()}
    except (TypeError, ValueError) as error:
        form = "{0: 'cat', 1: 'dog'}" if name == "id2label" else "{'cat': 0, 'dog': 1}"
        raise ValueError(f"{name}={labels} must assign an integer to each label, as in {form}.") from error


def check_fields(names: Iterable[str]) -> None:
    """Raises `ValueError` if a name is neither a field of `HfViTConfig` nor another argument of its constructor."""
    known = {field.name for field in fields(HfViTConfig)} | {*PROPERTIES, *LIBRARY_ARGUMENTS}
    public = sorted(name for name in known if not name.startswith("_"))
    if unknown := sorted(set(names) - known):
        similar = [field for name in unknown for field in get_close_matches(name, public, n=2, cutoff=0.7)]
        meant = " or ".join(dict.fromkeys(similar))
        hint = f"Did you mean {meant}? " if meant else ""
        raise ValueError(f"HfViTConfig has no field {', '.join(unknown)}. {hint}help(HfViTConfig) lists all fields.")


def shape(*numbers: int) -> dict[str, Any]:
    """Returns the fields for a hidden size, numbers of blocks and attention heads, MLP width and patch size."""
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
    # A small model for handwritten digits. The usual initializer_range=0.02 suits a width of 768. With a width of 64,
    # it would keep attention nearly uniform for many training steps.
    "mnist": {
        **shape(64, 4, 4, 256, 4),
        **{"initializer_range": 0.1, "image_size": 28, "num_channels": 1, "num_labels": 10},
    },
}


def list_presets() -> list[str]:
    """Returns the names of the presets that `HfViTConfig.from_preset` accepts."""
    return list(PRESETS)
