"""Masked image modeling: options, evaluator, features of training images and model card texts.

In shapes, B is the batch size, C the number of channels, (H, W) the image size, (p, q) the patch size, (h, w) the
patch grid, N = h·w the number of patches, and D the hidden size.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..data.augmentation.classification import cropped_example_augmentation
from ..data.collators import MaskedImageModelingCollator, draw_mask_seed
from ..data.datasets import TargetData
from ..evaluation.base import Batch, File, ImageResult, Images
from ..evaluation.features import NeighborAccuracy
from ..model.configuration_hf_vit import to_pair
from ..model.patch_decoder import patchify, unpatchify
from ..model.task_masked_image_modeling import (
    HfViTForMaskedImageModeling,
    PatchScale,
    draw_mask,
    masked_image_modeling_loss,
)
from ..options.field import PROBABILITY, SHARE, Range, augmentation_option, model_option
from ..options.training_arguments import HfViTTrainingArguments
from ..visualize.pretraining import draw_reconstructions
from .common.arguments import UnlabeledArguments
from .common.card import Usage
from .common.defaults import MASKED_IMAGES
from .unlabeled import DESCRIBE, NeighborEvaluator, UnlabeledTask, labeled_images, pixel_levels


BASE_LEARNING_RATE, BASE_BATCH = 1.5e-4, 256  # values from MAE, https://arxiv.org/abs/2111.06377


@dataclass
class MaskedImageArguments(UnlabeledArguments):
    """Options of masked image modeling: model, masks, images and augmentation."""

    masking_objective = "simmim"
    task_config = "masked_image_modeling_config"
    task_options = ("objective", "mask_ratio", "mask_type", "norm_pix_loss")

    objective: str | None = model_option(
        None,
        "Training objective: mae (the encoder processes only visible patches) or simmim (the encoder also processes "
        "mask tokens); by default mae.",
        essential=True,
    )
    mask_ratio: float | None = model_option(
        None,
        "Share of masked patches; by default 0.75 for mae, 0.6 for simmim.",
        Range(0, 1, is_open_below=True, is_open_above=True),
    )
    mask_type: str | None = model_option(None, "Mask type: random (default) or blockwise.")
    norm_pix_loss: bool | None = model_option(None, "Whether mae predicts normalized patches; true by default.")
    min_crop_scale: float = augmentation_option(
        0.2, "Smallest share of the image area in a random resized crop; 1 keeps the whole image.", SHARE
    )
    horizontal_flip: float = augmentation_option(0.5, "Probability of a horizontal flip.", PROBABILITY)


@dataclass(frozen=True)
class MaskedImage:
    """Outputs of a model for an image."""

    pixel_values: Tensor  # model input (C, H, W)
    mask: Tensor  # patch mask (h, w) bool, True for masked patches
    reconstruction: Tensor  # reconstruction (C, H, W) in the units of `pixel_values`
    class_number: int | None  # class predicted by nearest neighbors, None if no labels exist


class MaskedImageEvaluator(NeighborEvaluator):
    """Score the loss on fixed masks, and the features of whole images by nearest neighbors.

    The features of an image are the mean of its patch tokens after the final norm, without a mask. The CLS token is
    not used, because the loss does not train it. The class of an image is predicted from its nearest training images,
    see `classify_by_neighbors`.
    """

    caption = "Image, visible patches and reconstruction"
    loss_meaning = "the loss on masks that are the same at every evaluation"
    compared = "the mean of the patches"
    baseline_name = "mean of each patch, raw pixels"

    def features(self, model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
        """Return the features of each image, (B, D)."""
        hidden_states: Tensor = model.base_model(pixel_values).last_hidden_state
        return hidden_states[:, model.config.num_prefix_tokens :].mean(dim=1)

    def logits(self, model: PreTrainedModel, pixel_values: Tensor, masks: Tensor) -> Tensor:
        """Return the predicted pixels of patches, (B, N, p·q·C). The baseline predicts each patch's mean color."""
        if self.is_baseline:
            patches = patchify(pixel_values, to_pair(model.config.patch_size))
            means = patches.mean(dim=-1, keepdim=True)
            return (torch.zeros_like(means) if model.options.normalizes_patches else means).expand_as(patches)
        predicted: Tensor = model(pixel_values, bool_masked_pos=masks).logits
        return predicted

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return the reconstruction, the predicted class and the loss of each image."""
        pixel_values, options, patch_size = batch["pixel_values"], model.options, to_pair(model.config.patch_size)
        grid = pixel_values.shape[-2] // patch_size[0], pixel_values.shape[-1] // patch_size[1]
        if (masks := batch.get("bool_masked_pos")) is None:
            masks = draw_mask(len(batch["noise"]), grid, options, noise=batch["noise"])  # (B, N)
        patches = patchify(pixel_values, patch_size)  # (B, N, p·q·C)
        logits = self.logits(model, pixel_values, masks)
        scale = PatchScale(patches) if options.normalizes_patches else None
        targets, pixels = (patches, logits) if scale is None else (scale.normalize(patches), scale.restore(logits))
        losses = [
            float(masked_image_modeling_loss(predicted[None], true[None], mask[None], options.objective))
            for predicted, true, mask in zip(logits, targets, masks, strict=True)
        ]
        images, classes = unpatchify(pixels, grid, patch_size), self.classes(model, pixel_values)
        return [
            ImageResult(MaskedImage(image, mask.view(grid), reconstruction, number), loss)
            for image, mask, reconstruction, number, loss in zip(
                pixel_values, masks, images, classes, losses, strict=True
            )
        ]

    def draw(self, images: Images, predictions: list[MaskedImage], targets: list[int | None], file: File) -> None:
        """Draw each image, its visible patches and its reconstruction."""
        names = ("pixel_values", "mask", "reconstruction")
        pixels, masks, reconstructions = ([vars(prediction)[name] for prediction in predictions] for name in names)
        draw_reconstructions(pixels, masks, reconstructions, *pixel_levels(self.processor), file)


@dataclass(frozen=True)
class MaskedImageModeling(UnlabeledTask):
    """Pretraining without labels by masked image modeling."""

    model_class = HfViTForMaskedImageModeling
    augment = staticmethod(partial(cropped_example_augmentation, draw_mask_seed))
    usage = Usage(
        name="describe",
        stock=DESCRIBE,
        own="""print(outputs.bool_masked_pos.float().mean(), "of the patches were masked")
