"""The pipeline of keypoints, for which transformers has none, and stock ones that know the threshold of a model."""

from collections.abc import Iterator, Mapping
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import ImageSegmentationPipeline, ObjectDetectionPipeline, PreTrainedConfig
from transformers.pipelines.base import ChunkPipeline

from .image_crops import read_object_boxes
from .task_configurations import TASK_CONFIGS


CORNERS = ("xmin", "ymin", "xmax", "ymax")


def chosen_threshold(config: PreTrainedConfig, field: str) -> dict[str, float]:
    """Returns as `threshold` the score that the training of a model has chosen; nothing where none has been.

    Args:
        config: Of any model.
        field: The field of `HfViTConfig` that holds the options of its task.
    """
    if config.model_type != "hf_vit":
        return {}
    threshold = vars(TASK_CONFIGS[field].of(vars(config).get(field)))["score_threshold"]
    return {} if threshold is None else {"threshold": threshold}


class HfViTObjectDetectionPipeline(ObjectDetectionPipeline):
    """The stock pipeline, whose `threshold` is by default the one that the training of the model has chosen.

    `nms_threshold` takes out boxes that repeat a surer one, see `post_process_object_detection`.
    """

    def _sanitize_parameters(self, nms_threshold: float | None = None, **kwargs: Any) -> Any:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        return preprocess, forward, postprocess | ({} if nms_threshold is None else {"nms_threshold": nms_threshold})

    def postprocess(
        self, model_outputs: Any, nms_threshold: float | None = None, **given: float
    ) -> list[dict[str, Any]]:
        """Returns the objects of one image."""
        options = chosen_threshold(self.model.config, "detection_config") | given
        if nms_threshold is None:
            return super().postprocess(model_outputs, **options)
        (found,) = self.image_processor.post_process_object_detection(
            model_outputs, target_sizes=model_outputs["target_size"], nms_threshold=nms_threshold, **options
        )
        return [
            {"score": score, "label": self.model.config.id2label[label], "box": self._get_bounding_box(box)}
            for score, label, box in zip(
                found["scores"].tolist(), found["labels"].tolist(), found["boxes"], strict=True
            )
        ]


class HfViTImageSegmentationPipeline(ImageSegmentationPipeline):
    """The stock pipeline, whose `threshold` is by default the one that the training of the model has chosen."""

    def postprocess(self, model_outputs: Any, subtask: str | None = None, **given: float) -> list[dict[str, Any]]:
        """Returns the segments of one image."""
        options = chosen_threshold(self.model.config, "universal_segmentation_config") | given
        return super().postprocess(model_outputs, subtask=subtask, **options)


class HfViTKeypointDetectionPipeline(ChunkPipeline):
    """Finds keypoints of objects whose boxes are known, or of the one object that an image shows.

    ```python
    pipe = pipeline("keypoint-detection", model="path/to/model", trust_remote_code=True)
    pipe("photo.jpg", boxes=[[34, 20, 180, 310]], threshold=0.3)
    ```

    `batch_size` counts objects, of one image or of several.
    """

    _load_processor = False
    _load_image_processor = True
    _load_video_processor = False
    _load_feature_extractor = False
    _load_tokenizer = False

    def __call__(self, inputs: Any, boxes: Any = None, **kwargs: Any) -> Any:
        """Finds keypoints.

        Args:
            inputs: An image (PIL, path, http(s) URL, base64 data URL, array or tensor), or many: a list, a dataset
                such as transformers' `KeyDataset`, or a generator. In their place `{"image": ..., "boxes": ...}`.
            boxes: The boxes of an image's objects, each left, top, right and bottom in pixels or `{"xmin", "ymin",
                "xmax", "ymax"}` as the pipeline of object detection returns them; of many images a list of these.
                `None` means the whole image.
            **kwargs: `threshold`, the score above which a keypoint is returned, by default that which the training of
                the model has chosen, or else all are; `flip_test=True` averages over the mirror image, which takes
                twice as long; `batch_size` and `num_workers`.

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
        self, threshold: float | None = None, flip_test: bool | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        forward = {} if flip_test is None else {"flip_test": flip_test}
        return {}, forward, {} if threshold is None else {"threshold": threshold}

    def preprocess(self, inputs: Any) -> Iterator[dict[str, Any]]:
        """Yields a crop of each box, or a stand-in where an image has none."""
        given = inputs if isinstance(inputs, Mapping) else {"image": inputs}
        if "image" not in given:
            raise ValueError(
                f"An input is {dict(given)!r}, but a dictionary must have an 'image' and may have 'boxes'."
            )
        image = self.image_processor.process_image(given["image"])
        size = (image.shape[-2], image.shape[-1])
        (boxes,) = read_object_boxes([_corners(given.get("boxes"))], [size])  # (N, 4)
        (shown,) = (boxes,) if len(boxes) else read_object_boxes(None, [size])
        crops = self.image_processor(image, object_boxes=[shown], return_tensors="pt").pixel_values
        for index, (crop, box) in enumerate(zip(crops.to(self.dtype), shown, strict=True), start=1):
            yield {
                "pixel_values": crop[None],  # (1, C, h, w)
                "box": box[None],
                "is_object": len(boxes) > 0,
                "is_last": index == len(shown),
            }

    def _forward(self, model_inputs: dict[str, Any], flip_test: bool = False) -> dict[str, Any]:
        predict = self.model.predict_flipped if flip_test else self.model
        heatmaps = predict(model_inputs["pixel_values"]).heatmaps  # (B, K, h', w')
        return {"heatmaps": heatmaps, **{name: model_inputs[name] for name in ("box", "is_object", "is_last")}}

    def postprocess(self, model_outputs: list[dict[str, Any]], **given: float) -> list[dict[str, Any]]:
        """Returns the objects of one image."""
        options = chosen_threshold(self.model.config, "keypoint_config") | given
        outputs = [output for output in model_outputs if output["is_object"]]
        if not outputs:
            return []
        heatmaps, boxes = (torch.cat([output[name] for output in outputs]) for name in ("heatmaps", "box"))
        (objects,) = self.image_processor.post_process_keypoint_detection({"heatmaps": heatmaps}, [boxes], **options)
        return [self._describe_object(found) for found in objects]

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
