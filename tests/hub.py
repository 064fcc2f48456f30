"""A stand-in for the Hub that serves local folders to the real client, for tests without a network."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


COMMIT = "0" * 39 + "1"


def git_hash(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def describe(path: Path, repository: Path) -> dict[str, object]:
    """What the Hub says of a file or folder in a repository."""
    name = path.relative_to(repository).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": COMMIT, "size": 0}
    return {"type": "file", "path": name, "oid": git_hash(path), "size": path.stat().st_size}


class HubHandler(BaseHTTPRequestHandler):
    """Answers what `from_pretrained` and `load_dataset` ask: a repository's commit and files, and these themselves."""

    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test output clean."""

    def answer(self, *, with_body: bool) -> None:
        parts = unquote(self.path.split("?")[0]).strip("/").removeprefix("datasets/").split("/")
        if parts[0] == "api":
            folder, (action, revision, *path) = self.root.joinpath(*parts[2:4]), (parts[4:] or ["revision", "main"])
        else:
            folder, (action, revision, *path) = self.root.joinpath(*parts[:2]), parts[2:]
        place = folder.joinpath(*path)
        if not folder.is_dir():
            self.send_missing("RepoNotFound", with_body)
        elif revision not in ("main", COMMIT):
            self.send_missing("RevisionNotFound", with_body)
        elif action == "tree" and place.is_dir():
            self.send_json([describe(entry, folder) for entry in sorted(place.iterdir())], with_body)
        elif action == "revision":
            siblings = [{"rfilename": entry.name} for entry in sorted(folder.iterdir())]
            info = {
                "id": "/".join(folder.parts[-2:]),
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
            }
            self.send_json(info, with_body)
        elif action == "resolve" and place.is_file():
            headers = {"ETag": f'"{git_hash(place)}"', "X-Repo-Commit": COMMIT}
            self.send(200, place.read_bytes(), headers, with_body)
        else:
            self.send_missing("EntryNotFound", with_body)

    def send_missing(self, code: str, with_body: bool) -> None:
        self.send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, with_body)

    def send_json(self, content: object, with_body: bool) -> None:
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, with_body)

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
