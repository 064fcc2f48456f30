"""Image reconstruction: options, evaluator with a linear baseline, initial weights and model card texts.

In shapes, B is the batch size, C the number of channels, (H, W) the image size, (h, w) the patch grid, N the number of
patches, E the number of values of a patch, Z the number of latents per patch, and D the hidden size.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..data.augmentation.classification import cropped_example_augmentation
from ..data.collators import ImageCollator, masked_image_target
from ..data.datasets import TargetData
from ..data.loaders.unlabeled_images import load_unlabeled_images
from ..data.targets import image_only
from ..evaluation.base import BaseEvaluator, Batch, File, ImageResult, Images
from ..evaluation.reconstruction import ReconstructedImage, ReconstructionMetric
from ..model.configuration_hf_vit import to_pair
from ..model.modeling_hf_vit import HfViTModel
from ..model.patch_decoder import patchify, unpatchify
from ..model.task_image_reconstruction import (
    HfViTForImageReconstruction,
    HfViTKlAutoencoder,
    HfViTLatentDistribution,
    HfViTRepresentationAutoencoder,
)
from ..options.field import NOT_NEGATIVE, POSITIVE, PROBABILITY, SHARE, augmentation_option, model_option
from ..options.training_arguments import HfViTTrainingArguments
from ..processes import on_first_process
from ..visualize.figures import MAX_ROWS
from ..visualize.pretraining import draw_views
from .base import Choice, plain_batches
from .common.arguments import UnlabeledArguments
from .common.card import Usage
from .common.defaults import RECONSTRUCTION
from .common.models import NUM_IMAGES, principal_directions, read_config_of
from .common.streams import UnlabeledImages
from .unlabeled import DESCRIBE, UnlabeledTask, pixel_levels


BASELINE_IMAGES = 2000  # number of training images for the linear baseline


@dataclass
class ReconstructionArguments(UnlabeledArguments):
    """Options of image reconstruction: latents, loss, images and augmentation."""

    task_config = "reconstruction_config"
    task_options = (
        *("latent_type", "latent_channels", "kl_weight", "num_latent_layers", "noise_std", "pixel_loss"),
        "feature_weight",
    )
    max_knn_samples: ClassVar[int] = 0  # type: ignore[misc]  # no option: there is no k-NN evaluation

    latent_type: str | None = model_option(
        None,
        "Type of latents: kl (a few normally distributed numbers per patch) or rae (the standardized tokens of a "
        "trained encoder, which stays frozen); by default kl.",
        essential=True,
    )
    latent_channels: int | None = model_option(
        None, "Number of latents per patch, for latent_type kl; by default 16.", POSITIVE, essential=True
    )
    kl_weight: float | None = model_option(
        None, "Weight of the KL divergence, for latent_type kl; by default 1e-5.", NOT_NEGATIVE
    )
    num_latent_layers: int | None = model_option(
        None, "Number of last blocks whose tokens are summed, for latent_type rae; by default 1.", POSITIVE
    )
    noise_std: float | None = model_option(
        None,
        "Standard deviation of the level of noise that training adds to latents, for latent_type rae; by default 0.",
        NOT_NEGATIVE,
    )
    pixel_loss: str | None = model_option(
        None, "Pixel loss: l2 (squared differences) or l1 (absolute differences); by default l2."
    )
    feature_weight: float | None = model_option(
        None,
        "Weight of the distance between the features of image and reconstruction in a frozen encoder; by default 0.",
        NOT_NEGATIVE,
    )
    feature_model: str | None = model_option(
        None, "Saved or published encoder that computes features for --feature_weight; by default the initial model."
    )
    min_crop_scale: float = augmentation_option(
        0.5, "Smallest share of the image area in a random resized crop; 1 keeps the whole image.", SHARE
    )
    horizontal_flip: float = augmentation_option(0.5, "Probability of a horizontal flip.", PROBABILITY)


@dataclass(eq=False)
class ReconstructionEvaluator(BaseEvaluator):
    """Score reconstructions by PSNR and SSIM, at the size of the model input and with pixels in [0, 1]."""

    caption = "Image, reconstruction, half way to the image below, and a sample"
    linear: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)  # mean (E,), directions (E, Z) of the PCA

    def describe_evaluation(self) -> str:
        """Return a description of the scores."""
        return "PSNR and SSIM of whole images at the size of the model input; loss as in training, without noise"

    def reconstruct(self, model: HfViTForImageReconstruction, images: Tensor) -> tuple[Tensor, Any]:
        """Return reconstructions (B, C, H, W) by the model or a given baseline, and the latent distribution."""
        latent_dist = model.encode(images).latent_dist
        if self.linear is None:
            return model.decode(latent_dist.mode()).sample, latent_dist
        mean, directions = (values.to(images) for values in self.linear)
        size = to_pair(model.config.patch_size)
        patches = patchify(images, size) - mean
        grid = images.shape[-2] // size[0], images.shape[-1] // size[1]
        return unpatchify(patches @ directions @ directions.T + mean, grid, size), latent_dist

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return the reconstruction and the loss of each image, and further pictures of the first images."""
        assert isinstance(model, HfViTForImageReconstruction)
        images = batch["pixel_values"]
        reconstructions, latent_dist = self.reconstruct(model, images)
        pictures = [] if self.linear is not None else self.pictures(model, latent_dist.mode()[:MAX_ROWS])
        levels = (torch.as_tensor(values) for values in pixel_levels(self.processor))
        shift, scale = (values.to(images).reshape(-1, 1, 1) for values in levels)
        results = []
        for number, (image, own) in enumerate(zip(images, reconstructions, strict=True)):
            one = slice(number, number + 1)
            logvar = None if latent_dist.logvar is None else latent_dist.logvar[one]
            loss = model.loss(own[None], image[None], HfViTLatentDistribution(latent_dist.mean[one], logvar))
            true, found = ((values * scale + shift).clamp(0, 1) for values in (image, own))
            others = [part[number] for part in pictures if number < len(part)]
            results.append(ImageResult(ReconstructedImage(true, found, [image, own, *others]), float(loss)))
        return results

    def pictures(self, model: HfViTForImageReconstruction, latents: Tensor) -> list[Tensor]:
        """Return images decoded halfway between successive latents (B, Z, h, w), and for "kl" samples of the prior."""
        halves = [model.decode((latents + latents.roll(-1, 0)) / 2).sample]
        if model.options.latent_type != "kl":
            return halves
        drawn = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0)).to(latents)
        return [*halves, model.decode(drawn).sample]

    def draw(self, images: Images, predictions: list[ReconstructedImage], targets: Sequence[Any], file: File) -> None:
        """Draw each image, its reconstruction, the image halfway between it and the next one, and a random sample."""
        rows = [prediction.pictures for prediction in predictions[:MAX_ROWS]]
        titles = ["image", "reconstruction", "half way to the next", "sample"][: len(rows[0])]
        draw_views(rows, *pixel_levels(self.processor), file, titles)


