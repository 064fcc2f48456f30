"""Configurations, inputs and training cases of small models that cover every option, shared by several tests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Generator, Tensor

import hf_vit
from hf_vit.model.configuration_hf_vit import to_pair
from hf_vit.model.pretrained import HfViTPreTrainedModel


MODEL_CLASSES = [
    hf_vit.HfViTModel,
    hf_vit.HfViTBackbone,
    hf_vit.HfViTForImageClassification,
    hf_vit.HfViTForSemanticSegmentation,
    hf_vit.HfViTForUniversalSegmentation,
    hf_vit.HfViTForDepthEstimation,
    hf_vit.HfViTForKeypointDetection,
    hf_vit.HfViTForObjectDetection,
]
SMALL_DEPTH: dict[str, Any] = {"head": "dpt", "neck_hidden_sizes": (8, 8, 8), "reassemble_factors": (2, 1, 0.5)}
SMALL_DEPTH |= {"fusion_hidden_size": 8, "head_hidden_size": 8}
SMALL_TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SMALL_TEXT |= {"vocab_size": 40, "max_position_embeddings": 9, "eos_token_id": 39}
SMALL_DECODER = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2}
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
SMALL |= {
    **{"image_size": 32, "patch_size": 8, "num_labels": 5},
    "segmentation_config": {"head": "conv", "hidden_size": 8},
    "universal_segmentation_config": {"num_queries": 5, "num_blocks": 2, "train_num_points": 40},
    "depth_config": SMALL_DEPTH,
    "keypoint_config": {"hidden_size": 8},
    "detection_config": {"decoder": "queries", "num_queries": 5, "num_blocks": 2},
    "joint_embedding_config": {"projector_hidden_size": 16, "embedding_size": 8, "num_slices": 16},
    "masked_image_modeling_config": {**SMALL_DECODER, "decoder_intermediate_size": 24},
    "reconstruction_config": {**SMALL_DECODER, "decoder_intermediate_size": 24, "latent_channels": 6},
    "text_config": SMALL_TEXT,
    "contrastive_config": {"projection_dim": 12},
    "caption_config": {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 9,
        "dropout": 0.0,
    },
}
# Together, these variants use every option of the backbone.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"use_mask_token": True, "prefix_has_position": False, "num_register_tokens": 1},
    "registers": {
        **{"num_register_tokens": 2, "use_distillation_token": True, "use_pooler": True, "layerscale_value": 0.5},
        **{"drop_path_rate": 0.2, "position_antialias": True, "position_interpolation": "bilinear"},
    },
    "rotary": {
        **{"position_embedding_type": "rotary", "key_bias": False, "use_gated_mlp": True, "hidden_act": "silu"},
        **{"num_register_tokens": 2, "pooling": "cls_mean"},
    },
    "rms": {
        **{"position_embedding_type": "learned+rotary", "norm_type": "rmsnorm", "use_qk_norm": True},
        **{"qkv_bias": False, "proj_bias": False, "mlp_bias": False, "use_cls_token": False, "pooling": "mean"},
        "depth_config": {**SMALL_DEPTH, "readout_type": "ignore"},
    },
    "sincos": {
        **{"position_embedding_type": "sincos2d", "num_channels": 1, "image_size": (32, 48), "patch_size": (8, 16)},
    },
    "none": {"position_embedding_type": "none", "pooling": "cls_mean", "use_pooler": True},
    "clip": {"use_pre_layernorm": True, "hidden_act": "quick_gelu"},
    "siglip": {
        **{"pooling": "attention", "hidden_act": "gelu_pytorch_tanh"},
        **{"position_embedding_type": "rotary", "rope_coordinates": "index"},
    },
    "eva": {
        **{"pooling": "mean", "norm_after_pooling": True, "position_embedding_type": "learned+rotary"},
        **{"rope_coordinates": "scaled_index", "rope_grid_size": (2, 3)},
    },
    "windows": {"window_size": (2, 3), "global_attention_layers": [1]},
}


def encoder_shape(hidden_size: int, num_hidden_layers: int, intermediate_size: int) -> dict[str, int]:
    """Return configuration fields of a tiny encoder with two attention heads."""
    layers = {"num_hidden_layers": num_hidden_layers, "num_attention_heads": 2}
    return {"hidden_size": hidden_size, **layers, "intermediate_size": intermediate_size}


def small_config(variant: str = "plain", **overrides: Any) -> hf_vit.HfViTConfig:
    """Returns a configuration of a model with a few thousand weights."""
    return hf_vit.HfViTConfig(**{**SMALL, **VARIANTS[variant], **overrides})


def pixels(config: hf_vit.HfViTConfig, batch: int = 2, grid: tuple[int, int] | None = None) -> torch.Tensor:
    """Returns reproducible random images of `grid` (rows, columns) patches; the default is the size in `config`."""
    rows, columns = config.grid_size if grid is None else grid
    patch = to_pair(config.patch_size)
    generator = torch.Generator().manual_seed(batch + 10 * rows + 100 * columns)
    return torch.randn(batch, config.num_channels, rows * patch[0], columns * patch[1], generator=generator)


def save_model(model: HfViTPreTrainedModel, folder: Path, **options: Any) -> Path:
    """Save a model, and an image processor with the given options; return `folder`."""
    model.save_pretrained(folder)
    hf_vit.HfViTImageProcessor.for_model(model.config, **options).save_pretrained(folder)
    return folder


# Type of functions that return model arguments for a batch with a given number of images.
MakeBatch = Callable[[hf_vit.HfViTConfig, int], dict[str, Any]]


RAE = {**SMALL["reconstruction_config"], "latent_type": "rae", "num_latent_layers": 2}
del RAE["latent_channels"]


@dataclass(frozen=True)
class TrainingCase:
    """A model class with training data. If `accumulates` is False, gradient accumulation would change the result."""

    model_class: type[HfViTPreTrainedModel]
    make_batch: MakeBatch
    overrides: dict[str, Any] = field(default_factory=dict)
    accumulates: bool = True


def labeled(make_labels: Callable[[Generator, int, int], Tensor]) -> MakeBatch:
    """Returns a function that makes batches of images, with `make_labels(generator, batch, num_labels)` as targets."""

    def make_batch(config: hf_vit.HfViTConfig, batch: int) -> dict[str, Tensor]:
        labels = make_labels(torch.Generator().manual_seed(batch), batch, config.num_labels)
        return {"pixel_values": pixels(config, batch), "labels": labels}

    return make_batch


def class_numbers(generator: Generator, batch: int, num_labels: int) -> Tensor:
    return torch.randint(num_labels, (batch,), generator=generator)


def soft_labels(generator: Generator, batch: int, num_labels: int) -> Tensor:
    return torch.randn(batch, num_labels, generator=generator).softmax(dim=1)


def several_labels(generator: Generator, batch: int, num_labels: int) -> Tensor:
    return torch.rand(batch, num_labels, generator=generator).round()


def values(generator: Generator, batch: int, num_labels: int) -> Tensor:
    return torch.randn(batch, num_labels, generator=generator)


def semantic_maps(generator: Generator, batch: int, num_labels: int) -> Tensor:
    """Returns class maps. The number of ignored pixels differs per image; the last image has only ignored pixels."""
    labels = torch.randint(num_labels, (batch, 32, 32), generator=generator)
    for index in range(batch):
        labels[index, : index * 32 // (batch - 1)] = 255
    return labels


def depth_maps(generator: Generator, batch: int, num_labels: int) -> Tensor:
    """Returns depth maps. The number of invalid pixels differs per image; the last image has only invalid pixels."""
    depth = 1 + 8 * torch.rand(batch, 32, 32, generator=generator)
    for index in range(batch):
        depth[index, : index * 32 // (batch - 1)] = float("nan")
    return depth


def keypoints(generator: Generator, batch: int, num_labels: int) -> Tensor:
    """Returns keypoints. Some are unlabeled, some outside the image. The last image has no labeled keypoints."""
    places = 40 * torch.rand(batch, num_labels, 2, generator=generator) - 4
    visibility = torch.randint(3, (batch, num_labels, 1), generator=generator)
    visibility[-1] = 0
    return torch.cat((places, visibility), dim=2)


def masks_with_classes(config: hf_vit.HfViTConfig, batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return {
        "pixel_values": pixels(config, batch),
        "mask_labels": torch.rand(batch, 3, 32, 32, generator=generator).round(),
        "class_labels": torch.randint(config.num_labels, (batch, 3), generator=generator),
    }


def boxes(generator: Generator, count: int) -> Tensor:
    """Returns boxes (count, 4) inside the image as (cx, cy, w, h)."""
    sizes = 0.1 + 0.5 * torch.rand(count, 2, generator=generator)
    return torch.cat((sizes / 2 + (1 - sizes) * torch.rand(count, 2, generator=generator), sizes), dim=1)


def with_boxes(count_of: Callable[[int], int]) -> MakeBatch:
    """Returns a function that makes detection batches. The image with index i has `count_of(i)` objects."""

    def make_batch(config: hf_vit.HfViTConfig, batch: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(batch)
        labels = [
            {
                "class_labels": torch.randint(config.num_labels, (count,), generator=generator),
                "boxes": boxes(generator, count),
            }
            for count in map(count_of, range(batch))
        ]
        return {"pixel_values": pixels(config, batch), "labels": labels}

    return make_batch


objects = with_boxes(lambda number: number % 5)  # Images 0 and 5 have no objects.
objects_in_one_image = with_boxes(lambda number: 3 * (number == 5))  # Only image 5 has objects.


def images_alone(config: hf_vit.HfViTConfig, batch: int) -> dict[str, Tensor]:
    return {"pixel_values": pixels(config, batch)}


def with_noise(config: hf_vit.HfViTConfig, batch: int) -> dict[str, Tensor]:
    """Returns images and noise. The noise determines which patches are masked."""
    rows, columns = config.grid_size
    noise = torch.rand(batch, rows * columns, generator=torch.Generator().manual_seed(batch))
    return {"pixel_values": pixels(config, batch), "noise": noise}


def with_texts(config: hf_vit.HfViTConfig, batch: int) -> dict[str, Tensor]:
    """Returns images with texts of several lengths. Each text ends with an end token, followed by padding."""
    length, end = 8, 39
    texts = torch.randint(1, end, (batch, length), generator=torch.Generator().manual_seed(batch))
    ends = 2 + torch.arange(batch)[:, None] % (length - 2)  # (B, 1)
    shown = torch.arange(length) <= ends
    texts = texts.scatter(1, ends, end) * shown
    return {"pixel_values": pixels(config, batch), "input_ids": texts, "attention_mask": shown.long()}


def with_captions(config: hf_vit.HfViTConfig, batch: int) -> dict[str, Tensor]:
    """Returns images with captions of several lengths. The first and last tokens of a caption have no labels."""
    inputs = with_texts(config, batch)
    labels = inputs["input_ids"].where(inputs.pop("attention_mask").bool(), -100)
    labels[:, 0] = -100
    return {**inputs, "labels": labels}


def with_views(config: hf_vit.HfViTConfig, batch: int) -> dict[str, Tensor]:
    """Returns a batch of global views and local views (augmented crops) of images."""
    generator = torch.Generator().manual_seed(batch)
    sizes = {"pixel_values": config.image_size, "local_pixel_values": 2 * config.patch_size}
    return {
        name: torch.randn(batch, 2, config.num_channels, size, size, generator=generator)
        for name, size in sizes.items()
    }


def with_masked_views(config: hf_vit.HfViTConfig, batch: int) -> dict[str, Tensor]:
    """Returns views of images and teacher assignments. The first global view of each image has masked patches."""
    generator = torch.Generator().manual_seed(batch)
    masks = torch.zeros(batch, 2, config.grid_size[0] * config.grid_size[1], dtype=torch.bool)
    masks[:, 0, ::3] = True
    return {**with_views(config, batch), "bool_masked_pos": masks, "teacher_probs": assigned(generator, batch, 2)}


def assigned(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, DINO["num_prototypes"], generator=generator).softmax(dim=-1)


def padded(make_batch: MakeBatch) -> MakeBatch:
    """Returns a function that makes the batches of `make_batch` with padding masks. The padding differs per image."""

    def make_padded_batch(config: hf_vit.HfViTConfig, batch: int) -> dict[str, Any]:
        mask = torch.ones(batch, *config.grid_size, dtype=torch.bool)
        for index in range(batch):
            mask[index, mask.shape[1] - index % 3 :] = False
            mask[index, :, mask.shape[2] - index % 4 :] = False
        return {**make_batch(config, batch), "patch_attention_mask": mask}

    return make_padded_batch


class WithFixedPoints(hf_vit.HfViTForUniversalSegmentation):
    """Segmentation model whose loss samples masks at fixed points. Random points would differ between processes."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.training = False  # in evaluation mode, the loss uses fixed points
        return self


