"""Base class of the torchvision and the PIL image processor: options, preprocessing steps, loading and saving.

Shapes: B batch, C channels, H W pixels of an image, h w pixels of the model input or patches, M masks, N
objects, K keypoints.
"""

import copy
import json
import math
import os
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub.dataclasses import validate_typed_dict
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import ChannelDimension, PILImageResampling, torch_pil_interpolation_mapping
from transformers.processing_utils import ImagesKwargs
from transformers.utils import CONFIG_NAME, cached_file

from .configuration_hf_vit import INSTALL_COMMAND, HfViTConfig, find_processor, to_pair
from .image_geometry import (
    CROP_ROUNDINGS,
    EXACT_KEYS,
    MULTIPLE_ROUNDINGS,
    center_crop,
    compute_resized_size,
    crop_region,
    crop_regions,
    height_and_width,
    keypoints_to_crops,
    pad_batch,
    pad_to,
    resize_nearest,
    to_size_dict,
)
from .image_inputs import named_images, open_image, read_image
from .image_targets import (
    describe_annotations,
    encode_objects,
    encode_targets,
    read_keypoints,
    read_object_boxes,
    read_objects,
    read_targets,
    target_kind,
    transform_target,
)
from .post_processing import CLASS_SCORES, HfViTPostProcessing
from .remote_code import check_reachable, copy_code
from .task_object_detection import class_scores_of


OBJECTS = ("boxes", "annotations")  # object detection targets
Images = list[torch.Tensor]  # image i is (C, H_i, W_i)
Sizes = list[tuple[int, int]]  # (Height, width) of each image.
# For each backend, the class that loads a saved image processor. Without this mapping, transformers would record the
# class of the saved object for both backends.
IMAGE_PROCESSOR_AUTO_MAP = {
    "AutoImageProcessor": {
        "torchvision": "image_processing_hf_vit.HfViTImageProcessor",
        "pil": "image_processing_pil_hf_vit.HfViTImageProcessorPil",
    }
}
CHOICES = {"class_scores": CLASS_SCORES, "crop_rounding": CROP_ROUNDINGS, "multiple_rounding": MULTIPLE_ROUNDINGS}


class HfViTImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """Options in addition to those of transformers, for the constructor and for calls.

    `HfViTImageProcessorBase` describes them.
    """

    num_channels: int | None
    ensure_multiple_of: int | list[int] | tuple[int, ...] | None
    multiple_rounding: str | None
    keep_aspect_ratio: bool | None
    hide_padding: bool | None
    crop_rounding: str | None
    do_reduce_labels: bool | None
    label_ids_to_fuse: list[int] | tuple[int, ...] | None
    nms_threshold: float | int | None
    class_agnostic_nms: bool | None
    do_affine_crop: bool | None
    box_padding: float | int | None
    class_scores: str | None
    window_scale: float | int | None


