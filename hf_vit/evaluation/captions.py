"""Metrics of generated captions."""

import math
import re
from functools import partial
from itertools import chain
from typing import Any

from transformers.utils import logging

from .base import StreamedMetric


logger = logging.get_logger(__name__)


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
        # Imported lazily: the import is slow
        from torchmetrics.functional.text import rouge_score, sacre_bleu_score
        from torchmetrics.functional.text.sacre_bleu import _SacreBLEUTokenizer

        if not self.records:
            return dict.fromkeys(self.score_names, math.nan)
        texts, captions = map(list, zip(*self.records, strict=True))
        if unread := [text for text in chain.from_iterable(captions) if not re.search("[a-zA-Z0-9]", text)]:
            logger.warning_once(
                f"{len(unread)} captions have no letters a to z and no digits, such as {unread[0]!r}. ROUGE-L ignores "
                "all other letters, so it is 0 even for identical captions. BLEU-4 treats a text without spaces as "
                "one word."
            )
        # BLEU compares lengths with the first of the captions that are closest in length; sacreBLEU uses the shortest.
        tokenize = partial(_SacreBLEUTokenizer.tokenize, tokenize="13a", lowercase=True)
        captions = [sorted(own, key=lambda text: len(tokenize(text))) for own in captions]
        rouge = rouge_score(texts, captions, accumulate="best", rouge_keys="rougeL")["rougeL_fmeasure"]
        return {"bleu_4": float(sacre_bleu_score(texts, captions, lowercase=True)), "rouge_l": float(rouge)}
