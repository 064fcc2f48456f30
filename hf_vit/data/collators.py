"""Collators, which convert lists of dataset examples to model input batches.

The image processor preprocesses all images of a batch at once and applies the same resizing to the targets. It is
saved with the model, so a `pipeline` preprocesses images in the same way. Images given as tensors come from an
augmentation that already resized them to the input size of the model, so they are only normalized.
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
from ..model.task_image_captioning import IGNORED_TOKEN
from ..model.task_masked_image_modeling import draw_mask
from .loaders.unlabeled_images import CLASS, NO_CLASS
from .targets import target_of, without_crowds


NO_RESIZE = {"do_resize": False, "do_center_crop": False}
# Arguments of the image processor for each kind of target, and the keys of an example that contain their values.
PROCESSOR_ARGUMENTS = {
    "segmentation_map": {"segmentation_maps": "segmentation_map"},
    "masks": {"mask_labels": "masks", "class_labels": "class_labels"},
    "depth_map": {"depth_maps": "depth_map"},
    "boxes": {"boxes": "boxes", "class_labels": "class_labels"},
}
MOST_CAPTIONS = 5  # maximum number of captions per image in a batch
DENSE = ("segmentation_map", "masks", "depth_map")


def _check_has(example: Mapping[str, Any], *names: str) -> None:
    if missing := [name for name in names if name not in example]:
        raise ValueError(
            f"The examples have no {', '.join(missing)}, only {', '.join(sorted(example))}. If you use "
            "transformers.Trainer, set remove_unused_columns=False."
        )


def _pixels(image_processor: BaseImageProcessor, images: list[Any]) -> dict[str, Any]:
    sized = NO_RESIZE if isinstance(images[0], Tensor) else {}
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
    """Base class of image collators.

    Args:
        image_processor: Image processor that resizes and normalizes images. It must give all images of a batch the
            same size.
        keeps_targets: Whether to add the lists `targets` (the unchanged targets of the examples) and `files` to the
            batch, for evaluation.
    """

    image_processor: BaseImageProcessor
    keeps_targets: bool = field(default=False, kw_only=True)


class ImageClassificationCollator(Collator):
    """Collator of images and labels for `HfViTForImageClassification`."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Create a batch.

        Args:
            examples: B dictionaries with `image` (PIL, or a (C, H, W) uint8 tensor) and `label` (class number).

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
    """Collator of images and their masks or depth maps, for segmentation and depth estimation."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Create a batch.

        Args:
            examples: B dictionaries with `image` (PIL, or a (C, H, W) uint8 tensor) and one of `segmentation_map`
                (H, W), `depth_map` (H, W), or `masks` (M, H, W) with `class_labels` (M,) and optionally `is_crowd`
                (M,).

        Returns:
            `pixel_values` (B, C, h, w) float32 and the target: either `labels` (B, h, w), int64 class numbers or
            float32 depth, or lists of `mask_labels` (M, h, w) float32 and `class_labels` (M,). If the image processor
            pads, `patch_attention_mask` is added. If `keeps_targets` is set, the lists `targets` (one tensor, or one
            dictionary of masks and classes, per image) and `files` are added. Only `targets` contains crowds.

        Raises:
            ValueError: if the examples have no target.
        """
        if not examples[0].keys() & {*DENSE}:
            _check_has(examples[0], *DENSE)
        name = next(name for name in DENSE if name in examples[0])
        # Disable label reduction, because the class numbers of the examples already start at 0.
        options = {"do_reduce_labels": False} if name == "segmentation_map" else {}
        if isinstance(examples[0]["image"], Tensor):
            options |= NO_RESIZE
        batch = _pixels_and_targets(self.image_processor, examples, name, **options)
        return _with_targets(batch, examples, self.keeps_targets)


