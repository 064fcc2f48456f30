"""Helper function that checks an error message."""

from collections.abc import Callable
from typing import Any

import pytest


def expect_error(message: str, call: Callable, *arguments: Any, error: Any = ValueError, **options: Any) -> None:
    """Assert that a call raises an error whose text contains a match of `message`."""
    with pytest.raises(error, match=message):
        call(*arguments, **options)
