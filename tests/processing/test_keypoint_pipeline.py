"""Pipelines for keypoint and object detection: inputs, outputs, and use without hf_vit."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, pipeline
from transformers.pipelines.pt_utils import KeyDataset

from hf_vit import (
    HfViTBackbone,
    HfViTForImageClassification,
    HfViTForKeypointDetection,
    HfViTForObjectDetection,
    HfViTImageProcessor,
)
from hf_vit.model.remote_code import CUSTOM_PIPELINES
from hf_vit.model.task_keypoint_detection import HfViTKeypointDetectionPipeline
from hf_vit.model.task_object_detection import HfViTObjectDetectionPipeline

from ..helpers.fresh import run_without_package
from ..helpers.images import noise
from ..helpers.models import small_config
from ..helpers.references import draw_weights


NAMES = ["nose", "left eye", "right eye"]
POSE = {
    "num_labels": 3,
    "id2label": dict(enumerate(NAMES)),
    "label2id": {name: number for number, name in enumerate(NAMES)},
    "keypoint_config": {"hidden_size": 8, "flip_pairs": [(1, 2)], "skeleton": [(0, 1), (0, 2)]},
}
BOXES = [[10, 5, 30, 35], [0, 0, 25, 20.5], [20, 10, 49, 39]]
DETECTION = {"detection_config": {"decoder": "queries", "num_queries": 6}}
# Only the first of six object scores is above 0.5, and only two are above this threshold.
THRESHOLD = 0.3


def with_threshold(overrides, threshold=THRESHOLD):
    """Return the configuration overrides with a score threshold for their tasks."""
    return {
        name: {**value, "score_threshold": threshold} if name.endswith("_config") else value
        for name, value in overrides.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a keypoint model at `pose`, a detection model at `objects`, and two photos."""
    folder = tmp_path_factory.mktemp("models")
    for name, model_class, config, crops in (
        ("pose", HfViTForKeypointDetection, small_config(**POSE), True),
        ("objects", HfViTForObjectDetection, small_config(**with_threshold(DETECTION)), False),
    ):
        model = model_class(config)
        draw_weights(model)
        model.eval().save_pretrained(folder / name)
        HfViTImageProcessor.for_model(config, do_affine_crop=crops).save_pretrained(folder / name)
    for seed, size in enumerate(((40, 50), (60, 30))):
        Image.fromarray(noise(*size, 3, seed=seed)).save(folder / f"{seed}.png")
    return folder


@pytest.fixture(scope="module")
def pipe(folder):
    """Return a pipeline of the model that uses the installed package and no Python code from the model folder."""
    opened = pipeline("keypoint-detection", model=str(folder / "pose"))
    assert type(opened) is HfViTKeypointDetectionPipeline
    return opened


def photo(folder, number=0):
    return Image.open(folder / f"{number}.png")


def expected(folder, image, boxes, threshold=None):
    """Return predictions computed with the model and the image processor, without a pipeline."""
    model = HfViTForKeypointDetection.from_pretrained(folder / "pose").eval()
    processor = HfViTImageProcessor.from_pretrained(folder / "pose")
    with torch.no_grad():
        outputs = model(**processor(image, object_boxes=[boxes], return_tensors="pt"))
    sizes = [(image.height, image.width)]
    (found,) = processor.post_process_keypoint_detection(outputs, [boxes], sizes, threshold)
    return [
        {
            "keypoints": one["keypoints"].tolist(),
            "scores": one["scores"].tolist(),
            "labels": [NAMES[number] for number in one["labels"]],
            "box": dict(zip(("xmin", "ymin", "xmax", "ymax"), one["box"].tolist(), strict=True)),
        }
        for one in found
    ]


def assert_same(actual, wanted):
    assert len(actual) == len(wanted)
    for mine, other in zip(actual, wanted, strict=True):
        assert mine.keys() == other.keys()
        assert mine["labels"] == other["labels"]
        assert mine["box"] == pytest.approx(other["box"])
        assert np.allclose(mine["scores"], other["scores"], atol=1e-5)
        assert np.allclose(mine["keypoints"], other["keypoints"], atol=1e-2)


