"""Families of published checkpoints, one module for each layout."""

from ..family import Family
from .clip import CLIP, SIGLIP, SIGLIP_2
from .dino import DINOV2, DINOV2_WITH_REGISTERS, DINOV3, EOMT, EOMT_DINOV3
from .dpt import DEPTH_ANYTHING, DPT, DPT_SEGMENTATION
from .google import BIG_VISION, GOOGLE
from .lw_detr import LW_DETR
from .meta import DINOV3_FILE, META_FILE
from .open_clip import CLIP_FILE, OPEN_CLIP, OPEN_CLIP_SIGLIP
from .timm_vit import TIMM
from .torch_encoder import TORCH_ENCODER
from .vit import DEIT, DEIT_ONE_HEAD, IJEPA, VIT, VIT_MAE, VIT_MSN, YOLOS
from .vitpose import VITPOSE


# In order of priority: the first family that supports a configuration is used.
FAMILIES: tuple[Family, ...] = (
    *(VIT, DEIT_ONE_HEAD, DEIT, VIT_MAE, VIT_MSN, IJEPA),
    *(DINOV2, DINOV2_WITH_REGISTERS, DINOV3),
    *(CLIP, SIGLIP, SIGLIP_2),
    *(YOLOS, LW_DETR, EOMT, EOMT_DINOV3, DPT_SEGMENTATION, DPT, DEPTH_ANYTHING, VITPOSE),
    *(TIMM, OPEN_CLIP_SIGLIP, OPEN_CLIP),
    # A file without a configuration belongs to the first family whose characteristic tensors (`marks`) it contains.
    *(GOOGLE, BIG_VISION, DINOV3_FILE, META_FILE, CLIP_FILE, TORCH_ENCODER),
)

__all__ = ["DEIT", "DINOV2", "DINOV2_WITH_REGISTERS", "FAMILIES", "TIMM", "VIT", "list_families"]


def list_families() -> list[str]:
    """Returns the names of the supported families of published checkpoints."""
    return list(dict.fromkeys(family.name for family in FAMILIES))
