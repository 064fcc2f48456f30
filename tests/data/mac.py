"""Helper function that writes the metadata files that macOS adds to archives."""

from pathlib import Path

from ..helpers.datasets import write_pictures


def apple_double(file: Path) -> None:
    (file.parent / f"._{file.name}").write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X")


def pack_on_a_mac(folder: Path) -> None:
    """Write the metadata files that macOS creates for a folder and for each file in it."""
    for file in [file for file in folder.rglob("*") if file.is_file()]:
        apple_double(file)
    apple_double(folder / "__MACOSX")
    write_pictures(folder, "__MACOSX/data/0.png")
