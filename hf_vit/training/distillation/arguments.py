"""Options of a training with a teacher."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import BaseImageProcessor

from ...model.pretrained import HfViTPreTrainedModel
from ...model.task_classification import HfViTForImageClassification
from .base import ALPHA, Distillation
from .methods import FeatureDistillation, TokenDistillation
from .open_teacher import open_classifier, open_encoder


TEMPERATURE = 3.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class DistillationArguments:
    """A teacher to learn from, beside the data."""

    teacher: str | None = field(
        default=None,
        metadata={"help": "Trained model to learn from too, of any library: a folder, or a name on the Hub."},
    )
    distillation_type: Literal["hard", "soft", "features"] | None = field(
        default=None,
        metadata={
            "help": "What to learn: its answers or its probabilities, by a distillation token (hard, soft: image "
            "classification alone), or its features. hard where that is possible, else features, by default."
        },
    )
    distillation_alpha: float | None = field(
        default=None, metadata={"help": f"Share of the teacher in the loss; {ALPHA} by default."}
    )
    distillation_temperature: float | None = field(
        default=None,
        metadata={"help": f"What soft divides the logits by, of student and teacher; {TEMPERATURE:g} by default."},
    )
    teacher_dtype: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None, metadata={"help": "Precision of the teacher; float32 by default."}
    )
    teacher_trust_remote_code: bool = field(
        default=False, metadata={"help": "Let code run that the teacher's folder or repository brings."}
    )

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value not in (None, False)]
        if self.teacher is None and given:
            raise ValueError(f"--{given[0]} needs a teacher: --teacher path/to/model, or a name on the Hub.")
        if self.distillation_alpha is not None and not 0 < self.distillation_alpha <= 1:
            raise ValueError(
                f"distillation_alpha={self.distillation_alpha} must lie in (0, 1]: it is the teacher's share in the "
                "loss. Without --teacher there is none."
            )
        if self.distillation_temperature is not None and self.distillation_type != "soft":
            raise ValueError("--distillation_temperature is of --distillation_type soft. Leave it out, or say that.")
        if self.distillation_temperature is not None and not self.distillation_temperature > 0:
            raise ValueError(f"distillation_temperature={self.distillation_temperature} must be positive.")

    @property
    def uses_token(self) -> bool:
        """Whether a student of images' classes learns by a distillation token."""
        return self.teacher is not None and self.distillation_type != "features"


def make_distillation(
    args: DistillationArguments, student: HfViTPreTrainedModel, processor: BaseImageProcessor
) -> Distillation | None:
    """Opens the teacher of a training and returns how it is learned from; None if there is none.

    Args:
        args: Which teacher, and how to learn from it.
        student: The model to train.
        processor: Its image processor.

    Raises:
        OSError: if there is no such teacher, or it has no image processor.
        ValueError: if it cannot teach this student.
    """
    if args.teacher is None:
        return None
    is_classifier = isinstance(student, HfViTForImageClassification)
    kind = args.distillation_type or ("hard" if is_classifier else "features")
    alpha = ALPHA if args.distillation_alpha is None else args.distillation_alpha
    dtype = DTYPES[args.teacher_dtype or "float32"]
    if kind == "features":
        encoder = open_encoder(args.teacher, student, processor, dtype, args.teacher_trust_remote_code)
        return FeatureDistillation(encoder, student, alpha)
    if not is_classifier:
        raise ValueError(
            f"--distillation_type {kind} needs a distillation token, which {type(student).__name__} has no head for. "
            "Say --distillation_type features."
        )
    if not student.config.use_distillation_token:
        raise ValueError(
            f"--distillation_type {kind} needs a distillation token. Leave use_distillation_token out of "
            "--config_overrides, or say --distillation_type features."
        )
    teacher, order = open_classifier(args.teacher, student, processor, dtype, args.teacher_trust_remote_code)
    temperature = args.distillation_temperature or TEMPERATURE
    return TokenDistillation(teacher, order, alpha, temperature if kind == "soft" else None)
