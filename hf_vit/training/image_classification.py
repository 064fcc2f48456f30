"""Training of image classifiers: model, trainer and report."""

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from huggingface_hub.errors import StrictDataclassError
from transformers import BaseImageProcessor, EarlyStoppingCallback, EvalPrediction
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.utils import logging

from ..configuration_hf_vit import HfViTConfig, check_fields
from ..convert import load_image_processor
from ..data import (
    AugmentedDataset,
    DataRecord,
    ImageClassificationCollator,
    image_classification_augmentation,
)
from ..image_processing_hf_vit import HfViTImageProcessor
from ..modeling_hf_vit import HfViTForImageClassification
from ..visualize import draw_curves
from .arguments import (
    AugmentationArguments,
    HfViTTrainingArguments,
    ModelArguments,
    TrainingDataArguments,
)
from .metrics import SCORES, image_classification_metrics, majority_baseline
from .model_card import TrainingRecord, write_model_card
from .recipe import RECIPE_NAME
from .report import write_scores
from .trainer import HfViTTrainer


logger = logging.get_logger(__name__)


def load_classifier(args: ModelArguments, names: list[str]) -> tuple[HfViTForImageClassification, BaseImageProcessor]:
    """Returns the model to train and its image processor.

    Args:
        args: A saved model or the size of a new one.
        names: The class names of the data. A saved model that knows other classes gets a fresh classifier.

    Raises:
        OSError: if there is no such saved model.
        ValueError: if it is of another kind, or an option does not fit.
    """
    try:
        return new_classifier(args, names) if args.model_name_or_path is None else tune(args, names)
    except StrictDataclassError as error:
        raise ValueError(f"The configuration does not fit: {error}") from error


def new_classifier(args: ModelArguments, names: list[str]) -> tuple[HfViTForImageClassification, BaseImageProcessor]:
    """Returns a model with fresh weights and its image processor."""
    config = HfViTConfig.from_preset(args.preset or "small", **(args.overrides() | name_labels(names)))
    return HfViTForImageClassification(config), HfViTImageProcessor.for_model(config)


def tune(args: ModelArguments, names: list[str]) -> tuple[HfViTForImageClassification, BaseImageProcessor]:
    """Returns a saved model, with a fresh classifier if it knows other classes, and its image processor."""
    assert args.model_name_or_path is not None
    overrides = args.overrides()
    model = open_classifier(args.model_name_or_path, **overrides)
    known = list(model.config.id2label.values())
    if known != names:
        logger.warning(
            f"The saved model knows the classes {shorten(known)}. It gets a fresh classifier for {shorten(names)}."
        )
        config = HfViTConfig.from_dict({**model.config.to_dict(), **name_labels(names)})
        weights = {name: weight for name, weight in model.state_dict().items() if "classifier." not in name}
        model = HfViTForImageClassification.from_pretrained(None, config=config, state_dict=weights)
    model.config.problem_type = "single_label_classification"
    channels, patch = model.config.num_channels, model.config.patch_size
    size = overrides.get("image_size")
    return model, load_image_processor(args.model_name_or_path, size, channels, patch, given=overrides)


