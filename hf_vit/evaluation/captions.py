"""Metrics of generated captions."""

import math
from typing import Any

from .base import StreamedMetric


class CaptionMetric(StreamedMetric):
    """BLEU-4 of all generated captions, and their mean ROUGE-L, both in [0, 1], computed by torchmetrics.

    BLEU (https://aclanthology.org/P02-1040) compares each generated caption with all captions of its image, in lower
    case and with the tokenizer "13a" of sacreBLEU. ROUGE-L (https://aclanthology.org/W04-1013) is the F1 of the
    longest common subsequence of a generated caption and the most similar caption of its image.
    """

    score_names = ("bleu_4", "rouge_l")

    def record(self, prediction: str, target: dict[str, Any]) -> tuple[str, list[str]]:
        """Return the generated caption and the captions of its image."""
        return prediction, target["captions"]

    def compute(self) -> dict[str, float]:
        """Return `bleu_4` and `rouge_l` of all images."""
        from torchmetrics.functional.text import rouge_score, sacre_bleu_score  # Imported lazily: the import is slow

        if not self.records:
            return dict.fromkeys(self.score_names, math.nan)
        texts, captions = map(list, zip(*self.records, strict=True))
        rouge = rouge_score(texts, captions, accumulate="best", rouge_keys="rougeL")["rougeL_fmeasure"]
        return {"bleu_4": float(sacre_bleu_score(texts, captions, lowercase=True)), "rouge_l": float(rouge)}
