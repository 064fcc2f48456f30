"""Collators: from examples of a dataset to the batches that models take.

The image processor makes the pixels of a whole batch at once, and gives targets the same geometry. It is the one that
`pipeline` uses on the saved model: both see the same pixels. Images that are tensors come from an augmentation, which
has brought them to the model's size, and are only normalized.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import BaseImageProcessor

from ..model.processing_hf_vit import HfViTProcessor
from ..model.task_configurations import HfViTMaskedImageModelingConfig
from ..model.task_masked_image_modeling import draw_mask
from .loaders.unlabeled_images import CLASS, NO_CLASS
from .targets import target_of, without_crowds


IS_SIZED = {"do_resize": False, "do_center_crop": False}
# What the image processor calls the targets of examples.
PROCESSOR_ARGUMENTS = {
    "segmentation_map": {"segmentation_maps": "segmentation_map"},
    "masks": {"mask_labels": "masks", "class_labels": "class_labels"},
    "depth_map": {"depth_maps": "depth_map"},
    "boxes": {"boxes": "boxes", "class_labels": "class_labels"},
}
DENSE = ("segmentation_map", "masks", "depth_map")


def _check_has(example: Mapping[str, Any], *names: str) -> None:
    if missing := [name for name in names if name not in example]:
        raise ValueError(
            f"The examples have no {', '.join(missing)}, only {', '.join(sorted(example))}. With the Trainer, "
            "set remove_unused_columns=False."
        )


def _pixels(image_processor: BaseImageProcessor, images: list[Any]) -> dict[str, Any]:
    sized = IS_SIZED if isinstance(images[0], Tensor) else {}
    return {**image_processor(images=images, return_tensors="pt", **sized)}


def _pixels_and_targets(
    image_processor: BaseImageProcessor, examples: list[dict[str, Any]], target: str, **options: Any
) -> dict[str, Any]:
    trained = [without_crowds(example) for example in examples]
    names = {"images": "image", **PROCESSOR_ARGUMENTS[target]}
    inputs = {argument: [example[name] for example in trained] for argument, name in names.items()}
    return {**image_processor(**inputs, return_tensors="pt", **options)}


def _with_targets(batch: dict[str, Any], examples: list[dict[str, Any]], keeps_targets: bool) -> dict[str, Any]:
    if not keeps_targets:
        return batch
    targets = [target_of(example) for example in examples]
    return {**batch, "targets": targets, "files": [example["file"] for example in examples]}


@dataclass
class Collator:
    """Base class of the collators of images.

    Args:
        image_processor: Resizes and normalizes images; all of a batch come out at one size.
        keeps_targets: Whether a batch also has the lists `targets`, as they are in the examples, and `files`, for
            evaluation.
    """

    image_processor: BaseImageProcessor
    keeps_targets: bool = field(default=False, kw_only=True)


class ImageClassificationCollator(Collator):
    """Turns examples with an image and a label into the batch that `HfViTForImageClassification` trains on."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, and `label`, a class number.

        Returns:
            `pixel_values` (B, C, H, W) float32 and `labels` (B,) int64.

        Raises:
            ValueError: if an example has no image or no label.
        """
        _check_has(examples[0], "image", "label")
        batch = _pixels(self.image_processor, [example["image"] for example in examples])
        batch["labels"] = torch.tensor([example["label"] for example in examples])
        return _with_targets(batch, examples, self.keeps_targets)


class DensePredictionCollator(Collator):
    """Turns examples with an image and its target into a batch for segmentation or depth."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, and `segmentation_map` (H, W), `masks`
                (M, H, W) with `class_labels` (M,) and maybe `is_crowd` (M,), or `depth_map` (H, W).

        Returns:
            `pixel_values` (B, C, h, w) float32 and the target: `labels` (B, h, w), int64 classes or float32 depth, or
            lists of `mask_labels` (M, h, w) float32 and `class_labels` (M,). If the processor pads, also
            `patch_attention_mask`. With `keeps_targets` also the lists `targets`, a tensor each or a dictionary of
            masks and their classes, and `files`. Crowds are in `targets` alone.

        Raises:
            ValueError: if the examples have no target.
        """
        if not examples[0].keys() & {*DENSE}:
            _check_has(examples[0], *DENSE)
        name = next(name for name in DENSE if name in examples[0])
        # The examples count classes from 0, whatever the files do.
        options = {"do_reduce_labels": False} if name == "segmentation_map" else {}
        if isinstance(examples[0]["image"], Tensor):
            options |= IS_SIZED
        batch = _pixels_and_targets(self.image_processor, examples, name, **options)
        return _with_targets(batch, examples, self.keeps_targets)


@dataclass
class ObjectDetectionCollator(Collator):
    """Turns examples with an image and its objects into the batch that `HfViTForObjectDetection` takes.

    Args:
        sizes: Heights and widths in pixels, of which one is drawn for every batch of tensors, which is resized to it;
            see `multi_scale_sizes`. The draw is that of the batch's first example, so that a training that is resumed,
            with any number of workers, sees what it would have seen.
    """

    sizes: Sequence[tuple[int, int]] | None = None

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, `boxes` (N, 4), x1, y1, x2, y2 in its
                pixels, `class_labels` (N,) and maybe `is_crowd` (N,) and `areas` (N,).

        Returns:
            `pixel_values` (B, C, h, w) float32 and `labels`, for each image `class_labels` (N,) int64 and `boxes`
            (N, 4) float32, center, width and height as shares of the image. If the processor pads, also
            `patch_attention_mask`. With `keeps_targets` also the lists `targets`, a dictionary each, and `files`.
            Crowds are in `targets` alone.

        Raises:
            ValueError: if the examples have no boxes, or with `sizes` are tensors that are not augmented.
        """
        _check_has(examples[0], "boxes", "class_labels")
        options = self._tensor_options(examples[0]) if isinstance(examples[0]["image"], Tensor) else {}
        batch = _pixels_and_targets(self.image_processor, examples, "boxes", **options)
        return _with_targets(batch, examples, self.keeps_targets)

    def _tensor_options(self, first: dict[str, Any]) -> dict[str, Any]:
        if self.sizes is None:
            return IS_SIZED
        _check_has(first, "batch_draw")
        height, width = self.sizes[int(first["batch_draw"] * len(self.sizes))]
        size = {"height": height, "width": width}
        return {"do_resize": True, "size": size, "keep_aspect_ratio": False, "do_center_crop": False}


