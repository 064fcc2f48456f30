"""Features as columns of a table: vectors are lists of one length, patches lists of as many vectors as there are."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor


DTYPES = {"float32": torch.float32, "float16": torch.float16}
ARROW_TYPES = {torch.float32: pa.float32(), torch.float16: pa.float16(), torch.int32: pa.int32()}
# (B, D) of vectors, or for each of B images (N, D)
Features = Mapping[str, Tensor | Sequence[Tensor]]


def make_schema(widths: Mapping[str, int], dtype: str, has_labels: bool) -> pa.Schema:
    """Returns the columns of a table.

    Args:
        widths: Length D of a vector of each feature.
        dtype: "float32" or "float16".
        has_labels: Whether the classes of images are known.
    """
    number = ARROW_TYPES[DTYPES[dtype]]
    fields = [("file", pa.string()), *([("label", pa.string())] if has_labels else [])]
    for name, width in widths.items():
        vector = pa.list_(number, width)
        fields.append((name, pa.list_(vector) if name == "patches" else vector))
        if name == "patches":
            fields.append(("grid", pa.list_(pa.int32(), 2)))
    return pa.schema(fields)


def make_batch(
    schema: pa.Schema, files: Sequence[str], labels: Sequence[str | None], features: Features, dtype: str
) -> pa.RecordBatch:
    """Returns rows of a table.

    Args:
        schema: Its columns.
        files: Names of B images.
        labels: Names of their classes, where they are known.
        features: Of these images.
        dtype: "float32" or "float16".

    Raises:
        ValueError: if a number is too large for half precision.
    """
    columns: dict[str, pa.Array] = {"file": pa.array(files), "label": pa.array(labels, pa.string())}
    for name, values in features.items():
        vectors = values if isinstance(values, Tensor) else torch.cat(list(values))
        flat = vectors if name == "grid" else _rounded(vectors, name, dtype)
        column = pa.FixedSizeListArray.from_arrays(
            pa.array(flat.cpu().reshape(-1).numpy(), ARROW_TYPES[flat.dtype]), vectors.shape[1]
        )
        if not isinstance(values, Tensor):
            lengths = [0, *(len(image) for image in values)]
            column = pa.ListArray.from_arrays(pa.array(np.cumsum(lengths), pa.int32()), column)
        columns[name] = column
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def _rounded(vectors: Tensor, name: str, dtype: str) -> Tensor:
    rounded = vectors.to(DTYPES[dtype])
    if rounded.isfinite().all() or not vectors.isfinite().all():
        return rounded
    raise ValueError(
        f"The feature {name!r} goes up to {float(vectors.abs().max()):g}, and {dtype} to "
        f"{torch.finfo(rounded.dtype).max:g}. Give --dtype float32, and another --output_dir."
    )
