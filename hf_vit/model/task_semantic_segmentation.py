"""Semantic segmentation: heads, losses, model, sliding windows, test-time augmentation and pipeline.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, L tokens, D hidden size, K
classes, s resolution of the head output relative to the patch grid.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchFeature, ImageSegmentationPipeline, Pipeline
from transformers import initialization as init
from transformers.modeling_outputs import SemanticSegmenterOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.import_utils import is_vision_available

from .calibration import calibrate_score
from .configuration_hf_vit import HfViTConfig, to_pair
from .encoder import HfViTLayer, make_norm
from .large_images import blended_bands, class_segments, window_starts
from .layers import HfViTHeadConv2d, HfViTInitialized, HfViTLayerNorm2d, HfViTNamedHead, make_map_norm
from .modeling_hf_vit import HfViTForDensePrediction, HfViTModel
from .pipeline_hf_vit import BatchedImagePipeline, ModelInput
from .shared import (
    check_class_numbers,
    choose_blocks,
    in_float32,
    run_unpadded,
    to_float32_or_higher,
    to_maps,
    upsample_mask,
)
from .task_configurations import HfViTSegmentationConfig


if is_vision_available():
    import PIL.Image


Forward = Callable[[Tensor], Tensor]
Size = int | list[int] | tuple[int, int]  # (height, width) in pixels, or one number for both


def make_simple_head(config: HfViTConfig, options: HfViTSegmentationConfig, in_size: int) -> nn.Module:
    """Creates a head that maps features (B, D, h, w) to logits (B, K, h, w) by a 3x3 and a 1x1 convolution."""
    conv = HfViTHeadConv2d(in_size, config.hidden_size, kernel_size=3, padding=1)
    classifier = HfViTHeadConv2d(config.hidden_size, config.num_labels, kernel_size=1)
    return nn.Sequential(OrderedDict(conv=conv, relu=nn.ReLU(), classifier=classifier))


class HfViTConvSegmentationHead(nn.Module):
    """Head with convolutions, each followed by 2x upsampling (SETR-PUP, https://arxiv.org/abs/2012.15840)."""

    def __init__(self, config: HfViTConfig, options: HfViTSegmentationConfig, in_size: int) -> None:
        super().__init__()
        sizes = [in_size, *[options.hidden_size] * options.num_layers]
        self.stages = nn.ModuleList(
            nn.Sequential(HfViTHeadConv2d(before, after, kernel_size=3, padding=1), HfViTLayerNorm2d(after), nn.ReLU())
            for before, after in pairwise(sizes)
        )
        self.classifier = HfViTHeadConv2d(sizes[-1], config.num_labels, kernel_size=1)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps features (B, C, h, w) to logits (B, K, s·h, s·w)."""
        for stage in self.stages:
            maps = F.interpolate(stage(maps), scale_factor=2, mode="bilinear", align_corners=False)
        return self.classifier(maps)


class HfViTMaskSegmentationHead(HfViTInitialized):
    """Mask transformer of Segmenter (https://arxiv.org/abs/2105.05633).

    Class tokens and patches attend to each other; logits are the products of their normalized embeddings.
    """

    def __init__(self, config: HfViTConfig, options: HfViTSegmentationConfig, in_size: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.projection = nn.Linear(in_size, width)
        self.class_tokens = nn.Parameter(torch.zeros(1, config.num_labels, width))
        self.layers = nn.ModuleList(HfViTLayer(config, index) for index in range(options.num_layers))
        self.norm = make_norm(config, width)
        self.patch_projection = nn.Linear(width, width, bias=False)
        self.class_projection = nn.Linear(width, width, bias=False)
        self.mask_norm = make_norm(config, config.num_labels)

    def initialize(self, std: float) -> None:
        """Initializes the class tokens from the same distribution as the CLS token."""
        init.trunc_normal_(self.class_tokens, mean=0.0, std=std)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps features (B, C, h, w) to logits (B, K, h, w)."""
        patches = self.projection(maps.flatten(2).transpose(1, 2))  # (B, N, D)
        tokens = torch.cat((patches, self.class_tokens.expand(patches.shape[0], -1, -1)), dim=1)  # (B, N + K, D)
        for layer in self.layers:
            tokens = layer(tokens)
        patches, classes = self.norm(tokens).split([patches.shape[1], self.class_tokens.shape[1]], dim=1)
        patches = F.normalize(self.patch_projection(patches), dim=-1)  # (B, N, D)
        classes = F.normalize(self.class_projection(classes), dim=-1)  # (B, K, D)
        masks = self.mask_norm(patches @ classes.transpose(1, 2))  # (B, N, K)
        return to_maps(masks, (maps.shape[-2], maps.shape[-1]))


class HfViTLinearSegmentationHead(nn.Module):
    """Head with a norm ("batch" or "layer") and a linear layer that is applied to each patch."""

    def __init__(self, config: HfViTConfig, options: HfViTSegmentationConfig, in_size: int) -> None:
        super().__init__()
        self.norm = make_map_norm(options.norm, in_size)
        self.classifier = HfViTHeadConv2d(in_size, config.num_labels, kernel_size=1)

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        """Maps features (B, C, h, w) to logits (B, K, h, w); `mask` (B, h, w) excludes padding from the norm."""
        return self.classifier(self.norm(maps, mask))


HEADS = {
    "simple": make_simple_head,
    "conv": HfViTConvSegmentationHead,
    "mask": HfViTMaskSegmentationHead,
    "linear": HfViTLinearSegmentationHead,
}


class HfViTSegmentationHead(HfViTNamedHead):
    """Segmentation head of type `options.head`, which uses the features of the blocks `options.out_indices`."""

    def __init__(self, config: HfViTConfig, options: HfViTSegmentationConfig) -> None:
        if options.class_weights is not None and len(options.class_weights) != config.num_labels:
            raise ValueError(
                f"class_weights has {len(options.class_weights)} numbers, but there are num_labels="
                f"{config.num_labels} classes. Set one number per class."
            )
        indices = choose_blocks(options.out_indices, config)
        super().__init__(options.head, HEADS[options.head](config, options, config.hidden_size * len(indices)))
        self.out_indices = indices

    def forward(self, levels: list[Tensor], mask: Tensor | None = None) -> Tensor:
        """Maps features (B, D, h, w) of each block to logits (B, K, s·h, s·w); `mask` (B, h, w) excludes padding."""
        maps, decoder = torch.cat(levels, dim=1), self.decoder
        if not isinstance(decoder, HfViTLinearSegmentationHead):
            return run_unpadded(decoder, mask, maps)
        # The linear head processes each patch separately, so padding can be removed after the head.
        return run_unpadded(nn.Identity(), mask, decoder(maps, mask))


@in_float32
def segmentation_loss(logits: Tensor, labels: Tensor, options: HfViTSegmentationConfig) -> Tensor:
    """Returns the mean loss per image of logits (B, K, h, w), which are resized to the labels (B, H, W).

    The loss of an image is the mean over pixels not labeled `semantic_loss_ignore_index`, or 0 if there are none. The
    loss of a batch is thus independent of how it is split over processes and accumulation steps.

    Raises:
        ValueError: If labels have another shape or are out of range (range checked only on the CPU).
    """
    check_labels(logits, labels, options.semantic_loss_ignore_index)
    logits = resize_logits(logits, labels.shape[-2:])  # (B, K, H, W)
    counted = labels != options.semantic_loss_ignore_index  # (B, H, W)
    labels = labels.long().where(counted, 0)
    weights = None if options.class_weights is None else logits.new_tensor(list(options.class_weights))
    pixel_weights = (counted if weights is None else counted * weights[labels]).to(logits.dtype)  # (B, H, W)
    total = logits.new_zeros(len(logits))  # (B,)
    if options.cross_entropy_weight or options.focal_weight:
        losses = F.cross_entropy(logits, labels, reduction="none")  # (B, H, W)
        if options.cross_entropy_weight:
            total = total + options.cross_entropy_weight * mean_of_image(losses, pixel_weights)
        if options.focal_weight:
            # Keep the base positive, because a power with an exponent below 1 has an infinite gradient at 0.
            hardness = (-torch.expm1(-losses)).clamp_min(torch.finfo(losses.dtype).tiny) ** options.focal_gamma
            total = total + options.focal_weight * mean_of_image(hardness * losses, pixel_weights)
    if options.dice_weight:
        total = total + options.dice_weight * dice_losses(logits.softmax(dim=1), labels, counted)
    return total.mean()


def resize_logits(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Resizes logits (B, K, h, w) to (B, K, *size) bilinearly in float32 or higher precision."""
    return F.interpolate(to_float32_or_higher(logits), size=list(size), mode="bilinear", align_corners=False)


def mean_of_image(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted mean (B,) over the pixels (B, H, W) of each image, or 0 if all weights are 0."""
    total = weights.sum(dim=(1, 2))
    return (values * weights).sum(dim=(1, 2)) / total.where(total > 0, 1)


def dice_losses(probabilities: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Returns the soft Dice loss (B,) of each image, averaged over the classes that occur in its labels.

    `probabilities` are (B, K, H, W). Pixels for which `counted` (B, H, W) is false are ignored. If all pixels are
    ignored, the loss is 0. Source: https://arxiv.org/abs/1606.04797.
    """
    classes = torch.arange(probabilities.shape[1], device=labels.device)[:, None, None]
    truth = (labels[:, None] == classes) & counted[:, None]  # (B, K, H, W)
    overlap = (probabilities * truth).sum(dim=(2, 3))  # (B, K)
    size = (probabilities * counted[:, None]).sum(dim=(2, 3)) + truth.sum(dim=(2, 3))
    occurs = truth.any(dim=3).any(dim=2)  # (B, K)
    losses = (1 - 2 * overlap / size.where(occurs, 1)) * occurs
    return losses.sum(dim=1) / occurs.sum(dim=1).clamp_min(1)


def check_labels(logits: Tensor, labels: Tensor, ignore_index: int) -> None:
    """Raises `ValueError` unless labels are class indices (B, H, W); their range is checked only on the CPU."""
    if labels.ndim != 3 or len(labels) != len(logits) or labels.is_floating_point():
        raise ValueError(
            f"labels must be class indices (batch, height, width) with batch {len(logits)}, not {labels.dtype} "
            f"of shape {tuple(labels.shape)}."
        )
    check_class_numbers(labels, logits.shape[1], ignore_index)


def slide(forward: Forward, pixel_values: Tensor, window: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Segments images (B, C, H, W) by sliding windows and averages the logits (B, K, H, W) of overlapping windows.

    The function `forward` maps images to logits of any resolution. `window` and `stride` are heights and widths in
    pixels, multiples of the patch size. The last window is shifted back to end at the image border.
    """
    if not (0 < stride[0] <= window[0] and 0 < stride[1] <= window[1]):
        raise ValueError(f"window_stride={stride} must be positive and at most window_size={window} to avoid gaps.")
    height, width = pixel_values.shape[-2:]
    window = min(window[0], height), min(window[1], width)
    total = count = pixel_values.new_zeros(())
    for top in window_starts(height, window[0], stride[0]):
        for left in window_starts(width, window[1], stride[1]):
            logits = forward(pixel_values[:, :, top : top + window[0], left : left + window[1]])
            logits = resize_logits(logits, window)
            if total.ndim == 0:
                total, count = logits.new_zeros(*logits.shape[:2], height, width), logits.new_zeros(height, width)
            total[:, :, top : top + window[0], left : left + window[1]] += logits
            count[top : top + window[0], left : left + window[1]] += 1
    return total / count


def overlapping_stride(window: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Returns a stride of two thirds of the window size, rounded down to a multiple of the patch size."""
    rows, columns = (max(side * 2 // 3 // patch, 1) * patch for side, patch in zip(window, patch_size, strict=True))
    return rows, columns


def segment_copies(
    forward: Forward, pixel_values: Tensor, patch_size: tuple[int, int], scales: Sequence[float], flip: bool
) -> Tensor:
    """Segments images (B, C, H, W) with test-time augmentation by scaling and mirroring.

    The probabilities of all copies are averaged, and their logarithms (B, K, H, W) are returned as logits. The
    function `forward` maps images to logits of any resolution. Scaled sizes are rounded to multiples of the patch
    size. If `flip`, a mirrored copy is added for each scale.
    """
    if not scales or min(scales) <= 0:
        raise ValueError(f"scales={list(scales)} must be positive, with at least one value; 1.0 is the original size.")
    height, width = pixel_values.shape[-2:]
    probabilities = []
    for scale in scales:
        sides = zip((height, width), patch_size, strict=True)
        size = [max(1, round(side * scale / patch)) * patch for side, patch in sides]
        copy = pixel_values
        if size != [height, width]:
            # Antialiased interpolation is not implemented for half precision on CPUs.
            wide = to_float32_or_higher(pixel_values)
            copy = F.interpolate(wide, size=size, mode="bilinear", align_corners=False, antialias=True)
            copy = copy.to(pixel_values.dtype)
        for is_mirrored in (False, True) if flip else (False,):
            logits = forward(copy.flip(-1) if is_mirrored else copy)
            logits = logits.flip(-1) if is_mirrored else logits
            probabilities.append(resize_logits(logits, (height, width)).softmax(dim=1))
    return torch.stack(probabilities).mean(dim=0).clamp_min(torch.finfo(torch.float32).tiny).log()


def window_of(size: Size, patch_size: Size, name: str) -> tuple[int, int]:
    """Converts a size in pixels to (height, width); raises `ValueError` if it is not a multiple of the patch size."""
    pair, patch = to_pair(size), to_pair(patch_size)
    if pair[0] % patch[0] or pair[1] % patch[1] or min(pair) < 1:
        raise ValueError(f"{name}={size} must be a positive multiple of the patch size {patch} in pixels.")
    return pair


@dataclass
class HfViTSemanticSegmenterOutput(SemanticSegmenterOutput):
    """Outputs of a semantic segmentation model: those of transformers and the logits of the auxiliary head.

    Args:
        loss: Scalar loss, if labels were given.
        logits: Logits (B, num_labels, s·h, s·w), which `post_process_semantic_segmentation` resizes.
        hidden_states: If requested, tokens (B, L, D) before the first block and after each block.
        attentions: If requested, attention weights (B, heads, L, L) of each block.
        auxiliary_logits: Logits (B, num_labels, h, w) of the auxiliary head, in training with `use_auxiliary_head`.
    """

    auxiliary_logits: Tensor | None = None


class HfViTForSemanticSegmentation(HfViTForDensePrediction):
    """Semantic segmentation model, which predicts the class of every pixel."""

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        self.options = HfViTSegmentationConfig.of(config.segmentation_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.segmentation_head = HfViTSegmentationHead(config, self.options)
        if config.num_labels < 2:
            raise ValueError(f"num_labels={config.num_labels} must be at least 2 for semantic segmentation.")
        self.auxiliary_layer = max(1, config.num_hidden_layers * 2 // 3)
        has_auxiliary_head = self.options.use_auxiliary_head
        self.auxiliary_head = (
            make_simple_head(config, self.options, config.hidden_size) if has_auxiliary_head else None
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTSemanticSegmenterOutput:
        """Runs the model.

        Args:
            pixel_values: Images (B, C, H, W), with H and W multiples of the patch size.
            labels: Class indices (B, H, W) int64, with `semantic_loss_ignore_index` (255) for ignored pixels.
            patch_attention_mask: Mask (B, h, w), False for padding on the right and at the bottom.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `HfViTSemanticSegmenterOutput`. The loss is `segmentation_loss`, in training plus the auxiliary loss.

        Raises:
            ValueError: If an input does not match the model; the message describes valid inputs.
        """
        indices = self.segmentation_head.out_indices
        auxiliary_head = self.auxiliary_head if self.training else None
        read = indices if auxiliary_head is None else [*indices, self.auxiliary_layer]
        outputs, levels, _ = self.run_encoder(pixel_values, read, patch_attention_mask=patch_attention_mask, **kwargs)
        logits = self.segmentation_head(levels[: len(indices)], patch_attention_mask)
        auxiliary_logits = None
        if auxiliary_head is not None:
            auxiliary_logits = run_unpadded(auxiliary_head, patch_attention_mask, levels[-1])
        loss = None
        if labels is not None:
            loss = segmentation_loss(logits, labels, self.options)
            if auxiliary_logits is not None:
                auxiliary_loss = segmentation_loss(auxiliary_logits, labels, self.options)
                loss = loss + self.options.auxiliary_loss_weight * auxiliary_loss
        return HfViTSemanticSegmenterOutput(
            loss=loss,
            logits=self.calibrated(logits),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            auxiliary_logits=auxiliary_logits,
        )

    @torch.no_grad()
    def segment(
        self,
        pixel_values: Tensor,
        window_size: int | tuple[int, int] | None = None,
        window_stride: int | tuple[int, int] | None = None,
        scales: tuple[float, ...] = (1.0,),
        flip: bool = False,
        patch_attention_mask: Tensor | None = None,
    ) -> SemanticSegmenterOutput:
        """Segments images by sliding windows and test-time augmentation, which is slower but more accurate.

        Args:
            pixel_values: Images (B, C, H, W).
            window_size: Height and width in pixels of sliding windows, for images larger than the training images.
                `None` segments the whole image at once.
            window_stride: Height and width of the steps between windows, by default two thirds of the window size.
            scales: Scales at which copies of each image are segmented; the probabilities of the copies are averaged.
            flip: Whether to add a mirrored copy for each scale.
            patch_attention_mask: Mask (B, h, w), False for padding on the right and at the bottom. With a mask, images
                are segmented one by one.

        Returns:
            `logits` (B, num_labels, H, W), to pass to `post_process_semantic_segmentation`.

        Raises:
            ValueError: If a size is not a multiple of the patch size, or the model is in training mode.
        """
        if self.training:
            raise ValueError("In training mode, results are random because of dropout. Call model.eval() first.")
        patch = to_pair(self.config.patch_size)

        def forward(images: Tensor) -> Tensor:
            return self(images, return_dict=True).logits

        segment_image: Forward = forward
        if window_size is not None:
            window = window_of(window_size, patch, "window_size")
            stride = overlapping_stride(window, patch) if window_stride is None else window_stride
            stride = window_of(stride, patch, "window_stride")
            segment_image = partial(slide, forward, window=window, stride=stride)
        segment_all = partial(segment_copies, segment_image, patch_size=patch, scales=scales, flip=flip)
        mask = upsample_mask(patch_attention_mask, patch)  # (B, H, W)
        return SemanticSegmenterOutput(logits=run_unpadded(segment_all, mask, pixel_values))


class HfViTImageSegmentationPipeline(BatchedImagePipeline, ImageSegmentationPipeline):
    """Image segmentation pipeline with batched image processing, for semantic and universal segmentation models.

    The default `threshold` is the one selected in the training run. For universal segmentation, it applies to
    uncalibrated scores. See `BatchedImagePipeline` for arguments.
    """

    stock: ClassVar[type[Pipeline] | None] = ImageSegmentationPipeline
    task_config: ClassVar[str | None] = "universal_segmentation_config"

    def call_arguments(self, preprocess: dict[str, Any], forward: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Returns the options of one call, with images resized for sliding windows if `window_scale` is set."""
        return self.image_processor.at_window_scale().call_options(), preprocess, forward

    def run_model(self, inputs: BatchFeature, *_: Any, **forward: Any) -> Any:
        """Returns the outputs of the model, averaged over sliding windows if `window_scale` is set."""
        run, patch = super().run_model, to_pair(self.model.config.patch_size)
        if self.image_processor.window_scale is None:
            return run(inputs, **forward)

        def segment_window(pixel_values: Tensor) -> Tensor:
            return run(BatchFeature({"pixel_values": pixel_values}), **forward).logits

        window = window_of(self.image_processor.window_size, patch, "size")
        segment = partial(slide, segment_window, window=window, stride=overlapping_stride(window, patch))
        mask = upsample_mask(inputs.get("patch_attention_mask"), patch)  # (B, H, W)
        return SemanticSegmenterOutput(logits=run_unpadded(segment, mask, inputs["pixel_values"]))

    def decode(
        self,
        outputs: Any,
        parts: list[ModelInput],
        subtask: str | None = None,
        threshold: float = 0.9,
        **options: float,
    ) -> list[list[dict[str, Any]]]:
        """Returns the segments of each image, with masks of the original image size."""
        sizes, processor = [part.size for part in parts], self.image_processor.at_window_scale()
        if subtask == "semantic":
            return [self._classes(own) for own in processor.post_process_semantic_segmentation(outputs, sizes)]
        if subtask not in (None, "panoptic", "instance"):
            raise ValueError(f"subtask={subtask!r} must be one of panoptic, instance, semantic.")
        options = {"threshold": threshold, "overlap_mask_area_threshold": 0.5, **options}
        of_instances = processor.post_process_instance_segmentation
        process = of_instances if subtask == "instance" else processor.post_process_panoptic_segmentation
        results, calibration = process(outputs, target_sizes=sizes, **options), self.model.calibration
        if "masks_queries_logits" in outputs:  # logits of semantic models are already calibrated
            for segment in (own for found in results for own in found["segments_info"]):
                segment["score"] = calibrate_score(segment["score"], calibration)
        return [self._segments(**found) for found in results]

    def decode_tiles(self, outputs: Any, parts: list[ModelInput], **_: Any) -> list[Tensor]:
        """Returns the logits (K, h, w) of each tile, without padding."""
        processor = self.image_processor.at_window_scale()
        return processor.unpadded_maps(outputs, {"logits": 4}, None, [part.size for part in parts])

    def join_tiles(self, parts: list[ModelInput], subtask: str | None = None, **_: Any) -> list[dict[str, Any]]:
        """Returns the segments of an image from the blended logits of its tiles."""
        if subtask not in (None, "panoptic", "semantic"):
            raise ValueError(f"subtask={subtask!r} must be panoptic or semantic if tile_size is set.")
        maps, places = [part.answer for part in parts], [part.place for part in parts]
        bands = blended_bands(maps, places, parts[0].size)
        if subtask == "semantic":
            return self._classes(torch.cat([band.argmax(dim=0) for band in bands]))
        return self._segments(**class_segments(bands))

    def _classes(self, classes: Tensor) -> list[dict[str, Any]]:
        """Converts a map (H, W) of class numbers to the result of the pipeline, without scores."""
        labels = classes.unique().tolist()
        return self._segments(classes, [{"id": label, "label_id": label, "score": None} for label in labels])

    def _segments(self, segmentation: Tensor, segments_info: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Converts a map (H, W) of segment ids and a list of segments to the result of the pipeline."""
        numbers = segmentation.cpu().numpy()
        return [
            {
                "score": segment["score"],
                "label": self.model.config.id2label[segment["label_id"]],
                "mask": PIL.Image.fromarray((numbers == segment["id"]).astype(np.uint8) * np.uint8(255)),
            }
            for segment in segments_info
        ]
