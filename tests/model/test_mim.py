"""Test that masked image modeling with fixed masks agrees with transformers, and test invariants of all models."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from hf_vit import HfViTConfig, HfViTForMaskedImageModeling, HfViTModel
from hf_vit.model.adapt_inputs import apply_geometry
from hf_vit.model.task_masked_image_modeling import HfViTMaeDecoder, patchify, unpatchify

from ..helpers.models import SMALL, VARIANTS, pixels, small_config
from ..helpers.references import SHAPE, Parity, assert_close, rename
from . import checks
from .checks import MASKED, assert_same, build, inputs_of, pad_images


DECODER = SMALL["masked_image_modeling_config"]
both_objectives = pytest.mark.parametrize("objective", MASKED)
all_variants = pytest.mark.parametrize("variant", VARIANTS)
PREFIXED = ["plain", "registers", "rotary", "rms"]  # variants with one, several or no prefix tokens


def fresh(objective: str, variant: str = "plain", **overrides: Any) -> HfViTForMaskedImageModeling:
    return HfViTForMaskedImageModeling(small_config(variant, **{**MASKED[objective][1], **overrides}))


def with_options(**options: Any) -> dict[str, Any]:
    return {"masked_image_modeling_config": {**DECODER, **options}}


def noise_for(images: Tensor) -> Tensor:
    num_patches = images.shape[-2] * images.shape[-1] // 64
    return torch.rand(len(images), num_patches, generator=torch.Generator().manual_seed(3)).to(images.dtype)


def as_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert ViTMAE weights: drop the zero row of the CLS token from the decoder positions."""
    name = "masked_image_modeling_head.mae.position_embeddings"
    return {key: tensor[:, 1:] if key == name else tensor for key, tensor in tensors.items()}


def run_mae(model: nn.Module, images: Tensor) -> Any:
    return model(images, noise=noise_for(images), output_hidden_states=True)


def as_mapping(outputs: Any, name: str) -> dict[str, Tensor]:
    states = {f"hidden_states[{i}]": state for i, state in enumerate(outputs.hidden_states)}
    return {name: outputs[name], **states}


def mae(**options: Any) -> Parity:
    """Return our model and ViTMAEForPreTraining with the same weights.

    ViTMAE sorts visible patches by their noise, and resamples decoder positions as if they formed a single row.
    """
    shared = {**DECODER, **options}
    reference = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SHAPE, layer_norm_eps=1e-6, **shared))
    config = HfViTConfig(**SHAPE, position_embedding_type="sincos2d", masked_image_modeling_config=shared)
    ours = HfViTForMaskedImageModeling(config)
    decoder = ours.masked_image_modeling_head.decoder
    table = F.pad(ours.model.embeddings.sincos_table()[:, 1:], (0, 0, 1, 0))
    reference.vit.embeddings.position_embeddings.data.copy_(table)

    def run_reference(model: nn.Module, images: Tensor) -> Any:
        grid = images.shape[-2] // 8, images.shape[-1] // 8
        model.decoder.decoder_pos_embed.data = F.pad(decoder.positions(grid), (0, 0, 1, 0)).to(images.dtype)
        noise = noise_for(images)
        outputs = model(images, noise=noise, interpolate_pos_encoding=True, output_hidden_states=True)
        count = outputs.hidden_states[0].shape[1] - 1
        order = F.pad(1 + noise.argsort(dim=1)[:, :count].argsort(dim=1), (1, 0))
        states = outputs.hidden_states
        outputs.hidden_states = tuple(state.gather(1, order[..., None].expand_as(state)) for state in states)
        return outputs

    reference.decoder.decoder_pos_embed.data = F.pad(decoder.position_embeddings, (0, 0, 1, 0)).clone()
    parity = Parity(
        reference,
        ours,
        lambda model, images: as_mapping(run_reference(model, images), "logits"),
        lambda model, images: as_mapping(run_mae(model, images), "logits"),
        float32_positions="vit.embeddings.position_embeddings",
        rearrange=as_ours,
    )
    parity.run = run_reference
    return parity


