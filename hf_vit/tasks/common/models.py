"""Create or load the initial model of a training run and its image processor.

In shapes, M is the number of patches, E the number of values of a patch, D the hidden size, C the number of channels,
(H, W) the image size, and K the number of principal directions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import are_progress_bars_disabled
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel
from transformers.utils import logging

from ...convert import load_image_processor, load_processor
from ...model.adapt_inputs import apply_geometry
from ...model.configuration_hf_vit import SIZES, HfViTConfig, check_fields, to_pair
from ...model.image_processing_hf_vit import HfViTImageProcessor
from ...model.nested_options import tuples_to_lists
from ...model.pretrained import HfViTPreTrainedModel, check_trained, check_weights, find_head_of, read_config
from ...model.processing_hf_vit import HfViTProcessor
from ...model.task_configurations import MODEL_TASK_CONFIGS, TASK_CONFIGS
from .arguments import TaskArguments


logger = logging.get_logger(__name__)
Model = TypeVar("Model", bound=HfViTPreTrainedModel)
# Classes of head options, by the field of `HfViTConfig` that contains the options
HeadOptions = Mapping[str, Mapping[str, Any]]
# Prefixes of the names of head weights
HEADS = ("text_model.", *(f"{name.removesuffix('_config')}_head." for name in TASK_CONFIGS))
# Head weights with one row per class, and hidden layers of classifiers. If the classes change, only these head weights
# are initialized anew.
CLASS_WEIGHTS = (
    "classifier.",
    ".class_tokens",
    ".mask_norm.",
    ".class_head.",
    "keypoint_head.classic.predictor.",
    "keypoint_head.simple.predictor.",
)
# Head weights that exist for only one contrastive loss. If the loss changes, all other head weights are reused.
LOSS_WEIGHTS = ("contrastive_head.logit_",)
# Head weights with one entry per query. If the number of queries changes, all other head weights are reused.
QUERY_WEIGHTS = (".queries.", ".mid_query_embeddings", ".query_features.", ".query_boxes.", ".proposal_heads.")
NULL_VARIANCE = 1e-6  # minimum variance of a direction; it is below the rounding error of 8-bit pixels
NUM_IMAGES = 256  # number of images from which patches are sampled
LEAST_VARIANCE = 1e-2  # minimum variance of a principal direction; smaller variances are noise and are not amplified


def load_model(
    model_class: type[Model],
    args: TaskArguments,
    names: Sequence[str] = (),
    facts: HeadOptions | None = None,
    fresh: HeadOptions | None = None,
    *,
    use_distillation_token: bool = False,
) -> tuple[Model, BaseImageProcessor]:
    """Return the model to train, either a saved model of any class or a new model, and its image processor.

    If a saved model has the classes `names` in another order, the rows of its head are reordered. If it has other
    classes, all weights with one row per class are initialized anew.
    `facts` are head options determined by the data, and `fresh` are options of new heads. Options in `args` take
    precedence over `facts`, `fresh` and `use_distillation_token`.
    """
    facts, fresh, overrides = facts or {}, fresh or {}, args.overrides()
    try:
        if args.model_name_or_path is None:
            token = {"use_distillation_token": True} if use_distillation_token else {}
            options = token | overrides | join_options(fresh, facts, overrides) | name_labels(names)
            config = HfViTConfig.from_preset(args.preset or "small", **options)
            model = model_class(config)
            return model, HfViTImageProcessor.for_model(model, **color_options(args))
        model, processor = tune(model_class, args, list(names), facts, fresh)
        if colors := color_options(args):
            processor = type(processor).from_dict(processor.to_dict() | colors)
        lacks_token = use_distillation_token and not model.config.use_distillation_token
        if lacks_token and "use_distillation_token" not in overrides:
            logger.warning("The saved model has no distillation token. A new token and a new head for it are added.")
            apply_geometry(model, use_distillation_token=True)
        model.config._name_or_path = args.model_name_or_path  # models built from a configuration have no name
        return model, processor
    except StrictDataclassError as error:
        raise misfit(error) from error


def color_options(args: TaskArguments) -> dict[str, Any]:
    """Return the options for color normalization that the user gave, as image processor options."""
    given = {"image_mean": args.image_mean, "image_std": args.image_std}
    options: dict[str, Any] = {
        name: values if len(values) > 1 else values[0] for name, values in given.items() if values
    }
    return {**options, "do_normalize": True} if options else {}


def misfit(error: StrictDataclassError) -> ValueError:
    """Convert the transformers error for a configuration field of the wrong type into a one-line `ValueError`."""
    return ValueError(f"The configuration is invalid: {' '.join(str(error).split())}")


def plan_config(args: TaskArguments) -> dict[str, Any]:
    """Return the configuration fields of the model that are known before the data is loaded.

    For a new model or a model of this package, these are all fields; for other models, the fields that the user gave.

    Raises:
        OSError: If the saved model does not exist.
        ValueError: If the fields are inconsistent.
    """
    overrides = args.overrides()
    given = {
        name: value for name, value in overrides.items() if name != "text_config"
    }  # text_config depends on the tokenizer, which is loaded later
    try:
        if args.model_name_or_path is None:
            fields: dict[str, Any] = HfViTConfig.from_preset(args.preset or "small", **given).to_dict()
            return fields
        check_fields(overrides)
        saved = read_config_of(args.model_name_or_path)
        if saved.get("model_type") != HfViTConfig.model_type:
            return given
        fields = HfViTConfig.from_dict(saved, **given).to_dict()
        return fields
    except StrictDataclassError as error:
        raise misfit(error) from error


def check_architecture(checkpoint: str, model_class: type[HfViTPreTrainedModel], args: TaskArguments) -> None:
    """Raise `ValueError` unless a checkpoint has the requested class and architecture."""
    given, planned = args.overrides(), plan_config(args)
    known = {name for name in HfViTConfig.__annotations__ if not name.startswith("_")} - TASK_CONFIGS.keys()
    if "use_distillation_token" not in given:
        known -= {"use_distillation_token"}  # distillation may have added this token
    fields = {name: planned[name] for name in known & planned.keys()}
    compare_configs(checkpoint, model_class, fields | {task: given[task] for task in TASK_CONFIGS.keys() & given})


def check_head(checkpoint: str, model: PreTrainedModel) -> None:
    """Raise `ValueError` unless a checkpoint has the classes and head options of `model`."""
    tasks = MODEL_TASK_CONFIGS.get(type(model).__name__, ())
    heads = {task: TASK_CONFIGS[task].of(vars(model.config)[task]).to_full_dict() for task in tasks}
    compare_configs(checkpoint, type(model), {"id2label": model.config.id2label, **heads})


def compare_configs(checkpoint: str, model_class: type[PreTrainedModel], fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless a checkpoint has the given model class and configuration fields."""
    saved = read_config_of(checkpoint)
    then = HfViTConfig.from_dict(saved).to_dict()
    # A model with several heads is saved with a second class, which the segmentation pipeline opens.
    pairs = {"class": ((saved.get("architectures") or [])[:1], [model_class.__name__])}
    for name, value in fields.items():
        if name in TASK_CONFIGS:
            options = TASK_CONFIGS[name].of(saved.get(name)).to_full_dict()
            pairs |= {key: (options[key], tuples_to_lists(option)) for key, option in value.items()}
        else:
            pairs[name] = comparable(name, then[name]), comparable(name, value)
    if differing := [f"{name} {old} then, {new} now" for name, (old, new) in sorted(pairs.items()) if old != new]:
        raise ValueError(
            f"The training run of {checkpoint} was started with another architecture ({'; '.join(differing)}). Resume "
            "with the same model and data, or start a new run in another --output_dir."
        )


