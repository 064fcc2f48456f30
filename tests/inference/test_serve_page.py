"""Test the page of `hf-vit serve` in headless Chromium: upload, answers, overlay, attention, and errors."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gradio
import pytest
import uvicorn
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

import hf_vit
from hf_vit.inference.serving.app import Limits, build_app
from hf_vit.inference.serving.page import PageServer, Panel, add_page
from hf_vit.inference.serving.served_model import open_models

from ..helpers.images import noise
from ..helpers.models import save_model, small_config
from ..helpers.references import draw_weights
from ..helpers.servers import run_server


CHROMIUM = shutil.which("chromium")
WAIT = 20_000  # milliseconds


@contextmanager
def serving(models: list[str]) -> Iterator[str]:
    """Serve models with the page on a port of this machine, with the token "key", and return the address."""
    opened, limits = open_models(models, {"top_k": 3}), Limits(max_pixels=1_000_000)
    app = build_app(opened, limits, token="key")
    page = add_page(opened, limits, app)
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=5)
    with run_server(PageServer(config, page)) as address:
        yield address


@contextmanager
def browser_page() -> Iterator[Page]:
    """Yield a browser page that sends the token "key" if the server requires it."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    # The paths of Chromium's sockets must be short, so its files are not in `tmp_path`.
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        environment = {"HOME": folder, "TMPDIR": folder}
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, env=environment)
        page = browser.new_page(http_credentials={"username": "", "password": "key"})
        page.set_default_timeout(WAIT)
        yield page
        browser.close()


def test_the_page_shows_the_warnings_of_a_model_card(tmp_path: Path) -> None:
    model = hf_vit.HfViTForObjectDetection(small_config())
    draw_weights(model)
    save_model(model, tmp_path)
    error = '<p class="error">This model is behind &lt;mean box&gt;.</p>'
    for card, shown in (("", ""), ("warnings:\n- This model is behind <mean box>.\n", error)):
        (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{card}---\n")
        (opened,) = open_models([str(tmp_path)], {"top_k": 3})
        with gradio.Blocks():
            title = Panel(opened, Limits()).title("· 3 ms")
        assert title.endswith(f"· 3 ms</span>{shown}")


def test_the_page_shows_answers_overlays_attention_and_errors(tmp_path: Path) -> None:
    names, labels = ["classes <b>", "places"], {f"<i>{number}": number for number in range(5)}
    for name, kind in zip(
        names, (hf_vit.HfViTForImageClassification, hf_vit.HfViTForSemanticSegmentation), strict=True
    ):
        model = kind(small_config(label2id=labels, id2label={number: label for label, number in labels.items()}))
        draw_weights(model)
        save_model(model, tmp_path / name)
    (photo, broken) = tmp_path / "photo.png", tmp_path / "broken.png"
    Image.fromarray(noise(60, 90, 3)).save(photo)
    broken.write_bytes(photo.read_bytes()[:500])
    lines = [hf_vit.predict(tmp_path / name, photo)[0] for name in names]
    with browser_page() as page, serving([str(tmp_path / name) for name in names]) as address:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.locator("input[type=file]").first.set_input_files(photo)
        expect(page.locator(".quiet").filter(has_text=re.compile(r"\d ms$"))).to_have_count(2, timeout=WAIT)
        assert page.locator("h3").all_inner_texts() == names
        rows = page.locator(".rows tr").all_inner_texts()
        expected = [*lines[0]["top_k"], *lines[1]["classes"]]
        assert [re.split(r"\s+", row)[:2] for row in rows] == [[p["label"], f"{p['score']:.3f}"] for p in expected]
        expect(page.locator(".overlay img").first).to_be_visible()
        colors = {own.evaluate("chip => getComputedStyle(chip).background") for own in page.locator(".chip").all()}
        assert len(colors) == len(lines[1]["classes"])
        page.locator("img[src*='/file=']").first.click()
        expect(page.locator(".attention img")).to_have_count(2, timeout=WAIT)
        page.get_by_label("Remove Image").click()
        expect(page.get_by_text("No photo yet.")).to_have_count(2)
        page.locator("input[type=file]").first.set_input_files(broken)
        expect(page.locator(".error")).to_have_count(2, timeout=WAIT)
        assert all("cannot be decoded" in text for text in page.locator(".error").all_inner_texts())
        assert all(url.startswith((address, "data:", "blob:")) for url in requests), requests
