"""Universal segmentation: options, evaluator, annealing of masked attention and model card texts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from transformers import (
    BaseImageProcessor,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..data import load_universal_segmentation
from ..data.datasets import TargetData
from ..evaluation.base import Batch, Evaluator, File, ImageResult, Images
from ..evaluation.segmentation import (
    DEFAULT_THRESHOLD,
    INSTANCE,
    PANOPTIC,
    SEMANTIC,
    TRIED,
    TRIED_THRESHOLDS,
    UniversalMetric,
    class_map,
)
from ..model.calibration import calibrate, calibrate_score
from ..model.image_geometry import resize_nearest
from ..model.task_universal_segmentation import HfViTForUniversalSegmentation, universal_segmentation_loss
from ..options.field import Names, data_option, model_option, source_option
from ..options.training_arguments import HfViTTrainingArguments
from ..visualize.dense import draw_panoptic
from .common.card import Usage, describe_weights
from .common.defaults import UNIVERSAL, TaskDefaults
from .shared import BATCH_OF_16, SIMILAR_IMAGES, MaskArguments, SpatialTask, most_frequent_classes, size_of


# Detections with scores below this value are omitted, because they hardly change average precision.
MIN_INSTANCE_SCORE = 0.05


@dataclass(eq=False)
class UniversalEvaluator(Evaluator):
    """Predict and score segments, instances and pixel classes."""

    lack = "no mask has a pixel. Check the masks or annotations."
    has_offset = True
    metric: UniversalMetric

    def __post_init__(self) -> None:
        self.tries = PANOPTIC in self.metric.parts
        self.class_score = "PQ" if self.tries else "AP"

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return the loss of each image and its predictions for each part of the metric."""
        mask = batch.get("patch_attention_mask")
        outputs = model(batch["pixel_values"], patch_attention_mask=mask)
        found: dict[str, list[Any]] = {}
        sizes = [size_of(target) for target in batch["targets"]]
        same = {"target_sizes": sizes, "patch_attention_mask": mask}
        if PANOPTIC in self.metric.parts:
            chosen = model.options.score_threshold
            least = {} if chosen is None else {"threshold": chosen}
            segments = self.processor.post_process_panoptic_segmentation
            found[PANOPTIC] = segments(outputs, **least, **same)
            if self.is_choosing:
                tried = [segments(outputs, threshold, **same) for threshold in TRIED_THRESHOLDS]
                found[TRIED] = [dict(zip(TRIED_THRESHOLDS, one, strict=True)) for one in zip(*tried, strict=True)]
        if SEMANTIC in self.metric.parts:
            found[SEMANTIC] = self.processor.post_process_semantic_segmentation(outputs, **same)
        if INSTANCE in self.metric.parts:
            instances = self.processor.post_process_instance_segmentation(
                outputs, threshold=MIN_INSTANCE_SCORE, return_binary_maps=True, **same
            )
            found[INSTANCE] = [
                {
                    "masks": result["segmentation"],
                    "class_labels": [segment["label_id"] for segment in result["segments_info"]],
                    "scores": [segment["score"] for segment in result["segments_info"]],
                }
                for result in instances
            ]
        predictions = [dict(zip(found, parts, strict=True)) for parts in zip(*found.values(), strict=True)]
        # Loss of each image, computed from the outputs of the last block
        losses = [
            float(
                universal_segmentation_loss(
                    outputs.masks_queries_logits[index : index + 1],
                    outputs.class_queries_logits[index : index + 1],
                    [labels],
                    [batch["class_labels"][index]],
                    model.options,
                    is_training=False,
                    patch_attention_mask=None if mask is None else mask[index : index + 1],
                )
            )
            for index, labels in enumerate(batch["mask_labels"])
        ]
        return [ImageResult(*pair) for pair in zip(predictions, losses, strict=True)]

    def calibration_data(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the logits (N,) of the scores of instances, and whether each is correct (N,); None without things."""
        if INSTANCE not in self.metric.parts:
            return None
        logits, hits = self.metric.parts[INSTANCE].score_logits()
        return calibrate(logits, self.calibration), hits

    def describe(self, prediction: dict[str, Any], target: Any) -> dict[str, Any]:
        """Return label, score and area of each segment or, if the metric has no panoptic part, of likely instances."""
        if PANOPTIC in prediction:
            numbers, parts = (prediction[PANOPTIC][name] for name in ("segmentation", "segments_info"))
            found = [(part["label_id"], part["score"], numbers == part["id"]) for part in parts]
        else:
            columns = ("class_labels", "scores", "masks")
            found = list(zip(*(prediction[INSTANCE][name] for name in columns), strict=True))
        least = DEFAULT_THRESHOLD if self.threshold is None else self.threshold
        return {
            "segments": [
                {
                    "label": self.metric.names[label],
                    "score": round(calibrate_score(score, self.calibration), 6),
                    "area": int(mask.sum()),
                }
                for label, score, mask in found
                if score >= least
            ]
        }

    def has_annotations(self, target: dict[str, Any]) -> bool:
        """Return whether any mask is nonempty."""
        return bool(target["masks"].any())

    def naive_baseline(self, targets: Iterable[dict[str, Any]]) -> tuple[str, Callable[[Any], dict[str, Any]]]:
        """Return a baseline that predicts the most frequent class at each position, as one segment per class."""
        maps = (torch.from_numpy(class_map(target)) for target in targets)
        classes = most_frequent_classes(maps, len(self.metric.names))

        def predict(target: dict[str, Any]) -> dict[str, Any]:
            semantic = resize_nearest(classes, *size_of(target))
            labels, segments = semantic.unique(return_inverse=True)
            masks = segments == torch.arange(len(labels))[:, None, None]
            info = [{"id": number, "label_id": label, "score": 1.0} for number, label in enumerate(labels.tolist())]
            return {
                PANOPTIC: {"segmentation": segments, "segments_info": info},
                SEMANTIC: semantic,
                INSTANCE: {"masks": masks, "class_labels": labels, "scores": torch.ones(len(labels))},
            }

        return "most frequent class of each pixel", predict

    def draw(self, images: Images, predictions: list[Any], targets: list[Any], file: File) -> None:
        """Draw image, target and predicted segments side by side."""
        part = PANOPTIC if PANOPTIC in self.metric.parts else INSTANCE
        threshold = DEFAULT_THRESHOLD if self.threshold is None else self.threshold
        found = [prediction[part] for prediction in predictions]
        draw_panoptic(images, found, targets, self.metric.names, file, threshold)

    def describe_evaluation(self) -> str:
        """Return a description of the evaluated parts."""
        scored = {
            PANOPTIC: "PQ of segments",
            SEMANTIC: "IoU of the class of each pixel",
            INSTANCE: f"AP of masks with a score of {MIN_INSTANCE_SCORE} or more",
        }
        return f"the whole image; {', '.join(scored[part] for part in self.metric.parts)}"


class MaskAnnealing(TrainerCallback):
    """Reduce the probability of masked attention with every step, so that the trained model does not need it.

    The probabilities are saved with the model in every checkpoint, so that the best model has the probabilities of its
    step.
    """

    def attach(self, trainer: Any) -> None:
        """Store the progress of the training run."""
        self.progress = trainer.progress

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, **kwargs: Any
    ) -> None:
        """Set the probabilities of masked attention for the next step; they are 0 after the last step."""
        model.anneal_masks(self.progress.share(state.global_step))

    on_step_end = on_train_begin


@dataclass
class UniversalArguments(MaskArguments):
    """Options of universal segmentation: model and images."""

    task_config = "universal_segmentation_config"
    task_options = ("head",)

    head: str | None = model_option(
        None,
        "Head: queries, or mask, which leaves the encoder unchanged. By default mask if the backbone is "
        "frozen, otherwise queries. A saved model keeps its head.",
    )
    dataset_name: str = source_option(
        "Folder or file in the format of COCO (panoptic or instances), or of semantic segmentation."
    )
    thing_classes: Names | None = data_option(
        None,
        'Classes of semantic masks whose connected regions are instances, such as "cat,dog"; "" for none.',
        essential=True,
    )
    annotations: str | None = data_option(None, "Annotations: panoptic or instances, if a COCO folder contains both.")

    def complete(self, config: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        """Set the options that follow from a saved model, with the thing classes of its training run."""
        super().complete(config, recipe)
        self.thing_classes = recipe.get("thing_classes") if self.thing_classes is None else self.thing_classes

    def source_options(self) -> dict[str, Any]:
        """Return the data source options, with the thing classes."""
        return {**super().source_options(), "thing_names": self.thing_classes, "annotations": self.annotations}


# Score used to choose the best model: PQ, or mask AP if instances overlap, because PQ needs a segment map
PQ_OR_MASK_AP = "pq or mask_ap"


@dataclass(frozen=True)
class UniversalSegmentation(SpatialTask):
    """Universal segmentation: semantic, instance and panoptic segmentation."""

    model_class = HfViTForUniversalSegmentation
    load_source = staticmethod(load_universal_segmentation)
    pipeline = "image-segmentation"
    usage = Usage(
        name="segment",
        stock="""for part in segment("image.png", subtask="panoptic"):  # or "instance", "semantic"
    print(part["label"], part["score"], part["mask"])  # the mask is white where the image shows it""",
        own="""sizes = [(image.height, image.width)]
threshold = model.options.score_threshold or 0.5
(result,) = image_processor.post_process_panoptic_segmentation(outputs, threshold, target_sizes=sizes)
print(result["segmentation"].shape, result["segments_info"])""",
    )
    packages = ("matplotlib", "scipy", "faster_coco_eval")
    has_scores = True
    chooses_threshold = True
    limits = "The model has {num_classes} classes and predicts at most one segment per query." + SIMILAR_IMAGES
    defaults = UNIVERSAL
    argument_defaults: ClassVar[dict[str, Any]] = {**BATCH_OF_16, "metric_for_best_model": PQ_OR_MASK_AP}

    options: UniversalArguments

    def find_defaults(self, args: HfViTTrainingArguments) -> TaskDefaults:
        """Return the default hyperparameters. For the mask head, which trains no block, all features are stored."""
        return replace(UNIVERSAL, stores=0) if self.find_head(args) == "mask" else UNIVERSAL

    def find_head(self, args: HfViTTrainingArguments) -> str | None:
        """Return the kind of the head, if given. With a frozen backbone, the default is "mask", which adds blocks."""
        return self.options.given_options().get("head", "mask" if args.trainable_blocks == 0 else None)

    def head_options(self, data: TargetData, args: HfViTTrainingArguments) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the kind of a new head."""
        head = self.find_head(args)
        return {}, {} if head is None else {"head": head}

    def count_needed_classes(self, data: TargetData) -> int:
        """Return the minimum number of training classes: two for semantic masks with several class names."""
        has_masks = "mask" in next(iter(data.splits.values())).column_names
        return 2 if has_masks and len(data.names) > 1 else 0

    def trainer_arguments(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, Any]:
        """Return the callback that anneals masked attention."""
        return {"callbacks": [MaskAnnealing()]}

    def options_of_processor(self, data: TargetData) -> dict[str, Any]:
        """Return the option with the stuff classes, which have at most one segment per image."""
        return {"label_ids_to_fuse": [label for label in range(len(data.names)) if label not in data.thing_ids]}

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about head and loss."""
        options, blocks = model.options, model.head.num_blocks
        place = (
            f"the last {blocks} blocks"
            if options.head == "queries"
            else f"{blocks} additional blocks after the encoder"
        )
        weights = {"classes": options.class_weight, "cross-entropy": options.mask_weight, "Dice": options.dice_weight}
        return {
            "head": f"{options.num_queries} queries in {place}",
            "loss": describe_weights(weights),
            "things": ", ".join(data.names[label] for label in data.thing_ids) or "none, all are stuff",
            **super().describe_model(model, processor, data, args),
        }

    def make_evaluator(
        self, model: PreTrainedModel, processor: BaseImageProcessor, data: TargetData
    ) -> UniversalEvaluator:
        """Return the evaluator. Masks may overlap, as in COCO instances; then only instances are evaluated."""
        can_overlap = any("objects" in split.column_names for split in data.splits.values())
        return UniversalEvaluator(processor, UniversalMetric(data.names, data.thing_ids, can_overlap))
