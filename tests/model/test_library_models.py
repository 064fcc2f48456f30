"""Test training, saving and loading of transformers models that use our encoder, with and without the package."""

import copy
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import BertConfig, DetrConfig, GPT2Config, LlamaConfig, PreTrainedModel

from hf_vit import HfViTBackbone, HfViTConfig, HfViTModel

from ..helpers.fresh import ROOT, run_without_package
from ..helpers.hub import serve
from ..helpers.models import small_config


README = (ROOT / "hf_vit" / "README.md").read_text(encoding="utf-8")
(SECTION,) = re.findall(r"^### Inside other models$(.*?)(?=^##)", README, flags=re.DOTALL | re.MULTILINE)

SIZES: dict[str, Any] = {"image_size": 64, "patch_size": 16, "num_hidden_layers": 4}
STAGES: dict[str, Any] = {"out_indices": [1, 2, 3, 4]}
TOKENS: dict[str, Any] = {**STAGES, "reshape_hidden_states": False}
KEYPOINTS: dict[str, Any] = {"reshape_hidden_states": False, "use_cls_token": False, "pooling": "mean"}
KEYPOINTS |= {"image_size": [64, 64], "patch_size": [16, 16]}

DETR: dict[str, Any] = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
DETR |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
DETR |= {"d_model": 32, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 5}
MASKS: dict[str, Any] = {"mask_feature_size": 32, "fpn_feature_size": 32, "decoder_config": DetrConfig(**DETR)}
MASKS_2: dict[str, Any] = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 32)
MASKS_2 |= dict.fromkeys(("encoder_layers", "decoder_layers", "num_attention_heads"), 2)
MASKS_2 |= {"encoder_feedforward_dim": 16, "dim_feedforward": 16, "num_queries": 5, "train_num_points": 40}
DPT: dict[str, Any] = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
ANYTHING = {**DPT, "patch_size": 16, "reassemble_hidden_size": 32, "head_hidden_size": 8}
ZOE = {**DPT, **dict.fromkeys(("bottleneck_features", "bin_embedding_dim", "num_relative_features"), 8)}
MATTE: dict[str, Any] = {"hidden_size": 32, "convstream_hidden_sizes": [8] * 3, "fusion_hidden_sizes": [8] * 4}
BERT = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GPT2 = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, is_decoder=True, add_cross_attention=True)
CAPTIONER = {"decoder": GPT2.to_dict(), "decoder_start_token_id": 0, "pad_token_id": 0}
LLAVA = {"text_config": LlamaConfig(**BERT), "image_token_index": 19, "vision_feature_layer": -1}

TEXTS = torch.tensor([[1, 2], [3, 4]])
MAPS = {"labels": torch.arange(2 * 64 * 64).reshape(2, 64, 64) % 3}
BOXES = {"labels": [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.4]])}] * 2}
SEGMENTS = {"mask_labels": [torch.eye(64).repeat(2, 1, 1)] * 2, "class_labels": [torch.tensor([0, 2])] * 2}
ANSWERS = {
    "input_ids": torch.cat((torch.full((2, 16), 19), TEXTS), dim=1),
    "labels": torch.cat((torch.full((2, 16), -100), TEXTS), dim=1),
}


class Case(NamedTuple):
    """Test case for a transformers class: options of our encoder, configuration fields, and non-image inputs."""

    options: dict[str, Any]
    fields: dict[str, Any]
    inputs: dict[str, Any]
    field: str = "backbone_config"


