"""Test that config.json contains all options of a model, and that missing options have fixed values."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_vit
from hf_vit import HfViTConfig, HfViTContrastiveConfig, HfViTMaskedImageModelingConfig, HfViTTextConfig
from hf_vit.model.nested_options import tuples_to_lists
from hf_vit.model.pretrained import HfViTPreTrainedModel
from hf_vit.model.remote_code import AUTO_MAP
from hf_vit.model.task_configurations import MODEL_TASK_CONFIGS, TASK_CONFIGS

from ..helpers.models import SMALL


# Value of each field if it is missing from config.json. Files of all versions depend on these values, so new defaults
# must be set in a preset or in the training options, which are saved explicitly.
# fmt: off
DEFAULTS: dict[str, dict[str, Any]] = {
    "backbone": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0,
        "initializer_range": 0.02, "layer_norm_eps": 1e-06, "image_size": 224, "patch_size": 16, "patch_padding": 0,
        "num_channels": 3, "qkv_bias": True, "key_bias": True, "proj_bias": True, "mlp_bias": True,
        "use_gated_mlp": False, "use_pre_layernorm": False, "use_qk_norm": False, "norm_type": "layernorm",
        "layerscale_value": None, "use_cls_token": True, "use_distillation_token": False, "num_register_tokens": 0,
        "use_mask_token": False, "position_embedding_type": "learned", "prefix_has_position": True,
        "position_interpolation": "bicubic", "position_interpolation_offset": 0.0, "position_antialias": False,
        "rope_theta": 100.0, "rope_coordinates": "centered", "rope_grid_size": None, "window_size": None,
        "global_attention_layers": (), "pooling": "cls", "norm_after_pooling": False, "use_pooler": False,
        "apply_layernorm": True, "reshape_hidden_states": True, "_out_features": None, "_out_indices": None,
    },
    "segmentation_config": {
        "head": "conv", "hidden_size": 256, "num_layers": 2, "norm": "batch", "out_indices": None,
        "cross_entropy_weight": 1.0, "dice_weight": 0.0, "focal_weight": 0.0, "focal_gamma": 2.0,
        "class_weights": None, "semantic_loss_ignore_index": 255, "use_auxiliary_head": False,
        "auxiliary_loss_weight": 0.4,
    },
    "universal_segmentation_config": {
        "head": "queries", "num_queries": 200, "num_blocks": None, "num_upscale_blocks": 2, "class_weight": 2.0,
        "mask_weight": 5.0, "dice_weight": 5.0, "no_object_weight": 0.1, "train_num_points": 12544,
        "oversample_ratio": 3.0, "importance_sample_ratio": 0.75, "score_threshold": None,
    },
    "depth_config": {
        "head": "dpt", "out_indices": None, "neck_hidden_sizes": (96, 192, 384, 768),
        "reassemble_factors": (4, 2, 1, 0.5), "readout_type": "project", "fusion_hidden_size": 256,
        "head_hidden_size": 32, "doubles_resolution": False, "depth_estimation_type": "metric", "max_depth": 10.0,
        "min_depth": 0.001, "num_bins": 256, "loss": None, "silog_lambda": 0.5, "gradient_loss_weight": 0.5,
    },
    "detection_config": {
        "decoder": "deformable", "num_queries": 100, "num_layers": None, "num_blocks": None,
        "use_mid_position_embeddings": False, "hidden_size": 256, "num_attention_heads": 8, "num_points": 2,
        "scale_factors": (1.0,), "out_indices": None, "projector_norm": "layer", "num_groups": 13, "class_loss": None,
        "bbox_weight": 5.0, "giou_weight": 2.0, "score_threshold": None,
    },
    "keypoint_config": {
        "head": "classic", "hidden_size": 256, "norm": "batch", "scale_factor": 4, "sigma": 2.0, "flip_pairs": (),
        "skeleton": (), "oks_sigmas": None, "score_threshold": None, "object_share": None,
    },
    "masked_image_modeling_config": {
        "objective": "mae", "mask_ratio": None, "mask_type": "random", "mask_unit": 1, "norm_pix_loss": True,
        "decoder_hidden_size": 512, "decoder_num_hidden_layers": 8, "decoder_num_attention_heads": 16,
        "decoder_intermediate_size": 2048,
    },
    "reconstruction_config": {
        "latent_type": "kl", "latent_channels": 16, "kl_weight": 1e-05, "num_latent_layers": 1, "noise_std": 0.0,
        "scaling_factor": 1.0, "pixel_loss": "l2", "feature_weight": 0.0, "decoder_hidden_size": 512,
        "decoder_num_hidden_layers": 8, "decoder_num_attention_heads": 16, "decoder_intermediate_size": 2048,
    },
    "joint_embedding_config": {
        "objective": "lejepa", "projector_hidden_size": 2048, "embedding_size": 64, "gaussian_weight": 0.05,
        "num_slices": 256, "num_prototypes": 1024, "student_temperature": 0.1, "teacher_temperature": 0.05,
        "patch_weight": 1.0, "koleo_weight": 0.1,
    },
    "text_config": {
        "encoder_config": None, "vocab_size": 49408, "hidden_size": 512, "num_hidden_layers": 12,
        "num_attention_heads": 8, "intermediate_size": 2048, "hidden_act": "gelu", "layer_norm_eps": 1e-05,
        "max_position_embeddings": 77, "is_causal": True, "pooling": None, "eos_token_id": 49407, "pad_token_id": None,
    },
    "contrastive_config": {"loss": "sigmoid", "projection_dim": 512},
    "caption_config": {
        "vocab_size": 8192, "hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6,
        "intermediate_size": 1536, "max_position_embeddings": 64, "dropout": 0.1, "label_smoothing": 0.1,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
    "multi_task_config": {"heads": None, "learns_loss_weights": False},
    "calibration_config": {
        "enabled": True, "model_class": "", "temperature": 1.0, "offset": 0.0, "num_images": 0, "coverages": (),
        "thr_thresholds": (), "aps_thresholds": (), "error_scale": 0.0, "missed_shares": (), "missed_thresholds": (), "fingerprint": (),
    },
}
# fmt: on
# The config.json of every model class, written by version 0.1.0. It omitted options with default values.
SAVED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "helpers" / "saved_configurations.json").read_text()
)
# Small sizes that replace large defaults of the backbone.
BACKBONE = {name: value for name, value in SMALL.items() if name not in TASK_CONFIGS}


def options_in(config: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the options of a task, with default values for options that are missing from the configuration."""
    options = {**DEFAULTS[field], **(config.get(field) or {})}
    return {name: tuples_to_lists(value) for name, value in options.items()}


