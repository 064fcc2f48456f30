"""Post-processing, compared with the image processors of transformers: padding, precision, memory, invalid input."""

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

from hf_vit import HfViTForSemanticSegmentation, HfViTForUniversalSegmentation
from hf_vit.model import post_processing

from ..helpers.images import BACKENDS, noise
from ..helpers.models import small_config
from ..helpers.references import draw_weights


SIZES = [(37, 51), (8, 70)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


@pytest.fixture
def processor(backend):
    return backend()


@pytest.fixture(params=["whole", "bands"])
def bands(request, monkeypatch):
    """Compute results for whole maps, and then in bands of rows."""
    if request.param == "bands":
        monkeypatch.setattr(post_processing, "BAND_NUMEL", 600)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def semantic_outputs(**changes):
    return SemanticSegmenterOutput(logits=draw(2, 5, 12, 16, **changes))


def depth_outputs(low=0.5):
    return DepthEstimatorOutput(predicted_depth=draw(2, 12, 16).abs() + low)


def universal_outputs(size=(16, 16), queries=12, scale=4.0, seed=0):
    """Return queries that confidently predict overlapping rectangles, so that every threshold has an effect."""
    generator = torch.Generator().manual_seed(seed)
    masks = draw(2, queries, *size, seed=seed) - 3
    for mask in masks.flatten(0, 1):
        top, left = (int(torch.randint(side // 2, (1,), generator=generator)) for side in size)
        mask[top : top + size[0] // 2, left : left + size[1] // 2] += 6
    classes = draw(2, queries, 6, seed=seed + 1) * scale
    return EomtForUniversalSegmentationOutput(class_queries_logits=classes, masks_queries_logits=masks)


EOMT = {"size": {"shortest_edge": 64, "longest_edge": 64}}


@pytest.mark.usefixtures("bands")
@pytest.mark.parametrize("sizes", [SIZES, torch.tensor(SIZES), [(12, 16), (5, 9)], None])
def test_semantic_maps_are_those_of_the_library(processor, sizes):
    ours = processor.post_process_semantic_segmentation(semantic_outputs(), target_sizes=sizes)
    sizes = None if sizes is None else [(int(height), int(width)) for height, width in sizes]
    theirs = SegformerImageProcessor().post_process_semantic_segmentation(semantic_outputs(), target_sizes=sizes)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.int64
        assert torch.equal(mine, other)


@pytest.mark.usefixtures("bands")
def test_semantic_scores_are_probabilities_of_the_resized_logits(processor):
    outputs = semantic_outputs()
    results = processor.post_process_semantic_segmentation(outputs, SIZES, return_segmentation_scores=True)
    for logits, size, result in zip(outputs.logits, SIZES, results, strict=True):
        expected = F.interpolate(logits[None], size=size, mode="bilinear")[0].softmax(dim=0)
        torch.testing.assert_close(result.segmentation_scores, expected)
        assert torch.equal(result.segmentation, expected.argmax(dim=0))


def test_logits_of_half_precision_are_resized_in_full(processor):
    logits = semantic_outputs().logits.to(torch.bfloat16)
    halves, floats = (
        processor.post_process_semantic_segmentation(SemanticSegmenterOutput(logits=x), SIZES)
        for x in (logits, logits.float())
    )
    assert all(torch.equal(*pair) for pair in zip(halves, floats, strict=True))


class LargestTensor(TorchFunctionMode):
    """Record the number of elements of the largest tensor returned by a torch function."""

    numel = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize(
    "method",
    [
        "post_process_semantic_segmentation",
        "post_process_instance_segmentation",
        "post_process_panoptic_segmentation",
    ],
)
def test_memory_does_not_grow_with_classes_or_queries(processor, method):
    outputs = universal_outputs(queries=300, scale=50)
    if method == "post_process_semantic_segmentation":
        outputs = SemanticSegmenterOutput(logits=draw(2, 300, 8, 8))
    with LargestTensor() as largest:
        getattr(processor, method)(outputs, target_sizes=[(700, 500)] * 2)
    assert 350_000 <= largest.numel <= 2**21  # full logits have 105 million per image


@pytest.mark.usefixtures("bands")
def test_semantic_maps_of_queries_are_those_of_eomt(processor):
    outputs, sizes = universal_outputs(), [(64, 64)] * 2
    ours = processor.post_process_semantic_segmentation(outputs, sizes, return_segmentation_scores=True)
    theirs = EomtImageProcessor().post_process_semantic_segmentation(
        outputs, sizes, **EOMT, return_segmentation_scores=True
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.segmentation_scores, other.segmentation_scores)
        assert torch.equal(mine.segmentation, other.segmentation)


def check_segments(ours, theirs, least):
    """Assert equal maps and segments, and a minimum number of segments."""
    assert sum(len(result["segments_info"]) for result in ours) >= least
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["segmentation"].dtype == torch.int64
        assert torch.equal(mine["segmentation"], other["segmentation"].long())
        for segment, expected in zip(mine["segments_info"], other["segments_info"], strict=True):
            assert segment.keys() == expected.keys()
            assert segment == pytest.approx(expected, abs=2e-6)


@pytest.mark.usefixtures("bands")
@pytest.mark.parametrize("fuse", [None, [1, 2, 3]])
@pytest.mark.parametrize(
    "thresholds",
    [
        {},
        {"threshold": 0.9, "mask_threshold": 0.8, "overlap_mask_area_threshold": 0.3},
        {"threshold": 0.2, "overlap_mask_area_threshold": 0},
    ],
)
def test_panoptic_segments_are_those_of_eomt(processor, thresholds, fuse):
    outputs, sizes = universal_outputs(size=(64, 64)), [(64, 64), (48, 60)]
    outputs.masks_queries_logits[1, :, 52:] = -9  # EoMT pads at the bottom, then crops
    mask = torch.ones(2, 64, 64, dtype=torch.bool)
    mask[1, 51:] = False
    ours = processor.post_process_panoptic_segmentation(
        outputs, **thresholds, label_ids_to_fuse=fuse, target_sizes=sizes, patch_attention_mask=mask
    )
    theirs = EomtImageProcessor().post_process_panoptic_segmentation(
        outputs, sizes, **{"threshold": 0.5, **thresholds}, stuff_classes=fuse, **EOMT
    )
    check_segments(ours, theirs, least=2)


@pytest.mark.usefixtures("bands")
@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9])
def test_instances_are_those_of_eomt(processor, threshold):
    outputs, sizes = universal_outputs(), [(64, 64)] * 2
    ours = processor.post_process_instance_segmentation(outputs, threshold, target_sizes=sizes)
    theirs = EomtImageProcessor().post_process_instance_segmentation(outputs, sizes, threshold=threshold, **EOMT)
    check_segments(ours, theirs, least=2)


def test_binary_maps_are_those_of_mask2former_and_overlap(processor):
    """Mask2Former may predict several classes per query; here each query is certain of one."""
    outputs, sizes = universal_outputs(size=(384, 384), scale=50), [(384, 384)] * 2
    options = {"threshold": 0.8, "target_sizes": sizes, "return_binary_maps": True}
    ours = processor.post_process_instance_segmentation(outputs, **options)
    theirs = Mask2FormerImageProcessor().post_process_instance_segmentation(outputs, **options)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["segmentation"].dtype == torch.bool
        assert mine["segmentation"].sum(dim=0).max() > 1
        ordered = [
            sorted(zip(segments, masks, strict=True), key=lambda pair: pair[1].flatten().nonzero().sum())
            for segments, masks in (
                (mine["segments_info"], mine["segmentation"]),
                (other["segments_info"], other["segmentation"]),
            )
        ]
        for (segment, mask), (expected, truth) in zip(*ordered, strict=True):
            assert torch.equal(mask, truth.bool())
            assert segment["label_id"] == expected["label_id"]
            assert segment["score"] == pytest.approx(expected["score"], abs=2e-6)


def test_runs_of_masks_are_those_of_mask2former(processor):
    outputs = universal_outputs(size=(384, 384), queries=1, scale=50, seed=4)
    outputs.class_queries_logits[..., -1] = -99
    options = {"target_sizes": [(384, 384)] * 2, "return_coco_annotation": True}
    ours = processor.post_process_instance_segmentation(outputs, **options)
    theirs = Mask2FormerImageProcessor().post_process_instance_segmentation(outputs, **options)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["segmentation"] == other["segmentation"][1:]  # the first is the background


def test_mask_threshold_moves_the_edge_of_instances(processor):
    outputs = universal_outputs()
    areas = [
        processor.post_process_instance_segmentation(
            outputs, 0.01, mask_threshold, target_sizes=[(64, 64)] * 2, return_binary_maps=True
        )[0]["segmentation"].sum()
        for mask_threshold in (0.0, 0.3, 0.5, 0.9, 1.0)
    ]
    assert areas == sorted(areas, reverse=True)
    assert areas[1] > areas[2] > areas[3] > areas[4] == 0


def test_nothing_found_is_a_map_of_nothing(processor):
    outputs = universal_outputs()
    outputs.class_queries_logits[..., -1] = 99
    for method in (processor.post_process_instance_segmentation, processor.post_process_panoptic_segmentation):
        for result, size in zip(method(outputs, target_sizes=SIZES), SIZES, strict=True):
            assert result["segments_info"] == []
            assert torch.equal(result["segmentation"], torch.full(size, -1))
    binary = processor.post_process_instance_segmentation(outputs, target_sizes=SIZES, return_binary_maps=True)
    assert binary[0]["segmentation"].shape == (0, *SIZES[0])
    assert processor.post_process_instance_segmentation(outputs, return_coco_annotation=True)[0]["segmentation"] == []


def test_the_processor_knows_what_to_fuse_and_the_call_knows_better(processor):
    outputs = universal_outputs()
    method = type(processor)(label_ids_to_fuse=[0, 1, 2, 3, 4]).post_process_panoptic_segmentation
    options = {"overlap_mask_area_threshold": 0.1}
    counts = {
        name: [segment["label_id"] for result in results for segment in result["segments_info"]]
        for name, results in {
            "none": processor.post_process_panoptic_segmentation(outputs, **options),
            "stored": method(outputs, **options),
            "call": method(outputs, **options, label_ids_to_fuse=[]),
        }.items()
    }
    assert counts["none"] == counts["call"]
    assert len(counts["stored"]) < len(counts["none"])
    assert set(counts["stored"]) == set(counts["none"])


@pytest.mark.usefixtures("bands")
def test_semantic_outputs_become_a_segment_for_each_class_present(processor):
    outputs = semantic_outputs()
    outputs.logits[:, 2] = -99
    maps = processor.post_process_semantic_segmentation(outputs, SIZES, return_segmentation_scores=True)
    results = processor.post_process_panoptic_segmentation(outputs, 0.9, 0.5, 0.5, target_sizes=SIZES)
    for result, expected in zip(results, maps, strict=True):
        assert [segment["label_id"] for segment in result["segments_info"]] == [0, 1, 3, 4]
        assert [segment["id"] for segment in result["segments_info"]] == [0, 1, 2, 3]
        for segment in result["segments_info"]:
            mask = result["segmentation"] == segment["id"]
            assert torch.equal(mask, expected.segmentation == segment["label_id"])
            mean = expected.segmentation_scores[segment["label_id"]][mask].mean()
            assert segment["score"] == pytest.approx(float(mean), abs=2e-6)


@pytest.mark.parametrize("sizes", [SIZES, None])
def test_depth_is_that_of_the_library_within_what_the_model_predicts(processor, sizes):
    outputs = depth_outputs()
    ours = processor.post_process_depth_estimation(outputs, sizes)
    theirs = DPTImageProcessor().post_process_depth_estimation(outputs, sizes)
    for mine, other, depth in zip(ours, theirs, outputs.predicted_depth, strict=True):
        assert torch.equal(mine["predicted_depth"], other["predicted_depth"].clamp(depth.min(), depth.max()))


def test_depth_stays_positive_where_interpolation_overshoots(processor):
    depth = torch.full((1, 8, 8), 0.01)
    depth[:, :, 4:] = 10
    outputs = DepthEstimatorOutput(predicted_depth=depth)
    assert DPTImageProcessor().post_process_depth_estimation(outputs, [(40, 40)])[0]["predicted_depth"].min() < 0
    assert processor.post_process_depth_estimation(outputs, [(40, 40)])[0]["predicted_depth"].min() >= 0.01


def test_depth_of_half_precision_comes_as_float32(processor):
    outputs = DepthEstimatorOutput(predicted_depth=depth_outputs().predicted_depth.to(torch.bfloat16))
    for result in processor.post_process_depth_estimation(outputs, SIZES):
        assert result["predicted_depth"].dtype == torch.float32


def padded(values):
    """Pad outputs to the right and bottom, with the mask of 2 x 4 patches of which 1 x 3 belong to the image."""
    mask = torch.zeros(len(values), 2, 4, dtype=torch.bool)
    mask[:, :1, :3] = True
    height, width = values.shape[-2:]
    return F.pad(values, (0, width // 3, 0, height), value=50.0), mask


@pytest.mark.parametrize("sizes", [SIZES, None])
def test_padding_changes_nothing(processor, sizes):
    plain = draw(2, 5, 10, 18)
    logits, mask = padded(plain)
    for given, expected in zip(
        processor.post_process_semantic_segmentation(
            SemanticSegmenterOutput(logits=logits), sizes, patch_attention_mask=mask
        ),
        processor.post_process_semantic_segmentation(SemanticSegmenterOutput(logits=plain), sizes),
        strict=True,
    ):
        assert torch.equal(given, expected)
    depth, mask = padded(plain[:, 0])
    for given, expected in zip(
        processor.post_process_depth_estimation(
            DepthEstimatorOutput(predicted_depth=depth), sizes, patch_attention_mask=mask
        ),
        processor.post_process_depth_estimation(DepthEstimatorOutput(predicted_depth=plain[:, 0]), sizes),
        strict=True,
    ):
        assert torch.equal(given["predicted_depth"], expected["predicted_depth"])


def test_padding_that_the_model_has_seen_is_cut_off_as_eomt_does(processor):
    outputs, sizes = universal_outputs(size=(64, 64)), [(64, 64), (48, 60)]
    outputs.masks_queries_logits[1, :, 52:] = -9
    own = type(processor)(**EOMT, do_pad=True, hide_padding=False, pad_size=64)
    ours = own.post_process_panoptic_segmentation(outputs, target_sizes=sizes)
    theirs = EomtImageProcessor().post_process_panoptic_segmentation(outputs, sizes, threshold=0.5, **EOMT)
    check_segments(ours, theirs, least=2)
    depth = draw(1, 16, 16).abs()  # 4 pixels per patch
    (result,) = own.post_process_depth_estimation(DepthEstimatorOutput(predicted_depth=depth), [(30, 20)])
    plain = DepthEstimatorOutput(predicted_depth=depth[:, :, :11])  # 43 pixels wide
    (expected,) = processor.post_process_depth_estimation(plain, [(30, 20)])
    assert torch.equal(result["predicted_depth"], expected["predicted_depth"])


# Processors that pad to the batch, to a fixed size, to a fixed size with preserved aspect ratio, and to the model
# size
PADDING = {
    "shortest_edge": {"size": {"shortest_edge": 16}, "ensure_multiple_of": 8},
    "other_patches": {"size": {"longest_edge": 30}, "ensure_multiple_of": (4, 8)},
    "as_is": {"do_resize": False, "ensure_multiple_of": 8},
    "fixed": {"size": {"longest_edge": 32}, "ensure_multiple_of": 8, "pad_size": (32, 40)},
    "seen": {"size": {"longest_edge": 32}, "pad_size": (32, 40), "hide_padding": False},
}


def grid_of(processor, pixels, scale):
    """Return the size of outputs with `scale` pixels per patch, or that of images (..., H, W)."""
    unit = np.broadcast_to(processor.ensure_multiple_of or 1, 2)
    return tuple(scale * -(-side // int(own)) for side, own in zip(pixels.shape[-2:], unit, strict=True))


@pytest.mark.parametrize("scale", [1, 4])
@pytest.mark.parametrize("padding", PADDING)
def test_without_a_mask_the_sizes_of_the_images_say_where_padding_is(backend, padding, scale):
    processor = backend(do_pad=True, **PADDING[padding])
    images = [noise(40, 80, 3), noise(80, 40, 3), noise(24, 24, 3)]
    sizes = [image.shape[:2] for image in images]
    inputs = processor(images, return_tensors="pt")
    outputs = SemanticSegmenterOutput(logits=draw(3, 5, *grid_of(processor, inputs.pixel_values, scale)))
    results = processor.post_process_semantic_segmentation(outputs, sizes)
    for index, (result, size) in enumerate(zip(results, sizes, strict=True)):
        own = processor(images[index], return_tensors="pt", do_pad=False).pixel_values
        height, width = grid_of(processor, own, scale)
        logits = outputs.logits[index, None, :, :height, :width]
        assert torch.equal(result, F.interpolate(logits, size=size, mode="bilinear")[0].argmax(dim=0))
    if processor.hide_padding:
        masked = processor.post_process_semantic_segmentation(
            outputs, sizes, patch_attention_mask=inputs.patch_attention_mask
        )
        assert all(torch.equal(*pair) for pair in zip(results, masked, strict=True))


@pytest.mark.parametrize("padding", PADDING)
def test_an_image_alone_is_cut_out_of_a_fixed_size(backend, padding):
    """As in the pipeline of transformers, which does not pass the patch mask on."""
    processor, image = backend(do_pad=True, **PADDING[padding]), noise(40, 80, 3)
    grids = [
        grid_of(processor, processor(image, return_tensors="pt", do_pad=do_pad).pixel_values, 4)
        for do_pad in (True, False)
    ]
    depth = draw(1, *grids[0]).abs()
    results = [
        maker.post_process_depth_estimation(DepthEstimatorOutput(predicted_depth=values), [(40, 80)])[0]
        for maker, values in ((processor, depth), (backend(), depth[:, : grids[1][0], : grids[1][1]]))
    ]
    assert (grids[0] == grids[1]) == (padding not in ("fixed", "seen"))
    assert torch.equal(*(result["predicted_depth"] for result in results))


@pytest.mark.parametrize("sizes", [[(80, 80), (40, 80)], [(40, 80), (90, 40)], [(20, 10), (10, 20)]])
def test_sizes_that_the_images_had_not_ask_for_the_mask(backend, sizes):
    processor = backend(do_resize=False, do_pad=True, ensure_multiple_of=8)
    outputs = SemanticSegmenterOutput(logits=draw(2, 5, 20, 10))
    message = r"The outputs of size 20 x 10 do not match images of target_sizes.* Pass the patch_attention_mask"
    with pytest.raises(ValueError, match=message):
        processor.post_process_semantic_segmentation(outputs, sizes)


def check_pipeline(model, processor, subtask):
    """Run a pipeline on an image and check sizes and labels."""
    image = Image.fromarray(noise(40, 56, 3))
    results = pipeline("image-segmentation", model=model, image_processor=processor)(image, subtask=subtask)
    assert results
    assert {result["mask"].size for result in results} == {(56, 40)}
    assert {result["label"] for result in results} <= {*model.config.id2label.values()}
    return results


@pytest.mark.parametrize("subtask", [None, "semantic", "panoptic"])
def test_semantic_models_run_in_the_pipeline(processor, subtask):
    config = SegformerConfig(
        num_labels=3,
        depths=[1] * 4,
        hidden_sizes=[8] * 4,
        num_attention_heads=[1] * 4,
        decoder_hidden_size=8,
        semantic_loss_ignore_index=255,
    )
    torch.manual_seed(0)
    results = check_pipeline(SegformerForSemanticSegmentation(config).eval(), processor, subtask)
    assert (sum(np.array(result["mask"], dtype=int) for result in results) == 255).all()
    assert all((result["score"] is None) == (subtask == "semantic") for result in results)


@pytest.mark.parametrize("model_class", [HfViTForSemanticSegmentation, HfViTForUniversalSegmentation])
def test_a_fixed_size_lets_the_pipeline_take_images_of_several_sizes_together(backend, model_class):
    model = model_class(small_config()).eval()
    draw_weights(model)
    processor = backend(size={"longest_edge": 32}, do_pad=True, ensure_multiple_of=8, pad_size=32)
    segment = pipeline("image-segmentation", model=model, image_processor=processor)
    images = [Image.fromarray(noise(*size, 3)) for size in ((40, 56), (56, 40), (24, 60))]
    options = {"threshold": 0.0, "overlap_mask_area_threshold": 0.0}
    processor.pad_size = None
    alone = [segment(image, **options) for image in images]
    processor.pad_size = {"height": 32, "width": 32}
    for found, expected in zip(segment(images, batch_size=2, **options), alone, strict=True):
        assert [part["label"] for part in found] == [part["label"] for part in expected]
        for part, other in zip(found, expected, strict=True):
            assert (np.array(part["mask"]) != np.array(other["mask"])).mean() < 0.01


def test_depth_models_run_in_the_pipeline(processor):
    config = GLPNConfig(depths=[1] * 4, hidden_sizes=[8] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8)
    run = pipeline("depth-estimation", model=GLPNForDepthEstimation(config).eval(), image_processor=processor)
    depth = run(Image.fromarray(noise(40, 56, 3)))["predicted_depth"]
    assert depth.shape == (40, 56)
    assert (depth > 0).all()


METHODS = {
    "post_process_semantic_segmentation": semantic_outputs,
    "post_process_instance_segmentation": universal_outputs,
    "post_process_panoptic_segmentation": universal_outputs,
    "post_process_depth_estimation": depth_outputs,
}


@pytest.mark.parametrize("method", METHODS)
def test_another_number_of_sizes_or_masks_is_refused(processor, method):
    post_process, outputs = getattr(processor, method), METHODS[method]()
    with pytest.raises(ValueError, match="target_sizes has 3 entries, but the outputs are of 2 images"):
        post_process(outputs, target_sizes=[(4, 4)] * 3)
    with pytest.raises(ValueError, match=r"target_sizes\[0\] is 30, but must be \(height, width\) in whole pixels"):
        post_process(outputs, target_sizes=(30, 40))
    for size in ((0, 4), (4, -1), (3.5, 4), ("4", 4), (4, 4, 3), (4, None), torch.tensor(4), "44"):
        with pytest.raises(ValueError, match=r"target_sizes\[1\] is .*, but must be \(height, width\)"):
            post_process(outputs, target_sizes=[(4, 4), size])
    with pytest.raises(ValueError, match="target_sizes has the type int, but the outputs are of 2 images"):
        post_process(outputs, target_sizes=30)
    with pytest.raises(ValueError, match="patch_attention_mask is for 1 images, but the outputs are of 2"):
        post_process(outputs, patch_attention_mask=torch.ones(1, 3, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("post_process_semantic_segmentation", "HfViTForSemanticSegmentation or HfViTForUniversalSegmentation"),
        ("post_process_instance_segmentation", "HfViTForUniversalSegmentation"),
        ("post_process_panoptic_segmentation", "HfViTForSemanticSegmentation or HfViTForUniversalSegmentation"),
        ("post_process_depth_estimation", "HfViTForDepthEstimation"),
    ],
)
def test_outputs_of_another_model_are_refused(processor, method, model):
    outputs = ImageClassifierOutput(logits=torch.zeros(2, 5))
    with pytest.raises(ValueError, match=rf"logits \(2, 5\). Pass the outputs of {model}"):
        getattr(processor, method)(outputs)


@pytest.mark.parametrize("method", METHODS)
def test_outputs_without_names_are_refused(processor, method):
    with pytest.raises(ValueError, match="The outputs are a tuple without names"):
        getattr(processor, method)(METHODS[method]().to_tuple())


def test_sizes_are_numbers_of_any_kind(processor):
    expected = processor.post_process_semantic_segmentation(semantic_outputs(), SIZES)
    kinds = [np.array(SIZES), [torch.tensor(size) for size in SIZES], [tuple(np.array(size)) for size in SIZES]]
    for sizes in [*kinds, [[torch.tensor(side) for side in size] for size in SIZES]]:
        results = processor.post_process_semantic_segmentation(semantic_outputs(), sizes)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