UPERNET = "UperNetForSemanticSegmentation"
CASES = {
    UPERNET: Case(STAGES, {"hidden_size": 16, "auxiliary_channels": 8, "auxiliary_in_channels": 32}, MAPS),
    "MaskFormerForInstanceSegmentation": Case(STAGES, MASKS, SEGMENTS),
    "Mask2FormerForUniversalSegmentation": Case(STAGES, MASKS_2, SEGMENTS),
    "DeformableDetrForObjectDetection": Case(STAGES, DETR, BOXES),
    "DetrForObjectDetection": Case({}, DETR, BOXES),
    "ConditionalDetrForObjectDetection": Case({}, DETR, BOXES),
    "DPTForDepthEstimation": Case(TOKENS, DPT, {}),
    "DepthAnythingForDepthEstimation": Case(TOKENS, ANYTHING, {}),
    "PromptDepthAnythingForDepthEstimation": Case(TOKENS, ANYTHING, {}),
    "ZoeDepthForDepthEstimation": Case(TOKENS, ZOE, {}),
    "VitMatteForImageMatting": Case({"num_channels": 4}, MATTE, {}),
    "VitPoseForPoseEstimation": Case(KEYPOINTS, {}, {}),
    "LlavaForConditionalGeneration": Case({}, LLAVA, ANSWERS, "vision_config"),
    "VisionEncoderDecoderModel": Case({}, CAPTIONER, {"labels": TEXTS}, "encoder"),
    "VisionTextDualEncoderModel": Case(
        {}, {"text_config": BertConfig(**BERT).to_dict()}, {"input_ids": TEXTS, "return_loss": True}, "vision_config"
    ),
}

UNSUPPORTED = ("DPTForSemanticSegmentation", "RTDetrForObjectDetection")


def make_model(name: str, **options: Any) -> PreTrainedModel:
    model_class, case = getattr(transformers, name), CASES[name]
    encoder: Any = small_config(**{**SIZES, **case.options, **options})
    if name.startswith("Vision"):  # these classes accept the encoder configuration only as a dictionary
        encoder = encoder.to_dict()
    fields = copy.deepcopy(case.fields)  # transformers 5.17 removes entries
    return model_class(model_class.config_class(**{case.field: encoder}, num_labels=3, **fields))


