"""A stand-in for the Hub that serves local folders to the real client, for tests without a network."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


COMMIT = "0" * 39 + "1"


class HubHandler(BaseHTTPRequestHandler):
    """Answers what `from_pretrained` asks: the repository's commit, then HEAD and GET of its files."""

    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test output clean."""

    def answer(self, *, with_body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and (self.root / parts[2] / parts[3]).is_dir():
            folder = self.root / parts[2] / parts[3]
            siblings = [{"rfilename": path.name} for path in sorted(folder.iterdir())]
            info = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, with_body)
        elif (
            len(parts) > 4 and parts[2] == "resolve" and (file := self.root.joinpath(*parts[:2], *parts[4:])).is_file()
        ):
            content = file.read_bytes()
            etag = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            self.send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, with_body)
        else:
            missing = "EntryNotFound" if (self.root / "/".join(parts[:2])).is_dir() else "RepoNotFound"
            self.send(404, b"", {"X-Error-Code": missing, "X-Repo-Commit": COMMIT}, with_body)

    def send(self, status: int, content: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """Serves every folder `root/user/name` as repository "user/name"; yields the endpoint."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"root": root}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
