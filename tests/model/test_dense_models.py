"""Invariants of the heads of dense models, in addition to those of all classes in `test_modeling.py`."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vit import (
    HfViTForDepthEstimation,
    HfViTForImageClassification,
    HfViTForKeypointDetection,
    HfViTForObjectDetection,
    HfViTForSemanticSegmentation,
    HfViTForUniversalSegmentation,
    HfViTImageProcessor,
    HfViTModel,
)
from hf_vit.evaluation.detection import InstanceMetric
from hf_vit.evaluation.segmentation import PanopticMetric
from hf_vit.model.layers import HfViTBatchNorm2d, HfViTHeadConv2d, HfViTHeadConvTranspose2d
from hf_vit.model.task_depth_estimation import HfViTDepthPredictor
from hf_vit.model.task_keypoint_detection import HfViTKeypointPredictor

from ..helpers.models import SMALL_DEPTH, pixels, small_config
from ..helpers.references import assert_close, draw_weights
from .test_detection_models import DECODERS
from .test_modeling import assert_same, build, training_gradients, values


SEMANTIC: dict[str, dict[str, Any]] = {
    "simple": {"head": "simple"},
    "linear": {"head": "linear", "out_indices": (2, 3)},
    "layer": {"head": "linear", "norm": "layer"},
    "conv": {"head": "conv", "hidden_size": 8},
    "mask": {"head": "mask", "num_layers": 1},
    "auxiliary": {"head": "simple", "use_auxiliary_head": True},
}
DEPTH: dict[str, dict[str, Any]] = {
    "linear": {"head": "linear", "out_indices": (0, 1, 3), "num_bins": 16},
    "conv": {"head": "conv", "max_depth": None},
    "dpt": SMALL_DEPTH,
    "dpt_add": {**SMALL_DEPTH, "readout_type": "add"},
}
KEYPOINTS: dict[str, dict[str, Any]] = {
    "classic": {"head": "classic", "hidden_size": 8},
    "instance": {"head": "classic", "hidden_size": 8, "norm": "instance"},
    "simple": {"head": "simple", "scale_factor": 2},
}
RELATIVE = {"depth_estimation_type": "relative"}
# Head name -> model class and the options that select the head.
HEADS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    **{name: (HfViTForSemanticSegmentation, {"segmentation_config": options}) for name, options in SEMANTIC.items()},
    **{f"{name}_metric": (HfViTForDepthEstimation, {"depth_config": options}) for name, options in DEPTH.items()},
    **{
        f"{name}_relative": (HfViTForDepthEstimation, {"depth_config": {**options, **RELATIVE}})
        for name, options in DEPTH.items()
    },
    **{f"{name}_keypoints": (HfViTForKeypointDetection, {"keypoint_config": own}) for name, own in KEYPOINTS.items()},
    "universal": (HfViTForUniversalSegmentation, {}),
}
all_heads = pytest.mark.parametrize("head", HEADS)
OBJECTS = {name: (HfViTForObjectDetection, {"detection_config": options}) for name, options in DECODERS.items()}


def build_head(head: str, **overrides: Any) -> Any:
    """Return a model in evaluation mode with random weights and statistics."""
    model_class, options = {**HEADS, **OBJECTS}[head]
    model = build(model_class, **options, **overrides)
    for module in model.modules():
        if isinstance(module, HfViTBatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


def targets(model: Any, images: Tensor, seed: int = 0) -> dict[str, Any]:
    """Return training targets of `model` for `images`. Some targets are ignored."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(images), *images.shape[-2:])
    if isinstance(model, HfViTForDepthEstimation):
        depth = 10 * torch.rand(size, generator=generator, dtype=images.dtype)
        return {"labels": depth.where(depth > 2, 0)}
    if isinstance(model, HfViTForKeypointDetection):
        places = torch.rand(len(images), 5, 2, generator=generator) * torch.tensor(images.shape[:1:-1])
        return {"labels": torch.cat((places, torch.tensor([2, 1, 0, 2, 1])[:, None].expand(len(images), 5, 1)), dim=2)}
    if isinstance(model, HfViTForSemanticSegmentation):
        labels = torch.randint(-1, 5, size, generator=generator)
        return {"labels": labels.where(labels >= 0, 255)}
    counts = [1 + index % 3 for index in range(len(images))]
    return {
        "mask_labels": [(torch.rand(count, *size[1:], generator=generator) < 0.4).float() for count in counts],
        "class_labels": [torch.randint(5, (count,), generator=generator) for count in counts],
    }


