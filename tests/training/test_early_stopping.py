"""Resuming runs that were ended by early stopping or have finished."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from datasets import DatasetDict

from hf_vit.data import hold_out
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments, last_checkpoint, make_trainer
from hf_vit.training.arguments import ClassificationArguments, TaskArguments
from hf_vit.training.tasks.image_classification import load_classifier

from ..helpers.datasets import load_digits


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def digits() -> DatasetDict:
    splits = hold_out(load_digits()["train"].select(range(60)), 0.2)
    return DatasetDict(train=splits["train"], validation=splits["test"])


def trainer_in(folder: Path, digits: DatasetDict, **options: Any) -> HfViTTrainer:
    """Return the trainer of a run that does not change the weights, so that its first evaluation is the best."""
    args = HfViTTrainingArguments(
        output_dir=str(folder),
        **{"learning_rate": 0.0, "num_train_epochs": 9, "report_to": "none", "save_total_limit": None, **options},
        per_device_train_batch_size=16,
        use_cpu=True,
        disable_tqdm=True,
    )
    model, processor = load_classifier(
        TaskArguments(dataset_name="data", preset="mnist", config_overrides=TINY), list("0123456789")
    )
    return make_trainer(model, processor, digits, ClassificationArguments("data"), args)


def test_patience_goes_on_where_it_stood_and_an_end_stays_an_end(tmp_path: Path, digits: DatasetDict) -> None:
    # The best epoch is the first, followed by three epochs of patience.
    for checkpoint in (None, "checkpoint-9", "checkpoint-12"):
        trainer = trainer_in(tmp_path, digits, early_stopping_patience=3)
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))
        assert (trainer.state.global_step, trainer.state.best_global_step) == (4 * 3, 3), checkpoint
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-12"), checkpoint


def test_the_clock_counts_on_and_a_training_at_its_end_goes_on_for_more_epochs(
    tmp_path: Path, digits: DatasetDict
) -> None:
    first = trainer_in(tmp_path, digits, num_train_epochs=1)
    start = time.monotonic()
    first.train()
    assert 0 < first.seconds <= time.monotonic() - start
    state = json.loads((Path(last_checkpoint(tmp_path)) / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["TrainingClock"]["attributes"]["earlier"]
    assert 0 < saved <= first.seconds
    time.sleep(0.1)
    again = trainer_in(tmp_path, digits, num_train_epochs=3)
    start = time.monotonic()
    again.train(resume_from_checkpoint=last_checkpoint(tmp_path))
    assert again.state.global_step == 9
    assert saved < again.seconds <= first.seconds + time.monotonic() - start