def simmim() -> Parity:
    """Return our model and ViTForMaskedImageModeling with the same weights. The latter supports only square images."""

    def rearranged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "masked_image_modeling_head.simmim.predictor."
        moved = {key: tensor for key, tensor in tensors.items() if key.startswith(name)}
        for key, tensor in moved.items():
            moved[key] = tensor.reshape(3, 8, 8, *tensor.shape[1:2]).movedim(0, 2).flatten(0, 2)
        return {**tensors, **moved}

    def run(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        outputs = model(images, bool_masked_pos=noise_for(images) > 0.6, output_hidden_states=True)
        return as_mapping(outputs, "reconstruction")

    options = {"objective": "simmim"}
    return Parity(
        hf.ViTForMaskedImageModeling(hf.ViTConfig(**SHAPE, layer_norm_eps=1e-6, encoder_stride=8)),
        HfViTForMaskedImageModeling(HfViTConfig(**SHAPE, use_mask_token=True, masked_image_modeling_config=options)),
        run,
        run,
        sizes=((32, 32),),
        rearrange=rearranged,
    )


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (mae, torch.float64),
        (mae, torch.float32),
        (simmim, torch.float64),
        pytest.param(simmim, torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_equals_reference(case: Any, dtype: torch.dtype) -> None:
    case().check(dtype)


@pytest.mark.parametrize("size", [(32, 32), (24, 48)])
@pytest.mark.parametrize("options", [{"norm_pix_loss": True}, {"norm_pix_loss": False, "mask_ratio": 0.5}], ids=str)
def test_loss_and_mask_of_mae_are_those_of_transformers(options: dict[str, Any], size: tuple[int, int]) -> None:
    parity = mae(**options)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = parity.reference.double().vit.embeddings.position_embeddings
    table.data = table.data.float()  # our model resamples positions in float32
    results = []
    for model, run in ((parity.ours.double(), run_mae), (parity.reference, parity.run)):
        own = images.clone().requires_grad_()
        outputs = run(model, own)
        outputs.loss.backward()
        weights = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((outputs, own.grad, weights))
    (ours, gradient, weights), (theirs, expected, their_weights) = results
    assert_close(ours.loss, theirs.loss, 1e-12, "loss")
    assert_close(gradient, expected, 1e-9, "gradient of the images")
    assert torch.equal(ours.bool_masked_pos, theirs.mask.bool())
    renamed = as_ours(rename(their_weights, base_prefix="model."))
    assert weights.keys() == renamed.keys()
    assert all((weights[name] - renamed[name]).abs().max() < 1e-9 * ours.loss for name in weights)
    expected_images = parity.reference.unpatchify(theirs.logits, size)
    if not options["norm_pix_loss"]:
        assert_close(ours.reconstruction, expected_images, 1e-9, "reconstruction")


def test_loss_of_simmim_is_the_mean_of_those_of_transformers() -> None:
    parity = simmim()
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = parity.ours.double(), parity.reference.double()
    same = noise_for(images).argsort(dim=1) > 9  # masks the same number of patches in each image
    assert_close(ours(images, same).loss, theirs(images, same).loss, 1e-9, "loss")
    masks = noise_for(images) > 0.6
    assert len(masks.sum(dim=1).unique()) > 1
    pairs = zip(images.split(1), masks.split(1), strict=True)
    alone = torch.stack([theirs(image, own).loss for image, own in pairs])
    # The reference divides by a float32 sum to which it adds 1e-5.
    assert_close(ours(images, masks).loss, alone.mean(), 1e-6, "loss")


@both_objectives
@pytest.mark.parametrize("variant", PREFIXED)
def test_nothing_is_seen_of_masked_patches(objective: str, variant: str) -> None:
    model = build(objective, variant)
    given = inputs_of(model)
    outputs = model(**given)
    patches = patchify(given["pixel_values"], (8, 8))
    hidden = outputs.bool_masked_pos[..., None]
    for other, same in ((torch.where(hidden, patches + 1, patches), True), (patches + ~hidden, False)):
        changed = model(unpatchify(other, (4, 4), (8, 8)), noise=given["noise"])
        assert torch.equal(changed.logits, outputs.logits) is same
    assert torch.equal(model(given["pixel_values"], outputs.bool_masked_pos).logits, outputs.logits)


@pytest.mark.parametrize(
    ("variant", "ratio"), [("plain", 0.25), ("registers", 0.5), ("rotary", 0.9), ("rms", 0.5), ("eva", 0.75)]
)
def test_mae_runs_its_blocks_on_prefix_and_visible_patches_alone(variant: str, ratio: float) -> None:
    model = build("mae", variant, **with_options(mask_ratio=ratio), attn_implementation="eager")
    given, num_prefix = inputs_of(model, grid=(3, 5)), model.config.num_prefix_tokens
    outputs = model(**given, output_hidden_states=True, output_attentions=True)
    length = num_prefix + 15 - round(15 * ratio)
    assert [tuple(state.shape) for state in outputs.hidden_states] == [(2, length, 32)] * 4
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(2, 4, length, length)] * 3
    torch.testing.assert_close(outputs.attentions[0].sum(-1), torch.ones(2, 4, length))
    # The visible tokens must equal those of a model in which no token attends to masked tokens.
    tokens, rotary = model.model.embed(given["pixel_values"])
    seen = F.pad(~outputs.bool_masked_pos, (num_prefix, 0), value=True)
    tokens = model.model.encoder(tokens, rotary=rotary, attention_mask=seen[:, None, None, :])
    for own, expected, kept in zip(outputs.hidden_states[-1], tokens, seen, strict=True):
        assert_close(own, expected[kept], 1e-5, "tokens")


@both_objectives
def test_reconstruction_is_in_units_of_the_images(objective: str) -> None:
    model = build(objective)
    given = inputs_of(model, grid=(3, 5))
    images = 40 + 7 * given["pixel_values"]
    outputs = model(images, noise=given["noise"])
    patches = patchify(images, (8, 8))
    expected = outputs.logits
    if objective == "mae":
        expected = outputs.logits * (patches.var(-1, keepdim=True) + 1e-6).sqrt() + patches.mean(-1, keepdim=True)
    assert_close(outputs.reconstruction, unpatchify(expected, (3, 5), (8, 8)), 1e-6, "reconstruction")
    loss = (outputs.reconstruction - images).abs()
    hidden = outputs.bool_masked_pos.unflatten(1, (3, 5)).repeat_interleave(8, 1).repeat_interleave(8, 2)
    if objective == "simmim":
        assert_close(outputs.loss, loss[hidden[:, None].expand_as(loss)].mean(), 1e-6, "loss")


def test_without_a_mask_it_is_drawn_from_the_global_generator() -> None:
    model = build("mae", **with_options(mask_type="blockwise"))
    images = pixels(model.config)
    torch.manual_seed(3)
    first, second = model(images), model(images)
    torch.manual_seed(3)
    assert_same(model(images), first)
    assert not torch.equal(first.bool_masked_pos, second.bool_masked_pos)


@pytest.mark.thinned(2)
@both_objectives
@all_variants
def test_images_in_a_batch_are_as_they_are_alone(objective: str, variant: str) -> None:
    model = build(objective, variant)
    given = inputs_of(model, batch=3, grid=(3, 5))
    together = model(**given, output_hidden_states=True)
    losses = []
    for index in range(3):
        alone = model(**{name: value[index : index + 1] for name, value in given.items()}, output_hidden_states=True)
        losses.append(alone.loss)
        assert_same(
            checks.values(alone)[1:], [value[index : index + 1] for value in checks.values(together)[1:]], 3e-5
        )
    assert_close(together.loss, torch.stack(losses).mean(), 1e-5, "loss")
    if objective == "simmim":
        returned = {"output_hidden_states": True, "output_attentions": True}
        masked = model(**given, **returned)
        expected = model.model(given["pixel_values"], masked.bool_masked_pos, **returned)
        assert_same(masked.hidden_states, expected.hidden_states, 1e-6)
        assert_same(masked.attentions, expected.attentions, 1e-6)


def test_the_other_objective_starts_with_a_fresh_decoder(tmp_path: Path) -> None:
    build("mae", use_mask_token=True).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["masked_image_modeling_config"]["objective"] == "mae"
    model, info = HfViTForMaskedImageModeling.from_pretrained(
        tmp_path, masked_image_modeling_config={"objective": "simmim"}, output_loading_info=True
    )
    decoder = "masked_image_modeling_head.simmim.predictor"
    assert set(info["missing_keys"]) == {f"{decoder}.weight", f"{decoder}.bias"}
    assert model.options.to_dict() == {"objective": "simmim"}


@pytest.mark.thinned(2)
@both_objectives
@all_variants
def test_padding_changes_no_output_no_loss_and_no_gradient(objective: str, variant: str) -> None:
    model = build(objective, variant).double()
    patch, grids = model.model.embeddings.patch_embeddings.patch_size, [(2, 5), (4, 3), (4, 5)]
    images = [pixels(model.config, batch=1, grid=grid).double() for grid in grids]
    batch, mask = pad_images(images, patch)
    noise = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(1))
    own_noise = [noise[i, :rows, :columns].flatten()[None] for i, (rows, columns) in enumerate(grids)]
    alone = [model(image, noise=own) for image, own in zip(images, own_noise, strict=True)]
    expected = torch.stack([outputs.loss for outputs in alone]).mean()
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    padded = model(batch, noise=noise.flatten(1), patch_attention_mask=mask)
    again = model(batch, bool_masked_pos=padded.bool_masked_pos | ~mask.flatten(1), patch_attention_mask=mask)
    assert torch.equal(again.logits, padded.logits)
    assert_close(padded.loss, expected, 1e-9, "loss")
    for index, (rows, columns) in enumerate(grids):
        kept = mask[index].flatten()
        assert torch.equal(padded.bool_masked_pos[index][kept], alone[index].bool_masked_pos[0])
        assert not padded.bool_masked_pos[index][~kept].any()
        assert_close(padded.logits[index][kept], alone[index].logits[0], 1e-9, "logits")
        reconstruction = padded.reconstruction[index, :, : rows * patch[0], : columns * patch[1]]
        assert_close(reconstruction, alone[index].reconstruction[0], 1e-9, "reconstruction")
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in checks.training_gradients(
        model, batch, noise=noise.flatten(1), patch_attention_mask=mask
    ).items():
        # Position tables are resampled in float32, and their gradients are summed in float32.
        allowed = 1e-6 if "position_embeddings" in name else 1e-9
        assert (gradient - gradients[name]).abs().max() <= allowed * largest, name


