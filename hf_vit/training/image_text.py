"""Training on images and texts: what a script is told, trains and leaves behind."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.trainer_utils import IntervalStrategy

from ..data import AugmentedDataset, ImageTextCollator, cropped_example_augmentation, draw_caption, load_image_text
from ..metrics import chance_of_retrieval
from ..visualize import draw_curves
from .averaged_report import report_average
from .checks import check_packages, check_training
from .image_text_arguments import (
    ImageTextAugmentationArguments,
    ImageTextDataArguments,
    ImageTextModelArguments,
    ImageTextTrainingArguments,
    ZeroShotArguments,
)
from .image_text_models import has_fresh_text, load_image_text_model
from .image_text_scorer import ImageTextScorer, ImageTextTrainer
from .load_targets import load_targets
from .model_card import TrainingRecord, write_model_card
from .models import input_size
from .record import describe_data, describe_options, describe_training, scored_split
from .scored_report import score_split
from .scoring_trainer import EvaluationPictures
from .task import TrainingTask
from .trainer import HfViTTrainer
from .zero_shot import load_zero_shot, score_zero_shot


@dataclass
class ImageTextContrast(TrainingTask):
    """Training on images and texts by a script.

    Args:
        model: Which model to train, and by which loss.
        data: On which images and captions.
        augmentation: How images are changed at random.
        args: How to train.
        zero_shot: On which labelled images to score it too.
    """

    argument_types = (
        ImageTextModelArguments,
        ImageTextDataArguments,
        ImageTextAugmentationArguments,
        ImageTextTrainingArguments,
        ZeroShotArguments,
    )

    model: ImageTextModelArguments
    data: ImageTextDataArguments
    augmentation: ImageTextAugmentationArguments
    args: ImageTextTrainingArguments
    zero_shot: ZeroShotArguments

    def load_data(self) -> list[str]:
        """Opens and checks images and captions; the model learns no classes, so there are no names.

        Raises:
            ImportError: if a package is missing that is needed only at the end.
            OSError: if the data is missing.
            ValueError: if it is bad.
        """
        check_packages("matplotlib", *([] if self.zero_shot.zero_shot_dataset is None else ["sklearn"]))
        data = self.data
        self.loaded = load_targets(
            lambda: load_image_text(data.dataset_name, **data.source_options()), data, self.args
        )
        self.labelled = load_zero_shot(self.zero_shot, data, self.args)
        return []

    def make_trainer(self) -> ImageTextTrainer:
        """Returns the trainer of a new or a saved model; without validation images none are scored in training.

        Raises:
            ImportError: if torchvision is missing.
            OSError: if there is no such model or tokenizer.
            ValueError: if a value is out of range, or the best model cannot be chosen, or an adapter is wanted of a
                fresh text tower.
        """
        if self.args.lora_rank is not None and has_fresh_text(self.model):
            raise ValueError(
                f"lora_rank={self.args.lora_rank} changes little in what has learned much, and the text tower would "
                "start from scratch. Give a model that has one (CLIP, SigLIP), or --text_model_name_or_path."
            )
        captions = (caption for own in self.loaded.splits["train"]["captions"] for caption in own)
        model, self.processor = load_image_text_model(self.model, captions)
        image_processor = self.processor.image_processor
        transform = cropped_example_augmentation(
            draw_caption, input_size(image_processor), model.config.num_channels, **asdict(self.augmentation)
        )
        splits, scorer = self.loaded.splits, ImageTextScorer(image_processor)
        has_validation = "validation" in splits
        callbacks = check_training(
            self.args, len(splits["train"]), has_validation, {"loss", *scorer.metric.score_names}
        )
        trainer = ImageTextTrainer(
            model=model,
            args=self.args,
            train_dataset=AugmentedDataset(self.loaded.examples("train"), transform, self.args.seed, column=None),
            eval_dataset=self.loaded.examples("validation") if has_validation else None,
            data_collator=ImageTextCollator(self.processor),
            processing_class=self.processor,
            callbacks=callbacks,
            scorer=scorer,
        )
        if has_validation and self.args.eval_strategy != IntervalStrategy.NO:
            trainer.add_callback(EvaluationPictures(trainer))
        return trainer

    def count_examples(self) -> dict[str, int]:
        """Returns the number of images of each split."""
        return {name: len(rows) for name, rows in self.loaded.splits.items()}

    def write_report(self, trainer: HfViTTrainer, **facts: Any) -> dict[str, float]:
        """Scores a trained model and writes scores, pictures and model card into its output folder.

        The split that is scored is "test", else "validation", else "train".
        """
        assert isinstance(trainer, ImageTextTrainer)
        splits, folder = self.loaded.splits, Path(trainer.args.output_dir)
        split = scored_split(list(splits))
        scores, pictures = score_split(trainer, split, self.loaded.examples(split))
        chance = chance_of_retrieval(list(map(len, splits[split]["captions"])))
        recipe = {**self.describe_model(trainer.model), **self._score_labelled(trainer, scores)}
        if not trainer.is_world_process_zero():
            return scores
        draw_curves(trainer.state.log_history, folder / "curves.png")
        record = TrainingRecord.from_trainer(
            trainer,
            task="zero-shot-image-classification",
            data=describe_data(self.data.dataset_name, self.data.dataset_license, self.count_examples(), split),
            metrics={name: scores[name] for name in chance},
            baselines={**report_average(trainer, split, chance), "chance": chance},
            pictures={**pictures, "Loss, validation scores and learning rate": "curves.png"},
            limits=trainer.scorer.describe_limits(),
            recipe={
                **recipe,
                "augmentation": describe_options(self.augmentation),
                "evaluation": trainer.scorer.describe_evaluation(),
            },
            **describe_training(trainer, split),
            **facts,
        )
        write_model_card(folder, record)
        return scores

    def describe_model(self, model: PreTrainedModel) -> dict[str, str]:
        """Says of loss, towers and texts what a card shall say."""
        batch = self.args.train_batch_size * self.args.world_size
        encoder, tokenizer = model.text_model.config, self.processor.tokenizer
        own = model.text_options
        tower = f"{own.num_hidden_layers} blocks of width {own.hidden_size}"
        count = sum(map(len, self.loaded.splits["train"]["captions"]))
        return {
            "loss": f"{model.options.loss}, over all images and texts of a batch of {batch}",
            "image tower": "kept as it was" if self.model.freeze_vision else "trained",
            "text tower": tower if own.encoder_config is None else f"{encoder.model_type}, trained",
            "texts": f"{len(tokenizer):,} tokens, cut off after {tokenizer.model_max_length}",
            "captions": f"{count:,}, of which one of each image is drawn in every epoch",
        }

    def _score_labelled(self, trainer: ImageTextTrainer, scores: dict[str, float]) -> dict[str, str]:
        """Scores the labelled images, if there are some, and adds their accuracy to the scores."""
        if self.labelled is None:
            return {}
        found = score_zero_shot(trainer.model, self.processor, self.labelled, self.args)
        scores["zero_shot_accuracy"] = found["accuracy"]
        return {"zero-shot": self.labelled.describe(found)}
