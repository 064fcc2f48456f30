"""Evaluate image features by k-nearest neighbors, a linear probe and retrieval of images of the same class."""

# Shapes: M training images, B test images, D feature size

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..evaluation.features import classify_by_neighbors, retrieval_average_precision
from ..outputs import check_outputs, check_writable, free_folder, record_outputs, write_atomically
from .files import FeatureSplit, open_train_and_test
from .probe import fit_probe


# Maps a metric to the title and the number format of its column in the printed table
COLUMNS = {
    "knn_accuracy": ("k-NN", ".2%"),
    "linear_probe_accuracy": ("linear probe", ".2%"),
    "linear_probe_penalty": ("penalty", ".3g"),
    "retrieval_map": ("mAP in train", ".2%"),
    "retrieval_map_among_scored": ("mAP among these", ".2%"),
}
MOST_FREQUENT = "most frequent class"
FILE_NAME = "evaluation.json"
MAX_PAIRS = 2**24  # Maximum number of image pairs compared at once, to limit memory


def evaluate_features(train: FeatureSplit, test: FeatureSplit) -> dict[str, Any]:
    """Evaluates all features that consist of one vector per image, given training and test images.

    Returns:
        A dict with the model, the names and sizes of the splits, and "scores": a dict with the metrics of `COLUMNS`
        for each feature, and for a baseline that always predicts the most frequent training class.
    """
    names = sorted({*train.labels, *test.labels})
    numbers = {name: number for number, name in enumerate(names)}
    classes, truth = (torch.tensor([numbers[label] for label in split.labels]) for split in (train, test))
    most_frequent, _ = Counter(train.labels).most_common(1)[0]
    share = test.labels.count(most_frequent) / len(test.labels)
    scores = {
        feature: score(train.read_labeled(feature), classes, test.read_labeled(feature), truth)
        for feature in train.settings.features
        if feature in test.settings.features and feature != "patches"
    }
    return {
        "model": train.settings.model,
        "splits": [train.name, test.name],
        "images": [len(train.labels), len(test.labels)],
        "classes": len(names),
        "scores": {**scores, MOST_FREQUENT: {"knn_accuracy": share, "linear_probe_accuracy": share}},
    }


def score(known: Tensor, classes: Tensor, features: Tensor, truth: Tensor) -> dict[str, float]:
    """Returns the metrics listed in `COLUMNS` for one kind of feature vector.

    Args:
        known: Features of the training images, (M, D).
        classes: Class numbers of the training images, (M,).
        features: Features of the test images, (B, D).
        truth: Class numbers of the test images, (B,).
    """
    probe = fit_probe(known, classes, int(classes.max()) + 1)
    neighbors, precisions, among = list[Tensor](), list[Tensor](), list[Tensor]()
    # Test images are processed in chunks, to limit the memory for the distances between images.
    for rows in torch.arange(len(truth)).split(max(1, MAX_PAIRS // max(len(truth), len(classes)))):
        queries, own = features[rows], truth[rows]
        neighbors.append(classify_by_neighbors(queries, known, classes))
        precisions.append(retrieval_average_precision(queries, own, known, classes))
        among.append(retrieval_average_precision(queries, own, features, truth, own=rows))
    return {
        "knn_accuracy": float((torch.cat(neighbors) == truth).double().mean()),
        "linear_probe_accuracy": float((probe.predict(features) == truth).double().mean()),
        "linear_probe_penalty": probe.penalty,
        "retrieval_map": float(torch.cat(precisions).nanmean()),
        "retrieval_map_among_scored": float(torch.cat(among).nanmean()),
    }


def format_table(scores: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a text table with one line of metrics for each feature."""
    table = pd.DataFrame(scores).T.reindex(columns=[*COLUMNS])
    titles = [f" {title}" for title, _ in COLUMNS.values()]
    formatters = [f" {{:{each}}}".format for _, each in COLUMNS.values()]
    return table.to_string(header=titles, formatters=formatters, na_rep="-")


def evaluate_folders(
    train: str | Path,
    test: str | Path | None = None,
    *,
    output_dir: str | Path | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Evaluates folders of features and writes the scores. Equivalent to `hf-vit features evaluate`.

    Args:
        train: Folder of features. The features of its split "train" are used for training and as references.
        test: Folder of the features to evaluate; by default the folder of the training images.
        output_dir: Folder for evaluation.json; by default the feature folder or, if two folders are given, a new
            subfolder of the second one.
        overwrite: Replace evaluation.json of an earlier run.
        report: Function that receives progress messages.

    Returns:
        The result of `evaluate_features`.

    Raises:
        ValueError: if the features come from different models, or an existing file may not be replaced.
        OSError: if a folder has no features, or the output cannot be written.
    """
    folders = [Path(folder) for folder in (train, test) if folder is not None]
    folder = folders[-1] if test is None else folders[-1] / f"evaluation-beside-{folders[0].resolve().name}"
    folder = Path(output_dir) if output_dir else folder if test is None else free_folder(folder)
    check_writable(folder)
    check_outputs([folder / FILE_NAME], overwrite=overwrite)
    train_split, test_split = open_train_and_test(folders)
    found = evaluate_features(train_split, test_split)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FILE_NAME, json.dumps(found, indent=2) + "\n")
    (num_train, num_test), classes = found["images"], found["classes"]
    report(f"{num_test:,} {test_split.name} images and {num_train:,} train images of {classes} classes")
    report(format_table(found["scores"]))
    report(f"Scores written to {folder / FILE_NAME}")
    record_outputs([folder / FILE_NAME])
    return found