@pytest.mark.parametrize(
    ("variant", "implementation"), [("plain", "eager"), ("rotary", "eager"), ("plain", "flex_attention")]
)
def test_every_attention_gives_the_same(variant: str, implementation: str) -> None:
    """Compare attention implementations with a mask that hides different numbers of patches per image."""
    other, sdpa = (build("mae", variant, attn_implementation=name) for name in (implementation, "sdpa"))
    images = pixels(sdpa.config, grid=(3, 5))
    mask = torch.rand(2, 15, generator=torch.Generator().manual_seed(2)) < torch.tensor([[0.3], [0.8]])
    # Flex attention runs without compilation here; `test_modeling.py` compiles its kernels.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert_same(other(images, mask), sdpa(images, mask), 1e-5)
        alone = torch.cat([sdpa(images[i : i + 1], mask[i : i + 1]).logits for i in range(2)])
    assert_close(sdpa(images, mask).logits.detach(), alone, 1e-5, "logits")


def test_another_attention_is_that_of_the_decoder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = checks.replace_flash_attention(monkeypatch)
    model, expected = build("mae"), build("mae")
    model.config._attn_implementation = "flash_attention_2"
    given = inputs_of(model)
    assert_same(model(**given), expected(**given), 1e-5)
    given["patch_attention_mask"] = checks.partial_mask()
    assert_same(model(**given), expected(**given), 1e-4)
    assert [mask for _, mask in seen] == [None] * 5 + [(2, 5)] * 3 + [(2, 17)] * 2


