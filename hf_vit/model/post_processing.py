"""Post-processing, which converts model outputs to maps, segments, boxes and keypoints in pixels of the images.

Shapes: B batch, K classes or keypoints, Q queries, C classes or queries, N objects, h w size of the model
output, H W size of the result, r rows of a band.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.image_processing_outputs import SemanticSegmentationPostProcessorOutput

from .configuration_hf_vit import to_pair
from .image_geometry import compute_resized_size, crop_regions, height_and_width, points_from_crops
from .image_targets import NO_SEGMENT, Box, decode_boxes, read_object_boxes, visible_window
from .large_images import class_segments, resized_bands
from .nested_options import check_thresholds
from .task_keypoint_detection import decode_heatmaps, expected_distances
from .task_object_detection import class_probabilities, non_maximum_suppression


CLASS_SCORES = ("softmax", "sigmoid", None)  # activations of object detection logits; None if unknown
Sizes = Any  # list of (height, width), or a tensor (B, 2)
SEMANTIC = {"logits": 4}
UNIVERSAL = {"class_queries_logits": 3, "masks_queries_logits": 4}
DEPTH = {"predicted_depth": 3}
MODELS = {
    "logits": "HfViTForSemanticSegmentation or HfViTForUniversalSegmentation",
    "masks_queries_logits": "HfViTForUniversalSegmentation",
    "predicted_depth": "HfViTForDepthEstimation",
}


def outputs_as_mapping(outputs: Any) -> Mapping[str, Any]:
    """Converts model outputs to a mapping from names to tensors; raises `ValueError` if outputs have no names."""
    if is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = vars(outputs)  # example scripts of transformers pass dataclasses
    if not isinstance(outputs, Mapping):
        raise ValueError(f"The outputs are a {type(outputs).__name__} without names. Set return_dict=True.")
    return outputs


def check_fields(outputs: Mapping[str, Any], fields: dict[str, int], model: str) -> None:
    """Raises `ValueError` unless outputs contain all `fields`, a mapping from names to numbers of dimensions."""
    for name, dimensions in fields.items():
        if name not in outputs or outputs[name].ndim != dimensions:
            found = ", ".join(f"{key} {tuple(x.shape)}" for key, x in outputs.items() if isinstance(x, Tensor))
            raise ValueError(
                f"The outputs have no {name} with {dimensions} dimensions, but {found or 'no tensors'}. Pass the "
                f"outputs of {model}."
            )


def with_probabilities(outputs: Mapping[str, Any], class_scores: str | None) -> Mapping[str, Any]:
    """Adds `probabilities`, computed from `logits` (B, Q, ·), to object detection outputs without probabilities."""
    if "probabilities" in outputs or not {"logits", "pred_boxes"} <= outputs.keys():
        return outputs
    if class_scores is None:
        raise ValueError(
            "The outputs have logits but no probabilities, and class_scores of the image processor is None. Pass all "
            "outputs of the model, or set class_scores: 'softmax' for models with class_loss='cross_entropy', "
            "'sigmoid' for all others."
        )
    class_loss = "cross_entropy" if class_scores == "softmax" else "iou_aware"
    return {**outputs, "probabilities": class_probabilities(outputs["logits"].float(), class_loss)}


def map_sizes(target_sizes: Sizes, maps: list[Tensor]) -> list[tuple[int, int]]:
    """Returns the (height, width) of each result: `target_sizes`, by default the sizes of the maps (..., h, w)."""
    if target_sizes is None:
        return [(values.shape[-2], values.shape[-1]) for values in maps]
    return read_sizes(target_sizes, len(maps))


def read_sizes(target_sizes: Sizes, count: int) -> list[tuple[int, int]]:
    """Converts `target_sizes` to a list of (height, width) in pixels and checks that it has `count` entries."""
    sizes = _plain(target_sizes)
    if not isinstance(sizes, list | tuple) or len(sizes) != count:
        given = f"{len(sizes)} entries" if isinstance(sizes, list | tuple) else f"the type {type(sizes).__name__}"
        raise ValueError(f"target_sizes has {given}, but the outputs are for {count} images. Pass one size per image.")
    return [_pixels(size, index) for index, size in enumerate(map(_plain, sizes))]


def _pixels(size: Any, index: int) -> tuple[int, int]:
    sides = [_plain(side) for side in size] if isinstance(size, list | tuple) else []
    if len(sides) != 2 or not all(isinstance(side, int | float) and side > 0 and side % 1 == 0 for side in sides):
        raise ValueError(f"target_sizes[{index}] is {size!r}, but must be (height, width) in whole pixels.")
    return int(sides[0]), int(sides[1])


def _plain(numbers: Any) -> Any:
    return numbers.tolist() if isinstance(numbers, np.ndarray | np.generic | Tensor) else numbers


class HfViTPostProcessing:
    """Mixin with the `post_process_*` methods of both image processors."""

    label_ids_to_fuse: Collection[int] | None = None
    nms_threshold: float | None = None
    class_agnostic_nms: bool | None = None
    class_scores: str | None = None
    window_scale: float | None = None
    size: ClassVar[dict[str, int]]
    do_affine_crop: bool | None
    box_padding: float
    call_options: Callable[..., dict[str, Any]]  # returns all options as a dictionary

    @property
    def window_size(self) -> tuple[int, int]:
        """Returns the height and width in pixels of the sliding windows that are used with `window_scale`."""
        sides = {name: side for name, side in dict(self.size).items() if side is not None}
        return sides.get("height", min(sides.values())), sides.get("width", min(sides.values()))

    def at_window_scale(self) -> Self:
        """Returns a copy of the image processor that resizes images to `window_scale` times `size`.

        Returns the image processor itself if `window_scale` is `None`.
        """
        if self.window_scale is None:
            return self
        scaled, sides = copy.copy(self), dict(self.size)
        size = {name: round(side * self.window_scale) for name, side in sides.items() if side is not None}
        vars(scaled).update(size=size, window_scale=None)
        return scaled

    def post_process_semantic_segmentation(
        self,
        outputs: Any,
        target_sizes: Sizes = None,
        return_segmentation_scores: bool = False,
        patch_attention_mask: Tensor | None = None,
    ) -> list[Tensor] | list[SemanticSegmentationPostProcessorOutput]:
        """Returns the predicted class of every pixel.

        Args:
            outputs: Outputs of a semantic segmentation model, `logits` (B, K, h, w), or of a universal segmentation
                model, `class_queries_logits` (B, Q, K + 1) and `masks_queries_logits` (B, Q, h, w).
            target_sizes: Height and width of each result in pixels; by default those of the outputs.
            return_segmentation_scores: Whether to also return scores.
            patch_attention_mask: Mask (B, rows, columns) from the image processor, used to remove padding. Without a
                mask, padding is computed from `target_sizes`, which must then be the original image sizes.

        Returns:
            For each image, a map (H, W) int64 of class numbers. With scores, an object with this map as `segmentation`
            and with `segmentation_scores` (K, H, W) float32. Scores are probabilities. For a universal model, they are
            sums over queries of class probability times mask probability, which can exceed 1.

        Raises:
            ValueError: If the outputs are of another model, or do not match the sizes or the mask.
        """
        results: list[Any] = []
        given = self._segmentation_outputs(outputs, patch_attention_mask, target_sizes, is_universal=False)
        for logits, classes, size in given:
            scores: list[Tensor] = []
            winners: list[Tensor] = []
            for band in resized_bands(logits, size):  # (C, r, W)
                band = band if classes is None else torch.einsum("qk,qrw->krw", classes[:, :-1], band.sigmoid())
                winners.append(band.argmax(dim=0))  # (r, W)
                if return_segmentation_scores:
                    scores.append(band.softmax(dim=0) if classes is None else band)
            segmentation = torch.cat(winners)  # (H, W)
            if return_segmentation_scores:
                data = {"segmentation": segmentation, "segmentation_scores": torch.cat(scores, dim=1)}
                results.append(SemanticSegmentationPostProcessorOutput(data=data))
            else:
                results.append(segmentation)
        return results

    def post_process_instance_segmentation(
        self,
        outputs: Any,
        threshold: float = 0.5,
        mask_threshold: float = 0.5,
        overlap_mask_area_threshold: float = 0.8,
        target_sizes: Sizes = None,
        return_coco_annotation: bool = False,
        return_binary_maps: bool = False,
        patch_attention_mask: Tensor | None = None,
    ) -> list[dict[str, Any]]:
        """Returns the instances in every image, at most one per query, as EoMT in transformers. Instances can overlap.

        Args:
            outputs: Outputs of a universal segmentation model: `class_queries_logits` (B, Q, K + 1) and
                `masks_queries_logits` (B, Q, h, w).
            threshold: Minimum score of an instance: its class probability times its mean mask probability.
            mask_threshold: Probability above which a pixel belongs to a mask.
            overlap_mask_area_threshold: Ignored; transformers' pipeline passes it for all kinds of segmentation.
            target_sizes: Height and width of each result in pixels; by default those of the outputs.
            return_coco_annotation: Whether to return masks as run-length encodings.
            return_binary_maps: Whether to return one binary mask per instance.
            patch_attention_mask: Mask (B, rows, columns) from the image processor, used to remove padding. Without a
                mask, padding is computed from `target_sizes`, which must then be the original image sizes.

        Returns:
            For each image, `{"segmentation", "segments_info"}`. `segments_info` lists `{"id", "label_id", "score"}` of
            each instance. `segmentation` is a map (H, W) int64 of ids, -1 for pixels without instance. Where instances
            overlap, it contains the last one. With `return_binary_maps`, it consists of masks (M, H, W) bool; with
            `return_coco_annotation`, of row-major run lengths per mask: [start (from 1), length, ...].

        Raises:
            ValueError: If the outputs are of another model or do not match the sizes or the mask, a threshold is not
                in [0, 1], or both `return_coco_annotation` and `return_binary_maps` are set.
        """
        if return_coco_annotation and return_binary_maps:
            raise ValueError("return_coco_annotation and return_binary_maps are both True. Choose one.")
        check_thresholds(threshold=threshold, mask_threshold=mask_threshold)
        results = []
        for logits, classes, size in self._segmentation_outputs(outputs, patch_attention_mask, target_sizes):
            assert classes is not None
            masks, segments = _instances(logits, classes[:, :-1], size, threshold, mask_threshold)
            segmentation: Any
            if return_coco_annotation:
                segmentation = [_run_length_encoding(mask) for mask in masks]
            elif return_binary_maps:
                segmentation = torch.stack(masks) if masks else logits.new_zeros((0, *size), dtype=torch.bool)
            else:
                segmentation = torch.full(size, NO_SEGMENT, device=logits.device)  # (H, W)
                for number, mask in enumerate(masks):
                    segmentation[mask] = number
            results.append({"segmentation": segmentation, "segments_info": segments})
        return results

    def post_process_panoptic_segmentation(
        self,
        outputs: Any,
        threshold: float = 0.5,
        mask_threshold: float = 0.5,
        overlap_mask_area_threshold: float = 0.8,
        label_ids_to_fuse: Collection[int] | None = None,
        target_sizes: Sizes = None,
        patch_attention_mask: Tensor | None = None,
    ) -> list[dict[str, Any]]:
        """Returns the non-overlapping segments of every image, in the same way as EoMT in transformers.

        The pipeline of transformers calls this method for all segmentation models. It thus also accepts the outputs of
        semantic segmentation models: each predicted class becomes one segment, and the thresholds are ignored.

        Args:
            outputs: Outputs of a universal segmentation model, `class_queries_logits` (B, Q, K + 1) and
                `masks_queries_logits` (B, Q, h, w), or of a semantic segmentation model, `logits` (B, K, h, w).
            threshold: Class probability above which a query becomes a segment.
            mask_threshold: Minimum probability of the pixels of a mask.
            overlap_mask_area_threshold: Minimum fraction of its mask area that a segment must keep after overlapping
                pixels are assigned to other segments; otherwise it is dropped.
            label_ids_to_fuse: Classes merged into one segment per image; by default those of the image processor.
            target_sizes: Height and width of each result in pixels; by default those of the outputs.
            patch_attention_mask: Mask (B, rows, columns) from the image processor, used to remove padding. Without a
                mask, padding is computed from `target_sizes`, which must then be the original image sizes.

        Returns:
            For each image, `{"segmentation": (H, W) int64, "segments_info": [{"id", "label_id", "score"}]}`, with -1
            for pixels without segment. The score is the class probability; for semantic models, its mean over pixels.

        Raises:
            ValueError: If the outputs are of another model, or do not match the sizes or the mask.
        """
        given = self._segmentation_outputs(outputs, patch_attention_mask, target_sizes, is_universal=False)
        check_thresholds(threshold=threshold, mask_threshold=mask_threshold)
        check_thresholds(overlap_mask_area_threshold=overlap_mask_area_threshold)
        fused = self.label_ids_to_fuse if label_ids_to_fuse is None else label_ids_to_fuse
        results = []
        for logits, classes, size in given:
            if classes is None:
                results.append(class_segments(resized_bands(logits, size)))
                continue
            scores, labels = classes.max(dim=-1)  # (Q,)
            kept = (labels < classes.shape[-1] - 1) & (scores > threshold)
            owners, shares = _assign_pixels(logits[kept], scores[kept], size, mask_threshold)
            is_valid = shares > overlap_mask_area_threshold
            results.append(_number_segments(owners, is_valid, scores[kept], labels[kept], fused or ()))
        return results

    def post_process_depth_estimation(
        self,
        outputs: Any,
        target_sizes: Sizes = None,
        patch_attention_mask: Tensor | None = None,
        source_sizes: Sizes = None,
    ) -> list[dict[str, Tensor]]:
        """Returns the predicted depth of every pixel.

        Depth is resized by bicubic interpolation, as for DPT in transformers. It is clamped to the range of the
        prediction, because bicubic interpolation can give negative depth at edges between near and far objects.

        Args:
            outputs: Outputs of a depth estimation model: `predicted_depth` (B, h, w).
            target_sizes: Height and width of each result in pixels; by default those of the outputs.
            patch_attention_mask: Mask (B, rows, columns) from the image processor, used to remove padding. Without a
                mask, padding is computed from `target_sizes`, which must then be the original image sizes.
            source_sizes: Alias of `target_sizes`, named as in ZoeDepth and the depth estimation guide of transformers.

        Returns:
            For each image `{"predicted_depth": (H, W) float32}` in the unit of the model, meters for metric depth.

        Raises:
            ValueError: If the outputs are of another model, or do not match the sizes or the mask.
        """
        target_sizes = source_sizes if target_sizes is None else target_sizes
        maps = self.unpadded_maps(outputs, DEPTH, patch_attention_mask, target_sizes)
        results = []
        for depth, size in zip(maps, map_sizes(target_sizes, maps), strict=True):
            depth = depth.float()  # (h, w)
            low, high = depth.aminmax()
            resized = F.interpolate(depth[None, None], size=size, mode="bicubic")[0, 0]  # (H, W)
            results.append({"predicted_depth": resized.clamp(low, high)})
        return results

    def post_process_object_detection(
        self,
        outputs: Any,
        threshold: float = 0.5,
        target_sizes: Sizes = None,
        nms_threshold: float | None = None,
        class_agnostic_nms: bool | None = None,
    ) -> list[dict[str, Tensor]]:
        """Returns the objects in every image, in descending order of their scores.

        The candidates are the Q pairs of a query and a class with the highest probabilities, for Q queries.

        Args:
            outputs: Outputs of an object detection model: `probabilities` (B, Q, K), or `logits` if `class_scores` is
                set, and `pred_boxes` (B, Q, 4).
            threshold: Probability above which a candidate is an object.
            target_sizes: Original height and width of each image in pixels, before preprocessing.
            nms_threshold: IoU above which non-maximum suppression removes the box with the lower score of two boxes of
                the same class; 1 disables it. By default, the option of the image processor is used. It is usually
                `None`, because models are trained to predict one box per object.
            class_agnostic_nms: Whether non-maximum suppression also compares boxes of different classes. By default,
                the option of the image processor is used.

        Returns:
            For each image `{"scores" (N,) float32, "labels" (N,) int64, "boxes" (N, 4) float32}`. Boxes are left, top,
            right and bottom in pixels; without `target_sizes`, relative to the image part that the model input covers.

        Raises:
            ValueError: If the outputs are of another model, do not match the sizes, or a threshold is not in [0, 1].
        """
        nms_threshold = self.nms_threshold if nms_threshold is None else nms_threshold
        is_agnostic = self.class_agnostic_nms if class_agnostic_nms is None else class_agnostic_nms
        check_thresholds(threshold=threshold, nms_threshold=nms_threshold)
        outputs = with_probabilities(outputs_as_mapping(outputs), self.class_scores)
        check_fields(outputs, {"probabilities": 3, "pred_boxes": 3}, "HfViTForObjectDetection")
        probabilities, boxes = outputs["probabilities"].float(), outputs["pred_boxes"].float()
        queries, classes = probabilities.shape[1:]
        scores, pairs = probabilities.flatten(1).topk(queries)  # (B, Q), best of Q * K
        sizes = [None] * len(scores) if target_sizes is None else read_sizes(target_sizes, len(scores))
        options = self.call_options()
        results = []
        for own_scores, own_pairs, own_boxes, size in zip(scores, pairs, boxes, sizes, strict=True):
            is_object = own_scores > threshold  # (Q,)
            chosen = own_pairs[is_object]  # (N,)
            whole: Box = (0.0, 0.0, 1.0, 1.0)
            window = whole if size is None else visible_window(*size, **options)
            placed = decode_boxes(own_boxes[chosen // classes], (1, 1) if size is None else size, window)  # (N, 4)
            found = {"scores": own_scores[is_object], "labels": chosen % classes, "boxes": placed}
            if nms_threshold is not None:
                kept = non_maximum_suppression(placed, None if is_agnostic else found["labels"], nms_threshold)
                found = {name: values[kept] for name, values in found.items()}
            results.append(found)
        return results

    def post_process_keypoint_detection(
        self,
        outputs: Any,
        object_boxes: Any = None,
        target_sizes: Sizes = None,
        threshold: float | None = None,
        error_scale: float = 0.0,
    ) -> list[list[dict[str, Tensor]]]:
        """Returns the keypoints of every object in every image.

        Args:
            outputs: Outputs of a keypoint detection model: `heatmaps` (sum of N, K, h, w), image by image.
            object_boxes: Boxes (N, 4) of each image that were passed to the image processor, or `None` for whole
                images.
            target_sizes: Original height and width of each image in pixels, required only for images without boxes.
            threshold: Score above which a keypoint is returned. By default, all keypoints are returned.
            error_scale: Factor from the calibration of the model that converts the mean distance of heatmap positions
                from a keypoint to its expected error. If it is 0, expected errors are not returned.

        Returns:
            For each image, a list with one entry per box, or one for the whole image: `{"keypoints" (K, 2) float32,
            "scores" (K,) float32, "labels" (K,) int64, "box" (4,) float32}`, and "expected_errors" (K,) in pixels
            unless `error_scale` is 0. Keypoints are x and y in pixels, with the center of pixel i at i. Labels are
            keypoint indices, and boxes are left, top, right and bottom.

        Raises:
            ValueError: If the outputs are of another model or do not match the boxes or sizes, or if `do_affine_crop`
                of the image processor is `False`.
        """
        check_thresholds(threshold=threshold)
        outputs = outputs_as_mapping(outputs)
        check_fields(outputs, {"heatmaps": 4}, "HfViTForKeypointDetection")
        if not self.do_affine_crop:
            raise ValueError("This image processor does not crop objects. Set do_affine_crop=True.")
        heatmaps: Tensor = outputs["heatmaps"]
        boxes = _check_object_boxes(object_boxes, target_sizes, len(heatmaps))
        boxes_of_all = torch.cat(boxes).to(heatmaps.device)  # (sum of N, 4)
        regions = crop_regions(boxes_of_all, height_and_width(self.size), self.box_padding)
        coordinates, scores = decode_heatmaps(heatmaps)  # (sum of N, K, 2), (sum of N, K)
        points = points_from_crops(coordinates.float(), regions, (heatmaps.shape[-2], heatmaps.shape[-1]))
        labels = torch.arange(heatmaps.shape[1], device=heatmaps.device)  # (K,)
        found = {"keypoints": points, "scores": scores.float(), "labels": labels.expand_as(scores)}
        if error_scale:
            pixel = (regions[:, 2:3] - regions[:, :1]) / (heatmaps.shape[-1] - 1)  # width of a heatmap pixel (., 1)
            found["expected_errors"] = (error_scale * pixel * expected_distances(heatmaps, coordinates)).float()
        kept = torch.ones_like(scores, dtype=torch.bool) if threshold is None else scores > threshold
        objects = iter(range(len(points)))
        return [
            [
                {**{name: values[index][kept[index]] for name, values in found.items()}, "box": box}
                for box, index in zip(image, objects, strict=False)
            ]
            for image in boxes
        ]

    def unpadded_maps(
        self, outputs: Any, fields: dict[str, int], patch_attention_mask: Tensor | None, target_sizes: Sizes
    ) -> list[Tensor]:
        """Returns the last output in `fields`, which maps names to numbers of dimensions, for each unpadded image.

        Padding is determined by the mask or, without a mask, by the target sizes.
        """
        maps, options = _masked_maps(outputs, fields, patch_attention_mask), self.call_options()
        if not options["do_pad"] or patch_attention_mask is not None or target_sizes is None:
            return maps
        # Padding that is hidden from the model consists of whole patches; visible padding has any number of pixels.
        unit = to_pair(options["ensure_multiple_of"]) if options["hide_padding"] else (1, 1)
        parts = [_size_in_batch(*size, unit, options) for size in map_sizes(target_sizes, maps)]
        canvas = max(rows for rows, _ in parts), max(columns for _, columns in parts)
        if options["pad_size"] is not None:
            canvas = options["pad_size"]["height"] // unit[0], options["pad_size"]["width"] // unit[1]
        if all(part == canvas for part in parts):
            return maps
        if options["hide_padding"]:
            _check_canvas(maps[0], canvas, unit, parts)
        return [_crop_to_image(values, part, canvas) for values, part in zip(maps, parts, strict=True)]

    def _segmentation_outputs(
        self, outputs: Any, patch_attention_mask: Tensor | None, target_sizes: Sizes, is_universal: bool = True
    ) -> list[tuple[Tensor, Tensor | None, tuple[int, int]]]:
        """Returns the logits (Q or K, h, w), class probabilities (Q, K + 1) and output size of each image.

        Outputs of semantic segmentation models are accepted unless `is_universal`; they have no class probabilities.
        """
        outputs = outputs_as_mapping(outputs)
        is_universal = is_universal or "masks_queries_logits" in outputs
        maps = self.unpadded_maps(outputs, UNIVERSAL if is_universal else SEMANTIC, patch_attention_mask, target_sizes)
        sizes = map_sizes(target_sizes, maps)
        if not is_universal:
            return [(own, None, size) for own, size in zip(maps, sizes, strict=True)]
        classes = (own.float().softmax(dim=-1) for own in outputs["class_queries_logits"])
        return list(zip(maps, classes, sizes, strict=True))


def _size_in_batch(height: int, width: int, unit: tuple[int, int], options: dict[str, Any]) -> tuple[int, int]:
    """Returns how many rows and columns of a padded batch an image covers, in units of `unit` pixels."""
    if options["do_resize"]:
        height, width = compute_resized_size(height, width, **options)
    if options["do_center_crop"]:
        height, width = height_and_width(options["crop_size"])
    return -(-height // unit[0]), -(-width // unit[1])


def _crop_to_image(values: Tensor, part: tuple[int, int], whole: tuple[int, int]) -> Tensor:
    """Removes padding from maps (..., h, w) of an image that fills `part` of the `whole` rows and columns."""
    rows, columns = (
        max(1, round(side * own / total)) for side, own, total in zip(values.shape[-2:], part, whole, strict=True)
    )
    return values[..., :rows, :columns]


def _check_canvas(
    values: Tensor, canvas: tuple[int, int], patch_size: tuple[int, int], parts: list[tuple[int, int]]
) -> None:
    """Raises `ValueError` unless the size of maps (..., h, w) is consistent with the patches of a padded batch.

    `canvas` is the number of patch rows and columns of the batch; `parts` lists those that each image fills.
    """
    (down, odd_rows), (across, odd_columns) = (
        divmod(side, patches) for side, patches in zip(values.shape[-2:], canvas, strict=True)
    )
    is_even = down == across or down * patch_size[1] == across * patch_size[0]
    is_inside = all(rows <= canvas[0] and columns <= canvas[1] for rows, columns in parts)
    if odd_rows or odd_columns or not is_even or not is_inside:
        raise ValueError(
            f"The outputs of size {values.shape[-2]} x {values.shape[-1]} do not match images of target_sizes, which "
            f"this image processor pads to {canvas[0]} x {canvas[1]} patches. Pass the patch_attention_mask that it "
            "returned."
        )


def _masked_maps(outputs: Any, fields: dict[str, int], patch_attention_mask: Tensor | None) -> list[Tensor]:
    """Checks `fields` of the outputs and returns the last one for each image, without patches masked as padding."""
    outputs = outputs_as_mapping(outputs)
    check_fields(outputs, fields, MODELS[[*fields][-1]])
    maps: Tensor = outputs[[*fields][-1]]
    if patch_attention_mask is None:
        return list(maps)
    if len(patch_attention_mask) != len(maps):
        raise ValueError(
            f"patch_attention_mask is for {len(patch_attention_mask)} images, but the outputs are for {len(maps)}. "
            "Pass the mask of the same batch."
        )
    rows, columns = patch_attention_mask.shape[-2:]
    parts = [(int(mask.any(dim=1).sum()), int(mask.any(dim=0).sum())) for mask in patch_attention_mask]
    return [_crop_to_image(values, part, (rows, columns)) for values, part in zip(maps, parts, strict=True)]


def _instances(
    logits: Tensor, classes: Tensor, size: tuple[int, int], threshold: float, mask_threshold: float
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Returns the instance masks (H, W) and segments of one image.

    `logits` (Q, h, w) are mask logits, and `classes` (Q, K) are class probabilities.
    """
    scores, labels = classes.max(dim=-1)  # (Q,)
    least = torch.tensor(mask_threshold).logit().item()
    masks: list[Tensor] = []
    segments: list[dict[str, Any]] = []
    # Skip queries below the threshold, because multiplying by the mask probability can only lower their scores.
    for query in (scores >= threshold).nonzero().flatten().tolist():
        values = torch.cat([band[0] for band in resized_bands(logits[query, None], size)])  # (H, W)
        mask = values > least
        score = float(scores[query] * (values.sigmoid() * mask).sum() / (mask.sum() + 1e-6))
        if score >= threshold and mask.any():
            segments.append({"id": len(segments), "label_id": int(labels[query]), "score": round(score, 6)})
            masks.append(mask)
    return masks, segments


