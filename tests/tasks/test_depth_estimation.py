"""Test the training of depth estimation: evaluation and baseline."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit import HfViTConfig, HfViTForDepthEstimation, HfViTImageProcessor
from hf_vit.evaluation.baseline import score_naive_baseline
from hf_vit.evaluation.depth import DepthMetric
from hf_vit.model.task_configurations import HfViTDepthConfig
from hf_vit.runs.evaluate import evaluate
from hf_vit.tasks import depth_estimation
from hf_vit.tasks.common.models import load_model
from hf_vit.tasks.depth_estimation import DepthArguments, DepthEvaluator, choose_max_depth
from hf_vit.training import HfViTTrainingArguments

from ..helpers.dense_trainings import (
    A_FEW_STEPS,
    ALL_TASKS,
    CONFIG,
    arguments_of,
    make_trainer,
    scores_of,
    train,
)
from ..helpers.options import run


TASK = "depth_estimation"
RELATIVE = {"depth_estimation_type": "relative"}


def config_of(changes: dict[str, Any]) -> list[str]:
    return ["--config_overrides", json.dumps({**CONFIG, "depth_config": {**CONFIG["depth_config"], **changes}})]


def test_the_naive_baseline_is_the_mean_of_what_is_valid_at_each_pixel() -> None:
    depths = [torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]])]
    _, predict = DepthEvaluator(None, DepthMetric(max_depth=10.0), HfViTDepthConfig()).naive_baseline(depths)
    # Pixels that are invalid in all depth maps get the mean of all valid depths.
    mean = torch.tensor([[2.0, 2.0], [2.5, 4.0]]).double()
    torch.testing.assert_close(predict(depths[0]), mean)
    assert predict(torch.ones(4, 6)).shape == (4, 6)
    options = HfViTDepthConfig(depth_estimation_type="relative")
    relative = DepthEvaluator(None, DepthMetric(max_depth=10.0, alignment="scale_shift"), options)
    torch.testing.assert_close(relative.naive_baseline(depths)[1](depths[0]), 1 / mean)


def test_options_set_the_metric_and_the_baseline_uses_few_images(scenes: Path, tmp_path: Path) -> None:
    trainer = make_trainer(TASK, scenes, tmp_path)
    train, scored = trainer.train_dataset.dataset, trainer.eval_dataset
    known = trainer.evaluator, trainer.args
    ((name, whole),) = score_naive_baseline(*known, train, scored).items()
    ((short_name, scores),) = score_naive_baseline(*known, train, scored, most=2).items()
    assert short_name == f"{name} (of 2 training images)"
    (two,) = score_naive_baseline(*known, train.select([0, len(train) - 1]), scored).values()
    assert scores == two != whole
    options = ["--eval_crop", "garg", "--eval_alignment", "median", "--min_eval_depth", "1", "--max_eval_depth", "5"]
    metric = make_trainer(TASK, scenes, tmp_path, *options).evaluator.metric
    assert (metric.crop, metric.alignment, metric.min_depth, metric.max_depth) == ("garg", "median", 1, 5)
    metric = make_trainer(TASK, scenes, tmp_path).evaluator.metric
    assert (metric.crop, metric.alignment, metric.max_depth) == (None, None, 10)


def test_relative_depth_is_trained_and_evaluated_after_alignment(scenes: Path, tmp_path: Path) -> None:
    scores = train(TASK, scenes, tmp_path / "out", *A_FEW_STEPS, *config_of(RELATIVE))
    assert 0 < scores["abs_rel"] < 1
    card = (tmp_path / "out" / "README.md").read_text()
    for part in (
        "| evaluation | the whole image, depths between 0.001 and 10 m, fitted in each image: scale and shift |",
        "| head | dpt, relative inverse depth |\n| loss | ssi |\n| input size | 16 x 16 pixels in training, in",
        *("| rmse (m) | ", "| silog (x 100) | ", "up to scale and shift"),
        "Lower is better for abs_rel, rmse, log10, rmse_log, silog.",
    ):
        assert part in card


def test_an_evaluation_on_the_training_data_uses_its_data_options(scenes: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(scenes)
    trained = train(TASK, scenes, tmp_path / "out", "--depth_scale", "700", *A_FEW_STEPS)
    for data, is_same in ((scenes, True), (tmp_path / "other", False)):
        saved = {"model_name_or_path": str(tmp_path / "out"), "dataset_name": str(data), "use_cpu": True}
        evaluate({**saved, "output_dir": str(tmp_path / f"{is_same}")}, lambda _: None)
        scores = json.loads((tmp_path / f"{is_same}" / "validation_scores.json").read_text())
        assert (scores == pytest.approx(trained, rel=1e-5)) == is_same


def test_mistakes_are_found_before_training(scenes: Path, tmp_path: Path) -> None:
    far = r"No train image has annotations: their depths are between 2000 and 6000 meters, but only depths"
    far += r" between 0\.001 and 10 are used\. Set --depth_scale"
    near = r"depths are between 2 and 6 meters, but only depths between 0\.001 and 1 are used"
    relative = "median scales meters, but the model predicts relative"
    for options, message in (
        (["--depth_scale", "1"], far),
        (["--max_eval_depth", "1"], near),
        (["--depth_scale", "inf"], "depth_scale=inf must be more than 0"),
        (["--depth_scale", "nan"], "depth_scale=nan must be more than 0"),
        (["--max_eval_depth", "0"], r"max_eval_depth=0\.0 must be more than 0"),
        (["--eval_alignment", "scale_shift"], "scale_shift fits inverse depth, but the model predicts meters"),
        (["--eval_alignment", "median", *config_of(RELATIVE)], relative),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(TASK, scenes, tmp_path, *options)


@pytest.fixture(scope="module")
def streets(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return scenes with sparse depths of 20 to 60 meters in KITTI format, in which 256 units are one meter."""
    folder = tmp_path_factory.mktemp("streets") / "streets"
    shutil.copytree(scenes, folder)
    rng = np.random.default_rng(0)
    for file in folder.glob("*/depths/*.png"):
        meters = np.asarray(Image.open(file)) / 100
        Image.fromarray((256 * meters * (rng.random(meters.shape) < 0.3)).astype(np.uint16)).save(file)
    return folder


