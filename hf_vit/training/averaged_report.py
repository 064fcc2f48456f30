"""What the report of a training says of its averaged weights."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

from .averaging import AVERAGE_FOLDER
from .averaging_trainer import AveragingTrainer


def report_average(trainer: AveragingTrainer, split: str, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Writes the scores that averaged weights have just got as `ema/{split}_scores.json` of the output folder.

    Args:
        trainer: Has scored a split, at last.
        split: Name of the split.
        names: Of the scores.

    Returns:
        These scores as a column of a model card, by its title; nothing where no weights are averaged.
    """
    if trainer.average is None:
        return {}
    scores = {name: trainer.averaged_scores[name] for name in names}
    folder = Path(trainer.args.output_dir) / AVERAGE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    known = {name: None if math.isnan(score) else score for name, score in scores.items()}
    (folder / f"{split}_scores.json").write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    return {f"averaged weights (`{AVERAGE_FOLDER}/`)": scores}
