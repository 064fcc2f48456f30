"""Predictions of a saved model on image files: the stock pipeline of its task, and what is written of its answers.

Any task that a pipeline answers for single images: classes, segmentation, depth, objects, keypoints. Models of
transformers' own classes work too.
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
from ..model.pipeline_hf_vit import CORNERS, BatchedImagePipeline, chosen_threshold
from ..model.pretrained import check_trained, read_config
from ..model.remote_code import refusing_code
from ..options.field import COUNT, PROBABILITY
from ..outputs import check_outputs, check_writable, record_outputs
from ..visualize.figures import arrange_pages, arrange_tiles
from .writers import Writer, find_writer


logger = logging.get_logger(__name__)
Box = dict[str, float]  # "xmin", "ymin", "xmax" and "ymax" in pixels

BOX_LINE = '{"file": ..., "objects": [{"box": {"xmin", "ymin", "xmax", "ymax"}}, ...]}'
BATCHED = {"image-classification", "keypoint-detection"}  # the other pipelines choose the size of their batches
MAX_TILES = 100  # of one picture of many images
PICTURE = "_picture.png"  # how the name of the picture of one image ends


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
        batch_size: Images to be classified, or objects with keypoints, per pass of a model of ours.
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
    sources = find_sources(inputs)
    files = [source.file for source in sources]
    given = {"threshold": threshold, "nms_threshold": nms_threshold, "subtask": subtask, "top_k": top_k}
    writer = _find_writer(model, given, boxes, draws=bool(output_dir or picture))
    boxes_of = None if boxes is None else read_box_file(boxes, files)
    pipe = _open_pipeline(model, writer.pipeline, batch_size, optimize, trust_remote_code)
    pages, stems, planned = _plan_outputs(writer, files, output_dir, picture)
    check_outputs(planned, [*files, *filter(None, [boxes])], overwrite)
    options, tiles = _call_options(writer, pipe, given), list[Image.Image]()
    missed = list[float | None]()  # the best score of an image in which nothing passes the threshold, else None
    for line in _lines(pipe, writer, options, Inputs(sources, boxes_of, pipe), stems, tiles, bool(picture)):
        missed += [line.get("best_score")] if "error" not in line else []
        yield line
    _warn_of_threshold(options, missed)
    _save_pages(tiles, pages)


def _save_pages(tiles: Sequence[Image.Image], files: Sequence[Path]) -> None:
    for page, file in zip(arrange_pages(tiles), files, strict=False):
        file.parent.mkdir(parents=True, exist_ok=True)
        page.save(file)
        record_outputs([file])


def _check_places(output_dir: Path | None, picture: Path | None) -> None:
    """Raises `ValueError` or `OSError` if nothing can be written to a folder or a picture."""
    if picture is not None and Image.registered_extensions().get(picture.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"No picture can be written to {picture}, because of its suffix. Use .png or .jpg.")
    for folder in filter(None, (output_dir, picture and picture.parent)):
        check_writable(folder)


def _find_writer(model: str, given: Mapping[str, Any], boxes: Path | None, *, draws: bool) -> Writer:
    """Returns how the answers of a model are written; raises `ValueError` if options do not fit it."""
    nms_threshold = given["nms_threshold"]
    check_thresholds(threshold=given["threshold"], nms_threshold=nms_threshold)
    config = read_config(model)
    name, writer = (config.get("architectures") or [None])[0], find_writer(config, given["subtask"])
    if boxes is not None and (writer is None or writer.pipeline != "keypoint-detection"):
        raise ValueError(f"--boxes {boxes} says where keypoints are to be found, but {model} finds none.")
    if nms_threshold is not None and name != "HfViTForObjectDetection":
        raise ValueError(f"--nms_threshold {nms_threshold} is for HfViTForObjectDetection, but {model} is a {name}.")
    if writer is None:
        raise ValueError(
            f"{model} was saved as {name}, which neither names images, nor segments them, nor estimates depth, nor "
            "finds objects or keypoints. Give a model that was trained for one of these."
        )
    if draws and writer.pipeline != "image-classification":
        check_packages("A picture of the predictions", "matplotlib", "scipy")
    return writer


def _open_pipeline(model: str, task: str, batch_size: int, optimize: bool, trust_remote_code: bool) -> Pipeline:
    """Opens the stock pipeline, and logs what optimization has found."""
    options: dict[str, Any] = {"optimize": optimize} if optimize else {}
    options |= {"batch_size": batch_size} if task in BATCHED else {}
    with refusing_code(model, "Read it, and if you trust it say --trust_remote_code."):
        pipe = pipeline(task, model=model, trust_remote_code=trust_remote_code, **options)
    if not isinstance(pipe, BatchedImagePipeline):  # ours have checked it
        check_trained(pipe.model, model)
    elif optimize:
        report, kept = pipe.fast_model.report, pipe.fast_model.report.best
        logger.warning(f"{report}\nKept: {kept.name}, {kept.ratio:.2f} times as fast as the model given.")
    return pipe


def _call_options(writer: Writer, pipe: Pipeline, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the pipeline's call: those given, else chosen by the training, else the writer's."""
    chosen = {} if writer.task_config is None else chosen_threshold(pipe.model.config, writer.task_config)
    values = {**writer.options, **chosen, **{name: value for name, value in given.items() if value is not None}}
    return {name: values[name] for name in writer.options if values[name] is not None}


