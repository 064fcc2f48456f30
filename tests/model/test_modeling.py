"""Test invariants of all models, following the common model and backbone tests of transformers."""

import gc
import inspect
import itertools
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import nn
from transformers.utils import logging as logging_of_the_library

from hf_vit import (
    HfViTBackbone,
    HfViTForImageClassification,
    HfViTForMaskedImageModeling,
    HfViTForObjectDetection,
    HfViTForUniversalSegmentation,
    HfViTForZeroShotImageClassification,
    HfViTImageProcessor,
    HfViTModel,
    HfViTPreTrainedModel,
)

from ..helpers.golden import GOLDEN, golden_values
from ..helpers.models import MODEL_CLASSES, VARIANTS, pixels, small_config
from ..helpers.references import assert_close
from ..helpers.versions import needs_chosen_states
from . import checks
from .checks import MASKED, assert_same, assert_same_weights, build, inputs_of, name_of, training_gradients, values


ALL_CLASSES = [*MODEL_CLASSES, HfViTForMaskedImageModeling, HfViTForZeroShotImageClassification]
NOT_DENSE_CLASSES = MODEL_CLASSES[:3]  # the dense classes are compiled in `test_dense_models.py`
TASKS = ("segmentation", "universal_segmentation", "depth", "keypoint", "masked_image_modeling")
HEADS = ("classifier.", "detection_head", "text_model.", "contrastive_head.", *(f"{task}_head." for task in TASKS))


all_classes = pytest.mark.parametrize("model_class", MODEL_CLASSES, ids=name_of)
classes_and_masked = pytest.mark.parametrize("kind", [*MODEL_CLASSES, *MASKED], ids=name_of)
all_variants = pytest.mark.parametrize("variant", VARIANTS)
both_reentrant = pytest.mark.parametrize("reentrant", [False, True])
# Compiled flex attention kernels need AVX512: torch 2.14 generates C++ code that does not compile without vector
# instructions, and that reads masks out of bounds and crashes with AVX2.
COMPILES_KERNELS = torch.backends.cpu.get_cpu_capability() == "AVX512"


@pytest.mark.thinned(7)
@classes_and_masked
@all_variants
def test_saved_model_and_tuple_output_are_the_same(kind: Any, variant: str, tmp_path: Path) -> None:
    model = build(kind, variant)
    given = inputs_of(model)
    checks.check_saved(model, given, tmp_path)
    given["patch_attention_mask"] = torch.ones(2, *model.config.grid_size, dtype=torch.bool)
    checks.check_tuple_output(model, given, output_hidden_states=True)


