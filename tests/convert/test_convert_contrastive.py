"""Test that converted CLIP and SigLIP models have the outputs, loss and gradients of the transformers models."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from hf_vit import HfViTForZeroShotImageClassification, HfViTModel
from hf_vit.convert.families import clip

from ..helpers.references import assert_close
from .comparisons import assert_all_matter, dtypes, open_whole, reconfigure
from .sources import SHAPE, SIGLIP_2, draw_source, flattened


# The epsilon is large, so that a wrong epsilon in the converted model would change the outputs visibly.
TEXT = {
    **{"vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 40, "max_position_embeddings": 7, "layer_norm_eps": 2e-3},
}
CLIP_TEXT, TO_IMAGES = {**TEXT, "eos_token_id": 29}, {**TEXT, "projection_size": 32}
BUILD = {
    "clip": lambda: hf.CLIPModel(hf.CLIPConfig(vision_config=SHAPE, text_config=CLIP_TEXT, projection_dim=20)),
    "siglip": lambda: hf.SiglipModel(hf.SiglipConfig(vision_config=SHAPE, text_config=TO_IMAGES)),
    "siglip2": lambda: hf.Siglip2Model(hf.Siglip2Config(vision_config=SIGLIP_2, text_config=TO_IMAGES)),
}
OUTPUTS = ("logits_per_image", "logits_per_text", "image_embeds", "text_embeds")


def save_source(kind, folder, dtype=torch.float32):
    source = draw_source(BUILD[kind]()).to(dtype)
    source.save_pretrained(folder)
    return source


def draw_inputs(dtype):
    """Return images and texts. The texts have the maximum length and end tokens at different positions."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(29, (3, 7), generator=generator)
    texts[torch.arange(3), torch.tensor([6, 3, 5])] = 29
    return torch.randn(3, 3, 32, 32, generator=generator).to(dtype).requires_grad_(), texts


@pytest.mark.parametrize("kind", BUILD)
@dtypes
def test_equals_source(kind, dtype, tmp_path):
    source = save_source(kind, tmp_path, dtype)
    model = open_whole(HfViTForZeroShotImageClassification, tmp_path)
    images, texts = draw_inputs(dtype)
    options = {"return_loss": True, "output_hidden_states": True}
    inputs = flattened(images) if kind == "siglip2" else {"pixel_values": images}
    expected, actual = source(input_ids=texts, **inputs, **options), model(texts, images, **options)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for name in (*OUTPUTS, "loss"):
        assert name == "loss" or expected[name].std() >= 0.1, f"{name} hardly varies"
        assert_close(actual[name], expected[name], tolerance, name)
    for tower in ("text_model_output", "vision_model_output"):
        own, other = actual[tower], expected[tower]
        assert_close(own.pooler_output, other.pooler_output, tolerance, f"pooled output of {tower}")
        for own_state, other_state in zip(own.hidden_states, other.hidden_states, strict=True):
            assert_close(own_state, other_state, tolerance, f"hidden states of {tower}")
    towers = {tower: expected[tower].pooler_output for tower in ("text_model_output", "vision_model_output")}
    assert_all_matter(source, {**{name: expected[name] for name in OUTPUTS}, **towers})
    expected.loss.backward()
    expected_gradient, images.grad = images.grad, None
    actual.loss.backward()
    assert_close(images.grad, expected_gradient, tolerance, "gradient of the images")
    layer = "text_model.encoder.layers.0.mlp.fc1.weight"
    pairs = {
        "text_model.token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "text_model.position_embedding.weight": "text_model.embeddings.position_embedding.weight",
        layer: layer,
        "contrastive_head.logit_scale": "logit_scale",
        "contrastive_head.text_projection.weight": f"text_{'projection' if kind == 'clip' else 'model.head'}.weight",
    }
    for ours, theirs in pairs.items():
        other = source.get_parameter(theirs).grad
        own = model.get_parameter(ours).grad.reshape(other.shape)
        assert_close(own, other, tolerance, f"gradient of {ours}")


@torch.no_grad()
def test_attention_mask_of_clip_texts_equals_transformers(tmp_path):
    source = save_source("clip", tmp_path)
    model = HfViTForZeroShotImageClassification.from_pretrained(tmp_path)
    _, texts = draw_inputs(torch.float32)
    mask = (torch.arange(7) <= torch.tensor([[6], [3], [5]])).long()
    expected = source.get_text_features(texts, attention_mask=mask).pooler_output
    assert_close(model.get_text_features(texts, attention_mask=mask).pooler_output, expected, 1e-4, "texts")


