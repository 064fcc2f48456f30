"""Test loading of saved models without the package, from a folder or the Hub."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import pipeline

import hf_vit
from hf_vit import HfViTForImageClassification, HfViTImageProcessor, HfViTModel
from hf_vit.model.remote_code import AUTO_MAP

from ..helpers.fresh import run_with_package, run_without_package
from ..helpers.hub import serve
from ..helpers.models import DEFORMABLE, QUERIES, SMALL, pixels, small_config
from .checks import build


PACKAGE = Path(__file__).parents[2] / "hf_vit" / "model"
LABELS = {"num_labels": 2, "id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}


OPEN_EVERYTHING = """
from transformers import (
    AutoBackbone, AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline
)
source, data, folder = sys.argv[1:]
remote = {"trust_remote_code": True}
saved = torch.load(data, weights_only=True)
images = saved["images"]

config = AutoConfig.from_pretrained(source, **remote)
assert config.model_type == "hf_vit" and config.id2label[1] == "dog", config
model = AutoModelForImageClassification.from_pretrained(source, **remote).eval()
assert type(model).__module__.startswith("transformers_modules"), type(model)
assert torch.equal(model(images).logits, saved["logits"])

# Models pickle, with what records their states, and so have a fingerprint. (The library may run code of the Hub anew
# for another Auto class, after which Python no longer finds the class of this one by its name.)
Hasher = __import__("datasets.fingerprint").fingerprint.Hasher
assert Hasher.hash(model) == Hasher.hash(model)
states = model(images, output_hidden_states=True).hidden_states
torch.save(model, "model.pt")
for copied in (torch.load("model.pt", weights_only=False), __import__("copy").deepcopy(model)):
    own = copied(images, output_hidden_states=True).hidden_states
    assert len(own) == len(states) and all(map(torch.equal, own, states))

base, info = AutoModel.from_pretrained(source, output_loading_info=True, **remote)
assert not info["missing_keys"] and set(info["unexpected_keys"]) == {"classifier.weight", "classifier.bias"}, info
assert torch.equal(base.eval()(images).last_hidden_state, saved["last_hidden_state"])
backbone = AutoBackbone.from_pretrained(source, out_indices=[1, 3], **remote).eval()
assert all(map(torch.equal, backbone(images).feature_maps, saved["feature_maps"]))

for backend, name in ((None, "HfViTImageProcessor"), ("pil", "HfViTImageProcessorPil")):
    options = {} if backend is None else {"backend": backend}
    processor = AutoImageProcessor.from_pretrained(source, **options, **remote)
    assert type(processor).__name__ == name, type(processor)

photo = __import__("PIL.Image").Image.open(saved["photo"])
classify = pipeline("image-classification", model=source, **remote)
assert type(classify).__name__ == "HfViTImageClassificationPipeline", type(classify)
single = classify(photo)
assert [entry["label"] for entry in single] == [saved["label"], *(set(config.id2label.values()) - {saved["label"]})]
assert abs(sum(entry["score"] for entry in single) - 1) < 1e-5
for batched in classify([saved["photo"]] * 3, batch_size=2):
    assert [entry["label"] for entry in batched] == [entry["label"] for entry in single]
features = pipeline("image-feature-extraction", model=source, pool=True, return_tensors=True, **remote)
assert features(photo).shape == (1, 32)
for batched in features([saved["photo"]] * 3, batch_size=2):
    torch.testing.assert_close(batched, features(photo))

# As the library's tutorials give labels; other labels get a fresh head.
given = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": "0", "b": "1", "c": "2"}}
assert AutoModelForImageClassification.from_pretrained(source, **given, **remote)(images).logits.shape[1] == 3
config = AutoConfig.from_pretrained(source, **given, **remote)
assert AutoModelForImageClassification.from_pretrained(source, config=config, **remote).config.id2label[2] == "c"
segmenter = __import__("transformers").AutoModelForImageSegmentation.from_pretrained(source, **remote)
assert type(segmenter).__name__ == "HfViTForSemanticSegmentation"

# The folder opens as the name does.
local = AutoModelForImageClassification.from_pretrained(folder, **remote).eval()
assert torch.equal(local(images).logits, saved["logits"])
assert pipeline("image-classification", model=folder, **remote)(photo)[0]["label"] == saved["label"]

