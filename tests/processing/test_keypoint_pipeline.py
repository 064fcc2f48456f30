"""Test pipelines for keypoints, objects and segmentation with sliding windows, with and without the package."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoModelForImageClassification, pipeline
from transformers.pipelines.pt_utils import KeyDataset

from hf_vit import (
    HfViTBackbone,
    HfViTForImageClassification,
    HfViTForKeypointDetection,
    HfViTForObjectDetection,
    HfViTForSemanticSegmentation,
    HfViTImageProcessor,
)
from hf_vit.model import task_keypoint_detection
from hf_vit.model.image_targets import decode_boxes
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
# One of the six object scores is above 0.5, the default threshold, and two are above `THRESHOLD`.
THRESHOLD = 0.3


# Images are segmented at twice the usual size with sliding windows. The stride is two thirds of the window side,
# rounded down to whole patches.
SCALE, SIDE, STRIDE = 2.0, 32, 16
WINDOWED = {"size": {"shortest_edge": SIDE}, "do_pad": True, "ensure_multiple_of": 8, "window_scale": SCALE}
SIZES = [(50, 40), (30, 60), (70, 90), (64, 64), (90, 70), (65, 90)]  # width, height


def with_threshold(overrides, threshold=THRESHOLD):
    """Return `overrides` of configuration fields, extended with a score threshold for the task."""
    limit = {"score_threshold": threshold}
    return {name: {**value, **limit} if name.endswith("_config") else value for name, value in overrides.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with models for keypoints, objects and segmentation, and photos of several sizes."""
    folder = tmp_path_factory.mktemp("models")
    for name, model_class, config, options in (
        ("pose", HfViTForKeypointDetection, small_config(**POSE), {"do_affine_crop": True}),
        ("objects", HfViTForObjectDetection, small_config(**with_threshold(DETECTION)), {}),
        ("windows", HfViTForSemanticSegmentation, small_config(image_size=SIDE, num_labels=4), WINDOWED),
    ):
        model = model_class(config)
        draw_weights(model)
        model.eval().save_pretrained(folder / name)
        HfViTImageProcessor.for_model(config, **options).save_pretrained(folder / name)
    for seed, size in enumerate(SIZES):
        pixels = noise(*size[::-1], 3, seed=seed) if seed < 2 else noise(9, 9, 3, seed=seed)
        Image.fromarray(pixels).resize(size).save(folder / f"{seed}.png")
    return folder


@pytest.fixture(scope="module")
def pipe(folder):
    """Return a pipeline that uses the installed package instead of the Python code in the model folder."""
    opened = pipeline("keypoint-detection", model=str(folder / "pose"))
    assert type(opened) is HfViTKeypointDetectionPipeline
    return opened


@pytest.mark.parametrize(
    ("share", "padding", "size"),
    [(0.07, 1.25, " that cover 7% of their images (median)"), (None, 1.25, ""), (0.9, 1.25, None), (None, 1, None)],
)
def test_a_model_of_crops_warns_of_whole_images(pipe, folder, share, padding, size, monkeypatch):
    warned = []
    monkeypatch.setattr(task_keypoint_detection.logger, "warning_once", warned.append)
    monkeypatch.setattr(pipe.model.options, "object_share", share)
    monkeypatch.setattr(pipe.image_processor, "box_padding", padding)
    pipe(photo(folder), boxes=BOXES)
    assert not warned
    pipe(photo(folder))
    assert len(warned) == (size is not None)
    assert size is None or f"this model was trained on crops of objects{size}. Pass the boxes" in warned[0]


def photo(folder, number=0):
    return Image.open(folder / f"{number}.png")


def expected(folder, image, boxes, threshold=None):
    """Return the predictions for an image, computed with the model and the image processor instead of a pipeline."""
    model = HfViTForKeypointDetection.from_pretrained(folder / "pose").eval()
    processor = HfViTImageProcessor.from_pretrained(folder / "pose")
    with torch.no_grad():
        outputs = model(**processor(image, object_boxes=[boxes], return_tensors="pt"))
    sizes = [(image.height, image.width)]
    (found,) = processor.post_process_keypoint_detection(outputs, [boxes], sizes, threshold)
    found = [{name: values.tolist() for name, values in one.items()} for one in found]
    return [{**one, "labels": [NAMES[number] for number in one["labels"]], "box": named(one["box"])} for one in found]


def named(box):
    return dict(zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))


