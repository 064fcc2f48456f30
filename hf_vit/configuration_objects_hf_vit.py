"""Options of the heads that find objects and keypoints.

Annotations stay real objects in this file (no postponed evaluation): the strict field checks read them.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from .configuration_options_hf_vit import HfViTTaskConfig, check_defaults, check_positive, check_weights


# What of detection has a part in one decoder only
DECODER_OPTIONS = {
    "queries": ("num_blocks", "use_mid_position_embeddings"),
    "deformable": (
        "hidden_size",
        "num_attention_heads",
        "num_points",
        "scale_factors",
        "out_indices",
        "projector_norm",
        "num_groups",
    ),
}


@strict
@dataclass
class HfViTDetectionConfig(HfViTTaskConfig):
    """Decoder, matching and losses of object detection.

    Args:
        decoder: "queries": learned queries join the patches in blocks of the encoder (YOLOS,
            https://arxiv.org/abs/2106.00666) or in blocks behind it; "deformable": a projector makes a small pyramid
            of several levels of the encoder, whose best places start queries that look around themselves (LW-DETR,
            https://arxiv.org/abs/2406.03459).
        num_queries: Number Q of objects that an image can have.
        num_layers: Number of layers of the decoder, 3 by default for "deformable"; for "queries" of blocks behind the
            encoder, none by default.
        num_blocks: Number of blocks at the end of the encoder that queries pass through, all by default; for
            "queries".
        use_mid_position_embeddings: Whether positions are added again after each of these blocks but the last, as in
            some of YOLOS; for "queries".
        hidden_size: Width of the decoder; for "deformable", as all that follow but the losses.
        num_attention_heads: Its heads of self-attention; the deformable attention has twice as many.
        num_points: Number of points that a head looks at on each level.
        scale_factors: Resolution of each level of the pyramid relative to the patches: 2, 1, 0.5 or 0.25.
        out_indices: Numbers of the blocks whose tokens the projector sees, spread evenly over the encoder by default.
            Blocks behind the last of them neither run nor learn.
        projector_norm: Norm of the projector: "batch" (LW-DETR) or "layer" (RF-DETR,
            https://github.com/roboflow/rf-detr), which does not look at other images.
        num_groups: How many sets of queries learn side by side in training (Group DETR,
            https://arxiv.org/abs/2207.13085).
        class_loss: "cross_entropy" (DETR; one class more, for no object), "focal" or "iou_aware" (IA-BCE of
            https://arxiv.org/abs/2406.03459: how sure a class is follows how well the box fits); by default
            "cross_entropy" for "queries" and "iou_aware" for "deformable".
        bbox_weight: Weight of the L1 distance of boxes in matching and loss; that of the classes in the loss is 1.
        giou_weight: Weight of their generalised IoU (https://arxiv.org/abs/1902.09630) in matching and loss.
    """

    decoder: Literal["queries", "deformable"] = "deformable"
    num_queries: int = 100
    num_layers: int | None = None
    num_blocks: int | None = None
    use_mid_position_embeddings: bool = False
    hidden_size: int = 256
    num_attention_heads: int = 8
    num_points: int = 2
    scale_factors: list[float | int] | tuple[float | int, ...] = (1.0,)
    out_indices: list[int] | tuple[int, ...] | None = None
    projector_norm: Literal["batch", "layer"] = "layer"
    num_groups: int = 13
    class_loss: Literal["cross_entropy", "focal", "iou_aware"] | None = None
    bbox_weight: float | int = 5.0
    giou_weight: float | int = 2.0

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Returns saved options with given ones in their places; those of another decoder are left behind."""
        decoder = saved.get("decoder", cls.decoder)
        return super().merge(saved if given.get("decoder", decoder) == decoder else {}, given)

    def check(self) -> None:
        """Raises `ValueError` where the values do not fit together."""
        other = "queries" if self.decoder == "deformable" else "deformable"
        check_defaults(self, DECODER_OPTIONS[other], "decoder", other)
        counts = ("num_queries", "hidden_size", "num_attention_heads", "num_points", "num_groups")
        check_positive({name: vars(self)[name] for name in counts})
        check_weights({name: vars(self)[name] for name in ("bbox_weight", "giou_weight")})
        least = 1 if self.decoder == "deformable" else 0
        if self.num_layers is not None and self.num_layers < least:
            raise ValueError(f"num_layers={self.num_layers} must be {least} at least for decoder={self.decoder!r}.")
        if self.num_blocks is not None and self.num_blocks < 0:
            raise ValueError(f"num_blocks={self.num_blocks} must not be negative; None means all blocks.")
        if self.decoder == "queries" and self.num_blocks == 0 and not self.num_layers:
            raise ValueError("num_blocks=0 without num_layers shows queries no image. Set one of them to 1 or more.")
        if self.hidden_size % (8 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of 8 times num_attention_heads="
                f"{self.num_attention_heads}. Set hidden_size={8 * self.num_attention_heads}, say."
            )
        unknown = [factor for factor in self.scale_factors if factor not in (2, 1, 0.5, 0.25)]
        if unknown or not self.scale_factors:
            raise ValueError(f"scale_factors={list(self.scale_factors)} must be one or more of 2, 1, 0.5 and 0.25.")
        if self.decoder == "deformable" and self.class_loss == "cross_entropy":
            raise ValueError("decoder='deformable' has no class for no object. Set class_loss 'focal' or 'iou_aware'.")


@strict
@dataclass
class HfViTKeypointConfig(HfViTTaskConfig):
    """Head, targets and what is known about the K keypoints, which `id2label` of `HfViTConfig` names.

    Args:
        head: "classic": transposed convolutions; "simple": bilinear upsampling and one convolution (both ViTPose,
            https://arxiv.org/abs/2204.12484).
        hidden_size: Width of the transposed convolutions.
        scale_factor: How much finer the heatmaps of "simple" are than the patches; those of "classic" are 4 times.
        sigma: Standard deviation of the Gaussian around a keypoint in the target, in heatmap pixels.
        keypoint_weights: How much each keypoint counts in the loss, 1 by default.
        flip_pairs: Pairs of keypoints (numbers) that a mirror image swaps, as the left and the right eye.
        skeleton: Pairs of keypoints that a line joins in pictures.
        oks_sigmas: How exactly each keypoint can be placed, relative to the size of the object, for OKS; 0.05 each by
            default, those of COCO's 17 keypoints where their names are these.
    """

    head: Literal["classic", "simple"] = "classic"
    hidden_size: int = 256
    scale_factor: int = 4
    sigma: float | int = 2.0
    keypoint_weights: list[float | int] | tuple[float | int, ...] | None = None
    flip_pairs: list[list[int]] | list[tuple[int, int]] | tuple[tuple[int, int], ...] = ()
    skeleton: list[list[int]] | list[tuple[int, int]] | tuple[tuple[int, int], ...] = ()
    oks_sigmas: list[float | int] | tuple[float | int, ...] | None = None

    def check(self) -> None:
        """Raises `ValueError` where the values do not fit together."""
        check_positive({name: vars(self)[name] for name in ("hidden_size", "scale_factor", "sigma")})
        for name in ("flip_pairs", "skeleton"):
            wrong = [pair for pair in vars(self)[name] if len(pair) != 2 or pair[0] == pair[1] or min(pair) < 0]
            if wrong:
                raise ValueError(f"{name} has {wrong[0]}. Each entry is the numbers of two keypoints, from 0.")
        flipped = [number for pair in self.flip_pairs for number in pair]
        if len(set(flipped)) < len(flipped):
            raise ValueError(f"flip_pairs={list(self.flip_pairs)} names a keypoint twice.")
        if self.keypoint_weights is not None and not all(0 <= weight < math.inf for weight in self.keypoint_weights):
            raise ValueError(f"keypoint_weights={list(self.keypoint_weights)} must not be negative; 0 ignores one.")
        if self.oks_sigmas is not None:
            check_positive({"oks_sigmas": self.oks_sigmas})
