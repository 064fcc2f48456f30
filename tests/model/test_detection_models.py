"""Test invariants of detection models, in addition to those of all classes in `test_modeling.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.image_transforms import center_to_corners_format
from transformers.utils import ModelOutput

from hf_vit import HfViTConfig, HfViTForObjectDetection, HfViTImageProcessor
from hf_vit.evaluation.detection import DetectionMetric

from ..helpers.models import boxes, pixels
from ..helpers.references import assert_close
from .checks import DECODERS, assert_same, build, pad_images, train


all_decoders = pytest.mark.parametrize("decoder", DECODERS)


def targets(count: int, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "class_labels": torch.randint(5, (count,), generator=generator),
        "boxes": boxes(generator, count).to(dtype),
    }


def check_loss_and_gradients(model: Any, alone: list[dict[str, Any]], together: dict[str, Any]) -> None:
    """Assert that the loss and gradients of a batch are the sums over its images."""
    results = []
    for batches in (alone, [together]):
        model.zero_grad()
        count = torch.stack([model.count_items(batch["labels"]) for batch in batches]).sum(dim=0)
        loss = torch.stack([model(**batch, num_items_in_batch=count).loss for batch in batches]).sum()
        loss.backward()
        results.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    for expected, actual, name in zip(*results, ("loss", "gradients"), strict=True):
        assert_close(actual, expected, 1e-9, name)


def padded_batch(model: Any, dtype: torch.dtype) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return images of three sizes with 0, 1 and 2 objects, both as separate inputs and as a padded batch."""
    images = [pixels(model.config, batch=1, grid=grid).to(dtype) for grid in ((2, 5), (4, 3), (4, 5))]
    labels = [targets(index, index, dtype) for index in range(3)]
    batch, mask = pad_images(images)
    alone = [{"pixel_values": image, "labels": [own]} for image, own in zip(images, labels, strict=True)]
    return alone, {"pixel_values": batch, "patch_attention_mask": mask, "labels": labels}


@all_decoders
def test_padding_and_splitting_change_no_prediction_no_loss_and_no_gradient(decoder: str) -> None:
    model = build(decoder)
    alone, together = padded_batch(model, torch.float32)
    outputs = model(together["pixel_values"], patch_attention_mask=together["patch_attention_mask"])
    for index, example in enumerate(alone):
        own = model(example["pixel_values"])
        for name in ("pred_boxes", "probabilities", "logits"):
            assert_close(outputs[name][index], own[name][0], 1e-5, name)
    # Rotary positions are used because a position table would be resampled in float32.
    model = build(decoder, position_embedding_type="rotary", image_size=(32, 40)).double().train()
    alone, together = padded_batch(model, torch.float64)
    if decoder == "mid_positions":  # this decoder has a position table, which fits only the last image
        alone, together = alone[2:], {name: value[2:] for name, value in together.items()}
    check_loss_and_gradients(model, alone, together)


@all_decoders
def test_all_layers_are_supervised_and_the_loss_is_normalized_by_batch(decoder: str) -> None:
    model = build(decoder).train()
    options = DECODERS[decoder]
    num_layers = options.get("num_blocks", 3) + options.get("num_layers", 0)
    images = pixels(model.config)
    outputs = model(images, labels=[targets(2, 0), targets(0, 1)])
    assert len(outputs.auxiliary_outputs) == num_layers - 1
    weights = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}
    total = sum(weights["_".join(name.split("_")[:2])] * value for name, value in outputs.loss_dict.items())
    torch.testing.assert_close(outputs.loss.detach(), total)
    assert len(outputs.loss_dict) == 3 * num_layers
    model.eval()
    assert model(images).auxiliary_outputs is None
    labels = [targets(3, 0), targets(1, 1)]
    own, count = model(images, labels=labels).loss, model.count_items(labels)
    assert count[1] == 4
    torch.testing.assert_close(model(images, labels=labels, num_items_in_batch=2 * count).loss, own / 2)
    empty = model(images, labels=[targets(0, 0)] * 2)
    torch.testing.assert_close(empty.loss, empty.loss_dict["loss_ce"])


def test_probabilities_are_those_of_the_classes_alone() -> None:
    model = build("all_blocks")
    outputs = model(pixels(model.config))
    assert outputs.logits.shape == (2, 6, 6)
    assert outputs.probabilities.shape == (2, 6, 5)
    torch.testing.assert_close(outputs.probabilities, outputs.logits.softmax(-1)[..., :5])
    focal = build("mid_positions")
    outputs = focal(pixels(focal.config))
    assert outputs.logits.shape == (2, 6, 5)
    torch.testing.assert_close(outputs.probabilities, outputs.logits.sigmoid())


def test_mid_positions_follow_the_size_of_the_model(tmp_path: Path) -> None:
    model = build("mid_positions")
    model.save_pretrained(tmp_path)
    larger = HfViTForObjectDetection.from_pretrained(tmp_path, image_size=48)
    assert larger.detection_head.mid_position_embeddings.shape == (1, 1 + 36, 32)
    images = pixels(larger.config)
    assert_same(larger(images), model(images), 1e-5)
    with pytest.raises(ValueError, match="num_register_tokens=2 do not match the position embeddings between blocks"):
        HfViTForObjectDetection.from_pretrained(tmp_path, num_register_tokens=2)


def painted(count: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return images with rectangles whose color depends on their class. One image has no rectangles."""
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
    """Return the mean average precision of predictions in square images of any size."""
    sizes = [(64, 64)] * len(labels)
    found = HfViTImageProcessor().post_process_object_detection(outputs, 0.0, target_sizes=sizes)
    metric = DetectionMetric([str(number) for number in range(num_classes)])
    for own, target in zip(found, labels, strict=True):
        truth = {"boxes": 64 * center_to_corners_format(target["boxes"]), "class_labels": target["class_labels"]}
        prediction = {"boxes": own["boxes"], "class_labels": own["labels"], "scores": own["scores"]}
        metric.update([metric.record(prediction, truth)])
    return metric.compute()["map"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("decoder", ["all_blocks", "behind_the_encoder"])
def test_overfitted_batch_has_high_average_precision(decoder: str) -> None:
    """Overfit a model to a batch. `test_deformable.py` tests the deformable decoder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    sizes |= {"image_size": 64, "patch_size": 16, "num_labels": 3}
    model = HfViTForObjectDetection(HfViTConfig(**sizes, detection_config=DECODERS[decoder]))
    images, labels = painted(4)
    train(model, {"pixel_values": images, "labels": labels}, steps=150, max_lr=3e-3, clips=True)
    with torch.no_grad():
        outputs = model(images)
    assert average_precision(outputs, labels, num_classes=3) > 0.95
