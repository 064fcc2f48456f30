"""Base class of all models: initialization, loading, saving and changes of the inputs."""

import copy
import gc
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_SEGMENTATION_MAPPING_NAMES
from transformers.utils import logging
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, maybe_install_capturing_hooks

from .adapt_inputs import Geometry, Size, apply_geometry
from .configuration_hf_vit import INSTALL_COMMAND, HfViTConfig, to_pair
from .encoder import HfViTAttention, HfViTLayer
from .layers import HfViTInitialized
from .remote_code import check_reachable
from .shared import to_maps


# Parts that hold the trained features. Others (heads, poolers) may be initialized afresh, and the mask token too.
BACKBONE = ("embeddings.", "pre_norm.", "encoder.", "norm.")
MASK_TOKEN = "embeddings.mask_token"
TEXT_TOWER = "text_model."
DEFAULT_LABELS = range(2)  # which config.json leaves out
logger = logging.get_logger(__name__)
# The stock pipeline reads this list, not what is registered, and calls models that are not in it unsupported.
MODEL_FOR_IMAGE_SEGMENTATION_MAPPING_NAMES["hf_vit"] = (
    "HfViTForSemanticSegmentation",
    "HfViTForUniversalSegmentation",
)


@contextmanager
def without_collecting() -> Iterator[None]:
    """Pauses the search for reference cycles, which takes longer than loading a new model does and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_config(
    name_or_path: str | os.PathLike[str], *, trust_remote_code: bool | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Returns the config.json of a folder or repository, empty for a file; `OSError` if there is none."""
    # `trust_remote_code`, from the Auto classes, is not passed on: the library warns that it has no effect here.
    path = Path(name_or_path)
    if path.is_file():
        return {}
    check_reachable(name_or_path, **kwargs)
    config: dict[str, Any] = PreTrainedConfig.get_config_dict(name_or_path, **kwargs)[0]
    return config


