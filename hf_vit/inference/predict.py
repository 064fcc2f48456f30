"""Predict image files with the transformers pipeline of a saved model, and write the predictions to files.

Supported tasks are image classification, segmentation, depth estimation, object detection and keypoint detection, for
hf_vit and transformers models.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from PIL import Image
from transformers import Pipeline, PreTrainedConfig, pipeline
from transformers.utils import logging

from ..convert import load_image_processor
from ..data.reading.files import VIDEO_SUFFIXES, is_system
from ..data.shards import open_processes
from ..extras import check_packages
from ..model.large_images import check_tiles
from ..model.nested_options import check_thresholds
from ..model.pipeline_hf_vit import BatchedImagePipeline, trained_threshold
from ..model.pretrained import check_trained, read_config
from ..model.remote_code import raising_remote_code_error
from ..options.field import COUNT, PROBABILITY, SHARE_LEFT_OUT
from ..outputs import check_outputs, check_writable, record_outputs
from ..visualize.figures import arrange_pages, arrange_tiles
from .predictor import Boxes, Predictor, read_box_file
from .shards import write_prediction_shards
from .sources import URL, Source, VideoWriter, find_sources, name_outputs
from .writers import LABELED, ZERO_SHOT, Writer, draw_label_below, find_writer


logger = logging.get_logger(__name__)
BATCHED = {"image-classification", ZERO_SHOT, "keypoint-detection"}  # tasks whose pipelines accept a batch size
OPTIONS = ("threshold", "nms_threshold", "subtask", "top_k", "candidate_labels", "tile_size", "overlap")  # of any task
MAX_TILES = 100  # maximum number of images that `predict_files` draws into `picture`
ROWS_PER_SHARD = 4096  # default for several processes
PICTURE = "_picture.png"  # file name suffix of the picture of one image


def predict_files(
    model: str,
    inputs: Sequence[str | Path],
    *,
    output_dir: Path | None = None,
    picture: Path | None = None,
    top_k: Annotated[int, COUNT] = 3,
    batch_size: Annotated[int, COUNT] = 8,
    threshold: Annotated[float | None, PROBABILITY] = None,
    nms_threshold: Annotated[float | None, PROBABILITY] = None,
    boxes: Path | None = None,
    labels: Sequence[str] | None = None,
    subtask: Annotated[str | None, ("panoptic", "instance", "semantic")] = None,
    tile_size: Annotated[int | None, COUNT] = None,
    overlap: Annotated[float | None, SHARE_LEFT_OUT] = None,
    options: dict[str, Any] | None = None,
    rows_per_shard: Annotated[int | None, COUNT] = None,
    optimize: bool = False,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    head: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Predicts images and the frames of videos, and writes predictions and pictures to files if requested.

    Args:
        model: Folder of a saved model, or its name on the Hub.
        inputs: Images, videos, http(s) URLs, folders, or parquet files, tar files and tables with images.
        output_dir: Folder for the predictions and a picture of each image, or for parquet files.
        picture: File for a picture of the first 100 images, or a labeled video such as labeled.mp4; then name-2.png.
        top_k: Number of labels per image, most likely first.
        batch_size: Number of images (classification), objects (keypoints) or tiles per forward pass.
        threshold: Minimum score of a segment, object or keypoint; by default the value selected in training, else 0.5.
        nms_threshold: IoU above which two objects of a class are duplicates; the one of lower score is removed.
        boxes: JSON lines file of detected objects, see `read_box_file`; by default, each whole image is an object.
        labels: Candidate texts for an image-text model, such as cat "a red car".
        subtask: "panoptic", "instance" or "semantic"; by default the subtask of the image processor.
        tile_size: Side length in pixels of tiles, for small objects and details in large images; by default no tiles.
        overlap: Overlap of neighboring tiles as a share of their size; 0.2 by default.
        options: Further options of the pipeline call, as JSON, such as '{"coverage": 0.95}' or '{"max_missed": 0.1}'.
        rows_per_shard: Number of images or videos per parquet file; 4096 for several processes (torchrun, accelerate).
        optimize: Whether to optimize a model of hf_vit first, see `optimize_for_inference`.
        trust_remote_code: Whether to run Python code stored with the model. hf_vit and transformers models need none.
        overwrite: Whether to replace files of an earlier run. Other files and inputs are never replaced.
        head: Head of a multi-task model, which is used like a single-task model; by default all heads.

    Yields:
        For each image, a JSON-compatible dictionary with `file`, the prediction, the files in `written`, `best_score`
        if no score is above the threshold, `error` if the file cannot be read, and `frame` and `seconds` of a frame.
        For parquet files, a dictionary for each written file.

    Raises:
        ImportError: if a package for pictures is missing.
        OSError: if there is no such model or file.
        ValueError: if there are no images, an option is invalid, code is not trusted, or a file would be replaced.
    """
    places = Places(output_dir, picture, boxes, rows_per_shard, overwrite)
    given: dict[str, Any] = {"threshold": threshold, "nms_threshold": nms_threshold, "tile_size": tile_size}
    given |= {"subtask": subtask, "candidate_labels": labels and list(labels), "top_k": top_k, "overlap": overlap}
    opening = {"batch_size": batch_size, "optimize": optimize, "trust_remote_code": trust_remote_code, "head": head}
    yield from _predict(model, [os.fspath(path) for path in inputs], places, given | (options or {}), opening)


