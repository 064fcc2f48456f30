"""Monocular depth estimation: options, evaluator and model card texts."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel
from transformers.utils import logging

from ..data import load_depth_estimation
from ..data.datasets import TargetData, TargetDataset
from ..evaluation.base import BaseEvaluator, Batch, Evaluator, File, ImageResult, Images
from ..evaluation.depth import DepthMetric, describe_depth
from ..model.image_geometry import resize_nearest
from ..model.task_configurations import HfViTDepthConfig
from ..model.task_depth_estimation import HfViTForDepthEstimation, depth_loss
from ..options.field import NOT_NEGATIVE, POSITIVE, data_option, evaluation_option, model_option, source_option
from ..options.training_arguments import HfViTTrainingArguments
from ..visualize.dense import draw_depth
from .common.card import Usage
from .common.defaults import DEPTH
from .shared import BATCH_OF_16, DenseArguments, SpatialTask, size_of


logger = logging.get_logger(__name__)
Alignment = Literal["median", "scale_shift"]
NUM_MAPS, NUM_PIXELS = 200, 4096  # sampled depth maps per split, and sampled pixels per map
# Candidate maximum depths in meters: 10 is usual for rooms, 80 for KITTI. Larger values probably have another unit.
MAX_DEPTHS = (10, 20, 30, 50, 80, 100, 150, 200, 300)
# Units per meter, largest depth in meters, and evaluated crop of well-known datasets
DEPTH_FORMATS: dict[str, dict[str, Any]] = {
    "kitti": {"depth_scale": 256.0, "max_eval_depth": 80.0, "eval_crop": "garg"},
    "nyu": {"depth_scale": 1000.0, "max_eval_depth": 10.0, "eval_crop": "eigen"},
    "tum": {"depth_scale": 5000.0, "max_eval_depth": 10.0},
}
FEW_DROPPED, MOST_DROPPED = 0.01, 0.5  # shares of pixels outside the depth range that cause a warning and an error


@dataclass(eq=False)
class DepthEvaluator(Evaluator):
    """Predict and score the depth of every pixel."""

    metric: DepthMetric
    options: HfViTDepthConfig

    def __post_init__(self) -> None:
        self.is_relative = self.options.depth_estimation_type == "relative"
        trained = math.inf if self.is_relative or self.options.max_depth is None else self.options.max_depth
        self.max_depth = min(self.metric.max_depth, trained)

    def has_annotations(self, target: Tensor) -> bool:
        """Return whether any pixel is in the range for training and evaluation."""
        return bool(((target > self.metric.min_depth) & (target < self.max_depth)).any())

    def missing_annotations_message(self, targets: Iterable[Tensor]) -> str:
        """Return a description of the depths in the data and the expected range."""
        depths = [depth[depth > 0] for depth in targets]
        extremes = [extreme for depth in depths if len(depth) for extreme in (depth.min(), depth.max())]
        if not extremes:
            return "all pixels of all depth maps are invalid (not finite, or not above 0). Check the depth maps."
        return (
            f"their depths are between {float(min(extremes)):.4g} and {float(max(extremes)):.4g} meters, but only "
            f"depths between {self.metric.min_depth:g} and {self.max_depth:g} are used. Set --depth_scale, the units "
            "per meter. If the depths are correct, set --max_eval_depth, and max_depth of depth_config in "
            "--config_overrides."
        )

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return the depth map (H, W) and the loss of each image."""
        mask, sizes = batch.get("patch_attention_mask"), [size_of(target) for target in batch["targets"]]
        outputs = model(batch["pixel_values"], patch_attention_mask=mask)
        maps = self.processor.post_process_depth_estimation(outputs, sizes, patch_attention_mask=mask)
        return [
            ImageResult(result["predicted_depth"], float(depth_loss(predicted[None], labels[None], model.options)))
            for result, predicted, labels in zip(maps, outputs.predicted_depth, batch["labels"], strict=True)
        ]

    def describe(self, prediction: Tensor, target: Any) -> dict[str, Any]:
        """Return the smallest, median and largest predicted depth, and their unit."""
        return describe_depth(prediction, self.is_relative)

    def naive_baseline(self, targets: Iterable[Tensor]) -> tuple[str, Callable[[Tensor], Tensor]]:
        """Predict the mean training depth of each pixel, resized if the images have several sizes."""
        total = count = torch.zeros(())
        for target in targets:
            size = total.shape or target.shape
            depth = resize_nearest(target.double(), *size)
            total, count = total + depth, count + (depth > 0)
        mean = (total / count).where(count > 0, total.sum() / count.sum())
        mean = 1 / mean if self.is_relative else mean

        def predict(target: Tensor) -> Tensor:
            resized = F.interpolate(mean[None, None], size=size_of(target), mode="bilinear", align_corners=False)
            return resized[0, 0]

        return "mean of the training depth at each pixel", predict

    def draw(self, images: Images, predictions: list[Tensor], targets: list[Tensor], file: File) -> None:
        """Draw image, target, prediction and error side by side."""
        draw_depth(images, predictions, targets, file, relative=self.is_relative)

    def describe_evaluation(self) -> str:
        """Return a description of the evaluated pixels and the alignment."""
        metric = self.metric
        crop = "the whole image" if metric.crop is None else f"crop {metric.crop}"
        fitted = "nothing" if metric.alignment is None else metric.alignment.replace("_", " and ")
        return (
            f"{crop}, depths between {metric.min_depth:g} and {metric.max_depth:g} m, fitted in each image: {fitted}"
        )


