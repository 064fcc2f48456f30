"""Every architecture option compared with an independent implementation: outputs, gradients, and sensitivity."""

from functools import partial
from typing import Any

import pytest
import timm
import torch
import transformers
from timm.layers import build_rotary_pos_embed, resample_abs_pos_embed
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEEmbeddings

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTModel
from hf_vit.model.configuration_hf_vit import PRESETS
from hf_vit.model.embeddings import resample_to_grid, rotary_position_embeddings
from hf_vit.model.encoder import HfViTDropPath

from ..helpers.references import SHAPE, Parity, hidden_states


pytestmark = pytest.mark.slow  # loads a model of another library for every option


DINOV2_SHAPE = {name: value for name, value in SHAPE.items() if name != "intermediate_size"} | {
    "mlp_ratio": 2,
    "layerscale_value": 0.5,
}
TIMM_SHAPE = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "mlp_ratio": 2,
    "num_classes": 5,
    "dynamic_img_size": True,
}
EPS = {"layer_norm_eps": 1e-6}
MASK = torch.zeros(2, 64, dtype=torch.bool).index_fill(1, torch.tensor([1, 5, 6]), True)


def with_pooled(outputs: Any) -> dict[str, Tensor]:
    return {**hidden_states(outputs), "pooler_output": outputs.pooler_output}


def masked(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    num_patches = images.shape[2] * images.shape[3] // 64
    outputs = model(images, bool_masked_pos=MASK[:, :num_patches], output_hidden_states=True)
    return with_pooled(outputs)


def logits(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    return {"logits": model(images).logits}


def interpolated(model: nn.Module, images: Tensor, **kwargs: Any) -> Any:
    return model(images, interpolate_pos_encoding=True, output_hidden_states=True, **kwargs)


def vit() -> Parity:
    return Parity(
        transformers.ViTModel(transformers.ViTConfig(**SHAPE, **EPS)),
        HfViTModel(HfViTConfig(**SHAPE, use_pooler=True)),
        lambda model, images: with_pooled(interpolated(model, images)),
        lambda model, images: with_pooled(model(images, output_hidden_states=True)),
        float32_positions="embeddings.position_embeddings",
    )


def vit_classifier() -> Parity:
    return Parity(
        transformers.ViTForImageClassification(transformers.ViTConfig(**SHAPE, **EPS, num_labels=5)),
        HfViTForImageClassification(HfViTConfig(**SHAPE, num_labels=5)),
        lambda model, images: {"logits": interpolated(model, images).logits},
        logits,
        float32_positions="vit.embeddings.position_embeddings",
    )


def vit_relu_no_bias() -> Parity:
    options = {**SHAPE, **EPS, "hidden_act": "relu", "qkv_bias": False}
    return Parity(
        transformers.ViTModel(transformers.ViTConfig(**options), add_pooling_layer=False),
        HfViTModel(HfViTConfig(**options)),
        lambda model, images: hidden_states(interpolated(model, images)),
        lambda model, images: hidden_states(model(images, output_hidden_states=True)),
        float32_positions="embeddings.position_embeddings",
    )


def deit_distilled() -> Parity:
    def outputs(model: nn.Module, images: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        result = model(images, **kwargs)
        return {name: result[name] for name in ("logits", "cls_logits", "distillation_logits")}

    return Parity(
        transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**SHAPE, **EPS, num_labels=5)),
        HfViTForImageClassification(HfViTConfig(**SHAPE, num_labels=5, use_distillation_token=True)),
        partial(outputs, interpolate_pos_encoding=True),
        outputs,
        float32_positions="deit.embeddings.position_embeddings",
    )


def dinov2() -> Parity:
    return Parity(
        transformers.Dinov2Model(transformers.Dinov2Config(**DINOV2_SHAPE)),
        HfViTModel(HfViTConfig(**SHAPE, layerscale_value=0.5, use_mask_token=True)),
        masked,
        masked,
    )


def dinov2_linear_classifier() -> Parity:
    config = transformers.Dinov2Config(**DINOV2_SHAPE, num_labels=5, use_mask_token=False)
    return Parity(
        transformers.Dinov2ForImageClassification(config),
        HfViTForImageClassification(HfViTConfig(**SHAPE, layerscale_value=0.5, pooling="cls_mean", num_labels=5)),
        logits,
        logits,
    )


def dinov2_registers_swiglu() -> Parity:
    config = transformers.Dinov2WithRegistersConfig(**DINOV2_SHAPE, num_register_tokens=3, use_swiglu_ffn=True)
    ours = {**SHAPE, "intermediate_size": 48, "hidden_act": "silu"}  # 2/3 of 64, rounded up to a multiple of 8
    return Parity(
        transformers.Dinov2WithRegistersModel(config),
        HfViTModel(
            HfViTConfig(
                **ours,
                layerscale_value=0.5,
                use_mask_token=True,
                num_register_tokens=3,
                use_gated_mlp=True,
                position_antialias=True,
            )
        ),
        masked,
        masked,
        sizes=((32, 32), (24, 48), (16, 24)),
    )


def dinov3() -> Parity:
    options = {
        **SHAPE,
        "num_register_tokens": 2,
        "layerscale_value": 0.5,
        "use_gated_mlp": True,
        "hidden_act": "silu",
        "key_bias": False,
        "layer_norm_eps": 1e-5,
    }
    return Parity(
        transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**options)),
        HfViTModel(HfViTConfig(**options, position_embedding_type="rotary", use_mask_token=True)),
        masked,
        masked,
        sizes=((32, 32), (24, 48), (64, 64)),
    )