@torch.no_grad()
def test_texts_for_siglip_are_filled_up(tmp_path):
    source = save_source("siglip", tmp_path)
    model = HfViTForZeroShotImageClassification.from_pretrained(tmp_path)
    texts = draw_inputs(torch.float32)[1][:, :4]
    filled = torch.cat((texts, torch.ones(3, 3, dtype=torch.long)), dim=1)
    expected = source.get_text_features(filled).pooler_output
    mask = torch.ones_like(texts)  # an attention mask, which other tokenizers return
    assert_close(model.get_text_features(texts, attention_mask=mask).pooler_output, expected, 1e-4, "texts")
    # In transformers, the features of a text differ if it is not padded to the maximum length.
    short = source.get_text_features(texts).pooler_output
    assert (short - expected).abs().max() > 0.1 * expected.abs().max()
    as_given = HfViTForZeroShotImageClassification.from_pretrained(tmp_path, text_config={"pad_token_id": None})
    assert_close(as_given.get_text_features(texts).pooler_output, short, 1e-4, "texts without padding")
    assert clip.siglip_text_fields({"text_config": {"vocab_size": 256000}})["text_config"]["pad_token_id"] == 0


@pytest.mark.parametrize(("eos", "end"), [(2, 29), (5, 5), (49407, None)])
@torch.no_grad()
def test_texts_of_clip_end_where_its_file_says(eos, end, tmp_path):
    save_source("clip", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    reconfigure(tmp_path, text_config={**config["text_config"], "eos_token_id": eos})
    source = hf.CLIPModel.from_pretrained(tmp_path).eval()
    model = HfViTForZeroShotImageClassification.from_pretrained(tmp_path)
    assert model.text_options.eos_token_id == end
    _, texts = draw_inputs(torch.float32)
    texts[torch.arange(3), torch.tensor([2, 1, 4])] = 5
    expected = source.get_text_features(texts).pooler_output
    assert_close(model.get_text_features(texts).pooler_output, expected, 1e-4, "texts")


def test_defaults_of_the_text_tower_are_those_of_the_source():
    for config_class, fields in (
        (hf.CLIPTextConfig, clip.text_fields),
        (hf.SiglipTextConfig, clip.siglip_text_fields),
        (hf.Siglip2TextConfig, clip.siglip_text_fields),
    ):
        theirs = config_class().to_dict()
        ours = HfViTForZeroShotImageClassification.config_class(**fields({})).text_config
        for name in clip.SIGLIP_TEXT_DEFAULTS:
            assert getattr(ours, name) == theirs[name], name
        end = "eos_token_id" if ours.pad_token_id is None else "pad_token_id"
        assert getattr(ours, end) == theirs[end]
        known = {"eos_token_id", "pad_token_id", "bos_token_id", "projection_size", "projection_dim"}
        known |= {"attention_dropout", "initializer_range", "initializer_factor", "model_type"}
        assert theirs.keys() - hf.PreTrainedConfig().to_dict().keys() <= {*clip.SIGLIP_TEXT_DEFAULTS} | known
    # The older field text_config_dict of CLIP has priority over text_config.
    config = {"text_config": {"num_hidden_layers": 3, "eos_token_id": 2}, "text_config_dict": {"hidden_size": 64}}
    fields = clip.text_fields(config)["text_config"]
    assert fields == {"hidden_size": 64, "hidden_act": "quick_gelu", "eos_token_id": 49407}


@pytest.mark.parametrize("kind", BUILD)
def test_image_tower_opens_alone_and_a_lost_tensor_is_named(kind, tmp_path):
    save_source(kind, tmp_path)
    expected = HfViTForZeroShotImageClassification.from_pretrained(tmp_path).model.state_dict()
    model, info = HfViTModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    tensors = load_file(tmp_path / "model.safetensors")
    more = tensors["text_model.final_layer_norm.weight"].clone()
    save_file({**tensors, "text_model.encoder.layers.7.layer_norm1.weight": more}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"Left over: text_model\.encoder\.layers\.7\.layer_norm1\.weight"):
        HfViTModel.from_pretrained(tmp_path)
