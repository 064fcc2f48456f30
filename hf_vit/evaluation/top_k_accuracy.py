"""Top-k accuracy as a module of `evaluate`."""

import datasets
import evaluate
import numpy as np


class TopKAccuracy(evaluate.Metric):
    """Share of the images whose right class is among the k likeliest.

    `compute(predictions=, references=, k=1)` takes the class numbers of each image, the likeliest first, at least k of
    them, and the right class number. It returns `{"accuracy": ...}` for k = 1, else `{"top_{k}_accuracy": ...}`.
    """

    def _info(self) -> evaluate.MetricInfo:
        """Describes the inputs."""
        return evaluate.MetricInfo(
            description="Share of the images whose right class is among the k likeliest.",
            citation="",
            inputs_description="predictions: (N, at least k) class numbers, the likeliest first. references: (N,).",
            features=datasets.Features(
                {"predictions": datasets.Sequence(datasets.Value("int64")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[list[int]], references: list[int], k: int = 1) -> dict[str, float]:
        """Counts the hits.

        Raises:
            ValueError: if an image has fewer than k class numbers.
        """
        ranked = np.asarray(predictions)
        if k < 1 or ranked.shape[1] < k:
            raise ValueError(f"k={k} must be at least 1 and at most {ranked.shape[1]}, the class numbers per image.")
        hits = (ranked[:, :k] == np.asarray(references)[:, None]).any(axis=1)
        return {"accuracy" if k == 1 else f"top_{k}_accuracy": float(hits.mean())}
