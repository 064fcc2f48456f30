"""What trainings can be told against learning by heart."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from ..data.augmentation_inputs import check_probabilities


@dataclass
class RepeatedAugmentationArguments:
    """What all trainings can be told about the images of a step."""

    repeated_augmentations: int = field(
        default=1,
        metadata={
            "help": "How many augmentations of an image each step learns from (DeiT III: 3). An epoch keeps its "
            "length, with fewer images."
        },
    )

    def check_repeated_augmentations(self) -> None:
        """Raises `ValueError` if it is no number of augmentations."""
        if self.repeated_augmentations < 1:
            raise ValueError(
                f"repeated_augmentations={self.repeated_augmentations} must be at least 1, which takes every image "
                "once in an epoch."
            )


@dataclass
class RegularisationArguments:
    """How the batches of a classifier are changed on its device, and by which loss it learns."""

    mixup_alpha: float = field(
        default=0.0,
        metadata={"help": "Blend images with one another, by shares from beta(alpha, alpha) (DeiT: 0.8); 0 does not."},
    )
    cutmix_alpha: float = field(
        default=0.0,
        metadata={"help": "Put rectangles of images into one another, by such shares (DeiT: 1); 0 does not."},
    )
    mixing_probability: float = field(default=1.0, metadata={"help": "Share of the batches that are mixed."})
    mixing_off_share: float = field(
        default=0.0, metadata={"help": "Share of the training at its end in which none is: 0.1 for the last tenth."}
    )
    classification_loss: Literal["cross_entropy", "bce"] = field(
        default="cross_entropy",
        metadata={"help": "cross_entropy, or bce, which asks of each class by itself (DeiT III). Scores stay as is."},
    )
    bce_target_threshold: float | None = field(
        default=None,
        metadata={"help": "Labels above it count as 1 for bce, others as 0; 0 makes all classes of a mixture 1."},
    )
    token_drop_rate: float = field(
        default=0.0, metadata={"help": "Share of the patches of each training image that the blocks never see."}
    )

    def __post_init__(self) -> None:
        """Checks what can be checked without the model."""
        if not min(self.mixup_alpha, self.cutmix_alpha) >= 0:
            raise ValueError(
                f"mixup_alpha={self.mixup_alpha} and cutmix_alpha={self.cutmix_alpha} must not be negative; 0 is off."
            )
        check_probabilities(mixing_probability=self.mixing_probability, mixing_off_share=self.mixing_off_share)
        if not 0 <= self.token_drop_rate < 1:
            raise ValueError(f"token_drop_rate={self.token_drop_rate} must lie in [0, 1); 0 keeps all patches.")
        if self.bce_target_threshold is None:
            return
        if self.classification_loss != "bce":
            raise ValueError(
                f"bce_target_threshold={self.bce_target_threshold} is of --classification_loss bce. Say that, or "
                "leave it out."
            )
        if not 0 <= self.bce_target_threshold < 1:
            raise ValueError(
                f"bce_target_threshold={self.bce_target_threshold} must lie in [0, 1), as labels do; 0 is that of "
                "DeiT III."
            )

    @property
    def needs_soft_labels(self) -> bool:
        """Whether labels become probabilities."""
        return bool(self.mixup_alpha or self.cutmix_alpha) or self.classification_loss == "bce"

    def describe(self) -> dict[str, str]:
        """Says what a card shall say: what differs from the defaults."""
        defaults = asdict(RegularisationArguments())
        given = [f"{name} {value}" for name, value in asdict(self).items() if value != defaults[name]]
        return {"regularisation": ", ".join(given)} if given else {}
