"""Base class of all models, which implements initialization, loading, saving and changes of the inputs."""

import copy
import gc
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from transformers.utils.import_utils import is_jit_tracing
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, maybe_install_capturing_hooks

from .adapt_inputs import Geometry, Size, apply_geometry
from .calibration import HfViTCalibrationConfig, calibrate
from .configuration_hf_vit import INSTALL_COMMAND, PROPERTIES, HfViTConfig, to_pair
from .encoder import HfViTAttention, HfViTLayer
from .layers import HfViTInitialized
from .nested_options import HEAD_TASKS, HfViTMultiTaskConfig
from .remote_code import camel_case, check_reachable
from .shared import to_maps
from .task_configurations import TASK_CONFIGS
from .weight_changes import WeightWatch, fingerprint, has_changed, version_of


# Prefixes of the modules of the backbone. A checkpoint must contain their weights, except the mask token. Heads and
# poolers may be newly initialized.
BACKBONE = ("embeddings.", "pre_norm.", "encoder.", "norm.")
MASK_TOKEN = "embeddings.mask_token"
TEXT_TOWER = "text_model."
DEFAULT_LABELS = range(2)  # two labels, the default of transformers
HEAD_CLASSES = {f"HfViTFor{camel_case(task)}": task for task in HEAD_TASKS}
POOLED = ("image-classification", "zero-shot-image-classification")  # tasks that read the pooled vector
UNCALIBRATED = HfViTCalibrationConfig()
logger = logging.get_logger(__name__)
# transformers' image segmentation pipeline rejects models that are not in this mapping, even if they are registered.
MODEL_FOR_IMAGE_SEGMENTATION_MAPPING_NAMES["hf_vit"] = (
    "HfViTForSemanticSegmentation",
    "HfViTForUniversalSegmentation",
)


@contextmanager
def pausing_garbage_collection() -> Iterator[None]:
    """Context manager that pauses garbage collection, which would only slow down the loading of a model."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_config(
    name_or_path: str | os.PathLike[str],
    *,
    head: str | None = None,
    trust_remote_code: bool | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns the content of config.json, or `{}` for the path of a weight file; raises `OSError` if it is missing.

    If `head` names a head of a multi-task model, the result is the configuration of the single-task model with this
    head. Raises `ValueError` if there is no such head.
    """
    # `trust_remote_code` is not passed on, because transformers would warn that it has no effect.
    path = Path(name_or_path)
    if path.is_file():
        return {}
    check_reachable(name_or_path, **kwargs)
    config: dict[str, Any] = PreTrainedConfig.get_config_dict(name_or_path, **kwargs)[0]
    return config if head is None else HfViTConfig.from_dict(config).for_head(head).to_dict()


