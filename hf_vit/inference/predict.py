"""Predictions of a saved model on image files: JSON lines, files with the predictions, and pictures.

Any task that a pipeline answers for single images: classes, segmentation, depth, objects, keypoints. Models of
transformers' own classes work too.
"""

import csv
import json
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import datasets
import numpy as np
from PIL import Image, ImageOps
from transformers import Pipeline, pipeline
from transformers.utils import logging

from ..data import load_unlabeled_images
from ..data.formats.files import IMAGE_SUFFIXES, files_below
from ..data.formats.stored import TAR_SUFFIXES
from ..data.formats.tables import TABLE_SUFFIXES
from ..data.targets import encoded_bytes
from ..extras import check_packages
from ..model.image_inputs import read_image
from ..model.nested_options import check_thresholds
from ..model.pipeline_hf_vit import CORNERS, BatchedImagePipeline, check_optimize, chosen_threshold
from ..model.pretrained import check_trained, read_config
from ..model.remote_code import refusing_code
from ..model.task_keypoint_detection import HfViTKeypointDetectionPipeline
from ..model.task_object_detection import HfViTObjectDetectionPipeline
from ..model.task_semantic_segmentation import HfViTImageSegmentationPipeline
from ..options.field import COUNT, PROBABILITY
from ..outputs import check_outputs, check_writable, record_outputs
from ..visualize import segmentation_palette
from ..visualize.colors import IGNORED
from ..visualize.depth import draw_depth
from ..visualize.detection import draw_boxes
from ..visualize.figures import arrange_pages, arrange_tiles, draw_label_tile, draw_text
from ..visualize.keypoints import draw_keypoints
from ..visualize.segmentation import draw_panoptic, draw_segmentation


logger = logging.get_logger(__name__)
Box = dict[str, float]  # "xmin", "ymin", "xmax" and "ymax" in pixels
Row = tuple[datasets.Dataset, int]  # a dataset and the number of a row
Part = dict[str, Any]  # of a segmented image: "label", "score" and "mask", which is black and white

BOX_LINE = '{"file": ..., "objects": [{"box": {"xmin", "ymin", "xmax", "ymax"}}, ...]}'
THRESHOLD = 0.5  # least score of a segment or an object, where neither caller nor training has chosen one
OVERLAP_THRESHOLD = 0.8  # as in the scores of a training: of a segment, at least so much of the mask is its own
NO_CLASS = 255  # in masks
# Of families whose configuration does not tell, those that predict meters
METRIC = {"glpn", "hf_vit", "zoedepth"}
MAX_MILLIMETERS = 65535  # of 16 bits
MAX_SIDE = 480  # pixels: pictures of larger images are drawn at this size
MAX_TILES = 100  # of one picture of many images


