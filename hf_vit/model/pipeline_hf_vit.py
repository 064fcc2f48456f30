"""The pipelines of all tasks: the stock ones from pixels to answers in batches, and one of keypoints, which are new.

Shapes: B batch, K classes or keypoints, H W pixels of an image, h w of a heatmap, S segments.
"""

from collections.abc import Mapping
from types import GeneratorType
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BatchFeature,
    DepthEstimationPipeline,
    ImageClassificationPipeline,
    ImageFeatureExtractionPipeline,
    ImageSegmentationPipeline,
    ObjectDetectionPipeline,
    Pipeline,
    PreTrainedConfig,
    ZeroShotImageClassificationPipeline,
)
from transformers.utils.import_utils import is_vision_available

from .image_crops import read_object_boxes
from .pipeline_batches import BatchedImagePipeline, Part, check_on_error


if is_vision_available():
    import PIL.Image


CORNERS = ("xmin", "ymin", "xmax", "ymax")


class HfViTImageClassificationPipeline(BatchedImagePipeline, ImageClassificationPipeline):
    """The stock pipeline of image classification in batches; see `BatchedImagePipeline`."""

    stock: ClassVar[type[Pipeline] | None] = ImageClassificationPipeline

    def decode(
        self, outputs: Any, parts: list[Part], function_to_apply: Any = None, top_k: int = 5
    ) -> list[list[dict[str, Any]]]:
        """Returns the `top_k` labels of each image, the likeliest first."""
        config, logits = self.model.config, outputs["logits"].float()  # (B, K)
        function = _usual_function(config) if function_to_apply is None else function_to_apply.value
        scores = {"sigmoid": logits.sigmoid, "softmax": lambda: logits.softmax(dim=-1), "none": lambda: logits}[
            function
        ]()
        found = scores.sort(dim=-1, descending=True, stable=True)
        values, labels = (part[:, :top_k].tolist() for part in (found.values, found.indices))
        return [
            [{"label": config.id2label[label], "score": score} for label, score in zip(*pair, strict=True)]
            for pair in zip(labels, values, strict=True)
        ]


def _usual_function(config: PreTrainedConfig) -> str:
    """Returns what makes scores of logits, as the newest stock pipeline chooses it."""
    if config.problem_type == "regression":
        return "none"
    is_multi = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return "sigmoid" if is_multi else "softmax"


