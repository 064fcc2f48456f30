"""Test the losses, text towers and checkpoints of image-text models."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTModel, HfViTTextConfig
from hf_vit import HfViTForZeroShotImageClassification as ImageTextModel
from hf_vit.model.task_zero_shot_image_classification import contrastive_loss, pool_tokens

from ..helpers import distributed
from ..helpers.contrastive import LOSSES, SHARES, draw, naive_loss, train_step
from ..helpers.models import BERT, padded, small_config, with_texts
from ..helpers.references import assert_close, draw_weights
from ..helpers.versions import needs_chosen_states
from .checks import all_towers, assert_same_weights, build, train


all_losses = pytest.mark.parametrize("loss", LOSSES)
OUTPUTS = ("logits_per_image", "logits_per_text", "image_embeds", "text_embeds")


def batch_of(model: nn.Module, size: int = 4) -> dict[str, Tensor]:
    return with_texts(model.config, size)


def features_of(model: Any, *texts: Tensor) -> Tensor:
    return model.get_text_features(*texts).pooler_output


def assert_same(actual: Any, expected: Any, tolerance: float = 0.0, names: tuple[str, ...] = OUTPUTS) -> None:
    for name in names:
        assert_close(actual[name], expected[name], tolerance, name)


@all_losses
def test_loss_in_chunks_equals_the_naive_loss(loss: str) -> None:
    for count, max_logits in itertools.product((1, 7), (1, 15, 10**6)):
        given, plain = draw(count, loss), draw(count, loss)
        actual, expected = contrastive_loss(*given, max_logits=max_logits), naive_loss(*plain)
        assert_close(actual, expected, 1e-9, "loss")
        actual.backward()
        expected.backward()
        for own, other in zip(given, plain, strict=True):
            if own is not None and other.grad.any():  # the softmax loss of a single pair has no gradient
                assert_close(own.grad, other.grad, 1e-9, "gradient")


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest new tensor."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@all_losses
def test_memory_of_the_loss_does_not_grow_with_the_square_of_the_batch(loss: str) -> None:
    largest = {}
    for count in (100, 400):
        given = draw(count, loss, torch.float32)
        with LargestTensor() as seen:
            contrastive_loss(*given, max_logits=1000).backward()
        largest[count] = seen.largest
    # With 100 pairs, the largest tensor contains a chunk of logits; with 400 pairs, it contains the embeddings.
    assert largest == {100: 1000, 400: 400 * 2 * 5 / 2}


def test_the_loss_is_in_full_precision_under_autocast() -> None:
    given = draw(6, "sigmoid", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = contrastive_loss(*given)
    assert torch.equal(loss, contrastive_loss(*given))
    halves = [tensor.detach().bfloat16() for tensor in given]
    assert contrastive_loss(*halves).dtype == torch.float32


def test_two_processes_with_unequal_shares_learn_as_one(tmp_path: Path) -> None:
    distributed.finish(distributed.start("compare_shares", tmp_path, processes=2), tmp_path)
    for rank in range(2):
        results = torch.load(tmp_path / f"process_{rank}.pt")
        for loss in LOSSES:
            expected = train_step(loss, 0, 6)
            assert expected["0"].abs().max() > 1e-3
            for shares in SHARES:
                for name, value in expected.items():
                    assert_close(results[loss, shares][name], value, 1e-9, f"{name} of {shares}")
        assert "The processes have [0, 6] pairs" in results["nothing"]


@pytest.mark.parametrize(("name", "projection_dim"), [("causal", 12), ("softmax", None)])
def test_outputs_are_those_of_the_towers(name: str, projection_dim: int | None) -> None:
    model = build(name)
    inputs = batch_of(model)
    texts = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    outputs = model(**inputs, return_loss=True)
    images, words = model.get_image_features(inputs["pixel_values"]), model.get_text_features(**texts)
    head = model.contrastive_head
    pooled = model.model(inputs["pixel_values"]).pooler_output
    assert images.pooler_output.shape == (4, projection_dim or 32)
    assert (head.image_projection(pooled) == images.pooler_output).all()
    expected = F.normalize(images.pooler_output), F.normalize(words.pooler_output)
    assert all(map(torch.equal, (outputs.image_embeds, outputs.text_embeds), expected))
    logits = expected[0] @ expected[1].T * head.logit_scale.exp() + (0 if name == "softmax" else head.logit_bias)
    assert_close(outputs.logits_per_image, logits, 1e-6, "logits")
    assert torch.equal(outputs.logits_per_text, outputs.logits_per_image.T)
    assert_close(outputs.loss, naive_loss(*expected, head.logit_scale, head.logit_bias), 1e-6, "loss")
    as_tuple = model(**inputs, return_loss=True, return_dict=False)
    assert torch.equal(as_tuple[0], outputs.loss)
    assert torch.equal(as_tuple[1], outputs.logits_per_image)
    assert model(**inputs).loss is None
    assert (head.logit_bias is None) == (name == "softmax")
    assert (head.text_projection.bias is None) == (projection_dim is not None)
    # Computing the loss in training allocates no square matrix of logits.
    outputs = model.train()(**inputs, return_loss=True)
    assert outputs.loss is not None
    assert outputs.logits_per_image is None
    assert model(**inputs).logits_per_image.shape == (4, 4)


@all_towers
@pytest.mark.filterwarnings("error::FutureWarning")  # text encoders must not get deprecated arguments
def test_texts_in_a_batch_are_as_they_are_alone(tower: str) -> None:
    model = build(tower)
    inputs = batch_of(model, 6)
    if tower == "seen padding":
        texts = inputs["input_ids"]
        filled = F.pad(texts, (0, 1), value=1)
        assert torch.equal(features_of(model, texts), features_of(model, filled))
    together = features_of(model, inputs["input_ids"], inputs["attention_mask"])
    for own, ids, mask in zip(together, inputs["input_ids"], inputs["attention_mask"], strict=True):
        length = len(mask) if tower == "seen padding" else int(mask.sum())
        assert_close(own[None], features_of(model, ids[None, :length]), 1e-5, f"text of {length} tokens")


def test_padding_of_images_changes_nothing() -> None:
    model = build("causal", position_embedding_type="rotary")
    inputs = padded(with_texts)(model.config, 3)
    outputs = model(**inputs)
    parts = (outputs.image_embeds, inputs["pixel_values"], inputs["patch_attention_mask"])
    for own, image, mask in zip(*parts, strict=True):
        rows, columns = int(mask[:, 0].sum()), int(mask[0].sum())
        alone = model.get_image_features(image[None, :, : 8 * rows, : 8 * columns]).pooler_output
        assert_close(own[None], F.normalize(alone), 1e-5, "image")


def test_a_causal_tower_sees_no_token_behind() -> None:
    for tower, sees in (("causal", False), ("all tokens", True)):
        model = build(tower)
        texts = batch_of(model)["input_ids"]
        changed = texts.clone()
        changed[:, 4:] = 7
        states = [model.get_text_features(ids).last_hidden_state for ids in (texts, changed)]
        assert torch.equal(states[0][:, :4], states[1][:, :4]) is not sees


def test_text_pooling_selects_the_expected_token() -> None:
    states = torch.arange(2 * 4 * 1.0).reshape(2, 4, 1)
    texts = torch.tensor([[5, 9, 9, 0], [5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    left = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    for pooling, seen, expected in (
        # "eos" pools the first end-of-text token, or the last token if the text has no end-of-text token.
        ("eos", mask, (1, 7)),
        ("last", mask, (2, 7)),
        ("last", None, (3, 7)),
        ("last", left, (3, 7)),
        ("first", mask, (0, 4)),
        ("mean", mask, (1, 5.5)),
        ("mean", None, (1.5, 5.5)),
    ):
        options = HfViTTextConfig(pooling=pooling, eos_token_id=9)
        assert pool_tokens(states, texts, seen, options)[:, 0].tolist() == list(expected), (pooling, seen)


@needs_chosen_states
@all_towers
def test_both_towers_return_chosen_hidden_states(tower: str) -> None:
    model = build(tower)
    chosen = model(**batch_of(model), output_hidden_states=[0, -1])
    for states, layers in ((chosen.text_model_output, 1 if tower == "bert" else 2), (chosen.vision_model_output, 3)):
        assert [state is not None for state in states.hidden_states] == [True, *[False] * (layers - 1), True]


@all_towers
def test_every_attention_gives_the_same_and_its_weights(tower: str) -> None:
    model = build(tower)
    inputs = batch_of(model)
    expected = model(**inputs)
    eager = build(tower, attn_implementation="eager")
    assert eager.text_model.config._attn_implementation == "eager"
    changed = build(tower)
    changed.set_attn_implementation("eager")
    layers = 1 if tower == "bert" else 2
    for other in (changed, eager, model) if tower in ("causal", "all tokens") else (changed, eager):
        outputs = other(**inputs, output_attentions=True, output_hidden_states=True)
        assert_same(outputs, expected, 1e-5)
        weights = outputs.text_model_output.attentions[0]  # (B, n, S, S)
        assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]), 1e-5, "attention")
        if tower in ("causal", "all tokens"):
            hidden = ~inputs["attention_mask"].bool()[:, None, None, :].expand_as(weights)
            assert not weights[hidden].any()
            assert tower == "all tokens" or not weights.triu(1).any()
        assert len(outputs.text_model_output.hidden_states) == layers + 1
        assert len(outputs.vision_model_output.hidden_states) == 4


@pytest.mark.parametrize("head", ["causal", "softmax"])
def test_overfits_one_batch(head: str) -> None:
    model = build(head)
    model.contrastive_head.initialize(model.config.initializer_range)
    inputs = {**batch_of(model, 8), "return_loss": True}
    train(model, inputs, steps=90)
    outputs = model(**inputs)
    assert outputs.loss < 0.3
    for logits in (outputs.logits_per_image, outputs.logits_per_text):
        assert logits.argmax(dim=1).tolist() == list(range(8))


def test_frozen_images_stay_as_they_are() -> None:
    model = build("causal").train()
    before = copy.deepcopy(model.state_dict())
    model.freeze_vision()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(**batch_of(model), return_loss=True).loss.backward()
    torch.optim.SGD(learning, lr=0.1).step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("model."), name


def test_new_text_tower_and_head_are_initialized(tmp_path: Path) -> None:
    classifier = build(HfViTForImageClassification)
    classifier.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model, info = ImageTextModel.from_pretrained(
        tmp_path, text_config={"num_hidden_layers": 1}, output_loading_info=True
    )
    assert all(name.startswith(("text_model.", "contrastive_head.")) for name in info["missing_keys"])
    assert model.contrastive_head.logit_scale.exp().item() == pytest.approx(10)
    assert model.contrastive_head.logit_bias.item() == -10
    text_weights = [model.text_model.token_embedding.weight, model.text_model.position_embedding.weight]
    assert all(0.01 < weight.std() < 0.03 for weight in (*text_weights, model.contrastive_head.text_projection.weight))
    assert len(model.text_model.encoder.layers) == 1
    # Loading a model with another loss resets the scale and bias of the logits to the initial values of this loss.
    build("softmax").save_pretrained(tmp_path)
    options = {"contrastive_config": {"loss": "sigmoid"}}
    model, info = ImageTextModel.from_pretrained(tmp_path, output_loading_info=True, **options)
    assert set(info["missing_keys"]) == {"contrastive_head.logit_bias"}
    assert model.contrastive_head.logit_bias.item() == -10


def test_image_and_text_towers_that_were_trained_apart_are_joined(tmp_path: Path) -> None:
    vision = build(text_config=None, contrastive_config=None)
    text = hf.BertModel(hf.BertConfig(**{name: value for name, value in BERT.items() if name != "model_type"})).eval()
    draw_weights(text)
    vision.save_pretrained(tmp_path / "vision")
    text.save_pretrained(tmp_path / "text")
    model = ImageTextModel.from_vision_text_pretrained(
        tmp_path / "vision", tmp_path / "text", text_config={"pooling": "mean"}
    ).eval()
    inputs = batch_of(model)
    expected = text(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    actual = model.get_text_features(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    assert_close(actual, expected, 1e-6, "tokens")
    assert torch.equal(model.model.encoder.layers[0].norm1.weight, vision.encoder.layers[0].norm1.weight)
    model.save_pretrained(tmp_path / "both")
    assert_same_weights(HfViTModel.from_pretrained(tmp_path / "both"), model.model)
    reloaded = ImageTextModel.from_pretrained(tmp_path / "both")
    assert_same(reloaded(**inputs), model(**inputs))


def test_texts_that_are_too_long_are_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """Texts are truncated in the same way as by a tokenizer: the end token stays last. Short texts do not change."""
    model = build("causal")
    ids = torch.arange(2, 26).reshape(2, 12)
    ids[0, 11] = ids[1, 4] = 39
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with caplog.at_level("WARNING"), torch.no_grad():
        long = features_of(model, ids, mask)
        assert_close(long[:1], features_of(model, torch.cat((ids[:1, :8], ids[:1, 11:]), dim=1)), 1e-6, "cut off")
        assert_close(long[1:], features_of(model, ids[1:, :5]), 1e-6, "short")
        assert_close(features_of(model, ids[:1]), long[:1], 1e-6, "without a mask")
    assert "Texts have up to 12 tokens, but the model reads only the first 9" in caplog.text
    bert = build("bert")
    longest = bert.text_model.config.max_position_embeddings
    longer = torch.ones(1, longest + 3, dtype=torch.long)
    assert torch.equal(features_of(bert, longer), features_of(bert, longer[:, :longest]))
    with pytest.raises(ValueError, match="12 tokens, but max_position_embeddings=9"):
        model.get_text_features(ids, mask.flip(1))


def test_options_of_another_tower_are_left_behind(tmp_path: Path) -> None:
    small_config().save_pretrained(tmp_path)
    config = HfViTConfig.from_pretrained(tmp_path, text_config={"encoder_config": BERT})
    assert config.text_config.to_dict() == {"encoder_config": BERT}
    config.save_pretrained(tmp_path)
    assert HfViTConfig.from_pretrained(tmp_path).text_config.encoder_config == BERT
    options = {"encoder_config": None, "hidden_size": 64}
    assert HfViTConfig.from_pretrained(tmp_path, text_config=options).text_config.to_dict() == {"hidden_size": 64}
    # Without an override, transformers would return the nested `text_config`.
    assert config.get_text_config() is config
