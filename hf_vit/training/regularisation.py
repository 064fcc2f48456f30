"""What regularises the training of a classifier, as its Trainer takes it."""

from typing import Any

from ..modeling_hf_vit import HfViTForImageClassification
from .batch_changes import BatchChange
from .binary_cross_entropy import BinaryCrossEntropy
from .distilled_loss import Distillation
from .feature_distillation import FeatureDistillation
from .mixing import Mixing
from .regularisation_arguments import RegularisationArguments
from .token_dropping import DropTokens


def regularise(
    model: HfViTForImageClassification,
    args: RegularisationArguments,
    label_smoothing: float = 0.0,
    distillation: Distillation | None = None,
) -> dict[str, Any]:
    """Returns `batch_changes` and `compute_loss_func` of an `HfViTTrainer`.

    A model that learns from soft labels is told that they are of one class per image, as it could not know.

    Args:
        model: The classifier.
        args: What to do.
        label_smoothing: Probability mass spread evenly over all classes, in [0, 1).
        distillation: What it learns from a teacher, if there is one. The teacher sees the mixed images, as in DeiT.

    Raises:
        ValueError: if something does not go with the model or the teacher.
    """
    changes: list[BatchChange] = []
    if args.needs_soft_labels:
        model.config.problem_type = "single_label_classification"
        mixing = (args.mixup_alpha, args.cutmix_alpha, args.mixing_probability, args.mixing_off_share)
        changes.append(Mixing(model.config.num_labels, *mixing, label_smoothing))
    if args.token_drop_rate:
        if isinstance(distillation, FeatureDistillation):
            raise ValueError(
                f"token_drop_rate={args.token_drop_rate} drops patches whose features are to be learned. Set it to 0, "
                "or take --distillation_type hard or soft."
            )
        changes.append(DropTokens(args.token_drop_rate, model.config))
    is_binary = args.classification_loss == "bce"
    return {
        "batch_changes": changes,
        "compute_loss_func": BinaryCrossEntropy(args.bce_target_threshold) if is_binary else None,
    }
