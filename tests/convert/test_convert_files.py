"""Weight files without a configuration, in their original layouts, compared with the readers of timm."""

import argparse
import random
import re
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models import eva, vision_transformer
from torch import Tensor, nn

from hf_vit import HfViTForImageClassification, HfViTForZeroShotImageClassification, HfViTModel
from hf_vit.convert.families.meta import DINOV3_HEADS, HEADS, fields_of
from hf_vit.convert.source import Weights

from ..helpers.references import assert_close, draw_weights
from ..helpers.timm_models import SMALL, assert_equals_timm
from .test_convert_open_clip import as_open_clip, make_source


State = dict[str, Tensor]
# All attention heads are 64 wide, because the files do not contain the number of heads.
FILE = {**SMALL, "embed_dim": 128, "num_heads": 2}


PLAIN = "vit_base_patch16_224"
NO_HEAD = {"num_classes": 0}


def drawn(architecture: str, **options: Any) -> nn.Module:
    model = timm.create_model(architecture, **{**FILE, **options}).double().eval()
    draw_weights(model)
    return model


def save_plain(folder: Path, **options: Any) -> Path:
    torch.save(drawn(PLAIN, **options).state_dict(), folder / "vit.pth")
    return folder / "vit.pth"


def renamed(state: State, *pairs: tuple[str, str]) -> State:
    """Return `state` after applying regular expression replacements to its names in order."""
    for pattern, replacement in pairs:
        state = {re.sub(pattern, replacement, name): tensor for name, tensor in state.items()}
    return state


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def dino(state: State) -> dict[str, Any]:
    teacher = {f"backbone.{name}": tensor for name, tensor in state.items()}
    training = {"head.mlp.0.weight": noise(8, 128), "head.last_layer.weight_v": noise(8, 8)}
    return {"student": {}, "teacher": {**teacher, **training}, "epoch": 3, "args": argparse.Namespace(lr=0.1)}


def deit(state: State) -> dict[str, Any]:
    return {"model": state}


def deit3(state: State) -> dict[str, Any]:
    return {"model": renamed(state, (r"ls(\d)\.gamma", r"gamma_\1"))}


