"""Test self-distillation: prototype assignments, cross-entropies of views and patches, and errors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_vit import HfViTForJointEmbedding
from hf_vit.model.task_configurations import HfViTJointEmbeddingConfig
from hf_vit.model.task_joint_embedding import assign, koleo_loss, patch_cross_entropy, view_cross_entropy
from hf_vit.tasks.joint_embedding import FIRST_TEMPERATURE, MASKED_SHARES, Teach, warmed_temperature
from hf_vit.training.callbacks.ema import WeightAverage

from ..helpers.models import DINO, TRAINING_CASES, small_config


CASE = TRAINING_CASES["dino"]


def teach(world_size: int = 1, process_index: int = 0, **attributes: Any) -> Teach:
    """Return the `Teach` callable that a trainer in several processes calls for each batch."""
    transform = Teach(process_index, world_size)
    transform.attach(SimpleNamespace(**attributes))
    return transform


def make_model(**overrides: Any) -> HfViTForJointEmbedding:
    return HfViTForJointEmbedding(small_config(**{**CASE.overrides, **overrides}))


def test_all_prototypes_are_used_equally_however_alike_the_images_are() -> None:
    logits = (torch.randn(40, 4) * 0.02 + torch.tensor([0.3, 0.1, 0.0, -0.3])).double()
    found = assign(logits, temperature=0.05)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(40).double())
    assert float((found.sum(dim=0) / 10 - 1).abs().max()) < 0.05
    # Without balancing, all images are assigned to one prototype.
    assert int(logits.softmax(dim=1).argmax(dim=1).unique().numel()) == 1
    # Balancing only scales rows and columns, so it does not change the logarithms minus their row and column means.
    actual, expected = (values - values.mean(dim=0) for values in (found.log(), logits / 0.05))
    torch.testing.assert_close(
        actual - actual.mean(dim=1, keepdim=True), expected - expected.mean(dim=1, keepdim=True)
    )
    # Assignments are balanced over all processes: `sums` holds sums over two processes, one of which has 7 rows.
    sums: list[torch.Tensor] = []
    whole = assign(logits, 0.1, add=lambda values: sums.append(values) or values)
    torch.testing.assert_close(whole, assign(logits, 0.1))
    torch.testing.assert_close(assign(logits[:7], 0.1, add=lambda values: sums.pop(0)), whole[:7])


def test_each_view_learns_from_all_global_ones_but_itself() -> None:
    logits, assigned = torch.randn(3, 4, 6), torch.randn(3, 2, 6).softmax(dim=-1)
    pairs = [(one, other) for one in range(2) for other in range(4) if one != other]
    logarithms = (logits / 0.1).log_softmax(dim=-1)
    terms = [-(assigned[:, one] * logarithms[:, other]).sum(dim=-1) for one, other in pairs]
    torch.testing.assert_close(view_cross_entropy(logits, assigned, 0.1), torch.stack(terms).mean())


def test_masked_patches_learn_what_is_assigned_to_them() -> None:
    logits, assigned = torch.randn(5, 6), torch.randn(5, 6).softmax(dim=-1)
    masks = torch.tensor([[True, True, False, True], [False] * 4, [False, False, True, False], [True] + [False] * 3])
    first, second, third = (
        torch.nn.functional.cross_entropy(logits[rows] / 0.1, assigned[rows]) for rows in (slice(3), [3], [4])
    )
    # The loss is averaged in each view and then over all views, which is equivalent to `masks_weight` in DINOv2.
    torch.testing.assert_close(patch_cross_entropy(logits, assigned, 0.1, masks), (first + second + third) / 4)
    assert float(patch_cross_entropy(logits[:0], assigned[:0], 0.1, masks & False)) == 0


def test_koleo_loss_increases_the_distance_to_the_nearest_image() -> None:
    features = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.nn.functional.normalize(features.detach(), dim=-1)
    distances = torch.cdist(rows.transpose(0, 1), rows.transpose(0, 1)) + 9 * torch.eye(5)
    loss = koleo_loss(features)
    torch.testing.assert_close(loss, -distances.amin(dim=2).log().mean(dim=1).sum())
    loss.backward()
    with torch.no_grad():
        assert float(koleo_loss(features - 1e-3 * features.grad)) < float(loss.detach())
    assert float(koleo_loss(features[:1]).detach()) == 0


def test_patches_without_a_weight_need_no_mask_token() -> None:
    model = make_model(use_mask_token=False, joint_embedding_config={**DINO, "patch_weight": 0.0})
    teacher = teach(model=model, average=WeightAverage(model, decay=0.5))
    batch = teacher({"pixel_values": CASE.make_batch(model.config, 2)["pixel_values"]}, 0.0)
    assert set(batch) == {"pixel_values", "teacher_probs"}
    model(**batch).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_teacher_reads_the_masked_patches() -> None:
    model = make_model().eval()
    batch = CASE.make_batch(model.config, 4)
    views, masks = batch["pixel_values"], batch["bool_masked_pos"]
    with torch.no_grad():
        taught = model(views, bool_masked_pos=masks, as_teacher=True)
        seen = model(views, return_loss=False)
        hidden = model(views, bool_masked_pos=masks, return_loss=False)
    torch.testing.assert_close(taught.embeds, seen.embeds)
    assert not torch.allclose(hidden.embeds[:, 0], seen.embeds[:, 0], atol=1e-4)
    torch.testing.assert_close(hidden.embeds[:, 1], seen.embeds[:, 1])  # the second view has no masked patches
    assert taught.teacher_patch_probs.shape == (int(masks.sum()), model.options.num_prototypes)
    outputs = model(**{**batch, "teacher_probs": taught.teacher_probs}, teacher_patch_probs=taught.teacher_patch_probs)
    options = model.options
    weighted = options.patch_weight * outputs.patch_loss + options.koleo_weight * outputs.koleo_loss
    torch.testing.assert_close(outputs.loss, outputs.view_loss + weighted)
    outputs.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_teacher_has_the_averaged_weights_and_the_student_keeps_its_own() -> None:
    model = make_model().train()
    average = WeightAverage(model, decay=0.5)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    changed = {name: weight.clone() for name, weight in model.state_dict().items()}
    views = CASE.make_batch(model.config, 6)["pixel_values"]
    batch = teach(model=model, average=average)({"pixel_values": views}, 0.0)
    assert all(torch.equal(weight, changed[name]) for name, weight in model.state_dict().items())
    assert model.training
    teacher = make_model().eval()
    teacher.load_state_dict(before)
    with torch.no_grad():
        masks = batch["bool_masked_pos"]
        expected = teacher(views, bool_masked_pos=masks, as_teacher=True, teacher_temperature=FIRST_TEMPERATURE)
    torch.testing.assert_close(batch["teacher_probs"], expected.teacher_probs)
    torch.testing.assert_close(batch["teacher_patch_probs"], expected.teacher_patch_probs)
    shares = masks.float().mean(dim=-1)
    assert int((shares > 0).sum()) == shares.numel() // 2
    assert float(shares.max()) <= MASKED_SHARES[1]


def test_half_of_the_views_are_masked_in_blocks_by_shares_spread_evenly() -> None:
    config = make_model().config
    side = 14 * config.patch_size
    masks = teach().draw_masks(torch.zeros(20, 2, 3, side, side), config)
    assert masks.shape == (20, 2, 196)
    counts = masks.flatten(0, 1).sum(dim=-1).sort().values
    assert not counts[:20].any()
    edges = torch.linspace(*MASKED_SHARES, 21) * 196
    assert (edges[:-1].floor() <= counts[20:]).all()
    assert (counts[20:] <= edges[1:]).all()
    masks = masks.flatten(0, 1).unflatten(1, (14, 14))
    alike = (masks[:, 1:] == masks[:, :-1])[masks[:, 1:]].float().mean()
    assert float(alike) > 0.6  # this fraction would be 0.3 if patches were masked independently
    # Two processes together draw the same masks as a single process that has all images.
    views = torch.zeros(6, 2, 3, 32, 32)
    torch.manual_seed(3)
    whole = teach().draw_masks(views, config)
    for index in range(2):
        torch.manual_seed(3)
        part = teach(2, index).draw_masks(views[:3], config)
        assert torch.equal(part, whole[3 * index : 3 * index + 3])


def test_the_temperature_of_a_teacher_rises_over_the_first_steps() -> None:
    config = make_model(joint_embedding_config={**DINO, "teacher_temperature": 0.07}).config
    temperatures = [warmed_temperature(config, progress) for progress in (0.0, 0.15, 0.3, 1.0)]
    assert temperatures == pytest.approx([0.04, 0.055, 0.07, 0.07])
    low = make_model(joint_embedding_config={**DINO, "teacher_temperature": 0.03}).config
    assert warmed_temperature(low, 0.0) == 0.03


def test_masks_that_nothing_is_done_with_are_refused() -> None:
    batch = CASE.make_batch(make_model().config, 2)
    with pytest.raises(ValueError, match="bool_masked_pos requires objective='dino', not 'lejepa'"):
        make_model(joint_embedding_config={})(**{**batch, "teacher_probs": None})
    with pytest.raises(ValueError, match=r"bool_masked_pos must be .* = \(2, 2\), not"):
        make_model()(**{**batch, "bool_masked_pos": batch["bool_masked_pos"][:, :1]})


def test_changing_the_objective_drops_options_of_the_previous_objective() -> None:
    saved = HfViTJointEmbeddingConfig(gaussian_weight=0.2, embedding_size=16).to_dict()
    merged = HfViTJointEmbeddingConfig.merge(saved, {"objective": "dino"})
    assert (merged["objective"], merged["embedding_size"], "gaussian_weight" in merged) == ("dino", 16, False)
