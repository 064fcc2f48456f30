"""The published families, one file each."""

from ..family import Family
from .timm_vit import TIMM
from .vit import VIT


FAMILIES: tuple[Family, ...] = (
    VIT,
    TIMM,
)

__all__ = ["FAMILIES"]
