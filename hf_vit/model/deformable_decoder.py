"""Deformable decoder for object detection, whose queries are initialized from the best proposals, as in LW-DETR.

Shapes: B batch, h w patch grid, s resolution of a pyramid level relative to the patch grid, V pyramid
levels, S positions of all levels together, D hidden size of the encoder, C hidden size of the pyramid and the decoder,
G query groups (1 in evaluation), Q queries per group, K classes, n heads, d head size, T sampling points per head and
level.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .configuration_hf_vit import HfViTConfig
from .embeddings import Grid, is_symbolic
from .layers import (
    PRIOR_BIAS,
    HfViTHeadLinear,
    HfViTInitialized,
    HfViTLayerNorm2d,
    HfViTPredictionHead,
    HfViTPredictor,
    make_map_norm,
)
from .shared import choose_blocks, upsample_mask
from .task_configurations import HfViTDetectionConfig


NUM_BOTTLENECKS = 3
# Number of channels above which a 1 x 1 convolution halves the channels before upsampling
MAX_UPSAMPLED = 512
# A pyramid level is a pair of a feature map (B, C, h, w) and a padding mask. The mask (B, h, w) is False for padding,
# or None if there is no padding.
Visible = Tensor | None
Level = tuple[Tensor, Visible]
NUM_LAYERS = 3
MAX_INTERMEDIATE_SIZE = 2048
FIRST = 1e3  # Added to the logits of positions that must be selected as proposals.
# Relative width and height of the anchor boxes on the first pyramid level. They double from each level to the next.
ANCHOR_SIZE = 0.05
# Minimum distance of an anchor center from the image border, relative to the image size
MARGIN = 0.01


class HfViTConvNorm(nn.Module):
    """Convolution, followed by a norm ("batch" or "layer") and an activation."""

    def __init__(
        self, in_size: int, out_size: int, kernel_size: int, norm: str, activation: nn.Module, stride: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_size, out_size, kernel_size, stride, padding=kernel_size // 2, bias=False)
        self.norm = make_map_norm(norm, out_size)
        self.activation = activation

    def forward(self, maps: Tensor, visible: Visible) -> Level:
        """Maps features (B, C, h, w) to features (B, C', h / stride, w / stride), with sizes rounded up."""
        if visible is not None:
            maps = maps.masked_fill(~visible[:, None], 0)
            rows, columns = self.conv.stride
            visible = visible[:, ::rows, ::columns]
        return self.activation(self.norm(self.conv(maps), visible)), visible


class HfViTResampling(nn.Module):
    """Resizes a feature map by the factor `scale` (2, 1, 0.5 or 0.25) using learned convolutions."""

    def __init__(self, size: int, scale: float, norm: str) -> None:
        super().__init__()
        self.out_size, narrow = size, size > MAX_UPSAMPLED
        self.convs = nn.ModuleList()
        self.upsample: nn.Module | None = None
        if scale == 2:
            self.out_size = size // 4 if narrow else size // 2
            if narrow:
                self.convs.append(HfViTConvNorm(size, size // 2, 1, norm, nn.ReLU()))
            self.upsample = nn.ConvTranspose2d(2 * self.out_size, self.out_size, kernel_size=2, stride=2)
        for _ in range({0.5: 1, 0.25: 2}.get(scale, 0)):
            self.convs.append(HfViTConvNorm(size, size, 3, norm, nn.ReLU(), stride=2))

    def forward(self, maps: Tensor, visible: Visible) -> Level:
        """Maps features (B, D, h, w) to features (B, out_size, s·h, s·w), with sizes rounded up."""
        for conv in self.convs:
            maps, visible = conv(maps, visible)
        if self.upsample is not None:
            maps, visible = self.upsample(maps), upsample_mask(visible)
        return maps, visible


class HfViTBottleneck(nn.Module):
    """Two convolutions in the inference form of RepVGG (https://arxiv.org/abs/2101.03697)."""

    def __init__(self, size: int, norm: str) -> None:
        super().__init__()
        self.conv1 = HfViTConvNorm(size, size, 3, norm, nn.SiLU())
        self.conv2 = HfViTConvNorm(size, size, 3, norm, nn.SiLU())

    def forward(self, maps: Tensor, visible: Visible) -> Tensor:
        """Maps features (B, C, h, w) to features of the same shape."""
        return self.conv2(*self.conv1(maps, visible))[0]


class HfViTScaleProjector(nn.Module):
    """Computes one pyramid level from the feature maps of several encoder blocks, using a C2f block as in YOLOv8."""

    def __init__(self, config: HfViTConfig, options: HfViTDetectionConfig, num_levels: int, scale: float) -> None:
        super().__init__()
        size, norm = options.hidden_size, options.projector_norm
        resamplings = [HfViTResampling(config.hidden_size, scale, norm) for _ in range(num_levels)]
        self.resamplings = nn.ModuleList(resamplings)
        in_size = sum(resampling.out_size for resampling in resamplings)
        self.conv1 = HfViTConvNorm(in_size, size, 1, norm, nn.SiLU())
        self.bottlenecks = nn.ModuleList(HfViTBottleneck(size // 2, norm) for _ in range(NUM_BOTTLENECKS))
        self.conv2 = HfViTConvNorm((2 + NUM_BOTTLENECKS) * (size // 2), size, 1, norm, nn.SiLU())
        self.norm = HfViTLayerNorm2d(size, eps=1e-6)

    def forward(self, levels: Sequence[Tensor], visible: Visible) -> Level:
        """Maps features (B, D, h, w) to a pyramid level (B, C, s·h, s·w) and its mask, which is False for padding."""
        pairs = [resampling(level, visible) for resampling, level in zip(self.resamplings, levels, strict=True)]
        visible = pairs[0][1]
        maps, _ = self.conv1(torch.cat([own for own, _ in pairs], dim=1), visible)
        parts = list(maps.chunk(2, dim=1))
        for bottleneck in self.bottlenecks:
            parts.append(bottleneck(parts[-1], visible))
        maps, _ = self.conv2(torch.cat(parts, dim=1), visible)
        return self.norm(maps), visible


class HfViTProjector(nn.Module):
    """Computes a feature pyramid from encoder features, with one level for each of `options.scale_factors`."""

    def __init__(self, config: HfViTConfig, options: HfViTDetectionConfig, num_levels: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            HfViTScaleProjector(config, options, num_levels, scale) for scale in options.scale_factors
        )

    def forward(self, levels: Sequence[Tensor], visible: Visible = None) -> list[Level]:
        """Maps features (B, D, h, w) to pyramid levels (B, C, s·h, s·w); the mask (B, h, w) is False for padding."""
        return [scale(levels, visible) for scale in self.scales]


class Pyramid(NamedTuple):
    """Feature pyramid, flattened to the token sequence that the decoder attends to."""

    tokens: Tensor  # (B, S, C), level by level and row by row
    grids: tuple[Grid, ...]  # rows and columns of each level
    visible: Tensor | None  # (B, S) bool, False for padding; None without padding
    sizes: Tensor  # (B or 1, V, 2), rows and columns of each level without padding

    @classmethod
    def of(cls, levels: Sequence[Level]) -> "Pyramid":
        """Flattens and concatenates level maps (B, C, h, w) and their masks (B, h, w), which are False for padding."""
        tokens = torch.cat([maps.flatten(2).transpose(1, 2) for maps, _ in levels], dim=1)
        grids = tuple((maps.shape[2], maps.shape[3]) for maps, _ in levels)
        precision = torch.promote_types(tokens.dtype, torch.float32)
        masks = [visible for _, visible in levels if visible is not None]
        if not masks:
            return cls(tokens, grids, None, grid_sizes_tensor(grids, tokens.to(precision))[None])
        sizes = torch.stack([torch.stack((own[:, :, 0].sum(1), own[:, 0].sum(1)), dim=1) for own in masks], dim=1)
        return cls(tokens, grids, torch.cat([own.flatten(1) for own in masks], dim=1), sizes.to(precision))


def grid_sizes_tensor(grids: Sequence[Grid], like: Tensor) -> Tensor:
    """Returns the numbers of rows and columns of V grids as a tensor (V, 2) with the dtype and device of `like`."""
    if not any(is_symbolic(*grid) for grid in grids):
        return like.new_tensor(grids)
    sides = [torch.scalar_tensor(side, dtype=like.dtype, device=like.device) for grid in grids for side in grid]
    return torch.stack(sides).unflatten(0, (-1, 2))  # stacking keeps dynamic sizes symbolic during torch.export


def refine_boxes(boxes: Tensor, offsets: Tensor) -> Tensor:
    """Applies predicted offsets (..., 4) to boxes (..., 4) given as center x, center y, width and height.

    The center moves by an offset relative to the size of the box; width and height are multiplied by exp(offset).
    """
    offsets = offsets.to(boxes.dtype)
    centers = boxes[..., :2] + offsets[..., :2] * boxes[..., 2:]
    return torch.cat((centers, boxes[..., 2:] * offsets[..., 2:].exp()), dim=-1)


def sine_positions(boxes: Tensor, size: int) -> Tensor:
    """Returns the sine-cosine encoding (..., 4·size) of the y, x, width and height of boxes (..., 4)."""
    # Source: https://arxiv.org/abs/2201.12329. Frequencies are float32, as in the code of the published weights.
    steps = torch.arange(size, device=boxes.device, dtype=torch.float32)
    periods = 10000 ** (2 * (steps // 2) / size)
    angles = boxes[..., [1, 0, 2, 3], None] * (2 * math.pi) / periods  # (..., 4, size)
    return torch.stack((angles[..., 0::2].sin(), angles[..., 1::2].cos()), dim=-1).flatten(-3)


def deformable_attention(maps: Sequence[Tensor], points: Tensor, weights: Tensor) -> Tensor:
    """Samples V maps (B, n, d, h, w) bilinearly at points and returns the weighted sums (B, Q, n·d).

    `points` (B, Q, n, V, T, 2) are x and y, from 0 to 1 across a map; values outside a map are 0. `weights` are
    (B, Q, n, V, T).
    """
    batch, num_queries = points.shape[:2]
    points = 2 * points.permute(3, 0, 2, 1, 4, 5).flatten(1, 2) - 1  # (V, B·n, Q, T, 2)
    weights = weights.permute(3, 0, 2, 1, 4).flatten(1, 2)  # (V, B·n, Q, T)
    total = torch.zeros((), dtype=maps[0].dtype, device=maps[0].device)
    for values, own_points, own_weights in zip(maps, points, weights, strict=True):
        read = F.grid_sample(values.flatten(0, 1), own_points, align_corners=False)  # (B·n, d, Q, T)
        total = total + (read * own_weights[:, None]).sum(dim=-1)  # (B·n, d, Q)
    return total.reshape(batch, -1, num_queries).transpose(1, 2)


class HfViTSamplingOffsets(HfViTInitialized, nn.Linear):
    """Predicts the offsets of the sampling points, which initially lie on a ring around the query."""

    def __init__(self, size: int, num_heads: int, num_levels: int, num_points: int) -> None:
        super().__init__(size, 2 * num_heads * num_levels * num_points)
        self.shape = (num_heads, num_levels, num_points)

    def initialize(self, std: float) -> None:
        """Sets the weights to zero and the bias to a ring of offsets, so that all queries have the same offsets."""
        # Each attention head samples in its own direction, at distances of 1, 2, ... steps.
        num_heads, num_levels, num_points = self.shape
        angles = torch.arange(num_heads) * (2 * math.pi / num_heads)
        directions = torch.stack((angles.cos(), angles.sin()), dim=-1)  # (n, 2)
        directions = directions / directions.abs().amax(dim=1, keepdim=True)
        distances = torch.arange(1, num_points + 1)[:, None]  # (T, 1)
        init.zeros_(self.weight)
        init.copy_(self.bias, (directions[:, None, None] * distances).expand(-1, num_levels, -1, -1).flatten())


class HfViTDeformableAttention(nn.Module):
    """Deformable attention: each query samples the feature pyramid at a few predicted points around its box."""

    def __init__(self, size: int, num_heads: int, num_levels: int, num_points: int) -> None:
        super().__init__()
        self.shape = (num_heads, num_levels, num_points)
        self.offsets = HfViTSamplingOffsets(size, *self.shape)
        self.weights = HfViTPredictor(size, math.prod(self.shape), starts_at_zero=True)
        self.value = HfViTHeadLinear(size, size)
        self.projection = HfViTHeadLinear(size, size)

    def forward(self, queries: Tensor, boxes: Tensor, pyramid: Pyramid) -> Tensor:
        """Returns outputs (B, G·Q, C) for queries (B, G·Q, C) and their boxes (B, G·Q, 4) as cx, cy, w, h."""
        num_heads, _, num_points = self.shape
        # Sample in the dtype of the boxes, float32 or higher: bfloat16 resolves only 256 positions along a map.
        precision = boxes.dtype
        values = self.value(pyramid.tokens).to(precision)  # (B, S, C)
        if pyramid.visible is not None:
            values = values.masked_fill(~pyramid.visible[..., None], 0)
        values = values.unflatten(2, (num_heads, -1)).permute(0, 2, 3, 1)  # (B, n, d, S)
        parts = values.split([rows * columns for rows, columns in pyramid.grids], dim=-1)
        maps = [part.unflatten(-1, grid) for part, grid in zip(parts, pyramid.grids, strict=True)]
        offsets = self.offsets(queries).to(precision).unflatten(2, (*self.shape, 2))  # (B, G·Q, n, V, T, 2)
        centers, sizes = boxes[:, :, None, None, None].chunk(2, dim=-1)
        points = centers + offsets / num_points * sizes / 2
        weights = self.weights(queries).to(precision).unflatten(2, (num_heads, -1)).softmax(dim=-1)
        weights = weights.unflatten(3, self.shape[1:])  # (B, G·Q, n, V, T)
        shares = pyramid.sizes / grid_sizes_tensor(pyramid.grids, pyramid.sizes)  # (B or 1, V, 2)
        read = deformable_attention(maps, points * shares.flip(2)[:, None, None, :, None], weights)
        return self.projection(read.to(queries.dtype))


class HfViTGroupAttention(nn.Module):
    """Self-attention between the queries of the same group."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.projection = (nn.Linear(size, size) for _ in range(4))

    def forward(self, states: Tensor, positions: Tensor, num_groups: int) -> Tensor:
        """Maps queries and their position embeddings, both (B, G·Q, C), to outputs (B, G·Q, C)."""
        batch, placed = states.shape[0], states + positions
        query, key, value = (
            projected.unflatten(1, (num_groups, -1)).flatten(0, 1).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for projected in (self.query(placed), self.key(placed), self.value(states))
        )  # (B·G, n, Q, d)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)  # (B·G, Q, C)
        return self.projection(attended.unflatten(0, (batch, num_groups)).flatten(1, 2))


class HfViTDeformableLayer(nn.Module):
    """Post-norm decoder layer: self-attention, deformable attention and a feed-forward network."""

    def __init__(self, options: HfViTDetectionConfig) -> None:
        super().__init__()
        size, num_heads = options.hidden_size, options.num_attention_heads
        intermediate_size = min(8 * size, MAX_INTERMEDIATE_SIZE)
        self.attention = HfViTGroupAttention(size, num_heads)
        self.norm1 = nn.LayerNorm(size)
        self.deformable = HfViTDeformableAttention(size, 2 * num_heads, len(options.scale_factors), options.num_points)
        self.norm2 = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, intermediate_size)
        self.fc2 = nn.Linear(intermediate_size, size)
        self.norm3 = nn.LayerNorm(size)

    def forward(self, states: Tensor, positions: Tensor, boxes: Tensor, pyramid: Pyramid, num_groups: int) -> Tensor:
        """Updates queries (B, G·Q, C). `positions` (B, G·Q, C) encode their `boxes` (B, G·Q, 4)."""
        states = self.norm1(states + self.attention(states, positions, num_groups))
        states = self.norm2(states + self.deformable(states + positions, boxes, pyramid))
        return self.norm3(states + self.fc2(F.relu(self.fc1(states))))


class DetectionPrediction(NamedTuple):
    """Classes and boxes that one decoder layer predicts."""

    logits: Tensor  # (B, Q, K), or (B, Q, K + 1) with a "no object" class; in training, Q includes all groups
    boxes: Tensor  # (B, Q, 4) as cx, cy, w, h relative to the image without its padding, in [0, 1]


class HfViTProposalHead(nn.Module):
    """Predicts proposals and selects the best ones as initial boxes of the queries of one group."""

    def __init__(self, size: int, num_labels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)
        self.class_head = HfViTPredictionHead(size, num_labels, num_layers=1, initial_bias=PRIOR_BIAS)
        self.box_head = HfViTPredictionHead(size, 4, starts_at_zero=True)

    def forward(
        self, features: Tensor, anchors: Tensor, is_valid: Tensor, num_queries: int, wanted: Tensor | None = None
    ) -> DetectionPrediction:
        """Returns the `num_queries` proposals with the highest class scores, in descending order.

        Features are (B, S, C) and anchor boxes (B, S, 4). Positions for which `is_valid` (B, S) is False are
        selected only if no others are left. Positions for which `wanted` (B, S) is True are always selected.
        """
        states = self.norm(self.linear(features))
        logits = self.class_head(states)  # (B, S, K)
        scores = logits.detach().amax(dim=-1).masked_fill(~is_valid, -math.inf)
        if wanted is not None:
            first = torch.where(wanted, scores.float() + FIRST, scores.float()).topk(num_queries, dim=1).indices
            scores = torch.full_like(scores, -math.inf).scatter(1, first, scores.gather(1, first))
        # Sort by score alone, as in evaluation: the rank of a proposal must not reveal whether it belongs to a labeled
        # object.
        best = scores.topk(num_queries, dim=1).indices[..., None]  # (B, Q, 1)
        logits, states, anchors = (
            values.gather(1, best.expand(-1, -1, values.shape[-1])) for values in (logits, states, anchors)
        )
        return DetectionPrediction(logits, refine_boxes(anchors, self.box_head(states)))


def select_proposals(pyramid: Pyramid, least: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns candidate proposals: features (B, S, C), anchor boxes (B, S, 4), and a mask (B, S) of the valid ones.

    Positions in padding and near the border are invalid, and their features are zero. If there are fewer than `least`
    candidates, invalid candidates are appended.
    """
    boxes = []
    for level, (grid, sides) in enumerate(zip(pyramid.grids, pyramid.sizes.unbind(1), strict=True)):
        y, x = (
            (torch.arange(length, device=sides.device, dtype=sides.dtype) + 0.5) / own[:, None]
            for length, own in zip(grid, sides.unbind(1), strict=True)
        )  # (B, h) and (B, w)
        y, x = y[:, :, None].expand(-1, -1, grid[1]), x[:, None].expand(-1, grid[0], -1)
        size = torch.full_like(x, ANCHOR_SIZE * 2**level)
        boxes.append(torch.stack((x, y, size, size), dim=-1).flatten(1, 2))  # (B, h·w, 4)
    anchors = torch.cat(boxes, dim=1).expand(pyramid.tokens.shape[0], -1, -1)
    is_valid = ((anchors > MARGIN) & (anchors < 1 - MARGIN)).all(dim=-1)
    if pyramid.visible is not None:
        is_valid = is_valid & pyramid.visible
    features, anchors = (values.masked_fill(~is_valid[..., None], 0) for values in (pyramid.tokens, anchors))
    missing: Any = torch.sym_max(0, least - features.shape[1])
    return F.pad(features, (0, 0, 0, missing)), F.pad(anchors, (0, 0, 0, missing)), F.pad(is_valid, (0, missing))


def closest_anchor_mask(anchors: Tensor, is_valid: Tensor, labels: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Returns a mask (B, S) that is True for the valid anchor box (B, S, 4) closest to each labeled object."""
    taken = torch.zeros_like(is_valid)
    for own_taken, own_anchors, own_valid, target in zip(taken, anchors, is_valid, labels, strict=True):
        distances = torch.cdist(own_anchors, target["boxes"].to(anchors), p=1)  # (S, M)
        own_taken[distances.masked_fill(~own_valid[:, None], math.inf).argmin(dim=0)] = True
    return taken


class HfViTDeformableDecoder(nn.Module):
    """Deformable decoder: pyramid projector, proposal heads, decoder layers and prediction heads.

    As in LW-DETR, every layer samples features around the initial box of a query and predicts offsets relative to
    this box.
    """

    def __init__(self, config: HfViTConfig, options: HfViTDetectionConfig) -> None:
        super().__init__()
        size, self.num_queries, self.num_groups = options.hidden_size, options.num_queries, options.num_groups
        self.out_indices = choose_blocks(options.out_indices, config, min(4, config.num_hidden_layers))
        self.projector = HfViTProjector(config, options, len(self.out_indices))
        self.proposal_heads = nn.ModuleList(HfViTProposalHead(size, config.num_labels) for _ in range(self.num_groups))
        self.query_features = nn.Embedding(self.num_groups * self.num_queries, size)
        self.query_boxes = nn.Embedding(self.num_groups * self.num_queries, 4)
        self.position_fc1 = nn.Linear(2 * size, size)
        self.position_fc2 = nn.Linear(size, size)
        self.blocks = nn.ModuleList(HfViTDeformableLayer(options) for _ in range(options.num_layers or NUM_LAYERS))
        self.norm = nn.LayerNorm(size)
        # Unlike the proposal heads, these heads train faster without a prior bias and with nonzero initial weights.
        self.class_head = HfViTPredictionHead(size, config.num_labels, num_layers=1)
        self.box_head = HfViTPredictionHead(size, 4)

    def forward(
        self,
        levels: Sequence[Tensor],
        patch_attention_mask: Tensor | None = None,
        labels: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> list[DetectionPrediction]:
        """Predicts objects; in training, each group of queries predicts all objects independently.

        Args:
            levels: Feature maps (B, D, h, w) of the encoder blocks `out_indices`.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom; None without
                padding.
            labels: Targets of `detection_loss`, in training. With labels, unlike in LW-DETR, the proposals always
                include the position of each object. After 300 training steps from scratch on BCCD, this raises AP from
                0.029 to 0.115 (means of three seeds).

        Returns:
            The predictions of the proposals and of each layer, ending with the last layer: logits (B, G·Q, K) and
            boxes (B, G·Q, 4) in float32 or higher precision, relative to the image without its padding.
        """
        num_groups = self.num_groups if self.training else 1
        visible = None if patch_attention_mask is None else patch_attention_mask.bool()
        pyramid = Pyramid.of(self.projector(levels, visible))
        features, anchors, is_valid = select_proposals(pyramid, self.num_queries)
        wanted = closest_anchor_mask(anchors, is_valid, labels) if self.training and labels is not None else None
        heads = self.proposal_heads[:num_groups]
        proposals = [head(features, anchors, is_valid, self.num_queries, wanted) for head in heads]
        predictions = [DetectionPrediction(*(torch.cat(parts, dim=1) for parts in zip(*proposals, strict=True)))]
        # Call the embeddings instead of reading their weights, which accelerate may have offloaded to disk.
        numbers = torch.arange(num_groups * self.num_queries, device=pyramid.tokens.device)
        features, offsets = (table(numbers).to(numbers.device) for table in (self.query_features, self.query_boxes))
        boxes = refine_boxes(predictions[0].boxes.detach(), offsets)
        states = features.expand(boxes.shape[0], -1, -1)
        positions = sine_positions(boxes, states.shape[-1] // 2).to(states.dtype)
        positions = self.position_fc2(F.relu(self.position_fc1(positions)))
        for block in self.blocks:
            states = block(states, positions, boxes, pyramid, num_groups)
            normed = self.norm(states)
            predictions.append(
                DetectionPrediction(self.class_head(normed), refine_boxes(boxes, self.box_head(normed)))
            )
        return predictions