def comparable(name: str, value: Any) -> Any:
    """Convert a field value for comparisons: an image or patch size to a pair, a tuple to a list."""
    return list(to_pair(value)) if name in SIZES and value is not None else tuples_to_lists(value)


def join_options(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Merge several mappings of head options; later mappings take precedence."""
    tasks = [task for task in TASK_CONFIGS if any(level.get(task) for level in levels)]
    return {task: {name: x for level in levels for name, x in (level.get(task) or {}).items()} for task in tasks}


def tune(
    model_class: type[Model], args: TaskArguments, names: list[str], facts: HeadOptions, fresh: HeadOptions
) -> tuple[Model, BaseImageProcessor]:
    """Return a saved model for the classes `names`, and its image processor; see `load_model`."""
    assert args.model_name_or_path is not None
    overrides = args.overrides()
    model, left_out, is_fresh = open_with_options(model_class, args.model_name_or_path, overrides)
    known, weights, saved = names_of(model), model.state_dict(), model.config.to_dict()
    has_new_order = bool(names) and known != names
    if has_new_order:
        order = [known.index(name) for name in names] if has_same_names(known, names) and not is_fresh else []
        weights = reorder_classes(weights, order)
        if not left_out:  # otherwise, `open_with_options` has reported that the head is replaced
            logger.warning(describe_new_classes(known, names, is_fresh))
        left_out += () if order else CLASS_WEIGHTS
        loss = saved.get("segmentation_config") or {}
        if class_weights := loss.get("class_weights"):
            loss["class_weights"] = [class_weights[index] for index in order] or None
    if is_fresh and fresh:
        facts, left_out = join_options(fresh, facts), HEADS
    if has_new_order or left_out or facts:
        fields = {**saved, **join_options(saved, facts, overrides), **name_labels(names)}
        # Pass the attention implementation, because it is not a saved field.
        config = HfViTConfig.from_dict(fields, attn_implementation=model.config._attn_implementation)
        weights = {name: weight for name, weight in weights.items() if not any(part in name for part in left_out)}
        with without_load_report():
            model = model_class.from_pretrained(None, config=config, state_dict=weights)
    channels, patch = model.config.num_channels, model.config.patch_size
    size = overrides.get("image_size")
    head = find_head_of(model_class, read_config_of(args.model_name_or_path))
    located: dict[str, Any] = {} if head is None else {"head": head}
    return model, load_image_processor(args.model_name_or_path, size, channels, patch, given=overrides, **located)


def names_of(model: PreTrainedModel) -> list[str]:
    """Return the class names of a model in the order of its logits."""
    return [model.config.id2label[index] for index in range(len(model.config.id2label))]


def has_same_names(known: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether a model with the classes `known` has exactly the classes `names`, in any order.

    Lists with duplicate names are the same only in the same order.
    """
    return known == names or (sorted(known) == sorted(names) and len(set(names)) == len(names))


def reorder_classes(weights: Mapping[str, Tensor], order: Sequence[int]) -> dict[str, Tensor]:
    """Return weights in which row i of a class is the previous row `order[i]`; a last row for no object stays last."""

    def reorder(name: str, weight: Tensor) -> Tensor:
        layers, _, number = name.rpartition(".")[0].rpartition(".layers.")
        is_hidden = number.isdecimal() and f"{layers}.layers.{int(number) + 1}.weight" in weights
        if is_hidden or not any(part in name for part in CLASS_WEIGHTS):
            return weight
        dim = 1 if name.endswith(".class_tokens") else 0
        rows = [*order, *range(len(order), weight.shape[dim])]
        return weight.index_select(dim, torch.tensor(rows, device=weight.device))

    return {name: reorder(name, weight) for name, weight in weights.items()}


def describe_new_classes(known: Sequence[str], names: Sequence[str], is_fresh: bool) -> str:
    """Return a message about a saved model with the classes `known`, which is trained on the classes `names`.

    If `is_fresh` is set, the saved model has no head.
    """
    if is_fresh:
        return f"The saved model has no head. A new head is added for {shorten(names)}."
    if has_same_names(known, names):
        return "The saved model has the classes of the data in another order. Its head is reordered by class name."
    return (
        f"The saved model has other classes ({shorten(known)}), {len({*known} & {*names})} of which are among the "
        f"{len(names)} classes of the data ({shorten(names)}). The weights of all classes are initialized anew, "
        "because the scores of trained and new classes would not be comparable."
    )


@contextmanager
def without_load_report(hides_warnings: bool = True) -> Iterator[None]:
    """Context manager that hides loading reports and progress bars while a checkpoint is loaded for a second time.

    The warnings of this module, for example about a new head, are also hidden if `hides_warnings` is set.
    """
    names = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel")
    levels = {each: each.level for each in map(logging.get_logger, names + (__name__,) * hides_warnings)}
    # In transformers, enabling progress bars also enables those of huggingface_hub, which the user may have disabled.
    shows_progress = logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    for each in levels:
        each.setLevel(logging.ERROR)
    if shows_progress:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        for each, level in levels.items():
            each.setLevel(level)
        if shows_progress:
            logging.enable_progress_bar()


def open_with_options(
    model_class: type[Model], name_or_path: str, overrides: dict[str, Any]
) -> tuple[Model, tuple[str, ...], bool]:
    """Open a saved or published model, optionally with different head options.

    The function also returns the prefixes of saved weights that do not fit the requested head, and whether all weights
    of the head are missing in the checkpoint.
    """
    options = {task: overrides[task] for task in TASK_CONFIGS if task in overrides}
    check_fields(overrides)
    allowed = {"ignore_mismatched_sizes": True} if options else {}
    model, info = load_with_info(model_class, name_or_path, {**overrides, **allowed})
    check_trained(model, name_or_path)
    of_own_head = {name for name, _ in model.named_parameters() if name.startswith((*HEADS, "classifier."))}
    is_fresh = of_own_head <= set(info["missing_keys"])
    if not options:
        return model, (), is_fresh
    of_head, encoder = [], {}
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        # A mismatched key is a tuple of a weight name and two shapes. A missing or unexpected key is a weight name.
        named = [(key if isinstance(key, str) else key[0], key) for key in info[kind]]
        of_head += [name for name, _ in named if name.startswith(HEADS)]
        encoder[kind] = [key for name, key in named if not name.startswith(HEADS)]
    check_weights(model, encoder, name_or_path, has_new_labels=False)
    saved = (model.state_dict().keys() - set(info["missing_keys"])) | set(info["unexpected_keys"])
    has_saved_head = any(name.startswith(HEADS) for name in saved)
    if not has_saved_head or all(name.startswith(LOSS_WEIGHTS) for name in of_head):
        return model, (), is_fresh
    if all(any(part in name for part in QUERY_WEIGHTS) for name in of_head):
        logger.warning(
            f"The queries of the saved model do not match {options}. They are replaced by new queries; the rest of "
            "the head is kept."
        )
        return model, (), is_fresh
    logger.warning(f"The head of the saved model does not match {options}. It is replaced by a new head.")
    return model, tuple(head for head in HEADS if any(name.startswith(head) for name in of_head)), True


def open_processor(
    model: PreTrainedModel, name_or_path: str, head: str | None = None, has_texts: bool = False
) -> BaseImageProcessor | HfViTProcessor:
    """Return the image processor of a trained model or, if `has_texts` is set, its processor with a tokenizer.

    Raises:
        OSError: If the processor does not exist.
        ValueError: If a tokenizer is required, but there is none.
    """
    if not has_texts:
        head = find_head_of(type(model), read_config_of(name_or_path), head)
        located: dict[str, Any] = {} if head is None else {"head": head}
        return load_image_processor(name_or_path, patch_size=model.config.patch_size, **located)
    processor = load_processor(model, name_or_path, patch_size=model.config.patch_size)
    if not isinstance(processor, HfViTProcessor):
        raise ValueError(
            f"{name_or_path} has no tokenizer. Save the processor of the model there with save_pretrained."
        )
    return processor


def open_trained(model_class: type[Model], name_or_path: str, head: str | None = None) -> Model:
    """Open a saved or published model, or a head of a multi-task model; raise `ValueError` if it is not trained."""
    model, info = load_with_info(model_class, name_or_path, {} if head is None else {"head": head})
    check_trained(model, name_or_path, info["missing_keys"])
    return model


def load_with_info(
    model_class: type[Model], name_or_path: str, overrides: dict[str, Any]
) -> tuple[Model, dict[str, Any]]:
    """Open a saved or published model without checks. Return the model and its missing and unexpected weights.

    Raises:
        OSError: If the saved model does not exist.
        ValueError: If it has another model type, or an override changes the shape of its weights.
    """
    with naming(name_or_path):
        model, info = model_class.from_pretrained(name_or_path, output_loading_info=True, **overrides)
    return model, info


def read_config_of(name_or_path: str, head: str | None = None) -> dict[str, Any]:
    """Return the content of config.json, see `read_config`; raise `OSError` if it is missing."""
    with naming(name_or_path):
        return read_config(name_or_path, head=head)


@contextmanager
def naming(name_or_path: str) -> Iterator[None]:
    """Context manager that adds the name of the model to every `OSError`."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{name_or_path!r} is not a model: no folder of a saved model, weight file, or model on the Hub could be "
            f"read. {error}"
        ) from error


def name_labels(names: Sequence[str]) -> dict[str, Any]:
    """Return the configuration fields that contain the class names; an empty dictionary if there are no classes."""
    if not names:
        return {}
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def shorten(names: Sequence[str], count: int = 20) -> str:
    """Return a text that lists at most `count` of the names."""
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def input_size(processor: BaseImageProcessor) -> tuple[int, int]:
    """Return the height and width in pixels of processed images; raise `ValueError` if images have several sizes."""
    size = processor.crop_size if processor.do_center_crop else processor.size
    if not size.height or not size.width:
        raise ValueError(
            f"The image processor keeps the aspect ratio ({dict(size)}), so images have different sizes and do not "
            "form a batch. Set the height and width of training images, for example --image_size 224."
        )
    return size.height, size.width


def describe_whole_images(config: HfViTConfig, keep_aspect_ratio: bool) -> str:
    """Return a description of the size to which `whole_image_processor` resizes images."""
    height, width = to_pair(config.image_size)
    whole = f"their shorter side {min(height, width)}" if keep_aspect_ratio else f"{height} x {width}"
    return f"{height} x {width} pixels in training, in evaluations whole images, {whole}"


def principal_directions(parts: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the principal component analysis of patches (M, E), given in several parts, in float64 on the CPU.

    Returns:
        The mean (E,), variances (E,) in ascending order, and directions (E, E), one per column.

    Raises:
        ValueError: If there are no patches, or a pixel is infinite or NaN.
    """
    count, total, products = 0, torch.zeros(()), torch.zeros(())
    for part in parts:  # convert one part at a time, because all patches together may take gigabytes
        patches = part.to("cpu", torch.float64)  # (M, E)
        count, total, products = count + len(patches), total + patches.sum(dim=0), products + patches.T @ patches
    if not (count and products.isfinite().all()):
        found = "infinite or NaN pixels" if count else "no patches"
        raise ValueError(f"The training images have {found}. Check the images.")
    mean = total / count
    return mean, *torch.linalg.eigh(products / count - mean.outer(mean))


@torch.no_grad()
def whiten_patches(model: PreTrainedModel, images: Iterable[Tensor], seed: int) -> None:
    """Initialize the patch embedding of a new model with whitened principal directions of image patches.

    Neighboring pixels are similar, so that random weights mostly extract the mean color of a patch. If principal
    directions are divided by their standard deviation, details have the same magnitude as colors from the first step
    on. A random rotation distributes the directions over all D channels. If D < E, the directions of smallest variance
    are omitted; directions without variance, such as the colors of gray images, are always omitted.

    Args:
        model: Model with an `HfViTModel` as base.
        images: Model inputs (C, H, W). H and W are multiples of the patch size.
        seed: Seed of the rotation.

    Raises:
        ValueError: If there are no patches, or a pixel is infinite or NaN.

    Source: whitening as a fixed first layer is from https://arxiv.org/abs/2404.00498, after
    https://myrtle.ai/learn/how-to-train-your-resnet-8-bag-of-tricks/.
    """
    projection = model.base_model.embeddings.patch_embeddings.projection
    kernel = projection.weight.shape[2:]
    mean, variances, directions = principal_directions(
        F.unfold(image[None], kernel, stride=kernel)[0].T for image in images
    )
    width = len(projection.weight)
    kept = min(width, int((variances > NULL_VARIANCE).sum()))  # K
    if kept == 0:
        return  # keep the random weights if all patches are equal
    whitening = (directions / (variances + LEAST_VARIANCE).sqrt())[:, -kept:].T  # (K, E), largest variances only
    draws = torch.randn(width, kept, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rotation = torch.linalg.qr(draws).Q * (width / kept) ** 0.5  # (D, K), scaled so that all channels have variance 1
    kernels = rotation @ whitening  # (D, E)
    projection.weight.copy_(kernels.view_as(projection.weight))
    if projection.bias is not None:
        projection.bias.copy_(-kernels @ mean)
