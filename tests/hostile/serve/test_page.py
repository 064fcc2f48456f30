"""Test that the page of `hf-vit serve` opens no file except the photos of its own session."""

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gradio.routes
import httpx
import pytest
from PIL import Image

from hf_vit.inference.serving.app import Limits
from hf_vit.inference.serving.photos import PhotoStore
from hf_vit.inference.serving.served_model import open_models

from ...helpers.images import noise, png
from ...helpers.servers import ServedPage, serve_page


PHOTO = png(Image.fromarray(noise(20, 48, 3)))
PRIVATE = png(Image.fromarray(noise(24, 40, 3, seed=1)))
# Routes that the page uses; gradio has many more.
USED = {"/gradio_api/queue/join", "/gradio_api/file={path_or_url:path}", "/gradio_api/upload"}
USED |= {"/gradio_api/queue/data", "/gradio_api/app_id", "/", "/config", "/theme.css", "/favicon.ico"}
USED |= {"/assets/{path:path}", "/static/{path:path}", "/openapi.json"}


class Visitor(NamedTuple):
    """A browser session of the page."""

    client: httpx.Client
    store: PhotoStore

    def upload(self, content: bytes = PHOTO) -> str:
        """Upload a photo and return its path."""
        response = self.client.post("/gradio_api/upload", files={"files": ("../../photo.png", content)})
        assert response.status_code == 200, response.text
        (path,) = response.json()
        return path

    def join(self, photo: Any, **options: Any) -> httpx.Response:
        """Start the job that classifies a photo."""
        job = {"data": [photo], "fn_index": 0, "session_hash": "abc", **options}
        return self.client.post("/gradio_api/queue/join", json=job)

    def answer(self) -> str:
        """Return the last message of the jobs that were started."""
        with self.client.stream("GET", "/gradio_api/queue/data", params={"session_hash": "abc"}) as stream:
            messages = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
        (completed,) = (message for message in messages if message["msg"] == "process_completed")
        return json.dumps(completed["output"])


def file_data(path: str) -> dict[str, Any]:
    """Return a file as the page sends it."""
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[ServedPage]:
    with serve_page(open_models([str(folder)], {}), Limits(timeout=10)) as opened:
        yield opened


@pytest.fixture
def visitor(served: ServedPage) -> Iterator[Visitor]:
    with httpx.Client(base_url=served.address, timeout=5) as client:
        yield Visitor(client, served.store)


def private(visitor: Visitor, folder: Path) -> str:
    (file := folder / "private.png").write_bytes(PRIVATE)
    return str(file)


def relative(visitor: Visitor, folder: Path) -> str:
    return os.path.relpath(private(visitor, folder), visitor.store.folder)


def in_the_store(visitor: Visitor, folder: Path) -> str:
    (file := visitor.store.folder / "private.png").write_bytes(PRIVATE)
    return str(file)


def fifo(visitor: Visitor, folder: Path) -> str:
    os.mkfifo(folder / "fifo")
    return str(folder / "fifo")


def fifo_in_the_store(visitor: Visitor, folder: Path) -> str:
    os.mkfifo(visitor.store.folder / "fifo")
    return str(visitor.store.folder / "fifo")


def link_in_the_store(visitor: Visitor, folder: Path) -> str:
    (file := visitor.store.folder / "link").symlink_to(private(visitor, folder))
    return str(file)


def replaced(make: Callable[[Visitor, Path, Path], Any]) -> Callable[[Visitor, Path], str]:
    """Return a function that uploads a photo and replaces its file."""

    def replace(visitor: Visitor, folder: Path) -> str:
        path = visitor.upload()
        Path(path).unlink()
        make(visitor, folder, Path(path))
        return path

    return replace


def of_another_session(visitor: Visitor, folder: Path) -> str:
    with httpx.Client(base_url=visitor.client.base_url, timeout=5) as other:
        path = visitor._replace(client=other).upload(PRIVATE)
    visitor.upload()  # The visitor has a session too.
    return path


FILES: dict[str, Callable[[Visitor, Path], str]] = {
    "a path": private,
    "a relative path": relative,
    "a file in the folder": in_the_store,
    "a FIFO": fifo,
    "a FIFO in the folder": fifo_in_the_store,
    "a link in the folder": link_in_the_store,
    "a device": lambda visitor, folder: "/dev/zero",
    "a URL": lambda visitor, folder: f"{visitor.client.base_url}/static/img/logo.svg",
    "a file URL": lambda visitor, folder: f"file://{private(visitor, folder)}",
    "an upload of another session": of_another_session,
    "an upload replaced by a FIFO": replaced(lambda visitor, folder, path: os.mkfifo(path)),
    "an upload replaced by a link": replaced(
        lambda visitor, folder, path: path.symlink_to(private(visitor, folder)),
    ),
}


@pytest.fixture(params=FILES.values(), ids=FILES)
def attacked(request: pytest.FixtureRequest, visitor: Visitor, tmp_path: Path) -> Iterator[str]:
    """Return a path that is not a photo of the session of `visitor`."""
    path = request.param(visitor, tmp_path)
    before = sorted(visitor.store.folder.rglob("*"))
    yield path
    assert sorted(visitor.store.folder.rglob("*")) == before  # No file was copied to the folder.
    for file in before:
        if file.is_symlink() or not file.is_dir():
            file.unlink()


