"""Protection of files: a command never writes over an input, nor over a file that it did not write itself."""

import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path


RECORD = ".hf_vit_outputs"  # in each folder with outputs: a line "checksum  name" for each file, as of sha256sum


def check_outputs(planned: Iterable[Path], inputs: Iterable[Path] = (), overwrite: bool = False) -> None:
    """Raises `ValueError` if any of the files that a command plans to write must stay, before it does any work.

    With `overwrite`, files of an earlier run may be replaced. They are recognized by their checksum in `RECORD`.
    """
    read, seen = {file.resolve() for file in inputs}, set[Path]()
    for file in planned:
        if (place := file.resolve()) in seen:
            raise ValueError(f"{file} would be written twice. Choose another output file or folder.")
        seen.add(place)
        if place in read:
            raise ValueError(f"{file} is an input and would be overwritten. Choose another output file or folder.")
        if os.path.lexists(file) and not _is_recorded(file):
            raise ValueError(
                f"{file} exists and was not written by this command, or was changed since. Choose another output file "
                "or folder."
            )
        if os.path.lexists(file) and not overwrite:
            raise ValueError(f"{file} exists, from an earlier run. Replace it with --overwrite, or choose another.")


def record_outputs(files: Iterable[Path]) -> None:
    """Notes the checksums of files that were just written, so that a later run may replace them on request."""
    for file in files:
        with (file.parent / RECORD).open("a", encoding="utf-8") as record:
            record.write(f"{sha256(file.read_bytes()).hexdigest()}  {file.name}\n")


def _is_recorded(file: Path) -> bool:
    record = file.parent / RECORD
    if file.is_symlink() or not file.is_file() or not record.is_file():
        return False
    return f"{sha256(file.read_bytes()).hexdigest()}  {file.name}" in record.read_text(encoding="utf-8").splitlines()
