"""Masked image modeling: arguments, evaluator, training and report.

Shapes: B batch, C channels, H W pixels, p q patch height and width, h w patch grid, N = h·w patches, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel
from transformers.trainer_utils import EvalLoopOutput, IntervalStrategy

from ...data import (
    AugmentedDataset,
    AugmentedStream,
    MaskedImageModelingCollator,
    TargetDataset,
    cropped_example_augmentation,
    draw_mask_seed,
    masked_image_target,
)
from ...evaluation import NeighborAccuracy, classify_by_neighbors
from ...evaluation.evaluator import BaseEvaluator, Batch, ImageResult
from ...evaluation.nearest_neighbors import NUM_NEIGHBORS, TEMPERATURE
from ...model.configuration_hf_vit import to_pair
from ...model.task_configurations import HfViTMaskedImageModelingConfig
from ...model.task_mim import (
    HfViTForMaskedImageModeling,
    PatchScale,
    draw_mask,
    masked_image_modeling_loss,
    patchify,
    unpatchify,
)
from ...visualize import draw_curves, draw_reconstructions
from ..arguments import LIBRARY
from ..checks import check_packages, check_training
from ..evaluator_trainer import EvaluationPictures, EvaluatorTrainer
from ..load_stream import load_images
from ..models import input_size, load_model
from ..publishing.model_card import TrainingInfo, write_model_card
from ..publishing.record import describe_data, describe_options, describe_stream, describe_training, scored_split
from ..publishing.report import report_average, score_split
from ..trainer import HfViTTrainer
from ..unlabeled_images import UnlabeledDataArguments
from .arguments import ScoredTrainingArguments, TaskModelArguments, best_by
from .base import TrainingTask


BASE_LEARNING_RATE, BASE_BATCH = 1.5e-4, 256  # of MAE, https://arxiv.org/abs/2111.06377


@dataclass
class MaskedImageModelArguments(TaskModelArguments):
    """Which model to train, and by which masks."""

    task_config = "masked_image_modeling_config"
    task_options = ("objective", "mask_ratio", "mask_type", "norm_pix_loss")

    objective: str | None = field(
        default=None,
        metadata={
            "help": "mae (the encoder sees what is not masked) or simmim (it sees mask tokens); mae unless said."
        },
    )
    mask_ratio: float | None = field(
        default=None,
        metadata={"help": "Share of the patches that is masked; 0.75 for mae, 0.6 for simmim unless said."},
    )
    mask_type: str | None = field(default=None, metadata={"help": "random, unless said, or blockwise."})
    norm_pix_loss: bool | None = field(
        default=None, metadata={"help": "Whether mae predicts normalized patches; true unless said."}
    )

    def overrides(self) -> dict[str, Any]:
        """Returns the same, with the mask token that "simmim" needs.

        Raises:
            ValueError: as for other tasks.
        """
        fields = super().overrides()
        if (fields.get(self.task_config) or {}).get("objective") == "simmim":
            return {"use_mask_token": True, **fields}
        return fields


@dataclass
class MaskedImageAugmentationArguments:
    """How training images are changed at random, in this order."""

    min_crop_scale: float = field(
        default=0.2, metadata={"help": "Least share of the area that a random resized crop keeps; 1 takes all of it."}
    )
    horizontal_flip: float = field(default=0.5, metadata={"help": "Probability of a mirror image."})


@dataclass
class MaskedImageTrainingArguments(ScoredTrainingArguments):
    """The library's arguments, with the defaults of MAE."""

    learning_rate: float = field(
        default=0.0,
        metadata={"help": f"0 stands for {BASE_LEARNING_RATE} x images per step / {BASE_BATCH}, as in MAE."},
    )
    adam_beta2: float = field(default=0.95, metadata=LIBRARY["adam_beta2"].metadata)
    warmup_steps: float = field(default=0.05, metadata=LIBRARY["warmup_steps"].metadata)
    per_device_train_batch_size: int = field(default=64, metadata=LIBRARY["per_device_train_batch_size"].metadata)
    per_device_eval_batch_size: int = field(default=64, metadata=LIBRARY["per_device_eval_batch_size"].metadata)
    metric_for_best_model: str | None = best_by("loss")

    def __post_init__(self) -> None:
        """The learning rate grows with the number of images in a step."""
        super().__post_init__()
        if not self.learning_rate:
            images = self.train_batch_size * self.gradient_accumulation_steps * self.world_size
            self.learning_rate = BASE_LEARNING_RATE * images / BASE_BATCH