# What was opened saves again, and opens again: everything that the folder needs goes along.
model.save_pretrained("again")
processor.save_pretrained("again")
again = AutoModelForImageClassification.from_pretrained("again", **remote).eval()
assert torch.equal(again(images).logits, saved["logits"])
assert AutoImageProcessor.from_pretrained("again", **remote).backend == "torchvision"
base.save_pretrained("base")
AutoModelForImageClassification.from_pretrained("base", num_labels=7, **remote)
print("opened")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder "user/model" of a saved classifier and its processor. data.pt contains images and their
    outputs."""
    root = tmp_path_factory.mktemp("hub")
    folder = root / "user" / "model"
    model = build(HfViTForImageClassification, **LABELS)
    config = model.config
    model.save_pretrained(folder)
    processor = HfViTImageProcessor.for_model(config)
    processor.save_pretrained(folder)
    backbone = hf_vit.HfViTBackbone.from_pretrained(folder, out_indices=[1, 3])
    photo = root / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(photo)
    images = pixels(config)
    with torch.no_grad():
        saved = {"images": images, "logits": model(images).logits, "photo": str(photo)}
        saved["last_hidden_state"] = HfViTModel.from_pretrained(folder)(images).last_hidden_state
        saved["feature_maps"] = list(backbone(images).feature_maps)
        logits = model(processor(Image.open(photo), return_tensors="pt").pixel_values).logits
        saved["label"] = config.id2label[int(logits.argmax())]
    torch.save(saved, root / "data.pt")
    return folder


def class_of(auto_class: str) -> Any:
    """Return the model class of this package that an Auto class loads."""
    return getattr(hf_vit, AUTO_MAP[auto_class].rpartition(".")[2])


def check_output(process: object) -> None:
    assert process.stdout.endswith("opened\n")
    assert "not supported" not in process.stdout + process.stderr
    for line in process.stderr.splitlines():
        assert "Error" not in line, process.stderr


def test_name_on_the_hub_and_folder_open_without_the_package(folder: Path, tmp_path: Path) -> None:
    arguments = ("user/model", str(folder.parents[1] / "data.pt"), str(folder))
    with serve(folder.parents[1]) as hub:
        check_output(run_without_package(OPEN_EVERYTHING, tmp_path / "work", *arguments, **hub.client))


def test_every_saved_object_contains_the_code_and_the_complete_auto_map(tmp_path: Path) -> None:
    traveling = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    savers = {"config": small_config(), "model": HfViTModel(small_config()), "processor": HfViTImageProcessor()}
    for name, saver in savers.items():
        saver.save_pretrained(tmp_path / name)
        assert {path.name for path in (tmp_path / name).glob("*.py")} == traveling
        for file in traveling:
            assert (tmp_path / name / file).read_text() == (PACKAGE / file).read_text()
        if name != "processor":
            assert json.loads((tmp_path / name / "config.json").read_text())["auto_map"] == AUTO_MAP
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    # Saves the model to the folder from which it was loaded.
    HfViTModel.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
    for path in (tmp_path / "copy").iterdir():
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_sharded_model_saves_its_own_code(tmp_path: Path) -> None:
    """FSDP2 replaces the class of a model. Without our override, transformers would save the code of that class."""
    model = build(HfViTForImageClassification)
    images = pixels(model.config)
    expected = model(images).logits.detach()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for module in (*model.model.encoder.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        torch.testing.assert_close(model(images).logits, expected)
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        model.save_pretrained(tmp_path, state_dict=weights)
    finally:
        distributed.destroy_process_group()
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert (tmp_path / "modeling_hf_vit.py").read_text() == (PACKAGE / "modeling_hf_vit.py").read_text()
    assert not list(tmp_path.glob("_fsdp*"))
    assert torch.equal(HfViTForImageClassification.from_pretrained(tmp_path)(images).logits, expected)


OPTIMIZE = """
with torch.no_grad():
    plain = transformers.pipeline("image-classification", model=folder, trust_remote_code=True)
    try:
        optimize = {"compile": False}
        fast = transformers.pipeline("image-classification", model=folder, trust_remote_code=True, optimize=optimize)
    except ImportError as error:
        assert sys.modules.get("hf_vit") is None
        assert "needs the package hf_vit" in str(error) and "install: pip install" in str(error), error
    else:
        assert "hf_vit" in sys.modules
        assert type(fast.model).__module__.startswith("transformers_modules"), type(fast.model)
        assert "| as given, float32 |" in str(fast.fast_model.report)
        assert [one["label"] for one in fast(photo)] == [one["label"] for one in plain(photo)]
print("opened")
"""
OPEN_CLASSIFIERS = """
root, folder, photo = sys.argv[1:]
try:
    transformers.AutoModel.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise AssertionError("Code runs without trust.")
for problem_type in ("multi_label_classification", "regression"):
    pipe = transformers.pipeline("image-classification", model=f"{root}/{problem_type}", trust_remote_code=True)
    inputs = pipe.image_processor(__import__("PIL.Image").Image.open(photo), return_tensors="pt")
    logits = pipe.model(**inputs).logits[0]
    # transformers before 5.20 needs an argument for values that are not probabilities
    options = {} if problem_type.startswith("multi") else {"function_to_apply": "none"}
    expected = logits if options else logits.sigmoid()
    scores = {entry["label"]: entry["score"] for entry in pipe(photo, **options)}
    actual = torch.tensor([scores[f"LABEL_{i}"] for i in range(5)])
    torch.testing.assert_close(actual, expected.detach())
