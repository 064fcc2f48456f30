"""Every decoder of objects overfits one batch, as the COCO evaluator sees it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.image_transforms import center_to_corners_format

from hf_vit import HfViTConfig, HfViTForObjectDetection, HfViTImageProcessor
from hf_vit.evaluation import DetectionMetric

from ..helpers.models import boxes


DECODERS: dict[str, dict[str, Any]] = {
    "all_blocks": {"decoder": "queries", "num_queries": 6},
    "behind_the_encoder": {"decoder": "queries", "num_queries": 6, "num_blocks": 0, "num_layers": 2},
    "deformable": {
        "num_queries": 8,
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_points": 2,
        "num_groups": 3,
        "scale_factors": (1,),
    },
}
WINDOWS = {"window_size": 2, "global_attention_layers": [1]}
# Steps, the highest learning rate and how long Adam remembers gradients; boxes that are refined by what was sampled
# where they are take more steps than those of queries.
SCHEDULES = {"queries": (300, 3e-3, 0.95), "deformable": (450, 4e-3, 0.999)}


def painted(count: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Images of colored rectangles, the class of each its color, one of the images empty."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.zeros(count, 3, 64, 64), []
    for index in range(count):
        own = {"class_labels": torch.randint(3, (index,), generator=generator), "boxes": boxes(generator, index)}
        for label, box in zip(own["class_labels"], center_to_corners_format(own["boxes"]), strict=True):
            left, top, right, bottom = (64 * box).round().int().tolist()
            images[index, label, top:bottom, left:right] = 1
        labels.append(own)
    return images, labels


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
            **(WINDOWS if decoder == "deformable" else {}),
        )
    ).train()
    images, labels = painted(4)
    steps, rate, memory = SCHEDULES[model.options.decoder]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, memory), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    for _ in range(steps):
        model(images, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        outputs = model.eval()(images)
    found = HfViTImageProcessor().post_process_object_detection(outputs, 0.0, target_sizes=[(64, 64)] * 4)
    metric = DetectionMetric(["red", "green", "blue"])
    for own, target in zip(found, labels, strict=True):
        assert (own["scores"] > 0.5).sum() == len(target["boxes"])
        truth = {"boxes": 64 * center_to_corners_format(target["boxes"]), "class_labels": target["class_labels"]}
        prediction = {"boxes": own["boxes"], "class_labels": own["labels"], "scores": own["scores"]}
        metric.update([metric.record(prediction, truth)])
    assert metric.compute()["map"] > 0.95
