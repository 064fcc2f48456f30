"""HTTP application of served models: predictions, embeddings, health and metrics."""

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, File, Form, HTTPException, Query, Request, Response, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .batching import BatchThread, QueueFullError
from .served_model import ServedModel, find_image_error


ROUTES = ("/v1/predict", "/v1/embeddings", "/health", "/metrics", "/docs", "/openapi.json")
OPEN_ROUTES = ROUTES[2:]  # routes that need no token
RETRY_LATER = {"Retry-After": "1"}
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
IMAGE_FIELD = {"image": {"type": "array", "items": {"type": "string", "format": "binary"}}}
EMBEDDING_BODY = {
    "multipart/form-data": {"schema": {"type": "object", "properties": IMAGE_FIELD}},
    "application/json": {"example": {"input": ["data:image/png;base64,..."], "model": "name"}},
}


@dataclass(frozen=True)
class Limits:
    """Limits of a request."""

    max_bytes: int = 20_000_000  # of the body of a request
    max_pixels: int = 50_000_000  # of an image
    timeout: float = 30  # time in seconds in which a request must arrive and, after that, be answered
    max_queue: int = 256  # waiting jobs of the page
    hosts: Sequence[str] = ("*",)  # names of the server in requests; "*" accepts all names


class Metrics:
    """Prometheus metrics of an application."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"namespace": "hf_vit", "registry": self.registry}
        self.requests = Counter("requests", "Requests by route and status.", ["route", "status"], **options)
        self.latency = Histogram("latency_seconds", "Time from request to answer.", ["route"], **options)
        sizes = Histogram("batch_size", "Images per batch.", ["model", "kind"], buckets=BATCH_SIZES, **options)
        waiting = Gauge("queue_length", "Images that wait or are computed.", ["model", "kind"], **options)
        for model in models:
            for kind, thread in model.threads.items():
                thread.record_size = sizes.labels(model.name, kind).observe
                waiting.labels(model.name, kind).set_function(partial(getattr, thread, "num_pending"))

    def show(self) -> Response:
        """Return all metrics in the text format of Prometheus."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class Guard:
    """ASGI middleware that checks the origin, the token and the limits of requests, and records metrics."""

    def __init__(self, app: ASGIApp, limits: Limits, token: str | None, metrics: Metrics) -> None:
        self.app, self.limits, self.token, self.metrics = app, limits, token, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        app, start, headers, route, status = self.app, perf_counter(), Headers(scope=scope), scope["path"], 500
        host, origin = headers.get("host", ""), headers.get("origin")

        async def record(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            text = f"The request comes from a page of {origin}, but the host of this server is {host!r}."
            app = error_response(HTTPException(403, f"{text} A reverse proxy must forward the header Host."))
        elif route not in OPEN_ROUTES and not self.is_authorized(headers.get("authorization", "")):
            text, challenge = "Send the token of the server: Authorization: Bearer TOKEN.", 'Basic realm="token"'
            app = error_response(HTTPException(401, text, {"WWW-Authenticate": challenge}))
        elif int(headers.get("content-length", "0")) > self.limits.max_bytes:
            app = error_response(self.too_large())
        await app(scope, self.limited(receive), record)
        if route in ROUTES:
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.latency.labels(route).observe(perf_counter() - start)

    def is_authorized(self, header: str) -> bool:
        """Return whether a header has the token: "Bearer TOKEN", or as password of "Basic", which browsers send."""
        scheme, _, given = header.partition(" ")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given).decode(errors="replace").partition(":")[2]
            except ValueError:
                given = ""
        return self.token is None or secrets.compare_digest(given.encode(), self.token.encode())

    def limited(self, receive: Receive) -> Receive:
        """Return a function that receives the body of a request and raises an error beyond the limits."""
        deadline, size, is_complete = asyncio.get_running_loop().time() + self.limits.timeout, 0, False

        async def receive_limited() -> Message:
            nonlocal size, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"The request took more than {self.limits.timeout:g} seconds.") from None
            size += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if size > self.limits.max_bytes:
                raise self.too_large()
            return message

        return receive_limited

    def too_large(self) -> HTTPException:
        """Return the error for a request that is too large."""
        return HTTPException(413, f"The request has more than {self.limits.max_bytes} bytes. Send smaller images.")


