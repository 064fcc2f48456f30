"""Small models of every class and head with random weights, inputs for them, and checks that apply to all models."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Generator, Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_vit
from hf_vit import HfViTModel
from hf_vit.model.configuration_hf_vit import to_pair
from hf_vit.model.layers import HfViTBatchNorm2d
from hf_vit.model.task_configurations import TASK_CONFIGS

from ..helpers.models import BERT, SIMMIM, SMALL, SMALL_DEPTH, VARIANTS, boxes, pixels, small_config, with_texts
from ..helpers.references import assert_close, draw_weights


SEMANTIC: dict[str, dict[str, Any]] = {
    "simple": {"head": "simple"},
    "linear": {"head": "linear", "out_indices": (2, 3)},
    "layer": {"head": "linear", "norm": "layer"},
    "conv": {"head": "conv", "hidden_size": 8},
    "mask": {"head": "mask", "num_layers": 1},
    "auxiliary": {"head": "simple", "use_auxiliary_head": True},
}
DEPTH: dict[str, dict[str, Any]] = {
    "linear": {"head": "linear", "out_indices": (0, 1, 3), "num_bins": 16},
    "conv": {"head": "conv", "max_depth": None},
    "dpt": SMALL_DEPTH,
    "dpt_add": {**SMALL_DEPTH, "readout_type": "add"},
}
RELATIVE = {name: {**own, "depth_estimation_type": "relative"} for name, own in DEPTH.items()}
KEYPOINTS: dict[str, dict[str, Any]] = {
    "classic": {"head": "classic", "hidden_size": 8},
    "instance": {"head": "classic", "hidden_size": 8, "norm": "instance"},
    "simple": {"head": "simple", "scale_factor": 2},
}
QUERIES: dict[str, Any] = {"decoder": "queries", "num_queries": 6}
MIDDLE = {"num_blocks": 2, "num_layers": 1, "use_mid_position_embeddings": True, "class_loss": "iou_aware"}
DECODERS: dict[str, dict[str, Any]] = {
    "all_blocks": QUERIES,
    "behind_the_encoder": {**QUERIES, "num_blocks": 0, "num_layers": 2},
    "mid_positions": {**QUERIES, **MIDDLE},
}
DEFORMABLE: dict[str, Any] = {"decoder": "deformable", "num_queries": 4, "num_layers": 2, "hidden_size": 16}
DEFORMABLE |= {"num_attention_heads": 2, "num_points": 2, "num_groups": 3, "scale_factors": (2, 0.5)}
TOWERS: dict[str, dict[str, Any]] = {
    "causal": SMALL["text_config"],
    "all tokens": {**SMALL["text_config"], "is_causal": False, "pooling": "mean"},
    "seen padding": {**SMALL["text_config"], "is_causal": False, "pooling": "last", "pad_token_id": 1},
    "first": {**SMALL["text_config"], "is_causal": False, "pooling": "first"},
    "bert": {"encoder_config": BERT},
}
# Name of a head -> model class, and the options that select the head.
Heads = dict[str, tuple[type[Any], dict[str, Any]]]


def name_of(kind: type[Any] | str) -> str:
    return kind if isinstance(kind, str) else kind.__name__


def heads_of(task: str, field: str, options: dict[str, dict[str, Any]], suffix: str = "") -> Heads:
    return {f"{name}{suffix}": (getattr(hf_vit, f"HfViTFor{task}"), {field: own}) for name, own in options.items()}


DENSE: Heads = {
    **heads_of("SemanticSegmentation", "segmentation_config", SEMANTIC),
    **heads_of("DepthEstimation", "depth_config", DEPTH, "_metric"),
    **heads_of("DepthEstimation", "depth_config", RELATIVE, "_relative"),
    **heads_of("KeypointDetection", "keypoint_config", KEYPOINTS, "_keypoints"),
    "universal": (hf_vit.HfViTForUniversalSegmentation, {}),
    "universal_mask": (
        hf_vit.HfViTForUniversalSegmentation,
        {"universal_segmentation_config": {**SMALL["universal_segmentation_config"], "head": "mask"}},
    ),
}
OBJECTS = heads_of("ObjectDetection", "detection_config", {**DECODERS, "deformable": DEFORMABLE})
OBJECTS["in_windows"] = (
    hf_vit.HfViTForObjectDetection,
    {"detection_config": {**DEFORMABLE, "projector_norm": "batch"}, **VARIANTS["windows"]},
)
MASKED: Heads = {  # masked autoencoders do not support windows
    "mae": (hf_vit.HfViTForMaskedImageModeling, {"window_size": None, "global_attention_layers": ()}),
    "simmim": (hf_vit.HfViTForMaskedImageModeling, SIMMIM),
}
SOFTMAX = {"loss": "softmax", "projection_dim": None}
IMAGE_TEXT: Heads = {
    **heads_of("ZeroShotImageClassification", "text_config", TOWERS),
    "softmax": (hf_vit.HfViTForZeroShotImageClassification, {"contrastive_config": SOFTMAX}),
}
HEADS = {**DENSE, **OBJECTS, **MASKED, **IMAGE_TEXT}
all_towers = pytest.mark.parametrize("tower", TOWERS)


def build(kind: type[Any] | str = HfViTModel, variant: str = "plain", **overrides: Any) -> Any:
    """Return a model in evaluation mode with random weights and statistics. `kind` is a class or a head's name."""
    model_class, options = HEADS[kind] if isinstance(kind, str) else (kind, {})
    model = model_class(small_config(variant, **{**options, **overrides}))
    draw_weights(model)
    return draw_statistics(model).eval()


