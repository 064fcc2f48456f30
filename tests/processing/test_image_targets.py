"""Test that both backends transform targets and boxes like the image, and that boxes can be converted back."""

from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    DeformableDetrImageProcessor,
    DetrImageProcessor,
    EomtImageProcessor,
    Mask2FormerImageProcessor,
    SegformerImageProcessor,
)
from transformers.image_transforms import center_to_corners_format
from transformers.models.detr.modeling_detr import DetrObjectDetectionOutput

from hf_vit import HfViTImageProcessor as Processor
from hf_vit import HfViTImageProcessorPil
from hf_vit.model.task_object_detection import read_labels

from ..helpers.images import noise


# Options of the image processor that enlarge, shrink, crop or pad an image of 30 x 44 pixels.
GEOMETRIES = {
    "exact": {"size": (37, 23)},
    "shortest_edge": {"size": {"shortest_edge": 20}, "ensure_multiple_of": 8},
    "crop": {"size": {"shortest_edge": 24}, "do_center_crop": True, "crop_size": (21, 30)},
    "even_crop": {"size": 41, "do_center_crop": True, "crop_size": (20, 30), "crop_rounding": "half_to_even"},
    "surround": {"size": {"longest_edge": 20}, "do_center_crop": True, "crop_size": (25, 40)},
    "pad": {"size": {"longest_edge": 24}, "do_pad": True, "ensure_multiple_of": (4, 8), "pad_size": (32, 40)},
    "pad_seen": {"size": {"longest_edge": 24}, "do_pad": True, "hide_padding": False, "pad_size": (30, 41)},
    "one_side": {"size": (20, 23), "keep_aspect_ratio": True, "ensure_multiple_of": 7},
    "as_is": {"do_resize": False},
}
SIZE = (30, 44)
IDS = {0: 4, 1: 2, 2: 2, 5: 0}


def class_map(height=SIZE[0], width=SIZE[1]):
    return np.random.default_rng(0).integers(0, 7, (height, width), dtype=np.uint8)


def id_map(height=SIZE[0], width=SIZE[1], seed=0):
    return np.random.default_rng(seed).choice(list(IDS), (height, width)).astype(np.int32)


def depth_map(height=SIZE[0], width=SIZE[1]):
    return np.random.default_rng(0).uniform(1, 9, (height, width)).astype(np.float32)


def encode(maps, image=None, kind="segmentation_maps", **options):
    image = noise(*SIZE, 3) if image is None else image
    return Processor(**options)(image, **{kind: maps}, return_tensors="pt")


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_kind_of_target_goes_where_its_image_goes(geometry):
    """The image has the values of the target and is also resized with nearest neighbor, so both must stay equal."""
    classes = class_map() + 1
    plain = {"resample": 0, "do_rescale": False, "do_normalize": False, "num_channels": 1}
    processor = Processor(**GEOMETRIES[geometry], **plain)
    image = processor(classes, return_tensors="pt").pixel_values
    expected = image[:, 0]  # pixels of the padding are 0
    features = processor(classes, segmentation_maps=classes, return_tensors="pt")
    assert torch.equal(features.pixel_values, image)
    labels = features.labels
    assert labels.dtype == torch.int64
    by_pil = HfViTImageProcessorPil(**GEOMETRIES[geometry], **plain)
    assert torch.equal(by_pil(classes, segmentation_maps=classes, return_tensors="pt").labels, labels)
    assert torch.equal(labels, torch.where(expected == 0, 255, expected.long()))
    depth = processor(classes, depth_maps=classes.astype(np.float64), return_tensors="pt").labels
    assert depth.dtype == torch.float32
    assert torch.equal(depth, expected)
    masks = np.stack([classes == number for number in (3, 5)])
    features = processor(classes, mask_labels=masks, class_labels=[8, 9], return_tensors="pt")
    assert features.mask_labels[0].dtype == torch.float32
    assert torch.equal(features.mask_labels[0], torch.stack([expected[0] == 3, expected[0] == 5]).float())
    assert features.class_labels[0].tolist() == [8, 9]


