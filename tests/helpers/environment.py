"""The environment of tests: without a network, and with a home, caches and temporary files that end with pytest."""

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
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("MPLCONFIGDIR", str(Path(cache, "matplotlib")))  # fonts, which take seconds to find
    os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())
    for name in [name for name in os.environ if name.startswith("HF_")]:
        del os.environ[name]
    HOME.mkdir()
    TEMPORARY.mkdir()
    os.environ.update(NO_COUNTING)
    os.environ.update(
        HOME=str(HOME), XDG_CACHE_HOME=str(PLACE / "cache"), HF_HOME=str(PLACE / "huggingface"), NO_PROXY="*"
    )