def dinov2(state: State) -> State:
    state = {**state, "mask_token": noise(1, 128)}
    if "reg_token" in state:
        state["register_tokens"] = state.pop("reg_token")
        state["pos_embed"] = torch.cat((noise(1, 1, 128), state["pos_embed"]), dim=1)
    if state["blocks.0.mlp.fc1.weight"].shape[0] == 2 * state["blocks.0.mlp.fc2.weight"].shape[1]:
        state = renamed(state, (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"))
    return state


def dinov3(state: State) -> State:
    state = renamed(
        state,
        (r"gamma_(\d)", r"ls\1.gamma"),
        ("reg_token", "storage_tokens"),
        (r"mlp\.fc1_g", "mlp.w1"),
        (r"mlp\.fc1_x", "mlp.w2"),
        (r"fc2", "w3" if "blocks.0.mlp.fc1_g.weight" in state else "fc2"),
    )
    for block in ("blocks.0.", "blocks.1."):
        masked = torch.full((128,), torch.nan)
        query, value = state.pop(f"{block}attn.q_bias"), state.pop(f"{block}attn.v_bias")
        state[f"{block}attn.qkv.bias"] = torch.cat((query, masked, value))
        state[f"{block}attn.qkv.bias_mask"] = torch.cat((torch.ones(128), torch.zeros(128), torch.ones(128)))
    constants = {"rope_embed.periods": torch.ones(16), "mask_token": noise(1, 128)}
    return {**state, **constants, "local_cls_norm.weight": noise(128)}


FilterFn = Callable[..., State]


def adapted(state: State, model: nn.Module) -> State:
    return vision_transformer.checkpoint_filter_fn(state, model, adapt_layer_scale=True)


def teacher_backbone(state: dict[str, Any], model: nn.Module) -> State:
    backbone = {name: tensor for name, tensor in state["teacher"].items() if name.startswith("backbone.")}
    return renamed(backbone, (r"^backbone\.", ""))


# DeiT III files have the same tensor names as timm models with rotary positions.
BY_NAME = ("DeiT III",)
CLS = {**NO_HEAD, "global_pool": "token"}
# Name -> timm architecture, its options, the layout of its weights in the original file, and the timm reader of it.
META_FILES: dict[str, tuple[str, dict[str, Any], Callable[[State], Any], FilterFn]] = {
    "DINO": ("vit_small_patch16_224", NO_HEAD, dino, teacher_backbone),
    "DeiT": ("deit_small_patch16_224", {}, deit, adapted),
    "DeiT distilled": ("deit_small_distilled_patch16_224", {}, deit, adapted),
    "DeiT III": ("deit3_small_patch16_224", {}, deit3, adapted),
    "MAE fine-tuned": (PLAIN, {"global_pool": "avg"}, deit, adapted),
    "DINOv2": ("vit_small_patch14_dinov2", NO_HEAD, dinov2, adapted),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", NO_HEAD, dinov2, adapted),
    "DINOv2 giant": ("vit_giant_patch14_reg4_dinov2", {**NO_HEAD, "num_heads": 2}, dinov2, adapted),
    "DINOv3": ("vit_small_patch16_dinov3_qkvb", CLS, dinov3, eva.checkpoint_filter_fn),
    "DINOv3 gated": ("vit_small_plus_patch16_dinov3_qkvb", CLS, dinov3, eva.checkpoint_filter_fn),
}


@pytest.mark.parametrize("name", META_FILES)
def test_file_of_meta_equals_timm(name: str, tmp_path: Path) -> None:
    architecture, options, original, read = META_FILES[name]
    content = original(drawn(architecture, **options).state_dict())
    torch.save(content, tmp_path / "published.pth")
    theirs = timm.create_model(architecture, **{**FILE, **options}).double()
    theirs.load_state_dict(read(content, theirs))
    model_class = HfViTModel if options.get("num_classes") == 0 else HfViTForImageClassification
    untold = {"architecture": architecture} if name in BY_NAME else {}
    # Original implementations resample positions differently, so the configuration specifies the method.
    assert_equals_timm(
        theirs,
        lambda dtype: model_class.from_pretrained(tmp_path / "published.pth", dtype=dtype, **untold),
        resampled="DINOv3" in name,
    )


def resampled(table: Tensor, grid: tuple[int, int], offset: float) -> Tensor:
    """Resample a square position table (1, N, D) to another grid with the bicubic kernel (Keys 1981)."""
    side = int(table.shape[1] ** 0.5)

    def weights(target: int) -> Tensor:
        scale = side / (target + offset)
        centers = (torch.arange(target, dtype=torch.float64) + 0.5) * scale - 0.5
        rows = torch.zeros(target, side, dtype=torch.float64)
        for row, center in zip(rows, centers.tolist(), strict=True):
            first = int(np.floor(center))
            for source in range(first - 1, first + 3):
                x = abs(center - source)
                near = 1.25 * x**3 - 2.25 * x**2 + 1
                far = -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)
                row[min(max(source, 0), side - 1)] += near if x <= 1 else far
        return rows

    square = table.double().unflatten(1, (side, side))[0]  # (side, side, D)
    return torch.einsum("ij,jkd,lk->ild", weights(grid[0]), square, weights(grid[1])).flatten(0, 1)[None]


@pytest.mark.parametrize(
    ("name", "offset", "antialias"),
    [
        ("DINOv2", 0.1, False),
        ("DINOv2 giant", 0.0, True),
        ("DINOv2 with registers", 0.0, True),
        ("DINO", 0.1, False),
        ("DeiT", 0.0, False),
    ],
)
def test_positions_are_resampled_as_in_the_code_of_the_source(
    name: str, offset: float, antialias: bool, tmp_path: Path
) -> None:
    architecture, options, original, _ = META_FILES[name]
    content = original(drawn(architecture, **options).state_dict())
    torch.save(content, tmp_path / "published.pth")
    ours = HfViTModel.from_pretrained(tmp_path / "published.pth")
    config = ours.config
    assert (config.position_interpolation_offset, config.position_antialias) == (offset, antialias)
    prefix, grid = config.num_prefix_tokens, (6, 9)
    table = ours.embeddings.position_embeddings[:, config.num_prefix_positions :]
    with torch.no_grad():
        actual = ours.embeddings.positions(grid)[:, prefix:].double()
        if antialias:  # with antialiasing, PyTorch uses another kernel and does not repeat border rows
            expected = nn.functional.interpolate(
                table.unflatten(1, (4, 4)).movedim(-1, 1), size=grid, mode="bicubic", antialias=True
            )
            assert_close(actual, expected.flatten(2).mT.double(), 1e-5, "positions")
        else:
            assert_close(actual, resampled(table, grid, offset), 1e-5, "positions")
        if offset:
            assert (actual - resampled(table, grid, 0.0)).abs().max() > 1e-2
        ours.resize_position_embeddings((grid[0] * 8, grid[1] * 8))
        assert_close(ours.embeddings.position_embeddings[:, -54:].double(), actual, 1e-6, "resized table")


def test_backbone_of_dino_alone_takes_its_offset_by_name(tmp_path: Path) -> None:
    file = save_plain(tmp_path, **NO_HEAD)
    assert HfViTModel.from_pretrained(file).config.position_interpolation_offset == 0
    opened = HfViTModel.from_pretrained(file, position_interpolation_offset=0.1)
    with torch.no_grad():
        table = opened.embeddings.position_embeddings[:, 1:]
        positions = opened.embeddings.positions((3, 5))[:, 1:].double()
        assert_close(positions, resampled(table, (3, 5), 0.1), 1e-5, "positions")


def google_layer(ours: str, state: State, name: str) -> State:
    """Return a linear layer or norm of timm in the layout of Flax."""
    weight = state[f"{name}.weight"]
    kernel = {f"{ours}/kernel": weight.T} if weight.ndim == 2 else {f"{ours}/scale": weight}
    return {**kernel, f"{ours}/bias": state[f"{name}.bias"]}


def google_heads(ours: str, state: State, name: str, parts: tuple[str, ...]) -> State:
    """Return a projection of timm to two heads in the layout of Flax: per part (in, heads, head width)."""
    weights, biases = (state[f"{name}.{leaf}"].chunk(len(parts)) for leaf in ("weight", "bias"))
    arrays = {}
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        arrays[f"{ours}/{part}/kernel"] = weight.T.reshape(-1, 2, 64)
        arrays[f"{ours}/{part}/bias"] = bias.reshape(2, 64)
    return arrays


def google_block(state: State, index: int, attention: int, second_norm: int, mlp: int) -> State:
    ours, theirs = f"Transformer/encoderblock_{index}", f"blocks.{index}"
    attended = f"{ours}/MultiHeadDotProductAttention_{attention}"
    return {
        **google_layer(f"{ours}/LayerNorm_0", state, f"{theirs}.norm1"),
        **google_heads(attended, state, f"{theirs}.attn.qkv", ("query", "key", "value")),
        f"{attended}/out/kernel": state[f"{theirs}.attn.proj.weight"].T.reshape(2, 64, 128),
        f"{attended}/out/bias": state[f"{theirs}.attn.proj.bias"],
        **google_layer(f"{ours}/LayerNorm_{second_norm}", state, f"{theirs}.norm2"),
        **google_layer(f"{ours}/MlpBlock_{mlp}/Dense_0", state, f"{theirs}.mlp.fc1"),
        **google_layer(f"{ours}/MlpBlock_{mlp}/Dense_1", state, f"{theirs}.mlp.fc2"),
    }


def google_ends(state: State) -> State:
    """Return the tensors before and after the blocks."""
    arrays = {
        "embedding/kernel": state["patch_embed.proj.weight"].permute(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        **google_layer("Transformer/encoder_norm", state, "norm"),
    }
    if "cls_token" in state:
        arrays["cls"] = state["cls_token"]
    return arrays if "head.weight" not in state else {**arrays, **google_layer("head", state, "head")}


def vision_transformer_npz(state: State) -> State:
    blocks = [google_block(state, index, 1, 2, 3) for index in (0, 1)]
    positions = {"Transformer/posembed_input/pos_embedding": state["pos_embed"]}
    return {**google_ends(state), **positions, **blocks[0], **blocks[1]}


def big_vision_npz(state: State) -> State:
    blocks = [google_block(state, index, 0, 1, 0) for index in (0, 1)]
    return {**google_ends(state), "pos_embedding": state["pos_embed"], **blocks[0], **blocks[1]}


def siglip_npz(state: State) -> State:
    head, pooled = "MAPHead_0", "MAPHead_0/MultiHeadDotProductAttention_0"
    arrays = {
        **big_vision_npz(state),
        f"{head}/probe": state["attn_pool.latent"],
        **google_heads(pooled, state, "attn_pool.q", ("query",)),
        **google_heads(pooled, state, "attn_pool.kv", ("key", "value")),
        f"{pooled}/out/kernel": state["attn_pool.proj.weight"].T.reshape(2, 64, 128),
        f"{pooled}/out/bias": state["attn_pool.proj.bias"],
        **google_layer(f"{head}/LayerNorm_0", state, "attn_pool.norm"),
        **google_layer(f"{head}/MlpBlock_0/Dense_0", state, "attn_pool.mlp.fc1"),
        **google_layer(f"{head}/MlpBlock_0/Dense_1", state, "attn_pool.mlp.fc2"),
    }
    text = {"params/txt/Encoder_0/pos_embedding": noise(1, 4, 8), "params/t": noise(1), "params/b": noise(1)}
    return {**{f"params/img/{name}": tensor for name, tensor in arrays.items()}, **text}


def write_npz(file: Path, arrays: State) -> Path:
    np.savez(file, **{name: tensor.numpy() for name, tensor in arrays.items()})
    return file


NPZ_FILES: dict[str, tuple[str, dict[str, Any], Callable[[State], State]]] = {
    "ViT": (PLAIN, {}, vision_transformer_npz),
    "ViT without head": (PLAIN, NO_HEAD, vision_transformer_npz),
    "big_vision": (PLAIN, {"no_embed_class": True}, big_vision_npz),
    "big_vision mean": ("vit_base_patch16_siglip_gap_224", {}, big_vision_npz),
    "SigLIP": ("vit_base_patch16_siglip_224", {**NO_HEAD, "act_layer": "gelu_tanh"}, siglip_npz),
}


@pytest.mark.parametrize("name", NPZ_FILES)
def test_npz_equals_timm(name: str, tmp_path: Path) -> None:
    architecture, options, original = NPZ_FILES[name]
    file = write_npz(tmp_path / "published.npz", original(drawn(architecture, **options).state_dict()))
    theirs = timm.create_model(architecture, **{**FILE, **options}).double()
    theirs.load_pretrained(str(file))
    model_class = HfViTModel if options.get("num_classes") == 0 else HfViTForImageClassification
    assert_equals_timm(theirs, lambda dtype: model_class.from_pretrained(file, dtype=dtype), resampled=False)


def test_text_tower_of_big_vision_is_refused_and_not_drawn_at_random(tmp_path: Path) -> None:
    architecture, options, original = NPZ_FILES["SigLIP"]
    file = write_npz(tmp_path / "siglip.npz", original(drawn(architecture, **options).state_dict()))
    with pytest.raises(ValueError, match=r"text tower of .*siglip\.npz' is not supported and would have random"):
        HfViTForZeroShotImageClassification.from_pretrained(file)
    fresh = HfViTForZeroShotImageClassification.from_pretrained(file, text_config={"num_hidden_layers": 1})
    assert torch.equal(fresh.model.norm.weight, HfViTModel.from_pretrained(file).norm.weight)


def openai(state: State) -> State:
    names = (
        (r"^patch_embed\.proj", "conv1"),
        (r"^pos_embed", "positional_embedding"),
        (r"^cls_token", "class_embedding"),
        (r"^norm_pre", "ln_pre"),
        (r"^norm\.", "ln_post."),
        (r"\.norm(\d)", r".ln_\1"),
        (r"attn\.qkv\.", "attn.in_proj_"),
        (r"attn\.proj", "attn.out_proj"),
        (r"mlp\.fc1", "mlp.c_fc"),
        (r"mlp\.fc2", "mlp.c_proj"),
        (r"^blocks", "transformer.resblocks"),
        (r"^", "visual."),
    )
    tower = renamed(state, *names)
    tower["visual.class_embedding"] = tower["visual.class_embedding"].flatten()
    tower["visual.positional_embedding"] = tower["visual.positional_embedding"][0]
    text = {
        "token_embedding.weight": noise(30, 64),
        "positional_embedding": noise(7, 64),
        "ln_final.weight": noise(64),
        "ln_final.bias": noise(64),
        "logit_scale": noise(1),
    }
    for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias", "attn.out_proj.bias", "mlp.c_proj.bias"):
        text[f"transformer.resblocks.0.{name}"] = noise(64)
    for name, rows, columns in (("attn.in_proj_", 192, 64), ("mlp.c_fc.", 256, 64)):
        text[f"transformer.resblocks.0.{name}weight"] = noise(rows, columns)
        text[f"transformer.resblocks.0.{name}bias"] = noise(rows)
    text["transformer.resblocks.0.attn.out_proj.weight"] = noise(64, 64)
    text["transformer.resblocks.0.mlp.c_proj.weight"] = noise(64, 256)
    return {**tower, **text, "visual.proj": noise(128, 64), "text_projection": noise(64, 64)}


def test_representation_layer_becomes_the_pooler(tmp_path: Path) -> None:
    theirs = drawn(PLAIN)
    layer = {"pre_logits/kernel": noise(128, 128) / 8, "pre_logits/bias": noise(128)}
    file = write_npz(tmp_path / "in21k.npz", {**vision_transformer_npz(theirs.state_dict()), **layer})
    ours = HfViTForImageClassification.from_pretrained(file, dtype=torch.float64).eval()
    images = noise(2, 3, 32, 32)
    with torch.no_grad():
        pooled = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        pooled = torch.tanh(pooled @ layer["pre_logits/kernel"] + layer["pre_logits/bias"])
        assert_close(ours(images).logits, theirs.head(pooled), 1e-9, "logits")


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("vit_small_patch16_rope_224", r"match no supported family"),
        ("vit_small_patch16_rope_ape_224", r"\(blocks\.0\.gamma_1\).*Give timm's name"),
        ("vit_base_patch16_siglip_224", r"\(attn_pool\.latent, no cls_token\).*Give timm's name"),
        ("vit_medium_patch16_gap_256", r"\(no cls_token\).*Give timm's name"),
        ("vit_base_patch32_clip_quickgelu_224", r"\(norm_pre\.weight\).*Give timm's name"),
    ],
)
def test_lone_file_of_timm_opens_by_its_architecture(architecture: str, message: str, tmp_path: Path) -> None:
    theirs, place = drawn(architecture), tmp_path / "weights.pth"
    torch.save(theirs.state_dict(), place)
    with pytest.raises(ValueError, match=rf"{message}.*architecture="):
        HfViTModel.from_pretrained(place)
    opened = partial(HfViTForImageClassification.from_pretrained, place, architecture=architecture, image_size=32)
    assert_equals_timm(theirs, lambda dtype: opened(dtype=dtype))


