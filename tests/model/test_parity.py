"""Test that models with each architecture option have the outputs and gradients of models of other libraries."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from timm.layers import build_rotary_pos_embed, resample_abs_pos_embed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEEmbeddings

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTModel
from hf_vit.model.configuration_hf_vit import PRESETS
from hf_vit.model.embeddings import resample_to_grid, rotary_position_embeddings
from hf_vit.model.encoder import HfViTDropPath

from ..helpers.references import SHAPE, Parity, hidden_states


pytestmark = pytest.mark.slow  # slow, because many models are compared


DINOV2_SHAPE = {**SHAPE, "mlp_ratio": 2, "layerscale_value": 0.5}
del DINOV2_SHAPE["intermediate_size"]
TIMM_SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 2}
TIMM_SHAPE |= {"num_classes": 5, "dynamic_img_size": True}
EPS = {"layer_norm_eps": 1e-6}
RESAMPLED = {"float32_positions": "embeddings.position_embeddings"}
RESAMPLED_ROWS = {"float32_positions": "embeddings.position_embedding.weight"}
MASK = torch.zeros(2, 64, dtype=torch.bool).index_fill(1, torch.tensor([1, 5, 6]), True)
Run = Callable[[nn.Module, Tensor], dict[str, Tensor]]
CASES: dict[str, Callable[[], Parity]] = {}


def case(make_pair: Callable[[], Parity]) -> Callable[[], Parity]:
    CASES[make_pair.__name__] = make_pair
    return make_pair


def states(model: nn.Module, images: Tensor, *, with_pooled: bool = True, **kwargs: Any) -> dict[str, Tensor]:
    """Return all hidden states by name, and the pooled output if the model has one."""
    outputs = model(images, output_hidden_states=True, **kwargs)
    pooled = outputs.get("pooler_output") if with_pooled else None
    return hidden_states(outputs) | ({} if pooled is None else {"pooler_output": pooled})


def masked(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    return states(model, images, bool_masked_pos=MASK[:, : images.shape[2] * images.shape[3] // 64])


def logits(model: nn.Module, images: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    outputs = model(images, **kwargs)
    if isinstance(outputs, Tensor):  # timm models return a tensor
        return {"logits": outputs}
    names = ("logits", "cls_logits", "distillation_logits")
    return {name: outputs[name] for name in names if outputs.get(name) is not None}


# transformers models resample positions only if an argument requests it.
states_at_any_size = partial(states, interpolate_pos_encoding=True)


def pair(
    reference: nn.Module, ours: dict[str, Any], run: Run, run_reference: Run | None = None, **options: Any
) -> Parity:
    """Return a reference model and our model, which is a classifier if the number of labels is given."""
    model_class = HfViTForImageClassification if "num_labels" in ours else HfViTModel
    return Parity(reference, model_class(HfViTConfig(**{**SHAPE, **ours})), run_reference or run, run, **options)


@case
def vit() -> Parity:
    reference = hf.ViTModel(hf.ViTConfig(**SHAPE, **EPS))
    return pair(reference, {"use_pooler": True}, states, states_at_any_size, **RESAMPLED)


@case
def vit_relu_no_bias() -> Parity:
    options = {**EPS, "hidden_act": "relu", "qkv_bias": False}
    reference = hf.ViTModel(hf.ViTConfig(**SHAPE, **options), add_pooling_layer=False)
    runs = (partial(run, with_pooled=False) for run in (states, states_at_any_size))
    return pair(reference, options, *runs, **RESAMPLED)


@case
def deit_distilled() -> Parity:
    reference = hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**SHAPE, **EPS, num_labels=5))
    ours = {"num_labels": 5, "use_distillation_token": True}
    at_any_size = partial(logits, interpolate_pos_encoding=True)
    return pair(reference, ours, logits, at_any_size, float32_positions="deit.embeddings.position_embeddings")


@case
def dinov2() -> Parity:
    reference = hf.Dinov2Model(hf.Dinov2Config(**DINOV2_SHAPE))
    return pair(reference, {"layerscale_value": 0.5, "use_mask_token": True}, masked)


@case
def dinov2_linear_classifier() -> Parity:
    reference = hf.Dinov2ForImageClassification(hf.Dinov2Config(**DINOV2_SHAPE, num_labels=5, use_mask_token=False))
    return pair(reference, {"layerscale_value": 0.5, "pooling": "cls_mean", "num_labels": 5}, logits)


@case
def dinov2_registers_swiglu() -> Parity:
    config = hf.Dinov2WithRegistersConfig(**DINOV2_SHAPE, num_register_tokens=3, use_swiglu_ffn=True)
    ours = {"intermediate_size": 48, "hidden_act": "silu"}  # 2/3 of 64, rounded up to a multiple of 8
    ours |= {"layerscale_value": 0.5, "use_mask_token": True, "num_register_tokens": 3, "use_gated_mlp": True}
    ours["position_antialias"] = True
    return pair(hf.Dinov2WithRegistersModel(config), ours, masked, sizes=((32, 32), (24, 48), (16, 24)))


@case
def dinov3() -> Parity:
    options = {"num_register_tokens": 2, "layerscale_value": 0.5, "layer_norm_eps": 1e-5, "key_bias": False}
    options |= {"use_gated_mlp": True, "hidden_act": "silu"}
    reference = hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SHAPE, **options))
    ours = {**options, "position_embedding_type": "rotary", "use_mask_token": True}
    return pair(reference, ours, masked, sizes=((32, 32), (24, 48), (64, 64)))


@case
def dinov3_without_biases() -> Parity:
    shared = {"proj_bias": False, "mlp_bias": False, "rope_theta": 30.0}
    theirs = hf.DINOv3ViTConfig(**SHAPE, **shared, **EPS, query_bias=False, value_bias=False)
    ours = {**shared, "qkv_bias": False, "layerscale_value": 1.0, "use_mask_token": True, "num_register_tokens": 0}
    return pair(hf.DINOv3ViTModel(theirs), {**ours, "position_embedding_type": "rotary"}, masked)


@case
def mae_encoder() -> Parity:
    def run(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        # The noise is ascending, so that patches are not shuffled. No patch is masked.
        return states_at_any_size(model, images, noise=torch.arange(images[0, 0].numel() // 64).expand(2, -1))

    config = hf.ViTMAEConfig(**SHAPE, **EPS, mask_ratio=0.0)
    reference, embeddings = hf.ViTMAEModel(config), ViTMAEEmbeddings(config)
    embeddings.initialize_weights()  # transformers 5.23 leaves the position table of a new model at zero
    reference.embeddings.position_embeddings.data.copy_(embeddings.position_embeddings)
    ours = {"position_embedding_type": "sincos2d"}
    return pair(reference, ours, partial(states, with_pooled=False), run, **RESAMPLED)


def of_timm(theirs: dict[str, Any], ours: dict[str, Any], **options: Any) -> Parity:
    """Return a timm classifier and our classifier with the same weights."""
    reference = VisionTransformer(**TIMM_SHAPE, **theirs)
    return pair(reference, {**ours, "num_labels": 5, "position_antialias": True}, logits, **options)


CASES["timm_classifier"] = partial(of_timm, {}, {}, sizes=((32, 32), (24, 48), (16, 16)))
CASES["timm_without_positions"] = partial(of_timm, {"pos_embed": "none"}, {"position_embedding_type": "none"})
norm_after_pooling = {"pooling": "mean", "norm_after_pooling": True}
CASES["timm_norm_after_pooling"] = partial(of_timm, {"global_pool": "avg"}, norm_after_pooling)


@case
def timm_registers_qk_norm() -> Parity:
    theirs = {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.1, "fc_norm": False}
    ours = {"num_register_tokens": 2, "prefix_has_position": False, "layerscale_value": 0.1, "pooling": "mean"}
    norms = {"qk_norm": True, "global_pool": "avg"}, {"use_qk_norm": True}
    return of_timm(theirs | norms[0], ours | norms[1], without_effect="key_norm.bias")


@case
def timm_rms_norm_without_cls() -> Parity:
    norm = partial(timm.layers.RmsNorm, eps=1e-6)
    return of_timm(
        {"class_token": False, "global_pool": "avg", "fc_norm": False, "qk_norm": True, "norm_layer": norm},
        {"use_cls_token": False, "pooling": "mean", "use_qk_norm": True, "norm_type": "rmsnorm"},
    )


class Dinov3WithTable(hf.DINOv3ViTModel):
    """DINOv3 model with an additional learned position table, which is resampled in the same way as in timm."""

    def __init__(self, config: hf.DINOv3ViTConfig) -> None:
        super().__init__(config)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, config.hidden_size))
        self.embeddings.register_forward_hook(self.add_positions)

    def add_positions(self, module: nn.Module, inputs: tuple[Tensor], tokens: Tensor) -> Tensor:
        grid = [side // 8 for side in inputs[0].shape[2:]]
        table = resample_abs_pos_embed(self.pos_embed, grid, [4, 4], num_prefix_tokens=0, antialias=False)
        return torch.cat((tokens[:, :3], tokens[:, 3:] + table), dim=1)


@case
def learned_and_rotary() -> Parity:
    options = {**EPS, "num_register_tokens": 2, "layerscale_value": 0.5, "key_bias": False}
    ours = {"position_embedding_type": "learned+rotary", "prefix_has_position": False, "use_mask_token": True}
    return pair(Dinov3WithTable(hf.DINOv3ViTConfig(**SHAPE, **options)), options | ours, masked)


@case
def clip() -> Parity:
    def without_last(run: Run, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        outputs = run(model, images)
        last = outputs.pop("last_hidden_state")
        # In the reference, last_hidden_state equals the output of the last block, because there is no final norm.
        assert torch.equal(last, outputs["hidden_states[2]"]) is (run is states_at_any_size)
        return outputs

    reference = hf.CLIPVisionModel(hf.CLIPVisionConfig(**SHAPE, hidden_act="quick_gelu"))
    # CLIP has no bias in its patch embedding. Add a bias to compare the gradient of the bias in our model.
    reference.embeddings.patch_embedding = nn.Conv2d(3, 32, kernel_size=8, stride=8)
    ours = {"hidden_act": "quick_gelu", "use_pre_layernorm": True, "layer_norm_eps": 1e-5}
    runs = (partial(without_last, run) for run in (states, states_at_any_size))
    return pair(reference, ours, *runs, **RESAMPLED_ROWS)


@case
def siglip() -> Parity:
    options = {**EPS, "hidden_act": "gelu_pytorch_tanh"}
    reference = hf.SiglipVisionModel(hf.SiglipVisionConfig(**SHAPE, **options))
    ours = {**options, "use_cls_token": False, "pooling": "attention"}
    return pair(reference, ours, states, states_at_any_size, **RESAMPLED_ROWS)


def half_rotation(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights for rotary pairs (0, 1), (2, 3), … to weights for pairs (0, d/2), (1, d/2 + 1), …."""
    rearranged = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".qkv.weight"):
            query_key = tensor[:64].reshape(2, 4, 4, 2, 32).transpose(2, 3)  # (2, heads, halves, d/2, D)
            rearranged[name] = torch.cat((query_key.flatten(0, 3), tensor[64:]))
        elif name.endswith(".query_bias"):
            rearranged[name] = tensor.reshape(4, 4, 2).transpose(1, 2).flatten()
    return rearranged


