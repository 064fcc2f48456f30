"""Baseline that ignores the images."""

import numpy as np
from accelerate.utils import gather_object
from transformers import TrainingArguments

from ..data.datasets import TargetDataset
from .base import BaseEvaluator, Evaluator


MAX_BASELINE_IMAGES = 5000  # maximum number of training images from which the baseline is computed


def score_naive_baseline(
    evaluator: BaseEvaluator,
    args: TrainingArguments,
    train: TargetDataset,
    evaluated: TargetDataset,
    most: int = MAX_BASELINE_IMAGES,
) -> dict[str, dict[str, float]]:
    """Evaluate the best constant predictor, which ignores images. Return its scores by its name.

    The predictor is computed from at most `most` evenly spaced training images. All processes share the work. The
    scores also remain in the metric.
    """
    assert isinstance(evaluator, Evaluator)
    shows = args.local_process_index == 0 and not args.disable_tqdm
    count = len(train)
    if count > most:
        train = train.select(np.linspace(0, count - 1, most).round().astype(int).tolist())
    name, predict = evaluator.naive_baseline(train.read_targets(shows))
    share = evaluated.select(range(args.process_index, len(evaluated), args.world_size))
    records = [evaluator.metric.record(predict(target), target) for target in share.read_targets(shows)]
    evaluator.metric.reset()
    evaluator.metric.update(gather_object(records))
    return {f"{name} (of {most:,} training images)" if count > most else name: evaluator.metric.compute()}
