"""Test the benchmark scripts with tiny models and few steps."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import yaml
from benchmarks import learning
from benchmarks.harness import in_rounds, median_ratio

from ..helpers.datasets import write_class_folders
from ..helpers.dense_trainings import CONFIG, write_scenes
from ..helpers.fresh import run_script
from ..helpers.object_trainings import write_figures, write_objects


def run(subject: str, options: str, output: Path) -> dict[str, Any]:
    run_script("benchmark", output.parent, subject, *options.split(), "--output", str(output)).check_returncode()
    return json.loads(output.read_text())


def test_rounds_measure_everything_once_in_random_order() -> None:
    def measure(number: int) -> float:
        order.append(number)
        return len(order) * (1.0 + number)

    def measure_rounds() -> list[dict[str, float]]:
        return list(in_rounds({str(number): lambda number=number: measure(number) for number in range(3)}, 20))

    order: list[int] = []
    rounds = measure_rounds()
    orders = [tuple(order[start : start + 3]) for start in range(0, 60, 3)]
    assert len(set(orders)) == 6
    assert all(sorted(one) == [0, 1, 2] for one in orders)
    assert all(list(found) == ["0", "1", "2"] for found in rounds)
    assert median_ratio([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 1.0}, {"a": 5.0, "b": 5.0}], "a", to="b") == 1
    order.clear()
    assert measure_rounds() == rounds


def test_benchmark_measures_all_three_libraries(tmp_path: Path) -> None:
    options = "--presets tiny --batch_sizes 1 --dtypes float32 --rounds 1 --min_seconds 0.01"
    rows = run("classification", options, tmp_path / "table.json")["rows"]
    assert [row["mode"] for row in rows] == ["forward", "train"]
    for row in rows:
        assert all(row[f"{library} images/s"] > 0 for library in ("hf_vit", "transformers", "timm"))
        assert row["ratio to timm"] > 0


def test_benchmark_of_growth_fits_its_prediction(tmp_path: Path) -> None:
    options = "--preset mnist --image_size 28 --image_sizes 28 56 --batch_sizes 1 2 --depth 1 --depths 1 2 "
    options += f"--queries 2 --query_counts 2 9 --rounds 1 --min_seconds 0.01 --picture {tmp_path / 'growth.png'}"
    curves = run("growth", options, tmp_path / "growth.json")["curves"]
    expected = {"image_size": [28, 56], "batch_size": [1, 2], "depth": [1, 2], "queries": [2, 9]}
    assert {name: [row[name] for row in rows] for name, rows in curves.items()} == expected
    rows = [row for column in curves.values() for row in column]
    assert all(row["seconds"] > 0 and row["predicted_seconds"] > 0 for row in rows)
    assert curves["batch_size"][1]["predicted_bytes"] == 2 * curves["batch_size"][0]["predicted_bytes"]
    assert (tmp_path / "growth.png").stat().st_size > 0


def test_benchmark_of_pipelines_measures_both_and_their_parts(tmp_path: Path) -> None:
    write_figures(tmp_path)
    photos = next(tmp_path.rglob("*.png")).parent
    options = f"--photos {photos} --presets mnist --image_size 28 --rounds 1 --batch_sizes 2 --num_workers 0"
    rows = run("pipelines", options, tmp_path / "result.json")["rows"]
    names = [name for _, name, *_ in rows]
    assert names == ["stock, batch 2", "ours", "ours, 0 threads", "reading alone", "forward alone"]
    assert all(value > 0 for _, _, *values in rows for value in values)


def test_benchmark_of_the_trainer_trains_all_ways(tmp_path: Path) -> None:
    options = "--preset mnist --image_size 28 --batch_size 4 --steps 2 --rounds 1 --options"
    growing, small = '{"progressive_sizes":[8,28]}', '{"progressive_sizes":[28]}'
    result = run("training", f"{options} {growing} {small}", tmp_path / "result.json")
    assert result["images_per_second"].keys() == {"hf_vit", "bare loop", "timm", "transformers", growing, small}
    assert result["ratios"].keys() == {"bare loop", "timm", "transformers"}
    assert result["gains"].keys() == {growing, small}
    assert all(value > 0 for kind in ("images_per_second", "ratios", "gains") for value in result[kind].values())
    assert all(result["fastest"][way] >= rate for way, rate in result["images_per_second"].items())


def test_benchmark_of_loading_opens_with_both_libraries(tmp_path: Path) -> None:
    result = run("loading", "--preset mnist --rounds 1", tmp_path / "result.json")
    for measure in ("load_s", "load_and_read_s", "peak_after_load_mib", "peak_after_read_mib"):
        assert result[measure].keys() == {"transformers", "hf_vit", "ratio"}
        assert all(value > 0 for value in result[measure].values())


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("subject", "image_size", "expected"),
    [
        ("dense", 64, [["semantic", "SegFormer-b2"], ["panoptic", "EoMT"], ["depth", "DPT"]]),
        ("detection", 128, [["queries", "YOLOS"], ["deformable", "LW-DETR"], ["deformable", "RF-DETR"]]),
    ],
)
def test_benchmark_of_dense_models(subject: str, image_size: int, expected: list[list[str]], tmp_path: Path) -> None:
    options = f"--image_size {image_size} --num_labels 3 --num_queries 5 --rounds 1 --min_seconds 0.01"
    rows = run(subject, options, tmp_path / "table.json")["rows"]
    assert [row[:2] for row in rows] == expected
    assert all(value > 0 for row in rows for value in row[2:])


def test_benchmark_of_masked_image_modeling_measures_encoder_and_step(tmp_path: Path) -> None:
    options = "--preset tiny --image_size 64 --decoder_hidden_size 32 --decoder_num_hidden_layers 1 --batch_size 2"
    result = run("masked_image_modeling", f"{options} --rounds 1 --min_seconds 0.01", tmp_path / "table.json")
    assert [row[:2] for row in result["encoder"]] == [[0.0, 17], [0.25, 13], [0.5, 9], [0.75, 5], [0.9, 3]]
    assert all(value > 0 for row in result["encoder"] for value in row[2:])
    assert result["step"].keys() == {"hf_vit", "transformers"}
    assert result["ratio"] > 0


DETECTION = {"num_queries": 5, "hidden_size": 32, "num_attention_heads": 2, "num_groups": 1}
WRITE: dict[str, Any] = {"object_detection": write_objects, "keypoint_detection": write_figures}
WRITE["image_classification"] = lambda folder: write_class_folders(folder, ["cat", "dog"])


def train_peer(folder: Path, task: str, recipe: dict[str, Any], **options: Any) -> None:
    data = str(WRITE.get(task, write_scenes)(folder / "data"))
    given = {"dataset_name": data, "image_size": 32, "per_device_train_batch_size": 2, **recipe}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(given))
    args = learning.Arguments(task=task, training=str(folder), **options)
    scores = learning.train_peer(args, 1e-3, 0, seconds=1.0)
    assert scores["steps"] == options.get("steps", 3)
    assert 0 <= scores[learning.CHOOSES[task]] < 100


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("semantic_segmentation", {}),
        ("universal_segmentation", {"thing_classes": "cat,dog"}),
        ("depth_estimation", {}),
        ("object_detection", {}),
        ("keypoint_detection", {"image_size": 64}),
    ],
)
def test_learning_trains_peers(
    task: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A simulated clock, which advances by 0.25 seconds each time it is read.
    quarters = itertools.count(0, 0.25)
    monkeypatch.setattr(learning, "time", SimpleNamespace(perf_counter=lambda: next(quarters)))
    config = {**CONFIG, "patch_size": 8, "num_hidden_layers": 4, "detection_config": DETECTION}
    recipe = {"preset": "tiny", "config_overrides": config, "use_muon": True, "learning_rate": 0.02, **options}
    train_peer(tmp_path, task, recipe)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "task", ["image_classification", "semantic_segmentation", "depth_estimation", "object_detection"]
)
def test_benchmark_of_learning_trains_a_peer_from_a_published_encoder(task: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    transformers.Dinov2Model(transformers.Dinov2Config(**shape)).save_pretrained(tmp_path / "saved")
    transformers.BitImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(tmp_path / "saved")
    depth = CONFIG["depth_config"] | {"head": "dpt", "fusion_hidden_size": 8}
    recipe = {"model_name_or_path": str(tmp_path / "saved"), "head_lr_multiplier": 5, "use_cpu": True}
    recipe["config_overrides"] = {"depth_config": depth, "detection_config": DETECTION}
    train_peer(tmp_path, task, recipe, steps=2)


def test_benchmark_of_learning_repeats_the_best_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_peer(args: learning.Arguments, rate: float, seed: int, seconds: float) -> dict[str, float]:
        assert seconds == 7
        return {"nme": abs(rate - 1e-3) + seed}

    monkeypatch.setattr(learning, "train_peer", train_peer)
    (tmp_path / "train_results.json").write_text('{"train_runtime": 7}')
    options = {"learning_rates": [1e-4, 1e-3, 1e-2], "seeds": [0, 1, 2], "output": str(tmp_path / "result.json")}
    learning.main(learning.Arguments(task="keypoint_detection", training=str(tmp_path), **options))
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(row["learning_rate"], row["seed"]) for row in rows[:3]] == [(1e-4, 0), (1e-3, 0), (1e-2, 0)]
    assert [(row["learning_rate"], row["seed"]) for row in rows[3:]] == [(1e-3, 1), (1e-3, 2)]