def eva(native_grid: int | None, **options: Any) -> Parity:
    def run(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        # timm rounds cosine and sine to float32 by default.
        model.rope.get_embed = partial(type(model.rope).get_embed, model.rope, dtype=images.dtype)
        return {"logits": model(images)}

    theirs = {"use_rot_pos_emb": True, "rope_temperature": 100.0, "ref_feat_shape": native_grid}
    reference = Eva(**TIMM_SHAPE, **theirs, norm_layer=partial(nn.LayerNorm, eps=1e-6))
    ours = {"key_bias": False, "position_antialias": True, "position_embedding_type": "learned+rotary"}
    ours |= {**norm_after_pooling, "num_labels": 5, **options}
    return pair(reference, ours, logits, run, rearrange=half_rotation)


CASES["eva_index"] = partial(eva, None, rope_coordinates="index")
CASES["eva_scaled_index"] = partial(eva, 4, rope_coordinates="scaled_index")
CASES["eva_scaled_to_another_grid"] = partial(eva, 3, rope_coordinates="scaled_index", rope_grid_size=3)
# Together, these models use every type of positions, norm, MLP and pooling.
IN_FLOAT32 = ("vit", "dinov3", "mae_encoder", "timm_rms_norm_without_cls", "siglip", "eva_scaled_index")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in CASES]
    + [pytest.param(name, torch.float32, marks=[pytest.mark.nightly] * (name not in IN_FLOAT32)) for name in CASES],
)
def test_equals_reference(name: str, dtype: torch.dtype) -> None:
    CASES[name]().check(dtype)


