"""Test that converted OpenCLIP models have the same outputs as transformers and timm models with the same weights."""

import json
import re

import pytest
import timm
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from hf_vit import HfViTForZeroShotImageClassification, HfViTModel, HfViTProcessor
from hf_vit.convert import load_processor
from hf_vit.tasks import train_tokenizer

from ..helpers.references import SHAPE, assert_close, draw_weights
from ..helpers.timm_models import SMALL
from .comparisons import assert_all_matter, dtypes, open_whole


TEXT = {
    **{"vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2},
    **{"intermediate_size": 40, "max_position_embeddings": 7},
}
NAMES = (
    (r"^vision_model\.embeddings\.class_embedding", "visual.class_embedding"),
    (r"^vision_model\.embeddings\.position_embedding\.weight", "visual.positional_embedding"),
    (r"^vision_model\.embeddings\.patch_embedding", "visual.conv1"),
    (r"^vision_model\.pre_layrnorm", "visual.ln_pre"),
    (r"^vision_model\.post_layernorm", "visual.ln_post"),
    (r"^vision_model\.encoder\.layers", "visual.transformer.resblocks"),
    (r"^visual_projection\.weight", "visual.proj"),
    (r"^text_model\.embeddings\.token_embedding", "token_embedding"),
    (r"^text_model\.embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"^text_model\.final_layer_norm", "ln_final"),
    (r"^text_model\.encoder\.layers", "transformer.resblocks"),
    (r"^text_projection\.weight", "text_projection"),
    (r"layer_norm(\d)", r"ln_\1"),
    (r"self_attn\.out_proj", "attn.out_proj"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
)


def as_open_clip(state):
    """Return the weights of a transformers CLIP model with the names and shapes used by OpenCLIP."""
    state, named = dict(state), {}
    for name in [name for name in state if "q_proj" in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[re.sub(r"self_attn\.q_proj\.", "attn.in_proj_", name)] = torch.cat(parts)
    for name, tensor in state.items():
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        named[name] = tensor.T.contiguous() if name in ("visual.proj", "text_projection") else tensor.clone()
    return named


def make_source(hidden_act="gelu", vision=None, text=None):
    towers = {
        "vision_config": {**SHAPE, **(vision or {})},
        "text_config": {**TEXT, "eos_token_id": 29, **(text or {})},
    }
    for tower in towers.values():
        tower["hidden_act"] = hidden_act
    source = hf.CLIPModel(hf.CLIPConfig(**towers, projection_dim=20)).eval()
    draw_weights(source)
    source.logit_scale.data.fill_(1.0)  # the logit scale is small, so that the loss is not zero
    return source


def state_of_clip():
    return as_open_clip(make_source().state_dict())


def model_cfg(text=None, vision=None, **changes):
    visual = {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 8, "layers": 2, "mlp_ratio": 2}
    texts = {"context_length": 7, "vocab_size": 30, "width": 24, "heads": 2, "layers": 3, **(text or {})}
    return {"embed_dim": 20, "vision_cfg": {**visual, **(vision or {})}, "text_cfg": texts, **changes}


def save_open_clip(folder, state, config):
    folder.mkdir(exist_ok=True, parents=True)
    save_file(state, folder / "open_clip_model.safetensors")
    if config is not None:
        content = {"model_cfg": config, "preprocess_cfg": {}}
        (folder / "open_clip_config.json").write_text(json.dumps(content))
    return folder


def with_text_prefix(state):
    return {name if name.startswith(("visual.", "logit_")) else f"text.{name}": state[name] for name in state}


def draw_inputs(dtype, end=29):
    """Return images, and texts whose end tokens are at different positions."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(8, 29, (3, 7), generator=generator)
    for text, stop in zip(texts, (6, 3, 5), strict=True):
        text[stop], text[stop + 1 :] = end, 0
    return texts, torch.randn(3, 3, 32, 32, generator=generator).to(dtype)


# Kind of model -> activation function, and additional configuration fields.
KINDS = {
    "plain": ("gelu", {}),
    "quick": ("quick_gelu", {"quick_gelu": True}),
    "parallel": ("gelu", {}),
    "named text": ("gelu", {"custom_text": True}),
    "end by number": ("gelu", {"text": {"pool_type": "eos", "eos_id": 5, "hf_tokenizer_name": "user/name"}}),
    "bias": ("gelu", {"init_logit_bias": -10}),
}


@pytest.mark.parametrize("kind", KINDS)
@dtypes
def test_both_towers_equal_clip(kind, dtype, tmp_path):
    hidden_act, changes = KINDS[kind]
    end, bias = (5 if kind == "end by number" else 29), (-1.5 if kind == "bias" else 0.0)
    source = make_source(hidden_act, text={"eos_token_id": end}).to(dtype)
    state = as_open_clip(source.state_dict())
    if kind == "named text":
        state = with_text_prefix(state)
    elif kind == "parallel":
        state = {f"module.{name}": state[name] for name in state}
    elif kind == "bias":
        state["logit_bias"] = torch.full((), bias, dtype=dtype)
    model = open_whole(HfViTForZeroShotImageClassification, save_open_clip(tmp_path, state, model_cfg(**changes)))
    texts, images = draw_inputs(dtype, end)
    expected = source(texts, images, return_loss=True)
    with torch.no_grad():
        actual = model(texts, images, return_loss=True)
    towers = {"texts": expected.text_model_output[1], "images": expected.vision_model_output[1]}
    assert_all_matter(source, {"logits": expected.logits_per_image, **towers})
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for name in ("image_embeds", "text_embeds"):
        assert_close(actual[name], expected[name], tolerance, name)
    logits = expected.logits_per_image + bias
    assert logits.std() >= 0.1
    assert_close(actual.logits_per_image, logits, tolerance, "logits")
    assert_close(actual.loss, sigmoid_loss(logits) if bias else expected.loss, tolerance, "loss")


def sigmoid_loss(logits):
    signs = 2 * torch.eye(3, dtype=logits.dtype) - 1
    return -nn.functional.logsigmoid(signs * logits).sum() / 3


@torch.no_grad()
def test_lone_file_of_openai_opens_with_both_towers(tmp_path):
    # The attention heads in OpenAI files have the width 64.
    vision, file = {"hidden_size": 128, "num_attention_heads": 2}, tmp_path / "clip.pt"
    source = make_source("quick_gelu", vision, text={"hidden_size": 128}).double()
    constants = {name: torch.tensor(32) for name in ("input_resolution", "context_length", "vocab_size")}
    torch.save({**as_open_clip(source.state_dict()), **constants}, file)
    with pytest.raises(ValueError, match="The activation of a CLIP file is unknown"):
        HfViTModel.from_pretrained(file)
    model = open_whole(HfViTForZeroShotImageClassification, file, hidden_act="quick_gelu")
    inputs = draw_inputs(torch.float64)
    assert_close(model(*inputs).logits_per_image, source(*inputs).logits_per_image, 1e-9, "logits")
    for quick, hidden_act in ((True, "quick_gelu"), (False, "gelu")):
        vision = {"image_size": 32, "width": 128, "layers": 2, "patch_size": 8, "mlp_ratio": 0.5}
        config = model_cfg({"width": 128}, vision_cfg=vision, quick_gelu=quick)
        (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
        opened = HfViTModel.from_pretrained(file).config
        assert (opened.hidden_act, opened.num_attention_heads) == (hidden_act, 2)


def test_safetensors_file_has_priority_over_a_pickle(tmp_path):
    state = state_of_clip()
    folder = save_open_clip(tmp_path / "clip", {name: 2 * tensor for name, tensor in state.items()}, model_cfg())
    file = folder / "open_clip_model.safetensors"
    safe = HfViTModel.from_pretrained(folder).state_dict()
    file.rename(tmp_path / file.name)
    with pytest.raises(OSError, match=r"contains no weights: .*open_clip_pytorch_model\.bin"):
        HfViTModel.from_pretrained(folder)
    torch.save(state, folder / "open_clip_pytorch_model.bin")
    pickled = HfViTModel.from_pretrained(folder).state_dict()
    (tmp_path / file.name).rename(file)
    for name, tensor in HfViTModel.from_pretrained(folder).state_dict().items():
        assert torch.equal(tensor, safe[name])
        assert torch.equal(tensor, 2 * pickled[name])


def test_image_tower_is_taken_if_all_its_fields_are_known(tmp_path):
    state = state_of_clip()
    for name, value in (
        ("pool_type", "avg"),
        ("norm_kwargs", {"eps": 1e-6}),
        ("act_kwargs", {"approximate": "tanh"}),
        ("attentional_pool", True),
        ("final_ln_after_pool", True),
        ("timm_model_name", "vit_base_patch16_224"),
        ("qk_norm", True),
        ("layers", 3),
        ("width", 48),
        ("patch_size", 16),
        ("layers", [1, 1, 1, 1]),
    ):
        save_open_clip(tmp_path, state, model_cfg(vision={name: value}))
        with pytest.raises(ValueError, match=rf"open_clip_config\.json.*{name}"):
            HfViTModel.from_pretrained(tmp_path)
    without_effect = {"patch_dropout": 0.5, "pool_type": "tok", "norm_kwargs": {}, "attn_pooler_heads": 8}
    save_open_clip(tmp_path, state, model_cfg(vision=without_effect))
    assert HfViTModel.from_pretrained(tmp_path).config.num_hidden_layers == 2


def test_text_tower_that_is_not_plain_is_refused(tmp_path):
    state = state_of_clip()
    for text, changes in (
        ({"hf_model_name": "roberta-base"}, {}),
        ({"embed_cls": True}, {}),
        ({"no_causal_mask": True}, {}),
        ({"pool_type": "last"}, {}),
        ({"hf_tokenizer_name": "bert-base-uncased"}, {}),
        ({"proj_bias": True}, {}),
        ({"proj_type": "none"}, {}),
        ({"act_kwargs": {"approximate": "tanh"}}, {}),
        ({"norm_kwargs": {"eps": 1e-6}}, {}),
        ({"ls_init_value": 0.1}, {}),
        ({"unheard_of": 1}, {}),
        ({}, {"multimodal_cfg": {"layers": 2}}),
    ):
        save_open_clip(tmp_path, state, model_cfg(text, **changes))
        message = rf"text tower of .* random weights: open_clip_config\.json has .*{next(iter(text or changes))}"
        with pytest.raises(ValueError, match=message):
            HfViTForZeroShotImageClassification.from_pretrained(tmp_path)
        images = HfViTModel.from_pretrained(tmp_path)  # the image tower can be opened without the text tower
        assert torch.equal(images.norm.weight, state["visual.ln_post.weight"])
        assert images.config.text_config is None
    fresh = HfViTForZeroShotImageClassification.from_pretrained(tmp_path, text_config={"num_hidden_layers": 1})
    assert torch.equal(fresh.model.norm.weight, state["visual.ln_post.weight"])
    for name, value in (("layers", 2), ("width", 48), ("vocab_size", 31), ("context_length", 77)):
        save_open_clip(tmp_path, state, model_cfg({name: value}))
        with pytest.raises(ValueError, match=rf"{name}={value}, but the weights"):
            HfViTForZeroShotImageClassification.from_pretrained(tmp_path)


def test_tensors_of_a_text_tower_that_are_not_known_are_refused(tmp_path):
    whole = state_of_clip()
    projection = {"text_projection.weight": whole["text_projection"].T.contiguous()}
    without = {name: tensor for name, tensor in whole.items() if name != "text_projection"}
    for state, named in (
        (with_text_prefix(whole), "text tower named text.* are unknown without a configuration"),
        ({**whole, "transformer.resblocks.0.ls_1.gamma": torch.ones(24)}, r"transformer\.resblocks\.0\.ls_1\.gamma"),
        (without, "no text_projection"),
        ({**without, **projection}, r"text_projection\.weight, no text_projection"),
    ):
        file = save_open_clip(tmp_path, state, None) / "open_clip_model.safetensors"
        options = {"hidden_act": "gelu", "num_attention_heads": 4}
        with pytest.raises(ValueError, match=named):
            HfViTForZeroShotImageClassification.from_pretrained(file, **options)
        opened = HfViTModel.from_pretrained(file, **options)
        assert torch.equal(opened.norm.weight, state["visual.ln_post.weight"]), named


def test_other_text_tower_takes_the_place_of_its_own(tmp_path, caplog):
    state = state_of_clip()
    save_open_clip(tmp_path / "clip", state, model_cfg())
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = hf.BertModel(hf.BertConfig(vocab_size=50, **shape))
    encoder.save_pretrained(tmp_path / "bert")
    hf.utils.logging.enable_propagation()
    try:
        model = HfViTForZeroShotImageClassification.from_vision_text_pretrained(tmp_path / "clip", tmp_path / "bert")
    finally:
        hf.utils.logging.disable_propagation()
    assert "differs from text_config in encoder_config" in caplog.text
    assert torch.equal(model.model.norm.weight, state["visual.ln_post.weight"])
    assert torch.equal(model.text_model.embeddings.word_embeddings.weight, encoder.embeddings.word_embeddings.weight)
    assert not torch.equal(model.contrastive_head.image_projection.weight, state["visual.proj"].T)


def test_half_a_text_tower_is_refused_and_the_tokenizer_has_the_length_of_its_texts(tmp_path):
    source, ours = (tmp_path / name for name in ("clip", "ours"))
    save_open_clip(source, state_of_clip(), model_cfg())
    model = HfViTForZeroShotImageClassification.from_pretrained(source)
    model.save_pretrained(ours)
    tensors = load_file(ours / "model.safetensors")
    half = {name: tensors[name] for name in tensors if ".layers.1." not in name}
    save_file(half, ours / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"initialized randomly: .*text_model\.encoder\.layers\.1\."):
        HfViTForZeroShotImageClassification.from_pretrained(ours, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"initialized randomly: .*text_model\.encoder\.layers\.3\."):
        HfViTForZeroShotImageClassification.from_pretrained(source, text_config={"num_hidden_layers": 4})
    train_tokenizer(["a dog", "a cat"], 300, 20).save_pretrained(source)
    processor = load_processor(model, source)
    assert isinstance(processor, HfViTProcessor)
    assert processor.tokenizer.model_max_length == 7


SIGLIP_TEXT = {
    **{"hf_tokenizer_name": "user/name", "no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
    "norm_kwargs": {"eps": 1e-3},
}


def siglip_cfg(projection="none", **text):
    vision = {"image_size": 32, "timm_model_name": "vit_base_patch16_siglip_224", "timm_pool": "map"}
    changes = {"embed_dim": 64, "init_logit_bias": -10, "custom_text": True}
    return model_cfg({**SIGLIP_TEXT, **text}, vision_cfg={**vision, "timm_proj": projection}, **changes)


def make_siglip(hidden_act="gelu"):
    """Return an image tower of timm, a text tower of transformers, and an OpenCLIP file with the weights of both."""
    shape = {**SMALL, "embed_dim": 64, "num_heads": 1, "num_classes": 0}
    images = timm.create_model("vit_base_patch16_siglip_224", **shape)
    config = hf.SiglipTextConfig(**TEXT, hidden_act=hidden_act, layer_norm_eps=1e-3, projection_size=64)
    texts = hf.SiglipTextModel(config)
    for tower in (images, texts):
        draw_weights(tower.double().eval())
    state = {f"visual.trunk.{name}": tensor.contiguous() for name, tensor in images.state_dict().items()}
    named = {name.removeprefix("text_model."): tensor for name, tensor in texts.state_dict().items()}
    head = {f"text.text_projection.{part}": named.pop(f"head.{part}") for part in ("weight", "bias")}
    own = as_open_clip({f"text_model.{name}": tensor for name, tensor in named.items()})
    scale = {"logit_scale": torch.full((1,), 1.0).double(), "logit_bias": torch.full((1,), -1.5).double()}
    return images, texts, {**state, **with_text_prefix(own), **head, **scale}


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh"])
@torch.no_grad()
def test_siglip_equals_its_towers(hidden_act, tmp_path):
    images, texts, state = make_siglip(hidden_act)
    tanh = {"act_kwargs": {"approximate": "tanh"}} if hidden_act != "gelu" else {}
    model = open_whole(HfViTForZeroShotImageClassification, save_open_clip(tmp_path, state, siglip_cfg(**tanh)))
    ids, pixels = draw_inputs(torch.float64)
    ids[ids == 0] = 1  # the padding token of SigLIP is 1
    pairs = nn.functional.normalize(images(pixels)), nn.functional.normalize(texts(ids).pooler_output)
    logits = pairs[0] @ pairs[1].T * torch.tensor(1.0).double().exp() - 1.5
    actual = model(ids, pixels, return_loss=True)
    assert_close(actual.logits_per_image, logits, 1e-9, "logits")
    assert_close(actual.loss, sigmoid_loss(logits), 1e-9, "loss")
    assert_close(model(ids[1:2, :4], pixels).logits_per_text, logits.T[1:2], 1e-9, "logits of a short text")
    assert_close(model(ids, torch.cat((pixels, pixels), -1)).text_embeds, pairs[1], 1e-9, "texts")


def test_siglip_that_is_not_known_is_refused(tmp_path):
    _, _, state = make_siglip()
    for text in ({"hf_model_name": "facebook/nllb"}, {"no_causal_mask": False}, {"act_kwargs": {"inplace": True}}):
        save_open_clip(tmp_path, state, siglip_cfg(**text))
        with pytest.raises(ValueError, match=rf"random weights: open_clip_config\.json has .*{next(iter(text))}"):
            HfViTForZeroShotImageClassification.from_pretrained(tmp_path)
        opened = HfViTModel.from_pretrained(tmp_path)
        assert torch.equal(opened.norm.weight, state["visual.trunk.norm.weight"])
    save_open_clip(tmp_path, state, siglip_cfg("linear"))
    with pytest.raises(ValueError, match=r"image tower in open_clip_config\.json has {'timm_proj': 'linear'}"):
        HfViTModel.from_pretrained(tmp_path)


def test_texts_for_siglip_are_canonicalized_also_when_saved(tmp_path):
    _, _, state = make_siglip()
    letters = [(piece, -3.0) for piece in "▁adogADOG._!,"]
    pieces = [*((special, 0.0) for special in ("</s>", "<pad>", "<unk>")), *letters, ("▁a", -2.0)]
    tokenizer = hf.T5Tokenizer(vocab=pieces, extra_ids=0)
    expected = tokenizer("a do g").input_ids
    assert tokenizer("A, Do_G!").input_ids != expected
    tokenizer.save_pretrained(tmp_path)
    save_open_clip(tmp_path, state, siglip_cfg(tokenizer_kwargs={"clean": "canonicalize"}))
    model = HfViTForZeroShotImageClassification.from_pretrained(tmp_path)
    assert tokenizer.pad_token_id == model.text_options.pad_token_id == 1
    processor = load_processor(model, tmp_path)
    processor.save_pretrained(tmp_path / "ours")
    for opened in (processor, HfViTProcessor.from_pretrained(tmp_path / "ours")):
        assert opened(text=["A, Do_G!"]).input_ids == [expected]
    save_open_clip(tmp_path, state, siglip_cfg())
    assert load_processor(model, tmp_path)(text=["A, Do_G!"]).input_ids != [expected]
    other = HfViTForZeroShotImageClassification.from_pretrained(tmp_path, text_config={"pad_token_id": 2})
    with pytest.raises(ValueError, match=r"pads with token 1, but the text tower was trained with padding token 2"):
        load_processor(other, tmp_path)
