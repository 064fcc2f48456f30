"""Test that scores do not depend on image order, batch size, number of processes and array type."""

import json
import math
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ..helpers import dense, distributed, objects
from ..helpers.dense import NUM_IMAGES, scores_of_processes
from .reference import score


METRICS = {**dense.METRICS, **objects.METRICS}


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply the function `change` to each value of a prediction or target, and return the result."""
    return {key: change(item) for key, item in value.items()} if isinstance(value, dict) else change(value)


@pytest.mark.parametrize("name", METRICS)
def test_neither_batches_nor_order_change_a_score(name: str) -> None:
    make_metric, image = METRICS[name]
    metric = make_metric()
    records = [metric.record(*image(number)) for number in range(NUM_IMAGES)]
    metric.update(records)
    expected = metric.compute()
    assert all(math.isfinite(value) if name in dense.METRICS else 0 < value < 1 for value in expected.values())
    for seed in range(5):
        shuffled = random.Random(seed).sample(records, NUM_IMAGES)
        metric.reset()
        for start in range(0, NUM_IMAGES, seed + 2):
            metric.update(pickle.loads(pickle.dumps(shuffled[start : start + seed + 2])))
        assert metric.compute() == expected


@pytest.mark.parametrize("kind", [dense, objects])
def test_two_processes_score_as_one(kind: Any, tmp_path: Path) -> None:
    name = kind.__name__.rpartition(".")[2]
    distributed.finish(distributed.start("score_predictions", tmp_path, name, processes=2), tmp_path)
    alone = {key: score(make(), *map(image, range(NUM_IMAGES))) for key, (make, image) in kind.METRICS.items()}
    assert scores_of_processes(kind.METRICS, batch_size=4) == alone
    for rank in range(2):
        assert json.loads((tmp_path / f"process_{rank}.json").read_text()) == alone


@pytest.mark.parametrize("name", METRICS)
def test_without_images_scores_are_nan_and_nothing_is_printed(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    make_metric, image = METRICS[name]
    metric = make_metric()
    scores = metric.compute()
    assert tuple(scores) == metric.score_names
    assert all(math.isnan(value) for value in scores.values())
    if name in objects.METRICS:
        assert all(math.isnan(value) for values in metric.per_class().values() for value in values.values())
    score(metric, image(0))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", METRICS)
def test_tensors_of_low_precision_score_as_arrays(name: str) -> None:
    def as_tensor(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        tensor = torch.from_numpy(value)
        return tensor.bfloat16().requires_grad_() if tensor.is_floating_point() else tensor

    def as_array(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().double().numpy() if is_float else value

    make_metric, image = METRICS[name]
    tensors = [[mapped(as_tensor, part) for part in image(number)] for number in (0, 5)]
    arrays = [[mapped(as_array, part) for part in own] for own in tensors]
    assert score(make_metric(), *tensors) == pytest.approx(score(make_metric(), *arrays), rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", dense.METRICS)
def test_a_record_does_not_grow_with_the_pixels_and_another_size_is_refused(name: str) -> None:
    make_metric, image = METRICS[name]
    prediction, target = image(0)

    def enlarged(value: Any) -> Any:
        is_map = isinstance(value, np.ndarray) and value.ndim > 1
        return value.repeat(4, axis=-1).repeat(4, axis=-2) if is_map else value

    small = len(pickle.dumps(make_metric().record(prediction, target)))
    large = len(pickle.dumps(make_metric().record(mapped(enlarged, prediction), mapped(enlarged, target))))
    # Masks are stored in run-length encoding, so their size grows at most in proportion to the length of the contour.
    assert large < small * (6 if name == "instance" else 1.1)
    with pytest.raises(ValueError, match=r"112x130 and 120x146\. Resize the prediction"):
        make_metric().record(prediction, image(1)[1])


@pytest.mark.parametrize("name", objects.METRICS)
def test_predictions_that_are_not_finite_are_refused(name: str) -> None:
    make_metric, image = METRICS[name]
    found, truth = image(0)
    for key in set(found) - {"class_labels"}:
        with pytest.raises(ValueError, match=f"predicted {key} are not finite .* Training may have diverged"):
            make_metric().record({**found, key: found[key] * math.nan}, truth)
