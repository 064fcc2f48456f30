"""Metrics of reconstructed images: PSNR and SSIM."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .base import StreamedMetric, mean_without_nan


LEAST_SIDE = 11  # Side of the SSIM window in pixels.
BORDER = LEAST_SIDE // 2  # Width in pixels of the border whose SSIM windows would contain padding.


@dataclass(frozen=True)
class ReconstructedImage:
    """An image and its reconstruction (C, H, W) in [0, 1], and pictures to draw, normalized like the model input."""

    image: Tensor
    reconstruction: Tensor
    pictures: list[Tensor]


class ReconstructionMetric(StreamedMetric):
    """Means over images of `psnr` in dB and `ssim`, computed by torchmetrics for values in [0, 1].

    PSNR is -10 log10 of the mean squared error. SSIM is defined in https://doi.org/10.1109/TIP.2003.819861; it is the
    mean over windows of 11 x 11 pixels inside the image. Images with a side of less than 11 pixels have no SSIM.
    """

    score_names = ("psnr", "ssim")
    units: ClassVar[dict[str, str]] = {"psnr": "dB"}

    def record(self, prediction: ReconstructedImage, target: Any) -> tuple[float, float]:
        """Return PSNR and SSIM of an image."""
        from torchmetrics.functional.image import (
            peak_signal_noise_ratio,
            structural_similarity_index_measure,
        )

        found, true = prediction.reconstruction[None].float(), prediction.image[None].float()
        ssim = math.nan
        if min(true.shape[-2:]) >= LEAST_SIDE:
            _, values = structural_similarity_index_measure(found, true, data_range=1.0, return_full_image=True)
            ssim = float(values[..., BORDER:-BORDER, BORDER:-BORDER].mean())
        return float(peak_signal_noise_ratio(found, true, data_range=1.0)), ssim

    def compute(self) -> dict[str, float]:
        """Return the mean PSNR and SSIM of all images added so far."""
        columns = zip(*self.records, strict=True) if self.records else ((), ())
        return {name: mean_without_nan(values) for name, values in zip(self.score_names, columns, strict=True)}