@dataclass
class ObjectDetectionCollator(Collator):
    """Collator of images and object boxes for `HfViTForObjectDetection`.

    Args:
        sizes: Heights and widths in pixels for multi-scale training, see `multi_scale_sizes`. Each batch of image
            tensors is resized to a random one of these sizes. The random number comes from the first example of the
            batch, so that a resumed training run sees the same batches with any number of workers.
    """

    sizes: Sequence[tuple[int, int]] | None = None

    @property
    def supports_stored_features(self) -> bool:
        """Whether all batches have the same image size, so that features can be stored."""
        return self.sizes is None

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Create a batch.

        Args:
            examples: B dictionaries with `image` (PIL, or a (C, H, W) uint8 tensor), `boxes` (N, 4) as x1, y1, x2, y2
                in pixels, `class_labels` (N,) and optionally `is_crowd` (N,) and `areas` (N,).

        Returns:
            `pixel_values` (B, C, h, w) float32 and `labels`, a list with one dictionary per image: `class_labels` (N,)
            int64 and `boxes` (N, 4) float32, center x, y, width and height as fractions of the image size. If the
            image processor pads, `patch_attention_mask` is added. If `keeps_targets` is set, the lists `targets` (one
            dictionary per image) and `files` are added. Only `targets` contains crowds.

        Raises:
            ValueError: if the examples have no boxes, or if `sizes` is given and the examples have tensor images but
                no `batch_draw`, which `DetectionAugmentation` adds.
        """
        _check_has(examples[0], "boxes", "class_labels")
        options = self._tensor_options(examples[0]) if isinstance(examples[0]["image"], Tensor) else {}
        batch = _pixels_and_targets(self.image_processor, examples, "boxes", **options)
        return _with_targets(batch, examples, self.keeps_targets)

    def _tensor_options(self, first: dict[str, Any]) -> dict[str, Any]:
        if self.sizes is None:
            return NO_RESIZE
        _check_has(first, "batch_draw")
        height, width = self.sizes[int(first["batch_draw"] * len(self.sizes))]
        size = {"height": height, "width": width}
        return {"do_resize": True, "size": size, "keep_aspect_ratio": False, "do_center_crop": False}


class KeypointDetectionCollator(Collator):
    """Collator of examples with one object each for `HfViTForKeypointDetection`."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Create a batch.

        Args:
            examples: B dictionaries with `image` (PIL, or a (C, H, W) uint8 tensor) and `keypoints` (K, 3) as x and y
                in pixels and visibility. PIL images also need `box` (4,) as x1, y1, x2, y2 in pixels.

        Returns:
            `pixel_values` (B, C, h, w) float32 and `labels` (B, K, 3) float32, keypoints in pixels of the crop. If
            `keeps_targets` is set, the lists `targets` (one dictionary per example) and `files` are added.

        Raises:
            ValueError: if the examples have no keypoints, or PIL images have no box.
        """
        _check_has(examples[0], "keypoints")
        options: dict[str, Any] = {**NO_RESIZE, "do_affine_crop": False}
        if not isinstance(examples[0]["image"], Tensor):
            _check_has(examples[0], "box")
            options = {"object_boxes": [example["box"][None] for example in examples]}
        images = [example["image"] for example in examples]
        keypoints = [example["keypoints"][None] for example in examples]  # there is one object per image
        made = self.image_processor(images=images, keypoints=keypoints, return_tensors="pt", **options)
        batch = {name: made[name] for name in ("pixel_values", "labels")}
        return _with_targets(batch, examples, self.keeps_targets)


def draw_caption(example: dict[str, Any]) -> dict[str, Any]:
    """Select one of the `captions` of an example at random and return it as `caption`."""
    captions = example["captions"]
    return {"caption": captions[int(torch.randint(len(captions), ()))]}


@dataclass
class ImageTextCollator:
    """Collator of images and captions for `HfViTForZeroShotImageClassification`.

    Args:
        processor: Processor that resizes all images to the same size, normalizes them, and tokenizes captions.
        keeps_targets: Whether the batch contains all captions of each image, for evaluation, instead of one caption.
    """

    processor: HfViTProcessor
    keeps_targets: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Create a batch.

        Args:
            examples: B dictionaries with `image` (PIL, or a (C, H, W) uint8 tensor) and `caption`, or `captions` if
                `keeps_targets` is set.

        Returns:
            `pixel_values` (B, C, H, W) float32, the output of the tokenizer (`input_ids` and `attention_mask` (B, S)
            for S tokens, ...), and `return_loss`. If `keeps_targets` is set, the T captions of all images are
            tokenized to (T, S), in the order of the images, and the lists `targets` (dictionaries with `captions`)
            and `files` replace `return_loss`.

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


def sample_captions(example: dict[str, Any]) -> dict[str, Any]:
    """Select at most `MOST_CAPTIONS` of the `captions` of an example at random."""
    captions = example["captions"]
    return {"captions": [captions[number] for number in torch.randperm(len(captions))[:MOST_CAPTIONS]]}


@dataclass
class CaptionCollator:
    """Collator of images and all their captions for `HfViTForImageTextToText`.

    Args:
        processor: Processor that resizes all images to the same size, normalizes them, and tokenizes captions.
        keeps_targets: Whether the batch contains the targets, for evaluation.
    """

    processor: HfViTProcessor
    keeps_targets: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Create a batch.

        Args:
            examples: B dictionaries with `image` (PIL, or a (C, H, W) uint8 tensor) and `captions`.

        Returns:
            `pixel_values` (B, C, H, W) float32, and `input_ids` and `labels` (T, S) of T texts with S tokens. The
            captions of each image are followed by empty texts without labels, so that all images have equally many.
            If `keeps_targets` is set, the lists `targets` (dictionaries with `captions`) and `files` are added.
        """
        batch = _pixels(self.processor.image_processor, [example["image"] for example in examples])
        captions = [example["captions"] for example in examples]
        most, end = max(map(len, captions)), self.processor.tokenizer.eos_token
        texts = [f"{text}{end}" for own in captions for text in own + [""] * (most - len(own))]
        tokens = self.processor(text=texts, return_tensors="pt", padding_side="right")
        shown = tokens["attention_mask"].bool() & torch.tensor([text != end for text in texts])[:, None]
        shown[:, 0] = False  # the model never predicts the first token, so this token has no label
        batch |= {"input_ids": tokens["input_ids"], "labels": tokens["input_ids"].masked_fill(~shown, IGNORED_TOKEN)}
        return _with_targets(batch, examples, self.keeps_targets)


