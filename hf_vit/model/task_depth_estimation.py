"""Monocular depth estimation: heads, losses, model and pipeline.

Shapes: B batch, C channels, H W pixels, h w patch grid, P prefix tokens, L tokens, D hidden size, K depth
bins, s resolution of the head output relative to the patch grid.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DepthEstimationPipeline, Pipeline
from transformers.modeling_outputs import DepthEstimatorOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.import_utils import is_vision_available

from .adapt_inputs import HfViTInputSized
from .configuration_hf_vit import HfViTConfig, to_pair
from .large_images import blended_bands, fit_scale_and_shift
from .layers import HfViTHeadConv2d, HfViTHeadConvTranspose2d, HfViTNamedHead
from .modeling_hf_vit import HfViTForDensePrediction, HfViTModel
from .pipeline_hf_vit import BatchedImagePipeline, ModelInput
from .shared import choose_blocks, in_float32, run_unpadded, to_float32_or_higher
from .task_configurations import HfViTDepthConfig


if is_vision_available():
    import PIL.Image


Tensors = tuple[Tensor, ...]
NUM_SCALES = 4  # Number of resolutions of the gradient matching loss.
SILOG_EPS = 1e-12  # Smaller squared losses are set to 0, because the square root has an infinite gradient at 0.
MIN_PREDICTION = 1e-6  # Minimum in meters to which predicted depths are clamped before the logarithm.


class HfViTDepthPredictor(HfViTHeadConv2d):
    """Last convolution of a depth head, initialized so that the following activation passes gradients."""

    # With a gain of 1, the sigmoid of metric depth saturates in half of the image within the first training steps.
    initial_gain = 0.1

    def __init__(self, options: HfViTDepthConfig, in_size: int, out_size: int = 1, kernel_size: int = 1) -> None:
        super().__init__(in_size, out_size, kernel_size, padding=kernel_size // 2)
        self.initial_bias = 1.0 if options.depth_estimation_type == "relative" else 0.0


def to_depth(values: Tensor, options: HfViTDepthConfig) -> Tensor:
    """Converts unbounded head outputs to relative inverse depth, or to metric depth between 0 and `max_depth`."""
    if options.depth_estimation_type == "relative":
        return values.relu()
    return F.softplus(values) if options.max_depth is None else values.sigmoid() * options.max_depth


class HfViTLinearDepthHead(nn.Module):
    """Depth head with one linear layer, which predicts scores of depth bins from patch tokens and the CLS token."""

    def __init__(self, config: HfViTConfig, options: HfViTDepthConfig, num_levels: int) -> None:
        super().__init__()
        self.options, self.has_cls = options, config.use_cls_token
        self.max_depth = options.max_depth if options.depth_estimation_type == "metric" else None
        in_size = config.hidden_size * (2 if self.has_cls else 1) * num_levels
        self.classifier = HfViTDepthPredictor(options, in_size, 1 if self.max_depth is None else options.num_bins)

    def forward(self, levels: Tensors, prefixes: Tensors) -> Tensor:
        """Predicts depth (B, 1, 4·h, 4·w) from patch features (B, D, h, w) and prefix tokens (B, P, D)."""
        parts = list(levels)
        if self.has_cls:
            parts += [prefix[:, 0, :, None, None].expand_as(levels[0]) for prefix in prefixes]
        # Apply the linear layer before resizing, which is faster and gives the same result.
        scores = self.classifier(torch.cat(parts, dim=1))  # (B, K, h, w)
        scores = F.interpolate(scores, scale_factor=4, mode="bilinear", align_corners=False)
        if self.max_depth is None:
            return scores.relu()
        # Use float32, because half precision cannot distinguish the depths of neighboring bins.
        weights = to_float32_or_higher(scores.relu()) + 0.1  # 0.1 is the minimum weight of every bin.
        limits = self.options.min_depth, self.max_depth
        bins = torch.linspace(*limits, scores.shape[1], device=scores.device, dtype=weights.dtype)
        depth = (weights * bins[:, None, None]).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
        return depth.to(scores.dtype)


class HfViTConvDepthHead(nn.Module):
    """Depth head with two transposed convolutions, which quadruple the resolution, and a convolution."""

    def __init__(self, config: HfViTConfig, options: HfViTDepthConfig, num_levels: int) -> None:
        super().__init__()
        self.options, width = options, config.hidden_size
        self.up1 = HfViTHeadConvTranspose2d(width * num_levels, width // 2, kernel_size=4, stride=2, padding=1)
        self.up2 = HfViTHeadConvTranspose2d(width // 2, width // 4, kernel_size=4, stride=2, padding=1)
        self.predictor = HfViTDepthPredictor(options, width // 4, kernel_size=3)

    def forward(self, levels: Tensors, prefixes: Tensors) -> Tensor:
        """Predicts depth (B, 1, 4·h, 4·w) from patch features (B, D, h, w); prefix tokens are ignored."""
        maps = self.up1(torch.cat(levels, dim=1)).relu()  # (B, D/2, 2·h, 2·w)
        return to_depth(self.predictor(self.up2(maps).relu()), self.options)


class HfViTReassemble(nn.Module):
    """Converts the tokens of one encoder block to a feature map, as in DPT (https://arxiv.org/abs/2103.13413).

    The map has `size` channels and `factor` times the resolution of the patch grid.
    """

    def __init__(self, config: HfViTConfig, size: int, factor: float, readout_type: str) -> None:
        super().__init__()
        if readout_type != "ignore" and not config.use_cls_token:
            raise ValueError(f"readout_type={readout_type!r} needs a CLS token, but there is none. Use 'ignore'.")
        width = config.hidden_size
        self.readout_type = readout_type
        self.readout = nn.Linear(2 * width, width) if readout_type == "project" else None
        self.projection = HfViTHeadConv2d(width, size, kernel_size=1)
        self.resize: nn.Module = nn.Identity()
        if factor > 1:
            self.resize = HfViTHeadConvTranspose2d(size, size, kernel_size=round(factor), stride=round(factor))
        elif factor < 1:
            self.resize = HfViTHeadConv2d(size, size, kernel_size=3, stride=round(1 / factor), padding=1)

    def forward(self, maps: Tensor, prefix: Tensor) -> Tensor:
        """Maps patch features (B, D, h, w) and prefix tokens (B, P, D) to (B, C, factor·h, factor·w)."""
        if self.readout is not None:
            patches = maps.movedim(1, -1)  # (B, h, w, D)
            token = prefix[:, 0, None, None].expand_as(patches)
            maps = F.gelu(self.readout(torch.cat((patches, token), dim=-1))).movedim(-1, 1)
        elif self.readout_type == "add":
            maps = maps + prefix[:, 0, :, None, None]
        return self.resize(self.projection(maps))


class HfViTResidualConv(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv1 = HfViTHeadConv2d(size, size, kernel_size=3, padding=1)
        self.conv2 = HfViTHeadConv2d(size, size, kernel_size=3, padding=1)
        self.conv2.initial_gain = 0.1

    def forward(self, maps: Tensor) -> Tensor:
        """Maps features (B, C, h, w) to features of the same shape."""
        return maps + self.conv2(self.conv1(maps.relu()).relu())


class HfViTFusion(nn.Module):
    """Fuses the features of coarser levels with the next finer level (RefineNet, https://arxiv.org/abs/1611.06612)."""

    def __init__(self, size: int, is_first: bool) -> None:
        super().__init__()
        self.residual1 = None if is_first else HfViTResidualConv(size)
        self.residual2 = HfViTResidualConv(size)
        self.projection = HfViTHeadConv2d(size, size, kernel_size=1)
        # A gain of 0.5 keeps the scale of features constant when levels are added; otherwise the sigmoid saturates.
        self.projection.initial_gain = 0.5

    def forward(self, maps: Tensor, finer: Tensor | None, size: tuple[int, int]) -> Tensor:
        """Adds the finer level, resized to (B, C, h, w), to `maps` (B, C, h, w) and resizes the result to `size`.

        The first fusion has no finer level.
        """
        if finer is not None and self.residual1 is not None:
            if finer.shape != maps.shape:
                finer = F.interpolate(finer, size=maps.shape[-2:], mode="bilinear", align_corners=False)
            maps = maps + self.residual1(finer)
        maps = F.interpolate(self.residual2(maps), size=size, mode="bilinear", align_corners=True)
        return self.projection(maps)


class HfViTDPTDepthHead(nn.Module):
    """DPT head: reassembles encoder features at several resolutions and fuses them.

    Source: https://arxiv.org/abs/2103.13413.
    """

    def __init__(self, config: HfViTConfig, options: HfViTDepthConfig, num_levels: int) -> None:
        super().__init__()
        sizes, fused = options.neck_hidden_sizes, options.fusion_hidden_size
        if num_levels != len(sizes):
            raise ValueError(
                f"head='dpt' has {len(sizes)} levels in neck_hidden_sizes, but out_indices names {num_levels} blocks."
            )
        self.options, self.config = options, config
        self.scale = round(2 ** (num_levels + 1) * options.reassemble_factors[-1])
        self.reassemble = nn.ModuleList(
            HfViTReassemble(config, size, factor, options.readout_type)
            for size, factor in zip(sizes, options.reassemble_factors, strict=True)
        )
        self.convs = nn.ModuleList(
            HfViTHeadConv2d(size, fused, kernel_size=3, padding=1, bias=False) for size in sizes
        )
        self.fusions = nn.ModuleList(HfViTFusion(fused, is_first=index == 0) for index in range(num_levels))
        self.conv1 = HfViTHeadConv2d(fused, fused // 2, kernel_size=3, padding=1)
        self.conv2 = HfViTHeadConv2d(fused // 2, options.head_hidden_size, kernel_size=3, padding=1)
        self.predictor = HfViTDepthPredictor(options, options.head_hidden_size)

    def forward(self, levels: Tensors, prefixes: Tensors) -> Tensor:
        """Predicts depth (B, 1, ., .) from patch features (B, D, h, w) and prefix tokens (B, P, D) of several blocks.

        Blocks are ordered by their resolution after reassembling, from fine to coarse. The result has the size of the
        image or, with `doubles_resolution`, a multiple of the size of the patch grid.
        """
        parts = zip(self.convs, self.reassemble, levels, prefixes, strict=True)
        maps = [conv(reassemble(level, prefix)) for conv, reassemble, level, prefix in parts]
        maps.reverse()  # order from coarse to fine
        fused, doubles = maps[0], self.options.doubles_resolution
        for index, fusion in enumerate(self.fusions):
            is_last = index == len(maps) - 1
            size = multiple_of(fused, 2, 2) if doubles or is_last else maps[index + 1].shape[-2:]
            fused = fusion(fused, maps[index] if index else None, size)
        size = multiple_of(fused, 2, 2) if doubles else multiple_of(levels[0], *to_pair(self.config.patch_size))
        fused = F.interpolate(self.conv1(fused), size=size, mode="bilinear", align_corners=True)
        return to_depth(self.predictor(self.conv2(fused).relu()), self.options)

    def forward_at_fixed_scale(self, levels: Tensors, prefixes: Tensors) -> Tensor:
        """Returns the result of `forward`, resized to a fixed multiple of the patch grid.

        Outputs of images of different sizes thus have the same scale and can be combined in a batch.
        """
        size = multiple_of(levels[0], self.scale, self.scale)
        return F.interpolate(self(levels, prefixes), size=size, mode="bilinear", align_corners=True)


def multiple_of(maps: Tensor, rows: int, columns: int) -> tuple[int, int]:
    """Returns the height of maps (B, C, h, w) times `rows`, and their width times `columns`."""
    return rows * maps.shape[-2], columns * maps.shape[-1]


HEADS = {"linear": HfViTLinearDepthHead, "conv": HfViTConvDepthHead, "dpt": HfViTDPTDepthHead}


class HfViTDepthHead(HfViTNamedHead, HfViTInputSized):
    """Depth head of type `options.head`, which uses the features of the blocks `options.out_indices`."""

    def __init__(self, config: HfViTConfig, options: HfViTDepthConfig) -> None:
        num_levels = len(options.neck_hidden_sizes) if options.head == "dpt" else 1
        indices = choose_blocks(options.out_indices, config, num_levels)
        super().__init__(options.head, HEADS[options.head](config, options, len(indices)))
        self.out_indices = indices
        self.reads_cls_token = options.head == "linear" or (options.head == "dpt" and options.readout_type != "ignore")

    def check_inputs(self, old: HfViTConfig, new: HfViTConfig) -> None:
        """Raises `ValueError` if `use_cls_token` changes and the head has weights for the CLS token."""
        if self.reads_cls_token and new.use_cls_token != old.use_cls_token:
            raise ValueError(
                f"use_cls_token={new.use_cls_token} does not match the depth head, which was built for "
                f"use_cls_token={old.use_cls_token}. Change and save the backbone (HfViTModel), and load it as "
                "HfViTForDepthEstimation."
            )

    def forward(self, levels: list[Tensor], prefixes: list[Tensor], mask: Tensor | None = None) -> Tensor:
        """Predicts depth (B, s·h, s·w) from patch features (B, D, h, w) and prefix tokens (B, P, D) of blocks.

        Depth is metric, in meters, or relative inverse depth. `mask` (B, h, w) is False for padding.
        """
        head: Any = self.decoder
        if mask is not None and self.name == "dpt" and head.options.doubles_resolution:
            head = head.forward_at_fixed_scale
        count = len(levels)
        return run_unpadded(lambda *own: head(own[:count], own[count:]), mask, *levels, *prefixes).squeeze(1)


@in_float32
def depth_loss(predicted: Tensor, labels: Tensor, options: HfViTDepthConfig) -> Tensor:
    """Returns the mean depth loss per image; images without valid pixels have a loss of 0.

    `predicted` (B, h, w), metric or relative inverse depth, is resized to the labels. Labels (B, H, W) or (B, 1, H, W)
    are in meters. They are invalid if not finite, not positive or, for metric depth, larger than `max_depth`.

    Raises:
        ValueError: If the labels have another shape or are integers.
    """
    labels = labels.squeeze(1) if labels.ndim == 4 else labels
    if labels.ndim != 3 or len(labels) != len(predicted) or not labels.is_floating_point():
        raise ValueError(
            f"labels must be floats (batch, height, width) in meters with batch {len(predicted)}, not {labels.dtype} "
            f"of shape {tuple(labels.shape)}. The image processor creates them from depth_maps."
        )
    labels = labels.to(predicted.dtype)
    if predicted.shape[-2:] != labels.shape[-2:]:
        size = labels.shape[-2:]
        predicted = F.interpolate(predicted[:, None], size=size, mode="bilinear", align_corners=False).squeeze(1)
    valid = labels.isfinite() & (labels > 0)  # (B, H, W)
    if options.depth_estimation_type == "metric" and options.max_depth is not None:
        valid &= labels <= options.max_depth  # Larger depths cannot be predicted, so they are ignored.
    labels = labels.where(valid, 1)  # Multiplying by the mask would not remove NaN, because 0 * NaN is NaN.
    if options.depth_estimation_type == "relative":
        images, weight = zip(predicted, 1 / labels, valid, strict=True), options.gradient_loss_weight
        return torch.stack([scale_shift_invariant_loss(*image, weight) for image in images]).mean()
    count = valid.sum(dim=(1, 2)).clamp_min(1)  # (B,)

    def mean(values: Tensor) -> Tensor:
        return (values * valid).sum(dim=(1, 2)) / count

    if options.loss == "l1":
        return mean((predicted - labels).abs()).mean()
    if options.loss == "mse":
        return mean((predicted - labels).square()).mean()
    # Clamp predictions only far below `min_depth`, because clamped values get no gradient and cannot recover.
    ratio = predicted.clamp_min(MIN_PREDICTION).log() - labels.clamp_min(options.min_depth).log()
    squares = mean(ratio.square()) - options.silog_lambda * mean(ratio).square()  # (B,)
    counts = squares > SILOG_EPS
    return squares.where(counts, 1).sqrt().where(counts, 0).mean()


def scale_shift_invariant_loss(predicted: Tensor, target: Tensor, valid: Tensor, gradient_weight: float) -> Tensor:
    """Returns the scale- and shift-invariant loss of one image with inverse depths (H, W).

    Prediction and target are normalized to median 0 and mean absolute deviation 1 over `valid` pixels. The loss is
    their mean absolute difference plus `gradient_weight` times that of their gradients at four resolutions, or 0
    without valid pixels. Source: https://arxiv.org/abs/1907.01341.
    """
    if not valid.any():
        return (predicted * 0).sum()
    difference = (normalized(predicted, valid) - normalized(target, valid)) * valid  # (H, W)
    loss = difference.abs().sum() / valid.sum()
    for scale in range(NUM_SCALES if gradient_weight else 0):
        step = 2**scale
        loss = loss + gradient_weight * slope(difference[::step, ::step], valid[::step, ::step])
    return loss


def normalized(values: Tensor, valid: Tensor) -> Tensor:
    """Normalizes values (H, W) to median 0 and mean absolute deviation 1 over the valid pixels."""
    chosen = values[valid]
    median = chosen.median()
    deviation = (chosen - median).abs().mean()
    return (values - median) / deviation.clamp_min(1e-6)


def slope(difference: Tensor, valid: Tensor) -> Tensor:
    """Returns the sum of the mean absolute vertical and horizontal differences of neighboring valid pixels."""
    down = (difference[1:] - difference[:-1]).abs() * (valid[1:] & valid[:-1])
    across = (difference[:, 1:] - difference[:, :-1]).abs() * (valid[:, 1:] & valid[:, :-1])
    return (down.sum() + across.sum()) / valid.sum().clamp_min(1)


class HfViTForDepthEstimation(HfViTForDensePrediction):
    """Depth estimation model, which predicts metric or relative inverse depth for every pixel."""

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        self.options = HfViTDepthConfig.of(config.depth_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.depth_head = HfViTDepthHead(config, self.options)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> DepthEstimatorOutput:
        """Runs the model.

        Args:
            pixel_values: Images (B, C, H, W), with H and W multiples of the patch size.
            labels: Depth (B, H, W) or (B, 1, H, W) in meters, as floats; 0, NaN and values above `max_depth` are
                invalid and ignored.
            patch_attention_mask: Mask (B, h, w), False for padding on the right and at the bottom.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `predicted_depth` (B, s·h, s·w) in meters or as relative inverse depth, which
            `post_process_depth_estimation` resizes, and `loss` if labels are given, see `depth_loss`.

        Raises:
            ValueError: If an input does not match the model; the message describes valid inputs.
        """
        outputs, levels, prefixes = self.run_encoder(
            pixel_values, self.depth_head.out_indices, patch_attention_mask=patch_attention_mask, **kwargs
        )
        predicted = self.depth_head(levels, prefixes, patch_attention_mask)
        return DepthEstimatorOutput(
            loss=None if labels is None else depth_loss(predicted, labels, self.options),
            predicted_depth=predicted,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class HfViTDepthEstimationPipeline(BatchedImagePipeline, DepthEstimationPipeline):
    """Depth estimation pipeline with batched image processing; see `BatchedImagePipeline`."""

    stock: ClassVar[type[Pipeline] | None] = DepthEstimationPipeline

    @property
    def joins_whole_image(self) -> bool:
        """Whether `join_tiles` requires the whole image: True for relative depth, because its scale varies."""
        return HfViTDepthConfig.of(self.model.config.depth_config).depth_estimation_type == "relative"

    def decode(self, outputs: Any, parts: list[ModelInput]) -> list[dict[str, Any]]:
        """Returns the depth map (H, W) of each image in the unit of the model, and a grayscale picture of it."""
        return [_with_picture(depth) for depth in self.decode_tiles(outputs, parts)]

    def decode_tiles(self, outputs: Any, parts: list[ModelInput]) -> list[Tensor]:
        """Returns the depth map (H, W) of each tile."""
        found = self.image_processor.post_process_depth_estimation(outputs, [part.size for part in parts])
        return [own["predicted_depth"] for own in found]

    def join_tiles(self, parts: list[ModelInput]) -> dict[str, Any]:
        """Blends the depth maps of all tiles. Relative depth is first fitted to the depth map of the whole image."""
        if self.joins_whole_image:
            whole, *parts = parts
            for part in parts:
                (top, left), (height, width) = part.place, part.size
                region = whole.answer[top : top + height, left : left + width]
                part.answer = fit_scale_and_shift(part.answer, region).clamp_min(0)
        maps, places = [part.answer[None] for part in parts], [part.place for part in parts]
        return _with_picture(torch.cat([*blended_bands(maps, places, parts[0].size)], dim=1)[0])


def _with_picture(depth: Tensor) -> dict[str, Any]:
    """Returns a depth map (H, W) and a grayscale picture of it, in the format of a depth estimation pipeline."""
    low, high = depth.aminmax()
    # A constant depth map gives 0 / 0 = NaN, which becomes black.
    gray = ((depth - low) / (high - low) * 255).nan_to_num().to(torch.uint8)
    return {"predicted_depth": depth.cpu(), "depth": PIL.Image.fromarray(gray.cpu().numpy())}
