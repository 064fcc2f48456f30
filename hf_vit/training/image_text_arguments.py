"""What the scripts of image-text contrast can be told beside what all scripts can."""

import json
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ..configuration_hf_vit import HfViTConfig
from ..presets_hf_vit import PRESETS
from .arguments import LIBRARY, DataArguments, ImageDataArguments, TrainedImagesArguments
from .scored_arguments import ScoredTrainingArguments, TaskModelArguments, best_by


@dataclass
class ImageTextModelArguments(TaskModelArguments):
    """Which model to train: a tower that sees and a tower that reads."""

    task_config = "contrastive_config"
    task_options = ("loss",)

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Model to start from: any saved or published ViT, which gets a text tower, or one that has one "
            "(saved by this script, CLIP, SigLIP) with its tokenizer."
        },
    )
    text_model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Text encoder of the library to start from, with its tokenizer: a folder, or a Hub name."},
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={
            "help": "Tokenizer for a fresh text tower: a folder, or a Hub name. Unless said, one is trained on the "
            "captions."
        },
    )
    vocab_size: int | None = field(
        default=None, metadata={"help": "Number of tokens, at most, of a tokenizer that is trained; 8192 unless said."}
    )
    max_text_length: int | None = field(
        default=None,
        metadata={"help": "Tokens after which texts are cut off; 64, or what the saved model has, unless said."},
    )
    text_preset: str | None = field(
        default=None,
        metadata={"help": "Size of a fresh text tower, as --preset; the same, or small, unless said."},
    )
    loss: str | None = field(
        default=None,
        metadata={"help": "sigmoid (SigLIP) or softmax (CLIP); sigmoid, or that of the saved model, unless said."},
    )
    freeze_vision: bool = field(
        default=False,
        metadata={"help": "Keep the image tower of the saved model as it is; only the text learns to fit it (LiT)."},
    )

    def __post_init__(self) -> None:
        """Checks that the options go together."""
        super().__post_init__()
        if self.freeze_vision and self.model_name_or_path is None:
            raise ValueError("--freeze_vision would keep a tower that has learned nothing. Give --model_name_or_path.")
        if self.text_preset is not None and self.text_preset not in PRESETS:
            raise ValueError(f"text_preset={self.text_preset!r} is unknown. Choose one of {', '.join(PRESETS)}.")
        self.refuse_beside("text_model_name_or_path", "tokenizer_name", "vocab_size", "text_preset")
        self.refuse_beside("tokenizer_name", "vocab_size")

    def refuse_beside(self, source: str, *options: str) -> None:
        """Raises `ValueError` if one of `options` is given beside a `source` of tokens that settles it."""
        given = [f"--{name} {vars(self)[name]}" for name in options if vars(self)[name] is not None]
        if vars(self)[source] is not None and given:
            raise ValueError(
                f"--{source} {vars(self)[source]} has its own tokens and weights. Leave out {', '.join(given)}."
            )

    def text_size(self) -> dict[str, Any]:
        """Returns the options of `HfViTTextConfig` that say how large a fresh text tower is."""
        size = HfViTConfig.from_preset(self.text_preset or self.preset or "small").to_dict()
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        return {name: size[name] for name in names}

    def with_text(self, options: dict[str, Any]) -> Self:
        """Returns the same with options of the text tower, before which those go that the user has given."""
        self.overrides()  # refuses what is no JSON
        fields = json.loads(self.config_overrides or "{}")
        text = {**options, **(fields.get("text_config") or {})}
        return replace(self, config_overrides=json.dumps({**fields, "text_config": text}))


@dataclass
class ImageTextImagesArguments(ImageDataArguments):
    """Which images and captions to score on."""

    dataset_name: str = field(
        default="",
        metadata={
            "help": "Folder with metadata.jsonl, table of paths and captions, parquet files with a column of "
            "captions, or a Hub name."
        },
    )
    caption_column_name: str | None = field(
        default=None, metadata={"help": "Column of a caption or a list of them, where it is not clear by itself."}
    )

    def source_options(self) -> dict[str, Any]:
        """Returns the same, with the column of captions."""
        return {**super().source_options(), "caption_column_name": self.caption_column_name}


