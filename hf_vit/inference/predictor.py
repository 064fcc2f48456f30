"""Predict images with a pipeline, and read the object boxes of images from a file."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import Pipeline
from transformers.utils import logging

from ..model.image_processing_base import HfViTImageProcessorBase
from ..model.pipeline_hf_vit import CORNERS, BatchedImagePipeline
from .sources import URL, Source, in_chunks
from .writers import Writer


logger = logging.get_logger(__name__)
Box = dict[str, float]  # keys "xmin", "ymin", "xmax" and "ymax", values in pixels
Boxes = dict[tuple[Path | str, int | None], list[Box]]  # boxes by file or URL, and by number of the frame

BOX_LINE = '{"file": ..., "objects": [{"box": {"xmin", "ymin", "xmax", "ymax"}}, ...]}'


class Inputs(Dataset[Any]):
    """Lazily read inputs of a pipeline: encoded images for hf_vit pipelines, decoded images for other pipelines.

    Args:
        sources: The images.
        boxes: Object boxes of each image, for keypoint detection. If None, each whole image is one object.
        pipe: The pipeline.
    """

    def __init__(self, sources: Sequence[Source], boxes: Boxes | None, pipe: Pipeline) -> None:
        self.sources, self.boxes, processor = sources, boxes, pipe.image_processor
        self.are_encoded = isinstance(pipe, BatchedImagePipeline) and isinstance(processor, HfViTImageProcessorBase)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Any:
        source = self.sources[index]
        image = source.read() if self.are_encoded else source.decode()
        if self.boxes is None:
            return image
        return {"image": image, "boxes": self.boxes.get(key_of(source.file, source.frame and source.frame.number), [])}


class Predictor:
    """Predicts images with a pipeline and returns JSON-compatible dictionaries.

    Args:
        pipe: The pipeline.
        writer: Writer for the predictions.
        options: Options of the pipeline call.
        boxes: Object boxes of each image, see `read_box_file`.
    """

    def __init__(self, pipe: Pipeline, writer: Writer, options: dict[str, Any], boxes: Boxes | None = None) -> None:
        self.pipe, self.writer, self.options, self.boxes = pipe, writer, options, boxes
        self.best_missed, self.has_found = list[float](), False  # best score of all images without predictions

    def __call__(self, sources: Iterable[Source]) -> Iterator[tuple[Source, dict[str, Any], Any]]:
        """Yields each image with its dictionary and the output of the pipeline, or None if it cannot be read."""
        for chunk in in_chunks(sources):
            inputs = Inputs(chunk, self.boxes, self.pipe)
            for index, answer in enumerate(self.answers(inputs)):
                source = chunk[index]
                line: dict[str, Any] = {"file": source.file}
                if source.frame is not None:
                    line |= {"frame": source.frame.number, "seconds": source.frame.seconds}
                if "error" in answer:
                    kind = "a video" if source.is_video else "an image"
                    yield source, {**line, "error": f"{source.file} cannot be read as {kind}: {answer['error']}"}, None
                else:
                    yield source, line | self.describe(answer, inputs, index), answer

    def answers(self, inputs: Inputs) -> Iterator[Any]:
        """Yields the prediction for each image, or `{"error": ...}` if the image cannot be read."""
        if inputs.are_encoded:
            yield from self.pipe(inputs, on_error="return", **self.options)
            return
        for index in range(len(inputs)):
            try:
                image = inputs[index]
            except Exception as error:  # Image decoders raise many types of errors.
                yield {"error": str(error)}
            else:
                yield self.pipe(image, **self.options)

    def describe(self, answer: Any, inputs: Inputs, index: int) -> dict[str, Any]:
        """Returns the JSON-compatible prediction, with `best_score` if no score is above the threshold."""
        line = self.writer.describe(answer, self.pipe.model.config)
        if "threshold" in self.options and not self.writer.scores(answer):
            candidates = self.writer.scores(self.pipe(inputs[index], **{**self.options, "threshold": 0.0}))
            line |= {"best_score": max(candidates)} if candidates else {}
        try:
            json.dumps(line, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                f"The prediction for {inputs.sources[index].file} is infinite or NaN. Use an earlier checkpoint of "
                "the model."
            ) from error
        if "best_score" in line:
            self.best_missed = [max([line["best_score"], *self.best_missed])]
        else:
            self.has_found = True
        return line

    def warn_of_threshold(self) -> None:
        """Logs a warning if no prediction of any image reaches the threshold."""
        if self.best_missed and not self.has_found:
            best = self.best_missed[0]
            logger.warning(
                f"No prediction reaches the threshold {self.options['threshold']:g}: the best score of all images is "
                f"{best:.3g}. Lower the threshold to see it, for example --threshold {0.9 * best:.2g}."
            )


def key_of(file: str, frame: int | None) -> tuple[Path | str, int | None]:
    """Returns the key of an image, or of a frame of a video, in `Boxes`."""
    return file if file.startswith(URL) else Path(file), frame


def read_box_file(file: Path, sources: Sequence[Source]) -> Boxes:
    """Returns the boxes of each image and frame from a file of JSON lines.

    Args:
        file: File with lines in the format of `BOX_LINE`, such as the output of `predict_files` for object detection.
        sources: Images that must have a line in the file, and videos. A frame without a line has no boxes.

    Raises:
        ValueError: if a line is invalid, or an image has no line.
    """
    boxes = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            found = [{side: found["box"][side] for side in CORNERS} for found in entry["objects"]]
            boxes[key_of(entry["file"], entry.get("frame"))] = found
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Line {number} of {file} is not in the format {BOX_LINE}, which hf-vit predict prints for an object "
                f"detection model: {error!r}."
            ) from error
    images = [source.file for source in sources if not source.is_video]
    missing = [image for image in images if key_of(image, None) not in boxes]
    if missing:
        raise ValueError(f"{file} has no line for {missing[0]} ({len(missing)} of {len(images)} images are missing).")
    return boxes
