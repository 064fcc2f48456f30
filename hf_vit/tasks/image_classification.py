"""Image classification: options, evaluator and model card texts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import DatasetDict, IterableDataset
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedModel

from ..data import ImageClassificationCollator, load_image_classification
from ..data.augmentation.classification import image_classification_augmentation
from ..data.datasets import TargetData
from ..data.reading.files import add_file_column
from ..data.reading.label_values import MULTI, REGRESSION, SINGLE, problem_type_of, value_table, values_target
from ..data.targets import label_target
from ..evaluation.base import BaseEvaluator, Batch, ImageResult
from ..evaluation.classification import ClassificationMetric, majority_baseline
from ..evaluation.label_values import LabelValueMetric, MultiLabelMetric, RegressionMetric
from ..model.task_image_classification import HfViTForImageClassification
from ..options.training_arguments import HfViTTrainingArguments
from ..outputs import write_atomically
from ..visualize.plots import draw_confusion_matrix
from .common.arguments import ClassificationArguments, TaskArguments
from .common.card import Usage
from .common.class_weights import choose_weights
from .common.defaults import CLASSIFICATION
from .common.models import load_model
from .common.regularization import regularize
from .common.streams import load_stream
from .shared import SIMILAR_IMAGES, SupervisedTask


def load_classifier(
    args: TaskArguments, names: Sequence[str], use_distillation_token: bool = False, problem_type: str = SINGLE
) -> tuple[HfViTForImageClassification, BaseImageProcessor]:
    """Return the classifier to train, with one label per image by default, and its image processor; see `load_model`.

    If `use_distillation_token` is true, a distillation token is added to a model that has none. A value in
    `config_overrides` of `args` takes precedence.
    """
    model, processor = load_model(
        HfViTForImageClassification, args, names, use_distillation_token=use_distillation_token
    )
    if args.model_name_or_path is not None or problem_type != SINGLE:
        model.config.problem_type = problem_type
    return model, processor


@dataclass(eq=False)
class ClassificationEvaluator(BaseEvaluator):
    """Predict and score the class of each image."""

    can_split_batch = True
    caption, class_score = "", "Recall"
    has_sets = True
    metric: Any

    def logits(self, model: PreTrainedModel, inputs: Batch) -> Tensor:
        """Return the logits (B, K) of a batch of pixels and their mask."""
        logits: Tensor = model(**inputs).logits
        return logits

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return the logits (K,) of each image; the loss is computed by the metric."""
        inputs: Batch = {name: batch[name] for name in ("pixel_values", "patch_attention_mask") if name in batch}
        return [ImageResult(logits) for logits in self.logits(model, inputs).float().cpu()]

    def calibration_data(self) -> tuple[Tensor, Tensor] | None:
        """Return the logits (N, K) and the class numbers (N,)."""
        return self.metric.tensors()

    def describe(self, prediction: Tensor, target: Any) -> dict[str, Any]:
        """Return the label and the most likely class with its probability; raise `ValueError` for infinite logits."""
        check_finite(prediction)
        logits = prediction.double().numpy()
        names, number = self.metric.names, int(logits.argmax())
        score = float(np.exp(logits[number] - np.logaddexp.reduce(logits)))
        return {"label": names[target], "prediction": names[number], "score": round(score, 6)}

    def draw_scores(self, folder: Path, split: str) -> dict[str, str]:
        """Write the confusion matrix as JSON and as a picture."""
        names, matrix, file = [*self.metric.names], self.metric.confusion_matrix(), f"{split}_confusion_matrix"
        content = json.dumps({"labels": names, "confusion_matrix": matrix.tolist()})
        write_atomically(folder / f"{file}.json", f"{content}\n")
        draw_confusion_matrix(matrix, names, folder / f"{file}.png")
        return {"Labels and predictions": f"{file}.png"}

    def describe_evaluation(self) -> str:
        """Return a description of the evaluation."""
        return "each image once, without augmentation"


class MultiLabelEvaluator(ClassificationEvaluator):
    """Evaluator of multi-label classification and regression."""

    class_score = "AP"
    has_sets = False

    def calibration_data(self) -> tuple[Tensor, Tensor] | None:
        """Return the logits (M,) of all known labels, and these labels (M,)."""
        logits, labels = self.metric.tensors()
        return logits[~labels.isnan()], labels[~labels.isnan()]

    def describe(self, prediction: Tensor, target: Any) -> dict[str, Any]:
        """Return labels (None if missing) and predicted probabilities or values by name."""
        check_finite(prediction)
        right = [None if np.isnan(value) else value for value in target]
        values = prediction.double().sigmoid() if isinstance(self.metric, MultiLabelMetric) else prediction
        answers = {"labels": right, "prediction": values.tolist()}
        return {kind: dict(zip(self.metric.names, own, strict=True)) for kind, own in answers.items()}

    def draw_scores(self, folder: Path, split: str) -> dict[str, str]:
        """Draw nothing, because a confusion matrix needs one label per image."""
        return {}


