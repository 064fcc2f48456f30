"""Files and bytes as datasets hold them, before they are decoded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets.utils.file_utils import xopen


def encoded_bytes(encoded: Mapping[str, Any] | None, what: str) -> bytes:
    """Returns the content of a cell of the type `datasets.Image(decode=False)`.

    Args:
        encoded: The cell.
        what: What it should hold, to be said in errors.

    Raises:
        OSError: if its file cannot be read.
        ValueError: if the cell is empty.
    """
    path, content = (encoded["path"], encoded["bytes"]) if encoded is not None else (None, None)
    if content is not None:
        return bytes(content)
    if path is None:
        raise ValueError(f"there is no {what}")
    if "://" in path:  # of a stream, whose files are not here
        with xopen(path, "rb") as stream:
            return bytes(stream.read())
    return Path(path).read_bytes()