@pytest.mark.thinned(7)
@all_classes
@all_variants
def test_outputs_of_every_model(model_class: type[Any], variant: str) -> None:
    """Compare the outputs of a batch with those of single images, and check hidden states and attentions."""
    model = build(model_class, variant)
    config, given = model.config, {"pixel_values": pixels(model.config)}
    plain = model(**given)
    assert (plain.hidden_states, plain.attentions) == (None, None)
    images = pixels(config, batch=3, grid=(3, 5))
    together = model(images, output_hidden_states=True)
    for index in range(3):
        alone = model(images[index : index + 1], output_hidden_states=True)
        assert_same(alone, [value[index : index + 1] for value in values(together)], 3e-5)
    model.set_attn_implementation("eager")
    outputs = model(**given, output_hidden_states=True, output_attentions=True)
    length, heads = config.num_prefix_tokens + math.prod(config.grid_size), config.num_attention_heads
    # Queries are added to the tokens of the last two of three blocks.
    num_queries = 5 if model_class in (HfViTForUniversalSegmentation, HfViTForObjectDetection) else 0
    lengths = [length, length + num_queries, length + num_queries]
    sizes = [(2, length, config.hidden_size) for length in (length, *lengths)]
    assert [tuple(state.shape) for state in outputs.hidden_states] == sizes
    assert [tuple(a.shape) for a in outputs.attentions] == [(2, heads, length, length) for length in lengths]
    kept = [*outputs.hidden_states, *outputs.attentions]
    for tensor in kept:
        tensor.retain_grad()
    values(outputs)[0].square().sum().backward()
    assert all(tensor.grad is not None for tensor in kept)
    for attention in outputs.attentions:
        torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:3]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "tolerance"), [("windows", 3e-5), pytest.param("rotary", 1e-5, marks=pytest.mark.nightly)]
)
def test_compiled_flex_attention_equals_others(variant: str, tolerance: float) -> None:
    """Only this test compiles the flex attention kernels: with window attention, full attention and a padding mask."""
    mask = checks.partial_mask()
    options = {"variant": variant, "num_hidden_layers": 2}
    given = {"patch_attention_mask": mask} if variant == "windows" else {}
    eager, flex = (build(**options, attn_implementation=name) for name in ("eager", "flex_attention"))
    with torch.no_grad(), torch.compiler.set_stance("default" if COMPILES_KERNELS else "force_eager"):
        actual, expected = (model(pixels(eager.config), **given) for model in (flex, eager))
    kept = nn.functional.pad(mask.flatten(1), (eager.config.num_prefix_tokens, 0), value=True)
    assert_close(actual.pooler_output, expected.pooler_output, tolerance, "pooled")
    assert_close(actual.last_hidden_state[kept], expected.last_hidden_state[kept], tolerance, "tokens")


def test_checkpoints_may_be_sharded_and_are_never_pickles(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json", ".py"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    images = pixels(model.config)
    assert_same(HfViTModel.from_pretrained(tmp_path)(images), model(images))
    for file in tmp_path.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        HfViTModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="loaded only from safetensors"):
        HfViTModel.from_pretrained(tmp_path, use_safetensors=False)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("source", ALL_CLASSES, ids=name_of)
@pytest.mark.parametrize("target", ALL_CLASSES, ids=name_of)
def test_checkpoint_of_one_task_opens_as_another(source: type[Any], target: type[Any], tmp_path: Path) -> None:
    model = build(source)
    model.save_pretrained(tmp_path)
    opened, info = target.from_pretrained(tmp_path, output_loading_info=True)
    new, lost = (
        {name for name in one.state_dict() if name.startswith(HEADS)} - another.state_dict().keys()
        for one, another in ((opened, model), (model, opened))
    )
    assert bool(new) == (source is not target and target in ALL_CLASSES[2:])
    assert set(info["missing_keys"]) == new
    assert set(info["unexpected_keys"]) == lost
    assert_same_weights(opened.base_model, model.base_model)


@pytest.mark.parametrize(
    "labels", [{"num_labels": 7}, {"id2label": dict(enumerate("abcdefg"))}], ids=["number", "names"]
)
def test_other_labels_get_a_fresh_head(labels: dict[str, Any], tmp_path: Path) -> None:
    before = build(HfViTForImageClassification)
    before.save_pretrained(tmp_path)
    model, info = HfViTForImageClassification.from_pretrained(tmp_path, output_loading_info=True, **labels)
    assert {name for name, *_ in info["mismatched_keys"]} == {"classifier.weight", "classifier.bias"}
    assert model.classifier.weight.shape == (7, 32)
    assert float(model.classifier.weight.detach().std()) == pytest.approx(32**-0.5, rel=0.3)
    assert model.config.num_labels == 7
    assert_same_weights(model.model, before.model)


