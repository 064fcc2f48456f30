"""Test training, saving and loading of two-tower models of transformers that contain our encoder."""

from pathlib import Path

import pytest
import torch
import transformers as hf

from hf_vit import HfViTModel

from ..helpers.models import pixels, small_config
from .checks import train


START, END = 0, 1
CAPTIONS = torch.tensor([[2, 3, 4, END], [5, 6, END, END], [7, 2, 5, END]])
IMAGES = pixels(small_config(), batch=len(CAPTIONS))
UNDROPPED = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
TEXT = {"vocab_size": 8, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TEXT |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def make_captioner() -> hf.VisionEncoderDecoderModel:
    sizes = {"vocab_size": 8, "n_positions": 8, "n_embd": 24, "n_layer": 1, "n_head": 2}
    decoder = hf.GPT2Config(**sizes, add_cross_attention=True, is_decoder=True, **UNDROPPED)
    model = hf.VisionEncoderDecoderModel(encoder=HfViTModel(small_config()), decoder=hf.GPT2LMHeadModel(decoder))
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id, config.eos_token_id, config.pad_token_id = START, END, END
    return model


def make_dual_encoder() -> hf.VisionTextDualEncoderModel:
    text_model = hf.BertModel(hf.BertConfig(**TEXT))
    return hf.VisionTextDualEncoderModel(vision_model=HfViTModel(small_config()), text_model=text_model)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained captioner, a trained dual encoder, and the outputs of both."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("workplace")
    captioner, pairs = make_captioner(), make_dual_encoder()
    losses = train(captioner, {"pixel_values": IMAGES, "labels": CAPTIONS}, steps=100, max_lr=1e-2)
    assert losses[-1] < 0.1 < 1 < losses[0]
    losses = train(pairs, {"pixel_values": IMAGES, "input_ids": CAPTIONS, "return_loss": True}, steps=60, max_lr=1e-2)
    assert losses[-1] < 0.1 < losses[0]
    with torch.no_grad():
        captions = captioner.generate(IMAGES, max_new_tokens=4)
        logits = pairs(input_ids=CAPTIONS, pixel_values=IMAGES).logits_per_image
    captioner.save_pretrained(folder / "captioner")
    pairs.save_pretrained(folder / "pairs")
    torch.save({"captions": captions, "logits": logits}, folder / "saved.pt")
    return folder


def test_reopened_models_reproduce_the_trained_outputs(workplace: Path) -> None:
    saved = torch.load(workplace / "saved.pt", weights_only=True)
    assert torch.equal(saved["captions"][:, 1:], CAPTIONS)
    captioner = hf.VisionEncoderDecoderModel.from_pretrained(workplace / "captioner")
    assert type(captioner.encoder) is HfViTModel
    assert torch.equal(captioner.generate(IMAGES, max_new_tokens=4), saved["captions"])
    assert saved["logits"].argmax(dim=1).tolist() == [0, 1, 2]
    pairs = hf.VisionTextDualEncoderModel.from_pretrained(workplace / "pairs")
    assert torch.equal(pairs(input_ids=CAPTIONS, pixel_values=IMAGES).logits_per_image, saved["logits"])


@pytest.mark.parametrize(("make", "tower"), [(make_captioner, "encoder"), (make_dual_encoder, "vision_model")])
def test_every_weight_of_our_tower_learns(make: type, tower: str) -> None:
    model = make()
    inputs = {"labels": CAPTIONS} if tower == "encoder" else {"input_ids": CAPTIONS, "return_loss": True}
    before = {name: weight.clone() for name, weight in model.get_submodule(tower).named_parameters()}
    train(model, {"pixel_values": IMAGES, **inputs}, steps=2)
    moved = {name for name, weight in model.get_submodule(tower).named_parameters() if not weight.equal(before[name])}
    assert moved == before.keys()
