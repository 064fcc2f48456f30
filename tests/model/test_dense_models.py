"""Test training and invariants of every head, in addition to the invariants of all classes in `test_modeling.py`."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_vit import (
    HfViTForDepthEstimation,
    HfViTForImageClassification,
    HfViTForUniversalSegmentation,
    HfViTImageProcessor,
    HfViTModel,
)
from hf_vit.evaluation.detection import InstanceMetric
from hf_vit.evaluation.segmentation import PanopticMetric
from hf_vit.model.layers import HfViTBatchNorm2d, HfViTHeadConv2d, HfViTHeadConvTranspose2d
from hf_vit.model.task_depth_estimation import HfViTDepthPredictor
from hf_vit.model.task_keypoint_detection import HfViTKeypointPredictor

from ..helpers.dense import masks_of
from ..helpers.models import SMALL_DEPTH, VARIANTS, pixels, small_config
from ..helpers.references import assert_close, draw_weights
from . import checks
from .checks import DECODERS, DENSE, HEADS, OBJECTS, assert_same, build, inputs_of


all_heads = pytest.mark.parametrize("head", HEADS)
dense_heads = pytest.mark.parametrize("head", DENSE)


def loss_and_gradients(model: Any, batches: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the mean loss of several batches and the gradients of this loss."""
    model.zero_grad()
    loss = torch.stack([model(**batch).loss for batch in batches]).mean()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@all_heads
def test_saved_model_is_the_same(head: str, tmp_path: Path) -> None:
    model = build(head)
    checks.check_saved(model, inputs_of(model), tmp_path)


@pytest.mark.parametrize("head", ["linear", "classic_keypoints"])
def test_a_saved_model_that_names_no_norm_has_batch_norm(head: str, tmp_path: Path) -> None:
    model = build(head)
    assert any(isinstance(module, HfViTBatchNorm2d) for module in model.modules())
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config[next(iter(HEADS[head][1]))].pop("norm", None)
    file.write_text(json.dumps(config))
    reopened = type(model).from_pretrained(tmp_path)
    assert reopened.options.norm == "batch"
    assert_same(reopened(pixels(model.config)), model(pixels(model.config)))


@pytest.mark.parametrize("head", ["simple", "linear", "conv", "mask", "linear_metric", "dpt_metric",
                                  "classic_keypoints", "all_blocks", "deformable"])  # fmt: skip
def test_another_head_starts_fresh_and_is_reported(head: str, tmp_path: Path) -> None:
    build(head).save_pretrained(tmp_path)
    model_class, saved = HEADS[head]
    field, own = next(iter(saved.items()))
    name = "decoder" if field == "detection_config" else "head"
    others = {o[field][name]: o for kind, o in HEADS.values() if kind is model_class}
    for options in (other for value, other in others.items() if value != own[name]):
        model, info = model_class.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert info["missing_keys"] == {weight for weight in model.state_dict() if not weight.startswith("model.")}
        assert not info["mismatched_keys"]


@dense_heads
def test_padding_changes_no_loss_and_no_gradient(head: str) -> None:
    model = build(head).double()
    # Heads with batch norm or random loss points are tested in evaluation mode, because both depend on the batch.
    model.train(head not in ("linear", "classic_keypoints", "universal", "universal_mask"))
    alone = [inputs_of(model, 1, grid, seed) for seed, grid in enumerate([(2, 5), (4, 3), (4, 5)])]
    batch, mask = checks.pad_images([example["pixel_values"] for example in alone])
    together: dict[str, Any] = {"pixel_values": batch, "patch_attention_mask": mask}
    ignored = 255 if head in checks.SEMANTIC else 0
    for name in alone[0].keys() - {"pixel_values"}:
        labels = [label for example in alone for label in example[name]]
        if name != "class_labels" and not head.endswith("keypoints"):
            labels = [
                nn.functional.pad(label, (0, 40 - label.shape[-1], 0, 32 - label.shape[-2]), value=ignored)
                for label in labels
            ]
        together[name] = labels if head.startswith("universal") else torch.stack(labels)
    actual, expected = loss_and_gradients(model, [together]), loss_and_gradients(model, alone)
    for a, e, name in zip(actual, expected, ("loss", "gradients"), strict=True):
        assert_close(a, e, 1e-9, name)


