"""Universal segmentation with queries that predict masks and classes: head, losses and model.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, P prefix tokens, Q queries, L = P
+ N + Q tokens, D hidden size, K classes, M target masks of an image, R masks, possibly of several images, T points of
a mask, s = 2 ** num_upscale_blocks.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.eomt.modeling_eomt import EomtForUniversalSegmentationOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vit import HfViTConfig
from .encoder import HfViTEncoder, make_norm
from .layers import (
    HfViTHeadConv2d,
    HfViTHeadConvTranspose2d,
    HfViTInitialized,
    HfViTLayerNorm2d,
    HfViTNamedHead,
    HfViTQueries,
)
from .modeling_hf_vit import HfViTBlockRunner, HfViTModel
from .pretrained import HfViTPreTrainedModel
from .shared import (
    can_read_values,
    check_class_numbers,
    choose_blocks,
    count_query_blocks,
    in_float32,
    match,
    run_unpadded,
    to_maps,
)
from .task_configurations import HfViTUniversalSegmentationConfig


LEAST_PIXEL_WIDTH = 64  # minimum width of the pixel features of the head "mask", if the model is wider


def make_mask_embedding(size: int, out_size: int) -> nn.Module:
    """Creates the three-layer MLP that maps queries (B, Q, D) to mask embeddings (B, Q, `out_size`)."""
    fc1, fc2, fc3 = (nn.Linear(size, width) for width in (size, size, out_size))
    return nn.Sequential(OrderedDict(fc1=fc1, gelu1=nn.GELU(), fc2=fc2, gelu2=nn.GELU(), fc3=fc3))


def mask_probabilities(progress: float, num_blocks: int) -> list[float]:
    """Returns the probability of masked attention in each block at a training progress from 0 to 1.

    The probabilities decrease from 1 to 0 block by block, starting with the first block, by a polynomial schedule of
    degree 0.9 (https://arxiv.org/abs/2503.19108).
    """
    total = 1.5 * num_blocks + 1
    shares = [min(max(progress * total - 1 - 1.5 * block, 0.0), 1.0) for block in range(num_blocks)]
    return [(1 - share) ** 0.9 for share in shares]


class HfViTUpscale(nn.Module):
    """Upscaling block of EoMT (https://arxiv.org/abs/2503.19108), which doubles the resolution of a feature map."""

    def __init__(self, size: int, out_size: int) -> None:
        super().__init__()
        self.upsample = HfViTHeadConvTranspose2d(size, out_size, kernel_size=2, stride=2)
        self.activation = nn.GELU()
        self.depthwise = HfViTHeadConv2d(out_size, out_size, kernel_size=3, padding=1, groups=out_size, bias=False)
        self.norm = HfViTLayerNorm2d(out_size, eps=1e-6)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps features (B, C, h, w) to features (B, `out_size`, 2·h, 2·w)."""
        return self.norm(self.depthwise(self.activation(self.upsample(maps))))


class HfViTUniversalSegmentationHead(HfViTInitialized):
    """Head with learned queries and the layers that predict a mask and a class from each query."""

    mask_probabilities: Tensor

    def __init__(self, config: HfViTConfig, options: HfViTUniversalSegmentationConfig) -> None:
        super().__init__()
        num_blocks = min(4, config.num_hidden_layers) if options.num_blocks is None else options.num_blocks
        is_inside = options.head == "queries"
        self.num_blocks = (
            count_query_blocks(num_blocks, config, "universal_segmentation_config") if is_inside else num_blocks
        )
        width = config.hidden_size
        self.queries = HfViTQueries(options.num_queries, width)
        # "mask" halves the width when it doubles the resolution. Otherwise, upscaling is slower than the blocks.
        halvings = [0 if is_inside else step for step in range(options.num_upscale_blocks + 1)]
        widths = [max(width // 2**step, min(width, LEAST_PIXEL_WIDTH)) for step in halvings]
        self.mask_embedding = make_mask_embedding(width, widths[-1])
        self.upscale = nn.Sequential(*(HfViTUpscale(*pair) for pair in pairwise(widths)))
        self.classifier = nn.Linear(width, config.num_labels + 1)
        # For each block with queries, the probability that a query attends only to its own mask
        self.register_buffer("mask_probabilities", torch.ones(self.num_blocks))
        self.masked_blocks = [True] * self.num_blocks  # updated by `update_masked_blocks`

    def initialize(self, std: float) -> None:
        """Sets the probability of masked attention to 1 in all blocks."""
        init.ones_(self.mask_probabilities)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.update_masked_blocks()

    def train(self, mode: bool = True) -> Self:
        """Sets training or evaluation mode; in evaluation, masked attention is deterministic."""
        super().train(mode)
        self.update_masked_blocks()
        return self

    def update_masked_blocks(self) -> None:
        """Stores on the CPU which blocks use masked attention, so that `forward` needs no device synchronization."""
        if not self.mask_probabilities.is_meta:  # `from_pretrained` creates the model on the meta device
            self.masked_blocks = (self.mask_probabilities > (0.0 if self.training else 0.5)).tolist()

    def start(self, hidden_states: Tensor, blocks: HfViTBlockRunner) -> tuple[Tensor, int, HfViTEncoder, nn.Module]:
        """Runs the blocks without queries on the input (B, P + N, D) of the first block, and appends the queries.

        Returns the tokens (B, L, D), the index of the first block with queries, the encoder that contains this block,
        and the norm of its output.
        """
        hidden_states, start = blocks.append_queries(hidden_states, self.queries, self.num_blocks)
        return hidden_states, start, blocks.model.encoder, blocks.model.norm

    def forward(self, tokens: Tensor, grid: tuple[int, int], mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Predicts mask logits (B, Q, s·h, s·w) and class logits (B, Q, K + 1), with "no object" as the last class.

        `tokens` (B, L, D) are normalized by the final norm, and `mask` (B, h, w) is False for padding.
        """
        num_queries = self.queries.num_embeddings
        patches, queries = tokens[:, -num_queries - grid[0] * grid[1] : -num_queries], tokens[:, -num_queries:]
        pixels = run_unpadded(self.upscale, mask, to_maps(patches, grid))
        masks = torch.einsum("bqd,bdhw->bqhw", self.mask_embedding(queries), pixels)
        return masks, self.classifier(queries)

    def attention_mask(
        self, masks: Tensor, block: int, grid: tuple[int, int], num_prefix: int, visible: Tensor | None
    ) -> Tensor:
        """Returns the attention mask (B, 1, L, L) that restricts each query to the patches in its own mask.

        In training, each query is unrestricted with probability 1 - `mask_probabilities[block]`. `masks` are logits
        (B, Q, s·h, s·w); `visible` (B, h, w) is False for padding.
        """
        batch, num_queries = masks.shape[:2]
        coarse = F.interpolate(masks.detach(), size=grid, mode="bilinear", align_corners=False)
        own = coarse.flatten(2) > 0  # (B, Q, N)
        if self.training:
            is_free = torch.rand(batch, num_queries, 1, device=masks.device) > self.mask_probabilities[block]
            own = own | is_free
        length = num_prefix + own.shape[2] + num_queries
        allowed = own.new_ones(batch, length, length)
        allowed[:, -num_queries:, num_prefix:-num_queries] = own
        if visible is not None:
            allowed[:, :, num_prefix:-num_queries] &= visible.flatten(1)[:, None].bool()
        return allowed[:, None]


class HfViTPlainMaskHead(HfViTUniversalSegmentationHead):
    """Head with its own blocks for queries and patches, which leaves the encoder unchanged.

    Source: the plain mask decoder of PMT (https://arxiv.org/abs/2603.25398).
    """

    def __init__(self, config: HfViTConfig, options: HfViTUniversalSegmentationConfig) -> None:
        super().__init__(config, options)
        width = config.hidden_size
        self.out_indices = sorted(set(choose_blocks(None, config, count=4)))
        self.laterals = nn.ModuleList(
            nn.Sequential(make_norm(config, width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in self.out_indices
        )
        self.encoder = HfViTEncoder(config, self.num_blocks)
        self.norm = make_norm(config, width)

    def start(self, hidden_states: Tensor, blocks: HfViTBlockRunner) -> tuple[Tensor, int, HfViTEncoder, nn.Module]:
        """Runs the encoder, adds the projected tokens of several depths to its output, and appends the queries."""
        masks, depth, added = blocks.masks(hidden_states), 0, []
        for index, lateral in zip(self.out_indices, self.laterals, strict=True):
            hidden_states = blocks.run(hidden_states, depth, index, **masks)
            depth = index
            added.append(lateral(hidden_states))
        fused = blocks.model.norm(hidden_states) + torch.stack(added).sum(dim=0)
        return self.queries.append_to(fused), 0, self.encoder, self.norm


def sample_points(maps: Tensor, points: Tensor) -> Tensor:
    """Samples maps (R, H, W) bilinearly at points (R, T, 2), x and y in [0, 1], with zero padding; returns (R, T)."""
    return F.grid_sample(maps[:, None], 2 * points[:, None] - 1, align_corners=False)[:, 0, 0]


def grid_points(num_points: int, like: Tensor) -> Tensor:
    """Returns the points (T, 2) of a square grid, x and y in [0, 1], with at most `num_points` points."""
    side = max(1, math.isqrt(num_points))
    centers = (torch.arange(side, device=like.device, dtype=like.dtype) + 0.5) / side
    return torch.cartesian_prod(centers, centers)


@torch.no_grad()
def uncertain_points(logits: Tensor, num_points: int, oversample_ratio: float, importance_ratio: float) -> Tensor:
    """Samples `num_points` points (R, T, 2), x and y in [0, 1], mostly where mask logits (R, H, W) are uncertain.

    As in PointRend (https://arxiv.org/abs/1912.08193), a fraction `importance_ratio` of the points are the most
    uncertain points of `oversample_ratio * num_points` random candidates. The remaining points are uniformly random.
    """
    num_chosen = int(importance_ratio * num_points)
    candidates = torch.rand(len(logits), int(num_points * oversample_ratio), 2, device=logits.device)
    candidates = candidates.to(logits.dtype)
    certainty = sample_points(logits, candidates).abs()  # (R, oversample_ratio·T)
    chosen = certainty.topk(num_chosen, dim=1, largest=False).indices
    anywhere = torch.rand(len(logits), num_points - num_chosen, 2, device=logits.device).to(logits.dtype)
    return torch.cat((candidates.gather(1, chosen[..., None].expand(-1, -1, 2)), anywhere), dim=1)


def pairwise_mask_costs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cross-entropy and Dice loss, each (Q, M), between logits (Q, T) at T points and targets (M, T)."""
    # Binary cross-entropy is softplus(logit) - logit · target; a matrix product sums the second term over points.
    cross_entropy = (F.softplus(logits).sum(dim=1)[:, None] - logits @ targets.T) / logits.shape[1]  # (Q, M)
    probabilities = logits.sigmoid()
    overlap = 2 * probabilities @ targets.T
    sizes = probabilities.sum(dim=1)[:, None] + targets.sum(dim=1)
    return cross_entropy, 1 - (overlap + 1) / (sizes + 1)


def mask_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cross-entropy and Dice loss, each (R,), between mask logits (R, T) and their targets (R, T)."""
    cross_entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)
    probabilities = logits.sigmoid()
    overlap = 2 * (probabilities * targets).sum(dim=1)
    return cross_entropy, 1 - (overlap + 1) / (probabilities.sum(dim=1) + targets.sum(dim=1) + 1)


@in_float32
def universal_segmentation_loss(
    masks: Tensor,
    classes: Tensor,
    mask_labels: Sequence[Tensor],
    class_labels: Sequence[Tensor],
    options: HfViTUniversalSegmentationConfig,
    is_training: bool,
    patch_attention_mask: Tensor | None = None,
) -> Tensor:
    """Returns the mean loss per image, which is independent of how a batch is split over processes.

    Masks are compared at points outside padding. In evaluation, the points form a regular grid. In training, they are
    random, so the loss is independent of the split only in expectation.

    `masks` (B, Q, h, w) and `classes` (B, Q, K + 1) are logits. The labels of each image are masks (M, H, W) of 0 and
    1, of any size, and class indices (M,). `patch_attention_mask` (B, h, w) is False for padding.
    """
    losses = []
    for index, (targets, labels) in enumerate(zip(mask_labels, class_labels, strict=True)):
        targets, labels = targets.to(masks), labels.to(masks.device, torch.int64)
        own = masks[index]
        if patch_attention_mask is not None:
            own, targets = (without_padding(values, patch_attention_mask[index]) for values in (own, targets))
        losses.append(image_loss(own, classes[index].to(masks.dtype), targets, labels, options, is_training))
    return torch.stack(losses).mean()


def without_padding(values: Tensor, visible: Tensor) -> Tensor:
    """Crops maps (., H, W) of an image to the region without padding, given its patch mask (h, w)."""
    rows, columns = visible.any(dim=1).sum(), visible.any(dim=0).sum()
    height, width = (
        round(side * float(own) / total)
        for side, own, total in zip(values.shape[-2:], (rows, columns), visible.shape, strict=True)
    )
    return values[:, :height, :width]


def image_loss(
    masks: Tensor,
    classes: Tensor,
    mask_labels: Tensor,
    class_labels: Tensor,
    options: HfViTUniversalSegmentationConfig,
    is_training: bool,
) -> Tensor:
    """Returns the loss of one image after matching queries to targets.

    `masks` (Q, h, w) and `classes` (Q, K + 1) are logits; labels are masks (M, H, W) and class indices (M,).
    """
    num_classes, num_points = classes.shape[1] - 1, options.train_num_points

    @torch.no_grad()
    def cost() -> Tensor:  # (Q, M)
        drawn = torch.rand(num_points, 2, device=masks.device).to(masks.dtype) if is_training else None
        points = grid_points(num_points, masks) if drawn is None else drawn  # (T, 2)
        logits = sample_points(masks, points.expand(len(masks), -1, -1))  # (Q, T)
        truth = sample_points(mask_labels, points.expand(len(mask_labels), -1, -1))  # (M, T)
        cross_entropy, dice = pairwise_mask_costs(logits, truth)
        probabilities = classes.softmax(dim=1)[:, class_labels]
        return options.mask_weight * cross_entropy + options.dice_weight * dice - options.class_weight * probabilities

    wanted = torch.full((len(classes),), num_classes, device=classes.device)
    # Without targets, `masks.sum() * 0` gives every weight a zero gradient, which DDP requires.
    loss = masks.sum() * 0 if not len(class_labels) else masks.new_zeros(())
    if len(class_labels):
        queries, targets = match(cost())
        wanted[queries] = class_labels[targets]
        chosen, truth = masks[queries], mask_labels[targets]
        if is_training:
            ratios = options.oversample_ratio, options.importance_sample_ratio
            points = uncertain_points(chosen, num_points, *ratios)
        else:
            points = grid_points(num_points, masks).expand(len(chosen), -1, -1)
        cross_entropy, dice = mask_losses(sample_points(chosen, points), sample_points(truth, points))
        loss = (options.mask_weight * cross_entropy + options.dice_weight * dice).sum() / len(class_labels)
    weights = classes.new_ones(num_classes + 1)
    weights[-1] = options.no_object_weight
    return loss + options.class_weight * F.cross_entropy(classes, wanted, weights)


def check_targets(
    batch: int, num_classes: int, mask_labels: Sequence[Tensor] | None, class_labels: Sequence[Tensor] | None
) -> None:
    """Raises `ValueError` unless every image has masks with one class each; values are checked only on the CPU."""
    if mask_labels is None or class_labels is None or len(mask_labels) != batch or len(class_labels) != batch:
        counts = [None if labels is None else len(labels) for labels in (mask_labels, class_labels)]
        raise ValueError(
            f"mask_labels and class_labels must be lists with an entry for each of the {batch} images, not {counts}."
        )
    for index, (masks, classes) in enumerate(zip(mask_labels, class_labels, strict=True)):
        if masks.ndim != 3 or classes.ndim != 1 or len(masks) != len(classes):
            raise ValueError(
                f"mask_labels[{index}] must be (masks, height, width) and class_labels[{index}] (masks,), not "
                f"{tuple(masks.shape)} and {tuple(classes.shape)}."
            )
        if can_read_values(masks) and masks.dtype != torch.bool and not ((masks == 0) | (masks == 1)).all():
            raise ValueError(f"mask_labels[{index}] has values other than 0 and 1. Pass bool masks.")
        check_class_numbers(classes, num_classes, name="Class", place=f" in class_labels[{index}]")


class HfViTForUniversalSegmentationOutput(EomtForUniversalSegmentationOutput):
    """Outputs of a universal segmentation model, to pass to `post_process_{semantic,instance,panoptic}_segmentation`.

    Args:
        loss: Scalar loss, if targets were given.
        class_queries_logits: Class logits (B, Q, num_labels + 1), with "no object" as the last class.
        masks_queries_logits: Mask logits (B, Q, s·h, s·w).
        last_hidden_state: Tokens (B, L, D) after the norm that follows the last block with queries.
        hidden_states: If requested, tokens before the first block and after each block of the encoder. With
            `head="queries"`, those of the last blocks include queries.
        attentions: If requested, attention weights (B, heads, L, L) of each block of the encoder.
    """


class HfViTForUniversalSegmentation(HfViTPreTrainedModel):
    """Model for semantic, instance and panoptic segmentation, which predicts masks with classes.

    The architecture is EoMT (https://arxiv.org/abs/2503.19108), or PMT (https://arxiv.org/abs/2603.25398) with
    `head="mask"`, which leaves the encoder unchanged. `window_size` is ignored in blocks with queries,
    because each query attends to the patches in its predicted mask. In training, the queries with masked attention and
    the points at which masks are compared are random.
    """

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        if not config.num_labels:
            raise ValueError("num_labels=0 is not supported: masks need at least one class. Set num_labels.")
        self.options = HfViTUniversalSegmentationConfig.of(config.universal_segmentation_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.universal_segmentation_head = (
            HfViTUniversalSegmentationHead(config, self.options)
            if self.options.head == "queries"
            else HfViTNamedHead("mask", HfViTPlainMaskHead(config, self.options))
        )
        self.post_init()
        self._output_capturing_hooks_installed = True  # outputs are recorded by the hooks of `self.model`

    @property
    def head(self) -> Any:
        """The head. It is typed as Any because PEFT may wrap it."""
        head: Any = self.universal_segmentation_head
        return head if self.options.head == "queries" else head.decoder

    def anneal_masks(self, progress: float) -> None:
        """Sets the probabilities of masked attention for a training progress from 0 to 1."""
        head = self.head
        head.mask_probabilities.copy_(torch.tensor(mask_probabilities(progress, head.num_blocks)))
        head.update_masked_blocks()

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        mask_labels: list[Tensor] | None = None,
        class_labels: list[Tensor] | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTForUniversalSegmentationOutput:
        """Runs the model.

        Args:
            pixel_values: Images (B, C, H, W), with H and W multiples of the patch size.
            mask_labels: Masks (M, H, W) of 0 and 1 for each image.
            class_labels: Class indices (M,) of the masks of each image.
            patch_attention_mask: Mask (B, h, w), False for padding on the right and at the bottom.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `HfViTForUniversalSegmentationOutput`. In training, the loss is the sum of `universal_segmentation_loss`
            for the predictions before each block with queries and after the last one. In evaluation, it is the loss of
            the final prediction, so that it is comparable at any time of a training run.

        Raises:
            ValueError: If an input does not match the model; the message describes valid inputs.
        """
        has_targets = mask_labels is not None or class_labels is not None
        if has_targets and pixel_values is not None:
            check_targets(len(pixel_values), self.config.num_labels, mask_labels, class_labels)
        predictions, last_hidden_state = self._predict(pixel_values, patch_attention_mask, **kwargs)
        loss = None
        if mask_labels is not None and class_labels is not None:
            given: Any = mask_labels, class_labels, self.options, self.training, patch_attention_mask
            compared = predictions if self.training else predictions[-1:]
            loss = torch.stack([universal_segmentation_loss(*predicted, *given) for predicted in compared]).sum()
        masks, classes = predictions[-1]
        return HfViTForUniversalSegmentationOutput(
            loss=loss, class_queries_logits=classes, masks_queries_logits=masks, last_hidden_state=last_hidden_state
        )

    def _predict(
        self, pixel_values: Tensor | None, patch_attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Returns the predictions (masks, classes), the final one last, and the tokens after the last norm.

        The predictions before a block are computed only in training or if the block uses masked attention.
        """
        head = self.head
        hidden_states, blocks = self.model.start_blocks(pixel_values, patch_attention_mask, **kwargs)
        hidden_states, start, encoder, norm = head.start(hidden_states, blocks)
        unmasked = blocks.attention_mask(hidden_states)
        predictions = []
        for block, is_masked in enumerate(head.masked_blocks):
            attention_mask = unmasked
            if is_masked or self.training:
                predictions.append(head(norm(hidden_states), blocks.grid, patch_attention_mask))
            if is_masked:
                implementation = self.config._attn_implementation
                # With output_attentions, the model always uses eager attention, which supports masks.
                if implementation not in ("eager", "sdpa") and not blocks.output_attentions:
                    raise ValueError(
                        f"Masked attention needs attn_implementation='sdpa' or 'eager', not {implementation!r}."
                    )
                layout = blocks.grid, self.config.num_prefix_tokens, patch_attention_mask
                attention_mask = head.attention_mask(predictions[-1][0], block, *layout)
            number = start + block
            hidden_states = blocks.run(hidden_states, number, number + 1, encoder, attention_mask=attention_mask)
        hidden_states = norm(hidden_states)
        return [*predictions, head(hidden_states, blocks.grid, patch_attention_mask)], hidden_states
