"""Test the page of `hf-vit serve` in headless Chromium: upload, answers, overlay, attention, and errors."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gradio
import pytest
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

import hf_vit
from hf_vit.inference.serving.app import Limits
from hf_vit.inference.serving.page import Panel
from hf_vit.inference.serving.photos import PhotoStore
from hf_vit.inference.serving.served_model import open_models

from ..helpers.images import noise
from ..helpers.models import save_model, small_config
from ..helpers.references import draw_weights
from ..helpers.servers import serve_page


CHROMIUM = shutil.which("chromium")
WAIT = 20_000  # milliseconds


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
        context = browser.new_context(http_credentials={"username": "", "password": "key"})
        context.set_default_timeout(WAIT)
        yield context.new_page()
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
            title = Panel(opened, Limits(), PhotoStore(tmp_path, 10**6)).title("· 3 ms")
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
    opened = open_models([str(tmp_path / name) for name in names], {"top_k": 3})
    with browser_page() as page, serve_page(opened, Limits(max_pixels=1_000_000), token="key") as (address, *_):
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


def test_tabs_with_a_model_of_several_heads_keep_their_photos(tmp_path: Path) -> None:
    for name, kind in (("species", hf_vit.HfViTForImageClassification), ("rooms", hf_vit.HfViTForDepthEstimation)):
        model = kind(small_config())
        draw_weights(model)
        save_model(model, tmp_path / name)
    both = hf_vit.HfViTForMultiTask.from_heads(species=tmp_path / "species", rooms=tmp_path / "rooms")
    both.save_pretrained(tmp_path / "both")
    photos = [tmp_path / "wide.png", tmp_path / "tall.png"]
    for number, photo in enumerate(photos):
        Image.fromarray(noise(60 + 30 * number, 90, 3, seed=number)).save(photo)
    lines = [hf_vit.predict(tmp_path / "both", photo)[0] for photo in photos]
    opened = open_models([str(tmp_path / "both")], {"top_k": 3})
    with browser_page() as page, serve_page(opened, Limits(), token="key") as (address, _, store):
        tabs = [page, page.context.new_page()]
        for tab in tabs:
            tab.goto(address)
        for tab, photo in zip(tabs, photos, strict=True):
            tab.locator("input[type=file]").first.set_input_files(photo)
        for tab, line in zip(tabs, lines, strict=True):
            expect(tab.locator("h4")).to_have_text(["rooms", "species"], timeout=WAIT)
            assert tab.locator(".rows tr").first.inner_text().split()[0] == line["species"]["label"]
            assert f"{line['rooms']['max']:.2f} {line['rooms']['unit']}" in tab.locator(".ends").inner_text()
            tab.locator("img[src*='/file=']").first.click()
            expect(tab.locator(".attention img")).to_have_count(1, timeout=WAIT)
        sources = [picture.get_attribute("src") for picture in page.locator("img[src*='/file=']").all()]
        other = page.context.browser.new_context(http_credentials={"username": "", "password": "key"})
        for source in sources:
            assert page.context.request.get(str(source)).status == 200
            assert other.request.get(str(source)).status == 403
        for file in filter(Path.is_file, store.folder.iterdir()):
            file.unlink()
        page.locator("img[src*='/file=']").first.click()
        expect(page.get_by_text("The photo is no longer stored").first).to_be_visible(timeout=WAIT)