def make_inputs(name: str) -> dict[str, Any]:
    channels = CASES[name].options.get("num_channels", 3)
    images = torch.randn(2, channels, 64, 64, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": images, **CASES[name].inputs}


def find_encoder(model: nn.Module) -> HfViTBackbone | HfViTModel:
    return next(module for module in model.modules() if isinstance(module, (HfViTBackbone, HfViTModel)))


def first_output(outputs: Any) -> Tensor:
    """Return the predictions, which are the first model output after the losses."""
    return next(value for key, value in outputs.items() if not key.startswith("loss"))


def train_and_save(name: str, folder: Path) -> tuple[PreTrainedModel, set[str]]:
    """Train a model for one step and save it. Return the model and the encoder weights that did not change."""
    model = make_model(name)
    encoder = find_encoder(model)
    before = {key: weight.clone() for key, weight in encoder.named_parameters()}
    outputs = model.train()(**make_inputs(name))
    loss = outputs.get("loss")
    (first_output(outputs).square().mean() if loss is None else loss).backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    encoder.config.save_pretrained(folder)
    model.eval().save_pretrained(folder)
    return model, {key for key, weight in encoder.named_parameters() if weight.equal(before[key])}


@pytest.mark.parametrize("name", CASES)
def test_the_encoder_learns_and_the_model_reopens(name: str, tmp_path: Path) -> None:
    model, unmoved = train_and_save(name, tmp_path)
    unused = {"norm.weight", "norm.bias"} if name.startswith("Llava") else set()  # Llava does not use the final norm
    assert unmoved == unused
    reopened = type(model).from_pretrained(tmp_path)
    assert type(find_encoder(reopened).config) is HfViTConfig
    with torch.no_grad():
        expected, actual = (first_output(opened(**make_inputs(name))) for opened in (model, reopened))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_saved_encoder_may_have_fields_of_another_version(name: str, tmp_path: Path) -> None:
    config, field = make_model(name).config, CASES[name].field
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    saved[field] |= {"num_hidden_layer": 3, "field_of_a_later_version": 4}  # the first name resembles a field
    file.write_text(json.dumps(saved))
    encoder = vars(type(config).from_pretrained(tmp_path))[field]
    assert (type(encoder), encoder.num_hidden_layer, encoder.field_of_a_later_version) == (HfViTConfig, 3, 4)
    assert encoder.num_hidden_layers == vars(config)[field].num_hidden_layers


FRESH = """
from transformers import AutoModel, CONFIG_MAPPING
from transformers.dynamic_module_utils import get_class_from_dynamic_module

model_class = get_class_from_dynamic_module("modeling_hf_vit.HfViTModel", "user/segmenter")
assert "hf_vit" not in CONFIG_MAPPING  # otherwise the code of other checkpoints would be ignored
names = {{}}
exec({block!r}, names)
AutoModel.register(names["backbone"].config_class, model_class)
with torch.no_grad():
    for name, (folder, inputs, expected) in torch.load("saved.pt", weights_only=True).items():
        model = getattr(transformers, name).from_pretrained(folder)
        outputs = model(**inputs)
        assert torch.equal(next(v for k, v in outputs.items() if not k.startswith("loss")), expected), name
        ours = {{type(module) for module in model.modules()}} & {{model_class, names["backbone"]}}
        assert len(ours) > 0 and all(found.__module__.startswith("transformers_modules") for found in ours), name
names["model"].config.backbone_config.save_pretrained("again")
names["model"].save_pretrained("again")
assert get_class_from_dynamic_module("modeling_hf_vit.HfViTBackbone", "again").__name__ == "HfViTBackbone"
"""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("part", range(3))
def test_all_models_open_without_the_package(part: int, tmp_path: Path) -> None:
    saved = {}
    for name in dict.fromkeys([UPERNET, *[*CASES][part::3]]):
        folder = tmp_path / "user" / name
        model, _ = train_and_save(name, folder)
        with torch.no_grad():
            saved[name] = (str(folder), make_inputs(name), first_output(model(**make_inputs(name))))
    shutil.copytree(tmp_path / "user" / UPERNET, tmp_path / "user" / "segmenter")
    (tmp_path / "work").mkdir()
    torch.save(saved, tmp_path / "work" / "saved.pt")
    (block,) = re.findall(r"^```python network\n(.*?)^```$", SECTION, flags=re.DOTALL | re.MULTILINE)
    with serve(tmp_path) as hub:
        run_without_package(FRESH.format(block=block), tmp_path / "work", **hub.client)


def test_a_trained_encoder_takes_the_place_of_the_untrained_one(tmp_path: Path) -> None:
    HfViTModel(small_config(**SIZES)).save_pretrained(tmp_path / "encoder")
    model = make_model(UPERNET)
    model.backbone = HfViTBackbone.from_pretrained(tmp_path / "encoder", **STAGES)
    model.save_pretrained(tmp_path / "segmenter")
    reopened = find_encoder(type(model).from_pretrained(tmp_path / "segmenter")).state_dict()
    trained = HfViTBackbone.from_pretrained(tmp_path / "encoder").state_dict()
    assert all(torch.equal(reopened[name], weight) for name, weight in trained.items())


def test_models_that_do_not_work_fail_as_the_table_states() -> None:
    config = small_config(**SIZES, **TOKENS)
    segmenter = transformers.DPTForSemanticSegmentation(transformers.DPTConfig(backbone_config=config, **DPT))
    assert not [module for module in segmenter.modules() if isinstance(module, HfViTBackbone)]
    sizes = {"encoder_in_channels": [32] * 3, "encoder_hidden_dim": 32, "decoder_in_channels": [32] * 3}
    config = small_config(**SIZES, out_indices=[2, 3, 4])
    detector = transformers.RTDetrForObjectDetection(
        transformers.RTDetrConfig(backbone_config=config, **sizes, **{**DETR, "encoder_layers": 1})
    )
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        detector(torch.zeros(1, 3, 64, 64))


def test_the_table_lists_the_tested_models_and_options() -> None:
    listed = {}
    for row in re.findall(r"^\| (`.*)$", SECTION, flags=re.MULTILINE):
        names, options, *_ = row.split(" | ")
        found = set(re.findall(r"`(\w+)=", options))
        listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), found)
    working = {name: set(case.options) for name, case in CASES.items()}
    assert listed == working | {name: set() for name in UNSUPPORTED}


def test_the_script_trains_llava_to_name_colors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(ROOT / "scripts" / "llava.py"))
    assert torch.equal(names["answers"], names["colors"])
