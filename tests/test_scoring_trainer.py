"""Evaluation of dense predictions: image by image, whatever the batches and processes, and nothing is kept."""

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vit.training import Scored, ScoringTrainer, SemanticScorer
from hf_vit.training.scoring_trainer import draw_examples

from .dense_trainings import (
    A_FEW_STEPS,
    NAMES,
    NUM_VALIDATION,
    SCENES_BATCHES,
    TASKS,
    make_trainer,
    scores_of,
    train,
    write_scenes,
)
from .distributed import finish, start


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"))


def scores_one_by_one(trainer: ScoringTrainer) -> dict[str, float]:
    """Scores each image alone, unpadded, as a user would."""
    scorer, losses = trainer.scorer, []
    scorer.metric.reset()
    trainer.model.eval()
    collator = trainer.data_collator
    collator.keeps_targets = True
    for index in range(NUM_VALIDATION):
        batch = collator([trainer.eval_dataset[index]])
        assert batch["patch_attention_mask"].all()
        (target,) = batch["targets"]
        with torch.no_grad():
            given = {key: value for key, value in batch.items() if key not in ("targets", "files")}
            losses.append(float(trainer.model(**given).loss))
            (result,) = scorer.predict(trainer.model, batch)
        scorer.metric.update([scorer.metric.record(result.prediction, target)])
    return {"loss": math.fsum(losses) / len(losses), **scorer.metric.compute()}


@pytest.mark.parametrize("task", TASKS)
def test_scores_are_those_of_single_images_at_any_batch_size(task: str, scenes: Path, tmp_path: Path) -> None:
    trainer = make_trainer(task, scenes, tmp_path)
    if task == "universal_segmentation":
        trainer.model.anneal_masks(1.0)  # then the loss is that of the last block, as in an evaluation
    expected = scores_one_by_one(trainer)
    assert any(0 < value < 1 for name, value in expected.items() if name != "loss")
    for batch_size in (1, 2, NUM_VALIDATION):
        trainer.args.per_device_eval_batch_size = batch_size
        assert scores_of(trainer) == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_two_processes_score_and_train_as_one(scenes: Path, tmp_path: Path) -> None:
    process = start("score_scenes", tmp_path / "two", scenes, processes=2)
    expected = {task: scores_of(make_trainer(task, scenes, tmp_path / task)) for task in TASKS}
    trained = train("depth_estimation", scenes, tmp_path / "trained", *A_FEW_STEPS)
    finish(process, tmp_path / "two")
    for rank in (0, 1):
        found = json.loads((tmp_path / "two" / f"process_{rank}.json").read_text())
        for batch_size in SCENES_BATCHES:
            for task in TASKS:
                assert found[task][str(batch_size)] == pytest.approx(expected[task], rel=1e-9, nan_ok=True)
    scores = json.loads((tmp_path / "two" / "trained" / "validation_scores.json").read_text())
    assert scores == pytest.approx(trained, rel=1e-3, abs=1e-3)
    assert "torchrun --nproc_per_node 2" in (tmp_path / "two" / "trained" / "README.md").read_text()


class WatchingScorer(SemanticScorer):
    """Looks at each batch what is left of the earlier ones."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.maps: list[weakref.ref[torch.Tensor]] = []
        self.most_alive = 0

    def predict(self, *args: Any) -> list[Scored]:
        gc.collect()
        self.most_alive = max(self.most_alive, sum(kept() is not None for kept in self.maps))
        results = super().predict(*args)
        self.maps += [weakref.ref(result.prediction) for result in results]
        return results


def test_an_evaluation_keeps_no_map_of_an_earlier_batch(scenes: Path, tmp_path: Path) -> None:
    trainer = make_trainer("semantic_segmentation", scenes, tmp_path)
    trainer.args.per_device_eval_batch_size = 1
    trainer.scorer = WatchingScorer(trainer.processing_class, NAMES)
    trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    assert (len(trainer.scorer.maps), trainer.scorer.most_alive) == (NUM_VALIDATION, 0)


def test_every_evaluation_draws_the_same_images(scenes: Path, tmp_path: Path) -> None:
    drawn: list[list[Any]] = []

    class DrawingScorer(SemanticScorer):
        def draw(self, images: list[Any], *rest: Any) -> None:
            drawn.append(images)
            super().draw(images, *rest)

    trainer = make_trainer("semantic_segmentation", scenes, tmp_path)
    trainer.scorer = DrawingScorer(trainer.processing_class, NAMES)
    for name in ("1.png", "2.png"):
        draw_examples(trainer, trainer.eval_dataset, tmp_path / name)
    assert len(drawn[0]) == NUM_VALIDATION
    assert drawn[0] == drawn[1]
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()
