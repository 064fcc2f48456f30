"""Initialization of a new classifier as a linear probe of the features of the training images.

In shapes, M is the number of images, and F the number of features.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...features.probe import Probe
from ...model.task_image_classification import HfViTForImageClassification


MOST_IMAGES = 20_000  # maximum number of images for a probe; more images hardly improve a linear classifier


@torch.no_grad()
def encode(model: HfViTForImageClassification, batches: Iterable[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the pooled features (M, F) and the classes (M,) of all images in the batches."""
    was_training, features, classes = model.training, [], []
    model.eval()
    for batch in batches:
        features.append(model.model(batch["pixel_values"].to(model.device)).pooler_output.float().cpu())
        classes.append(batch["labels"])
    model.train(was_training)
    return torch.cat(features), torch.cat(classes)


@torch.no_grad()
def start_from_probe(classifier: Any, probe: Probe) -> None:
    """Copy the weights of a probe into a linear classifier."""
    classifier.weight.copy_(probe.weight)
    classifier.bias.copy_(probe.bias)
