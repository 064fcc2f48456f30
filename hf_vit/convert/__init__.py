"""Published checkpoints of other libraries: in, checked, and out again."""

from .export import LAYOUTS, check_new_folder, export_checkpoint, new_folder
from .families import FAMILIES
from .image_processor import read_image_processor_file
from .loading import TASKS, Converted, convert_checkpoint, convert_pretrained, peak_memory
from .model_card import families_table, write_conversion_card
from .parity import NoReferenceError, OutputParity, compare_with_source
from .processors import load_image_processor, load_processor, load_tokenizer
from .source import Source, open_source


__all__ = [
    "FAMILIES",
    "LAYOUTS",
    "TASKS",
    "Converted",
    "NoReferenceError",
    "OutputParity",
    "Source",
    "check_new_folder",
    "compare_with_source",
    "convert_checkpoint",
    "convert_pretrained",
    "export_checkpoint",
    "families_table",
    "load_image_processor",
    "load_processor",
    "load_tokenizer",
    "new_folder",
    "open_source",
    "peak_memory",
    "read_image_processor_file",
    "write_conversion_card",
]
