"""Compare results on a GPU with results on the CPU. Without a GPU, compare different CPU kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import is_flash_attn_2_available

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.model.deformable_decoder import deformable_attention
from hf_vit.model.pretrained import HfViTPreTrainedModel

from ..helpers.models import TRAINING_CASES, pixels, small_config
from ..helpers.references import assert_close, draw_weights


HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
ATTENTION = ["eager", "sdpa", *["flex_attention"] * HAS_GPU]
FLASH = ["flash_attention_2"] * (HAS_GPU and is_flash_attn_2_available())
# Without a GPU, models are traced but not compiled, because other tests compile kernels for the CPU.
BACKEND = "inductor" if HAS_GPU else "aot_eager"
# Maximum difference from float64 results per dtype, relative to the largest value
TOLERANCES = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


@pytest.fixture(autouse=True)
def _comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw equal random numbers on all devices, and disable TF32, which is too imprecise with batch norm."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    rand = torch.rand

    def draw(*shape: Any, device: Any = None, **options: Any) -> Tensor:
        return rand(*shape, **options).to(device or "cpu")

    monkeypatch.setattr(torch, "rand", draw)


def moved(value: Any) -> Any:
    """Move a tensor, or all tensors in dictionaries and lists, to the tested device."""
    if isinstance(value, dict):
        return {name: moved(item) for name, item in value.items()}
    return [moved(item) for item in value] if isinstance(value, list) else value.to(DEVICE)


def model_and_batch(name: str) -> tuple[HfViTPreTrainedModel, dict[str, Any]]:
    """Return the model of a test case, with reproducible random weights, and a batch of 4 examples."""
    case = TRAINING_CASES[name]
    config = small_config(**case.overrides)
    model = case.model_class(config)
    draw_weights(model)
    return model, case.make_batch(config, 4)


def classifier(attention: str, **changes: Any) -> HfViTForImageClassification:
    torch.manual_seed(0)
    config = small_config(hidden_size=64, **changes)
    return HfViTForImageClassification._from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("attention", [*ATTENTION, *FLASH])
@torch.no_grad()
def test_attention_is_that_of_plain_products_in_double_precision(attention: str, dtype: torch.dtype) -> None:
    if attention in FLASH and dtype == torch.float32:
        dtype = torch.bfloat16  # flash attention does not support float32
    model = classifier(attention)
    images = pixels(model.config, batch=3)
    expected = classifier("eager").double()(images.double()).logits
    actual = model.to(DEVICE, dtype)(images.to(DEVICE, dtype)).logits
    assert_close(actual.double().cpu(), expected, TOLERANCES[dtype], f"{attention} in {dtype}")


@torch.no_grad()
def test_a_compiled_model_is_the_same_at_other_batches() -> None:
    model = classifier("sdpa", num_hidden_layers=1).to(DEVICE)
    compiled = torch.compile(model, backend=BACKEND, dynamic=True)
    for batch in (2, 5):
        images = pixels(model.config, batch).to(DEVICE)
        assert_close(compiled(images).logits, model(images).logits, TOLERANCES[torch.float32], f"a batch of {batch}")


@pytest.mark.parametrize("resample", [2, 3])  # 2: bilinear interpolation, 3: bicubic
def test_images_are_resized_as_in_double_precision(resample: int) -> None:
    processor = HfViTImageProcessor(size={"height": 48, "width": 40}, resample=resample, do_normalize=False)
    generator = torch.Generator().manual_seed(0)
    coarse = [torch.rand(3, *size, generator=generator) for size in ((9, 7), (5, 11))]
    sizes = ((90, 70), (31, 64))
    images = [
        (255 * torch.nn.functional.interpolate(image[None], size=size, mode="bilinear")[0]).to(torch.uint8)
        for image, size in zip(coarse, sizes, strict=True)
    ]
    size = {"size": (48, 40), "mode": {2: "bilinear", 3: "bicubic"}[resample], "antialias": True}
    floats = [torch.nn.functional.interpolate(image[None].double(), **size) for image in images]
    expected = torch.cat(floats).clamp(0, 255).round()
    actual = processor([image.to(DEVICE) for image in images], device=DEVICE, return_tensors="pt")["pixel_values"]
    assert actual.device.type == DEVICE.type
    difference = (255 * actual.cpu() - expected).abs()
    assert float(difference.max()) <= 1.01  # pixels differ by at most one gray level
    # On the CPU, integer images are also rounded between the two resizing passes. This causes a mean difference of
    # 0.14 gray levels for bilinear and 0.16 for bicubic interpolation.
    assert float(difference.mean()) <= (0.01 if HAS_GPU else 0.2)


def test_deformable_attention_reads_maps_by_their_definition() -> None:
    torch.manual_seed(0)
    batch, heads, size, queries, count = 2, 2, 3, 4, 2
    maps = [torch.randn(batch, heads, size, 5, 7), torch.randn(batch, heads, size, 3, 4)]
    points = 1.4 * torch.rand(batch, queries, heads, len(maps), count, 2) - 0.2  # some points lie outside the maps
    weights = torch.rand(batch, queries, heads, len(maps), count)
    actual = deformable_attention(moved(maps), moved(points), moved(weights)).cpu()
    expected = torch.zeros(batch, queries, heads, size, dtype=torch.float64)
    for image, query, head, level, point in torch.cartesian_prod(
        *map(torch.arange, (batch, queries, heads, len(maps), count))
    ).tolist():
        field = maps[level][image, head].double()
        height, width = field.shape[1:]
        x, y = (points[image, query, head, level, point].double() * torch.tensor([width, height]) - 0.5).tolist()
        for row in range(height):
            for column in range(width):
                share = max(0.0, 1 - abs(x - column)) * max(0.0, 1 - abs(y - row))
                weight = share * float(weights[image, query, head, level, point])
                expected[image, query, head] += weight * field[:, row, column]
    assert_close(actual.double(), expected.flatten(2), 1e-4, "sums")


@pytest.mark.parametrize("name", TRAINING_CASES)
def test_losses_and_gradients_are_those_of_the_cpu_in_double_precision(name: str) -> None:
    losses, gradients = [], []
    for device, dtype in (("cpu", torch.float64), (DEVICE, torch.float32)):
        torch.manual_seed(0)
        model, batch = model_and_batch(name)
        model.to(device, dtype).train()
        inputs = batch if device == "cpu" else moved(batch)
        inputs = {
            key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for key, value in inputs.items()
        }
        torch.manual_seed(1)
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.detach().double().cpu())
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        gradients.append(torch.cat([grad.flatten() for grad in grads]).double().cpu())
    assert_close(losses[1], losses[0], TOLERANCES[torch.float32], "the loss")
    assert_close(gradients[1], gradients[0], 10 * TOLERANCES[torch.float32], "the gradient")


def test_a_step_in_bfloat16_is_that_of_float32_but_for_its_precision() -> None:
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model, batch = model_and_batch("class_numbers")
        model.to(DEVICE)
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            loss = model(**moved(batch)).loss
        loss.backward()
        assert all(torch.isfinite(weight.grad).all() for weight in model.parameters() if weight.grad is not None)
        losses[dtype] = loss.detach().float().cpu()
    assert_close(losses[torch.bfloat16], losses[torch.float32], TOLERANCES[torch.bfloat16], "the loss")
