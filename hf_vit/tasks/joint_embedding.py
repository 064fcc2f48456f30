"""Joint embedding pretraining: options, views, evaluator and model card texts.

In shapes, B is the batch size, C the number of channels, (H, W) the image size, V the number of views of an image, G
the number of global views, N the number of patches, D the hidden size, and E the embedding size.
"""

import math
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..data.augmentation.classification import cropped_example_augmentation
from ..data.augmentation.views import MultiCrop, ViewColors
from ..data.collators import UnlabeledImageCollator
from ..data.datasets import TargetData
from ..data.targets import image_only
from ..evaluation.base import Batch, File, ImageResult, Images
from ..evaluation.features import NeighborAccuracy
from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.task_configurations import HfViTJointEmbeddingConfig
from ..model.task_joint_embedding import (
    HfViTForJointEmbedding,
    assign,
    draw_slices,
    gaussian_loss,
    view_cross_entropy,
    view_loss,
)
from ..model.task_masked_image_modeling import draw_block_mask
from ..options.field import COUNT, POSITIVE, PROBABILITY, SHARE, Range, model_option, option
from ..options.training_arguments import HfViTTrainingArguments
from ..visualize.pretraining import draw_views
from .common.arguments import UnlabeledArguments
from .common.card import Usage
from .common.defaults import JOINT_EMBEDDINGS
from .common.models import input_size, plan_config
from .common.regularization import size_of
from .unlabeled import DESCRIBE, NeighborEvaluator, UnlabeledTask, labeled_images, pixel_levels


SLICES_AT_ONCE = 8  # number of random directions (slices) for which the loss is evaluated at a time
TEACHER_DECAY = 0.996  # default EMA decay of the teacher
# Masks and temperature of a teacher as in DINOv2 (https://github.com/facebookresearch/dinov2)
MASKED_VIEWS, MASKED_SHARES, LEAST_BLOCK = 0.5, (0.1, 0.5), 4
FIRST_TEMPERATURE, TEMPERATURE_WARMUP = (
    0.04,
    0.3,
)  # initial teacher temperature, and share of the run until it reaches `teacher_temperature`


view_option = partial(option, group="Views")


@dataclass
class JointEmbeddingArguments(UnlabeledArguments):
    """Options of joint embedding pretraining: model, loss, images and views."""

    masking_objective = "dino"
    task_config = "joint_embedding_config"
    task_options = ("objective", "gaussian_weight", "embedding_size")

    objective: str | None = model_option(
        None,
        "Training objective: lejepa (the distribution of embeddings is kept normal) or dino (an EMA teacher assigns "
        "views and masked patches to prototypes); by default lejepa.",
        essential=True,
    )
    gaussian_weight: float | None = model_option(
        None,
        "Weight, in (0, 1), of the distance of the embeddings from a standard normal distribution; the distance "
        "between views has the remaining weight. 0.05 by default.",
        Range(0, 1, is_open_below=True, is_open_above=True),
    )
    embedding_size: int | None = model_option(None, "Size of the embeddings that are compared; 64 by default.", COUNT)
    num_global_views: int = view_option(2, "Number of global views, which show most of an image.")
    num_local_views: int = view_option(4, "Number of local views, which show a small part of an image; 0 for none.")
    global_size: int | None = view_option(
        None, "Height of global views in pixels, image_size by default; smaller views train faster.", COUNT
    )
    local_size: int | None = view_option(
        None, "Height of local views in pixels; about half of image_size by default.", COUNT
    )
    canvas: float = view_option(
        1.0, "Size of the images from which views are cropped, relative to image_size.", POSITIVE
    )
    min_global_scale: float = view_option(0.3, "Smallest share of the image area in a global view.", SHARE)
    local_scale: list[float] = view_option(
        [0.08, 0.4], "Smallest and largest share of the image area in a local view."
    )
    horizontal_flip: float = view_option(0.5, "Probability of a horizontal flip.", PROBABILITY)
    color_jitter: float = view_option(0.8, "Probability of a color change.", PROBABILITY)
    brightness: float = view_option(0.4, "Maximum relative change of brightness.", PROBABILITY)
    contrast: float = view_option(0.4, "Maximum relative change of contrast.", PROBABILITY)
    saturation: float = view_option(0.4, "Maximum relative change of saturation.", PROBABILITY)
    hue: float = view_option(0.1, "Maximum change of hue, as a share of the full circle, at most 0.5.", Range(0, 0.5))
    grayscale: float = view_option(0.2, "Probability of conversion to grayscale.", PROBABILITY)
    blur: float = view_option(0.5, "Probability of a blur.", PROBABILITY)
    solarize: float = view_option(0.1, "Probability of inverting bright colors.", PROBABILITY)

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.num_global_views, self.num_local_views
        if counts[0] < 1 or counts[1] < 0 or sum(counts) < 2:
            raise ValueError(
                f"num_global_views={counts[0]} and num_local_views={counts[1]} are too few. Set at least one global "
                "view, and at least two views in total."
            )
        if len(self.local_scale) != 2 or not 0 < self.local_scale[0] <= self.local_scale[1] <= 1:
            raise ValueError(f"local_scale={self.local_scale} must be two shares in (0, 1], in ascending order.")

    def make_views(self, config: HfViTConfig, processor: BaseImageProcessor) -> MultiCrop:
        """Return the transform that creates views for a model; raise `ValueError` for unsuitable view sizes."""
        size = size_of_views("global_size", self.global_size, 1.0, config)
        local_size = size_of_views("local_size", self.local_size, 0.5, config)
        mean, std = pixel_levels(processor)
        return MultiCrop(
            size,
            local_size,
            self.num_global_views,
            self.num_local_views,
            (self.min_global_scale, 1.0),
            (self.local_scale[0], self.local_scale[1]),
            self.horizontal_flip,
            ViewColors(**{part.name: vars(self)[part.name] for part in fields(ViewColors)}),
            mean,
            std,
        )