RAW_SIZE = 32  # pixels a side of the images whose pixels are taken for features


@dataclass(frozen=True)
class MaskedImage:
    """What a model made of an image.

    Args:
        pixel_values: (C, H, W), the image as the model takes it.
        mask: (h, w) bool, True where a patch was masked.
        reconstruction: (C, H, W) in the units of `pixel_values`.
        class_number: Class of its neighbors, None where no classes are known.
    """

    pixel_values: Tensor
    mask: Tensor
    reconstruction: Tensor
    class_number: int | None


class MaskedImageEvaluator(BaseEvaluator):
    """Scores the loss on masks that are always the same, and what the features of whole images are good for.

    The features of an image are the mean of its patches after the final norm, without a mask: the CLS token takes no
    part in the loss, so that what it holds is not trained to stand for the image. Each image has the class that its
    nearest training images have, see `classify_by_neighbors`.
    """

    caption = "Image, what the model sees, and reconstruction"
    metric: NeighborAccuracy

    def __init__(self, processor: BaseImageProcessor, has_classes: bool) -> None:
        """Begins.

        Args:
            processor: Has made the images.
            has_classes: Whether the classes of images are known.
        """
        super().__init__(processor, NeighborAccuracy(has_classes))
        # Features (M, D) and classes (M,) of training images
        self.known: tuple[Tensor, Tensor] | None = None

    def features(self, model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
        """Returns what stands for each image, (B, D)."""
        hidden_states: Tensor = model.base_model(pixel_values).last_hidden_state
        return hidden_states[:, model.config.num_prefix_tokens :].mean(dim=1)

    def logits(self, model: PreTrainedModel, pixel_values: Tensor, masks: Tensor) -> Tensor:
        """Returns what the model says of the patches, (B, N, p·q·C)."""
        predicted: Tensor = model(pixel_values, bool_masked_pos=masks).logits
        return predicted

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Returns the reconstruction, the class and the loss of each image."""
        pixel_values, options, patch_size = batch["pixel_values"], model.options, to_pair(model.config.patch_size)
        grid = pixel_values.shape[-2] // patch_size[0], pixel_values.shape[-1] // patch_size[1]
        masks = _masks(batch, grid, options)
        patches = patchify(pixel_values, patch_size)  # (B, N, p·q·C)
        logits = self.logits(model, pixel_values, masks)
        scale = PatchScale(patches) if options.normalizes_patches else None
        targets, pixels = (patches, logits) if scale is None else (scale.normalize(patches), scale.restore(logits))
        losses = [
            float(masked_image_modeling_loss(said[None], true[None], mask[None], options.objective))
            for said, true, mask in zip(logits, targets, masks, strict=True)
        ]
        images, classes = unpatchify(pixels, grid, patch_size), self._classes(model, pixel_values)
        return [
            ImageResult(MaskedImage(image, mask.view(grid), reconstruction, number), loss)
            for image, mask, reconstruction, number, loss in zip(
                pixel_values, masks, images, classes, losses, strict=True
            )
        ]

    def _classes(self, model: PreTrainedModel, pixel_values: Tensor) -> Sequence[int | None]:
        """Returns the class that each image has by its neighbors."""
        if self.known is None:
            return [None] * len(pixel_values)
        numbers: list[int] = classify_by_neighbors(self.features(model, pixel_values), *self.known).tolist()
        return numbers

    def draw(
        self,
        images: list[Image],
        predictions: list[MaskedImage],
        targets: list[int | None],
        file: str | PathLike[str],
    ) -> None:
        """Draws each image, what is left of it, and its reconstruction."""
        mean, std = (
            (self.processor.image_mean, self.processor.image_std) if self.processor.do_normalize else (0.0, 1.0)
        )
        draw_reconstructions(
            [prediction.pixel_values for prediction in predictions],
            [prediction.mask for prediction in predictions],
            [prediction.reconstruction for prediction in predictions],
            mean,
            std,
            file,
        )

    def describe_evaluation(self) -> str:
        """Says what the scores are of."""
        loss = "the loss on masks that are the same at every evaluation"
        if not self.metric.score_names:
            return loss
        return (
            f"{loss}; knn_accuracy: the class of {NUM_NEIGHBORS} neighbors among training images, weighted at "
            f"temperature {TEMPERATURE}, by the mean of the patches"
        )

    def describe_limits(self) -> str:
        """Says what the model is not good for."""
        return (
            "It names nothing by itself: it is a start for models that are trained with labels, or a source of "
            "features. What it makes of masked patches is a guess from their neighbors."
        )


class BaselineEvaluator(MaskedImageEvaluator):
    """The same without a model: each patch is its own mean, and images are alike whose pixels are."""

    def features(self, model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
        """Returns the pixels of each image at a small size, (B, C·32·32)."""
        return raw_pixels(pixel_values)

    def logits(self, model: PreTrainedModel, pixel_values: Tensor, masks: Tensor) -> Tensor:
        """Returns the mean of each patch, (B, N, p·q·C)."""
        patches = patchify(pixel_values, to_pair(model.config.patch_size))
        if model.options.normalizes_patches:
            return torch.zeros_like(patches)
        return patches.mean(dim=-1, keepdim=True).expand_as(patches)


def raw_pixels(pixel_values: Tensor) -> Tensor:
    """Returns the pixels of images (B, C, H, W) at a small size, (B, C·32·32), as features that nobody learned."""
    return F.interpolate(pixel_values, size=(RAW_SIZE, RAW_SIZE), mode="bilinear", antialias=True).flatten(1)


def _masks(batch: Batch, grid: tuple[int, int], options: HfViTMaskedImageModelingConfig) -> Tensor:
    """Returns the masks (B, N) of a batch of `MaskedImageModelingCollator`."""
    if "bool_masked_pos" in batch:
        masks: Tensor = batch["bool_masked_pos"]
        return masks
    return draw_mask(len(batch["noise"]), grid, options, noise=batch["noise"])


class NeighborTrainer(EvaluatorTrainer):
    """`EvaluatorTrainer`, whose evaluations begin with the features of training images whose class is known.

    Every process describes a share of these images and gets the features of all, and then looks for the neighbors of
    those that it scores.
    """

    evaluator: MaskedImageEvaluator

    def __init__(self, *args: Any, known: TargetDataset, **kwargs: Any) -> None:
        """Takes the arguments of `EvaluatorTrainer`.

        Args:
            *args: Passed on.
            known: Training images with `class_number`; may be empty.
            **kwargs: Passed on.
        """
        super().__init__(*args, **kwargs)
        self.known = known

    def score_weights(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Scores all images."""
        if len(self.known):
            self.evaluator.known = self.describe_known()
        return super().score_weights(*args, **kwargs)

    @torch.no_grad()
    def describe_known(self) -> tuple[Tensor, Tensor]:
        """Returns the features (M, D) and the classes (M,) of the training images whose class is known."""
        self.model.eval()
        features, classes = [], []
        for batch in self.get_test_dataloader(self.known):
            inputs = self._prepare_inputs(batch)
            described = self.evaluator.features(self.model, inputs["pixel_values"])
            numbers = torch.tensor(inputs["targets"], device=described.device)
            described, numbers = self.accelerator.gather_for_metrics((described, numbers))
            features.append(described)
            classes.append(numbers)
        return torch.cat(features), torch.cat(classes)


@dataclass
class MaskedImageModeling(TrainingTask):
    """Masked image modeling by a script.

    Args:
        model: Which model to train, and by which masks.
        data: On which images.
        augmentation: How they are changed at random.
        args: How to train.
    """

    argument_types = (
        MaskedImageModelArguments,
        UnlabeledDataArguments,
        MaskedImageAugmentationArguments,
        MaskedImageTrainingArguments,
    )

    model: MaskedImageModelArguments
    data: UnlabeledDataArguments
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

    def make_trainer(self) -> NeighborTrainer:
        """Returns the trainer of a new or a saved model; without validation images none are scored in training.

        Raises:
            ImportError: if torchvision is missing.
            ValueError: if a value is out of range, or the best model cannot be chosen.
        """
        model, processor = load_model(HfViTForMaskedImageModeling, self.model)
        splits = self.images.splits
        evaluator = MaskedImageEvaluator(processor, has_classes=len(self.images.known) > 0)
        has_validation = "validation" in splits
        scores = {"loss", *evaluator.metric.score_names}
        callbacks = check_training(self.args, self.images.num_train, has_validation, scores)
        trainer = NeighborTrainer(
            model=model,
            args=self.args,
            train_dataset=self._training_images(model, processor),
            eval_dataset=self.images.examples("validation") if has_validation else None,
            data_collator=MaskedImageModelingCollator(processor, to_pair(model.config.patch_size), model.options),
            processing_class=processor,
            callbacks=callbacks,
            evaluator=evaluator,
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
        assert isinstance(trainer, NeighborTrainer)
        splits = self.images.splits
        split, folder = scored_split(list(splits)), Path(trainer.args.output_dir)
        scores, pictures = score_split(trainer, split, self.images.examples(split))
        baseline = score_naive_baseline(trainer, split, self.images.examples(split))
        if not trainer.is_world_process_zero():
            return scores
        draw_curves(trainer.state.log_history, folder / "curves.png")
        record = TrainingInfo.from_trainer(
            trainer,
            task="image-feature-extraction",
            data=describe_data(self.data.dataset_name, self.data.dataset_license, self.count_examples(), split),
            metrics=scores,
            baselines={**report_average(trainer, split, scores), "mean of each patch, raw pixels": baseline},
            pictures={**pictures, "Loss, validation scores and learning rate": "curves.png"},
            limits=trainer.evaluator.describe_limits(),
            recipe={
                **describe_objective(trainer.model),
                "augmentation": describe_options(self.augmentation),
                "evaluation": trainer.evaluator.describe_evaluation(),
                **describe_stream(self.data),
            },
            **describe_training(trainer, split),
            **facts,
        )
        write_model_card(folder, record)
        return scores


def score_naive_baseline(trainer: NeighborTrainer, split: str, examples: TargetDataset) -> dict[str, float]:
    """Scores, on all processes, what has learned nothing: the mean of each patch, and raw pixels as features."""
    evaluator, average = trainer.evaluator, trainer.average
    trainer.evaluator = BaselineEvaluator(evaluator.processor, has_classes=bool(evaluator.metric.score_names))
    trainer.average = None  # what looks at no weights is scored once
    metrics = trainer.predict(examples, metric_key_prefix=split).metrics
    trainer.evaluator, trainer.average = evaluator, average
    return {name: metrics[f"{split}_{name}"] for name in ("loss", *evaluator.metric.score_names)}


def describe_objective(model: HfViTForMaskedImageModeling) -> dict[str, str]:
    """Says of masks, decoder and loss what a card shall say."""
    options = model.options
    unit = f", {options.mask_unit} patches a side" if options.mask_unit > 1 else ""
    masks = f"{options.masked_share:.0%} of the patches, {options.mask_type}{unit}"
    if options.objective == "simmim":
        return {"objective": "simmim, mean absolute difference of pixels", "masks": masks}
    pixels = "pixels"
    if options.norm_pix_loss:
        pixels = "pixels of normalized patches, which have their true mean and deviation in pictures"
    return {
        "objective": f"mae, mean squared difference of {pixels}",
        "masks": masks,
        "decoder": f"{options.decoder_num_hidden_layers} blocks of width {options.decoder_hidden_size}",
    }
