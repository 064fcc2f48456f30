"""Test that invalid fields of models, heads and image processors, and invalid configuration files, raise errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor

from ..helpers.models import MODEL_CLASSES, small_config
from .table import Row, assert_refused, parametrize, rows


NAN, INFINITY = float("nan"), float("inf")


def each(fields: dict[str, list[Any]], task: str = "") -> list[tuple[str, dict[str, Any], str]]:
    """Return a table row for each invalid field value. The error must contain the field name and the value."""
    named = [(name, value) for name, values in fields.items() for value in values]
    return [
        (f"{task}{name}-{value}", {task: {name: value}} if task else {name: value}, f"{name}={value}")
        for name, value in named
    ]


BACKBONE = [
    ("heads-that-do-not-divide", {"num_attention_heads": 5}, "hidden_size=32 | num_attention_heads=5 | 4"),
    ("no-heads", {"num_attention_heads": 0}, "num_attention_heads=0 | at least 1"),
    *each({"num_hidden_layers": [0], "hidden_size": [-32], "num_channels": [0], "image_size": [0, [-32, 32]]}),
    *each({"patch_size": [0, 64], "patch_padding": [4], "num_register_tokens": [-1], "num_labels": [-1]}),
    *each({"attention_probs_dropout_prob": [NAN], "drop_path_rate": [-0.1], "layer_norm_eps": [0.0]}),
    *each({"initializer_range": [INFINITY], "layerscale_value": [NAN], "rope_theta": [-1.0], "out_indices": [[]]}),
    ("image-of-three-sizes", {"image_size": [32, 32, 32]}, "image_size=[32, 32, 32] | (height, width)"),
    ("image-that-is-no-multiple-of-patches", {"image_size": 30}, "30 | 24 or 32"),
    ("dropout-of-all", {"hidden_dropout_prob": 1.0}, "hidden_dropout_prob=1.0 | [0, 1)"),
    ("misspelled-field", {"drop_path": 0.1}, "no field drop_path | drop_path_rate"),
    ("unknown-activation", {"hidden_act": "sparkle"}, "hidden_act='sparkle'"),
    ("pooling-of-a-missing-token", {"use_cls_token": False}, "pooling='cls' | use_cls_token=False"),
    ("stage-beyond-the-end", {"out_indices": [9]}, "stage"),
    ("labels-with-a-gap", {"id2label": {0: "a", 2: "b"}, "num_labels": None}, "id2label | 0 to 1"),
    ("labels-of-another-number", {"id2label": {0: "a"}, "num_labels": 3}, "num_labels=3 | 1 labels"),
    ("rotary-of-odd-heads", {"position_embedding_type": "rotary", "num_attention_heads": 16}, "multiple of 4 | 2"),
    ("misspelled-option-of-a-head", {"segmentation_config": {"heads": "conv"}}, "no option heads | head"),
    ("no-loss-at-all", {"segmentation_config": {"cross_entropy_weight": 0}}, "there is no loss"),
    *each({"dice_weight": [-1]}, "segmentation_config"),
    *each({"max_depth": [1e-4], "min_depth": [NAN]}, "depth_config"),
    *each({"num_queries": [0]}, "detection_config"),
    ("option-of-another-decoder", {"detection_config": {"num_blocks": 2}}, "num_blocks=2 | queries"),
    ("mirrored-onto-itself", {"keypoint_config": {"flip_pairs": [[1, 1]]}}, "flip_pairs"),
    *each({"sigma": [0]}, "keypoint_config"),
    *each({"mask_ratio": [1.0]}, "masked_image_modeling_config"),
    *each({"vocab_size": [0]}, "text_config"),
    ("end-that-is-no-token", {"text_config": {"vocab_size": 10, "eos_token_id": 10}}, "eos_token_id=10"),
]
TYPES = [
    ("unknown-problem", {"problem_type": "guess"}, "problem_type | guess"),
    ("pooling-that-is-unknown", {"pooling": "max"}, "pooling"),
    ("norm-that-is-unknown", {"norm_type": "batchnorm"}, "norm_type"),
    ("width-as-text", {"hidden_size": "32"}, "hidden_size | '32'"),
    ("width-as-share", {"hidden_size": 32.5}, "hidden_size | 32.5"),
    ("size-as-text", {"image_size": "224"}, "image_size | '224'"),
    ("blocks-as-none", {"num_hidden_layers": None}, "num_hidden_layers"),
    ("head-that-is-unknown", {"depth_config": {"head": "cone"}}, "head"),
    ("head-as-a-text", {"depth_config": "dpt"}, "depth_config"),
]


@parametrize(rows(lambda fields: small_config(**fields), (StrictDataclassError, TypeError, ValueError), TYPES))
def test_a_configuration_refuses_values_of_another_type(row: Row) -> None:
    with pytest.raises(row.error) as caught:  # the error of transformers has two lines
        row.call(row.make(Path()))
    assert all(word.lower() in str(caught.value).lower() for word in row.words)


PROCESSORS = [
    *each({"rescale_factor": [0.0, NAN], "ensure_multiple_of": [0]}),
    ("no-channels", {"num_channels": 0}, "num_channels=0"),
    ("size-of-0", {"size": 0}, "size"),
    ("size-of-unknown-sides", {"size": {"depth": 8}}, "depth"),
    ("size-below-0", {"size": {"height": -8, "width": 8}}, "-8"),
    ("crop-without-a-width", {"crop_size": {"height": 8}}, "crop_size"),
    ("deviation-of-0", {"image_std": 0.0}, "image_std"),
    ("deviation-of-nan", {"image_std": NAN}, "image_std"),
    ("means-of-two-channels", {"image_mean": [0.5, 0.5]}, "image_mean | num_channels=3"),
    ("channels-as-text", {"num_channels": "3"}, "num_channels='3'"),
    ("color-for-a-gray-model", {"num_channels": 1, "do_convert_rgb": True}, "do_convert_rgb=True | num_channels=1"),
    ("padding-without-patches", {"do_pad": True}, "ensure_multiple_of"),
    ("unknown-filter", {"resample": 77}, "resample=77 is unknown"),
    ("unknown-order-of-axes", {"data_format": "sideways"}, "data_format='sideways' | channels_first"),
    ("unknown-rounding", {"crop_rounding": "sideways"}, "crop_rounding='sideways'"),
    ("crops-of-boxes-and-center", {"do_affine_crop": True, "do_center_crop": True, "crop_size": 8}, "do_center"),
    ("boxes-enlarged-by-nan", {"do_affine_crop": True, "box_padding": NAN}, "box_padding=nan"),
]


CLASSES = {kind.__name__: kind for kind in MODEL_CLASSES}
BLOCKS = {"num_blocks": 9}
QUERIES = {"decoder": "queries", **BLOCKS}
ONE_LEVEL, PAIRS, TWO = {"head": "dpt", "out_indices": [1]}, {"flip_pairs": [[0, 11]]}, {"class_weights": [1.0, 1.0]}
MODELS = [
    ("classifier-of-nothing", ("ImageClassification", {"num_labels": 0}), "num_labels=0"),
    ("objects-of-no-class", ("ObjectDetection", {"num_labels": 0}), "num_labels=0"),
    (
        "too-many-query-blocks",
        ("ObjectDetection", {"detection_config": QUERIES}),
        "num_blocks=9 | num_hidden_layers=3",
    ),
    ("too-many-mask-blocks", ("UniversalSegmentation", {"universal_segmentation_config": BLOCKS}), "num_blocks=9 | 3"),
    ("head-on-a-missing-block", ("SemanticSegmentation", {"segmentation_config": {"out_indices": [12]}}), "12"),
    ("depth-without-blocks", ("DepthEstimation", {"depth_config": ONE_LEVEL}), "out_indices | 1 blocks"),
    ("missing-keypoints", ("KeypointDetection", {"keypoint_config": PAIRS}), "flip_pairs | 11 | num_labels=5"),
    ("weights-of-other-classes", ("SemanticSegmentation", {"segmentation_config": TWO}), "class_weights | 2 | 5"),
]


def build(given: tuple[str, dict[str, Any]]) -> Any:
    name, fields = given
    return CLASSES[f"HfViTFor{name}"](small_config(**fields))


def config_file(text: Callable[[dict[str, Any]], str]) -> Callable[[Path], Path]:
    """Return a function that writes a changed config.json of a valid model."""

    def write(folder: Path) -> Path:
        (folder / "config.json").write_text(
            text(json.loads(small_config(architectures=["HfViTForImageClassification"]).to_json_string())),
            encoding="utf-8",
        )
        return folder

    return write


def changed(**fields: Any) -> Callable[[Path], Path]:
    return config_file(lambda sound: json.dumps({**sound, **fields}))


FILES = [
    ("config-that-is-empty", config_file(lambda _: ""), "config.json | JSON"),
    ("config-that-is-cut", config_file(lambda sound: json.dumps(sound)[:90]), "config.json | JSON"),
    ("config-that-is-binary", config_file(lambda _: "\0\1\2"), "config.json | JSON"),
    ("config-that-is-missing", lambda folder: folder, "no config.json"),
]
FIELDS = [
    ("config-of-another-model", changed(model_type="bert"), "bert"),
    ("config-of-heads-that-do-not-divide", changed(num_attention_heads=5), "num_attention_heads=5"),
    ("config-of-an-image-of-no-size", changed(image_size=0), "image_size=0"),
    ("config-of-a-misspelled-option", changed(depth_config={"heads": 1}), "no option heads"),
]


@parametrize(
    [
        *rows(lambda fields: small_config(**fields), ValueError, BACKBONE),
        *rows(lambda options: HfViTImageProcessor(**options), ValueError, PROCESSORS),
        *rows(build, ValueError, MODELS),
        *rows(HfViTConfig.from_pretrained, OSError, FILES),
        *rows(HfViTConfig.from_pretrained, ValueError, FIELDS[:1]),
        *rows(HfViTForImageClassification.from_pretrained, ValueError, FIELDS[1:]),
    ]
)
def test_invalid_configurations_of_models_and_processors_raise(row: Row, tmp_path: Path) -> None:
    assert_refused(row, tmp_path)
