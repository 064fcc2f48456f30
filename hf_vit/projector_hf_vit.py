"""From levels of the encoder to a small pyramid of maps, each of another resolution.

The design is that of LW-DETR (https://arxiv.org/abs/2406.03459). Padding is put to zero before each convolution and
left out of the statistics, so that every image is seen alone.
Shapes: B batch, h w patch grid, D hidden size of the encoder, C of the pyramid, s resolution relative to the grid.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .configuration_hf_vit import HfViTConfig
from .configuration_objects_hf_vit import HfViTDetectionConfig
from .decoders_hf_vit import HfViTBatchNorm2d, HfViTLayerNorm2d


NUM_BOTTLENECKS = 3
# Wider levels are narrowed down before their resolution is doubled.
MAX_UPSAMPLED = 512

# Maps (B, C, h, w), and (B, h, w) bool, False for padding
Visible = Tensor | None
Level = tuple[Tensor, Visible]


class HfViTConvNorm(nn.Module):
    """A convolution, a norm and an activation."""

    def __init__(
        self, in_size: int, out_size: int, kernel_size: int, norm: str, activation: nn.Module, stride: int = 1
    ) -> None:
        """Builds the layers; `norm` is "batch" or "layer"."""
        super().__init__()
        self.conv = nn.Conv2d(in_size, out_size, kernel_size, stride, padding=kernel_size // 2, bias=False)
        self.norm = HfViTBatchNorm2d(out_size) if norm == "batch" else HfViTLayerNorm2d(out_size, eps=1e-6)
        self.activation = activation

    def forward(self, maps: Tensor, visible: Visible) -> Level:
        """(B, C, h, w) to (B, C', h / stride, w / stride), rounded up."""
        if visible is not None:
            maps = maps.masked_fill(~visible[:, None], 0)
            rows, columns = self.conv.stride
            visible = visible[:, ::rows, ::columns]
        maps = self.conv(maps)
        maps = self.norm(maps, visible) if isinstance(self.norm, HfViTBatchNorm2d) else self.norm(maps)
        return self.activation(maps), visible


class HfViTResampling(nn.Module):
    """Brings one level to another resolution."""

    def __init__(self, size: int, scale: float, norm: str) -> None:
        """Builds the layers for maps of `size` channels: 2 doubles, 1 leaves, 0.5 and 0.25 halve once and twice."""
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
        """(B, D, h, w) to (B, out_size, s·h, s·w), rounded up."""
        for conv in self.convs:
            maps, visible = conv(maps, visible)
        if self.upsample is not None:
            maps = self.upsample(maps)
            if visible is not None:
                visible = visible.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        return maps, visible


class HfViTBottleneck(nn.Module):
    """Two convolutions (RepVGG, https://arxiv.org/abs/2101.03697, in its form for inference)."""

    def __init__(self, size: int, norm: str) -> None:
        """Builds the layers for maps of `size` channels."""
        super().__init__()
        self.conv1 = HfViTConvNorm(size, size, 3, norm, nn.SiLU())
        self.conv2 = HfViTConvNorm(size, size, 3, norm, nn.SiLU())

    def forward(self, maps: Tensor, visible: Visible) -> Tensor:
        """(B, C, h, w) to the same shape."""
        return self.conv2(*self.conv1(maps, visible))[0]


class HfViTScaleProjector(nn.Module):
    """One map of the pyramid from all levels: a C2f block (YOLOv8) and a norm."""

    def __init__(self, config: HfViTConfig, options: HfViTDetectionConfig, num_levels: int, scale: float) -> None:
        """Builds the layers for `num_levels` levels and resolution `scale`."""
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
        """Levels (B, D, h, w) to (B, C, s·h, s·w), and what of it is no padding."""
        pairs = [resampling(level, visible) for resampling, level in zip(self.resamplings, levels, strict=True)]
        visible = pairs[0][1]
        maps, _ = self.conv1(torch.cat([own for own, _ in pairs], dim=1), visible)
        parts = list(maps.chunk(2, dim=1))
        for bottleneck in self.bottlenecks:
            parts.append(bottleneck(parts[-1], visible))
        maps, _ = self.conv2(torch.cat(parts, dim=1), visible)
        return self.norm(maps), visible


class HfViTProjector(nn.Module):
    """Levels of the encoder as a pyramid."""

    def __init__(self, config: HfViTConfig, options: HfViTDetectionConfig, num_levels: int) -> None:
        """Builds one projector for each of `options.scale_factors`."""
        super().__init__()
        self.scales = nn.ModuleList(
            HfViTScaleProjector(config, options, num_levels, scale) for scale in options.scale_factors
        )

    def forward(self, levels: Sequence[Tensor], visible: Visible = None) -> list[Level]:
        """Builds the pyramid.

        Args:
            levels: Patches of some blocks as maps (B, D, h, w).
            visible: (B, h, w) bool, False for padding on the right and at the bottom; None if there is none.

        Returns:
            For each of `options.scale_factors` a map (B, C, s·h, s·w) and what of it is no padding, (B, s·h, s·w).
        """
        return [scale(levels, visible) for scale in self.scales]
