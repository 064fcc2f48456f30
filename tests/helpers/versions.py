"""Skip marks for tests that need newer versions of dependencies than the oldest supported ones."""

import pytest
import torch
import transformers
from packaging.version import Version


TORCH, TRANSFORMERS = Version(Version(torch.__version__).base_version), Version(transformers.__version__)


def needs(reason: str, torch: str = "0", transformers: str = "0") -> pytest.MarkDecorator:
    is_older = Version(torch) > TORCH or Version(transformers) > TRANSFORMERS
    return pytest.mark.skipif(is_older, reason=f"{reason} needs torch {torch} and transformers {transformers}")


# The image decoder of torchcodec does not load with torch 2.9; PIL decodes instead.
needs_torchcodec = needs("torchcodec", torch="2.10")
needs_chosen_states = needs("selecting hidden states by number", transformers="5.23")
needs_exporters = needs("the exporters of transformers", torch="2.11", transformers="5.23")
needs_int8_export = needs("the export of int8 layers", torch="2.10")
