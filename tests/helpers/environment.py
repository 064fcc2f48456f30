"""The environment of tests: without a network, and with a home, caches and temporary files that end with pytest."""

import getpass
import os
import site
import tempfile
from pathlib import Path

from .network import refuse_network
from .processes import NO_COUNTING


PLACE = Path(tempfile.mkdtemp(prefix="hf_vit-tests-"))  # of this process
HOME, TEMPORARY = PLACE / "home", PLACE / "tmp"  # in which tests leave nothing


def isolate() -> None:
    """Keeps this process off the network and the home directory; libraries must not have been imported yet."""
    refuse_network()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for name, folder in {
        "MPLCONFIGDIR": Path(caches, "matplotlib"),  # fonts and compiled code take long: they stay for the next run
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"),
        "PYTHONUSERBASE": site.getuserbase(),
    }.items():
        os.environ.setdefault(name, str(folder))
    for name in [name for name in os.environ if name.startswith("HF_")]:
        del os.environ[name]
    HOME.mkdir()
    TEMPORARY.mkdir()
    # torch puts compiled headers beside temporary files, wherever its cache is: they stay for the next run too.
    headers = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    headers.mkdir(exist_ok=True)
    TEMPORARY.joinpath(headers.name).symlink_to(headers)
    folders = {"HF_HOME": "huggingface", "XDG_CACHE_HOME": "cache", "HYPOTHESIS_STORAGE_DIRECTORY": "hypothesis"}
    os.environ.update({name: str(PLACE / folder) for name, folder in folders.items()})
    os.environ.update(NO_COUNTING, HOME=str(HOME), NO_PROXY="*")
