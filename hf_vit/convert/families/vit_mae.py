"""MAE of transformers (https://arxiv.org/abs/2111.06377)."""

from typing import Any

from torch import Tensor

from ...model.configuration_hf_vit import HfViTConfig
from ...model.task_configurations import HfViTMaskedImageModelingConfig
from ..family import Config, Family, Shapes, given_fields
from ..key_map import KeyMap, Made
from . import vit


HEAD = "masked_image_modeling_head.mae"
# As published, and as releases of transformers save it that rename `layers` in it too
BLOCKS = ("decoder.decoder_layers", "decoder.decoder_encoder.layer")


def without_cls(positions: Tensor) -> Tensor:
    """Returns the rows of the patches of the decoder's table (1, 1 + N, E); that of the CLS token must be zero."""
    if positions[:, 0].any():
        raise ValueError(
            "The CLS token has a position in the decoder of MAE that is not zero, which no such decoder starts with "
            "or learns. The file is damaged, or of another model."
        )
    return positions[:, 1:]


KEYS: KeyMap = {
    **vit.KEYS,
    f"{HEAD}.embedding": "decoder.decoder_embed",
    f"{HEAD}.mask_token": "decoder.mask_token",
    f"{HEAD}.position_embeddings": Made(("decoder.decoder_pos_embed",), without_cls),
    f"{HEAD}.norm": "decoder.decoder_norm",
    f"{HEAD}.predictor": "decoder.decoder_pred",
}


def adapt(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the keys of the decoder's blocks."""
    (theirs,) = [name for name in BLOCKS if f"{name}.0.layernorm_before.weight" in shapes] or BLOCKS[:1]
    return vit.block(f"{HEAD}.layers.*", f"{theirs}.*")


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of a ViTMAEConfig."""
    options = given_fields(config, HfViTMaskedImageModelingConfig.options_of("mae"), norm_pix_loss=False)
    ratio = config.get("mask_ratio", 0.75)
    if 0 < ratio < 1:  # 0 says that it is used for features
        options["mask_ratio"] = ratio
    return {**vit.configure(config, shapes), "masked_image_modeling_config": options}


# The position table is the file's own, as a learned one: the formula of "sincos2d" gives it to within rounding only,
# and not at all where the table has been resampled or trained on.
VIT_MAE = Family(
    name="MAE",
    model_types=("vit_mae",),
    keys=KEYS,
    adapt=adapt,
    configure=configure,
    prefixes=("vit.",),
    outputs="hidden states of all patches, or of the visible ones; pixels of masked patches",
)
