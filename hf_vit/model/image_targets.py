"""Functions that convert training targets (segmentation maps, depth maps, masks, boxes, keypoints) to tensors.

Shapes: B batch, H W pixels of an image, h w pixels of the model input, M masks or remaining boxes, N
objects, K keypoints.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index as index_of
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .configuration_hf_vit import to_pair
from .image_geometry import center_crop, compute_resized_size, resize_nearest, split_between_ends
from .image_inputs import array_to_tensor, is_pil, name_with_source, open_image, upright


IGNORED_LABEL = 255  # Value of unlabeled pixels in semantic segmentation maps.
NO_SEGMENT = -1  # Value of pixels without a segment in maps of segment ids.
KINDS = ("segmentation_maps", "depth_maps", "mask_labels", "boxes", "annotations", "keypoints")
WITH_CLASSES = ("mask_labels", "boxes")  # kinds of targets that require class_labels
DIMENSIONS = {
    "segmentation_maps": "(height, width)",
    "depth_maps": "(height, width)",
    "mask_labels": "(masks, height, width)",
    "boxes": "(objects, 4)",
    "keypoints": "(objects, keypoints, 3)",
}
# PIL modes with one integer per pixel. For palette images ("P"), the integer is the palette index.
INDEX_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")
Box = tuple[float, float, float, float]  # left, top, right, bottom


def read_targets(targets: dict[str, Any], sizes: list[tuple[int, int]]) -> dict[str, list[Any]]:
    """Converts the targets of all images to tensors and checks them against the image sizes (height, width).

    Returns a dictionary of lists with one entry per image: int64 `segmentation_maps` (H, W), float32 `depth_maps`
    (H, W) with 0 for invalid pixels, or bool `mask_labels` (M, H, W) with int64 `class_labels` (M,). If the targets
    contain `instance_id_to_semantic_id`, the result contains it too.
    """
    kind = target_kind(targets)
    values = _targets_as_list(targets[kind], kind)
    for index, value in enumerate(values):
        if not isinstance(value, str | os.PathLike | np.ndarray | Tensor) and not is_pil(value):
            raise TypeError(
                f"{kind}[{index}] is of type {type(value).__name__}, which is not supported. Pass an array, a tensor, "
                "a PIL image or a path for each image. Convert nested lists by np.array."
            )
    check_count(values, kind, sizes)
    tensors = [_read_target(value, kind, index, sizes[index]) for index, value in enumerate(values)]
    read: dict[str, list[Any]] = {kind: tensors}
    if kind == "mask_labels":
        is_single = values is not targets[kind]
        classes = [targets["class_labels"]] if is_single else list(targets["class_labels"])
        check_count(classes, "class_labels", sizes)
        read["class_labels"] = [
            read_classes(value, len(tensors[i]), f"class_labels[{i}]", f"mask_labels[{i}]")
            for i, value in enumerate(classes)
        ]
    if "instance_id_to_semantic_id" in targets:
        given = targets["instance_id_to_semantic_id"]
        mappings = [given] * len(sizes) if isinstance(given, dict) else given
        check_count(mappings, "instance_id_to_semantic_id", sizes)
        read["instance_id_to_semantic_id"] = mappings
    return read


def transform_target(target: Tensor, fill: float, *, canvas: tuple[int, int] | None, **options: Any) -> Tensor:
    """Resizes, crops and pads a target (..., H, W) in the same way as the image, given image processor options.

    `fill` is the value of pixels outside the image. `canvas` is the size in pixels to which the batch is padded, or
    None without padding.
    """
    if options["do_resize"]:
        target = resize_nearest(target, *compute_resized_size(target.shape[-2], target.shape[-1], **options))
    if options["do_center_crop"]:
        target = center_crop(target, **dict(options["crop_size"]), rounding=options["crop_rounding"], fill=fill)
    if canvas is not None:
        missing = (canvas[0] - target.shape[-2], canvas[1] - target.shape[-1])
        target = F.pad(target, (0, missing[1], 0, missing[0]), value=fill)
    return target


def encode_targets(
    targets: dict[str, list[Any]], place: Callable[[Tensor, float], Tensor], do_reduce_labels: bool
) -> dict[str, list[Tensor]]:
    """Resizes, crops and pads targets by the function `place` and converts them to labels, one entry per image.

    Returns `labels` (h, w), or float32 `mask_labels` (M, h, w) and `class_labels` (M,) without empty masks.
    `place(target, fill)` transforms a target in the same way as the image, with the value `fill` outside the image.
    """
    if "depth_maps" in targets:
        return {"labels": [place(depth, 0) for depth in targets["depth_maps"]]}
    if "mask_labels" in targets:
        placed = [place(masks, 0) for masks in targets["mask_labels"]]
        pairs = [_remove_empty_masks(*pair) for pair in zip(placed, targets["class_labels"], strict=True)]
    elif "instance_id_to_semantic_id" in targets:
        mappings = targets["instance_id_to_semantic_id"]
        pairs = [
            _split_segments(place(ids, NO_SEGMENT), mappings[index], do_reduce_labels, f"segmentation_maps[{index}]")
            for index, ids in enumerate(targets["segmentation_maps"])
        ]
    else:
        maps = [place(classes, IGNORED_LABEL) for classes in targets["segmentation_maps"]]
        if do_reduce_labels:
            maps = [torch.where((own == 0) | (own == IGNORED_LABEL), IGNORED_LABEL, own - 1) for own in maps]
        return {"labels": maps}
    return {"mask_labels": [masks.float() for masks, _ in pairs], "class_labels": [classes for _, classes in pairs]}


def target_kind(targets: dict[str, Any]) -> str:
    """Returns the kind of targets, one of `KINDS`, or "" without targets; raises `ValueError` for several kinds."""
    kinds = [name for name in KINDS if name in targets]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} are given, but a model is trained on one kind of target. Pass one.")
    kind = kinds[0] if kinds else ""
    if "class_labels" in targets and kind not in WITH_CLASSES:
        raise ValueError("class_labels is given without mask_labels or boxes. Pass both, with one entry per image.")
    if "class_labels" not in targets and kind in WITH_CLASSES:
        raise ValueError(f"{kind} is given without class_labels. Pass both, with one entry per image.")
    if "instance_id_to_semantic_id" in targets and kind != "segmentation_maps":
        raise ValueError("instance_id_to_semantic_id is given without segmentation_maps. Pass both.")
    return kind


def _targets_as_list(targets: Any, kind: str) -> Any:
    """Wraps the target of a single image in a list; lists and batched arrays or tensors are returned unchanged."""
    if isinstance(targets, list | tuple):
        return targets
    dimensions = 3 if kind == "mask_labels" else 2
    is_batch = isinstance(targets, np.ndarray | Tensor) and targets.ndim == dimensions + 1
    return targets if is_batch else [targets]


def check_count(values: Any, name: str, images: Sequence[Any]) -> None:
    """Raises `ValueError` if the number of values differs from the number of images."""
    if len(values) != len(images):
        shape = f" of shape {tuple(values.shape)}" if isinstance(values, np.ndarray | Tensor) else ""
        form = f" of {DIMENSIONS[name]}" if name in DIMENSIONS else ""
        raise ValueError(
            f"{name}{shape} has {len(values)} entries, but there are {len(images)} images. Pass one{form} per image."
        )


def _read_target(value: Any, kind: str, index: int, size: tuple[int, int]) -> Tensor:
    """Reads the map or masks (..., H, W) of one image and checks that they match its `size` (height, width)."""
    name = f"{kind}[{index}]"
    target = READERS[kind](_to_tensor(value, name), name)
    if target.ndim != (3 if kind == "mask_labels" else 2):
        raise ValueError(
            f"{name} has the shape {tuple(target.shape)}, but must be {DIMENSIONS[kind]}, with the height and width "
            f"{size[0]} x {size[1]} of its image."
        )
    if tuple(target.shape[-2:]) != size:
        raise ValueError(
            f"{name} has {target.shape[-2]} x {target.shape[-1]} pixels, but images[{index}] has {size[0]} x "
            f"{size[1]}. An image and its target must have the same size before preprocessing."
        )
    return target


def _to_tensor(target: Any, name: str) -> Tensor:
    if isinstance(target, str | os.PathLike):
        target, name = open_image(target, name), name_with_source(name, target)
    elif is_pil(target):
        target = upright(target, name)
    if is_pil(target):
        if target.mode not in (*INDEX_MODES, "F"):
            raise ValueError(
                f"{name} has mode {target.mode!r}, but a target has one number per pixel: mode 'L', 'P', 'I' or 'F'. "
                "Convert colors to class indices first."
            )
        return array_to_tensor(np.array(target), name)
    tensor: Tensor = target.detach() if isinstance(target, Tensor) else array_to_tensor(target, name)
    return tensor


def _read_segmentation_map(numbers: Tensor, name: str) -> Tensor:
    if numbers.is_floating_point() or numbers.is_complex():
        raise TypeError(f"{name} has dtype {numbers.dtype}, but class indices are integers. Convert it to int64.")
    numbers = numbers.to(torch.int64)
    if (numbers < 0).any():
        raise ValueError(
            f"{name} contains {int(numbers.min())}, but classes and segments are numbered from 0. Set unlabeled "
            f"pixels to {IGNORED_LABEL}."
        )
    return numbers


def _read_depth_map(numbers: Tensor, name: str) -> Tensor:
    if not numbers.is_floating_point():
        raise TypeError(
            f"{name} has dtype {numbers.dtype}, whose unit is unknown. Divide it by its units per meter (1000 for "
            "millimeters, 256 for KITTI) to get floats in meters."
        )
    depth = numbers.to(torch.float32)
    return torch.where(depth.isfinite() & (depth > 0), depth, 0)


def _read_masks(numbers: Tensor, name: str) -> Tensor:
    if numbers.dtype != torch.bool and not ((numbers == 0) | (numbers == 1)).all():
        raise ValueError(f"{name} has values other than 0 and 1. Pass bool masks, such as segment_map == segment_id.")
    return numbers.to(torch.bool)


READERS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "segmentation_maps": _read_segmentation_map,
    "depth_maps": _read_depth_map,
    "mask_labels": _read_masks,
}


def read_classes(classes: Any, count: int, name: str, of: str) -> Tensor:
    """Converts `count` class indices to an int64 tensor (count,) and checks that they are integers of at least 0.

    In error messages, `name` stands for the class indices, and `of` for the masks or boxes that they belong to.
    """
    try:
        numbers = torch.as_tensor(classes)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is {classes!r}, but class indices are integers. Use the ids of label2id.") from error
    if numbers.shape != (count,):
        raise ValueError(
            f"{name} has the shape {tuple(numbers.shape)}, but {of} has {count} entries. Pass one class index per "
            "entry."
        )
    if numbers.is_floating_point() and count > 0:  # torch.as_tensor([]) is a float tensor
        raise TypeError(f"{name} has dtype {numbers.dtype}, but class indices are integers. Convert it to int64.")
    if (numbers < 0).any():
        raise ValueError(f"{name} contains {int(numbers.min())}, but class indices start at 0.")
    return numbers.to(torch.int64)


def _remove_empty_masks(masks: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    is_left = masks.flatten(1).any(dim=1)  # (M,)
    return masks[is_left], classes.to(masks.device)[is_left]


def _split_segments(ids: Tensor, mapping: dict[int, int], do_reduce_labels: bool, name: str) -> tuple[Tensor, Tensor]:
    """Splits a map (h, w) of segment ids into masks (M, h, w) and their class indices (M,) given by `mapping`."""
    nothing = {NO_SEGMENT, *({0} if do_reduce_labels else ()), *({IGNORED_LABEL} - mapping.keys())}
    numbers = [number for number in ids.unique().tolist() if number not in nothing]
    if unknown := [number for number in numbers if number not in mapping]:
        raise ValueError(
            f"{name} has the segments {', '.join(map(str, unknown))}, which are not in instance_id_to_semantic_id. "
            f"Add their classes, or set their pixels to {IGNORED_LABEL}, which is ignored."
        )
    for number in numbers:
        if not isinstance(mapping[number], int | np.integer) or mapping[number] < 0:
            raise ValueError(
                f"instance_id_to_semantic_id gives the class {mapping[number]!r} to segment {number} of {name}. "
                "Class indices are integers of at least 0."
            )
    if do_reduce_labels:  # removes segments of class 0, the background
        numbers = [number for number in numbers if mapping[number] > 0]
    classes = torch.tensor([mapping[number] - do_reduce_labels for number in numbers], dtype=torch.int64)  # (M,)
    return ids == torch.tensor(numbers, dtype=torch.int64, device=ids.device)[:, None, None], classes  # (M, h, w)


def _to_floats(values: Any, name: str, form: str) -> Tensor:
    """Converts an array, tensor or nested lists to a float32 tensor; `form` is the expected form in error messages."""
    try:
        numbers = torch.as_tensor(np.asarray(values, dtype=np.float32) if isinstance(values, list | tuple) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={values!r} must be {form}.") from error
    return numbers.detach().float()


def read_boxes(boxes: Any, name: str) -> Tensor:
    """Converts boxes in an array, a tensor or nested lists to a float32 tensor (N, 4) and checks their values."""
    values = _to_floats(boxes, name, "rows of four numbers each, (left, top, right, bottom)")
    values = values.reshape(0, 4) if values.numel() == 0 else values
    if values.ndim != 2 or values.shape[1] != 4:
        raise ValueError(f"{name} has the shape {tuple(values.shape)}, but must be (N, 4): left, top, right, bottom.")
    wrong = ~values.isfinite().all(dim=1) | (values[:, 2:] < values[:, :2]).any(dim=1)  # (N,)
    if wrong.any():
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name}[{index}] is {values[index].tolist()}, but must be finite with right >= left and bottom >= top."
        )
    return values


def read_object_boxes(boxes: Any, sizes: Sequence[tuple[int, int] | None]) -> list[Tensor]:
    """Reads and checks the object boxes (N, 4) of each image as left, top, right and bottom in pixels.

    `None` as `boxes`, or as the boxes of one image, stands for one box around the whole image. `sizes` are the height
    and width of each image, or `None` if unknown.
    """
    given = [None] * len(sizes) if boxes is None else boxes
    check_count(given, "object_boxes", sizes)
    return [_read_boxes_of_image(own, sizes[index], f"object_boxes[{index}]") for index, own in enumerate(given)]


def _read_boxes_of_image(boxes: Any, size: tuple[int, int] | None, name: str) -> Tensor:
    if boxes is None:
        if size is None:
            raise ValueError(f"{name} is None (the whole image), but the image size is unknown. Pass target_sizes.")
        return torch.tensor([[0.0, 0.0, size[1], size[0]]])
    values = read_boxes(boxes, name)
    for index, (left, top, right, bottom) in enumerate(values.tolist()):
        if right == left or bottom == top:
            raise ValueError(f"{name}[{index}] is {values[index].tolist()}, a box with no area. Remove or enlarge it.")
        if size is not None and (right <= 0 or bottom <= 0 or left >= size[1] or top >= size[0]):
            raise ValueError(
                f"{name}[{index}] is {values[index].tolist()}, outside of its image of {size[1]} x {size[0]} pixels. "
                "Boxes are (left, top, right, bottom) in pixels of the original image."
            )
    return values


def read_keypoints(keypoints: Any, counts: list[int]) -> list[Tensor]:
    """Reads and checks the keypoints (N, K, 3) of the objects of each image: x and y in pixels, and visibility.

    An image with one object may have keypoints (K, 3). `counts` are the numbers of objects per image.
    """
    check_count(keypoints, "keypoints", counts)
    read = [_read_keypoints_of_image(own, counts[index], f"keypoints[{index}]") for index, own in enumerate(keypoints)]
    numbers = sorted({own.shape[1] for own in read})
    if len(numbers) > 1:
        raise ValueError(
            f"The objects have {' and '.join(map(str, numbers))} keypoints. All objects must have the same number."
        )
    return read


def _read_keypoints_of_image(keypoints: Any, count: int, name: str) -> Tensor:
    values = _to_floats(keypoints, name, "(N, K, 3): K keypoints for each of N objects, three numbers each")
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3 or values.shape[2] != 3 or len(values) != count:
        raise ValueError(
            f"{name} has the shape {tuple(values.shape)}, but must be (N, K, 3) for the {count} objects of its image."
        )
    wrong = ~values.isfinite().all(dim=2) | ~torch.isin(values[..., 2], values.new_tensor([0, 1, 2]))  # (N, K)
    if wrong.any():
        index, number = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}[{index}][{number}] is {values[index, number].tolist()}, but must be finite x, y and a visibility "
            "of 0 (not labeled), 1 (hidden) or 2 (visible)."
        )
    return values


def read_objects(targets: Mapping[str, Any], sizes: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Reads boxes (N, 4) in pixels and class indices (N,) of the objects in each image.

    `targets` contains "annotations", or "boxes" with "class_labels", in the format of `preprocess`.
    """
    if "annotations" in targets:
        given = targets["annotations"]
        images = [given] if isinstance(given, Mapping) else given
        check_count(images, "annotations", sizes)
        return [_read_annotations(image, f"annotations[{index}]") for index, image in enumerate(images)]
    check_count(targets["boxes"], "boxes", sizes)
    check_count(targets["class_labels"], "class_labels", sizes)
    boxes = [read_boxes(own, f"boxes[{index}]") for index, own in enumerate(targets["boxes"])]
    classes = [
        read_classes(own, len(boxes[index]), f"class_labels[{index}]", f"boxes[{index}]")
        for index, own in enumerate(targets["class_labels"])
    ]
    return list(zip(boxes, classes, strict=True))