@dataclass(frozen=True, kw_only=True)
class DepthData(TargetData):
    """Images with depth maps, and valid depths (N,) in meters from a sample of each split."""

    depths: dict[str, Tensor]


def depths_of(data: TargetData) -> dict[str, Tensor]:
    """Return sampled depths by split."""
    assert isinstance(data, DepthData)
    return data.depths


def sample_depths(examples: TargetDataset) -> Tensor:
    """Return valid depths (N,) in meters from a sample of the depth maps of a split. The sample is deterministic."""
    chosen = np.random.default_rng(0).permutation(len(examples))[:NUM_MAPS]
    maps = (depth[(depth > 0) & depth.isfinite()] for depth in examples.select(chosen.tolist()).read_targets())
    return torch.cat([depth[:: max(1, len(depth) // NUM_PIXELS)] for depth in maps])


def choose_max_depth(depths: Tensor) -> int:
    """Return the smallest of `MAX_DEPTHS` that at most 1% of the depths (N,) exceed, or 10 if none fits."""
    fitting = (largest for largest in MAX_DEPTHS if float((depths > largest).float().mean()) <= FEW_DROPPED)
    return next(fitting, MAX_DEPTHS[0])


@dataclass
class DepthArguments(DenseArguments):
    """Options of depth estimation: model, images and evaluation."""

    task_config = "depth_config"
    task_options = ("head",)
    loader_options = (*DenseArguments.loader_options, "depth_column_name", "depth_scale")

    dataset_name: str = source_option("Folder of <split>/images and <split>/depths, parquet files, or a Hub name.")
    depth_column_name: str | None = data_option(None, "Column of the depth maps, if it is not detected.")
    depth_scale: float | None = data_option(
        None, "Units per meter, such as 256 for KITTI. By default, integers are millimeters, floats meters.", POSITIVE
    )
    depth_format: Literal["kitti", "nyu", "tum"] | None = data_option(
        None, "Set the units per meter, the range and the evaluated crop to those of a well-known dataset."
    )
    head: str | None = model_option(
        None, "Head: dpt, conv or linear; by default dpt, or the head of the saved model.", essential=True
    )
    eval_crop: Literal["eigen", "eigen_kitti", "garg"] | None = evaluation_option(
        None, "Evaluated crop of the images, as usual for NYU (eigen) or KITTI (eigen_kitti, garg).", resume="free"
    )
    eval_alignment: Literal["median", "scale_shift"] | None = evaluation_option(
        None,
        "Alignment of predictions with the target before scoring; by default scale_shift for relative "
        "depth, else none.",
        resume="free",
    )
    min_eval_depth: float = evaluation_option(1e-3, "Smallest evaluated depth, in meters.", NOT_NEGATIVE)
    max_eval_depth: float | None = evaluation_option(
        None, "Largest evaluated depth, in meters; by default the max_depth of the model.", POSITIVE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in DEPTH_FORMATS.get(self.depth_format or "", {}).items():
            if vars(self)[name] is None:
                setattr(self, name, value)


@dataclass(frozen=True)
class DepthEstimation(SpatialTask):
    """Monocular depth estimation."""

    model_class = HfViTForDepthEstimation
    load_source = staticmethod(load_depth_estimation)
    pipeline = "depth-estimation"
    usage = Usage(
        name="estimate",
        stock="""result = estimate("image.png")
print(result["predicted_depth"])  # (height, width)
result["depth"].save("depth.png")  # the lowest value is black, the highest white""",
        own="""sizes = [(image.height, image.width)]
(result,) = image_processor.post_process_depth_estimation(outputs, target_sizes=sizes)
print(result["predicted_depth"])  # (height, width)""",
    )
    limits = (
        "It predicts {model.options.depth_estimation_type} depth from a single image; relative depth is known only "
        "up to scale and shift. Accuracy depends on how similar the camera is to that of the training data: with a "
        "wider or narrower field of view, depths are too small or too large."
    )
    defaults = DEPTH
    argument_defaults: ClassVar[dict[str, Any]] = {
        **BATCH_OF_16,
        "learning_rate": 5e-4,  # training diverges with the higher learning rate of image classification
        "metric_for_best_model": "abs_rel",
    }

    options: DepthArguments

    def examine(self, data: TargetData, args: HfViTTrainingArguments) -> DepthData:
        """Return the data with sampled depths of each split, which determine the depth range."""
        depths = {split: sample_depths(data.examples(split)) for split in data.splits}
        return DepthData(**vars(data), depths=depths)

    def head_options(self, data: TargetData, args: HfViTTrainingArguments) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the maximum depth of a new head: that of the depth format, if given, or of the training depths."""
        if self.options.depth_format is not None:
            return {}, {"max_depth": self.options.max_eval_depth}
        return {}, {"max_depth": choose_max_depth(depths_of(data)["train"])}

    def check_evaluator(self, evaluator: BaseEvaluator, data: TargetData) -> list[str]:
        """Return notes about depths out of range; raise `ValueError` if a split has too many of them."""
        assert isinstance(evaluator, DepthEvaluator)
        least, most, notes = evaluator.metric.min_depth, evaluator.max_depth, []
        is_given = self.options.max_eval_depth is not None or "max_depth" in self.options.given_options()
        for split, depths in depths_of(data).items():
            share = float(((depths <= least) | (depths > most)).float().mean())
            note = f"{share:.1%} of the valid {split} pixels are outside {least:g} to {most:g} m"
            if share > MOST_DROPPED and not is_given:
                raise ValueError(
                    f"{note}, the range of the model and its scores; 99 % are below {depths.quantile(0.99):.4g} m. "
                    "Check --depth_scale, the units per meter. If it is correct, set the range with max_depth of "
                    "depth_config in --config_overrides, or with --max_eval_depth."
                )
            if share > FEW_DROPPED:
                notes.append(f"{note}, and are not used for training, for scores, or both.")
                logger.warning_once(notes[-1])
        return notes

    def describe_targets(self, trainer: Any, data: TargetData) -> str:
        """Return a description of the depth ranges of data, head and scores."""
        most, evaluation = depths_of(data)["train"].quantile(0.99), trainer.evaluator.describe_evaluation()
        head = self.describe_model(trainer.model, None, data, trainer.args)["head"]
        return f"Depths: 99 % of the training pixels are below {most:.4g} m. Head: {head}. Scores: {evaluation}."

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about head and loss."""
        options = model.options
        is_relative = options.depth_estimation_type == "relative"
        up_to = "any depth" if options.max_depth is None else f"depth up to {model.options.max_depth:g} m"
        return {
            "head": f"{model.options.head}, {'relative inverse depth' if is_relative else up_to}",
            "loss": options.loss or ("ssi" if is_relative else "silog"),
            **super().describe_model(model, processor, data, args),
        }

    def make_evaluator(
        self, model: PreTrainedModel, processor: BaseImageProcessor, data: TargetData
    ) -> DepthEvaluator:
        """Return the evaluator; raise `ValueError` if the predictions cannot be aligned as requested."""
        options, evaluation = model.options, self.options
        max_depth = options.max_depth if evaluation.max_eval_depth is None else evaluation.max_eval_depth
        metric = DepthMetric(
            min_depth=evaluation.min_eval_depth,
            max_depth=max_depth,
            crop=evaluation.eval_crop,
            alignment=choose_alignment(evaluation.eval_alignment, options.depth_estimation_type),
        )
        return DepthEvaluator(processor, metric, options)


def choose_alignment(given: Alignment | None, depth_type: Literal["metric", "relative"]) -> Alignment | None:
    """Return the alignment; raise `ValueError` if the `given` alignment does not match the depth type of the model."""
    if depth_type == "metric" and given == "scale_shift":
        raise ValueError(
            "--eval_alignment scale_shift fits inverse depth, but the model predicts meters. Remove the option, "
            "or set it to median to ignore a wrong scale."
        )
    if depth_type == "relative" and given == "median":
        raise ValueError(
            "--eval_alignment median scales meters, but the model predicts relative inverse depth. Remove the "
            "option: by default, scale and shift are fitted."
        )
    return "scale_shift" if depth_type == "relative" else given
