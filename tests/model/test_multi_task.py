"""Test models with several heads on one backbone: outputs, gradients, saving, and opening by single-task classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForDepthEstimation, pipeline

import hf_vit
from hf_vit import HfViTConfig, HfViTForMultiTask, HfViTImageProcessor, HfViTModel
from hf_vit.model.task_multi_task import HEADS

from ..helpers.fresh import run_without_package
from ..helpers.images import noise
from ..helpers.models import pixels, save_model, small_config, with_boxes, with_texts
from ..helpers.references import draw_weights


KINDS = {
    "species": ("image-classification", {"num_labels": 3}),
    "rooms": ("depth-estimation", {}),
    "surfaces": ("semantic-segmentation", {"num_labels": 4}),
    "cells": ("universal-segmentation", {"num_labels": 2}),
    "objects": ("object-detection", {"num_labels": 2}),
    "tools": (
        "object-detection",
        {"detection_config": {"hidden_size": 16, "num_attention_heads": 2, "num_layers": 1}},
    ),
    "pose": ("keypoint-detection", {"num_labels": 6}),
}
OPTIONS: dict[str, Any] = {"rooms": {"image_mean": 0.3}, "cells": {"size": {"height": 48, "width": 48}}}
OPEN_HEADS = """
from transformers import AutoImageProcessor, AutoModelForObjectDetection, AutoModelForPreTraining, pipeline
folder, image = sys.argv[1:]
remote = {"trust_remote_code": True}
for task, head in (
    ("depth-estimation", "HfViTForDepthEstimation"),
    ("image-classification", "HfViTForImageClassification"),
    ("image-segmentation", "HfViTForSemanticSegmentation"),
    ("object-detection", "HfViTForObjectDetection"),
    ("keypoint-detection", "HfViTForKeypointDetection"),
):
    pipe = pipeline(task, model=folder, **remote)
    assert type(pipe.model).__name__ == head and type(pipe.model).__module__.startswith("transformers_modules")
    assert (pipe.image_processor.image_mean[0] == 0.3) == (task == "depth-estimation")
    pipe(image)
tools = AutoModelForObjectDetection.from_pretrained(folder, head="tools", **remote)
assert tools.options.decoder == "deformable" and not tools.untrained_weights
assert AutoImageProcessor.from_pretrained(folder, head="cells", **remote).size["height"] == 48
assert type(AutoModelForPreTraining.from_pretrained(folder, **remote)).__name__ == "HfViTForMultiTask"
answers = pipeline("multi-task", model=folder, **remote)(image)
assert set(answers) == {"species", "rooms", "surfaces", "cells", "objects", "tools", "pose"}, answers.keys()
"""


def outputs_of(answer: Any) -> dict[str, Tensor]:
    """Return the tensors in an output of a model."""
    return {name: value for name, value in answer.items() if isinstance(value, Tensor)}


def assert_equal(answer: Any, other: Any) -> None:
    """Assert that two outputs have the same tensors with the same values."""
    own, others = outputs_of(answer), outputs_of(other)
    assert own
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name], others[name]) for name in own)


def drawn(model: Any) -> Any:
    """Return the model with random weights."""
    draw_weights(model)
    return model.eval()


def make_single(task: str, options: dict[str, Any], backbone: HfViTModel) -> Any:
    """Return a calibrated single-task model with random weights in its head and the weights of `backbone`."""
    model = drawn(HEADS[task][0](small_config(**options)))
    model.model.load_state_dict(backbone.state_dict(), strict=False)
    model.config.calibration_config = {"model_class": type(model).__name__, "temperature": 2.0}
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the single-task models in `KINDS`, and their combination in the folder `all`."""
    root = tmp_path_factory.mktemp("multi_task")
    backbone = drawn(HfViTModel(small_config()))
    backbone.save_pretrained(root / "backbone")
    for name, (task, options) in KINDS.items():
        save_model(make_single(task, options, backbone), root / name, **OPTIONS.get(name, {}))
    model = HfViTForMultiTask.from_heads(root / "backbone", **{name: root / name for name in KINDS})
    model.save_pretrained(root / "all")
    return root


