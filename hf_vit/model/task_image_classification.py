"""Image classification: head, targets, loss, model and pipeline.

Shapes: B batch, C channels, H W pixels, h w patch grid, L tokens, D hidden size, K labels.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchFeature, ImageClassificationPipeline, Pipeline
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import maybe_autocast

from .adapt_inputs import HfViTInputSized
from .calibration import SET_METHODS, SIMILARITIES, TrainingFeatures, find_threshold, nonconformity, undo_calibration
from .configuration_hf_vit import HfViTConfig
from .layers import HfViTFanInLinear
from .modeling_hf_vit import HfViTModel
from .nested_options import check_thresholds
from .pipeline_hf_vit import BatchedImagePipeline, ModelInput
from .pretrained import HfViTPreTrainedModel
from .shared import can_read_values, check_class_numbers, check_shape, to_float32_or_higher
from .weight_changes import version_of


def soften_labels(labels: Tensor, num_labels: int, label_smoothing: float = 0.0) -> Tensor:
    """Converts class numbers to soft labels (B, K) float32, as used for mixup; each row sums to 1.

    Args:
        labels: Class numbers (B,) int64, in [0, num_labels).
        num_labels: Number K of labels.
        label_smoothing: Probability, in [0, 1), that is spread evenly over all labels
            (https://arxiv.org/abs/1512.00567).

    Raises:
        ValueError: if a class number or `label_smoothing` is out of range.
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 1); 0 disables it.")
    check_class_numbers(labels, num_labels, ignored=-100)
    return F.one_hot(labels.long(), num_labels).float() * (1 - label_smoothing) + label_smoothing / num_labels


