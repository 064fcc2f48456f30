"""Test training of saved models on the same classes in another order, and on other classes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_vit import HfViTForImageClassification, HfViTForSemanticSegmentation
from hf_vit.model.pretrained import HfViTPreTrainedModel
from hf_vit.tasks.common.arguments import TaskArguments
from hf_vit.tasks.common.models import has_same_names, load_model

from ..helpers.models import TRAINING_CASES, pixels, save_model, small_config
from ..helpers.references import draw_weights


CASES: dict[str, tuple[type[HfViTPreTrainedModel], dict[str, Any]]] = {
    name: (case.model_class, case.overrides)
    for name, case in TRAINING_CASES.items()
    if name.startswith(("several", "distillation", "semantic", "queries", "deformable", "keypoints", "universal"))
}
for head in ("linear", "conv", "mask"):
    CASES[head] = HfViTForSemanticSegmentation, {"segmentation_config": {"head": head}}
# The hidden layers of the class head have as many rows as there are classes.
CASES["as_many_classes_as_channels"] = CASES["queries"][0], {**CASES["queries"][1], "num_labels": 32}


def names_in_order(numbers: list[int]) -> dict[str, Any]:
    names = [f"class {number}" for number in numbers]
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def save_trained(model_class: type[nn.Module], folder: Path, **overrides: Any) -> HfViTPreTrainedModel:
    """Save a model with random weights, whose classes are "class 0", "class 1", …, and return the model."""
    count = overrides.pop("num_labels", 5)
    config = small_config(**overrides, **names_in_order([*range(count)]), num_labels=count)
    model = model_class(config).eval()
    draw_weights(model)
    save_model(model, folder)
    return model


def tune(model: HfViTPreTrainedModel, folder: Path, names: list[str], **options: Any) -> HfViTPreTrainedModel:
    arguments = TaskArguments(dataset_name="data", model_name_or_path=str(folder), **options)
    return load_model(type(model), arguments, names)[0].eval()


@pytest.mark.parametrize("name", CASES)
def test_the_head_follows_the_order_of_the_classes(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_class, overrides = CASES[name]
    model = save_trained(model_class, tmp_path, **overrides)
    count = model.config.num_labels
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    assert order != sorted(order)
    wanted = names_in_order(order)
    tuned = tune(model, tmp_path, [*wanted["label2id"]])
    assert {name: vars(tuned.config)[name] for name in wanted} == wanted
    with torch.no_grad():
        before, after = (one(pixels(model.config)) for one in (model, tuned))
    is_map = "Semantic" in model_class.__name__ or "Keypoint" in model_class.__name__
    seen = 0
    for key, old in before.items():
        if not isinstance(old, torch.Tensor):
            continue
        dim = 1 if is_map else old.ndim - 1
        if key in ("heatmaps", "probabilities") or ("logits" in key and key != "masks_queries_logits"):
            rows = [*order, *range(count, old.shape[dim])]  # the class for no object stays last
            old, seen = old.index_select(dim, torch.tensor(rows)), seen + 1
        torch.testing.assert_close(after[key], old, msg=key)
    assert seen > 0
    (message,) = (record.getMessage() for record in caplog.records if record.name == "hf_vit.tasks.common.models")
    assert message == (
        "The saved model has the classes of the data in another order. Its head is reordered by class name."
    )


def test_loss_weights_of_classes_follow_the_classes(tmp_path: Path) -> None:
    options = {"head": "linear", "class_weights": [0.0, 1.0, 2.0, 3.0, 4.0]}
    model = save_trained(HfViTForSemanticSegmentation, tmp_path, segmentation_config=options)
    names = [*model.config.label2id]
    assert tune(model, tmp_path, names).options.class_weights == [0, 1, 2, 3, 4]
    assert tune(model, tmp_path, names[::-1]).options.class_weights == [4, 3, 2, 1, 0]
    # The classes of other data have no weights yet.
    assert tune(model, tmp_path, ["sky", *names[1:]]).options.class_weights is None
    given = {"config_overrides": {"segmentation_config": {"class_weights": [5.0, 6.0, 7.0, 8.0, 9.0]}}}
    assert tune(model, tmp_path, names[::-1], **given).options.class_weights == [5, 6, 7, 8, 9]


def test_messages_state_what_happens_to_the_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_trained(HfViTForImageClassification, tmp_path / "classifier")
    model.base_model.save_pretrained(tmp_path / "encoder")
    save_model(model.base_model, tmp_path / "encoder")

    def message(folder: str, names: list[str]) -> str:
        caplog.clear()
        tuned = tune(model, tmp_path / folder, names)
        assert tuned.config.num_labels == len(names)
        (found,) = (record.getMessage() for record in caplog.records if record.name == "hf_vit.tasks.common.models")
        assert not torch.equal(tuned.classifier.weight[0], model.classifier.weight[0])
        return found

    assert message("encoder", ["cat", "dog"]) == "The saved model has no head. A new head is added for cat, dog."
    assert message("classifier", ["class 0", "class 1", "dog"]) == (
        "The saved model has other classes (class 0, class 1, class 2, class 3, class 4), 2 of which are among the 3 "
        "classes of the data (class 0, class 1, dog). The weights of all classes are initialized anew, because the "
        "scores of trained and new classes would not be comparable."
    )
    # Duplicate names cannot be matched.
    assert "1 of which are among" in message("classifier", ["class 0"] * 5)


def test_a_replaced_head_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_trained(HfViTForSemanticSegmentation, tmp_path, segmentation_config={"head": "conv"})
    given = {"config_overrides": {"segmentation_config": {"head": "linear"}}}
    tuned = tune(model, tmp_path, [*model.config.label2id][::-1], **given)
    assert [*tuned.config.label2id] == [*model.config.label2id][::-1]
    (message,) = (record.getMessage() for record in caplog.records if record.name == "hf_vit.tasks.common.models")
    assert "does not match" in message
    assert "is replaced by a new head" in message


def test_duplicate_names_are_the_same_only_in_the_same_order() -> None:
    assert has_same_names(["crane", "dog", "crane"], ["crane", "dog", "crane"])
    assert has_same_names(["crane", "dog"], ["dog", "crane"])
    assert not has_same_names(["crane", "dog", "crane"], ["dog", "crane", "crane"])
    assert not has_same_names(["crane", "dog"], ["dog", "crane", "crane"])


def test_a_saved_configuration_may_list_classes_in_any_order(tmp_path: Path) -> None:
    model = save_trained(HfViTForImageClassification, tmp_path)
    file = tmp_path / "config.json"
    first, last = '"0": "class 0"', '"4": "class 4"'
    text = file.read_text().replace(first, "first").replace(last, first).replace("first", last)
    file.write_text(text)
    assert text.index(last) < text.index(first)
    names = [*model.config.label2id]
    assert torch.equal(tune(model, tmp_path, names).classifier.weight, model.classifier.weight)
