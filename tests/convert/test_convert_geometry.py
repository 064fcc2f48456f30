"""Image size, patch size and channels as arguments of from_pretrained, for our checkpoints and published ones."""

import pytest
import torch
import transformers as hf

from hf_vit import HfViTForImageClassification, HfViTModel
from hf_vit.model.adapt_inputs import apply_geometry

from ..helpers import references
from ..helpers.models import MODEL_CLASSES
from ..helpers.references import draw_weights


SHAPE = {name: value for name, value in references.SHAPE.items() if name != "intermediate_size"}
DENSE_CLASSES = MODEL_CLASSES[3:]
# Small heads that support two blocks.
SMALL_HEADS = {
    "segmentation_config": {"hidden_size": 8},
    "universal_segmentation_config": {"num_blocks": 1, "num_queries": 5},
    "depth_config": {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8},
    "keypoint_config": {"hidden_size": 8},
}


@pytest.fixture(params=["own", "foreign"])
def folder(request, tmp_path):
    """Save a DINOv2 with registers, as published or by this package."""
    config = hf.Dinov2WithRegistersConfig(**SHAPE, mlp_ratio=2, num_register_tokens=2, num_labels=5)
    source = hf.Dinov2WithRegistersForImageClassification(config)
    draw_weights(source)
    source.save_pretrained(tmp_path / "foreign")
    HfViTForImageClassification.from_pretrained(tmp_path / "foreign").save_pretrained(tmp_path / "own")
    return tmp_path / request.param


@pytest.mark.thinned(8)
@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize(
    "geometry",
    [
        {"image_size": 48},
        {"image_size": (16, 40)},
        {"patch_size": 4},
        {"patch_size": 16, "image_size": 64},
        {"num_channels": 1},
        {"num_channels": 4},
        {"num_register_tokens": 0},
        {"num_channels": 1, "patch_size": 4, "image_size": 16, "num_register_tokens": 1},
    ],
    ids=str,
)
def test_geometry_changes_as_after_loading(model_class, geometry, folder):
    changed, info = model_class.from_pretrained(folder, output_loading_info=True, **geometry, **SMALL_HEADS)
    expected = model_class.from_pretrained(folder, **SMALL_HEADS)
    apply_geometry(expected, **geometry)
    fresh = info["missing_keys"]
    assert bool(fresh) == (model_class in DENSE_CLASSES)
    assert all(vars(changed.config)[name] == value for name, value in geometry.items())
    assert changed.state_dict().keys() == expected.state_dict().keys()
    state = changed.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items() if name not in fresh)
    assert all(not name.startswith("model.") for name in fresh)
    changed.save_pretrained(folder.parent / "changed")
    again = model_class.from_pretrained(folder.parent / "changed").state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.items())


def test_an_enlarged_image_under_enlarged_patches_looks_the_same(folder):
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).repeat_interleave(8, 2)
    images = images.repeat_interleave(8, 3)  # constant patches, which enlarging does not blur
    enlarged = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    model = HfViTForImageClassification.from_pretrained(folder)
    larger = HfViTForImageClassification.from_pretrained(folder, patch_size=16, image_size=64)
    with torch.no_grad():
        torch.testing.assert_close(larger(enlarged).logits, model(images).logits, atol=1e-3, rtol=1e-3)
        gray = HfViTForImageClassification.from_pretrained(folder, num_channels=1)
        repeated = images[:, :1].repeat(1, 3, 1, 1)
        torch.testing.assert_close(gray(images[:, :1]).logits, model(repeated).logits, atol=1e-4, rtol=1e-4)


def test_registers_are_added_behind_the_old_ones(folder):
    before = HfViTModel.from_pretrained(folder).embeddings.register_tokens
    after = HfViTModel.from_pretrained(folder, num_register_tokens=5).embeddings.register_tokens
    assert torch.equal(after[:, :2], before)
    assert after.shape == (1, 5, 32)
    assert after[:, 2:].std() > 0
    with pytest.raises(ValueError, match="not a multiple of the patch"):
        HfViTModel.from_pretrained(folder, image_size=30)


def test_the_cls_token_goes_with_a_pooling_that_does_without(folder):
    with pytest.raises(ValueError, match="needs the CLS token"):
        HfViTModel.from_pretrained(folder, use_cls_token=False)
    model = HfViTForImageClassification.from_pretrained(folder, use_cls_token=False, pooling="mean", num_labels=3)
    assert model.model.embeddings.cls_token is None
    assert model(torch.zeros(1, 3, 32, 32)).logits.shape == (1, 3)


def test_a_cls_token_comes_with_the_pooling_that_needs_it(tmp_path):
    hf.IJepaModel(hf.IJepaConfig(**SHAPE, intermediate_size=64)).save_pretrained(tmp_path)
    model = HfViTModel.from_pretrained(tmp_path, use_cls_token=True, pooling="cls")
    outputs = model(torch.zeros(1, 3, 32, 32))
    assert torch.equal(outputs.pooler_output, outputs.last_hidden_state[:, 0])
    assert model.embeddings.position_embeddings.shape == (1, 17, 32)
