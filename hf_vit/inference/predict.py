"""Predict image files with the transformers pipeline of a saved model, and write the predictions to files.

Supported tasks are image classification, segmentation, depth estimation, object detection and keypoint detection, for
hf_vit and transformers models.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import datasets
from PIL import Image
from torch.utils.data import Dataset
from transformers import Pipeline, PreTrainedConfig, pipeline
from transformers.utils import logging

from ..data import load_unlabeled_images
from ..data.formats.columns import TABLE_SUFFIXES
from ..data.formats.files import IMAGE_SUFFIXES, files_below
from ..data.formats.stored import TAR_SUFFIXES
from ..data.targets import encoded_bytes
from ..extras import check_packages
from ..model.image_inputs import read_image
from ..model.image_processing_base import HfViTImageProcessorBase
from ..model.nested_options import check_thresholds
from ..model.pipeline_hf_vit import CORNERS, BatchedImagePipeline, trained_threshold
from ..model.pretrained import check_trained, read_config
from ..model.remote_code import raising_remote_code_error
from ..options.field import COUNT, PROBABILITY
from ..outputs import check_outputs, check_writable, record_outputs
from ..visualize.figures import arrange_pages, arrange_tiles
from .writers import ZERO_SHOT, Writer, find_writer


logger = logging.get_logger(__name__)
Box = dict[str, float]  # keys "xmin", "ymin", "xmax" and "ymax", values in pixels

BOX_LINE = '{"file": ..., "objects": [{"box": {"xmin", "ymin", "xmax", "ymax"}}, ...]}'
BATCHED = {"image-classification", ZERO_SHOT, "keypoint-detection"}  # tasks whose pipelines accept a batch size
MAX_TILES = 100  # maximum number of images that `predict_files` draws into `picture`
PICTURE = "_picture.png"  # file name suffix of the picture of one image


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
    labels: Sequence[str] | None = None,
    subtask: Annotated[str | None, ("panoptic", "instance", "semantic")] = None,
    optimize: bool = False,
    trust_remote_code: bool = False,
    overwrite: bool = False,
) -> Iterator[dict[str, Any]]:
    """Predicts image files one by one and writes predictions and pictures to files if requested.

    Args:
        model: Folder of a saved model, or its name on the Hub.
        inputs: Image files, folders of images, or parquet files, tar files and tables with images.
        output_dir: Folder for the predictions and a picture of each image.
        picture: File for a picture of the first 100 images; further pages are named `name-2.png` and so on.
        top_k: Number of labels per image, most likely first.
        batch_size: Number of images (classification) or objects (keypoints) per forward pass of a model of hf_vit.
        threshold: Minimum score of a segment, object or keypoint; by default the value selected in training, else 0.5.
        nms_threshold: IoU above which two objects of a class are duplicates; the one of lower score is removed.
        boxes: JSON lines file of detected objects, see `read_box_file`; by default, each whole image is an object.
        labels: Candidate texts for an image-text model, such as cat "a red car".
        subtask: "panoptic", "instance" or "semantic"; by default the subtask of the image processor.
        optimize: Whether to optimize a model of hf_vit for this machine first, see `optimize_for_inference`.
        trust_remote_code: Whether to run Python code stored with the model. hf_vit and transformers models need none.
        overwrite: Whether to replace files of an earlier run. Other files and inputs are never replaced.

    Yields:
        For each image, a JSON-compatible dictionary with `file`, the prediction, and the files in `written`. The
        dictionary contains `best_score` if no score is above the threshold, and `error` if a file cannot be read.

    Raises:
        ImportError: if a package for pictures is missing.
        OSError: if there is no such model or file.
        ValueError: if there are no images, an option is invalid, code is not trusted, or a file would be replaced.
    """
    check_places(output_dir, picture)
    sources = find_sources(inputs)
    files = [source.file for source in sources]
    given: dict[str, Any] = {"threshold": threshold, "nms_threshold": nms_threshold, "subtask": subtask}
    given |= {"top_k": top_k, "candidate_labels": None if labels is None else list(labels)}
    writer = _find_writer(model, given, boxes, draws=bool(output_dir or picture))
    boxes_of = None if boxes is None else read_box_file(boxes, files)
    pipe = _open_pipeline(model, writer.pipeline, batch_size, optimize, trust_remote_code)
    pages, stems = _plan_outputs(writer, files, output_dir, picture, boxes, overwrite)
    options, tiles = _call_options(writer, pipe, given), list[Image.Image]()
    missed = list[float | None]()  # None if an image has a prediction above the threshold, else its best score
    for line in _lines(pipe, writer, options, Inputs(sources, boxes_of, pipe), stems, tiles, bool(picture)):
        missed += [line.get("best_score")] if "error" not in line else []
        yield line
    _warn_of_threshold(options, missed)
    save_pages(tiles, pages)


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


def check_places(output_dir: Path | None, picture: Path | None) -> None:
    """Raises `ValueError` or `OSError` if the output folder or the picture file cannot be written."""
    if picture is not None and Image.registered_extensions().get(picture.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"Pictures cannot be saved as {picture}: its suffix is not supported. Use .png or .jpg.")
    for folder in filter(None, (output_dir, picture and picture.parent)):
        check_writable(folder)


def _find_writer(model: str, given: Mapping[str, Any], boxes: Path | None, *, draws: bool) -> Writer:
    """Returns the writer for a model; raises `ValueError` if options are not valid for the model."""
    nms_threshold = given["nms_threshold"]
    check_thresholds(threshold=given["threshold"], nms_threshold=nms_threshold)
    config = read_config(model)
    name, writer = (config.get("architectures") or [None])[0], find_writer(config, given["subtask"])
    if boxes is not None and (writer is None or writer.pipeline != "keypoint-detection"):
        raise ValueError(f"--boxes {boxes} requires a model for keypoint detection, but {model} has another task.")
    labels = given["candidate_labels"]
    if (labels is not None) != (writer is not None and writer.pipeline == ZERO_SHOT):
        has = "a model of images and texts: give the texts to choose from, --labels cat dog"
        raise ValueError(
            f"{model} is {has if labels is None else 'not a model of images and texts. Remove --labels'}."
        )
    if nms_threshold is not None and name != "HfViTForObjectDetection":
        raise ValueError(f"--nms_threshold {nms_threshold} requires HfViTForObjectDetection, but {model} is a {name}.")
    if writer is None:
        raise ValueError(
            f"{model} was saved as {name}, which is not supported. Give a model for image classification, "
            "segmentation, depth estimation, object detection, keypoint detection, zero-shot classification or image "
            "captioning."
        )
    if draws and writer.pipeline not in ("image-classification", "image-text-to-text", ZERO_SHOT):
        check_packages("A picture of the predictions", "matplotlib", "scipy")
    return writer


def _open_pipeline(model: str, task: str, batch_size: int, optimize: bool, trust_remote_code: bool) -> Pipeline:
    """Opens the pipeline of a task. If `optimize` is set, optimizes the model and logs the measurements."""
    options: dict[str, Any] = {"optimize": optimize} if optimize else {}
    options |= {"batch_size": batch_size} if task in BATCHED else {}
    with raising_remote_code_error(model, "If you have read and trust this code, set --trust_remote_code."):
        pipe = pipeline(task, model=model, trust_remote_code=trust_remote_code, **options)
    if not isinstance(pipe, BatchedImagePipeline):  # Pipelines of hf_vit already check for untrained weights.
        check_trained(pipe.model, model)
    elif optimize:
        report, kept = pipe.fast_model.report, pipe.fast_model.report.best
        logger.warning(f"{report}\nKept: {kept.name}, {kept.ratio:.2f} times as fast as the original model.")
    return pipe


def _call_options(writer: Writer, pipe: Pipeline, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the pipeline call.

    Values given by the user override values selected in training, which override the defaults of the writer.
    """
    chosen = {} if writer.task_config is None else trained_threshold(pipe.model.config, writer.task_config)
    values = {**writer.options, **chosen, **{name: value for name, value in given.items() if value is not None}}
    return {name: values[name] for name in writer.options if values[name] is not None}


