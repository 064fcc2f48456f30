"""Converted EoMT, YOLOS and depth models of transformers: outputs and losses."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn
from transformers.models.eomt.modeling_eomt import EomtLoss

from hf_vit import (
    HfViTForDepthEstimation,
    HfViTForKeypointDetection,
    HfViTForObjectDetection,
    HfViTForUniversalSegmentation,
    HfViTModel,
    cli,
)
from hf_vit.convert import parity
from hf_vit.convert.loading import convert_checkpoint
from hf_vit.convert.source import open_source
from hf_vit.model.task_configurations import HfViTUniversalSegmentationConfig
from hf_vit.model.task_universal_segmentation import universal_segmentation_loss

from ..helpers.fresh import run_without_package
from ..helpers.models import MODEL_CLASSES, pixels, small_config
from ..helpers.references import assert_close, draw_weights
from .comparisons import assert_all_matter, dtypes, gradient, reconfigure


# A large epsilon: converting it to another value would change the outputs visibly.
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "layer_norm_eps": 1e-3,
}
EOMT = {**SHAPE, "num_queries": 5, "num_blocks": 2, "num_labels": 3, "num_register_tokens": 2}
NECK = {"neck_hidden_sizes": [8, 12, 16, 20], "fusion_hidden_size": 16}
SQUARES, SHAPES = ((32, 32), (24, 24)), ((40, 40), (24, 48))
# The first fusion layer has no residual input.
FIRST_RESIDUAL = r".*fusion_stage\.layers\.0\.residual_layer1\..*"
DPT_TENSORS = {"unused": rf".*layernorm\..*|{FIRST_RESIDUAL}"}


def eomt(model_class: type[nn.Module], config: hf.PreTrainedConfig, mask_probability: float) -> nn.Module:
    model = model_class(config)
    model.attn_mask_probs.fill_(mask_probability)
    # The masks are float32, which torch rejects in a float64 model.
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda _, inputs: tuple(value if value is None else value.to(inputs[0].dtype) for value in inputs)
        )
    return model


def eomt_dinov2(mask_probability: float, **options: Any) -> nn.Module:
    config = hf.EomtConfig(**EOMT, mlp_ratio=2, **options)
    return eomt(hf.EomtForUniversalSegmentation, config, mask_probability)


def eomt_dinov3(mask_probability: float, **options: Any) -> nn.Module:
    config = hf.EomtDinov3Config(**EOMT, intermediate_size=64, **options)
    return eomt(hf.EomtDinov3ForUniversalSegmentation, config, mask_probability)


def yolos(**options: Any) -> nn.Module:
    shape = {**SHAPE, "image_size": [32, 48], "intermediate_size": 64, "num_detection_tokens": 5, "num_labels": 3}
    return hf.YolosForObjectDetection(hf.YolosConfig(**shape, **options))


def dpt_config(**options: Any) -> hf.DPTConfig:
    return hf.DPTConfig(**SHAPE, **NECK, intermediate_size=64, backbone_out_indices=[0, 1, 2, 3], **options)


def depth_anything(backbone: Mapping[str, Any] | None = None, **options: Any) -> nn.Module:
    shape = {**SHAPE, "image_size": 40, "mlp_ratio": 2, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
    config = hf.DepthAnythingConfig(
        backbone_config=hf.Dinov2Config(**{**shape, **(backbone or {})}),
        patch_size=8,
        reassemble_hidden_size=32,
        **{**NECK, "head_hidden_size": 12, **options},
    )
    return hf.DepthAnythingForDepthEstimation(config)


@dataclass(frozen=True)
class Case:
    """A source model and the outputs to compare.

    Args:
        build: Builds the source model.
        sizes: Heights and widths that the source supports, starting with the native size.
        outputs: Names of the compared outputs, in addition to hidden states.
        model_class: Our class of the same architecture.
        unused: Regular expression of tensors that do not affect the outputs.
    """

    build: Callable[[], nn.Module]
    sizes: tuple[tuple[int, int], ...]
    outputs: tuple[str, ...] = ("predicted_depth",)
    model_class: type[Any] = HfViTForDepthEstimation
    unused: str = ""


def universal(build: Callable[[], nn.Module]) -> Case:
    outputs = ("class_queries_logits", "masks_queries_logits", "last_hidden_state")
    return Case(build, ((32, 32),), outputs, HfViTForUniversalSegmentation)


QUERIED_SIZES, QUERIED = ((32, 48), (40, 24)), ("logits", "pred_boxes", "last_hidden_state")
CASES = {
    "EoMT": universal(lambda: eomt_dinov2(1.0)),
    "EoMT, annealed": universal(lambda: eomt_dinov2(0.0)),
    "EoMT, SwiGLU": universal(lambda: eomt_dinov2(1.0, use_swiglu_ffn=True, num_upscale_blocks=1)),
    "EoMT on DINOv3": universal(lambda: eomt_dinov3(1.0)),
    "EoMT on DINOv3, SwiGLU": universal(
        lambda: eomt_dinov3(0.0, use_gated_mlp=True, key_bias=True, rope_parameters={"rope_theta": 30.0})
    ),
    "YOLOS": Case(yolos, QUERIED_SIZES, QUERIED, HfViTForObjectDetection),
    "YOLOS, positions once": Case(
        lambda: yolos(use_mid_position_embeddings=False, qkv_bias=False),
        QUERIED_SIZES,
        QUERIED,
        HfViTForObjectDetection,
    ),
    "DPT": Case(lambda: hf.DPTForDepthEstimation(dpt_config()), SQUARES, **DPT_TENSORS),
    "DPT, CLS token added": Case(
        lambda: hf.DPTForDepthEstimation(dpt_config(readout_type="add", reassemble_factors=[2, 1, 1, 0.5])),
        SQUARES,
        **DPT_TENSORS,
    ),
    "DPTModel": Case(lambda: hf.DPTModel(dpt_config()), SQUARES, ("last_hidden_state", "pooler_output"), HfViTModel),
    "DPTForSemanticSegmentation": Case(
        lambda: hf.DPTForSemanticSegmentation(dpt_config(num_labels=3)),
        SQUARES,
        ("hidden_states[4]",),
        HfViTModel,
        unused=r".*layernorm\..*|(neck|head|auxiliary_head)\..*",
    ),
    "Depth Anything": Case(depth_anything, SHAPES, unused=rf".*mask_token|{FIRST_RESIDUAL}"),
    "Depth Anything, metric": Case(
        lambda: depth_anything(
            {"out_indices": [1, 3, 4], "apply_layernorm": False, "use_mask_token": False},
            depth_estimation_type="metric",
            max_depth=20,
            neck_hidden_sizes=[12, 16, 20],
            reassemble_factors=[2, 1, 0.5],
        ),
        SHAPES,
        **DPT_TENSORS,
    ),
}
cases = pytest.mark.parametrize("name", CASES)


def save_source(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    source = CASES[name].build().eval()
    draw_weights(source)
    source.to(dtype).save_pretrained(folder)
    return source


def draw_images(size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)
    return images.requires_grad_()


def run_source(source: nn.Module, images: Tensor, is_native: bool) -> dict[str, Tensor]:
    """Return all outputs except those of a segmentation head.

    Position tables are float32, because our model always resamples positions in float32.
    """
    if not is_native:
        for name, parameter in source.named_parameters():
            if "position_embedding" in name:
                parameter.data = parameter.data.float()
    run = parity.RUNNERS.get(source.config.model_type, parity.run_plain)
    return {name: value for name, value in run(source, images).items() if name != "logits" or value.ndim == 3}


@cases
@dtypes
def test_equals_source(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case = CASES[name]
    source = save_source(name, tmp_path, dtype)
    model, info = case.model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for size in case.sizes:
        images = draw_images(size, dtype)
        expected, actual = run_source(source, images, size == case.sizes[0]), parity.run_plain(model, images)
        assert {*case.outputs, "hidden_states[0]", "hidden_states[3]"} <= expected.keys() <= actual.keys()
        for output, value in expected.items():
            assert value.std() >= 0.1, f"{output} hardly varies"
            assert_close(actual[output], value, tolerance, f"{output} at {size}")
        if size == case.sizes[0]:
            assert_all_matter(source, {name: expected[name] for name in case.outputs}, case.unused)
        theirs, ours = (gradient((outputs[key] for key in case.outputs), images) for outputs in (expected, actual))
        assert_close(ours, theirs, tolerance, f"gradient at {size}")


@pytest.mark.parametrize("name", ["YOLOS", "EoMT", "DPT", "Depth Anything"])
def test_opens_under_other_classes_with_only_the_head_new(name: str, tmp_path: Path) -> None:
    save_source(name, tmp_path)
    weights = convert_checkpoint(open_source(tmp_path)).weights
    for model_class in set(MODEL_CLASSES) - {HfViTForKeypointDetection}:
        is_same = model_class is CASES[name].model_class
        options = {} if is_same else {"num_labels": 7}
        model, info = model_class.from_pretrained(tmp_path, output_loading_info=True, **options)
        state = model.base_model.state_dict()
        assert all(torch.equal(tensor, weights[f"model.{key}"]) for key, tensor in state.items())
        heads = set() if model.base_model is model else {key for key in model.state_dict() if key[:6] != "model."}
        assert info["missing_keys"] | {key for key, *_ in info["mismatched_keys"]} == (set() if is_same else heads)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("DPT", {"is_hybrid": True}, "is_hybrid=True"),
        ("DPT", {"backbone_config": {"model_type": "swinv2"}}, "backbone_config=.*swinv2"),
        ("DPT", {"backbone_config": {"model_type": "dinov2"}}, "backbone_config=.*dinov2"),
        ("DPT", {"add_projection": True}, "add_projection=True"),
        ("DPT", {"use_batch_norm_in_fusion_residual": True}, "use_batch_norm_in_fusion_residual=True"),
        ("DPT", {"readout_type": "mean"}, "readout_type"),
        ("Depth Anything", {"backbone_config": {"model_type": "swin"}}, "model_type='swin'"),
        ("Depth Anything", {"max_depth": 3}, "max_depth=3 is not supported for relative depth"),
        ("Depth Anything", {"depth_estimation_type": "log"}, "depth_estimation_type"),
        ("EoMT", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("EoMT", {"num_queries": 9}, r"queries.weight of shape \(5, 32\)"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_source(name, tmp_path)
    reconfigure(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        CASES[name].model_class.from_pretrained(tmp_path)


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
def test_loss_of_an_image_is_that_of_eomt() -> None:
    """Both models draw the same number of points in the same order, so one seed gives the same points.

    Maps are zero at the border, because EoMT pads with zeros and ours repeats the border.
    """
    options = HfViTUniversalSegmentationConfig(train_num_points=50, no_object_weight=0.3, class_weight=1.5)
    names = ("train_num_points", "no_object_weight", "class_weight")
    config = hf.EomtConfig(num_labels=4, **{name: getattr(options, name) for name in names})
    weights = {"cross_entropy": options.class_weight, "mask": options.mask_weight, "dice": options.dice_weight}
    generator = torch.Generator().manual_seed(0)
    inner = torch.randn(1, 9, 12, 16, generator=generator).requires_grad_()
    masks = nn.functional.pad(inner, (1, 1, 1, 1))
    classes = torch.randn(1, 9, 5, generator=generator).requires_grad_()
    targets, labels = torch.rand(3, 48, 64, generator=generator) > 0.6, torch.tensor([2, 0, 2])
    targets = nn.functional.pad(targets.double(), (1, 1, 1, 1))
    torch.manual_seed(1)
    losses = EomtLoss(config, {})(masks, classes, [targets], [labels])
    expected = torch.stack([weight * losses[f"loss_{name}"] for name, weight in weights.items()]).sum()
    torch.manual_seed(1)
    actual = universal_segmentation_loss(masks, classes, [targets], [labels], options, is_training=True)
    assert_close(actual, expected, 1e-9, "loss")
    theirs, ours = (torch.autograd.grad(loss, (inner, classes), retain_graph=True) for loss in (expected, actual))
    for name, own, their in zip(("masks", "classes"), ours, theirs, strict=True):
        assert_close(own, their, 1e-9, f"gradient of the {name}")


@pytest.mark.usefixtures("in_float64")
def test_doubled_resolution_goes_into_one_batch_whatever_the_grid() -> None:
    config = small_config(depth_config={**NECK, "doubles_resolution": True})
    model = HfViTForDepthEstimation(config).eval()
    draw_weights(model)
    images = [pixels(config, 1, grid) for grid in ((3, 4), (2, 2))]
    batch, mask = torch.zeros(2, 3, 24, 32), torch.zeros(2, 3, 4, dtype=torch.bool)
    for own, visible, image in zip(batch, mask, images, strict=True):
        own[:, : image.shape[2], : image.shape[3]] = image[0]
        visible[: image.shape[2] // 8, : image.shape[3] // 8] = True
    with torch.no_grad():
        together = model(batch, patch_attention_mask=mask).predicted_depth
        odd, even = (model(image).predicted_depth for image in images)
    assert (odd.shape, even.shape, together.shape) == ((1, 64, 64), (1, 32, 32), (2, 48, 64))
    assert_close(together[1, :32, :32], even[0], 1e-9, "even grid")
    resized = nn.functional.interpolate(odd[None], size=(48, 64), mode="bilinear", align_corners=True)[0, 0]
    assert_close(together[0], resized, 1e-9, "odd grid")


def convert(name: str, processor: Any, folder: Path) -> Path:
    """Convert a checkpoint with the command, including the image processor."""
    save_source(name, folder / "theirs")
    processor.save_pretrained(folder / "theirs")
    cli.main(["convert", str(folder / "theirs"), str(folder / "ours")])
    return folder / "ours"


def test_converted_depth_runs_in_the_stock_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = {"height": 40, "width": 40}
    processor = hf.DPTImageProcessor(size=size, keep_aspect_ratio=True, ensure_multiple_of=8)
    folder = convert("Depth Anything", processor, tmp_path)
    assert re.search(r"24x48  predicted_depth .* equal", capsys.readouterr().out)
    assert "pipeline_tag: depth-estimation" in (folder / "README.md").read_text()
    image = Image.effect_noise((60, 30), 80).convert("RGB")
    ours, theirs = (
        hf.pipeline("depth-estimation", model=str(place))(image)["predicted_depth"]
        for place in (folder, tmp_path / "theirs")
    )
    assert ours.shape == (30, 60)
    # The resampling of the reference overshoots the predicted range; ours does not.
    torch.testing.assert_close(ours, theirs.clamp(ours.min(), ours.max()), rtol=0, atol=0.02 * float(theirs.max()))


WITHOUT_PACKAGE = """
import json
from PIL import Image
folder, photo = sys.argv[1:]
segment = transformers.pipeline("image-segmentation", model=folder, trust_remote_code=True)
found = segment(Image.open(photo), threshold=0.0, overlap_mask_area_threshold=0.0)
parts = [[part["label"], part["score"], sum(part["mask"].tobytes())] for part in found]
print(type(segment.model).__name__, json.dumps(parts))
"""


def test_converted_segmentation_runs_in_the_stock_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processor = hf.EomtImageProcessor(size={"shortest_edge": 32, "longest_edge": 32}, do_pad=True)
    folder = convert("EoMT", processor, tmp_path)
    assert re.search(r"32x32  masks_queries_logits .* equal", capsys.readouterr().out)
    image = Image.effect_noise((60, 30), 80).convert("RGB")
    image.save(tmp_path / "photo.png")
    options = {"threshold": 0.0, "overlap_mask_area_threshold": 0.0}
    ours, theirs = (hf.pipeline("image-segmentation", model=str(place)) for place in (folder, tmp_path / "theirs"))
    assert type(ours.model) is HfViTForUniversalSegmentation
    with torch.no_grad():
        outputs = ours.model(**ours.image_processor(image, return_tensors="pt"))
    (expected,) = ours.image_processor.post_process_panoptic_segmentation(outputs, **options, target_sizes=[(30, 60)])
    found = ours(image, **options)
    assert len(found) == len(expected["segments_info"]) > 0
    for part, info in zip(found, expected["segments_info"], strict=True):
        assert (part["label"], part["score"]) == (ours.model.config.id2label[info["label_id"]], info["score"])
        mask = torch.tensor(list(part["mask"].tobytes())).reshape(30, 60) > 0
        assert torch.equal(mask, expected["segmentation"] == info["id"])
    # The reference EoMT resizes masks twice, which moves mask borders.
    for part, other in zip(found, theirs(image, **options), strict=True):
        assert (part["label"], part["score"]) == (other["label"], pytest.approx(other["score"], abs=1e-5))
    process = run_without_package(WITHOUT_PACKAGE, tmp_path / "work", str(folder), str(tmp_path / "photo.png"))
    name, said = process.stdout.strip().split(" ", 1)
    assert name == "HfViTForUniversalSegmentation"
    assert json.loads(said) == [[part["label"], part["score"], sum(part["mask"].tobytes())] for part in found]
