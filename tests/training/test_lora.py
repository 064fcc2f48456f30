"""Test LoRA adapters: their trained weights, saved files, and loading."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import pipeline
from transformers.integrations import peft as integration

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTForZeroShotImageClassification, HfViTImageProcessor
from hf_vit.data import AugmentedDataset, ImageClassificationCollator
from hf_vit.data.augmentation.classification import small_affine
from hf_vit.tasks import ImageClassification
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments
from hf_vit.training.checkpoints import find_resume_error, write_checksums
from hf_vit.training.lora import is_adapted

from ..helpers.datasets import load_digits, write_class_folders
from ..helpers.image_text_trainings import make_trainer as make_image_text_trainer
from ..helpers.image_text_trainings import write_captions
from ..helpers.models import TRAINING_CASES, small_config
from ..helpers.options import run
from ..helpers.references import assert_close, assert_identical
from ..helpers.trainings import DIGITS_CONFIG, NUM_TRAIN, collate, examples_of, model_and_batch


# These cases cover models with buffers, with a decoder, with a head without labels, and with two towers.
TASKS = (
    *("batch_norm", "semantic", "class_numbers", "deformable", "universal", "universal_mask", "queries"),
    *("mae", "simmim", "metric_depth", "sigmoid", "keypoints", "distillation_token"),
)
TOWERS = ("model.", "text_model.")


def arguments(folder: Path, **options: Any) -> HfViTTrainingArguments:
    defaults = {"lora_rank": 2, "learning_rate": 0.01, "warmup_steps": 0, "eval_strategy": "no", "disable_tqdm": True}
    return HfViTTrainingArguments(str(folder), use_cpu=True, report_to="none", **{**defaults, **options})


def saved_base(name: str, folder: Path) -> nn.Module:
    model, _ = model_and_batch(name, 2)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def trainer_of(model: nn.Module, args: HfViTTrainingArguments, batch: dict[str, Any]) -> HfViTTrainer:
    return HfViTTrainer(model=model, args=args, train_dataset=examples_of(batch), data_collator=collate)


def outputs_of(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """Return the loss and all other outputs of a model for a batch."""
    with torch.no_grad():
        return [value for value in model.eval()(**batch).to_tuple() if isinstance(value, Tensor)]


def check_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) > 1
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one.double(), other.double(), 1e-4, f"output {number}")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", TASKS)
def test_every_task_learns_by_an_adapter_that_opens_alone_and_merged(name: str, tmp_path: Path) -> None:
    case, base, out = TRAINING_CASES[name], tmp_path / "base", tmp_path / "out"
    model = saved_base(name, base)
    weights = {key: weight.clone() for key, weight in model.named_parameters()}
    batch = case.make_batch(model.config, 8)
    args = arguments(out, max_steps=2, per_device_train_batch_size=8, save_strategy="no")
    trainer = trainer_of(model, args, batch)
    assert type(trainer.model) is case.model_class
    first = outputs_of(model, batch)
    check_same(first, outputs_of(case.model_class.from_pretrained(base), batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        trainer.train()
    trainer.save_model()
    learned = outputs_of(model, batch)
    assert not torch.allclose(learned[0], first[0])
    # In the image and text towers, training changes only the adapters.
    now = {key.replace(".base_layer.", "."): weight for key, weight in model.named_parameters()}
    assert all(torch.equal(now[key], weight) for key, weight in weights.items() if key.startswith(TOWERS))
    trained = {key for key, weight in model.named_parameters() if weight.requires_grad}
    assert all(".lora_" in key for key in trained if key.startswith(TOWERS))
    kinds = ("attention.qkv", "attention.projection", "mlp.fc1", "mlp.fc2")
    assert trained >= {f"model.encoder.layers.2.{kind}.lora_B.default.weight" for kind in kinds}
    heads = {key for key in weights if not key.startswith(TOWERS)}
    assert {key.replace("modules_to_save.default.", "") for key in trained if not key.startswith(TOWERS)} == heads
    # The merged model can be loaded without peft. The adapter can be loaded with peft.
    merged = case.model_class.from_pretrained(out)
    assert dict(merged.named_parameters()).keys() == weights.keys()
    wrapped = PeftModel.from_pretrained(case.model_class.from_pretrained(base), out / "adapter")
    for opened in (merged, wrapped):
        check_same(outputs_of(opened, batch), learned)
    check_same(outputs_of(wrapped.merge_and_unload(), batch), learned)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small saved classifier of digits."""
    folder = tmp_path_factory.mktemp("lora") / "base"
    HfViTForImageClassification(HfViTConfig.from_preset("mnist", **DIGITS_CONFIG)).save_pretrained(folder)
    return folder


