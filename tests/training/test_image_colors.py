"""Training options for the mean and standard deviation of colors in image normalization."""

from pathlib import Path
from typing import Any

import pytest

from hf_vit import HfViTForImageClassification
from hf_vit.training.arguments import ClassificationArguments
from hf_vit.training.models import load_model

from ..helpers.models import small_config


SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}


def processor_of(**options: Any) -> Any:
    arguments = ClassificationArguments(dataset_name="photos", **options)
    return load_model(HfViTForImageClassification, arguments, ["cat", "dog"])[1]


def test_a_new_model_has_the_given_colors_and_a_saved_model_keeps_its_own(tmp_path: Path) -> None:
    new = processor_of(config_overrides=SHAPE, image_mean=[0.1, 0.2, 0.3], image_std=[0.4])
    HfViTForImageClassification(small_config(num_channels=3)).save_pretrained(tmp_path)
    new.save_pretrained(tmp_path)
    saved = processor_of(model_name_or_path=str(tmp_path))
    for processor in (new, saved):
        assert (processor.image_mean, processor.image_std) == ((0.1, 0.2, 0.3), (0.4, 0.4, 0.4))
    changed = processor_of(model_name_or_path=str(tmp_path), image_mean=[0.7])
    assert (changed.image_mean, changed.image_std) == ((0.7, 0.7, 0.7), (0.4, 0.4, 0.4))
    with pytest.raises(ValueError, match="image_mean has 2 values"):
        processor_of(config_overrides=SHAPE, image_mean=[0.1, 0.2])