def _read_annotations(image: Any, name: str) -> tuple[Tensor, Tensor]:
    if not isinstance(image, Mapping) or "annotations" not in image:
        raise ValueError(f"{name} is {image!r}, but must be a dictionary with a list of 'annotations', as in COCO.")
    boxes, classes = [], []
    for index, entry in enumerate(image["annotations"]):
        place = f"{name}['annotations'][{index}]"
        for key in ("bbox", "category_id"):
            if key not in entry:
                raise ValueError(f"{place} has no {key!r}, but only {', '.join(entry)}. Add it.")
        if entry.get("iscrowd"):
            continue
        box, number = entry["bbox"], entry["category_id"]
        if len(box) != 4 or min(box[2:]) < 0:
            raise ValueError(
                f"{place} has the bbox {box}, but must be [left, top, width, height] in pixels, with no negative size."
            )
        boxes.append([box[0], box[1], box[0] + box[2], box[1] + box[3]])
        try:  # classes may be floats, because some augmentations store them in the box array
            classes.append(int(number) if isinstance(number, float) and number.is_integer() else index_of(number))
        except TypeError as error:
            raise TypeError(f"{place} has the category_id {number!r}, but class indices are integers.") from error
    numbers = read_classes(classes, len(boxes), f"The category_id of {name}", name)
    return read_boxes(boxes, f"{name}['annotations']"), numbers