def test_sizes_are_padded_together():
    images = [noise(16, 24, 3), noise(30, 8, 3)]
    options = {"do_resize": False, "do_pad": True, "ensure_multiple_of": 8}
    maps = [class_map(16, 24), class_map(30, 8)]
    features = encode(maps, images, **options)
    assert features.pixel_values.shape[-2:] == features.labels.shape[-2:] == (32, 24)
    for labels, expected in zip(features.labels, maps, strict=True):
        height, width = expected.shape
        assert torch.equal(labels[:height, :width], torch.from_numpy(expected).long())
        assert (labels[height:] == 255).all()
        assert (labels[:, width:] == 255).all()
    depth = encode([depth_map(16, 24), depth_map(30, 8)], images, kind="depth_maps", **options).labels
    assert torch.equal(depth == 0, features.labels == 255)


def test_lists_and_arrays_are_those_of_the_images(backend):
    maps, images = [class_map(16, 24), class_map(30, 8)], [noise(16, 24, 3), noise(30, 8, 3)]
    features = backend(do_resize=False)(images, segmentation_maps=maps)
    assert [type(labels) for labels in features["labels"]] == [type(image) for image in features["pixel_values"]]
    assert all(np.array_equal(*pair) for pair in zip(features["labels"], maps, strict=True))
    features = backend()(noise(*SIZE, 3), mask_labels=np.ones((2, *SIZE)), class_labels=[1, 2], return_tensors="np")
    assert isinstance(features["mask_labels"][0], np.ndarray)
    assert features["class_labels"][0].tolist() == [1, 2]


def test_a_map_may_be_of_any_kind(tmp_path):
    classes = class_map()
    palette = Image.fromarray(classes).convert("P")
    palette.putdata(classes.flatten().tolist())
    palette.putpalette(noise(768).tolist())
    Image.fromarray(classes).save(tmp_path / "map.png")
    palette.save(tmp_path / "palette.png")
    arrays = [classes, classes.astype(np.int64), classes.astype(">u2"), classes[::-1, ::-1].copy()[::-1, ::-1]]
    tensors = [torch.from_numpy(classes), torch.from_numpy(classes).to(torch.uint16)]
    images = [Image.fromarray(classes.astype(dtype)) for dtype in (np.uint8, np.int32, np.uint16)]
    files = [tmp_path / "map.png", str(tmp_path / "palette.png")]
    expected = encode(classes, size=20).labels
    for kind in (*arrays, *tensors, classes[None], [classes], *images, palette, *files):
        assert torch.equal(encode(kind, size=20).labels, expected)
    large = classes.astype(np.int64) * 10**10
    assert torch.equal(encode(large, do_resize=False).labels[0], torch.from_numpy(large))
    truth = classes > 3
    for kind in (truth, Image.fromarray(truth)):
        assert torch.equal(encode(kind, do_resize=False).labels[0], torch.from_numpy(truth).long())


def test_invalid_depth_becomes_zero_and_no_valid_depth_changes(tmp_path):
    depth = depth_map()
    depth[0, :6] = [0, np.nan, np.inf, -np.inf, -1, 2]
    labels = encode(depth, kind="depth_maps", do_resize=False).labels[0]
    assert labels[0, :6].tolist() == [0, 0, 0, 0, 0, 2]
    assert torch.equal(labels[1:], torch.from_numpy(depth[1:]))
    resized = encode(depth, kind="depth_maps", size=(57, 91)).labels
    assert set(resized.unique().tolist()) <= {0.0, *depth[depth > 0].tolist()}
    depth = depth_map().astype(np.float16).astype(np.float32)
    Image.fromarray(depth).save(tmp_path / "depth.tiff")
    for kind in (depth.astype(np.float16), depth.astype(np.float64), tmp_path / "depth.tiff"):
        assert torch.equal(encode(kind, kind="depth_maps", do_resize=False).labels[0], torch.tensor(depth))


