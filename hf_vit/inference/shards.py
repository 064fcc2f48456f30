"""Write predictions to parquet files, on any number of processes. An interrupted run can be resumed."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Features, Image, Value
from transformers.utils import logging

from ..data.fingerprint import digest_model
from ..data.shards import ShardSettings, open_processes, write_shard
from .predictor import Predictor
from .sources import Source, digest_sources, find_sources


logger = logging.get_logger(__name__)
ROWS_IN_MEMORY = 100


@dataclass(frozen=True, kw_only=True)
class PredictionSettings(ShardSettings):
    """Settings that determine predictions."""

    content = "predictions"

    options: dict[str, Any]  # options of the pipeline call, and whether the model is optimized


def write_prediction_shards(
    predictor: Predictor, model: str, inputs: Sequence[str], folder: Path, rows_per_shard: int, optimize: bool
) -> Iterator[dict[str, Any]]:
    """Writes the predictions for images and videos to parquet files, see `hf_vit/data/shards.py` and `predict_files`.

    The columns are the entries of the printed lines, and the files of the prediction, for example `mask_png`.

    Yields:
        For each file that this process has written, its path as `written`, and its numbers of rows and errors.
    """
    # The images are listed twice, so that no list is held in memory.
    pipe, (count, files) = predictor.pipe, digest_sources(find_sources(inputs, has_videos=True))
    settings = PredictionSettings(
        model=model,
        dataset=",".join(inputs),
        **digest_model(pipe.model, *filter(None, (pipe.image_processor, pipe.tokenizer))),
        files=files,
        images={"predictions": count},
        rows_per_shard=rows_per_shard,
        options={**predictor.options, "optimize": optimize},
    )
    state = open_processes()
    own, sources, position = settings.start(folder, state), find_sources(inputs, has_videos=True), 0
    total = sum(shard.stop - shard.start for shard in own)
    with logging.tqdm(total=total, desc="Predicting", unit=" files", disable=not state.is_main_process) as bar:
        for shard in own:
            deque(islice(sources, shard.start - position), maxlen=0)  # skip the files of other shards
            rows = PredictionRows(predictor, islice(sources, shard.stop - shard.start))
            write_shard(folder / shard.name, rows, rows.columns, ROWS_IN_MEMORY)
            position = shard.stop
            bar.update(shard.stop - shard.start)
            yield {"written": str(folder / shard.name), "rows": rows.count, "errors": rows.errors}


class PredictionRows:
    """Iterable over the rows of a shard, which counts rows and errors."""

    def __init__(self, predictor: Predictor, sources: Iterable[Source]) -> None:
        self.predictor, self.sources, self.count, self.errors = predictor, sources, 0, 0
        # Images and arrays are columns. The content of CSV files is already in the other columns.
        files = predictor.writer.files.items()
        self.files = {ending.strip("_-").replace(".", "_"): to for ending, to in files if not ending.endswith(".csv")}
        kinds = {name: Image() if name.endswith("png") else Value("binary") for name in self.files}
        known = {"file": Value("string"), "frame": Value("int64"), "seconds": Value("float64")}
        last = {"best_score": Value("float64"), "error": Value("string")}
        self.columns = Features({**known, **predictor.writer.columns, **last, **kinds})

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for source, line, answer in self.predictor(self.sources):
            self.count += 1
            if answer is None:
                self.errors += 1
                logger.warning(line["error"])
            files = {} if answer is None else self._files_of(source, answer)
            yield {**dict.fromkeys(self.columns), **line, **files}

    def _files_of(self, source: Source, answer: Any) -> dict[str, Any]:
        """Returns the content of the files of a prediction, by column."""
        contents: dict[str, Any] = {}
        if self.files:
            image = source.decode()
            with TemporaryDirectory() as folder:
                for name, write in self.files.items():
                    file = Path(folder) / name.replace("_", ".")
                    write(image, answer, self.predictor.pipe.model.config, file)
                    content = file.read_bytes()
                    contents[name] = {"bytes": content, "path": None} if file.suffix == ".png" else content
        return contents
