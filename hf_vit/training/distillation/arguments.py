"""Options of a training with a teacher."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from transformers import BaseImageProcessor, PreTrainedModel

from ...model.pretrained import HfViTPreTrainedModel
from ...model.task_image_classification import HfViTForImageClassification
from ...options.field import POSITIVE, SHARE, option
from ...options.resolve import Options
from .base import ALPHA, Distillation
from .methods import FeatureDistillation, TokenDistillation
from .open_teacher import match_classes, names_of, open_teacher, with_view


TEMPERATURE = 3.0


teacher_option = partial(option, group="Teacher")


@dataclass
class DistillationArguments(Options):
    """A teacher to learn from, beside the data."""

    teacher: str | None = teacher_option(
        None, "Trained model to learn from too, of any library: a folder, or a name on the Hub."
    )
    distillation_type: Literal["hard", "soft", "features"] | None = teacher_option(
        None,
        "What to learn: its answers or its probabilities, by a distillation token (hard, soft: image "
        "classification alone), or its features. hard where that is possible, else features, by default.",
    )
    distillation_alpha: float | None = teacher_option(
        None, f"Share of the teacher in the loss; {ALPHA} by default.", SHARE
    )
    distillation_temperature: float | None = teacher_option(
        None, f"What soft divides the logits by, of student and teacher; {TEMPERATURE:g} by default.", POSITIVE
    )
    teacher_dtype: Literal["float32", "bfloat16", "float16"] | None = teacher_option(
        None, "Precision of the teacher; float32 by default."
    )
    teacher_trust_remote_code: bool = teacher_option(
        False, "Let code run that the teacher's folder or repository brings."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name, value in vars(self).items() if value not in (None, False)]
        if self.teacher is None and given:
            raise ValueError(f"--{given[0]} needs a teacher: --teacher path/to/model, or a name on the Hub.")
        if self.distillation_temperature is not None and self.distillation_type != "soft":
            raise ValueError("--distillation_temperature is of --distillation_type soft. Leave it out, or say that.")

    @property
    def uses_token(self) -> bool:
        """Whether a student of images' classes learns by a distillation token."""
        return self.teacher is not None and self.distillation_type != "features"

    def kind(self, student_class: type[PreTrainedModel]) -> str:
        """Returns `distillation_type`, or its default for students of a class."""
        is_classifier = issubclass(student_class, HfViTForImageClassification)
        return self.distillation_type or ("hard" if is_classifier else "features")


def load_teacher(args: DistillationArguments, student_class: type[PreTrainedModel]) -> PreTrainedModel | None:
    """Opens the teacher of a training, before its student and the data are; None if there is none.

    Args:
        args: Which teacher, and how to learn from it.
        student_class: The class of the model to train.

    Raises:
        OSError: if there is no such teacher.
        ValueError: if it has not learned what is to be taught, or such a student cannot learn it.
    """
    if args.teacher is None:
        return None
    is_classifier = (kind := args.kind(student_class)) != "features"
    if is_classifier and not issubclass(student_class, HfViTForImageClassification):
        raise ValueError(
            f"--distillation_type {kind} needs a distillation token, which {student_class.__name__} has no head "
            "for. Say --distillation_type features."
        )
    dtype = getattr(torch, args.teacher_dtype or "float32")
    return open_teacher(args.teacher, is_classifier, dtype, args.teacher_trust_remote_code)


def make_distillation(
    args: DistillationArguments,
    student: HfViTPreTrainedModel,
    processor: BaseImageProcessor,
    teacher: PreTrainedModel | None,
) -> Distillation | None:
    """Returns how the teacher of a training is learned from; None if there is none.

    Args:
        args: Which teacher, and how to learn from it.
        student: The model to train.
        processor: Its image processor.
        teacher: The teacher, as `load_teacher` has opened it.

    Raises:
        OSError: if it has no image processor.
        ValueError: if it cannot teach this student.
    """
    if args.teacher is None or teacher is None:
        return None
    kind, alpha = args.kind(type(student)), ALPHA if args.distillation_alpha is None else args.distillation_alpha
    if kind != "features" and not student.config.use_distillation_token:
        raise ValueError(
            f"--distillation_type {kind} needs a distillation token. Leave use_distillation_token out of "
            "--config_overrides, or say --distillation_type features."
        )
    seeing = with_view(args.teacher, teacher, student, processor, args.teacher_trust_remote_code)
    if kind == "features":
        return FeatureDistillation(seeing, student, alpha)
    order = match_classes(names_of(teacher), names_of(student), args.teacher)
    temperature = args.distillation_temperature or TEMPERATURE
    return TokenDistillation(seeing, order, alpha, temperature if kind == "soft" else None)
