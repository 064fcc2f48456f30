"""Photos and pictures of the page: files that only the browser session that stored them can use."""

import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil


FOLDER = "hf_vit_serve_{process}_{started}_"  # start of the names of folders; the start time is in seconds
LIFETIME = 600  # seconds after which a file is deleted
OVERHEAD = 4096  # bytes of disk space that a file needs in addition to its content
PICTURE = ".jpg"  # suffix of pictures that the page shows; photos have no suffix


def name_folder() -> str:
    """Return the start of the name of this process's folder, by which `remove_abandoned_folders` finds it."""
    return FOLDER.format(process=os.getpid(), started=int(time.time()))


def remove_abandoned_folders() -> None:
    """Remove the folders of processes that have ended without removing them."""
    for folder in Path(tempfile.gettempdir()).glob(FOLDER.format(process="*", started="*") + "*"):
        if not (found := re.match(FOLDER.format(process="([0-9]+)", started="([0-9]+)"), folder.name)):
            continue
        process, started = map(int, found.groups())
        try:
            # The id of an ended process can be reused, by a process that started later.
            is_running = psutil.Process(process).create_time() <= started + 1
        except psutil.Error as error:
            is_running = not isinstance(error, psutil.NoSuchProcess)
        if not is_running:
            shutil.rmtree(folder, ignore_errors=True)


class Photo(NamedTuple):
    """An encoded photo, and the session that uploaded it."""

    content: bytes
    session: str


class PhotoStore:
    """Photos that the page uploads, and pictures that it shows. Each file belongs to a session.

    Files are deleted after `LIFETIME` seconds. If they exceed `max_bytes` in total, the oldest are deleted earlier.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder.resolve(), max_bytes
        # For each path, oldest first: session, size in bytes, and time of the monotonic clock.
        self._files: dict[str, tuple[str, int, float]] = {}
        self._lock = threading.Lock()

    def add(self, content: bytes, session: str, suffix: str = "") -> str:
        """Store a file under a random name, and return its path."""
        file = self.folder / f"{secrets.token_hex(16)}{suffix}"
        file.write_bytes(content)
        with self._lock:
            self._files[str(file)] = (session, len(content) + OVERHEAD, time.monotonic())
        self.remove_old()
        return str(file)

    def remove_old(self) -> None:
        """Delete files older than `LIFETIME`, and the oldest files as long as the total size is too large."""
        with self._lock:
            total, oldest = sum(size for _, size, _ in self._files.values()), time.monotonic() - LIFETIME
            for path, (_, size, stored) in list(self._files.items()):
                if total <= self.max_bytes and stored > oldest:
                    break
                total -= size
                del self._files[path]
                Path(path).unlink(missing_ok=True)

    def session_of(self, path: str) -> str | None:
        """Return the session of a stored file.

        It is None for all other paths, and if the stored file was replaced by a link, FIFO or device.
        """
        stored, file = self._files.get(path), Path(path)
        return stored[0] if stored and file.resolve() == file and file.is_file() else None

    def read(self, path: str) -> Photo | None:
        """Return a stored photo, or None if it is not or no longer stored."""
        session = self.session_of(path)
        return None if session is None else Photo(Path(path).read_bytes(), session)