def visible_window(height: int, width: int, **options: Any) -> Box:
    """Returns the window of an image that the model input covers: left, top, right and bottom, relative to the image.

    The whole image is (0, 0, 1, 1). A center crop makes the window smaller, or larger if the crop exceeds the image.
    Padding that is hidden from the model is excluded, except in patches that the image fills partially.
    """
    multiple, crop_size, pad_size = (options[name] for name in ("ensure_multiple_of", "crop_size", "pad_size"))
    if options["do_resize"]:
        height, width = compute_resized_size(height, width, **options)
    before_x, after_x, before_y, after_y = 0, 0, 0, 0
    if options["do_center_crop"] and crop_size is not None:
        before_x, after_x = split_between_ends(crop_size["width"] - width, options["crop_rounding"])
        before_y, after_y = split_between_ends(crop_size["height"] - height, options["crop_rounding"])
    left, top, right, bottom = -before_x, -before_y, width + after_x, height + after_y
    if options["do_pad"] and options["hide_padding"] and multiple is not None:
        patch = to_pair(multiple)
        right, bottom = left - (left - right) // patch[1] * patch[1], top - (top - bottom) // patch[0] * patch[0]
    elif options["do_pad"] and pad_size is not None:
        right, bottom = left + pad_size["width"], top + pad_size["height"]
    return left / width, top / height, right / width, bottom / height


