"""Decoders of MAE and masked image modeling in transformers, loaded by ours: outputs, gradients, sensitivity."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_vit import HfViTForImageClassification, HfViTForMaskedImageModeling, HfViTForSemanticSegmentation, HfViTModel
from scripts import convert_checkpoint as script

from ..helpers import references
from ..helpers.models import SMALL
from ..helpers.references import assert_close, draw_weights


# A large epsilon, so that a wrong one changes the outputs.
SHAPE = {**references.SHAPE, "layer_norm_eps": 1e-3}
DECODER = SMALL["masked_image_modeling_config"]
HEAD = "masked_image_modeling_head."
KINDS = ["mae", "plain pixels", "simmim"]
kinds = pytest.mark.parametrize("kind", KINDS)


def save_source(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Save a model of transformers with random weights, including the fixed position tables of MAE."""
    if kind == "simmim":
        source: Any = hf.ViTForMaskedImageModeling(hf.ViTConfig(**SHAPE, encoder_stride=8, qkv_bias=False))
    else:
        options = {"norm_pix_loss": kind == "mae", "mask_ratio": 0.75 if kind == "mae" else 0.5}
        source = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SHAPE, **DECODER, **options))
        source.vit.embeddings.position_embeddings.requires_grad_()
        positions = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(7))
        source.decoder.decoder_pos_embed.data = F.pad(positions, (0, 0, 1, 0))
    draw_weights(source)
    source.eval().to(dtype).save_pretrained(folder)
    return source


