"""DINOv2 of transformers, without and with registers (https://arxiv.org/abs/2304.07193, 2309.16588)."""

from dataclasses import replace
from functools import partial
from typing import Any

from ..family import Config, Family, Shapes, is_classifier, transformers_fields
from ..key_map import KeyMap, Reshaped, Rows
from .vit import ATTENTION
from .vit import KEYS as VIT_KEYS


KEYS: KeyMap = {
    **{name: rule for name, rule in VIT_KEYS.items() if "encoder" not in name and "pooler" not in name},
    "embeddings.mask_token": Reshaped(("embeddings.mask_token",), back=(1, -1)),
    "embeddings.register_tokens": "embeddings.register_tokens",
    "encoder.layers.*.norm1": "encoder.layer.*.norm1",
    **ATTENTION,
    "encoder.layers.*.layer_scale1.scale": "encoder.layer.*.layer_scale1.lambda1",
    "encoder.layers.*.norm2": "encoder.layer.*.norm2",
    "encoder.layers.*.mlp.fc1": "encoder.layer.*.mlp.fc1",
    "encoder.layers.*.mlp.fc2": "encoder.layer.*.mlp.fc2",
    "encoder.layers.*.mlp.gate": Rows(("encoder.layer.*.mlp.weights_in",), 0, 1, 2),
    "encoder.layers.*.mlp.up": Rows(("encoder.layer.*.mlp.weights_in",), 1, 2, 2),
    "encoder.layers.*.mlp.down": "encoder.layer.*.mlp.weights_out",
    "encoder.layers.*.layer_scale2.scale": "encoder.layer.*.layer_scale2.lambda1",
}


def configure(config: Config, shapes: Shapes, **defaults: Any) -> dict[str, Any]:
    """Returns the fields of a Dinov2Config, whose classifier takes the CLS token and the mean of the patches.

    `defaults` are those of a class for fields that config.json leaves out, where they differ from Dinov2Config.
    """
    fields = transformers_fields(config, **{"patch_size": 14, "layerscale_value": 1.0, **defaults})
    intermediate_size = int(fields.get("hidden_size", 768) * config.get("mlp_ratio", 4))
    if config.get("use_swiglu_ffn", False):
        intermediate_size = (int(intermediate_size * 2 / 3) + 7) // 8 * 8
        fields |= {"use_gated_mlp": True, "hidden_act": "silu"}
    return {
        **fields,
        "intermediate_size": intermediate_size,
        "use_mask_token": "embeddings.mask_token" in shapes,
        "pooling": "cls_mean" if is_classifier(shapes) else "cls",
    }


DINOV2 = Family(
    name="DINOv2",
    model_types=("dinov2",),
    keys=KEYS,
    configure=configure,
    prefixes=("dinov2.",),
    outputs="hidden states, pooled, logits, feature maps",
)
DINOV2_WITH_REGISTERS = replace(
    DINOV2,
    name="DINOv2 with registers",
    model_types=("dinov2_with_registers",),
    configure=partial(configure, patch_size=16, num_register_tokens=4, position_antialias=True),
    prefixes=("dinov2_with_registers.",),
)
