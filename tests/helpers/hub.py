"""A mock of the Hub server that works with the real client, for tests without a network."""

import base64
import functools
import hashlib
import json
import re
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import yaml


# Name and token of the only user, who can write only to the repositories "user/...".
OWNER, TOKEN = "user", "hf_dummy"
LFS_SUFFIXES = {".bin", ".png", ".pt", ".pth", ".safetensors"}


@dataclass(frozen=True)
class Commit:
    """A commit on a branch of a repository: all files of the repository, and the paths that the commit changes."""

    repo: str
    revision: str
    summary: str
    written: list[str]
    files: dict[str, bytes]
    oid: str = field(default_factory=lambda: secrets.token_hex(20))


@dataclass(frozen=True)
class Answer:
    """Response of the mock server to the client."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A simulated failure: the first request for `action` whose body contains `content` fails with `status`."""

    action: str
    status: int | None  # HTTP status, or None to close the connection
    content: bytes = b""


class RefusedError(Exception):
    """Raised if the mock server refuses a request. Holds the response to the client."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(status)
        self.answer = Answer(status, headers={name.replace("_", "-"): value for name, value in headers.items()})


@dataclass
class Request:
    """The authorization and the body of a request."""

    token: str
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def check_writer(self, repo: str) -> None:
        if self.token != f"Bearer {TOKEN}":
            raise RefusedError(401, X_Error_Message="Invalid username or password.")
        if repo.split("/")[0] != OWNER:
            raise RefusedError(403, X_Error_Message=f"You don't have the rights to write to {repo}")


def is_lfs(path: str) -> bool:
    return PurePosixPath(path).suffix in LFS_SUFFIXES


def digest(path: str, content: bytes) -> str:
    """Returns the hash that identifies the content of a file: SHA-256 for LFS files, otherwise the git hash."""
    if is_lfs(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def as_json(content: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})


class Hub:
    """Mock Hub: repositories with commits in chronological order. Each method below `find` handles a request type."""

    def __init__(self, root: Path) -> None:
        """Creates a repository "user/name" from every folder `root/user/name`."""
        self.endpoint = ""
        self.private: set[str] = set()
        self.storage: dict[str, bytes] = {}
        self.uploads: list[str] = []  # Hashes of uploaded LFS files.
        self.tags: dict[tuple[str, str], str] = {}  # Maps pairs of repository and tag to commit hashes.
        self.failures: list[Failure] = []
        self.commits: list[Commit] = []
        for folder in sorted(path for path in root.glob("*/*") if path.is_dir()):
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
            self.commits.append(Commit(f"{folder.parent.name}/{folder.name}", "main", "as found", list(files), files))

    @property
    def client(self) -> dict[str, str]:
        """Environment variables for a client of this mock Hub, including the token of the user."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}

    def find(self, repo: str, revision: str = "main") -> Commit:
        """Returns the latest commit of a branch, or the commit of a tag or hash."""
        commits = [commit for commit in self.commits if commit.repo == repo]
        if not commits:
            raise RefusedError(404, X_Error_Code="RepoNotFound")
        revision = self.tags.get((repo, revision), revision)
        for commit in reversed(commits):
            if revision in (commit.revision, commit.oid):
                return commit
        raise RefusedError(404, X_Error_Code="RevisionNotFound")

    def info(self, request: Request, repo: str, revision: str | None) -> Answer:
        commit = self.find(repo, revision or "main")
        siblings = [{"rfilename": path} for path in commit.files]
        about = {"id": repo, "sha": commit.oid, "siblings": siblings, "private": repo in self.private, "tags": []}
        metadata = re.match(r"---\n(.*?)\n---", commit.files.get("README.md", b"").decode(), flags=re.DOTALL)
        card = yaml.safe_load(metadata[1]) if metadata else {}
        return as_json({**about, **{name: card[name] for name in ("library_name", "pipeline_tag") if name in card}})

    def tree(self, request: Request, repo: str, revision: str, folder: str | None, is_recursive: str | None) -> Answer:
        files, start = self.find(repo, revision).files, f"{folder}/" if folder else ""
        entries: dict[str, object] = {}
        for path, content in files.items():
            if not path.startswith(start):
                continue
            first, _, rest = path.removeprefix(start).partition("/")
            if rest and not is_recursive:
                entries[start + first] = {"type": "directory", "path": start + first, "oid": "0" * 40, "size": 0}
            else:
                oid, size = digest(path, content), len(content)
                lfs = {"lfs": {"oid": oid, "size": size, "pointerSize": 134}} if is_lfs(path) else {}
                entries[path] = {"type": "file", "path": path, "size": size, "oid": oid, **lfs}
        return as_json(list(entries.values()))

    def resolve(self, request: Request, repo: str, revision: str, path: str) -> Answer:
        commit = self.find(repo, revision)
        if path not in commit.files:
            raise RefusedError(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit.oid)
        content = commit.files[path]
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{digest(path, content)}"'}
        if is_lfs(path):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
        return Answer(200, content, headers)

    def create(self, request: Request) -> Answer:
        options = request.json()
        repo = f"{options.get('organization') or OWNER}/{options['name']}"
        request.check_writer(repo)
        exists = any(commit.repo == repo for commit in self.commits)
        if not exists:
            self.commits.append(Commit(repo, "main", "initial commit", [], {}))
            self.private |= {repo} if options.get("visibility") == "private" else set()
        return as_json({"url": f"{self.endpoint}/{repo}"}, 409 if exists else 200)

    def branch(self, request: Request, repo: str, name: str) -> Answer:
        request.check_writer(repo)
        if name.startswith("refs/"):
            raise RefusedError(400, X_Error_Message=f"Invalid name of a branch: {name}")
        if any((commit.repo, commit.revision) == (repo, name) for commit in self.commits):
            raise RefusedError(409)
        self.commits.append(replace(self.find(repo), revision=name))
        return as_json({})

    def tag(self, request: Request, repo: str, revision: str) -> Answer:
        request.check_writer(repo)
        name = repo, request.json()["tag"]
        if name in self.tags:
            raise RefusedError(409)
        self.tags[name] = self.find(repo, revision).oid
        return as_json({})

    def validate_yaml(self, request: Request) -> Answer:
        return as_json({"errors": [], "warnings": []})

    def preupload(self, request: Request, repo: str, revision: str) -> Answer:
        request.check_writer(repo)
        present = self.find(repo, revision).files
        answers = []
        for path in (file["path"] for file in request.json()["files"]):
            oid = digest(path, present[path]) if path in present else None
            mode = "lfs" if is_lfs(path) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return as_json({"files": answers})

    def lfs_batch(self, request: Request, repo: str) -> Answer:
        request.check_writer(repo)
        objects = request.json()["objects"]
        for item in objects:
            if item["oid"] not in self.storage:
                href = f"{self.endpoint}/lfs/{item['oid']}"
                item["actions"] = {"upload": {"href": href, "header": {}}, "verify": {"href": f"{href}/verify"}}
        return as_json({"objects": objects})

    def lfs_upload(self, request: Request, oid: str) -> Answer:
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise RefusedError(400)
        self.storage[oid] = request.body
        self.uploads.append(oid)
        return Answer(200)

    def lfs_verify(self, request: Request, oid: str) -> Answer:
        return Answer(200 if len(self.storage.get(oid, b"")) == request.json()["size"] else 404)

    def commit(self, request: Request, repo: str, revision: str, create_pr: str | None) -> Answer:
        request.check_writer(repo)
        lines = [json.loads(line) for line in request.body.splitlines()]
        read = {
            "file": lambda file: base64.b64decode(file["content"]),
            "lfsFile": lambda file: self.storage[file["oid"]],
        }
        written = {line["value"]["path"]: read[line["key"]](line["value"]) for line in lines[1:]}
        files = {**self.find(repo, revision).files, **written}
        target = "refs/pr/1" if create_pr else revision
        commit = Commit(repo, target, lines[0]["value"]["summary"], list(written), files)
        self.commits.append(commit)
        url = f"{self.endpoint}/{repo}"
        answer = {"commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}"}
        return as_json({**answer, "pullRequestUrl": f"{url}/discussions/1"} if create_pr else answer)