def draw_images(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return images, and noise that determines the masks."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 32, 32, generator=generator).to(dtype).requires_grad_()
    return images, torch.rand(2, 16, generator=generator)


def run(model: nn.Module, kind: str, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted pixels and the loss."""
    if kind == "simmim":
        outputs = model(images, bool_masked_pos=noise.argsort(dim=1) > 6)
        return outputs.reconstruction, outputs.loss
    outputs = model(images, noise=noise)
    return outputs.logits, outputs.loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@kinds
def test_equals_source(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = save_source(kind, tmp_path, dtype)
    model, info = HfViTForMaskedImageModeling.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    images, noise = draw_images(dtype)
    expected, actual = run(source, kind, images, noise), run(model, kind, images, noise)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert expected[0].std() >= 0.1
    assert_close(actual[0], expected[0], tolerance, "pixels")
    # transformers sums masked pixels in float32
    assert_close(actual[1], expected[1], 1e-7 if dtype == torch.float64 and kind == "simmim" else tolerance, "loss")
    theirs, ours = (torch.autograd.grad(outputs[0].square().sum(), images)[0] for outputs in (expected, actual))
    assert_close(ours, theirs, tolerance, "gradient")


@kinds
@torch.no_grad()
@pytest.mark.slow
def test_every_tensor_of_the_source_matters(kind: str, tmp_path: Path) -> None:
    save_source(kind, tmp_path, torch.float64)
    file, (images, noise) = tmp_path / "model.safetensors", draw_images(torch.float64)
    before, _ = run(HfViTForMaskedImageModeling.from_pretrained(tmp_path), kind, images, noise)
    tensors = load_file(file)
    # The softmax cancels a constant that is added to all keys.
    for key in (key for key in tensors if not key.endswith("key.bias")):
        save_file({**tensors, key: 1.1 * tensors[key]}, file)
        after, _ = run(HfViTForMaskedImageModeling.from_pretrained(tmp_path), kind, images, noise)
        assert (after - before).abs().max() > 1e-7 * before.abs().max(), f"{key} hardly matters"


def test_published_names_of_the_decoder_open_too(tmp_path: Path) -> None:
    """Names as in facebook/vit-mae-base; current transformers saves the blocks under other names."""
    save_source("mae", tmp_path)
    expected = HfViTForMaskedImageModeling.from_pretrained(tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    tensors = {
        re.sub(r"^decoder\.(decoder_encoder\.layer|decoder_layers)\.", "decoder.decoder_layers.", name): tensor
        for name, tensor in load_file(file).items()
    }
    assert "decoder.decoder_layers.1.attention.attention.query.weight" in tensors
    save_file(tensors, file)
    state = HfViTForMaskedImageModeling.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_options_come_along_and_can_be_changed(tmp_path: Path) -> None:
    save_source("plain pixels", tmp_path)
    model = HfViTForMaskedImageModeling.from_pretrained(tmp_path)
    assert model.options.to_dict() == {**DECODER, "mask_ratio": 0.5, "norm_pix_loss": False}
    model = HfViTForMaskedImageModeling.from_pretrained(tmp_path, masked_image_modeling_config={"mask_ratio": 0.25})
    assert model.options.to_dict() == {**DECODER, "mask_ratio": 0.25, "norm_pix_loss": False}
    save_source("simmim", tmp_path / "simmim")
    config = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "simmim").config
    assert config.masked_image_modeling_config.to_dict() == {"objective": "simmim"}
    assert config.use_mask_token


@kinds
@pytest.mark.parametrize("model_class", [HfViTModel, HfViTForImageClassification, HfViTForSemanticSegmentation])
def test_all_other_models_open_the_encoder(kind: str, model_class: type[Any], tmp_path: Path) -> None:
    save_source(kind, tmp_path)
    model, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert {name for name in info["missing_keys"] if name.startswith(("model.", "embeddings."))} == set()
    assert all(name.startswith(HEAD) for name in info["unexpected_keys"])
    expected = HfViTForMaskedImageModeling.from_pretrained(tmp_path).model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.base_model.state_dict().items())


def test_an_encoder_alone_gets_a_fresh_decoder(tmp_path: Path) -> None:
    hf.ViTMAEModel(hf.ViTMAEConfig(**SHAPE, **DECODER)).save_pretrained(tmp_path)
    model, info = HfViTForMaskedImageModeling.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {name for name in model.state_dict() if name.startswith(HEAD)}
    assert model.options.decoder_hidden_size == 16


def test_pixels_of_more_than_one_patch_are_left_out(tmp_path: Path) -> None:
    hf.ViTForMaskedImageModeling(hf.ViTConfig(**SHAPE, encoder_stride=16)).save_pretrained(tmp_path)
    _, info = HfViTForMaskedImageModeling.from_pretrained(tmp_path, output_loading_info=True)
    assert {name.removeprefix(HEAD) for name in info["missing_keys"]} == {
        f"simmim.predictor.{leaf}" for leaf in ("weight", "bias")
    }


def test_a_position_of_the_cls_token_in_the_decoder_is_refused(tmp_path: Path) -> None:
    save_source("mae", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "decoder.decoder_pos_embed": torch.ones(1, 17, 16)}, file)
    with pytest.raises(ValueError, match="position embedding of the CLS token in the decoder of MAE is not zero"):
        HfViTForMaskedImageModeling.from_pretrained(tmp_path)


ORIGINAL = (
    (r"^vit\.encoder\.layer\.|^vit\.layers\.", "blocks."),
    (r"^decoder\.(decoder_encoder\.layer|decoder_layers)\.", "decoder_blocks."),
    (r"^vit\.embeddings\.cls_token", "cls_token"),
    (r"^vit\.embeddings\.position_embeddings", "pos_embed"),
    (r"^vit\.embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"^vit\.layernorm", "norm"),
    (r"^decoder\.", ""),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"attention\.output\.dense", "attn.proj"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
    (r"attention\.attention", "attn"),
)


def save_original(folder: Path) -> nn.Module:
    """Save the same model in the file format of the original MAE code."""
    wide = {"hidden_size": 128, "num_attention_heads": 2, "layer_norm_eps": 1e-6}
    decoder = {**DECODER, "decoder_hidden_size": 64, "decoder_num_attention_heads": 16, "norm_pix_loss": True}
    source: Any = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SHAPE | wide, **decoder)).eval()
    source.vit.embeddings.position_embeddings.requires_grad_()
    positions = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(7))
    source.decoder.decoder_pos_embed.data = F.pad(positions, (0, 0, 1, 0))
    draw_weights(source)
    source.save_pretrained(folder / "theirs")
    state = load_file(folder / "theirs" / "model.safetensors")
    for pattern, name in ORIGINAL:
        state = {re.sub(pattern, name, key): tensor for key, tensor in state.items()}
    for name in [name for name in state if ".attn.query." in name]:
        parts = [state.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        state[name.replace("query", "qkv")] = torch.cat(parts)
    torch.save({"model": state, "args": argparse.Namespace(blr=0.1), "epoch": 7}, folder / "mae.pth")
    return source


def test_original_file_of_mae_opens_with_its_decoder(tmp_path: Path) -> None:
    source = save_original(tmp_path)
    model, info = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "mae.pth", output_loading_info=True)
    assert not any(info.values()), info
    assert model.options.to_dict() == {
        "decoder_hidden_size": 64, "decoder_num_hidden_layers": 2, "decoder_intermediate_size": 24
    }  # fmt: skip
    images, noise = draw_images(torch.float32)
    for actual, expected in zip(run(model, "mae", images, noise), run(source, "mae", images, noise), strict=True):
        assert_close(actual, expected, 1e-4, "outputs")
    options = {"norm_pix_loss": False, "decoder_num_attention_heads": 8}
    model = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "mae.pth", masked_image_modeling_config=options)
    assert (model.options.norm_pix_loss, model.options.decoder_num_attention_heads) == (False, 8)
    assert HfViTModel.from_pretrained(tmp_path / "mae.pth").config.hidden_size == 128


def test_a_decoder_of_other_targets_is_left_out(tmp_path: Path) -> None:
    save_original(tmp_path)
    content = torch.load(tmp_path / "mae.pth", weights_only=False)
    content["model"] |= {"decoder_pred.weight": torch.ones(108, 64), "decoder_pred.bias": torch.ones(108)}
    torch.save(content, tmp_path / "mae.pth")
    model, info = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "mae.pth", output_loading_info=True)
    assert set(info["missing_keys"]) == {name for name in model.state_dict() if name.startswith(HEAD)}


@pytest.mark.parametrize("kind", ["mae", "simmim"])
def test_script_converts_and_compares_the_decoder(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_source(kind, tmp_path / "theirs")
    script.main([str(tmp_path / "theirs"), str(tmp_path / "ours")])
    printed = capsys.readouterr().out
    assert re.search(rf"32x32  {'logits' if kind == 'mae' else 'reconstruction'} .* equal", printed)
    assert re.search(r"24x40  hidden_states .* equal", printed)
    assert "AutoModelForMaskedImageModeling" in (tmp_path / "ours" / "README.md").read_text()
    script.main([str(tmp_path / "theirs"), str(tmp_path / "features"), "--task", "features", "--skip_parity"])
    assert HfViTModel.from_pretrained(tmp_path / "features").config.use_mask_token == (kind == "simmim")
