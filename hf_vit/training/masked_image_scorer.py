"""How masked images are predicted, scored and drawn.

Shapes: B batch, C channels, H W pixels, p q patch height and width, h w patch grid, N = h·w patches, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..configuration_hf_vit import to_pair
from ..configuration_tasks_hf_vit import HfViTMaskedImageModelingConfig
from ..metrics import NeighbourAccuracy, classify_by_neighbours
from ..metrics.nearest_neighbours import NUM_NEIGHBOURS, TEMPERATURE
from ..task_mim import PatchScale, draw_mask, masked_image_modeling_loss, patchify, unpatchify
from ..visualize import draw_reconstructions
from .scorer import Batch, ImageScorer, Scored


RAW_SIZE = 32  # pixels a side of the images whose pixels are taken for features


@dataclass(frozen=True)
class MaskedImage:
    """What a model made of an image.

    Args:
        pixel_values: (C, H, W), the image as the model takes it.
        mask: (h, w) bool, True where a patch was masked.
        reconstruction: (C, H, W) in the units of `pixel_values`.
        class_number: Class of its neighbours, None where no classes are known.
    """

    pixel_values: Tensor
    mask: Tensor
    reconstruction: Tensor
    class_number: int | None


class MaskedImageScorer(ImageScorer):
    """Scores the loss on masks that are always the same, and what the features of whole images are good for.

    The features of an image are the mean of its patches after the final norm, without a mask: the CLS token takes no
    part in the loss, so that what it holds is not trained to stand for the image. Each image has the class that its
    nearest training images have, see `classify_by_neighbours`.
    """

    caption = "Image, what the model sees, and reconstruction"
    metric: NeighbourAccuracy

    def __init__(self, processor: BaseImageProcessor, has_classes: bool) -> None:
        """Begins.

        Args:
            processor: Has made the images.
            has_classes: Whether the classes of images are known.
        """
        super().__init__(processor, NeighbourAccuracy(has_classes))
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

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[Scored]:
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
            Scored(MaskedImage(image, mask.view(grid), reconstruction, number), loss)
            for image, mask, reconstruction, number, loss in zip(
                pixel_values, masks, images, classes, losses, strict=True
            )
        ]

    def _classes(self, model: PreTrainedModel, pixel_values: Tensor) -> Sequence[int | None]:
        """Returns the class that each image has by its neighbours."""
        if self.known is None:
            return [None] * len(pixel_values)
        numbers: list[int] = classify_by_neighbours(self.features(model, pixel_values), *self.known).tolist()
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
            f"{loss}; knn_accuracy: the class of {NUM_NEIGHBOURS} neighbours among training images, weighted at "
            f"temperature {TEMPERATURE}, by the mean of the patches"
        )

    def describe_limits(self) -> str:
        """Says what the model is not good for."""
        return (
            "It names nothing by itself: it is a start for models that are trained with labels, or a source of "
            "features. What it makes of masked patches is a guess from their neighbours."
        )


class TrivialScorer(MaskedImageScorer):
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
