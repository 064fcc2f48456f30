"""The published families, one file each."""

from ..family import Family
from .vit import VIT


FAMILIES: tuple[Family, ...] = (VIT,)

# What models are exported to, by the name that the user gives.
EXPORTS: dict[str, Family] = {"vit": VIT}

__all__ = ["EXPORTS", "FAMILIES"]
