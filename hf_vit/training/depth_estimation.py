"""Training of monocular depth: how images are predicted, scored and drawn, and what a script is told."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike

import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..data import DenseData, load_depth_estimation
from ..image_sizes_hf_vit import resize_nearest
from ..metrics import DepthMetric
from ..modeling_hf_vit import HfViTForDepthEstimation
from ..task_depth import depth_loss
from ..visualize import draw_depth
from .dense_arguments import (
    DenseAugmentationArguments,
    DepthDataArguments,
    DepthEvaluationArguments,
    DepthModelArguments,
    DepthTrainingArguments,
)
from .dense_scorer import Batch, DenseScorer, Size
from .dense_task import DenseTask


class DepthScorer(DenseScorer):
    """Predicts and scores the depth of every pixel."""

    metric: DepthMetric

    def predict(self, model: PreTrainedModel, batch: Batch, sizes: Sequence[Size]) -> list[tuple[Tensor, float]]:
        """Returns the depth map (H, W) and the loss of each image."""
        mask = batch.get("patch_attention_mask")
        outputs = model(batch["pixel_values"], patch_attention_mask=mask)
        maps = self.processor.post_process_depth_estimation(outputs, sizes, patch_attention_mask=mask)
        return [
            (result["predicted_depth"], float(depth_loss(predicted[None], labels[None], model.options)))
            for result, predicted, labels in zip(maps, outputs.predicted_depth, batch["labels"], strict=True)
        ]

    def trivial(self, targets: Iterable[Tensor]) -> tuple[str, Callable[[Size], Tensor]]:
        """Gives every pixel the mean depth that it has in training, where images are of one size; else resized."""
        total = count = torch.zeros(())
        for target in targets:
            size = total.shape or target.shape
            depth = resize_nearest(target.double(), *size)
            total, count = total + depth, count + (depth > 0)
        mean = (total / count).where(count > 0, total.sum() / count.sum())
        mean = 1 / mean if self.is_relative else mean
        return "mean of the training depth at each pixel", lambda size: _resized(mean, size)

    @property
    def is_relative(self) -> bool:
        """Whether predictions are relative inverse depth."""
        return self.metric.alignment == "scale_shift"

    def draw(
        self, images: list[Image], predictions: list[Tensor], targets: list[Tensor], file: str | PathLike[str]
    ) -> None:
        """Draws image, truth, prediction and error side by side."""
        draw_depth(images, predictions, targets, file, relative=self.is_relative)

    def describe_limits(self) -> str:
        """Says what the model is not good for."""
        unit = "Its answers are inverse depth up to scale and shift" if self.is_relative else "Its answers are metres"
        return (
            f"{unit}, guessed from one image by what it has seen in training. With another camera, whose field of "
            "view is wider or narrower, all looks farther or nearer."
        )


def _resized(depth: Tensor, size: Size) -> Tensor:
    """Returns a depth map (h, w) as (H, W)."""
    return F.interpolate(depth[None, None], size=size, mode="bilinear", align_corners=False)[0, 0]


@dataclass
class DepthEstimation(DenseTask):
    """Training of monocular depth by a script; see `DenseTask`.

    Args:
        evaluation: How it is scored.
    """

    argument_types = (
        DepthModelArguments,
        DepthDataArguments,
        DenseAugmentationArguments,
        DepthTrainingArguments,
        DepthEvaluationArguments,
    )
    model_class = HfViTForDepthEstimation
    pipeline = "depth-estimation"

    data: DepthDataArguments
    evaluation: DepthEvaluationArguments

    def open_data(self) -> DenseData:
        """Opens images and depth maps."""
        data = self.data
        return load_depth_estimation(
            data.dataset_name,
            depth_scale=data.depth_scale,
            dataset_config_name=data.dataset_config_name,
            dataset_revision=data.dataset_revision,
            image_column_name=data.image_column_name,
            depth_column_name=data.depth_column_name,
        )

    def make_scorer(self, model: PreTrainedModel, processor: BaseImageProcessor) -> DepthScorer:
        """Returns what predicts and scores images."""
        options, evaluation = model.options, self.evaluation
        is_relative = options.depth_estimation_type == "relative"
        metric = DepthMetric(
            min_depth=evaluation.min_eval_depth,
            max_depth=evaluation.max_eval_depth or options.max_depth,
            crop=evaluation.eval_crop,
            alignment=evaluation.eval_alignment or ("scale_shift" if is_relative else None),
        )
        return DepthScorer(processor, metric)