def take_geometry(kwargs: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Takes out of the arguments of `from_pretrained` what `apply_geometry` changes once the model is loaded."""
    # Fields, also in the `config` that the Auto classes make of them, are set back to `saved`, the config.json.
    config = kwargs.pop("config", None)
    if config is not None:
        kwargs["config"] = config
    given = kwargs if config is None else vars(config) if isinstance(config, PreTrainedConfig) else {}
    has_new_token = given.get("use_cls_token") and saved.get("use_cls_token") is not True
    # The pooling may have to wait for the token.
    names = [name for name in Geometry.__annotations__ if name != "pooling" or has_new_token]
    if config is None:
        return {name: kwargs.pop(name) for name in names if name in kwargs}
    changed = {name: given[name] for name in names if name in saved and not is_same(given.get(name), saved[name])}
    if changed:
        kwargs["config"] = copy.deepcopy(config)
        for name in changed:
            setattr(kwargs["config"], name, saved[name])
    return changed


def is_same(value: Any, other: Any) -> bool:
    """Returns whether two values of a field are equal; sizes may be a number or a pair."""
    sizes = [to_pair(size) if isinstance(size, int | list | tuple) else size for size in (value, other)]
    return bool(sizes[0] == sizes[1])


@contextmanager
def naming_damage(name_or_path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Turns errors about the bytes of files, which do not say whose, into an `OSError` that does."""
    try:
        yield
    except (SafetensorError, json.JSONDecodeError) as error:
        raise OSError(
            f"The weights (*.safetensors) in {str(name_or_path)!r}, or their index, are cut off or damaged: {error}. "
            "Get them again, or save them again."
        ) from error


def check_weights(
    model: PreTrainedModel, info: Mapping[str, Any], name_or_path: str | os.PathLike[str], has_new_labels: bool
) -> None:
    """Raises `ValueError` if part of the backbone would be drawn at random or left out, or has another shape."""
    # The same goes for a text tower of which anything is there. `info` reports missing, unexpected and mismatched
    # keys. With new labels, heads may have another shape.
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    encoder = {name for name, _ in model.named_parameters() if "encoder.layers." in name}
    if encoder <= set(info["missing_keys"]):
        held = first_names(info["unexpected_keys"], 3)
        raise ValueError(
            f"Nothing in {str(name_or_path)!r} fits the encoder of {type(model).__name__}: it would have been drawn "
            f"at random. The checkpoint holds {held}. Open it with the transformers class it was saved from, or build "
            f"a new model with {type(model).__name__}(config)."
        )
    of_backbone_first = sorted(info["mismatched_keys"], key=lambda entry: (not entry[0].startswith(prefix), entry))
    shapes = [
        f"{name} is {tuple(theirs)} there and {tuple(ours)} here"
        for name, theirs, ours in of_backbone_first
        if name.startswith(prefix) or not has_new_labels
    ]
    missing = [name for name in info["missing_keys"] if is_backbone(name.removeprefix(prefix), model.config)]
    texts = {name for name, _ in model.named_parameters() if name.startswith(TEXT_TOWER)}
    if not texts <= set(info["missing_keys"]):  # else it is a fresh one, which the library reports
        missing += texts.intersection(info["missing_keys"])
    left_out = [name for name in info["unexpected_keys"] if is_left_out(name, model.config)]
    problems = {
        "": "; ".join(shapes[:6]) + ("; …" if shapes[6:] else ""),
        "drawn at random: ": first_names(missing),
        "left out: ": first_names(left_out),
    }
    if found := [problem + names for problem, names in problems.items() if names]:
        raise ValueError(
            f"The weights of {str(name_or_path)!r} do not fit: {'. '.join(found)}. Leave out the fields that change "
            "the architecture, or accept it with ignore_mismatched_sizes=True."
        )


def check_trained(model: PreTrainedModel, name_or_path: str, missing: Collection[str] = ()) -> None:
    """Raises `ValueError` if a model cannot predict: weights are `missing`, or any is infinite or NaN."""
    name = name_or_path or "This model"
    if missing:
        raise ValueError(
            f"{name} holds no weights for {first_names(missing, 3)} of {type(model).__name__}: it was trained for "
            "something else. Train it for this first, or give a model that was."
        )
    if broken := [key for key, weight in model.state_dict().items() if not is_finite(weight)]:
        raise ValueError(
            f"{name} has weights that are infinite or NaN in {model.dtype}: {first_names(broken, 3)}. Download or "
            "save it again, load it in float32, or use an earlier checkpoint."
        )


def is_finite(weight: Tensor) -> bool:
    """Returns whether no value of a tensor is infinite or NaN; True for integers and tensors without data."""
    if not weight.is_floating_point() or weight.itemsize < 2 or weight.is_meta or weight.numel() == 0:
        return True
    return all(math.isfinite(extreme) for extreme in weight.aminmax())  # one pass without copies, unlike `isfinite`


def is_backbone(name: str, config: HfViTConfig) -> bool:
    """Returns whether a tensor of the base model holds trained features."""
    is_of_pooling = config.norm_after_pooling and name.startswith("norm.")
    return name.startswith(BACKBONE) and name != MASK_TOKEN and not is_of_pooling


def is_left_out(name: str, config: HfViTConfig) -> bool:
    """Returns whether a tensor of a checkpoint is missed in a model without a place for it."""
    name = name.removeprefix("model.")
    number = name.removeprefix("encoder.layers.").partition(".")[0]
    # blocks at the end may be left out
    return is_backbone(name, config) and not (number.isdigit() and int(number) >= config.num_hidden_layers)


def version_of(tensor: Tensor) -> int:
    """Returns the counter of in-place changes, -1 for tensors of inference mode, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def first_names(names: Any, limit: int = 6) -> str:
    """Lists the first names."""
    return ", ".join(sorted(names)[:limit]) + (", …" if len(names) > limit else "")


class HfViTPreTrainedModel(PreTrainedModel):
    """Base class of all models: initialization, loading and saving."""

    config: HfViTConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities: ClassVar[tuple[str, ...]] = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["HfViTEmbeddings", "HfViTLayer"]
    _input_embed_layer = "patch_embeddings"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": HfViTLayer, "attentions": HfViTAttention}
    # Losses are means over the batch, which `transformers.Trainer` has to divide by its accumulation steps: what it
    # would count, the entries of the labels, is the divisor of none. `HfViTTrainer` adds up `count_items` of models
    # that have it, and gives them the sum as `num_items_in_batch`.
    accepts_loss_kwargs = False
    # Whether linear layers and patches start as those of MAE do.
    _starts_as_mae = False
    # Reads checkpoints of other libraries. The installed package sets it, as its key maps do not travel.
    _convert_pretrained: ClassVar[Callable[..., dict[str, Any]] | None] = None
    # Version counters of the weights that `from_pretrained` drew at random, by name
    _drawn: Mapping[str, int] = MappingProxyType({})
    _is_optimized = False  # by `optimize_for_inference`

    def __init__(self, config: HfViTConfig, *args: Any, **kwargs: Any) -> None:
        config.check()  # once more: fields may have been set after it was built
        super().__init__(config, *args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # What the library does as it builds a model, which another process has not done
        _CAN_RECORD_REGISTRY.setdefault(str(type(self)), self._can_record_outputs)
        if self.base_model is self:
            self._output_capturing_hooks_installed = False
            maybe_install_capturing_hooks(self)

    @property
    def untrained_weights(self) -> list[str]:
        """Names of the weights that the checkpoint did not have and that have not been loaded or trained since."""
        weights = self.state_dict(keep_vars=True)
        return [name for name in self._drawn.keys() & weights.keys() if self._drawn[name] == version_of(weights[name])]

    def train(self, mode: bool = True) -> Self:
        """Switches between training and evaluation mode; `ValueError` for an optimized model."""
        if mode and self._is_optimized:
            raise ValueError(
                f"This {type(self).__name__} was made by optimize_for_inference and cannot be trained. Use its source."
            )
        if mode:
            self._drawn = {}  # fused optimizers change weights without raising the version counter
        return super().train(mode)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Sets weights before training, as transformers' ViT does.

        | parameter                                           | value                                          |
        |-----------------------------------------------------|------------------------------------------------|
        | weights of linear layers and of the patches         | truncated normal of `config.initializer_range` |
        | the same, under MAE                                 | uniform by fan-in and fan-out (Glorot)         |
        | their biases                                        | zero                                           |
        | norms                                               | one, their bias zero                           |
        | layers of `HfViTInitialized`: classifier, tokens, …    | see their `initialize`                         |

        Source: https://github.com/google-research/vision_transformer and https://github.com/facebookresearch/deit.
        """
        if isinstance(module, HfViTInitialized):
            module.initialize(self.config.initializer_range)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if self._starts_as_mae:
                fans = len(module.weight) + module.weight[0].numel()  # of patches as of a linear layer
                init.uniform_(module.weight, -math.sqrt(6 / fans), math.sqrt(6 / fans))
            else:
                init.trunc_normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Self:
        """Loads a model as `transformers` does, our own from safetensors only.

        Where the `hf_vit` package is installed, published checkpoints of other libraries open in the same way: a name
        on the Hub, a folder or a file of weights. The table in the README lists them. A file of timm's alone needs its
        name too: `architecture="vit_base_patch16_224"`.

        Fields of the configuration can be given as arguments. Labels that differ (`num_labels=37`, `id2label={…}`) get
        a fresh head, which is reported. `image_size`, `patch_size`, `num_channels`, `use_cls_token`,
        `use_distillation_token` and `num_register_tokens` are changed after loading, by `apply_geometry`. No other
        field may change which weights the backbone has, or their shapes.

        Raises:
            ValueError: if the folder or repository holds a checkpoint that is not known, if its weights do not fit,
                or on `use_safetensors=False`.
            OSError: if there is no such folder or repository, no weights in it, or a file is damaged.
        """
        name_or_path, has_new_labels = pretrained_model_name_or_path, not {"num_labels", "id2label"}.isdisjoint(kwargs)
        ignores_mismatches = kwargs.pop("ignore_mismatched_sizes", False)
        wants_info = kwargs.pop("output_loading_info", False)
        geometry: dict[str, Any] = {}
        saved: dict[str, Any] = {}
        if name_or_path is not None:
            try:
                saved = read_config(name_or_path, **kwargs)
            except OSError:
                if cls._convert_pretrained is None:
                    raise
                pass  # of another library, or nothing at all: the converter raises
            geometry = take_geometry(kwargs, saved)
            if saved.get("model_type") != cls.config_class.model_type:
                with without_collecting():
                    kwargs, name_or_path = cls._convert(name_or_path, geometry, **kwargs), None
        if kwargs.get("use_safetensors") is False:
            raise ValueError("Weights are only loaded from safetensors: pickles can run code. Convert them first.")
        # The library's refusal of other shapes names none of them.
        kwargs |= {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        with without_collecting(), naming_damage(name_or_path):
            model, info = super().from_pretrained(name_or_path, *args, **kwargs)
        if pretrained_model_name_or_path is not None:
            if not ignores_mismatches:
                if name_or_path is not None:  # the Auto classes give labels in `config`
                    has_new_labels |= model.config.num_labels != len(saved.get("id2label", DEFAULT_LABELS))
                check_weights(model, info, pretrained_model_name_or_path, has_new_labels)
            model.config._name_or_path = str(pretrained_model_name_or_path)
            drawn = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
            weights = model.state_dict(keep_vars=True)
            model._drawn = {key: version_of(weights[key]) for key in drawn & weights.keys()}
        if geometry:
            apply_geometry(model, **geometry)
        loaded: Any = (model, info) if wants_info else model  # annotated as the library does
        return loaded

    @classmethod
    def _convert(cls, name_or_path: str | os.PathLike[str], geometry: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Returns the arguments that open a checkpoint of another library, `config` and `state_dict` among them."""
        if cls._convert_pretrained is None:
            raise ValueError(
                f"{str(name_or_path)!r} is a checkpoint of another library. With the package hf-vit installed "
                f"by {INSTALL_COMMAND}, hf_vit.{cls.__name__}.from_pretrained opens it."
            )
        if kwargs.pop("variant", None) is not None:
            raise ValueError(f"{str(name_or_path)!r} is converted from its main weights. Leave out variant=.")
        arguments: dict[str, Any] = cls._convert_pretrained(name_or_path, geometry, cls, **kwargs)
        return arguments

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Adds an adapter of peft as the library does.

        Raises:
            ValueError: if its `target_modules` are of another model, naming those of this one.
        """
        was_adapted: bool = self._hf_peft_config_loaded  # type: ignore[has-type]
        try:
            super().add_adapter(adapter_config, adapter_name)
        except ValueError as error:
            self._hf_peft_config_loaded = was_adapted
            layers = [name for name, layer in self.named_modules() if isinstance(layer, nn.Linear)]
            ends = sorted({".".join(name.split(".")[-2:]) for name in layers if ".layers." in name})
            if "version" in str(error):
                raise ValueError(
                    f"{error}. With the installed one, use peft.get_peft_model(model, config)."
                ) from error
            raise ValueError(
                f"{error} The linear layers of attention and MLP are here {', '.join(ends)}: query, key and value are "
                "one, attention.qkv."
            ) from error

    def wants_attentions(self, output_attentions: bool | None = None, **_: Any) -> bool:
        """Whether attention weights are asked for, by argument or else by the configuration."""
        wanted = self.config.output_attentions if output_attentions is None else output_attentions
        if wanted and self.config._attn_implementation != "eager" and not torch.compiler.is_compiling():
            logger.warning_once(
                f"{self.config._attn_implementation!r} attention has no weights: output_attentions=True runs eager."
            )
        return bool(wanted)

    def wants_states(self, output_hidden_states: Any = None, **_: Any) -> Any:
        """Returns what is asked for of the hidden states, by argument or else by the configuration."""
        return self.config.output_hidden_states if output_hidden_states is None else output_hidden_states

    # What users of timm and DINOv2 call

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The width, pixels per patch and module name of each block, as timm's."""
        prefix = "" if self.base_model is self else f"{self.base_model_prefix}."
        width, reduction = self.config.hidden_size, max(to_pair(self.config.patch_size))
        return [
            {"num_chs": width, "reduction": reduction, "module": f"{prefix}encoder.layers.{number}"}
            for number in range(self.config.num_hidden_layers)
        ]

    def get_intermediate_layers(
        self,
        pixel_values: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = True,
    ) -> list[Any]:
        """Returns the patch tokens after some blocks, as DINOv2 and timm do.

        Args:
            pixel_values: (B, C, H, W).
            n: Number of blocks, counted from the last one, or the numbers of blocks from 0; negative ones count from
                the end.
            reshape: Whether to return maps (B, D, h, w) instead of tokens (B, N, D).
            return_prefix_tokens: Whether to return pairs of the patches and the prefix tokens (B, P, D).
            norm: Whether to apply the final norm. It has no effect under `config.norm_after_pooling`.

        Returns:
            A list with one entry per block, in the order of the blocks.

        Raises:
            ValueError: if `n` names no block, or one that the model does not have.
        """
        model, config = self.base_model, self.config
        depth = config.num_hidden_layers
        wanted = range(-n, 0) if isinstance(n, int) else n
        if not wanted or not all(-depth <= number < depth for number in wanted):
            raise ValueError(f"n={n!r} must be how many blocks, 1 to {depth}, or their numbers from 0 to {depth - 1}.")
        states = model(pixel_values, output_hidden_states=True, return_dict=True).hidden_states
        grid = model.embeddings.patch_embeddings.grid(pixel_values)
        layers = []
        for number in sorted({number % depth for number in wanted}):
            tokens = states[number + 1]  # (B, L, D)
            tokens = model.norm(tokens) if norm and not config.norm_after_pooling else tokens
            prefix, patches = tokens.tensor_split((config.num_prefix_tokens,), dim=1)
            patches = to_maps(patches, grid) if reshape else patches
            layers.append((patches, prefix) if return_prefix_tokens else patches)
        return layers

    def forward_features(self, pixel_values: Tensor, **kwargs: Any) -> Tensor:
        """Returns the tokens (B, L, D) of images (B, C, H, W) after the final norm; `kwargs` as of `HfViTModel`."""
        tokens: Tensor = self.base_model(pixel_values, return_dict=True, **kwargs).last_hidden_state
        return tokens

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Pools tokens (B, L, D) of `forward_features` and classifies them.

        Returns:
            The logits (B, num_labels), or the pooled image (B, D) with `pre_logits` and of `HfViTModel`.

        Raises:
            ValueError: if the model is neither `HfViTModel` nor `HfViTForImageClassification`.
        """
        classifier = self.get_classifier()
        pooled: Tensor = self.base_model.pool(features)
        return pooled if pre_logits else classifier(pooled)

    def get_classifier(self) -> nn.Module:
        """Returns the layer that computes logits from a pooled image, an identity in `HfViTModel`.

        Raises:
            ValueError: if the model is neither `HfViTModel` nor `HfViTForImageClassification`.
        """
        raise ValueError(f"{type(self).__name__} has no classifier of whole images. Use HfViTForImageClassification.")

    def reset_classifier(self, num_labels: int) -> None:
        """Replaces the classifier by a new one; see `HfViTForImageClassification`, the only model that has one."""
        raise ValueError(f"{type(self).__name__} has no classifier to replace, as HfViTForImageClassification has.")

    def get_position_embeddings(self) -> Tensor | None:
        """Returns the position table (1, P + N, D) at the native grid; None where the model has none."""
        table: Tensor | None = self.base_model.embeddings.position_embeddings
        return table

    def resize_position_embeddings(self, new_image_size: Size) -> None:
        """Makes `new_image_size`, in pixels, the native size, and resamples the position table to its grid.

        Other sizes than the native one work without it, by resampling at each call. See `apply_geometry` for more.
        """
        apply_geometry(self, image_size=new_image_size)

    def resize_patch_embeddings(self, new_patch_size: Size) -> None:
        """Resizes the patches, so that the model sees an image enlarged by the same factor much as it saw the image.

        The image size stays, so the grid and its position table change. `apply_geometry` changes both sizes at once.
        """
        apply_geometry(self, patch_size=new_patch_size)

    def resize_input_channels(self, num_channels: int) -> None:
        """Changes the number of image channels; the image processor's channels, mean and deviation have to follow."""
        apply_geometry(self, num_channels=num_channels)

    def resize_prefix_tokens(
        self,
        use_cls_token: bool | None = None,
        num_register_tokens: int | None = None,
        pooling: Literal["cls", "mean"] | None = None,
    ) -> None:
        """Adds freshly drawn tokens in front of the patches or drops the last ones; None leaves a field as it is.

        Args:
            use_cls_token: Whether there is a CLS token.
            num_register_tokens: Number of registers.
            pooling: What takes the place of a pooling that needs the CLS token, or of one that does not.

        Raises:
            ValueError: if the values do not fit together, saying what would.
        """
        apply_geometry(self, use_cls_token=use_cls_token, num_register_tokens=num_register_tokens, pooling=pooling)

    @classmethod
    def is_remote_code(cls) -> bool:
        """Tells the library not to copy code when saving: `HfViTConfig.save_pretrained` does, also under FSDP2."""
        return False
