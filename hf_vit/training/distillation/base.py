"""Distillation: the loss of a student that learns from a teacher too, and its state in checkpoints.

Shapes: B batch, K classes, n tokens, D width of the teacher, h w and h' w' patch grids.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.utils import ModelOutput

from ...model.layers import at_least_float32
from ...model.pretrained import HfViTPreTrainedModel
from ..callbacks.stateful import StatefulCallback
from .teacher import Teacher


def hard_loss(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Returns the cross-entropy of logits (B, K) against the teacher's answers, the mean over images.

    Source: DeiT, https://arxiv.org/abs/2012.12877.
    """
    return F.cross_entropy(at_least_float32(logits), teacher_logits.argmax(dim=1))


def soft_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Returns the Kullback-Leibler divergence of logits (B, K) from the teacher's, the mean over images.

    The temperature divides both; above 1, unlikely classes count more. The loss is multiplied by its square, so that
    the gradient does not shrink with it. DeiT's code also divides it by K, its paper does not.

    Source: https://arxiv.org/abs/1503.02531, as in DeiT.
    """
    ours, theirs = ((at_least_float32(values) / temperature).log_softmax(dim=1) for values in (logits, teacher_logits))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


def cosine_loss(tokens: Tensor, targets: Tensor, visible: Tensor | None = None) -> Tensor:
    """Returns 1 - cosine of tokens (B, n, D), the mean over images of the mean over the tokens of each.

    Tokens count where `visible` (B, n) is true; all do without it.
    """
    losses = 1 - F.cosine_similarity(at_least_float32(tokens), at_least_float32(targets), dim=-1)  # (B, n)
    if visible is None:
        return losses.mean()
    return (torch.where(visible, losses, 0).sum(dim=1) / visible.sum(dim=1)).mean()


def resample_patches(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resamples patches (B, D, h', w') to a grid (h, w), bilinearly; on a coarser one each is a mean of old ones."""
    if patches.shape[-2:] == grid:
        return patches
    return F.interpolate(at_least_float32(patches), grid, mode="bilinear", align_corners=False, antialias=True)


ALPHA = 0.5  # share of the teacher in the loss
PROJECTION_NAME = "distillation.safetensors"  # in checkpoints, beside the model


class Projection(nn.Linear):
    """Brings tokens of a student to the width of its teacher's.

    It trains with the student but is no part of it: what saves or loads the student's weights does not see it.
    """

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None: ...

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None: ...


