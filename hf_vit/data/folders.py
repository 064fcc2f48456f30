"""What lies in a folder."""

import os
from pathlib import Path


IMAGE_SUFFIXES = {
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"
}  # fmt: skip


def is_image(file: Path) -> bool:
    """Returns whether a visible file ends like an image that PIL reads."""
    return file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")


def subfolders(folder: Path) -> list[Path]:
    """Lists the visible folders in a folder, sorted."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def files_below(folder: Path) -> list[Path]:
    """Lists the visible files at any depth, sorted; unlike `Path.rglob`, also behind links to folders."""
    found = []
    for path, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(path, name) for name in names if not name.startswith(".")]
    return sorted(found)
