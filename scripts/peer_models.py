"""The same image classifier from three libraries, for the benchmarks."""

from collections.abc import Callable

from timm.models import VisionTransformer
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.model.configuration_hf_vit import to_pair


def make_transformers_model(config: HfViTConfig) -> nn.Module:
    """Returns the architecture from transformers, with fresh weights."""
    names = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "layer_norm_eps"}
    names |= {"image_size", "patch_size", "num_channels"}
    shape = {name: value for name, value in config.to_dict().items() if name in names}
    return ViTForImageClassification(ViTConfig(**shape, num_labels=config.num_labels))


def make_timm_model(config: HfViTConfig) -> nn.Module:
    """Returns it from timm."""
    return VisionTransformer(
        img_size=to_pair(config.image_size),
        patch_size=to_pair(config.patch_size),
        in_chans=config.num_channels,
        num_classes=config.num_labels,
        embed_dim=config.hidden_size,
        depth=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        mlp_ratio=config.intermediate_size / config.hidden_size,
    )


MAKE_MODEL: dict[str, Callable[[HfViTConfig], nn.Module]] = {
    "hf_vit": HfViTForImageClassification,
    "transformers": make_transformers_model,
    "timm": make_timm_model,
}