def predict_files(
    model: str,
    inputs: Sequence[Path],
    *,
    output_dir: Path | None = None,
    picture: Path | None = None,
    top_k: Annotated[int, COUNT] = 3,
    batch_size: Annotated[int, COUNT] = 8,
    threshold: Annotated[float | None, PROBABILITY] = None,
    nms_threshold: Annotated[float | None, PROBABILITY] = None,
    boxes: Path | None = None,
    subtask: Annotated[str | None, ("panoptic", "instance", "semantic")] = None,
    optimize: bool = False,
    trust_remote_code: bool = False,
    overwrite: bool = False,
) -> Iterator[dict[str, Any]]:
    """Predicts image files, one after the other, and writes what is asked for.

    Args:
        model: Folder of a saved model, or its name on the Hub.
        inputs: Image files, folders that are searched for them, and parquet files, tar files and tables of images.
        output_dir: Where to write the answers about each image, and a picture of each.
        picture: File for a picture of the first 100 images; further pages are `name-2.png` and so on.
        top_k: Labels per image, the likeliest first.
        batch_size: Images to be classified, or objects with keypoints, per pass.
        threshold: Lowest score of a segment, an object or a keypoint; by default the one that the training of the
            model has chosen, or else 0.5 for a segment or an object, none for a keypoint.
        nms_threshold: Overlap (IoU) from which on the less sure of two objects of a class is left out, if given.
        boxes: JSON lines of detected objects, see `read_box_file`; by default, each whole image is an object.
        subtask: "panoptic", "instance" or "semantic"; by default what the image processor prefers.
        optimize: Whether the model, one of ours, is first made fast on this machine by `optimize_for_inference`.
        trust_remote_code: Whether Python code runs that the model brings; ours and those of the library need none.
        overwrite: Whether to replace files of an earlier run; other files and inputs never are.

    Yields:
        For each image a dict ready for JSON: `file`, the answer, and, with `output_dir`, the paths `written`. Where
        nothing passes the threshold there is the `best_score` too; a warning tells if that is so in all images. A file
        that cannot be read yields `file` and `error`.

    Raises:
        ImportError: if a picture needs matplotlib or scipy, which is not installed.
        OSError: if there is no such model or file.
        ValueError: if there is no image, model or option do not fit, its code is not trusted, or a file must stay.
    """
    _check_places(output_dir, picture)
    stored = {path: find_stored(path) for path in inputs}
    files = [file for path in inputs for file in stored[path] or find_images([path])]
    options: Any = {"threshold": threshold, "nms_threshold": nms_threshold, "draws": bool(output_dir or picture)}
    opening = {"optimize": optimize, "trust_remote_code": trust_remote_code}
    predictor = _open_predictor(model, files, boxes, top_k, batch_size, subtask, opening, **options)
    predictor.rows = {file: row for found in stored.values() for file, row in found.items()}
    pages, stems, planned = _plan_outputs(predictor.endings, files, output_dir, picture)
    check_outputs(planned, [*files, *filter(None, [boxes])], overwrite)
    tiles, missed = list[Image.Image](), list[float | None]()  # the best score where nothing passes, else None
    for line in _lines(predictor, files, stems, tiles, MAX_TILES if picture is not None else 0):
        if "error" not in line:
            missed.append(line.get("best_score"))
        yield line
    _warn_of_threshold(predictor, missed)
    _write_pages(tiles, pages)


def _check_places(output_dir: Path | None, picture: Path | None) -> None:
    """Raises `ValueError` or `OSError` if nothing can be written to a folder or a picture."""
    if picture is not None and Image.registered_extensions().get(picture.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"No picture can be written to {picture}, because of its suffix. Use .png or .jpg.")
    for folder in (output_dir, picture and picture.parent):
        if folder is not None:
            check_writable(folder)


def _write_pages(tiles: Sequence[Image.Image], files: Sequence[Path]) -> None:
    for page, file in zip(arrange_pages(tiles), files, strict=False):
        file.parent.mkdir(parents=True, exist_ok=True)
        page.save(file)
        record_outputs([file])


def _plan_outputs(
    endings: Sequence[str], files: Sequence[Path], output_dir: Path | None, picture: Path | None
) -> tuple[list[Path], list[Path], list[Path]]:
    """Returns the files of the pages of a picture, how those of each image start, and all that may be written."""
    numbers = ["", *(f"-{number}" for number in range(2, min(len(files), MAX_TILES) + 1))]
    pages = [] if picture is None else [picture.with_stem(picture.stem + number) for number in numbers]
    stems = [] if output_dir is None else [output_dir / name for name in name_outputs(files)]
    of_images = [stem.with_name(stem.name + ending) for stem in stems for ending in (*endings, "_picture.png")]
    return pages, stems, [*pages, *of_images]