"""


def test_with_the_package_a_classifier_is_optimized(folder: Path, tmp_path: Path) -> None:
    code = "import sys, torch, transformers\nfolder, photo = sys.argv[1:]\n" + OPTIMIZE
    photo = str(folder.parents[1] / "photo.png")
    check_output(run_with_package(code, tmp_path / "work", str(folder), photo, fresh=True))


DECODERS = {"queries": QUERIES, "deformable": {"decoder": "deformable", **DEFORMABLE}}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"detection_config": options} for name, options in DECODERS.items()},
    "mae": {"masked_image_modeling_config": {**SMALL["masked_image_modeling_config"], "objective": "mae"}},
    **{
        name: {"universal_segmentation_config": {"head": head, "num_queries": 5, "num_blocks": 1}}
        for name, head in (("universal", "queries"), ("universal_mask", "mask"))
    },
    "simmim": {"masked_image_modeling_config": {"objective": "simmim"}},
}
HEADS = {
    "semantic": "AutoModelForSemanticSegmentation",
    **dict.fromkeys(("universal", "universal_mask"), "AutoModelForUniversalSegmentation"),
    "depth": "AutoModelForDepthEstimation",
    "keypoints": "AutoModelForKeypointDetection",
    **dict.fromkeys(DECODERS, "AutoModelForObjectDetection"),
    **dict.fromkeys(("mae", "simmim"), "AutoModelForMaskedImageModeling"),
}


OPEN_HEADS = """
from PIL import Image
from transformers import pipeline
folder, _, photo_name = sys.argv[1:]
photo, remote = Image.open(photo_name), {"trust_remote_code": True}
saved = torch.load(f"{folder}/data.pt", weights_only=True)
classes = [(name, getattr(transformers, auto_class)) for name, auto_class in saved["heads"].items()]
for number, (name, auto_class) in enumerate(classes):
    model = auto_class.from_pretrained(f"{folder}/{name}", **remote).eval()
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    torch.manual_seed(0)  # masks are drawn
    assert torch.equal(model(saved["images"])[0], saved[name])
    # Each checkpoint also opens as the previous and the next class, with a new head.
    for other, auto_class in (classes[number], classes[number - 1], classes[(number + 1) % len(classes)]):
        options = saved["options"].get(other, {})
        opened, info = auto_class.from_pretrained(f"{folder}/{name}", output_loading_info=True, **options, **remote)
        assert not any(key.startswith("model.") for key in info["missing_keys"]), info
        assert bool(info["missing_keys"]) == (other != name), (name, other, info)
        opened.eval()(saved["images"])

def pixels(mask):
    return torch.tensor(list(mask.tobytes())).reshape(mask.size[::-1]) > 0

def check_fast(pipe):
    assert type(pipe).__module__.startswith("transformers_modules"), type(pipe)
    assert type(pipe).__name__ in ("HfViT" + type(pipe).stock.__name__, "HfViTKeypointDetectionPipeline")

segment = pipeline("image-segmentation", model=f"{folder}/semantic", **remote)
check_fast(segment)
inputs = segment.image_processor(photo, return_tensors="pt")
logits = torch.nn.functional.interpolate(segment.model(**inputs).logits, size=(40, 50), mode="bilinear")[0]
for options in ({}, {"subtask": "semantic"}):
    for found in (segment(photo, **options), segment([photo_name] * 3, batch_size=2, **options)[2]):
        assert {entry["label"] for entry in found} == {f"LABEL_{i}" for i in logits.argmax(0).unique()}
        for entry in found:
            assert torch.equal(pixels(entry["mask"]), logits.argmax(0) == int(entry["label"][-1])), options

segments = [pipeline("image-segmentation", model=f"{folder}/universal{head}", **remote) for head in ("", "_mask")]
check_fast(segments[1])
for segment, subtask in [(segment, s) for segment in segments for s in (None, "panoptic", "instance", "semantic")]:
    found = segment(photo, subtask=subtask, threshold=0.0, mask_threshold=0.1, overlap_mask_area_threshold=0.0)
    assert found and all(entry["mask"].size == (50, 40) for entry in found), (subtask, found)
    if subtask != "instance":  # whose masks may overlap
        assert sum(pixels(entry["mask"]).int() for entry in found).max() == 1

estimate = pipeline("depth-estimation", model=f"{folder}/depth", **remote)
check_fast(estimate)
extract = pipeline("image-feature-extraction", model=f"{folder}/mae", **remote)
check_fast(extract)
assert len(extract([photo_name] * 3)) == 3
for found in (estimate(photo), estimate([photo_name] * 3, batch_size=2)[2]):
    torch.testing.assert_close(found["predicted_depth"], saved["meters"])
    assert found["depth"].size == (50, 40)
