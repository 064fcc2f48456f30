"""Published checkpoints of other libraries: in, checked, and out again."""

from .loading import load_pretrained


__all__ = ["load_pretrained"]
