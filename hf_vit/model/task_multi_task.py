"""Several heads on one backbone: model and pipeline.

Shapes: B batch, C channels, H W pixels, h w patch grid. This file may import the other task files, whose models it
combines.
"""

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor
from transformers import initialization as init
from transformers.processing_utils import Unpack
from transformers.utils import IMAGE_PROCESSOR_NAME, ModelOutput, TransformersKwargs
from transformers.utils.output_capturing import capture_outputs

from .adapt_inputs import HfViTInputSized
from .configuration_hf_vit import SIZES, HfViTConfig
from .layers import HfViTInitialized
from .modeling_hf_vit import HfViTModel
from .nested_options import HfViTMultiTaskConfig, tuples_to_lists
from .pipeline_hf_vit import BatchedImagePipeline, ModelInput, check_on_error
from .pretrained import HEAD_CLASSES, POOLED, HfViTPreTrainedModel, check_trained, is_same, read_config
from .task_configurations import MODEL_TASK_CONFIGS, TASK_CONFIGS
from .task_depth_estimation import HfViTDepthEstimationPipeline, HfViTForDepthEstimation
from .task_image_classification import HfViTForImageClassification, HfViTImageClassificationPipeline
from .task_keypoint_detection import HfViTForKeypointDetection, HfViTKeypointDetectionPipeline
from .task_object_detection import HfViTForObjectDetection, HfViTObjectDetectionPipeline
from .task_semantic_segmentation import HfViTForSemanticSegmentation, HfViTImageSegmentationPipeline
from .task_universal_segmentation import HfViTForUniversalSegmentation
from .task_zero_shot_image_classification import HfViTForZeroShotImageClassification


# Model class of each head, and the class of its pipeline. Zero-shot classification needs texts, so it has none here.
HEADS: dict[str, tuple[type[Any], type[Any] | None]] = {
    "image-classification": (HfViTForImageClassification, HfViTImageClassificationPipeline),
    "semantic-segmentation": (HfViTForSemanticSegmentation, HfViTImageSegmentationPipeline),
    "universal-segmentation": (HfViTForUniversalSegmentation, HfViTImageSegmentationPipeline),
    "depth-estimation": (HfViTForDepthEstimation, HfViTDepthEstimationPipeline),
    "object-detection": (HfViTForObjectDetection, HfViTObjectDetectionPipeline),
    "keypoint-detection": (HfViTForKeypointDetection, HfViTKeypointDetectionPipeline),
    "zero-shot-image-classification": (HfViTForZeroShotImageClassification, None),
}
COUNTING = (HfViTForObjectDetection, HfViTForKeypointDetection)  # models with the method `count_items`
PATHS = (str, os.PathLike)
POOLING = ("pooling", "use_pooler", "norm_after_pooling")
LABELS = ("id2label", "label2id", "problem_type")
# Fields that do not change the outputs of the backbone in evaluation mode, or that `POOLING` describes
FREE = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "initializer_range", "use_mask_token"),
    *("reshape_hidden_states", "_out_features", "_out_indices", *POOLING),
)


