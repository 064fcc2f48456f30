"""Test that permanent changes of image size, patch size or channels preserve accuracy and are saved."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_patch_embed
from timm.models import adapt_input_conv
from torch import Tensor
from transformers import AutoModelForImageClassification

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTModel
from hf_vit.model.adapt_inputs import apply_geometry, change_input_channels, resize_patch_kernels

from ..helpers.datasets import load_digits
from ..helpers.models import MODEL_CLASSES, SMALL_DEPTH, VARIANTS, pixels
from ..helpers.references import assert_close
from .checks import MASKED, assert_same, assert_same_weights, build, check_saved, inputs_of, name_of


# Changes of each configuration field that affects the geometry, alone and in combination.
CHANGES: dict[str, dict[str, Any]] = {
    "larger image": {"image_size": (48, 40)},
    "as many patches, laid out otherwise": {"image_size": (16, 64)},
    "smaller patches": {"patch_size": 4},
    "same grid": {"image_size": 64, "patch_size": 16},
    "gray": {"num_channels": 1},
    "many channels": {"num_channels": 5},
    "registers": {"num_register_tokens": 3},
    "distillation token": {"use_distillation_token": True},
    "no CLS": {"use_cls_token": False, "pooling": "mean"},
}
CHANGES["all"] = {**CHANGES["no CLS"], "image_size": (24, 36), "patch_size": (6, 12), "num_channels": 4}
CHANGES["all"]["num_register_tokens"] = 1
all_changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def kernels_of(num_channels: int = 3, size: int = 4) -> Tensor:
    return torch.randn(5, num_channels, size, size, generator=torch.Generator().manual_seed(0))


def test_kernels_and_channels_equal_timm_and_keep_their_dtype() -> None:
    kernels = kernels_of(size=8)
    for new_size in ((16, 16), (4, 4), (6, 10), (7, 14)):
        expected = resample_patch_embed(kernels, list(new_size))
        assert_close(resize_patch_kernels(kernels, new_size), expected, 1e-5, f"kernels of {new_size}")
    for count in (1, 2, 3, 4, 6, 7):
        expected = adapt_input_conv(count, kernels)
        assert_close(change_input_channels(kernels, count), expected, 1e-6, f"kernels of {count} channels")
    for old, new in ((3, 1), (1, 3), (2, 6)):
        changed = change_input_channels(kernels_of(old), new)
        assert changed.shape == (5, new, 4, 4)
        assert_close(changed.sum(1), kernels_of(old).sum(1), 1e-6, "answer to a gray image")
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        kernels = kernels_of().to(dtype)
        assert resize_patch_kernels(kernels, (8, 8)).dtype == change_input_channels(kernels, 4).dtype == dtype


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Tensor, Tensor]:
    """Return a digit classifier, and test images (N, 1, 28, 28) with labels."""
    images, labels = {}, {}
    for name, split in load_digits().items():
        images[name] = torch.from_numpy(np.stack(split["image"]))[:, None] / 127.5 - 1
        labels[name] = torch.tensor(split["label"])
    torch.manual_seed(0)
    model = HfViTForImageClassification(HfViTConfig.from_preset("mnist", num_hidden_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=120)
    for _ in range(120):
        batch = torch.randint(len(images["train"]), (64,))
        model(images["train"][batch], labels=labels["train"][batch]).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval(), images["test"], labels["test"]


@torch.no_grad()
def answers(model: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Return the logits for images that are resized to the image size of the model, and the accuracy."""
    size = model.config.image_size
    logits = model(F.interpolate(images, (size, size), mode="bicubic", antialias=True)).logits
    return logits, float((logits.argmax(1) == labels).float().mean())


