"""Test the limits of `hf-vit serve` for stored photos, waiting jobs, slow clients and folders of killed processes."""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from hf_vit.inference.serving import photos
from hf_vit.inference.serving.app import Limits
from hf_vit.inference.serving.photos import OVERHEAD, PhotoStore, name_folder, remove_abandoned_folders
from hf_vit.inference.serving.served_model import ServedModel, open_models

from ...helpers.images import noise, png
from ...helpers.servers import serve_page


PHOTO = png(Image.fromarray(noise(20, 48, 3)))


def size_of(folder: Path) -> int:
    """Return the total size of the files in a folder in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_uploads_have_a_total_size(models: list[ServedModel]) -> None:
    limits = Limits(max_bytes=100_000, timeout=10)
    with serve_page(models, limits) as (address, _, store), httpx.Client(base_url=address) as client:
        stored = size_of(store.folder)
        paths = []
        for number in range(30):
            content = PHOTO + bytes(90_000 + number)
            (path,) = client.post("/gradio_api/upload", files={"files": ("a.png", content)}).json()
            paths.append(path)
            assert size_of(store.folder) - stored <= 10 * limits.max_bytes
        assert client.get(f"/gradio_api/file={paths[0]}").status_code == 403  # The oldest photos are deleted.
        assert client.get(f"/gradio_api/file={paths[-1]}").status_code == 200


def test_the_number_of_small_files_is_limited(tmp_path: Path) -> None:
    store = PhotoStore(tmp_path, max_bytes=10 * OVERHEAD)
    paths = [store.add(b"0", "session") for _ in range(30)]
    assert [Path(path).exists() for path in paths] == [False] * 21 + [True] * 9
    assert [store.session_of(path) for path in paths] == [None] * 21 + ["session"] * 9


def test_old_photos_are_deleted_without_a_request(models: list[ServedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos, "LIFETIME", 0.1)
    with serve_page(models, Limits(timeout=10)) as (address, page, _):
        (path,) = httpx.post(f"{address}/gradio_api/upload", files={"files": ("a.png", PHOTO)}).json()
        page.get_blocks().upload_file_set.add(path)  # as gradio does for photos of jobs
        deadline = time.monotonic() + 20
        while Path(path).exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert not any(page.get_blocks().temp_file_sets)


def test_jobs_of_the_page_wait_in_a_queue_of_limited_length(models: list[ServedModel]) -> None:
    opened, plain = threading.Event(), models[0].threads["predictions"].answer

    def wait(images: list[Any]) -> Any:
        assert opened.wait(20)
        return plain(images)

    models[0].threads["predictions"].answer = wait
    with (
        serve_page(models, Limits(timeout=20, max_queue=5)) as (address, *_),
        httpx.Client(base_url=address) as client,
    ):
        (path,) = client.post("/gradio_api/upload", files={"files": ("a.png", PHOTO)}).json()
        photo = {"path": path, "meta": {"_type": "gradio.FileData"}}
        codes = []
        for number in range(40):
            job = {"data": [photo], "fn_index": 0, "session_hash": f"tab {number}"}
            codes.append(client.post("/gradio_api/queue/join", json=job).status_code)
        opened.set()
        assert codes.count(200) <= 5 + 4  # At most four jobs run at the same time.
        assert set(codes[10:]) == {503}


def test_large_jobs_are_refused(models: list[ServedModel]) -> None:
    with serve_page(models, Limits(timeout=10)) as (address, *_):
        job = {"data": [None], "fn_index": 0, "session_hash": "x" * 20_000}
        response = httpx.post(f"{address}/gradio_api/queue/join", json=job)
        assert (response.status_code, list(response.json())) == (413, ["error"])


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[tuple[str, int]]:
    """Return host and port of a server whose timeout is one second."""
    with serve_page(open_models([str(folder)], {}), Limits(timeout=1)) as served:
        host, port = served.address.removeprefix("http://").split(":")
        yield host, int(port)


REQUEST = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
START = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: "
LARGE = b"POST /v1/predict HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999\r\n\r\n"


@pytest.mark.parametrize("before", [b"", REQUEST, LARGE], ids=["first", "second", "after a refusal"])
@pytest.mark.parametrize("start", [b"", START], ids=["nothing", "half of the headers"])
def test_slow_headers_close_the_connection(address: tuple[str, int], before: bytes, start: bytes) -> None:
    with socket.create_connection(address, timeout=10) as client:
        if before:
            client.sendall(before)
            assert client.recv(10_000).startswith(b"HTTP/1.1 ")
        client.sendall(start)
        began, is_open = time.monotonic(), True
        client.settimeout(0.3)
        while is_open and time.monotonic() < began + 15:
            try:
                is_open = client.recv(10_000) != b""
            except TimeoutError:
                if start:
                    client.sendall(b"x")  # A slow client sends one letter after the other.
            except ConnectionError:
                is_open = False
        assert not is_open
        assert time.monotonic() > began + 0.9


def test_requests_that_take_longer_than_the_headers_may_are_answered(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=10) as client:
        for _ in range(3):
            client.sendall(REQUEST[:20])
            time.sleep(0.6)  # The requests together take longer than the timeout.
            client.sendall(REQUEST[20:])
            answer = b""
            while not answer.endswith(b"}"):
                answer += client.recv(10_000) or pytest.fail("The connection was closed.")
            assert answer.startswith(b"HTTP/1.1 200 ")


def test_photos_of_processes_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process, now = psutil.Process(), int(time.time())
    free = next(number for number in range(4_000_000, 1, -1) if not psutil.pid_exists(number))
    (outside := tmp_path / "outside").mkdir()
    (outside / "photo").touch()
    gone = [f"hf_vit_serve_{free}_{now}_abc", f"hf_vit_serve_{process.pid}_{int(process.create_time()) - 60}_abc"]
    kept = [f"{name_folder()}abc", f"hf_vit_serve_{os.getppid()}_{now}_abc"]
    kept += ["hf_vit_serve_abc", "hf_vit_serve_x_1_abc", "hf_vit_serve_-1_1_abc", "outside"]
    for name in (*gone, *kept):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "photo").touch()
    link = tmp_path / f"hf_vit_serve_{free}_{now}_link"
    link.symlink_to(outside)
    (tmp_path / f"hf_vit_serve_{free}_{now}_file").touch()
    remove_abandoned_folders()
    assert {file.parent.name for file in tmp_path.rglob("photo")} == set(kept)