@dataclass
class HfViTMultiTaskOutput(ModelOutput):
    """Output of `HfViTForMultiTask`.

    Args:
        loss: Sum of the losses of the heads that were given targets.
        answers: Output of each head by its name, as returned by the model class of its task.
        hidden_states: If requested, tokens (B, L, D) before the first block and after each block.
        attentions: If requested, attention weights (B, heads, L, L) of each block.
    """

    loss: Tensor | None = None
    answers: dict[str, Any] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class HfViTUncertainty(HfViTInitialized):
    """Learned logarithms of the variance of each loss, by which multi-task losses are weighted."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(count))

    def initialize(self, std: float) -> None:
        """Sets all variances to 1."""
        init.zeros_(self.log_variances)


class HfViTForMultiTask(HfViTPreTrainedModel, HfViTInputSized):
    """One backbone with several named heads, which computes the backbone once for all heads.

    `model.heads[name]` is a model of the class of its task, which shares the backbone. Its weights are saved as
    `heads.<name>.<name of the weight in the single-task model>`. Every single-task class opens the checkpoint with the
    head of its task; the argument `head` of `from_pretrained` selects one of several heads of a task.
    """

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        if not config.heads:
            raise ValueError("The configuration has no heads. Create the model with HfViTForMultiTask.from_heads.")
        if config.norm_after_pooling:
            raise ValueError(
                "norm_after_pooling=True gives heads on patches other features than heads on the pooled vector, so "
                "they cannot share the backbone. Train the heads with norm_after_pooling=False."
            )
        pools = any(head["task"] in POOLED for head in config.heads.values())
        self.model = HfViTModel(config, add_pooling_layer=pools)
        self.heads = nn.ModuleDict({name: self._build_head(name) for name in config.heads})
        learns_weights = HfViTMultiTaskConfig.of(config.multi_task_config).learns_loss_weights
        self.uncertainty = HfViTUncertainty(len(config.heads)) if learns_weights else None
        self.post_init()
        self._output_capturing_hooks_installed = True  # outputs are recorded by the hooks of `self.model`

    def _build_head(self, name: str) -> nn.Module:
        head = HEADS[self.config.heads[name]["task"]][0](self.config.for_head(name))
        del head.model
        object.__setattr__(head, "model", self.model)  # not a submodule, so that the backbone is saved only once
        return head

    def adapt_inputs(self, old: HfViTConfig, new: HfViTConfig) -> None:
        """Copies changed fields to the configurations of the heads."""
        for head in self.heads.values():
            for name, value in vars(new).items():
                if vars(old).get(name) != value:
                    setattr(head.config, name, value)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | Mapping[str, Tensor] | None = None,
        targets: Mapping[str, Mapping[str, Any]] | None = None,
        patch_attention_mask: Tensor | Mapping[str, Tensor] | None = None,
        interpolate_pos_encoding: bool | None = None,
        heads: list[str] | tuple[str, ...] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTMultiTaskOutput:
        """Runs the backbone once for each group of equal images, and the heads.

        Args:
            pixel_values: Images (B, C, H, W) for all heads, or a dictionary with the images of each head. Heads whose
                entries are the same tensor share the backbone.
            targets: For each head by its name, the arguments of its model class, such as `{"rooms": {"labels": …}}`:
                targets, or `input_ids` of texts. Heads without targets have no loss.
            patch_attention_mask: Mask (B, h, w), False for padding, or a dictionary with the mask of each head.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            heads: Names of the heads to run; by default all heads, or those in the dictionary `pixel_values`.
            num_items_in_batch: Normalizer of the loss of a single detection or keypoint head, see `count_items`.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `HfViTMultiTaskOutput`. The loss is the sum over heads, weighted by uncertainty if weights are learned
            (https://arxiv.org/abs/1705.07115).

        Raises:
            ValueError: if a name is unknown, or an input does not fit the model.
        """
        given, targets = pixel_values if isinstance(pixel_values, Mapping) else None, targets or {}
        names = list(heads if heads is not None else given or self.heads)
        if unknown := [name for name in (*names, *targets) if name not in self.heads]:
            raise ValueError(f"There is no head {unknown[0]!r}. Heads of the model: {', '.join(self.heads)}.")
        encoded: dict[tuple[int, int], Any] = {}
        answers = {}
        for name in names:
            pixels, mask = (
                values.get(name) if isinstance(values, Mapping) else values
                for values in (pixel_values, patch_attention_mask)
            )
            key = id(pixels), id(mask)
            if key not in encoded:
                options: Any = {**kwargs, "output_hidden_states": True, "return_dict": True}
                encoded[key] = self.model(pixels, patch_attention_mask=mask, **options)
            inputs = {"pixel_values": pixels, "patch_attention_mask": mask, "encoder_outputs": encoded[key]}
            given_targets = dict(targets.get(name, {}))
            if num_items_in_batch is not None and isinstance(self.heads[name], COUNTING):
                given_targets["num_items_in_batch"] = num_items_in_batch
            answers[name] = self._run_head(name, inputs, given_targets)
        losses = [self._weighted(name, answer.loss) for name, answer in answers.items() if "loss" in answer]
        return HfViTMultiTaskOutput(loss=torch.stack(losses).sum() if losses else None, answers=answers)

    def _weighted(self, name: str, loss: Tensor) -> Tensor:
        if self.uncertainty is None:
            return loss
        log_variance = self.uncertainty.log_variances[[*self.heads].index(name)]
        return torch.exp(-log_variance) * loss + log_variance

    def _run_head(self, name: str, inputs: dict[str, Any], given: Mapping[str, Any]) -> Any:
        head: Any = self.heads[name]
        if isinstance(head, HfViTForZeroShotImageClassification) and "input_ids" not in given:
            return head.get_image_features(**inputs, return_dict=True)
        return head(**inputs, **given, return_dict=True)

    @classmethod
    def from_heads(cls, backbone: Any = None, **heads: Any) -> Self:
        """Combines finished single-task models, which must have the same backbone weights, without training.

        Args:
            backbone: Model of this package, or its name or path; by default that of the first head.
            **heads: Single-task models, or their names or paths, by the names of the heads.

        Raises:
            ValueError: if a model has no trained head, or its backbone differs; the message names the first tensor
                that differs.
            OSError: if a model does not exist.
        """
        if not heads:
            raise ValueError("from_heads needs at least one head, such as depth='path/to/model'.")
        models = {name: _open_head(name, source) for name, source in heads.items()}
        shared = next(iter(models.values())) if backbone is None else backbone
        shared = shared if isinstance(shared, HfViTPreTrainedModel) else HfViTModel.from_pretrained(shared)
        places = {
            name: heads[name] if isinstance(heads[name], PATHS) else models[name].name_or_path for name in models
        }
        opened = {name: AutoImageProcessor.from_pretrained(place) for name, place in places.items() if place}
        return cls.combine(shared, models, opened).eval()

    @classmethod
    def combine(
        cls,
        shared: HfViTPreTrainedModel,
        models: Mapping[str, Any],
        processors: Mapping[str, Any],
        learns_loss_weights: bool = False,
    ) -> Self:
        """Combines single-task models and their image processors by name, as `from_heads`; heads may be untrained."""
        pooled = [model for model in models.values() if HEAD_CLASSES[type(model).__name__] in POOLED]
        config = copy.deepcopy(shared.config)
        for name in POOLING if pooled else ():
            setattr(config, name, vars(pooled[0].config)[name])
        weights = {f"model.{name}": tensor for name, tensor in shared.base_model.state_dict().items()}
        for name, model in models.items():
            _check_backbone(name, model, config, weights, model in pooled)
            own = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith("model.")}
            weights |= {f"heads.{name}.{key}": tensor for key, tensor in own.items()}
        for name in TASK_CONFIGS:
            setattr(config, name, None)
        config.num_labels, config.problem_type = 2, None  # each head has its own labels
        config.multi_task_config = HfViTMultiTaskConfig(
            {name: _describe_head(model, processors.get(name)) for name, model in models.items()}, learns_loss_weights
        )
        combined = cls(config).to(shared.dtype)
        own = combined.state_dict()
        combined.load_state_dict({key: weights.get(key, tensor) for key, tensor in own.items()})
        return combined

    def anneal_masks(self, progress: float) -> None:
        """Sets the probabilities of masked attention of all universal segmentation heads."""
        for head in self.heads.values():
            if isinstance(head, HfViTForUniversalSegmentation):
                head.anneal_masks(progress)

    def update_heads(self, processors: Mapping[str, Any]) -> None:
        """Copies the options of the heads, such as a chosen threshold, and of their image processors to the config."""
        heads = {
            name: {**self.config.heads[name], **_describe_head(head, processors.get(name))}
            for name, head in self.heads.items()
        }
        options = HfViTMultiTaskConfig.of(self.config.multi_task_config)
        self.config.multi_task_config = replace(options, heads=heads)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Saves the model, its configuration, its code, and the image processor of the first head."""
        self.update_heads({})  # the options and calibrations of the heads may have changed
        super().save_pretrained(save_directory, *args, **kwargs)
        processor = next(iter(self.config.heads.values())).get("processor")
        if processor is not None and kwargs.get("is_main_process", True):
            text = json.dumps(processor, indent=2, sort_keys=True)
            Path(save_directory, IMAGE_PROCESSOR_NAME).write_text(text + "\n", encoding="utf-8")


def _open_head(name: str, source: Any) -> Any:
    """Returns a trained single-task model, given the model, its name or its path."""
    if not isinstance(source, HfViTPreTrainedModel):
        saved = (read_config(source).get("architectures") or ["a model of unknown class"])[0]
        if saved not in HEAD_CLASSES:
            raise ValueError(
                f"{name}={str(source)!r} was saved as {saved}. A head must be one of {', '.join(HEAD_CLASSES)}."
            )
        source = HEADS[HEAD_CLASSES[saved]][0].from_pretrained(source)
    elif type(source).__name__ not in HEAD_CLASSES:
        raise ValueError(f"{name} is a {type(source).__name__}. A head must be one of {', '.join(HEAD_CLASSES)}.")
    check_trained(source, source.name_or_path, source.untrained_weights)
    return source


def _check_backbone(name: str, model: Any, config: HfViTConfig, weights: dict[str, Tensor], pools: bool) -> None:
    """Raises `ValueError` if the backbone of a head differs from `weights`; adds weights that these do not contain."""
    for key in (*(field for field in HfViTConfig.__annotations__ if field not in FREE), *(POOLING if pools else ())):
        theirs, own = (tuples_to_lists(vars(source).get(key)) for source in (model.config, config))
        if theirs != own and not (key in SIZES and is_same(theirs, own)):
            raise ValueError(
                f"The backbone of the head {name!r} has {key}={theirs}, but the shared backbone has {own}. Train all "
                "heads on the same frozen backbone."
            )
    for key, tensor in model.base_model.state_dict().items():
        shared = weights.setdefault(f"model.{key}", tensor)
        if shared.shape != tensor.shape or not torch.equal(shared, tensor.to(shared)):
            raise ValueError(
                f"The backbone of the head {name!r} differs from the shared backbone: {key} has other values. Train "
                "all heads on the same frozen backbone."
            )


def _describe_head(model: Any, processor: Any) -> dict[str, Any]:
    """Returns the entry of a single-task model in `HfViTMultiTaskConfig.heads`."""
    model.settle_calibration()
    kind, config = type(model).__name__, vars(model.config)
    fields = MODEL_TASK_CONFIGS.get(kind, ()) + (("calibration_config",) if config["calibration_config"] else ())
    tasks = {name: TASK_CONFIGS[name].of(config[name]).to_full_dict() for name in fields}
    head = {"task": HEAD_CLASSES[kind], "config": {**tasks, **{name: config[name] for name in LABELS}}}
    return head if processor is None else {**head, "processor": json.loads(processor.to_json_string())}


@dataclass(eq=False)
class GroupInput(ModelInput):
    """A model input for a group of heads with equal image processors."""

    group: tuple[str, ...] = ()


class HfViTMultiTaskPipeline(BatchedImagePipeline):
    """Returns the results of all heads of a multi-task model for each image, as a dictionary by head name.

    Heads with equal image processors share the backbone. Each result is that of the pipeline of the task. Heads of
    zero-shot classification need texts and are left out; open them with their own pipeline.

    ```python
    pipe = pipeline("multi-task", model="path/to/model", trust_remote_code=True)
    pipe("photo.jpg", heads=["rooms", "cells"])
    ```
    """

    _load_processor = _load_video_processor = _load_feature_extractor = _load_tokenizer = False
    _load_image_processor = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("optimize"):
            raise ValueError(f"optimize={kwargs['optimize']!r} needs a single task. Open one head with its pipeline.")
        super().__init__(*args, **kwargs)
        self.pipes, kind = dict[str, Any](), type(self.image_processor)
        for name, head in self.model.config.heads.items():
            pipeline_class, options = HEADS[head["task"]][1], head.get("processor")
            processor = self.image_processor if options is None else kind.from_dict(copy.deepcopy(options))
            if pipeline_class is not None:
                model: Any = self.model.heads[name]
                self.pipes[name] = pipeline_class(model=model, image_processor=processor, device=self.device)

    def _sanitize_parameters(
        self, heads: Any = None, timeout: float | None = None, on_error: str | None = None, **unknown: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        for name, value in unknown.items():
            raise ValueError(f"{name}={value!r} applies to a single task. Open one head with its pipeline.")
        given = {"heads": heads, "timeout": timeout}
        return {name: value for name, value in given.items() if value is not None} | check_on_error(on_error), {}, {}

    def call_arguments(self, preprocess: dict[str, Any], forward: dict[str, Any]) -> tuple[dict[Any, Any], Any, Any]:
        """Returns the image processor options of each group of heads with equal image processors."""
        names = preprocess.pop("heads", self.pipes)
        groups: dict[str, list[str]] = {}
        for name in [names] if isinstance(names, str) else names:
            if name not in self.pipes:
                raise ValueError(f"heads={names!r} contains {name!r}. Choose among {', '.join(self.pipes)}.")
            groups.setdefault(self.pipes[name].image_processor.to_json_string(), []).append(name)
        options = {tuple(group): self.pipes[group[0]].call_arguments({}, {})[0] for group in groups.values()}
        return options, preprocess, forward

    def read_model_inputs(
        self, image: Any, options: dict[Any, Any], timeout: float | None = None, **_: Any
    ) -> list[ModelInput]:
        """Reads an image and returns its model input for each group of heads."""
        return [
            GroupInput(**vars(part), group=group)
            for group, own in options.items()
            for part in self.pipes[group[0]].read_model_inputs(image, own, timeout)
        ]

    def _answer_batch(self, parts: list[Any], options: dict[Any, Any], forward: Any, postprocess: Any) -> None:
        batches: dict[Any, list[Any]] = {}
        for part in parts:
            batches.setdefault((part.group, part.pixels.shape, part.pixels.dtype), []).append(part)
        for (group, *_), own in batches.items():
            processor = self.pipes[group[0]].image_processor
            with self.device_placement(), self.get_inference_context()():
                pixels = [part.pixels for part in own]
                inputs = processor.finish_batch(pixels, options[group], self.device).to(self.dtype)
                is_shared = processor.window_scale is None  # sliding windows run the backbone several times
                outputs = self.model(**inputs, heads=group).answers if is_shared else {}
                for name in group:
                    pipe = self.pipes[name]
                    answer = outputs[name] if is_shared else pipe.run_model(inputs)
                    for part, found in zip(own, pipe.decode(answer, own, **pipe._postprocess_params), strict=True):
                        result = pipe.join_results([replace(part, answer=found)])
                        part.answer, part.has_result = {**(part.answer or {}), name: result}, True

    def join_results(self, parts: list[ModelInput]) -> dict[str, Any]:
        """Returns the results of all heads for an image."""
        answers = {name: answer for part in parts for name, answer in part.answer.items()}
        return {name: answers[name] for name in self.pipes if name in answers}

    def _one_by_one(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("This pipeline has no methods for single images. Call the pipeline instead.")

    # Batched processing does not call these abstract methods of `Pipeline`.
    preprocess = _forward = postprocess = _one_by_one
