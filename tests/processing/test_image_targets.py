"""Targets: transformed like the image, nearest neighbor resizing, equal results of both backends."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import EomtImageProcessor, Mask2FormerImageProcessor, SegformerImageProcessor

from hf_vit import HfViTImageProcessor as Processor
from hf_vit import HfViTImageProcessorPil

from ..helpers.images import noise


# Image processor options that enlarge, shrink, crop or pad an image of 30 x 44 pixels.
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
    """The image has the values of the target and is resized by nearest neighbor too, so results must be equal."""
    classes = class_map() + 1
    plain = {"resample": 0, "do_rescale": False, "do_normalize": False, "num_channels": 1}
    processor = Processor(**GEOMETRIES[geometry], **plain)
    image = processor(classes, return_tensors="pt").pixel_values
    expected = image[:, 0]  # padded pixels are 0
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
    # With reduced labels, background segments are removed.
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
        ({"segmentation_maps": class_map().astype(int) - 1}, ValueError, "the number -1, .* unlabeled pixels to 255"),
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
