"""Test that object crops have the pixels and keypoint positions of ViTPose, and that points can be mapped back."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image
from transformers import VitPoseImageProcessor
from transformers.models.vitpose.image_processing_vitpose import box_to_center_and_scale, transform_preds

from hf_vit import HfViTImageProcessor as Processor
from hf_vit.model.image_geometry import crop_region, crop_regions, points_from_crops, points_to_crops
from hf_vit.model.task_keypoint_detection import encode_keypoints

from ..helpers.images import BACKENDS, noise


SIZE = (64, 48)
CROPS = {"do_affine_crop": True, "size": SIZE}
WHOLE = {"do_rescale": False, "do_normalize": False}
# Boxes (left, top, right, bottom): wide, tall, larger than the image, beyond image corners, smaller than a pixel.
BOXES = [[10, 8, 200, 60], [30.5, 20.25, 61, 190], [-30, -50, 400, 330], [-40, 90, 70, 420], [99.2, 50.1, 99.9, 50.9]]


@pytest.fixture(scope="module")
def photo():
    return load_sample_image("china.jpg")[:300, :400].copy()


def as_coco(boxes):
    return [[x1, y1, x2 - x1, y2 - y1] for x1, y1, x2, y2 in boxes]


def keypoints(count, seed=0):
    """Return three keypoints per object, the second of which is unlabeled."""
    points = np.random.default_rng(seed).uniform(0, 200, (count, 3, 3)).astype(np.float32)
    points[..., 2] = [2, 0, 1]
    points[:, 1] = 0
    return points


def test_crops_are_those_of_vitpose(photo):
    ours = Processor(**CROPS, **WHOLE)(photo, object_boxes=[BOXES], return_tensors="pt").pixel_values
    given = {"boxes": [as_coco(BOXES)], "return_tensors": "pt"}
    theirs = VitPoseImageProcessor(size={"height": 64, "width": 48}, **WHOLE)(photo, **given).pixel_values
    difference = (ours - theirs).abs()
    assert difference.max() <= 1  # values halfway between integers may be rounded differently
    assert (difference > 0).float().mean() < 1e-3
    assert (ours[2:4] == 0).any()
    assert (ours > 0).any(dim=(1, 2, 3)).all()
    given = {"object_boxes": [BOXES], "keypoints": [keypoints(len(BOXES))], "return_tensors": "pt"}
    first, second = (processor(**CROPS)(photo, **given) for processor in BACKENDS.values())
    assert torch.equal(first.pixel_values, second.pixel_values)
    assert torch.equal(first.labels, second.labels)


def test_a_region_of_the_size_of_the_image_is_the_image_and_floats_are_not_rounded():
    image = torch.from_numpy(noise(*SIZE, 3)).movedim(-1, 0)
    region = torch.tensor([0, 0, SIZE[1] - 1, SIZE[0] - 1])
    assert torch.equal(crop_region(image, region, SIZE), image)
    assert torch.equal(crop_region(image, region + 1, SIZE)[:, :-1, :-1], image[:, 1:, 1:])
    image = np.tile(np.linspace(0, 1, 48, dtype=np.float32), (64, 1))
    processor = Processor(**CROPS, **WHOLE, box_padding=1, num_channels=1)
    crop = processor(image, object_boxes=[[[10, 10, 33.5, 41.33]]], return_tensors="pt").pixel_values[0, 0]
    torch.testing.assert_close(crop, torch.linspace(10 / 47, 33.5 / 47, 48).expand(64, -1))


def test_without_boxes_the_whole_image_is_the_object_and_no_objects_have_no_crops(photo):
    processor = Processor(**CROPS)
    whole = processor(photo, object_boxes=[[[0, 0, 400, 300]]], return_tensors="pt").pixel_values
    for boxes in (None, [None]):
        assert torch.equal(processor(photo, object_boxes=boxes, return_tensors="pt").pixel_values, whole)
    mixed = processor([photo, photo], object_boxes=[BOXES[:2], None], return_tensors="pt").pixel_values
    assert torch.equal(mixed[2:], whole)
    assert len(mixed) == 3
    nothing = np.zeros((0, 4))
    none = processor([photo] * 2, object_boxes=[nothing, []], keypoints=[np.zeros((0, 3, 3))] * 2, return_tensors="pt")
    assert none.pixel_values.shape == (0, 3, *SIZE)
    assert none.labels.shape == (0, 3, 3)
    some = processor([photo] * 2, object_boxes=[nothing, BOXES], return_tensors="pt").pixel_values
    assert torch.equal(some, processor(photo, object_boxes=[BOXES], return_tensors="pt").pixel_values)


def test_keypoints_follow_their_pixels_and_do_not_count_outside_of_the_crop():
    """The first keypoint is on the only bright pixel. Keypoint and pixel must have the same position in the crop."""
    image = np.zeros((90, 120, 3), dtype=np.uint8)
    image[33, 57] = 255
    given = {"object_boxes": [[[35, 15, 70, 60]]], "keypoints": [[[[57, 33, 2], [0, 0, 0]]]], "return_tensors": "pt"}
    features = Processor(**CROPS, **WHOLE)(image, **given)
    brightest = divmod(int(features.pixel_values[0, 0].argmax()), SIZE[1])
    assert features.labels[0, 0, :2].tolist() == pytest.approx(brightest[::-1], abs=0.6)
    assert features.labels[0, 1].tolist() == [0, 0, 0]
    # Keypoints outside of the crop are marked as unlabeled, as in training.
    points = [[10, 20, 2], [40.2, 60, 1], [40.5, 60, 2], [25, 19, 2], [25, 40, 0]]
    given = {"object_boxes": [[[10, 20, 40, 60]]], "keypoints": [[points]], "return_tensors": "pt"}
    labels = Processor(**CROPS, box_padding=1)(image, **given).labels[0]
    assert labels[:, 2].tolist() == [2, 1, 0, 0, 0]
    assert not labels[2:].any()


@pytest.mark.parametrize("padding", [1.25, 1])
def test_places_go_to_the_crop_and_back_as_in_vitpose(padding):
    regions = crop_regions(torch.tensor(BOXES), SIZE, padding)
    points = torch.rand(len(BOXES), 7, 2) * 300
    for size in (SIZE, (16, 12)):  # SIZE is the crop size, (16, 12) the heatmap size
        back = points_from_crops(points_to_crops(points, regions, size), regions, size)
        torch.testing.assert_close(back, points, rtol=1e-5, atol=1e-4)
        corners = points_to_crops(regions.view(-1, 2, 2), regions, size)
        torch.testing.assert_close(corners[2], torch.tensor([[0, 0], [size[1] - 1, size[0] - 1]]).double())
        for box, region, own in zip(as_coco(BOXES), regions, points, strict=True):
            center, scale = box_to_center_and_scale(box, SIZE[1], SIZE[0], padding_factor=padding)
            theirs = transform_preds(own.double().numpy(), center, scale, size)
            ours = points_from_crops(own[None].double(), region[None], size)[0]
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("scale", [1, 4])
def test_keypoints_are_recovered_from_heatmaps(photo, scale):
    """Convert keypoints to heatmaps and back. The error is a fraction of a pixel."""
    processor, boxes = Processor(**CROPS), [BOXES[:2], None]
    truth = [keypoints(2), keypoints(1, seed=1)]
    features = processor([photo] * 2, object_boxes=boxes, keypoints=truth, return_tensors="pt")
    sizes = [(300, 400)] * 2
    heatmaps = encode_keypoints(features.labels, SIZE, (SIZE[0] // scale, SIZE[1] // scale), sigma=2.0)[0]
    results = processor.post_process_keypoint_detection({"heatmaps": heatmaps}, boxes, sizes)
    assert [len(image) for image in results] == [2, 1]
    boxes = [*BOXES[:2], [0, 0, 400, 300]]
    objects = zip([*results[0], *results[1]], np.concatenate(truth), features.labels, boxes, strict=True)
    for result, points, label, box in objects:
        assert result["box"].tolist() == box
        assert result["labels"].tolist() == [0, 1, 2]
        inside = ((label[:, :2] >= 0) & (label[:, :2] < torch.tensor(SIZE[::-1]) - 1)).all(dim=1) & (label[:, 2] > 0)
        pixel = max((box[2] - box[0]) / SIZE[1], (box[3] - box[1]) / SIZE[0]) * 1.25 * scale
        assert (result["keypoints"] - torch.tensor(points[:, :2])).abs()[inside].max() < 0.1 * pixel + 1e-3
        assert (result["scores"][inside] > 0.8).all()


def test_threshold_selects_keypoints_and_crop_options_are_saved(tmp_path):
    heatmaps = torch.rand(1, 4, 16, 12) * torch.tensor([0.2, 0.9, 0.5, 0.0])[:, None, None]
    find = Processor(**CROPS).post_process_keypoint_detection
    (every,), (sure,) = (
        find({"heatmaps": heatmaps}, [BOXES[:1]], threshold=threshold)[0] for threshold in (None, 0.3)
    )
    assert every["labels"].tolist() == [0, 1, 2, 3]
    assert sure["labels"].tolist() == [1, 2]
    for name in ("keypoints", "scores"):
        assert torch.equal(sure[name], every[name][1:3])
    # If images are already cropped, keypoints are not changed.
    points = keypoints(2)
    options = {"do_affine_crop": False, "do_resize": False, "return_tensors": "pt"}
    features = Processor(**CROPS)([noise(*SIZE, 3)] * 2, keypoints=list(points), **options)
    assert torch.equal(features.labels, torch.from_numpy(points))
    assert features.pixel_values.shape == (2, 3, *SIZE)
    # Crop options are saved with the processor.
    Processor(**CROPS, box_padding=1.5).save_pretrained(tmp_path)
    loaded = Processor.from_pretrained(tmp_path)
    assert loaded.do_affine_crop is True
    assert loaded.box_padding == 1.5


def test_invalid_boxes_and_keypoints_raise(photo):
    """More invalid boxes and keypoints are tested in `tests/hostile/test_targets.py`."""
    for images, given, message in (
        (photo, {"object_boxes": [BOXES] * 2}, "object_boxes has 2 entries, but there are 1 images"),
        (photo, {"object_boxes": BOXES[:1]}, r"object_boxes\[0\] has the shape \(4,\), but must be \(N, 4\)"),
        (photo, {"object_boxes": [[[9, 9, 4, 20]]]}, r"object_boxes\[0\]\[0\] is .* right >= left"),
        (photo, {"class_labels": [[1]], "boxes": [BOXES[:1]]}, "boxes and class_labels .*, but do_affine_crop=True"),
        ([photo] * 2, {"keypoints": [keypoints(1), keypoints(1)[:, :2]]}, "The objects have 2 and 3 keypoints"),
    ):
        with pytest.raises(ValueError, match=message):
            Processor(**CROPS)(images, **given, return_tensors="pt")
    with pytest.raises(ValueError, match="only if do_affine_crop=True"):
        Processor(size=SIZE)(photo, keypoints=[keypoints(1)], return_tensors="pt")
    for options, message in (
        ({"size": {"shortest_edge": 64}}, r"needs an exact size, but size=\{'shortest_edge': 64\}"),
        ({"size": (64, 1)}, "of at least 2"),
        ({"do_center_crop": True, "crop_size": 32}, "cannot be combined with do_center_crop or do_pad"),
        ({"box_padding": 0}, "box_padding=0 must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            Processor(**{**CROPS, **options})
    heatmaps = {"heatmaps": torch.rand(2, 3, 16, 12)}
    unknown = r"object_boxes\[0\] is None \(the whole image\), but the image size is unknown."
    no_heatmaps = r"no heatmaps with 4 dimensions, but logits \(2, 3\)"
    for outputs, do_crop, boxes, sizes, message in (
        (heatmaps, False, [BOXES[:2]], None, "does not crop objects"),
        (heatmaps, True, [BOXES], None, "object_boxes has 5 boxes in 1 images, but the outputs are for 2 crops"),
        (heatmaps, True, None, None, unknown),
        (heatmaps, True, [BOXES[:2]], [(3, 4)] * 2, "target_sizes has 2 entries, but the outputs are for 1 images"),
        ({"logits": torch.rand(2, 3)}, True, [BOXES], None, no_heatmaps),
        ({"logits": torch.rand(2, 3)}, False, None, None, no_heatmaps),
    ):
        processor = Processor(**{**CROPS, "do_affine_crop": do_crop})
        with pytest.raises(ValueError, match=message):
            processor.post_process_keypoint_detection(outputs, boxes, sizes)