def test_masks_of_which_nothing_is_left_go_with_their_class():
    masks = [np.zeros((0, *SIZE), dtype=bool), np.ones((1, *SIZE), dtype=np.uint8)]
    given = {"mask_labels": masks, "class_labels": [[], [3]], "return_tensors": "pt"}
    features = Processor(size=8)([noise(*SIZE, 3)] * 2, **given)
    assert [masks.shape for masks in features.mask_labels] == [(0, 8, 8), (1, 8, 8)]
    assert [classes.tolist() for classes in features.class_labels] == [[], [3]]
    assert features.class_labels[0].dtype == torch.int64
    masks = np.zeros((3, 40, 40), dtype=bool)
    masks[0, 0, 0] = masks[1, 15:25, 15:25] = masks[2, 39] = True
    given = {"mask_labels": [masks], "class_labels": [[5, 6, 7]], "return_tensors": "pt"}
    features = Processor(do_resize=False, do_center_crop=True, crop_size=20)(noise(40, 40, 3), **given)
    assert features.class_labels[0].tolist() == [6]
    assert features.mask_labels[0].sum() == 100


@pytest.mark.parametrize("reduce", [False, True])
def test_reduced_labels_and_segments_are_those_of_the_library(reduce):
    classes, options = class_map(), {"do_resize": False, "do_reduce_labels": reduce}
    classes[0, :3] = 255
    image = noise(*SIZE, 3)
    theirs = SegformerImageProcessor(**options)(image, segmentation_maps=classes, return_tensors="pt").labels
    assert torch.equal(encode(classes, **options).labels, theirs)

    ids = [id_map(), id_map(seed=1)]
    ids[1][ids[1] == 5] = 2
    mappings = [{key: np.int64(value + reduce) for key, value in each.items()} for each in (IDS, {0: 1, 1: 3, 2: 4})]
    given = {"segmentation_maps": ids, "instance_id_to_semantic_id": mappings, "return_tensors": "pt"}
    theirs = Mask2FormerImageProcessor(**options, ignore_index=255)([image] * 2, **given)
    ours = Processor(**options)([image] * 2, **given)
    for name in ("mask_labels", "class_labels"):
        for mine, other in zip(ours[name], theirs[name], strict=True):
            assert torch.equal(mine, other)
            assert mine.dtype == other.dtype


def test_segments_are_those_of_eomt():
    given = {"segmentation_maps": [id_map(32, 32)], "instance_id_to_semantic_id": IDS, "return_tensors": "pt"}
    theirs = EomtImageProcessor(size={"shortest_edge": 32, "longest_edge": 32})(noise(32, 32, 3), **given)
    ours = Processor(size=32)(noise(32, 32, 3), **given)
    assert torch.equal(ours.mask_labels[0], theirs.mask_labels[0])
    assert torch.equal(ours.class_labels[0], theirs.class_labels[0])


