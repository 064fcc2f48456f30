"""Plots of training curves and scores, drawn with matplotlib."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .colors import Axes, segmentation_palette
from .figures import PictureFile, add_legend, new_figure


MAX_COUNTED = 20  # A confusion matrix with more classes than this is drawn without numbers.
MAX_NAMED = 60  # A confusion matrix with more classes than this is drawn without class names.
MAX_CURVES = 10  # Maximum number of curves that each have a different color.
NUM_BINS = 15  # Bins of a reliability diagram.


def draw_confusion_matrix(matrix: np.ndarray, names: Sequence[str], file: PictureFile) -> None:
    """Draw a confusion matrix (K, K) with counts: one row per true class, one column per predicted class.

    The color of a cell is its share of the counts in its row. Raises `ValueError` if the number of names is not K.
    """
    matrix = np.asarray(matrix)
    if matrix.shape != (len(names), len(names)):
        raise ValueError(
            f"The confusion matrix has the shape {matrix.shape}, but there are {len(names)} class names. Give a "
            "matrix with one row and one column per class."
        )
    side = min(12.0, max(4.0, 2 + 0.45 * len(names)))  # Side of the figure in inches
    figure = new_figure(side, side)
    axes = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="answer", ylabel="right class")
    if len(names) <= MAX_NAMED:
        ticks = range(len(names))
        # Class names may contain "$", which must not start a formula
        axes.set_xticks(ticks, names, rotation=90, parse_math=False)
        axes.set_yticks(ticks, names, parse_math=False)
    if len(names) <= MAX_COUNTED:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, matrix[row, column], ha="center", va="center", color=color, fontsize=8)
    figure.savefig(file, dpi=120)


def draw_class_scores(scores: Mapping[str, float], file: PictureFile, label: str = "IoU") -> None:
    """Draw a bar for the score of each class, best first, and a line at their mean.

    Scores are in [0, 1], or NaN if a class does not occur. `label` is their name. Raises `ValueError` if there is no
    class.
    """
    if not scores:
        raise ValueError("There is no class to draw. Give the score of at least one class.")
    ranked = sorted(scores.items(), key=lambda item: (math.isnan(item[1]), -item[1]))
    known = [value for _, value in ranked if not math.isnan(value)]
    figure = new_figure(6, 0.8 + 0.22 * len(ranked))
    axes = figure.subplots()
    background = {"facecolor": "white", "linewidth": 0, "pad": 1}
    axes.barh(range(len(ranked)), [0 if math.isnan(value) else value for _, value in ranked], height=0.7)
    for place, (_, value) in enumerate(ranked):
        text = "does not occur" if math.isnan(value) else f"{value:.3f}"
        axes.text(0.01 + (0 if math.isnan(value) else value), place, text, va="center", fontsize=8, bbox=background)
    if known:
        mean = math.fsum(known) / len(known)
        axes.axvline(mean, color="black", linestyle="--", linewidth=1, label=f"mean {mean:.3f}")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set(xlabel=label, xlim=(0, 1.12), ylim=(len(ranked) - 0.4, -0.6), xticks=np.linspace(0, 1, 6))
    axes.set_yticks(range(len(ranked)), [name for name, _ in ranked], parse_math=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def draw_precision_recall(curves: Mapping[str, np.ndarray], file: PictureFile) -> None:
    """Draw the precision-recall curves of each class and their mean.

    A curve is the precision (R,) at recalls evenly spaced from 0 to 1, or NaN if the class does not occur, as returned
    by `DetectionMetric.precision_recall`. The legend shows the mean of each curve, the average precision. Raises
    `ValueError` if no class occurs.
    """
    known = {name: precision for name, precision in curves.items() if not np.isnan(precision).any()}
    if not known:
        raise ValueError("There is no class to draw: no class has objects.")
    figure = new_figure(6, 4.5)
    axes = figure.subplots()
    few = len(known) <= MAX_CURVES
    colors = dict(zip(curves, segmentation_palette(len(curves)) / 255, strict=True))
    for name, precision in known.items():
        named = {"color": colors[name], "label": f"{name} {precision.mean():.3f}"}
        look: dict[str, Any] = named if few else {"color": "lightgray"}
        axes.plot(np.linspace(0, 1, len(precision)), precision, linewidth=1.5 if few else 0.8, **look)
    if len(known) > 1:
        mean = np.mean(list(known.values()), axis=0)
        axes.plot(np.linspace(0, 1, len(mean)), mean, color="black", label=f"mean {mean.mean():.3f}", linewidth=2.2)
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.01), ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    add_legend(figure, loc="outside right upper")
    figure.savefig(file, dpi=120)


def draw_curves(log_history: Sequence[dict[str, Any]], file: PictureFile) -> None:
    """Draw the losses, scores and learning rate over the steps of a training run, `trainer.state.log_history`."""
    # Endings of the names of log entries that are not scores
    ignored = ("_loss", "_runtime", "_per_second", "_model_preparation_time")
    scores = sorted(
        {name for entry in log_history for name in entry if name.startswith("eval_") and not name.endswith(ignored)}
    )
    figure = new_figure(12 if scores else 8, 3.2)
    panels = figure.subplots(1, 3 if scores else 2)
    of_heads = sorted({name for entry in log_history if "loss" in entry for name in entry if name.endswith("_loss")})
    losses = {"loss": "training", "eval_loss": "validation", "eval_ema_loss": "validation, averaged weights"}
    losses = {name: name.removesuffix("_loss") for name in of_heads} or losses
    _draw_lines(panels[0], log_history, losses, "loss")
    if scores:
        _draw_lines(panels[1], log_history, {name: name.removeprefix("eval_") for name in scores}, "validation score")
    _draw_lines(panels[-1], log_history, {"learning_rate": ""}, "learning rate")
    figure.savefig(file, dpi=120)


def _draw_lines(axes: Axes, log_history: Sequence[dict[str, Any]], labels: dict[str, str], title: str) -> None:
    for name, label in labels.items():
        points = [(entry["step"], entry[name]) for entry in log_history if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
    axes.set(xlabel="step", title=title)
    if any(labels.values()) and axes.lines:
        axes.legend(frameon=False, fontsize=8)


def draw_calibration(
    before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray], file: PictureFile, has_risk: bool
) -> None:
    """Draw a reliability diagram of predictions before and after calibration: scores (N,) and correctness (N,).

    If `has_risk`, also draw the error rate of the most confident predictions over their share of all images.
    """
    figure = new_figure(9 if has_risk else 4.8, 4.2)
    panels = np.atleast_1d(figure.subplots(1, 1 + has_risk))
    panels[0].plot([0, 1], [0, 1], color="gray", linestyle="--", linewidth=1)
    for (scores, is_correct), label, color in ((before, "before", "tab:orange"), (after, "after", "tab:blue")):
        bins = np.minimum((scores * NUM_BINS).astype(int), NUM_BINS - 1)
        counts = np.bincount(bins, minlength=NUM_BINS)
        used, divisor = counts > 0, np.maximum(counts, 1)
        means, shares = (np.bincount(bins, own, NUM_BINS) / divisor for own in (scores, is_correct.astype(float)))
        panels[0].plot(means[used], shares[used], color=color, linewidth=1, label=label)
        panels[0].scatter(means[used], shares[used], s=8 + 150 * counts[used] / len(scores), color=color, alpha=0.6)
    panels[0].set(xlabel="score", ylabel="share of correct predictions", xlim=(0, 1), ylim=(0, 1))
    panels[0].legend(frameon=False, fontsize=8, loc="upper left", title="area: number of predictions")
    if has_risk:
        scores, is_correct = after
        order, counts = np.argsort(-scores, kind="stable"), np.arange(1, len(scores) + 1)
        panels[1].plot(counts / len(scores), np.cumsum(~is_correct[order]) / counts, linewidth=1.5, label="by score")
        panels[1].axhline(1 - is_correct.mean(), color="gray", linestyle="--", linewidth=1, label="random order")
        panels[1].set(xlabel="share of images that are answered", ylabel="error rate", xlim=(0, 1))
        panels[1].set_ylim(bottom=0)
        panels[1].legend(frameon=False, fontsize=8)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
