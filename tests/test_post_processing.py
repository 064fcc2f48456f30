"""From outputs to maps: against transformers' own image processors, padding, precision, memory, mistakes."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import DPTImageProcessor, SegformerImageProcessor
from transformers.modeling_outputs import (
    DepthEstimatorOutput,
    ImageClassifierOutput,
    SemanticSegmenterOutput,
)

from hf_vit import post_processing_hf_vit

from .image_helpers import BACKENDS


SIZES = [(37, 51), (8, 70)]


@pytest.fixture(params=BACKENDS)
def processor(request):
    return BACKENDS[request.param]()


@pytest.fixture(params=["whole", "bands"])
def bands(request, monkeypatch):
    """Every result at once, and row by row."""
    if request.param == "bands":
        monkeypatch.setattr(post_processing_hf_vit, "BAND_NUMEL", 600)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def semantic_outputs(**changes):
    return SemanticSegmenterOutput(logits=draw(2, 5, 12, 16, **changes))


def depth_outputs(low=0.5):
    return DepthEstimatorOutput(predicted_depth=draw(2, 12, 16).abs() + low)


# --- semantic


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
    """Notes how many numbers the largest result of torch's functions holds."""

    numel = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_memory_does_not_grow_with_classes(processor):
    with LargestTensor() as largest:
        processor.post_process_semantic_segmentation(SemanticSegmenterOutput(logits=draw(1, 300, 8, 8)), [(700, 500)])
    assert 350_000 <= largest.numel <= 2**24  # of 105 million logits


# --- depth


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


# --- padding


def padded(values):
    """The same outputs in the corner of larger ones, with the mask of 2 x 4 patches of which 1 x 3 are the image's."""
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


# --- mistakes


METHODS = {
    "post_process_semantic_segmentation": semantic_outputs,
    "post_process_depth_estimation": depth_outputs,
}


@pytest.mark.parametrize("method", METHODS)
def test_another_number_of_sizes_or_masks_is_refused(processor, method):
    post_process, outputs = getattr(processor, method), METHODS[method]()
    with pytest.raises(ValueError, match="target_sizes has 3 entries, but the outputs are of 2 images"):
        post_process(outputs, target_sizes=[(4, 4)] * 3)
    with pytest.raises(ValueError, match="patch_attention_mask is for 1 images, but the outputs are of 2"):
        post_process(outputs, patch_attention_mask=torch.ones(1, 3, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("post_process_semantic_segmentation", "HfViTForSemanticSegmentation"),
        ("post_process_depth_estimation", "HfViTForDepthEstimation"),
    ],
)
def test_outputs_of_another_model_are_refused(processor, method, model):
    outputs = ImageClassifierOutput(logits=torch.zeros(2, 5))
    with pytest.raises(ValueError, match=rf"logits \(2, 5\). This takes the outputs of {model}"):
        getattr(processor, method)(outputs)