def dinov3_without_biases() -> Parity:
    off = {"proj_bias": False, "mlp_bias": False}
    reference = transformers.DINOv3ViTConfig(
        **SHAPE, **EPS, **off, query_bias=False, value_bias=False, rope_theta=30.0
    )
    ours = HfViTConfig(
        **SHAPE, **off, qkv_bias=False, position_embedding_type="rotary", layerscale_value=1.0, use_mask_token=True,
        rope_theta=30.0, num_register_tokens=0,
    )  # fmt: skip
    model = transformers.DINOv3ViTModel(reference)
    return Parity(model, HfViTModel(ours), masked, masked)


def mae_encoder() -> Parity:
    def run(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        # Nothing is masked, and the noise is sorted, so that patches are not shuffled.
        noise = torch.arange(images.shape[2] * images.shape[3] // 64).expand(2, -1)
        return hidden_states(interpolated(model, images, noise=noise))

    config = transformers.ViTMAEConfig(**SHAPE, **EPS, mask_ratio=0.0)
    reference = transformers.ViTMAEModel(config)
    embeddings = ViTMAEEmbeddings(config)
    embeddings.initialize_weights()  # transformers 5.23 initializes the table with zeros
    reference.embeddings.position_embeddings.data.copy_(embeddings.position_embeddings)
    return Parity(
        reference,
        HfViTModel(HfViTConfig(**SHAPE, position_embedding_type="sincos2d")),
        run,
        lambda model, images: hidden_states(model(images, output_hidden_states=True)),
        float32_positions="embeddings.position_embeddings",
    )


def timm_classifier() -> Parity:
    return Parity(
        VisionTransformer(**TIMM_SHAPE),
        HfViTForImageClassification(HfViTConfig(**SHAPE, num_labels=5, position_antialias=True)),
        lambda model, images: {"logits": model(images)},
        logits,
        sizes=((32, 32), (24, 48), (16, 16)),
    )


def timm_distilled() -> Parity:
    return Parity(
        VisionTransformerDistilled(**TIMM_SHAPE),
        HfViTForImageClassification(
            HfViTConfig(**SHAPE, num_labels=5, use_distillation_token=True, position_antialias=True)
        ),
        lambda model, images: {"logits": model(images)},
        logits,
    )


def timm_registers_qk_norm() -> Parity:
    return Parity(
        VisionTransformer(
            **TIMM_SHAPE,
            reg_tokens=2,
            no_embed_class=True,
            qk_norm=True,
            init_values=0.1,
            global_pool="avg",
            fc_norm=False,
        ),
        HfViTForImageClassification(
            HfViTConfig(
                **SHAPE,
                num_labels=5,
                num_register_tokens=2,
                prefix_has_position=False,
                use_qk_norm=True,
                layerscale_value=0.1,
                pooling="mean",
                position_antialias=True,
            )
        ),
        lambda model, images: {"logits": model(images)},
        logits,
        without_effect="key_norm.bias",
    )


def timm_rms_norm_without_cls() -> Parity:
    return Parity(
        VisionTransformer(
            **TIMM_SHAPE,
            class_token=False,
            global_pool="avg",
            fc_norm=False,
            qk_norm=True,
            norm_layer=partial(timm.layers.RmsNorm, eps=1e-6),
        ),
        HfViTForImageClassification(
            HfViTConfig(
                **SHAPE,
                num_labels=5,
                use_cls_token=False,
                pooling="mean",
                use_qk_norm=True,
                norm_type="rmsnorm",
                position_antialias=True,
            )
        ),
        lambda model, images: {"logits": model(images)},
        logits,
    )


def timm_without_positions() -> Parity:
    return Parity(
        VisionTransformer(**TIMM_SHAPE, pos_embed="none"),
        HfViTForImageClassification(HfViTConfig(**SHAPE, num_labels=5, position_embedding_type="none")),
        lambda model, images: {"logits": model(images)},
        logits,
    )


class Dinov3WithTable(transformers.DINOv3ViTModel):
    """DINOv3 with a learned position table added to its patches and resampled as in timm."""

    def __init__(self, config: transformers.DINOv3ViTConfig) -> None:
        super().__init__(config)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, config.hidden_size))
        self.embeddings.register_forward_hook(self.add_positions)

    def add_positions(self, module: nn.Module, inputs: tuple[Tensor], tokens: Tensor) -> Tensor:
        grid = [side // 8 for side in inputs[0].shape[2:]]
        table = resample_abs_pos_embed(self.pos_embed, grid, [4, 4], num_prefix_tokens=0, antialias=False)
        return torch.cat((tokens[:, :3], tokens[:, 3:] + table), dim=1)


def learned_and_rotary() -> Parity:
    options = {**SHAPE, **EPS, "num_register_tokens": 2, "layerscale_value": 0.5, "key_bias": False}
    ours = HfViTConfig(
        **options, position_embedding_type="learned+rotary", prefix_has_position=False, use_mask_token=True
    )
    return Parity(Dinov3WithTable(transformers.DINOv3ViTConfig(**options)), HfViTModel(ours), masked, masked)


def clip() -> Parity:
    def run(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        outputs = with_pooled(interpolated(model, images))
        assert torch.equal(outputs.pop("last_hidden_state"), outputs["hidden_states[2]"])  # CLIP has no final norm
        return outputs

    def run_ours(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        outputs = with_pooled(model(images, output_hidden_states=True))
        del outputs["last_hidden_state"]
        return outputs

    reference = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SHAPE, hidden_act="quick_gelu"))
    # CLIP has no bias here; with one, the gradient of our bias is compared too.
    reference.embeddings.patch_embedding = nn.Conv2d(3, 32, kernel_size=8, stride=8)
    ours = HfViTConfig(**SHAPE, hidden_act="quick_gelu", use_pre_layernorm=True, layer_norm_eps=1e-5)
    positions = "embeddings.position_embedding.weight"
    return Parity(reference, HfViTModel(ours), run, run_ours, float32_positions=positions)


def siglip() -> Parity:
    options = {**SHAPE, **EPS, "hidden_act": "gelu_pytorch_tanh"}
    return Parity(
        transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**options)),
        HfViTModel(HfViTConfig(**options, use_cls_token=False, pooling="attention")),
        lambda model, images: with_pooled(interpolated(model, images)),
        lambda model, images: with_pooled(model(images, output_hidden_states=True)),
        float32_positions="embeddings.position_embedding.weight",
    )


