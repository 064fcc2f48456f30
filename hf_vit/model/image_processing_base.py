"""What the image processors of both backends share: options, the order of the steps, saving.

Shapes: B batch, C channels, H W pixels, h w patches, M masks, N objects, K keypoints.
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

from .configuration_hf_vit import INSTALL_COMMAND, to_pair
from .image_geometry import (
    CROP_ROUNDINGS,
    EXACT_KEYS,
    MULTIPLE_ROUNDINGS,
    center_crop,
    crop_region,
    crop_regions,
    height_and_width,
    keypoints_to_crops,
    pad_batch,
    pad_to,
    resize_nearest,
    resized_size,
    to_size_dict,
)
from .image_inputs import named_images, open_image, read_image
from .image_targets import (
    describe_annotations,
    encode_objects,
    encode_targets,
    place_target,
    read_keypoints,
    read_object_boxes,
    read_objects,
    read_targets,
    target_kind,
)
from .post_processing import CLASS_SCORES, HfViTPostProcessing
from .remote_code import check_reachable, copy_code
from .task_object_detection import class_scores_of


OBJECTS = ("boxes", "annotations")  # targets of detection
Images = list[torch.Tensor]  # (C, H_i, W_i) each
Sizes = list[tuple[int, int]]  # height and width of each
# Which class a saved folder opens with under each backend. The library would write the class that was saved, for both.
IMAGE_PROCESSOR_AUTO_MAP = {
    "AutoImageProcessor": {
        "torchvision": "image_processing_hf_vit.HfViTImageProcessor",
        "pil": "image_processing_pil_hf_vit.HfViTImageProcessorPil",
    }
}
CHOICES = {"class_scores": CLASS_SCORES, "crop_rounding": CROP_ROUNDINGS, "multiple_rounding": MULTIPLE_ROUNDINGS}


class HfViTImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """Options beyond the library's, at construction and per call; see `HfViTImageProcessorBase`."""

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
    """Turns images of any kind, size and color into the input of a Vision Transformer.

    Use it through `HfViTImageProcessor` or `HfViTImageProcessorPil`. Every option can also be given per call.

    Args:
        num_channels: Number of channels C that the model takes. Gray is repeated into 3, color becomes luma (ITU-R
            601) in 1, alpha is left out; other images must have C channels.
        do_convert_rgb: `None` follows `num_channels`; `True` insists on RGB (`num_channels=3`); `False` takes images
            only with the right number of channels and leaves CMYK, YCbCr, HSV and LAB as they are.
        do_resize: Whether to resize.
        size: {"height", "width"} exactly, or with the aspect ratio kept {"shortest_edge"}, {"longest_edge"}, both, or
            {"max_height", "max_width"}, in pixels. An int is a square.
        resample: PIL's filter; images shrink with antialiasing.
        ensure_multiple_of: Resized height and width are rounded to a multiple of it, at least one.
        multiple_rounding: Which multiple that is: the "nearest", or the one below ("down") as in transformers' YOLOS.
        keep_aspect_ratio: With {"height", "width"}, resizes to the one of them that scales an image less, and keeps
            its aspect ratio, as transformers' DPT and Depth Anything. The other forms of `size` keep it anyway.
        do_center_crop: Whether to cut out the center after resizing.
        crop_size: Its {"height", "width"}.
        crop_rounding: Where the crop starts if an odd number of pixels is left over: "down" as in transformers, or
            "half_to_even" as in torchvision and timm, a pixel further on every other time.
        do_rescale: Whether pixels are multiplied by `rescale_factor`. Then float arrays hold 0..255, otherwise 0..1.
            Others are refused, unless neither this nor `do_normalize` changes them.
        rescale_factor: 1/255 brings pixels to [0, 1].
        do_normalize: Whether the mean is taken off and the rest divided by the deviation.
        image_mean: One number, or one a channel.
        image_std: The same.
        do_pad: Whether to pad on the right and at the bottom, with zeros after normalization, to the largest image of
            the batch or `pad_size`. Height and width become multiples of `ensure_multiple_of`, which must be the patch
            size, and `patch_attention_mask` is returned.
        hide_padding: `False` pads with black to `pad_size` before normalization, as transformers' EoMT, without a
            `patch_attention_mask`: for models that were trained to see the padding. So it is, too, where `pad_size` is
            given without `ensure_multiple_of`.
        pad_size: {"height", "width"} to pad to.
        do_reduce_labels: Whether 0 in segmentation maps is the background, which becomes 255 and is ignored, and the
            other numbers, of classes or of the values of `instance_id_to_semantic_id`, are lowered by one.
        label_ids_to_fuse: Classes (sky, road, ...) of which `post_process_panoptic_segmentation` makes one segment an
            image, unless its call says otherwise.
        nms_threshold: IoU above which `post_process_object_detection` leaves out the less sure of two boxes of a
            class, unless its call says otherwise; `None` leaves none out.
        class_agnostic_nms: Whether it does so for two boxes of any classes, so that no object has several.
        do_affine_crop: Whether every box of an object becomes an image of its own, of the height and width `size`, for
            models of keypoints; the whole image where no boxes are given. In place of resizing, cropping and padding.
        box_padding: How many times as large as the box that image is, before its aspect ratio is made that of `size`.
        class_scores: How `post_process_object_detection` reads `logits` without `probabilities`, as scripts for the
            library's models pass them: "softmax", where the last class stands for no object, or "sigmoid".
        window_scale: How many times as large as `size` the pipeline of semantic segmentation sees an image, in sliding
            windows of `size`; `None` shows it whole. A call of the image processor itself always makes `size`.

    Raises:
        ValueError: if options contradict each other.
    """

    valid_kwargs = HfViTImageProcessorKwargs
    model_input_names: ClassVar[list[str]] = ["pixel_values", "patch_attention_mask"]

    resample = PILImageResampling.BILINEAR
    size: ClassVar[dict[str, int]] = {"height": 224, "width": 224}  # an instance gets its own copy
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

    # From the file of another image processor and the model type beside it to options of this one. The package sets
    # it: this file also goes where the package is not.
    _converter: ClassVar[Callable[[dict[str, Any], str], dict[str, Any]] | None] = None

    @classmethod
    def for_model(cls, model: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Returns a processor with the image size, number of channels and task of a model.

        Args:
            model: The model, or its configuration, which knows the task once it has been saved.
            **overrides: Options that are to be others.
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
        """Returns the options of a folder or repository, for `from_pretrained`, and the arguments that are left.

        The files of transformers' own image processors and timm's config.json are read as what they mean there. Where
        a file does not name its class, the `model_type` in the config.json beside it decides, and without one ViT's.

        Raises:
            OSError: if there is no file with such options, or it is one of weights.
            ValueError: if it belongs to another image processor that is not known or does what ours cannot, or the
                package that translates it is not installed.
        """
        read, name = super().get_image_processor_dict, pretrained_model_name_or_path
        if os.path.isfile(name) and Path(name).suffix != ".json":
            raise OSError(
                f"{str(name)!r} is no JSON file of options. hf_vit.convert.load_image_processor finds the image "
                "processor that belongs to a file of weights."
            )
        try:
            options, unused = read(name, **kwargs)
        except OSError as error:
            check_reachable(name, **hub_arguments(kwargs))
            # timm has no file of its own for them
            options, unused = read(name, **{**kwargs, "image_processor_filename": CONFIG_NAME})
            if not options.get("pretrained_cfg"):
                raise error
        if _is_ours(options):
            return options, unused
        if cls._converter is None:
            raise ValueError(
                f"{str(name)!r} has the options of another image processor, "
                f"{options.get('image_processor_type', 'without a name')}, which mean something else here. To have "
                f"them translated, run {INSTALL_COMMAND} and take the class from there: "
                f"`from hf_vit import {cls.__name__}`."
            )
        is_named = options.get("image_processor_type") or options.get("feature_extractor_type")
        return cls._converter(options, "vit" if is_named else _model_type(name, kwargs)), unused

    def to_dict(self) -> dict[str, Any]:
        """Returns the options, and which class reads them under each backend."""
        return {**super().to_dict(), "auto_map": copy.deepcopy(IMAGE_PROCESSOR_AUTO_MAP)}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Saves preprocessor_config.json, and the code that it points to. Returns the paths of the former."""
        copy_code(save_directory)
        files = super().save_pretrained(save_directory)
        if push_to_hub:  # the library would upload only what it has written itself
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
        """Returns images as the input of a model, and what it is trained on under the same geometry.

        Targets have the size of their image; maps are resized to the nearest pixel. Give one kind, for every image.

        Args:
            images: One image of any kind, an array or tensor (B, ., ., .), or a (nested) list of such.
            segmentation_maps: (H, W) of whole numbers each: class numbers, 255 where there is no truth. Arrays,
                tensors, PIL images (of palettes, the indices), paths, or an array (B, H, W).
            depth_maps: (H, W) of floats each: meters, or any other unit. 0, NaN, infinite and negative are invalid.
            mask_labels: Masks (M, H, W) of each image, with `class_labels`.
            class_labels: Class numbers (M,) of each image's masks or boxes.
            instance_id_to_semantic_id: The class of each number in `segmentation_maps`, for all images or for each,
                where these number segments. They become `mask_labels` and `class_labels`.
            annotations: Of each image `{"annotations": [{"bbox": [left, top, width, height], "category_id": ...}]}` in
                pixels, as in COCO and for transformers' DETR; `category_id` is the class number. Crowds are left out.
                `image_id` of the image and `area` of an object may be given.
            boxes: Boxes (N, 4) left, top, right and bottom in pixels of each image's objects, with `class_labels`.
            object_boxes: With `do_affine_crop`, the boxes (N, 4) of each image of which crops are made, `None` for the
                whole image.
            keypoints: (N, K, 3) x, y in pixels, the center of pixel i being at i, and visibility of each image's
                boxes: 0 not labeled, 1 hidden, 2 visible. Without `do_affine_crop`, (K, 3) of images that are crops
                already.
            **kwargs: Options for this call. With a mean and a deviation for each of 2, 4 or more channels, images have
                as many.

        Returns:
            `pixel_values` (B, C, h, w), with `do_pad` also `patch_attention_mask`; for segmentation maps `labels`
            (B, h, w) int64, 255 outside the image; for depth maps `labels` (B, h, w) float32, 0 where invalid and
            outside; for masks of each image `mask_labels` (M, h, w) float32 and `class_labels` (M,) int64, without
            masks of which no pixel is left; for boxes `labels`, of each image `{"class_labels" (N,) int64, "boxes"
            (N, 4) float32}`, center x, center y, width and height relative to the image without its padding, without
            objects that a crop cuts away, and for annotations what `describe_annotations` adds. With
            `do_affine_crop`, `pixel_values` (sum of N, C, h, w) and for keypoints `labels` (sum of N, K, 3) in pixels
            of the crops, all zeros for those not labeled or outside. Without `return_tensors`, lists.

        Raises:
            OSError: if a file cannot be opened or decoded.
            TypeError: if something is no image or target, or of a type of number that it cannot have.
            ValueError: if options, images and targets do not fit together.
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
        """Replaces every path, URL and data URL in a (nested) list by its PIL image."""
        if isinstance(images, list | tuple):
            return [self.fetch_images(image) for image in images]
        return open_image(images) if isinstance(images, str | os.PathLike) else images

    def process_image(self, image: Any, **kwargs: Any) -> torch.Tensor:
        """Returns one image of any kind as a tensor (C, H, W), uint8 or float32, not resized."""
        return self._prepare_image_like_inputs([image], **{"num_channels": self.num_channels, **kwargs})[0]

    def call_options(self, **kwargs: Any) -> dict[str, Any]:
        """Returns all options of a call that gives `kwargs`, checked, for the three steps of a call."""
        validate_typed_dict(self.valid_kwargs, kwargs)
        own = {name: getattr(self, name, None) for name in self._valid_kwargs_names}
        options = self._standardize_kwargs(**{**own, **channels_given(**kwargs), **kwargs})
        self._validate_preprocess_kwargs(**options)
        return options

    def read_pixels(self, image: Any, options: dict[str, Any], timeout: float | None = None) -> torch.Tensor:
        """Returns one image of any kind as a tensor (C, H, W), uint8 or float32; errors as of `preprocess`.

        With `to_model_size` and `finish_batch` this is a call in three steps, for those that read in threads and go on
        in batches. `options` are from `call_options`, `timeout` the seconds that a download may take.
        """
        return read_image(image, "the image", timeout=timeout, **_reading_options(options))

    def to_model_size(
        self, image: torch.Tensor, options: dict[str, Any], object_boxes: torch.Tensor | None = None
    ) -> Images:
        """Returns what the model sees of an image that is read, (C, h, w) each, small, and in 8 bits if it is.

        That is the image, resized and cropped; with `do_affine_crop` a crop of each box of `object_boxes` (N, 4), or
        of the whole image without these.
        """
        if not options["do_affine_crop"]:
            _refuse_boxes(object_boxes)
            return self._place([image], **options)
        (boxes,) = read_object_boxes([object_boxes], _sizes([image]))
        size = height_and_width(options["size"])
        return [crop_region(image, region, size) for region in crop_regions(boxes.cpu(), size, options["box_padding"])]

    def finish_batch(self, images: Images, options: dict[str, Any], device: Any = None) -> BatchFeature:
        """Returns `pixel_values`, and with padding `patch_attention_mask`, of resized images (C, h, w) of one size.

        They go to the device in 8 bits, and are rescaled, normalized and padded there.
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
        """Returns the options in one form, by name; `ValueError` if they are wrong or contradict."""
        # Sizes have any form that `to_size_dict` takes; mean and deviation are one number or one for each channel.
        if type(kwargs["num_channels"]) is not int or kwargs["num_channels"] < 1:
            raise ValueError(f"num_channels={kwargs['num_channels']!r} must be a whole number of at least 1.")
        options = kwargs | {
            "size": to_size_dict(size, "size", default_to_square=default_to_square is not False),
            "crop_size": to_size_dict(crop_size, "crop_size", EXACT_KEYS),
            "pad_size": to_size_dict(pad_size, "pad_size", EXACT_KEYS),
            "image_mean": _per_channel(image_mean, "image_mean", kwargs["num_channels"]),
            "image_std": _per_channel(image_std, "image_std", kwargs["num_channels"]),
        }
        if options["do_pad"] and options["pad_size"] is not None and options["ensure_multiple_of"] is None:
            options["hide_padding"] = False  # there are no patches to hide
        for name in ("ensure_multiple_of", "label_ids_to_fuse"):
            if isinstance(options[name], list):
                options[name] = tuple(options[name])
        # torchvision's own names cannot be written to JSON
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
        place = partial(place_target, canvas=canvas, **kwargs)
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
                "keypoints are given, which follow their image only with do_affine_crop=True. Set it; for images that "
                "are crops already set do_resize=False and do_center_crop=False."
            )
        labels = torch.cat(read_keypoints(keypoints, [1] * len(tensors)))  # (B, K, 3)
        features = self._preprocess(tensors, **kwargs)
        features["labels"] = self._collect("labels", list(labels.to(tensors[0].device)), kwargs["return_tensors"])
        return features

    def _crops(self, tensors: Images, targets: dict[str, Any], **kwargs: Any) -> BatchFeature:
        others = sorted(targets.keys() - {"object_boxes", "keypoints"})
        if others:
            raise ValueError(
                f"{' and '.join(others)} are given, but do_affine_crop=True makes crops of object_boxes, for "
                "keypoints alone. Leave them out, or set do_affine_crop=False."
            )
        size = height_and_width(kwargs["size"])
        boxes = read_object_boxes(targets.get("object_boxes"), _sizes(tensors))
        regions = [crop_regions(own.cpu(), size, kwargs["box_padding"]) for own in boxes]  # (N, 4) each
        labels = {}
        if "keypoints" in targets:
            keypoints = read_keypoints(targets["keypoints"], list(map(len, boxes)))
            placed = [keypoints_to_crops(*pair, size) for pair in zip(keypoints, regions, strict=True)]
            labels["labels"] = torch.cat(placed).to(tensors[0].device)  # (sum of N, K, 3)
        crops = [
            crop_region(image, region, size) for image, own in zip(tensors, regions, strict=True) for region in own
        ]
        # where no image has an object, one in its place keeps the form of the result
        inputs = crops or [tensors[0].new_zeros(len(tensors[0]), *size)]
        features = self._preprocess(inputs, **kwargs | {"do_resize": False})
        features["pixel_values"] = features["pixel_values"][: len(crops)]
        return BatchFeature({**features, **self._to_batch_feature(labels, kwargs["return_tensors"])})

    def _collect(self, name: str, values: list[torch.Tensor], return_tensors: str | None) -> Any:
        """Stacks labels of one shape for each image; masks, of which images have any number, stay a list."""
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
        """Resizes images (C, H_i, W_i) to their own (height, width) each; a backend's one duty."""
        raise NotImplementedError

    def _preprocess(self, images: Images, **kwargs: Any) -> BatchFeature:
        return self._finish(self._place(images, **kwargs), **kwargs)

    def _place(self, images: Images, **options: Any) -> Images:
        """Returns images (C, H_i, W_i) at the size that the model takes."""
        if options["do_resize"]:
            targets = [
                resized_size(*size, **options, name=f"images[{index}]") for index, size in enumerate(_sizes(images))
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
        """Pads, stacks, rescales and normalizes images that have their size."""
        return_tensors, data = options["return_tensors"], dict[str, Any]()
        if options["do_pad"] and options["hide_padding"]:
            normalized = [_normalize(image, **options) for image in images]
            target = None if options["pad_size"] is None else height_and_width(options["pad_size"])
            patch = to_pair(options["ensure_multiple_of"])
            data["pixel_values"], data["patch_attention_mask"] = pad_batch(normalized, patch, target)
        elif len({image.shape for image in images}) == 1:
            # 8-bit images are stacked before they grow to floats
            data["pixel_values"] = _normalize(torch.stack(images), **options)  # (B, C, H, W)
        elif return_tensors is None:
            data["pixel_values"] = [_normalize(image.contiguous(), **options) for image in images]
        else:
            shapes = sorted({*_sizes(images)})
            raise ValueError(
                f"The images have {len(shapes)} sizes, from {shapes[0]} to {shapes[-1]}, and do not stack. Resize to "
                f"one {{'height', 'width'}}, set do_pad=True with ensure_multiple_of, or leave return_tensors out."
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
        raise ValueError("object_boxes are given, of which only do_affine_crop=True makes crops. Set it.")


def _reading_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns those options of a call that concern the reading of images."""
    names = ("num_channels", "do_convert_rgb", "input_data_format", "do_rescale", "do_normalize", "device")
    return {name: options[name] for name in (*names, "rescale_factor") if name in options}


def _is_ours(options: dict[str, Any]) -> bool:
    """Whether a file was written by one of our classes, or by one that is derived from them."""
    kind = str(options.get("image_processor_type"))
    return kind.startswith("HfViTImageProcessor") or options.get("auto_map") == IMAGE_PROCESSOR_AUTO_MAP


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns those arguments that say where on the Hub something is."""
    names = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
    return {name: kwargs[name] for name in names if name in kwargs}


def _model_type(name_or_path: str | os.PathLike[str], kwargs: dict[str, Any]) -> str:
    """Returns the `model_type` in the config.json of a folder or repository, or beside a file; "vit" without one."""
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
    """Returns float32 images (..., C, H, W), rescaled and normalized in one go; the input is left as it is."""
    if not do_normalize:
        return images.to(torch.float32, copy=True).mul_(rescale_factor if do_rescale else 1)
    white = 1.0 / rescale_factor if do_rescale else 1.0
    mean, std = (
        torch.tensor(values, device=images.device)[:, None, None] * white for values in (image_mean, image_std)
    )
    return images.to(torch.float32, copy=True).sub_(mean).div_(std)


def channels_given(image_mean: Any = None, image_std: Any = None, **_: Any) -> dict[str, int]:
    """Returns as `num_channels` how many means and deviations a call gives, unless images are converted to as many."""
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
            f"{name} has {len(values)} values, {list(values)}, but num_channels={num_channels}. Give one number for "
            "all channels, or one for each."
        )
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{name}={list(values)} must hold finite numbers.")
    return values


def _check_together(options: dict[str, Any]) -> None:
    multiple, pad_size = options["ensure_multiple_of"], options["pad_size"]
    factor = options["rescale_factor"]
    if options["do_affine_crop"]:
        _check_affine_crop(options)
    if options["do_rescale"] and factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"rescale_factor={factor} must be positive; 1/255 brings pixels to [0, 1].")
    if options["window_scale"] is not None and not 1 <= options["window_scale"] < math.inf:
        raise ValueError(f"window_scale={options['window_scale']} must be at least 1, or None for whole images.")
    if options["image_std"] is not None and min(options["image_std"]) <= 0:
        raise ValueError(f"image_std={list(options['image_std'])} must be positive: pixels are divided by it.")
    for name, known in CHOICES.items():
        if options[name] not in known:
            raise ValueError(f"{name}={options[name]!r} must be one of {', '.join(map(str, known))}.")
    if options["do_convert_rgb"] and options["num_channels"] != 3:
        raise ValueError(f"do_convert_rgb=True makes 3 channels, but num_channels={options['num_channels']}. Omit it.")
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
            "do_pad=True pads to whole patches, so it needs ensure_multiple_of. Set it to the patch size of the "
            "model, config.patch_size, or give a pad_size that all images are padded to."
        )
    if options["do_pad"] and not options["hide_padding"] and pad_size is None:
        raise ValueError("hide_padding=False pads every image to one size. Give it as pad_size={'height', 'width'}.")
    if options["keep_aspect_ratio"] and "height" not in dict(options["size"] or {}):
        raise ValueError(
            f"keep_aspect_ratio=True needs a size with height and width, but size={dict(options['size'] or {})} keeps "
            "the ratio anyway. Leave keep_aspect_ratio out."
        )


def _check_affine_crop(options: dict[str, Any]) -> None:
    size, padding = dict(options["size"] or {}), options["box_padding"]
    if {*size} != {"height", "width"} or min(size.values()) < 2:
        raise ValueError(f"do_affine_crop makes crops of one size, but size={size}. Give sides of 2 pixels or more.")
    if options["do_center_crop"] or options["do_pad"]:
        raise ValueError("do_affine_crop=True only cuts out boxes. Set do_center_crop and do_pad to False.")
    if padding is None or not 0 < padding < math.inf:
        raise ValueError(f"box_padding={padding} must be positive; 1.25 shows a quarter more than the box.")
