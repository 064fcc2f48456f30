"""Fixtures of the image processor tests."""

import pytest

from ..helpers.images import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Return the image processor class of torchvision or of PIL."""
    return BACKENDS[request.param]
