"""Helpers that save small encoders and extract features with them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hf_vit import HfViTImageProcessor, HfViTModel
from hf_vit.features import ExtractionArguments, extract_features

from .models import small_config
from .references import draw_weights


def save_encoder(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Saves a model whose weights all affect the output, and its image processor; returns `folder`."""
    config = small_config(**overrides)
    model = HfViTModel(config)
    draw_weights(model, seed)
    model.save_pretrained(folder)
    HfViTImageProcessor.for_model(config).save_pretrained(folder)
    return folder


def arguments_of(model: Path, data: Path, output_dir: Path, **options: Any) -> dict[str, Any]:
    """Returns arguments for feature extraction with small batches and shards, so that there are several of each."""
    places = {"model_name_or_path": str(model), "dataset_name": str(data), "output_dir": str(output_dir)}
    return {**places, "batch_size": 4, "rows_per_shard": 10, "use_cpu": True, **options}


def command_line(arguments: dict[str, Any]) -> list[str]:
    words = ((f"--{name}", *(value if isinstance(value, list) else [value])) for name, value in arguments.items())
    return [str(word) for line in words for word in line]


def extract_to(model: Path, data: Path, output_dir: Path, **options: Any) -> Path:
    """Extracts features in this process and returns `output_dir`."""
    extract_features(ExtractionArguments(**arguments_of(model, data, output_dir, **options)))
    return output_dir


def rows_of(folder: Path, split: str) -> pa.Table:
    """Returns all feature rows of a split, ordered by file name."""
    return pa.concat_tables(pq.read_table(file) for file in sorted(folder.glob(f"{split}-*.parquet")))


def content_of(folder: Path) -> dict[str, bytes]:
    """Returns the content of all files by name, without checksums, whose order depends on the processes."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}