def assert_refused(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text
    assert list(response.json()) == ["error"]
    assert PRIVATE not in response.content


def test_only_photos_of_the_session_are_opened(visitor: Visitor, attacked: str) -> None:
    photo = file_data(attacked)
    jobs = [
        *(photo, {"path": attacked}, attacked, [photo], {"nested": photo}, {"path": "", "nested": photo}),
        *({**photo, "is_stream": True}, {**photo, "url": attacked}, {**photo, "mime_type": "image/svg+xml"}),
        *({**file_data(""), "url": attacked}, {**photo, "meta": {}}),
    ]
    for job in jobs:
        assert_refused(visitor.join(job))
        assert_refused(visitor.join(None, data=[None, job]))
        assert_refused(visitor.join(None, data={"photo": job}))
    assert_refused(visitor.join(photo, fn_index=1, event_data={"index": [1, 1], "value": None}))
    for route in ("run/answer", "api/answer", "call/answer", "call/v2/answer", "run/attend", "call/attend"):
        for end in ("", "/"):
            data = {"data": [photo], "photo": photo, "session_hash": "abc", "fn_index": 0}
            assert_refused(visitor.client.post(f"/gradio_api/{route}{end}", json=data))
    for route in ("file=", "file/", "proxy=", "stream/", "custom_component/"):
        for method in ("GET", "HEAD"):
            response = visitor.client.request(method, f"/gradio_api/{route}{attacked}")
            assert 400 <= response.status_code < 500
            assert PRIVATE not in response.content


def test_a_path_is_not_an_upload(visitor: Visitor, tmp_path: Path) -> None:
    before = sorted(visitor.store.folder.iterdir())
    response = visitor.client.post("/gradio_api/upload", data={"files": private(visitor, tmp_path)})
    assert response.json() == []
    assert sorted(visitor.store.folder.iterdir()) == before


def test_a_photo_of_the_session_is_answered(visitor: Visitor) -> None:
    path = visitor.upload()
    assert visitor.join(file_data(path)).status_code == 200
    assert "LABEL_" in visitor.answer()
    assert visitor.client.get(f"/gradio_api/file={path}").content == PHOTO
    assert visitor.join(None).status_code == 200
    assert "No photo yet" in visitor.answer()


def test_pictures_belong_to_the_session_and_are_not_photos(visitor: Visitor) -> None:
    path = visitor.upload()
    assert visitor.join(file_data(path), fn_index=1, event_data={"index": [5, 5], "value": None}).status_code == 200
    (picture,) = set(re.findall(r'"path": "([^"]+\.jpg)"', visitor.answer()))
    assert visitor.client.get(f"/gradio_api/file={picture}").content.startswith(b"\xff\xd8")
    assert httpx.get(f"{visitor.client.base_url}/gradio_api/file={picture}").status_code == 403
    assert_refused(visitor.join(file_data(picture)))


def test_a_photo_that_is_replaced_while_its_job_waits_is_not_opened(
    visitor: Visitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = visitor.upload()
    session_of = visitor.store.session_of

    def replace_after_check(given: str) -> str | None:
        session = session_of(given)
        Path(path).unlink(missing_ok=True)
        Path(path).symlink_to(private(visitor, tmp_path))
        return session

    monkeypatch.setattr(visitor.store, "session_of", replace_after_check)
    assert visitor.join(file_data(path)).status_code == 200
    answer = visitor.answer()
    assert "LABEL_" not in answer
    assert "no longer stored" in answer


def test_other_routes_of_gradio_are_closed(visitor: Visitor) -> None:
    code = inspect.getsource(gradio.routes)
    found = re.findall(r'@(app|router)\.(get|post|head)\(\s*"([^"]+)"', code)
    routes = {(method, "/gradio_api" * (owner == "router") + path) for owner, method, path in found}
    assert len(routes) > 60
    assert {path for _, path in routes} >= USED - {"/openapi.json"}
    for method, route in sorted(route for route in routes if route[1] not in USED):
        path = re.sub(r"{\w+(:path)?}", "abc", route)
        response = visitor.client.request(method, path, json={} if method == "post" else None)
        assert response.status_code == 404, (method, path, response.text)
        assert method == "head" or list(response.json()) == ["error"], (method, path)


@pytest.mark.parametrize("path", ["/assets/../../../../../../etc/hostname", "/static/..%2f..%2f..%2fapp.py"])
def test_folders_of_gradio_cannot_be_left(visitor: Visitor, path: str) -> None:
    assert 400 <= visitor.client.get(path).status_code < 500


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"null", b"[" * 9000, b'{"data": {}}', b'{"data": []}', b'{"data": [null], "data": ["/etc/hosts"]}'],
)
def test_malformed_jobs_are_refused(visitor: Visitor, content: bytes) -> None:
    for kind in ("application/json", "text/plain", "multipart/form-data; boundary=x"):
        response = visitor.client.post("/gradio_api/queue/join", content=content, headers={"Content-Type": kind})
        assert 400 <= response.status_code < 500, response.text


INVALID: list[dict[str, Any]] = [{"fn_index": 99}, {"fn_index": "first"}, {"fn_index": None}, {"session_hash": None}]


@pytest.mark.parametrize("options", INVALID, ids=str)
def test_invalid_jobs_have_the_error_format(visitor: Visitor, options: dict[str, Any]) -> None:
    response = visitor.join(None, **options)
    assert response.status_code >= 400
    assert list(response.json()) == ["error"]
