"""Evaluation of features: nearest neighbors, a linear probe, and retrieval of images of the same class.

Shapes: M training images, B test images, D features.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..evaluation.features import classify_by_neighbors, probe, retrieval_average_precision
from ..training.checkpoints import write_whole
from .files import FeatureSplit


# Titles and formats of the columns of the table
COLUMNS = {
    "knn_accuracy": ("k-NN", ".2%"),
    "linear_probe_accuracy": ("linear probe", ".2%"),
    "linear_probe_C": ("C", "g"),
    "retrieval_map": ("mAP in train", ".2%"),
    "retrieval_map_among_scored": ("mAP among these", ".2%"),
}
MOST_FREQUENT = "most frequent class"
PAIRS_AT_A_TIME = 2**24  # of a test image and one that it is compared with
FILE_NAME = "evaluation.json"


def evaluate_features(train: FeatureSplit, test: FeatureSplit) -> dict[str, Any]:
    """Evaluates every feature that is one vector an image.

    Args:
        train: Features to train on, and to search.
        test: Features that are evaluated.

    Returns:
        By feature, and for the baseline of the most frequent class of the training images, the scores
        that `COLUMNS` names, in [0, 1]; beside them the splits, their sizes and the model.

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if a class has a single training image.
    """
    names = sorted({*train.labels, *test.labels})
    numbers = {name: number for number, name in enumerate(names)}
    classes, truth = (torch.tensor([numbers[label] for label in split.labels]) for split in (train, test))
    most_frequent, _ = Counter(train.labels).most_common(1)[0]
    share = test.labels.count(most_frequent) / len(test.labels)
    scores = {
        feature: score(train.read(feature), classes, test.read(feature), truth)
        for feature in train.vectors
        if feature in test.vectors
    }
    return {
        "model": train.settings.model,
        "splits": [train.name, test.name],
        "images": [len(train.labels), len(test.labels)],
        "classes": len(names),
        "scores": {**scores, MOST_FREQUENT: {"knn_accuracy": share, "linear_probe_accuracy": share}},
    }


def score(known: Tensor, classes: Tensor, features: Tensor, truth: Tensor) -> dict[str, float]:
    """Returns the scores of features (B, D) of classes `truth` (B,) beside known ones (M, D) of `classes` (M,)."""
    answers, strength = probe(known.numpy(), classes.numpy(), features.numpy())
    neighbors, precisions, among = list[Tensor](), list[Tensor](), list[Tensor]()
    # as many queries at a time as can be compared with all others
    for rows in torch.arange(len(truth)).split(max(1, PAIRS_AT_A_TIME // max(len(truth), len(classes)))):
        queries, own = features[rows], truth[rows]
        neighbors.append(classify_by_neighbors(queries, known, classes))
        precisions.append(retrieval_average_precision(queries, own, known, classes))
        among.append(retrieval_average_precision(queries, own, features, truth, own=rows))
    return {
        "knn_accuracy": float((torch.cat(neighbors) == truth).double().mean()),
        "linear_probe_accuracy": float(np.mean(answers == truth.numpy())),
        "linear_probe_C": strength,
        "retrieval_map": float(torch.cat(precisions).nanmean()),
        "retrieval_map_among_scored": float(torch.cat(among).nanmean()),
    }


def format_table(scores: Mapping[str, Mapping[str, float]]) -> str:
    """Returns scores by feature as lines of text."""
    rows = [["", *(title for title, _ in COLUMNS.values())]]
    for name, found in scores.items():
        cells = (format(found[column], spec) if column in found else "-" for column, (_, spec) in COLUMNS.items())
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])] for name, *cells in rows]
    return "\n".join(map("  ".join, aligned))


def report(train: FeatureSplit, test: FeatureSplit, folder: Path, echo: Callable[[str], None]) -> None:
    """Evaluates features, writes evaluation.json and reports what is in it.

    Args:
        train: Features to train on, and to search.
        test: Features that are evaluated.
        folder: Where to write.
        echo: Prints lines of text for the user.
    """
    found = evaluate_features(train, test)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE_NAME, json.dumps(found, indent=2) + "\n")
    echo(
        f"{len(test.labels):,} {test.name} images of {found['classes']} classes beside {len(train.labels):,} of train"
    )
    echo(format_table(found["scores"]))
    echo(f"The same as JSON: {folder / FILE_NAME}")
