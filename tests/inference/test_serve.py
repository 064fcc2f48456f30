"""Test `hf-vit serve`: answers, batches, limits, errors, cancellation and shutdown."""

import base64
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient

import hf_vit
from hf_vit.inference.serving import served_model
from hf_vit.inference.serving.app import Limits, build_app
from hf_vit.inference.serving.batching import BatchThread, QueueFullError
from hf_vit.inference.serving.served_model import ServedModel, find_image_error, open_models

from ..helpers.fresh import ROOT, offline
from ..helpers.image_text_models import build_model, build_processor
from ..helpers.images import noise, png
from ..helpers.models import save_model, small_config
from ..helpers.processes import Process
from ..helpers.references import draw_weights
from ..helpers.servers import run_server


CLASSES = {
    "classes": hf_vit.HfViTForImageClassification,
    "depths": hf_vit.HfViTForDepthEstimation,
    "objects": hf_vit.HfViTForObjectDetection,
    "encoder": hf_vit.HfViTModel,
}
PHOTOS = [png(Image.fromarray(noise(20 + 3 * number, 48 - 2 * number, 3, seed=number))) for number in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model of each class in `CLASSES`."""
    place = tmp_path_factory.mktemp("models")
    for name, model_class in CLASSES.items():
        model = model_class(small_config())
        draw_weights(model)
        if name != "encoder":
            model.config.calibration_config = {"model_class": model_class.__name__, "temperature": 2.0}
        save_model(model, place / name)
    return place


@pytest.fixture(scope="module")
def models(folder: Path) -> list[ServedModel]:
    return open_models([str(folder / name) for name in CLASSES], {"top_k": 3}, batch_size=4, max_queue=100)


@pytest.fixture
def client(models: list[ServedModel]) -> Iterator[TestClient]:
    app = build_app(fresh(models), Limits(max_bytes=200_000, max_pixels=10_000, timeout=20))
    with TestClient(app, raise_server_exceptions=False) as opened:
        yield opened


def fresh(models: Sequence[ServedModel], max_queue: int = 100) -> list[ServedModel]:
    """Return models with new threads, because a thread can be started only once."""
    return [ServedModel(one.name, one.source, one.predictor, one.embedder, 4, max_queue) for one in models]


def files(*photos: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("image", ("../../photo.png", photo)) for photo in photos]


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """Run an application on a port of this machine, and return its address."""
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
    with run_server(uvicorn.Server(config)) as address:
        yield address


class Gate:
    """Answer function that waits until it is opened, and records the inputs of each batch."""

    def __init__(self, model: ServedModel) -> None:
        self.opened, self.batches, self.plain = threading.Event(), list[int](), model.threads["predictions"].answer
        model.threads["predictions"].answer = self

    def __call__(self, images: list[Any]) -> Sequence[Any]:
        self.batches.append(len(images))
        assert self.opened.wait(20)
        return self.plain(images)


def wait_until(condition: Any) -> None:
    latest = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["classes", "depths", "objects"])
def test_answers_equal_those_of_predict_in_any_batch(
    name: str, folder: Path, client: TestClient, tmp_path: Path
) -> None:
    for number, photo in enumerate(PHOTOS):
        (tmp_path / f"{number}.png").write_bytes(photo)
    expected = [{**line} for line in hf_vit.predict(folder / name, tmp_path)]
    for line in expected:
        del line["file"]
    query = {"model": name}
    together = client.post("/v1/predict", files=files(*PHOTOS), data=query).json()
    with ThreadPoolExecutor(8) as clients:
        alone = list(clients.map(lambda photo: client.post("/v1/predict", files=files(photo), params=query), PHOTOS))
    assert together["model"] == name
    for found in (together["predictions"], [response.json()["predictions"][0] for response in alone]):
        for one, other in zip(flat(found), flat(expected), strict=True):
            assert one == (pytest.approx(other, abs=1e-3) if isinstance(other, float) else other)
    assert f'hf_vit_batch_size_bucket{{kind="predictions",le="2.0",model="{name}"}}' in client.get("/metrics").text


def flat(value: Any) -> Iterator[Any]:
    """Yield all keys and values that are nested in lists and dictionaries."""
    for part in value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from flat(part)
    if not isinstance(value, dict | list | tuple):
        yield value


def test_embeddings_equal_those_of_the_model(folder: Path, client: TestClient) -> None:
    for name, model_class in CLASSES.items():
        model = model_class.from_pretrained(folder / name).eval()
        inputs = hf_vit.HfViTImageProcessor.from_pretrained(folder / name)(noise(20, 48, 3), return_tensors="pt")
        with torch.no_grad():
            outputs = model.base_model(inputs.pixel_values)
        expected = outputs.pooler_output
        if expected is None:
            expected = outputs.last_hidden_state[:, model.config.num_prefix_tokens :].mean(dim=1)
        text = base64.b64encode(PHOTOS[0]).decode()
        inputs = [text, f"data:image/png;base64,{text}"]
        multipart = client.post("/v1/embeddings", files=files(PHOTOS[0]), data={"model": name}).json()
        plain = client.post("/v1/embeddings", json={"input": inputs, "model": name}).json()
        options = {"input": text, "model": name, "encoding_format": "base64"}
        binary = client.post("/v1/embeddings", json=options).json()
        found = [part["embedding"] for part in [*multipart["data"], *plain["data"]]]
        found.append(np.frombuffer(base64.b64decode(binary["data"][0]["embedding"]), "<f4").tolist())
        assert [part["index"] for part in plain["data"]] == [0, 1]
        torch.testing.assert_close(torch.tensor(found), expected.expand(4, -1), rtol=0, atol=1e-4)


def test_an_image_text_model_has_projected_embeddings_and_with_labels_predictions(tmp_path: Path) -> None:
    processor = build_processor(("red", "green"))
    model = build_model(processor).eval()
    for part in (model, processor):
        part.save_pretrained(tmp_path / "pairs")
    (without,) = open_models([str(tmp_path / "pairs")], {})
    assert list(without.threads) == ["embeddings"]
    served = open_models([str(tmp_path / "pairs")], {"candidate_labels": ["red", "green"]})
    with TestClient(build_app(served)) as client:
        (prediction,) = client.post("/v1/predict", files=files(PHOTOS[0])).json()["predictions"]
        (embedding,) = client.post("/v1/embeddings", files=files(PHOTOS[0])).json()["data"]
    assert {part["label"] for part in prediction["labels"]} == {"red", "green"}
    inputs = processor.image_processor(noise(20, 48, 3), return_tensors="pt")
    with torch.no_grad():
        expected = model.get_image_features(**inputs).pooler_output[0]
    torch.testing.assert_close(torch.tensor(embedding["embedding"]), expected, rtol=0, atol=1e-4)


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG file with the header of a large image."""
    parts = (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(bytes(99_999)))
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


MULTI = "multipart/form-data; boundary=x"
REFUSED = {
    "no image": (b"no image", "is not an image"),
    "empty": (b"", "is not an image"),
    "another format": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
    "truncated": (PHOTOS[0][:200], "cannot be decoded"),
    "many pixels": (png(Image.fromarray(noise(101, 100, 3))), "100 x 101 pixels, but at most 10000"),
    "a bomb": (bomb(60_000, 60_000), "more than 10000 pixels"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_images_are_rejected(data: bytes, message: str, client: TestClient) -> None:
    for route in ("/v1/predict", "/v1/embeddings"):
        response = client.post(route, files=files(data))
        assert (response.status_code, list(response.json())) == (422, ["error"])
        assert message in response.json()["error"]
    several = client.post("/v1/predict", files=files(PHOTOS[0], data, PHOTOS[1]))
    assert several.status_code == 200
    first, refused, last = several.json()["predictions"]
    assert list(refused) == ["error"]
    assert first["top_k"]
    assert last["top_k"]


def test_bombs_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_model.PIL.Image.Image, "load", lambda self: pytest.fail("decoded"))
    assert "pixels" in str(find_image_error(bomb(5000, 5000), 1_000_000))


def test_invalid_requests_return_an_error_message(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(PHOTOS[0])
    requests: list[tuple[int, str, dict[str, Any]]] = [
        (404, "/v1/predict", {"files": files(PHOTOS[0]), "data": {"model": "none"}}),
        (404, "/v1/embeddings", {"json": {"input": [], "model": ["classes"]}}),
        (400, "/v1/predict", {"files": files(PHOTOS[0]), "data": {"model": "encoder"}}),
        (422, "/v1/predict", {}),
        (422, "/v1/predict", {"data": {"image": str(tmp_path / "photo.png")}}),
        (422, "/v1/predict", {"files": files(*[b"0"] * 101)}),
        (413, "/v1/predict", {"files": files(b"0" * 300_000)}),
        (413, "/v1/predict", {"content": iter([b"0" * 150_000, b"0" * 150_000]), "headers": {"content-type": MULTI}}),
        (422, "/v1/embeddings", {}),
        (422, "/v1/embeddings", {"json": {"input": str(tmp_path / "photo.png")}}),
        (422, "/v1/embeddings", {"json": {"input": ["http://127.0.0.1/photo.png"]}}),
        (422, "/v1/embeddings", {"json": {"input": 7}}),
        (422, "/v1/embeddings", {"content": "{", "headers": {"content-type": "application/json"}}),
        (405, "/health", {}),
        (404, "/nowhere", {}),
    ]
    for status, route, options in requests:
        response = client.post(route, **options)
        assert (response.status_code, list(response.json())) == (status, ["error"]), (route, options, response.text)
        assert str(tmp_path) not in response.json()["error"]
    assert client.get("/health").json()["models"]["depths"] == "depth-estimation"
    assert "/v1/predict" in client.get("/openapi.json").json()["paths"]
    assert client.get("/docs").status_code == 200


def test_a_failure_of_the_model_is_reported_without_its_text(models: list[ServedModel]) -> None:
    served = fresh(models)

    def fail(images: list[Any]) -> Sequence[Any]:
        raise RuntimeError("secret")

    served[0].threads["predictions"].answer = fail
    with TestClient(build_app(served), raise_server_exceptions=False) as client:
        response = client.post("/v1/predict", files=files(PHOTOS[0]))
        assert (response.status_code, response.json()) == (500, {"error": "The server failed. See its log."})
        assert client.post("/v1/embeddings", files=files(PHOTOS[0])).status_code == 200


def test_an_error_affects_only_its_own_input() -> None:
    with BatchThread(lambda items: [1 / item for item in items], batch_size=4) as thread:
        futures = thread.submit([1, 0, 2])
        assert [futures[0].result(), futures[2].result()] == [1, 0.5]
        assert isinstance(futures[1].exception(), ZeroDivisionError)
    assert thread.num_pending == 0


def test_a_full_queue_refuses_and_cancelled_inputs_are_not_computed(models: list[ServedModel]) -> None:
    served = fresh(models[:1], max_queue=3)
    gate = Gate(served[0])
    with TestClient(build_app(served, Limits(timeout=0.5))) as client:
        thread = served[0].threads["predictions"]
        (started,) = thread.submit([PHOTOS[0]])
        wait_until(lambda: gate.batches == [1])
        waiting = thread.submit([PHOTOS[1], PHOTOS[2]])
        with pytest.raises(QueueFullError):
            thread.submit([PHOTOS[3]])
        full = client.post("/v1/predict", files=files(PHOTOS[0]))
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert waiting[0].cancel()
        late = client.post("/v1/predict", files=files(PHOTOS[0]))
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        gate.opened.set()
        assert started.result()[0]["label"]
        assert waiting[1].result()[0]["label"]
        assert gate.batches == [1, 1]
        assert client.post("/v1/predict", files=files(PHOTOS[0])).status_code == 200


def test_a_disconnect_cancels_and_slow_clients_are_refused(models: list[ServedModel]) -> None:
    served = fresh(models[:1])
    gate = Gate(served[0])
    thread = served[0].threads["predictions"]
    with running(build_app(served, Limits(timeout=1.5))) as address, ThreadPoolExecutor(1) as clients:
        first = clients.submit(httpx.post, f"{address}/v1/predict", files=files(PHOTOS[0]))
        wait_until(lambda: gate.batches == [1])
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/predict", files=files(*PHOTOS[:3]), timeout=httpx.Timeout(5, read=0.2))
        wait_until(lambda: thread.num_pending == 1)
        gate.opened.set()
        assert first.result().status_code == 200
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            head = f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\nContent-Type: {MULTI}\r\n\r\n--x"
            slow.sendall(head.encode())
            assert b" 408 " in slow.recv(1000)
        assert gate.batches == [1]


def test_the_token_is_required(models: list[ServedModel]) -> None:
    with TestClient(build_app(fresh(models), token="key")) as client:
        for headers in ({}, {"Authorization": "Bearer kex"}, {"Authorization": "key"}, {"Authorization": "Basic ="}):
            response = client.post("/v1/embeddings", files=files(PHOTOS[0]), headers=headers)
            assert response.status_code == 401
            assert "Bearer" in response.json()["error"]
            assert client.get("/", headers=headers).status_code == 401
        for given in ({"headers": {"Authorization": "Bearer key"}}, {"auth": ("anyone", "key")}):
            assert client.post("/v1/predict", files=files(PHOTOS[0]), **given).status_code == 200
        assert {client.get(route).status_code for route in ("/health", "/metrics", "/docs")} == {200}


def test_a_terminated_server_finishes_running_requests(folder: Path, tmp_path: Path) -> None:
    (said := tmp_path / "stdout").touch()
    words = ["serve", str(folder / "classes"), "--port", "0", "--batch_size", "1"]
    environment = offline({"PYTHONPATH": str(ROOT)})
    process = Process(
        "-m", "hf_vit", *words, workdir=tmp_path, environment=environment, stdout=said, stderr=tmp_path / "stderr"
    )
    try:
        wait_until(lambda: "http://" in said.read_text() or process.poll() is not None)
        address = said.read_text().split()[-1]
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(httpx.post, f"{address}/v1/predict", files=files(*PHOTOS * 25), timeout=60)
            metrics = f"{address}/metrics"
            wait_until(lambda: 'queue_length{kind="predictions",model="classes"} 0.0' not in httpx.get(metrics).text)
            process.terminate()
            assert len(answer.result().json()["predictions"]) == 200
        assert process.wait(30) == 143, (tmp_path / "stderr").read_text()
    finally:
        process.terminate()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")


def test_duplicate_and_unknown_models_raise_an_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Several models are named classes"):
        open_models([str(folder / "classes")] * 2, {})
    with pytest.raises(OSError, match="none"):
        open_models([str(tmp_path / "none")], {})
