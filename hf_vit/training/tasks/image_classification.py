"""Image classification: options, evaluator and model card texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import DatasetDict, IterableDataset
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedModel

from ...data import ImageClassificationCollator, load_image_classification
from ...data.augmentation.classification import image_classification_augmentation
from ...data.augmentation.datasets import AugmentedDataset, AugmentedStream
from ...data.datasets import TargetData
from ...data.reading.files import add_file_column
from ...data.reading.label_values import MULTI, REGRESSION, SINGLE, problem_type_of, value_table, values_target
from ...data.targets import label_target
from ...evaluation.base import BaseEvaluator, Batch, ImageResult
from ...evaluation.classification import ClassificationMetric, majority_baseline
from ...evaluation.label_values import LabelValueMetric, MultiLabelMetric, RegressionMetric
from ...model.configuration_hf_vit import HfViTConfig
from ...model.task_image_classification import HfViTForImageClassification
from ...options.field import Names
from ...outputs import write_atomically
from ...visualize.plots import draw_confusion_matrix
from ..arguments import ClassificationArguments, TaskArguments
from ..checkpoints import on_first_process
from ..class_weights import choose_weights
from ..distillation import DistillationArguments
from ..evaluator_trainer import CHOOSING, EvaluatorTrainer
from ..finetuning.probe import LEAST_COMPARED, MOST_IMAGES, Probe, encode, fit_probe, prepare_probe, start_from_probe
from ..lora import is_adapted
from ..models import load_model, read_config_of, without_load_report
from ..planning.defaults import CLASSIFICATION
from ..publishing.model_card import Usage
from ..regularization import regularize
from ..streams import load_stream
from ..training_arguments import HfViTTrainingArguments
from .base import EvaluationArguments
from .shared import SIMILAR_IMAGES, SupervisedTask


# Positions between the weights of the linear probe (0) and of the fine-tuned model (1), and the default position
SHARES, USUAL_SHARE = (0.0, 0.25, 0.5, 0.75, 1.0), 0.75


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
    caption = ""
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


def make_trainer(
    model: HfViTForImageClassification,
    processor: BaseImageProcessor,
    splits: DatasetDict,
    options: ClassificationArguments,
    args: HfViTTrainingArguments,
    stream: IterableDataset | None = None,
) -> EvaluatorTrainer:
    """Return a trainer that trains a classifier on loaded images; see `ImageClassification`.

    Args:
        model: The classifier.
        processor: Image processor of the classifier.
        splits: Labeled images. Without validation images, `args.eval_strategy` is set to "no".
        options: Options of augmentation and loss.
        args: Training arguments.
        stream: The training images if they are streamed. In this case, "train" in `splits` is a sample of the stream.

    Raises:
        ValueError: If the training images do not fill one batch, there are no validation images to choose the best
            model, or a regularization does not support the model.
    """
    task = ImageClassification(options, args, DistillationArguments())
    task.loaded = with_names(splits, stream)
    return task.make_trainer_of(model, processor)


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


@dataclass
class ImageClassification(SupervisedTask):
    """Image classification with one label per image, multi-label classification, and regression."""

    model_class = HfViTForImageClassification
    least_held_from = LEAST_COMPARED
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

    probe: Probe | None = field(init=False, default=None)

    @property
    def problem_type(self) -> str:
        """Problem type of the labels, as in `config.problem_type`."""
        return problem_type_of(next(iter(self.loaded.splits.values())))

    def load_training_data(self) -> TargetData:
        """Open and check the splits of a training run."""
        return load_stream(self.options, self.args) if self.options.streaming else super().load_training_data()

    def make_evaluation_trainer(self, saved: EvaluationArguments) -> tuple[EvaluatorTrainer, str]:
        """Return a trainer to evaluate a saved model on labels of its problem type, and the name of the split."""
        config = read_config_of(saved.model_name_or_path, saved.head)
        self.options.problem_type = self.options.problem_type or config.get("problem_type") or SINGLE
        if self.options.problem_type == MULTI:
            self.options.class_names = Names((config.get("id2label") or {}).values())
        return super().make_evaluation_trainer(saved)

    @property
    def held_out_for(self) -> str:
        """Verb phrase for the choice between the linear probe and the fine-tuned model."""
        return "choose between the linear probe and the fine-tuned model" if self.options.probe_classifier else ""

    @property
    def num_needed_classes(self) -> int:
        """Minimum number of classes: two if each image has one label, otherwise one."""
        return 2 if self.problem_type == SINGLE else 1

    def open_model(self) -> tuple[HfViTForImageClassification, BaseImageProcessor]:
        """Return the new or saved classifier, and its image processor."""
        uses_token = self.distillation.uses_token
        if uses_token and self.problem_type != SINGLE:
            raise ValueError(
                f"Distillation of class predictions supports one label per image, not {self.problem_type}. Use "
                "--distillation_type features, or remove the teacher."
            )
        model, processor = load_classifier(self.options, self.loaded.names, uses_token, self.problem_type)
        if self.options.probe_classifier and self.problem_type == SINGLE:
            prepare_probe(model, self.options)
        if self.problem_type == REGRESSION:
            start_at_mean(model.classifier, value_table(self.loaded.splits["train"]))
        return model, processor

    def make_trainer_of(self, model: PreTrainedModel, processor: Any) -> EvaluatorTrainer:
        """Return the trainer of a model, given its processor. Raises the same errors as `make_trainer`."""
        if self.problem_type != SINGLE and self.args.metric_for_best_model == "accuracy":
            self.args.metric_for_best_model = EVALUATORS[self.problem_type][1].score_names[0]
        return super().make_trainer_of(model, processor)

    def start_weights(self, model: HfViTForImageClassification, processor: BaseImageProcessor) -> None:
        """Initialize the patch embedding by whitening, or the classifier as a linear probe, if requested."""
        super().start_weights(model, processor)
        is_open = self.problem_type == SINGLE and not model.config.use_distillation_token
        if self.options.probe_classifier and is_open and self.loaded.stream is None:
            self.probe = self.probe or on_first_process(self.args, lambda: self.fit_probe(model, processor))
            start_from_probe(model.classifier, self.probe)

    def fit_probe(self, model: HfViTForImageClassification, processor: BaseImageProcessor) -> Probe:
        """Return a linear probe of a model on the training images."""
        batches = self.plain_batches(model, processor, MOST_IMAGES, self.args.per_device_eval_batch_size)
        return fit_probe(*encode(model, batches), len(self.loaded.names), self.class_weights)

    @property
    def class_weights(self) -> list[float] | None:
        """Weight of the images of each class in the loss, or None for equal weights."""
        given = self.options.class_weights or ("balanced" if self.options.balanced_sampling else None)
        return None if given is None else choose_weights(given, self.loaded.names, self.count_labels)

    @property
    def can_choose_share(self) -> bool:
        """Whether there are validation images that are not used for the reported scores."""
        splits = self.loaded.splits
        return "validation" in splits and (self.options.holds_out or "test" in splits)

    def count_choosing_images(self, num_trained: int) -> int:
        """Return the number of held-out images evaluated for the choice between probe and fine-tuned model."""
        is_choosing = self.options.probe_classifier and self.can_choose_share
        others = super().count_choosing_images(num_trained)
        return others + (len(SHARES) * self.count_evaluated_images("validation") if is_choosing else 0)

    def choose_inference(self, trainer: EvaluatorTrainer) -> None:
        """Interpolate the weights if they started from a linear probe, and calibrate the scores."""
        self.interpolate_probe(trainer)
        super().choose_inference(trainer)

    def interpolate_probe(self, trainer: EvaluatorTrainer) -> None:
        """Interpolate the weights between the linear probe and the fine-tuned model.

        The share of the fine-tuned model is `USUAL_SHARE`, unless another share in `SHARES` has a loss on held-out
        images that is lower by more than a standard error. EMA, adapter and sharded weights are not changed.

        Source: https://arxiv.org/abs/2109.01903
        """
        if self.probe is None or trainer.average is not None or is_adapted(trainer.model) or trainer.is_fsdp_enabled:
            return
        with without_load_report():
            model, _ = self.open_model()
        start_from_probe(model.classifier, self.probe)
        start = model.state_dict()
        tuned = {name: value.clone() for name, value in trainer.plain_model.state_dict().items()}
        chosen, found = USUAL_SHARE, ""
        if self.can_choose_share:
            scores, losses, weights = dict[float, float](), dict[float, np.ndarray](), self.class_weights
            for share in SHARES:
                trainer.plain_model.load_state_dict(interpolate(start, tuned, share))
                scored = trainer.predict(trainer.eval_dataset, metric_key_prefix=CHOOSING).metrics
                assert isinstance(trainer.evaluator.metric, ClassificationMetric)
                scores[share], losses[share] = (
                    scored[f"{CHOOSING}_accuracy"],
                    trainer.evaluator.metric.losses(weights),
                )
            chosen = choose_share(losses)
            found = (
                f" Accuracy on held-out images: {scores[0.0]:.1%} of the linear probe, {scores[1.0]:.1%} of the "
                f"fine-tuned model, {scores[chosen]:.1%} as saved."
            )
        trainer.plain_model.load_state_dict(interpolate(start, tuned, chosen))
        self.choice = f"Saved weights: {1 - chosen:.0%} linear probe, {chosen:.0%} fine-tuned model.{found}"

    def describe_targets(self, trainer: EvaluatorTrainer) -> str:
        """Return the accuracy of the linear probe that the classifier starts from."""
        return "" if self.probe is None else str(self.probe)

    def training_arguments(self, model: PreTrainedModel, processor: BaseImageProcessor) -> dict[str, Any]:
        """Return the teacher, the batch transforms and the loss as trainer arguments."""
        arguments = super().training_arguments(model, processor)
        smoothing, distillation = self.args.label_smoothing_factor, arguments["distillation"]
        weights = None if self.options.class_weights is None else self.class_weights
        return {**arguments, **regularize(model, self.options, smoothing, distillation, weights)}

    def count_labels(self) -> np.ndarray:
        """Return the number of training images per class, (K,)."""
        rows = self.loaded.splits["train"]
        if self.problem_type == SINGLE:
            return np.bincount(rows["label"][:], minlength=len(self.loaded.names))
        return value_table(rows).sum().to_numpy()

    def training_examples(self, processor: Any, config: HfViTConfig) -> AugmentedDataset | AugmentedStream:
        """Return the augmented training examples. Balanced sampling uses the rarest label of multi-label images."""
        examples, rows = super().training_examples(processor, config), self.loaded.splits["train"]
        if self.options.balanced_sampling and isinstance(examples, AugmentedDataset):
            if self.problem_type == SINGLE:
                examples.classes = rows["label"][:]
            else:
                rarity = ((value_table(rows) > 0.5) / self.count_labels()).fillna(0).to_numpy()  # (N, K)
                examples.classes = np.where(rarity.any(axis=1), rarity.argmax(axis=1), -1).tolist()
        return examples

    def make_evaluator(self, model: PreTrainedModel, processor: BaseImageProcessor) -> ClassificationEvaluator:
        """Return the evaluator."""
        evaluator, metric = EVALUATORS[self.problem_type]
        return evaluator(processor, metric(self.loaded.names))

    def evaluate_baseline(self, trainer: EvaluatorTrainer, split: str) -> tuple[str, dict[str, float]]:
        """Score the most frequent class, the class frequencies or the mean value as prediction for every image."""
        if self.problem_type == SINGLE:
            train, labels = (self.loaded.splits[name]["label"][:] for name in ("train", split))
            return "most frequent class", majority_baseline(train, labels, len(self.loaded.names))
        train, labels = (value_table(self.loaded.splits[name]) for name in ("train", split))
        means, metric = torch.tensor(train.mean().fillna(0).tolist(), dtype=torch.float64), trainer.evaluator.metric
        assert isinstance(metric, LabelValueMetric)
        if self.problem_type == REGRESSION:
            return "mean of the training labels", metric.constant_scores(means.numpy(), labels.to_numpy())
        logits = means.logit(eps=1e-6).numpy()
        return "share of each class in training", metric.constant_scores(logits, labels.to_numpy())

    def card_texts(self) -> tuple[Usage, str, str]:
        """Return usage, limits and a noun phrase for the class names, depending on the problem type."""
        if self.problem_type == SINGLE:
            return super().card_texts()
        own = "print(dict(zip(model.config.id2label.values(), outputs.logits[0]{}.tolist())))"
        stock = 'print(predict("image.png", top_k=None))'
        if self.problem_type == MULTI:
            limits = "The model predicts a probability for each of {num_classes} classes."
            return Usage("predict", stock, own.format(".sigmoid()")), limits + SIMILAR_IMAGES, "any of {} classes each"
        limits = "The model predicts {num_classes} values, which rarely exceed the range of the training labels."
        return Usage("predict", stock, own.format("")), limits + SIMILAR_IMAGES, "{} values"

    def describe_model(self, model: PreTrainedModel, processor: Any) -> dict[str, str]:
        """Return the table rows of the model card about the batch transforms and the loss."""
        kind = {} if self.problem_type == SINGLE else {"labels": self.problem_type.replace("_", " ")}
        probe = {} if self.probe is None else {"linear probe": f"{self.probe} {self.choice}".strip()}
        return {**kind, **probe, **self.options.describe()}


def interpolate(start: dict[str, Tensor], end: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Interpolate linearly between the weights of two models of the same architecture; `share` 1 returns `end`."""
    if share == 0:  # avoid interpolation, which would return NaN if `end` is not finite
        return start
    return {
        name: torch.lerp(start[name].to(value), value, share) if value.is_floating_point() else value
        for name, value in end.items()
    }


def choose_share(losses: Mapping[float, np.ndarray]) -> float:
    """Return the share with the lowest mean loss if it is better by over a standard error, else `USUAL_SHARE`.

    Args:
        losses: Maps a share to the loss of each image, (M,).
    """
    finite = {share: np.nan_to_num(own, nan=1e9, posinf=1e9) for share, own in losses.items()}
    best = min(finite, key=lambda share: finite[share].mean())
    gains = finite[USUAL_SHARE] - finite[best]
    return best if gains.mean() > gains.std() / np.sqrt(len(gains)) else USUAL_SHARE


@torch.no_grad()
def start_at_mean(classifier: nn.Module, labels: pd.DataFrame) -> None:
    """Scale a new linear layer, so that its outputs have the mean and standard deviation of the labels."""
    assert isinstance(classifier, nn.Linear)
    if classifier.bias.any():  # Biases of a new classifier are zero; nonzero biases show that it was trained.
        return
    means, deviations = labels.mean().fillna(0), labels.std(ddof=0).fillna(0).replace(0, 1)
    classifier.bias.copy_(torch.tensor(means.tolist()))
    classifier.weight.mul_(torch.tensor(deviations.tolist()).to(classifier.weight)[:, None])
