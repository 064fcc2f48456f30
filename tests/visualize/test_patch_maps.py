"""Compare patch maps with the attention of the model, PCA in scikit-learn, and plain loops."""

import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor, nn

from hf_vit import (
    HfViTBackbone,
    HfViTForDepthEstimation,
    HfViTForImageClassification,
    HfViTForMaskedImageModeling,
    HfViTForObjectDetection,
    HfViTForUniversalSegmentation,
    HfViTModel,
)
from hf_vit.model.pretrained import HfViTPreTrainedModel
from hf_vit.visualize import (
    attention_maps,
    attention_rollout,
    feature_colors,
    gradient_rollout,
    patch_features,
    patch_similarity,
    record_attention,
)
from hf_vit.visualize.attention import Attention
from hf_vit.visualize.patches import patch_at, principal_components
from hf_vit.visualize.tokens import attention_distances, convolution_distances, most_attended

from ..data.errors import expect_error
from ..helpers.image_text_models import build_model, build_processor
from ..helpers.models import VARIANTS, pixels, small_config


# Of the 3 x 4 patches, 2 x 3 are valid. The remaining patches are padding.
PADDED = torch.tensor([[True, True, True, False], [True, True, True, False], [False] * 4])


def lively(model: HfViTPreTrainedModel) -> HfViTPreTrainedModel:
    """Convert a model to float64, and draw random weights that make its attention uneven."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def values_and_results(model: nn.Module, **inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the value vectors and the attention outputs of each layer, both of shape (B, heads, L, d)."""
    seen: list[list[Tensor]] = []

    for layer in model.base_model.encoder.layers:
        layer.attention.qkv.register_forward_hook(lambda *args: seen.append([args[2].chunk(3, dim=-1)[2]]))
        layer.attention.projection.register_forward_pre_hook(lambda _, inputs: seen[-1].append(inputs[0]))
    model(**inputs)
    biases = [layer.attention.value_bias for layer in model.base_model.encoder.layers]
    pairs = [(value + (0 if bias is None else bias), out) for (value, out), bias in zip(seen, biases, strict=True)]
    return [tuple(states.unflatten(-1, (4, 8)).transpose(1, 2) for states in pair) for pair in pairs]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_recorded_attention_weights_equal_those_of_sdpa(variant: str) -> None:
    config = small_config(variant)
    model = lively(HfViTModel(config))
    inputs = {"pixel_values": pixels(config, 2, (3, 4)).double()}
    inputs["patch_attention_mask"] = torch.stack((PADDED, torch.ones(3, 4, dtype=torch.bool)))
    recorded = record_attention(model, **inputs)
    assert model.config._attn_implementation == "sdpa"
    assert [own.grid for own in recorded] == [(2, 3), (3, 4)]
    num_prefix = config.num_prefix_tokens
    inside = [*range(num_prefix + 3), *range(num_prefix + 4, num_prefix + 7)]  # the fourth patch of a row is padding
    for layer, (value, result) in enumerate(values_and_results(model, **inputs)):
        for image, tokens in enumerate((inside, range(num_prefix + 12))):
            weights = recorded[image].weights[layer]
            torch.testing.assert_close(weights @ value[image, :, list(tokens)], result[image, :, list(tokens)])
            torch.testing.assert_close(weights.sum(-1), torch.ones(4, len(tokens)).double())


def test_an_image_in_a_padded_batch_is_as_alone() -> None:
    config = small_config("rotary", window_size=2, global_attention_layers=[1])
    model = lively(HfViTForImageClassification(config))
    images, mask = pixels(config, 2, (3, 4)).double(), torch.stack((PADDED, torch.ones(3, 4, dtype=torch.bool)))
    alone = images[:1, :, :16, :24]
    padded, own = record_attention(model, images, mask)[0], record_attention(model, alone)[0]
    assert (padded.grid, padded.num_prefix) == (own.grid, own.num_prefix)
    torch.testing.assert_close(padded.weights, own.weights)
    torch.testing.assert_close(padded.pooled, own.pooled)
    heat = gradient_rollout(model, images, patch_attention_mask=mask)[0]
    torch.testing.assert_close(heat, gradient_rollout(model, alone)[0])