@pytest.mark.parametrize(
    ("kind", "grid_type", "native_grid"),
    [("centered", "centered", None), ("index", "index", None), ("scaled_index", "index", [7, 5])],
)
def test_rotary_positions_equal_timm(kind: str, grid_type: str, native_grid: list[int] | None) -> None:
    scale = 2 * torch.pi if kind == "centered" else 1.0  # timm multiplies the frequencies by this factor
    bands = scale / 50.0 ** (torch.arange(4, dtype=torch.float64) / 4)
    sine, cosine = build_rotary_pos_embed(
        [3, 5], bands, in_pixels=False, grid_type=grid_type, ref_feat_shape=native_grid, rotate_half=True
    )
    options = {"rope_coordinates": kind, "rope_grid_size": native_grid, "rope_theta": 50.0, "num_register_tokens": 1}
    config = HfViTConfig(hidden_size=32, num_attention_heads=2, position_embedding_type="rotary", **options)
    actual = rotary_position_embeddings(config, (3, 5), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(actual[:, 2:].float(), torch.stack((cosine, sine)), atol=1e-6, rtol=0)
    assert torch.equal(actual[:, :2], torch.stack((torch.ones(2, 16), torch.zeros(2, 16))).double())


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("antialias", [False, True])
def test_resampling_equals_timm(mode: str, antialias: bool) -> None:
    table = torch.randn(1, 2 + 4 * 6, 16, generator=torch.Generator().manual_seed(0))
    config = HfViTConfig(image_size=(64, 96), position_interpolation=mode, position_antialias=antialias)
    options = {"num_prefix_tokens": 2, "interpolation": mode, "antialias": antialias, "align_corners": False}
    for new_grid in ((4, 6), (3, 3), (7, 5), (6, 4)):
        expected = resample_abs_pos_embed(table, list(new_grid), [4, 6], **options)
        assert torch.equal(resample_to_grid(table, config, new_grid, num_prefix=2), expected)


PUBLISHED = {name: f"vit_{name}_patch16_224" for name in ("tiny", "small", "base", "large")}
PUBLISHED |= {"huge": "vit_huge_patch14_224", "so400m": "vit_so400m_patch14_siglip_gap_224"}


def test_presets_have_the_published_shapes() -> None:
    def shapes(model: nn.Module) -> list[tuple[int, ...]]:
        return sorted(tuple(parameter.shape) for parameter in model.parameters())

    assert set(PRESETS) == {*PUBLISHED, "mnist"}
    for preset, published in PUBLISHED.items():
        overrides = {"use_cls_token": False, "pooling": "mean"} if preset == "so400m" else {}
        with torch.device("meta"):
            reference = timm.create_model(published, num_classes=0)
            ours = HfViTModel(HfViTConfig.from_preset(preset, **overrides))
        # In timm, fc_norm takes the place of the final norm.
        final_norm = [(ours.config.hidden_size,)] * 2 if preset == "so400m" else []
        assert shapes(ours) == sorted(shapes(reference) + final_norm * (shapes(ours) != shapes(reference))), preset


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_dropout_acts_where_it_does_in_vit(implementation: str) -> None:
    """Both models apply dropout at the same positions in the same order, so one seed drops the same values."""
    options = {**SHAPE, **EPS, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    options["attn_implementation"] = implementation
    run: Callable[..., dict[str, Tensor]] = lambda model, images: {"last": model(images).last_hidden_state}  # noqa: E731
    theirs = hf.ViTModel(hf.ViTConfig(**options), add_pooling_layer=False)
    pair = Parity(theirs, HfViTModel(HfViTConfig(**options)), run, run)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    states = []
    for model in (pair.reference.train(), pair.ours.train()):
        torch.manual_seed(1)
        states.append(model(images).last_hidden_state)
    torch.testing.assert_close(states[1], states[0], atol=1e-4, rtol=0)
    assert not torch.allclose(states[1], pair.ours.eval()(images).last_hidden_state, atol=0.1)


def test_stochastic_depth_equals_timm_and_grows_as_there() -> None:
    states = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0))
    dropped = []
    for drop_path in (timm.layers.DropPath(0.4).train(), HfViTDropPath(0.4).train()):
        torch.manual_seed(1)
        dropped.append(drop_path(states))
    assert 0 < (dropped[0] == 0).all(dim=(1, 2)).sum() < 8
    torch.testing.assert_close(dropped[1], dropped[0])
    for depth in (1, 2, 5):
        reference = VisionTransformer(**{**TIMM_SHAPE, "depth": depth}, drop_path_rate=0.3)
        ours = HfViTModel(HfViTConfig(**{**SHAPE, "num_hidden_layers": depth}, drop_path_rate=0.3))
        expected = [getattr(block.drop_path1, "drop_prob", 0.0) for block in reference.blocks]
        assert [layer.drop_path1.rate for layer in ours.encoder.layers] == pytest.approx(expected)