@pytest.fixture(scope="module")
def saved(folder: Path) -> HfViTForMultiTask:
    """Return the model with all heads, loaded from its checkpoint."""
    return HfViTForMultiTask.from_pretrained(folder / "all").eval()


def test_answers_equal_those_of_the_single_models(folder: Path, saved: HfViTForMultiTask) -> None:
    images = pixels(saved.config, grid=(4, 5))
    mask = torch.ones(2, 4, 5, dtype=torch.bool)
    mask[1, :, 3:] = False
    for given in ({}, {"patch_attention_mask": mask}):
        answers = saved(images, **given).answers
        assert answers.keys() == KINDS.keys()
        for name, (task, _) in KINDS.items():
            single = HEADS[task][0].from_pretrained(folder / name).eval()
            assert_equal(answers[name], single(images, **given))
            assert_equal(saved.heads[name](images, **given), single(images, **given))


def test_single_task_classes_open_the_head_of_their_task(folder: Path, saved: HfViTForMultiTask) -> None:
    images, answers = pixels(saved.config), saved(pixels(saved.config)).answers
    for name, (task, _) in KINDS.items():
        opened, info = HEADS[task][0].from_pretrained(folder / "all", head=name, output_loading_info=True)
        assert not info["missing_keys"]
        assert not opened.untrained_weights
        assert opened.config.multi_task_config is None
        assert_equal(opened.eval()(images), answers[name])
    relabeled = hf_vit.HfViTForImageClassification.from_pretrained(folder / "all", num_labels=9, drop_path_rate=0.1)
    assert relabeled.untrained_weights
    assert (relabeled.config.num_labels, relabeled.config.drop_path_rate) == (9, 0.1)
    automatic = AutoModelForDepthEstimation.from_pretrained(folder / "all", depth_config={"max_depth": 4.0})
    assert (automatic.options.max_depth, automatic.options.head) == (4, "dpt")
    features = HfViTModel.from_pretrained(folder / "all").eval()(images).last_hidden_state
    assert torch.equal(features, HfViTModel.from_pretrained(folder / "backbone").eval()(images).last_hidden_state)


def test_default_heads_and_unknown_names(folder: Path, tmp_path: Path) -> None:
    model = HfViTForMultiTask.from_pretrained(folder / "all")
    assert hf_vit.HfViTForObjectDetection.from_pretrained(folder / "all").options.decoder == "queries"
    model.config.multi_task_config.heads["tools"]["default"] = True
    model.save_pretrained(tmp_path)
    assert hf_vit.HfViTForObjectDetection.from_pretrained(tmp_path).options.decoder == "deformable"
    with pytest.raises(ValueError, match=r"no head 'rooms' for object-detection.*tools \(object-detection\)"):
        hf_vit.HfViTForObjectDetection.from_pretrained(tmp_path, head="rooms")
    with pytest.raises(ValueError, match="HfViTModel cannot open a head of a multi-task model"):
        HfViTModel.from_pretrained(tmp_path, head="rooms")
    with pytest.raises(ValueError, match=r"There is no head \'room\'\. Heads of the model: cells, objects"):
        model(pixels(model.config), heads=["room"])
    with pytest.raises(ValueError, match="head='room' is not a head of"):
        AutoImageProcessor.from_pretrained(tmp_path, head="room")


def test_equal_images_share_the_backbone_and_others_do_not(saved: HfViTForMultiTask) -> None:
    runs = []
    handle = saved.model.encoder.layers[0].register_forward_hook(lambda *_: runs.append(1))
    images, others = pixels(saved.config), pixels(saved.config, grid=(2, 3))
    given = {"rooms": images, "surfaces": images, "pose": others}
    answers = saved(given).answers
    handle.remove()
    assert len(runs) == 2
    assert list(answers) == ["rooms", "surfaces", "pose"]
    for name, own in given.items():
        assert_equal(answers[name], saved(own, heads=[name]).answers[name])


