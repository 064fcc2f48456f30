"""The published families, one file each."""

from ..family import Family
from .vit import VIT


FAMILIES: tuple[Family, ...] = (VIT,)

__all__ = ["FAMILIES"]
