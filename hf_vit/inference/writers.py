"""Convert pipeline outputs of each task to JSON, files and pictures."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from datasets import List, Value
from PIL import Image, ImageOps
from transformers import PreTrainedConfig as Config

from ..evaluation.depth import describe_depth
from ..model.configuration_hf_vit import HfViTConfig
from ..model.pipeline_hf_vit import CORNERS
from ..visualize import dense
from ..visualize.colors import IGNORED, apply_color_map, segmentation_palette, value_range
from ..visualize.figures import Picture, arrange_tiles, draw_label_tile, draw_text
from ..visualize.objects import draw_boxes, draw_keypoints


Part = dict[str, Any]  # a segment with keys "label", "score" and "mask", a black-and-white image
Numbered = Callable[[Sequence[Part], Config], list[tuple[int, Part]]]  # assigns mask values to segments

ZERO_SHOT = "zero-shot-image-classification"
THRESHOLD = 0.5  # Score threshold if neither the caller nor the model configuration sets one.
OVERLAP_THRESHOLD = 0.8  # Minimum visible fraction of the mask of a segment, as in evaluation.
NO_CLASS = 255  # mask value of pixels without a class or segment
# Model types that predict metric depth if `depth_estimation_type` is missing from their configuration
METRIC = {"glpn", "hf_vit", "zoedepth"}
MAX_MILLIMETERS = 65535  # largest depth in a 16-bit PNG
LABELED = ("image-classification", "image-text-to-text", ZERO_SHOT)  # pipelines whose output is a text
# Types of columns in parquet files
TEXT, NUMBER, INTEGER = Value("string"), Value("float64"), Value("int64")
SCORED = {"label": TEXT, "score": NUMBER}
BOX = dict.fromkeys(CORNERS, NUMBER)
MAX_SIDE = 480  # Maximum side length of pictures in pixels. Larger images are scaled down.
MAX_OVERLAY_SIDE = 1024  # Maximum side length of overlays in pixels.


@dataclass(frozen=True)
class Writer:
    """Functions and options to convert and write the pipeline output for one image."""

    pipeline: str  # task name of the pipeline in transformers
    describe: Callable[[Any, Config], dict[str, Any]]  # returns the output as a JSON-compatible dictionary
    draw: Callable[[Image.Image, Any, Config, str], Image.Image]  # returns a picture of the output with a caption
    # Functions that write the output to a file, by the suffix of the file name
    files: Mapping[str, Callable[[Image.Image, Any, Config, Path], None]] = field(default_factory=dict)
    scores: Callable[[Any], list[float]] = lambda answer: [part["score"] for part in answer]  # all scores
    options: Mapping[str, Any] = field(default_factory=dict)  # call options; None means the default of the pipeline
    task_config: str | None = None  # field of `HfViTConfig` with the threshold selected in training, if any
    columns: Mapping[str, Any] = field(default_factory=dict)  # types of the entries of `describe` in parquet files
    # Function that draws the output over the image, without caption and legend, if the output has positions
    overlay: Callable[[Image.Image, Any, Config], Picture] | None = None


def find_writer(config: Mapping[str, Any], subtask: str | None) -> Writer | None:
    """Return the writer for a model, given the content of its config.json, or None if its class is not supported.

    For segmentation models, the subtask "semantic" selects the writer for semantic segmentation.
    """
    # timm config.json files have no "architectures". transformers loads timm checkpoints as classifiers.
    name = str((config.get("architectures") or ["ForImageClassification"])[0])
    if name == "HfViTForMultiTask":
        return join_writers(HfViTConfig.from_dict(dict(config)))
    kind = next((kind for kind in WRITERS if kind in name), None)
    if kind == "Segmentation" and subtask == "semantic":
        return WRITERS["ForSemanticSegmentation"]
    if kind == "ForDepthEstimation":
        default = "metric" if config.get("model_type") in METRIC else "relative"
        head = config.get("depth_config") or config
        return METRIC_DEPTH if head.get("depth_estimation_type", default) == "metric" else RELATIVE_DEPTH
    return None if kind is None else WRITERS[kind]


def join_writers(config: HfViTConfig) -> Writer:
    """Return the writer for all heads of a multi-task model, whose pictures have one panel for each head."""
    configs = {name: config.for_head(name) for name in config.heads}
    found = {name: find_writer(own.to_dict(), None) for name, own in configs.items()}
    writers = {name: writer for name, writer in found.items() if writer is not None and writer.pipeline != ZERO_SHOT}

    def write(name: str, save: Any, image: Image.Image, answer: Any, _: Config, file: Path) -> None:
        save(image, answer[name], configs[name], file)

    return Writer(
        pipeline="multi-task",
        describe=lambda answer, _: {
            name: writer.describe(answer[name], configs[name]) for name, writer in writers.items()
        },
        draw=lambda image, answer, _, caption: arrange_tiles(
            [writer.draw(image, answer[name], configs[name], name) for name, writer in writers.items()], columns=2
        ),
        files={
            f"-{name}{ending}": partial(write, name, save)
            for name, writer in writers.items()
            for ending, save in writer.files.items()
        },
        scores=lambda answer: [1.0],
        columns={name: {**writer.columns} for name, writer in writers.items()},
    )


def labels_of(config: Config) -> list[str]:
    """Return the labels in the order of class numbers. The label of an unnamed class is its number."""
    known = {number: label for label, number in config.label2id.items()}
    return [known.get(number, str(number)) for number in range(max(known, default=-1) + 1)]


def draw_label(image: Image.Image, answer: Any, config: Config, caption: str) -> Image.Image:
    """Return the image with the most likely label, the score of this label, and a caption below the image."""
    if not answer:
        return draw_label_tile(image, "no label", caption)
    score = f"{answer[0]['score']:{'.4g' if config.problem_type == 'regression' else '.1%'}}"
    return draw_label_tile(image, f"{answer[0]['label']} ({score})", caption)


def draw_label_below(image: Image.Image, line: Mapping[str, Any], caption: str) -> Image.Image:
    """Return the image with the label and score, or the text, of its printed line, and a caption below."""
    if "caption" in line:
        text = line["caption"]
    else:
        text = "no label" if line["label"] is None else f"{line['label']} ({line['score']:.3g})"
    return arrange_tiles([_fitted(image), draw_text(text, "black"), draw_text(caption)], columns=1, margin=0)


# Functions for segmentation


def seen(parts: Sequence[Part]) -> list[Part]:
    """Return the segments that have visible pixels."""
    return [part for part in parts if part["mask"].getbbox()]


def by_class(parts: Sequence[Part], config: Config) -> list[tuple[int, Part]]:
    """Return pairs of class number and segment for all segments that have visible pixels."""
    return [(config.label2id[part["label"]], part) for part in seen(parts)]


def by_segment(parts: Sequence[Part], config: Config) -> list[tuple[int, Part]]:
    """Return pairs of number and segment, numbered from 0, for all segments that have visible pixels."""
    return list(enumerate(seen(parts)))


def describe_classes(parts: Sequence[Part], config: Config) -> dict[str, Any]:
    """Return the score and the pixel fraction of each class in an image, largest fraction first."""
    classes = [
        _entry(number, part, share=round(_area(part) / math.prod(part["mask"].size), 6))
        for number, part in by_class(parts, config)
    ]
    return {"classes": sorted(classes, key=lambda found: -found["share"])}


def describe_segments(parts: Sequence[Part], config: Config) -> dict[str, Any]:
    """Return the label, score, area in pixels and box (left, top, right, bottom) of each segment."""
    numbered = by_segment(parts, config)
    return {"segments": [_entry(number, own, area=_area(own), box=own["mask"].getbbox()) for number, own in numbered]}


def write_mask(numbered: Numbered, image: Image.Image, parts: Sequence[Part], config: Config, file: Path) -> None:
    """Write a palette PNG. Pixel values are class or segment numbers. The palette contains the class colors."""
    values = np.full((image.height, image.width), NO_CLASS, dtype=np.uint8)
    colors = segmentation_palette(len(labels_of(config)))
    palette = np.full((NO_CLASS + 1, 3), IGNORED, dtype=np.uint8)
    for number, part in numbered(parts, config):
        if number >= NO_CLASS:
            raise ValueError(
                f"{part['label']!r} has number {number}, but masks support numbers up to {NO_CLASS - 1} only."
            )
        values[np.asarray(part["mask"]) > 0] = number
        palette[number] = colors[config.label2id[part["label"]]]
    mask = Image.fromarray(values)
    mask.putpalette(palette.tobytes())
    mask.save(file)


def draw_classes(image: Image.Image, parts: Sequence[Part], config: Config, caption: str) -> Image.Image:
    """Return the image next to a colored overlay of its classes, with a legend."""
    picture = _fitted(image)
    numbers = _class_numbers(parts, picture, config)
    return _figure(caption, dense.draw_segmentation, [picture], [numbers], None, labels_of(config))


def draw_segments(image: Image.Image, parts: Sequence[Part], config: Config, caption: str) -> Image.Image:
    """Return the image next to an overlay of its segments with outlines and, if they fit, labels."""
    picture, found = _fitted(image), seen(parts)
    masks, labels = _masks_and_labels(found, picture, config)
    segments = {"masks": masks, "class_labels": labels, "scores": [part["score"] for part in found]}
    return _figure(caption, dense.draw_panoptic, [picture], [segments], None, labels_of(config))


def overlay_parts(outlined: bool, image: Image.Image, parts: Sequence[Part], config: Config) -> Picture:
    """Return the image with the colors of its classes or, if `outlined`, of its segments with outlines."""
    picture, palette = _fitted(image, MAX_OVERLAY_SIDE), segmentation_palette(len(labels_of(config)))
    if outlined:
        return dense.overlay_segments(picture, *_masks_and_labels(seen(parts), picture, config), palette)
    return dense.overlay_segmentation(picture, _class_numbers(parts, picture, config), palette)


def _class_numbers(parts: Sequence[Part], picture: Image.Image, config: Config) -> np.ndarray:
    """Return the class number (H, W) of each pixel of a picture, or -1."""
    numbers = np.full((picture.height, picture.width), -1)
    for number, part in by_class(parts, config):
        numbers[_mask(part, picture)] = number
    return numbers


def _masks_and_labels(parts: Sequence[Part], picture: Image.Image, config: Config) -> tuple[np.ndarray, list[int]]:
    """Return the masks (M, H, W) of segments, resized to the size of a picture, and their class numbers."""
    masks = np.reshape([_mask(part, picture) for part in parts], (-1, picture.height, picture.width))
    return masks, [config.label2id[part["label"]] for part in parts]


def _entry(number: int, part: Part, **more: Any) -> dict[str, Any]:
    return {"label": part["label"], "score": part["score"], **more, "id": number}


def _area(part: Part) -> int:
    """Return the number of pixels of a segment."""
    count: int = part["mask"].histogram()[255]
    return count


def _mask(part: Part, picture: Image.Image) -> np.ndarray:
    """Return the mask of a segment, bool of shape (H, W), resized to the size of a picture."""
    return np.asarray(part["mask"].resize(picture.size, Image.Resampling.NEAREST)) > 0


# Functions for depth estimation


def write_millimeters(image: Image.Image, answer: Any, config: Config, file: Path) -> None:
    """Write depth in millimeters as a 16-bit PNG. Depths that exceed the 16-bit range are set to 0."""
    millimeters = (answer["predicted_depth"].numpy() * 1000).round()
    Image.fromarray(np.where(millimeters > MAX_MILLIMETERS, 0, millimeters).astype(np.uint16)).save(file)


def draw_depth_map(
    image: Image.Image, answer: Any, config: Config, caption: str, relative: bool = False
) -> Image.Image:
    """Return the image next to a color bar and its depth map in colors, in which near pixels are bright."""
    picture, depth = _fitted(image), Image.fromarray(answer["predicted_depth"].float().numpy())
    values = np.asarray(depth.resize(picture.size, Image.Resampling.NEAREST))
    return _figure(caption, dense.draw_depth, [picture], [values], None, relative=relative)


def overlay_depth(image: Image.Image, answer: Any, config: Config, relative: bool = False) -> Picture:
    """Return the depth map in colors, in which near pixels are bright."""
    depth = answer["predicted_depth"].float().numpy()
    if relative:
        valid, colors = np.isfinite(depth), dense.INVERSE_DEPTH_COLORS
    else:
        valid, colors = dense.is_valid(depth), dense.DEPTH_COLORS
    return apply_color_map(depth, valid, value_range(depth[valid]), colors)


# Functions for object detection and keypoint detection


def write_objects(image: Image.Image, answer: Any, config: Config, file: Path) -> None:
    """Write a CSV table with one object per row."""
    rows = [[found["label"], found["score"], *found["box"].values()] for found in answer]
    _write_table(file, ["label", "score", *CORNERS], rows)


def overlay_objects(image: Image.Image, answer: Any, config: Config, side: int = MAX_OVERLAY_SIDE) -> Image.Image:
    """Return the image with boxes in class colors. Objects with higher scores are drawn on top."""
    picture = _fitted(image, side)
    labels, scores = [config.label2id[found["label"]] for found in answer], [found["score"] for found in answer]
    return draw_boxes(picture, _scaled_boxes(answer, picture, image), labels, labels_of(config), scores)


def write_keypoints(image: Image.Image, answer: Any, config: Config, file: Path) -> None:
    """Write a CSV table with one keypoint per row."""
    rows = [
        [number, label, *place, score]
        for number, pose in enumerate(answer)
        for label, place, score in zip(pose["labels"], pose["keypoints"], pose["scores"], strict=True)
    ]
    _write_table(file, ["object", "label", "x", "y", "score"], rows)


def overlay_keypoints(image: Image.Image, answer: Any, config: Config, side: int = MAX_OVERLAY_SIDE) -> Image.Image:
    """Return the image with boxes, skeletons and keypoints. Each keypoint has its own color; low scores are faint."""
    picture, shape = _fitted(image, side), (len(answer), len(labels_of(config)))
    points, visibility, scores = np.zeros((*shape, 2)), np.zeros(shape, dtype=int), np.zeros(shape)
    for number, pose in enumerate(answer):
        found = [config.label2id[label] for label in pose["labels"]]
        # The origin of keypoint coordinates is the center of the first pixel, so 0.5 is added before scaling.
        points[number, found] = (np.reshape(pose["keypoints"], (-1, 2)) + 0.5) * picture.width / image.width - 0.5
        visibility[number, found], scores[number, found] = 2, pose["scores"]
    skeleton = (config.to_dict().get("keypoint_config") or {}).get("skeleton", ())
    return draw_keypoints(picture, points, visibility, skeleton, scores, _scaled_boxes(answer, picture, image))


def draw_over(
    overlay: Callable[..., Image.Image], image: Image.Image, answer: Any, config: Config, caption: str
) -> Image.Image:
    """Return a small overlay with a caption below."""
    return _captioned(overlay(image, answer, config, MAX_SIDE), caption)


def _scaled_boxes(answer: Sequence[dict[str, Any]], picture: Image.Image, image: Image.Image) -> np.ndarray:
    """Return boxes (N, 4) in pixel coordinates of `picture`, which is a resized copy of `image`."""
    boxes = np.array([[found["box"][side] for side in CORNERS] for found in answer], dtype=float)
    return boxes.reshape(-1, 4) * picture.width / image.width


def _write_table(file: Path, header: list[str], rows: list[list[Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])


def _fitted(image: Image.Image, side: int = MAX_SIDE) -> Image.Image:
    return image if max(image.size) <= side else ImageOps.contain(image, (side, side))


def _figure(caption: str, draw: Callable[..., None], *values: Any, **options: Any) -> Image.Image:
    """Return the figure that `draw` writes for the given values and options, with a caption below the figure."""
    buffer = BytesIO()
    draw(*values, file=buffer, **options)
    with Image.open(buffer) as figure:
        return _captioned(figure.convert("RGB"), caption)


def _captioned(picture: Image.Image, caption: str) -> Image.Image:
    return arrange_tiles([picture, draw_text(caption)], columns=1, margin=0)


_SEGMENTS = Writer(
    "image-segmentation",
    describe_segments,
    draw_segments,
    {"_mask.png": partial(write_mask, by_segment)},
    scores=lambda parts: [part["score"] for part in seen(parts)],
    options={"threshold": THRESHOLD, "overlap_mask_area_threshold": OVERLAP_THRESHOLD, "subtask": None},
    task_config="universal_segmentation_config",
    columns={"segments": List({**SCORED, "area": INTEGER, "box": List(INTEGER), "id": INTEGER})},
    overlay=partial(overlay_parts, True),
)
RELATIVE_DEPTH = Writer(
    "depth-estimation",
    lambda answer, config: describe_depth(answer["predicted_depth"], relative=True),
    partial(draw_depth_map, relative=True),
    {"_depth.npy": lambda image, answer, config, file: np.save(file, answer["predicted_depth"].numpy())},
    columns={"unit": TEXT, **dict.fromkeys(("min", "median", "max"), NUMBER)},
    overlay=partial(overlay_depth, relative=True),
)
METRIC_DEPTH = replace(
    RELATIVE_DEPTH,
    describe=lambda answer, config: describe_depth(answer["predicted_depth"], relative=False),
    draw=draw_depth_map,
    files={**RELATIVE_DEPTH.files, "_depth.png": write_millimeters},
    overlay=overlay_depth,
)
_TEXTS = Writer(
    ZERO_SHOT,
    lambda answer, _: {**answer[0], "labels": answer},
    draw_label,
    options={"candidate_labels": None},
    columns={**SCORED, "labels": List(SCORED)},
)
# Maps a part of the model class name to a writer. The first key contained in the class name applies.
WRITERS: Mapping[str, Writer] = {
    "ForImageClassification": Writer(
        "image-classification",
        lambda answer, _: {**(answer[0] if answer else {"label": None, "score": None}), "top_k": answer},
        draw_label,
        options=dict.fromkeys(("top_k", "coverage", "set_method", "abstain_below", "similarity")),
        columns={**SCORED, "similarity": NUMBER, "top_k": List({**SCORED, "similarity": NUMBER})},
    ),
    "ForSemanticSegmentation": replace(
        _SEGMENTS,
        describe=describe_classes,
        draw=draw_classes,
        files={"_mask.png": partial(write_mask, by_class)},
        columns={"classes": List({**SCORED, "share": NUMBER, "id": INTEGER})},
        overlay=partial(overlay_parts, False),
    ),
    "Segmentation": _SEGMENTS,
    "ForDepthEstimation": METRIC_DEPTH,
    "ForObjectDetection": Writer(
        "object-detection",
        lambda answer, config: {"objects": answer},
        partial(draw_over, overlay_objects),
        {"_objects.csv": write_objects},
        options={"threshold": THRESHOLD, "nms_threshold": None, "max_missed": None},
        task_config="detection_config",
        columns={"objects": List({**SCORED, "box": BOX})},
        overlay=overlay_objects,
    ),
    "ForKeypointDetection": Writer(
        "keypoint-detection",
        lambda answer, config: {"poses": answer},
        partial(draw_over, overlay_keypoints),
        {"_keypoints.csv": write_keypoints},
        scores=lambda answer: [score for pose in answer for score in pose["scores"]],
        options={"threshold": None},
        task_config="keypoint_config",
        columns={
            "poses": List(
                {
                    "keypoints": List(List(NUMBER)),
                    **dict.fromkeys(("scores", "expected_errors"), List(NUMBER)),
                    **{"labels": List(TEXT), "box": BOX},
                }
            )
        },
        overlay=overlay_keypoints,
    ),
    "ForImageTextToText": Writer(
        "image-text-to-text",
        lambda answer, _: {"caption": answer[0]["generated_text"]},
        lambda image, answer, _, caption: draw_label_tile(image, answer[0]["generated_text"], caption),
        options={"text": ""},
        columns={"caption": TEXT},
    ),
    **dict.fromkeys(("ForZeroShotImageClassification", "CLIPModel", "SiglipModel", "Siglip2Model"), _TEXTS),
}