print(outputs.reconstruction.shape)  # in the units of pixel_values""",
    )
    limits = (
        "The model predicts no classes. Use it as a starting point for fine-tuning, or for its features. Its "
        "reconstructions are predictions from the visible patches."
    )
    defaults = MASKED_IMAGES
    argument_defaults: ClassVar[dict[str, Any]] = {
        # Training arguments of MAE
        "learning_rate": None,
        "adam_beta2": 0.95,
        "warmup_steps": 0.05,
        "metric_for_best_model": "loss",
    }
    argument_help: ClassVar[dict[str, str]] = {
        "learning_rate": f"By default {BASE_LEARNING_RATE} x images per step / {BASE_BATCH}, as in MAE.",
    }

    options: MaskedImageArguments

    def complete_arguments(self, args: HfViTTrainingArguments) -> None:
        """Set the learning rate of MAE, in proportion to the batch size."""
        if vars(args)["learning_rate"] is None:
            args.learning_rate = BASE_LEARNING_RATE * args.images_per_step / BASE_BATCH

    def make_evaluator(
        self, model: PreTrainedModel, processor: BaseImageProcessor, data: TargetData
    ) -> MaskedImageEvaluator:
        """Return the evaluator."""
        known = labeled_images(data)
        return MaskedImageEvaluator(processor, NeighborAccuracy(len(known) > 0), known)

    def make_collator(self, processor: BaseImageProcessor, model: PreTrainedModel) -> MaskedImageModelingCollator:
        """Return the collator of training and evaluation batches."""
        return MaskedImageModelingCollator(processor, to_pair(model.config.patch_size), model.options)

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about masks, decoder and loss."""
        options = model.options
        unit = f", {options.mask_unit} patches a side" if options.mask_unit > 1 else ""
        masks = f"{options.masked_share:.0%} of the patches, {options.mask_type}{unit}"
        if options.objective == "simmim":
            return {"objective": "simmim, mean absolute difference of pixels", "masks": masks}
        pixels = "pixels"
        if options.norm_pix_loss:
            pixels = "pixels of normalized patches; pictures show patches with their true mean and deviation"
        return {
            "objective": f"mae, mean squared difference of {pixels}",
            "masks": masks,
            "decoder": f"{options.decoder_num_hidden_layers} blocks of width {options.decoder_hidden_size}",
        }