def loss_and_gradients(model: Any, batches: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the mean loss of batches, and its gradients."""
    model.zero_grad()
    loss = torch.stack([model(**batch).loss for batch in batches]).mean()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("head", [*HEADS, *OBJECTS])
def test_saved_model_is_the_same(head: str, tmp_path: Path) -> None:
    model = build_head(head)
    model.save_pretrained(tmp_path)
    reloaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(reloaded(pixels(model.config)), model(pixels(model.config)))


@pytest.mark.parametrize("head", ["linear", "classic_keypoints"])
def test_a_saved_model_that_names_no_norm_has_batch_norm(head: str, tmp_path: Path) -> None:
    model = build_head(head)
    assert any(isinstance(module, HfViTBatchNorm2d) for module in model.modules())
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config[next(iter(HEADS[head][1]))].pop("norm", None)
    file.write_text(json.dumps(config))
    reopened = type(model).from_pretrained(tmp_path)
    assert reopened.options.norm == "batch"
    assert_same(reopened(pixels(model.config)), model(pixels(model.config)))


@pytest.mark.parametrize(
    "head", ["simple", "linear", "conv", "mask", "linear_metric", "dpt_metric", "classic_keypoints"]
)
def test_another_head_starts_fresh_and_is_reported(head: str, tmp_path: Path) -> None:
    build_head(head).save_pretrained(tmp_path)
    model_class, saved = HEADS[head]
    ((field, own),) = saved.items()
    others = {o[field]["head"]: o for kind, o in HEADS.values() if kind is model_class}
    for options in (options for name, options in others.items() if name != own["head"]):
        model, info = model_class.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert info["missing_keys"] == {name for name in model.state_dict() if not name.startswith("model.")}
        assert not info["mismatched_keys"]


@all_heads
def test_padding_changes_no_loss_and_no_gradient(head: str) -> None:
    model = build_head(head).double()
    # Batch norm depends on the whole batch, and points are random.
    model.train(head not in ("linear", "classic_keypoints", "universal"))
    grids = [(2, 5), (4, 3), (4, 5)]
    images = [pixels(model.config, batch=1, grid=grid).double() for grid in grids]
    alone = [{"pixel_values": image, **targets(model, image, seed)} for seed, image in enumerate(images)]
    batch, mask = torch.zeros(3, 3, 32, 40, dtype=torch.float64), torch.zeros(3, 4, 5, dtype=torch.bool)
    padded: dict[str, Any] = {"mask_labels": [], "class_labels": []} if head == "universal" else {}
    if head.endswith("keypoints"):
        padded["labels"] = torch.cat([example["labels"] for example in alone])
    elif "labels" in alone[0]:
        padded["labels"] = alone[0]["labels"].new_full((3, 32, 40), 255 if head in SEMANTIC else 0)
    for index, (example, (rows, columns)) in enumerate(zip(alone, grids, strict=True)):
        batch[index, :, : 8 * rows, : 8 * columns] = example["pixel_values"][0]
        mask[index, :rows, :columns] = True
        if head == "universal":
            padding = (0, 40 - 8 * columns, 0, 32 - 8 * rows)
            padded["mask_labels"].append(nn.functional.pad(example["mask_labels"][0], padding))
            padded["class_labels"].append(example["class_labels"][0])
        elif not head.endswith("keypoints"):
            padded["labels"][index, : 8 * rows, : 8 * columns] = example["labels"][0]
    expected = loss_and_gradients(model, alone)
    actual = loss_and_gradients(model, [{"pixel_values": batch, "patch_attention_mask": mask, **padded}])
    for a, e, name in zip(actual, expected, ("loss", "gradients"), strict=True):
        assert_close(a, e, 1e-9, name)


@pytest.mark.parametrize("head", ["mask", "universal", "dpt_metric", *OBJECTS])
def test_sdpa_equals_eager_forward_and_backward(head: str) -> None:
    eager = build_head(head, attn_implementation="eager").double()
    sdpa = build_head(head, attn_implementation="sdpa").double()
    images = pixels(eager.config).double()
    assert_same(sdpa(images), eager(images), 1e-11)
    expected = training_gradients(eager, images)
    for name, gradient in training_gradients(sdpa, images).items():
        assert_close(gradient, expected[name], 1e-9, name) if expected[name].abs().max() > 1e-12 else None


@pytest.mark.thinned(2)
@all_heads
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(head: str, dtype: torch.dtype) -> None:
    model = build_head(head)
    # Disable masked attention, because a single flipped mask pixel would change all later blocks.
    model.anneal_masks(1.0) if head == "universal" else None
    images = pixels(model.config, grid=(3, 5))
    labels = targets(model, images)
    expected = model(images, **labels)
    with torch.autocast("cpu", dtype):
        autocast = model(images, **labels)
    half = model.to(dtype)(images, **labels)
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    mask[0, 2:] = False
    assert all(value.isfinite().all() for value in values(model(images, patch_attention_mask=mask)))
    for actual in (autocast, half):
        for a, e in zip(values(actual), values(expected), strict=True):
            assert_close(a.float(), e, 0.2, "output")
        assert actual.loss.dtype == torch.float32
    assert {value.dtype for value in values(half)[1:]} == {dtype}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("head", ["conv", "universal", "annealed", "dpt_metric", "instance_keypoints", *OBJECTS])
def test_compiles_whole_and_once_per_size(head: str, backend: str) -> None:
    model = build_head(head.replace("annealed", "universal"))
    if head == "annealed":
        model.anneal_masks(1.0)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    sizes = [pixels(model.config, grid=grid) for grid in ((4, 4), (3, 5))]
    with torch.no_grad():
        expected = [model(images, output_hidden_states=True) for images in sizes]
        for images in sizes:
            compiled(images, output_hidden_states=True)
        with torch.compiler.set_stance("fail_on_recompile"):
            for images, outputs in zip(sizes, expected, strict=True):
                assert_same(compiled(images, output_hidden_states=True), outputs, 2e-5)


@pytest.mark.parametrize("model_class", dict(HEADS.values()), ids=lambda c: c.__name__)
def test_flash_attention_gets_what_it_takes(model_class: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        masks.append(None if mask is None else tuple(mask.shape))
        allowed = None if mask is None else mask[:, None, None, :].bool()
        attended = nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=kwargs["scaling"])
        return attended.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", attend)
    options = {"segmentation_config": {"head": "mask", "num_layers": 1}}
    flash, sdpa = build(model_class, **options), build(model_class, **options)
    flash.config._attn_implementation = "flash_attention_2"
    images = pixels(flash.config)
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[0, 2:] = False
    if model_class is HfViTForUniversalSegmentation:
        with pytest.raises(ValueError, match="Masked attention needs attn_implementation='sdpa' or 'eager', not 'fl"):
            flash(images)
        masks.clear()
        for model in (flash, sdpa):
            model.anneal_masks(1.0)
    assert_same(flash(images), sdpa(images), 1e-5)
    assert_same(flash(images, patch_attention_mask=mask), sdpa(images, patch_attention_mask=mask), 1e-4)
    assert {len(shape) for shape in masks if shape} == {2}


@pytest.mark.thinned(2)
@all_heads
@pytest.mark.parametrize("is_drawn", [True, False])
def test_every_weight_gets_a_gradient_and_moves(head: str, is_drawn: bool) -> None:
    torch.manual_seed(0)
    model_class, options = HEADS[head]
    model = model_class(small_config(**options)).train()
    if is_drawn:
        draw_weights(model)
    images = pixels(model.config, batch=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    received = set()
    for step in range(3):
        model(images * (1 + step), **targets(model, images)).loss.backward()
        received |= {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        optimizer.step()
        optimizer.zero_grad()
    assert received == before.keys()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@all_heads
def test_initialization_covers_every_weight_of_a_head(head: str, tmp_path: Path) -> None:
    model_class, options = HEADS[head]
    config = small_config(**options, initializer_range=0.05)
    HfViTModel(config).save_pretrained(tmp_path)
    torch.manual_seed(0)
    for model in (model_class(config), model_class.from_pretrained(tmp_path)):
        children = {name: child for name, child in model.named_children() if name != "model"}
        assert children
        for name, module in ((name, m) for child in children.values() for name, m in child.named_modules()):
            check_initialization(name, module)


@torch.no_grad()
def check_initialization(name: str, module: nn.Module) -> None:
    own = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    bias = own.pop("bias", torch.zeros(1))
    is_relative = isinstance(module, HfViTDepthPredictor) and module.initial_bias
    assert (bias == (1 if is_relative else 0)).all(), name
    if isinstance(module, HfViTKeypointPredictor):
        assert module.weight.std() == pytest.approx(0.001, rel=0.25), name
        return
    if isinstance(module, HfViTHeadConv2d | HfViTHeadConvTranspose2d):
        images = torch.randn(4, module.in_channels, 24, 24)
        is_small = isinstance(module, HfViTDepthPredictor) or name.endswith(("residual1.conv2", "residual2.conv2"))
        gain = 0.1 if is_small else 1
        expected = math.sqrt(2) * (0.5 if re.search(r"fusions\.\d\.projection$", name) else gain)
        assert (module(images) - bias[:, None, None]).std() == pytest.approx(expected, rel=0.4), name
        return
    for leaf, tensor in own.items():
        if isinstance(module, nn.Embedding):
            assert tensor.std() == pytest.approx(1, rel=0.25), name
        elif isinstance(module, nn.Linear) or leaf == "class_tokens":
            assert tensor.std() == pytest.approx(0.05, rel=0.25), name
        else:  # norms, batch statistics and mask probabilities
            start = 0 if leaf in ("running_mean", "num_batches_tracked") else 1
            assert (tensor == start).all(), f"{name}.{leaf}"


def train(model: Any, batch: dict[str, Any], steps: int = 150) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for step in range(steps):
        if isinstance(model, HfViTForUniversalSegmentation):
            model.anneal_masks(step / steps)
        model.train()(**batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


# Each column of patches has a single class, which bilinear resizing reproduces exactly.
COLUMNS = torch.tensor([[0, 0, 1, 2], [3, 4, 4, 0], [2, 1, 3, 3]])
BANDS = COLUMNS.repeat_interleave(8, dim=1)[:, None].expand(-1, 32, -1)  # (3, 32, 32)


@pytest.mark.parametrize("head", SEMANTIC)
def test_semantic_heads_overfit_one_batch(head: str) -> None:
    torch.manual_seed(0)
    model_class, options = HEADS[head]
    model = model_class(small_config(**options))
    images = pixels(model.config, batch=3)
    train(model, {"pixel_values": images, "labels": BANDS})
    logits = nn.functional.interpolate(model(images).logits, size=(32, 32), mode="bilinear")
    assert (logits.argmax(dim=1) == BANDS).double().mean() >= 0.99


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["metric", "relative"])
@pytest.mark.parametrize("head", DEPTH)
def test_depth_heads_overfit_one_batch(head: str, kind: str) -> None:
    torch.manual_seed(0)
    model_class, options = HEADS[f"{head}_{kind}"]
    model = model_class(small_config(**options))
    images = pixels(model.config, batch=3)
    rows, columns = torch.meshgrid(torch.linspace(0, 1, 32), torch.linspace(0, 1, 32), indexing="ij")
    labels = torch.stack([2 + 5 * rows, 3 + 6 * columns, 2 + rows * columns])
    train(model, {"pixel_values": images, "labels": labels})
    depth = nn.functional.interpolate(model(images).predicted_depth[:, None], size=(32, 32), mode="bilinear")[:, 0]
    if kind == "relative":  # apply the scale and shift of the least-squares fit
        fitted = []
        for values_, label in zip(depth.detach(), labels, strict=True):
            known = torch.stack((values_.flatten(), torch.ones(1024)), dim=1)
            fitted.append(1 / (known @ torch.linalg.lstsq(known, 1 / label.reshape(-1, 1)).solution).reshape(32, 32))
        depth = torch.stack(fitted)
    assert ((depth - labels).abs() / labels).mean() < 0.05


def boxes(*sides: tuple[int, int, int, int]) -> Tensor:
    """Return masks (M, 32, 32) of rectangles given as (top, bottom, left, right)."""
    masks = torch.zeros(len(sides), 32, 32)
    for mask, (top, bottom, left, right) in zip(masks, sides, strict=True):
        mask[top:bottom, left:right] = 1
    return masks


def trained_universal(mask_labels: list[Tensor], class_labels: list[Tensor]) -> tuple[Any, Any]:
    """Return an image processor, and the outputs of a model that overfits a batch."""
    torch.manual_seed(0)
    model = HfViTForUniversalSegmentation(small_config())
    images = pixels(model.config, batch=len(mask_labels))
    train(model, {"pixel_values": images, "mask_labels": mask_labels, "class_labels": class_labels}, steps=180)
    with torch.no_grad():
        return HfViTImageProcessor.for_model(model.config), model(images)


def test_universal_model_overfits_semantic_maps() -> None:
    classes = [band.unique() for band in BANDS]
    masks = [(band == own[:, None, None]).float() for band, own in zip(BANDS, classes, strict=True)]
    processor, outputs = trained_universal(masks, classes)
    maps = processor.post_process_semantic_segmentation(outputs, target_sizes=[(32, 32)] * 3)
    assert (torch.stack(maps) == BANDS).double().mean() >= 0.98


def test_universal_model_overfits_overlapping_instances() -> None:
    masks = [boxes((0, 16, 0, 16), (8, 32, 8, 24)), boxes((0, 24, 8, 32), (16, 32, 0, 16), (8, 24, 0, 8))]
    classes = [torch.tensor([0, 0]), torch.tensor([1, 0, 2])]
    processor, outputs = trained_universal(masks, classes)
    found = processor.post_process_instance_segmentation(outputs, target_sizes=[(32, 32)] * 2, return_binary_maps=True)
    metric = InstanceMetric(list("abcde"), thing_ids=range(5))
    for prediction, own, labels in zip(found, masks, classes, strict=True):
        info = prediction["segments_info"]
        instances = {
            "masks": prediction["segmentation"].numpy(),
            "class_labels": [segment["label_id"] for segment in info],
            "scores": [segment["score"] for segment in info],
        }
        metric.update([metric.record(instances, {"masks": own.bool(), "class_labels": labels})])
    assert metric.compute()["mask_ap_75"] >= 0.99


def test_universal_model_overfits_things_and_stuff() -> None:
    masks = [
        boxes((0, 16, 0, 16), (0, 16, 16, 32), (16, 32, 0, 32)),
        boxes((0, 32, 0, 8), (0, 24, 8, 32), (24, 32, 8, 32)),
    ]
    classes = [torch.tensor([0, 0, 4]), torch.tensor([1, 0, 4])]
    processor, outputs = trained_universal(masks, classes)
    metric = PanopticMetric(list("abcde"), thing_ids=range(3))
    found = processor.post_process_panoptic_segmentation(outputs, target_sizes=[(32, 32)] * 2, label_ids_to_fuse={4})
    for prediction, own, labels in zip(found, masks, classes, strict=True):
        metric.update([metric.record(prediction, {"masks": own.bool(), "class_labels": labels})])
    assert metric.compute()["pq"] >= 0.95


@pytest.mark.parametrize(
    ("head", "changes", "message"),
    [
        (
            "conv",
            {"labels": torch.zeros(2, 5, 32, 32).long()},
            r"\(batch, height, width\) with batch 2, not torch",
        ),
        ("conv", {"labels": torch.zeros(1, 32, 32).long()}, r"with batch 2, not .* \(1, 32, 32\)"),
        ("conv", {"labels": torch.zeros(2, 32, 32)}, "must be class indices .* not torch.float32"),
        ("conv", {"labels": torch.full((2, 32, 32), 5)}, r"Label 5 is out of range: .* 0 to 4, and 255"),
        ("conv", {"labels": torch.full((2, 32, 32), -1)}, "Label -1 is out of range"),
        ("dpt_metric", {"labels": torch.ones(2, 32, 32).long()}, "must be floats .* not torch.int64"),
        ("dpt_metric", {"labels": torch.ones(2, 2, 32, 32)}, r"in meters with batch 2, not .* \(2, 2, 32, 32\)"),
        ("universal", {"class_labels": None}, r"an entry for each of the 2 images, not \[2, None\]"),
        ("universal", {"mask_labels": None}, r"not \[None, 2\]"),
        ("universal", {"mask_labels": [torch.zeros(1, 8, 8)]}, r"not \[1, 2\]"),
        ("universal", {"mask_labels": [torch.zeros(2, 8, 8)] * 2}, r"mask_labels\[0\] .* \(2, 8, 8\) and \(1,\)"),
        ("universal", {"mask_labels": [torch.zeros(1, 8, 8), torch.full((1, 8, 8), 7.0)]}, r"\[1\] has values other"),
        ("universal", {"class_labels": [torch.tensor([5]), torch.tensor([0])]}, "Class 5 in class_labels.0. is out"),
        ("universal", {"pixel_values": None}, "pixel_values is missing"),
        ("conv", {"pixel_values": None}, "pixel_values is missing"),
    ],
)
def test_bad_input_is_refused(head: str, changes: dict[str, Any], message: str) -> None:
    model = build_head(head)
    batch = {"pixel_values": pixels(model.config)}
    if head == "universal":
        batch |= {"mask_labels": [torch.zeros(1, 8, 8)] * 2, "class_labels": [torch.tensor([0])] * 2}
    with pytest.raises(ValueError, match=message):
        model(**{**batch, **changes})


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        ("conv", {"num_labels": 1}, "num_labels=1 must be at least 2"),
        ("conv", {"segmentation_config": {"class_weights": [1.0, 2.0]}}, "2 numbers, but there are num_labels=5"),
        ("conv", {"segmentation_config": {"out_indices": [4]}}, r"out_indices=\[4\] must list blocks from 1 to .*=3"),
        ("conv", {"segmentation_config": {"out_indices": []}}, r"out_indices=\[\] must list"),
        ("universal", {"num_labels": 0}, "num_labels=0 is not supported: masks need"),
        ("universal", {"universal_segmentation_config": {"num_blocks": 4}}, "num_blocks=4 .* num_hidden_layers=3"),
        ("dpt_metric", {"depth_config": {**SMALL_DEPTH, "out_indices": [1, 3]}}, "3 levels .* names 2 blocks"),
        ("dpt_metric", {"use_cls_token": False, "pooling": "mean"}, "'project' needs a CLS token, .*'ignore'"),
    ],
)
def test_heads_that_do_not_fit_the_backbone_are_refused(head: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HEADS[head][0](small_config(**options))


@pytest.mark.parametrize(("num_hidden_layers", "expected"), [(2, 2), (4, 4), (6, 4)])
def test_queries_of_masks_pass_through_four_blocks_or_all_of_fewer(
    num_hidden_layers: int, expected: int, tmp_path: Path
) -> None:
    config = small_config(num_hidden_layers=num_hidden_layers, universal_segmentation_config={"num_queries": 5})
    HfViTForImageClassification(config).save_pretrained(tmp_path)
    model = HfViTForUniversalSegmentation.from_pretrained(tmp_path).eval()
    states = model(pixels(config), output_hidden_states=True).hidden_states
    num_queries = [state.shape[1] - config.num_prefix_tokens - math.prod(config.grid_size) for state in states[1:]]
    assert num_queries == [0] * (num_hidden_layers - expected) + [5] * expected


def test_a_fresh_depth_head_is_not_saturated() -> None:
    # Hidden states with the magnitude of a published encoder. Summing the fusions would make the features 8 times as
    # large.
    torch.manual_seed(0)
    config = small_config(hidden_size=48, num_hidden_layers=4, depth_config={"neck_hidden_sizes": [16, 16, 16, 16]})
    head = HfViTForDepthEstimation(config).depth_head
    levels, prefixes = [3 * torch.randn(2, 48, 8, 8) for _ in range(4)], [3 * torch.randn(2, 1, 48) for _ in range(4)]
    depth = head(levels, prefixes)
    assert head.decoder.options.max_depth == 10
    assert 2 < depth.min() < depth.max() < 8


@pytest.mark.parametrize("head", ["dpt_metric", "linear_metric"])
def test_depth_heads_take_another_patch_size_but_not_another_cls_token(head: str) -> None:
    model = build_head(head)
    model.resize_patch_embeddings(4)
    assert head != "dpt_metric" or model(pixels(small_config())).predicted_depth.shape == (2, 32, 32)
    with pytest.raises(ValueError, match="use_cls_token=False does not match the depth head"):
        model.resize_prefix_tokens(use_cls_token=False, pooling="mean")
    assert model.config.use_cls_token
    ignoring = build(HfViTForDepthEstimation, depth_config={**SMALL_DEPTH, "readout_type": "ignore"})
    ignoring.resize_prefix_tokens(use_cls_token=False, pooling="mean")
    assert ignoring(pixels(ignoring.config)).predicted_depth.shape == (2, 32, 32)
