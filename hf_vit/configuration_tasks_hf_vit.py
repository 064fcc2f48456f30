"""Options of the heads, one class a task, which `HfViTConfig` holds beside the backbone.

Annotations stay real objects in this file (no postponed evaluation): the strict field checks read them.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from .configuration_objects_hf_vit import HfViTDetectionConfig, HfViTKeypointConfig
from .configuration_options_hf_vit import HfViTTaskConfig, check_defaults, check_positive, check_weights
from .configuration_text_hf_vit import HfViTContrastiveConfig, HfViTTextConfig


@strict
@dataclass
class HfViTSegmentationConfig(HfViTTaskConfig):
    """Head and losses of semantic segmentation.

    Args:
        head: "simple": 3x3 convolution, ReLU, 1x1 convolution; "linear": batch norm and a 1x1 convolution, the linear
            protocol of DINOv2 (https://arxiv.org/abs/2304.07193); "conv": convolutions with progressive upsampling
            (SETR-PUP, https://arxiv.org/abs/2012.15840); "mask": class tokens that attend to the patches (Segmenter,
            https://arxiv.org/abs/2105.05633).
        hidden_size: Width of the head "conv".
        num_layers: Number of its stages, each doubling the resolution, or of the transformer blocks of "mask".
        out_indices: Numbers of the blocks whose tokens the head sees side by side, the last one by default.
        dropout_prob: Dropout of whole channels before the last layer, in [0, 1).
        cross_entropy_weight: Weight of the cross-entropy in the loss.
        dice_weight: Weight of the Dice loss (https://arxiv.org/abs/1606.04797) in the loss.
        focal_weight: Weight of the focal loss (https://arxiv.org/abs/1708.02002) in the loss.
        focal_gamma: Its exponent: how much less pixels count that are right already.
        class_weights: How much the pixels of each class count in cross-entropy and focal loss, 1 by default.
        semantic_loss_ignore_index: Number of the pixels that do not count.
        use_auxiliary_head: Whether a "simple" head on an earlier block is trained too; it plays no part in the result.
        auxiliary_loss_weight: Weight of its cross-entropy.
        auxiliary_layer: Number of the block that it sees; two thirds of all by default.
    """

    head: Literal["simple", "linear", "conv", "mask"] = "conv"
    hidden_size: int = 256
    num_layers: int = 2
    out_indices: list[int] | tuple[int, ...] | None = None
    dropout_prob: float | int = 0.0
    cross_entropy_weight: float | int = 1.0
    dice_weight: float | int = 0.0
    focal_weight: float | int = 0.0
    focal_gamma: float | int = 2.0
    class_weights: list[float | int] | tuple[float | int, ...] | None = None
    semantic_loss_ignore_index: int = 255
    use_auxiliary_head: bool = False
    auxiliary_loss_weight: float | int = 0.4
    auxiliary_layer: int | None = None

    def check(self) -> None:
        """Raises `ValueError` where the values do not fit together."""
        check_positive({"hidden_size": self.hidden_size, "num_layers": self.num_layers})
        if not 0 <= self.dropout_prob < 1:
            raise ValueError(f"dropout_prob={self.dropout_prob} must lie in [0, 1); 0 switches it off.")
        losses = ("cross_entropy_weight", "dice_weight", "focal_weight")
        check_weights({name: vars(self)[name] for name in losses})
        if self.use_auxiliary_head:
            check_weights({"auxiliary_loss_weight": self.auxiliary_loss_weight})
        if not 0 <= self.focal_gamma < math.inf:
            raise ValueError(f"focal_gamma={self.focal_gamma} must not be negative; 0 makes it the cross-entropy.")
        if self.class_weights is not None and not all(0 <= weight < math.inf for weight in self.class_weights):
            raise ValueError(f"class_weights={list(self.class_weights)} must not be negative; 0 ignores a class.")


@strict
@dataclass
class HfViTUniversalSegmentationConfig(HfViTTaskConfig):
    """Queries, matching and losses of universal segmentation (EoMT, https://arxiv.org/abs/2503.19108).

    Args:
        num_queries: Number Q of masks that an image can have.
        num_blocks: Number of blocks at the end of the encoder that the queries pass through.
        num_upscale_blocks: Number of times the resolution of the patches is doubled for the masks.
        class_weight: Weight of the classes in matching and loss.
        mask_weight: Weight of the masks' cross-entropy in matching and loss.
        dice_weight: Weight of the masks' Dice loss in matching and loss.
        no_object_weight: How much a query without a mask counts beside one with a mask in the loss of the classes.
        train_num_points: Number of points that stand for the pixels of a mask.
        oversample_ratio: How many times as many points the uncertain ones are chosen from.
        importance_sample_ratio: Share of the points that are uncertain ones; the rest is anywhere.
    """

    num_queries: int = 200
    num_blocks: int = 4
    num_upscale_blocks: int = 2
    class_weight: float | int = 2.0
    mask_weight: float | int = 5.0
    dice_weight: float | int = 5.0
    no_object_weight: float | int = 0.1
    train_num_points: int = 12544
    oversample_ratio: float | int = 3.0
    importance_sample_ratio: float | int = 0.75

    def check(self) -> None:
        """Raises `ValueError` where the values do not fit together."""
        counts = ("num_queries", "num_blocks", "train_num_points", "no_object_weight")
        check_positive({name: vars(self)[name] for name in counts})
        if self.num_upscale_blocks < 0:
            raise ValueError(f"num_upscale_blocks={self.num_upscale_blocks} must not be negative.")
        if not 1 <= self.oversample_ratio < math.inf or not 0 <= self.importance_sample_ratio <= 1:
            raise ValueError(
                f"oversample_ratio={self.oversample_ratio} must be at least 1, and importance_sample_ratio="
                f"{self.importance_sample_ratio} must lie in [0, 1]."
            )
        check_weights({name: vars(self)[name] for name in ("class_weight", "mask_weight", "dice_weight")})


@strict
@dataclass
class HfViTDepthConfig(HfViTTaskConfig):
    """Head and losses of monocular depth.

    Args:
        head: "linear": a 1x1 convolution on patch and CLS tokens to the probabilities of depth bins (AdaBins,
            https://arxiv.org/abs/2011.14141, the linear protocol of DINOv2, https://arxiv.org/abs/2304.07193);
            "conv": transposed convolutions over the patch grid, D, D/2, D/4, 1; "dpt": levels of the encoder,
            reassembled at four resolutions and fused (https://arxiv.org/abs/2103.13413).
        out_indices: Numbers of the blocks that the head sees. By default the last one, for "dpt" as many as
            `neck_hidden_sizes`, evenly spaced.
        neck_hidden_sizes: Widths of the levels of "dpt", the finest first.
        reassemble_factors: Their resolutions relative to the patch grid: 1, 2, 3, … times as fine, or a half, a third,
            … of it.
        readout_type: What "dpt" does with the CLS token: "ignore", "add" it to each patch, or "project" both.
        fusion_hidden_size: Width at which "dpt" fuses.
        head_hidden_size: Width of its layer before the last.
        doubles_resolution: Whether "dpt" doubles the resolution at each fusion and at the end, as DPT itself: 16 times
            as fine as the grid, for an odd number of patches a little more. Otherwise it meets the size of each level
            and of the image, as Depth Anything (https://arxiv.org/abs/2401.10891).
        depth_estimation_type: "metric", depth in metres, or "relative", inverse depth up to scale and shift.
        max_depth: Largest metric depth in metres, beyond which labels do not count; `None` leaves it open. Heads of
            bins need it.
        min_depth: Depth in metres of the first bin, and the least of a label that counts in logarithms.
        num_bins: Number of bins of "linear" under metric depth.
        loss: "silog" (scale-invariant logarithmic, https://arxiv.org/abs/1406.2283), "l1" or "mse" for metric depth;
            "ssi" (scale- and shift-invariant, https://arxiv.org/abs/1907.01341) for relative. By default the first
            that fits.
        silog_lambda: How much of a common factor "silog" forgives: 0 nothing, 1 all.
        gradient_loss_weight: Weight of the gradient matching that goes with "ssi".
    """

    head: Literal["linear", "conv", "dpt"] = "dpt"
    out_indices: list[int] | tuple[int, ...] | None = None
    neck_hidden_sizes: list[int] | tuple[int, ...] = (96, 192, 384, 768)
    reassemble_factors: list[float | int] | tuple[float | int, ...] = (4, 2, 1, 0.5)
    readout_type: Literal["ignore", "add", "project"] = "project"
    fusion_hidden_size: int = 256
    head_hidden_size: int = 32
    doubles_resolution: bool = False
    depth_estimation_type: Literal["metric", "relative"] = "metric"
    max_depth: float | int | None = 10.0
    min_depth: float | int = 1e-3
    num_bins: int = 256
    loss: Literal["silog", "l1", "mse", "ssi"] | None = None
    silog_lambda: float | int = 0.5
    gradient_loss_weight: float | int = 0.5

    def check(self) -> None:
        """Raises `ValueError` where the values do not fit together."""
        names = ("neck_hidden_sizes", "reassemble_factors", "fusion_hidden_size", "head_hidden_size", "min_depth")
        check_positive({name: vars(self)[name] for name in (*names, "num_bins")})
        if len(self.neck_hidden_sizes) != len(self.reassemble_factors):
            raise ValueError(
                f"neck_hidden_sizes={list(self.neck_hidden_sizes)} and reassemble_factors="
                f"{list(self.reassemble_factors)} must be as many."
            )
        steps = [max(factor, 1 / factor) for factor in self.reassemble_factors]
        if not all(math.isclose(step, round(step)) for step in steps):
            raise ValueError(
                f"reassemble_factors={list(self.reassemble_factors)} must be whole numbers, or one over a whole "
                "number, such as 4, 2, 1 and 0.5."
            )
        if self.max_depth is not None and not self.min_depth < self.max_depth < math.inf:
            raise ValueError(f"max_depth={self.max_depth} must be more than min_depth={self.min_depth}, in metres.")
        if self.depth_estimation_type == "metric" and self.loss == "ssi":
            raise ValueError("loss='ssi' leaves scale and shift open, so it needs depth_estimation_type='relative'.")
        if self.depth_estimation_type == "relative" and self.loss not in (None, "ssi"):
            raise ValueError(
                f"loss={self.loss!r} compares metres, but depth_estimation_type='relative' has none. Set loss='ssi'."
            )
        if self.head == "linear" and self.depth_estimation_type == "metric" and self.max_depth is None:
            raise ValueError("The bins of head='linear' need a max_depth in metres, such as 10 indoors, 80 outdoors.")
        if not 0 <= self.silog_lambda <= 1:
            raise ValueError(f"silog_lambda={self.silog_lambda} must lie in [0, 1].")
        if not 0 <= self.gradient_loss_weight < math.inf:
            raise ValueError(f"gradient_loss_weight={self.gradient_loss_weight} must not be negative.")


# What of masked image modelling has a part in MAE only
MAE_OPTIONS = (
    "norm_pix_loss",
    "decoder_hidden_size",
    "decoder_num_hidden_layers",
    "decoder_num_attention_heads",
    "decoder_intermediate_size",
)


@strict
@dataclass
class HfViTMaskedImageModelingConfig(HfViTTaskConfig):
    """Masks, decoder and loss of masked image modelling.

    Args:
        objective: "mae": the encoder sees the patches that are not masked, a decoder says the others (MAE,
            https://arxiv.org/abs/2111.06377); "simmim": a mask token takes the place of masked patches, and one linear
            layer says their pixels (SimMIM, https://arxiv.org/abs/2111.09886). It needs `use_mask_token`.
        mask_ratio: Share of the patches that is masked, in (0, 1); by default 0.75 for "mae" and 0.6 for "simmim".
        mask_type: "random", or "blockwise": rectangles (BEiT, https://arxiv.org/abs/2106.08254).
        mask_unit: How many patches a side the squares have that "random" masks as one; SimMIM takes 2 of 16 pixels.
        norm_pix_loss: Whether the pixels of each patch are normalised by their mean and deviation before they are
            compared; for "mae", as all that follow.
        decoder_hidden_size: Width of the decoder.
        decoder_num_hidden_layers: Number of its blocks.
        decoder_num_attention_heads: Number of its attention heads.
        decoder_intermediate_size: Width of the hidden layer of its MLPs.
    """

    objective: Literal["mae", "simmim"] = "mae"
    mask_ratio: float | None = None
    mask_type: Literal["random", "blockwise"] = "random"
    mask_unit: int = 1
    norm_pix_loss: bool = True
    decoder_hidden_size: int = 512
    decoder_num_hidden_layers: int = 8
    decoder_num_attention_heads: int = 16
    decoder_intermediate_size: int = 2048

    @property
    def masked_share(self) -> float:
        """The share of the patches that is masked: `mask_ratio`, or the default of the objective."""
        if self.mask_ratio is not None:
            return self.mask_ratio
        return 0.75 if self.objective == "mae" else 0.6

    @property
    def normalizes_patches(self) -> bool:
        """Whether the pixels of each patch are compared without their mean and deviation."""
        return self.objective == "mae" and self.norm_pix_loss

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Returns saved options with given ones in their places; those of "mae" alone do not go over to "simmim"."""
        if given.get("objective") == "simmim":
            saved = {name: value for name, value in saved.items() if name not in MAE_OPTIONS}
        return super().merge(saved, given)

    def check(self) -> None:
        """Raises `ValueError` where the values do not fit together."""
        if self.objective != "mae":
            check_defaults(self, MAE_OPTIONS, "objective", "mae")
        if self.mask_ratio is not None and not 0 < self.mask_ratio < 1:
            raise ValueError(
                f"mask_ratio={self.mask_ratio} must lie in (0, 1): some patches are masked, some are seen."
            )
        counts = ("mask_unit", *(name for name in MAE_OPTIONS if name != "norm_pix_loss"))
        check_positive({name: vars(self)[name] for name in counts})
        if self.mask_type == "blockwise" and self.mask_unit != 1:
            raise ValueError(
                f"mask_unit={self.mask_unit} is for mask_type='random'; blocks have sizes of their own. Leave it out."
            )
        if self.decoder_hidden_size % 4 or self.decoder_hidden_size % self.decoder_num_attention_heads:
            raise ValueError(
                f"decoder_hidden_size={self.decoder_hidden_size} must be a multiple of 4, for its positions, and of "
                f"decoder_num_attention_heads={self.decoder_num_attention_heads}."
            )


# The fields of `HfViTConfig` that hold them
TASK_CONFIGS: dict[str, type[HfViTTaskConfig]] = {
    "segmentation_config": HfViTSegmentationConfig,
    "universal_segmentation_config": HfViTUniversalSegmentationConfig,
    "depth_config": HfViTDepthConfig,
    "detection_config": HfViTDetectionConfig,
    "keypoint_config": HfViTKeypointConfig,
    "masked_image_modeling_config": HfViTMaskedImageModelingConfig,
    "text_config": HfViTTextConfig,
    "contrastive_config": HfViTContrastiveConfig,
}