def size_of_views(name: str, height: int | None, share: float, config: HfViTConfig) -> tuple[int, int]:
    """Return the size of views with the aspect ratio of the image: `height` in pixels or `share` of the image."""
    if height is None:
        patch_height = to_pair(config.patch_size)[0]
        height = max(1, round(to_pair(config.image_size)[0] * share / patch_height)) * patch_height
    return size_of(name, height, config)


@dataclass(frozen=True)
class DrawViews:
    """A `BatchTransform` that replaces images by views.

    Each process draws the random numbers for the images of all processes and uses the numbers of its images, so that
    the result does not depend on the number of processes.

    Args:
        views: Transform that creates the views.
        process_index: Index of this process.
        num_processes: Number of processes.
    """

    views: MultiCrop
    process_index: int = 0
    num_processes: int = 1

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Return the batch with views in place of `pixel_values` (B, C, H, W), see `MultiCrop`."""
        images = batch["pixel_values"]
        drawn = torch.rand(self.num_processes, len(images), self.views.num_drawn)[self.process_index]
        return {**batch, **self.views(images, drawn.to(images.device))}


@dataclass
class Teach:
    """A `BatchTransform` that masks patches of global views and adds the teacher's prototype assignments.

    As in DINOv2 (https://arxiv.org/abs/2304.07193), half of the views are masked, in blocks; the masked shares are
    spread evenly over `MASKED_SHARES`. The temperature of the assignments increases at first. All processes draw the
    random numbers of all views. Without a mask token, no patches are masked or assigned.

    Args:
        process_index: Index of this process.
        num_processes: Number of processes.
    """

    process_index: int = 0
    num_processes: int = 1
    trainer: Any = field(init=False, repr=False)  # its averaged weights (EMA) are the weights of the teacher

    def attach(self, trainer: Any) -> None:
        """Store the trainer, which provides the model and its averaged weights."""
        self.trainer = trainer

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Return the batch with `bool_masked_pos`, `teacher_probs` and `teacher_patch_probs`."""
        model, average, views = self.trainer.model, self.trainer.average, batch["pixel_values"]
        assert average is not None
        masks = self.draw_masks(views, model.config) if model.config.use_mask_token else None
        temperature = warmed_temperature(model.config, progress)
        model.eval()
        with torch.no_grad(), average.applied():
            taught = model(views, bool_masked_pos=masks, as_teacher=True, teacher_temperature=temperature)
        model.train()
        if masks is None:
            return {**batch, "teacher_probs": taught.teacher_probs}
        probs = {"teacher_probs": taught.teacher_probs, "teacher_patch_probs": taught.teacher_patch_probs}
        return {**batch, "bool_masked_pos": masks, **probs}

    def draw_masks(self, views: Tensor, config: HfViTConfig) -> Tensor:
        """Draw a mask (B, G, N) bool for the patches of global views (B, G, C, H, W), True for masked patches."""
        height, width = to_pair(config.patch_size)
        grid = views.shape[-2] // height, views.shape[-1] // width
        masks = torch.zeros(*views.shape[:2], *grid, dtype=torch.bool)
        shape = self.num_processes, *views.shape[:2]
        numbers = torch.randperm(math.prod(shape)).view(shape)[self.process_index]  # (B, G)
        seeds = torch.randint(2**31, shape)[self.process_index]
        num_masked, (least, most) = int(MASKED_VIEWS * math.prod(shape)), MASKED_SHARES
        for image, view in (numbers < num_masked).nonzero().tolist():
            generator = Generator().manual_seed(int(seeds[image, view]))
            place = (numbers[image, view] + torch.rand((), generator=generator)) / num_masked
            count = int((least + (most - least) * float(place)) * math.prod(grid))
            masks[image, view] = draw_block_mask(grid, count, generator, LEAST_BLOCK)
        return masks.flatten(2).to(views.device)


def warmed_temperature(config: HfViTConfig, progress: float) -> float:
    """Return the teacher temperature at a given progress of the run. It increases linearly at first."""
    last: float = HfViTJointEmbeddingConfig.of(config.joint_embedding_config).teacher_temperature
    return last - max(0.0, last - FIRST_TEMPERATURE) * max(0.0, 1 - progress / TEMPERATURE_WARMUP)


@dataclass(frozen=True)
class EmbeddedImage:
    """Outputs of a model for an image and its views."""

    pictures: list[Tensor]  # the image and its views, (C, H, W) each, as model inputs
    embeds: Tensor  # (V, E)
    class_number: int | None  # class predicted by nearest neighbors, None if no labels exist


class EmbeddingMetric(NeighborAccuracy):
    """`NeighborAccuracy` that also keeps the embeddings of all images."""

    def record(self, prediction: Any, target: int | None) -> Any:
        """Return the embeddings of an `EmbeddedImage`, and whether its neighbors predict its class."""
        return prediction.embeds.float().cpu(), super().record(prediction, target)

    def compute(self) -> dict[str, float]:
        """Return the nearest-neighbor accuracy, or an empty dictionary if no image has a class."""
        return self.score(known for _, known in self.records)


def as_it_is(values: Tensor) -> Tensor:
    """Return `values` unchanged, in place of a sum over processes, because each process has all images."""
    return values


@dataclass(eq=False)
class JointEmbeddingEvaluator(NeighborEvaluator):
    """Score the loss on fixed views, and the features of whole images by nearest neighbors.

    The features of an image are the input of the projector, because these are also used in fine-tuning for other
    tasks. The class of an image is predicted from its nearest training images, see `classify_by_neighbors`.
    """

    caption = "Image and views"
    loss_meaning = "the loss of all images as one batch, on views that are the same at every evaluation"
    compared = "the pooled features"
    baseline_name = "one embedding for all, raw pixels"
    options: HfViTJointEmbeddingConfig
    views: MultiCrop

    def features(self, model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
        """Return the features of each image, (B, D)."""
        features: Tensor = model.base_model(pixel_values).pooler_output
        return features

    def embed(self, model: PreTrainedModel, views: dict[str, Tensor]) -> Tensor:
        """Return the embeddings of views, (B, V, E). The baseline returns equal embeddings for all views."""
        if self.is_baseline:
            count, options = self.views.num_global + self.views.num_local, self.options
            size = (
                options.num_prototypes if options.objective == "dino" else 1
            )  # at least one image, because the loss of no embeddings is undefined
            return views["pixel_values"].new_zeros(len(views["pixel_values"]), count, size)
        embeds: Tensor = model(**views, return_loss=False).embeds
        return embeds

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return views, embeddings and predicted class of each image."""
        images = batch["pixel_values"]
        views = self.views(images, batch["drawn"])
        embeds, classes = self.embed(model, views), self.classes(model, images)
        return [
            ImageResult(EmbeddedImage([image, *(view for part in parts for view in part)], own, number))
            for image, own, number, *parts in zip(images, embeds, classes, *views.values(), strict=True)
        ]

    def compute(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the scores, with the loss of all images as one batch."""
        embeds = torch.stack([own for own, _ in self.metric.records])  # embeddings (N, V, E) from all processes
        options, num_global = self.options, self.views.num_global
        if options.objective == "dino":
            first = embeds[:, :num_global]
            assigned = assign(first.flatten(0, 1), options.teacher_temperature, add=as_it_is)
            assigned = assigned.unflatten(0, first.shape[:2])
            loss = view_cross_entropy(embeds, assigned, options.student_temperature, add=as_it_is)
            return {"loss": float(loss), **super().compute(model)}
        generator = Generator().manual_seed(0)
        slices = draw_slices(embeds.shape[-1], options.num_slices, embeds.device, generator)
        sums = (gaussian_loss(embeds, few, add=as_it_is) * few.shape[1] for few in slices.split(SLICES_AT_ONCE, dim=1))
        spread, weight = float(sum(sums)) / slices.shape[1], options.gaussian_weight
        likeness = float(view_loss(embeds, num_global, add=as_it_is))
        return {"loss": (1 - weight) * likeness + weight * spread, **super().compute(model)}

    def draw(self, images: Images, predictions: list[EmbeddedImage], targets: list[int | None], file: File) -> None:
        """Draw each image and its views."""
        draw_views([prediction.pictures for prediction in predictions], self.views.mean, self.views.std, file)


@dataclass(frozen=True)
class JointEmbedding(UnlabeledTask):
    """Pretraining without labels by joint embedding of several views of an image."""

    model_class = HfViTForJointEmbedding
    augment = staticmethod(partial(cropped_example_augmentation, image_only))
    limits = (
        "The model predicts no classes. Use it as a starting point for fine-tuning, or for its features. The "
        "views change colors and crops, so the features may not distinguish them."
    )
    usage = Usage(
        name="describe",
        stock=DESCRIBE,
        own="""print(outputs.pooler_output.shape, "the features of the image")
print(outputs.embeds.shape, "the embedding that views are compared by")""",
    )
    defaults = JOINT_EMBEDDINGS
    argument_defaults: ClassVar[dict[str, Any]] = {
        "per_device_train_batch_size": 128,
        "metric_for_best_model": "loss",
    }

    options: JointEmbeddingArguments

    def complete_arguments(self, args: HfViTTrainingArguments) -> None:
        """Enable EMA for "dino", whose teacher has the averaged weights."""
        if self.objective == "dino" and args.ema_decay is None:
            args.ema_decay = TEACHER_DECAY
            args.check_combinations()

    @property
    def objective(self) -> str:
        """Training objective: that in the options, or that of the saved model."""
        options = plan_config(self.options).get(self.options.task_config)
        return HfViTJointEmbeddingConfig.of(options).objective

    def make_evaluator(
        self, model: PreTrainedModel, processor: BaseImageProcessor, data: TargetData
    ) -> JointEmbeddingEvaluator:
        """Return the evaluator."""
        views, known = self.options.make_views(model.config, processor), labeled_images(data)
        return JointEmbeddingEvaluator(processor, EmbeddingMetric(len(known) > 0), known, model.options, views)

    def make_collator(self, processor: BaseImageProcessor, model: PreTrainedModel) -> UnlabeledImageCollator:
        """Return the collator of training and evaluation batches."""
        return UnlabeledImageCollator(processor, self.options.make_views(model.config, processor).num_drawn)

    def augmentation_arguments(self, processor: Any, config: HfViTConfig, data: TargetData) -> dict[str, Any]:
        """Return the arguments of `augment`, without random crops and flips: views are drawn for whole batches."""
        size = tuple(max(1, math.ceil(side * self.options.canvas)) for side in input_size(processor))
        return {"size": size, "num_channels": config.num_channels, "min_crop_scale": 1.0, "horizontal_flip": 0.0}

    def trainer_arguments(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, Any]:
        """Return the batch transforms that create views and, for "dino", the targets of the teacher."""
        views = self.options.make_views(model.config, processor)
        drawing = DrawViews(views, args.process_index, args.world_size)
        teaching = [Teach(args.process_index, args.world_size)] if model.options.objective == "dino" else []
        return {"batch_transforms": [drawing, *teaching]}

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about projector and loss."""
        options = asdict(model.options)
        if options["objective"] == "dino":
            return {
                "objective": "DINO and iBOT: for views and masked patches, the model predicts the prototypes that a "
                f"teacher with averaged weights assigns; weight of patches {options['patch_weight']}, of the distance "
                f"between images (KoLeo) {options['koleo_weight']}",
                "projector": f"three layers of width {options['projector_hidden_size']}, "
                f"{options['num_prototypes']} prototypes",
            }
        return {
            "objective": "LeJEPA: distance of views from the mean of the global ones, "
            f"and with weight {options['gaussian_weight']} that of embeddings from a standard normal distribution, "
            f"along {options['num_slices']} random directions",
            "projector": f"two layers of width {options['projector_hidden_size']}, "
            f"embeddings of {options['embedding_size']} values",
        }
