"""From examples of a dataset to the batches that models take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import BaseImageProcessor

from ..model.processing_hf_vit import HfViTProcessor
from ..model.task_configurations import HfViTMaskedImageModelingConfig
from ..model.task_mim import draw_mask
from .loaders.unlabeled_images import CLASS, NO_CLASS
from .targets import target_of, without_crowds


def check_has(example: Mapping[str, Any], *names: str) -> None:
    """Raises `ValueError` if an example lacks a part of its target."""
    if missing := [name for name in names if name not in example]:
        raise ValueError(
            f"The examples have no target {', '.join(missing)}, only {', '.join(sorted(example))}. With the Trainer, "
            "set remove_unused_columns=False."
        )


@dataclass
class ImageClassificationCollator:
    """Turns examples with an image and a label into the batch that `HfViTForImageClassification` trains on.

    The image processor sees the whole batch at once, which is much faster than image by image, and is the one that
    `pipeline` uses on the saved model: both see the same pixels.

    Args:
        image_processor: Resizes and normalizes; all images of a batch come out at one size. Tensors come from an
            augmentation that has brought them to the model's size, and are only normalized.
        image_column: Key of the image in an example, PIL or (C, H, W) uint8.
        label_column: Key of the class number in an example.
    """

    image_processor: BaseImageProcessor
    image_column: str = "image"
    label_column: str = "label"

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Makes a batch.

        Args:
            examples: B dictionaries.

        Returns:
            `pixel_values` (B, C, H, W) float32 and `labels` (B,) int64.

        Raises:
            ValueError: if an example lacks one of the two columns.
        """
        for column in (self.image_column, self.label_column):
            if column not in examples[0]:
                raise ValueError(
                    f"The examples have no column {column!r}, only {', '.join(sorted(examples[0]))}. Name the right "
                    "one with image_column= or label_column=; with the Trainer, also set remove_unused_columns=False."
                )
        images = [example[self.image_column] for example in examples]
        labels = [example[self.label_column] for example in examples]
        sized = {"do_resize": False, "do_center_crop": False} if isinstance(images[0], Tensor) else {}
        batch = self.image_processor(images=images, return_tensors="pt", **sized)
        return {**batch, "labels": torch.tensor(labels)}


# What the image processor calls the targets of examples.
PROCESSOR_ARGUMENTS = {
    "segmentation_map": {"segmentation_maps": "segmentation_map"},
    "masks": {"mask_labels": "masks", "class_labels": "class_labels"},
    "depth_map": {"depth_maps": "depth_map"},
}


@dataclass
class DensePredictionCollator:
    """Turns examples with an image and its target into a batch for segmentation or depth.

    The image processor gives image and target the same geometry. It is the one that `pipeline` uses on the saved
    model: both see the same pixels.

    Args:
        image_processor: Resizes and normalizes; all images of a batch come out at one size. Tensors come from an
            augmentation that has brought them to the model's size, and are only normalized.
        keeps_targets: Whether a batch also has the targets as they are in the examples, to be scored at full size.
    """

    image_processor: BaseImageProcessor
    keeps_targets: bool = False

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
        names = _target_names(examples[0])
        images = [example["image"] for example in examples]
        learned = [without_crowds(example) for example in examples]
        targets = {argument: [example[name] for example in learned] for argument, name in names.items()}
        # The examples count classes from 0, whatever the files do.
        options = {"do_reduce_labels": False} if "segmentation_maps" in targets else {}
        if isinstance(images[0], Tensor):
            options |= {"do_resize": False, "do_center_crop": False}
        batch = {**self.image_processor(images=images, **targets, return_tensors="pt", **options)}
        if self.keeps_targets:
            batch["targets"] = [target_of(example) for example in examples]
            batch["files"] = [example["file"] for example in examples]
        return batch