@dataclass
class ImageTextDataArguments(ImageTextImagesArguments, TrainedImagesArguments):
    """Which images and captions to train on."""


@dataclass
class ZeroShotArguments:
    """On which labelled images to score classes by their names, after all is trained."""

    zero_shot_dataset: str | None = field(
        default=None, metadata={"help": "Labelled images, any that classifiers train on: a path, or a Hub name."}
    )
    zero_shot_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of such a dataset on the Hub."}
    )
    zero_shot_label_column_name: str | None = field(
        default=None, metadata={"help": "Column of its labels, where it is not clear by itself."}
    )
    zero_shot_split: str | None = field(
        default=None, metadata={"help": "Its split: test, else validation, else train, unless said."}
    )
    prompt_templates: list[str] = field(
        default_factory=lambda: ["a photo of a {}."],
        metadata={"help": "Texts with {} for the name of a class; several are averaged."},
    )

    def __post_init__(self) -> None:
        """Checks what can be checked without the data."""
        if wrong := [template for template in self.prompt_templates if template.count("{}") != 1]:
            raise ValueError(
                f"prompt_templates has {', '.join(map(repr, wrong))}, but each needs one {{}} for the name of a class."
            )

    def data_arguments(self, captions: ImageDataArguments) -> DataArguments | None:
        """Returns where the labelled images are, if any; they are checked and limited as those with captions."""
        if self.zero_shot_dataset is None:
            return None
        return DataArguments(
            dataset_name=self.zero_shot_dataset,
            dataset_config_name=self.zero_shot_config_name,
            label_column_name=self.zero_shot_label_column_name,
            skip_unreadable=captions.skip_unreadable,
            check_images=captions.check_images,
            max_eval_samples=captions.max_eval_samples,
        )


@dataclass
class ImageTextAugmentationArguments:
    """How training images are changed at random, in this order."""

    min_crop_scale: float = field(
        default=0.5, metadata={"help": "Least share of the area that a random resized crop keeps; 1 takes all of it."}
    )
    horizontal_flip: float = field(
        default=0.5, metadata={"help": "Probability of a mirror image; 0 where captions tell left from right."}
    )


@dataclass
class ImageTextTrainingArguments(ScoredTrainingArguments):
    """The library's arguments, with the optimizer of CLIP (https://arxiv.org/abs/2103.00020)."""

    learning_rate: float = field(default=5e-4, metadata=LIBRARY["learning_rate"].metadata)
    weight_decay: float = field(default=0.2, metadata=LIBRARY["weight_decay"].metadata)
    adam_beta2: float = field(default=0.98, metadata=LIBRARY["adam_beta2"].metadata)
    per_device_train_batch_size: int = field(
        default=64,
        metadata={"help": "Pairs of a process in a batch. The loss compares all with all of the other processes too."},
    )
    per_device_eval_batch_size: int = field(default=64, metadata=LIBRARY["per_device_eval_batch_size"].metadata)
    gradient_accumulation_steps: int = field(
        default=1,
        metadata={
            "help": "Batches before each step. The loss compares what is in one batch, so 4 batches of 16 pairs are "
            "NOT one of 64, which has 16 times as many comparisons. For a larger batch take more processes, or "
            "--gradient_checkpointing."
        },
    )
    metric_for_best_model: str | None = best_by("mean_recall")

    def __post_init__(self) -> None:
        """An incomplete batch would be filled up on several processes, maybe with images that are in it."""
        super().__post_init__()
        if self.repeated_augmentations > 1:
            raise ValueError(
                f"repeated_augmentations={self.repeated_augmentations} brings an image into a batch several times, "
                "which the loss would take for different ones. Leave it out."
            )
        if not self.dataloader_drop_last:
            raise ValueError(
                "dataloader_drop_last=False could bring an image into a batch twice, which the loss would take for "
                "two different ones. Leave it out; all images come, in another order, in the next epoch."
            )
