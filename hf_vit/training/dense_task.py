"""Training of models that say something about every pixel."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import BaseImageProcessor, PreTrainedModel, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from ..configuration_hf_vit import HfViTConfig, to_pair
from ..data import AugmentedDataset, DensePredictionCollator, TargetData, dense_augmentation
from ..image_processing_hf_vit import HfViTImageProcessor
from ..pretrained_hf_vit import HfViTPreTrainedModel
from .arguments import ModelArguments, TrainedImagesArguments
from .checks import check_packages, check_training
from .dense_arguments import DenseAugmentationArguments, DenseTrainingArguments
from .dense_report import write_dense_report
from .dense_scorer import DenseScorer, check_truth
from .dense_trainer import DenseTrainer, EvaluationPictures
from .load_dense import load_dense
from .models import load_model
from .record import describe_data, describe_options
from .task import TrainingTask
from .trainer import HfViTTrainer


@dataclass
class DenseTask(TrainingTask):
    """Training of a model for segmentation or depth by a script.

    Args:
        model: Which model to train.
        data: On which images and targets.
        augmentation: How they are changed at random.
        args: How to train.
    """

    model_class: ClassVar[type[HfViTPreTrainedModel]]
    pipeline: ClassVar[str]  # name of the stock pipeline
    packages: ClassVar[tuple[str, ...]] = ("matplotlib",)  # that only some trainings need

    model: ModelArguments
    data: TrainedImagesArguments
    augmentation: DenseAugmentationArguments
    args: DenseTrainingArguments

    @abstractmethod
    def open_data(self) -> TargetData:
        """Opens the data."""

    @abstractmethod
    def make_scorer(self, model: PreTrainedModel, processor: BaseImageProcessor) -> DenseScorer:
        """Returns what predicts and scores images."""

    @abstractmethod
    def describe_model(self, model: PreTrainedModel) -> dict[str, str]:
        """Says of a model's head and loss, under these names, what a card shall say."""

    def processor_options(self) -> dict[str, Any]:
        """Returns what this task's image processor shall know."""
        return {}

    def callbacks(self) -> list[TrainerCallback]:
        """Returns what happens beside the steps of this task's trainings."""
        return []

    def load_data(self) -> list[str]:
        """Opens and checks the data and returns the names of its classes.

        Raises:
            ImportError: if a package is missing that this task needs, however late.
            OSError: if the data is missing.
            ValueError: if it is bad.
        """
        check_packages(*self.packages)
        self.loaded = load_dense(self.open_data, self.data, self.args)
        return list(self.loaded.names)

    def make_trainer(self) -> DenseTrainer:
        """Returns the trainer of a new or a saved model; without validation images none are scored in training.

        Raises:
            ImportError: if torchvision is missing.
            ValueError: if a value is out of range, a split has no truth, or the best model cannot be chosen.
        """
        model, processor = load_model(self.model_class, self.model, self.loaded.names)
        processor = dense_processor(
            processor, model.config, self.augmentation.keep_aspect_ratio, **self.processor_options()
        )
        scorer = self.make_scorer(model, processor)
        splits = self.loaded.splits
        for split in splits:
            check_truth(scorer, split, self.loaded.examples(split))
        has_validation = "validation" in splits
        scores = {"loss", *scorer.metric.score_names}
        callbacks = [*check_training(self.args, len(splits["train"]), has_validation, scores), *self.callbacks()]
        validation = self.loaded.examples("validation") if has_validation else None
        if validation is not None and self.args.eval_strategy != IntervalStrategy.NO:
            callbacks.append(EvaluationPictures(scorer, validation))
        transform = dense_augmentation(
            to_pair(model.config.image_size), num_channels=model.config.num_channels, **self.augmentation.options()
        )
        return DenseTrainer(
            model=model,
            args=self.args,
            train_dataset=AugmentedDataset(self.loaded.examples("train"), transform, self.args.seed, column=None),
            eval_dataset=validation,
            data_collator=DensePredictionCollator(processor),
            processing_class=processor,
            callbacks=callbacks,
            scorer=scorer,
        )

    def count_images(self) -> dict[str, int]:
        """Returns the number of images of each split."""
        return {name: len(rows) for name, rows in self.loaded.splits.items()}

    def write_report(self, trainer: HfViTTrainer, **facts: Any) -> dict[str, float]:
        """Scores a trained model; see `write_dense_report`."""
        assert isinstance(trainer, DenseTrainer)
        return write_dense_report(
            trainer,
            self.loaded,
            lambda split: describe_data(
                self.data.dataset_name, self.data.dataset_license, self.count_images(), split, self.loaded.names
            ),
            task=self.pipeline,
            recipe={
                **self.describe_model(trainer.model),
                "input size": describe_size(trainer.model.config, self.augmentation.keep_aspect_ratio),
                "augmentation": describe_options(self.augmentation),
            },
            **facts,
        )


def describe_size(config: HfViTConfig, keep_aspect_ratio: bool) -> str:
    """Says how large images are for a model that sees them as `dense_processor` makes them."""
    height, width = to_pair(config.image_size)
    whole = f"their shorter side {min(height, width)}" if keep_aspect_ratio else f"{height} x {width}"
    return f"{height} x {width} pixels in training, in evaluations whole images, {whole}"


def dense_processor(
    processor: BaseImageProcessor, config: HfViTConfig, keep_aspect_ratio: bool, **more: Any
) -> BaseImageProcessor:
    """Returns an image processor that leaves nothing of an image out.

    Args:
        processor: What belongs to the model; colours stay as they are there.
        config: Its image size is that of training.
        keep_aspect_ratio: Whether images keep their proportions and get that size along their shorter side, or else
            are squeezed into it.
        **more: Other options of the processor.
    """
    height, width = to_pair(config.image_size)
    patch = to_pair(config.patch_size)
    size = {"shortest_edge": min(height, width)} if keep_aspect_ratio else {"height": height, "width": width}
    options = {
        **processor.to_dict(),
        "size": size,
        "do_resize": True,
        "do_center_crop": False,
        "do_pad": keep_aspect_ratio,
        "ensure_multiple_of": patch[0] if patch[0] == patch[1] else patch,
        **more,
    }
    return HfViTImageProcessor.from_dict(options)
