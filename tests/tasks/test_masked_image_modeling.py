"""Test masked image modeling end to end: train with the command, inspect, resume, and fine-tune on another task."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from hf_vit import HfViTForMaskedImageModeling, HfViTModel
from hf_vit.evaluation.features import classify_by_neighbors
from hf_vit.runs import build_run
from hf_vit.runs.report import describe_data
from hf_vit.tasks.common.arguments import TaskArguments, UnlabeledArguments
from hf_vit.tasks.image_classification import load_classifier
from hf_vit.tasks.masked_image_modeling import MaskedImageModeling

from ..helpers import distributed
from ..helpers.dense_trainings import scores_of
from ..helpers.fresh import run_without_package
from ..helpers.options import call_command, run_of
from ..helpers.pretraining import A_FEW, arguments_of, make_task, make_trainer, pretrain, train_all_ways, write_colors


STEPS = ["--max_steps", "40", "--eval_strategy", "steps", "--eval_steps", "20", "--save_strategy", "steps"]
STEPS += ["--save_steps", "30", "--learning_rate", "3e-3", "--min_crop_scale", "0.6"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains colored images and a model trained on them with the command."""
    folder = tmp_path_factory.mktemp("workplace")
    write_colors(folder / "colors")
    call_command("train masked-image-modeling", arguments_of(folder / "colors", folder / "encoder", *STEPS))
    return folder


def test_training_beats_the_untrained_baseline_in_the_card(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workplace / "encoder"
    scores = json.loads((folder / "test_scores.json").read_text())
    text, card = (folder / "README.md").read_text(), ModelCard.load(folder / "README.md")
    ours, baseline = map(float, re.search(r"\| loss \| \*\*(.*)\*\* \| (.*) \|", text).groups())
    assert ours == pytest.approx(scores["loss"], abs=1e-4)
    assert ours < baseline
    neighbors, of_pixels = map(float, re.search(r"\| knn_accuracy \| \**([\d.]+)\** \| \**([\d.]+)", text).groups())
    assert neighbors == pytest.approx(scores["knn_accuracy"], abs=1e-4)
    assert min(neighbors, of_pixels) > 0.9  # chance level is 1/3
    assert (card.data.pipeline_tag, card.data.eval_results[0].dataset_split) == ("image-feature-extraction", "test")
    assert "| masks | 75% of the patches, random |" in text
    assert "colors: 32 for train, 4 for validation, 21 for test." in text
    pictures = [*re.findall(r"!\[.*\]\((.*)\)", text), "pictures/step-000020.png", "pictures/step-000040.png"]
    assert len(pictures) == 4
    assert all(Image.open(folder / picture).size[0] > 300 for picture in pictures)
    # Run the code example of the model card that imports hf_vit.
    Image.open(workplace / "colors" / "test" / "red" / "0.png").save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    exec(re.findall("```python\n(.*?)```", text, flags=re.DOTALL)[1].replace("path/to/this/folder", str(folder)), {})
    assert "tensor(0.7500) of the patches were masked\ntorch.Size([1, 3, 16, 16])" in capsys.readouterr().out


def test_a_training_is_resumed_where_it_was(workplace: Path, tmp_path: Path) -> None:
    checkpoint = str(workplace / "encoder" / "checkpoint-30")
    pretrain(workplace / "colors", tmp_path / "resumed", *STEPS, "--resume_from_checkpoint", checkpoint)
    expected = load_file(workplace / "encoder" / "model.safetensors")
    resumed = load_file(tmp_path / "resumed" / "model.safetensors")
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())


OPENED = """
import re, sys
from pathlib import Path
from transformers import AutoModel, AutoModelForImageClassification, AutoModelForMaskedImageModeling

exec(re.findall("```python\\n(.*?)```", Path("encoder/README.md").read_text(), flags=re.DOTALL)[0].replace(
    "path/to/this/folder", "encoder"
))
for auto in (AutoModel, AutoModelForImageClassification, AutoModelForMaskedImageModeling):
    model, info = auto.from_pretrained("encoder", trust_remote_code=True, output_loading_info=True)
    heads = {name.split(".")[0] for name in info["missing_keys"]}
    print(type(model).__name__, sorted(heads), float(model.base_model.norm.weight.double().sum()))
"""


def test_pretrained_model_opens_as_other_tasks_without_the_package(workplace: Path) -> None:
    Image.open(workplace / "colors" / "test" / "red" / "0.png").save(workplace / "image.png")
    printed = run_without_package(OPENED, workplace).stdout.splitlines()
    norm = float(load_file(workplace / "encoder" / "model.safetensors")["model.norm.weight"].double().sum())
    assert printed[-4:] == [
        "17 tokens of 32 features",
        f"HfViTModel [] {norm}",
        f"HfViTForImageClassification ['classifier'] {norm}",
        f"HfViTForMaskedImageModeling [] {norm}",
    ]