def assert_same(actual, wanted):
    assert len(actual) == len(wanted)
    for mine, other in zip(actual, wanted, strict=True):
        assert mine.keys() == other.keys()
        assert mine["labels"] == other["labels"]
        assert mine["box"] == pytest.approx(other["box"])
        assert np.allclose(mine["scores"], other["scores"], atol=1e-5)
        assert np.allclose(mine["keypoints"], other["keypoints"], atol=1e-2)


def test_keypoint_pipeline_returns_the_model_predictions(folder, pipe):
    found = pipe(photo(folder), boxes=BOXES)
    assert_same(found, expected(folder, photo(folder), BOXES))
    json.dumps(found)  # results must be JSON-serializable
    (whole,) = pipe(photo(folder))
    assert whole["labels"] == NAMES
    assert whole["box"] == {"xmin": 0, "ymin": 0, "xmax": 50, "ymax": 40}
    assert_same([whole], expected(folder, photo(folder), None))
    # Boxes may be results of object detection, lists, tuples, arrays or tensors.
    dictionaries = [named(box) for box in BOXES]
    wrapped = [{"score": 0.9, "label": "person", "box": box} for box in dictionaries]
    for boxes in (
        dictionaries,
        wrapped,
        [dictionaries[0], BOXES[1], tuple(BOXES[2])],
        np.array(BOXES),
        torch.tensor(BOXES),
    ):
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
    with pytest.raises(ValueError, match="has no key 'image'"):
        pipe({"photo": photo(folder)})
    with pytest.raises(OSError, match=r"nowhere\.png"):
        pipe("nowhere.png")


