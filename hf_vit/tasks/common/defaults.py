"""Default hyperparameters by task, data and device. defaults.yaml contains the values, and this module the rules.

The module `budget` chooses from the candidate sizes of each task.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...model.configuration_hf_vit import to_pair
from .facts import Facts


Options = dict[str, Any]


class Size(NamedTuple):
    """Size of model and images: width, depth, and sides of image and patch in pixels.

    Width and depth are None for a saved model.
    """

    hidden_size: int | None
    num_layers: int | None
    image_size: int
    patch_size: int

    @property
    def num_patches(self) -> int:
        """Number of patches of an image of this size."""
        return (self.image_size // self.patch_size) ** 2

    def bounded(self, native_size: int) -> "Size":
        """Limit the image size to `native_size`, because upscaling adds no information; keep about as many patches."""
        if native_size >= self.image_size:
            return self
        patch = max(1, -(-native_size * self.patch_size // self.image_size))
        return self._replace(image_size=max(native_size // patch, 1) * patch, patch_size=patch)

    def fixed(self, given: Mapping[str, Any], largest_side: int) -> "Size":
        """Return this size with given fields of `HfViTConfig` and, if possible, about as many patches.

        Images have at most `largest_side` pixels per side, rounded to whole patches.
        """
        patch = given.get("patch_size")
        image = min(to_pair(given.get("image_size") or (self.image_size if patch is None else largest_side)))
        if patch is None:
            most = max(1, image * self.patch_size // self.image_size)
            patch = next(side for side in range(most, 0, -1) if image % side == 0)
        patch = max(to_pair(patch))
        image = image if "image_size" in given else max(image // patch, 1) * patch
        width, depth = given.get("hidden_size", self.hidden_size), given.get("num_hidden_layers", self.num_layers)
        return Size(width, depth, image, patch)

    def config(self) -> Options:
        """Return the fields of `HfViTConfig` of a new model, except the image size."""
        if self.hidden_size is None:
            return {}
        return {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": max(4, self.hidden_size // 64),
            "intermediate_size": 4 * self.hidden_size,
            "patch_size": self.patch_size,
        }


@dataclass(frozen=True)
class TaskDefaults:
    """Default hyperparameters of a task: values from defaults.yaml, and two functions.

    Args:
        batch: Number of images per step.
        ladder: Sizes of model and images for training from scratch, in ascending order.
        scratch: Training options for training from scratch.
        config: Fields of `HfViTConfig` for training from scratch.
        steps: Number of steps that must fit into a time budget for a size to be preferred to a smaller one.
        tuned: Training options for fine-tuning.
        tuned_sides: Candidate image sizes in pixels for a saved model, in ascending order.
        tuned_steps: Number of steps that must fit into a time budget for one of `tuned_sides` to be preferred.
        few: Additional training options for fine-tuning a large backbone on few images.
        stores: Number of last blocks of a published backbone that are trained if there is no GPU. The features of all
            other blocks, which are frozen, are stored. None trains all blocks.
        probes: Whether a new head on a saved backbone is initialized as a linear probe.
        shares_head: Whether the options returned by `head` also apply if the user chooses another kind of head.
        enlarges: Whether images that are smaller than the chosen image size are upscaled.
        head: Function that returns the options of a new head by field of `HfViTConfig`, given the facts and the width
            of the model. Width None selects the default head.
        augmentation: Function that returns the augmentation options, given the facts, the number of epochs, and the
            side of a patch relative to the shorter side of an image (None if unknown).
    """

    batch: int
    ladder: tuple[Size, ...]
    scratch: Mapping[str, Any]
    config: Mapping[str, Any]
    steps: int = 1000
    tuned: Mapping[str, Any] = field(default_factory=dict)
    tuned_sides: tuple[int, ...] = (112, 168, 224, 336, 448)
    tuned_steps: int = 100
    few: Mapping[str, Any] = field(default_factory=dict)
    stores: int | None = None
    probes: bool = False
    shares_head: bool = False
    enlarges: bool = False
    head: Callable[[Facts, int | None], Options] = lambda facts, width: {}
    augmentation: Callable[[Facts, float, float | None], Options] = lambda facts, epochs, patch_share: {}

    def sizes(self, facts: Facts, given: Mapping[str, Any]) -> list[Size | None]:
        """Return the candidate sizes in ascending order; None stands for the size of a saved model.

        Args:
            facts: Properties of data, model and device.
            given: Fields of `HfViTConfig` that the user gave.
        """
        if facts.start == "scratch":
            sizes = []
            for size in self.ladder:
                side = size.image_size if self.enlarges else min(size.image_size, facts.native_size)
                sizes.append(size.bounded(side).fixed(given, side))
        elif "image_size" in given or facts.image_size is None or facts.patch_size is None:
            return [None]
        else:
            patch = facts.patch_size
            sides = dict.fromkeys(round(side / patch) * patch for side in self.tuned_sides)
            largest = math.inf if self.enlarges else max(facts.native_size + patch, next(iter(sides)))
            sizes = [Size(None, None, side, patch) for side in sides if side <= min(largest, facts.image_size)]
            sizes = sizes or [Size(None, None, facts.image_size, patch)]
        share = facts.object_share or 1.0
        visible = [size for size in sizes if share * size.image_size >= LEAST_OBJECT] or sizes[-1:]
        return list(dict.fromkeys(visible))


# Constants for default hyperparameters that several tasks share

WIDEST_START = 384  # models up to this width are initialized with a larger initializer_range
TUNED_RATE, TUNED_WIDTH = 1e-4, 768  # learning rate of AdamW at width 768; narrower models use larger rates
PROBED_RATE = 1.5e-5  # learning rate if the head is initialized as a linear probe
FROZEN_RATE = 1e-3  # learning rate of a head on a fully frozen backbone
TUNED_LAYER_DECAY = 0.75
FRESH_HEAD_RATE = 5.0  # factor of the learning rate (head_lr_multiplier) of new heads
MOST_EAGER_PATCHES = 400  # maximum number of patches for eager attention, which is faster than SDPA on some CPUs
FEW_IMAGES = 200  # with fewer images than this, only the last blocks of a large backbone are trained
LARGE_WIDTH = 384  # minimum width of large backbones, which are partly frozen
LEAST_OBJECT = 16  # minimum side in pixels of most objects in the resized image
MOST_EPOCHS, LEAST_EPOCHS = 300, 10
TOO_FEW_STEPS = 300  # training from scratch with fewer steps than this causes a warning
GPU_BATCH, GPU_STEPS = 4, 5  # factors by which batch size and steps are increased on a GPU
EVALUATIONS, CHECKPOINTS = 10, 4
SOME_EPOCHS, MANY_EPOCHS = 30, 150  # minimum epochs for moderate and for strong augmentation
MOST_ENLARGED = 2.0  # maximum scale of training images, because larger scales crop too much of an image
CROPPED_EPOCHS = 4  # minimum number of epochs for random shifts of thumbnails
SMALL_NATIVE = 40  # maximum side in pixels of thumbnails and symbols


def augment_classes(facts: Facts, epochs: float, patch_share: float | None) -> Options:
    """Return the augmentation options of a classifier; more epochs need stronger augmentation."""
    if facts.is_gray and facts.native_size <= SMALL_NATIVE:  # do not flip images of symbols such as digits
        return {"min_crop_scale": 1.0, "horizontal_flip": 0.0, "auto_augment": "affine", "random_erasing": 0.0}
    crop: Options = {"min_crop_scale": 0.4}
    if facts.native_size <= SMALL_NATIVE:
        crop = {"min_crop_scale": 1.0, "crop_padding": 4 if epochs >= CROPPED_EPOCHS else 0}
    if epochs < SOME_EPOCHS:
        return {**crop, "auto_augment": "none", "random_erasing": 0.0}
    mixed = {"mixup_alpha": 0.2, "cutmix_alpha": 1.0} if epochs >= MANY_EPOCHS else {}
    regularized: Options = {"random_erasing": 0.1, "label_smoothing_factor": 0.1, **mixed}
    if facts.is_regression:  # disable label smoothing, because regression has no classes
        regularized = {"random_erasing": 0.1}
    return {**crop, "auto_augment": "trivialaugment", **regularized}


def detection_head(facts: Facts, width: int | None) -> Options:
    """Return detection head options, with queries in proportion to the number of objects; a smaller head on CPUs."""
    queries = min(300, max(30, -(-facts.max_objects * 3 // 20) * 10))  # 1.5 queries per object, rounded up to tens
    if facts.has_gpu:
        return {"detection_config": {"num_queries": max(100, queries)}}
    small = {"hidden_size": 128, "num_attention_heads": 4, "num_groups": 4, "scale_factors": [2, 1]}
    return {"detection_config": {"num_queries": queries, **small}}


def universal_head(facts: Facts, width: int | None) -> Options:
    """Return the options of a universal segmentation head: fewer queries and sampled points if there is no GPU."""
    if facts.has_gpu:
        return {}
    queries = min(100, max(20, -(-facts.max_objects * 3 // 20) * 10))
    return {"universal_segmentation_config": {"num_queries": queries, "num_blocks": 3, "train_num_points": 1024}}


def without_gpu(head: Callable[[int], Options]) -> Callable[[Facts, int | None], Options]:
    """Return a rule that gives the head options `head(width)` if there is no GPU, and the defaults otherwise."""
    return lambda facts, width: {} if width is None or facts.has_gpu else head(width)


def depth_head(width: int) -> Options:
    """Return depth head options. The levels of the head are at most as wide as the model."""
    widths = [width // part for part in (8, 4, 2, 1)]
    return {"depth_config": {"neck_hidden_sizes": widths, "fusion_hidden_size": max(32, width // 6)}}


def small_tower(width: int) -> Options:
    """Return the options of a small transformer with two blocks."""
    return {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4 * width}


def pixel_decoder(field: str, part: int) -> Callable[[int], Options]:
    """Return a function that gives the options of a pixel decoder whose width is the model width divided by `part`."""

    def options(width: int) -> Options:
        return {field: {f"decoder_{name}": value for name, value in small_tower(width // part).items()}}

    return options


def text_tower(width: int) -> Options:
    """Return the options of a text tower that is as wide as the model."""
    return {"text_config": small_tower(width), "contrastive_config": {"projection_dim": width}}


def scale_to_details(facts: Facts, epochs: float, patch_share: float | None) -> Options:
    """Choose scales of training images so that the regions of most classes are at least half a patch wide.

    The scale for evaluation is chosen on held-out images, see `SemanticSegmentation.choose_inference`.
    """
    if patch_share is None or facts.detail_share is None:
        return {}
    scale = min(patch_share / (2 * facts.detail_share), MOST_ENLARGED)
    return {} if scale < 1 else {"min_scale": round(scale / 2, 2), "max_scale": round(2 * scale, 2)}


def draw_views(facts: Facts, epochs: float, patch_share: float | None) -> Options:
    """Return options of random views: a larger canvas for large images, and fewer local views without a GPU."""
    fewer = {} if facts.has_gpu else {"num_local_views": 2}
    return {"canvas": 1.0 if facts.native_size <= SMALL_NATIVE else 2.0, **fewer}


# Default hyperparameters of each task


def read_task(name: str, **rules: Any) -> TaskDefaults:
    """Return the defaults of a task from its entry in defaults.yaml and its rules."""
    row = TABLES["tasks"][name]
    return TaskDefaults(**{**row, "ladder": tuple(Size(*size) for size in row["ladder"])}, **rules)


TABLES = yaml.safe_load(Path(__file__).with_name("defaults.yaml").read_text(encoding="utf-8"))
GROUPS = [set(group) for group in TABLES["groups"]]
CLASSIFICATION = read_task("image-classification", augmentation=augment_classes)
SEGMENTATION = read_task(
    "semantic-segmentation",
    head=without_gpu(lambda width: {"segmentation_config": {"hidden_size": 64}} if width < LARGE_WIDTH else {}),
    augmentation=scale_to_details,
)
UNIVERSAL = read_task("universal-segmentation", head=universal_head, shares_head=True)
DEPTH = read_task(
    "depth-estimation",
    head=without_gpu(depth_head),
    # No random scaling: with few images, the model cannot learn to infer the scale, and predicts too small depths.
    augmentation=lambda facts, epochs, patch_share: {"keep_aspect_ratio": False, "min_scale": 1.0, "max_scale": 1.0},
)
DETECTION = read_task("object-detection", head=detection_head)
KEYPOINTS = read_task(
    "keypoint-detection",
    head=without_gpu(lambda width: {"keypoint_config": {"hidden_size": 128}} if width >= LARGE_WIDTH else {}),
)
MASKED_IMAGES = read_task(
    "masked-image-modeling", head=without_gpu(pixel_decoder("masked_image_modeling_config", part=2))
)
RECONSTRUCTION = read_task(
    "image-reconstruction",
    head=without_gpu(pixel_decoder("reconstruction_config", part=1)),
    # Enlarged crops of small images are blurred, and the model would learn to reconstruct blurred images.
    augmentation=lambda facts, *_: {"min_crop_scale": 1.0} if facts.native_size <= SMALL_NATIVE else {},
)
JOINT_EMBEDDINGS = read_task(
    "joint-embedding",
    head=without_gpu(lambda width: {"joint_embedding_config": {"projector_hidden_size": 4 * width}}),
    augmentation=draw_views,
)
IMAGE_TEXT = read_task("zero-shot-image-classification", head=without_gpu(text_tower))
CAPTIONS = read_task(
    "image-captioning", head=without_gpu(lambda width: {"caption_config": small_tower(min(width, 256))})
)


# Heads and augmentation are chosen for each head, with the defaults of its task.
MULTI_TASK = replace(DEPTH, head=lambda facts, width: {}, augmentation=lambda facts, epochs, patch_share: {})


# Rules that choose the options of a run

# Options that select a different kind of head, for which the default head options are not suitable
HEAD_OPTIONS = {"head", "decoder", "objective", "text_model_name_or_path", "text_preset"}


def choose(
    table: TaskDefaults,
    facts: Facts,
    given: Collection[str],
    overrides: Mapping[str, Any],
    *,
    size: Size | None = None,
    steps: int | None = None,
    batch: int | None = None,
    evaluations: int = EVALUATIONS,
    views: int = 0,
) -> Options:
    """Choose all options that the user did not give.

    Args:
        table: Defaults of the task.
        facts: Properties of data, model and device.
        given: Names of the options that the user gave.
        overrides: Fields of `HfViTConfig` that the user gave.
        size: Chosen size of model and images, if any.
        steps: Number of training steps, if known.
        batch: Number of images per step on all processes, if given.
        evaluations: Number of evaluations, including the evaluation after the last step; 0 or at least 2.
        views: Number of stored views per image. If it is positive, all but the last `stores` blocks are frozen; if it
            is 0, all blocks are trained.

    Returns:
        Values by option name; `config_overrides` is a mapping that includes `overrides`.
    """
    steps = steps or choose_steps(table, facts)
    epochs = facts.epochs_of(steps, batch or choose_batch(table, facts))
    chosen: Options = {
        "per_device_train_batch_size": max(1, choose_batch(table, facts) // facts.num_processes),
        **choose_optimizer(table, facts),
        **({"learning_rate": FROZEN_RATE, "head_lr_multiplier": 1.0} if views and not table.stores else {}),
        **choose_schedule(facts, steps, evaluations),
        **table.augmentation(facts, epochs, share_of_patch(facts, size)),
        **({"bf16": True} if facts.has_bf16 else {}),
        **({"dataloader_num_workers": 1} if facts.spare_cores else {}),
    }
    chosen = {name: value for name, value in chosen.items() if value is not None and not is_settled(name, given)}
    config = choose_config(table, facts, given, overrides, size)
    if size is not None and "image_size" not in given:
        chosen["image_size"] = size.image_size
    if views:
        chosen |= {"trainable_blocks": table.stores, "cached_views": views}
    return chosen | ({"config_overrides": config} if config != overrides else {})


def share_of_patch(facts: Facts, size: Size | None) -> float | None:
    """Return the side of a patch relative to the shorter side of an image, None if unknown."""
    image, patch = (facts.image_size, facts.patch_size) if size is None else (size.image_size, size.patch_size)
    return None if image is None or patch is None else patch / image


def is_settled(name: str, given: Collection[str]) -> bool:
    """Return whether the user gave an option or another option of its group in defaults.yaml."""
    settling = {name}.union(*(group for group in GROUPS if name in group))
    return not settling.isdisjoint(given)


def choose_batch(table: TaskDefaults, facts: Facts) -> int:
    """Return the number of images per step, smaller for few training images so that an epoch has several steps."""
    batch = table.batch * (GPU_BATCH if facts.has_gpu else 1)
    while facts.num_images is not None and batch > max(8, facts.num_images // 3):
        batch //= 2
    return min(batch, facts.num_images or batch)


def needed_steps(table: TaskDefaults, facts: Facts) -> int:
    """Return the number of steps that a model needs: more on a GPU, where models are larger."""
    if facts.start != "scratch" and not is_small_encoder(facts):
        return table.tuned_steps * (GPU_STEPS if facts.has_gpu else 1)
    return table.steps * (GPU_STEPS if facts.has_gpu else 1)


def choose_steps(table: TaskDefaults, facts: Facts) -> int:
    """Return the number of steps without a time budget, limited by the number of epochs."""
    steps = needed_steps(table, facts)
    if facts.num_images is None:
        return steps
    an_epoch = max(1, facts.num_images // choose_batch(table, facts))
    return min(max(steps, LEAST_EPOCHS * an_epoch), max(MOST_EPOCHS * an_epoch, TOO_FEW_STEPS))


def is_small_encoder(facts: Facts) -> bool:
    """Return whether training starts from a small encoder that was pretrained without labels."""
    is_small = (facts.hidden_size or TUNED_WIDTH) < LARGE_WIDTH
    return facts.start == "backbone" and facts.is_unlabeled and is_small


def choose_optimizer(table: TaskDefaults, facts: Facts) -> Options:
    """Return the options for optimizer, learning rates and frozen blocks."""
    if facts.start == "scratch":
        return dict(table.scratch)
    if is_small_encoder(facts) and table.scratch:  # as from scratch, without whitening
        return {name: value for name, value in table.scratch.items() if name != "whiten_patches"}
    width = facts.hidden_size or TUNED_WIDTH
    rate = min(1e-3, TUNED_RATE * TUNED_WIDTH / width)
    options: Options = {"learning_rate": rate, "layer_decay": TUNED_LAYER_DECAY, "warmup_steps": 0.1}
    if facts.start == "backbone":
        probed = {"probe_classifier": True, "learning_rate": min(1e-3, PROBED_RATE * TUNED_WIDTH / width)}
        options |= probed if table.probes else {"head_lr_multiplier": FRESH_HEAD_RATE}
    is_few = facts.num_images is not None and facts.num_images < FEW_IMAGES
    is_frozen = is_few and width >= LARGE_WIDTH and facts.start == "backbone"
    return {**options, **table.tuned, **(table.few if is_frozen else {})}


def choose_schedule(facts: Facts, steps: int, evaluations: int) -> Options:
    """Return the options for the number of steps, and for the steps at which to evaluate and save."""
    saved = {"save_strategy": "steps", "save_steps": round(1 / (evaluations or CHECKPOINTS), 4)}
    evaluated: Options = {"eval_strategy": "no"}
    if facts.has_validation and evaluations:
        evaluated = {"eval_strategy": "steps", "eval_steps": saved["save_steps"]}
    return {"max_steps": steps, **evaluated, **saved}


def choose_config(
    table: TaskDefaults, facts: Facts, given: Collection[str], overrides: Mapping[str, Any], size: Size | None
) -> Options:
    """Return fields of `HfViTConfig`: those given by the user, and those chosen for a new model or head."""
    config: Options = {}
    width, patches = facts.hidden_size, facts.num_patches
    if size is not None:
        width, patches = size.hidden_size or width, size.num_patches
    is_small = is_small_encoder(facts)
    is_slow = facts.has_bf16 and facts.has_slow_sdpa and not is_settled("bf16", given)
    if is_slow and (patches or math.inf) <= MOST_EAGER_PATCHES:
        config["attn_implementation"] = "eager"
    if is_small:
        config |= {name: value for name, value in table.config.items() if name == "drop_path_rate"}
    if facts.start == "scratch":
        config |= {**(size.config() if size is not None else {}), **table.config}
        if width is not None and width > WIDEST_START:
            del config["initializer_range"]
        if facts.is_gray:
            config["num_channels"] = 1
    if facts.start != "head" and (table.shares_head or HEAD_OPTIONS.isdisjoint(given)):
        # A head of the model's width needs a width divisible by 8. For other widths, keep the default head.
        is_fitted = width is not None and width % 8 == 0
        config |= table.head(facts, width if is_fitted else None)
    nested = {name: value for name, value in config.items() if isinstance(value, dict)}
    for name in nested.keys() & set(given):  # head options that the user gave take precedence
        nested[name] = {option: value for option, value in nested[name].items() if option not in given}
    config = {name: value for name, value in config.items() if name not in given}
    merged = {name: {**value, **(overrides.get(name) or {})} for name, value in nested.items()}
    return {**config, **overrides, **merged}
