"""Options of distillation."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from transformers import PreTrainedModel

from ...model.task_image_classification import HfViTForImageClassification
from ...options.field import POSITIVE, SHARE, option
from ...options.resolve import Options


ALPHA = 0.5  # default weight of the teacher's losses
TEMPERATURE = 3.0
teacher_option = partial(option, group="Teacher")


@dataclass
class DistillationArguments(Options):
    """Options of distillation."""

    teacher: str | None = teacher_option(
        None,
        "Trained model of any library from which the model also learns: a folder, or a name on the Hub.",
        conflicts={"cached_views": "the teacher needs the images"},
    )
    distillation_type: Literal["hard", "soft", "features"] | None = teacher_option(
        None,
        "Targets from the teacher: predicted classes (hard) or probabilities (soft), both with a distillation "
        "token and for image classification only; or features. By default hard for classifiers, else features.",
    )
    distillation_alpha: float | None = teacher_option(
        None, f"Weight of the targets from the teacher in the loss; {ALPHA} by default.", SHARE
    )
    distillation_temperature: float | None = teacher_option(
        None,
        f"Temperature that divides all logits, for --distillation_type soft; {TEMPERATURE:g} by default.",
        POSITIVE,
    )
    teacher_dtype: Literal["float32", "bfloat16", "float16"] | None = teacher_option(
        None, "Precision of the teacher; float32 by default."
    )
    teacher_trust_remote_code: bool = teacher_option(
        False, "Allow running code from the teacher's folder or repository."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name, value in vars(self).items() if value not in (None, False)]
        if self.teacher is None and given:
            raise ValueError(f"--{given[0]} requires a teacher. Set --teacher to a path, or to a name on the Hub.")
        if self.distillation_temperature is not None and self.distillation_type != "soft":
            raise ValueError(
                "--distillation_temperature requires --distillation_type soft. Set it, or remove this option."
            )

    @property
    def uses_token(self) -> bool:
        """Whether a classifier is trained with a distillation token."""
        return self.teacher is not None and self.distillation_type != "features"

    def kind(self, student_class: type[PreTrainedModel]) -> str:
        """Return `distillation_type`, or its default for a student class."""
        is_classifier = issubclass(student_class, HfViTForImageClassification)
        return self.distillation_type or ("hard" if is_classifier else "features")