def _run_length_encoding(mask: Tensor) -> list[int]:
    """Returns the row-major run-length encoding of a mask (H, W): [start (from 1), length, start, length, ...]."""
    ends = mask.flatten().int().diff(prepend=mask.new_zeros(1).int(), append=mask.new_zeros(1).int()).nonzero()
    starts, stops = ends.view(-1, 2).T
    return torch.stack((starts + 1, stops - starts), dim=1).flatten().tolist()


def _assign_pixels(
    logits: Tensor, scores: Tensor, size: tuple[int, int], mask_threshold: float
) -> tuple[Tensor, Tensor]:
    """Assigns each pixel to the query with the highest product of mask probability and score.

    Returns the query index (H, W) of each pixel, -1 if the mask probability is below the threshold, and the share (Q,)
    of each query. The share is the number of pixels for which the query has the highest product, divided by its mask
    area, or 0 if no pixel is assigned to it.
    """
    queries = len(scores)
    if queries == 0:
        return torch.full(size, NO_SEGMENT, device=logits.device), scores
    owners = []
    won, area = scores.new_zeros(queries, dtype=torch.int64), scores.new_zeros(queries, dtype=torch.int64)
    for band in resized_bands(logits, size):  # (Q, r, W)
        masks = band.sigmoid()
        winner = (masks * scores[:, None, None]).argmax(dim=0)  # (r, W)
        is_inside = masks.gather(0, winner[None])[0] >= mask_threshold
        won += winner.flatten().bincount(minlength=queries)
        area += (masks >= mask_threshold).flatten(1).sum(dim=1)
        owners.append(torch.where(is_inside, winner, NO_SEGMENT))
    owner = torch.cat(owners)  # (H, W)
    kept = owner[owner >= 0].bincount(minlength=queries)
    return owner, torch.where(kept > 0, won / area.clamp(min=1), 0)


