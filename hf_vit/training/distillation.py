"""Distillation: options, losses and state of a student that also learns from a teacher.

In shapes, B is the batch size, K the number of classes, n and L are numbers of tokens, D and D' the widths of student
and teacher, (h, w) and (h', w') their patch grids.
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
from transformers import BaseImageProcessor, PreTrainedModel, TrainingArguments
from transformers.utils import ModelOutput

from ..model.configuration_hf_vit import to_pair
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import HfViTPreTrainedModel
from ..model.shared import to_float32_or_higher
from ..model.task_image_classification import HfViTForImageClassification, classification_loss
from ..tasks.common.distillation_arguments import ALPHA, TEMPERATURE, DistillationArguments
from ..tasks.common.models import names_of
from .callbacks.state import StatefulCallback
from .teacher import Teacher, make_teacher, match_classes, open_teacher


PROJECTION_NAME = "distillation.safetensors"  # checkpoint file with the projection, which is not part of the student


def hard_loss(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return the cross-entropy of logits (B, K) with the classes predicted by the teacher, averaged over images.

    Source: DeiT, https://arxiv.org/abs/2012.12877.
    """
    return F.cross_entropy(to_float32_or_higher(logits), teacher_logits.argmax(dim=1))


def soft_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return the Kullback-Leibler divergence between predictions of teacher and student, averaged over images.

    The logits (B, K) of both models are divided by the temperature. Temperatures above 1 give unlikely classes more
    weight. The loss is multiplied by the squared temperature, so that the gradient keeps its scale. As in the DeiT
    paper, but unlike in its code, the loss is not divided by K.

    Source: https://arxiv.org/abs/1503.02531.
    """
    ours, theirs = (
        (to_float32_or_higher(values) / temperature).log_softmax(dim=1) for values in (logits, teacher_logits)
    )
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


def cosine_loss(tokens: Tensor, targets: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return 1 - cosine similarity of `tokens` and `targets`, both (B, n, D).

    The values are averaged over the tokens of each image and then over images. Only tokens with `visible` (B, n) equal
    to True are used. If `visible` is None, all tokens are used.
    """
    losses = 1 - F.cosine_similarity(to_float32_or_higher(tokens), to_float32_or_higher(targets), dim=-1)  # (B, n)
    if visible is None:
        return losses.mean()
    return (torch.where(visible, losses, 0).sum(dim=1) / visible.sum(dim=1)).mean()