def test_what_a_file_does_not_tell_is_asked_for_and_what_is_given_wins(tmp_path: Path) -> None:
    file = save_plain(tmp_path, embed_dim=96, num_heads=4)
    with pytest.raises(ValueError, match=r"no published model has hidden_size=96\. Give num_attention_heads="):
        HfViTModel.from_pretrained(file)
    assert HfViTModel.from_pretrained(file, num_attention_heads=4).config.num_attention_heads == 4
    save_plain(tmp_path, num_heads=4)
    assert HfViTModel.from_pretrained(file).config.num_attention_heads == 2
    assert HfViTModel.from_pretrained(file, num_attention_heads=4).config.num_attention_heads == 4
    save_plain(tmp_path, img_size=(40, 48))
    with pytest.raises(ValueError, match=r"31 rows.*image_size=\(height, width\)"):
        HfViTModel.from_pretrained(file)
    for told in ({}, {"architecture": PLAIN}):
        assert HfViTModel.from_pretrained(file, image_size=(40, 48), **told).config.grid_size == (5, 6)


def test_layouts_that_are_not_supported_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "vit.pth"
    state = drawn("vit_base_patch16_rpn_224", class_token=True, global_pool="token").state_dict()
    torch.save(state, file)
    with pytest.raises(ValueError, match="its blocks normalize after attention and MLP"):
        HfViTModel.from_pretrained(file, architecture="vit_base_patch16_rpn_224")
    torch.save({"conv1.weight": noise(8, 3, 3, 3)}, file)
    message = r"match no supported family: conv1\.weight.*Supported families and names: .*DINOv3"
    with pytest.raises(ValueError, match=message):
        HfViTModel.from_pretrained(file)
    hybrid = write_npz(tmp_path / "r50.npz", {**in_npz(), "conv_root/kernel": noise(7, 7, 3, 64)})
    with pytest.raises(ValueError, match="a ResNet comes before the blocks"):
        HfViTModel.from_pretrained(hybrid)