class Distillation(StatefulCallback, ABC):
    """What a student learns from a teacher while it trains, beside what it learns from its labels.

    Its loss becomes (1 - alpha) times its own and alpha times that of the teacher. That happens inside of its forward
    pass, by a hook, so that DDP knows of all that has a part in the loss. Hooks are there while it trains, see
    `attached`; the student that is saved, evaluated and drawn is as it would be without.

    Args:
        teacher: What to learn from.
        alpha: Share of the teacher in the loss.
    """

    description: str  # what is distilled, and how, for the card

    def __init__(self, teacher: Teacher, alpha: float) -> None:
        self.teacher = teacher
        self.alpha = alpha
        self.projection: Projection | None = None
        # Of all batches of a step, for models whose losses of batches add up to that of the step
        self.num_images: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._num_batches = 0

    @contextmanager
    def attached(self, student: HfViTPreTrainedModel) -> Iterator[None]:
        """Lets a student learn from the teacher as long as this lasts, and brings the teacher to its device."""
        self.teacher.to(student.device)
        if self.projection is not None:
            student.distillation_projection = self.projection.to(student.device)
        hook = student.register_forward_hook(self._teach, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            if self.projection is not None:
                del student.distillation_projection

    @abstractmethod
    def losses(
        self, student: HfViTPreTrainedModel, inputs: dict[str, Any], outputs: ModelOutput
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the student's own loss of a batch, and those that the teacher gives, means over images, by name."""

    @torch.compiler.disable
    def _teach(
        self, student: HfViTPreTrainedModel, _: tuple[Any, ...], inputs: dict[str, Any], outputs: ModelOutput
    ) -> None:
        """Adds the teacher's part to the loss of a batch."""
        if not student.training or outputs.loss is None:
            return
        own, parts = self.losses(student, inputs, outputs)
        for name, part in parts.items():
            self._sums[name] = self._sums.get(name, 0) + part.detach()
        self._num_batches += 1
        theirs = torch.stack(list(parts.values())).mean()
        if inputs.get("num_items_in_batch") is not None:
            assert self.num_images is not None
            theirs = theirs * len(inputs["pixel_values"]) / self.num_images
        outputs["loss"] = (1 - self.alpha) * own + self.alpha * theirs

    def take_parts(self) -> dict[str, Tensor]:
        """Returns the teacher's losses by name, means over the batches since the last call."""
        parts = {f"{name}_loss": total / self._num_batches for name, total in self._sums.items()}
        self._sums, self._num_batches = {}, 0
        return parts

    def weights(self) -> dict[str, Tensor]:
        """Returns what is trained beside the student, by name."""
        if self.projection is None:
            return {}
        return {name: weight.detach() for name, weight in self.projection.named_parameters()}

    def save_state(self, folder: Path, is_writer: bool) -> None:
        """Writes what is trained beside the student into a checkpoint."""
        if is_writer and (weights := self.weights()):
            save_file(weights, folder / PROJECTION_NAME)

    def load_state(self, folder: Path) -> None:
        """Reads what `save_state` has written."""
        if weights := self.weights():
            saved = load_file(folder / PROJECTION_NAME)
            for name, weight in weights.items():
                weight.copy_(saved[name])

    def facts(self) -> dict[str, str]:
        """Returns the rows of the student's card."""
        model, path = self.teacher.model, Path(self.teacher.name)
        name = path.resolve().name if path.exists() else self.teacher.name
        return {
            "teacher": f"{name} ({type(model).__name__}, {model.num_parameters():,} parameters)",
            "distillation": f"{self.description}, alpha {self.alpha:g}",
        }


def check_projection(checkpoint: str | os.PathLike[str], distillation: Distillation | None) -> None:
    """Raises `ValueError` unless a checkpoint has just those weights beside the model that a training needs."""
    file = Path(checkpoint) / PROJECTION_NAME
    needed, saved = (
        {name: list(weight.shape) for name, weight in weights.items()} or "none"
        for weights in (
            {} if distillation is None else distillation.weights(),
            load_file(file) if file.is_file() else {},
        )
    )
    if needed != saved:
        raise ValueError(
            f"Between student and teacher this training needs as weights: {needed}; {checkpoint} has: {saved}. Resume "
            "with the --teacher and --distillation_type of its training, or start another one in another --output_dir."
        )


def check_distillation(args: TrainingArguments, has_soft_labels: bool = False, loss: Any = None) -> None:
    """Raises `ValueError` if a teacher does not go with the arguments of a training.

    `has_soft_labels` tells that labels are smoothed before the student gets them; `loss` replaces that of the student.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"This process has {args.n_gpu} GPUs, and a teacher is on one alone. Start a process for each, torchrun "
            f"--nproc_per_node {args.n_gpu}, or show it one: CUDA_VISIBLE_DEVICES=0."
        )
    if args.fsdp or args.deepspeed:
        raise ValueError("A teacher needs the whole student on each device. Leave out --fsdp and --deepspeed.")
    if args.label_smoothing_factor and not has_soft_labels:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} takes the labels from the student, which learns "
            "from them beside the teacher. Leave it out; --distillation_type soft smooths too."
        )
    if loss is not None:
        raise ValueError(
            "A loss beside that of the model takes the labels from the student, which learns from them beside the "
            "teacher. Leave out compute_loss_func (--classification_loss bce)."
        )