def test_task_models_record_the_attention_of_their_backbone_and_queries() -> None:
    config = small_config()
    images = pixels(config, 2, (3, 4)).double()
    for model_class in (HfViTBackbone, HfViTForDepthEstimation, HfViTForMaskedImageModeling):
        model = lively(model_class(config))
        (found,), (inside,) = record_attention(model, images[:1]), record_attention(model.base_model, images[:1])
        assert found.weights.shape == (3, 4, 13, 13)
        torch.testing.assert_close(found.weights, inside.weights)
    for model_class in (HfViTForUniversalSegmentation, HfViTForObjectDetection):
        model = lively(model_class(config))
        with torch.no_grad():
            own = model(images, output_attentions=True).attentions
        weights = record_attention(model, images)[1].weights
        assert weights.shape == (3, 4, 13 + 5, 13 + 5)
        assert torch.equal(weights[1:], torch.stack(own[1:])[:, 1])
        assert torch.equal(weights[0, :, :13, :13], own[0][1])
        assert torch.equal(weights[0, :, 13:], torch.eye(18).double()[13:].expand(4, -1, -1))
        assert attention_maps(record_attention(model, images)[1]).shape == (3, 4, 3, 4)


def test_token_weights_of_an_image_follow_the_pooling() -> None:
    patches = dict.fromkeys(range(1, 7), 1 / 6)
    for options, expected in (
        ({}, {0: 1.0}),
        ({"use_distillation_token": True, "num_register_tokens": 2}, {0: 0.5, 1: 0.5}),
        ({"pooling": "mean", "use_cls_token": False, "num_register_tokens": 1}, patches),
        ({"pooling": "attention"}, patches),
        ({"pooling": "cls_mean"}, {0: 0.5, **dict.fromkeys(range(1, 7), 1 / 12)}),
    ):
        config = small_config(**options)
        (recorded,) = record_attention(HfViTModel(config).eval(), pixels(config, 1, (2, 3)))
        shares = [expected.get(token, 0.0) for token in range(config.num_prefix_tokens + 6)]
        torch.testing.assert_close(recorded.pooled, torch.tensor(shares))
        (half,) = record_attention(HfViTModel(config).bfloat16().eval(), pixels(config, 1))
        assert (half.weights.dtype, half.pooled.dtype) == (torch.float32, torch.float32)


def test_maps_and_rollout_show_what_one_patch_or_the_cls_token_attends_to() -> None:
    # Random attention weights of 3 layers and 2 heads. There are 8 tokens: CLS, a register token and 2 x 3 patches.
    weights = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    attention = Attention((3 * weights).softmax(-1), (2, 3), 2, torch.eye(8).double()[0])
    for patch, token in ((None, 0), ((0, 0), 2), ((1, 2), 7)):
        maps = attention_maps(attention, patch)
        assert maps.shape == (3, 2, 2, 3)
        for row, column in np.ndindex(2, 3):
            torch.testing.assert_close(maps[:, :, row, column], attention.weights[:, :, token, 2 + 3 * row + column])
    expect_error(r"no patch \(2, 0\) \(row, column\) in a grid of 2 x 3", attention_maps, attention, (2, 0))
    # Attention rollout is the product of the attention matrices of all layers.
    product = torch.eye(8).double()
    for layer in attention.weights:
        product = (layer.mean(0) + torch.eye(8)) / 2 @ product
    for patch, token in ((None, 0), ((1, 0), 5)):
        torch.testing.assert_close(attention_rollout(attention, patch), product[token, 2:].view(2, 3))


