"""Test sampling, padding, query groups and initialization of the deformable decoder."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.image_transforms import center_to_corners_format

from hf_vit import HfViTForObjectDetection
from hf_vit.model.deformable_decoder import (
    DetectionPrediction,
    HfViTDeformableDecoder,
    Pyramid,
    closest_anchor_mask,
    deformable_attention,
    select_proposals,
)
from hf_vit.model.task_configurations import HfViTDetectionConfig
from hf_vit.model.task_object_detection import box_overlaps

from ..helpers.models import objects, pixels, small_config
from ..helpers.references import assert_close, draw_weights
from .checks import DEFORMABLE, draw_statistics, pad_images, train
from .checks import build as build_model
from .test_detection_models import average_precision, check_loss_and_gradients, padded_batch


def build(**options: Any) -> HfViTDeformableDecoder:
    """Return a float64 decoder in evaluation mode with random weights and statistics."""
    torch.manual_seed(0)
    decoder = HfViTDeformableDecoder(small_config(), HfViTDetectionConfig(**{**DEFORMABLE, **options}))
    draw_weights(decoder)
    return draw_statistics(decoder).double().eval()


def levels_of(decoder: HfViTDeformableDecoder, batch: int, grid: tuple[int, int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 32, *grid, generator=generator).double() for _ in decoder.out_indices]


def assert_same_predictions(actual: list[DetectionPrediction], expected: list[DetectionPrediction]) -> None:
    assert len(actual) == len(expected)
    for number, (own, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(own.logits, other.logits, 1e-10, f"logits {number}")
        assert_close(own.boxes, other.boxes, 1e-10, f"boxes {number}")


def part_of(prediction: DetectionPrediction, start: int, stop: int, dim: int = 0) -> DetectionPrediction:
    return DetectionPrediction(*(part.narrow(dim, start, stop - start) for part in prediction))


def draw_sampling(grids: list[tuple[int, int]]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return random maps, positions and weights: two images, three queries, two heads (width 2), two points per level.

    Some sampling positions are outside the maps.
    """
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(2, 2, 2, *grid, generator=generator).double().requires_grad_() for grid in grids]
    places = (torch.rand(2, 3, 2, len(grids), 2, 2, generator=generator) * 1.6 - 0.3).double().requires_grad_()
    weights = torch.rand(2, 3, 2, len(grids), 2, generator=generator).double().requires_grad_()
    return maps, places, weights


