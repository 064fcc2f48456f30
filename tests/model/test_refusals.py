"""Test error messages for models that cannot be built, and for inputs that do not fit a model."""

from typing import Any

import pytest
import torch

from hf_vit import HfViTForImageClassification, HfViTForJointEmbedding, HfViTForObjectDetection, HfViTModel

from ..helpers.models import BERT, DINO, SMALL_DEPTH
from .checks import build, inputs_of


NO_CLS = {"use_cls_token": False, "pooling": "mean"}
OBJECTS, VIEWS = HfViTForObjectDetection, HfViTForJointEmbedding
# Each row: class or head; name of its task configuration, or "" for the model configuration; options; message.
# fmt: off
OPTIONS: list[tuple[Any, str, dict[str, Any], str]] = [
    (HfViTForImageClassification, "", {"num_labels": 0}, "num_labels=0"),
    (HfViTForImageClassification, "", {"window_size": 2, "global_attention_layers": [3]},
     r"global_attention_layers=\[3.*from 0 to 2, because num_hidden_layers=3"),
    (HfViTForImageClassification, "", {"window_size": 2, "global_attention_layers": [-1, 0]},
     r"global_attention_layers=\[-1.*from 0 to 2, because num_hidden_layers=3"),
    (HfViTModel, "", {"patch_padding": -1}, "patch_padding=-1 must be less than half of patch_size=8"),
    (HfViTModel, "", {"patch_padding": 4}, "patch_padding=4 must be less than half of patch_size=8"),
    ("conv", "", {"num_labels": 1}, "num_labels=1 must be at least 2"),
    ("conv", "segmentation_config", {"class_weights": [1.0, 2.0]}, "2 numbers, but there are num_labels=5"),
    ("conv", "segmentation_config", {"out_indices": [4]}, r"out_indices=\[4\] must list blocks from 1 to .*=3"),
    ("conv", "segmentation_config", {"out_indices": []}, r"out_indices=\[\] must list"),
    ("universal", "", {"num_labels": 0}, "num_labels=0 is not supported: masks need"),
    ("universal", "universal_segmentation_config", {"num_blocks": 4}, "num_blocks=4 .* num_hidden_layers=3"),
    ("dpt_metric", "depth_config", {**SMALL_DEPTH, "out_indices": [1, 3]}, "3 levels .* names 2 blocks"),
    ("dpt_metric", "", NO_CLS, "'project' needs a CLS token, .*'ignore'"),
    ("classic_keypoints", "", {"num_labels": 0}, "num_labels=0 is not supported"),
    ("classic_keypoints", "keypoint_config", {"flip_pairs": [[0, 1], [2, 5]]},
     r"flip_pairs has \[2, 5\], but num_labels=5 .* 0 to 4"),
    ("classic_keypoints", "keypoint_config", {"skeleton": [[7, 1]]}, r"skeleton has \[7, 1\]"),
    ("classic_keypoints", "keypoint_config", {"oks_sigmas": [0.1] * 4},
     "oks_sigmas has 4 numbers, but there are num_labels=5"),
    ("classic_keypoints", "keypoint_config", {"oks_sigmas": [1] * 6}, "oks_sigmas has 6 numbers"),
    (OBJECTS, "", {"num_labels": 0}, "num_labels=0 is not supported: objects need"),
    (OBJECTS, "detection_config", {"decoder": "queries", "num_blocks": 4}, "num_blocks=4 blocks for the queries"),
    (OBJECTS, "detection_config", {"decoder": "queries", "num_blocks": 0},
     "without num_layers runs no block on queries"),
    (OBJECTS, "detection_config", {"decoder": "deformable", "num_layers": 0}, "num_layers=0 must be at least 1"),
    (OBJECTS, "detection_config", {"hidden_size": 100}, "hidden_size=100 must be a multiple of 8 times"),
    (OBJECTS, "detection_config", {"scale_factors": [1.0, 3.0]},
     r"scale_factors=\[1.0, 3.0\] must be one or more of"),
    (OBJECTS, "detection_config", {"class_loss": "cross_entropy"}, "needs a class for no object"),
    (OBJECTS, "detection_config", {"num_blocks": 2}, "num_blocks=2 applies only to decoder='queries'"),
    (OBJECTS, "detection_config", {"decoder": "queries", "num_groups": 2},
     "num_groups=2 .* no effect with 'queries'"),
    (OBJECTS, "detection_config", {"bbox_weight": -1}, "bbox_weight=-1 must not be negative"),
    ("mae", "", {"window_size": 2}, r"window_size=2 does not support. Set window_size=None, or objective='simmim'"),
    ("simmim", "", {"use_mask_token": False}, "use_mask_token=False. Set use_mask_token=True"),
    ("simmim", "masked_image_modeling_config", {"objective": "simmim", "decoder_hidden_size": 8},
     "decoder_hidden_size=8 applies only to objective='mae'"),
    ("causal", "text_config", {"encoder_config": {"model_type": "t5"}}, "'t5', which is not encoder-only"),
    ("causal", "text_config", {"eos_token_id": 60, "vocab_size": 50}, "eos_token_id=60 is not in .0, vocab_size=50"),
    ("causal", "text_config", {"eos_token_id": None}, "pooling='eos' needs an eos_token_id"),
    ("causal", "text_config", {"hidden_size": 30, "num_attention_heads": 4}, "hidden_size=30 of the text tower"),
    ("causal", "text_config", {"hidden_act": "sine"}, "hidden_act='sine' is unknown"),
    ("causal", "text_config", {"num_hidden_layers": 0}, "num_hidden_layers=0 must be positive"),
    ("causal", "text_config", {"encoder_config": {"hidden_size": 8}}, "has no model_type"),
    ("causal", "text_config", {"encoder_config": BERT, "vocab_size": 7},
     "vocab_size=7 applies only to the built-in text t"),
    ("causal", "contrastive_config", {"projection_dim": 0}, "projection_dim=0 must be positive"),
    (VIEWS, "joint_embedding_config", {"gaussian_weight": 0.0}, "gaussian_weight=0.0"),
    (VIEWS, "joint_embedding_config", {"gaussian_weight": 1.5}, "gaussian_weight=1.5"),
    (VIEWS, "joint_embedding_config", {"num_slices": 0}, "num_slices=0"),
    (VIEWS, "", {"joint_embedding_config": DINO}, "use_mask_token=False. Set use_mask_token=True"),
    (VIEWS, "", {"joint_embedding_config": DINO, "use_mask_token": True, "pooling": "cls_mean"},
     "pooling='cls_mean' gives features of width 64, but patches have width 32"),
    (VIEWS, "joint_embedding_config", {"objective": "dino", "num_slices": 3}, "num_slices"),
    (VIEWS, "joint_embedding_config", {"objective": "lejepa", "num_prototypes": 3}, "num_prototypes"),
    (VIEWS, "joint_embedding_config", {"objective": "dino", "teacher_temperature": 0.0},
     "teacher_temperature=0.0 must be positive"),
    (VIEWS, "joint_embedding_config", {"objective": "dino", "teacher_temperature": 0.01},
     "teacher_temperature=0.01 must be at least 0.025"),
    (VIEWS, "joint_embedding_config", {"objective": "dino", "patch_weight": -1.0}, "patch_weight=-1.0"),
    (VIEWS, "joint_embedding_config", {"objective": "dino", "koleo_weight": -1.0}, "koleo_weight=-1.0"),
]
ONE, MASKS = torch.zeros(1, 3, 32, 32), torch.zeros(1, 8, 8)
# Each row: class or head; inputs that replace valid inputs; message.
INPUTS: list[tuple[Any, dict[str, Any], str]] = [
    (HfViTModel, {"pixel_values": None}, "pixel_values is missing"),
    (HfViTModel, {"pixel_values": ONE[0]}, "Add the batch dimension"),
    (HfViTModel, {"pixel_values": ONE[:, :1]}, "1 channels, but the model takes 3"),
    (HfViTModel, {"pixel_values": torch.zeros(1, 3, 36, 32)}, "height 36 .* 32 or 40"),
    (HfViTModel, {"pixel_values": ONE[..., :7]}, "width 7 .* values: 8"),
    (HfViTModel, {"pixel_values": ONE[:, :, :0]}, "height 0"),
    (HfViTModel, {"pixel_values": [ONE[0]]}, r'return_tensors="pt"'),
    (HfViTModel, {"pixel_values": ONE.numpy()}, r'return_tensors="pt"'),
    (HfViTModel, {"bool_masked_pos": torch.zeros(2, 16)}, "use_mask_token=True"),
    (HfViTModel, {"patch_attention_mask": torch.ones(2, 3, 4) > 0}, r"patches\) = \(2, 4, 4\), not \(2, 3, 4\)"),
    (HfViTModel, {"patch_attention_mask": torch.ones(1, 4, 4) > 0}, r"patches\) = \(2, 4, 4\), not \(1, 4, 4\)"),
    (HfViTModel, {"patch_attention_mask": torch.eye(4).expand(2, 4, 4) > 0}, "image 0 is not a filled rectangle"),
    (HfViTModel, {"patch_attention_mask": torch.zeros(2, 4, 4) > 0}, "image 0 is not a filled rectangle"),
    ("conv", {"labels": torch.zeros(2, 5, 32, 32).long()}, r"\(batch, height, width\) with batch 2, not torch"),
    ("conv", {"labels": torch.zeros(1, 32, 32).long()}, r"with batch 2, not .* \(1, 32, 32\)"),
    ("conv", {"labels": torch.zeros(2, 32, 32)}, "must be class indices .* not torch.float32"),
    ("conv", {"labels": torch.full((2, 32, 32), 5)}, r"Label 5 is out of range: .* 0 to 4, and 255"),
    ("conv", {"labels": torch.full((2, 32, 32), -1)}, "Label -1 is out of range"),
    ("conv", {"pixel_values": None}, "pixel_values is missing"),
    ("dpt_metric", {"labels": torch.ones(2, 32, 32).long()}, "must be floats .* not torch.int64"),
    ("dpt_metric", {"labels": torch.ones(2, 2, 32, 32)}, r"in meters with batch 2, not .* \(2, 2, 32, 32\)"),
    ("universal", {"pixel_values": None}, "pixel_values is missing"),
    ("universal", {"class_labels": None}, r"an entry for each of the 2 images, not \[2, None\]"),
    ("universal", {"mask_labels": None}, r"not \[None, 2\]"),
    ("universal", {"mask_labels": [MASKS]}, r"not \[1, 2\]"),
    ("universal", {"mask_labels": [MASKS.expand(2, -1, -1)] * 2}, r"mask_labels\[0\] .* \(2, 8, 8\) and \(1,\)"),
    ("universal", {"mask_labels": [MASKS, MASKS.expand(2, -1, -1) + 7]}, r"\[1\] has values other"),
    ("universal", {"class_labels": [torch.tensor([5]), torch.tensor([0, 0])]}, "Class 5 in class_labels.0. is out"),
    ("simple_keypoints", {"labels": torch.zeros(2, 4, 3)},
     r"= \(2, 5, 3\), .* not torch.float32 of shape \(2, 4, 3\).*num_labels"),
    ("simple_keypoints", {"labels": torch.zeros(1, 5, 3)}, r"not torch.float32 of shape \(1, 5, 3\)"),
    ("simple_keypoints", {"labels": torch.zeros(2, 5, 2)}, r"of shape \(2, 5, 2\)"),
    ("simple_keypoints", {"labels": torch.zeros(2, 5, 3).long()}, "not torch.int64"),
    ("simple_keypoints", {"labels": torch.full((2, 5, 3), 3.0)}, r"Keypoint 0 of image 0 is \[3.0, 3.0, 3.0\]"),
    ("simple_keypoints", {"labels": torch.tensor([0, torch.nan, 1]).expand(2, 5, 3)},
     r"is \[0.0, nan, 1.0\]. It must be x, y in pixels"),
    ("mae", {"noise": torch.zeros(2, 15)}, r"noise must be \(batch, patches\) = \(2, 16\), not \(2, 15\)"),
    ("mae", {"bool_masked_pos": torch.zeros(2, 4, 4), "noise": None},
     r"bool_masked_pos must be \(batch, patches\) = \(2, 16\), not \(2, 4"),
    ("mae", {"bool_masked_pos": torch.zeros(2, 16)}, "Pass only one of them"),
    ("mae", {"bool_masked_pos": torch.eye(2)[:, :1].expand(2, 16), "noise": None},
     "hides every patch of image 0. Leave at least one"),
    ("mae", {"patch_attention_mask": torch.ones(2, 3, 4) > 0},
     r"columns of patches\) = \(2, 4, 4\), not \(2, 3, 4\)"),
    ("causal", {"input_ids": None}, "input_ids is missing"),
    ("causal", {"pixel_values": None}, "pixel_values is missing"),
    ("causal", {"pixel_values": ONE.expand(3, -1, -1, -1)}, "3 images and 2 texts"),
    (VIEWS, {"pixel_values": torch.zeros(3, 1, 3, 32, 32)}, "An image has 1 view"),
    (VIEWS, {"pixel_values": torch.zeros(3, 2, 3, 32, 32), "local_pixel_values": torch.zeros(2, 2, 3, 16, 16)},
     r"not \(2, 2, 3, 16, 16\)"),
    (VIEWS, {"pixel_values": torch.zeros(3, 3, 32, 32), "local_pixel_values": torch.zeros(3, 2, 3, 16, 16)},
     "local_pixel_values need pixel_v"),
]
# fmt: on


@pytest.mark.parametrize(("kind", "field", "options", "message"), OPTIONS)
def test_models_that_cannot_be_built_are_refused(kind: Any, field: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(kind, **({field: options} if field else options))


@pytest.mark.parametrize(("kind", "inputs", "message"), INPUTS, ids=range(len(INPUTS)))
def test_inputs_that_do_not_fit_are_refused(kind: Any, inputs: dict[str, Any], message: str) -> None:
    model = build(kind)
    given = {**inputs_of(model), **inputs}
    with pytest.raises(TypeError if "return_tensors" in message else ValueError, match=message):
        model(**given)
