"""Checksums of a checkpoint, written when all else is on the disk; `sha256sum -c SHA256SUMS` checks them too."""

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .output_files import flush_folder, write_whole


CHECKSUMS = "SHA256SUMS"
THREADS = 4  # that read files at a time


def seal(folder: Path) -> None:
    """Brings all files of a folder to the disk, and then SHA256SUMS with a line for each of them."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / CHECKSUMS)
    with ThreadPoolExecutor(THREADS) as threads:
        sums = list(threads.map(_flushed_checksum, files))
    for place in {folder.parent, *(path.parent for path in folder.rglob("*"))}:
        flush_folder(place)
    lines = [f"{checksum}  {file.relative_to(folder).as_posix()}" for checksum, file in zip(sums, files, strict=True)]
    # The number tells of lines that are lost, and is a comment to sha256sum.
    write_whole(folder / CHECKSUMS, "\n".join([f"# {len(files)} files", *lines, ""]))


def read_checksums(folder: Path) -> dict[str, str]:
    """Returns the checksums in a folder's SHA256SUMS by the names of files; `ValueError` if lines are damaged."""
    # Only "\n" ends a line here: `splitlines` would take a damaged one for whole.
    first, *lines = (folder / CHECKSUMS).read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    matches = [match for line in lines if (match := re.fullmatch(r"([0-9a-f]{64})  (.+)", line))]
    if first != f"# {len(matches)} files" or len(matches) < len(lines):
        raise ValueError(f"{CHECKSUMS} cannot be read")
    return {match[2]: match[1] for match in matches}


def find_mismatch(folder: Path) -> str | None:
    """Returns which files of a folder are not as its SHA256SUMS has them, or None; without that file nothing is."""
    if not (folder / CHECKSUMS).is_file():
        return None
    try:
        expected = read_checksums(folder)
    except ValueError as error:
        return str(error)
    with ThreadPoolExecutor(THREADS) as threads:
        actual = threads.map(_checksum, [folder / name for name in expected])
        found = dict(zip(expected, actual, strict=True))
    missing = [name for name, checksum in found.items() if checksum is None]
    changed = [name for name in expected if name not in missing and found[name] != expected[name]]
    if missing:
        return f"it has no {' and no '.join(missing)}"
    return f"{CHECKSUMS} has other checksums for {', '.join(changed)}" if changed else None


def _checksum(file: Path) -> str | None:
    """Returns the checksum of a file, None if there is none or the disk cannot read it."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def _flushed_checksum(file: Path) -> str:
    with file.open("rb+") as stream:  # which some systems want for flushing
        os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()