def read_point(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the bilinear sample (d,) of a map (d, h, w) at x and y in [0, 1], with zeros outside the map."""
    height, width = values.shape[1:]
    column, row = x * width - 0.5, y * height - 0.5
    left, top = math.floor(column.detach()), math.floor(row.detach())
    total = torch.zeros(len(values), dtype=values.dtype)
    for j, share_y in ((top, 1 - (row - top)), (top + 1, row - top)):
        for i, share_x in ((left, 1 - (column - left)), (left + 1, column - left)):
            if 0 <= j < height and 0 <= i < width:
                total = total + share_y * share_x * values[:, j, i]
    return total


def attend_by_loop(maps: list[Tensor], places: Tensor, weights: Tensor) -> Tensor:
    batch, queries, heads, levels, points, _ = places.shape
    images = []
    for b, q, n in itertools.product(range(batch), range(queries), range(heads)):
        total = torch.zeros(2, dtype=torch.float64)
        for level, t in itertools.product(range(levels), range(points)):
            x, y = places[b, q, n, level, t]
            total = total + weights[b, q, n, level, t] * read_point(maps[level][b, n], x, y)
        images.append(total)
    return torch.cat(images).reshape(batch, queries, -1)


def test_deformable_attention_equals_a_loop_forward_and_backward() -> None:
    maps, places, weights = draw_sampling([(3, 5), (2, 2)])
    assert ((places < 0) | (places > 1)).double().mean() > 0.2
    actual, expected = deformable_attention(maps, places, weights), attend_by_loop(maps, places, weights)
    assert_close(actual, expected, 1e-12, "output")
    direction = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).double()
    inputs = [*maps, places, weights]
    ours, loops = (torch.autograd.grad((out * direction).sum(), inputs) for out in (actual, expected))
    for own, other in zip(ours, loops, strict=True):
        assert_close(own, other, 1e-10, "gradient")


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_padded_equals_unpadded(norm: str) -> None:
    decoder = build(projector_norm=norm, scale_factors=(2, 1, 0.5, 0.25))
    grids = [(3, 7), (5, 4), (5, 7)]
    batch = levels_of(decoder, 3, (5, 7))
    _, mask = pad_images([torch.zeros(1, 1, *grid) for grid in grids], patch_size=1)
    together = decoder(batch, mask)
    for index, (rows, columns) in enumerate(grids):
        alone = decoder([level[index : index + 1, :, :rows, :columns] for level in batch])
        assert_same_predictions([part_of(prediction, index, index + 1) for prediction in together], alone)


def test_padding_has_no_part_in_statistics_and_gradients() -> None:
    decoder = build(projector_norm="batch").train()
    inner = [level.requires_grad_() for level in levels_of(decoder, 2, (3, 5))]
    mask = nn.functional.pad(torch.ones(2, 3, 5, dtype=torch.bool), (0, 2, 0, 1))
    padded = [nn.functional.pad(level, (0, 2, 0, 1), value=3.0) for level in inner]
    expected, actual = decoder(inner), decoder(padded, mask)
    assert_same_predictions(actual, expected)
    totals = [
        sum(part.square().sum() for parts in predictions for part in parts) for predictions in (actual, expected)
    ]
    gradients = [torch.autograd.grad(total, [*inner, *decoder.parameters()]) for total in totals]
    for own, other in zip(*gradients, strict=True):
        # The gradient of a bias before batch norm is zero, except for rounding errors.
        torch.testing.assert_close(own, other, rtol=0, atol=1e-9 * float(other.abs().max()) + 1e-11)


def test_queries_start_at_the_top_proposals_and_surplus_queries_are_empty() -> None:
    decoder = build(scale_factors=(1,))
    (head, *_), levels = decoder.proposal_heads, levels_of(decoder, 2, (3, 5))
    (maps, _), *_ = decoder.projector(levels)
    scores = head.class_head(head.norm(head.linear(maps.flatten(2).transpose(1, 2)))).amax(dim=2)  # (2, 15)
    start = decoder(levels)[0].logits.amax(dim=2)
    assert_close(start, scores.sort(dim=1, descending=True).values[:, :4], 1e-12, "scores")
    decoder = build(num_queries=30, scale_factors=(1,))
    levels = levels_of(decoder, 1, (3, 4))
    for prediction in decoder(levels):
        sizes = prediction.boxes[0, :, 2:].amax(dim=1)
        assert (sizes[:12] > 0).all()
        assert (sizes[12:] == 0).all()
        assert prediction.logits.isfinite().all()
    padded = [nn.functional.pad(level, (0, 4, 0, 3)) for level in levels]
    mask = nn.functional.pad(torch.ones(1, 3, 4, dtype=torch.bool), (0, 4, 0, 3))
    assert_same_predictions(decoder(padded, mask), decoder(levels))


def test_an_object_is_assigned_to_the_valid_anchor_closest_to_its_box() -> None:
    anchors = torch.tensor([[[0.2, 0.2, 0.1, 0.1], [0.2, 0.2, 0.4, 0.4], [0.7, 0.7, 0.1, 0.1]]]).expand(2, -1, -1)
    is_valid = torch.tensor([[True, True, True], [True, True, False]])
    boxes = torch.tensor([[0.3, 0.3, 0.35, 0.35], [0.6, 0.6, 0.1, 0.1]])
    labels = [{"boxes": boxes}, {"boxes": boxes[1:]}]
    # In the second image, the third position is nearest to the object but invalid. Images may have no objects.
    assert closest_anchor_mask(anchors, is_valid, labels).tolist() == [[False, True, True], [True, False, False]]
    assert not closest_anchor_mask(anchors[:1], is_valid[:1], [{"boxes": boxes[:0]}]).any()


def test_training_adds_a_proposal_per_group_for_low_scored_objects() -> None:
    decoder, levels = build(scale_factors=(1,)), levels_of(build(), 2, (3, 5))
    features, anchors, _ = select_proposals(Pyramid.of(decoder.projector(levels, None)), 4)
    heads = decoder.proposal_heads
    logits = [head.class_head(head.norm(head.linear(features))) for head in heads]  # each of shape (2, 15, 5)
    unlikely = logits[0].amax(dim=2).argmin(dim=1)
    labels = [{"boxes": boxes[place][None]} for boxes, place in zip(anchors, unlikely, strict=True)]
    assert_same_predictions(decoder(levels, None, labels), decoder(levels))  # labels have no effect in evaluation mode
    start = decoder.train()(levels, None, labels)[0]
    for number, own in enumerate(logits):
        for image, place in enumerate(unlikely):
            likeliest = own[image].amax(dim=1).sort(descending=True).indices.tolist()
            others = [other for other in likeliest if other != place][:3]
            chosen = sorted([*others, int(place)], key=likeliest.index)
            assert_close(start.logits[image, 4 * number : 4 * number + 4], own[image, chosen], 1e-12, "logits")


def test_groups_of_queries_do_not_see_each_other() -> None:
    decoder = build().train()
    levels = levels_of(decoder, 2, (3, 5))
    before = decoder(levels)
    assert [tuple(part.shape) for part in before[-1]] == [(2, 12, 5), (2, 12, 4)]
    with torch.no_grad():
        decoder.query_features.weight[4:8] += 1
    after = decoder(levels)
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        same = (one.logits == other.logits).flatten(2).all(dim=2)
        assert same[:, :4].all()
        assert same[:, 8:].all()
        assert same[:, 4:8].all() == (number == 0)  # the first prediction contains the proposals
    assert_same_predictions(decoder.eval()(levels), [part_of(prediction, 0, 4, dim=1) for prediction in after])


def test_padding_and_splitting_change_no_loss_and_no_gradient() -> None:
    options = {"position_embedding_type": "rotary", "window_size": 2, "global_attention_layers": [1]}
    model = build_model(HfViTForObjectDetection, detection_config=DEFORMABLE, **options).double().train()
    check_loss_and_gradients(model, *padded_batch(model, torch.float64))


def test_blocks_that_the_decoder_does_not_see_have_no_part_in_a_result() -> None:
    options = {"detection_config": {**DEFORMABLE, "out_indices": [2, 0]}, "num_hidden_layers": 4}
    for apply_layernorm in (True, False):
        model = build_model(HfViTForObjectDetection, **options, apply_layernorm=apply_layernorm).train()
        outputs = model(pixels(model.config))

        def with_gradient(values: list[Tensor], model: Any = model) -> set[str]:
            model.zero_grad()
            torch.stack([value.square().sum() for value in values]).sum().backward(retain_graph=True)
            return {name for name, p in model.named_parameters() if p.grad is not None}

        predicted = [part for entry in outputs.auxiliary_outputs for part in entry.values()]
        predicted += [outputs.logits, outputs.pred_boxes]
        of_loss = with_gradient(predicted)
        assert with_gradient([outputs.last_hidden_state]) <= of_loss
        assert not any(name.startswith(("model.encoder.layers.2.", "model.encoder.layers.3.")) for name in of_loss)
        assert any(name.startswith("model.norm.") for name in of_loss) is apply_layernorm
        model.eval()
        images = pixels(model.config)
        asked = model(images, output_hidden_states=True)
        assert len(asked.hidden_states) == 5
        state = asked.hidden_states[2]
        assert torch.equal(asked.last_hidden_state, model.model.norm(state) if apply_layernorm else state)
        assert torch.equal(asked.last_hidden_state, model(images).last_hidden_state)
        # Unlike a block, nn.Identity has no argument for rotary positions.
        model.model.encoder.layers[2] = model.model.encoder.layers[3] = nn.Identity()
        model(images)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_every_weight_gets_a_gradient(norm: str) -> None:
    decoder = build(projector_norm=norm, scale_factors=(2, 1, 0.5, 0.25)).train()
    predictions = decoder(levels_of(decoder, 2, (5, 6)))
    torch.stack([part.square().sum() for prediction in predictions for part in prediction]).sum().backward()
    # The key biases have no gradient: they shift all scores of a query equally, which the softmax cancels.
    without = [name for name, p in decoder.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-9]
    # Batch norm cancels a bias that is added to all patches equally.
    upsampled = [f"projector.scales.0.resamplings.{level}.upsample.bias" for level in range(3)]
    assert without == [
        *(upsampled if norm == "batch" else []),
        *(f"blocks.{block}.attention.key.bias" for block in range(2)),
    ]


def test_initialization_is_that_of_the_design() -> None:
    config = small_config(detection_config={**DEFORMABLE, "num_points": 3}, initializer_range=0.03)
    torch.manual_seed(0)
    for model in (
        HfViTForObjectDetection(config),
        HfViTForObjectDetection.from_pretrained(None, config=config, state_dict={}, ignore_mismatched_sizes=True),
    ):
        decoder = model.detection_head
        for head in decoder.proposal_heads:
            assert (head.class_head.layers[-1].bias == math.log(0.01 / 0.99)).all()
            assert not head.box_head.layers[-1].weight.any()
        assert not decoder.class_head.layers[-1].bias.any()
        for weight in (
            decoder.class_head.layers[-1].weight,
            decoder.box_head.layers[-1].weight,
            decoder.query_features.weight,
            decoder.query_boxes.weight,
            decoder.blocks[0].fc1.weight,
            decoder.projector.scales[0].conv1.conv.weight,
        ):
            assert weight.detach().std() == pytest.approx(0.03, rel=0.25)
        attention = decoder.blocks[0].deformable
        ring = attention.offsets.bias.detach().reshape(4, 2, 3, 2)  # (heads, levels, points, 2)
        first = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
        for point in range(3):
            for level in range(2):
                torch.testing.assert_close(ring[:, level, point], (point + 1) * first, rtol=0, atol=1e-6)
        assert not any(part.any() for part in (attention.offsets.weight, *attention.weights.parameters()))
        assert attention.value.weight.detach().std() == pytest.approx(math.sqrt(2 / 32), rel=0.25)


def test_model_finds_the_objects_of_one_batch() -> None:
    torch.manual_seed(0)
    options = {**DEFORMABLE, "num_queries": 8, "num_groups": 3, "scale_factors": (1,), "hidden_size": 32}
    model = HfViTForObjectDetection(small_config(detection_config=options, window_size=2, global_attention_layers=[1]))
    batch = objects(model.config, 3)
    train(model, batch, steps=450, max_lr=2e-3, clips=True)
    outputs = model(**batch)
    assert outputs.logits.shape == (3, 8, 5)
    for probabilities, boxes, target in zip(outputs.probabilities, outputs.pred_boxes, batch["labels"], strict=True):
        found = probabilities.amax(dim=1) > 0.5
        order, expected = (values[:, 0].argsort() for values in (boxes[found], target["boxes"]))
        assert torch.equal(probabilities[found].argmax(dim=1)[order], target["class_labels"][expected])
        overlaps, _ = box_overlaps(*map(center_to_corners_format, (boxes[found][order], target["boxes"][expected])))
        assert (overlaps > 0.9).all()
    assert average_precision(outputs, batch["labels"], model.config.num_labels) > 0.95
