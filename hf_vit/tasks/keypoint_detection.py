"""Keypoint detection: options, evaluator, crops of objects and model card texts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..data import load_keypoint_detection
from ..data.augmentation.joint import KeypointAugmentation
from ..data.collators import KeypointDetectionCollator
from ..data.datasets import KeypointData, TargetData
from ..evaluation.base import Batch, Evaluator, File, ImageResult, Images
from ..evaluation.keypoints import KeypointMetric
from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.image_processing_hf_vit import HfViTImageProcessor
from ..model.task_keypoint_detection import HfViTForKeypointDetection, image_losses
from ..options.field import (
    POSITIVE,
    PROBABILITY,
    SHARE_LEFT_OUT,
    Names,
    Range,
    augmentation_option,
    data_option,
    evaluation_option,
    model_option,
    source_option,
)
from ..options.training_arguments import HfViTTrainingArguments
from ..visualize.objects import draw_poses
from .common.card import Usage
from .common.defaults import KEYPOINTS
from .shared import ObjectArguments, SpatialTask


Target = dict[str, Any]
Prediction = dict[str, Tensor]


@dataclass(eq=False)
class KeypointEvaluator(Evaluator):
    """Predict and score the keypoints of objects.

    Args:
        skeleton: Pairs of keypoints that are connected by lines in pictures.
        flip_test: Whether the heatmaps of an image and of its mirrored copy are averaged.
    """

    lack = "no keypoint is labeled. Check the visibility in the annotations."
    parts = "keypoints"
    class_score = "PCK"
    predicts_errors = True
    metric: KeypointMetric
    skeleton: Sequence[Sequence[int]] = ()
    flip_test: bool = True

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return the keypoints and the loss of each object. As in training, the loss does not use mirrored images."""
        pixels = batch["pixel_values"]
        outputs = model(pixels)
        losses = image_losses(outputs.heatmaps, batch["labels"], tuple(pixels.shape[-2:]), model.options)
        if self.flip_test:
            outputs.heatmaps = (outputs.heatmaps + model.mirrored_heatmaps(pixels)) / 2
        boxes = [target["box"][None] for target in batch["targets"]]
        scale = self.calibration.applied_error_scale or 1.0
        found = self.processor.post_process_keypoint_detection(outputs, boxes, error_scale=scale)
        names = ("keypoints", "scores", "expected_errors")
        return [
            ImageResult({name: pose[name] for name in names}, loss)
            for (pose,), loss in zip(found, losses.tolist(), strict=True)
        ]

    def calibration_data(self) -> tuple[Tensor, Tensor]:
        """Return the expected and the actual errors (N,) of labeled keypoints, relative to the object size."""
        records = self.metric.records
        expected, errors = (torch.tensor([record[name] for record in records]) for name in ("expected_nme", "nme"))
        is_known = ~(expected + errors).isnan()
        return expected[is_known], errors[is_known]

    def describe(self, prediction: Prediction, target: Target) -> dict[str, Any]:
        """Return the box of an object, and its keypoints with their scores."""
        found = {"labels": self.metric.names, "box": target["box"].tolist()}
        left_out = () if self.calibration.applied_error_scale else ("expected_errors",)
        return found | {name: value.tolist() for name, value in prediction.items() if name not in left_out}

    def has_annotations(self, target: Target) -> bool:
        """Return whether any keypoint is labeled."""
        return bool((target["keypoints"][:, 2] > 0).any())

    def naive_baseline(self, targets: Iterable[Target]) -> tuple[str, Callable[[Target], Prediction]]:
        """Predict the mean position of every keypoint in the boxes of the training objects."""
        count = len(self.metric.names)
        total, labeled = torch.zeros(count, 2, dtype=torch.float64), torch.zeros(count, 1, dtype=torch.float64)
        for target in targets:
            low, high = target["box"].double().view(2, 2)
            places, counts = target["keypoints"][:, :2].double(), target["keypoints"][:, 2:] > 0
            total += torch.where(counts, (places - low) / (high - low), 0)
            labeled += counts
        mean = torch.where(labeled > 0, total / labeled, 0.5)

        def predict(target: Target) -> Prediction:
            low, high = target["box"].double().view(2, 2)
            return {"keypoints": low + mean * (high - low), "scores": torch.ones(count)}

        return "mean pose in the box", predict

    def draw(self, images: Images, predictions: list[Prediction], targets: list[Target], file: File) -> None:
        """Draw labeled and predicted keypoints side by side."""
        draw_poses(images, predictions, targets, self.skeleton, file, self.threshold)

    def describe_evaluation(self) -> str:
        """Return a description of the object crops and of the length by which errors are divided."""
        metric = self.metric
        length = (
            "the longer side of the box around the true keypoints for PCK, the root of the area of that box for NME"
        )
        if metric.ends is not None:
            length = "the distance from {} to {}".format(*(metric.names[number] for number in metric.ends))
        mirrored = "each crop and its mirror image" if self.flip_test else "each crop"
        return f"{mirrored}, boxes as given; errors relative to {length}, PCK within {metric.pck_threshold:g} of it"