def _plan_outputs(
    writer: Writer,
    files: Sequence[Path],
    output_dir: Path | None,
    picture: Path | None,
    boxes: Path | None,
    overwrite: bool,
) -> tuple[list[Path], list[Path]]:
    """Returns the files for the pages of `picture`, and a path prefix for the output files of each image.

    Raises:
        ValueError: if an output file would replace an input or, without `overwrite`, a file of an earlier run.
    """
    pages = list_pages(picture, min(len(files), MAX_TILES))
    stems = [] if output_dir is None else [output_dir / name for name in name_outputs(files)]
    of_images = [stem.with_name(stem.name + ending) for stem in stems for ending in (*writer.files, PICTURE)]
    check_outputs([*pages, *of_images], [*files, *filter(None, [boxes])], overwrite)
    return pages, stems


class Source(NamedTuple):
    """An image: the file `file` or, if `rows` is set, row `number` of the dataset `rows`, with `file` as its name."""

    file: Path
    rows: datasets.Dataset | None = None
    number: int = 0

    def read(self) -> str | bytes:
        """Returns the path of the file, or the encoded image in the row. Raises `OSError` for a row without image."""
        if self.rows is None:
            return str(self.file)
        try:
            return encoded_bytes(self.rows[self.number]["image"], "image")
        except Exception as error:  # Reading a dataset row raises many types of errors.
            raise OSError(f"{error}") from error

    def decode(self) -> Image.Image:
        """Returns the upright 8-bit RGB image, decoded as in training. Many types of errors are raised on failure."""
        pixels = read_image(self.read(), "it", num_channels=3)  # (3, H, W)
        return Image.fromarray(pixels.round().byte().movedim(0, -1).numpy())


