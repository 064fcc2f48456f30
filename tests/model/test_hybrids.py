"""Two-tower models of transformers with our encoder: training, saving, opening."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    VisionEncoderDecoderModel,
    VisionTextDualEncoderModel,
)

from hf_vit import HfViTModel

from ..helpers.models import pixels, small_config


START, END = 0, 1
CAPTIONS = torch.tensor([[2, 3, 4, END], [5, 6, END, END], [7, 2, 5, END]])
IMAGES = pixels(small_config(), batch=len(CAPTIONS))
UNDROPPED = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
TEXT = {"vocab_size": 8, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TEXT |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def make_captioner() -> VisionEncoderDecoderModel:
    decoder = GPT2Config(
        vocab_size=8,
        n_positions=8,
        n_embd=24,
        n_layer=1,
        n_head=2,
        add_cross_attention=True,
        is_decoder=True,
        **UNDROPPED,
    )
    model = VisionEncoderDecoderModel(encoder=HfViTModel(small_config()), decoder=GPT2LMHeadModel(decoder))
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id, config.eos_token_id, config.pad_token_id = START, END, END
    return model


def make_dual_encoder() -> VisionTextDualEncoderModel:
    text_model = BertModel(BertConfig(**TEXT))
    return VisionTextDualEncoderModel(vision_model=HfViTModel(small_config()), text_model=text_model)


def train(model: PreTrainedModel, steps: int, **inputs: Tensor | bool) -> list[float]:
    """Train on one batch and return the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=5e-3), []
    model.train()
    for _ in range(steps):
        loss = model(pixel_values=IMAGES, **inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both trained models and their outputs."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("workplace")
    captioner, pairs = make_captioner(), make_dual_encoder()
    losses = train(captioner, 100, labels=CAPTIONS)
    assert losses[-1] < 0.1 < 1 < losses[0]
    losses = train(pairs, 60, input_ids=CAPTIONS, return_loss=True)
    assert losses[-1] < 0.1 < losses[0]
    with torch.no_grad():
        captions = captioner.generate(IMAGES, max_new_tokens=4)
        logits = pairs(input_ids=CAPTIONS, pixel_values=IMAGES).logits_per_image
    captioner.save_pretrained(folder / "captioner")
    pairs.save_pretrained(folder / "pairs")
    torch.save({"captions": captions, "logits": logits}, folder / "saved.pt")
    return folder


def test_a_captioner_says_what_it_has_learned(workplace: Path) -> None:
    captions = torch.load(workplace / "saved.pt", weights_only=True)["captions"]
    assert torch.equal(captions[:, 1:], CAPTIONS)
    reopened = VisionEncoderDecoderModel.from_pretrained(workplace / "captioner")
    assert type(reopened.encoder) is HfViTModel
    assert torch.equal(reopened.generate(IMAGES, max_new_tokens=4), captions)


def test_a_dual_encoder_finds_the_text_of_each_image(workplace: Path) -> None:
    logits = torch.load(workplace / "saved.pt", weights_only=True)["logits"]
    assert logits.argmax(dim=1).tolist() == [0, 1, 2]
    reopened = VisionTextDualEncoderModel.from_pretrained(workplace / "pairs")
    assert torch.equal(reopened(input_ids=CAPTIONS, pixel_values=IMAGES).logits_per_image, logits)


@pytest.mark.parametrize(("make", "tower"), [(make_captioner, "encoder"), (make_dual_encoder, "vision_model")])
def test_every_weight_of_our_tower_learns(make: type, tower: str) -> None:
    model = make()
    inputs = {"labels": CAPTIONS} if tower == "encoder" else {"input_ids": CAPTIONS, "return_loss": True}
    before = {name: weight.clone() for name, weight in model.get_submodule(tower).named_parameters()}
    train(model, 1, **inputs)
    moved = {name for name, weight in model.get_submodule(tower).named_parameters() if not weight.equal(before[name])}
    assert moved == before.keys()