class KeypointDetectionCollator(Collator):
    """Turns examples of one object each into the batch that `HfViTForKeypointDetection` takes."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, `keypoints` (K, 3), x and y in its pixels
                and visibility, and beside PIL images `box` (4,), x1, y1, x2, y2.

        Returns:
            `pixel_values` (B, C, h, w) float32 and `labels` (B, K, 3) float32, in pixels of the crop. With
            `keeps_targets` also the lists `targets`, a dictionary each, and `files`.

        Raises:
            ValueError: if the examples have no keypoints, or PIL images no box.
        """
        _check_has(examples[0], "keypoints")
        options: dict[str, Any] = {**IS_SIZED, "do_affine_crop": False}
        if not isinstance(examples[0]["image"], Tensor):
            _check_has(examples[0], "box")
            options = {"object_boxes": [example["box"][None] for example in examples]}
        images = [example["image"] for example in examples]
        keypoints = [example["keypoints"][None] for example in examples]  # one object an image
        made = self.image_processor(images=images, keypoints=keypoints, return_tensors="pt", **options)
        batch = {name: made[name] for name in ("pixel_values", "labels")}
        return _with_targets(batch, examples, self.keeps_targets)


def draw_caption(example: dict[str, Any]) -> dict[str, Any]:
    """Returns one of the `captions` of an example at random, as `caption`."""
    captions = example["captions"]
    return {"caption": captions[int(torch.randint(len(captions), ()))]}