for name in saved["decoders"]:
    detect = pipeline("object-detection", model=f"{folder}/{name}", threshold=0.0, **remote)
    check_fast(detect)
    for found in (detect(photo), detect([photo_name] * 3, batch_size=2)[2]):
        torch.testing.assert_close(torch.tensor([entry["score"] for entry in found]), saved[f"{name}_scores"])
print("opened")
"""


def test_models_of_every_task_open_without_the_package_in_the_stock_pipelines(folder: Path, tmp_path: Path) -> None:
    for problem_type in ("multi_label_classification", "regression"):
        model = build(HfViTForImageClassification, problem_type=problem_type)
        model.save_pretrained(tmp_path / problem_type)
        HfViTImageProcessor.for_model(model.config).save_pretrained(tmp_path / problem_type)
    photo = folder.parents[1] / "photo.png"
    saved = {"images": pixels(small_config()), "decoders": [*DECODERS], "options": OPTIONS, "heads": HEADS}
    for name, auto_class in HEADS.items():
        model = build(class_of(auto_class), use_mask_token=True, **OPTIONS.get(name, {}))
        model.save_pretrained(tmp_path / name)
        processor = HfViTImageProcessor.for_model(model.config)
        processor.save_pretrained(tmp_path / name)
        torch.manual_seed(0)
        with torch.no_grad():
            saved[name] = model(saved["images"])[0]
            outputs = model(**processor(Image.open(photo), return_tensors="pt"))
        if name == "depth":
            meters = processor.post_process_depth_estimation(outputs, [(40, 50)])[0]["predicted_depth"]
            assert 0 <= meters.min() < 5 < meters.max() <= 10
            saved["meters"] = meters
        if name in DECODERS:
            found = processor.post_process_object_detection(outputs, 0.0, [(40, 50)])[0]
            assert len(found["scores"]) == DECODERS[name]["num_queries"]
            saved[f"{name}_scores"] = found["scores"]
    torch.save(saved, tmp_path / "data.pt")
    arguments = (str(tmp_path), str(folder), str(photo))
    check_output(run_without_package(OPEN_CLASSIFIERS + OPTIMIZE + OPEN_HEADS, tmp_path / "work", *arguments))


PIPELINE_TASKS = {
    "AutoModel": "image-feature-extraction",
    **dict.fromkeys(("AutoModelForSemanticSegmentation", "AutoModelForUniversalSegmentation"), "image-segmentation"),
    **{
        f"AutoModelFor{task.title().replace('-', '')}": task
        for task in ("image-classification", "depth-estimation", "object-detection", "keypoint-detection")
    },
    # Auto classes whose task has no pipeline, or a pipeline that needs a tokenizer.
    **{f"AutoModelFor{task}": "" for task in ("MaskedImageModeling", "PreTraining", "ImageToImage")},
    **{f"AutoModelFor{task}": "" for task in ("ZeroShotImageClassification", "ImageTextToText")},
}
# Show all warnings and log messages. Progress bars are disabled by the environment.
OPEN_QUIETLY = """
import sys, warnings
warnings.simplefilter("always")
import transformers
root, *opened = sys.argv[1:]
for entry in opened:
    name, task = entry.split(":")
    model = getattr(transformers, name).from_pretrained(f"{root}/{name}", trust_remote_code=True)
    assert (type(model).__module__.startswith("transformers_modules")) == (sys.modules.get("hf_vit") is None)
    if task:
        transformers.pipeline(task, model=f"{root}/{name}", trust_remote_code=True)
"""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("has_package", [True, False], ids=["with the package", "without"])
@pytest.mark.parametrize("part", range(3))
def test_opening_prints_nothing(has_package: bool, part: int, tmp_path: Path) -> None:
    opened = [*PIPELINE_TASKS.items()][part::3]
    for auto_class, _ in opened:
        class_of(auto_class)(small_config()).save_pretrained(tmp_path / auto_class)
        HfViTImageProcessor().save_pretrained(tmp_path / auto_class)
    prefix, run = ("import hf_vit\n", run_with_package) if has_package else ("", run_without_package)
    process = run(prefix + OPEN_QUIETLY, tmp_path / "work", str(tmp_path), *map(":".join, opened))
    assert (process.stdout, process.stderr) == ("", "")


@pytest.mark.parametrize("task", ["Semantic", "Universal"])
def test_pipeline_opens_saved_models_if_the_package_is_imported(task: str, tmp_path: Path) -> None:
    model_class = class_of(f"AutoModelFor{task}Segmentation")
    model_class(small_config()).save_pretrained(tmp_path)
    HfViTImageProcessor().save_pretrained(tmp_path)
    assert type(pipeline("image-segmentation", model=str(tmp_path)).model) is model_class
