"""What is left of a scored model beside its weights: numbers as JSON, pictures, and the answer for every image."""

import json
from pathlib import Path

import numpy as np
from transformers.trainer_utils import PredictionOutput

from ..metrics import ConfusionMatrix
from ..visualize import draw_confusion_matrix
from ..visualize.plots import TIMES


def write_scores(folder: Path, split: str, output: PredictionOutput, names: list[str]) -> dict[str, float]:
    """Writes the scores of a classifier on a split, its confusion matrix, and its answers.

    Args:
        folder: Where to write `{split}_results.json`, `{split}_confusion_matrix.json` and `.png`, and
            `{split}_predictions.jsonl` with a line per image.
        split: Name of the split, which is also the prefix of the metrics.
        output: What `trainer.predict` returned: logits (N, K), labels (N,) and metrics.
        names: The K class names.

    Returns:
        The scores without their prefix, and without times.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logits = np.asarray(output.predictions, dtype=np.float64)
    probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    answers, labels = logits.argmax(axis=1), np.asarray(output.label_ids)
    matrix = ConfusionMatrix(keep_in_memory=True).compute(
        predictions=answers, references=labels, num_labels=len(names)
    )["confusion_matrix"]
    lines = (
        {"index": index, "label": names[label], "prediction": names[answer], "score": round(scores[answer], 6)}
        for index, (label, answer, scores) in enumerate(zip(labels, answers, probabilities.tolist(), strict=True))
    )
    scores = {
        name.removeprefix(f"{split}_"): value for name, value in output.metrics.items() if not name.endswith(TIMES)
    }
    for name, text in {
        f"{split}_results.json": json.dumps(scores, indent=2) + "\n",
        f"{split}_confusion_matrix.json": json.dumps({"labels": names, "confusion_matrix": matrix.tolist()}) + "\n",
        f"{split}_predictions.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    draw_confusion_matrix(matrix, names, folder / f"{split}_confusion_matrix.png")
    return scores