@dataclass(frozen=True)
class ImageReconstruction(UnlabeledTask):
    """Image reconstruction with an autoencoder."""

    model_class = HfViTForImageReconstruction
    collator_class = ImageCollator
    augment = staticmethod(partial(cropped_example_augmentation, image_only))
    packages = ("matplotlib", "torchmetrics")
    usage = Usage(
        name="describe",
        stock=DESCRIBE,
        own="""latents = model.encode(inputs["pixel_values"]).latent_dist.mode()
print(latents.shape, "from which", model.decode(latents).sample.shape, "is decoded")""",
    )
    limits = (
        "Reconstructions lose details: compare the pictures above. Samples from a normal distribution are not "
        "realistic images without a further model of the latents."
    )
    defaults = RECONSTRUCTION
    argument_defaults: ClassVar[dict[str, Any]] = {"metric_for_best_model": "loss"}
    can_evaluate = True

    options: ReconstructionArguments

    def complete_arguments(self, args: HfViTTrainingArguments) -> None:
        """Freeze the encoder of "rae" latents; raise `ValueError` or `OSError` if an encoder is missing."""
        options = self.options
        if options.latent_type == "rae" and args.trainable_blocks is None:
            args.trainable_blocks = 0
        if options.latent_type == "rae" and options.model_name_or_path is None:
            raise ValueError("latent_type='rae' uses the tokens of a trained encoder. Choose one with --model.")
        if options.feature_weight and not (options.feature_model or options.model_name_or_path):
            raise ValueError(
                f"feature_weight={options.feature_weight} requires a trained encoder, but none is given. Set "
                "--feature_model, or --feature_weight 0."
            )
        if options.feature_weight and options.feature_model:
            read_config_of(options.feature_model)

    def open_data(self) -> TargetData:
        """Open the images."""
        images = load_unlabeled_images(self.options.sources, **self.options.source_options())
        return TargetData(images, masked_image_target)

    def load_data(self, args: HfViTTrainingArguments) -> UnlabeledImages:
        """Open and check the training images. Class labels are not read."""
        data = super().load_data(args)
        return replace(data, known=data.known.select([]))

    def open_model(self, data: TargetData, args: HfViTTrainingArguments) -> tuple[PreTrainedModel, Any]:
        """Return the model and its image processor. If the loss compares features, their frozen encoder is loaded."""
        model, processor = super().open_model(data, args)
        if model.options.feature_weight:
            name = self.options.feature_model or self.options.model_name_or_path
            encoder = HfViTModel.from_pretrained(name, image_size=model.config.image_size).eval().requires_grad_(False)
            model.feature_encoder = (encoder,)
        return model, processor

    def make_evaluator(
        self, model: PreTrainedModel, processor: BaseImageProcessor, data: TargetData
    ) -> ReconstructionEvaluator:
        """Return the evaluator."""
        return ReconstructionEvaluator(processor, ReconstructionMetric())

    def patches(self, model: PreTrainedModel, processor: Any, data: TargetData, most_images: int) -> Iterator[Tensor]:
        """Yield the patches (N, E) of a sample of training images."""
        for batch in plain_batches(self, model, processor, data, most_images):
            yield patchify(batch["pixel_values"], to_pair(model.config.patch_size))[0]

    @torch.no_grad()
    def start_weights(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> None:
        """Initialize the linear shortcut ("kl" latents) or statistics ("rae") of a new head from training images."""
        super().start_weights(model, processor, data, args)
        assert isinstance(model, HfViTForImageReconstruction)
        head = model.autoencoder
        if isinstance(head, HfViTKlAutoencoder) and not head.decoder.predictor.weight.any():
            mean, variances, directions = principal_directions(self.patches(model, processor, data, NUM_IMAGES))
            size = min(model.options.latent_channels, len(mean))
            head.shortcut.weight.zero_()
            head.shortcut.weight[:, :size] = (directions * variances.clamp_min(0).sqrt())[:, -size:].flip(1)
            head.shortcut.bias.copy_(mean)
        elif isinstance(head, HfViTRepresentationAutoencoder) and bool((head.latent_std == 1).all()):
            standardize(model.eval(), plain_batches(self, model, processor, data, NUM_IMAGES))

    @torch.no_grad()
    def choose(self, trainer: Any, data: TargetData) -> Choice:
        """Set `scaling_factor` to the inverse standard deviation of the latents of training images."""
        model = trainer.plain_model
        model.eval()
        batches = plain_batches(self, model, trainer.processing_class, data, NUM_IMAGES)
        latents = [
            model.encode(batch["pixel_values"].to(model.device)).latent_dist.mode().flatten() for batch in batches
        ]
        spread = on_first_process(trainer.args, lambda: float(torch.cat(latents).float().std()))
        model.options.scaling_factor = round(1 / max(spread, 1e-6), 4)
        model.config.reconstruction_config = model.options
        return Choice()

    def evaluate_baselines(self, trainer: Any, data: TargetData, split: str) -> dict[str, dict[str, float]]:
        """Evaluate the PCA of patches, with as many components as the model has latents, on all processes."""
        model, processor = trainer.plain_model, trainer.processing_class
        mean, _, directions = principal_directions(self.patches(model, processor, data, BASELINE_IMAGES))
        size = min(model.autoencoder.decoder.embedding.in_features, len(mean))
        assert isinstance(trainer.evaluator, ReconstructionEvaluator)
        evaluator = replace(trainer.evaluator, linear=(mean, directions[:, -size:]))
        with trainer.evaluating_with(evaluator):
            metrics = trainer.predict(data.examples(split), metric_key_prefix=split).metrics
        # The loss is excluded, because it contains the KL divergence of the model's latents.
        scores = {name: metrics[f"{split}_{name}"] for name in evaluator.metric.score_names}
        return {f"PCA of patches, {size} numbers each": scores}

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about latents, decoder and loss."""
        options, pixels = model.options, model.config.num_channels * math.prod(to_pair(model.config.patch_size))
        size = model.autoencoder.decoder.embedding.in_features
        kind = f"KL divergence, weight {options.kl_weight:g}" if options.latent_type == "kl" else "standardized tokens"
        return {
            "latents": f"{size} per patch of {pixels} numbers ({pixels / size:.3g} times fewer), {kind}",
            "decoder": f"{options.decoder_num_hidden_layers} blocks of width {options.decoder_hidden_size}",
            "pixel loss": options.pixel_loss,
        }


def standardize(model: HfViTForImageReconstruction, batches: Iterable[Batch]) -> None:
    """Set the statistics of "rae" latents to the mean and standard deviation per channel of the given images."""
    latents = [model.encode(batch["pixel_values"]).latent_dist.mode() for batch in batches]
    tokens = torch.cat([part.flatten(2).mT.flatten(0, 1) for part in latents])  # (M, D)
    head = model.autoencoder
    assert isinstance(head, HfViTRepresentationAutoencoder)
    head.latent_mean.copy_(tokens.mean(dim=0))
    head.latent_std.copy_(tokens.std(dim=0).clamp_min(1e-6))
