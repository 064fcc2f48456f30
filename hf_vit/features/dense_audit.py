"""Compare boxes and masks of a dataset with the predictions of a trained detector or segmenter."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from transformers.utils import logging

from ..model.image_targets import IGNORED_LABEL
from ..training.load_data import with_model_classes
from ..training.models import open_trained, read_config_of
from ..training.run import plan_evaluation
from ..training.tasks.base import Task
from ..training.tasks.object_detection import ObjectDetection
from ..training.tasks.semantic_segmentation import SemanticSegmentation
from .label_quality import ObjectIssue, find_object_issues, mask_issue_score


logger = logging.get_logger(__name__)
DENSE_TASKS = (ObjectDetection, SemanticSegmentation)
LEAST_SCORE = 0.1  # minimum score of predicted boxes that are compared with given boxes
BOX_CUT = 0.5  # score of an object above which its image is reported
ERROR_RATE = 0.05  # share of wrong objects that is assumed
MASK_CUT = 0.95  # score of a mask above which its image is reported
PICTURE_SIDE = 320  # longer side of pictures in pixels
COLORS = {"given": "lime", "overlooked": "red", "badly_located": "orange", "swapped": "magenta", "unconfirmed": "cyan"}


@dataclass
class DenseIssues:
    """Differences between N images and the predictions of a model.

    Args:
        score: (N,) score of each image in [0, 1]; NaN if it was not compared.
        is_found: (N,) whether the image is reported.
        texts: Description of the worst difference of each image.
        pictures: Picture of the given boxes or of the contradicted pixels, by number of the image.
        faults: Reason why an image or its target cannot be used, by number of the image.
        counts: Number of given objects or of masks with the class, by class name and split.
    """

    score: np.ndarray
    is_found: np.ndarray
    texts: list[str]
    pictures: dict[int, Image.Image] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)


def open_dense(data: str, model: str, output_dir: str) -> Task | None:
    """Return the task of a detector or segmenter with its loaded data, or None for other models.

    Raises:
        OSError: if the model or the data is missing.
        ValueError: if the data has no boxes or masks, or a class that the model does not have.
    """
    name = str((read_config_of(model).get("architectures") or [""])[0])
    if name not in [task.model_class.__name__ for task in DENSE_TASKS]:
        return None
    values = {"model_name_or_path": model, "dataset_name": data, "output_dir": output_dir}
    task, _ = plan_evaluation(values)
    task.loaded = task.open_data()
    return task


@torch.no_grad()
def check_dense_labels(task: Task, name_or_path: str, device: torch.device) -> DenseIssues:
    """Predict all images of `task.loaded` and compare the predictions with the given boxes or masks.

    Args:
        task: Task with loaded data.
        name_or_path: Trained model of the task.
        device: Device to run the model on.
    """
    model = open_trained(task.model_class, name_or_path).eval().float().to(device)
    processor = task.open_processor(model, name_or_path)
    data = with_model_classes(task.loaded, model.config.label2id)
    total = sum(map(len, data.splits.values()))
    found = DenseIssues(np.full(total, np.nan), np.zeros(total, bool), [""] * total)
    objects: dict[int, list[ObjectIssue]] = {}
    numbers = iter(range(total))
    with logging.tqdm(total=total, desc="Comparing labels", unit=" images") as bar:
        for split in data.splits:
            examples = data.examples(split)
            for index in range(len(examples)):
                number = next(numbers)
                bar.update()
                try:
                    example = examples[index]
                except (OSError, TypeError, ValueError) as error:
                    found.faults[number] = str(error)
                    continue
                inputs = processor(images=[example["image"]], return_tensors="pt").to(device)
                outputs = model(**inputs)
                size = [(example["image"].height, example["image"].width)]
                if "segmentation_map" in example:
                    (result,) = processor.post_process_semantic_segmentation(outputs, size, True)
                    classes = _compare_mask(found, number, example, result["segmentation_scores"].cpu(), data.names)
                else:
                    (result,) = processor.post_process_object_detection(outputs, LEAST_SCORE, size)
                    prediction = {name: value.cpu() for name, value in result.items()}
                    objects[number] = find_object_issues(example, prediction)
                    found.pictures[number] = _drawn(example["image"], example["boxes"], objects[number])
                    classes = example["class_labels"].tolist()
                for label in classes:
                    found.counts.setdefault(data.names[label], Counter())[split] += 1
    if objects:
        _rank_objects(found, objects, data.names)
    else:
        found.is_found = np.nan_to_num(found.score) > MASK_CUT
    return found


def _compare_mask(
    found: DenseIssues, number: int, example: dict[str, Any], scores: Tensor, names: tuple[str, ...]
) -> list[int]:
    mask = example["segmentation_map"].long()  # (H, W)
    found.score[number] = mask_issue_score(mask, scores)
    own = scores.gather(0, mask.clamp(max=len(scores) - 1)[None])[0].where(mask != IGNORED_LABEL, torch.tensor(1.0))
    wrong = (scores.argmax(dim=0) != mask) & (mask != IGNORED_LABEL)
    pairs = torch.stack([mask[wrong], scores.argmax(dim=0)[wrong]], dim=1).unique(dim=0, return_counts=True)
    if len(pairs[0]):
        given, predicted = pairs[0][pairs[1].argmax()].tolist()
        share = float(pairs[1].max()) / mask.numel()
        found.texts[number] = f"{share:.0%} of the pixels: {names[given]} → {names[predicted]}"
    image = example["image"].convert("RGB")
    heat = Image.fromarray(((1 - own) * 200).byte().numpy())
    marked = Image.composite(Image.new("RGB", image.size, "red"), image, heat)
    marked.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    found.pictures[number] = marked
    return [label for label in mask.unique().tolist() if label != IGNORED_LABEL]


def _rank_objects(found: DenseIssues, objects: dict[int, list[ObjectIssue]], names: tuple[str, ...]) -> None:
    """Set the score of each image to that of its worst object.

    The score of a difference is multiplied by e / (e + p), where p is the share of objects of the class that have a
    difference of the same kind with at least this score: what a weak model often contradicts is no evidence.
    """
    scores: dict[tuple[str, int], list[float]] = {}
    for issue in (issue for issues in objects.values() for issue in issues):
        scores.setdefault((issue.kind, issue.label), []).append(-issue.score)
    ordered = {key: np.sort(values) for key, values in scores.items()}
    totals = Counter(label for (_, label), values in scores.items() for _ in values)

    def likelihood(issue: ObjectIssue) -> float:
        count = np.searchsorted(ordered[issue.kind, issue.label], -issue.score, side="right")
        return issue.score * ERROR_RATE / (ERROR_RATE + float(count) / totals[issue.label])

    for number, issues in objects.items():
        worst = max(issues, key=likelihood, default=None)
        found.score[number] = 0.0 if worst is None else likelihood(worst)
        if worst is not None:
            other = f" → {names[worst.suggestion]}" if worst.suggestion != worst.label else ""
            found.texts[number] = f"{worst.kind.replace('_', ' ')}: {names[worst.label]}{other}"
    found.is_found = np.nan_to_num(found.score) > BOX_CUT


def _drawn(image: Image.Image, boxes: Tensor, issues: list[ObjectIssue]) -> Image.Image:
    """Return a small picture with the given boxes, and the boxes of likely differences in other colors."""
    picture = image.convert("RGB")
    scale = min(1.0, PICTURE_SIDE / max(picture.size))
    picture = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))))
    pen = ImageDraw.Draw(picture)
    for box in boxes.tolist():
        pen.rectangle(_scaled(box, scale), outline=COLORS["given"])
    for issue in issues:
        if issue.score > BOX_CUT:
            pen.rectangle(_scaled(issue.box, scale), outline=COLORS[issue.kind], width=3)
    return picture


def _scaled(box: list[float], scale: float) -> list[float]:
    left, top, right, bottom = (value * scale for value in box)
    return [min(left, right), min(top, bottom), max(left, right), max(top, bottom)]
