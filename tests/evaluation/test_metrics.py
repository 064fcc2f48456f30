"""Test classification metrics, scores reported by the Trainer, and output files of an evaluation."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn import metrics as reference
from transformers import EvalPrediction

from hf_vit import HfViTImageProcessor
from hf_vit.evaluation.classification import ClassificationMetric, MacroF1, TopKAccuracy, majority_baseline
from hf_vit.tasks.image_classification import ClassificationEvaluator
from hf_vit.training import image_classification_metrics
from hf_vit.visualize.plots import draw_confusion_matrix, draw_curves

from ..data.errors import expect_error


LOGITS = np.random.default_rng(0).normal(size=(200, 7))
LABELS = np.random.default_rng(1).integers(0, 6, 200)  # no image is labeled with class 6


def test_metrics_of_evaluate_equal_those_of_scikit_learn() -> None:
    inputs = {"predictions": LOGITS.argmax(axis=1), "references": LABELS}
    macro_f1 = reference.f1_score(LABELS, LOGITS.argmax(axis=1), average="macro")
    assert MacroF1(keep_in_memory=True).compute(**inputs)["macro_f1"] == pytest.approx(macro_f1)
    top_k = TopKAccuracy(keep_in_memory=True)
    ranked = np.argsort(-LOGITS, axis=1)
    for k, name in ((1, "accuracy"), (3, "top_3_accuracy"), (5, "top_5_accuracy")):
        score = top_k.compute(predictions=ranked, references=LABELS, k=k)[name]
        assert score == pytest.approx(reference.top_k_accuracy_score(LABELS, LOGITS, k=k, labels=range(7)))
    expect_error("k=8 must be between 1 and 7", top_k.compute, predictions=ranked, references=LABELS, k=8)


def test_scores_equal_hand_computed_ones() -> None:
    logits = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    labels = np.array([1, 0, 0, 0])
    scores = image_classification_metrics(EvalPrediction(logits, labels))
    expected = F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels)).item()
    # Class 0 has a precision of 1 and a recall of 2/3; class 1 has a precision of 1/2 and a recall of 1.
    assert scores == pytest.approx({"loss": expected, "accuracy": 0.75, "macro_f1": (0.8 + 2 / 3) / 2})
    # Top-5 accuracy is reported for more than 5 classes.
    scores = image_classification_metrics(EvalPrediction(LOGITS, LABELS))
    expected = reference.top_k_accuracy_score(LABELS, LOGITS, k=5, labels=range(7))
    assert scores["top_5_accuracy"] == pytest.approx(expected)
    assert 0 < scores["accuracy"] < scores["top_5_accuracy"] < 1
    expect_error(r"got \(4,\) and \(4,\)", image_classification_metrics, EvalPrediction(np.zeros(4), np.zeros(4)))
    # The majority baseline predicts the most frequent class of the training labels.
    scores = majority_baseline([1, 1, 1, 0], [0, 0, 0, 1], num_labels=2)
    assert scores["accuracy"] == 0.25
    assert scores["loss"] == pytest.approx(-(3 * np.log(1 / 4) + np.log(3 / 4)) / 4)
    expect_error("0 training labels and 2 evaluation labels", majority_baseline, [], [0, 1], num_labels=2)


def test_an_evaluator_has_the_answer_for_every_image_and_the_confusion_matrix(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(7)]
    evaluator = ClassificationEvaluator(HfViTImageProcessor(), ClassificationMetric(names))
    pairs = list(zip(torch.from_numpy(LOGITS), LABELS.tolist(), strict=True))
    evaluator.metric.update([evaluator.metric.record(*pair) for pair in pairs])
    scores = evaluator.metric.compute()
    assert scores == image_classification_metrics(EvalPrediction(LOGITS, LABELS))
    assert scores.keys() == {"loss", *evaluator.metric.score_names}
    lines = [evaluator.describe(*pair) for pair in pairs]
    assert [line["label"] for line in lines] == [names[label] for label in LABELS]
    assert [line["prediction"] for line in lines] == [names[answer] for answer in LOGITS.argmax(axis=1)]
    assert lines[3]["score"] == pytest.approx(torch.from_numpy(LOGITS[3]).softmax(0).max().item(), abs=1e-5)
    assert evaluator.draw_scores(tmp_path, "test") == {"Labels and predictions": "test_confusion_matrix.png"}
    matrix = json.loads((tmp_path / "test_confusion_matrix.json").read_text())["confusion_matrix"]
    assert np.array_equal(matrix, reference.confusion_matrix(LABELS, LOGITS.argmax(axis=1), labels=range(7)))
    with Image.open(tmp_path / "test_confusion_matrix.png") as picture:
        assert min(picture.size) > 400


@pytest.mark.parametrize("num_labels", [2, 80])
def test_confusion_matrix_is_darkest_where_most_answers_are(num_labels: int, tmp_path: Path) -> None:
    matrix, names, pictures = np.eye(num_labels, dtype=int), [f"class {n}" for n in range(num_labels)], []
    for values in (matrix, matrix[::-1]):
        draw_confusion_matrix(values, names, tmp_path / "matrix.png")
        pictures.append(np.asarray(Image.open(tmp_path / "matrix.png").convert("L"), dtype=int))
    right, wrong = pictures
    assert right.shape == wrong.shape
    assert np.abs(right - wrong).max() > 100
    with pytest.raises(ValueError, match="confusion matrix has the shape"):
        draw_confusion_matrix(matrix, ["one"], tmp_path / "no.png")
    if num_labels == 2:  # class names that contain TeX syntax are not rendered as formulas
        names = ["$100_$", "$\\alpha$"]
        draw_confusion_matrix(matrix, names, tmp_path / "matrix.svg")
        assert all((tmp_path / "matrix.svg").read_text().count(f"<!-- {name} -->") == 2 for name in names)


def test_curves_show_training_and_validation(tmp_path: Path) -> None:
    history = [{"step": step, "loss": 1 / step, "learning_rate": 1e-3} for step in range(1, 5)]
    draw_curves(history, tmp_path / "training.png")
    evaluated = {"step": 4, "eval_loss": 0.3, "eval_accuracy": 0.9, "eval_runtime": 1}
    draw_curves([*history, evaluated], tmp_path / "both.png")
    with Image.open(tmp_path / "training.png") as training, Image.open(tmp_path / "both.png") as both:
        assert both.width > training.width