def test_file_that_is_cut_off_or_damaged_is_refused(tmp_path: Path) -> None:
    arrays = write_npz(tmp_path / "vit.npz", in_npz())
    content = bytearray(arrays.read_bytes())
    for file in (arrays, save_plain(tmp_path)):
        whole = file.read_bytes()
        for left in (0.5, 0.99):
            file.write_bytes(whole[: int(left * len(whole))])
            with pytest.raises(OSError, match=rf"{file.name}' is damaged or truncated"):
                HfViTModel.from_pretrained(file)
    content[len(content) // 2] ^= 255
    arrays.write_bytes(content)
    with pytest.raises(OSError, match=r"vit\.npz' is damaged or truncated: Bad CRC"):
        HfViTModel.from_pretrained(arrays)


class Code:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return print, ("code in the file ran",)


def test_code_in_a_file_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": drawn(PLAIN).state_dict(), "args": Code()}, tmp_path / "vit.pth")
    message = r"vit\.pth' contains objects other than weights \(print\)\. Loading them could run code"
    with pytest.raises(OSError, match=message) as refusal:
        HfViTModel.from_pretrained(tmp_path / "vit.pth")
    assert "weights_only" not in "".join(traceback.format_exception(refusal.value))
    np.savez(tmp_path / "vit.npz", cls=np.array([Code()], dtype=object))
    with pytest.raises(OSError, match="'cls' with dtype object"):
        HfViTModel.from_pretrained(tmp_path / "vit.npz")
    assert "ran" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_archive_is_refused_with_its_cure(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "ViT-B-32.pt")
    with pytest.raises(OSError, match=r"ViT-B-32\.pt' is a TorchScript archive.*openai/clip-vit-base-patch32"):
        HfViTModel.from_pretrained(tmp_path / "ViT-B-32.pt")


def test_file_that_is_none_of_torch_is_named(tmp_path: Path) -> None:
    for content in (b"hello world", b"<html>404</html>", b"version https://git-lfs", b"", b"{}"):
        (tmp_path / "vit.pth").write_bytes(content)
        with pytest.raises(OSError, match=r"vit\.pth' begins with b.*not a file of weights"):
            HfViTModel.from_pretrained(tmp_path / "vit.pth")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("is_zip", [True, False])
def test_any_damage_is_reported_with_the_file(is_zip: bool, tmp_path: Path) -> None:
    file, draw = tmp_path / "vit.pth", random.Random(0)
    torch.save({"weight": torch.zeros(1)}, file, _use_new_zipfile_serialization=is_zip)
    whole, complaints = file.read_bytes(), []
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.randrange(1, len(whole))] = draw.randrange(256)
        file.write_bytes(damaged)
        try:
            Weights([file])
        except OSError as error:
            complaints.append(str(error))
    assert len(complaints) > 30
    assert all("vit.pth" in words and "weights_only" not in words for words in complaints)


