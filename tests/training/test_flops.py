"""Test the number of FLOPs of models for images of any size."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import ViT_B_16_Weights

from hf_vit import HfViTConfig, HfViTModel
from hf_vit.flops import forward_flops

from ..helpers.models import VARIANTS, pixels, small_config


pytestmark = pytest.mark.slow  # models of full size are slow


@pytest.mark.thinned(2)
@pytest.mark.parametrize("grid", [(4, 4), (5, 7)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_are_those_that_torch_counts(variant: str, grid: tuple[int, int]) -> None:
    config = small_config(variant)
    images, model = pixels(config, batch=1, grid=grid), HfViTModel(config).requires_grad_(variant == "plain")
    # The oldest supported torch does not count the FLOPs of fused attention kernels on the CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        outputs = model(images.requires_grad_(variant == "plain"))
    flops = forward_flops(config, *images.shape[-2:])
    assert counter.get_total_flops() == flops
    if variant == "plain":  # the backward pass takes twice the FLOPs of the forward pass
        with sdpa_kernel(SDPBackend.MATH), counter:
            outputs.pooler_output.sum().backward()
        assert counter.get_total_flops() == 2 * flops


def test_flops_of_vit_b_are_the_published_ones_and_those_of_a_misfit_are_refused() -> None:
    # torchvision publishes the number of multiply-adds in billions, including a head with 1000 classes.
    published, config = ViT_B_16_Weights.IMAGENET1K_V1.meta["_ops"], HfViTConfig.from_preset("base")
    assert forward_flops(config, 224, 224) / 2 + 768 * 1000 == pytest.approx(published * 1e9, rel=2e-3)
    with pytest.raises(ValueError, match="image height 36 is not a multiple of the patch height 8"):
        forward_flops(small_config(), 36, 32)
