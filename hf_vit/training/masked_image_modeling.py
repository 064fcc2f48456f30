"""Training without labels: what a script of masked image modelling is told, trains and leaves behind."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import BaseImageProcessor, PreTrainedModel
from transformers.trainer_utils import IntervalStrategy

from ..configuration_hf_vit import to_pair
from ..data import (
    AugmentedDataset,
    AugmentedStream,
    MaskedImageModelingCollator,
    TargetDataset,
    cropped_example_augmentation,
    draw_mask_seed,
    masked_image_target,
)
from ..modeling_mim_hf_vit import HfViTForMaskedImageModeling
from ..visualize import draw_curves
from .averaged_report import report_average
from .checks import check_packages, check_training
from .load_images import load_images
from .masked_image_arguments import (
    MaskedImageAugmentationArguments,
    MaskedImageModelArguments,
    MaskedImageTrainingArguments,
    UnlabelledDataArguments,
)
from .masked_image_scorer import MaskedImageScorer, TrivialScorer
from .model_card import TrainingRecord, write_model_card
from .models import input_size, load_model
from .neighbour_trainer import NeighbourTrainer
from .record import describe_data, describe_options, describe_stream, describe_training, scored_split
from .scored_report import score_split
from .scoring_trainer import EvaluationPictures
from .task import TrainingTask
from .trainer import HfViTTrainer


@dataclass
class MaskedImageModeling(TrainingTask):
    """Masked image modelling by a script.

    Args:
        model: Which model to train, and by which masks.
        data: On which images.
        augmentation: How they are changed at random.
        args: How to train.
    """

    argument_types = (
        MaskedImageModelArguments,
        UnlabelledDataArguments,
        MaskedImageAugmentationArguments,
        MaskedImageTrainingArguments,
    )

    model: MaskedImageModelArguments
    data: UnlabelledDataArguments
    augmentation: MaskedImageAugmentationArguments
    args: MaskedImageTrainingArguments

    def load_data(self) -> list[str]:
        """Opens and checks the images; the model learns no classes, so there are no names.

        Raises:
            ImportError: if matplotlib is missing.
            OSError: if the data is missing.
            ValueError: if it is bad.
        """
        check_packages("matplotlib")
        self.images = load_images(self.data, self.args)
        return []

    def make_trainer(self) -> NeighbourTrainer:
        """Returns the trainer of a new or a saved model; without validation images none are scored in training.

        Raises:
            ImportError: if torchvision is missing.
            ValueError: if a value is out of range, or the best model cannot be chosen.
        """
        model, processor = load_model(HfViTForMaskedImageModeling, self.model)
        splits = self.images.splits
        scorer = MaskedImageScorer(processor, has_classes=len(self.images.known) > 0)
        has_validation = "validation" in splits
        scores = {"loss", *scorer.metric.score_names}
        callbacks = check_training(self.args, self.images.num_train, has_validation, scores)
        trainer = NeighbourTrainer(
            model=model,
            args=self.args,
            train_dataset=self._training_images(model, processor),
            eval_dataset=self.images.examples("validation") if has_validation else None,
            data_collator=MaskedImageModelingCollator(processor, to_pair(model.config.patch_size), model.options),
            processing_class=processor,
            callbacks=callbacks,
            scorer=scorer,
            known=TargetDataset(self.images.known, masked_image_target),
        )
        if has_validation and self.args.eval_strategy != IntervalStrategy.NO:
            trainer.add_callback(EvaluationPictures(trainer))
        return trainer

    def _training_images(
        self, model: PreTrainedModel, processor: BaseImageProcessor
    ) -> AugmentedDataset | AugmentedStream:
        transform = cropped_example_augmentation(
            draw_mask_seed, input_size(processor), model.config.num_channels, **asdict(self.augmentation)
        )
        seed, data, stream = self.args.seed, self.data, self.images.stream
        if stream is None:
            return AugmentedDataset(self.images.examples("train"), transform, seed, column=None)
        buffer_size, by_process = data.shuffle_buffer_size, data.shard_by_process
        return AugmentedStream(stream, transform, seed, buffer_size, data.skip_unreadable, shard_by_process=by_process)

    def count_examples(self) -> dict[str, int]:
        """Returns the number of images of each split, of a stream that of those that can be scored."""
        return {name: len(rows) for name, rows in self.images.splits.items()}

    def write_report(self, trainer: HfViTTrainer, **facts: Any) -> dict[str, float]:
        """Scores a trained model and writes scores, pictures and model card into its output folder.

        The split that is scored is "test", else "validation", else "train".
        """
        assert isinstance(trainer, NeighbourTrainer)
        splits = self.images.splits
        split, folder = scored_split(list(splits)), Path(trainer.args.output_dir)
        scores, pictures = score_split(trainer, split, self.images.examples(split))
        baseline = score_trivially(trainer, split, self.images.examples(split))
        if not trainer.is_world_process_zero():
            return scores
        draw_curves(trainer.state.log_history, folder / "curves.png")
        record = TrainingRecord.from_trainer(
            trainer,
            task="image-feature-extraction",
            data=describe_data(self.data.dataset_name, self.data.dataset_license, self.count_examples(), split),
            metrics=scores,
            baselines={**report_average(trainer, split, scores), "mean of each patch, raw pixels": baseline},
            pictures={**pictures, "Loss, validation scores and learning rate": "curves.png"},
            limits=trainer.scorer.describe_limits(),
            recipe={
                **describe_objective(trainer.model),
                "augmentation": describe_options(self.augmentation),
                "evaluation": trainer.scorer.describe_evaluation(),
                **describe_stream(self.data),
            },
            **describe_training(trainer, split),
            **facts,
        )
        write_model_card(folder, record)
        return scores


def score_trivially(trainer: NeighbourTrainer, split: str, examples: TargetDataset) -> dict[str, float]:
    """Scores, on all processes, what has learned nothing: the mean of each patch, and raw pixels as features."""
    scorer, average = trainer.scorer, trainer.average
    trainer.scorer = TrivialScorer(scorer.processor, has_classes=bool(scorer.metric.score_names))
    trainer.average = None  # what looks at no weights is scored once
    metrics = trainer.predict(examples, metric_key_prefix=split).metrics
    trainer.scorer, trainer.average = scorer, average
    return {name: metrics[f"{split}_{name}"] for name in ("loss", *scorer.metric.score_names)}


def describe_objective(model: HfViTForMaskedImageModeling) -> dict[str, str]:
    """Says of masks, decoder and loss what a card shall say."""
    options = model.options
    unit = f", {options.mask_unit} patches a side" if options.mask_unit > 1 else ""
    masks = f"{options.masked_share:.0%} of the patches, {options.mask_type}{unit}"
    if options.objective == "simmim":
        return {"objective": "simmim, mean absolute difference of pixels", "masks": masks}
    pixels = "pixels"
    if options.norm_pix_loss:
        pixels = "pixels of normalised patches, which have their true mean and deviation in pictures"
    return {
        "objective": f"mae, mean squared difference of {pixels}",
        "masks": masks,
        "decoder": f"{options.decoder_num_hidden_layers} blocks of width {options.decoder_hidden_size}",
    }
