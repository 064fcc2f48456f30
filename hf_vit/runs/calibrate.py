"""Calibrate the scores of a saved model on held-out images, and store the result in the folder of the model.

The command fits a temperature of the scores or, for keypoints, a scale of the expected errors and, for classes,
prediction sets and a summary of the features of the training images. It uses the validation split or the images that
training held out. If there is a test split, scores before and after calibration are measured on it, otherwise by
cross-validation on the held-out images.

Examples:
    hf-vit calibrate outputs/photos photos
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from datasets import DatasetDict
from safetensors.torch import save_file

from .. import model as travelling
from ..data.reading.label_values import SINGLE
from ..evaluation.calibration import LEAST_FITTED, fit_features
from ..model.calibration import SIMILARITY_FILE, HfViTCalibrationConfig
from ..outputs import check_writable, write_atomically
from ..runs.choose import complete_calibration
from ..runs.evaluate import Evaluation, prepare_evaluation
from ..runs.model_card import CALIBRATION, describe_calibration
from ..runs.report import report_calibration
from ..tasks.base import Task, plain_batches
from ..tasks.image_classification import ImageClassification, find_problem_type
from ..training.evaluator_trainer import EvaluatorTrainer
from ..training.finetuning.probe import encode
from ..training.output_folder import CODE_FILES


MOST_SHARE = 0.05  # maximum size of the summary of the features, relative to the weights
SECTION_AFTER = "## Use"  # heading of the model card in front of which the section is inserted


def calibrate(
    model: str | Path,
    data: str,
    *,
    split: str = "validation",
    options: dict[str, Any] | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Calibrate a saved model and store the result in its folder. Equivalent to `hf-vit calibrate`.

    Args:
        model: Folder of a saved model; config.json is changed, and similarity.safetensors added.
        data: Data of the training run: a folder, a file, or a dataset name on the Hub.
        split: Split of images that were not used for training, on which the calibration is fitted.
        options: Further options of hf-vit evaluate, as JSON, such as '{"max_eval_samples": 2000}'.
        report: Function that receives progress messages.

    Raises:
        OSError: if there is no such model or data.
        ValueError: if the task has no scores, or the split is missing.
    """
    model = Path(model)
    if not (model / "config.json").is_file():
        raise ValueError(f"{model} is not the folder of a saved model, which the command changes. Download it first.")
    check_writable(model)
    given = {"model_name_or_path": str(model), "dataset_name": data, "max_eval_samples": 5000, **(options or {})}
    with TemporaryDirectory() as folder:
        held = prepare_evaluation({**given, "split": split, "output_dir": folder})
        task, trainer = held.task, held.trainer
        if not trainer.calibrate(held.examples):
            raise ValueError(
                f"{type(trainer.plain_model).__name__} has no scores to calibrate, or the {split} images have fewer "
                f"than {LEAST_FITTED}. Use more images."
            )
        if task.chooses_threshold:
            trainer.choose_threshold(held.examples)
        complete_calibration(trainer)
        fitted = trainer.plain_model.calibration
        tested = prepare_evaluation({**given, "output_dir": folder})
        if tested.split != "test":
            tested = held
        tester, name = tested.trainer, tested.split
        tester.plain_model.config.calibration_config = fitted
        tester.predict(tested.examples, metric_key_prefix=name)
        pictures = report_calibration(model, name, tester.evaluator, is_fitted=name == split)
        if isinstance(task, ImageClassification) and find_problem_type(held.data) == SINGLE:
            trained = prepare_evaluation({**given, "split": "train", "output_dir": folder})
            if not store_features(model, held, trained):
                report(
                    f"The features need more than {MOST_SHARE:.0%} of the size of the weights. They are not stored."
                )
    store_config(model, task, trainer, fitted)
    scores, card = tester.evaluator.calibration_scores, model / "README.md"
    if scores and card.is_file():
        write_section(card, describe_calibration(scores), pictures)
    how = "by cross-validation" if name == split else f"on {name} images"
    value = f"Scale of errors {fitted.error_scale:g}" if fitted.error_scale else f"Temperature {fitted.temperature:g}"
    report(f"{value}, fitted on {fitted.num_images:,} {split} images.")
    for key, (before, after) in scores.items():
        report(f"{key}: {before:.4f} before, {after:.4f} after, measured {how}")


def store_config(folder: Path, task: Task, trainer: EvaluatorTrainer, fitted: HfViTCalibrationConfig) -> None:
    """Write the calibration to config.json, and update the model code in the folder, if there is any."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["calibration_config"] = fitted.to_dict()
    if task.chooses_threshold:
        config[task.options.task_config] |= {"score_threshold": trainer.plain_model.options.score_threshold}
        trainer.processing_class.save_pretrained(folder)
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if (folder / "configuration_hf_vit.py").is_file():  # the code of an earlier version does not know the calibration
        for name in CODE_FILES:
            copyfile(Path(travelling.__path__[0]) / name, folder / name)


def store_features(folder: Path, held: Evaluation, trained: Evaluation) -> bool:
    """Write `similarity.safetensors`, unless it is too large, given evaluations of held-out and training images."""
    task, trainer, split = held.task, held.trainer, held.split
    model, processor = trainer.plain_model, trainer.processing_class
    seen, rows = set(held.data.splits[split]["file"]), trained.data.splits["train"]
    kept = [index for index, file in enumerate(rows["file"]) if file not in seen]
    train = replace(trained.data, splits=DatasetDict({"train": rows.select(kept)}))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.name != SIMILARITY_FILE)
    batch_size = trainer.args.per_device_eval_batch_size
    features, labels = encode(model, plain_batches(task, model, processor, train, len(kept), batch_size))
    held_out, _ = encode(model, plain_batches(task, model, processor, held.data, len(seen), batch_size, split))
    summary = fit_features(features, labels, held_out, MOST_SHARE * size)
    if summary is not None:
        save_file({name: tensor.contiguous() for name, tensor in vars(summary).items()}, folder / SIMILARITY_FILE)
    return summary is not None


def write_section(card: Path, section: str, pictures: Mapping[str, str]) -> None:
    """Insert or replace the section about the calibration in a model card."""
    text = re.sub(rf"{CALIBRATION}\n.*?\n(?=## |\Z)", "", card.read_text(encoding="utf-8"), flags=re.DOTALL)
    shown = "".join(f"\n![{caption}]({file})\n" for caption, file in pictures.items() if f"]({file})" not in text)
    before, heading, after = text.partition(SECTION_AFTER)
    write_atomically(card, f"{before}{section}\n{shown}\n{heading}{after}")