class RegressionEvaluator(MultiLabelEvaluator):
    """Evaluator of regression, which predicts and scores the values of each image."""

    parts, class_score = "values", "R2"

    def calibration_data(self) -> None:
        """Return None, because regression has no scores to calibrate."""


def check_finite(logits: Tensor) -> None:
    """Raise `ValueError` if logits are infinite or NaN."""
    if not logits.isfinite().all():
        raise ValueError("The model predicts infinite or NaN logits. Use an earlier checkpoint.")


EVALUATORS = {
    MULTI: (MultiLabelEvaluator, MultiLabelMetric),
    REGRESSION: (RegressionEvaluator, RegressionMetric),
    SINGLE: (ClassificationEvaluator, ClassificationMetric),
}


def with_names(splits: DatasetDict, stream: IterableDataset | None = None) -> TargetData:
    """Return labeled images as task data, with the names of the files and of the classes or predicted values."""
    first = next(iter(splits.values()))
    if problem_type_of(first) != SINGLE:
        names = tuple(value_table(first.select([0])))
        return TargetData(splits, partial(values_target, names=names), names)
    named = splits if "file" in first.column_names else add_file_column(splits)
    return TargetData(named, label_target, tuple(first.features["label"].names), stream=stream)


def open_labeled(dataset_name: str, **options: Any) -> TargetData:
    """Return the labeled images found by `load_image_classification`, for any problem type."""
    return with_names(load_image_classification(dataset_name, **options))


