"""Test model configurations: errors for invalid values, and fields after saving and loading."""

import copy
import json
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from hf_vit import HfViTConfig, HfViTForDepthEstimation, HfViTModel
from hf_vit.model.remote_code import AUTO_MAP
from hf_vit.model.task_configurations import TASK_CONFIGS

from ..helpers.models import VARIANTS, small_config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 65}, r"hidden_size=65 is not divisible by num_attention_heads=12.*1, 5, 13"),
        ({"hidden_size": -8}, "hidden_size=-8 must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"intermediate_size": 0}, "intermediate_size=0 must be at least 1"),
        ({"num_channels": 0}, "num_channels=0 must be at least 1"),
        ({"num_register_tokens": -1}, "num_register_tokens=-1 must not be negative"),
        ({"patch_size": 256}, r"height 224 is not a multiple of the patch height 256.*values: 256"),
        ({"image_size": (224, 230)}, r"width 230 .* 224 or 240"),
        ({"image_size": (224, 224, 3)}, r"must be an int or \(height, width\)|type"),
        ({"image_size": 0}, "at least 1 pixel"),
        ({"patch_size": (16, -16)}, "at least 1 pixel"),
        ({"hidden_act": "swoosh"}, r"hidden_act='swoosh' is unknown. Choose one of .*gelu"),
        ({"hidden_dropout_prob": 1.0}, r"hidden_dropout_prob=1.0 must lie in \[0, 1\)"),
        ({"attention_probs_dropout_prob": -0.1}, "attention_probs_dropout_prob=-0.1"),
        ({"drop_path_rate": 1}, "drop_path_rate=1 must lie"),
        ({"drop_path_rate": float("nan")}, "drop_path_rate=nan must lie"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0 must be positive"),
        ({"initializer_range": float("inf")}, "initializer_range=inf"),
        ({"rope_theta": -1}, "rope_theta=-1"),
        ({"rope_grid_size": (16, 0)}, "at least 1 patch"),
        ({"pooling": "cls_mean", "norm_after_pooling": True}, "pooling='cls_mean' .* Set norm_after_pooling=False"),
        ({"pooling": "attention", "norm_after_pooling": True}, "pooling='attention' .* Set norm_after_pooling=False"),
        ({"use_distillation_token": True, "norm_after_pooling": True}, "use_distillation_token=True. Set norm_after"),
        ({"layerscale_value": float("nan")}, "None disables LayerScale"),
        ({"position_interpolation_offset": 1}, "position_interpolation_offset=1 must lie in"),
        ({"position_embedding_type": "rotary", "hidden_size": 36, "num_attention_heads": 6}, "give a head size of 6"),
        ({"position_embedding_type": "sincos2d", "hidden_size": 6, "num_attention_heads": 3}, "=6 must be a multiple"),
        ({"use_cls_token": False}, r"pooling='cls' needs the CLS token.*pooling='mean'"),
        ({"use_cls_token": False, "pooling": "cls_mean"}, "pooling='cls_mean' needs the CLS token"),
        ({"use_cls_token": False, "pooling": "mean", "use_distillation_token": True}, "distillation_token=True needs"),
        ({"num_labels": 5, "id2label": {0: "a", 1: "b"}}, "num_labels=5 but id2label names 2"),
        ({"num_labels": -3}, "num_labels=-3 must be a whole number of at least 0"),
        ({"problem_type": "bogus"}, "bogus"),
        ({"id2label": {1: "a", 2: "b"}}, "must have the keys 0 to 1"),
        ({"out_indices": []}, r"out_indices=\[\] selects no stage"),
        ({"out_features": ["stage13"]}, "stage13"),
        ({"out_indices": [13]}, "13"),
    ],
)
def test_impossible_combinations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, StrictDataclassFieldValidationError), match=message):
        HfViTConfig(**options)


WRONG_TYPES = {"hidden_size": 64.0, "qkv_bias": 1, "image_size": "224", "pooling": "max", "norm_type": "batchnorm"}
WRONG_TYPES |= {"position_embedding_type": "absolute", "rope_coordinates": "pixels"}
WRONG_TYPES["position_interpolation"] = "nearest"


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES.items())
def test_wrong_types_are_refused(name: str, value: Any) -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match=name):
        HfViTConfig(**{name: value})


def test_checks_run_at_saving_and_building_too(tmp_path: Path) -> None:
    config = small_config()
    config.num_attention_heads = 5
    with pytest.raises(ValueError, match="num_attention_heads=5"):
        config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="num_attention_heads=5"):
        HfViTModel(config)


