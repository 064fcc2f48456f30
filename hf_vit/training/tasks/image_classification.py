"""Image classification: arguments, data, scores and card lines."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasets import DatasetDict
from transformers import BaseImageProcessor, EvalPrediction, PreTrainedModel

from ...data import AugmentedDataset, AugmentedStream, ImageClassificationCollator, image_classification_augmentation
from ...evaluation.classification import SCORES, image_classification_metrics, majority_baseline
from ...model.configuration_hf_vit import HfViTConfig
from ...model.task_image_classification import HfViTForImageClassification
from ...options.field import COUNT, NOT_NEGATIVE, PROBABILITY, SHARE, Range, option
from ..arguments import ClassificationDataArguments, HfViTTrainingArguments, ModelArguments
from ..data_notes import SeenClasses, see_labels
from ..distillation.arguments import DistillationArguments, load_teacher, make_distillation
from ..load_data import load_evaluation_split, load_splits
from ..load_stream import LabeledImages, TrainingStream, load_stream
from ..models import input_size, load_model
from ..planning.defaults import CLASSIFICATION
from ..publishing.model_card import Usage
from ..publishing.report import describe_options, write_scores
from ..recipe import recipe_of
from ..regularization import RegularizationArguments, regularize
from ..trainer import HfViTTrainer
from .base import CURVES, EvaluatedModel, Task


@dataclass
class AugmentationArguments:
    """How training images are changed at random, in this order."""

    min_crop_scale: float = option(
        default=0.35,
        help="Least share of the area that a random resized crop keeps; 1 takes all of it.",
        range=SHARE,
        group="Augmentation",
    )
    crop_padding: int = option(
        default=0,
        help="Pixels by which images are padded, mirrored at the border, to be cropped at random: 4 with "
        "--min_crop_scale 1 is the simple random crop of DeiT III and CIFAR.",
        range=NOT_NEGATIVE,
        group="Augmentation",
    )
    horizontal_flip: float = option(
        default=0.5, help="Probability of a mirror image.", range=PROBABILITY, group="Augmentation"
    )
    auto_augment: Literal["none", "trivialaugment", "randaugment", "affine", "3augment"] = option(
        default="trivialaugment",
        help="none, trivialaugment, randaugment, affine (slight, for digits), or 3augment (grayscale, solarize "
        "or blur; DeiT III).",
        group="Augmentation",
        synonyms="aa randaugment",
    )
    randaugment_num_ops: int = option(
        default=2, help="Operations that randaugment does to an image.", range=COUNT, group="Augmentation"
    )
    randaugment_magnitude: int = option(
        default=9, help="How much each of them does, 0 to 30.", range=Range(0, 30), group="Augmentation"
    )
    color_jitter: float = option(
        default=0.0,
        help="By how much brightness, contrast and saturation change at most (DeiT III: 0.3); 0 not.",
        range=PROBABILITY,
        group="Augmentation",
    )
    random_erasing: float = option(
        default=0.25, help="Probability that a rectangle is blanked out.", range=PROBABILITY, group="Augmentation"
    )


def load_classifier(
    args: ModelArguments, names: list[str], use_distillation_token: bool = False
) -> tuple[HfViTForImageClassification, BaseImageProcessor]:
    """Returns the classifier of one label per image to train, and its image processor; see `load_model`.

    With `use_distillation_token`, a model without such a token gets a fresh one, unless `args` say otherwise.
    """
    model, processor = load_model(
        HfViTForImageClassification, args, names, use_distillation_token=use_distillation_token
    )
    if args.model_name_or_path is not None:
        model.config.problem_type = "single_label_classification"
    return model, processor


def make_trainer(
    model: HfViTForImageClassification,
    processor: BaseImageProcessor,
    splits: DatasetDict,
    augmentation: AugmentationArguments,
    args: HfViTTrainingArguments,
    regularization: RegularizationArguments | None = None,
    stream: TrainingStream | None = None,
) -> HfViTTrainer:
    """Returns the trainer of a classifier on images that are opened already; see `ImageClassification`.

    Args:
        model: The classifier.
        processor: Its image processor.
        splits: Images with labels; without validation images it sets `args.eval_strategy` to "no".
        augmentation: How training images are changed at random.
        args: How to train.
        regularization: What happens to batches, and the loss.
        stream: The training images, of which "train" is a sample, if they are a stream.

    Raises:
        ValueError: if the training images do not fill one batch, choosing the best model lacks validation images, or
            some regularization does not go with the model.
    """
    task = ImageClassification(
        ModelArguments(),
        ClassificationDataArguments(dataset_name="in memory"),
        augmentation,
        args,
        DistillationArguments(),
        regularization or RegularizationArguments(),
    )
    task.loaded = LabeledImages(splits, stream)
    return task.make_trainer_of(model, processor)


@dataclass
class ImageClassification(Task):
    """Image classification with one label per image.

    Args:
        distillation: From which teacher, if any.
        regularization: What happens to batches, and the loss.
    """

    model_class = HfViTForImageClassification
    pipeline = "image-classification"
    usage = Usage(
        name="classify",
        stock='print(classify("image.png"))',
        own="print(model.config.id2label[int(outputs.logits.argmax())])",
    )
    trainer_class = HfViTTrainer
    defaults = CLASSIFICATION
    packages = ("matplotlib", "sklearn")

    data: ClassificationDataArguments
    augmentation: AugmentationArguments
    distillation: DistillationArguments
    regularization: RegularizationArguments

    loaded: LabeledImages = field(init=False)
    teacher: PreTrainedModel | None = field(init=False, default=None)

    def check_options(self) -> None:
        """Checks what can be wrong whatever the data are, and opens the teacher."""
        super().check_options()
        self.teacher = load_teacher(self.distillation, self.model_class)

    def load_training_data(self) -> LabeledImages:
        """Opens and checks the splits of a training."""
        if self.data.streaming:
            return load_stream(self.data, self.args)
        return LabeledImages(load_splits(self.data, self.args))

    def load_evaluation_data(self, saved: EvaluatedModel, label2id: dict[str, int]) -> tuple[str, LabeledImages]:
        """Opens and checks the images of an evaluation; a training on a stream has held out other ones."""
        was_streamed = recipe_of(Path(saved.model_name_or_path)).get("streaming", False)
        split, images = load_evaluation_split(self.data, saved.split, label2id, self.args, was_streamed)
        return split, LabeledImages(DatasetDict({split: images}))

    def count_examples(self) -> dict[str, int]:
        """Returns the number of images of each split, of a stream that of those that are evaluated."""
        counts = super().count_examples()
        if self.loaded.stream is not None and len(counts) > 1:
            del counts["train"]
        return counts

    @property
    def num_needed_classes(self) -> int:
        """An image has one of several classes."""
        return 2

    def see_classes(self, split: str) -> SeenClasses:
        """Returns which classes the images of a split have, of a stream those of its first images."""
        is_stream = split == "train" and self.loaded.stream is not None
        return see_labels(self.loaded.splits[split]["label"][:], len(self.loaded.names), is_stream)

    def open_model(self) -> tuple[HfViTForImageClassification, BaseImageProcessor]:
        """Returns the new or saved classifier, and its image processor."""
        return load_classifier(self.model, self.loaded.names, self.distillation.uses_token)

    def training_arguments(self, model: HfViTForImageClassification, processor: BaseImageProcessor) -> dict[str, Any]:
        """Returns the teacher, the transforms of batches and the loss."""
        distillation = make_distillation(self.distillation, model, processor, self.teacher)
        regularization = regularize(model, self.regularization, self.args.label_smoothing_factor, distillation)
        return {"distillation": distillation, **regularization}

    def evaluation_arguments(self, model: PreTrainedModel, processor: BaseImageProcessor) -> dict[str, Any]:
        """Returns the scores of logits and labels."""
        return {"compute_metrics": image_classification_metrics}

    def score_names(self, model: PreTrainedModel, evaluation: dict[str, Any]) -> set[str]:
        """Returns the names of the scores."""
        return {*SCORES, *(["top_5_accuracy"] if len(model.config.id2label) > 5 else [])}

    def make_collator(self, processor: BaseImageProcessor, model: PreTrainedModel) -> ImageClassificationCollator:
        """Returns the collator of training and evaluation batches."""
        return ImageClassificationCollator(processor)

    def make_transform(self, processor: BaseImageProcessor, config: HfViTConfig) -> Callable[[Any], Any]:
        """Returns the random transform of images."""
        size, options = input_size(processor), asdict(self.augmentation)
        return image_classification_augmentation(size, num_channels=config.num_channels, **options)

    def training_examples(
        self, processor: BaseImageProcessor, config: HfViTConfig
    ) -> AugmentedDataset | AugmentedStream:
        """Returns the augmented images to train on."""
        transform, stream = self.make_transform(processor, config), self.loaded.stream
        if stream is not None:
            return stream.augmented(transform, self.args.seed)
        return AugmentedDataset(self.loaded.examples("train"), transform, self.args.seed)

    def evaluate(self, trainer: HfViTTrainer, split: str) -> tuple[dict[str, float], dict[str, str]]:
        """Writes the scores, the confusion matrix and the prediction for every image."""
        output = trainer.predict(self.loaded.examples(split), metric_key_prefix=split)  # on all processes
        if not trainer.is_world_process_zero():
            return image_classification_metrics(EvalPrediction(output.predictions, output.label_ids)), {}
        folder, files = Path(trainer.args.output_dir), self.loaded.splits[split]["file"]
        scores = write_scores(folder, split, output, self.loaded.names, files)
        return scores, {**CURVES, "Right classes and answers": f"{split}_confusion_matrix.png"}

    def evaluate_baseline(self, trainer: HfViTTrainer, split: str) -> tuple[str, dict[str, float]]:
        """Scores the most frequent class as the prediction for every image."""
        train, labels = (self.loaded.splits[name]["label"][:] for name in ("train", split))
        return "most frequent class", majority_baseline(train, labels, len(self.loaded.names))

    def describe_recipe(self, trainer: HfViTTrainer) -> dict[str, str]:
        """Returns the lines of the card's table that the trainer's settings do not tell."""
        augmentation = {"augmentation": describe_options(self.augmentation)}
        return {**augmentation, **self.regularization.describe(), **super().describe_recipe(trainer)}

    def describe_scores(self, trainer: HfViTTrainer) -> dict[str, Any]:
        """Returns what the scores do not tell."""
        return {
            "limits": f"It knows {len(self.loaded.names)} classes and answers with one of them whatever it is shown. "
            "It has seen images like those that it was trained on, and its score says little about others."
        }