def test_image_size_that_does_not_explain_the_table_is_what_it_becomes(tmp_path: Path) -> None:
    opened = HfViTModel.from_pretrained(save_plain(tmp_path), image_size=48)
    assert opened.config.image_size == 48
    assert opened.embeddings.position_embeddings.shape == (1, 1 + 36, 128)


def in_npz() -> State:
    return vision_transformer_npz(drawn(PLAIN).state_dict())


def image_tower_of_clip() -> State:
    state = as_open_clip(make_source().state_dict())
    return {name: tensor for name, tensor in state.items() if name.startswith("visual.")}


# Name of a file -> the content of the file, and options that cannot be derived from the content.
LONE_FILES: dict[str, tuple[Callable[[], State], dict[str, Any]]] = {
    "vit.pth": (lambda: drawn(PLAIN).state_dict(), {}),
    "vit.npz": (in_npz, {}),
    "big_vision.npz": (lambda: big_vision_npz(drawn(PLAIN, no_embed_class=True).state_dict()), {}),
    "clip.pth": (image_tower_of_clip, {"hidden_act": "gelu", "num_attention_heads": 4}),
    "timm.pth": (lambda: drawn(PLAIN).state_dict(), {"architecture": PLAIN}),
}


@pytest.mark.parametrize("name", LONE_FILES)
def test_image_size_that_explains_the_table_by_chance_is_what_it_becomes(name: str, tmp_path: Path) -> None:
    (make, untold), file = LONE_FILES[name], tmp_path / name
    write_npz(file, make()) if file.suffix == ".npz" else torch.save(make(), file)
    expected = HfViTModel.from_pretrained(file, **untold)
    expected.resize_position_embeddings((16, 64))  # both image sizes have the same number of patches
    opened = HfViTModel.from_pretrained(file, image_size=(16, 64), **untold)
    assert opened.config.grid_size == (2, 8)
    assert torch.equal(opened.embeddings.position_embeddings, expected.embeddings.position_embeddings)