@pytest.mark.parametrize(("image_size", "patch_size"), [(42, 6), (21, 3)])
def test_resized_patches_see_resized_images_as_before(digits: Any, image_size: int, patch_size: int) -> None:
    trained, *data = digits
    before, accuracy = answers(trained, *data)
    assert accuracy > 0.85
    model = copy.deepcopy(trained)
    apply_geometry(model, image_size=image_size, patch_size=patch_size)
    after, accuracy_after = answers(model, *data)
    assert accuracy_after > accuracy - 0.02
    assert (after - before).norm() < 0.1 * before.norm()
    old = trained.model.embeddings.patch_embeddings.projection.weight.detach()
    bilinear = F.interpolate(old, (patch_size, patch_size), mode="bilinear", antialias=True)
    model.model.embeddings.patch_embeddings.projection.weight.data.copy_(bilinear)
    assert (answers(model, *data)[0] - before).norm() > 5 * (after - before).norm()


def test_resampled_positions_keep_the_order_of_the_patches(digits: Any) -> None:
    trained, *data = digits
    model = copy.deepcopy(trained)
    model.resize_position_embeddings(56)
    accuracy = answers(model, *data)[1]
    # The model now has four times as many patches, each of which covers a quarter of the previous area.
    assert accuracy > 0.7
    table = model.get_position_embeddings()
    table.data[:, 1:] = trained.get_position_embeddings()[:, 1:].repeat(1, 4, 1)
    assert answers(model, *data)[1] < accuracy - 0.2


@pytest.mark.parametrize(
    ("kind", "variant", "options"),
    [
        *((HfViTModel, name, {}) for name in VARIANTS),
        (HfViTModel, "eva", {"rope_grid_size": None}),
        ("mae", "plain", {}),
    ],
)
def test_permanent_image_size_equals_resampling_per_image(kind: Any, variant: str, options: dict[str, Any]) -> None:
    model = build(kind, variant, **options)
    given = inputs_of(model, grid=(5, 6))
    before = model(**given)
    model.resize_position_embeddings(tuple(given["pixel_values"].shape[2:]))
    assert model.config.grid_size == (5, 6)
    assert_same(model(**given), before)


@pytest.mark.parametrize("variant", ["plain", "siglip", "eva"])
def test_smaller_patches_keep_the_image_size(variant: str) -> None:
    model = build(variant=variant)
    positions = model.base_model.embeddings.positions((8, 8))
    rotary = model.base_model.embeddings.rotary(torch.zeros(1, 3, 64, 64))
    model.resize_patch_embeddings(4)
    assert (model.config.image_size, model.config.patch_size, model.config.grid_size) == (32, 4, (8, 8))
    assert positions is None or torch.equal(model.base_model.embeddings.positions((8, 8)), positions)
    resized = model.base_model.embeddings.rotary(torch.zeros(1, 3, 32, 32))
    assert rotary is None or all(torch.equal(*pair) for pair in zip(resized, rotary, strict=True))


@pytest.mark.thinned(3)
@all_changes
@pytest.mark.parametrize("model_class", MODEL_CLASSES, ids=name_of)
def test_changed_model_is_saved_as_it_is(model_class: type[Any], change: dict[str, Any], tmp_path: Path) -> None:
    # Values of `readout_type` other than "ignore" need the CLS token.
    model = build(model_class, depth_config={**SMALL_DEPTH, "readout_type": "ignore"})
    apply_geometry(model, **change)
    fresh = model_class(copy.deepcopy(model.config))
    assert {n: p.shape for n, p in model.state_dict().items()} == {n: p.shape for n, p in fresh.state_dict().items()}
    assert model.config.to_dict() == model.base_model.embeddings.config.to_dict()
    check_saved(model, inputs_of(model), tmp_path)
    for name in change:
        assert vars(model.config)[name] == change[name]


CHANGE = {"image_size": 48, "patch_size": 4, "num_register_tokens": 1, "num_channels": 2}


