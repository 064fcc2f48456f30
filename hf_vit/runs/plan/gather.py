"""Collect properties of data, model and device of a planned run."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from ...data.datasets import TargetData
from ...data.reading.label_values import REGRESSION, problem_type_of
from ...model.configuration_hf_vit import to_pair
from ...model.image_targets import IGNORED_LABEL
from ...options.training_arguments import HfViTTrainingArguments, usable_cores
from ...tasks.base import Task
from ...tasks.common.facts import Facts, Start
from ...tasks.common.models import has_same_names, plan_config, read_config_of
from ...training.optimizer import is_fast_in_bf16


UNLABELED = (
    "HfViTForJointEmbedding",
    "HfViTForMaskedImageModeling",
    "HfViTForImageReconstruction",
)  # model classes that are pretrained without labels
SAMPLE = 32  # number of sampled images that are measured


def gather_facts(task: Task, args: HfViTTrainingArguments, data: TargetData) -> Facts:
    """Return the facts about a task and its data. Images are measured on an evenly spaced sample."""
    splits = data.splits
    start, architecture, saved = find_start(task, data.names)
    config = plan_config(task.options) if start == "scratch" else saved | task.options.overrides()
    has_gpu = args.device.type != "cpu"
    return Facts(
        **look_at_images(data),
        start=start,
        is_unlabeled=architecture in UNLABELED,
        num_images=None if data.stream is not None else data.num_train,
        is_regression=problem_type_of(next(iter(splits.values()))) == REGRESSION,
        num_scored=data.count_evaluated(data.evaluated_split),
        has_validation="validation" in splits,
        hidden_size=config.get("hidden_size"),
        num_layers=config.get("num_hidden_layers"),
        has_gpu=has_gpu,
        has_bf16=is_fast_in_bf16(args.device),
        has_slow_sdpa=args.device.type == "cpu" and not torch.cpu._is_amx_tile_supported(),
        num_patches=count_patches(config),
        image_size=min(to_pair(config["image_size"])) if "image_size" in config else None,
        patch_size=max(to_pair(config["patch_size"])) if "patch_size" in config else None,
        num_processes=args.world_size,
        spare_cores=0 if has_gpu else usable_cores() - 1,
    )


def find_start(task: Task, classes: Sequence[str] = ()) -> tuple[Start, str, dict[str, Any]]:
    """Return the origin of the weights, and the class name and configuration of a saved model.

    A saved classifier for other classes is treated as a backbone.
    """
    name = task.options.model_name_or_path
    if name is None:
        return "scratch", "", {}
    saved = read_config_of(name)
    architecture = str((saved.get("architectures") or [""])[0])
    own_classes = (task.model_class.__name__.removeprefix("HfViT"), *task.published)
    names = list(classes) if task.defaults.probes else []
    has_classes = not names or has_same_names([*(saved.get("id2label") or {}).values()], names)
    has_head = has_classes and any(part in architecture for part in own_classes)
    return "head" if has_head else "backbone", architecture, saved


def look_at_images(data: TargetData) -> dict[str, Any]:
    """Measure a sample of training images and return the results as fields of `Facts`."""
    splits = data.splits
    # A stream may have no "train" split.
    examples = data.examples("train" if "train" in splits else next(iter(splits)))
    indices = np.linspace(0, len(examples) - 1, min(SAMPLE, len(examples))).round().astype(int).tolist()
    sizes, are_gray, counts, shares = [], [], [0], list[float]()
    extents = dict[int, np.ndarray]()  # area and half of the perimeter of each class, relative to the image side
    for example in (examples[index] for index in indices):
        image, box = example["image"], example.get("box")
        side = min(image.size)
        sizes.append(side if box is None else round(min((box[2:] - box[:2]).tolist())))
        are_gray.append(image.mode in ("1", "L", "I;16", "LA"))
        counts.append(len(example.get("class_labels", ())))
        if "boxes" in example:
            sides = example["boxes"][:, 2:] - example["boxes"][:, :2]  # (N, 2)
            shares += (sides.prod(dim=1).sqrt() / side).tolist()
        for number, extent in measure_classes(example.get("segmentation_map")).items():
            extents[number] = extents.get(number, 0) + extent / (side**2, side)
    # The width of a long strip is approximately its area divided by half of its perimeter.
    widths = [area / max(half, 1e-9) for area, half in extents.values()]
    return {
        "native_size": int(median(sizes)),
        "is_gray": all(are_gray),
        "max_objects": max(counts),
        "object_share": median(shares) if shares else None,
        "detail_share": float(median(widths)) if widths else None,
    }


def measure_classes(mask: torch.Tensor | None) -> dict[int, np.ndarray]:
    """Return the area and half of the perimeter, in pixels, of each class in a mask (H, W)."""
    extents = {}
    for number in [] if mask is None else mask.unique().tolist():
        if number != IGNORED_LABEL:
            inside = (mask == number).numpy()  # (H, W)
            outline = np.diff(inside, axis=0).sum() + np.diff(inside, axis=1).sum()
            extents[number] = np.array([inside.sum(), outline / 2])
    return extents


def count_patches(config: Mapping[str, Any]) -> int | None:
    """Return the number of patches of an image of native size, None if the configuration does not contain it."""
    if not {"image_size", "patch_size"} <= config.keys():
        return None
    (height, width), (patch_height, patch_width) = to_pair(config["image_size"]), to_pair(config["patch_size"])
    return (height // patch_height) * (width // patch_width)
