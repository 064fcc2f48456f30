"""Checks whether optional packages are installed, and commands that install them."""

from importlib.util import find_spec

from .model.configuration_hf_vit import INSTALL_COMMAND


def check_packages(purpose: str, *packages: str, extra: str = "train") -> None:
    """Raise `ImportError` if a package is missing. The message has `purpose` and a command that installs `extra`."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ImportError(f"{purpose} needs {' and '.join(missing)}. Install: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return INSTALL_COMMAND.replace(" .", f' ".[{extra}]"')