class HfViTImageFeatureExtractionPipeline(BatchedImagePipeline, ImageFeatureExtractionPipeline):
    """The stock pipeline of features in batches; see `BatchedImagePipeline`."""

    stock: ClassVar[type[Pipeline] | None] = ImageFeatureExtractionPipeline

    def begin_call(self, preprocess: dict[str, Any], forward: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Returns the options of the image processor, those of the call among them, and of the pipeline."""
        own = {name: preprocess.pop(name) for name in ("on_error", "timeout") if name in preprocess}
        return self.image_processor.call_options(**preprocess), own, forward

    def decode(
        self, outputs: Any, parts: list[Part], pool: bool | None = None, return_tensors: bool = False
    ) -> list[Any]:
        """Returns the features of each image, (1, L, D), or (1, D) with `pool`."""
        if pool and "pooler_output" not in outputs:
            raise ValueError("pool=True asks for a pooled output, which this model has none of. Leave pool out.")
        features = (outputs["pooler_output"] if pool else outputs[0]).cpu().split(1)
        return list(features) if return_tensors else [own.tolist() for own in features]


class HfViTZeroShotImageClassificationPipeline(BatchedImagePipeline, ZeroShotImageClassificationPipeline):
    """The stock pipeline of labels in words in batches, which reads the texts of a call once.

    See `BatchedImagePipeline`.
    """

    stock: ClassVar[type[Pipeline] | None] = ZeroShotImageClassificationPipeline

    def begin_call(self, preprocess: dict[str, Any], forward: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Returns the options of the image processor and of the pipeline, and the features of the labels."""
        labels = preprocess.pop("candidate_labels")
        template = preprocess.pop("hypothesis_template", "This is a photo of {}.")
        if isinstance(labels, str) or len(labels) == 0:
            raise ValueError(f"candidate_labels={labels!r} must be a list of at least one label.")
        texts = self.tokenizer([template.format(label) for label in labels], return_tensors="pt", padding=True)
        forward = {"texts": texts.to(self.device), "candidate_labels": list(labels)}
        if self.fast_model is None:
            with self.device_placement(), self.get_inference_context()():
                features = self.model.get_text_features(**texts).pooler_output  # (T, E)
            forward["text_features"] = F.normalize(features, dim=-1)
        return self.image_processor.call_options(), preprocess, forward

    def run_model(
        self, inputs: BatchFeature, texts: Any, candidate_labels: list[str], text_features: Tensor | None = None
    ) -> dict[str, Any]:
        """Returns how well each image fits each label, (B, T)."""
        if text_features is None:
            logits = self.fast_model(**texts, **inputs).logits_per_image
        else:
            images = F.normalize(self.model.get_image_features(**inputs).pooler_output, dim=-1)  # (B, E)
            logits = self.model.contrastive_head(images, text_features)
        return {"logits": logits, "candidate_labels": candidate_labels}

    def decode(self, outputs: Any, parts: list[Part]) -> list[list[dict[str, Any]]]:
        """Returns the labels of each image, the likeliest first."""
        found = outputs["logits"].float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        return [
            [{"score": score, "label": outputs["candidate_labels"][label]} for score, label in zip(*pair, strict=True)]
            for pair in zip(found.values.tolist(), found.indices.tolist(), strict=True)
        ]


class HfViTDepthEstimationPipeline(BatchedImagePipeline, DepthEstimationPipeline):
    """The stock pipeline of depth in batches; see `BatchedImagePipeline`."""

    stock: ClassVar[type[Pipeline] | None] = DepthEstimationPipeline

    def decode(self, outputs: Any, parts: list[Part]) -> list[dict[str, Any]]:
        """Returns the depth of each image, (H, W) in the unit of the model, and a gray picture of it."""
        sizes = [part.size for part in parts]
        answers = []
        for found in self.image_processor.post_process_depth_estimation(outputs, sizes):
            depth = found["predicted_depth"]  # (H, W)
            low, high = depth.aminmax()
            gray = (
                ((depth - low) / (high - low) * 255).nan_to_num().to(torch.uint8)
            )  # NaN where all depths are the same
            answers.append({"predicted_depth": depth.cpu(), "depth": PIL.Image.fromarray(gray.cpu().numpy())})
        return answers


class HfViTObjectDetectionPipeline(BatchedImagePipeline, ObjectDetectionPipeline):
    """The stock pipeline of objects in batches, whose `threshold` is by default the one that training has chosen.

    `nms_threshold` takes out boxes that repeat a surer one, see `post_process_object_detection`; for the rest
    `BatchedImagePipeline`.
    """

    stock: ClassVar[type[Pipeline] | None] = ObjectDetectionPipeline
    task_config: ClassVar[str | None] = "detection_config"

    def _sanitize_parameters(self, nms_threshold: float | None = None, **kwargs: Any) -> Any:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        return preprocess, forward, postprocess | ({} if nms_threshold is None else {"nms_threshold": nms_threshold})

    def decode(
        self, outputs: Any, parts: list[Part], threshold: float = 0.5, nms_threshold: float | None = None
    ) -> list[list[dict[str, Any]]]:
        """Returns the objects in each image, the surest first, their boxes in whole pixels."""
        sizes, id2label = [part.size for part in parts], self.model.config.id2label
        found = self.image_processor.post_process_object_detection(outputs, threshold, sizes, nms_threshold)
        return [
            [
                {"score": score, "label": id2label[label], "box": dict(zip(CORNERS, box, strict=True))}
                for score, label, box in zip(
                    own["scores"].tolist(), own["labels"].tolist(), own["boxes"].int().tolist(), strict=True
                )
            ]
            for own in found
        ]


class HfViTImageSegmentationPipeline(BatchedImagePipeline, ImageSegmentationPipeline):
    """The stock pipeline of segmentation in batches, whose `threshold` is by default the one that training has chosen.

    See `BatchedImagePipeline`.
    """

    stock: ClassVar[type[Pipeline] | None] = ImageSegmentationPipeline
    task_config: ClassVar[str | None] = "universal_segmentation_config"

    def decode(
        self, outputs: Any, parts: list[Part], subtask: str | None = None, threshold: float = 0.9, **options: float
    ) -> list[list[dict[str, Any]]]:
        """Returns the segments of each image, with masks of its size."""
        sizes, processor = [part.size for part in parts], self.image_processor
        if subtask == "semantic":
            maps = [own.cpu().numpy() for own in processor.post_process_semantic_segmentation(outputs, sizes)]
            return [self._segments(own, [(label, label, None) for label in np.unique(own).tolist()]) for own in maps]
        if subtask not in (None, "panoptic", "instance"):
            raise ValueError(f"subtask={subtask!r} must be one of panoptic, instance, semantic.")
        options = {"threshold": threshold, "overlap_mask_area_threshold": 0.5, **options}
        of_instances = processor.post_process_instance_segmentation
        process = of_instances if subtask == "instance" else processor.post_process_panoptic_segmentation
        return [
            self._segments(
                found["segmentation"].cpu().numpy(),
                [(segment["id"], segment["label_id"], segment["score"]) for segment in found["segments_info"]],
            )
            for found in process(outputs, target_sizes=sizes, **options)
        ]

    def _segments(self, numbers: np.ndarray, segments: list[tuple[int, int, float | None]]) -> list[dict[str, Any]]:
        """Returns segments, each its number in the map (H, W), label and score, as the stock pipeline does."""
        return [
            {
                "score": score,
                "label": self.model.config.id2label[label],
                "mask": PIL.Image.fromarray((numbers == number).astype(np.uint8) * np.uint8(255)),
            }
            for number, label, score in segments
        ]


class HfViTKeypointDetectionPipeline(BatchedImagePipeline):
    """Finds keypoints of objects whose boxes are known, or of the one object that an image shows.

    ```python
    pipe = pipeline("keypoint-detection", model="path/to/model", trust_remote_code=True)
    pipe("photo.jpg", boxes=[[34, 20, 180, 310]], threshold=0.3)
    ```

    `batch_size` counts objects, of one image or of several.
    """

    task_config: ClassVar[str | None] = "keypoint_config"
    _load_processor = False
    _load_image_processor = True
    _load_video_processor = False
    _load_feature_extractor = False
    _load_tokenizer = False

    def __call__(self, inputs: Any, boxes: Any = None, **kwargs: Any) -> Any:
        """Finds keypoints.

        Args:
            inputs: An image (PIL, path, http(s) URL, base64, array or tensor), or many: a list, a dataset
                such as transformers' `KeyDataset`, or a generator. In their place `{"image": ..., "boxes": ...}`.
            boxes: The boxes of an image's objects, each left, top, right and bottom in pixels or `{"xmin", "ymin",
                "xmax", "ymax"}` as the pipeline of object detection returns them; of many images a list of these.
                `None` means the whole image.
            **kwargs: `threshold`, the score above which a keypoint is returned, by default that which the training of
                the model has chosen, or else all are; `flip_test=True` averages over the mirror image, which takes
                twice as long; `timeout`, the seconds that the download of an image may take; and those of
                `BatchedImagePipeline`.

        Returns:
            For each image a list with an entry a box: `{"keypoints": [[x, y], ...], "scores": [...], "labels":
            [names], "box": {"xmin", "ymin", "xmax", "ymax"}}`, in pixels, the center of pixel i being at i. Of a list
            of images a list, of a dataset or generator an iterator, which works as it goes.

        Raises:
            OSError: if an image cannot be opened.
            ValueError: if boxes are none, or not as many as images.
        """
        return super().__call__(inputs if boxes is None else _with_boxes(inputs, boxes), **kwargs)

    def _sanitize_parameters(
        self,
        threshold: float | None = None,
        flip_test: bool | None = None,
        timeout: float | None = None,
        on_error: str | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess = ({} if timeout is None else {"timeout": timeout}) | check_on_error(on_error)
        forward = {} if flip_test is None else {"flip_test": flip_test}
        return preprocess, forward, {} if threshold is None else {"threshold": threshold}

    def read_parts(self, image: Any, options: dict[str, Any], timeout: float | None = None, **_: Any) -> list[Part]:
        """Returns a crop of each box of an image."""
        given = image if isinstance(image, Mapping) else {"image": image}
        if "image" not in given:
            raise ValueError(
                f"An input is {dict(given)!r}, but a dictionary must have an 'image' and may have 'boxes'."
            )
        pixels = self.image_processor.read_pixels(given["image"], options, timeout)  # (C, H, W)
        size = (pixels.shape[-2], pixels.shape[-1])
        (boxes,) = read_object_boxes([_corners(given.get("boxes"))], [size])  # (N, 4)
        crops = self.image_processor.to_model_size(pixels, options, boxes)  # (C, h, w) each
        return [Part(crop, size, box) for crop, box in zip(crops, boxes, strict=True)]

    def run_model(self, inputs: BatchFeature, flip_test: bool = False) -> Any:
        """Returns the heatmaps (B, K, h, w)."""
        return self.model.predict_flipped(**inputs) if flip_test else super().run_model(inputs)

    def decode(self, outputs: Any, parts: list[Part], threshold: float | None = None) -> list[dict[str, Any]]:
        """Returns the keypoints of each object."""
        boxes = torch.stack([part.box for part in parts if part.box is not None])  # (B, 4)
        (objects,) = self.image_processor.post_process_keypoint_detection(outputs, [boxes], threshold=threshold)
        return [self._describe_object(found) for found in objects]

    def join_parts(self, parts: list[Part]) -> list[dict[str, Any]]:
        """Returns the objects of an image."""
        return [part.answer for part in parts]

    def _one_by_one(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("The steps of this pipeline take batches. Call it, also for one image.")

    # which the library asks every pipeline for, and the batches go without
    preprocess = _forward = postprocess = _one_by_one

    def _describe_object(self, found: dict[str, Tensor]) -> dict[str, Any]:
        return {
            "keypoints": found["keypoints"].tolist(),
            "scores": found["scores"].tolist(),
            "labels": [self.model.config.id2label[number] for number in found["labels"].tolist()],
            "box": dict(zip(CORNERS, found["box"].tolist(), strict=True)),
        }


def _with_boxes(inputs: Any, boxes: Any) -> Any:
    """Returns each image with its boxes, in a list, a generator or alone as the images are."""
    if isinstance(inputs, list):
        if len(boxes) != len(inputs):
            raise ValueError(
                f"boxes has {len(boxes)} entries, but there are {len(inputs)} images. Give a list of boxes an image, "
                "None for the whole image."
            )
        return [{"image": image, "boxes": own} for image, own in zip(inputs, boxes, strict=True)]
    images: Any = inputs  # datasets of torch are not annotated as what can be iterated
    if isinstance(inputs, Dataset | GeneratorType):
        return ({"image": image, "boxes": own} for image, own in zip(images, boxes, strict=True))
    return {"image": inputs, "boxes": boxes}


def _corners(boxes: Any) -> Any:
    """Returns boxes with the named ones among them as rows of numbers, also as detectors wrap them."""
    if not isinstance(boxes, list | tuple):
        return boxes
    rows = []
    for index, box in enumerate(boxes):
        if isinstance(box, Mapping) and "box" in box:
            box = box["box"]
        if isinstance(box, Mapping) and set(CORNERS) - box.keys():
            raise ValueError(f"boxes[{index}] is {dict(box)}, but needs {', '.join(CORNERS)}.")
        rows.append([box[corner] for corner in CORNERS] if isinstance(box, Mapping) else box)
    return rows