def _lines(
    predictor: "Predictor", files: Sequence[Path], stems: Sequence[Path], tiles: list[Image.Image], max_tiles: int
) -> Iterator[dict[str, Any]]:
    """Yields what JSON has of each file, writes what is asked for, and adds the pictures of the first to `tiles`."""
    for index, image, answer in _answers(predictor, files):
        file = files[index]
        if image is None:
            yield {"file": str(file), "error": answer}
            continue
        line = {"file": str(file), **predictor.describe(image, answer), **predictor.missed_score(file, image, answer)}
        check_finite(line)
        if len(tiles) < max_tiles or stems:
            tile = predictor.draw(image, answer, file.name)
            if stems:
                line["written"] = _write(predictor, image, answer, tile, stems[index])
            if len(tiles) < max_tiles:
                tiles.append(tile)
        yield line


def check_finite(line: dict[str, Any]) -> None:
    """Raises `ValueError` if a prediction has numbers that are infinite or NaN, which JSON cannot hold."""
    try:
        json.dumps(line, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"The prediction for {line['file']} is infinite or NaN. Use an earlier checkpoint."
        ) from error


def _write(predictor: "Predictor", image: Image.Image, answer: Any, tile: Image.Image, stem: Path) -> list[str]:
    """Writes a prediction and its picture to files whose names start with `stem`, and returns their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = [*predictor.write(image, answer, stem), stem.with_name(f"{stem.name}_picture.png")]
    arrange_tiles([tile], columns=1).save(written[-1])
    record_outputs(written)
    return [str(file) for file in written]


def _warn_of_threshold(predictor: "Predictor", missed: Sequence[float | None]) -> None:
    """Warns if nothing passes in any image, given the best score of each in which that is so."""
    scores = [score for score in missed if score is not None]
    if scores and len(scores) == len(missed):
        logger.warning(
            f"Nothing passes the threshold {predictor.options['threshold']:g}: the best score of all images is "
            f"{max(scores):.3g}. Say --threshold {0.9 * max(scores):.2g} to see what has it."
        )


def _answers(predictor: "Predictor", files: Sequence[Path]) -> Iterator[tuple[int, Image.Image | None, Any]]:
    """Yields the number, the image and the prediction of each file; None and an error of those that cannot be read."""
    failed, opened = deque[tuple[int, None, str]](), deque[tuple[int, Image.Image]]()

    def read() -> Iterator[Any]:  # only a batch of images is in memory at a time
        for index, file in enumerate(files):
            try:
                image = open_image(file, predictor.rows.get(file))
            except ValueError as error:
                failed.append((index, None, str(error)))
            else:
                opened.append((index, image))
                yield predictor.prepare(file, image)

    for answer in predictor.answer(read()):
        index, image = opened.popleft()
        while failed and failed[0][0] < index:  # what is read ahead comes later
            yield failed.popleft()
        yield index, image, answer
    yield from failed


def _open_predictor(
    model: str,
    files: Sequence[Path],
    boxes: Path | None,
    top_k: int,
    batch_size: int,
    subtask: str | None,
    opening: dict[str, bool],
    *,
    threshold: float | None,
    nms_threshold: float | None,
    draws: bool,
) -> "Predictor":
    """Opens a model with the pipeline of the class that it was saved as."""
    check_thresholds(threshold=threshold, nms_threshold=nms_threshold)
    check_optimize(opening["optimize"])
    config = read_config(model)
    # timm's checkpoints, which transformers opens too, name no class.
    name = str((config.get("architectures") or ["ForImageClassification"])[0])
    if boxes is not None and "ForKeypointDetection" not in name:
        raise ValueError(f"--boxes {boxes} says where keypoints are to be found, but {model} finds none.")
    if nms_threshold is not None and (config.get("model_type"), name) != ("hf_vit", "HfViTForObjectDetection"):
        raise ValueError(f"--nms_threshold {nms_threshold} is for HfViTForObjectDetection, but {model} is a {name}.")
    if opening["optimize"] and config.get("model_type") != "hf_vit":
        raise ValueError(f"--optimize is for models of hf_vit, but {model} is of type {config.get('model_type')!r}.")
    if "ForImageClassification" in name:
        return ClassificationPredictor(model, **opening, top_k=top_k, batch_size=batch_size)
    if draws:
        check_packages("A picture of the predictions", "matplotlib", "scipy")
    if "Segmentation" in name:
        is_semantic = subtask == "semantic" or "ForSemanticSegmentation" in name
        predictor = SemanticPredictor if is_semantic else PanopticPredictor
        return predictor(model, threshold, subtask, **opening)
    if "ForDepthEstimation" in name:
        return DepthPredictor(model, **opening)
    if "ForObjectDetection" in name:
        return DetectionPredictor(model, **opening, threshold=threshold, nms_threshold=nms_threshold)
    if "ForKeypointDetection" in name:
        boxes_of = {} if boxes is None else read_box_file(boxes, files)
        return KeypointPredictor(model, boxes_of, **opening, threshold=threshold, batch_size=batch_size)
    raise ValueError(
        f"{model} was saved as {name}, which neither names images, nor segments them, nor estimates depth, nor "
        "finds objects or keypoints. Give a model that was trained for one of these."
    )


class Predictor(ABC):
    """Predicts for one task, as JSON, files and pictures; `options` are keyword arguments of the pipeline's call."""

    pipeline: ClassVar[str]
    pipeline_class: ClassVar[type[Pipeline] | None] = None  # the library's own
    task_config: ClassVar[str | None] = None  # the field of `HfViTConfig` whose threshold decides, if any does
    threshold: ClassVar[float | None] = None  # where neither caller nor training has chosen one
    rows: Mapping[Path, Row] = MappingProxyType({})  # that hold images which are no files, by name
    endings: tuple[str, ...] = ()  # of the files that `write` may write

    def __init__(self, model: str, *, optimize: bool = False, trust_remote_code: bool = False, **options: Any) -> None:
        opening: dict[str, Any] = {"pipeline_class": self.pipeline_class, "trust_remote_code": trust_remote_code}
        if optimize:
            opening["optimize"] = {"batch_size": options.get("batch_size", 1)}
        with refusing_code(model, "Read it, and if you trust it say --trust_remote_code."):
            self.run = pipeline(self.pipeline, model=model, **opening)
        if not isinstance(self.run, BatchedImagePipeline):  # ours have checked it
            check_trained(self.run.model, model)
        if optimize:
            report, kept = self.run.fast_model.report, self.run.fast_model.report.best
            logger.warning(f"{report}\nKept: {kept.name}, {kept.ratio:.2f} times as fast as the model given.")
        self.options = {name: value for name, value in options.items() if value is not None}
        if self.task_config is not None:
            default = {} if self.threshold is None else {"threshold": self.threshold}
            self.options = default | chosen_threshold(self.run.model.config, self.task_config) | self.options
        self.label2id: dict[str, int] = self.run.model.config.label2id
        known = {number: label for label, number in self.label2id.items()}
        self.labels = [known.get(number, str(number)) for number in range(max(known, default=-1) + 1)]

    def prepare(self, file: Path, image: Image.Image) -> Any:
        """Returns the pipeline's input for an image."""
        return image

    def answer(self, inputs: Iterable[Any]) -> Iterator[Any]:
        """Yields the pipeline's prediction for each prepared image."""
        yield from self.run(iter(inputs), **self.options)

    def scores(self, answer: Any) -> list[float]:
        """Returns the scores of all that a prediction has."""
        return [part["score"] for part in answer]

    def missed_score(self, file: Path, image: Image.Image, answer: Any) -> dict[str, float]:
        """Returns the best score of an image as `best_score` if that does not pass the threshold, else nothing."""
        if "threshold" not in self.options or self.scores(answer):
            return {}
        candidates = self.scores(self.run(self.prepare(file, image), **{**self.options, "threshold": 0.0}))
        return {"best_score": max(candidates)} if candidates else {}

    @abstractmethod
    def describe(self, image: Image.Image, answer: Any) -> dict[str, Any]:
        """Returns a prediction as JSON has it."""

    def write(self, image: Image.Image, answer: Any, stem: Path) -> list[Path]:
        """Writes a prediction to files whose names start with `stem`, and returns their paths."""
        return []

    @abstractmethod
    def draw(self, image: Image.Image, answer: Any, caption: str) -> Image.Image:
        """Returns a picture of an image and its prediction, with a caption."""