@pytest.mark.parametrize(
    ("kind", "variant"),
    [*((HfViTModel, variant) for variant in VARIANTS),
     *((head, "plain") for head in ("mask", "universal", "universal_mask", "dpt_metric", *OBJECTS))],
)  # fmt: skip
def test_sdpa_equals_eager_forward_and_backward(kind: Any, variant: str) -> None:
    eager = build(kind, variant, attn_implementation="eager").double()
    sdpa = build(kind, variant, attn_implementation="sdpa").double()
    images = pixels(eager.config).double()
    assert_same(sdpa(images), eager(images), 1e-12 if kind is HfViTModel else 1e-11)
    expected = checks.training_gradients(eager, images)
    for name, gradient in checks.training_gradients(sdpa, images).items():
        assert_close(gradient, expected[name], 1e-9, name) if expected[name].abs().max() > 1e-12 else None


COMPILED = (
    "conv",
    "universal",
    "universal_mask",
    "annealed",
    "dpt_metric",
    "instance_keypoints",
    "in_windows",
    *DECODERS,
    *checks.MASKED,
)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("head", [*COMPILED, "causal", "seen padding"])
def test_compiles_whole_and_once_per_size(head: str, backend: str) -> None:
    model = build(head.replace("annealed", "universal"))
    if head == "annealed":
        model.anneal_masks(1.0)
    grids = (
        ((4, 4), (3, 5))
        if head in ("conv", "universal", "universal_mask")
        else ((3, 5) if head in COMPILED else (4, 4),)
    )
    names = ("pixel_values", "noise", "input_ids")
    sizes = [{name: v for name, v in inputs_of(model, grid=grid).items() if name in names} for grid in grids]
    checks.check_compiled(model, sizes, 2e-5, backend, output_hidden_states=True)


