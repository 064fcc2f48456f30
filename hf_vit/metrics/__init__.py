"""Metrics as modules of `evaluate` that need no network.

Each file holds one module and opens by its path too: `evaluate.load("hf_vit/metrics/macro_f1.py")`.
"""

from .confusion_matrix import ConfusionMatrix
from .macro_f1 import MacroF1
from .top_k_accuracy import TopKAccuracy


__all__ = ["ConfusionMatrix", "MacroF1", "TopKAccuracy"]
