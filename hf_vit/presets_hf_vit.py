"""Published sizes of the Vision Transformer, as fields of `HfViTConfig` that differ from its defaults."""

from typing import Any


PRESETS: dict[str, dict[str, Any]] = {
    # ViT-Ti/16 and ViT-S/16 (DeiT, https://arxiv.org/abs/2012.12877)
    "tiny": {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768},
    "small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536},
    # ViT-B/16, ViT-L/16 and ViT-H/14 (ViT, https://arxiv.org/abs/2010.11929)
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "huge": {
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "intermediate_size": 5120,
        "patch_size": 14,
    },
    # ViT-So400m/14 (Getting ViT in Shape, https://arxiv.org/abs/2305.13035)
    "so400m": {
        "hidden_size": 1152,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "intermediate_size": 4304,
        "patch_size": 14,
    },
    # Handwritten digits. The usual 0.02 is made for tokens 768 wide; at 64 it leaves the attention even for long.
    "mnist": {
        "initializer_range": 0.1,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "image_size": 28,
        "patch_size": 4,
        "num_channels": 1,
        "num_labels": 10,
    },
}