def test_the_range_is_a_round_figure_that_hardly_any_training_depth_exceeds() -> None:
    for depths, expected in (
        (torch.rand(1000) * 9.99, 10),  # depths in rooms, as in NYU Depth V2
        (torch.rand(1000) * 0.5, 10),
        (torch.cat((torch.rand(995) * 9, torch.full((5,), 70.0))), 10),  # a few outliers, e.g. behind a window
        (torch.cat((torch.rand(980) * 9, torch.full((20,), 15.0))), 20),
        (torch.rand(1000) * 75, 80),  # depths on streets, as in KITTI
        (torch.rand(1000) * 9000, 10),  # depths in millimeters
    ):
        assert choose_max_depth(depths) == expected


def test_the_range_of_streets_is_chosen_printed_or_set_by_the_format(streets: Path, tmp_path: Path) -> None:
    reports: list[str] = []
    arguments = arguments_of(TASK, streets, tmp_path / "out", "--depth_scale", "256", *A_FEW_STEPS)
    run(ALL_TASKS[TASK], arguments, None, report=reports.append)
    model = HfViTForDepthEstimation.from_pretrained(tmp_path / "out")
    assert model.options.max_depth == 80
    printed = next(line for line in reports if line.startswith("Depths: "))
    assert "Head: dpt, depth up to 80 m. Scores: the whole image, depths between 0.001 and 80 m" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(part in card for part in ("depth up to 80 m", "depths between 0.001 and 80 m"))
    trainer = make_trainer(TASK, streets, tmp_path / "conv", "--depth_scale", "256", "--head", "conv")
    assert (trainer.model.options.max_depth, trainer.evaluator.metric.max_depth) == (80, 80)
    options = ["--depth_scale", "256", *config_of({"max_depth": 70})]
    assert make_trainer(TASK, streets, tmp_path / "given", *options).model.options.max_depth == 70
    deepest = {}
    for name, max_depth, scale, crop in (
        ("kitti", 80, 256, "garg"),
        ("nyu", 10, 1000, "eigen"),
        ("tum", 10, 5000, None),
    ):
        trainer = make_trainer(TASK, streets, tmp_path / name, "--depth_format", name)
        metric = trainer.evaluator.metric
        assert (trainer.model.options.max_depth, metric.max_depth, metric.crop) == (max_depth, max_depth, crop)
        deepest[scale] = trainer.data_collator([trainer.eval_dataset[0]])["labels"].nan_to_num().max()
    assert all(found * scale == pytest.approx(deepest[256] * 256) for scale, found in deepest.items())
    metric = make_trainer(TASK, streets, tmp_path / "kitti", "--depth_format", "kitti", "--max_eval_depth", "50")
    assert (metric.model.options.max_depth, metric.evaluator.metric.max_depth) == (50, 50)


