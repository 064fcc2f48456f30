"""What the training scripts of segmentation and depth can be told beside what all training scripts can."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .arguments import LIBRARY, ImageDataArguments, TrainedImagesArguments
from .scored_arguments import ScoredTrainingArguments, TaskModelArguments, best_by, split_names


# Where instances may overlap there is no map of segments, and so no PQ.
PQ_OR_MASK_AP = "pq or mask_ap"


@dataclass
class SemanticModelArguments(TaskModelArguments):
    """Which model to train for semantic segmentation."""

    task_config = "segmentation_config"

    head: str | None = field(
        default=None, metadata={"help": "conv, linear, mask or simple; conv, or that of the saved model, unless said."}
    )


@dataclass
class DepthModelArguments(TaskModelArguments):
    """Which model to train for depth."""

    task_config = "depth_config"

    head: str | None = field(
        default=None, metadata={"help": "dpt, conv or linear; dpt, or that of the saved model, unless said."}
    )


@dataclass
class SemanticImagesArguments(ImageDataArguments):
    """Which images and masks to score on."""

    dataset_name: str = field(
        default="",
        metadata={"help": "Folder of <split>/images and <split>/masks, parquet files, or a Hub name."},
    )
    mask_column_name: str | None = field(
        default=None, metadata={"help": "Column of the masks, where it is not clear by itself."}
    )
    class_names: str | None = field(
        default=None,
        metadata={"help": 'Names of the classes, "sky,road,car", where no file beside the data has them.'},
    )
    classes_file: str | None = field(
        default=None,
        metadata={"help": "File of class names (classes.txt, id2label.json) or colours (palette.txt), if elsewhere."},
    )
    reduce_labels: bool = field(
        default=False, metadata={"help": "The masks count classes from 1 and have 0 where there is none."}
    )

    def source_options(self) -> dict[str, Any]:
        """Returns the same, with what the masks mean."""
        return {
            **super().source_options(),
            "mask_column_name": self.mask_column_name,
            "class_names": split_names(self.class_names),
            "classes_file": self.classes_file,
            "reduce_labels": self.reduce_labels,
        }


@dataclass
class SemanticDataArguments(SemanticImagesArguments, TrainedImagesArguments):
    """Which images and masks to train on."""


@dataclass
class UniversalImagesArguments(SemanticImagesArguments):
    """Which images, and masks of things and stuff, to score on."""

    dataset_name: str = field(
        default="",
        metadata={
            "help": "Folder or file in the format of COCO (panoptic or instances), or of semantic segmentation."
        },
    )
    thing_classes: str | None = field(
        default=None,
        metadata={"help": 'Classes of semantic masks whose connected regions are instances: "cat,dog". Else stuff.'},
    )
    annotations: str | None = field(
        default=None, metadata={"help": "panoptic or instances, where a folder in the format of COCO has both."}
    )

    def source_options(self) -> dict[str, Any]:
        """Returns the same, with which classes are things."""
        things = split_names(self.thing_classes)
        return {**super().source_options(), "thing_names": things, "annotations": self.annotations}


@dataclass
class UniversalDataArguments(UniversalImagesArguments, TrainedImagesArguments):
    """Which images, and masks of things and stuff, to train on."""


@dataclass
class DepthImagesArguments(ImageDataArguments):
    """Which images and depth maps to score on."""

    dataset_name: str = field(
        default="",
        metadata={"help": "Folder of <split>/images and <split>/depths, parquet files, or a Hub name."},
    )
    depth_column_name: str | None = field(
        default=None, metadata={"help": "Column of the depth maps, where it is not clear by itself."}
    )
    depth_scale: float | None = field(
        default=None,
        metadata={
            "help": "Units per metre: 256 for KITTI. Unless said, whole numbers are millimetres, floats metres."
        },
    )

    def source_options(self) -> dict[str, Any]:
        """Returns the same, with what the depth maps mean."""
        return {
            **super().source_options(),
            "depth_column_name": self.depth_column_name,
            "depth_scale": self.depth_scale,
        }


@dataclass
class DepthDataArguments(DepthImagesArguments, TrainedImagesArguments):
    """Which images and depth maps to train on."""


@dataclass
class DenseAugmentationArguments:
    """How training images are changed at random, and their targets with them, in this order."""

    keep_aspect_ratio: bool = field(
        default=True,
        metadata={
            "help": "Images keep their proportions, their shorter side being that of image_size; false squeezes them "
            "into it."
        },
    )
    min_scale: float = field(
        default=0.5, metadata={"help": "Least scale; at 1 images are as large as in evaluations."}
    )
    max_scale: float = field(default=2.0, metadata={"help": "Largest scale."})
    max_class_share: float = field(
        default=0.75, metadata={"help": "Crops of class masks are drawn anew if one class has more; 1 takes any."}
    )
    horizontal_flip: float = field(default=0.5, metadata={"help": "Probability of a mirror image."})
    max_rotation: float = field(default=0.0, metadata={"help": "Largest angle of a random rotation in degrees."})
    photometric: float = field(
        default=0.5, metadata={"help": "Probability that brightness, contrast and colours change."}
    )

    def options(self) -> dict[str, Any]:
        """Returns them as `dense_augmentation` takes them."""
        options = asdict(self)
        scale_range = options.pop("min_scale"), options.pop("max_scale")
        return {**options, "scale_range": scale_range}


@dataclass
class SemanticEvaluationArguments:
    """How semantic segmentation is scored."""

    eval_window_size: int | None = field(
        default=None,
        metadata={"help": "Side in pixels of windows that slide over an image; without, one look at all."},
    )
    eval_scales: list[float] = field(
        default_factory=lambda: [1.0], metadata={"help": "Sizes, relative to the image, of copies that are averaged."}
    )
    eval_flip: bool = field(default=False, metadata={"help": "Whether the mirror image of each copy counts too."})

    def __post_init__(self) -> None:
        """Checks what can be checked without the model."""
        if not self.eval_scales or not all(0 < scale < math.inf for scale in self.eval_scales):
            raise ValueError(f"eval_scales={self.eval_scales} must be positive; 1.0 is the image itself.")


@dataclass
class DepthEvaluationArguments:
    """How depth is scored."""

    eval_crop: Literal["eigen", "eigen_kitti", "garg"] | None = field(
        default=None, metadata={"help": "Part of the images that counts, as usual for NYU (eigen) or KITTI."}
    )
    eval_alignment: Literal["median", "scale_shift"] | None = field(
        default=None,
        metadata={"help": "What is fitted to the truth first; scale_shift for relative depth, else nothing."},
    )
    min_eval_depth: float = field(default=1e-3, metadata={"help": "Least depth that counts, in metres."})
    max_eval_depth: float | None = field(
        default=None, metadata={"help": "Largest depth that counts, in metres; the model's max_depth unless said."}
    )


@dataclass
class SemanticTrainingArguments(ScoredTrainingArguments):
    """The library's arguments, with defaults that suit semantic segmentation."""

    metric_for_best_model: str | None = best_by("mean_iou")


@dataclass
class UniversalTrainingArguments(ScoredTrainingArguments):
    """The same, for universal segmentation."""

    metric_for_best_model: str | None = best_by(PQ_OR_MASK_AP)


@dataclass
class DepthTrainingArguments(ScoredTrainingArguments):
    """The same, for depth, which runs away at the rates that suit classes."""

    learning_rate: float = field(default=5e-4, metadata=LIBRARY["learning_rate"].metadata)
    metric_for_best_model: str | None = best_by("abs_rel")
