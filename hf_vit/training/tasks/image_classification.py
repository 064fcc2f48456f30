"""Image classification: arguments, evaluator and card lines."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import DatasetDict, IterableDataset
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ...data import ImageClassificationCollator, load_image_classification
from ...data.augmentation.classification import image_classification_augmentation
from ...data.datasets import TargetData
from ...data.formats.files import with_files
from ...data.targets import label_target
from ...evaluation.base import BaseEvaluator, Batch, ImageResult
from ...evaluation.classification import ClassificationMetric, majority_baseline
from ...model.task_image_classification import HfViTForImageClassification
from ...visualize.plots import draw_confusion_matrix
from ..arguments import ClassificationArguments, TaskArguments
from ..checkpoints import write_whole
from ..distillation import DistillationArguments
from ..evaluator_trainer import EvaluatorTrainer
from ..models import load_model
from ..planning.defaults import CLASSIFICATION
from ..publishing.model_card import Usage
from ..regularization import regularize
from ..streams import load_stream
from ..training_arguments import HfViTTrainingArguments
from .shared import SupervisedTask


def load_classifier(
    args: TaskArguments, names: Sequence[str], use_distillation_token: bool = False
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


@dataclass(eq=False)
class ClassificationEvaluator(BaseEvaluator):
    """Predicts and scores the class of each image."""

    is_divisible = True
    caption = ""
    metric: ClassificationMetric

    def logits(self, model: PreTrainedModel, inputs: Batch) -> Tensor:
        """Returns the logits (B, K) of a batch of pixels and their mask."""
        logits: Tensor = model(**inputs).logits
        return logits

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Returns the logits (K,) of each image; the loss is that of the metric."""
        inputs: Batch = {name: batch[name] for name in ("pixel_values", "patch_attention_mask") if name in batch}
        return [ImageResult(logits) for logits in self.logits(model, inputs).float().cpu()]

    def describe(self, prediction: Tensor, target: int) -> dict[str, Any]:
        """Returns the right class, and the likeliest one with its probability; refuses logits that are not finite."""
        logits = prediction.double().numpy()
        if not np.isfinite(logits).all():
            raise ValueError("The model predicts infinite or NaN logits. Use an earlier checkpoint.")
        names, number = self.metric.names, int(logits.argmax())
        score = float(np.exp(logits[number] - np.logaddexp.reduce(logits)))
        return {"label": names[target], "prediction": names[number], "score": round(score, 6)}

    def draw_scores(self, folder: Path, split: str) -> dict[str, str]:
        """Writes the confusion matrix as JSON and as a picture."""
        names, matrix, file = [*self.metric.names], self.metric.confusion_matrix(), f"{split}_confusion_matrix"
        content = json.dumps({"labels": names, "confusion_matrix": matrix.tolist()})
        write_whole(folder / f"{file}.json", f"{content}\n")
        draw_confusion_matrix(matrix, names, folder / f"{file}.png")
        return {"Right classes and answers": f"{file}.png"}

    def describe_evaluation(self) -> str:
        """Returns how images are seen, in words."""
        return "each image once, without augmentation"


def make_trainer(
    model: HfViTForImageClassification,
    processor: BaseImageProcessor,
    splits: DatasetDict,
    options: ClassificationArguments,
    args: HfViTTrainingArguments,
    stream: IterableDataset | None = None,
) -> EvaluatorTrainer:
    """Returns the trainer of a classifier on images that are opened already; see `ImageClassification`.

    Args:
        model: The classifier.
        processor: Its image processor.
        splits: Images with labels; without validation images it sets `args.eval_strategy` to "no".
        options: How training images and batches are changed at random, and the loss.
        args: How to train.
        stream: The training images, of which "train" is a sample, if they are a stream.

    Raises:
        ValueError: if the training images do not fill one batch, choosing the best model lacks validation images, or
            some regularization does not go with the model.
    """
    task = ImageClassification(options, args, DistillationArguments())
    task.loaded = with_names(splits, stream)
    return task.make_trainer_of(model, processor)


def with_names(splits: DatasetDict, stream: IterableDataset | None = None) -> TargetData:
    """Returns images with labels as data whose classes and files have names."""
    first = next(iter(splits.values()))
    named = splits if "file" in first.column_names else with_files(splits)
    return TargetData(named, label_target, tuple(first.features["label"].names), stream=stream)


def open_labeled(dataset_name: str, **options: Any) -> TargetData:
    """Return the images with labels that `load_image_classification` finds."""
    return with_names(load_image_classification(dataset_name, **options))


@dataclass
class ImageClassification(SupervisedTask):
    """Image classification with one label per image."""

    model_class = HfViTForImageClassification
    load_source = staticmethod(open_labeled)
    collator_class = ImageClassificationCollator
    augment = staticmethod(image_classification_augmentation)
    augmented_column = "image"
    read_streamed = staticmethod(label_target)
    pipeline = "image-classification"
    usage = Usage(
        name="classify",
        stock='print(classify("image.png"))',
        own="print(model.config.id2label[int(outputs.logits.argmax())])",
    )
    defaults = CLASSIFICATION
    packages = ("matplotlib", "sklearn")
    limits = (
        "It knows {num_classes} classes and answers with one of them whatever it is shown. It has seen images like "
        "those that it was trained on, and its score says little about others."
    )

    options: ClassificationArguments

    def load_training_data(self) -> TargetData:
        """Opens and checks the splits of a training."""
        return load_stream(self.options, self.args) if self.options.streaming else super().load_training_data()

    @property
    def num_needed_classes(self) -> int:
        """An image has one of several classes."""
        return 2

    def open_model(self) -> tuple[HfViTForImageClassification, BaseImageProcessor]:
        """Returns the new or saved classifier, and its image processor."""
        return load_classifier(self.options, self.loaded.names, self.distillation.uses_token)

    def training_arguments(self, model: PreTrainedModel, processor: BaseImageProcessor) -> dict[str, Any]:
        """Returns the teacher, the transforms of batches and the loss."""
        arguments = super().training_arguments(model, processor)
        smoothing, distillation = self.args.label_smoothing_factor, arguments["distillation"]
        return {**arguments, **regularize(model, self.options, smoothing, distillation)}

    def make_evaluator(self, model: PreTrainedModel, processor: BaseImageProcessor) -> ClassificationEvaluator:
        """Returns the evaluator."""
        return ClassificationEvaluator(processor, ClassificationMetric(self.loaded.names))

    def evaluate_baseline(self, trainer: EvaluatorTrainer, split: str) -> tuple[str, dict[str, float]]:
        """Scores the most frequent class as the prediction for every image."""
        train, labels = (self.loaded.splits[name]["label"][:] for name in ("train", split))
        return "most frequent class", majority_baseline(train, labels, len(self.loaded.names))

    def describe_model(self, model: PreTrainedModel, processor: Any) -> dict[str, str]:
        """Returns the card's lines on what happens to batches, and on the loss."""
        return self.options.describe()