class Inputs(Dataset[Any]):
    """Lazily read inputs of a pipeline: encoded images for hf_vit pipelines, decoded images for other pipelines.

    Args:
        sources: The images.
        boxes: Object boxes of each file, for keypoint detection. If None, each whole image is one object.
        pipe: The pipeline.
    """

    def __init__(self, sources: Sequence[Source], boxes: Mapping[Path, list[Box]] | None, pipe: Pipeline) -> None:
        self.sources, self.boxes, processor = sources, boxes, pipe.image_processor
        self.are_encoded = isinstance(pipe, BatchedImagePipeline) and isinstance(processor, HfViTImageProcessorBase)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Any:
        source = self.sources[index]
        image = source.read() if self.are_encoded else source.decode()
        return image if self.boxes is None else {"image": image, "boxes": self.boxes[source.file]}


def _answers(pipe: Pipeline, inputs: Inputs, options: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the prediction for each image, or `{"error": ...}` if the image cannot be read."""
    if inputs.are_encoded:
        yield from pipe(inputs, on_error="return", **options)
        return
    for index in range(len(inputs)):
        try:
            image = inputs[index]
        except Exception as error:  # Image decoders raise many types of errors.
            yield {"error": str(error)}
        else:
            yield pipe(image, **options)


def _lines(
    pipe: Pipeline,
    writer: Writer,
    options: dict[str, Any],
    inputs: Inputs,
    stems: Sequence[Path],
    tiles: list[Image.Image],
    collects: bool,
) -> Iterator[dict[str, Any]]:
    """Yields a JSON-compatible dictionary for each image and writes the output files of the image.

    Args:
        pipe: The pipeline.
        writer: Writer for the predictions.
        options: Options of the pipeline call.
        inputs: The images.
        stems: Path prefix for the output files of each image; if empty, no files are written.
        tiles: List to which pictures of the first images are appended.
        collects: Whether to append pictures to `tiles`.
    """
    config = pipe.model.config
    for index, answer in enumerate(_answers(pipe, inputs, options)):
        file = inputs.sources[index].file
        if "error" in answer:
            yield {"file": str(file), "error": f"{file} cannot be read as an image: {answer['error']}"}
            continue
        line = {"file": str(file), **writer.describe(answer, config)}
        if "threshold" in options and not writer.scores(answer):
            candidates = writer.scores(pipe(inputs[index], **{**options, "threshold": 0.0}))
            line |= {"best_score": max(candidates)} if candidates else {}
        try:
            json.dumps(line, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                f"The prediction for {file} is infinite or NaN. Use an earlier checkpoint of the model."
            ) from error
        is_collected = collects and len(tiles) < MAX_TILES
        if stems or is_collected:
            image = inputs.sources[index].decode()
            tile = writer.draw(image, answer, config, file.name)
            tiles += [tile] if is_collected else []
            if stems:
                line["written"] = _write(writer, image, answer, config, tile, stems[index])
        yield line


def _write(
    writer: Writer, image: Image.Image, answer: Any, config: PreTrainedConfig, tile: Image.Image, stem: Path
) -> list[str]:
    """Writes a prediction and its picture to files whose names start with `stem`, and returns the file paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    places = {stem.with_name(stem.name + ending): write for ending, write in writer.files.items()}
    for file, write in places.items():
        write(image, answer, config, file)
    written = [*places, stem.with_name(stem.name + PICTURE)]
    arrange_tiles([tile], columns=1).save(written[-1])
    record_outputs(written)
    return [str(file) for file in written]


def _warn_of_threshold(options: Mapping[str, Any], missed: Sequence[float | None]) -> None:
    """Logs a warning if no prediction of any image reaches the threshold.

    Args:
        options: Options of the pipeline call.
        missed: Best score of each image without a prediction above the threshold, None for other images.
    """
    scores = [score for score in missed if score is not None]
    if scores and len(scores) == len(missed):
        logger.warning(
            f"No prediction reaches the threshold {options['threshold']:g}: the best score of all images is "
            f"{max(scores):.3g}. Lower the threshold to see it, for example --threshold {0.9 * max(scores):.2g}."
        )


def read_box_file(file: Path, images: Sequence[Path]) -> dict[Path, list[Box]]:
    """Returns the boxes of each image from a file of JSON lines.

    Args:
        file: File with lines in the format of `BOX_LINE`, such as the output of `predict_files` for object detection.
        images: Images that must have a line in the file.

    Raises:
        ValueError: if a line is invalid, or an image has no line.
    """
    boxes = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            boxes[Path(entry["file"])] = [{side: found["box"][side] for side in CORNERS} for found in entry["objects"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Line {number} of {file} is not in the format {BOX_LINE}, which hf-vit predict prints for an object "
                f"detection model: {error!r}."
            ) from error
    missing = [str(image) for image in images if image not in boxes]
    if missing:
        raise ValueError(f"{file} has no line for {missing[0]} ({len(missing)} of {len(images)} images are missing).")
    return boxes


def find_images(inputs: Sequence[Path]) -> list[Path]:
    """Lists the files in `inputs` and the image files in folders in `inputs`.

    Raises `ValueError` if a path has no images.
    """
    files: list[Path] = []
    for path in inputs:
        if not path.exists():
            raise ValueError(f"There is no file or folder {path}.")
        found = [path] if path.is_file() else [p for p in files_below(path) if p.suffix.lower() in IMAGE_SUFFIXES]
        if not found:
            raise ValueError(
                f"The folder {path} contains no images: no file name ends in {', '.join(sorted(IMAGE_SUFFIXES))}."
            )
        files += found
    return files


def find_sources(inputs: Sequence[Path]) -> list[Source]:
    """Lists the images in image files, folders, parquet files, tar files and tables.

    Raises the same errors as `find_images`.
    """
    return [source for path in inputs for source in find_stored(path) or map(Source, find_images([path]))]


def find_stored(path: Path) -> list[Source]:
    """Lists the images in a parquet file, tar file or table, or in a folder of such files. Each has a unique name.

    Returns an empty list for other paths.
    """
    is_stored = path.is_file() and path.name.lower().endswith((".parquet", *TAR_SUFFIXES, *TABLE_SUFFIXES))
    if path.is_dir():
        is_stored = all(file.suffix.lower() not in IMAGE_SUFFIXES for file in files_below(path))
    if not is_stored:
        return []
    found: dict[Path, Source] = {}
    for split, images in load_unlabeled_images([str(path)]).items():
        rows = images.cast_column("image", datasets.Image(decode=False))
        for number, name in enumerate(rows["file"]):
            file = Path(name) if Path(name) not in found else Path(f"{split}-{number}-{name}")
            found[file] = Source(file, rows, number)
    return list(found.values())


def open_image(file: Path) -> Image.Image:
    """Returns the upright 8-bit RGB image in a file, decoded as in training; raises `ValueError` on failure."""
    try:
        return Source(file).decode()
    except Exception as error:  # Decoders raise many types of errors.
        raise ValueError(f"{file} cannot be read as an image: {error}") from error


def name_outputs(files: Sequence[Path]) -> list[str]:
    """Returns a unique output name for each file: the file name without suffix, with a number to resolve conflicts."""
    counts: Counter[str] = Counter()
    names: dict[str, None] = {}
    for file in files:
        name = file.stem
        while name in names:
            counts[file.stem] += 1
            name = f"{file.stem}-{counts[file.stem] + 1}"
        names[name] = None
    return list(names)