def resample_patches(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resample patches (B, D, h', w') to a grid (h, w), bilinearly with antialiasing."""
    if patches.shape[-2:] == grid:
        return patches
    return F.interpolate(to_float32_or_higher(patches), grid, mode="bilinear", align_corners=False, antialias=True)


class Projection(nn.Linear):
    """Linear layer that maps tokens of a student to the width of its teacher.

    The layer is trained with the student. It is not a submodule of the student, and is not saved with the student's
    weights.
    """

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None: ...

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None: ...


class Distillation(StatefulCallback, ABC):
    """Loss of a teacher that is added to the loss of a student during training.

    The loss becomes (1 - alpha) times the student's loss plus alpha times the teacher's loss. A hook adds the
    teacher's loss in the forward pass of the student, so that DDP registers all parameters that contribute to the
    loss. The hook exists only during training, see `attached`. It does not affect evaluation and saving of the
    student.

    Args:
        teacher: The teacher.
        alpha: Weight of the teacher in the loss.
    """

    description: str  # description of the teacher's losses for the model card

    def __init__(self, teacher: Teacher, alpha: float) -> None:
        self.teacher = teacher
        self.alpha = alpha
        self.projection: Projection | None = None
        # Number of images in all batches of a step. Set if the loss of a step is the sum of the losses of its batches.
        self.num_images: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._num_batches = 0

    def start_step(self, num_images: Tensor) -> None:
        """Set the number of images of the current step on all processes."""
        self.num_images = num_images

    @contextmanager
    def attached(self, student: HfViTPreTrainedModel) -> Iterator[None]:
        """Context manager that moves the teacher to the device of a student, which then learns from the teacher."""
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
        """Return the student's own loss of a batch, and the distillation losses by name, averaged over images."""

    @torch.compiler.disable
    def _teach(
        self, student: HfViTPreTrainedModel, _: tuple[Any, ...], inputs: dict[str, Any], outputs: ModelOutput
    ) -> None:
        """Add the distillation losses to the student's loss of a batch."""
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
        """Return the distillation losses by name, averaged over the batches since the last call."""
        parts = {f"{name}_loss": total / self._num_batches for name, total in self._sums.items()}
        self._sums, self._num_batches = {}, 0
        return parts

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights that are not part of the student, by name."""
        if self.projection is None:
            return {}
        return {name: weight.detach() for name, weight in self.projection.named_parameters()}

    def save_state(self, folder: Path, is_writer: bool) -> None:
        """Save the trained weights that are not part of the student to a checkpoint."""
        if is_writer and (weights := self.weights()):
            save_file(weights, folder / PROJECTION_NAME)

    def load_state(self, folder: Path) -> None:
        """Load the distillation weights that `save_state` saved to a checkpoint."""
        if weights := self.weights():
            saved = load_file(folder / PROJECTION_NAME)
            for name, weight in weights.items():
                weight.copy_(saved[name])

    def facts(self) -> dict[str, str]:
        """Return the rows about the distillation for the table of the model card."""
        model, path = self.teacher.model, Path(self.teacher.name)
        name = path.resolve().name if path.exists() else self.teacher.name
        return {
            "teacher": f"{name} ({type(model).__name__}, {model.num_parameters():,} parameters)",
            "distillation": f"{self.description}, alpha {self.alpha:g}",
        }


def check_projection(checkpoint: str | os.PathLike[str], distillation: Distillation | None) -> None:
    """Raise `ValueError` if the projection weights of a checkpoint do not match the distillation."""
    file = Path(checkpoint) / PROJECTION_NAME
    weights = {} if distillation is None else distillation.weights(), load_file(file) if file.is_file() else {}
    needed, saved = ({name: list(weight.shape) for name, weight in part.items()} or "none" for part in weights)
    if needed != saved:
        raise ValueError(
            f"The distillation weights of {checkpoint} do not match. Required: {needed}; saved: {saved}. Resume with "
            "the original --teacher and --distillation_type, or start a new run in another --output_dir."
        )


def check_distillation(args: TrainingArguments, has_soft_labels: bool = False, loss: Any = None) -> None:
    """Raise `ValueError` if a teacher is incompatible with the training arguments.

    `has_soft_labels` is true if labels are smoothed before they are passed to the student. `loss`, if given, is a
    function that replaces the student's loss.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"Distillation supports one GPU per process, but this process has {args.n_gpu}. Start one process per GPU "
            f"with torchrun --nproc_per_node {args.n_gpu}, or use one GPU with CUDA_VISIBLE_DEVICES=0."
        )
    if args.fsdp or args.deepspeed:
        raise ValueError("Distillation requires the whole student on each device. Remove --fsdp and --deepspeed.")
    if args.label_smoothing_factor and not has_soft_labels:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} is not supported with a teacher, because the "
            "student would not receive the labels for its loss. Remove it; --distillation_type soft also smooths the "
            "targets."
        )
    if loss is not None:
        raise ValueError(
            "Distillation supports only the default loss of the student. Remove "
            "compute_loss_func (--classification_loss bce) or --class_weights."
        )