@pytest.mark.parametrize(
    ("kind", "variant"),
    [(HfViTModel, "plain"), (HfViTModel, "rotary")]
    + [(head, "plain") for head in ("mask", "dpt_metric", "classic_keypoints", "universal", "universal_mask")],
)
def test_flash_attention_receives_supported_masks(kind: Any, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = checks.replace_flash_attention(monkeypatch)
    flash, sdpa = build(kind, variant), build(kind, variant)
    flash.config._attn_implementation = "flash_attention_2"
    images, mask = pixels(flash.config), checks.partial_mask()
    if str(kind).startswith("universal"):
        with pytest.raises(ValueError, match="Masked attention needs attn_implementation='sdpa' or 'eager', not 'fl"):
            flash(images)
        seen.clear()
        for model in (flash, sdpa):
            model.anneal_masks(1.0)
    assert_same(flash(images), sdpa(images), 1e-6 if kind is HfViTModel else 1e-5)
    masked = [model(images, patch_attention_mask=mask) for model in (flash, sdpa)]
    assert_same(*masked, 1e-5 if kind is HfViTModel else 1e-4)
    assert {len(shape) for _, shape in seen if shape} == {2}
    if kind is HfViTModel:
        length = flash.config.num_prefix_tokens + 16
        assert [shape for _, shape in seen] == [None] * 3 + [(2, length)] * 3


@pytest.mark.thinned(2)
@pytest.mark.parametrize("head", [*DENSE, *checks.MASKED, *checks.IMAGE_TEXT])
@pytest.mark.parametrize("is_drawn", [True, False])
def test_every_weight_gets_a_gradient_and_moves(head: str, is_drawn: bool) -> None:
    torch.manual_seed(0)
    model_class, options = HEADS[head]
    model = model_class(small_config(**options)).train()
    if is_drawn:
        draw_weights(model)
    given = inputs_of(model, batch=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    received = set()
    for step in range(3):
        model(**{**given, "pixel_values": given["pixel_values"] * (1 + step)}).loss.backward()
        received |= {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    # These parameters of text encoders have no gradient: they add the same value to all keys or to all tokens.
    without = {
        name for name in before if head in checks.IMAGE_TEXT and (name.endswith("key.bias") or "token_type" in name)
    }
    assert received | without == moved | without == before.keys()


@dense_heads
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
        else:  # other tensors: norms, batch statistics, mask probabilities
            start = 0 if leaf in ("running_mean", "num_batches_tracked") else 1
            assert (tensor == start).all(), f"{name}.{leaf}"


# Each column of patches has a single class, which bilinear resizing reproduces exactly.
COLUMNS = torch.tensor([[0, 0, 1, 2], [3, 4, 4, 0], [2, 1, 3, 3]])
BANDS = COLUMNS.repeat_interleave(8, dim=1)[:, None].expand(-1, 32, -1)  # (3, 32, 32)


def trained(head: str, batch: int, steps: int = 150, **targets: Any) -> tuple[Any, Any]:
    """Overfit a model with the given head to a batch. Return an image processor and the outputs of the model."""
    torch.manual_seed(0)
    model_class, options = HEADS[head]
    model = model_class(small_config(**options))
    images = pixels(model.config, batch)
    checks.train(model, {"pixel_values": images, **targets}, steps)
    with torch.no_grad():
        return HfViTImageProcessor.for_model(model.config), model(images)


def resized(maps: Tensor) -> Tensor:
    return nn.functional.interpolate(maps, size=(32, 32), mode="bilinear")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("head", checks.SEMANTIC)
def test_semantic_heads_overfit_one_batch(head: str) -> None:
    _, outputs = trained(head, 3, labels=BANDS)
    assert (resized(outputs.logits).argmax(dim=1) == BANDS).double().mean() >= 0.99


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["metric", "relative"])
@pytest.mark.parametrize("head", checks.DEPTH)
def test_depth_heads_overfit_one_batch(head: str, kind: str) -> None:
    rows, columns = torch.meshgrid(torch.linspace(0, 1, 32), torch.linspace(0, 1, 32), indexing="ij")
    labels = torch.stack([2 + 5 * rows, 3 + 6 * columns, 2 + rows * columns])
    _, outputs = trained(f"{head}_{kind}", 3, labels=labels)
    depth = resized(outputs.predicted_depth[:, None])[:, 0]
    if kind == "relative":  # relative depth is aligned with the scale and shift of a least-squares fit
        known = torch.stack((depth.flatten(1), torch.ones(3, 1024)), dim=2)
        depth = 1 / (known @ torch.linalg.lstsq(known, 1 / labels.flatten(1)[..., None]).solution).view(3, 32, 32)
    assert ((depth - labels).abs() / labels).mean() < 0.05


@pytest.mark.nightly  # The next test overfits the same model on segments of objects.
def test_universal_model_overfits_semantic_maps() -> None:
    classes = [band.unique() for band in BANDS]
    masks = [(band == own[:, None, None]).float() for band, own in zip(BANDS, classes, strict=True)]
    processor, outputs = trained("universal", 3, 180, mask_labels=masks, class_labels=classes)
    maps = processor.post_process_semantic_segmentation(outputs, target_sizes=[(32, 32)] * 3)
    assert (torch.stack(maps) == BANDS).double().mean() >= 0.98


OVERLAPPING = [[(0, 16, 0, 16), (8, 32, 8, 24)], [(0, 24, 8, 32), (16, 32, 0, 16), (8, 24, 0, 8)]]
THINGS_AND_STUFF = [
    [(0, 16, 0, 16), (0, 16, 16, 32), (16, 32, 0, 32)],
    [(0, 32, 0, 8), (0, 24, 8, 32), (24, 32, 8, 32)],
]


@pytest.mark.parametrize(
    ("sides", "classes", "metric", "score", "least"),
    [
        (OVERLAPPING, [[0, 0], [1, 0, 2]], InstanceMetric(list("abcde"), thing_ids=range(5)), "mask_ap_75", 0.99),
        (THINGS_AND_STUFF, [[0, 0, 4], [1, 0, 4]], PanopticMetric(list("abcde"), thing_ids=range(3)), "pq", 0.95),
    ],
    ids=["overlapping instances", "things and stuff"],
)
def test_universal_model_overfits_objects(
    sides: list[Any], classes: list[list[int]], metric: Any, score: str, least: float
) -> None:
    """Overfit a model to masks of rectangles. Each rectangle is given as (top, bottom, left, right)."""
    masks, labels = [torch.from_numpy(masks_of(own, (32, 32))) for own in sides], list(map(torch.tensor, classes))
    targets = {"mask_labels": [own.float() for own in masks], "class_labels": labels}
    processor, outputs = trained("universal", 2, 180, **targets)
    sizes = [(32, 32)] * 2
    if score == "pq":
        found = processor.post_process_panoptic_segmentation(outputs, target_sizes=sizes, label_ids_to_fuse={4})
    else:
        found = processor.post_process_instance_segmentation(outputs, target_sizes=sizes, return_binary_maps=True)
        for prediction in found:
            info = prediction["segments_info"]
            prediction["masks"] = prediction["segmentation"].numpy()
            prediction |= {"class_labels": [o["label_id"] for o in info], "scores": [o["score"] for o in info]}
    for prediction, own, label in zip(found, masks, labels, strict=True):
        metric.update([metric.record(prediction, {"masks": own, "class_labels": label})])
    assert metric.compute()[score] >= least


@pytest.mark.parametrize(("num_hidden_layers", "expected"), [(2, 2), (4, 4), (6, 4)])
def test_mask_queries_pass_through_the_last_four_blocks_at_most(
    num_hidden_layers: int, expected: int, tmp_path: Path
) -> None:
    config = small_config(num_hidden_layers=num_hidden_layers, universal_segmentation_config={"num_queries": 5})
    HfViTForImageClassification(config).save_pretrained(tmp_path)
    model = HfViTForUniversalSegmentation.from_pretrained(tmp_path).eval()
    states = model(pixels(config), output_hidden_states=True).hidden_states
    num_queries = [state.shape[1] - config.num_prefix_tokens - math.prod(config.grid_size) for state in states[1:]]
    assert num_queries == [0] * (num_hidden_layers - expected) + [5] * expected


def test_a_fresh_depth_head_is_not_saturated() -> None:
    # Hidden states have the magnitude of those of a published encoder. Summing the fused maps would make the features
    # 8 times as large.
    torch.manual_seed(0)
    config = small_config(hidden_size=48, num_hidden_layers=4, depth_config={"neck_hidden_sizes": [16, 16, 16, 16]})
    head = HfViTForDepthEstimation(config).depth_head
    levels, prefixes = [3 * torch.randn(2, 48, 8, 8) for _ in range(4)], [3 * torch.randn(2, 1, 48) for _ in range(4)]
    depth = head(levels, prefixes)
    assert head.decoder.options.max_depth == 10
    assert 2 < depth.min() < depth.max() < 8


@pytest.mark.parametrize("head", ["dpt_metric", "linear_metric"])
def test_depth_heads_take_another_patch_size_but_not_another_cls_token(head: str) -> None:
    model = build(head)
    model.resize_patch_embeddings(4)
    assert head != "dpt_metric" or model(pixels(small_config())).predicted_depth.shape == (2, 32, 32)
    with pytest.raises(ValueError, match="use_cls_token=False does not match the depth head"):
        model.resize_prefix_tokens(use_cls_token=False, pooling="mean")
    assert model.config.use_cls_token
    ignoring = build(HfViTForDepthEstimation, depth_config={**SMALL_DEPTH, "readout_type": "ignore"})
    ignoring.resize_prefix_tokens(use_cls_token=False, pooling="mean")
    assert ignoring(pixels(ignoring.config)).predicted_depth.shape == (2, 32, 32)