def test_classifier_starts_from_the_pretrained_encoder(workplace: Path) -> None:
    arguments = TaskArguments(dataset_name="colors", model_name_or_path=str(workplace / "encoder"))
    model, _ = load_classifier(arguments, ["red", "green", "blue"])
    saved = load_file(workplace / "encoder" / "model.safetensors")
    found = {f"model.{name}": weight for name, weight in model.model.state_dict().items()}
    assert {name for name in saved if name.startswith("model.")} == found.keys()
    assert len(found) > 20
    assert all(torch.equal(weight, saved[name]) for name, weight in found.items())


def test_scores_are_those_of_the_whole_split_and_depend_on_nothing_else(workplace: Path, tmp_path: Path) -> None:
    trainer = make_trainer(workplace / "colors", tmp_path, "--train_val_split", "0.4")
    assert trainer.args.per_device_eval_batch_size == 4
    scores = scores_of(trainer)
    torch.manual_seed(7)
    trainer.train_dataset.set_epoch(3)
    assert scores_of(trainer) == scores
    trainer.args.per_device_eval_batch_size = 7
    assert scores_of(trainer) == pytest.approx(scores, rel=1e-6)
    assert scores["knn_accuracy"] > 0.8  # chance level is 1/3

    trainer = make_trainer(workplace / "colors", tmp_path, "--train_val_split", "0.4", "--max_knn_samples", "9")
    trainer.save_model(tmp_path / "model")
    collator, splits = trainer.data_collator, (trainer.evaluator.known, trainer.eval_dataset)
    assert len(trainer.evaluator.known) == 9
    known, images = (collator([split[index] for index in range(len(split))]) for split in splits)
    numbers = [[row["class_number"] for row in split.rows] for split in splits]
    model = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "model").eval()
    encoder = HfViTModel.from_pretrained(tmp_path / "model").eval()
    found = classify_by_neighbors(pooled(encoder, images), pooled(encoder, known), torch.tensor(numbers[0]))
    with torch.no_grad():
        loss = float(model(**images).loss)
    scores = scores_of(trainer)
    assert scores["loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["knn_accuracy"] == pytest.approx((found == torch.tensor(numbers[1])).float().mean())


def pooled(model: HfViTModel, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(batch["pixel_values"]).last_hidden_state[:, 1:].mean(dim=1)


def test_without_labels_the_loss_is_the_score(workplace: Path, tmp_path: Path) -> None:
    data = f"{workplace / 'colors' / 'train' / 'red'},{workplace / 'colors' / 'test' / 'red'}"
    scores = pretrain(data, tmp_path / "red", *A_FEW, "--objective", "simmim", "--mask_ratio", "0.5")
    assert list(scores) == ["loss"]
    card = (tmp_path / "red" / "README.md").read_text()
    assert "red, red: 17 for train, 2 for validation." in card
    assert "| objective | simmim, mean absolute difference of pixels |\n| masks | 50% of the patches, random |" in card


def test_no_image_is_its_own_neighbor(workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ["--streaming", "true", *A_FEW]
    images = make_task(workplace / "colors" / "train", tmp_path, *options, "--max_eval_samples", "15").data
    scored, known = set(images.splits["train"]["file"]), set(images.known["file"])
    assert (len(scored), len(known), len(scored & known)) == (15, 21, 0)
    assert "nearest-neighbor accuracy is not" not in caplog.text
    for without_others in (options, ["--train_val_split", "0"]):
        images = make_task(workplace / "colors" / "train", tmp_path, *without_others).data
        assert (len(images.splits["train"]), len(images.known)) == (36, 0)
        assert "The nearest-neighbor accuracy is not computed, because all 36 training images" in caplog.text
        caplog.clear()
    options = ["--streaming", "true", *A_FEW, "--max_eval_samples", "2"]
    images = make_task(workplace / "colors" / "train" / "red", tmp_path, *options).data
    # Preparing the data reads only the first 12 images of the stream.
    assert (images.num_train, len(images.splits["train"])) == (8, 2)


def test_a_training_on_a_stream_evaluates_a_part_and_is_resumed_where_it_was(workplace: Path, tmp_path: Path) -> None:
    options = ["--streaming", "true", *A_FEW, "--max_steps", "10", "--shuffle_buffer_size", "20"]
    options += ["--max_eval_samples", "15", "--save_strategy", "steps", "--save_steps", "7"]  # an epoch has 4.5 steps
    scores = pretrain(workplace / "colors", tmp_path / "stream", *options)
    assert scores["knn_accuracy"] > 0.8  # chance level is 1/3
    card = (tmp_path / "stream" / "README.md").read_text()
    # There are 21 test images, sorted by color. Only 15 of them are evaluated.
    assert "Evaluated on the 15 test images" in card
    assert "| training images | a stream, each drawn among 20 |" in card
    checkpoint = str(tmp_path / "stream" / "checkpoint-7")
    pretrain(workplace / "colors", tmp_path / "resumed", *options, "--resume_from_checkpoint", checkpoint)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("stream", "resumed"))
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def test_two_processes_train_and_score_as_one(workplace: Path, tmp_path: Path) -> None:
    job = distributed.start("pretrain", tmp_path / "two", workplace / "colors", processes=2)
    alone = train_all_ways(workplace / "colors", tmp_path / "one", batch_size=8)
    distributed.finish(job, tmp_path / "two")
    processes = [torch.load(tmp_path / "two" / f"process_{rank}.pt") for rank in range(2)]
    _, weights, scores = alone.pop("shards")
    # A single process reads all shards, so its weights equal those of training on the stream.
    assert torch.equal(weights, alone["stream"][1])
    shards = [process.pop("shards") for process in processes]
    assert torch.equal(shards[0][1], shards[1][1])
    # Each of two processes reads different shards, so the batches differ from those of a single process.
    assert not torch.allclose(shards[0][1], weights)
    assert shards[0][2].keys() == scores.keys()
    for process in processes:
        for way, (losses, weights, scores) in alone.items():
            torch.testing.assert_close(process[way][0], losses, rtol=1e-4, atol=0)
            torch.testing.assert_close(process[way][1], weights, rtol=1e-4, atol=1e-5)
            assert process[way][2] == pytest.approx(scores, rel=1e-4)
    assert alone["list"][0] != alone["stream"][0]
    assert alone["list"][2].keys() == alone["stream"][2].keys() == {"loss", "knn_accuracy"}


def test_flags_set_the_objective_and_batches_the_learning_rate(workplace: Path, tmp_path: Path) -> None:
    flags = ["--mask_ratio", "0.5", "--mask_type", "blockwise", "--norm_pix_loss", "false"]
    options = make_trainer(workplace / "colors", tmp_path, *flags).model.options
    assert (options.objective, options.mask_ratio, options.mask_type) == ("mae", 0.5, "blockwise")
    assert (options.norm_pix_loss, options.decoder_hidden_size) == (False, 16)
    model = make_trainer(workplace / "colors", tmp_path, "--objective", "simmim").model
    assert (model.options.objective, model.config.use_mask_token) == ("simmim", True)

    def rate(*options: str) -> float:
        arguments = ["--use_cpu", "--output_dir", str(tmp_path), *options]
        return run_of(MaskedImageModeling, ["--dataset_name", "photos", *arguments]).args.learning_rate

    assert rate("--per_device_train_batch_size", "128", "--gradient_accumulation_steps", "4") == pytest.approx(3e-4)
    assert rate("--learning_rate", "1e-2") == 1e-2
    with pytest.raises(ValueError, match=r"learning_rate=0\.0 must be more than 0"):
        rate("--learning_rate", "0")


def test_data_are_named_without_private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(*data: Path | str) -> Any:
        return describe_data(",".join(map(str, data)), "unknown", {"test": 5}, "test")

    home = tmp_path / "alice"
    photos, rooms, streets = tmp_path / "here, there", tmp_path / "rooms" / "train" / "images", tmp_path / "streets"
    for folder in (
        photos,
        tmp_path / "photos",
        rooms,
        streets / "images",
        home / "data",
        home / "client/train/images",
    ):
        folder.mkdir(parents=True)
    # A comma separates sources, unless it is part of an existing path.
    assert UnlabeledArguments(dataset_name=str(photos)).sources == [str(photos)]
    assert UnlabeledArguments(dataset_name=f"{streets}, user/images").sources == [str(streets), "user/images"]
    assert describe(photos).name == "here, there"
    # If a dataset folder has a generic name, such as "images", the dataset name also contains the parent folder.
    found = describe(rooms, streets / "images", tmp_path / "photos", "user/train")
    assert found.name == "rooms/train/images, streets/images, photos, user/train"
    assert found.identifier == "images, images, photos, user/train"
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.chdir(home / "client")
    assert describe(home / "data", home / "client" / "train" / "images").name == "data, train/images"


def test_mistakes_are_found_before_training(workplace: Path, tmp_path: Path) -> None:
    steps = "save_strategy='epoch', .* Set --max_steps, --save_strategy steps, --eval_strategy steps"
    for options, message in (
        ("--streaming true", steps),
        ("--streaming true --max_steps 9 --eval_strategy no", r"Set --save_strategy steps\."),
        ("--streaming true --max_train_samples 5", "streaming=True and max_train_samples=5 exclude each other"),
        ("--shuffle_buffer_size 0", "shuffle_buffer_size=0 must be at least 1"),
        ("--dataset_name photos,", "dataset_name='photos,' has a comma with no name before or after it"),
        ("--max_knn_samples -1", "max_knn_samples=-1 must be at least 0"),
        ("--mask_ratio 1.5", r"mask_ratio=1\.5 must lie in \(0, 1\)"),
        ("--per_device_train_batch_size 50", "training images do not fill a batch of 50"),
        ("--early_stopping_patience 1 --metric_for_best_model accuracy", "'accuracy' is not a score .* knn_acc"),
    ):
        with pytest.raises(ValueError, match=message):
            build_run(make_task(workplace / "colors", tmp_path, *options.split()))
