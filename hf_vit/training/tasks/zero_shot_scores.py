"""Evaluation of models of images and texts on labeled images, by the names of their classes.

Shapes: B images, C channels, H W pixels, K classes, E width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import Dataset, DatasetDict
from torch import Tensor, nn
from transformers import EvalPrediction

from ...data import ImageClassificationCollator, unreadable_images
from ...evaluation.classification import image_classification_metrics
from ...extras import check_packages
from ...model.processing_hf_vit import HfViTProcessor
from ...model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification
from ...options.field import option
from ..arguments import ClassificationDataArguments, HfViTTrainingArguments, ImageDataArguments
from ..load_data import evaluation_images, open_splits
from ..publishing.report import evaluation_split, public_name, write_scores
from ..trainer import HfViTTrainer


@dataclass(frozen=True)
class ZeroShotImages:
    """Labeled images, on whose classes a model has not been trained."""

    source: str  # where they are from
    split: str
    images: Dataset  # columns `image`, `label` and `file`
    templates: list[str]  # texts with {} for the name of a class

    @property
    def names(self) -> list[str]:
        """The names of the classes."""
        names: list[str] = self.images.features["label"].names
        return names

    def describe(self, scores: dict[str, float]) -> str:
        """Returns the scores of a model in one line."""
        return (
            f"accuracy {scores['accuracy']:.4f} on {len(self.images):,} {self.split} images of "
            f"{public_name(self.source)} (chance {1 / len(self.names):.4f}), by {', '.join(map(repr, self.templates))}"
        )


@dataclass
class ZeroShotArguments:
    """On which labeled images to evaluate classes by their names, after the training."""

    zero_shot_dataset: str | None = option(
        default=None,
        help="Labeled images, any that classifiers train on: a path, or a Hub name.",
        group="Evaluation",
        essential=True,
        resume="free",
    )
    zero_shot_config_name: str | None = option(
        default=None, help="Configuration of such a dataset on the Hub.", group="Evaluation", resume="free"
    )
    zero_shot_label_column_name: str | None = option(
        default=None, help="Column of its labels, where it is not clear by itself.", group="Evaluation", resume="free"
    )
    zero_shot_split: str | None = option(
        default=None,
        help="Its split: test, else validation, else train, by default.",
        group="Evaluation",
        resume="free",
    )
    prompt_templates: list[str] = option(
        default_factory=lambda: ["a photo of a {}."],
        help="Texts with {} for the name of a class; several are averaged.",
        group="Evaluation",
        essential=True,
    )

    def __post_init__(self) -> None:
        if wrong := [template for template in self.prompt_templates if template.count("{}") != 1]:
            raise ValueError(
                f"prompt_templates has {', '.join(map(repr, wrong))}, but each needs one {{}} for the name of a class."
            )


def load_zero_shot(
    args: ZeroShotArguments, captions: ImageDataArguments, training_args: HfViTTrainingArguments
) -> ZeroShotImages | None:
    """Opens the labeled images, if any are asked for, checked and limited as those with captions.

    Raises `ValueError` if there is no such split.
    """
    if args.zero_shot_dataset is None:
        return None
    check_packages("The zero-shot evaluation", "sklearn")
    data = ClassificationDataArguments(
        dataset_name=args.zero_shot_dataset,
        dataset_config_name=args.zero_shot_config_name,
        label_column_name=args.zero_shot_label_column_name,
        skip_unreadable=captions.skip_unreadable,
        check_images=captions.check_images,
        max_eval_samples=captions.max_eval_samples,
    )
    splits: DatasetDict = open_splits(data, training_args)
    split = args.zero_shot_split or evaluation_split(splits)
    if split not in splits:
        raise ValueError(f"{data.dataset_name} has no split {split!r}. Choose {' or '.join(splits)}.")
    images = evaluation_images(splits[split], split, split, data, training_args, unreadable_images)
    return ZeroShotImages(data.dataset_name, split, images, args.prompt_templates)


class ZeroShotClassifier(nn.Module):
    """A classifier whose weights are a model's embeddings of the names of classes."""

    class_embeds: Tensor

    def __init__(self, model: HfViTForZeroShotImageClassification, class_embeds: Tensor) -> None:
        """Makes a classifier of a model and its embeddings of K classes, (K, E) of length 1."""
        super().__init__()
        self.model = model
        self.register_buffer("class_embeds", class_embeds)

    def forward(
        self, pixel_values: Tensor, labels: Tensor, patch_attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns `logits` (B, K) of images (B, C, H, W) and, with their `labels` (B,), the `loss`."""
        features = self.model.get_image_features(pixel_values, patch_attention_mask).pooler_output
        scale = self.model.contrastive_head.logit_scale.exp()
        logits = F.normalize(features, dim=-1) @ self.class_embeds.T * scale  # (B, K)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@torch.no_grad()
def embed_classes(
    model: HfViTForZeroShotImageClassification,
    processor: HfViTProcessor,
    names: Sequence[str],
    templates: Sequence[str],
) -> Tensor:
    """Returns embeddings of K classes, (K, E) of length 1: the mean over the templates, as CLIP does."""
    rows = []
    for name in names:
        texts = [template.replace("{}", name.replace("_", " ")) for template in templates]
        tokens = processor(text=texts, return_tensors="pt").to(model.device)
        features = model.get_text_features(**tokens).pooler_output
        rows.append(F.normalize(F.normalize(features, dim=-1).mean(dim=0), dim=-1))
    return torch.stack(rows)


def evaluate_zero_shot(
    model: HfViTForZeroShotImageClassification,
    processor: HfViTProcessor,
    labeled: ZeroShotImages,
    args: HfViTTrainingArguments,
) -> dict[str, float]:
    """Returns the scores on labeled images, on all processes; writes the files of `write_scores` as `zero_shot_…`."""
    class_embeds = embed_classes(model.eval(), processor, labeled.names, labeled.templates)
    trainer = HfViTTrainer(
        model=ZeroShotClassifier(model, class_embeds),
        args=args,
        eval_dataset=labeled.images,  # the arguments of a training may ask for some
        data_collator=ImageClassificationCollator(processor.image_processor),
    )
    output = trainer.predict(labeled.images, metric_key_prefix="zero_shot")
    if not trainer.is_world_process_zero():
        return image_classification_metrics(EvalPrediction(output.predictions, output.label_ids))
    return write_scores(Path(args.output_dir), "zero_shot", output, labeled.names, labeled.images["file"])
