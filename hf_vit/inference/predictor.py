"""Predict images with a pipeline, and read the object boxes of images from a file."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

    Inputs for keypoint detection include the boxes of objects. If `boxes` is None, each whole image is one object.
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


@dataclass(eq=False)
class Predictor:
    """Predicts images with a pipeline and returns JSON-compatible dictionaries."""

    pipe: Pipeline
    writer: Writer
    options: dict[str, Any]  # options of the pipeline call
    boxes: Boxes | None = None  # object boxes of each image, see `read_box_file`
    best_missed: float | None = None  # best score of all images without predictions
    has_found: bool = False

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
            self.best_missed = max(line["best_score"], self.best_missed or 0.0)
        else:
            self.has_found = True
        return line

    def warn_of_threshold(self) -> None:
        """Logs a warning if no prediction of any image reaches the threshold."""
        if self.best_missed is not None and not self.has_found:
            logger.warning(
                f"No prediction reaches the threshold {self.options['threshold']:g}: the best score of all images is "
                f"{self.best_missed:.3g}. Lower the threshold to see it, for example --threshold "
                f"{0.9 * self.best_missed:.2g}."
            )


def key_of(file: str, frame: int | None) -> tuple[Path | str, int | None]:
    """Returns the key of an image, or of a frame of a video, in `Boxes`."""
    return file if file.startswith(URL) else Path(file), frame


def read_box_file(file: Path, sources: Sequence[Source]) -> Boxes:
    """Returns the boxes of images and frames in a file of JSON lines, such as the predictions of an object detector.

    Raises `ValueError` if a line is not in the format of `BOX_LINE`, or an image in `sources` has no line. A frame
    without a line has no boxes.
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
