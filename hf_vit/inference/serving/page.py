"""Web page that shows the answers of served models for a photo. It loads nothing from other hosts."""

import html
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import gradio as gr
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from matplotlib import colormaps
from PIL import Image, ImageDraw

from ...convert.model_card import WARNINGS, read_card_data
from ...visualize.attention import attention_maps
from ...visualize.colors import segmentation_palette
from ...visualize.dense import DEPTH_COLORS, INVERSE_DEPTH_COLORS
from ...visualize.figures import as_picture
from ...visualize.inspection import Inspection, open_for_inspection
from ...visualize.patches import overlay_heat
from ..writers import labels_of
from .app import HANDLERS, Limits, build_app
from .batching import QueueFullError
from .photos import PICTURE, Photo, PhotoStore
from .served_model import ServedModel, find_image_error, make_inputs


# Routes of gradio that the page uses. Its other routes read files and URLs, or run functions without a check.
JOIN, FILE = "/gradio_api/queue/join", "/gradio_api/file={path_or_url:path}"
PAGE_ROUTES = (
    *("/", "/config", "/theme.css", "/favicon.ico", "/assets/{path:path}", "/static/{path:path}"),
    *(JOIN, FILE, "/gradio_api/queue/data", "/gradio_api/app_id"),
)
SESSION = "hf_vit_session"  # cookie
MAX_JOB_BYTES = 10_000  # maximum size of a job, which has the path of a photo
STORED_REQUESTS = 10  # maximum total size of stored photos and pictures, in requests of the maximum size
NOT_STORED = "The photo is no longer stored, or belongs to another session. Upload it again."
MAX_ROWS = 12  # maximum number of rows in a table of scores
KEYS = ("top_k", "labels", "classes", "segments", "objects")  # keys of lists with labels and scores
HINT = "# hf-vit\nDrop, paste or photograph an image. A click on it shows the attention of that point."
EMPTY = '<p class="quiet">No photo yet.</p>'
HIDDEN: dict[str, Any] = {"value": None, "visible": False}
STYLE = """
.rows {width: 100%; border-collapse: collapse; border: none !important; margin: 4px 0 !important}
.rows tr {border: none !important; border-bottom: 1px solid var(--border-color-primary) !important}
.rows td {padding: 5px 6px !important; border: none !important; vertical-align: middle}
.score {text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; width: 1%}
.chip {display: inline-block; width: 0.85em; height: 0.85em; border-radius: 3px; margin-right: 0.5em}
.bar {height: 6px; border-radius: 3px; background: var(--color-accent)}
.ramp {height: 12px; border-radius: 4px; margin: 6px 0 2px}
.ends {display: flex; justify-content: space-between; font-size: 0.9em}
.quiet {color: var(--body-text-color-subdued)}
.error {color: #c0262d}
h3 {margin: 0 !important}
"""


