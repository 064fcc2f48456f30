"""Run uvicorn servers in a thread of the test process."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


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