class ClassificationPredictor(Predictor):
    """Predicts labels of images: `label`, `score`, and `top_k` of these."""

    pipeline = "image-classification"

    def describe(self, image: Image.Image, answer: Any) -> dict[str, Any]:
        """Returns the likeliest label, its score, and the runners-up."""
        return {**answer[0], "top_k": answer}

    def draw(self, image: Image.Image, answer: Any, caption: str) -> Image.Image:
        """Returns the image above label, score and caption."""
        return draw_label_tile(image, f"{answer[0]['label']} ({answer[0]['score']:.1%})", caption)


class SemanticPredictor(Predictor):
    """Predicts the class of every pixel: `classes` with their share of the image, the largest first."""

    pipeline = "image-segmentation"
    pipeline_class = HfViTImageSegmentationPipeline
    endings = ("_mask.png",)
    task_config, threshold = "universal_segmentation_config", THRESHOLD

    def __init__(self, model: str, threshold: float | None, subtask: str | None, **options: Any) -> None:
        options |= {"threshold": threshold, "overlap_mask_area_threshold": OVERLAP_THRESHOLD, "subtask": subtask}
        super().__init__(model, **options)

    def answer(self, inputs: Iterable[Image.Image]) -> Iterator[list[Part]]:
        """Yields the parts of each image, without those that others cover."""
        for parts in super().answer(inputs):
            yield [part for part in parts if part["mask"].getbbox()]

    def describe(self, image: Image.Image, answer: list[Part]) -> dict[str, Any]:
        """Returns score and share of the pixels of each class, the largest first."""
        pixels = image.width * image.height
        classes = [
            {"label": part["label"], "score": part["score"], "share": round(_area(part) / pixels, 6), "id": number}
            for number, part in self.numbered(answer)
        ]
        return {"classes": sorted(classes, key=lambda found: -found["share"])}

    def numbered(self, answer: list[Part]) -> list[tuple[int, Part]]:
        """Returns each part with its number in masks, that of its class."""
        return [(self.label2id[part["label"]], part) for part in answer]

    def write(self, image: Image.Image, answer: list[Part], stem: Path) -> list[Path]:
        """Writes a PNG that holds the number of each pixel, and shows it in color."""
        values = np.full((image.height, image.width), NO_CLASS, dtype=np.uint8)
        colors = segmentation_palette(len(self.labels))
        palette = np.full((NO_CLASS + 1, 3), IGNORED, dtype=np.uint8)
        for number, part in self.numbered(answer):
            if number >= NO_CLASS:
                raise ValueError(f"A mask holds numbers up to {NO_CLASS - 1}, but {part['label']!r} has {number}.")
            values[np.asarray(part["mask"]) > 0] = number
            palette[number] = colors[self.label2id[part["label"]]]
        mask = Image.fromarray(values)
        mask.putpalette(palette.tobytes())
        file = stem.with_name(f"{stem.name}_mask.png")
        mask.save(file)
        return [file]

    def draw(self, image: Image.Image, answer: list[Part], caption: str) -> Image.Image:
        """Returns the image, and its classes over it in colors that a legend explains."""
        picture = _fitted(image)
        numbers = np.full((picture.height, picture.width), -1)
        for number, part in self.numbered(answer):
            numbers[_mask(part, picture)] = number
        return _figure(caption, draw_segmentation, [picture], [numbers], None, self.labels)


