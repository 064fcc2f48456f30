"""Image processor options chosen in training: sliding windows, and class-agnostic non-maximum suppression."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import pipeline

from hf_vit import HfViTForObjectDetection, HfViTForSemanticSegmentation, HfViTImageProcessor
from hf_vit.model.image_targets import decode_boxes

from ..helpers.fresh import run_without_package
from ..helpers.images import noise
from ..helpers.models import small_config
from ..helpers.references import draw_weights


SIZES = [(70, 90), (64, 64), (90, 70), (65, 90)]  # width, height
# The stride is two thirds of the window, rounded down to whole patches of 8 pixels.
SCALE, SIDE, STRIDE = 2.0, 32, 16
OPEN = """
import json
from transformers import pipeline
folder, file = sys.argv[1:]
segment = pipeline("image-segmentation", model=folder, trust_remote_code=True)
found = {part["label"]: sum(part["mask"].tobytes()) for part in segment(file, subtask="semantic")}
print(json.dumps([found, segment.image_processor.window_scale]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a saved model and photos of several sizes."""
    place = tmp_path_factory.mktemp("windows")
    model = HfViTForSemanticSegmentation(small_config(image_size=SIDE, num_labels=4))
    draw_weights(model)
    model.save_pretrained(place / "model")
    options = {"size": {"shortest_edge": SIDE}, "do_pad": True, "ensure_multiple_of": 8}
    HfViTImageProcessor(**options, window_scale=SCALE).save_pretrained(place / "model")
    for number, size in enumerate(SIZES):
        Image.fromarray(noise(9, 9, 3, seed=number)).resize(size).save(place / f"{number}.png")
    return place


def segment_by_hand(folder, number):
    """Return the class map (H, W) of a photo at double size, from the mean logits of all windows at each pixel."""
    model = HfViTForSemanticSegmentation.from_pretrained(folder / "model").eval()
    plain = HfViTImageProcessor.from_pretrained(folder / "model")
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


def test_pipelines_segment_windows_as_a_plain_loop_does(folder, tmp_path):
    segment = pipeline("image-segmentation", model=str(folder / "model"))
    files = [str(folder / f"{number}.png") for number in range(len(SIZES))]
    by_hand = [segment_by_hand(folder, number) for number in range(len(SIZES))]
    label2id = segment.model.config.label2id
    for batch_size in (1, 4):
        answers = segment(files, subtask="semantic", batch_size=batch_size)
        for expected, answer in zip(by_hand, answers, strict=True):
            found = np.zeros_like(expected) - 1
            for part in answer:
                found[np.asarray(part["mask"]) > 0] = label2id[part["label"]]
            assert (found == expected).mean() > 0.999  # ties depend on rounding
    # Window options are saved with the image processor.
    process = run_without_package(OPEN, tmp_path, str(folder / "model"), files[0])
    own = {part["label"]: sum(part["mask"].tobytes()) for part in segment(files[0], subtask="semantic")}
    assert json.loads(process.stdout.splitlines()[-1]) == [own, SCALE]

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


def test_one_box_for_an_object_of_whatever_class(tmp_path):
    detection = {"decoder": "queries", "num_queries": 6}
    model = HfViTForObjectDetection(small_config(num_labels=3, detection_config=detection))
    draw_weights(model)
    model.save_pretrained(tmp_path)
    HfViTImageProcessor.for_model(model, nms_threshold=0.5, class_agnostic_nms=True).save_pretrained(tmp_path)
    processor = HfViTImageProcessor.from_pretrained(tmp_path)
    boxes = torch.tensor([[[0.3, 0.3, 0.4, 0.4], [0.31, 0.3, 0.4, 0.4], [0.8, 0.8, 0.2, 0.2]]])
    scores = torch.tensor([[[0.9, 0.0, 0.0], [0.1, 0.8, 0.0], [0.0, 0.0, 0.7]]])
    outputs = {"probabilities": scores, "pred_boxes": boxes}
    for is_agnostic, labels in ((None, [0, 2]), (True, [0, 2]), (False, [0, 1, 2])):
        (found,) = processor.post_process_object_detection(outputs, 0.05, class_agnostic_nms=is_agnostic)
        assert found["labels"].tolist() == labels
    (found,) = processor.post_process_object_detection(outputs, 0.05)
    assert torch.allclose(found["boxes"], decode_boxes(boxes[0, [0, 2]], (1, 1), (0.0, 0.0, 1.0, 1.0)))
    photo = Image.fromarray(noise(40, 50, 3))
    detect = pipeline("object-detection", model=str(tmp_path), threshold=0.0)
    with torch.no_grad():
        outputs = detect.model(**processor(photo, return_tensors="pt"))
    (expected,) = processor.post_process_object_detection(outputs, 0.0, [(40, 50)], 0.5, class_agnostic_nms=True)
    assert [entry["score"] for entry in detect(photo)] == pytest.approx(expected["scores"].tolist(), abs=1e-5)
