"""What collators of several tasks share."""

from collections.abc import Mapping
from typing import Any


def check_has(example: Mapping[str, Any], *names: str) -> None:
    """Raises `ValueError` if an example lacks a part of its target."""
    if missing := [name for name in names if name not in example]:
        raise ValueError(
            f"The examples have no target {', '.join(missing)}, only {', '.join(sorted(example))}. With the Trainer, "
            "set remove_unused_columns=False."
        )