class WithFixedSlices(hf_vit.HfViTForJointEmbedding):
    """Joint-embedding model whose loss uses the same random projections in each step."""

    # Transformers requires the argument name `return_loss`.
    def forward(self, return_loss: bool = True, **inputs: Any) -> Any:
        torch.manual_seed(0)
        return super().forward(**inputs, return_loss=return_loss)


class Comparing(hf_vit.HfViTForZeroShotImageClassification):
    """Zero-shot classifier that always computes the loss, as if the data collator had passed `return_loss=True`."""

    def forward(self, **inputs: Any) -> Any:
        return super().forward(**inputs, return_loss=True)


DINO = {"objective": "dino", "projector_hidden_size": 16, "embedding_size": 8, "num_prototypes": 6}
# Test cases with several image sizes use rotary positions, because position tables are resampled in float32.
ROTARY = {"position_embedding_type": "rotary"}
DEFORMABLE = {"num_queries": 4, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_groups": 2}
QUERIES = {"decoder": "queries", "num_queries": 6, "num_layers": 1, "num_blocks": 2}
BERT = {name: value for name, value in SMALL_TEXT.items() if name != "eos_token_id"} | {"num_hidden_layers": 1}
BERT |= {"model_type": "bert", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIMMIM = {"use_mask_token": True, "masked_image_modeling_config": {"objective": "simmim"}}
# Functions that make padded batches, for heads whose loss depends on padding.
MAPS, DEPTHS, POINTS = (padded(labeled(targets)) for targets in (semantic_maps, depth_maps, keypoints))
AUXILIARY = {"head": "simple", "dice_weight": 1.0, "use_auxiliary_head": True}
BATCH_NORM = {**DEFORMABLE, "projector_norm": "batch"}


def case(model_class: type[HfViTPreTrainedModel], make_batch: MakeBatch, **overrides: Any) -> TrainingCase:
    return TrainingCase(model_class, make_batch, {**overrides, **ROTARY})


def whole(model_class: type[HfViTPreTrainedModel], make_batch: MakeBatch, **overrides: Any) -> TrainingCase:
    """Return a training case whose loss depends on how a batch is split, so it excludes gradient accumulation."""
    return TrainingCase(model_class, make_batch, {**overrides, **ROTARY}, accumulates=False)


def classify(targets: Callable[[Generator, int, int], Tensor], **overrides: Any) -> TrainingCase:
    return TrainingCase(hf_vit.HfViTForImageClassification, labeled(targets), overrides)


# Every model class that can be trained, with every type of target that it accepts.
TRAINING_CASES = {
    "class_numbers": classify(class_numbers),
    "soft_labels": classify(soft_labels, problem_type="single_label_classification"),
    "several_labels": classify(several_labels, problem_type="multi_label_classification"),
    "regression": classify(values, problem_type="regression"),
    "distillation_token": classify(class_numbers, use_distillation_token=True),
    "semantic": case(hf_vit.HfViTForSemanticSegmentation, MAPS, segmentation_config=AUXILIARY),
    "batch_norm": whole(hf_vit.HfViTForSemanticSegmentation, MAPS, segmentation_config={"head": "linear"}),
    "metric_depth": TrainingCase(hf_vit.HfViTForDepthEstimation, labeled(depth_maps)),
    "relative_depth": case(
        hf_vit.HfViTForDepthEstimation, DEPTHS, depth_config={"head": "conv", "depth_estimation_type": "relative"}
    ),
    "queries": case(hf_vit.HfViTForObjectDetection, padded(objects), detection_config=QUERIES),
    "queries_of_one_image": case(
        hf_vit.HfViTForObjectDetection, padded(objects_in_one_image), detection_config=QUERIES
    ),
    "deformable": case(hf_vit.HfViTForObjectDetection, padded(objects), detection_config=DEFORMABLE),
    "deformable_of_one_image": case(
        hf_vit.HfViTForObjectDetection, padded(objects_in_one_image), detection_config=DEFORMABLE
    ),
    "deformable_batch_norm": whole(hf_vit.HfViTForObjectDetection, padded(objects), detection_config=BATCH_NORM),
    "keypoints": case(hf_vit.HfViTForKeypointDetection, POINTS, keypoint_config={"head": "simple"}),
    "keypoints_instance_norm": case(hf_vit.HfViTForKeypointDetection, POINTS, keypoint_config={"norm": "instance"}),
    "keypoints_batch_norm": whole(hf_vit.HfViTForKeypointDetection, POINTS),
    "mae": case(hf_vit.HfViTForMaskedImageModeling, padded(with_noise)),
    "simmim": case(hf_vit.HfViTForMaskedImageModeling, padded(with_noise), **SIMMIM),
    "joint_embedding": whole(WithFixedSlices, with_views),
    "dino": whole(hf_vit.HfViTForJointEmbedding, with_masked_views, joint_embedding_config=DINO, use_mask_token=True),
    "representation_autoencoder": case(
        hf_vit.HfViTForImageReconstruction, padded(images_alone), reconstruction_config=RAE
    ),
    "sigmoid": whole(Comparing, padded(with_texts)),
    "softmax": whole(Comparing, padded(with_texts), contrastive_config={"loss": "softmax"}),
    "text_encoder": whole(Comparing, with_texts, text_config={"encoder_config": BERT}),
    "captions": case(hf_vit.HfViTForImageTextToText, padded(with_captions)),
    "universal": case(WithFixedPoints, padded(masks_with_classes)),
    "universal_mask": case(
        WithFixedPoints, padded(masks_with_classes), universal_segmentation_config={"head": "mask"}
    ),
}