def test_backbone_fields_are_few_and_named_as_in_vit() -> None:
    inherited = {field.name for field in fields(transformers.PreTrainedConfig)}
    own = {field.name for field in fields(HfViTConfig)} - inherited
    assert len(own - TASK_CONFIGS.keys()) <= 45  # nested task configurations are not counted
    vit = {field.name for field in fields(transformers.ViTConfig)} - inherited
    assert vit - own == {"encoder_stride", "pooler_output_size", "pooler_act"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_configuration_is_the_same(variant: str, tmp_path: Path) -> None:
    config = small_config(variant, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1}, num_labels=2)
    config.save_pretrained(tmp_path)
    reloaded = HfViTConfig.from_pretrained(tmp_path)
    expected, actual = json.loads(json.dumps([config.to_dict(), reloaded.to_dict()]))
    assert actual == expected
    assert transformers.AutoConfig.from_pretrained(tmp_path).to_diff_dict() == reloaded.to_diff_dict()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["auto_map"] == AUTO_MAP
    assert "stage_names" not in saved


def test_library_wide_options_are_kept(tmp_path: Path) -> None:
    config = small_config(output_hidden_states=True, dtype="bfloat16", problem_type="regression", return_dict=False)
    config.save_pretrained(tmp_path / "sub")
    reloaded = HfViTConfig.from_pretrained(tmp_path, subfolder="sub")
    assert (reloaded.output_hidden_states, reloaded.problem_type, reloaded.return_dict) == (True, "regression", False)
    assert str(reloaded.dtype) == "torch.bfloat16"
    config.to_json_file(tmp_path / "config.json")
    assert HfViTConfig.from_json_file(tmp_path / "config.json").to_dict() == config.to_dict()
    assert json.loads(config.to_json_string())["hidden_size"] == 32


def test_num_labels_and_names(tmp_path: Path) -> None:
    assert HfViTConfig(num_labels=3).id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    assert HfViTConfig(id2label={"0": "a", "1": "b", "2": "c"}).num_labels == 3
    assert HfViTConfig.from_preset("mnist").num_labels == 10
    assert HfViTConfig.from_preset("mnist", id2label={0: "even", 1: "odd"}).num_labels == 2
    # Label names that are passed to from_pretrained replace the saved names.
    small_config(num_labels=2, id2label={0: "cat", 1: "dog"}).save_pretrained(tmp_path)
    names = {0: "a", 1: "b", 2: "c"}
    for given, expected in (
        ({}, {0: "cat", 1: "dog"}),
        ({"num_labels": 3}, {i: f"LABEL_{i}" for i in range(3)}),
        ({"num_labels": 3, "id2label": names}, names),
        ({"id2label": names}, names),
    ):
        config = HfViTConfig.from_pretrained(tmp_path, **given)
        assert (config.id2label, config.num_labels) == (expected, len(expected)), given


def test_labels_may_be_numbered_by_text(tmp_path: Path) -> None:
    """`id2label` may have string keys when it is loaded, passed to an Auto class, or assigned."""
    given = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": "0", "b": "1", "c": "2"}}
    small_config(num_labels=2).save_pretrained(tmp_path)
    assigned = small_config()
    assigned.id2label, assigned.label2id = given.values()
    by_auto_class = transformers.AutoConfig.from_pretrained(tmp_path, num_labels=3, **given)
    for config in (assigned, HfViTConfig.from_pretrained(tmp_path, **given), by_auto_class):
        assert config.id2label == {0: "a", 1: "b", 2: "c"}
        assert config.label2id == {"a": 0, "b": 1, "c": 2}
        config.check()
    # transformers before 5.23 checks the type first and raises a different message.
    message = r"id2label=\{'cat': 0\} must assign an integer to each label, as in \{0: |'id2label' with value .'cat"
    with pytest.raises((ValueError, StrictDataclassFieldValidationError), match=message):
        assigned.id2label = {"cat": 0}


def test_encoder_stride_is_the_patch_size(tmp_path: Path) -> None:
    config = small_config()
    # The pretraining script of transformers updates configurations with these fields.
    config.update({"image_size": 32, "patch_size": 4, "encoder_stride": 4})
    assert (config.encoder_stride, "encoder_stride" in config.to_dict()) == (4, False)
    assert HfViTConfig(patch_size=8, encoder_stride=8).patch_size == 8
    with pytest.raises(ValueError, match="encoder_stride=8 must equal patch_size=4"):
        config.encoder_stride = 8