class TokenDistillation(Distillation):
    """Distillation of a teacher's predictions into a separate head on the distillation token of the student.

    The head on the pooled features is trained on the labels. The prediction of the student is the mean of the outputs
    of both heads. Source: DeiT, https://arxiv.org/abs/2012.12877.

    Args:
        teacher: A classifier.
        order: Class index of the teacher for each class of the student.
        alpha: Weight of the teacher in the loss.
        temperature: Temperature of soft distillation; None distills the predicted classes.
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
        """Return the loss between predictions and labels, and the loss between predictions of student and teacher."""
        own = classification_loss(outputs.cls_logits, inputs["labels"], student.config.problem_type)
        logits, theirs = outputs.distillation_logits, self.teacher.logits(inputs["pixel_values"])[:, self.order]
        if self.temperature is None:
            return own, {"hard": hard_loss(logits, theirs)}
        return own, {"soft": soft_loss(logits, theirs, self.temperature)}


class FeatureDistillation(Distillation):
    """Distillation of features. The loss is 1 - cosine similarity of patch tokens and, if available, of CLS tokens.

    If the widths of the models differ, a linear layer projects the student's last tokens. The teacher's patches are
    resampled to the student's grid. Padding is ignored.

    Args:
        teacher: An encoder. One image of the student's size is encoded to find the width of the teacher's tokens.
        student: The model to train.
        alpha: Weight of the teacher in the loss.

    Raises:
        ValueError: If the positions of the teacher's patch tokens are unknown.
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
        """Context manager in which the student learns from the teacher, and the student's tokens are stored."""
        hook = student.model.register_forward_hook(self._keep)
        try:
            with super().attached(student):
                yield
        finally:
            hook.remove()
            self._encoded = None

    def _keep(self, model: HfViTModel, _: tuple[Any, ...], outputs: ModelOutput) -> None:
        if model.training:  # in evaluation, tokens are unused and would occupy memory
            self._encoded = outputs.last_hidden_state

    def losses(
        self, student: HfViTPreTrainedModel, inputs: dict[str, Any], outputs: ModelOutput
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the student's loss, and the distillation losses of the patches and the CLS token."""
        # Tokens (B, L, D) start with prefix and patch tokens. In models with queries, the head runs the blocks and
        # returns the tokens as an output.
        tokens = outputs.get("last_hidden_state", self._encoded)
        self._encoded = None
        assert tokens is not None
        tokens = to_float32_or_higher(tokens)
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


def load_teacher(args: DistillationArguments, student_class: type[PreTrainedModel]) -> PreTrainedModel | None:
    """Load the teacher of a run, before the student and the data are loaded; return None if no teacher is given.

    Args:
        args: Options of distillation.
        student_class: Class of the model to train.

    Raises:
        OSError: If the teacher does not exist.
        ValueError: If the teacher has no suitable outputs, or the student class does not support distillation.
    """
    if args.teacher is None:
        return None
    is_classifier = (kind := args.kind(student_class)) != "features"
    if is_classifier and not issubclass(student_class, HfViTForImageClassification):
        raise ValueError(
            f"--distillation_type {kind} requires a head for the distillation token, which {student_class.__name__} "
            "does not have. Use --distillation_type features."
        )
    dtype = getattr(torch, args.teacher_dtype or "float32")
    return open_teacher(args.teacher, is_classifier, dtype, args.teacher_trust_remote_code)


def make_distillation(
    args: DistillationArguments,
    student: HfViTPreTrainedModel,
    processor: BaseImageProcessor,
    teacher: PreTrainedModel | None,
) -> Distillation | None:
    """Return the distillation of a training run, or None if it has no teacher.

    Args:
        args: Options of distillation.
        student: The model to train.
        processor: Image processor of the student.
        teacher: Teacher opened by `load_teacher`.

    Raises:
        OSError: If the teacher has no image processor.
        ValueError: If the teacher is incompatible with this student.
    """
    if args.teacher is None or teacher is None:
        return None
    kind, alpha = args.kind(type(student)), ALPHA if args.distillation_alpha is None else args.distillation_alpha
    if kind != "features" and not student.config.use_distillation_token:
        raise ValueError(
            f"--distillation_type {kind} requires a distillation token. Remove use_distillation_token from "
            "--config_overrides, or use --distillation_type features."
        )
    seeing = make_teacher(args.teacher, teacher, student, processor, args.teacher_trust_remote_code)
    if kind == "features":
        return FeatureDistillation(seeing, student, alpha)
    order = match_classes(names_of(teacher), names_of(student), args.teacher)
    temperature = args.distillation_temperature or TEMPERATURE
    return TokenDistillation(seeing, order, alpha, temperature if kind == "soft" else None)
