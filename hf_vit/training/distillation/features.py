"""Learning of a teacher's features, whatever the student is trained for.

Shapes: B batch, L tokens, D width of the student, D' that of the teacher, h w patch grid.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ...model.configuration_hf_vit import to_pair
from ...model.modeling_hf_vit import HfViTModel
from ...model.pretrained import HfViTPreTrainedModel
from .base import ALPHA, Distillation, Projection, cosine_loss, precise, resample_patches
from .teacher import Teacher


class FeatureDistillation(Distillation):
    """Learning of a teacher's features: 1 - cosine of the patches and, where both have one, of the CLS tokens.

    The student's last tokens go through a linear layer where they have another width; the teacher's patches are
    resampled to the student's grid. Where images are padded, the padding does not count.
    """

    def __init__(self, teacher: Teacher, student: HfViTPreTrainedModel, alpha: float = ALPHA) -> None:
        """Looks how wide the teacher's tokens are, on an image of the student's size.

        Args:
            teacher: An encoder.
            student: The model that will learn.
            alpha: Share of the teacher in the loss.

        Raises:
            ValueError: if it is not known where the teacher's patches are.
        """
        super().__init__(teacher, alpha)
        config = student.config
        image = torch.zeros(1, config.num_channels, *to_pair(config.image_size), device=teacher.model.device)
        width = teacher.features(image).patches.shape[1]
        if width != config.hidden_size:
            self.projection = Projection(config.hidden_size, width)
        self._encoded: Tensor | None = None

    @contextmanager
    def attached(self, student: HfViTPreTrainedModel) -> Iterator[None]:
        """The same, and keeps the tokens of its encoder."""
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
        tokens = self._student_tokens(outputs)
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

    def _student_tokens(self, outputs: ModelOutput) -> Tensor:
        """Returns the last tokens (B, L, D'), prefix and patches first.

        Models with queries return them, as their heads run the blocks; of all others the encoder does.
        """
        tokens = outputs.get("last_hidden_state", self._encoded)
        self._encoded = None
        assert tokens is not None
        tokens = precise(tokens)
        return tokens if self.projection is None else self.projection(tokens)

    def describe(self) -> str:
        """Says what is learned, and how."""
        return "features" if self.projection is None else "features through a linear layer"
