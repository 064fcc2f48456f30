"""Convert checkpoints from and to other libraries, and compare converted models with their source."""

from .export import LAYOUTS, export_checkpoint
from .families import list_families
from .loading import TASKS, convert_checkpoint
from .model_card import families_table, write_conversion_card
from .parity import NoReferenceError, compare_with_source
from .processors import load_image_processor, load_processor, whole_image_processor
from .source import open_source


__all__ = [
    "LAYOUTS",
    "TASKS",
    "NoReferenceError",
    "compare_with_source",
    "convert_checkpoint",
    "export_checkpoint",
    "families_table",
    "list_families",
    "load_image_processor",
    "load_processor",
    "open_source",
    "whole_image_processor",
    "write_conversion_card",
]
