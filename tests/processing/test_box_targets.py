"""Detection labels: boxes follow resizing and padding, and are converted back to original pixels."""

from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pytest
import torch
from transformers import DeformableDetrImageProcessor, DetrImageProcessor
from transformers.image_transforms import center_to_corners_format
from transformers.models.detr.modeling_detr import DetrObjectDetectionOutput

from hf_vit import HfViTImageProcessor as Processor
from hf_vit.model.task_object_detection import read_labels

from ..helpers.images import noise
from .test_image_targets import GEOMETRIES, SIZE


BOXES = [[10.0, 8.0, 30.0, 20.0], [0.0, 0.0, 44.0, 30.0], [20.5, 3.25, 41.0, 29.5]]
CLASSES = [2, 0, 5]
INSIDE = [[14.0, 9.0, 20.5, 17.0], [13.0, 8.5, 30.0, 16.0]]  # boxes inside all crops


def encode(processor, boxes=BOXES, classes=CLASSES, image=None):
    image = noise(*SIZE, 3) if image is None else image
    return processor(image, boxes=[boxes], class_labels=[classes], return_tensors="pt")


def annotations(boxes=BOXES, classes=CLASSES, **fields):
    entries = [
        {"bbox": [x1, y1, x2 - x1, y2 - y1], "category_id": number, "area": (x2 - x1) * (y2 - y1), **fields}
        for (x1, y1, x2, y2), number in zip(boxes, classes, strict=True)
    ]
    return {"image_id": 7, "annotations": entries}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_box_stays_around_its_object_and_comes_back(geometry):
    """The image is white inside the box and black elsewhere, so transformed boxes must enclose the white pixels."""
    image = np.zeros(SIZE, dtype=np.uint8)
    image[8:20, 10:30] = 255
    plain = {"resample": 0, "do_rescale": False, "do_normalize": False, "num_channels": 1}
    features = encode(Processor(**GEOMETRIES[geometry], **plain), BOXES[:1], CLASSES[:1], image)
    rows, columns = (features.pixel_values[0, 0] > 0).nonzero().unbind(dim=1)
    height, width = features.pixel_values.shape[-2:]
    if "patch_attention_mask" in features:
        mask, patch = features.patch_attention_mask[0], GEOMETRIES[geometry]["ensure_multiple_of"]
        height, width = int(mask.any(dim=1).sum()) * patch[0], int(mask.any(dim=0).sum()) * patch[1]
    x, y, w, h = (features.labels[0]["boxes"][0] * torch.tensor([width, height, width, height])).tolist()
    corners = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
    seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert corners == pytest.approx([float(edge) for edge in seen], abs=1)
    assert features.labels[0]["class_labels"].tolist() == CLASSES[:1]

    processor = Processor(**GEOMETRIES[geometry])
    labels = encode(processor, INSIDE, [1, 4]).labels[0]
    assert labels["boxes"].dtype == torch.float32
    assert labels["class_labels"].dtype == torch.int64
    probabilities = torch.nn.functional.one_hot(labels["class_labels"], 6).float() * 0.9
    outputs = {"probabilities": probabilities[None], "pred_boxes": labels["boxes"][None]}
    (result,) = processor.post_process_object_detection(outputs, target_sizes=[SIZE])
    torch.testing.assert_close(result["boxes"], torch.tensor(INSIDE), atol=1e-4, rtol=0)
    assert result["labels"].tolist() == [1, 4]
    assert result["scores"].tolist() == pytest.approx([0.9, 0.9])


def test_boxes_end_at_the_image_and_what_is_cut_away_or_has_no_area_is_gone():
    # The crop contains columns 12 to 32 and rows 10 to 20.
    processor = Processor(do_resize=False, do_center_crop=True, crop_size=(10, 20))
    boxes = [[0, 0, 11, 30], [0, 12, 22, 30], [12, 10, 32, 20], [32, 0, 44, 30]]
    labels = encode(processor, boxes, [0, 1, 2, 3]).labels[0]
    assert labels["class_labels"].tolist() == [1, 2]
    torch.testing.assert_close(labels["boxes"], torch.tensor([[0.25, 0.6, 0.5, 0.8], [0.5, 0.5, 1, 1]]))
    labels = encode(Processor(size=20), [[-9, 3, 22, 15], [50, 3, 60, 9], [4, 4, 4, 9]], [0, 1, 2]).labels[0]
    assert labels["class_labels"].tolist() == [0]
    torch.testing.assert_close(labels["boxes"], torch.tensor([[0.25, 0.3, 0.5, 0.4]]))
    images = [noise(16, 24, 3), noise(30, 8, 3)]
    boxes = [[[3, 4, 9, 16]], [[1, 2, 8, 25]]]
    given = {"boxes": boxes, "class_labels": [[0], [1]], "return_tensors": "pt"}
    padded = Processor(size={"longest_edge": 32}, do_pad=True, ensure_multiple_of=8)(images, **given)
    for index, image in enumerate(images):
        height, width = image.shape[:2]
        expected = torch.tensor(boxes[index]) / torch.tensor([width, height, width, height])
        torch.testing.assert_close(padded.labels[index]["boxes"][:, 2:], expected[:, 2:] - expected[:, :2])


