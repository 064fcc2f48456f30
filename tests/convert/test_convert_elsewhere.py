"""Test checkpoints on the Hub, and converted checkpoints in an environment without the package.

Two processes, one with the package and one without, compute the results for all tests.
"""

import json

import pytest
import torch
import transformers as hf
from PIL import Image
from transformers import ViTForImageClassification, ViTImageProcessor

from hf_vit import cli, convert_model

from ..helpers.fresh import run_with_package, run_without_package
from ..helpers.hub import serve
from .sources import save_source
from .test_convert_files import GELU, ConvolutionViT, saved
from .test_convert_image_processor import PUBLISHED, TIMM
from .test_convert_open_clip import model_cfg, save_open_clip, state_of_clip


WITH_PACKAGE = """
import torch
from hf_vit import HfViTForImageClassification, HfViTImageProcessor, HfViTModel
from hf_vit.training import publish

def assert_same(model, folder):
    state = type(model).from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items()), folder

for where in ({}, {"revision": "main"}, {"subfolder": "inner"}):
    assert_same(HfViTForImageClassification.from_pretrained("user/vit", **where), "hub/user/vit")
for where in ({"revision": "nowhere"}, {"subfolder": "missing"}):
    try:
        HfViTForImageClassification.from_pretrained("user/vit", **where)
    except OSError as error:
        assert "user/vit" in str(error), error
    else:
        raise AssertionError(where)
assert_same(HfViTModel.from_pretrained("user/clip"), "hub/user/clip")
for name, size in (("dinov2", 256), ("timm", 248), ("openai", 192)):
    assert HfViTImageProcessor.from_pretrained(f"user/{name}").size == {"shortest_edge": size}, name
publish("digits", "user/digits")
"""
WITHOUT_PACKAGE = """
import json
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

def refusal(kind, folder):
    try:
        kind.from_pretrained(folder)
    except ValueError as error:
        return str(error)

remote = {"trust_remote_code": True}
model = AutoModelForImageClassification.from_pretrained("ours", **remote)
pipeline("image-classification", model="ours", **remote)
processor = AutoImageProcessor.from_pretrained("ours", **remote)
segment = pipeline("image-segmentation", model="eomt", **remote)
parts = segment(Image.open("photo.png"), threshold=0.0, overlap_mask_area_threshold=0.0)
results = {
    "digits": pipeline("image-classification", "user/digits", **remote)("gray.png")[0]["score"],
    "logits": model(torch.load("images.pt")).logits.tolist(),
    "kinds": [type(part).__name__ for part in (processor, segment.model)],
    "refusals": [refusal(type(model), "vit"), refusal(type(processor), "vit"), refusal(type(processor), "timm")],
    "segments": [[part["label"], part["score"], sum(part["mask"].tobytes())] for part in parts],
}
print(json.dumps(results))
"""


def write(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with published and converted checkpoints and images. The subfolder `hub` is for a mock Hub."""
    place = tmp_path_factory.mktemp("elsewhere")
    vit = save_source("ViTForImageClassification", place / "hub/user/vit")
    vit.save_pretrained(place / "hub/user/vit/inner", max_shard_size="40KB")
    save_open_clip(place / "hub/user/clip", state_of_clip(), model_cfg())
    write(place / "hub/user/dinov2", "preprocessor_config.json", PUBLISHED["facebook/dinov2-base"])
    for folder in (place / "hub/user/timm", place / "timm"):
        write(folder, "config.json", {"architecture": "vit", "pretrained_cfg": TIMM["augreg"]})
    write(place / "hub/user/openai", "config.json", {"model_type": "clip"})
    write(place / "hub/user/openai", "preprocessor_config.json", {"size": 192})
    vit.save_pretrained(place / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(place / "vit")
    save_source("EoMT", place / "theirs")
    processor = hf.EomtImageProcessor(size={"shortest_edge": 32, "longest_edge": 32}, do_pad=True)
    processor.save_pretrained(place / "theirs")
    for source, target in (("vit", "ours"), ("theirs", "eomt")):
        cli.main(["convert", str(place / source), str(place / target)])
    torch.save(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), place / "images.pt")
    Image.effect_noise((60, 30), 80).convert("RGB").save(place / "photo.png")
    Image.new("L", (28, 28), 51).save(place / "gray.png")
    return place


@pytest.fixture(scope="module")
def digits(place):
    """Return a model written in the style of ViT tutorials. Its converted checkpoint is in the folder `digits`."""
    source, lines = ConvolutionViT().eval(), []
    convert_model(saved(source, place), place / "digits", **GELU, report=lines.append)
    assert sum(line.endswith(" equal") for line in lines) == 2
    return source


@pytest.fixture(scope="module")
def results(place, digits):
    with serve(place / "hub") as hub:
        run_with_package(WITH_PACKAGE, place, **hub.client)
        return json.loads(run_without_package(WITHOUT_PACKAGE, place, **hub.client).stdout.splitlines()[-1])


def test_repositories_open_like_folders_and_a_published_model_in_a_pipeline(digits, results):
    expected = digits(torch.full((1, 1, 28, 28), 0.2)).softmax(-1).max().item()
    assert results["digits"] == pytest.approx(expected, abs=1e-4)


def test_converted_models_open_without_the_package(place, results):
    assert results["kinds"] == ["HfViTImageProcessor", "HfViTForUniversalSegmentation"]
    expected = ViTForImageClassification.from_pretrained(place / "vit")(torch.load(place / "images.pt")).logits
    torch.testing.assert_close(torch.tensor(results["logits"]), expected, atol=1e-5, rtol=1e-5)
    segment = hf.pipeline("image-segmentation", model=str(place / "eomt"))
    found = segment(Image.open(place / "photo.png"), threshold=0.0, overlap_mask_area_threshold=0.0)
    assert len(found) > 0
    assert results["segments"] == [[part["label"], part["score"], sum(part["mask"].tobytes())] for part in found]


def test_other_checkpoints_are_refused_without_the_package(results):
    model, vit, timm = results["refusals"]
    assert "'vit' is a checkpoint of another library" in model
    assert "'vit'" in vit
    assert "ViTImageProcessor" in vit
    assert "'timm'" in timm
    assert all("pip install ." in message for message in (model, vit, timm))
