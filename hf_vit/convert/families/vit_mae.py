"""MAE of transformers (https://arxiv.org/abs/2111.06377): the encoder."""

from ..family import Family
from .vit import KEYS, configure


# The position table is the file's own, as a learned one: the formula of "sincos2d" gives it to within rounding only,
# and not at all where the table has been resampled or trained on.
VIT_MAE = Family(
    name="MAE",
    source="transformers `vit_mae`",
    model_types=("vit_mae",),
    keys=KEYS,
    configure=configure,
    prefixes=("vit.",),
    dropped={r"decoder\..*": "the decoder, which the encoder does without"},
    outputs="hidden states of all patches, or of the visible ones",
)
