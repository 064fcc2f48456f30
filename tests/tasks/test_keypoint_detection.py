"""Test the training of keypoint detection: baseline, flipping at test time, and images without boxes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTForKeypointDetection, HfViTImageProcessor
from hf_vit.evaluation.keypoints import KeypointMetric
from hf_vit.tasks.common.models import check_head
from hf_vit.tasks.keypoint_detection import KeypointEvaluator

from ..helpers.dense_trainings import CONFIG, make_trainer, scores_of
from ..helpers.models import SMALL, save_model
from ..helpers.object_trainings import POINTS


def target(box: list[float], keypoints: list[list[float]]) -> dict[str, Any]:
    return {"box": torch.tensor(box), "keypoints": torch.tensor(keypoints)}


def test_the_naive_baseline_is_the_mean_pose_in_the_box() -> None:
    targets = [
        target([0.0, 0.0, 10.0, 20.0], [[5.0, 0.0, 2.0], [0.0, 10.0, 1.0], [0.0, 0.0, 0.0]]),
        target([10.0, 10.0, 20.0, 20.0], [[11.0, 15.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    ]
    evaluator = KeypointEvaluator(HfViTImageProcessor(), KeypointMetric(POINTS))
    _, predict = evaluator.naive_baseline(targets)
    found = predict(target([100.0, 0.0, 200.0, 10.0], [[0.0, 0.0, 0.0]] * 3))
    # The last keypoint is not labeled in any image, so the baseline predicts the center of the box.
    expected = [[130.0, 2.5], [100.0, 5.0], [150.0, 5.0]]
    torch.testing.assert_close(found["keypoints"], torch.tensor(expected).double())
    assert not evaluator.has_annotations(target([0.0, 0.0, 1.0, 1.0], [[0.0, 0.0, 0.0]]))


def test_the_flip_test_averages_with_mirror_images(figures: Path, tmp_path: Path) -> None:
    trainers = [
        make_trainer("keypoint_detection", figures, tmp_path, "--flip_test", flip) for flip in ("true", "false")
    ]
    flipped, plain = map(scores_of, trainers)
    assert flipped["nme"] != plain["nme"]
    assert flipped["loss"] == plain["loss"]  # the evaluation loss does not use flipped images
    batch = trainers[0].data_collator([trainers[0].eval_dataset[0]])
    heatmaps = trainers[0].model.eval().predict_flipped(batch["pixel_values"]).heatmaps
    mirrored = trainers[0].model.predict_flipped(batch["pixel_values"].flip(-1)).heatmaps
    torch.testing.assert_close(mirrored.flip(-1)[:, [0, 2, 1]], heatmaps)  # a flip swaps left and right foot


def test_crops_flip_pairs_and_skeleton_are_those_of_the_options_and_the_data(figures: Path, tmp_path: Path) -> None:
    for options, padding in ([], 1.25), (["--box_padding", "1.5"], 1.5), (["--whole_image"], 1.0):
        trainer = make_trainer("keypoint_detection", figures, tmp_path, *options)
        processor, example = trainer.processing_class, trainer.eval_dataset[0]
        assert (processor.do_affine_crop, processor.box_padding) == (True, padding)
        whole = [0.0, 0.0, *map(float, example["image"].size)]
        assert (example["box"].tolist() == whole) == ("--whole_image" in options)
        share = trainer.model.options.object_share  # the pipeline compares it with whole images
        assert share == 1 if "--whole_image" in options else 0.05 < share < 0.5
    trainer = make_trainer("keypoint_detection", figures, tmp_path, "--flip_pairs", "top,left_foot")
    options = trainer.model.options
    assert [list(pair) for pair in options.flip_pairs] == [[0, 1]]
    assert [list(pair) for pair in options.skeleton] == [[0, 1], [0, 2]]
    assert options.hidden_size == 16


def test_a_fresh_head_has_instance_norm_and_a_saved_one_keeps_its_own(figures: Path, tmp_path: Path) -> None:
    def open_model(folder: Path | None, options: dict[str, Any], *arguments: str) -> HfViTForKeypointDetection:
        source = [] if folder is None else ["--model_name_or_path", str(folder)]
        overrides = json.dumps({**({} if source else CONFIG), "keypoint_config": options})
        given = [*source, "--config_overrides", overrides, *arguments]
        return make_trainer("keypoint_detection", figures, tmp_path / "out", *given).model

    keypoints, classifier = tmp_path / "keypoints", tmp_path / "classifier"
    config = HfViTConfig(**CONFIG, image_size=32, num_labels=5)  # the dataset has only 3 keypoints
    saved = HfViTForKeypointDetection(config)
    torch.nn.init.normal_(saved.keypoint_head.decoder.up2.norm.running_mean)
    for model, folder in ((saved, keypoints), (HfViTForImageClassification(config), classifier)):
        save_model(model, folder)
    for folder, options, norm in (
        (None, {"hidden_size": 16}, "instance"),
        (None, {"hidden_size": 16, "norm": "batch"}, "batch"),
        (classifier, {}, "instance"),
        (classifier, {"norm": "batch"}, "batch"),
        (keypoints, {"hidden_size": 8}, "instance"),
        (keypoints, {"norm": "instance"}, "instance"),
    ):
        assert open_model(folder, options).options.norm == norm
    # A saved classifier has no keypoint head, so the new head has the default type of normalization.
    assert open_model(classifier, {}, "--head", "simple").options.norm == "batch"
    kept = open_model(keypoints, {})
    assert kept.options.norm == "batch"
    statistics = saved.keypoint_head.decoder.up2.norm.running_mean.double()
    assert torch.equal(kept.keypoint_head.decoder.up2.norm.running_mean, statistics)


def test_a_training_of_a_version_with_another_norm_is_not_resumed(tmp_path: Path) -> None:
    before, now = (
        HfViTForKeypointDetection(HfViTConfig(**SMALL | {"keypoint_config": {"hidden_size": 16, "norm": norm}}))
        for norm in ("batch", "instance")
    )
    before.save_pretrained(tmp_path)
    check_head(str(tmp_path), before)
    with pytest.raises(ValueError, match=r"another architecture \(norm batch then, instance now\)"):
        check_head(str(tmp_path), now)