def draw_statistics(model: nn.Module) -> nn.Module:
    generator = Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, HfViTBatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    return model


def inputs_of(model: Any, batch: int = 2, grid: tuple[int, int] | None = None, seed: int = 0) -> dict[str, Any]:
    """Return inputs of a model: images, and the targets, noise or texts that its class requires."""
    if isinstance(model, hf_vit.HfViTForZeroShotImageClassification):
        return {**with_texts(model.config, batch), "return_loss": True}
    images = pixels(model.config, batch, grid).to(model.dtype)
    return {"pixel_values": images, **targets(model, images, seed)}


def targets(model: Any, images: Tensor, seed: int = 0) -> dict[str, Any]:
    """Return training targets for `images`, some of which are ignored, or the noise that selects masked patches."""
    generator, count = Generator().manual_seed(seed), len(images)
    size, counts = (count, *images.shape[-2:]), [1 + index % 3 for index in range(count)]
    classes = [torch.randint(5, (number,), generator=generator) for number in counts]
    if isinstance(model, hf_vit.HfViTForImageClassification):
        return {"labels": torch.randint(5, (count,), generator=generator)}
    if isinstance(model, hf_vit.HfViTForDepthEstimation):
        depth = 10 * torch.rand(size, generator=generator, dtype=images.dtype)
        return {"labels": depth.where(depth > 2, 0)}
    if isinstance(model, hf_vit.HfViTForKeypointDetection):
        places = torch.rand(count, 5, 2, generator=generator) * torch.tensor(images.shape[:1:-1])
        return {"labels": torch.cat((places, torch.tensor([2, 1, 0, 2, 1])[:, None].expand(count, 5, 1)), dim=2)}
    if isinstance(model, hf_vit.HfViTForSemanticSegmentation):
        labels = torch.randint(-1, 5, size, generator=generator)
        return {"labels": labels.where(labels >= 0, 255)}
    if isinstance(model, hf_vit.HfViTForUniversalSegmentation):
        masks = [(torch.rand(number, *size[1:], generator=generator) < 0.4).float() for number in counts]
        return {"mask_labels": masks, "class_labels": classes}
    if isinstance(model, hf_vit.HfViTForObjectDetection):
        return {"labels": [{"class_labels": own, "boxes": boxes(generator, len(own))} for own in classes]}
    if isinstance(model, hf_vit.HfViTForMaskedImageModeling):
        num_patches = images[0, 0].numel() // math.prod(to_pair(model.config.patch_size))
        return {"noise": torch.rand(count, num_patches, generator=generator)}
    return {}


