"""Published checkpoints of other libraries: in, checked, and out again."""

from .image_processor import read_image_processor_file
from .loading import read_published


__all__ = ["read_image_processor_file", "read_published"]