def forward(model: HfViTForImageClassification, images: Tensor, nudges: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Add `nudges` to the attention weights of a classifier. Return its logits and the original attention weights."""
    inside, recorded = model.model, []
    states, _ = inside.embed(images)
    for layer, nudge in zip(inside.encoder.layers, nudges, strict=True):
        query, key, value = layer.attention.qkv(layer.norm1(states)).unflatten(-1, (3, 4, 8)).unbind(2)
        weights = (torch.einsum("blnd,bknd->bnlk", query, key) / math.sqrt(8)).softmax(-1)
        recorded.append(weights)
        attended = torch.einsum("bnlk,bknd->blnd", weights + nudge, value).flatten(2)
        states = states + layer.attention.projection(attended)
        states = states + layer.mlp(layer.norm2(states))
    return model.classifier(inside.norm(states)[:, 0]), recorded


@torch.no_grad()
def test_gradient_rollout_agrees_with_differences_of_nudged_attention() -> None:
    config = small_config()
    model = lively(HfViTForImageClassification(config))
    image, class_number, step = pixels(config, 1, (2, 3)).double(), 3, 1e-5
    nothing = [torch.zeros(1, 4, 7, 7).double()] * 3
    logits, weights = forward(model, image, nothing)
    torch.testing.assert_close(logits, model(image).logits)
    relevance = torch.eye(7).double()
    for number in range(3):
        nudges = [*nothing]
        nudges[number] = step * torch.eye(4 * 7 * 7).double().view(-1, 4, 7, 7)
        images = image.expand(4 * 7 * 7, -1, -1, -1)
        above = forward(model, images, nudges)[0][:, class_number]
        nudges[number] = -nudges[number]
        below = forward(model, images, nudges)[0][:, class_number]
        gradient = ((above - below) / (2 * step)).view(4, 7, 7)
        relevance = relevance + (weights[number][0] * gradient).clamp(min=0).mean(0) @ relevance
    (heat,) = gradient_rollout(model, image, [class_number])
    torch.testing.assert_close(heat, relevance[0, 1:].view(2, 3), rtol=1e-6, atol=1e-9)
    assert heat.std() > 0.05 * heat.mean()  # differences within the map exceed the tolerance


def test_gradient_rollout_leaves_a_frozen_model_as_it_is_and_takes_the_likeliest_class() -> None:
    config = small_config("registers", drop_path_rate=0.0)
    model = lively(HfViTForImageClassification(config))
    images = pixels(config, 2).double()
    likeliest = model(images).logits.argmax(1).tolist()
    expected = gradient_rollout(model, images, likeliest)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.requires_grad_(False)
    with torch.no_grad():
        found = gradient_rollout(model, images)
    torch.testing.assert_close(found, expected)
    assert not images.requires_grad
    others = gradient_rollout(model, images, [(number + 1) % 5 for number in likeliest])
    assert not torch.allclose(others[0], expected[0])
    # If the classifier weights are zero, the logits do not depend on the image, so the map is zero.
    for pooling in ("cls", "mean", "cls_mean"):
        model = HfViTForImageClassification(small_config(pooling=pooling)).eval()
        torch.nn.init.zeros_(model.classifier.weight)
        (heat,) = gradient_rollout(model, pixels(model.config, 1), [0])
        assert torch.equal(heat, torch.zeros(4, 4))


def test_relevance_for_a_text_equals_that_for_the_gradient_of_the_similarity() -> None:
    model = lively(build_model(build_processor(["red", "blue"])))
    image = pixels(model.config, 1).double()
    with torch.no_grad():
        embeds = model.get_image_features(image).pooler_output
        text = torch.nn.functional.normalize(torch.randn_like(embeds), dim=-1)
        (heat,) = gradient_rollout(model, image, text_embeds=text)
        length = embeds.norm()
        direction = (text - (text @ embeds.T) * embeds / length**2) / length  # gradient of the cosine similarity
        classifier = HfViTForImageClassification(model.config).double().eval()
        classifier.model.load_state_dict(model.model.state_dict())
        classifier.classifier.weight[0] = (direction @ model.contrastive_head.image_projection.weight)[0]
    torch.testing.assert_close(heat, gradient_rollout(classifier, image, [0])[0])
    assert heat.std() > 0.05 * heat.mean()  # differences within the map exceed the tolerance


def test_distances_of_attention_are_weighted_means_over_patches() -> None:
    weights = torch.zeros(2, 2, 7, 7).double()  # a CLS token and 2 x 3 patches of 4 x 8 pixels
    weights[0, 0] = torch.eye(7)
    weights[0, 1, 1:, 0], weights[0, 1, 1:, 1:] = 0.5, 0.5 / 6
    weights[1, 0, range(1, 7), [4, 5, 6, 1, 2, 3]] = 1.0  # each patch attends to the same column of the other row
    weights[1, 1, range(1, 7), [3, 3, 1, 6, 6, 4]] = 1.0  # each patch attends to an outer patch of the same row
    found = attention_distances(Attention(weights, (2, 3), 1, weights[0, 0, 0]), (4, 8))
    centers = [(4 * row, 8 * column) for row in range(2) for column in range(3)]
    uniform = np.mean([math.dist(one, other) for one in centers for other in centers])
    torch.testing.assert_close(found, torch.tensor([[0, uniform], [4, (16 + 8 + 16) / 3]]).double())
    assert most_attended(Attention(weights[1:], (2, 3), 1, weights[0, 0, 0]), (0, 0)) in ((1, 0), (0, 2))


def test_receptive_fields_of_convolutions_are_those_that_gradients_show() -> None:
    layers, seen = [nn.Conv2d(1, 1, 3, padding=1, bias=False) for _ in range(5)], []
    for number, layer in enumerate(layers):
        nn.init.ones_(layer.weight)
        image = torch.zeros(1, 1, 64, 64, requires_grad=True)
        states = image
        for before, own in enumerate(layers[: number + 1]):
            states = own(nn.functional.avg_pool2d(states, 2) if before and before % 2 == 0 else states)
        middle = states.shape[-1] // 2
        (gradient,) = torch.autograd.grad(states[0, 0, middle, middle], image)
        inside = gradient[0, 0].nonzero().double()
        seen.append((inside - inside.mean(dim=0)).norm(dim=1).mean().item())
    assert convolution_distances(5, (64, 64)) == pytest.approx(seen)
    # From the second layer on, receptive fields cover the whole image.
    whole = np.mean([math.hypot(y, x) for y in (-1.5, -0.5, 0.5, 1.5) for x in (-1, 0, 1)])
    assert convolution_distances(5, (4, 3))[1:] == [pytest.approx(whole)] * 4


def test_unsupported_models_and_inputs_raise() -> None:
    config = small_config()
    classifier = HfViTForImageClassification(config).eval()
    for record in (record_attention, gradient_rollout):
        expect_error(r"Call model\.eval\(\)", record, HfViTForImageClassification(config).train(), pixels(config))
    with pytest.raises(ValueError, match="HfViTForDepthEstimation does not predict a class"):
        gradient_rollout(HfViTForDepthEstimation(config).eval(), pixels(config))
    for wrong in ([5, 0], [0], [-1, 0]):
        with pytest.raises(ValueError, match="must have a number from 0 to 4 for each of 2 images"):
            gradient_rollout(classifier, pixels(config), wrong)
    # `patch_at` returns the patch that contains the point (x, y), given in pixels.
    assert patch_at((0, 0), (427, 640), (2, 3)) == (0, 0)
    assert patch_at((639.9, 426), (427, 640), (2, 3)) == (1, 2)
    assert patch_at((220, 213), (427, 640), (2, 3)) == (0, 1)
    for point in ((640, 0), (0, 427), (-1, 5)):
        expect_error("outside of the image of 640 x 427 pixels", patch_at, point, (427, 640), (2, 3))


def random_features(*grids: tuple[int, int], size: int = 6) -> list[Tensor]:
    """Return random patch features of images, with a different standard deviation in each dimension."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*grid, size, generator=generator).double() * torch.arange(1, size + 1) + 5 for grid in grids]


def project(rows: np.ndarray, count: int) -> np.ndarray:
    """Project rows on principal components of scikit-learn. The largest entry of each component is positive."""
    pca = PCA(count, svd_solver="full").fit(rows)
    largest = np.take_along_axis(pca.components_, np.abs(pca.components_).argmax(1, keepdims=True), 1)
    return pca.transform(rows) * np.sign(largest[:, 0])


def test_features_are_the_patches_of_the_last_hidden_state_without_padding() -> None:
    config = small_config("registers")
    model = HfViTForDepthEstimation(config).eval()
    images, mask = pixels(config, 2, (3, 4)), torch.ones(2, 3, 4, dtype=torch.bool)
    mask[0, 2:], mask[0, :, 3:] = False, False
    first, second = patch_features(model, images, mask)
    assert (first.shape, second.shape) == ((2, 3, 32), (3, 4, 32))
    hidden_states = model.base_model(images, patch_attention_mask=mask).last_hidden_state
    for row, column in np.ndindex(2, 3):
        torch.testing.assert_close(first[row, column], hidden_states[0, 4 + 4 * row + column])
    torch.testing.assert_close(first, patch_features(model, images[:1, :, :16, :24])[0], rtol=1e-4, atol=1e-5)
    expect_error(r"Call model\.eval\(\)", patch_features, model.train(), images)


def test_similarities_are_cosines_and_colors_are_the_principal_components_of_all_images() -> None:
    (features,) = random_features((3, 4))
    similarity = patch_similarity(features, (1, 2))
    assert similarity.shape == (3, 4)
    for place in np.ndindex(3, 4):
        first, second = features[1, 2], features[place]
        expected = (first * second).sum() / (first.square().sum() * second.square().sum()).sqrt()
        assert float(similarity[place]) == pytest.approx(float(expected))
    expect_error(r"no patch \(0, 4\)", patch_similarity, features, (0, 4))
    features = random_features((3, 4), (5, 2))
    rows = np.concatenate([own.reshape(-1, 6).numpy() for own in features])
    values = project(rows, 3)
    expected = (values - values.min(0)) / (values.max(0) - values.min(0))
    first, second = feature_colors(features)
    np.testing.assert_allclose(first, expected[:12].reshape(3, 4, 3), atol=1e-9)
    np.testing.assert_allclose(second, expected[12:].reshape(5, 2, 3), atol=1e-9)
    assert torch.equal(feature_colors([torch.ones(2, 3, 6)])[0], torch.zeros(2, 3, 3).double())
    expect_error("3 patches with 6 features", feature_colors, random_features((1, 3)))
    # Principal components equal those of scikit-learn, even if there are fewer rows than columns.
    for shape in ((20, 6), (4, 6)):
        rows = random_features((shape[0], 1), size=shape[1])[0][:, 0]
        components = principal_components(rows, 3)
        expected = PCA(3, svd_solver="full").fit(rows.numpy())
        np.testing.assert_allclose(components.abs(), np.abs(expected.components_), atol=1e-9)
        assert bool((components.gather(1, components.abs().argmax(1, keepdim=True)) > 0).all())