def test_depths_out_of_range_are_refused(streets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(depth_estimation.logger, "warning_once", messages.append)
    HfViTForDepthEstimation(HfViTConfig(**{**CONFIG, "image_size": 16})).save_pretrained(tmp_path / "rooms")
    HfViTImageProcessor(size=16).save_pretrained(tmp_path / "rooms")
    options = ["--depth_scale", "256", "--model_name_or_path", str(tmp_path / "rooms")]
    # In one image, all depths are below 20 meters. In all other images, depths range from 20 to 60 meters.
    far = tmp_path / "far"
    shutil.copytree(streets, far)
    for split in ("train", "val"):
        file = far / split / "depths" / "0.png"
        Image.fromarray((np.asarray(Image.open(file)) // 20).astype(np.uint16)).save(file)
    message = r"9\d\.\d% of the valid train pixels are outside 0\.001 to 10 m, .* 99 % are below .* --depth_scale"
    with pytest.raises(ValueError, match=message):
        make_trainer(TASK, far, tmp_path / "out", *options)
    make_trainer(TASK, far, tmp_path / "out", "--depth_scale", "256", *config_of({"max_depth": 30}))
    assert "of the valid train pixels are outside 0.001 to 30 m, and are not used for training" in messages[0]


def test_another_head_than_the_saved_one_is_wholly_fresh(tmp_path: Path) -> None:
    config = HfViTConfig(**{**CONFIG, "image_size": 16, "depth_config": {**CONFIG["depth_config"], "max_depth": 80}})
    source = HfViTForDepthEstimation(config)
    # The saved bias of the head must not be loaded, although it has the shape of the new bias.
    torch.nn.init.constant_(source.depth_head.decoder.predictor.bias, 7.0)
    torch.nn.init.constant_(source.model.norm.weight, 3.0)
    source.save_pretrained(tmp_path)
    HfViTImageProcessor(size=16).save_pretrained(tmp_path)
    arguments = DepthArguments(dataset_name="rooms", model_name_or_path=str(tmp_path), head="conv")
    model, _ = load_model(HfViTForDepthEstimation, arguments)
    assert (model.options.head, model.options.max_depth) == ("conv", 80)
    assert torch.equal(model.model.norm.weight, source.model.norm.weight)
    assert not torch.equal(model.depth_head.decoder.predictor.bias, source.depth_head.decoder.predictor.bias)


def test_smaller_errors_select_the_best_model(tmp_path: Path) -> None:
    for name, is_greater_better in (("abs_rel", False), ("eval_rmse", False), ("delta1", True), ("loss", False)):
        args = HfViTTrainingArguments(output_dir=str(tmp_path), metric_for_best_model=name, report_to="none")
        assert args.greater_is_better is is_greater_better


def test_an_image_without_depth_counts_in_no_score(scenes: Path, tmp_path: Path) -> None:
    trainer = make_trainer(TASK, scenes, tmp_path)
    rows = trainer.eval_dataset.rows
    expected = scores_of(trainer)
    read = trainer.eval_dataset.read_target

    def without_first(row: dict) -> dict:
        target = read(row)
        return {"depth_map": target["depth_map"] * (row["file"] != rows[0]["file"])}

    trainer.eval_dataset.read_target = without_first
    found = scores_of(trainer)
    assert all(np.isfinite(list(found.values())))
    trainer.eval_dataset.read_target = read
    trainer.eval_dataset.rows = rows.select(range(1, len(rows)))
    fewer = scores_of(trainer)
    assert {**found, "loss": 0} == pytest.approx({**fewer, "loss": 0})
    assert fewer["abs_rel"] != expected["abs_rel"]
