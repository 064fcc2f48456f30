"""Protection of files: a command never writes over an input, nor over a file that it did not write itself."""

import os
from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path


RECORD = ".hf_vit_outputs"  # in each folder with outputs: a line "checksum  name" for each file, as of sha256sum


def check_outputs(planned: Iterable[Path], inputs: Iterable[Path] = (), overwrite: bool = False) -> None:
    """Check all files that a command is about to write, before it does any work.

    Args:
        planned: The files.
        inputs: Files that the command reads, which are never replaced.
        overwrite: Whether to replace files of an earlier run. They are recognized by their checksum in `RECORD`.

    Raises:
        ValueError: if a file would be written twice, or would replace another one that must stay.
    """
    files = list(planned)
    read = {file.resolve() for file in inputs}
    records = {folder: _read_record(folder) for folder in {file.parent for file in files}}
    if twice := [file for file, count in Counter(file.resolve() for file in files).items() if count > 1]:
        raise ValueError(f"{twice[0]} would be written twice. Choose another output file or folder.")
    for file in filter(os.path.lexists, files):
        advice = "Choose another output file or folder."
        if file.resolve() in read:
            raise ValueError(f"{file} is an input and would be overwritten. {advice}")
        if file.is_symlink() or not file.is_file() or records[file.parent].get(file.name) != _checksum(file):
            raise ValueError(f"{file} exists and was not written by this command, or was changed since. {advice}")
        if not overwrite:
            raise ValueError(f"{file} exists, from an earlier run. Replace it with --overwrite. {advice}")


def record_outputs(files: Iterable[Path]) -> None:
    """Note the checksums of files that were just written, so that a later run may replace them on request."""
    for file in files:
        with (file.parent / RECORD).open("a", encoding="utf-8") as record:
            record.write(f"{_checksum(file)}  {file.name}\n")


def _read_record(folder: Path) -> dict[str, str]:
    """Return the last checksum of each file that is recorded in a folder, by its name."""
    record = folder / RECORD
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    return {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}


def _checksum(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()