def test_blocks_with_queries_run_once_more_for_each_such_head(saved: HfViTForMultiTask) -> None:
    runs: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_, number=number: runs.append(number))
        for number, layer in enumerate(saved.model.encoder.layers)
    ]
    saved(pixels(saved.config), heads=["rooms", "cells", "objects", "tools"])
    for handle in handles:
        handle.remove()
    assert sorted(runs) == [0, 1, 1, 1, 2, 2, 2]  # both heads with queries use the last two of three blocks


def test_losses_and_gradients_are_sums_over_heads(saved: HfViTForMultiTask) -> None:
    model, images = saved.double(), pixels(saved.config).double()
    generator = torch.Generator().manual_seed(0)
    targets: dict[str, Any] = {
        "species": {"labels": torch.tensor([0, 2])},
        "rooms": {"labels": torch.rand(2, 32, 32, generator=generator, dtype=torch.float64) + 0.5},
        "tools": {"labels": with_boxes(lambda index: index)(saved.config, 2)["labels"]},
    }
    weight = model.model.encoder.layers[0].attention.qkv.weight
    whole = torch.autograd.grad(model(images, targets=targets).loss, weight)[0]
    parts = []
    for name, own in targets.items():
        loss = model.heads[name](images, **own).loss
        assert torch.allclose(loss, model(images, targets={name: own}, heads=[name]).loss, rtol=1e-12)
        parts.append(torch.autograd.grad(loss, weight)[0])
    torch.testing.assert_close(whole, sum(parts), rtol=1e-9, atol=1e-12)
    assert model(images).loss is None
    model.float()


def test_different_backbones_raise_an_error_that_names_the_tensor(folder: Path, tmp_path: Path) -> None:
    other = hf_vit.HfViTForDepthEstimation.from_pretrained(folder / "rooms")
    with torch.no_grad():
        other.model.encoder.layers[1].mlp.fc1.bias[0] += 1e-3
    with pytest.raises(
        ValueError, match=r"head 'other' differs.*: encoder\.layers\.1\.mlp\.fc1\.bias has other values"
    ):
        HfViTForMultiTask.from_heads(folder / "backbone", species=folder / "species", other=other)
    with pytest.raises(ValueError, match="'other' has num_hidden_layers=2, but the shared backbone has 3"):
        HfViTForMultiTask.from_heads(
            folder / "backbone", other=drawn(hf_vit.HfViTForDepthEstimation(small_config(num_hidden_layers=2)))
        )
    with pytest.raises(ValueError, match=r"HfViTModel\. A head must be one of"):
        HfViTForMultiTask.from_heads(rooms=folder / "backbone")
    untrained = hf_vit.HfViTForDepthEstimation.from_pretrained(folder / "backbone")
    with pytest.raises(ValueError, match="has no weights for depth_head"):
        HfViTForMultiTask.from_heads(rooms=untrained)
    with pytest.raises(ValueError, match="needs at least one head"):
        HfViTForMultiTask.from_heads(folder / "backbone")
    with pytest.raises(ValueError, match=r"has no heads\. Create the model with HfViTForMultiTask\.from_heads"):
        HfViTForMultiTask.from_pretrained(folder / "rooms")
    config = AutoConfig.from_pretrained(folder / "all")
    with pytest.raises(ValueError, match="norm_after_pooling=True"):
        HfViTForMultiTask(small_config("eva", multi_task_config=config.multi_task_config))