def _plan_outputs(
    writer: Writer, files: Sequence[Path], output_dir: Path | None, picture: Path | None
) -> tuple[list[Path], list[Path], list[Path]]:
    """Returns the files of the pages of a picture, how those of each image start, and all that may be written."""
    numbers = ["", *(f"-{number}" for number in range(2, min(len(files), MAX_TILES) + 1))]
    pages = [] if picture is None else [picture.with_stem(picture.stem + number) for number in numbers]
    stems = [] if output_dir is None else [output_dir / name for name in name_outputs(files)]
    of_images = [stem.with_name(stem.name + ending) for stem in stems for ending in (*writer.files, PICTURE)]
    return pages, stems, [*pages, *of_images]


class Source(NamedTuple):
    """An image: a file, or a row of a dataset under the name of its file."""

    file: Path
    rows: datasets.Dataset | None = None
    number: int = 0

    def read(self) -> str | bytes:
        """Returns the path of the file, or the encoded image of the row; raises `OSError` if there is none."""
        if self.rows is None:
            return str(self.file)
        try:
            return encoded_bytes(self.rows[self.number]["image"], "image")
        except Exception as error:  # what opens files elsewhere fails in many ways
            raise OSError(f"{error}") from error

    def decode(self) -> Image.Image:
        """Returns the image upright, as 8-bit colors, as a training sees it; decoders raise errors of many kinds."""
        pixels = read_image(self.read(), "it", num_channels=3)  # (3, H, W)
        return Image.fromarray(pixels.round().byte().movedim(0, -1).numpy())


class Inputs(Dataset[Any]):
    """What a pipeline takes of each image, read when it is asked for: encoded, or of other pipelines decoded.

    Args:
        sources: The images.
        boxes: The objects of each file, for the pipeline of keypoints; None if whole images are.
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
    """Yields the answer to each image, of other pipelines one by one, or `{"error": ...}` if it cannot be read."""
    if inputs.are_encoded:
        yield from pipe(inputs, on_error="return", **options)
        return
    for index in range(len(inputs)):
        try:
            image = inputs[index]
        except Exception as error:  # decoders fail in many ways
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
    """Yields what JSON has of each image, writes what is asked for, and collects the pictures of the first ones."""
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
            raise ValueError(f"The prediction for {file} is infinite or NaN. Use an earlier checkpoint.") from error
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
    """Writes a prediction and its picture to files whose names start with `stem`, and returns their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    places = {stem.with_name(stem.name + ending): write for ending, write in writer.files.items()}
    for file, write in places.items():
        write(image, answer, config, file)
    written = [*places, stem.with_name(stem.name + PICTURE)]
    arrange_tiles([tile], columns=1).save(written[-1])
    record_outputs(written)
    return [str(file) for file in written]


def _warn_of_threshold(options: Mapping[str, Any], missed: Sequence[float | None]) -> None:
    """Warns if nothing passes in any image, given the best score of each in which that is so."""
    scores = [score for score in missed if score is not None]
    if scores and len(scores) == len(missed):
        logger.warning(
            f"Nothing passes the threshold {options['threshold']:g}: the best score of all images is "
            f"{max(scores):.3g}. Say --threshold {0.9 * max(scores):.2g} to see what has it."
        )


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


def find_sources(inputs: Sequence[Path]) -> list[Source]:
    """Lists the images of files, folders, parquet files, tar files and tables; errors as of `find_images`."""
    return [source for path in inputs for source in find_stored(path) or map(Source, find_images([path]))]


def find_stored(path: Path) -> list[Source]:
    """Lists the images of a parquet file, tar file or table, or of a folder that has no others, by different names."""
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
    """Opens an image file upright, as 8-bit colors, as a training does; `ValueError` if it cannot be read."""
    try:
        return Source(file).decode()
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