def test_checkpoints_and_overrides_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = transformers.SwinConfig(embed_dim=8, depths=[1], num_heads=[2], image_size=32, window_size=4)
    transformers.SwinModel(config).save_pretrained(tmp_path / "swin")
    for model_class in MODEL_CLASSES:
        with pytest.raises(ValueError, match=r"type 'swin' \(SwinModel\).* Supported model types are .*\bvit\b"):
            model_class.from_pretrained(tmp_path / "swin")
    build().save_pretrained(tmp_path)
    shape = rf"{tmp_path}.*embeddings\.cls_token is \(1, 1, 32\) in the checkpoint and \(1, 1, 64\) in the model"
    for options, message in (
        ({"hidden_size": 64, "num_labels": 3}, shape),
        ({"intermediate_size": 40}, r"mlp\.fc1\.bias is \(48,\) in the checkpoint and \(40,\) in the model"),
        ({"num_attention_heads": 5}, "not divisible by num_attention_heads=5"),
    ):
        with pytest.raises(ValueError, match=message):
            HfViTModel.from_pretrained(tmp_path, **options)
    assert HfViTModel.from_pretrained(tmp_path, intermediate_size=40, ignore_mismatched_sizes=True)


OVERRIDES = {
    "initialized randomly: encoder.layers.3": {"num_hidden_layers": 5},
    "initialized randomly: encoder.layers.0.mlp.down": {"use_gated_mlp": True},
    "initialized randomly: pre_norm": {"use_pre_layernorm": True},
    "initialized randomly: encoder.layers.0.attention.key_norm": {"use_qk_norm": True},
    "initialized randomly: encoder.layers.0.layer_scale1": {"layerscale_value": 1.0},
    "initialized randomly: encoder.layers.0.attention.query_bias": {"key_bias": False},
    "not used: encoder.layers.0.norm1.bias": {"norm_type": "rmsnorm"},
    "not used: embeddings.position_embeddings": {"position_embedding_type": "none"},
    r"embeddings.cls_token is \(1, 1, 32\) in the checkpoint": {"hidden_size": 64},
}


@pytest.mark.thinned(7)
@pytest.mark.parametrize("problem", OVERRIDES)
@all_classes
def test_overrides_that_add_or_drop_backbone_weights_raise(
    model_class: type[Any], problem: str, tmp_path: Path
) -> None:
    model_class(small_config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=problem.replace(": ", r": (model\.)?")):
        model_class.from_pretrained(tmp_path, **OVERRIDES[problem])
    model_class.from_pretrained(tmp_path, **OVERRIDES[problem], ignore_mismatched_sizes=True)


@pytest.mark.parametrize("model_class", NOT_DENSE_CLASSES, ids=name_of)
def test_overrides_may_add_a_mask_token_and_drop_the_last_blocks(model_class: type[Any], tmp_path: Path) -> None:
    model = model_class(small_config())
    model.save_pretrained(tmp_path)
    assert model_class.from_pretrained(tmp_path, use_mask_token=True).base_model.embeddings.mask_token is not None
    shorter = model_class.from_pretrained(tmp_path, num_hidden_layers=2)
    assert_same_weights(model.base_model.encoder.layers[1], shorter.base_model.encoder.layers[1])


def test_auto_classes_give_ours_once_imported(tmp_path: Path) -> None:
    model = build(HfViTForImageClassification)
    model.save_pretrained(tmp_path)
    HfViTImageProcessor.for_model(model.config).save_pretrained(tmp_path)
    for name, own in (
        ("AutoModel", HfViTModel),
        ("AutoModelForImageClassification", HfViTForImageClassification),
        ("AutoModelForMaskedImageModeling", HfViTForMaskedImageModeling),
        ("AutoImageProcessor", HfViTImageProcessor),
    ):
        assert isinstance(getattr(transformers, name).from_pretrained(tmp_path), own)
    assert isinstance(transformers.AutoBackbone.from_config(model.config), HfViTBackbone)
    photos = [Image.new("RGB", (40, 30), color) for color in ("red", "green", "blue")]
    classify = transformers.pipeline("image-classification", model=str(tmp_path), top_k=1)
    inputs = classify.image_processor(photos, return_tensors="pt")
    expected = [model.config.id2label[int(i)] for i in model(**inputs).logits.argmax(1)]
    assert [answer[0]["label"] for answer in classify(photos, batch_size=2)] == expected


