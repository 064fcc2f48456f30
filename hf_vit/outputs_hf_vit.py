"""What the models return where the library has no output of its own for it.

Shapes: B batch, h w patch grid, P prefix tokens, N = h·w, L = P + N, Q queries, D hidden size, s how much finer a
head's result is than the grid.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from transformers.modeling_outputs import ImageClassifierOutput, SemanticSegmenterOutput
from transformers.utils import ModelOutput


@dataclass
class HfViTImageClassifierOutput(ImageClassifierOutput):
    """The library's output with the two heads of a distilled model; `logits` is what to use.

    Args:
        loss: Scalar, if labels were given.
        logits: (B, num_labels); the mean of the two heads with a distillation token.
        hidden_states: On request, (B, L, D) before the first block and after each one.
        attentions: On request, (B, heads, L, L) of each block.
        cls_logits: (B, num_labels) of the head on the pooled image; only with a distillation token.
        distillation_logits: (B, num_labels) of the head on the distillation token; only with one.
    """

    cls_logits: Tensor | None = None
    distillation_logits: Tensor | None = None


@dataclass
class HfViTSemanticSegmenterOutput(SemanticSegmenterOutput):
    """The library's output, and what an auxiliary head gave.

    Args:
        loss: Scalar, if labels were given.
        logits: (B, num_labels, s·h, s·w); `post_process_semantic_segmentation` resizes them.
        hidden_states: On request, (B, L, D) before the first block and after each one.
        attentions: On request, (B, heads, L, L) of each block.
        auxiliary_logits: (B, num_labels, h, w), in training with `use_auxiliary_head`.
    """

    auxiliary_logits: Tensor | None = None


@dataclass
class HfViTForUniversalSegmentationOutput(ModelOutput):
    """What `post_process_{semantic,instance,panoptic}_segmentation` take.

    Args:
        loss: Scalar, if targets were given.
        class_queries_logits: (B, Q, num_labels + 1), the last one standing for no object.
        masks_queries_logits: (B, Q, s·h, s·w).
        last_hidden_state: (B, P + N + Q, D) after the final norm.
        hidden_states: On request, before the first block and after each one; the last blocks have queries too.
        attentions: On request, (B, heads, L, L) of each block.
    """

    loss: Tensor | None = None
    class_queries_logits: Tensor | None = None
    masks_queries_logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class DetectionPrediction(NamedTuple):
    """What one layer says about the objects of images.

    Args:
        logits: (B, Q, K), or (B, Q, K + 1) where the last one stands for no object; in training Q counts all groups.
        boxes: (B, Q, 4) as cx, cy, w, h relative to the image without its padding, in [0, 1].
    """

    logits: Tensor
    boxes: Tensor


@dataclass
class HfViTObjectDetectionOutput(ModelOutput):
    """What `post_process_object_detection` takes.

    Args:
        loss: Scalar, if labels were given.
        loss_dict: Its parts before their weights, see `detection_loss`.
        logits: (B, Q, num_labels), or with `class_loss="cross_entropy"` (B, Q, num_labels + 1), the last one standing
            for no object.
        pred_boxes: (B, Q, 4), centre x, centre y, width and height relative to the image without its padding.
        probabilities: (B, Q, num_labels), how likely each query is an object of each class.
        auxiliary_outputs: In training what earlier layers say, dictionaries of `logits` and `pred_boxes`.
        last_hidden_state: (B, L, D) after the final norm; of the deformable decoder what it sees of the last of its
            blocks, under `config.apply_layernorm`.
        hidden_states: On request, before the first block and after each one.
        attentions: On request, (B, heads, L, L) of each block.
    """

    loss: Tensor | None = None
    loss_dict: dict[str, Tensor] | None = None
    logits: Tensor | None = None
    pred_boxes: Tensor | None = None
    probabilities: Tensor | None = None
    auxiliary_outputs: list[dict[str, Tensor]] | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class HfViTKeypointDetectionOutput(ModelOutput):
    """What `post_process_keypoint_detection` takes.

    Args:
        loss: Scalar, if labels were given.
        heatmaps: (B, K, s·h, s·w), how sure it is of each keypoint at each place, about 1 where it is.
        hidden_states: On request, (B, L, D) before the first block and after each one.
        attentions: On request, (B, heads, L, L) of each block.
    """

    loss: Tensor | None = None
    heatmaps: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class HfViTMaskedImageModelingOutput(ModelOutput):
    """What was masked, and what the model makes of it.

    Args:
        loss: Scalar, see `masked_image_modeling_loss`.
        reconstruction: (B, C, H, W), the images as predicted, in the units of `pixel_values`. Where the model predicts
            normalised patches (`norm_pix_loss`), mean and deviation are those of the true patches.
        logits: (B, N, p·q·C), the pixels of each patch row by row, channels last, as the decoder says them.
        bool_masked_pos: (B, N) bool, True where a patch was masked: hidden from the encoder.
        hidden_states: On request, before the first block and after each one: (B, L, D), of "mae" (B, P + K, D), where
            the K visible patches stand in the order of the image; images with fewer of them have fillers behind.
        attentions: On request, (B, heads, L, L) or (B, heads, P + K, P + K) of each block.
    """

    loss: Tensor | None = None
    reconstruction: Tensor | None = None
    logits: Tensor | None = None
    bool_masked_pos: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
