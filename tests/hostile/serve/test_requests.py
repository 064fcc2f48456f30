"""Test that `hf-vit serve` refuses requests of other sites, other host names, invalid tokens and malformed JSON."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from hf_vit.inference.serving import find_hosts
from hf_vit.inference.serving.app import Limits
from hf_vit.inference.serving.served_model import ServedModel, open_models

from ...helpers.images import noise, png
from ...helpers.servers import serve_page
from ..table import Row, assert_refused, parametrize, rows, script


PHOTO = png(Image.fromarray(noise(20, 48, 3)))
IMAGE = {"files": {"image": ("photo.png", PHOTO)}}
SENT: dict[str, dict[str, Any]] = {
    "/v1/predict": IMAGE,
    "/v1/embeddings": {"json": {"input": base64.b64encode(PHOTO).decode()}},
    "/gradio_api/upload": {"files": {"files": ("photo.png", PHOTO)}},
    "/gradio_api/queue/join": {"json": {"data": [None], "fn_index": 0, "session_hash": "abc"}},
}
READ = ("/", "/config", "/health", "/metrics", "/docs", "/gradio_api/app_id")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    """Return a client of a server with the default address."""
    hosts = find_hosts("127.0.0.1", (), None)
    with (
        serve_page(open_models([str(folder)], {}), Limits(timeout=10, hosts=hosts)) as served,
        httpx.Client(base_url=served.address, timeout=10) as opened,
    ):
        yield opened


def statuses(client: httpx.Client, headers: dict[str, str]) -> set[int]:
    """Return the status codes of all routes."""
    sent = [client.post(route, headers=headers, **options) for route, options in SENT.items()]
    read = [client.get(route, headers=headers) for route in READ]
    for response in (*sent, *read):
        assert response.status_code == 200 or "access-control-allow-origin" not in response.headers
    return {response.status_code for response in (*sent, *read)}


def test_only_names_of_the_local_machine_are_answered(client: httpx.Client) -> None:
    port = client.base_url.port
    for host in ("localhost", "127.0.0.1", f"localhost:{port}", "LOCALHOST"):
        assert statuses(client, {"Host": host}) == {200}, host
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example", ""):
        assert statuses(client, {"Host": host}) == {400}, host
        own = {"Host": host, "Origin": f"http://{host}"}
        assert statuses(client, own) == {400}, host


def test_requests_of_other_sites_are_refused(client: httpx.Client) -> None:
    host, port = client.base_url.host, client.base_url.port
    for origin in (f"http://{host}:{port}", f"https://{host}:{port}"):
        assert statuses(client, {"Origin": origin}) == {200}, origin
    foreign = ("http://evil.example", f"http://evil.example:{port}", f"http://{host}:{port + 1}", f"http://{host}")
    for origin in (*foreign, f"http://{host}:{port}.evil.example", "null", ""):
        assert statuses(client, {"Origin": origin}) == {403}, origin
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        for route in (*SENT, *READ):
            response = client.options(route, headers=preflight)
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("host", "allowed", "token", "names"),
    [
        ("127.0.0.1", (), None, {"127.0.0.1", "localhost"}),
        ("localhost", (), "key", {"127.0.0.1", "localhost"}),
        ("127.0.0.2", (), None, {"127.0.0.1", "127.0.0.2", "localhost"}),
        ("127.0.0.1", ["vit.example.com"], None, {"127.0.0.1", "localhost", "vit.example.com"}),
        ("0.0.0.0", ["*.example.com"], "key", {"127.0.0.1", "localhost", "0.0.0.0", "*.example.com"}),
        ("0.0.0.0", (), "key", {"*"}),
    ],
)
def test_host_names_follow_address_option_and_token(
    host: str, allowed: list[str], token: str | None, names: set[str]
) -> None:
    assert set(find_hosts(host, allowed, token)) == names


def test_allowed_names_are_answered(models: list[ServedModel]) -> None:
    hosts = find_hosts("0.0.0.0", ["*.example.com"], None)
    with (
        serve_page(models, Limits(timeout=10, hosts=hosts)) as (address, *_),
        httpx.Client(base_url=address) as client,
    ):
        assert statuses(client, {"Host": "vit.example.com", "Origin": "https://vit.example.com"}) == {200}
        assert statuses(client, {"Host": "example.org"}) == {400}


def served(*words: str) -> Any:
    """Return a function that returns the words of a command with a model that does not exist."""
    return lambda folder: ["serve", str(folder / "model"), *words]


ARGUMENTS = [
    ("an empty token", served("--token", ""), "token is empty | $TOKEN"),
    ("a token with umlauts", served("--token", "schlüssel"), "token | non-ASCII"),
    ("a token with a space", served("--token", "a b"), "token | space"),
    ("a token with a line break", served("--token", "key\r"), "token | space"),
    ("all addresses", served("--host", "0.0.0.0"), "host='0.0.0.0' | --token | --allowed_hosts"),
    ("another address", served("--host", "192.168.0.1"), "host='192.168.0.1' | --token | --allowed_hosts"),
    ("a host name with a scheme", served("--allowed_hosts", "http://a.example"), "'http://a.example' | scheme"),
    ("a host name with a port", served("--allowed_hosts", "a.example:80"), "'a.example:80' | port"),
    ("an invalid wildcard", served("--allowed_hosts", "a.*.example"), "'a.*.example' is not a host name"),
    ("an empty host name", served("--allowed_hosts", ""), "'' is not a host name"),
]


@parametrize(rows(lambda words: script(words[0])(words[1:]), SystemExit, ARGUMENTS))
def test_arguments_are_refused_before_a_model_is_opened(row: Row, tmp_path: Path) -> None:
    assert_refused(row, tmp_path)


@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        ('{"input": ' + "[" * 200_000 + "]" * 200_000 + "}", 400, "nested"),
        ('{"input": "", "model": ' + '{"a":' * 200_000 + "0" + "}" * 200_000 + "}", 400, "nested"),
        ('{"input": "IMAGE", "dimensions": 8}', 422, "dimensions=8"),
        ('{"input": "IMAGE", "dimensions": 0}', 422, "dimensions=0"),
        ('{"input": "IMAGE", "encoding_format": "int8"}', 422, "encoding_format='int8'"),
        ('{"input": "IMAGE", "encoding_format": ["float"]}', 422, "encoding_format=['float']"),
        ('{"input": "IMAGE", "encoding_format": ""}', 422, "encoding_format=''"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_embedding_requests_are_refused(client: httpx.Client, content: str, status: int, word: str) -> None:
    text = content.replace("IMAGE", base64.b64encode(PHOTO).decode())
    response = client.post("/v1/embeddings", content=text, headers={"Content-Type": "application/json"})
    assert (response.status_code, list(response.json())) == (status, ["error"]), response.text
    assert word in response.json()["error"]


def test_embedding_options_are_refused_in_forms_too(client: httpx.Client) -> None:
    for option in ({"dimensions": "8"}, {"encoding_format": "int8"}):
        assert client.post("/v1/embeddings", data=option, **IMAGE).status_code == 422
        assert client.post("/v1/embeddings", params=option, **IMAGE).status_code == 422
    text = base64.b64encode(PHOTO).decode()
    for accepted in ({"encoding_format": "float", "dimensions": None}, {"encoding_format": None}, {"user": "me"}):
        assert client.post("/v1/embeddings", json={"input": text, **accepted}).status_code == 200


def test_unknown_routes_have_the_error_format(client: httpx.Client) -> None:
    for method, route in (
        *(("GET", "/v1/models"), ("POST", "/nowhere"), ("PUT", "/v1/predict"), ("DELETE", "/config")),
        *(("GET", "/gradio_api/nowhere"), ("POST", "/assets/x.js"), ("GET", "/v1/predict/")),
    ):
        response = client.request(method, route)
        assert response.status_code in (404, 405), (method, route)
        assert list(response.json()) == ["error"], (method, route)