def pad_images(
    images: list[Tensor], patch_size: int | tuple[int, int] = 8, value: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return images of different sizes, padded to the size of the last image, and the mask of valid patches."""
    height, width = images[-1].shape[2:]
    sides = [(0, width - image.shape[3], 0, height - image.shape[2]) for image in images]
    padded = [nn.functional.pad(image, side, value=value) for image, side in zip(images, sides, strict=True)]
    shown = [
        nn.functional.pad(torch.ones_like(image[0, 0]) > 0, side) for image, side in zip(images, sides, strict=True)
    ]
    rows, columns = to_pair(patch_size)
    return torch.cat(padded), torch.stack(shown)[:, ::rows, ::columns]


def partial_mask(rows: int = 4, columns: int = 4) -> Tensor:
    """Return a patch mask for two images. The first image has only two valid rows of patches."""
    mask = torch.ones(2, rows, columns, dtype=torch.bool)
    mask[0, 2:] = False
    return mask


def values(outputs: Any) -> list[Tensor]:
    """Return all tensors in a model output."""
    if isinstance(outputs, Tensor):
        return [outputs]
    parts = outputs.values() if isinstance(outputs, dict) else outputs
    return [value for part in parts for value in values(part)]


def assert_same(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    actual, expected = values(actual), values(expected)
    assert len(actual) == len(expected)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a.dtype == torch.bool:
            assert torch.equal(a, e), f"output {index}"
        else:
            assert_close(a, e, tolerance, f"output {index}")


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    weights = expected.state_dict()
    for name, tensor in actual.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def train(model: Any, batch: dict[str, Any], steps: int, max_lr: float = 4e-3, clips: bool = False) -> list[float]:
    """Train on one batch and return the losses; the model is in evaluation mode afterwards."""
    optimizer = torch.optim.AdamW(model.train().parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr, total_steps=steps)
    losses = []
    for step in range(steps):
        if isinstance(model, hf_vit.HfViTForUniversalSegmentation):
            model.anneal_masks(step / steps)
        loss = model(**batch).loss
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


def training_gradients(model: nn.Module, pixel_values: Tensor, **given: Any) -> dict[str, Tensor]:
    """Return the gradients of the loss or, without targets, of a function of all outputs."""
    model.zero_grad()
    outputs = model(pixel_values=pixel_values, **given)
    losses = [outputs.loss] if given else [value.float().square().mean() for value in values(outputs)]
    torch.stack(losses).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def replace_flash_attention(monkeypatch: pytest.MonkeyPatch, drops_padding: bool = False) -> list[tuple[Any, Any]]:
    """Replace flash attention, which needs a GPU, with PyTorch code. The returned list records query and mask shapes.

    A mask (B, L) applies to the keys. If there are fewer queries than keys, queries correspond to the end of the mask.
    If `drops_padding`, outputs of padded queries are zero.
    """
    seen = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        seen.append((tuple(query.shape), None if mask is None else tuple(mask.shape)))
        allowed = None if mask is None else mask[:, None, None, :].bool()
        attended = nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=kwargs["scaling"])
        if mask is not None and drops_padding:
            attended = attended.where(mask[:, None, -query.shape[2] :, None].bool(), 0)
        return attended.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", attend)
    return seen


def check_saved(model: Any, given: dict[str, Any], folder: Path) -> None:
    """Assert that a model has the same weights, task options and outputs after saving and loading."""
    model.save_pretrained(folder)
    reloaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_weights(model, reloaded)
    for field in TASK_CONFIGS:
        assert reloaded.config.to_dict().get(field) == model.config.to_dict().get(field), field
    assert_same(reloaded(**given), model(**given))


def check_tuple_output(model: Any, given: dict[str, Any], **options: Any) -> None:
    """Assert that a call changes no input and returns a tuple of the same values if `return_dict` is False."""
    kept, config = copy.deepcopy(given), model.config.to_dict()
    expected, as_tuple = model(**given, **options), model(**given, **options, return_dict=False)
    assert_same([given], [kept])
    assert model.config.to_dict() == config
    model.config.return_dict = False
    for outputs in (as_tuple, model(**given, **options)):
        assert isinstance(outputs, tuple)
        assert_same(outputs, expected)
    model.config.return_dict = True


def check_checkpointing(model: Any, given: dict[str, Any], reentrant: bool) -> None:
    """Assert that gradients are equal with and without gradient checkpointing."""
    expected = training_gradients(model.train(), **given)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    model.enable_input_require_grads()
    actual = training_gradients(model, **given)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        # The gradients of several feature levels may be summed in a different order.
        assert_close(actual[name], gradient, 2e-6, name)


def check_compiled(
    model: Any, sizes: list[dict[str, Any]], tolerance: float = 1e-6, backend: str = "aot_eager", **options: Any
) -> None:
    """Assert that a model compiles to one graph, once per image size, and has the same outputs."""
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    with torch.no_grad():
        expected = [model(**given, **options) for given in sizes]
        for given in sizes:
            compiled(**given, **options)
        with torch.compiler.set_stance("fail_on_recompile"):
            for given, outputs in zip(sizes, expected, strict=True):
                assert_same(compiled(**given, **options), outputs, tolerance)


def check_spread(model: Any, given: dict[str, Any], folder: Path) -> None:
    """Assert that outputs do not change if parts of the model are offloaded to disk."""
    model.save_pretrained(folder)
    expected = model(**given)
    assert_same(type(model).from_pretrained(folder, device_map="auto")(**given), expected)
    prefix = "" if model.base_model is model else "model."
    places = {name: "disk" for name, _ in model.named_children() if name not in ("model", "encoder")}
    places |= {f"{prefix}{name}": "cpu" for name, _ in model.base_model.named_children() if name != "encoder"}
    places |= {f"{prefix}encoder.layers.{index}": "disk" if index == 1 else "cpu" for index in range(3)}
    options = {"main_device": "cpu", "offload_dir": folder / "offload", "force_hooks": True}
    assert_same(dispatch_model(copy.deepcopy(model), device_map=places, **options)(**given), expected)