def test_segments_are_ignored_at_255_and_outside_the_image_unless_it_has_a_class():
    ids = id_map()
    ids[:4] = 255
    given = {"segmentation_maps": ids, "return_tensors": "pt"}
    options = {"do_resize": False, "do_center_crop": True, "crop_size": 60}
    ignored = Processor(**options)(noise(*SIZE, 3), **given, instance_id_to_semantic_id=IDS)
    assert ignored.class_labels[0].tolist() == list(IDS.values())
    assert ignored.mask_labels[0].sum() == 26 * 44
    named = Processor(**options)(noise(*SIZE, 3), **given, instance_id_to_semantic_id={**IDS, 255: 9})
    assert named.class_labels[0].tolist() == [*IDS.values(), 9]
    assert named.mask_labels[0][-1].sum() == 4 * 44
    # do_reduce_labels removes background segments.
    mapping = {0: 4, 1: 0, 2: 3, 5: 1}
    given = {"segmentation_maps": id_map(), "instance_id_to_semantic_id": mapping, "return_tensors": "pt"}
    features = Processor(do_resize=False, do_reduce_labels=True)(noise(*SIZE, 3), **given)
    assert features.class_labels[0].tolist() == [2, 0]
    assert torch.equal(features.mask_labels[0].bool(), torch.stack([torch.tensor(id_map() == id_) for id_ in (2, 5)]))


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        ({"depth_maps": Image.fromarray(class_map().astype(np.uint16))}, TypeError, "torch.uint16, whose unit"),
        ({"segmentation_maps": []}, ValueError, "segmentation_maps has 0 entries, but there are 1 images"),
        ({"segmentation_maps": np.zeros((1, 1, *SIZE), int)}, ValueError, r"\(1, 1, 30, 44\), but must be \(height"),
        ({"segmentation_maps": [[class_map()]]}, TypeError, "of type list, which is not supported"),
        ({"segmentation_maps": class_map().tolist()}, TypeError, r"maps\[0\] is of type list.* lists by np.array"),
        (
            {"segmentation_maps": class_map()[..., None]},
            ValueError,
            r"\(30, 44, 1\) has 30 .* one of \(height, width\)",
        ),
        ({"segmentation_maps": [class_map()[..., None]]}, ValueError, r"\(30, 44, 1\), but must be \(height, width\)"),
        ({"segmentation_maps": class_map().astype(int) - 1}, ValueError, "contains -1, .* unlabeled pixels to 255"),
        ({"mask_labels": np.ones((1, *SIZE)), "class_labels": [-1]}, ValueError, "-1, but class indices start at 0"),
        ({"segmentation_maps": "nowhere.png"}, OSError, "there is no such file"),
        ({"mask_labels": [np.ones(SIZE)], "class_labels": [[1]]}, ValueError, r"must be \(masks, height, width\)"),
        ({"segmentation_maps": id_map(), "instance_id_to_semantic_id": [IDS] * 2}, ValueError, "_id has 2 entries"),
    ],
)
def test_targets_that_do_not_fit_are_refused(targets, error, message):
    """More invalid targets are tested in `tests/hostile/test_targets.py`."""
    with pytest.raises(error, match=message):
        Processor(do_resize=False)(noise(*SIZE, 3), **targets, return_tensors="pt")


def test_the_options_of_targets_are_saved(tmp_path):
    Processor(do_reduce_labels=True, label_ids_to_fuse=[3, 4]).save_pretrained(tmp_path)
    loaded = Processor.from_pretrained(tmp_path)
    assert loaded.do_reduce_labels is True
    assert loaded.label_ids_to_fuse == (3, 4)


BOXES = [[10.0, 8.0, 30.0, 20.0], [0.0, 0.0, 44.0, 30.0], [20.5, 3.25, 41.0, 29.5]]
CLASSES = [2, 0, 5]
INSIDE = [[14.0, 9.0, 20.5, 17.0], [13.0, 8.5, 30.0, 16.0]]  # these boxes are inside the crop for all options


def encode_boxes(processor, boxes=BOXES, classes=CLASSES, image=None):
    image = noise(*SIZE, 3) if image is None else image
    return processor(image, boxes=[boxes], class_labels=[classes], return_tensors="pt")


