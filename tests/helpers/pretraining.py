"""Pretraining runs on a few synthetic images, with the training script and with the Trainer."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hf_vit.runs import Run, build_run
from hf_vit.tasks.masked_image_modeling import MaskedImageModeling
from hf_vit.training.evaluator_trainer import EvaluatorTrainer

from .dense_trainings import QUIET, scores_of
from .models import encoder_shape
from .options import opened_run, run
from .references import draw_weights


COLORS = {"red": (220, 60, 40), "green": (60, 200, 60), "blue": (40, 60, 220)}
NUM_TRAIN, NUM_TEST = 12, 7  # Images per color. The total numbers are not divisible by the batch sizes
CONFIG = {**encoder_shape(32, 2, 64), "patch_size": 4}
DECODER = {f"decoder_{name}": value for name, value in encoder_shape(16, 1, 32).items()}
SMALL = [*QUIET, "--image_size", "16", "--per_device_eval_batch_size", "4", "--learning_rate", "1e-3"]
A_FEW = ["--max_steps", "4", "--eval_strategy", "no", "--save_strategy", "no"]
BATCH = ["--per_device_train_batch_size", "8"]


def write_colors(folder: Path) -> Path:
    """Write noisy images of several sizes to <split>/<color>/. Each image has one color and a white corner."""
    generator = np.random.default_rng(0)
    for split, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        for name, color in COLORS.items():
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                size = 18 + 3 * (number % 3), 20 + 5 * (number % 4)
                pixels = np.array(color) + generator.normal(0, 25, (*size, 3))
                pixels[:6, :6] = 255
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / split / name / f"{number}.png")
    return folder


def arguments_of(data: Path | str, output_dir: Path | str, *options: str, **objective: object) -> list[str]:
    config = {**CONFIG, "masked_image_modeling_config": {**({} if "simmim" in options else DECODER), **objective}}
    arguments = [*SMALL, *BATCH, "--preset", "tiny", "--config_overrides", json.dumps(config)]
    return [*arguments, "--dataset_name", str(data), "--output_dir", str(output_dir), *options]


def pretrain(data: Path, output_dir: Path, *options: str, **objective: object) -> dict[str, float]:
    """Run the pretraining script and return the validation scores."""
    run(MaskedImageModeling, arguments_of(data, output_dir, *options, **objective), None, report=lambda _: None)
    (file,) = output_dir.glob("*_scores.json")
    scores: dict[str, float] = json.loads(file.read_text())
    return scores


def make_task(data: Path, output_dir: Path, *options: str) -> Run:
    """Return a pretraining run that has loaded its data. `options` are command line arguments."""
    task = opened_run(MaskedImageModeling, arguments_of(data, output_dir, *options))
    return task


def make_trainer(data: Path, output_dir: Path, *options: str) -> EvaluatorTrainer:
    """Return a pretraining Trainer for command line options. All model weights are fixed nonzero values."""
    trainer = build_run(make_task(data, output_dir, *options)).trainer
    draw_weights(trainer.model)
    return trainer


def train_all_ways(
    data: Path, folder: Path, batch_size: int
) -> dict[str, tuple[list[float], Tensor, dict[str, float]]]:
    """Train for more than an epoch on datasets and streams; return losses, weights and scores."""
    results = {}
    stream = ["--streaming", "true"]
    for way, options in {"list": [], "stream": [*stream, "--shard_by_process", "false"], "shards": stream}.items():
        batch = ["--per_device_train_batch_size", str(batch_size), "--logging_steps", "1"]
        # SGD is used because Adam would amplify rounding errors of small gradients.
        sgd = ["--optim", "sgd", "--learning_rate", "0.05", "--max_steps", "6"]
        task = make_task(data, folder / way, *A_FEW, *options, *batch, *sgd)
        trainer = build_run(task).trainer
        draw_weights(trainer.model)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
        results[way] = losses, weights, scores_of(trainer, task.data.examples("test"))
    return results
