"""Folders that are there as a whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_new_folder(path: str | os.PathLike[str]) -> None:
    """Raises `ValueError` if `path` exists and is no empty folder."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} exists and is not empty. Give a new folder.")


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a folder to write into, which becomes `path` at the end; after an error nothing of it is left.

    Raises:
        ValueError: if `path` exists and is no empty folder.
    """
    check_new_folder(path)
    folder = Path(path).resolve()
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    made = [parent for parent in unfinished.parents if not parent.exists()]
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        for parent in made:
            parent.rmdir()
        raise
