"""Classes of task options, which `HfViTConfig` stores in addition to the fields of the backbone."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .calibration import HfViTCalibrationConfig
from .nested_options import HfViTMultiTaskConfig, HfViTTaskConfig, check_activation, option


MIN_TEACHER_TEMPERATURE = 0.025  # lower temperatures exceed the range of float32 in `assign`


def check_decoder(options: Any) -> None:
    """Raises `ValueError` if the width of a decoder does not fit its positions and attention heads."""
    if options.decoder_hidden_size % 4 or options.decoder_hidden_size % options.decoder_num_attention_heads:
        raise ValueError(
            f"decoder_hidden_size={options.decoder_hidden_size} must be a multiple of 4, for positions, and of "
            f"decoder_num_attention_heads={options.decoder_num_attention_heads}."
        )


@strict
@dataclass
class HfViTDetectionConfig(HfViTTaskConfig):
    """Options of the decoder, matching and losses of object detection.

    Args:
        decoder: "queries": learned queries are processed together with the patches in blocks of the encoder (YOLOS,
            https://arxiv.org/abs/2106.00666) or in additional blocks after the encoder; "deformable": a projector
            computes a feature pyramid from the encoder, and queries are initialized at the best positions of the
            pyramid and sample features around these positions (LW-DETR, https://arxiv.org/abs/2406.03459).
        num_queries: Number Q of queries, the largest number of objects that can be detected in an image.
        num_layers: For "deformable", number of decoder layers, by default 3. For "queries", number of additional
            blocks after the encoder, by default 0.
        num_blocks: Number of blocks at the end of the encoder that process the queries, by default all; only for
            "queries".
        use_mid_position_embeddings: Whether position embeddings are added after each block with queries, except the
            last, as in some YOLOS models; only for "queries".
        hidden_size: Width of the decoder. All options from this one to `num_groups` apply only to "deformable".
        num_attention_heads: Number of self-attention heads. The deformable attention has twice as many heads.
        num_points: Number of points that each attention head samples per pyramid level.
        scale_factors: Resolution of each level of the pyramid relative to the patches: 2, 1, 0.5 or 0.25.
        out_indices: Indices of the blocks whose tokens the projector reads, by default spread evenly over the encoder.
            Blocks after the last one in the list are neither run nor trained.
        projector_norm: Norm of the projector: "batch" (LW-DETR) or "layer" (RF-DETR,
            https://github.com/roboflow/rf-detr), which is independent of the other images of a batch.
        num_groups: Number of sets of queries that are trained in parallel (Group DETR,
            https://arxiv.org/abs/2207.13085).
        class_loss: "cross_entropy" (DETR, with an additional class for no object) or "iou_aware" (IA-BCE of
            https://arxiv.org/abs/2406.03459: the target of a class score depends on the IoU of the box); by default
            "cross_entropy" for "queries" and "iou_aware" for "deformable".
        bbox_weight: Weight of the L1 distance of boxes in matching and loss. The class loss has weight 1.
        giou_weight: Weight of the generalized IoU of boxes (https://arxiv.org/abs/1902.09630) in matching and loss.
        score_threshold: Default score threshold of the pipeline of a saved model. Training runs set it; `None` means
            0.5, the default of transformers' pipeline.
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
    bbox_weight: float | int = option(5.0, "[0, inf)", "0 disables it")
    giou_weight: float | int = option(2.0, "[0, inf)", "0 disables it")
    score_threshold: float | int | None = option(None, "[0, 1]")

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Overrides saved options by given options. If a different decoder is given, drops all saved options."""
        decoder = saved.get("decoder", cls.decoder)
        return super().merge(saved if given.get("decoder", decoder) == decoder else {}, given)

    def _check(self) -> None:
        least = 1 if self.decoder == "deformable" else 0
        if self.num_layers is not None and self.num_layers < least:
            raise ValueError(f"num_layers={self.num_layers} must be at least {least} for decoder={self.decoder!r}.")
        if self.decoder == "queries" and self.num_blocks == 0 and not self.num_layers:
            raise ValueError("num_blocks=0 without num_layers runs no block on queries. Set one of them to 1 or more.")
        if self.hidden_size % (8 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of 8 times num_attention_heads="
                f"{self.num_attention_heads}. For example, set hidden_size={8 * self.num_attention_heads}."
            )
        unknown = [factor for factor in self.scale_factors if factor not in (2, 1, 0.5, 0.25)]
        if unknown or not self.scale_factors:
            raise ValueError(f"scale_factors={list(self.scale_factors)} must be one or more of 2, 1, 0.5 and 0.25.")
        if self.decoder == "deformable" and self.class_loss == "cross_entropy":
            raise ValueError(
                "class_loss='cross_entropy' needs a class for no object, but decoder='deformable' has none. Set "
                "class_loss='iou_aware'."
            )


@strict
@dataclass
class HfViTKeypointConfig(HfViTTaskConfig):
    """Options of the head, targets and metadata of keypoint detection. `HfViTConfig.id2label` names the K keypoints.

    Args:
        head: "classic": transposed convolutions; "simple": bilinear upsampling and one convolution (both ViTPose,
            https://arxiv.org/abs/2204.12484).
        hidden_size: Width of the transposed convolutions.
        norm: Norm after each transposed convolution: "batch" (ViTPose), which in training uses statistics of the whole
            batch on all processes; or "instance" (https://arxiv.org/abs/1607.08022), which uses statistics of a single
            image, so that gradients can be accumulated exactly. `hf-vit train` uses "instance" for new heads.
        scale_factor: Upsampling factor of "simple" from the patch grid to the heatmap. "classic" always uses 4.
        sigma: Standard deviation, in heatmap pixels, of the Gaussian around each keypoint in the target heatmap.
        flip_pairs: Pairs of keypoint indices that are swapped in a mirrored image, such as left and right eye.
        skeleton: Pairs of keypoint indices that are connected by a line in visualizations.
        oks_sigmas: Annotation accuracy of each keypoint relative to the object size, for object keypoint similarity
            (OKS). The default is 0.05, or the values of COCO if the keypoints have the names of the 17 COCO keypoints.
        score_threshold: Default score threshold of the pipeline. Training runs set it; `None` means that all keypoints
            are returned.
        object_share: Median area of the boxes in training, relative to the area of their images. If it is small, the
            pipeline warns about images without boxes. Training runs set it; `None` means that it is unknown.
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
    object_share: float | int | None = option(None, "[0, inf)")

    def _check(self) -> None:
        for name in ("flip_pairs", "skeleton"):
            wrong = [pair for pair in vars(self)[name] if len(pair) != 2 or pair[0] == pair[1] or min(pair) < 0]
            if wrong:
                raise ValueError(f"{name} has {wrong[0]}. Each entry must be two keypoint indices, counted from 0.")
        flipped = [number for pair in self.flip_pairs for number in pair]
        if len(set(flipped)) < len(flipped):
            raise ValueError(f"flip_pairs={list(self.flip_pairs)} contains a keypoint twice.")


@strict
@dataclass
class HfViTTextConfig(HfViTTaskConfig):
    """Options of the text tower, a small transformer of this package or any text encoder of transformers.

    Fields have the same names and, except for the activation, the same defaults as in `transformers.CLIPTextConfig`.

    Args:
        encoder_config: Configuration of a text encoder for `AutoModel`, as a dictionary that includes `model_type`,
            such as `{"model_type": "bert", "num_hidden_layers": 4}`. If given, the only other options with an effect
            are `pooling` and `eos_token_id`.
        vocab_size: Number of tokens in the vocabulary of the tokenizer.
        hidden_size: Width of a token.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of attention heads; divides `hidden_size`.
        intermediate_size: Width of the hidden layer of the MLP.
        hidden_act: Activation of the MLP, a name of `transformers.activations.ACT2FN`.
        layer_norm_eps: Epsilon of the norms.
        max_position_embeddings: Maximum number of tokens of a text.
        is_causal: Whether a token attends only to preceding tokens (CLIP, https://arxiv.org/abs/2103.00020) instead of
            all tokens (SigLIP, https://arxiv.org/abs/2303.15343).
        pooling: Token that represents a text: "eos", the first `eos_token_id`, or the last token if there is none;
            "last", the last token not masked by the attention mask; "first"; or the "mean" of the tokens that are not
            masked. By default "eos", or "first" for an encoder of transformers, whose own pooler is not used.
        eos_token_id: Token id of the end of a text.
        pad_token_id: Token id with which texts are padded to `max_position_embeddings`. Padding is attended to like
            other tokens, regardless of the attention mask (SigLIP). `None` disables padding.
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
    def effective_pooling(self) -> str:
        """Pooling of texts: `pooling`, or the default of the text tower."""
        return self.pooling or ("eos" if self.encoder_config is None else "first")

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Overrides saved options by given options. If a different text encoder is given, drops all saved options."""
        return super().merge({} if "encoder_config" in given else saved, given)

    def _check(self) -> None:
        if self.effective_pooling == "eos" and self.eos_token_id is None:
            raise ValueError("pooling='eos' needs an eos_token_id. Use the one of the tokenizer, or pooling='last'.")
        if self.encoder_config is not None:
            self._check_encoder(self.encoder_config)
            return
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} of the text tower is not divisible by num_attention_heads="
                f"{self.num_attention_heads}."
            )
        check_activation(self.hidden_act)
        numbers = {"eos_token_id": self.eos_token_id} if self.effective_pooling == "eos" else {}
        for name, number in {**numbers, "pad_token_id": self.pad_token_id}.items():
            if number is not None and not 0 <= number < self.vocab_size:
                raise ValueError(
                    f"{name}={number} is not in [0, vocab_size={self.vocab_size}). Use the options that "
                    "HfViTProcessor.text_options() returns."
                )

    def _check_encoder(self, encoder_config: dict[str, Any]) -> None:
        if not isinstance(encoder_config.get("model_type"), str):
            raise ValueError(f"encoder_config={encoder_config} has no model_type. Add that of the text encoder.")
        for entry in fields(self):
            value = vars(self)[entry.name]
            if entry.name not in ("encoder_config", "pooling", "eos_token_id") and value != entry.default:
                raise ValueError(
                    f"{entry.name}={value} applies only to the built-in text tower and has no effect on the "
                    f"{encoder_config['model_type']!r} of encoder_config. Set it in encoder_config."
                )


@strict
@dataclass
class HfViTContrastiveConfig(HfViTTaskConfig):
    """Options of contrastive image-text training: loss and embedding width.

    Args:
        loss: "sigmoid": each image-text pair of the batch is classified as matching or not (SigLIP,
            https://arxiv.org/abs/2303.15343); "softmax": the matching text in the batch is predicted for each
            image, and the matching image for each text (CLIP, https://arxiv.org/abs/2103.00020).
        projection_dim: Width of the embeddings. Both towers get a linear projection without bias (CLIP). With `None`,
            images are not projected, and texts are projected, with a bias, to the width of the pooled image (SigLIP).
    """

    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    projection_dim: int | None = option(512, "(0, inf)")

    @property
    def initial_scale(self) -> float:
        """Initial logarithm of the inverse temperature, a factor of the cosine similarity."""
        return math.log(10 if self.loss == "sigmoid" else 1 / 0.07)


@strict
@dataclass
class HfViTSegmentationConfig(HfViTTaskConfig):
    """Options of the head and losses of semantic segmentation.

    Args:
        head: "simple": 3x3 convolution, ReLU, 1x1 convolution; "linear": a norm and a 1x1 convolution, the linear
            protocol of DINOv2 (https://arxiv.org/abs/2304.07193); "conv": convolutions with progressive upsampling
            (SETR-PUP, https://arxiv.org/abs/2012.15840); "mask": class tokens that attend to the patches (Segmenter,
            https://arxiv.org/abs/2105.05633).
        hidden_size: Width of the head "conv".
        num_layers: Number of stages of "conv", each of which doubles the resolution, or of transformer blocks of
            "mask".
        norm: Norm of "linear": "batch" (DINOv2), which in training uses statistics of the whole batch on all
            processes; or "layer", which uses statistics of a patch, so that gradients can be accumulated exactly.
            `hf-vit train` uses "layer" for new heads.
        out_indices: Indices of the blocks whose tokens are concatenated as input of the head, by default the last one.
        cross_entropy_weight: Weight of the cross-entropy in the loss.
        dice_weight: Weight of the Dice loss (https://arxiv.org/abs/1606.04797) in the loss.
        focal_weight: Weight of the focal loss (https://arxiv.org/abs/1708.02002) in the loss.
        focal_gamma: Exponent of the focal loss; larger values reduce the weight of pixels that are already correct.
        class_weights: Weight of the pixels of each class in cross-entropy and focal loss, by default 1.
        semantic_loss_ignore_index: Label of ignored pixels.
        use_auxiliary_head: Whether to also train a "simple" head on the features after two thirds of the encoder. The
            auxiliary head does not change the output.
        auxiliary_loss_weight: Weight of the cross-entropy of the auxiliary head.
    """

    losses = ("cross_entropy_weight", "dice_weight", "focal_weight")

    head: Literal["simple", "linear", "conv", "mask"] = "conv"
    hidden_size: int = option(256, "(0, inf)")
    num_layers: int = option(2, "(0, inf)")
    norm: Literal["batch", "layer"] = "batch"
    out_indices: list[int] | tuple[int, ...] | None = None
    cross_entropy_weight: float | int = option(1.0, "[0, inf)", "0 disables it")
    dice_weight: float | int = option(0.0, "[0, inf)", "0 disables it")
    focal_weight: float | int = option(0.0, "[0, inf)", "0 disables it")
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
    """Options of the head, matching and losses of universal segmentation.

    Args:
        head: "queries": the last blocks of the encoder process learned queries together with the patches, so they must
            be trained (EoMT, https://arxiv.org/abs/2503.19108); "mask": additional blocks after the encoder process
            the queries and the fused features of four depths of the encoder, which can be frozen (PMT,
            https://arxiv.org/abs/2603.25398).
        num_queries: Number Q of queries, the largest number of masks in an image.
        num_blocks: Number of blocks that process the queries: the last blocks of the encoder for "queries", additional
            blocks for "mask"; by default 4, or the number of blocks of a smaller encoder.
        num_upscale_blocks: Number of times that the resolution of the patch features is doubled for the masks.
        class_weight: Weight of the classes in matching and loss.
        mask_weight: Weight of the cross-entropy of masks in matching and loss.
        dice_weight: Weight of the Dice loss of masks in matching and loss.
        no_object_weight: Weight of queries without a target mask in the class loss. Other queries have weight 1.
        train_num_points: Number of points at which each mask is sampled for the loss.
        oversample_ratio: Number of random candidates per sampled point, from which uncertain points are selected.
        importance_sample_ratio: Fraction of the sampled points that are uncertain points; the others are random.
        score_threshold: Default threshold, for scores before calibration, of the pipeline of a saved model and of
            evaluations. Training runs set it; `None` means 0.9 in the pipeline, as in transformers' pipeline, and 0.5
            in evaluations.
    """

    choice = "head"
    losses = ("class_weight", "mask_weight", "dice_weight")

    head: Literal["queries", "mask"] = "queries"
    num_queries: int = option(200, "(0, inf)")
    num_blocks: int | None = option(None, "(0, inf)")
    num_upscale_blocks: int = option(2, "[0, inf)")
    class_weight: float | int = option(2.0, "[0, inf)", "0 disables it")
    mask_weight: float | int = option(5.0, "[0, inf)", "0 disables it")
    dice_weight: float | int = option(5.0, "[0, inf)", "0 disables it")
    no_object_weight: float | int = option(0.1, "(0, inf)")
    train_num_points: int = option(12544, "(0, inf)")
    oversample_ratio: float | int = option(3.0, "[1, inf)")
    importance_sample_ratio: float | int = option(0.75, "[0, 1]")
    score_threshold: float | int | None = option(None, "[0, 1]")


@strict
@dataclass
class HfViTDepthConfig(HfViTTaskConfig):
    """Options of the head and losses of monocular depth estimation.

    Args:
        head: "linear": a 1x1 convolution from patch and CLS tokens to probabilities of depth bins (AdaBins,
            https://arxiv.org/abs/2011.14141; the linear protocol of DINOv2, https://arxiv.org/abs/2304.07193);
            "conv": transposed convolutions on the patch grid, with widths D, D/2, D/4 and 1; "dpt": features of
            several blocks are reassembled at four resolutions and fused (https://arxiv.org/abs/2103.13413).
        out_indices: Indices of the blocks whose features the head uses, by default the last block. The default of
            "dpt" is as many evenly spaced blocks as there are `neck_hidden_sizes`.
        neck_hidden_sizes: Widths of the levels of "dpt", from the finest to the coarsest.
        reassemble_factors: Resolution of each level of "dpt" relative to the patch grid: 1, 2, 3, … or 1/2, 1/3, …
        readout_type: How "dpt" uses the CLS token: "ignore" it, "add" it to each patch, or "project" each patch
            together with it.
        fusion_hidden_size: Width of the fusion layers of "dpt".
        head_hidden_size: Width of the second-to-last layer of "dpt".
        doubles_resolution: Whether "dpt" doubles the resolution at each fusion and at the end, as in DPT. The output
            has about 16 times the resolution of the patch grid. Otherwise, each fusion resizes its output to the size
            of the next level, and the last fusion to the image size, as in Depth Anything
            (https://arxiv.org/abs/2401.10891).
        depth_estimation_type: "metric", depth in meters, or "relative", inverse depth up to scale and shift.
        max_depth: Maximum metric depth in meters; larger labels are ignored, and `None` means no limit. Heads with
            depth bins require a limit. Training runs set it for new heads from the training data, for example 10 for
            rooms.
        min_depth: Depth in meters of the first bin, and the smallest label used in logarithms.
        num_bins: Number of depth bins of "linear" for metric depth.
        loss: "silog" (scale-invariant logarithmic, https://arxiv.org/abs/1406.2283), "l1" or "mse" for metric depth;
            "ssi" (scale- and shift-invariant, https://arxiv.org/abs/1907.01341) for relative depth. By default "silog"
            or "ssi", according to `depth_estimation_type`.
        silog_lambda: Fraction, from 0 to 1, of the squared error due to a wrong global scale that "silog" ignores.
        gradient_loss_weight: Weight of the gradient matching loss that is added to "ssi".
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
                f"{list(self.reassemble_factors)} must have the same length."
            )
        steps = [max(factor, 1 / factor) for factor in self.reassemble_factors]
        if not all(math.isclose(step, round(step)) for step in steps):
            raise ValueError(
                f"reassemble_factors={list(self.reassemble_factors)} must be whole numbers or one divided by whole "
                "numbers, such as 4, 2, 1 and 0.5."
            )
        if self.max_depth is not None and not self.min_depth < self.max_depth < math.inf:
            raise ValueError(f"max_depth={self.max_depth} must be more than min_depth={self.min_depth}, in meters.")
        if self.depth_estimation_type == "metric" and self.loss == "ssi":
            raise ValueError("loss='ssi' ignores scale and shift, so it needs depth_estimation_type='relative'.")
        if self.depth_estimation_type == "relative" and self.loss not in (None, "ssi"):
            raise ValueError(
                f"loss={self.loss!r} needs metric depth. For depth_estimation_type='relative', set loss='ssi'."
            )
        if self.head == "linear" and self.depth_estimation_type == "metric" and self.max_depth is None:
            raise ValueError("head='linear' needs a max_depth in meters, such as 10 indoors or 80 outdoors.")


@strict
@dataclass
class HfViTMaskedImageModelingConfig(HfViTTaskConfig):
    """Options of the masks, decoder and loss of masked image modeling.

    Args:
        objective: "mae": the encoder processes the visible patches, and a decoder predicts the masked ones (MAE,
            https://arxiv.org/abs/2111.06377); "simmim": a mask token replaces masked patches, and a linear layer
            predicts their pixels (SimMIM, https://arxiv.org/abs/2111.09886), which needs `use_mask_token`.
        mask_ratio: Fraction of masked patches, in (0, 1); by default 0.75 for "mae" and 0.6 for "simmim".
        mask_type: "random", or "blockwise": rectangles (BEiT, https://arxiv.org/abs/2106.08254).
        mask_unit: Side, in patches, of the squares that mask type "random" masks as a whole. SimMIM with patch size 16
            uses 2.
        norm_pix_loss: Whether target pixels are normalized by the mean and standard deviation of their patch. This
            option and the following ones apply only to "mae".
        decoder_hidden_size: Width of the decoder.
        decoder_num_hidden_layers: Number of decoder blocks.
        decoder_num_attention_heads: Number of attention heads of the decoder.
        decoder_intermediate_size: Width of the hidden layer of the MLPs of the decoder.
    """

    choice = "objective"

    objective: Literal["mae", "simmim"] = "mae"
    mask_ratio: float | None = option(None, "(0, 1)", "some patches must be masked and some visible")
    mask_type: Literal["random", "blockwise"] = "random"
    mask_unit: int = option(1, "(0, inf)")
    norm_pix_loss: bool = option(True, of="mae")
    decoder_hidden_size: int = option(512, "(0, inf)", of="mae")
    decoder_num_hidden_layers: int = option(8, "(0, inf)", of="mae")
    decoder_num_attention_heads: int = option(16, "(0, inf)", of="mae")
    decoder_intermediate_size: int = option(2048, "(0, inf)", of="mae")

    @property
    def masked_share(self) -> float:
        """Fraction of masked patches: `mask_ratio`, or the default of the objective."""
        if self.mask_ratio is not None:
            return self.mask_ratio
        return 0.75 if self.objective == "mae" else 0.6

    @property
    def normalizes_patches(self) -> bool:
        """Whether target pixels are normalized by the mean and standard deviation of their patch."""
        return self.objective == "mae" and self.norm_pix_loss

    def _check(self) -> None:
        if self.mask_type == "blockwise" and self.mask_unit != 1:
            raise ValueError(
                f"mask_unit={self.mask_unit} is only for mask_type='random'. Leave it out for 'blockwise'."
            )
        check_decoder(self)


@strict
@dataclass
class HfViTReconstructionConfig(HfViTTaskConfig):
    """Options of the latents, decoder and loss of image reconstruction.

    Args:
        latent_type: "kl": a linear layer maps each patch to the mean and variance of a few numbers (the autoencoder of
            latent diffusion, https://arxiv.org/abs/2112.10752); "rae": the tokens of the encoder are the latents,
            standardized per channel (representation autoencoder, https://arxiv.org/abs/2510.11690).
        latent_channels: Number of latents per patch; only for "kl".
        kl_weight: Weight of the mean KL divergence per latent from a standard normal distribution; only for "kl".
        num_latent_layers: Number of last blocks whose normalized outputs are summed; only for "rae".
        noise_std: Standard deviation of the normal distribution from which the noise level of the latents of an image
            is drawn in training, so that the decoder also accepts generated latents; only for "rae".
        scaling_factor: Factor by which latents are multiplied to get a variance of about 1, as in diffusers. Training
            runs set it.
        pixel_loss: "l2" (squared differences, as in PSNR) or "l1" (absolute differences).
        feature_weight: Weight of the cosine distance between the features of the image and of its reconstruction,
            computed by a frozen encoder.
        decoder_hidden_size: Width of the decoder.
        decoder_num_hidden_layers: Number of decoder blocks.
        decoder_num_attention_heads: Number of attention heads of the decoder.
        decoder_intermediate_size: Width of the hidden layer of the MLPs of the decoder.
    """

    choice = "latent_type"

    latent_type: Literal["kl", "rae"] = "kl"
    latent_channels: int = option(16, "(0, inf)", of="kl")
    kl_weight: float = option(1e-5, "[0, inf)", of="kl")
    num_latent_layers: int = option(1, "(0, inf)", of="rae")
    noise_std: float = option(0.0, "[0, inf)", of="rae")
    scaling_factor: float = option(1.0, "(0, inf)")
    pixel_loss: Literal["l1", "l2"] = "l2"
    feature_weight: float = option(0.0, "[0, inf)")
    decoder_hidden_size: int = option(512, "(0, inf)")
    decoder_num_hidden_layers: int = option(8, "(0, inf)")
    decoder_num_attention_heads: int = option(16, "(0, inf)")
    decoder_intermediate_size: int = option(2048, "(0, inf)")

    def _check(self) -> None:
        check_decoder(self)


@strict
@dataclass
class HfViTJointEmbeddingConfig(HfViTTaskConfig):
    """Options of the projector and loss of joint-embedding pretraining.

    Args:
        objective: "lejepa": the embeddings of all views are pulled to the mean of the global views, and the
            distribution of embeddings to a normal distribution (https://arxiv.org/abs/2511.08544). "dino": a teacher,
            the model with averaged weights, assigns views and patches to prototypes, and the student predicts these
            assignments from other views and masked patches (DINOv2, https://arxiv.org/abs/2304.07193). "dino" requires
            `use_mask_token`.
        projector_hidden_size: Width of the hidden layers of the projector.
        embedding_size: Width E of the embeddings.
        gaussian_weight: Weight w in (0, 1) of the distance between embeddings and a standard normal distribution. The
            distance between views has weight 1 - w. Only for "lejepa".
        num_slices: Number of random directions, drawn at each step, along which the distribution of embeddings is
            tested; only for "lejepa".
        num_prototypes: Number K of prototypes. This and the following options apply only to "dino".
        student_temperature: Temperature that divides the cosine similarities of student embeddings and prototypes.
        teacher_temperature: Final temperature of the teacher. The temperature rises from 0.04 to this value in the
            first 30 % of training steps.
        patch_weight: Weight of the loss of masked patches, relative to the loss of views.
        koleo_weight: Weight of the KoLeo loss, which spreads the features of different images
            (https://arxiv.org/abs/1806.03198).
    """

    choice = "objective"

    objective: Literal["lejepa", "dino"] = "lejepa"
    projector_hidden_size: int = option(2048, "(0, inf)")
    embedding_size: int = option(64, "(0, inf)")
    gaussian_weight: float = option(0.05, "(0, 1)", "at 0 all embeddings collapse to one point", of="lejepa")
    num_slices: int = option(256, "(0, inf)", of="lejepa")
    num_prototypes: int = option(1024, "(0, inf)", of="dino")
    student_temperature: float = option(0.1, "(0, inf)", "it divides cosines", of="dino")
    teacher_temperature: float = option(0.05, "(0, inf)", "it divides cosines", of="dino")
    patch_weight: float = option(1.0, "[0, inf)", "0 disables the loss of masked patches", of="dino")
    koleo_weight: float = option(0.1, "[0, inf)", "0 disables the KoLeo loss", of="dino")

    def _check(self) -> None:
        if self.teacher_temperature < MIN_TEACHER_TEMPERATURE:
            raise ValueError(
                f"teacher_temperature={self.teacher_temperature} must be at least {MIN_TEACHER_TEMPERATURE}."
            )


@strict
@dataclass
class HfViTCaptionConfig(HfViTTaskConfig):
    """Options of the decoder and loss of image captioning.

    Args:
        vocab_size: Number of tokens in the vocabulary of the tokenizer.
        hidden_size: Width of a token.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of attention heads; divides `hidden_size`.
        intermediate_size: Width of the hidden layer of the MLP.
        max_position_embeddings: Maximum number of tokens of a text, including start and end.
        dropout: Dropout rate of the residual branches of the decoder.
        label_smoothing: Probability of the training targets that is spread evenly over all tokens
            (https://arxiv.org/abs/1512.00567).
        bos_token_id: Token id with which each text starts.
        eos_token_id: Token id of the end of a text.
        pad_token_id: Token id of padding.
    """

    vocab_size: int = option(8192, "(0, inf)")
    hidden_size: int = option(384, "(0, inf)")
    num_hidden_layers: int = option(4, "(0, inf)")
    num_attention_heads: int = option(6, "(0, inf)")
    intermediate_size: int = option(1536, "(0, inf)")
    max_position_embeddings: int = option(64, "[2, inf)")
    dropout: float = option(0.1, "[0, 1)")
    label_smoothing: float = option(0.1, "[0, 1)")
    bos_token_id: int = option(1, "[0, inf)")
    eos_token_id: int = option(2, "[0, inf)")
    pad_token_id: int = option(0, "[0, inf)")

    def _check(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} of the caption decoder is not divisible by num_attention_heads="
                f"{self.num_attention_heads}."
            )
        tokens = self.bos_token_id, self.eos_token_id, self.pad_token_id
        if max(tokens) >= self.vocab_size:
            raise ValueError(
                f"The special tokens {tokens} exceed vocab_size={self.vocab_size}. Set vocab_size to that of the "
                "tokenizer."
            )


# Task fields of each model class. Saved models store all their options, in case defaults change in later versions.
MODEL_TASK_CONFIGS: dict[str, tuple[str, ...]] = {
    "HfViTForSemanticSegmentation": ("segmentation_config",),
    "HfViTForUniversalSegmentation": ("universal_segmentation_config",),
    "HfViTForDepthEstimation": ("depth_config",),
    "HfViTForObjectDetection": ("detection_config",),
    "HfViTForKeypointDetection": ("keypoint_config",),
    "HfViTForMaskedImageModeling": ("masked_image_modeling_config",),
    "HfViTForJointEmbedding": ("joint_embedding_config",),
    "HfViTForImageReconstruction": ("reconstruction_config",),
    "HfViTForZeroShotImageClassification": ("text_config", "contrastive_config"),
    "HfViTForImageTextToText": ("caption_config",),
    "HfViTForMultiTask": ("multi_task_config",),
}


class HfViTTaskFields(PreTrainedConfig):
    """Fields of `HfViTConfig` that hold the options of the tasks.

    A saved model stores all options of its task in config.json. The defaults in this file apply to options that are
    not stored, so they must remain those of version 0.1.0. Better values belong in presets and training runs.

    Args:
        segmentation_config: Options of `HfViTForSemanticSegmentation`, a `HfViTSegmentationConfig` or a dictionary;
            `None` means the defaults. The following fields accept the same types of values.
        universal_segmentation_config: Options of `HfViTForUniversalSegmentation`.
        depth_config: Options of `HfViTForDepthEstimation`.
        detection_config: Options of `HfViTForObjectDetection`.
        keypoint_config: Options of `HfViTForKeypointDetection`.
        masked_image_modeling_config: Options of `HfViTForMaskedImageModeling`.
        joint_embedding_config: Options of `HfViTForJointEmbedding`.
        reconstruction_config: Options of `HfViTForImageReconstruction`.
        text_config: Options of the text tower of `HfViTForZeroShotImageClassification`.
        contrastive_config: Options of the image-text comparison of `HfViTForZeroShotImageClassification`.
        caption_config: Options of `HfViTForImageTextToText`.
        multi_task_config: Heads of `HfViTForMultiTask`.
        calibration_config: Calibration of the scores, a `HfViTCalibrationConfig`.
    """

    segmentation_config: HfViTSegmentationConfig | dict[str, Any] | None = None
    universal_segmentation_config: HfViTUniversalSegmentationConfig | dict[str, Any] | None = None
    depth_config: HfViTDepthConfig | dict[str, Any] | None = None
    detection_config: HfViTDetectionConfig | dict[str, Any] | None = None
    keypoint_config: HfViTKeypointConfig | dict[str, Any] | None = None
    masked_image_modeling_config: HfViTMaskedImageModelingConfig | dict[str, Any] | None = None
    joint_embedding_config: HfViTJointEmbeddingConfig | dict[str, Any] | None = None
    reconstruction_config: HfViTReconstructionConfig | dict[str, Any] | None = None
    text_config: HfViTTextConfig | dict[str, Any] | None = None
    contrastive_config: HfViTContrastiveConfig | dict[str, Any] | None = None
    caption_config: HfViTCaptionConfig | dict[str, Any] | None = None
    multi_task_config: HfViTMultiTaskConfig | dict[str, Any] | None = None
    calibration_config: HfViTCalibrationConfig | dict[str, Any] | None = None


# Maps each task field of `HfViTConfig` to the class of its options.
TASK_CONFIGS: dict[str, type[HfViTTaskConfig]] = {
    name: get_args(kinds)[0] for name, kinds in vars(HfViTTaskFields)["__annotations__"].items()
}
