"""Monocular depth: heads, losses, model and pipeline.

Shapes: B batch, C channels, H W pixels, h w patch grid, P prefix tokens, L tokens, D hidden size, K bins, s how much
finer the output of a head is than the grid.
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
from .layers import HfViTHeadConv2d, HfViTHeadConvTranspose2d, HfViTNamedHead
from .modeling_hf_vit import HfViTForDensePrediction, HfViTModel
from .pipeline_hf_vit import BatchedImagePipeline, Part
from .shared import at_least_float32, choose_blocks, in_float32, run_unpadded
from .task_configurations import HfViTDepthConfig


if is_vision_available():
    import PIL.Image


Tensors = tuple[Tensor, ...]
NUM_SCALES = 4  # of the gradient matching
SILOG_EPS = 1e-12  # below it a root, whose gradient would be infinite, counts as 0
LEAST_PREDICTION = 1e-6  # meters, for the logarithm


class HfViTDepthPredictor(HfViTHeadConv2d):
    """The last layer of a head, initialized where the activation behind it passes a gradient."""

    # At the full scale of its inputs, the sigmoid of metric depth is saturated in half the image from the first steps.
    initial_gain = 0.1

    def __init__(self, options: HfViTDepthConfig, in_size: int, out_size: int = 1, kernel_size: int = 1) -> None:
        super().__init__(in_size, out_size, kernel_size, padding=kernel_size // 2)
        self.initial_bias = 1.0 if options.depth_estimation_type == "relative" else 0.0


def to_depth(values: Tensor, options: HfViTDepthConfig) -> Tensor:
    """Maps any numbers to relative inverse depths, or to depths in meters between 0 and `max_depth`."""
    if options.depth_estimation_type == "relative":
        return values.relu()
    return F.softplus(values) if options.max_depth is None else values.sigmoid() * options.max_depth


class HfViTLinearDepthHead(nn.Module):
    """A linear layer on each patch and the CLS token, to the probabilities of bins of depth."""

    def __init__(self, config: HfViTConfig, options: HfViTDepthConfig, num_levels: int) -> None:
        super().__init__()
        self.options, self.has_cls = options, config.use_cls_token
        self.max_depth = options.max_depth if options.depth_estimation_type == "metric" else None
        in_size = config.hidden_size * (2 if self.has_cls else 1) * num_levels
        self.classifier = HfViTDepthPredictor(options, in_size, 1 if self.max_depth is None else options.num_bins)

    def forward(self, levels: Tensors, prefixes: Tensors) -> Tensor:
        """Maps (B, D, h, w) and tokens (B, P, D) to depth (B, 1, 4·h, 4·w)."""
        parts = list(levels)
        if self.has_cls:
            parts += [prefix[:, 0, :, None, None].expand_as(levels[0]) for prefix in prefixes]
        # The layer acts on each position alone, so it may come before the resizing of the protocol: four times less.
        scores = self.classifier(torch.cat(parts, dim=1))  # (B, K, h, w)
        scores = F.interpolate(scores, scale_factor=4, mode="bilinear", align_corners=False)
        if self.max_depth is None:
            return scores.relu()
        # Half precision has fewer numbers than there are bins.
        weights = at_least_float32(scores.relu()) + 0.1  # all bins count a little
        limits = self.options.min_depth, self.max_depth
        bins = torch.linspace(*limits, scores.shape[1], device=scores.device, dtype=weights.dtype)
        depth = (weights * bins[:, None, None]).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
        return depth.to(scores.dtype)


class HfViTConvDepthHead(nn.Module):
    """Transposed convolutions over the patch grid: D, D/2, D/4, 1, four times as fine."""

    def __init__(self, config: HfViTConfig, options: HfViTDepthConfig, num_levels: int) -> None:
        super().__init__()
        self.options, width = options, config.hidden_size
        self.up1 = HfViTHeadConvTranspose2d(width * num_levels, width // 2, kernel_size=4, stride=2, padding=1)
        self.up2 = HfViTHeadConvTranspose2d(width // 2, width // 4, kernel_size=4, stride=2, padding=1)
        self.predictor = HfViTDepthPredictor(options, width // 4, kernel_size=3)

    def forward(self, levels: Tensors, prefixes: Tensors) -> Tensor:
        """Maps (B, D, h, w) to depth (B, 1, 4·h, 4·w)."""
        maps = self.up1(torch.cat(levels, dim=1)).relu()  # (B, D/2, 2·h, 2·w)
        return to_depth(self.predictor(self.up2(maps).relu()), self.options)


class HfViTReassemble(nn.Module):
    """The tokens of one level as a map of `size` channels, `factor` times as fine as the grid."""

    # Source: DPT (https://arxiv.org/abs/2103.13413).

    def __init__(self, config: HfViTConfig, size: int, factor: float, readout_type: str) -> None:
        super().__init__()
        if readout_type != "ignore" and not config.use_cls_token:
            raise ValueError(f"readout_type={readout_type!r} reads the CLS token, but there is none. Set 'ignore'.")
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
        """(B, D, h, w) and (B, P, D) to (B, C, factor·h, factor·w)."""
        if self.readout is not None:
            patches = maps.movedim(1, -1)  # (B, h, w, D)
            token = prefix[:, 0, None, None].expand_as(patches)
            maps = F.gelu(self.readout(torch.cat((patches, token), dim=-1))).movedim(-1, 1)
        elif self.readout_type == "add":
            maps = maps + prefix[:, 0, :, None, None]
        return self.resize(self.projection(maps))


class HfViTResidualConv(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv1 = HfViTHeadConv2d(size, size, kernel_size=3, padding=1)
        self.conv2 = HfViTHeadConv2d(size, size, kernel_size=3, padding=1)
        self.conv2.initial_gain = 0.1

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C, h, w) to the same shape."""
        return maps + self.conv2(self.conv1(maps.relu()).relu())