def test_presets() -> None:
    config = HfViTConfig.from_preset("mnist", drop_path_rate=0.1)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 4, 4)
    assert (config.image_size, config.patch_size, config.num_channels) == (28, 4, 1)
    assert config.drop_path_rate == 0.1
    assert HfViTConfig.from_preset("huge").patch_size == HfViTConfig.from_preset("so400m").patch_size == 14
    with pytest.raises(ValueError, match=r"no preset 'giant'.*tiny, small, base"):
        HfViTConfig.from_preset("giant")
    with pytest.raises(ValueError, match=r"no field drop_path\. Did you mean drop_path_rate\?"):
        HfViTConfig.from_preset("tiny", drop_path=0.1)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("hiden_size", "Did you mean hidden_size"),
        ("num_layers", r"Did you mean num_labels or num_hidden_layers\?"),
        ("num_heads", "help"),
        ("id2labels", "Did you mean id2label"),
        ("norm_first", "help"),
        ("post_norm", "help"),
        ("stem", "help"),
        ("tie_word_embeddings", "help"),
    ],
)
def test_an_unknown_field_is_refused_unless_it_is_saved(given: str, hint: str, tmp_path: Path) -> None:
    for make in (HfViTConfig, partial(HfViTConfig.from_preset, "tiny"), partial(AutoConfig.for_model, "hf_vit")):
        with pytest.raises(ValueError, match=rf"HfViTConfig has no field {given}\. {hint}"):
            make(**{given: 3})
    saved = HfViTConfig().to_dict() | {given: 3}
    # Composite models of transformers 5.17 remove `model_type`.
    for content in (saved, {name: value for name, value in saved.items() if name != "model_type"}):
        assert vars(HfViTConfig(**content))[given] == 3
    with pytest.raises(ValueError, match=f"has no field (model_type, )?{given}(, model_type)?\\."):
        HfViTConfig(**{given: 3, "model_type": "vit"})
    HfViTConfig().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), given: 3}))
    opened = HfViTConfig.from_pretrained(tmp_path)
    assert vars(opened)[given] == 3
    opened.save_pretrained(tmp_path)
    assert json.loads(file.read_text())[given] == 3
    assert "_is_saved" not in file.read_text()
    assert vars(copy.deepcopy(opened))[given] == 3


def test_arguments_of_all_configurations_are_accepted() -> None:
    given: dict[str, Any] = {"architectures": ["HfViTModel"], "transformers_version": "5.17.0", "return_dict": False}
    given |= {"output_attentions": True, "output_hidden_states": True, "attn_implementation": "eager"}
    given |= {"name_or_path": "user/model", "torch_dtype": "bfloat16", "problem_type": "regression", "num_labels": 1}
    config = HfViTConfig(**given)
    assert (config.name_or_path, config.dtype, config.num_labels) == ("user/model", torch.bfloat16, 1)
    assert (config._attn_implementation, config.output_attentions, config.return_dict) == ("eager", True, False)

    class Renamed(HfViTConfig):
        attribute_map = {"embed_dim": "hidden_size"}  # noqa: RUF012
        depth_limit: int = 0

    assert (Renamed(embed_dim=96, depth_limit=2).hidden_size, Renamed(depth_limit=2).depth_limit) == (96, 2)
    with pytest.raises(ValueError, match="no field embed_dims"):
        Renamed(embed_dims=96)


def test_stages_follow_the_depth(tmp_path: Path) -> None:
    config = small_config()
    assert config.out_features == ["stage3"]
    config.save_pretrained(tmp_path)
    shallower = HfViTConfig.from_pretrained(tmp_path, num_hidden_layers=2)
    assert shallower.stage_names == ["stem", "stage1", "stage2"]
    assert shallower.out_indices == [2]
    chosen = HfViTConfig.from_pretrained(tmp_path, out_indices=[0, -1])
    assert chosen.out_features == ["stem", "stage3"]
    chosen.save_pretrained(tmp_path)
    assert HfViTConfig.from_pretrained(tmp_path).out_features == ["stem", "stage3"]
    with pytest.raises(ValueError, match="num_hidden_layers=2 the stages are stem to stage2"):
        HfViTModel(HfViTConfig.from_pretrained(tmp_path, num_hidden_layers=2))


def test_derived_sizes() -> None:
    config = small_config("registers", image_size=(32, 64), patch_size=(8, 16))
    assert (config.grid_size, config.num_prefix_tokens, config.num_prefix_positions) == ((4, 4), 4, 2)
    assert small_config(prefix_has_position=False).num_prefix_positions == 0
    assert [small_config(rope_grid_size=size).rotary_grid_size for size in (None, 7)] == [(4, 4), (7, 7)]
    assert [small_config("none", use_pooler=pooler).pooled_size for pooler in (True, False)] == [32, 64]


