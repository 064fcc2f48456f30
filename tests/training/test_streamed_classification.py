"""Training a classifier on streamed data: it resumes where it stopped, and its evaluations use all images."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_vit.training import HfViTTrainingArguments, ImageClassification
from hf_vit.training.run import plan_evaluation

from ..helpers.datasets import write_tar, write_tars
from ..helpers.options import evaluation_values, parse_arguments, run, task_of
from ..helpers.pretraining import CONFIG, SMALL, write_colors
from ..helpers.trainings import digits_trainer


STREAM = ["--streaming", "true", "--eval_strategy", "no", "--shuffle_buffer_size", "20", "--auto_augment", "none"]
STEPS = ["--max_steps", "7", "--save_strategy", "steps", "--save_steps", "4"]  # an epoch has four and a half
NAMES = ["blue", "green", "red"]


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the same images in folders and in tar files."""
    folder = write_colors(tmp_path_factory.mktemp("colors") / "folders")
    for split in ("train", "test"):
        files = sorted((folder / split).glob("*/*.png"))
        for part in range(4):
            images = {f"{file.parent.name}/{file.stem}": file.read_bytes() for file in files[part::4]}
            labels = {key: NAMES.index(key.split("/")[0]) for key in images}
            write_tar(folder.parent / "tars" / f"{split}-{part}.tar", images, labels)
    (folder.parent / "tars" / "classes.txt").write_text("\n".join(NAMES))
    return {"folders": folder, "tars": folder.parent / "tars"}


def arguments_of(data: Path, output_dir: Path, *options: str) -> list[str]:
    model = ["--preset", "tiny", "--config_overrides", json.dumps(CONFIG), "--per_device_train_batch_size", "8"]
    return [*SMALL, *model, *STREAM, "--dataset_name", str(data), "--output_dir", str(output_dir), *options]


def make_task(data: Path, output_dir: Path, *options: str) -> ImageClassification:
    task = task_of(ImageClassification, arguments_of(data, output_dir, *options))
    task.load_data()
    return task


def test_a_classifier_learns_from_tar_files(colors: dict[str, Path], tmp_path: Path) -> None:
    steps = ["--max_steps", "40", "--save_strategy", "no", "--learning_rate", "3e-3"]
    run(ImageClassification, arguments_of(colors["tars"], tmp_path, *steps), None, report=lambda _: None)
    scores = json.loads((tmp_path / "test_scores.json").read_text())
    assert scores["accuracy"] > 0.8  # three colors: chance is 1/3
    lines = [json.loads(line) for line in (tmp_path / "test_predictions.jsonl").read_text().splitlines()]
    assert len({line["file"] for line in lines}) == len(lines) == 21
    assert sum(line["label"] == line["prediction"] for line in lines) == round(21 * scores["accuracy"])
    card = (tmp_path / "README.md").read_text()
    assert "| training images | a stream, each drawn among 20 |" in card
    (counts,) = re.findall(r"tars: (.*), in 3 classes", card)
    assert re.fullmatch(r"\d for validation, 21 for test", counts)  # training images are not counted


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_training_is_resumed_at_the_same_image(workers: str, colors: dict[str, Path], tmp_path: Path) -> None:
    def train(name: str, *options: str) -> dict[str, Any]:
        readers = ["--dataloader_num_workers", workers, *options]
        task = make_task(colors["tars"], tmp_path / name, *STEPS, *readers)
        torch.manual_seed(0)
        trainer = task.make_trainer()
        trainer.train(resume_from_checkpoint=task.args.resume_from_checkpoint)
        trainer.save_model()
        trainer.state.save_to_json(str(tmp_path / name / "state.json"))
        return load_file(tmp_path / name / "model.safetensors")

    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    whole, resumed = train("whole"), train("resumed", "--resume_from_checkpoint", checkpoint)
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    histories = [json.loads((tmp_path / name / "state.json").read_text()) for name in ("whole", "resumed")]
    assert histories[0]["epoch"] == histories[1]["epoch"]
    with pytest.raises(ValueError, match=r"and step': 8.* and step': 4.* left out or come twice"):
        train("smaller", "--resume_from_checkpoint", checkpoint, "--per_device_train_batch_size", "4")


