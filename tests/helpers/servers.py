"""Run uvicorn servers in a thread of the test process."""

import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn

from hf_vit.inference.serving.app import Limits, build_app
from hf_vit.inference.serving.page import PageServer, add_page
from hf_vit.inference.serving.photos import PhotoStore
from hf_vit.inference.serving.served_model import ServedModel


class ServedPage(NamedTuple):
    """A running server with the page."""

    address: str
    page: Any  # application of the page
    store: PhotoStore


@contextmanager
def serve_page(models: Sequence[ServedModel], limits: Limits, **options: Any) -> Iterator[ServedPage]:
    """Serve models with the page on a port of this machine; `options` are those of `build_app`."""
    app = build_app(models, limits, **options)
    page, store = add_page(models, limits, app)
    with run_server(PageServer(app, page, store, limits, "critical")) as address:
        yield ServedPage(address, page, store)


@contextmanager
def run_server(server: uvicorn.Server) -> Iterator[str]:
    """Run a server on a port of this machine, and return its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join()