def _number_segments(
    owners: Tensor, is_valid: Tensor, scores: Tensor, labels: Tensor, fused: Collection[int]
) -> dict[str, Any]:
    """Returns the map (H, W) and list of segments of valid queries; segments of a class in `fused` become one."""
    # The additional last entry is for pixels without a query, for which `owners` is -1.
    numbers = torch.full((len(scores) + 1,), NO_SEGMENT, device=owners.device)
    segments: list[dict[str, Any]] = []
    first: dict[int, int] = {}
    for query in is_valid.nonzero().flatten().tolist():
        label = int(labels[query])
        if label in fused and label in first:
            numbers[query] = first[label]
            continue
        numbers[query] = first[label] = len(segments)
        segments.append({"id": len(segments), "label_id": label, "score": round(float(scores[query]), 6)})
    return {"segmentation": numbers[owners], "segments_info": segments}


def _check_object_boxes(object_boxes: Any, target_sizes: Sizes, count: int) -> list[Tensor]:
    object_boxes = [None] * count if object_boxes is None else object_boxes
    images = len(object_boxes)
    sizes = [None] * images if target_sizes is None else read_sizes(target_sizes, images)
    boxes = read_object_boxes(object_boxes, sizes)
    total = sum(map(len, boxes))
    if total != count:
        raise ValueError(
            f"object_boxes has {total} boxes in {images} images, but the outputs are for {count} crops. Pass the "
            "boxes that were passed to the image processor."
        )
    return boxes