@all_variants
def test_initialization_covers_every_weight(variant: str) -> None:
    config = small_config(variant, hidden_size=64, initializer_range=0.05)
    built = HfViTForImageClassification(config)
    # from_pretrained builds the model on the meta device and then initializes weights that are missing from the
    # checkpoint. Here, all weights are missing.
    loaded = HfViTForImageClassification.from_pretrained(None, config=config, state_dict={})
    for model in (built, loaded):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor = tensor.detach()
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "bias" or leaf.endswith("_bias") or leaf == "mask_token":
                assert not tensor.any(), name
            # The head has a separate standard deviation, because all gradients of the blocks pass through it.
            elif "classifier" in name:
                assert float(tensor.std()) == pytest.approx(tensor.shape[1] ** -0.5, rel=4 / math.sqrt(tensor.numel()))
            elif "norm" in name:
                assert (tensor == 1).all(), name
            elif "layer_scale" in name:
                assert (tensor == config.layerscale_value).all(), name
            elif name in dict(model.named_buffers()):
                assert torch.equal(tensor, model.model.embeddings.sincos_table()), name
            else:
                assert tensor.abs().max() <= 2, name
                assert abs(tensor.mean()) < 5 * 0.05 / math.sqrt(tensor.numel()), name
                assert tensor.std() == pytest.approx(0.05, rel=4 / math.sqrt(tensor.numel())), name