def test_annotations_become_the_labels_of_the_library():
    given = annotations()
    given["annotations"].append({"bbox": [1, 1, 5, 5], "category_id": 3, "area": 25, "iscrowd": 1})
    theirs = DetrImageProcessor(size={"height": 32, "width": 48}, do_pad=False)(
        noise(*SIZE, 3), annotations=given, return_tensors="pt"
    ).labels[0]
    theirs["size"] = torch.as_tensor(theirs["size"])
    for form in (given, [given]):
        ours = Processor(size=(32, 48))(noise(*SIZE, 3), annotations=form, return_tensors="pt").labels[0]
        assert ours.pop("window").tolist() == [0, 0, 1, 1]
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            torch.testing.assert_close(ours[name], values)
    for entry in given["annotations"]:  # some augmentation libraries return classes as floats
        entry["category_id"] = float(entry["category_id"])
    again = Processor(size=(32, 48))(noise(*SIZE, 3), annotations=given, return_tensors="pt").labels[0]
    assert torch.equal(again["class_labels"], theirs["class_labels"])


@dataclass
class Collected:
    """Model outputs in the form in which the detection script of transformers collects them."""

    logits: torch.Tensor
    pred_boxes: torch.Tensor


@pytest.mark.parametrize(
    ("geometry", "scores"),
    list(zip([*GEOMETRIES, "a size of padding"], cycle(["softmax", "sigmoid"]))),
)
def test_scripts_for_other_detectors_score_pixels(geometry, scores):
    """Scripts of transformers scale boxes by `orig_size`. The resulting boxes must be in pixels of the image."""
    padding = {"size": {"max_height": 32, "max_width": 32}, "do_pad": True, "pad_size": 48}
    processor = Processor(**GEOMETRIES.get(geometry, padding), class_scores=scores)
    features = processor(noise(*SIZE, 3), annotations=annotations(INSIDE, [1, 0]), return_tensors="pt")
    (label,) = features.labels
    height, width = label["orig_size"].tolist()
    pixels = center_to_corners_format(label["boxes"]) * torch.tensor([width, height, width, height])
    torch.testing.assert_close(pixels, torch.tensor(INSIDE), atol=1e-4, rtol=0)

    (seen,), mask = read_labels([label], None)
    logits = torch.full((1, 2, 2 + (scores == "softmax")), -9.0)
    logits[0, [0, 1], seen["class_labels"]] = 9.0
    outputs = Collected(logits, seen["boxes"][None])
    (found,) = processor.post_process_object_detection(outputs, target_sizes=label["orig_size"][None])
    order = found["labels"].argsort(descending=True)
    torch.testing.assert_close(found["boxes"][order], torch.tensor(INSIDE), atol=1e-4, rtol=0)
    assert label["size"].tolist() == list(features.pixel_values.shape[-2:])
    if "patch_attention_mask" in features:
        assert torch.equal(mask, features.patch_attention_mask)
    else:
        assert mask is None


def test_an_image_may_have_no_object():
    for empty in ([], np.zeros((0, 4)), torch.zeros(0, 4)):
        labels = encode(Processor(size=8), empty, []).labels[0]
        assert labels["boxes"].shape == (0, 4)
        assert labels["class_labels"].shape == (0,)
        assert labels["class_labels"].dtype == torch.int64
    nothing = Processor(size=8)(noise(*SIZE, 3), annotations={"annotations": []}, return_tensors="pt").labels[0]
    assert nothing["boxes"].shape == (0, 4)


def test_other_kinds_of_arrays(backend):
    features = backend(size=8)(noise(*SIZE, 3), boxes=np.array([BOXES]), class_labels=[CLASSES], return_tensors="np")
    assert isinstance(features["labels"][0]["boxes"], np.ndarray)
    np.testing.assert_allclose(features["labels"][0]["boxes"], encode(backend(size=8)).labels[0]["boxes"])
    joined = backend(size=8)(noise(*SIZE, 3), boxes=[BOXES], class_labels=[CLASSES])["labels"]
    assert np.asarray(joined[0]["class_labels"]).tolist() == CLASSES


