"""Small training runs with regularization, shared by several test files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.runs import make_trainer
from hf_vit.tasks.common.arguments import ClassificationArguments
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments

from .datasets import load_digits
from .models import encoder_shape
from .references import draw_weights


NUM_TRAIN, NUM_TEST = 44, 10
# MixUp and CutMix are off: they mix images of a batch, so results would depend on how the batch is split.
SPLITTABLE = ClassificationArguments("data", classification_loss="bce")
EVERYTHING = replace(SPLITTABLE, mixup_alpha=0.8, cutmix_alpha=1.0, mixing_off_share=0.2, token_drop_rate=0.25)


def regularized_trainer(
    folder: Path, batch_size: int, regularization: ClassificationArguments = SPLITTABLE, **options: Any
) -> HfViTTrainer:
    """Return the Trainer of the training script for a small model. Each image occurs twice in its batch."""
    digits = load_digits()
    splits = DatasetDict(
        train=digits["train"].select(range(NUM_TRAIN)), validation=digits["test"].select(range(NUM_TEST))
    )
    config = HfViTConfig.from_preset("mnist", **encoder_shape(16, 2, 16))
    model = HfViTForImageClassification(config)
    draw_weights(model)
    defaults = {"eval_strategy": "no", "save_strategy": "no", "num_train_epochs": 2, "logging_steps": 1}
    defaults |= {"optim": "sgd", "learning_rate": 0.1}  # not Adam, which would amplify rounding errors
    defaults |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": batch_size}
    defaults |= {"label_smoothing_factor": 0.1, "repeated_augmentations": 2}
    args = HfViTTrainingArguments(str(folder), **{**defaults, **options})
    plain = {"min_crop_scale": 1.0, "horizontal_flip": 0.0, "auto_augment": "affine", "random_erasing": 0.0}
    processor = HfViTImageProcessor.for_model(config)
    return make_trainer(model, processor, splits, replace(regularization, **plain), args)


def train_regularized(
    folder: Path,
    batch_size: int,
    regularization: ClassificationArguments = SPLITTABLE,
    checkpoint: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, optionally from a checkpoint; return the losses, the weights and the sequence lengths."""
    trainer = regularized_trainer(folder, batch_size, regularization, **options)
    lengths: list[tuple[bool, int]] = []
    trainer.model.model.register_forward_hook(
        lambda model, _, outputs: lengths.append((model.training, outputs.last_hidden_state.shape[1]))
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()
    return {
        "losses": torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]),
        "weights": torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()]),
        "lengths": set(lengths),
    }