def test_other_model_type_is_refused(tmp_path: Path) -> None:
    transformers.Dinov2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"of a 'dinov2' model, not of 'hf_vit'\. .*HfViTModel\.from_pretrained"):
        HfViTConfig.from_pretrained(tmp_path)


# Task configuration -> its saved options, and an option that is overridden when the model is loaded.
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "segmentation_config": (
        {"head": "mask", "class_weights": [1.0, 0.5], "out_indices": [1, 3]},
        {"dice_weight": 1.5},
    ),
    "universal_segmentation_config": ({"num_queries": 7, "oversample_ratio": 2}, {"mask_weight": 1.5}),
    "depth_config": (
        {"depth_estimation_type": "relative", "head": "conv", "max_depth": None},
        {"gradient_loss_weight": 1.5},
    ),
    "detection_config": ({"decoder": "queries", "num_blocks": 2, "class_loss": "iou_aware"}, {"giou_weight": 1.5}),
    "keypoint_config": ({"head": "simple", "flip_pairs": [[0, 1]], "sigma": 1.5}, {"hidden_size": 64}),
    "masked_image_modeling_config": ({"mask_type": "blockwise", "norm_pix_loss": False}, {"mask_ratio": 0.5}),
    "joint_embedding_config": ({"embedding_size": 16, "gaussian_weight": 0.1}, {"num_slices": 8}),
    "reconstruction_config": ({"latent_channels": 4, "pixel_loss": "l1"}, {"kl_weight": 0.1}),
    "text_config": ({"num_hidden_layers": 2, "pooling": "last"}, {"num_hidden_layers": 1}),
    "caption_config": ({"num_hidden_layers": 2, "label_smoothing": 0.0}, {"dropout": 0.2}),
    "calibration_config": (
        {"temperature": 1.5, "coverages": [0.9], "thr_thresholds": [0.7], "aps_thresholds": [0.8]},
        {"enabled": False},
    ),
    "contrastive_config": ({"loss": "softmax", "projection_dim": 8}, {"projection_dim": 8}),
    "multi_task_config": (
        {"heads": {"rooms": {"task": "depth-estimation", "config": {}}}},
        {"learns_loss_weights": True},
    ),
}
all_tasks = pytest.mark.parametrize("field", TASKS)


def test_every_task_is_tried_and_has_few_options() -> None:
    assert TASKS.keys() == TASK_CONFIGS.keys()
    assert all(len(fields(task)) <= 16 for task in TASK_CONFIGS.values())


@all_tasks
def test_options_are_the_same_as_object_as_dictionary_and_reopened(field: str, tmp_path: Path) -> None:
    own, override = TASKS[field]
    options = TASK_CONFIGS[field](**own)
    for given in (options, own):
        config = small_config(**{field: given})
        assert getattr(config, field) == options
        config.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())[field] == own
        reopened = HfViTConfig.from_pretrained(tmp_path)
        assert getattr(reopened, field).to_dict() == own
        assert reopened.to_diff_dict() == config.to_diff_dict()
    # An option that is overridden when loading does not change the other options.
    assert getattr(HfViTConfig.from_pretrained(tmp_path, **{field: override}), field).to_dict() == {**own, **override}
    assert getattr(HfViTConfig.from_pretrained(tmp_path, **{field: None}), field) is None
    config = small_config()
    setattr(config, field, own)
    assert getattr(config, field) == options
    # Options with default values are not saved.
    config = HfViTConfig()
    assert getattr(config, field) is None
    config.save_pretrained(tmp_path)
    assert field not in json.loads((tmp_path / "config.json").read_text())
    assert getattr(HfViTConfig.from_pretrained(tmp_path), field) is None
    assert getattr(HfViTConfig.from_pretrained(tmp_path, **{field: override}), field).to_dict() == override
    spelled_out = small_config(**{field: json.loads(json.dumps(asdict(TASK_CONFIGS[field]())))})
    assert spelled_out.to_dict()[field] == {}
    assert TASK_CONFIGS[field].of(None) == TASK_CONFIGS[field]() == TASK_CONFIGS[field].of({})


def test_models_take_overrides_of_options(tmp_path: Path) -> None:
    HfViTForDepthEstimation(small_config()).save_pretrained(tmp_path)
    options: dict[str, Any] = {"depth_config": {"max_depth": 80}, "output_loading_info": True}
    model, info = HfViTForDepthEstimation.from_pretrained(tmp_path, **options)
    assert not info["missing_keys"]
    assert (model.options.head, model.options.max_depth) == ("dpt", 80)
    assert HfViTForDepthEstimation.from_pretrained(tmp_path).options.max_depth == 10


