"""Fixtures for the tests of image processors."""

import pytest

from ..helpers.images import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Return the image processor class that uses torchvision, or the one that uses PIL."""
    return BACKENDS[request.param]
