"""Training of image classifiers: model, trainer and report."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from transformers import BaseImageProcessor, EvalPrediction

from ...convert import load_image_processor
from ...data import AugmentedDataset, ImageClassificationCollator, NamedImages, image_classification_augmentation
from ...evaluation.classification import SCORES, image_classification_metrics, majority_baseline
from ...model.task_classification import HfViTForImageClassification
from ...visualize import draw_curves
from ..arguments import (
    AugmentationArguments,
    DataArguments,
    HfViTTrainingArguments,
    ModelArguments,
    TrainingDataArguments,
)
from ..checks import check_packages, check_training
from ..distillation.arguments import DistillationArguments, make_distillation
from ..distillation.base import Distillation
from ..load_data import load_scored_split, load_splits
from ..load_stream import TrainingStream, count_images, load_stream
from ..models import input_size, load_model, open_trained
from ..publishing.model_card import TrainingInfo, write_model_card
from ..publishing.record import describe_data, describe_options, describe_stream, describe_training, scored_split
from ..publishing.report import report_average, write_scores
from ..recipe import begun_with
from ..regularization import RegularizationArguments, regularize
from ..trainer import HfViTTrainer
from .base import TrainingTask
from .evaluation import EvaluatedModel, Evaluation, EvaluationArguments


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
    distillation: Distillation | None = None,
    regularization: RegularizationArguments | None = None,
    stream: TrainingStream | None = None,
) -> HfViTTrainer:
    """Returns the trainer of a classifier, which may learn from a teacher too.

    Without validation images it sets `args.eval_strategy` to "no". It trains on the images of the `stream`, of which
    "train" is a sample, if there is one.

    Raises:
        ImportError: if a package is missing that is needed only at the end.
        ValueError: if the training images do not fill one batch, choosing the best model lacks validation images, or
            some regularization does not go with the model or the teacher.
    """
    check_packages("matplotlib", "sklearn")
    scores = {*SCORES, *(["top_5_accuracy"] if len(model.config.id2label) > 5 else [])}
    callbacks = check_training(args, len(splits["train"]), "validation" in splits, scores)
    transform = image_classification_augmentation(
        input_size(processor), num_channels=model.config.num_channels, **asdict(augmentation)
    )
    images = AugmentedDataset(NamedImages(splits["train"]), transform, args.seed)
    return HfViTTrainer(
        model=model,
        args=args,
        train_dataset=images if stream is None else stream.augmented(transform, args.seed),
        eval_dataset=NamedImages(splits["validation"]) if "validation" in splits else None,
        data_collator=ImageClassificationCollator(processor),
        processing_class=processor,
        compute_metrics=image_classification_metrics,
        callbacks=callbacks,
        distillation=distillation,
        **regularize(model, regularization or RegularizationArguments(), args.label_smoothing_factor, distillation),
    )


def write_report(
    trainer: HfViTTrainer, splits: DatasetDict, data: TrainingDataArguments, recipe: dict[str, str], **facts: Any
) -> dict[str, float]:
    """Scores a trained classifier and writes the scores, pictures and model card into its output folder.

    The split that is scored is "test", else "validation", else "train".

    Args:
        trainer: Has finished its training.
        splits: What it was trained on.
        data: Where that came from.
        recipe: Settings to name in the card beside those that the trainer knows.
        **facts: Fields of the card's `TrainingInfo` that only the caller knows: `command`, `license`, `base_model`.

    Returns:
        The scores.
    """
    split = scored_split(list(splits))
    names = splits["train"].features["label"].names
    output = trainer.predict(NamedImages(splits[split]), metric_key_prefix=split)  # on all processes
    if not trainer.is_world_process_zero():
        return image_classification_metrics(EvalPrediction(output.predictions, output.label_ids))
    folder = Path(trainer.args.output_dir)
    scores = write_scores(folder, split, output, names, splits[split]["file"])
    draw_curves(trainer.state.log_history, folder / "curves.png")
    sizes = count_images(splits, data)
    record = TrainingInfo.from_trainer(
        trainer,
        recipe=recipe,
        task="image-classification",
        data=describe_data(data.dataset_name, data.dataset_license, sizes, split, names),
        metrics=scores,
        baselines={
            **report_average(trainer, split, scores),
            "commonest class": majority_baseline(splits["train"]["label"], output.label_ids, len(names)),
        },
        pictures={"Loss, validation scores and learning rate": "curves.png"}
        | {"Right classes and answers": f"{split}_confusion_matrix.png"},
        limits=f"It knows {len(names)} classes and answers with one of them whatever it is shown. "
        "It has seen images like those that it was trained on, and its score says little about others.",
        **describe_training(trainer, split),
        **facts,
    )
    write_model_card(folder, record)
    return scores


@dataclass
class ImageClassification(TrainingTask):
    """Training of a classifier by a script.

    Args:
        model: Which model to train.
        data: On which images.
        augmentation: How they are changed at random.
        args: How to train.
        distillation: From which teacher, if any.
        regularization: What happens to batches, and the loss.
    """

    argument_types = (
        ModelArguments,
        TrainingDataArguments,
        AugmentationArguments,
        HfViTTrainingArguments,
        DistillationArguments,
        RegularizationArguments,
    )

    model: ModelArguments
    data: TrainingDataArguments
    augmentation: AugmentationArguments
    args: HfViTTrainingArguments
    distillation: DistillationArguments
    regularization: RegularizationArguments

    def load_data(self) -> list[str]:
        """Opens and checks the images and returns the names of their classes."""
        self.stream = None
        if self.data.streaming:
            self.splits, self.stream = load_stream(self.data, self.args)
        else:
            self.splits = load_splits(self.data, self.args)
        names: list[str] = self.splits["train"].features["label"].names
        self.names = names
        return names

    def make_trainer(self) -> HfViTTrainer:
        """Returns the trainer of a new or a saved classifier."""
        model, processor = load_classifier(self.model, self.names, self.distillation.uses_token)
        distillation = make_distillation(self.distillation, model, processor)
        return make_trainer(
            model,
            processor,
            self.splits,
            self.augmentation,
            self.args,
            distillation,
            self.regularization,
            self.stream,
        )

    def count_examples(self) -> dict[str, int]:
        """Returns the number of images of each split, of a stream that of those that are scored."""
        return count_images(self.splits, self.data)

    def write_report(self, trainer: HfViTTrainer, **facts: Any) -> dict[str, float]:
        """Scores a trained classifier; see `write_report`."""
        recipe = {
            "augmentation": describe_options(self.augmentation),
            **self.regularization.describe(),
            **trainer.describe_teacher(),
            **describe_stream(self.data),
        }
        return write_report(trainer, self.splits, self.data, recipe, **facts)


@dataclass
class ImageClassificationEvaluation(Evaluation):
    """Scoring of a saved image classifier; see `Evaluation`.

    Args:
        scored: Which model to score, and on which split.
        data: On which images.
        args: How to score it.
    """

    argument_types = (EvaluatedModel, DataArguments, EvaluationArguments)

    scored: EvaluatedModel
    data: DataArguments
    args: EvaluationArguments

    def prepare(self) -> tuple[str, int]:
        """Opens model and images."""
        name = self.scored.model_name_or_path
        self.model = open_trained(HfViTForImageClassification, name)
        self.processor = load_image_processor(name, patch_size=self.model.config.patch_size)
        label2id = self.model.config.label2id
        was_streamed = begun_with(Path(name)).get("streaming", False)
        self.split, self.images = load_scored_split(self.data, self.scored.split, label2id, self.args, was_streamed)
        return self.split, len(self.images)

    def score(self) -> dict[str, float]:
        """Writes the scores, the confusion matrix and the answer for every image."""
        trainer = HfViTTrainer(
            model=self.model,
            args=self.args,
            data_collator=ImageClassificationCollator(self.processor),
            compute_metrics=image_classification_metrics,
        )
        output = trainer.predict(self.images, metric_key_prefix=self.split)
        if not trainer.is_world_process_zero():
            return {}
        names = self.images.features["label"].names
        return write_scores(Path(self.args.output_dir), self.split, output, names, self.images["file"])