@all_tasks
def test_unknown_options_and_wrong_types_are_named(field: str) -> None:
    with pytest.raises(ValueError, match=r"has no option nonsense, trash\. Options: \w+"):
        small_config(**{field: {"trash": 1, "nonsense": 2}})
    for name, value in {"head": "transformer", "num_queries": "7"}.items():
        if name in {option.name for option in fields(TASK_CONFIGS[field])}:
            with pytest.raises(StrictDataclassFieldValidationError, match=name):
                small_config(**{field: {name: value}})


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "segmentation_config": [
        ({"hidden_size": 0}, "hidden_size=0 must be positive"),
        ({"dice_weight": -1.0}, "dice_weight=-1.0 must not be negative"),
        ({"focal_weight": float("nan")}, "focal_weight=nan"),
        ({"cross_entropy_weight": 0}, "are all 0, so there is no loss"),
        ({"focal_gamma": -0.5}, "focal_gamma=-0.5"),
        ({"class_weights": [1.0, -2.0]}, r"class_weights=\[1.0, -2.0\] must not be negative"),
        ({"use_auxiliary_head": True, "auxiliary_loss_weight": -1}, "auxiliary_loss_weight=-1"),
    ],
    "keypoint_config": [
        ({"sigma": 0}, "sigma=0 must be positive"),
        ({"flip_pairs": [[0, 1], [1, 2]]}, "contains a keypoint twice"),
        ({"flip_pairs": [[0, 0]]}, r"flip_pairs has \[0, 0\]\. Each entry must be two keypoint indices"),
        ({"oks_sigmas": [0.1, 0]}, r"oks_sigmas=\[0.1, 0\] must be positive"),
        ({"skeleton": [[0, -1]]}, r"skeleton has \[0, -1\]"),
    ],
    "universal_segmentation_config": [
        ({"num_queries": 0}, "num_queries=0 must be positive"),
        ({"num_upscale_blocks": -1}, "num_upscale_blocks=-1"),
        ({"oversample_ratio": 0.5}, "oversample_ratio=0.5 must be at least 1"),
        ({"importance_sample_ratio": 1.5}, "importance_sample_ratio=1.5 must lie"),
        ({"mask_weight": -5}, "mask_weight=-5 must not be negative"),
    ],
    "depth_config": [
        ({"neck_hidden_sizes": [8, 8]}, r"\[8, 8\] and reassemble_factors=\[4, 2, 1, 0.5\] must have"),
        ({"reassemble_factors": [4, 2, 1.5, 0.5]}, "1.5, 0.5.* must be whole numbers or one divided by"),
        ({"reassemble_factors": [4, 2, 1, 0.4]}, "must be whole numbers"),
        ({"max_depth": 0}, "max_depth=0 must be more than min_depth=0.001"),
        ({"max_depth": float("inf")}, "max_depth=inf"),
        ({"min_depth": 0}, "min_depth=0 must be positive"),
        ({"loss": "ssi"}, "needs depth_estimation_type='relative'"),
        ({"loss": "l1", "depth_estimation_type": "relative"}, "set loss='ssi'"),
        ({"head": "linear", "max_depth": None}, "needs a max_depth in meters"),
        ({"silog_lambda": 1.5}, "silog_lambda=1.5 must lie"),
        ({"gradient_loss_weight": -1}, "gradient_loss_weight=-1"),
    ],
    "masked_image_modeling_config": [
        ({"mask_ratio": 0.0}, r"mask_ratio=0.0 must lie in \(0, 1\)"),
        ({"mask_ratio": 1.0}, "mask_ratio=1.0"),
        ({"mask_unit": 0}, "mask_unit=0 must be positive"),
        ({"mask_unit": 2, "mask_type": "blockwise"}, "mask_unit=2 is only for mask_type='r"),
        ({"decoder_hidden_size": 24}, "multiple of 4, .*attention_heads=16"),
        (
            {"objective": "simmim", "norm_pix_loss": False},
            "applies only to objective='mae' and has no effect with 'si",
        ),
    ],
}


@pytest.mark.parametrize(
    ("field", "options", "message"), [(field, *case) for field, cases in REFUSED.items() for case in cases]
)
def test_options_that_do_not_fit_are_refused(
    field: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(**{field: options})
    config = small_config(**{field: {}})
    vars(getattr(config, field)).update(options)  # bypass validation
    with pytest.raises(ValueError, match=message):
        config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        HfViTModel(config)