def encode_boxes(boxes: Tensor, size: tuple[int, int], window: Box | Tensor) -> tuple[Tensor, Tensor]:
    """Clips boxes (N, 4) in pixels to the window of the image that the model input covers; see `visible_window`.

    Returns the boxes (M, 4) that overlap the window, as center x, center y, width and height relative to the window,
    and a mask (N,) that is True for these boxes. `size` is the height and width of the image.
    """
    relative = boxes / boxes.new_tensor([size[1], size[0]]).repeat(2)  # (N, 4)
    origin, extent = _origin_and_extent(window, boxes)
    corners = ((relative.clamp(0, 1) - origin) / extent).clamp(0, 1)  # (N, 4)
    low, high = corners[:, :2], corners[:, 2:]
    is_left = (high > low).all(dim=1)  # (N,)
    return torch.cat(((low + high) / 2, high - low), dim=1)[is_left], is_left


def decode_boxes(boxes: Tensor, size: tuple[int, int], window: Box) -> Tensor:
    """Converts boxes (..., 4), relative to the window, to left, top, right and bottom in pixels of the image."""
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    origin, extent = _origin_and_extent(window, boxes)
    relative = torch.cat((center - half, center + half), dim=-1) * extent + origin  # (..., 4)
    return relative * boxes.new_tensor([size[1], size[0]]).repeat(2)