class Panel:
    """Column of the page with the answers of one model, which must have predictions."""

    def __init__(self, model: ServedModel, limits: Limits, store: PhotoStore) -> None:
        assert model.predictor is not None
        self.model, self.predictor, self.limits, self.store = model, model.predictor, limits, store
        with gr.Column(min_width=240):
            self.heading = gr.HTML(self.title(), padding=False)
            options: dict[str, Any] = {"visible": False, "buttons": ["fullscreen"]}
            label = "Photo and prediction"
            self.slider = gr.ImageSlider(label=label, max_height=520, elem_classes="overlay", **options)
            self.attention = gr.Image(interactive=False, elem_classes="attention", **options)
            self.table = gr.HTML(EMPTY, padding=False)
        self.outputs = [self.heading, self.slider, self.table, self.attention]

    def title(self, note: str = "") -> str:
        """Return the heading as HTML: name of the model, its task, a note, and the warnings of its card."""
        name = html.escape(self.model.name)
        return f'<h3>{name}</h3><span class="quiet">{self.model.task} {note}</span>{self.warnings}'

    @cached_property
    def warnings(self) -> str:
        """Warnings in the card of the model as HTML."""
        sentences = read_card_data(self.model.source).get(WARNINGS) or []
        return "".join(f'<p class="error">{html.escape(str(text))}</p>' for text in sentences)

    def decode(self, photo: bytes) -> Image.Image:
        """Return the decoded photo."""
        return make_inputs([photo], self.predictor).sources[0].decode()

    def store_picture(self, picture: Image.Image, session: str) -> str:
        """Store a picture for a session, and return its path."""
        picture.convert("RGB").save(buffer := BytesIO(), format="JPEG")
        return self.store.add(buffer.getvalue(), session, PICTURE)

    def answer(self, photo: Photo | None) -> list[Any]:
        """Return the heading, slider, table and attention for a photo, or for no photo."""
        if photo is None:
            return [self.title(), gr.update(**HIDDEN), EMPTY, gr.update(**HIDDEN)]
        start, answer = perf_counter(), None
        line: dict[str, Any] = {"error": find_image_error(photo.content, self.limits.max_pixels)}
        if line["error"] is None:
            try:
                (future,) = self.model.threads["predictions"].submit([photo.content])
                line, answer = future.result(self.limits.timeout)
            except (QueueFullError, TimeoutError) as failure:
                line = {"error": str(failure) or "There was no answer in time. Try again."}
        if "error" in line:
            text = f'<p class="error">{html.escape(line["error"])}</p>'
            return [self.title(), gr.update(**HIDDEN), text, gr.update(**HIDDEN)]
        milliseconds, overlay, slider = 1000 * (perf_counter() - start), self.predictor.writer.overlay, HIDDEN
        if overlay is not None:
            decoded = self.decode(photo.content)
            picture = Image.fromarray(as_picture(overlay(decoded, answer, self.predictor.pipe.model.config)))
            pictures = (decoded.resize(picture.size), picture)
            slider = {"value": [self.store_picture(own, photo.session) for own in pictures], "visible": True}
        if self.predictor.writer.pipeline == "multi-task":
            text = "".join(f"<h4>{html.escape(name)}</h4>{self.describe(own)}" for name, own in line.items())
        else:
            text = self.describe(line)
        return [self.title(f"· {milliseconds:.0f} ms"), gr.update(**slider), text, gr.update(**HIDDEN)]

    def describe(self, line: dict[str, Any]) -> str:
        """Return the legend and the scores of a prediction as HTML."""
        if "unit" in line:
            colors = colormaps[DEPTH_COLORS if line["unit"] == "meters" else INVERSE_DEPTH_COLORS]
            stops = ", ".join(f"rgb{tuple(map(int, colors(part / 8, bytes=True)[:3]))}" for part in range(9))
            ends = "".join(f"<span>{line[end]:.2f} {line['unit']}</span>" for end in ("min", "max"))
            ramp = f'<div class="ramp" style="background: linear-gradient(to right, {stops})"></div>'
            return f'{ramp}<div class="ends">{ends}</div>'
        if "caption" in line:
            return f"<p>{html.escape(line['caption'])}</p>"
        parts = [part for key in KEYS for part in line.get(key, ())]
        for pose in line.get("poses", ()):
            pairs = zip(pose["labels"], pose["scores"], strict=True)
            parts += [{"label": label, "score": score} for label, score in pairs]
        more = f'<p class="quiet">and {len(parts) - MAX_ROWS} more</p>' if len(parts) > MAX_ROWS else ""
        best = f" The best score is {line['best_score']:.3g}." if "best_score" in line else ""
        rows = "".join(map(self.row, parts[:MAX_ROWS])) or f"<tr><td>Nothing was found.{best}</td></tr>"
        return f'<table class="rows">{rows}</table>{more}'

    def row(self, part: dict[str, Any]) -> str:
        """Return a table row with color, label, score and, for classes of pixels, the share of the image."""
        chip, config = "", self.predictor.pipe.model.config
        if self.predictor.writer.overlay is not None:
            color = segmentation_palette(len(labels_of(config)))[config.label2id[part["label"]]].tolist()
            chip = f'<span class="chip" style="background: rgb({color[0]}, {color[1]}, {color[2]})"></span>'
        bar = f'<div class="bar" style="width: {100 * min(1.0, max(0.0, part["score"])):.1f}%"></div>'
        share = f'<td class="score">{part["share"]:.1%} of the pixels</td>' if "share" in part else ""
        label, score = html.escape(part["label"]), f'<td class="score">{part["score"]:.3f}</td>'
        return f'<tr><td>{chip}{label}</td><td width="30%">{bar}</td>{score}{share}</tr>'

    @cached_property
    def inspected(self) -> tuple[Any, Any]:
        """Model and image processor that record attention, opened at the first click with the weights in use."""
        model, processor = open_for_inspection(self.model.source)
        if isinstance(model, type(self.predictor.pipe.model)):
            model.load_state_dict(self.predictor.pipe.model.state_dict(), assign=True)
        return model, processor

    def attend(self, photo: Photo | None, event: gr.SelectData) -> Any:
        """Return a picture of the attention of the last block from the clicked point, averaged over its heads."""
        if photo is None or find_image_error(photo.content, self.limits.max_pixels):
            return gr.update(**HIDDEN)
        x, y = event.index
        one = Inspection(*self.inspected, self.decode(photo.content), [(x, y)])
        recorded = one.record_attention()
        heat = attention_maps(recorded, one.patch(recorded.grid))[-1].mean(dim=0)  # (h, w)
        picture = Image.fromarray(overlay_heat(one.picture, heat))
        scale = picture.width / one.photo.width
        for radius, color in ((max(picture.size) / 80, "black"), (max(picture.size) / 100, "white")):
            ImageDraw.Draw(picture).circle((x * scale, y * scale), radius, outline=color, width=3)
        path = self.store_picture(picture, photo.session)
        return gr.update(value=path, visible=True, label=f"Attention of the point {x}, {y}")


