"""What the training scripts of object and keypoint detection can be told beside what all training scripts can."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .arguments import LIBRARY, ImageDataArguments, TrainedImagesArguments
from .scored_arguments import ScoredTrainingArguments, TaskModelArguments, best_by, split_names


@dataclass
class DetectionModelArguments(TaskModelArguments):
    """Which model to train for object detection."""

    task_config = "detection_config"
    task_options = ("decoder",)

    decoder: str | None = field(
        default=None,
        metadata={"help": "deformable or queries; deformable, or that of the saved model, unless said."},
    )


@dataclass
class KeypointModelArguments(TaskModelArguments):
    """Which model to train for keypoints."""

    task_config = "keypoint_config"

    head: str | None = field(
        default=None, metadata={"help": "classic or simple; classic, or that of the saved model, unless said."}
    )


@dataclass
class ObjectImagesArguments(ImageDataArguments):
    """Which images with boxes, whatever else is known of the objects."""

    objects_column_name: str | None = field(
        default=None, metadata={"help": "Column of the objects, where it is not clear by itself."}
    )
    box_errors: Literal["raise", "clip", "drop"] = field(
        default="raise",
        metadata={
            "help": "What is done about boxes that reach out of their image or have no area: they are listed and the "
            "script stops (raise), what is outside is cut off (clip), or they are left out (drop)."
        },
    )

    def source_options(self) -> dict[str, Any]:
        """Returns the same, with where objects are and what is done about wrong boxes."""
        return {
            **super().source_options(),
            "objects_column_name": self.objects_column_name,
            "box_errors": self.box_errors,
        }


@dataclass
class DetectionImagesArguments(ObjectImagesArguments):
    """Which images and boxes to score on."""

    dataset_name: str = field(
        default="",
        metadata={
            "help": "Folder or file in the format of COCO, Pascal VOC or YOLO, parquet files with a column of "
            "objects, or a Hub name."
        },
    )
    bbox_format: Literal["coco", "voc", "yolo"] | None = field(
        default=None,
        metadata={
            "help": "What the boxes of such a column are: x, y, width, height (coco) or x1, y1, x2, y2 (voc) in "
            "pixels, or centre, width and height as shares of the image (yolo)."
        },
    )
    class_names: str | None = field(
        default=None, metadata={"help": 'Names of the classes, "cat,dog", where the data do not have them.'}
    )

    def source_options(self) -> dict[str, Any]:
        """Returns the same, with what the objects mean."""
        return {
            **super().source_options(),
            "bbox_format": self.bbox_format,
            "class_names": split_names(self.class_names) or None,
        }


@dataclass
class DetectionDataArguments(DetectionImagesArguments, TrainedImagesArguments):
    """Which images and boxes to train on."""


@dataclass
class KeypointImagesArguments(ObjectImagesArguments):
    """Which images and keypoints to score on."""

    dataset_name: str = field(
        default="",
        metadata={"help": "Folder or file of keypoints in the format of COCO, a CSV of landmarks, or a Hub name."},
    )
    whole_image: bool = field(
        default=False,
        metadata={"help": "Look at whole images rather than at boxes: for images of one object that fills them."},
    )
    flip_pairs: list[str] | None = field(
        default=None,
        metadata={"help": "Keypoints that a mirror image swaps, as left_eye,right_eye, where names do not tell them."},
    )

    def source_options(self) -> dict[str, Any]:
        """Returns the same, with what the keypoints mean."""
        return {**super().source_options(), "whole_image": self.whole_image, "flip_pairs": self.flip_pairs}


@dataclass
class KeypointDataArguments(KeypointImagesArguments, TrainedImagesArguments):
    """Which images and keypoints to train on."""


@dataclass
class DetectionAugmentationArguments:
    """How training images are changed at random, and their boxes with them, in this order."""

    keep_aspect_ratio: bool = field(
        default=False,
        metadata={
            "help": "Images keep their proportions, their shorter side being that of image_size; else they are "
            "squeezed into it."
        },
    )
    iou_crop: float = field(
        default=0.0, metadata={"help": "Probability of a crop that some object fills to a share that is drawn."}
    )
    min_scale: float = field(
        default=0.5, metadata={"help": "Least scale; at 1 images are as large as in evaluations."}
    )
    max_scale: float = field(default=1.5, metadata={"help": "Largest scale."})
    horizontal_flip: float = field(default=0.5, metadata={"help": "Probability of a mirror image."})
    photometric: float = field(
        default=0.5, metadata={"help": "Probability that brightness, contrast and colours change."}
    )
    multi_scale: bool = field(
        default=False, metadata={"help": "Every batch has a size of its own, from 0.75 to 1.25 times image_size."}
    )

    def options(self) -> dict[str, Any]:
        """Returns them as `detection_augmentation` takes them."""
        options = asdict(self)
        del options["multi_scale"]  # of batches
        scale_range = options.pop("min_scale"), options.pop("max_scale")
        return {**options, "scale_range": scale_range}


@dataclass
class KeypointAugmentationArguments:
    """How the crops of objects are changed at random, and their keypoints with them."""

    box_padding: float = field(
        default=1.25,
        metadata={"help": "How many times as wide and high as its box the crop of an object is; not of whole images."},
    )
    min_scale: float = field(default=0.65, metadata={"help": "Least scale of the object."})
    max_scale: float = field(default=1.35, metadata={"help": "Largest scale."})
    max_rotation: float = field(default=40.0, metadata={"help": "Largest angle of a random rotation in degrees."})
    max_shift: float = field(
        default=0.1, metadata={"help": "How far the object moves at most, as a share of the crop."}
    )
    horizontal_flip: float = field(default=0.5, metadata={"help": "Probability of a mirror image."})
    photometric: float = field(
        default=0.5, metadata={"help": "Probability that brightness, contrast and colours change."}
    )

    def options(self) -> dict[str, Any]:
        """Returns them as `keypoint_augmentation` takes them."""
        options = asdict(self)
        scale_range = options.pop("min_scale"), options.pop("max_scale")
        return {**options, "scale_range": scale_range}


@dataclass
class KeypointEvaluationArguments:
    """How keypoints are scored."""

    flip_test: bool = field(
        default=True, metadata={"help": "Whether the mirror image of each crop counts too, which takes twice as long."}
    )
    pck_threshold: float = field(
        default=0.2, metadata={"help": "Largest error of a keypoint that counts as right, as a share of the length."}
    )
    normalize_by: str | None = field(
        default=None,
        metadata={
            "help": "Two keypoints whose distance is the length that errors are relative to: "
            "left_shoulder,right_hip. Else it is of the box."
        },
    )

    def __post_init__(self) -> None:
        """Checks what can be checked without the data."""
        if self.normalize_by is not None and len(split_names(self.normalize_by)) != 2:
            raise ValueError(
                f"normalize_by={self.normalize_by!r} must name two keypoints with a comma between them, such as "
                "left_shoulder,right_hip."
            )


@dataclass
class DetectionTrainingArguments(ScoredTrainingArguments):
    """The library's arguments, with defaults that suit object detection: slow, with short gradients."""

    learning_rate: float = field(default=2e-4, metadata=LIBRARY["learning_rate"].metadata)
    weight_decay: float = field(default=1e-4, metadata=LIBRARY["weight_decay"].metadata)
    max_grad_norm: float = field(default=0.1, metadata=LIBRARY["max_grad_norm"].metadata)
    metric_for_best_model: str | None = best_by("map")


@dataclass
class KeypointTrainingArguments(ScoredTrainingArguments):
    """The same, for keypoints."""

    per_device_train_batch_size: int = field(default=32, metadata=LIBRARY["per_device_train_batch_size"].metadata)
    per_device_eval_batch_size: int = field(default=32, metadata=LIBRARY["per_device_eval_batch_size"].metadata)
    learning_rate: float = field(default=5e-4, metadata=LIBRARY["learning_rate"].metadata)
    metric_for_best_model: str | None = best_by("nme")
