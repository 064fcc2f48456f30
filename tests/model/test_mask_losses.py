"""Test that matching, sampling and loss of universal segmentation agree with slow references in float64."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit import HfViTUniversalSegmentationConfig
from hf_vit.model.shared import match
from hf_vit.model.task_universal_segmentation import (
    grid_points,
    mask_losses,
    pairwise_mask_costs,
    sample_points,
    uncertain_points,
    universal_segmentation_loss,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("num_queries", "num_targets"), [(5, 3), (4, 4), (3, 5), (1, 1)])
def test_matching_is_the_cheapest_of_all(num_queries: int, num_targets: int) -> None:
    for seed in range(5):
        cost = draw(num_queries, num_targets, seed=seed)
        queries, targets = match(cost)
        smaller = min(num_queries, num_targets)
        assert len(set(queries.tolist())) == len(set(targets.tolist())) == len(queries) == smaller
        # There are at least as many columns as rows, so each row is matched to a column.
        wide = cost if num_queries < num_targets else cost.T
        choices = itertools.permutations(range(max(num_queries, num_targets)), smaller)
        cheapest = min(sum(wide[row, column] for row, column in enumerate(own)) for own in choices)
        assert float(cost[queries, targets].sum()) == pytest.approx(float(cheapest))


def test_costs_that_are_no_numbers_are_avoided() -> None:
    cost = torch.tensor([[math.nan, 1.0], [math.inf, 2.0], [3.0, -math.inf]])
    queries, targets = match(cost)
    assert dict(zip(targets.tolist(), queries.tolist(), strict=True)) == {0: 2, 1: 0}
    assert len(match(torch.full((2, 2), math.nan))[0]) == 2
    assert [len(part) for part in match(torch.zeros(4, 0))] == [0, 0]
    half = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16)
    assert match(half)[1].tolist() == [1, 0]


def test_sampling_at_pixel_centers_returns_the_pixels() -> None:
    maps = draw(2, 3, 5)
    rows, columns = torch.meshgrid(torch.arange(3).double(), torch.arange(5).double(), indexing="ij")
    points = torch.stack(((columns + 0.5) / 5, (rows + 0.5) / 3), dim=-1).flatten(0, 1)  # (x, y)
    sampled = sample_points(maps, points.expand(2, -1, -1))
    torch.testing.assert_close(sampled, maps.flatten(1), rtol=1e-12, atol=1e-12)
    # Sample at the border between the second and third column, and at the corner, where the map is padded with zeros.
    others = torch.tensor([[[2 / 5, 0.5], [1.0, 1.0]]], dtype=torch.float64)
    expected = [float(maps[0, 1, 1:3].mean()), float(maps[0, 2, 4]) / 4]
    assert sample_points(maps[:1], others)[0].tolist() == pytest.approx(expected)


def test_lattice_points_are_spread_evenly() -> None:
    points = grid_points(9, draw(1))
    assert points.shape == (9, 2)
    assert sorted(set(points[:, 0].tolist())) == pytest.approx([1 / 6, 1 / 2, 5 / 6])
    assert len(set(map(tuple, points.tolist()))) == 9
    assert grid_points(12, draw(1)).shape == (9, 2)
    assert grid_points(1, draw(1)).tolist() == [[0.5, 0.5]]


def test_most_points_lie_where_a_mask_is_least_decided() -> None:
    torch.manual_seed(0)
    columns = torch.arange(64, dtype=torch.float64) - 31.5
    # The logits of this mask are zero on the vertical center line.
    logits = columns.expand(3, 64, 64) * torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    points = uncertain_points(logits, num_points=200, oversample_ratio=4.0, importance_ratio=0.75)
    assert points.shape == (3, 200, 2)
    assert 0 <= points.min() <= points.max() <= 1
    distance = (points[..., 0] - 0.5).abs()
    # The 150 most uncertain of 800 candidates lie in the central 150 / 800 of the width; the other 50 are uniform. The
    # zero padding makes points near the border look uncertain.
    inner = (points[..., 1] - 0.5).abs() < 0.49
    assert (distance[:, :150][inner[:, :150]] < 0.13).all()
    assert distance[:, :150].median() < 0.06
    assert distance[:, 150:].mean() == pytest.approx(0.25, abs=0.04)
    assert points[..., 1].std() == pytest.approx(1 / math.sqrt(12), abs=0.03)
    assert uncertain_points(logits, num_points=10, oversample_ratio=1.0, importance_ratio=0.0).shape == (3, 10, 2)


def compare(logits: Tensor, target: Tensor) -> tuple[float, float]:
    """Return the cross-entropy loss and the Dice loss of one mask."""
    shown = 1 / (1 + (-logits).exp())
    entropy = -(target * shown.log() + (1 - target) * (1 - shown).log()).mean()
    return float(entropy), float(1 - (2 * (shown * target).sum() + 1) / ((shown + target).sum() + 1))


def test_costs_of_pairs_and_losses_by_hand() -> None:
    logits, targets = 2 * draw(4, 7), draw(3, 7, seed=1).sigmoid()
    entropy, dice = pairwise_mask_costs(logits, targets)
    assert entropy.shape == dice.shape == (4, 3)
    for query, target in itertools.product(range(4), range(3)):
        expected = compare(logits[query], targets[target])
        assert [float(entropy[query, target]), float(dice[query, target])] == pytest.approx(expected, rel=1e-12)
    for together, alone in zip((entropy, dice), mask_losses(logits[:3], targets), strict=True):
        torch.testing.assert_close(together.diagonal(), alone, rtol=1e-12, atol=0)


def loss(*inputs: Any, is_training: bool = False, **options: Any) -> Tensor:
    weights = {"class_weight": 2.0, "mask_weight": 5.0, "dice_weight": 3.0, "no_object_weight": 0.1}
    config = HfViTUniversalSegmentationConfig(**{"train_num_points": 16, **weights, **options})
    return universal_segmentation_loss(*inputs, config, is_training)


def example(num_queries: int, counts: list[int]) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return masks (B, Q, 4, 4), classes (B, Q, 4), targets of 8 x 8 pixels in uniform 2 x 2 blocks, and labels."""
    masks = draw(len(counts), num_queries, 4, 4).requires_grad_()
    classes = draw(len(counts), num_queries, 4, seed=1).requires_grad_()
    targets = [(draw(count, 4, 4, seed=2 + count) > 0).double() for count in counts]
    large = [target.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2) for target in targets]
    labels = [torch.arange(count) % 3 for count in counts]
    return masks, classes, large, labels