def _origin_and_extent(window: Box | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    corners = torch.as_tensor(window, dtype=like.dtype, device=like.device)
    return corners[:2].repeat(2), (corners[2:] - corners[:2]).repeat(2)


def encode_objects(
    objects: Iterable[tuple[Tensor, Tensor]], sizes: list[tuple[int, int]], **options: Any
) -> list[dict[str, Tensor]]:
    """Returns `class_labels` (M,) and `boxes` (M, 4) of each image, without objects outside the model input.

    `objects` is the result of `read_objects`, and `options` are the options of the image processor.
    """
    labels = []
    for (boxes, classes), size in zip(objects, sizes, strict=True):
        encoded, is_left = encode_boxes(boxes, size, visible_window(*size, **options))
        labels.append({"class_labels": classes.to(boxes.device)[is_left], "boxes": encoded})
    return labels


def describe_annotations(
    annotations: Any,
    objects: Iterable[tuple[Tensor, Tensor]],
    sizes: list[tuple[int, int]],
    inputs: list[tuple[int, ...]],
    **options: Any,
) -> list[dict[str, Tensor]]:
    """Returns the labels of each image, with the same entries as in DETR in transformers, and additionally `window`.

    - `class_labels` (M,), and `boxes` (M, 4) relative to the whole image, even if the model input covers only a part.
    - `area` (M,) in pixels of the resized image, and `iscrowd` (M,), which is always 0.
    - `orig_size` and `size` (2,): height and width of the image, and of the model input.
    - `image_id` (1,), if the annotations of all images have one.
    - `window` (4,): part of the image that the model input covers, as left, top, right and bottom relative to the
      image. `HfViTForObjectDetection` converts boxes to coordinates relative to this window.

    `inputs` are (height, width) of the model inputs; the other arguments are those of `encode_objects`.
    """
    images = [annotations] if isinstance(annotations, Mapping) else annotations
    labels = []
    for image, (boxes, classes), size, own in zip(images, objects, sizes, inputs, strict=True):
        window = visible_window(*size, **options)
        encoded, is_left = encode_boxes(boxes, size, window)
        corners = decode_boxes(encoded, (1, 1), window)  # (M, 4)
        low, high = corners[:, :2], corners[:, 2:]
        sides = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).tolist()
        entries = [entry for entry in image["annotations"] if not entry.get("iscrowd")]
        areas = [entry.get("area", side) for entry, side in zip(entries, sides, strict=True)]
        height, width = compute_resized_size(*size, **options) if options["do_resize"] else size
        scale = height * width / (size[0] * size[1])
        labels.append(
            {
                "class_labels": classes[is_left],
                "boxes": torch.cat(((low + high) / 2, high - low), dim=1),
                "area": torch.tensor(areas, dtype=torch.float32)[is_left] * scale,
                "iscrowd": torch.zeros_like(classes[is_left]),
                "orig_size": torch.tensor(size),
                "size": torch.tensor(own),
                "window": torch.tensor(window, dtype=torch.float32),
            }
        )
    if all(isinstance(image.get("image_id"), int | np.integer) for image in images):
        for own_labels, image in zip(labels, images, strict=True):
            own_labels["image_id"] = torch.tensor([int(image["image_id"])])
    return labels
