"""Checks for optional packages, and the commands that install them."""

from importlib.util import find_spec

from .model.configuration_hf_vit import INSTALL_COMMAND


def check_packages(purpose: str, *packages: str, extra: str = "train") -> None:
    """Raise `ImportError` with the command that installs `extra` if a package that `purpose` needs is missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ImportError(f"{purpose} needs {' and '.join(missing)}. Install: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return INSTALL_COMMAND.replace(" .", f' ".[{extra}]"')
