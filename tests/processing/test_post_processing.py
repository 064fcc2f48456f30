"""Test that post-processing gives the same results as transformers, removes padding, and limits memory."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.overrides import TorchFunctionMode
from transformers import (
    DPTImageProcessor,
    EomtImageProcessor,
    GLPNConfig,
    GLPNForDepthEstimation,
    Mask2FormerImageProcessor,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SegformerImageProcessor,
    pipeline,
)
from transformers.modeling_outputs import DepthEstimatorOutput, ImageClassifierOutput, SemanticSegmenterOutput
from transformers.models.eomt.modeling_eomt import EomtForUniversalSegmentationOutput

from hf_vit import HfViTImageProcessor
from hf_vit.model import large_images

from ..helpers.images import noise


SIZES = [(37, 51), (8, 70)]
PROCESSOR = HfViTImageProcessor()  # the processor of the PIL backend inherits the same methods
semantic_maps = PROCESSOR.post_process_semantic_segmentation
instances = PROCESSOR.post_process_instance_segmentation
panoptic_segments = PROCESSOR.post_process_panoptic_segmentation
depth_maps = PROCESSOR.post_process_depth_estimation


@pytest.fixture(params=["whole", "bands"])
def bands(request, monkeypatch):
    """Run each test twice: post-processing computes all rows of an image at once, or row by row."""
    if request.param == "bands":
        monkeypatch.setattr(large_images, "BAND_NUMEL", 600)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def semantic_outputs(logits=None):
    return SemanticSegmenterOutput(logits=draw(2, 5, 12, 16) if logits is None else logits)


def depth_outputs(depth=None):
    return DepthEstimatorOutput(predicted_depth=draw(2, 12, 16).abs() + 0.5 if depth is None else depth)


def universal_outputs(size=(16, 16), queries=12, scale=4.0, seed=0):
    """Return outputs with confident queries for overlapping rectangles, so that all thresholds have an effect."""
    generator = torch.Generator().manual_seed(seed)
    masks = draw(2, queries, *size, seed=seed) - 3
    for mask in masks.flatten(0, 1):
        top, left = (int(torch.randint(side // 2, (1,), generator=generator)) for side in size)
        mask[top : top + size[0] // 2, left : left + size[1] // 2] += 6
    classes = draw(2, queries, 6, seed=seed + 1) * scale
    return EomtForUniversalSegmentationOutput(class_queries_logits=classes, masks_queries_logits=masks)


def assert_all_equal(results, expected):
    for mine, other in zip(results, expected, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


EOMT = {"size": {"shortest_edge": 64, "longest_edge": 64}}
TENSORS = [torch.tensor(size) for size in SIZES]
KINDS = [torch.tensor(SIZES), np.array(SIZES), TENSORS, [(*np.array(size),) for size in SIZES]]


@pytest.mark.usefixtures("bands")
def test_semantic_maps_are_those_of_the_library():
    for sizes in (SIZES, [(12, 16), (5, 9)], None, *KINDS, [[*size] for size in TENSORS]):
        ours = semantic_maps(semantic_outputs(), target_sizes=sizes)
        sizes = None if sizes is None else [(int(height), int(width)) for height, width in sizes]
        theirs = SegformerImageProcessor().post_process_semantic_segmentation(semantic_outputs(), target_sizes=sizes)
        assert ours[0].dtype == torch.int64
        assert_all_equal(ours, theirs)


@pytest.mark.usefixtures("bands")
def test_semantic_scores_are_probabilities_of_the_resized_logits_also_of_half_precision():
    outputs = semantic_outputs()
    results = semantic_maps(outputs, SIZES, return_segmentation_scores=True)
    for logits, size, result in zip(outputs.logits, SIZES, results, strict=True):
        expected = F.interpolate(logits[None], size=size, mode="bilinear")[0].softmax(dim=0)
        torch.testing.assert_close(result.segmentation_scores, expected)
        assert torch.equal(result.segmentation, expected.argmax(dim=0))
    logits = semantic_outputs().logits.to(torch.bfloat16)
    halves, floats = (semantic_maps(semantic_outputs(x), SIZES) for x in (logits, logits.float()))
    assert_all_equal(halves, floats)
    outputs = depth_outputs(depth_outputs().predicted_depth.to(torch.bfloat16))
    for result in depth_maps(outputs, SIZES):
        assert result["predicted_depth"].dtype == torch.float32


class LargestTensor(TorchFunctionMode):
    """Records the number of elements of the largest tensor that a torch function returns."""

    numel = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_memory_does_not_grow_with_classes_or_queries(monkeypatch):
    monkeypatch.setattr(large_images, "BAND_NUMEL", large_images.BAND_NUMEL // 16)
    universal = universal_outputs(queries=300, scale=50)
    for method, outputs in (
        (semantic_maps, semantic_outputs(draw(2, 300, 8, 8))),
        (instances, universal),
        (panoptic_segments, universal),
    ):
        with LargestTensor() as largest:
            method(outputs, target_sizes=[(175, 125)] * 2)
        # The full logits would have 6.6 million elements per image.
        assert 21_875 <= largest.numel <= 2**17, method.__name__


def check_segments(ours, theirs, least):
    """Assert that segmentation maps and segments are equal, and that there are at least `least` segments."""
    assert sum(len(result["segments_info"]) for result in ours) >= least
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["segmentation"].dtype == torch.int64
        assert torch.equal(mine["segmentation"], other["segmentation"].long())
        for segment, expected in zip(mine["segments_info"], other["segments_info"], strict=True):
            assert segment.keys() == expected.keys()
            assert segment == pytest.approx(expected, abs=2e-6)


@pytest.mark.usefixtures("bands")
def test_semantic_maps_and_instances_of_queries_are_those_of_eomt():
    outputs, sizes, eomt = universal_outputs(), [(64, 64)] * 2, EomtImageProcessor()
    options = {"return_segmentation_scores": True}
    theirs = eomt.post_process_semantic_segmentation(outputs, sizes, **EOMT, **options)
    for mine, other in zip(semantic_maps(outputs, sizes, **options), theirs, strict=True):
        torch.testing.assert_close(mine.segmentation_scores, other.segmentation_scores)
        assert torch.equal(mine.segmentation, other.segmentation)
    for threshold in (0.1, 0.5, 0.9):
        theirs = eomt.post_process_instance_segmentation(outputs, sizes, threshold=threshold, **EOMT)
        check_segments(instances(outputs, threshold, target_sizes=sizes), theirs, least=2)


@pytest.mark.usefixtures("bands")
def test_panoptic_segments_are_those_of_eomt():
    outputs, sizes = universal_outputs(size=(64, 64)), [(64, 64), (48, 60)]
    outputs.masks_queries_logits[1, :, 52:] = -9  # EoMT pads at the bottom and removes the padding
    mask = torch.ones(2, 64, 64, dtype=torch.bool)
    mask[1, 51:] = False
    for fuse, thresholds in (
        (None, {}),
        ([1, 2, 3], {"threshold": 0.9, "mask_threshold": 0.8, "overlap_mask_area_threshold": 0.3}),
        ([1, 2, 3], {"threshold": 0.2, "overlap_mask_area_threshold": 0}),
    ):
        given = {"target_sizes": sizes, "patch_attention_mask": mask}
        ours = panoptic_segments(outputs, **thresholds, label_ids_to_fuse=fuse, **given)
        options = {"threshold": 0.5, **thresholds, "stuff_classes": fuse, **EOMT}
        theirs = EomtImageProcessor().post_process_panoptic_segmentation(outputs, sizes, **options)
        check_segments(ours, theirs, least=2)


def test_binary_maps_and_runs_are_those_of_mask2former():
    """Each query has only one likely class, because Mask2Former may return several segments for a query."""
    outputs, sizes = universal_outputs(size=(384, 384), scale=50), [(384, 384)] * 2
    options = {"threshold": 0.8, "target_sizes": sizes, "return_binary_maps": True}
    ours = instances(outputs, **options)
    theirs = Mask2FormerImageProcessor().post_process_instance_segmentation(outputs, **options)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["segmentation"].dtype == torch.bool
        assert mine["segmentation"].sum(dim=0).max() > 1
        pairs = [zip(result["segments_info"], result["segmentation"], strict=True) for result in (mine, other)]
        ordered = [sorted(own, key=lambda pair: pair[1].flatten().nonzero().sum()) for own in pairs]
        for (segment, mask), (expected, truth) in zip(*ordered, strict=True):
            assert torch.equal(mask, truth.bool())
            assert segment["label_id"] == expected["label_id"]
            assert segment["score"] == pytest.approx(expected["score"], abs=2e-6)
    # Compare segments that are returned in run-length encoding.
    outputs = universal_outputs(size=(384, 384), queries=1, scale=50, seed=4)
    outputs.class_queries_logits[..., -1] = -99
    options = {"target_sizes": sizes, "return_coco_annotation": True}
    theirs = Mask2FormerImageProcessor().post_process_instance_segmentation(outputs, **options)
    for mine, other in zip(instances(outputs, **options), theirs, strict=True):
        # In the result of transformers, the first entry does not represent an instance.
        assert mine["segmentation"] == other["segmentation"][1:]


def test_mask_threshold_moves_the_edge_and_nothing_found_is_a_map_of_nothing():
    options = {"target_sizes": [(64, 64)] * 2, "return_binary_maps": True}
    results = [instances(universal_outputs(), 0.01, value, **options) for value in (0.0, 0.3, 0.5, 0.9, 1.0)]
    areas = [result[0]["segmentation"].sum() for result in results]
    assert areas == sorted(areas, reverse=True)
    assert areas[1] > areas[2] > areas[3] > areas[4] == 0
    outputs = universal_outputs()
    outputs.class_queries_logits[..., -1] = 99
    for method in (instances, panoptic_segments):
        for result, size in zip(method(outputs, target_sizes=SIZES), SIZES, strict=True):
            assert result["segments_info"] == []
            assert torch.equal(result["segmentation"], torch.full(size, -1))
    binary = instances(outputs, target_sizes=SIZES, return_binary_maps=True)
    assert binary[0]["segmentation"].shape == (0, *SIZES[0])
    assert instances(outputs, return_coco_annotation=True)[0]["segmentation"] == []


def test_call_option_label_ids_to_fuse_overrides_the_processor():
    outputs = universal_outputs()
    method = HfViTImageProcessor(label_ids_to_fuse=[0, 1, 2, 3, 4]).post_process_panoptic_segmentation
    options = {"overlap_mask_area_threshold": 0.1}
    results = [panoptic_segments(outputs, **options), method(outputs, **options)]
    results.append(method(outputs, **options, label_ids_to_fuse=[]))
    none, stored, call = (
        [segment["label_id"] for image in images for segment in image["segments_info"]] for images in results
    )
    assert none == call
    assert len(stored) < len(none)
    assert set(stored) == set(none)


@pytest.mark.usefixtures("bands")
def test_semantic_outputs_become_a_segment_for_each_class_present():
    outputs = semantic_outputs()
    outputs.logits[:, 2] = -99
    maps = semantic_maps(outputs, SIZES, return_segmentation_scores=True)
    results = panoptic_segments(outputs, 0.9, 0.5, 0.5, target_sizes=SIZES)
    for result, expected in zip(results, maps, strict=True):
        assert [segment["label_id"] for segment in result["segments_info"]] == [0, 1, 3, 4]
        assert [segment["id"] for segment in result["segments_info"]] == [0, 1, 2, 3]
        for segment in result["segments_info"]:
            mask = result["segmentation"] == segment["id"]
            assert torch.equal(mask, expected.segmentation == segment["label_id"])
            mean = expected.segmentation_scores[segment["label_id"]][mask].mean()
            assert segment["score"] == pytest.approx(float(mean), abs=2e-6)


def test_depth_is_that_of_the_library_within_what_the_model_predicts():
    outputs = depth_outputs()
    for sizes in (SIZES, None):
        ours = depth_maps(outputs, sizes)
        theirs = DPTImageProcessor().post_process_depth_estimation(outputs, sizes)
        for mine, other, depth in zip(ours, theirs, outputs.predicted_depth, strict=True):
            assert torch.equal(mine["predicted_depth"], other["predicted_depth"].clamp(depth.min(), depth.max()))
    depth = torch.full((1, 8, 8), 0.01)  # next to 10, bicubic interpolation gives negative values
    depth[:, :, 4:] = 10
    outputs = depth_outputs(depth)
    assert DPTImageProcessor().post_process_depth_estimation(outputs, [(40, 40)])[0]["predicted_depth"].min() < 0
    assert depth_maps(outputs, [(40, 40)])[0]["predicted_depth"].min() >= 0.01


def test_padding_changes_nothing():
    plain = draw(2, 5, 10, 18)
    logits = F.pad(plain, (0, 6, 0, 10), value=50.0)  # 1 x 3 of the 2 x 4 patches are valid, the others are padding
    mask = torch.zeros(2, 2, 4, dtype=torch.bool)
    mask[:, :1, :3] = True
    for sizes in (SIZES, None):
        own = semantic_maps(semantic_outputs(logits), sizes, patch_attention_mask=mask)
        assert_all_equal(own, semantic_maps(semantic_outputs(plain), sizes))
        own = depth_maps(depth_outputs(logits[:, 0]), sizes, patch_attention_mask=mask)
        assert_same_depth(own, depth_maps(depth_outputs(plain[:, 0]), sizes))


def assert_same_depth(results, expected):
    assert_all_equal(*([result["predicted_depth"] for result in each] for each in (results, expected)))


def test_padding_that_the_model_has_seen_is_cut_off_as_eomt_does():
    outputs, sizes = universal_outputs(size=(64, 64)), [(64, 64), (48, 60)]
    outputs.masks_queries_logits[1, :, 52:] = -9
    own = HfViTImageProcessor(**EOMT, do_pad=True, hide_padding=False, pad_size=64)
    ours = own.post_process_panoptic_segmentation(outputs, target_sizes=sizes)
    theirs = EomtImageProcessor().post_process_panoptic_segmentation(outputs, sizes, threshold=0.5, **EOMT)
    check_segments(ours, theirs, least=2)
    depth = draw(1, 16, 16).abs()  # each depth value covers 4 x 4 pixels
    plain = depth_outputs(depth[:, :, :11])  # 11 columns cover the 43 valid pixels
    found = own.post_process_depth_estimation(depth_outputs(depth), [(30, 20)])
    assert_same_depth(found, depth_maps(plain, [(30, 20)]))


# Processors that pad to the largest image, to a fixed size, within a fixed size, or to the model image size.
PADDING = {
    "shortest_edge": {"size": {"shortest_edge": 16}, "ensure_multiple_of": 8},
    "other_patches": {"size": {"longest_edge": 30}, "ensure_multiple_of": (4, 8)},
    "as_is": {"do_resize": False, "ensure_multiple_of": 8},
    "fixed": {"size": {"longest_edge": 32}, "ensure_multiple_of": 8, "pad_size": (32, 40)},
    "seen": {"size": {"longest_edge": 32}, "pad_size": (32, 40), "hide_padding": False},
}


def grid_of(processor, pixels, scale):
    """Return the output size of a model for images (..., H, W), with `scale` values per patch side or per pixel."""
    unit = np.broadcast_to(processor.ensure_multiple_of or 1, 2)
    return tuple(scale * -(-side // int(own)) for side, own in zip(pixels.shape[-2:], unit, strict=True))


@pytest.mark.parametrize(("padding", "scale"), [*zip(PADDING, [1, 4, 1, 4, 1], strict=True)])
def test_without_a_mask_the_sizes_of_the_images_say_where_padding_is(padding, scale):
    processor = HfViTImageProcessor(do_pad=True, **PADDING[padding])
    images = [noise(40, 80, 3), noise(80, 40, 3), noise(24, 24, 3)]
    sizes = [image.shape[:2] for image in images]
    inputs = processor(images, return_tensors="pt")
    outputs = semantic_outputs(draw(3, 5, *grid_of(processor, inputs.pixel_values, scale)))
    results = processor.post_process_semantic_segmentation(outputs, sizes)
    for index, (result, size) in enumerate(zip(results, sizes, strict=True)):
        own = processor(images[index], return_tensors="pt", do_pad=False).pixel_values
        height, width = grid_of(processor, own, scale)
        logits = outputs.logits[index, None, :, :height, :width]
        assert torch.equal(result, F.interpolate(logits, size=size, mode="bilinear")[0].argmax(dim=0))
    if processor.hide_padding:
        mask = inputs.patch_attention_mask
        masked = processor.post_process_semantic_segmentation(outputs, sizes, patch_attention_mask=mask)
        assert_all_equal(results, masked)
    # A single image is processed without a padding mask, as in the transformers pipeline.
    both = [processor(images[0], return_tensors="pt", do_pad=do_pad).pixel_values for do_pad in (True, False)]
    whole, (height, width) = (grid_of(processor, own, 4) for own in both)
    assert (whole == (height, width)) == (padding not in ("fixed", "seen"))
    depth = draw(1, *whole).abs()
    found = processor.post_process_depth_estimation(depth_outputs(depth), sizes[:1])
    assert_same_depth(found, depth_maps(depth_outputs(depth[:, :height, :width]), sizes[:1]))


def test_mismatched_target_sizes_request_the_patch_mask():
    processor = HfViTImageProcessor(do_resize=False, do_pad=True, ensure_multiple_of=8)
    outputs = semantic_outputs(draw(2, 5, 20, 10))
    message = r"The outputs of size 20 x 10 do not match images of target_sizes.* Pass the patch_attention_mask"
    for sizes in ([(80, 80), (40, 80)], [(40, 80), (90, 40)], [(20, 10), (10, 20)]):
        with pytest.raises(ValueError, match=message):
            processor.post_process_semantic_segmentation(outputs, sizes)


def test_models_of_the_library_run_in_the_pipeline():
    shape = {"depths": [1] * 4, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}
    config, image = SegformerConfig(**shape, num_labels=3), Image.fromarray(noise(40, 56, 3))
    segmenter = SegformerForSemanticSegmentation(config).eval()
    segment = pipeline("image-segmentation", model=segmenter, image_processor=PROCESSOR)
    for subtask in (None, "semantic", "panoptic"):
        results = segment(image, subtask=subtask)
        assert {result["mask"].size for result in results} == {(56, 40)}
        assert {result["label"] for result in results} <= {*config.id2label.values()}
        assert (sum(np.array(result["mask"], dtype=int) for result in results) == 255).all()
        assert all((result["score"] is None) == (subtask == "semantic") for result in results)
    estimator = GLPNForDepthEstimation(GLPNConfig(**shape)).eval()
    depth = pipeline("depth-estimation", model=estimator, image_processor=PROCESSOR)(image)["predicted_depth"]
    assert depth.shape == (40, 56)
    assert (depth > 0).all()


METHODS = {
    "semantic_segmentation": (semantic_outputs, "HfViTForSemanticSegmentation or HfViTForUniversalSegmentation"),
    "instance_segmentation": (universal_outputs, "HfViTForUniversalSegmentation"),
    "panoptic_segmentation": (universal_outputs, "HfViTForSemanticSegmentation or HfViTForUniversalSegmentation"),
    "depth_estimation": (depth_outputs, "HfViTForDepthEstimation"),
}


@pytest.mark.parametrize("method", METHODS)
def test_outputs_sizes_and_masks_that_do_not_fit_are_refused(method):
    (make_outputs, model), post_process = METHODS[method], getattr(PROCESSOR, f"post_process_{method}")
    outputs = make_outputs()
    with pytest.raises(ValueError, match="target_sizes has 3 entries, but the outputs are for 2 images"):
        post_process(outputs, target_sizes=[(4, 4)] * 3)
    with pytest.raises(ValueError, match=r"target_sizes\[0\] is 30, but must be \(height, width\) in whole pixels"):
        post_process(outputs, target_sizes=(30, 40))
    for size in ((0, 4), (4, -1), (3.5, 4), ("4", 4), (4, 4, 3), (4, None), torch.tensor(4), "44"):
        with pytest.raises(ValueError, match=r"target_sizes\[1\] is .*, but must be \(height, width\)"):
            post_process(outputs, target_sizes=[(4, 4), size])
    with pytest.raises(ValueError, match="target_sizes has the type int, but the outputs are for 2 images"):
        post_process(outputs, target_sizes=30)
    with pytest.raises(ValueError, match="patch_attention_mask is for 1 images, but the outputs are for 2"):
        post_process(outputs, patch_attention_mask=torch.ones(1, 3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=rf"logits \(2, 5\). Pass the outputs of {model}"):
        post_process(ImageClassifierOutput(logits=torch.zeros(2, 5)))
    with pytest.raises(ValueError, match="The outputs are a tuple without names"):
        post_process(outputs.to_tuple())
