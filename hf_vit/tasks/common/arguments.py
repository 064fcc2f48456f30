"""Options for the model and the images, shared by several tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...data.reading.files import split_names
from ...data.reading.label_values import MULTI, SINGLE, ProblemType
from ...model.configuration_hf_vit import PRESETS
from ...options.field import (
    CHANGES_IMAGES,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SHARE,
    SHARE_LEFT_OUT,
    Names,
    Range,
    augmentation_option,
    data_option,
    model_option,
    option,
    source_option,
    start_option,
    training_images_option,
)
from ...options.resolve import Options, values_of


regularization_option = partial(option, group="Regularization")
LABEL_OPTIONS = ("label_column_name", "problem_type", "label_separator", "class_names")
CLASS_POWERS = {"balanced": 1.0, "sqrt": 0.5, "none": 0.0}  # values of p in class weight = frequency ** -p
class_weights_option = partial(
    regularization_option,
    None,
    "Class weights in the loss: balanced (inverse class frequency), sqrt (square root of the inverse class "
    "frequency), none (equal weights), or a JSON file of weights by class name.",
)
HELD_OUT = 0.1  # default share of the training images that is held out for validation
FROM_DATA = {"id2label", "label2id", "num_labels", "problem_type"}  # fields of HfViTConfig that the data determines


@dataclass
class SourceArguments(Options):
    """Options of the data source."""

    # Fields of this class that are passed to the loaders in `hf_vit.data` as arguments with the same names
    loader_options: ClassVar[tuple[str, ...]] = (
        *("dataset_config_name", "dataset_revision", "image_column_name", "data_format"),
    )
    takes_several: ClassVar[bool] = False  # whether a user can give several sources, separated by commas

    dataset_name: str = source_option("Folder, or name on the Hub.")
    dataset_config_name: str | None = data_option(None, "Configuration of a dataset on the Hub.")
    dataset_revision: str | None = data_option(None, "Branch, tag or commit of a dataset on the Hub.")
    image_column_name: str | None = data_option(None, "Column of the images, if it is not detected.")
    data_format: str | None = data_option(None, "Format of the data, if several fit, such as coco, yolo or voc.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dataset_name:
            raise ValueError("Set the location of the images: --dataset_name path/to/data, or a name on the Hub.")
        if not all(self.sources):
            raise ValueError(
                f"dataset_name={self.dataset_name!r} has a comma with no name before or after it. Remove the comma."
            )

    @property
    def sources(self) -> list[str]:
        """Folders, files or names of the datasets."""
        return split_sources(self.dataset_name) if self.takes_several else [self.dataset_name]

    def source_options(self) -> dict[str, Any]:
        """Return all arguments for the data loaders in `hf_vit.data` except `dataset_name`."""
        return {name: vars(self)[name] for name in self.loader_options}


@dataclass
class TaskArguments(SourceArguments):
    """Options that all tasks share: the model, and the images for training or evaluation."""

    task_config: ClassVar[str] = ""  # field of HfViTConfig that contains the head options
    task_options: ClassVar[tuple[str, ...]] = ()  # names of the head options that are fields of this class

    skip_unreadable: bool = data_option(
        False, "Skip images that cannot be read instead of stopping.", essential=True, resume="free"
    )
    check_images: bool = data_option(
        True, "Read all images once before training; false if they have been checked before.", resume="free"
    )
    allow_duplicates: bool = training_images_option(
        False, "Train even if most of the evaluated images are also training images.", resume="free"
    )
    train_val_split: float | None = data_option(
        None,
        "Share of the training images that is held out if there is no validation split; 0 trains on all images. By "
        "default 0.1 if held-out images are needed to choose the best step or a threshold, or if there is no test "
        "split.",
        SHARE_LEFT_OUT,
        synonyms="val_split validation_split holdout",
    )
    validation_as_test: bool | None = data_option(
        None,
        "Report the scores of the validation split, and hold out training images to choose the best step or a "
        "threshold. By default true if there is such a choice and no test split.",
    )
    max_train_samples: int | None = training_images_option(
        None,
        "Maximum number of training images, drawn at random. The number of held-out images is at most this number "
        "times --train_val_split.",
        COUNT,
    )
    max_eval_samples: int | None = data_option(
        None, "Maximum number of evaluated images per split, drawn at random.", COUNT
    )
    dataset_license: str = training_images_option("unknown", "License of the data, for the model card.", resume="free")
    model_name_or_path: str | None = start_option(
        None,
        "Initial model, saved by this package or published for another library: a folder, a name on the Hub, or "
        "a file of published weights.",
        group="Model",
    )
    preset: str | None = model_option(
        None,
        f"Size of a model that is trained from scratch: {', '.join(PRESETS)}. By default chosen by data and device, "
        "or small with --choose_defaults false.",
        essential=True,
        synonyms="arch architecture model_size",
        conflicts={"model_name_or_path": "the saved model already has a size"},
    )
    image_size: int | tuple[int, int] | None = model_option(
        None,
        "Side of images in pixels, or height,width. The position embeddings of a saved model are resampled.",
        COUNT,
        essential=True,
        synonyms="imgsz img_size input_size resolution size",
    )
    image_mean: list[float] | None = model_option(
        None,
        "Mean of each color channel, for values from 0 to 1; by default 0.5, or the value of the saved model.",
        NOT_NEGATIVE,
    )
    image_std: list[float] | None = model_option(
        None, "Standard deviation of each color channel; by default 0.5, or the value of the saved model.", POSITIVE
    )
    config_overrides: dict[str, Any] | None = model_option(
        None, 'Fields of HfViTConfig to change, as JSON, such as \'{"patch_size": 8, "pooling": "mean"}\'.'
    )
    whiten_patches: bool = model_option(
        False,
        "Initialize the patch embedding of a new model by whitening training patches, which speeds up learning.",
        conflicts={"model_name_or_path": "the saved model has a trained patch embedding"},
    )
    calibrate: bool = model_option(
        True,
        "Calibrate scores, prediction sets and expected errors of keypoints on the validation images. Requires test "
        "images, because scores are not reported on the images used for calibration.",
    )
    license: str = model_option("unknown", "License of the trained weights, for the model card.", resume="free")
    chooses_weights: bool = field(init=False, default=False)  # whether scores of all heads choose the weights

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skip_unreadable and not self.check_images:
            raise ValueError("skip_unreadable requires check_images=True. Change one of the two options.")

    def overrides(self) -> dict[str, Any]:
        """Return the configuration fields to override: `config_overrides`, `image_size` and the head options.

        Raises:
            ValueError: If a field is determined by the data, or an option is given twice.
        """
        fields = dict(self.config_overrides or {})
        if from_data := sorted(FROM_DATA & fields.keys()):
            raise ValueError(
                f"config_overrides contains {', '.join(from_data)}, but the data determine the classes. Remove these "
                "fields. To set the type of the labels, use --problem_type."
            )
        if self.image_size is not None:
            if "image_size" in fields:
                raise ValueError("--image_size is given twice. Remove it from --config_overrides.")
            fields["image_size"] = self.image_size
        options = fields.get(self.task_config) or {}
        given = {name: vars(self)[name] for name in self.task_options if vars(self)[name] is not None}
        if twice := sorted(given.keys() & options.keys()):
            raise ValueError(f"--{twice[0]} is given twice. Remove it from --config_overrides.")
        return {**fields, self.task_config: {**options, **given}} if given else fields

    def complete(self, config: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        """Set the options of an evaluation that follow from a saved model.

        Args:
            config: Content of its config.json.
            recipe: Options of its training run; empty if unknown.
        """
        if self.train_val_split is None and recipe:
            self.train_val_split = recipe.get("train_val_split", HELD_OUT)
            self.validation_as_test = recipe.get("validation_as_test", False)

    def given_options(self) -> dict[str, Any]:
        """Return the head options that the user gave. Raises the same errors as `overrides`."""
        return self.overrides().get(self.task_config) or {}

    def given_values(self, group: str) -> dict[str, Any]:
        """Return the options of a help group that differ from their defaults, by name."""
        defaults = {item.name: item.default for item in fields(self)}
        return {name: value for name, value in values_of(self, group).items() if value != defaults[name]}


@dataclass
class StreamArguments(TaskArguments):
    """Options of tasks that support streamed images."""

    streaming: bool = training_images_option(
        False,
        "Stream training images instead of loading them first; requires --max_steps, --save_strategy steps and "
        "--eval_strategy steps or no. If evaluation images are remote or held out, --max_eval_samples (by default "
        "1000) of them are evaluated.",
        conflicts={
            "max_train_samples": "the length of a stream is unknown",
            "minutes": "a time budget requires a known number of images. Use --max_steps instead",
            "cached_views": "the images of a stream are not numbered",
        },
    )
    shuffle_buffer_size: int = training_images_option(
        1000, "Number of images in the shuffle buffer of a stream, per process.", COUNT
    )
    shard_by_process: bool = training_images_option(
        True,
        "Let each process read separate shards of a stream. If false, the first process reads for all processes, "
        "which is slower, but gives the same batches for any number of processes.",
    )


@dataclass
class ClassificationArguments(StreamArguments):
    """Options of image classification: model, images and augmentation."""

    loader_options = (*TaskArguments.loader_options, *LABEL_OPTIONS)

    dataset_name: str = source_option(
        "Folder of <split>/<class>/<image>, idx or parquet files, CSV of paths and labels, or a Hub name."
    )
    label_column_name: str | None = data_option(
        None,
        "Column of the labels, if it is not detected. Several columns of 0 and 1, or of numbers, are given as a,b,c.",
    )
    problem_type: ProblemType | None = data_option(
        None,
        "Type of labels: one class per image, several classes, or numbers (regression). By default inferred from the "
        "labels, where each text is one class.",
    )
    label_separator: str | None = data_option(
        None, 'Separator of several labels in a cell of a table; by default "|", ";" or ",".'
    )
    class_names: Names | None = training_images_option(
        None, 'Class names of a stream, such as "cat,dog", if the data does not contain them.', essential=True
    )

    # Options of the image augmentations (in the order of application), the batch transforms and the loss
    min_crop_scale: float = augmentation_option(
        0.35, "Smallest share of the image area in a random resized crop; 1 keeps the whole image.", SHARE
    )
    crop_padding: int = augmentation_option(
        0,
        "Reflection padding in pixels before a random crop. 4 with --min_crop_scale 1 gives the simple random crop "
        "of DeiT III and CIFAR.",
        NOT_NEGATIVE,
    )
    horizontal_flip: float = augmentation_option(0.5, "Probability of a horizontal flip.", PROBABILITY)
    auto_augment: Literal["none", "trivialaugment", "randaugment", "affine", "3augment"] = augmentation_option(
        "trivialaugment",
        "Augmentation policy: none, trivialaugment, randaugment, affine (slight changes, for digits), or 3augment "
        "(grayscale, solarize or blur; DeiT III).",
        synonyms="aa randaugment",
    )
    randaugment_num_ops: int = augmentation_option(2, "Number of operations of randaugment.", COUNT)
    randaugment_magnitude: int = augmentation_option(9, "Magnitude of randaugment, 0 to 30.", Range(0, 30))
    color_jitter: float = augmentation_option(
        0.0, "Maximum change of brightness, contrast and saturation (DeiT III: 0.3); 0 disables it.", PROBABILITY
    )
    random_erasing: float = augmentation_option(0.25, "Probability of erasing a random rectangle.", PROBABILITY)

    mixup_alpha: float = regularization_option(
        0.0,
        "MixUp: blend pairs of images with random weights from Beta(alpha, alpha) (DeiT: 0.8); 0 disables MixUp.",
        NOT_NEGATIVE,
        synonyms="mixup",
        conflicts=CHANGES_IMAGES,
    )
    cutmix_alpha: float = regularization_option(
        0.0,
        "CutMix: replace a rectangle of each image by that of another image, with random relative area from "
        "Beta(alpha, alpha) (DeiT: 1); 0 disables CutMix.",
        NOT_NEGATIVE,
        synonyms="cutmix",
        conflicts=CHANGES_IMAGES,
    )
    mixing_probability: float = regularization_option(1.0, "Probability of MixUp or CutMix per batch.", PROBABILITY)
    mixing_off_share: float = regularization_option(
        0.0, "Share of steps at the end of training without MixUp and CutMix; 0.1 for the last tenth.", PROBABILITY
    )
    classification_loss: Literal["cross_entropy", "bce"] = regularization_option(
        "cross_entropy",
        "Training loss: cross_entropy, or bce, a binary cross-entropy per class (DeiT III).",
    )
    bce_target_threshold: float | None = regularization_option(
        None,
        "Threshold of bce: soft labels above it become 1, all others 0. At 0, all classes of a mixed image are 1.",
        SHARE_LEFT_OUT,
    )
    probe_classifier: bool = model_option(
        False,
        "Initialize a new classifier on a saved model as a linear probe: ridge regression on the features of the "
        "training images. The final weights of the classifier are interpolated with those of the probe.",
    )
    token_drop_rate: float = regularization_option(
        0.0,
        "Share of patches that are dropped from each training image.",
        SHARE_LEFT_OUT,
        conflicts=CHANGES_IMAGES,
    )
    class_weights: str | None = class_weights_option()
    balanced_sampling: bool = regularization_option(
        False,
        "Draw training images so that all classes are equally frequent; images of rare classes repeat.",
        conflicts={"streaming": "the labels of a stream are unknown"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probe_classifier and self.model_name_or_path is None:
            raise ValueError(
                "probe_classifier=True requires a saved model. Set model_name_or_path, or probe_classifier=False."
            )
        if self.class_names is not None and not self.streaming:
            raise ValueError(
                f"class_names={self.class_names!r} requires --streaming. Without a stream, the class names are read "
                "from the data. Remove class_names."
            )
        if self.streaming and self.class_weights in CLASS_POWERS:
            raise ValueError(
                f"class_weights={self.class_weights} requires the labels of all images, which are unknown for a "
                "stream. Remove it, or set class_weights to a file."
            )
        if self.bce_target_threshold is not None and self.classification_loss != "bce":
            raise ValueError(
                f"bce_target_threshold={self.bce_target_threshold} requires --classification_loss bce. Set this "
                "loss, or remove the threshold."
            )

    def complete(self, config: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        """Set the options that follow from a saved model, with the problem type and, for several labels, its names."""
        super().complete(config, recipe)
        self.problem_type = self.problem_type or config.get("problem_type") or SINGLE
        if self.problem_type == MULTI:
            self.class_names = Names((config.get("id2label") or {}).values())

    def describe(self) -> dict[str, str]:
        """Return the options that differ from the defaults, as table rows of the model card."""
        given = ", ".join(f"{name} {value}" for name, value in self.given_values("Regularization").items())
        return {"regularization": given} if given else {}


UNLABELED_SOURCES = (
    "Folder of images at any depth, any image classification data, or a Hub name; several sources, separated by "
    "commas, are combined."
)
UNLABELED_COLUMN = "Column of labels, if there is one and it is not detected."


@dataclass
class UnlabeledArguments(StreamArguments):
    """Options of pretraining without labels: model and images."""

    loader_options = (*StreamArguments.loader_options, "label_column_name")
    takes_several = True
    masking_objective: ClassVar[str] = ""  # name of the training objective that needs a mask token

    dataset_name: str | Names = source_option(UNLABELED_SOURCES)  # type: ignore[assignment]
    label_column_name: str | None = data_option(None, UNLABELED_COLUMN)
    max_knn_samples: int = data_option(
        5000, "Number of labeled training images for the nearest neighbor evaluation; 0 disables it.", NOT_NEGATIVE
    )

    def overrides(self) -> dict[str, Any]:
        """Return the configuration fields to override, including the mask token if the objective needs one."""
        fields = super().overrides()
        objective = (fields.get(self.task_config) or {}).get("objective")
        return {"use_mask_token": True, **fields} if objective and objective == self.masking_objective else fields


def split_sources(names: str | Sequence[str]) -> list[str]:
    """Split sources given as a list or separated by commas. The path of an existing file or folder is not split."""
    if not isinstance(names, str):
        return list(names)
    return [names] if Path(names).expanduser().exists() else split_names(names)