@pytest.mark.thinned(5)
@needs_chosen_states
@pytest.mark.parametrize("chosen", [[1, -1], [0], 2, (-4, 9)], ids=str)
@pytest.mark.parametrize("apply_layernorm", [True, False])
@all_classes
def test_chosen_hidden_states(model_class: type[Any], apply_layernorm: bool, chosen: Any) -> None:
    model = build(model_class, apply_layernorm=apply_layernorm)
    images = pixels(model.config)
    states = model(images, output_hidden_states=True).hidden_states
    numbers = [chosen] if isinstance(chosen, int) else chosen
    kept = {number % 4 for number in numbers if number < 4}  # hidden states before and after each of three blocks
    found = model(images, output_hidden_states=chosen).hidden_states
    assert [state is not None for state in found] == [number in kept for number in range(4)]
    assert all(torch.equal(found[number], states[number]) for number in kept)


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_attentions_under_every_implementation(
    implementation: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("transformers", "hf_vit"):
        monkeypatch.setattr(logging.getLogger(library), "propagate", True)
    logging_of_the_library.get_logger("hf_vit").warning_once.__func__.cache_clear()
    model = build(attn_implementation=implementation)
    images, mask = pixels(model.config), torch.ones(2, 4, 4, dtype=torch.bool)
    expected = build(attn_implementation="eager")(images, output_attentions=True, output_hidden_states=True)
    assert torch.equal(model.norm(expected.hidden_states[-1]), expected.last_hidden_state)
    mask[0, 3] = False
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(model(images, output_attentions=True, output_hidden_states=True), expected)
            masked = model(images, output_attentions=True, patch_attention_mask=mask)
    assert masked.attentions[0][0, :, :, 13:].abs().max() == 0
    model.config.output_attentions = True
    assert len(model(images).attentions) == len(build(output_attentions=True)(images).attentions) == 3
    warned = [r for r in caplog.records if implementation in r.getMessage() and "eager" in r.getMessage()]
    assert len(warned) == 1


@pytest.mark.thinned(7)
@all_classes
@all_variants
@pytest.mark.parametrize("implementation", ["sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_padded_equals_unpadded(model_class: type[Any], variant: str, implementation: str) -> None:
    model = build(model_class, variant, attn_implementation=implementation)
    if implementation == "flex_attention" and model_class is HfViTForUniversalSegmentation:
        model.anneal_masks(1.0)  # flex attention does not support a mask per query
    config, grids = model.config, [(2, 5), (4, 3), (4, 5)]
    images = [pixels(config, batch=1, grid=grid) for grid in grids]
    batch, mask = checks.pad_images(images, config.patch_size)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        padded = model(batch, patch_attention_mask=mask)
        for index, image in enumerate(images):
            for a, p in zip(values(model(image)), values(padded), strict=True):
                actual = p[index]
                # Outputs of patch tokens and prefix tokens are selected without padding.
                if actual.ndim == 2 and actual.shape[1] == config.hidden_size:
                    others = torch.ones(len(actual) - mask[index].numel(), dtype=torch.bool)
                    before, after = others.split([config.num_prefix_tokens, len(others) - config.num_prefix_tokens])
                    actual = actual[torch.cat((before, mask[index].flatten(), after))]
                elif actual.ndim > 1 and actual.shape != a[0].shape:  # attention maps and patch maps
                    actual = actual[..., : a.shape[-2], : a.shape[-1]]
                    assert a.shape[-2] * 4 == p.shape[-2] * grids[index][0]
                assert_close(actual, a[0], 3e-5, f"image {index}")


def test_masked_patches_and_interpolate_pos_encoding_do_not_affect_outputs() -> None:
    model = build(variant="mask")
    images = pixels(model.config)
    mask = torch.arange(16).expand(2, -1) == 5  # selects the patch in row 1 and column 1
    changed = images.clone()
    changed[:, :, 8:16, 8:16] += 1
    assert_same(model(changed, bool_masked_pos=mask), model(images, bool_masked_pos=mask))
    assert not torch.equal(model(changed).last_hidden_state, model(images).last_hidden_state)
    with pytest.raises(ValueError, match=r"\(2, 16\), not \(2, 9\)"):
        model(images, bool_masked_pos=torch.zeros(2, 9))
    images = pixels(model.config, grid=(5, 3))
    for flag in (None, True, False):
        assert_same(model(images, interpolate_pos_encoding=flag), model(images))


def test_golden_outputs() -> None:
    """Outputs and gradients must equal those saved by `python -m tests.helpers.golden`."""
    actual = golden_values()
    assert actual.keys() == GOLDEN.keys()
    for name, value in actual.items():
        # Results of torch releases differ slightly, because they round differently when they resample positions in
        # float32.
        assert value == pytest.approx(GOLDEN[name], rel=1e-6, abs=1e-8), name


@pytest.mark.thinned(7)
@pytest.mark.parametrize("kind", [*MODEL_CLASSES, *MASKED, *checks.TOWERS], ids=name_of)
@all_variants
@both_reentrant
def test_gradient_checkpointing_changes_nothing(kind: Any, variant: str, reentrant: bool) -> None:
    model = build(kind, variant, drop_path_rate=0.0)
    given = {"pixel_values": pixels(model.config)} if kind in MODEL_CLASSES else inputs_of(model)
    checks.check_checkpointing(model, given, reentrant)


@pytest.mark.parametrize(
    ("model_class", "variant", "options"),
    [
        (HfViTModel, "siglip", {"window_size": 2, "global_attention_layers": [1]}),
        (HfViTModel, "rotary", {}),
        (HfViTBackbone, "sincos", {"attn_implementation": "eager"}),
        (HfViTForImageClassification, "registers", {"attn_implementation": "eager"}),
    ],
    ids=["windows", "rotary", "sincos", "registers"],
)
def test_compiles_whole_and_once_per_size(model_class: type[Any], variant: str, options: dict[str, Any]) -> None:
    model = build(model_class, variant, num_hidden_layers=2, **options)
    grids = ((4, 4), (3, 5)) if variant in ("siglip", "registers") else ((3, 5),)
    sizes = [{"pixel_values": pixels(model.config, grid=grid)} for grid in grids]
    returns_all = "attn_implementation" in options
    checks.check_compiled(model, sizes, output_hidden_states=returns_all, output_attentions=returns_all)


def test_compiles_with_a_partial_patch_mask() -> None:
    model = build(variant="rms", num_hidden_layers=2)
    torch.compiler.reset()
    with torch.no_grad():
        given = {"pixel_values": pixels(model.config), "patch_attention_mask": checks.partial_mask()}
        assert_same(torch.compile(model, backend="aot_eager")(**given), model(**given), 1e-5)


def test_compiled_training_equals_eager() -> None:
    model = build(HfViTForImageClassification, num_hidden_layers=2).train()
    given = {"pixel_values": pixels(model.config), "labels": torch.tensor([0, 3])}
    torch.compiler.reset()
    expected = training_gradients(model, **given)
    training_gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), **given)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], 1e-5, name)


