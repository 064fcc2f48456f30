"""Invariants of the detection models, in addition to the tests of every class in `test_modeling.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_vit import HfViTForObjectDetection, HfViTModel

from ..helpers.models import boxes, pixels
from ..helpers.references import assert_close
from .test_modeling import assert_same, build, training_gradients


# Variants of both decoders
DECODERS: dict[str, dict[str, Any]] = {
    "all_blocks": {"decoder": "queries", "num_queries": 6},
    "behind_the_encoder": {"decoder": "queries", "num_queries": 6, "num_blocks": 0, "num_layers": 2},
    "mid_positions": {
        "decoder": "queries",
        "num_queries": 6,
        "num_blocks": 2,
        "num_layers": 1,
        "use_mid_position_embeddings": True,
        "class_loss": "iou_aware",
    },
}
all_decoders = pytest.mark.parametrize("decoder", DECODERS)
GRIDS = [(2, 5), (4, 3), (4, 5)]


def build_decoder(decoder: str, **overrides: Any) -> Any:
    return build(HfViTForObjectDetection, detection_config=DECODERS[decoder], **overrides)


def targets(count: int, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "class_labels": torch.randint(5, (count,), generator=generator),
        "boxes": boxes(generator, count).to(dtype),
    }


def loss_and_gradients(model: Any, batches: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the batches and its gradients."""
    model.zero_grad()
    count = torch.stack([model.count_items(batch["labels"]) for batch in batches]).sum(dim=0)
    loss = torch.stack([model(**batch, num_items_in_batch=count).loss for batch in batches]).sum()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def padded_batch(model: Any, dtype: torch.dtype) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return images of three sizes with 0, 1 and 2 objects, each alone and all in one padded batch."""
    alone, batch, mask = [], torch.zeros(3, 3, 32, 40, dtype=dtype), torch.zeros(3, 4, 5, dtype=torch.bool)
    for index, (rows, columns) in enumerate(GRIDS):
        image = pixels(model.config, batch=1, grid=(rows, columns)).to(dtype)
        alone.append({"pixel_values": image, "labels": [targets(index, index, dtype)]})
        batch[index, :, : 8 * rows, : 8 * columns] = image[0]
        mask[index, :rows, :columns] = True
    labels = [example["labels"][0] for example in alone]
    return alone, {"pixel_values": batch, "patch_attention_mask": mask, "labels": labels}


@all_decoders
def test_saved_model_is_the_same(decoder: str, tmp_path: Path) -> None:
    model = build_decoder(decoder)
    model.save_pretrained(tmp_path)
    reloaded, info = HfViTForObjectDetection.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    images = pixels(model.config)
    assert_same(reloaded(images), model(images))


@all_decoders
def test_padding_and_splitting_change_no_loss_and_no_gradient(decoder: str) -> None:
    # Rotary positions, because a position table is resampled in float32 for images of several sizes.
    model = build_decoder(decoder, position_embedding_type="rotary", image_size=(32, 40)).double().train()
    alone, together = padded_batch(model, torch.float64)
    if decoder == "mid_positions":  # has rotary positions and a table
        alone, together = alone[2:], {name: value[2:] for name, value in together.items()}
    expected = loss_and_gradients(model, alone)
    actual = loss_and_gradients(model, [together])
    for a, e, name in zip(actual, expected, ("loss", "gradients"), strict=True):
        assert_close(a, e, 1e-9, name)


@all_decoders
def test_boxes_do_not_depend_on_padding(decoder: str) -> None:
    model = build_decoder(decoder)
    alone, together = padded_batch(model, torch.float32)
    outputs = model(together["pixel_values"], patch_attention_mask=together["patch_attention_mask"])
    for index, example in enumerate(alone):
        own = model(example["pixel_values"])
        for name in ("pred_boxes", "probabilities", "logits"):
            assert_close(outputs[name][index], own[name][0], 1e-5, name)


@all_decoders
def test_every_layer_with_queries_predicts_in_training(decoder: str) -> None:
    model = build_decoder(decoder).train()
    options = DECODERS[decoder]
    num_layers = options.get("num_blocks", 3) + options.get("num_layers", 0)
    images = pixels(model.config)
    outputs = model(images, labels=[targets(2, 0), targets(0, 1)])
    assert len(outputs.auxiliary_outputs) == num_layers - 1
    weights = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}
    total = sum(weights["_".join(name.split("_")[:2])] * value for name, value in outputs.loss_dict.items())
    torch.testing.assert_close(outputs.loss.detach(), total)
    assert len(outputs.loss_dict) == 3 * num_layers
    assert model.eval()(images).auxiliary_outputs is None


@all_decoders
def test_the_loss_is_divided_by_what_the_batch_has_unless_told(decoder: str) -> None:
    model = build_decoder(decoder)
    images, labels = pixels(model.config), [targets(3, 0), targets(1, 1)]
    own = model(images, labels=labels).loss
    count = model.count_items(labels)
    assert count[1] == 4
    torch.testing.assert_close(model(images, labels=labels, num_items_in_batch=2 * count).loss, own / 2)
    empty = model(images, labels=[targets(0, 0)] * 2)
    torch.testing.assert_close(empty.loss, empty.loss_dict["loss_ce"])


def test_probabilities_are_those_of_the_classes_alone() -> None:
    model = build_decoder("all_blocks")
    outputs = model(pixels(model.config))
    assert outputs.logits.shape == (2, 6, 6)
    assert outputs.probabilities.shape == (2, 6, 5)
    torch.testing.assert_close(outputs.probabilities, outputs.logits.softmax(-1)[..., :5])
    focal = build_decoder("mid_positions")
    outputs = focal(pixels(focal.config))
    assert outputs.logits.shape == (2, 6, 5)
    torch.testing.assert_close(outputs.probabilities, outputs.logits.sigmoid())


def test_mid_positions_follow_the_size_of_the_model(tmp_path: Path) -> None:
    model = build_decoder("mid_positions")
    model.save_pretrained(tmp_path)
    larger = HfViTForObjectDetection.from_pretrained(tmp_path, image_size=48)
    assert larger.detection_head.mid_position_embeddings.shape == (1, 1 + 36, 32)
    images = pixels(larger.config)
    assert_same(larger(images), model(images), 1e-5)
    with pytest.raises(ValueError, match="num_register_tokens=2 do not match the position embeddings between blocks"):
        HfViTForObjectDetection.from_pretrained(tmp_path, num_register_tokens=2)


@all_decoders
def test_sdpa_equals_eager_forward_and_backward(decoder: str) -> None:
    eager, sdpa = (build_decoder(decoder, attn_implementation=name).double() for name in ("eager", "sdpa"))
    images = pixels(eager.config).double()
    assert_same(sdpa(images), eager(images), 1e-11)
    expected = training_gradients(eager, images)
    for name, gradient in training_gradients(sdpa, images).items():
        assert_close(gradient, expected[name], 1e-9, name) if expected[name].abs().max() > 1e-12 else None


@all_decoders
def test_compiles_whole_and_once_per_size(decoder: str) -> None:
    model = build_decoder(decoder)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    sizes = [pixels(model.config, grid=grid) for grid in ((4, 4), (3, 5))]
    with torch.no_grad():
        expected = [model(images) for images in sizes]
        for images in sizes:
            compiled(images)
        with torch.compiler.set_stance("fail_on_recompile"):
            for images, outputs in zip(sizes, expected, strict=True):
                assert_same(compiled(images), outputs, 2e-5)


@all_decoders
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(decoder: str, dtype: torch.dtype) -> None:
    model = build_decoder(decoder)
    images, labels = pixels(model.config), [targets(2, 0), targets(1, 1)]
    expected = model(images, labels=labels)
    with torch.autocast("cpu", dtype):
        autocast = model(images, labels=labels)
    half = model.to(dtype)(images, labels=labels)
    for actual in (autocast, half):
        for name in ("logits", "pred_boxes", "loss"):
            assert_close(actual[name].float(), expected[name], 0.2, name)
        assert actual.loss.dtype == torch.float32


def test_encoder_is_that_of_the_plain_model(tmp_path: Path) -> None:
    model = build_decoder("behind_the_encoder")
    model.save_pretrained(tmp_path)
    assert_same(HfViTModel.from_pretrained(tmp_path)(pixels(model.config))[0], model.model(pixels(model.config))[0])


def test_bad_options_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_labels": 0}, "num_labels=0 is not supported: objects need"),
        (
            {"detection_config": {"decoder": "queries", "num_blocks": 4}},
            "num_blocks=4 blocks for the queries",
        ),
        ({"detection_config": {"decoder": "queries", "num_blocks": 0}}, "without num_layers runs no block on queries"),
        ({"detection_config": {"decoder": "deformable", "num_layers": 0}}, "num_layers=0 must be at least 1"),
        ({"detection_config": {"hidden_size": 100}}, "hidden_size=100 must be a multiple of 8 times"),
        ({"detection_config": {"scale_factors": [1.0, 3.0]}}, r"scale_factors=\[1.0, 3.0\] must be one or more of"),
        ({"detection_config": {"class_loss": "cross_entropy"}}, "has no class for no object"),
        ({"detection_config": {"num_blocks": 2}}, "num_blocks=2 applies only to decoder='queries'"),
        ({"detection_config": {"decoder": "queries", "num_groups": 2}}, "num_groups=2 .* no effect with 'queries'"),
        ({"detection_config": {"bbox_weight": -1}}, "bbox_weight=-1 must not be negative"),
    ]
    for overrides, message in cases:
        with pytest.raises(ValueError, match=message):
            build(HfViTForObjectDetection, **overrides)
