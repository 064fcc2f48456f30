"""Test masks for masked image modeling, and the conversion between patches and pixels."""

import pytest
import torch
from scipy.ndimage import label
from torch import Generator
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from hf_vit import HfViTMaskedImageModelingConfig
from hf_vit.model.task_masked_image_modeling import (
    PatchScale,
    blockwise_mask,
    count_masked,
    draw_mask,
    patchify,
    random_mask,
    unpatchify,
    visible_patches,
)

from .checks import pad_images


GRIDS = [(1, 1), (1, 7), (3, 5), (14, 14), (24, 10)]
OPTIONS = {
    "random": {},
    "units": {"mask_unit": 2},
    "large units": {"mask_unit": 5, "mask_ratio": 0.6},
    "blocks": {"mask_type": "blockwise", "mask_ratio": 0.4},
    "many blocks": {"mask_type": "blockwise", "mask_ratio": 0.9},
}
all_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


@all_options
def test_exactly_the_share_is_masked_and_one_patch_stays(options: dict[str, object]) -> None:
    assert [count_masked(*given) for given in ((4, 0.1), (4, 0.99), (4, 0.5), (1, 0.5))] == [1, 3, 2, 0]
    config = HfViTMaskedImageModelingConfig.make(options)
    for grid in GRIDS:
        mask = draw_mask(4, grid, config, generator=seeded())
        num_patches = grid[0] * grid[1]
        expected = min(max(round(config.masked_share * num_patches), 1), num_patches - 1)
        assert (mask.dtype, mask.shape) == (torch.bool, (4, num_patches))
        assert mask.sum(dim=1).tolist() == [expected] * 4 == [count_masked(num_patches, config.masked_share)] * 4


@all_options
def test_images_of_a_padded_batch_have_their_own_share_and_no_padding_is_masked(options: dict[str, object]) -> None:
    config = HfViTMaskedImageModelingConfig.make(options)
    _, visible = pad_images([torch.zeros(1, 1, *grid) for grid in ((2, 5), (4, 3), (4, 5))], patch_size=1)
    mask = draw_mask(3, (4, 5), config, patch_attention_mask=visible, generator=seeded()).unflatten(1, (4, 5))
    expected = [count_masked(num_patches, config.masked_share) for num_patches in (10, 12, 20)]
    assert mask.sum(dim=(1, 2)).tolist() == expected
    assert not (mask & ~visible).any()


@all_options
def test_masks_follow_their_generator_and_differ_between_images(options: dict[str, object]) -> None:
    config = HfViTMaskedImageModelingConfig.make(options)
    masks = [draw_mask(8, (6, 9), config, generator=seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert len(masks[0].unique(dim=0)) > 4
    torch.manual_seed(1)
    assert torch.equal(draw_mask(8, (6, 9), config), masks[0])
    if config.mask_type == "blockwise":
        with pytest.raises(ValueError, match=r"noise is only for mask_type='random'. Pass bool_masked_pos"):
            draw_mask(2, (3, 5), config, noise=torch.rand(2, 15))


def test_patches_with_the_most_noise_are_masked() -> None:
    config = HfViTMaskedImageModelingConfig(mask_ratio=0.5)
    shares = draw_mask(4000, (2, 5), config, generator=seeded()).float().mean(dim=0)
    assert (shares - 0.5).abs().max() < 0.04  # every patch is masked equally often
    noise = torch.tensor([[[0.5, 0.1, 0.9], [0.3, 0.8, 0.2]]])
    assert random_mask(noise, 0.5).int().tolist() == [[1, 0, 1, 0, 1, 0]]
    assert random_mask(noise, 0.34).int().tolist() == [[0, 0, 1, 0, 1, 0]]
    visible = torch.tensor([[[True, True, False], [True, True, False]]])
    assert random_mask(noise, 0.5, 1, visible).int().tolist() == [[1, 0, 0, 0, 1, 0]]


def test_mask_units_are_masked_completely_except_the_last_unit() -> None:
    noise = torch.zeros(1, 4, 5)
    noise[0, ::2, ::2] = torch.tensor([[0.1, 0.9, 0.3], [0.5, 0.2, 0.8]])
    # Squares of patches are masked in order of increasing noise: the top middle square, the bottom right square (2
    # patches), and one patch of the bottom left square.
    assert random_mask(noise, 7 / 20, 2).unflatten(1, (4, 5))[0].int().tolist() == [
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
        [0, 1, 0, 0, 1],
    ]


def test_blocks_hang_together_and_differ_in_shape() -> None:
    blocks = blockwise_mask(50, (14, 14), 0.4, generator=seeded()).unflatten(1, (14, 14))
    single = random_mask(torch.rand(50, 14, 14, generator=seeded()), 0.4).unflatten(1, (14, 14))
    # Mean number of connected components of masked patches per mask.
    pieces = [sum(label(own.numpy())[1] for own in masks) / 50 for masks in (blocks, single)]
    assert pieces[0] < 4 < 20 < pieces[1]
    one = blockwise_mask(200, (14, 14), 16 / 196, generator=seeded()).unflatten(1, (14, 14))
    heights, widths = (one.any(dim=dim).sum(dim=1) for dim in (2, 1))
    assert min(sizes.unique().numel() for sizes in (heights, widths)) > 3
    aspects = (heights / widths).log()
    assert abs(aspects.mean()) < 0.2
    assert aspects.abs().max() < 1.9


def test_visible_patches_stand_in_the_order_of_the_image() -> None:
    mask = torch.tensor([[True, False, True, False], [False, True, True, False]])
    index, seen = visible_patches(mask)
    assert (index.tolist(), seen) == ([[1, 3], [0, 3]], None)
    assert torch.equal(visible_patches(mask, num_visible=2)[0], index)
    mask[1, 3] = True
    index, seen = visible_patches(mask)
    assert (index[0].tolist(), index[1, 0]) == ([1, 3], 0)
    assert seen is not None
    assert seen.tolist() == [[True, True], [True, False]]
    visible = torch.ones(2, 2, 2, dtype=torch.bool)
    visible[0, 1] = False
    index, seen = visible_patches(mask, visible)
    assert (index.tolist(), seen) == ([[1], [0]], None)


def test_patches_are_those_of_transformers_and_unpatchify_is_the_way_back() -> None:
    config = ViTMAEConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=32, patch_size=8)
    theirs = ViTMAEForPreTraining(config)
    images = torch.randn(2, 3, 24, 40, generator=seeded())
    patches = patchify(images, (8, 8))
    assert torch.equal(patches, theirs.patchify(images, interpolate_pos_encoding=True))
    for size in ((8, 8), (4, 20)):
        grid = (24 // size[0], 40 // size[1])
        assert torch.equal(unpatchify(patchify(images, size), grid, size), images)
    scale = PatchScale(patches)
    normalized = scale.normalize(patches)
    assert normalized.mean(dim=-1).abs().max() < 1e-6
    assert torch.allclose(normalized.var(dim=-1), torch.ones(2, 15), atol=1e-5)
    assert torch.allclose(scale.restore(normalized), patches, atol=1e-6)