def test_mean_of_many_patches_does_not_overflow() -> None:
    model = build(pooling="mean")
    states = torch.full((1, 1 + 70 * 70, 32), 20.0, dtype=torch.float16)
    mask = torch.ones(1, 70, 70, dtype=torch.bool)
    assert torch.equal(model.pool(states, mask), model.pool(states))
    assert (model.pool(states, mask) == 20).all()


@pytest.mark.thinned(5)
@classes_and_masked
@pytest.mark.parametrize("variant", ["plain", "registers", "rotary", "sincos", "siglip", "windows"])
def test_runs_spread_over_devices(kind: Any, variant: str, tmp_path: Path) -> None:
    model = build(kind, variant)
    checks.check_spread(model, inputs_of(model, grid=(3, 5)), tmp_path)


def test_encoder_runs_a_range_of_blocks_and_does_not_rotate_queries() -> None:
    model = build(variant="rotary")
    images = pixels(model.config)
    tokens, rotary = model.embeddings(images), model.embeddings.rotary(images)
    expected = model.encoder(tokens, rotary=rotary)
    halfway = model.encoder(tokens, rotary=rotary, stop=2)
    assert torch.equal(model.encoder(halfway, rotary=rotary, start=2), expected)
    assert torch.equal(model.encoder(tokens, rotary=rotary, start=1, stop=1), tokens)
    # Queries after the patch tokens get no rotary positions, so their order has no effect.
    queries = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    outputs = model.encoder(torch.cat((tokens, queries), dim=1), rotary=rotary)
    swapped = model.encoder(torch.cat((tokens, queries.flip(1)), dim=1), rotary=rotary)
    assert_close(swapped[:, -3:].flip(1), outputs[:, -3:], 1e-5, "queries")
    assert_close(swapped[:, :-3], outputs[:, :-3], 1e-5, "image tokens")


@pytest.mark.parametrize("option", ["hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"])
def test_dropout_acts_in_training_only(option: str) -> None:
    images = pixels(small_config())
    for implementation in ("eager", "sdpa"):
        model = build(attn_implementation=implementation, **{option: 0.5})
        assert_same(model(images), model(images))
        model.train()
        assert not torch.equal(model(images).last_hidden_state, model(images).last_hidden_state)


def test_backbone_stages_and_options() -> None:
    backbone = build(HfViTBackbone, "registers", out_features=["stem", "stage2", "stage3"])
    images = pixels(backbone.config, grid=(3, 5))
    outputs = backbone(images, output_hidden_states=True)
    assert backbone.channels == [32, 32, 32]
    assert backbone.out_indices == backbone.config.out_indices == [0, 2, 3]
    for index, feature_map in zip((0, 2, 3), outputs.feature_maps, strict=True):
        # The first patch token follows the CLS, distillation and two register tokens.
        expected = backbone.model.norm(outputs.hidden_states[index])[:, 4:]
        for row, column in itertools.product(range(3), range(5)):
            assert torch.equal(feature_map[:, :, row, column], expected[:, row * 5 + column])
    backbone = build(HfViTBackbone, apply_layernorm=False, reshape_hidden_states=False, out_indices=[1, -1])
    outputs = backbone(images, output_hidden_states=True)
    assert all(map(torch.equal, outputs.feature_maps, outputs.hidden_states[1::2]))
    for choose in (backbone.config, backbone):
        choose.out_indices = [2]
        assert torch.equal(backbone(images).feature_maps[0], outputs.hidden_states[2])
        choose.out_features = ["stage1"]
        assert torch.equal(backbone(images).feature_maps[0], outputs.hidden_states[1])