def timm_norm_after_pooling() -> Parity:
    return Parity(
        VisionTransformer(**TIMM_SHAPE, global_pool="avg"),
        HfViTForImageClassification(
            HfViTConfig(**SHAPE, num_labels=5, pooling="mean", norm_after_pooling=True, position_antialias=True)
        ),
        lambda model, images: {"logits": model(images)},
        logits,
    )


def half_rotation(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reorder weights that rotate neighboring channels (0, 1), (2, 3), … to rotate (0, d/2), (1, d/2 + 1), …."""
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
        # By default, timm rounds cosine and sine to float32.
        model.rope.get_embed = partial(type(model.rope).get_embed, model.rope, dtype=images.dtype)
        return {"logits": model(images)}

    return Parity(
        Eva(
            **TIMM_SHAPE,
            use_rot_pos_emb=True,
            rope_temperature=100.0,
            ref_feat_shape=native_grid,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
        ),
        HfViTForImageClassification(
            HfViTConfig(
                **SHAPE,
                **options,
                num_labels=5,
                key_bias=False,
                pooling="mean",
                norm_after_pooling=True,
                position_embedding_type="learned+rotary",
                position_antialias=True,
            )
        ),
        run,
        logits,
        rearrange=half_rotation,
    )


def eva_index() -> Parity:
    return eva(None, rope_coordinates="index")


def eva_scaled_index() -> Parity:
    return eva(4, rope_coordinates="scaled_index")


def eva_scaled_to_another_grid() -> Parity:
    return eva(3, rope_coordinates="scaled_index", rope_grid_size=3)


CASES = [
    vit,
    vit_classifier,
    vit_relu_no_bias,
    deit_distilled,
    dinov2,
    dinov2_linear_classifier,
    dinov2_registers_swiglu,
    dinov3,
    dinov3_without_biases,
    mae_encoder,
    timm_classifier,
    timm_distilled,
    timm_registers_qk_norm,
    timm_rms_norm_without_cls,
    timm_without_positions,
    learned_and_rotary,
    clip,
    siglip,
    timm_norm_after_pooling,
    eva_index,
    eva_scaled_index,
    eva_scaled_to_another_grid,
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_equals_reference(case: Any, dtype: torch.dtype) -> None:
    case().check(dtype)


@pytest.mark.parametrize(
    ("kind", "grid_type", "native_grid"),
    [("centered", "centered", None), ("index", "index", None), ("scaled_index", "index", [7, 5])],
)
def test_rotary_positions_equal_timm(kind: str, grid_type: str, native_grid: list[int] | None) -> None:
    scale = 2 * torch.pi if kind == "centered" else 1.0  # timm includes it in the frequencies
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
    for new_grid in ((4, 6), (3, 3), (7, 5), (6, 4)):
        expected = resample_abs_pos_embed(
            table,
            list(new_grid),
            [4, 6],
            num_prefix_tokens=2,
            interpolation=mode,
            antialias=antialias,
            align_corners=False,
        )
        actual = resample_to_grid(table, config, new_grid, num_prefix=2)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("tiny", "vit_tiny_patch16_224"),
        ("small", "vit_small_patch16_224"),
        ("base", "vit_base_patch16_224"),
        ("large", "vit_large_patch16_224"),
        ("huge", "vit_huge_patch14_224"),
        ("so400m", "vit_so400m_patch14_siglip_gap_224"),
    ],
)
def test_preset_has_the_published_shapes(preset: str, published: str) -> None:
    overrides = {"use_cls_token": False, "pooling": "mean"} if preset == "so400m" else {}
    with torch.device("meta"):
        reference = timm.create_model(published, num_classes=0)
        ours = HfViTModel(HfViTConfig.from_preset(preset, **overrides))

    def shapes(model: nn.Module) -> list[tuple[int, ...]]:
        return sorted(tuple(parameter.shape) for parameter in model.parameters())

    final_norm = [(ours.config.hidden_size,)] * 2 if preset == "so400m" else []  # timm has a fc_norm instead
    assert shapes(ours) == sorted(shapes(reference) + final_norm * (shapes(ours) != shapes(reference)))


def test_every_preset_is_checked() -> None:
    assert set(PRESETS) == {"tiny", "small", "base", "large", "huge", "so400m", "mnist"}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_dropout_acts_where_it_does_in_vit(implementation: str) -> None:
    """With the same seed, dropout drops the same values as in ViT."""
    options = {**SHAPE, **EPS, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    options["attn_implementation"] = implementation
    pair = Parity(
        transformers.ViTModel(transformers.ViTConfig(**options), add_pooling_layer=False),
        HfViTModel(HfViTConfig(**options)),
        lambda model, images: {"last_hidden_state": model(images).last_hidden_state},
        lambda model, images: {"last_hidden_state": model(images).last_hidden_state},
    )
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    states = []
    for model in (pair.reference.train(), pair.ours.train()):
        torch.manual_seed(1)
        states.append(model(images).last_hidden_state)
    torch.testing.assert_close(states[1], states[0], atol=1e-4, rtol=0)
    assert not torch.allclose(states[1], pair.ours.eval()(images).last_hidden_state, atol=0.1)


def test_stochastic_depth_equals_timm() -> None:
    states = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0))
    dropped = []
    for drop_path in (timm.layers.DropPath(0.4).train(), HfViTDropPath(0.4).train()):
        torch.manual_seed(1)
        dropped.append(drop_path(states))
    assert 0 < (dropped[0] == 0).all(dim=(1, 2)).sum() < 8
    torch.testing.assert_close(dropped[1], dropped[0])


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_stochastic_depth_grows_as_in_timm(depth: int) -> None:
    reference = VisionTransformer(**{**TIMM_SHAPE, "depth": depth}, drop_path_rate=0.3)
    ours = HfViTModel(HfViTConfig(**{**SHAPE, "num_hidden_layers": depth}, drop_path_rate=0.3))
    expected = [getattr(block.drop_path1, "drop_prob", 0.0) for block in reference.blocks]
    assert [layer.drop_path1.rate for layer in ours.encoder.layers] == pytest.approx(expected)