def test_it_says_what_the_model_says(folder, pipe):
    found = pipe(photo(folder), boxes=BOXES)
    assert_same(found, expected(folder, photo(folder), BOXES))
    json.dumps(found)  # results must be JSON-serializable
    (whole,) = pipe(photo(folder))
    assert whole["labels"] == NAMES
    assert whole["box"] == {"xmin": 0, "ymin": 0, "xmax": 50, "ymax": 40}
    assert_same([whole], expected(folder, photo(folder), None))
    # Boxes may be results of object detection, lists, tuples, arrays or tensors.
    named = [dict(zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)) for box in BOXES]
    wrapped = [{"score": 0.9, "label": "person", "box": box} for box in named]
    for boxes in (named, wrapped, [named[0], BOXES[1], tuple(BOXES[2])], np.array(BOXES), torch.tensor(BOXES)):
        assert_same(pipe(photo(folder), boxes=boxes), found)
    # Optionally, predictions are averaged with those of the mirrored image.
    crops = pipe.image_processor(photo(folder), object_boxes=[BOXES], return_tensors="pt").pixel_values
    heatmaps = pipe.model.predict_flipped(crops).heatmaps
    (wanted,) = pipe.image_processor.post_process_keypoint_detection({"heatmaps": heatmaps}, [BOXES])
    found = pipe(photo(folder), boxes=BOXES, flip_test=True)
    for mine, other in zip(found, wanted, strict=True):
        assert np.allclose(mine["keypoints"], other["keypoints"], atol=1e-2)
        assert np.allclose(mine["scores"], other["scores"], atol=1e-5)


def test_a_threshold_leaves_keypoints_out_and_that_of_the_model_is_the_default(folder, pipe):
    scores = sorted(score for one in pipe(photo(folder), boxes=BOXES) for score in one["scores"])
    found = pipe(photo(folder), boxes=BOXES, threshold=scores[4])
    assert sum(len(one["keypoints"]) for one in found) == len(scores) - 5
    assert_same(found, expected(folder, photo(folder), BOXES, scores[4]))
    model = HfViTForKeypointDetection(small_config(**with_threshold(POSE, scores[4])))
    model.load_state_dict(pipe.model.state_dict())
    own = pipeline("keypoint-detection", model=model.eval(), image_processor=pipe.image_processor)
    assert_same(own(photo(folder), boxes=BOXES), found)
    lower = {"boxes": BOXES, "threshold": scores[1]}
    assert_same(own(photo(folder), **lower), pipe(photo(folder), **lower))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_images_of_any_number_of_boxes_in_any_batch(folder, pipe, batch_size):
    files, boxes = [str(folder / f"{number}.png") for number in (0, 1, 0, 1)], [BOXES, [], None, BOXES[:1]]
    wanted = [expected(folder, photo(folder, i % 2), own) if own != [] else [] for i, own in enumerate(boxes)]
    rows = [{"image": file, "boxes": own} for file, own in zip(files, boxes, strict=True)]
    options = {"boxes": boxes, "batch_size": batch_size}
    for kind, is_list in (
        (pipe(files, **options), True),
        (pipe([Image.open(file) for file in files], **options), True),
        (pipe(rows, batch_size=batch_size), True),
        (pipe((Image.open(file) for file in files), **options), False),
        (pipe(KeyDataset(rows, "image"), **options), False),
    ):
        assert isinstance(kind, list) == is_list
        for found, own in zip(kind, wanted, strict=True):
            assert_same(found, own)


def test_a_batch_is_one_pass_of_the_model(folder, pipe):
    sizes = []
    hook = pipe.model.register_forward_pre_hook(
        lambda _, args, inputs: sizes.append(len(inputs["pixel_values"])), with_kwargs=True
    )
    pipe([photo(folder)] * 2, boxes=[BOXES, BOXES[:2]], batch_size=4)
    hook.remove()
    assert sizes == [4, 1]


def test_inputs_that_do_not_fit_are_refused(folder, pipe):
    for boxes, message in (
        ([1, 2, 3, 4], r"has the shape \(4,\), but must be \(N, 4\)"),
        ([[60, 2, 70, 9]], r"\[0\] is .* outside of its image of 50 x 40 pixels"),
        ([{"xmin": 1, "ymin": 2}], r"boxes\[0\] is \{'xmin': 1, 'ymin': 2\}, but must have xmin, ymin, xmax, ymax"),
    ):
        with pytest.raises(ValueError, match=message):
            pipe(photo(folder), boxes=boxes)
        with pytest.raises(ValueError, match=message):
            pipe([photo(folder)] * 2, boxes=[None, boxes])
    with pytest.raises(ValueError, match="boxes has 1 entries, but there are 2 images"):
        pipe([photo(folder)] * 2, boxes=[BOXES])
    with pytest.raises(ValueError, match="a dictionary must have an 'image'"):
        pipe({"photo": photo(folder)})
    with pytest.raises(OSError, match=r"nowhere\.png"):
        pipe("nowhere.png")


