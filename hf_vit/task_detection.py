"""Object detection: queries in the encoder that become boxes with a class, and the losses of every decoder.

Shapes: B batch, h w patch grid, N = h·w, P prefix tokens, Q queries, L = P + N + Q, D hidden size, K classes, M
objects of an image, G groups of queries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.image_transforms import center_to_corners_format

from .configuration_hf_vit import HfViTConfig
from .configuration_objects_hf_vit import HfViTDetectionConfig
from .decoders_hf_vit import PRIOR_BIAS, HfViTPredictionHead, HfViTQueries, in_full_precision
from .embeddings_hf_vit import Grid, lay_out, resample_position_embeddings
from .encoder_hf_vit import HfViTEncoder
from .initialization_hf_vit import HfViTOwnStart
from .matching_hf_vit import match
from .outputs_hf_vit import DetectionPrediction


NO_OBJECT_WEIGHT = 0.1  # of a query without an object in the cross-entropy (https://arxiv.org/abs/2005.12872)
FOCAL_ALPHA, FOCAL_GAMMA = 0.25, 2.0
MIN_QUALITY = 0.01  # what a matched query is taught at least, however badly its box fits
# Of the classes in the matching, beside the weights of the boxes: as in DETR, and in its descendants without softmax
CLASS_COSTS = {"cross_entropy": 1.0, "focal": 2.0, "iou_aware": 2.0}


def class_loss_of(options: HfViTDetectionConfig) -> str:
    """Returns the name of the loss of the classes, which has a default for each decoder."""
    return options.class_loss or ("cross_entropy" if options.decoder == "queries" else "iou_aware")


class HfViTQueryDecoder(HfViTOwnStart):
    """Learned queries that join the patches, and what makes boxes and classes of them.

    Sources: YOLOS (https://arxiv.org/abs/2106.00666), DETR (https://arxiv.org/abs/2005.12872).
    """

    def __init__(self, config: HfViTConfig, options: HfViTDetectionConfig) -> None:
        """Builds the decoder.

        Raises:
            ValueError: if the encoder has fewer blocks than the queries shall pass through.
        """
        super().__init__()
        self.config = config
        self.num_blocks = config.num_hidden_layers if options.num_blocks is None else options.num_blocks
        if self.num_blocks > config.num_hidden_layers:
            raise ValueError(
                f"num_blocks={self.num_blocks} blocks for the queries are more than the encoder has, "
                f"num_hidden_layers={config.num_hidden_layers}. Lower num_blocks in detection_config."
            )
        width = config.hidden_size
        self.queries = HfViTQueries(options.num_queries, width)
        self.layers = HfViTEncoder(config, options.num_layers or 0)
        num_mid = max(0, self.num_blocks - 1) if options.use_mid_position_embeddings else 0
        num_places = config.num_prefix_tokens + config.grid_size[0] * config.grid_size[1]
        self.mid_position_embeddings = nn.Parameter(torch.zeros(num_mid, num_places, width)) if num_mid else None
        self.mid_query_embeddings = nn.Parameter(torch.zeros(num_mid, options.num_queries, width)) if num_mid else None
        has_no_object = class_loss_of(options) == "cross_entropy"
        self.classifier = HfViTPredictionHead(
            width, config.num_labels + has_no_object, initial_bias=0.0 if has_no_object else PRIOR_BIAS
        )
        self.box_predictor = HfViTPredictionHead(width, 4)

    def initialize(self, std: float) -> None:
        """Draws the positions between the blocks, as those before them."""
        for positions in (self.mid_position_embeddings, self.mid_query_embeddings):
            if positions is not None:
                init.trunc_normal_(positions, mean=0.0, std=std)

    def join_queries(self, hidden_states: Tensor) -> Tensor:
        """(B, P + N, D) to (B, L, D), with the queries at the end."""
        # Not `queries.weight`, which may lie on a disk: only a call fetches it.
        queries = self.queries(torch.arange(self.queries.num_embeddings, device=hidden_states.device))
        queries = queries.to(hidden_states.device).expand(len(hidden_states), -1, -1)
        return torch.cat((hidden_states, queries), dim=1)

    def mid_positions(self, grid: Grid, patch_attention_mask: Tensor | None) -> list[Tensor | None]:
        """What is added to all tokens after each block that queries pass through: (1 or B, L, D) or nothing.

        Args:
            grid: Rows h and columns w of patches.
            patch_attention_mask: (B, h, w) bool, False for padding; None if there is none.
        """
        table, queries = self.mid_position_embeddings, self.mid_query_embeddings
        if table is None or queries is None:
            return [None] * self.num_blocks

        def resample(own_grid: Grid) -> Tensor:
            config = self.config
            return resample_position_embeddings(
                table,
                config.grid_size,
                own_grid,
                num_prefix=config.num_prefix_tokens,
                mode=config.position_interpolation,
                antialias=config.position_antialias,
            )

        places = lay_out(resample, grid, patch_attention_mask, self.config.num_prefix_tokens)
        places = places.reshape(-1, *places.shape[-3:])  # (1 or B, blocks, P + N, D)
        places = torch.cat((places, queries.expand(len(places), -1, -1, -1)), dim=2)  # (1 or B, blocks, L, D)
        return [*places.unbind(1), None]

    def forward(self, tokens: Tensor) -> DetectionPrediction:
        """Tokens (B, L, D) after the final norm to logits (B, Q, K or K + 1) and boxes (B, Q, 4) in [0, 1]."""
        queries = tokens[:, -self.queries.num_embeddings :]
        return DetectionPrediction(self.classifier(queries), self.box_predictor(queries).sigmoid())


def class_probabilities(logits: Tensor, class_loss: str) -> Tensor:
    """Returns how likely each query is an object of each class, (B, Q, K), from logits as they were trained."""
    return logits.softmax(dim=-1)[..., :-1] if class_loss == "cross_entropy" else logits.sigmoid()


def box_overlaps(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union of boxes, and the generalised one (https://arxiv.org/abs/1902.09630).

    Args:
        boxes: (..., 4) as x1, y1, x2, y2.
        others: The same; both are broadcast.

    Returns:
        Two times (...). Boxes without area overlap nothing.
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


def count_boxes(labels: Sequence[Mapping[str, Tensor]], is_training: bool) -> float:
    """Returns by what the losses of a batch are divided: its number of boxes, at least 1.

    In training it is the mean over processes, whose gradients are averaged: their sum is then divided by all boxes.
    """
    count = sum(len(target["class_labels"]) for target in labels)
    if is_training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        total = torch.tensor(float(count), device=labels[0]["boxes"].device)
        dist.all_reduce(total)
        return max(float(total), 1.0) / dist.get_world_size()
    return max(count, 1)


def detection_loss(
    predictions: Sequence[DetectionPrediction],
    labels: Sequence[Mapping[str, Tensor]],
    options: HfViTDetectionConfig,
    num_boxes: float | Tensor,
    num_groups: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the result and of all that was predicted on the way to it.

    Each is a sum over images, so with `num_boxes` of a global batch the sum over its parts does not depend on how it
    is split.

    Args:
        predictions: The last one is the result.
        labels: For each image `class_labels` (M,) and `boxes` (M, 4), cx, cy, w, h relative to the image.
        options: Weights and losses.
        num_boxes: What the sums are divided by.
        num_groups: Number G of groups of queries, each of which finds all objects by itself.

    Returns:
        The loss and its parts, detached: `loss_ce`, `loss_bbox` and `loss_giou` of the result, before weights; of the
        others the same with their numbers behind.
    """
    weights = {"loss_ce": 1.0, "loss_bbox": options.bbox_weight, "loss_giou": options.giou_weight}
    losses, parts = [], {}
    for number, (logits, boxes) in enumerate(predictions):
        sums = prediction_losses(logits, boxes, labels, options, num_groups)
        suffix = "" if number == len(predictions) - 1 else f"_{number}"
        for name, value in zip(weights, sums, strict=True):
            value = value / (num_boxes * num_groups)
            losses.append(weights[name] * value)
            parts[name + suffix] = value.detach()
    return torch.stack(losses).sum(), parts


@in_full_precision
def prediction_losses(
    logits: Tensor,
    boxes: Tensor,
    labels: Sequence[Mapping[str, Tensor]],
    options: HfViTDetectionConfig,
    num_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over all images of the losses of classes, of the L1 distance of boxes and of 1 - their generalised IoU.

    Args:
        logits: (B, G·Q, K or K + 1).
        boxes: (B, G·Q, 4) as cx, cy, w, h.
        labels: See `detection_loss`.
        options: Weights and losses.
        num_groups: Number G of groups of queries.
    """
    precision = torch.promote_types(logits.dtype, torch.float32)
    logits, boxes = logits.to(precision), boxes.to(precision)
    class_loss = class_loss_of(options)
    sums = []
    for own_logits, own_boxes, target in zip(logits, boxes, labels, strict=True):
        classes = target["class_labels"].to(logits.device, torch.int64)
        truth = target["boxes"].to(logits.device, precision)
        queries, objects = match_objects(own_logits, own_boxes, classes, truth, options, num_groups)
        chosen, wanted = own_boxes[queries], truth[objects]
        iou, generalized = box_overlaps(center_to_corners_format(chosen), center_to_corners_format(wanted))
        if class_loss == "cross_entropy":
            own_class_loss = cross_entropy_loss(own_logits, queries, classes[objects])
        elif class_loss == "focal":
            own_class_loss = focal_loss(own_logits, queries, classes[objects])
        else:
            own_class_loss = iou_aware_loss(own_logits, queries, classes[objects], iou.detach())
        sums.append(torch.stack((own_class_loss, (chosen - wanted).abs().sum(), (1 - generalized).sum())))
    # A sum over no box has no gradient; this one is zero, for every weight to have one, however far off a box is.
    nothing = (boxes * 0).nan_to_num().sum()
    class_sum, box_sum, giou_sum = torch.stack(sums).sum(dim=0)
    return class_sum, box_sum + nothing, giou_sum


@torch.no_grad()
def match_objects(
    logits: Tensor,
    boxes: Tensor,
    classes: Tensor,
    truth: Tensor,
    options: HfViTDetectionConfig,
    num_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Pairs the queries of one image with its objects, in each group of queries anew (Hungarian algorithm).

    Args:
        logits: (G·Q, K or K + 1).
        boxes: (G·Q, 4) as cx, cy, w, h.
        classes: (M,) int64.
        truth: (M, 4).
        options: Weights and losses.
        num_groups: Number G of groups.

    Returns:
        Numbers of the queries and of their objects, each (G·min(Q, M),).
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
    _, generalized = box_overlaps(
        center_to_corners_format(boxes)[:, None], center_to_corners_format(truth)[None]
    )  # (G·Q, M)
    cost = CLASS_COSTS[class_loss] * class_cost[:, classes]
    cost = (cost + options.bbox_weight * distances - options.giou_weight * generalized).cpu()
    size = len(cost) // num_groups
    pairs = [match(group) for group in cost.split(size)]
    queries = torch.cat([own + number * size for number, (own, _) in enumerate(pairs)])
    objects = torch.cat([own for _, own in pairs])
    return queries.to(logits.device), objects.to(logits.device)


def cross_entropy_loss(logits: Tensor, queries: Tensor, classes: Tensor) -> Tensor:
    """Sum over all queries, of which those without an object count less.

    Args:
        logits: (Q, K + 1), the last one standing for no object.
        queries: Numbers of the queries that have an object.
        classes: Their classes.
    """
    wanted = torch.full((len(logits),), logits.shape[1] - 1, device=logits.device)
    wanted[queries] = classes
    weights = logits.new_ones(logits.shape[1])
    weights[-1] = NO_OBJECT_WEIGHT
    return F.cross_entropy(logits, wanted, weights, reduction="sum")


def focal_loss(logits: Tensor, queries: Tensor, classes: Tensor) -> Tensor:
    """Sum of the focal loss over all queries (Q, K); see `cross_entropy_loss` (https://arxiv.org/abs/1708.02002)."""
    wanted = torch.zeros_like(logits)
    wanted[queries, classes] = 1
    probabilities = logits.sigmoid()
    missing = (wanted - probabilities).abs()  # how far from right
    weights = FOCAL_ALPHA * wanted + (1 - FOCAL_ALPHA) * (1 - wanted)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return (weights * missing**FOCAL_GAMMA * cross_entropy).sum()


def iou_aware_loss(logits: Tensor, queries: Tensor, classes: Tensor, iou: Tensor) -> Tensor:
    """Sum over all queries of a cross-entropy that teaches a matched one how well its box fits, and the others 0.

    Args:
        logits: (Q, K).
        queries: Numbers of the queries that have an object.
        classes: Their classes.
        iou: Of their boxes.

    Source: IA-BCE of LW-DETR (https://arxiv.org/abs/2406.03459), section 3.2, after
    https://github.com/Atten4Vis/LW-DETR.
    """
    probabilities = logits.sigmoid()
    quality = probabilities[queries, classes].detach() ** FOCAL_ALPHA * iou ** (1 - FOCAL_ALPHA)
    quality = quality.clamp_min(MIN_QUALITY)
    positive = torch.zeros_like(logits).index_put((queries, classes), quality)
    negative = (probabilities**FOCAL_GAMMA).index_put((queries, classes), 1 - quality)
    return -(positive * F.logsigmoid(logits) + negative * F.logsigmoid(-logits)).sum()


def check_labels(batch: int, num_classes: int, labels: Any) -> None:
    """Raises `ValueError` unless every image has boxes with classes; values are read on the CPU only."""
    if not isinstance(labels, list | tuple) or len(labels) != batch:
        given = len(labels) if isinstance(labels, list | tuple) else type(labels).__name__
        raise ValueError(
            f"labels must be a list with a dictionary for each of the {batch} images, not {given}. The image "
            "processor makes it."
        )
    for index, target in enumerate(labels):
        if not isinstance(target, Mapping) or not {"class_labels", "boxes"} <= target.keys():
            raise ValueError(f"labels[{index}] must be a dictionary with class_labels and boxes.")
        classes, boxes = target["class_labels"], target["boxes"]
        if classes.ndim != 1 or boxes.shape != (len(classes), 4):
            raise ValueError(
                f"labels[{index}] must have class_labels (objects,) and boxes (objects, 4), not "
                f"{tuple(classes.shape)} and {tuple(boxes.shape)}."
            )
        if classes.device.type == boxes.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_values(index, num_classes, classes, boxes)


def _check_values(index: int, num_classes: int, classes: Tensor, boxes: Tensor) -> None:
    wrong = classes[(classes < 0) | (classes >= num_classes)]
    if len(wrong):
        raise ValueError(
            f"Class {int(wrong[0])} in labels[{index}] is out of range: the model has {num_classes}, 0 to "
            f"{num_classes - 1}. Load it with num_labels= or id2label= of your data."
        )
    strange = boxes[~((boxes >= 0) & (boxes <= 1)).all(dim=1)]
    if len(strange):
        raise ValueError(
            f"labels[{index}] has the box {strange[0].tolist()}, but boxes are centre x, centre y, width and height "
            "relative to the image, in [0, 1]. The image processor makes them from pixels."
        )