class HfViTFusion(nn.Module):
    """Fuses the output of the coarser levels with the next finer one (RefineNet, https://arxiv.org/abs/1611.06612)."""

    def __init__(self, size: int, is_first: bool) -> None:
        super().__init__()
        self.residual1 = None if is_first else HfViTResidualConv(size)
        self.residual2 = HfViTResidualConv(size)
        self.projection = HfViTHeadConv2d(size, size, kernel_size=1)
        # The sum of two levels keeps the scale of each; growing with each fusion, it would saturate the sigmoid.
        self.projection.initial_gain = 0.5

    def forward(self, maps: Tensor, finer: Tensor | None, size: tuple[int, int]) -> Tensor:
        """(B, C, h, w), and for all but the first the level (B, C, about h, about w), to (B, C, *size)."""
        if finer is not None and self.residual1 is not None:
            if finer.shape != maps.shape:
                finer = F.interpolate(finer, size=maps.shape[-2:], mode="bilinear", align_corners=False)
            maps = maps + self.residual1(finer)
        maps = F.interpolate(self.residual2(maps), size=size, mode="bilinear", align_corners=True)
        return self.projection(maps)


class HfViTDPTDepthHead(nn.Module):
    """Levels of the encoder, reassembled at several resolutions and fused (https://arxiv.org/abs/2103.13413)."""

    def __init__(self, config: HfViTConfig, options: HfViTDepthConfig, num_levels: int) -> None:
        super().__init__()
        sizes, fused = options.neck_hidden_sizes, options.fusion_hidden_size
        if num_levels != len(sizes):
            raise ValueError(
                f"head='dpt' has {len(sizes)} levels of neck_hidden_sizes, but out_indices names {num_levels} blocks."
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
        """Maps (B, D, h, w) and tokens (B, P, D), the finest level first, to depth (B, 1, H, W) or so."""
        parts = zip(self.convs, self.reassemble, levels, prefixes, strict=True)
        maps = [conv(reassemble(level, prefix)) for conv, reassemble, level, prefix in parts]
        maps.reverse()  # the coarsest first
        fused, doubles = maps[0], self.options.doubles_resolution
        for index, fusion in enumerate(self.fusions):
            is_last = index == len(maps) - 1
            size = multiple_of(fused, 2, 2) if doubles or is_last else maps[index + 1].shape[-2:]
            fused = fusion(fused, maps[index] if index else None, size)
        size = multiple_of(fused, 2, 2) if doubles else multiple_of(levels[0], *to_pair(self.config.patch_size))
        fused = F.interpolate(self.conv1(fused), size=size, mode="bilinear", align_corners=True)
        return to_depth(self.predictor(self.conv2(fused).relu()), self.options)

    def in_scale(self, levels: Tensors, prefixes: Tensors) -> Tensor:
        """Returns the same at a fixed multiple of the grid, as the images of a batch must go together."""
        size = multiple_of(levels[0], self.scale, self.scale)
        return F.interpolate(self(levels, prefixes), size=size, mode="bilinear", align_corners=True)


def multiple_of(maps: Tensor, rows: int, columns: int) -> tuple[int, int]:
    """Returns a multiple of the height and width of maps (B, C, h, w)."""
    return rows * maps.shape[-2], columns * maps.shape[-1]


HEADS = {"linear": HfViTLinearDepthHead, "conv": HfViTConvDepthHead, "dpt": HfViTDPTDepthHead}


class HfViTDepthHead(HfViTNamedHead, HfViTInputSized):
    """The head that the options name, on the blocks that they name."""

    def __init__(self, config: HfViTConfig, options: HfViTDepthConfig) -> None:
        num_levels = len(options.neck_hidden_sizes) if options.head == "dpt" else 1
        indices = choose_blocks(options.out_indices, config, num_levels)
        super().__init__(options.head, HEADS[options.head](config, options, len(indices)))
        self.out_indices = indices
        self.reads_cls_token = options.head == "linear" or (options.head == "dpt" and options.readout_type != "ignore")

    def check_inputs(self, old: HfViTConfig, new: HfViTConfig) -> None:
        """Refuses to lose or gain a CLS token that the head has weights for."""
        if self.reads_cls_token and new.use_cls_token != old.use_cls_token:
            raise ValueError(
                f"use_cls_token={new.use_cls_token} does not fit the depth head, which was built for "
                f"use_cls_token={old.use_cls_token}. Change and save the backbone (HfViTModel), and open it as "
                "HfViTForDepthEstimation."
            )

    def forward(self, levels: list[Tensor], prefixes: list[Tensor], mask: Tensor | None = None) -> Tensor:
        """Predicts depth (B, s·h, s·w) from maps (B, D, h, w) and prefix tokens (B, P, D) of blocks."""
        # In meters or relative inverse depth; the mask (B, h, w) is False for padding.
        head: Any = self.decoder
        if mask is not None and self.name == "dpt" and head.options.doubles_resolution:
            head = head.in_scale
        count = len(levels)
        return run_unpadded(lambda *own: head(own[:count], own[count:]), mask, *levels, *prefixes).squeeze(1)


@in_float32
def depth_loss(predicted: Tensor, labels: Tensor, options: HfViTDepthConfig) -> Tensor:
    """Returns the mean over images of their losses; one without a valid pixel adds exactly zero.

    `predicted` (B, h, w), meters or relative inverse depth, is resized to the labels (B, H, W) or (B, 1, H, W) in
    meters, where 0, negative, NaN and infinite are not valid, nor more than the `max_depth` of metric depth.
    `ValueError` for labels of another shape or whole numbers.
    """
    labels = labels.squeeze(1) if labels.ndim == 4 else labels
    if labels.ndim != 3 or len(labels) != len(predicted) or not labels.is_floating_point():
        raise ValueError(
            f"labels must be floats (batch, height, width) in meters with batch {len(predicted)}, not {labels.dtype} "
            f"of shape {tuple(labels.shape)}. The image processor makes them from depth_maps."
        )
    labels = labels.to(predicted.dtype)
    if predicted.shape[-2:] != labels.shape[-2:]:
        size = labels.shape[-2:]
        predicted = F.interpolate(predicted[:, None], size=size, mode="bilinear", align_corners=False).squeeze(1)
    valid = labels.isfinite() & (labels > 0)  # (B, H, W)
    if options.depth_estimation_type == "metric" and options.max_depth is not None:
        valid &= labels <= options.max_depth  # beyond which nothing can be predicted
    labels = labels.where(valid, 1)  # no NaN may reach a product, whose gradient it would spoil
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
    # Not at `min_depth`, below which a prediction that has run away from all depths would have no way back.
    ratio = predicted.clamp_min(LEAST_PREDICTION).log() - labels.clamp_min(options.min_depth).log()
    squares = mean(ratio.square()) - options.silog_lambda * mean(ratio).square()  # (B,)
    counts = squares > SILOG_EPS
    return squares.where(counts, 1).sqrt().where(counts, 0).mean()


def scale_shift_invariant_loss(predicted: Tensor, target: Tensor, valid: Tensor, gradient_weight: float) -> Tensor:
    """Returns the scale- and shift-invariant loss of one image, of inverse depths (H, W)."""
    # https://arxiv.org/abs/1907.01341: both are brought to median 0 and mean absolute deviation 1 over `valid` pixels;
    # the loss is the mean absolute difference, and that of slopes at four resolutions; 0 where nothing is valid.
    if not valid.any():
        return (predicted * 0).sum()
    difference = (normalized(predicted, valid) - normalized(target, valid)) * valid  # (H, W)
    loss = difference.abs().sum() / valid.sum()
    for scale in range(NUM_SCALES if gradient_weight else 0):
        step = 2**scale
        loss = loss + gradient_weight * slope(difference[::step, ::step], valid[::step, ::step])
    return loss


def normalized(values: Tensor, valid: Tensor) -> Tensor:
    """Returns values (H, W) with median 0 and mean absolute deviation 1 over the valid pixels."""
    chosen = values[valid]
    median = chosen.median()
    deviation = (chosen - median).abs().mean()
    return (values - median) / deviation.clamp_min(1e-6)


def slope(difference: Tensor, valid: Tensor) -> Tensor:
    """Returns the sum of the mean absolute slopes down and across between valid pixels."""
    down = (difference[1:] - difference[:-1]).abs() * (valid[1:] & valid[:-1])
    across = (difference[:, 1:] - difference[:, :-1]).abs() * (valid[:, 1:] & valid[:, :-1])
    return (down.sum() + across.sum()) / valid.sum().clamp_min(1)


class HfViTForDepthEstimation(HfViTForDensePrediction):
    """Predicts the depth of every pixel."""

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
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            labels: (B, H, W) or (B, 1, H, W) floats in meters; 0, NaN and more than `max_depth` mean that a pixel is
                not valid.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `predicted_depth` (B, s·h, s·w), meters or relative inverse depth; `post_process_depth_estimation` resizes
            it. `loss` if labels were given, see `depth_loss`.

        Raises:
            ValueError: if an input does not fit the model, saying what would.
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
    """The stock pipeline of depth in batches; see `BatchedImagePipeline`."""

    stock: ClassVar[type[Pipeline] | None] = DepthEstimationPipeline

    def decode(self, outputs: Any, parts: list[Part]) -> list[dict[str, Any]]:
        """Returns the depth of each image, (H, W) in the unit of the model, and a gray picture of it."""
        sizes = [part.size for part in parts]
        answers = []
        for found in self.image_processor.post_process_depth_estimation(outputs, sizes):
            depth = found["predicted_depth"]  # (H, W)
            low, high = depth.aminmax()
            # NaN where all depths are the same
            gray = ((depth - low) / (high - low) * 255).nan_to_num().to(torch.uint8)
            answers.append({"predicted_depth": depth.cpu(), "depth": PIL.Image.fromarray(gray.cpu().numpy())})
        return answers
