"""Start the command `hf-vit` without importing the package, because the import takes seconds.

This file is installed next to the package, as `hf_vit_cli`.
"""

import runpy
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run `main` of `hf_vit/cli.py`."""
    package = find_spec("hf_vit")  # find_spec locates the package without importing it.
    assert package is not None
    assert package.origin is not None
    runpy.run_path(str(Path(package.origin).with_name("cli.py")))["main"]()
