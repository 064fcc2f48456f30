"""Small teacher models of hf_vit and transformers."""

from collections.abc import Sequence
from pathlib import Path

from transformers import (
    BeitConfig,
    BeitForImageClassification,
    BeitImageProcessor,
    ConvNextImageProcessor,
    LevitConfig,
    LevitForImageClassification,
    PreTrainedConfig,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_vit import HfViTForImageClassification, HfViTImageProcessor, HfViTModel
from hf_vit.model.pretrained import HfViTPreTrainedModel
from hf_vit.training.distillation import Distillation, FeatureDistillation, TokenDistillation
from hf_vit.training.teacher import Teacher, TeacherPreprocessing

from .models import small_config
from .references import draw_weights


# Pairs of a case in `TRAINING_CASES` and a type of distillation. Some losses are means over images; others are
# normalized by the number of images or boxes in the whole training step.
DISTILLED_CASES = [
    ("distillation_token", "hard"),
    ("distillation_token", "soft"),
    ("semantic", "features"),
    ("queries", "features"),
    ("keypoints", "features"),
]
TEACHER_LOSSES = ("hard_loss", "soft_loss", "patch_feature_loss", "cls_feature_loss")
# The hidden size, patch size, grid and normalization of teachers differ from those of the students.
TEACHER_CONFIG = {"hidden_size": 16, "num_hidden_layers": 1, "image_size": 36, "patch_size": 6}
SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SQUARE = {"size": {"height": 48, "width": 48}}


def small_teacher(student: HfViTPreTrainedModel, kind: str) -> Teacher:
    config = small_config(**TEACHER_CONFIG)
    model = (HfViTModel if kind == "features" else HfViTForImageClassification)(config)
    draw_weights(model)
    processor = HfViTImageProcessor.for_model(config, image_mean=(0.4, 0.5, 0.6), image_std=0.3)
    return Teacher("small", model, TeacherPreprocessing(HfViTImageProcessor.for_model(student.config), processor, 3))


def small_distillation(kind: str, student: HfViTPreTrainedModel) -> Distillation:
    """Return the distillation module for a student model. Its linear projections have fixed weights."""
    teacher = small_teacher(student, kind)
    if kind == "features":
        distillation = FeatureDistillation(teacher, student)
        draw_weights(distillation.projection)
        return distillation
    order = list(reversed(range(student.config.num_labels)))
    return TokenDistillation(teacher, order, temperature=2.0 if kind == "soft" else None)


def save_teacher(kind: str, folder: Path, names: Sequence[str]) -> Path:
    """Save a small image classifier of hf_vit ("ours") or transformers with its image processor; return `folder`."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    if kind == "ours":
        config = small_config(**TEACHER_CONFIG, **labels, num_labels=len(names))
        model, processor = HfViTForImageClassification(config), HfViTImageProcessor.for_model(config)
    else:
        model_class, config, processor = theirs(kind, labels)
        model = model_class(config)
    draw_weights(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def theirs(kind: str, labels: dict) -> tuple[type, PreTrainedConfig, object]:
    """Return a model class of transformers, a configuration and an image processor."""
    match kind:
        case "vit":
            config = ViTConfig(**SHAPE, image_size=48, patch_size=8, **labels)
            return ViTForImageClassification, config, ViTImageProcessor(**SQUARE)
        case "beit":  # BEiT has a CLS token, and hf_vit cannot convert it
            config = BeitConfig(**SHAPE, image_size=48, patch_size=8, **labels)
            return BeitForImageClassification, config, BeitImageProcessor(**SQUARE, do_center_crop=False)
        case "swin":  # Swin has no CLS token, and its token grid is coarser than its patch grid
            config = SwinConfig(
                image_size=48, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=3, **labels
            )
            return SwinForImageClassification, config, ViTImageProcessor(**SQUARE)
        case "uneven_swin":  # its stages have grids of 10x10, 5x5 and 3x3 tokens
            config = SwinConfig(
                image_size=40, patch_size=4, embed_dim=4, depths=[1] * 3, num_heads=[1] * 3, window_size=3, **labels
            )
            return SwinForImageClassification, config, ViTImageProcessor(size={"height": 40, "width": 40})
        case "levit":  # its stages have grids of 7x7, 4x4 and 2x2 tokens
            widths = {"hidden_sizes": [16] * 3, "key_dim": [4] * 3, "num_attention_heads": [1] * 3}
            config = LevitConfig(image_size=112, depths=[1] * 3, **widths, **labels)
            return LevitForImageClassification, config, ViTImageProcessor(size={"height": 112, "width": 112})
        case _:  # "resnet": it returns a feature map and has no CLS token
            config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", **labels)
            return ResNetForImageClassification, config, ConvNextImageProcessor(size={"shortest_edge": 32})