@dataclass
class KeypointArguments(ObjectArguments):
    """Options of keypoint detection: model, object crops, augmentation and evaluation."""

    task_config = "keypoint_config"
    task_options = ("head",)
    loader_options = (*ObjectArguments.loader_options, "whole_image", "flip_pairs")

    dataset_name: str = source_option(
        "Folder or file of keypoints in the format of COCO, a CSV of landmarks, or a Hub name."
    )
    whole_image: bool = data_option(False, "Use whole images instead of boxes, for images that show a single object.")
    flip_pairs: list[Names] | None = data_option(
        None,
        "Keypoint pairs that a horizontal flip swaps, such as left_eye,right_eye, if the names do not determine them.",
        essential=True,
    )
    head: str | None = model_option(
        None, "Head: classic or simple; by default classic, or the head of the saved model.", essential=True
    )
    box_padding: float = augmentation_option(
        1.25, "Size of an object's crop relative to its box; ignored for whole images.", POSITIVE
    )
    min_scale: float = augmentation_option(0.65, "Smallest random scale of the object in the crop.", POSITIVE)
    max_scale: float = augmentation_option(1.35, "Largest random scale of the object in the crop.", POSITIVE)
    max_rotation: float = augmentation_option(40.0, "Largest angle of a random rotation in degrees.", Range(0, 180))
    max_shift: float = augmentation_option(0.1, "Maximum shift of the object, as a share of the crop.", SHARE_LEFT_OUT)
    horizontal_flip: float = augmentation_option(0.5, "Probability of a horizontal flip.", PROBABILITY)
    photometric: float = augmentation_option(
        0.5, "Probability of a change of brightness, contrast and colors.", PROBABILITY
    )
    flip_test: bool = evaluation_option(
        True, "Average the predictions for each crop and its mirror image, which doubles the time."
    )
    pck_threshold: float = evaluation_option(
        0.2, "Maximum error of a correct keypoint (PCK), relative to the reference length.", POSITIVE
    )
    normalize_by: Names | None = evaluation_option(
        None,
        "Two keypoints whose distance is the reference length of errors, such as left_shoulder,right_hip. By "
        "default, the size of the box.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize_by is not None and len(self.normalize_by) != 2:
            raise ValueError(
                f"normalize_by={self.normalize_by!r} must name two keypoints with a comma between them, such as "
                "left_shoulder,right_hip."
            )


@dataclass(frozen=True)
class KeypointDetection(SpatialTask):
    """Detection of the keypoints of objects in given boxes."""

    model_class = HfViTForKeypointDetection
    load_source = staticmethod(load_keypoint_detection)
    pipeline = "keypoint-detection"
    usage = Usage(
        name="find_keypoints",
        stock="""# The whole image is one object; for others give boxes=[(x1, y1, x2, y2), ...]
for found in find_keypoints("image.png"):
    for label, place, score in zip(found["labels"], found["keypoints"], found["scores"]):
        print(label, place, score)""",
        own="""sizes = [(image.height, image.width)]
threshold = model.options.score_threshold
((result,),) = image_processor.post_process_keypoint_detection(outputs, target_sizes=sizes, threshold=threshold)
for label, place, score in zip(result["labels"], result["keypoints"], result["scores"]):
    print(model.config.id2label[int(label)], place.tolist(), float(score))""",
    )
    published = ("ForPoseEstimation",)
    packages = ("matplotlib", "faster_coco_eval")
    has_scores = True
    chooses_threshold = True
    collator_class = KeypointDetectionCollator
    augment = staticmethod(KeypointAugmentation)
    limits = (
        "The model finds {num_classes} keypoints of one object in a given box. It predicts a position for every "
        "keypoint, also for hidden ones; low scores indicate these. It was trained on one dataset. "
        "Its scores may be much lower on other objects."
    )
    examples = "objects"
    parts = "objects with {} keypoints"
    defaults = KEYPOINTS
    argument_defaults: ClassVar[dict[str, Any]] = {
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 32,
        "learning_rate": 5e-4,
        "metric_for_best_model": "nme",
    }

    options: KeypointArguments

    def head_options(self, data: TargetData, args: HfViTTrainingArguments) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return mirrored pairs, lines, error tolerances and the relative area of boxes, and the norm of a new head.

        This norm uses no batch statistics, so that results do not depend on the batch size.
        """
        assert isinstance(data, KeypointData)
        rows = data.splits["train"].select_columns(["box", "width", "height"]).with_format("numpy")[:]
        areas = np.prod(rows["box"][:, 2:] - rows["box"][:, :2], axis=1) / (rows["width"] * rows["height"])
        own = {"flip_pairs": data.flip_pairs, "skeleton": data.skeleton, "oks_sigmas": data.oks_sigmas}
        share = {"object_share": round(float(np.median(areas)), 4)}
        return own | share, {} if self.options.given_options().get("head") == "simple" else {"norm": "instance"}

    @property
    def box_padding(self) -> float:
        """Size of an object's crop relative to its box."""
        return 1.0 if self.options.whole_image else self.options.box_padding

    def make_processor(self, processor: BaseImageProcessor, config: HfViTConfig, data: TargetData) -> Any:
        """Return an image processor that crops objects."""
        height, width = to_pair(config.image_size)
        return HfViTImageProcessor.from_dict(
            {
                **processor.to_dict(),
                "size": {"height": height, "width": width},
                "do_affine_crop": True,
                "box_padding": self.box_padding,
                "do_center_crop": False,
                "do_pad": False,
            }
        )

    def augmentation_arguments(self, processor: Any, config: HfViTConfig, data: TargetData) -> dict[str, Any]:
        """Return the arguments of `augment`, with the keypoint pairs that a flip swaps."""
        assert isinstance(data, KeypointData)
        arguments = super().augmentation_arguments(processor, config, data)
        return {**arguments, "box_padding": self.box_padding, "flip_pairs": data.flip_pairs}

    def make_evaluator(
        self, model: PreTrainedModel, processor: BaseImageProcessor, data: TargetData
    ) -> KeypointEvaluator:
        """Return the evaluator."""
        options, evaluation = model.options, self.options
        ends = evaluation.normalize_by
        metric = KeypointMetric(
            data.names,
            options.oks_sigmas,
            pck_threshold=evaluation.pck_threshold,
            normalize=(ends[0], ends[1]) if ends else None,
        )
        return KeypointEvaluator(processor, metric, options.skeleton, evaluation.flip_test)

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about head and loss."""
        options = model.options
        norm = f", {options.norm} norm" if options.head == "classic" else ""
        height, width = to_pair(model.config.image_size)
        part = "the whole image" if self.options.whole_image else f"a crop {self.box_padding:g} times the box"
        return {
            "head": f"{options.head}{norm}",
            "loss": f"squared error of Gaussians, sigma {options.sigma:g} heatmap pixels",
            "input size": f"{height} x {width} pixels, {part}",
        }