def pop_geometry(kwargs: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Removes from `kwargs` and returns the arguments that `apply_geometry` must apply after loading."""
    # The Auto classes store fields given as arguments in `config`. There, they are reset to the values in config.json
    # (`saved`).
    config = kwargs.pop("config", None)
    if config is not None:
        kwargs["config"] = config
    given = kwargs if config is None else vars(config) if isinstance(config, PreTrainedConfig) else {}
    has_new_token = given.get("use_cls_token") and saved.get("use_cls_token") is not True
    # A new pooling is applied after loading if it needs a CLS token that is also added after loading.
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
    """Returns whether two values of a field are equal; the sizes 16 and (16, 16) are equal."""
    sizes = [to_pair(size) if isinstance(size, int | list | tuple) else size for size in (value, other)]
    return bool(sizes[0] == sizes[1])


def plain_value(value: Any) -> Any:
    """Returns a value of a configuration, with dictionaries in place of task options."""
    # Compare by name: in remote code, the class of `value` may be another copy of the class in this file.
    is_options = type(value).__name__ in {options.__name__ for options in TASK_CONFIGS.values()}
    return value.to_dict() if is_options else value


def find_head_of(model_class: type[PreTrainedModel], saved: dict[str, Any], wanted: str | None = None) -> str | None:
    """Returns the name of the head that `model_class` opens, given the config.json `saved` of a multi-task model.

    The result is None if there is no such head.

    Raises:
        ValueError: if the head `wanted` does not exist or belongs to another class.
    """
    task = HEAD_CLASSES.get(model_class.__name__)
    if task is None and wanted is not None:
        raise ValueError(f"{model_class.__name__} cannot open a head of a multi-task model. Omit head={wanted!r}.")
    options = HfViTMultiTaskConfig.of(saved.get("multi_task_config"))
    return None if task is None else options.find_head(task, wanted)


def choose_head(
    model_class: type[PreTrainedModel], kwargs: dict[str, Any], saved: dict[str, Any], wanted: str | None
) -> None:
    """Changes the arguments of `from_pretrained` so that a single-task class opens its head of a multi-task model.

    By default, the head is chosen by `HfViTMultiTaskConfig.find_head`.
    """
    head = find_head_of(model_class, saved, wanted)
    if head is None:
        return
    config, given = kwargs.pop("config", None), dict[str, Any]()
    as_saved = HfViTConfig.from_dict(saved)
    if config is None:
        names = {*vars(as_saved), *PROPERTIES} - {"dtype"}
        given = {name: kwargs.pop(name) for name in names & kwargs.keys()}
    else:  # the Auto classes store arguments in `config`
        old, new = ({n: plain_value(v) for n, v in vars(own).items() if n[0] != "_"} for own in (as_saved, config))
        given = {name: value for name, value in new.items() if name not in old or old[name] != value}
    kwargs["config"] = HfViTConfig.from_dict(as_saved.for_head(head).to_dict(), **given)
    if config is not None:
        kwargs["config"]._attn_implementation = config._attn_implementation
    kwargs["key_mapping"] = {rf"^heads\.{head}\.": ""}
    saved["id2label"] = as_saved.for_head(head).id2label


@contextmanager
def naming_checkpoint(name_or_path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Context manager within which errors about damaged weight files and the load report name the checkpoint.

    The load report of transformers names only files that transformers opens, and prints None for a converted
    checkpoint.
    """

    def name(record: Any) -> bool:
        record.msg = str(record.msg).replace("from: None\n", f"from: {name_or_path or 'the given weights'}\n")
        return True

    reporting = logging.get_logger("transformers.modeling_utils")
    reporting.addFilter(name)
    try:
        yield
    except (SafetensorError, json.JSONDecodeError) as error:
        raise OSError(
            f"The weights (*.safetensors) in {str(name_or_path)!r}, or their index, are cut off or damaged: {error}. "
            "Download or save them again."
        ) from error
    finally:
        reporting.removeFilter(name)


def check_weights(
    model: PreTrainedModel, info: Mapping[str, Any], name_or_path: str | os.PathLike[str], has_new_labels: bool
) -> None:
    """Raises `ValueError` if backbone weights are missing or unused, or if shapes do not match."""
    # `info` contains missing, unexpected and mismatched keys. A text tower is also checked if the checkpoint contains
    # some of its weights. With new labels, heads may have different shapes.
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    encoder = {name for name, _ in model.named_parameters() if "encoder.layers." in name}
    if encoder <= set(info["missing_keys"]):
        held = join_first_names(info["unexpected_keys"], 3)
        raise ValueError(
            f"No weights in {str(name_or_path)!r} fit the encoder of {type(model).__name__}: it would be initialized "
            f"randomly. The checkpoint holds {held}. Load it with the transformers class that saved it, or build a "
            f"new model with {type(model).__name__}(config)."
        )
    of_backbone_first = sorted(info["mismatched_keys"], key=lambda entry: (not entry[0].startswith(prefix), entry))
    shapes = [
        f"{name} is {tuple(theirs)} in the checkpoint and {tuple(ours)} in the model"
        for name, theirs, ours in of_backbone_first
        if name.startswith(prefix) or not has_new_labels
    ]
    missing = [name for name in info["missing_keys"] if is_backbone(name.removeprefix(prefix), model.config)]
    texts = {name for name, _ in model.named_parameters() if name.startswith(TEXT_TOWER)}
    if not texts <= set(info["missing_keys"]):  # if the whole text tower is missing, transformers reports it
        missing += texts.intersection(info["missing_keys"])
    left_out = [name for name in info["unexpected_keys"] if is_unused_backbone_weight(name, model.config)]
    problems = {
        "": "; ".join(shapes[:6]) + ("; …" if shapes[6:] else ""),
        "initialized randomly: ": join_first_names(missing),
        "not used: ": join_first_names(left_out),
    }
    if found := [problem + names for problem, names in problems.items() if names]:
        raise ValueError(
            f"The weights of {str(name_or_path)!r} do not fit: {'. '.join(found)}. Leave out arguments that change "
            "the architecture, or pass ignore_mismatched_sizes=True to accept the differences."
        )


def check_trained(model: PreTrainedModel, name_or_path: str, missing: Collection[str] = ()) -> None:
    """Raises `ValueError` if `missing` contains names of weights, or if weights are infinite or NaN."""
    name = name_or_path or "This model"
    if missing:
        raise ValueError(
            f"{name} has no weights for {join_first_names(missing, 3)} of {type(model).__name__}: it was trained for "
            "another task. Train it for this task first, or use a model that was trained for it."
        )
    if broken := [key for key, weight in model.state_dict().items() if not is_finite(weight)]:
        raise ValueError(
            f"{name} has infinite or NaN weights in {model.dtype}: {join_first_names(broken, 3)}. Download or "
            "save it again, load it in float32, or use an earlier checkpoint."
        )


def is_finite(weight: Tensor) -> bool:
    """Returns whether all values of a tensor are finite; True for integers and tensors without data."""
    if not weight.is_floating_point() or weight.itemsize < 2 or weight.is_meta or weight.numel() == 0:
        return True
    return all(math.isfinite(extreme) for extreme in weight.aminmax())  # unlike `isfinite`, `aminmax` makes no copies


def is_backbone(name: str, config: HfViTConfig) -> bool:
    """Returns whether a weight of the base model belongs to the backbone, so that a checkpoint must contain it."""
    is_of_pooling = config.norm_after_pooling and name.startswith("norm.")
    return name.startswith(BACKBONE) and name != MASK_TOKEN and not is_of_pooling


def is_unused_backbone_weight(name: str, config: HfViTConfig) -> bool:
    """Returns whether an unused checkpoint weight belongs to a part of the backbone that the model has."""
    name = name.removeprefix("model.")
    number = name.removeprefix("encoder.layers.").partition(".")[0]
    # A model may be loaded with fewer blocks than the checkpoint has.
    return is_backbone(name, config) and not (number.isdigit() and int(number) >= config.num_hidden_layers)


def join_first_names(names: Any, limit: int = 6) -> str:
    """Joins the alphabetically first `limit` names to a text."""
    return ", ".join(sorted(names)[:limit]) + (", …" if len(names) > limit else "")


class HfViTPreTrainedModel(PreTrainedModel):
    """Base class of all models, which implements initialization, loading, saving and changes of the inputs."""

    config: HfViTConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities: ClassVar[tuple[str, ...]] = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["HfViTEmbeddings", "HfViTLayer"]
    _input_embed_layer = "patch_embeddings"
    # Single-task classes read only one head of a multi-task model.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^heads\.", r"^uncertainty\."]
    # Whether a training step may read stored features of frozen blocks instead of images.
    supports_stored_features = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": HfViTLayer, "attentions": HfViTAttention}
    # Losses are means over the batch, so `transformers.Trainer` must divide them by the number of accumulation steps,
    # not by the number of label entries. If a model defines `count_items`, `HfViTTrainer` sums its results over the
    # accumulated batches and passes the sum to `forward` as `num_items_in_batch`.
    accepts_loss_kwargs = False
    # Whether linear layers and patch kernels are initialized as in MAE.
    _has_mae_initialization = False
    # Function that converts checkpoints of other libraries. The installed package sets it.
    _convert_pretrained: ClassVar[Callable[..., dict[str, Any]] | None] = None
    # Maps names of weights that `from_pretrained` initialized randomly to their version counters (see `version_of`).
    _initialized_versions: Mapping[str, int] = MappingProxyType({})
    _is_optimized = False  # `optimize_for_inference` sets it to True
    # Value of `config.calibration_config` that was compared with the model, the calibration that applies, the label
    # names, and a detector of changes of the weights, if there can be one
    _compared: tuple[Any, ...] = (None, UNCALIBRATED, None, None)

    def __init__(self, config: HfViTConfig, *args: Any, **kwargs: Any) -> None:
        config.check()  # fields may have changed since the config was created
        super().__init__(config, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_compared": type(self)._compared}  # a copy has other tensors

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # transformers registers the outputs to record when it builds a model, but not when it unpickles one.
        _CAN_RECORD_REGISTRY.setdefault(str(type(self)), self._can_record_outputs)
        if self.base_model is self:
            self._output_capturing_hooks_installed = False
            maybe_install_capturing_hooks(self)

    @property
    def untrained_weights(self) -> list[str]:
        """Names of the weights that were not in the checkpoint and have not been loaded or trained since."""
        weights = self.state_dict(keep_vars=True)
        return [
            name
            for name in self._initialized_versions.keys() & weights.keys()
            if self._initialized_versions[name] == version_of(weights[name])
        ]

    def train(self, mode: bool = True) -> Self:
        """Switches between training and evaluation mode. Training mode raises `ValueError` in an optimized model."""
        if mode and self._is_optimized:
            raise ValueError(
                f"This {type(self).__name__} was made by optimize_for_inference and cannot be trained. Train the "
                "original model."
            )
        if mode:
            self._initialized_versions = {}  # fused optimizers change weights without increasing the version counter
            if self.config.calibration_config is not None:
                logger.warning("Training mode removes the calibration. Calibrate the trained model again.")
                self.config.calibration_config = None
        return super().train(mode)

    @property
    def calibration(self) -> HfViTCalibrationConfig:
        """Calibration fitted on held-out images for this model class, its weights and label names, or default values.

        If weights that reach the scores have changed beyond rounding, the calibration no longer applies.
        """
        given, (known, options, names, watch) = self.config.calibration_config, self._compared
        if known is not given:
            options, names = HfViTCalibrationConfig.of(given), None
        if options.model_class != type(self).__name__:
            return UNCALIBRATED
        if torch.compiler.is_compiling() or is_jit_tracing():
            return options
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return options
        if names == self.config.id2label and not (watch and watch.has_changed()):
            return options
        names = dict(self.config.id2label)
        found = fingerprint((name for _, name in sorted(names.items())), self._score_weights())
        is_new = any(not name.endswith(MASK_TOKEN) for name in self.untrained_weights)
        if is_new or has_changed(options.fingerprint, found):
            options = UNCALIBRATED
            logger.warning(f"Weights or label names changed, so {type(self).__name__} is not calibrated any more.")
        else:
            options = replace(options, fingerprint=options.fingerprint or found)
        self._compared = given, options, names, WeightWatch(self, self.base_model) if len(found) > 1 else None
        return options

    def calibrated(self, logits: Tensor, has_no_object: bool = False) -> Tensor:
        """Returns calibrated logits (..., K), see `calibrate`, or the given logits in training mode."""
        if self.training or self.config.calibration_config is None:
            return logits
        return calibrate(logits, self.calibration, has_no_object)

    def settle_calibration(self) -> None:
        """Stores what the calibration was fitted for in the configuration; removes one that no longer applies."""
        options = self.calibration
        if self._compared[0] is self.config.calibration_config:
            self.config.calibration_config = options if options.model_class else None

    def _score_weights(self) -> list[Any]:
        """Returns the weights that reach the scores; an empty list with adapters, whose merging changes weights."""
        own, base = (model.state_dict(keep_vars=True).items() for model in (self, self.base_model))
        reads_all = HEAD_CLASSES[type(self).__name__] in POOLED
        read = [weight for name, weight in own if not name.startswith(f"{self.base_model_prefix}.")]
        for name, weight in base:
            if name != MASK_TOKEN and (reads_all or is_backbone(name, self.config)):
                read.append(weight)
        return [] if self._hf_peft_config_loaded else read

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Saves the model as in transformers. A calibration that does not fit the weights is removed."""
        self.settle_calibration()
        super().save_pretrained(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initializes the weights of a module, as in transformers' ViT.

        | parameter                                           | value                                          |
        |-----------------------------------------------------|------------------------------------------------|
        | weights of linear layers and of the patches         | truncated normal of `config.initializer_range` |
        | weights of linear layers and of the patches, in MAE | uniform by fan-in and fan-out (Glorot)         |
        | biases of linear layers and of the patches          | zero                                           |
        | norms                                               | one, bias zero                                 |
        | layers of `HfViTInitialized`: classifier, tokens, … | by their method `initialize`                   |

        Source: https://github.com/google-research/vision_transformer and https://github.com/facebookresearch/deit.
        """
        if isinstance(module, HfViTInitialized):
            module.initialize(self.config.initializer_range)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if self._has_mae_initialization:
                fans = len(module.weight) + module.weight[0].numel()  # a patch kernel is treated as a linear layer
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
        """Loads a model as in `transformers`, but only from safetensors.

        If the `hf_vit` package is installed, the published checkpoints of other libraries that the README lists can be
        loaded too, by Hub name, folder or weight file. A timm weight file without a configuration also needs the name
        of the timm model: `architecture="vit_base_patch16_224"`.

        Fields of the configuration can be passed as arguments. With new labels (`num_labels=37`, `id2label={…}`), the
        head is newly initialized, and a message reports this. `image_size`, `patch_size`, `num_channels`,
        `use_cls_token`, `use_distillation_token` and `num_register_tokens` are changed after loading, by
        `apply_geometry`. No other field may change the number or shapes of the backbone weights.

        Raises:
            ValueError: if the checkpoint has an unknown format, if its weights do not fit the model, or for
                `use_safetensors=False`.
            OSError: if the folder or repository does not exist, has no weights, or a file is damaged.
        """
        name_or_path, has_new_labels = pretrained_model_name_or_path, not {"num_labels", "id2label"}.isdisjoint(kwargs)
        ignores_mismatches, head = kwargs.pop("ignore_mismatched_sizes", False), kwargs.pop("head", None)
        wants_info = kwargs.pop("output_loading_info", False)
        geometry: dict[str, Any] = {}
        saved: dict[str, Any] = {}
        if name_or_path is not None:
            try:
                saved = read_config(name_or_path, **kwargs)
            except OSError:
                if cls._convert_pretrained is None:
                    raise
                pass  # the converter below opens checkpoints of other libraries or raises an error
            geometry = pop_geometry(kwargs, saved)
            choose_head(cls, kwargs, saved, head)
            if saved.get("model_type") != cls.config_class.model_type:
                with pausing_garbage_collection():
                    kwargs, name_or_path = cls._convert(name_or_path, geometry, **kwargs), None
        if kwargs.get("use_safetensors") is False:
            raise ValueError(
                "Weights are loaded only from safetensors: pickles can run code. Convert the weights to safetensors "
                "first."
            )
        # transformers ignores mismatched shapes; `check_weights` below reports them with the names of the weights.
        kwargs |= {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        with pausing_garbage_collection(), naming_checkpoint(pretrained_model_name_or_path):
            model, info = super().from_pretrained(name_or_path, *args, **kwargs)
        if pretrained_model_name_or_path is not None:
            if not ignores_mismatches:
                if name_or_path is not None:  # the Auto classes store new labels in `config`
                    has_new_labels |= model.config.num_labels != len(saved.get("id2label", DEFAULT_LABELS))
                check_weights(model, info, pretrained_model_name_or_path, has_new_labels)
            model.config._name_or_path = str(pretrained_model_name_or_path)
            drawn = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
            weights = model.state_dict(keep_vars=True)
            model._initialized_versions = {key: version_of(weights[key]) for key in drawn & weights.keys()}
        if geometry:
            apply_geometry(model, **geometry)
        model.settle_calibration()
        loaded: Any = (model, info) if wants_info else model  # typed as Any, as in transformers
        return loaded

    @classmethod
    def _convert(cls, name_or_path: str | os.PathLike[str], geometry: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Returns arguments that load a checkpoint of another library, including `config` and `state_dict`."""
        if cls._convert_pretrained is None:
            raise ValueError(
                f"{str(name_or_path)!r} is a checkpoint of another library. Install the package hf-vit with "
                f"{INSTALL_COMMAND}, and load it with hf_vit.{cls.__name__}.from_pretrained."
            )
        if kwargs.pop("variant", None) is not None:
            raise ValueError(f"{str(name_or_path)!r} cannot be converted with the argument variant. Omit variant.")
        arguments: dict[str, Any] = cls._convert_pretrained(name_or_path, geometry, cls, **kwargs)
        return arguments

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Adds a PEFT adapter, as in transformers.

        Raises:
            ValueError: if the model has none of the `target_modules`; the message lists its modules.
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
                    f"{error}. With the installed version of peft, use peft.get_peft_model(model, config)."
                ) from error
            raise ValueError(
                f"{error} In this model, the linear layers of attention and MLP are {', '.join(ends)}. Query, key and "
                "value are one layer, attention.qkv, so an adapter cannot change only some of them."
            ) from error

    def run_backbone(self, pixel_values: Tensor | None, encoder_outputs: Any = None, **kwargs: Any) -> Any:
        """Returns the outputs of the backbone, a `BaseModelOutputWithPooling`.

        Every task model with a head on the backbone accepts `encoder_outputs`, the outputs of `HfViTModel` for the
        same images with `output_hidden_states=True`. It then runs only its head, so that several heads can share the
        backbone. `kwargs` are arguments of `HfViTModel`. They do not change given outputs, except that hidden states
        are returned only if requested.
        """
        if encoder_outputs is None:
            return self.base_model(pixel_values, return_dict=True, **kwargs)
        states = encoder_outputs.hidden_states if self.requested_hidden_states(**kwargs) else None
        return type(encoder_outputs)(**{**encoder_outputs, "hidden_states": states})

    def wants_attentions(self, output_attentions: bool | None = None, **_: Any) -> bool:
        """Returns whether attention weights are requested by the argument or, if it is None, by `config`."""
        wanted = self.config.output_attentions if output_attentions is None else output_attentions
        if wanted and self.config._attn_implementation != "eager" and not torch.compiler.is_compiling():
            logger.warning_once(
                f"{self.config._attn_implementation!r} attention returns no weights, so output_attentions=True uses "
                "eager attention."
            )
        return bool(wanted)

    def requested_hidden_states(self, output_hidden_states: Any = None, **_: Any) -> Any:
        """Returns a flag or indices of the hidden states that the argument or, if it is None, `config` requests."""
        return self.config.output_hidden_states if output_hidden_states is None else output_hidden_states

    # The following methods have the same names and arguments as in timm and DINOv2.

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """Token width, patch size in pixels and module name of each block, as in timm."""
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
        """Returns the patch tokens after selected blocks, as DINOv2 and timm do.

        Args:
            pixel_values: Images (B, C, H, W).
            n: Number of blocks, counted from the last one, or a list of block indices from 0; negative indices count
                from the end.
            reshape: Whether to return maps (B, D, h, w) instead of tokens (B, N, D).
            return_prefix_tokens: Whether to return pairs of the patches and the prefix tokens (B, P, D).
            norm: Whether to apply the final norm. It has no effect with `config.norm_after_pooling`.

        Returns:
            A list with one entry per block, in the order of the blocks.

        Raises:
            ValueError: if `n` selects no block, or one that the model does not have.
        """
        model, config = self.base_model, self.config
        depth = config.num_hidden_layers
        wanted = range(-n, 0) if isinstance(n, int) else n
        if not wanted or not all(-depth <= number < depth for number in wanted):
            raise ValueError(f"n={n!r} must be a number of blocks, 1 to {depth}, or indices from 0 to {depth - 1}.")
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
        """Returns the tokens (B, L, D) of images (B, C, H, W) after the final norm; for `kwargs`, see `HfViTModel`."""
        tokens: Tensor = self.base_model(pixel_values, return_dict=True, **kwargs).last_hidden_state
        return tokens

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Pools tokens (B, L, D) of `forward_features` and classifies them.

        Returns:
            The logits (B, num_labels). With `pre_logits` or for `HfViTModel`, the pooled vectors (B, D).

        Raises:
            ValueError: if the model is neither `HfViTModel` nor `HfViTForImageClassification`.
        """
        classifier = self.get_classifier()
        pooled: Tensor = self.base_model.pool(features)
        return pooled if pre_logits else classifier(pooled)

    def get_classifier(self) -> nn.Module:
        """Returns the layer that computes logits from pooled vectors. For `HfViTModel`, it is an identity.

        Raises:
            ValueError: if the model is neither `HfViTModel` nor `HfViTForImageClassification`.
        """
        raise ValueError(f"{type(self).__name__} has no classifier of whole images. Use HfViTForImageClassification.")

    def reset_classifier(self, num_labels: int) -> None:
        """Replaces the classifier by a new one; supported only by `HfViTForImageClassification`."""
        raise ValueError(f"{type(self).__name__} has no classifier to replace. Use HfViTForImageClassification.")

    def get_position_embeddings(self) -> Tensor | None:
        """Returns the position table (1, P + N, D) at the native grid; None if the model has none."""
        table: Tensor | None = self.base_model.embeddings.position_embeddings
        return table

    def resize_position_embeddings(self, new_image_size: Size) -> None:
        """Sets the native image size in pixels and resamples the position table to its patch grid.

        Models accept other image sizes without this call; the table is then resampled in each forward pass.
        """
        apply_geometry(self, image_size=new_image_size)

    def resize_patch_embeddings(self, new_patch_size: Size) -> None:
        """Resizes the patch kernels so that images enlarged by the same factor give nearly the same tokens.

        The image size is kept, so the grid and its position table change. `apply_geometry` can change both sizes.
        """
        apply_geometry(self, patch_size=new_patch_size)

    def resize_input_channels(self, num_channels: int) -> None:
        """Changes the number of image channels. Also change `num_channels`, mean and std of the image processor."""
        apply_geometry(self, num_channels=num_channels)

    def resize_prefix_tokens(
        self,
        use_cls_token: bool | None = None,
        num_register_tokens: int | None = None,
        pooling: Literal["cls", "mean"] | None = None,
    ) -> None:
        """Adds randomly initialized prefix tokens, or removes the last prefix tokens; None leaves a field unchanged.

        Args:
            use_cls_token: Whether the model has a CLS token.
            num_register_tokens: Number of register tokens.
            pooling: New pooling, for example "mean" if the CLS token is removed.

        Raises:
            ValueError: if the values are inconsistent; the message names valid ones.
        """
        apply_geometry(self, use_cls_token=use_cls_token, num_register_tokens=num_register_tokens, pooling=pooling)

    @classmethod
    def is_remote_code(cls) -> bool:
        """Returns False, so that transformers does not copy the code; `HfViTConfig.save_pretrained` already does."""
        return False
