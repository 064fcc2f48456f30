"""Serve models over HTTP: an endpoint for programs, and a page for people."""

import ctypes
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

from ...extras import check_packages
from ...options.field import COUNT, POSITIVE, Range
from .photos import name_folder, remove_abandoned_folders


PACKAGES = ("fastapi", "uvicorn", "python_multipart", "gradio", "prometheus_client", "matplotlib", "scipy")
PORT = Range(0, 65535)
M_ARENA_MAX = -8  # parameter of mallopt in malloc.h
LOOPBACK_HOSTS = ("localhost", "127.0.0.1")


def serve_models(
    models: str | Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, PORT] = 8000,
    token: str | None = None,
    allowed_hosts: Sequence[str] | None = None,
    batch_size: Annotated[int, COUNT] = 16,
    max_queue: Annotated[int, COUNT] = 256,
    max_megabytes: Annotated[float, POSITIVE] = 20,
    max_pixels: Annotated[int, COUNT] = 50_000_000,
    timeout: Annotated[float, POSITIVE] = 30,
    top_k: Annotated[int, COUNT] = 3,
    labels: Sequence[str] | None = None,
    optimize: bool = False,
    trust_remote_code: bool = False,
    head: str | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Serve models until SIGTERM or SIGINT, and finish all running requests. Equivalent to `hf-vit serve`.

    Args:
        models: Folders of saved models, or names on the Hub. The first is the default of requests.
        host: Address to listen at; 0.0.0.0 accepts requests from other machines, with a token or allowed_hosts.
        port: Port to listen at; 0 selects a free port.
        token: Token that requests must send, as "Authorization: Bearer TOKEN". A browser asks for it as a password.
        allowed_hosts: Host names of this server in requests, such as vit.example.com or *.example.com. The names of
            the local machine and host are always accepted; with a token and without this option, all names.
        batch_size: Maximum number of images per batch. Requests that wait at the same time form one batch.
        max_queue: Maximum number of waiting images per model, and of waiting jobs of the page; further requests are
            answered with status 429, and those of the page with 503.
        max_megabytes: Maximum size of a request in megabytes. The page stores at most ten times this size.
        max_pixels: Maximum number of pixels of an image, which is checked before it is decoded.
        timeout: Time in seconds in which a request must arrive and, after that, be answered.
        top_k: Number of labels per image, most likely first.
        labels: Texts to choose from, for image-text models, such as cat "a red car".
        optimize: Whether to optimize models of hf_vit for this machine first, see `optimize_for_inference`.
        trust_remote_code: Whether to run Python code that comes with the models; hf_vit and transformers need none.
        head: Head of multi-task models; by default all heads.
        report: Function that receives progress messages.

    Raises:
        ImportError: if a package is missing.
        OSError: if a model does not exist, or the port is in use.
        ValueError: if a model is not supported, two models have the same name, or the token or a host is invalid.
    """
    models = [models] if isinstance(models, str) else models
    options: Any = {"optimize": optimize, "trust_remote_code": trust_remote_code, "head": head}
    hosts = find_hosts(host, allowed_hosts or (), token)
    check_packages("hf-vit serve", *PACKAGES, extra="serve")
    with prepare_process():
        from .app import Limits
        from .page import run_server
        from .served_model import open_models

        given = {"top_k": top_k, "candidate_labels": labels}
        opened = open_models(models, given, batch_size, max_queue, **options)
        limits = Limits(round(max_megabytes * 1e6), max_pixels, timeout, max_queue, hosts)
        run_server(opened, limits, token, host, port, report)


def find_hosts(host: str, allowed_hosts: Sequence[str], token: str | None) -> list[str]:
    """Return the host names that requests may have, without ports; "*" means all.

    Other names are refused, because a page of another site can send requests under its own name ("DNS rebinding").

    Raises:
        ValueError: if the token or a name is invalid, or other machines have access without a token and a name.
    """
    if token == "":
        raise ValueError('The token is empty. If you use --token "$TOKEN", set the variable TOKEN.')
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise ValueError("The token has a space or a non-ASCII character, which clients encode in different ways.")
    for name in allowed_hosts:
        if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+", name):
            raise ValueError(f"allowed_hosts={name!r} is not a host name. Omit the scheme and port: vit.example.com")
    is_local = host == "localhost" or re.fullmatch(r"127(\.\d+){3}", host)
    if not (is_local or allowed_hosts or token):
        raise ValueError(
            f"host={host!r} accepts requests from other machines. Protect the server with --token, or give the host "
            "names that clients use with --allowed_hosts."
        )
    return ["*"] if token and not (is_local or allowed_hosts) else [*LOOPBACK_HOSTS, host, *allowed_hosts]


@contextmanager
def prepare_process() -> Iterator[None]:
    """Context manager that turns off usage statistics, and removes the photos of the page also after SIGTERM.

    Photos of processes that were killed are removed too.

    All threads share two memory arenas of glibc. With an arena for each thread, the memory of the process grows.
    """
    with suppress(AttributeError, OSError, TypeError):  # other systems have no mallopt
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    # uvicorn raises the signal again after the shutdown.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    remove_abandoned_folders()
    with tempfile.TemporaryDirectory(prefix=name_folder()) as folder:
        os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}
        yield
