"""Training runs on a few synthetic images and captions, with the training script and with the Trainer."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hf_vit.runs import build_run
from hf_vit.tasks.image_captioning import ImageCaptioning
from hf_vit.tasks.zero_shot_image_classification import ImageTextContrast
from hf_vit.training.evaluator_trainer import EvaluatorTrainer

from .dense_trainings import QUIET, Float64Collator, scores_of
from .models import encoder_shape
from .options import opened_run, run
from .references import draw_weights


COLORS = {"red": (220, 60, 40), "green": (60, 200, 60), "blue": (40, 60, 220), "white": (240, 240, 240)}
PAIRS = list(product(COLORS, repeat=2))
NUM_LABELED = 3  # number of test images per color
# With the default initializer_range of 0.02, embeddings would be nearly equal.
CONFIG = {**encoder_shape(32, 2, 64), "patch_size": 4, "initializer_range": 0.1}
TEXT = encoder_shape(24, 2, 48)
SMALL = [*QUIET, "--horizontal_flip", "0", "--train_val_split", "0"]
SMALL += ["--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "5"]
A_FEW = ["--max_steps", "4", "--eval_strategy", "no", "--save_strategy", "no"]


def captions_of(left: str, right: str) -> list[str]:
    """Returns three captions for an image with two colored halves, or two captions if the left half is white."""
    captions = [f"{left} beside {right}", f"{right} on the right of {left}", f"half {left}, the other half {right}"]
    return captions[: 2 if left == "white" else 3]


def write_captions(folder: Path, sizes: tuple[int, int] = (16, 11)) -> Path:
    """Writes noisy two-colored images with captions: a table of captions in `train`, and one of images in `val`."""
    generator = np.random.default_rng(0)
    for split, count in zip(("train", "val"), sizes, strict=True):
        (folder / split / "images").mkdir(parents=True)
        rows = []
        for number, (left, right) in enumerate(PAIRS[:count]):
            pixels = np.repeat([COLORS[left], COLORS[right]], 12, axis=0) + generator.normal(0, 15, (18, 24, 3))
            name = f"images/{number}.png"
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / split / name)
            captions = captions_of(left, right)
            one, each = {"text": captions[0], "captions": captions}, [{"text": caption} for caption in captions]
            rows += [{"file_name": name, **row} for row in (each if split == "train" else [one])]
        (folder / split / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_labeled(folder: Path) -> Path:
    """Writes images of a single color to class folders: three to each test/<color>/, one to each train/<color>/."""
    for number, (name, color) in enumerate(COLORS.items()):
        for split, count in (("train", 1), ("test", NUM_LABELED)):
            (folder / split / name).mkdir(parents=True)
            for place in range(count):
                pixels = np.random.default_rng([number, place]).normal(color, 15, (20, 20, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / split / name / f"{place}.png")
    return folder


def arguments_of(data: Path, output_dir: Path, *options: str) -> list[str]:
    new = ["--preset", "tiny", "--image_size", "16", "--vocab_size", "300", "--max_text_length", "32"]
    new += ["--config_overrides", json.dumps({**CONFIG, "text_config": TEXT})]
    arguments = [*SMALL, *([] if "--model_name_or_path" in options else new)]
    return [*arguments, "--dataset_name", str(data), "--output_dir", str(output_dir), *options]


def caption_arguments(data: Path, output_dir: Path, *options: str, dropout: float = 0.0) -> list[str]:
    arguments = arguments_of(data, output_dir, *options)
    if "--model_name_or_path" in options:
        return arguments
    new = {**CONFIG, "caption_config": {**TEXT, "dropout": dropout}}
    return [json.dumps(new) if "text_config" in argument else argument for argument in arguments]


def train(data: Path, output_dir: Path, *options: str) -> dict[str, float]:
    """Runs the image-text training script and returns the validation scores."""
    run(ImageTextContrast, arguments_of(data, output_dir, *options), None, report=lambda _: None)
    scores: dict[str, float] = json.loads((output_dir / "validation_scores.json").read_text())
    return scores


def make_trainer(data: Path, output_dir: Path, *options: str) -> EvaluatorTrainer:
    task = opened_run(ImageTextContrast, arguments_of(data, output_dir, *options))
    return build_run(task).trainer


def train_in_float64(trainer: EvaluatorTrainer) -> tuple[list[float], Tensor, dict[str, float]]:
    draw_weights(trainer.model)
    trainer.model.double()
    trainer.data_collator = Float64Collator(trainer.data_collator)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    return losses, weights, scores_of(trainer)


def train_as_one(data: Path, folder: Path, batch_size: int) -> dict[str, tuple[list[float], Tensor, dict[str, float]]]:
    """Trains image-text models with each loss, and a captioner, for more than an epoch.

    Returns the losses, weights and scores of each training run.
    """
    results = {}
    # SGD is used because Adam would amplify rounding differences in small gradients.
    options = ["--optim", "sgd", "--learning_rate", "0.05", "--max_steps", "5", "--logging_steps", "1"]
    options = [*A_FEW, *options, "--per_device_train_batch_size", str(batch_size)]
    for loss in ("sigmoid", "softmax"):
        results[loss] = train_in_float64(make_trainer(data, folder / loss, *options, "--loss", loss))
    captioning = opened_run(ImageCaptioning, caption_arguments(data, folder / "captions", *options))
    results["captions"] = train_in_float64(build_run(captioning).trainer)
    return results
