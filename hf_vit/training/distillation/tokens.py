"""Learning of a teacher's answers by a distillation token."""

from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from ...model.pretrained import HfViTPreTrainedModel
from ...model.task_classification import classification_loss
from .base import ALPHA, Distillation, hard_loss, soft_loss
from .teacher import Teacher


class TokenDistillation(Distillation):
    """Learning of a teacher's answers by a distillation token, which has a head of its own.

    The head on the pooled image learns the labels; used later is the mean of both. Source: DeiT,
    https://arxiv.org/abs/2012.12877.
    """

    def __init__(
        self, teacher: Teacher, order: list[int], alpha: float = ALPHA, temperature: float | None = None
    ) -> None:
        """Begins.

        Args:
            teacher: A classifier.
            order: The number that it gives to each of the student's classes.
            alpha: Share of the teacher in the loss.
            temperature: That of soft distillation; None learns its answers alone.
        """
        super().__init__(teacher, alpha)
        self.order = order
        self.temperature = temperature

    def losses(
        self, student: HfViTPreTrainedModel, inputs: dict[str, Any], outputs: ModelOutput
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of the labels, and that of the teacher's answers."""
        own = classification_loss(outputs.cls_logits, inputs["labels"], student.config.problem_type)
        logits, theirs = outputs.distillation_logits, self.teacher.logits(inputs["pixel_values"])[:, self.order]
        if self.temperature is None:
            return own, {"hard": hard_loss(logits, theirs)}
        return own, {"soft": soft_loss(logits, theirs, self.temperature)}

    def describe(self) -> str:
        """Says what is learned, and how."""
        kind = "hard" if self.temperature is None else f"soft, temperature {self.temperature:g}"
        return f"token, {kind}"
