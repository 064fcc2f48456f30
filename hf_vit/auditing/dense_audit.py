"""Compare boxes and masks of a dataset with the predictions of a trained detector or segmenter."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from transformers.utils import logging

from ..data.datasets import TargetData
from ..data.reading.files import joined
from ..model.image_targets import IGNORED_LABEL
from ..runs.evaluate import plan_evaluation
from ..tasks.base import Task
from ..tasks.common.load_data import check_known, with_model_classes
from ..tasks.common.models import open_processor, open_trained, read_config_of
from ..tasks.object_detection import ObjectDetection
from ..tasks.semantic_segmentation import SemanticSegmentation
from .audit_result import Audit
from .label_quality import ObjectIssue, find_object_issues, mask_issue_score


DENSE_TASKS = (ObjectDetection, SemanticSegmentation)
LEAST_SCORE = 0.1  # minimum score of predicted boxes that are compared with given boxes
BOX_CUT = 0.5  # score of an object above which its image is reported
ERROR_RATE = 0.05  # share of wrong objects that is assumed
MASK_CUT = 0.95  # score of a mask above which its image is reported
PICTURE_SIDE = 320  # longer side of pictures in pixels
COLORS = {"given": "lime", "overlooked": "red", "swapped": "magenta", "unconfirmed": "cyan"}


def open_dense(data: str, model: str, output_dir: str) -> tuple[Task, TargetData] | None:
    """Return the specification of a detector or segmenter and its data, or None for other models.

    Raises:
        OSError: if the model or the data is missing.
        ValueError: if the data has no boxes or masks, or a class that the model does not have.
    """
    config = read_config_of(model)
    name = str((config.get("architectures") or [""])[0])
    if name not in [task.model_class.__name__ for task in DENSE_TASKS]:
        return None
    values = {"model_name_or_path": model, "dataset_name": data, "output_dir": output_dir}
    task, _ = plan_evaluation(values)
    loaded = task.open_data()
    check_known(loaded.names, config.get("label2id", {}), data)
    return task, loaded


@torch.no_grad()
def check_dense_labels(found: Audit, task: Task, data: TargetData, device: torch.device) -> None:
    """Predict all images of the data, and add the images whose boxes or masks contradict the predictions."""
    model = open_trained(task.model_class, found.model).eval().float().to(device)
    processor = open_processor(model, found.model)
    data = with_model_classes(data, model.config.label2id)
    examples = {split: data.examples(split) for split in data.splits}
    scores, faults = np.full(len(found.images), np.nan), []
    objects: list[tuple[Any, ...]] = []  # number of the image and fields of `ObjectIssue`
    places = [(split, index) for split, own in examples.items() for index in range(len(own))]
    for number, (split, index) in enumerate(logging.tqdm(places, desc="Comparing labels", unit=" images")):
        try:
            example = examples[split][index]
        except (OSError, TypeError, ValueError) as error:
            found.images[number].text = found.images[number].text or str(error)
            faults.append(str(error))
            continue
        image = example["image"]
        outputs = model(**processor(images=[image], return_tensors="pt").to(device))
        size = [(image.height, image.width)]
        if "segmentation_map" in example:
            (result,) = processor.post_process_semantic_segmentation(outputs, size, True)
            mask = example["segmentation_map"].long()  # (H, W)
            probabilities = result["segmentation_scores"].cpu()
            scores[number] = mask_issue_score(mask, probabilities)
            found.images[number].text, found.pictures[number] = _show_mask(image, mask, probabilities, data.names)
            classes = [label for label in mask.unique().tolist() if label != IGNORED_LABEL]
        else:
            (result,) = processor.post_process_object_detection(outputs, LEAST_SCORE, size)
            issues = find_object_issues(example, {name: value.cpu() for name, value in result.items()})
            objects += [(number, *issue) for issue in issues]
            scores[number] = 0.0
            classes = example["class_labels"].tolist()
        for label in classes:
            found.counts[data.names[label]][split] += 1
    found.notes.append("Boxes and masks on which the model was trained cannot be checked: it repeats their errors.")
    if isinstance(task, ObjectDetection):
        found.notes.append("Only an accurate detector finds wrong boxes. A weak one contradicts right boxes, too.")
        _rank_objects(found, scores, pd.DataFrame(objects, columns=["image", *ObjectIssue._fields]), data.names)
        kind, cut = "wrong_boxes", BOX_CUT
    else:
        kind, cut = "wrong_mask", MASK_CUT
    found.scores[kind], found.found[kind] = scores, np.nan_to_num(scores) > cut
    if faults:
        found.notes.append(f"{len(faults):,} images with invalid targets were not compared: {joined(faults)}.")


def _show_mask(image: Image.Image, mask: Tensor, scores: Tensor, names: tuple[str, ...]) -> tuple[str, Image.Image]:
    """Return a description and a picture of the differences between a mask (H, W) and `scores` (K, H, W)."""
    is_given = mask != IGNORED_LABEL
    own = scores.gather(0, mask.clamp(max=len(scores) - 1)[None])[0].where(is_given, torch.tensor(1.0))
    wrong = (scores.argmax(dim=0) != mask) & is_given
    pairs, counts = torch.stack([mask[wrong], scores.argmax(dim=0)[wrong]]).unique(dim=1, return_counts=True)
    text = ""
    if len(counts):
        given, predicted = pairs[:, counts.argmax()].tolist()
        text = f"{float(counts.max()) / mask.numel():.0%} of the pixels: {names[given]} → {names[predicted]}"
    heat = Image.fromarray(((1 - own) * 200).byte().numpy())
    marked = Image.composite(Image.new("RGB", image.size, "red"), image.convert("RGB"), heat)
    marked.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    return text, marked


def find_likelihoods(issues: pd.DataFrame) -> pd.Series:
    """Return, for each difference between given and predicted boxes, how likely the given box is wrong, in [0, 1].

    This is the score times e / (e + p), where e is `ERROR_RATE`, and p the number of other differences of the same
    kind with at least this score, divided by the number of given boxes. A kind of difference that a weak model often
    finds is little evidence of an error.

    Args:
        issues: Fields of `ObjectIssue` as columns.
    """
    others = issues.groupby("kind")["score"].rank(method="max", ascending=False) - 1
    num_given = max(1, (issues["kind"] != "overlooked").sum())
    return issues["score"] * ERROR_RATE / (ERROR_RATE + others / num_given)


def _rank_objects(found: Audit, scores: np.ndarray, issues: pd.DataFrame, names: tuple[str, ...]) -> None:
    """Set the score (N,) of each image to that of its worst object, and draw the reported images."""
    is_given, issues["likelihood"] = issues["kind"] != "overlooked", find_likelihoods(issues)
    for number, own in issues.groupby("image"):
        worst = own.loc[own["likelihood"].idxmax()]
        scores[number] = worst["likelihood"]
        if scores[number] > BOX_CUT and (image := found.open(number)) is not None:
            other = f" → {names[worst['suggestion']]}" if worst["suggestion"] != worst["label"] else ""
            found.images[number].text = f"{worst['kind']}: {names[worst['label']]}{other}"
            found.pictures[number] = _draw_boxes(image, own[is_given[own.index]], own[own["likelihood"] > BOX_CUT])


def _draw_boxes(image: Image.Image, given: pd.DataFrame, likely: pd.DataFrame) -> Image.Image:
    """Return a small picture with the given boxes, and the boxes of likely errors in other colors."""
    picture = image.copy()
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    scale, pen = picture.width / image.width, ImageDraw.Draw(picture)
    for box in given["box"]:
        pen.rectangle([value * scale for value in box], outline=COLORS["given"])
    for kind, box in zip(likely["kind"], likely["box"], strict=True):
        pen.rectangle([value * scale for value in box], outline=COLORS[kind], width=3)
    return picture
