"""The commands that train and use models; the docstrings are their help texts."""

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from .. import pretraining
from ..inference.export import export_model
from ..inference.predict import predict_files
from ..training.run import evaluate as run_evaluation
from ..training.run import run
from ..training.tasks import TASKS


def train(task: str, *, report: Callable[[str], None], **options: Any) -> None:
    """Trains a model, from scratch or from a saved or published one, and writes all that publishing needs.

    Usage: hf-vit train TASK DATA [options]

    Examples:
        hf-vit train image-classification photos
        hf-vit train image-classification photos --model facebook/dinov2-small --output_dir outputs/photos
        hf-vit train object-detection cells --recipe bccd --dry_run
        hf-vit train image-classification outputs/photos/recipe.yaml --resume_from_checkpoint last
        torchrun --nproc_per_node 2 -m hf_vit train depth-estimation rooms

    DATA is a folder, a file, or a name on the Hub. TASK is one of:
    """
    run(TASKS[task], options, report, program=("train", task))


def evaluate(*, report: Callable[[str], None], **options: Any) -> None:
    """Evaluates a saved model on data of its task, on one process or several, and writes scores and pictures.

    Usage: hf-vit evaluate MODEL DATA [options]

    The configuration of the model tells its task, and with it the options: hf-vit evaluate MODEL --help.

    Examples:
        hf-vit evaluate outputs/photos photos
        hf-vit evaluate outputs/photos photos --split validation --output_dir outputs/scores
        torchrun --nproc_per_node 2 -m hf_vit evaluate outputs/cells cells
    """
    run_evaluation(options, report)


@wraps(pretraining.pretrain, assigned=())
def pretrain(*args: Any, **options: Any) -> None:
    """Pretrains on your images without their labels, and measures with the labels what that is worth.

    Three fifths of the time go to pretraining. The rest goes to two training runs with labels, one before it and one
    from the pretrained encoder after it, whose scores are compared. Without labels it ends with the encoder. With
    --model, pretraining continues from a saved or published model; --lora_rank 8 then trains low-rank updates of it.

    Examples:
        hf-vit pretrain photos --minutes 60
        hf-vit pretrain photos --model facebook/dinov2-small --minutes 30
        hf-vit pretrain photos more_photos --labels labeled_photos --task semantic-segmentation
    """
    pretraining.pretrain(*args, **options)


@wraps(export_model, assigned=())
def export(*args: Any, **options: Any) -> None:
    """Exports a saved model to ONNX, OpenVINO, torch.export or ExecuTorch, with batch and image size left open.

    The program is run in its runtime at three batches and three image sizes that were not traced. Unless it is equal
    to the model at all of them, nothing is written.

    Examples:
        hf-vit export outputs/photos --format onnx --output_dir outputs/photos-onnx
        hf-vit export outputs/cells --format openvino --output_dir outputs/cells-openvino
    """
    export_model(*args, **options)


@wraps(predict_files, assigned=())
def predict(model: str, *, report: Callable[[str], None], **options: Any) -> None:
    """Predicts labels, segments, depth, objects or keypoints of images, whatever a saved model was trained for.

    Prints one JSON line per image. Files that cannot be read are named on stderr, and end the script with exit code 1.

    Examples:
        hf-vit predict outputs/digits photo.png folder_of_images --picture labeled.png > predictions.jsonl
        hf-vit predict outputs/streets folder_of_images --output_dir outputs/masks
        hf-vit predict outputs/pets photo.png --subtask instance --threshold 0.8 --picture pets.png
        hf-vit predict outputs/rooms folder_of_images --output_dir outputs/depths
        hf-vit predict outputs/animals folder_of_images --picture animals.png > animals.jsonl
        hf-vit predict outputs/poses folder_of_images --boxes animals.jsonl --picture poses.png
    """
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ValueError(f"The folder {model} holds no config.json, so no saved model. Train one first: hf-vit train")
    errors = total = 0
    for line in predict_files(model, **options):
        total += 1
        if "error" in line:
            errors += 1
            sys.stderr.write(f"{line['error']}\n")
        else:
            report(json.dumps(line, allow_nan=False))
    if errors:
        raise ValueError(f"{errors} of {total} files cannot be read as images.")