class HfViTImageProcessorBase(HfViTPostProcessing, BaseImageProcessor):
    """Converts images of any kind, size and color to the input of a Vision Transformer.

    Use the subclass `HfViTImageProcessor` or `HfViTImageProcessorPil`. Every option can also be passed to a call.

    Args:
        num_channels: Number of channels C of the model input. For C = 3, gray images are repeated; for C = 1, color
            images are converted to luma (ITU-R 601); alpha is dropped. For other C, images must have C channels.
        do_convert_rgb: `None` converts as required by `num_channels`. `True` requires `num_channels=3`. `False`
            disables conversion, also of CMYK, YCbCr, HSV and LAB, and requires images with `num_channels` channels.
        do_resize: Whether to resize.
        size: Exact size in pixels as {"height", "width"} or an int for a square. To keep the aspect ratio, use
            {"shortest_edge"}, {"longest_edge"}, both of these, or {"max_height", "max_width"}.
        resample: PIL resampling filter, with antialiasing.
        ensure_multiple_of: Number of pixels of which the resized height and width are rounded to multiples.
        multiple_rounding: Rounding to multiples of `ensure_multiple_of`: "nearest", or "down" as in YOLOS.
        keep_aspect_ratio: Whether to keep the aspect ratio with {"height", "width"}: the image is scaled to the height
            or the width, whichever changes it less, as in transformers' DPT. Other forms of `size` always keep it.
        do_center_crop: Whether to crop the center after resizing.
        crop_size: Size of the center crop as {"height", "width"}.
        crop_rounding: Rounding of the offset of the center crop if the margin is odd: "down" as in transformers, or
            "half_to_even" as in torchvision and timm.
        do_rescale: Whether to multiply pixels by `rescale_factor`. If `True`, float arrays must have values from 0 to
            255, otherwise from 0 to 1. Any floats are accepted if both `do_rescale` and `do_normalize` are `False`.
        rescale_factor: Factor for pixels; 1/255 scales them to [0, 1].
        do_normalize: Whether to subtract `image_mean` and divide by `image_std`.
        image_mean: One number, or one per channel.
        image_std: One number, or one per channel.
        do_pad: Whether to pad on the right and at the bottom, with zeros after normalization, to the largest image of
            the batch or `pad_size`. Height and width become multiples of `ensure_multiple_of`, which must be the patch
            size, and `patch_attention_mask` is returned.
        hide_padding: Whether to hide padding from the model by a `patch_attention_mask`. `False` pads with black to
            `pad_size` before normalization, as in transformers' EoMT, for models that were trained with visible
            padding. It is always `False` if `pad_size` is given without `ensure_multiple_of`.
        pad_size: Size of padded images as {"height", "width"}.
        do_reduce_labels: Whether class 0 of segmentation maps is the background. If `True`, 0 becomes 255, which is
            ignored, and other class indices (or values of `instance_id_to_semantic_id`) are decremented by one.
        label_ids_to_fuse: Classes (sky, road, ...) that `post_process_panoptic_segmentation` merges into one segment
            per image by default.
        nms_threshold: IoU above which `post_process_object_detection` by default removes the box with the lower score
            of two boxes of the same class; `None` disables non-maximum suppression.
        class_agnostic_nms: Whether non-maximum suppression also compares boxes of different classes.
        do_affine_crop: Whether to crop every object box to an image of height and width `size`, for keypoint models,
            instead of resizing, center cropping and padding. Without boxes, the whole image is one crop.
        box_padding: Factor by which boxes are enlarged before they are extended to the aspect ratio of `size`.
        class_scores: Activation that `post_process_object_detection` applies to outputs with logits but without
            probabilities: "softmax", with "no object" as the last class, or "sigmoid".
        window_scale: Factor of `size` by which the semantic segmentation pipeline enlarges images to predict them in
            sliding windows of `size`. `None` disables windows. Calls of the image processor ignore it.

    Raises:
        ValueError: If options contradict each other.
    """

    valid_kwargs = HfViTImageProcessorKwargs
    model_input_names: ClassVar[list[str]] = ["pixel_values", "patch_attention_mask"]

    resample = PILImageResampling.BILINEAR
    size: ClassVar[dict[str, int]] = {"height": 224, "width": 224}  # each instance gets a copy
    do_resize = True
    do_rescale = True
    do_normalize = True
    image_mean = 0.5
    image_std = 0.5
    num_channels = 3
    crop_rounding = "down"
    multiple_rounding = "nearest"
    keep_aspect_ratio = False
    hide_padding = True
    do_reduce_labels = False
    do_affine_crop = False
    box_padding = 1.25

    # Function that converts the options of other image processors, given their model type. The package sets it. It is
    # None if this file is loaded as remote code without the package.
    _converter: ClassVar[Callable[[dict[str, Any], str], dict[str, Any]] | None] = None

    @classmethod
    def for_model(cls, model: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Creates an image processor with the image size, number of channels and task of a model.

        Args:
            model: The model, or its configuration. Only the configuration of a saved model contains the task.
            **overrides: Image processor options that override those of the model.
        """
        is_config = isinstance(model, PreTrainedConfig)
        config: Any = model if is_config else model.config
        architecture = (config.architectures or [""])[0] if is_config else type(model).__name__
        height, width = to_pair(config.image_size)
        options = {"size": {"height": height, "width": width}, "num_channels": config.num_channels}
        if architecture == "HfViTForKeypointDetection":
            options["do_affine_crop"] = True
        if architecture == "HfViTForObjectDetection":
            options["class_scores"] = class_scores_of(config)
        return cls(**{**options, **overrides})

    @classmethod
    def get_image_processor_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the image processor options in a folder or repository, and the unused arguments.

        Files of transformers' image processors and timm's config.json are converted to the options of this class. If a
        file does not name its image processor, the `model_type` in config.json in the same folder decides; the default
        is "vit". For a multi-task model, the options belong to the head that `head` names or that the pipeline uses.

        Raises:
            OSError: If there is no file with image processor options, or a file with weights is given.
            ValueError: If the image processor is unknown or not supported, or if its options must be converted and
                the `hf_vit` package is not installed.
        """
        read, name = super().get_image_processor_dict, pretrained_model_name_or_path
        if os.path.isfile(name) and Path(name).suffix != ".json":
            raise OSError(
                f"{str(name)!r} is not a JSON file of image processor options. For a file of weights, use "
                "hf_vit.convert.load_image_processor."
            )
        head, task = kwargs.pop("head", None), kwargs.get("_from_pipeline")
        try:
            options, unused = read(name, **kwargs)
        except OSError as error:
            check_reachable(name, **hub_arguments(kwargs))
            # timm stores image processor options in config.json.
            options, unused = read(name, **{**kwargs, "image_processor_filename": CONFIG_NAME})
            if not options.get("pretrained_cfg"):
                raise error
        if _is_ours(options):
            fields = {} if head is task is None else HfViTConfig.get_config_dict(name, **hub_arguments(kwargs))[0]
            return dict(find_processor(fields, head, task) or options), unused
        if cls._converter is None:
            raise ValueError(
                f"{str(name)!r} contains the options of another image processor, "
                f"{options.get('image_processor_type', 'without a name')}, which must be converted. Run "
                f"{INSTALL_COMMAND} and import the class from the package: `from hf_vit import {cls.__name__}`."
            )
        is_named = options.get("image_processor_type") or options.get("feature_extractor_type")
        return cls._converter(options, "vit" if is_named else _model_type(name, kwargs)), unused

    def to_dict(self) -> dict[str, Any]:
        """Returns the options, and the entry `auto_map` with the image processor class of each backend."""
        return {**super().to_dict(), "auto_map": copy.deepcopy(IMAGE_PROCESSOR_AUTO_MAP)}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Saves preprocessor_config.json and the code of this class, and returns the paths of the saved options."""
        copy_code(save_directory)
        files = super().save_pretrained(save_directory)
        if push_to_hub:  # Upload here, because transformers would omit the code.
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)
        return files

    def preprocess(
        self,
        images: Any,
        segmentation_maps: Any = None,
        depth_maps: Any = None,
        mask_labels: Any = None,
        class_labels: Any = None,
        instance_id_to_semantic_id: dict[int, int] | list[dict[int, int]] | None = None,
        annotations: Any = None,
        boxes: Any = None,
        object_boxes: Any = None,
        keypoints: Any = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Converts images to model inputs, and their targets to labels that match the resized and cropped images.

        Targets must have the size of their image. Pass one kind of targets, with one entry per image.

        Args:
            images: One image of any kind, an array or tensor (B, ., ., .), or a (nested) list of images.
            segmentation_maps: Class indices (H, W), 255 for unlabeled pixels, as arrays, tensors, PIL images or paths,
                or an array (B, H, W).
            depth_maps: Depth (H, W) in meters or any other unit, as floats. Only finite values above 0 are valid.
            mask_labels: Masks (M, H, W) of each image, with `class_labels`.
            class_labels: Class indices (M,) of the masks or boxes of each image.
            instance_id_to_semantic_id: Class of each segment id, if `segmentation_maps` contain segment ids: one
                dictionary, or one per image. The resulting labels are `mask_labels` and `class_labels`.
            annotations: `{"annotations": [{"bbox": [left, top, width, height], "category_id": ...}]}` per image, in
                pixels, as in COCO and in DETR. `category_id` is the class index. `image_id` of an image and `area` of
                an object are optional. Crowds are ignored.
            boxes: Boxes (N, 4) as left, top, right, bottom in pixels for each image, with `class_labels`.
            object_boxes: Boxes (N, 4) to crop from each image if `do_affine_crop`; `None` crops the whole image.
            keypoints: Keypoints (N, K, 3) of the object boxes of each image: x and y in pixels, with the center of
                pixel i at i, and visibility (0 not labeled, 1 hidden, 2 visible). Without `do_affine_crop`, images are
                crops already and have keypoints (K, 3).
            **kwargs: Options for this call. If `image_mean` and `image_std` have 2, 4 or more entries, `num_channels`
                becomes their number.

        Returns:
            `pixel_values` (B, C, h, w), labels, and `patch_attention_mask` if `do_pad`, as tensors, or as lists
            without `return_tensors`.

            - Segmentation maps: `labels` (B, h, w) int64, with 255 outside the image.
            - Depth maps: `labels` (B, h, w) float32, with 0 for invalid pixels and outside the image.
            - Masks: `mask_labels` (M, h, w) float32 and `class_labels` (M,) int64 per image, without empty masks.
            - Boxes: `labels` per image with `class_labels` (N,) int64 and `boxes` (N, 4) float32 as center x, center
              y, width and height relative to the image without padding. Objects outside the crop are removed.
            - Annotations: the `labels` of `describe_annotations`.
            - With `do_affine_crop`: `pixel_values` (sum of N, C, h, w), and for keypoints `labels` (sum of N, K, 3) in
              crop pixels, which are zero for keypoints that are not labeled or outside the crop.

        Raises:
            OSError: If a file cannot be opened or decoded.
            TypeError: If an image or target has an unsupported type or dtype.
            ValueError: If options, images and targets are inconsistent.
        """
        targets = {
            "segmentation_maps": segmentation_maps,
            "depth_maps": depth_maps,
            "mask_labels": mask_labels,
            "class_labels": class_labels,
            "instance_id_to_semantic_id": instance_id_to_semantic_id,
            "annotations": annotations,
            "boxes": boxes,
            "object_boxes": object_boxes,
            "keypoints": keypoints,
        }
        given = {name: value for name, value in targets.items() if value is not None}
        return super().preprocess(images, given, **{**channels_given(**kwargs), **kwargs})

    def fetch_images(self, images: Any) -> Any:
        """Replaces every path, URL and data URL in a (nested) list with its PIL image."""
        if isinstance(images, list | tuple):
            return [self.fetch_images(image) for image in images]
        return open_image(images) if isinstance(images, str | os.PathLike) else images

    def process_image(self, image: Any, **kwargs: Any) -> torch.Tensor:
        """Reads one image of any kind as a uint8 or float32 tensor (C, H, W), without resizing."""
        return self._prepare_image_like_inputs([image], **{"num_channels": self.num_channels, **kwargs})[0]

    def call_options(self, **kwargs: Any) -> dict[str, Any]:
        """Checks the options of a call and returns them as a dictionary for `read_pixels` and other methods."""
        validate_typed_dict(self.valid_kwargs, kwargs)
        own = {name: getattr(self, name, None) for name in self._valid_kwargs_names}
        options = self._standardize_kwargs(**{**own, **channels_given(**kwargs), **kwargs})
        self._validate_preprocess_kwargs(**options)
        return options

    def read_pixels(self, image: Any, options: dict[str, Any], timeout: float | None = None) -> torch.Tensor:
        """Reads one image of any kind as a uint8 or float32 tensor (C, H, W); raises the errors of `preprocess`.

        Use `read_pixels`, `to_model_size` and `finish_batch` instead of `preprocess` to read images in threads and
        process them in batches. `options` is the result of `call_options`. `timeout` limits a download, in seconds.
        """
        return read_image(image, "the image", timeout=timeout, **_reading_options(options))

    def to_model_size(
        self, image: torch.Tensor, options: dict[str, Any], object_boxes: torch.Tensor | None = None
    ) -> Images:
        """Resizes and crops an image (C, H, W) to the size of the model input, without changing its dtype.

        Returns a list with one image (C, h, w). If `do_affine_crop` is set, the list contains one crop for each of
        `object_boxes` (N, 4), or one crop of the whole image if there are no boxes.
        """
        if not options["do_affine_crop"]:
            _refuse_boxes(object_boxes)
            return self._place([image], **options)
        (boxes,) = read_object_boxes([object_boxes], _sizes([image]))
        size = height_and_width(options["size"])
        return [crop_region(image, region, size) for region in crop_regions(boxes.cpu(), size, options["box_padding"])]

    def finish_batch(self, images: Images, options: dict[str, Any], device: Any = None) -> BatchFeature:
        """Converts images (C, h, w) of equal size to `pixel_values` and, if `do_pad` is set, `patch_attention_mask`.

        Images are moved to the device before they are converted to float32, rescaled, normalized and padded.
        """
        device = images[0].device if device is None else device
        if images[0].device != device:
            images = list(torch.stack(images).to(device))
        return self._finish(images, **{**options, "return_tensors": "pt"})

    def _standardize_kwargs(
        self,
        size: Any = None,
        crop_size: Any = None,
        pad_size: Any = None,
        default_to_square: bool | None = None,
        image_mean: Any = None,
        image_std: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Converts all options to their canonical form and raises `ValueError` if they are invalid or conflict.

        For example, sizes become `SizeDict`, and mean and standard deviation become one number per channel.
        """
        if type(kwargs["num_channels"]) is not int or kwargs["num_channels"] < 1:
            raise ValueError(f"num_channels={kwargs['num_channels']!r} must be an integer of at least 1.")
        options = kwargs | {
            "size": to_size_dict(size, "size", default_to_square=default_to_square is not False),
            "crop_size": to_size_dict(crop_size, "crop_size", EXACT_KEYS),
            "pad_size": to_size_dict(pad_size, "pad_size", EXACT_KEYS),
            "image_mean": _per_channel(image_mean, "image_mean", kwargs["num_channels"]),
            "image_std": _per_channel(image_std, "image_std", kwargs["num_channels"]),
        }
        if options["do_pad"] and options["pad_size"] is not None and options["ensure_multiple_of"] is None:
            options["hide_padding"] = False  # Hiding padding requires the patch size.
        for name in ("ensure_multiple_of", "label_ids_to_fuse"):
            if isinstance(options[name], list):
                options[name] = tuple(options[name])
        # Convert torchvision's interpolation modes, which are not JSON-serializable, to PIL's.
        resample = torch_pil_interpolation_mapping.get(options["resample"], options["resample"])
        options["resample"] = _one_of(PILImageResampling, resample, "resample")
        data_format = _one_of(ChannelDimension, options["data_format"], "data_format")
        options["data_format"] = data_format and data_format.value
        if isinstance(options["device"], torch.device):
            options["device"] = str(options["device"])
        _check_together(options)
        return options

    def _preprocess_image_like_inputs(self, images: Any, targets: dict[str, Any], **kwargs: Any) -> BatchFeature:
        tensors, kind = self._prepare_image_like_inputs(images, **kwargs), target_kind(targets)
        if kwargs["do_affine_crop"]:
            return self._crops(tensors, targets, **kwargs)
        _refuse_boxes(targets.get("object_boxes"))
        if kind == "":
            return self._preprocess(tensors, **kwargs)
        if kind == "keypoints":
            return self._with_keypoints(tensors, targets["keypoints"], **kwargs)
        return (self._with_objects if kind in OBJECTS else self._with_maps)(tensors, targets, **kwargs)

    def _with_maps(self, tensors: Images, targets: dict[str, Any], **kwargs: Any) -> BatchFeature:
        read = read_targets(targets, _sizes(tensors))
        features = self._preprocess(tensors, **kwargs)
        canvas = None
        if kwargs["do_pad"] and not kwargs["hide_padding"]:
            canvas = height_and_width(kwargs["pad_size"])
        elif kwargs["do_pad"]:
            rows, columns = features["patch_attention_mask"][0].shape
            patch = to_pair(kwargs["ensure_multiple_of"])
            canvas = (rows * patch[0], columns * patch[1])
        place = partial(transform_target, canvas=canvas, **kwargs)
        for name, values in encode_targets(read, place, kwargs["do_reduce_labels"]).items():
            on_device = [value.to(tensors[0].device) for value in values]
            features[name] = self._collect(name, on_device, kwargs["return_tensors"])
        return features

    def _with_objects(self, tensors: Images, targets: dict[str, Any], **kwargs: Any) -> BatchFeature:
        sizes = _sizes(tensors)
        objects = read_objects(targets, sizes)
        features = self._preprocess(tensors, **kwargs)
        if "annotations" in targets:
            start = 0 if kwargs["data_format"] == "channels_last" else 1
            inputs = [tuple(image.shape[start : start + 2]) for image in features["pixel_values"]]
            labels = describe_annotations(targets["annotations"], objects, sizes, inputs, **kwargs)
        else:
            labels = encode_objects(objects, sizes, **kwargs)
        columns: dict[str, Any] = {
            name: self._collect(name, [own[name].to(tensors[0].device) for own in labels], kwargs["return_tensors"])
            for name in labels[0]
        }
        if "annotations" in targets and "patch_attention_mask" in features:
            columns["patch_attention_mask"] = features["patch_attention_mask"]
        features["labels"] = [
            dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
        ]
        return features

    def _with_keypoints(self, tensors: Images, keypoints: Any, **kwargs: Any) -> BatchFeature:
        if kwargs["do_resize"] or kwargs["do_center_crop"]:
            raise ValueError(
                "keypoints can be transformed with their image only if do_affine_crop=True. Set this option. For "
                "images that are crops already, set do_resize=False and do_center_crop=False instead."
            )
        labels = torch.cat(read_keypoints(keypoints, [1] * len(tensors)))  # (B, K, 3)
        features = self._preprocess(tensors, **kwargs)
        features["labels"] = self._collect("labels", list(labels.to(tensors[0].device)), kwargs["return_tensors"])
        return features

    def _crops(self, tensors: Images, targets: dict[str, Any], **kwargs: Any) -> BatchFeature:
        others = sorted(targets.keys() - {"object_boxes", "keypoints"})
        if others:
            raise ValueError(
                f"{' and '.join(others)} are given, but do_affine_crop=True supports only object_boxes and keypoints. "
                "Remove the other arguments, or set do_affine_crop=False."
            )
        size = height_and_width(kwargs["size"])
        boxes = read_object_boxes(targets.get("object_boxes"), _sizes(tensors))
        regions = [crop_regions(own.cpu(), size, kwargs["box_padding"]) for own in boxes]  # one (N, 4) per image
        labels = {}
        if "keypoints" in targets:
            keypoints = read_keypoints(targets["keypoints"], list(map(len, boxes)))
            placed = [keypoints_to_crops(*pair, size) for pair in zip(keypoints, regions, strict=True)]
            labels["labels"] = torch.cat(placed).to(tensors[0].device)  # (sum of N, K, 3)
        crops = [
            crop_region(image, region, size) for image, own in zip(tensors, regions, strict=True) for region in own
        ]
        # If there are no objects, preprocess one dummy crop, so that the empty result has the right shape and dtype.
        inputs = crops or [tensors[0].new_zeros(len(tensors[0]), *size)]
        features = self._preprocess(inputs, **kwargs | {"do_resize": False})
        features["pixel_values"] = features["pixel_values"][: len(crops)]
        return BatchFeature({**features, **self._to_batch_feature(labels, kwargs["return_tensors"])})

    def _collect(self, name: str, values: list[torch.Tensor], return_tensors: str | None) -> Any:
        """Stacks label maps of equal shape. Masks remain a list, because images have different numbers of masks."""
        if return_tensors is None:
            return self._to_batch_feature({name: values}, None)[name]
        if name == "labels":
            return self._to_batch_feature({name: torch.stack(values)}, return_tensors)[name]  # (B, h, w)
        return [self._to_batch_feature({name: value}, return_tensors)[name] for value in values]

    def _prepare_image_like_inputs(self, images: Any, *args: Any, **kwargs: Any) -> Images:
        options = _reading_options(kwargs)
        tensors = [read_image(image, name, **options) for name, image in named_images(images)]
        same_device = len({tensor.device for tensor in tensors}) == 1
        return tensors if same_device else [tensor.cpu() for tensor in tensors]

    def _resize_smoothly(self, images: Images, sizes: Sizes, options: dict[str, Any]) -> Images:
        """Resizes each image (C, H_i, W_i) to its own (height, width); subclasses must implement this method."""
        raise NotImplementedError

    def _preprocess(self, images: Images, **kwargs: Any) -> BatchFeature:
        return self._finish(self._place(images, **kwargs), **kwargs)

    def _place(self, images: Images, **options: Any) -> Images:
        """Resizes, center-crops and pads images (C, H_i, W_i) as specified by the options."""
        if options["do_resize"]:
            targets = [
                compute_resized_size(*size, **options, name=f"images[{index}]")
                for index, size in enumerate(_sizes(images))
            ]
            if options["resample"] == PILImageResampling.NEAREST:
                images = [resize_nearest(image, *hw) for image, hw in zip(images, targets, strict=True)]
            else:
                images = self._resize_smoothly(images, targets, options)
        if options["do_center_crop"]:
            crop_size, rounding = height_and_width(options["crop_size"]), options["crop_rounding"]
            images = [center_crop(image, *crop_size, rounding) for image in images]
        if options["do_pad"] and not options["hide_padding"]:
            target = height_and_width(options["pad_size"])
            images = [pad_to(image, *target, f"images[{i}]") for i, image in enumerate(images)]
        return images

    def _finish(self, images: Images, **options: Any) -> BatchFeature:
        """Rescales, normalizes and stacks resized images, with zero padding if `do_pad` and `hide_padding`."""
        return_tensors, data = options["return_tensors"], dict[str, Any]()
        if options["do_pad"] and options["hide_padding"]:
            normalized = [_normalize(image, **options) for image in images]
            target = None if options["pad_size"] is None else height_and_width(options["pad_size"])
            patch = to_pair(options["ensure_multiple_of"])
            data["pixel_values"], data["patch_attention_mask"] = pad_batch(normalized, patch, target)
        elif len({image.shape for image in images}) == 1:
            # Stack 8-bit images before converting them to float32, because float32 needs four times the memory.
            data["pixel_values"] = _normalize(torch.stack(images), **options)  # (B, C, H, W)
        elif return_tensors is None:
            data["pixel_values"] = [_normalize(image.contiguous(), **options) for image in images]
        else:
            shapes = sorted({*_sizes(images)})
            raise ValueError(
                f"The images have {len(shapes)} sizes, from {shapes[0]} to {shapes[-1]}, and cannot be stacked. "
                f"Resize to one {{'height', 'width'}}, set do_pad=True and ensure_multiple_of, or omit return_tensors."
            )
        if options["data_format"] == "channels_last":
            values = data["pixel_values"]
            is_batch = isinstance(values, torch.Tensor)
            data["pixel_values"] = values.movedim(-3, -1) if is_batch else [value.movedim(-3, -1) for value in values]
        return self._to_batch_feature(data, return_tensors)

    def _to_batch_feature(self, data: dict[str, Any], return_tensors: str | None) -> BatchFeature:
        if return_tensors is None:
            data = {name: list(values) for name, values in data.items()}
        elif return_tensors != "pt":
            data = {name: values.cpu() for name, values in data.items()}
        return BatchFeature(data=data, tensor_type=return_tensors)


def _sizes(images: Images) -> Sizes:
    return [(image.shape[-2], image.shape[-1]) for image in images]


def _refuse_boxes(object_boxes: Any) -> None:
    if object_boxes is not None:
        raise ValueError(
            "object_boxes are cropped only if do_affine_crop=True. Set do_affine_crop=True, or omit object_boxes."
        )


def _reading_options(options: dict[str, Any]) -> dict[str, Any]:
    """Selects the options that `read_image` accepts."""
    names = ("num_channels", "do_convert_rgb", "input_data_format", "do_rescale", "do_normalize", "device")
    return {name: options[name] for name in (*names, "rescale_factor") if name in options}


def _is_ours(options: dict[str, Any]) -> bool:
    """Returns whether options were saved by an image processor of this package or by a subclass of it."""
    kind = str(options.get("image_processor_type"))
    return kind.startswith("HfViTImageProcessor") or options.get("auto_map") == IMAGE_PROCESSOR_AUTO_MAP


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` that locate a file on the Hub, such as `revision` and `token`."""
    names = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
    return {name: kwargs[name] for name in names if name in kwargs}


def _model_type(name_or_path: str | os.PathLike[str], kwargs: dict[str, Any]) -> str:
    """Returns `model_type` from the config.json in a folder or repository, or next to a file; by default "vit"."""
    place = Path(name_or_path).parent if os.path.isfile(name_or_path) else name_or_path
    file = cached_file(str(place), CONFIG_NAME, **hub_arguments(kwargs), _raise_exceptions_for_missing_entries=False)
    config = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    return str(config.get("model_type", "vit"))


def _normalize(
    images: torch.Tensor,
    *,
    do_rescale: bool,
    rescale_factor: float,
    do_normalize: bool,
    image_mean: tuple[float, ...],
    image_std: tuple[float, ...],
    **_: Any,
) -> torch.Tensor:
    """Rescales and normalizes images (..., C, H, W) to float32 in one step, without modifying the input."""
    if not do_normalize:
        return images.to(torch.float32, copy=True).mul_(rescale_factor if do_rescale else 1)
    white = 1.0 / rescale_factor if do_rescale else 1.0
    mean, std = (
        torch.tensor(values, device=images.device)[:, None, None] * white for values in (image_mean, image_std)
    )
    return images.to(torch.float32, copy=True).sub_(mean).div_(std)


def channels_given(image_mean: Any = None, image_std: Any = None, **_: Any) -> dict[str, int]:
    """Returns `{"num_channels": n}` if `image_mean` and `image_std` have n values each, n = 2 or n > 3.

    Otherwise, returns `{}`, because images can then be converted to the configured number of channels.
    """
    if not (isinstance(image_mean, list | tuple) and isinstance(image_std, list | tuple)):
        return {}
    count = len(image_mean)
    return {"num_channels": count} if count == len(image_std) and count not in (0, 1, 3) else {}


def _one_of(kind: type[Enum], value: Any, name: str) -> Any:
    try:
        return None if value is None else kind(value)
    except ValueError as error:
        known = ", ".join(str(member.value) for member in kind)
        raise ValueError(f"{name}={value!r} is unknown. Choose one of {known}.") from error


def _per_channel(value: Any, name: str, num_channels: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        values = (float(value),) * num_channels if isinstance(value, int | float) else tuple(map(float, value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} must be one number, or one for each channel.") from error
    if len(values) != num_channels:
        raise ValueError(
            f"{name} has {len(values)} values, {list(values)}, but num_channels={num_channels}. Pass one number for "
            "all channels, or one for each."
        )
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{name}={list(values)} must contain only finite numbers.")
    return values


def _check_together(options: dict[str, Any]) -> None:
    multiple, pad_size = options["ensure_multiple_of"], options["pad_size"]
    factor = options["rescale_factor"]
    if options["do_affine_crop"]:
        _check_affine_crop(options)
    if options["do_rescale"] and factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"rescale_factor={factor} must be positive; 1/255 scales pixels to [0, 1].")
    if options["window_scale"] is not None and not 1 <= options["window_scale"] < math.inf:
        raise ValueError(f"window_scale={options['window_scale']} must be at least 1, or None to disable windows.")
    if options["image_std"] is not None and min(options["image_std"]) <= 0:
        raise ValueError(f"image_std={list(options['image_std'])} must be positive: pixels are divided by it.")
    for name, known in CHOICES.items():
        if options[name] not in known:
            raise ValueError(f"{name}={options[name]!r} must be one of {', '.join(map(str, known))}.")
    if options["do_convert_rgb"] and options["num_channels"] != 3:
        raise ValueError(
            f"do_convert_rgb=True makes 3 channels, but num_channels={options['num_channels']}. Omit do_convert_rgb."
        )
    if multiple is not None:
        pair = (multiple, multiple) if isinstance(multiple, int) else multiple
        if len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
            raise ValueError(f"ensure_multiple_of={multiple!r} must be one positive int or (height, width).")
        for name, is_used in (("crop_size", options["do_center_crop"]), ("pad_size", options["do_pad"])):
            size = options[name]
            if is_used and size is not None and (size.height % pair[0] or size.width % pair[1]):
                raise ValueError(f"{name}={dict(size)} must be a multiple of ensure_multiple_of={multiple}.")
    elif options["do_pad"] and options["hide_padding"]:
        raise ValueError(
            "do_pad=True pads to a multiple of the patch size and requires ensure_multiple_of. Set it to the "
            "patch_size of the model configuration, or set pad_size to pad all images to one size."
        )
    if options["do_pad"] and not options["hide_padding"] and pad_size is None:
        raise ValueError("hide_padding=False pads all images to one size. Set pad_size={'height', 'width'}.")
    if options["keep_aspect_ratio"] and "height" not in dict(options["size"] or {}):
        raise ValueError(
            f"keep_aspect_ratio=True requires a size with height and width, but size={dict(options['size'] or {})} "
            "always keeps the aspect ratio. Omit keep_aspect_ratio."
        )


def _check_affine_crop(options: dict[str, Any]) -> None:
    size, padding = dict(options["size"] or {}), options["box_padding"]
    if {*size} != {"height", "width"} or min(size.values()) < 2:
        raise ValueError(f"do_affine_crop needs an exact size, but size={size}. Use a height and width of at least 2.")
    if options["do_center_crop"] or options["do_pad"]:
        raise ValueError("do_affine_crop=True cannot be combined with do_center_crop or do_pad. Set them to False.")
    if padding is None or not 0 < padding < math.inf:
        raise ValueError(f"box_padding={padding} must be positive; 1.25 enlarges boxes by a quarter.")
