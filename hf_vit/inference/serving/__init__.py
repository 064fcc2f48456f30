"""Serve models over HTTP: an endpoint for programs, and a page for people."""

import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from ...extras import check_packages
from ...options.field import COUNT, POSITIVE, Range
from ...outputs import check_writable


PACKAGES = ("fastapi", "uvicorn", "python_multipart", "gradio", "prometheus_client", "matplotlib", "scipy")
PORT = Range(0, 65535)
M_ARENA_MAX = -8  # parameter of mallopt in malloc.h
MODEL_FILES = ("*.json", "*.safetensors", "*.py", "*.txt", "*.model", "*.jinja")  # files of a model in a Space
SPACE_README = """\
---
title: {title}
sdk: gradio
app_file: app.py
pinned: false
---

`hf-vit serve {models}`: the page at `/`, and the endpoints `/v1/predict` and `/v1/embeddings`.
"""
SPACE_APP = """\
from hf_vit.inference.serving import serve_models


serve_models({models!r}, host="0.0.0.0", port=7860{arguments})
"""


def serve_models(
    models: str | Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, PORT] = 8000,
    token: str | None = None,
    batch_size: Annotated[int, COUNT] = 16,
    max_queue: Annotated[int, COUNT] = 256,
    max_megabytes: Annotated[float, POSITIVE] = 20,
    max_pixels: Annotated[int, COUNT] = 50_000_000,
    timeout: Annotated[float, POSITIVE] = 30,
    top_k: Annotated[int, COUNT] = 3,
    labels: Sequence[str] | None = None,
    optimize: bool = False,
    trust_remote_code: bool = False,
    space: Path | None = None,
    head: str | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Serve models until SIGTERM or SIGINT, and finish all running requests. Equivalent to `hf-vit serve`.

    Args:
        models: Folders of saved models, or names on the Hub. The first is the default of requests.
        host: Address to listen at; 0.0.0.0 accepts requests from other machines.
        port: Port to listen at; 0 selects a free port.
        token: Token that requests must send, as "Authorization: Bearer TOKEN". A browser asks for it as a password.
        batch_size: Maximum number of images per batch. Requests that wait at the same time form one batch.
        max_queue: Maximum number of waiting images per model; further requests are answered with status 429.
        max_megabytes: Maximum size of a request in megabytes.
        max_pixels: Maximum number of pixels of an image, which is checked before it is decoded.
        timeout: Time in seconds in which a request must arrive and, after that, be answered.
        top_k: Number of labels per image, most likely first.
        labels: Texts to choose from, for image-text models, such as cat "a red car".
        optimize: Whether to optimize models of hf_vit for this machine first, see `optimize_for_inference`.
        trust_remote_code: Whether to run Python code that comes with the models; hf_vit and transformers need none.
        space: Write the folder of a Hugging Face Space that serves the models with top_k, labels, optimize,
            trust_remote_code and head, instead of serving them.
        head: Head of multi-task models; by default all heads.
        report: Function that receives progress messages.

    Raises:
        ImportError: if a package is missing.
        OSError: if a model does not exist, or the port is in use.
        ValueError: if a model is not supported, two models have the same name, or a Space is written with a token.
    """
    models = [models] if isinstance(models, str) else models
    options: Any = {"optimize": optimize, "trust_remote_code": trust_remote_code, "head": head}
    if space is not None:
        write_space(models, space, token=token, top_k=top_k, labels=labels, **options)
        report(f"Wrote the Space {space}. Upload it: hf upload --repo-type space USER/NAME {space}")
        return
    check_packages("hf-vit serve", *PACKAGES, extra="serve")
    with prepare_process():
        from .app import Limits
        from .page import run_server
        from .served_model import open_models

        given = {"top_k": top_k, "candidate_labels": labels}
        opened = open_models(models, given, batch_size, max_queue, **options)
        run_server(opened, Limits(round(max_megabytes * 1e6), max_pixels, timeout), token, host, port, report)


@contextmanager
def prepare_process() -> Iterator[None]:
    """Context manager that turns off usage statistics, and removes the photos of the page also after SIGTERM.

    All threads share two memory arenas of glibc. With an arena for each thread, the memory of the process grows.
    """
    with suppress(AttributeError, OSError, TypeError):  # other systems have no mallopt
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    # uvicorn raises the signal again after the shutdown.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="hf_vit_serve_") as folder:
        os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}
        yield


def write_space(models: Sequence[str], folder: Path, *, token: str | None = None, **options: Any) -> None:
    """Write the folder of a Hugging Face Space: `app.py`, `requirements.txt`, `README.md` and models that are folders.

    `app.py` calls `serve_models` with the given options.

    Raises:
        OSError: if the folder cannot be written.
        ValueError: if the folder exists and is not empty, two models have the same name, or a token is given.
    """
    if token is not None:
        raise ValueError("A Space cannot keep a token secret. Remove --token, and make the Space private.")
    check_writable(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"The folder {folder} is not empty. Choose a new folder for --space.")
    names = [f"models/{Path(model).resolve().name}" if Path(model).is_dir() else model for model in models]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"Several models are named {', '.join(sorted(repeated))}. Rename their folders.")
    folder.mkdir(parents=True, exist_ok=True)
    for model, name in zip(models, names, strict=True):
        for file in chain.from_iterable(map(Path(model).glob, MODEL_FILES)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / name)
    arguments = "".join(f", {name}={value!r}" for name, value in options.items() if value not in (None, False))
    texts = {
        "app.py": SPACE_APP.format(models=names, arguments=arguments),
        "requirements.txt": "hf-vit[serve]\n",
        "README.md": SPACE_README.format(title=Path(names[0]).name, models=" ".join(names)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
