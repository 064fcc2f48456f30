"""Files that have been cut, damaged or joined: tar files, whose readers then find fewer members, and parquet files."""

import gzip
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from transformers.utils import logging

from .files import raise_faults


logger = logging.get_logger(__name__)
BLOCK = tarfile.BLOCKSIZE
PARQUET_END = b"PAR1"
GZIP_START = b"\x1f\x8b"
MAX_SECONDS = 60.0  # for all archives of a dataset
CHUNK_BYTES = 2**20
IsLate = Callable[[], bool]


class _LateError(Exception):
    """There is no time left to read on."""


def check_tars(files: Iterable[str], max_seconds: float = MAX_SECONDS) -> None:
    """Reads tar files to their ends, without what their members hold, as long as there is time.

    A tar file ends in blocks of zeros. Readers that find no further member take that for the end as well, whatever is
    there instead.

    Args:
        files: Paths of tar files, plain or compressed by gzip.
        max_seconds: After so many seconds, only the last bytes of the others are checked, with a warning.

    Raises:
        OSError: if one of them is cut or damaged, or goes on after its end.
    """
    paths = list(files)
    end = time.monotonic() + max_seconds
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda path: _fault_of(Path(path), lambda: time.monotonic() > end), paths))
    raise_faults(
        [f"{path}: {fault}" for path, (fault, _) in zip(paths, found, strict=True) if fault],
        f"of {len(paths)} tar files are not whole, and the missing parts would be left out in silence",
        "Get them again, and pack joined ones anew.",
        error=OSError,
    )
    if num_late := sum(not is_whole for _, is_whole in found):
        logger.warning(
            "Of %d tar files %d could not be read to their ends in %.0f seconds. Whether they are whole is not known.",
            len(paths),
            num_late,
            max_seconds,
        )


def check_parquet(files: Iterable[str]) -> None:
    """Raises `OSError` for parquet files that do not end as such, before a stream comes to them."""
    paths, cut = list(files), []
    for path in paths:
        with open(path, "rb") as raw:
            if not _last_bytes(raw).endswith(PARQUET_END):
                cut.append(path)
    finding, advice = f"of {len(paths)} parquet files are cut or damaged", "Get them again, or leave them out."
    raise_faults(cut, finding, advice, error=OSError)


def _fault_of(path: Path, is_late: IsLate) -> tuple[str, bool]:
    """Returns what is wrong with a tar file, and whether all of it was looked at."""
    try:
        with path.open("rb") as raw:
            is_compressed = raw.read(len(GZIP_START)) == GZIP_START
            if not is_compressed and _last_bytes(raw).strip(b"\0"):
                return "it does not end in the blocks of zeros that end a tar file", True
            raw.seek(0)
            if not is_compressed:
                return _fault_after_members(raw, is_late), True
            with gzip.open(raw) as stream:
                return _fault_after_members(stream, is_late), True
    except _LateError:
        return "", False
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        return f"it is cut or damaged ({error})", True


def _last_bytes(raw: BinaryIO) -> bytes:
    size = raw.seek(0, 2)
    raw.seek(max(0, size - BLOCK))
    return raw.read()


def _fault_after_members(stream: BinaryIO | gzip.GzipFile, is_late: IsLate) -> str:
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        while tar.next() is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # which may be millions
            if is_late():
                raise _LateError
        end = tar.offset
    stream.seek(end)
    if len(block := stream.read(BLOCK)) < BLOCK or any(block):
        return f"at byte {end} there is neither another member nor the blocks of zeros that end a tar file"
    while chunk := stream.read(CHUNK_BYTES):
        if chunk.strip(b"\0"):
            return f"it goes on after its end at byte {end}, as files do that were joined"
        if is_late():
            raise _LateError
    return ""