def test_saved_models_name_their_custom_pipelines(folder, tmp_path):
    def pipelines_of(place):
        return json.loads((place / "config.json").read_text()).get("custom_pipelines")

    assert pipelines_of(folder / "pose") == CUSTOM_PIPELINES["HfViTForKeypointDetection"]
    assert pipelines_of(folder / "objects") == CUSTOM_PIPELINES["HfViTForObjectDetection"]
    HfViTForImageClassification.from_pretrained(folder / "pose").save_pretrained(tmp_path / "other")
    assert pipelines_of(tmp_path / "other") == CUSTOM_PIPELINES["HfViTForImageClassification"]
    HfViTBackbone(small_config()).save_pretrained(tmp_path / "maps")
    assert pipelines_of(tmp_path / "maps") is None
    pipeline("keypoint-detection", model=str(folder / "pose")).save_pretrained(tmp_path / "again")
    assert pipelines_of(tmp_path / "again") == CUSTOM_PIPELINES["HfViTForKeypointDetection"]
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
segment = pipeline("image-segmentation", model=f"{folder}/windows", **remote)
parts = {part["label"]: sum(part["mask"].tobytes()) for part in segment(f"{folder}/2.png", subtask="semantic")}
print(json.dumps([single, objects, parts, segment.image_processor.window_scale]))
"""


def test_pipelines_open_where_the_package_is_not(folder, pipe, tmp_path):
    process = run_without_package(OPEN, tmp_path, str(folder), json.dumps(BOXES), json.dumps(THRESHOLD))
    assert "not supported" not in process.stderr
    keypoints, objects, segments, scale = json.loads(process.stdout.splitlines()[-1])
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
        assert list(entry["box"].values()) == pytest.approx(box, abs=1.01)  # the pipeline truncates box coordinates
    segment, photo_file = pipeline("image-segmentation", model=str(folder / "windows")), str(folder / "2.png")
    own = {part["label"]: sum(part["mask"].tobytes()) for part in segment(photo_file, subtask="semantic")}
    assert (segments, scale) == (own, SCALE)  # the processor saves window options


def segment_by_hand(folder, number):
    """Return the class map (H, W) of a photo at double size, from the mean logits of all windows at each pixel."""
    model = HfViTForSemanticSegmentation.from_pretrained(folder / "windows").eval()
    plain = HfViTImageProcessor.from_pretrained(folder / "windows")
    larger = HfViTImageProcessor(size={"shortest_edge": 2 * SIDE}, ensure_multiple_of=8)
    photo = Image.open(folder / f"{number}.png")
    assert plain(photo, return_tensors="pt")["pixel_values"].shape[-2:] != (2 * SIDE, 2 * SIDE)
    pixels = larger(photo, return_tensors="pt")["pixel_values"]
    height, width = pixels.shape[-2:]
    total, count = torch.zeros(4, height, width), torch.zeros(height, width)
    for top in {*range(0, height - SIDE, STRIDE), height - SIDE}:
        for left in {*range(0, width - SIDE, STRIDE), width - SIDE}:
            place = (slice(top, top + SIDE), slice(left, left + SIDE))
            with torch.no_grad():
                logits = model(pixels[(..., *place)]).logits
            total[(..., *place)] += F.interpolate(logits, size=(SIDE, SIDE), mode="bilinear")[0]
            count[place] += 1
    resized = F.interpolate((total / count)[None], size=(photo.height, photo.width), mode="bilinear")
    return resized[0].argmax(dim=0).numpy()


def test_pipelines_segment_windows_as_a_plain_loop_does(folder):
    segment = pipeline("image-segmentation", model=str(folder / "windows"))
    files = [str(folder / f"{number}.png") for number in range(2, len(SIZES))]
    by_hand = [segment_by_hand(folder, number) for number in range(2, len(SIZES))]
    label2id = segment.model.config.label2id
    for batch_size in (1, 4):
        answers = segment(files, subtask="semantic", batch_size=batch_size)
        for expected, answer in zip(by_hand, answers, strict=True):
            found = np.zeros_like(expected) - 1
            for part in answer:
                found[np.asarray(part["mask"]) > 0] = label2id[part["label"]]
            assert (found == expected).mean() > 0.999  # rounding errors decide between nearly equal logits

    segment.image_processor.window_scale = None
    inputs = segment.image_processor(Image.open(files[0]), return_tensors="pt")
    with torch.no_grad():
        outputs = segment.model(**inputs)
    (expected,) = segment.image_processor.post_process_semantic_segmentation(outputs, [(90, 70)])
    for part in segment(files[0], subtask="semantic"):
        assert ((np.asarray(part["mask"]) > 0) == (expected == label2id[part["label"]]).numpy()).all()
    assert not (by_hand[0] == expected.numpy()).all()


def test_a_processor_itself_makes_the_plain_size_and_bad_scales_are_refused():
    processor = HfViTImageProcessor(size=(32, 48), window_scale=1.5)
    photo = Image.new("RGB", (90, 70))
    assert processor(photo, return_tensors="pt")["pixel_values"].shape[-2:] == (32, 48)
    assert processor.window_size == (32, 48)
    larger = processor.at_window_scale()
    assert larger(photo, return_tensors="pt")["pixel_values"].shape[-2:] == (48, 72)
    assert larger.at_window_scale() is larger
    for value in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be at least 1, or None"):
            processor(photo, window_scale=value)


def test_repeated_boxes_are_left_out_on_request_of_the_call_or_the_processor(folder, tmp_path):
    detect = pipeline("object-detection", model=str(folder / "objects"))
    assert type(detect) is HfViTObjectDetectionPipeline
    whole = detect(photo(folder), threshold=0.0)
    surest = detect(photo(folder), threshold=0.0, nms_threshold=0.0)
    assert detect(photo(folder), threshold=0.0, nms_threshold=1.0) == whole
    assert 0 < len(surest) < len(whole)
    assert all(one in whole for one in surest)
    # Suppression across classes removes overlapping boxes of other classes.
    detect.model.save_pretrained(tmp_path)
    HfViTImageProcessor.for_model(detect.model, nms_threshold=0.5, class_agnostic_nms=True).save_pretrained(tmp_path)
    processor = HfViTImageProcessor.from_pretrained(tmp_path)
    boxes = torch.tensor([[[0.3, 0.3, 0.4, 0.4], [0.31, 0.3, 0.4, 0.4], [0.8, 0.8, 0.2, 0.2]]])
    scores = torch.tensor([[[0.9, 0.0, 0.0], [0.1, 0.8, 0.0], [0.0, 0.0, 0.7]]])
    outputs = {"probabilities": scores, "pred_boxes": boxes}
    for is_agnostic, labels in ((None, [0, 2]), (True, [0, 2]), (False, [0, 1, 2])):
        (found,) = processor.post_process_object_detection(outputs, 0.05, class_agnostic_nms=is_agnostic)
        assert found["labels"].tolist() == labels
    (found,) = processor.post_process_object_detection(outputs, 0.05)
    assert torch.allclose(found["boxes"], decode_boxes(boxes[0, [0, 2]], (1, 1), (0.0, 0.0, 1.0, 1.0)))
    detect = pipeline("object-detection", model=str(tmp_path), threshold=0.0)
    with torch.no_grad():
        outputs = detect.model(**processor(photo(folder), return_tensors="pt"))
    (expected,) = processor.post_process_object_detection(outputs, 0.0, [(40, 50)], 0.5, class_agnostic_nms=True)
    assert [entry["score"] for entry in detect(photo(folder))] == pytest.approx(expected["scores"].tolist(), abs=1e-5)
