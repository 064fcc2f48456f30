"""Calibrate the scores of a saved model on held-out images, and store the result in the folder of the model.

The command fits a temperature of the scores or, for keypoints, a scale of the expected errors and, for classes,
prediction sets and a summary of the features of the training images. It uses the validation images that training did
not report, or the images that training held out, without those that chose the weights. If there is a test split,
scores before and after calibration are measured on it, otherwise by cross-validation on the held-out images. If
cross-validation finds the scores worse, they remain as they were.

Examples:
    hf-vit calibrate outputs/photos
    hf-vit calibrate outputs/photos photos --split validation
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
from ..evaluation.calibration import fit_features
from ..model.calibration import SIMILARITY_FILE, HfViTCalibrationConfig
from ..options.recipe import RECIPE_NAME, recipe_of
from ..outputs import check_writable, write_atomically
from ..runs.choose import complete_calibration
from ..runs.evaluate import Evaluation, find_task, prepare_evaluation
from ..runs.model_card import CALIBRATION, describe_calibration
from ..runs.report import report_calibration
from ..runs.run import get_name
from ..tasks.base import Task, plain_batches
from ..tasks.common.load_data import CALIBRATION_SPLIT, NotHeldOutError, describe_images
from ..tasks.image_classification import ImageClassification, find_problem_type
from ..training.evaluator_trainer import EvaluatorTrainer
from ..training.finetuning.probe import encode
from ..training.output_folder import CODE_FILES


MOST_SHARE = 0.05  # maximum size of the summary of the features, relative to the weights
REPORTED = " The scores above were measured on the same images, so they are optimistic for the calibration."
SECTION_AFTER = "## Use"  # heading of the model card in front of which the section is inserted


def calibrate(
    model: str | Path,
    data: str | None = None,
    *,
    split: str | None = None,
    options: dict[str, Any] | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Calibrate a saved model and store the result in its folder. Equivalent to `hf-vit calibrate`.

    Args:
        model: Folder of a saved model; config.json is changed, and similarity.safetensors added.
        data: A folder, a file, or a dataset name on the Hub; by default the data of the training run.
        split: Split to fit the calibration on; by default validation images that training did not report, or the
            images that training held out. The card says so if its scores are those of this split.
        options: Further options of hf-vit evaluate, as JSON, such as '{"max_eval_samples": 2000}'.
        report: Function that receives progress messages.

    Raises:
        OSError: if there is no such model or data.
        ValueError: if the task has no scores, or no images are left for the calibration.
    """
    model = Path(model)
    given = {"max_eval_samples": 5000, **find_model_and_data(model, data), **(options or {})}
    with TemporaryDirectory() as folder:
        given["output_dir"] = folder
        held = open_held_out(given, split)
        task, trainer, used = held.task, held.trainer, held.split
        network, evaluator = trainer.plain_model, trainer.evaluator
        old = network.calibration
        if not trainer.calibrate(held.examples, describe_images(held.data.division, used)):
            raise ValueError(f"{type(network).__name__} has no scores to calibrate.")
        if task.chooses_threshold:
            trainer.choose_threshold(held.examples)
        complete_calibration(trainer)
        network.settle_calibration()
        fitted = network.calibration
        tested = prepare_evaluation(given)
        is_fitted = tested.split != "test" or used == "test"
        if is_fitted:
            tested = held
            evaluator.calibration_note += REPORTED
        tested.trainer.plain_model.config.calibration_config = fitted
        tested.trainer.predict(tested.examples, metric_key_prefix=tested.split)
        is_kept = not fitted.error_scale and (fitted.temperature, fitted.offset) == (old.temperature, old.offset)
        is_crossed = is_fitted and not is_kept
        pictures = report_calibration(model, tested.split, tested.trainer.evaluator, is_fitted=is_crossed)
        has_classes = isinstance(task, ImageClassification) and find_problem_type(held.data) == SINGLE
        if has_classes and "train" in task.open_data().splits:
            store_features(model, held, prepare_evaluation({**given, "split": "train"}), report)
    store_config(model, task, trainer, fitted)
    scores, card = tested.trainer.evaluator.calibration_scores, model / "README.md"
    if card.is_file():
        write_section(card, describe_calibration(scores, evaluator.calibration_note), pictures)
    report(evaluator.calibration_note)
    report(f"Scale of errors {fitted.error_scale:g}" if fitted.error_scale else f"Temperature {fitted.temperature:g}")
    how = "by cross-validation" if is_fitted else f"on {tested.split} images"
    for key, (before, after) in scores.items():
        report(f"{key}: {before:.4f} before, {after:.4f} after, measured {how}")


def find_model_and_data(model: Path, data: str | None) -> dict[str, Any]:
    """Return the options with a saved model and its data; raise `ValueError` or `OSError` if one is missing."""
    if not (model / "config.json").is_file():
        raise ValueError(f"{model} is not the folder of a saved model, which the command changes. Download it first.")
    check_writable(model)
    data = data or recipe_of(model).get("dataset_name")
    if data is None:
        raise ValueError(f"{model} has no recipe.yaml that names its data. Run: hf-vit calibrate {model} DATA")
    return {"model_name_or_path": str(model), "dataset_name": data}


def open_held_out(given: Mapping[str, Any], split: str | None) -> Evaluation:
    """Return the evaluation of a saved model on images that it was not trained on.

    Raises:
        ValueError: if there are no such images; the message contains the command of a training run that has some.
    """
    if split == "train":
        raise ValueError("split='train' selects images that the model was trained on. Choose validation or test.")
    try:
        opened = prepare_evaluation({**given, "split": split or CALIBRATION_SPLIT})
        if opened.split == "validation" and opened.data.division.chooses_weights:
            opened = prepare_evaluation({**given, "split": CALIBRATION_SPLIT})
        return opened
    except NotHeldOutError as error:
        model, again = Path(given["model_name_or_path"]), ""
        if error.options and (model / RECIPE_NAME).is_file():
            command = f"hf-vit train {get_name(find_task(given))} --recipe {model / RECIPE_NAME} {error.options}"
            again = f" Train with held-out images: {command} --output_dir {model}-held-out."
        raise ValueError(f"{error}{again} To use other images, name their split with --split.") from error


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


def store_features(folder: Path, held: Evaluation, trained: Evaluation, report: Callable[[str], None]) -> None:
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
    if summary is None:
        report(f"The features need more than {MOST_SHARE:.0%} of the size of the weights. They are not stored.")
        return
    save_file({name: tensor.contiguous() for name, tensor in vars(summary).items()}, folder / SIMILARITY_FILE)


def write_section(card: Path, section: str, pictures: Mapping[str, str]) -> None:
    """Insert or replace the section about the calibration in a model card."""
    text = re.sub(rf"{CALIBRATION}\n.*?\n(?=## |\Z)", "", card.read_text(encoding="utf-8"), flags=re.DOTALL)
    shown = "".join(f"\n![{caption}]({file})\n" for caption, file in pictures.items() if f"]({file})" not in text)
    before, heading, after = text.partition(SECTION_AFTER)
    write_atomically(card, f"{before}{section}\n{shown}\n{heading}{after}")
