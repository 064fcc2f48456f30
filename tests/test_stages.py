"""Test the table of model stages that `hf-vit info MODEL --image` prints."""

from pathlib import Path

import pytest
import torch

from hf_vit import (
    HfViTConfig,
    HfViTForImageClassification,
    HfViTForImageReconstruction,
    HfViTForMultiTask,
    HfViTForZeroShotImageClassification,
    HfViTModel,
    info,
)
from hf_vit.flops import describe_stages
from hf_vit.runs.info import stage_table

from .helpers.models import TRAINING_CASES, small_config


def block_operations(config: HfViTConfig, length: int) -> int:
    """Return the number of operations in the matrix products of an encoder block for `length` tokens."""
    width, inner = config.hidden_size, config.intermediate_size
    return 2 * length * (4 * width**2 + 2 * width * inner) + 4 * length**2 * width


@pytest.mark.parametrize("model_class", [HfViTModel, HfViTForImageClassification, HfViTForZeroShotImageClassification])
def test_stages_have_the_parameters_and_operations_of_the_model(model_class: type[HfViTModel]) -> None:
    config = small_config(image_size=32, patch_size=8, num_register_tokens=2)
    with torch.device("meta"):
        model = model_class(config)
    whole = model if model_class is not HfViTForZeroShotImageClassification else model.base_model
    size, blocks = sum(weight.numel() for weight in whole.parameters()), config.num_hidden_layers
    stages = describe_stages(model, 16, 40)
    assert sum(stage.parameters for stage in stages) == size
    assert [stage.name for stage in stages[3:-1]] == [f"block {number + 1}" for number in range(blocks)]
    assert {stage.shape for stage in stages[2:-1]} == {f"({10 + 3}, {config.hidden_size})"}
    assert [stage.operations for stage in stages[3:-1]] == [block_operations(config, 13)] * blocks
    assert stages[1].operations == 2 * 10 * config.num_channels * 64 * config.hidden_size
    assert config.num_patches == 16


MODELS = {name: (case.model_class, case.overrides) for name, case in TRAINING_CASES.items()}
HEADS = {"rooms": {"task": "depth-estimation", "config": {}}, "kinds": {"task": "image-classification", "config": {}}}
MODELS |= {
    "kl_autoencoder": (HfViTForImageReconstruction, {}),
    "multi_task": (HfViTForMultiTask, {"multi_task_config": {"heads": HEADS}}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_task_has_a_table_of_stages(name: str) -> None:
    model_class, overrides = MODELS[name]
    config = small_config(**overrides)
    config.architectures = [next(own.__name__ for own in model_class.__mro__ if own.__module__.startswith("hf_vit"))]
    lines = stage_table(config.to_dict(), "32x32")
    assert [line.split()[0] for line in lines[4:-2]] == ["block"] * config.num_hidden_layers
    assert float(lines[-1].split()[-1]) > 0


def test_the_command_prints_stages_and_refuses_what_is_no_size(tmp_path: Path) -> None:
    HfViTForImageClassification(small_config(image_size=32, patch_size=8)).save_pretrained(tmp_path / "saved")
    lines = list[str]()
    info(str(tmp_path / "saved"), image="16x40", report=lines.append)
    assert any(line.startswith("patches, 2 x 5") for line in lines)
    assert lines[-1].startswith("total")
    for size, message in (("16", "must be height and width"), ("17x40", "not a multiple of the patch height 8")):
        with pytest.raises(ValueError, match=message):
            info(str(tmp_path / "saved"), image=size, report=lines.append)
    with pytest.raises(ValueError, match="Give a model"):
        info(image="16x40", report=lines.append)