@dataclass(frozen=True)
class ImageClassification(SupervisedTask):
    """Image classification with one label per image, multi-label classification, and regression."""

    model_class = HfViTForImageClassification
    min_images_to_hold_out = 400  # fewer held-out images do not distinguish the probe from the fine-tuned model
    report_passes = 1.0  # the report needs one pass for the model; the baseline reads only labels
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
    has_scores = True
    limits = "The model assigns one of {num_classes} classes to every image." + SIMILAR_IMAGES

    options: ClassificationArguments

    def load_data(self, args: HfViTTrainingArguments) -> TargetData:
        """Open and check the splits of a training run."""
        return load_stream(self.options, args) if self.options.streaming else super().load_data(args)

    def held_out_for(self, args: HfViTTrainingArguments) -> str:
        """Verb phrase for the choice between the linear probe and the fine-tuned model."""
        return "choose between the linear probe and the fine-tuned model" if self.options.probe_classifier else ""

    def count_needed_classes(self, data: TargetData) -> int:
        """Return the minimum number of classes: two if each image has one label, otherwise one."""
        return 2 if find_problem_type(data) == SINGLE else 1

    def open_model(
        self, data: TargetData, args: HfViTTrainingArguments
    ) -> tuple[HfViTForImageClassification, BaseImageProcessor]:
        """Return the new or saved classifier, and its image processor."""
        uses_token, problem_type = self.distillation.uses_token, find_problem_type(data)
        if uses_token and problem_type != SINGLE:
            raise ValueError(
                f"Distillation of class predictions supports one label per image, not {problem_type}. Use "
                "--distillation_type features, or remove the teacher."
            )
        model, processor = load_classifier(self.options, data.names, uses_token, problem_type)
        if self.options.probe_classifier and problem_type == SINGLE:
            prepare_probe(model, self.options)
        if problem_type == REGRESSION:
            start_at_mean(model.classifier, value_table(data.splits["train"]))
        return model, processor

    def class_weights(self, data: TargetData) -> list[float] | None:
        """Return the weight of the images of each class in the loss, or None for equal weights."""
        given = self.options.class_weights or ("balanced" if self.options.balanced_sampling else None)
        return None if given is None else choose_weights(given, data.names, lambda: count_labels(data))

    def trainer_arguments(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, Any]:
        """Return the batch transforms and the loss as trainer arguments."""
        weights = None if self.options.class_weights is None else self.class_weights(data)
        learns_features = self.distillation.teacher is not None and not self.distillation.uses_token
        return regularize(model, self.options, args.label_smoothing_factor, learns_features, weights)

    def sampled_classes(self, data: TargetData) -> list[int] | None:
        """Return the class of each training image for balanced sampling: the rarest label of multi-label images."""
        rows = data.splits["train"]
        if not self.options.balanced_sampling:
            return None
        if find_problem_type(data) == SINGLE:
            labels: list[int] = rows["label"][:]
            return labels
        rarity = ((value_table(rows) > 0.5) / count_labels(data)).fillna(0).to_numpy()  # (N, K)
        rarest: list[int] = np.where(rarity.any(axis=1), rarity.argmax(axis=1), -1).tolist()
        return rarest

    def make_evaluator(
        self, model: PreTrainedModel, processor: BaseImageProcessor, data: TargetData
    ) -> ClassificationEvaluator:
        """Return the evaluator."""
        evaluator, metric = EVALUATORS[find_problem_type(data)]
        return evaluator(processor, metric(data.names))

    def evaluate_baselines(self, trainer: Any, data: TargetData, split: str) -> dict[str, dict[str, float]]:
        """Score the most frequent class, the class frequencies or the mean value as prediction for every image."""
        if (problem_type := find_problem_type(data)) == SINGLE:
            train, labels = (data.splits[name]["label"][:] for name in ("train", split))
            return {"most frequent class": majority_baseline(train, labels, len(data.names))}
        train, labels = (value_table(data.splits[name]) for name in ("train", split))
        means, metric = torch.tensor(train.mean().fillna(0).tolist(), dtype=torch.float64), trainer.evaluator.metric
        assert isinstance(metric, LabelValueMetric)
        if problem_type == REGRESSION:
            return {"mean of the training labels": metric.constant_scores(means.numpy(), labels.to_numpy())}
        logits = means.logit(eps=1e-6).numpy()
        return {"share of each class in training": metric.constant_scores(logits, labels.to_numpy())}

    def card_texts(self, data: TargetData) -> tuple[Usage, str, str]:
        """Return usage, limits and a noun phrase for the class names, depending on the problem type."""
        if (problem_type := find_problem_type(data)) == SINGLE:
            return super().card_texts(data)
        own = "print(dict(zip(model.config.id2label.values(), outputs.logits[0]{}.tolist())))"
        stock = 'print(predict("image.png", top_k=None))'
        if problem_type == MULTI:
            limits = "The model predicts a probability for each of {num_classes} classes."
            return Usage("predict", stock, own.format(".sigmoid()")), limits + SIMILAR_IMAGES, "any of {} classes each"
        limits = "The model predicts {num_classes} values, which rarely exceed the range of the training labels."
        return Usage("predict", stock, own.format("")), limits + SIMILAR_IMAGES, "{} values"

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about the batch transforms and the loss."""
        problem_type = find_problem_type(data)
        kind = {} if problem_type == SINGLE else {"labels": problem_type.replace("_", " ")}
        return {**kind, **self.options.describe()}


def find_problem_type(data: TargetData) -> str:
    """Return the problem type of the labels, as in `config.problem_type`."""
    return problem_type_of(next(iter(data.splits.values())))


def count_labels(data: TargetData) -> np.ndarray:
    """Return the number of training images per class, (K,)."""
    rows = data.splits["train"]
    if find_problem_type(data) == SINGLE:
        return np.bincount(rows["label"][:], minlength=len(data.names))
    return value_table(rows).sum().to_numpy()


def prepare_probe(model: HfViTForImageClassification, args: ClassificationArguments) -> None:
    """Configure a new classifier of a saved model to use the CLS token and the mean patch token as features."""
    config = model.config
    is_plain = config.pooling == "cls" and not config.use_pooler and not config.norm_after_pooling
    if is_plain and "pooling" not in args.overrides():
        config.pooling = "cls_mean"
        model.reset_classifier(config.num_labels)


@torch.no_grad()
def start_at_mean(classifier: nn.Module, labels: pd.DataFrame) -> None:
    """Scale a new linear layer, so that its outputs have the mean and standard deviation of the labels."""
    assert isinstance(classifier, nn.Linear)
    if classifier.bias.any():  # Biases of a new classifier are zero; nonzero biases show that it was trained.
        return
    means, deviations = labels.mean().fillna(0), labels.std(ddof=0).fillna(0).replace(0, 1)
    classifier.bias.copy_(torch.tensor(means.tolist()))
    classifier.weight.mul_(torch.tensor(deviations.tolist()).to(classifier.weight)[:, None])
