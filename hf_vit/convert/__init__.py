"""Published checkpoints of other libraries: in, checked, and out again."""

from .loading import read_published


__all__ = ["read_published"]