class PanopticPredictor(SemanticPredictor):
    """Predicts `segments`: things one by one, and, if the model does, stuff; boxes are left, top, right, bottom."""

    def describe(self, image: Image.Image, answer: list[Part]) -> dict[str, Any]:
        """Returns label, score, area in pixels and box of each segment."""
        segments = [
            {
                "label": part["label"],
                "score": part["score"],
                "area": _area(part),
                "box": part["mask"].getbbox(),
                "id": number,
            }
            for number, part in self.numbered(answer)
        ]
        return {"segments": segments}

    def numbered(self, answer: list[Part]) -> list[tuple[int, Part]]:
        """Returns each part with its number in masks, that of the segment."""
        return list(enumerate(answer))

    def draw(self, image: Image.Image, answer: list[Part], caption: str) -> Image.Image:
        """Returns the image, and its segments over it, each with an outline and, where there is room, its label."""
        picture = _fitted(image)
        segments = {
            "masks": np.reshape([_mask(part, picture) for part in answer], (-1, picture.height, picture.width)),
            "class_labels": [self.label2id[part["label"]] for part in answer],
            "scores": [part["score"] for part in answer],
        }
        return _figure(caption, draw_panoptic, [picture], [segments], None, self.labels)


class DepthPredictor(Predictor):
    """Predicts the depth of every pixel, in meters, or, relative, as inverse depth up to scale and shift."""

    pipeline = "depth-estimation"
    endings: tuple[str, ...] = ("_depth.npy", "_depth.png")

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        config = self.run.model.config.to_dict()
        default = "metric" if config["model_type"] in METRIC else "relative"
        head = config.get("depth_config") or config
        self.is_metric = head.get("depth_estimation_type", default) == "metric"
        self.unit = "meters" if self.is_metric else "relative inverse depth"
        if not self.is_metric:
            self.endings = ("_depth.npy",)

    def describe(self, image: Image.Image, answer: Any) -> dict[str, Any]:
        """Returns the least, the median and the largest value, and their unit."""
        depth = answer["predicted_depth"].numpy()
        values = {"min": depth.min(), "median": np.median(depth), "max": depth.max()}
        return {"unit": self.unit, **{name: round(float(value), 4) for name, value in values.items()}}

    def write(self, image: Image.Image, answer: Any, stem: Path) -> list[Path]:
        """Writes the values as they are, and meters in millimeters too, 0 where these need more than 16 bits."""
        depth = answer["predicted_depth"].numpy()
        files = [stem.with_name(f"{stem.name}_depth.npy")]
        np.save(files[0], depth)
        if self.is_metric:
            millimeters = (depth * 1000).round()
            files.append(stem.with_name(f"{stem.name}_depth.png"))
            Image.fromarray(np.where(millimeters > MAX_MILLIMETERS, 0, millimeters).astype(np.uint16)).save(files[1])
        return files

    def draw(self, image: Image.Image, answer: Any, caption: str) -> Image.Image:
        """Returns the image, its depth in colors, the nearest being bright, and the scale of the colors."""
        picture, depth = _fitted(image), Image.fromarray(answer["predicted_depth"].float().numpy())
        values = np.asarray(depth.resize(picture.size, Image.Resampling.NEAREST))
        return _figure(caption, draw_depth, [picture], [values], None, relative=not self.is_metric)