def test_repeated_boxes_are_left_out_on_request(folder):
    detect = pipeline("object-detection", model=str(folder / "objects"))
    assert type(detect) is HfViTObjectDetectionPipeline
    whole = detect(photo(folder), threshold=0.0)
    surest = detect(photo(folder), threshold=0.0, nms_threshold=0.0)
    assert detect(photo(folder), threshold=0.0, nms_threshold=1.0) == whole
    assert 0 < len(surest) < len(whole)
    assert all(one in whole for one in surest)


def test_models_name_the_pipelines_that_know_them(folder, tmp_path):
    def named(place):
        return json.loads((place / "config.json").read_text()).get("custom_pipelines")

    assert named(folder / "pose") == CUSTOM_PIPELINES["HfViTForKeypointDetection"]
    assert named(folder / "objects") == CUSTOM_PIPELINES["HfViTForObjectDetection"]
    HfViTForImageClassification.from_pretrained(folder / "pose").save_pretrained(tmp_path / "other")
    assert named(tmp_path / "other") == CUSTOM_PIPELINES["HfViTForImageClassification"]
    HfViTBackbone(small_config()).save_pretrained(tmp_path / "maps")
    assert named(tmp_path / "maps") is None
    pipeline("keypoint-detection", model=str(folder / "pose")).save_pretrained(tmp_path / "again")
    assert named(tmp_path / "again") == CUSTOM_PIPELINES["HfViTForKeypointDetection"]
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "again").config.id2label[0] == "nose"


OPEN = """
import json
from transformers import AutoModelForImageClassification, pipeline
folder, boxes = sys.argv[1], json.loads(sys.argv[2])
remote = {"trust_remote_code": True}
task, pose, photo = "keypoint-detection", f"{folder}/pose", f"{folder}/0.png"
for task, place in ((task, pose), (None, pose), (task, "again")):
    pipe = pipeline(task, model=place, **remote)
    assert type(pipe).__module__.startswith("transformers_modules"), type(pipe)
    single, *others = pipe([photo] * 3, boxes=[boxes, [], None], batch_size=2)
    assert others == [[], pipe(photo)]
    pipe.save_pretrained("again")
detect = pipeline("object-detection", model=f"{folder}/objects", **remote)
objects = detect(photo, threshold=0.0)
scores = [entry["score"] for entry in objects]
for given, least in (({}, json.loads(sys.argv[3])), ({"threshold": 0.5}, 0.5), ({"threshold": 0.25}, 0.25)):
    assert [entry["score"] for entry in detect(photo, **given)] == [score for score in scores if score > least], given
detect.save_pretrained("objects")
assert len(pipeline(model="objects", **remote)(photo)) == 2  # found without the name of a task, too
for batched in detect([photo] * 3, threshold=0.0, batch_size=2):
    assert [entry["box"] for entry in batched] == [entry["box"] for entry in objects]
AutoModelForImageClassification.from_pretrained("again", **remote).save_pretrained("classes")
assert [*json.load(open("classes/config.json"))["custom_pipelines"]] == ["image-classification"]
print(json.dumps([single, objects]))
"""


def test_both_pipelines_open_where_the_package_is_not(folder, pipe, tmp_path):
    process = run_without_package(OPEN, tmp_path, str(folder), json.dumps(BOXES), json.dumps(THRESHOLD))
    assert "not supported" not in process.stderr
    keypoints, objects = json.loads(process.stdout.splitlines()[-1])
    assert_same(keypoints, pipe(photo(folder), boxes=BOXES))
    model = HfViTForObjectDetection.from_pretrained(folder / "objects").eval()
    processor = HfViTImageProcessor.from_pretrained(folder / "objects")
    with torch.no_grad():
        outputs = model(**processor(photo(folder), return_tensors="pt"))
    (wanted,) = processor.post_process_object_detection(outputs, 0.0, [(40, 50)])
    assert len(objects) == 6
    for entry, score, label, box in zip(objects, *(wanted[name].tolist() for name in wanted), strict=True):
        assert entry["score"] == pytest.approx(score, abs=1e-5)
        assert entry["label"] == f"LABEL_{label}"
        assert list(entry["box"].values()) == pytest.approx(box, abs=1.01)  # the pipeline truncates fractions
