"""Test loading published checkpoints in all file formats, with changed arguments, and errors for unsupported ones."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from hf_vit import HfViTBackbone, HfViTForImageClassification, HfViTModel
from hf_vit.convert.loading import convert_checkpoint
from hf_vit.convert.source import open_source
from hf_vit.model.adapt_inputs import apply_geometry

from ..helpers.models import MODEL_CLASSES, small_config
from ..helpers.references import SHAPE, draw_weights
from .comparisons import assert_same_weights, reconfigure
from .sources import DINOV2


WEIGHTS = "model.safetensors"


def make_vit(**options):
    torch.manual_seed(0)
    vit = hf.ViTForImageClassification(hf.ViTConfig(**SHAPE, **{"num_labels": 5, **options})).eval()
    draw_weights(vit)
    return vit


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a classifier saved by transformers."""
    make_vit().save_pretrained(tmp_path / "published")
    return tmp_path / "published"


def rewrite(folder, **changes):
    """Replace tensors in the weight file of a folder. A tensor that is replaced with None is removed."""
    tensors = {**load_file(folder / WEIGHTS), **changes}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_shards_pickles_and_files_open_too(folder, tmp_path):
    expected = HfViTForImageClassification.from_pretrained(folder)
    make_vit().save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for place in (tmp_path / "shards", folder / WEIGHTS):  # the config.json next to a weight file is used
        assert_same_weights(HfViTForImageClassification.from_pretrained(place), expected)
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    assert_same_weights(HfViTForImageClassification.from_pretrained(folder), expected)


def test_converted_model_saves_as_hf_vit_in_the_file_or_given_dtype(folder, tmp_path):
    model = HfViTForImageClassification.from_pretrained(folder)
    model.save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "hf_vit"
    assert_same_weights(HfViTForImageClassification.from_pretrained(tmp_path / "ours"), model)
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16)):
        assert HfViTModel.from_pretrained(folder, dtype=dtype).dtype == expected
    make_vit().bfloat16().save_pretrained(folder)
    assert {parameter.dtype for parameter in HfViTModel.from_pretrained(folder).parameters()} == {torch.bfloat16}


def test_the_load_report_names_the_converted_checkpoint(folder, caplog):
    HfViTForImageClassification.from_pretrained(folder, num_labels=7)
    (report,) = (message for record in caplog.records if "LOAD REPORT" in (message := record.getMessage()))
    assert f" from: {folder}\n" in report
    state = HfViTModel.from_pretrained(folder).state_dict()
    HfViTForImageClassification.from_pretrained(None, config=small_config(), state_dict=state)
    assert " from: the given weights\n" in caplog.records[-1].getMessage()


def test_labels_are_kept_and_changed_labels_reinitialize_the_head(folder):
    for labels in ({"num_labels": 7}, {"id2label": dict(enumerate("abcdefg"))}):
        model, info = HfViTForImageClassification.from_pretrained(folder, output_loading_info=True, **labels)
        assert {name for name, *_ in info["mismatched_keys"]} == {"classifier.weight", "classifier.bias"}
        assert (model.classifier.weight.shape, model.config.num_labels) == ((7, 32), 7)
        assert float(model.classifier.weight.detach().std()) == pytest.approx(32**-0.5, rel=0.3)
        assert_same_weights(model.model, HfViTModel.from_pretrained(folder))
    names = dict(enumerate("abcde"))
    reconfigure(folder, id2label=names, label2id={name: index for index, name in names.items()})
    assert HfViTForImageClassification.from_pretrained(folder).config.id2label == names
    config = json.loads((folder / "config.json").read_text())
    unnamed = {name: value for name, value in config.items() if name not in ("id2label", "label2id")}
    # A config.json without id2label is valid.
    (folder / "config.json").write_text(json.dumps({**unnamed, "num_labels": 5}))
    model = HfViTForImageClassification.from_pretrained(folder)
    assert (model.config.num_labels, model.classifier.out_features) == (5, 5)


def test_the_classifier_of_clip_is_left_out_with_its_labels(tmp_path, caplog):
    config = hf.CLIPConfig(vision_config=SHAPE, text_config={"num_hidden_layers": 1}, num_labels=5)
    hf.CLIPForImageClassification(config).save_pretrained(tmp_path)
    model = HfViTForImageClassification.from_pretrained(tmp_path)
    assert "classifier of CLIPForImageClassification and its labels are not loaded" in caplog.text
    assert (model.config.num_labels, model.config.id2label) == (2, {0: "LABEL_0", 1: "LABEL_1"})