def name_labels(names: list[str]) -> dict[str, Any]:
    """Returns the fields of a configuration that name the classes."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def shorten(names: list[str], count: int = 20) -> str:
    """Lists the first names."""
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def open_classifier(name_or_path: str, **overrides: Any) -> HfViTForImageClassification:
    """Opens a saved classifier.

    Args:
        name_or_path: Folder, file of published weights, or name on the Hub.
        **overrides: Fields of the configuration that differ.

    Raises:
        OSError: if there is no such saved model.
        ValueError: if it is of another kind, or an override changes the shape of its weights.
    """
    check_fields(overrides)
    try:
        return HfViTForImageClassification.from_pretrained(name_or_path, **overrides)
    except OSError as error:
        raise OSError(
            f"No model can be read from {name_or_path!r}, be it a folder, a file or a name on the Hub: {error}"
        ) from error


def input_size(processor: BaseImageProcessor) -> tuple[int, int]:
    """Returns the height and width in pixels that a processor brings all images to.

    Raises:
        ValueError: if it leaves them at different sizes.
    """
    size = processor.crop_size if processor.do_center_crop else processor.size
    if not size.height or not size.width:
        raise ValueError(
            f"The image processor keeps the aspect ratio ({dict(size)}), and images of several sizes make no batch. "
            "Give the height and width to train at: --image_size 224."
        )
    return size.height, size.width


def make_trainer(
    model: HfViTForImageClassification,
    processor: BaseImageProcessor,
    splits: DatasetDict,
    augmentation: AugmentationArguments,
    args: HfViTTrainingArguments,
) -> HfViTTrainer:
    """Returns the trainer of a classifier; without validation images it sets `args.eval_strategy` to "no".

    Raises:
        ImportError: if a package is missing that is needed only at the end.
        ValueError: if the training images do not fill one batch, or choosing the best model lacks validation images.
    """
    if missing := [name for name in ("matplotlib", "sklearn") if find_spec(name) is None]:
        raise ImportError(f'Scores and diagrams need {" and ".join(missing)}. Install: pip install "hf-vit[train]".')
    batch_size = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and len(splits["train"]) < batch_size:
        raise ValueError(
            f"{len(splits['train'])} training images do not fill a batch of {batch_size}. Set "
            "--per_device_train_batch_size lower."
        )
    scores = {*SCORES, *(["top_5_accuracy"] if len(model.config.id2label) > 5 else [])}
    metric = str(args.metric_for_best_model).removeprefix("eval_")
    is_best_wanted = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
    if is_best_wanted and metric not in scores:
        raise ValueError(
            f"There is no score {metric!r} to choose the best model by. Choose {', '.join(sorted(scores))}."
        )
    if "validation" not in splits:
        if is_best_wanted:
            raise ValueError(
                "Early stopping and the choice of the best model need validation images. Set --train_val_split 0.1."
            )
        args.eval_strategy = IntervalStrategy.NO
    transform = image_classification_augmentation(
        input_size(processor), num_channels=model.config.num_channels, **asdict(augmentation)
    )
    patience = args.early_stopping_patience
    return HfViTTrainer(
        model=model,
        args=args,
        train_dataset=AugmentedDataset(splits["train"], transform, args.seed),
        eval_dataset=splits.get("validation"),
        data_collator=ImageClassificationCollator(processor),
        processing_class=processor,
        compute_metrics=image_classification_metrics,
        callbacks=[EarlyStoppingCallback(patience)] if patience is not None else None,
    )


def write_report(
    trainer: HfViTTrainer, splits: DatasetDict, data: TrainingDataArguments, recipe: dict[str, str], **facts: Any
) -> dict[str, float]:
    """Scores a trained classifier and writes the scores, pictures and model card into its output folder.

    The split that is scored is "test", else "validation", else "train".

    Args:
        trainer: Has finished its training.
        splits: What it was trained on.
        data: Where that came from.
        recipe: Settings to name in the card beside those that the trainer knows.
        **facts: Fields of the card's `TrainingRecord` that only the caller knows: `command`, `license`, `base_model`.

    Returns:
        The scores.
    """
    split = next(name for name in ("test", "validation", "train") if name in splits)
    names = splits["train"].features["label"].names
    output = trainer.predict(splits[split], metric_key_prefix=split)  # on all processes
    if not trainer.is_world_process_zero():
        return image_classification_metrics(EvalPrediction(output.predictions, output.label_ids))
    folder = Path(trainer.args.output_dir)
    scores = write_scores(folder, split, output, names, splits[split]["file"])
    draw_curves(trainer.state.log_history, folder / "curves.png")
    best = trainer.state.best_global_step if trainer.args.load_best_model_at_end else None
    record = TrainingRecord.from_trainer(
        trainer,
        recipe=recipe,
        model_name=folder.resolve().name,
        task="image-classification",
        data=describe_data(data, splits, split),
        metrics=scores,
        baselines={"commonest class": majority_baseline(splits["train"]["label"], output.label_ids, len(names))},
        selection="after the last step" if best is None else f"at step {best}, the best on the validation images",
        is_chosen_on_scored=best is not None and split == "validation",
        pictures={"Loss, validation scores and learning rate": "curves.png"}
        | {"Right classes and answers": f"{split}_confusion_matrix.png"},
        arguments=RECIPE_NAME,
        seconds=trainer.seconds,
        location=trainer.hub_model_id or TrainingRecord.location,
        limits=f"It knows {len(names)} classes and answers with one of them whatever it is shown. "
        "It has seen images like those that it was trained on, and its score says little about others.",
        **facts,
    )
    write_model_card(folder, record)
    return scores


def describe_data(args: TrainingDataArguments, splits: DatasetDict, split: str) -> DataRecord:
    """Says of the data what its place and its splits tell."""
    sizes = ", ".join(f"{len(images):,} for {name}" for name, images in splits.items())
    names = splits["train"].features["label"].names
    place = Path(args.dataset_name)
    name = place.resolve().name if place.exists() else args.dataset_name
    return DataRecord(
        name=name,
        identifier=name,
        license=args.dataset_license,
        description=f"{name}: {sizes}, in {len(names)} classes ({shorten(names)}).",
        test=f"the {len(splits[split]):,} {split} images",
        split=split,
    )