def slow_loss(masks: Tensor, classes: Tensor, targets: Tensor, labels: Tensor) -> float:
    """Return the loss of one image, computed by trying all matchings of queries and targets."""
    probabilities = classes.softmax(dim=1)

    def mask_part(queries: tuple[int, ...]) -> float:
        pairs = [compare(masks[query], target[::2, ::2]) for query, target in zip(queries, targets, strict=True)]
        return sum(5 * entropy + 3 * dice for entropy, dice in pairs)

    def cost(queries: tuple[int, ...]) -> float:
        return mask_part(queries) - 2 * float(probabilities[list(queries), labels].sum())

    chosen = min(itertools.permutations(range(len(masks)), len(labels)), key=cost)
    wanted, weights = torch.full((len(masks),), 3), torch.full((len(masks),), 0.1, dtype=torch.float64)
    wanted[list(chosen)], weights[list(chosen)] = labels, 1.0
    class_part = -(weights * probabilities[range(len(masks)), wanted].log()).sum() / weights.sum()
    return mask_part(chosen) / max(len(labels), 1) + 2 * float(class_part)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_loss_of_an_image_on_the_lattice(count: int) -> None:
    masks, classes, targets, labels = example(4, [count])
    expected = slow_loss(masks[0].detach(), classes[0].detach(), targets[0], labels[0])
    actual = loss(masks, classes, targets, labels)
    assert float(actual) == pytest.approx(expected, rel=1e-12)
    for dtype in (torch.bool, torch.uint8, torch.float32):
        assert torch.equal(loss(masks, classes, [targets[0].to(dtype)], [labels[0].to(torch.uint8)]), actual)


def test_loss_of_a_batch_is_the_mean_of_those_of_its_images() -> None:
    masks, classes, targets, labels = example(4, [2, 0, 3, 1])
    alone = [float(loss(masks[i : i + 1], classes[i : i + 1], [targets[i]], [labels[i]])) for i in range(4)]
    assert len(set(alone)) == 4
    assert float(loss(masks, classes, targets, labels)) == pytest.approx(sum(alone) / 4, rel=1e-12)


@pytest.mark.parametrize("is_training", [False, True])
def test_no_target_and_more_targets_than_queries(is_training: bool) -> None:
    masks, classes, targets, labels = example(3, [0, 5])
    total = loss(masks, classes, targets, labels, is_training=is_training)
    total.backward()
    assert total.isfinite()
    assert not masks.grad[0].any()
    assert masks.grad[1].flatten(1).any(dim=1).all()  # every query is matched
    assert classes.grad.flatten(1).any(dim=1).all()
    nothing = F.cross_entropy(classes[0], torch.full((3,), 3))
    assert float(loss(masks[:1], classes[:1], targets[:1], labels[:1])) == pytest.approx(2 * float(nothing))


def test_random_points_give_the_loss_of_all_pixels_in_the_mean() -> None:
    torch.manual_seed(0)
    masks, classes, targets, labels = example(4, [3])
    with torch.no_grad():
        options = {"train_num_points": 400, "importance_sample_ratio": 0.0, "class_weight": 0.0}
        drawn = [float(loss(masks, classes, targets, labels, is_training=True, **options)) for _ in range(20)]
        dense = float(loss(masks, classes, targets, labels, train_num_points=10000, class_weight=0.0))
    assert sum(drawn) / 20 == pytest.approx(dense, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_training", [False, True])
def test_autocast_changes_no_pair_and_no_loss(dtype: torch.dtype, is_training: bool) -> None:
    """In half precision, differences between these masks would be rounded to zero, and sums would overflow."""
    _, classes, targets, labels = example(20, [6, 8])
    masks = (100 * draw(2, 1, 4, 4, seed=3) + 0.5 * draw(2, 20, 4, 4)).float()
    classes = classes.detach().float()
    losses = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype, enabled=enabled):
            losses.append(loss(masks, classes, targets, labels, is_training=is_training, train_num_points=2000))
    assert torch.equal(*losses)