def test_stages_and_fields_are_chosen_by_arguments(tmp_path):
    hf.Dinov2Backbone(hf.Dinov2Config(**DINOV2, out_indices=[1, 2])).save_pretrained(tmp_path)
    assert HfViTBackbone.from_pretrained(tmp_path).out_indices == [1, 2]
    assert HfViTBackbone.from_pretrained(tmp_path, out_indices=[0]).out_features == ["stem"]
    assert HfViTBackbone.from_pretrained(tmp_path, out_features=["stage1"]).out_indices == [1]
    hf.Dinov2Model(hf.Dinov2Config(**DINOV2)).save_pretrained(tmp_path)
    options = {"output_attentions": True, "output_hidden_states": True, "attn_implementation": "eager"}
    model = HfViTModel.from_pretrained(tmp_path, num_hidden_layers=1, drop_path_rate=0.1, **options)
    outputs = model(torch.zeros(1, 3, 32, 32))
    assert (len(outputs.attentions), len(outputs.hidden_states)) == (1, 2)
    assert (model.config.drop_path_rate, model.config._attn_implementation) == (0.1, "eager")
    whole = HfViTModel.from_pretrained(tmp_path)(torch.zeros(1, 3, 32, 32), output_hidden_states=True)
    torch.testing.assert_close(outputs.hidden_states[1], whole.hidden_states[1])


