"""Depth of every pixel."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .colors import depth_colors
from .pictures import arrange, bar, fit, text
from .task import Task


# Of families that say nothing of it in their configuration, those whose answers are meters
METRIC = {"glpn", "hf_vit", "zoedepth"}
OUTLIERS = 1  # per cent of the pixels, at either end, that do not stretch the colors
MAX_MILLIMETERS = 65535  # of 16 bits
TICKS = 5


class DepthEstimation(Task):
    """Says how far every pixel is: in meters, or, relative, as inverse depth up to scale and shift."""

    pipeline = "depth-estimation"

    def __init__(self, model: str) -> None:
        """Opens the model."""
        super().__init__(model)
        config = self.run.model.config.to_dict()
        default = "metric" if config["model_type"] in METRIC else "relative"
        options = config.get("depth_config") or config
        self.is_metric = options.get("depth_estimation_type", default) == "metric"
        self.unit = "meters" if self.is_metric else "relative inverse depth"

    def describe(self, image: Image.Image, answer: Any) -> dict[str, Any]:
        """Returns the least, the median and the largest value, and their unit."""
        depth = answer["predicted_depth"].numpy()
        values = {"min": depth.min(), "median": np.median(depth), "max": depth.max()}
        return {"unit": self.unit, **{name: round(float(value), 4) for name, value in values.items()}}

    def write(self, image: Image.Image, answer: Any, stem: Path) -> list[Path]:
        """Writes the values as they are, and meters in millimeters too, 0 where these need more than 16 bits."""
        depth = answer["predicted_depth"].numpy()
        files = [stem.with_name(f"{stem.name}_depth.npy")]
        np.save(files[0], depth)
        if self.is_metric:
            millimeters = (depth * 1000).round()
            files.append(stem.with_name(f"{stem.name}_depth.png"))
            Image.fromarray(np.where(millimeters > MAX_MILLIMETERS, 0, millimeters).astype(np.uint16)).save(files[1])
        return files

    def draw(self, image: Image.Image, answer: Any, caption: str) -> Image.Image:
        """Returns the image, its depth in colors, the nearest being bright, and what the colors stand for."""
        depth = answer["predicted_depth"].numpy()
        lowest, highest = (float(value) for value in np.percentile(depth, [OUTLIERS, 100 - OUTLIERS]))
        before = fit(image)
        after = fit(self.color((depth - lowest) / max(highest - lowest, np.finfo(np.float32).tiny)))
        meters = [f"{value:.2f} m" for value in np.linspace(highest, lowest, TICKS)]
        scale = bar(
            self.color(np.linspace(1, 0, before.height)[:, None]), meters if self.is_metric else ["near", "far"]
        )
        return arrange([arrange([before, after, scale], columns=3), text(caption, "gray")], columns=1)

    def color(self, shares: np.ndarray) -> Image.Image:
        """Returns values (H, W), of which 0 is the least and 1 the largest, in colors."""
        return Image.fromarray(depth_colors(1 - shares if self.is_metric else shares))