class DetectionPredictor(Predictor):
    """Predicts `objects`: a box, a label and a score each, the surest first."""

    pipeline = "object-detection"
    pipeline_class = HfViTObjectDetectionPipeline
    endings = ("_objects.csv",)
    task_config, threshold = "detection_config", THRESHOLD

    def describe(self, image: Image.Image, answer: Any) -> dict[str, Any]:
        """Returns score, label and box of each object."""
        return {"objects": answer}

    def write(self, image: Image.Image, answer: Any, stem: Path) -> list[Path]:
        """Writes a table with an object a row."""
        rows = [[found["label"], found["score"], *found["box"].values()] for found in answer]
        return [_write_table(stem.with_name(f"{stem.name}_objects.csv"), ["label", "score", *CORNERS], rows)]

    def draw(self, image: Image.Image, answer: Any, caption: str) -> Image.Image:
        """Returns the image with the boxes in the colors of their classes, the surest on top."""
        picture = _fitted(image)
        labels = [self.label2id[found["label"]] for found in answer]
        scores = [found["score"] for found in answer]
        drawn = draw_boxes(picture, _scaled_boxes(answer, picture, image), labels, self.labels, scores)
        return arrange_tiles([drawn, draw_text(caption)], columns=1, margin=0)


class KeypointPredictor(Predictor):
    """Predicts `poses`: the keypoints of each object in the boxes of an image, or of the one that the image shows."""

    pipeline = "keypoint-detection"
    pipeline_class = HfViTKeypointDetectionPipeline
    endings = ("_keypoints.csv",)
    task_config = "keypoint_config"

    def __init__(self, model: str, boxes: dict[Path, list[Box]], **options: Any) -> None:
        super().__init__(model, **options)
        self.boxes = boxes
        self.skeleton = (self.run.model.config.to_dict().get("keypoint_config") or {}).get("skeleton", ())

    def prepare(self, file: Path, image: Image.Image) -> dict[str, Any]:
        """Returns the image with its boxes."""
        return {"image": image, "boxes": self.boxes.get(file)}

    def scores(self, answer: Any) -> list[float]:
        """Returns the scores of all keypoints."""
        return [score for pose in answer for score in pose["scores"]]

    def describe(self, image: Image.Image, answer: Any) -> dict[str, Any]:
        """Returns keypoints, scores, labels and box of each object."""
        return {"poses": answer}

    def write(self, image: Image.Image, answer: Any, stem: Path) -> list[Path]:
        """Writes a table with a keypoint a row."""
        rows = [
            [number, label, *place, score]
            for number, pose in enumerate(answer)
            for label, place, score in zip(pose["labels"], pose["keypoints"], pose["scores"], strict=True)
        ]
        file = stem.with_name(f"{stem.name}_keypoints.csv")
        return [_write_table(file, ["object", "label", "x", "y", "score"], rows)]

    def draw(self, image: Image.Image, answer: Any, caption: str) -> Image.Image:
        """Returns the image with boxes, keypoints in a color each, the fainter the less sure, and the skeleton."""
        picture = _fitted(image)
        shape = (len(answer), len(self.labels))
        points, visibility, scores = np.zeros((*shape, 2)), np.zeros(shape, dtype=int), np.zeros(shape)
        for number, pose in enumerate(answer):
            found = [self.label2id[label] for label in pose["labels"]]
            # the center of the first pixel is at 0
            points[number, found] = (np.reshape(pose["keypoints"], (-1, 2)) + 0.5) * picture.width / image.width - 0.5
            visibility[number, found], scores[number, found] = 2, pose["scores"]
        boxes = _scaled_boxes(answer, picture, image)
        drawn = draw_keypoints(picture, points, visibility, self.skeleton, scores, boxes)
        return arrange_tiles([drawn, draw_text(caption)], columns=1, margin=0)


