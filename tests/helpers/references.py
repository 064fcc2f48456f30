"""Reference models from other libraries, conversion of their weight names to those of hf_vit, and parity checks."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


# Configuration of the small models that are compared with other libraries.
SHAPE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SHAPE |= {"image_size": 32, "patch_size": 8}
PARTS = {"q": "query", "k": "key", "v": "value"}
# Substitutions that convert weight names of transformers and timm to our names. They are applied in order.
RENAMES = (
    (r"^(vit|deit|dinov2|dinov2_with_registers)\.", ""),
    # Names in decoders for masked image modeling in transformers.
    (r"^decoder\.decoder_pos_embed", "masked_image_modeling_head.mae.position_embeddings"),
    (r"^decoder\.decoder_embed\.", "masked_image_modeling_head.mae.embedding."),
    (r"^decoder\.decoder_pred\.", "masked_image_modeling_head.mae.predictor."),
    (r"^decoder\.(?:decoder_)?(layers|norm|mask_token)", r"masked_image_modeling_head.mae.\1"),
    (r"^decoder\.0\.", "masked_image_modeling_head.simmim.predictor."),
    # Names in encoders in transformers.
    (r"^(encoder\.layer|model\.layer|layers)\.", "encoder.layers."),
    (r"\.self_attn\.", ".attention."),
    (r"\.attention\.attention\.(query|key|value)\.", r".attention.\1."),
    (r"\.attention\.([qkv])_proj\.", lambda match: f".attention.{PARTS[match[1]]}."),
    (r"\.attention\.(output\.dense|o_proj|out_proj)\.", ".attention.projection."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^layernorm\.", "norm."),
    (r"\.layer_scale(\d)\.lambda1", r".layer_scale\1.scale"),
    (r"\.mlp\.(gate|up|down)_proj\.", r".mlp.\1."),
    (r"\.mlp\.weights_out\.", ".mlp.down."),
    (r"embeddings\.patch_embeddings\.(weight|bias)", r"embeddings.patch_embeddings.projection.\1"),
    (r"^cls_classifier\.", "classifier."),
    (r"^embeddings\.class_embedding", "embeddings.cls_token"),
    (r"^embeddings\.patch_embedding\.", "embeddings.patch_embeddings.projection."),
    (r"^embeddings\.position_embedding\.weight", "embeddings.position_embeddings"),
    (r"^pre_layrnorm\.", "pre_norm."),
    (r"^post_layernorm\.", "norm."),
    (r"\.layer_norm(\d)\.", r".norm\1."),
    (r"^head\.probe", "attention_pooling.probe"),
    (r"^head\.attention\.in_proj_", "attention_pooling.in_proj."),
    (r"^head\.(?:attention\.)?(projection|mlp)\.", r"attention_pooling.\1."),
    (r"^head\.layernorm\.", "attention_pooling.norm."),
    # Names in timm models.
    (r"^blocks\.", "encoder.layers."),
    (r"^(cls_token|mask_token)", r"embeddings.\1"),
    (r"^dist_token", "embeddings.distillation_token"),
    (r"^reg_token", "embeddings.register_tokens"),
    (r"^pos_embed", "embeddings.position_embeddings"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
    (r"^norm_pre\.", "pre_norm."),
    (r"^fc_norm\.", "norm."),
    (r"\.attn\.([qv])_bias", lambda match: f".attention.{PARTS[match[1]]}_bias"),
    (r"\.attn\.q_norm\.", ".attention.query_norm."),
    (r"\.attn\.k_norm\.", ".attention.key_norm."),
    (r"\.attn\.proj\.", ".attention.projection."),
    (r"\.attn\.", ".attention."),
    (r"\.ls(\d)\.gamma", r".layer_scale\1.scale"),
    (r"\.gamma_(\d)", r".layer_scale\1.scale"),
    (r"^head_dist\.", "distillation_classifier."),
    (r"^head\.", "classifier."),
)


def plain_mlp(match: re.Match[str]) -> str:
    return {"up": ".mlp.fc1.", "down": ".mlp.fc2."}[match[1]]


def rename(tensors: Mapping[str, Tensor], *, base_prefix: str = "") -> dict[str, Tensor]:
    """Convert weights or gradients of a reference model to our names and tensor layout.

    Gradients can be converted like weights because the conversion is linear.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        if ".mlp.weights_in." in name:  # transformers before 5.20 joins the gate and up projections
            gate, up = tensor.chunk(2)
            renamed[name.replace("weights_in", "gate")], renamed[name.replace("weights_in", "up")] = gate, up
        elif ".in_proj." in name:
            query, key, value = tensor.chunk(3)
            renamed[name.replace("in_proj", "query")] = query
            renamed[name.replace("in_proj", "key_value")] = torch.cat((key, value))
        else:
            renamed[name] = tensor
    for name in [name for name in renamed if name.endswith(".attention.query.weight")]:
        stem = name.removesuffix("query.weight")
        renamed[f"{stem}qkv.weight"] = torch.cat(
            [renamed.pop(f"{stem}{part}.weight") for part in ("query", "key", "value")]
        )
        biases = {part: renamed.pop(f"{stem}{part}.bias", None) for part in ("query", "key", "value")}
        if biases["key"] is not None:
            renamed[f"{stem}qkv.bias"] = torch.cat([biases["query"], biases["key"], biases["value"]])
        elif biases["query"] is not None:
            renamed[f"{stem}query_bias"], renamed[f"{stem}value_bias"] = biases["query"], biases["value"]
    # DINOv3 uses the names "up" and "down" even for an MLP without a gate.
    if not any(".mlp.gate." in name for name in renamed):
        renamed = {re.sub(r"\.mlp\.(up|down)\.", plain_mlp, name): tensor for name, tensor in renamed.items()}
    for name in ("mask_token", "cls_token", "position_embeddings"):  # the shape may be (D,), (1, D) or (N, D)
        if f"embeddings.{name}" in renamed:
            tensor = renamed[f"embeddings.{name}"]
            renamed[f"embeddings.{name}"] = tensor.reshape(1, -1, tensor.shape[-1])
    # Removes empty tensors, such as missing register tokens.
    renamed = {name: tensor for name, tensor in renamed.items() if tensor.numel()}
    unprefixed = ("classifier.", "distillation_classifier.", "masked_image_modeling_head.", "pixel_values")
    return {name if name.startswith(unprefixed) else base_prefix + name: tensor for name, tensor in renamed.items()}


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Draw random nonzero weights, including heads, positions, gains and biases, so that each affects the output."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # fixed position tables keep their values
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        if "token" in name or "pos" in name:
            parameter.copy_(0.5 * noise)
        elif parameter.ndim > 1:
            parameter.copy_(noise * 1.5 / parameter[0].numel() ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(0.8 + 0.3 * noise)


@dataclass
class Parity:
    """Comparison of a reference model with our model.

    Positions named `float32_positions` stay in float32 in a float64 reference if they are resampled, because our model
    always resamples in float32. Weights whose names end with `without_effect` add a constant to all keys, which the
    softmax cancels. `rearrange` reorders renamed weights and gradients if the reference has another layout.
    """

    reference: nn.Module
    ours: nn.Module
    run_reference: Callable[[nn.Module, Tensor], Mapping[str, Tensor]]
    run_converted: Callable[[nn.Module, Tensor], Mapping[str, Tensor]]
    sizes: Iterable[tuple[int, int]] = ((32, 32), (24, 48))
    float32_positions: str | None = None
    without_effect: str | None = None
    rearrange: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict

    def __post_init__(self) -> None:
        draw_weights(self.reference)
        self.base_prefix = "" if self.ours.base_model is self.ours else "model."
        mapped = self._rename(dict(self.reference.named_parameters()))
        fixed = {name for name, _ in self.ours.named_buffers()}
        own = dict(self.ours.named_parameters())
        assert own.keys() == mapped.keys() - fixed, own.keys() ^ (mapped.keys() - fixed)
        with torch.no_grad():
            for name, parameter in own.items():
                assert parameter.shape == mapped[name].shape, name
                parameter.copy_(mapped[name])
        for name, buffer in self.ours.named_buffers():
            assert_close(buffer, mapped[name], 1e-7, name)

    def check(self, dtype: torch.dtype) -> None:
        """Assert that both models have equal outputs and gradients, and that every weight affects the output."""
        # The float32 tolerance is ten times stricter than required: a changed bias exceeds it by a factor of 100.
        tolerance = 1e-9 if dtype == torch.float64 else 1e-5
        self.ours.to(dtype).eval()
        for size in self.sizes:
            self.reference.to(dtype).eval()
            resampled = self.float32_positions if size != (32, 32) and dtype == torch.float64 else None
            if resampled is not None:
                table = self.reference.get_parameter(resampled)
                table.data = table.data.float()
            images = torch.randn(2, self.ours.config.num_channels, *size, generator=torch.Generator().manual_seed(1))
            expected, expected_gradients = self._run(self.reference, self.run_reference, images.to(dtype))
            actual, gradients = self._run(self.ours, self.run_converted, images.to(dtype))
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                assert value.std() >= 0.1, f"{name} hardly varies"
                assert_close(actual[name], value, tolerance, f"{name} at {size}")
            expected_gradients = self._rename(expected_gradients)
            largest = max(float(value.abs().max()) for value in gradients.values())
            for name, value in gradients.items():
                if self.without_effect and name.endswith(self.without_effect):
                    assert value.abs().max() <= tolerance * largest
                else:
                    in_float32 = resampled is not None and "position_embeddings" in name
                    allowed = 1e-6 if in_float32 else tolerance
                    assert_close(value, expected_gradients[name].to(dtype), allowed, f"gradient of {name} at {size}")
            self._check_sensitivity(images.to(dtype), 100 * tolerance)

    def _rename(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.rearrange(rename(tensors, base_prefix=self.base_prefix))

    def _run(
        self, model: nn.Module, run: Callable[[nn.Module, Tensor], Mapping[str, Tensor]], images: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        images = images.clone().requires_grad_()
        model.zero_grad()
        outputs = dict(run(model, images))
        generator = torch.Generator().manual_seed(2)
        loss = torch.stack(
            [
                (value * torch.randn(value.shape, generator=generator).to(value.dtype)).sum()
                for value in outputs.values()
            ]
        ).sum()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: value.detach() for name, value in outputs.items()}, {"pixel_values": images.grad, **gradients}

    @torch.no_grad()
    def _check_sensitivity(self, images: Tensor, least: float) -> None:
        before = self.run_converted(self.ours, images)
        for name, parameter in self.ours.named_parameters():
            if self.without_effect and name.endswith(self.without_effect):
                continue
            kept = parameter.clone()
            parameter.mul_(1.1)
            after = self.run_converted(self.ours, images)
            parameter.copy_(kept)
            change = max(float((after[key] - before[key]).abs().max() / before[key].abs().max()) for key in before)
            assert change > least, f"{name} has almost no effect: {change}"


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Assert that the largest difference is at most `tolerance` times the largest expected value."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    error = float(((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).detach())
    assert error <= tolerance, f"{what} differs by {error:.2e} of the largest value"


def assert_identical(value: Any, expected: Any) -> None:
    """Assert that tensors, numbers and strings, in dictionaries and lists, are identical bit by bit."""
    assert type(value) is type(expected)
    if isinstance(value, Tensor):
        assert torch.equal(value, expected)
    elif isinstance(value, Mapping):
        assert list(value) == list(expected)
        for key, item in value.items():
            assert_identical(item, expected[key])
    elif isinstance(value, list | tuple):
        assert len(value) == len(expected)
        for item, expected_item in zip(value, expected, strict=True):
            assert_identical(item, expected_item)
    else:
        assert value == expected


def hidden_states(outputs: Any) -> dict[str, Tensor]:
    """Return all hidden states and the last hidden state of a model output, by name."""
    states = {f"hidden_states[{i}]": state for i, state in enumerate(outputs.hidden_states)}
    return {**states, "last_hidden_state": outputs.last_hidden_state}
