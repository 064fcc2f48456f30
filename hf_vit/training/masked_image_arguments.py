"""What the script of masked image modelling can be told beside what all training scripts can."""

from dataclasses import dataclass, field
from typing import Any

from .arguments import LIBRARY, TrainedImagesArguments
from .pool_arguments import POOL, PoolArguments
from .scored_arguments import ScoredTrainingArguments, TaskModelArguments, best_by
from .stream_arguments import StreamArguments


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
        default=None, metadata={"help": "Whether mae predicts normalised patches; true unless said."}
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
class UnlabelledDataArguments(TrainedImagesArguments, PoolArguments, StreamArguments):
    """Which images to learn from."""

    dataset_name: str = field(default="", metadata=POOL)
    max_knn_samples: int = field(
        default=5000,
        metadata={
            "help": "Training images among which neighbours are looked for, where labels are known; 0 for none."
        },
    )

    def __post_init__(self) -> None:
        """Checks what can be checked without the data."""
        super().__post_init__()
        if self.max_knn_samples < 0:
            raise ValueError(f"max_knn_samples={self.max_knn_samples} must be 0 or more.")
        self.check_stream(self.max_train_samples)


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