def read_box_file(file: Path, images: Sequence[Path]) -> dict[Path, list[Box]]:
    """Returns the boxes of each image from lines like `BOX_LINE`; raises `ValueError` if one is wrong or missing."""
    boxes = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            boxes[Path(entry["file"])] = [{side: found["box"][side] for side in CORNERS} for found in entry["objects"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Line {number} of {file} is not {BOX_LINE}, as this script prints it for a model of object "
                f"detection: {error!r}."
            ) from error
    missing = [str(image) for image in images if image not in boxes]
    if missing:
        raise ValueError(f"{file} says nothing of {missing[0]}, as of {len(missing)} of {len(images)} images.")
    return boxes


def find_images(inputs: Sequence[Path]) -> list[Path]:
    """Lists the files among `inputs` and, sorted, the images in folders; raises `ValueError` where there is none."""
    files: list[Path] = []
    for path in inputs:
        if not path.exists():
            raise ValueError(f"There is no file or folder {path}.")
        found = [path] if path.is_file() else [p for p in files_below(path) if p.suffix.lower() in IMAGE_SUFFIXES]
        if not found:
            raise ValueError(f"The folder {path} holds no image: no file ends in {', '.join(sorted(IMAGE_SUFFIXES))}.")
        files += found
    return files


def find_stored(path: Path) -> dict[Path, Row]:
    """Returns the images of a parquet file, tar file or table, or of a folder that has no others, by their names."""
    is_stored = path.is_file() and path.name.lower().endswith((".parquet", *TAR_SUFFIXES, *TABLE_SUFFIXES))
    if path.is_dir():
        is_stored = all(file.suffix.lower() not in IMAGE_SUFFIXES for file in files_below(path))
    if not is_stored:
        return {}
    found: dict[Path, Row] = {}
    for split, images in load_unlabeled_images([str(path)]).items():
        rows = images.cast_column("image", datasets.Image(decode=False))
        for number, file in enumerate(rows["file"]):
            found[Path(file) if Path(file) not in found else Path(f"{split}-{number}-{file}")] = (rows, number)
    return found


def open_image(file: Path, row: Row | None = None) -> Image.Image:
    """Opens an image, a file or in a row, upright, as 8-bit colors, as a training does; `ValueError` if unreadable."""
    try:
        source = file if row is None else BytesIO(encoded_bytes(row[0][row[1]]["image"], "image"))
        with Image.open(source) as opened:
            pixels = read_image(opened, "it", num_channels=3)  # (3, H, W)
        return Image.fromarray(pixels.round().byte().movedim(0, -1).numpy())
    except Exception as error:  # decoders fail in many ways
        raise ValueError(f"{file} cannot be read as an image: {error}") from error


def name_outputs(files: Sequence[Path]) -> list[str]:
    """Returns a name for what is written about each file: its own without the suffix, numbered where it is taken."""
    counts: Counter[str] = Counter()
    names: dict[str, None] = {}
    for file in files:
        name = file.stem
        while name in names:
            counts[file.stem] += 1
            name = f"{file.stem}-{counts[file.stem] + 1}"
        names[name] = None
    return list(names)


def _figure(caption: str, draw: Callable[..., None], *values: Any, **options: Any) -> Image.Image:
    """Returns a figure that is drawn to a file, with a caption below."""
    buffer = BytesIO()
    draw(*values, file=buffer, **options)
    with Image.open(buffer) as figure:
        return arrange_tiles([figure.convert("RGB"), draw_text(caption)], columns=1, margin=0)


def _fitted(image: Image.Image) -> Image.Image:
    return image if max(image.size) <= MAX_SIDE else ImageOps.contain(image, (MAX_SIDE, MAX_SIDE))


def _mask(part: Part, picture: Image.Image) -> np.ndarray:
    """Returns where a part is in a picture of any size, (H, W)."""
    return np.asarray(part["mask"].resize(picture.size, Image.Resampling.NEAREST)) > 0


def _scaled_boxes(answer: Sequence[dict[str, Any]], picture: Image.Image, image: Image.Image) -> np.ndarray:
    """Returns the boxes (N, 4) of a prediction on an image in pixels of a picture of it."""
    boxes = np.array([[found["box"][side] for side in CORNERS] for found in answer], dtype=float)
    return boxes.reshape(-1, 4) * picture.width / image.width


def _write_table(file: Path, header: list[str], rows: list[list[Any]]) -> Path:
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return file


def _area(part: Part) -> int:
    """Returns the number of pixels of a part."""
    count: int = part["mask"].histogram()[255]
    return count