@pytest.mark.parametrize(
    ("kind", "variant", "change"),
    [*((HfViTForImageClassification, variant, CHANGE) for variant in ("rotary", "eva", "rms", "none", "siglip")),
     *((objective, "plain", change) for objective in MASKED for change in CHANGES.values())],
)  # fmt: skip
def test_changed_positions_and_decoders_are_saved_as_they_are(
    kind: Any, variant: str, change: dict[str, Any], tmp_path: Path
) -> None:
    model = build(kind, variant)
    apply_geometry(model, **change)
    check_saved(model, inputs_of(model), tmp_path)


def test_fixed_positions_follow_the_tokens_and_become_learned_ones_with_another_grid(tmp_path: Path) -> None:
    model = build(variant="sincos")
    patches = model.get_position_embeddings()[:, 1:].clone()
    model.resize_prefix_tokens(use_cls_token=False, pooling="mean")
    assert torch.equal(model.get_position_embeddings(), patches)
    apply_geometry(model, patch_size=16, image_size=(64, 48))
    assert model.config.position_embedding_type == "sincos2d"
    assert "position_embeddings" in dict(model.embeddings.named_buffers())
    model.resize_position_embeddings((48, 48))
    assert model.config.position_embedding_type == "learned"
    assert model.get_position_embeddings().requires_grad
    model.save_pretrained(tmp_path)
    assert torch.equal(HfViTModel.from_pretrained(tmp_path).get_position_embeddings(), model.get_position_embeddings())


@all_changes
def test_changed_model_is_frozen_and_typed_as_before(change: dict[str, Any]) -> None:
    model = build(num_register_tokens=2).to(torch.bfloat16).train()
    embeddings = model.embeddings
    embeddings.patch_embeddings.projection.weight.requires_grad = False
    embeddings.register_tokens.requires_grad = False
    apply_geometry(model, **change)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not embeddings.patch_embeddings.projection.weight.requires_grad
    assert not embeddings.register_tokens.requires_grad
    assert embeddings.position_embeddings.requires_grad
    assert model.training
    model(pixels(model.config)).pooler_output.sum().backward()
    missing = {name for name, p in model.named_parameters() if p.grad is None}
    assert missing == {"embeddings.patch_embeddings.projection.weight", "embeddings.register_tokens"}