@both_objectives
def test_overfits_one_batch(objective: str) -> None:
    torch.manual_seed(0)
    model = fresh(objective, **(with_options(mask_ratio=0.5) if objective == "mae" else {}))
    losses = checks.train(model, inputs_of(model), steps=100, max_lr=1.2e-2)
    assert losses[-1] < losses[0] / 5


@pytest.mark.parametrize("opens", [False, True], ids=["built", "opened"])
@torch.no_grad()
def test_initialization_is_that_of_mae_or_of_vit(opens: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fresh("mae", "sincos", hidden_size=64, initializer_range=0.05, **with_options(decoder_hidden_size=64))
    if opens:
        HfViTModel(model.config).save_pretrained(tmp_path)
        model = HfViTForMaskedImageModeling.from_pretrained(tmp_path)
    head = model.masked_image_modeling_head
    for name, module in (head if opens else model).named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            limit = math.sqrt(6 / (module.weight.shape[0] + module.weight[0].numel()))
            assert module.weight.abs().max() <= limit, name
            assert module.weight.std() == pytest.approx(limit / math.sqrt(3), rel=0.1), name
            assert not module.bias.any(), name
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all(), name
            assert not module.bias.any(), name
    assert isinstance(head.decoder, HfViTMaeDecoder)
    assert head.decoder.mask_token.std() == pytest.approx(0.05, rel=0.3)
    assert head.decoder.position_embeddings.shape == (1, 12, 64)
    assert torch.equal(head.decoder.position_embeddings, head.decoder.sincos_table())
    simmim = fresh("simmim", hidden_size=64, initializer_range=0.05)
    layers = [module for module in simmim.model.encoder.modules() if isinstance(module, nn.Linear)]
    for module in (*layers, simmim.masked_image_modeling_head.decoder.predictor):
        assert module.weight.std() == pytest.approx(0.05, rel=0.1)


def test_reconstruction_is_resized_with_a_larger_patch_size() -> None:
    model = build("simmim", image_size=8)  # with a single patch, positions are not resampled
    images = F.interpolate(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)), 8, mode="bilinear")
    seen = torch.zeros(2, 1, dtype=torch.bool)
    before = model(images, seen).reconstruction
    apply_geometry(model, image_size=16, patch_size=16)
    larger = F.interpolate(images, 16, mode="bicubic", antialias=True)
    after = model(larger, seen).reconstruction
    assert_close(after, F.interpolate(before, 16, mode="bicubic", antialias=True), 1e-4, "reconstruction")
