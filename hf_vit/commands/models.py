"""Commands that train and run models. The docstrings of the functions are their help pages."""

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from accelerate import PartialState

from .. import pretraining
from ..inference.predict import predict_files
from ..inference.search import search_images
from ..inference.serving import serve_models
from ..runs.evaluate import evaluate as run_evaluation
from ..runs.run import run
from ..tasks import TASKS


def train(task: str, *, report: Callable[[str], None], **options: Any) -> None:
    """Train a model from scratch, or fine-tune a saved or published model.

    Usage: hf-vit train TASK DATA [options]

    The trained model is evaluated and saved with its image processor, code, scores and model card.

    Examples:
        hf-vit train image-classification photos
        hf-vit train image-classification photos --model facebook/dinov2-small --output_dir outputs/photos
        hf-vit train object-detection cells --recipe bccd --dry_run
        hf-vit train image-classification outputs/photos/recipe.yaml --resume_from_checkpoint last
        torchrun --nproc_per_node 2 -m hf_vit train depth-estimation rooms

    DATA is a folder, a file, or a dataset name on the Hub. TASK is one of:
    """
    run(TASKS[task], options, report, program=("train", task))


def evaluate(*, report: Callable[[str], None], **options: Any) -> None:
    """Evaluate a saved model on a dataset, with one or several processes, and write scores and figures.

    Usage: hf-vit evaluate MODEL DATA [options]

    The options depend on the task of the model. List them with: hf-vit evaluate MODEL --help

    Examples:
        hf-vit evaluate outputs/photos photos
        hf-vit evaluate outputs/photos photos --split validation --output_dir outputs/scores
        torchrun --nproc_per_node 2 -m hf_vit evaluate outputs/cells cells
    """
    run_evaluation(options, report)


@wraps(pretraining.pretrain, assigned=())
def pretrain(*args: Any, **options: Any) -> None:
    """Pretrain an encoder on images without their labels, and measure the gain on labeled images.

    The command trains a baseline on the labeled images (1/5 of the time), pretrains an encoder (3/5), fine-tunes it on
    the labeled images (1/5), and compares the scores of the fine-tuned model and the baseline.
    Without labeled images, only pretraining runs. With --model, pretraining and the baseline start from a saved or
    published model; add --lora_rank 8 to pretrain only low-rank updates of its weights.

    Examples:
        hf-vit pretrain photos --minutes 60
        hf-vit pretrain photos --model facebook/dinov2-small --minutes 30
        hf-vit pretrain photos more_photos --labels labeled_photos --task semantic-segmentation
    """
    pretraining.pretrain(*args, **options)


@wraps(predict_files, assigned=())
def predict(model: str, *, report: Callable[[str], None], **options: Any) -> None:
    """Predict labels, segments, depth, objects or keypoints of images, depending on the task of the saved model.

    The command prints one line of JSON per image or frame of a video. Unreadable files are reported on stderr, and the
    exit code is 1. Several processes share the images and write parquet files; the same command resumes the run.

    Examples:
        hf-vit predict outputs/digits photo.png folder_of_images --picture labeled.png > predictions.jsonl
        hf-vit predict outputs/streets folder_of_images --output_dir outputs/masks
        hf-vit predict outputs/pets photo.png --subtask instance --threshold 0.8 --picture pets.png
        hf-vit predict outputs/rooms folder_of_images --output_dir outputs/depths
        hf-vit predict outputs/animals folder_of_images --picture animals.png > animals.jsonl
        hf-vit predict outputs/poses folder_of_images --boxes animals.jsonl --picture poses.png
        hf-vit predict outputs/animals film.mp4 --picture film-labeled.mp4 > film.jsonl
        torchrun --nproc_per_node 2 -m hf_vit predict outputs/digits folder_of_images --output_dir outputs/labels
        hf-vit predict openai/clip-vit-base-patch32 folder_of_images --labels cat "a red car"
    """
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ValueError(
            f"The folder {model} has no config.json, so it is not a saved model. Train one first: hf-vit train"
        )
    errors = total = 0
    for line in predict_files(model, **options):
        total += line.get("frame", 0) == 0
        if "error" in line:
            errors += 1
            sys.stderr.write(f"{line['error']}\n")
        else:
            report(json.dumps(line, allow_nan=False))
    if errors:
        raise ValueError(f"{errors} of {total} files cannot be read as images.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState().destroy_process_group()  # Without this call, processes can abort at exit.


@wraps(search_images, assigned=())
def search(*args: Any, report: Callable[[str], None], **options: Any) -> None:
    """Rank images by their similarity to a text, with an image-text model such as CLIP.

    The command prints one line of JSON per image, most similar first. Image features are cached for later searches.

    Examples:
        hf-vit search openai/clip-vit-base-patch32 folder_of_images "a dog on grass" --picture found.png
    """
    for line in search_images(*args, **options):
        report(json.dumps(line))


@wraps(serve_models, assigned=())
def serve(*args: Any, **options: Any) -> None:
    """Serve models over HTTP: an endpoint for programs, and a page for people at the address that is printed.

    POST /v1/predict answers images (multipart field "image") as `hf-vit predict` does, POST /v1/embeddings has the
    format of the OpenAI API, and /docs describes both. The page shows predictions and attention of a photo.

    Examples:
        hf-vit serve outputs/pets
        hf-vit serve outputs/pets outputs/rooms --host 0.0.0.0 --token "$TOKEN"
        hf-vit serve facebook/dinov2-small --port 8001
        hf-vit serve outputs/pets --host 0.0.0.0 --allowed_hosts pets.example.com
    """
    serve_models(*args, **options)
