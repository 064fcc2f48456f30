"""Training of depth: how it is evaluated, and beside what."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_vit import HfViTConfig, HfViTForDepthEstimation, HfViTImageProcessor
from hf_vit.evaluation import DepthMetric
from hf_vit.model.task_configurations import HfViTDepthConfig
from hf_vit.training.models import load_model
from hf_vit.training.publishing.report import score_naive_baseline
from hf_vit.training.tasks.depth_estimation import DepthEvaluator, DepthModelArguments, DepthTrainingArguments

from ..helpers.dense_trainings import A_FEW_STEPS, CONFIG, make_trainer, scores_of, train, write_scenes


TASK = "depth_estimation"
RELATIVE = {"depth_config": {**CONFIG["depth_config"], "depth_estimation_type": "relative"}}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"))


def test_the_naive_baseline_is_the_mean_of_what_is_valid_at_each_pixel() -> None:
    depths = [torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]])]
    _, predict = DepthEvaluator(None, DepthMetric(max_depth=10.0), HfViTDepthConfig()).naive_baseline(depths)
    mean = torch.tensor([[2.0, 2.0], [2.5, 4.0]]).double()  # of all, where no image has depth
    torch.testing.assert_close(predict(depths[0]), mean)
    assert predict(torch.ones(4, 6)).shape == (4, 6)
    options = HfViTDepthConfig(depth_estimation_type="relative")
    relative = DepthEvaluator(None, DepthMetric(max_depth=10.0, alignment="scale_shift"), options)
    torch.testing.assert_close(relative.naive_baseline(depths)[1](depths[0]), 1 / mean)


def test_the_naive_baseline_learns_of_a_few_images_at_most(scenes: Path, tmp_path: Path) -> None:
    trainer = make_trainer(TASK, scenes, tmp_path)
    train, scored = trainer.train_dataset.dataset, trainer.eval_dataset
    whole = score_naive_baseline(trainer, train, scored)
    name, scores = score_naive_baseline(trainer, train, scored, most=2)
    assert name == f"{whole[0]} (of 2 training images)"
    assert scores == score_naive_baseline(trainer, train.select([0, len(train) - 1]), scored)[1] != whole[1]


def test_crop_caps_and_alignment_are_those_of_the_command_line(scenes: Path, tmp_path: Path) -> None:
    options = ["--eval_crop", "garg", "--eval_alignment", "median", "--min_eval_depth", "1", "--max_eval_depth", "5"]
    metric = make_trainer(TASK, scenes, tmp_path, *options).evaluator.metric
    assert (metric.crop, metric.alignment, metric.min_depth, metric.max_depth) == ("garg", "median", 1, 5)
    metric = make_trainer(TASK, scenes, tmp_path).evaluator.metric
    assert (metric.crop, metric.alignment, metric.max_depth) == (None, None, 10)


def test_relative_depth_is_trained_and_evaluated_after_alignment(scenes: Path, tmp_path: Path) -> None:
    options = ["--config_overrides", json.dumps({**CONFIG, **RELATIVE})]
    scores = train(TASK, scenes, tmp_path / "out", *A_FEW_STEPS, *options)
    assert 0 < scores["abs_rel"] < 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "| evaluation | the whole image, depths between 0.001 and 10 m, fitted in each image: scale and shift |"
        in card
    )
    assert (
        "| head | dpt, relative inverse depth |\n| loss | ssi |\n| input size | 16 x 16 pixels in training, in" in card
    )
    assert "| rmse (m) | " in card
    assert "| silog (x 100) | " in card
    assert "Lower is better for abs_rel, rmse, log10, rmse_log, silog." in card
    assert "up to scale and shift" in card


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--depth_scale", "1"],
            r"No train image has any truth: their depths go from 2000 to 6000 meters, but only .*"
            r" between 0\.001 and 10 count\. Set --depth_scale",
        ),
        (["--max_eval_depth", "1"], r"depths go from 2 to 6 meters, but only those between 0\.001 and 1 count"),
        (["--depth_scale", "inf"], "depth_scale=inf must be more than 0"),
        (["--depth_scale", "nan"], "depth_scale=nan must be more than 0"),
        (["--max_eval_depth", "0"], r"max_eval_depth=0\.0 must be more than 0"),
        (["--eval_alignment", "scale_shift"], "scale_shift fits inverse depth, but the model predicts meters"),
        (
            ["--eval_alignment", "median", "--config_overrides", json.dumps({**CONFIG, **RELATIVE})],
            "median scales meters, but the model predicts relative",
        ),
    ],
)
def test_mistakes_are_found_before_training(options: list[str], message: str, scenes: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(TASK, scenes, tmp_path, *options)


def test_another_head_than_the_saved_one_is_wholly_fresh(tmp_path: Path) -> None:
    config = HfViTConfig(**{**CONFIG, "image_size": 16, "depth_config": {**CONFIG["depth_config"], "max_depth": 80}})
    source = HfViTForDepthEstimation(config)
    torch.nn.init.constant_(source.depth_head.decoder.predictor.bias, 7.0)  # which would fit the other head
    torch.nn.init.constant_(source.model.norm.weight, 3.0)
    source.save_pretrained(tmp_path)
    HfViTImageProcessor(size=16).save_pretrained(tmp_path)
    arguments = DepthModelArguments(model_name_or_path=str(tmp_path), head="conv")
    model, _ = load_model(HfViTForDepthEstimation, arguments)
    assert (model.options.head, model.options.max_depth) == ("conv", 80)
    assert torch.equal(model.model.norm.weight, source.model.norm.weight)
    assert not torch.equal(model.depth_head.decoder.predictor.bias, source.depth_head.decoder.predictor.bias)


def test_of_errors_the_least_is_the_best(tmp_path: Path) -> None:
    for name, is_greater_better in (("abs_rel", False), ("eval_rmse", False), ("delta1", True), ("loss", False)):
        args = DepthTrainingArguments(output_dir=str(tmp_path), metric_for_best_model=name, report_to="none")
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
    assert {name: found[name] for name in fewer if name != "loss"} == pytest.approx(
        {name: value for name, value in fewer.items() if name != "loss"}
    )
    assert fewer["abs_rel"] != expected["abs_rel"]