def masked_image_target(row: dict[str, Any]) -> dict[str, Any]:
    """Return a fixed mask seed and the class of an image, as the target of masked image modeling.

    Returns:
        `mask_seed`, the index of the image in the dataset, so that the image always gets the same mask, and
        `class_number`, which is `None` if the class is unknown.
    """
    number = row.get(CLASS, NO_CLASS)
    return {"mask_seed": row["number"], CLASS: None if number == NO_CLASS else number}


def draw_mask_seed(example: dict[str, Any]) -> dict[str, Any]:
    """Return a random `mask_seed`, so that training masks vary."""
    return {"mask_seed": int(torch.randint(2**62, ()))}


@dataclass
class UnlabeledImageCollator(Collator):
    """Collator of images for `HfViTForJointEmbedding`; the random views are created from the batch later.

    Args:
        num_drawn: Number of random numbers that determine the views of one image.
    """

    num_drawn: int

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Create a batch.

        Args:
            examples: B dictionaries with `image` (PIL, or a (C, H, W) uint8 tensor), and `mask_seed` if
                `keeps_targets` is set.

        Returns:
            `pixel_values` (B, C, H, W) float32. If `keeps_targets` is set, random numbers `drawn` (B, `num_drawn`) in
            [0, 1), which are always the same for an image, and the lists `targets` (class numbers or `None`) and
            `files` are added.
        """
        batch = _pixels(self.image_processor, [example["image"] for example in examples])
        if self.keeps_targets:
            generators = [torch.Generator().manual_seed(example["mask_seed"]) for example in examples]
            batch["drawn"] = torch.stack([torch.rand(self.num_drawn, generator=drawn) for drawn in generators])
        return _with_targets(batch, examples, self.keeps_targets)


@dataclass
class ImageCollator(Collator):
    """Collator of images without labels, for `HfViTForImageReconstruction`."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Create a batch from B dictionaries with `image` (PIL, or a (C, H, W) uint8 tensor).

        Returns:
            `pixel_values` (B, C, H, W) float32. If `keeps_targets` is set, the lists `targets` (class numbers or
            `None`) and `files` are added.
        """
        batch = _pixels(self.image_processor, [example["image"] for example in examples])
        return _with_targets(batch, examples, self.keeps_targets)


@dataclass
class MaskedImageModelingCollator(Collator):
    """Collator of images and mask seeds for `HfViTForMaskedImageModeling`.

    The mask of an image depends only on its seed, not on the other images of the batch or on the process.

    Args:
        patch_size: Height and width of a patch in pixels.
        options: Configuration with the mask type and the mask ratio.
    """

    patch_size: tuple[int, int]
    options: HfViTMaskedImageModelingConfig

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Create a batch.

        Args:
            examples: B dictionaries with `image` (PIL, or a (C, H, W) uint8 tensor) and `mask_seed`.

        Returns:
            `pixel_values` (B, C, H, W) float32 and the masks of N patches. Random masks are given as `noise` (B, N),
            from which the model selects the same number of masked patches in each image. Other mask types are given
            as `bool_masked_pos` (B, N) bool. If `keeps_targets` is set, the lists `targets` (class numbers or `None`)
            and `files` are added.

        Raises:
            ValueError: if an example has no `mask_seed`.
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


def size_for_height(height: int, size: tuple[int, int], multiple: tuple[int, int]) -> tuple[int, int]:
    """Return `height` and the width that keeps the aspect ratio of `size`, rounded to a multiple of `multiple[1]`."""
    return height, max(1, round(height * size[1] / size[0] / multiple[1])) * multiple[1]


def multi_scale_sizes(
    size: tuple[int, int], multiple: tuple[int, int], smallest: float = 0.75, largest: float = 1.25
) -> list[tuple[int, int]]:
    """Return the image sizes for multi-scale training.

    Args:
        size: Height and width in pixels at scale 1.
        multiple: Numbers of pixels that the height and width must be multiples of: the patch size, multiplied by the
            window size in patches if the model uses window attention.
        smallest: Smallest height as a fraction of the height in `size`.
        largest: Largest height as a fraction of the height in `size`.

    Returns:
        Heights and widths in pixels, in ascending order.

    Raises:
        ValueError: if no multiple of `multiple[0]` lies between the smallest and the largest height.
    """
    rows = range(max(1, ceil(smallest * size[0] / multiple[0])), int(largest * size[0] / multiple[0]) + 1)
    heights = [row * multiple[0] for row in rows]
    sizes = [size_for_height(height, size, multiple) for height in heights]
    if not sizes:
        raise ValueError(
            f"There is no multiple of {multiple[0]} between {smallest} and {largest} times the height {size[0]}. Use "
            "a larger size, or widen the range."
        )
    return sizes
