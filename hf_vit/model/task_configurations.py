"""Options of the tasks, one class each, which `HfViTConfig` holds beside the backbone."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .nested_options import HfViTTaskConfig, check_activation, option


LEAST_TEACHER_TEMPERATURE = 0.025  # below, float32 has no exponential of all cosines divided by it


@strict
@dataclass
class HfViTDetectionConfig(HfViTTaskConfig):
    """Decoder, matching and losses of object detection.

    Args:
        decoder: "queries": learned queries join the patches in blocks of the encoder (YOLOS,
            https://arxiv.org/abs/2106.00666) or in blocks behind it; "deformable": a projector makes a small pyramid
            of several levels of the encoder, whose best places start queries that sample around themselves (LW-DETR,
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
        num_points: Number of points that a head samples on each level.
        scale_factors: Resolution of each level of the pyramid relative to the patches: 2, 1, 0.5 or 0.25.
        out_indices: Numbers of the blocks whose tokens the projector reads, spread evenly over the encoder by default.
            Blocks behind the last of them neither run nor train.
        projector_norm: Norm of the projector: "batch" (LW-DETR) or "layer" (RF-DETR,
            https://github.com/roboflow/rf-detr), which is independent of other images.
        num_groups: How many sets of queries are trained side by side (Group DETR,
            https://arxiv.org/abs/2207.13085).
        class_loss: "cross_entropy" (DETR; one class more, for no object) or "iou_aware" (IA-BCE of
            https://arxiv.org/abs/2406.03459: how sure a class is follows how well the box fits); by default
            "cross_entropy" for "queries" and "iou_aware" for "deformable".
        bbox_weight: Weight of the L1 distance of boxes in matching and loss; that of the classes in the loss is 1.
        giou_weight: Weight of their generalized IoU (https://arxiv.org/abs/1902.09630) in matching and loss.
        score_threshold: Score above which the pipeline of the saved model gives an object, unless it is told another,
            as a training has chosen it; `None` means 0.5, that of the stock pipeline.
    """

    choice = "decoder"
    losses = ("bbox_weight", "giou_weight")

    decoder: Literal["queries", "deformable"] = "deformable"
    num_queries: int = option(100, "(0, inf)")
    num_layers: int | None = None
    num_blocks: int | None = option(None, "[0, inf)", "None means all blocks", of="queries")
    use_mid_position_embeddings: bool = option(False, of="queries")
    hidden_size: int = option(256, "(0, inf)", of="deformable")
    num_attention_heads: int = option(8, "(0, inf)", of="deformable")
    num_points: int = option(2, "(0, inf)", of="deformable")
    scale_factors: list[float | int] | tuple[float | int, ...] = option((1.0,), of="deformable")
    out_indices: list[int] | tuple[int, ...] | None = option(None, of="deformable")
    projector_norm: Literal["batch", "layer"] = option("layer", of="deformable")
    num_groups: int = option(13, "(0, inf)", of="deformable")
    class_loss: Literal["cross_entropy", "iou_aware"] | None = None
    bbox_weight: float | int = option(5.0, "[0, inf)", "0 switches it off")
    giou_weight: float | int = option(2.0, "[0, inf)", "0 switches it off")
    score_threshold: float | int | None = option(None, "[0, 1]")

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Returns saved options with given ones in their places; those of another decoder are left behind."""
        decoder = saved.get("decoder", cls.decoder)
        return super().merge(saved if given.get("decoder", decoder) == decoder else {}, given)

    def _check(self) -> None:
        least = 1 if self.decoder == "deformable" else 0
        if self.num_layers is not None and self.num_layers < least:
            raise ValueError(f"num_layers={self.num_layers} must be {least} at least for decoder={self.decoder!r}.")
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
            raise ValueError("decoder='deformable' has no class for no object. Set class_loss='iou_aware'.")


@strict
@dataclass
class HfViTKeypointConfig(HfViTTaskConfig):
    """Head, targets and what is known about the K keypoints, which `id2label` of `HfViTConfig` names.

    Args:
        head: "classic": transposed convolutions; "simple": bilinear upsampling and one convolution (both ViTPose,
            https://arxiv.org/abs/2204.12484).
        hidden_size: Width of the transposed convolutions.
        norm: Norm after each of them: "batch" (ViTPose), which in training makes the prediction for an image depend on
            the others of its batch, on all processes; or "instance" (https://arxiv.org/abs/1607.08022), which does
            not, so that accumulated gradients are those of the whole batch. The scripts give it to fresh heads.
        scale_factor: How much finer the heatmaps of "simple" are than the patches; those of "classic" are 4 times.
        sigma: Standard deviation of the Gaussian around a keypoint in the target, in heatmap pixels.
        flip_pairs: Pairs of keypoints (numbers) that a mirror image swaps, as the left and the right eye.
        skeleton: Pairs of keypoints that a line joins in pictures.
        oks_sigmas: How exactly each keypoint can be placed, relative to the size of the object, for OKS; 0.05 each by
            default, those of COCO's 17 keypoints where their names are these.
        score_threshold: Score above which the pipeline gives a keypoint, unless it is told another, as a training has
            chosen it; `None` means all.
    """

    head: Literal["classic", "simple"] = "classic"
    hidden_size: int = option(256, "(0, inf)")
    norm: Literal["batch", "instance"] = "batch"
    scale_factor: int = option(4, "(0, inf)")
    sigma: float | int = option(2.0, "(0, inf)")
    flip_pairs: list[list[int]] | list[tuple[int, int]] | tuple[tuple[int, int], ...] = ()
    skeleton: list[list[int]] | list[tuple[int, int]] | tuple[tuple[int, int], ...] = ()
    oks_sigmas: list[float | int] | tuple[float | int, ...] | None = option(None, "(0, inf)")
    score_threshold: float | int | None = option(None, "[0, 1]")

    def _check(self) -> None:
        for name in ("flip_pairs", "skeleton"):
            wrong = [pair for pair in vars(self)[name] if len(pair) != 2 or pair[0] == pair[1] or min(pair) < 0]
            if wrong:
                raise ValueError(f"{name} has {wrong[0]}. Each entry is the numbers of two keypoints, from 0.")
        flipped = [number for pair in self.flip_pairs for number in pair]
        if len(set(flipped)) < len(flipped):
            raise ValueError(f"flip_pairs={list(self.flip_pairs)} names a keypoint twice.")


@strict
@dataclass
class HfViTTextConfig(HfViTTaskConfig):
    """The tower that reads texts: a small transformer of our own, or any text encoder of the library.

    Fields that `transformers.CLIPTextConfig` has keep its names, and but for the activation its defaults.

    Args:
        encoder_config: Configuration of a text encoder that `AutoModel` builds, as a dictionary with its `model_type`:
            `{"model_type": "bert", "num_hidden_layers": 4}`. With it, only `pooling` and `eos_token_id` count beside.
        vocab_size: Number of tokens that the tokenizer knows.
        hidden_size: Width of a token.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of attention heads; divides `hidden_size`.
        intermediate_size: Width of the hidden layer of the MLP.
        hidden_act: Activation of the MLP, a name of `transformers.activations.ACT2FN`.
        layer_norm_eps: Epsilon of the norms.
        max_position_embeddings: Number of tokens that a text can have.
        is_causal: Whether a token attends only to those before it (CLIP, https://arxiv.org/abs/2103.00020), or all
            (SigLIP, https://arxiv.org/abs/2303.15343).
        pooling: The token that represents a text: "eos", the first `eos_token_id`, or the last token where there is
            none; "last", the last one that is not hidden by the attention mask; "first"; or the "mean" of those that
            are not hidden. By default "eos", and "first" for an encoder of the library, whose own pooler is left out.
        eos_token_id: Number of the token that ends a text.
        pad_token_id: Token that fills texts up to `max_position_embeddings`, and is attended to like all others,
            whatever the attention mask says (SigLIP). `None` leaves texts as they are.
    """

    encoder_config: dict[str, Any] | None = None
    vocab_size: int = option(49408, "(0, inf)")
    hidden_size: int = option(512, "(0, inf)")
    num_hidden_layers: int = option(12, "(0, inf)")
    num_attention_heads: int = option(8, "(0, inf)")
    intermediate_size: int = option(2048, "(0, inf)")
    hidden_act: str = "gelu"
    layer_norm_eps: float = option(1e-5, "(0, inf)")
    max_position_embeddings: int = option(77, "(0, inf)")
    is_causal: bool = True
    pooling: Literal["eos", "last", "first", "mean"] | None = None
    eos_token_id: int | None = 49407
    pad_token_id: int | None = None

    @property
    def pooled_by(self) -> str:
        """The pooling of a text: `pooling`, or the default of the tower."""
        return self.pooling or ("eos" if self.encoder_config is None else "first")

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Returns saved options with given ones in their places; those of another tower are left behind."""
        return super().merge({} if "encoder_config" in given else saved, given)

    def _check(self) -> None:
        if self.pooled_by == "eos" and self.eos_token_id is None:
            raise ValueError("pooling='eos' needs an eos_token_id. Set that of the tokenizer, or pooling='last'.")
        if self.encoder_config is not None:
            self._check_encoder(self.encoder_config)
            return
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} of the text tower is not divisible by num_attention_heads="
                f"{self.num_attention_heads}."
            )
        check_activation(self.hidden_act)
        numbers = {"eos_token_id": self.eos_token_id} if self.pooled_by == "eos" else {}
        for name, number in {**numbers, "pad_token_id": self.pad_token_id}.items():
            if number is not None and not 0 <= number < self.vocab_size:
                raise ValueError(
                    f"{name}={number} is none of the vocab_size={self.vocab_size} tokens. Set it by text_options()."
                )

    def _check_encoder(self, encoder_config: dict[str, Any]) -> None:
        if not isinstance(encoder_config.get("model_type"), str):
            raise ValueError(f"encoder_config={encoder_config} does not say which model it is of. Add its model_type.")
        for entry in fields(self):
            value = vars(self)[entry.name]
            if entry.name not in ("encoder_config", "pooling", "eos_token_id") and value != entry.default:
                raise ValueError(
                    f"{entry.name}={value} is an option of our own text tower and does nothing for the "
                    f"{encoder_config['model_type']!r} of encoder_config. Set it in there."
                )


@strict
@dataclass
class HfViTContrastiveConfig(HfViTTaskConfig):
    """How images and texts are compared.

    Args:
        loss: "sigmoid": each pair of an image and a text is right or wrong by itself (SigLIP,
            https://arxiv.org/abs/2303.15343); "softmax": of all texts in the batch one is that of an image, and the
            other way round (CLIP, https://arxiv.org/abs/2103.00020).
        projection_dim: Width of what is compared. Both towers get a linear layer without bias to it (CLIP); `None`
            takes the image as its tower sums it up, and the text by a linear layer with bias to that width (SigLIP).
    """

    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    projection_dim: int | None = option(512, "(0, inf)")

    @property
    def initial_scale(self) -> float:
        """The initial logarithm of the factor of the cosine similarity, the inverse temperature."""
        return math.log(10 if self.loss == "sigmoid" else 1 / 0.07)


@strict
@dataclass
class HfViTSegmentationConfig(HfViTTaskConfig):
    """Head and losses of semantic segmentation.

    Args:
        head: "simple": 3x3 convolution, ReLU, 1x1 convolution; "linear": a norm and a 1x1 convolution, the linear
            protocol of DINOv2 (https://arxiv.org/abs/2304.07193); "conv": convolutions with progressive upsampling
            (SETR-PUP, https://arxiv.org/abs/2012.15840); "mask": class tokens that attend to the patches (Segmenter,
            https://arxiv.org/abs/2105.05633).
        hidden_size: Width of the head "conv".
        num_layers: Number of its stages, each doubling the resolution, or of the transformer blocks of "mask".
        norm: Norm of "linear": "batch" (DINOv2), which in training makes the prediction for an image depend on the
            others of its batch, on all processes; or "layer", which does not, so that accumulated gradients are those
            of the whole batch. The scripts give it to fresh heads.
        out_indices: Numbers of the blocks whose tokens the head reads side by side, the last one by default.
        cross_entropy_weight: Weight of the cross-entropy in the loss.
        dice_weight: Weight of the Dice loss (https://arxiv.org/abs/1606.04797) in the loss.
        focal_weight: Weight of the focal loss (https://arxiv.org/abs/1708.02002) in the loss.
        focal_gamma: Its exponent: how much less pixels count that are right already.
        class_weights: How much the pixels of each class count in cross-entropy and focal loss, 1 by default.
        semantic_loss_ignore_index: Number of the pixels that do not count.
        use_auxiliary_head: Whether a "simple" head on the block after two thirds of all is trained too; it plays no
            part in the result.
        auxiliary_loss_weight: Weight of its cross-entropy.
    """

    losses = ("cross_entropy_weight", "dice_weight", "focal_weight")

    head: Literal["simple", "linear", "conv", "mask"] = "conv"
    hidden_size: int = option(256, "(0, inf)")
    num_layers: int = option(2, "(0, inf)")
    norm: Literal["batch", "layer"] = "batch"
    out_indices: list[int] | tuple[int, ...] | None = None
    cross_entropy_weight: float | int = option(1.0, "[0, inf)", "0 switches it off")
    dice_weight: float | int = option(0.0, "[0, inf)", "0 switches it off")
    focal_weight: float | int = option(0.0, "[0, inf)", "0 switches it off")
    focal_gamma: float | int = option(2.0, "[0, inf)", "0 makes it the cross-entropy")
    class_weights: list[float | int] | tuple[float | int, ...] | None = option(None, "[0, inf)", "0 ignores a class")
    semantic_loss_ignore_index: int = 255
    use_auxiliary_head: bool = False
    auxiliary_loss_weight: float | int = option(0.4, "[0, inf)")

    def _check(self) -> None:
        if self.use_auxiliary_head and not self.auxiliary_loss_weight:
            raise ValueError("auxiliary_loss_weight=0 trains no auxiliary head. Set use_auxiliary_head=False.")


@strict
@dataclass
class HfViTUniversalSegmentationConfig(HfViTTaskConfig):
    """Queries, matching and losses of universal segmentation (EoMT, https://arxiv.org/abs/2503.19108).

    Args:
        num_queries: Number Q of masks that an image can have.
        num_blocks: Number of blocks at the end of the encoder that the queries pass through; 4 by default, or all of a
            smaller encoder.
        num_upscale_blocks: Number of times the resolution of the patches is doubled for the masks.
        class_weight: Weight of the classes in matching and loss.
        mask_weight: Weight of the masks' cross-entropy in matching and loss.
        dice_weight: Weight of the masks' Dice loss in matching and loss.
        no_object_weight: How much a query without a mask counts beside one with a mask in the loss of the classes.
        train_num_points: Number of points that stand for the pixels of a mask.
        oversample_ratio: How many times as many points the uncertain ones are chosen from.
        importance_sample_ratio: Share of the points that are uncertain ones; the rest is anywhere.
        score_threshold: Score above which the pipeline of the saved model and evaluations give a segment, unless told
            another, as a training has chosen it; `None` means 0.9 in the pipeline, as in the stock one, else 0.5.
    """

    losses = ("class_weight", "mask_weight", "dice_weight")

    num_queries: int = option(200, "(0, inf)")
    num_blocks: int | None = option(None, "(0, inf)")
    num_upscale_blocks: int = option(2, "[0, inf)")
    class_weight: float | int = option(2.0, "[0, inf)", "0 switches it off")
    mask_weight: float | int = option(5.0, "[0, inf)", "0 switches it off")
    dice_weight: float | int = option(5.0, "[0, inf)", "0 switches it off")
    no_object_weight: float | int = option(0.1, "(0, inf)")
    train_num_points: int = option(12544, "(0, inf)")
    oversample_ratio: float | int = option(3.0, "[1, inf)")
    importance_sample_ratio: float | int = option(0.75, "[0, 1]")
    score_threshold: float | int | None = option(None, "[0, 1]")


@strict
@dataclass
class HfViTDepthConfig(HfViTTaskConfig):
    """Head and losses of monocular depth.

    Args:
        head: "linear": a 1x1 convolution on patch and CLS tokens to the probabilities of depth bins (AdaBins,
            https://arxiv.org/abs/2011.14141, the linear protocol of DINOv2, https://arxiv.org/abs/2304.07193);
            "conv": transposed convolutions over the patch grid, D, D/2, D/4, 1; "dpt": levels of the encoder,
            reassembled at four resolutions and fused (https://arxiv.org/abs/2103.13413).
        out_indices: Numbers of the blocks that the head reads. By default the last one, for "dpt" as many as
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
        depth_estimation_type: "metric", depth in meters, or "relative", inverse depth up to scale and shift.
        max_depth: Largest metric depth in meters, beyond which labels do not count; `None` leaves it open. Heads of
            bins need it. Training chooses it for a fresh head by the training depths, 10 for rooms.
        min_depth: Depth in meters of the first bin, and the least of a label that counts in logarithms.
        num_bins: Number of bins of "linear" under metric depth.
        loss: "silog" (scale-invariant logarithmic, https://arxiv.org/abs/1406.2283), "l1" or "mse" for metric depth;
            "ssi" (scale- and shift-invariant, https://arxiv.org/abs/1907.01341) for relative. By default the first
            that fits.
        silog_lambda: How much of a common factor "silog" forgives: 0 nothing, 1 all.
        gradient_loss_weight: Weight of the gradient matching that goes with "ssi".
    """

    head: Literal["linear", "conv", "dpt"] = "dpt"
    out_indices: list[int] | tuple[int, ...] | None = None
    neck_hidden_sizes: list[int] | tuple[int, ...] = option((96, 192, 384, 768), "(0, inf)")
    reassemble_factors: list[float | int] | tuple[float | int, ...] = option((4, 2, 1, 0.5), "(0, inf)")
    readout_type: Literal["ignore", "add", "project"] = "project"
    fusion_hidden_size: int = option(256, "(0, inf)")
    head_hidden_size: int = option(32, "(0, inf)")
    doubles_resolution: bool = False
    depth_estimation_type: Literal["metric", "relative"] = "metric"
    max_depth: float | int | None = 10.0
    min_depth: float | int = option(1e-3, "(0, inf)")
    num_bins: int = option(256, "(0, inf)")
    loss: Literal["silog", "l1", "mse", "ssi"] | None = None
    silog_lambda: float | int = option(0.5, "[0, 1]")
    gradient_loss_weight: float | int = option(0.5, "[0, inf)")

    def _check(self) -> None:
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
            raise ValueError(f"max_depth={self.max_depth} must be more than min_depth={self.min_depth}, in meters.")
        if self.depth_estimation_type == "metric" and self.loss == "ssi":
            raise ValueError("loss='ssi' leaves scale and shift open, so it needs depth_estimation_type='relative'.")
        if self.depth_estimation_type == "relative" and self.loss not in (None, "ssi"):
            raise ValueError(f"loss={self.loss!r} needs meters, not depth_estimation_type='relative'. Set loss='ssi'.")
        if self.head == "linear" and self.depth_estimation_type == "metric" and self.max_depth is None:
            raise ValueError("The bins of head='linear' need a max_depth in meters, such as 10 indoors, 80 outdoors.")


@strict
@dataclass
class HfViTMaskedImageModelingConfig(HfViTTaskConfig):
    """Masks, decoder and loss of masked image modeling.

    Args:
        objective: "mae": the encoder sees the patches that are not masked, a decoder predicts the others (MAE,
            https://arxiv.org/abs/2111.06377); "simmim": a mask token takes the place of masked patches, and one linear
            layer predicts their pixels (SimMIM, https://arxiv.org/abs/2111.09886). It needs `use_mask_token`.
        mask_ratio: Share of the patches that is masked, in (0, 1); by default 0.75 for "mae" and 0.6 for "simmim".
        mask_type: "random", or "blockwise": rectangles (BEiT, https://arxiv.org/abs/2106.08254).
        mask_unit: How many patches a side the squares have that "random" masks as one; SimMIM takes 2 of 16 pixels.
        norm_pix_loss: Whether the pixels of each patch are normalized by their mean and deviation before they are
            compared; for "mae", as all that follow.
        decoder_hidden_size: Width of the decoder.
        decoder_num_hidden_layers: Number of its blocks.
        decoder_num_attention_heads: Number of its attention heads.
        decoder_intermediate_size: Width of the hidden layer of its MLPs.
    """

    choice = "objective"

    objective: Literal["mae", "simmim"] = "mae"
    mask_ratio: float | None = option(None, "(0, 1)", "some patches are masked, some are seen")
    mask_type: Literal["random", "blockwise"] = "random"
    mask_unit: int = option(1, "(0, inf)")
    norm_pix_loss: bool = option(True, of="mae")
    decoder_hidden_size: int = option(512, "(0, inf)", of="mae")
    decoder_num_hidden_layers: int = option(8, "(0, inf)", of="mae")
    decoder_num_attention_heads: int = option(16, "(0, inf)", of="mae")
    decoder_intermediate_size: int = option(2048, "(0, inf)", of="mae")

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

    def _check(self) -> None:
        if self.mask_type == "blockwise" and self.mask_unit != 1:
            raise ValueError(f"mask_unit={self.mask_unit} is for mask_type='random'. Leave it out for 'blockwise'.")
        if self.decoder_hidden_size % 4 or self.decoder_hidden_size % self.decoder_num_attention_heads:
            raise ValueError(
                f"decoder_hidden_size={self.decoder_hidden_size} must be a multiple of 4, for its positions, and of "
                f"decoder_num_attention_heads={self.decoder_num_attention_heads}."
            )


@strict
@dataclass
class HfViTJointEmbeddingConfig(HfViTTaskConfig):
    """Projector and loss of joint embeddings.

    Args:
        objective: "lejepa": views are drawn to the mean of the global ones, and embeddings to a normal distribution
            (https://arxiv.org/abs/2511.08544); "dino": views are assigned to the prototypes to which the averaged
            weights, a teacher, assign other views of the image, and masked patches likewise, in the way of DINOv2
            (https://arxiv.org/abs/2304.07193). It needs `use_mask_token`.
        projector_hidden_size: Width of the hidden layers of the projector.
        embedding_size: Number E of values that views are compared by.
        gaussian_weight: Weight of how far embeddings are from a standard normal distribution, in (0, 1); the views'
            distance from each other has the rest.
        num_slices: Number of random directions along which the distribution is looked at, drawn at every step; for
            "lejepa", as `gaussian_weight`.
        num_prototypes: Number K of prototypes; for "dino", as all that follow.
        student_temperature: By which cosines with prototypes are divided.
        teacher_temperature: The same for the teacher's, which rises from 0.04 over the first 30 % of training steps.
        patch_weight: Weight of the loss of masked patches, beside 1 for that of views.
        koleo_weight: Weight of how near features of different images are (https://arxiv.org/abs/1806.03198).
    """

    choice = "objective"

    objective: Literal["lejepa", "dino"] = "lejepa"
    projector_hidden_size: int = option(2048, "(0, inf)")
    embedding_size: int = option(64, "(0, inf)")
    gaussian_weight: float = option(0.05, "(0, 1)", "at 0 all embeddings become one", of="lejepa")
    num_slices: int = option(256, "(0, inf)", of="lejepa")
    num_prototypes: int = option(1024, "(0, inf)", of="dino")
    student_temperature: float = option(0.1, "(0, inf)", "it divides cosines", of="dino")
    teacher_temperature: float = option(0.05, "(0, inf)", "it divides cosines", of="dino")
    patch_weight: float = option(1.0, "[0, inf)", "0 leaves patches out", of="dino")
    koleo_weight: float = option(0.1, "[0, inf)", "0 leaves the distance of images out", of="dino")

    def _check(self) -> None:
        if self.teacher_temperature < LEAST_TEACHER_TEMPERATURE:
            raise ValueError(
                f"teacher_temperature={self.teacher_temperature} is too low: use {LEAST_TEACHER_TEMPERATURE}."
            )


# Those that a model goes by. A saved model names all its options, as a default may change that it has not named.
MODEL_OPTIONS: dict[str, tuple[str, ...]] = {
    "HfViTForSemanticSegmentation": ("segmentation_config",),
    "HfViTForUniversalSegmentation": ("universal_segmentation_config",),
    "HfViTForDepthEstimation": ("depth_config",),
    "HfViTForObjectDetection": ("detection_config",),
    "HfViTForKeypointDetection": ("keypoint_config",),
    "HfViTForMaskedImageModeling": ("masked_image_modeling_config",),
    "HfViTForJointEmbedding": ("joint_embedding_config",),
    "HfViTForZeroShotImageClassification": ("text_config", "contrastive_config"),
}


class HfViTTaskFields(PreTrainedConfig):
    """The fields of `HfViTConfig` that hold the options of the tasks.

    A saved model names all options of its own task in config.json. One that stands in no file has the default here,
    which is that of version 0.1.0 for good: better ones belong into presets and trainings, which write them down.

    Args:
        segmentation_config: Options of `HfViTForSemanticSegmentation`, a `HfViTSegmentationConfig` or a dictionary;
            `None` means its defaults, as for the following.
        universal_segmentation_config: Options of `HfViTForUniversalSegmentation`.
        depth_config: Options of `HfViTForDepthEstimation`.
        detection_config: Options of `HfViTForObjectDetection`.
        keypoint_config: Options of `HfViTForKeypointDetection`.
        masked_image_modeling_config: Options of `HfViTForMaskedImageModeling`.
        joint_embedding_config: Options of `HfViTForJointEmbedding`.
        text_config: Options of the text tower of `HfViTForZeroShotImageClassification`.
        contrastive_config: Options of its comparison of images with texts.
    """

    segmentation_config: HfViTSegmentationConfig | dict[str, Any] | None = None
    universal_segmentation_config: HfViTUniversalSegmentationConfig | dict[str, Any] | None = None
    depth_config: HfViTDepthConfig | dict[str, Any] | None = None
    detection_config: HfViTDetectionConfig | dict[str, Any] | None = None
    keypoint_config: HfViTKeypointConfig | dict[str, Any] | None = None
    masked_image_modeling_config: HfViTMaskedImageModelingConfig | dict[str, Any] | None = None
    joint_embedding_config: HfViTJointEmbeddingConfig | dict[str, Any] | None = None
    text_config: HfViTTextConfig | dict[str, Any] | None = None
    contrastive_config: HfViTContrastiveConfig | dict[str, Any] | None = None


# The fields of `HfViTConfig` that hold them
TASK_CONFIGS: dict[str, type[HfViTTaskConfig]] = {
    name: get_args(kinds)[0] for name, kinds in vars(HfViTTaskFields)["__annotations__"].items()
}