@pytest.mark.parametrize("name", DEFAULTS)
def test_no_default_ever_changes(name: str) -> None:
    inherited = {field.name for field in fields(transformers.PreTrainedConfig)} | TASK_CONFIGS.keys()
    options = fields(TASK_CONFIGS.get(name, HfViTConfig))
    assert {option.name: option.default for option in options if option.name not in inherited} == DEFAULTS[name]


def test_values_derived_from_none_never_change() -> None:
    assert DEFAULTS.keys() == {"backbone", *TASK_CONFIGS}
    shares = [HfViTMaskedImageModelingConfig(objective=objective).masked_share for objective in ("mae", "simmim")]
    assert shares == [0.75, 0.6]
    towers = [HfViTTextConfig(encoder_config=tower) for tower in (None, {"model_type": "bert"})]
    assert [tower.effective_pooling for tower in towers] == ["eos", "first"]
    starts = [HfViTContrastiveConfig(loss=loss) for loss in ("sigmoid", "softmax")]
    assert [start.initial_scale for start in starts] == [math.log(10), math.log(1 / 0.07)]


@pytest.mark.parametrize("name", SAVED)
def test_configurations_of_the_first_version_open_as_they_were(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SAVED[name]))
    config = HfViTConfig.from_pretrained(tmp_path)
    for field, options in TASK_CONFIGS.items():
        assert options.of(vars(config)[field]).to_full_dict() == options_in(SAVED[name], field)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    used = MODEL_TASK_CONFIGS.get(name, ())
    kept = {key: value for key, value in SAVED[name].items() if key not in used}
    assert {key: written[key] for key in kept} == kept
    for field in TASK_CONFIGS:
        expected = options_in(SAVED[name], field) if field in used else SAVED[name].get(field)
        assert written.get(field) == expected


def test_every_model_class_is_tested() -> None:
    classes = {place.rpartition(".")[2] for auto, place in AUTO_MAP.items() if auto.startswith("AutoModel")}
    assert classes == SAVED.keys() | {"HfViTForImageTextToText", "HfViTForImageReconstruction"}  # newer classes
    # Models are saved with calibration options only if they are calibrated.
    used_fields = {field for used in MODEL_TASK_CONFIGS.values() for field in used}
    assert used_fields == TASK_CONFIGS.keys() - {"calibration_config"}
    for name, used in MODEL_TASK_CONFIGS.items():
        assert issubclass(getattr(hf_vit, name), HfViTPreTrainedModel)
        assert len(used) == len(set(used))


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_names_all_options_of_its_task(name: str, tmp_path: Path) -> None:
    used = MODEL_TASK_CONFIGS.get(name, ())
    model = getattr(hf_vit, name)(HfViTConfig(**BACKBONE, **{field: SMALL[field] for field in used}))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    backbone = {field.lstrip("_") for field in DEFAULTS["backbone"]}
    assert backbone <= written.keys()
    assert written.keys() & TASK_CONFIGS.keys() == set(used)
    for field in used:
        assert written[field] == options_in(SMALL, field)
    reopened = type(model).from_pretrained(tmp_path)
    assert HfViTConfig.from_dict(reopened.config.to_dict()).to_dict() == reopened.config.to_dict()
    reopened.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == written


def test_options_of_unused_tasks_are_saved_without_defaults(tmp_path: Path) -> None:
    config = HfViTConfig(**BACKBONE, depth_config={"head": "conv"}, detection_config={})
    hf_vit.HfViTForImageClassification(config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {field: written[field] for field in TASK_CONFIGS if written.get(field)} == {
        "depth_config": {"head": "conv"}
    }
