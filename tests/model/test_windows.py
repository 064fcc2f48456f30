"""Test that window attention equals full attention with an equivalent mask."""

import math

import pytest
import torch
from torch import Tensor

from hf_vit import HfViTForUniversalSegmentation, HfViTModel
from hf_vit.model.encoder import Windows

from ..helpers.models import VARIANTS, pixels, small_config
from ..helpers.references import assert_close
from .checks import assert_same, build, replace_flash_attention


GRID = (3, 5)


def equivalent_mask(model: HfViTModel, grid: tuple[int, int], size: tuple[int, int], num_queries: int) -> Tensor:
    """Return a boolean mask (L, L), computed in a loop, that is True for tokens that attend to each other."""
    rows, columns = grid
    patches = [(row // size[0], column // size[1]) for row in range(rows) for column in range(columns)]
    windows = [None] * model.config.num_prefix_tokens + patches + [None] * num_queries
    return torch.tensor([[None in (own, other) or own == other for other in windows] for own in windows])


def encode(
    model: HfViTModel, images: Tensor, mask: Tensor | None, num_queries: int, size: tuple[int, int] | None
) -> dict[str, Tensor]:
    """Return the output tokens of the encoder and the gradients of the model.

    If a window `size` is given, run the blocks one by one with the equivalent mask.
    """
    model.zero_grad()
    states, blocks = model.start_blocks(images, mask)
    queries = torch.linspace(-1, 1, num_queries * 32, dtype=states.dtype).reshape(1, num_queries, 32)
    states = torch.cat((states, queries.expand(len(states), -1, -1)), dim=1)
    grid = (images.shape[2] // 8, images.shape[3] // 8)
    visible = torch.ones(len(images), 1, 1, states.shape[1], dtype=torch.bool)
    if mask is not None:
        num_prefix = model.config.num_prefix_tokens
        visible[:, 0, 0, num_prefix : num_prefix + math.prod(grid)] = mask.flatten(1)
    if size is None:
        states = blocks.run(states, **blocks.masks(states))
    else:
        within = equivalent_mask(model, grid, size, num_queries) & visible
        # A query token whose window contains only padding attends to every token.
        within = within | ~within.any(dim=-1, keepdim=True)
        for number in range(3):
            allowed = visible if number == 1 else within
            states = blocks.run(states, number, number + 1, attention_mask=allowed)
    if mask is not None:
        states = states * visible[:, 0, 0, :, None]
    (states * torch.linspace(-1, 1, states.numel(), dtype=states.dtype).reshape(states.shape)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"tokens": states.detach(), **gradients}


@pytest.mark.thinned(7)
# This variant has non-square patches.
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "sincos"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("grid", "size", "num_queries", "is_padded"),
    [((4, 6), (2, 3), 0, False), (GRID, (2, 2), 3, False), (GRID, (2, 2), 0, True), ((4, 4), (2, 2), 2, True)],
    ids=["whole windows", "incomplete, queries", "padded", "padded, queries"],
)
def test_windows_equal_attention_under_the_equivalent_mask(
    variant: str, implementation: str, grid: tuple[int, int], size: tuple[int, int], num_queries: int, is_padded: bool
) -> None:
    options = {"window_size": size, "global_attention_layers": [1], "drop_path_rate": 0.0}
    model = build(variant=variant, attn_implementation=implementation, **options).double()
    images = pixels(model.config, batch=2, grid=grid).double()
    mask = None
    if is_padded:
        mask = torch.ones(2, *grid, dtype=torch.bool)
        mask[0, 1:], mask[1, :, 2:] = False, False  # some windows have no valid patch
    expected, actual = (encode(model, images, mask, num_queries, way) for way in (size, None))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value.abs().max() > 1e-12:
            assert_close(actual[name], value, 1e-10, name)


def test_there_is_a_mask_only_where_windows_are_incomplete() -> None:
    model = build(variant="windows")
    for grid in ((4, 6), GRID):
        states, blocks = model.start_blocks(pixels(model.config, grid=grid))
        windows = blocks.masks(states)["windows"]
        assert isinstance(windows, Windows)
        assert (windows.mask is None) == (grid == (4, 6))


def test_one_window_around_all_is_attention_to_all() -> None:
    images = pixels(small_config(), grid=GRID)
    expected = build()(images)
    for size in ((3, 5), 9):
        assert_same(build(window_size=size)(images), expected)
    assert not torch.equal(build(window_size=(2, 5))(images).last_hidden_state, expected.last_hidden_state)


def test_attentions_of_a_window_are_zero_outside() -> None:
    model, images = build(variant="windows"), pixels(small_config(), grid=GRID)
    outputs = model(images, output_attentions=True, output_hidden_states=True)
    assert_same(model(images, output_hidden_states=True).hidden_states, outputs.hidden_states, 1e-5)
    allowed = equivalent_mask(model, GRID, (2, 3), 0)
    for number, weights in enumerate(outputs.attentions):  # (2, 4, L, L)
        assert torch.equal(weights > 0, (allowed if number != 1 else torch.ones_like(allowed)).expand_as(weights))


def test_flash_attention_receives_supported_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = replace_flash_attention(monkeypatch, drops_padding=True)
    flash, sdpa = build(variant="windows"), build(variant="windows")
    flash.config._attn_implementation = "flash_attention_2"
    for grid in ((4, 6), GRID):
        images = pixels(flash.config, grid=grid)
        assert_same(flash(images), sdpa(images), 1e-5)
    within = [((8, 4, 6, 8), mask) for mask in (None, (8, 7))]  # each of two images has 4 windows of 6 patches
    whole = [((2, 4, length, 8), None) for length in (25, 16)]
    assert seen == [within[0], whole[0], within[0], within[1], whole[1], within[1]]


def test_blocks_with_queries_use_global_attention() -> None:
    options = {"universal_segmentation_config": {"num_queries": 5, "num_blocks": 2}}
    images = pixels(small_config(), grid=GRID)
    within = build(HfViTForUniversalSegmentation, window_size=2, **options)
    same = build(HfViTForUniversalSegmentation, window_size=2, global_attention_layers=(1, 2), **options)
    other = build(HfViTForUniversalSegmentation, **options)
    assert_same(within(images), same(images))
    assert not torch.equal(within(images).last_hidden_state, other(images).last_hidden_state)
