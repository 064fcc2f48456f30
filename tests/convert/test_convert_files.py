"""Test that weight files in original layouts, without a configuration, give the same outputs as in timm."""

import argparse
import random
import re
import traceback
from functools import partial

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import eva, vision_transformer
from torch import nn

from hf_vit import HfViTForImageClassification, HfViTForZeroShotImageClassification, HfViTModel
from hf_vit.convert.families.meta import DINOV3_HEADS, HEADS, fields_of
from hf_vit.convert.source import Weights

from ..helpers.references import assert_close, draw_weights
from ..helpers.timm_models import SMALL, assert_equals_timm
from .test_convert_open_clip import as_open_clip, make_source, state_of_clip


# All attention heads have a width of 64, which is assumed for files that do not contain the number of heads.
FILE = {**SMALL, "embed_dim": 128, "num_heads": 2}
PLAIN, NO_HEAD = "vit_base_patch16_224", {"num_classes": 0}


def drawn(architecture=PLAIN, **options):
    model = timm.create_model(architecture, **{**FILE, **options}).double().eval()
    draw_weights(model)
    return model


def save_plain(folder, **options):
    torch.save(drawn(**options).state_dict(), folder / "vit.pth")
    return folder / "vit.pth"


def renamed(state, *pairs):
    """Return `state` with regular expression replacements applied to the tensor names, in order."""
    for pattern, replacement in pairs:
        state = {re.sub(pattern, replacement, name): tensor for name, tensor in state.items()}
    return state


