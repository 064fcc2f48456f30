"""Query decoders for object detection overfit one batch, measured by the COCO evaluator."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.image_transforms import center_to_corners_format
from transformers.utils import ModelOutput

from hf_vit import HfViTConfig, HfViTForObjectDetection, HfViTImageProcessor
from hf_vit.evaluation.detection import DetectionMetric

from ..helpers.models import boxes


DECODERS: dict[str, dict[str, Any]] = {
    "all_blocks": {"decoder": "queries", "num_queries": 6},
    "behind_the_encoder": {"decoder": "queries", "num_queries": 6, "num_blocks": 0, "num_layers": 2},
}
STEPS = 300


def painted(count: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return images of colored rectangles whose class is their color; one image has none."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.zeros(count, 3, 64, 64), []
    for index in range(count):
        own = {"class_labels": torch.randint(3, (index,), generator=generator), "boxes": boxes(generator, index)}
        for label, box in zip(own["class_labels"], center_to_corners_format(own["boxes"]), strict=True):
            left, top, right, bottom = (64 * box).round().int().tolist()
            images[index, label, top:bottom, left:right] = 1
        labels.append(own)
    return images, labels


def average_precision(outputs: ModelOutput, labels: list[dict[str, Tensor]], num_classes: int) -> float:
    """Return the mean average precision of detections in square images of any size."""
    sizes = [(64, 64)] * len(labels)
    found = HfViTImageProcessor().post_process_object_detection(outputs, 0.0, target_sizes=sizes)
    metric = DetectionMetric([str(number) for number in range(num_classes)])
    for own, target in zip(found, labels, strict=True):
        truth = {"boxes": 64 * center_to_corners_format(target["boxes"]), "class_labels": target["class_labels"]}
        prediction = {"boxes": own["boxes"], "class_labels": own["labels"], "scores": own["scores"]}
        metric.update([metric.record(prediction, truth)])
    return metric.compute()["map"]


@pytest.mark.parametrize("decoder", DECODERS)
def test_average_precision_of_a_batch_learned_by_heart(decoder: str) -> None:
    torch.manual_seed(0)
    model = HfViTForObjectDetection(
        HfViTConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=64,
            patch_size=8,
            num_labels=3,
            detection_config=DECODERS[decoder],
        )
    ).train()
    images, labels = painted(4)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    for _ in range(STEPS):
        model(images, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        outputs = model.eval()(images)
    assert average_precision(outputs, labels, num_classes=3) > 0.95
