"""Test the lists of models, and that methods named as in timm and DINOv2 return the same values as in timm."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

import hf_vit
from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTModel
from hf_vit.tasks import TASKS

from ..helpers.models import MODEL_CLASSES, pixels, small_config
from ..helpers.references import draw_weights
from ..helpers.timm_models import SMALL


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_base_patch16_224", {}),
    "distilled": ("deit_base_distilled_patch16_224", {}),
    "attention": ("vit_base_patch16_siglip_224", {}),
    "mean": ("vit_base_patch16_224", {"global_pool": "avg", "fc_norm": True}),
}


@pytest.fixture(params=ARCHITECTURES, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Any]:
    """Return a small timm model, and our model that is converted from it."""
    architecture, options = ARCHITECTURES[request.param]
    theirs = timm.create_model(architecture, **{**SMALL, "depth": 3, **options}).eval()
    draw_weights(theirs)
    folder = tmp_path_factory.mktemp("timm")
    save_for_hf(theirs, folder, safe_serialization=True)
    return theirs, HfViTForImageClassification.from_pretrained(folder).eval()


def images() -> Tensor:
    return torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def assert_alike(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_features_head_and_their_names_are_those_of_timm(pair: tuple[nn.Module, Any]) -> None:
    theirs, ours = pair
    features = ours.forward_features(images())
    assert_alike(features, theirs.forward_features(images()))
    assert_alike(ours.forward_head(features), theirs.forward_head(features))
    assert_alike(ours.forward_head(features), ours(images()).logits)
    assert_alike(ours.model.forward_head(features), ours.forward_head(features, pre_logits=True))
    if ours.distillation_classifier is None:  # otherwise, timm returns the mean of the CLS and distillation tokens
        assert_alike(ours.forward_head(features, pre_logits=True), theirs.forward_head(features, pre_logits=True))
    for mine, its in zip(ours.feature_info, theirs.feature_info, strict=True):
        assert (mine["num_chs"], mine["reduction"]) == (its["num_chs"], its["reduction"])
        assert type(ours.get_submodule(mine["module"])).__name__ == "HfViTLayer"
    info = ours.model.feature_info[1]
    assert ours.model.get_submodule(info["module"]) is ours.get_submodule(ours.feature_info[1]["module"])


@torch.no_grad()
def test_intermediate_layers_are_those_of_timm(pair: tuple[nn.Module, Any]) -> None:
    theirs, ours = pair
    cases = (1, True, True), (2, False, False), (3, True, False), ([0, 2], False, True), ((1,), True, True)
    for case in cases:
        options = dict(zip(("n", "norm", "reshape"), case, strict=True))
        found, expected = (model.get_intermediate_layers(images(), **options) for model in (ours, theirs))
        assert_alike(found, expected)
        options["return_prefix_tokens"] = True
        found, expected = (model.get_intermediate_layers(images(), **options) for model in (ours, theirs))
        assert_alike(found if ours.config.num_prefix_tokens else [patches for patches, _ in found], expected)


@torch.no_grad()
def test_a_new_classifier_takes_the_place_of_the_old_one(pair: tuple[nn.Module, Any], tmp_path: Path) -> None:
    theirs, ours = copy.deepcopy(pair)
    ours.reset_classifier(0)
    theirs.reset_classifier(0)
    assert isinstance(ours.get_classifier(), nn.Identity)
    assert_alike(ours(images()).logits, theirs(images()))
    with pytest.raises(ValueError, match="no classifier to train"):
        ours(images(), labels=torch.tensor([0, 1]))
    ours.reset_classifier(7)
    assert (ours.config.num_labels, len(ours.config.id2label), len(ours.config.label2id)) == (7, 7, 7)
    assert ours.get_classifier().weight.shape == (7, 32)
    assert "classifier.weight" in ours.untrained_weights
    assert 0.1 < ours(images()).logits.std() < 10
    ours.save_pretrained(tmp_path / "saved")
    opened = HfViTForImageClassification.from_pretrained(tmp_path / "saved")
    assert_alike(opened(images()).logits, ours(images()).logits)


def test_invalid_timm_calls_raise() -> None:
    config = small_config()
    for model_class in (own for own in MODEL_CLASSES if own not in (HfViTModel, HfViTForImageClassification)):
        model = model_class(config)
        own = f"{model_class.__name__} has no classifier.* HfViTForImageClass"
        for call, message in (
            (model.get_classifier, own),
            (partial(model.reset_classifier, 3), own),
            (partial(model.forward_head, torch.zeros(1, 17, 32)), "has no classifier"),
            (partial(HfViTModel(config).reset_classifier, 3), "has no classifier"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    classifier = HfViTForImageClassification(config)
    with pytest.raises(ValueError, match="num_labels=-1 must be at least 0"):
        classifier.reset_classifier(-1)
    for n in (0, -1, 4, [], [3], [-4]):
        with pytest.raises(ValueError, match="must be a number of blocks, 1 to 3"):
            classifier.get_intermediate_layers(pixels(config), n=n)


@torch.no_grad()
def test_every_model_returns_features() -> None:
    config = small_config("registers")
    batch = pixels(config)
    for model_class in MODEL_CLASSES:
        model = model_class(config).eval()
        assert torch.equal(model.forward_features(batch), model.base_model(batch).last_hidden_state)
        ((maps, prefix),) = model.get_intermediate_layers(batch, reshape=True, return_prefix_tokens=True)
        assert (maps.shape, prefix.shape) == ((2, 32, 4, 4), (2, 4, 32))


def test_lists_name_what_can_be_used() -> None:
    assert sorted(hf_vit.list_tasks()) == sorted(TASKS)
    assert [HfViTConfig.from_preset(name).model_type for name in hf_vit.list_presets()] == ["hf_vit"] * 7
    recipes = Path(hf_vit.__file__).parents[1] / "scripts" / "recipes"
    assert sorted(hf_vit.list_recipes()) == sorted(file.stem for file in recipes.glob("*.yaml"))
    assert all(hasattr(hf_vit, name) for name in hf_vit.__all__)