def noise(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def dino(state):
    teacher = {f"backbone.{name}": tensor for name, tensor in state.items()}
    training = {"head.mlp.0.weight": noise(8, 128), "head.last_layer.weight_v": noise(8, 8)}
    return {"student": {}, "teacher": {**teacher, **training}, "epoch": 3, "args": argparse.Namespace(lr=0.1)}


def deit(state):
    return {"model": state}


def deit3(state):
    return {"model": renamed(state, (r"ls(\d)\.gamma", r"gamma_\1"))}


def dinov2(state):
    state = {**state, "mask_token": noise(1, 128)}
    if "reg_token" in state:
        state["register_tokens"] = state.pop("reg_token")
        state["pos_embed"] = torch.cat((noise(1, 1, 128), state["pos_embed"]), dim=1)
    if state["blocks.0.mlp.fc1.weight"].shape[0] == 2 * state["blocks.0.mlp.fc2.weight"].shape[1]:
        state = renamed(state, (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"))
    return state


def dinov3(state):
    names = ((r"gamma_(\d)", r"ls\1.gamma"), ("reg_token", "storage_tokens"))
    gated = ((r"mlp\.fc1_g", "mlp.w1"), (r"mlp\.fc1_x", "mlp.w2"), (r"fc2", "w3"))
    state = renamed(state, *names, *(gated if "blocks.0.mlp.fc1_g.weight" in state else ()))
    for block in ("blocks.0.", "blocks.1."):
        masked = torch.full((128,), torch.nan)
        query, value = state.pop(f"{block}attn.q_bias"), state.pop(f"{block}attn.v_bias")
        state[f"{block}attn.qkv.bias"] = torch.cat((query, masked, value))
        state[f"{block}attn.qkv.bias_mask"] = torch.cat((torch.ones(128), torch.zeros(128), torch.ones(128)))
    constants = {"rope_embed.periods": torch.ones(16), "mask_token": noise(1, 128)}
    return {**state, **constants, "local_cls_norm.weight": noise(128)}


def adapted(state, model):
    return vision_transformer.checkpoint_filter_fn(state, model, adapt_layer_scale=True)


def teacher_backbone(state, model):
    backbone = {name: tensor for name, tensor in state["teacher"].items() if name.startswith("backbone.")}
    return renamed(backbone, (r"^backbone\.", ""))


CLS = {**NO_HEAD, "global_pool": "token"}
# Name of a layout -> timm architecture, its options, a function that returns weights in the layout of the original
# file, and the timm function that reads this layout.
META_FILES = {
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


def model_class_of(options):
    return HfViTModel if options.get("num_classes") == 0 else HfViTForImageClassification


@pytest.mark.parametrize("name", META_FILES)
def test_file_of_meta_equals_timm(name, tmp_path):
    architecture, options, original, read = META_FILES[name]
    content = original(drawn(architecture, **options).state_dict())
    torch.save(content, tmp_path / "published.pth")
    theirs = timm.create_model(architecture, **{**FILE, **options}).double()
    theirs.load_state_dict(read(content, theirs))
    # DeiT III needs the architecture, because its tensor names equal those of timm models with rotary positions.
    untold = {"architecture": architecture} if name == "DeiT III" else {}
    opened = partial(model_class_of(options).from_pretrained, tmp_path / "published.pth", **untold)
    # Original implementations differ in how they resample positions, so the configuration specifies the method.
    assert_equals_timm(theirs, lambda dtype: opened(dtype=dtype), resampled="DINOv3" in name)


def resampled(table, grid, offset):
    """Resample a square position table (1, N, D) to another grid with the bicubic kernel (Keys 1981)."""
    side = int(table.shape[1] ** 0.5)

    def weights(target):
        centers = (np.arange(target) + 0.5) * side / (target + offset) - 0.5
        x = np.abs(centers[:, None] - np.arange(-2, side + 2))
        kernel = np.select([x <= 1, x < 2], [1.25 * x**3 - 2.25 * x**2 + 1, -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)])
        kernel[:, 2] += kernel[:, :2].sum(1)  # rows outside the table repeat its border
        kernel[:, -3] += kernel[:, -2:].sum(1)
        return torch.from_numpy(kernel[:, 2:-2])

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
@torch.no_grad()
def test_positions_are_resampled_as_in_the_code_of_the_source(name, offset, antialias, tmp_path):
    architecture, options, original, _ = META_FILES[name]
    torch.save(original(drawn(architecture, **options).state_dict()), tmp_path / "published.pth")
    ours = HfViTModel.from_pretrained(tmp_path / "published.pth")
    config, grid = ours.config, (6, 9)
    assert (config.position_interpolation_offset, config.position_antialias) == (offset, antialias)
    table = ours.embeddings.position_embeddings[:, config.num_prefix_positions :]
    actual = ours.embeddings.positions(grid)[:, config.num_prefix_tokens :].double()
    expected = resampled(table, grid, offset)
    if antialias:  # with antialiasing, PyTorch uses another kernel and does not repeat the border
        square = table.unflatten(1, (4, 4)).movedim(-1, 1)
        maps = nn.functional.interpolate(square, size=grid, mode="bicubic", antialias=True)
        expected = maps.flatten(2).mT.double()
    assert_close(actual, expected, 1e-5, "positions")
    assert not offset or (actual - resampled(table, grid, 0.0)).abs().max() > 1e-2
    ours.resize_position_embeddings((grid[0] * 8, grid[1] * 8))
    assert_close(ours.embeddings.position_embeddings[:, -54:].double(), actual, 1e-6, "resized table")


@torch.no_grad()
def test_backbone_of_dino_alone_takes_its_offset_by_name(tmp_path):
    file = save_plain(tmp_path, **NO_HEAD)
    assert HfViTModel.from_pretrained(file).config.position_interpolation_offset == 0
    embeddings = HfViTModel.from_pretrained(file, position_interpolation_offset=0.1).embeddings
    expected = resampled(embeddings.position_embeddings[:, 1:], (3, 5), 0.1)
    assert_close(embeddings.positions((3, 5))[:, 1:].double(), expected, 1e-5, "positions")


def flax(state, positions="pos_embedding", attention=0, norm=1, mlp=0):
    """Return timm weights with the names and shapes of Flax. Two Flax layouts number layers in a block differently.

    Queries, keys and values have separate projections of shape (input width, heads, head width).
    """
    names = (
        (r"^blocks\.(\d)\.", r"Transformer/encoderblock_\1/"),
        (r"^patch_embed\.proj", "embedding"),
        (r"^norm\.", "Transformer/encoder_norm."),
        (r"^cls_token$", "cls"),
        (r"^pos_embed$", positions),
        (r"^attn_pool\.latent$", "MAPHead_0/probe"),
        (r"^attn_pool\.(norm|mlp)", r"MAPHead_0/\1"),
        (r"^attn_pool\.", "MAPHead_0/attn."),
        (r"attn\.", f"MultiHeadDotProductAttention_{attention}/"),
        (r"/norm1?\.", "/LayerNorm_0."),
        (r"/norm2\.", f"/LayerNorm_{norm}."),
        (r"mlp\.fc1", f"MlpBlock_{mlp}/Dense_0"),
        (r"mlp\.fc2", f"MlpBlock_{mlp}/Dense_1"),
    )
    arrays = {}
    for name, tensor in renamed(state, *names).items():
        place, _, leaf = name.rpartition(".")
        folder, _, layer = place.rpartition("/")
        leaf = {"weight": "kernel" if tensor.ndim > 1 else "scale"}.get(leaf, leaf)
        if tensor.ndim in (2, 4):
            tensor = tensor.T if tensor.ndim == 2 else tensor.permute(2, 3, 1, 0)
        if layer in ("qkv", "q", "kv"):
            parts = {"qkv": ("query", "key", "value"), "q": ("query",), "kv": ("key", "value")}[layer]
            for part, own in zip(parts, tensor.chunk(len(parts), dim=-1), strict=True):
                arrays[f"{folder}/{part}/{leaf}"] = own.unflatten(-1, (2, 64))
        elif layer == "proj":
            arrays[f"{folder}/out/{leaf}"] = tensor.unflatten(0, (2, 64)) if leaf == "kernel" else tensor
        else:
            arrays[f"{place}/{leaf}" if place else leaf] = tensor
    return arrays


def vision_transformer_npz(state):
    return flax(state, "Transformer/posembed_input/pos_embedding", attention=1, norm=2, mlp=3)


def siglip_npz(state):
    text = {"params/txt/Encoder_0/pos_embedding": noise(1, 4, 8), "params/t": noise(1), "params/b": noise(1)}
    return {**{f"params/img/{name}": tensor for name, tensor in flax(state).items()}, **text}


def write_npz(file, arrays):
    np.savez(file, **{name: tensor.numpy() for name, tensor in arrays.items()})
    return file


NPZ_FILES = {
    "ViT": (PLAIN, {}, vision_transformer_npz),
    "ViT without head": (PLAIN, NO_HEAD, vision_transformer_npz),
    "big_vision": (PLAIN, {"no_embed_class": True}, flax),
    "big_vision mean": ("vit_base_patch16_siglip_gap_224", {}, flax),
    "SigLIP": ("vit_base_patch16_siglip_224", {**NO_HEAD, "act_layer": "gelu_tanh"}, siglip_npz),
}


@pytest.mark.parametrize("name", NPZ_FILES)
def test_npz_equals_timm(name, tmp_path):
    architecture, options, original = NPZ_FILES[name]
    file = write_npz(tmp_path / "published.npz", original(drawn(architecture, **options).state_dict()))
    theirs = timm.create_model(architecture, **{**FILE, **options}).double()
    theirs.load_pretrained(str(file))
    model_class = model_class_of(options)
    assert_equals_timm(theirs, lambda dtype: model_class.from_pretrained(file, dtype=dtype), resampled=False)
    if name == "SigLIP":  # the missing text tower must not get random weights
        with pytest.raises(
            ValueError, match=r"text tower of .*published\.npz' is not supported and would have random"
        ):
            HfViTForZeroShotImageClassification.from_pretrained(file)
        fresh = HfViTForZeroShotImageClassification.from_pretrained(file, text_config={"num_hidden_layers": 1})
        assert torch.equal(fresh.model.norm.weight, HfViTModel.from_pretrained(file).norm.weight)


def openai(state):
    """Return weights of timm's CLIP with the names used by OpenAI, and weights of a text tower."""
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
    whole = as_open_clip(make_source(text={"hidden_size": 64}).state_dict())
    text = {name: tensor for name, tensor in whole.items() if not name.startswith("visual.")}
    return {**text, **tower, "visual.proj": noise(128, 20)}


@torch.no_grad()
def test_representation_layer_becomes_the_pooler(tmp_path):
    theirs = drawn()
    layer = {"pre_logits/kernel": noise(128, 128) / 8, "pre_logits/bias": noise(128)}
    file = write_npz(tmp_path / "in21k.npz", {**vision_transformer_npz(theirs.state_dict()), **layer})
    ours = HfViTForImageClassification.from_pretrained(file, dtype=torch.float64).eval()
    images = noise(2, 3, 32, 32)
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
        ("eva_large_patch14_196", None),  # this file can be opened without the architecture name
        ("eva_large_patch14_336", None),
    ],
)
def test_lone_file_of_timm_opens_by_its_architecture(architecture, message, tmp_path):
    theirs, place = drawn(architecture), tmp_path / "weights.pth"
    torch.save(theirs.state_dict(), place)
    if message is not None:
        with pytest.raises(ValueError, match=rf"{message}.*architecture="):
            HfViTModel.from_pretrained(place)
    size = {} if message is None else {"image_size": 32}
    opened = partial(HfViTForImageClassification.from_pretrained, place, architecture=architecture, **size)
    assert_equals_timm(theirs, lambda dtype: opened(dtype=dtype))


def test_missing_hyperparameters_raise_and_given_values_take_priority(tmp_path):
    file = save_plain(tmp_path, embed_dim=96, num_heads=4)
    with pytest.raises(ValueError, match=r"no published model has hidden_size=96\. Pass num_attention_heads\."):
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
    # If image_size does not match the position table, the table is resized to image_size.
    opened = HfViTModel.from_pretrained(save_plain(tmp_path), image_size=48)
    assert opened.config.image_size == 48
    assert opened.embeddings.position_embeddings.shape == (1, 1 + 36, 128)


class Code:
    def __reduce__(self):
        return print, ("code in the file ran",)


def refuse(file, error, message):
    with pytest.raises(error, match=message) as refusal:
        HfViTModel.from_pretrained(file)
    return "".join(traceback.format_exception(refusal.value))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_files_that_are_not_supported_or_damaged_are_refused_and_their_code_does_not_run(tmp_path, capsys):
    file, arrays, state = tmp_path / "vit.pth", tmp_path / "vit.npz", drawn().state_dict()
    norms_last = drawn("vit_base_patch16_rpn_224", class_token=True, global_pool="token").state_dict()
    torch.save(norms_last, file)
    with pytest.raises(ValueError, match="its blocks normalize after attention and MLP"):
        HfViTModel.from_pretrained(file, architecture="vit_base_patch16_rpn_224")
    torch.save({"conv1.weight": noise(8, 3, 3, 3)}, file)
    refuse(file, ValueError, r"match no supported family: conv1\.weight.*Supported families and names: .*DINOv3")
    write_npz(arrays, {**vision_transformer_npz(state), "conv_root/kernel": noise(7, 7, 3, 64)})
    refuse(arrays, ValueError, "a ResNet comes before the blocks")

    torch.save(state, file)
    content = bytearray(write_npz(arrays, vision_transformer_npz(state)).read_bytes())
    for cut in (arrays, file):
        whole = cut.read_bytes()
        for left in (0.5, 0.99):
            cut.write_bytes(whole[: int(left * len(whole))])
            refuse(cut, OSError, rf"{cut.name}' is damaged or truncated")
    content[len(content) // 2] ^= 255
    arrays.write_bytes(content)
    refuse(arrays, OSError, r"vit\.npz' is damaged or truncated: Bad CRC")
    for words in (b"hello world", b"<html>404</html>", b"version https://git-lfs", b"", b"{}"):
        file.write_bytes(words)
        refuse(file, OSError, r"vit\.pth' begins with b.*not a file of weights")

    torch.save({"model": state, "args": Code()}, file)
    message = r"vit\.pth' contains objects other than weights \(print\)\. Loading them could run code"
    assert "weights_only" not in refuse(file, OSError, message)
    np.savez(arrays, cls=np.array([Code()], dtype=object))
    refuse(arrays, OSError, "'cls' with dtype object")
    assert "ran" not in capsys.readouterr().out
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "ViT-B-32.pt")
    message = r"ViT-B-32\.pt' is a TorchScript archive.*openai/clip-vit-base-patch32"
    refuse(tmp_path / "ViT-B-32.pt", OSError, message)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("is_zip", [True, False])
def test_any_damage_is_reported_with_the_file(is_zip, tmp_path):
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


def image_tower_of_clip():
    return {name: tensor for name, tensor in state_of_clip().items() if name.startswith("visual.")}


# File name -> content of the file, and model options that cannot be derived from the content.
LONE_FILES = {
    "vit.pth": (lambda: drawn().state_dict(), {}),
    "vit.npz": (lambda: vision_transformer_npz(drawn().state_dict()), {}),
    "big_vision.npz": (lambda: flax(drawn(no_embed_class=True).state_dict()), {}),
    "clip.pth": (image_tower_of_clip, {"hidden_act": "gelu", "num_attention_heads": 4}),
    "timm.pth": (lambda: drawn().state_dict(), {"architecture": PLAIN}),
}


@pytest.mark.parametrize("name", LONE_FILES)
def test_given_image_size_with_equal_patch_count_resizes_the_table(name, tmp_path):
    (make, untold), file = LONE_FILES[name], tmp_path / name
    write_npz(file, make()) if file.suffix == ".npz" else torch.save(make(), file)
    expected = HfViTModel.from_pretrained(file, **untold)
    expected.resize_position_embeddings((16, 64))  # changes the patch grid but not the number of patches
    opened = HfViTModel.from_pretrained(file, image_size=(16, 64), **untold)
    assert opened.config.grid_size == (2, 8)
    assert torch.equal(opened.embeddings.position_embeddings, expected.embeddings.position_embeddings)


def test_heads_of_published_widths():
    for architecture, heads in (
        ("vit_small_patch16_224", HEADS),
        ("deit3_huge_patch14_224", HEADS),
        ("vit_huge_patch14_224", HEADS),
        ("vit_giant_patch14_dinov2", HEADS),
        ("vit_so400m_patch14_reg1_tipsv2", HEADS),
        ("vit_huge_plus_patch16_dinov3_qkvb", DINOV3_HEADS),
        ("vit_7b_patch16_dinov3", DINOV3_HEADS),
    ):
        with torch.device("meta"):
            theirs = timm.create_model(architecture, depth=1)
        shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
        found = fields_of({}, shapes, heads)["num_attention_heads"]
        assert found == theirs.blocks[0].attn.num_heads, architecture


def test_an_unknown_width_needs_the_number_of_heads(tmp_path):
    (make, given), file = LONE_FILES["clip.pth"], tmp_path / "clip.pth"
    torch.save(make(), file)
    with pytest.raises(ValueError, match=r"no published model has hidden_size=\d+\. Pass num_attention_heads\."):
        HfViTModel.from_pretrained(file, hidden_act="gelu")
    assert HfViTModel.from_pretrained(file, **given).config.num_attention_heads == 4


def test_missing_blocks_and_tensors_are_named(tmp_path):
    state, file = drawn().state_dict(), tmp_path / "vit.pth"
    for missing in ("blocks.0.mlp.fc2.weight", "blocks.1.norm2.bias", "norm.weight"):
        torch.save({name: tensor for name, tensor in state.items() if name != missing}, file)
        with pytest.raises(ValueError, match=re.escape(missing)):
            HfViTModel.from_pretrained(file)
    torch.save({name: state[name] for name in state if not name.startswith("blocks.1.")}, file)
    with pytest.raises(ValueError, match=r"vit\.pth' has 1 blocks, fewer than num_hidden_layers=2"):
        HfViTModel.from_pretrained(file, num_hidden_layers=2, ignore_mismatched_sizes=True)
    torch.save(state, file)
    assert len(HfViTModel.from_pretrained(file, num_hidden_layers=1).encoder.layers) == 1


class ConvolutionViT(nn.Module):
    """ViT with a convolution as patch embedding, a CLS token, and a norm in the head."""

    def __init__(self, width=16, patch=4, side=28, channels=1, **layer):
        super().__init__()
        self.patcher = nn.Sequential(nn.Conv2d(channels, width, patch, patch), nn.Flatten(2))
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width))
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, **layer}
        block = nn.TransformerEncoderLayer(width, 8, **options)
        self.encoder_blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.mlp_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images):
        patches = self.patcher(images).permute(0, 2, 1)
        tokens = torch.cat((self.cls_token.expand(len(images), -1, -1), patches), dim=1)
        logits = self.mlp_head(self.encoder_blocks(tokens + self.position_embeddings)[:, 0])
        return logits