REPO, PART = "([^/?]+/[^/?]+)", "([^/?]+)"
ROUTES = {
    f"GET /api/(?:models|datasets)/{REPO}(?:/revision/{PART})?": Hub.info,
    f"GET /api/(?:models|datasets)/{REPO}/tree/{PART}(?:/([^?]+))?(\\?.*recursive=[Tt]rue.*)?": Hub.tree,
    f"GET /(?:datasets/)?{REPO}/resolve/{PART}/([^?]+)": Hub.resolve,
    "POST /api/repos/create": Hub.create,
    "POST /api/validate-yaml": Hub.validate_yaml,
    f"POST /api/models/{REPO}/branch/{PART}": Hub.branch,
    f"POST /api/models/{REPO}/tag/{PART}": Hub.tag,
    f"POST /api/models/{REPO}/preupload/{PART}": Hub.preupload,
    f"POST /api/models/{REPO}/commit/{PART}(\\?create_pr=1)?": Hub.commit,
    f"POST /{REPO}.git/info/lfs/objects/batch": Hub.lfs_batch,
    f"PUT /lfs/{PART}": Hub.lfs_upload,
    f"POST /lfs/{PART}/verify": Hub.lfs_verify,
}


class Handler(BaseHTTPRequestHandler):
    """HTTP handler that passes each request to the method of the mock Hub that handles its type."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.headers.get("Authorization", ""), body)
        try:
            answer = self.route(request)
        except RefusedError as error:
            answer = error.answer
        except ConnectionAbortedError:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def route(self, request: Request) -> Answer:
        line = f"{self.command.replace('HEAD', 'GET')} {self.path}"
        for pattern, action in ROUTES.items():
            if match := re.fullmatch(f"{pattern}(?:\\?.*)?", line):
                self.fail(action.__name__, request)
                return action(self.hub, request, *(group and unquote(group) for group in match.groups()))
        raise RefusedError(404)

    def fail(self, action: str, request: Request) -> None:
        """Raises the failure that a test has scheduled for this request, if any."""
        for failure in self.hub.failures:
            if failure.action == action and failure.content in request.body:
                self.hub.failures.remove(failure)
                raise ConnectionAbortedError if failure.status is None else RefusedError(failure.status)

    def log_message(self, format: str, *args: object) -> None:
        """Discards log messages to keep the test output clean."""


@functools.cache
def own_port() -> int:
    """Returns one port for all mock Hubs of this process, so that their clients have equal environment variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serve(root: Path) -> Iterator[Hub]:
    """Runs a mock Hub with a repository "user/name" for every folder `root/user/name`."""
    hub = Hub(root)
    methods = dict.fromkeys(("do_HEAD", "do_GET", "do_POST", "do_PUT"), Handler.answer)
    handler = type("BoundHandler", (Handler,), {"hub": hub, **methods})
    try:
        server = ThreadingHTTPServer(("127.0.0.1", own_port()), handler)
    except OSError:  # another mock Hub still uses the port
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
