"""Which task a saved model is for."""

import argparse
from pathlib import Path

from transformers import PreTrainedConfig

from .boxes import read_box_file
from .classification import Classification
from .depth import DepthEstimation
from .keypoints import KeypointDetection
from .objects import ObjectDetection
from .segmentation import PanopticSegmentation, SemanticSegmentation
from .task import Task


THRESHOLD = 0.5  # least score of a segment or an object


def open_model(args: argparse.Namespace, files: list[Path]) -> Task:
    """Opens the model with the pipeline of its class; `ValueError` where there is none for it."""
    config, _ = PreTrainedConfig.get_config_dict(args.model)
    # timm's checkpoints, which transformers opens too, name no class.
    name = str((config.get("architectures") or ["ForImageClassification"])[0])
    threshold = THRESHOLD if args.threshold is None else args.threshold
    if args.boxes is not None and "ForKeypointDetection" not in name:
        raise ValueError(f"--boxes {args.boxes} says where keypoints are to be found, but {args.model} finds none.")
    if "ForImageClassification" in name:
        return Classification(args.model, top_k=args.top_k, batch_size=args.batch_size)
    if "Segmentation" in name:
        is_semantic = args.subtask == "semantic" or "ForSemanticSegmentation" in name
        task = SemanticSegmentation if is_semantic else PanopticSegmentation
        return task(args.model, threshold, args.subtask)
    if "ForDepthEstimation" in name:
        return DepthEstimation(args.model)
    if "ForObjectDetection" in name:
        return ObjectDetection(args.model, threshold=threshold)
    if "ForKeypointDetection" in name:
        boxes = {} if args.boxes is None else read_box_file(args.boxes, files)
        return KeypointDetection(args.model, boxes, threshold=args.threshold, batch_size=args.batch_size)
    raise ValueError(
        f"{args.model} was saved as {name}, which neither names images, nor segments them, nor estimates depth, nor "
        "finds objects or keypoints. Give a model that was trained for one of these."
    )