def _target_names(example: dict[str, Any]) -> dict[str, str]:
    """Returns the keys of an example's target by the argument of the image processor that takes them."""
    names = next((names for key, names in PROCESSOR_ARGUMENTS.items() if key in example), None)
    if names is None:
        raise ValueError(
            f"The examples have no target {', '.join(PROCESSOR_ARGUMENTS)}, only {', '.join(sorted(example))}. With "
            "the Trainer, set remove_unused_columns=False."
        )
    return names


@dataclass
class ObjectDetectionCollator:
    """Turns examples with an image and its objects into the batch that `HfViTForObjectDetection` takes.

    The image processor gives image and boxes the same geometry. It is the one that `pipeline` uses on the saved model:
    both see the same pixels.

    Args:
        image_processor: Resizes and normalizes. Tensors come from `detection_augmentation`, which has brought them to
            the model's size, and are only normalized.
        sizes: Heights and widths in pixels, of which one is drawn for every batch of tensors, which is resized to it;
            see `multi_scale_sizes`. The draw is that of the batch's first example, so that a training that is taken up
            again, with any number of workers, sees what it would have seen.
        keeps_targets: Whether a batch also has the targets as they are in the examples, to be scored at full size.
    """

    image_processor: BaseImageProcessor
    sizes: Sequence[tuple[int, int]] | None = None
    keeps_targets: bool = False

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
        check_has(examples[0], "boxes", "class_labels")
        learned = [without_crowds(example) for example in examples]
        batch = {
            **self.image_processor(
                images=[example["image"] for example in learned],
                boxes=[example["boxes"] for example in learned],
                class_labels=[example["class_labels"] for example in learned],
                return_tensors="pt",
                **(self._tensor_options(examples[0]) if isinstance(examples[0]["image"], Tensor) else {}),
            )
        }
        if self.keeps_targets:
            batch["targets"] = [target_of(example) for example in examples]
            batch["files"] = [example["file"] for example in examples]
        return batch

    def _tensor_options(self, first: dict[str, Any]) -> dict[str, Any]:
        if self.sizes is None:
            return {"do_resize": False, "do_center_crop": False}
        check_has(first, "batch_draw")
        height, width = self.sizes[int(first["batch_draw"] * len(self.sizes))]
        size = {"height": height, "width": width}
        return {"do_resize": True, "size": size, "keep_aspect_ratio": False, "do_center_crop": False}


@dataclass
class KeypointDetectionCollator:
    """Turns examples of one object each into the batch that `HfViTForKeypointDetection` takes.

    The image processor cuts the object out, its keypoints with it. It is the one that `pipeline` uses on the saved
    model: both see the same pixels.

    Args:
        image_processor: Cuts out and normalizes. Tensors come from `keypoint_augmentation`, which has cut them out,
            and are only normalized.
        keeps_targets: Whether a batch also has the targets as they are in the examples, to be scored in the image.
    """

    image_processor: BaseImageProcessor
    keeps_targets: bool = False

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
        check_has(examples[0], "keypoints")
        options: dict[str, Any] = {"do_resize": False, "do_center_crop": False, "do_affine_crop": False}
        if not isinstance(examples[0]["image"], Tensor):
            check_has(examples[0], "box")
            options = {"object_boxes": [example["box"][None] for example in examples]}
        images = [example["image"] for example in examples]
        keypoints = [example["keypoints"][None] for example in examples]  # one object an image
        made = self.image_processor(images=images, keypoints=keypoints, return_tensors="pt", **options)
        batch: dict[str, Any] = {name: made[name] for name in ("pixel_values", "labels")}
        if self.keeps_targets:
            batch["targets"] = [target_of(example) for example in examples]
            batch["files"] = [example["file"] for example in examples]
        return batch


def draw_caption(example: dict[str, Any]) -> dict[str, Any]:
    """Returns one of the `captions` of an example at random, as `caption`."""
    captions = example["captions"]
    return {"caption": captions[int(torch.randint(len(captions), ()))]}