def digits_trainer(folder: Path, base: Path, **options: Any) -> HfViTTrainer:
    torch.manual_seed(0)
    model, digits = HfViTForImageClassification.from_pretrained(base), load_digits()
    return HfViTTrainer(
        model=model,
        args=arguments(folder, num_train_epochs=2, per_device_train_batch_size=8, **options),
        train_dataset=AugmentedDataset(digits["train"].select(range(NUM_TRAIN)), small_affine(), seed=0),
        eval_dataset=digits["test"].select(range(20)),
        data_collator=ImageClassificationCollator(HfViTImageProcessor.for_model(model.config)),
    )


def test_a_training_is_resumed_bit_for_bit(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"lora_dropout": 0.2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 9, "max_steps": 4}
    whole, again = (digits_trainer(tmp_path / n, base, gradient_checkpointing=True, **options) for n in ("1", "2"))
    whole.train()
    assert whole.model.model.encoder.layers[0].attention.qkv.lora_B["default"].weight.abs().max() > 0
    without, checkpoint = (tmp_path / "1" / f"checkpoint-{step}" for step in (2, 4))
    again.train(resume_from_checkpoint=str(without))
    assert "keys in the checkpoint" not in caplog.text
    assert_identical(again.model.state_dict(), whole.model.state_dict())
    # Without its adapter files, the checkpoint looks like a checkpoint of a training run without LoRA.
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (without / name).unlink()
    shutil.copy(base / "model.safetensors", without)
    write_checksums(without)
    assert not (checkpoint / "model.safetensors").exists()
    assert find_resume_error(checkpoint) is None
    plain = digits_trainer(tmp_path / "plain", base, **{**options, "lora_rank": None})
    with pytest.raises(ValueError, match=r"checkpoint-4 contains only an adapter .* with the lora_rank of its train"):
        plain.train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(ValueError, match=r"checkpoint-2 contains no adapter .* Resume without lora_rank"):
        again.train(resume_from_checkpoint=str(without))
    (checkpoint / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in find_resume_error(checkpoint)


def test_the_best_adapter_is_loaded_at_the_end(base: Path, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    # With greater_is_better=True, the model with the highest loss is the best one, which is not the last one.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = digits_trainer(tmp_path / "out", base, save_total_limit=None, **options, **best)
    trainer.train()
    assert trainer.state.best_global_step < 3
    expected = load_file(Path(trainer.state.best_model_checkpoint) / "adapter_model.safetensors")
    trainer.save_model()
    assert_identical(load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors"), expected)


def test_the_script_leaves_a_plain_model_and_its_adapter(tmp_path: Path) -> None:
    base, out, config = tmp_path / "base", tmp_path / "out", small_config(num_labels=7)
    HfViTForImageClassification(config).save_pretrained(base)
    HfViTImageProcessor.for_model(config).save_pretrained(base)
    data = write_class_folders(tmp_path / "photos", ["cat", "dog"])
    command = ["--model_name_or_path", str(base), "--dataset_name", str(data), "--output_dir", str(out)]
    command += ["--lora_rank", "2", "--max_steps", "2", "--per_device_train_batch_size", "2", "--use_cpu"]
    command += ["--train_val_split", "0.5", "--report_to", "none", "--disable_tqdm", "true"]
    said: list[str] = []
    run(ImageClassification, command, None, said.append)
    size = HfViTForImageClassification(small_config(num_labels=2, pooling="cls_mean")).num_parameters()
    assert f"Model: {size:,} parameters." in "\n".join(said)
    classify = pipeline("image-classification", model=str(out))
    assert {answer["label"] for answer in classify(str(data / "test" / "cat" / "0.png"))} == {"cat", "dog"}
    assert {path.name for path in (out / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    adapter = json.loads((out / "adapter" / "adapter_config.json").read_text())
    expected = {"r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base), "modules_to_save": ["classifier"]}
    assert {name: adapter[name] for name in expected} == expected
    card = (out / "README.md").read_text()
    assert "| adapter | LORA, rank 2, alpha 4, dropout 0 in 12 layers; classifier in full; " in card
    assert f"with {size:,} parameters" in card


def test_a_checkpoint_names_the_task_that_it_learns_and_its_options(tmp_path: Path) -> None:
    case = TRAINING_CASES["metric_depth"]
    HfViTForImageClassification(small_config(**case.overrides)).save_pretrained(tmp_path / "base")
    model = case.model_class.from_pretrained(tmp_path / "base")
    args = arguments(tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1, per_device_train_batch_size=2)
    trainer_of(model, args, case.make_batch(model.config, 2)).train()
    config = json.loads((tmp_path / "out" / "checkpoint-1" / "config.json").read_text())
    assert config["architectures"] == [case.model_class.__name__]
    assert config["depth_config"] == model.options.to_full_dict()


def test_add_adapter_errors_suggest_a_working_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "MIN_PEFT_VERSION", "99.0")
    model = HfViTForImageClassification(small_config())
    works = r">= 99\.0\. With the installed version of peft, use peft\.get_peft_model\(model, config\)"
    with pytest.raises(ValueError, match=works):
        model.add_adapter(LoraConfig(target_modules=["attention.qkv"]))
    assert not is_adapted(model)
    monkeypatch.setattr(integration, "check_peft_version", lambda min_version: None)
    with pytest.raises(ValueError, match=r"not found.* are attention\.projection, attention\.qkv, mlp\.fc1, mlp\.fc2"):
        model.add_adapter(LoraConfig(target_modules=["query", "value"]))
    model.add_adapter(LoraConfig(target_modules=["attention.qkv"]))  # the failed call must not have changed the model
    assert model.active_adapters() == ["default"]


@pytest.mark.parametrize("way", ["get_peft_model", "add_adapter"])
def test_adapters_of_users_resume_and_are_merged(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Disables the check of the peft version.
    monkeypatch.setattr(integration, "check_peft_version", lambda min_version: None)
    case, base, whole = TRAINING_CASES["class_numbers"], tmp_path / "base", tmp_path / "whole"
    batch = case.make_batch(saved_base("class_numbers", base).config, 8)

    def make_trainer(folder: Path) -> HfViTTrainer:
        torch.manual_seed(0)
        model = case.model_class.from_pretrained(base)
        config = LoraConfig(r=2, target_modules=["attention.qkv"], modules_to_save=["classifier"])
        if way == "get_peft_model":
            model = get_peft_model(model, config)
        else:
            model.add_adapter(config)
        options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 8}
        return trainer_of(model, arguments(folder, lora_rank=None, **options), batch)

    trainer = make_trainer(whole)
    first = outputs_of(trainer.model, batch)
    trainer.train()
    trainer.save_model()
    learned = outputs_of(trainer.model, batch)
    assert not torch.allclose(learned[0], first[0])
    again = make_trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(whole / "checkpoint-1"))
    assert_identical(outputs_of(again.model, batch), learned)
    adapted = PeftModel.from_pretrained(case.model_class.from_pretrained(base), whole / "adapter")
    for model in (case.model_class.from_pretrained(whole), adapted):
        check_same(outputs_of(model, batch), learned)


def test_what_was_frozen_before_learns_nothing(tmp_path: Path) -> None:
    saved_base("sigmoid", tmp_path)
    model = HfViTForZeroShotImageClassification.from_pretrained(tmp_path)
    model.freeze_vision()
    trainer = HfViTTrainer(model=model, args=arguments(tmp_path / "out", lora_target_modules=["qkv"]))
    trained = {name.split(".")[0] for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert trained == {"text_model", "contrastive_head"}
    layers = {name.partition(".lora_")[0] for name in trainer.model.state_dict() if ".lora_" in name}
    assert layers == {f"text_model.encoder.layers.{number}.attention.qkv" for number in range(2)}


def test_adapters_need_a_trained_model_and_matching_layers(tmp_path: Path) -> None:
    model = HfViTForImageClassification(small_config())
    HfViTTrainer(model=model, args=arguments(tmp_path, lora_rank=None))
    assert all(weight.requires_grad for weight in model.parameters())
    with pytest.raises(ValueError, match=r"lora_rank=2 .* is trained from scratch. Give .* --model_name_or_path"):
        HfViTTrainer(model=model, args=arguments(tmp_path))
    model = saved_base("class_numbers", tmp_path)
    # Names that match no layer are refused even if other names match.
    for names, missing in (
        (["query", "value"], "query or value"),
        (["mlp.fc1", "value"], "value"),
        (["mlp.gate"], "mlp.gate"),
    ):
        message = (
            rf"lora_target_modules=\['.* has a name that ends with {missing}\. .* are one layer, attention\.qkv, so"
        )
        with pytest.raises(ValueError, match=message):
            HfViTTrainer(model=model, args=arguments(tmp_path, lora_target_modules=names))
    captions = write_captions(tmp_path / "pairs", (4, 4))
    with pytest.raises(ValueError, match=r"lora_rank=2 .* would be trained from scratch"):
        make_image_text_trainer(captions, tmp_path / "out", "--lora_rank", "2")
