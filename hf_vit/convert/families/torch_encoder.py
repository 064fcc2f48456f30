"""State dicts of ViTs that are built on `torch.nn.TransformerEncoder`, as in most tutorials and notebooks.

Tensor names differ from file to file. Each tensor is identified by the names in `nn.TransformerEncoderLayer`, by its
shape or by frequent names, and renamed to a common name before it is converted.
"""

import re
from typing import Any

from ..family import Config, Family, Shapes
from ..key_map import KeyMap, Reshaped, block_keys, parts
from .block_layout import table_size


IN_PROJECTION = re.compile(r"(.*)layers\.\d+\.self_attn\.in_proj_weight")
CLS_NAMES = {"cls", "cls_token", "class_token", "class_embedding", "cls_embedding"}
POSITION_NAMES = {
    *("pos", "pos_emb", "pos_embed", "pos_embeds", "pos_embedding", "pos_embeddings", "positions"),
    *("position_embedding", "position_embeddings", "positional_embedding", "positional_embeddings"),
    *("pos_encoding", "positional_encoding", "position_encoding"),
}
MARK = "torch_encoder.0.self_attn.in_proj_weight"
REQUIRED = {
    "num_attention_heads": "nhead of nn.TransformerEncoderLayer",
    "hidden_act": "its activation, 'relu' by default",
    "norm_first": "whether each layer starts with its norm, False by default",
}
# Fields of `HfViTConfig` that are inferred from the weights; other values given by the user raise an error
INFERRED = ("hidden_size", "intermediate_size", "patch_size", "num_labels")


def common_names(shapes: Shapes) -> dict[str, str]:
    """Maps the tensor names of a ViT on `nn.TransformerEncoder` to common names; returns `{}` for other files.

    Raises:
        ValueError: If the role of a tensor is unknown.
    """
    prefix = next((match[1] for name in shapes if (match := IN_PROJECTION.fullmatch(name))), None)
    if prefix is None:
        return {}
    names, width = dict[str, str](), shapes[f"{prefix}layers.0.norm1.weight"][0]
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        last = name.removesuffix(".weight").rpartition(".")[2]
        if name.startswith(f"{prefix}layers."):
            names[name] = f"torch_encoder.{name.removeprefix(f'{prefix}layers.')}"
        elif last in CLS_NAMES and shape[-1] == width:
            names[name] = "cls_token"
        elif last in POSITION_NAMES and shape[-1] == width:
            names[name] = "positions"
        elif leaf not in ("weight", "bias"):
            continue
        elif shapes.get(f"{module}.weight") == (width,):
            names[name] = f"norm.{leaf}"
        elif len(shapes.get(f"{module}.weight", ())) == 4 or re.search("patch|proj", module):
            names[name] = f"patches.{leaf}"
        elif len(shapes.get(f"{module}.weight", ())) == 2:
            names[name] = f"classifier.{leaf}"
    unknown = sorted(shapes.keys() - names.keys())
    twice = sorted(name for name, common in names.items() if list(names.values()).count(common) > 1)
    if unknown or twice:
        problem = (
            f"the role of {', '.join(unknown)} is unknown" if unknown else f"{', '.join(twice)} have the same role"
        )
        raise ValueError(
            f"The file is a ViT on nn.TransformerEncoder, but {problem}. Supported are one patch embedding, one CLS "
            "token, one table of positions, one norm after the layers, and a classifier of one linear layer."
        )
    return names


def configure(given: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig`, inferred from shapes and from the fields in `REQUIRED`.

    Raises:
        ValueError: If a required field is missing, a given field contradicts the weights, or the model is not
            supported because it has post-norm layers or no norm after the last layer.
    """
    if missing := [name for name in REQUIRED if given.get(name) is None]:
        wanted = "; ".join(f"{name} ({REQUIRED[name]})" for name in missing)
        raise ValueError(
            f"The weights of a ViT on nn.TransformerEncoder do not contain {wanted}. Pass them as arguments."
        )
    if not given["norm_first"]:
        raise ValueError(
            "norm_first=False is not supported: such layers normalize after attention and MLP (post-norm), but "
            "layers of hf_vit normalize before. Train the model again with norm_first=True."
        )
    if "norm.weight" not in shapes:
        raise ValueError(
            "The model has no LayerNorm after the last layer, which hf_vit requires. Run the original PyTorch code "
            "instead."
        )
    width = shapes["norm.weight"][0]
    patch = shapes["patches.weight"]
    channels = patch[1] if len(patch) == 4 else given.get("num_channels", 3)
    side = patch[2] if len(patch) == 4 else round((patch[1] / channels) ** 0.5)
    if len(patch) == 2 and channels * side**2 != patch[1]:
        raise ValueError(
            f"The patch embedding has {patch[1]} inputs, which do not form square patches with "
            f"num_channels={channels}. Pass the correct num_channels."
        )
    size = [side, patch[3]] if len(patch) == 4 and patch[3] != side else side
    fields = {
        "hidden_size": width,
        "intermediate_size": shapes["torch_encoder.0.linear1.weight"][0],
        "num_hidden_layers": 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("torch_encoder.")),
        "num_attention_heads": given["num_attention_heads"],
        "hidden_act": given["hidden_act"],
        "layer_norm_eps": given.get("layer_norm_eps", 1e-5),
        "num_channels": channels,
        "patch_size": size,
        "use_cls_token": "cls_token" in shapes,
        "pooling": "cls" if "cls_token" in shapes else "mean",
        "position_embedding_type": "learned" if "positions" in shapes else "none",
        "image_size": given.get("image_size", 224),
    }
    if "classifier.weight" in shapes:
        fields["num_labels"] = shapes["classifier.weight"][0]
    for name in INFERRED:
        if name in fields and given.get(name, fields[name]) != fields[name]:
            raise ValueError(f"{name}={given[name]} contradicts the weights, which have {name}={fields[name]}.")
    if "positions" in shapes:
        counts, sides = (int(fields["use_cls_token"]), 0), [size, size] if isinstance(size, int) else size
        rows = shapes["positions"][-2]
        fields["image_size"], extra = table_size(rows, counts, sides, wanted=given.get("image_size"))
        fields["prefix_has_position"] = extra > 0
    return fields


KEYS: KeyMap = {
    "embeddings.cls_token": Reshaped(("cls_token",)),
    "embeddings.position_embeddings": Reshaped(("positions",)),
    "embeddings.patch_embeddings.projection.weight": Reshaped(("patches.weight",)),
    "embeddings.patch_embeddings.projection.bias": "patches.bias",
    **block_keys(
        "encoder.layers.*",
        "torch_encoder.*",
        ("norm1", "self_attn.in_proj", "self_attn.out_proj", "norm2", "linear1", "linear2"),
    ),
    "encoder.layers.*.attention.qkv.weight": "torch_encoder.*.self_attn.in_proj_weight",
    "encoder.layers.*.attention.qkv.bias": "torch_encoder.*.self_attn.in_proj_bias",
    **parts("", "", "norm classifier"),
}
TORCH_ENCODER = Family(
    name="ViT on nn.TransformerEncoder",
    files="state dict of PyTorch, pre-norm",
    marks=(MARK,),
    keys=KEYS,
    configure=configure,
    images="torch",
    outputs="last hidden state, pooled, logits",
)
