"""Training runs of dense prediction and object tasks on synthetic images, with training scripts and the Trainer."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hf_vit import HfViTForObjectDetection, tasks
from hf_vit.data.datasets import TargetDataset
from hf_vit.runs import build_run
from hf_vit.tasks import Task
from hf_vit.training.evaluator_trainer import EvaluatorTrainer

from .models import encoder_shape
from .options import opened_run, run
from .references import draw_weights


NAMES = ["floor", "cat", "dog"]
COLORS = np.array([(90, 160, 90), (220, 60, 40), (40, 60, 220)])
DENSE = ("semantic_segmentation", "universal_segmentation", "depth_estimation")
OBJECTS = ("object_detection", "keypoint_detection")
# Task names with underscores, which are used as file names.
TASKS: dict[str, type[Task]] = {name: tasks.TASKS[name.replace("_", "-")] for name in DENSE}
OBJECT_TASKS: dict[str, type[Task]] = {name: tasks.TASKS[name.replace("_", "-")] for name in OBJECTS}
ALL_TASKS = {**TASKS, **OBJECT_TASKS}
NUM_TRAIN, NUM_VALIDATION = 8, 5
SCENES_BATCHES = (2,)  # batch sizes per process; the number of validation images is not divisible by them
UPSCALED = {"num_blocks": 1, "num_upscale_blocks": 1}
CONFIG = {
    **encoder_shape(32, 2, 64),
    "patch_size": 4,
    "segmentation_config": {"hidden_size": 16},
    "universal_segmentation_config": {**UPSCALED, "num_queries": 6, "train_num_points": 200},
    "depth_config": {"neck_hidden_sizes": [16, 16, 16, 16], "fusion_hidden_size": 16, "head_hidden_size": 8},
    "detection_config": {"decoder": "queries", "num_queries": 20, "num_layers": 0},
    "keypoint_config": {"hidden_size": 16},
}
QUIET = ["--use_cpu", "--disable_tqdm", "true", "--report_to", "none", "--choose_defaults", "false"]
SMALL = [*QUIET, "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "2"]
TINY = ["--preset", "tiny", "--image_size", "16", "--config_overrides", json.dumps(CONFIG)]
A_FEW_STEPS = ["--max_steps", "3", "--eval_strategy", "no", "--save_strategy", "no", "--learning_rate", "1e-3"]
OF_TASK = {
    "semantic_segmentation": [],
    "universal_segmentation": ["--thing_classes", "cat,dog"],
    "depth_estimation": [],
    "object_detection": ["--image_size", "24"],
    "keypoint_detection": ["--image_size", "32"],
}


def write_scenes(folder: Path) -> Path:
    """Writes images of several sizes that show an animal on a floor, with masks and depth maps; returns `folder`.

    The animal is a colored box at a depth of 2 meters; the floor extends from 2 to 6 meters. Brightness decreases with
    depth. The first column of pixels has no label and no depth.
    """
    generator = np.random.default_rng(0)
    for split, count in (("train", NUM_TRAIN), ("val", NUM_VALIDATION)):
        for kind in ("images", "masks", "depths"):
            (folder / split / kind).mkdir(parents=True)
        for number in range(count):
            height, width = 18 + 3 * (number % 3), 20 + 5 * (number % 4)
            mask = np.zeros((height, width), dtype=np.uint8)
            top, left = generator.integers(2, 6, 2)
            animal = (slice(top, top + 9), slice(left, left + 10))
            mask[animal] = 1 + number % 2
            depth = np.tile(np.linspace(6000, 2000, height).astype(np.uint16)[:, None], (1, width))
            depth[animal] = 2000
            noisy = COLORS[mask] * (2000 / depth)[..., None] + generator.normal(0, 10, (height, width, 3))
            mask[:, 0], depth[:, 0] = 255, 0
            for kind, pixels in (("images", noisy.clip(0, 255).astype(np.uint8)), ("masks", mask), ("depths", depth)):
                Image.fromarray(pixels).save(folder / split / kind / f"{number}.png")
    (folder / "classes.txt").write_text("\n".join(NAMES))
    return folder


def arguments_of(task: str, data: Path, output_dir: Path, *options: str) -> list[str]:
    model = [] if "--model_name_or_path" in options else TINY
    places = ["--dataset_name", str(data), "--output_dir", str(output_dir), "--train_val_split", "0"]
    return [*SMALL, *model, *places, *OF_TASK[task], *options]


def run_task(task: str, data: Path, output_dir: Path, *options: str) -> None:
    run(ALL_TASKS[task], arguments_of(task, data, output_dir, *options), None, report=lambda _: None)


def train(task: str, data: Path, output_dir: Path, *options: str) -> dict[str, float]:
    run_task(task, data, output_dir, *options)
    scores: dict[str, float] = json.loads((output_dir / "validation_scores.json").read_text())
    return scores


def make_trainer(task: str, data: Path, output_dir: Path, *options: str) -> EvaluatorTrainer:
    """Returns the Trainer of a training script, with a float64 model in which zero head weights become nonzero."""
    task_class = ALL_TASKS[task]
    made = opened_run(task_class, arguments_of(task, data, output_dir, *options))
    trainer = build_run(made).trainer
    draw_weights(trainer.model)
    if task == "object_detection":
        move_boxes_to_objects(trainer.model)
    trainer.model.double()
    trainer.data_collator = Float64Collator(trainer.data_collator)
    return trainer


def move_boxes_to_objects(model: HfViTForObjectDetection) -> None:
    """Shifts all predicted boxes to the objects on the right. With random weights, no box would match an object."""
    last = model.detection_head.box_predictor.layers[-1]
    with torch.no_grad():
        last.weight.mul_(0.05)
        last.bias.copy_(torch.tensor([0.7, -0.2, -0.7, -0.1]))


@dataclass
class Float64Collator:
    """Data collator that converts pixels to float64, so that predictions do not depend on the batch size."""

    collator: Any
    keeps_targets: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = replace(self.collator, keeps_targets=self.keeps_targets)(examples)
        return {**batch, "pixel_values": batch["pixel_values"].double()}


def scores_of(trainer: EvaluatorTrainer, images: TargetDataset | None = None) -> dict[str, float]:
    """Returns the loss and scores of a model, but not its speed. Uses the validation images by default."""
    found = trainer.evaluate(images)
    return {name: found[f"eval_{name}"] for name in ("loss", *trainer.evaluator.metric.score_names)}


def scores_at_all_batch_sizes(data: dict[str, Path], folder: Path) -> dict[str, dict[int, dict[str, float]]]:
    scores: dict[str, dict[int, dict[str, float]]] = {}
    for task, own in data.items():
        trainer = make_trainer(task, own, folder)
        scores[task] = {}
        for batch_size in SCENES_BATCHES:
            trainer.args.per_device_eval_batch_size = batch_size
            scores[task][batch_size] = scores_of(trainer)
    return scores
