"""Test masked attention, which is gradually replaced by full attention during training."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_vit import HfViTForUniversalSegmentation
from hf_vit.model.task_universal_segmentation import mask_probabilities, universal_segmentation_loss

from ..helpers.models import pixels, small_config
from .checks import assert_same, build, inputs_of


HEADS = ("universal", "universal_mask")


def test_chances_of_masked_attention_fall_from_always_to_never_one_block_after_the_other() -> None:
    assert [mask_probabilities(progress, 3) for progress in (0.0, 1.0)] == [[1.0] * 3, [0.0] * 3]
    # Training has 5.5 parts. The first block is annealed in the second part, and each later block 1.5 parts later.
    assert mask_probabilities(1.5 / 5.5, 3) == pytest.approx([0.5**0.9, 1.0, 1.0])
    for before, after in pairwise(mask_probabilities(step / 50, 3) for step in range(51)):
        assert all(a <= b for a, b in zip(after, before, strict=True))
        assert sorted(after) == after


@pytest.mark.parametrize("head", HEADS)
def test_state_of_the_masks_is_saved_and_loaded(head: str, tmp_path: Path) -> None:
    model, images = build(head), pixels(small_config())
    masked = model(images)
    model.anneal_masks(1.0)
    free = model(images)
    assert not torch.equal(free.masks_queries_logits, masked.masks_queries_logits)
    model.save_pretrained(tmp_path)
    assert_same(HfViTForUniversalSegmentation.from_pretrained(tmp_path)(images), free)
    half = build(head)
    half.load_state_dict(model.state_dict())
    assert_same(half(images), free)
    # After 45% of training, the second block always uses masks, and the first block rarely does.
    half.anneal_masks(0.45)
    assert half.head.masked_blocks == [False, True]
    assert half.train().head.masked_blocks == [True, True]
    assert copy.deepcopy(half).eval().head.masked_blocks == [False, True]


def test_masked_queries_see_their_own_masks_only() -> None:
    model = build("universal", attn_implementation="eager")
    images = pixels(model.config)
    outputs = model(images, output_attentions=True, output_hidden_states=True)
    for block in (1, 2):
        attention = outputs.attentions[block]  # (2, 4, 22, 22)
        assert (attention[:, :, :17] > 0).all()  # CLS and patch tokens attend to all tokens
        assert (attention[:, :, 17:, [0, *range(17, 22)]] > 0).all()
    # `attention` holds the attention weights of the last block.
    masks, _ = model.universal_segmentation_head(model.model.norm(outputs.hidden_states[2]), (4, 4))
    own = nn.functional.interpolate(masks, size=(4, 4), mode="bilinear").flatten(2) > 0
    assert 0.1 < own.double().mean() < 0.9
    assert torch.equal((attention[:, :, 17:, 1:17] > 0), own[:, None].expand(-1, 4, -1, -1))


def test_masks_are_randomly_disabled_per_query_in_training() -> None:
    torch.manual_seed(0)
    head = build("universal").universal_segmentation_head.train()
    head.mask_probabilities.fill_(0.25)
    never = torch.full((400, 5, 16, 16), -1.0)
    allowed = head.attention_mask(never, 0, (4, 4), 1, None)[:, 0, 17:, 1:17]
    assert torch.equal(allowed.all(dim=2), allowed.any(dim=2))
    assert allowed.double().mean() == pytest.approx(0.75, abs=0.05)
    assert not head.eval().attention_mask(never, 0, (4, 4), 1, None)[:, 0, 17:, 1:17].any()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_every_block_with_queries_is_supervised_to_the_end_of_training(progress: float, head: str) -> None:
    model = build(head)
    model.anneal_masks(progress)
    batch = inputs_of(model)
    predictions: list[tuple[Tensor, Tensor]] = []
    states: list[Tensor] = []

    def note(*call: Any) -> None:
        predictions.append(call[-1])
        states.append(torch.get_rng_state())

    model.head.register_forward_hook(note)

    def losses(is_training: bool) -> list[float]:
        predictions.clear()
        total = model.train(is_training)(**batch).loss
        torch.set_rng_state(states[-1])  # the loss draws random points
        labels = batch["mask_labels"], batch["class_labels"]
        own = [universal_segmentation_loss(*pair, *labels, model.options, is_training) for pair in predictions]
        return [float(total), *map(float, own)]

    total, *own = losses(is_training=False)
    assert total == own[-1]  # in evaluation mode, only the last prediction contributes to the loss
    total, *own = losses(is_training=True)
    assert len(own) == 3
    assert total == pytest.approx(sum(own), rel=1e-6)
