"""How a student learns from its teacher: by the answers to a distillation token, or by features, for any task.

Shapes: B batch, L tokens, D width of the student, D' that of the teacher, h w patch grid.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ...model.configuration_hf_vit import to_pair
from ...model.layers import at_least_float32
from ...model.modeling_hf_vit import HfViTModel
from ...model.pretrained import HfViTPreTrainedModel
from ...model.task_image_classification import classification_loss
from .base import ALPHA, Distillation, Projection, cosine_loss, hard_loss, resample_patches, soft_loss
from .teacher import Teacher


class TokenDistillation(Distillation):
    """Distillation of a teacher's answers by a distillation token, which has a head of its own.

    The head on the pooled image learns the labels; used later is the mean of both. Source: DeiT,
    https://arxiv.org/abs/2012.12877.

    Args:
        teacher: A classifier.
        order: The number that it gives to each of the student's classes.
        alpha: Share of the teacher in the loss.
        temperature: That of soft distillation; None distills its answers alone.
    """

    def __init__(
        self, teacher: Teacher, order: list[int], alpha: float = ALPHA, temperature: float | None = None
    ) -> None:
        super().__init__(teacher, alpha)
        self.order = order
        self.temperature = temperature
        self.description = "token, hard" if temperature is None else f"token, soft, temperature {temperature:g}"

    def losses(
        self, student: HfViTPreTrainedModel, inputs: dict[str, Any], outputs: ModelOutput
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of the labels, and that of the teacher's answers."""
        own = classification_loss(outputs.cls_logits, inputs["labels"], student.config.problem_type)
        logits, theirs = outputs.distillation_logits, self.teacher.logits(inputs["pixel_values"])[:, self.order]
        if self.temperature is None:
            return own, {"hard": hard_loss(logits, theirs)}
        return own, {"soft": soft_loss(logits, theirs, self.temperature)}


class FeatureDistillation(Distillation):
    """Distillation of features: 1 - cosine of the patches and, where both have one, of the CLS tokens.

    The student's last tokens go through a linear layer where they have another width; the teacher's patches are
    resampled to the student's grid. Where images are padded, the padding does not count.

    Args:
        teacher: An encoder. How wide its tokens are, an image of the student's size tells.
        student: The model that will learn.
        alpha: Share of the teacher in the loss.

    Raises:
        ValueError: if it is not known where the teacher's patches are.
    """

    def __init__(self, teacher: Teacher, student: HfViTPreTrainedModel, alpha: float = ALPHA) -> None:
        super().__init__(teacher, alpha)
        config = student.config
        image = torch.zeros(1, config.num_channels, *to_pair(config.image_size), device=teacher.model.device)
        width = teacher.features(image).patches.shape[1]
        self.description = "features"
        if width != config.hidden_size:
            self.projection = Projection(config.hidden_size, width)
            self.description += " through a linear layer"
        self._encoded: Tensor | None = None

    @contextmanager
    def attached(self, student: HfViTPreTrainedModel) -> Iterator[None]:
        """Lets a student learn from the teacher, and keeps the tokens of its encoder, as long as this lasts."""
        hook = student.model.register_forward_hook(self._keep)
        try:
            with super().attached(student):
                yield
        finally:
            hook.remove()
            self._encoded = None

    def _keep(self, model: HfViTModel, _: tuple[Any, ...], outputs: ModelOutput) -> None:
        if model.training:  # else nobody takes them, and they would keep their memory
            self._encoded = outputs.last_hidden_state

    def losses(
        self, student: HfViTPreTrainedModel, inputs: dict[str, Any], outputs: ModelOutput
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the student's own loss, and those of patches and CLS token."""
        # (B, L, D'), prefix and patches first. Models with queries return them, as their heads run the blocks.
        tokens = outputs.get("last_hidden_state", self._encoded)
        self._encoded = None
        assert tokens is not None
        tokens = at_least_float32(tokens)
        if self.projection is not None:
            tokens = self.projection(tokens)
        grid = student.model.embeddings.patch_embeddings.grid(inputs["pixel_values"])
        theirs = self.teacher.features(inputs["pixel_values"])
        num_prefix, num_patches = student.config.num_prefix_tokens, grid[0] * grid[1]
        patches = tokens[:, num_prefix : num_prefix + num_patches]  # (B, h·w, D')
        targets = resample_patches(theirs.patches, grid).flatten(2).transpose(1, 2)  # (B, h·w, D')
        mask = inputs.get("patch_attention_mask")
        visible = None if mask is None else mask.flatten(1).bool()
        parts = {"patch_feature": cosine_loss(patches, targets, visible)}
        if theirs.cls is not None and student.config.use_cls_token:
            parts["cls_feature"] = cosine_loss(tokens[:, :1], theirs.cls[:, None])
        return outputs.loss, parts