def test_contrastive_heads_compare_images_with_texts(folder: Path) -> None:
    backbone = HfViTModel.from_pretrained(folder / "backbone")
    contrastive = make_single("zero-shot-image-classification", {}, backbone)
    model = HfViTForMultiTask.from_heads(backbone, text=contrastive, rooms=folder / "rooms")
    inputs = with_texts(model.config, 2)
    images, texts = inputs.pop("pixel_values"), {**inputs}
    answers = model(images, targets={"text": texts}).answers
    assert_equal(answers["text"], contrastive(pixel_values=images, **texts))
    without_texts = model(images).answers["text"].pooler_output
    assert torch.equal(without_texts, contrastive.get_image_features(images).pooler_output)


def test_a_new_image_size_reaches_the_heads(folder: Path) -> None:
    model = HfViTForMultiTask.from_pretrained(folder / "all", image_size=48).eval()
    assert model.heads["rooms"].config.image_size == 48
    single = hf_vit.HfViTForDepthEstimation.from_pretrained(folder / "rooms", image_size=48).eval()
    assert_equal(model(pixels(model.config)).answers["rooms"], single(pixels(model.config)))


def test_pipeline_answers_as_the_pipelines_of_the_heads(folder: Path) -> None:
    images = [Image.fromarray(noise(40, 50, 3)), Image.fromarray(noise(30, 30, 3))]
    together = pipeline("multi-task", model=str(folder / "all"))
    results = together(images, batch_size=2)
    for task, name in (
        ("depth-estimation", "rooms"),
        ("image-classification", "species"),
        ("object-detection", "objects"),
    ):
        alone = pipeline(task, model=str(folder / name))
        for result, own in zip(results, alone(images), strict=True):
            if name == "rooms":
                torch.testing.assert_close(
                    result[name]["predicted_depth"], own["predicted_depth"], rtol=1e-3, atol=1e-3
                )
                continue
            assert [entry["label"] for entry in result[name]] == [entry["label"] for entry in own]
            scores = [entry["score"] for entry in own]
            assert [entry["score"] for entry in result[name]] == pytest.approx(scores, rel=1e-4)
    assert together(images[0], heads="rooms").keys() == {"rooms"}
    with pytest.raises(ValueError, match=r"'room'\. Choose among"):
        together(images[0], heads=["room"])
    with pytest.raises(ValueError, match="optimize=True needs a single task"):
        pipeline("multi-task", model=str(folder / "all"), optimize=True)
    with pytest.raises(ValueError, match="has no trained head for 'zero-shot-image-classification'"):
        HfViTConfig.get_config_dict(folder / "all", _from_pipeline="zero-shot-image-classification")


def test_segmentation_pipeline_opens_universal_heads(folder: Path, tmp_path: Path) -> None:
    HfViTForMultiTask.from_heads(rooms=folder / "rooms", cells=folder / "cells").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["HfViTForMultiTask", "HfViTForUniversalSegmentation"]
    assert config["auto_map"]["AutoModelForImageSegmentation"].endswith("HfViTForUniversalSegmentation")
    assert "universal_segmentation_config" not in config
    pipe = pipeline("image-segmentation", model=str(tmp_path))
    assert type(pipe.model) is hf_vit.HfViTForUniversalSegmentation
    assert pipe.image_processor.size["height"] == 48


def test_heads_open_without_the_package(folder: Path, tmp_path: Path) -> None:
    Image.fromarray(noise(40, 50, 3)).save(tmp_path / "image.png")
    run_without_package(OPEN_HEADS, tmp_path / "work", str(folder / "all"), str(tmp_path / "image.png"))


def test_processors_without_a_saved_model_are_left_out(folder: Path, tmp_path: Path) -> None:
    model = HfViTForMultiTask.from_heads(rooms=make_single("depth-estimation", {}, HfViTModel(small_config())))
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    HfViTImageProcessor().save_pretrained(tmp_path)
    assert HfViTImageProcessor.from_pretrained(tmp_path, head="rooms").size["height"] == 224
    settings = json.loads((folder / "all" / "preprocessor_config.json").read_text())
    assert settings["image_mean"] == 0.5 or settings["image_mean"][0] == 0.5
