"""Object detection: query decoder, matching and losses of all decoders, model and pipeline.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, P prefix tokens, Q queries, L = P
+ N + Q tokens, D hidden size, K classes, M objects of an image, G query groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ObjectDetectionPipeline, Pipeline
from transformers import initialization as init
from transformers.image_transforms import center_to_corners_format
from transformers.models.auto.modeling_auto import MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES
from transformers.models.yolos.modeling_yolos import YolosObjectDetectionOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import capture_outputs

from .adapt_inputs import HfViTInputSized, as_parameter
from .calibration import find_threshold
from .configuration_hf_vit import HfViTConfig
from .deformable_decoder import DetectionPrediction, HfViTDeformableDecoder
from .embeddings import Grid, positions_of_batch, resample_to_grid
from .encoder import HfViTEncoder
from .image_targets import encode_boxes
from .layers import PRIOR_BIAS, HfViTInitialized, HfViTPredictionHead, HfViTQueries
from .modeling_hf_vit import HfViTBlockRunner, HfViTModel
from .nested_options import check_thresholds
from .pipeline_hf_vit import CORNERS, BatchedImagePipeline, ModelInput
from .pretrained import HfViTPreTrainedModel
from .shared import (
    can_read_values,
    check_class_numbers,
    count_processes,
    count_query_blocks,
    in_float32,
    match,
    to_maps,
)
from .task_configurations import HfViTDetectionConfig


NO_OBJECT_WEIGHT = 0.1  # cross-entropy weight of the "no object" class (https://arxiv.org/abs/2005.12872)
FOCAL_ALPHA, FOCAL_GAMMA = 0.25, 2.0
MIN_QUALITY = 0.01  # Minimum target probability of a matched query, even if its box has a low IoU.
CUT_MARGIN = 0.01  # Maximum distance of an incomplete box from the border of its tile, as a share of the tile size.
# Weight of the class cost in matching: as in DETR for cross-entropy, and as in later detectors for sigmoid losses.
CLASS_COSTS = {"cross_entropy": 1.0, "iou_aware": 2.0}


def class_loss_of(options: HfViTDetectionConfig) -> str:
    """Returns the name of the classification loss: `options.class_loss`, or the default of the decoder."""
    return options.class_loss or ("cross_entropy" if options.decoder == "queries" else "iou_aware")


def class_scores_of(config: HfViTConfig) -> str:
    """Returns the activation of the logits of a model: "softmax" or "sigmoid"."""
    options = HfViTDetectionConfig.of(config.detection_config)
    return "softmax" if class_loss_of(options) == "cross_entropy" else "sigmoid"


class HfViTQueryDecoder(HfViTInitialized, HfViTInputSized):
    """Learned queries that are appended to the tokens, and layers that predict boxes and classes from them.

    Sources: YOLOS (https://arxiv.org/abs/2106.00666), DETR (https://arxiv.org/abs/2005.12872).
    """

    def __init__(self, config: HfViTConfig, options: HfViTDetectionConfig) -> None:
        super().__init__()
        self.config = config
        num_blocks = config.num_hidden_layers if options.num_blocks is None else options.num_blocks
        self.num_blocks = count_query_blocks(num_blocks, config, "detection_config")
        width = config.hidden_size
        self.queries = HfViTQueries(options.num_queries, width)
        self.layers = HfViTEncoder(config, options.num_layers or 0)
        num_mid = max(0, self.num_blocks - 1) if options.use_mid_position_embeddings else 0
        num_places = config.num_prefix_tokens + config.grid_size[0] * config.grid_size[1]
        self.mid_position_embeddings = nn.Parameter(torch.zeros(num_mid, num_places, width)) if num_mid else None
        self.mid_query_embeddings = nn.Parameter(torch.zeros(num_mid, options.num_queries, width)) if num_mid else None
        has_no_object = class_loss_of(options) == "cross_entropy"
        initial_bias = 0.0 if has_no_object else PRIOR_BIAS
        self.classifier = HfViTPredictionHead(width, config.num_labels + has_no_object, initial_bias=initial_bias)
        self.box_predictor = HfViTPredictionHead(width, 4)

    def initialize(self, std: float) -> None:
        """Initializes the position embeddings between blocks from a truncated normal distribution."""
        for positions in (self.mid_position_embeddings, self.mid_query_embeddings):
            if positions is not None:
                init.trunc_normal_(positions, mean=0.0, std=std)

    def check_inputs(self, old: HfViTConfig, new: HfViTConfig) -> None:
        """Raises `ValueError` if the number of prefix tokens changes but the position embeddings include them."""
        if self.mid_position_embeddings is not None and new.num_prefix_tokens != old.num_prefix_tokens:
            raise ValueError(
                f"use_cls_token={new.use_cls_token}, use_distillation_token={new.use_distillation_token} and "
                f"num_register_tokens={new.num_register_tokens} do not match the position embeddings between blocks, "
                f"which were built for {old.num_prefix_tokens} tokens before the patches. Change the backbone "
                "(HfViTModel), save it, and load it as HfViTForObjectDetection."
            )

    @torch.no_grad()
    def adapt_inputs(self, old: HfViTConfig, new: HfViTConfig) -> None:
        """Resamples the position embeddings between blocks to another patch grid."""
        table = self.mid_position_embeddings
        if table is not None:
            table = as_parameter(resample_to_grid(table, old, new.grid_size, old.num_prefix_tokens), table)
            self.mid_position_embeddings = table

    def mid_positions(self, grid: Grid, patch_attention_mask: Tensor | None) -> list[Tensor | None]:
        """Returns the position embeddings (1 or B, L, D), or None, to add after each block with queries."""
        table, queries = self.mid_position_embeddings, self.mid_query_embeddings
        if table is None or queries is None:
            return [None] * self.num_blocks

        num_prefix = self.config.num_prefix_tokens
        resample = partial(resample_to_grid, table, self.config, num_prefix=num_prefix)
        positions = positions_of_batch(resample, grid, patch_attention_mask, num_prefix)
        positions = positions.reshape(-1, *positions.shape[-3:])  # (1 or B, blocks, P + N, D)
        positions = torch.cat((positions, queries.expand(len(positions), -1, -1, -1)), dim=2)  # (1 or B, blocks, L, D)
        return [*positions.unbind(1), None]

    def forward(self, tokens: Tensor) -> DetectionPrediction:
        """Maps normalized tokens (B, L, D) to logits (B, Q, K or K + 1) and boxes (B, Q, 4) in [0, 1]."""
        queries = tokens[:, -self.queries.num_embeddings :]
        return DetectionPrediction(self.classifier(queries), self.box_predictor(queries).sigmoid())


def class_probabilities(logits: Tensor, class_loss: str) -> Tensor:
    """Converts logits to class probabilities (B, Q, K) by the activation of the classification loss."""
    return logits.softmax(dim=-1)[..., :-1] if class_loss == "cross_entropy" else logits.sigmoid()


def box_overlaps(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the IoU (...) and generalized IoU (...) of boxes (..., 4) as x1, y1, x2, y2, with broadcasting.

    Boxes without area have an IoU of 0. Source: https://arxiv.org/abs/1902.09630.
    """
    tiny = torch.finfo(boxes.dtype).tiny

    def area(corners: Tensor) -> Tensor:
        width, height = (corners[..., 2:] - corners[..., :2]).clamp_min(0).unbind(-1)
        return width * height

    def between(low: Tensor, high: Tensor) -> Tensor:
        return area(torch.cat((low, high), dim=-1))

    common = between(torch.maximum(boxes[..., :2], others[..., :2]), torch.minimum(boxes[..., 2:], others[..., 2:]))
    hull = between(torch.minimum(boxes[..., :2], others[..., :2]), torch.maximum(boxes[..., 2:], others[..., 2:]))
    union = area(boxes) + area(others) - common
    iou = common / union.clamp_min(tiny)
    return iou, iou - (hull - union) / hull.clamp_min(tiny)


def non_maximum_suppression(boxes: Tensor, labels: Tensor | None, iou_threshold: float) -> Tensor:
    """Returns the indices of the boxes (N, 4), sorted by score, that remain after non-maximum suppression.

    If `labels` (N,) are given, boxes suppress only boxes of the same class.
    """
    iou, _ = box_overlaps(boxes[:, None], boxes[None])
    overlaps = iou > iou_threshold  # (N, N)
    if labels is not None:
        overlaps &= labels[:, None] == labels
    overlaps = overlaps.cpu()
    kept: list[int] = []
    for number in range(len(boxes)):
        if not overlaps[number, kept].any():
            kept.append(number)
    return torch.tensor(kept, dtype=torch.int64, device=boxes.device)


def merge_tiles(
    found: Sequence[Mapping[str, Tensor]],
    places: Sequence[tuple[int, int]],
    sizes: Sequence[tuple[int, int]],
    nms_threshold: float | None = None,
) -> dict[str, Tensor]:
    """Merges the objects in an image and in its tiles, in descending order of scores.

    If the IoU of two boxes of the same class exceeds `nms_threshold`, the box with the lower score is removed. A box
    that ends at a border between tiles may contain only a part of an object. It is also removed if more than half of
    it lies in a box of the same class with a higher score, for example from the neighboring tile.

    Args:
        found: `scores` (N,), `labels` (N,) and `boxes` (N, 4) of the whole image and of each tile, with boxes as left,
            top, right and bottom in pixels of the image or tile.
        places: Row and column of the first pixel of the image, which is (0, 0), and of each tile.
        sizes: Height and width of the image and of each tile in pixels.
        nms_threshold: IoU above which two boxes are duplicates; 0.5 by default.
    """
    height, width = sizes[0]
    columns = []
    for own, (top, left), (rows, cols) in zip(found, places, sizes, strict=True):
        limits = own["boxes"].new_tensor([left, top, left + cols, top + rows])
        boxes = own["boxes"] + limits[[0, 1, 0, 1]]
        inside = (boxes - limits) * limits.new_tensor([1, 1, -1, -1])  # (N, 4) distances from the borders of the tile
        is_inner = limits != limits.new_tensor([0, 0, width, height])
        is_cut = ((inside <= CUT_MARGIN * limits.new_tensor([cols, rows, cols, rows])) & is_inner).any(dim=1)
        columns.append((own["scores"], own["labels"], boxes, is_cut))
    scores, labels, boxes, is_cut = (torch.cat(parts).cpu() for parts in zip(*columns, strict=True))
    order = scores.argsort(descending=True, stable=True)
    scores, labels, boxes, is_cut = scores[order], labels[order], boxes[order], is_cut[order]
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp_min(1e-6).prod(dim=1)
    is_kept = torch.ones_like(is_cut)
    for number in range(len(boxes)):
        if is_kept[number]:
            iou, _ = box_overlaps(boxes[number], boxes)
            share = iou / (1 + iou) * (1 + areas[number] / areas)  # share of each box that lies in this box
            repeats = (iou > (0.5 if nms_threshold is None else nms_threshold)) | (is_cut & (share > 0.5))
            repeats[: number + 1] = False
            is_kept &= ~(repeats & (labels == labels[number]))
    return {"scores": scores[is_kept], "labels": labels[is_kept], "boxes": boxes[is_kept]}


def loss_normalizers(labels: Sequence[Mapping[str, Tensor]], options: HfViTDetectionConfig) -> Tensor:
    """Returns the normalizers (2,) of the classification and box losses, which add up over the parts of a batch.

    Both normalizers are the number of boxes. The exception is the classification loss "cross_entropy": as in DETR, its
    normalizer is the sum of the weights of all queries. Queries without an object have a smaller weight.
    """
    counts = [len(target["class_labels"]) for target in labels]
    if class_loss_of(options) != "cross_entropy":
        return torch.tensor([float(sum(counts))] * 2, dtype=torch.float64)
    num_found = sum(min(count, options.num_queries) for count in counts)
    num_empty = len(labels) * options.num_queries - num_found
    return torch.tensor([num_found + NO_OBJECT_WEIGHT * num_empty, float(sum(counts))], dtype=torch.float64)


def detection_loss(
    predictions: Sequence[DetectionPrediction],
    labels: Sequence[Mapping[str, Tensor]],
    options: HfViTDetectionConfig,
    divisors: Tensor,
    num_groups: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the total loss of the predictions of all layers, and a dictionary of detached, unweighted components.

    Losses are summed over images and divided by `divisors` (2,), from `loss_normalizers`. If the parts of a global
    batch use the divisors of the whole batch, their losses add up to the total loss. Labels are `class_labels` (M,)
    and `boxes` (M, 4) as cx, cy, w, h relative to the image. Each of `num_groups` query groups is matched to all
    objects. Components are `loss_ce`, `loss_bbox` and `loss_giou` of the last prediction; those of earlier layers
    have the layer number as a suffix, such as `loss_ce_0`.
    """
    weights = {"loss_ce": 1.0, "loss_bbox": options.bbox_weight, "loss_giou": options.giou_weight}
    class_divisor, box_divisor = (divisors * num_groups).unbind()
    losses, parts = [], {}
    for number, (logits, boxes) in enumerate(predictions):
        sums = prediction_losses(logits, boxes, labels, options, num_groups)
        suffix = "" if number == len(predictions) - 1 else f"_{number}"
        divided = sums[0] / class_divisor, sums[1] / box_divisor, sums[2] / box_divisor
        for name, value in zip(weights, divided, strict=True):
            losses.append(weights[name] * value)
            parts[name + suffix] = value.detach()
    return torch.stack(losses).sum(), parts


@in_float32
def prediction_losses(
    logits: Tensor,
    boxes: Tensor,
    labels: Sequence[Mapping[str, Tensor]],
    options: HfViTDetectionConfig,
    num_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the classification, L1 and generalized IoU losses of one prediction, each summed over images.

    `logits` are (B, G·Q, K or K + 1) and `boxes` (B, G·Q, 4) as cx, cy, w, h. `labels` are those of `detection_loss`.
    """
    boxes = boxes.to(logits.dtype)
    class_loss = class_loss_of(options)
    sums = []
    for own_logits, own_boxes, target in zip(logits, boxes, labels, strict=True):
        classes = target["class_labels"].to(logits.device, torch.int64)
        truth = target["boxes"].to(logits.device, logits.dtype)
        queries, objects = match_objects(own_logits, own_boxes, classes, truth, options, num_groups)
        chosen, wanted = own_boxes[queries], truth[objects]
        iou, generalized = box_overlaps(center_to_corners_format(chosen), center_to_corners_format(wanted))
        if class_loss == "cross_entropy":
            own_class_loss = cross_entropy_loss(own_logits, queries, classes[objects])
        else:
            own_class_loss = iou_aware_loss(own_logits, queries, classes[objects], iou.detach())
        sums.append(torch.stack((own_class_loss, (chosen - wanted).abs().sum(), (1 - generalized).sum())))
    # If there are no boxes, this zero is the loss. It is never NaN and gives every weight a gradient, as DDP requires.
    nothing = (boxes * 0).nan_to_num().sum()
    class_sum, box_sum, giou_sum = torch.stack(sums).sum(dim=0)
    return class_sum, box_sum + nothing, giou_sum


@torch.no_grad()
def match_objects(
    logits: Tensor, boxes: Tensor, classes: Tensor, truth: Tensor, options: HfViTDetectionConfig, num_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Matches queries of each group to the objects of one image; returns the indices of both, (G·min(Q, M),) each.

    `logits` are (G·Q, K or K + 1), predicted `boxes` (G·Q, 4) and labeled boxes `truth` (M, 4) are cx, cy, w, h, and
    `classes` (M,) are class indices.
    """
    if not len(classes):
        nothing = classes.new_zeros(0)
        return nothing, nothing
    class_loss = class_loss_of(options)
    probabilities = class_probabilities(logits, class_loss)
    if class_loss == "cross_entropy":
        class_cost = -probabilities
    else:
        positive = FOCAL_ALPHA * (1 - probabilities) ** FOCAL_GAMMA * -(probabilities + 1e-8).log()
        negative = (1 - FOCAL_ALPHA) * probabilities**FOCAL_GAMMA * -(1 - probabilities + 1e-8).log()
        class_cost = positive - negative
    distances = torch.cdist(boxes, truth, p=1)
    corners = center_to_corners_format(boxes)[:, None], center_to_corners_format(truth)[None]
    _, generalized = box_overlaps(*corners)  # (G·Q, M)
    cost = CLASS_COSTS[class_loss] * class_cost[:, classes]
    cost = (cost + options.bbox_weight * distances - options.giou_weight * generalized).cpu()
    size = len(cost) // num_groups
    pairs = [match(group) for group in cost.split(size)]
    queries = torch.cat([own + number * size for number, (own, _) in enumerate(pairs)])
    objects = torch.cat([own for _, own in pairs])
    return queries.to(logits.device), objects.to(logits.device)


def cross_entropy_loss(logits: Tensor, queries: Tensor, classes: Tensor) -> Tensor:
    """Returns the cross-entropy summed over queries, with a reduced weight for queries without object.

    `logits` are (Q, K + 1), with "no object" as the last class. `queries` are the indices of matched queries, and
    `classes` are the classes of their objects.
    """
    wanted = torch.full((len(logits),), logits.shape[1] - 1, device=logits.device)
    wanted[queries] = classes
    weights = logits.new_ones(logits.shape[1])
    weights[-1] = NO_OBJECT_WEIGHT
    return F.cross_entropy(logits, wanted, weights, reduction="sum")


def iou_aware_loss(logits: Tensor, queries: Tensor, classes: Tensor, iou: Tensor) -> Tensor:
    """Returns the IoU-aware binary cross-entropy of logits (Q, K), summed over queries.

    The target of a matched query and its class combines its predicted probability and the `iou` of its box; all other
    targets are 0. Source: IA-BCE of LW-DETR (https://arxiv.org/abs/2406.03459), section 3.2, as implemented in
    https://github.com/Atten4Vis/LW-DETR.
    """
    probabilities = logits.sigmoid()
    quality = probabilities[queries, classes].detach() ** FOCAL_ALPHA * iou ** (1 - FOCAL_ALPHA)
    quality = quality.clamp_min(MIN_QUALITY)
    positive = torch.zeros_like(logits).index_put((queries, classes), quality)
    negative = (probabilities**FOCAL_GAMMA).index_put((queries, classes), 1 - quality)
    return -(positive * F.logsigmoid(logits) + negative * F.logsigmoid(-logits)).sum()


def read_labels(labels: Any, patch_attention_mask: Tensor | None) -> tuple[Any, Tensor | None]:
    """Converts boxes relative to the whole image to boxes relative to the part that the model input covers.

    Only labels that the image processor creates from annotations contain this part, as `window`; other labels are
    returned unchanged. If `patch_attention_mask` is `None`, it is also read from the labels, because transformers'
    example scripts collate only images and labels.
    """
    if not isinstance(labels, list | tuple) or not all(isinstance(own, Mapping) and "window" in own for own in labels):
        return labels, patch_attention_mask
    if patch_attention_mask is None and all("patch_attention_mask" in own for own in labels):
        patch_attention_mask = torch.stack([own["patch_attention_mask"] for own in labels])  # (B, h, w)
    relative = []
    for own in labels:
        boxes, is_left = encode_boxes(center_to_corners_format(own["boxes"]), (1, 1), own["window"])
        relative.append({**own, "boxes": boxes, "class_labels": own["class_labels"][is_left]})
    return relative, patch_attention_mask


def check_labels(batch: int, num_classes: int, labels: Any) -> None:
    """Raises `ValueError` unless every image has boxes with classes; values are checked only on the CPU."""
    if not isinstance(labels, list | tuple) or len(labels) != batch:
        given = len(labels) if isinstance(labels, list | tuple) else type(labels).__name__
        raise ValueError(f"labels must be a list with a dictionary for each of the {batch} images, not {given}.")
    for index, target in enumerate(labels):
        if not isinstance(target, Mapping) or not {"class_labels", "boxes"} <= target.keys():
            raise ValueError(f"labels[{index}] must be a dictionary with class_labels and boxes.")
        classes, boxes = target["class_labels"], target["boxes"]
        if classes.ndim != 1 or boxes.shape != (len(classes), 4):
            raise ValueError(
                f"labels[{index}] must have class_labels (objects,) and boxes (objects, 4), not "
                f"{tuple(classes.shape)} and {tuple(boxes.shape)}."
            )
        check_class_numbers(classes, num_classes, name="Class", place=f" in labels[{index}]")
        if can_read_values(boxes) and len(strange := boxes[~((boxes >= 0) & (boxes <= 1)).all(dim=1)]):
            raise ValueError(
                f"labels[{index}] has the box {strange[0].tolist()}, but boxes are center x, center y, width and "
                "height relative to the image, in [0, 1]. The image processor converts boxes in pixels."
            )


@dataclass
class HfViTObjectDetectionOutput(YolosObjectDetectionOutput):
    """Outputs of an object detection model: those of transformers and class probabilities.

    Args:
        loss: Scalar loss, if labels were given.
        loss_dict: Unweighted components of the loss, see `detection_loss`.
        logits: Class logits (B, Q, num_labels), or (B, Q, num_labels + 1) with `class_loss="cross_entropy"`, with
            "no object" as the last class.
        pred_boxes: Boxes (B, Q, 4) as center x, center y, width and height relative to the image without padding.
        probabilities: Class probabilities (B, Q, num_labels), used by `post_process_object_detection`.
        auxiliary_outputs: In training, `logits` and `pred_boxes` of earlier layers.
        last_hidden_state: Tokens (B, L, D) after the final norm. For the deformable decoder, the tokens of the last
            block that it reads, normalized if `config.apply_layernorm`.
        hidden_states: If requested, tokens before the first block and after each block.
        attentions: If requested, attention weights (B, heads, L, L) of each block.
    """

    probabilities: Tensor | None = None


class HfViTForObjectDetection(HfViTPreTrainedModel):
    """Object detection model, which predicts boxes with class probabilities.

    Losses are summed over boxes and divided by the number of boxes on all processes. `HfViTTrainer` uses the number of
    boxes in all accumulated batches of a training step; `transformers.Trainer` uses that of each batch.
    """

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        if not config.num_labels:
            raise ValueError("num_labels=0 is not supported: objects need at least one class. Set num_labels.")
        self.options = HfViTDetectionConfig.of(config.detection_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        is_deformable = self.options.decoder == "deformable"
        self.detection_head = (HfViTDeformableDecoder if is_deformable else HfViTQueryDecoder)(config, self.options)
        self.post_init()
        self._output_capturing_hooks_installed = True  # outputs are recorded by the hooks of `self.model`

    def count_items(self, labels: list[dict[str, Tensor]]) -> Tensor:
        """Returns the normalizers (2,) of the losses of a batch, see `loss_normalizers`."""
        return loss_normalizers(labels, self.options)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: list[dict[str, Tensor]] | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        num_items_in_batch: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTObjectDetectionOutput:
        """Runs the model.

        Args:
            pixel_values: Images (B, C, H, W), with H and W multiples of the patch size.
            labels: Dictionary for each image of `class_labels` (objects,) and `boxes` (objects, 4) as center x, center
                y, width and height relative to the image without padding. Images without objects are allowed. The
                labels that the image processor creates from annotations are accepted too.
            patch_attention_mask: Mask (B, h, w), False for padding on the right and at the bottom.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            num_items_in_batch: Normalizers (2,) of the classification and box losses: the sum of `count_items` over
                all batches of a step on all processes. By default, those of this batch are used, averaged over
                processes in training.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `HfViTObjectDetectionOutput`. The loss is `detection_loss`: in training, for the predictions of all layers
            with queries; in evaluation, for the final prediction.

        Raises:
            ValueError: If an input does not match the model; the message describes valid inputs.
        """
        labels, patch_attention_mask = read_labels(labels, patch_attention_mask)
        if labels is not None and pixel_values is not None:
            check_labels(len(pixel_values), self.config.num_labels, labels)
        hidden_states, blocks = self.model.start_blocks(pixel_values, patch_attention_mask, **kwargs)
        if is_deformable := self.options.decoder == "deformable":
            predictions, last_hidden_state = self._predict_from_levels(hidden_states, blocks, labels, **kwargs)
        else:
            predictions, last_hidden_state = self._predict_from_queries(hidden_states, blocks)
        loss = loss_dict = None
        if labels is not None:
            counts, share = num_items_in_batch, 1
            if counts is None:
                counts = self.count_items(labels).to(predictions[-1].boxes)
                share = count_processes() if self.training else 1
            if share > 1:  # DDP averages gradients, so the loss is divided by the mean count per process
                dist.all_reduce(counts)
            divisors = (counts.where(counts > 0, 1) / share).to(predictions[-1].boxes)  # avoids division by 0
            num_groups = self.options.num_groups if self.training and is_deformable else 1
            loss, loss_dict = detection_loss(predictions, labels, self.options, divisors, num_groups)
        *earlier, result = predictions
        logits = self.calibrated(result.logits, class_loss_of(self.options) == "cross_entropy")
        return HfViTObjectDetectionOutput(
            loss=loss,
            loss_dict=loss_dict,
            logits=logits,
            pred_boxes=result.boxes,
            probabilities=class_probabilities(logits, class_loss_of(self.options)),
            auxiliary_outputs=[{"logits": logits, "pred_boxes": boxes} for logits, boxes in earlier] or None,
            last_hidden_state=last_hidden_state,
        )

    def _predict_from_queries(
        self, hidden_states: Tensor, blocks: HfViTBlockRunner
    ) -> tuple[list[DetectionPrediction], Tensor]:
        """Returns the predictions, the final one last, and the normalized tokens of the query decoder.

        Predictions of earlier layers are computed only in training.
        """
        head: Any = self.detection_head  # typed as Any because PEFT may wrap the decoder
        norm = self.model.norm
        hidden_states, start = blocks.append_queries(hidden_states, head.queries, head.num_blocks)
        masks = blocks.masks(hidden_states)
        states = []
        for block, positions in enumerate(head.mid_positions(blocks.grid, blocks.patch_attention_mask), start=start):
            hidden_states = blocks.run(hidden_states, block, block + 1, **masks)
            states.append(hidden_states)
            hidden_states = hidden_states if positions is None else hidden_states + positions
        whole = {"attention_mask": masks["attention_mask"]}
        for layer in range(len(head.layers.layers)):
            hidden_states = blocks.run(hidden_states, layer, layer + 1, head.layers, **whole)
            states.append(hidden_states)
        hidden_states = norm(hidden_states)
        earlier = [head(norm(state)) for state in states[:-1]] if self.training else []
        return [*earlier, head(hidden_states)], hidden_states

    def _predict_from_levels(
        self, hidden_states: Tensor, blocks: HfViTBlockRunner, labels: Any, **kwargs: Any
    ) -> tuple[list[DetectionPrediction], Tensor]:
        """Returns the predictions of the deformable decoder, the final one last, and the last tokens that it reads.

        Later blocks run only if hidden states or attentions are requested, and do not affect other outputs, because
        DDP requires that every weight that affects an output also affects the loss.
        """
        head: Any = self.detection_head
        config, masks = self.config, blocks.masks(hidden_states)
        runs_all = self.requested_hidden_states(**kwargs) or blocks.output_attentions
        states = [hidden_states]
        for block in range(config.num_hidden_layers if runs_all else max(head.out_indices)):
            states.append(blocks.run(states[-1], block, block + 1, **masks))
        norm = self.model.norm if config.apply_layernorm else nn.Identity()
        seen = {number: norm(states[number]) for number in head.out_indices}
        maps = [to_maps(seen[number][:, config.num_prefix_tokens :], blocks.grid) for number in head.out_indices]
        predictions = head(maps, blocks.patch_attention_mask, labels)
        return predictions if self.training else predictions[-1:], seen[max(seen)]


# transformers' pipeline reports models as unsupported if they are not in this list, even if they are registered.
MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES["hf_vit"] = HfViTForObjectDetection.__name__


class HfViTObjectDetectionPipeline(BatchedImagePipeline, ObjectDetectionPipeline):
    """Object detection pipeline with batched image processing, see `BatchedImagePipeline`.

    The default `threshold` is the one selected in the training run. `nms_threshold` enables non-maximum suppression,
    see `post_process_object_detection`. For a model that was calibrated on held-out images, `max_missed` can be given
    instead of `threshold`: the threshold is chosen so that the expected share of missed objects per image (at an IoU
    of 0.5) does not exceed this value.
    """

    stock: ClassVar[type[Pipeline] | None] = ObjectDetectionPipeline
    task_config: ClassVar[str | None] = "detection_config"

    @property
    def joins_whole_image(self) -> bool:
        """Whether `join_tiles` requires the whole image: True, because large objects do not fit into a tile."""
        return True

    def _sanitize_parameters(
        self, nms_threshold: float | None = None, max_missed: float | None = None, **kwargs: Any
    ) -> Any:
        if max_missed is not None:
            check_thresholds(max_missed=max_missed)
            options = self.model.calibration
            known = options.missed_shares, options.missed_thresholds
            place = self.model.name_or_path
            kwargs["threshold"] = find_threshold("max_missed", max_missed, *known, is_least=False, name_or_path=place)
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        return preprocess, forward, postprocess | ({} if nms_threshold is None else {"nms_threshold": nms_threshold})

    def decode(
        self, outputs: Any, parts: list[ModelInput], threshold: float = 0.5, nms_threshold: float | None = None
    ) -> list[list[dict[str, Any]]]:
        """Returns the objects in each image in descending order of scores, with boxes in integer pixels."""
        return [self._objects(found) for found in self.decode_tiles(outputs, parts, threshold, nms_threshold)]

    def decode_tiles(
        self, outputs: Any, parts: list[ModelInput], threshold: float = 0.5, nms_threshold: float | None = None
    ) -> list[dict[str, Tensor]]:
        """Returns the scores (N,), labels (N,) and boxes (N, 4) of the objects in each tile."""
        sizes = [part.size for part in parts]
        return self.image_processor.post_process_object_detection(outputs, threshold, sizes, nms_threshold)

    def join_tiles(
        self, parts: list[ModelInput], nms_threshold: float | None = None, **_: Any
    ) -> list[dict[str, Any]]:
        """Merges the objects in the whole image and in its tiles, see `merge_tiles`."""
        found, places, sizes = zip(*((part.answer, part.place, part.size) for part in parts), strict=True)
        return self._objects(merge_tiles(found, places, sizes, nms_threshold))

    def _objects(self, found: dict[str, Tensor]) -> list[dict[str, Any]]:
        """Converts scores (N,), labels (N,) and boxes (N, 4) to the result of the pipeline."""
        columns = found["scores"].tolist(), found["labels"].tolist(), found["boxes"].int().tolist()
        id2label = self.model.config.id2label
        return [
            {"score": score, "label": id2label[label], "box": dict(zip(CORNERS, box, strict=True))}
            for score, label, box in zip(*columns, strict=True)
        ]
