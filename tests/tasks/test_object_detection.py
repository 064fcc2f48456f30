"""Test the training of object detection: baseline, multi-scale batches, changed classes, and loss normalization."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vit import HfViTForObjectDetection, HfViTImageProcessor
from hf_vit.evaluation.detection import DetectionMetric
from hf_vit.tasks.common.arguments import TaskArguments
from hf_vit.tasks.common.models import load_model
from hf_vit.tasks.object_detection import DetectionEvaluator

from ..helpers.dense_trainings import CONFIG, make_trainer
from ..helpers.models import TRAINING_CASES, save_model, small_config
from ..helpers.object_trainings import CLASSES
from ..helpers.references import draw_weights


def target(size: tuple[int, int], boxes: list[list[float]], labels: list[int], crowds: list[bool]) -> dict[str, Any]:
    return {
        "size": torch.tensor(size),
        "boxes": torch.tensor(boxes).reshape(-1, 4),
        "class_labels": torch.tensor(labels, dtype=torch.int64),
        "is_crowd": torch.tensor(crowds, dtype=torch.bool),
    }


def test_the_naive_baseline_is_the_average_place_of_each_class_without_crowds() -> None:
    targets = [
        target((10, 20), [[0, 0, 10, 10], [4, 0, 20, 10]], [0, 2], [False, False]),
        target((100, 100), [[20, 20, 30, 40], [0, 0, 99, 99]], [0, 1], [False, True]),
        target((7, 7), [], [], []),
    ]
    evaluator = DetectionEvaluator(HfViTImageProcessor(), DetectionMetric(["a", "b", "c"]), 5)
    _, predict = evaluator.naive_baseline(targets)
    found = predict(target((40, 10), [], [], []))
    assert found["class_labels"].tolist() == [0, 2]  # the baseline does not predict crowds
    torch.testing.assert_close(found["scores"], torch.tensor([2 / 3, 1 / 3]).double())
    expected = [[1.0, 4.0, 4.0, 28.0], [2.0, 0.0, 10.0, 40.0]]
    torch.testing.assert_close(found["boxes"], torch.tensor(expected).double())
    evaluator = DetectionEvaluator(HfViTImageProcessor(), DetectionMetric(["a"]), 5)
    box = [[0.0, 0.0, 5.0, 5.0]]
    assert [evaluator.has_annotations(target((9, 9), box, [0], [crowd])) for crowd in (True, False)] == [False, True]
    assert not evaluator.has_annotations(target((9, 9), [], [], []))


def test_batches_have_the_given_sizes_and_the_loss_is_a_sum_over_objects(objects: Path, tmp_path: Path) -> None:
    # Multiples of the patch size (4) close to the image size (24)
    several = [(20, 20), (24, 24), (28, 28)]
    for options, sizes in ([], None), (["--multi_scale", "true"], several):
        trainer = make_trainer("object_detection", objects, tmp_path, *options)
        assert trainer.data_collator.collator.sizes == sizes
        batches = (batch for _ in range(8) for batch in trainer.get_train_dataloader())
        assert {tuple(batch["pixel_values"].shape[-2:]) for batch in batches} <= set(sizes or [(24, 24)])
        (batch, *_) = trainer.get_eval_dataloader()
        assert batch["pixel_values"].shape[-2:] == (24, 24)

    trainer = make_trainer("object_detection", objects, tmp_path)
    found = trainer.evaluate()["eval_loss"]
    batch = trainer.data_collator([trainer.eval_dataset[index] for index in range(len(trainer.eval_dataset))])
    with torch.no_grad():
        # The loss of a batch is normalized by its total number of boxes.
        whole = trainer.model.eval()(batch["pixel_values"], batch["labels"])
    assert found == pytest.approx(float(whole.loss), rel=1e-9)


def test_validation_images_choose_the_threshold_and_no_others(objects: Path, tmp_path: Path) -> None:
    steps = ["--max_steps", "2", "--ema_decay", "0.9", "--eval_strategy", "no", "--save_strategy", "no"]
    trainer = make_trainer("object_detection", objects, tmp_path, *steps, "--learning_rate", "1e-3")
    trainer.train()
    trainer.choose_threshold()
    chosen, of_average = (trainer.thresholds[is_average].value for is_average in (False, True))
    assert chosen == trainer.evaluator.metric.best_threshold().value
    assert chosen != of_average
    trainer.save_model(_internal_call=True)
    for folder, threshold in ((tmp_path, chosen), (tmp_path / "ema", of_average)):
        opened = HfViTForObjectDetection.from_pretrained(folder)
        assert opened.options.score_threshold == threshold
    validation, trainer.eval_dataset = trainer.eval_dataset, None
    trainer.predict(validation)  # records that the validation split is used as a test split
    trainer.choose_threshold()
    assert trainer.model.options.score_threshold is None


def test_images_with_more_objects_than_queries_are_warned_of(objects: Path, tmp_path: Path, caplog: Any) -> None:
    def messages(num_queries: int) -> list[str]:
        caplog.clear()
        options = json.dumps({**CONFIG, "detection_config": {"decoder": "queries", "num_queries": num_queries}})
        make_trainer("object_detection", objects, tmp_path, "--config_overrides", options)
        return [message for message in caplog.messages if "num_queries" in message]

    assert not messages(2)
    (message,) = messages(1)
    assert message.startswith("3 of 13 images have more objects than num_queries=1, up to 2.")


def save_trained(case: str, folder: Path) -> HfViTForObjectDetection:
    """Save a model with two classes, together with its image processor, and return the model."""
    labels = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
    model = HfViTForObjectDetection(small_config(**TRAINING_CASES[case].overrides, num_labels=2, **labels))
    draw_weights(model)
    save_model(model, folder)
    return model


@pytest.mark.parametrize(
    ("case", "options", "fresh"),
    [
        ("queries", {"num_queries": 9}, {"queries.weight"}),
        ("deformable", {"num_queries": 3}, {"query_features.weight", "query_boxes.weight"}),
        ("deformable", {"num_groups": 1}, {"query_features.weight", "query_boxes.weight"}),
    ],
)
def test_changed_query_options_reinitialize_only_their_weights(
    case: str, options: dict[str, int], fresh: set[str], tmp_path: Path
) -> None:
    before, given = save_trained(case, tmp_path).state_dict(), {"detection_config": options}
    arguments = TaskArguments(dataset_name="data", model_name_or_path=str(tmp_path), config_overrides=given)
    after = load_model(HfViTForObjectDetection, arguments)[0].state_dict()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {f"detection_head.{name}" for name in fresh}
    assert all(after[name].isfinite().all() for name in changed)


@pytest.mark.parametrize("case", ["queries", "deformable"])
def test_other_classes_get_fresh_weights_and_boxes_keep_theirs(case: str, tmp_path: Path) -> None:
    before = save_trained(case, tmp_path).state_dict()
    arguments = TaskArguments(dataset_name="data", model_name_or_path=str(tmp_path))
    tuned, _ = load_model(HfViTForObjectDetection, arguments, CLASSES)
    assert list(tuned.config.id2label.values()) == CLASSES
    after = tuned.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("classifier" in name or "class_head" in name for name in changed)