def without(key):
    given = annotations()
    del given["annotations"][1][key]
    return given


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        ({"boxes": [BOXES], "class_labels": [CLASSES] * 2}, ValueError, "class_labels has 2 entries, .* 1 images"),
        ({"boxes": BOXES[:1], "class_labels": [[0]]}, ValueError, r"boxes\[0\] has the shape \(4,\), but must be"),
        ({"annotations": [annotations()] * 2}, ValueError, "annotations has 2 entries, but there are 1 images"),
        ({"annotations": [[1]]}, ValueError, r"annotations\[0\] is \[1\], but must be a dictionary"),
        ({"annotations": without("bbox")}, ValueError, r"\['annotations'\]\[1\] has no 'bbox', but only category_id"),
        ({"annotations": without("category_id")}, ValueError, r"\[1\] has no 'category_id', but only bbox"),
        ({"annotations": annotations(bbox=[1, 2, 3])}, ValueError, r"\[0\] has the bbox \[1, 2, 3\], but must be"),
        ({"annotations": annotations(category_id=1.5)}, TypeError, r"\[0\] has the category_id 1.5, but class in"),
        ({"annotations": annotations(category_id=-1)}, ValueError, "category_id .* has the number -1"),
        ({"annotations": annotations(), "boxes": [BOXES]}, ValueError, "boxes and annotations are given"),
        ({"object_boxes": [BOXES]}, ValueError, "object_boxes are given, .* only if do_affine_crop=True"),
    ],
)
def test_boxes_that_do_not_fit_are_refused(targets, error, message):
    """More invalid boxes are tested in `tests/hostile/test_targets.py`."""
    with pytest.raises(error, match=message):
        Processor(size=8)(noise(*SIZE, 3), **targets, return_tensors="pt")


def detections():
    generator = torch.Generator().manual_seed(0)
    logits, boxes = torch.randn(2, 9, 5, generator=generator), torch.rand(2, 9, 4, generator=generator)
    return DetrObjectDetectionOutput(logits=logits, pred_boxes=boxes)


def test_objects_are_those_of_the_library_also_of_a_softmax_and_in_half_precision():
    """Post-processing selects the pairs of query and class with the highest scores."""
    outputs, post_process = detections(), Processor().post_process_object_detection
    given = {"probabilities": outputs.logits.sigmoid(), "pred_boxes": outputs.pred_boxes}
    sizes = [(37, 51), (8, 70)]
    for own_sizes, threshold in ((sizes, 0.0), (torch.tensor(sizes), 0.6), (None, 1.0)):
        theirs = DeformableDetrImageProcessor().post_process_object_detection(outputs, threshold, own_sizes, top_k=9)
        for mine, other in zip(post_process(given, threshold, own_sizes), theirs, strict=True):
            assert mine.keys() == other.keys()
            for name, values in mine.items():
                torch.testing.assert_close(values, other[name])
    outputs.logits = outputs.logits * 5  # the last class is background
    theirs = DetrImageProcessor().post_process_object_detection(outputs, 0.5, sizes)
    given = {"probabilities": outputs.logits.softmax(-1)[..., :-1], "pred_boxes": outputs.pred_boxes}
    for mine, other in zip(post_process(given, 0.5, sizes), theirs, strict=True):
        order = other["scores"].argsort(descending=True)
        assert len(order) > 1
        for name, values in mine.items():
            torch.testing.assert_close(values, other[name][order])
    given = {"probabilities": torch.rand(1, 9, 5).bfloat16(), "pred_boxes": torch.rand(1, 9, 4).bfloat16()}
    full = {name: values.float() for name, values in given.items()}
    half, full = (post_process(each, 0.2, [(999, 777)])[0] for each in (given, full))
    assert half["boxes"].dtype == half["scores"].dtype == torch.float32
    assert all(torch.equal(half[name], full[name]) for name in half)


def test_outputs_and_sizes_that_do_not_fit_are_refused():
    given = {"probabilities": torch.zeros(1, 9, 5), "pred_boxes": torch.zeros(1, 9, 4)}
    unknown = Collected(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))
    for outputs, sizes, message in (
        ({"logits": torch.zeros(1, 9, 5)}, None, r"no probabilities with 3 dimensions, but logits \(1, 9, 5\)"),
        ({"probabilities": torch.zeros(1, 9, 5)}, None, "no pred_boxes .* outputs of HfViTForObjectDetection"),
        ((torch.zeros(1, 9, 5),), None, "The outputs are a tuple without names"),
        (given, [(8, 8)] * 2, "target_sizes has 2 entries, but the outputs are of 1 images"),
        (given, [(8, 0)], r"target_sizes\[0\] is \(8, 0\), but must be"),
        (unknown, None, "class_scores of the image processor is None"),
    ):
        with pytest.raises(ValueError, match=message):
            Processor().post_process_object_detection(outputs, target_sizes=sizes)
    with pytest.raises(ValueError, match="class_scores='max' must be one of softmax, sigmoid"):
        Processor(class_scores="max")