def mean_of_labeled(loss_of: Callable[..., Tensor], logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean loss of logits (B, K) over the labels (B, K) that are not NaN, or 0 if all are NaN."""
    is_known = ~labels.isnan()  # (B, K)
    losses = loss_of(logits, labels.nan_to_num().to(logits.dtype), reduction="none")  # (B, K)
    return losses.where(is_known, 0).sum() / is_known.sum().clamp(min=1)


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str | None) -> Tensor:
    """Returns the mean loss of logits (B, K): cross-entropy, binary cross-entropy or mean squared error.

    Labels are class numbers (B,) int64, of which -100 is ignored, or floats (B, K): probabilities for
    "single_label_classification" (soft labels), 0 to 1 for "multi_label_classification", any values for "regression".
    Regression of a single value also accepts (B,). In multi-label classification and regression, NaN marks a missing
    label, which is ignored.
    If `problem_type` is None, it is regression for K = 1, and single-label classification for K > 1.
    """
    # Compute the loss in float32: half precision rounds too much, and large targets would become infinite.
    logits = to_float32_or_higher(logits)
    num_labels = logits.shape[1]
    if problem_type not in (None, "regression", "single_label_classification", "multi_label_classification"):
        raise ValueError(
            f"problem_type={problem_type!r} is unknown. Choose 'single_label_classification', "
            "'multi_label_classification' or 'regression'."
        )
    if problem_type is None and num_labels > 1 and labels.is_floating_point():
        raise ValueError(
            f"Labels of dtype {labels.dtype} can be multi-label, soft labels or regression targets. Set "
            "config.problem_type to 'multi_label_classification', 'single_label_classification' or 'regression'."
        )
    if problem_type == "regression" or (problem_type is None and num_labels == 1):
        labels = labels.reshape(-1, 1) if num_labels == 1 and labels.ndim == 1 else labels
        check_shape("Labels for regression", labels, "batch, num_labels", *logits.shape)
        return mean_of_labeled(F.mse_loss, logits, labels)
    is_multi = problem_type == "multi_label_classification"
    if is_multi or labels.is_floating_point():
        kind = problem_type if is_multi else "single_label_classification with soft labels"
        check_shape(f"Labels for {kind}", labels, "batch, num_labels", *logits.shape)
        is_wrong = ~((labels >= 0) & (labels <= 1))  # True for NaN, too
        if can_read_values(labels) and len(wrong := labels[is_wrong & ~labels.isnan() if is_multi else is_wrong]):
            raise ValueError(
                f"Label {float(wrong[0])} is not a probability. Soft and multi-label targets lie in [0, 1]."
            )
        if is_multi:
            return mean_of_labeled(F.binary_cross_entropy_with_logits, logits, labels)
        return F.cross_entropy(logits, labels.to(logits.dtype))
    if labels.shape != logits.shape[:1]:
        raise ValueError(
            f"Class numbers must be (batch,) = ({len(logits)},), not {tuple(labels.shape)}. For float labels, set "
            "config.problem_type."
        )
    if labels.dtype == torch.bool:
        raise ValueError("Class numbers must be integers, not bool. Convert them with labels.long().")
    check_class_numbers(labels, num_labels, ignored=-100)
    return F.cross_entropy(logits, labels.long())


@dataclass
class HfViTImageClassifierOutput(ImageClassifierOutput):
    """Output of an image classifier, optionally with the logits of both heads of a distilled model.

    Args:
        loss: Scalar loss, if labels were given.
        logits: Logits (B, num_labels) for prediction; with a distillation token, the mean of both heads.
        hidden_states: If requested, tokens (B, L, D) before the first block and after each block.
        attentions: If requested, attention weights (B, heads, L, L) of each block.
        cls_logits: Logits (B, num_labels) of the head on the pooled vector, if the model has a distillation token.
        distillation_logits: Logits (B, num_labels) of the head on the distillation token, if the model has one.
    """

    cls_logits: Tensor | None = None
    distillation_logits: Tensor | None = None


class HfViTForImageClassification(HfViTPreTrainedModel, HfViTInputSized):
    """Classifies images with one or several labels, or predicts values (regression)."""

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        if not config.num_labels:
            raise ValueError("num_labels=0 leaves nothing to classify. Set num_labels, or use HfViTModel.")
        self.model = HfViTModel(config)
        # Use LeCun initialization. Weights near zero, as in the code of the ViT paper, pass very small gradients to
        # the blocks, which makes short training runs from scratch worse and does not improve fine-tuning.
        self.classifier: nn.Module = HfViTFanInLinear(config.pooled_size, config.num_labels)
        self.distillation_classifier: nn.Module | None = (
            HfViTFanInLinear(config.hidden_size, config.num_labels) if config.use_distillation_token else None
        )
        self.post_init()

    def get_classifier(self) -> nn.Module:
        """Returns the layer that computes logits from pooled vectors, an identity after `reset_classifier(0)`."""
        return self.classifier

    def reset_classifier(self, num_labels: int) -> None:
        """Replaces the classifier by a randomly initialized one and updates the labels in the configuration.

        Args:
            num_labels: Number of labels; with 0, the model returns the pooled vectors as `logits`. Build the optimizer
                after this call.

        Raises:
            ValueError: if `num_labels` is negative.
        """
        if num_labels < 0:
            raise ValueError(f"num_labels={num_labels} must be at least 0; 0 removes the classifier.")
        self.config.num_labels, self.config.calibration_config = num_labels, None
        self.classifier = self._draw_classifier(self.config.pooled_size)
        if self.distillation_classifier is not None:
            self.distillation_classifier = self._draw_classifier(self.config.hidden_size)
        weights = self.state_dict(keep_vars=True)
        drawn = {name: version_of(weights[name]) for name in weights if "classifier" in name}
        self._initialized_versions = {**self._initialized_versions, **drawn}

    def _draw_classifier(self, size: int) -> nn.Module:
        if not self.config.num_labels:
            return nn.Identity()
        head = HfViTFanInLinear(size, self.config.num_labels).to(self.device, self.dtype)
        head.initialize(self.config.initializer_range)
        return head.train(self.training)

    def adapt_inputs(self, old: HfViTConfig, new: HfViTConfig) -> None:
        """Adds a randomly initialized head for a new distillation token, or removes the head of a removed token."""
        if not new.use_distillation_token:
            self.distillation_classifier = None
        elif self.distillation_classifier is None:
            self.distillation_classifier = self._draw_classifier(new.hidden_size)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Returns the logits (B, num_labels) of tokens (B, L, D), or the pooled vectors (B, D) with `pre_logits`."""
        pooled = self.model.pool(features)
        return pooled if pre_logits else self._classify(pooled, features)[0]

    def _classify(self, pooled: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the logits. With a distillation token, these are the mean of two heads, which are returned too."""
        is_exact = self.config.problem_type == "regression"  # half precision keeps only three digits of a value
        with maybe_autocast(pooled.device.type, enabled=False) if is_exact else nullcontext():
            logits = self.classifier(pooled.to(self.dtype) if is_exact else pooled)
        if self.distillation_classifier is None:
            return logits, None, None
        distillation_logits = self.distillation_classifier(tokens[:, 1])
        return (logits + distillation_logits) / 2, logits, distillation_logits

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTImageClassifierOutput:
        """Runs the model.

        Args:
            pixel_values: Images (B, C, H, W), H and W multiples of the patch size.
            labels: Class numbers (B,) int64 or floats (B, num_labels), whose meaning depends on `config.problem_type`;
                see `classification_loss`. NaN marks a missing label or value.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            **kwargs: `kept_patches`, see `HfViTModel`; `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            A `HfViTImageClassifierOutput`.

        Raises:
            ValueError: if an input does not fit the model; the message names valid values.
        """
        outputs = self.run_backbone(pixel_values, patch_attention_mask=patch_attention_mask, **kwargs)
        logits, cls_logits, distillation_logits = self._classify(outputs.pooler_output, outputs.last_hidden_state)
        if labels is not None and not self.config.num_labels:
            raise ValueError("The model has no classifier to train. Call reset_classifier(num_labels) first.")
        return HfViTImageClassifierOutput(
            loss=None if labels is None else classification_loss(logits, labels, self.config.problem_type),
            logits=self.calibrated(logits),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cls_logits=cls_logits,
            distillation_logits=distillation_logits,
        )


class HfViTImageClassificationPipeline(BatchedImagePipeline, ImageClassificationPipeline):
    """Image classification pipeline with batched image processing; see `BatchedImagePipeline`.

    The following arguments require a model that was calibrated on held-out images. They can also be passed to a call.

    Args:
        coverage: Probability, in (0, 1), that the returned labels contain the correct one. The number of returned
            labels then depends on the image, and `top_k` is ignored.
        set_method: "thr" (smallest sets on average) or "aps" (more even coverage of easy and hard images).
        abstain_below: Score in (0, 1). If no label reaches this score, the result is an empty list.
        similarity: True or "mahalanobis", or "knn", to add `similarity` to each label: the share of held-out images
            that are at least as far from the training images as this image. It is close to 0 for images that are
            unlike the training images.
    """

    stock: ClassVar[type[Pipeline] | None] = ImageClassificationPipeline
    training_features: TrainingFeatures | None = None

    def _sanitize_parameters(
        self,
        coverage: float | None = None,
        set_method: str | None = None,
        abstain_below: float | None = None,
        similarity: bool | str | None = None,
        **kwargs: Any,
    ) -> Any:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        check_thresholds(coverage=coverage, abstain_below=abstain_below)
        if set_method not in (None, *SET_METHODS):
            raise ValueError(f"set_method={set_method!r} must be one of {', '.join(SET_METHODS)}.")
        if coverage is not None and self.model.config.problem_type not in (None, "single_label_classification"):
            raise ValueError(
                f"coverage={coverage} requires one label per image, not {self.model.config.problem_type}. "
                "Omit coverage."
            )
        kind = SIMILARITIES[0] if similarity is True else similarity or None
        if kind not in (None, *SIMILARITIES):
            raise ValueError(f"similarity={similarity!r} must be True or one of {', '.join(SIMILARITIES)}.")
        own = {"similarity": kind, "coverage": coverage, "set_method": set_method, "abstain_below": abstain_below}
        given = {key: value for key, value in own.items() if value is not None}
        return preprocess, forward | ({"similarity": kind} if kind else {}), postprocess | given

    def run_model(self, inputs: BatchFeature, *_: Any, similarity: str | None = None, **forward: Any) -> Any:
        """Returns the outputs of the model or, if `similarity` is set, logits (B, K) and pooled features (B, D)."""
        if similarity is None:
            return super().run_model(inputs, **forward)
        if self.fast_model is not None:
            raise ValueError(f"similarity={similarity!r} requires the original model. Omit optimize.")
        outputs = self.model.base_model(**inputs, return_dict=True)
        return {"logits": self.model(encoder_outputs=outputs).logits, "pooled": outputs.pooler_output}

    def decode(
        self,
        outputs: Any,
        parts: list[ModelInput],
        function_to_apply: Any = None,
        top_k: int = 5,
        coverage: float | None = None,
        set_method: str = "thr",
        abstain_below: float = 0.0,
        similarity: str | None = None,
    ) -> list[list[dict[str, Any]]]:
        """Returns the `top_k` labels or the set of labels of each image, in descending order of score."""
        config, scores = self.model.config, outputs["logits"].float()  # (B, K)
        # Choose the activation in the same way as the pipeline in the latest version of transformers.
        is_multi = config.problem_type == "multi_label_classification" or config.num_labels == 1
        usual = "none" if config.problem_type == "regression" else "sigmoid" if is_multi else "softmax"
        function = usual if function_to_apply is None else function_to_apply.value
        if function != "none":
            scores = scores.sigmoid() if function == "sigmoid" else scores.softmax(dim=-1)
        found = scores.sort(dim=-1, descending=True, stable=True)
        counts = [top_k] * len(scores)
        if coverage is not None:
            options, place = self.model.calibration, self.model.name_or_path
            known = options.coverages, vars(options)[f"{set_method}_thresholds"]
            least = find_threshold("coverage", coverage, *known, is_least=True, name_or_path=place)
            kept = nonconformity(undo_calibration(outputs["logits"].float(), options), set_method) <= least
            counts = kept.sum(dim=-1).tolist()  # a set consists of the most likely labels
        alike: list[dict[str, float]] = [{}] * len(scores)
        if similarity is not None:
            self.training_features = self.training_features or TrainingFeatures.load(self.model.name_or_path)
            values = self.training_features.similarity(outputs["pooled"], similarity)
            alike = [{"similarity": value} for value in values.tolist()]
        return [
            [
                {"label": config.id2label[label], "score": score, **own}
                for label, score in zip(labels[:count], values[:count], strict=True)
                if not values[0] < abstain_below  # false for NaN, so invalid scores are returned
            ]
            for labels, values, count, own in zip(
                found.indices.tolist(), found.values.tolist(), counts, alike, strict=True
            )
        ]