@pytest.mark.parametrize(
    ("architecture", "heads"),
    [
        ("vit_small_patch16_224", HEADS),
        ("deit3_huge_patch14_224", HEADS),
        ("vit_huge_patch14_224", HEADS),
        ("vit_giant_patch14_dinov2", HEADS),
        ("vit_so400m_patch14_reg1_tipsv2", HEADS),
        ("vit_huge_plus_patch16_dinov3_qkvb", DINOV3_HEADS),
        ("vit_7b_patch16_dinov3", DINOV3_HEADS),
    ],
)
def test_heads_of_published_widths(architecture: str, heads: dict[int, int]) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(architecture, depth=1)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert fields_of({}, shapes, heads)["num_attention_heads"] == theirs.blocks[0].attn.num_heads


def test_missing_blocks_and_tensors_are_named(tmp_path: Path) -> None:
    state, file = drawn(PLAIN).state_dict(), tmp_path / "vit.pth"
    for missing in ("blocks.0.mlp.fc2.weight", "blocks.1.norm2.bias", "norm.weight"):
        torch.save({name: tensor for name, tensor in state.items() if name != missing}, file)
        with pytest.raises(ValueError, match=re.escape(missing)):
            HfViTModel.from_pretrained(file)
    torch.save({name: state[name] for name in state if not name.startswith("blocks.1.")}, file)
    with pytest.raises(ValueError, match=r"vit\.pth' has 1 blocks, fewer than num_hidden_layers=2"):
        HfViTModel.from_pretrained(file, num_hidden_layers=2, ignore_mismatched_sizes=True)
    torch.save(state, file)
    assert len(HfViTModel.from_pretrained(file, num_hidden_layers=1).encoder.layers) == 1
