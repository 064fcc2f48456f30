"""Converted decoders of MAE and SimMIM of transformers: outputs, gradients, sensitivity to each tensor."""

import argparse
import re

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from hf_vit import HfViTForMaskedImageModeling, HfViTModel

from ..helpers.models import SMALL
from ..helpers.references import assert_close
from .comparisons import assert_all_matter, assert_same_weights, dtypes, gradient, open_whole
from .sources import SHAPE, draw_images, draw_source


DECODER = SMALL["masked_image_modeling_config"]
HEAD = "masked_image_modeling_head."


def save(source, folder, dtype=torch.float32):
    draw_source(source).to(dtype).save_pretrained(folder)
    return source


def save_source(kind, folder, dtype=torch.float32):
    if kind == "simmim":
        return save(
            hf.ViTForMaskedImageModeling(hf.ViTConfig(**SHAPE, encoder_stride=8, qkv_bias=False)), folder, dtype
        )
    options = {"norm_pix_loss": kind == "mae", "mask_ratio": 0.75 if kind == "mae" else 0.5}
    return save(hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SHAPE, **DECODER, **options)), folder, dtype)


NOISE = torch.rand(2, 16, generator=torch.Generator().manual_seed(2))  # determines the mask


def run(model, kind, images):
    """Return the predicted pixels and the loss."""
    if kind == "simmim":
        outputs = model(images, bool_masked_pos=NOISE.argsort(dim=1) > 6)
        return outputs.reconstruction, outputs.loss
    outputs = model(images, noise=NOISE)
    return outputs.logits, outputs.loss


@dtypes
@pytest.mark.parametrize("kind", ["mae", "plain pixels", "simmim"])
def test_equals_source(kind, dtype, tmp_path):
    source = save_source(kind, tmp_path, dtype)
    model, images = open_whole(HfViTForMaskedImageModeling, tmp_path), draw_images((32, 32), dtype)
    expected, actual = run(source, kind, images), run(model, kind, images)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert expected[0].std() >= 0.1
    assert_close(actual[0], expected[0], tolerance, "pixels")
    # transformers counts masked pixels in float32.
    assert_close(actual[1], expected[1], 1e-7 if dtype == torch.float64 and kind == "simmim" else tolerance, "loss")
    assert_all_matter(source, {"pixels": expected[0]})
    assert_close(gradient(actual[:1], images), gradient(expected[:1], images), tolerance, "gradient")


def test_published_names_of_the_decoder_open_and_a_position_of_its_cls_token_is_refused(tmp_path):
    """The names are those of facebook/vit-mae-base; transformers saves the blocks under other names."""
    save_source("mae", tmp_path)
    expected, file = HfViTForMaskedImageModeling.from_pretrained(tmp_path), tmp_path / "model.safetensors"
    blocks = re.compile(r"^decoder\.(decoder_encoder\.layer|decoder_layers)\.")
    tensors = {blocks.sub("decoder.decoder_layers.", name): tensor for name, tensor in load_file(file).items()}
    assert "decoder.decoder_layers.1.attention.attention.query.weight" in tensors
    save_file(tensors, file)
    assert_same_weights(HfViTForMaskedImageModeling.from_pretrained(tmp_path), expected)
    save_file({**tensors, "decoder.decoder_pos_embed": torch.ones(1, 17, 16)}, file)
    with pytest.raises(ValueError, match="position embedding of the CLS token in the decoder of MAE is not zero"):
        HfViTForMaskedImageModeling.from_pretrained(tmp_path)


def test_options_come_along_and_can_be_changed(tmp_path):
    save_source("plain pixels", tmp_path)
    model = HfViTForMaskedImageModeling.from_pretrained(tmp_path)
    assert model.options.to_dict() == {**DECODER, "mask_ratio": 0.5, "norm_pix_loss": False}
    model = HfViTForMaskedImageModeling.from_pretrained(tmp_path, masked_image_modeling_config={"mask_ratio": 0.25})
    assert model.options.to_dict() == {**DECODER, "mask_ratio": 0.25, "norm_pix_loss": False}
    save_source("simmim", tmp_path / "simmim")
    config = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "simmim").config
    assert config.masked_image_modeling_config.to_dict() == {"objective": "simmim"}
    assert config.use_mask_token


def test_what_other_checkpoints_do_not_contain_is_fresh(tmp_path):
    hf.ViTMAEModel(hf.ViTMAEConfig(**SHAPE, **DECODER)).save_pretrained(tmp_path / "encoder")
    model, info = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "encoder", output_loading_info=True)
    assert set(info["missing_keys"]) == {name for name in model.state_dict() if name.startswith(HEAD)}
    assert model.options.decoder_hidden_size == 16
    # Pixels of more than one patch
    hf.ViTForMaskedImageModeling(hf.ViTConfig(**SHAPE, encoder_stride=16)).save_pretrained(tmp_path / "wide")
    _, info = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "wide", output_loading_info=True)
    assert set(info["missing_keys"]) == {f"{HEAD}simmim.predictor.{leaf}" for leaf in ("weight", "bias")}


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


def save_original(folder):
    """Save the model in the file format of the MAE repository."""
    wide = {"hidden_size": 128, "num_attention_heads": 2, "layer_norm_eps": 1e-6}
    decoder = {**DECODER, "decoder_hidden_size": 64, "decoder_num_attention_heads": 16, "norm_pix_loss": True}
    source = save(hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SHAPE | wide, **decoder)), folder / "theirs")
    state = load_file(folder / "theirs" / "model.safetensors")
    for pattern, name in ORIGINAL:
        state = {re.sub(pattern, name, key): tensor for key, tensor in state.items()}
    for name in [name for name in state if ".attn.query." in name]:
        parts = [state.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        state[name.replace("query", "qkv")] = torch.cat(parts)
    torch.save({"model": state, "args": argparse.Namespace(blr=0.1), "epoch": 7}, folder / "mae.pth")
    return source


def test_original_file_of_mae_opens_with_its_decoder(tmp_path):
    source, file = save_original(tmp_path), tmp_path / "mae.pth"
    model = open_whole(HfViTForMaskedImageModeling, file)
    expected = {"decoder_hidden_size": 64, "decoder_num_hidden_layers": 2, "decoder_intermediate_size": 24}
    assert model.options.to_dict() == expected
    images = draw_images((32, 32))
    for actual, output in zip(run(model, "mae", images), run(source, "mae", images), strict=True):
        assert_close(actual, output, 1e-4, "outputs")
    options = {"norm_pix_loss": False, "decoder_num_attention_heads": 8}
    model = HfViTForMaskedImageModeling.from_pretrained(file, masked_image_modeling_config=options)
    assert (model.options.norm_pix_loss, model.options.decoder_num_attention_heads) == (False, 8)
    assert HfViTModel.from_pretrained(file).config.hidden_size == 128
    # The decoder is not converted if it predicts other targets than pixels.
    content = torch.load(file, weights_only=False)
    content["model"] |= {"decoder_pred.weight": torch.ones(108, 64), "decoder_pred.bias": torch.ones(108)}
    torch.save(content, file)
    model, info = HfViTForMaskedImageModeling.from_pretrained(file, output_loading_info=True)
    assert set(info["missing_keys"]) == {name for name in model.state_dict() if name.startswith(HEAD)}
