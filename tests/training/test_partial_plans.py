"""Plans that train part of a published model: given blocks, and the choice between stored features and all blocks."""

from pathlib import Path
from typing import Any

import pytest
from datasets import config

from hf_vit import HfViTConfig, HfViTImageProcessor, HfViTModel
from hf_vit.training.planning import plan
from hf_vit.training.planning.budget import STORING_GAIN, Pace
from hf_vit.training.planning.defaults import CLASSIFICATION, choose
from hf_vit.training.planning.facts import Facts
from hf_vit.training.tasks import TASKS

from ..helpers.options import run
from .test_planning import command_of, write_photos


def test_given_blocks_keep_the_learning_rates_of_fine_tuning() -> None:
    facts = Facts(start="backbone", hidden_size=384, num_layers=12)
    chosen, plain = (choose(CLASSIFICATION, facts, given, {}) for given in (["trainable_blocks"], []))
    for name in ("learning_rate", "layer_decay", "warmup_steps"):
        assert chosen[name] == plain[name]
    assert "learning_rate" not in choose(CLASSIFICATION, facts, ["optim"], {})


@pytest.mark.parametrize(("gain", "is_stored"), [(0.9 * STORING_GAIN, False), (1.3 * STORING_GAIN, True)])
def test_features_are_stored_if_they_allow_many_more_steps(
    gain: float, is_stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    shape = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 32}
    HfViTModel(HfViTConfig(**shape, image_size=16, patch_size=8)).save_pretrained(tmp_path / "saved")
    HfViTImageProcessor(size=(16, 16)).save_pretrained(tmp_path / "saved")

    def measure(task: Any, seconds: float) -> Pace:
        stores = bool(task.args.cached_views)
        return Pace(0.5 if stores else 0.5 * gain, 0.0, 0.001 * stores, 1000 * stores)

    monkeypatch.setattr(plan, "measure_pace", measure)
    lines = list[str]()
    start = ["--model_name_or_path", str(tmp_path / "saved"), "--minutes", "4", "--dry_run"]
    command = command_of(write_photos(tmp_path / "photos"), tmp_path / "out", *start)
    run(TASKS["image-classification"], command, None, report=lines.append)
    assert any("features of frozen blocks are stored" in line for line in lines) is is_stored