def annotations(boxes=BOXES, classes=CLASSES, **fields):
    entries = [
        {"bbox": [x1, y1, x2 - x1, y2 - y1], "category_id": number, "area": (x2 - x1) * (y2 - y1), **fields}
        for (x1, y1, x2, y2), number in zip(boxes, classes, strict=True)
    ]
    return {"image_id": 7, "annotations": entries}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_boxes_follow_their_object_and_can_be_mapped_back(geometry):
    """The image is white inside the box and black elsewhere, so transformed boxes must enclose the white pixels."""
    image = np.zeros(SIZE, dtype=np.uint8)
    image[8:20, 10:30] = 255
    plain = {"resample": 0, "do_rescale": False, "do_normalize": False, "num_channels": 1}
    features = encode_boxes(Processor(**GEOMETRIES[geometry], **plain), BOXES[:1], CLASSES[:1], image)
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
    labels = encode_boxes(processor, INSIDE, [1, 4]).labels[0]
    assert labels["boxes"].dtype == torch.float32
    assert labels["class_labels"].dtype == torch.int64
    probabilities = torch.nn.functional.one_hot(labels["class_labels"], 6).float() * 0.9
    outputs = {"probabilities": probabilities[None], "pred_boxes": labels["boxes"][None]}
    (result,) = processor.post_process_object_detection(outputs, target_sizes=[SIZE])
    torch.testing.assert_close(result["boxes"], torch.tensor(INSIDE), atol=1e-4, rtol=0)
    assert result["labels"].tolist() == [1, 4]
    assert result["scores"].tolist() == pytest.approx([0.9, 0.9])


def test_boxes_are_clipped_and_empty_boxes_removed():
    # The crop contains columns 12 to 32 and rows 10 to 20.
    processor = Processor(do_resize=False, do_center_crop=True, crop_size=(10, 20))
    boxes = [[0, 0, 11, 30], [0, 12, 22, 30], [12, 10, 32, 20], [32, 0, 44, 30]]
    labels = encode_boxes(processor, boxes, [0, 1, 2, 3]).labels[0]
    assert labels["class_labels"].tolist() == [1, 2]
    torch.testing.assert_close(labels["boxes"], torch.tensor([[0.25, 0.6, 0.5, 0.8], [0.5, 0.5, 1, 1]]))
    labels = encode_boxes(Processor(size=20), [[-9, 3, 22, 15], [50, 3, 60, 9], [4, 4, 4, 9]], [0, 1, 2]).labels[0]
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
    """Model outputs in the format that the detection script of transformers collects."""

    logits: torch.Tensor
    pred_boxes: torch.Tensor


@pytest.mark.parametrize(
    ("geometry", "scores"),
    list(zip([*GEOMETRIES, "a size of padding"], cycle(["softmax", "sigmoid"]))),
)
def test_scripts_for_other_detectors_score_pixels(geometry, scores):
    """Scripts in transformers scale boxes by `orig_size`. The scaled boxes must be in pixels of the original image."""
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
        labels = encode_boxes(Processor(size=8), empty, []).labels[0]
        assert labels["boxes"].shape == (0, 4)
        assert labels["class_labels"].shape == (0,)
        assert labels["class_labels"].dtype == torch.int64
    nothing = Processor(size=8)(noise(*SIZE, 3), annotations={"annotations": []}, return_tensors="pt").labels[0]
    assert nothing["boxes"].shape == (0, 4)


def test_other_kinds_of_arrays(backend):
    features = backend(size=8)(noise(*SIZE, 3), boxes=np.array([BOXES]), class_labels=[CLASSES], return_tensors="np")
    assert isinstance(features["labels"][0]["boxes"], np.ndarray)
    np.testing.assert_allclose(features["labels"][0]["boxes"], encode_boxes(backend(size=8)).labels[0]["boxes"])
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
        ({"annotations": annotations(category_id=-1)}, ValueError, "category_id .* contains -1"),
        ({"annotations": annotations(), "boxes": [BOXES]}, ValueError, "boxes and annotations are given"),
        ({"object_boxes": [BOXES]}, ValueError, "object_boxes are cropped only if do_affine_crop=True"),
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
    """Like transformers, post-processing selects the pairs of query and class with the highest scores."""
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
        (given, [(8, 8)] * 2, "target_sizes has 2 entries, but the outputs are for 1 images"),
        (given, [(8, 0)], r"target_sizes\[0\] is \(8, 0\), but must be"),
        (unknown, None, "class_scores of the image processor is None"),
    ):
        with pytest.raises(ValueError, match=message):
            Processor().post_process_object_detection(outputs, target_sizes=sizes)
    with pytest.raises(ValueError, match="class_scores='max' must be one of softmax, sigmoid"):
        Processor(class_scores="max")
