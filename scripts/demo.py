"""Train a Vision Transformer on handwritten digits in about a minute on two CPU cores, without network access.

The script evaluates the model on held-out test images, saves it with its image processor and a model card, and
predicts ten image files with `hf-vit predict` in a new process.

Examples:
    python scripts/demo.py
    python scripts/demo.py --seed 1 --num_train_epochs 20 --output_dir outputs/short
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from transformers import HfArgumentParser, PreTrainedModel, TrainingArguments, set_seed
from transformers.models.vit import ViTConfig, ViTForImageClassification

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, data, runs, tasks, training
from hf_vit.data.augmentation.classification import small_affine
from hf_vit.evaluation.classification import majority_baseline


@dataclass
class DemoArguments:
    """Options that reproduce the selection of hyperparameters and the comparison with transformers."""

    held_out: bool = field(
        default=False, metadata={"help": "Only evaluate, on a held-out tenth of the training images."}
    )
    peer: bool = field(default=False, metadata={"help": "Only evaluate, with transformers' ViT of the same shape."})


@dataclass
class Recipe(TrainingArguments):
    """transformers.TrainingArguments with the hyperparameters of this demo."""

    output_dir: str | None = "outputs/digits"
    learning_rate: float = 3e-3
    num_train_epochs: float = 30
    per_device_train_batch_size: int = 64
    per_device_eval_batch_size: int = 120
    warmup_steps: float = 0.1
    weight_decay: float = 0.05
    lr_scheduler_type: str = "cosine"
    seed: int = 0
    logging_steps: float = 0.1
    save_strategy: str = "no"
    remove_unused_columns: bool = False
    dataloader_pin_memory: bool = torch.cuda.is_available()


def make_model(names: list[str], peer: bool) -> PreTrainedModel:
    """Return a new model with the preset "mnist" or, if `peer` is set, a transformers ViT of the same shape."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    config = HfViTConfig.from_preset("mnist", **labels)
    if not peer:
        return HfViTForImageClassification(config)
    shape = "hidden_size num_hidden_layers num_attention_heads intermediate_size image_size patch_size num_channels"
    fields = (*shape.split(), *labels, "initializer_range")
    return ViTForImageClassification(ViTConfig(**{name: vars(config)[name] for name in fields}))


def predict_in_fresh_process(model: Path, images: Dataset) -> None:
    """Save the first image of each digit, run predictions in a new process, and print and draw the predictions."""
    folder, picture = model / "images", model / "predictions.png"
    folder.mkdir(exist_ok=True)
    for digit in range(10):
        images[images["label"].index(digit)]["image"].save(folder / f"{digit}.png")
    command = [sys.executable, "-m", "hf_vit", "predict", *map(str, (model, folder, "--picture", picture))]
    with tempfile.TemporaryDirectory() as elsewhere:
        environment = {**os.environ, "HF_HOME": elsewhere}
        answer = subprocess.run(command, cwd=elsewhere, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print("\nPredictions in a new process:")
    for prediction in map(json.loads, answer.stdout.splitlines()):
        print(f"  {Path(prediction['file']).name}: {prediction['label']} ({prediction['score']:.1%})")
    print(f"Picture of the predictions: {picture}\nModel, image processor and model card: {model}")


def main(arguments: list[str] | None = None) -> None:
    """Train, evaluate, save, and predict in a new process."""
    demo, recipe = HfArgumentParser((DemoArguments, Recipe)).parse_args_into_dataclasses(arguments)
    splits = data.load_digits_dataset()
    if demo.held_out:
        splits = data.hold_out(splits["train"])
    set_seed(recipe.seed)
    model = make_model(splits["train"].features["label"].names, demo.peer)
    processor = HfViTImageProcessor.for_model(HfViTConfig.from_preset("mnist"))
    trainer = training.HfViTTrainer(
        model=model,
        args=recipe,
        train_dataset=data.AugmentedDataset(splits["train"], small_affine(), recipe.seed),
        eval_dataset=splits["test"],
        data_collator=data.ImageClassificationCollator(processor),
        processing_class=processor,
        compute_metrics=training.image_classification_metrics,
    )
    seconds = trainer.train().metrics["train_runtime"]
    score, number = trainer.evaluate()["eval_accuracy"], len(splits["test"])
    print(
        f"\nAccuracy {score:.2%} ({round(number * (1 - score))} of {number} wrong) after {seconds:.0f} s of training."
    )
    if demo.held_out or demo.peer:
        return
    trainer.save_model()
    majority = majority_baseline(splits["train"]["label"], splits["test"]["label"], num_labels=10)
    info = runs.TrainingInfo.from_trainer(
        trainer,
        model_name="A small ViT on handwritten digits",
        task="image-classification",
        usage=tasks.ImageClassification.usage,
        data=data.DIGITS_INFO,
        metrics={"accuracy": score},
        baselines={"most frequent digit": majority},
        command=shlex.join(["python", *sys.argv]),
        seconds=seconds,
        recipe={"augmentation": "slight random rotation, shift, zoom and shear"},
        limits="It was trained on single upright digits, light on dark, and predicts a digit for every image.",
        pictures={"Predictions": "predictions.png"},
    )
    runs.write_model_card(recipe.output_dir, info)
    predict_in_fresh_process(Path(recipe.output_dir).resolve(), splits["test"])


if __name__ == "__main__":
    main()