def test_only_changed_weights_are_replaced_by_functions_and_methods() -> None:
    model = build(num_register_tokens=2)
    before = dict(model.named_parameters())
    apply_geometry(model, image_size=32, patch_size=8, num_channels=3, use_cls_token=True, num_register_tokens=2)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    model.resize_prefix_tokens(num_register_tokens=3)
    changed = {name for name, parameter in model.named_parameters() if before[name] is not parameter}
    assert changed == {"embeddings.register_tokens"}
    # The resizing methods give the same result as `apply_geometry`.
    by_methods, by_function = build(), build()
    by_methods.resize_input_channels(5)
    by_methods.resize_patch_embeddings(16)
    by_methods.resize_prefix_tokens(use_cls_token=False, pooling="mean")
    apply_geometry(by_function, num_channels=5, patch_size=16, use_cls_token=False, pooling="mean")
    images = torch.randn(2, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(by_methods(images).pooler_output, by_function(images).pooler_output)


@pytest.mark.parametrize("opened_by", ["class", "Auto class"])
def test_a_distillation_token_keeps_the_positions(opened_by: str, tmp_path: Path) -> None:
    model = build(HfViTForImageClassification)
    model.save_pretrained(tmp_path / "without")
    kind: Any = HfViTForImageClassification if opened_by == "class" else AutoModelForImageClassification
    distilled = kind.from_pretrained(tmp_path / "without", use_distillation_token=True)
    assert distilled.config.use_distillation_token
    old, new = model.state_dict(), distilled.state_dict()
    table = new.pop("model.embeddings.position_embeddings")
    assert torch.equal(table[:, [0, *range(2, 18)]], old.pop("model.embeddings.position_embeddings"))
    fresh = {"model.embeddings.distillation_token", "distillation_classifier.weight", "distillation_classifier.bias"}
    assert new.keys() - old.keys() == fresh
    assert all(torch.equal(new[name], weight) for name, weight in old.items())
    assert table[:, 1].any()
    assert new["distillation_classifier.weight"].any()
    distilled.save_pretrained(tmp_path / "with")
    images = pixels(model.config)
    again = kind.from_pretrained(tmp_path / "with")
    assert torch.equal(again(images).distillation_logits, distilled(images).distillation_logits)
    dropped = kind.from_pretrained(tmp_path / "with", use_distillation_token=False)
    assert torch.equal(dropped(images).logits, model(images).logits)
    assert dropped.distillation_classifier is None


def test_registers_are_added_and_removed_at_the_end() -> None:
    model = build(num_register_tokens=2, initializer_range=0.1)
    old = model.embeddings.register_tokens.detach().clone()
    model.resize_prefix_tokens(num_register_tokens=40)
    registers = model.embeddings.register_tokens
    assert torch.equal(registers[:, :2], old)
    assert registers[:, 2:].detach().std() == pytest.approx(0.1, rel=0.1)
    model.resize_prefix_tokens(num_register_tokens=1)
    assert torch.equal(model.embeddings.register_tokens, old[:, :1])
    model.resize_prefix_tokens(num_register_tokens=0)
    assert model.embeddings.register_tokens is None
    assert model.config.num_prefix_tokens == 1


@pytest.mark.parametrize("prefix_has_position", [True, False])
def test_cls_token_goes_and_comes_with_its_position(prefix_has_position: bool) -> None:
    options = {"num_register_tokens": 2, "pooling": "mean", "initializer_range": 0.1}
    model = build(**options, prefix_has_position=prefix_has_position)
    old = {name: p.detach().clone() for name, p in model.embeddings.named_parameters()}
    model.resize_prefix_tokens(use_cls_token=False)
    without = model.embeddings
    assert without.cls_token is None
    assert torch.equal(without.position_embeddings, old["position_embeddings"][:, int(prefix_has_position) :])
    assert torch.equal(without.register_tokens, old["register_tokens"])
    model.resize_prefix_tokens(use_cls_token=True, pooling="cls")
    again = model.embeddings
    assert again.position_embeddings.shape == old["position_embeddings"].shape
    assert torch.equal(again.position_embeddings[:, -16:], old["position_embeddings"][:, -16:])
    assert again.cls_token.detach().std() == pytest.approx(0.1, rel=0.5)
    images = pixels(model.config)
    assert torch.equal(model(images).pooler_output, model(images).last_hidden_state[:, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 36}, r"height 36 is not a multiple of the patch height 8.*32 or 40"),
        ({"image_size": (32, 0)}, "at least 1 pixel"),
        ({"image_size": 48, "patch_size": 10}, r"height 48 is not a multiple of the patch height 10.*40 or 50"),
        ({"patch_size": 64}, "32 is not a multiple of the patch height 64"),
        ({"num_channels": 0}, "num_channels=0 must be at least 1"),
        ({"num_register_tokens": -1}, "must not be negative"),
        ({"use_cls_token": False}, r"pooling='cls' needs the CLS token.*Set pooling='mean'"),
        ({"image_size": 64, "pooling": "attention"}, r"cannot be changed to 'attention'.*ignore_mismatched_sizes"),
        ({"pooling": "cls_mean"}, r"'cls' .* cannot be changed to 'cls_mean'.*from_pretrained"),
    ],
)
def test_bad_geometry_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    model = build(HfViTForImageClassification)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=message):
        apply_geometry(model, **change)
    assert model.config.to_dict() == before.config.to_dict()
    assert_same_weights(model, before)
    with pytest.raises(ValueError, match="use_distillation_token=True needs the CLS token"):
        build(use_distillation_token=True).resize_prefix_tokens(use_cls_token=False, pooling="mean")
