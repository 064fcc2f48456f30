"""From the outputs of models of objects to boxes and keypoints in the pixels of each image.

Shapes: B batch, Q queries, K classes or keypoints, N objects, h w heatmaps.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from .image_boxes_hf_vit import Box, decode_boxes, seen_window
from .image_crops_hf_vit import crop_regions, out_of_crops, read_object_boxes
from .post_processing_inputs_hf_vit import Sizes, by_name, check_fields, read_sizes
from .task_keypoints import decode_heatmaps


class HfViTObjectPostProcessing:
    """What the image processors of both backends make of objects."""

    # What of the image processor says which part of an image a model sees
    do_resize: bool | None = True
    size: ClassVar[dict[str, int]]
    do_center_crop: bool | None = None
    crop_size: Any = None
    crop_rounding: str
    ensure_multiple_of: Any = None
    keep_aspect_ratio: bool | None = False
    do_pad: bool | None = False
    hide_padding: bool | None = True
    pad_size: Any = None
    do_affine_crop: bool | None
    box_padding: float

    def post_process_object_detection(
        self, outputs: Any, threshold: float = 0.5, target_sizes: Sizes = None
    ) -> list[dict[str, Tensor]]:
        """Returns the objects in every image, the surest first.

        Of all pairs of a query and a class, as many as there are queries count, those of the highest probability.

        Args:
            outputs: Of a model of detection, `probabilities` (B, Q, K) and `pred_boxes` (B, Q, 4).
            threshold: Probability above which a pair is an object.
            target_sizes: Height and width of each image in pixels, as it was before the image processor.

        Returns:
            For each image `{"scores" (N,) float32, "labels" (N,) int64, "boxes" (N, 4) float32}`. Boxes are left, top,
            right and bottom in pixels; without `target_sizes` relative to what the model sees of the image.

        Raises:
            ValueError: if the outputs are of another model, or sizes do not fit them.
        """
        outputs = by_name(outputs)
        check_fields(outputs, {"probabilities": 3, "pred_boxes": 3}, "HfViTForObjectDetection")
        probabilities, boxes = outputs["probabilities"].float(), outputs["pred_boxes"].float()
        queries, classes = probabilities.shape[1:]
        scores, pairs = probabilities.flatten(1).topk(queries)  # (B, Q), of Q * K
        sizes = [None] * len(scores) if target_sizes is None else read_sizes(target_sizes, len(scores))
        results = []
        for own_scores, own_pairs, own_boxes, size in zip(scores, pairs, boxes, sizes, strict=True):
            is_object = own_scores > threshold  # (Q,)
            chosen = own_pairs[is_object]  # (N,)
            whole: Box = (0.0, 0.0, 1.0, 1.0)
            window = whole if size is None else self._window(*size)
            placed = decode_boxes(own_boxes[chosen // classes], (1, 1) if size is None else size, window)  # (N, 4)
            results.append({"scores": own_scores[is_object], "labels": chosen % classes, "boxes": placed})
        return results

    def post_process_keypoint_detection(
        self, outputs: Any, object_boxes: Any = None, target_sizes: Sizes = None, threshold: float | None = None
    ) -> list[list[dict[str, Tensor]]]:
        """Returns the keypoints of every object in every image.

        Args:
            outputs: Of a model of keypoints, `heatmaps` (sum of N, K, h, w), those of one image after another.
            object_boxes: The boxes (N, 4) of each image that the image processor was given, `None` where it was none.
            target_sizes: Height and width of each image in pixels, as it was before the image processor. Only images
                without boxes need it.
            threshold: Score above which a keypoint is returned; by default all are.

        Returns:
            For each image a list with one entry a box, or one of the whole image: `{"keypoints" (K, 2) float32,
            "scores" (K,) float32, "labels" (K,) int64, "box" (4,) float32}`. Keypoints are x, y in pixels, the centre
            of pixel i being at i; labels are their numbers; boxes left, top, right and bottom.

        Raises:
            ValueError: if the outputs are of another model, boxes or sizes do not fit them, or the image processor
                makes no crops.
        """
        outputs = by_name(outputs)
        check_fields(outputs, {"heatmaps": 4}, "HfViTForKeypointDetection")
        if not self.do_affine_crop:
            raise ValueError(
                "This image processor makes no crops of objects, so it is not known where in an image a heatmap is. "
                "Set do_affine_crop=True, as in the one that belongs to the model."
            )
        heatmaps: Tensor = outputs["heatmaps"]
        boxes = _boxes_of(object_boxes, target_sizes, len(heatmaps))
        crop_size = (self.size["height"], self.size["width"])
        regions = crop_regions(torch.cat(boxes).to(heatmaps.device), crop_size, self.box_padding)  # (sum of N, 4)
        coordinates, scores = decode_heatmaps(heatmaps)  # (sum of N, K, 2), (sum of N, K)
        points = out_of_crops(coordinates.float(), regions, (heatmaps.shape[-2], heatmaps.shape[-1]))
        labels = torch.arange(heatmaps.shape[1], device=heatmaps.device)  # (K,)
        kept = torch.ones_like(scores, dtype=torch.bool) if threshold is None else scores > threshold
        objects = iter(zip(points, scores.float(), kept, strict=True))
        return [
            [
                {"keypoints": own[is_kept], "scores": sure[is_kept], "labels": labels[is_kept], "box": box}
                for box, (own, sure, is_kept) in zip(image, objects, strict=False)
            ]
            for image in boxes
        ]

    def _window(self, height: int, width: int) -> Box:
        """Returns what a model sees of an image, in units of the image."""
        return seen_window(
            height,
            width,
            do_resize=self.do_resize,
            size=self.size,
            ensure_multiple_of=self.ensure_multiple_of,
            keep_aspect_ratio=self.keep_aspect_ratio,
            do_center_crop=self.do_center_crop,
            crop_size=self.crop_size,
            crop_rounding=self.crop_rounding,
            do_pad=self.do_pad,
            hide_padding=self.hide_padding,
            pad_size=self.pad_size,
        )


def _boxes_of(object_boxes: Any, target_sizes: Sizes, count: int) -> list[Tensor]:
    """Returns the boxes (N, 4) of each image, `count` together."""
    if object_boxes is None:
        object_boxes = [None] * count
    images = len(object_boxes)
    sizes = [None] * images if target_sizes is None else read_sizes(target_sizes, images)
    boxes = read_object_boxes(object_boxes, sizes)
    total = sum(map(len, boxes))
    if total != count:
        raise ValueError(
            f"object_boxes has {total} boxes in {images} images, but the outputs are of {count} crops. Give the boxes "
            "that the image processor was given."
        )
    return boxes