def add_page(models: Sequence[ServedModel], limits: Limits, app: FastAPI) -> tuple[Any, PhotoStore]:
    """Add the page to an application, at `/`, and return its own application and its photos.

    Photos are stored in the folder that the environment variable `GRADIO_TEMP_DIR` names.
    """
    store = PhotoStore(Path(os.environ["GRADIO_TEMP_DIR"]), STORED_REQUESTS * limits.max_bytes)

    def read_upload(payload: Any) -> Photo | None:
        if payload is not None and (photo := store.read(payload.path)) is None:
            raise gr.Error(NOT_STORED, print_exception=False)
        return None if payload is None else photo

    with gr.Blocks(title="hf-vit", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown(HINT)
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                sources = ["upload", "clipboard", "webcam"]
                photo: Any = gr.Image(label="Photo", sources=sources, height=420, buttons=["fullscreen"])
                photo.preprocess = read_upload
            with gr.Column(scale=2 * len(models), min_width=320), gr.Row():
                panels = [Panel(model, limits, store) for model in models if model.predictor is not None]
        options: dict[str, Any] = {"api_visibility": "private", "concurrency_limit": 4}
        for panel in panels:
            photo.change(panel.answer, photo, panel.outputs, **options)
            photo.select(panel.attend, photo, panel.attention, **options)
    page.queue(max_size=limits.max_queue)

    async def upload(request: Request) -> JSONResponse:
        # Replaces the upload of gradio, which stores files under the names that clients send.
        session = request.cookies.get(SESSION) or secrets.token_urlsafe()
        async with request.form() as form:
            sent = [await file.read() for file in form.getlist("files") if not isinstance(file, str)]
        response = JSONResponse([store.add(content, session) for content in sent])
        response.set_cookie(SESSION, session, httponly=True, samesite="strict")
        return response

    app.add_api_route("/gradio_api/upload", upload, methods=["POST"], include_in_schema=False)
    options = {"theme": gr.themes.Default(primary_hue="blue"), "css": STYLE, "footer_links": [], "run_history": False}
    checks = [Depends(make_check(store))]
    checked = {"dependencies": checks, "exception_handlers": HANDLERS, "openapi_url": None}
    gr.mount_gradio_app(app, page, "/", ssr_mode=False, mcp_server=False, app_kwargs=checked, **options)
    return vars(app.routes[-1])["app"], store


def make_check(store: PhotoStore) -> Callable[[Request], Awaitable[None]]:
    """Return a dependency for all routes of gradio, which does not check the files of mounted applications itself."""

    async def check(request: Request) -> None:
        """Refuse requests that the page does not send, and all files except those of the session."""
        route, path = request.scope["route"].path, None
        if route not in PAGE_ROUTES:
            raise HTTPException(404, "The page does not use this route.")
        if route == FILE:
            path = request.path_params["path_or_url"]
        elif route == JOIN:
            path = find_photo(await request.body())
        session = request.cookies.get(SESSION)
        if path is not None and (session is None or store.session_of(path) != session):
            raise HTTPException(403, NOT_STORED)

    return check


def find_photo(body: bytes) -> str | None:
    """Return the path of the photo in a job of the page, or None if the page has no photo."""
    if len(body) > MAX_JOB_BYTES:
        raise HTTPException(413, f"The job has more than {MAX_JOB_BYTES} bytes.")
    try:
        job = json.loads(body)
    except (ValueError, RecursionError):
        job = None
    match job:
        case {"data": [None]}:
            return None
        case {"data": [{"path": str(path), "meta": {"_type": "gradio.FileData"}}]} if not path.endswith(PICTURE):
            return path
    raise HTTPException(400, "The job is not one of the page. Send images to /v1/predict instead.")


class PageServer(uvicorn.Server):
    """Server with the page. It removes old photos, and closes connections that send no request within the timeout.

    When it stops, it closes the connections of open pages, and finishes other requests.
    """

    def __init__(self, app: FastAPI, page: Any, store: PhotoStore, limits: Limits, log_level: str = "warning") -> None:
        timeout = round(limits.timeout) + 1
        super().__init__(uvicorn.Config(app, ws="none", log_level=log_level, timeout_graceful_shutdown=timeout))
        self.page, self.store, self.timeout = page, store, limits.timeout
        self.waiting: dict[Any, float] = {}  # start time for each connection, and its last request or None

    async def on_tick(self, counter: int) -> bool:
        """Remove old photos and close slow connections, once per second. The server calls this function more often."""
        if counter % 10 == 0:
            self.store.remove_old()
            for paths in self.page.get_blocks().temp_file_sets:
                paths.clear()  # gradio collects the paths of all files, for a deletion that is not in use.
            now, connections = perf_counter(), list[Any](self.server_state.connections)
            waiting = [(own, own.cycle) for own in connections if own.cycle is None or own.cycle.response_complete]
            self.waiting = {key: self.waiting.get(key, now) for key in waiting}
            for (connection, _), start in self.waiting.items():
                if now - start > self.timeout:
                    connection.transport.close()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server."""
        self.page.stop_event.set()
        super().handle_exit(sig, frame)


def run_server(
    models: Sequence[ServedModel],
    limits: Limits,
    token: str | None,
    host: str,
    port: int,
    report: Callable[[str], None] = print,
) -> None:
    """Serve models with the page until the process receives SIGTERM or SIGINT; see `serve_models`."""
    with socket.create_server((host, port)) as listener:
        app = build_app(models, limits, token)
        page, store = add_page(models, limits, app)
        report(f"Serving {', '.join(model.name for model in models)} at http://{host}:{listener.getsockname()[1]}")
        PageServer(app, page, store, limits).run(sockets=[listener])