def test_backbone_has_no_weights_of_the_pooling(tmp_path: Path) -> None:
    for variant in ("siglip", "eva"):
        model = build(HfViTForImageClassification, variant, out_indices=[1, 3])
        model.save_pretrained(tmp_path / variant)
        backbone, info = HfViTBackbone.from_pretrained(tmp_path / variant, output_loading_info=True)
        assert not info["missing_keys"]
        pooling = "model.attention_pooling." if variant == "siglip" else "model.norm."
        assert {name.startswith((pooling, "classifier.")) for name in info["unexpected_keys"]} == {True}
        assert backbone.model(pixels(model.config)).pooler_output is None
    outputs = backbone(pixels(model.config), output_hidden_states=True)
    for index, feature_map in zip((1, 3), outputs.feature_maps, strict=True):
        assert torch.equal(feature_map.flatten(2).transpose(1, 2), outputs.hidden_states[index][:, 1:])
    normed = HfViTBackbone.from_pretrained(tmp_path / "eva", norm_after_pooling=False)
    assert torch.equal(normed.model.norm.weight, model.model.norm.weight)


@pytest.mark.thinned(7)
@all_classes
@all_variants
def test_every_weight_gets_a_gradient_and_moves(model_class: type[Any], variant: str) -> None:
    model = build(model_class, variant, drop_path_rate=0.0).train()
    images = pixels(model.config, batch=4)
    if variant == "mask":
        embeddings = model.base_model.embeddings
        masked = torch.zeros(4, 16, dtype=torch.bool)
        masked[:, ::3] = True
        embed = embeddings.forward
        embeddings.forward = lambda pixel_values, _, mask: embed(pixel_values, masked, mask)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(2):
        training_gradients(model, images * (1 + step))
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@all_variants
def test_overfits_one_batch_from_its_own_initialization(variant: str) -> None:
    torch.manual_seed(0)
    model = HfViTForImageClassification(small_config(variant, drop_path_rate=0.0))
    images, labels = pixels(model.config, batch=5), torch.arange(5)
    losses = checks.train(model, {"pixel_values": images, "labels": labels}, steps=30, max_lr=8e-3)
    # Initial predictions are close to uniform.
    assert losses[0] < math.log(5) + 2
    assert losses[-1] < 0.05
    assert (model(images).logits.argmax(1) == labels).all()


def test_classes_define_the_attributes_that_transformers_reads() -> None:
    supported = ("sdpa", "flash_attn", "flex_attn", "attention_backend")
    for model_class in MODEL_CLASSES:
        assert issubclass(model_class, HfViTPreTrainedModel)
        assert model_class.main_input_name == "pixel_values"
        # None of our losses is divided by the item count that the Trainer passes.
        assert model_class.accepts_loss_kwargs is False
        takes_count = "num_items_in_batch" in inspect.signature(model_class.forward).parameters
        assert takes_count is ("count_items" in vars(model_class))
        assert all(getattr(model_class, f"_supports_{name}") for name in supported)
        assert model_class._can_compile_fullgraph
        assert isinstance(build(model_class).get_input_embeddings(), nn.Module)


def test_loading_restores_the_state_of_the_garbage_collector(tmp_path: Path) -> None:
    HfViTModel(small_config()).save_pretrained(tmp_path)
    for switch in (gc.disable, gc.enable):
        switch()
        HfViTModel.from_pretrained(tmp_path)
        assert gc.isenabled() == (switch is gc.enable)
        with pytest.raises(OSError, match="nowhere"):
            HfViTModel.from_pretrained(tmp_path / "nowhere")
        assert gc.isenabled() == (switch is gc.enable)