@dataclass(frozen=True)
class Places:
    """Files that `predict_files` reads and writes, see there."""

    output_dir: Path | None
    picture: Path | None
    boxes: Path | None
    rows_per_shard: int | None
    overwrite: bool

    @property
    def is_video(self) -> bool:
        """Whether the picture is a labeled video."""
        return self.picture is not None and self.picture.suffix.lower() in VIDEO_SUFFIXES

    def shard_folder(self) -> Path | None:
        """Returns the folder for parquet files, or None if none are written; raises `ValueError` if there is none."""
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        if num_processes == 1 and self.rows_per_shard is None:
            return None
        if self.output_dir is None or self.picture is not None or self.boxes is not None:
            cause = f"{num_processes} processes" if num_processes > 1 else f"--rows_per_shard {self.rows_per_shard}"
            raise ValueError(f"{cause} write parquet files. Set --output_dir, and remove --picture and --boxes.")
        return self.output_dir


def _predict(
    model: str, inputs: Sequence[str], places: Places, given: Mapping[str, Any], opening: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the same as `predict_files`, given the options of the pipeline call and of opening the pipeline."""
    check_places(places.output_dir, places.picture, has_videos=True)
    shard_folder, sources = places.shard_folder(), find_sources(inputs, has_videos=True)
    draws = shard_folder is None and bool(places.output_dir or places.picture)
    # The names of output files depend on all names. Otherwise, no list of all names is held in memory.
    listed = list(sources) if draws or places.boxes is not None else []
    writer = _find_writer(model, given, places.boxes, opening["head"], draws=draws)
    boxes = None if places.boxes is None else read_box_file(places.boxes, listed)
    predictor = open_predictor(model, writer, given, boxes, **opening, is_distributed=shard_folder is not None)
    if shard_folder is not None:
        rows_per_shard = places.rows_per_shard or ROWS_PER_SHARD
        yield from write_prediction_shards(predictor, model, inputs, shard_folder, rows_per_shard, opening["optimize"])
        return
    outputs = OutputFiles(writer, predictor.pipe.model.config, places)
    for source, line, answer in predictor(outputs.plan(listed) if listed else sources):
        yield line | ({} if answer is None else outputs.add(source, line, answer))
    outputs.close()
    predictor.warn_of_threshold()


def save_pages(tiles: Sequence[Image.Image], files: Sequence[Path]) -> None:
    """Arranges pictures on pages and saves the pages to the first paths in `files`."""
    for page, file in zip(arrange_pages(tiles), files, strict=False):
        file.parent.mkdir(parents=True, exist_ok=True)
        page.save(file)
        record_outputs([file])


def list_pages(picture: Path | None, num_tiles: int) -> list[Path]:
    """Returns the file paths for all pages of up to `num_tiles` pictures. The first path is `picture`."""
    numbers = ["", *(f"-{number}" for number in range(2, num_tiles + 1))]
    return [] if picture is None else [picture.with_stem(picture.stem + number) for number in numbers]


def check_places(output_dir: Path | None, picture: Path | None, has_videos: bool = False) -> None:
    """Raises `ValueError` or `OSError` if the output folder, or the picture or labeled video, cannot be written."""
    if has_videos and picture is not None and picture.suffix.lower() in VIDEO_SUFFIXES:
        check_packages("A labeled video", "torchcodec", extra="fast")
    elif picture is not None and Image.registered_extensions().get(picture.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"Pictures cannot be saved as {picture}: its suffix is not supported. Use .png or .jpg.")
    for folder in filter(None, (output_dir, picture and picture.parent)):
        check_writable(folder)


def _find_writer(model: str, given: Mapping[str, Any], boxes: Path | None, head: str | None, *, draws: bool) -> Writer:
    """Returns the writer for a model; raises `ValueError` if options are not valid for the model."""
    nms_threshold = given["nms_threshold"]
    check_thresholds(threshold=given["threshold"], nms_threshold=nms_threshold)
    config = read_config(model, head=head)
    name, writer = (config.get("architectures") or [None])[0], find_writer(config, given["subtask"])
    if writer is None:
        raise ValueError(
            f"{model} was saved as {name}, which is not supported. Give a model for image classification, "
            "segmentation, depth estimation, object detection, keypoint detection, zero-shot classification or image "
            "captioning."
        )
    if boxes is not None and writer.pipeline != "keypoint-detection":
        raise ValueError(f"--boxes {boxes} requires a model for keypoint detection, but {model} has another task.")
    has_labels, needs_labels = given["candidate_labels"] is not None, writer.pipeline == ZERO_SHOT
    if has_labels and not needs_labels:
        raise ValueError(f"{model} is not a model of images and texts. Remove --labels.")
    if needs_labels and not has_labels:
        raise ValueError(f"{model} is a model of images and texts: give the texts to choose from, --labels cat dog.")
    if nms_threshold is not None and name != "HfViTForObjectDetection":
        raise ValueError(f"--nms_threshold {nms_threshold} requires HfViTForObjectDetection, but {model} is a {name}.")
    check_tiles(given["tile_size"], given["overlap"], str(name))
    for option in ("threshold", "subtask") if writer.pipeline == "multi-task" else ():
        if given[option] is not None:
            raise ValueError(f"--{option} {given[option]} applies to a single head of {model}. Set --head.")
    own = writer.options if config.get("model_type") == "hf_vit" else {}
    if unknown := [option for option in given if option not in (*OPTIONS, *own)]:
        raise ValueError(f"{model}, a {name}, has no option {unknown[0]!r}. Remove it from --options.")
    if draws and writer.pipeline not in LABELED:
        check_packages("A picture of the predictions", "matplotlib", "scipy")
    return writer


def open_predictor(
    model: str,
    writer: Writer,
    given: Mapping[str, Any],
    boxes: Boxes | None = None,
    *,
    batch_size: int,
    optimize: bool = False,
    trust_remote_code: bool = False,
    is_distributed: bool = False,
    head: str | None = None,
) -> Predictor:
    """Opens the pipeline of a model, given the options of its call, and logs the measurements of `optimize`.

    For the other arguments, see `predict_files`. With `is_distributed`, each process predicts on its own device.
    """
    task = writer.pipeline
    options: dict[str, Any] = {"optimize": optimize} if optimize else {}
    options |= {"batch_size": batch_size} if task in BATCHED or given.get("tile_size") else {}
    options |= {"device": open_processes().device} if is_distributed else {}
    if head is not None:
        options |= {"model_kwargs": {"head": head}, "image_processor": load_image_processor(model, head=head)}
    with raising_remote_code_error(model, "If you have read and trust this code, set --trust_remote_code."):
        pipe = pipeline(task, model=model, trust_remote_code=trust_remote_code, **options)
    if not isinstance(pipe, BatchedImagePipeline):  # Pipelines of hf_vit already check for untrained weights.
        check_trained(pipe.model, model)
    elif optimize:
        report, kept = pipe.fast_model.report, pipe.fast_model.report.best
        logger.warning(f"{report}\nKept: {kept.name}, {kept.ratio:.2f} times as fast as the original model.")
    return Predictor(pipe, writer, _call_options(writer, pipe, given), boxes)


def _call_options(writer: Writer, pipe: Pipeline, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the pipeline call.

    Values given by the user override values selected in training, which override the defaults of the writer.
    """
    chosen = {} if writer.task_config is None else trained_threshold(pipe.model.config, writer.task_config)
    values = {**writer.options, **chosen, **{name: value for name, value in given.items() if value is not None}}
    names = (*writer.options, "tile_size", "overlap")
    return {name: values[name] for name in names if values.get(name) is not None}


class OutputFiles:
    """Writes the output files of images, and the pictures or labeled videos in `picture`."""

    def __init__(self, writer: Writer, config: PreTrainedConfig, places: Places) -> None:
        self.writer, self.config, self.places = writer, config, places
        self.pages, self.tiles = list[Path](), list[Image.Image]()
        self.video: VideoWriter | None = None

    def plan(self, sources: Sequence[Source]) -> list[Source]:
        """Returns the sources with the places of their output files.

        Raises:
            ValueError: if an output file would replace an input or, without `overwrite`, a file of an earlier run.
        """
        picture, output_dir, endings = self.places.picture, self.places.output_dir, (*self.writer.files, PICTURE)
        num_videos = sum(source.is_video for source in sources)
        if self.places.is_video and not num_videos:
            raise ValueError(f"--picture {picture} is a video, but no input is a video. Use .png or .jpg.")
        num_tiles = MAX_TILES if num_videos else min(len(sources), MAX_TILES)
        self.pages = list_pages(picture, num_videos if self.places.is_video else num_tiles)
        planned, labeled, placed = list(self.pages), iter(self.pages), list[Source]()
        for source, name in zip(sources, name_outputs([source.file for source in sources]), strict=True):
            stem = None if output_dir is None else output_dir / name
            if stem is not None and source.is_video:  # The number of frames is not known yet.
                planned += [file for file in stem.glob("*") if not is_system(file.name)]
            elif stem is not None:
                planned += [stem.with_name(stem.name + ending) for ending in endings]
            page = next(labeled) if self.places.is_video and source.is_video else None
            placed.append(source._replace(stem=stem, labeled=page))
        read = [Path(source.file) for source in sources if not source.file.startswith(URL)]
        check_outputs(planned, [*read, *filter(None, [self.places.boxes])], self.places.overwrite)
        return placed

    def add(self, source: Source, line: Mapping[str, Any], answer: Any) -> dict[str, Any]:
        """Writes the output files of an image and adds its picture. Returns the file paths as `written`, if any."""
        is_tile = bool(self.places.picture) and not self.places.is_video and len(self.tiles) < MAX_TILES
        if source.stem is None and source.labeled is None and not is_tile:
            return {}
        image = source.decode()
        if source.frame is not None and self.writer.pipeline in LABELED:
            tile = draw_label_below(image, line, source.caption)
        else:
            tile = self.writer.draw(image, answer, self.config, source.caption)
        self.tiles += [tile] if is_tile else []
        if source.labeled is not None and source.frame is not None:
            if self.video is None or self.video.file != source.labeled:
                self.close()
                self.video = VideoWriter(source.labeled, source.frame.rate)
            self.video.add(tile)
        if source.stem is None:
            return {}
        stem = source.stem if source.frame is None else source.stem / f"{source.frame.number:06d}"
        return {"written": self._write(image, answer, tile, stem)}

    def _write(self, image: Image.Image, answer: Any, tile: Image.Image, stem: Path) -> list[str]:
        """Writes a prediction and its picture to files whose names start with `stem`, and returns the file paths."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        places = {stem.with_name(stem.name + ending): write for ending, write in self.writer.files.items()}
        for file, write in places.items():
            write(image, answer, self.config, file)
        written = [*places, stem.with_name(stem.name + PICTURE)]
        arrange_tiles([tile], columns=1).save(written[-1])
        record_outputs(written)
        return [str(file) for file in written]

    def close(self) -> None:
        """Writes the pictures, and completes the last labeled video."""
        if self.video is not None:
            self.video.close()
        save_pages(self.tiles, self.pages)