def test_buffers_of_older_releases_are_left_out(tmp_path):
    hf.CLIPVisionModel(hf.CLIPVisionConfig(**SHAPE)).save_pretrained(tmp_path)
    expected = HfViTModel.from_pretrained(tmp_path)
    tensors = {f"vision_model.{name}": tensor for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    tensors["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(tensors, tmp_path / WEIGHTS)
    assert_same_weights(HfViTModel.from_pretrained(tmp_path), expected)


def test_tensors_that_do_not_fit_are_named(folder):
    name = "vit.encoder.layer.1.output.dense.bias"
    rewrite(folder, **{name: None, "vit.stray": torch.zeros(1)})
    message = rf"{WEIGHTS}.*Missing: encoder\.layer\.1\.output\.dense\.bias\. Left over: vit\.stray\."
    with pytest.raises(ValueError, match=message):
        HfViTModel.from_pretrained(folder)
    rewrite(folder, **{name: torch.zeros(7), "vit.stray": None})
    with pytest.raises(ValueError, match=rf"{WEIGHTS}': '{name}' \(7,\) .* of shape \(7,\), but .* requires \(32,\)"):
        HfViTModel.from_pretrained(folder)
    query = "vit.encoder.layer.1.attention.attention.query.weight"
    rewrite(folder, **{name: torch.zeros(32), query: torch.zeros(32, 7)})
    message = rf"{WEIGHTS}': '{query}' \(32, 7\), .* cannot be converted to encoder.layers.1.attention.qkv"
    with pytest.raises(ValueError, match=message):
        HfViTModel.from_pretrained(folder)


def test_a_bad_configuration_is_named(folder, tmp_path):
    hf.ViTModel(hf.ViTConfig(**SHAPE)).save_pretrained(tmp_path / "pooled")
    reconfigure(tmp_path / "pooled", hidden_size="32")
    with pytest.raises(ValueError, match=r"(?s)is invalid: .*hidden_size"):
        HfViTModel.from_pretrained(tmp_path / "pooled")
    for content, error, message in (
        ("{", OSError, "config.json"),
        ('{"hidden_size": 32}', ValueError, "model type None"),
        ('{"model_type": "vit", "hidden_size": "wide"}', ValueError, r"is invalid: .*hidden_size"),
        ('{"model_type": "vit", "num_attention_heads": 5}', ValueError, "num_attention_heads=5"),
        ('{"model_type": "vit", "image_size": "384"}', ValueError, r"is invalid: .*image_size"),
        ('{"model_type": "dinov2", "hidden_size": "32", "mlp_ratio": 2.0}', ValueError, "is invalid: .*hidden_size"),
    ):
        (folder / "config.json").write_text(content)
        with pytest.raises(error, match=rf"(?s){message}"):
            HfViTModel.from_pretrained(folder)


def test_files_that_are_damaged_or_not_there_are_named(folder, tmp_path):
    content = (folder / WEIGHTS).read_bytes()
    for damaged in (content[: len(content) // 2], content[:5], b""):
        (folder / WEIGHTS).write_bytes(damaged)
        with pytest.raises(OSError, match=rf"{WEIGHTS}' is damaged or truncated"):
            HfViTModel.from_pretrained(folder)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes(content[:100])
    with pytest.raises(OSError, match=r"pytorch_model\.bin'"):
        HfViTModel.from_pretrained(folder)
    make_vit().save_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(OSError, match=place.name):
            HfViTModel.from_pretrained(place)
    (folder / WEIGHTS).unlink()
    with pytest.raises(OSError, match=rf"'{folder}' contains no weights"):
        HfViTModel.from_pretrained(folder)
    make_vit().save_pretrained(folder, max_shard_size="40KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(OSError, match=shard.name):
        HfViTModel.from_pretrained(folder)


def test_arguments_that_do_not_fit_are_refused(folder, tmp_path):
    converted = convert_checkpoint(open_source(folder))
    assert (converted.model_class, converted.family.name) == (HfViTForImageClassification, "ViT")
    with pytest.raises(ValueError, match=r"has its own configuration. Remove config="):
        HfViTModel.from_pretrained(folder, config=converted.config)
    message = rf"'{folder}' do not fit: .*fc1\.bias is \(64,\) in .* \(40,\) in the model"
    for model_class in (HfViTModel, HfViTForImageClassification):
        with pytest.raises(ValueError, match=message):
            model_class.from_pretrained(folder, intermediate_size=40, num_labels=3)
    HfViTModel(small_config()).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"model\.safetensors' is a file of a checkpoint saved by.* Give its folder"):
        HfViTModel.from_pretrained(tmp_path / "ours" / WEIGHTS)


DENSE_CLASSES = MODEL_CLASSES[3:]
# Head options that are valid for an encoder with two blocks.
SMALL_HEADS = {
    "segmentation_config": {"hidden_size": 8},
    "universal_segmentation_config": {"num_blocks": 1, "num_queries": 5},
    "depth_config": {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8},
    "keypoint_config": {"hidden_size": 8},
}


@pytest.fixture(params=["own", "foreign"])
def registers(request, tmp_path):
    """Save a DINOv2 model with registers, in the published format or in the format of this package."""
    config = hf.Dinov2WithRegistersConfig(**DINOV2, num_register_tokens=2, num_labels=5)
    source = hf.Dinov2WithRegistersForImageClassification(config)
    draw_weights(source)
    source.save_pretrained(tmp_path / "foreign")
    HfViTForImageClassification.from_pretrained(tmp_path / "foreign").save_pretrained(tmp_path / "own")
    return tmp_path / request.param


@pytest.mark.thinned(8)
@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize(
    "geometry",
    [
        {"image_size": 48},
        {"image_size": (16, 40)},
        {"patch_size": 4},
        {"patch_size": 16, "image_size": 64},
        {"num_channels": 1},
        {"num_channels": 4},
        {"num_register_tokens": 0},
        {"num_channels": 1, "patch_size": 4, "image_size": 16, "num_register_tokens": 1},
    ],
    ids=str,
)
def test_geometry_changes_as_after_loading(model_class, geometry, registers):
    changed, info = model_class.from_pretrained(registers, output_loading_info=True, **geometry, **SMALL_HEADS)
    expected = model_class.from_pretrained(registers, **SMALL_HEADS)
    apply_geometry(expected, **geometry)
    fresh = info["missing_keys"]
    assert bool(fresh) == (model_class in DENSE_CLASSES)
    assert all(vars(changed.config)[name] == value for name, value in geometry.items())
    assert changed.state_dict().keys() == expected.state_dict().keys()
    state = changed.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items() if name not in fresh)
    assert all(not name.startswith("model.") for name in fresh)
    changed.save_pretrained(registers.parent / "changed")
    again = model_class.from_pretrained(registers.parent / "changed").state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.items())


def test_an_enlarged_image_under_enlarged_patches_looks_the_same(registers):
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).repeat_interleave(8, 2)
    images = images.repeat_interleave(8, 3)  # each patch has one color, so enlarging does not blur it
    enlarged = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    model = HfViTForImageClassification.from_pretrained(registers)
    larger = HfViTForImageClassification.from_pretrained(registers, patch_size=16, image_size=64)
    with torch.no_grad():
        torch.testing.assert_close(larger(enlarged).logits, model(images).logits, atol=1e-3, rtol=1e-3)
        gray = HfViTForImageClassification.from_pretrained(registers, num_channels=1)
        repeated = images[:, :1].repeat(1, 3, 1, 1)
        torch.testing.assert_close(gray(images[:, :1]).logits, model(repeated).logits, atol=1e-4, rtol=1e-4)


def test_registers_are_added_behind_the_old_ones_and_the_cls_token_goes_with_a_pooling_without_it(registers, tmp_path):
    before = HfViTModel.from_pretrained(registers).embeddings.register_tokens
    after = HfViTModel.from_pretrained(registers, num_register_tokens=5).embeddings.register_tokens
    assert torch.equal(after[:, :2], before)
    assert after.shape == (1, 5, 32)
    assert after[:, 2:].std() > 0
    with pytest.raises(ValueError, match="not a multiple of the patch"):
        HfViTModel.from_pretrained(registers, image_size=30)
    with pytest.raises(ValueError, match="needs the CLS token"):
        HfViTModel.from_pretrained(registers, use_cls_token=False)
    options = {"use_cls_token": False, "pooling": "mean", "num_labels": 3}
    model = HfViTForImageClassification.from_pretrained(registers, **options)
    assert model.model.embeddings.cls_token is None
    assert model(torch.zeros(1, 3, 32, 32)).logits.shape == (1, 3)
    # The option use_cls_token adds a CLS token, which pooling="cls" requires.
    hf.IJepaModel(hf.IJepaConfig(**SHAPE)).save_pretrained(tmp_path)
    model = HfViTModel.from_pretrained(tmp_path, use_cls_token=True, pooling="cls")
    outputs = model(torch.zeros(1, 3, 32, 32))
    assert torch.equal(outputs.pooler_output, outputs.last_hidden_state[:, 0])
    assert model.embeddings.position_embeddings.shape == (1, 17, 32)