@dataclass
class ImageTextCollator:
    """Turns images and captions into the batch that `HfViTForZeroShotImageClassification` takes.

    Args:
        processor: Resizes and normalizes images, which come out at one size, and makes tokens of texts.
        keeps_targets: Whether a batch has all captions of its images, for evaluation, rather than one of each.
    """

    processor: HfViTProcessor
    keeps_targets: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, and `caption`, or `captions` to evaluate.

        Returns:
            `pixel_values` (B, C, H, W) float32, what the tokenizer makes of the captions (`input_ids` and
            `attention_mask` (B, S), ...), and `return_loss`. With `keeps_targets`, tokens (T, S) of all captions,
            those of an image side by side, and the lists `targets`, with `captions`, and `files`.

        Raises:
            ValueError: if an example has no caption.
        """
        _check_has(examples[0], "captions" if self.keeps_targets else "caption")
        batch = _pixels(self.processor.image_processor, [example["image"] for example in examples])
        if not self.keeps_targets:
            captions = [example["caption"] for example in examples]
            return {**batch, **self.processor(text=captions, return_tensors="pt"), "return_loss": True}
        captions = [caption for example in examples for caption in example["captions"]]
        batch |= self.processor(text=captions, return_tensors="pt")
        return _with_targets(batch, examples, keeps_targets=True)


def masked_image_target(row: dict[str, Any]) -> dict[str, Any]:
    """Reads what masked image modeling needs to know of an image beside its pixels.

    Returns:
        `mask_seed`, from the number of the image in its dataset, so that its mask is always the same; and
        `class_number`, None where it is not known.
    """
    number = row.get(CLASS, NO_CLASS)
    return {"mask_seed": row["number"], CLASS: None if number == NO_CLASS else number}


def draw_mask_seed(example: dict[str, Any]) -> dict[str, Any]:
    """Returns a `mask_seed` at random, for training."""
    return {"mask_seed": int(torch.randint(2**62, ()))}


@dataclass
class UnlabeledImageCollator(Collator):
    """Turns images into the batch that `HfViTForJointEmbedding` is trained on, once their views are drawn.

    Args:
        num_drawn: How many numbers the views of an image are drawn by.
    """

    num_drawn: int

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, for evaluation with `mask_seed` too.

        Returns:
            `pixel_values` (B, C, H, W) float32. With `keeps_targets` also `drawn` (B, `num_drawn`) in [0, 1), always
            the same for one image, and the lists `targets`, class numbers or None, and `files`.
        """
        batch = _pixels(self.image_processor, [example["image"] for example in examples])
        if self.keeps_targets:
            generators = [torch.Generator().manual_seed(example["mask_seed"]) for example in examples]
            batch["drawn"] = torch.stack([torch.rand(self.num_drawn, generator=drawn) for drawn in generators])
        return _with_targets(batch, examples, self.keeps_targets)


@dataclass
class MaskedImageModelingCollator(Collator):
    """Turns images and the seeds of their masks into the batch that `HfViTForMaskedImageModeling` trains on.

    The mask of an image depends on its seed alone, and not on what else is in the batch or on the process.

    Args:
        patch_size: Height and width of a patch in pixels.
        options: How much is masked, and how.
    """

    patch_size: tuple[int, int]
    options: HfViTMaskedImageModelingConfig

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, and `mask_seed`.

        Returns:
            `pixel_values` (B, C, H, W) float32 and `noise` (B, N), by which the model masks as many patches of each
            image without a look at its mask, or, for other masks than random ones, `bool_masked_pos` (B, N) bool. With
            `keeps_targets` also the lists `targets`, class numbers or None, and `files`.

        Raises:
            ValueError: if an example has no seed.
        """
        _check_has(examples[0], "mask_seed")
        batch = _pixels(self.image_processor, [example["image"] for example in examples])
        height, width = batch["pixel_values"].shape[-2:]
        grid = height // self.patch_size[0], width // self.patch_size[1]
        generators = [torch.Generator().manual_seed(example["mask_seed"]) for example in examples]
        if self.options.mask_type == "random":
            batch["noise"] = torch.stack([torch.rand(grid[0] * grid[1], generator=drawn) for drawn in generators])
        else:
            masks = [draw_mask(1, grid, self.options, generator=drawn) for drawn in generators]
            batch["bool_masked_pos"] = torch.cat(masks)
        return _with_targets(batch, examples, self.keeps_targets)


def size_of_height(height: int, size: tuple[int, int], multiple: tuple[int, int]) -> tuple[int, int]:
    """Returns a height, and the multiple of `multiple` that comes closest to the proportions of `size`, in pixels."""
    return height, max(1, round(height * size[1] / size[0] / multiple[1])) * multiple[1]


def multi_scale_sizes(
    size: tuple[int, int], multiple: tuple[int, int], smallest: float = 0.75, largest: float = 1.25
) -> list[tuple[int, int]]:
    """Returns the sizes around one that a model takes, for training on batches of several sizes.

    Args:
        size: Height and width in pixels.
        multiple: What height and width must be multiples of, in pixels: the patch size, times the rows and columns of
            a window if the model has windows.
        smallest: Smallest height as a share of that in `size`.
        largest: Largest height as a share of that in `size`.

    Raises:
        ValueError: if there is none.
    """
    rows = range(max(1, ceil(smallest * size[0] / multiple[0])), int(largest * size[0] / multiple[0]) + 1)
    heights = [row * multiple[0] for row in rows]
    sizes = [size_of_height(height, size, multiple) for height in heights]
    if not sizes:
        raise ValueError(
            f"No multiple of {multiple[0]} lies between {smallest} and {largest} times the height {size[0]}. Take a "
            "larger size, or widen the range."
        )
    return sizes