class UnfoldViT(nn.Module):
    """ViT with linear patch embedding, positions in `nn.Embedding`, a norm in the encoder, and mean pooling."""

    def __init__(self):
        super().__init__()
        self.to_patch = nn.Linear(3 * 8 * 8, 24)
        self.pos_embedding = nn.Embedding(12, 24)
        block = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(block, 3, nn.LayerNorm(24), enable_nested_tensor=False)
        self.head = nn.Linear(24, 5)

    def forward(self, images):
        patches = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        tokens = self.transformer(self.to_patch(patches) + self.pos_embedding.weight)
        logits = self.head(tokens.mean(1))
        return logits


GELU = {"num_attention_heads": 8, "hidden_act": "gelu", "norm_first": True}
RELU = {"num_attention_heads": 4, "hidden_act": "relu", "norm_first": True, "image_size": [24, 32]}


def saved(model, folder, suffix=".pth"):
    """Save the weights of a model and return the path of the file."""
    file = folder / f"notebook{suffix}"
    torch.save(model.state_dict(), file) if suffix == ".pth" else save_file(model.state_dict(), file)
    return str(file)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    ("kind", "given", "size"),
    [(ConvolutionViT, GELU, (1, 28, 28)), (UnfoldViT, RELU, (3, 24, 32))],
    ids=["convolution", "unfold"],
)
def test_a_converted_model_has_the_logits_of_its_source(kind, given, size, suffix, tmp_path):
    source = kind().eval()
    model = HfViTForImageClassification.from_pretrained(saved(source, tmp_path, suffix), **given).eval()
    images = torch.randn(2, *size)
    with torch.no_grad():
        torch.testing.assert_close(model(images).logits, source(images), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (ConvolutionViT(), {}, "do not contain num_attention_heads .*; hidden_act .*; norm_first .*. Pass them as"),
        (ConvolutionViT(), {**GELU, "norm_first": False}, "norm_first=False is not supported: .*post-norm"),
        (ConvolutionViT(), {**GELU, "intermediate_size": 768}, "768 contradicts the weights, which have .*=2048"),
        (nn.ModuleList([ConvolutionViT().encoder_blocks, nn.Conv2d(3, 16, 4)]), GELU, "no LayerNorm after the last"),
        (nn.ModuleList([ConvolutionViT(), nn.Linear(10, 2)]), GELU, "have the same role"),
        (
            nn.ModuleDict({"vit": ConvolutionViT(), "patch_scale": nn.ParameterList([torch.ones(3)])}),
            GELU,
            "patch_scale.0 is unknown",
        ),
    ],
    ids=["required", "post-norm", "width", "norm", "two heads", "unknown"],
)
def test_other_models_are_refused(model, given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        HfViTModel.from_pretrained(saved(model, tmp_path), **given)