def test_a_folder_is_streamed_and_the_same_images_are_held_out(colors: dict[str, Path], tmp_path: Path) -> None:
    task = make_task(colors["folders"], tmp_path, "--max_steps", "1", "--save_strategy", "no")
    listed = make_task(colors["folders"], tmp_path, "--streaming", "false", "--train_val_split", "0.1")
    assert task.count_examples() == {"validation": 4, "test": 21}
    assert task.loaded.splits["validation"]["file"][:] == listed.loaded.splits["validation"]["file"][:]
    trainer = task.make_trainer()
    trainer.predict(task.loaded.examples("test"))
    assert trainer.evaluator.metric.confusion_matrix().sum() == 21
    assert next(iter(trainer.get_train_dataloader()))["pixel_values"].shape == (8, 3, 16, 16)


@pytest.mark.parametrize("kind", ["folders", "tars"])
def test_the_script_that_scores_takes_the_images_that_were_held_out(
    kind: str, colors: dict[str, Path], tmp_path: Path
) -> None:
    steps = ["--max_steps", "1", "--save_strategy", "no", "--train_val_split", "0.3"]
    run(ImageClassification, arguments_of(colors[kind], tmp_path / kind, *steps), None, report=lambda _: None)
    trained = make_task(colors[kind], tmp_path, *steps)
    options = ["--split", "validation", "--train_val_split", "0.3", "--output_dir", str(tmp_path / "scores")]
    places = ["--model_name_or_path", str(tmp_path / kind), "--dataset_name", str(colors[kind]), "--use_cpu"]
    evaluation, saved = plan_evaluation(evaluation_values([*places, *options]))
    assert evaluation.make_evaluation_trainer(saved)[1] == "validation"
    held_out = [
        sorted(image.tobytes() for image in split["image"])
        for split in (evaluation.loaded.splits["validation"], trained.loaded.splits["validation"])
    ]
    assert len(held_out[0]) > 3
    assert held_out[0] == held_out[1]


def test_an_unreadable_image_stops_a_training_or_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tars(tmp_path / "data", {"train": [0, 1] * 8, "val": [0, 1]})
    key = "zz/000"
    write_tar(tmp_path / "data" / "train-00009.tar", {key: b"no image"}, {key: 0})
    options = ["--check_images", "false", *STEPS, "--max_steps", "9", "--save_strategy", "no"]
    with pytest.raises(OSError, match=r"train-00009\.tar: zz/000\.png"):
        make_task(tmp_path / "data", tmp_path / "out", *options).make_trainer().train()
    trainer = make_task(tmp_path / "data", tmp_path / "out", *options).make_trainer()
    trainer.train_dataset.skip_unreadable = True
    trainer.train()
    assert "train-00009.tar: zz/000.png" in caplog.text


def test_workers_stay_and_scores_are_still_of_the_images_that_are_asked_for(tmp_path: Path) -> None:
    def stays(*options: str) -> bool:
        arguments = ["--use_cpu", "--output_dir", str(tmp_path), *options]
        return parse_arguments((HfViTTrainingArguments,), arguments)[0].dataloader_persistent_workers

    workers = ("--dataloader_num_workers", "2")
    assert [stays(), stays(*workers), stays(*workers, "--dataloader_persistent_workers", "false")] == [
        False,
        True,
        False,
    ]
    trainer = digits_trainer(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    few = trainer.eval_dataset.select(range(3))
    assert len(trainer.get_eval_dataloader().dataset) > 3
    assert len(trainer.get_eval_dataloader(few).dataset) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--max_steps", "-1"],
            "A stream does not say how many images it has.* Give --max_steps, --save_strategy steps",
        ),
        (["--max_train_samples", "5"], "max_train_samples=5 is not supported for streams"),
        (["--streaming", "false", "--class_names", "a,b"], r"class_names=\['a', 'b'\] is for --streaming"),
        ([*STEPS, "--class_names", "a,b"], "has the label 2, which is not one of the 2 classes 'a', 'b'"),
    ],
)
def test_mistakes_are_found_before_training(
    options: list[str], message: str, colors: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(colors["tars"], tmp_path, *options)
