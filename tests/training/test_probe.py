"""Linear probes: closed form, initialization of a classifier, interpolation with the fine-tuned model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, HfViTModel
from hf_vit.training import ImageClassification
from hf_vit.training.finetuning.probe import PENALTIES, fit_probe
from hf_vit.training.tasks.image_classification import choose_share, interpolate

from ..helpers.options import run, task_of


NAMES = ["cat", "dog", "fox"]


def draw_features(count: int = 40, width: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(count) % 3
    centers = torch.randn(3, width, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return 5 + 0.5 * centers[classes] + 2 * noise, classes


def test_the_accuracy_is_that_of_images_left_out_one_by_one() -> None:
    features, classes = draw_features()
    found = fit_probe(features, classes, 3)
    scaled = (features - features.mean(dim=0)) / features.std(dim=0)
    accuracies = []
    for penalty in PENALTIES:
        hits = 0
        for number in range(len(classes)):
            kept = torch.arange(len(classes)) != number
            targets = torch.nn.functional.one_hot(classes[kept], 3).double()
            mean, center = targets.mean(dim=0), scaled[kept].mean(dim=0)
            centered = scaled[kept] - center
            penalized = centered.T @ centered + penalty * torch.eye(features.shape[1])
            weight = torch.linalg.solve(penalized, centered.T @ (targets - mean))
            hits += int(((scaled[number] - center) @ weight + mean).argmax() == classes[number])
        accuracies.append(hits / len(classes))
    assert found.accuracy == pytest.approx(max(accuracies))
    assert 0.5 < found.accuracy < 1
    predictions = (features @ found.weight.T + found.bias).argmax(dim=1)
    assert (predictions == classes).double().mean() > found.accuracy


def test_classes_without_images_are_not_predicted() -> None:
    features, classes = draw_features()
    found = fit_probe(features, classes, 5)
    logits = features @ found.weight.T + found.bias
    assert logits.shape == (40, 5)
    assert int(logits.argmax(dim=1).max()) < 3


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 4)):
        for number, name in enumerate(NAMES):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 120, (16, 16, 3), dtype=np.uint8)
                pixels[..., number] += 60
                Image.fromarray(pixels).save(tmp_path / "photos" / split / name / f"{index}.png")
    return tmp_path / "photos"


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    config = HfViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=4
    )
    torch.manual_seed(0)
    model = HfViTModel(config, add_pooling_layer=False)
    model.save_pretrained(tmp_path / "backbone")
    HfViTImageProcessor.for_model(model).save_pretrained(tmp_path / "backbone")
    return tmp_path / "backbone"


def command_of(data: Path, backbone: Path, output: Path, *options: str) -> list[str]:
    quiet = ["--use_cpu", "--disable_tqdm", "true", "--report_to", "none", "--dataloader_num_workers", "0"]
    places = ["--dataset_name", str(data), "--model_name_or_path", str(backbone), "--output_dir", str(output)]
    return [*places, *quiet, "--max_steps", "2", "--per_device_train_batch_size", "8", *options]


def test_a_fresh_classifier_starts_as_the_probe(photos: Path, backbone: Path, tmp_path: Path) -> None:
    task = task_of(ImageClassification, command_of(photos, backbone, tmp_path / "out", "--probe_classifier", "true"))
    task.load_data()
    model = task.make_trainer().model
    assert model.config.pooling == "cls_mean"
    assert task.probe.accuracy > 0.8
    torch.testing.assert_close(model.classifier.weight.double(), task.probe.weight, rtol=1e-5, atol=1e-6)
    batches = task.plain_batches(model, task.make_processor(task.open_model()[1], model.config), 100, 8)
    hits = [model.eval()(batch["pixel_values"]).logits.argmax(dim=1) == batch["labels"] for batch in batches]
    assert torch.cat(hits).double().mean() >= task.probe.accuracy


@pytest.mark.parametrize(
    ("learning_rate", "choice"), [("30", "100% linear probe, 0% fine-tuned"), ("1e-6", "25% linear probe, 75%")]
)
def test_weights_between_probe_and_fine_tuned_model_are_saved(
    learning_rate: str, choice: str, photos: Path, backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageClassification, "least_held_from", 40)
    report_lines: list[str] = []
    options = ["--learning_rate", learning_rate, "--warmup_steps", "0", "--bf16", "false"]
    run(
        ImageClassification, command_of(photos, backbone, tmp_path / "out", *options), None, report=report_lines.append
    )
    assert any("are held out" in line for line in report_lines)
    assert any(line.startswith("Linear probe: ") for line in report_lines)
    (comparison,) = (line for line in report_lines if line.startswith("Saved weights: "))
    assert choice in comparison
    assert "held-out images" in comparison
    saved = HfViTForImageClassification.from_pretrained(tmp_path / "out")
    then, now = HfViTModel.from_pretrained(backbone).encoder.state_dict(), saved.model.encoder.state_dict()
    assert all(torch.equal(then[name], now[name]) for name in then) == (learning_rate == "30")
    assert comparison in (tmp_path / "out" / "README.md").read_text()


def test_the_usual_share_is_chosen_unless_another_is_better_beyond_noise() -> None:
    generator = np.random.default_rng(0)
    usual, noise = generator.uniform(0, 1, 100), generator.normal(0, 0.1, 100)
    noise -= noise.mean()
    losses = {0.0: usual + 1, 0.5: usual + noise - 0.005, 0.75: usual, 1.0: usual + 0.01}
    assert choose_share(losses) == 0.75
    assert choose_share({**losses, 0.5: usual + noise - 0.02}) == 0.5
    assert choose_share({**losses, 0.75: usual + np.nan}) == 0.5


def test_weights_between_two_models() -> None:
    start = {"weight": torch.zeros(2), "count": torch.tensor(1)}
    end = {"weight": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)}
    found = interpolate(start, end, 0.25)
    assert found["weight"].tolist() == [0.25, 0.5]
    assert found["count"] == 3
    assert interpolate(start, {**end, "weight": torch.full((2,), torch.nan)}, 0.0) == start


def test_a_classifier_of_other_classes_starts_as_a_probe(photos: Path, backbone: Path, tmp_path: Path) -> None:
    config = HfViTConfig.from_pretrained(backbone)
    config.id2label = {0: "car", 1: "house"}
    model = HfViTForImageClassification(config)
    model.save_pretrained(tmp_path / "classifier")
    HfViTImageProcessor.for_model(model).save_pretrained(tmp_path / "classifier")
    report_lines: list[str] = []
    run(
        ImageClassification,
        command_of(photos, tmp_path / "classifier", tmp_path / "out"),
        None,
        report=report_lines.append,
    )
    assert any(line.startswith("Linear probe: ") for line in report_lines)
    again = command_of(photos, tmp_path / "out", tmp_path / "again")  # whose classes it knows
    report_lines.clear()
    run(ImageClassification, again, None, report=report_lines.append)
    assert not any(line.startswith("Linear probe: ") for line in report_lines)


def test_a_probe_needs_a_saved_model(photos: Path, tmp_path: Path) -> None:
    command = [*command_of(photos, tmp_path, tmp_path / "out")[:2], "--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="probe_classifier=True needs features"):
        task_of(ImageClassification, [*command, "--probe_classifier", "true"])