class Endpoint:
    """Handlers of requests for predictions and embeddings."""

    def __init__(self, models: Sequence[ServedModel], limits: Limits) -> None:
        self.models, self.limits = {model.name: model for model in models}, limits

    def find_thread(self, name: str | None, kind: str) -> tuple[str, BatchThread]:
        """Return the name and a thread of a model, by default of the first model."""
        name = next(iter(self.models)) if name is None else name
        if name not in [*self.models]:  # a list, because the name in a JSON request can be any object
            raise HTTPException(404, f"There is no model {name!r}. Choose one of {', '.join(self.models)}.")
        if kind not in self.models[name].threads:
            raise HTTPException(400, f"The model {name!r} has no {kind}.")
        return name, self.models[name].threads[kind]

    async def answer(self, request: Request, thread: BatchThread, images: Sequence[bytes]) -> list[Any]:
        """Return the answer for each image; it is `{"error": ...}` if the image is refused."""
        if not 0 < len(images) <= (thread.max_queue or len(images)):
            raise HTTPException(422, f"The request has {len(images)} images. Send 1 to {thread.max_queue} images.")
        errors = [await run_in_threadpool(find_image_error, image, self.limits.max_pixels) for image in images]
        accepted = [image for image, error in zip(images, errors, strict=True) if error is None]
        try:
            futures = thread.submit(accepted)
        except QueueFullError as error:
            raise HTTPException(429, str(error), RETRY_LATER) from error
        answers = iter(await wait_for_answers(request, futures, self.limits.timeout))
        return [next(answers) if error is None else {"error": error} for error in errors]

    async def predict(
        self,
        request: Request,
        image: Annotated[list[UploadFile], File(description="One or several image files.")],
        model: Annotated[str | None, Form(description="Name of the model; by default the first.")] = None,
        model_in_query: Annotated[str | None, Query(alias="model")] = None,
    ) -> Any:
        """Predict images. The predictions have the format of `hf-vit predict`."""
        name, thread = self.find_thread(model or model_in_query, "predictions")
        answers = await self.answer(request, thread, [await file.read() for file in image])
        predictions = [answer if isinstance(answer, dict) else answer[0] for answer in answers]
        if len(predictions) == 1 and "error" in predictions[0]:
            raise HTTPException(422, predictions[0]["error"])
        return {"model": name, "predictions": predictions}

    async def embed(self, request: Request) -> Any:
        """Compute the embeddings of images. The request and the response have the format of the OpenAI API."""
        images, options = await read_embedding_request(request)
        if (encoding := options.get("encoding_format")) not in (None, "float", "base64"):
            raise HTTPException(422, f'encoding_format={encoding!r} is unknown. Send "float" or "base64".')
        if options.get("dimensions") is not None:
            text = f"dimensions={options['dimensions']!r} is not supported. Omit it: embeddings keep their size."
            raise HTTPException(422, text)
        name, thread = self.find_thread(options.get("model"), "embeddings")
        answers = await self.answer(request, thread, images)
        for number, answer in enumerate(answers):
            if isinstance(answer, dict):
                raise HTTPException(422, f"Image {number}: {answer['error']}")
        if encoding == "base64":
            answers = [base64.b64encode(np.asarray(answer, "<f4").tobytes()).decode() for answer in answers]
        data = [{"object": "embedding", "index": index, "embedding": own} for index, own in enumerate(answers)]
        return {"object": "list", "data": data, "model": name, "usage": {"prompt_tokens": 0, "total_tokens": 0}}

    def health(self) -> Any:
        """Return the models, with status 503 if the thread of one has stopped."""
        if not all(thread.thread.is_alive() for model in self.models.values() for thread in model.threads.values()):
            raise HTTPException(503, "A thread of a model has stopped. Restart the server.")
        return {"status": "ok", "models": {name: model.task for name, model in self.models.items()}}


async def read_embedding_request(request: Request) -> tuple[list[bytes], dict[str, Any]]:
    """Return the encoded images and the other fields of a request, in multipart or JSON format."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        async with request.form() as form:
            images = [await file.read() for file in form.getlist("image") if not isinstance(file, str)]
            return images, {**request.query_params, **form}
    try:
        body = await request.json()
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        parts = [text.partition(",")[2] if text.startswith("data:") else text for text in texts]
        return [base64.b64decode(part, validate=True) for part in parts], body
    except RecursionError:
        raise HTTPException(400, 'The JSON is nested too deeply. Send {"input": ["BASE64"]}.') from None
    except (ValueError, KeyError, TypeError, AttributeError):
        text = 'Send JSON of the form {"input": ["BASE64"]} with images in base64. URLs and paths are not accepted.'
        raise HTTPException(422, text) from None


async def wait_for_answers(request: Request, futures: Sequence[Future[Any]], timeout: float) -> list[Any]:
    """Return the results of futures. If the client disconnects or the time is over, cancel those that still wait."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answers = asyncio.gather(*map(asyncio.wrap_future, futures))
    answers.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio logs an unread error
    disconnect = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait((answers, disconnect), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if answers.done():
            return await answers
        if disconnect.done():
            raise HTTPException(499, "The client has disconnected.")
        raise HTTPException(503, f"There was no answer within {timeout:g} seconds. Try again later.", RETRY_LATER)
    finally:
        answers.cancel()
        disconnect.cancel()


def error_response(error: StarletteHTTPException) -> JSONResponse:
    """Return the response for an error: a JSON object with one sentence."""
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def show_error(_: Request, error: Exception) -> Response:
    """Return the response for an error that a handler or a check of the request has raised."""
    if isinstance(error, RequestValidationError):
        faults = "; ".join(f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors())
        error = HTTPException(422, f"The request is invalid: {faults}.")
    elif not isinstance(error, StarletteHTTPException):
        error = HTTPException(500, "The server failed. See its log.")
    return error_response(error)


HANDLERS: dict[Any, Any] = dict.fromkeys((StarletteHTTPException, RequestValidationError, Exception), show_error)


def build_app(models: Sequence[ServedModel], limits: Limits | None = None, token: str | None = None) -> FastAPI:
    """Return the application of models with different names, of which the first is the default.

    The threads of the models run during its lifespan. If a token is given, only `OPEN_ROUTES` can be used without it.
    """
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with ExitStack() as running:
            for thread in (thread for model in models for thread in model.threads.values()):
                running.enter_context(thread)
            yield

    app = FastAPI(title="hf-vit", lifespan=lifespan, redoc_url=None, exception_handlers=HANDLERS)
    endpoint, metrics = Endpoint(models, limits), Metrics(models)
    app.add_api_route("/v1/predict", endpoint.predict, methods=["POST"])
    docs = {"requestBody": {"content": EMBEDDING_BODY}}
    app.add_api_route("/v1/embeddings", endpoint.embed, methods=["POST"], openapi_extra=docs)
    app.add_api_route("/health", endpoint.health)
    app.add_api_route("/metrics", metrics.show, include_in_schema=False)

    app.add_middleware(Guard, limits=limits, token=token, metrics=metrics)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(limits.hosts), www_redirect=False)
    return app