@dataclass
class ImageTextCollator:
    """Turns images and captions into the batch that `HfViTForZeroShotImageClassification` takes.

    Args:
        processor: Resizes and normalizes images, which come out at one size, and makes tokens of texts. Tensors come
            from an augmentation that has brought them to the model's size, and are only normalized.
        keeps_targets: Whether a batch has all captions of its images, to be scored, rather than one of each, to learn
            from.
    """

    processor: HfViTProcessor
    keeps_targets: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, and `caption`, or, to be scored, `captions`.

        Returns:
            `pixel_values` (B, C, H, W) float32, what the tokenizer makes of the captions (`input_ids` and
            `attention_mask` (B, S), ...), and `return_loss`. With `keeps_targets`, tokens (T, S) of all captions,
            those of an image side by side, and the lists `targets`, with `captions`, and `files`.

        Raises:
            ValueError: if an example has no caption.
        """
        check_has(examples[0], "captions" if self.keeps_targets else "caption")
        images = [example["image"] for example in examples]
        sized = {"do_resize": False, "do_center_crop": False} if isinstance(images[0], Tensor) else {}
        batch = dict(self.processor.image_processor(images=images, return_tensors="pt", **sized))
        if not self.keeps_targets:
            captions = [example["caption"] for example in examples]
            return {**batch, **self.processor(text=captions, return_tensors="pt"), "return_loss": True}
        captions = [caption for example in examples for caption in example["captions"]]
        batch.update(self.processor(text=captions, return_tensors="pt"))
        batch["targets"] = [target_of(example) for example in examples]
        batch["files"] = [example["file"] for example in examples]
        return batch


def masked_image_target(row: dict[str, Any]) -> dict[str, Any]:
    """Reads what a `TargetDataset` shall know of an image beside its pixels.

    Returns:
        `mask_seed`, from the number of the image in its data set, so that its mask is always the same; and
        `class_number`, None where it is not known.
    """
    number = row.get(CLASS, NO_CLASS)
    return {"mask_seed": row["number"], CLASS: None if number == NO_CLASS else number}


def draw_mask_seed(example: dict[str, Any]) -> dict[str, Any]:
    """Returns the `mask_seed` that an example learns from this time, at random."""
    return {"mask_seed": int(torch.randint(2**62, ()))}


@dataclass
class MaskedImageModelingCollator:
    """Turns images and the seeds of their masks into the batch that `HfViTForMaskedImageModeling` trains on.

    The mask of an image depends on its seed alone, and not on what else is in the batch or on the process.

    Args:
        image_processor: Resizes and normalizes; all images of a batch come out at one size. Tensors come from an
            augmentation that has brought them to the model's size, and are only normalized.
        patch_size: Height and width of a patch in pixels.
        options: How much is masked, and how.
        keeps_targets: Whether a batch also has what is known of the images, to be scored.
    """

    image_processor: BaseImageProcessor
    patch_size: tuple[int, int]
    options: HfViTMaskedImageModelingConfig
    keeps_targets: bool = False

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
        check_has(examples[0], "mask_seed")
        images = [example["image"] for example in examples]
        sized = {"do_resize": False, "do_center_crop": False} if isinstance(images[0], Tensor) else {}
        batch = dict(self.image_processor(images=images, return_tensors="pt", **sized))
        height, width = batch["pixel_values"].shape[-2:]
        grid = height // self.patch_size[0], width // self.patch_size[1]
        generators = [torch.Generator().manual_seed(example["mask_seed"]) for example in examples]
        if self.options.mask_type == "random":
            batch["noise"] = torch.stack([torch.rand(grid[0] * grid[1], generator=drawn) for drawn in generators])
        else:
            masks = [draw_mask(1, grid, self.options, generator=drawn) for drawn in generators]
            batch["bool_masked_pos"] = torch.cat(masks)
        if self.keeps_targets:
            batch["targets"] = [example[CLASS] for example in examples]
            batch["files"] = [example["file"] for example in examples]
        return batch
