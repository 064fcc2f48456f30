"""Test that evaluation scores do not depend on the batch size, and that predictions are not kept in memory."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vit.evaluation.base import ImageResult
from hf_vit.evaluation.segmentation import SemanticSegmentationMetric
from hf_vit.tasks.semantic_segmentation import SemanticEvaluator
from hf_vit.training.evaluator_trainer import EvaluatorTrainer, draw_examples

from ..helpers.dense_trainings import (
    A_FEW_STEPS,
    ALL_TASKS,
    NAMES,
    NUM_VALIDATION,
    OBJECT_TASKS,
    SCENES_BATCHES,
    TASKS,
    make_trainer,
    scores_of,
    train,
    write_scenes,
)
from ..helpers.distributed import finish, start
from ..helpers.object_trainings import write_figures, write_objects


OPTIONS = {"object_detection": ["--keep_aspect_ratio", "true"]}  # with this option, the images of a batch are padded


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def data(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the data folder of each task."""
    folder = tmp_path_factory.mktemp("objects")
    objects = {"object_detection": write_objects(folder / "objects")}
    objects["keypoint_detection"] = write_figures(folder / "figures")
    return {**dict.fromkeys(TASKS, scenes), **objects}


def scores_one_by_one(trainer: EvaluatorTrainer) -> dict[str, float]:
    """Return the evaluation scores of a model that processes one image at a time, without padding."""
    evaluator, losses, model = trainer.evaluator, [], trainer.model.eval()
    evaluator.metric.reset()
    collator = replace(trainer.data_collator, keeps_targets=True)
    for example in (trainer.eval_dataset[index] for index in range(len(trainer.eval_dataset))):
        batch = collator([example])
        assert batch.get("patch_attention_mask", torch.ones(1)).all()
        (target,) = batch["targets"]
        given = {key: value for key, value in batch.items() if key not in ("targets", "files")}
        with torch.no_grad():
            if isinstance(batch.get("labels"), list):  # detection losses are normalized by the number of boxes
                weights = model.count_items(batch["labels"]).tolist()
                outputs = model(**given, num_items_in_batch=torch.ones(2))
                classes = float(outputs.loss_dict["loss_ce"])
                sums = [classes, float(outputs.loss) - classes]
            else:
                weights, sums = [1.0], [float(model(**given).loss)]
            losses.append((sums, weights))
            (result,) = evaluator.predict(model, batch)
        evaluator.metric.update([evaluator.metric.record(result.prediction, target)])
    sums, weights = (torch.tensor(values, dtype=torch.float64).sum(dim=0) for values in zip(*losses, strict=True))
    return {"loss": float((sums / weights).sum()), **evaluator.metric.compute()}


@pytest.mark.parametrize("task", ALL_TASKS)
def test_scores_are_those_of_single_images_at_any_batch_size(task: str, data: dict[str, Path], tmp_path: Path) -> None:
    trainer = make_trainer(task, data[task], tmp_path, *OPTIONS.get(task, []))
    if task == "universal_segmentation":
        # Disable masked attention, so that the loss depends on the last block only, as in evaluation.
        trainer.model.anneal_masks(1.0)
    expected = scores_one_by_one(trainer)
    assert any(0 < value < 1 for name, value in expected.items() if name != "loss")
    for batch_size in (1, 2, NUM_VALIDATION):
        trainer.args.per_device_eval_batch_size = batch_size
        assert scores_of(trainer) == pytest.approx(expected, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize(("tasks", "trained"), [(TASKS, "depth_estimation"), (OBJECT_TASKS, "object_detection")])
def test_two_processes_score_and_train_as_one(
    tasks: dict[str, Any], trained: str, data: dict[str, Path], tmp_path: Path
) -> None:
    two = tmp_path / "two"
    process = start("score_tasks", two, trained, *(f"{task}={data[task]}" for task in tasks), processes=2)
    expected = {task: scores_of(make_trainer(task, data[task], tmp_path / task)) for task in tasks}
    alone = train(trained, data[trained], tmp_path / "trained", *A_FEW_STEPS)
    finish(process, two)
    for rank in (0, 1):
        found = json.loads((two / f"process_{rank}.json").read_text())
        for batch_size in SCENES_BATCHES:
            for task in tasks:
                assert found[task][str(batch_size)] == pytest.approx(expected[task], rel=1e-9, nan_ok=True)
    scores = json.loads((two / "trained" / "validation_scores.json").read_text())
    assert [name for name, value in scores.items() if value is None] == [n for n, v in alone.items() if v is None]
    known = {name: value for name, value in scores.items() if value is not None}
    assert known == pytest.approx({name: alone[name] for name in known}, rel=1e-3, abs=1e-3)
    assert "torchrun --nproc_per_node 2" in (two / "trained" / "README.md").read_text()


class WatchingEvaluator(SemanticEvaluator):
    """Evaluator that counts for each batch the outputs still in memory, and records which images are drawn."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.maps: list[weakref.ref[torch.Tensor]] = []
        self.most_alive = 0
        self.drawn: list[list[Any]] = []

    def predict(self, *args: Any) -> list[ImageResult]:
        gc.collect()
        self.most_alive = max(self.most_alive, sum(kept() is not None for kept in self.maps))
        results = super().predict(*args)
        self.maps += [weakref.ref(result.prediction) for result in results]
        return results

    def draw(self, images: list[Any], *rest: Any) -> None:
        self.drawn.append(images)
        super().draw(images, *rest)


def test_an_evaluation_keeps_no_map_of_an_earlier_batch_and_draws_the_same_images(
    scenes: Path, tmp_path: Path
) -> None:
    trainer = make_trainer("semantic_segmentation", scenes, tmp_path)
    trainer.args.per_device_eval_batch_size = 1
    evaluator = WatchingEvaluator(trainer.processing_class, SemanticSegmentationMetric(NAMES))
    trainer.evaluator = evaluator
    trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    assert (len(evaluator.maps), evaluator.most_alive) == (NUM_VALIDATION, 0)
    for name in ("1.png", "2.png"):
        draw_examples(trainer, trainer.eval_dataset, tmp_path / name)
    first, second = evaluator.drawn
    assert len(first) == NUM_VALIDATION
    assert first == second
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()
