"""Distillation: options, losses and state of a student that learns from a teacher too.

Shapes: B batch, K classes, n and L tokens, D width of the student, D' that of the teacher, h w and h' w' patch grids.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedModel, TrainingArguments
from transformers.utils import ModelOutput

from ..model.configuration_hf_vit import to_pair
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import HfViTPreTrainedModel
from ..model.shared import at_least_float32
from ..model.task_image_classification import HfViTForImageClassification, classification_loss
from ..options.field import POSITIVE, SHARE, option
from ..options.resolve import Options
from .callbacks.state import StatefulCallback
from .teacher import Teacher, match_classes, names_of, open_teacher, with_view


ALPHA = 0.5  # share of the teacher in the loss
PROJECTION_NAME = "distillation.safetensors"  # in checkpoints, beside the model
TEMPERATURE = 3.0
teacher_option = partial(option, group="Teacher")


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
    weights = {} if distillation is None else distillation.weights(), load_file(file) if file.is_file() else {}
    needed, saved = ({name: list(weight.shape) for name, weight in part.items()} or "none" for part in weights)
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
            "teacher. Leave out compute_loss_func (--classification_loss bce) or --class_weights."
        )


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
